"""An input file and its content, decompressed and hashed. `find` and `remote` find the files; `formats` read them."""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError

BLOCK_BYTES = 1 << 20  # read at once
MAX_LINE_BYTES = 64 << 20  # a longer line or CSV field is an error row and is never held in memory
LINE_ENDS = (b"\n", b"\r\n")


@dataclass(frozen=True, slots=True)
class InputLocation:
    """Where the rows are."""

    path: str  # a file, a glob, a folder, a URL, or the id of a Hugging Face dataset
    format: str | None = None  # a name in `formats/registry.py`; None: by the files' endings
    split: str | None = None  # of a Hugging Face dataset; None: train
    revision: str | None = None  # of a Hugging Face dataset on the hub
    name: str | None = None  # the configuration of a Hugging Face dataset
    is_shuffled: bool = False  # rows are read in any order, so every row must be quick to find


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file. name: relative, for error messages. path: where it is."""

    name: str
    path: str

    @property
    def is_remote(self) -> bool:
        """Whether its content has to be fetched. Such a file is read once, from beginning to end."""
        return False

    def stamp(self) -> tuple[int, int]:
        """Two numbers. If both are unchanged, the content is unchanged."""
        return stamp(self.path)

    def open(self) -> io.BufferedReader:
        """The file's bytes. Raises InputError if it cannot be read."""
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise InputError(
                f"{self.name} cannot be read: {error.strerror}; mend its permissions or its path"
            ) from error


def stamp(path: str) -> tuple[int, int]:
    """Size in bytes and mtime in nanoseconds."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def open_input(file: InputFile) -> BinaryIO:
    """A file's content, decompressed if it begins like gzip or zstandard. Raises InputError if it cannot be read."""
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
    """The xxh3-128 of a file's decompressed content."""
    digest = xxhash.xxh3_128()
    for block in blocks(file):
        digest.update(block)
    return digest.hexdigest()
