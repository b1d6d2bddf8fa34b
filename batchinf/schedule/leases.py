"""Hands out a job's rows as leases: keeps the rows that no replica has, and decides which replica gets which. Pure.

A shard is the rows of one file. A lease is the rows that a replica is given: a whole shard while many rows are left,
and only some rows of a shard later, so that all replicas end together. docs/design.md has the reasons for the rules.
"""

import bisect
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchinf.records import BoolArray, Lease
from batchinf.schedule.shards import Extent, rows_of_shards, shard_at

# Few rows are left when they would fill the window of each replica fewer times than this: two windows are what a
# replica holds before, and the third is still to be shared.
FEW_WINDOWS = 3
# A lease is this part of a replica's share of the pending rows, so that the last leases have one row. While many rows
# are left, it is larger: results of a shard that was cut are written twice.
_PART_OF_FEW = 1 / 4
_PART_OF_MANY = 1 / 2
# A piece that is not much larger than a lease is not cut: the rest would be a lease of few rows.
_NOT_CUT = 1.5
# While few rows are left, a replica gets more once it has room for so much of what it may hold, or for a whole lease.
_GRAIN = 1 / 16
# Replicas that start together come up within a second or two of each other. Their rows are held back so long, but at
# most for this part of the time that the rows take: should a replica never come, the job ends that much later.
HOLD_S = 2.0
PROMISED_HOLD_S = 5.0
_HOLD_SHARE = 0.22


@dataclass(slots=True)
class _Cut:
    """A shard that was cut."""

    num_rows: int
    """The rows whose results are not stored."""
    attempts: int
    """The most attempts of its leases."""


