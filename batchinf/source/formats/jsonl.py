"""JSON lines: each line that is not blank is a row, a JSON object whose keys are the columns."""

import contextlib
import json
from collections.abc import Sequence
from types import NoneType
from typing import cast

import pyarrow as pa

from batchinf.base.storage import Folder
from batchinf.source.cache import FileEntry, FileFindings, Scratch
from batchinf.source.files import InputFile
from batchinf.source.formats.base import Reader
from batchinf.source.formats.lines import WHITESPACE, LineFormat, LineReader, index_lines, not_utf8
from batchinf.source.types import JsonTypes, MixedTypes

_JSON_NAMES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    NoneType: "null",
}


class JsonLines(LineFormat):
    """Lines of JSON objects. A broken line is a row with an error, and has no part in the columns' types."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson")
    mixed_types = MixedTypes.JSON

    def scan(self, file: InputFile, scratch: Scratch) -> FileFindings:
        """See `FileFormat`."""
        types = JsonTypes()
        content_hash, num_rows, num_bytes = index_lines(
            file, scratch, lambda run: types.add(_records(_split_lines(run))), has_blank_rows=False
        )
        return FileFindings(content_hash, num_rows, types.schema(), num_bytes)

    def reader(
        self, file: InputFile, entry: FileEntry, schema: pa.Schema, read_types: pa.Schema, cache: Folder
    ) -> Reader:
        """See `FileFormat`."""
        return _JsonReader(file, entry, schema, cache)


class _JsonReader(LineReader):
    def _split(self, data: bytes) -> list[bytes]:
        return _split_lines(data)

    def _parse(self, line: bytes) -> dict[str, object]:
        return _parse_json(line)


def _split_lines(run: bytes) -> list[bytes]:
    """The lines of a run that are not blank, without their ends."""
    return [line for line in run.split(b"\n") if line.strip(WHITESPACE)]


def _parse_json(line: bytes) -> dict[str, object]:
    """One line of JSON lines; `ValueError` says why it is no record."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_JSON_NAMES[type(record)]}; write {{...}} on each line")
    return record


def _records(lines: Sequence[bytes]) -> list[dict[str, object]]:
    """The records among the lines; broken lines are left out."""
    if len(lines) > 1:
        try:  # many lines in one call: three times as fast as one for each
            records = json.loads(f"[{b','.join(lines).decode()}]")
            if len(records) == len(lines) and set(map(type, records)) == {dict}:
                return cast("list[dict[str, object]]", records)
        except (ValueError, RecursionError):
            pass
        middle = len(lines) // 2
        return _records(lines[:middle]) + _records(lines[middle:])
    with contextlib.suppress(ValueError):
        return [_parse_json(line) for line in lines]
    return []
