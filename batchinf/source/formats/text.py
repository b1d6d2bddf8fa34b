"""Text: each line is a row, with the one column `text`."""

import pyarrow as pa

from batchinf.base.storage import Folder
from batchinf.source.cache import FileEntry, FileFindings, Scratch
from batchinf.source.files import InputFile
from batchinf.source.formats.base import Reader
from batchinf.source.formats.lines import LineFormat, LineReader, index_lines, not_utf8
from batchinf.source.types import MixedTypes

_COLUMN = "text"


class Text(LineFormat):
    """Lines of text; an empty line is a row too."""

    name = "text"
    endings = (".txt", ".text")
    mixed_types = MixedTypes.STRING

    def scan(self, file: InputFile, scratch: Scratch) -> FileFindings:
        """See `FileFormat`."""
        content_hash, num_rows, num_bytes = index_lines(file, scratch, lambda run: None, has_blank_rows=True)
        return FileFindings(content_hash, num_rows, pa.schema([(_COLUMN, pa.string())]), num_bytes)

    def reader(
        self, file: InputFile, entry: FileEntry, schema: pa.Schema, read_types: pa.Schema, cache: Folder
    ) -> Reader:
        """See `FileFormat`."""
        return _TextReader(file, entry, schema, cache)


class _TextReader(LineReader):
    def _split(self, data: bytes) -> list[bytes]:
        return data.removesuffix(b"\n").split(b"\n")

    def _parse(self, line: bytes) -> dict[str, object]:
        try:
            return {_COLUMN: line.removesuffix(b"\r").decode()}
        except UnicodeDecodeError as error:
            raise ValueError(not_utf8(error)) from None