class PendingRows:
    """The rows that have to run and that no replica has, as pieces of shards. The lowest shard goes first."""

    def __init__(
        self,
        extents: Sequence[Extent],
        committed: npt.NDArray[np.bool_],
        num_chosen: npt.NDArray[np.int64] | None = None,
        *,
        chosen_of: Callable[[Lease], BoolArray] | None = None,
        is_in_order: bool = True,
    ) -> None:
        """committed: bool [total_shards], the shards that are done; it is copied.

        num_chosen: int64 [total_shards], how many rows of each shard have to run; None: all. chosen_of: which rows of a
        lease these are, bool [num_rows] in run order; given with num_chosen. is_in_order: whether rows run in the order
        of their positions.
        """
        self.extents = tuple(extents)
        self.is_in_order = is_in_order
        self._num_chosen = num_chosen
        self._chosen_of = chosen_of
        self._is_untouched = ~committed  # shards of which all rows are pending, and were never given
        self._cursor = 0  # no such shard is before it
        self._pieces: dict[int, list[Lease]] = {}  # the pending rows of all other shards, by place
        self._cuts: dict[int, _Cut] = {}
        self.stored_leases: deque[Lease] = deque()  # shards that have no part yet; the journal has all their results
        self.num_rows = (
            rows_of_shards(self.extents, self._is_untouched)
            if num_chosen is None
            else int(num_chosen[self._is_untouched].sum())
        )

    def __bool__(self) -> bool:
        """Whether there is anything to hand out."""
        return bool(self.stored_leases) or self.num_rows > 0

    def take(self, num_rows: int | None = None, most_rows: int | None = None) -> Lease:
        """Hand out the next rows: about `num_rows` of one shard and at most `most_rows`; None: all that are pending.

        A stored lease comes first, and whole. Raises IndexError if nothing is pending.
        """
        if self.stored_leases:
            return self.stored_leases.popleft()
        lease = self._first()
        if num_rows is not None and lease.num_to_run > min(_NOT_CUT * num_rows, most_rows or math.inf):
            lease, rest = self._cut(lease, num_rows)
            self._pieces.setdefault(lease.index, []).insert(0, rest)
        self.num_rows -= lease.num_to_run
        return lease

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Make leases pending that were handed out or withheld, and whose results are not stored by their replica."""
        for lease in leases:
            if lease.is_stored:
                self.stored_leases.append(lease)
                continue
            self.num_rows += lease.num_to_run
            pieces = self._pieces.setdefault(lease.index, [])
            bisect.insort(pieces, lease, key=lambda piece: piece.start)
            self._pieces[lease.index] = self._joined(pieces)

    def store(self, lease: Lease) -> None:
        """Note that the journal has the results of a lease. With the last lease of a shard, its part can be made."""
        cut = self._cuts[lease.index]
        cut.num_rows -= lease.num_rows
        cut.attempts = max(cut.attempts, lease.attempts)
        if not cut.num_rows:
            del self._cuts[lease.index]
            whole = self._piece(lease.index, attempts=cut.attempts + 1)
            self.stored_leases.append(replace(whole, is_stored=True))

    def withhold(self, leases: Iterable[Lease]) -> None:
        """Do not hand out these rows until `give_back` returns them."""
        for lease in leases:
            pieces = [part for piece in self._remove(lease.index) for part in self._without(piece, lease)]
            if not lease.is_whole:  # also if pieces that make up the shard were given to one replica as one lease
                self._note_cut(lease)
            for piece in pieces:
                if piece.num_to_run:
                    self._pieces.setdefault(lease.index, []).append(piece)
                    self.num_rows += piece.num_to_run
                else:
                    self._cuts[lease.index].num_rows -= piece.num_rows

    def _remove(self, index: int) -> list[Lease]:
        pieces = self._pieces.pop(index, [])
        if self._is_untouched[index]:
            self._is_untouched[index] = False
            pieces = [self._piece(index)]
        self.num_rows -= sum(piece.num_to_run for piece in pieces)
        return pieces

    def _without(self, piece: Lease, lease: Lease) -> list[Lease]:
        """The parts of a piece before and after the places of a lease of the same shard."""
        edges = ((piece.start, min(piece.stop, lease.start)), (max(piece.start, lease.stop), piece.stop))
        return [self._piece(piece.index, *edge, attempts=piece.attempts) for edge in edges if edge[0] < edge[1]]

    def _first(self) -> Lease:
        """Remove and return the first piece of the lowest shard that has pending rows."""
        untouched = self._is_untouched[self._cursor :]
        # argmax stops at the first True: 5 ms over 100 million.
        self._cursor += int(untouched.argmax()) if untouched.any() else len(untouched)
        index = min(self._pieces, default=len(self._is_untouched))
        if self._cursor < index:
            self._is_untouched[self._cursor] = False
            return self._piece(self._cursor)
        if index not in self._pieces:
            raise IndexError("no row is pending")
        first, *others = self._pieces.pop(index)
        if others:
            self._pieces[index] = others
        return first

    def _piece(self, index: int, start: int | None = None, stop: int | None = None, *, attempts: int = 1) -> Lease:
        """Rows of a shard; all without `start` and `stop`."""
        shard = shard_at(self.extents, index)
        start = shard.start if start is None else start
        stop = shard.stop if stop is None else stop
        is_whole = (start, stop) == (shard.start, shard.stop)
        lease = Lease(index, start, stop, is_whole=is_whole, attempts=attempts)
        if self._num_chosen is None:
            return lease
        if is_whole:
            return replace(lease, num_chosen=int(self._num_chosen[index]))
        assert self._chosen_of is not None
        return replace(lease, num_chosen=int(np.count_nonzero(self._chosen_of(lease))))

    def _cut(self, lease: Lease, num_rows: int) -> tuple[Lease, Lease]:
        """The first `num_rows` rows that have to run, and the rest, which is at least one."""
        place = lease.start + num_rows
        if self._chosen_of is not None:
            place = lease.start + int(np.flatnonzero(self._chosen_of(lease))[num_rows - 1]) + 1
        self._note_cut(lease)
        first = self._piece(lease.index, lease.start, place, attempts=lease.attempts)
        return first, self._piece(lease.index, place, lease.stop, attempts=lease.attempts)

    def _note_cut(self, lease: Lease) -> None:
        if lease.index not in self._cuts:
            self._cuts[lease.index] = _Cut(shard_at(self.extents, lease.index).num_rows, lease.attempts)

    def _joined(self, pieces: list[Lease]) -> list[Lease]:
        """Pieces of one shard, by place, with neighbours as one. If that is the shard, it counts as never cut."""
        joined = pieces[:1]
        for piece in pieces[1:]:
            last = joined[-1]
            if last.stop == piece.start and last.attempts == piece.attempts:
                joined[-1] = self._piece(last.index, last.start, piece.stop, attempts=last.attempts)
            else:
                joined.append(piece)
        if joined[0].is_whole:
            self._cuts.pop(joined[0].index, None)
        return joined


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work that one replica has. Leases that are being taken back do not count."""

    replica: int
    window_rows: int
    """The rows that keep its engine full, at least 1."""
    outstanding_rows: int
    """Rows that it was given and has not finished, begun or not."""
    unbegun: tuple[Lease, ...]
    """Leases that it has not begun, oldest first."""
    is_accepting: bool
    """It takes leases and is not about to end."""
    engine_rows: int | None = None
    """Rows that its engine runs, or will run before it can be given more; None before its first report."""
    num_stored: int = 0
    """Stored leases that it has: it makes their parts."""

    def has_room_among_many(self, *, is_gathering: bool) -> bool:
        """Whether it takes a lease while many rows are left."""
        if is_gathering:
            return self.is_accepting and self.outstanding_rows < self.window_rows
        # Two windows: one in the engine, and one that is ready when only the last long rows of a shard still run.
        return self.is_accepting and (self.outstanding_rows < 2 * self.window_rows or not self.unbegun)

    def room(self, sharing: "Sharing", lease_rows: int) -> int:
        """The rows that it takes while few are left; 0 if it has no room for a lease."""
        if not self.is_accepting:
            return 0
        # Before its first report, nobody knows how many rows its cache holds, and rows that it has begun do not move.
        runs = math.ceil(_PART_OF_FEW * sharing.share) if self.engine_rows is None else self.engine_rows
        most = min(sharing.share, runs)
        room = most - self.outstanding_rows
        return room if room >= max(1, min(lease_rows, int(_GRAIN * most))) else 0

    def takes_more(self, sharing: "Sharing") -> bool:
        """Whether it may get leases of other replicas: it has less than its share, and can run more."""
        runs = self.window_rows if self.engine_rows is None else min(self.engine_rows, self.window_rows)
        return self.is_accepting and self.outstanding_rows < min(sharing.share, runs)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the rows that are left are shared."""

    num_replicas: int
    """Replicas that share them, with those for which rows are held back."""
    left_rows: int
    """Pending and outstanding rows."""
    are_few: bool
    """So few rows are left that no replica may hold more than its engine runs."""
    is_alone: bool = False
    """No other replica is up or will be: leases are whole shards, for rows need not be shared."""

    @classmethod
    def of(
        cls, pending: PendingRows, replicas: Sequence[ReplicaLoad], *, num_awaited: int = 0, num_absent: int = 0
    ) -> "Sharing":
        """replicas: all whose engine is up. num_awaited: those that are not up and for which rows are held back.

        num_absent: all that are not up.
        """
        accepting = [load for load in replicas if load.is_accepting]
        left_rows = pending.num_rows + sum(load.outstanding_rows for load in replicas)
        windows = sum(load.window_rows for load in accepting)
        windows += num_absent * max((load.window_rows for load in accepting), default=0)
        # One replica alone shares with none, so nothing is gained if rows wait here and not in its own queue.
        is_alone = len(replicas) + num_absent == 1
        are_few = not is_alone and left_rows < FEW_WINDOWS * windows
        return cls(max(1, len(accepting) + num_awaited), left_rows, are_few, is_alone)

    @property
    def share(self) -> int:
        """The rows of one replica, if all have equally many."""
        return -(-self.left_rows // self.num_replicas)

    def lease_rows(self, pending: PendingRows) -> int:
        """The most rows of the next lease, at least 1."""
        if self.is_alone:
            return max(1, pending.num_rows)
        part = _PART_OF_FEW if self.are_few else _PART_OF_MANY
        return max(1, math.ceil(part * pending.num_rows / self.num_replicas))


def next_leases(
    pending: PendingRows, replicas: Sequence[ReplicaLoad], sharing: Sharing, *, is_gathering: bool = False
) -> list[tuple[int, Lease]]:
    """Take leases out of `pending` and hand them out. Returns (replica, lease) in the order to send them.

    While many rows are left, each accepting replica gets enough leases to keep its engine full between two of them: two
    windows of rows, and one lease that it has not begun. Nearly all are whole shards. While few are left, it gets at
    most its share and what its engine runs, in leases that become smaller and smaller. The replica with the fewest
    outstanding rows comes first. Stored leases go out before all others; see `_give_stored`.

    is_gathering: other replicas are about to come up, and the rows have a stored order. While many rows are left, each
    replica then gets only enough to fill its engine: the first shards may have the longest rows, and the first replica
    to come up must not get all of them.
    """
    handed_out = _give_stored(pending, replicas)
    hungry = [(load.outstanding_rows, load.replica, load) for load in replicas if load.is_accepting]
    heapq.heapify(hungry)
    while pending and hungry:
        load = hungry[0][-1]
        lease_rows = sharing.lease_rows(pending)
        most_rows = None
        if sharing.are_few:
            most_rows = load.room(sharing, lease_rows)
            has_room = most_rows > 0
            lease_rows = min(most_rows, lease_rows)
        else:
            lease_rows = max(lease_rows, load.window_rows)
            has_room = load.has_room_among_many(is_gathering=is_gathering)
        if not has_room:
            heapq.heappop(hungry)
            continue
        lease = pending.take(lease_rows, most_rows)
        handed_out.append((load.replica, lease))
        rows = load.outstanding_rows + lease.num_to_run
        load = replace(load, outstanding_rows=rows, unbegun=(*load.unbegun, lease))
        heapq.heapreplace(hungry, (rows, load.replica, load))
    return _merged(handed_out)


def _give_stored(pending: PendingRows, replicas: Sequence[ReplicaLoad]) -> list[tuple[int, Lease]]:
    """Hand out the stored leases, each to the replica that has the fewest; of these, with the fewest outstanding rows.
    It needs no room in an engine for them."""
    takers = [(load.num_stored, load.outstanding_rows, load.replica) for load in replicas if load.is_accepting]
    heapq.heapify(takers)
    handed_out = []
    while pending.stored_leases and takers:
        num_stored, rows, replica = takers[0]
        handed_out.append((replica, pending.take()))
        heapq.heapreplace(takers, (num_stored + 1, rows, replica))
    return handed_out


def _merged(handed_out: list[tuple[int, Lease]]) -> list[tuple[int, Lease]]:
    """The same, but pieces of a shard that follow each other and go to one replica are one lease."""
    merged: list[tuple[int, Lease]] = []
    places: dict[int, int] = {}  # by replica, where its last lease is in `merged`
    for replica, lease in handed_out:
        place = places.get(replica, len(merged))
        before = merged[place][1] if place < len(merged) else None
        if before is not None and before.index == lease.index and before.stop == lease.start:
            chosen = None if lease.num_chosen is None else (before.num_chosen or 0) + lease.num_chosen
            merged[place] = replica, replace(before, stop=lease.stop, num_chosen=chosen)
        else:
            places[replica] = len(merged)
            merged.append((replica, lease))
    return merged


def revocations(pending: PendingRows, replicas: Sequence[ReplicaLoad], sharing: Sharing) -> dict[int, list[Lease]]:
    """The unbegun leases to take back from each replica, so that they can be given to others. None while rows pend.

    The replica with the fewest rows is filled first, each time with the newest unbegun lease of the replica with the
    most rows; see `ReplicaLoad.takes_more` and `_Movable.best_for`.
    """
    taken_back: dict[int, list[Lease]] = {}
    if pending or not any(load.unbegun for load in replicas):
        return taken_back
    left = _Movable(replicas)
    takers = [place for place, load in enumerate(replicas) if load.takes_more(sharing)]
    for taker in sorted(takers, key=lambda place: (replicas[place].outstanding_rows, replicas[place].replica)):
        while replace(replicas[taker], outstanding_rows=left.num_rows(taker)).takes_more(sharing):
            if (giver := left.best_for(taker)) is None:
                break
            taken_back.setdefault(replicas[giver].replica, []).append(left.move(giver, taker))
        if not taken_back:
            break  # no replica gives a lease to the taker with the fewest rows, so none gives one to the others
    return taken_back


class _Movable:
    """The leases that can move between replicas, which are named by their places in the list of all.

    Arrays, because each of 1,000 replicas may look for the best of 1,000.
    """

    def __init__(self, replicas: Sequence[ReplicaLoad]) -> None:
        self._unbegun = [list(load.unbegun) for load in replicas]
        self._rows = np.array([load.outstanding_rows for load in replicas])
        self._newest = np.array([leases[-1].num_to_run if leases else -1 for leases in self._unbegun])  # -1: none left
        self._gives_any = np.array([not load.is_accepting for load in replicas])

    def num_rows(self, place: int) -> int:
        return int(self._rows[place])

    def best_for(self, taker: int) -> int | None:
        """Of the replicas that give their newest lease, the one with the most rows; None if none gives one.

        After that it still has more rows than the taker had, so the loads become more equal, and no lease moves back
        and forth. A replica that accepts no leases gives them in any case.
        """
        gives = (self._newest >= 0) & ((self._rows - self._newest > self._rows[taker]) | self._gives_any)
        gives[taker] = False
        return int(np.where(gives, self._rows, -1).argmax()) if gives.any() else None

    def move(self, giver: int, taker: int) -> Lease:
        unbegun = self._unbegun[giver]
        lease = unbegun.pop()
        self._rows[giver] -= lease.num_to_run
        self._rows[taker] += lease.num_to_run
        self._newest[giver] = unbegun[-1].num_to_run if unbegun else -1
        return lease


def hold_s(work_s: float | None, *, is_promised: bool) -> float:
    """How long rows are held back for replicas that are not up, from the moment at which the first is.

    work_s: how long the rows take, at most; None if that is not known yet. is_promised: a replica has said that it is
    about to be up.
    """
    return min(PROMISED_HOLD_S if is_promised else HOLD_S, math.inf if work_s is None else _HOLD_SHARE * work_s)
