"""A short loop that admits waiting prompts to a step, in place of vLLM's loop.

The Python of vLLM's engine process limits the speed of jobs that score (`benchmarks/pieces.py small-score`). For each
prompt, vLLM's loop asks for cached blocks, encoder inputs, adapters and more. Where none of these can be, as `is_plain`
says, a prompt needs blocks of the KV cache, and nothing else. The loop was compared with the schedulers of 0.26.0,
0.32.0 and 0.33.0, step by step; where the source differs, vLLM admits all prompts.

It leaves out vLLM's event that a request was scheduled, which our front end does not read. It ends at a request that is
not new, such as one whose grammar is still compiled; vLLM gets the next step then.
"""

import copy
import inspect
from typing import Any

from batchinf.engines.vllm.known_sources import allowed
from batchinf.engines.vllm.names import optional

_COST = "vLLM admits each prompt by itself, which is slower for short ones"
RequestStatus: Any = optional("vllm.v1.request", "RequestStatus", _COST)
NewRequestData: Any = optional("vllm.v1.core.sched.output", "NewRequestData", _COST)

# Parts of vLLM's scheduler that look at each request of a step. The loops know nothing of them, so they must be off.
_LOOKS_AT_ALL = (
    *("connector", "ec_connector", "aux_output_connector", "lora_config", "perf_metrics", "use_pp", "num_spec_tokens"),
    *("num_lookahead_tokens", "need_mamba_block_aligned_split", "prefix_replay_tokens", "defer_block_free"),
    *("is_encoder_decoder", "is_mm_encoder_only"),
)


def is_plain(made: Any, piece: str) -> bool:
    """Whether a request of this scheduler is only tokens and their blocks, and none has to run before another.

    piece: see `known_sources.py`. Without a known source, the parts of vLLM that are asked here may have other names.
    With one group of full attention no block leaves a window, so a token inside a block needs no change of the cache.
    With the policy `fcfs`, a request never preempts one before it in the batch.
    """
    scheduling = made.scheduler_config
    # 0.33 may hold back all prompts in some steps. Before, it did so for data parallel ranks alone.
    if getattr(scheduling, "prefill_schedule_interval", 1) > 1:
        return False
    has_known_order = scheduling.policy == "fcfs" and scheduling.long_prefill_token_threshold <= 0
    if not has_known_order or any(getattr(made, name, None) for name in _LOOKS_AT_ALL) or not allowed(piece):
        return False
    managers = made.kv_cache_manager.coordinator.single_type_managers
    pool = made.kv_cache_manager.block_pool
    kinds = [type(manager).__name__ for manager in managers]
    return kinds == ["FullAttentionManager"] and pool.hash_block_size == managers[0].block_size


class InFront:
    """In front of vLLM's scheduler. Declares the parts of it that the loops of this package use."""

    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    kv_cache_manager: Any
    scheduler_config: Any
    pause_state: Any
    structured_output_manager: Any
    prev_step_scheduled_req_ids: set[str]
    use_v2_model_runner: bool
    model_uses_mrope: bool
    max_model_len: int
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    max_num_active_reqs: int
    num_waiting_for_streaming_input: int
    scheduler_reserve_full_isl: bool
    _inflight_prefills: set[Any]
    _update_after_schedule: Any

    def takes_prompts(self, *arguments: Any, **named: Any) -> bool:
        """Whether vLLM admits prompts to this step. arguments, named: of `schedule`, that may hold prompts back."""
        return not any((*arguments, *named.values())) and self.pause_state.name == "UNPAUSED"


