"""From assigned shards to requests that are ready for the engine: reading, templates and tokenising, on its own thread.

It runs ahead of the engine by the ready queue's bound and no more, so that a shard that has not begun can still be
given to an idle replica.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from batchinf import faults
from batchinf.byte_queue import ByteQueue
from batchinf.errors import RowError
from batchinf.parts import OpenShard
from batchinf.prompt import PromptBuilder
from batchinf.records import Assign, Event, Prompt, Request, Result, Revoked, Shard, ShardBegun
from batchinf.source import Source
from batchinf.tasks import Task

# Rows read and tokenised at once: enough to keep a tokenizer's threads busy, few enough to stay small in memory.
ROWS_AT_ONCE = 256
_BYTES_A_TOKEN = 36
# Requests handed over at once, or a little more: the engine's thread is woken once for them.
_PUT_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Pending:
    """A request on its way, and what is needed to store what becomes of it."""

    request: Request
    prompt: Prompt
    num_requests: int
    shard: OpenShard
    attempts: int


@dataclass(frozen=True, slots=True)
class FailedRow:
    """The results of a row that never reaches the engine."""

    shard: OpenShard
    results: tuple[Result, ...]


class Feeder(threading.Thread):
    """Begins shards in the order in which they were assigned."""

    def __init__(
        self,
        source: Source,
        prompts: PromptBuilder,
        task: Task,
        open_shard: Callable[[Shard], OpenShard],
        ready: ByteQueue[Pending],
        fail: Callable[[FailedRow], None],
        emit: Callable[[Event], None],
        max_model_len: int,
    ) -> None:
        super().__init__(name="feeder", daemon=True)
        self._source = source
        self._prompts = prompts
        self._task = task
        self._open_shard = open_shard
        self._ready = ready
        self._fail = fail
        self._emit = emit
        self._max_model_len = max_model_len
        self._assigned: deque[tuple[Shard, int]] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self.error: BaseException | None = None

    def assign(self, message: Assign) -> None:
        """Add shards to the end of the line."""
        with self._changed:
            self._assigned.extend((shard, message.attempts) for shard in message.shards)
            self._changed.notify_all()

    def revoke(self, shards: Iterable[int]) -> None:
        """Give back those of these shards that have not begun."""
        wanted = set(shards)
        with self._changed:
            back = tuple(shard.index for shard, _ in self._assigned if shard.index in wanted)
            self._assigned = deque(item for item in self._assigned if item[0].index not in wanted)
        self._emit(Revoked(back))

    def stop(self) -> None:
        """Begin nothing more, and end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._ready.close()

    def run(self) -> None:
        """Feed until stopped. An exception is kept for the worker to raise."""
        try:
            while (item := self._next()) is not None:
                self._feed(*item)
        except BaseException as error:
            self.error = error

    def _next(self) -> tuple[Shard, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._assigned)
            return None if self._is_stopping else self._assigned.popleft()

    def _feed(self, shard: Shard, attempts: int) -> None:
        faults.point("feeder.begin")
        opened = self._open_shard(shard)
        self._emit(ShardBegun(shard.index, opened.num_results))
        for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
            if self._is_stopping:
                return
            self._feed_rows(opened, start, min(start + ROWS_AT_ONCE, shard.stop), attempts)

    def _feed_rows(self, opened: OpenShard, start: int, stop: int, attempts: int) -> None:
        if opened.are_finished(start, stop):
            return
        faults.point("feeder.read")
        rows = self._source.read(start, stop, self._prompts.columns)
        rows = [row for row in rows if not opened.is_finished(row.row_index)]
        ready: list[tuple[Pending, int]] = []
        for prompt in self._prompts.build(rows, self._max_model_len):
            ready += self._expand(opened, prompt, attempts)
            if len(ready) >= _PUT_ITEMS:
                if not self._ready.put_all(ready):
                    return
                ready = []
        self._ready.put_all(ready)

    def _expand(self, opened: OpenShard, prompt: Prompt, attempts: int) -> Iterator[tuple[Pending, int]]:
        """What a row still has to run, with sizes."""
        requests = self._task.expand(prompt, self._max_model_len)
        if prompt.error is not None:
            self._fail(FailedRow(opened, failed(prompt, len(requests), prompt.error, attempts)))
            return
        num_bytes = _BYTES_A_TOKEN * len(prompt.token_ids) // len(requests)
        for request in requests:
            if not opened.is_done(request.row_index, request.request_index):
                yield Pending(request, prompt, len(requests), opened, attempts), num_bytes


def failed(prompt: Prompt, num_requests: int, error: RowError, attempts: int) -> tuple[Result, ...]:
    """A row's error results: one for each that was expected."""
    return tuple(Result(prompt, index, num_requests, None, None, error, attempts) for index in range(num_requests))
