"""The files of an input: which they are, the one format they have, and their content, decompressed and hashed.

What a format's content means is left to the module of that format, files that a URL names to `remote_files`.
"""

import glob
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, cast

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError

BLOCK_BYTES = 1 << 20  # that are read at once
MAX_LINE_BYTES = 64 << 20  # a longer line, or CSV field, is an error row: it is never held in memory
LINE_ENDS = (b"\n", b"\r\n")

Format = Literal["jsonl", "parquet", "csv", "text", "arrow"]

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_ALLOWED = f"the formats are {', '.join(dict.fromkeys(ENDINGS.values()))} and hf, by the endings {', '.join(ENDINGS)}"


@dataclass(frozen=True, slots=True)
class InputLocation:
    """Where the rows are."""

    path: str  # a file, a glob, a folder, a URL, or the id of a Hugging Face dataset
    format: str | None = None  # jsonl, parquet, csv, text, arrow or hf; None: by the names' endings
    split: str | None = None  # of a Hugging Face dataset; None: train
    revision: str | None = None  # of a Hugging Face dataset on the hub
    name: str | None = None  # the configuration of a Hugging Face dataset
    is_shuffled: bool = False  # its rows are read in an order of their own: in any file, each must be quick to find


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file; `name` is what error messages call it, `path` is where it is."""

    name: str
    path: str

    @property
    def is_remote(self) -> bool:
        """Whether its content has to be fetched: it is read once, and never at any place but the next."""
        return False

    def stamp(self) -> tuple[int, int]:
        """Two numbers: while both are as they were, so is the content."""
        return stamp(self.path)

    def open(self) -> io.BufferedReader:
        """The file's bytes; `InputError` if it cannot be read."""
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be read: {error.strerror}; mend its permissions or its path"
            ) from error


def find_files(input: InputLocation) -> tuple[Format, list[InputFile]]:
    """The files of a file, glob or folder, sorted by name, and their one format."""
    path = os.path.expanduser(input.path)
    if os.path.isfile(path):
        files = [InputFile(os.path.basename(path), os.path.abspath(path))]
    elif os.path.isdir(path):
        files = _in_folder(path, input)
    elif glob.has_magic(path):
        files = _by_glob(path)
    else:
        raise InputError(f"{input.path} does not exist; give a file, a glob, a folder, or a Hugging Face dataset's id")
    return one_format(files, input), files


def _by_glob(path: str) -> list[InputFile]:
    root = os.path.dirname(re.split(r"[*?[]", path)[0])
    found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise InputError(f"no file matches {path}; mend the glob, or put it in quotes if a shell expanded it")
    return [InputFile(os.path.relpath(name, root or "."), os.path.abspath(name)) for name in found]


def _in_folder(path: str, input: InputLocation) -> list[InputFile]:
    """The data files below a folder: hidden ones, those that begin with _ and unknown endings are left out."""
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [os.path.join(folder, name) for name in names if not name.startswith((".", "_"))]
    wanted = data_files(found, input)
    return [InputFile(os.path.relpath(name, path), os.path.abspath(name)) for name in wanted]


def data_files(names: Iterable[str], input: InputLocation) -> list[str]:
    """Those of a folder's files that are meant, by their endings, sorted; `InputError` if none is."""
    formats = [input.format] if input.format else ENDINGS.values()
    wanted = sorted(name for name in names if format_of(name) in formats)
    if not wanted:
        raise InputError(f"{input.path} has no {input.format or 'data'} file; {_ALLOWED} (.gz or .zst may follow)")
    return wanted


def one_format(files: Sequence[InputFile], input: InputLocation) -> Format:
    """The one format of all files, as said or by their endings; `InputError` if there is none."""
    if input.format not in (None, *ENDINGS.values()):
        raise InputError(f"format {input.format!r} is not known; {_ALLOWED}")
    if input.format is not None:
        return input.format
    formats = {format_of(file.name): file.name for file in files}
    if None in formats:
        raise InputError(f"the ending of {formats[None]} is not known; {_ALLOWED}; name it so, or set `format`")
    if len(formats) > 1:
        raise InputError(f"{input.path} mixes formats: {', '.join(formats.values())}; set `format` or narrow the path")
    return cast(Format, formats.popitem()[0])


def format_of(name: str) -> Format | None:
    """The format by a name's ending; None if it says none."""
    stem, ending = os.path.splitext(name.lower())
    if ending not in (".gz", ".zst"):
        return ENDINGS.get(ending)
    format = ENDINGS.get(os.path.splitext(stem)[1])
    return None if format in ("parquet", "arrow") else format


# -- their content ---------------------------------------------------------------------------------------------------


def stamp(path: str) -> tuple[int, int]:
    """Size in bytes and mtime in nanoseconds: while both are as they were, so is the content."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def open_input(file: InputFile) -> BinaryIO:
    """A file's content, decompressed if its first bytes are gzip's or zstandard's; `InputError` if unreadable."""
    stream = file.open()
    kind = _compression(stream.peek(4))
    return stream if kind is None else pa.CompressedInputStream(stream, kind)


def compression(file: InputFile) -> str | None:
    """`gzip` or `zstd` by the file's first bytes, or None."""
    with file.open() as stream:
        return _compression(stream.peek(4))


def _compression(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    return "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") else None


def blocks(file: InputFile) -> Iterator[bytes]:
    """A file's content, decompressed, in blocks of `BLOCK_BYTES`."""
    with open_input(file) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


def content_hash(file: InputFile) -> str:
    """The hash of a file's content, decompressed."""
    digest = xxhash.xxh3_128()
    for block in blocks(file):
        digest.update(block)
    return digest.hexdigest()
