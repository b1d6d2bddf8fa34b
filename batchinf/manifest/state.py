"""Reads a job's logs: what the job is, which shards are done, what happened. `log.py` writes them."""

import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, job_folders
from batchinf.base.storage import Folder, adapter, reason
from batchinf.manifest.commit_log import Fields, damage, read_lines
from batchinf.manifest.lines import (
    BEGINNING,
    INPUT_JOB,
    SPEED,
    EventLine,
    Header,
    ModelFiles,
    Retry,
    SnapshotSums,
    read_line,
    read_started,
)
from batchinf.manifest.versions import check_version
from batchinf.records import BoolArray, Extent, InputJob, Part, PartCounts, Speed, StartedReplica
from batchinf.schedule.shards import follows, num_shards, rows_of_shards

NUM_KEPT_EVENTS = 1000
MANIFEST_FOLDER = "manifest"
_BEFORE_HEADER = {BEGINNING, "replica_started", "replica_ended"}
_LOG_NAME = re.compile(r"(\d{6,})\.jsonl")
_MAX_LOOKS = 200
_LOOK_AGAIN_S = 0.01


@dataclass(eq=False)
class State:
    """All logs together."""

    job_id: str | None = None
    """From the header, or from the beginning before there is one."""
    extents: tuple[Extent, ...] = ()
    source_fingerprints: tuple[str, ...] = ()
    """Of the input's version, one for each extent."""
    limits: dict[int, int | None] = field(default_factory=dict)
    """`input.limit`, by the number of the extent that raised it."""
    files: dict[str, str] = field(default_factory=dict)
    """Digests of the model's local files, by name; empty before they are known."""
    committed: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """[total_shards(extents)]."""
    parts: dict[int, Part] = field(default_factory=dict)
    """By shard."""
    retries: dict[int, Retry] = field(default_factory=dict)
    """By number."""
    events: deque[EventLine] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_EVENTS))
    """The last 1,000."""
    event_counts: Counter[str] = field(default_factory=Counter)
    """Of all events, by name."""
    kept: dict[str, EventLine] = field(default_factory=dict)
    """The last event of each `kept_as`, until it is forgotten."""
    device_s: float = 0.0
    """Sum over all `replica_ended` events."""
    done: EventLine | None = None
    """The event of the end; None while there is work left."""
    last_epoch: int = 0
    """Of the last log."""
    _header: Header | None = None
    _running: dict[str, StartedReplica] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    """Of the logs, before they were read."""

    @property
    def header(self) -> Header:
        """The latest header; `read_state` returns no state without one."""
        assert self._header is not None
        return self._header

    @property
    def has_header(self) -> bool:
        return self._header is not None

    @property
    def is_beginning(self) -> bool:
        """Whether the logs are empty, or have only events of starts that did not finish."""
        is_empty = not (self._header or self.extents or self.parts)
        names = {event.name for event in self.events}
        return is_empty and names <= _BEFORE_HEADER and (self.job_id is not None or not names)

    @property
    def lowered(self) -> Fields:
        """The fields of the last `oom_step_down`; none if there was none."""
        return self.kept["oom_step_down"].fields if "oom_step_down" in self.kept else {}

    @property
    def speed(self) -> Speed | None:
        """The speed of the last run that ended; None if there was none."""
        return adapter(Speed).validate_python(self.kept[SPEED].fields["speed"]) if SPEED in self.kept else None

    @property
    def epoch_events(self) -> list[EventLine]:
        """Those of `events` that are from the last epoch."""
        events = list(self.events)
        return events[max((place for place, event in enumerate(events) if event.name == "epoch"), default=0) :]

    @property
    def slower(self) -> tuple[str, ...]:
        """What engines of the last epoch did without, if it makes them much slower: a line for each."""
        settings = [event.fields.get("settings", {}) for event in self.epoch_events if event.name == "ready"]
        return tuple(dict.fromkeys(line for each in settings for line in each.get("slower", ())))

    @property
    def limit(self) -> int | None:
        """`input.limit` as it was last raised; None means no limit."""
        return self.limits[max(self.limits)] if self.limits else self.header.identity.get("input.limit")

    @property
    def is_in_order(self) -> bool:
        """Whether rows run in the order of their positions."""
        return "order" not in self.header.layout

    @property
    def is_done(self) -> bool:
        """Whether the job is done, and no rows came later."""
        return self.done is not None

    @property
    def has_devices(self) -> bool:
        """Whether replicas had GPUs, by the starts that the manifest still records."""
        return any(event.fields.get("devices") for event in self.events if event.name == "replica_started")

    @property
    def running_replicas(self) -> tuple[StartedReplica, ...]:
        """Incarnations with a `replica_started` event and no `replica_ended` event."""
        return tuple(self._running.values())

    def repairs(self, last: int | None = None) -> tuple[Retry, ...]:
        """The retries that take rows from files, up to this one, in their order."""
        retries = (self.retries[number] for number in sorted(self.retries) if last is None or number <= last)
        return tuple(retry for retry in retries if retry.repair is not None)

    @property
    def input_job(self) -> InputJob | None:
        """The job whose output this one reads, as it was when its rows were last taken in."""
        event = self.kept.get(INPUT_JOB)
        return self.header.input_job if event is None else adapter(InputJob).validate_python(event.fields["input_job"])

    @property
    def counts(self) -> PartCounts:
        """The sums over all parts; 60 ms for 100,000 of them."""
        return PartCounts.sum(self.parts.values())

    @property
    def num_inputs_committed(self) -> int:
        """Input rows of all parts."""
        return rows_of_shards(self.extents, self.committed)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    def note(self, part: Part) -> None:
        """Add a part; it replaces an earlier one of the same shard."""
        self.committed[part.shard] = True
        self.parts[part.shard] = part

    def forget(self, shard: int) -> None:
        """Count a shard as not committed, in this object only."""
        if self.parts.pop(shard, None) is not None:
            self.committed[shard] = False

    def note_retry(self, retry: Retry) -> None:
        """Add a retry that has begun; the job is no longer done."""
        self.retries[retry.number] = retry
        self.done = None

    def apply(self, fields: Fields) -> None:
        """Apply a line; unknown kinds are ignored. Raises LookupError or ValueError if it cannot follow."""
        match read_line(fields):
            case Part() as part:
                self.note(part)
            case EventLine() as event:
                self._apply_event(fields["kind"], event)
            case Retry() as retry:
                self.note_retry(retry)
            case ModelFiles(files):
                self.files = files
            case Header() as header:
                self._header = header
                self.job_id = header.job_id
            case Extent() as extent:
                self._extend(extent, fields)
            case SnapshotSums() as snapshot:
                self._begin_with(snapshot)

    def _apply_event(self, kind: str, event: EventLine) -> None:
        match kind:
            case "event":
                self._happened(event)
            case "counted_event":
                self.events.append(event)
            case "kept_event":
                self.kept[event.fields["kept_as"]] = event
            case "done":
                self.done = event

    def _begin_with(self, snapshot: SnapshotSums) -> None:
        self.device_s = snapshot.device_s
        self.event_counts = Counter(snapshot.event_counts)
        self._running = {replica.incarnation: replica for replica in snapshot.running_replicas}

    def _extend(self, extent: Extent, line: Fields) -> None:
        if not follows(self.extents, extent):
            raise LookupError(f"{extent} does not follow {self.extents}")
        if "limit" in line:
            self.limits[len(self.extents)] = line["limit"]
        self.extents += (extent,)
        self.source_fingerprints += (line["source_fingerprint"],)
        self.committed = np.concatenate([self.committed, np.zeros(num_shards(extent), dtype=np.bool_)])
        self.done = None

    def _happened(self, event: EventLine) -> None:
        self.events.append(event)
        self.event_counts[event.name] += 1
        if event.name == "forgotten":
            self.kept.pop(event.fields["kept_as"], None)
        elif "kept_as" in event.fields:
            self.kept[event.fields["kept_as"]] = event
        if event.name == BEGINNING:
            self.job_id = event.fields["job_id"]
        elif event.name == "replica_started":
            self._running[event.fields["incarnation"]] = read_started(event)
        elif event.name == "replica_ended":
            self._running.pop(event.fields["incarnation"], None)
            self.device_s += event.fields["device_s"]
        elif event.name == "lost":
            self.done = None
            for shard in event.fields["shards"]:
                self.forget(shard)


