"""The rows of two jobs side by side, joined by their position if both had the same input, else by `id`. `diff` uses it.

DuckDB joins the rows and spills to disk. Vectors and logits are too wide for that: they are read beside it, a few rows
at a time.
"""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import UserError
from batchinf.records import Int64Array
from batchinf.results import Results

JOIN_KEYS = ("row_index", "id")
SAMPLE = "sample_index"
_MEMORY = "2GB"
_ROWS_AT_ONCE = 4096
# Of each job's wide columns, at once. Parquet's reader takes some ten times as much; 32 MiB are no quicker.
_WIDE_BYTES = 4 << 20
_PLACE = "place"


def join_key(a: Results, b: Results, on: str | None) -> str:
    """`row_index` or `id`. on: what the user asks for. Raises UserError where the two cannot be joined by it."""
    # As far as both go: rows that came later may be others, at the same positions.
    is_same_input = all(one == other for one, other in zip(a.taken, b.taken, strict=False))
    has_id = "id" in a.schema.names and "id" in b.schema.names
    if on not in (None, *JOIN_KEYS):
        raise UserError(f"--on: got {on!r}; must be {' or '.join(JOIN_KEYS)}")
    if on == "id" and not has_id:
        raise UserError("--on id: not both jobs have an id; give them the same input.id_column, or say --on row_index")
    if on is None and not is_same_input and not has_id:
        raise UserError(
            f"{a.folder} and {b.folder} had different inputs, and rows have no id to be joined by; if rows stand at "
            "the same places in both, say --on row_index"
        )
    if on is not None:
        return on
    return "row_index" if is_same_input else "id"


class JoinedRows:
    """Both jobs' rows, joined. The columns of each are named `…_a` and `…_b`, but for `key` and `sample_index`."""

    def __init__(self, a: Results, b: Results, key: str, columns: Sequence[str], wide: Sequence[str], scratch: str):
        """columns, wide: of both jobs. scratch: a folder for what does not fit in memory."""
        import duckdb

        settings: dict[str, str | bool | int | float | list[str]] = {"memory_limit": _MEMORY, "temp_directory": scratch}
        self._connection = duckdb.connect(":memory:", config=settings)
        self._names = list(columns)
        self._key = key
        self._keys = [key, *([SAMPLE] if SAMPLE in a.schema.names else [])]
        for name, job in (("a", a), ("b", b)):
            self._connection.register(name, _reader(job, [*dict.fromkeys(("row_index", *self._keys)), *columns]))
            # A reader can be read once, and the rows are asked for twice.
            self._connection.execute(f"CREATE TABLE t{name} AS SELECT * FROM {name}")
            self._connection.unregister(name)
        self._rows_at_once = _ROWS_AT_ONCE
        self._wide: list[_InOrder | _Spooled] = []
        if wide:
            self._rows_at_once = min(_wide_rows(job, wide) for job in (a, b))
            self._wide = [_InOrder(a, wide, self._rows_at_once), _InOrder(b, wide, self._rows_at_once)]
            if not self._is_b_in_order():
                self._wide[1] = _Spooled(b, wide, self._rows_at_once, os.path.join(scratch, "b.arrow"))

    def _on(self, one: str, other: str) -> str:
        return " AND ".join(f"{one}.{name} = {other}.{name}" for name in self._keys)

    def batches(self) -> Iterator[tuple[pa.RecordBatch, list[pa.Table]]]:
        """Rows of both, in A's order; beside them the wide columns of A, and of B, where there are some."""
        columns = [f"ta.{name} AS {name}_a, tb.{name} AS {name}_b" for name in (*self._names, _PLACE)]
        sample = f", ta.{SAMPLE}" if SAMPLE in self._keys else ""
        # Wide columns can be read in the order alone in which they lie.
        order = f"ta.{_PLACE}, tb.{_PLACE}" if self._wide else f"ta.row_index{sample}"
        found: Any = self._connection.sql(
            f"SELECT ta.{self._key} AS key{sample}, {', '.join(columns)} FROM ta JOIN tb ON {self._on('ta', 'tb')} "
            f"ORDER BY {order}"
        )
        # Named otherwise before DuckDB 2.
        read = found.to_arrow_reader if hasattr(found, "to_arrow_reader") else found.fetch_arrow_reader
        for batch in read(_ROWS_AT_ONCE):
            for start in range(0, batch.num_rows, self._rows_at_once):
                rows = batch.slice(start, self._rows_at_once)
                places = (rows.column(f"{_PLACE}_{name}").to_numpy() for name in "ab")
                yield rows, [wide.take(found) for wide, found in zip(self._wide, places, strict=False)]

    def num_alone(self) -> tuple[int, int]:
        """Rows that only A has, and that only B has."""

        def alone(one: str, other: str) -> int:
            return self._count(f"SELECT count(*) FROM {one} ANTI JOIN {other} ON {self._on(one, other)}")

        return alone("ta", "tb"), alone("tb", "ta")

    def _is_b_in_order(self) -> bool:
        """Whether A's order is B's too."""
        places = f"SELECT tb.{_PLACE} AS place, lag(tb.{_PLACE}) OVER (ORDER BY ta.{_PLACE}, tb.{_PLACE}) AS before"
        joined = f"{places} FROM ta JOIN tb ON {self._on('ta', 'tb')}"
        return self._count(f"SELECT count(*) FROM ({joined}) WHERE place < before") == 0

    def _count(self, query: str) -> int:
        # All of it: an unfinished result stands in the way of the next.
        [(found,)] = self._connection.execute(query).fetchall()
        return int(found)


