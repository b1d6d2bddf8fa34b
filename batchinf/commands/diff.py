"""`batchinf diff`: joins the rows of two jobs by position or `id`, and finds what changed between them."""

import bisect
import contextlib
import glob
import itertools
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.database import duckdb_batches, duckdb_errors, open_duckdb
from batchinf.base.errors import OutputError, UserError
from batchinf.base.parquet import absolute, open_part, readable_rows
from batchinf.base.slices import SOURCE_FOLDER
from batchinf.base.storage import Folder, reason, refuse_foreign, writing_named
from batchinf.base.text import clip, one_line
from batchinf.output.replace import row_bytes_in
from batchinf.records import Int64Array
from batchinf.results import Results
from batchinf.source.versions import contents_of, versions_at_once
from batchinf.tasks.base import Task
from batchinf.tasks.compare import Changes, RowChanges, example_lines
from batchinf.tasks.registry import stored_task

JOIN_KEYS = ("row_index", "id")
SAMPLE = "sample_index"
# In the footer of each file that `--out` writes.
_MARK = {b"batchinf.file": b"diff"}
_BY_POSITION = "if both have the same rows in the same order, use --on row_index"
_MEMORY = "2GB"
_ROWS_AT_ONCE = 4096
# Bytes of each job's wide columns that are read at once. Parquet's reader takes about ten times as much memory. 32 MiB
# are not faster.
_WIDE_BYTES = 4 << 20
# A long setting is cut to so many characters, of which so many are equal text before the first difference.
_CHANGE_CHARS = 120
_SAME_CHARS = 24


def join_key(a: Results, b: Results, on: str | None) -> str:
    """`row_index` or `id`. on: the key that the user asks for. Raises UserError if the jobs cannot be joined by it."""
    if on not in (None, *JOIN_KEYS):
        raise UserError(f"--on: got {on!r}; must be {' or '.join(JOIN_KEYS)}")
    key = on or ("row_index" if _is_same_input(a, b) else "id")
    if key == "id" and not {"id"} <= set(a.schema.names) & set(b.schema.names):
        raise UserError(
            "--on id: at least one of the jobs has no id; give both the same input.id_column, or use --on row_index"
            if on is not None
            else f"{a.folder} and {b.folder} had different inputs, and at least one has no id by which rows could be "
            f"joined; {_BY_POSITION}"
        )
    types = [str(job.schema.field(key).type).removeprefix("large_") for job in (a, b)]
    # Integers of all widths are compared exactly.
    if len({re.sub(r"^u?int\d+$", "integer", type) for type in types}) > 1:
        raise UserError(
            f"the ids of {a.folder} are {types[0]}, and those of {b.folder} {types[1]}: they cannot be joined; "
            f"{_BY_POSITION}"
        )
    return key


def _is_same_input(a: Results, b: Results) -> bool:
    """Whether one job has taken in all that the other has, and maybe later rows: their rows are at equal positions."""
    (last, versions), (other_last, other_versions) = _versions(a), _versions(b)
    return bool(last & other_versions or other_last & versions)


def _has_same_files(a: Results, b: Results) -> bool:
    one, other = (contents_of(Folder(pathlib.Path(job.root, SOURCE_FOLDER)), job.taken[-1]) for job in (a, b))
    return one is not None and one == other


def _versions(job: Results) -> tuple[set[str], set[str]]:
    """The fingerprints of the last version that a job has taken in, and of all; also as of a job that begins so."""
    at_once = versions_at_once(Folder(pathlib.Path(job.root, SOURCE_FOLDER)), job.taken[-1]) or job.taken
    return {job.taken[-1], at_once[-1]}, {*job.taken, *at_once}


def joined_rows(
    a: Results, b: Results, *, key: str, columns: Sequence[str], wide: Sequence[str], scratch: str
) -> Iterator[pa.RecordBatch]:
    """The rows that both jobs have, in A's order. Raises UserError if an id is repeated.

    Their columns are `key`, `sample_index` if the jobs have it, and the columns of each job as `…_a` and `…_b`.
    wide: columns that do not go through DuckDB, because it holds at least 2,048 rows at once. scratch: a folder for
    data that exceeds memory.
    """
    jobs = {"a": a, "b": b}
    sample = [SAMPLE] if SAMPLE in a.schema.names else []
    on = ", ".join(["key", *sample])
    selected = [f"{column}_{name}" for column in (*columns, *(["place"] if wide else [])) for name in jobs]
    # Wide columns can be read quickly only in the order in which they are stored.
    order = ["place_a"] if wide else ["a.row_index", *sample]
    with duckdb_errors(_unreadable), open_duckdb(memory_limit=_MEMORY, temp_directory=scratch) as connection:
        for name, job in jobs.items():
            keys = {"key": key, "row_index": "row_index", **dict(zip(sample, sample, strict=True))}
            _create_view(connection, name, job, keys | {f"{column}_{name}": column for column in columns})
        if key == "id":
            _check_ids(connection, jobs, on)
        rows = connection.sql(
            f"SELECT {on}, {', '.join(selected)} FROM a JOIN b USING ({on}) ORDER BY {', '.join(order)}"
        )
        batches = duckdb_batches(rows, _ROWS_AT_ONCE)
        yield from _with_wide(batches, jobs, wide, scratch) if wide else batches


