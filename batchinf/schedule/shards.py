"""The cuts of a job's rows into shards, what is left of them, and who gets the next: no input, no output.

Everything is arithmetic over a few extents: 100 million rows cost no more memory than ten, but for one byte a shard
that says whether it is still to be handed out.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchinf.records import Extent, Shard

PART_BYTES = 64 * 2**20
MAX_ROWS_PER_SHARD = 50_000
# A replica finishes at least this many shards, so that the last ones to end are a small share of the whole.
SHARDS_PER_REPLICA = 16
# Fewer rows in a shard hardly end a small job sooner, as an engine runs hundreds at a time, but make many small files.
SMALL_SHARD_ROWS = 320
# Given to a replica whose engine is not up: it may not listen for long, and what it is told waits in a socket that
# holds some 270 messages.
_MOST_EARLY_SHARDS = 64


def follows(extents: Sequence[Extent], extent: Extent) -> bool:
    """Whether an extent may come after these. The first may begin anywhere: a slice's rows are some of the input's."""
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
    """The shard of this index, counted over all extents. Raises IndexError where there is none."""
    if not 0 <= index < total_shards(extents):
        raise IndexError(f"got shard {index}; the job has {total_shards(extents)}")
    extent = extents[bisect.bisect_right(extents, index, key=lambda extent: extent.first_shard) - 1]
    start, stop = _span(extent, index - extent.first_shard)
    return Shard(index, extent.start + start, extent.start + stop)


def choose_rows_per_shard(
    num_rows: int, num_replicas: int, estimated_bytes_per_row: float, *, is_longest_first: bool = False
) -> int:
    """Rows in a shard: for parts of 64 MiB or a little more, at most 50,000, and 16 shards or more a replica.

    In a small job a replica has fewer shards than 16, but none has more than `SMALL_SHARD_ROWS` rows. Where the longest
    rows run first, the first large shard would have most of the work: there it is 16 in a small job too.
    """
    by_bytes = math.ceil(PART_BYTES / max(estimated_bytes_per_row, 1.0))
    by_replicas = num_rows // (SHARDS_PER_REPLICA * num_replicas)
    by_share = 0 if is_longest_first else _ceil_div(num_rows - num_rows // 8, num_replicas)
    return max(1, min(by_bytes, MAX_ROWS_PER_SHARD, max(by_replicas, min(SMALL_SHARD_ROWS, by_share))))


def _end(extents: Sequence[Extent]) -> int:
    # The place behind the last row.
    return extents[-1].start + extents[-1].num_rows if extents else 0


def _cuts(extent: Extent) -> tuple[int, int]:
    # Rows that are cut coarsely, and the length of a fine shard.
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
    """The shards that are to be run and that no replica has; the lowest index goes first."""

    def __init__(
        self,
        extents: Sequence[Extent],
        committed: npt.NDArray[np.bool_],
        num_chosen: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """committed: bool [total_shards], the shards that are done; it is copied. num_chosen: int64 [total_shards],
        the rows that are to be run of each; None is all.
        """
        self.extents = tuple(extents)
        self.is_in_order = all(extent.order is None for extent in extents)
        self._num_chosen = num_chosen
        self._is_pending = ~committed
        self._num = int(np.count_nonzero(self._is_pending))
        self._cursor = 0

    def __len__(self) -> int:
        return self._num

    def take(self) -> Shard:
        """Hand out the next shard. Raises IndexError where none is left."""
        if not self._num:
            raise IndexError("no shard is pending")
        # The cursor never stands behind a pending shard, and argmax stops at the first True: 5 ms over 100 million.
        self._cursor += int(self._is_pending[self._cursor :].argmax())
        self._is_pending[self._cursor] = False
        self._num -= 1
        return self.shard(self._cursor)

    def shard(self, index: int) -> Shard:
        """The shard of this index, pending or not."""
        shard = shard_at(self.extents, index)
        return shard if self._num_chosen is None else replace(shard, num_chosen=int(self._num_chosen[index]))

    def withhold(self, indices: Iterable[int]) -> None:
        """These shards are not handed out from here until they are given back."""
        for index in indices:
            if self._is_pending[index]:
                self._is_pending[index] = False
                self._num -= 1

    def give_back(self, indices: Iterable[int]) -> None:
        """Shards that were handed out are to be run again, or after all; one that is pending stays so."""
        for index in indices:
            if not self._is_pending[index]:
                self._is_pending[index] = True
                self._num += 1
                self._cursor = min(self._cursor, index)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one replica has to do.

    window_rows: the rows that keep its engine full, at least 1. outstanding_rows: handed out and not finished, begun
    or not. unbegun: shards that it has not begun, oldest first; without those that are being taken back, whose rows
    `outstanding_rows` leaves out too. is_accepting: it takes shards and is not about to end. is_up: so is its engine;
    else what it has, and it has begun none of it, is prepared for one that starts.
    """

    replica: int
    window_rows: int
    outstanding_rows: int
    unbegun: tuple[int, ...]
    is_accepting: bool
    is_up: bool = True