def read_state(folder: Folder, known: State | None = None) -> State | None:
    """The state of all logs; None if nothing was ever committed. 100,000 parts take about a second.

    known: from an earlier call; returned if the logs, which only grow, still have the same sizes. Needs no lock: if a
    compaction replaces the logs meanwhile, it reads again. Raises OutputError for damage and a newer format.
    """
    state = _read(folder, known)
    return state if state.has_header else None


def read_jobs(out: str) -> Iterator[tuple[JobFolder, State | None]]:
    """The job in an output folder, or all its slices in row order, each with its state; None if it has not begun."""
    for job in job_folders(out):
        yield job, read_state(job.folder)


def read_beginning(folder: Folder) -> State:
    """The state also of a job without a header: id, replicas and events of unfinished starts. Empty without any."""
    return _read(folder, None)


def _read(folder: Folder, known: State | None) -> State:
    if known is None:
        folder.refuse_pipes()
    last_seen: object = None
    for _ in range(_MAX_LOOKS):
        state = State()
        failure: OSError | OutputError | None = None
        logs = list_logs(folder)
        sizes = folder.sizes(MANIFEST_FOLDER)
        if known is not None and known._sizes == sizes:
            return known
        try:
            state = _read_logs(folder, logs)
        except (OSError, OutputError) as error:
            failure = error
        # During a compaction a listing may lack both a deleted log and its successor, and two equal listings do not
        # prove that both are complete. Only real damage looks the same twice.
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
    """The greatest epoch that has a log, whole or torn; 0 if there is none."""
    return max((epoch for epoch, _ in list_logs(folder)), default=0)


