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
    - `cache`: vLLM measures activations with a full batch, so smaller batches leave more for the KV cache. They do not
      help if the weights alone leave too little. A smaller share would make it worse.
    - `load`: only weights were loaded yet, so there is nothing to lower.
    - `batch`: lower batches and share together, because a start has one try.
    """
    now = effective(engine, fit)
    match cause.kind:
        case "free":
            return _to_what_is_free(now["gpu_memory_utilization"], cause.free_share or 0.0, fit)
        case "cache":
            # A cache of a given size (always so on a CPU) does not grow when something else shrinks.
            is_given = fit.device_bytes is None or now.keys() & {"kv_cache_memory_bytes", "num_gpu_blocks_override"}
            is_useless = is_given or fit.fits(now["gpu_memory_utilization"]) is False
            return None if is_useless else _smaller_batches(engine, now, fit) or None
        case "load":
            return None
        case "batch":
            return {**_smaller_batches(engine, now, fit), **_smaller_pool(now, fit)} or None


def _to_what_is_free(now: float, free_share: float, fit: Fit) -> dict[str, Any] | None:
    # One hundredth less, because the figures are rounded.
    share = int(free_share * 100 - 1) / 100
    return {"gpu_memory_utilization": share} if _least_share(fit) <= share < now else None


def _least_share(fit: Fit) -> float:
    """The least `gpu_memory_utilization`: weights and one sequence must fit."""
    least = fit.least_utilization()
    return _LEAST_SHARE if least is None else least


def _smaller_batches(engine: Mapping[str, Any], now: Mapping[str, Any], fit: Fit) -> dict[str, Any]:
    smaller = {}
    num_seqs = now["max_num_seqs"]
    if num_seqs > _LEAST_SEQS:
        smaller["max_num_seqs"] = num_seqs = max(_LEAST_SEQS, num_seqs // 2)
    tokens = now["max_num_batched_tokens"]
    if _has_chunks(engine, fit) and tokens > (least := _least_tokens(tokens, num_seqs, fit)):
        smaller["max_num_batched_tokens"] = max(least, tokens // 2)
    return smaller


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


def _smaller_pool(now: Mapping[str, Any], fit: Fit) -> dict[str, Any]:
    """A smaller share for vLLM, or the setting that replaces the share; one sequence must still fit."""
    if isinstance(blocks := now.get("num_gpu_blocks_override"), int):
        return {"num_gpu_blocks_override": int(blocks * 0.9)} if blocks * 0.9 * 16 >= (fit.max_model_len or 0) else {}
    if isinstance(size := now.get("kv_cache_memory_bytes"), int):
        least = fit.sequence_bytes or size // 2
        return {"kv_cache_memory_bytes": int(size * 0.9)} if size * 0.9 >= least else {}
    share = round(now["gpu_memory_utilization"] - _SHARE_STEP, 2)
    return {"gpu_memory_utilization": share} if share >= _least_share(fit) else {}
