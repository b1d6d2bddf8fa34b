"""Chooses the rows that a job runs: applies `input.where`, `sample`, `exclude` and `limit` once, in this order."""

import contextlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from batchinf.base.errors import OutputError, SpecError
from batchinf.base.slices import job_folders, no_job_message, read_cut
from batchinf.base.storage import Folder
from batchinf.base.text import one_line
from batchinf.job.open import Job, begun_at, check_cut, join_cut
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State, read_state
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import BoolArray, Int64Array, Uint64Array
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.schedule.selection import RUN_FOLDER, Choice, Selection, read_selection, selection_name, write_selection
from batchinf.source.cache import locked
from batchinf.source.row_hash import is_in_share, row_hashes, texts
from batchinf.source.types import is_json_column
from batchinf.spec.file import SpecFile
from batchinf.tasks.base import prompt_hash

# A key takes 16 bytes. Sorting takes the same amount again.
BLOCK_KEYS = 1 << 20
_ROWS_AT_ONCE = 1 << 16


class Keys(NamedTuple):
    """The keys of rows. high, low: uint64 [num_rows], the halves. is_valid: bool [num_rows], which rows have a key."""

    high: Uint64Array
    low: Uint64Array
    is_valid: BoolArray


def keys_of(column: pa.ChunkedArray, field: pa.Field) -> Keys:
    """The keys of a column. An integer of any width is its own key. Other values have the xxh3-128 of their text."""
    if pa.types.is_integer(field.type):
        is_valid = pc.is_valid(column).to_numpy()
        high = pc.fill_null(column, 0).to_numpy().astype(np.uint64)  # a negative integer wraps around
        return Keys(high, np.zeros(len(high), np.uint64), is_valid)
    values = texts(column, field)
    data = b"".join(bytes(16) if text is None else xxhash.xxh3_128_digest(text) for text in values)
    both = np.frombuffer(data, "<u8").reshape(-1, 2)
    return Keys(both[:, 0].copy(), both[:, 1].copy(), np.array([text is not None for text in values], np.bool_))


class Excluded:
    """The keys of rows that now have an output row without an error in some jobs."""

    def __init__(self, scratch: pathlib.Path | None) -> None:
        """scratch: the folder for a file of 16 bytes a row. The file has no name and ends with the process."""
        self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        self._sizes: list[int] = []

    @classmethod
    def by(cls, jobs: Sequence[str], column: str, own: pa.Field, scratch: pathlib.Path | None) -> "Excluded":
        """The keys by `id` or `prompt_hash` in the output of these jobs. own: the field they are compared with.

        Raises SpecError, without the field's name, and OutputError if a job's output cannot be read.
        """
        if is_json_column(own):
            raise SpecError(
                f"got id, but {own.name} holds values of several types, and nothing tells theirs; say prompt_hash"
            )
        found = cls(scratch)
        try:
            found._take(_keys_of_jobs(jobs, column, own))
        except BaseException:
            found.close()
            raise
        return found

    def _take(self, pieces: Iterable[Keys]) -> None:
        held: list[Keys] = []
        for keys in pieces:
            held.append(keys)
            if sum(len(some.high) for some in held) >= BLOCK_KEYS:
                self._add(held)
                held = []
        self._add(held)

    def _add(self, held: Sequence[Keys]) -> None:
        high = np.concatenate([keys.high[keys.is_valid] for keys in held] or [np.zeros(0, np.uint64)])
        low = np.concatenate([keys.low[keys.is_valid] for keys in held] or [np.zeros(0, np.uint64)])
        if len(high):
            order = np.argsort(high)
            self._file.write(high[order].data)
            self._file.write(low[order].data)
            self._sizes.append(len(high))

    def among(self, keys: Keys) -> BoolArray:
        """Which of these keys are excluded, bool [num_rows]. A row without a key is not excluded."""
        self._file.flush()
        order = np.argsort(keys.high)
        high, low = keys.high[order], keys.low[order]
        hits = np.zeros(len(order), np.bool_)
        offset = 0
        for size in self._sizes:
            data = np.frombuffer(os.pread(self._file.fileno(), 16 * size, offset), np.uint64)
            offset += 16 * size
            places = np.minimum(np.searchsorted(data[:size], high), size - 1)
            hits |= (data[:size][places] == high) & (data[size:][places] == low)
        found = np.zeros(len(order), np.bool_)
        found[order] = hits
        return found & keys.is_valid

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()


