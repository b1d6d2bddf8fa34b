"""The report of `batchinf plan` as text."""

from collections.abc import Iterator

from batchinf.base.text import counted, duration, short_count, size_text, time_taken
from batchinf.commands.plan import GpuPlan, JobPlan, ModelPlan, PlanReport
from batchinf.commands.text.validate import bar_lines
from batchinf.model.memory import GIB, gib
from batchinf.planning.choose import Option, shape_text


def plan_lines(report: PlanReport) -> Iterator[str]:
    """The lines of a report."""
    yield from _model_lines(report.model)
    if report.job is not None:
        yield ""
        yield from _job_lines(report.job)
    yield ""
    yield from _table(report)
    for plan in report.gpus:
        if plan.seconds is not None and len(report.gpus) == 1:
            yield ""
            yield from _option_lines(plan)
            if report.job is not None:
                yield from _share_lines(plan, report.job.num_rows)
    yield from report.notes
    if report.choice:
        yield ""
        yield f"choice: {report.choice}"


def _model_lines(model: ModelPlan) -> Iterator[str]:
    kind = f"{model.quantization} and {model.dtype}" if model.quantization else model.dtype
    counted = f"{short_count(model.num_parameters)} parameters, " if model.num_parameters else ""
    yield f"model {model.name}: {', '.join(model.architectures) or 'of unknown architecture'}; {counted}{kind}"
    if model.weight_bytes is not None:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in model.parts if size)
        yield f"  weights {size_text(model.weight_bytes)} = {gib(model.weight_bytes)}{f' ({parts})' if parts else ''}"
    if model.token_bytes is not None and model.context_bytes is not None:
        yield (
            f"  KV cache in {model.cache_dtype}: {gib(model.context_bytes)} for one sequence of {model.context:,} "
            f"tokens; {model.token_bytes:,} bytes for each more"
        )
    for why in model.unknown:
        yield f"  unknown: {why}"


def _job_lines(job: JobPlan) -> Iterator[str]:
    about = "about " if job.is_estimated else ""
    more = "" if job.num_requests == job.num_rows else f", {about}{job.num_requests:,} requests"
    read = "" if job.num_sampled == job.num_rows and not job.is_estimated else f"; {job.num_sampled:,} rows read"
    yield f"input {job.path}: {about}{job.num_rows:,} rows{more}{read}"
    yield "prompt lengths in tokens:"
    yield from bar_lines(job.histogram)
    error = f" ± {job.prompt_error:.1%}" if job.prompt_error else ""
    yield f"  prompts of {job.prompt:,.0f} tokens{error} on average; prompt and output at most {job.longest:,}"
    if job.output:
        yield f"  outputs of {job.output:,.0f} tokens on average: {job.output_from}"
    free = "" if job.free_bytes is None else f"; {size_text(job.free_bytes)} are free"
    yield f"  output about {size_text(job.output_bytes)}{free}; host memory {gib(job.host_bytes)} for each GPU"


def _option_lines(plan: GpuPlan) -> Iterator[str]:
    for option in plan.options:
        yield f"{'→' if option == plan.chosen else ' '} {option_line(option)}"
    cost = "" if plan.cost is None else f", cost {plan.cost:,.2f}"
    yield f"  in all {duration(plan.seconds)} with the start, {plan.gpu_hours or 0:,.2f} GPU-hours{cost}"


def _share_lines(plan: GpuPlan, num_rows: int) -> Iterator[str]:
    """How many replicas the rows keep busy."""
    if plan.chosen is not None and (data := plan.chosen.data) > 1:
        busy, each = min(num_rows, data), -(-num_rows // data)
        yield f"  {counted(num_rows, 'row')} keep {busy:,} of {data:,} replicas busy, with {each:,} or fewer for each"


# With short numbers they fit a terminal of 80.
_HEADS = ("GPU", "GiB", "least", "weights", "cache", "seqs")
_JOB_HEADS = ("tokens/s", "time", "GPU-h", "cost")


def _table(report: PlanReport) -> Iterator[str]:
    heads = (
        _HEADS if report.job is None else (*_HEADS, *_JOB_HEADS[: 3 + any(it.cost is not None for it in report.gpus)])
    )
    rows = [heads, *map(_row, report.gpus)]
    # A reason takes the place of the last columns.
    widths = [
        max(len(row[column]) for row in rows if len(row) > max(column, 4) or column < 3) for column in range(len(heads))
    ]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
    if any(len(row) > 4 for row in rows[1:]):
        size = f"{report.model.context:,} tokens"
        yield f"least: GPUs that hold the model; weights: of one GPU; cache: in tokens; seqs: sequences of {size} in it"


def _row(plan: GpuPlan) -> tuple[str, ...]:
    head = (plan.gpu.name, f"{plan.gpu.memory_bytes / GIB:.1f}")
    if plan.why_not is not None:
        return (*head, "no", plan.why_not)
    needs = plan.needs
    if needs is None:
        return (*head, "no", f"{gib(plan.missing_bytes)} a GPU are missing" if plan.missing_bytes else "unknown")
    degree = f"{needs.num_devices}" if needs.pipeline == 1 else f"{needs.tensor} × {needs.pipeline}"
    shown = plan.chosen.degrees if plan.chosen is not None else needs
    if plan.chosen is None:
        return (*head, degree, f"not on {plan.num_gpus}: {gib(plan.missing_bytes)} a GPU are missing")
    sequences = f"{shown.sequences:.1f}" if shown.sequences < 100 else short_count(shown.sequences)
    cells = (*head, degree, gib(shown.weight_bytes), short_count(shown.cache_tokens), sequences)
    if plan.seconds is None or plan.gpu_hours is None:
        return cells
    cost = () if plan.cost is None else (f"{plan.cost:,.2f}",)
    return (*cells, f"{plan.chosen.tokens_per_s:,.0f}", duration(plan.seconds), f"{plan.gpu_hours:,.2f}", *cost)


def option_line(option: Option) -> str:
    """One line for an option of a job."""
    degrees, prediction = option.degrees, option.prediction
    parts = [shape_text(degrees, option.data), f"{degrees.cache_tokens:,} tokens of cache"]
    if prediction is not None:
        parts += [f"{option.tokens_per_s:,.0f} tokens/s", time_taken(prediction.seconds)]
    return ": ".join([parts[0], ", ".join(parts[1:])])
