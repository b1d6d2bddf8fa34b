"""Degrees of parallelism on a backend's devices: what `auto` means there, and what cannot start."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from batchinf.base.errors import SpecError
from batchinf.engines.installed import is_cpu_build
from batchinf.fleet.backend import Backend
from batchinf.fleet.engine_defaults import chosen_arguments, values
from batchinf.job.open import naming_lines
from batchinf.model.memory import Fit, fit_of, gib, share_of
from batchinf.model.model import resolve
from batchinf.model.splits import why_not_split
from batchinf.planning.degrees import (
    Machine,
    Option,
    best,
    least_that_fits,
    options,
    reason_for,
    shape_text,
)
from batchinf.planning.gpus import Gpu, gpu_like, why_not
from batchinf.planning.lengths import assumed_work, lengths_of, opened
from batchinf.planning.throughput import Workload
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec, ParallelSpec
from batchinf.tasks.registry import task_of


def with_degrees(
    file: SpecFile, begun_with: Mapping[str, Any] | None = None, *, backend: Backend, say: Callable[[str], None]
) -> SpecFile:
    """The spec with numbers in place of `auto` for the tensor and pipeline-parallel sizes.

    The choice depends on the spec, the model, the devices and the input alone. On processors it is 1. begun_with: the
    section `parallel` of a job to resume, whose numbers stay if there are enough devices; the input is not read then.
    Raises SpecError if the model does not fit the devices.
    """
    parallel = file.spec.parallel
    if "auto" not in (parallel.tensor_parallel_size, parallel.pipeline_parallel_size):
        return file
    if file.spec.backend == "ray":
        raise file.error("parallel.tensor_parallel_size", "got auto with backend ray; give the degrees as numbers")
    devices = local_devices(file.spec, backend)
    device_bytes, title = backend.device_size(devices[0]) if devices else (None, "")
    if device_bytes is None:
        return _set(file, *parallel.sizes)
    if begun_with is not None:
        sizes = (begun_with["tensor_parallel_size"], begun_with["pipeline_parallel_size"])
        if all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= len(devices):
            return _set(file, *sizes)
    chosen, reason = _chosen(file, len(devices), device_bytes, title)
    degrees = chosen.degrees
    say(
        f"parallel: {shape_text(degrees, chosen.data)} on {chosen.data * degrees.num_devices} GPUs: {reason}; weights "
        f"{gib(degrees.weight_bytes)} a GPU, {degrees.cache_tokens:,} tokens of cache for each replica"
    )
    return _set(file, degrees.tensor, degrees.pipeline)


def local_devices(spec: JobSpec, backend: Backend) -> tuple[str, ...]:
    """The devices of this host that the job may use; empty for the scripted engine and on processors."""
    devices = () if spec.scripted is not None or spec.backend == "ray" else backend.devices()
    if spec.parallel.devices is None:
        return devices
    return tuple(device for device in devices if device in map(str, spec.parallel.devices))


def _set(file: SpecFile, tensor: int, pipeline: int) -> SpecFile:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    parallel = file.spec.parallel.model_copy(update=sizes)
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"parallel": parallel}))


def _chosen(file: SpecFile, num_devices: int, device_bytes: int, title: str) -> tuple[Option, str]:
    work = None
    with opened(dataclasses.replace(_set(file, *file.spec.parallel.sizes), slice=None), may_scan=False) as input_:
        if input_ is not None:
            job, num_rows = input_
            lengths = lengths_of(job, file, num_rows)
            work = lengths.workload(job) if lengths.prompts else None
    spec = _set(file, *file.spec.parallel.sizes).spec
    fit = on_device(spec, fit_of(resolve(spec.model), spec, None), device_bytes, title)
    context = fit.max_model_len
    if fit.weights is None or fit.kv_cache is None or context is None:
        unknown = "; ".join(fit.unknown) or "the config does not say how long a sequence may be"
        raise file.error("parallel", f"got auto, but the model's memory is not known ({unknown}); give the degrees")
    gpu = gpu_like(title, device_bytes)
    if gpu is not None:
        with naming_lines(file):
            _check_type(spec, fit, gpu)
    machine = Machine(gpu, num_devices, 1, share_of(spec.engine), *given_degrees(file.spec.parallel))
    work = work or assumed_work(task_of(spec), context)
    return choose_degrees(file, fit, machine, work)


def on_device(spec: JobSpec, base: Fit, device_bytes: int, title: str) -> Fit:
    """The model on a device, with the engine arguments that a start chooses there. base: without a device."""
    task = task_of(spec)
    limits = task.default_batch_limits(base.config.get("vocab_size"), device_bytes)
    fit = dataclasses.replace(base, device_bytes=device_bytes, device_name=title, batch_limits=limits)
    return dataclasses.replace(fit, engine={**values(chosen_arguments(spec, fit, task, 1)), **fit.engine})


def given_degrees(parallel: ParallelSpec) -> list[int | None]:
    """Tensor, pipeline and data-parallel size where the section gives a number; None where it says `auto`."""
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size)
    return [None if size == "auto" else size for size in sizes]


def choose_degrees(file: SpecFile, fit: Fit, machine: Machine, work: Workload) -> tuple[Option, str]:
    """The best of the degrees that fit the devices and what the spec fixes, and why. Raises SpecError without one."""
    context = fit.max_model_len
    assert context is not None and fit.device_bytes is not None
    fitting = options(fit, machine, context, work)
    chosen = best(fitting)
    if chosen is not None:
        return chosen, reason_for(chosen, fitting, work, machine)
    needed = least_that_fits(fit, machine, context)
    number = machine.data or 1
    hint = "it fits no number of them" if needed is None else f"it needs {needed.num_devices * number}"
    raise file.error(
        "parallel.tensor_parallel_size",
        f"got auto, but weights of {gib(fit.total_weight_bytes or 0)} and one sequence of max_model_len {context:,} do "
        f"not fit {machine.num_gpus} device(s) of {gib(fit.device_bytes)}; {hint}: use more devices, a lower "
        "engine.max_model_len, or model.quantization fp8",
    )


def check_devices(spec: JobSpec, fit: Fit, num_replicas: int) -> Iterator[str]:
    """Warnings about devices in the table of GPUs. Raises SpecError for settings that cannot start on them.

    fit: without the size of a device, the job may be one for processors.
    """
    if spec.scripted is not None:
        return
    if fit.device_bytes is None:
        if is_cpu_build():
            check_processor(spec, fit.max_model_len)
        return
    ranks = fit.tensor_parallel_size * fit.pipeline_parallel_size * num_replicas
    available = psutil.virtual_memory().available
    # The hosts of a cluster are not looked at.
    if spec.backend != "ray" and fit.offloaded_bytes * ranks > available:
        raise SpecError(
            f"engine.cpu_offload_gb: got {spec.engine['cpu_offload_gb']}, which takes "
            f"{gib(fit.offloaded_bytes * ranks)} of the host's memory for {ranks} device(s), but {gib(available)} are "
            "free; lower it, or use more devices"
        )
    gpu = gpu_like(fit.device_name, fit.device_bytes)
    if gpu is not None:
        yield from _check_gpu(spec, fit, gpu)


def _check_type(spec: JobSpec, fit: Fit, gpu: Gpu) -> None:
    """Raise SpecError if the device does not run vLLM, or not the model's type."""
    if (why := why_not(gpu, fit.dtype)) is not None:
        raise SpecError(f"model.dtype: got {spec.model.dtype}, but {fit.device_name} cannot run it: {why}")


