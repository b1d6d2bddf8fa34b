"""Which row kills engines, without processes: the real quarantine and replicas over engines that are simulated."""

import itertools
import json
import math
import pathlib
import random
import tempfile
import types
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from extents import extent_of_all
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinf.base.storage import Folder
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.devices import Slot
from batchinf.fleet.replica import FleetReplica
from batchinf.fleet.sharing.quarantine import Case, Quarantine, case_of
from batchinf.manifest.lines import Condemned, Suspects, record_line
from batchinf.manifest.state import State
from batchinf.records import Lease
from batchinf.replica.messages import CONDEMNED, Assign, InFlightRequest, LeaseDone, Progress, Ready, Trial
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at, total_shards

MAX_RESTARTS = 3


def requests(rows: Iterable[int], *, has_output: bool = True) -> list[InFlightRequest]:
    return [InFlightRequest(row, has_output) for row in rows]


def bound(num_rows: int) -> int:
    """The most restarts for one row that kills, with so many rows in the engine."""
    return math.floor(math.log2(num_rows)) + 3


# -- the rule alone ----------------------------------------------------------------------------------------------------


def search(rows: range, killers: set[int], *, at_prompt: bool) -> tuple[Case, int]:
    """The case when it is over, and the deaths, if all rows are in the engine at the first two deaths."""
    case, num_deaths = case_of("a", 0, requests(rows, has_output=not at_prompt), ()), 1
    case, num_deaths = case_of("b", 0, requests(rows, has_output=not at_prompt), (case,)), 2
    while case.suspects and case.condemned is None:
        if killers & set(case.group):
            case = case.died(0, requests(case.group, has_output=not at_prompt))
            num_deaths += 1
        else:
            case = case.survived(case.group)
    return case, num_deaths


@pytest.mark.parametrize("at_prompt", [True, False])
def test_every_killer_is_found_within_the_bound(at_prompt: bool) -> None:
    for num_rows in (*range(1, 34), 63, 64, 77):
        for killer in range(num_rows):
            case, num_deaths = search(range(num_rows), {killer}, at_prompt=at_prompt)
            assert case.condemned == killer
            assert num_deaths <= bound(num_rows)


def test_rows_without_output_come_last_because_what_survives_costs_no_restart() -> None:
    in_flight = [*requests(range(8), has_output=False), *requests(range(8, 64))]
    case = case_of("b", 0, requests(range(64), has_output=False), (case_of("a", 0, in_flight, ()),))
    assert case.group == tuple(range(8, 40))


def test_a_death_belongs_to_the_case_whose_rows_were_in_the_engine() -> None:
    one, other = case_of("a", 0, requests(range(4)), ()), case_of("b", 1, requests(range(4, 8)), ())
    assert case_of("c", 2, requests([9]), (one, other)) == Case("c", (9,))
    # On whatever replica; with the most rows in common; first a case on trial.
    found = case_of("c", 2, requests([3, 4, 5, 9]), (one, other))
    assert (found.origin, found.suspects, found.others, found.replica) == ("b", (4, 5), (3, 9), 2)
    assert case_of("d", 2, requests([3, 2, 4]), (one, found)).origin == "b"


def test_a_row_beside_others_is_not_alone() -> None:
    case = Case("a", (7,), replica=0, num_alone=1)
    assert case.died(0, requests([7, 8])).condemned is None
    assert case.died(0, requests([7, 7])).condemned == 7


def test_a_case_that_no_death_confirms_is_cleared() -> None:
    case = Case("a", (1, 2, 3), replica=0, others=(9,))
    for rows in ((1,), (2,), (3,)):
        assert case.group == rows
        case = case.survived(rows)
    assert case.suspects == ()


# -- whole jobs --------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """What the engines do, and what has happened."""

    num_rows: int
    num_replicas: int
    window: int
    at_token: dict[frozenset[int], int]
    """Rows that kill once they are together in the engine and all have so many tokens; 0: at their prompts."""
    broken: int | None = None
    """The replica that dies of any row."""
    loses_results: bool = False
    """What an incarnation has finished since its last lease is lost with it, as after a signal."""
    forgets: bool = False
    """The coordinator is killed after each death."""
    seed: int = 0
    lengths: list[int] = field(default_factory=list)
    deaths: list[tuple[int, int]] = field(default_factory=list)
    """The replica of each, and the rows in its engine."""
    errors: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)


