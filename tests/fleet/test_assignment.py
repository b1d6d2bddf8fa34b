"""The coordinator's side of leases: who is told what, and when."""

import pathlib
import types
from typing import Any

import numpy as np
import pytest
from extents import extent_of_all
from fleets import fleet_of

from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.devices import Slot
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.sharing.assignment import Assignment
from batchinf.records import Lease
from batchinf.replica.messages import (
    WARMING_UP,
    Assign,
    Event,
    LeaseBegun,
    LeaseDone,
    Progress,
    Ready,
    StartPhase,
)
from batchinf.schedule.leases import PendingRows
from batchinf.schedule.shards import total_shards

NUM_ROWS = 80


class Told:
    """In the place of a replica: what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.incarnation = "000001.0001"
        self.send = self.messages.append


class Bench:
    """Replicas that start, and what they are told."""

    def __init__(
        self, folder: pathlib.Path, *, num: int = 2, begins_together: bool = False, most_tokens: int | None = None
    ) -> None:
        slots = [Slot(number, (), ()) for number in range(num)]
        launch: Any = None
        self.fleet = fleet_of(LocalBackend(), slots, launch, folder)
        self.now = 100.0
        self.told = [Told() for _ in range(num)]
        for number in range(num):
            self.start(number)
        extents = (extent_of_all(0, NUM_ROWS, 10, 0, 0),)
        self.pending = PendingRows(extents, np.zeros(total_shards(extents), np.bool_))
        self.cases: set[int] = set()
        quarantine: Any = types.SimpleNamespace(
            leases={},
            give=lambda: None,
            is_on_trial=lambda replica: replica.number in self.cases,
            condemned_in=lambda _: (),
            note_stored=lambda _: None,
        )
        self.assignment = Assignment(
            self.fleet,
            self.pending,
            quarantine,
            most_tokens=most_tokens,
            begins_together=begins_together,
            clock=lambda: self.now,
        )

    def start(self, number: int) -> None:
        self.fleet.handles[number] = self.told[number]  # type: ignore[assignment]
        self.fleet.replicas[number].start(self.told[number].incarnation, self.now)

    def hear(self, number: int, event: Event, after_s: float = 0.0) -> None:
        self.fleet.replicas[number].hear(event, now=self.now + after_s, at=self.now)

    def come_up(self, number: int, max_num_seqs: int = 200) -> None:
        self.hear(number, Ready(EngineInfo(16, max_num_seqs, 16, "none", versions={}), 1.0))
        self.assignment.note_ready()

    def report(self, number: int, steps: int = 10) -> None:
        """Its engine has run some steps, and has room."""
        self.hear(number, Progress(0, {}, 0, 0, steps, 1, 0.0, EngineStats(num_running=1)), after_s=0.1)

    def finish(self, number: int) -> None:
        """A replica finishes its oldest lease."""
        lease = next(iter(self.leases(number).values()))
        self.hear(number, LeaseDone(lease, 0))
        if not lease.is_whole:
            self.assignment.note_stored(lease)

    def leases(self, number: int) -> dict[tuple[int, int], Lease]:
        return self.fleet.replicas[number].current.leases

    def end(self, number: int, *, max_restarts: int = 1) -> Any:
        """End an incarnation. Returns what the fleet notes of it."""
        replica = self.fleet.replicas[number]
        end = types.SimpleNamespace(replica=replica, leases=tuple(self.leases(number).values()), was_host_lost=False)
        replica.end("", None, now=self.now, max_restarts=max_restarts)
        del self.fleet.handles[number]
        return end

    @property
    def rows(self) -> list[int]:
        """The rows that each replica holds."""
        return [replica.outstanding_rows for replica in self.fleet.replicas]

    @property
    def begun(self) -> list[int]:
        """The replicas that have rows."""
        return [number for number, rows in enumerate(self.rows) if rows]


def given(told: Told) -> list[Lease]:
    return [lease for message in told.messages if isinstance(message, Assign) for lease in message.leases]


def test_nothing_is_given_before_an_engine_is_up(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path)
    bench.assignment.assign()
    assert bench.rows == [0, 0]
    bench.come_up(1)
    bench.assignment.assign()
    assert bench.rows[0] == 0 < bench.rows[1]


def test_between_two_rounds_a_replica_with_a_case_waits_for_it(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path)
    bench.cases.add(0)
    bench.come_up(0)
    bench.come_up(1)
    bench.assignment.assign_to(bench.fleet.replicas)
    assert bench.rows[0] == 0 < bench.rows[1]


def test_between_two_rounds_only_those_that_were_heard_are_given_rows(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path)
    bench.assignment.assign()
    before = bench.rows
    for number in range(2):
        bench.come_up(number)
        bench.report(number)
    bench.assignment.assign_to([bench.fleet.replicas[1]])
    assert bench.rows == [before[0], 40]
    bench.assignment.assign()
    assert bench.rows == [40, 40]


def test_rows_are_held_back_for_those_that_come_a_moment_later(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, num=4)
    bench.assignment.assign()
    bench.come_up(2)
    bench.report(2)
    bench.now += 1.9
    bench.assignment.assign()
    assert bench.rows[2] == 20
    for number in (0, 1, 3):
        bench.come_up(number)
        bench.report(number)
    bench.assignment.assign()
    assert bench.rows == [20, 20, 20, 20]
    assert {lease.attempts for told in bench.told for lease in given(told)} == {1}


def test_rows_are_shared_by_those_that_are_up_after_two_seconds(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, num=4)
    bench.assignment.assign()
    for number in (1, 2):
        bench.come_up(number)
        bench.report(number)
    bench.now += 2.1
    bench.assignment.assign()
    assert bench.rows == [0, 40, 40, 0]
    assert {lease.attempts for told in bench.told for lease in given(told)} == {1}
    # What has begun does not move to one that comes late.
    for number in range(4):
        for key in bench.leases(number):
            bench.hear(number, LeaseBegun(key, 0, 0))
    bench.come_up(0)
    bench.report(0)
    bench.assignment.assign()
    assert bench.rows == [0, 40, 40, 0]


def test_rows_are_held_back_longer_for_one_that_is_about_to_be_up(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path)
    bench.assignment.assign()
    bench.come_up(0)
    bench.report(0)
    bench.hear(1, StartPhase(WARMING_UP))
    bench.now += 4.9
    bench.assignment.assign()
    assert bench.rows[0] == 40
    bench.now += 0.2
    bench.assignment.assign()
    assert bench.rows == [80, 0]


def test_rows_are_not_held_back_for_longer_than_a_quarter_of_their_time(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, most_tokens=100)
    bench.assignment.assign()
    bench.come_up(0)
    bench.report(0)  # 10 ms a step: a row takes 1 s at most
    bench.now += 0.2
    bench.assignment.assign()
    assert bench.rows[0] == 40
    bench.now += 0.1
    bench.assignment.assign()
    assert bench.rows == [80, 0]


def test_one_that_ends_gives_its_rows_to_the_others_as_tried(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path)
    bench.assignment.assign()
    for number in range(2):
        bench.come_up(number)
        bench.report(number)
    bench.assignment.assign()
    tried = sorted(bench.leases(0))
    end = bench.end(0)
    bench.assignment.note_ended(end, tried[:1])  # a case holds the first one
    while bench.leases(1):
        bench.finish(1)
        bench.assignment.assign()
    again = [lease for lease in given(bench.told[1]) if lease.attempts == 2 and not lease.is_stored]
    held = next(lease for lease in end.leases if lease.key == tried[0])
    places = {place for lease in again for place in range(lease.start, lease.stop)}
    assert places == {place for lease in end.leases if lease is not held for place in range(lease.start, lease.stop)}


def test_together_all_begin_with_an_equal_share_once_the_last_is_up(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, begins_together=True)
    bench.assignment.assign()
    bench.come_up(1)
    for _ in range(2):
        bench.assignment.assign()
        bench.assignment.assign_to([bench.fleet.replicas[1]])
    assert bench.begun == []
    bench.come_up(0)
    bench.assignment.assign()
    assert bench.begun == [0, 1]
    for number in range(2):
        bench.report(number)
    bench.assignment.assign()
    assert bench.rows == [40, 40]
    assert {lease.attempts for told in bench.told for lease in given(told)} == {1}


@pytest.mark.parametrize("is_given_up", [False, True])
def test_together_nobody_waits_for_one_that_fails_at_its_start(is_given_up: bool, tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, begins_together=True)
    bench.assignment.assign()
    bench.come_up(0)
    bench.assignment.assign()
    assert bench.begun == []
    bench.assignment.note_ended(bench.end(1, max_restarts=0 if is_given_up else 1), ())
    if not is_given_up:
        bench.start(1)
    bench.assignment.assign()
    assert bench.begun == [0]
    if not is_given_up:
        bench.come_up(1)
        bench.assignment.assign()
        assert bench.begun == [0, 1]


@pytest.mark.parametrize("is_back", [True, False])
def test_together_all_wait_for_each_other_again_if_all_fail_their_first_start(
    is_back: bool, tmp_path: pathlib.Path
) -> None:
    bench = Bench(tmp_path, begins_together=True)
    bench.assignment.assign()
    for number in range(2):
        bench.assignment.note_ended(bench.end(number), ())
        bench.assignment.assign()
    bench.start(0)
    if is_back:
        bench.start(1)
    bench.come_up(0)
    bench.assignment.assign()
    assert bench.begun == []
    if not is_back:
        bench.start(1)
    bench.come_up(1)
    bench.assignment.assign()
    assert bench.begun == [0, 1]
    for number in range(2):
        bench.report(number)
    bench.assignment.assign()
    assert bench.rows == [40, 40]


def test_together_nobody_waits_for_one_that_fails_more_often_than_another(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, begins_together=True)
    one, other = bench.fleet.replicas
    one.restarts = 1
    other.restarts = 2
    bench.come_up(0)
    bench.assignment.assign()
    assert bench.begun == [0]


def test_together_one_that_ends_while_it_waits_has_tried_nothing(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, begins_together=True)
    bench.assignment.assign()
    bench.come_up(0)
    bench.assignment.assign()
    bench.assignment.note_ended(bench.end(0), ())
    bench.come_up(1)
    bench.report(1)
    bench.assignment.assign()
    assert bench.begun == [1]
    assert bench.rows == [0, 80]
    assert {lease.attempts for lease in given(bench.told[1])} == {1}


def test_together_nobody_waits_for_longer_than_an_engine_may_stall(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, begins_together=True)
    bench.fleet.stall_timeout_s = 0.0
    bench.assignment.assign()
    assert bench.begun == []
    bench.come_up(1)
    bench.now += 0.1
    bench.assignment.assign()
    assert bench.begun == [1]
