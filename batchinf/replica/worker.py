"""Drives one engine: admits requests, runs its steps, and passes finished requests on to the writer.

Requests enter without a barrier between leases, so that the engine stays full.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from batchinf.base import faults
from batchinf.base.errors import EngineDeadError, RowFailed
from batchinf.engines.protocol import Engine
from batchinf.output.open_lease import OpenLease
from batchinf.records import Completion, Request, Result
from batchinf.replica.byte_queue import ByteQueue
from batchinf.replica.feeder import Feeder, PendingRequest
from batchinf.replica.images import IMAGE_BYTES
from batchinf.replica.in_flight import InFlightRecord
from batchinf.replica.messages import Progress
from batchinf.replica.token_count import TokenCount
from batchinf.replica.writer import Writer

# Requests kept in the engine for each that it can run at once. 1.2 was measured best.
WINDOW = 1.2
_IDLE_S = 0.05
# Results of shared requests that are kept. Each has a few tokens.
_MOST_SHARED = 10_000


@dataclass(kw_only=True, eq=False)
class Worker:
    """Drives an engine until it is stopped. `run` blocks; everything else may be called from other threads."""

    engine: Engine
    ready: ByteQueue[PendingRequest]
    finished: ByteQueue[tuple[OpenLease, Result]]
    feeder: Feeder
    writer: Writer
    in_flight: InFlightRecord
    """Where to note which rows are in the engine."""
    counts_output: bool = True
    """What the engine generates is of use."""

    def __post_init__(self) -> None:
        info = self.engine.info
        self._entries: dict[tuple[int, int], int] = {}  # of the in-flight record
        self._window = window(info.max_num_seqs)
        self._pending: dict[tuple[int, int], PendingRequest] = {}
        self._deadline: float | None = None
        self._steps = 0
        self._tokens = TokenCount(
            counts_output=self.counts_output,
            pipeline_parallel_size=info.settings.get("pipeline_parallel_size", 1),
        )
        # Seconds of all finished steps, and when the running one began: one value, as another thread reads it.
        self._busy: tuple[float, float | None] = (0.0, None)
        self._image_bytes = 0  # of the requests in the engine
        self._num_finished = 0
        self._shared: dict[Hashable, Completion] = {}
        self._stalled_by_disk_s = 0.0
        self._stalled_since: float | None = None

    def stop(self, drain_s: float) -> None:
        """Journal, admit nothing more, finish running requests for at most `drain_s` seconds, and let `run` return."""
        deadline = time.monotonic() + drain_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        self.writer.checkpoint_soon()
        self.feeder.stop()

    def progress(self) -> Progress:
        writer = self.writer
        num_prompt_tokens, num_output_tokens = self._tokens.latest
        busy_s, began = self._busy
        return Progress(
            num_rows=writer.num_rows,
            errors=dict(writer.errors),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            steps=self._steps,
            in_flight=len(self._pending),
            stalled_by_disk_s=round(self._stalled_by_disk_s, 3),
            engine=self.engine.stats(),
            num_waiting=len(self.ready),
            num_answered=writer.num_answered,
            busy_s=round(busy_s + (0.0 if began is None else time.monotonic() - began), 3),
            num_unstored=max(0, self._num_finished - writer.num_requests),
            num_inputs=round(writer.num_inputs, 6) if writer.task.rows_vary else None,
        )

    def run(self) -> None:
        """Work until stopped. Raises EngineDeadError, after finished requests are stored."""
        self.feeder.start()
        self.writer.start()
        try:
            while not self._is_over():
                self._turn()
        except EngineDeadError:
            if self._deadline is None:
                raise
            # A signal to the whole process tree has ended the engine too. Nothing is left to drain.
        finally:
            self.feeder.stop()
            self.writer.finish()
        self._raise_from_threads()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline or self.engine.num_unfinished() == 0

    def _turn(self) -> None:
        self._raise_from_threads()
        if self._deadline is None:
            self._admit()
        if self.engine.num_unfinished():
            busy_s, _ = self._busy
            began = time.monotonic()
            self._busy = busy_s, began
            finished = self.engine.step()
            self._busy = busy_s + time.monotonic() - began, None
            self._store(finished)
            self._steps += 1
            # An engine may report a first token late, when the request has finished already.
            begun = [request for request in self.engine.begun() if request.key in self._pending]
            for request in begun:
                self.in_flight.note_output(self._entries[request.key])
            self._tokens.step(begun, finished, self.engine.stats().num_running)

    def _admit(self) -> None:
        num_unfinished = self.engine.num_unfinished()
        if self.finished.is_full:
            self._note_stall(num_unfinished < self._window)
            if not num_unfinished:
                self.finished.wait_until_room(_IDLE_S)
            return
        self._note_stall(False)
        idle_s = 0.0 if num_unfinished else _IDLE_S
        # The feeder sleeps while the engine is filled. When it was awake, it held the interpreter so often that the
        # engine ran 13 of 1,229 requests alone for half a second.
        room = max(0, self._window - num_unfinished) if self._image_bytes < IMAGE_BYTES else 0
        for pending in self.ready.take(room, idle_s, max_bytes=IMAGE_BYTES - self._image_bytes, shuts=True):
            self._add(pending)
        self.ready.open()

    def _note_stall(self, is_stalled: bool) -> None:
        """Count the time in which the engine has room, but admission waits for the disk."""
        now = time.monotonic()
        if self._stalled_since is not None:
            self._stalled_by_disk_s += now - self._stalled_since
        self._stalled_since = now if is_stalled else None

    def _add(self, pending: PendingRequest) -> None:
        request = pending.request
        known = self._shared.get(_shared_key(request)) if request.is_shared else None
        if known is not None:
            completion = replace(known, request=request)
            self._num_finished += 1
            self.finished.offer_all([(pending.result(completion), num_bytes(completion))])
            return
        # Recorded first, because `add` may kill the engine.
        self._entries[request.key] = self.in_flight.enter(request.row_index)
        try:
            self.engine.add(request)
        except RowFailed as refusal:
            self.in_flight.leave(self._entries.pop(request.key))
            self.finished.offer_all([(pending.result(None, refusal.error), 0)])
            return
        self._image_bytes += pending.image_bytes
        if request.rendered is not None:  # the engine has the tensors now
            pending = replace(pending, request=replace(request, rendered=None))
        self._pending[request.key] = pending

    def _store(self, completions: Sequence[Completion]) -> None:
        if not completions:
            return
        faults.point("worker.store")
        items = []
        for completion in completions:
            key = completion.request.key
            pending = self._pending.pop(key)
            self._image_bytes -= pending.image_bytes
            self.in_flight.leave(self._entries.pop(key))
            items.append((pending.result(completion), num_bytes(completion)))
            if completion.request.is_shared and len(self._shared) < _MOST_SHARED:
                self._shared[_shared_key(completion.request)] = completion
        self._num_finished += len(items)
        self.finished.offer_all(items)

    def _raise_from_threads(self) -> None:
        error = self.feeder.error or self.writer.error
        if error is not None:
            raise error


def _shared_key(request: Request) -> Hashable:
    """Equal for requests with equal results."""
    return tuple(request.prompt_token_ids), request.logprob_token_ids, request.adapter


def window(max_num_seqs: int) -> int:
    """Requests to keep in an engine."""
    return max(2, round(WINDOW * max_num_seqs))


def num_bytes(completion: Completion) -> int:
    """Memory of a completion, precise enough to bound a queue."""
    total = 200 + completion.token_ids.nbytes + (0 if completion.values is None else completion.values.nbytes)
    for logprobs in (completion.logprobs, completion.prompt_logprobs):
        if logprobs is not None:
            total += logprobs.token_ids.nbytes + logprobs.logprobs.nbytes + logprobs.ranks.nbytes
    return total
