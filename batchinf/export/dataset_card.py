"""The card of an exported dataset: what the hub reads, the facts of the job, and its spec."""

import yaml

from batchinf.base.paths import shown_url
from batchinf.base.text import counted, short_count
from batchinf.export.base import ExportedJob
from batchinf.export.huggingface import job_mark
from batchinf.results import Results


def rows_mark(results: Results, split: str) -> str:
    """The line of a card that says which rows of which job the dataset has, if it has all of them."""
    return f"{job_mark(results.job_id)}rows={results.digest} split={split} -->"


def card_of(job: ExportedJob, num_rows: int, where: str | None, *, split: str, is_whole: bool) -> str:
    """The text of the card. num_rows: how many rows are exported. where: the expression that chose them.

    is_whole: all rows and columns are exported.
    """
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
        "speed": _speed(results),
        "device": made_with.get("device", "unknown"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    if job.spec.scripted is not None:
        facts["answers"] = "invented by the scripted engine"
    # Without `configs`: with them, `datasets` takes its copy of another folder of the same name for this one.
    head = yaml.safe_dump({"tags": ["batchinf"]})
    own = job.spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    if "://" in str(path := own["input"].get("path", "")):
        own["input"]["path"] = shown_url(path)  # a URL may have a key in its query
    spec = yaml.safe_dump(own, sort_keys=False, allow_unicode=True)
    table = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    mark = rows_mark(results, split) if is_whole else f"{job_mark(results.job_id)}-->"
    return (
        f"---\n{head}---\n\n# Outputs of {job.spec.model.name}\n\n"
        f"{counted(num_rows, 'row')} of a job of batchinf.\n\n"
        f"| | |\n| --- | --- |\n{table}\n## Spec\n\n```yaml\n{spec}```\n\n{mark}\n"
    )


def _speed(results: Results) -> str:
    if (speed := results.speed) is None:
        return "unknown"
    prompt = short_count(speed.prompt_tokens_per_s)
    return f"{prompt} prompt and {short_count(speed.output_tokens_per_s)} output tokens/s in its last run"
