"""The scheduler of vLLM's engine process for pooling models, which admits prompts by a short loop and joins vectors.

`engine: {scheduler_cls: null}` in a spec restores vLLM's scheduler.
"""

from typing import Any

from batchinf.engines.vllm.names import optional
from batchinf.engines.vllm.scheduling.admission import AdmissionMixin
from batchinf.engines.vllm.scheduling.joined import JoiningMixin

_COST = "vLLM admits each prompt by itself, which is slower for short texts"
Scheduler: Any = optional("vllm.v1.core.sched.scheduler", "Scheduler", _COST)
AsyncScheduler: Any = optional("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", _COST)

# What `pooling_arguments` gives as `scheduler_cls`; None leaves vLLM its own.
POOLING_SCHEDULER = None if None in (Scheduler, AsyncScheduler) else f"{__name__}.pooling_scheduler"


def pooling_scheduler(**arguments: Any) -> Any:
    """Our scheduler for pooling models. A prompt may fill `max_model_len`, as no token follows it.

    0.26 keeps room for a token. A prompt of that length that runs in several steps would never end there.
    """
    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    made = type(f"Pooling{base.__name__}", (JoiningMixin, AdmissionMixin, base), {})(**arguments)
    if hasattr(made, "num_sampled_tokens_per_step"):
        made.num_sampled_tokens_per_step = 0  # as in 0.32
    made.admits_itself()
    return made
