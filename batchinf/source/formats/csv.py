"""CSV: the scan parses the file once, and writes every value as a string, with an error for each broken row.

Column types are decided afterwards, over all files.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.base.text import counted
from batchinf.source.cache import FileEntry, FileFindings, Scratch
from batchinf.source.files import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    LINE_ENDS,
    MAX_LINE_BYTES,
    CsvDialect,
    InputFile,
    InputLocation,
    not_utf8,
    open_bytes,
    refuse_utf16,
)
from batchinf.source.formats.arrow import BATCH_BYTES, BATCH_ROWS, ArrowReader, spool
from batchinf.source.formats.base import FileFormat, Reader, Record, SourceFile
from batchinf.source.types import (
    CsvTypes,
    MixedTypes,
    WrittenNumber,
    as_written,
    is_as_written,
    is_utf8,
    refuse_twins,
    with_remark,
)

_FIRST_RULES = 1  # of jobs that print the number of a field, not the field; see `JobSpec.rules`
ERRORS_COLUMN = "batchinf:error"  # the spool's last column: why a row could not be read
_UNENDED = "unexpected end of data"  # the error of Python's `csv` for an open quote at the end
_TAB = "\t"
_TABS = ".tsv"  # the ending of a file with tabs
_DELIMITERS = {",": "commas", ";": "semicolons", _TAB: "tabs", "|": "vertical bars"}  # that are tried
_HEAD_CHARS = 1 << 16  # in which the header and the first row are looked for
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_REMEDY = "write `input.csv: {encoding: cp1252}`"


class Csv(FileFormat):
    """CSV with a header; rows may be appended to a file."""

    name = "csv"
    endings = (".csv", _TABS)
    mixed_types = MixedTypes.STRING

    def __init__(
        self, dialect: CsvDialect | None = None, text_columns: Sequence[str] = (), rules: int | None = None
    ) -> None:
        """See `InputLocation`."""
        self._dialect = dialect or CsvDialect()
        self._text_columns = text_columns
        self.prints_fields = rules != _FIRST_RULES

    @property
    def key(self) -> str:
        is_default = self._dialect == CsvDialect()
        return self.name if is_default else f"{self.name} {json.dumps(asdict(self._dialect))}"

    def for_input(self, input: InputLocation) -> FileFormat:
        return Csv(input.csv, input.text_columns, input.rules)

    def scan(self, file: InputFile, scratch: Scratch) -> FileFindings:
        with open_bytes(file) as stream:
            hashed = _Hashed(stream)
            rows = _Rows(file, hashed, self._dialect)
            types = CsvTypes(rows.header)
            schema = pa.schema([(name, pa.string()) for name in (*rows.header, ERRORS_COLUMN)])
            num_rows = spool(_batches(rows, types, self._dialect.null_values), schema, scratch)
        if rows.num_swallowed:
            raise InputError(
                f"{file.name}: a quote opens in line {rows.line:,} and is never closed, so that row would have the "
                f"next {counted(rows.num_swallowed, 'line')} in it: close it, or write a quote that is text twice"
            )
        schema = with_remark(types.schema(), rows.remark)
        return FileFindings(hashed.digest.hexdigest(), num_rows, schema, hashed.num_bytes)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        with open_bytes(file) as stream:
            return [dict.fromkeys(_Rows(file, _Hashed(stream), self._dialect).header)]

    def reader(self, source_file: SourceFile) -> Reader:
        return _CsvReader(source_file, self._text_columns, prints_fields=self.prints_fields)

    def prefix(self, file: InputFile, entry: FileEntry, num_bytes: int, cache: Folder) -> tuple[str, int] | None:
        with open_bytes(file) as stream:
            hashed = _Hashed(stream, num_bytes)
            num_rows = 0
            is_open = False
            for row in _Rows(file, hashed, self._dialect):
                num_rows += 1
                is_open = isinstance(row, str) and _UNENDED in row
            end = hashed.end.strip(b"\0")  # in UTF-16 a null byte stands before or after the line end
            is_whole = not end or end[-1:] in b"\r\n" or stream.read(2).startswith(LINE_ENDS)
            if not is_whole or is_open or hashed.num_bytes != num_bytes:
                return None
            return hashed.digest.hexdigest(), num_rows


def _batches(rows: "_Rows", types: CsvTypes, null_values: Sequence[str]) -> Iterator[pa.RecordBatch]:
    nulls = pa.array(null_values, pa.string())
    batch: list[list[str] | str] = []
    num_chars = rows.num_chars
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS or rows.num_chars - num_chars > BATCH_BYTES:
            yield _batch(batch, rows.header, types, nulls)
            batch = []
            num_chars = rows.num_chars
    if batch:
        yield _batch(batch, rows.header, types, nulls)


def _batch(
    rows: Sequence[list[str] | str], header: Sequence[str], types: CsvTypes, nulls: pa.StringArray
) -> pa.RecordBatch:
    nothing = [None] * len(header)
    fields = zip(*(nothing if isinstance(row, str) else row for row in rows), strict=True)
    columns = [pa.array(values, pa.string()) for values in fields]
    if len(nulls):
        columns = [pc.if_else(pc.is_in(column, nulls), pa.scalar(None, pa.string()), column) for column in columns]
    types.add(dict(zip(header, columns, strict=True)))
    errors = pa.array([row if isinstance(row, str) else None for row in rows], pa.string())
    return pa.RecordBatch.from_arrays([*columns, errors], names=[*header, ERRORS_COLUMN])


class _Hashed(io.RawIOBase):
    """A stream that hashes what is read through it. num_bytes: read so far. limit: it ends after so many bytes."""

    def __init__(self, stream: BinaryIO, limit: int | None = None) -> None:
        self._stream = stream
        self._limit = limit
        self.num_bytes = 0
        self.end = b""  # the last two bytes
        self.digest = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = len(buffer) if self._limit is None else min(len(buffer), self._limit - self.num_bytes)
        block = self._stream.read(num_bytes)
        self.num_bytes += len(block)
        self.end = (self.end + block[-2:])[-2:]
        self.digest.update(block)
        buffer[: len(block)] = block
        return len(block)


class _Rows:
    """The rows of a CSV file: a list of fields, or a string with the row's error."""

    remark = ""
    """How the file is read, if its own beginning decided that."""

    def __init__(self, file: InputFile, stream: io.RawIOBase, dialect: CsvDialect) -> None:
        csv.field_size_limit(MAX_LINE_BYTES)
        buffered = io.BufferedReader(stream, BLOCK_BYTES)
        self._encoding = _encoding(file, buffered, dialect.encoding)
        self._text = io.TextIOWrapper(buffered, self._encoding, _ESCAPES, newline="")
        self.num_chars = 0
        self.line = 0
        self.num_swallowed = 0  # by a quote that opens in `line` and is never closed
        self._wrong = ""
        self._is_new_row = True
        self._head = self._read_head()
        quoting = csv.QUOTE_MINIMAL if dialect.quotechar else csv.QUOTE_NONE
        form: dict[str, Any] = {"quoting": quoting, "quotechar": dialect.quotechar or None, "strict": True}
        usual = _TAB if _TABS in file.name.lower() else ","
        delimiter = dialect.delimiter or _delimiter(self._head, usual, form)
        if delimiter not in (dialect.delimiter, usual):
            self.remark = f"its fields are separated by {_DELIMITERS[delimiter]}, as its first rows show"
        elif self._encoding not in (dialect.encoding, _UTF8):
            self.remark = "it is UTF-16, as its first bytes show"
        self._reader = csv.reader(self._lines(), delimiter=delimiter, **form)
        self.header = self._read_header(file.name)

    def _read_header(self, name: str) -> list[str]:
        try:
            header = next(filter(None, self._reader), [])
        except csv.Error as error:
            raise InputError(f"{name}: its header is not CSV: {error}") from None
        if self._wrong:
            raise InputError(f"{name}: its header is {self._wrong}; for a new spec, `init` takes --encoding")
        refuse_twins(header, name)
        return header

    def _read_head(self) -> list[str]:
        lines: list[str] = []
        num_chars = 0
        while num_chars < _HEAD_CHARS and (line := self._text.readline(MAX_LINE_BYTES)):
            lines.append(line)
            num_chars += len(line)
        return lines

    def _lines(self) -> Iterator[str]:
        for line in itertools.chain(self._head, iter(lambda: self._text.readline(MAX_LINE_BYTES), "")):
            self.num_chars += len(line)
            if self._is_new_row:  # files with a byte order mark were joined
                line = line.removeprefix("\ufeff")
                self._is_new_row = False
            if not (line.isascii() or is_utf8(line)):  # other bytes are decoded to lone surrogates
                self._wrong = self._wrong or _why_not_text(line, self._encoding)
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