def list_logs(folder: Folder) -> list[tuple[int, str]]:
    """The logs by epoch: (epoch, name in the output folder)."""
    # Other files there are not ours.
    matches = [_LOG_NAME.fullmatch(name) for name in folder.list(MANIFEST_FOLDER)]
    return sorted((int(match[1]), f"{MANIFEST_FOLDER}/{match[0]}") for match in matches if match)


def _read_logs(folder: Folder, logs: list[tuple[int, str]]) -> State:
    state = State()
    for _, name in logs[_first_needed(folder, logs) :]:
        state = _read_log(folder, name, state)
    if state.has_header:
        state.last_epoch = logs[-1][0]
    elif not state.is_beginning:
        raise damage(folder, logs[0][1], "neither it nor a later log has the job's header")
    return state


def _first_needed(folder: Folder, logs: list[tuple[int, str]]) -> int:
    """The place of the last log with a whole snapshot, or 0: without one, a log needs all logs before it."""
    for place in range(len(logs) - 1, 0, -1):
        kinds = (fields.get("kind") for _, fields in read_lines(folder, logs[place][1]))
        if next(kinds, None) == "snapshot" and "snapshot_end" in kinds:
            return place
    return 0


def _read_log(folder: Folder, name: str, before: State) -> State:
    """The state after a log. A snapshot starts afresh; one without its end is ignored."""
    state = before
    replaced = list[str]()
    owner = before.job_id
    for number, fields in read_lines(folder, name):
        owner = owner or fields.get("job_id")
        if fields.get("job_id", owner) != owner:
            raise damage(folder, name, f"it is a log of another job, {fields['job_id']}")
        try:
            check_version(folder, fields)
            if fields["kind"] == "snapshot":
                state = State()
                replaced = fields["replaces"]
            elif fields["kind"] == "snapshot_end":
                replaced = []
            state.apply(fields)
        except (LookupError, ValueError) as error:
            raise damage(folder, name, f"line {number} contradicts the lines before it") from error
    if any(not folder.exists(log) for log in replaced):
        raise damage(folder, name, "its snapshot is incomplete")
    return before if replaced else state


class Committed:
    """Totals of the shards and rows that were run and committed."""

    def __init__(self, num_shards: int, num_rows: int, num_errors: int, num_inputs: int) -> None:
        """num_inputs: input rows. num_rows: output rows."""
        self.num_shards = num_shards
        self.num_inputs = num_inputs
        self.num_rows = num_rows
        self.num_errors = num_errors

    def add(self, part: Part, num_inputs: int) -> None:
        """Count a part that has been committed. num_inputs: input rows that were run for it."""
        self.num_shards += 1
        self.num_inputs += num_inputs
        self.num_rows += part.num_rows - part.num_kept
        self.num_errors += part.num_errors - part.num_kept_errors
