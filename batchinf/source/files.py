"""An input file and its content, decompressed and hashed. `find` and `remote` find the files; `formats` read them."""

import io
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, ClassVar, TypeVar

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.text import list_names

BLOCK_BYTES = 1 << 20  # read at once
MAX_LINE_BYTES = 64 << 20  # a longer line or CSV field is an error row and is never held in memory
LINE_ENDS = (b"\n", b"\r\n")
# Editors on Windows begin files with it. Where such files were joined, it stands before a line in the middle, too.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A file begins so that a clone without Git LFS leaves in the place of a large one.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # it is always shorter
_TICK_NS = 20_000_000  # Linux sets mtimes by a clock that ticks every 1 to 10 ms
# By the endings of compressed files: their first bytes, and the name of the compression in Arrow.
COMPRESSIONS = {
    ".gz": (b"\x1f\x8b", "gzip"),
    ".zst": (b"\x28\xb5\x2f\xfd", "zstd"),
    ".lz4": (b"\x04\x22\x4d\x18", "lz4"),
}

Item = TypeVar("Item")
Stamp = tuple[int, int, int]  # see `stamp`
ReadRange = tuple[int, int, int]  # of a file: first byte, number of bytes, and their xxh3-64


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """How the fields of a CSV file are written."""

    delimiter: str | None = None
    """None: found from each file's ending and first rows."""
    quotechar: str = '"'
    """Empty: quotes are text like any other."""
    encoding: str | None = None
    """None: UTF-8, or UTF-16 if the file begins with its mark."""
    null_values: tuple[str, ...] = ()
    """Fields that are null."""
    escapechar: str | None = None
    """Before a quote or itself it makes that text; elsewhere it is text."""


def say_on_stderr(line: str) -> None:
    """Print a line."""
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class InputLocation:
    """Where the rows are."""

    path: str
    """A file, a glob, a folder, a URL, or the id of a Hugging Face dataset."""
    format: str | None = None
    """A name in `formats/registry.py`; None: by the files' endings."""
    parts: Callable[[], Sequence["InputFile"]] | None = None
    """Gives the files, which `path` only names; None: they are found by `path`."""
    split: str | None = None
    """Of a Hugging Face dataset; None: train."""
    revision: str | None = None
    """Of a Hugging Face dataset on the hub."""
    name: str | None = None
    """The configuration of a Hugging Face dataset."""
    csv: CsvDialect | None = None
    """None: the default dialect. Formats other than CSV refuse one."""
    is_new: bool = True
    """Whether what a new job must not read is refused. A job that has begun goes on with the files that it reads."""
    began_as: str | None = None
    """The format with which a job began. Files of a folder that have it are its rows, whatever else came since."""
    text_columns: tuple[str, ...] = ()
    """Columns that are text in a row of CSV, whatever their type: the prompt and the like."""
    named: tuple[str, ...] = ()
    """Columns that must be found, however many others a row has."""
    is_shuffled: bool = False
    """Rows are read in any order, so every row must be quick to find."""
    say: Callable[[str], None] = field(default=say_on_stderr, compare=False)
    """Shows a line before a large copy."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file."""

    name: str
    """Relative, for error messages."""
    path: str

    is_remote: ClassVar[bool] = False
    """Whether its content has to be fetched. Such a file is read once, from beginning to end."""

    @property
    def object_etag(self) -> str:
        """Of an object in a store, by its listing; else empty."""
        return ""

    def stamp(self) -> Stamp:
        """Three numbers. If all are unchanged, the content is unchanged. Raises InputError if there is no file."""
        try:
            return stamp(self.path)
        except OSError as error:
            raise self._unreadable(error) from error

    def settled_stamp(self) -> Stamp:
        """The stamp as it is now; see the function."""
        return settled_stamp(self.path)

    def reader(self) -> io.FileIO:
        """The file's bytes, without a buffer, from any place."""
        return open(self.path, "rb", buffering=0)

    def open(self) -> io.BufferedReader:
        """The file's bytes. Raises InputError if it cannot be read."""
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> InputError:
        if os.path.islink(self.path) and not os.path.exists(self.path):
            target = os.readlink(self.path)
            return InputError(
                f"{self.name} is a link to {target}, which does not exist; restore that, or remove the link"
            )
        return InputError(f"{self.name} cannot be read: {error.strerror}; correct its permissions or its path")


