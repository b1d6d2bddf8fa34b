"""Stores which rows run and in which order, as files of positions. Gives the positions of a shard's rows."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt
import xxhash

from batchinf.base.errors import OutputError
from batchinf.base.storage import HEADER_BYTES, FileHeader, Folder
from batchinf.records import BoolArray, Int64Array, Lease, Shard
from batchinf.schedule.shards import Extent, shard_at, total_rows, total_shards


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
        self.first = first
        self.last = stop - 1
        self._positions = positions if positions is not None and len(positions) != stop - first else None

    @classmethod
    def of(cls, positions: Int64Array) -> "ShardRows":
        """Rows at these positions (int64, at least one), which run in the given order."""
        if (np.diff(positions) > 0).all():
            return cls(int(positions[0]), int(positions[-1]) + 1, positions)
        by_position = np.argsort(positions)
        order = np.empty(len(positions), np.int64)
        order[by_position] = np.arange(len(positions))
        ascending = positions[by_position]
        return cls(int(ascending[0]), int(ascending[-1]) + 1, ascending, order)

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
            indices = row_index - self.first
            # Not by `indices`: the difference of a damaged segment's least int64 would wrap around.
            is_own = (row_index >= self.first) & (row_index <= self.last)
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


RETRY_FOLDER = "retry"  # rows that retries chose; file names have the number of the retry
# Rows that a retry takes from another file, and their positions there; file names have the number of the retry.
REPAIR_FOLDERS = ("repairs/rows", "repairs/places")
RUN_FOLDER = "selection"  # rows that the job chose; file names have the number of the extent, from 1
# Positions take 8 bytes each if they may be this large.
_WIDE = 1 << 32
_SEARCHED_AT_ONCE = 1 << 20
_BYTES_AT_ONCE = 16384  # of `RowBits`


class Positions:
    """A stored file of positions, mapped into memory. stop_row: above all of them. digest: xxh3-128, hexadecimal."""

    def __init__(self, items: npt.NDArray[np.uint32] | npt.NDArray[np.uint64], stop_row: int, digest: str) -> None:
        self._items = items
        self.stop_row = stop_row
        self.digest = digest

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, row_index: object) -> bool:
        starts = range(0, len(self), _SEARCHED_AT_ONCE)
        return any((self._items[start : start + _SEARCHED_AT_ONCE] == row_index).any() for start in starts)

    def rows(self, start: int, stop: int) -> Int64Array:
        """The positions number `start` to `stop` (exclusive): int64, in the order in which they are stored."""
        return self._items[start:stop].astype(np.int64)

    def pieces(self, num_rows: int) -> Iterator[Int64Array]:
        """All positions, `num_rows` at a time."""
        return (self.rows(start, start + num_rows) for start in range(0, len(self), num_rows))

    def chosen(self, rows: ShardRows) -> BoolArray:
        """Which of a shard's rows are stored, bool [len(rows)]. The stored positions must be ascending."""
        span = self.between(rows.first, rows.last + 1)
        stored = self.rows(span.start, span.stop)
        is_chosen = np.zeros(len(rows), np.bool_)
        found = rows.locals(stored)
        is_chosen[found[found >= 0]] = True
        return is_chosen

    def between(self, first: int, stop: int) -> slice:
        """Which of the stored positions are from `first` to `stop` (exclusive). They must be ascending."""
        edges = np.minimum([first, stop], self.stop_row).astype(self._items.dtype)
        return slice(*np.searchsorted(self._items, edges).tolist())

    def counts(self, shards: Iterable[ShardRows]) -> Int64Array:
        """How many rows of each shard are stored, int64 [number of shards]. The positions must be ascending."""
        return np.array([np.count_nonzero(self.chosen(rows)) for rows in shards], np.int64)


