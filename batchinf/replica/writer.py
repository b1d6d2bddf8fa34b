"""The writer thread: decodes and encodes completions, journals them at each checkpoint, and turns shards into parts.

A whole shard whose part is written before the next checkpoint is never journalled. A lease of only some of its rows is
journalled when it is finished.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from batchinf.base import faults
from batchinf.output.checkpoints import next_journal_at
from batchinf.output.counts import count_errors
from batchinf.output.open_lease import OpenLease
from batchinf.records import Part, Result
from batchinf.replica.answers import Answers
from batchinf.replica.byte_queue import ByteQueue
from batchinf.replica.messages import Event, Key, LeaseDone
from batchinf.tasks.base import Task

# Results wait up to this long, because decoding and encoding cost far less in batches.
_GATHER_S = 0.1
_GATHER_ITEMS = 256
_GATHER_BYTES = 32 << 20


# If results that are in no segment take more, they are journalled before the checkpoint.
_MOST_BYTES = 96 << 20
# Parts written at one time.
_NUM_CLOSERS = 1
# For results of 256 KB each. A shard has a few hundred of them, and two or three shards are open at once. With this
# much memory, each result is written only once if the disk keeps up. One thread writes 200 MB/s of float16 as Parquet.
_WIDE_CLOSERS = max(1, min(4, (os.cpu_count() or 1) // 4))
_WIDE_BYTES = (128 << 20) * (1 + _WIDE_CLOSERS)


@dataclass(slots=True, eq=False)
class _Closing:
    """A finished shard whose part is being written."""

    lease: OpenLease
    future: Future[None]
    num_bytes: int
    """Memory of its results that are in no segment."""
    is_kept: bool = False
    """The journal has all its results."""


@dataclass(kw_only=True, eq=False, repr=False)
class Writer(threading.Thread):
    """Takes finished requests from a queue; each finished shard that it holds whole becomes a staged part."""

    finished: ByteQueue[tuple[OpenLease, Result]]
    task: Task
    answers: Answers
    write_part: Callable[[OpenLease], Part]
    emit: Callable[[Event], None]
    checkpoint_interval_s: float
    is_mirrored: bool = False
    """Whether the journal goes to a bucket: see `output.checkpoints`."""

    def __post_init__(self) -> None:
        super().__init__(name="writer", daemon=True)
        self._next_checkpoint = self._checkpoint_after(time.monotonic(), 0.0)
        self._checkpoint_is_due = threading.Event()
        self._open: dict[Key, OpenLease] = {}
        self._lock = threading.Lock()
        has_wide_results = self.task.has_wide_results
        self._max_bytes = _WIDE_BYTES if has_wide_results else _MOST_BYTES
        num_closers = _WIDE_CLOSERS if has_wide_results else _NUM_CLOSERS
        self._closer = ThreadPoolExecutor(num_closers, thread_name_prefix="closer")
        self._closing: list[_Closing] = []
        self._is_stopping = False
        self.num_rows = 0
        """Output rows stored since the worker started, with those that the journal already had."""
        self.num_inputs = 0.0
        """Their input rows; of an unfinished one, the share that is finished. Only if the task's rows vary."""
        self.errors = Counter[str]()
        """Those of `num_rows` that failed, by the error's type."""
        self.num_answered = 0
        """Rows that the engine finished, also those whose answers are errors."""
        self.num_requests = 0
        """Requests that the engine finished."""
        self.error: BaseException | None = None

    def track(self, lease: OpenLease) -> None:
        """Add a lease that has begun. If the journal has all its results, it is closed at once."""
        with self._lock:
            self._open[lease.key] = lease
            self.num_rows += lease.num_counted
            self.num_inputs += lease.counted_shares
            self.errors = self.errors + lease.counted_errors

    def checkpoint_soon(self) -> None:
        """Journal now, without waiting for the interval; once more if that is being done already."""
        self._checkpoint_is_due.set()

    def finish(self) -> None:
        """Store all that is in the queue, close finished shards, journal the rest, and end."""
        self._is_stopping = True
        self.finished.close()
        self.join()
        self._closer.shutdown(wait=True)
        self._raise_closing()

    def run(self) -> None:
        """Write until told to finish. Keeps an exception in `error`; the worker raises it."""
        try:
            while self._turn():
                pass
            self._checkpoint()
            self._keep_closing()
        except BaseException as error:
            self.error = error

    def _turn(self) -> bool:
        # Read the flag before the queue: all that was in the queue when it was set is stored before the end.
        is_last = self._is_stopping
        wait_s = min(_GATHER_S, max(0.0, self._next_checkpoint - time.monotonic()))
        is_behind = self._closing_bytes() > self._max_bytes
        if is_behind:
            # Take nothing: the queue fills up, and admission waits.
            items = []
            wait([closing.future for closing in self._closing], wait_s, FIRST_COMPLETED)
        else:
            items = self.finished.take(4 * _GATHER_ITEMS, wait_s, _GATHER_ITEMS, _GATHER_BYTES)
        if items:
            self._store(items)
        if self._checkpoint_is_due.is_set() or time.monotonic() >= self._next_checkpoint:
            self._checkpoint_is_due.clear()  # before the checkpoint, which has none of the results that come meanwhile
            started = time.monotonic()
            self._checkpoint()
            self._keep_closing()
            self._next_checkpoint = self._checkpoint_after(started, self._spare_s(time.monotonic() - started))
        elif self._unjournalled_bytes() > self._max_bytes:
            self._checkpoint()
        self._close_finished()
        self._raise_closing()
        return bool(items) or is_behind or not is_last

    def _store(self, items: Sequence[tuple[OpenLease, Result]]) -> None:
        faults.point("writer.store")
        by_lease: dict[Key, tuple[OpenLease, list[Result]]] = {}
        for (lease, _), result in zip(items, self.answers.read([result for _, result in items]), strict=True):
            by_lease.setdefault(lease.key, (lease, []))[1].append(result)
        for lease, results in by_lease.values():
            self._add(lease, results)

    def _add(self, lease: OpenLease, results: Sequence[Result]) -> None:
        num_unasked = sum(result.completion is None for result in results)
        batch = self.task.encode(results)
        num_before = lease.num_finished
        shares_before = lease.num_input_shares
        lease.add(batch)
        num_rows = lease.num_finished - num_before
        errors = count_errors(batch.column("error_type"))
        with self._lock:  # the feeder's thread adds to the totals, too: see `track`
            self.num_rows += num_rows
            self.num_inputs += lease.num_input_shares - shares_before
            if errors:
                # A new object, because another thread reads the old one.
                self.errors = self.errors + errors
            self.num_answered += max(0, num_rows - num_unasked)
        self.num_requests += len(results) - num_unasked

    def _unjournalled_bytes(self) -> int:
        with self._lock:
            return sum(lease.unjournalled_bytes for lease in self._open.values())

    def _checkpoint(self) -> None:
        with self._lock:
            leases = list(self._open.values())
        faults.point("writer.checkpoint")
        for lease in leases:
            lease.checkpoint()

    def _checkpoint_after(self, started: float, spare_s: float) -> float:
        if self.is_mirrored:
            return next_journal_at(started, self.checkpoint_interval_s, spare_s)
        return started + self.checkpoint_interval_s - spare_s

    def _spare_s(self, checkpoint_s: float) -> float:
        """Seconds by which the next checkpoint begins early: its results are durable at the end of the interval."""
        return min(2 * checkpoint_s, self.checkpoint_interval_s / 2) + min(_GATHER_S, self.checkpoint_interval_s / 10)

    def _keep_closing(self) -> None:
        """Journal finished shards whose parts are still being written. Otherwise a crash costs more on a slow disk."""
        for closing in self._closing:
            if closing.is_kept or closing.future.done():
                continue
            segment = closing.lease.keep()
            closing.is_kept = True
            if segment is not None and closing.future.done() and closing.future.exception() is None:
                # The coordinator may have dropped the shard's segments before this one was written.
                closing.lease.forget(segment)

    def _close_finished(self) -> None:
        with self._lock:
            finished = [key for key, lease in self._open.items() if lease.is_complete]
            leases = [self._open.pop(key) for key in finished]
        for lease in leases:
            if lease.lease.is_whole:
                num_bytes = lease.unjournalled_bytes
                self._closing.append(_Closing(lease, self._closer.submit(self._close, lease), num_bytes))
            else:
                self._store_lease(lease)

    def _store_lease(self, lease: OpenLease) -> None:
        """Journal a finished lease: another replica may make the part of its shard."""
        faults.point("writer.store_lease")
        lease.checkpoint()
        lease.close()
        faults.point("writer.stored_lease")
        self.emit(LeaseDone(lease.lease, lease.num_counted, dict(lease.counted_errors)))

    def _close(self, shard: OpenLease) -> None:
        faults.point("writer.close")
        part = self.write_part(shard)
        shard.close()
        faults.point("writer.closed")
        self.emit(LeaseDone(shard.lease, shard.num_counted, dict(shard.counted_errors), part))

    def _raise_closing(self) -> None:
        done = [closing for closing in self._closing if closing.future.done()]
        self._closing = [closing for closing in self._closing if closing not in done]
        for closing in done:
            closing.future.result()

    def _closing_bytes(self) -> int:
        return sum(closing.num_bytes for closing in self._closing)