class AdmissionMixin(InFront):
    """`admits_itself` decides whether the loop runs."""

    _blocks: Any = None  # the manager of the KV cache's blocks, if the loop runs

    def admits_itself(self) -> None:
        """Let the loop run, if it does the same as vLLM's with these settings. Call it once, on a new scheduler.

        Without a prefix cache, no block of a waiting prompt is there already.
        """
        if not is_plain(self, "admit"):
            return
        if self.kv_cache_manager.enable_caching or getattr(self, "needs_kv_cache_zeroing", False):
            return
        [self._blocks] = self.kv_cache_manager.coordinator.single_type_managers
        self._tells_mrope = "uses_mrope" in inspect.signature(NewRequestData.from_request).parameters

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """See vLLM, which gets the requests that run already. Waiting prompts come after these, as with vLLM."""
        vllms_own: Any = super()
        waiting = self.waiting
        if (
            self._blocks is None
            or not self.takes_prompts(*arguments, **named)
            or not (waiting and _is_new(waiting.peek_request()))
            or any(getattr(self, name, None) for name in ("skipped_waiting", "kv_holding_waiting"))
        ):
            return vllms_own.schedule(*arguments, **named)
        self.waiting = preempted = type(waiting)()
        try:
            output = vllms_own.schedule()
        finally:
            self.waiting = waiting
            for request in reversed(list(preempted)):
                waiting.prepend_request(request)
        if admitted := self._admit(output):  # none if a request was preempted: it is the first then
            self._count(output, admitted)
        return output

    def _admit(self, output: Any) -> dict[str, int]:
        """Move prompts from the queue to the batch and to the step's output. Returns how many tokens each computes."""
        manager, waiting, running = self._blocks, self.waiting, self.running
        size, free = manager.block_size, self.kv_cache_manager.block_pool.get_num_free_blocks()
        budget = self.max_num_scheduled_tokens - output.total_num_scheduled_tokens
        most = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)  # 0.26 has only the second
        room = most - len(running) - self.num_waiting_for_streaming_input
        kept = self.kv_cache_manager.watermark_blocks
        deferred: set[Any] = getattr(self, "deferred_waiting", set())  # not in 0.26
        more: dict[str, Any] = {"uses_mrope": self.model_uses_mrope} if self._tells_mrope else {}
        admitted: dict[str, int] = {}
        is_cut = self.scheduler_config.enable_chunked_prefill
        while budget > 0 and len(admitted) < room and waiting and _is_new(request := waiting.peek_request()):
            token_ids = request._all_token_ids
            length = len(token_ids)
            if length > budget and not is_cut:
                break
            num_tokens = min(length, budget)
            fitting = min(length, self.max_model_len) if self.scheduler_reserve_full_isl else num_tokens
            if max(-(-fitting // size), -(-num_tokens // size)) + (kept if running else 0) > free:
                break
            name = request.request_id
            blocks = manager.allocate_new_blocks(name, num_tokens, num_tokens)
            free -= len(blocks)
            budget -= num_tokens
            waiting.pop_request()
            deferred.discard(request)
            running.append(request)
            request.status = RequestStatus.RUNNING
            if num_tokens < length:
                self._inflight_prefills.add(request)
            if request.prefill_stats is not None:
                request.prefill_stats.set(
                    num_prompt_tokens=request.num_prompt_tokens, num_local_cached_tokens=0, num_external_cached_tokens=0
                )
            admitted[name] = num_tokens
            known = (token_ids,) if self.use_v2_model_runner else ()
            ids = ([block.block_id for block in blocks],)
            output.scheduled_new_reqs.append(NewRequestData.from_request(request, ids, *known, **more))
        return admitted

    def _count(self, output: Any, admitted: dict[str, int]) -> None:
        """What vLLM does with the requests of a step when all are chosen."""
        part = copy.copy(output)
        part.num_scheduled_tokens = admitted
        self._update_after_schedule(part)
        output.num_scheduled_tokens |= admitted
        output.total_num_scheduled_tokens += sum(admitted.values())
        for name in ("has_structured_output_requests", "pending_structured_output_tokens"):
            setattr(output, name, getattr(output, name) or getattr(part, name))
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(admitted)
        if output.num_common_prefix_blocks:  # in 0.26
            first = self.running[0].request_id
            output.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(first)


def _is_new(request: Any) -> bool:
    """Whether a waiting request was never admitted, and has tokens alone. A preempted one has another status."""
    return request.status is RequestStatus.WAITING and not request.num_computed_tokens and not request.mm_features