def _keys_of_jobs(jobs: Iterable[str], column: str, own: pa.Field) -> Iterator[Keys]:
    for out in jobs:
        folders = [found.folder for found in job_folders(out)]
        begun = [folder for folder in folders if folder.exists("manifest") and read_state(folder) is not None]
        if not begun:
            raise SpecError(no_job_message(out))
        for folder in begun:
            yield from _keys_of_parts(out, folder, column, own)


def _keys_of_parts(out: str, folder: Folder, column: str, own: pa.Field) -> Iterator[Keys]:
    state = read_state(folder)
    assert state is not None
    for shard in sorted(state.parts):
        path = folder.path(f"parts/{part_name(shard)}")
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                _check_type(out, file.schema_arrow, column, own)
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column, "error_type"]):
                    table = pa.Table.from_batches([batch])
                    good = table.filter(pc.is_null(table.column("error_type")))
                    yield keys_of(good.column(column), good.schema.field(column))
        except (pa.ArrowException, OSError) as error:
            reason = one_line(error, 300)
            raise OutputError(f"{path} cannot be read: {reason}; batchinf check {out} says what is wrong") from error


def _check_type(out: str, schema: pa.Schema, column: str, own: pa.Field) -> None:
    if column not in schema.names:
        raise SpecError(f"got id, but the rows in {out} have none: that job has no id_column; say prompt_hash")
    theirs = schema.field(column).type
    if _family(theirs) != _family(own.type):
        raise SpecError(
            f"got {column}, but {own.name} is {own.type} here and {theirs} in {out}, so that none would be the same; "
            "give both one type, or say prompt_hash"
        )


def _family(type: pa.DataType) -> str:
    if pa.types.is_integer(type):
        return "integer"
    return "text" if pa.types.is_string(type) or pa.types.is_large_string(type) else str(type)


