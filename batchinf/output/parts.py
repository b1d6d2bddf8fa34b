"""Writes the part of a whole shard, for replicas. Reads the record of a part from its file, for the recovery."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic_core import from_json

from batchinf.base.parquet import absolute
from batchinf.base.storage import Folder, HashingWriter, adapter, file_digest
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import BASIC_COUNTS
from batchinf.manifest.names import staged_file
from batchinf.output.counts import count_rows, joined, number_columns, row_bytes, size_of
from batchinf.output.open_lease import OpenLease
from batchinf.prompts import encoder
from batchinf.records import COUNT_NAMES, Int64Array, Part, PartCounts, Shard
from batchinf.schedule.positions import ShardRows
from batchinf.source.files import grouped
from batchinf.source.rows import Source
from batchinf.tasks.base import Task

PART_VERSION = 1  # a change raises `FORMAT_VERSION` too
_PREFIX = "batchinf."
RETRY_KEY = f"{_PREFIX}retry"  # number of the part's last retry
REPLACES_KEY = f"{_PREFIX}replaces"  # digest of the part from which that retry made it

UNSTORABLE = "unstorable_value"  # the error type of a row whose id or kept column cannot be stored as it is

# Results and kept columns are read in pieces of this size. A row group has several pieces.
PIECE_BYTES = 16 << 20
ROW_GROUP_BYTES = 128 << 20
# Rows of kept columns to read at once. Their size is unknown, so the number begins low and grows at most fourfold.
_FIRST_ROWS = 64
_MOST_ROWS = 4096
# Larger results are copied one by one, smaller ones with `take`: 52 against 106 µs for 45 KB, 29 against 4 for 1.4 KB.
_WIDE_BYTES = 8 << 10


# -- writing a part --------------------------------------------------------------------------------------------------


def write_part(
    shard: OpenLease,
    source: Source,
    *,
    carried: Sequence[pa.Field],
    columns: Columns,
    metadata: Mapping[str, str],
    merge: Callable[[Iterator[pa.Table]], Iterator[pa.Table]] | None = None,
    num_second_bos: int = 0,
) -> Part:
    """Write a whole shard to `staging/`, sorted by row_index and sample_index (if there is one).

    Memory holds one row group and one piece of the results, whatever the shard's size.

    carried: the columns of the source that the output has, too: the id first, if there is one; see
    `Source.read_fields`. metadata: entries of the file's key-value metadata, such as `batchinf.fingerprint`; keys begin
    with `batchinf.`. merge: turns the shard's rows into the rows to write, in order. num_second_bos: that of the part
    that is replaced, which has the same prompts.
    """
    if not (shard.is_complete and shard.lease.is_whole):
        raise ValueError(f"{shard.lease} is not complete")
    schema = columns.part_schema
    merged = _Merged(shard)
    # Kept columns are not the model's numbers, and a task may make its output of other ones.
    numbers = [name for name in number_columns(columns.journal_schema) if name in schema.names]
    # A retry has only some of the rows, but the old part counted all.
    counts = PartCounts(num_second_bos=max(num_second_bos, merged.num_second_bos))
    journal = shard.journal
    unnamed = f"staging/{shard.index:06d}-{journal.incarnation}"
    with journal.folder.writing(unnamed, "parts", final_name=lambda: staged_file(part)) as file:
        sink = HashingWriter(file)
        with pq.ParquetWriter(sink, schema, **shard.task.parquet_options(schema)) as writer:
            tables = _output(shard, merged, columns, _blocks(shard, source, carried))
            row_group_bytes = shard.task.row_group_bytes or ROW_GROUP_BYTES
            rows = tables if merge is None else merge(tables)
            for table in map(pa.concat_tables, grouped(rows, size_of, row_group_bytes)):
                counts += count_rows(table, shard.task, numbers)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
            entries = {**metadata, **_place_entries(shard.lease, shard.rows), **count_entries(counts)}
            writer.add_key_value_metadata(entries)
        source.keep_digests()
        part = _part(counts, shard=shard.index, num_bytes=sink.num_bytes, digest=sink.hexdigest())
    return part


def _part(counts: PartCounts, **fields: Any) -> Part:
    return Part(**fields, **asdict(counts))


def output_rows(columns: Columns, task: Task, carried: pa.Table | None, results: pa.Table) -> pa.Table:
    """The output rows of journalled results: see `Task.reduce`. Columns that the journal lacks are null there."""
    if results.schema != task.result_schema:
        begun = {*results.column_names}
        for field in task.result_schema:
            if field.name not in begun:
                results = results.append_column(field, pa.nulls(results.num_rows, field.type))
        results = results.select(task.result_schema.names)
    return task.reduce(carried, results).select(columns.part_schema.names)


def count_entries(counts: PartCounts) -> dict[str, str]:
    """The counts as entries of a part's footer."""
    return {f"{_PREFIX}{name}": json.dumps(value) for name, value in counts.written().items()}


