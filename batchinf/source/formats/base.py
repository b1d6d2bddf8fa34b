"""The interface of input formats and readers, and checks that keep damaged Arrow data from crashing the process."""

import abc
import bisect
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.digests import ReadDigests
from batchinf.source.files import InputFile, InputLocation, content_hash
from batchinf.source.ranges import RangedFile
from batchinf.source.types import Lost, MixedTypes, cast_column, cast_each, is_text

SAMPLED_ROWS = 16  # of a run of `FileFormat.sample`
MAX_ROWS = 2**40  # of one file; a footer that claims more is damaged


def checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch. Raises `pa.ArrowException` if it is not safe to read. Text that is not UTF-8 passes."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        batch.validate()
        for column in batch.columns:
            column.cast(_as_bytes(column.type)).validate(full=True)
    return batch


def _as_bytes(type: pa.DataType) -> pa.DataType:
    """The type with bytes instead of text, at every depth."""
    if isinstance(type, pa.ListType):
        return pa.list_(_as_bytes(type.value_type))
    if isinstance(type, pa.LargeListType):
        return pa.large_list(_as_bytes(type.value_type))
    if isinstance(type, pa.StructType):
        return pa.struct([pa.field(field.name, _as_bytes(field.type)) for field in type])
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(type, type)


def check_num_rows(name: str, claimed: int, counts: Sequence[int]) -> None:
    """Raise `InputError` unless a file has as many rows as it claims, and at most `MAX_ROWS`."""
    if claimed != sum(counts) or min(counts, default=0) < 0 or claimed > MAX_ROWS:
        raise InputError(f"{name} claims {claimed:,} rows and holds {sum(counts):,}; is it damaged?")


def python_rows(table: pa.Table) -> list[tuple[dict[str, Any], str | None]]:
    """The rows of a table as Python values, or why a row has none (text that is not UTF-8, the year 30000)."""
    names = table.column_names
    try:
        lists = [column.to_pylist() for column in table.columns]
    except Exception:  # the conversion of a value may raise anything
        return [_row(table, number) for number in range(table.num_rows)]
    return [(dict(zip(names, values, strict=True)), None) for values in zip(*lists, strict=True)]


def _row(table: pa.Table, number: int) -> tuple[dict[str, Any], str | None]:
    values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            values[name] = column[number].as_py()
        except Exception as error:
            reason = str(error).encode(errors="backslashreplace").decode()[:300]
            return {}, f"column {name!r} cannot be read: {reason}"
    return values, None


def with_text(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, list[int]]:
    """The column with valid UTF-8: other bytes become the replacement character. The places where that was needed."""
    as_bytes = _as_bytes(column.type)
    if as_bytes.equals(column.type):
        return column, []
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        stored = column.cast(as_bytes)
        values = pa.chunked_array([pa.array([_text(value.as_py(), column.type) for value in stored], column.type)])
        again = values.cast(as_bytes)
        return values, [i for i in range(len(stored)) if not stored[i].equals(again[i])]
    return column, []


