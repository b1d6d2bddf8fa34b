"""Simulates a job on several replicas, with the coordinator's own decisions, beside even splits of its rows.

    python benchmarks/tail.py                                                 # all cases: the table of RESULTS.md
    python benchmarks/tail.py --rows 4000 --replicas 8 --skews 0.2 --list     # some of them

A case is a number of rows and of replicas, the skew (seconds from the first replica that is up to the last; `never`:
the last one does not come), the lengths of outputs and the time of a step. It measures the seconds from the first
replica that is up to the last row, and compares them with `LLM.generate` over a file for each replica that comes up:
the better of two splits, by consecutive rows and by stripes. `bound` is 1.05 of that and half a second.

The engine admits what has room, a step takes `constant` 33 ms or `growing` 10.6 ms and 21.9 µs for each request, and
replicas report as `replica/incarnation.py` does. The decisions are those of `fleet/sharing/assignment.py`.
"""

import argparse
import dataclasses
import heapq
import itertools
import math
import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from workloads import log_normal_lengths

from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.devices import Slot
from batchinf.fleet.replica import FleetReplica
from batchinf.fleet.sharing.assignment import Assignment
from batchinf.records import Lease
from batchinf.replica.messages import Event, Key, LeaseBegun, LeaseDone, Progress, Ready
from batchinf.replica.worker import window
from batchinf.schedule.leases import PendingRows
from batchinf.schedule.shards import Extent, choose_rows_per_shard, total_shards

ROWS = (1, 3, 8, 100, 300, 1_000, 4_000, 20_000, 1_000_000)
REPLICAS = (1, 2, 4, 8, 64)
SKEWS = ("0", "0.2", "0.5", "1", "2", "5", "60", "never")
LENGTHS = ("equal", "log-normal", "one long", "ascending", "descending")
STEPS = ("constant", "growing")
STEP_S = 0.033
MEAN_TOKENS, MOST_TOKENS, LONG_TOKENS = 200, 1_500, 4_000
FACTOR, SLACK_S, MOST = 1.05, 0.5, 1.3
# A decision comes so often at least, and reaches the replica so much later.
TURN_S, DELAY_S = 0.05, 0.01


@dataclass(frozen=True)
class Case:
    """One simulated job."""

    num_rows: int
    num_replicas: int
    skew: str
    lengths: str
    step: str
    max_num_seqs: int = 1024
    num_cached: int = 1 << 30

    @property
    def starts(self) -> list[float]:
        """When each replica is up, in seconds, by the skew; infinity if never."""
        last = self.num_replicas - 1
        if self.skew == "never":
            return [0.0] * max(1, last) + [math.inf] * min(1, last)
        return [float(self.skew) * number / max(1, last) for number in range(self.num_replicas)]

    @property
    def tokens(self) -> list[int]:
        """Output tokens of each row."""
        if self.lengths == "equal":
            return [MEAN_TOKENS] * self.num_rows
        if self.lengths == "one long":
            return [LONG_TOKENS if row == self.num_rows // 2 else MEAN_TOKENS for row in range(self.num_rows)]
        drawn = log_normal_lengths(self.num_rows, seed=0)
        return drawn if self.lengths == "log-normal" else sorted(drawn, reverse=self.lengths == "descending")

    @property
    def most_tokens(self) -> int:
        """`max_tokens` of the job."""
        return {"equal": MEAN_TOKENS, "one long": LONG_TOKENS}.get(self.lengths, MOST_TOKENS)

    def step_s(self, num_running: int) -> float:
        return STEP_S if self.step == "constant" else 10.6e-3 + 21.9e-6 * num_running


@dataclass
class Engine:
    """Continuous batching: at most `max_num_seqs` requests run, and the others wait."""

    case: Case
    time: float
    steps: int = 0
    waiting: deque[int] = field(default_factory=deque)
    ends: list[int] = field(default_factory=list)  # the steps at which running requests are finished
    num_finished: int = 0
    last_at: float = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.ends)

    def add(self, tokens: int) -> None:
        self.waiting.append(tokens)
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.ends) < min(self.case.max_num_seqs, self.case.num_cached):
            heapq.heappush(self.ends, self.steps + self.waiting.popleft())

    def advance(self, until: float) -> bool:
        """Run steps up to a time, or until requests are finished. Returns whether the time is reached."""
        if not self.ends:
            self.time = max(self.time, until)
            return True
        step_s = self.case.step_s(len(self.ends))
        steps = self.ends[0] - self.steps
        if self.time + steps * step_s > until:
            steps = max(0, math.floor((until - self.time) / step_s))
            self.steps += steps
            self.time += steps * step_s
            return True
        self.steps += steps
        self.time += steps * step_s
        while self.ends and self.ends[0] <= self.steps:
            heapq.heappop(self.ends)
            self.num_finished += 1
        self.last_at = self.time
        self._admit()
        return False


