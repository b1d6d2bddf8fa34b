"""Which rows are chosen: one bit for each, in memory or mapped, and in a durable file of the output folder."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from batchinf.errors import OutputError
from batchinf.records import Extent
from batchinf.shard_rows import ShardRows
from batchinf.storage import Folder

# Rows that retries chose, by the number of the retry; rows that the job chose, by the number of the extent, from 1.
RETRY_FOLDER, RUN_FOLDER = "retry", "selection"
_MAGIC = b"batchinf"
_VERSION = 1
# Magic, format version, number, first row, number of rows, xxh3-128 of the bits, 8 bytes to spare.
_HEADER = struct.Struct("<8sIIQQ16s8x")
# Chosen rows are counted in blocks of so many bytes, and looked for in so many of them at once: 2 million rows.
_BLOCK_BYTES, _BLOCKS_AT_ONCE = 1 << 10, 1 << 8
_ONES = np.array([value.bit_count() for value in range(256)], np.uint8)

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Selection:
    """Some of the rows `first_row` to `first_row + num_rows` (exclusive). 12.5 MB for 100 million rows."""

    def __init__(self, first_row: int, num_rows: int, bits: npt.NDArray[np.uint8] | None = None) -> None:
        """bits: uint8 [ceil(num_rows / 8)], the lowest bit first; None where no row is chosen yet."""
        self.first_row = first_row
        self.num_rows = num_rows
        self._bits = np.zeros(-(-num_rows // 8), np.uint8) if bits is None else bits
        self._firsts: Int64Array | None = None

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> "Selection":
        """None of these extents' rows."""
        return cls(extents[0].first_row, extents[-1].stop_row - extents[0].first_row)

    def copy(self) -> "Selection":
        """The same, in memory of its own."""
        return Selection(self.first_row, self.num_rows, self._bits.copy())

    def add(self, rows: Int64Array) -> None:
        """Choose rows, by `row_index`."""
        places = rows - self.first_row
        np.bitwise_or.at(self._bits, places >> 3, np.left_shift(np.uint8(1), (places & 7).astype(np.uint8)))
        self._firsts = None

    def until(self, stop_row: int) -> "Selection":
        """The same, of rows before `stop_row` alone; no later one may be chosen."""
        num_rows = stop_row - self.first_row
        return Selection(self.first_row, num_rows, self._bits[: -(-num_rows // 8)])

    def chosen(self, rows: ShardRows) -> BoolArray:
        """Which of a shard's rows are chosen, bool [len(rows)]; rows that came later are not."""
        if not rows.is_consecutive:
            places = rows.positions() - self.first_row
            known = places[: np.searchsorted(places, self.num_rows)]
            found = np.zeros(len(rows), np.bool_)
            found[: len(known)] = self._bits[known >> 3] >> (known & 7).astype(np.uint8) & 1
            return found
        return self._between(rows.first - self.first_row, len(rows))

    def _between(self, start: int, num_rows: int) -> BoolArray:
        bits = np.unpackbits(self._bits[start // 8 : -(-(start + num_rows) // 8)], bitorder="little")[start % 8 :]
        found = np.zeros(num_rows, np.bool_)
        found[: min(len(bits), num_rows)] = bits[:num_rows]
        return found

    def counts(self, shards: Iterable[ShardRows]) -> Int64Array:
        """How many rows of each shard are chosen, int64 [number of shards]."""
        return np.array([np.count_nonzero(self.chosen(rows)) for rows in shards], np.int64)

    @property
    def num_chosen(self) -> int:
        """How many rows are chosen."""
        return int(self._counted()[-1])

    def rows(self, start: int, stop: int) -> Int64Array:
        """The `row_index` of the chosen rows number `start` to `stop` (exclusive), ascending.

        Raises IndexError where there are not so many.
        """
        firsts = self._counted()
        if not 0 <= start <= stop <= firsts[-1]:
            raise IndexError(f"rows {start} to {stop} of {firsts[-1]} chosen ones")
        found: list[Int64Array] = []
        block = int(np.searchsorted(firsts, start, side="right")) - 1
        # Blocks without a chosen row are passed over, however many.
        while start < stop:
            last = min(block + _BLOCKS_AT_ONCE, int(np.searchsorted(firsts, stop)))
            bits = np.unpackbits(self._bits[block * _BLOCK_BYTES : last * _BLOCK_BYTES], bitorder="little")
            rows = np.flatnonzero(bits)[start - firsts[block] : stop - firsts[block]]
            found.append(rows + (self.first_row + 8 * block * _BLOCK_BYTES))
            start += len(rows)
            block = int(np.searchsorted(firsts, start, side="right")) - 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _counted(self) -> Int64Array:
        """The chosen rows before each block, and then all: 8 bytes for 8,192 rows."""
        if self._firsts is None:
            counts, at_once = [np.zeros(1, np.int64)], _BLOCK_BYTES * _BLOCKS_AT_ONCE
            for start in range(0, len(self._bits), at_once):
                ones = _ONES[self._bits[start : start + at_once]]
                counts.append(np.add.reduceat(ones, np.arange(0, len(ones), _BLOCK_BYTES), dtype=np.int64))
            self._firsts = np.cumsum(np.concatenate(counts))
        return self._firsts

    def encode(self, number: int) -> tuple[bytes, str]:
        """The bytes of the file of this number, and their digest."""
        digest = xxhash.xxh3_128_digest(self._bits.data)
        header = _HEADER.pack(_MAGIC, _VERSION, number, self.first_row, self.num_rows, digest)
        data = header + xxhash.xxh3_64_digest(header) + self._bits.tobytes()
        return data, xxhash.xxh3_128_hexdigest(data)


def selection_name(number: int, where: str = RETRY_FOLDER) -> str:
    """The name in the output folder of what a retry, or the job itself (RUN_FOLDER), chose."""
    return f"{where}/{number:06d}.rows"


def write_selection(folder: Folder, number: int, selection: Selection, where: str = RETRY_FOLDER) -> str:
    """Write the file durably, in place of one that may be there; its digest."""
    data, digest = selection.encode(number)
    folder.make(where)
    folder.write_atomic(selection_name(number, where), data)
    return digest


def chosen_rows(folder: Folder, number: int, where: str = RETRY_FOLDER, digest: str | None = None) -> Selection:
    """What was chosen. Raises OutputError if the file is not there any more."""
    selection = read_selection(folder, number, digest, where)
    if selection is None:
        name = folder.path(selection_name(number, where))
        raise OutputError(f"{name} is gone or altered; run the same command again, which makes it anew")
    return selection


def read_selection(
    folder: Folder, number: int, digest: str | None = None, where: str = RETRY_FOLDER
) -> Selection | None:
    """What was chosen, mapped; None if the file is gone or altered, or is not the one of this digest."""
    try:
        data = np.memmap(folder.path(selection_name(number, where)), np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    size = _HEADER.size + 8
    head, bits = data[:size].tobytes(), data[size:]
    if len(head) < size or xxhash.xxh3_64_digest(head[: _HEADER.size]) != head[_HEADER.size :]:
        return None
    magic, version, own_number, first_row, num_rows, own_digest = _HEADER.unpack_from(head)
    if (magic, version, own_number) != (_MAGIC, _VERSION, number) or len(bits) != -(-num_rows // 8):
        return None
    if xxhash.xxh3_128_digest(bits.data) != own_digest:
        return None
    if digest is not None and xxhash.xxh3_128_hexdigest(data.data) != digest:
        return None
    return Selection(first_row, num_rows, bits.view(np.ndarray))
