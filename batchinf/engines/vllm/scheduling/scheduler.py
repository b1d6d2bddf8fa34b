"""The scheduler of vLLM's engine process, changed to send a request's output when the request is finished.

It keeps the rows of a step, with one write for all requests. Requests that only decode go through two short loops,
`_schedule_head` and `_add_tokens`, which were compared with vLLM's methods step by step
(`benchmarks/scheduler_steps.py` has the costs). Requests with stop strings go through unchanged, because the front end
looks at their text after every token. `engine: {scheduler_cls: null}` in a spec restores vLLM's scheduler.

The subclass holds at most 176 MB for 1,024 requests with their top 20, at any length. The constants below give this
sum: 68 MB of full blocks, as much again in a step in which all send a piece, 23 MB of slots for 2,048 requests, and 17
MB of token ids.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from batchinf.engines.vllm.known_sources import allowed
from batchinf.engines.vllm.scheduling.joined import JoiningMixin
from batchinf.engines.vllm.scheduling.masks import GuidedRows
from batchinf.engines.vllm.scheduling.pooling_scheduler import pooling_scheduler

# What `engine_arguments` gives as `scheduler_cls`: vLLM imports it by name, in whichever process it schedules.
SCHEDULER = f"{__name__}.scheduler"
# Settings that add values to each step's output that this scheduler does not collect.
_STEPWISE = ("enable_return_routed_experts", "return_sampling_mask")
# Logprobs that a slot holds before they are moved out of it: 64 tokens with their top 20.
_SLOT_ENTRIES = 64 * 21
_FIRST_SLOTS = 64
# Logprobs of a request that is not finished leave in a piece of about this size: 384 tokens with their top 20. Smaller
# pieces would cost a message more often. Without pieces 1,024 outputs of 32,000 tokens would take 5.8 GB.
_PIECE_BYTES = 2**16
# Token ids of a request without logprobs leave in pieces of about the same size; a reference takes 8 bytes.
_PIECE_TOKENS = _PIECE_BYTES // 8

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]


def scheduler(**arguments: Any) -> Any:
    """Our scheduler, or vLLM's own if a setting needs the outputs of every step."""
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    base: Any = AsyncScheduler if is_async else Scheduler
    if not allowed("hold"):
        return pooling_scheduler(**arguments)  # joined results do not need it
    made = type(f"Holding{base.__name__}", (JoiningMixin, HoldingMixin, base), {})(**arguments)
    if any(getattr(made, name, False) for name in _STEPWISE):
        return base(**arguments)
    made._changes = _block_changes(made)
    if allowed("masks"):
        made._guided = GuidedRows(made.structured_output_manager)
        made.structured_output_manager.grammar_bitmask = made._guided.grammar_bitmask
    return made


# Parts of vLLM's scheduler that look at each request of a step. The loops know nothing of them, so they must be off.
_LOOKS_AT_ALL = (
    *("connector", "ec_connector", "aux_output_connector", "lora_config", "perf_metrics", "use_pp", "num_spec_tokens"),
    *("num_lookahead_tokens", "need_mamba_block_aligned_split", "prefix_replay_tokens", "defer_block_free"),
    *("is_encoder_decoder", "is_mm_encoder_only"),
)


# Managers of a group of cache that were compared with the loops. Of MambaManager, not its mode `align`.
_KNOWN_MANAGERS = frozenset(
    """FullAttentionManager SlidingWindowManager ChunkedLocalAttentionManager RSWAManager CircularBufferManager
    MambaManager""".split()
)
# A request's first steps of decoding, in which its prompt may still be in flight, so that many blocks leave a window.
_FIRST_STEPS = 3


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """The steps in which the blocks of a request that decodes may change, in any group of the KV cache."""

    every: int
    """A group may need a block, or cache one, if the number of tokens is a multiple of this."""
    leaving: tuple[tuple[int, int], ...]
    """Of each kind of group that frees blocks: `offset`, `period`. It does so if `processed - offset` has reached a
    multiple of `period`, where `processed` counts the computed tokens that are not in flight."""
    only_group: Any = None
    """The manager of the cache's only group, if a new block is all that changes: full attention without a prefix cache.
    It gives the block in a fifth of the time that `allocate_slots` takes to ask for everything else."""


