"""Writes, recovers and deletes journal segments: small immutable files of results that are in no part yet.

A segment is `journal/<shard>-<incarnation>-<seq>`: a header of 64 bytes with a checksum, then an uncompressed Arrow IPC
stream, which is memory-mapped. The checksum is necessary: in a plain Arrow stream more than half of all single flipped
bits go unnoticed. The hashing writers here serve parts, too.
"""

import contextlib
import ctypes
import io
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.storage import HEADER_BYTES, FileHeader, Folder
from batchinf.manifest.names import retry_of
from batchinf.records import Part

_libc = ctypes.CDLL(None)
_FOLDER = "journal"
_NAME = re.compile(r"(?P<shard>\d{6,})-(?P<incarnation>[A-Za-z0-9._-]+)-(?P<seq>\d{5,})")
_INCARNATION = re.compile(r"[A-Za-z0-9._-]+")

_READ_BYTES = 1 << 20
RESULT_KEYS = ("row_index", "request_index", "num_requests")
# Small batches are joined up to this size, because random access is faster with few large ones.
BATCH_BYTES = 4 << 20


class _DamagedError(Exception):
    """A segment is torn, altered, from another job, or of a later format version."""


def count_errors(error_types: pa.Array | pa.ChunkedArray) -> "Counter[str]":
    """Numbers of values that are not null."""
    if error_types.null_count == len(error_types):
        return Counter()
    counts = error_types.drop_null().value_counts()
    return Counter(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))


def error_rows(table: pa.Table) -> pa.Table:
    """The rows of a table with the column `error_type` that are error rows."""
    return table.filter(table.column("error_type").is_valid())


