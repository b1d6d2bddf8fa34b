"""The results of a lease that are finished, in the journal and in memory. Replicas collect them for the part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.output.counts import count_errors
from batchinf.output.journal import RESULT_KEYS, Journal, Segment
from batchinf.records import BoolArray, Int64Array, Lease
from batchinf.schedule.positions import ShardRows
from batchinf.tasks.base import Task

# Most requests of a row that are accepted from a segment. Each takes a byte of memory.
_MOST_REQUESTS = 1 << 20


class KnownImages(NamedTuple):
    """The images of a row that has results without an error."""

    digests: Sequence[str]
    way_out: str
    """What a user can do if an image of the row is another one now."""


class OpenLease:
    """The results of a lease that are finished. In memory: the newest results, and one byte for each request.

    Only one thread at a time may call `recover`, `add`, `checkpoint` and `close`. Any thread may ask what is finished.
    """

    def __init__(
        self,
        lease: Lease,
        task: Task,
        journal: Journal,
        *,
        chosen: BoolArray | None = None,
        rows: ShardRows | None = None,
    ) -> None:
        """chosen: bool [lease.num_rows], the rows to run; None: all. rows: None: `start` to `stop`."""
        self.lease = lease
        self.rows = rows or ShardRows(lease.start, lease.stop)
        self.task = task
        self.segments: list[Segment] = []
        self.damaged: tuple[str, ...] = ()
        self.fresh: list[pa.RecordBatch] = []
        self.unjournalled_bytes = 0
        self.num_results = 0
        self.num_finished_inputs = 0
        self.num_input_shares = 0.0  # of a row with n requests, each counts 1 / n; only if the task's rows vary
        self.errors: Counter[str] = Counter()  # results with an error, by its type
        self.known_images: Mapping[int, KnownImages] = {}  # by row; see `known_images` of `replica/images.py`
        self.num_requests = np.zeros(lease.num_rows, np.int32)
        self.journal = journal
        # A row's requests get consecutive numbers when its first result comes. -1: no result yet.
        self.chosen = np.ones(lease.num_rows, np.bool_) if chosen is None else chosen
        self._first_request = np.where(self.chosen, np.int64(-1), np.int64(0))
        self._num_rows = int(np.count_nonzero(self.chosen))
        self._num_done = np.zeros(lease.num_rows, np.int32)
        self._is_done = np.zeros(lease.num_rows, np.bool_)
        self._num_known = 0
        self._num_begun = 0
        self._num_stored_rows = 0
        self._stored_shares = 0.0
        self._stored_errors: Counter[str] = Counter()

    @property
    def index(self) -> int:
        """Of the shard."""
        return self.lease.index

    @property
    def key(self) -> tuple[int, int, int]:
        return self.lease.key

    @property
    def num_finished(self) -> int:
        """Output rows that are finished."""
        return self.num_finished_inputs if self.task.joins_requests else self.num_results

    @property
    def num_counted(self) -> int:
        """Finished output rows, without those that another replica of this run has counted."""
        return self.num_finished - self._num_stored_rows

    @property
    def counted_shares(self) -> float:
        """`num_input_shares`, without those that another replica of this run has counted."""
        return self.num_input_shares - self._stored_shares

    @property
    def counted_errors(self) -> "Counter[str]":
        """Errors, without those that another replica of this run has counted."""
        return self.errors - self._stored_errors

    @property
    def is_complete(self) -> bool:
        """Whether all rows are finished: each has its `num_requests` results."""
        return self._num_begun == self._num_rows and self.num_results == self._num_known

    def is_done(self, row_index: int, request_index: int) -> bool:
        """Whether there is a result for this request."""
        first = self._first_request[self.rows.local(row_index)]
        return bool(first >= 0 and self._is_done[first + request_index])

    def is_finished(self, row_index: int) -> bool:
        """Whether there are results for all requests of this row, or the row is not to run."""
        return bool(self._are_finished(self.rows.local(row_index)))

    def unfinished(self, local: Int64Array) -> Int64Array:
        """The rows among these, by local index, that are not finished."""
        return local[~self._are_finished(local)]

    def _are_finished(self, local: int | Int64Array) -> BoolArray:
        is_begun = self._first_request[local] >= 0
        is_finished: BoolArray = is_begun & (self._num_done[local] == self.num_requests[local])
        return is_finished

    def recover(self) -> None:
        """Take over the results that the journal holds. `damaged` names the segments whose results run again.

        Other replicas may run other rows of the shard, so results of these are left where they are.
        """
        segments, damaged = self.journal.recover(self.index)
        for segment in segments:
            try:
                if self._recover(segment):
                    self.segments.append(segment)
            except ValueError:
                damaged.append(segment.name)
            segment.close()
        self.damaged = tuple(damaged)
        if self.lease.is_stored:
            self._num_stored_rows = self.num_finished
            self._stored_shares = self.num_input_shares
            self._stored_errors = Counter(self.errors)

    def _recover(self, segment: Segment) -> bool:
        """Take over a segment's results of these rows; False if it has none. Raises ValueError for wrong results."""
        row_index, request_index, num_requests = segment.keys()
        if np.any(num_requests > _MOST_REQUESTS):
            raise ValueError(f"got results of rows with more than {_MOST_REQUESTS:,} requests")
        is_own = np.ones(len(row_index), np.bool_) if self.lease.is_whole else self.rows.locals(row_index) >= 0
        if not is_own.any():
            return False
        is_own[is_own] = self._note(row_index[is_own], request_index[is_own], num_requests[is_own])
        error_types = segment.table().column("error_type")
        if error_types.null_count < len(error_types):
            self.errors = self.errors + count_errors(error_types.filter(pa.array(is_own)))
        return True

    def add(self, batch: pa.RecordBatch) -> int:
        """Add encoded results of this shard, except those that exist already. Returns the number of new ones.

        The job may have begun without some of the task's columns: these are dropped.
        """
        batch = batch.select(self.journal.schema.names)
        is_new = self._note(*(batch.column(name).to_numpy() for name in RESULT_KEYS))
        num_new = int(np.count_nonzero(is_new))
        if num_new < len(is_new):
            batch = batch.filter(pa.array(is_new))
        if num_new:
            self.errors += count_errors(batch.column("error_type"))
            self.fresh.append(batch)
            self.unjournalled_bytes += batch.nbytes
        return num_new

    def checkpoint(self) -> None:
        """Write results that are in no segment yet to the journal, and drop them from memory."""
        if (segment := self.keep()) is not None:
            self.segments.append(segment)
            self._forget_fresh()

    def keep(self) -> Segment | None:
        """Write results that are in no segment yet to the journal, but keep them for a thread that writes the part."""
        fresh = self.fresh
        return self.journal.write(self.index, pa.Table.from_batches(fresh, self.journal.schema)) if fresh else None

    def forget(self, segment: Segment) -> None:
        """Delete a segment of `keep` after the part is written."""
        self.journal.forget(segment)

    def close(self) -> None:
        """Unmap the segments and drop the results in memory."""
        for segment in self.segments:
            segment.close()
        self._forget_fresh()

    def _forget_fresh(self) -> None:
        self.fresh = []
        self.unjournalled_bytes = 0

    def places(self, row_index: Int64Array, request_index: npt.NDArray[np.int32]) -> Int64Array:
        """The places of results among all results of the complete shard, sorted by (row_index, request_index)."""
        firsts = np.cumsum(self.num_requests, dtype=np.int64) - self.num_requests
        places: Int64Array = firsts[self.rows.locals(row_index)] + request_index
        return places

    def _note(
        self, row_index: Int64Array, request_index: npt.NDArray[np.int32], num_requests: npt.NDArray[np.int32]
    ) -> BoolArray:
        """Mark results as done. Returns which are new. Raises ValueError, and marks none, for a foreign result."""
        rows = self.rows.locals(row_index)
        self._begin_rows(rows, request_index, num_requests)
        requests = self._first_request[rows] + request_index
        is_new = np.zeros(len(requests), np.bool_)
        is_new[np.unique(requests, return_index=True)[1]] = True
        is_new &= ~self._is_done[requests]
        self._is_done[requests[is_new]] = True
        np.add.at(self._num_done, rows[is_new], 1)
        self.num_results += int(np.count_nonzero(is_new))
        if self.task.rows_vary:
            self.num_input_shares += float((1.0 / num_requests[is_new]).sum())
        touched = np.unique(rows[is_new])
        self.num_finished_inputs += int(np.count_nonzero(self._num_done[touched] == self.num_requests[touched]))
        return is_new

    def _begin_rows(
        self, rows: Int64Array, request_index: npt.NDArray[np.int32], num_requests: npt.NDArray[np.int32]
    ) -> None:
        if np.any((rows < 0) | (rows >= self.lease.num_rows)) or not np.all(self.chosen[rows]):
            raise ValueError(f"got results of rows outside of {self.lease}, or that are not to be run")
        distinct, firsts, inverse = np.unique(rows, return_index=True, return_inverse=True)
        known = self.num_requests[distinct]
        counts = np.where(known > 0, known, num_requests[firsts])
        if np.any((counts[inverse] != num_requests) | (request_index < 0) | (request_index >= num_requests)):
            raise ValueError(f"got results that disagree on a row's number of requests in {self.lease}")
        self._number_requests(distinct[known == 0], counts[known == 0])

    def _number_requests(self, rows: Int64Array, counts: npt.NDArray[np.int32]) -> None:
        stop = self._num_known + int(counts.sum(dtype=np.int64))
        if stop > len(self._is_done):
            # Grow the array before a row points into the new part: other threads read it without a lock.
            spare = np.zeros(max(stop, 2 * len(self._is_done)) - len(self._is_done), np.bool_)
            self._is_done = np.concatenate([self._is_done, spare])
        self.num_requests[rows] = counts
        self._first_request[rows] = self._num_known + np.cumsum(counts, dtype=np.int64) - counts
        self._num_known = stop
        self._num_begun += len(rows)
