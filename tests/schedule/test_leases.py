import heapq
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from extents import next_extent
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinf.records import BoolArray, Lease
from batchinf.schedule.leases import PendingRows, ReplicaLoad, Sharing, hold_s, next_leases, revocations
from batchinf.schedule.shards import Extent, choose_rows_per_shard, shard_at, total_rows, total_shards

cut = st.tuples(st.integers(1, 200), st.integers(1, 40))


def extents_of(*cuts: tuple[int, int]) -> tuple[Extent, ...]:
    extents: tuple[Extent, ...] = ()
    for num_rows, rows_per_shard in cuts:
        extents += (next_extent(extents, num_rows, rows_per_shard),)
    return extents


def pending_of(*cuts: tuple[int, int]) -> PendingRows:
    extents = extents_of(*cuts)
    return PendingRows(extents, np.zeros(total_shards(extents), np.bool_))


def places(leases: list[Lease]) -> list[int]:
    return [place for lease in leases for place in range(lease.start, lease.stop)]


# -- what is left ------------------------------------------------------------------------------------------------------


def test_pending_leaves_out_what_is_committed() -> None:
    extents = extents_of((80, 10))
    committed = np.zeros(total_shards(extents), dtype=np.bool_)
    committed[[0, 2, 3]] = True
    pending = PendingRows(extents, committed)
    committed[:] = False
    assert pending.num_rows == 50
    taken = []
    while pending:
        taken.append(pending.take())
    assert [lease.index for lease in taken] == [1, 4, 5, 6, *range(7, len(committed))]
    assert all(lease.is_whole for lease in taken)
    with pytest.raises(IndexError):
        pending.take()


def test_a_piece_not_much_larger_than_the_lease_is_not_cut() -> None:
    pending = pending_of((80, 10))
    assert [pending.take(rows).num_rows for rows in (7, 6, 5)] == [10, 6, 4]


def test_a_shard_that_comes_back_whole_counts_as_never_cut() -> None:
    pending = pending_of((8, 7))
    first, second = pending.take(2), pending.take(2)
    assert not first.is_whole
    pending.give_back([second])
    pending.give_back([first])
    assert pending.take() == Lease(0, 0, 7)


def test_the_last_lease_that_is_stored_makes_a_shard_that_can_be_closed() -> None:
    pending = pending_of((8, 7))
    first, second, other = pending.take(3), pending.take(4), pending.take()
    pending.store(second)
    assert not pending
    pending.give_back([replace(first, attempts=2)])
    assert pending.take() == replace(first, attempts=2)
    pending.store(replace(first, attempts=2))
    stored = pending.take()
    assert stored == Lease(0, 0, 7, is_stored=True, attempts=3)
    assert (stored.num_to_run, pending.num_rows) == (0, 0)
    # Nobody has closed it: it comes first, whatever else is pending.
    pending.give_back([other, stored])
    assert pending.take(1) == stored


@st.composite
def chosen_rows(draw: st.DrawFn, num_rows: int) -> BoolArray:
    return np.array(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)), np.bool_)


steps = st.lists(
    st.tuples(st.sampled_from(["take", "take", "whole", "back", "died", "store", "withhold"]), st.integers(1, 40)),
    max_size=120,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(cut, min_size=1, max_size=3), st.booleans(), steps, st.data())
