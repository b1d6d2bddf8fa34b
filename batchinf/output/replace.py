"""Writes the part that replaces an old one after a retry: new rows for the chosen ones, old rows for all others."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.base.parquet import open_part
from batchinf.base.storage import Folder, file_digest
from batchinf.base.text import counted
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import Retry
from batchinf.manifest.names import part_name, published_file, staged_file
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import PIECE_BYTES, REPLACES_KEY, RETRY_KEY, footer_entries, write_part
from batchinf.records import Part
from batchinf.schedule.positions import ShardRows
from batchinf.source.rows import Source
from batchinf.tasks.columns import IMAGE_DIGESTS

_SECOND_BOS_KEY = "batchinf.num_second_bos"
_FEW_ROWS = 4096
_NAMED = 3  # rows that a line names


def retry_metadata(retry: Retry) -> dict[str, str]:
    """The entries for a retry in the Parquet metadata of the parts that it rewrote."""
    description: dict[str, object] = {
        "predicate": retry.predicate,
        "set": retry.overrides,
        "num_rows": retry.num_rows,
    }
    if retry.attempt:
        description["attempt"] = retry.attempt
    if retry.repair is not None:
        description["input"] = {"path": retry.repair.path, "num_rows": retry.repair.num_rows}
    return {RETRY_KEY: str(retry.number), f"{RETRY_KEY}.{retry.number}": json.dumps(description, ensure_ascii=False)}


def write_replacement(
    shard: OpenLease, source: Source, *, carried: Sequence[pa.Field], columns: Columns, metadata: Mapping[str, str]
) -> Part:
    """Write the replacement of a shard's part: see `write_part`. Raises OutputError if the old one is damaged."""
    old = OldPart(shard.journal.folder, shard.index, shard.rows, shard.chosen)
    part = write_part(
        shard,
        source,
        carried=carried,
        columns=columns,
        metadata={**old.retries, **metadata, REPLACES_KEY: old.digest},
        merge=old.merge,
        num_second_bos=old.num_second_bos,
    )
    retry = int(metadata[RETRY_KEY])
    return dataclasses.replace(
        part, retry=retry, replaces=old.digest, num_kept=old.num_kept, num_kept_errors=old.num_kept_errors
    )


def check_replaced(folder: Folder, new: Part, old: Part) -> None:
    """Raise OutputError if a retry has made the new part from other bytes than those of the committed one."""
    if new.replaces != old.digest:
        raise damaged_part(folder.path(published_file(old)))


def damaged_part(path: pathlib.Path) -> OutputError:
    """The error for a part that a retry cannot replace."""
    return OutputError(
        f"{path} is damaged, and its other rows cannot be kept: move it away and run the same command again to make a "
        "new one"
    )


def other_images_note(folder: Folder, parts: Sequence[Part]) -> str | None:
    """A line that names the rows of staged parts whose earlier results were of other images; None without any."""
    rows = [row for part in parts for row in _rows_of_other_images(folder, part)]
    if not rows:
        return None
    names = ", ".join(f"row {row}" for row in rows[:_NAMED]) + (", …" if len(rows) > _NAMED else "")
    return (
        f"note: {counted(len(rows), 'input row')} ran again with other images than before ({names}); the new results "
        "replace the old ones"
    )


def _rows_of_other_images(folder: Folder, part: Part) -> list[int]:
    """The rows whose results without an error a staged part replaces by results of other images."""
    before = _image_digests(folder.path(published_file(part)))
    now = _image_digests(folder.path(staged_file(part)))
    return sorted(row for row in before.keys() & now.keys() if before[row] != now[row])


def _image_digests(path: pathlib.Path) -> dict[int, list[str]]:
    """Of the rows whose results have no error."""
    with open_part(path) as file:
        rows = file.read(columns=["row_index", "error_type", IMAGE_DIGESTS])
    good = rows.filter(pc.is_null(rows.column("error_type")))
    return dict(zip(good.column("row_index").to_pylist(), good.column(IMAGE_DIGESTS).to_pylist(), strict=True))