def _block_changes(made: Any) -> BlockChanges | None:
    """When blocks change, if the short loops do the same as vLLM's methods with these settings; else None.

    Without a known source, the parts of vLLM that are asked here may have other names. With the policy `fcfs`, a
    request never preempts one before it in the batch.
    """
    scheduling = made.scheduler_config
    # 0.33 may hold back all prompts in some steps. Before, it did so for data parallel ranks alone.
    if getattr(scheduling, "prefill_schedule_interval", 1) > 1:
        return None
    has_known_order = scheduling.policy == "fcfs" and scheduling.long_prefill_token_threshold <= 0
    if not has_known_order or any(getattr(made, name, None) for name in _LOOKS_AT_ALL) or not allowed("decode"):
        return None
    if made.num_sampled_tokens_per_step != 1:
        return None
    managers = made.kv_cache_manager.coordinator.single_type_managers
    names = {_name_of(manager) for manager in managers}
    if unknown := sorted(names - _KNOWN_MANAGERS):
        print(f"the scheduler's short loops are off for {', '.join(unknown)}; steps take longer", flush=True)
        return None
    # A state, such as Mamba's, has one block as long as the longest request.
    growing = [each for each in managers if each.block_size < made.max_model_len]
    sizes = [each.block_size for each in growing if _name_of(each) != "CircularBufferManager"]
    if made.kv_cache_manager.enable_caching:
        sizes.append(made.kv_cache_manager.block_pool.hash_block_size)
    leaving = {window for each in growing if (window := _window_of(each)) is not None}
    gives_blocks = names == {"FullAttentionManager"} and len(managers) == 1 and not made.kv_cache_manager.enable_caching
    return BlockChanges(
        math.gcd(*sizes) or made.max_model_len, tuple(sorted(leaving)), managers[0] if gives_blocks else None
    )


def _name_of(manager: Any) -> str:
    mode = getattr(manager, "mamba_cache_mode", "")
    return type(manager).__name__ + (" in mode align" if mode == "align" else "")


def _window_of(manager: Any) -> tuple[int, int] | None:
    """See `BlockChanges.leaving`. None for a group whose requests keep their blocks. Follows vLLM's
    `get_num_skipped_tokens`."""
    size = manager.block_size
    match type(manager).__name__:
        case "SlidingWindowManager":
            return manager.sliding_window - 1 + manager.extra_retained_tokens, size
        case "ChunkedLocalAttentionManager":
            return 0, manager.attention_chunk_size
        case "RSWAManager":
            return manager.rswa_window, size
        case "MambaManager":
            return 1, size
    return None


