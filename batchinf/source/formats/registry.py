"""All input formats: a new one is a module beside this one and a line in `FORMATS`."""

import os

from batchinf.source.files import COMPRESSIONS
from batchinf.source.formats.arrow import Arrow
from batchinf.source.formats.base import FileFormat, InputFormat
from batchinf.source.formats.csv import Csv
from batchinf.source.formats.huggingface import HuggingFace
from batchinf.source.formats.images import Images
from batchinf.source.formats.json import Json
from batchinf.source.formats.lines import JsonLines, OpenAIBatch, TextLines
from batchinf.source.formats.parquet import Parquet

FORMATS: tuple[InputFormat, ...] = (
    JsonLines(),
    Json(),
    OpenAIBatch(),
    Parquet(),
    Csv(),
    TextLines(),
    Arrow(),
    Images(),
    HuggingFace(),
)

FORMAT_NAMES = tuple(format.name for format in FORMATS)  # the values of `input.format`
COMPRESSED = tuple(COMPRESSIONS)  # endings that may follow those of most formats
_FILE_FORMATS = {format.name: format for format in FORMATS if isinstance(format, FileFormat)}
_BY_ENDING = {ending: format for format in _FILE_FORMATS.values() for ending in format.endings}
_READ_AS = {format.name: format.read_as or format.name for format in FORMATS}
_OTHERS = [name for name, read_as in _READ_AS.items() if name == read_as and name not in _FILE_FORMATS]

# For error messages.
ALLOWED = f"the formats are {', '.join(_FILE_FORMATS)} and {', '.join(_OTHERS)}, by the endings {', '.join(_BY_ENDING)}"


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
    return None if name is None else _READ_AS[name]
