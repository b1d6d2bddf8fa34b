"""Cuts a job's rows into shards, keeps the pending ones, and decides which replica gets the next. Pure computation.

Everything is arithmetic over a few extents, so 100 million rows take no more memory than ten, except for one byte a
shard that says whether the shard is pending.
"""

import bisect
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchinf.records import Extent, Shard

PART_BYTES = 64 * 2**20
MAX_ROWS_PER_SHARD = 50_000
# Each replica gets at least this many shards, so that the last shards to end are a small share of the work.
SHARDS_PER_REPLICA = 16
# An engine runs hundreds of rows at a time. Smaller shards hardly end a small job sooner and make many small files.
SMALL_SHARD_ROWS = 320
# The limit for a replica whose engine is not up. It may read no messages for a long time, and the socket in which they
# wait holds about 270.
_MOST_EARLY_SHARDS = 64


def follows(extents: Sequence[Extent], extent: Extent) -> bool:
    """Whether an extent may follow these. The first may begin anywhere, because a slice has only some of the rows."""
    start, first_row = (_end(extents), extents[-1].stop_row) if extents else (extent.start, extent.first_row)
    return (extent.start, extent.first_shard, extent.first_row) == (start, total_shards(extents), first_row)


def num_shards(extent: Extent) -> int:
    """Shards in one extent."""
    coarse_rows, fine = _cuts(extent)
    return _ceil_div(coarse_rows, extent.rows_per_shard) + _ceil_div(extent.num_rows - coarse_rows, fine)


def total_shards(extents: Sequence[Extent]) -> int:
    """Shards in all extents."""
    return extents[-1].first_shard + num_shards(extents[-1]) if extents else 0


def total_rows(extents: Sequence[Extent]) -> int:
    """Rows in all extents."""
    return sum(extent.num_rows for extent in extents)


def shard_at(extents: Sequence[Extent], index: int) -> Shard:
    """The shard of this index, counted over all extents. Raises IndexError if there is none."""
    if not 0 <= index < total_shards(extents):
        raise IndexError(f"got shard {index}; the job has {total_shards(extents)}")
    extent = extents[bisect.bisect_right(extents, index, key=lambda extent: extent.first_shard) - 1]
    start, stop = _span(extent, index - extent.first_shard)
    return Shard(index, extent.start + start, extent.start + stop)