# Rows read at once: few at first, then as many as take _BYTES_AT_ONCE.
_FIRST_ROWS, _MOST_ROWS, _BYTES_AT_ONCE = 64, 16384, 16 << 20
_ROWS_TO_TOKENIZE = 256

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen rows among `first_row` to `stop_row` (exclusive). selection: None if all of them are chosen."""

    num_rows: int
    first_row: int
    stop_row: int
    selection: Selection | None

    def write(self, folder: Folder, number: int, start: int) -> Choice:
        """Store the bitmap durably for extent `number` (from 1), whose first row is at the place `start`."""
        digest = None if self.selection is None else write_selection(folder, number, self.selection, RUN_FOLDER)
        return Choice(start, self.num_rows, self.first_row, self.stop_row, digest)


def begin_selection(job: Job, file: SpecFile, say: Say, check_lock: Callable[[], None]) -> Choice:
    """Choose the rows of a job or slice that has not begun, and write their bitmap. All slices share one choice.

    check_lock: raises if another process runs the job by now. The bitmap of that process must not change.

    Raises UserError, also if no row is left.
    """
    if job.slice is None:
        chosen = choose(job, file, 0, job.spec.input.limit, say, job.folder.root)
        check_lock()
        return chosen.write(job.folder, 1, 0)
    whole = _of_all_slices(job, file, say)
    places = job.slice.rows(whole.num_rows)
    check_lock()
    return _cut(whole, places).write(job.folder, 1, places.start)


def choose(
    job: Job,
    file: SpecFile,
    first_row: int,
    limit: int | None,
    say: Say = lambda line: None,
    scratch: pathlib.Path | None = None,
    *,
    may_be_none: bool = False,
    state: State | None = None,
) -> Chosen:
    """The chosen rows from `first_row` on, at most `limit` of them.

    scratch: a folder for temporary files; None: the system's. may_be_none: it is no error if no row is left.
    state: that of a job that has begun. Raises UserError, also if no row is left and `may_be_none` is false.
    """
    given, num_rows = job.spec.input, job.source.num_rows - first_row
    if given.where is None and given.sample is None and given.exclude is None:
        num_chosen = num_rows if limit is None else min(num_rows, limit)
        return Chosen(num_chosen, first_row, first_row + num_chosen, None)
    began = time.monotonic()
    say(f"choosing rows by {described(job)}")
    with _Scan(job, file, scratch, state) as scan:
        chosen = scan.run(first_row, job.source.num_rows, limit)
    if not chosen.num_rows and not may_be_none:
        raise file.error(
            "input", f"{described(job)} leaves none of the {num_rows:,} input rows; there is nothing to run"
        )
    say(f"{chosen.num_rows:,} of {num_rows:,} input rows are chosen; that took {time.monotonic() - began:.1f} s")
    return chosen


def restore_selection(job: Job, file: SpecFile, state: State, say: Say) -> None:
    """Choose again the rows of each missing or altered bitmap. Raises OutputError if other rows are chosen now."""
    if job.slice is not None:
        own, whole = state.extents[0], _of_all_slices(job, file, say)
        places = job.slice.rows(whole.num_rows)
        if (own.start, own.num_rows) != (places.start, len(places)):
            raise OutputError(
                f"{job.spec.output.path}: other rows are chosen now than when slice {job.slice} began, "
                f"{whole.num_rows:,} over all slices; put slices.json back, or give the job another output.path"
            )
    for number, extent in enumerate(state.extents, 1):
        if extent.selection is None or read_selection(job.folder, number, extent.selection, RUN_FOLDER) is not None:
            continue
        name = job.folder.path(selection_name(number, RUN_FOLDER))
        say(f"warning: {name} is gone or altered; choosing its rows again")
        with _Scan(job, file, job.folder.root, state) as scan:
            chosen = scan.run(extent.first_row, extent.stop_row, None)
        if chosen.selection is None or chosen.selection.encode(number)[1] != extent.selection:
            raise OutputError(
                f"{name} is gone, and other rows are chosen now: {chosen.num_rows:,} where {extent.num_rows:,} were; "
                "put the file back, or give the job another output.path"
            )
        chosen.write(job.folder, number, extent.start)


def described(job: Job) -> str:
    """The fields that choose the rows, as text for users."""
    chosen = job.spec.input
    said = {
        "where": None if chosen.where is None else repr(chosen.where),
        "sample": chosen.sample,
        "exclude": None if chosen.exclude is None else f"{', '.join(chosen.exclude.job)} on {chosen.exclude.on}",
        "limit": None if chosen.limit is None else f"{chosen.limit:,}",
    }
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)


class _Scan:
    """One pass over some rows. Use it in a `with` statement, because it may hold a temporary file."""

    def __init__(self, job: Job, file: SpecFile, scratch: pathlib.Path | None, state: State | None) -> None:
        given = job.spec.input
        self._file = file
        self._source = job.source
        self._share = given.sample
        self._where: Predicate | None = None
        self._excluded: Excluded | None = None
        self._builder: PromptBuilder | None = None
        self._max_model_len = max_model_len(job)
        schema, columns = job.source.schema, list[str]()
        if given.where is not None:
            with self._naming("input.where"):
                self._where = Predicate(given.where, schema, "input")
            columns += [name for name in self._where.columns if name != self._where.key]
        if given.exclude is not None:
            self._id_column, own = given.id_column, pa.field("prompt_hash", pa.int64())
            if given.exclude.on == "id":
                self._id_column = given.id_column or "custom_id"  # OpenAI's; a spec need not name it
                if self._id_column not in schema.names:
                    raise file.error("input.exclude.on", f"got id, but the input has no column {self._id_column!r}")
                own = schema.field(self._id_column)
                columns.append(self._id_column)
            else:
                tokenizer = load_tokenizer(job.model.tokenizer, job.spec.model.trust_remote_code)
                # Chat templates that print the date get the date when the job began, even if rows are chosen later.
                begun = begun_at(job, None if state is None else state.header)
                self._builder = job.task.prompt_builder(tokenizer, job.model.vocab_size, begun)
            with self._naming("input.exclude"):
                self._excluded = Excluded.by(given.exclude.job, given.exclude.on, own, scratch)
        self._columns = schema.names if self._share is not None else list(dict.fromkeys(columns))

    def __enter__(self) -> "_Scan":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._excluded is not None:
            self._excluded.close()

    @contextlib.contextmanager
    def _naming(self, field: str) -> Iterator[None]:
        try:
            yield
        except (PredicateError, SpecError) as error:
            raise self._file.error(field, str(error)) from None

    def run(self, first_row: int, stop_row: int, limit: int | None) -> Chosen:
        """The chosen rows among `first_row` to `stop_row` (exclusive), at most `limit`."""
        selection, num_chosen = Selection(first_row, stop_row - first_row), 0
        for rows in self._left(first_row, stop_row, limit):
            rows = rows if limit is None else rows[: limit - num_chosen]
            selection.add(rows)
            num_chosen += len(rows)
            if num_chosen == limit:
                stop_row = int(rows[-1]) + 1
                selection = selection.until(stop_row)
                break
        is_all = num_chosen == stop_row - first_row
        return Chosen(num_chosen, first_row, stop_row, None if is_all else selection)

    def _left(self, first_row: int, stop_row: int, limit: int | None) -> Iterator[Int64Array]:
        """Positions of the rows that `where`, `sample` and `exclude` leave, some at a time."""
        if self._excluded is None:
            yield from (rows for rows, _ in self._judged(first_row, stop_row))
            return
        held: list[tuple[Int64Array, Keys]] = []
        # With a limit, a few rows are probably enough.
        at_once = BLOCK_KEYS if limit is None else min(BLOCK_KEYS, max(4096, 2 * limit))
        for rows, keys in self._judged(first_row, stop_row):
            assert keys is not None
            held.append((rows, keys))
            if sum(len(some) for some, _ in held) >= at_once:
                yield self._not_excluded(held)
                held = []
        if held:
            yield self._not_excluded(held)

    def _not_excluded(self, held: list[tuple[Int64Array, Keys]]) -> Int64Array:
        assert self._excluded is not None
        high, low, is_valid = (np.concatenate(parts) for parts in zip(*(keys for _, keys in held), strict=True))
        return np.concatenate([rows for rows, _ in held])[~self._excluded.among(Keys(high, low, is_valid))]

    def _judged(self, first_row: int, stop_row: int) -> Iterator[tuple[Int64Array, Keys | None]]:
        """Rows that `where` and `sample` leave, with their keys if the spec excludes rows."""
        start, num_rows = first_row, _FIRST_ROWS
        while start < stop_row:
            stop = min(start + num_rows, stop_row)
            table = self._source.read_columns(start, stop, self._columns)
            rows = np.arange(start, stop, dtype=np.int64)
            is_left = self._is_left(rows, table)
            yield rows[is_left], self._keys(rows[is_left], table, is_left)
            likely = int(_BYTES_AT_ONCE * (stop - start) / max(1, table.nbytes))
            start, num_rows = stop, max(1, min(likely, 4 * num_rows, _MOST_ROWS))

    def _is_left(self, rows: Int64Array, table: pa.Table) -> BoolArray:
        is_left = np.ones(len(rows), np.bool_)
        if self._where is not None:
            own = [name for name in self._where.columns if name != self._where.key]
            keyed = pa.Table.from_arrays(
                [*(table.column(name) for name in own), pa.array(rows)], names=[*own, self._where.key]
            )
            with self._naming("input.where"):
                matching = self._where.matches(keyed.select(self._where.columns))
            is_left = np.zeros(len(rows), np.bool_)
            is_left[matching - rows[0]] = True
        if self._where is None and self._share is None:
            return is_left
        is_broken = self._is_broken(rows, table, np.ones(len(rows), np.bool_) if self._where is None else ~is_left)
        is_left |= is_broken
        if self._share is not None:
            hashes = row_hashes(table.filter(pa.array(is_left)))
            hashes[is_broken[is_left]] = row_hashes(pa.table({"": rows[is_broken]}))
            is_left[is_left] = is_in_share(hashes, self._share)
        return is_left

    def _is_broken(self, rows: Int64Array, table: pa.Table, may_be: BoolArray) -> BoolArray:
        """Which rows cannot be read. All their values are null, so only rows of nulls are read again to find them."""
        is_broken = may_be.copy()
        for column in table.columns:
            is_broken &= column.is_null().to_numpy()
        if is_broken.any():
            is_broken[is_broken] = [row.error is not None for row in self._source.read_rows(rows[is_broken], [])]
        return is_broken

    def _keys(self, rows: Int64Array, table: pa.Table, is_left: BoolArray) -> Keys | None:
        if self._excluded is None:
            return None
        if self._builder is None:
            assert self._id_column is not None
            own = table.column(self._id_column).filter(pa.array(is_left))
            return keys_of(own, self._source.schema.field(self._id_column))
        hashes: list[int | None] = []
        for first in range(0, len(rows), _ROWS_TO_TOKENIZE):
            read = self._source.read_rows(rows[first : first + _ROWS_TO_TOKENIZE], self._builder.columns)
            prompts = self._builder.build(read, self._max_model_len)
            hashes += [prompt_hash(np.array(prompt.token_ids, np.int32)) for prompt in prompts]
        return keys_of(pa.chunked_array([hashes], pa.int64()), pa.field("prompt_hash", pa.int64()))


def max_model_len(job: Job) -> int | None:
    """The engine's maximum length, as far as it is known without the engine."""
    if job.spec.scripted is not None:
        return job.spec.scripted.max_model_len
    given = job.spec.engine.get("max_model_len")
    return given if isinstance(given, int) and given > 0 else job.model.max_model_len


