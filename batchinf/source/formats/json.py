"""JSON files: one array of objects, or objects one after another. The scan copies each of them to a line."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.files import BLOCK_BYTES, BYTE_ORDER_MARK, MAX_LINE_BYTES, InputFile, blocks, grouped, refuse_utf16
from batchinf.source.formats.base import FileFormat, Reader, SourceFile
from batchinf.source.formats.lines import (
    FIRST_LINES,
    WHITESPACE,
    LineReader,
    add_types,
    json_records,
    parse_json,
    split_lines,
)
from batchinf.source.types import JsonTypes, MixedTypes

# Up to the next sign that may begin or end a value, without those in texts: within a value, a comma does not count.
_OUTSIDE, _WITHIN = (
    re.compile(rb'(?>[^"%b]+|"(?>[^"\\]+|\\.)*+")*+([%b])' % (signs, signs), re.DOTALL)
    for signs in (rb"\]\[{},", rb"\]\[{}")
)


class Json(FileFormat):
    """One array of objects, or objects one after another. A value that is no object is an error row."""

    name = "json"
    endings = (".json",)
    mixed_types = MixedTypes.JSON
    is_often_beside_data = True

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        copy = scratch.create("lines")
        offsets = scratch.create("offsets")
        types = JsonTypes(scratch)
        digest = xxhash.xxh3_128()
        size = 0
        num_rows = 0
        for lines in grouped(_values(_hashed(blocks(file), digest), file), len, BLOCK_BYTES):
            ends = size + np.cumsum([len(line) + 1 for line in lines])
            offsets.write(np.array([size, *ends[:-1]], "<i8").tobytes())
            copy.write(b"\n".join([*lines, b""]))
            add_types(types, lines, num_rows)
            size = int(ends[-1])
            num_rows += len(lines)
        offsets.write(np.array([size], "<i8").tobytes())
        return scratch.entry(digest.hexdigest(), num_rows, types.schema())

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        return json_records(list(itertools.islice(_values(blocks(file), file), FIRST_LINES)))

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return LineReader(source_file, split_lines, parse_json, "value")


def _hashed(content: Iterable[bytes], digest: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in content:
        digest.update(block)
        yield block


def _values(content: Iterator[bytes], file: InputFile) -> Iterator[bytes]:
    """The values of the array, or those one after another, each on a line of its own. Raises InputError."""
    head = b""
    for block in content:
        head = (head + block).removeprefix(BYTE_ORDER_MARK).lstrip(WHITESPACE)
        if len(head) >= len(BYTE_ORDER_MARK):
            break
    refuse_utf16(file, head[:4])
    splitter = _Splitter(file, is_array=head.startswith(b"["))
    num_values = 0
    value = b""
    for block in itertools.chain([head[1:] if splitter.is_array else head], content):
        for value in splitter.feed(block):
            num_values += 1
            yield value
    splitter.finish()
    if num_values == 1 and not splitter.is_array and parse_json(value):
        raise InputError(
            f"{file.name} is one JSON object; a file of this ending has an array of objects, or objects one after "
            f"another: if the rows are a list within it, `jq -c '.NAME[]' {file.name} > rows.jsonl` writes them as "
            "lines; if it is the only row, name the file .jsonl"
        )


class _Splitter:
    """Finds where each value ends, without parsing it. Holds one value and one block."""

    def __init__(self, file: InputFile, *, is_array: bool) -> None:
        self._file = file
        self.is_array = is_array
        self._rest = b""
        self._place = 0  # in the rest, up to which it was looked at
        self._depth = 0
        self._num_values = 0
        self._is_closed = False

    def feed(self, block: bytes) -> Iterator[bytes]:
        """The values that end in the next block."""
        rest = self._rest + block
        start = 0
        while token := (_WITHIN if self._depth else _OUTSIDE).match(rest, self._place):
            self._place = token.end()
            stop = self._stop(token[1], token.end())
            if stop is not None:
                yield from self._value(rest[start:stop])
                start = token.end()
        self._rest = rest[start:]
        self._place -= start
        if len(self._rest) > MAX_LINE_BYTES:
            raise self._wrong(f"longer than {MAX_LINE_BYTES:,} bytes")

    def _stop(self, sign: bytes, end: int) -> int | None:
        """Where a value ends, if a sign that stands before `end` ends one."""
        if self._is_closed:
            raise self._wrong("more after the end of the array")
        if sign in b"[{":
            self._depth += 1
            return None
        if self._depth:
            self._depth -= 1
            return None if self._depth or self.is_array else end
        if not self.is_array or sign == b"}":
            raise self._wrong(f"{sign.decode()!r} outside of a value")
        self._is_closed = sign == b"]"
        return end - 1

    def finish(self) -> None:
        """Raise InputError if the file ends within a value, or its array is not closed."""
        if self._rest.strip(WHITESPACE) or (self.is_array and not self._is_closed):
            raise self._wrong("more after the end of the array" if self._is_closed else "the file ends within it")

    def _value(self, value: bytes) -> Iterator[bytes]:
        # A line break is only between the parts of a value. One within a text, which is not JSON, stays an error.
        value = value.strip(WHITESPACE).replace(b"\n", b"\r")
        if value:
            self._num_values += 1
            yield value
        elif self._num_values or not self._is_closed:  # else the array is empty
            raise self._wrong("nothing stands there")

    def _wrong(self, reason: str) -> InputError:
        return InputError(
            f"{self._file.name} is not JSON: value {self._num_values + 1:,}: {reason}; must be an array of objects, or "
            "objects one after another"
        )
