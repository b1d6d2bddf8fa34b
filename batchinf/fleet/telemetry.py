"""How full each engine was over time: JSON lines in `telemetry/000001.jsonl`, a file for each epoch, one look a line.

Written by the coordinator, which hears of the engines once a second anyway. Nothing depends on it: what is lost with a
crash, or for want of room, is lost.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchinf.base.storage import Folder, open_log
from batchinf.fleet.backend import DeviceWatch
from batchinf.replica.messages import Progress

TELEMETRY_FOLDER = "telemetry"
_LEAST_S, _MOST_S = 1.0, 15.0
# Of the time since the start: 600 looks in the first ten minutes, about 6,000 a day after that.
_SHARE = 1 / 600


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """One look at a replica. Counts are totals of its incarnation; kv_cache_usage is a share from 0 to 1.

    num_running, num_waiting: requests in the engine's batch, and in the engine before it. num_ready: those that are
    tokenised and wait outside. stalled_by_disk_s: time in which the engine had room and the disk lagged behind.
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
    steps: int
    stalled_by_disk_s: float

    @classmethod
    def of(cls, replica: int, incarnation: str, state: str, progress: Progress) -> "ReplicaLook":
        """What a replica said last."""
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
            progress.steps,
            progress.stalled_by_disk_s,
        )


class Telemetry:
    """The looks of one epoch. At first one a second; a longer job takes them further apart, up to 15 s."""

    def __init__(self, folder: Folder, epoch: int, watch: DeviceWatch) -> None:
        """watch: of the job's devices; closed with this."""
        folder.make(TELEMETRY_FOLDER)
        self._path = folder.path(f"{TELEMETRY_FOLDER}/{epoch:06d}.jsonl")
        self._began = self._next = time.monotonic()
        self._watch = watch

    @property
    def is_due(self) -> bool:
        """Whether it is time for a look."""
        return time.monotonic() >= self._next

    def look(self, replicas: Sequence[ReplicaLook]) -> None:
        """Write down one look at all replicas and devices."""
        now = time.monotonic()
        self._next = now + min(max((now - self._began) * _SHARE, _LEAST_S), _MOST_S)
        found = {"at": round(time.time(), 3), "replicas": [asdict(replica) for replica in replicas]}
        if devices := self._watch.looks():
            found["devices"] = [asdict(device) for device in devices]
        # Opened each time: a look is for ever once it is written, and no descriptor is held over a full disk.
        with contextlib.suppress(OSError), open_log(self._path) as file:
            file.write(json.dumps(found).encode() + b"\n")

    def close(self) -> None:
        """Look no more."""
        self._watch.close()


def read_looks(folder: Folder) -> Iterator[dict[str, Any]]:
    """All looks at a job, over its epochs, in order; a line that a crash has torn is left out."""
    for name in folder.list(TELEMETRY_FOLDER):
        for line in folder.read(f"{TELEMETRY_FOLDER}/{name}").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
