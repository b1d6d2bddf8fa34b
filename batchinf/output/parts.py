"""Collects the results of leases, and writes the part of a whole shard. Replicas and the coordinator use it."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from pydantic import TypeAdapter
from pydantic_core import from_json

from batchinf.base.parquet import absolute
from batchinf.base.storage import Folder
from batchinf.manifest.names import staging_name
from batchinf.output.counts import count_rows, number_columns
from batchinf.output.journal import (
    UNSEALED,
    Journal,
    SealingWriter,
    Segment,
    count_errors,
    is_sealed,
    joined,
    row_bytes,
)
from batchinf.prompts import encoder
from batchinf.records import ALWAYS_WRITTEN, COUNT_NAMES, BoolArray, Int64Array, Lease, Part, PartCounts, Shard
from batchinf.schedule.positions import ShardRows
from batchinf.source.rows import Source
from batchinf.tasks.base import Task

# Most requests of a row that are accepted from a segment. Each takes a byte of memory.
_MOST_REQUESTS = 1 << 20


class OpenLease:
    """The results of a lease that are finished. In memory: the newest results, and one byte for each request.

    Only one thread at a time may call `recover`, `add`, `tick` and `close`. Any thread may ask what is finished.
    """

    def __init__(
        self,
        lease: Lease,
        task: Task,
        journal: Journal,
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
        self.num_results = self.num_finished_inputs = 0
        self.errors: Counter[str] = Counter()  # results with an error, by its type
        self.is_given_back = False  # another replica runs it; its prompts here are dropped
        self.num_requests = np.zeros(lease.num_rows, np.int32)
        self._journal = journal
        # A row's requests get consecutive numbers when its first result comes. -1: no result yet.
        self.chosen = np.ones(lease.num_rows, np.bool_) if chosen is None else chosen
        self._first_request = np.where(self.chosen, np.int64(-1), np.int64(0))
        self._num_rows = int(np.count_nonzero(self.chosen))
        self._num_done = np.zeros(lease.num_rows, np.int32)
        self._is_done = np.zeros(lease.num_rows, np.bool_)
        self._num_known = 0
        self._num_begun = 0
        self._num_stored_rows = 0
        self._stored_errors: Counter[str] = Counter()

    @property
    def index(self) -> int:
        """Of the shard."""
        return self.lease.index

    @property
    def key(self) -> tuple[int, int]:
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
        local = self.rows.local(row_index)
        return self.are_finished(local, local + 1)

    def are_finished(self, first: int, last: int) -> bool:
        """Whether all rows with local indices `first` to `last` (exclusive) are finished."""
        return bool(np.all(self._are_finished(slice(first, last))))

    def unfinished(self, local: Int64Array) -> Int64Array:
        """The rows among these, by local index, that are not finished."""
        return local[~self._are_finished(local)]

    def _are_finished(self, rows: slice | Int64Array) -> BoolArray:
        is_begun = self._first_request[rows] >= 0
        found: BoolArray = is_begun & (self._num_done[rows] == self.num_requests[rows])
        return found

    def recover(self) -> None:
        """Take over the results that the journal holds. `damaged` names the segments whose results run again.

        Other replicas may run other rows of the shard, so results of these are left where they are.
        """
        found = self._journal.recover(self.index)
        damaged = list(found.damaged)
        for segment in found.segments:
            try:
                if self._recover(segment):
                    self.segments.append(segment)
            except ValueError:
                damaged.append(segment.name)
            segment.close()
        self.damaged = tuple(damaged)
        if self.lease.is_stored:
            self._num_stored_rows = self.num_finished
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
        """Add encoded results of this shard, except those that exist already. Returns the number of new ones."""
        keys = (batch.column(name).to_numpy() for name in ("row_index", "request_index", "num_requests"))
        is_new = self._note(*keys)
        num_new = int(np.count_nonzero(is_new))
        if num_new < len(is_new):
            batch = batch.filter(pa.array(is_new))
        if num_new:
            self.errors += count_errors(batch.column("error_type"))
            self.fresh.append(batch)
            self.unjournalled_bytes += batch.nbytes
        return num_new

    def tick(self) -> None:
        """Write results that are in no segment yet to the journal, and drop them from memory."""
        if (segment := self.keep()) is not None:
            self.segments.append(segment)
            self.fresh, self.unjournalled_bytes = [], 0

    def keep(self) -> Segment | None:
        """Write results that are in no segment yet to the journal, but keep them for a thread that writes the part."""
        fresh = self.fresh
        return self._journal.write(self.index, pa.Table.from_batches(fresh, self.task.result_schema)) if fresh else None

    def forget(self, segment: Segment) -> None:
        """Delete a segment of `keep` after the part is written."""
        self._journal.forget(segment)

    def close(self) -> None:
        """Unmap the segments and drop the results in memory."""
        for segment in self.segments:
            segment.close()
        self.fresh, self.unjournalled_bytes = [], 0

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


PART_VERSION = 1
_COUNTS = TypeAdapter(PartCounts)
_PREFIX = "batchinf."

UNSTORABLE = "unstorable_value"  # the error type of a row whose id or kept column cannot be stored as it is

# Results and kept columns are read in pieces of this size. A row group has several pieces.
PIECE_BYTES = 16 << 20
ROW_GROUP_BYTES = 128 << 20
# Rows of kept columns to read at once. Their size is unknown, so the number begins low and grows at most fourfold.
_FIRST_ROWS, _MOST_ROWS = 64, 4096
# Larger results are copied one by one, smaller ones with `take`: 52 against 106 µs for 45 KB, 29 against 4 for 1.4 KB.
_WIDE_BYTES = 8 << 10


# -- writing a part --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartTarget:
    """Where an incarnation writes parts, and the data of the job that all parts need.

    metadata: entries of each file's key-value metadata, such as `batchinf.fingerprint`. Keys begin with `batchinf.`.
    """

    folder: Folder
    source: Source
    id_column: str | None
    keep_columns: Sequence[str]
    metadata: Mapping[str, str]
    incarnation: str


def write_part(
    target: PartTarget,
    shard: OpenLease,
    merge: Callable[[Iterator[pa.Table]], Iterator[pa.Table]] | None = None,
    num_second_bos: int = 0,
) -> Part:
    """Write a whole shard to `staging/`, sorted by row_index and sample_index (if there is one).

    Memory holds one row group and one piece of the results, whatever the shard's size. merge: turns the shard's rows
    into the rows to write, in order. num_second_bos: that of the part that is replaced, which has the same prompts.
    """
    if not (shard.is_complete and shard.lease.is_whole):
        raise ValueError(f"{shard.lease} is not complete")
    name, source = staging_name(shard.index, target.incarnation), target.source
    names = ([] if target.id_column is None else [target.id_column]) + list(target.keep_columns)
    schema = shard.task.output_schema([source.schema.field(column) for column in names])
    results, merged = shard.task.result_schema, _Merged(shard)
    numbers = number_columns(results)
    # A retry has only some of the rows, but the old part counted all.
    counts = PartCounts(num_second_bos=max(num_second_bos, merged.num_second_bos))
    with target.folder.writing(f"staging/{name}", fault="parts") as file:
        sink = SealingWriter(file)
        with pq.ParquetWriter(sink, schema, **shard.task.parquet_options(schema)) as writer:
            tables = _output(shard, merged, source, names)
            for table in _row_groups(tables if merge is None else merge(tables), shard.task.row_group_bytes):
                counts += count_rows(table, shard.task, numbers)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
            own = {**_own_metadata(shard.lease, shard.rows), **count_entries(counts)}
            writer.add_key_value_metadata({**target.metadata, **own, **UNSEALED})
            sink.hold()
        source.keep_digests()
        sink.seal()
    return _part(counts, shard.index, name, sink.num_bytes, sink.hexdigest())


def _part(counts: PartCounts, shard: int, file: str, num_bytes: int, digest: str) -> Part:
    return Part(shard=shard, file=file, num_bytes=num_bytes, digest=digest, **asdict(counts))


def count_entries(counts: PartCounts) -> dict[str, str]:
    """The counts as entries of a part's footer."""
    return {f"{_PREFIX}{name}": json.dumps(value) for name, value in counts.written().items()}


