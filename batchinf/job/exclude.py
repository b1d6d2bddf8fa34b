"""`input.exclude`: leaves out the rows that earlier jobs have done. `choose` uses it."""

import pathlib
from collections.abc import Generator, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import SpecError
from batchinf.base.parquet import open_part
from batchinf.base.slices import job_folders
from batchinf.base.storage import Folder
from batchinf.job.job import Job, begun_at, max_model_len
from batchinf.job.scratch import ScratchDatabase, scratch_database
from batchinf.manifest.lock import not_begun_message
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State, read_state
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Int64Array
from batchinf.source.row_hash import texts
from batchinf.source.types import is_text
from batchinf.tasks.columns import prompt_hash

_MEMORY = "64MB"
# Bytes of keys that are stored or looked up at once: few at first if there is a limit, as a few rows are then probably
# enough. One join of all rows is quicker, but with 100 million rows DuckDB runs out of a memory limit of 512 MB.
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 8 << 20
_PART_ROWS_AT_ONCE = 1 << 16
_ROWS_TO_TOKENIZE = 256

Batches = Iterable[tuple[Int64Array, pa.Table]]


class Exclusion:
    """Finds the rows that have no output row without an error in the jobs of `input.exclude`.

    columns: the columns of the input that it reads.
    """

    def __init__(self, job: Job, state: State | None) -> None:
        """state: of a job that has begun. Raises SpecError."""
        self._job = job
        where = job.spec.input
        assert where.exclude is not None
        own_folder = pathlib.Path(job.spec.output.path).resolve()
        # A job that begins in place of an old one would find that one moved aside.
        if state is None and any(pathlib.Path(out).resolve() == own_folder for out in where.exclude.job):
            raise self._wrong(
                f"{job.spec.output.path} is this job's own output folder; give the new job another output.path, or use "
                "--extend to run the rows that have come to the input of the old one"
            )
        self._jobs = where.exclude.job
        self._on = where.exclude.on
        self.columns: list[str] = []
        if self._on == "id":
            name = where.id_column or "custom_id"  # OpenAI's; a spec need not name it
            if name not in job.source.schema.names:
                raise job.file.error("input.exclude.on", f"got id, but the input has no column {name!r}")
            self._key = job.source.schema.field(name)
            self.columns = [name]
            return
        self._key = pa.field("prompt_hash", pa.int64())
        tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
        # Chat templates that print the date get the date when the job began, even if rows are chosen later.
        begun = begun_at(job, None if state is None else state.header)
        self._builder = job.task.prompt_builder(tokenizer, job.model.vocab_size, begun)

    def left(self, batches: Batches, folder: Folder, *, has_limit: bool) -> Generator[Int64Array, None, None]:
        """Positions of the rows that are left. batches: positions, and a table with `columns` of these rows.

        folder: for temporary files. Raises SpecError, and OutputError if a job's output cannot be read.
        """
        with scratch_database(folder, _MEMORY) as scratch:
            self._read_done(scratch)
            keyed = (pa.table({"row": _array(rows), "key": self._keys(rows, table)}) for rows, table in batches)
            for candidates in _joined(keyed, _FIRST_BYTES if has_limit else _MOST_BYTES):
                yield _not_done(scratch, candidates)

    def _keys(self, rows: Int64Array, table: pa.Table) -> pa.ChunkedArray:
        if self._on == "id":
            return key_column(table.column(self._key.name), self._key)
        hashes: list[int | None] = []
        for first in range(0, len(rows), _ROWS_TO_TOKENIZE):
            read = self._job.source.read_rows(rows[first : first + _ROWS_TO_TOKENIZE], self._builder.columns)
            prompts = self._builder.build(read, max_model_len(self._job))
            hashes += [prompt_hash(np.array(prompt.token_ids, np.int32)) for prompt in prompts]
        return pa.chunked_array([hashes], pa.int64())

    def _read_done(self, scratch: ScratchDatabase) -> None:
        """Make the table `done` with the keys of the rows that the jobs have done."""
        empty = key_column(pa.chunked_array([], self._key.type), self._key)
        scratch.run("CREATE TABLE done AS SELECT key FROM own", own=pa.table({"key": empty}))
        type = scratch.column("SELECT column_type FROM (DESCRIBE done)")[0]
        for keys in _joined(self._keys_of_jobs(), _MOST_BYTES):
            # An integer that the own type cannot hold is equal to none of its values: the cast makes it null.
            scratch.run(f"INSERT INTO done SELECT TRY_CAST(key AS {type}) FROM theirs", theirs=keys)

    def _wrong(self, what: str) -> SpecError:
        return self._job.file.error("input.exclude", what)

    def _keys_of_jobs(self) -> Iterator[pa.Table]:
        for out in self._jobs:
            has_begun = False
            for job in job_folders(out):
                state = read_state(job.folder) if job.folder.exists("manifest") else None
                has_begun |= state is not None
                for shard in sorted(() if state is None else state.parts):
                    yield from self._keys_of_part(out, job.folder, f"parts/{part_name(shard)}")
            if not has_begun:
                raise self._wrong(not_begun_message(out))

    def _keys_of_part(self, out: str, folder: Folder, name: str) -> Iterator[pa.Table]:
        with open_part(folder.path(name), page_checksum_verification=True) as file:
            self._check_type(out, file.schema_arrow)
            for batch in file.iter_batches(_PART_ROWS_AT_ONCE, columns=[self._on, "error_type"]):
                table = pa.Table.from_batches([batch])
                good = table.filter(pc.is_null(table.column("error_type")))
                yield pa.table({"key": key_column(good.column(self._on), good.schema.field(self._on))})

    def _check_type(self, out: str, schema: pa.Schema) -> None:
        if self._on not in schema.names:
            raise self._wrong(f"got id, but the rows in {out} have none: that job has no id_column; use prompt_hash")
        type = self._key.type
        other = schema.field(self._on).type
        if _family(type) != _family(other):
            raise self._wrong(
                f"got {self._on}, but {self._key.name} is {type} here and {other} in {out}, so no id could be equal; "
                "give both the same type, or use prompt_hash"
            )


