"""Writes, recovers and deletes journal segments: small immutable files of results that are in no part yet.

A segment is `journal/<shard>-<incarnation>-<seq>`: a header of 64 bytes with a checksum, then an uncompressed Arrow IPC
stream, which is memory-mapped. The checksum is necessary: in a plain Arrow stream more than half of all single flipped
bits go unnoticed.
"""

import contextlib
import ctypes
import hashlib
import io
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.storage import HEADER_BYTES, FileHeader, Folder, HashingWriter
from batchinf.manifest.names import retry_of
from batchinf.output.counts import joined
from batchinf.records import Part

_libc = ctypes.CDLL(None)
_FOLDER = "journal"
_NAME = re.compile(r"(?P<shard>\d{6,})-(?P<incarnation>[A-Za-z0-9._-]+)-(?P<seq>\d{5,})")
_INCARNATION = re.compile(r"[A-Za-z0-9._-]+")

RESULT_KEYS = ("row_index", "request_index", "num_requests")


class Segment:
    """One whole segment. Its file is mapped on first access and costs neither memory nor a file descriptor."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.name = name
        self._path = folder.path(f"{_FOLDER}/{name}")
        self._table: pa.Table | None = None
        self._mapped: pa.Buffer | None = None

    def table(self) -> pa.Table:
        """All results in the order of writing, memory-mapped."""
        if self._table is None:
            # The map stays valid after the file is closed, as long as a table needs it.
            with pa.memory_map(os.fspath(self._path)) as file:
                self._mapped = file.read_buffer()
            payload = self._mapped.slice(HEADER_BYTES)
            self._table = pa.ipc.open_stream(pa.BufferReader(payload)).read_all()
        return self._table

    def keys(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`row_index` int64, `request_index` int32 and `num_requests` int32, each [num_rows]."""
        table = self.table()
        row_index, request_index, num_requests = (table.column(name).to_numpy() for name in RESULT_KEYS)
        return row_index, request_index, num_requests

    def let_go(self) -> None:
        """Release the pages that were read, which count as this process's memory. They are read again on access."""
        if self._mapped is not None:
            # Python's mmap has madvise, but keeps a file descriptor open for each map.
            _libc.madvise(ctypes.c_void_p(self._mapped.address), ctypes.c_size_t(self._mapped.size), mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file when no table needs it any more. A later access maps it again."""
        self._table = self._mapped = None


class Journal:
    """Writes the segments of one incarnation. Reads those of all incarnations of the same retry, or of none."""

    def __init__(
        self, folder: Folder, incarnation: str, schema: pa.Schema, before: Callable[[], object] = lambda: None
    ) -> None:
        """before: is called before each segment becomes durable."""
        if not _INCARNATION.fullmatch(incarnation):
            raise ValueError(f"got incarnation {incarnation!r}; allowed are letters, digits, '.', '_' and '-'")
        self.folder = folder
        self.incarnation = incarnation
        self.schema = schema
        self._before = before
        self._seq = 0

    def write(self, shard: int, table: pa.Table) -> Segment:
        """Make these results durable as one segment. table: in the journal's schema."""
        self._before()
        name = self._next_name(shard)
        with self.folder.writing(f"{_FOLDER}/{name}", fault="journal") as file:
            file.write(bytes(HEADER_BYTES))
            payload = HashingWriter(file)
            with pa.ipc.new_stream(payload, self.schema) as stream:
                for batch in joined(table.to_batches()):
                    stream.write_batch(batch)
            file.seek(0)
            file.write(FileHeader(shard, payload.num_bytes, table.num_rows, payload.digest()).encode())
        return Segment(self.folder, name)

    def forget(self, segment: Segment) -> None:
        """Delete a segment whose results are in a part."""
        self.folder.delete(f"{_FOLDER}/{segment.name}")

    def recover(self, shard: int) -> tuple[list[Segment], list[str]]:
        """The whole segments of a shard, of any incarnation, and the names of damaged ones, whose results run again.

        Both are in the order of their names.
        """
        segments = []
        damaged = []
        for name, _, retry in _listed(self.folder, f"{shard:06d}-"):
            if retry != retry_of(self.incarnation):
                continue
            try:
                segments.append(self._checked(shard, name))
            except FileNotFoundError:
                continue
            except (ValueError, pa.ArrowException, OSError):
                damaged.append(name)
        return segments, damaged

    def tables(self, shard: int) -> Iterator[pa.Table]:
        """The results of a shard's whole segments, memory-mapped. One that is deleted meanwhile is left out."""
        segments, _ = self.recover(shard)
        for segment in segments:
            try:
                table = segment.table()
            except FileNotFoundError:
                continue
            yield table

    def _next_name(self, shard: int) -> str:
        while True:
            name = f"{shard:06d}-{self.incarnation}-{self._seq:05d}"
            self._seq += 1
            if not self.folder.exists(f"{_FOLDER}/{name}"):
                return name

    def _checked(self, shard: int, name: str) -> Segment:
        path = self.folder.path(f"{_FOLDER}/{name}")
        with path.open("rb", buffering=0) as file:
            num_rows = _check_bytes(shard, file)
        segment = Segment(self.folder, name)
        # The bytes are undamaged now. If something still differs, another job wrote the segment.
        table = segment.table()
        if not table.schema.equals(self.schema) or table.num_rows != num_rows:
            raise ValueError("its columns are not this job's")
        # A foreign segment may have bad offsets, which Arrow follows without a check.
        table.validate(full=True)
        if any(table.column(name).null_count for name in RESULT_KEYS if name in table.column_names):
            raise ValueError("a result without its key")
        segment.close()
        return segment


def drop(folder: Folder, shards: Mapping[int, int | None]) -> None:
    """Delete the segments of these shards, each up to the retry that is given for it; None: all."""
    prefixes = tuple(f"{shard:06d}-" for shard in shards)
    for name, shard, retry in _listed(folder, prefixes):
        if (last := shards[shard]) is None or retry <= last:
            folder.delete(f"{_FOLDER}/{name}")


def num_results(folder: Folder, parts: Mapping[int, Part], names: Collection[str] | None = None) -> int:
    """Number of results that are in none of the `parts`, by the headers of the segments alone.

    names: of the segments that count; None: all.
    """
    total = 0
    for name, shard, retry in _listed(folder):
        if (shard in parts and parts[shard].retry >= retry) or (names is not None and name not in names):
            continue
        # This only informs: a segment that has just gone, or is damaged, does not count.
        with contextlib.suppress(OSError), folder.path(f"{_FOLDER}/{name}").open("rb") as file:
            header = FileHeader.decode(file.read(HEADER_BYTES))
            total += 0 if header is None else header.second
    return total


def list_shards(folder: Folder) -> list[int]:
    """Sorted indices of the shards that have segments."""
    return sorted({shard for _, shard, _ in _listed(folder)})


def _listed(folder: Folder, prefix: str | tuple[str, ...] = "") -> Iterator[tuple[str, int, int]]:
    """Name, shard and retry of each segment whose name begins with a prefix."""
    for name in folder.list(_FOLDER, prefix):
        if (place := place_of(name)) is not None:
            yield name, *place


def place_of(name: str) -> tuple[int, int] | None:
    """Shard and retry of a segment, by its name; None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match["shard"]), retry_of(match["incarnation"]))


def _check_bytes(shard: int, file: io.FileIO) -> int:
    """Check every byte of a segment and return its number of results. Raises ValueError if one is not as written."""
    header = FileHeader.decode(file.read(HEADER_BYTES))
    if header is None or header.number != shard:
        raise ValueError("its header is torn, altered, of another format version or another shard's")
    digest = hashlib.file_digest(file, xxhash.xxh3_128).digest()
    if (file.tell() - HEADER_BYTES, digest) != (header.first, header.digest):
        raise ValueError("its payload is torn or altered")
    return header.second
