"""`batchinf plan`: what a model or a job needs, and how long it takes, on GPUs that need not be here."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from batchinf.base.cost import Cost
from batchinf.base.errors import InputError, ModelError, UserError
from batchinf.base.process import say_if_slow
from batchinf.commands.plan.advice import advice_lines
from batchinf.commands.plan.report import GpuPlan, JobPlan, ModelPlan, PlanReport
from batchinf.fleet.parallel import given_degrees, on_device
from batchinf.job.disk_space import free_bytes
from batchinf.job.job import Job
from batchinf.job.model_len import length_warning, rounded
from batchinf.job.open import check_heads, location_of, naming_lines
from batchinf.job.resolve import with_length
from batchinf.model.memory import GIB, Fit, fit_of, gib, share_of
from batchinf.model.model import Model, resolve
from batchinf.planning.accuracy import accuracy_of
from batchinf.planning.degrees import (
    Degrees,
    Machine,
    at_degrees,
    best,
    degrees_of,
    least_that_fits,
    options,
    reason_for,
    shape_text,
    split_notes,
)
from batchinf.planning.gpus import GPUS, Gpu, gpu_named, why_not
from batchinf.planning.lengths import Lengths, assumed_work, lengths_of, opened
from batchinf.planning.throughput import Workload
from batchinf.prompts.checks import check_prompts
from batchinf.source.rows import is_scanned_quickly
from batchinf.spec.file import Overrides, SpecFile, SpecSource, read_spec
from batchinf.spec.job import JobSpec, ModelSpec
from batchinf.tasks.registry import task_of

_OPEN_SIZES = frozenset({"tensor_parallel_size", "pipeline_parallel_size"})
_NODE = 8  # GPUs of a host, unless --gpus says more
_FAR = 4  # times the job's longest sequence, from which on a note names `auto`
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
    """Price of a GPU for an hour; None: that of the spec."""
    output_tokens: float | None = None
    """Tokens of a request's output, on average."""
    num_rows: int | None = None
    """Rows of the job, in place of those that the input has."""

    @property
    def has_time(self) -> bool:
        """Whether a plan without the rows of an input has a time."""
        return self.num_rows is not None


