"""The job's record: what the job is, what is done, what happened; one log for each epoch.

A commit that a crash tears costs nothing but work: a part that no line names is verified and adopted, or run again.
"""

import dataclasses
import datetime
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from batchinf import faults
from batchinf.commit_log import CommitLog, Fields, damage, encode_commits, read_lines
from batchinf.errors import OutputError
from batchinf.lock import JobLock
from batchinf.manifest_lines import check_line
from batchinf.part_line import PartLine, part_line
from batchinf.records import Part, ProcessGroup
from batchinf.retry_log import Retry
from batchinf.shards import Extent, follows, num_shards
from batchinf.storage import Folder, disk_error, reason

FORMAT_VERSION = 1
NUM_KEPT_EVENTS = 1000
_FOLDER = "manifest"
_LOG_NAME = re.compile(r"(\d{6,})\.jsonl")
_LINES_PER_COMMIT = 1000
_MAX_LOOKS = 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Header:
    """What the job is. identity, layout and spec are JSON values; created_at is UTC in ISO format."""

    format_version: int
    job_id: str
    created_at: str
    identity: dict[str, Any]
    fingerprint: str
    layout: dict[str, Any]
    spec: dict[str, Any]


class EventLine(NamedTuple):
    """Something that happened, at a UTC time in ISO format."""

    name: str
    at: str
    fields: dict[str, Any]


# What a reader needs of an event; the line's own keys are taken.
_REQUIRED = {
    "replica_started": {field.name for field in dataclasses.fields(ProcessGroup)},
    "replica_ended": {"incarnation", "device_s"},
    "lost": {"shards"},
}
_TAKEN = {"kind", "name", "at", "commit", "crc"}


class State:
    """What the logs say, all taken together.

    committed: bool [total_shards(extents)]. parts: by shard. retries: by number. replacing: by shard, parts that may
    have been put in the place of those in `parts`, or not yet. source_fingerprints: one for each extent. events: the
    last 1,000; event_counts: of all, by name. kept: the last event of each `kept_as`, until it is forgotten. device_s:
    sum over all `replica_ended` events. done: the event of the end, None while there is work left. last_epoch: of the
    last log.
    """

    def __init__(self) -> None:
        self._header: Header | None = None
        self.extents: tuple[Extent, ...] = ()
        self.source_fingerprints: tuple[str, ...] = ()
        self.committed: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.parts: dict[int, PartLine] = {}
        self.num_rows = self.num_errors = self.num_bytes = self.num_prompt_tokens = self.num_output_tokens = 0
        self.events: deque[EventLine] = deque(maxlen=NUM_KEPT_EVENTS)
        self.event_counts: Counter[str] = Counter()
        self.device_s = 0.0
        self.done: EventLine | None = None
        self.retries: dict[int, Retry] = {}
        self.replacing: dict[int, PartLine] = {}
        self.last_epoch = 0
        self.kept: dict[str, EventLine] = {}
        self._groups: dict[str, ProcessGroup] = {}
        self._sizes: dict[str, int] = {}  # of the logs, before they were read

    @property
    def header(self) -> Header:
        """The latest header; `read_state` gives no state without one."""
        assert self._header is not None
        return self._header

    @property
    def has_header(self) -> bool:
        """Whether a header was read yet."""
        return self._header is not None

    @property
    def lowered(self) -> Fields:
        """The fields of the last `oom_step_down`; none if there was none."""
        return self.kept["oom_step_down"].fields if "oom_step_down" in self.kept else {}

    @property
    def is_done(self) -> bool:
        """Whether the job was said to be done, and no rows came later."""
        return self.done is not None

    @property
    def process_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups that were started and not said to have ended."""
        return tuple(self._groups.values())

    def note(self, part: Part | PartLine) -> None:
        """Count a part; a later one of the same shard takes the earlier one's place."""
        line = part if isinstance(part, PartLine) else PartLine.of(part)
        self.forget(line.shard)
        self.replacing.pop(line.shard, None)
        self.committed[line.shard] = True
        self.parts[line.shard] = line
        self._count(line, 1)

    def forget(self, shard: int) -> None:
        """A shard counts as not committed after all; in this object only."""
        line = self.parts.pop(shard, None)
        if line is not None:
            self.committed[shard] = False
            self._count(line, -1)

    def note_retry(self, retry: Retry) -> None:
        """A retry has begun; the job is done no longer."""
        self.retries[retry.number] = retry
        self.done = None

    def _count(self, line: PartLine, sign: int) -> None:
        self.num_rows += sign * line.num_rows
        self.num_errors += sign * line.num_errors
        self.num_bytes += sign * line.num_bytes
        self.num_prompt_tokens += sign * line.num_prompt_tokens
        self.num_output_tokens += sign * line.num_output_tokens

    def apply(self, fields: Fields) -> None:
        """Take in a line, passing over unknown kinds. Raises LookupError if it cannot follow those before it."""
        match fields["kind"]:
            case "part":
                self.note(part_line(fields))
            case "replacing":
                line = part_line(fields)
                self.replacing[line.shard] = line
            case "retry":
                self.note_retry(_pick(Retry, fields))
            case "event":
                self._happened(_event(fields))
            case "header":
                self._header = _pick(Header, fields)
            case "extent":
                self._extend(_pick(Extent, fields), fields["source_fingerprint"])
            case "done":
                self.done = _event(fields)
            case "snapshot":
                self.device_s, self.event_counts = fields["device_s"], Counter(fields["event_counts"])
                self._groups = {group["incarnation"]: _pick(ProcessGroup, group) for group in fields["process_groups"]}
            case "counted_event":
                self.events.append(_event(fields))
            case "kept_event":
                self.kept[fields["kept_as"]] = _event(fields)

    def _extend(self, extent: Extent, source_fingerprint: str) -> None:
        if not follows(self.extents, extent):
            raise LookupError(f"{extent} does not follow {self.extents}")
        self.extents += (extent,)
        self.source_fingerprints += (source_fingerprint,)
        self.committed = np.concatenate([self.committed, np.zeros(num_shards(extent), dtype=np.bool_)])
        self.done = None

    def _happened(self, event: EventLine) -> None:
        self.events.append(event)
        self.event_counts[event.name] += 1
        if event.name == "forgotten":
            self.kept.pop(event.fields["kept_as"], None)
        elif "kept_as" in event.fields:
            self.kept[event.fields["kept_as"]] = event
        if event.name == "replica_started":
            self._groups[event.fields["incarnation"]] = _pick(ProcessGroup, event.fields)
        elif event.name == "replica_ended":
            self._groups.pop(event.fields["incarnation"], None)
            self.device_s += event.fields["device_s"]
        elif event.name == "lost":
            self.done = None
            for shard in event.fields["shards"]:
                self.forget(shard)