class RowStore:
    """Logprobs of running requests, `width` for each token. Each request has a slot that grows token by token."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._depth = max(1, _SLOT_ENTRIES // width)
        self.piece_tokens = self._depth * max(1, _PIECE_BYTES // (self._depth * width * 8))
        self._full: list[list[Arrays]] = []
        self._free: list[int] = []
        self._used = np.zeros(0, np.int64)
        self._arrays: Arrays = (
            np.zeros((0, self._depth, width), np.int32),
            np.zeros((0, self._depth, width), np.float32),
            np.zeros((0, self._depth), np.int32),
        )

    def new_slot(self) -> int:
        if not self._free:
            start, more = len(self._used), max(_FIRST_SLOTS, len(self._used))
            self._used = np.concatenate([self._used, np.zeros(more, np.int64)])
            token_ids, logprobs, ranks = (
                np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]) for array in self._arrays
            )
            self._arrays = token_ids, logprobs, ranks
            self._full += [[] for _ in range(more)]
            self._free = list(range(start + more - 1, start - 1, -1))
        return self._free.pop()

    def append(self, slots: list[int], rows: list[int], step: Any) -> None:
        """Append to each of these slots, all different, one row of a step's LogprobsLists, [R, width or more]."""
        at, of = np.array(slots), np.array(rows)
        places = self._used[at]
        token_ids, logprobs, ranks = self._arrays
        token_ids[at, places] = step.logprob_token_ids[of, : self.width]
        logprobs[at, places] = step.logprobs[of, : self.width]
        ranks[at, places] = step.sampled_token_ranks[of]
        places += 1
        self._used[at] = places
        for slot in at[places == self._depth].tolist():
            self._full[slot].append(self._copy(slot))
            self._used[slot] = 0

    def take(self, slot: int) -> Arrays:
        """All rows of a slot, int32 and float32 [n, width] and int32 [n]. The slot is empty then."""
        pieces = [*self._full[slot], self._copy(slot)]
        self._full[slot], self._used[slot] = [], 0
        token_ids, logprobs, ranks = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return token_ids, logprobs, ranks

    def free(self, slot: int) -> None:
        """Drop a slot's rows and give the slot to another request."""
        self._full[slot], self._used[slot] = [], 0
        self._free.append(slot)

    def _copy(self, slot: int) -> Arrays:
        used = self._used[slot]
        token_ids, logprobs, ranks = self._arrays
        return token_ids[slot, :used].copy(), logprobs[slot, :used].copy(), ranks[slot, :used].copy()


class _Held:
    """The output that a request has made and not sent yet. store: None without logprobs.

    piece_tokens: so many tokens leave as a piece. loops_until: the short loops handle the request
    while it has fewer tokens than this, prompt included: it has not reached its longest length, and sends no piece.
    """

    __slots__ = ("is_begun", "loops_until", "piece_tokens", "request", "slot", "stop_ids", "store", "token_ids")

    def __init__(self, request: Any, store: RowStore | None) -> None:
        self.request = request
        self.store = store
        self.slot = -1 if store is None else store.new_slot()
        self.piece_tokens = _PIECE_TOKENS if store is None else min(_PIECE_TOKENS, store.piece_tokens)
        self.is_begun = False
        self.token_ids: list[int] = []
        self.loops_until = 0
        params = request.sampling_params
        self.stop_ids = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])

    def new_loops_until(self, most_tokens: int, reasons: bool) -> int:
        """The value after a step that vLLM handled. reasons: a structure may begin only after the reasoning."""
        request = self.request
        if request.sampling_params.repetition_detection or request.mm_features or request.num_preemptions:
            return 0
        if reasons and request.structured_output_request is not None:
            return 0
        end_of_piece = len(request._all_token_ids) + self.piece_tokens - len(self.token_ids)
        return min(most_tokens, int(request.num_prompt_tokens + request.max_tokens), end_of_piece)


