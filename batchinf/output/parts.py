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

from batchinf.base.storage import Folder
from batchinf.manifest.lines import without_rare
from batchinf.manifest.names import staging_name
from batchinf.output import counts
from batchinf.output.journal import UNSEALED, SealingWriter, is_sealed, joined, row_bytes
from batchinf.output.shard import OpenShard
from batchinf.prompts import encoder
from batchinf.records import Int64Array, Part, Shard
from batchinf.schedule.selection import ShardRows
from batchinf.source.rows import Source
from batchinf.tasks.score.accuracy import ANSWER, count_right_answers

PART_VERSION = 1
_PREFIX = "batchinf."

# Results are taken, and kept columns read, in pieces of this size; a row group collects pieces.
PIECE_BYTES = 16 << 20
ROW_GROUP_BYTES = 128 << 20
# Rows of kept columns whose size is not known yet: few at first, then at most four times as many as before.
_FIRST_ROWS, _MOST_ROWS = 64, 4096
# Larger results are quicker to copy one by one than to `take`: 52 us against 106 for 45 KB, 29 against 4 for 1.4 KB.
_WIDE_BYTES = 8 << 10


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
    num_second_bos: int = 0,
) -> Part:
    """Write a complete shard to `staging/`, sorted by row_index, and sample_index where there is one.

    Holds a row group and a piece of the results at a time, whatever the shard's size. metadata: further entries of the
    file's key-value metadata, each key beginning with `batchinf.`; `batchinf.fingerprint` is the job's. merge: gives
    the rows to be written, in order, in place of those that it is given. num_second_bos: in the part whose place it
    takes, whose prompts are the same.
    """
    if not shard.is_complete:
        raise ValueError(f"{shard.shard} is not complete")
    name = staging_name(shard.index, incarnation)
    names = ([] if id_column is None else [id_column]) + list(keep_columns)
    schema = shard.task.output_schema([source.schema.field(column) for column in names])
    totals, results = _Totals(num_second_bos=num_second_bos), shard.task.result_schema
    numbers, has_answer = counts.number_columns(results), ANSWER in results.names
    with folder.writing(f"staging/{name}", fault="parts") as file:
        sink = SealingWriter(file)
        with pq.ParquetWriter(sink, schema, **shard.task.parquet_options(schema)) as writer:
            tables = _output(shard, source, names, totals)
            for table in _row_groups(tables if merge is None else merge(tables), shard.task.row_group_bytes):
                totals.add(table, numbers, has_answer)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
            writer.add_key_value_metadata(
                {**metadata, **_own_metadata(shard.shard, shard.rows), **totals.metadata(), **UNSEALED}
            )
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
    num_second_bos: int = 0
    num_answered: int | None = None
    num_right: int = 0
    num_right_per_token: int = 0
    num_right_per_byte: int = 0

    def add(self, table: pa.Table, numbers: Sequence[str], has_answer: bool) -> None:
        """Count these output rows too. numbers: the columns of what the model gave."""
        num_output_tokens = table.column("num_output_tokens")
        answered = table.column("num_prompt_tokens").filter(num_output_tokens.is_valid())
        self.num_rows += table.num_rows
        self.num_errors += table.num_rows - table.column("error_type").null_count
        self.num_prompt_tokens += pc.sum(answered, min_count=0).as_py()
        self.num_output_tokens += pc.sum(num_output_tokens, min_count=0).as_py()
        num_nan_rows, num_inf_rows = counts.count_non_finite_rows(table, numbers)
        self.num_nan_rows += num_nan_rows
        self.num_inf_rows += num_inf_rows
        if has_answer:
            found = count_right_answers(table)
            self.num_answered = (self.num_answered or 0) + found.num_answered
            self.num_right += found.num_right
            self.num_right_per_token += found.num_right_per_token
            self.num_right_per_byte += found.num_right_per_byte

    def metadata(self) -> dict[str, str]:
        """As they stand in a part's metadata."""
        return {f"{_PREFIX}{name}": str(value) for name, value in without_rare(asdict(self)).items()}

    def part(self, shard: int, file: str, num_bytes: int, digest: str) -> Part:
        """The record of a part with these rows."""
        return Part(shard=shard, file=file, num_bytes=num_bytes, digest=digest, **asdict(self))


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


