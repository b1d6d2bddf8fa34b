"""Manages all replicas of a job: starts, watches, restarts and gives them up, and knows the leases of each."""

import pathlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from batchinf.base.errors import EngineDeadError, UserError
from batchinf.engines.vllm.start_log import start_detail
from batchinf.fleet.backend import Backend, Ending, ReplicaHandle
from batchinf.fleet.devices import Slot
from batchinf.fleet.intake import Intake, Report
from batchinf.fleet.out_of_memory import EngineSettings, Lowered, Verdict, recognise
from batchinf.fleet.status import ReplicaStatus, Totals
from batchinf.manifest.names import incarnation_name
from batchinf.records import EngineInfo, EngineStats, Lease
from batchinf.replica import messages
from batchinf.replica.messages import (
    Assign,
    Command,
    Event,
    Failed,
    InFlightRequest,
    Launch,
    Progress,
    Ready,
    Revoke,
    Trial,
    Work,
)
from batchinf.replica.worker import window

_ERROR_LINE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception|Killed)\b: .+)")
_ERROR_LEVEL = re.compile(r"\bERROR\b")
_NO_CAUSE = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "See root cause above",
    "EngineCore encountered an issue",
    "See stack trace for root cause",
)


def points_elsewhere(words: str) -> bool:
    """Whether an error only says that another one is the cause."""
    return any(hint in words for hint in _NO_CAUSE)


def full_message(words: str, handle: ReplicaHandle) -> str:
    """A replica's error message. If it only points at another error, also that error from its log."""
    found = last_error(handle.log_tail()) if points_elsewhere(words) else ""
    return f"{words}; its log says: {found}" if found else words


def cause_of(ending: Ending, failed: Failed | None, handle: ReplicaHandle) -> str:
    """One line on why an incarnation ended. failed: its last message, if it sent one."""
    if failed is not None:
        return full_message(failed.cause, handle)
    words = last_error(handle.log_tail())
    return f"ended with {ending.description}" + (f"; its log ends: {words}" if words else "")


def cause_with_log(cause: str, failed: Failed | None, handle: ReplicaHandle) -> str:
    """The cause and, if that only points at another error, the log's errors: the text to search for out of memory."""
    if failed is not None and not points_elsewhere(failed.cause):
        return cause
    return "\n".join([cause, *error_lines(handle.log_tail())])


def last_error(log: list[str]) -> str:
    """The last error in a log that does not just point at another one; "" if there is none."""
    found = [match.group(1).strip() for line in log if (match := _ERROR_LINE.search(line))]
    telling = [line for line in found if not points_elsewhere(line)]
    return telling[-1] if telling else ""


def error_lines(log: list[str]) -> list[str]:
    """All lines of a log that name an error, or are logged as one."""
    return [line for line in log if _ERROR_LINE.search(line) or _ERROR_LEVEL.search(line)]


# How long a replica may take to end after its `Failed` message, and after `Stopped` while others work. By `Stopped` all
# its rows are stored, and only its engine has to end. Left alone, vLLM took 6 s for one rank on a busy CPU.
_LAST_WORDS_S, _ENGINE_ENDS_S = 10.0, 1.0
Key = tuple[int, int]  # of a lease
NOTHING = Progress(0, {}, 0, 0, 0, 0, 0.0, EngineStats())