def _text(value: Any, type: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(type, pa.StructType):
        return {field.name: _text(value[field.name], field.type) for field in type}
    if isinstance(type, pa.ListType | pa.LargeListType):
        return [_text(item, type.value_type) for item in value]
    return value.decode(errors="replace") if is_text(type) else value


Record = tuple[dict[str, Any], str | None]  # values, or why the record cannot be read


class Reader(Protocol):
    """One file (or dataset) of a source. Rows are counted from its own first row."""

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        """Rows with the file's own values. `columns`: None means all; columns that a row lacks are absent."""

    def table(self, start: int, stop: int, fields: pa.Schema, lost: Lost | None) -> pa.Table:
        """Rows with these columns and types; null if a record is broken or lacks the column.

        lost: gets the rows with a value that these types cannot hold; the value is then null, or text with other
        characters in it. None: raise InputError for such a value, but not for text.
        """

    def close(self) -> None:
        """Close the file; the reader is not used afterwards."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the input after its scan, with all that its reader needs."""

    file: InputFile
    entry: FileEntry
    cache: Folder
    digests: ReadDigests
    """For bytes that the scan did not read."""

    @property
    def name(self) -> str:
        """Of the file; see `InputFile`."""
        return self.file.name

    def local_copy(self) -> InputFile:
        """The cache's copy of a remote file if the scan kept one, else the file."""
        if (footer := self.artifact("footer")) is not None:
            return RangedFile(self.name, footer, url=self.entry.path, etag=self.entry.etag, cache=self.cache)
        copy = self.artifact("content")
        return self.file if copy is None else InputFile(self.name, copy)

    def artifact(self, role: str) -> str | None:
        """The path of the artifact with this role; None if there is none."""
        artifact = self.entry.artifacts.get(role)
        return None if artifact is None else os.fspath(self.cache.path(artifact.name))

    def numbers(self, role: str) -> npt.NDArray[np.int64]:
        """An int64 artifact, memory-mapped; empty if there is none."""
        path = self.artifact(role)
        return np.zeros(0, np.int64) if path is None else np.memmap(path, np.dtype("<i8"), "r")


class FileFormat(abc.ABC):
    """A format of files. It has no state of its own: the results of a scan are in the cache.

    A file is scanned once for its rows, columns and content hash. Its rows are then read by position.
    """

    name: ClassVar[str]  # a value of `input.format`
    endings: ClassVar[tuple[str, ...]]  # of file names, in lower case, with the dot
    mixed_types: ClassVar[MixedTypes]  # what a column of different types becomes
    # Whether the scan reads a file from beginning to end, also if it is compressed as a whole; see `COMPRESSIONS`. If
    # not, a remote file is first copied to the cache.
    is_scanned_in_order: ClassVar[bool] = True
    # Whether rows are read from ranges of a file that its end names, so that most of a remote file may be left out.
    is_read_by_ranges: ClassVar[bool] = False
    # Whether `FileEntry.hash` covers each byte.
    hashes_all: ClassVar[bool] = True
    # Whether folders have such files beside their data, to describe it. They are rows only if there is no other data.
    is_often_beside_data: ClassVar[bool] = False
    # Whether a number is printed, and is an id, as it stands in the file: `as_written` and `WrittenNumber`.
    prints_fields: bool = False

    @property
    def key(self) -> str:
        """Names the format with its options: what a scan with another key found does not count."""
        return self.name

    def for_input(self, input: InputLocation) -> "FileFormat":
        """The format with the options of an input. Raises InputError for those that it does not have."""
        if input.csv is not None:
            raise InputError(f"input.csv is given, but {input.path} has the format {self.name}; leave it out")
        return self

    @abc.abstractmethod
    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        """Read the file once, and write the artifacts that make its rows quick to find to `scratch`.

        `scratch.entry` makes the entry. A damaged file may raise any ValueError, LookupError, TypeError or Arrow error;
        the caller names the file.
        """

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        """A few rows from the beginning of a local file, found in milliseconds. Later rows may have other columns.

        A format whose files name their columns gives one row, of nulls. Without rows, replicas wait for the scan. It
        may raise what `scan` raises.
        """
        return ()

    @abc.abstractmethod
    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        """A reader for the file.

        read_types: all columns of the source with their types when the file was taken in, for `Reader.records` of a
        format without types.

        A reader of the input itself, and not of a copy in the cache, raises DriftError if the bytes that it reads are
        not those of the scan; see `Watch`.
        """

    def is_same(self, source_file: SourceFile) -> bool:
        """Whether a file still has the content of its scan. False for a remote one if that costs as much as a scan."""
        entry = source_file.entry
        return content_hash(source_file.file) == (entry.digest or entry.hash)

    def refuse_crashing(self, new: Sequence[InputFile]) -> None:  # noqa: B027 - most formats refuse nothing
        """Raise `InputError` with the file's name if the scan of one of these local files would crash the process."""

    def refuse_headless(  # noqa: B027 - as above
        self, new: Mapping[str, pa.Schema], first: str, columns: pa.Schema
    ) -> None:
        """Raise `InputError` if new files may lack a header, so that their first row would be lost.

        new: the columns of each file by its name. first: the name of the input's first file, which has `columns`.
        """

    def has_quick_rows(self, file: InputFile) -> bool:
        """Whether the scan of a file needs only its end, for a format with `is_read_by_ranges`."""
        return False

    def prefix(self, source_file: SourceFile, num_bytes: int) -> tuple[str, int] | None:
        """Hash and number of rows of the content's first `num_bytes`, to find rows that were appended after them.

        None if a row crosses that place, and for formats that cannot be appended to.
        """
        return None

    def sample(self, file: InputFile, num_runs: int, seed: int, to: pathlib.Path) -> float | None:
        """Write `num_runs` short runs of rows, from places all over the file, to a small file of this format.

        Returns the file's number of rows, estimated if it is not known without the scan; None, and writes nothing, if
        the format has no quick way to do that.
        """
        return None


def _shown(value: pa.Scalar) -> str:
    try:
        return str(value)[:100]
    except Exception:  # the conversion to a Python value may raise anything
        return "a value"


class ColumnarReader:
    """A reader of Arrow data; a format adds only `_slice`."""

    _name = "the input"

    def __init__(self, columns: Iterable[pa.Field]) -> None:
        """columns: of this file."""
        self._columns = {field.name: field for field in columns}

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        names = [name for name in (self._columns if columns is None else columns) if name in self._columns]
        if not names:
            return [({}, None) for _ in range(start, stop)]
        table = self._typed(start, stop, [self._columns[name] for name in names])
        return [(values, error and f"{self._name}: {error}") for values, error in python_rows(table)]

    def table(self, start: int, stop: int, fields: pa.Schema, lost: Lost | None) -> pa.Table:
        lost_here = Lost()
        table = self._typed(start, stop, list(fields), lost_here)
        if lost_here and lost is None:
            raise InputError(next(iter(lost_here.values())))
        texts = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            text, places = with_text(column)
            texts.append(text)
            reason = f"{self._name}: column {name!r} has text that is not UTF-8"
            lost_here.update((start + place, reason) for place in places)
        if lost is not None:
            lost.update(lost_here)
        return pa.Table.from_arrays(texts, schema=table.schema)

    def _typed(self, start: int, stop: int, fields: Sequence[pa.Field], lost: Lost | None = None) -> pa.Table:
        # A column may be read twice, with two types.
        names = list(dict.fromkeys(field.name for field in fields if field.name in self._columns))
        try:
            here = self._slice(start, stop, names)
            arrays = [
                self._fitted(start, here.column(field.name), field, lost)
                if field.name in self._columns
                else pa.nulls(stop - start, field.type)
                for field in fields
            ]
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:  # an error of the system, not of the content
                raise
            raise self._damaged(str(error)) from error
        if names and here.num_rows != stop - start:
            raise self._damaged(f"{stop - start:,} rows were expected, but {here.num_rows:,} came")
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _fitted(self, start: int, column: pa.ChunkedArray, field: pa.Field, lost: Lost | None) -> pa.ChunkedArray:
        try:
            return self._cast(column, field)
        except pa.ArrowInvalid:
            if lost is None or column.type.equals(field.type):
                raise
        fitted, values = cast_each(column, lambda values: self._cast(values, field), field.type)
        for place, value in values.items():
            lost[start + place] = (
                f"{self._name}: column {field.name!r} has {_shown(value)} ({column.type}), which {field.type}, the "
                "column's type over all files, cannot hold; write the files with one type"
            )
        return fitted

    def _damaged(self, reason: str) -> InputError:
        return InputError(f"{self._name} cannot be read: {' '.join(reason.split())}; is it damaged?")

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        raise NotImplementedError

    def _cast(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        return cast_column(column, field.type)

    def close(self) -> None:
        """See `Reader`."""


def spans(firsts: Sequence[int] | npt.NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The runs that hold rows `start` to `stop`, as (i, first, last) within run i: `firsts[i]` to `firsts[i + 1]`."""
    for i in itertools.count(max(0, bisect.bisect_right(firsts, start) - 1)):
        if start >= stop:
            return
        end = min(stop, int(firsts[i + 1]))
        if start < end:
            yield i, start - int(firsts[i]), end - int(firsts[i])
        start = end
