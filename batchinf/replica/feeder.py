"""The feeder thread turns leases into requests for the engine: reads rows, fills templates, tokenises.

It runs ahead of the engine only by the queue's bound, so that the coordinator can still give a lease that has not begun
to an idle replica.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchinf.base import faults
from batchinf.base.errors import RowError
from batchinf.output.open_lease import OpenLease
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.images import RenderedPrompt
from batchinf.records import Completion, Int64Array, Lease, Prompt, Request, Result
from batchinf.replica.byte_queue import ByteQueue
from batchinf.replica.images import ImagePrompts, Render
from batchinf.replica.messages import CONDEMNED, Assign, Event, Key, LeaseBegun, Revoked, Trial, Tried
from batchinf.source.rows import Row, Source
from batchinf.tasks.base import Task, seed_of

# Rows read at once: little memory.
_ROWS_AT_ONCE = 256
# Of rows with images, whose files may be in the rows.
_IMAGE_ROWS_AT_ONCE = 16
_BYTES_A_TOKEN = 36
# Rows tokenised at once: enough for a tokenizer's threads. An engine that has just started waits for them. As many
# requests, or a few more, are put at once, so that the engine's thread wakes once for them; fewer if they have images.
_PUT_ITEMS = 64
_PUT_BYTES = 8 << 20
# A result that is an error, with its message.
_ERROR_BYTES = 1 << 10
_TRIAL_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request on its way to the engine, with what the writer needs for its result."""

    request: Request
    prompt: Prompt
    num_requests: int
    """Of the row."""
    lease: OpenLease
    image_bytes: int = 0
    """Of the tensors of images that the engine keeps until the request has finished."""

    def result(self, completion: Completion | None, error: RowError | None = None) -> tuple[OpenLease, Result]:
        """The request's result, whose text is not read yet, with its lease. error: in place of a completion."""
        return self.lease, Result(
            prompt=self.prompt,
            request_index=self.request.request_index,
            num_requests=self.num_requests,
            completion=completion,
            text=None,
            error=error,
            attempts=self.lease.lease.attempts,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Feeder(threading.Thread):
    """Feeds leases in the order in which they were assigned."""

    source: Source
    task: Task
    open_lease: Callable[[Lease], OpenLease]
    ready: ByteQueue[PendingRequest]
    finished: ByteQueue[tuple[OpenLease, Result]]
    """Takes the errors of requests that do not reach the engine."""
    emit: Callable[[Event], None]
    track: Callable[[OpenLease], None]
    """Called with each lease that begins."""
    prompts: Callable[[], PromptBuilder]
    """Called once, on the feeder's thread."""
    max_model_len: int
    """The engine's."""
    render: Render
    """The engine's: makes tokens of images."""
    images: ImagePrompts | None = None
    """None in a job without images."""
    attempt: int = 0
    """Of a retry; it enters the seeds. See `Retry.attempt`."""

    def __post_init__(self) -> None:
        super().__init__(name="feeder", daemon=True)
        self._assigned: deque[Lease] = deque()
        self._trials: deque[Trial] = deque()
        self._opened: dict[Key, OpenLease] = {}  # by trials, which run only some of their rows
        self._condemned: dict[int, str] = {}
        self._rows_at_once = _ROWS_AT_ONCE if self.images is None else _IMAGE_ROWS_AT_ONCE
        self._changed = threading.Condition()
        self._is_stopping = False
        self.error: BaseException | None = None

    def assign(self, message: Assign) -> None:
        """Append leases."""
        with self._changed:
            self._condemned.update(message.condemned)
            self._assigned.extend(message.leases)
            self._changed.notify_all()

    def try_rows(self, message: Trial) -> None:
        """Run a trial's rows before anything else."""
        with self._changed:
            self._trials.append(message)
            self._changed.notify_all()

    def revoke(self, leases: Iterable[Key]) -> None:
        """Give back the leases that have not begun."""
        revoked = set(leases)
        with self._changed:
            back = tuple(lease for lease in self._assigned if lease.key in revoked)
            self._assigned = deque(lease for lease in self._assigned if lease.key not in revoked)
        self.emit(Revoked(back))

    def stop(self) -> None:
        """Begin no more leases, and end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self.images is not None:
            self.images.stop()
        self.ready.close()

    def run(self) -> None:
        """Feed until stopped. An exception is kept for the worker to raise."""
        try:
            while (item := self._next()) is not None:
                if isinstance(item, Trial):
                    self._try(item)
                else:
                    self._feed(item)
        except BaseException as error:
            self.error = error

    def _next(self) -> Lease | Trial | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._trials or self._assigned)
            if self._is_stopping:
                return None
            return self._trials.popleft() if self._trials else self._assigned.popleft()

    def _open(self, lease: Lease) -> OpenLease:
        """Open a lease, which begins with that."""
        faults.point("feeder.begin")
        opened = self.open_lease(lease)
        # Before `track`, which may close the shard at once: the coordinator then deletes what is left in the journal.
        num_recovered = 0 if lease.is_stored else opened.num_results
        self.emit(LeaseBegun(opened.key, num_recovered, opened.num_counted, opened.damaged))
        self.track(opened)
        return opened

    def _try(self, trial: Trial) -> None:
        tried = [(opened, self._locals(opened, trial.rows)) for opened in map(self._begin_once, trial.leases)]
        for opened, local in tried:
            for first in range(0, len(local), self._rows_at_once):
                self._feed_rows(opened, local[first : first + self._rows_at_once])
        while any(len(opened.unfinished(local)) for opened, local in tried):
            if self._is_stopping:
                return
            time.sleep(_TRIAL_POLL_S)
        self.emit(Tried(trial.rows))

    def _begin_once(self, lease: Lease) -> OpenLease:
        if lease.key not in self._opened:
            self._opened[lease.key] = self._open(lease)
        return self._opened[lease.key]

    @staticmethod
    def _locals(opened: OpenLease, rows: Sequence[int]) -> Int64Array:
        """The local indices of those rows that are in a lease."""
        local = opened.rows.locals(np.array(rows, np.int64))
        return local[local >= 0]

    def _feed(self, lease: Lease) -> None:
        opened = self._opened.pop(lease.key, None) or self._open(lease)
        for first in range(0, lease.num_rows, self._rows_at_once):
            if self._is_stopping:
                return
            self._feed_rows(opened, opened.rows.to_run(first, min(first + self._rows_at_once, lease.num_rows)))

    def _feed_rows(self, opened: OpenLease, local: Int64Array) -> None:
        """Feed these rows of a lease, by their indices in it, in this order."""
        left = opened.unfinished(local)
        if not len(left):
            return
        faults.point("feeder.read")
        builder = self._builder
        read = self._read(opened.rows.at(left if not opened.rows.is_in_order else local), builder.columns)
        rows = [row for row in read if not opened.is_finished(row.row_index)]
        for first in range(0, len(rows), _PUT_ITEMS):
            prompts = builder.build(rows[first : first + _PUT_ITEMS], self.max_model_len)
            if self.images is not None:
                self.images.expect(prompts)
            self._put_requests(opened, prompts)

    def _put_requests(self, opened: OpenLease, prompts: Iterable[Prompt]) -> None:
        """Put the requests of these prompts into the queue, several at once."""
        ready: list[tuple[PendingRequest, int]] = []
        for prompt in prompts:
            ready += self._expand(opened, prompt)
            if len(ready) >= _PUT_ITEMS or (prompt.image_sources and sum(size for _, size in ready) >= _PUT_BYTES):
                if not self.ready.put_all(ready):
                    return
                ready = []
        self.ready.put_all(ready)

    @functools.cached_property
    def _builder(self) -> PromptBuilder:
        return self.prompts()

    def _read(self, row_index: Int64Array, columns: Sequence[str]) -> list[Row]:
        """These rows, in this order. They are read in the order of the source."""
        in_source = np.argsort(row_index, kind="stable")
        read = self.source.read_rows(row_index[in_source], columns)
        rows = dict(zip(in_source.tolist(), read, strict=True))
        return [rows[i] for i in range(len(row_index))]

    def _expand(self, opened: OpenLease, prompt: Prompt) -> Iterable[tuple[PendingRequest, int]]:
        """The requests that a row still has to run, with their sizes in bytes."""
        error = prompt.error
        if error is None and prompt.row_index in self._condemned:
            error = RowError(CONDEMNED, self._condemned[prompt.row_index])
        if error is None and prompt.image_sources:
            return self._expand_images(opened, prompt)
        return self._unfinished(opened, prompt, self.task.requests(prompt, self.max_model_len), error)

    def _expand_images(self, opened: OpenLease, prompt: Prompt) -> Iterable[tuple[PendingRequest, int]]:
        """As `_expand`, with the images of the row. Empty if the feeder ends."""
        assert self.images is not None
        if self._is_stopping:
            return ()
        made = self.images.made(prompt, self.render, opened.known_images)
        with_images, rendered = made
        if rendered is not None:
            requests = self.task.requests(with_images, self.max_model_len)
            return self._unfinished(opened, with_images, requests, None, rendered=rendered)
        # As many error results as there would have been requests: some of these may be stored already.
        requests = [(with_images, request) for _, request in self.task.requests(prompt, self.max_model_len)]
        return self._unfinished(opened, with_images, requests, with_images.error)

    def _unfinished(
        self,
        opened: OpenLease,
        prompt: Prompt,
        requests: Sequence[tuple[Prompt, Request]],
        of_row: RowError | None,
        *,
        rendered: RenderedPrompt | None = None,
    ) -> Iterator[tuple[PendingRequest, int]]:
        """Those of a row's requests that have no result yet, with their sizes in bytes. An error is a result at once.

        requests: see `Task.requests`. of_row: the error that all requests of the row get.
        """
        number = len(requests)
        failed = []
        image_bytes = 0 if rendered is None else rendered.num_bytes
        num_bytes = (_BYTES_A_TOKEN * len(prompt.token_ids) + image_bytes) // number
        for part, request in requests:
            if (error := of_row or part.error) is not None:
                failed.append((PendingRequest(request, part, number, opened).result(None, error), _ERROR_BYTES))
            elif not opened.is_done(request.row_index, request.request_index):
                if self.attempt and request.seed is not None and part.line_seed is None:
                    request = replace(request, seed=seed_of(request.seed, request.row_index, self.attempt))
                if prompt.adapter is not None:
                    request = replace(request, adapter=prompt.adapter)
                if rendered is not None:
                    request = replace(request, rendered=rendered.for_ids(request.prompt_token_ids))
                yield PendingRequest(request, part, number, opened, image_bytes=image_bytes), num_bytes
        self.finished.put_all(failed)