def stated_counts(entries: Mapping[str, str]) -> PartCounts:
    """The counts in a footer. Raises KeyError if one is missing, ValueError if one is no number."""
    names = [name for name in COUNT_NAMES if name in ALWAYS_WRITTEN or f"{_PREFIX}{name}" in entries]
    return _COUNTS.validate_python({name: from_json(entries[f"{_PREFIX}{name}"]) for name in names})


def _own_metadata(shard: Shard, rows: ShardRows) -> dict[str, str]:
    return {
        f"{_PREFIX}format_version": str(PART_VERSION),
        f"{_PREFIX}shard": str(shard.index),
        f"{_PREFIX}first_row": str(rows.first),
        f"{_PREFIX}num_source_rows": str(shard.num_rows),
        **({} if rows.is_consecutive else {f"{_PREFIX}last_row": str(rows.last)}),
    }


def _row_groups(pieces: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    group: list[pa.Table] = []
    group_bytes = 0
    for piece in pieces:
        if group and group_bytes + piece.nbytes > (limit or ROW_GROUP_BYTES):
            yield pa.concat_tables(group)
            group, group_bytes = [], 0
        group.append(piece)
        group_bytes += piece.nbytes
    if group:
        yield pa.concat_tables(group)


def _output(shard: OpenLease, merged: "_Merged", source: Source, names: Sequence[str]) -> Iterator[pa.Table]:
    """The output rows of a complete shard in order, in pieces of about PIECE_BYTES or one result."""
    is_whole = bool(shard.chosen.all())
    starts = np.concatenate([[0], np.cumsum(shard.num_requests, dtype=np.int64)])
    rows = np.repeat(np.arange(shard.lease.num_rows, dtype=np.int32), shard.num_requests)
    is_first = np.diff(rows, prepend=-1) != 0
    for first, last, columns, lost in _blocks(shard, source, names):
        result_bytes = merged.num_bytes[starts[first] : starts[last]]
        if columns is not None:
            result_bytes = result_bytes + row_bytes(columns)[rows[starts[first] : starts[last]] - first]
        may_begin = is_first[starts[first] : starts[last]] if shard.task.joins_requests else None
        for start, stop in _cuts(result_bytes, PIECE_BYTES, may_begin):
            start, stop = start + starts[first], stop + starts[first]
            own = None if columns is None else columns.slice(rows[start] - first, rows[stop - 1] - rows[start] + 1)
            if own is not None and not is_whole:
                own = own.filter(pa.array(shard.chosen[rows[start] : rows[stop - 1] + 1]))
            yield _with_lost(shard.task.reduce(own, merged.take(start, stop)), lost)
            for segment in shard.segments:
                segment.let_go()


def _with_lost(table: pa.Table, lost: Mapping[int, str]) -> pa.Table:
    """The output rows. Rows in `lost` become error rows, because their id or a kept column cannot be stored."""
    if not lost:
        return table
    reasons = [lost.get(row) for row in table.column("row_index").to_pylist()]
    is_lost = pc.and_(pa.array([reason is not None for reason in reasons]), pc.is_null(table.column("error_type")))
    for name, values in (("error_type", UNSTORABLE), ("error_message", pa.array(reasons, pa.string()))):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.field(place), pc.if_else(is_lost, values, table.column(place)))
    return table


