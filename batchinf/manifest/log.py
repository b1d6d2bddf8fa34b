"""The job's record as it is written: one log for each epoch, in commits that count all or not at all.

A commit that a crash tears costs nothing but work: a part that no line names is verified and adopted, or run again.
"""

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, disk_error
from batchinf.manifest.commit_log import CommitLog, Fields, encode_commits
from batchinf.manifest.lines import PartLine
from batchinf.manifest.lock import JobLock
from batchinf.manifest.names import Retry
from batchinf.manifest.state import (
    HEAD_START,
    MANIFEST_FOLDER,
    TAKEN,
    EventLine,
    Header,
    State,
    last_epoch,
    list_logs,
    read_state,
)
from batchinf.records import Extent, Part, StartedReplica

_LINES_PER_COMMIT = 1000
# What a reader needs of an event; the line's own keys are taken.
_REQUIRED = {
    HEAD_START: {"job_id"},
    "replica_started": {field.name for field in dataclasses.fields(StartedReplica)},
    "replica_ended": {"incarnation", "device_s"},
    "lost": {"shards"},
}


def _event_line(kind: str, event: EventLine) -> Fields:
    return {"kind": kind, "name": event.name, "at": event.at, **event.fields}


def _extent_line(extent: Extent, source_fingerprint: str, more: Fields) -> Fields:
    return {"kind": "extent", **dataclasses.asdict(extent), "source_fingerprint": source_fingerprint, **more}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def snapshot_commits(state: State, replaces: list[str]) -> list[list[Fields]]:
    """All that the state says, in commits: several, so that damage to a snapshot is never taken for a torn tail."""
    lines = list(_snapshot_lines(state, replaces))
    commits = [lines[start : start + _LINES_PER_COMMIT] for start in range(0, len(lines), _LINES_PER_COMMIT)]
    return [*commits, [{"kind": "snapshot_end"}]]


def _snapshot_lines(state: State, replaces: list[str]) -> Iterator[Fields]:
    running = [dataclasses.asdict(replica) for replica in state.running_replicas]
    counts = {"device_s": state.device_s, "event_counts": state.event_counts, "running_replicas": running}
    yield {"kind": "snapshot", "at": _now(), "replaces": replaces, **counts}
    yield {"kind": "header", **dataclasses.asdict(state.header)}
    limits = [{"limit": state.limits[i]} if i in state.limits else {} for i in range(len(state.extents))]
    yield from map(_extent_line, state.extents, state.source_fingerprints, limits)
    yield from ({"kind": "retry", **dataclasses.asdict(retry)} for retry in state.retries.values())
    yield from ({"kind": "part", **part.fields()} for part in state.parts.values())
    yield from ({"kind": "replacing", **part.fields()} for part in state.replacing.values())
    yield from (_event_line("counted_event", event) for event in state.events)
    yield from (_event_line("kept_event", event) for event in state.kept.values())
    if state.done is not None:
        yield _event_line("done", state.done)


class Manifest:
    """The log of one epoch. Lines are buffered until `commit`; nothing else makes them count.

    Opening it creates the log, and folds the earlier ones into it if there are more than one.
    """

    def __init__(self, folder: Folder, epoch: int, lock: JobLock | None = None, state: State | None = None) -> None:
        """lock: must be held whenever something is written; None where no other process can write. state: as read.

        Raises OutputError if the folder has come to this epoch already, or cannot be written.
        """
        self._folder = folder
        self._lock = lock
        self._lines: list[Fields] = []
        name = f"{MANIFEST_FOLDER}/{epoch:06d}.jsonl"
        try:
            num_commits = self._create(epoch, name, state)
        except OSError as error:
            raise OutputError(f"cannot create {disk_error(error, folder.path(name))}") from error
        self._log = CommitLog(folder, name, num_commits, fault="manifest")

    def _create(self, epoch: int, name: str, state: State | None) -> int:
        """Create the log, compacting earlier ones; returns the number of commits in it."""
        earlier = [log for _, log in list_logs(self._folder)]
        state = read_state(self._folder, state) if len(earlier) > 1 else None
        commits = snapshot_commits(state, earlier) if state else []
        data = encode_commits(commits)
        self.check_lock()
        if commits:
            faults.point("manifest.compact.before_rename")
        if last_epoch(self._folder) >= epoch or not self._folder.create_exclusive(name, data):
            raise OutputError(f"another process has begun epoch {epoch} of {self._folder.root}; run this again")
        if commits:
            faults.point("manifest.compact.before_delete")
            for log in earlier:
                self._folder.delete(log)
        return len(commits)

    def header(self, header: Header) -> None:
        """Say what the job is; the last header counts."""
        self._lines.append({"kind": "header", **dataclasses.asdict(header)})

    def extent(self, extent: Extent, source_fingerprint: str, more: Fields | None = None) -> None:
        """There are these rows to run; a job that was done is done no longer. more: `limit`, where it is raised."""
        self._lines.append(_extent_line(extent, source_fingerprint, more or {}))

    def part(self, part: Part | PartLine, replica: int | None = None, incarnation: str = "") -> None:
        """A shard is done: this published part holds it."""
        self._lines.append({"kind": "part", **PartLine.of(part, replica, incarnation).fields()})

    def replacing(self, part: Part) -> None:
        """This part is about to be put in the place of its shard's, whose line counts until its own comes."""
        self._lines.append({"kind": "replacing", **PartLine.of(part).fields()})

    def retry(self, retry: Retry) -> None:
        """A retry begins; a job that was done is done no longer."""
        self._lines.append({"kind": "retry", "at": _now(), **dataclasses.asdict(retry)})

    def event(self, name: str, /, **fields: Any) -> None:
        """Something happened. `fields` are JSON values.

        A `replica_started` has at least the fields of StartedReplica, a `replica_ended` incarnation and device_s; the
        `shards` of a `lost` count as not committed from here on, and the job as not done. One with `kept_as` stays in
        `State.kept` under that name, until the next with the same, or a `forgotten` one.
        """
        if wrong := (_REQUIRED.get(name, set()) - fields.keys()) | (TAKEN & fields.keys()):
            raise ValueError(f"event {name}: these fields are missing, or taken by the line itself: {sorted(wrong)}")
        self._lines.append(_event_line("event", EventLine(name, _now(), fields)))

    def done(self, **fields: Any) -> None:
        """Every shard is done."""
        self._lines.append(_event_line("done", EventLine("done", _now(), fields)))

    def commit(self) -> None:
        """Make the buffered lines count: durable when this returns, all or none of them.

        Raises LockLost, or OutputError if they cannot be written; then they stay buffered for the next commit.
        """
        if self._lines:
            self.check_lock()
            self._log.commit(self._lines)
            self._lines.clear()

    def discard(self) -> None:
        """Forget the lines that are not committed."""
        self._lines.clear()

    def close(self) -> None:
        """Close the log; lines that are not committed are dropped."""
        self._log.close()

    def check_lock(self) -> None:
        """Raise LockLost unless this process still holds the job: before files are written that a line is to name."""
        if self._lock is not None:
            self._lock.check()
