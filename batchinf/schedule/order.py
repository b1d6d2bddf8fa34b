"""The order in which a job's rows are run: which positions of the source stand at which places.

All rows of an extent in their own order cost nothing; where some are chosen, their bitmap is mapped from its file; so
is their order, where that is another one than that of their positions.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.records import Extent, Int64Array, Shard
from batchinf.schedule.selection import RUN_FOLDER, Permutation, Selection, ShardRows, chosen_rows, stored_permutation
from batchinf.schedule.shards import shard_at, total_rows, total_shards


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows of an extent that is not cut yet: see `Extent`. `start` is the place of the first.

    ordered_by: what `order` is the order of, as `input.order` has it.
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
    """The places of some extents; the first of them is `extents[0].start`. Threads may share it.

    A bitmap, or an order, is opened when it is first asked for; each method raises OutputError if it is gone or altered
    by then.
    """

    def __init__(self, folder: Folder, extents: Sequence[Extent]) -> None:
        self.extents = tuple(extents)
        self._folder = folder
        self._selections: dict[int, Selection] = {}
        self._permutations: dict[int, Permutation] = {}

    @property
    def num_places(self) -> int:
        """How many rows are run."""
        return total_rows(self.extents)

    def rows(self, start: int, stop: int) -> Int64Array:
        """Positions of the rows at the places `start` to `stop` (exclusive) of one extent, int64, ascending: as if
        all rows ran in the order of their positions.
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
        """The rows of each shard, in order."""
        return (self.of(shard_at(self.extents, index)) for index in range(total_shards(self.extents)))

    def check(self) -> None:
        """Raises OutputError if a bitmap, or an order, is gone or altered."""
        for number, extent in enumerate(self.extents):
            if extent.selection is not None:
                self._selection(number)
            if extent.order is not None:
                self._permutation(number)

    @property
    def is_whole(self) -> bool:
        """Whether each bitmap, and each order, is there, as it was written."""
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