def key_column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Values by which rows are compared: integers and texts as they are, others as the text that `sample` hashes."""
    if _family(field.type) in ("integer", "text"):
        return column
    return pa.chunked_array([pa.array(texts(column, field), pa.large_binary())])


def _array(values: Int64Array) -> pa.Array:
    # `pa.array` and `to_numpy` import pandas, which takes as long as comparing a million ids.
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _family(type: pa.DataType) -> str:
    if pa.types.is_integer(type):
        return "integer"
    return "text" if is_text(type) else str(type)


def _joined(tables: Iterable[pa.Table], first_bytes: int) -> Iterator[pa.Table]:
    """The rows of these tables in fewer tables: the first of `first_bytes`, each later one of twice the bytes."""
    held: list[pa.Table] = []
    most_bytes = first_bytes
    for table in tables:
        held.append(table)
        if sum(some.nbytes for some in held) >= most_bytes:
            yield pa.concat_tables(held)
            held = []
            most_bytes = min(2 * most_bytes, _MOST_BYTES)
    if held:
        yield pa.concat_tables(held)


def _not_done(scratch: ScratchDatabase, candidates: pa.Table) -> Int64Array:
    # A semi join finds the rows that are done. It takes half the time of an anti join, because DuckDB then skips
    # keys that no candidate can equal.
    candidates = candidates.append_column("place", _array(np.arange(candidates.num_rows)))
    done = scratch.column("SELECT place FROM candidates SEMI JOIN done USING (key)", candidates=candidates)
    is_left = np.ones(candidates.num_rows, np.bool_)
    is_left[done] = False
    rows: Int64Array = np.asarray(np.from_dlpack(candidates.column("row").combine_chunks()), np.int64)[is_left]
    return rows
