"""The process that the user started: assigns shards, supervises replicas, publishes and commits parts, finishes.

One thread. What a replica says of a shard counts only while it holds it; what it wrote means nothing until it is
published and the manifest says so.
"""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from batchinf import faults
from batchinf.errors import EngineStartError, Interrupted, UserError
from batchinf.fleet import Ended, Fleet, Member
from batchinf.job import Job
from batchinf.journal import drop
from batchinf.lock import Holder, JobLock, process_start
from batchinf.manifest import Manifest
from batchinf.parts import part_name
from batchinf.progress import ProgressDisplay
from batchinf.records import Event, Part, Ready, Revoked, ShardBegun, ShardClosed, Stop
from batchinf.shards import Pending, ReplicaLoad, next_shards, revocations
from batchinf.status import JobStatus, Rates, write_status

_POLL_S = 0.2
_STATUS_EVERY_S = 1.0
# How long a replica may take beyond its drain to write its parts and end.
_ENDING_S = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Coordinator:
    """Runs what is left of a job. The manifest is open, the folder locked, earlier leftovers are recovered."""

    def __init__(
        self,
        job: Job,
        manifest: Manifest,
        lock: JobLock,
        fleet: Fleet,
        pending: Pending,
        display: ProgressDisplay,
        num_rows: int,
        num_shards: int,
        committed: "Committed",
    ) -> None:
        self._job = job
        self._manifest = manifest
        self._lock = lock
        self._fleet = fleet
        self._pending = pending
        self._display = display
        self._num_rows = num_rows
        self._num_shards = num_shards
        self._committed = committed
        self._attempts: dict[int, int] = {}
        self._rates = Rates()
        self._next_status = 0.0
        self._signals: list[int] = []
        self._versions: dict[str, str] = {}
        self._has_begun = False

    def run(self) -> None:
        """Until every shard is committed. Raises Interrupted, EngineStartError, or what ended the last replica."""
        with self._listening():
            try:
                while self._committed.num_shards < self._num_shards:
                    self._turn()
                    if self._signals:
                        self._drain()
                        raise Interrupted(f"stopped on {signal.Signals(self._signals[0]).name}")
                self._end_replicas(0.0)
            finally:
                self._note_ended(self._fleet.kill())
                self._commit(())
        self._show("done", force=True)

    def _turn(self) -> None:
        self._note_started(self._fleet.start_due())
        self._handle(self._fleet.poll(_POLL_S))
        self._note_ended(self._fleet.reap())
        if self._fleet.is_spent:
            self._give_up()
        self._assign()
        self._show(self._state())

    def _state(self) -> str:
        return "running" if any(member.is_running for member in self._fleet.members) else "starting"

    def _handle(self, events: list[tuple[Member, Event]]) -> None:
        parts: list[tuple[Member, Part]] = []
        for member, event in events:
            match event:
                case ShardClosed(part) if part.shard in member.shards:
                    member.shards.pop(part.shard)
                    member.closed_rows += part.num_rows
                    member.begun.discard(part.shard)
                    parts.append((member, part))
                case Revoked(shards):
                    self._take_back(member, shards)
                case ShardBegun(shard, num_recovered):
                    self._note_begun(shard, num_recovered)
                case Ready():
                    self._note_ready(member, event)
                case _:
                    pass
        if parts:
            self._commit(parts)

    def _note_begun(self, shard: int, num_recovered: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._manifest.event("first_request", shard=shard)
        if num_recovered:
            self._manifest.event("recovered", shard=shard, num_requests=num_recovered)

    def _take_back(self, member: Member, shards: tuple[int, ...]) -> None:
        back = [index for index in shards if member.shards.pop(index, None) is not None]
        member.revoking.clear()
        self._pending.give_back(back)

    def _commit(self, parts: Sequence[tuple[Member, Part]]) -> None:
        folder = self._job.folder
        self._lock.check()
        for member, part in parts:
            faults.point("coordinator.before_publish")
            folder.publish(f"staging/{part.file}", f"parts/{part_name(part.shard)}")
            faults.point("coordinator.after_publish")
            incarnation = member.replica.launch.incarnation if member.replica is not None else ""
            self._manifest.part(part, member.slot.replica, incarnation)
            self._committed.add(part)
        if parts and self._committed.num_shards == self._num_shards:
            self._manifest.event("all_committed")
        self._manifest.commit()
        for _, part in parts:
            drop(folder, part.shard)

    def _assign(self) -> None:
        loads = [_load(index, member) for index, member in enumerate(self._fleet.members) if member.is_running]
        for index, shard in next_shards(self._pending, loads):
            attempts = self._attempts[shard.index] = self._attempts.get(shard.index, 0) + 1
            self._fleet.assign(self._fleet.members[index], [shard], attempts)
        for index, shards in revocations(self._pending, loads).items():
            self._fleet.revoke(self._fleet.members[index], shards)

    def _note_started(self, members: list[Member]) -> None:
        for member in members:
            assert member.replica is not None
            me = Holder.this_process()
            self._manifest.event(
                "replica_started",
                replica=member.slot.replica,
                incarnation=member.replica.launch.incarnation,
                host=me.host,
                boot_id=me.boot_id,
                pgid=member.replica.pid,
                pid_start_time=process_start(member.replica.pid) or 0,
                devices=list(member.slot.devices),
            )
        if members:
            self._manifest.commit()

    def _note_ready(self, member: Member, event: Ready) -> None:
        if self._versions and event.engine.versions != self._versions:
            self._display.say(f"warning: replica {member.slot.replica} runs other versions: {event.engine.versions}")
        self._versions = event.engine.versions
        self._manifest.event(
            "ready",
            replica=member.slot.replica,
            start_s=event.start_s,
            device=event.engine.device,
            versions=event.engine.versions,
            settings=event.engine.settings,
        )

    def _note_ended(self, ended: list[Ended]) -> None:
        for end in ended:
            device_s = round(end.lifetime_s * end.member.slot.num_devices, 1)
            cause = "" if end.was_asked else end.cause
            self._manifest.event("replica_ended", incarnation=end.incarnation, device_s=device_s, cause=cause)
            self._pending.give_back(shard.index for shard in end.shards)
            if not end.was_asked:
                self._display.say(f"replica {end.member.slot.replica} {end.member.state}: {end.cause}")
        if ended:
            self._manifest.commit()

    def _give_up(self) -> None:
        causes = [member.failed for member in self._fleet.members if member.failed is not None]
        logs = self._job.folder.path("logs")
        if causes and causes[0].exit_code == UserError.exit_code:
            raise EngineStartError(f"no replica is left: {causes[0].cause} (logs: {logs})")
        words = causes[0].cause if causes else "no replica could start"
        raise EngineStartError(f"no replica is left: {words} (logs: {logs}); mend that and run the same command again")

    def _drain(self) -> None:
        drain_s = self._job.spec.drain_timeout_s
        self._display.say(
            f"{signal.Signals(self._signals[0]).name}: finishing what can be finished in {drain_s:g} s; "
            "once more to stop at once"
        )
        self._end_replicas(drain_s)

    def _end_replicas(self, drain_s: float) -> None:
        self._fleet.stop(Stop(drain_s))
        deadline = time.monotonic() + drain_s + _ENDING_S
        while self._fleet.num_live and time.monotonic() < deadline and len(self._signals) < 2:
            self._handle(self._fleet.poll(_POLL_S))
            self._note_ended(self._fleet.reap())
            self._show("stopping")
        # What was said last may have come together with the end.
        self._handle(self._fleet.poll(0))

    def _show(self, state: str, *, force: bool = False) -> None:
        if not force and time.monotonic() < self._next_status:
            return
        self._next_status = time.monotonic() + _STATUS_EVERY_S
        status = self._status(state)
        with contextlib.suppress(OSError):
            write_status(self._job.folder, status)
        self._display.show(status)

    def _status(self, state: str) -> JobStatus:
        members = self._fleet.members
        live = sum(max(0, member.progress.num_rows - member.closed_rows) for member in members)
        num_done = min(self._num_rows, self._committed.num_rows + live)
        tokens = self._fleet.num_tokens()
        self._rates.look(num_done, *tokens)
        rows_per_s, prompt_per_s, output_per_s = self._rates.per_s()
        return JobStatus(
            state=state,
            num_rows=self._num_rows,
            num_rows_done=num_done,
            num_errors=self._committed.num_errors + sum(member.progress.num_errors for member in members),
            num_shards=self._num_shards,
            num_shards_done=self._committed.num_shards,
            num_prompt_tokens=tokens[0],
            num_output_tokens=tokens[1],
            prompt_tokens_per_s=round(prompt_per_s, 1),
            output_tokens_per_s=round(output_per_s, 1),
            left_s=round((self._num_rows - num_done) / rows_per_s, 1) if rows_per_s > 0 else None,
            stalled_by_disk_s=sum(member.progress.stalled_by_disk_s for member in members),
            replicas=tuple(member.status() for member in members),
            updated_at=round(time.time(), 3),
            message="" if state != "starting" else "; ".join(f"replica {m.slot.replica} {m.state}" for m in members),
        )

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Committed:
    """Totals of what the manifest names."""

    def __init__(self, num_shards: int, num_rows: int, num_errors: int) -> None:
        self.num_shards = num_shards
        self.num_rows = num_rows
        self.num_errors = num_errors

    def add(self, part: Part) -> None:
        """Count a part that has been committed."""
        self.num_shards += 1
        self.num_rows += part.num_rows
        self.num_errors += part.num_errors


def _load(index: int, member: Member) -> ReplicaLoad:
    return ReplicaLoad(index, member.window_rows, member.outstanding_rows, member.unbegun, not member.is_stopping)