@dataclass(slots=True)
class FleetReplica:
    """One replica, over all of its incarnations.

    handle: of the running incarnation, if there is one.
    leases: of the running incarnation, by key, oldest first, until they are stored or closed. begun, revoking: keys.
    early_window: the expected window of an engine that is not up yet, if the replica prepares leases for it.
    intake: of the engine that is up.
    failures: ends since it last finished a row. recovered_rows: output rows from the journal.
    host: where its last incarnation ran; "" before it has said so. heard_at: when its last event came, in seconds since
    1970; None before the first. ready_at: when its engine was up; None if it is not. answered_before: output rows that
    the engines of earlier incarnations answered.
    cause: why the last incarnation ended. closed_errors: of its stored and closed leases, by type. start_detail: what
    its engine is doing while it starts; empty if unknown.
    """

    slot: Slot
    requests_per_row: int
    handle: ReplicaHandle | None = None
    state: str = "waiting"
    leases: dict[Key, Lease] = field(default_factory=dict)
    begun: set[Key] = field(default_factory=set)
    revoking: set[Key] = field(default_factory=set)
    info: EngineInfo | None = None
    early_window: int | None = None
    intake: Intake | None = None
    progress: Progress = NOTHING
    recovered_rows: int = 0
    closed_rows: int = 0
    closed_errors: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    restarts: int = 0
    start_at: float = 0.0
    is_given_up: bool = False
    is_stopping: bool = False
    failed: Failed | None = None
    failed_at: float = 0.0
    stopped_at: float | None = None
    cause: str = ""
    host: str = ""
    heard_at: float | None = None
    ready_at: float | None = None
    answered_before: int = 0
    start_detail: str = ""
    steps_changed_at: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        """From 0, in the order of the slots."""
        return self.slot.replica

    @property
    def is_running(self) -> bool:
        """Whether its engine is up and takes rows."""
        return self.handle is not None and self.info is not None and self.failed is None

    @property
    def takes_leases(self) -> bool:
        """Whether it can use leases: its engine is up, or its feeder prepares them already."""
        return self.is_running or (self.handle is not None and self.failed is None and self.early_window is not None)

    @property
    def num_open_rows(self) -> int:
        """Finished output rows of leases that are neither stored nor closed, by its latest report."""
        return max(0, self.progress.num_rows - self.closed_rows)

    @property
    def outstanding_rows(self) -> int:
        """Rows assigned that its engine has not finished, by its latest report."""
        finished = self.num_open_rows + self.progress.num_unstored
        held = sum(lease.num_to_run for key, lease in self.leases.items() if key not in self.revoking)
        return max(0, held - finished // self.requests_per_row)

    @property
    def window_rows(self) -> int:
        """Rows that its engine's window holds."""
        requests = window(self.info.max_num_seqs) if self.info is not None else self.early_window or 1
        return max(1, requests // self.requests_per_row)

    @property
    def unbegun(self) -> tuple[Lease, ...]:
        """Leases that can still be taken back, oldest first."""
        return tuple(lease for key, lease in self.leases.items() if key not in self.begun and key not in self.revoking)

    @property
    def totals(self) -> Totals:
        """Totals of its running incarnation."""
        progress = self.progress
        return Totals(progress.num_answered, progress.num_prompt_tokens, progress.num_output_tokens)

    @property
    def _up_s(self) -> float:
        """Time between its engine's start and its latest report, in seconds."""
        if self.ready_at is None or self.heard_at is None:
            return 1e-3
        return max(1e-3, self.heard_at - self.ready_at)

    def status(self) -> ReplicaStatus:
        """For `status.json`."""
        engine = self.progress.engine
        return ReplicaStatus(
            self.number,
            self.state,
            self.host,
            self.start_detail,
            self.slot.devices,
            self.info.device if self.info is not None else "",
            self.progress.in_flight,
            engine.num_running,
            engine.num_waiting,
            engine.kv_cache_usage,
            engine.prefix_cache_hits / engine.prefix_cache_queries if engine.prefix_cache_queries else None,
            self.restarts,
            self.heard_at,
            self.answered_before + self.progress.num_answered,
            None if self.ready_at is None else round(min(1.0, self.progress.busy_s / self._up_s), 3),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """An incarnation that has ended. Its leases have to be assigned again, unless its last events close them.

    in_flight: requests that were in its engine; empty if no row can be the cause. num_unfinished: all of them, whatever
    the cause. num_open_rows: finished output rows of leases that are neither stored nor closed. was_killed: from
    outside, as far as known. was_host_lost: its host was lost; its rows count as not tried.
    out_of_memory: what happens to its replica if memory ran out, else None.
    """

    replica: FleetReplica
    incarnation: str
    lifetime_s: float
    leases: tuple[Lease, ...]
    events: tuple[Event, ...]
    cause: str
    was_asked: bool
    in_flight: tuple[InFlightRequest, ...]
    num_unfinished: int
    num_open_rows: int
    was_killed: bool
    out_of_memory: Verdict | None
    was_host_lost: bool = False

    @property
    def lowered(self) -> Lowered | None:
        """The step down after its end, if there was one."""
        return None if self.out_of_memory is None else self.out_of_memory.step


def update(replica: FleetReplica, event: Event) -> None:
    """Update a replica with an event that it sent."""
    replica.heard_at = round(time.time(), 3)
    match event:
        case messages.StartPhase(name, host):
            replica.state, replica.host, replica.start_detail = name, host or replica.host, ""
        case messages.TakesLeases(size):
            replica.early_window = size
        case Ready(engine, _):
            replica.info, replica.state, replica.start_detail = engine, "running", ""
            replica.steps_changed_at, replica.ready_at = time.monotonic(), replica.heard_at
            replica.intake = Intake(max(1, engine.max_num_seqs // replica.requests_per_row), time.monotonic())
        case Progress():
            if event.steps != replica.progress.steps or not event.in_flight:
                replica.steps_changed_at = time.monotonic()
            replica.progress = event
            _note_report(replica)
        case messages.LeaseBegun(lease, _, num_recovered_rows, _):
            replica.begun.add(lease)
            replica.recovered_rows += num_recovered_rows
        case messages.Revoked(leases):
            replica.begun.difference_update(leases)
        case Failed():
            replica.failed, replica.failed_at = event, time.monotonic()
        case messages.Stopped():
            replica.state, replica.stopped_at = "ended", time.monotonic()


def _note_report(replica: FleetReplica) -> None:
    if replica.intake is not None:
        progress, per_row = replica.progress, replica.requests_per_row
        engine = progress.engine
        running, waiting = -(-engine.num_running // per_row), -(-engine.num_waiting // per_row)
        num_rows = (progress.num_rows + progress.num_unstored) // per_row
        usage = engine.kv_cache_usage
        replica.intake.note(Report(time.monotonic(), progress.steps, num_rows, running, waiting, usage))


def is_overdue(replica: FleetReplica) -> bool:
    """Whether a replica takes too long to end after its last message."""
    now, stopped_at = time.monotonic(), replica.stopped_at
    has_failed_long = replica.failed is not None and now - replica.failed_at > _LAST_WORDS_S
    return has_failed_long or (stopped_at is not None and now - stopped_at > _ENGINE_ENDS_S)


def _row_may_be_the_cause(failed: Failed | None, verdict: Verdict | None) -> bool:
    """Whether a row may have caused the end: the engine died, and lower settings could not prevent that."""
    is_death = failed is None or failed.error_type == EngineDeadError.__name__
    return is_death and (verdict is None or verdict.action == "died")


def _begin_ends(replicas: Iterable[FleetReplica]) -> None:
    """Let all replicas end at the same time: a device needs up to a second until it is free."""
    for replica in replicas:
        if replica.handle is not None:
            replica.handle.begin_end()


_BACK_OFF_S = 1.0
_MAX_BACK_OFF_S = 30.0


class Fleet:
    """All replicas of a job, on one backend."""

    def __init__(
        self,
        backend: Backend,
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
        num_before: int = 0,
    ) -> None:
        """launch: makes the message that starts an incarnation, given its slot and its name.

        settings: the engine arguments that `launch` uses; the fleet lowers them when memory runs out.
        retry: the number of the retry that the incarnations work for; 0 for none.
        num_before: incarnations that this epoch has already started for it.
        """
        self.replicas = [FleetReplica(slot, requests_per_row) for slot in slots]
        self.requests_per_row = requests_per_row
        self._launch = launch
        self._work: Work | None = None
        self._epoch = epoch
        self._retry = retry
        self._logs = logs
        self._max_restarts = max_restarts
        self.stall_timeout_s = stall_timeout_s
        self.is_cache_warm = is_cache_warm
        self._settings = settings
        self.backend = backend
        self.num_incarnations = num_before
        self._spent = Totals()
        self._stalled_by_disk_s = 0.0

    def give_work(self, work: Work) -> None:
        """Send `Work` to the running replicas, and later to each replica when it starts."""
        self._work = work
        for replica in self.replicas:
            self._send(replica, work)

    def start_due(self) -> list[FleetReplica]:
        """Start every replica that is due, and return those.

        If vLLM's compile cache is cold, the first replica fills it. vLLM is not made for several writers of one cache,
        and waiting for the first replica would take twice as long. So the others compile into their own caches, which
        are deleted with them.
        """
        started: list[FleetReplica] = []
        for replica in self.replicas:
            if replica.handle is None and not replica.is_given_up and time.monotonic() >= replica.start_at:
                self._start(replica)
                started.append(replica)
        return started

    def _start(self, replica: FleetReplica) -> None:
        self.num_incarnations += 1
        incarnation = incarnation_name(self._epoch, self.num_incarnations, self._retry)
        # Engines that share a device start one after the other, so they can fill the same cache.
        neighbours = replica.slot.devices if replica.slot.sharers > 1 else None
        is_filled = any(
            other.handle is not None and not other.handle.has_own_cache and other.slot.devices != neighbours
            for other in self.replicas
        )
        replica.handle = self.backend.start(
            self._launch(replica.slot, incarnation),
            replica.slot,
            self._logs / f"replica-{replica.number}.log",
            has_own_cache=is_filled and not self.is_cache_warm,
        )
        if self._work is not None:
            replica.handle.send(self._work)
        replica.state, replica.info, replica.failed, replica.early_window = "starting", None, None, None
        replica.intake = replica.ready_at = None
        replica.stopped_at = None
        replica.progress, replica.recovered_rows, replica.closed_rows = NOTHING, 0, 0
        replica.closed_errors = Counter()
        replica.steps_changed_at = time.monotonic()

    def poll(self, wait_s: float) -> list[tuple[FleetReplica, Event]]:
        """Events of replicas, after at most `wait_s` seconds. The replicas are updated with them."""
        by_handle = {id(replica.handle): replica for replica in self.replicas if replica.handle is not None}
        events = []
        for handle, event in self.backend.poll(wait_s):
            replica = by_handle.get(id(handle))
            if replica is not None:
                update(replica, event)
                self.is_cache_warm |= replica.info is not None and not handle.has_own_cache
                events.append((replica, event))
        return events

    def look_at_starts(self) -> None:
        """Read from the logs of starting replicas what their engines are doing."""
        for replica in self.replicas:
            if replica.handle is not None and replica.state == messages.STARTING_ENGINE:
                replica.start_detail = start_detail(replica.handle.log_tail())

    def reap(self) -> list[Ended]:
        """End the replicas that have died or made no step for too long, with everything that they started.

        Once all have stored their rows, it ends them too, because nothing has to be read or written any more.
        """
        live, causes = self._live, dict[int, str]()
        are_done = all(replica.stopped_at is not None for replica in live)
        for replica in live:
            assert replica.handle is not None
            if are_done or replica.handle.has_ended() or is_overdue(replica):
                causes[replica.number] = ""
            elif self._is_stalled(replica):
                causes[replica.number] = f"no step for {self.stall_timeout_s:g} s (stall_timeout_s)"
        ending = [replica for replica in live if replica.number in causes]
        _begin_ends(ending)
        return [self._end(replica, causes[replica.number]) for replica in ending]

    def _is_stalled(self, replica: FleetReplica) -> bool:
        if not replica.is_running:
            replica.steps_changed_at = time.monotonic()
        return time.monotonic() - replica.steps_changed_at > self.stall_timeout_s

    def _end(self, replica: FleetReplica, cause: str = "", *, is_own_doing: bool = False) -> Ended:
        """End an incarnation. cause: why the coordinator ends it, if it did not end by itself."""
        handle, was_asked = replica.handle, replica.is_stopping or is_own_doing
        assert handle is not None
        ending = handle.end()
        for event in ending.events:
            update(replica, event)
        failed = replica.failed
        replica.cause = cause if cause and failed is None else cause_of(ending, failed, handle)
        self._count_spent(replica)
        num_open_rows = replica.num_open_rows
        verdict = self._judge(replica, handle, ending)
        ended = Ended(
            replica,
            handle.incarnation,
            ending.lifetime_s,
            tuple(replica.leases.values()),
            ending.events,
            replica.cause,
            was_asked,
            ending.in_flight if not was_asked and _row_may_be_the_cause(failed, verdict) else (),
            len(ending.in_flight),
            num_open_rows,
            failed.was_killed if failed is not None else ending.ended_by in ("outside", "host"),
            verdict,
            ending.ended_by == "host",
        )
        if verdict is not None:
            replica.cause = verdict.words
        self._schedule_restart(replica, verdict)
        return ended

    def _count_spent(self, replica: FleetReplica) -> None:
        replica.answered_before += replica.progress.num_answered
        self._spent += replica.totals
        self._stalled_by_disk_s += replica.progress.stalled_by_disk_s

    def _judge(self, replica: FleetReplica, handle: ReplicaHandle, ending: Ending) -> Verdict | None:
        """What happens to a replica that ran out of memory; None if it ended for another reason."""
        # If a replica was killed or made no step, an earlier error in its log is not the cause.
        is_explained = replica.failed is not None or ending.ended_by == "itself"
        if self._settings is None or replica.is_stopping or not is_explained:
            return None
        was_up = replica.info is not None
        failure = recognise(cause_with_log(replica.cause, replica.failed, handle), was_up=was_up)
        if failure is None:
            return None
        return self._settings.judge(replica.number, handle.incarnation, failure, was_up=was_up)

    def _schedule_restart(self, replica: FleetReplica, verdict: Verdict | None) -> None:
        starts_lower = verdict is not None and verdict.action == "again"
        is_hopeless = replica.failed is not None and replica.failed.exit_code == UserError.exit_code
        if verdict is not None:
            is_hopeless = verdict.action == "given up"
        if not starts_lower:
            has_finished_rows = max(replica.progress.num_rows, replica.closed_rows) > replica.recovered_rows
            replica.failures = 1 if has_finished_rows else replica.failures + 1
            is_hopeless |= replica.failures > self._max_restarts
        replica.is_given_up = replica.is_stopping or is_hopeless
        replica.start_at = time.monotonic() + min(_MAX_BACK_OFF_S, _BACK_OFF_S * 2 ** max(0, replica.failures - 1))
        replica.start_detail = ""
        replica.state = "ended" if replica.is_stopping else "given up" if replica.is_given_up else "restarting"
        replica.restarts += 0 if replica.is_given_up else 1
        replica.handle = None
        replica.progress = NOTHING
        replica.leases.clear()
        replica.begun.clear()
        replica.revoking.clear()

    def excuse(self, replica: FleetReplica) -> None:
        """Do not count the last end of a replica as a failure, because the search for a killing row made progress."""
        replica.failures -= 1
        if replica.is_given_up and replica.failures <= self._max_restarts and not replica.is_stopping:
            replica.is_given_up, replica.state = False, "restarting"
            replica.restarts += 1
        replica.start_at = time.monotonic() + _BACK_OFF_S

    def assign(
        self,
        replica: FleetReplica,
        leases: Iterable[Lease],
        condemned: tuple[tuple[int, str], ...] = (),
        *,
        progress_s: float = 1.0,
    ) -> None:
        """Give leases to a replica. condemned: their rows that must not reach an engine, with error messages.

        progress_s: see `Assign`.
        """
        given = tuple(leases)
        replica.leases.update((lease.key, lease) for lease in given)
        self._send(replica, Assign(given, condemned, progress_s))

    def try_rows(self, replica: FleetReplica, trial: Trial) -> None:
        """Give a replica a trial with its leases."""
        replica.leases.update((lease.key, lease) for lease in trial.leases)
        self._send(replica, trial)

    def _send(self, replica: FleetReplica, message: Command) -> None:
        if replica.handle is not None:
            replica.handle.send(message)

    def revoke(self, replica: FleetReplica, leases: Iterable[Lease]) -> None:
        """Ask for leases back. A `Revoked` event says which ones the replica had not begun."""
        replica.revoking.update(lease.key for lease in leases)
        self._send(replica, Revoke(tuple(sorted(replica.revoking))))

    def stop(self, command: Command) -> list[Ended]:
        """Tell every replica to stop, and restart none. Replicas whose engine is not up yet are ended at once."""
        ended = []
        for replica in self.replicas:
            replica.is_stopping = True
            replica.is_given_up = replica.handle is None or replica.is_given_up
            if replica.handle is not None and replica.info is None:
                ended.append(self._end(replica, "ended before its engine was up"))
            else:
                self._send(replica, command)
        return ended

    def kill(self) -> list[Ended]:
        """End every replica at once."""
        live = self._live
        _begin_ends(live)
        return [self._end(replica, "ended by the coordinator", is_own_doing=True) for replica in live]

    @property
    def _live(self) -> list[FleetReplica]:
        return [replica for replica in self.replicas if replica.handle is not None]

    @property
    def num_live(self) -> int:
        """Replicas with a running incarnation."""
        return len(self._live)

    @property
    def is_spent(self) -> bool:
        """Whether every replica was given up."""
        return all(replica.is_given_up for replica in self.replicas)

    @property
    def stalled_by_disk_s(self) -> float:
        """Seconds in which engines waited for the disk, over all replicas since the coordinator started."""
        return round(self._stalled_by_disk_s + sum(replica.progress.stalled_by_disk_s for replica in self.replicas), 3)

    @property
    def totals(self) -> Totals:
        """Totals of all incarnations since the coordinator started."""
        return sum((replica.totals for replica in self.replicas), self._spent)
