"""A shard that is being worked on: what is finished of it, and where that lies."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.output.journal import Journal, Segment
from batchinf.records import BoolArray, Int64Array, Shard
from batchinf.schedule.selection import ShardRows
from batchinf.tasks.base import Task

# Of one row, in a segment that is to be believed: a byte of memory is given to each.
_MOST_REQUESTS = 1 << 20


class OpenShard:
    """What is finished of a shard. In memory: its newest results, and one byte for each of all its requests.

    `recover`, `add`, `tick` and `close` are for one thread at a time; any thread may ask what is finished.
    """

    def __init__(
        self,
        shard: Shard,
        task: Task,
        journal: Journal,
        chosen: BoolArray | None = None,
        rows: ShardRows | None = None,
    ) -> None:
        """chosen: bool [shard.num_rows], the rows that are to be run; None is all. rows: None is `start` to `stop`."""
        self.shard = shard
        self.rows = rows or ShardRows(shard.start, shard.stop)
        self.task = task
        self.segments: list[Segment] = []
        self.fresh: list[pa.RecordBatch] = []
        self.unjournalled_bytes = 0
        self.num_results = self.num_recovered_errors = 0
        self.is_given_back = False  # before anything of it was run: what was made of it counts no more
        self.num_requests = np.zeros(shard.num_rows, np.int32)
        self._journal = journal
        # Slots are given to a row's requests when its first result comes; -1 is before that.
        self.chosen = np.ones(shard.num_rows, np.bool_) if chosen is None else chosen
        self._first_slot = np.where(self.chosen, np.int64(-1), np.int64(0))
        self._num_rows = int(np.count_nonzero(self.chosen))
        self._num_done = np.zeros(shard.num_rows, np.int32)
        self._is_done = np.zeros(shard.num_rows, np.bool_)
        self._num_slots = 0
        self._num_begun = 0

    @property
    def index(self) -> int:
        """The shard's index."""
        return self.shard.index

    @property
    def is_complete(self) -> bool:
        """Whether all rows are finished: each has its `num_requests` results."""
        return self._num_begun == self._num_rows and self.num_results == self._num_slots

    def is_done(self, row_index: int, request_index: int) -> bool:
        """Whether there is a result for this request."""
        slot = self._first_slot[self.rows.local(row_index)]
        return bool(slot >= 0 and self._is_done[slot + request_index])

    def is_finished(self, row_index: int) -> bool:
        """Whether there are results for all requests of this row, or none is to be run."""
        place = self.rows.local(row_index)
        return self.are_finished(place, place + 1)

    def are_finished(self, first: int, last: int) -> bool:
        """Whether the rows `first` to `last` (exclusive), counted from the shard's first, are all finished."""
        return bool(np.all(self._are_finished(slice(first, last))))

    def unfinished(self, numbers: Int64Array) -> Int64Array:
        """Those of these rows, by their numbers among the shard's, that are not finished."""
        return numbers[~self._are_finished(numbers)]

    def _are_finished(self, rows: slice | Int64Array) -> BoolArray:
        is_begun = self._first_slot[rows] >= 0
        found: BoolArray = is_begun & (self._num_done[rows] == self.num_requests[rows])
        return found

    def recover(self) -> list[str]:
        """Take over what the journal holds; the names of damaged segments, whose results are to be run again."""
        found = self._journal.recover(self.index)
        damaged = list(found.damaged)
        for segment in found.segments:
            try:
                keys = segment.keys()
                if np.any(keys[2] > _MOST_REQUESTS):
                    raise ValueError(f"got results of rows with more than {_MOST_REQUESTS:,} requests")
                self._note(*keys)
            except ValueError:
                damaged.append(segment.name)
            else:
                self.segments.append(segment)
                self.num_recovered_errors += segment.num_errors()
            segment.close()
        return damaged

    def add(self, batch: pa.RecordBatch) -> int:
        """Take encoded results of this shard; how many of them are new. A result that is there already is dropped."""
        keys = (batch.column(name).to_numpy() for name in ("row_index", "request_index", "num_requests"))
        is_new = self._note(*keys)
        num_new = int(np.count_nonzero(is_new))
        if num_new < len(is_new):
            batch = batch.filter(pa.array(is_new))
        if num_new:
            self.fresh.append(batch)
            self.unjournalled_bytes += batch.nbytes
        return num_new

    def tick(self) -> Segment | None:
        """Journal what is in no segment yet, and forget it."""
        segment = self.keep()
        if segment is None:
            return None
        self.segments.append(segment)
        self.fresh, self.unjournalled_bytes = [], 0
        return segment

    def keep(self) -> Segment | None:
        """Journal what is in no segment yet; for another thread that writes the part, nothing changes."""
        fresh = self.fresh
        return self._journal.write(self.index, pa.Table.from_batches(fresh, self.task.result_schema)) if fresh else None

    def forget(self, segment: Segment) -> None:
        """Delete a segment that `keep` gave, once the part is written."""
        self._journal.forget(segment)

    def close(self) -> None:
        """Unmap the segments and let go of what is in memory."""
        for segment in self.segments:
            segment.close()
        self.fresh, self.unjournalled_bytes = [], 0

    def places(self, row_index: Int64Array, request_index: npt.NDArray[np.int32]) -> Int64Array:
        """Where results stand among all of the complete shard's, sorted by (row_index, request_index)."""
        firsts = np.cumsum(self.num_requests, dtype=np.int64) - self.num_requests
        places: Int64Array = firsts[self.rows.locals(row_index)] + request_index
        return places

    def _note(
        self, row_index: Int64Array, request_index: npt.NDArray[np.int32], num_requests: npt.NDArray[np.int32]
    ) -> BoolArray:
        """Mark results as done; which of them are new. Raises ValueError, with nothing marked, for a stranger."""
        rows = self.rows.locals(row_index)
        self._begin_rows(rows, request_index, num_requests)
        slots = self._first_slot[rows] + request_index
        is_new = np.zeros(len(slots), np.bool_)
        is_new[np.unique(slots, return_index=True)[1]] = True
        is_new &= ~self._is_done[slots]
        self._is_done[slots[is_new]] = True
        np.add.at(self._num_done, rows[is_new], 1)
        self.num_results += int(np.count_nonzero(is_new))
        return is_new

    def _begin_rows(
        self, rows: Int64Array, request_index: npt.NDArray[np.int32], num_requests: npt.NDArray[np.int32]
    ) -> None:
        if np.any((rows < 0) | (rows >= self.shard.num_rows)) or not np.all(self.chosen[rows]):
            raise ValueError(f"got results of rows outside of {self.shard}, or that are not to be run")
        distinct, firsts, inverse = np.unique(rows, return_index=True, return_inverse=True)
        known = self.num_requests[distinct]
        counts = np.where(known > 0, known, num_requests[firsts])
        if np.any((counts[inverse] != num_requests) | (request_index < 0) | (request_index >= num_requests)):
            raise ValueError(f"got results that disagree on a row's number of requests in {self.shard}")
        self._give_slots(distinct[known == 0], counts[known == 0])

    def _give_slots(self, rows: Int64Array, counts: npt.NDArray[np.int32]) -> None:
        stop = self._num_slots + int(counts.sum(dtype=np.int64))
        if stop > len(self._is_done):
            # Longer before a row points into it: other threads ask what is done without a lock.
            spare = np.zeros(max(stop, 2 * len(self._is_done)) - len(self._is_done), np.bool_)
            self._is_done = np.concatenate([self._is_done, spare])
        self.num_requests[rows] = counts
        self._first_slot[rows] = self._num_slots + np.cumsum(counts, dtype=np.int64) - counts
        self._num_slots = stop
        self._num_begun += len(rows)
