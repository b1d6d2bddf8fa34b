"""Lowers runtime engine arguments after memory ran out, so that the next start may have enough. Pure functions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchinf.fleet.memory.out_of_memory import OutOfMemory
from batchinf.model.memory import Fit, share_of

# Below these, a smaller batch saves almost nothing. Hybrid caches need a batch of at least one of their large blocks.
_LEAST_SEQS = 16
_LEAST_BATCHED_TOKENS = 2048
_LEAST_ROWS = 512
_SHARE_STEP = 0.05
_MOST_SHARE_STEP = 0.3
# If the model's needs are unknown.
_LEAST_SHARE = 0.3


def effective(engine: Mapping[str, Any], fit: Fit) -> dict[str, Any]:
    """The settings that a step lowers: of the spec, else of the task, else vLLM's offline defaults."""
    settings = {**replace(fit, engine=engine).limits, "gpu_memory_utilization": share_of(engine)}
    caches = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
    return settings | {name: engine[name] for name in caches if engine.get(name) is not None}


def step_down(engine: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """The runtime engine arguments to change, with their new values; None at the floor, or if nothing would help.

    It never changes arguments that decide the output, such as `max_model_len`. By kind:

    - `free`: another program holds memory. Ask for no more than is free, if weights and one sequence fit into that.
    - `cache`, `length`: vLLM measures activations with a full batch, so smaller batches leave more for the KV cache.
      They do not help if the weights alone leave too little.
    - `load`: only weights were loaded yet, so there is nothing to lower.
    - `start`: a full batch, or a step after the KV cache (CUDA graphs, the sampler's warm-up), did not fit. Lower
      batches and share together, because there is one try.
    - `step`: vLLM did not measure enough outside of its share. Lower the share by what was missing; at its floor, lower
      the batches.
    - `host`: lower the batches.
    """
    now = effective(engine, fit)
    share = now["gpu_memory_utilization"]
    match cause.kind:
        case "free":
            return _to_what_is_free(now, cause, fit)
        case "cache" | "length":
            # A cache of a given size (always so on a CPU) does not grow when something else shrinks.
            is_given = fit.device_bytes is None or now.keys() & {"kv_cache_memory_bytes", "num_gpu_blocks_override"}
            return None if is_given or fit.fits(share) is False else _smaller_batches(engine, now, fit)
        case "start":
            smaller = (_smaller_batches(engine, now, fit) or {}) | (_smaller_pool(now, cause, fit) or {})
            return smaller or None
        case "step":
            return _smaller_pool(now, cause, fit) or _smaller_batches(engine, now, fit)
        case "host":
            return _smaller_batches(engine, now, fit)
    return None


def _to_what_is_free(now: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    if not cause.total_bytes or cause.free_bytes is None:
        return None
    # One hundredth less, because the figures are rounded.
    share = int(cause.free_bytes / cause.total_bytes * 100 - 1) / 100
    least = replace(fit, device_bytes=cause.total_bytes).least_utilization()
    is_enough = share >= (_LEAST_SHARE if least is None else least)
    return {"gpu_memory_utilization": share} if is_enough and share < now["gpu_memory_utilization"] else None


def _smaller_batches(engine: Mapping[str, Any], now: Mapping[str, Any], fit: Fit) -> dict[str, Any] | None:
    smaller = {}
    num_seqs = now["max_num_seqs"]
    if num_seqs > _LEAST_SEQS:
        smaller["max_num_seqs"] = num_seqs = max(_LEAST_SEQS, num_seqs // 2)
    tokens = now["max_num_batched_tokens"]
    if _has_chunks(engine, fit) and tokens > (least := _least_tokens(tokens, num_seqs, fit)):
        smaller["max_num_batched_tokens"] = max(least, tokens // 2)
    return smaller or None


def _has_chunks(engine: Mapping[str, Any], fit: Fit) -> bool:
    """Whether vLLM cuts long prompts. Otherwise a step must hold the longest prompt."""
    is_named = engine.get("max_num_batched_tokens") is not None
    # On a CPU, chunks are off unless a size is given.
    return engine.get("enable_chunked_prefill") is not False and (is_named or fit.device_bytes is not None)


def _least_tokens(tokens: int, num_seqs: int, fit: Fit) -> int:
    """The floor of `max_num_batched_tokens`, which is `tokens` now."""
    # A task with its own limit holds a row of the vocabulary for each token, so a few tokens matter.
    floor = _LEAST_ROWS if "max_num_batched_tokens" in fit.batch_limits else _LEAST_BATCHED_TOKENS
    least = max(floor, num_seqs)
    if fit.device_bytes is None:  # smaller steps would cut prompts: see `check_processor`
        least = max(least, fit.max_model_len or tokens)
    return least


def _smaller_pool(now: Mapping[str, Any], cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """A smaller share for vLLM, or the setting that replaces the share; one sequence must still fit."""
    if isinstance(blocks := now.get("num_gpu_blocks_override"), int):
        return {"num_gpu_blocks_override": int(blocks * 0.9)} if blocks * 0.9 * 16 >= (fit.max_model_len or 0) else None
    if isinstance(size := now.get("kv_cache_memory_bytes"), int):
        least = fit.sequence_bytes or size // 2
        return {"kv_cache_memory_bytes": int(size * 0.9)} if size * 0.9 >= least else None
    return _smaller_share(now["gpu_memory_utilization"], cause, fit)


def _smaller_share(now: float, cause: OutOfMemory, fit: Fit) -> dict[str, Any] | None:
    """A smaller `gpu_memory_utilization`: by what was missing, or by the usual step if that is too much."""
    steps = [_SHARE_STEP]
    if cause.asked_bytes and cause.total_bytes:
        missing = (cause.asked_bytes - (cause.free_bytes or 0)) / cause.total_bytes
        steps.insert(0, max(_SHARE_STEP, min(_MOST_SHARE_STEP, missing + 0.01)))
    least = fit.least_utilization()
    shares = (round(now - step, 2) for step in steps)
    share = next((share for share in shares if share >= (_LEAST_SHARE if least is None else least)), None)
    return None if share is None else {"gpu_memory_utilization": share}
