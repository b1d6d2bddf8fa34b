"""What would hold a model that does not fit, or leave it more cache: other degrees, weights or GPUs, whole experts."""

import dataclasses
from collections.abc import Callable, Iterator

from batchinf.base.errors import UserError
from batchinf.commands.plan.report import GpuPlan
from batchinf.model.model import Model
from batchinf.planning.gpus import GPUS, Gpu
from batchinf.planning.throughput import Workload
from batchinf.spec.job import JobSpec

# Sequences of the job that a replica's cache should hold: with fewer, each step reads all weights for few tokens.
_FEW = 64
_CLEARLY = 1.1
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

# The plan of a model with a spec on GPUs of one kind, as many as in the first plan.
PlanOn = Callable[[Model, JobSpec, Gpu], GpuPlan]


def advice_lines(plan: GpuPlan, model: Model, spec: JobSpec, work: Workload, *, plan_on: PlanOn) -> Iterator[str]:
    """Each change that holds the model, or clearly more tokens of cache, with the degrees that follow.

    Nothing for a plan that has enough cache.
    """
    if plan.why_not is not None or _has_enough(plan, work):
        return
    for words, changed_model, changed_spec in _changes(model, spec):
        other = _plan_or_none(plan_on, changed_model, changed_spec, plan.gpu)
        if other is not None and _cache_tokens(other) > _CLEARLY * _cache_tokens(plan):
            yield f"{words}: {other.chosen_text}"
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes > plan.gpu.memory_bytes:
            other = _plan_or_none(plan_on, model, spec, gpu)
            if other is not None and _has_enough(other, work):
                yield f"{other.num_gpus} × {gpu.title}: {other.chosen_text}"
                return


def _plan_or_none(plan_on: PlanOn, model: Model, spec: JobSpec, gpu: Gpu) -> GpuPlan | None:
    """None if the memory of the changed model is not known."""
    try:
        return plan_on(model, spec, gpu)
    except UserError:
        return None


def _has_enough(plan: GpuPlan, work: Workload) -> bool:
    if plan.chosen is None or work.output_tokens <= 1:
        return plan.chosen is not None
    return plan.chosen.degrees.cache_tokens >= _FEW * (work.prompt_tokens + work.output_tokens)


def _cache_tokens(plan: GpuPlan) -> int:
    """Of all replicas; 0 if the model does not fit."""
    return 0 if plan.chosen is None else plan.chosen.degrees.cache_tokens * plan.chosen.data


def _changes(model: Model, spec: JobSpec) -> Iterator[tuple[str, Model, JobSpec]]:
    """Changes of the degrees, of the weights, and of how ranks share them, in words, with what they make."""

    def quantized(name: str) -> JobSpec:
        return spec.model_copy(update={"model": spec.model.model_copy(update={"quantization": name})})

    set_sizes = {name: getattr(spec.parallel, name) for name in _SIZES if name in spec.parallel.model_fields_set}
    if given := [f"{name} {size}" for name, size in set_sizes.items() if size != "auto"]:
        opened = spec.parallel.model_copy(update=dict.fromkeys(_SIZES, "auto"))
        words = f"other degrees than the spec's parallel ({', '.join(given)})"
        yield words, model, spec.model_copy(update={"parallel": opened})
    section = model.config.get("quantization_config")
    if not section and spec.model.quantization is None:
        yield "FP8 weights (model.quantization: fp8)", model, quantized("fp8")
    whole = {**spec.engine, "enable_expert_parallel": True}
    yield "whole experts (engine.enable_expert_parallel: true)", model, spec.model_copy(update={"engine": whole})
    config = {name: value for name, value in model.config.items() if name != "quantization_config"}
    # A twin has the size of AWQ's groups of 128. The files of the checkpoint here say nothing of it.
    twin = quantized("awq")
    twin = twin.model_copy(update={"model": twin.model.model_copy(update={"load_format": "dummy"})})
    if (section or {}).get("quant_method") not in ("awq", "gptq", "mxfp4"):  # those have 4 bits already
        yield "a 4-bit checkpoint, such as an AWQ one", dataclasses.replace(model, config=config), twin
