"""`batchinf diff A B`: what changed between two jobs over the same rows, as two models, or versions of one, give it.

How rows are joined is `joined`'s, and what of them is compared that of the `…_changes` of their task.
"""

import contextlib
import tempfile
from collections.abc import Iterator

import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.commands.diff.join import Joined, key_of
from batchinf.results import Results
from batchinf.tasks.changes import Changes, clip_value
from batchinf.tasks.generate.changes import TextChanges
from batchinf.tasks.score.changes import ChoiceChanges, ScoreChanges
from batchinf.tasks.vectors.changes import VectorChanges


def diff_lines(a: str, b: str, on: str | None, to: str | None, num_examples: int) -> Iterator[str]:
    """What changed, for people. to: a Parquet file that gets a row for each row of both.

    Raises UserError where the two cannot be joined or compared, or where `to` cannot be written.
    """
    first, second = Results(a), Results(b)
    changes = _changes(first, second, num_examples)
    key = key_of(first, second, on)
    yield from _job_lines(first, second)
    with tempfile.TemporaryDirectory() as scratch:
        joined = Joined(first, second, key, changes.columns, changes.wide, scratch)
        _write(joined, changes, to)
        only_a, only_b = joined.num_alone()
    yield from changes.lines(key, only_a, only_b)
    if to is not None:
        yield f"{changes.num_both:,} rows in {to}" if changes.num_both else f"no row is in both: {to} is not written"


def _changes(a: Results, b: Results, num_examples: int) -> Changes:
    """What two jobs of one task are compared by."""
    task, other = (job.spec.get("task", "generate") for job in (a, b))
    if task != other:
        raise OutputError(f"{a.folder} is of task {task}, and {b.folder} of task {other}: compare two of one task")
    schemas = a.schema, b.schema
    if task == "generate":
        return TextChanges(schemas, num_examples)
    if task != "score":
        return VectorChanges(a, b, num_examples)
    kinds = ["several choices" if "choice_logprob_sums" in schema.names else "one text" for schema in schemas]
    if kinds[0] != kinds[1]:
        raise OutputError(
            f"{a.folder} scores {kinds[0]} of a row, and {b.folder} {kinds[1]}: compare two that score the same"
        )
    return (ScoreChanges if kinds[0] == "one text" else ChoiceChanges)(schemas, num_examples)


def _job_lines(a: Results, b: Results) -> Iterator[str]:
    for name, job in (("A", a), ("B", b)):
        stands = "" if job.is_done else ", not done"
        yield f"{name} {job.folder}: {len(job):,} rows{stands}, {', '.join(f'{k} {v}' for k, v in _about(job).items())}"
    names = sorted(a.identity.keys() | b.identity.keys())
    changed = [name for name in names if a.identity.get(name) != b.identity.get(name)]
    for name in changed:
        yield f"  {name}: {clip_value(repr(a.identity.get(name)))} -> {clip_value(repr(b.identity.get(name)))}"


def _about(job: Results) -> dict[str, str]:
    stored = pq.read_metadata(job.parts[0]).metadata or {}
    said = {key.decode().removeprefix("batchinf."): value.decode() for key, value in stored.items()}
    names = {"model": "model", "version.vllm": "vllm", "version.torch": "torch", "device": "device"}
    return {name: said[key] for key, name in names.items() if key in said}


def _write(joined: Joined, changes: Changes, to: str | None) -> None:
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