class Segment:
    """One whole segment. Its file is mapped on first access and costs neither memory nor a file descriptor."""

    def __init__(self, folder: Folder, name: str, num_rows: int) -> None:
        self.name = name
        self.num_rows = num_rows
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

    def errors(self) -> "Counter[str]":
        """Numbers of results with an error, by the error's type."""
        return count_errors(self.table().column("error_type"))

    def let_go(self) -> None:
        """Release the pages that were read, which count as this process's memory. They are read again on access."""
        if self._mapped is not None:
            # Python's mmap has madvise, but keeps a file descriptor open for each map.
            _libc.madvise(ctypes.c_void_p(self._mapped.address), ctypes.c_size_t(self._mapped.size), mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file when no table needs it any more. A later access maps it again."""
        self._table = self._mapped = None


@dataclass(frozen=True, slots=True)
class RecoveredJournal:
    """The whole segments of a shard. damaged: names of the other segments, whose results run again."""

    segments: tuple[Segment, ...]
    damaged: tuple[str, ...]


class Journal:
    """Writes the segments of one incarnation. Reads those of all incarnations of the same retry, or of none."""

    def __init__(
        self, folder: Folder, incarnation: str, schema: pa.Schema, before: Callable[[], object] = lambda: None
    ) -> None:
        """before: is called before each segment becomes durable."""
        if not _INCARNATION.fullmatch(incarnation):
            raise ValueError(f"got incarnation {incarnation!r}; allowed are letters, digits, '.', '_' and '-'")
        self._folder = folder
        self._incarnation = incarnation
        self._schema = schema
        self._before = before
        self._seq = 0

    def write(self, shard: int, table: pa.Table) -> Segment:
        """Make these results durable as one segment. table: in the journal's schema."""
        self._before()
        name = self._next_name(shard)
        with self._folder.writing(f"{_FOLDER}/{name}", fault="journal") as file:
            file.write(bytes(HEADER_BYTES))
            payload = HashingWriter(file)
            with pa.ipc.new_stream(payload, self._schema) as stream:
                for batch in joined(table.to_batches()):
                    stream.write_batch(batch)
            file.seek(0)
            file.write(FileHeader(shard, payload.num_bytes, table.num_rows, payload.digest()).encode())
        return Segment(self._folder, name, table.num_rows)

    def forget(self, segment: Segment) -> None:
        """Delete a segment whose results are in a part."""
        self._folder.delete(f"{_FOLDER}/{segment.name}")

    def recover(self, shard: int) -> RecoveredJournal:
        """All whole segments of a shard, of any incarnation, in the order of their names."""
        segments, damaged = [], []
        for name in _names(self._folder, shard):
            if _retry(name) != retry_of(self._incarnation):
                continue
            try:
                segments.append(self._checked(shard, name))
            except FileNotFoundError:
                continue
            except (_DamagedError, pa.ArrowException, OSError):
                damaged.append(name)
        return RecoveredJournal(tuple(segments), tuple(damaged))

    def tables(self, shard: int) -> Iterator[pa.Table]:
        """The results of a shard's whole segments, memory-mapped, for a look while the job may run.

        A segment that is deleted meanwhile is left out: its results are in a part now.
        """
        for segment in self.recover(shard).segments:
            try:
                table = segment.table()
            except FileNotFoundError:
                continue
            yield table

    def _next_name(self, shard: int) -> str:
        while True:
            name = f"{shard:06d}-{self._incarnation}-{self._seq:05d}"
            self._seq += 1
            if not self._folder.exists(f"{_FOLDER}/{name}"):
                return name

    def _checked(self, shard: int, name: str) -> Segment:
        path = self._folder.path(f"{_FOLDER}/{name}")
        with path.open("rb", buffering=0) as file:
            num_rows = _check_bytes(shard, file)
        segment = Segment(self._folder, name, num_rows)
        # The bytes are undamaged now. If something still differs, another job wrote the segment.
        table = segment.table()
        if not table.schema.equals(self._schema) or table.num_rows != num_rows:
            raise _DamagedError("its columns are not this job's")
        # A foreign segment may have bad offsets, which Arrow follows without a check.
        table.validate(full=True)
        if any(table.column(name).null_count for name in RESULT_KEYS if name in table.column_names):
            raise _DamagedError("a result without its key")
        segment.close()
        return segment


def drop(folder: Folder, shards: Mapping[int, int | None]) -> None:
    """Delete the segments of these shards, each up to the retry that is given for it; None: all."""
    for name in folder.list(_FOLDER):
        match = _NAME.fullmatch(name)
        if match is None or (shard := int(match["shard"])) not in shards:
            continue
        last = shards[shard]
        if last is None or _retry(name) <= last:
            folder.delete(f"{_FOLDER}/{name}")


def num_results(folder: Folder, parts: Mapping[int, Part]) -> int:
    """Number of results that are in no part, from the headers of the segments alone.

    parts: those in the manifest, by shard. A part has the results of its retry and of those before it.
    """
    total = 0
    for match in filter(None, map(_NAME.fullmatch, folder.list(_FOLDER))):
        part = parts.get(int(match["shard"]))
        if part is not None and part.retry >= retry_of(match["incarnation"]):
            continue
        # This only informs: a segment that has just gone, or is damaged, does not count.
        with contextlib.suppress(OSError), folder.path(f"{_FOLDER}/{match.string}").open("rb") as file:
            header = FileHeader.decode(file.read(HEADER_BYTES))
            total += 0 if header is None else header.second
    return total


def list_shards(folder: Folder) -> list[int]:
    """Sorted indices of the shards that have segments."""
    found = (_NAME.fullmatch(name) for name in folder.list(_FOLDER))
    return sorted({int(match["shard"]) for match in found if match})


def _names(folder: Folder, shard: int) -> list[str]:
    found = (_NAME.fullmatch(name) for name in folder.list(_FOLDER, f"{shard:06d}-"))
    return [match.string for match in found if match]


def _retry(name: str) -> int:
    match = _NAME.fullmatch(name)
    return retry_of(match["incarnation"]) if match else 0


def _check_bytes(shard: int, file: io.FileIO) -> int:
    """Check every byte of a segment and return its number of results. Holds 1 MiB at a time."""
    header = FileHeader.decode(file.read(HEADER_BYTES))
    if header is None or header.number != shard:
        raise _DamagedError("its header is torn, altered, of another format version or another shard's")
    if digest_of(file) != (header.first, header.digest):
        raise _DamagedError("its payload is torn or altered")
    return header.second


def digest_of(file: io.FileIO) -> tuple[int, bytes]:
    """Number and xxh3-128 of the bytes from here to the end of a file. Holds 1 MiB at a time."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    total = 0
    while num_bytes := file.readinto(buffer):
        digest.update(memoryview(buffer)[:num_bytes])
        total += num_bytes
    return total, digest.digest()


# -- files with their own checksum -------------------------------------------------------------------------------------


class HashingWriter(io.RawIOBase):
    """Passes bytes on to a file and tracks their number and xxh3-128. Closing it leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        self._file.write(data)
        return num_bytes

    def digest(self) -> bytes:
        """xxh3-128 of the written bytes, 16 bytes."""
        return self._digest.digest()

    def hexdigest(self) -> str:
        """xxh3-128 of the written bytes, 32 hexadecimal digits."""
        return self._digest.hexdigest()


# The seal: a part's metadata holds the xxh3-128 of all bytes of the file, computed with these zeros in place of the
# seal. Page checksums do not cover headers and footer: a third of single flipped bits in a footer go unnoticed.
UNSEALED = {"batchinf.seal": "0" * 32}
_SEAL = re.compile(rb"batchinf\.seal.{1,4}?([0-9a-f]{32})", re.DOTALL)


class SealingWriter(HashingWriter):
    """Holds back the end of a Parquet file, to replace `UNSEALED` in its metadata by the seal."""

    _end: bytearray | None = None

    def hold(self) -> None:
        """Hold back everything from here on until `seal`."""
        self._end = bytearray()

    def write(self, data: Any) -> int:
        """Write all of `data`, or hold it back."""
        if self._end is None:
            return super().write(data)
        self._end += data
        return memoryview(data).nbytes

    def seal(self) -> None:
        """Write the held bytes with the seal."""
        assert self._end is not None
        end, place = bytes(self._end), _seal_place(self._end)
        whole = self._digest.copy()
        whole.update(end)
        self._end = None
        self.write(end[: place.start] + whole.hexdigest().encode() + end[place.stop :])


def is_sealed(data: memoryview) -> bool:
    """Whether a Parquet file's bytes match its seal. Raises ValueError without a seal."""
    start = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    return footer_is_sealed(xxhash.xxh3_128(data[:start]), bytes(data[start:]))


def footer_is_sealed(digest: "xxhash.xxh3_128", footer: bytes) -> bool:
    """`is_sealed` for a file that is read piece by piece. digest: of the bytes before the footer; it is not changed."""
    end = bytearray(footer)
    place = _seal_place(end)
    seal, end[place] = bytes(end[place]), UNSEALED["batchinf.seal"].encode()
    digest = digest.copy()
    digest.update(end)
    return digest.hexdigest().encode() == seal


def _seal_place(end: bytes | bytearray) -> slice:
    # The last match: the metadata comes after all bytes that depend on the data.
    *_, found = _SEAL.finditer(end)
    return slice(*found.span(1))


# -- batches ---------------------------------------------------------------------------------------------------------


def joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same results in as few batches as BATCH_BYTES allows. Larger batches stay as they are."""
    group: list[pa.RecordBatch] = []
    group_bytes = 0
    for batch in batches:
        if group and group_bytes + batch.nbytes > BATCH_BYTES:
            yield _one(group)
            group, group_bytes = [], 0
        group.append(batch)
        group_bytes += batch.nbytes
    if group:
        yield _one(group)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def row_bytes(table: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Size of each row in memory, int64 [num_rows]. For types that no task uses it is the column's mean."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            total[start : start + len(chunk)] += _item_bytes(chunk).astype(np.int64)
            start += len(chunk)
    return total


def _item_bytes(array: pa.Array) -> npt.NDArray[Any]:
    # Reads only the offsets at the items' bounds at each depth, never the tokens.
    bounds: npt.NDArray[Any] = np.arange(len(array) + 1)
    total: npt.NDArray[Any] = np.zeros(len(array))
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            # A slice shares `values` with its whole array, so the offset counts.
            bounds, array = (bounds + array.offset) * array.type.list_size, array.values
            continue
        bounds = _offsets(array, np.int32)[bounds]
        array = array.values
        total += 4 * np.diff(bounds)
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        return total + np.diff(_offsets(array, np.int32)[bounds])
    if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        return total + np.diff(_offsets(array, np.int64)[bounds])
    width: float = array.nbytes / max(1, len(array))
    return total + np.diff(bounds) * width


def _offsets(array: pa.Array, dtype: type[np.int32 | np.int64]) -> npt.NDArray[Any]:
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array) + 1, dtype)
    return np.frombuffer(buffer, dtype)[array.offset : array.offset + len(array) + 1]
