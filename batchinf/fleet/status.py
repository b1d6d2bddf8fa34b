"""Writes and reads `status.json`, the state of a running job, and `telemetry/`, the history of engines and devices."""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from batchinf.base.storage import Folder, open_log
from batchinf.fleet.backend import DeviceWatch
from batchinf.fleet.devices import DeviceLook
from batchinf.replica.messages import Progress

STATUS_FILE = "status.json"
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica: its state, its place, and how full its engine is.

    host: "" before it has said so. start_detail: what a starting engine is doing, such as `loading weights 57/191`;
    empty if unknown. device: the model of its devices; "" before its engine is up. prefix_cache_hit_rate: share from 0
    to 1 of the prompt tokens that were looked up; None before the first. heard_at: when its last message came, in
    seconds since 1970; None before the first. num_rows: output rows that its engines have answered in this run. busy:
    share, from 0 to 1, of the time since its engine is up in which it had requests; None if it is not up.
    """

    replica: int
    state: str
    host: str
    start_detail: str
    devices: tuple[str, ...]
    device: str
    in_flight: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_hit_rate: float | None
    restarts: int
    heard_at: float | None
    num_rows: int = 0
    busy: float | None = None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A snapshot of a job. num_rows, num_rows_done, num_errors: output rows. updated_at: seconds since 1970.

    errors: those since the coordinator started, by the error's type, the most frequent first. devices: of the job.
    state: starting, running, stopping, ending, done, stopped or failed. A stopping job finishes running requests; in an
    ending one no request runs, and its engines end. num_prompt_tokens, num_output_tokens: tokens that the
    engines have run and generated since the coordinator started. Rates are over the last minute. Rates and `left_s` are
    None until there is enough data for them.
    """

    state: str
    num_rows: int
    num_rows_done: int
    num_errors: int
    errors: dict[str, int]
    num_shards: int
    num_shards_done: int
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    left_s: float | None
    stalled_by_disk_s: float
    replicas: tuple[ReplicaStatus, ...]
    devices: tuple[DeviceLook, ...]
    updated_at: float

    @classmethod
    def starting(cls, num_rows: int, replicas: Sequence[ReplicaStatus]) -> "JobStatus":
        """That of a job without shards yet."""
        now = round(time.time(), 3)
        return cls("starting", num_rows, 0, 0, {}, 0, 0, 0, 0, None, None, None, 0.0, tuple(replicas), (), now)


_STATUS = TypeAdapter(JobStatus)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the engines since the coordinator started. num_rows: output rows that the engines answered."""

    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.num_rows + other.num_rows,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_output_tokens + other.num_output_tokens,
        )


class Rates:
    """Rates over a moving window of samples of the totals. The first sample is taken when an engine is up."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Totals]] = deque()

    def look(self, now: float, totals: Totals) -> None:
        """Note the totals at a time. now: seconds of any clock."""
        self._looks.append((now, totals))
        while len(self._looks) > 2 and now - self._looks[1][0] > _WINDOW_S:
            self._looks.popleft()

    @property
    def tokens_per_s(self) -> tuple[float, float] | None:
        """Prompt and output tokens a second; None before the first token."""
        if not self._looks or self._looks[-1][1] == Totals():
            return None
        return self._per_s("num_prompt_tokens"), self._per_s("num_output_tokens")

    def left_s(self, num_rows: int, num_in_flight: int) -> float | None:
        """Seconds for `num_rows` output rows; None until the engines have answered as many rows as they now hold."""
        num_answered = self._looks[-1][1].num_rows if self._looks else 0
        rows_per_s = self._per_s("num_rows")
        return num_rows / rows_per_s if rows_per_s > 0 and num_answered >= num_in_flight else None

    def _per_s(self, name: str) -> float:
        if not self._looks:
            return 0.0
        (began, first), (ended, last) = self._looks[0], self._looks[-1]
        return max(0.0, float(getattr(last, name) - getattr(first, name))) / max(ended - began, 1e-3)


def write_status(folder: Folder, status: JobStatus) -> None:
    """Replace `status.json`, without fsync: it only informs users, so the last one may be lost."""
    folder.write_atomic(STATUS_FILE, _STATUS.dump_json(status), durable=False, fault="status")


