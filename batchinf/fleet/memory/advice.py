"""Explains to people what memory was needed, what there was, and which changes would help by calculation."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from batchinf.fleet.memory.out_of_memory import Kind, OutOfMemory
from batchinf.fleet.memory.step_down import effective, step_down
from batchinf.model.memory import GIB, RESERVE_BYTES, Fit, Needs, gib

_MOST_DEGREE = 16
# Shorter sequences are not advised.
_LEAST_LENGTH = 256


def explain_cause(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit, model: str) -> str:
    """One message: the memory that was needed, the memory there was, and the changes that would help by calculation."""
    changes = _changes(cause, engine, fit)
    can = f"; to go on, {'; or '.join(changes)}" if changes else ""
    return f"{_WHAT[cause.kind]}: {', '.join(_figures(cause, engine, fit, model))}{can}"


_WHAT: dict[Kind, str] = {
    "free": "not enough memory is free on the device",
    "cache": "out of memory at the start, nothing is left for the KV cache",
    "length": "out of memory at the start, the KV cache would not hold one sequence of max_model_len",
    "load": "out of memory while the weights were loaded",
    "start": "out of memory at the start",
    "step": "out of memory while running",
    "host": "out of the host's memory",
}


def _figures(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit, model: str) -> list[str]:
    degree = fit.tensor_parallel_size * fit.pipeline_parallel_size
    each = f" on each of {degree} devices" if degree > 1 else ""
    length = "" if fit.max_model_len is None else f" {fit.max_model_len:,}"
    asker = "vLLM asked for" if cause.kind == "free" else "the allocation that failed was of"
    share = effective(engine, fit)["gpu_memory_utilization"]
    device_bytes = cause.total_bytes or fit.device_bytes
    figures: list[tuple[float | None, Callable[[float], str]]] = [
        (fit.weight_bytes, lambda size: f"{model} takes {gib(size)} for its weights{each}"),
        (
            cause.needed_bytes or fit.sequence_bytes,
            lambda size: f"the KV cache of one sequence of max_model_len{length} takes {gib(size)}",
        ),
        (cause.available_bytes, lambda size: f"{gib(size)} were left for it"),
        (cause.asked_bytes, lambda size: f"{asker} {gib(size)}"),
        (cause.free_bytes, lambda size: f"{gib(size)} were free"),
        (
            device_bytes or None,
            lambda size: (
                f"the device has {gib(size)}, of which gpu_memory_utilization {share:g} is {gib(size * share)}"
            ),
        ),
    ]
    return [text(size) for size, text in figures if size is not None] or [cause.words]


def _changes(cause: OutOfMemory, engine: Mapping[str, Any], fit: Fit) -> list[str]:
    """Advice, runtime settings first: with these the same command resumes the job."""
    now = effective(engine, fit)
    step = step_down(engine, cause, fit)
    if step is not None and cause.kind in ("free", "start", "step", "host"):
        changes = [f"set {' and '.join(f'engine.{name} to {value}' for name, value in step.items())}"]
    else:
        changes = []
    if cause.kind == "free":
        return [*changes, "end what else runs on the device, or choose another with parallel.devices"]
    if cause.kind in ("cache", "length", "load"):
        changes += _more_room(cause, now, fit)
    changes += _new_job(cause, engine, now, fit)
    return changes


def _more_room(cause: OutOfMemory, now: Mapping[str, Any], fit: Fit) -> list[str]:
    changes: list[str] = []
    if fit.device_bytes is None and cause.needed_bytes is not None:
        space = math.ceil(cause.needed_bytes / GIB)
        return [f"set the environment variable VLLM_CPU_KVCACHE_SPACE to {space} (GiB), which sizes the cache on a CPU"]
    share = now["gpu_memory_utilization"]
    least = _least_share(cause, share, fit)
    if cause.kind != "load" and least is not None and share < least <= 0.97:
        changes.append(f"raise engine.gpu_memory_utilization to {least:g}")
    if degree := _least_degree(cause, now, fit):
        changes.append(f"set parallel.tensor_parallel_size to {degree}")
    return changes


def _least_share(cause: OutOfMemory, share: float, fit: Fit) -> float | None:
    """The `gpu_memory_utilization` at which the job would fit; None if that is not known. share: now."""
    least = fit.least_utilization(RESERVE_BYTES)
    if cause.kind != "length" or not fit.device_bytes or not cause.needed_bytes or cause.available_bytes is None:
        return least
    # vLLM's own figures include activations.
    missing = (cause.needed_bytes - cause.available_bytes) / fit.device_bytes
    return max(least or 0.0, int((share + missing) * 100 + 2) / 100)


def _would_fit(changed: Fit, fit: Fit, cause: OutOfMemory, now: Mapping[str, Any]) -> bool:
    """Whether the weights and one sequence would fit. If vLLM said how much memory was left, that figure is used."""
    before = fit.weight_bytes
    after = changed.weight_bytes
    sequence = changed.sequence_bytes
    if cause.available_bytes is None or before is None or after is None or sequence is None:
        return bool(changed.fits(now["gpu_memory_utilization"], RESERVE_BYTES))
    return sequence <= cause.available_bytes + before - after


def _least_degree(cause: OutOfMemory, now: Mapping[str, Any], fit: Fit) -> int | None:
    """The next tensor-parallel size, doubling, at which weights and one sequence fit; None if none does."""
    degree = fit.tensor_parallel_size * 2
    while degree <= _MOST_DEGREE:
        if _would_fit(replace(fit, tensor_parallel_size=degree), fit, cause, now):
            return degree
        degree *= 2
    return None


def _most_tokens(cause: OutOfMemory, now: Mapping[str, Any], fit: Fit) -> int | None:
    """The longest sequence that the memory holds; None if that is of no use."""
    most = cause.most_tokens
    if not most and cause.kind != "length":
        most = fit.most_tokens(now["gpu_memory_utilization"], RESERVE_BYTES)
    is_useful = most and most >= _LEAST_LENGTH and (fit.max_model_len is None or most < fit.max_model_len)
    return most if is_useful else None


def _new_job(cause: OutOfMemory, engine: Mapping[str, Any], now: Mapping[str, Any], fit: Fit) -> list[str]:
    """Advice that changes the output, and so needs a new job."""
    if cause.kind not in ("cache", "length", "load"):
        return []
    choices = []
    if (most := _most_tokens(cause, now, fit)) is not None:
        choices.append(f"engine.max_model_len {most} or less")
    if not _would_fit(fit, fit, cause, now):
        smaller = _smaller_needs(engine, fit.needs)
        choices += [name for name, needs in smaller if _would_fit(replace(fit, needs=needs), fit, cause, now)]
    return [f"begin a new job, with another output.path, with {' or '.join(choices)}"] if choices else []


def _smaller_needs(engine: Mapping[str, Any], needs: Needs) -> Iterator[tuple[str, Needs]]:
    """What the model would need with another type of the cache or of the weights, by the field to change."""
    cache = needs.kv_cache
    if cache is not None and cache.item_bytes == 2 and not engine.get("kv_cache_dtype"):
        yield "engine.kv_cache_dtype fp8", replace(needs, kv_cache=cache.in_fp8())
    if needs.weights is not None and cache is not None:
        name = "model.quantization fp8, where the weights are not quantized yet"
        yield name, replace(needs, weights=needs.weights.halved())
