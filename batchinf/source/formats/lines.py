"""Formats with one row per line: JSON lines, OpenAI batch files and text."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.text import shorten
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.digests import changed
from batchinf.source.files import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    LINE_ENDS,
    MAX_LINE_BYTES,
    InputFile,
    blocks,
    compression,
    not_utf8,
    refuse_utf16,
    stamp_of,
)
from batchinf.source.formats.base import SAMPLED_ROWS, FileFormat, Reader, Record, SourceFile
from batchinf.source.types import JsonTypes, Lost, MixedTypes, is_json_column, is_utf8

WHITESPACE = b" \t\r\n"  # of JSON
FIRST_LINES = 100  # that are looked at before the scan
_FEW_LINES = 64  # in a block of at least a megabyte: their ends are found faster one by one


# The value of `input.format` for OpenAI's batch files, which are JSON lines.
OPENAI = "openai"
BATCH_COLUMNS = ("custom_id", "method", "url", "body")  # an input that has them all is a batch file


class LineFormat(FileFormat):
    """A format whose files may grow by appended lines."""

    def prefix(self, source_file: SourceFile, num_bytes: int) -> tuple[str, int] | None:
        digest = xxhash.xxh3_128()
        rest = num_bytes
        end = b""
        with open(source_file.artifact("lines") or source_file.file.path, "rb") as stream:
            while rest and (block := stream.read(min(rest, BLOCK_BYTES))):
                digest.update(block)
                rest -= len(block)
                end = block[-1:]
            if rest or (end not in (b"", b"\n") and not stream.read(2).startswith(LINE_ENDS)):
                return None
        return digest.hexdigest(), int(np.searchsorted(source_file.numbers("offsets")[:-1], num_bytes))

    def sample(self, file: InputFile, num_runs: int, seed: int, to: pathlib.Path) -> float | None:
        """See `FileFormat`. The places are bytes, so longer lines come a little more often."""
        if file.is_remote or compression(file):
            return None
        draw = random.Random(seed)
        size = file.stamp()[0]
        lines = []
        with open(file.path, "rb") as stream:
            for number in range(num_runs):
                stream.seek(draw.randrange(number * size // num_runs, (number + 1) * size // num_runs + 1))
                stream.readline(MAX_LINE_BYTES)  # the rest of a line
                run = [line for line in itertools.islice(stream, SAMPLED_ROWS) if line.strip(WHITESPACE)]
                lines += [line if line.endswith(b"\n") else line + b"\n" for line in run]
        num_bytes = to.write_bytes(b"".join(lines))
        return size / (num_bytes / len(lines)) if lines else None


# -- the scan --------------------------------------------------------------------------------------------------------


def index_lines(
    file: InputFile, scratch: Scratch, on_lines: Callable[[bytes, int], None], *, has_blank_rows: bool
) -> tuple[str, int, int]:
    """Make the artifacts; returns content hash, number of rows and number of bytes.

    on_lines: called with blocks of whole lines, each with the number of rows before it.
    """
    offsets = scratch.create("offsets")
    blanks = scratch.create("blanks")
    copy = scratch.create("lines") if file.is_remote or compression(file) else None
    digests = None if copy else scratch.create("digests")
    digest = xxhash.xxh3_128()
    num_rows = 0
    size = 0

    def content() -> Iterator[bytes]:
        nonlocal size
        for block in blocks(file):
            if not size:
                refuse_utf16(file, block[:4])
            size += len(block)
            digest.update(block)
            if copy:
                copy.write(block)
            if digests:
                digests.write(xxhash.xxh3_64_digest(block))
            yield block

    for offset, run in _whole_lines(content()):
        starts, is_row = _line_starts(run, has_blank_rows)
        offsets.write((starts[is_row] + offset).astype("<i8").tobytes())
        blanks.write((np.cumsum(is_row)[~is_row] + num_rows).astype("<i8").tobytes())
        if run is not None:
            on_lines(run, num_rows)
        num_rows += int(is_row.sum())
    offsets.write(np.array([size], "<i8").tobytes())
    return digest.hexdigest(), num_rows, size


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Blocks of whole lines with their offsets, without a byte order mark; None is a line that is too long."""
    offset = 0
    pieces: list[bytes] = []  # of a line that is not whole yet
    num_bytes = 0  # in them
    is_skipping = False
    for block in blocks:
        if offset == num_bytes == 0 and block.startswith(BYTE_ORDER_MARK):
            offset = len(BYTE_ORDER_MARK)
            block = block[offset:]
        if is_skipping:
            rest = block.find(b"\n") + 1
            is_skipping = not rest
            offset += rest or len(block)
            block = block[rest:] if rest else b""
        cut = block.rfind(b"\n") + 1
        if cut:
            run = b"".join((*pieces, block[:cut]))
            yield offset, run
            offset += len(run)
            pieces = []
            num_bytes = 0
        pieces.append(block[cut:])
        num_bytes += len(block) - cut
        if num_bytes > MAX_LINE_BYTES:
            yield offset, None
            offset += num_bytes
            pieces = []
            num_bytes = 0
            is_skipping = True
    if num_bytes:
        yield offset, b"".join(pieces)


