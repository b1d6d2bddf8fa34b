"""`batchinf plan`: what a model or a job needs, and how long it takes, on GPUs that need not be here.

`text.plan` makes lines of the report.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from batchinf.base.errors import InputError, ModelError, UserError
from batchinf.commands.shown_rows import LengthRange, histogram
from batchinf.fleet.settings import chosen_arguments
from batchinf.job.disk_space import free_bytes
from batchinf.job.model_len import length_warning, rounded
from batchinf.job.open import with_length
from batchinf.model.identity import Model, resolve
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, Fit, Needs, fit_of
from batchinf.planning.choose import Machine, Option, best, options, reason_for
from batchinf.planning.degrees import MOST_DEVICES, Degrees, degrees_of, that_fit
from batchinf.planning.gpus import GPUS, Gpu, gpu_named, why_not
from batchinf.planning.lengths import lengths_of, opened
from batchinf.planning.throughput import Shape, Workload, shape_of
from batchinf.spec.file import Overrides, SpecFile, SpecSource, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_NODE = 8  # GPUs of a host, unless --gpus says more
_START_S = 90.0  # of engines with cold caches (benchmarks/RESULTS.md)
_PROCESS_BYTES = 6 * GIB  # of the host, for a worker, its engine and its replica; weights are read through page cache


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """What the user asked for. gpus: names; empty: all of the table. gpus_per_node: None: as many as are needed.

    free_gib: memory of each GPU that other programs leave. price: of a GPU for an hour. output_tokens: of a request, on
    average.
    """

    gpus: tuple[str, ...] = ()
    gpus_per_node: int | None = None
    num_nodes: int = 1
    free_gib: float | None = None
    context: int | None = None
    price: float | None = None
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's memory on one device. Sizes are in bytes; None if unknown. unknown: the reasons.

    parts: bytes by part. num_parameters: 0 if they were not counted. token_bytes: cache of one more token of a long
    sequence. context_bytes: cache of one sequence of `context` tokens.
    """

    name: str
    architectures: tuple[str, ...]
    dtype: str
    quantization: str
    num_parameters: int
    weight_bytes: int | None
    parts: tuple[tuple[str, int], ...]
    cache_dtype: str
    token_bytes: int | None
    context: int
    context_bytes: int | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's rows, from a sample of them. is_estimated: the input was not scanned, so `num_rows` may be estimated.

    histogram: of prompt lengths in tokens. prompt_error: half of the 95 % interval of their mean, as a share. output:
    tokens of a request, on average. output_from: in words. output_bytes: of all rows. free_bytes: of the disk.
    host_bytes: memory that a replica takes of the host, on each of its GPUs. max_model_len: if it is `auto`, by the
    sampled rows; None: the model's own.
    """

    path: str
    num_rows: int
    is_estimated: bool
    num_sampled: int
    num_requests: int
    histogram: tuple[LengthRange, ...]
    prompt: float
    prompt_error: float
    longest: int
    output: float
    output_from: str
    output_bytes: int
    free_bytes: int | None
    host_bytes: int
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A model, or a job, on GPUs of one kind.

    num_gpus: of all nodes. why_not: why it cannot run there at all; None: it can. needs: the least degrees on any
    number of GPUs. missing_bytes: on each GPU, at the largest legal degree of these GPUs. options: all degrees that fit
    these GPUs. chosen: of them. reason: of the choice, in a sentence. seconds, gpu_hours, cost: of the job.
    """

    gpu: Gpu
    num_gpus: int
    share: float
    why_not: str | None
    needs: Degrees | None
    missing_bytes: int
    options: tuple[Option, ...]
    chosen: Option | None
    reason: str
    seconds: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class PlanReport:
    """The whole plan. `print`, and a notebook, show its lines.

    job: None for a model. notes: what could not be looked at. choice: empty if nothing fits.
    """

    model: ModelPlan
    job: JobPlan | None
    gpus: tuple[GpuPlan, ...]
    notes: tuple[str, ...]
    choice: str

    def __repr__(self) -> str:
        from batchinf.commands.text.plan import plan_lines  # it imports this module

        return "\n".join(plan_lines(self))