def _reader(job: Results, columns: Sequence[str]) -> pa.RecordBatchReader:
    """These columns, and each row's place among the job's."""
    # DuckDB knows no half floats.
    fields = [pa.field(name, _without_half(job.schema.field(name).type)) for name in columns]
    schema = pa.schema([*fields, pa.field(_PLACE, pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        place = 0
        for batch in job.batches(columns):
            arrays = [batch.column(field.name).cast(field.type) for field in fields]
            places = np.arange(place, place + batch.num_rows)
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(places)], schema=schema)
            place += batch.num_rows

    return pa.RecordBatchReader.from_batches(schema, batches())


def _without_half(type: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type):
        return pa.list_(_without_half(type.value_type))
    return pa.float32() if pa.types.is_float16(type) else type


# -- wide columns ------------------------------------------------------------------------------------------------------


def _wide_rows(job: Results, columns: Sequence[str]) -> int:
    """Rows of these columns that make _WIDE_BYTES, where the largest part is like its others."""
    most = 1.0
    for path in job.parts:
        metadata, num_bytes = pq.read_metadata(path), 0
        for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
            for leaf in (group.column(index) for index in range(group.num_columns)):
                if leaf.path_in_schema.partition(".")[0] in columns:
                    num_bytes += leaf.total_uncompressed_size
        most = max(most, num_bytes / max(1, metadata.num_rows))
    return max(1, min(_ROWS_AT_ONCE, int(_WIDE_BYTES / most)))


class _InOrder:
    """Columns of a job, whose rows are taken in the order in which they lie: a batch is held at a time."""

    def __init__(self, job: Results, columns: Sequence[str], num_rows: int) -> None:
        self._batches = job.batches(columns, num_rows)
        self._batch: pa.RecordBatch | None = None
        self._start = 0

    def take(self, places: Int64Array) -> pa.Table:
        """The rows at these places, none of which comes before another, or before those of the last call."""
        pieces = []
        while len(places):
            if self._batch is None or places[0] >= self._start + self._batch.num_rows:
                self._start += 0 if self._batch is None else self._batch.num_rows
                self._batch = next(self._batches)
                continue
            own = places[: np.searchsorted(places, self._start + self._batch.num_rows)] - self._start
            pieces.append(_rows_of(self._batch, own))
            places = places[len(own) :]
        return pa.Table.from_batches(pieces)


class _Spooled:
    """Columns of a job in a file of plain Arrow, mapped into memory: rows are taken in any order."""

    def __init__(self, job: Results, columns: Sequence[str], num_rows: int, path: str) -> None:
        schema = pa.schema([job.schema.field(name) for name in columns])
        starts = [0]
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as spool:
            for batch in job.batches(columns, num_rows):
                spool.write_batch(batch)
                starts.append(starts[-1] + batch.num_rows)
        self._starts = np.array(starts)
        self._file = pa.ipc.open_file(pa.memory_map(os.fspath(pathlib.Path(path))))

    def take(self, places: Int64Array) -> pa.Table:
        """The rows at these places."""
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        pieces = [
            self._file.get_batch(int(number)).slice(int(place - self._starts[number]), 1)
            for number, place in zip(numbers, places, strict=True)
        ]
        return pa.Table.from_batches(pieces)


def _rows_of(batch: pa.RecordBatch, places: Int64Array) -> pa.RecordBatch:
    if places[-1] - places[0] == len(places) - 1:
        return batch.slice(int(places[0]), len(places))
    return pa.Table.from_batches([batch.slice(int(place), 1) for place in places]).combine_chunks().to_batches()[0]
