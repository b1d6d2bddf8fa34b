"""Any input as rows by position, whatever the format of its files. `job` opens it, and each replica reads its rows."""

import functools
import itertools
import pathlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import DriftError, InputError, NoRowsError
from batchinf.base.storage import Folder
from batchinf.source.cache import further_columns, read_record, schema_of, write_record
from batchinf.source.digests import ReadDigests, Watch
from batchinf.source.files import InputFile, InputLocation, refuse_pointers
from batchinf.source.find import find_files, is_dataset
from batchinf.source.folders import FolderReader, chosen_values, folder_values
from batchinf.source.formats.base import FileFormat, Reader, Record, SourceFile, spans
from batchinf.source.formats.huggingface import HUGGING_FACE, open_dataset
from batchinf.source.formats.registry import file_format, format_by_ending
from batchinf.source.left_out import LeftOut
from batchinf.source.ranges import RangedFile, Span
from batchinf.source.remote import find_remote, is_url
from batchinf.source.scan import Scanner
from batchinf.source.types import Lost, as_written, refuse_named_twins, remark_of, settled_schema
from batchinf.source.versions import (
    InputVersion,
    compare_files,
    first_version,
    fitted_beside,
    from_cache,
    latest_ranges,
    load_versions,
    next_version,
    record_name,
    refuse_changes,
    save_version,
)

OPEN_FILES = 16  # at once
_MANY_BYTES = 64 << 20  # a scan of less takes about as long as a sample
_SAMPLED_RUNS = 128
_MANY_ROWS = 100  # of a file that is named if none of its rows can be good
# What to do with files and rows that came after the job took its input in. `ignore` does not look at `input.path` if
# the known files are unchanged; `leave` checks that they are all there.
NewRows = Literal["refuse", "ignore", "leave", "take"]
_ASKED = "asked.json"  # in the cache: the URL whose files were copied to it


@dataclass(frozen=True, slots=True)
class Row:
    """One input record."""

    row_index: int
    """Position in the source, from 0."""
    values: Mapping[str, object]
    """Column → Python value; columns that the record lacks are absent."""
    error: str | None = None
    """Why the record cannot be read, with file and line; `values` is then empty."""


def open_source(
    input: InputLocation,
    cache: pathlib.Path,
    taken: Sequence[str] = (),
    new: NewRows = "refuse",
    *,
    beside: pa.Schema | None = None,
) -> "Source":
    """The rows of `input`. The folder `cache` keeps the results of the scan.

    Opening again reads only metadata: a file is trusted while its path, size, mtime and inode are unchanged. Several
    processes may open one input with one cache at the same time. Raises `InputError` if there is nothing to read or no
    row.

    taken: fingerprints of the versions that a job has, the latest last. Their rows keep their positions, even if files
    were renamed; `new` says what happens to new files and rows. Raises `DriftError` if known files are changed or gone.

    beside: columns of another source. The types of these rows then hold the values of both.
    """
    folder = Folder(cache)
    if is_dataset(input):
        if input.csv is not None:
            raise InputError(f"input.csv is given, but {input.path} is a dataset; leave it out")
        reader = open_dataset(input, folder)
        source = Source([lambda: reader], [(0, reader.num_rows)], [reader.schema], [reader.fingerprint])
        source.remarks = {remark: [input.path] for remark in reader.remarks}
    else:
        source = _of_files(input, folder, taken, new, beside=beside)
    if source.num_rows == 0:
        raise NoRowsError(f"{input.path} has no rows; give an input with at least one")
    return source


def _of_files(
    input: InputLocation, cache: Folder, taken: Sequence[str], new: NewRows, *, beside: pa.Schema | None
) -> "Source":
    cache.make()
    digests = ReadDigests(cache)
    versions = _known_versions(cache, taken)
    left_out: LeftOut = {}
    if taken:
        input = replace(input, is_new=False)
    if versions is None:
        format, files = _find(input, left_out)
        if input.is_new:
            refuse_pointers(files)
        scanner = Scanner(format, cache, digests, input.say)
        version, scanned = first_version(scanner, files)
        if input.is_new:
            _refuse_headless(format, scanned, version)
            _refuse_lost_folders(scanned.values())
        versions = [version if beside is None else fitted_beside(version, beside, format)]
    else:
        scanner, versions, scanned = _again(input, cache, digests, versions, new=new, left_out=left_out)
        if new == "take":
            _refuse_lost_folders(scanned.values())
    save_version(cache, versions[-1])
    if is_url(input.path) and read_record(cache, _ASKED) != _asked(input):
        write_record(cache, _ASKED, _asked(input))
    source = _assembled(scanner, versions, scanned, named=input.named)
    source.remarks = {**source.remarks, **left_out}
    return source


