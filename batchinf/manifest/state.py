"""Reads a job's logs: what the job is, and which shards are done. `log.py` writes them."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from batchinf.base.errors import OutputError
from batchinf.base.slices import job_folders
from batchinf.base.storage import Folder, reason
from batchinf.manifest.commit_log import Fields, damage, read_lines
from batchinf.manifest.format_2 import OldLines
from batchinf.manifest.lines import (
    KEYS,
    Beginning,
    Done,
    EndedReplica,
    Header,
    Lost,
    ModelFiles,
    Platform,
    Retry,
    Speed,
    StartedReplica,
    read_line,
)
from batchinf.manifest.versions import check_version
from batchinf.records import BoolArray, Part, PartCounts
from batchinf.schedule.shards import Extent, follows, num_shards, rows_of_shards

MANIFEST_FOLDER = "manifest"
_BEFORE_HEADER = {"beginning", "started", "ended"}
_LOG_NAME = re.compile(r"(\d{6,})\.jsonl")
_Record = TypeVar("_Record")
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
    committed: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """[total_shards(extents)]."""
    parts: dict[int, Part] = field(default_factory=dict)
    """By shard."""
    retries: dict[int, Retry] = field(default_factory=dict)
    """By number."""
    kept: dict[tuple[type[Any], object], Any] = field(default_factory=dict)
    """By type and key, the records of `KEYS`, the last one last."""
    device_s: float = 0.0
    """Sum over all replicas that have ended."""
    had_devices: bool = False
    """Whether one of these had GPUs."""
    has_lost: bool = False
    """Whether a shard has ever lost its part."""
    done: Done | None = None
    """None while there is work left."""
    last_epoch: int = 0
    """Of the last log."""
    _header: Header | None = None
    _kinds: set[str] = field(default_factory=set)
    """Of all lines."""
    _sizes: dict[str, int] = field(default_factory=dict)
    """Of the logs, before they were read."""

    @property
    def header(self) -> Header:
        """The latest header; `read_state` returns no state without one."""
        assert self._header is not None
        return self._header

    def of(self, record: type[_Record]) -> list[_Record]:
        """The records of a type of `KEYS`."""
        return [each for (kind, _), each in self.kept.items() if kind is record]

    @property
    def files(self) -> dict[str, str]:
        """Digests of the model's local files, by name; empty before they are known."""
        return next((record.files for record in self.of(ModelFiles)), {})

    @property
    def has_header(self) -> bool:
        return self._header is not None

    @property
    def is_beginning(self) -> bool:
        """Whether the logs are empty, or have only lines of starts that did not finish."""
        return self._kinds <= _BEFORE_HEADER and (self.job_id is not None or not self._kinds)

    @property
    def speed(self) -> Speed | None:
        """The speed of the run that ended the job."""
        return None if self.done is None else self.done.speed

    @property
    def slower(self) -> tuple[str, ...]:
        """What engines of the last epoch did without, if it makes them much slower: a line for each."""
        settings = [each.settings for each in self.of(Platform) if each.epoch == self.last_epoch]
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
        """Whether replicas had GPUs."""
        return self.had_devices or any(replica.devices for replica in self.of(StartedReplica))

    def repairs(self, last: int | None = None) -> tuple[Retry, ...]:
        """The retries that take rows from files, up to this one, in their order."""
        retries = (self.retries[number] for number in sorted(self.retries) if last is None or number <= last)
        return tuple(retry for retry in retries if retry.repair is not None)

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
        line = read_line(fields)
        self._kinds.add(fields["kind"])
        match line:
            case Part() as part:
                self.note(part)
            case Extent() as extent:
                self._extend(extent, fields)
            case Retry() as retry:
                self.note_retry(retry)
            case Lost(shards):
                self._lose(shards)
            case Done() as done:
                self.done = done
            case Beginning(job_id):
                self.job_id = job_id
            case Header() as header:
                self._header = header
                self.job_id = header.job_id
            case EndedReplica() as ended:
                self._note_ended(ended)
            case record if type(record) in KEYS:
                self._keep(record)

    def _note_ended(self, ended: EndedReplica) -> None:
        self.kept.pop((StartedReplica, ended.incarnation), None)
        self.device_s += ended.device_s
        self.had_devices |= ended.has_devices

    def _keep(self, record: Any) -> None:
        place = (type(record), getattr(record, KEYS[type(record)] or "__class__"))
        self.kept.pop(place, None)
        if not getattr(record, "is_over", False):
            self.kept[place] = record

    def _lose(self, shards: list[int]) -> None:
        self.has_lost = True
        self.done = None
        for shard in shards:
            self.forget(shard)

    def _extend(self, extent: Extent, line: Fields) -> None:
        if not follows(self.extents, extent):
            raise LookupError(f"{extent} does not follow {self.extents}")
        if "limit" in line:
            self.limits[len(self.extents)] = line["limit"]
        self.extents += (extent,)
        self.source_fingerprints += (line["source_fingerprint"],)
        self.committed = np.concatenate([self.committed, np.zeros(num_shards(extent), dtype=np.bool_)])
        self.done = None


def read_state(folder: Folder, known: State | None = None) -> State | None:
    """The state of all logs; None if nothing was ever committed. 100,000 parts take about a second.

    known: from an earlier call; returned if the logs, which only grow, still have the same sizes. Needs no lock: if a
    compaction replaces the logs meanwhile, it reads again. Raises OutputError for damage and a newer format.
    """
    state = _read(folder, known)
    return state if state.has_header else None


def read_jobs(out: str) -> Iterator[tuple[Folder, State | None]]:
    """The job in an output folder, or all its slices in row order, each with its state; None if it has not begun."""
    for job in job_folders(out):
        yield job, read_state(job)


def read_beginning(folder: Folder) -> State:
    """The state also of a job without a header: id and replicas of unfinished starts. Empty without any."""
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
    old = OldLines()
    for _, name in logs[_first_needed(folder, logs) :]:
        state = _read_log(folder, name, state, old)
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


def _read_log(folder: Folder, name: str, before: State, old: OldLines) -> State:
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
            for line in (fields,) if fields["kind"] == "part" else old.translated(fields):
                state.apply(line)
        except (LookupError, ValueError) as error:
            raise damage(folder, name, f"line {number} contradicts the lines before it") from error
    if any(not folder.exists(log) for log in replaced):
        raise damage(folder, name, "its snapshot is incomplete")
    return before if replaced else state
