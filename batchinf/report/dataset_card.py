"""The card of an exported dataset: what the hub reads, the facts of the job, its spec, and plots of its rows."""

import itertools
import re
from collections.abc import Iterator

import yaml

from batchinf.base.text import clip, counted
from batchinf.export.base import ExportedJob
from batchinf.export.huggingface import CARD, DATA, PLOTS
from batchinf.manifest.look import Look
from batchinf.report.charts import histogram_chart, shares_chart
from batchinf.report.html import light_colors
from batchinf.report.rows import RowFigures, row_figures

_SCALE = 2.0  # pixels for each point of a chart, so that it is sharp
_UNSAFE = re.compile("[^a-z0-9]+")
_MARKUP = re.compile(r"[\[\]<>\\]")  # titles have names of columns, which come from other people


def card_files(out: str, job: ExportedJob, num_rows: int, where: str | None) -> dict[str, bytes]:
    """The card and its plots, by the name of the file in the dataset.

    out: the folder of the job. num_rows: how many rows are exported. where: the expression that chose them. The plots
    show all rows of the job.
    """
    files: dict[str, bytes] = {}
    shown = ""
    for number, (title, image) in enumerate(_plots(row_figures(Look(out))), start=1):
        name = f"{PLOTS}/{number:02}-{_UNSAFE.sub('-', title.lower())[:60]}.png"
        files[name] = image
        shown += f"{_MARKUP.sub(' ', clip(title))}:\n\n![]({name})\n\n"
    files[CARD] = _card(job, num_rows, where, shown).encode()
    return files


def _card(job: ExportedJob, num_rows: int, where: str | None, plots: str) -> str:
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
        f"| | |\n| --- | --- |\n{table}\n## All rows of the job\n\n{plots}## Spec\n\n```yaml\n{spec}```\n"
    )


def _plots(figures: RowFigures) -> Iterator[tuple[str, bytes]]:
    """Titles and PNG images of the charts of the rows that the report has too."""
    for histogram in itertools.chain(figures.lengths, figures.numbers, figures.tokens):
        if histogram.bins:
            yield histogram.title, _png(histogram_chart(histogram))
    for title, shares in (("finish_reason", figures.finish_reasons), (figures.labels_of, figures.labels)):
        if shares:
            yield title, _png(shares_chart(shares, title))


def _png(svg: str) -> bytes:
    """A chart of the report as an image with a white background: a card has no colours of its own."""
    import vl_convert  # a large library, which few commands need

    colors = light_colors()
    svg = re.sub(r"var\((--\w+)\)", lambda variable: colors[variable[1]], svg)
    background = f'<rect width="100%" height="100%" fill="{colors["--back"]}"/>'
    return bytes(vl_convert.svg_to_png(svg.replace(">", f">{background}", 1), scale=_SCALE))