class SimulatedEngine:
    """One incarnation with its feeder: runs leases in order, and trials before them."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.tokens: dict[int, int] = {}
        self.queue: list[int] = []
        self.fresh: set[int] = set()
        self.condemned: set[int] = set()
        self.leases: dict[tuple[int, int, int], Lease] = {}
        self.trial: Trial | None = None

    def take(self, message: Assign | Trial) -> None:
        world = self.world
        if isinstance(message, Trial):
            self.trial = message
            self.queue = [row for row in message.rows if row not in world.stored] + self.queue
            return
        condemned = dict(message.condemned)
        for lease in message.leases:
            self.leases[lease.key] = lease
            rows = [row for row in range(lease.start, lease.stop) if row not in world.stored]
            self.condemned |= condemned.keys() & set(rows)
            world.errors |= self.condemned
            self.fresh |= self.condemned
            self.queue += [row for row in rows if row not in condemned]

    def step(self) -> bool:
        """Run a step. Returns whether the engine died of it."""
        world = self.world
        while self.queue and len(self.tokens) < world.window:
            row = self.queue.pop(0)
            if row not in world.stored | self.fresh:
                self.tokens[row] = 0
        if self.tokens and world.broken == self.number:
            return True
        for rows, at_token in world.at_token.items():
            if all(self.tokens.get(row, -1) >= at_token for row in rows):
                return True
        for row in list(self.tokens):
            self.tokens[row] += 1
            if self.tokens[row] >= world.lengths[row]:
                del self.tokens[row]
                self.fresh.add(row)
        return False


class Job:
    """A coordinator without processes: the real quarantine and replicas, and the rest in few lines."""

    def __init__(self, world: World, folder: pathlib.Path) -> None:
        self.world = world
        self.random = random.Random(world.seed)
        world.lengths = [self.random.randint(max(world.at_token.values(), default=0) + 1, 12)] * world.num_rows
        rows_per_shard = self.random.randint(1, 2 * world.window)
        self.order = RunOrder(Folder(folder), (extent_of_all(0, world.num_rows, rows_per_shard, 0),))
        self.is_done = np.zeros(total_shards(self.order.extents), np.bool_)
        self.state = State()
        self.names = map(str, itertools.count())

    def run(self) -> None:
        """Start the job, or the rest of it, and go on until it is done or no replica is left."""
        self.replicas = [FleetReplica(Slot(number, (), ()), 1) for number in range(self.world.num_replicas)]
        self.engines: dict[int, SimulatedEngine] = {}
        self.read_manifest()
        shards = [shard_at(self.order.extents, int(index)) for index in np.flatnonzero(~self.is_done)]
        leases = [Lease(shard.index, shard.start, shard.stop) for shard in shards]
        self.pending = [lease for lease in leases if lease.key not in self.quarantine.leases]
        self.work()

    def read_manifest(self) -> None:
        own: Any = self
        self.quarantine = Quarantine(self.order, self.state, self.is_done, fleet=own, manifest=own)

    # In the place of the manifest and of the fleet.

    def record(self, record: Any) -> None:
        self.state.apply(json.loads(json.dumps(record_line(record))))

    def event(self, name: str, /, **fields: Any) -> None:
        """Only people read events."""

    def give(self, replica: FleetReplica, message: Assign | Trial) -> None:
        replica.give(message.leases, begins_at_once=isinstance(message, Trial))
        self.engines[replica.number].take(message)

    def excuse(self, end: Any) -> None:
        end.replica.excuse(now=0.0, max_restarts=MAX_RESTARTS)

    def work(self) -> None:
        for _ in range(200_000):
            if self.is_done.all() or all(replica.is_given_up for replica in self.replicas):
                return
            replica = self.random.choice(self.replicas)
            if replica.is_live:
                self.turn(replica)
            elif not replica.is_given_up:
                replica.start(next(self.names), 0.0)
                replica.hear(Ready(EngineInfo(16, self.world.window, 16, "none", versions={}), 1.0), now=0.0, at=0.0)
                self.engines[replica.number] = SimulatedEngine(self.world, replica.number)
        raise AssertionError("the job does not end")

    def turn(self, replica: FleetReplica) -> None:
        engine = self.engines[replica.number]
        self.quarantine.give()
        if not self.quarantine.is_on_trial(replica):
            while self.pending and len(engine.queue) + len(engine.tokens) < 2 * self.world.window:
                lease = self.pending.pop(0)
                self.give(replica, Assign((lease,), self.quarantine.condemned_in(lease)))
        for _ in range(self.random.randint(1, 20)):
            if engine.step():
                self.end(replica)
                return
            self.store(replica)

    def store(self, replica: FleetReplica) -> None:
        """Finish a trial and leases whose rows have run."""
        engine = self.engines[replica.number]
        has = self.world.stored | engine.fresh
        if engine.trial is not None and has.issuperset(engine.trial.rows):
            rows = engine.trial.rows
            engine.trial = None
            self.quarantine.survived(replica, rows)
            self.quarantine.give()
        for lease in [lease for lease in engine.leases.values() if has.issuperset(range(lease.start, lease.stop))]:
            del engine.leases[lease.key]
            self.world.stored |= set(range(lease.start, lease.stop))
            num_condemned = len(engine.condemned & set(range(lease.start, lease.stop)))
            replica.hear(LeaseDone(lease, lease.num_rows, {CONDEMNED: num_condemned}), now=0.0, at=0.0)
            self.is_done[lease.index] = True
            self.quarantine.forget(lease.index)

    def end(self, replica: FleetReplica) -> None:
        engine = self.engines.pop(replica.number)
        world = self.world
        world.deaths.append((replica.number, len(engine.tokens)))
        if not world.loses_results:
            world.stored |= engine.fresh
        if self.random.random() < 0.5:
            errors = {CONDEMNED: len(engine.condemned)}
            replica.hear(Progress(len(engine.fresh), errors, 0, 0, 1, 1, 0.0, EngineStats()), now=0.0, at=0.0)
        end: Any = types.SimpleNamespace(
            replica=replica,
            incarnation=replica.current.name,
            leases=tuple(replica.current.leases.values()),
            in_flight=tuple(InFlightRequest(row, tokens > 0) for row, tokens in engine.tokens.items()),
            cause="it died",
            was_host_lost=False,
        )
        replica.end("it died", None, now=0.0, max_restarts=MAX_RESTARTS)
        self.quarantine.note_death(end)
        held = self.quarantine.leases
        self.pending = [replace(lease, attempts=1) for lease in end.leases if lease.key not in held] + self.pending
        if world.forgets:
            self.read_manifest()


def run(world: World, num_runs: int = 1) -> None:
    """Run a job, and again if no replica is left, until it is done."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(world, pathlib.Path(folder))
        for _ in range(num_runs):
            job.run()
    if job.is_done.all():
        assert world.stored == set(range(world.num_rows))
        assert (job.state.of(Suspects), job.state.of(Condemned)) == ([], []), "what no row needs any more is forgotten"