def stated_counts(entries: Mapping[str, str]) -> PartCounts:
    """The counts in a footer. Raises KeyError if one is missing, ValueError if one is no number."""
    names = [name for name in COUNT_NAMES if name in BASIC_COUNTS or f"{_PREFIX}{name}" in entries]
    return adapter(PartCounts).validate_python({name: from_json(entries[f"{_PREFIX}{name}"]) for name in names})


def shard_entries(shard: Shard, first_row: int) -> dict[str, str]:
    """The entries of a part's footer that name its shard."""
    return {
        f"{_PREFIX}format_version": str(PART_VERSION),
        f"{_PREFIX}shard": str(shard.index),
        f"{_PREFIX}first_row": str(first_row),
        f"{_PREFIX}num_source_rows": str(shard.num_rows),
    }


def _place_entries(shard: Shard, rows: ShardRows) -> dict[str, str]:
    last_row = {} if rows.is_consecutive else {f"{_PREFIX}last_row": str(rows.last)}
    return shard_entries(shard, rows.first) | last_row


def footer_entries(footer: pq.FileMetaData) -> dict[str, str]:
    """The key-value metadata of a Parquet file. Raises ValueError if it is no text."""
    return {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}


def _output(shard: OpenLease, merged: "_Merged", columns: Columns, blocks: Iterator["_Block"]) -> Iterator[pa.Table]:
    """The output rows of a complete shard in order, in pieces of about PIECE_BYTES or one result."""
    is_whole = bool(shard.chosen.all())
    starts = np.concatenate([[0], np.cumsum(shard.num_requests, dtype=np.int64)])
    rows = np.repeat(np.arange(shard.lease.num_rows, dtype=np.int32), shard.num_requests)
    is_first = np.diff(rows, prepend=-1) != 0
    for first, last, of_source, lost in blocks:
        result_bytes = merged.num_bytes[starts[first] : starts[last]]
        if of_source is not None:
            result_bytes = result_bytes + row_bytes(of_source)[rows[starts[first] : starts[last]] - first]
        may_begin = is_first[starts[first] : starts[last]] if shard.task.joins_requests else None
        for cut in _cuts(result_bytes, PIECE_BYTES, may_begin):
            start, stop = (place + starts[first] for place in cut)
            first_row = rows[start]
            stop_row = rows[stop - 1] + 1
            carried = None if of_source is None else of_source.slice(first_row - first, stop_row - first_row)
            if carried is not None and not is_whole:
                carried = carried.filter(pa.array(shard.chosen[first_row:stop_row]))
            yield _with_lost(output_rows(columns, shard.task, carried, merged.take(start, stop)), lost)
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


# A range of a shard's rows, by local index, with their columns of the source; and the rows whose values cannot be
# stored, by `row_index`, and why.
_Block = tuple[int, int, pa.Table | None, dict[int, str]]


def _blocks(shard: OpenLease, source: Source, fields: Sequence[pa.Field]) -> Iterator[_Block]:
    """All rows of a shard, without ranges that have no chosen rows."""
    if not fields:
        yield 0, shard.lease.num_rows, None, {}
        return
    first = 0
    num_rows = _FIRST_ROWS
    while first < shard.lease.num_rows:
        last = min(first + num_rows, shard.lease.num_rows)
        if not shard.chosen[first:last].any():
            first = last
            continue
        lost = dict[int, str]()
        read = source.fields_of(shard.rows.positions(first, last), fields, lost)
        yield first, last, read, lost
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
        batches = self._batch[start:stop]
        rows = self._row[start:stop]
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


def stated_part(
    folder: Folder, name: str, shard: Shard, fingerprint: str, *, rows: ShardRows | None = None
) -> Part | None:
    """The record of the part at `name` (`staging/...` or `parts/...`) by its footer and its bytes.

    None if the file has no footer, or if that does not name the job, the shard and its rows (None: `start` to `stop`).
    """
    path = folder.path(name)
    try:
        footer = pq.read_metadata(absolute(path))
        entries = footer_entries(footer)
        counts = stated_counts(entries)
        retry = int(entries.get(RETRY_KEY, 0))
        digest = file_digest(path)
        num_bytes = path.stat().st_size
    except (pa.ArrowException, OSError, ValueError, KeyError, EOFError):
        return None
    places = _place_entries(shard, rows or ShardRows(shard.start, shard.stop))
    if not {**places, f"{_PREFIX}fingerprint": fingerprint}.items() <= entries.items():
        return None
    if counts.num_rows != footer.num_rows:
        return None
    replaces = entries.get(REPLACES_KEY, "")
    return _part(counts, shard=shard.index, num_bytes=num_bytes, digest=digest, retry=retry, replaces=replaces)
