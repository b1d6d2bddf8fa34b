import heapq
import random
from collections import Counter

import numpy as np
import pytest
from extents import extent_of_all, next_extent
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinf.records import Extent, Shard
from batchinf.schedule.shards import (
    MAX_ROWS_PER_SHARD,
    PART_BYTES,
    SHARDS_PER_REPLICA,
    SMALL_SHARD_ROWS,
    PendingShards,
    ReplicaLoad,
    choose_rows_per_shard,
    next_shards,
    num_shards,
    revocations,
    shard_at,
    total_rows,
    total_shards,
)

cut = st.tuples(st.integers(0, 300), st.integers(1, 40))


def cut_by_hand(num_rows: int, rows_per_shard: int) -> list[range]:
    """The cuts of one extent, row by row."""
    spans: list[range] = []
    first_fine = num_rows - num_rows // 8
    for row in range(num_rows):
        most = rows_per_shard if row < first_fine else max(1, rows_per_shard // 4)
        if not spans or row == first_fine or len(spans[-1]) == most:
            spans.append(range(row, row + 1))
        else:
            spans[-1] = range(spans[-1].start, row + 1)
    return spans


def extents_of(cuts: list[tuple[int, int]]) -> tuple[Extent, ...]:
    extents: tuple[Extent, ...] = ()
    for num_rows, rows_per_shard in cuts:
        extents += (next_extent(extents, num_rows, rows_per_shard),)
    return extents


def pending_of(*cuts: tuple[int, int]) -> PendingShards:
    extents = extents_of(list(cuts))
    return PendingShards(extents, np.zeros(total_shards(extents), dtype=np.bool_))


def starter(replica: int, rows: int, unbegun: tuple[int, ...] = (), window: int = 10) -> ReplicaLoad:
    return ReplicaLoad(replica, window, rows, unbegun, is_accepting=True, is_up=False)


def load(replica: int, rows: int, unbegun: tuple[int, ...] = (), window: int = 10, accepts: bool = True) -> ReplicaLoad:
    return ReplicaLoad(replica, window, rows, unbegun, accepts)


# -- the cuts ----------------------------------------------------------------------------------------------------------


@given(cut)
def test_cuts_are_those_made_by_hand(cut: tuple[int, int]) -> None:
    extents = extents_of([cut])
    shards = [shard_at(extents, index) for index in range(num_shards(extents[0]))]
    assert [range(shard.start, shard.stop) for shard in shards] == cut_by_hand(*cut)
    assert [shard.index for shard in shards] == list(range(len(shards)))


@given(st.lists(cut, min_size=1, max_size=5))
def test_extents_cover_every_row_once_and_never_move_a_cut(cuts: list[tuple[int, int]]) -> None:
    extents = extents_of(cuts)
    shards = [shard_at(extents, index) for index in range(total_shards(extents))]
    rows = [row for shard in shards for row in range(shard.start, shard.stop)]
    assert rows == list(range(sum(num_rows for num_rows, _ in cuts)))
    assert total_rows(extents) == len(rows)
    earlier = extents[:-1]
    assert [shard_at(earlier, index) for index in range(total_shards(earlier))] == shards[: total_shards(earlier)]


@pytest.mark.parametrize("index", [-1, 6])
def test_no_shard_beyond_the_cuts(index: int) -> None:
    with pytest.raises(IndexError, match=f"got shard {index}; the job has 6"):
        shard_at(extents_of([(32, 8)]), index)


def test_a_hundred_million_rows_are_arithmetic() -> None:
    extents = extents_of([(100_000_000, 50_000), (1_000_000_000_000, 3)])
    last = total_shards(extents) - 1
    assert num_shards(extents[0]) == 1750 + 1000
    assert shard_at(extents, 1749) == Shard(1749, 87_450_000, 87_500_000)
    assert shard_at(extents, 1750) == Shard(1750, 87_500_000, 87_512_500)
    assert shard_at(extents, last).stop == 1_000_100_000_000


@given(st.integers(0, 10**9), st.integers(1, 64), st.floats(0, 1e9))
def test_chosen_rows_per_shard(num_rows: int, num_replicas: int, bytes_per_row: float) -> None:
    rows = choose_rows_per_shard(num_rows, num_replicas, bytes_per_row)
    assert 1 <= rows <= MAX_ROWS_PER_SHARD
    assert rows <= SMALL_SHARD_ROWS or rows * SHARDS_PER_REPLICA * num_replicas <= num_rows
    # Half of the replicas or more have work.
    assert 2 * num_shards(extent_of_all(0, num_rows, rows, 0)) >= min(num_rows, num_replicas)
    # No more than what makes 64 MiB, and less only for one of the bounds above.
    assert rows == 1 or (rows - 1) * bytes_per_row < PART_BYTES
    share = -(-(num_rows - num_rows // 8) // num_replicas)
    bounds = (MAX_ROWS_PER_SHARD, num_rows // (SHARDS_PER_REPLICA * num_replicas), SMALL_SHARD_ROWS, share, 1)
    assert rows * max(bytes_per_row, 1) >= PART_BYTES or rows in bounds


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "bytes_per_row", "expected"),
    [
        (657, 2, 6_500, 4), (657, 1, 6_500, 4), (35, 2, 100, 3), (1, 8, 100, 1), (657, 2, 300_000, 5),
        (12_000, 2, 6_500, 45), (100_000, 8, 6_500, 178),
    ],
)  # fmt: skip
def test_a_small_job_has_few_parts(num_rows: int, num_replicas: int, bytes_per_row: int, expected: int) -> None:
    rows = choose_rows_per_shard(num_rows, num_replicas, bytes_per_row)
    assert num_shards(extent_of_all(0, num_rows, rows, 0)) == expected
    dealt = choose_rows_per_shard(num_rows, num_replicas, bytes_per_row, is_longest_first=True)
    assert dealt == max(1, num_rows // (SHARDS_PER_REPLICA * num_replicas))


# -- what is left ------------------------------------------------------------------------------------------------------


def test_pending_leaves_out_what_is_committed() -> None:
    extents = extents_of([(80, 10)])
    committed = np.zeros(total_shards(extents), dtype=np.bool_)
    committed[[0, 2, 3]] = True
    pending = PendingShards(extents, committed)
    committed[:] = False
    assert [pending.take().index for _ in range(len(pending))] == [1, 4, 5, 6, *range(7, len(committed))]
    with pytest.raises(IndexError):
        pending.take()


@given(st.lists(st.one_of(st.just("take"), st.integers(0, 19)), max_size=80))
def test_pending_is_a_set_with_the_least_first(steps: list[str | int]) -> None:
    pending = pending_of((20, 1))
    left = set(range(20))
    for step in steps:
        if isinstance(step, int):
            pending.give_back([step])
            left.add(step)
        elif left:
            assert pending.take().index == min(left)
            left.remove(min(left))
        assert len(pending) == len(left)


# -- who gets the next -------------------------------------------------------------------------------------------------


def test_an_idle_replica_gets_two_windows_of_rows() -> None:
    pending = pending_of((800, 8))
    given = next_shards(pending, [load(0, rows=0, window=10)])
    assert [(replica, shard.index) for replica, shard in given] == [(0, 0), (0, 1), (0, 2)]


def test_a_replica_always_has_a_shard_beyond_those_it_has_begun() -> None:
    assert len(next_shards(pending_of((800, 100)), [load(0, rows=100)])) == 1
    assert next_shards(pending_of((800, 100)), [load(0, rows=200, unbegun=(1,))]) == []


def test_who_has_least_to_do_is_served_first() -> None:
    loads = [load(0, rows=15), load(1, rows=3), load(2, rows=0, accepts=False), load(3, rows=9)]
    given = next_shards(pending_of((80, 5)), loads)
    assert [replica for replica, _ in given][:4] == [1, 1, 3, 1]
    assert Counter(replica for replica, _ in given) == {0: 1, 1: 4, 3: 3}


def test_whose_engine_is_not_up_comes_last_and_gets_no_more_than_fills_it() -> None:
    loads = [starter(0, rows=0), load(1, rows=0, window=10), starter(2, rows=0, window=15)]
    given = next_shards(pending_of((800, 8)), loads)
    assert [replica for replica, _ in given] == [1, 1, 1, 0, 2, 0, 2]
    assert next_shards(pending_of((800, 8)), [starter(0, rows=10)]) == []
    assert len(next_shards(pending_of((800, 1)), [starter(0, rows=0, window=500)])) == 64


def test_few_shards_are_shared_out() -> None:
    given = next_shards(pending_of((7, 2)), [load(index, rows=0) for index in range(4)])
    assert Counter(replica for replica, _ in given) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_nothing_is_asked_back_while_shards_are_pending() -> None:
    assert revocations(pending_of((80, 10)), [load(0, rows=50, unbegun=(1, 2)), load(1, rows=0)]) == {}


def exhausted() -> PendingShards:
    """Seven shards of ten rows and five of two, all of them handed out."""
    pending = pending_of((80, 10))
    while pending:
        pending.take()
    return pending


@pytest.mark.parametrize(
    ("loads", "asked"),
    [
        ([load(0, rows=45, unbegun=(1, 2, 3)), load(1, rows=0)], {0: [3]}),
        ([load(0, rows=45, unbegun=(1, 2, 3)), load(1, rows=0, window=11)], {0: [3, 2]}),
        ([load(0, rows=35, unbegun=(1, 2, 3)), load(1, rows=10)], {}),
        ([load(0, rows=35, unbegun=(1, 2, 3)), load(1, rows=0, accepts=False)], {}),
        ([load(0, rows=25, unbegun=(1,)), load(1, rows=35, unbegun=(2, 3)), load(2, rows=0)], {1: [3]}),
        ([load(0, rows=45, unbegun=(1, 2, 3)), load(1, rows=5), load(2, rows=0)], {0: [3, 2]}),
        # It has not begun its only shard, but is about to: to move it would gain nothing, and move it back again.
        ([load(0, rows=10, unbegun=(1,)), load(1, rows=0)], {}),
        ([load(0, rows=10, unbegun=(1,), accepts=False), load(1, rows=0)], {0: [1]}),
        # One whose engine is not up takes nothing, and keeps no more than the idle one has to do.
        ([load(0, rows=45, unbegun=(1, 2, 3)), starter(1, rows=0)], {}),
        ([starter(0, rows=10, unbegun=(1,)), load(1, rows=10, window=30)], {}),
        ([starter(0, rows=11, unbegun=(1,)), load(1, rows=10, window=30)], {0: [1]}),
        ([starter(0, rows=30, unbegun=(1, 2, 3)), load(1, rows=0, window=30)], {0: [3, 2]}),
        ([starter(0, rows=10, unbegun=(1,)), load(1, rows=0, accepts=False)], {}),
        # One that is begun cannot be asked back.
        ([load(0, rows=100), load(1, rows=0)], {}),
    ],
)
def test_asked_back(loads: list[ReplicaLoad], asked: dict[int, list[int]]) -> None:
    assert revocations(exhausted(), loads) == asked


# -- many replicas, in any order of events -----------------------------------------------------------------------------


class Fleet:
    """Replicas at work: each begins shards to keep `window` rows running, and finishes them row by row."""

    def __init__(self, pending: PendingShards, windows: list[int]) -> None:
        self.pending = pending
        self.windows = windows
        self.queues: list[list[Shard]] = [[] for _ in windows]
        self.running: list[list[list[int]]] = [[] for _ in windows]
        self.asked: list[set[int]] = [set() for _ in windows]
        self.closed: list[int] = []
        self.moves = 0

    def loads(self) -> list[ReplicaLoad]:
        return [self.load(replica) for replica in range(len(self.windows))]

    def load(self, replica: int) -> ReplicaLoad:
        unbegun = [shard for shard in self.queues[replica] if shard.index not in self.asked[replica]]
        rows = sum(shard.num_rows for shard in unbegun) + self.running_rows(replica)
        return ReplicaLoad(replica, self.windows[replica], rows, tuple(shard.index for shard in unbegun), True)

    def running_rows(self, replica: int) -> int:
        return sum(rows for _, rows in self.running[replica])

    def plan(self) -> None:
        for replica, shard in next_shards(self.pending, self.loads()):
            self.queues[replica].append(shard)
        for replica, indices in revocations(self.pending, self.loads()).items():
            self.asked[replica] |= set(indices)

    def begin(self, replica: int) -> None:
        while self.queues[replica] and self.running_rows(replica) < self.windows[replica]:
            shard = self.queues[replica].pop(0)
            self.running[replica].append([shard.index, shard.num_rows])

    def finish_row(self, replica: int) -> None:
        self.begin(replica)
        if self.running[replica]:
            oldest = self.running[replica][0]
            oldest[1] -= 1
            if not oldest[1]:
                self.closed.append(self.running[replica].pop(0)[0])

    def answer(self, replica: int) -> None:
        back = [shard for shard in self.queues[replica] if shard.index in self.asked[replica]]
        self.queues[replica] = [shard for shard in self.queues[replica] if shard not in back]
        self.asked[replica].clear()
        self.pending.give_back(shard.index for shard in back)
        self.moves += len(back)

    def die(self, replica: int) -> None:
        lost = [shard.index for shard in self.queues[replica]] + [index for index, _ in self.running[replica]]
        self.queues[replica], self.running[replica] = [], []
        self.asked[replica].clear()
        self.pending.give_back(lost)

    def held(self) -> list[int]:
        queued = [shard.index for queue in self.queues for shard in queue]
        return queued + [index for running in self.running for index, _ in running]


events = st.lists(
    st.tuples(st.sampled_from(["plan", "finish", "finish", "finish", "answer", "die"]), st.integers(0, 3)), max_size=300
)


@settings(max_examples=150, deadline=None)
@given(cut, st.lists(st.integers(1, 30), min_size=1, max_size=4), events)
def test_each_shard_is_in_one_place_whatever_happens(
    cut: tuple[int, int], windows: list[int], events: list[tuple[str, int]]
) -> None:
    pending = pending_of(cut)
    num, fleet = len(pending), Fleet(pending, windows)
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
        assert len(pending) + len(fleet.held()) + len(fleet.closed) == num
        assert max(Counter([*fleet.held(), *fleet.closed]).values(), default=0) <= 1
    for _ in range(2 * sum(cut) + 2):
        fleet.plan()
        for replica in range(len(windows)):
            fleet.answer(replica)
            fleet.finish_row(replica)
    assert sorted(fleet.closed) == list(range(num))


@settings(max_examples=100, deadline=None)
@given(cut, st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(0, 400), st.booleans())
def test_a_replica_that_stands_still_holds_no_more_than_it_has_begun(
    cut: tuple[int, int], windows: list[int], stands_still_at: int, has_begun: bool
) -> None:
    pending = pending_of(cut)
    num, fleet = len(pending), Fleet(pending, windows)
    for turn in range(4 * sum(cut) + 400):
        fleet.plan()
        for replica in range(len(windows)):
            fleet.answer(replica)
            if replica or turn < stands_still_at:
                fleet.finish_row(replica)
        if turn == 0 and has_begun:
            fleet.begin(0)
    held = fleet.held()
    assert sorted([*held, *fleet.closed]) == list(range(num))
    if fleet.running[0]:
        assert not fleet.queues[0]
        assert fleet.running_rows(0) < windows[0] + cut[1]
    else:
        # It has begun nothing: what it is about to begin is its own.
        assert len(held) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_replicas_of_all_speeds_end_together(seed: int) -> None:
    chance = random.Random(seed)
    seconds_per_row = [chance.choice([1, 1, 2, 5, 20]) for _ in range(6)]
    pending = pending_of((8_000, choose_rows_per_shard(8_000, 6, 10_000)))
    largest, fleet = shard_at(pending.extents, 0).num_rows, Fleet(pending, [32] * 6)
    clock = [(0, replica) for replica in range(6)]
    now, num = 0, len(pending)
    while len(fleet.closed) < num:
        now, replica = heapq.heappop(clock)
        fleet.plan()
        fleet.answer(chance.randrange(6))
        fleet.finish_row(replica)
        heapq.heappush(clock, (now + seconds_per_row[replica], replica))
    ideal = 8_000 / sum(1 / seconds for seconds in seconds_per_row)
    # The slowest may have begun a shard just before the others were through.
    assert now <= ideal + (largest + 32) * max(seconds_per_row)
    assert fleet.moves < num


def test_who_is_up_first_gets_no_more_than_fills_its_engine_while_others_come() -> None:
    pending = PendingShards(
        [extent_of_all(0, 800, 10, 0)], np.zeros(total_shards([extent_of_all(0, 800, 10, 0)]), np.bool_)
    )
    alone = [ReplicaLoad(0, 100, 0, (), is_accepting=True)]
    first = next_shards(pending, alone, is_gathering=True)
    assert [shard.start for _, shard in first] == list(range(0, 100, 10))
    both = [ReplicaLoad(0, 100, 100, (5, 6), is_accepting=True), ReplicaLoad(1, 100, 0, (), is_accepting=True)]
    second = next_shards(pending, both, is_gathering=True)
    assert [(replica, shard.start) for replica, shard in second] == [(1, start) for start in range(100, 200, 10)]
    # All are there: each gets a second window.
    both = [ReplicaLoad(number, 100, 100, (5, 6), is_accepting=True) for number in range(2)]
    assert len(next_shards(pending, both)) == 20
