"""Whether an engine takes each prompt in one step, and so needs no keys and values of earlier steps.

The scheduler and the worker ask, perhaps in two processes: the first does not cut prompts, and the second does not
write what no step reads.
"""

from typing import Any

from batchinf.engines.vllm.known_sources import allowed
from batchinf.spec.job import WHOLE_STEPS

_SCHEDULING = f"{__package__}."
# A step has room for most prompts from here on. Longer ones are cut, and their steps have no CUDA graph.
_LEAST_TOKENS = 8192
_EXACT = ("auto", "float16", "bfloat16")  # types of a cache that changes no numbers


def has_known_order(scheduling: Any) -> bool:
    """Whether prompts run in an order for which the loops of this package were written. scheduling: vLLM's config."""
    # 0.33 may hold back all prompts in some steps. Before, it did so for data parallel ranks alone.
    is_prompt_in_each_step = getattr(scheduling, "prefill_schedule_interval", 1) <= 1
    return is_prompt_in_each_step and scheduling.policy == "fcfs" and scheduling.long_prefill_token_threshold <= 0


def takes_prompts_whole(vllm_config: Any) -> bool:
    """Whether a prompt that fits into a step is computed in one step, from its first token on."""
    scheduling, cache = vllm_config.scheduler_config, vllm_config.cache_config
    room = scheduling.max_num_batched_tokens
    return bool(
        vllm_config.additional_config.get(WHOLE_STEPS)
        and str(scheduling.scheduler_cls).startswith(_SCHEDULING)
        and has_known_order(scheduling)
        and not cache.enable_prefix_caching
        and cache.cache_dtype in _EXACT
        and vllm_config.kv_transfer_config is None  # a connector stores blocks of the cache, for later prompts too
        and room >= min(_LEAST_TOKENS, vllm_config.model_config.max_model_len)
        and allowed("admit")  # vLLM's own loop cuts prompts
    )