def read_state(folder: Folder, known: State | None = None) -> State | None:
    """What the logs say; None where nothing was ever committed. 100,000 parts take about a second.

    known: of an earlier call; it is given back if the logs, which only grow, have the same sizes. Needs no lock: where
    a compaction has put other logs in their place, it begins again. Raises OutputError for damage and a newer format.
    """
    for _ in range(_MAX_LOOKS):
        state, failure, logs, sizes = None, None, list_logs(folder), folder.sizes(_FOLDER)
        if known is not None and known._sizes == sizes:
            return known
        try:
            state = _read_logs(folder, logs)
        except (OSError, OutputError) as error:
            failure = error
        # A listing is no snapshot: it may lack both a log that has just been deleted and the one in its place.
        if logs == list_logs(folder):
            break
    if isinstance(failure, OSError):
        raise OutputError(f"cannot read {folder.path(_FOLDER)}: {reason(failure)}") from failure
    if failure is not None:
        raise failure
    if state is not None:
        state._sizes = sizes
    return state


def last_epoch(folder: Folder) -> int:
    """The greatest epoch that has a log, whole or torn; 0 where there is none."""
    return max((epoch for epoch, _ in list_logs(folder)), default=0)


def list_logs(folder: Folder) -> list[tuple[int, str]]:
    """The logs by epoch: (epoch, name in the output folder)."""
    # Whatever else lies there is not ours: left alone.
    matches = [_LOG_NAME.fullmatch(name) for name in folder.list(_FOLDER)]
    return sorted((int(match[1]), f"{_FOLDER}/{match[0]}") for match in matches if match)


def _read_logs(folder: Folder, logs: list[tuple[int, str]]) -> State | None:
    state = State()
    for _, name in logs:
        state = _read_log(folder, name, state)
    if state.has_header:
        state.last_epoch = logs[-1][0]
        return state
    if state.extents or state.parts or state.events:
        raise damage(folder, logs[0][1], "neither it nor a later log has the job's header")
    return None


