"""The scheduler of vLLM's engine process for pooling models, which joins vectors.

`engine: {scheduler_cls: null}` in a spec restores vLLM's scheduler.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from batchinf.engines.vllm.scheduling.joined import JoiningMixin

# What `pooling_arguments` gives as `scheduler_cls`.
POOLING_SCHEDULER = f"{__name__}.pooling_scheduler"


def pooling_scheduler(**arguments: Any) -> Any:
    """vLLM's scheduler with `JoiningMixin` in front."""
    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    return type(f"Pooling{base.__name__}", (JoiningMixin, base), {})(**arguments)