def _blocks(
    shard: OpenLease, source: Source, names: Sequence[str]
) -> Iterator[tuple[int, int, pa.Table | None, dict[int, str]]]:
    """Ranges of a shard's rows, by local index, with their columns of the source. Skips ranges without chosen rows.

    The last item has the rows whose values cannot be stored, by `row_index`, and why.
    """
    if not names:
        yield 0, shard.lease.num_rows, None, {}
        return
    first, num_rows = 0, _FIRST_ROWS
    while first < shard.lease.num_rows:
        last = min(first + num_rows, shard.lease.num_rows)
        if not shard.chosen[first:last].any():
            first = last
            continue
        lost = dict[int, str]()
        read = source.columns_of(shard.rows.positions(first, last), list(dict.fromkeys(names)), lost)
        yield first, last, pa.Table.from_arrays([read.column(name) for name in names], names=list(names)), lost
        likely = int(PIECE_BYTES * (last - first) / max(1, row_bytes(read).sum()))
        num_rows = max(1, min(likely, 4 * num_rows, _MOST_ROWS))
        first = last


def _cuts(
    num_bytes: Int64Array, limit: int, may_begin: npt.NDArray[np.bool_] | None = None
) -> Iterator[tuple[int, int]]:
    """Ranges of items with at most `limit` bytes, or one item. may_begin: the items that a range may begin with."""
    if may_begin is not None:
        firsts = np.flatnonzero(may_begin)
        ends = np.append(firsts[1:], len(num_bytes))
        sums = np.add.reduceat(num_bytes, firsts) if len(firsts) else num_bytes
        yield from ((int(firsts[start]), int(ends[stop - 1])) for start, stop in _cuts(sums, limit))
        return
    ends = np.cumsum(num_bytes)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield start, stop
        start = stop