def choose_rows_per_shard(
    num_rows: int, num_replicas: int, estimated_bytes_per_row: float, *, is_longest_first: bool = False
) -> int:
    """Rows in a shard: for parts of 64 MiB or a little more, at most 50,000, and at least 16 shards for each replica.

    In a small job, a replica has fewer than 16 shards, and no shard has more than `SMALL_SHARD_ROWS` rows. If the
    longest rows run first, the first large shard would have most of the work. A replica then has at least 16 shards
    in a small job too.
    """
    by_bytes = math.ceil(PART_BYTES / max(estimated_bytes_per_row, 1.0))
    by_replicas = num_rows // (SHARDS_PER_REPLICA * num_replicas)
    by_share = 0 if is_longest_first else _ceil_div(num_rows - num_rows // 8, num_replicas)
    return max(1, min(by_bytes, MAX_ROWS_PER_SHARD, max(by_replicas, min(SMALL_SHARD_ROWS, by_share))))


def _end(extents: Sequence[Extent]) -> int:
    # The place after the last row.
    return extents[-1].start + extents[-1].num_rows if extents else 0


def _cuts(extent: Extent) -> tuple[int, int]:
    # The number of rows that are cut into large shards, and the number of rows in a small shard.
    return extent.num_rows - extent.num_rows // 8, max(1, extent.rows_per_shard // 4)


def _span(extent: Extent, place: int) -> tuple[int, int]:
    coarse_rows, fine = _cuts(extent)
    num_coarse = _ceil_div(coarse_rows, extent.rows_per_shard)
    if place < num_coarse:
        start = place * extent.rows_per_shard
        return start, min(start + extent.rows_per_shard, coarse_rows)
    start = coarse_rows + (place - num_coarse) * fine
    return start, min(start + fine, extent.num_rows)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


class PendingShards:
    """The shards that have to run and that no replica has. The lowest index goes first."""

    def __init__(
        self,
        extents: Sequence[Extent],
        committed: npt.NDArray[np.bool_],
        num_chosen: npt.NDArray[np.int64] | None = None,
        *,
        is_in_order: bool = True,
    ) -> None:
        """committed: bool [total_shards], the shards that are done; it is copied.

        num_chosen: int64 [total_shards], how many rows of each shard have to run; None: all. is_in_order: whether rows
        run in the order of their positions.
        """
        self.extents = tuple(extents)
        self.is_in_order = is_in_order
        self._num_chosen = num_chosen
        self._is_pending = ~committed
        self._num = int(np.count_nonzero(self._is_pending))
        self._cursor = 0

    def __len__(self) -> int:
        return self._num

    def take(self) -> Shard:
        """Hand out the next shard. Raises IndexError if none is left."""
        if not self._num:
            raise IndexError("no shard is pending")
        # No pending shard is before the cursor, and argmax stops at the first True: 5 ms over 100 million.
        self._cursor += int(self._is_pending[self._cursor :].argmax())
        self._is_pending[self._cursor] = False
        self._num -= 1
        return self.shard(self._cursor)

    def shard(self, index: int) -> Shard:
        """The shard of this index, pending or not."""
        shard = shard_at(self.extents, index)
        return shard if self._num_chosen is None else replace(shard, num_chosen=int(self._num_chosen[index]))

    def withhold(self, indices: Iterable[int]) -> None:
        """Do not hand out these shards until `give_back` returns them."""
        for index in indices:
            if self._is_pending[index]:
                self._is_pending[index] = False
                self._num -= 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Make shards pending that were handed out or withheld. A shard that is pending stays pending."""
        for index in indices:
            if not self._is_pending[index]:
                self._is_pending[index] = True
                self._num += 1
                self._cursor = min(self._cursor, index)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work that one replica has.

    window_rows: the rows that keep its engine full, at least 1. outstanding_rows: rows that it was given and has not
    finished, begun or not. unbegun: shards that it has not begun, oldest first. Shards that are being taken back count
    in neither. is_accepting: it takes shards and is not about to end. is_up: its engine is up; if not, the replica has
    begun none of its shards and prepares them for the engine that is starting.
    """

    replica: int
    window_rows: int
    outstanding_rows: int
    unbegun: tuple[int, ...]
    is_accepting: bool
    is_up: bool = True


@dataclass(slots=True)
class _Load:
    """A replica's load, changed while a decision is computed."""

    replica: int
    window_rows: int
    rows: int
    unbegun: list[int]
    is_accepting: bool
    is_up: bool

    @classmethod
    def of(cls, load: ReplicaLoad) -> "_Load":
        return cls(
            load.replica, load.window_rows, load.outstanding_rows, list(load.unbegun), load.is_accepting, load.is_up
        )

    def has_room(self, *, is_gathering: bool) -> bool:
        if not self.is_up and len(self.unbegun) >= _MOST_EARLY_SHARDS:
            return False
        if is_gathering or not self.is_up:
            return self.is_accepting and self.rows < self.window_rows
        # Two windows: one in the engine, and one that is ready when only the last long rows of a shard still run.
        return self.is_accepting and (self.rows < 2 * self.window_rows or not self.unbegun)


def next_shards(
    pending: PendingShards, replicas: Sequence[ReplicaLoad], *, is_gathering: bool = False
) -> list[tuple[int, Shard]]:
    """Take shards out of `pending` and hand them out. Returns (replica, shard) in the order to send them.

    Each accepting replica gets enough rows to keep its engine full between two shards: two windows of rows, and one
    shard that it has not begun. The replica with the fewest outstanding rows comes first. Replicas whose engine is not
    up come last, and get only enough rows to fill the engine.

    is_gathering: other replicas are about to come up, and the rows have a stored order. Each replica then gets only
    enough rows to fill its engine: the first shards may have the longest rows, and the first replica to come up must
    not get all of them.
    """
    hungry = [(not load.is_up, load.rows, load.replica, load) for load in map(_Load.of, replicas)]
    heapq.heapify(hungry)
    given = []
    while pending and hungry:
        load = hungry[0][-1]
        if not load.has_room(is_gathering=is_gathering):
            heapq.heappop(hungry)
            continue
        shard = pending.take()
        load.rows += shard.num_to_run
        load.unbegun.append(shard.index)
        given.append((load.replica, shard))
        heapq.heapreplace(hungry, (not load.is_up, load.rows, load.replica, load))
    return given


def revocations(pending: PendingShards, replicas: Sequence[ReplicaLoad]) -> dict[int, list[int]]:
    """The shards to take back, by replica, if nothing is pending. An idle replica has less than a window of rows.

    The newest unbegun shard of the replica with the most rows is taken first. A shard is taken back only if its owner,
    without it, still has more rows than the idle replica. So each move makes the loads more equal, and no shard moves
    back and forth. An owner that accepts no more work gives its shards in any case. A replica whose engine is not up
    takes nothing from others, and keeps its shards while the idle replica has at least as many rows.
    """
    asked: dict[int, list[int]] = {}
    if pending:
        return asked
    loads = [_Load.of(load) for load in replicas]
    idle = [load for load in loads if load.is_accepting and load.is_up and load.rows < load.window_rows]
    owners = [load for load in loads if load.unbegun]
    for load in sorted(idle, key=lambda load: (load.rows, load.replica)):
        while load.rows < load.window_rows and (owner := _owner(pending, owners, load)):
            index = owner.unbegun.pop()
            num_rows = pending.shard(index).num_to_run
            owner.rows -= num_rows
            load.rows += num_rows
            asked.setdefault(owner.replica, []).append(index)
    return asked


def _owner(pending: PendingShards, owners: list[_Load], idle: _Load) -> _Load | None:
    """The replica that gives its newest unbegun shard to `idle`, if there is one."""

    def spares(load: _Load) -> bool:
        if load is idle or not load.unbegun:
            return False
        if not load.is_up:
            return load.rows > idle.rows
        left = load.rows - pending.shard(load.unbegun[-1]).num_to_run
        return left > idle.rows or not load.is_accepting

    return max(filter(spares, owners), key=lambda load: (load.rows, -load.replica), default=None)
