"""The card of an exported dataset: what the hub reads, the facts of the job, and its spec."""

import yaml

from batchinf.base.text import counted
from batchinf.export.base import ExportedJob
from batchinf.export.huggingface import DATA


def card_of(job: ExportedJob, num_rows: int, where: str | None) -> str:
    """The text of the card. num_rows: how many rows are exported. where: the expression that chose them."""
    results = job.results
    counts = results.counts
    made_with = results.facts()
    versions = {name.removeprefix("version."): it for name, it in made_with.items() if name.startswith("version.")}
    facts = {
        "model": f"`{job.spec.model.name}`",
        "task": f"`{job.task.name}`",
        "rows": f"{num_rows:,}" if where is None else f"{num_rows:,}, those with `{where}`",
        "error rows of the job": f"{counts.num_errors:,}",
        "tokens of the job": f"{counts.num_prompt_tokens:,} of prompts, {counts.num_output_tokens:,} of outputs",
        "job": f"`{results.job_id}`, begun {results.begun_at:%Y-%m-%d %H:%M} UTC",
        "device": made_with.get("device", "unknown"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    data = [{"config_name": "default", "data_files": [{"split": "train", "path": f"{DATA}/*.parquet"}]}]
    head = yaml.safe_dump({"configs": data, "tags": ["batchinf"]}, sort_keys=False)
    own = job.spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    spec = yaml.safe_dump(own, sort_keys=False, allow_unicode=True)
    table = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    return (
        f"---\n{head}---\n\n# Outputs of {job.spec.model.name}\n\n"
        f"{counted(num_rows, 'row')} of a job of batchinf.\n\n"
        f"| | |\n| --- | --- |\n{table}\n## Spec\n\n```yaml\n{spec}```\n"
    )
