"""The scheduler of vLLM's engine process for pooling models, with short loops for prompts and their vectors.

A text that fits into a step is admitted once, gets its vector, and ends. `engine: {scheduler_cls: null}` in a spec
restores vLLM's scheduler. Compared with the schedulers of 0.26.0, 0.32.0 and 0.33.0, step by step.
"""

import copy
from typing import Any

from batchinf.engines.vllm.known_sources import allowed
from batchinf.engines.vllm.names import optional
from batchinf.engines.vllm.scheduling import joined
from batchinf.engines.vllm.scheduling.admission import AdmissionMixin, is_plain

_COST = "vLLM handles each vector by itself, which is slower for short texts"
Scheduler: Any = optional("vllm.v1.core.sched.scheduler", "Scheduler", _COST)
AsyncScheduler: Any = optional("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", _COST)
EngineCoreOutput: Any = optional("vllm.v1.engine", "EngineCoreOutput", _COST)
EngineCoreOutputs: Any = optional("vllm.v1.engine", "EngineCoreOutputs", _COST)
FinishReason: Any = optional("vllm.v1.engine", "FinishReason", _COST)
RequestStatus: Any = optional("vllm.v1.request", "RequestStatus", _COST)

# What `pooling_arguments` gives as `scheduler_cls`; None leaves vLLM its own.
_NAMES = (Scheduler, AsyncScheduler, EngineCoreOutput, EngineCoreOutputs, FinishReason, RequestStatus)
POOLING_SCHEDULER = None if None in _NAMES else f"{__name__}.pooling_scheduler"


def pooling_scheduler(**arguments: Any) -> Any:
    """Our scheduler for pooling models. A prompt may fill `max_model_len`, as no token follows it.

    0.26 keeps room for a token. A prompt of that length that runs in several steps would never end there.
    """
    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    mixins = (PoolingMixin, AdmissionMixin) if allowed("vectors") else (AdmissionMixin,)
    made = type(f"Pooling{base.__name__}", (*mixins, base), {})(**arguments)
    if hasattr(made, "num_sampled_tokens_per_step"):
        made.num_sampled_tokens_per_step = 0  # as in 0.32
    made.admits_itself()
    return made


class PoolingMixin:
    """In front of vLLM's scheduler."""

    joins_results = False
    # Parts of vLLM's scheduler that are used here.
    requests: dict[str, Any]
    running: list[Any]
    _free_request: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ends_itself = is_plain(self, "vectors")  # whether the loop below runs
        joined.register(self)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """See vLLM, which gets the requests that have no vector yet. The others end here.

        Their outputs lack vLLM's events and statistics of a request, which our front end does not read.
        """
        outputs: list[Any] = []
        if self.ends_itself and model_runner_output.pooler_output:
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = self._end(scheduler_output, model_runner_output, outputs)
        vllms_own: Any = super()
        messages: dict[int, Any] = vllms_own.update_from_output(scheduler_output, model_runner_output)
        if outputs:
            messages.setdefault(0, EngineCoreOutputs()).outputs += outputs
        for message in messages.values() if self.joins_results else ():
            joined.join_vectors(message.outputs)
        return messages

    def _end(self, scheduled: Any, given: Any, outputs: list[Any]) -> dict[str, int]:
        """End the requests that have a vector. Returns the scheduled tokens of the others.

        If one of them is not as usual, vLLM gets all, so that blocks become free in the same order.
        """
        others: dict[str, int] = {}
        vectors, index, known = given.pooler_output, given.req_id_to_index, self.requests
        ready: list[tuple[Any, Any]] = []
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            request = known.get(name)  # None: it was aborted while the model ran
            vector = None if request is None else vectors[index[name]]
            if request is None or vector is None:
                others[name] = num_tokens
            elif _is_usual(request):
                ready.append((request, vector))
            else:
                return scheduled.num_scheduled_tokens  # type: ignore[no-any-return]
        for request, vector in ready:
            request.status = RequestStatus.FINISHED_STOPPED
            self._free_request(request)
            stop = FinishReason.STOP
            outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=stop, pooling_output=vector))
        if ready:
            ended = {request.request_id for request, _ in ready}
            self.running = [request for request in self.running if request.request_id not in ended]
        return others


def _is_usual(request: Any) -> bool:
    """Whether a request with a vector has tokens alone, was not preempted since this step, and is no session."""
    return (
        request.status is RequestStatus.RUNNING
        and not getattr(request, "num_stale_output_tokens", 0)  # not in 0.26
        and not request.resumable
        and not request.mm_features
        and not request.client_index
    )