def _output(shard: OpenShard, source: Source, names: Sequence[str], totals: _Totals) -> Iterator[pa.Table]:
    """The output rows of a complete shard in order, in pieces of about PIECE_BYTES or of one result."""
    merged, is_whole = _Merged(shard), bool(shard.chosen.all())
    # Of the rows of a retry the part before counts the others too, and all of them, unless it is of an earlier version.
    totals.num_second_bos = max(totals.num_second_bos, merged.num_second_bos)
    starts = np.concatenate([[0], np.cumsum(shard.num_requests, dtype=np.int64)])
    rows = np.repeat(np.arange(shard.shard.num_rows, dtype=np.int32), shard.num_requests)
    is_first = np.diff(rows, prepend=-1) != 0
    for first, last, columns in _blocks(shard, source, names):
        result_bytes = merged.num_bytes[starts[first] : starts[last]]
        if columns is not None:
            result_bytes = result_bytes + row_bytes(columns)[rows[starts[first] : starts[last]] - first]
        may_begin = is_first[starts[first] : starts[last]] if shard.task.joins_requests else None
        for start, stop in _cuts(result_bytes, PIECE_BYTES, may_begin):
            start, stop = start + starts[first], stop + starts[first]
            own = None if columns is None else columns.slice(rows[start] - first, rows[stop - 1] - rows[start] + 1)
            if own is not None and not is_whole:
                own = own.filter(pa.array(shard.chosen[rows[start] : rows[stop - 1] + 1]))
            yield shard.task.reduce(own, merged.take(start, stop))
            for segment in shard.segments:
                segment.let_go()


def _blocks(shard: OpenShard, source: Source, names: Sequence[str]) -> Iterator[tuple[int, int, pa.Table | None]]:
    """Runs of a shard's rows, counted from its first, with their columns of the source; only idle runs are left out."""
    if not names:
        yield 0, shard.shard.num_rows, None
        return
    first, num_rows = 0, _FIRST_ROWS
    while first < shard.shard.num_rows:
        last = min(first + num_rows, shard.shard.num_rows)
        if not shard.chosen[first:last].any():
            first = last
            continue
        read = source.columns_of(shard.rows.positions(first, last), list(dict.fromkeys(names)))
        yield first, last, pa.Table.from_arrays([read.column(name) for name in names], names=list(names))
        likely = int(PIECE_BYTES * (last - first) / max(1, row_bytes(read).sum()))
        num_rows = max(1, min(likely, 4 * num_rows, _MOST_ROWS))
        first = last


def _cuts(
    num_bytes: Int64Array, limit: int, may_begin: npt.NDArray[np.bool_] | None = None
) -> Iterator[tuple[int, int]]:
    """Runs of items of at most `limit` bytes together, or of one item. may_begin: which items a run may begin with."""
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
    """The results of a complete shard, sorted by (row_index, request_index), wherever they lie. 17 bytes for each.

    num_bytes: int64 [num_results], the size of each in memory. num_second_bos: rows whose prompts begin with two.
    """

    def __init__(self, shard: OpenShard) -> None:
        stored = [batch for segment in shard.segments for batch in segment.table().to_batches()]
        self._batches = [*stored, *joined(shard.fresh)]
        self._batch = np.zeros(shard.num_results, np.int32)
        self._row = np.zeros(shard.num_results, np.int32)
        self.num_bytes = np.zeros(shard.num_results, np.int64)
        begins_with_two = np.zeros(shard.num_results, np.bool_)
        # Backwards, so that of two results for one request the first stands.
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


# -- a file that no manifest line names ------------------------------------------------------------------------------


def verify_part(
    folder: Folder, name: str, shard: Shard, fingerprint: str, rows: ShardRows | None = None, *, deep: bool
) -> Part | None:
    """The record of a part that lies at `name` (`staging/...` or `parts/...`), or None if it is not whole or not ours.

    The footer must be readable and name the job, the shard and its rows (None: `start` to `stop`). deep: not a bit
    differs from what was written.
    """
    path = folder.path(name)
    try:
        with pa.memory_map(str(path)) as file:
            data = memoryview(file.read_buffer())
        if deep and not is_sealed(data):
            return None
        totals = _stated_totals(pq.read_metadata(path), shard, rows or ShardRows(shard.start, shard.stop), fingerprint)
    except (pa.ArrowException, OSError, ValueError):
        return None
    return None if totals is None else totals.part(shard.index, path.name, len(data), xxhash.xxh3_128_hexdigest(data))


def _stated_totals(footer: pq.FileMetaData, shard: Shard, rows: ShardRows, fingerprint: str) -> _Totals | None:
    own = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
    expected = {**_own_metadata(shard, rows), f"{_PREFIX}fingerprint": fingerprint}
    if any(own.get(key) != value for key, value in expected.items()):
        return None
    # A part of an earlier version may lack a count that was added since.
    stated = {field.name: own.get(f"{_PREFIX}{field.name}") for field in fields(_Totals)}
    totals = _Totals(**{name: int(value) for name, value in stated.items() if value is not None})
    return totals if totals.num_rows == footer.num_rows else None
