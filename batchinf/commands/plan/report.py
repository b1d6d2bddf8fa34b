"""The plan of a model or a job, and its lines. `make_plan` fills it in."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchinf.base.cost import Cost
from batchinf.base.text import counted, duration, short_count, size_text, time_taken
from batchinf.model.memory import GIB, gib
from batchinf.planning.accuracy import SpeedRange
from batchinf.planning.degrees import Degrees, Option, shape_text
from batchinf.planning.gpus import Gpu

# With short numbers they fit a terminal of 80.
_HEADS: tuple[str, ...] = ("GPU", "GiB", "least", "weights", "cache", "seqs")
_JOB_HEADS = ("tokens/s", "time", "GPU-h", "cost")
_WARNING = "warning: "  # begins notes that stand above the table
_FAR = 1.5  # the sequences that run, as a multiple of vLLM's worst case, from which on plan explains the difference


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's memory on one device. Sizes are in bytes; None if unknown."""

    name: str
    architectures: tuple[str, ...]
    dtype: str
    quantization: str
    num_parameters: int
    """0 if the parameters were not counted. Those of image and audio encoders are not among them."""
    weight_bytes: int | None
    parts: tuple[tuple[str, int], ...]
    """Bytes of the weights by part."""
    cache_dtype: str
    token_bytes: int | None
    """Cache of one more token of a long sequence."""
    context: int
    """Tokens of the longest sequence."""
    context_bytes: int | None
    """Cache of one sequence of `context` tokens."""
    unknown: tuple[str, ...]
    """Why sizes are unknown."""

    def lines(self) -> Iterator[str]:
        kind = f"{self.quantization} and {self.dtype}" if self.quantization else self.dtype
        parameters = f"{short_count(self.num_parameters)} parameters, " if self.num_parameters else ""
        yield f"model {self.name}: {', '.join(self.architectures) or 'of unknown architecture'}; {parameters}{kind}"
        if self.weight_bytes is not None:
            yield f"  weights {size_text(self.weight_bytes)} = {gib(self.weight_bytes)}{self._parts_text()}"
        if self.token_bytes is not None and self.context_bytes is not None:
            yield (
                f"  KV cache in {self.cache_dtype}: {gib(self.context_bytes)} for one sequence of {self.context:,} "
                f"tokens; {self.token_bytes:,} bytes for each more"
            )
        for why in self.unknown:
            yield f"  unknown: {why}"

    def _parts_text(self) -> str:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in self.parts if size)
        return f" ({parts})" if parts else ""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's rows, from a sample of them."""

    path: str
    num_rows: int
    is_estimated: bool
    """Whether `num_rows` may be an estimate, because the input was not scanned."""
    num_sampled: int
    num_requests: int
    prompt: float
    """Tokens of a prompt, on average."""
    prompt_error: float
    """Half of the 95 % interval of that mean, as a share of it."""
    longest: int
    """The most tokens of a prompt and its output together."""
    output: float
    """Tokens of a request's output, on average."""
    output_from: str
    """Where that number comes from, in words."""
    output_bytes: int
    """Output of all rows."""
    free_bytes: int | None
    """What is free on the disk."""
    host_bytes: int
    """Memory that a replica takes of the host, for each of its GPUs."""
    max_model_len: int | None = None
    """If it is `auto`, the number by the sampled rows; None: the model's own."""

    def lines(self) -> Iterator[str]:
        about = "about " if self.is_estimated else ""
        more = "" if self.num_requests == self.num_rows else f", {about}{self.num_requests:,} requests"
        read = (
            "" if self.num_sampled == self.num_rows and not self.is_estimated else f"; {self.num_sampled:,} rows read"
        )
        yield f"input {self.path}: {about}{self.num_rows:,} rows{more}{read}"
        error = f" ± {self.prompt_error:.1%}" if self.prompt_error else ""
        yield f"  prompts of {self.prompt:,.0f} tokens{error} on average; prompt and output at most {self.longest:,}"
        if self.output:
            yield f"  outputs of {self.output:,.0f} tokens on average: {self.output_from}"
        free = "" if self.free_bytes is None else f"; {size_text(self.free_bytes)} are free"
        host = f"host memory {gib(self.host_bytes)} for each GPU"
        yield f"  output about {size_text(self.output_bytes)}{free}; {host}"


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A model, or a job, on GPUs of one kind."""

    gpu: Gpu
    num_gpus: int
    """GPUs of all nodes."""
    share: float
    """gpu_memory_utilization, lower where other programs use a part of the memory."""
    why_not: str | None
    """Why the model cannot run on this kind at all; None if it can."""
    needs: Degrees | None = None
    """The least degrees on any number of GPUs."""
    missing_bytes: int = 0
    """What each GPU lacks at the largest legal degree of these GPUs."""
    refusal: str = ""
    """Why there is no choice, in words."""
    options: tuple[Option, ...] = ()
    """All degrees that fit these GPUs."""
    chosen: Option | None = None
    """The best of the options."""
    reason: str = ""
    """Why it is the best, in a sentence."""
    accuracy: SpeedRange | None = None
    """How far such jobs were from their predictions; None without a prediction."""
    seconds: float | None = None
    """Time of the job."""
    gpu_hours: float | None = None
    """GPU-hours of the job."""
    cost: Cost | None = None
    """Of the job; None without a price."""

    def option_lines(self) -> Iterator[str]:
        """The options, and what the job takes with the best one."""
        for option in self.options:
            arrow = "→" if option == self.chosen else " "
            has_time = option.prediction is not None and self.seconds is not None
            time = f", {time_taken(option.prediction.seconds)}" if option.prediction is not None and has_time else ""
            yield f"{arrow} {_option_text(option)}{time}"
        if self.seconds is not None:
            cost = "" if self.cost is None else f", {self.cost.text}"
            yield f"  in all {duration(self.seconds)} with the start, {self.gpu_hours or 0:,.2f} GPU-hours{cost}"

    @property
    def chosen_text(self) -> str:
        """The chosen degrees with their cache and speed; of a plan that has a choice."""
        assert self.chosen is not None
        return _option_text(self.chosen)

    def share_lines(self, num_rows: int, num_requests: int) -> Iterator[str]:
        """How many replicas the rows keep busy, and how many rows keep all of them full."""
        if self.chosen is None or self.chosen.prediction is None:
            return
        data = self.chosen.data
        rows = counted(num_rows, "row")
        if data > 1:
            each = -(-num_rows // data)
            yield f"  {rows} keep {min(num_rows, data):,} of {data:,} replicas busy, with {each:,} or fewer for each"
        at_once = self.chosen.prediction.at_once
        needed = math.ceil(at_once * data * num_rows / max(1, num_requests))
        if needed > num_rows:
            whose = "it" if data == 1 else "them"
            yield f"  a replica runs up to {at_once:,} requests at a time: {needed:,} rows or more keep {whose} full"

    def cells(self) -> tuple[str, ...]:
        """The row of the table of GPUs. A reason takes the place of the last columns."""
        head = (self.gpu.name, f"{self.gpu.memory_bytes / GIB:.1f}")
        if self.why_not is not None:
            return (*head, "no", self.why_not)
        needs = self.needs
        if needs is None:
            return (*head, "no", self.refusal)
        degree = f"{needs.num_devices}" if needs.pipeline == 1 else f"{needs.tensor} × {needs.pipeline}"
        if self.chosen is None:
            return (*head, degree, f"not on {self.num_gpus}: {self.refusal}")
        shown = self.chosen.degrees
        sequences = _sequences_text(shown.sequences)
        cells = (*head, degree, gib(shown.weight_bytes), short_count(shown.cache_tokens), sequences)
        if self.seconds is None or self.gpu_hours is None:
            return cells
        cost = () if self.cost is None else (f"{self.cost.total:,.2f}",)
        return (*cells, f"{self.chosen.tokens_per_s:,.0f}", duration(self.seconds), f"{self.gpu_hours:,.2f}", *cost)


def _option_text(option: Option) -> str:
    cache = f"{option.degrees.cache_tokens:,} tokens of cache for each replica"
    speed = "" if option.prediction is None else f", {option.tokens_per_s:,.0f} tokens/s"
    return f"{shape_text(option.degrees, option.data)}: {cache}{speed}"


def _sequences_text(number: float) -> str:
    return f"{number:.1f}" if number < 100 else short_count(number)


def _width(rows: Sequence[tuple[str, ...]], column: int) -> int:
    """The width of a column. A reason takes the place of the last columns, and may be longer than they are."""
    return max(len(row[column]) for row in rows if len(row) > max(column, 4) or column < 3)


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport:
    """The whole plan. `print`, and a notebook, show its lines."""

    model: ModelPlan
    job: JobPlan | None
    """None for a model."""
    gpus: tuple[GpuPlan, ...]
    notes: tuple[str, ...]
    """What could not be looked at."""
    choice: str
    """Empty if nothing fits."""
    advice: tuple[str, ...] = ()
    """Changes that hold a model that does not fit, or leave more cache; of a plan for one kind of GPU."""

    def lines(self) -> Iterator[str]:
        yield from self.model.lines()
        if self.job is not None:
            yield ""
            yield from self.job.lines()
        warnings = [note for note in self.notes if note.startswith(_WARNING)]
        if warnings:
            yield ""
            yield from warnings
        yield ""
        yield from self._table()
        if len(self.gpus) == 1 and self.gpus[0].chosen is not None:
            yield ""
            yield from self.gpus[0].option_lines()
            if self.job is not None:
                yield from self.gpus[0].share_lines(self.job.num_rows, self.job.num_requests)
        yield from (note for note in self.notes if not note.startswith(_WARNING))
        if self.advice:
            yield ""
            yield "to fit, or for more cache, on as many GPUs:"
            yield from (f"  {line}" for line in self.advice)
        if self.choice:
            yield ""
            yield f"choice: {self.choice}"

    def _table(self) -> Iterator[str]:
        heads = _HEADS
        has_time = self.job is not None or any(plan.seconds is not None for plan in self.gpus)
        if has_time:
            has_cost = any(plan.cost is not None for plan in self.gpus)
            heads += _JOB_HEADS if has_cost else _JOB_HEADS[:-1]
        rows = [heads, *(plan.cells() for plan in self.gpus)]
        widths = [_width(rows, column) for column in range(len(heads))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        yield from self._legend(has_sizes=any(len(row) > 4 for row in rows[1:]), has_time=has_time)

    def _legend(self, *, has_sizes: bool, has_time: bool) -> Iterator[str]:
        """What the columns of the table mean. has_sizes: a row has values in them, not only a reason."""
        if has_sizes:
            size = f"{self.model.context:,} tokens"
            yield (
                "least: GPUs that hold the model; weights: of one GPU; cache: in tokens; seqs: sequences of "
                f"{size} in it"
            )
        pipelines = [plan.needs for plan in self.gpus if plan.needs is not None and plan.needs.pipeline > 1]
        if pipelines:
            first = pipelines[0]
            yield (
                f"least {first.tensor} × {first.pipeline}: tensor {first.tensor} × pipeline {first.pipeline}, which is "
                f"{first.num_devices} GPUs"
            )
        yield from self._window_lines()
        known = [(plan.chosen.tokens_per_s, plan.accuracy) for plan in self.gpus if plan.chosen and plan.accuracy]
        if known and (has_time or len(self.gpus) == 1):
            speed, accuracy = known[0]
            here = "" if len(self.gpus) > 1 else f", here {accuracy.low * speed:,.0f} to {accuracy.high * speed:,.0f}"
            yield (
                f"tokens/s: of prompts and outputs; on H100s and H200s, {accuracy.kind} made {accuracy.low:.2f} to "
                f"{accuracy.high:.2f} of the prediction{here}"
            )

    def _window_lines(self) -> Iterator[str]:
        """How many sequences run where vLLM's worst case is far lower, because layers have a sliding window."""
        for plan in self.gpus:
            if plan.chosen is not None and plan.chosen.degrees.decoding > _FAR * plan.chosen.degrees.sequences:
                yield (
                    "seqs is vLLM's worst case, in which layers with a sliding window also keep all tokens of a step. "
                    f"While sequences generate, these layers keep the window, and {plan.gpu.name} has room for "
                    f"{_sequences_text(plan.chosen.degrees.decoding)}"
                )
                return

    def __repr__(self) -> str:
        return "\n".join(self.lines())
