"""`--retry WHICH --input FILE`: takes chosen rows from a file with repaired rows, and refuses rows that do not fit."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import InputError, SpecError, UserError
from batchinf.base.text import clip, counted
from batchinf.job.choose import Say, key_column
from batchinf.job.job import Job, carried_columns, carried_fields
from batchinf.job.open import location_of
from batchinf.job.repaired import repaired
from batchinf.job.scratch import ScratchDatabase, scratch_database
from batchinf.manifest.lines import Repair
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.prompts.renderer import check_columns
from batchinf.records import Int64Array
from batchinf.schedule.positions import REPAIR_FOLDERS, Positions, RowBits, write_positions
from batchinf.source.files import InputFile, InputLocation
from batchinf.source.find import find_files, is_dataset
from batchinf.source.formats.parquet import Parquet
from batchinf.source.remote import is_url
from batchinf.source.repairs import REPAIRS_FOLDER, content_digest, keep_copy, open_copy, own_columns
from batchinf.source.row_hash import canonical
from batchinf.source.rows import Row, Source, format_of
from batchinf.source.types import WrittenNumber, is_json_column
from batchinf.spec.job import JobSpec

POSITION_COLUMN = "row_index"  # of the file, as of the output: names a row by its position in the input
_MEMORY = "64MB"
_ROWS_AT_ONCE = 4096
_NAMED = 3  # rows that a message names


@dataclass(frozen=True, slots=True)
class RepairFile:
    """The file that the user gave."""

    path: str
    """As given."""
    file: InputFile
    content: str
    """See `Repair.content`."""


def repair_file(path: str, spec: JobSpec) -> RepairFile:
    """The file of `--input`. Raises UserError if the job cannot take rows from it."""
    if spec.output.bucket() is not None:
        raise UserError(
            f"got --input with output.path {spec.output.path}; a job in a bucket cannot take repaired rows: run them "
            "as a job of their own, with another output.path"
        )
    if is_url(path) or not os.path.isfile(os.path.expanduser(path)):
        lacks = "" if is_url(path) or os.path.exists(os.path.expanduser(path)) else ", which is not there"
        raise InputError(f"--input: got {path}{lacks}; must be one file on this machine, with the repaired rows")
    where = location_of(spec)
    wanted = Parquet.name if is_dataset(where) else format_of(where)
    found, [file] = find_files(InputLocation(path, None if is_dataset(where) else where.format))
    if found.name != wanted:
        raise InputError(
            f"--input: {path} has the format {found.name}, but rows that replace some of {where.path} must have the "
            f"format {wanted}; write them so"
        )
    return RepairFile(path, file, content_digest(file))


def take_rows(
    job: Job, state: State, manifest: Manifest, given: RepairFile, *, number: int, chosen: RowBits, say: Say
) -> Repair | None:
    """Store the file, and which of the chosen rows come from it; None if no row is chosen. number: of the retry.

    Raises InputError if it has rows that the input lacks or that were changed and are not chosen, or no chosen row.
    """
    if keep_copy(job.folder, given.file) != given.content:
        raise InputError(f"{given.path} changed while it was read; start again once it is complete")
    faults.point("repair.after_copy")
    where = location_of(job.spec)
    try:
        copy = open_copy(job.folder, given.content, given.file.name, where=where, schema=job.source.schema)
        # The rows as they are now: with those of earlier repairs.
        now = repaired(job.source, job.folder, where, state.repairs())
        with (
            contextlib.closing(copy),
            contextlib.closing(now),
            scratch_database(job.folder, _MEMORY) as scratch,
        ):
            matching = _Matching(job, now, copy, given, scratch=scratch)
            matching.check_columns()
            matching.find(chosen, say)
            matching.refuse_changed(chosen)
            return matching.store(number, chosen, manifest, say) if chosen else None
    except UserError:
        if given.content not in [retry.repair and retry.repair.content for retry in state.repairs()]:
            shutil.rmtree(job.folder.path(f"{REPAIRS_FOLDER}/{given.content}"), ignore_errors=True)
        raise


class _Matching:
    """Which rows of the input the rows of the file replace."""

    def __init__(self, job: Job, now: Source, copy: Source, given: RepairFile, *, scratch: ScratchDatabase) -> None:
        """now: the rows of the job. copy: the rows of the file."""
        self._job = job
        self._now = now
        self._copy = copy
        self._given = given
        self._scratch = scratch
        self._id = job.spec.input.id_column
        self._columns = list(dict.fromkeys([*job.prompt_builder().columns, *carried_columns(job.spec)]))
        self._names = own_columns(job.folder, given.content, given.file.name)
        self._is_by_position = POSITION_COLUMN in self._names and POSITION_COLUMN not in job.source.schema.names

    def check_columns(self) -> None:
        """Raise InputError if the file lacks a column, or if one would get another type in the output."""
        try:
            check_columns(self._job.spec, self._names, self._job.task.input_columns)
        except SpecError as error:
            raise self._wrong(f"{error}; it must have the columns that the job uses") from None
        carried = (carried_fields(self._job.spec, source) for source in (self._job.source, self._copy))
        for before, both in zip(*carried, strict=True):
            if before.type != both.type or is_json_column(before) != is_json_column(both):
                raise self._wrong(
                    f"column {before.name!r} is {before.type} in the job's output, but its values here are not; write "
                    f"them as {before.type}"
                )

    def find(self, chosen: RowBits, say: Say) -> None:
        """Make the table `pairs` of rows of the input and their places in the file. Raises InputError."""
        self._scratch.run("CREATE TABLE pairs (row BIGINT, place BIGINT)")
        if self._is_by_position:
            self._find_by_position()
        elif self._id is not None:
            self._join_by_id(self._id)
            self._refuse_unknown_ids(self._id)
            self._pair_in_order(chosen)
            self._refuse_ambiguous_ids(self._id)
        elif self._copy.num_rows == self._job.source.num_rows:
            say(f"note: {self._given.path} has as many rows as the input, and neither ids nor {POSITION_COLUMN}: each "
                "row replaces the one at its place")  # fmt: skip
            self._scratch.run(f"INSERT INTO pairs SELECT range, range FROM range({self._copy.num_rows})")
        else:
            raise self._wrong(
                f"nothing says which rows it replaces, as the job has no id_column: give it a column {POSITION_COLUMN} "
                f"with the one of the output, or all {self._job.source.num_rows:,} rows of the input (it has "
                f"{self._copy.num_rows:,})"
            )
        if (twice := self._scratch.column("SELECT row FROM pairs GROUP BY row HAVING count(*) > 1 ORDER BY row")).size:
            raise self._wrong(
                f"it has more than one row for {self._shown(self._names_of(twice[:_NAMED].tolist()), len(twice))}; "
                "leave one of them"
            )

    def _find_by_position(self) -> None:
        type = self._copy.schema.field(POSITION_COLUMN).type
        if not pa.types.is_integer(type):
            raise self._wrong(f"column {POSITION_COLUMN} is {type}; must have whole numbers, as in the output")
        for start, table in _tables(self._copy, self._copy.schema.field(POSITION_COLUMN)):
            fixed = pa.table({"key": table.column(0), "place": _range(start, table.num_rows)})
            self._scratch.run("INSERT INTO pairs SELECT key, place FROM fixed", fixed=fixed)
        outside = self._scratch.column(
            f"SELECT place FROM pairs WHERE row IS NULL OR row NOT BETWEEN 0 AND {self._job.source.num_rows - 1} "
            "ORDER BY place"
        )
        if outside.size:
            raise self._wrong(
                f"{POSITION_COLUMN} is no row of the input (0 to {self._job.source.num_rows - 1:,}) in its "
                f"{self._shown([f'row {place + 1:,}' for place in outside], len(outside))}"
            )

    def _join_by_id(self, column: str) -> None:
        for name, source in (("fixed", self._copy), ("known", self._now)):
            field = source.id_field(column)
            for start, table in _tables(source, field):
                keys = key_column(table.column(0), field)
                rows = pa.table({"key": keys, "place": _range(start, table.num_rows)})
                if name == "fixed":
                    if not start:
                        self._scratch.run("CREATE TABLE fixed AS SELECT * FROM batch LIMIT 0", batch=rows)
                    self._scratch.run("INSERT INTO fixed FROM batch", batch=rows)
                else:
                    query = "SELECT known.place, fixed.place FROM known JOIN fixed USING (key)"
                    self._scratch.run(f"INSERT INTO pairs {query}", known=rows)

    def _refuse_unknown_ids(self, column: str) -> None:
        # A row without an id, as one that cannot be read, is none of the job either.
        unknown = self._scratch.column("SELECT place FROM fixed ANTI JOIN pairs USING (place) ORDER BY place")
        if unknown.size:
            ids = (self._copy.read(int(place), int(place) + 1, [column])[0] for place in unknown[:_NAMED])
            names = [row.error or f"{column} {row.values.get(column)!r}" for row in ids]
            raise self._wrong(
                f"{counted(len(unknown), 'row')} of it "
                f"{'is' if len(unknown) == 1 else 'are'} not in the job's input: {self._shown(names, len(unknown))}; "
                f"correct the ids, or leave these rows out; new rows belong to the input, for --extend; a column "
                f"{POSITION_COLUMN} names rows without an id"
            )

    def _pair_in_order(self, chosen: RowBits) -> None:
        """Pair rows of the input and of the file that share an id in their order, if there are as many of both.

        Not if one of them is chosen. The others must be unchanged, which `refuse_changed` checks.
        """
        several = "FROM pairs WHERE place IN (SELECT place FROM pairs GROUP BY place HAVING count(*) > 1)"
        rows = self._scratch.column(f"SELECT DISTINCT row {several} ORDER BY row")
        if not rows.size:
            return
        # All rows of an id are paired with the same places, so the first of these stands for the id.
        self._scratch.run(
            "CREATE TABLE shared AS SELECT row, place, id, row IN (SELECT row FROM taken) AS is_chosen, "
            "dense_rank() OVER (PARTITION BY id ORDER BY row) AS row_number, "
            "dense_rank() OVER (PARTITION BY id ORDER BY place) AS place_number "
            f"FROM (SELECT row, place, min(place) OVER (PARTITION BY row) AS id {several})",
            taken=pa.table({"row": rows[chosen.has(rows)]}),
        )
        as_many = "GROUP BY id HAVING max(row_number) = max(place_number) AND NOT bool_or(is_chosen)"
        self._scratch.run(
            "DELETE FROM pairs USING shared WHERE pairs.row = shared.row AND pairs.place = shared.place AND "
            f"row_number <> place_number AND id IN (SELECT id FROM shared {as_many})"
        )

    def _refuse_ambiguous_ids(self, column: str) -> None:
        several = self._scratch.column("SELECT place FROM pairs GROUP BY place HAVING count(*) > 1 ORDER BY place")
        if several.size:
            [row] = self._copy.read(int(several[0]), int(several[0]) + 1, [column])
            raise self._wrong(
                f"{column} {row.values.get(column)!r} is that of several rows of the input; name the row by a column "
                f"{POSITION_COLUMN}"
            )

    def refuse_changed(self, chosen: RowBits) -> None:
        """Raise InputError if the file changes rows that are not chosen."""
        changed = list[int]()
        num_changed = 0
        for rows, places in self._pairs():
            others = ~chosen.has(rows)
            now = self._now.read_rows(rows[others], self._columns)
            for row, place in zip(now, places[others].tolist(), strict=True):
                if _content(row) != _content(*self._copy.read(place, place + 1, self._columns)):
                    num_changed += 1
                    changed += [row.row_index] if num_changed <= _NAMED else []
        if num_changed:
            raise self._wrong(
                f"it changes {counted(num_changed, 'row')} that --retry does not choose, and whose results would stay: "
                f"{self._shown(self._names_of(changed), num_changed)}; choose them, too, as in --retry "
                '"error_type is not null or row_index in (17, 18)", or leave them out of the file'
            )

    def store(self, number: int, chosen: RowBits, manifest: Manifest, say: Say) -> Repair:
        """Write which of the chosen rows come from the file, durably."""
        folder = self._job.folder
        taken = ((rows, places, chosen.has(rows)) for rows, places in self._pairs())
        rows_file = self._write(0, number, (rows[is_chosen] for rows, _, is_chosen in taken), manifest)
        taken = ((rows, places, chosen.has(rows)) for rows, places in self._pairs())
        places_file = self._write(1, number, (places[is_chosen] for _, places, is_chosen in taken), manifest)
        faults.point("repair.after_rows")
        missing = self._missing(chosen, rows_file)
        num_missing = chosen.count() - len(rows_file)
        if not len(rows_file):
            folder.delete(f"{REPAIR_FOLDERS[0]}/{number:06d}.positions")
            raise self._wrong(
                f"it has none of the rows that --retry chooses ({self._shown(self._names_of(missing), num_missing)}), "
                "and its own rows are as they are in the job, so there is nothing to run"
            )
        say(f"{self._given.path} has {len(rows_file):,} of the {counted(chosen.count(), 'chosen row')}")
        if num_missing:
            say(
                f"note: {counted(num_missing, 'chosen row')} {'is' if num_missing == 1 else 'are'} not in "
                f"{self._given.path}, and run again as before: {self._shown(self._names_of(missing), num_missing)}"
            )
        return Repair(
            path=self._given.path,
            name=self._given.file.name,
            content=self._given.content,
            fingerprint=self._copy.fingerprint,
            num_rows=len(rows_file),
            rows=rows_file.digest,
            places=places_file.digest,
        )

    def _write(self, which: int, number: int, some: Iterator[Int64Array], manifest: Manifest) -> Positions:
        most = (self._job.source.num_rows, self._copy.num_rows)[which]
        where = REPAIR_FOLDERS[which]
        return write_positions(self._job.folder, number, some, most, where=where, check_lock=manifest.check_lock)

    def _pairs(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Rows of the input, ascending, and their places in the file."""
        for batch in self._scratch.batches("SELECT row, place FROM pairs ORDER BY row"):
            rows, places = (np.asarray(column.to_numpy(), np.int64) for column in batch.columns)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                yield rows[start : start + _ROWS_AT_ONCE], places[start : start + _ROWS_AT_ONCE]

    def _missing(self, chosen: RowBits, taken: Positions) -> list[int]:
        missing: list[int] = []
        for rows in chosen.pieces():
            span = taken.between(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)
            missing += np.setdiff1d(rows, taken.rows(span.start, span.stop)).tolist()
            if len(missing) >= _NAMED:
                break
        return missing[:_NAMED]

    def _names_of(self, rows: Sequence[int]) -> list[str]:
        """How a message names rows of the input: by id, if they have one."""
        if (column := self._id) is None:
            return [f"row {row:,}" for row in rows]
        ids = (self._now.read(row, row + 1, [column])[0].values.get(column) for row in rows)
        return [f"row {row:,}" if id is None else f"{column} {id!r}" for row, id in zip(rows, ids, strict=True)]

    def _shown(self, names: Sequence[str], num: int) -> str:
        more = f" and {num - _NAMED:,} more" if num > _NAMED else ""
        return ", ".join(clip(name, 200) for name in names[:_NAMED]) + more

    def _wrong(self, what: str) -> InputError:
        return InputError(f"--input: {self._given.path}: {what}")


def _tables(source: Source, field: pa.Field) -> Iterator[tuple[int, pa.Table]]:
    """A column, some rows at a time: the first row, and the table."""
    for start in range(0, source.num_rows, _ROWS_AT_ONCE):
        yield start, source.read_fields(start, min(start + _ROWS_AT_ONCE, source.num_rows), [field], {})


def _range(start: int, num_rows: int) -> pa.Array:
    return pa.array(np.arange(start, start + num_rows, dtype=np.int64))


def _content(row: Row) -> object:
    """The values of a row, for comparison: two rows with equal values of different types are equal."""
    if row.error is not None:
        return None
    # A number that is printed in another way makes another prompt.
    values = {name: str(value) if isinstance(value, WrittenNumber) else value for name, value in row.values.items()}
    texts = {name: canonical(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is not None}
