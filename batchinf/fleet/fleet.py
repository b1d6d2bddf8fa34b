"""Runs all replicas of a job on one backend: starts, watches and ends their processes as `FleetReplica` decides."""

import pathlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass, field

from batchinf.base.errors import EngineDeadError
from batchinf.engines.vllm.start_log import start_detail
from batchinf.fleet.backend import Backend, Ending, ReplicaHandle
from batchinf.fleet.devices import Slot, devices_of
from batchinf.fleet.memory.engine_settings import EngineSettings, Verdict
from batchinf.fleet.memory.out_of_memory import recognise
from batchinf.fleet.replica import FleetReplica
from batchinf.manifest.commit_log import Fields
from batchinf.manifest.names import incarnation_name
from batchinf.records import Lease
from batchinf.replica.messages import (
    STARTING_ENGINE,
    WAITING_FOR_INPUT,
    Assign,
    Command,
    Event,
    Failed,
    InFlightRequest,
    Launch,
    LeaseDone,
    Progress,
    Revoke,
    Stop,
    Trial,
    Work,
)
from batchinf.spec.job import JobSpec

_LOOKS_AT_A_START = 20
OTHER_ARGUMENTS = "the sampling of this retry needs other engine arguments"
_ERROR_LINE = re.compile(r"(?:^|\s)((?:[\w.]+\.)?\w*(?:Error|Exception|Killed)\b: .+)")
_ERROR_LEVEL = re.compile(r"\bERROR\b")
# An error with one of these texts only says that another one is the cause.
_NO_CAUSE = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "See root cause above",
    "EngineCore encountered an issue",
    "See stack trace for root cause",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """An incarnation that has ended. Its leases have to be assigned again."""

    replica: FleetReplica
    incarnation: str
    lifetime_s: float
    cause: str
    was_asked: bool
    leases: tuple[Lease, ...] = ()
    finished: tuple[LeaseDone, ...] = ()
    """Whole shards whose parts its last messages named; they are not among `leases`."""
    failed: Failed | None = None
    """Its last message, if that says why it ended."""
    was_host_lost: bool = False
    """Its rows count as not tried."""
    in_flight: tuple[InFlightRequest, ...] = ()
    """Requests that were in its engine; empty if no row can be the cause."""
    num_unfinished: int = 0
    """All requests that were in its engine when it ended, for any cause."""
    num_open_rows: int = 0
    """Finished output rows of leases that are not finished."""
    step_down: Fields | None = None
    """See `Verdict.step_down`."""


def _row_may_be_the_cause(failed: Failed | None, verdict: Verdict | None) -> bool:
    """Whether a row may have caused the end: the engine died, and lower settings could not prevent that."""
    is_death = failed is None or failed.error_type == EngineDeadError.__name__
    return is_death and (verdict is None or verdict.action == "died")


def cause_of(ending: Ending, failed: Failed | None, handle: ReplicaHandle) -> str:
    """One line on why an incarnation ended. failed: its last message, if it sent one."""
    if failed is not None:
        return full_message(failed.cause, handle)
    error = last_error(handle.log_tail())
    return f"ended with {ending.description}" + (f"; its log ends: {error}" if error else "")


def full_message(message: str, handle: ReplicaHandle) -> str:
    """A replica's error message. If it only points at another error, also that error from its log."""
    error = last_error(handle.log_tail()) if _points_elsewhere(message) else ""
    return f"{message}; its log says: {error}" if error else message


def last_error(log: list[str]) -> str:
    """The last error in a log that does not just point at another one; "" if there is none."""
    errors = (match[1].strip() for line in reversed(log) if (match := _ERROR_LINE.search(line)))
    return next((error for error in errors if not _points_elsewhere(error)), "")


def _points_elsewhere(message: str) -> bool:
    return any(hint in message for hint in _NO_CAUSE)


def _cause_with_log(cause: str, failed: Failed | None, handle: ReplicaHandle) -> str:
    """The cause and, if that only points at another error, the log's errors: the text to search for out of memory."""
    if failed is not None and not _points_elsewhere(failed.cause):
        return cause
    errors = [line for line in handle.log_tail() if _ERROR_LINE.search(line) or _ERROR_LEVEL.search(line)]
    return "\n".join([cause, *errors])