class OldPart:
    """A part that will be replaced. retries, num_second_bos: from its metadata."""

    def __init__(self, folder: Folder, shard: int, rows: ShardRows, chosen: npt.NDArray[np.bool_]) -> None:
        """chosen: bool [len(rows)], the rows to replace. Raises OutputError if the part cannot be read."""
        self._path = folder.path(f"parts/{part_name(shard)}")
        self._rows = rows
        self._chosen = chosen
        self.num_kept = self.num_kept_errors = 0
        self.digest = file_digest(self._path)
        """Of the bytes that are there; `check_replaced` compares it with the manifest."""
        try:
            with open_part(self._path) as file:
                stored = footer_entries(file.metadata)
        except OutputError:
            raise damaged_part(self._path) from None
        self.num_second_bos = int(stored.get(_SECOND_BOS_KEY, 0))
        self.retries = {key: value for key, value in stored.items() if key.startswith(f"{RETRY_KEY}.")}

    def merge(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Rows in order: old rows that were not chosen, and all rows of `tables` with the old `attempts` added.

        tables: only chosen rows, sorted. Holds a few pieces at a time and counts the old rows that it keeps.
        """
        return _merged(self._kept(), self._counted_on(tables))

    def _read(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        with open_part(self._path, page_checksum_verification=True, memory_map=True) as file:
            for batch in file.iter_batches(min(_FEW_ROWS, piece_rows(file.metadata, columns)), columns=columns):
                yield pa.Table.from_batches([batch])

    def _kept(self) -> Iterator[pa.Table]:
        for table in self._read():
            is_kept = ~self._chosen[self._rows.locals(table.column("row_index").to_numpy())]
            kept = table.filter(pa.array(is_kept))
            self.num_kept += kept.num_rows
            self.num_kept_errors += kept.num_rows - kept.column("error_type").null_count
            yield kept

    def _counted_on(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        before = np.zeros(len(self._chosen), np.int32)
        for table in self._read(["row_index", "attempts"]):
            rows = self._rows.locals(table.column("row_index").to_numpy())
            np.maximum.at(before, rows, table.column("attempts").to_numpy())
        for table in tables:
            rows = self._rows.locals(table.column("row_index").to_numpy())
            place = table.schema.get_field_index("attempts")
            attempts = pa.array(table.column("attempts").to_numpy() + before[rows], pa.int32())
            yield table.set_column(place, table.schema.field(place), attempts)


def piece_rows(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> int:
    """Number of rows of these columns (None: all) that take PIECE_BYTES when stored. In memory they may take more."""
    return max(1, int(PIECE_BYTES / max(1e-6, row_bytes_in(metadata, columns))))


def row_bytes_in(metadata: pq.FileMetaData, columns: Sequence[str] | None) -> float:
    """Average uncompressed bytes of a row in a part, for these columns (None: all)."""
    num_bytes = 0
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        for leaf in (group.column(index) for index in range(group.num_columns)):
            if columns is None or leaf.path_in_schema.partition(".")[0] in columns:
                num_bytes += leaf.total_uncompressed_size
    return float(num_bytes / max(1, metadata.num_rows))


def _merged(*streams: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The rows of two streams of tables, each sorted by `row_index`, in order. No `row_index` is in both.

    The output rows of one row may be in several tables of a stream.
    """
    filled = [(table for table in stream if table.num_rows) for stream in streams]
    old, new = (next(stream, None) for stream in filled)
    while old is not None and new is not None:
        # No row is in both streams, so all rows up to the smaller end are complete.
        last = min(_row_index(old)[-1], _row_index(new)[-1])
        num_old, num_new = (np.searchsorted(_row_index(table), last, side="right") for table in (old, new))
        yield _in_order(old.slice(0, num_old), new.slice(0, num_new))
        old = old.slice(num_old) if num_old < old.num_rows else next(filled[0], None)
        new = new.slice(num_new) if num_new < new.num_rows else next(filled[1], None)
    for table, stream in zip((old, new), filled, strict=True):
        if table is not None:
            yield table
        yield from stream


def _row_index(table: pa.Table) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = table.column("row_index").to_numpy()
    return rows


def _in_order(old: pa.Table, new: pa.Table) -> pa.Table:
    if not (old.num_rows and new.num_rows):
        return old if old.num_rows else new
    both = pa.concat_tables([old, new])
    order = np.argsort(_row_index(both), kind="stable")
    return both.take(pa.array(order))