@dataclass(slots=True)
class _Load:
    """A replica's load while a decision is worked out."""

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
        # Two windows: one in the engine, one that is on its way when a shard's last long rows leave slots free.
        return self.is_accepting and (self.rows < 2 * self.window_rows or not self.unbegun)


def next_shards(
    pending: PendingShards, replicas: Sequence[ReplicaLoad], *, is_gathering: bool = False
) -> list[tuple[int, Shard]]:
    """Hand out shards, as (replica, shard) in the order to send them; they are taken out of `pending`.

    Each accepting replica gets enough to keep its engine full over a shard's edge: two windows of rows, and one shard
    beyond those that it has begun. Who has the fewest rows outstanding is served first; those whose engine is not up
    come after all others, and get no more than fills it.

    is_gathering: other replicas are about to come up, and rows have an order of their own. Then no one gets more than
    fills its engine: the first shards may be the longest rows of all, which who comes first must not have alone.
    """
    loads = [_Load.of(load) for load in replicas]
    given = []
    while pending and (hungry := [load for load in loads if load.has_room(is_gathering=is_gathering)]):
        load = min(hungry, key=lambda load: (not load.is_up, load.rows, load.replica))
        shard = pending.take()
        load.rows += shard.num_to_run
        load.unbegun.append(shard.index)
        given.append((load.replica, shard))
    return given


def revocations(pending: PendingShards, replicas: Sequence[ReplicaLoad]) -> dict[int, list[int]]:
    """The shards to ask back, by replica: nothing is pending, and someone has less than a window to do.

    The newest unbegun shard of whoever has most to do goes first. A shard is asked back only if its owner still has
    more to do without it than the idle one has: each move makes the loads more equal, so that none goes to and fro.
    An owner that takes no more work has no such claim. One whose engine is not up takes nothing from others, and keeps
    what it has while the idle one has as much to do.
    """
    asked: dict[int, list[int]] = {}
    if pending:
        return asked
    loads = [_Load.of(load) for load in replicas]
    idle = [load for load in loads if load.is_accepting and load.is_up and load.rows < load.window_rows]
    for load in sorted(idle, key=lambda load: (load.rows, load.replica)):
        while load.rows < load.window_rows and (owner := _owner(pending, loads, load)):
            index = owner.unbegun.pop()
            num_rows = pending.shard(index).num_to_run
            owner.rows -= num_rows
            load.rows += num_rows
            asked.setdefault(owner.replica, []).append(index)
    return asked


def _owner(pending: PendingShards, loads: list[_Load], idle: _Load) -> _Load | None:
    """Who gives its newest unbegun shard to `idle`."""

    def spares(load: _Load) -> bool:
        if load is idle or not load.unbegun:
            return False
        if not load.is_up:
            return load.rows > idle.rows
        left = load.rows - pending.shard(load.unbegun[-1]).num_to_run
        return left > idle.rows or not load.is_accepting

    return max(filter(spares, loads), key=lambda load: (load.rows, -load.replica), default=None)
