"""CSV: the scan parses the file once, and writes every value as a string, with an error for each broken row.

Column types are decided afterwards, over all files.
"""

import codecs
import contextlib
import csv
import importlib.util
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
from batchinf.base.text import counted, list_names
from batchinf.source.cache import FileEntry, Scratch
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
    with_twins,
)

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
    prints_fields = True

    def __init__(self, dialect: CsvDialect | None = None, text_columns: Sequence[str] = ()) -> None:
        """See `InputLocation`."""
        self._dialect = dialect or CsvDialect()
        self._text_columns = text_columns

    @property
    def key(self) -> str:
        options = asdict(self._dialect)
        if self._dialect.escapechar is None:  # as before there was one
            del options["escapechar"]
        key = self.name if self._dialect == CsvDialect() else f"{self.name} {json.dumps(options)}"
        return f"{key} by rules 2"

    def for_input(self, input: InputLocation) -> FileFormat:
        return Csv(input.csv, input.text_columns)

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
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
                f"{rows.hint}"
            )
        schema = with_twins(with_remark(types.schema(), "; ".join(rows.remarks)), rows.twins)
        return scratch.entry(hashed.digest.hexdigest(), num_rows, schema, hashed.num_bytes)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        with open_bytes(file) as stream:
            return [dict.fromkeys(_Rows(file, _Hashed(stream), self._dialect).header)]

    def refuse_headless(self, new: Mapping[str, pa.Schema], first: str, columns: pa.Schema) -> None:
        """See `FileFormat`. Redshift, Snowflake, Hive and `split` write parts without a header."""
        others = [name for name, own in new.items() if own.names and not {*own.names} & {*columns.names}]
        if columns.names and others:
            raise InputError(
                f"{list_names(others)}: the first line names no column of {first}, which has "
                f"{list_names(columns.names)}; if it is a row, it would be lost: write the header as the first line of "
                "each file, or narrow the path"
            )

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return _CsvReader(source_file, read_types, self._text_columns)

    def prefix(self, source_file: SourceFile, num_bytes: int) -> tuple[str, int] | None:
        with open_bytes(source_file.file) as stream:
            hashed = _Hashed(stream, num_bytes)
            num_rows = 0
            is_open = False
            for row in _Rows(source_file.file, hashed, self._dialect):
                num_rows += 1
                is_open = is_open or (isinstance(row, str) and _UNENDED in row)
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


def _own_parser() -> Any:
    """The parser of the module `csv`, once more: the limit of its fields would be that of the user's process, too."""
    spec = importlib.util.find_spec("_csv")
    assert spec is not None and spec.loader is not None
    parser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parser)
    parser.field_size_limit(MAX_LINE_BYTES)
    return parser


class _Lines:
    """A number of lines, and the first of them."""

    count = 0
    first = 0

    def add(self, line: int) -> None:
        self.count += 1
        self.first = self.first or line


_PARSER = _own_parser()
_DELIMITER_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # the first line that Excel writes and reads


