"""Writes the manifest: one log for each epoch, in atomic commits.

A part gets its name in `parts/` after its line is committed. A torn commit loses no rows: the parts that it should have
named still stand in `staging/`, and the next start commits them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, disk_error
from batchinf.base.text import utc_now
from batchinf.manifest.chain import Chain
from batchinf.manifest.commit_log import CommitLog, Fields, encode_commits
from batchinf.manifest.lines import BEGINNING, EventLine, Header, Retry, event_line, part_line
from batchinf.manifest.lock import JobLock
from batchinf.manifest.state import MANIFEST_FOLDER, State, last_epoch, list_logs, read_state
from batchinf.records import Extent, Part

_LINES_PER_COMMIT = 1000


def _extent_line(extent: Extent, source_fingerprint: str, more: Fields) -> Fields:
    return {"kind": "extent", **dataclasses.asdict(extent), "source_fingerprint": source_fingerprint, **more}


def snapshot_commits(state: State, replaces: list[str]) -> list[list[Fields]]:
    """The state as several commits, so that a damaged snapshot is never mistaken for a torn last commit."""
    lines = list(_snapshot_lines(state, replaces))
    commits = [lines[start : start + _LINES_PER_COMMIT] for start in range(0, len(lines), _LINES_PER_COMMIT)]
    return [*commits, [{"kind": "snapshot_end"}]]


def _snapshot_lines(state: State, replaces: list[str]) -> Iterator[Fields]:
    running = [dataclasses.asdict(replica) for replica in state.running_replicas]
    counts = {"device_s": state.device_s, "event_counts": state.event_counts, "running_replicas": running}
    yield {"kind": "snapshot", "at": utc_now(), "replaces": replaces, **counts}
    yield from _job_lines(state)
    yield from (part_line(part) for part in state.parts.values())
    yield from (event_line("counted_event", event) for event in state.events)
    yield from (event_line("kept_event", event) for event in state.kept.values())
    if state.done is not None:
        yield event_line("done", state.done)


def _job_lines(state: State) -> Iterator[Fields]:
    yield {"kind": "header", **dataclasses.asdict(state.header)}
    for number, extent in enumerate(state.extents):
        limit = {"limit": state.limits[number]} if number in state.limits else {}
        yield _extent_line(extent, state.source_fingerprints[number], limit)
    if state.files:
        yield {"kind": "files", "files": state.files}
    yield from ({"kind": "retry", **dataclasses.asdict(retry)} for retry in state.retries.values())


class Manifest:
    """The log of one epoch, whose lines wait for `commit`. Opening creates it, in place of several earlier ones."""

    def __init__(
        self,
        folder: Folder,
        epoch: int,
        lock: JobLock | None = None,
        state: State | None = None,
        *,
        chain: Chain | None = None,
        new_id: str | None = None,
    ) -> None:
        """lock: must be held at each write; None if no other process can write. state: from `read_state`.

        chain: of a job in a bucket; it gets each commit first, and the log is a copy. new_id: of a job that has not
        begun; the first commit has it.

        Raises OutputError if this epoch has a log already, or if the folder cannot be written.
        """
        self._folder = folder
        self._lock = lock
        self._lines: list[Fields] = []
        self._chain = chain
        name = f"{MANIFEST_FOLDER}/{epoch:06d}.jsonl"
        try:
            num_commits = self._create(epoch, name, state, new_id)
        except OSError as error:
            raise OutputError(f"cannot create {disk_error(error, folder.path(name))}") from error
        self._log = CommitLog(folder, name, num_commits, None if chain is None else partial(chain.commit, epoch))

    def _create(self, epoch: int, name: str, state: State | None, new_id: str | None) -> int:
        """Create the log, compacting earlier ones; returns the number of commits in it."""
        earlier = [log for _, log in list_logs(self._folder)]
        state = read_state(self._folder, state) if len(earlier) > 1 else None
        snapshot = snapshot_commits(state, earlier) if state else []
        commits = [*snapshot]
        if new_id is not None:
            commits.append([event_line("event", EventLine(BEGINNING, utc_now(), {"job_id": new_id}))])
        data = encode_commits(commits)
        self.check_lock()
        if snapshot:
            faults.point("manifest.compact.before_rename")
        if self._chain is not None:
            self._chain.commit(epoch, data, is_snapshot=bool(snapshot))
        if last_epoch(self._folder) >= epoch or not self._folder.create_exclusive(name, data):
            raise OutputError(f"another process has just started on {self._folder.root}; run the same command again")
        if snapshot:
            for log in earlier:
                faults.point("manifest.compact.before_delete")
                self._folder.delete(log)
        return len(commits)

    def header(self, header: Header) -> None:
        """Record what the job is. The last header is the valid one."""
        self._lines.append({"kind": "header", **dataclasses.asdict(header)})

    def extent(self, extent: Extent, source_fingerprint: str, more: Fields | None = None) -> None:
        """Add rows to run; a job that was done is no longer done. more: the new `limit`, if it is raised."""
        self._lines.append(_extent_line(extent, source_fingerprint, more or {}))

    def files(self, digests: Mapping[str, str]) -> None:
        """Record which local files the model is made of: the digest of all bytes of each, by name."""
        self._lines.append({"kind": "files", "at": utc_now(), "files": dict(digests)})

    def part(self, part: Part, replica: int | None = None, incarnation: str = "") -> None:
        """Record that this part has a shard's rows. replica, incarnation: those that made it, if known."""
        part = dataclasses.replace(part, replica=replica, incarnation=incarnation)
        self._lines.append(part_line(part))

    def retry(self, retry: Retry) -> None:
        """Record that a retry begins; a job that was done is no longer done."""
        self._lines.append({"kind": "retry", "at": utc_now(), **dataclasses.asdict(retry)})

    def event(self, name: str, /, **fields: Any) -> None:
        """Record an event. `fields` are JSON values.

        Raises ValueError if the fields are not those that `manifest/lines.py` requires of this event. After a `lost`
        event, its `shards` are no longer committed, and the job is no longer done. An event with `kept_as` stays in
        `State.kept` under that name, until the next one with that name or a `forgotten` event.
        """
        self._lines.append(event_line("event", EventLine(name, utc_now(), fields)))

    def done(self, **fields: Any) -> None:
        """Record that every shard is done."""
        self._lines.append(event_line("done", EventLine("done", utc_now(), fields)))

    def commit(self) -> None:
        """Write the buffered lines durably, all or none. Raises LockLost, or OutputError; they then stay buffered."""
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
        """Raise LockLost unless this process still holds the job. Call it before writing a file that a line names."""
        if self._lock is not None:
            self._lock.check()