class RowBits:
    """A set of rows, one bit each."""

    def __init__(self, first_row: int, stop_row: int, pieces: Iterable[Int64Array]) -> None:
        """pieces: the rows, from `first_row` to `stop_row` (exclusive), in any order and perhaps several times."""
        self._first_row = first_row
        self._stop_row = stop_row
        self._bits = np.zeros(-(-(stop_row - first_row) // 8), np.uint8)
        for rows in pieces:
            offsets = rows - first_row
            np.bitwise_or.at(self._bits, offsets >> 3, np.left_shift(1, offsets & 7).astype(np.uint8))

    def __bool__(self) -> bool:
        return bool(self._bits.any())

    def count(self) -> int:
        """The number of rows."""
        return int(np.bitwise_count(self._bits).sum())

    def has(self, rows: Int64Array) -> BoolArray:
        """Which of these rows are in the set."""
        is_inside = (rows >= self._first_row) & (rows < self._stop_row)
        offsets = np.where(is_inside, rows - self._first_row, 0)
        is_set: BoolArray = (self._bits[offsets >> 3] >> (offsets & 7)) & 1 != 0
        return is_inside & is_set

    def pieces(self) -> Iterator[Int64Array]:
        """The rows, ascending, some at a time."""
        for start in range(0, len(self._bits), _BYTES_AT_ONCE):
            rows = np.flatnonzero(np.unpackbits(self._bits[start : start + _BYTES_AT_ONCE], bitorder="little"))
            yield rows + (self._first_row + 8 * start)


def positions_name(number: int, where: str = RUN_FOLDER) -> str:
    """The file, in the output folder, of an extent's rows, or of a retry's (RETRY_FOLDER, REPAIR_FOLDERS)."""
    return f"{where}/{number:06d}.positions"


def write_positions(
    folder: Folder,
    number: int,
    rows: Iterable[Int64Array],
    stop_row: int,
    *,
    where: str = RUN_FOLDER,
    check_lock: Callable[[], None] = lambda: None,
) -> Positions:
    """Write the file durably, and replace an old one, when `rows` has ended without an error.

    rows: int64, below `stop_row`, in the order in which they are stored. check_lock: raises if another process runs the
    job by now. The file of that process must not change.
    """
    item = np.dtype("<u4" if stop_row < _WIDE else "<u8")
    digest = xxhash.xxh3_128()
    num_rows = 0
    folder.make(where)
    with folder.writing(positions_name(number, where)) as file:
        file.write(bytes(HEADER_BYTES))
        for some in rows:
            data = some.astype(item)
            digest.update(data.data)
            file.write(data.data)
            num_rows += len(some)
        file.seek(0)
        file.write(FileHeader(number, stop_row, num_rows, digest.digest()).encode())
        check_lock()
    return stored_positions(folder, number, digest.hexdigest(), where)


def read_positions(folder: Folder, number: int, digest: str | None = None, where: str = RUN_FOLDER) -> Positions | None:
    """The stored positions; None if the file is gone or altered, or has another digest."""
    try:
        data = np.memmap(folder.path(positions_name(number, where)), np.uint8, "r").view(np.ndarray)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    header = FileHeader.decode(data[:HEADER_BYTES].tobytes())
    body = data[HEADER_BYTES:]
    if header is None or header.number != number or xxhash.xxh3_128_digest(body.data) != header.digest:
        return None
    if digest not in (None, header.digest.hex()):
        return None
    return Positions(body.view("<u4" if header.first < _WIDE else "<u8"), header.first, header.digest.hex())


def stored_positions(folder: Folder, number: int, digest: str | None = None, where: str = RUN_FOLDER) -> Positions:
    """The stored positions. Raises OutputError if the file is gone or altered, or has another digest."""
    if (positions := read_positions(folder, number, digest, where)) is None:
        name = folder.path(positions_name(number, where))
        raise OutputError(f"{name} is gone or altered; run the same command again to make a new one")
    return positions


def chosen_in_order(order: "RunOrder", chosen: Positions, lease: Lease) -> BoolArray:
    """Which rows of a lease are stored in a file of ascending positions: bool [lease.num_rows], in run order."""
    rows = order.of(lease)
    return chosen.chosen(rows)[rows.to_run(0, len(rows))]


class RunOrder(Sequence[int]):
    """The positions of the rows of some extents, in run order. Threads may share it.

    The first place is `extents[0].start`; as a sequence, it begins with index 0. A file is opened at its first use, and
    each method raises OutputError if the file is gone or altered.
    """

    def __init__(self, folder: Folder, extents: Sequence[Extent], number: int = 1) -> None:
        """number: of the first extent."""
        self.extents = tuple(extents)
        self.number = number
        self._folder = folder
        self._stored: dict[int, Positions] = {}

    def __len__(self) -> int:
        return total_rows(self.extents)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        first = self.extents[0].start
        if isinstance(index, int):
            place = first + range(len(self))[index]
            return int(self.rows(place, place + 1)[0])
        start, stop, step = index.indices(len(self))
        positions: list[int] = self.rows(first + start, first + max(start, stop)).tolist()
        return positions[::step]

    def __contains__(self, row_index: object) -> bool:
        return any(
            row_index in (range(extent.first_row, extent.stop_row) if extent.positions is None else self._file(index))
            for index, extent in enumerate(self.extents)
        )

    def rows(self, start: int, stop: int) -> Int64Array:
        """Positions of the rows at the places `start` to `stop` (exclusive): int64, in run order.

        Raises IndexError for places that no extent has.
        """
        pieces = [np.zeros(0, np.int64)]
        for index in range(self._index(start), len(self.extents)):
            if start == stop:
                break
            extent = self.extents[index]
            end = min(stop, extent.start + extent.num_rows)
            if extent.positions is None:
                shift = extent.first_row - extent.start
                pieces.append(np.arange(start + shift, end + shift, dtype=np.int64))
            else:
                pieces.append(self._file(index).rows(start - extent.start, end - extent.start))
            start = end
        if start < stop:
            raise IndexError(f"place {start} is after {self.extents[-1]}")
        return pieces[-1] if len(pieces) <= 2 else np.concatenate(pieces)

    def pieces(self, num_rows: int, start: int = 0, stop: int | None = None) -> Iterator[Int64Array]:
        """The positions with the indices `start` to `stop` (exclusive; None: all from there), `num_rows` at a time."""
        first = self.extents[0].start
        stop = len(self) if stop is None else stop
        for begin in range(start, stop, num_rows):
            yield self.rows(first + begin, first + min(begin + num_rows, stop))

    def of(self, shard: Shard) -> ShardRows:
        """The rows of a shard, or of a lease."""
        extent = self.extents[self._index(shard.start)]
        if extent.positions is None:
            shift = extent.first_row - extent.start
            return ShardRows(shard.start + shift, shard.stop + shift)
        return ShardRows.of(self.rows(shard.start, shard.stop))

    def first_row(self, shard: Shard) -> int:
        """The least position of a shard's rows."""
        extent = self.extents[self._index(shard.start)]
        if extent.positions is None:
            return shard.start + extent.first_row - extent.start
        return int(self.rows(shard.start, shard.stop).min())

    def shards(self) -> Iterator[ShardRows]:
        """The rows of each shard, by shard index."""
        return (self.of(shard_at(self.extents, index)) for index in range(total_shards(self.extents)))

    def check(self) -> None:
        """Raise OutputError if a file is gone or altered."""
        for index, extent in enumerate(self.extents):
            if extent.positions is not None:
                self._file(index)

    @property
    def is_whole(self) -> bool:
        """Whether all files are there and unaltered."""
        try:
            self.check()
        except OutputError:
            return False
        return True

    def _index(self, place: int) -> int:
        """The index of the extent that has this place."""
        if place < self.extents[0].start:
            raise IndexError(f"place {place} is before {self.extents[0]}")
        return bisect.bisect_right(self.extents, place, key=lambda extent: extent.start) - 1

    def _file(self, index: int) -> Positions:
        if index not in self._stored:
            digest = self.extents[index].positions
            self._stored[index] = stored_positions(self._folder, self.number + index, digest)
        return self._stored[index]
