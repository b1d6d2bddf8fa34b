"""Writes and reads `status.json`, the state of a running job, and `telemetry/`, the history of engines and devices."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from batchinf.base.storage import Folder, adapter, open_log
from batchinf.engines.protocol import EngineStats
from batchinf.fleet.devices import DeviceLook
from batchinf.manifest.names import TELEMETRY_FOLDER
from batchinf.replica.messages import Progress

STATUS_FILE = "status.json"
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica: its state, its place, and how full its engine is."""

    replica: int
    state: str
    host: str
    """Empty before it has said so."""
    start_detail: str
    """What a starting engine is doing, such as `loading weights 57/191`; empty if unknown."""
    devices: tuple[str, ...]
    device: str
    """The model of its devices; empty before its engine is up."""
    in_flight: int
    """Requests in the engine."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share from 0 to 1."""
    prefix_cache_hit_rate: float | None
    """Share from 0 to 1 of the prompt tokens that were looked up; None before the first."""
    restarts: int
    heard_at: float | None
    """When its last message came, in seconds since 1970; None before the first."""
    num_rows: int = 0
    """Output rows that its engines have answered in this run."""
    busy: float | None = None
    """Share, from 0 to 1, of the time since its engine is up in which it had requests; None if it is not up."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of a job. Rates and `left_s` are None until there is enough data for them."""

    state: str
    """Starting, running, stopping, ending, done, stopped or failed. A stopping job finishes running requests; in an
    ending one no request runs, and its engines end."""
    num_rows: int
    """Output rows."""
    num_rows_done: int = 0
    num_errors: int = 0
    """Output rows with an error."""
    errors: dict[str, int] = field(default_factory=dict)
    """Those since the coordinator started, by the error's type, the most frequent first."""
    num_shards: int = 0
    num_shards_done: int = 0
    num_prompt_tokens: int = 0
    """Tokens that the engines have run since the coordinator started."""
    num_output_tokens: int = 0
    """Tokens that the engines have generated since the coordinator started."""
    prompt_tokens_per_s: float | None = None
    """Over the last minute."""
    output_tokens_per_s: float | None = None
    """Over the last minute."""
    left_s: float | None = None
    stalled_by_disk_s: float = 0.0
    replicas: tuple[ReplicaStatus, ...] = ()
    devices: tuple[DeviceLook, ...] = ()
    """Of the job."""
    updated_at: float = 0.0
    """In seconds since 1970."""


class Rates:
    """Rates of the engines over a moving window. The first look is taken when an engine is up."""

    def __init__(self) -> None:
        # Each with its time, and the rows, prompt tokens and output tokens by then.
        self._looks: deque[tuple[float, int, int, int]] = deque()

    def look(self, now: float, reports: Sequence[Progress]) -> None:
        """Note what the engines have done by now, in seconds of any clock. reports: see `Fleet.last_reports`."""
        num_rows = sum(report.num_answered for report in reports)
        num_prompt_tokens = sum(report.num_prompt_tokens for report in reports)
        num_output_tokens = sum(report.num_output_tokens for report in reports)
        self._looks.append((now, num_rows, num_prompt_tokens, num_output_tokens))
        while len(self._looks) > 2 and now - self._looks[1][0] > _WINDOW_S:
            self._looks.popleft()

    @property
    def tokens_per_s(self) -> tuple[float, float] | None:
        """Prompt and output tokens a second; None before the first token."""
        if not self._looks or not any(self._looks[-1][1:]):
            return None
        return self._per_s(2), self._per_s(3)

    def left_s(self, num_rows: int, num_in_flight: int) -> float | None:
        """Seconds for `num_rows` output rows; None until the engines have answered as many rows as they now hold."""
        if not self._looks:
            return None
        num_answered = self._looks[-1][1]
        rows_per_s = self._per_s(1)
        return num_rows / rows_per_s if rows_per_s > 0 and num_answered >= num_in_flight else None

    def _per_s(self, place: int) -> float:
        """The rate of what stands at this place of a look."""
        first = self._looks[0]
        last = self._looks[-1]
        return max(0, last[place] - first[place]) / max(last[0] - first[0], 1e-3)


def write_status(folder: Folder, status: JobStatus) -> None:
    """Replace `status.json`, without fsync: it only informs users, so the last one may be lost."""
    folder.write_atomic(STATUS_FILE, adapter(JobStatus).dump_json(status), durable=False, fault="status")