def _check_gpu(spec: JobSpec, fit: Fit, gpu: Gpu) -> Iterator[str]:
    _check_type(spec, fit, gpu)
    cache = str(spec.engine.get("kv_cache_dtype", "auto"))
    if cache.startswith("fp8") and cache != "fp8_e5m2" and gpu.capability < (8, 9):
        shown = ".".join(map(str, gpu.capability))
        raise SpecError(
            f"engine.kv_cache_dtype: got {cache}, but {fit.device_name} has compute capability {shown}, and FP8 needs "
            "8.9; leave it out"
        )
    if (why := why_not_split(fit.splits, fit.tensor_parallel_size)) is not None:
        yield f"warning: tensor_parallel_size {fit.tensor_parallel_size}: {why}: vLLM may refuse it, or be slower"
    if fit.quantization == "fp8" and gpu.capability < (8, 9):
        yield f"note: {fit.device_name} has no FP8 units, so vLLM computes the FP8 weights in 16 bits"
    if fit.tensor_parallel_size > 1 and not gpu.link:
        yield (
            f"warning: tensor_parallel_size {fit.tensor_parallel_size} over {fit.device_name}, which has no NVLink: "
            "each layer waits for PCIe twice; parallel.pipeline_parallel_size may be faster"
        )


def check_processor(spec: JobSpec, max_model_len: int | None) -> None:
    """Raise SpecError for settings that vLLM does not run right on a processor with sampled requests.

    Its engine dies of a cut prompt: the generator of a request's random numbers cannot be put back there. A step that
    is full cuts short prompts, too. With speculation, vLLM 0.32 writes the temperatures of drafted tokens into a copy
    (`_expand_kernel_impl` of cpu_triton_utils.py) and reads memory that it never wrote: all rows of a step with a
    sampled one get wrong tokens. spec: resolved. max_model_len: of the engine.
    """
    if spec.scripted is not None or not _may_sample(spec):
        return
    if spec.engine.get("speculative_config"):
        raise SpecError(
            "engine.speculative_config: got it for rows that may be sampled, to which vLLM gives wrong tokens on a "
            "processor: leave it out, or set sampling.temperature 0 for all rows"
        )
    chunks = spec.engine.get("enable_chunked_prefill", "unset")
    if chunks is False:
        return
    tokens = spec.engine.get("max_num_batched_tokens")
    why = "vLLM then cuts prompts, and on a processor its engine dies of a cut prompt whose output is sampled"
    if chunks != "unset":  # null is vLLM's default, which is true
        got = "null" if chunks is None else "true"
        raise SpecError(f"engine.enable_chunked_prefill: got {got}; {why}: leave it out, or set sampling.temperature 0")
    if isinstance(tokens, int) and max_model_len is not None and tokens < max_model_len:
        raise SpecError(
            f"engine.max_num_batched_tokens: got {tokens}, less than max_model_len {max_model_len}; {why}: leave it "
            "out, lower engine.max_model_len, or set sampling.temperature 0"
        )


def _may_sample(spec: JobSpec) -> bool:
    """Whether a request of the job may draw its tokens at random."""
    has_temperature = spec.rows_may_set("temperature") or spec.sampling.temperature != 0
    return task_of(spec).draws_tokens and has_temperature