def seconds_alone(case: Case, tokens: list[int], start: float) -> float:
    """When one replica has finished these rows, which it got at its start."""
    engine = Engine(case, start)
    for row in tokens:
        engine.add(row)
    while engine.num_unfinished:
        engine.advance(math.inf)
    return engine.last_at


def seconds_split(case: Case) -> float:
    """The better of two even splits over the replicas that come up."""
    starts = [start for start in case.starts if start < math.inf]
    number, tokens = len(starts), case.tokens
    bounds = [len(tokens) * place // number for place in range(number + 1)]
    consecutive = [tokens[start:stop] for start, stop in itertools.pairwise(bounds)]
    stripes = [tokens[place::number] for place in range(number)]
    return min(
        max(seconds_alone(case, own, start) for own, start in zip(split, starts, strict=True) if own)
        for split in (consecutive, stripes)
    )


class Replica:
    """A feeder and an engine, and what the coordinator knows of them."""

    def __init__(self, case: Case, number: int, tokens: list[int]) -> None:
        self.start = case.starts[number]
        self.known = FleetReplica(Slot(number, (), ()), requests_per_row=1)
        self.known.start("", 0.0)
        self.engine = Engine(case, max(0.0, self.start))
        self.case = case
        self.assigned: deque[Lease] = deque()
        self.ready: deque[int] = deque()
        self.open: deque[tuple[Lease, int]] = deque()  # begun leases, each with the row at which it ends
        self.num_begun = 0
        self.num_answered = 0
        self.progress_s = 1.0
        self.reported_at = 0.0
        self.report: tuple[int, int, int] = (0, 0, 0)
        self._tokens = tokens

    def hear(self, event: Event, now: float = 0.0) -> None:
        """The coordinator hears an event of this replica."""
        self.known.hear(event, now=now, at=now)

    def turn(self, until: float) -> None:
        """Run up to a time."""
        if not self.known.is_up:
            return
        while True:
            self._feed()
            if self.engine.advance(until):
                return

    def _feed(self) -> None:
        most = window(self.case.max_num_seqs)
        while True:
            while self.ready and self.engine.num_unfinished < most:
                self.engine.add(self.ready.popleft())
            if not self.assigned or len(self.ready) >= most // 2:
                return
            lease = self.assigned.popleft()
            self.hear(LeaseBegun(lease.key, 0, 0))
            self.ready.extend(self._tokens[lease.start : lease.stop])
            self.num_begun += lease.num_rows
            self.open.append((lease, self.num_begun))

    def tell(self, now: float, assignment: Assignment) -> None:
        """Report to the coordinator, as a replica does."""
        # Rows finish in another order. A lease counts as stored once so many rows are finished.
        while self.open and self.open[0][1] <= self.engine.num_finished:
            lease, _ = self.open.popleft()
            self.hear(LeaseDone(lease, lease.num_rows))
            if not lease.is_whole:
                assignment.note_stored(lease)
        engine = self.engine
        said = (engine.num_finished, len(engine.ends), len(engine.waiting))
        since_s = now - self.reported_at
        if since_s >= 1.0 or (since_s >= self.progress_s and said != self.report):
            self.reported_at, self.report = now, said
            usage = len(engine.ends) / min(self.case.num_cached, 1 << 20)
            progress = Progress(
                num_rows=engine.num_finished,
                errors={},
                num_prompt_tokens=0,
                num_output_tokens=0,
                steps=engine.steps,
                in_flight=engine.num_unfinished,
                stalled_by_disk_s=0.0,
                engine=EngineStats(len(engine.ends), len(engine.waiting), usage),
                num_answered=engine.num_finished,
            )
            self.hear(progress, now)


class Fleet:
    """What `Assignment` needs of a fleet."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.by_number = replicas
        self.replicas = [replica.known for replica in replicas]
        self.stall_timeout_s = 300.0
        self.requests_per_row = 1
        self.revoked: list[tuple[FleetReplica, list[Key]]] = []

    def give(self, replica: FleetReplica, message: Any) -> None:
        own = self.by_number[replica.number]
        own.progress_s = message.progress_s
        # No time is counted for a part.
        open_leases = [lease for lease in message.leases if not lease.is_stored]
        replica.give(open_leases)
        own.assigned.extend(open_leases)

    def revoke(self, replica: FleetReplica, leases: list[Lease]) -> None:
        own = self.by_number[replica.number]
        keys = {lease.key for lease in leases}
        self.revoked.append((replica, [lease.key for lease in own.assigned if lease.key in keys]))
        own.assigned = deque(lease for lease in own.assigned if lease.key not in keys)


class NoQuarantine:
    """A job without suspected rows."""

    def give(self) -> None: ...

    def is_on_trial(self, replica: FleetReplica) -> bool:
        return False

    def condemned_in(self, lease: Lease) -> tuple[tuple[int, str], ...]:
        return ()

    def note_stored(self, lease: Lease) -> None: ...


def seconds_shared(case: Case) -> tuple[float, list[int]]:
    """When the last row is finished, and how many rows each replica finished."""
    tokens = case.tokens
    rows_per_shard = choose_rows_per_shard(case.num_rows, case.num_replicas, MEAN_TOKENS * 36)
    extent = Extent(0, case.num_rows, rows_per_shard, 0, 0, case.num_rows)
    pending = PendingRows([extent], np.zeros(total_shards([extent]), np.bool_))
    replicas = [Replica(case, number, tokens) for number in range(case.num_replicas)]
    fleet, clock = Fleet(replicas), [-1.0]
    quarantine: Any = NoQuarantine()
    known_fleet: Any = fleet
    assignment = Assignment(known_fleet, pending, quarantine, most_tokens=case.most_tokens, clock=lambda: clock[0])
    assignment.assign()
    now = 0.0
    info = EngineInfo(8192, case.max_num_seqs, 1, "", {})
    while sum(replica.engine.num_finished for replica in replicas) < case.num_rows:
        clock[0] = now
        for replica in replicas:
            known = replica.known
            if replica.start <= now and not known.is_up:
                replica.hear(Ready(info, 0.0), now)
                assignment.note_ready()
            if known.is_up:
                replica.tell(now, assignment)
        for known, keys in fleet.revoked:
            assignment.take_back(known.take_back(keys))
        fleet.revoked.clear()
        assignment.assign()
        for replica in replicas:
            replica.engine.time = max(replica.engine.time, now) if not replica.engine.ends else replica.engine.time
            replica.turn(now + TURN_S)
        now += TURN_S
    return max(replica.engine.last_at for replica in replicas), [replica.engine.num_finished for replica in replicas]


@dataclass(frozen=True)
class Outcome:
    """Seconds to the last row: shared by the coordinator, and by the better even split. rows: of each replica."""

    case: Case
    shared_s: float
    split_s: float
    rows: list[int]

    @property
    def ratio(self) -> float:
        return self.shared_s / self.split_s

    @property
    def is_within(self) -> bool:
        return self.shared_s <= FACTOR * self.split_s + SLACK_S


def run(case: Case) -> Outcome:
    shared_s, rows = seconds_shared(case)
    return Outcome(case, shared_s, seconds_split(case), rows)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    numbers = map(int, args.rows.split(",")) if args.rows else ROWS
    replicas = [int(number) for number in args.replicas.split(",")] if args.replicas else REPLICAS
    skews = args.skews.split(",") if args.skews else SKEWS
    lengths = args.lengths.split(",") if args.lengths else LENGTHS
    for case in itertools.starmap(Case, itertools.product(numbers, replicas, skews, lengths, STEPS)):
        if case.num_rows > 100_000 and case.lengths != "equal":
            continue
        if case.num_replicas == 1 and case.skew != "0":
            continue
        yield dataclasses.replace(case, max_num_seqs=args.max_num_seqs, num_cached=args.num_cached)


def summary(name: str, outcomes: list[Outcome]) -> str:
    ratios = sorted(outcome.ratio for outcome in outcomes)
    within = sum(outcome.is_within for outcome in outcomes) / len(outcomes)
    p95 = ratios[min(len(ratios) - 1, math.ceil(0.95 * len(ratios)) - 1)]
    return (
        f"| {name} | {len(outcomes):,} | {ratios[len(ratios) // 2]:.3f} | {p95:.3f} | {ratios[-1]:.2f} | {within:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="with commas between them")
    parser.add_argument("--replicas")
    parser.add_argument("--skews")
    parser.add_argument("--lengths")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--num-cached", type=int, default=1 << 30, help="requests that the cache holds")
    parser.add_argument("--list", action="store_true", help="a line for each case")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    with multiprocessing.Pool(args.jobs) as pool:
        outcomes = list(pool.imap(run, cases(args), chunksize=8))
    if args.list:
        for it in outcomes:
            case = it.case
            print(
                f"{case.num_rows:>9,} rows, {case.num_replicas:>2} replicas, skew {case.skew:>5}, {case.lengths:>10}, "
                f"{case.step:>8}: {it.shared_s:8.2f} s, split {it.split_s:8.2f} s, {it.ratio:.3f}"
                f"{'' if it.is_within else ' out'}{' MOST' if it.ratio > MOST else ''} {it.rows[:8]}"
            )
    print("| cases | number | median | 95 % | most | within the bound |\n" + "| --- " * 6 + "|")
    print(summary("all", outcomes))
    for name, values in (
        ("num_rows", ROWS),
        ("num_replicas", REPLICAS),
        ("skew", SKEWS),
        ("lengths", LENGTHS),
        ("step", STEPS),
    ):
        for value in values:
            if some := [it for it in outcomes if getattr(it.case, name) == value]:
                print(summary(f"{name.removeprefix('num_')} {value}", some))


if __name__ == "__main__":
    main()