def read_status(folder: Folder) -> JobStatus | None:
    """The last snapshot; None if there is none or it cannot be read."""
    try:
        return adapter(JobStatus).validate_json(folder.read(STATUS_FILE), strict=True)
    except (OSError, ValueError):
        return None


_LEAST_S = 1.0
_MOST_S = 15.0
# Interval between samples, as a share of the time since the start: 600 samples in the first ten minutes, then about
# 6,000 a day.
_SHARE = 1 / 600
# More replicas are sampled less often: the samples of a day then take 100 MB at most.
_MANY_REPLICAS = 64


ON_TRIAL = "on trial"  # the state of a replica that runs suspected rows, a few at a time


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """One sample of a replica. Counts are totals of its incarnation."""

    replica: int
    incarnation: str
    state: str
    num_running: int
    """Requests in the engine's batch."""
    num_waiting: int
    """Requests in the engine that wait for the batch."""
    num_ready: int
    """Tokenised requests that wait outside the engine."""
    kv_cache_usage: float
    """Share from 0 to 1."""
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_rows: int
    """Finished output rows, those from the journal too."""
    num_answered: int
    """Output rows that the engine answered."""
    steps: int
    stalled_by_disk_s: float
    """Time in which the engine had room but admission waited for the disk."""
    busy_s: float
    """Time in which the engine had requests."""

    @classmethod
    def of(cls, replica: int, incarnation: str, state: str, progress: Progress) -> "ReplicaLook":
        """The sample from a replica's last progress message."""
        # Not `asdict`, which copies every value: a sample would take five times as long.
        engine = {name: getattr(progress.engine, name) for name in _OF_ENGINE}
        engine["kv_cache_usage"] = round(engine["kv_cache_usage"], 4)
        counts = {name: getattr(progress, name) for name in _OF_PROGRESS}
        return cls(replica=replica, incarnation=incarnation, state=state, num_ready=progress.num_waiting, **engine,
                   **counts)  # fmt: skip


_LOOKED_AT = {each.name for each in fields(ReplicaLook)}
_OF_ENGINE = tuple(each.name for each in fields(EngineStats) if each.name in _LOOKED_AT)
_OF_PROGRESS = tuple(each.name for each in fields(Progress) if each.name in _LOOKED_AT.difference(_OF_ENGINE))


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of the telemetry."""

    at: float
    """In seconds since 1970."""
    replicas: tuple[ReplicaLook, ...]
    devices: tuple[DeviceLook, ...]
    """Empty if they give no data."""


class Telemetry:
    """Takes the samples of one epoch: one a second at first, later up to 15 s apart; fewer with over 64 replicas."""

    def __init__(self, folder: Folder, epoch: int, device_looks: Callable[[], tuple[DeviceLook, ...]]) -> None:
        """device_looks: the latest look at each device of the job."""
        folder.make(TELEMETRY_FOLDER)
        self._path = folder.path(f"{TELEMETRY_FOLDER}/{epoch:06d}.jsonl")
        self._began = self._next = time.monotonic()
        self.device_looks = device_looks

    @property
    def is_due(self) -> bool:
        """Whether it is time for a sample."""
        return time.monotonic() >= self._next

    def look(self, replicas: Sequence[ReplicaLook]) -> None:
        """Write one sample of all replicas and devices."""
        now = time.monotonic()
        factor = max(1.0, len(replicas) / _MANY_REPLICAS)
        self._next = now + factor * min(max((now - self._began) * _SHARE, _LEAST_S), _MOST_S)
        sample = _Sample(round(time.time(), 3), tuple(replicas), self.device_looks())
        # The file is opened for each sample. A written sample stays, and no file stays open on a full disk.
        with contextlib.suppress(OSError), open_log(self._path) as file:
            file.write(adapter(_Sample).dump_json(sample) + b"\n")


def read_looks(folder: Folder) -> Iterator[dict[str, Any]]:
    """All samples of a job, over its epochs, in order. Broken lines are left out, as those that a crash has torn."""
    for name in folder.list(TELEMETRY_FOLDER):
        # A month of many replicas is gigabytes.
        with folder.path(f"{TELEMETRY_FOLDER}/{name}").open("rb") as file:
            for line in file:
                try:
                    look = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                yield look
