"""The plot of `batchinf plan --plot`."""

import pathlib
from collections.abc import Iterator
from typing import Any

from batchinf.base.chart import CHART_MARK, bars, svg_of
from batchinf.base.errors import UserError
from batchinf.base.storage import has_mark, naming_option, refuse_foreign, write_named
from batchinf.commands.plan.report import GpuPlan, PlanReport
from batchinf.model.memory import GIB
from batchinf.planning.degrees import shape_text

_SPEED = "tokens/s per GPU"
_HOURS = "GPU-hours without the start"
_PARTS = ("weights", "KV cache", "activations and graphs")
_CHOSEN = "chosen"
_OTHER = "other degrees"


def check_file(file: str) -> None:
    """Raise UserError unless a plot may have this name: a drawing of the user, or the spec, would be lost."""
    if not file.lower().endswith(".svg"):
        raise UserError(f"--plot: got '{file}'; the plot is SVG, so give a name that ends with .svg")
    with naming_option(file, "--plot"):
        refuse_foreign(pathlib.Path(file), lambda there: has_mark(there, CHART_MARK))


def write_chart(report: PlanReport, file: str) -> None:
    """Write the plot as SVG. Raises OutputError if the file cannot be written."""
    svg = plan_chart(report).encode()
    with naming_option(file, "--plot"):
        write_named(pathlib.Path(file), svg, CHART_MARK)


def plan_chart(report: PlanReport) -> str:
    """Of a job: tokens/s of one GPU, and GPU-hours, at each degree that fits. Of a model: the memory of one GPU."""
    if not any(plan.seconds is not None for plan in report.gpus):
        values = [value for plan in report.gpus for value in _memory(plan)]
        color: dict[str, Any] = {"field": "part", "type": "nominal", "title": None, "sort": _PARTS}
        chart = {"data": {"values": values}, **bars("GiB", "GPUs", sort=None, color=color, order={"field": "place"})}
        return svg_of({"title": f"{report.model.name}: memory of each GPU at the least degree", **chart})
    values = [value for plan in report.gpus for value in _options(plan)]
    colors = {"domain": [_CHOSEN, _OTHER], "range": ["#4c78a8", "#bab0ac"]}
    color = {"field": "is", "title": None, "scale": colors}
    panels = [bars(field, "GPUs", sort=None, color=color) for field in (_SPEED, _HOURS)]
    panels[1]["width"] /= 2
    panels[1]["encoding"]["y"]["axis"] = None  # the second panel has the same rows
    title = f"{report.model.name}, {report.job.path if report.job else ''}"
    return svg_of({"title": title, "data": {"values": values}, "hconcat": panels})


def _options(plan: GpuPlan) -> Iterator[dict[str, Any]]:
    for option in plan.options:
        if option.prediction is not None:
            num_gpus = option.data * option.degrees.num_devices
            yield {
                "GPUs": f"{num_gpus} × {plan.gpu.name}: {shape_text(option.degrees, option.data)}",
                _SPEED: option.tokens_per_s / num_gpus,
                _HOURS: option.prediction.seconds * num_gpus / 3600,
                "is": _CHOSEN if option == plan.chosen else _OTHER,
            }


def _memory(plan: GpuPlan) -> Iterator[dict[str, Any]]:
    shown = plan.needs if plan.chosen is None else plan.chosen.degrees
    if shown is None or plan.why_not is not None:
        return
    room = plan.share * plan.gpu.memory_bytes - shown.weight_bytes - shown.step_bytes
    sizes = (shown.weight_bytes, max(0.0, room), shown.step_bytes)
    name = f"{shown.num_devices} × {plan.gpu.name}"
    for place, (part, size) in enumerate(zip(_PARTS, sizes, strict=True)):
        yield {"GPUs": name, "part": part, "GiB": size / GIB, "place": place}
