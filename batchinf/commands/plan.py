"""`batchinf plan`: what a model or a job needs, and how long it takes, on GPUs that need not be here."""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from batchinf.base.errors import InputError, ModelError, UserError
from batchinf.commands.shown_rows import histogram
from batchinf.commands.text.plan import GpuPlan, JobPlan, ModelPlan, PlanReport
from batchinf.fleet.engine_defaults import chosen_arguments
from batchinf.job.disk_space import free_bytes
from batchinf.job.model_len import length_warning, rounded
from batchinf.job.open import with_length
from batchinf.model.identity import Model, resolve
from batchinf.model.memory import DEFAULT_GPU_MEMORY_UTILIZATION, GIB, Fit, Needs, fit_of
from batchinf.planning.degrees import MOST_DEVICES, Machine, best, degrees_of, options, reason_for, that_fit
from batchinf.planning.gpus import GPUS, Gpu, gpu_named, why_not
from batchinf.planning.lengths import lengths_of, opened
from batchinf.planning.throughput import Workload
from batchinf.spec.file import Overrides, SpecFile, SpecSource, read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_NODE = 8  # GPUs of a host, unless --gpus says more
_START_S = 90.0  # of engines with cold caches (benchmarks/history/vllm-0.26.md)
_PROCESS_BYTES = 6 * GIB  # of the host, for a worker, its engine and its replica; weights are read through page cache


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asked for."""

    gpus: tuple[str, ...] = ()
    """Names; empty: all of the table."""
    gpus_per_node: int | None = None
    """None: as many as are needed."""
    num_nodes: int = 1
    free_gib: float | None = None
    """Memory of each GPU that other programs leave."""
    context: int | None = None
    """Tokens of the longest sequence."""
    price: float | None = None
    """Price of a GPU for an hour."""
    output_tokens: float | None = None
    """Tokens of a request's output, on average."""


def make_plan(target: SpecSource, overrides: Overrides, asked: PlanOptions) -> PlanReport:
    """The plan of a job spec, or of a model: its name, its folder or its config.json. Raises UserError."""
    _check_numbers(asked)
    named = {gpu.name: gpu for gpu in map(gpu_named, asked.gpus)}  # each once: `h100` and `h100-80` are the same
    gpus = list((named or GPUS).values())
    file, is_job = _spec_of(target, overrides)
    notes: list[str] = []
    job, work = _job(file, asked, notes) if is_job else (None, None)
    model = resolve(file.spec.model)
    if job is not None and file.spec.has_auto_length:
        file = with_length(file, job.max_model_len)
        notes.append("engine.max_model_len auto is of the rows that were read; `run` reads all of them")
    base = _known_fit(model, file.spec)
    context = _context(asked, file.spec, model)
    if (warning := length_warning(file.spec, model, asked.context)) is not None:
        notes.append(f"warning: {warning}")
    plans = tuple(_on_gpu(gpu, base, file.spec, asked, context=context, work=work) for gpu in gpus)
    if job is not None:
        job = dataclasses.replace(job, host_bytes=_PROCESS_BYTES + base.offloaded_bytes)
    return PlanReport(
        model=_model_plan(model, base.needs, context), job=job, gpus=plans, notes=tuple(notes), choice=_choice(plans)
    )


def _known_fit(model: Model, spec: JobSpec) -> Fit:
    """What the model needs. Raises UserError if that is not known."""
    fit = fit_of(model, spec, None)
    if fit.needs.weights is None or fit.needs.kv_cache is None:
        raise UserError(f"the memory of '{model.name}' is not known by its config: {fit.needs.unknown[0]}")
    return fit


def _check_numbers(asked: PlanOptions) -> None:
    """Raise UserError for numbers from Python that the command line does not take."""
    least: tuple[tuple[str, float | None, float], ...] = (
        ("gpus", asked.gpus_per_node, 1),
        ("nodes", asked.num_nodes, 1),
        ("free_gib", asked.free_gib, 0.1),
        ("context", asked.context, 1),
        ("price", asked.price, 0),
        ("output_tokens", asked.output_tokens, 1),
    )
    for name, number, bound in least:
        if number is not None and not bound <= number < math.inf:
            raise UserError(f"{name}: got {number}; must be a number of at least {bound}")


