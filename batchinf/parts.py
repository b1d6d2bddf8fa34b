"""A shard's results on their way from the writer to one Parquet file, and the proof that such a file is whole.

`OpenShard` knows what is finished; `write_part` merges segments and memory into a part, in bounded memory.
Publishing and committing parts is the coordinator's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from batchinf import non_finite
from batchinf.journal import UNSEALED, Journal, SealingWriter, Segment, is_sealed, joined, row_bytes
from batchinf.part_names import parse_part_name, parse_staging_name, part_name, staging_name
from batchinf.records import Part, Shard
from batchinf.source import Source
from batchinf.storage import Folder
from batchinf.tasks import Task

__all__ = ["OpenShard", "parse_part_name", "parse_staging_name", "part_name", "verify_part", "write_part"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FORMAT_VERSION = 1
_PREFIX = "batchinf."

# Results are taken, and kept columns read, in pieces of this size; a row group collects pieces.
PIECE_BYTES = 16 << 20
ROW_GROUP_BYTES = 128 << 20
# Of one row, in a segment that is to be believed: a byte of memory is given to each.
_MOST_REQUESTS = 1 << 20
# Rows of kept columns whose size is not known yet: few at first, then at most four times as many as before.
_FIRST_ROWS, _MOST_ROWS = 64, 4096
# Larger results are quicker to copy one by one than to `take`: 52 us against 106 for 45 KB, 29 against 4 for 1.4 KB.
_WIDE_BYTES = 8 << 10


# -- a shard that is being worked on ---------------------------------------------------------------------------------


class OpenShard:
    """What is finished of a shard. In memory: its newest results, and one byte for each of all its requests.

    `recover`, `add`, `tick` and `close` are for one thread at a time; any thread may ask what is finished.
    """

    def __init__(self, shard: Shard, task: Task, journal: Journal, chosen: BoolArray | None = None) -> None:
        """chosen: bool [shard.num_rows], the rows that are to be run; None is all."""
        self.shard = shard
        self.task = task
        self.segments: list[Segment] = []
        self.fresh: list[pa.RecordBatch] = []
        self.unjournalled_bytes = 0
        self.num_results = self.num_recovered_errors = 0
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
        slot = self._first_slot[row_index - self.shard.start]
        return bool(slot >= 0 and self._is_done[slot + request_index])

    def is_finished(self, row_index: int) -> bool:
        """Whether there are results for all requests of this row, or none is to be run."""
        return self.are_finished(row_index, row_index + 1)

    def are_finished(self, start: int, stop: int) -> bool:
        """Whether rows `start` to `stop` (exclusive) are all finished."""
        rows = slice(start - self.shard.start, stop - self.shard.start)
        is_begun = self._first_slot[rows] >= 0
        return bool(np.all(is_begun & (self._num_done[rows] == self.num_requests[rows])))

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
        places: Int64Array = firsts[row_index - self.shard.start] + request_index
        return places

    def _note(
        self, row_index: Int64Array, request_index: npt.NDArray[np.int32], num_requests: npt.NDArray[np.int32]
    ) -> BoolArray:
        """Mark results as done; which of them are new. Raises ValueError, with nothing marked, for a stranger."""
        rows = row_index - self.shard.start
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


# -- from results to a file ------------------------------------------------------------------------------------------


def write_part(
    folder: Folder,
    shard: OpenShard,
    source: Source,
    id_column: str | None,
    keep_columns: Sequence[str],
    metadata: Mapping[str, str],
    incarnation: str,
    merge: Callable[[Iterator[pa.Table]], Iterator[pa.Table]] | None = None,
) -> Part:
    """Write a complete shard to `staging/`, sorted by (row_index, sample_index).

    Holds a row group and a piece of the results at a time, whatever the shard's size. metadata: further entries of the
    file's key-value metadata, each key beginning with `batchinf.`; `batchinf.fingerprint` is the job's. merge: gives
    the rows to be written, in order, in place of those that it is given.
    """
    if not shard.is_complete:
        raise ValueError(f"{shard.shard} is not complete")
    name = staging_name(shard.index, incarnation)
    names = ([] if id_column is None else [id_column]) + list(keep_columns)
    schema = shard.task.output_schema([source.schema.field(column) for column in names])
    totals, logprobs = _Totals(), non_finite.logprob_columns(shard.task.result_schema)
    with folder.writing(f"staging/{name}", fault="parts") as file:
        sink = SealingWriter(file)
        with pq.ParquetWriter(sink, schema, **shard.task.parquet_options(schema)) as writer:
            tables = _output(shard, source, names)
            for table in _row_groups(tables if merge is None else merge(tables)):
                totals.add(table, logprobs)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
            writer.add_key_value_metadata({**metadata, **_own_metadata(shard.shard), **totals.metadata(), **UNSEALED})
            sink.hold()
        sink.seal()
    return totals.part(shard.index, name, sink.num_bytes, sink.hexdigest())


@dataclass(slots=True)
class _Totals:
    """Sums over output rows. num_prompt_tokens: of the rows that an engine answered."""

    num_rows: int = 0
    num_errors: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_nan_rows: int = 0
    num_inf_rows: int = 0

    def add(self, table: pa.Table, logprobs: Sequence[str]) -> None:
        """Count these output rows too."""
        num_output_tokens = table.column("num_output_tokens")
        answered = table.column("num_prompt_tokens").filter(num_output_tokens.is_valid())
        self.num_rows += table.num_rows
        self.num_errors += table.num_rows - table.column("error_type").null_count
        self.num_prompt_tokens += pc.sum(answered, min_count=0).as_py()
        self.num_output_tokens += pc.sum(num_output_tokens, min_count=0).as_py()
        num_nan_rows, num_inf_rows = non_finite.count_rows(table, logprobs)
        self.num_nan_rows += num_nan_rows
        self.num_inf_rows += num_inf_rows

    def metadata(self) -> dict[str, str]:
        """As they stand in a part's metadata."""
        return {f"{_PREFIX}{field.name}": str(getattr(self, field.name)) for field in fields(self)}

    def part(self, shard: int, file: str, num_bytes: int, digest: str) -> Part:
        """The record of a part with these rows."""
        return Part(shard=shard, file=file, num_bytes=num_bytes, digest=digest, **asdict(self))