def seems_cp1252(file: InputFile) -> bool:
    """Whether nearly all non-ASCII text of a file is in cp1252, as spreadsheets on Windows write it. For a suggestion.

    Sequences that are valid in UTF-8 speak against it: many of them are damaged UTF-8, a few are text that was decoded
    wrongly before it was saved, such as `Ã¼`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    num_bytes = 0  # that are not UTF-8
    num_valid = 0
    with open_bytes(file) as stream:
        while block := stream.read(BLOCK_BYTES):
            text = decoder.decode(block)
            num_bytes += len(_NOT_UTF8.findall(text))
            num_valid += len(_WIDE_CHARACTER.findall(text))
            if "\0" in text or _NOT_CP1252.search(text):
                return False
    return num_bytes > 0 and num_valid <= _MOST_VALID * num_bytes


_MOST_VALID = 0.2  # of the number of bytes that are not UTF-8
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes, as `surrogateescape` decodes them
# Of two bytes that are unlikely side by side in cp1252, or of three.
_WIDE_CHARACTER = re.compile("[\u00c0-\u00ff\u0140-\u017f\u2000-\ud7ff\ue000-\uffff]")
_NOT_CP1252 = re.compile("[\udc81\udc8d\udc8f\udc90\udc9d]")
_UTF8 = "utf-8-sig"
_ESCAPES = "batchinf.escapes"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Decodes each wrong byte to a lone surrogate, as `surrogateescape` does, but in any encoding."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(chr(0xDC00 + byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_ESCAPES, _escaped)


def _encoding(file: InputFile, stream: "io.BufferedReader[Any]", of_spec: str | None) -> str:
    head = stream.peek(4)[:4]
    if of_spec is not None:
        _refuse_other_mark(file, head, of_spec)
        return of_spec
    if head.startswith(_WIDE_MARKS):
        return "utf-16"
    refuse_utf16(file, head, "write `input.csv: {encoding: utf-16-le}` (or utf-16-be)")
    return _UTF8


def _refuse_other_mark(file: InputFile, head: bytes, encoding: str) -> None:
    """Raise InputError if a file begins with the mark of UTF-8, but is to be read in an encoding of one byte each."""
    with contextlib.suppress(UnicodeDecodeError):
        if head.startswith(BYTE_ORDER_MARK) and not head[:3].decode(encoding).strip("\ufeff"):
            return
    if head.startswith(BYTE_ORDER_MARK):
        raise InputError(
            f"{file.name} begins with the mark of UTF-8, but input.csv.encoding is {encoding}; leave out the encoding, "
            "or remove the mark if the rest of the file is in that encoding"
        )


def _delimiter(head: Sequence[str], usual: str, form: Mapping[str, Any]) -> str:
    """The delimiter of a file. Another than the usual one only if it alone makes header and first row alike."""
    fitting = [delimiter for delimiter in _DELIMITERS if _fits(head, delimiter, form)]
    return usual if usual in fitting or len(fitting) != 1 else fitting[0]


def _fits(head: Sequence[str], delimiter: str, form: Mapping[str, Any]) -> bool:
    """Whether the header has several fields and the first row as many. Later rows may be appended, so do not count."""
    try:
        rows = list(itertools.islice(filter(None, csv.reader(head, delimiter=delimiter, **form)), 2))
    except csv.Error:
        return False
    return len(rows) == 2 and len(rows[0]) == len(rows[1]) > 1


def _why_not_text(line: str, encoding: str) -> str:
    if codecs.lookup(encoding).name not in ("utf-8", _UTF8):
        wrong = next(char for char in line if "\udc00" <= char <= "\udcff")
        return f"not {encoding}: byte 0x{ord(wrong) & 0xFF:02x}; set the file's encoding in `input.csv.encoding`"
    try:
        line.encode(errors="surrogateescape").decode()
    except UnicodeDecodeError as error:
        return not_utf8(error, _REMEDY)
    raise AssertionError("the line is UTF-8")


class _CsvReader(ArrowReader):
    """The spool of a CSV file: every value as a string, and the errors of broken rows."""

    def __init__(self, source_file: SourceFile, text_columns: Sequence[str], *, prints_fields: bool) -> None:
        """text_columns: see `InputLocation`. prints_fields: see `FileFormat`."""
        super().__init__(source_file)
        # A column has a number type only if all files have numbers in it.
        self._columns = {name: source_file.read_types.field(name) for name in self._columns}
        if prints_fields:
            self._columns |= {name: pa.field(name, pa.string()) for name in text_columns if name in self._columns}
            self._columns = {name: as_written(field) for name, field in self._columns.items()}

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        errors = self._slice(start, stop, [ERRORS_COLUMN]).column(0).to_pylist()
        records = super().records(start, stop, columns)
        for name, field in self._columns.items():
            if is_as_written(field) and (columns is None or name in columns):
                for values, _ in records:
                    values[name] = None if values[name] is None else WrittenNumber(values[name])
        return [
            record if error is None else ({}, f"{self._name} {error}")
            for record, error in zip(records, errors, strict=True)
        ]

    def _cast(self, column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
        if pa.types.is_string(field.type) and not is_as_written(field):
            return column
        return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column).cast(field.type)