def _line_ends(run: bytes, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    ends: list[int] = []
    end = run.find(b"\n")
    while end >= 0:
        if len(ends) == _FEW_LINES:
            return np.flatnonzero(data == ord("\n"))
        ends.append(end)
        end = run.find(b"\n", end + 1)
    return np.array(ends, np.int64)


def _line_starts(run: bytes | None, has_blank_rows: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The offsets of the lines in a block, and which lines are rows."""
    if run is None:
        return np.zeros(1, np.int64), np.ones(1, np.bool_)
    data = np.frombuffer(run, np.uint8)
    ends = _line_ends(run, data)
    starts = np.concatenate(([0], ends[:-1] + 1 if run.endswith(b"\n") else ends + 1))
    is_row = np.ones(len(starts), np.bool_)
    if not has_blank_rows:
        first = data[starts]
        is_row &= first != ord("\n")
        for line in np.flatnonzero((first == ord("\r")) | (first == ord(" ")) | (first == ord("\t"))):
            end = ends[line] if line < len(ends) else len(run)
            is_row[line] = bool(run[starts[line] : end].strip(WHITESPACE))
    return starts, is_row


# -- reading ---------------------------------------------------------------------------------------------------------


# The scan writes the xxh3-64 of each block that it reads; the last one is shorter.
_DIGEST_BYTES = BLOCK_BYTES


class LineReader:
    """Rows by the offsets of their lines.

    If the file is not as in the scan, the blocks that are read are compared with their digests. Bytes after those that
    were scanned do not count: rows may be appended.
    """

    def __init__(
        self,
        source_file: SourceFile,
        split: Callable[[bytes], list[bytes]],
        parse: Callable[[bytes], dict[str, object]],
        unit: str = "line",
    ) -> None:
        """split: the lines of whole rows, one for each row. parse: a row's values; ValueError says why it has none.

        unit: of the file's rows, for errors.
        """
        self._split = split
        self._parse = parse
        self._unit = unit
        self._name = source_file.name
        self._offsets = source_file.numbers("offsets")
        self._blanks = source_file.numbers("blanks")
        copy = source_file.artifact("lines")
        digests = source_file.artifact("digests")
        self._digests: bytes | None = None  # of a copy in the cache, which does not change
        if copy is None:
            self._digests = b"" if digests is None else pathlib.Path(digests).read_bytes()
        self._trusted = source_file.entry.stamp
        self._num_bytes = source_file.entry.num_bytes
        self._file = open(copy or source_file.file.path, "rb", buffering=0)  # noqa: SIM115

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        return [self._record(start + i, line, columns) for i, line in enumerate(self._lines(start, stop))]

    def _record(self, row: int, line: bytes | None, columns: Sequence[str] | None) -> Record:
        try:
            if line is None:
                raise ValueError(f"longer than {MAX_LINE_BYTES:,} bytes")
            values = self._parse(line)
        except ValueError as error:
            num_blanks = int(np.searchsorted(self._blanks, row, side="right"))
            return {}, f"{self._name} {self._unit} {row + num_blanks + 1}: {error}"
        return (values if columns is None else {name: values[name] for name in columns if name in values}), None

    def _lines(self, start: int, stop: int) -> Iterator[bytes | None]:
        """The rows' lines without line ends; None for a line that is too long. Holds at most 64 MiB at a time."""
        first = int(self._offsets[start])
        last = int(self._offsets[stop])
        if last - first > MAX_LINE_BYTES and stop - start > 1:
            middle = (start + stop) // 2
            yield from self._lines(start, middle)
            yield from self._lines(middle, stop)
            return
        data = self._read(first, min(last - first, MAX_LINE_BYTES + 1))
        if b"\n" not in data and len(data) > MAX_LINE_BYTES:
            yield None
            return
        lines = self._split(data)
        if len(lines) != stop - start:
            raise changed(self._name)
        yield from lines

    def _read(self, start: int, num_bytes: int) -> bytes:
        """These bytes. Raises DriftError if they are not those of the scan."""
        data = os.pread(self._file.fileno(), num_bytes, start)
        if self._digests is None or stamp_of(os.fstat(self._file.fileno())) == self._trusted:
            return data
        first = start // _DIGEST_BYTES * _DIGEST_BYTES
        last = min(-(-(start + num_bytes) // _DIGEST_BYTES) * _DIGEST_BYTES, self._num_bytes)
        data = os.pread(self._file.fileno(), last - first, first)
        for place in range(0, last - first, _DIGEST_BYTES):
            number = (first + place) // _DIGEST_BYTES
            digest = xxhash.xxh3_64_digest(memoryview(data)[place : place + _DIGEST_BYTES])
            if digest != self._digests[8 * number : 8 * number + 8]:
                raise changed(self._name)
        return data[start - first : start - first + num_bytes]

    def table(self, start: int, stop: int, fields: pa.Schema, lost: Lost | None) -> pa.Table:
        """See `Reader`. The types hold all values but text with lone surrogates."""
        records = [values for values, _ in self.records(start, stop, fields.names)]
        arrays = [
            self._to_arrow(start, [record.get(field.name) for record in records], field, lost) for field in fields
        ]
        return pa.Table.from_arrays(arrays, schema=fields)

    def _to_arrow(self, start: int, values: list[Any], field: pa.Field, lost: Lost | None) -> pa.Array:
        if is_json_column(field):
            values = [value if value is None or isinstance(value, str) else _json_text(value) for value in values]
        try:
            return pa.array(values, field.type)
        except (pa.ArrowException, UnicodeError, OverflowError):
            fitted = []
            for row, value in enumerate(values, start):
                reasons = list[str]()
                fitted.append(_fit(value, field.type, reasons))
                if reasons and lost is not None:
                    lost[row] = f"{self._name}: column {field.name!r} has {reasons[0]}"
            return pa.array(fitted, field.type)

    def close(self) -> None:
        self._file.close()


def _json_text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if is_utf8(text) else json.dumps(value)  # ASCII has an escape for a lone surrogate


def _fit_text(value: str, reasons: list[str]) -> str:
    if not is_utf8(value):
        reasons.append(f"text that is not valid Unicode: {value[:100]!a} has a lone surrogate")
    return value.encode(errors="replace").decode()


def _fit(value: Any, type: pa.DataType, reasons: list[str]) -> Any:
    """The value made acceptable to Arrow: without lone surrogates; else null. reasons: why it has changed."""
    if pa.types.is_string(type) and isinstance(value, str):
        return _fit_text(value, reasons)
    if pa.types.is_list(type) and isinstance(value, list):
        return [_fit(item, type.value_type, reasons) for item in value]
    if pa.types.is_struct(type) and isinstance(value, dict):
        return {field.name: _fit(value.get(field.name), field.type, reasons) for field in type}
    try:
        return pa.scalar(value, type).as_py()
    except (pa.ArrowException, OverflowError):
        reasons.append(f"{str(value)[:100]!a}, which {type}, the column's type, cannot hold")
        return None


_JSON_NAMES = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number",
               NoneType: "null"}  # fmt: skip


class JsonLines(LineFormat):
    """Lines of JSON objects. A broken line is an error row and does not count for the columns' types."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson")
    mixed_types = MixedTypes.JSON

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        types = JsonTypes(scratch)
        on_lines = lambda run, first_row: add_types(types, split_lines(run), first_row)  # noqa: E731
        content_hash, num_rows, num_bytes = index_lines(file, scratch, on_lines, has_blank_rows=False)
        return scratch.entry(content_hash, num_rows, types.schema(), num_bytes)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        run = next((run for _, run in _whole_lines(blocks(file)) if run is not None), b"")
        return json_records(split_lines(run)[:FIRST_LINES])

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return LineReader(source_file, split_lines, parse_json)


def add_types(types: JsonTypes, lines: Sequence[bytes], first_row: int) -> None:
    """Add the types of these rows, and a remark on the first object that has a key twice.

    first_row: the number of rows before them.
    """
    keys: list[str] = []
    records = json_records(lines, _JSON if types.remark else _noting_twice(keys))
    types.add(records, lambda: [first_row + i for i, line in enumerate(lines) if json_records([line])])
    if keys:
        row = first_row + _first_with_twice(lines)
        types.remark = f"row {row:,} has the key {shorten(repr(keys[0]), 60)} twice; of equal keys, the last one counts"


def split_lines(run: bytes) -> list[bytes]:
    """The lines of a block that are not blank, without their ends."""
    return [line for line in run.split(b"\n") if line.strip(WHITESPACE)]


class _TooLarge(ValueError):
    """A number that no float holds. Python's `json` would make an infinity of it."""


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _TooLarge(f"the number {shorten(digits, 40)} is larger than any 64-bit float; write it as text")
    return number


# Only floats pay for this: text is parsed as fast as by `json.loads`.
_JSON = json.JSONDecoder(parse_float=_finite)


def _noting_twice(keys: list[str]) -> json.JSONDecoder:
    """A decoder that adds a key to `keys` if one object has it twice: the first one of each such object."""

    def record_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
        record = dict(pairs)
        if len(record) != len(pairs):
            names = [key for key, _ in pairs]
            keys.append(next(key for place, key in enumerate(names) if key in names[:place]))
        return record

    # One call for each object takes a third longer than none.
    return json.JSONDecoder(parse_float=_finite, object_pairs_hook=record_of)


def _first_with_twice(lines: Sequence[bytes]) -> int:
    """The place of the first of these lines that has an object with a key twice; one of them has."""
    keys: list[str] = []
    decoder = _noting_twice(keys)
    for place, line in enumerate(lines):
        json_records([line], decoder)
        if keys:
            return place
    raise LookupError("none of the lines has a key twice")


def parse_json(line: bytes, decoder: json.JSONDecoder = _JSON) -> dict[str, object]:
    """The record of a line; `ValueError` says why it is none."""
    try:
        record = decoder.decode(line.removeprefix(BYTE_ORDER_MARK).decode())
    except _TooLarge:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")  # some of Python's reasons end with it
        raise ValueError(f"not JSON: {reason} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_JSON_NAMES[type(record)]}; write {{...}} on each line")
    return record


def json_records(lines: Sequence[bytes], decoder: json.JSONDecoder = _JSON) -> list[dict[str, object]]:
    """The records of the lines, without broken lines."""
    if len(lines) > 1:
        try:  # one call for many lines is three times as fast
            records = decoder.decode(f"[{b','.join(lines).decode()}]")
            if len(records) == len(lines) and set(map(type, records)) == {dict}:
                return cast("list[dict[str, object]]", records)
        except (ValueError, RecursionError):
            pass
        middle = len(lines) // 2
        return json_records(lines[:middle], decoder) + json_records(lines[middle:], decoder)
    with contextlib.suppress(ValueError):
        return [parse_json(line, decoder) for line in lines]
    return []


_COLUMN = "text"


class TextLines(LineFormat):
    """Lines of text; an empty line is a row too."""

    name = "text"
    endings = (".txt", ".text")
    mixed_types = MixedTypes.STRING

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        content_hash, num_rows, num_bytes = index_lines(file, scratch, lambda run, row: None, has_blank_rows=True)
        return scratch.entry(content_hash, num_rows, pa.schema([(_COLUMN, pa.string())]), num_bytes)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        return [{_COLUMN: None}]

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return LineReader(source_file, _split_text, _parse_text)


def _split_text(data: bytes) -> list[bytes]:
    return data.removesuffix(b"\n").split(b"\n")


def _parse_text(line: bytes) -> dict[str, object]:
    try:
        return {_COLUMN: line.removeprefix(BYTE_ORDER_MARK).removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