class _Merged:
    """The results of a complete shard in segments and memory, sorted by (row_index, request_index). 17 bytes for each.

    num_bytes: int64 [num_results], sizes in memory. num_second_bos: rows whose prompts begin with two BOS tokens.
    """

    def __init__(self, shard: OpenLease) -> None:
        stored = [batch for segment in shard.segments for batch in segment.table().to_batches()]
        self._batches = [*stored, *joined(shard.fresh)]
        self._batch = np.zeros(shard.num_results, np.int32)
        self._row = np.zeros(shard.num_results, np.int32)
        self.num_bytes = np.zeros(shard.num_results, np.int64)
        begins_with_two = np.zeros(shard.num_results, np.bool_)
        # Backwards, so that the first of two results for one request wins.
        for index in reversed(range(len(self._batches))):
            batch = self._batches[index]
            request_index = batch.column("request_index").to_numpy()
            places = shard.places(batch.column("row_index").to_numpy(), request_index)
            is_doubled = batch.column(encoder.SECOND_BOS_COLUMN).to_numpy(zero_copy_only=False)
            begins_with_two[places] = is_doubled & (request_index == 0)
            self._batch[places] = index
            self._row[places] = np.arange(batch.num_rows, dtype=np.int32)
            self.num_bytes[places] = row_bytes(batch)
        self.num_second_bos = int(np.count_nonzero(begins_with_two))

    def take(self, start: int, stop: int) -> pa.Table:
        """Results `start` to `stop` (exclusive)."""
        batches, rows = self._batch[start:stop], self._row[start:stop]
        if self.num_bytes[start:stop].sum() > _WIDE_BYTES * (stop - start):
            places = zip(batches.tolist(), rows.tolist(), strict=True)
            pieces = [self._batches[batch].slice(row, 1) for batch, row in places]
            return pa.Table.from_batches([pa.concat_batches(pieces)])
        order = np.argsort(batches, kind="stable")
        pieces = [self._batches[batch].take(pa.array(rows[batches == batch])) for batch in np.unique(batches)]
        if len(pieces) == 1:
            return pa.Table.from_batches(pieces)
        return pa.Table.from_batches([pa.concat_batches(pieces).take(pa.array(np.argsort(order)))])


# -- parts without a manifest line -----------------------------------------------------------------------------------


def verify_part(
    folder: Folder, name: str, shard: Shard, fingerprint: str, rows: ShardRows | None = None, *, deep: bool
) -> Part | None:
    """The record of the part at `name` (`staging/...` or `parts/...`), or None if it is damaged or not this job's.

    The footer must be readable and name the job, the shard and its rows (None: `start` to `stop`). deep: check each
    byte, too.
    """
    path = folder.path(name)
    try:
        with pa.memory_map(str(path)) as file:
            data = memoryview(file.read_buffer())
        if deep and not is_sealed(data):
            return None
        footer = pq.read_metadata(absolute(path))
        counts = _counts_of(footer, shard, rows or ShardRows(shard.start, shard.stop), fingerprint)
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None
    return None if counts is None else _part(counts, shard.index, path.name, len(data), xxhash.xxh3_128_hexdigest(data))


def _counts_of(footer: pq.FileMetaData, shard: Shard, rows: ShardRows, fingerprint: str) -> PartCounts | None:
    """The counts of a part; None if the footer is not of this job and these rows."""
    own = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
    expected = {**_own_metadata(shard, rows), f"{_PREFIX}fingerprint": fingerprint}
    if any(own.get(key) != value for key, value in expected.items()):
        return None
    counts = stated_counts(own)
    return counts if counts.num_rows == footer.num_rows else None