@st.composite
def worlds(draw: st.DrawFn, num_killers: int, *, together: bool = False) -> World:
    num_rows = draw(st.integers(max(1, num_killers), 200))
    killers = draw(st.lists(st.integers(0, num_rows - 1), min_size=num_killers, max_size=num_killers, unique=True))
    groups = [frozenset(killers)] if together else [frozenset([killer]) for killer in killers]
    return World(
        num_rows,
        draw(st.sampled_from([1, 4])),
        draw(st.integers(2, 40)),
        {group: draw(st.integers(0, 5)) for group in groups},
        loses_results=draw(st.booleans()),
        forgets=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 32)),
    )


@settings(max_examples=100, deadline=None)
@given(worlds(1))
def test_one_row_that_kills_is_found_within_the_bound(world: World) -> None:
    run(world)
    assert len(world.stored) == world.num_rows
    assert {frozenset([row]) for row in world.errors} == world.at_token.keys()
    assert len(world.deaths) <= bound(max(num_rows for _, num_rows in world.deaths))
    # Healthy replicas do not die one after the other: after two deaths, the suspects stay with one of them.
    assert len({replica for replica, _ in world.deaths}) <= 2


@settings(max_examples=100, deadline=None)
@given(worlds(2))
def test_two_rows_that_kill_are_found_and_no_other(world: World) -> None:
    # If all rows that are left kill, the engine may be broken as well: then the job stops, and another run ends it.
    run(world, num_runs=2)
    assert len(world.stored) == world.num_rows
    assert {frozenset([row]) for row in world.errors} == world.at_token.keys()
    # A row of the second killer may be the control of the first, or a suspect beside it.
    assert len(world.deaths) <= 3 * bound(max(num_rows for _, num_rows in world.deaths))


@settings(max_examples=80, deadline=None)
@given(worlds(2, together=True))
def test_rows_that_kill_only_together_survive_apart(world: World) -> None:
    run(world)
    assert len(world.stored) == world.num_rows
    assert not world.errors


@settings(max_examples=80, deadline=None)
@given(worlds(0))
def test_a_broken_engine_is_given_up_and_no_row_is_condemned(world: World) -> None:
    world.broken = 0
    run(world)
    if world.num_replicas > 1:
        assert len(world.stored) == world.num_rows
    elif world.num_rows > MAX_RESTARTS and world.window > MAX_RESTARTS:
        assert not world.stored, "the job ends without a row, and says why"
    # Fewer rows than `max_restarts` cannot show that the engine, and not a row, is the cause.
    if min((num_rows for _, num_rows in world.deaths[:2]), default=1) > MAX_RESTARTS:
        assert not world.errors
    assert len(world.errors) <= 1
