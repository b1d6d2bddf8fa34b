"""What a job's logs say: what the job is, which shards are done, what happened. `manifest` writes them."""

import dataclasses
import re
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, reason
from batchinf.manifest.commit_log import Fields, damage, read_lines
from batchinf.manifest.lines import PartLine, check_line, part_line
from batchinf.manifest.names import Retry
from batchinf.records import Extent, Part, StartedReplica
from batchinf.schedule.shards import follows, num_shards

MANIFEST_VERSION = 1
NUM_KEPT_EVENTS = 1000
MANIFEST_FOLDER = "manifest"
# All that happens before a job has a header, where its replicas have a head start.
HEAD_START = "head_start"
_BEFORE_HEADER = {HEAD_START, "replica_started", "replica_ended"}
_LOG_NAME = re.compile(r"(\d{6,})\.jsonl")
_MAX_LOOKS, _LOOK_AGAIN_S = 200, 0.01
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


TAKEN = {"kind", "name", "at", "commit", "crc"}


class State:
    """What the logs say, all taken together.

    committed: bool [total_shards(extents)]. parts: by shard. retries: by number. replacing: by shard, parts that may
    have been put in the place of those in `parts`, or not yet. source_fingerprints: one for each extent, of what the
    job had taken in of its input by then. limits: `input.limit`, by the number of the extent that raised it. events:
    the last 1,000; event_counts: of all, by name. kept: the last event of each `kept_as`, until it is forgotten.
    device_s: sum over all `replica_ended` events. done: the event of the end, None while there is work left.
    last_epoch: of the last log.
    """

    def __init__(self) -> None:
        self._header: Header | None = None
        # The header's; before there is one, that of replicas that had a head start.
        self.job_id: str | None = None
        self.extents: tuple[Extent, ...] = ()
        self.source_fingerprints: tuple[str, ...] = ()
        self.limits: dict[int, int | None] = {}
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
        self._running: dict[str, StartedReplica] = {}
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
    def is_beginning(self) -> bool:
        """Whether there is nothing but a head start, or nothing at all."""
        is_empty = not (self._header or self.extents or self.parts)
        names = {event.name for event in self.events}
        return is_empty and names <= _BEFORE_HEADER and (self.job_id is not None or not names)

    @property
    def lowered(self) -> Fields:
        """The fields of the last `oom_step_down`; none if there was none."""
        return self.kept["oom_step_down"].fields if "oom_step_down" in self.kept else {}

    @property
    def limit(self) -> int | None:
        """`input.limit` as it was last raised; None is none."""
        return self.limits[max(self.limits)] if self.limits else self.header.identity.get("input.limit")

    @property
    def is_done(self) -> bool:
        """Whether the job was said to be done, and no rows came later."""
        return self.done is not None

    @property
    def running_replicas(self) -> tuple[StartedReplica, ...]:
        """Incarnations that were started and not said to have ended."""
        return tuple(self._running.values())

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
                self.job_id = self._header.job_id
            case "extent":
                if "limit" in fields:
                    self.limits[len(self.extents)] = fields["limit"]
                self._extend(_extent(fields), fields["source_fingerprint"])
            case "done":
                self.done = _event(fields)
            case "snapshot":
                self.device_s, self.event_counts = fields["device_s"], Counter(fields["event_counts"])
                running = (_pick(StartedReplica, replica) for replica in fields["running_replicas"])
                self._running = {replica.incarnation: replica for replica in running}
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
        if event.name == HEAD_START:
            self.job_id = event.fields["job_id"]
        elif event.name == "replica_started":
            self._running[event.fields["incarnation"]] = _pick(StartedReplica, event.fields)
        elif event.name == "replica_ended":
            self._running.pop(event.fields["incarnation"], None)
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
    state = _read(folder, known)
    return state if state.has_header else None


def read_beginning(folder: Folder) -> State:
    """What the logs say of a job of which `read_state` gives none: the head start of its replicas in earlier lives.

    Its id, the process groups that may still be there, and their events; nothing where none of it came so far.
    """
    return _read(folder, None)


def _read(folder: Folder, known: State | None) -> State:
    last_seen: object = None
    for _ in range(_MAX_LOOKS):
        state, failure, logs, sizes = State(), None, list_logs(folder), folder.sizes(MANIFEST_FOLDER)
        if known is not None and known._sizes == sizes:
            return known
        try:
            state = _read_logs(folder, logs)
        except (OSError, OutputError) as error:
            failure = error
        # A listing is no snapshot: it may lack both a log that has just been deleted and the one in its place. Nor do
        # two that agree prove that both saw all. Damage stays as it is; what a compaction makes of a look does not.
        seen = (str(failure), sizes)
        if logs == list_logs(folder) and (failure is None or seen == last_seen):
            break
        last_seen = seen
        time.sleep(_LOOK_AGAIN_S)
    if isinstance(failure, OSError):
        raise OutputError(f"cannot read {folder.path(MANIFEST_FOLDER)}: {reason(failure)}") from failure
    if failure is not None:
        raise failure
    state._sizes = sizes
    return state


def last_epoch(folder: Folder) -> int:
    """The greatest epoch that has a log, whole or torn; 0 where there is none."""
    return max((epoch for epoch, _ in list_logs(folder)), default=0)


def list_logs(folder: Folder) -> list[tuple[int, str]]:
    """The logs by epoch: (epoch, name in the output folder)."""
    # Whatever else lies there is not ours: left alone.
    matches = [_LOG_NAME.fullmatch(name) for name in folder.list(MANIFEST_FOLDER)]
    return sorted((int(match[1]), f"{MANIFEST_FOLDER}/{match[0]}") for match in matches if match)


def _read_logs(folder: Folder, logs: list[tuple[int, str]]) -> State:
    state = State()
    for _, name in logs:
        state = _read_log(folder, name, state)
    if state.has_header:
        state.last_epoch = logs[-1][0]
    elif not state.is_beginning:
        raise damage(folder, logs[0][1], "neither it nor a later log has the job's header")
    return state


def _read_log(folder: Folder, name: str, before: State) -> State:
    """The state after a log. A snapshot starts afresh; one that was not written to its end counts for nothing."""
    state, replaced = before, []
    owner = before.job_id
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
    if isinstance(version, int) and version > MANIFEST_VERSION:
        what = f"{folder.root} was written by a newer batchinf, in format version {version}"
        raise OutputError(f"{what}; this one reads up to version {MANIFEST_VERSION}: install a newer one")


def _extent(fields: Fields) -> Extent:
    # Lines of before there were selections are of all rows, whose places are their positions.
    given = {name: value for name, value in fields.items() if value is not None}
    first_row = given.get("first_row", given["start"])
    own = {"first_row": first_row, "stop_row": first_row + given["num_rows"], "selection": None, "order": None}
    return _pick(Extent, {**own, **given})


def _event(fields: Fields) -> EventLine:
    rest = {name: value for name, value in fields.items() if name not in TAKEN}
    return EventLine(fields["name"], fields["at"], rest)


def _pick(cls: type[_T], fields: Fields) -> _T:
    return cls(*(fields[field.name] for field in dataclasses.fields(cls)))  # type: ignore[arg-type]


class Committed:
    """Totals of what has been run and committed."""

    def __init__(self, num_shards: int, num_rows: int, num_errors: int) -> None:
        self.num_shards = num_shards
        self.num_rows = num_rows
        self.num_errors = num_errors

    def add(self, part: Part) -> None:
        """Count a part that has been committed."""
        self.num_shards += 1
        self.num_rows += part.num_rows - part.num_kept
        self.num_errors += part.num_errors - part.num_kept_errors
