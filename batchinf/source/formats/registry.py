"""All input formats: a new one is a module beside this one and a line in `FORMATS`."""

import os

from batchinf.source.files import COMPRESSIONS
from batchinf.source.formats.arrow import Arrow
from batchinf.source.formats.base import FileFormat
from batchinf.source.formats.csv import Csv
from batchinf.source.formats.huggingface import HUGGING_FACE
from batchinf.source.formats.images import Images
from batchinf.source.formats.json import Json
from batchinf.source.formats.lines import OPENAI, JsonLines, TextLines
from batchinf.source.formats.parquet import Parquet

FORMATS: tuple[FileFormat, ...] = (
    JsonLines(),
    Json(),
    Parquet(),
    Csv(),
    TextLines(),
    Arrow(),
    Images(),
)

COMPRESSED = tuple(COMPRESSIONS)  # endings that may follow those of most formats
_FILE_FORMATS = {format.name: format for format in FORMATS}
_BY_ENDING = {ending: format for format in FORMATS for ending in format.endings}
FORMAT_NAMES = (*_FILE_FORMATS, OPENAI, HUGGING_FACE)  # the values of `input.format`

# For error messages.
ALLOWED = f"the formats are {', '.join(_FILE_FORMATS)} and {HUGGING_FACE}, by the endings {', '.join(_BY_ENDING)}"


def file_format(name: str) -> FileFormat | None:
    """The format of files of this name; None if there is none."""
    return _FILE_FORMATS.get(name)


def format_by_ending(path: str) -> FileFormat | None:
    """The format of a file by the ending of its name; None if no format has that ending."""
    stem, ending = os.path.splitext(path.lower())
    if ending not in COMPRESSED:
        return _BY_ENDING.get(ending)
    format = _BY_ENDING.get(os.path.splitext(stem)[1])
    return format if format is not None and format.is_scanned_in_order else None


def read_as(name: str | None) -> str | None:
    """The format that reads the files if `input.format` is `name`; None for None."""
    return JsonLines.name if name == OPENAI else name
