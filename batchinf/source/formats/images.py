"""Folders of pictures: each file is a row with its path. The pictures are loaded later, with the images of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.files import InputFile, InputLocation
from batchinf.source.formats.base import FileFormat, Reader, Record, SourceFile
from batchinf.source.types import Lost, MixedTypes, is_utf8

PATH = "path"
FOLDER = "folder"
NUM_BYTES = "num_bytes"
_SCHEMA = pa.schema([(PATH, pa.string()), (FOLDER, pa.string()), (NUM_BYTES, pa.int64())])


class Images(FileFormat):
    """Pictures, one row for each file: its path below the folder of the input, the folder in that path, its size."""

    name = "images"
    endings = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
    mixed_types = MixedTypes.REFUSED
    is_scanned_in_order = False
    is_often_beside_data = True

    def for_input(self, input: InputLocation) -> FileFormat:
        if "://" in input.path:
            raise InputError(f"{input.path}: a job reads pictures of this host; copy them to a folder, or make a file "
                             "with their URLs in a column, and name it in input.images_column")  # fmt: skip
        return super().for_input(input)

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        return scratch.entry(_hash(file), 1, _SCHEMA)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        return [dict.fromkeys(_SCHEMA.names)]

    def is_same(self, source_file: SourceFile) -> bool:
        return _hash(source_file.file) == source_file.entry.hash

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return _OneRow(source_file)


def _hash(file: InputFile) -> str:
    """Of the name alone. As with paths in a column, the digest that a row stores tells which picture it had."""
    return xxhash.xxh3_128_hexdigest(file.name.encode(errors="surrogateescape"))


class _OneRow:
    """The row of a picture."""

    def __init__(self, source_file: SourceFile) -> None:
        file = source_file.file
        entry = source_file.entry
        self._values: dict[str, Any] = {PATH: file.name, FOLDER: file.name.rpartition("/")[0], NUM_BYTES: entry.size}
        self._watch = source_file.digests.watch(entry.content)

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        """See `Reader`."""
        self._watch.check()
        if not is_utf8(self._values[PATH]):
            name = ascii(self._values[PATH])
            return [({}, f"the name of the picture {name} is not UTF-8; rename the file")] * (stop - start)
        names = _SCHEMA.names if columns is None else columns
        return [({name: self._values[name] for name in names if name in self._values}, None)] * (stop - start)

    def table(self, start: int, stop: int, fields: pa.Schema, lost: Lost | None) -> pa.Table:
        """See `Reader`."""
        [(values, _)] = self.records(0, 1, fields.names)
        return pa.Table.from_pylist([values] * (stop - start), fields)

    def close(self) -> None:
        """See `Reader`."""
