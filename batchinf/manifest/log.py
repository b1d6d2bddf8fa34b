"""Writes the manifest: one log for each epoch, in atomic commits.

A part gets its name in `parts/` after its line is committed. A torn commit loses no rows: the parts that it should have
named still stand in `staging/`, and the next start commits them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, disk_error
from batchinf.base.text import utc_now
from batchinf.manifest.chain import Chain
from batchinf.manifest.commit_log import Fields, encode_commits, gone
from batchinf.manifest.events import EventLine, append_events
from batchinf.manifest.lines import Beginning, EndedReplica, Lost, part_line, record_line
from batchinf.manifest.lock import JobLock
from batchinf.manifest.state import MANIFEST_FOLDER, State, last_epoch, list_logs, read_state
from batchinf.records import Part
from batchinf.schedule.shards import Extent

_LINES_PER_COMMIT = 1000


def _extent_line(extent: Extent, source_fingerprint: str, more: Fields) -> Fields:
    return {"kind": "extent", **dataclasses.asdict(extent), "source_fingerprint": source_fingerprint, **more}


def snapshot_commits(state: State, replaces: list[str]) -> list[list[Fields]]:
    """The state as several commits, so that a damaged snapshot is never mistaken for a torn last commit."""
    lines = list(_snapshot_lines(state, replaces))
    commits = [lines[start : start + _LINES_PER_COMMIT] for start in range(0, len(lines), _LINES_PER_COMMIT)]
    return [*commits, [{"kind": "snapshot_end"}]]


def _snapshot_lines(state: State, replaces: list[str]) -> Iterator[Fields]:
    yield {"kind": "snapshot", "at": utc_now(), "replaces": replaces}
    yield record_line(state.header)
    for number, extent in enumerate(state.extents):
        limit = {"limit": state.limits[number]} if number in state.limits else {}
        yield _extent_line(extent, state.source_fingerprints[number], limit)
    if state.has_lost:
        yield record_line(Lost([]))
    yield record_line(EndedReplica("", state.device_s, state.had_devices))
    yield from map(record_line, (*state.retries.values(), *state.kept.values()))
    yield from (part_line(part) for part in state.parts.values())
    if state.done is not None:
        yield record_line(state.done)


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
        self._epoch = epoch
        self._lock = lock
        self._lines: list[Fields] = []
        self._events: list[EventLine] = []
        self._chain = chain
        self._is_behind = False  # the log lacks the chain's last commit
        self._is_torn = False
        name = f"{MANIFEST_FOLDER}/{epoch:06d}.jsonl"
        self._path = folder.path(name)
        try:
            self._num_commits = self._create(name, state, new_id)
            self._file: BinaryIO = self._path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot create {disk_error(error, self._path)}") from error
        self._num_bytes = self._file.seek(0, os.SEEK_END)

    def _create(self, name: str, state: State | None, new_id: str | None) -> int:
        """Create the log, compacting earlier ones; returns the number of commits in it."""
        earlier = [log for _, log in list_logs(self._folder)]
        state = read_state(self._folder, state) if len(earlier) > 1 else None
        snapshot = snapshot_commits(state, earlier) if state else []
        commits = [*snapshot]
        if new_id is not None:
            commits.append([record_line(Beginning(new_id))])
        data = encode_commits(commits)
        self.check_lock()
        if snapshot:
            faults.point("manifest.compact.before_rename")
        if self._chain is not None:
            self._chain.commit(self._epoch, data, is_snapshot=bool(snapshot))
        if last_epoch(self._folder) >= self._epoch or not self._folder.create_exclusive(name, data):
            raise OutputError(f"another process has just started on {self._folder.root}; run the same command again")
        if snapshot:
            for log in earlier:
                faults.point("manifest.compact.before_delete")
                self._folder.delete(log)
        return len(commits)

    def record(self, record: Any) -> None:
        """Add a record of `manifest/lines.py`, which replaces an earlier one with its key.

        Raises ValueError if it could not be read again.
        """
        self._lines.append(record_line(record))

    def extent(self, extent: Extent, source_fingerprint: str, more: Fields | None = None) -> None:
        """Add rows to run; a job that was done is no longer done. more: the new `limit`, if it is raised."""
        self._lines.append(_extent_line(extent, source_fingerprint, more or {}))

    def part(self, part: Part, replica: int | None = None, incarnation: str = "") -> None:
        """Record that this part has a shard's rows. replica, incarnation: those that made it, if known."""
        part = dataclasses.replace(part, replica=replica, incarnation=incarnation)
        self._lines.append(part_line(part))

    def event(self, name: str, /, **fields: Any) -> None:
        """Add an event to `events.jsonl`, for people only. `fields` are JSON values."""
        self._events.append(EventLine(name, utc_now(), fields))

    def commit(self) -> None:
        """Write the buffered lines durably, all or none, and then the events.

        Raises LockLost, or OutputError; they then stay buffered.
        """
        if self._lines or self._events:
            self.check_lock()
        if self._lines:
            self._commit_lines()
            self._lines.clear()
        if self._events:
            append_events(self._folder, self._events)
            self._events.clear()

    def discard(self) -> None:
        """Forget the lines and events that are not committed."""
        self._lines.clear()
        self._events.clear()

    def close(self) -> None:
        """Close the log; lines that are not committed are dropped."""
        self._file.close()

    def check_lock(self) -> None:
        """Raise LockLost unless this process still holds the job. Call it before writing a file that a line names."""
        if self._lock is not None:
            self._lock.check()

    # -- appending to the log ------------------------------------------------------------------------------------------

    def _commit_lines(self) -> None:
        """Append the lines as one commit. Raises OutputError after a half-written commit is removed."""
        data = encode_commits([self._lines], self._num_commits)
        if self._chain is not None:
            if self._is_behind:
                raise OutputError(f"{self._path} lacks a commit since a disk error; run the same command again")
            self._chain.commit(self._epoch, data)
            self._is_behind = True
        try:
            self._append(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._mend()
            raise OutputError(f"cannot write {disk_error(error, self._path)}") from error
        self._num_bytes += len(data)
        self._num_commits += 1
        self._is_behind = False
        faults.point("manifest.after_fsync")

    def _append(self, data: bytes) -> None:
        self._mend()
        faults.point("manifest.before_write")
        self._is_torn = True
        # Two writes, so that tests can kill between them. It costs 5 µs; the fsync takes hundreds.
        half = len(data) // 2
        self._write(data[:half])
        faults.point("manifest.mid_line")
        self._write(data[half:])
        faults.point("manifest.after_write")
        os.fsync(self._file.fileno())
        self._check_place()
        self._is_torn = False

    def _check_place(self) -> None:
        """Raise OutputError if the file was deleted or replaced: no reader would see what is written to it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return
        raise gone(self._path)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _mend(self) -> None:
        """Cut off what a failed commit left behind."""
        if self._is_torn:
            os.ftruncate(self._file.fileno(), self._num_bytes)
            self._is_torn = False