def _read_log(folder: Folder, name: str, before: State) -> State:
    """The state after a log. A snapshot starts afresh; one that was not written to its end counts for nothing."""
    state, replaced = before, []
    owner = before.header.job_id if before.has_header else None
    for number, fields in read_lines(folder, name):
        owner = owner or fields.get("job_id")
        if fields.get("job_id", owner) != owner:
            raise damage(folder, name, f"it is a log of another job, {fields['job_id']}")
        try:
            check_version(folder, fields)
            check_line(fields)
            if fields["kind"] == "snapshot":
                state, replaced = State(), fields["replaces"]
            elif fields["kind"] == "snapshot_end":
                replaced = []
            state.apply(fields)
        except (LookupError, ValueError) as error:
            raise damage(folder, name, f"line {number} does not follow from those before it") from error
    if any(not folder.exists(log) for log in replaced):
        raise damage(folder, name, "its snapshot lacks the end")
    return before if replaced else state


def check_version(folder: Folder, fields: Fields) -> None:
    """Raise OutputError for a line of a later format version."""
    version = fields.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        what = f"{folder.root} was written by a newer batchinf, in format version {version}"
        raise OutputError(f"{what}; this one reads up to version {FORMAT_VERSION}: install a newer one")


def _event(fields: Fields) -> EventLine:
    rest = {name: value for name, value in fields.items() if name not in _TAKEN}
    return EventLine(fields["name"], fields["at"], rest)


def _pick(cls: type[_T], fields: Fields) -> _T:
    return cls(*(fields[field.name] for field in dataclasses.fields(cls)))  # type: ignore[arg-type]


def _event_line(kind: str, event: EventLine) -> Fields:
    return {"kind": kind, "name": event.name, "at": event.at, **event.fields}


def _extent_line(extent: Extent, source_fingerprint: str) -> Fields:
    return {"kind": "extent", **dataclasses.asdict(extent), "source_fingerprint": source_fingerprint}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def snapshot_commits(state: State, replaces: list[str]) -> list[list[Fields]]:
    """All that the state says, in commits: several, so that damage to a snapshot is never taken for a torn tail."""
    lines = list(_snapshot_lines(state, replaces))
    commits = [lines[start : start + _LINES_PER_COMMIT] for start in range(0, len(lines), _LINES_PER_COMMIT)]
    return [*commits, [{"kind": "snapshot_end"}]]


def _snapshot_lines(state: State, replaces: list[str]) -> Iterator[Fields]:
    groups = [dataclasses.asdict(group) for group in state.process_groups]
    counts = {"device_s": state.device_s, "event_counts": state.event_counts, "process_groups": groups}
    yield {"kind": "snapshot", "at": _now(), "replaces": replaces, **counts}
    yield {"kind": "header", **dataclasses.asdict(state.header)}
    yield from map(_extent_line, state.extents, state.source_fingerprints)
    yield from ({"kind": "retry", **dataclasses.asdict(retry)} for retry in state.retries.values())
    yield from ({"kind": "part", **part._asdict()} for part in state.parts.values())
    yield from ({"kind": "replacing", **part._asdict()} for part in state.replacing.values())
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
        name = f"{_FOLDER}/{epoch:06d}.jsonl"
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
        self._check_lock()
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

    def extent(self, extent: Extent, source_fingerprint: str) -> None:
        """There are these rows to run; a job that was done is done no longer."""
        self._lines.append(_extent_line(extent, source_fingerprint))

    def part(self, part: Part | PartLine, replica: int | None = None, incarnation: str = "") -> None:
        """A shard is done: this published part holds it."""
        self._lines.append({"kind": "part", **PartLine.of(part, replica, incarnation)._asdict()})

    def replacing(self, part: Part) -> None:
        """This part is about to be put in the place of its shard's, whose line counts until its own comes."""
        self._lines.append({"kind": "replacing", **PartLine.of(part)._asdict()})

    def retry(self, retry: Retry) -> None:
        """A retry begins; a job that was done is done no longer."""
        self._lines.append({"kind": "retry", "at": _now(), **dataclasses.asdict(retry)})

    def event(self, name: str, /, **fields: Any) -> None:
        """Something happened. `fields` are JSON values.

        A `replica_started` has at least the fields of ProcessGroup, a `replica_ended` incarnation and device_s; the
        `shards` of a `lost` count as not committed from here on, and the job as not done. One with `kept_as` stays in
        `State.kept` under that name, until the next with the same, or a `forgotten` one.
        """
        if wrong := (_REQUIRED.get(name, set()) - fields.keys()) | (_TAKEN & fields.keys()):
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
            self._check_lock()
            self._log.commit(self._lines)
            self._lines.clear()

    def close(self) -> None:
        """Close the log; lines that are not committed are dropped."""
        self._log.close()

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()
