"""The rows of a shard: their positions in the source, ascending, and each one's number among them, from 0.

They may run in another order: `to_run`.
"""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class ShardRows:
    """Rows `first` to `last` of the source (inclusive), or some of them. Consecutive ones cost no memory."""

    def __init__(
        self, first: int, stop: int, positions: Int64Array | None = None, order: Int64Array | None = None
    ) -> None:
        """stop: exclusive. positions: int64, those that there are, ascending; None is all. order: int64, the rows'
        numbers in the order in which they run; None is 0, 1, 2 …
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
        """Rows at these positions, int64, at least one, which run in this order."""
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
        """Whether no row is left out between the first and the last."""
        return self._positions is None

    def local(self, row_index: int) -> int:
        """A row's number among these. Raises LookupError for a row that is not among them."""
        if (place := self._find(row_index)) is None:
            raise LookupError(f"row {row_index} is not one of the shard's rows, {self.first} to {self.last}")
        return place

    def _find(self, row_index: int) -> int | None:
        if not self.first <= row_index <= self.last:
            return None
        if self._positions is None:
            return row_index - self.first
        place = int(np.searchsorted(self._positions, row_index))
        return place if self._positions[place] == row_index else None

    def locals(self, row_index: Int64Array) -> Int64Array:
        """The numbers of rows among these, int64; -1 for a row that is not among them."""
        if self._positions is None:
            is_own, places = (row_index >= self.first) & (row_index <= self.last), row_index - self.first
        else:
            places = np.minimum(np.searchsorted(self._positions, row_index), len(self._positions) - 1)
            is_own = self._positions[places] == row_index
        return np.where(is_own, places, np.int64(-1))

    def positions(self, first: int = 0, last: int | None = None) -> Int64Array:
        """The positions of the rows `first` to `last` (exclusive), counted from the shard's first."""
        last = len(self) if last is None else last
        if self._positions is None:
            return np.arange(self.first + first, self.first + last, dtype=np.int64)
        return self._positions[first:last]

    @property
    def is_in_order(self) -> bool:
        """Whether they run in the order of their positions."""
        return self._order is None

    def to_run(self, first: int, last: int) -> Int64Array:
        """The numbers of the rows that run as the shard's `first` to `last` (exclusive), as they run."""
        return np.arange(first, last, dtype=np.int64) if self._order is None else self._order[first:last]

    def at(self, numbers: Int64Array) -> Int64Array:
        """The positions of the rows of these numbers."""
        return numbers + self.first if self._positions is None else self._positions[numbers]