def _job(file: SpecFile, asked: PlanOptions, notes: list[str]) -> tuple[JobPlan, Workload] | tuple[None, None]:
    """The job's rows and work; None, with a note, without the input."""
    try:
        with opened(file) as sample:
            assert sample is not None
            job, num_rows = sample
            lengths = lengths_of(job, file, num_rows)
            work = lengths.workload(job, asked.output_tokens)
            is_bounded = job.spec.has_auto_length and not lengths.is_assumed
            length = rounded(job, lengths.longest + 1) if is_bounded else None
    except InputError as error:
        notes.append(f"without lengths of rows, as the input cannot be read: {error}")
        return None, None
    except ModelError as error:
        # The config, from which the memory is computed, has been read. Only the tokenizer is missing.
        notes.append(f"without lengths of rows and time: {error}")
        return None, None
    if not lengths.prompts:
        why = "" if (first := lengths.row_error) is None else f"; the first: {first.error_type}: {first.error_message}"
        notes.append(f"without lengths of rows, as no row of a sample of {lengths.num_sampled:,} has a prompt{why}")
        return None, None
    by = "--output-tokens" if asked.output_tokens is not None else "each output has its max_tokens"
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


def _context(asked: PlanOptions, spec: JobSpec, model: Model) -> int:
    length = asked.context or spec.engine.get("max_model_len")
    context = length if isinstance(length, int) and length > 0 else model.max_model_len
    if context is None:
        raise UserError(f"the config of '{model.name}' does not say how long a sequence may be; give --context")
    return context


def _model_plan(model: Model, needs: Needs, context: int) -> ModelPlan:
    cache = needs.kv_cache
    weights = needs.weights
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


def _on_gpu(gpu: Gpu, base: Fit, spec: JobSpec, asked: PlanOptions, *, context: int, work: Workload | None) -> GpuPlan:
    """The plan on GPUs of one kind. base: the model without a device. context: tokens of the longest sequence."""
    share = _share(gpu, spec, asked)
    plan = GpuPlan(gpu=gpu, num_gpus=0, share=share, why_not=why_not(gpu, base.needs.dtype))
    if plan.why_not is not None:
        return plan
    limits = task_of(spec).default_batch_limits(base.needs.config.get("vocab_size"), gpu.memory_bytes)
    fit = dataclasses.replace(base, device_bytes=gpu.memory_bytes, device_name=gpu.title, batch_limits=limits)
    fit = dataclasses.replace(fit, engine={**chosen_arguments(spec, fit, task_of(spec), 1).engine, **fit.engine})
    gpus_per_node = asked.gpus_per_node or _NODE
    needed = next(that_fit(fit, context, share, max(_NODE, gpus_per_node), most=MOST_DEVICES), None)
    num_gpus = gpus_per_node * asked.num_nodes
    if asked.gpus_per_node is None and asked.num_nodes == 1 and needed is not None:
        num_gpus = needed.num_devices
    machine = Machine(gpu, min(gpus_per_node, num_gpus), max(1, num_gpus // gpus_per_node), share)
    plan = dataclasses.replace(plan, num_gpus=machine.num_gpus, needs=needed)
    fitting = options(fit, machine, context, work)
    chosen = best(fitting)
    if chosen is None:
        most = max(fit.needs.tensor_degrees(machine.gpus_per_node), default=1)
        missing = degrees_of(fit, most, machine.num_nodes, context=context, share=share).missing_bytes
        return dataclasses.replace(plan, missing_bytes=missing)
    plan = dataclasses.replace(plan, options=tuple(fitting), chosen=chosen, reason=reason_for(chosen, fitting))
    if chosen.prediction is None:
        return plan
    seconds = _START_S + chosen.prediction.seconds
    hours = seconds * chosen.data * chosen.degrees.num_devices / 3600
    cost = None if asked.price is None else hours * asked.price
    return dataclasses.replace(plan, seconds=seconds, gpu_hours=hours, cost=cost)


def _share(gpu: Gpu, spec: JobSpec, asked: PlanOptions) -> float:
    """gpu_memory_utilization, lower if other programs leave less."""
    share = float(spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION)
    if asked.free_gib is None:
        return share
    return min(share, math.floor(asked.free_gib * GIB / gpu.memory_bytes * 100) / 100)


def _choice(plans: Sequence[GpuPlan]) -> str:
    able = [plan for plan in plans if plan.chosen is not None]
    if not able:
        return ""
    first = min(able, key=lambda plan: plan.num_gpus * plan.gpu.memory_bytes)
    why = f", the least memory of {len(able)} kinds that hold the model" if len(able) > 1 else ""
    return f"{first.num_gpus} × {first.gpu.title}{why}: {first.reason}"
