"""`batchinf diff A B`: what changed between two jobs over the same rows. `text.diff` has the words.

`row_join` joins the rows; the task says what of them is compared.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.commands.row_join import JoinedRows, join_key
from batchinf.results import Results
from batchinf.tasks.base import Task
from batchinf.tasks.changes import Changes, RowChanges
from batchinf.tasks.registry import stored_task


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