class _Rows:
    """The rows of a CSV file: a list of fields, or a string with the row's error.

    header: the names of the columns, without those that are left out.
    """

    def __init__(self, file: InputFile, stream: io.RawIOBase, dialect: CsvDialect) -> None:
        buffered = io.BufferedReader(stream, BLOCK_BYTES)
        self._encoding = _encoding(file, buffered, dialect.encoding)
        self._text = io.TextIOWrapper(buffered, self._encoding, _ESCAPES, newline="")
        self.num_chars = 0
        self.line = 0
        self.num_swallowed = 0  # by a quote that opens in `line` and is never closed
        self.hint = ""
        """What to write for the quotes of the last row, if they look like those of Spark."""
        self.remarks: list[str] = []
        """How the file is read, if its own beginning decided that, and at the end what its rows show."""
        self.twins: tuple[str, ...] = ()
        """Names that several columns have. These columns are left out."""
        self._wrong = ""
        self._is_new_row = True
        self._lines_of_row: list[str] = []
        self._escape = dialect.escapechar
        # Before another character, the sign is text. The parser would take it away, so it gets two of them.
        signs = re.escape(f"{self._escape}{dialect.quotechar}")
        self._escaped = (
            re.compile(f"({re.escape(self._escape)}[{signs}])|{re.escape(self._escape)}") if self._escape else None
        )
        self._head = self._read_head()
        said = self._take_delimiter_line()
        quoting = csv.QUOTE_MINIMAL if dialect.quotechar else csv.QUOTE_NONE
        form: dict[str, Any] = {"quoting": quoting, "quotechar": dialect.quotechar or None, "strict": True,
                                "escapechar": self._escape}  # fmt: skip
        usual = said or (_TAB if _TABS in file.name.lower() else ",")
        head = list(map(self._with_text_escapes, self._head))
        delimiter = dialect.delimiter or said or _delimiter(head, usual, form)
        if said is not None and said != dialect.delimiter:
            followed = "as" if delimiter == said else "but input.csv.delimiter has another one than"
            self.remarks.append(f"its fields are separated by {_sign(delimiter)}, {followed} its first line says")
        elif delimiter not in (dialect.delimiter, usual):
            self.remarks.append(f"its fields are separated by {_sign(delimiter)}, as its first rows show")
        if self._encoding not in (dialect.encoding, _UTF8):
            self.remarks.append("it is UTF-16, as its first bytes show")
        self._form = {"delimiter": delimiter, **form}
        self._escaped_quote = (self._escape or "\\") + dialect.quotechar
        self._reader = _PARSER.reader(self._lines(), **self._form)
        self._full_header = self._read_header(file.name)
        self.header = self._chosen_names(file.name)
        self._places = [place for place, name in enumerate(self._full_header) if name in self.header]

    def _take_delimiter_line(self) -> str | None:
        """The delimiter that the first line of the file names, as `sep=;`. The line is no row."""
        first = self._head[0].removeprefix("\ufeff").rstrip("\r\n") if self._head else ""
        match = _DELIMITER_LINE.fullmatch(first)
        if match is None:
            self._num_skipped = 0
            return None
        self._num_skipped = 1
        del self._head[0]
        return match[1]

    def _read_header(self, name: str) -> list[str]:
        try:
            header: list[str] = next(filter(None, self._reader), [])
        except _PARSER.Error as error:
            raise InputError(f"{name}: its header is not CSV: {error}") from None
        if self._wrong:
            raise InputError(f"{name}: its header is {self._wrong}; for a new spec, `init` takes --encoding")
        return header

    def _chosen_names(self, name: str) -> list[str]:
        """The header without columns that have no name, as spreadsheets write them, and without those of one name."""
        header = self._full_header
        num_nameless = sum(not column.strip() for column in header)
        if num_nameless:
            are = "column without a name is" if num_nameless == 1 else "columns without a name are"
            self.remarks.append(f"{num_nameless} {are} left out")
        self.twins = tuple(dict.fromkeys(column for column in header if column.strip() and header.count(column) > 1))
        if self.twins:
            self.remarks.append(f"its header has {list_names(self.twins)} more than once: these columns are left out")
        chosen = [column for column in header if column.strip() and column not in self.twins]
        if header and not chosen:
            refuse_twins([column for column in header if column.strip()], name)
            raise InputError(f"{name}: its header has no name of a column; name the columns in the first line")
        return chosen

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
            line = self._with_text_escapes(line)
            self._lines_of_row.append(line)
            yield line

    def _with_text_escapes(self, line: str) -> str:
        if self._escape is None or self._escaped is None or self._escape not in line:
            return line
        return self._escaped.sub(lambda sign: sign[0] if sign[1] else 2 * sign[0], line)

    def __iter__(self) -> Iterator[list[str] | str]:
        width = len(self._full_header)
        has_all = len(self.header) == width
        headers = _Lines()
        empty = _Lines()
        num_empty = 0  # before the last row: empty lines at the end are no rows in any sheet
        while True:
            line = self._num_skipped + self._reader.line_num + 1
            self._wrong = ""
            self._is_new_row = True
            self._lines_of_row.clear()
            try:
                row = next(self._reader)
            except StopIteration:
                self._remark_rows(headers, empty, num_empty)
                return
            except _PARSER.Error as error:
                if str(error) == _UNENDED:
                    self.line = line
                    self.num_swallowed = self._num_skipped + self._reader.line_num - line
                yield from self._broken(line, f"not CSV: {error}")
                continue
            if row:
                num_empty = empty.count
            else:
                empty.add(line)
            if self._wrong:
                yield f"line {line}: {self._wrong}"
            elif len(row) == width:
                if row == self._full_header:
                    headers.add(line)
                yield row if has_all else [row[place] for place in self._places]
            elif row:
                yield from self._broken(line, f"{len(row)} fields where the header has {width}")

    def _remark_rows(self, headers: "_Lines", empty: "_Lines", num_empty: int) -> None:
        if headers.count:
            self.remarks.append(
                f"{counted(headers.count, 'row')} like the header, line {headers.first:,} first, as in files that were "
                "joined; such a row runs like any other, so remove it, or leave it out by input.where"
            )
        if num_empty and len(self._full_header) == 1:
            self.remarks.append(
                f"{counted(num_empty, 'line')} without a field, line {empty.first:,} first: an empty line is no row, "
                'so row_index does not fit the lines of a sheet; write "" there to make it a row'
            )

    def _broken(self, line: int, why: str) -> Iterator[str]:
        """The error of a row that begins in this line, and one for each further line of it that looks like a row."""
        has_escapes = any(self._escaped_quote in text for text in self._lines_of_row) and self._escape is None
        remedy = f"; if {self._escaped_quote} in it is a quote, write `input.csv: {{escapechar: '\\'}}`"
        self.hint = remedy if has_escapes and self._form["quotechar"] else ""
        last = line + len(self._lines_of_row) - 1
        yield f"{f'line {line}' if last == line else f'lines {line} to {last}'}: {why}{self.hint}"
        for number, text in enumerate(self._lines_of_row[1:], line + 1):
            if self._is_row(text):
                yield f"line {number}: it is inside the row that begins in line {line}, whose quotes do not fit"

    def _is_row(self, line: str) -> bool:
        """Whether a line has as many fields as the header, and no quote that is left open."""
        line = line.replace(self._escaped_quote, "")
        try:
            [row] = _PARSER.reader([line], **self._form)
        except (ValueError, _PARSER.Error):
            return False
        return len(row) == len(self._full_header) and line.count(self._form["quotechar"] or "\n") % 2 == 0


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


def _sign(delimiter: str) -> str:
    return _DELIMITERS.get(delimiter) or repr(delimiter)


def _delimiter(head: Sequence[str], usual: str, form: Mapping[str, Any]) -> str:
    """The delimiter of a file. Another than the usual one only if it alone makes header and first row alike."""
    fitting = [delimiter for delimiter in _DELIMITERS if _fits(head, delimiter, form)]
    return usual if usual in fitting or len(fitting) != 1 else fitting[0]


def _fits(head: Sequence[str], delimiter: str, form: Mapping[str, Any]) -> bool:
    """Whether the header has several fields and the first row as many. Later rows may be appended, so do not count."""
    try:
        rows = list(itertools.islice(filter(None, _PARSER.reader(head, delimiter=delimiter, **form)), 2))
    except _PARSER.Error:
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

    def __init__(self, source_file: SourceFile, read_types: pa.Schema, text_columns: Sequence[str]) -> None:
        """read_types: see `FileFormat.reader`. text_columns: see `InputLocation`."""
        super().__init__(source_file)
        # A column has a number type only if all files have numbers in it.
        self._columns = {name: read_types.field(name) for name in self._columns}
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