def _known_versions(cache: Folder, taken: Sequence[str]) -> list[InputVersion] | None:
    """The versions that a job has; None if a scan finds the same rows again. Raises InputError if it would not."""
    versions = load_versions(cache, taken[-1]) if taken else None
    if versions is None and len(set(taken)) > 1:
        path = cache.path(record_name(taken[-1]))
        raise InputError(f"{path} is gone or damaged; it says where each row is, so restore it")
    return versions


def first_rows(input: InputLocation) -> Sequence[Mapping[str, object]] | None:
    """The values of a few rows from the beginning of the first file; see `FileFormat.first_rows`.

    None if it would cost more than milliseconds: for URLs and datasets. Empty for a file that cannot be read; the scan
    says why. Raises `InputError` if there is no file.
    """
    if _is_far(input):
        return None
    format, files = find_files(input)
    try:
        return [{**folder_values(files[0].name), **row} for row in format.first_rows(files[0])]
    except (InputError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
        return ()


def format_of(input: InputLocation) -> str | None:
    """The name of the input's format; None for a URL that does not say it. Raises `InputError` if there is no file."""
    if is_dataset(input):
        return HUGGING_FACE
    if is_url(input.path):
        found = format_by_ending(input.path) if input.format is None else file_format(input.format)
        return None if found is None else found.name
    return find_files(input)[0].name


def _is_far(input: InputLocation) -> bool:
    """Whether no local files can be looked at before the scan."""
    return is_url(input.path) or is_dataset(input)


def is_scanned_quickly(input: InputLocation) -> bool:
    """Whether the input is so small and so near that its scan takes about as long as a sample."""
    return not _is_far(input) and sum(file.stamp()[0] for file in find_files(input)[1]) < _MANY_BYTES


def sample_input(input: InputLocation, folder: pathlib.Path) -> int | None:
    """Copy rows from all parts of a large input into `folder`, so that `plan` need not wait for the scan.

    The folder is then an input of the same format. Returns about how many rows the whole input has; None, and copies
    nothing, if it is small, or has to be scanned. Raises InputError if there is nothing to read.
    """
    if _is_far(input):
        return None
    format, files = find_files(input)
    sizes = [file.stamp()[0] for file in files]
    if sum(sizes) < _MANY_BYTES:
        return None
    num_rows = 0.0
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        runs = max(1, round(_SAMPLED_RUNS * size / sum(sizes)))
        with_values = folder.joinpath(*(part for part in file.name.split("/")[:-1] if "=" in part))
        with_values.mkdir(parents=True, exist_ok=True)
        rows_of_file = format.sample(file, runs, number, with_values / f"{number:06}{format.endings[0]}")
        if rows_of_file is None:
            return None
        num_rows += rows_of_file
    return round(num_rows)


def _find(input: InputLocation, left_out: LeftOut) -> tuple[FileFormat, list[InputFile]]:
    is_remote = is_url(input.path) and input.parts is None
    return find_remote(input, left_out) if is_remote else find_files(input, left_out)


def _asked(input: InputLocation) -> dict[str, object]:
    return {"path": input.path, "format": input.format}


def _again(
    input: InputLocation,
    cache: Folder,
    digests: ReadDigests,
    versions: list[InputVersion],
    *,
    new: NewRows,
    left_out: LeftOut,
) -> tuple[Scanner, list[InputVersion], dict[int, SourceFile]]:
    """The files of these versions, and of a new version if `new` is `take`."""
    known = latest_ranges(versions)
    known_format = file_format(versions[-1].format)
    # The copies of a remote input are what the job began with. The URL is listed again only to find new files. Those of
    # another job are found by its manifest.
    is_copied = is_url(input.path) and input.parts is None and read_record(cache, _ASKED) == _asked(input)
    if new == "ignore" or (new != "take" and is_copied):
        scanned = from_cache(known, cache, digests)
        if scanned is not None and known_format is not None:
            return Scanner(known_format.for_input(input), cache, digests, input.say), versions, scanned
    format, files = _find(replace(input, began_as=versions[-1].format), left_out)
    if format.name != versions[-1].format:
        raise DriftError(
            f"{input.path} has the format {format.name}, but the job in the output folder began with "
            f"{versions[-1].format}; restore the input, or give this job another output.path"
        )
    scanner = Scanner(format, cache, digests, input.say)
    compared = compare_files(scanner, known, files, scans_new=new == "take")
    refuse_changes(compared, input.path, takes_new=new != "refuse", is_job=input.parts is not None)
    addition = next_version(versions[-1], known, compared, format) if new == "take" else None
    if addition is None:
        return scanner, versions, compared.usable
    version, scanned = addition
    _refuse_headless(format, scanned, version)
    return scanner, [*versions, version], scanned


def _refuse_headless(format: FileFormat, scanned: Mapping[int, SourceFile], version: InputVersion) -> None:
    """See `FileFormat`. The new files are those that the version adds."""
    schemas = {text: schema_of(text) for text in {file.entry.schema for file in scanned.values()}}
    own = {number: schemas[file.entry.schema] for number, file in scanned.items()}
    first = next((number for number, schema in sorted(own.items()) if schema.names), 0)
    new = {added.name: own[added.file] for added in version.added if added.first_row == 0}
    format.refuse_headless(new, scanned[first].name, own[first])


def _assembled(
    scanner: Scanner, versions: Sequence[InputVersion], scanned: Mapping[int, SourceFile], *, named: Sequence[str]
) -> "Source":
    format = scanner.format
    for file in scanned.values():
        entry = file.entry
        refuse_named_twins(entry.arrow_schema(), named, file.name)
        if not is_url(entry.path):  # a file of this host is watched, also if its rows come from a copy
            is_same = functools.partial(format.is_same, file)
            scanner.digests.watches[entry.content] = Watch(file.name, [entry.path], [entry.stamp], is_same)
    further = _named_columns(scanner, named, scanned)
    schemas = [_replaced(schema_of(version.schema), further) for version in versions]
    openers: list[Callable[[], Reader]] = []
    runs = []
    ranged: dict[int, RangedFile] = {}
    stops: dict[str, int] = {}
    for version, schema in zip(versions, schemas, strict=True):
        for added in version.added:
            file = scanned[added.file]
            local = file.local_copy()
            if isinstance(local, RangedFile) and "rows" not in file.entry.artifacts:
                ranged[len(openers)] = local
            openers.append(functools.partial(_reader, format, replace(file, file=local), schema, added.name))
            runs.append((added.first_row, added.stop_row))
            stops[file.name] = max(added.stop_row, stops.get(file.name, 0))
    fingerprints = [version.fingerprint for version in versions]
    source = Source(openers, runs, schemas, fingerprints, digests=scanner.digests)
    source.empty_files = tuple(name for name, stop_row in stops.items() if not stop_row)
    source.ranged = ranged
    source.remarks = {**_remarks(scanned.values()), **_repeated_contents(format, scanned.values())}
    source.files_by_columns = _by_columns(scanned.values())
    source.prints_fields = format.prints_fields
    return source


def _reader(format: FileFormat, local: SourceFile, schema: pa.Schema, name: str) -> Reader:
    """name: of the file, whose folders may have values."""
    reader = format.reader(local, schema)
    values = chosen_values(name, schema)
    return FolderReader(reader, values) if values else reader


def _remarks(scanned: Iterable[SourceFile]) -> Mapping[str, list[str]]:
    remarks: dict[str, list[str]] = {}
    by_schema: dict[str, str] = {}
    for file in scanned:
        schema = file.entry.schema
        if schema not in by_schema:
            by_schema[schema] = remark_of(schema_of(schema))
        if remark := by_schema[schema]:
            remarks.setdefault(remark, []).append(file.name)
    return remarks


def _refuse_lost_folders(scanned: Iterable[SourceFile]) -> None:
    """Raises InputError if a file's folder names a value of a column that only other files have: it would be null."""
    with_rows = [file for file in scanned if file.entry.num_rows]
    if not any("=" in file.name for file in with_rows):
        return
    columns = {schema: schema_of(schema).names for schema in {file.entry.schema for file in with_rows}}
    owners = {column: file.name for file in with_rows for column in columns[file.entry.schema]}
    for file in with_rows:
        for column, value in folder_values(file.name).items():
            if value is not None and column in owners and column not in columns[file.entry.schema]:
                raise InputError(
                    f"column '{column}': {owners[column]} has it itself, and {file.name} only in its folder's name, "
                    "which would be lost; give all files the column, or none"
                )


def _repeated_contents(format: FileFormat, scanned: Iterable[SourceFile]) -> Mapping[str, list[str]]:
    """The files with the content of an earlier one, by the hashes of the scan, and with the values of its folders."""
    firsts: dict[tuple[object, ...], str] = {}
    repeated = []
    for file in scanned:
        entry = file.entry
        first = firsts.setdefault((entry.hash, entry.digest, *folder_values(file.name).items()), file.name)
        if first != file.name and entry.num_rows:
            repeated.append(f"{file.name} (as {first})")
    same = "the same content" if format.hashes_all else "probably the same content, with the same size and footer"
    return {f"{same}, so these rows run more than once; move one of the files away": repeated} if repeated else {}


def _by_columns(scanned: Iterable[SourceFile]) -> Mapping[tuple[str, ...], list[str]]:
    names: dict[str, tuple[str, ...]] = {}
    files: dict[tuple[str, ...], list[str]] = {}
    for file in scanned:
        entry = file.entry
        if entry.num_rows >= _MANY_ROWS:
            if entry.schema not in names:
                names[entry.schema] = tuple(entry.arrow_schema().names)
            files.setdefault((*names[entry.schema], *folder_values(file.name)), []).append(file.name)
    return files


def _named_columns(scanner: Scanner, named: Sequence[str], scanned: Mapping[int, SourceFile]) -> pa.Schema:
    """Those of these columns that a file has beyond the columns of its schema, with their types over all files."""
    files = [scanned[number] for number in sorted(scanned)]
    schemas = [(file.name, further_columns(file.entry, set(named), scanner.cache)) for file in files]
    further = [(name, schema) for name, schema in schemas if schema is not None]
    names = {field.name for _, schema in further for field in schema}
    if not names:
        return pa.schema([])
    first = [(file.name, _only(file.entry.arrow_schema(), names)) for file in files]
    return settled_schema([*first, *further], scanner.format.mixed_types)


def _only(schema: pa.Schema, names: Container[str]) -> pa.Schema:
    return pa.schema([field for field in schema if field.name in names])


def _replaced(schema: pa.Schema, columns: pa.Schema) -> pa.Schema:
    return pa.schema([*(field for field in schema if field.name not in columns.names), *columns])


class Source:
    """Rows by position: the files in the order of their names, then the additions of each later version.

    Several threads may call it; a lock lets one read at a time.
    """

    num_rows: int
    schema: pa.Schema
    """Every column with its merged type; a column of mixed JSON types is string with `JSON_MARK`."""
    schemas: tuple[pa.Schema, ...]
    """Of each version; `schema` is the last."""
    fingerprint: str
    """Of the content, not of paths."""
    fingerprints: tuple[str, ...]
    """Of each version with those before it; `fingerprint` is the last."""
    empty_files: tuple[str, ...] = ()
    """Names of the files without rows."""
    ranged: Mapping[int, RangedFile] = {}
    """Files in a store of which the cache has only some ranges, by the numbers of their openers."""
    prints_fields: bool = False
    """See `FileFormat`."""
    remarks: Mapping[str, Sequence[str]] = {}
    """How files are read that decide it by their own beginning, files of equal content, and the split of a folder with
    several: words, each with the names of such files."""

    files_by_columns: Mapping[tuple[str, ...], Sequence[str]] = {}
    """By the names of their own columns: the files of at least 100 rows."""

    def __init__(
        self,
        openers: Sequence[Callable[[], Reader]],
        runs: Sequence[tuple[int, int]],
        schemas: Sequence[pa.Schema],
        fingerprints: Sequence[str],
        *,
        digests: ReadDigests | None = None,
    ) -> None:
        """runs: for each opener's reader, the first row to read and the one after the last. digests: of the readers."""
        self._digests = digests
        self._openers = openers
        self._runs = runs
        self._readers = OrderedDict[int, Reader]()  # by number, the one that was used last at the end
        self._offsets = [start for start, _ in runs]
        self._firsts = [0, *itertools.accumulate(stop - start for start, stop in runs)]
        self._turn = threading.Lock()
        self.num_rows = self._firsts[-1]
        self.schemas = tuple(schemas)
        self.schema = schemas[-1]
        self.fingerprints = tuple(fingerprints)
        self.fingerprint = fingerprints[-1]

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows `start` to `stop` (exclusive) with the values of `columns` (None: all)."""
        records: list[Record] = []
        with self._turn:
            for reader, first, last in self._spans(start, stop):
                records += reader.records(first, last, columns)
        return [Row(start + i, values, error) for i, (values, error) in enumerate(records)]

    def read_columns(
        self, start: int, stop: int, columns: Sequence[str], lost: dict[int, str] | None = None
    ) -> pa.Table:
        """`stop - start` rows as a table with the types of `schema`; null if a record is broken or lacks the column.

        lost: gets the positions of rows with a value that its type cannot hold, and why; the value is then null. None:
        raise InputError. In text, lone surrogates become `?` and bytes that are not UTF-8 become U+FFFD; these rows are
        in `lost`, too, but raise nothing. Raises `KeyError` for a column that `schema` lacks.
        """
        return self.read_fields(start, stop, [self.schema.field(name) for name in columns], lost)

    def id_field(self, column: str, version: int = -1) -> pa.Field:
        """The field for `read_fields` by which a column is read as the ids of rows: each as the file prints it.

        version: whose types count.
        """
        field = self.schemas[version].field(column)
        return as_written(field) if self.prints_fields else field

    def read_fields(
        self, start: int, stop: int, fields: Sequence[pa.Field], lost: dict[int, str] | None = None
    ) -> pa.Table:
        """Like `read_columns`, with fields of `schema` or `id_field`. Two fields may have one name."""
        schema = pa.schema(fields)
        tables = []
        with self._turn:
            for reader, first, last in self._spans(start, stop):
                lost_here = None if lost is None else Lost()
                tables.append(reader.table(first, last, schema, lost_here))
                if lost is not None and lost_here:
                    lost.update({start + row - first: reason for row, reason in lost_here.items()})
                start += last - first
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def read_rows(self, positions: npt.NDArray[np.int64], columns: Sequence[str] | None = None) -> list[Row]:
        """Rows at these positions, int64, ascending; see `read`. Adjacent rows are read together."""
        return [row for start, stop in _runs(positions) for row in self.read(start, stop, columns)]

    def fields_of(
        self, positions: npt.NDArray[np.int64], fields: Sequence[pa.Field], lost: dict[int, str] | None = None
    ) -> pa.Table:
        """Rows at these positions, int64, ascending; see `read_fields`."""
        if not len(positions):
            return self.read_fields(0, 0, fields)
        return pa.concat_tables([self.read_fields(start, stop, fields, lost) for start, stop in _runs(positions)])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Reader, int, int]]:
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        for i, first, last in spans(self._firsts, start, stop):
            offset = self._offsets[i]
            yield self._reader(i), offset + first, offset + last

    def _reader(self, i: int) -> Reader:
        if i not in self._readers:
            while len(self._readers) >= OPEN_FILES:
                self._readers.popitem(last=False)[1].close()
            self._readers[i] = self._openers[i]()
        self._readers.move_to_end(i)
        return self._readers[i]

    def unfetched(
        self, pieces: Iterable[npt.NDArray[np.int64]], columns: Sequence[str]
    ) -> list[tuple[RangedFile, list[Span]]]:
        """The ranges of files in a store that the cache lacks, with these columns of these rows.

        pieces: positions of rows, int64.
        """
        stops = {number: file.stops() for number, file in self.ranged.items()}
        groups: dict[int, set[int]] = {number: set() for number in stops}
        for positions in pieces:
            numbers = np.searchsorted(self._firsts, positions, "right") - 1
            for number in np.unique(numbers).tolist():
                if number in stops:
                    rows = positions[numbers == number] - self._firsts[number] + self._offsets[number]
                    groups[number].update(np.unique(np.searchsorted(stops[number], rows, "right")).tolist())
        found = [(file, file.missing(groups[number], columns)) for number, file in self.ranged.items()]
        return [(file, spans) for file, spans in found if spans]

    def keep_digests(self) -> None:
        """Make the digests of all that was read durable. Call it before anything durable is made of the rows.

        Raises DriftError if a file has changed since it was read.
        """
        if self._digests is not None:
            self._digests.keep()

    def close(self) -> None:
        """Close the files; the source is not read afterwards."""
        with self._turn:
            while self._readers:
                self._readers.popitem()[1].close()


def _runs(positions: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of adjacent positions, each as (start, stop)."""
    if len(positions):
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        firsts = positions[[0, *cuts]]
        lasts = positions[[*(cuts - 1), -1]]
        yield from zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)
