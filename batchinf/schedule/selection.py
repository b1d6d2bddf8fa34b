"""Stores which rows run and in which order: bitmaps and permutations. Gives the positions of a shard's rows."""

import bisect
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from batchinf.base.errors import OutputError
from batchinf.base.storage import HEADER_BYTES, FileHeader, Folder
from batchinf.records import BoolArray, Extent, Int64Array, Shard
from batchinf.schedule.shards import shard_at, total_rows, total_shards


class ShardRows:
    """The rows of a shard: `first` to `last` of the source (inclusive), or some of them.

    Consecutive rows take no memory. A row's local index is its number among these rows by position, from 0.
    """

    def __init__(
        self, first: int, stop: int, positions: Int64Array | None = None, order: Int64Array | None = None
    ) -> None:
        """stop: exclusive. positions: int64, the positions of the rows, ascending; None: all from `first` to `stop`.

        order: int64, the rows' local indices in the order in which they run; None: 0, 1, 2 …
        """
        self._order = order
        self.first, self.last = first, stop - 1
        self._positions = positions if positions is not None and len(positions) != stop - first else None

    @classmethod
    def of(cls, positions: Int64Array) -> "ShardRows":
        """Rows at these positions: int64, ascending, at least one."""
        return cls(int(positions[0]), int(positions[-1]) + 1, positions)

    @classmethod
    def in_order(cls, positions: Int64Array) -> "ShardRows":
        """Rows at these positions (int64, at least one), which run in the given order."""
        by_position = np.argsort(positions)
        order = np.empty(len(positions), np.int64)
        order[by_position] = np.arange(len(positions))
        own = positions[by_position]
        return cls(int(own[0]), int(own[-1]) + 1, own, order)

    def __len__(self) -> int:
        return self.last + 1 - self.first if self._positions is None else len(self._positions)

    def __contains__(self, row_index: object) -> bool:
        return isinstance(row_index, int) and self._find(row_index) is not None

    @property
    def is_consecutive(self) -> bool:
        """Whether all rows between the first and the last belong to the shard."""
        return self._positions is None

    def local(self, row_index: int) -> int:
        """A row's local index. Raises LookupError for a row that is not in the shard."""
        if (index := self._find(row_index)) is None:
            raise LookupError(f"row {row_index} is not one of the shard's rows, {self.first} to {self.last}")
        return index

    def _find(self, row_index: int) -> int | None:
        if not self.first <= row_index <= self.last:
            return None
        if self._positions is None:
            return row_index - self.first
        index = int(np.searchsorted(self._positions, row_index))
        return index if self._positions[index] == row_index else None

    def locals(self, row_index: Int64Array) -> Int64Array:
        """The local indices of rows, int64; -1 for a row that is not in the shard."""
        if self._positions is None:
            is_own, indices = (row_index >= self.first) & (row_index <= self.last), row_index - self.first
        else:
            indices = np.minimum(np.searchsorted(self._positions, row_index), len(self._positions) - 1)
            is_own = self._positions[indices] == row_index
        return np.where(is_own, indices, np.int64(-1))

    def positions(self, first: int = 0, last: int | None = None) -> Int64Array:
        """The `row_index` of the rows with the local indices `first` to `last` (exclusive)."""
        last = len(self) if last is None else last
        if self._positions is None:
            return np.arange(self.first + first, self.first + last, dtype=np.int64)
        return self._positions[first:last]

    @property
    def is_in_order(self) -> bool:
        """Whether the rows run in the order of their positions."""
        return self._order is None

    def to_run(self, first: int, last: int) -> Int64Array:
        """The local indices of the rows that run as number `first` to `last` (exclusive) of the shard, in run order."""
        return np.arange(first, last, dtype=np.int64) if self._order is None else self._order[first:last]

    def at(self, local: Int64Array) -> Int64Array:
        """The `row_index` of the rows with these local indices."""
        return local + self.first if self._positions is None else self._positions[local]