def _own_metadata(shard: Shard) -> dict[str, str]:
    return {
        f"{_PREFIX}format_version": str(FORMAT_VERSION),
        f"{_PREFIX}shard": str(shard.index),
        f"{_PREFIX}first_row": str(shard.start),
        f"{_PREFIX}num_source_rows": str(shard.num_rows),
    }


def _row_groups(pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    group: list[pa.Table] = []
    group_bytes = 0
    for piece in pieces:
        if group and group_bytes + piece.nbytes > ROW_GROUP_BYTES:
            yield pa.concat_tables(group)
            group, group_bytes = [], 0
        group.append(piece)
        group_bytes += piece.nbytes
    if group:
        yield pa.concat_tables(group)


def _output(shard: OpenShard, source: Source, names: Sequence[str]) -> Iterator[pa.Table]:
    """The output rows of a complete shard in order, in pieces of about PIECE_BYTES or of one result."""
    merged, is_whole = _Merged(shard), bool(shard.chosen.all())
    starts = np.concatenate([[0], np.cumsum(shard.num_requests, dtype=np.int64)])
    rows = np.repeat(np.arange(shard.shard.num_rows, dtype=np.int32), shard.num_requests)
    for first, last, columns in _blocks(shard.shard, source, names, shard.chosen):
        result_bytes = merged.num_bytes[starts[first] : starts[last]]
        if columns is not None:
            result_bytes = result_bytes + row_bytes(columns)[rows[starts[first] : starts[last]] - first]
        for start, stop in _cuts(result_bytes, PIECE_BYTES):
            start, stop = start + starts[first], stop + starts[first]
            own = None if columns is None else columns.slice(rows[start] - first, rows[stop - 1] - rows[start] + 1)
            if own is not None and not is_whole:
                own = own.filter(pa.array(shard.chosen[rows[start] : rows[stop - 1] + 1]))
            yield shard.task.reduce(own, merged.take(start, stop))
            for segment in shard.segments:
                segment.let_go()


def _blocks(
    shard: Shard, source: Source, names: Sequence[str], chosen: BoolArray
) -> Iterator[tuple[int, int, pa.Table | None]]:
    """Runs of a shard's rows, counted from its first, with their columns of the source; only idle runs are left out."""
    if not names:
        yield 0, shard.num_rows, None
        return
    first, num_rows = 0, _FIRST_ROWS
    while first < shard.num_rows:
        last = min(first + num_rows, shard.num_rows)
        if not chosen[first:last].any():
            first = last
            continue
        read = source.read_columns(shard.start + first, shard.start + last, list(dict.fromkeys(names)))
        yield first, last, pa.Table.from_arrays([read.column(name) for name in names], names=list(names))
        likely = int(PIECE_BYTES * (last - first) / max(1, row_bytes(read).sum()))
        num_rows = max(1, min(likely, 4 * num_rows, _MOST_ROWS))
        first = last


def _cuts(num_bytes: Int64Array, limit: int) -> Iterator[tuple[int, int]]:
    """Runs of items of at most `limit` bytes together, or of one item."""
    ends = np.cumsum(num_bytes)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield start, stop
        start = stop


class _Merged:
    """The results of a complete shard, sorted by (row_index, request_index), wherever they lie. 16 bytes for each.

    num_bytes: int64 [num_results], the size of each in memory.
    """

    def __init__(self, shard: OpenShard) -> None:
        stored = [batch for segment in shard.segments for batch in segment.table().to_batches()]
        self._batches = [*stored, *joined(shard.fresh)]
        self._batch = np.zeros(shard.num_results, np.int32)
        self._row = np.zeros(shard.num_results, np.int32)
        self.num_bytes = np.zeros(shard.num_results, np.int64)
        # Backwards, so that of two results for one request the first stands.
        for index in reversed(range(len(self._batches))):
            batch = self._batches[index]
            places = shard.places(batch.column("row_index").to_numpy(), batch.column("request_index").to_numpy())
            self._batch[places] = index
            self._row[places] = np.arange(batch.num_rows, dtype=np.int32)
            self.num_bytes[places] = row_bytes(batch)

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


# -- a file that no manifest line names ------------------------------------------------------------------------------


def verify_part(folder: Folder, name: str, shard: Shard, fingerprint: str, *, deep: bool) -> Part | None:
    """The record of a part that lies at `name` (`staging/...` or `parts/...`), or None if it is not whole or not ours.

    The footer must be readable and name the job, the shard and its rows. deep: not a bit differs from what was written.
    """
    path = folder.path(name)
    try:
        with pa.memory_map(str(path)) as file:
            data = memoryview(file.read_buffer())
        if deep and not is_sealed(data):
            return None
        totals = _stated_totals(pq.read_metadata(path), shard, fingerprint)
    except (pa.ArrowException, OSError, ValueError):
        return None
    return None if totals is None else totals.part(shard.index, path.name, len(data), xxhash.xxh3_128_hexdigest(data))


def _stated_totals(footer: pq.FileMetaData, shard: Shard, fingerprint: str) -> _Totals | None:
    own = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
    expected = {**_own_metadata(shard), f"{_PREFIX}fingerprint": fingerprint}
    if any(own.get(key) != value for key, value in expected.items()):
        return None
    # A part of an earlier version may lack a count that was added since.
    totals = _Totals(**{field.name: int(own.get(f"{_PREFIX}{field.name}", 0)) for field in fields(_Totals)})
    return totals if totals.num_rows == footer.num_rows else None