def make_plan(target: SpecSource, overrides: Overrides, wanted: PlanWanted) -> PlanReport:
    """The plan of a job spec, or of a model: its name, its folder or its config.json. Raises UserError."""
    _check_numbers(wanted)
    named = {gpu.name: gpu for gpu in map(gpu_named, wanted.gpus)}  # each once: `h100` and `h100-80` are the same
    gpus = list((named or GPUS).values())
    file, is_job = _spec_of(target, overrides)
    notes: list[str] = []
    found = _job(file, wanted, notes) if is_job else None
    model = resolve(file.spec.model)
    if found is not None and file.spec.has_auto_length:
        file = with_length(file, found[0].max_model_len)
        notes.append("engine.max_model_len auto is of the rows that were read; `run` reads all of them")
    base = fit_of(model, file.spec, None)
    if base.needs.weights is None or base.needs.kv_cache is None:
        raise UserError(f"the memory of '{model.name}' is not known by its config: {base.needs.unknown[0]}")
    context = _context(wanted, file.spec, model)
    if (warning := length_warning(file.spec, model, wanted.context)) is not None:
        notes.append(f"warning: {warning}")
    shape, work = shape_of(base.needs), None if found is None else found[1]
    plans = tuple(_on_gpu(gpu, base, file.spec, wanted, context, shape, work) for gpu in gpus)
    job = None if found is None else dataclasses.replace(found[0], host_bytes=_PROCESS_BYTES + base.offloaded_bytes)
    return PlanReport(_model_plan(model, base.needs, context), job, plans, tuple(notes), _choice(plans))


def _check_numbers(wanted: PlanWanted) -> None:
    """Raise UserError for numbers from Python that the command line does not take."""
    least: tuple[tuple[str, float | None, float], ...] = (
        ("gpus", wanted.gpus_per_node, 1),
        ("nodes", wanted.num_nodes, 1),
        ("free_gib", wanted.free_gib, 0.1),
        ("context", wanted.context, 1),
        ("price", wanted.price, 0),
        ("output_tokens", wanted.output_tokens, 1),
    )
    for name, number, bound in least:
        if number is not None and not bound <= number < math.inf:
            raise UserError(f"{name}: got {number}; must be a number of at least {bound}")


def _job(file: SpecFile, wanted: PlanWanted, notes: list[str]) -> tuple[JobPlan, Workload] | None:
    """The job's rows and work; None, with a note, without the input."""
    try:
        with opened(file) as found:
            assert found is not None
            job, num_rows = found
            lengths = lengths_of(job, file, num_rows)
            work = lengths.workload(job, wanted.output_tokens)
            is_bounded = job.spec.has_auto_length and not lengths.is_assumed
            length = rounded(job, lengths.longest + 1) if is_bounded else None
    except InputError as error:
        notes.append(f"without lengths of rows, as the input cannot be read: {error}")
        return None
    except ModelError as error:
        # The config, from which the memory is computed, has been read. Only the tokenizer is missing.
        notes.append(f"without lengths of rows and time: {error}")
        return None
    if not lengths.prompts:
        why = "" if (first := lengths.row_error) is None else f"; the first: {first.error_type}: {first.error_message}"
        notes.append(f"without lengths of rows, as no row of a sample of {lengths.num_sampled:,} has a prompt{why}")
        return None
    by = "--output-tokens" if wanted.output_tokens is not None else "each output has its max_tokens"
    return JobPlan(
        path=file.spec.input.path,
        num_rows=lengths.num_rows,
        is_estimated=lengths.is_estimated,
        num_sampled=lengths.num_sampled,
        num_requests=work.num_requests,
        histogram=histogram(sorted(lengths.prompts)),
        prompt=work.prompt_tokens,
        prompt_error=lengths.error,
        longest=lengths.longest,
        output=work.output_tokens,
        output_from="the spec has no max_tokens, so this is a guess" if lengths.is_assumed else by,
        output_bytes=lengths.output_bytes,
        free_bytes=free_bytes(file.spec.output.path),
        host_bytes=0,
        max_model_len=length,
    ), work