def _with_wide(
    batches: Iterator[pa.RecordBatch], jobs: Mapping[str, Results], wide: Sequence[str], scratch: str
) -> Iterator[pa.RecordBatch]:
    """Add the wide columns, to so few rows at once that they fit into memory."""
    readers = {name: _WideColumns(job, wide, f"{scratch}/{name}") for name, job in jobs.items()}
    num_rows = min(reader.rows_at_once for reader in readers.values())
    for batch in batches:
        for start in range(0, batch.num_rows, num_rows):
            rows = batch.slice(start, num_rows)
            arrays = dict(zip(rows.schema.names, rows.columns, strict=True))
            for name, reader in readers.items():
                values = reader.take(arrays[f"place_{name}"].to_numpy())
                arrays |= {f"{column}_{name}": values.column(column) for column in wide}
            yield pa.RecordBatch.from_pydict(arrays)


def _create_view(connection: Any, view: str, job: Results, columns: Mapping[str, str]) -> None:
    """columns: name in the view → the job's column. The view also has each row's place among the job's rows."""
    # DuckDB ignores case, so it gets names of our own.
    safe = {name: f"c{number}" for number, name in enumerate(job.schema.names)}
    files = [glob.escape(absolute(path)) for path in job.parts]
    connection.read_parquet(files, union_by_name=True).create_view(f"{view}_parts")
    selected = ", ".join(f"{safe[column]} AS {name}" for name, column in columns.items())
    # DuckDB numbers the rows in the order of the files, on any number of threads, and only if a query asks for it.
    connection.execute(
        f"CREATE VIEW {view} AS SELECT {selected}, row_number() OVER () - 1 AS place_{view} "
        f"FROM {view}_parts AS parts({', '.join(safe.values())})"
    )


def _unreadable(text: str) -> OutputError:
    return OutputError(f"the rows cannot be joined: {one_line(text, 300)}; `batchinf check --deep` finds damaged parts")


def _check_ids(connection: Any, jobs: Mapping[str, Results], on: str) -> None:
    """Raise UserError if an id is repeated in one of the jobs, which are views by these names."""
    for view, job in jobs.items():
        repeated = connection.execute(
            f"SELECT key, count(*) FROM {view} WHERE key IS NOT NULL GROUP BY {on} HAVING count(*) > 1 "
            "ORDER BY min(row_index) LIMIT 1"
        ).fetchone()
        if repeated is not None:
            raise UserError(
                f"{job.folder} has {repeated[1]:,} rows of the id {repeated[0]!r}, so rows cannot be joined by id; "
                f"{_BY_POSITION}"
            )


