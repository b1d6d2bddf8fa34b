"""The coordinator's loop, in one thread: assigns leases, supervises replicas, commits and publishes parts."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinf.base import faults
from batchinf.base.bucket import StoreError
from batchinf.base.errors import (
    BatchinfError,
    DriftError,
    EngineStartError,
    HopelessJob,
    Interrupted,
    OutputError,
    UserError,
    address_limit,
)
from batchinf.base.process import without_long_collections
from batchinf.base.stop_signals import ENDING_S, StopRequests, on_stop_signals
from batchinf.base.text import counted, list_names
from batchinf.coordinator.epoch import Epoch
from batchinf.coordinator.publishing import publish
from batchinf.coordinator.row_count import RowCount
from batchinf.fleet.devices import platform_warning
from batchinf.fleet.fleet import Ended, Fleet
from batchinf.fleet.launch import note_end, start_due
from batchinf.fleet.replica import FleetReplica
from batchinf.fleet.sharing.assignment import Assignment
from batchinf.fleet.sharing.quarantine import Quarantine
from batchinf.fleet.status import ON_TRIAL, JobStatus, Rates, ReplicaLook, Telemetry, write_status
from batchinf.job.job import Job
from batchinf.manifest.lines import Lowered, Platform, Retry
from batchinf.manifest.names import staged_file
from batchinf.manifest.state import State
from batchinf.output.journal import drop, num_results
from batchinf.output.replace import check_replaced, other_images_note
from batchinf.records import Part
from batchinf.replica.messages import (
    DISK_ERROR,
    Event,
    LeaseBegun,
    LeaseDone,
    Ready,
    Revoked,
    StartPhase,
    Stop,
    Stopped,
    Tried,
)
from batchinf.schedule.leases import PendingRows
from batchinf.schedule.shards import shard_at, total_shards

_POLL_S = 0.2
_STATUS_EVERY_S = 1.0
_ROUND_PAUSE = 5.0  # between two looks at all replicas, as a multiple of the time that a look takes
_LONGEST_PAUSE_S = 0.2  # because a look that ends a replica takes long
# Messages are gathered for so many seconds a replica: with 1,000 replicas for 10 ms, so that about ten share a commit.
_GATHER_S = 1e-5
# What a bucket has of a stop's time: the last of it is for the lock and the status. If the replicas took all of it,
# there is a little more: those who stop a job kill it 30 s after SIGTERM.
_LAST_STORE_S = 3.0
_LEAST_STORE_S = 1.5
_MOST_LINES = 8  # of replicas that come up at once
# The error rate is checked once, after FIRST_ROWS rows, unless `max_error_rate` allows a share of HOPELESS_RATE.
FIRST_ROWS = 1000
HOPELESS_RATE = 0.5
# Errors of a replica that no restart mends.
_FATAL: dict[str, type[UserError]] = {DISK_ERROR: OutputError, DriftError.__name__: DriftError}


@dataclass(kw_only=True, eq=False)
class Coordinator:
    """Runs the rest of a job or of a retry. Its manifest is open, its folder is locked, and leftovers are recovered."""

    epoch: Epoch
    job: Job
    """That of the epoch; for a retry, with its sampling."""
    state: State
    """When the coordinator starts."""
    fleet: Fleet
    """Knows its work."""
    pending: PendingRows
    quarantine: Quarantine
    telemetry: Telemetry
    count: RowCount
    num_chosen: npt.NDArray[np.int64] | None = None
    """The input rows of each shard that run in a retry; None: all."""
    retry: Retry | None = None
    """The retry; None: the first run."""
    begins_together: bool = False
    """See `Assignment`."""
    keeps_engines: bool = False
    """Whether the engines stay up when every shard is committed: a retry may follow."""

    def __post_init__(self) -> None:
        spec = self.job.spec
        self._manifest = self.epoch.manifest
        self._lock = self.epoch.lock
        self._mirror = self.epoch.mirror
        self._display = self.epoch.display
        self._gate = self.epoch.content_gate
        self._assignment = Assignment(
            self.fleet,
            self.pending,
            self.quarantine,
            most_tokens=_most_tokens(self.job),
            begins_together=self.begins_together,
        )
        self._num_shards = total_shards(self.state.extents)
        self._num_shards_before = self.count.num_committed_shards
        self._platforms = {platform.key: platform for platform in self.state.of(Platform)}
        self._rates = Rates()
        self._is_measuring = False
        self._replicas_ended_at = 0.0
        self._placement_timeout_s = spec.ray.placement_timeout_s
        self._next_status = 0.0
        self._next_round = 0.0
        self._began_at: float | None = None
        self.work_s: float | None = None
        """From the first request to the last part; None before that, or if there was no request."""
        # Rows of an attempt have failed before, so many fail again.
        is_attempt = self.retry is not None and self.retry.is_automatic
        self._is_judged = is_attempt or spec.max_error_rate >= HOPELESS_RATE
        # From the first replica that found the disk full or the input changed. The others would report the same.
        self._fatal: UserError | None = None
        self.requests = StopRequests(spec.drain_timeout_s)
        self.num_unfinished = 0
        """Requests that were in engines when these were told to end."""
        if self._mirror is not None:
            self._mirror.until(self._store_by)

    def run(self) -> None:
        """Run until every shard is committed.

        Raises Interrupted, HopelessJob, EngineStartError, OutputError if the disk is full, or DriftError if the input
        or the model has changed.
        """
        with on_stop_signals(), without_long_collections():
            try:
                self._work()
            except BaseException as error:
                # Later errors, for example from a full disk or a lost lock, must not hide the first one.
                with contextlib.suppress(BatchinfError, OSError):
                    self._end_now()
                with contextlib.suppress(BatchinfError, OSError):
                    self._sweep()
                with contextlib.suppress(BatchinfError, OSError):
                    self._show("stopped" if isinstance(error, Interrupted) else "failed", force=True)
                raise
            # The job's end, or its next retry, commits these lines.
            self._note_ended(self.fleet.kill(but_idle=True))
            self._show("done", force=True)

    def _work(self) -> None:
        while not self._is_finished and not self.requests and not self._fatal:
            self._turn()
        is_asked = bool(self.requests)
        if is_asked and not self._is_finished:
            drain_s = max(0.0, self.requests.drain_until - time.monotonic())
            self._display.say(
                f"{self.requests.name}: running requests have up to {drain_s:.0f} s to finish; Ctrl-C to stop at once"
            )
        try:
            self._end_replicas(drains=is_asked)
        except StoreError:
            # A stop does not wait for a slow link: this host keeps what the bucket has not taken.
            if not (is_asked and self._is_late):
                raise
        if not self._is_finished and self._fatal:
            raise self._fatal
        if not self._is_finished:
            raise Interrupted(f"stopped on {self.requests.name}")

    def _store_by(self) -> float:
        """Until when the run waits for a bucket; monotonic, in seconds."""
        if self.requests.is_at_once:
            return 0.0
        return max(self.requests.end_by - _LAST_STORE_S, self._replicas_ended_at + _LEAST_STORE_S)

    @property
    def _is_late(self) -> bool:
        """Whether the run ends so soon that it does not wait for a bucket any more."""
        return time.monotonic() > self._store_by()

    def kept_lines(self, state: State) -> Iterator[str]:
        """The lines of a stopped job: rows kept, rows that run again, rows still to run. state: when it has stopped."""
        waiting = {} if self._mirror is None else dict(self._mirror.waiting)
        num_kept = num_results(self.job.folder, {**state.parts, **waiting})
        num_in_parts = self.count.num_committed_rows + sum(part.num_rows - part.num_kept for part in waiting.values())
        # Some finished rows that are in no part may not be in the journal.
        num_kept_rows = min(self.count.num_in_journal, num_kept) if self.job.task.joins_requests else num_kept
        num_rows = max(self.count.num_rows, num_in_parts + num_kept_rows)
        num_left = num_rows - num_in_parts - num_kept_rows
        of_retry = ""
        parts = counted(len({**state.parts, **waiting}), "part")
        if self.retry is not None:
            of_retry = f" that retry {self.retry.number} has to run"
            num_replaced = self.count.num_committed_shards - self._num_shards_before + len(waiting)
            parts = counted(num_replaced, "replaced part")
        yield (
            f"  kept: {num_rows - num_left:,} of {num_rows:,} output rows{of_retry}: "
            f"{num_in_parts:,} in {parts}, and {counted(num_kept, 'finished request')} in the journal"
        )
        if self.num_unfinished:
            begun = counted(self.num_unfinished, "request")
            yield f"  runs again: {begun} that the engines had begun; {self.requests.advice}"
        else:
            yield "  runs again: nothing; no request was cut off"
        yield f"  still to run: {counted(num_left, 'output row')}"
        if self._mirror is not None:
            yield self._mirror.kept_line(state)

    @property
    def _is_finished(self) -> bool:
        return self.count.num_committed_shards == self._num_shards

    def _end_now(self) -> None:
        self._note_ended(self.fleet.kill())
        self._commit()

    def _sweep(self) -> None:
        """Delete half-written files of killed replicas: on a full disk, the resume that would do it may come late."""
        self._lock.check()
        for name in ("staging", "journal"):
            self.job.folder.sweep(name)

    def _turn(self) -> None:
        is_round = time.monotonic() >= self._next_round
        if is_round:
            start_due(self.fleet, self._manifest)
        time.sleep(_GATHER_S * len(self.fleet.replicas))
        heard = self.fleet.poll(_POLL_S)
        made = self._act(heard)
        self._gate.look(self.fleet)
        if not is_round and not self.requests:
            # Before the commit, which takes longer.
            self._assign({replica.number: replica for replica, _ in heard}.values())
        self._commit_parts(made)
        if self.requests:
            # A signal to the whole process tree also ends engines, which is no failure.
            return
        if is_round:
            began = time.monotonic()
            self._look_at_all()
            # With 1,000 replicas this takes 15 ms, and messages come a hundred times a second.
            took = time.monotonic() - began
            self._next_round = time.monotonic() + min(_LONGEST_PAUSE_S, _ROUND_PAUSE * took)
        self._show(self._state())

    def _look_at_all(self) -> None:
        """Note which replicas have ended, judge the errors so far, and give work to all that have room."""
        if ended := self.fleet.reap():
            # If somebody deletes these folders, each replica would end again and again.
            self.job.folder.make("staging", "journal")
            self._note_ended(ended)
        self._judge()
        self._end_without_placement()
        if self.fleet.is_spent and not self._is_finished and not self._fatal:
            self._give_up()
        self._assign()

    def _assign(self, replicas: Iterable[FleetReplica] | None = None) -> None:
        """Give work to these replicas, or to all, if they have room, and a bucket takes what they make."""
        if self._mirror is not None and self._mirror.held_back(self._display.say):
            return
        if replicas is None:
            self._assignment.assign()
        else:
            self._assignment.assign_to(replicas)

    @property
    def _num_in_flight(self) -> int:
        return sum(replica.current.progress.in_flight for replica in self.fleet.replicas)

    def _state(self) -> str:
        return "running" if any(replica.is_running for replica in self.fleet.replicas) else "starting"

    def _act(self, heard: Iterable[tuple[FleetReplica, Event | None]]) -> list[Part]:
        """Do what follows from messages of replicas, but the commit of their parts. Returns these."""
        made: list[Part] = []
        ready: list[tuple[FleetReplica, Ready]] = []
        without_placement: list[tuple[FleetReplica, StartPhase]] = []
        stopped: list[FleetReplica] = []
        for replica, event in heard:
            match event:
                case LeaseDone(lease, part=None):
                    self.count.add_lease(event)
                    self._assignment.note_stored(lease)
                case LeaseDone(part=Part() as part):
                    self.count.add_lease(event)
                    made.append(part)
                case Revoked(leases):
                    self._assignment.take_back(leases)
                case LeaseBegun():
                    self._note_begun(event)
                case Ready():
                    ready.append((replica, event))
                    self._let_begin(replica, event)
                case StartPhase():
                    without_placement.append((replica, event))
                case Tried(rows):
                    self.quarantine.survived(replica, rows)
                case Stopped():
                    stopped.append(replica)
        self._say_ready(ready)
        self._say_without_placement(without_placement)
        self._take_last_figures(stopped)
        return made

    def _take_last_figures(self, stopped: Sequence[FleetReplica]) -> None:
        """Sample the figures of these replicas once more; a short job has no others."""
        if stopped:
            self._sample()
            self._look_at_rates()

    def _commit_parts(self, made: Sequence[Part]) -> None:
        if made or (self._mirror is not None and self._mirror.has_news):
            self._commit(made)

    def _note_begun(self, event: LeaseBegun) -> None:
        shard = event.lease[0]
        if self._began_at is None:
            self._began_at = time.monotonic()
            self._manifest.event("first_request", shard=shard)
        if event.num_recovered:
            self._manifest.event("recovered", shard=shard, num_requests=event.num_recovered)
        for name in event.damaged:
            self._keep_damaged(shard, f"journal/{name}")

    def _keep_damaged(self, shard: int, name: str) -> None:
        self._lock.check()
        # An earlier incarnation of the replica may have named it before.
        with contextlib.suppress(FileNotFoundError):
            moved_to = self.job.folder.move_aside(name)
            self._manifest.event("journal_damaged", shard=shard, segment=name, moved_to=moved_to)
            self._display.say(f"warning: {name} is damaged; it is kept as {moved_to}, and its results run again")

    def _commit(self, made: Sequence[Part] = ()) -> None:
        """Commit these parts; for a bucket, those that have been uploaded, of these and of earlier ones."""
        folder = self.job.folder
        for part in made:
            if part.retry:
                check_replaced(folder, part, self.state.parts[part.shard])
        self._say_other_images(made)
        parts = [(part, part) for part in made] if self._mirror is None else self._mirror.exchange(made)
        for own, part in parts:
            self._manifest.part(part, own.replica, own.incarnation)
            self.count.add_part(part, self._num_inputs_of(part.shard))
            self.quarantine.forget(part.shard)
        if parts and self._is_finished:
            self.work_s = None if self._began_at is None else time.monotonic() - self._began_at
            self._manifest.event("all_committed")
        if parts or not made or self._mirror is None:  # parts that are being uploaded are committed later
            self._manifest.commit()
        if self._mirror is None:
            publish([part for _, part in parts], folder, self._lock.check)
        faults.point("coordinator.before_drop")
        drop(folder, dict.fromkeys(part.shard for _, part in parts))
        if self._mirror is not None:
            self._mirror.note_committed([part for _, part in parts])
            for own, _ in parts:
                folder.delete(staged_file(own))

    def _say_other_images(self, parts: Sequence[Part]) -> None:
        """Name the rows of a retry whose earlier results were of other images. Call it while both parts are there."""
        if self.retry is None or not self.job.spec.input.has_images:
            return
        if (note := other_images_note(self.job.folder, parts)) is not None:
            self._display.say(note)

    def _num_inputs_of(self, shard: int) -> int:
        chosen = self.num_chosen
        return shard_at(self.state.extents, shard).num_rows if chosen is None else int(chosen[shard])

    def _let_begin(self, replica: FleetReplica, event: Ready) -> None:
        """Record an engine that is up, and let it begin. Raises DriftError if rows must not run on it."""
        engine = event.engine
        platform = Platform(engine.device, engine.versions, engine.settings, self.fleet.epoch)
        same_device = self.job.spec.same_device
        warning = platform_warning(replica.number, platform, self._platforms, same_device=same_device)
        if warning is not None:
            self._display.say(warning)
        self._platforms[platform.key] = platform
        self._manifest.record(platform)
        self._manifest.event(
            "ready",
            replica=replica.number,
            start_s=event.start_s,
            max_num_seqs=engine.max_num_seqs,
            device=engine.device,
            versions=engine.versions,
            settings=engine.settings,
        )
        if not self._is_measuring:
            # Rates count from here, not from the next look: by then a short job may be done.
            self._is_measuring = True
            self._rates.look(time.monotonic(), ())
        self._gate.admit(self.fleet, replica)
        self._assignment.note_ready()

    def _say_ready(self, ready: list[tuple[FleetReplica, Ready]]) -> None:
        if len(ready) > _MOST_LINES:
            self._display.say(f"{len(ready):,} more replicas are up")
            return
        for replica, event in ready:
            cache = event.engine.settings.get("kv_cache_size_tokens")
            room = f"; its KV cache holds {cache:,} tokens" if cache else ""
            self._display.say(f"replica {replica.number} is up after {event.start_s:.0f} s{room}")

    def _say_without_placement(self, replicas: list[tuple[FleetReplica, StartPhase]]) -> None:
        if not replicas:
            return
        numbers = list_names(str(replica.number) for replica, _ in replicas)
        follows = "the other replicas go on, and it starts when a node joins"
        if self.fleet.no_placement_s(time.monotonic()) is not None:
            follows = (
                f"no replica can run; if no node joins, the job stops with exit code {Interrupted.exit_code} in "
                f"{self._placement_timeout_s:g} s (ray.placement_timeout_s)"
            )
        shortage = replicas[0][1].shortage
        self._display.say(f"warning: the nodes that are left cannot hold replica {numbers}: {shortage}; {follows}")

    def _end_without_placement(self) -> None:
        """Raise Interrupted if the nodes that are left could hold no replica for too long."""
        waited_s = self.fleet.no_placement_s(time.monotonic())
        if waited_s is not None and waited_s >= self._placement_timeout_s and not self._is_finished:
            raise Interrupted(
                f"stopped: the nodes that are left could hold no replica for {self._placement_timeout_s:g} s "
                "(ray.placement_timeout_s)"
            )

    def _note_ended(self, ended: Sequence[Ended]) -> None:
        for end in ended:
            self._note_end(end)
        if ended and not self._is_finished:
            self._manifest.commit()

    def _note_end(self, end: Ended) -> None:
        for finished in end.finished:
            self.count.add_lease(finished)
        if end.finished:
            self._commit([finished.part for finished in end.finished if finished.part is not None])
        if end.was_asked:
            self.num_unfinished += end.num_unfinished
            if self._gate.is_open:
                self.count.add_kept(end)
        note_end(self._manifest, end)
        suspicion = self.quarantine.note_death(end)
        self._assignment.note_ended(end, self.quarantine.leases)
        if end.step_down is not None:
            self._manifest.record(Lowered(end.step_down["lowered"], end.step_down["applies_to"]))
            ended = {"replica": end.replica.number, "incarnation": end.incarnation}
            self._manifest.event("oom_step_down", **ended, **end.step_down)
        self._tell_end(end, suspicion)

    def _tell_end(self, end: Ended, suspicion: str) -> None:
        """suspicion: which rows may have caused it; "" if none."""
        if end.failed is not None and end.failed.error_type in _FATAL:
            self._fatal = self._fatal or _FATAL[end.failed.error_type](end.cause)
        elif not end.was_asked:
            more = f"; {suspicion}" if suspicion else ""
            self._display.say(f"warning: replica {end.replica.number} {end.replica.state}: {end.replica.cause}{more}")

    def _give_up(self) -> None:
        causes = list(dict.fromkeys(replica.cause for replica in self.fleet.replicas))
        # Under `ulimit -v`, a library may abort a process without a message.
        if (limit := address_limit()) and not any(limit in cause for cause in causes):
            causes.append(limit)
        # Without finished rows, --fresh loses nothing. A resume would refuse a changed field that decides the output.
        changed = "" if self.count.num_done else ", with --fresh if that changes what decides the output"
        raise EngineStartError(
            f"no replica is left: {'; '.join(causes)} (logs: {self.job.folder.path('logs')}); correct the cause and "
            f"run the same command again{changed}"
        )

    def _judge(self) -> None:
        """Check the error rate once, when the first rows are finished. Raises HopelessJob; finished rows are stored."""
        if self._is_judged or self._is_finished:
            return
        num_rows = self.count.num_done
        if num_rows < FIRST_ROWS:
            return
        self._is_judged = True
        num_errors = self.count.num_errors
        num_ready = sum(replica.current.progress.num_waiting for replica in self.fleet.replicas)
        if is_hopeless(num_errors, num_rows + self._num_in_flight + num_ready):
            self._display.say("half of the first rows have failed: stopping")
            self._end_replicas(drains=False)
            if not self._is_finished:
                raise HopelessJob(
                    f"{num_errors:,} of the first {num_rows:,} output rows have failed; the job was ended early"
                )

    def _end_replicas(self, *, drains: bool) -> None:
        """Let replicas finish what they can until the stop requests' deadline, which a later request may shorten."""
        began = time.monotonic()
        replicas_drain_until = math.inf
        while True:
            drain_until = self.requests.drain_until
            end_by = self.requests.end_by
            if self._is_finished or not drains:
                drain_until = began
                end_by = began + ENDING_S
            if drain_until < replicas_drain_until:
                replicas_drain_until = drain_until
                keeps_engine = self.keeps_engines and self._is_finished and not self.requests
                self._note_ended(self.fleet.stop(Stop(max(0.0, drain_until - time.monotonic()), keeps_engine)))
            if not self.fleet.num_working or time.monotonic() >= end_by or self.requests.is_at_once:
                break
            self._commit_parts(self._act(self.fleet.poll(_POLL_S)))
            self._gate.look(self.fleet)
            self._note_ended(self.fleet.reap())
            self._show("stopping" if self._num_in_flight and not self._is_finished else "ending")
        # The last events may have come together with the end of the replicas.
        self._commit_parts(self._act(self.fleet.poll(0)))
        if self._mirror is not None and not self._is_finished:
            self._replicas_ended_at = time.monotonic()
            self._mirror.flush()
            while self._mirror.is_busy and not self._is_late:
                time.sleep(_POLL_S / 10)
                self._commit_parts([])

    def _show(self, state: str, *, force: bool = False) -> None:
        if not force and time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + _STATUS_EVERY_S
        # Commits check the lock. Between commits, which may be minutes, a lost lock is noticed here.
        self._lock.watch()
        self.fleet.look_at_starts()
        status = self._status(state)
        with contextlib.suppress(OSError):
            write_status(self.job.folder, status)
        self._display.show(status)
        if self.telemetry.is_due:
            self._sample()

    def _look_at_rates(self) -> None:
        if self._is_measuring:
            self._rates.look(time.monotonic(), self.fleet.last_reports)

    def _sample(self) -> None:
        looks = []
        for replica in self.fleet.replicas:
            if replica.is_live:
                is_on_trial = replica.is_running and self.quarantine.is_on_trial(replica)
                state = ON_TRIAL if is_on_trial else replica.state
                looks.append(ReplicaLook.of(replica.number, replica.current.name, state, replica.current.progress))
        self.telemetry.look(looks)

    def _status(self, state: str) -> JobStatus:
        count = self.count
        reports = self.fleet.last_reports
        num_done = count.num_done
        if state in ("starting", "running", "stopping"):  # later the rates would fall, as nothing runs
            self._look_at_rates()
        prompt_per_s, output_per_s = self._rates.tokens_per_s or (None, None)
        # While all replicas start again, their old rates say nothing.
        is_running = state == "running"
        left_s = self._rates.left_s(count.num_rows - num_done, self._num_in_flight) if is_running else None
        return JobStatus(
            state=state,
            num_rows=count.num_rows,
            num_rows_done=num_done,
            num_errors=count.num_errors,
            errors=count.errors,
            num_shards=self._num_shards,
            num_shards_done=count.num_committed_shards,
            num_prompt_tokens=sum(report.num_prompt_tokens for report in reports),
            num_output_tokens=sum(report.num_output_tokens for report in reports),
            prompt_tokens_per_s=None if prompt_per_s is None else round(prompt_per_s, 1),
            output_tokens_per_s=None if output_per_s is None else round(output_per_s, 1),
            left_s=None if left_s is None else round(left_s, 1),
            stalled_by_disk_s=round(sum(report.stalled_by_disk_s for report in reports), 3),
            replicas=tuple(replica.status() for replica in self.fleet.replicas),
            devices=self.telemetry.device_looks(),
            updated_at=round(time.time(), 3),
        )


def _most_tokens(job: Job) -> int | None:
    """The most tokens that a row generates; None if the job's spec does not say."""
    sampling = job.spec.sampling
    has_own = "max_tokens" in (sampling.columns or {})
    return sampling.max_tokens if job.task.draws_tokens and not has_own else None


def is_hopeless(num_errors: int, num_begun: int) -> bool:
    """Whether half of the begun rows have failed.

    num_begun: rows that are finished, in an engine or ready for one. Finished rows alone would mislead: at first many
    of them are errors, because a row that fails before the engine is finished at once.
    """
    return num_errors >= HOPELESS_RATE * max(1, num_begun)
