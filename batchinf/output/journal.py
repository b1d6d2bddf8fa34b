"""Segments: small immutable files of finished results that are in no part yet. Write, recover, drop.

A segment is `journal/<shard>-<incarnation>-<seq>`: a header of 64 bytes, then an uncompressed Arrow IPC stream that is
memory-mapped, so that reading a few results of many touches no more than those. What is whole is decided by checksums:
of single flipped bits in a plain Arrow stream more than half read back as good. The writers that count and hash, which
parts use too, are here.
"""

import ctypes
import io
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.storage import HEADER_BYTES, FileHeader, Folder
from batchinf.manifest.names import retry_of

_libc = ctypes.CDLL(None)
_FOLDER = "journal"
_NAME = re.compile(r"(?P<shard>\d{6,})-(?P<incarnation>[A-Za-z0-9._-]+)-(?P<seq>\d{5,})")
_INCARNATION = re.compile(r"[A-Za-z0-9._-]+")

_READ_BYTES = 1 << 20
RESULT_KEYS = ("row_index", "request_index", "num_requests")
# Small batches are joined up to this: taking at random from few large ones is quicker.
BATCH_BYTES = 4 << 20


class _DamagedError(Exception):
    """A segment is torn, altered, foreign, or of a later format version."""


class Segment:
    """One segment, whole. Its file is mapped at the first look inside and costs neither memory nor a descriptor."""

    def __init__(self, folder: Folder, name: str, num_rows: int) -> None:
        self.name = name
        self.num_rows = num_rows
        self._path = folder.path(f"{_FOLDER}/{name}")
        self._table: pa.Table | None = None
        self._mapped: pa.Buffer | None = None

    def table(self) -> pa.Table:
        """All results, in the order in which they were written, memory-mapped."""
        if self._table is None:
            # The map outlives the file that it was made from, as long as a table needs it.
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

    def num_errors(self) -> int:
        """How many of the results are errors."""
        return self.num_rows - int(self.table().column("error_type").null_count)

    def let_go(self) -> None:
        """Give back the pages that were read, which count as this process's memory; a table maps them again."""
        if self._mapped is not None:
            # Python's own map, which knows madvise, keeps a descriptor open for each.
            _libc.madvise(ctypes.c_void_p(self._mapped.address), ctypes.c_size_t(self._mapped.size), mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file once no table needs it; a later look maps it again."""
        self._table = self._mapped = None


@dataclass(frozen=True, slots=True)
class RecoveredJournal:
    """What a shard's journal holds. damaged: names of segments that were left out; their results are run again."""

    segments: tuple[Segment, ...]
    damaged: tuple[str, ...]


class Journal:
    """Writes the segments of one incarnation, and reads those of all that work for the same retry, or for none."""

    def __init__(self, folder: Folder, incarnation: str, schema: pa.Schema) -> None:
        if not _INCARNATION.fullmatch(incarnation):
            raise ValueError(f"got incarnation {incarnation!r}; allowed are letters, digits, '.', '_' and '-'")
        self._folder = folder
        self._incarnation = incarnation
        self._schema = schema
        self._seq = 0

    def write(self, shard: int, table: pa.Table) -> Segment:
        """Make these results durable as one segment. The table is of the journal's schema."""
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
        """Delete a segment whose results are in a part by now."""
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
        # From here on the bytes are those that were written: what differs is another job's, not damage.
        table = segment.table()
        if not table.schema.equals(self._schema) or table.num_rows != num_rows:
            raise _DamagedError("its columns are not this job's")
        # Nor do checksums say who wrote it, and offsets are followed without a look.
        table.validate(full=True)
        if any(table.column(name).null_count for name in RESULT_KEYS if name in table.column_names):
            raise _DamagedError("a result without its key")
        segment.close()
        return segment


def drop(folder: Folder, shard: int, retry: int | None = None) -> None:
    """Delete a shard's segments, whole or not, once its part is committed; those of later retries than `retry` stay."""
    for name in _names(folder, shard):
        if retry is None or _retry(name) <= retry:
            folder.delete(f"{_FOLDER}/{name}")


def list_shards(folder: Folder) -> list[int]:
    """Indices of the shards that have segments, sorted."""
    found = (_NAME.fullmatch(name) for name in folder.list(_FOLDER))
    return sorted({int(match["shard"]) for match in found if match})


def _names(folder: Folder, shard: int) -> list[str]:
    """Names of a shard's segments."""
    found = (_NAME.fullmatch(name) for name in folder.list(_FOLDER, f"{shard:06d}-"))
    return [match.string for match in found if match]


def _retry(name: str) -> int:
    match = _NAME.fullmatch(name)
    return retry_of(match["incarnation"]) if match else 0


def _check_bytes(shard: int, file: io.FileIO) -> int:
    """The number of results in a segment, once every byte is found to be as written. Holds 1 MiB at a time."""
    header = FileHeader.decode(file.read(HEADER_BYTES))
    if header is None or header.number != shard:
        raise _DamagedError("its header is torn, altered, of another format version or another shard's")
    if digest_of(file) != (header.first, header.digest):
        raise _DamagedError("its payload is torn or altered")
    return header.second


def digest_of(file: io.FileIO) -> tuple[int, bytes]:
    """The number of bytes from here to the end of a file, and their xxh3-128. Holds 1 MiB at a time."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    total = 0
    while num_bytes := file.readinto(buffer):
        digest.update(memoryview(buffer)[:num_bytes])
        total += num_bytes
    return total, digest.digest()


# -- files that prove themselves whole ---------------------------------------------------------------------------------


class HashingWriter(io.RawIOBase):
    """Passes bytes on to a file and keeps their count and xxh3-128. Closing it leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        self._digest.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        self._file.write(data)
        return num_bytes

    def digest(self) -> bytes:
        """xxh3-128 of what was written, 16 bytes."""
        return self._digest.digest()

    def hexdigest(self) -> str:
        """xxh3-128 of what was written, 32 hexadecimal digits."""
        return self._digest.hexdigest()


# A Parquet file proves that it is whole: its metadata holds the xxh3-128 of all its bytes with these zeros in its own
# place. Page checksums alone leave headers and footer open: a third of single flipped bits in a footer go unseen.
UNSEALED = {"batchinf.seal": "0" * 32}
_SEAL = re.compile(rb"batchinf\.seal.{1,4}?([0-9a-f]{32})", re.DOTALL)


class SealingWriter(HashingWriter):
    """Holds a Parquet file's end back, to put the seal where its metadata has `UNSEALED`."""

    _end: bytearray | None = None

    def hold(self) -> None:
        """What is written from here on waits for `seal`."""
        self._end = bytearray()

    def write(self, data: Any) -> int:
        """Write all of `data`, or hold it back."""
        if self._end is None:
            return super().write(data)
        self._end += data
        return memoryview(data).nbytes

    def seal(self) -> None:
        """Write what was held back, sealed."""
        assert self._end is not None
        end, place = bytes(self._end), _seal_place(self._end)
        whole = self._digest.copy()
        whole.update(end)
        self._end = None
        self.write(end[: place.start] + whole.hexdigest().encode() + end[place.stop :])


def is_sealed(data: memoryview) -> bool:
    """Whether a Parquet file's bytes are those that were sealed. Raises ValueError where there is no seal."""
    start = max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    return footer_is_sealed(xxhash.xxh3_128(data[:start]), bytes(data[start:]))


def footer_is_sealed(digest: "xxhash.xxh3_128", footer: bytes) -> bool:
    """The same of a file that is read piece by piece. digest: of what stands before the footer; it is left as it is."""
    end = bytearray(footer)
    place = _seal_place(end)
    seal, end[place] = bytes(end[place]), UNSEALED["batchinf.seal"].encode()
    digest = digest.copy()
    digest.update(end)
    return digest.hexdigest().encode() == seal


def _seal_place(end: bytes | bytearray) -> slice:
    # The last one: the file's own metadata comes after all that stems from the data.
    *_, found = _SEAL.finditer(end)
    return slice(*found.span(1))


# -- batches ---------------------------------------------------------------------------------------------------------


def joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same results in as few batches as BATCH_BYTES allows; a larger batch goes through as it is."""
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
    """Size of each row in memory, int64 [num_rows]; of the types that no task uses, the column's mean."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            total[start : start + len(chunk)] += _item_bytes(chunk).astype(np.int64)
            start += len(chunk)
    return total


def _item_bytes(array: pa.Array) -> npt.NDArray[Any]:
    # Only the offsets at the items' own bounds are looked at, at every depth: never the tokens.
    bounds: npt.NDArray[Any] = np.arange(len(array) + 1)
    total: npt.NDArray[Any] = np.zeros(len(array))
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            # Of a slice, `values` is the whole's; of the whole they begin at its own offset.
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
