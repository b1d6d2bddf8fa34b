"""Any input as rows by position: JSONL, Parquet, CSV, text, Arrow (files, globs, folders) and Hugging Face datasets.

How rows lie in a file is left to the module of its format, what was found out about it once to `first_pass`.
"""

import functools
import itertools
import json
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.arrow_file import ArrowReader
from batchinf.column_types import settled_schema
from batchinf.csv_file import CsvReader
from batchinf.errors import InputError
from batchinf.first_pass import examine
from batchinf.hf_dataset import is_dataset, open_dataset
from batchinf.input_files import InputFile, InputLocation, find_files
from batchinf.line_file import LineReader
from batchinf.parquet_file import ParquetReader
from batchinf.reader import Reader, Recent, Record, spans
from batchinf.source_cache import FileEntry
from batchinf.storage import Folder

__all__ = ["InputLocation", "Row", "Source", "open_source"]

OPEN_FILES = 16  # at once, of an input of many

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One input record."""

    row_index: int  # position in the source, from 0
    values: Mapping[str, object]  # column -> Python value; columns that the record lacks are absent
    error: str | None = None  # why the record cannot be read, with file and line; `values` is then empty


def open_source(input: InputLocation, cache: pathlib.Path) -> "Source":
    """The rows of `input`; what a first pass over them finds is kept in `cache`, a folder of its own.

    Opening again reads metadata alone: a file is trusted while its path, size and mtime are as they were. Processes may
    open one input with one cache at the same time. Raises `InputError` if there is nothing to read, or no row in it.
    """
    folder = Folder(cache)
    source = _of_dataset(input, folder) if is_dataset(input) else _of_files(input, folder)
    if source.num_rows == 0:
        raise InputError(f"{input.path} has no rows; give an input with at least one")
    return source


def _of_dataset(input: InputLocation, cache: Folder) -> "Source":
    reader = open_dataset(input, cache)
    return Source([lambda: reader], [reader.num_rows], reader.schema, reader.fingerprint)


def _of_files(input: InputLocation, cache: Folder) -> "Source":
    format, files = find_files(input)
    entries = examine(files, format, cache)
    schemas = {entry.schema: entry.arrow_schema() for entry in entries}
    schema = settled_schema(schemas.values(), format)
    content = json.dumps([format, [(entry.hash, entry.num_rows) for entry in entries]])
    openers = [functools.partial(_reader, *found, schema, cache) for found in zip(files, entries, strict=True)]
    lengths = [entry.num_rows for entry in entries]
    return Source(openers, lengths, schema, xxhash.xxh3_128_hexdigest(content.encode()))


def _reader(file: InputFile, entry: FileEntry, schema: pa.Schema, cache: Folder) -> Reader:
    if entry.format in ("jsonl", "text"):
        return LineReader(file, entry, schema, cache)
    if entry.format == "csv":
        return CsvReader(file, entry, schema, cache)
    if entry.format == "parquet" and "rows" not in entry.artifacts:
        return ParquetReader(file, entry, schema)
    return ArrowReader(file, entry, schema, cache)


class Source:
    """Rows by position, over all files of an input in the order of their names.

    Two threads may read at once; they take turns.
    """

    num_rows: int
    schema: pa.Schema  # every column with its settled type; a column of mixed JSON types is string, `JSON_MARK`
    fingerprint: str  # of the content, not of where it is

    def __init__(
        self, openers: Sequence[Callable[[], Reader]], lengths: Sequence[int], schema: pa.Schema, fingerprint: str
    ) -> None:
        self._readers = Recent[int, Reader](OPEN_FILES, lambda i: openers[i](), lambda reader: reader.close())
        self._firsts = [0, *itertools.accumulate(lengths)]
        self._turn = threading.Lock()
        self.num_rows = self._firsts[-1]
        self.schema = schema
        self.fingerprint = fingerprint

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows `start` to `stop`, with the values of `columns` (None: all) as they are in the record."""
        records: list[Record] = []
        with self._turn:
            for reader, first, last in self._spans(start, stop):
                records += reader.records(first, last, columns)
        return [Row(start + i, values, error) for i, (values, error) in enumerate(records)]

    def read_columns(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """`stop - start` rows as a table of the types in `schema`; null where a record is broken or lacks the column.

        Lone surrogates, which Arrow cannot hold, come out as `?`. Raises `KeyError` for a column not in `schema`.
        """
        schema = pa.schema([self.schema.field(name) for name in columns])
        with self._turn:
            tables = [reader.table(first, last, columns) for reader, first, last in self._spans(start, stop)]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def read_rows(self, positions: Int64Array, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows at these positions, int64, ascending; see `read`. Adjacent ones are read together."""
        return [row for start, stop in _runs(positions) for row in self.read(start, stop, columns)]

    def columns_of(self, positions: Int64Array, columns: Sequence[str]) -> pa.Table:
        """Rows at these positions, int64, ascending; see `read_columns`."""
        if not len(positions):
            return self.read_columns(0, 0, columns)
        return pa.concat_tables([self.read_columns(start, stop, columns) for start, stop in _runs(positions)])

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Reader, int, int]]:
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        for i, first, last in spans(self._firsts, start, stop):
            yield self._readers.get(i), first, last

    def close(self) -> None:
        """Close the files; the source is not read afterwards."""
        with self._turn:
            self._readers.clear()


def _runs(positions: Int64Array) -> Iterator[tuple[int, int]]:
    """Runs of adjacent positions, each as (start, stop)."""
    if len(positions):
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        firsts, lasts = positions[[0, *cuts]], positions[[*(cuts - 1), -1]]
        yield from zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)
