"""CSV: the scan parses the file once, and writes every value as a string, with an error for each broken row.

Column types are decided afterwards, over all files.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.base.text import counted
from batchinf.source.cache import FileEntry, FileFindings, Scratch
from batchinf.source.files import BLOCK_BYTES, LINE_ENDS, MAX_LINE_BYTES, InputFile, not_utf8, open_bytes, refuse_utf16
from batchinf.source.formats.arrow import BATCH_BYTES, BATCH_ROWS, ArrowReader, spool
from batchinf.source.formats.base import FileFormat, Reader, Record, SourceFile
from batchinf.source.types import CsvTypes, MixedTypes, is_utf8, refuse_twins

ERRORS_COLUMN = "batchinf:error"  # the spool's last column: why a row could not be read
_UNENDED = "unexpected end of data"  # the error of Python's `csv` for an open quote at the end


class Csv(FileFormat):
    """CSV with a header; rows may be appended to a file."""

    name = "csv"
    endings = (".csv",)
    mixed_types = MixedTypes.STRING

    def scan(self, file: InputFile, scratch: Scratch) -> FileFindings:
        with open_bytes(file) as stream:
            hashed = _Hashed(file, stream)
            rows = _Rows(file, hashed)
            types = CsvTypes(rows.header)
            schema = pa.schema([(name, pa.string()) for name in (*rows.header, ERRORS_COLUMN)])
            num_rows = spool(_batches(rows, types), schema, scratch)
        if rows.num_swallowed:
            raise InputError(
                f"{file.name}: a quote opens in line {rows.line:,} and is never closed, so that row would have the "
                f"next {counted(rows.num_swallowed, 'line')} in it: close it, or write a quote that is text twice"
            )
        return FileFindings(hashed.digest.hexdigest(), num_rows, types.schema(), hashed.num_bytes)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        with open_bytes(file) as stream:
            return [dict.fromkeys(_Rows(file, _Hashed(file, stream)).header)]

    def reader(self, source_file: SourceFile) -> Reader:
        return _CsvReader(source_file)

    def prefix(self, file: InputFile, entry: FileEntry, num_bytes: int, cache: Folder) -> tuple[str, int] | None:
        with open_bytes(file) as stream:
            hashed = _Hashed(file, stream, num_bytes)
            num_rows = 0
            is_open = False
            for row in _Rows(file, hashed):
                num_rows += 1
                is_open = isinstance(row, str) and _UNENDED in row
            is_whole = not hashed.end or hashed.end in b"\r\n" or stream.read(2).startswith(LINE_ENDS)
            if not is_whole or is_open or hashed.num_bytes != num_bytes:
                return None
            return hashed.digest.hexdigest(), num_rows


def _batches(rows: "_Rows", types: CsvTypes) -> Iterator[pa.RecordBatch]:
    batch: list[list[str] | str] = []
    num_chars = rows.num_chars
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS or rows.num_chars - num_chars > BATCH_BYTES:
            yield _batch(batch, rows.header, types)
            batch = []
            num_chars = rows.num_chars
    if batch:
        yield _batch(batch, rows.header, types)


def _batch(rows: Sequence[list[str] | str], header: Sequence[str], types: CsvTypes) -> pa.RecordBatch:
    nothing = [None] * len(header)
    fields = zip(*(nothing if isinstance(row, str) else row for row in rows), strict=True)
    columns = [pa.array(values, pa.string()) for values in fields]
    types.add(dict(zip(header, columns, strict=True)))
    errors = pa.array([row if isinstance(row, str) else None for row in rows], pa.string())
    return pa.RecordBatch.from_arrays([*columns, errors], names=[*header, ERRORS_COLUMN])


class _Hashed(io.RawIOBase):
    """A stream that hashes what is read through it. num_bytes: read so far. limit: it ends after so many bytes."""

    def __init__(self, file: InputFile, stream: BinaryIO, limit: int | None = None) -> None:
        self._file = file
        self._stream = stream
        self._limit = limit
        self.num_bytes = 0
        self.end = b""  # the last byte
        self.digest = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = len(buffer) if self._limit is None else min(len(buffer), self._limit - self.num_bytes)
        block = self._stream.read(num_bytes)
        if not self.num_bytes:
            refuse_utf16(self._file, block[:4])
        self.num_bytes += len(block)
        self.end = block[-1:] or self.end
        self.digest.update(block)
        buffer[: len(block)] = block
        return len(block)


class _Rows:
    """The rows of a CSV file: a list of fields, or a string with the row's error."""

    def __init__(self, file: InputFile, stream: io.RawIOBase) -> None:
        csv.field_size_limit(MAX_LINE_BYTES)
        self._text = io.TextIOWrapper(
            io.BufferedReader(stream, BLOCK_BYTES), "utf-8-sig", "surrogateescape", newline=""
        )
        self.num_chars = 0
        self.line = 0
        self.num_swallowed = 0  # by a quote that opens in `line` and is never closed
        self._wrong = ""
        self._is_new_row = False
        self._reader = csv.reader(self._lines(), strict=True)
        try:
            self.header = next((row for row in self._reader if row), [])
        except csv.Error as error:
            raise InputError(f"{file.name}: its header is not CSV: {error}") from None
        if self._wrong:
            raise InputError(f"{file.name}: its header is {self._wrong}")
        refuse_twins(self.header, file.name)

    def _lines(self) -> Iterator[str]:
        for line in iter(lambda: self._text.readline(MAX_LINE_BYTES), ""):
            self.num_chars += len(line)
            if self._is_new_row:  # files with a byte order mark were joined
                line = line.removeprefix("\ufeff")
                self._is_new_row = False
            if not (line.isascii() or is_utf8(line)):  # other bytes are decoded to lone surrogates
                self._wrong = self._wrong or _why_not_utf8(line)
            yield line

    def __iter__(self) -> Iterator[list[str] | str]:
        width = len(self.header)
        while True:
            line = self._reader.line_num + 1
            self._wrong = ""
            self._is_new_row = True
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                if str(error) == _UNENDED:
                    self.line = line
                    self.num_swallowed = self._reader.line_num - line
                yield f"line {line}: not CSV: {error}"
                continue
            if self._wrong:
                yield f"line {line}: {self._wrong}"
            elif len(row) == width:
                yield row
            elif row:
                yield f"line {line}: {len(row)} fields where the header has {width}"


def _why_not_utf8(line: str) -> str:
    try:
        line.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return not_utf8(error)
    raise AssertionError("the line is UTF-8")


class _CsvReader(ArrowReader):
    """The spool of a CSV file: every value as a string, and the errors of broken rows."""

    def __init__(self, source_file: SourceFile) -> None:
        super().__init__(source_file)
        # A column has a number type only if all files have numbers in it.
        self._columns = {name: source_file.read_types.field(name) for name in self._columns}

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        errors = self._slice(start, stop, [ERRORS_COLUMN]).column(0).to_pylist()
        return [
            record if error is None else ({}, f"{self._name} {error}")
            for record, error in zip(super().records(start, stop, columns), errors, strict=True)
        ]

    def _cast(self, column: pa.ChunkedArray, type: pa.DataType) -> pa.ChunkedArray:
        if pa.types.is_string(type):
            return column
        return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column).cast(type)
