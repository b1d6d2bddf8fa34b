"""Chooses the rows that a job runs: applies `input.where`, `sample`, `exclude` and `limit` once, in this order."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError, RowFailed, SpecError
from batchinf.base.parquet import open_part
from batchinf.base.slices import job_folders, read_cut, source_folder
from batchinf.base.storage import Folder
from batchinf.job.disk_space import check_size
from batchinf.job.drift import check_cut, join_cut
from batchinf.job.input_job import image_folder
from batchinf.job.job import Job, max_model_len
from batchinf.job.scratch import ScratchDatabase, scratch_database
from batchinf.manifest.lock import not_begun_message
from batchinf.manifest.names import readable_file
from batchinf.manifest.state import State, read_state
from batchinf.prompts.media import ImageLoader
from batchinf.records import BoolArray, Int64Array, Prompt
from batchinf.schedule.positions import (
    RUN_FOLDER,
    Positions,
    RunOrder,
    positions_name,
    read_positions,
    write_positions,
)
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.schedule.shards import Extent, uncut
from batchinf.source.cache import locked
from batchinf.source.row_hash import is_in_share, row_hashes, texts
from batchinf.source.rows import Source
from batchinf.source.types import is_as_written, is_json_column, is_text
from batchinf.tasks.columns import IMAGE_DIGESTS, UNRENDERED_HASH, prompt_hash

# Rows read at once: few at first, then as many as take _BYTES_AT_ONCE.
_FIRST_ROWS = 1
_MOST_ROWS = 16384
_BYTES_AT_ONCE = 16 << 20

Say = Callable[[str], None]
CheckLock = Callable[[], None]
# Positions of rows, with a table of these rows.
Batches = Iterable[tuple[Int64Array, pa.Table]]


def begin_choice(job: Job, say: Say, check_lock: CheckLock) -> RunOrder:
    """Choose the rows of a job or slice that has not begun, and store them. All slices share one choice.

    check_lock: see `write_positions`. Raises UserError, also if no row is left.
    """
    if job.slice is None:
        rows = range(job.source.num_rows)
        return choose(job, rows, job.folder, limit=job.spec.input.limit, say=say, check_lock=check_lock)
    return _of_slice(job, _of_all_slices(job, say, begins=True), check_lock)


def choose_again(job: Job, number: int, state: State, say: Say) -> RunOrder:
    """The rows of extent `number` (from 1), chosen and stored as when the job took them in."""
    if job.slice is not None:
        return _of_slice(job, _of_all_slices(job, say), lambda: None)
    extent = state.extents[number - 1]
    rows = range(extent.first_row, extent.stop_row)
    return choose(job, rows, job.folder, limit=None, number=number, may_be_none=True, state=state)


def choose(
    job: Job,
    rows: range,
    folder: Folder,
    *,
    limit: int | None,
    number: int = 1,
    say: Say = lambda line: None,
    check_lock: CheckLock = lambda: None,
    may_be_none: bool = False,
    state: State | None = None,
) -> RunOrder:
    """Choose at most `limit` of these rows, and store them in `folder` as those of extent `number`, not cut yet.

    may_be_none: it is no error if no row is left. state: that of a job that has begun. Raises UserError, also if no row
    is left and `may_be_none` is false.
    """
    where = job.spec.input
    if where.where is None and where.sample is None and where.exclude is None:
        num_rows = len(rows) if limit is None else min(len(rows), limit)
        return RunOrder(folder, [uncut(range(rows.start, rows.start + num_rows))], number)

    def first_left() -> Iterator[Int64Array]:
        num_left = 0
        with contextlib.closing(_left(job, rows, folder, state, has_limit=limit is not None)) as left:
            for some in left:
                yield some if limit is None else some[: limit - num_left]
                num_left += len(some)
                if limit is not None and num_left >= limit:
                    break
        if not num_left and not may_be_none:
            what = f"{chosen_by(job)} leaves none of the {len(rows):,} input rows; there is nothing to run"
            raise job.file.error("input", what)

    began = time.monotonic()
    say(f"choosing rows by {chosen_by(job)}")
    try:
        stored = write_positions(folder, number, first_left(), job.source.num_rows, check_lock=check_lock)
    except PredicateError as error:
        raise job.file.error("input.where", str(error)) from None
    extent = _extent(stored, rows, limit)
    if extent.positions is None:
        folder.delete(positions_name(number))
    took_s = time.monotonic() - began
    say(f"{extent.num_rows:,} of {len(rows):,} input rows are chosen; that took {took_s:.1f} s")
    return RunOrder(folder, [extent], number)


def _extent(stored: Positions, rows: range, limit: int | None) -> Extent:
    """The rows of a file, chosen among `rows`. If there are no others before its last row, it needs no file."""
    stop_row = rows.stop
    if len(stored) == limit:
        stop_row = int(stored.rows(limit - 1, limit)[0]) + 1
    is_all = len(stored) == stop_row - rows.start
    all_rows = uncut(range(rows.start, stop_row))
    return all_rows if is_all else dataclasses.replace(all_rows, num_rows=len(stored), positions=stored.digest)


def chosen_by(job: Job) -> str:
    """The fields that choose the rows, as text for users."""
    chosen = job.spec.input
    fields = {
        "where": None if chosen.where is None else repr(chosen.where),
        "sample": chosen.sample,
        "exclude": None if chosen.exclude is None else f"{', '.join(chosen.exclude.job)} on {chosen.exclude.on}",
        "limit": None if chosen.limit is None else f"{chosen.limit:,}",
    }
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


# -- one pass over the rows, as a chain of generators ------------------------------------------------------------------


def _columns_read(predicate: Predicate | None, exclusion: "Exclusion | None") -> list[str]:
    """The columns that decide. Without any, a table needs another one: it would not tell its number of rows."""
    columns = [name for name in predicate.columns if name != predicate.key] if predicate else []
    columns += exclusion.columns if exclusion else []
    return list(dict.fromkeys(columns))


def _left(
    job: Job, rows: range, folder: Folder, state: State | None, *, has_limit: bool
) -> Generator[Int64Array, None, None]:
    """Positions of the rows that `where`, `sample` and `exclude` leave, ascending, some at a time."""
    where = job.spec.input
    schema = job.source.schema
    predicate = None if where.where is None else Predicate(where.where, schema, "input")
    exclusion = None if where.exclude is None else Exclusion(job, state)
    columns = schema.names if where.sample is not None else _columns_read(predicate, exclusion) or schema.names[:1]
    batches = _read(job.source, rows, columns)
    if predicate:
        batches = _matching(batches, predicate, job.source)
    if where.sample is not None:
        batches = _sampled(batches, where.sample, job.source)
    if exclusion:
        return exclusion.left(batches, folder, has_limit=has_limit)
    return (rows for rows, _ in batches)


def _read(source: Source, rows: range, columns: Sequence[str]) -> Batches:
    start = rows.start
    num_rows = _FIRST_ROWS
    while start < rows.stop:
        stop = min(start + num_rows, rows.stop)
        table = source.read_columns(start, stop, columns)
        yield np.arange(start, stop, dtype=np.int64), table
        likely = int(_BYTES_AT_ONCE * (stop - start) / max(1, table.nbytes))
        start = stop
        num_rows = max(1, min(likely, 4 * num_rows, _MOST_ROWS))


def _matching(batches: Batches, where: Predicate, source: Source) -> Batches:
    """The rows for which the expression is true, and those that cannot be read."""
    for rows, table in batches:
        matching = where.matches(table.append_column(where.key, pa.array(rows)).select(where.columns))
        is_left = np.zeros(len(rows), np.bool_)
        is_left[matching - rows[0]] = True
        is_left |= _is_broken(rows, table, ~is_left, source)
        yield rows[is_left], table.filter(pa.array(is_left))


def _sampled(batches: Batches, share: float, source: Source) -> Batches:
    """A share of the rows, by their content. Rows that cannot be read are chosen by their positions."""
    for rows, table in batches:
        is_broken = _is_broken(rows, table, np.ones(len(rows), np.bool_), source)
        hashes = content_hashes(rows, table, source)
        hashes[is_broken] = row_hashes(pa.table({"": rows[is_broken]}))
        is_left = is_in_share(hashes, share)
        yield rows[is_left], table.filter(pa.array(is_left))


def content_hashes(rows: Int64Array, table: pa.Table, source: Source) -> npt.NDArray[np.uint64]:
    """The hashes of these rows. table: all of their columns."""
    mixed = [field.name for field in table.schema if is_json_column(field)]
    values = [row.values for row in source.read_rows(rows, mixed)] if mixed else []
    return row_hashes(table, {name: [row.get(name) for row in values] for name in mixed})


def _is_broken(rows: Int64Array, table: pa.Table, may_be: BoolArray, source: Source) -> BoolArray:
    """Which rows cannot be read. All their values are null, so only rows of nulls are read again to find them."""
    is_broken = may_be.copy()
    for column in table.columns:
        is_broken &= column.is_null().to_numpy()
    if is_broken.any():
        is_broken[is_broken] = [row.error is not None for row in source.read_rows(rows[is_broken], [])]
    return is_broken


# -- exclude -----------------------------------------------------------------------------------------------------------

_MEMORY = "64MB"
# Bytes of keys that are stored or looked up at once: few at first if there is a limit, as a few rows are then probably
# enough. One join of all rows is quicker, but with 100 million rows DuckDB runs out of a memory limit of 512 MB.
_FIRST_BYTES = 1 << 16
_MOST_BYTES = 8 << 20
_PART_ROWS_AT_ONCE = 1 << 16
_ROWS_TO_TOKENIZE = 256
_NUM_IMAGE_READERS = 16


class Exclusion:
    """Finds the rows that no job of `input.exclude` has done without an error. columns: what it reads of the input."""

    def __init__(self, job: Job, state: State | None) -> None:
        """state: of a job that has begun. Raises SpecError."""
        self._job = job
        where = job.spec.input
        assert where.exclude is not None
        own_folder = pathlib.Path(job.spec.output.folder).resolve()
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
            self._key = job.source.id_field(name)
            self.columns = [name]
            return
        self._key = pa.field("prompt_hash", pa.int64())
        # Chat templates that print the date get the date when the job began, even if rows are chosen later.
        self._builder = job.prompt_builder(state)
        images = where.images
        self._loader = None if images is None else ImageLoader(images, base_folder=image_folder(where))
        self._most_images = 0 if images is None else images.max_per_row

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
        if is_as_written(self._key):
            table = self._job.source.fields_of(rows, [self._key])
        if self._on == "id":
            return key_column(table.column(self._key.name), self._key)
        hashes: list[int | None] = []
        for first in range(0, len(rows), _ROWS_TO_TOKENIZE):
            read = self._job.source.read_rows(rows[first : first + _ROWS_TO_TOKENIZE], self._builder.columns)
            prompts = self._builder.build(read, max_model_len(self._job))
            if self._loader is None:
                hashes += map(self._hash, prompts)
                continue
            with ThreadPoolExecutor(_NUM_IMAGE_READERS) as threads:
                hashes += threads.map(self._hash, prompts)
        return pa.chunked_array([hashes], pa.int64())

    def _hash(self, prompt: Prompt) -> int | None:
        """Of a prompt as it is before its images are rendered. None if it cannot run: the row is to run again."""
        if len(prompt.image_sources) > self._most_images:
            return None
        try:
            digests = [self._loader.digest(source) for source in prompt.image_sources] if self._loader else []
        except RowFailed:
            return None
        return prompt_hash(np.array(prompt.token_ids, np.int32), digests)

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
            for folder in job_folders(out):
                state = read_state(folder)
                has_begun |= state is not None
                for _, part in sorted(() if state is None else state.parts.items()):
                    yield from self._keys_of_part(out, folder, readable_file(folder, part))
            if not has_begun:
                raise self._wrong(not_begun_message(out))

    def _keys_of_part(self, out: str, folder: Folder, name: str) -> Iterator[pa.Table]:
        with open_part(folder.path(name), page_checksum_verification=True) as file:
            self._check_type(out, file.schema_arrow)
            key = self._key_of(out, file.schema_arrow.names)
            for batch in file.iter_batches(_PART_ROWS_AT_ONCE, columns=[key, "error_type"]):
                table = pa.Table.from_batches([batch])
                good = table.filter(pc.is_null(table.column("error_type")))
                yield pa.table({"key": key_column(good.column(key), good.schema.field(key))})

    def _key_of(self, out: str, names: Sequence[str]) -> str:
        """The column of a part that has the keys."""
        if self._on == "id" or self._loader is None or IMAGE_DIGESTS not in names:
            return self._on
        if UNRENDERED_HASH not in names:
            raise self._wrong(
                f"got prompt_hash, but the rows in {out} have no {UNRENDERED_HASH}, because that job began with an "
                "older version of batchinf; give both jobs an id_column and use id"
            )
        return UNRENDERED_HASH

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


# -- slices ------------------------------------------------------------------------------------------------------------


def check_slice(job: Job, extent: Extent, say: Say) -> None:
    """Raise OutputError if other rows are chosen over all slices than when the slice with this extent began."""
    assert job.slice is not None
    whole = _of_all_slices(job, say)
    places = job.slice.rows(len(whole))
    if (extent.start, extent.num_rows) != (places.start, len(places)):
        raise OutputError(
            f"{job.spec.output.path}: spec and input now choose other rows than when slice {job.slice} began, "
            f"{len(whole):,} over all slices; restore cut.json, or give the job another output.path"
        )


def _of_all_slices(job: Job, say: Say, *, begins: bool = False) -> RunOrder:
    """The rows that all slices share; the first slice to start chooses them. begins: this slice has not begun."""
    rows = range(job.source.num_rows)
    limit = job.spec.input.limit

    def join(num_rows: int, positions: str | None) -> None:
        # What the output folder holds is decided here: a slice that would be refused must not decide it.
        assert job.slice is not None
        check_size(job, len(job.slice.rows(num_rows)) if begins else None)
        # A resume must notice other bytes than those that chose these rows.
        job.source.keep_digests()
        join_cut(job, num_rows, positions)

    shared = _shared(job)
    if not job.spec.input.selects:
        join(len(rows), None)
        return RunOrder(shared, [uncut(rows)])
    shared.make(RUN_FOLDER)
    with locked(Folder(shared.path(RUN_FOLDER))):
        check_cut(job)
        cut = read_cut(job.spec.output.folder)
        if cut is not None and cut.positions is None:
            return RunOrder(shared, [uncut(range(cut.num_rows))])
        if cut is not None and (known := read_positions(shared, 1, cut.positions)) is not None:
            return RunOrder(shared, [_extent(known, rows, limit)])
        order = choose(job, rows, shared, limit=limit, say=say)
        join(len(order), order.extents[0].positions)
        return order


def _shared(job: Job) -> Folder:
    """Where slices keep the rows of all of them: not in the output folder itself, where a whole job may begin."""
    return Folder(source_folder(job.folder))


def _of_slice(job: Job, whole: RunOrder, check_lock: CheckLock) -> RunOrder:
    """Store the slice's part of `whole`: the rows chosen from its first position to the next slice's first one."""
    assert job.slice is not None
    [extent] = whole.extents
    places = job.slice.rows(len(whole))
    part = uncut(places, places.start)
    if extent.positions is None or not places:
        return RunOrder(job.folder, [part])
    first_row, stop_row = (
        edge if place in (0, len(whole)) else whole[place]
        for edge, place in ((extent.first_row, places.start), (extent.stop_row, places.stop))
    )
    part = dataclasses.replace(part, first_row=first_row, stop_row=stop_row)
    if len(places) != stop_row - first_row:
        rows = whole.pieces(_MOST_ROWS, places.start, places.stop)
        stored = write_positions(job.folder, 1, rows, job.source.num_rows, check_lock=check_lock)
        part = dataclasses.replace(part, positions=stored.digest)
    return RunOrder(job.folder, [part])
