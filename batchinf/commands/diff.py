"""`batchinf diff`: joins the rows of two jobs by position or `id`, and finds what changed between them."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError, UserError
from batchinf.output.replace import row_bytes_in
from batchinf.records import Int64Array
from batchinf.results import Results
from batchinf.schedule.predicate import without_half_floats
from batchinf.tasks.base import Task
from batchinf.tasks.compare import Changes, RowChanges
from batchinf.tasks.registry import stored_task

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
    fields = [pa.field(name, without_half_floats(job.schema.field(name).type)) for name in columns]
    schema = pa.schema([*fields, pa.field(_PLACE, pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        place = 0
        for batch in job.batches(columns):
            arrays = [batch.column(field.name).cast(field.type) for field in fields]
            places = np.arange(place, place + batch.num_rows)
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(places)], schema=schema)
            place += batch.num_rows

    return pa.RecordBatchReader.from_batches(schema, batches())


# -- wide columns ------------------------------------------------------------------------------------------------------


def _wide_rows(job: Results, columns: Sequence[str]) -> int:
    """Rows of these columns that make _WIDE_BYTES, where the largest part is like its others."""
    most = max([1.0, *(row_bytes_in(pq.read_metadata(path), columns) for path in job.parts)])
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


@dataclass(frozen=True, slots=True)
class DiffWanted:
    """What is asked for.

    on: `row_index` or `id`; None is what fits the inputs. to: a Parquet file that gets a row for each row of both.
    """

    on: str | None = None
    to: str | None = None
    num_examples: int = 3


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """One of the two jobs. model, vllm, torch, device: as its first part says; None where it does not."""

    folder: str
    num_rows: int
    is_done: bool
    model: str | None
    vllm: str | None
    torch: str | None
    device: str | None


@dataclass(frozen=True, slots=True)
class IdentityChange:
    """A field of the jobs' identities that differs: a JSON value, None where a job does not have it."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `diff` found. key: what rows were joined by. written_to: None where no file was asked for or no row is in
    both.
    """

    a: ComparedJob
    b: ComparedJob
    identity_changes: tuple[IdentityChange, ...]
    task: str
    key: str
    num_only_a: int
    num_only_b: int
    changes: RowChanges
    written_to: str | None


def diff_jobs(a: str, b: str, wanted: DiffWanted) -> DiffReport:
    """Compare two output folders.

    Raises UserError where the two cannot be joined or compared, or where the file cannot be written.
    """
    first, second = Results(a), Results(b)
    task = _common_task(first, second)
    changes = task.comparison.begin(first, second, wanted.num_examples)
    key = join_key(first, second, wanted.on)
    with tempfile.TemporaryDirectory() as scratch:
        joined = JoinedRows(first, second, key, changes.columns, changes.wide, scratch)
        _compare(joined, changes, wanted.to)
        only_a, only_b = joined.num_alone()
    found = changes.found()
    written_to = wanted.to if found.num_both else None
    jobs = _job(first), _job(second)
    return DiffReport(*jobs, _identity_changes(first, second), task.name, key, only_a, only_b, found, written_to)


def _common_task(a: Results, b: Results) -> type[Task]:
    task, other = stored_task(a.spec), stored_task(b.spec)
    if task is not other:
        raise OutputError(
            f"{a.folder} is of task {task.name}, and {b.folder} of task {other.name}: compare two of one task"
        )
    return task


def _job(job: Results) -> ComparedJob:
    stored = pq.read_metadata(job.parts[0]).metadata or {}
    said = {key.decode().removeprefix("batchinf."): value.decode() for key, value in stored.items()}
    names = ("model", "version.vllm", "version.torch", "device")
    return ComparedJob(job.folder, len(job), job.is_done, *(said.get(name) for name in names))


def _identity_changes(a: Results, b: Results) -> tuple[IdentityChange, ...]:
    names = sorted(a.identity.keys() | b.identity.keys())
    found = (IdentityChange(name, a.identity.get(name), b.identity.get(name)) for name in names)
    return tuple(change for change in found if change.a != change.b)


def _compare(joined: JoinedRows, changes: Changes, to: str | None) -> None:
    writer = None
    try:
        for rows, wide in joined.batches():
            table = changes.take(rows, wide)
            if to is not None:
                with _writing(to):
                    writer = writer or pq.ParquetWriter(to, table.schema, compression="zstd")
                    writer.write_table(table)
    finally:
        if writer is not None:
            with _writing(to):
                writer.close()


@contextlib.contextmanager
def _writing(to: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"--out: {to} cannot be written: {error.strerror or error}") from error
