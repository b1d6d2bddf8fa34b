"""The scheduler of vLLM's engine process, changed to send a request's output when the request is finished.

vLLM sends each request's new token and logprobs after every step. For 1,024 requests with their top 20, a step takes
4.3 ms of processor time to pack in the engine process and 17.5 ms to unpack in ours (`benchmarks/wire.py`); without
logprobs 0.1 and 0.2 ms. A step of a small model takes 17 ms. This subclass keeps the rows of a step, with one write for
all requests, and sends a finished request in one piece. A long output leaves in several pieces: the front end joins
them, and the engine process never holds more than about `_PIECE_BYTES` of a request. Requests with stop strings go
through unchanged, because the front end looks at their text after every token. `engine: {scheduler_cls: null}` in a
spec restores vLLM's scheduler. Read against 0.26.0 and run with 0.32.0.

For 1,024 requests with their top 20 it holds at most 176 MB, whatever their length. The constants below give this:
68 MB of full blocks, as much again in a step in which all send a piece, 23 MB of slots for 2,048 requests, and 17 MB of
token ids.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import RequestOutputKind

from batchinf.engines.vllm.names import optional

_COST = "outputs are sent at each step, which is slower for small models"
Scheduler: Any = optional("vllm.v1.core.sched.scheduler", "Scheduler", _COST)
AsyncScheduler: Any = optional("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", _COST)
LogprobsLists: Any = optional("vllm.v1.outputs", "LogprobsLists", _COST)

# What `engine_arguments` gives as `scheduler_cls`: vLLM imports it by name, in whichever process it schedules. None
# leaves vLLM its own.
SCHEDULER = None if None in (Scheduler, AsyncScheduler, LogprobsLists) else f"{__name__}.scheduler"

# Whether a request may be preempted while several of its steps are in flight: in a pipeline, or with speculation. Under
# asynchronous scheduling 0.26 then dies of `assert request.num_output_placeholders >= 0`. vLLM's pull request 48245
# mended that, and added this parameter.
_update: Any = getattr(AsyncScheduler, "_update_request_with_output", None)
PREEMPTS_IN_FLIGHT = _update is None or "is_stale" in inspect.signature(_update).parameters
_SEAM = ("add_request", "finish_requests", "update_from_output")
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
    """vLLM's scheduler that holds outputs back. vLLM's own if its methods have other names or a setting needs steps."""
    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    if not all(hasattr(base, name) for name in _SEAM):
        return base(**arguments)
    made = type(f"Holding{base.__name__}", (HoldingMixin, base), {})(**arguments)
    return base(**arguments) if any(getattr(made, name, False) for name in _STEPWISE) else made


class RowStore:
    """Logprobs of running requests, `width` for each token. Each request has a slot that grows token by token."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._depth = max(1, _SLOT_ENTRIES // width)
        self._most_full = max(1, _PIECE_BYTES // (self._depth * width * 8))
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

    def append(self, slots: list[int], rows: list[int], step: Any) -> list[int]:
        """Append to each of these slots, all different, one row of a step's LogprobsLists, [R, width or more].

        Returns those of the slots whose rows are to leave as a piece.
        """
        at, of = np.array(slots), np.array(rows)
        places = self._used[at]
        token_ids, logprobs, ranks = self._arrays
        token_ids[at, places] = step.logprob_token_ids[of, : self.width]
        logprobs[at, places] = step.logprobs[of, : self.width]
        ranks[at, places] = step.sampled_token_ranks[of]
        places += 1
        self._used[at] = places
        leaving = []
        for slot in at[places == self._depth].tolist():
            self._full[slot].append(self._copy(slot))
            self._used[slot] = 0
            if len(self._full[slot]) >= self._most_full:
                leaving.append(slot)
        return leaving

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
    """What a request has made and not sent. store: None without logprobs."""

    __slots__ = ("is_begun", "slot", "store", "token_ids")

    def __init__(self, store: RowStore | None) -> None:
        self.store = store
        self.slot = -1 if store is None else store.new_slot()
        self.is_begun = False
        self.token_ids: list[int] = []


class HoldingMixin:
    """Extends vLLM's Scheduler: holds back requests with one final output and without stop strings."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, _Held] = {}
        self._others: set[str] = set()
        self._stores: dict[int, RowStore] = {}

    def add_request(self, request: Any) -> None:
        """See vLLM. Decides whether the request's output is held back."""
        is_known = request.request_id in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if is_known:
            return
        if _is_held_back(request):
            k = request.sampling_params.num_logprobs
            self._held[request.request_id] = _Held(None if k is None else self._store(k))
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

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """See vLLM. Each step still sends a message, because the front end counts steps and reads their statistics."""
        step, index = model_runner_output.logprobs, model_runner_output.req_id_to_index
        if not self._others:
            model_runner_output.logprobs = None  # otherwise vLLM slices each request's rows, 0.8 µs each
        messages: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for message in messages.values():
            if message.outputs:
                message.outputs = self._hold(message.outputs, index, step)
        return messages

    def _hold(self, outputs: list[Any], index: dict[str, int], step: Any) -> list[Any]:
        """The outputs of a step that are sent now: of finished requests, of long ones a piece, and first outputs."""
        leaving, finished, begun = [], [], []
        starts = None if step is None else step.cu_num_generated_tokens
        full: set[tuple[RowStore | None, int]] = set()
        has_long = False
        rows_of: dict[RowStore, tuple[list[int], list[int]]] = {store: ([], []) for store in self._stores.values()}
        for output in outputs:
            request_id = output.request_id
            held = self._held.get(request_id)
            if held is None:
                leaving.append(output)
                if output.finish_reason is not None:
                    self._others.discard(request_id)
                continue
            token_ids, store = output.new_token_ids, held.store
            held.token_ids += token_ids
            has_long |= len(held.token_ids) >= _PIECE_TOKENS
            if store is not None and step is not None:
                row = index[request_id] if starts is None else starts[index[request_id]]
                if len(token_ids) == 1:
                    slots, rows = rows_of[store]
                    slots.append(held.slot)
                    rows.append(row)
                else:  # several or none, in speculative decoding
                    for offset in range(len(token_ids)):
                        full.update((store, slot) for slot in store.append([held.slot], [row + offset], step))
            if output.finish_reason is not None:
                finished.append((output, held))
            elif not held.is_begun:
                held.is_begun = True
                begun.append(output)
        for store, (slots, rows) in rows_of.items():
            if slots:
                full.update((store, slot) for slot in store.append(slots, rows, step))
        for output in begun:
            # The first output tells that the prompt was run; it has the prompt's logprobs and statistics.
            output.new_token_ids, output.new_logprobs = [], None
            leaving.append(output)
        for output in outputs if full or has_long else ():
            held = self._held.get(output.request_id)
            if held is None or output.finish_reason is not None:
                continue
            if (held.store, held.slot) in full or len(held.token_ids) >= _PIECE_TOKENS:
                if output not in begun:
                    leaving.append(output)
                _piece(output, held)
        for output, held in finished:
            _piece(output, held)
            leaving.append(output)
            self._forget(output.request_id)
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