@dataclass(eq=False)
class Fleet:
    """All replicas of a job, on one backend. It owns their handles; `FleetReplica` has the rest of their state."""

    backend: Backend
    slots: InitVar[Iterable[Slot]]
    launch: Callable[[Slot, str], Launch]
    """Makes the message that starts an incarnation, given its slot and its name."""
    _: KW_ONLY
    requests_per_row: InitVar[int]
    epoch: int
    logs: pathlib.Path
    max_restarts: int
    stall_timeout_s: float
    start_timeout_s: float
    settings: EngineSettings
    """The engine arguments that `launch` uses; the fleet lowers them when memory runs out."""
    is_cache_warm: bool
    cache_key: Callable[[], str] | None = None
    """Key of the shared compile cache for engines with the settings of the moment; None on processors."""
    retry: int = 0
    """The number of the retry that the incarnations work for; 0 for none."""
    num_incarnations: int = 0
    """Those that this epoch has started."""
    handles: dict[int, ReplicaHandle] = field(default_factory=dict, init=False)
    """Of the running incarnations, by the number of the replica."""
    work: Work | None = field(default=None, init=False)

    def __post_init__(self, slots: Iterable[Slot], requests_per_row: int) -> None:
        self.replicas = [FleetReplica(slot, requests_per_row) for slot in slots]
        self._next_look_at_starts = 0.0

    # -- starts ------------------------------------------------------------------------------------------------------

    def give_work(self, work: Work) -> None:
        """Send `Work` to the running replicas, and later to each replica when it starts."""
        self.work = work
        for replica in self.replicas:
            self.send(replica, work)

    def start_due(self) -> list[FleetReplica]:
        """Start every replica that is due, and return those.

        If vLLM's compile cache is cold, the first replica fills it. Another one that reads it meanwhile may fail: vLLM
        (0.32 too) writes `vllm_compile_cache.py` in place, and evaluates what it finds of it. Waiting for the first
        replica would take twice as long. So the others compile into their own caches, which are deleted with them.
        """
        due = [replica for replica in self.replicas if replica.is_due(time.monotonic())]
        for replica in due:
            self._start(replica)
        return due

    def _start(self, replica: FleetReplica) -> None:
        self.num_incarnations += 1
        incarnation = incarnation_name(self.epoch, self.num_incarnations, self.retry)
        # Engines that share a device start one after the other, so they can fill the same cache.
        neighbours = replica.slot.devices if replica.slot.sharers > 1 else None
        is_filled = any(
            not handle.has_own_cache and self.replicas[number].slot.devices != neighbours
            for number, handle in self.handles.items()
        )
        handle = self.backend.start(
            self.launch(replica.slot, incarnation),
            replica.slot,
            self.logs / f"replica-{replica.number}.log",
            has_own_cache=is_filled and not self.is_cache_warm,
        )
        self.handles[replica.number] = handle
        replica.start(incarnation, time.monotonic())
        if self.work is not None:
            handle.send(self.work)

    def turn_to(self, launch: Callable[[Slot, str], Launch], spec: JobSpec, retry: int, work: Work) -> list[Ended]:
        """Turn to the rows of a retry, with new replicas. Engines that are up and wait go on, unless theirs differ.

        spec: with the retry's sampling, as `launch` has it. Returns the ends of all incarnations so far.
        """
        ended = self.kill(but_idle=True)
        unlike = [number for number, handle in self.handles.items() if not self.settings.fits(handle.incarnation, spec)]
        ended += self._end_all(dict.fromkeys(unlike, OTHER_ARGUMENTS), is_asked=True)
        self.launch = launch
        self.retry = retry
        self.work = work
        before = self.replicas
        self.replicas = [FleetReplica(replica.slot, replica.requests_per_row) for replica in before]
        return ended + [self._renew(before[number], handle) for number, handle in self.handles.items()]

    def _renew(self, before: FleetReplica, handle: ReplicaHandle) -> Ended:
        """Let an engine that is up work under another name. Returns the end of the incarnation before."""
        replica = self.replicas[before.number]
        self.num_incarnations += 1
        incarnation = handle.incarnation
        launch = self.launch(replica.slot, incarnation_name(self.epoch, self.num_incarnations, self.retry))
        self.settings.rename(incarnation, launch.incarnation)
        lifetime_s = handle.renew(launch)
        replica.start(launch.incarnation, time.monotonic())
        assert self.work is not None
        handle.send(self.work)
        return Ended(
            replica=before,
            incarnation=incarnation,
            lifetime_s=lifetime_s,
            cause="its engine stays up for a retry",
            was_asked=True,
        )

    def note_cache_warm(self) -> None:
        """Remember for later jobs that an engine of this fleet has compiled to the shared cache."""
        if self.cache_key is not None and self.is_cache_warm:
            self.backend.note_cache_warm(self.cache_key())

    def look_at_starts(self) -> None:
        """Read from the logs of starting replicas what their engines are doing."""
        for number, handle in self.handles.items():
            if self.replicas[number].state == STARTING_ENGINE:
                self.replicas[number].note_start_detail(start_detail(handle.log_tail()))

    # -- messages ----------------------------------------------------------------------------------------------------

    def poll(self, wait_s: float) -> list[tuple[FleetReplica, Event | None]]:
        """One item for each message of a replica, after at most `wait_s` seconds; see `FleetReplica.hear`."""
        by_handle = {id(handle): self.replicas[number] for number, handle in self.handles.items()}
        heard = []
        for handle, event in self.backend.poll(wait_s):
            replica = by_handle.get(id(handle))
            if replica is not None:
                heard.append((replica, replica.hear(event, now=time.monotonic(), at=time.time())))
                self.is_cache_warm |= replica.is_up and not handle.has_own_cache
        return heard

    def send(self, replica: FleetReplica, message: Command) -> None:
        """Send a message to a replica, if it runs."""
        if (handle := self.handles.get(replica.number)) is not None:
            handle.send(message)

    def give(self, replica: FleetReplica, message: Assign | Trial) -> None:
        """Give a replica leases, or a trial with its leases."""
        replica.give(message.leases, begins_at_once=isinstance(message, Trial))
        self.send(replica, message)

    def revoke(self, replica: FleetReplica, leases: Iterable[Lease]) -> None:
        """Ask for leases back. `Revoked` says which ones the replica had not begun."""
        self.send(replica, Revoke(replica.ask_back(leases)))

    # -- ends --------------------------------------------------------------------------------------------------------

    def reap(self) -> list[Ended]:
        """End the replicas that have died or made no step for too long; and all of them once all rows are stored."""
        self._note_start_activities(time.monotonic())
        live = self._live
        are_done = all(replica.current.stopped_at is not None for replica in live)
        now = time.monotonic()
        causes: dict[int, str] = {}
        for replica in live:
            cause = replica.why_end(now, stall_timeout_s=self.stall_timeout_s, start_timeout_s=self.start_timeout_s)
            if (are_done and not replica.is_idle) or self.handles[replica.number].has_ended():
                cause = ""
            if cause is not None:
                causes[replica.number] = cause
        return self._end_all(causes)

    def _note_start_activities(self, now: float) -> None:
        """Note what the starting replicas have done, a few times in `start_timeout_s`: it reads much of /proc."""
        if now < self._next_look_at_starts:
            return
        self._next_look_at_starts = now + self.start_timeout_s / _LOOKS_AT_A_START
        starting = [self.replicas[number] for number in self.handles if not self.replicas[number].is_up]
        activities = {replica.number: self.handles[replica.number].start_activity() for replica in starting}
        for replica in starting:
            activity: object = activities[replica.number]
            if self.work is None and replica.state == WAITING_FOR_INPUT:
                activity = None
            elif replica.slot.sharers > 1:
                # Engines that share a device start one after the other.
                neighbours = [other for other in starting if other.slot.devices == replica.slot.devices]
                activity = [activities[other.number] for other in neighbours]
            replica.note_start_activity(activity, now)

    def stop(self, command: Stop) -> list[Ended]:
        """Tell every replica to stop, and restart none. Replicas whose engine is not up yet are ended at once."""
        ended = []
        for replica in self.replicas:
            if replica.stop(keeps_engine=command.keeps_engine):
                ended.append(self._end(replica, "ended before its engine was up"))
            else:
                self.send(replica, command)
        return ended

    def kill(self, *, but_idle: bool = False) -> list[Ended]:
        """End every replica at once. but_idle: those whose engines are up and wait for other work go on."""
        kept = self._idle if but_idle else set()
        numbers = [number for number in self.handles if number not in kept]
        return self._end_all(dict.fromkeys(numbers, "ended by the coordinator"), is_asked=True)

    def _end_all(self, causes: dict[int, str], *, is_asked: bool = False) -> list[Ended]:
        """End replicas, by number. They end at the same time: a device needs up to a second until it is free."""
        for number in causes:
            self.handles[number].begin_end()
        return [self._end(self.replicas[number], cause, is_asked=is_asked) for number, cause in causes.items()]

    def _end(self, replica: FleetReplica, cause: str, *, is_asked: bool = False) -> Ended:
        """End an incarnation. cause: why the coordinator ends it; "" if it ended by itself."""
        handle = self.handles[replica.number]
        was_asked = replica.is_stopping or is_asked
        ending = handle.end()
        finished = replica.hear_last(ending.events, now=time.monotonic(), at=time.time())
        failed = replica.current.failed
        if failed is not None or not cause:
            cause = cause_of(ending, failed, handle)
        verdict = self._judge(replica, cause, handle, ending)
        may_be_row = not was_asked and _row_may_be_the_cause(failed, verdict)
        ended = Ended(
            replica=replica,
            incarnation=handle.incarnation,
            lifetime_s=ending.lifetime_s,
            leases=tuple(replica.current.leases.values()),
            finished=finished,
            cause=cause,
            failed=failed,
            was_asked=was_asked,
            was_host_lost=ending.ended_by == "host",
            in_flight=ending.in_flight if may_be_row else (),
            num_unfinished=len(ending.in_flight),
            num_open_rows=replica.num_open_rows,
            step_down=None if verdict is None else verdict.step_down,
        )
        told = cause if verdict is None else verdict.words
        replica.end(
            told,
            verdict,
            now=time.monotonic(),
            max_restarts=self.max_restarts,
            was_host_lost=ended.was_host_lost,
        )
        del self.handles[replica.number]
        return ended

    def _judge(self, replica: FleetReplica, cause: str, handle: ReplicaHandle, ending: Ending) -> Verdict | None:
        """What happens to a replica that ran out of memory; None if it ended for another reason."""
        failed = replica.current.failed
        # If a replica was killed or made no step, an earlier error in its log is not the cause.
        is_explained = failed is not None or ending.ended_by == "itself"
        if replica.is_stopping or not is_explained:
            return None
        failure = recognise(_cause_with_log(cause, failed, handle), was_up=replica.is_up)
        if failure is None:
            return None
        return self.settings.judge(replica.number, handle.incarnation, failure, was_up=replica.is_up)

    def excuse(self, end: Ended) -> None:
        """Do not count the end of a replica as a failure, because the search for a killing row made progress."""
        now = time.monotonic()
        end.replica.excuse(now=now, max_restarts=self.max_restarts, was_host_lost=end.was_host_lost)

    # -- all of them -------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[str]:
        """The devices of all replicas, each once; empty on processors."""
        return devices_of(replica.slot for replica in self.replicas)

    @property
    def _live(self) -> list[FleetReplica]:
        return [replica for replica in self.replicas if replica.is_live]

    @property
    def _idle(self) -> set[int]:
        """The replicas whose engines wait for other work."""
        idle = (replica.number for replica in self._live if replica.is_idle)
        return {number for number in idle if not self.handles[number].has_ended()}

    @property
    def num_working(self) -> int:
        """Replicas with a running incarnation, without those whose engines wait for other work."""
        return len(self.handles) - len(self._idle)

    @property
    def is_spent(self) -> bool:
        """Whether every replica was given up."""
        return all(replica.is_given_up for replica in self.replicas)

    def no_placement_s(self, now: float) -> float | None:
        """How long no host could hold any replica that is not given up; None if a replica runs or may start."""
        since = [
            replica.current.no_placement_since if replica.is_live else None
            for replica in self.replicas
            if not replica.is_given_up
        ]
        known = [at for at in since if at is not None]
        return now - max(known) if known and len(known) == len(since) else None

    @property
    def last_reports(self) -> list[Progress]:
        """The last report of each incarnation since the coordinator started."""
        return [report for replica in self.replicas for report in replica.last_reports]
