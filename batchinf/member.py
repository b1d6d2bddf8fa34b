"""One place for a replica in a fleet: its incarnation, what it has said, which shards it holds; and how one ended."""

import time
from dataclasses import dataclass, field

from batchinf import messages
from batchinf.backends.local import LocalReplica
from batchinf.engine_settings import Lowered, Verdict
from batchinf.flight import InFlight
from batchinf.messages import Event, Failed, Progress, Ready
from batchinf.placement import Slot
from batchinf.records import EngineInfo, EngineStats, Shard
from batchinf.status import ReplicaStatus
from batchinf.worker import window

# How long a replica may take to end after it has said why it does.
_LAST_WORDS_S = 10.0
NOTHING = Progress(0, 0, 0, 0, 0, 0, 0.0, EngineStats())


@dataclass(slots=True)
class Member:
    """One place for a replica, over all of its incarnations.

    shards: what the running incarnation holds and has not closed, in the order in which it was given them.
    early_window: of an engine that is not up yet, while shards are prepared for it; None where they are not.
    failures: ends in a row without a finished row between them. recovered_rows: what it has taken from the journal.
    cause: why the last incarnation ended.
    """

    slot: Slot
    requests_per_row: int
    replica: LocalReplica | None = None
    state: str = "waiting"
    shards: dict[int, Shard] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    revoking: set[int] = field(default_factory=set)
    info: EngineInfo | None = None
    early_window: int | None = None
    progress: Progress = NOTHING
    recovered_rows: int = 0
    closed_rows: int = 0
    closed_errors: int = 0
    failures: int = 0
    restarts: int = 0
    start_at: float = 0.0
    is_given_up: bool = False
    is_stopping: bool = False
    failed: Failed | None = None
    failed_at: float = 0.0
    cause: str = ""
    steps_changed_at: float = field(default_factory=time.monotonic)

    @property
    def is_running(self) -> bool:
        """Whether its engine is up and takes rows."""
        return self.replica is not None and self.info is not None and self.failed is None

    @property
    def takes_shards(self) -> bool:
        """Whether it makes something of shards: its engine is up, or its feeder is ahead of that."""
        return self.is_running or (self.replica is not None and self.failed is None and self.early_window is not None)

    @property
    def outstanding_rows(self) -> int:
        """Rows assigned and not finished, as far as it has said."""
        finished = max(0, self.progress.num_rows - self.closed_rows)
        held = sum(shard.num_to_run for index, shard in self.shards.items() if index not in self.revoking)
        return max(0, held - finished // self.requests_per_row)

    @property
    def window_rows(self) -> int:
        """Rows that its engine's window holds."""
        requests = window(self.info.max_num_seqs) if self.info is not None else self.early_window or 1
        return max(1, requests // self.requests_per_row)

    @property
    def unbegun(self) -> tuple[int, ...]:
        """Shards that can still be taken back, oldest first."""
        return tuple(index for index in self.shards if index not in self.begun and index not in self.revoking)

    def status(self) -> ReplicaStatus:
        """For `status.json`."""
        engine = self.progress.engine
        return ReplicaStatus(
            self.slot.replica,
            self.state,
            self.slot.devices,
            self.progress.in_flight,
            engine.num_running,
            engine.num_waiting,
            engine.kv_cache_usage,
            self.restarts,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """An incarnation that is over: its shards have to be handed out again, save those that its last events close.

    flight: what was in its engine, where a row may have been the cause of its death. was_killed: by a signal from
    outside, as far as can be told.
    out_of_memory: why it died, and what becomes of its replica; None if memory had not run out.
    """

    member: Member
    incarnation: str
    lifetime_s: float
    shards: tuple[Shard, ...]
    events: tuple[Event, ...]
    cause: str
    was_asked: bool
    flight: tuple[InFlight, ...]
    was_killed: bool
    out_of_memory: Verdict | None = None

    @property
    def lowered(self) -> Lowered | None:
        """The step down that followed from its end, if one did."""
        return None if self.out_of_memory is None else self.out_of_memory.step


def update(member: Member, event: Event) -> None:
    """Take in what its replica has said."""
    match event:
        case messages.Phase(name):
            member.state = name
        case messages.TakesShards(size):
            member.early_window = size
        case Ready(engine, _):
            member.info, member.state = engine, "running"
            member.steps_changed_at = time.monotonic()
        case Progress():
            if event.steps != member.progress.steps or not event.in_flight:
                member.steps_changed_at = time.monotonic()
            member.progress = event
        case messages.ShardBegun(shard, num_recovered):
            member.begun.add(shard)
            member.recovered_rows += num_recovered
        case messages.Revoked(shards):
            for index in shards:
                member.begun.discard(index)
        case Failed():
            member.failed, member.failed_at = event, time.monotonic()
        case messages.Stopped():
            member.state = "ended"


def is_overdue(member: Member) -> bool:
    """Whether its replica, which has said that it ends, takes too long over it."""
    return member.failed is not None and time.monotonic() - member.failed_at > _LAST_WORDS_S