def test_each_row_is_in_one_place(
    cuts: list[tuple[int, int]], is_retry: bool, steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    extents = extents_of(*cuts)
    num_rows = total_rows(extents)
    chosen = data.draw(chosen_rows(num_rows)) if is_retry else np.ones(num_rows, np.bool_)
    shards = [shard_at(extents, index) for index in range(total_shards(extents))]
    num_chosen = np.array([np.count_nonzero(chosen[shard.start : shard.stop]) for shard in shards], np.int64)
    pending = PendingRows(
        extents,
        num_chosen == 0,
        num_chosen if is_retry else None,
        chosen_of=(lambda lease: chosen[lease.start : lease.stop]) if is_retry else None,
    )
    held: list[Lease] = []
    withheld: list[Lease] = []
    stored: list[Lease] = []
    closed: list[Lease] = []

    def check() -> None:
        mine = [lease for lease in [*held, *withheld] if not lease.is_stored]
        rows = Counter(place for place in places(mine) + places(stored) + places(closed) if chosen[place])
        assert max(rows.values(), default=0) <= 1
        assert pending.num_rows == np.count_nonzero(chosen) - len(rows)

    def finish(lease: Lease) -> None:
        nonlocal stored
        if lease.is_whole:
            stored = [other for other in stored if other.index != lease.index]
            closed.append(lease)
        else:
            pending.store(lease)
            stored.append(lease)

    for what, number in steps:
        match what:
            case "take" | "whole" if pending:
                lease = pending.take(number if what == "take" else None)
                assert lease.is_stored or lease.num_to_run == np.count_nonzero(chosen[lease.start : lease.stop]) > 0
                assert lease.is_whole == (
                    (lease.start, lease.stop) == (shards[lease.index].start, shards[lease.index].stop)
                )
                assert what == "whole" or lease.is_stored or lease.num_to_run <= 1.5 * number
                held.append(lease)
            case "back" | "died" if held:
                lease = held.pop(number % len(held))
                pending.give_back([replace(lease, attempts=lease.attempts + (what == "died"))])
            case "store" if held:
                finish(held.pop(number % len(held)))
            case "withhold" if held and not held[-1].is_stored:
                lease = held.pop()
                pending.give_back([lease])
                pending.withhold([lease])
                withheld.append(lease)
            case _:
                pass
        check()
    held += withheld
    withheld.clear()
    while pending or held:
        if pending:
            held.append(pending.take(7))
        finish(held.pop(0))
        check()
    assert sorted(lease.index for lease in closed) == np.flatnonzero(num_chosen).tolist()


def test_withheld_rows_are_those_of_a_manifest_too() -> None:
    """A case of an earlier coordinator names rows of a shard that was never handed out since."""
    pending = pending_of((80, 10))
    case = [Lease(0, 4, 6, is_whole=False), Lease(2, 20, 30)]
    pending.withhold(case)
    assert pending.num_rows == 68
    taken = [pending.take() for _ in range(3)]
    assert [(lease.index, lease.start, lease.stop, lease.is_whole) for lease in taken] == [
        (0, 0, 4, False), (0, 6, 10, False), (1, 10, 20, True),
    ]  # fmt: skip
    pending.store(taken[0])
    pending.store(case[0])
    pending.store(taken[1])
    assert pending.take() == Lease(0, 0, 10, is_stored=True, attempts=2)


def test_pieces_that_make_up_a_shard_are_withheld_as_pieces() -> None:
    """A replica got all pieces of a shard as one lease, and died. The next coordinator reads that in the manifest."""
    pending = pending_of((8, 8))
    together = next_leases(pending, [load(0, 0)], Sharing(1, 8, are_few=True))
    assert together[0][1] == Lease(0, 0, 7, is_whole=False)
    resumed = pending_of((8, 8))
    resumed.withhold([together[0][1]])
    resumed.store(together[0][1])
    assert resumed.take() == Lease(0, 0, 7, is_stored=True, attempts=2)


# -- who gets the next -------------------------------------------------------------------------------------------------


def load(replica: int, rows: int, window: int = 10, *, accepts: bool = True, engine: int | None = 10,
         unbegun: tuple[Lease, ...] = ()) -> ReplicaLoad:  # fmt: skip
    return ReplicaLoad(replica, window, rows, unbegun, is_accepting=accepts, engine_rows=engine)


def hand_out(pending: PendingRows, *loads: ReplicaLoad, awaited: int = 0, absent: int = 0) -> dict[int, list[int]]:
    """The sizes of the leases by replica."""
    sharing = Sharing.of(pending, loads, num_awaited=awaited, num_absent=absent)
    given: dict[int, list[int]] = {}
    for replica, lease in next_leases(pending, loads, sharing):
        given.setdefault(replica, []).append(lease.num_rows)
    return given


def test_among_many_rows_a_replica_gets_two_windows_of_whole_shards() -> None:
    assert hand_out(pending_of((800, 8)), load(0, rows=0)) == {0: [8, 8, 8]}


def test_among_many_rows_a_replica_has_a_shard_beyond_those_it_has_begun() -> None:
    assert hand_out(pending_of((800, 100)), load(0, rows=100)) == {0: [100]}
    assert hand_out(pending_of((800, 100)), load(0, rows=200, unbegun=(Lease(1, 100, 200),))) == {}


def test_among_few_rows_a_replica_gets_its_share_in_leases_that_become_smaller() -> None:
    loads = [load(index, rows=0, window=100, engine=100) for index in range(4)]
    given = hand_out(pending_of((160, 160)), *loads)
    assert [sum(sizes) for sizes in given.values()] == [40, 40, 40, 40]
    sizes = [size for index in range(4) for size in given[index]]
    assert (max(sizes), min(sizes)) == (10, 1)


@pytest.mark.parametrize(("num_rows", "expected"), [(5, [2, 1, 1, 1]), (3, [1, 1, 1]), (1, [1])])
def test_fewer_rows_than_fill_one_replica_are_shared_out(num_rows: int, expected: list[int]) -> None:
    loads = [load(index, rows=0, window=100, engine=100) for index in range(4)]
    given = hand_out(pending_of((num_rows, 320)), *loads)
    assert sorted((sum(sizes) for sizes in given.values()), reverse=True) == expected


def test_among_few_rows_a_replica_holds_no_more_than_its_engine_runs() -> None:
    given = hand_out(
        pending_of((200, 200)), load(0, rows=60, window=100, engine=70), load(1, rows=0, window=100, engine=20)
    )
    assert {index: sum(sizes) for index, sizes in given.items()} == {0: 10, 1: 20}


def test_an_engine_that_has_not_reported_gets_a_quarter_of_its_share() -> None:
    given = hand_out(pending_of((200, 200)), *(load(index, rows=0, window=100, engine=None) for index in range(2)))
    assert {index: sum(sizes) for index, sizes in given.items()} == {0: 25, 1: 25}
    assert hand_out(pending_of((200, 200)), load(0, rows=67, window=100, engine=None), absent=1) == {}


def test_a_replica_alone_shares_with_none_and_gets_whole_shards() -> None:
    assert hand_out(pending_of((200, 200)), load(0, rows=67, window=100, engine=None)) == {0: [175]}
    # The results of a part of a shard would be written twice: to the journal, and with the others to the part.
    assert hand_out(pending_of((400, 400)), load(0, rows=0, window=100)) == {0: [350]}
    assert hand_out(pending_of((400, 400)), load(0, rows=0, window=100), awaited=1, absent=1) != {0: [350]}


def test_rows_are_held_back_for_those_that_are_awaited() -> None:
    one = load(0, rows=0, window=100, engine=100)
    assert sum(hand_out(pending_of((80, 80)), one, awaited=3, absent=3)[0]) == 20
    assert sum(hand_out(pending_of((80, 80)), one, absent=3)[0]) == 80


def test_a_shard_whose_results_are_stored_goes_first_and_to_one_without_room() -> None:
    pending = pending_of((8, 7))
    first, second = pending.take(3), pending.take()
    rest = pending.take()
    for lease in (first, second):
        pending.store(lease)
    pending.give_back([rest])
    loads = [load(0, rows=0, accepts=False), load(1, rows=500)]
    sharing = Sharing(1, 1, are_few=True)
    assert next_leases(pending, loads, sharing) == [(1, Lease(0, 0, 7, is_stored=True, attempts=2))]
    assert pending.num_rows == 1


def stored_shards(num_shards: int) -> PendingRows:
    """So many shards whose results are stored, and no other rows."""
    pending = pending_of((8 * num_shards, 4))  # the last shards have fewer than 4 rows
    leases = [pending.take(2) for _ in range(2 * num_shards)]
    while pending:
        pending.take()
    for lease in leases:
        pending.store(lease)
    return pending


def test_shards_whose_results_are_stored_go_to_all_replicas() -> None:
    sharing = Sharing(8, 8, are_few=True)
    loads = [load(index, rows=index % 2) for index in range(8)]
    assert sorted(replica for replica, _ in next_leases(stored_shards(7), loads, sharing)) == [0, 1, 2, 3, 4, 5, 6]
    given = next_leases(stored_shards(9), loads, sharing)
    assert Counter(replica for replica, _ in given) == Counter([0, *range(8)])


def test_a_replica_that_closes_a_shard_is_not_given_the_next_one() -> None:
    loads = [replace(load(0, rows=0), num_stored=1), load(1, rows=500), load(2, rows=0, accepts=False)]
    sharing = Sharing(2, 500, are_few=True)
    assert [replica for replica, _ in next_leases(stored_shards(3), loads, sharing)] == [1, 0, 1]


def test_while_others_come_a_replica_gets_no_more_than_fills_its_engine_if_rows_have_an_order() -> None:
    pending, alone = pending_of((800, 10)), load(0, rows=0, window=100)
    sharing = Sharing(2, 800, are_few=False)
    given = next_leases(pending, [alone], sharing, is_gathering=True)
    assert [lease.start for _, lease in given] == list(range(0, 100, 10))


# -- what is taken back ------------------------------------------------------------------------------------------------


A, B, C = (Lease(index, 10 * index, 10 * index + 10) for index in (1, 2, 3))


def exhausted() -> PendingRows:
    pending = pending_of((80, 10))
    while pending:
        pending.take()
    return pending


@pytest.mark.parametrize(
    ("loads", "asked"),
    [
        ([load(0, rows=45, unbegun=(A, B, C)), load(1, rows=0)], {0: [C]}),
        (
            [load(0, rows=45, unbegun=(A, B, C), window=20, engine=20), load(1, rows=0, window=20, engine=20)],
            {0: [C, B]},
        ),
        ([load(0, rows=35, unbegun=(A, B, C)), load(1, rows=10)], {}),
        ([load(0, rows=35, unbegun=(A, B, C)), load(1, rows=0, accepts=False)], {}),
        ([load(0, rows=25, unbegun=(A,)), load(1, rows=35, unbegun=(B, C)), load(2, rows=0)], {1: [C]}),
        # It has not begun its only lease, but is about to: to move it would gain nothing, and move it back again.
        ([load(0, rows=10, unbegun=(A,)), load(1, rows=0)], {}),
        ([load(0, rows=10, unbegun=(A,), accepts=False), load(1, rows=0)], {0: [A]}),
        # An engine that runs no more gets no more.
        ([load(0, rows=45, unbegun=(A, B, C)), load(1, rows=4, engine=4)], {}),
        # A lease that has begun cannot be asked back.
        ([load(0, rows=100), load(1, rows=0)], {}),
    ],
)
def test_asked_back(loads: list[ReplicaLoad], asked: dict[int, list[Lease]]) -> None:
    pending = exhausted()
    assert revocations(pending, loads, Sharing.of(pending, loads)) == asked


def test_nothing_is_asked_back_while_rows_are_pending() -> None:
    pending, loads = pending_of((80, 10)), [load(0, rows=50, unbegun=(A, B)), load(1, rows=0)]
    assert revocations(pending, loads, Sharing.of(pending, loads)) == {}


@pytest.mark.parametrize(
    ("work_s", "is_promised", "expected"),
    [(None, False, 2.0), (100.0, False, 2.0), (4.0, False, 0.88), (None, True, 5.0)],
)
def test_rows_are_held_back_for_a_part_of_their_time_at_most(
    work_s: float | None, is_promised: bool, expected: float
) -> None:
    assert hold_s(work_s, is_promised=is_promised) == expected


# -- many replicas, in any order of events -----------------------------------------------------------------------------


class Fleet:
    """Replicas at work: each begins leases to keep `window` rows running, and finishes them row by row."""

    def __init__(self, pending: PendingRows, windows: list[int]) -> None:
        self.pending = pending
        self.windows = windows
        self.queues: list[list[Lease]] = [[] for _ in windows]
        self.running: list[list[tuple[Lease, list[int]]]] = [[] for _ in windows]
        self.asked: list[set[tuple[int, int]]] = [set() for _ in windows]
        self.closed: list[int] = []
        self.num_finished = [0 for _ in windows]
        self.moves = 0

    def load(self, replica: int) -> ReplicaLoad:
        unbegun = tuple(lease for lease in self.queues[replica] if lease.key not in self.asked[replica])
        rows = sum(lease.num_to_run for lease in unbegun) + self.running_rows(replica)
        window = self.windows[replica]
        return ReplicaLoad(replica, window, rows, unbegun, is_accepting=True, engine_rows=window)

    def running_rows(self, replica: int) -> int:
        return sum(left for _, [left] in self.running[replica])

    def plan(self) -> None:
        loads = [self.load(replica) for replica in range(len(self.windows))]
        sharing = Sharing.of(self.pending, loads)
        for replica, lease in next_leases(self.pending, loads, sharing):
            self.queues[replica].append(lease)
        loads = [self.load(replica) for replica in range(len(self.windows))]
        for replica, leases in revocations(self.pending, loads, sharing).items():
            self.asked[replica] |= {lease.key for lease in leases}

    def begin(self, replica: int) -> None:
        while self.queues[replica] and self.running_rows(replica) < self.windows[replica]:
            lease = self.queues[replica].pop(0)
            self.running[replica].append((lease, [lease.num_to_run]))

    def finish_row(self, replica: int) -> None:
        self.begin(replica)
        if self.running[replica]:
            lease, left = self.running[replica][0]
            self.num_finished[replica] += left[0] > 0
            left[0] = max(0, left[0] - 1)
            if not left[0]:
                self.running[replica].pop(0)
                if lease.is_whole:
                    self.closed.append(lease.index)
                else:
                    self.pending.store(lease)

    def answer(self, replica: int) -> None:
        back = [lease for lease in self.queues[replica] if lease.key in self.asked[replica]]
        self.queues[replica] = [lease for lease in self.queues[replica] if lease not in back]
        self.asked[replica].clear()
        self.pending.give_back(back)
        self.moves += len(back)

    def die(self, replica: int) -> None:
        lost = [*self.queues[replica], *(lease for lease, _ in self.running[replica])]
        self.queues[replica], self.running[replica] = [], []
        self.asked[replica].clear()
        self.pending.give_back(replace(lease, attempts=lease.attempts + 1) for lease in lost)

    def held(self) -> list[Lease]:
        queued = [lease for queue in self.queues for lease in queue]
        return queued + [lease for running in self.running for lease, _ in running]


events = st.lists(
    st.tuples(st.sampled_from(["plan", "finish", "finish", "finish", "answer", "die"]), st.integers(0, 3)), max_size=300
)


@settings(max_examples=60, deadline=None)
@given(cut, st.lists(st.integers(1, 30), min_size=1, max_size=4), events)
def test_each_shard_is_closed_once_whatever_happens(
    cut: tuple[int, int], windows: list[int], events: list[tuple[str, int]]
) -> None:
    pending = pending_of(cut)
    fleet = Fleet(pending, windows)
    for what, who in events:
        replica = who % len(windows)
        match what:
            case "plan":
                fleet.plan()
            case "finish":
                fleet.finish_row(replica)
            case "answer":
                fleet.answer(replica)
            case "die":
                fleet.die(replica)
        assert max(Counter(places(fleet.held())).values(), default=0) <= 1
    for _ in range(8 * sum(cut) + 8):
        fleet.plan()
        for replica in range(len(windows)):
            fleet.answer(replica)
            fleet.finish_row(replica)
    assert sorted(fleet.closed) == list(range(total_shards(pending.extents)))


@pytest.mark.parametrize("seed", range(2))
def test_replicas_of_all_speeds_end_together(seed: int) -> None:
    chance = random.Random(seed)
    seconds_per_row = [chance.choice([1, 1, 2, 5, 20]) for _ in range(6)]
    pending = pending_of((8_000, choose_rows_per_shard(8_000, 6, 10_000)))
    fleet = Fleet(pending, [32] * 6)
    clock = [(0, replica) for replica in range(6)]
    now, num = 0, total_shards(pending.extents)
    while len(fleet.closed) < num:
        now, replica = heapq.heappop(clock)
        fleet.plan()
        fleet.answer(chance.randrange(6))
        fleet.finish_row(replica)
        heapq.heappush(clock, (now + seconds_per_row[replica], replica))
    ideal = 8_000 / sum(1 / seconds for seconds in seconds_per_row)
    # The slowest may have begun a shard just before the others were through.
    assert now <= ideal + (320 + 32) * max(seconds_per_row)
    assert fleet.moves < num