class HoldingMixin:
    """Extends vLLM's Scheduler: holds back requests with one final output and without stop strings."""

    # Parts of vLLM's scheduler that the loops use.
    requests: dict[str, Any]
    running: list[Any]
    kv_cache_manager: Any
    pause_state: Any
    structured_output_manager: Any
    prev_step_scheduled_req_ids: set[str]
    use_v2_model_runner: bool
    max_model_len: int
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    max_num_active_reqs: int

    # Set by `scheduler`. None: vLLM handles all requests.
    _changes: BlockChanges | None = None
    # Set by `scheduler`. None: grammars are asked one by one.
    _guided: GuidedRows | None = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, _Held] = {}
        self._others: set[str] = set()
        self._stores: dict[int, RowStore] = {}

    def add_request(self, request: Any) -> None:
        """See vLLM. Decides whether the request's output is held back."""
        is_known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if is_known:
            return
        if _is_held_back(request):
            k = request.sampling_params.num_logprobs
            self._held[request.request_id] = _Held(request, None if k is None else self._store(k))
        else:
            self._others.add(request.request_id)

    def finish_requests(self, request_ids: str | Iterable[str] | None, *arguments: Any, **named: Any) -> Any:
        """See vLLM. Drops the output of aborted requests, which run again or are not needed."""
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = list(request_ids)
        ended = super().finish_requests(request_ids, *arguments, **named)  # type: ignore[misc]
        names = [*self._held, *self._others] if request_ids is None else request_ids
        for request_id in [names] if isinstance(names, str) else names:
            self._forget(request_id)
        return ended

    def _preempt_request(self, request: Any, *arguments: Any, **named: Any) -> None:
        """See vLLM, which counts preemptions where its prefix cache is asked again: without that cache, never."""
        super()._preempt_request(request, *arguments, **named)  # type: ignore[misc]
        if (held := self._held.get(request.request_id)) is not None:
            held.loops_until = 0
        cache = self.kv_cache_manager
        if not cache.enable_caching and cache.prefix_cache_stats is not None:
            cache.prefix_cache_stats.preempted_requests += 1

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """See vLLM. Schedules the requests at the head of the batch that only decode, and gives vLLM the others.

        vLLM goes through the batch in order and then admits requests. So the result is the same if vLLM gets only the
        rest of the batch, with the limits that the head leaves. It always gets the last request, because it checks
        whether the batch is empty.
        """
        vllms_own: Any = super()
        if (
            self._changes is None
            or any((*arguments, *named.values()))  # that hold prompts back
            or self.pause_state.name != "UNPAUSED"
            or len(self.running) > self.max_num_scheduled_tokens
        ):
            return vllms_own.schedule(*arguments, **named)
        num_head, steps, masked = self._schedule_head(self._changes)
        head, self.running = self.running[:num_head], self.running[num_head:]
        self._lower_limits(num_head, len(steps.req_ids))
        output = vllms_own.schedule()
        self._lower_limits(-num_head, -len(steps.req_ids))
        self.running = head + self.running
        others = output.scheduled_cached_reqs
        for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
            getattr(others, name)[:0] = getattr(steps, name)
        others.all_token_ids |= steps.all_token_ids
        output.num_scheduled_tokens = dict.fromkeys(steps.req_ids, 1) | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += len(steps.req_ids)
        output.has_structured_output_requests |= bool(masked)
        # A request's mask depends on the token that a step in flight makes.
        output.pending_structured_output_tokens |= any(masked)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(steps.req_ids)
        return output

    def _schedule_head(self, changes: BlockChanges) -> tuple[int, Any, set[bool]]:
        """Schedule requests from the head of the batch up to one that does not only decode or finds no free block.

        A request that was scheduled one step ago has at most two more processed tokens than then.

        Returns their number; the CachedRequestData of those that take part in the step; and a set that says, of those
        with a structured output among the latter, whether a step in flight makes a token of the request.
        """
        manager, most_tokens = self.kv_cache_manager, self.max_model_len
        every = changes.every
        leaving = changes.leaving
        only_group = changes.only_group
        takes_all, before = not self.use_v2_model_runner, self.prev_step_scheduled_req_ids
        num_placeholders, is_caching = int(isinstance(self, AsyncScheduler)), manager.enable_caching
        scheduled: list[Any] = []
        computed_tokens, output_tokens, new_block_ids = [], [], []
        masked: set[bool] = set()
        num_head = 0
        for request in self.running[:-1]:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            known = len(request._all_token_ids)
            if known + placeholders != computed + 1 or request.is_prefill_chunk or request.mm_features:
                break
            has_last = placeholders and known + 1 >= request.num_prompt_tokens + request.max_tokens
            if has_last or computed + 1 >= most_tokens:  # a step in flight makes the last token
                num_head += 1
                continue
            block_ids = None
            may_change = computed % every == 0 or (is_caching and min(computed + 1, known) % every == 0)
            if leaving and not may_change:
                processed = computed - request.num_in_flight_tokens
                is_first = computed - request.num_prompt_tokens < _FIRST_STEPS
                may_change = is_first or request.num_preemptions > 0
                for offset, period in leaving:
                    may_change = may_change or (processed - offset) % period < 2
            if may_change and only_group is not None:
                if not manager.block_pool.get_num_free_blocks():
                    break
                added = only_group.allocate_new_blocks(request.request_id, computed + 1, computed + 1)
                block_ids = ([block.block_id for block in added],)
            elif may_change:
                blocks = manager.allocate_slots(request, 1)
                if blocks is None:
                    break
                block_ids = blocks.get_block_ids(allow_none=True)
            num_head += 1
            if request.structured_output_request is not None:
                masked.add(placeholders > 0)
            scheduled.append(request)
            new_block_ids.append(block_ids)
            computed_tokens.append(computed)
            output_tokens.append(computed + 1 - request.num_prompt_tokens)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders = placeholders + num_placeholders
        names = [request.request_id for request in scheduled]
        new = {r.request_id: r.all_token_ids.copy() for r in scheduled if takes_all and r.request_id not in before}
        steps = CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids=new,
            new_block_ids=new_block_ids,
            num_computed_tokens=computed_tokens,
            num_output_tokens=output_tokens,
        )
        return num_head, steps, masked

    def _lower_limits(self, num_requests: int, num_tokens: int) -> None:
        self.max_num_scheduled_tokens -= num_tokens
        self.max_num_running_reqs -= num_requests
        self.max_num_active_reqs -= num_requests

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """See vLLM. Each step still sends a message, because the front end counts steps and reads their statistics."""
        step, index = model_runner_output.logprobs, model_runner_output.req_id_to_index
        rows_of: dict[RowStore | None, tuple[list[int], list[int]]] = {
            store: ([], []) for store in (None, *self._stores.values())
        }
        has_loops = self._changes is not None and not model_runner_output.num_nans_in_logits
        if has_loops and model_runner_output.sampled_token_ids:
            scheduled = scheduler_output.num_scheduled_tokens
            scheduler_output = copy.copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = self._add_tokens(scheduled, model_runner_output, rows_of)
        if not self._others:
            model_runner_output.logprobs = None  # otherwise vLLM slices each request's rows, 0.8 µs each
        messages: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if not messages and any(slots for slots, _ in rows_of.values()):
            messages[0] = EngineCoreOutputs()
        for message in messages.values():
            message.outputs = self._hold(message.outputs, index, step, rows_of)
            rows_of = {store: ([], []) for store in rows_of}
        return messages

    def _add_tokens(
        self, scheduled: dict[str, int], given: Any, rows_of: Any, *, are_accepted: bool = False
    ) -> dict[str, int]:
        """Give each request of the loops its token, and `rows_of` its row. Returns the tokens of the others.

        are_accepted: whether the grammars of all have accepted their tokens already.
        """
        others: dict[str, int] = {}
        sampled, index = given.sampled_token_ids, given.req_id_to_index
        starts = None if given.logprobs is None else given.logprobs.cu_num_generated_tokens
        num_placeholders, all_held = int(isinstance(self, AsyncScheduler)), self._held
        every = self._changes.every if self._changes and self.kv_cache_manager.enable_caching else None
        asked: dict[str, tuple[Any, int]] = {}
        for name, num_tokens in scheduled.items():
            held = all_held.get(name)
            if held is None or not held.loops_until:
                others[name] = num_tokens
                continue
            request, row = held.request, index[name]
            token_ids, known = sampled[row], request._all_token_ids
            if len(known) + 1 >= held.loops_until or len(token_ids) != 1 or token_ids[0] in held.stop_ids:
                others[name] = num_tokens
                continue
            if request.structured_output_request is not None and not are_accepted:
                asked[name] = request, token_ids[0]
                continue
            known.append(token_ids[0])
            request._output_token_ids.append(token_ids[0])
            held.token_ids.append(token_ids[0])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= num_placeholders
            if every is not None:
                if len(known) % every == 0:
                    request.update_block_hashes()
                if num_placeholders and (len(known) - 1) % every == 0:
                    self.kv_cache_manager.cache_blocks(request, len(known) - 1)
            slots, rows = rows_of[held.store]
            slots.append(held.slot)
            rows.append(row if starts is None else starts[row])
        if asked:
            accepted = self._accepted(asked)
            self._add_tokens(accepted, given, rows_of, are_accepted=True)
            if refused := asked.keys() - accepted.keys():  # in the order of the step, in which vLLM ends requests
                others = {name: number for name, number in scheduled.items() if name in others or name in refused}
        return others

    def _accepted(self, asked: dict[str, tuple[Any, int]]) -> dict[str, int]:
        """Advance the grammars of requests by a token each. Returns those that accepted it, with their one token.

        Where one did not, vLLM asks again, is refused too, and ends the request.
        """
        grammars = {name: request.structured_output_request.grammar for name, (request, _) in asked.items()}
        tokens = [(name, grammar, asked[name][1]) for name, grammar in grammars.items()]
        answers = {} if self._guided is None else self._guided.accept(tokens)
        for name, grammar, token_id in tokens:
            if name not in answers:
                answers[name] = grammar.accept_tokens(name, [token_id])
            if not answers[name]:
                grammar.accept_tokens = lambda *_: False  # that of guidance accepts all after it has refused one
        return {name: 1 for name in asked if answers[name]}

    def _hold(self, outputs: list[Any], index: dict[str, int], step: Any, rows_of: Any) -> list[Any]:
        """The outputs of a step that are sent now: of finished requests, pieces of long outputs, and first outputs.

        rows_of: slots and rows, by their store, of requests without an output.
        """
        leaving = []
        ours = []
        starts = None if step is None else step.cu_num_generated_tokens
        for output in outputs:
            request_id = output.request_id
            held = self._held.get(request_id)
            if held is None:
                leaving.append(output)
                if output.finish_reason is not None:
                    self._others.discard(request_id)
                continue
            ours.append((output, held))
            token_ids, store = output.new_token_ids, held.store
            held.token_ids += token_ids
            if store is not None and step is not None:
                row = index[request_id] if starts is None else starts[index[request_id]]
                if len(token_ids) == 1:
                    slots, rows = rows_of[store]
                    slots.append(held.slot)
                    rows.append(row)
                else:  # several or none, in speculative decoding
                    for offset in range(len(token_ids)):
                        store.append([held.slot], [row + offset], step)
        for store, (slots, rows) in rows_of.items():
            if store is not None and slots and step is not None:
                store.append(slots, rows, step)
        has_loops = self._changes is not None
        reasons = has_loops and self.structured_output_manager.reasoner_cls is not None
        for output, held in ours:
            is_finished = output.finish_reason is not None
            if is_finished or len(held.token_ids) >= held.piece_tokens:
                _piece(output, held)
                leaving.append(output)
            elif not held.is_begun:
                # The first output tells that the prompt was run; it has the prompt's logprobs and statistics.
                output.new_token_ids = []
                output.new_logprobs = None
                leaving.append(output)
            held.is_begun = True
            if is_finished:
                self._forget(output.request_id)
            elif has_loops:
                held.loops_until = held.new_loops_until(self.max_model_len, reasons)
        return leaving

    def _forget(self, request_id: str) -> None:
        self._others.discard(request_id)
        held = self._held.pop(request_id, None)
        if held is not None and held.store is not None:
            held.store.free(held.slot)

    def _store(self, k: int) -> RowStore:
        if k not in self._stores:
            self._stores[k] = RowStore(k + 1)
        return self._stores[k]


def _piece(output: Any, held: _Held) -> None:
    """Give the output all tokens that the request has made since it last sent some."""
    output.new_token_ids, held.token_ids, output.new_logprobs = held.token_ids, [], None
    if held.store is not None and output.new_token_ids:
        output.new_logprobs = LogprobsLists(*held.store.take(held.slot))


def _is_held_back(request: Any) -> bool:
    """Whether the request's output is needed only at its end. Rows of a whole vocabulary are too large to keep."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not getattr(request, "resumable", False)
        and (params.num_logprobs is None or 0 <= params.num_logprobs <= _SLOT_ENTRIES)
    )
