"""A job at a glance: `status.json`, written by the coordinator about once a second and read by whoever shows it."""

import json
import math
import time
from collections import deque
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from batchinf.base.storage import Folder

STATUS_FILE = "status.json"
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica: what it is doing, on what, and how full its engine is."""

    replica: int
    state: str
    devices: tuple[str, ...]
    in_flight: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    restarts: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One look at a job. Rates are over the last minute; `left_s` is None until there is one.

    state: starting, running, stopping, done, stopped or failed. `updated_at`: seconds since 1970.
    """

    state: str
    num_rows: int
    num_rows_done: int
    num_errors: int
    num_shards: int
    num_shards_done: int
    num_prompt_tokens: int
    num_output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    left_s: float | None
    stalled_by_disk_s: float
    replicas: tuple[ReplicaStatus, ...]
    updated_at: float
    message: str = ""


_STATUS = TypeAdapter(JobStatus)


class Rates:
    """Rates over a moving window, from totals as they grow."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int, int, int]] = deque()

    def look(self, num_rows: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Note the totals of this moment."""
        now = time.monotonic()
        if not self._looks and num_prompt_tokens == 0:
            self._looks.append((now, num_rows, 0, 0))
            return
        self._looks.append((now, num_rows, num_prompt_tokens, num_output_tokens))
        while len(self._looks) > 2 and now - self._looks[1][0] > _WINDOW_S:
            self._looks.popleft()

    def per_s(self) -> tuple[float, float, float]:
        """Rows, prompt tokens and output tokens a second."""
        if len(self._looks) < 2:
            return 0.0, 0.0, 0.0
        first, last = self._looks[0], self._looks[-1]
        seconds = max(last[0] - first[0], 1e-3)
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds, (last[3] - first[3]) / seconds


def write_status(folder: Folder, status: JobStatus) -> None:
    """Replace `status.json`; it is for looking at, so that losing the last one costs nothing."""
    folder.write_atomic(STATUS_FILE, json.dumps(asdict(status)).encode(), durable=False, fault="status")


def read_status(folder: Folder) -> JobStatus | None:
    """The last snapshot, or None where there is none that can be read."""
    try:
        return _STATUS.validate_json(folder.read(STATUS_FILE), strict=True)
    except (OSError, ValueError):
        return None


def duration(seconds: float | None) -> str:
    """`1h02m`, `3m20s` or `12s`; `?` where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def short_count(number: float) -> str:
    """`950`, `12.3k`, `4.56M`, `7.8B`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def status_line(status: JobStatus) -> str:
    """One line: rows, rates, time left, errors, replicas."""
    if status.state == "done":
        return f"{status.num_rows_done:,} rows, {status.num_errors:,} errors{_waited(status, ', ')}"
    up = sum(replica.state == "running" for replica in status.replicas)
    parts = [
        f"{status.num_rows_done:,}/{status.num_rows:,} rows",
        f"in {short_count(status.prompt_tokens_per_s)} tok/s",
        f"out {short_count(status.output_tokens_per_s)} tok/s",
        f"left {duration(status.left_s)}",
        f"{status.num_errors:,} errors",
        f"{up}/{len(status.replicas)} replicas up",
    ]
    return " · ".join(parts) + _waited(status, " · ")


def _waited(status: JobStatus, separator: str) -> str:
    if status.stalled_by_disk_s < 1:
        return ""
    return f"{separator}waited {duration(status.stalled_by_disk_s)} for the disk"
