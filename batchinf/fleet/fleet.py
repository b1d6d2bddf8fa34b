"""One place for a replica in a fleet: its incarnation, what it has said, which shards it holds; and how one ended."""

import pathlib
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from batchinf.base.errors import EngineDeadError, UserError
from batchinf.fleet.devices import Slot
from batchinf.fleet.local import LocalBackend, LocalReplica, engine_environment
from batchinf.fleet.out_of_memory import EngineSettings, Lowered, Verdict, recognise
from batchinf.fleet.replica_log import last_error, log_errors, points_elsewhere, told_cause
from batchinf.fleet.status import ReplicaStatus
from batchinf.manifest.names import incarnation_name
from batchinf.records import EngineInfo, EngineStats, Shard
from batchinf.replica import messages
from batchinf.replica.flight import InFlight
from batchinf.replica.messages import Assign, Command, Event, Failed, Launch, Progress, Ready, Revoke, Trial, Work
from batchinf.replica.worker import window

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
        case messages.StartPhase(name):
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


_BACK_OFF_S = 1.0
_MAX_BACK_OFF_S = 30.0
# How a process ends that somebody else wants gone, in contrast to a segmentation fault.
_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


class Fleet:
    """All members. `launch(member_index, incarnation) -> Launch` tells what a new incarnation is to be."""

    def __init__(
        self,
        slots: Iterable[Slot],
        requests_per_row: int,
        launch: Callable[[Slot, str], Launch],
        epoch: int,
        logs: pathlib.Path,
        max_restarts: int,
        stall_timeout_s: float,
        is_cache_warm: bool,
        settings: EngineSettings | None = None,
        retry: int = 0,
    ) -> None:
        """settings: what `launch` takes its engine arguments from; they are lowered where memory runs out.

        retry: that the incarnations work for; 0 for none.
        """
        self.members = [Member(slot, requests_per_row) for slot in slots]
        self._launch = launch
        self._work: Work | None = None
        self._epoch = epoch
        self._retry = retry
        self._logs = logs
        self._max_restarts = max_restarts
        self._stall_timeout_s = stall_timeout_s
        self.is_cache_warm = is_cache_warm
        self._settings = settings
        self._backend = LocalBackend()
        self._num_incarnations = 0
        self._spent = (0, 0)
        self._stalled_by_disk_s = 0.0

    def give_work(self, work: Work) -> None:
        """Tell the members what their rows are: those that run, and from now on each as it starts."""
        self._work = work
        for member in self.members:
            self._send(member, work)

    def start_due(self) -> list[Member]:
        """Start every member whose time has come; those that were started.

        With a cold cache of compiled graphs the first fills it. The others, which would write it at the same time, fill
        one of their own, which ends with them: so all are up about as soon as one.
        """
        started: list[Member] = []
        for member in self.members:
            if member.replica is None and not member.is_given_up and time.monotonic() >= member.start_at:
                self._start(member)
                started.append(member)
        return started

    def _start(self, member: Member) -> None:
        self._num_incarnations += 1
        incarnation = incarnation_name(self._epoch, self._num_incarnations, self._retry)
        is_filled = any(other.replica is not None and other.replica.own_cache is None for other in self.members)
        member.replica = self._backend.start(
            self._launch(member.slot, incarnation),
            self._logs / f"replica-{member.slot.replica}.log",
            engine_environment(member.slot.devices, len(member.slot.cpus), member.slot.replica),
            has_own_cache=is_filled and not self.is_cache_warm,
        )
        if self._work is not None:
            member.replica.send(self._work)
        member.state, member.info, member.failed, member.early_window = "starting", None, None, None
        member.progress, member.recovered_rows, member.closed_rows, member.closed_errors = NOTHING, 0, 0, 0
        member.steps_changed_at = time.monotonic()

    def poll(self, wait_s: float) -> list[tuple[Member, Event]]:
        """What replicas have said, after at most `wait_s` seconds; the members are brought up to date first."""
        by_replica = {id(member.replica): member for member in self.members if member.replica is not None}
        events = []
        for replica, event in self._backend.poll(wait_s):
            member = by_replica.get(id(replica))
            if member is not None:
                update(member, event)
                self.is_cache_warm |= member.info is not None and replica.own_cache is None
                events.append((member, event))
        return events

    def reap(self) -> list[Ended]:
        """End, with all their processes, the replicas that have died or made no step for too long."""
        ended = []
        for member in self.members:
            if member.replica is None:
                continue
            if member.replica.has_ended() or is_overdue(member):
                ended.append(self._end(member, self._cause(member)))
            elif self._is_stalled(member):
                ended.append(self._end(member, f"no step for {self._stall_timeout_s:g} s (stall_timeout_s)"))
        return ended

    def _is_stalled(self, member: Member) -> bool:
        if not member.is_running:
            member.steps_changed_at = time.monotonic()
        return time.monotonic() - member.steps_changed_at > self._stall_timeout_s

    def _end(self, member: Member, cause: str, *, is_own_doing: bool = False) -> Ended:
        replica = member.replica
        assert replica is not None
        # Last words may still be in the channel of a process that is gone.
        events: list[Event] = []
        while heard := replica.channel.receive(0):
            events.extend(heard)
        for event in events:
            update(member, event)
        member.cause = cause if member.failed is None else told_cause(member.failed.cause, replica)
        lifetime_s, was_asked = replica.lifetime_s(), member.is_stopping or is_own_doing
        code, in_flight = replica.process.poll(), tuple(replica.flight.in_flight())
        self._backend.end(replica)
        self._spent = (
            self._spent[0] + member.progress.num_prompt_tokens,
            self._spent[1] + member.progress.num_output_tokens,
        )
        self._stalled_by_disk_s += member.progress.stalled_by_disk_s
        shards, incarnation = tuple(member.shards.values()), replica.launch.incarnation
        was_killed = member.failed.was_killed if member.failed is not None else code in _FROM_OUTSIDE
        verdict = self._judge(member, replica)
        # Anything but the engine's death is no row's doing; nor is that, where lower settings may mend it.
        is_death = not was_asked and (member.failed is None or member.failed.error_type == EngineDeadError.__name__)
        is_death = is_death and (verdict is None or verdict.action == "died")
        flight = in_flight if is_death else ()
        ended = Ended(
            member, incarnation, lifetime_s, shards, tuple(events), member.cause, was_asked, flight, was_killed, verdict
        )
        if verdict is not None:
            member.cause = verdict.words
        self._schedule_restart(member, verdict)
        return ended

    def _judge(self, member: Member, replica: LocalReplica) -> Verdict | None:
        """What becomes of a replica whose memory ran out; None where that is not why it ended."""
        code = replica.process.returncode
        # A process that was killed, or made no step, has not said why; an earlier error in its log is not the cause.
        if self._settings is None or member.is_stopping or (member.failed is None and code in (None, -signal.SIGKILL)):
            return None
        words = [member.cause]
        if member.failed is None or points_elsewhere(member.failed.cause):
            words += log_errors(replica.log, replica.log_start)
        was_up = member.info is not None
        failure = recognise("\n".join(words), was_up=was_up)
        if failure is None:
            return None
        return self._settings.judge(member.slot.replica, replica.launch.incarnation, failure, was_up=was_up)

    def _schedule_restart(self, member: Member, verdict: Verdict | None) -> None:
        starts_lower = verdict is not None and verdict.action == "again"
        is_hopeless = member.failed is not None and member.failed.exit_code == UserError.exit_code
        if verdict is not None:
            is_hopeless = verdict.action == "given up"
        if not starts_lower:
            has_finished_rows = max(member.progress.num_rows, member.closed_rows) > member.recovered_rows
            member.failures = 1 if has_finished_rows else member.failures + 1
            is_hopeless |= member.failures > self._max_restarts
        member.is_given_up = member.is_stopping or is_hopeless
        member.start_at = time.monotonic() + min(_MAX_BACK_OFF_S, _BACK_OFF_S * 2 ** max(0, member.failures - 1))
        member.state = "ended" if member.is_stopping else "given up" if member.is_given_up else "restarting"
        member.restarts += 0 if member.is_given_up else 1
        member.replica = None
        member.progress = NOTHING
        member.shards.clear()
        member.begun.clear()
        member.revoking.clear()

    def excuse(self, member: Member) -> None:
        """The last end of a member was of use: it does not count as a failure to do anything."""
        member.failures -= 1
        if member.is_given_up and member.failures <= self._max_restarts and not member.is_stopping:
            member.is_given_up, member.state = False, "restarting"
            member.restarts += 1
        member.start_at = time.monotonic() + _BACK_OFF_S

    def _cause(self, member: Member) -> str:
        assert member.replica is not None
        code = member.replica.process.returncode
        words = last_error(member.replica.log, member.replica.log_start)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"ended with {how}" + (f"; its log ends: {words}" if words else "")

    def assign(
        self, member: Member, shards: Iterable[Shard], attempts: int, condemned: tuple[tuple[int, str], ...] = ()
    ) -> None:
        """Give shards to a member. condemned: rows of theirs that must not reach an engine, with what to say of it."""
        given = tuple(shards)
        member.shards.update((shard.index, shard) for shard in given)
        self._send(member, Assign(given, attempts, condemned))

    def try_rows(self, member: Member, trial: Trial) -> None:
        """Give a member a trial, and with it the shards."""
        member.shards.update((shard.index, shard) for shard in trial.shards)
        self._send(member, trial)

    def _send(self, member: Member, message: Command) -> None:
        if member.replica is not None:
            member.replica.send(message)

    def revoke(self, member: Member, shards: Iterable[int]) -> None:
        """Ask for shards back; a `Revoked` event says which of them the member had not begun."""
        member.revoking.update(shards)
        self._send(member, Revoke(tuple(sorted(member.revoking))))

    def stop(self, command: Command) -> list[Ended]:
        """Tell every member to stop, and start none again; those whose engine is not up yet are ended at once."""
        ended = []
        for member in self.members:
            member.is_stopping = True
            member.is_given_up = member.replica is None or member.is_given_up
            if member.replica is not None and member.info is None:
                ended.append(self._end(member, "ended before its engine was up"))
            else:
                self._send(member, command)
        return ended

    def kill(self) -> list[Ended]:
        """End every replica at once."""
        live = [member for member in self.members if member.replica is not None]
        return [self._end(member, "ended by the coordinator", is_own_doing=True) for member in live]

    @property
    def num_live(self) -> int:
        """Replicas whose process runs."""
        return sum(member.replica is not None for member in self.members)

    @property
    def is_spent(self) -> bool:
        """Whether every member was given up."""
        return all(member.is_given_up for member in self.members)

    @property
    def stalled_by_disk_s(self) -> float:
        """Seconds, over all replicas since the coordinator started, in which an engine waited for the disk."""
        return round(self._stalled_by_disk_s + sum(member.progress.stalled_by_disk_s for member in self.members), 3)

    def num_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of finished requests since the coordinator started."""
        return (
            self._spent[0] + sum(member.progress.num_prompt_tokens for member in self.members),
            self._spent[1] + sum(member.progress.num_output_tokens for member in self.members),
        )
