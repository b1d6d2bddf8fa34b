"""Keeps one engine full, without a barrier between leases, and records which rows are in it.

The record is memory of the backend and outlives the replica. If the engine or the replica dies, the rows in it are
suspected. An entry takes less than a microsecond and no disk access.
"""

import struct
import time
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from batchinf.base import faults
from batchinf.base.errors import EngineDeadError, RequestRefused
from batchinf.engines.protocol import Engine
from batchinf.records import Completion, Request
from batchinf.replica.feeder import ByteQueue, FailedRow, Feeder, PendingRequest, error_result
from batchinf.replica.messages import InFlightRequest, Progress
from batchinf.replica.writer import Finished, Writer

# row_index, then 0 for a free slot or 2 * (order of entering) + (1 once a token came out).
_SLOT = struct.Struct("<qq")

# Sizes of the record, in bytes. The first has far more slots than any engine's window. The second is for hosts that
# limit the size of files, which also limits shared memory. Requests without a slot are not recorded.
RECORD_BYTES = ((1 << 16) * _SLOT.size, (1 << 12) * _SLOT.size)


class InFlightRecord:
    """One replica's requests in flight. The engine thread writes it; the backend reads it when the replica ends."""

    def __init__(self, memory: bytearray | mmap) -> None:
        """memory: zeros, or what an earlier record wrote. One of RECORD_BYTES long."""
        self._memory = memory
        self._free = list(range(len(memory) // _SLOT.size - 1, -1, -1))
        self._num_entered = 0

    def enter(self, row_index: int) -> int:
        """Record a request that goes into the engine. Returns its slot, or -1 if none is free."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._num_entered += 1
        _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, 2 * self._num_entered)
        return slot

    def note_output(self, slot: int) -> None:
        """Record the request's first token."""
        if slot >= 0:
            row_index, state = _SLOT.unpack_from(self._memory, slot * _SLOT.size)
            _SLOT.pack_into(self._memory, slot * _SLOT.size, row_index, state | 1)

    def leave(self, slot: int) -> None:
        """Free the slot of a request that has left the engine."""
        if slot >= 0:
            _SLOT.pack_into(self._memory, slot * _SLOT.size, 0, 0)
            self._free.append(slot)

    def requests(self) -> Sequence[InFlightRequest]:
        """All requests in the engine, in the order in which they were added. Takes 0.1 ms, also while it is written."""
        slots = np.frombuffer(self._memory, "<i8").reshape(-1, 2)
        used = slots[slots[:, 1] != 0]
        return [InFlightRequest(row, bool(state & 1)) for row, state in used[np.argsort(used[:, 1])].tolist()]


class TokenCount:
    """Tokens that an engine has run and generated, while their requests are unfinished too.

    A finished request counts with the tokens that it has. Tokens of unfinished requests are estimated: a step gives a
    token to each running request, in a pipeline only to those of one stage. So at each step, each unfinished request
    counts the same share of a token: the share of the unfinished requests that run, divided by the number of stages.
    """

    def __init__(self, *, counts_output: bool, pipeline_parallel_size: int = 1) -> None:
        self._counts_output = counts_output
        self._num_stages = pipeline_parallel_size
        # The tokens of a request that began with the first step, now and when each request began.
        self._tokens_of_all = 0.0
        self._at_first: dict[tuple[int, int], float] = {}
        self._sum_at_first = 0.0
        self._num_prompt_tokens = self._num_finished_tokens = 0
        self.latest = (0, 0)  # prompt and output tokens; other threads read it

    def step(self, begun: Sequence[Request], finished: Sequence[Completion], num_running: int) -> None:
        """Count a step. begun: unfinished requests whose first token came. num_running: as the engine says."""
        for completion in finished:
            first = self._at_first.pop(completion.request.key, None)
            self._sum_at_first -= first or 0.0
            self._num_prompt_tokens += len(completion.request.prompt_token_ids) if first is None else 0
            self._num_finished_tokens += len(completion.token_ids)
        if self._at_first:
            self._tokens_of_all += min(1.0, num_running / len(self._at_first)) / self._num_stages
        for request in begun:
            self._num_prompt_tokens += len(request.prompt_token_ids)
            self._at_first[request.key] = self._tokens_of_all - 1
            self._sum_at_first += self._tokens_of_all - 1
        num_unfinished_tokens = round(len(self._at_first) * self._tokens_of_all - self._sum_at_first)
        num_output_tokens = self._num_finished_tokens + num_unfinished_tokens if self._counts_output else 0
        self.latest = self._num_prompt_tokens, num_output_tokens


# Requests kept in the engine for each that it can run at once. 1.2 was measured best.
_WINDOW = 1.2
_IDLE_S = 0.05


class Worker:
    """Drives an engine until it is stopped. `run` blocks; everything else may be called from other threads."""

    def __init__(
        self,
        *,
        engine: Engine,
        ready: ByteQueue[PendingRequest],
        finished: ByteQueue[Finished | FailedRow],
        feeder: Feeder,
        writer: Writer,
        in_flight: InFlightRecord,
        counts_output: bool = True,
    ) -> None:
        """in_flight: where to note which rows are in the engine. counts_output: what it generates is of use."""
        self._engine = engine
        self._ready = ready
        self._finished = finished
        self._feeder = feeder
        self._writer = writer
        self._in_flight = in_flight
        self._slots: dict[tuple[int, int], int] = {}
        self._window = window(engine.info.max_num_seqs)
        self._pending: dict[tuple[int, int], PendingRequest] = {}
        self._deadline: float | None = None
        self._steps = 0
        self._tokens = TokenCount(
            counts_output=counts_output, pipeline_parallel_size=engine.info.settings.get("pipeline_parallel_size", 1)
        )
        self._busy_s = 0.0
        self._num_finished = 0
        self._stalled_by_disk_s = 0.0
        self._stalled_since: float | None = None

    def stop(self, drain_s: float) -> None:
        """Journal, admit nothing more, finish running requests for at most `drain_s` seconds, and let `run` return."""
        deadline = time.monotonic() + drain_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self._writer.tick_soon()
        self._feeder.stop()

    def progress(self) -> Progress:
        totals = self._writer.totals
        num_prompt_tokens, num_output_tokens = self._tokens.latest
        return Progress(
            num_rows=totals.num_rows,
            errors=dict(totals.errors),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            steps=self._steps,
            in_flight=len(self._pending),
            stalled_by_disk_s=round(self._stalled_by_disk_s, 3),
            engine=self._engine.stats(),
            num_waiting=len(self._ready),
            num_answered=totals.num_answered,
            busy_s=round(self._busy_s, 3),
            num_unstored=max(0, self._num_finished - totals.num_requests),
        )

    def begin(self) -> None:
        """Let leases begin. Called before `run`, on the thread that revokes leases."""
        self._feeder.begin(self._writer.track)

    def run(self) -> None:
        """Work until stopped. Raises EngineDeadError, after finished requests are stored."""
        self._feeder.start_once()
        self._writer.start()
        try:
            while not self._is_over():
                self._turn()
        except EngineDeadError:
            if self._deadline is None:
                raise
            # A signal to the whole process tree has ended the engine too. Nothing is left to drain.
        finally:
            self._feeder.stop()
            self._writer.finish()
        self._raise_from_threads()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline or self._engine.num_unfinished() == 0

    def _turn(self) -> None:
        self._raise_from_threads()
        if self._deadline is None:
            self._admit()
        if self._engine.num_unfinished():
            began = time.monotonic()
            finished = self._engine.step()
            self._busy_s += time.monotonic() - began
            self._store(finished)
            self._steps += 1
            # An engine may report a first token late, when the request has finished already.
            begun = [request for request in self._engine.begun() if request.key in self._pending]
            for request in begun:
                self._in_flight.note_output(self._slots[request.key])
            self._tokens.step(begun, finished, self._engine.stats().num_running)

    def _admit(self) -> None:
        num_unfinished = self._engine.num_unfinished()
        if self._finished.is_full:
            self._note_stall(num_unfinished < self._window)
            if not num_unfinished:
                self._finished.wait_until_room(_IDLE_S)
            return
        self._note_stall(False)
        idle_s = 0.0 if num_unfinished else _IDLE_S
        # The feeder sleeps while the engine is filled. When it was awake, it held the interpreter so often that the
        # engine ran 13 of 1,229 requests alone for half a second.
        for pending in self._ready.take(max(0, self._window - num_unfinished), idle_s, shuts=True):
            if not pending.lease.is_given_back:
                self._add(pending)
        self._ready.open()

    def _note_stall(self, is_stalled: bool) -> None:
        """Count the time in which the engine has room, but admission waits for the disk."""
        now = time.monotonic()
        if self._stalled_since is not None:
            self._stalled_by_disk_s += now - self._stalled_since
        self._stalled_since = now if is_stalled else None

    def _add(self, pending: PendingRequest) -> None:
        request = pending.request
        # Recorded first, because `add` may kill the engine.
        self._slots[request.key] = self._in_flight.enter(request.row_index)
        try:
            self._engine.add(request)
        except RequestRefused as refusal:
            self._in_flight.leave(self._slots.pop(request.key))
            if pending.probe is not None:
                pending.probe.set()
                return
            result = error_result(
                pending.prompt,
                request.request_index,
                pending.num_requests,
                refusal.error,
                attempts=pending.lease.lease.attempts,
            )
            self._finished.offer_all([(FailedRow(pending.lease, (result,)), 0)])
            return
        self._pending[request.key] = pending

    def _store(self, completions: Sequence[Completion]) -> None:
        if not completions:
            return
        faults.point("worker.store")
        items = []
        for completion in completions:
            key = completion.request.key
            pending = self._pending.pop(key)
            self._in_flight.leave(self._slots.pop(key))
            if pending.probe is None:
                items.append((Finished(pending, completion), num_bytes(completion)))
            else:
                pending.probe.set()
        self._num_finished += len(items)
        self._finished.offer_all(items)

    def _raise_from_threads(self) -> None:
        error = self._feeder.error or self._writer.error
        if error is not None:
            raise error


def window(max_num_seqs: int) -> int:
    """Requests to keep in an engine."""
    return max(2, round(_WINDOW * max_num_seqs))


def num_bytes(completion: Completion) -> int:
    """Memory of a completion, precise enough to bound a queue."""
    total = 200 + completion.token_ids.nbytes + (0 if completion.values is None else completion.values.nbytes)
    for logprobs in (completion.logprobs, completion.prompt_logprobs):
        if logprobs is not None:
            total += logprobs.token_ids.nbytes + logprobs.logprobs.nbytes + logprobs.ranks.nbytes
    return total