# RETRY_FOLDER: rows that retries chose; file names have the number of the retry. RUN_FOLDER: rows that the job chose;
# file names have the number of the extent, from 1.
RETRY_FOLDER, RUN_FOLDER = "retry", "selection"
# Chosen rows are counted in blocks of _BLOCK_BYTES. A search reads _BLOCKS_AT_ONCE blocks at once: 2 million rows.
_BLOCK_BYTES, _BLOCKS_AT_ONCE = 1 << 10, 1 << 8
_ONES = np.array([value.bit_count() for value in range(256)], np.uint8)


class Selection:
    """A bitmap of chosen rows among `first_row` to `first_row + num_rows` (exclusive). 12.5 MB for 100 million rows."""

    def __init__(self, first_row: int, num_rows: int, bits: npt.NDArray[np.uint8] | None = None) -> None:
        """bits: uint8 [ceil(num_rows / 8)], the lowest bit first; None: no row is chosen yet."""
        self.first_row = first_row
        self.num_rows = num_rows
        self._bits = np.zeros(-(-num_rows // 8), np.uint8) if bits is None else bits
        self._firsts: Int64Array | None = None

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> "Selection":
        """An empty selection that covers the rows of these extents."""
        return cls(extents[0].first_row, extents[-1].stop_row - extents[0].first_row)

    def copy(self) -> "Selection":
        """A copy with its own memory."""
        return Selection(self.first_row, self.num_rows, self._bits.copy())

    def add(self, rows: Int64Array) -> None:
        """Choose rows, by `row_index`."""
        offsets = rows - self.first_row
        np.bitwise_or.at(self._bits, offsets >> 3, np.left_shift(np.uint8(1), (offsets & 7).astype(np.uint8)))
        self._firsts = None

    def until(self, stop_row: int) -> "Selection":
        """The same selection for rows before `stop_row` only. No later row may be chosen."""
        num_rows = stop_row - self.first_row
        return Selection(self.first_row, num_rows, self._bits[: -(-num_rows // 8)])

    def chosen(self, rows: ShardRows) -> BoolArray:
        """Which of a shard's rows are chosen, bool [len(rows)]. Rows after the end of the bitmap are not chosen."""
        if not rows.is_consecutive:
            offsets = rows.positions() - self.first_row
            known = offsets[: np.searchsorted(offsets, self.num_rows)]
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

        Raises IndexError if fewer rows are chosen.
        """
        firsts = self._counted()
        if not 0 <= start <= stop <= firsts[-1]:
            raise IndexError(f"rows {start} to {stop} of {firsts[-1]} chosen ones")
        found: list[Int64Array] = []
        block = int(np.searchsorted(firsts, start, side="right")) - 1
        # Any number of blocks without a chosen row is skipped.
        while start < stop:
            last = min(block + _BLOCKS_AT_ONCE, int(np.searchsorted(firsts, stop)))
            bits = np.unpackbits(self._bits[block * _BLOCK_BYTES : last * _BLOCK_BYTES], bitorder="little")
            rows = np.flatnonzero(bits)[start - firsts[block] : stop - firsts[block]]
            found.append(rows + (self.first_row + 8 * block * _BLOCK_BYTES))
            start += len(rows)
            block = int(np.searchsorted(firsts, start, side="right")) - 1
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _counted(self) -> Int64Array:
        """The number of chosen rows before each block, and of all at the end. Takes 8 bytes for 8,192 rows."""
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
        data = FileHeader(number, self.first_row, self.num_rows, digest).encode() + self._bits.tobytes()
        return data, xxhash.xxh3_128_hexdigest(data)


def selection_name(number: int, where: str = RETRY_FOLDER) -> str:
    """The file, in the output folder, of the rows that a retry or the job itself (RUN_FOLDER) chose."""
    return f"{where}/{number:06d}.rows"


def write_selection(folder: Folder, number: int, selection: Selection, where: str = RETRY_FOLDER) -> str:
    """Write the file durably, and replace an old one. Returns its digest."""
    data, digest = selection.encode(number)
    folder.make(where)
    folder.write_atomic(selection_name(number, where), data)
    return digest


def chosen_rows(folder: Folder, number: int, where: str = RETRY_FOLDER, digest: str | None = None) -> Selection:
    """The stored selection. Raises OutputError if the file is gone or altered."""
    selection = read_selection(folder, number, digest, where)
    if selection is None:
        name = folder.path(selection_name(number, where))
        raise OutputError(f"{name} is gone or altered; run the same command again, which makes it anew")
    return selection


def read_selection(
    folder: Folder, number: int, digest: str | None = None, where: str = RETRY_FOLDER
) -> Selection | None:
    """The stored selection, memory-mapped; None if the file is gone or altered, or has another digest."""
    try:
        data = np.memmap(folder.path(selection_name(number, where)), np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    header, bits = FileHeader.decode(data[:HEADER_BYTES].tobytes()), data[HEADER_BYTES:]
    if header is None or header.number != number or len(bits) != -(-header.second // 8):
        return None
    if xxhash.xxh3_128_digest(bits.data) != header.digest:
        return None
    if digest is not None and xxhash.xxh3_128_hexdigest(data.data) != digest:
        return None
    return Selection(header.first, header.second, bits.view(np.ndarray))


_ORDER_MAGIC, _ORDER_VERSION = b"bi-order", 1
# Magic, format version, number of the extent from 1, first row, number of rows, bytes of an item, 12 unused bytes.
_ORDER_HEADER = struct.Struct("<8sIIQQI12x")
_WIDE = 1 << 32


class Permutation:
    """The rows of an extent in run order. The file has 4 bytes a row; nothing of it stays in memory."""

    def __init__(self, first_row: int, items: npt.NDArray[np.uint32] | npt.NDArray[np.uint64]) -> None:
        """items: [num_rows], each row's position minus `first_row`."""
        self._first_row, self._items = first_row, items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, start: int, stop: int) -> Int64Array:
        """Positions of the rows that run as number `start` to `stop` (exclusive) of the extent: int64, in run order."""
        return self._items[start:stop].astype(np.int64) + self._first_row


def permutation_name(number: int) -> str:
    """The file, in the output folder, with the order of extent `number` (from 1)."""
    return f"{RUN_FOLDER}/{number:06d}.order"


def write_permutation(
    folder: Folder, number: int, first_row: int, stop_row: int, num_rows: int, rows: Iterable[Int64Array]
) -> str:
    """Write the file durably, and replace an old one. Returns its digest. rows: positions, in run order."""
    item = np.dtype("<u4" if stop_row - first_row < _WIDE else "<u8")
    header = _ORDER_HEADER.pack(_ORDER_MAGIC, _ORDER_VERSION, number, first_row, num_rows, item.itemsize)
    digest, num_written = xxhash.xxh3_128(header), 0
    folder.make(RUN_FOLDER)
    with folder.writing(permutation_name(number)) as file:
        file.write(header)
        for some in rows:
            data = (some - first_row).astype(item).tobytes()
            digest.update(data)
            file.write(data)
            num_written += len(some)
        if num_written != num_rows:
            raise ValueError(f"got an order of {num_written} rows for {num_rows}")
    return digest.hexdigest()


def read_permutation(folder: Folder, number: int, digest: str) -> Permutation | None:
    """The stored permutation, memory-mapped; None if the file is gone or altered, or has another digest."""
    try:
        data = np.memmap(folder.path(permutation_name(number)), np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    if len(data) < _ORDER_HEADER.size or xxhash.xxh3_128_hexdigest(data.data) != digest:
        return None
    _, version, _, first_row, num_rows, size = _ORDER_HEADER.unpack(data[: _ORDER_HEADER.size].tobytes())
    if version != _ORDER_VERSION or len(data) != _ORDER_HEADER.size + num_rows * size:
        return None
    items = data[_ORDER_HEADER.size :].view(np.ndarray).view("<u4" if size == 4 else "<u8")
    return Permutation(first_row, items)


def stored_permutation(folder: Folder, number: int, digest: str) -> Permutation:
    """The stored permutation. Raises OutputError if the file is gone or altered."""
    found = read_permutation(folder, number, digest)
    if found is None:
        name = folder.path(permutation_name(number))
        raise OutputError(f"{name} is gone or altered; run the same command again, which makes it anew")
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows of an extent before it is cut into shards: see `Extent`. start: the place of the first row.

    ordered_by: a value of `input.order`, by which the rows are ordered.
    """

    start: int
    num_rows: int
    first_row: int
    stop_row: int
    selection: str | None = None
    order: str | None = None
    ordered_by: str = "input"

    def extent(self, rows_per_shard: int, first_shard: int) -> Extent:
        """These rows, cut into shards."""
        own = self.first_row, self.stop_row, self.selection, self.order
        return Extent(self.start, self.num_rows, rows_per_shard, first_shard, *own)


class RunOrder:
    """The run order of some extents. The first place is `extents[0].start`. Threads may share it.

    The file of a bitmap or an order is opened at its first use. Each method raises OutputError if the file is gone or
    altered.
    """

    def __init__(self, folder: Folder, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        self._folder = folder
        self._selections: dict[int, Selection] = {}
        self._permutations: dict[int, Permutation] = {}

    @property
    def num_places(self) -> int:
        """Number of rows that run."""
        return total_rows(self.extents)

    def rows(self, start: int, stop: int) -> Int64Array:
        """Positions of the rows at the places `start` to `stop` (exclusive) of one extent: int64, ascending.

        It ignores stored orders, as if all rows ran by position.
        """
        number = bisect.bisect_right(self.extents, start, key=lambda extent: extent.start) - 1
        extent = self.extents[number]
        if not extent.start <= start <= stop <= extent.start + extent.num_rows:
            raise IndexError(f"places {start} to {stop} are not all in {extent}")
        if extent.selection is None:
            shift = extent.first_row - extent.start
            return np.arange(start + shift, stop + shift, dtype=np.int64)
        return self._selection(number).rows(start - extent.start, stop - extent.start)

    def of(self, shard: Shard) -> ShardRows:
        """The rows of a shard."""
        extent = self._extent(shard)
        if extent.order is not None:
            return ShardRows.in_order(self._in_order(shard))
        if extent.selection is None:
            shift = extent.first_row - extent.start
            return ShardRows(shard.start + shift, shard.stop + shift)
        return ShardRows.of(self.rows(shard.start, shard.stop))

    def first_row(self, shard: Shard) -> int:
        """The position of a shard's first row."""
        extent = self._extent(shard)
        if extent.order is not None:
            return int(self._in_order(shard).min())
        if extent.selection is None:
            return shard.start + extent.first_row - extent.start
        return int(self.rows(shard.start, shard.start + 1)[0])

    def shards(self) -> Iterator[ShardRows]:
        """The rows of each shard, by shard index."""
        return (self.of(shard_at(self.extents, index)) for index in range(total_shards(self.extents)))

    def check(self) -> None:
        """Raise OutputError if the file of a bitmap or an order is gone or altered."""
        for number, extent in enumerate(self.extents):
            if extent.selection is not None:
                self._selection(number)
            if extent.order is not None:
                self._permutation(number)

    @property
    def is_whole(self) -> bool:
        """Whether the files of all bitmaps and orders are there and unaltered."""
        try:
            self.check()
        except OutputError:
            return False
        return True

    def _number(self, shard: Shard) -> int:
        return bisect.bisect_right(self.extents, shard.start, key=lambda extent: extent.start) - 1

    def _extent(self, shard: Shard) -> Extent:
        return self.extents[self._number(shard)]

    def _in_order(self, shard: Shard) -> Int64Array:
        number = self._number(shard)
        first = self.extents[number].start
        return self._permutation(number).rows(shard.start - first, shard.stop - first)

    def _permutation(self, number: int) -> Permutation:
        if number not in self._permutations:
            digest = self.extents[number].order
            assert digest is not None
            self._permutations[number] = stored_permutation(self._folder, number + 1, digest)
        return self._permutations[number]

    def _selection(self, number: int) -> Selection:
        if number not in self._selections:
            digest = self.extents[number].selection
            self._selections[number] = chosen_rows(self._folder, number + 1, RUN_FOLDER, digest)
        return self._selections[number]