# -- slices ------------------------------------------------------------------------------------------------------------


def _of_all_slices(job: Job, file: SpecFile, say: Say) -> Chosen:
    """The rows of all slices together. Slices cut the chosen rows, not the input. The first slice to start chooses."""
    if not job.spec.input.selects:
        join_cut(job, job.source.num_rows)
        return Chosen(job.source.num_rows, 0, job.source.num_rows, None)
    check_cut(job)
    shared = Folder(job.spec.output.path)
    shared.make(RUN_FOLDER)
    with locked(Folder(shared.path(RUN_FOLDER))):
        cut = read_cut(job.spec.output.path)
        if cut is not None and cut.selection is None:
            return Chosen(cut.num_rows, 0, cut.num_rows, None)
        if cut is not None and (known := read_selection(shared, 1, cut.selection, RUN_FOLDER)) is not None:
            return Chosen(cut.num_rows, 0, known.num_rows, known)
        chosen = choose(job, file, 0, job.spec.input.limit, say, shared.root)
        choice = chosen.write(shared, 1, 0)
        join_cut(job, choice.num_rows, choice.selection)
        return chosen


def _cut(whole: Chosen, places: range) -> Chosen:
    """The rows of `whole` at these places. The result covers the positions up to the next slice's first row."""
    if whole.selection is None or not places:
        return Chosen(len(places), places.start, places.stop, None)
    first_row, stop_row = (
        edge if place in (0, whole.num_rows) else int(whole.selection.rows(place, place + 1)[0])
        for edge, place in ((whole.first_row, places.start), (whole.stop_row, places.stop))
    )
    selection = Selection(first_row, stop_row - first_row)
    for start in range(places.start, places.stop, _MOST_ROWS):
        selection.add(whole.selection.rows(start, min(start + _MOST_ROWS, places.stop)))
    return Chosen(len(places), first_row, stop_row, None if len(places) == stop_row - first_row else selection)