def _spec_of(target: SpecSource, overrides: Overrides) -> tuple[SpecFile, bool]:
    """The spec of a job, or one that is made for a model. Whether it is a job's."""
    if not isinstance(target, str | os.PathLike) or (name := os.fspath(target)).endswith((".yaml", ".yml")):
        return read_spec(target, overrides), True
    name = os.path.dirname(name) or "." if os.path.basename(name) == "config.json" else name
    spec = {"model": {"name": name}, "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    return read_spec(spec, overrides), False


def _context(wanted: PlanWanted, spec: JobSpec, model: Model) -> int:
    given = wanted.context or spec.engine.get("max_model_len")
    found = given if isinstance(given, int) and given > 0 else model.max_model_len
    if found is None:
        raise UserError(f"the config of '{model.name}' does not say how long a sequence may be; give --context")
    return found


def _model_plan(model: Model, needs: Needs, context: int) -> ModelPlan:
    cache, weights = needs.kv_cache, needs.weights
    return ModelPlan(
        name=model.name,
        architectures=tuple(model.config.get("architectures") or ()),
        dtype=needs.dtype,
        quantization=needs.quantization,
        num_parameters=sum(needs.parameters.values()),
        weight_bytes=needs.weight_bytes,
        parts=() if weights is None else weights.parts,
        cache_dtype="" if cache is None else cache.dtype,
        token_bytes=None if cache is None else cache.bytes_per_token(),
        context=context,
        context_bytes=None if cache is None else cache.sequence_bytes(context),
        unknown=needs.unknown,
    )


def _on_gpu(
    gpu: Gpu, base: Fit, spec: JobSpec, wanted: PlanWanted, context: int, shape: Shape | None, work: Workload | None
) -> GpuPlan:
    share = float(spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION)
    if wanted.free_gib is not None:
        share = min(share, math.floor(wanted.free_gib * GIB / gpu.memory_bytes * 100) / 100)
    limits = task_of(spec).default_batch_limits(base.needs.config.get("vocab_size"), gpu.memory_bytes)
    fit = dataclasses.replace(base, device_bytes=gpu.memory_bytes, device_name=gpu.title, batch_limits=limits)
    fit = dataclasses.replace(fit, engine={**chosen_arguments(spec, fit, task_of(spec), 1).engine, **fit.engine})
    empty = GpuPlan(gpu, 0, share, why_not(gpu, base.needs.dtype), None, 0, (), None, "")
    if empty.why_not is not None or base.needs.weights is None or base.needs.kv_cache is None:
        return empty
    gpus_per_node = wanted.gpus_per_node or _NODE
    needed = next(that_fit(fit, context, share, max(_NODE, gpus_per_node), MOST_DEVICES), None)
    num_gpus = gpus_per_node * wanted.num_nodes
    if wanted.gpus_per_node is None and wanted.num_nodes == 1 and needed is not None:
        num_gpus = needed.num_devices
    machine = Machine(gpu, min(gpus_per_node, num_gpus), max(1, num_gpus // gpus_per_node), share)
    found = options(fit, machine, context, shape, work)
    chosen = best(found)
    missing = 0
    if chosen is None:
        most = max((tensor for tensor in fit.needs.tensor_degrees(machine.gpus_per_node)), default=1)
        missing = degrees_of(fit, most, machine.num_nodes, context, share).missing_bytes
    seconds = None
    if chosen is not None and chosen.prediction is not None:
        seconds = _START_S + chosen.prediction.seconds
    used = 0 if chosen is None else chosen.data * chosen.degrees.num_devices
    hours = None if seconds is None else seconds * used / 3600
    return dataclasses.replace(
        empty,
        num_gpus=machine.num_gpus,
        needs=needed,
        missing_bytes=missing,
        options=tuple(found),
        chosen=chosen,
        reason="" if chosen is None else reason_for(chosen, found),
        seconds=seconds,
        gpu_hours=hours,
        cost=None if hours is None or wanted.price is None else hours * wanted.price,
    )


def _choice(plans: Sequence[GpuPlan]) -> str:
    able = [it for it in plans if it.chosen is not None]
    if not able:
        return ""
    first = min(able, key=lambda it: it.num_gpus * it.gpu.memory_bytes)
    why = f", the least memory of {len(able)} kinds that hold the model" if len(able) > 1 else ""
    return f"{first.num_gpus} × {first.gpu.title}{why}: {first.reason}"
