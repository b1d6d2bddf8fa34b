"""Which rows of a job are chosen: one bit for each, in memory and in a durable file of the output folder."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from batchinf.errors import OutputError
from batchinf.records import Shard
from batchinf.shards import Extent, shard_at, total_shards
from batchinf.storage import Folder

FOLDER = "retry"
_MAGIC = b"batchinf"
_VERSION = 1
# Magic, format version, retry, first row, number of rows, xxh3-128 of the bits, 8 bytes to spare.
_HEADER = struct.Struct("<8sIIQQ16s8x")


class Selection:
    """Some of the rows `first_row` to `first_row + num_rows` (exclusive). 12.5 MB for 100 million rows."""

    def __init__(self, first_row: int, num_rows: int, bits: npt.NDArray[np.uint8] | None = None) -> None:
        """bits: uint8 [ceil(num_rows / 8)], the lowest bit first; None where no row is chosen yet."""
        self.first_row = first_row
        self.num_rows = num_rows
        self._bits = np.zeros(-(-num_rows // 8), np.uint8) if bits is None else bits

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> "Selection":
        """None of these rows."""
        first, last = extents[0].start, extents[-1].start + extents[-1].num_rows
        return cls(first, last - first)

    def add(self, rows: npt.NDArray[np.int64]) -> None:
        """Choose rows, by `row_index`."""
        places = rows - self.first_row
        np.bitwise_or.at(self._bits, places >> 3, np.left_shift(np.uint8(1), (places & 7).astype(np.uint8)))

    def chosen(self, shard: Shard) -> npt.NDArray[np.bool_]:
        """Which of a shard's rows are chosen, bool [shard.num_rows]; rows that came later are not."""
        start, stop = shard.start - self.first_row, shard.stop - self.first_row
        bits = np.unpackbits(self._bits[start // 8 : -(-stop // 8)], bitorder="little")[start % 8 :].astype(np.bool_)
        found = np.zeros(shard.num_rows, np.bool_)
        found[: min(len(bits), len(found))] = bits[: len(found)]
        return found

    def counts(self, extents: Sequence[Extent]) -> npt.NDArray[np.int64]:
        """How many rows of each shard are chosen, int64 [total_shards(extents)]."""
        shards = (shard_at(extents, index) for index in range(total_shards(extents)))
        return np.array([np.count_nonzero(self.chosen(shard)) for shard in shards], np.int64)

    def encode(self, number: int) -> tuple[bytes, str]:
        """The bytes of the file of this retry, and their digest."""
        digest = xxhash.xxh3_128_digest(self._bits.data)
        header = _HEADER.pack(_MAGIC, _VERSION, number, self.first_row, self.num_rows, digest)
        data = header + xxhash.xxh3_64_digest(header) + self._bits.tobytes()
        return data, xxhash.xxh3_128_hexdigest(data)


def selection_name(number: int) -> str:
    """The name in the output folder of what a retry chose."""
    return f"{FOLDER}/{number:06d}.rows"


def chosen_rows(folder: Folder, number: int) -> Selection:
    """What a retry that is under way chose. Raises OutputError if the file is not there any more."""
    selection = read_selection(folder, number)
    if selection is None:
        raise OutputError(f"{folder.path(selection_name(number))} is gone or altered; run the same command again")
    return selection


def read_selection(folder: Folder, number: int, digest: str | None = None) -> Selection | None:
    """What a retry chose; None if the file is gone or altered, or is not the one of this digest."""
    try:
        data = folder.read(selection_name(number))
    except FileNotFoundError:
        return None
    size = _HEADER.size + 8
    if len(data) < size or xxhash.xxh3_64_digest(data[: _HEADER.size]) != data[_HEADER.size : size]:
        return None
    magic, version, own_number, first_row, num_rows, own_digest = _HEADER.unpack_from(data)
    bits = np.frombuffer(data, np.uint8, offset=size)
    if (magic, version, own_number) != (_MAGIC, _VERSION, number) or xxhash.xxh3_128_digest(bits.data) != own_digest:
        return None
    if digest is not None and xxhash.xxh3_128_hexdigest(data) != digest:
        return None
    return Selection(first_row, num_rows, bits)
