"""One replica as a state machine without processes: messages go in, and those that the coordinator acts on come out.

`Fleet` runs the processes; it says what happened and when, and asks what is due. Only this module changes the state of
a replica. Times are in seconds of the monotonic clock, unless they say otherwise.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from batchinf.base.errors import UserError
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.devices import Slot
from batchinf.fleet.memory.engine_settings import Verdict
from batchinf.fleet.status import ReplicaStatus
from batchinf.records import Lease
from batchinf.replica.messages import (
    CONDEMNED,
    Event,
    Failed,
    Key,
    LeaseBegun,
    LeaseDone,
    Progress,
    Ready,
    Revoked,
    StartPhase,
    Stopped,
    Tried,
)
from batchinf.replica.worker import window

_NO_PROGRESS = Progress(
    num_rows=0,
    errors={},
    num_prompt_tokens=0,
    num_output_tokens=0,
    steps=0,
    in_flight=0,
    stalled_by_disk_s=0.0,
    engine=EngineStats(),
)
# How long a replica may take to end after `Failed`, and after `Stopped` while others work. By `Stopped` all its rows
# are stored, and only its engine has to end. Left alone, vLLM took 6 s for one rank on a busy CPU.
_ENDS_AFTER_FAILED_S = 10.0
_ENDS_AFTER_STOPPED_S = 1.0
# Hosts that a replica may lose in a row before it is given up: the nodes of a spot market come and go.
_MOST_HOST_LOSSES = 20
_BACK_OFF_S = 1.0
_MAX_BACK_OFF_S = 30.0
# A report and its answer take up to this long, or two of the engine's steps. What the engine takes in that time may
# wait for it.
_AHEAD_S = 0.25
_AHEAD_STEPS = 2
# The slowest of so many spans between reports counts. Rows of one length end together, and then none for a long time.
_SPANS = 4
# Sums of shares of rows are not exact.
_ROUNDING = 1e-4


def requests_per_row(progress: Progress, of_job: int) -> float:
    """Requests of an input row: `of_job`, or the mean of those finished if rows have their own number."""
    return progress.num_rows / progress.num_inputs if progress.num_inputs else of_job


def finished_inputs(progress: Progress, num_stored: float, of_job: int) -> int:
    """Input rows that an engine has finished. num_stored: those whose results are decoded."""
    return int(num_stored + progress.num_unstored / requests_per_row(progress, of_job) + _ROUNDING)


@dataclass(slots=True)
class IncarnationState:
    """What one incarnation of a replica has said, and what it holds."""

    name: str = ""
    """Empty before the first start."""
    is_live: bool = False
    """It was started and has not ended."""
    info: EngineInfo | None = None
    """Of the engine, once it is up."""
    ready_at: float | None = None
    """When the engine was up, in seconds since 1970; None if it is not."""
    start_activity: object = None
    """What `ReplicaHandle.start_activity` said last."""
    start_moved_at: float = 0.0
    """When the start last made progress, or waited for something else than its engine."""
    progress: Progress = _NO_PROGRESS
    reports: deque[tuple[float, Progress]] = field(default_factory=lambda: deque(maxlen=_SPANS + 1))
    """Its last progress messages and when they came; none at all counts as one, when the engine is up."""
    step_s: float | None = None
    """Seconds that a step takes, by the last two reports; None before the first step."""
    engine_rows: int | None = None
    """Rows that the engine runs, or will run before it can be given more: it gets no more while few are left. None
    before its first step."""
    steps_changed_at: float = 0.0
    """When the engine last made a step or had no request."""
    leases: dict[Key, Lease] = field(default_factory=dict)
    """Oldest first, until they are finished or given back."""
    begun: set[Key] = field(default_factory=set)
    revoking: set[Key] = field(default_factory=set)
    """Leases that the coordinator has asked back."""
    recovered_rows: int = 0
    """Output rows that came from the journal."""
    finished_rows: int = 0
    """Output rows of finished leases."""
    finished_inputs: int = 0
    """Input rows of finished leases."""
    finished_errors: Counter[str] = field(default_factory=Counter)
    """Errors among `finished_rows`, by type."""
    failed: Failed | None = None
    failed_at: float = 0.0
    stopped_at: float | None = None
    no_placement_since: float | None = None
    """Since when no host can hold it; None if one can."""


@dataclass(slots=True)
class FleetReplica:
    """One replica, over all of its incarnations."""

    slot: Slot
    requests_per_row: int
    """If rows have their own number, of a row that says nothing."""
    current: IncarnationState = field(default_factory=IncarnationState)
    """Of the running incarnation; between two of them, of the last one."""
    state: str = "waiting"
    """For people: a phase of the start, `running`, `restarting`, `given up` or `ended`."""
    start_detail: str = ""
    """What a starting engine does, such as `loading weights 57/191`; empty if unknown."""
    host: str = ""
    """Where the last incarnation ran; empty before it has said so."""
    heard_at: float | None = None
    """When the last event came, in seconds since 1970; None before the first."""
    earlier: list[Progress] = field(default_factory=list)
    """The last reports of its earlier incarnations."""
    last_engine: EngineInfo | None = None
    """Of its last engine that was up."""
    ready_at: list[float] = field(default_factory=list)
    """When its engines were up, in seconds of the monotonic clock."""
    failures: int = 0
    """Ends since it last finished a row, without those of lost hosts."""
    host_losses: int = 0
    """Hosts lost since it last finished a row."""
    restarts: int = 0
    start_at: float = 0.0
    """The earliest time of the next start."""
    is_given_up: bool = False
    is_stopping: bool = False
    keeps_engine: bool = False
    """When it stops, its engine stays up for other work."""
    cause: str = ""
    """Why the last incarnation ended."""

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """From 0, in the order of the slots."""
        return self.slot.replica

    @property
    def is_live(self) -> bool:
        """Whether it has an incarnation that was started and has not ended."""
        return self.current.is_live

    @property
    def is_up(self) -> bool:
        """Whether the engine of the current incarnation has been up."""
        return self.current.info is not None

    @property
    def is_running(self) -> bool:
        """Whether its engine is up and takes rows."""
        return self.is_live and self.is_up and self.current.failed is None

    @property
    def is_idle(self) -> bool:
        """Whether it has stopped, and its engine stays up for other work."""
        return self.is_live and self.keeps_engine and self.current.stopped_at is not None

    @property
    def _is_starting(self) -> bool:
        return self.is_live and not self.is_up and self.current.failed is None

    @property
    def num_open_rows(self) -> int:
        """Finished output rows of leases that are not finished, by its latest report."""
        return max(0, self.current.progress.num_rows - self.current.finished_rows)

    @property
    def open_errors(self) -> Counter[str]:
        """Errors among `num_open_rows`, by type."""
        errors = self.current.progress.errors
        return Counter(errors) - self.current.finished_errors if errors else Counter()

    @property
    def outstanding_rows(self) -> int:
        """Rows assigned that its engine has not finished, by its latest report."""
        current = self.current
        finished = finished_inputs(current.progress, self.num_open_inputs, self.requests_per_row)
        held = sum(lease.num_to_run for key, lease in current.leases.items() if key not in current.revoking)
        return max(0, held - finished)

    @property
    def mean_requests(self) -> float:
        """Requests of an input row; if rows have their own number, the mean of those that it has finished."""
        return requests_per_row(self.current.progress, self.requests_per_row)

    @property
    def num_open_inputs(self) -> float:
        """The input rows of `num_open_rows`."""
        num_inputs = self.current.progress.num_inputs
        if num_inputs is None:
            return self.num_open_rows / self.requests_per_row
        return max(0.0, num_inputs - self.current.finished_inputs)

    @property
    def window_rows(self) -> int:
        """Rows that its engine's window holds; 1 before its engine is up."""
        info = self.current.info
        return 1 if info is None else max(1, int(window(info.max_num_seqs) / self.mean_requests))

    @property
    def unbegun(self) -> tuple[Lease, ...]:
        """Leases that can still be taken back, oldest first."""
        current = self.current
        if len(current.begun) == len(current.leases):
            return ()
        fixed = current.begun | current.revoking if current.revoking else current.begun
        return tuple(lease for key, lease in current.leases.items() if key not in fixed)

    @property
    def last_reports(self) -> list[Progress]:
        """The last report of each of its incarnations."""
        return [*self.earlier, self.current.progress]

    def status(self) -> ReplicaStatus:
        """For `status.json`."""
        info = self.current.info
        progress = self.current.progress
        engine = progress.engine
        return ReplicaStatus(
            replica=self.number,
            state=self.state,
            host=self.host,
            start_detail=self.start_detail,
            devices=self.slot.devices,
            device=info.device if info is not None else "",
            in_flight=progress.in_flight,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_cache_usage=engine.kv_cache_usage,
            prefix_cache_hit_rate=(
                engine.prefix_cache_hits / engine.prefix_cache_queries if engine.prefix_cache_queries else None
            ),
            restarts=self.restarts,
            heard_at=self.heard_at,
            num_rows=sum(report.num_answered for report in self.last_reports),
            busy=self._busy,
        )

    @property
    def _busy(self) -> float | None:
        ready_at = self.current.ready_at
        if ready_at is None or self.heard_at is None:
            return None
        return round(min(1.0, self.current.progress.busy_s / max(1e-3, self.heard_at - ready_at)), 3)

    # -- its start and its messages ----------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether it is time to start it."""
        return not (self.is_live or self.is_given_up) and now >= self.start_at

    def start(self, incarnation: str, now: float) -> None:
        """An incarnation was started."""
        self.current = IncarnationState(incarnation, is_live=True, steps_changed_at=now, start_moved_at=now)
        self.state = "starting"

    def hear(self, event: Event, *, now: float, at: float) -> Event | None:
        """Take in a message of the running incarnation. Returns it if the coordinator has to act on it.

        at: when it came, in seconds since 1970. The leases of the message that is returned are those that the
        coordinator has given.
        """
        self.heard_at = round(at, 3)
        current = self.current
        current.start_moved_at = now
        match event:
            case StartPhase(name, host, shortage):
                self.state = name
                self.host = host or self.host
                self.start_detail = ""
                current.no_placement_since = now if shortage else None
                return event if shortage else None
            case Ready(info):
                self.state = "running"
                self.start_detail = ""
                current.info = self.last_engine = info
                current.ready_at = self.heard_at
                self.ready_at.append(now)
                current.reports.append((now, _NO_PROGRESS))
                current.steps_changed_at = now
                return event
            case Progress():
                self._note_progress(event, now)
            case Failed():
                current.failed = event
                current.failed_at = now
            case Stopped():
                self.state = "waiting" if self.keeps_engine else "ended"
                current.stopped_at = now
                return event
            case _:
                return self._hear_about_leases(event)
        return None

    def _note_progress(self, progress: Progress, now: float) -> None:
        current = self.current
        if progress.steps != current.progress.steps or not progress.in_flight:
            current.steps_changed_at = now
        current.progress = progress
        if current.reports:
            self._note_speed(progress, now)

    def _note_speed(self, progress: Progress, now: float) -> None:
        """Estimate from the reports so far how many rows the engine takes."""
        current = self.current
        last_at, last = current.reports[-1]
        if now <= last_at:
            return
        if progress.steps > last.steps:
            current.step_s = (now - last_at) / (progress.steps - last.steps)
        current.reports.append((now, progress))
        if current.step_s is not None and current.info is not None:
            current.engine_rows = self._engine_rows(current.info.max_num_seqs, current.step_s)

    def _engine_rows(self, max_num_seqs: int, step_s: float) -> int:
        """See `IncarnationState`. If requests wait in the engine, the cache is full, and it runs what it runs now."""
        engine = self.current.progress.engine
        num_running = self._num_running(engine)
        runs = num_running if engine.num_waiting else max(1, int(max_num_seqs / self.mean_requests))
        if not engine.num_waiting and num_running and engine.kv_cache_usage:
            runs = min(runs, max(num_running, int(num_running / engine.kv_cache_usage)))
        spans = itertools.pairwise((at, self._num_taken(report)) for at, report in self.current.reports)
        rows_per_s = min((after - before) / (later - earlier) for (earlier, before), (later, after) in spans)
        return runs + int(rows_per_s * max(_AHEAD_S, _AHEAD_STEPS * step_s))

    def _num_taken(self, report: Progress) -> int:
        """Rows that it had finished; with those that ran, if requests wait in it now."""
        num_stored = report.num_rows / self.requests_per_row if report.num_inputs is None else report.num_inputs
        num_finished = finished_inputs(report, num_stored, self.requests_per_row)
        return num_finished + (self._num_running(report.engine) if self.current.progress.engine.num_waiting else 0)

    def _num_running(self, engine: EngineStats) -> int:
        return math.ceil(engine.num_running / self.mean_requests)

    def _hear_about_leases(self, event: Event) -> Event | None:
        current = self.current
        match event:
            case LeaseBegun(key, _, num_recovered_rows):
                current.begun.add(key)
                current.recovered_rows += num_recovered_rows
                return event
            case LeaseDone():
                return self._finish(event)
            case Revoked(leases):
                return Revoked(self.take_back(lease.key for lease in leases))
            case Tried():
                return event
        return None

    def _finish(self, event: LeaseDone) -> LeaseDone | None:
        """Remove a lease that is finished. A message about a lease counts only while the replica holds the lease.

        In the message that is returned, the lease is that of the coordinator, and the part names its replica.
        """
        current = self.current
        if (lease := current.leases.pop(event.lease.key, None)) is None:
            return None
        current.begun.discard(lease.key)
        current.revoking.discard(lease.key)
        current.finished_rows += event.num_rows
        current.finished_inputs += lease.num_to_run
        current.finished_errors.update(event.errors)
        part = event.part and replace(event.part, replica=self.number, incarnation=current.name)
        return replace(event, lease=lease, part=part)

    def note_start_activity(self, activity: object, now: float) -> None:
        """Take in how much the starting incarnation has done so far. None: it waits for something else."""
        if activity is None or activity != self.current.start_activity:
            self.current.start_moved_at = now
        self.current.start_activity = activity

    def note_start_detail(self, detail: str) -> None:
        """What the starting engine does, by its log."""
        self.start_detail = detail

    # -- its leases --------------------------------------------------------------------------------------------------

    def give(self, leases: Iterable[Lease], *, begins_at_once: bool = False) -> None:
        """The replica is given leases."""
        by_key = {lease.key: lease for lease in leases}
        self.current.leases.update(by_key)
        if begins_at_once:
            self.current.begun.update(by_key)

    def ask_back(self, leases: Iterable[Lease]) -> tuple[Key, ...]:
        """The replica is asked for leases. Returns the keys of all that it was asked for and has not answered."""
        self.current.revoking.update(lease.key for lease in leases)
        return tuple(sorted(self.current.revoking))

    def take_back(self, keys: Iterable[Key]) -> tuple[Lease, ...]:
        """Remove leases that the replica has not begun and returns. The replica has answered all earlier questions."""
        keys = tuple(keys)
        current = self.current
        current.begun.difference_update(keys)
        current.revoking.clear()
        return tuple(lease for key in keys if (lease := current.leases.pop(key, None)) is not None)

    # -- its end -----------------------------------------------------------------------------------------------------

    def why_end(self, now: float, *, stall_timeout_s: float, start_timeout_s: float) -> str | None:
        """Why its incarnation has to be ended now; None if it may go on, "" if it takes too long to end by itself."""
        current = self.current
        if current.failed is not None and now - current.failed_at > _ENDS_AFTER_FAILED_S:
            return ""
        if self.is_idle:
            return None
        if current.stopped_at is not None and now - current.stopped_at > _ENDS_AFTER_STOPPED_S:
            return ""
        if self.is_running and now - current.steps_changed_at > stall_timeout_s:
            return f"no step for {stall_timeout_s:g} s (stall_timeout_s)"
        if self._is_starting and now - current.start_moved_at > start_timeout_s:
            doing = f"{self.state} ({self.start_detail})" if self.start_detail else self.state
            return (
                f"its start made no progress for {start_timeout_s:g} s (start_timeout_s): no message, no line in its "
                f"log and nothing read while {doing}"
            )
        return None

    def hear_last(self, events: Iterable[Event], *, now: float, at: float) -> tuple[LeaseDone, ...]:
        """Take in the last messages of an incarnation that has ended. Of its leases, only those with a part count.

        All others run again; what the journal has of them is recovered.
        """
        finished = []
        for event in events:
            match event:
                case Revoked() | LeaseDone(part=None):
                    continue
            if isinstance(heard := self.hear(event, now=now, at=at), LeaseDone):
                finished.append(heard)
        return tuple(finished)

    def end(
        self, cause: str, verdict: Verdict | None, *, now: float, max_restarts: int, was_host_lost: bool = False
    ) -> None:
        """The incarnation has ended: decide whether and when the next one starts. verdict: if memory ran out."""
        self.cause = cause
        is_hopeless = self.current.failed is not None and self.current.failed.exit_code == UserError.exit_code
        if verdict is not None:
            is_hopeless = verdict.action == "given up"
        if verdict is None or verdict.action != "again":
            current = self.current
            num_rows = max(current.progress.num_rows, current.finished_rows)
            # No engine has run these: a broken one must not go on for ever because its rows become error rows.
            num_condemned = max(current.progress.errors.get(CONDEMNED, 0), current.finished_errors[CONDEMNED])
            if num_rows - num_condemned > current.recovered_rows:
                self.failures = self.host_losses = 0
            self.failures += not was_host_lost
            self.host_losses += was_host_lost
            is_hopeless |= self._has_failed_too_often(max_restarts)
        self.is_given_up = self.is_stopping or is_hopeless
        self.start_at = now + min(_MAX_BACK_OFF_S, _BACK_OFF_S * 2 ** max(0, self.failures - 1))
        self.start_detail = ""
        self.state = "ended" if self.is_stopping else "given up" if self.is_given_up else "restarting"
        self.restarts += not self.is_given_up
        self.earlier.append(self.current.progress)
        self.current.is_live = False
        self.current.progress = _NO_PROGRESS
        self.current.leases.clear()
        self.current.begun.clear()
        self.current.revoking.clear()

    def _has_failed_too_often(self, max_restarts: int) -> bool:
        return self.failures > max_restarts or self.host_losses > _MOST_HOST_LOSSES

    def excuse(self, *, now: float, max_restarts: int, was_host_lost: bool = False) -> None:
        """Do not count the last end as a failure, or as the loss of a host."""
        self.failures -= not was_host_lost
        self.host_losses -= was_host_lost
        if self.is_given_up and not self._has_failed_too_often(max_restarts) and not self.is_stopping:
            self.is_given_up = False
            self.state = "restarting"
            self.restarts += 1
        self.start_at = now + _BACK_OFF_S

    def stop(self, *, keeps_engine: bool = False) -> bool:
        """Start it never again. Returns whether it has to be ended at once, because its engine is not up yet."""
        self.keeps_engine = keeps_engine and not self.is_stopping
        self.is_stopping = True
        self.is_given_up = self.is_given_up or not self.is_live
        return self.is_live and not self.is_up