class _WideColumns:
    """Wide columns of a job, read in the order of its rows.

    The first call that goes back copies them to an uncompressed Arrow file, which is mapped into memory.
    """

    def __init__(self, job: Results, columns: Sequence[str], path: str) -> None:
        # The part with the largest rows decides. Rows of one part are assumed to be alike.
        most = max([1.0, *(_row_bytes(part, columns) for part in job.parts)])
        self.rows_at_once = max(1, min(_ROWS_AT_ONCE, int(_WIDE_BYTES / most)))
        self._job = job
        self._columns = columns
        self._path = path
        self._batches = job.batches(columns, self.rows_at_once)
        self._batch: Any = None
        self._start = 0
        self._stop = 0
        self._copy: Any = None
        self._starts: list[int] = []

    def take(self, places: Int64Array) -> pa.RecordBatch:
        """The rows at these places."""
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        pieces = [piece for run in runs for piece in self._pieces(int(run[0]), len(run))]
        return pieces[0] if len(pieces) == 1 else pa.Table.from_batches(pieces).combine_chunks().to_batches()[0]

    def _pieces(self, place: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        while num_rows:
            self._go_to(place)
            piece = self._batch.slice(place - self._start, num_rows)
            yield piece
            place += piece.num_rows
            num_rows -= piece.num_rows

    def _go_to(self, place: int) -> None:
        """Make the batch with the row at this place the current one."""
        if self._copy is None and place < self._start:
            self._make_copy()
        if self._copy is not None:
            number = bisect.bisect_right(self._starts, place) - 1
            self._batch = self._copy.get_batch(number)
            self._start = self._starts[number]
            return
        while place >= self._stop:
            self._batch = next(self._batches)
            self._start = self._stop
            self._stop += self._batch.num_rows

    def _make_copy(self) -> None:
        schema = pa.schema([self._job.schema.field(name) for name in self._columns])
        stop = 0
        with pa.OSFile(self._path, "wb") as file, pa.ipc.new_file(file, schema) as copy:
            for batch in self._job.batches(self._columns, self.rows_at_once):
                copy.write_batch(batch)
                self._starts.append(stop)
                stop += batch.num_rows
        self._copy = pa.ipc.open_file(pa.memory_map(self._path))


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """One of the two jobs. What the footer of its first part lacks is None."""

    folder: str
    input_path: str
    num_input_rows: int
    """The rows of the input among which the job chose."""
    num_rows: int
    is_done: bool
    model: str | None
    vllm: str | None
    torch: str | None
    device: str | None

    def line(self) -> str:
        engine = {"model": self.model, "vllm": self.vllm, "torch": self.torch, "device": self.device}
        known = ", ".join(f"{key} {value}" for key, value in engine.items() if value is not None)
        return f"{self.folder}: {self.num_rows:,} rows{'' if self.is_done else ', not done'}, {known}"


@dataclass(frozen=True, slots=True)
class IdentityChange:
    """A field of the jobs' identities that differs."""

    name: str
    a: Any
    b: Any
    """The JSON values; None if a job does not have the field."""

    def line(self) -> str:
        """The setting in A and in B. Of long values, the text around the first difference."""
        texts = [repr(self.a), repr(self.b)]
        start = 0
        if max(map(len, texts)) > _CHANGE_CHARS:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
            start = max(0, len(list(same)) - _SAME_CHARS)
        shown = (("…" if start else "") + clip(text[start:], _CHANGE_CHARS) for text in texts)
        return f"  {self.name}: {' -> '.join(shown)}"


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of `diff`."""

    a: ComparedJob
    b: ComparedJob
    identity_changes: tuple[IdentityChange, ...]
    task: str
    key: str
    """The column that rows were joined by."""
    num_only_a: int
    num_only_b: int
    changes: RowChanges
    written_to: str | None
    """The file with the compared rows; None if the user asked for none."""
    has_same_files: bool
    """Whether the input files of both jobs are known and have the same content. Their order may differ."""

    def lines(self) -> Iterator[str]:
        """How much has changed, then the two jobs, the other changes, and examples."""
        changes = self.changes
        share = changes.num_changed / max(1, changes.num_both)
        deciding = f", by {', '.join(changes.decides)}"
        yield f"outputs: {changes.num_changed:,} of {changes.num_both:,} changed ({share:.2%}){deciding}"
        yield f"A {self.a.line()}"
        yield f"B {self.b.line()}"
        for change in self.identity_changes:
            yield self._input_line() if change.name == "input" else change.line()
        has_alone = self.num_only_a or self.num_only_b
        alone = f"; {self.num_only_a:,} only in A, {self.num_only_b:,} only in B" if has_alone else ""
        yield f"rows: {changes.num_both:,} in both, by {self.key}{alone}"
        if changes.num_other_prompts:
            yield self._prompts_line()
        if changes.num_errors_only_a or changes.num_errors_only_b:
            yield f"errors: {changes.num_errors_only_b:,} rows only in B, {changes.num_errors_only_a:,} only in A"
        yield from (column.line() for column in changes.columns if column.num_changed)
        for row in changes.examples:
            yield from example_lines(self.key, row)
        if self.written_to is not None:
            yield f"{changes.num_both:,} rows in {self.written_to}"

    def _prompts_line(self) -> str:
        num_rows = self.changes.num_other_prompts
        images = self.changes.num_other_images
        what = f"token ids or images, {images:,} of them other images" if images else "token ids"
        return f"prompts: {num_rows:,} rows have other {what}: a changed template, tokenizer or input"

    def _input_line(self) -> str:
        """The inputs of two jobs that have other content. Their fingerprints would say nothing to a reader."""
        a = self.a
        b = self.b
        if a.input_path != b.input_path:
            return f"  input: {a.input_path} ({a.num_input_rows:,} rows) -> {b.input_path} ({b.num_input_rows:,} rows)"
        if self.has_same_files:
            return f"  input: the same files of {a.input_path}, with their rows in another order"
        read = f"A has read {a.num_input_rows:,} rows of it, B {b.num_input_rows:,}"
        return f"  input: {a.input_path} has changed from one job to the other; {read}"


def diff_jobs(a: str, b: str, *, on: str | None = None, to: str | None = None, num_examples: int = 0) -> DiffReport:
    """Compare two output folders.

    on: `row_index` or `id`; None: chosen by the inputs. to: a Parquet file that gets one row for each row that is in
    both jobs. Raises UserError if the jobs cannot be joined or compared, if no row is in both, or if the file cannot be
    written.
    """
    if to is not None:
        with _writing(to):
            refuse_foreign(pathlib.Path(to), _is_diff)  # also before the work
    first = Results(a)
    second = Results(b)
    task = _common_task(first, second)
    left_out = task.other_meanings(first.spec, second.spec)
    comparison = Changes(first, second, task.compared, num_examples=num_examples, left_out=left_out)
    key = join_key(first, second, on)
    with tempfile.TemporaryDirectory() as scratch:
        columns = comparison.columns
        rows = joined_rows(first, second, key=key, columns=columns, wide=comparison.wide, scratch=scratch)
        _write(map(comparison.take, rows), to)
    changes = comparison.summary()
    if not changes.num_both:
        raise _none_in_both(first, second, key)
    return DiffReport(
        a=_job(first),
        b=_job(second),
        identity_changes=_identity_changes(first, second),
        task=task.name,
        key=key,
        # A row of one job is joined with at most one row of the other.
        num_only_a=len(first) - changes.num_both,
        num_only_b=len(second) - changes.num_both,
        changes=changes,
        written_to=to,
        has_same_files=_has_same_files(first, second),
    )


def _none_in_both(a: Results, b: Results, key: str) -> UserError:
    """The error, with an example of each job: often the ids of one have a prefix."""
    have = (f"{job.folder} has {len(job):,} rows, such as {_example(job, key)}" for job in (a, b))
    remedy = _BY_POSITION if key == "id" else "compare jobs that have finished some of the same rows"
    return UserError(f"no {key} is in both jobs: {', and '.join(have)}; {remedy}")


def _example(job: Results, key: str) -> str:
    tables = (pa.Table.from_batches([batch]).drop_null().slice(0, 1) for batch in job.batches([key]))
    values = [row[key] for row in readable_rows(next(tables, pa.table({})))]
    return clip(repr(values[0])) if values else "null"


def _row_bytes(part: pathlib.Path, columns: Sequence[str]) -> float:
    with open_part(part) as file:
        return row_bytes_in(file.metadata, columns)


def _common_task(a: Results, b: Results) -> type[Task]:
    task = stored_task(a.spec)
    other = stored_task(b.spec)
    if task is not other:
        raise OutputError(
            f"{a.folder} has task {task.name}, but {b.folder} has task {other.name}: compare jobs of the same task"
        )
    return task


def _job(job: Results) -> ComparedJob:
    facts = job.facts()
    return ComparedJob(
        folder=job.folder,
        input_path=job.spec["input"]["path"],
        num_input_rows=job.num_input_rows,
        num_rows=len(job),
        is_done=job.is_done,
        model=facts.get("model"),
        vllm=facts.get("version.vllm"),
        torch=facts.get("version.torch"),
        device=facts.get("device"),
    )


def _identity_changes(a: Results, b: Results) -> tuple[IdentityChange, ...]:
    names = a.identity.keys() | b.identity.keys()
    if _is_same_input(a, b):
        # A job keeps the fingerprint of the input with which it began, also when it has taken in later rows.
        names -= {"input"}
    changes = (IdentityChange(name, a.identity.get(name), b.identity.get(name)) for name in sorted(names))
    return tuple(change for change in changes if change.a != change.b)


def _write(tables: Iterator[pa.Table], to: str | None) -> None:
    writer = None
    with contextlib.ExitStack() as stack:
        for table in tables:
            if to is not None:
                with _writing(to):
                    writer = writer or _writer(stack, to, table.schema)
                    writer.write_table(table)
        with _writing(to):
            stack.close()


def _writer(stack: contextlib.ExitStack, to: str, schema: pa.Schema) -> pq.ParquetWriter:
    file = stack.enter_context(writing_named(pathlib.Path(to), _is_diff))
    marked = schema.with_metadata({**(schema.metadata or {}), **_MARK})
    return stack.enter_context(pq.ParquetWriter(file, marked, compression="zstd"))


def _is_diff(path: pathlib.Path) -> bool:
    """Whether `diff` wrote this file. An input and a part of a job are Parquet, too."""
    with path.open("rb") as file:
        try:
            return _MARK.items() <= (pq.read_metadata(file).metadata or {}).items()
        except (pa.ArrowException, OSError):  # no Parquet
            return False


@contextlib.contextmanager
def _writing(to: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"--out: {to} cannot be written: {reason(error)}; name another file") from error
