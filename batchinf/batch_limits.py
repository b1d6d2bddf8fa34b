"""Engine arguments for batches that a task sets where the spec is silent: what vLLM does not measure decides them.

Of a prompt whose logprobs or logits are wanted vLLM makes a row of the vocabulary for each token, which its memory
profiling does not see. Both who starts an engine and who lowers its arguments when memory ran out reckon from these.
"""

from collections.abc import Mapping
from typing import Any

from batchinf.model import text_section
from batchinf.spec import JobSpec

# Of a prompt's token and each entry of the vocabulary: a logit in 16 bits and a logprob in 32.
_SCORED_BYTES = 6
_LARGE_VOCABULARY = 262_144
# Rows of a step's prompts, as float32 and whatever is made of them.
_STEP_BYTES = 2 << 30
# In flight a request holds its rows of the whole vocabulary, 256 KB each.
_LOGITS_SEQS = 256


def batch_limits(
    spec: JobSpec, vocab_size: int | None, device_bytes: int | None, gpu_memory_utilization: float
) -> dict[str, int]:
    """The task's own `max_num_seqs` and `max_num_batched_tokens`; none of them where vLLM's defaults stay.

    vocab_size: None where it is unknown. device_bytes: memory of one device; None on a CPU. The spec is resolved.
    """
    limits: dict[str, int] = {}
    if spec.task in ("generate", "score") and spec.reads_prompts and device_bytes is not None:
        tokens = scored_tokens_at_once(device_bytes, gpu_memory_utilization, vocab_size)
        limits["max_num_batched_tokens"] = tokens
    if spec.logits is not None and spec.logits.is_full:
        limits["max_num_seqs"] = _LOGITS_SEQS
        if spec.logits.positions not in ("last", "generated") and device_bytes is not None:
            width = spec.logits.vocab_size or vocab_size or _LARGE_VOCABULARY
            limits["max_num_batched_tokens"] = max(512, min(8192, _STEP_BYTES // (8 * width)))
    return limits


def scored_tokens_at_once(device_bytes: int, gpu_memory_utilization: float, vocab_size: int | None) -> int:
    """`max_num_batched_tokens` for prompts whose logprobs are wanted: their logits fit beside vLLM's share.

    vLLM's V1 runner materialises tokens × vocabulary × 6 bytes that its memory profiling does not see. (V2 does 1,024
    rows at a time.) Half of what vLLM leaves free is for them; not below 1,024, as each of so many sequences that run
    at once may have a token in a step.
    """
    free_bytes = device_bytes * (1 - gpu_memory_utilization) / 2
    fit = int(free_bytes / (_SCORED_BYTES * (vocab_size or _LARGE_VOCABULARY)))
    return max(1024, min(8192, fit // 256 * 256))


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """By a model's config; None where it does not say."""
    found = text_section(config).get("vocab_size") or config.get("vocab_size")
    return found if isinstance(found, int) else None