def stamp(path: str) -> Stamp:
    """Size in bytes, mtime in nanoseconds, and inode."""
    return stamp_of(os.stat(path))


stamp_of: Callable[[os.stat_result], Stamp] = operator.attrgetter("st_size", "st_mtime_ns", "st_ino")


def settled_stamp(path: str) -> Stamp:
    """The stamp, at a time when any later change changes the stamp. Waits if the file has just been changed."""
    _, mtime_ns, _ = now = stamp(path)
    if 0 <= time.time_ns() - mtime_ns < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)
        now = stamp(path)
    return now


def refuse_utf16(file: InputFile, head: bytes, remedy: str = "") -> None:
    """Raise InputError if a file of text begins like UTF-16: with its mark, or with ASCII of two bytes each.

    remedy: another than to save it as UTF-8.
    """
    is_wide = len(head) >= 4 and any(head[i] and head[i + 2] and not head[1 - i] and not head[3 - i] for i in (0, 1))
    if is_wide or head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{file.name} is UTF-16; save it as UTF-8{remedy and f', or {remedy}'}")


def refuse_pointers(files: Iterable[InputFile]) -> None:
    """Raise InputError if one of these files is a pointer of Git LFS. Only short files of this host are read."""
    pointers = []
    for file in files:
        if not file.is_remote and 0 < file.stamp()[0] < _POINTER_BYTES:
            with file.open() as stream:
                if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                    pointers.append(file.name)
    if pointers:
        raise _pointer_error(pointers)


def _pointer_error(names: Sequence[str]) -> InputError:
    what = "a pointer" if len(names) == 1 else "pointers"
    return InputError(f"{list_names(names)}: {what} of Git LFS, and no data; `git lfs pull` fetches the files")


def not_utf8(error: UnicodeDecodeError, remedy: str = "`iconv -f cp1252 -t utf-8` converts it") -> str:
    """Why a line of text cannot be read, and a remedy for cp1252, which spreadsheets write."""
    place = f"byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"
    return f"not UTF-8: {place}; if the file is in cp1252, {remedy}"


def open_bytes(file: InputFile) -> BinaryIO:
    """A file's content, decompressed if it begins like one of `COMPRESSIONS`. Raises InputError if it is unreadable."""
    stream = file.open()
    if file.is_remote and stream.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
        stream.close()
        raise _pointer_error([file.name])  # for files of this host, `refuse_pointers` says it without a request
    kind = _compression(stream.peek(4))
    return stream if kind is None else pa.CompressedInputStream(stream, kind)


def compression(file: InputFile) -> str | None:
    """Arrow's name of the file's compression by its first bytes, or None."""
    with file.open() as stream:
        return _compression(stream.peek(4))


def _compression(head: bytes) -> str | None:
    return next((name for beginning, name in COMPRESSIONS.values() if head.startswith(beginning)), None)


def blocks(file: InputFile) -> Iterator[bytes]:
    """A file's content, decompressed, in blocks of `BLOCK_BYTES`."""
    with open_bytes(file) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


def grouped(
    items: Iterable[Item], size: Callable[[Item], int], most: int, most_items: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Consecutive items in groups of at most this size and so many items, or a single larger item."""
    group: list[Item] = []
    total = 0
    for item in items:
        of_item = size(item)
        if group and (total + of_item > most or len(group) == most_items):
            yield group
            group = []
            total = 0
        group.append(item)
        total += of_item
    if group:
        yield group


def content_hash(file: InputFile) -> str:
    """The xxh3-128 of a file's decompressed content."""
    digest = xxhash.xxh3_128()
    for block in blocks(file):
        digest.update(block)
    return digest.hexdigest()