def make_plan(
    target: SpecSource, overrides: Overrides, asked: PlanOptions, say: Callable[[str], None] | None = None
) -> PlanReport:
    """The plan of a job spec, or of a model: its name, its folder or its config.json. Raises UserError.

    say: called with what `plan` does, from the time on when it has taken 2 s.
    """
    _check_numbers(asked)
    gpus = _gpus_of(asked)
    file, is_job = _spec_of(target, overrides)
    if asked.price is not None and not is_job and not asked.has_time:
        raise UserError(
            "price: a model alone has no rows, so it has no cost; plan a job spec, add --rows, or leave out --price"
        )
    if asked.price is None:
        asked = dataclasses.replace(asked, price=file.spec.price_per_gpu_hour)
    notes: list[str] = []
    with say_if_slow(say, f"reading {file.spec.input.path} and counting the tokens of its prompts"):
        job, work = _job(file, asked, notes) if is_job else (None, None)
    with say_if_slow(say, f"reading the config of {file.spec.model.name}"):
        model = _resolved(file.spec.model, is_job=is_job)
    with naming_lines(file):
        check_heads(file.spec, model)
    if is_job and job is None:
        notes += _refusals(file.spec, model)
    if job is not None and file.spec.has_auto_length:
        file = with_length(file, job.max_model_len)
        notes.append("engine.max_model_len auto is of the rows that were read; `run` reads all of them")
    with say_if_slow(say, f"counting the weights of {model.name}"):
        base = _known_fit(model, file.spec)
    context = _context(asked, file.spec, model)
    if (warning := length_warning(file.spec, model, asked.context)) is not None:
        notes.append(f"warning: {warning}")
    takes_auto = not file.spec.has_auto_length and not file.spec.input.has_images
    if job is not None and asked.context is None and takes_auto:
        notes += _long_context_note(base, context, job.longest)
    work = work or _assumed(file.spec, context, asked)
    num_rows = asked.num_rows if job is None else job.num_rows
    plans = tuple(
        _on_gpu(gpu, base, file.spec, asked, context=context, work=work, num_rows=num_rows or 0) for gpu in gpus
    )
    notes += _degree_notes(plans, base, file.spec, asked, is_job=is_job)
    advice: tuple[str, ...] = ()
    if len(plans) == 1:
        [plan] = plans
        gpus_per_node = asked.gpus_per_node or min(_NODE, max(1, plan.num_gpus))
        same = dataclasses.replace(asked, gpus_per_node=gpus_per_node, num_nodes=max(1, plan.num_gpus // gpus_per_node))

        def plan_on(model: Model, spec: JobSpec, gpu: Gpu) -> GpuPlan:
            return _on_gpu(gpu, _known_fit(model, spec), spec, same, context=context, work=work, num_rows=num_rows or 0)

        with say_if_slow(say, "looking for weights and GPUs that leave more cache"):
            advice = tuple(advice_lines(plan, model, file.spec, work, plan_on=plan_on))
    if job is not None:
        job = dataclasses.replace(job, host_bytes=_PROCESS_BYTES + base.offloaded_bytes)
    return PlanReport(
        model=_model_plan(model, base, context),
        job=job,
        gpus=plans,
        notes=tuple(notes),
        choice=_choice(plans),
        advice=advice,
    )


def _resolved(spec: ModelSpec, *, is_job: bool) -> Model:
    """The model. The error for an id says that the config of the model is enough for a plan."""
    try:
        return resolve(spec)
    except ModelError as error:
        if is_job or os.path.isdir(spec.name):
            raise
        raise ModelError(f"{error}; or give a config.json: `plan` needs no other file of the model") from error


def _long_context_note(fit: Fit, context: int, longest: int) -> Iterator[str]:
    """What `auto` would change, if sequences may be far longer than the job's."""
    if fit.kv_cache is None or context < _FAR * longest:
        return
    bytes_of = fit.kv_cache.sequence_bytes
    if bytes_of(context) < GIB:  # which changes no degree
        return
    yield (
        f"prompt and output have at most {longest:,} tokens, and a sequence may have {context:,}: with "
        f"engine.max_model_len: auto, the cache must hold {gib(bytes_of(longest))} for one sequence, not "
        f"{gib(bytes_of(context))}"
    )


def _assumed(spec: JobSpec, context: int, asked: PlanOptions) -> Workload:
    """The work without the rows of an input."""
    output_tokens = spec.sampling.max_tokens if asked.output_tokens is None else asked.output_tokens
    work = assumed_work(task_of(spec), context, output_tokens)
    return work if asked.num_rows is None else dataclasses.replace(work, num_requests=asked.num_rows * spec.sampling.n)


def _refusals(spec: JobSpec, model: Model) -> Iterator[str]:
    """Why `run` would refuse the job, such as a missing chat template, as far as it is known without the input."""
    try:
        check_prompts(spec, model)
    except UserError as error:
        yield f"warning: `run` will refuse the job: {error}"


def _gpus_of(asked: PlanOptions) -> list[Gpu]:
    """The kinds of GPUs that the user named, each once: `h100` and `h100-80` are the same. Without names, all."""
    named = {gpu.name: gpu for gpu in map(gpu_named, asked.gpus)}
    return list((named or GPUS).values())


def _degree_notes(
    plans: Sequence[GpuPlan], base: Fit, spec: JobSpec, asked: PlanOptions, *, is_job: bool
) -> Iterator[str]:
    """What the degrees of the plans assume, and which are left out."""
    chosen = [plan.chosen.degrees for plan in plans if plan.chosen is not None]
    yield from _machine_notes(spec, asked)
    if is_job:
        yield from _run_notes(chosen, spec, asked)
    largest = max(asked.gpus_per_node or _NODE, *(degrees.tensor for degrees in chosen), 1)
    yield from split_notes(base, _given(spec)[0], largest)


def _machine_notes(spec: JobSpec, asked: PlanOptions) -> Iterator[str]:
    """How the GPUs of the plan differ from those that the user may mean."""
    number = asked.gpus_per_node
    if number is not None and number > _NODE and asked.num_nodes == 1:
        nodes = f"; for nodes of {_NODE}, give --gpus {_NODE} --nodes {number // _NODE}" if number % _NODE == 0 else ""
        yield f"--gpus {number}: all in one node{nodes}"
    if spec.parallel.devices is not None:
        yield "parallel.devices is not looked at: --gpus and --nodes say how many GPUs there are"
    if spec.parallel.replicas_per_device not in ("auto", 1):
        yield "parallel.replicas_per_device is not looked at: all figures are for one replica on each GPU"


def _run_notes(chosen: Sequence[Degrees], spec: JobSpec, asked: PlanOptions) -> Iterator[str]:
    """Why `run` may take other degrees than the plan chose."""
    is_open = _OPEN_SIZES.isdisjoint(spec.parallel.model_fields_set)
    if is_open and any(degrees.num_devices > 1 for degrees in chosen):
        yield (
            "the spec gives no degrees, so `run` takes tensor 1 × pipeline 1: for the ones here, set "
            "parallel.tensor_parallel_size and pipeline_parallel_size to auto, or to these numbers"
        )
    if asked.output_tokens is not None and _is_auto(spec):
        yield "`run` does not know --output-tokens: for auto degrees, each output has its max_tokens"


def _known_fit(model: Model, spec: JobSpec) -> Fit:
    """What the model needs. Raises UserError if that is not known."""
    fit = fit_of(model, spec, None)
    if fit.weights is None or fit.kv_cache is None:
        raise UserError(f"the memory of '{model.name}' is not known by its config: {fit.unknown[0]}")
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
        ("rows", asked.num_rows, 1),
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
            if asked.num_rows is not None:
                notes.append(f"--rows: the {lengths.num_rows:,} rows of the input stand for {asked.num_rows:,}")
                lengths = lengths.scaled(asked.num_rows)
            work = lengths.workload(job, asked.output_tokens)
            if num_rows is None and _assumes_lengths(file.spec):
                notes.append(
                    "`run` does not wait for this input before it replaces auto degrees, and assumes lengths; to get "
                    "the degrees here, give them as numbers"
                )
            length = _auto_length(job, lengths)
    except InputError as error:
        notes.append(f"without lengths of rows, as the input cannot be read: {error}{_assumption(asked)}")
        return None, None
    except ModelError as error:
        # The config, from which the memory is computed, has been read. Only the tokenizer is missing.
        notes.append(f"without lengths of rows{'' if asked.has_time else ' and time'}: {error}{_assumption(asked)}")
        return None, None
    if not lengths.prompts:
        why = "" if (first := lengths.row_error) is None else f"; the first: {first.error_type}: {first.error_message}"
        notes.append(f"without lengths of rows, as no row of a sample of {lengths.num_sampled:,} has a prompt{why}")
        return None, None
    notes += lengths.image_notes
    if lengths.image_notes:
        notes.append("note: the image encoder's own memory and time are not counted")
    if job.spec.input.choices is not None and work.num_requests > lengths.num_rows:
        each = work.num_requests / lengths.num_rows
        notes.append(
            f"each row costs {each:,.1f} requests; labels of one token need one: see "
            "docs/how-to/label.md#one-request-for-all-labels"
        )
    return JobPlan(
        path=file.spec.input.path,
        num_rows=lengths.num_rows,
        is_estimated=lengths.is_estimated,
        num_sampled=lengths.num_sampled,
        num_requests=work.num_requests,
        prompt=work.prompt_tokens,
        prompt_error=lengths.error,
        longest=lengths.longest,
        output=work.output_tokens,
        output_from=lengths.output_from if asked.output_tokens is None else "--output-tokens",
        output_bytes=lengths.output_bytes,
        free_bytes=free_bytes(file.spec.output.folder),
        host_bytes=0,
        max_model_len=length,
    ), work


def _assumption(asked: PlanOptions) -> str:
    """What a time without the lengths of rows is for; the choice names the numbers of tokens."""
    return f"; the time is for {asked.num_rows:,} rows of the lengths that the choice assumes" if asked.has_time else ""


def _assumes_lengths(spec: JobSpec) -> bool:
    """Whether `run` chooses degrees before it has read the whole input."""
    return _is_auto(spec) and not is_scanned_quickly(location_of(spec))


def _auto_length(job: Job, lengths: Lengths) -> int | None:
    """`engine.max_model_len: auto` by the sampled rows; None: the model's own, or the number of the spec."""
    is_bounded = job.spec.has_auto_length and not lengths.is_assumed
    return rounded(job, lengths.longest + 1) if is_bounded else None


def _spec_of(target: SpecSource, overrides: Overrides) -> tuple[SpecFile, bool]:
    """The spec of a job, or one that is made for a model. Whether it is a job's."""
    if not isinstance(target, str | os.PathLike) or (name := os.fspath(target)).endswith((".yaml", ".yml")):
        return read_spec(target, overrides), True
    name = os.path.dirname(name) or os.getcwd() if os.path.basename(name) == "config.json" else name
    spec = {"model": {"name": name}, "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    return read_spec(spec, overrides), False


def _context(asked: PlanOptions, spec: JobSpec, model: Model) -> int:
    length = asked.context or spec.engine.get("max_model_len")
    context = length if isinstance(length, int) and length > 0 else model.max_model_len
    if context is None:
        raise UserError(f"the config of '{model.name}' does not say how long a sequence may be; give --context")
    return context


def _model_plan(model: Model, fit: Fit, context: int) -> ModelPlan:
    cache = fit.kv_cache
    weights = fit.weights
    return ModelPlan(
        name=model.name,
        architectures=tuple(model.config.get("architectures") or ()),
        dtype=fit.dtype,
        quantization=fit.quantization,
        num_parameters=sum(fit.parameters.values()),
        weight_bytes=fit.total_weight_bytes,
        parts=() if weights is None else weights.parts,
        cache_dtype="" if cache is None else cache.dtype,
        token_bytes=None if cache is None else cache.bytes_per_token(),
        context=context,
        context_bytes=None if cache is None else cache.sequence_bytes(context),
        unknown=fit.unknown,
    )


def _on_gpu(
    gpu: Gpu, base: Fit, spec: JobSpec, asked: PlanOptions, *, context: int, work: Workload, num_rows: int
) -> GpuPlan:
    """The plan on GPUs of one kind. base: the model without a device. context: tokens of the longest sequence."""
    share = _share(gpu, spec, asked)
    plan = GpuPlan(gpu=gpu, num_gpus=0, share=share, why_not=why_not(gpu, base.dtype))
    if plan.why_not is not None:
        return plan
    fit = on_device(spec, base, gpu.memory_bytes, gpu.title)
    machine = Machine(gpu, asked.gpus_per_node or _NODE, asked.num_nodes, share, *_given(spec))
    needed = least_that_fits(fit, machine, context)
    if needed is not None and asked.gpus_per_node is None and asked.num_nodes == 1:
        num_gpus = needed.num_devices * (machine.data or 1)
        gpus_per_node = min(_NODE, num_gpus)
        machine = dataclasses.replace(
            machine, gpus_per_node=gpus_per_node, num_nodes=math.ceil(num_gpus / gpus_per_node)
        )
    plan = dataclasses.replace(plan, num_gpus=machine.num_gpus, needs=needed)
    fitting = options(fit, machine, context, work)
    chosen = best(fitting)
    if chosen is None:
        return _refused(plan, fit, machine, context)
    at = at_degrees(fit, chosen.degrees.tensor, chosen.degrees.pipeline)
    plan = dataclasses.replace(
        plan,
        options=tuple(fitting),
        chosen=chosen,
        reason=reason_for(chosen, fitting, work, machine),
        accuracy=None if chosen.prediction is None else accuracy_of(at, work),
    )
    if chosen.prediction is None or (work.is_assumed and not asked.has_time):
        return plan
    seconds = _START_S + chosen.prediction.seconds
    hours = seconds * chosen.data * chosen.degrees.num_devices / 3600
    cost = Cost.of(asked.price, hours * 3600, num_tokens=work.num_tokens, num_rows=num_rows)
    return dataclasses.replace(plan, seconds=seconds, gpu_hours=hours, cost=cost)


def _is_auto(spec: JobSpec) -> bool:
    """Whether `run` chooses degrees."""
    return "auto" in (spec.parallel.tensor_parallel_size, spec.parallel.pipeline_parallel_size)


def _given(spec: JobSpec) -> list[int | None]:
    """The degrees that the spec gives. If it gives no size of a replica, these are open: `plan` is to find them."""
    tensor, pipeline, data = given_degrees(spec.parallel)
    return [tensor, pipeline, data] if spec.parallel.model_fields_set & _OPEN_SIZES else [None, None, data]


def _refused(plan: GpuPlan, fit: Fit, machine: Machine, context: int) -> GpuPlan:
    """The plan without a choice: what each GPU lacks, or how many GPUs there would have to be."""
    most = machine.tensor or max(fit.tensor_degrees(machine.gpus_per_node), default=1)
    largest = degrees_of(fit, most, machine.pipeline or machine.num_nodes, context=context, share=machine.share)
    if largest.missing_bytes:
        refusal = f"{gib(largest.missing_bytes)} a GPU are missing"
        return dataclasses.replace(plan, missing_bytes=largest.missing_bytes, refusal=refusal)
    data = machine.data or 1
    shape = shape_text(largest, data)
    return dataclasses.replace(plan, refusal=f"{shape} takes {largest.num_devices * data} GPUs")


def _share(gpu: Gpu, spec: JobSpec, asked: PlanOptions) -> float:
    """gpu_memory_utilization, lower if other programs leave less."""
    share = share_of(spec.engine)
    if asked.free_gib is None:
        return share
    return min(share, math.floor(asked.free_gib * GIB / gpu.memory_bytes * 100) / 100)


def _choice(plans: Sequence[GpuPlan]) -> str:
    able = [plan for plan in plans if plan.chosen is not None]
    if not able:
        return ""
    first = min(able, key=lambda plan: plan.num_gpus * plan.gpu.memory_bytes)
    assert first.chosen is not None
    why = f", the least memory of {len(able)} kinds that hold the model" if len(able) > 1 else ""
    used = first.chosen.data * first.chosen.degrees.num_devices
    of = f" of {first.num_gpus}" if used < first.num_gpus else ""
    shape = shape_text(first.chosen.degrees, first.chosen.data)
    return f"{used}{of} × {first.gpu.title}{why}: {shape}: {first.reason}"