def read_status(folder: Folder) -> JobStatus | None:
    """The last snapshot; None if there is none or it cannot be read."""
    try:
        return _STATUS.validate_json(folder.read(STATUS_FILE), strict=True)
    except (OSError, ValueError):
        return None


TELEMETRY_FOLDER = "telemetry"
_LEAST_S, _MOST_S = 1.0, 15.0
# Interval between samples, as a share of the time since the start: 600 samples in the first ten minutes, then about
# 6,000 a day.
_SHARE = 1 / 600
# More replicas are sampled less often: the samples of a day then take 100 MB at most.
_MANY_REPLICAS = 64


ON_TRIAL = "on trial"  # the state of a replica that runs suspected rows, a few at a time


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """One sample of a replica. Counts are totals of its incarnation; kv_cache_usage is a share from 0 to 1.

    num_running: requests in the engine's batch. num_waiting: requests in the engine that wait for the batch. num_ready:
    tokenised requests that wait outside the engine. num_rows: finished output rows, those from the journal too.
    num_answered: those that the engine answered. stalled_by_disk_s: time in which the engine had room but
    admission waited for the disk. busy_s: time in which the engine had requests.
    """

    replica: int
    incarnation: str
    state: str
    num_running: int
    num_waiting: int
    num_ready: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_rows: int
    num_answered: int
    steps: int
    stalled_by_disk_s: float
    busy_s: float

    @classmethod
    def of(cls, replica: int, incarnation: str, state: str, progress: Progress) -> "ReplicaLook":
        """The sample from a replica's last progress message."""
        engine = progress.engine
        return cls(
            replica,
            incarnation,
            state,
            engine.num_running,
            engine.num_waiting,
            progress.num_waiting,
            round(engine.kv_cache_usage, 4),
            engine.prefix_cache_queries,
            engine.prefix_cache_hits,
            engine.num_preemptions,
            progress.num_prompt_tokens,
            progress.num_output_tokens,
            progress.num_rows,
            progress.num_answered,
            progress.steps,
            progress.stalled_by_disk_s,
            progress.busy_s,
        )


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of the telemetry. at: seconds since 1970. devices: empty if they give no data."""

    at: float
    replicas: tuple[ReplicaLook, ...]
    devices: tuple[DeviceLook, ...]


_SAMPLE = TypeAdapter(_Sample)


class Telemetry:
    """Takes the samples of one epoch: one a second at first, and later at most 15 s apart.

    With more than 64 replicas, the intervals are longer by the same factor.
    """

    def __init__(self, folder: Folder, epoch: int, watch: DeviceWatch) -> None:
        """watch: reports the job's devices. `close` closes it."""
        folder.make(TELEMETRY_FOLDER)
        self._path = folder.path(f"{TELEMETRY_FOLDER}/{epoch:06d}.jsonl")
        self._began = self._next = time.monotonic()
        self._watch = watch

    @property
    def is_due(self) -> bool:
        """Whether it is time for a sample."""
        return time.monotonic() >= self._next

    @property
    def devices(self) -> tuple[DeviceLook, ...]:
        """The latest look at each device of the job."""
        return self._watch.looks()

    def look(self, replicas: Sequence[ReplicaLook]) -> None:
        """Write one sample of all replicas and devices."""
        now = time.monotonic()
        factor = max(1.0, len(replicas) / _MANY_REPLICAS)
        self._next = now + factor * min(max((now - self._began) * _SHARE, _LEAST_S), _MOST_S)
        sample = _Sample(round(time.time(), 3), tuple(replicas), self.devices)
        # The file is opened for each sample. A written sample stays, and no file stays open on a full disk.
        with contextlib.suppress(OSError), open_log(self._path) as file:
            file.write(_SAMPLE.dump_json(sample) + b"\n")

    def close(self) -> None:
        """Take no more samples."""
        self._watch.close()


def read_looks(folder: Folder) -> Iterator[dict[str, Any]]:
    """All samples of a job, over its epochs, in order. Lines that a crash has torn are left out."""
    for name in folder.list(TELEMETRY_FOLDER):
        # A month of many replicas is gigabytes.
        with folder.path(f"{TELEMETRY_FOLDER}/{name}").open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)
