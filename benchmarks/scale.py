"""The coordinator with many replicas: its processor time, its memory, and how long a replica waits for its next lease.

    python benchmarks/scale.py --replicas 1000 --rows 100000000 --rows-per-s 200

The coordinator is that of `batchinf run`, with the local backend's channels and all files of a job. The replicas are
simulated by one other process: each takes its leases, reports as often as it is told, writes a journal segment for
each open lease every ten seconds and a part for each finished shard, and runs its rows at a steady rate. They read no
rows and write no data. Runs on any CPU with two cores; the second one is for the simulated replicas.
"""

import argparse
import collections
import heapq
import itertools
import json
import multiprocessing
import pathlib
import random
import resource
import select
import selectors
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from resume import MODEL, make_part, write_rows

from batchinf.base.process import collect_as_usual
from batchinf.base.stop_signals import interruptible
from batchinf.base.storage import Folder
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.run import run_job
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.backend import Ending
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.fleet.local.backend import LocalBackend
from batchinf.fleet.local.channel import Channel
from batchinf.manifest.lines import StartedReplica
from batchinf.manifest.names import staging_name
from batchinf.records import Lease, Part
from batchinf.replica.messages import (
    Assign,
    Command,
    Key,
    Launch,
    LeaseBegun,
    LeaseDone,
    MayStore,
    Progress,
    Ready,
    Revoke,
    Revoked,
    StartPhase,
    Stop,
    Stopped,
    Work,
)
from batchinf.schedule.leases import FEW_WINDOWS
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec

MAX_NUM_SEQS, WINDOW = 256, 512
JOURNAL_S = 10.0


# The simulated replicas, in a process of their own.


@dataclass
class Replica:
    """One simulated replica: rows finish at a steady rate, in the order of assignment.

    leases: not begun. open: begun, each with the row at which it ends, counted over all rows that it was given.
    hungry_since: when it reported that it began its last lease; None while it has another. reported: the rows that its
    last report said.
    """

    channel: Channel
    rows_per_s: float
    launch: Launch
    leases: "collections.deque[Lease]" = field(default_factory=collections.deque)
    open: "collections.deque[tuple[Lease, float]]" = field(default_factory=collections.deque)
    given: float = 0.0
    finished: float = 0.0
    is_up: bool = False
    is_over: bool = False
    looked_at: float = 0.0
    hungry_since: float | None = None
    steps: int = 0
    num_segments: int = 0
    idle_s: float = 0.0
    progress_s: float = 1.0
    reported: int = 0
    reported_at: float = 0.0


class Replicas:
    """All of them: one thread, driven by messages and by a heap of times."""

    def __init__(self, control: socket.socket, num_rows: int, rows_per_s: float, start_s: float) -> None:
        """num_rows: of the job."""
        self._control, self._rows_per_s, self._start_s = control, rows_per_s, start_s
        # Rows that are finished at time t: the sum of both, with the second one times t.
        self._finished_rows = self._rows_a_second = 0.0
        self._num_rows = num_rows
        self._chance = random.Random(7)
        self._poller = select.epoll()
        self._poller.register(control.fileno(), select.EPOLLIN)
        self._by_fd: dict[int, Replica] = {}
        self._times: list[tuple[float, int, Callable[[Replica], None], Replica]] = []
        self._number = 0
        self._waits: list[float] = []
        self._all: list[Replica] = []
        self._last_up = self._last_assigned = 0.0
        # At the end of a job, leases move from replica to replica. Such a wait is not the coordinator's.
        self._moved: set[Key] = set()

    def figures(self) -> dict[str, Any]:
        """What was measured: waits in seconds, times of the monotonic clock, and the idle share of the time between."""
        span = (self._last_assigned - self._last_up) * len(self._all)
        return {
            "waits": self._waits,
            "last_up": self._last_up,
            "last_assigned": self._last_assigned,
            "idle_share": sum(replica.idle_s for replica in self._all) / span,
        }

    def run(self) -> None:
        """Until the coordinator closes the control socket."""
        while True:
            wait_s = max(0.0, self._times[0][0] - time.monotonic()) if self._times else 1.0
            for fd, _ in self._poller.poll(wait_s):
                if fd == self._control.fileno():
                    if not self._accept():
                        return
                else:
                    self._hear(fd)
            now = time.monotonic()
            while self._times and self._times[0][0] <= now:
                _, _, call, replica = heapq.heappop(self._times)
                if replica.channel.fileno() >= 0:
                    call(replica)

    def _accept(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        if not data:
            return False
        channel = Channel(socket.socket(fileno=descriptors[0]))
        while not (messages := channel.receive(None)):
            pass
        launch, *others = messages
        replica = Replica(channel, self._rows_per_s * self._chance.uniform(0.9, 1.1), launch)
        self._by_fd[channel.fileno()] = replica
        self._all.append(replica)
        self._poller.register(channel.fileno(), select.EPOLLIN)
        channel.send(StartPhase("importing vLLM", f"host-{launch.replica // 8:03d}"))
        self._at(self._chance.uniform(0.5, 1.0) * self._start_s, self._come_up, replica)
        for message in others:
            self._take(replica, message)
        return True

    def _at(self, delay_s: float, call: Callable[[Replica], None], replica: Replica) -> None:
        self._number += 1
        heapq.heappush(self._times, (time.monotonic() + delay_s, self._number, call, replica))

    def _hear(self, fd: int) -> None:
        replica = self._by_fd[fd]
        for message in replica.channel.receive(0):
            self._take(replica, message)
        if replica.channel.is_closed or replica.is_over:
            self._poller.unregister(fd)
            replica.channel.close()
            del self._by_fd[fd]

    def _take(self, replica: Replica, message: Command) -> None:
        match message:
            case Assign(leases):
                replica.progress_s = message.progress_s
                # While few rows are left, a replica waits because it has its share.
                left_rows = self._num_rows - self._finished_rows - self._rows_a_second * time.monotonic()
                are_few = left_rows < FEW_WINDOWS * WINDOW * len(self._all)
                if not are_few and not {lease.key for lease in leases} <= self._moved:
                    self._last_assigned = time.monotonic()
                    if replica.hungry_since is not None:
                        self._waits.append(self._last_assigned - replica.hungry_since)
                replica.hungry_since = None
                replica.leases.extend(leases)
                self._run(replica)
            case Revoke(asked):
                back = tuple(lease for lease in replica.leases if lease.key in asked)
                self._moved.update(lease.key for lease in back)
                replica.leases = collections.deque(lease for lease in replica.leases if lease.key not in asked)
                replica.channel.send(Revoked(back))
            case Stop():
                replica.channel.send(Stopped())
                replica.is_over = True
            case Work() | MayStore():
                pass

    def _come_up(self, replica: Replica) -> None:
        info = EngineInfo(8192, MAX_NUM_SEQS, 128_256, "simulated", {"batchinf": "0"}, {})
        replica.channel.send(Ready(info, self._start_s))
        replica.is_up = True
        replica.looked_at = self._last_up = time.monotonic()
        self._finished_rows -= replica.rows_per_s * self._last_up
        self._rows_a_second += replica.rows_per_s
        self._at(self._chance.random(), self._report, replica)
        self._at(self._chance.random() * JOURNAL_S, self._journal, replica)

    def _run(self, replica: Replica) -> None:
        """Advance to now: finish rows, close and begin leases; come again when the next of these is due."""
        if not replica.is_up:
            return
        now = time.monotonic()
        could = replica.finished + (now - replica.looked_at) * replica.rows_per_s
        if could > replica.given and replica.looked_at >= self._last_up > 0:
            replica.idle_s += (could - replica.given) / replica.rows_per_s
        finished = min(could, replica.given)
        self._finished_rows += finished - replica.finished - replica.rows_per_s * (now - replica.looked_at)
        replica.finished, replica.looked_at = finished, now
        replica.steps += 1
        while replica.open and replica.open[0][1] <= replica.finished + 1e-6:
            lease, _ = replica.open.popleft()
            num_rows = 0 if lease.is_stored else lease.num_rows
            part = self._part(replica, lease) if lease.is_whole else None
            replica.channel.send(LeaseDone(lease, num_rows, part=part))
        while replica.leases and replica.given - replica.finished < WINDOW:
            lease = replica.leases.popleft()
            replica.given += 0 if lease.is_stored else lease.num_rows
            replica.open.append((lease, replica.given))
            replica.channel.send(LeaseBegun(lease.key, 0, 0))
            if not replica.leases:
                replica.hungry_since = time.monotonic()
        due = [end - replica.finished for _, end in list(replica.open)[:1]]
        if replica.leases:
            due.append(replica.given - replica.finished - WINDOW)
        if due:
            self._at(max(0.001, min(due) / replica.rows_per_s), self._run, replica)

    def _part(self, replica: Replica, shard: Lease) -> Part:
        launch = replica.launch
        name = f"staging/{staging_name(shard.index, f'{shard.index:032x}')}"
        return make_part(Folder(pathlib.Path(launch.folder)), launch.job_id, shard, name)

    def _report(self, replica: Replica) -> None:
        self._at(replica.progress_s, self._report, replica)
        rows, tokens = int(replica.finished), int(replica.finished) * 128
        if rows == replica.reported and time.monotonic() - replica.reported_at < 1.0:
            return
        replica.reported, replica.reported_at = rows, time.monotonic()
        in_flight = min(WINDOW, int(replica.given - replica.finished))
        stats = EngineStats(min(MAX_NUM_SEQS, in_flight), 0, 0.6, 0, tokens, tokens // 4)
        progress = Progress(rows, {}, tokens, tokens, replica.steps, in_flight, 0.0, stats, 600, rows)
        replica.channel.send(progress)

    def _journal(self, replica: Replica) -> None:
        folder = pathlib.Path(replica.launch.folder, "journal")
        for lease, _ in replica.open:
            replica.num_segments += 1
            path = folder / f"{lease.index:06d}-{replica.launch.incarnation}-{replica.num_segments:05d}"
            path.write_bytes(b"\0" * 64)
        self._at(JOURNAL_S, self._journal, replica)


def serve(control: socket.socket, num_rows: int, rows_per_s: float, start_s: float, found: pathlib.Path) -> None:
    """Run the simulated replicas, and write what they saw."""
    replicas = Replicas(control, num_rows, rows_per_s, start_s)
    replicas.run()
    found.write_text(json.dumps(replicas.figures()))


# The coordinator.


@dataclass
class SimulatedHandle:
    """See `ReplicaHandle`."""

    incarnation: str
    channel: Channel
    selector: selectors.BaseSelector
    reference: dict[str, Any] = field(default_factory=dict)
    has_own_cache: bool = False
    started: float = field(default_factory=time.monotonic)

    def send(self, command: Command) -> None:
        self.channel.send(command)

    def has_ended(self) -> bool:
        return self.channel.is_closed

    def log_tail(self) -> list[str]:
        return []

    def start_activity(self) -> None:
        """None: a start waits for nothing that could be watched."""

    def begin_end(self) -> None:
        """Nothing: `end` does not wait."""

    def end(self) -> Ending:
        self.forget()
        self.channel.close()
        return Ending("coordinator", "the end of the job", (), (), time.monotonic() - self.started)

    def forget(self) -> None:
        if self.selector.get_map().get(self.channel) is not None:
            self.selector.unregister(self.channel)


class SimulatedBackend(LocalBackend):
    """The local backend, but its replicas are in the other process."""

    def __init__(self, control: socket.socket) -> None:
        super().__init__()
        self._control = control

    def devices(self) -> tuple[str, ...]:
        return ()

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        assert spec.parallel.data_parallel_size != "auto"
        return [Slot(number, (), ()) for number in range(spec.parallel.data_parallel_size)]

    def device_looks(self, names: Sequence[str]) -> tuple[DeviceLook, ...]:
        return ()

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> Any:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [launch.incarnation.encode().ljust(64)], [theirs.fileno()])
        channel = Channel(ours)
        channel.send(launch)
        handle = SimulatedHandle(launch.incarnation, channel, self._selector)
        self._selector.register(channel, selectors.EVENT_READ, handle)
        return handle

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None: ...


class Sampler(threading.Thread):
    """Processor time and memory of this process, once in five seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float, int]] = []

    def run(self) -> None:
        while True:
            rss = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            self.samples.append((time.monotonic(), time.process_time(), rss))
            time.sleep(5)

    def lines(self, began: float, ended: float) -> list[str]:
        inside = [sample for sample in self.samples if began <= sample[0] <= ended]
        if len(inside) < 2:
            return ["the run was too short for samples"]
        shares = [
            (cpu - cpu_before) / (at - before) for (before, cpu_before, _), (at, cpu, _) in itertools.pairwise(inside)
        ]
        whole = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
        most = max(rss for _, _, rss in self.samples) / 2**20
        return [
            f"processor: {whole:.2f} of a core, at most {max(shares):.2f} in 5 s, from the last replica's start to the "
            "last assignment",
            f"memory: at most {most:,.0f} MiB resident",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--rows-per-s", type=float, default=200.0, help="of one replica")
    parser.add_argument("--start-s", type=float, default=30.0, help="of the slowest engine")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/scale"))
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    args.out.mkdir(parents=True, exist_ok=True)
    rows, found = args.out / f"rows-{args.rows}.parquet", args.out / "found.json"
    if not rows.exists():
        draft = rows.with_suffix(".draft")
        write_rows(draft, args.rows)
        draft.rename(rows)
    shutil.rmtree(args.out / "job", ignore_errors=True)
    spec = args.out / "job.yaml"
    parameters = {
        "model": str(MODEL),
        "input": {"path": str(rows), "prompt_column": "prompt"},
        "sampling": {"temperature": 0.0, "max_tokens": 128},
        "output": {"path": str(args.out / "job")},
        "parallel": {"data_parallel_size": args.replicas},
        "scripted": {},
    }
    spec.write_text(json.dumps(parameters))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("fork").Process(
        target=_serve_alone, args=(theirs, ours, args.rows, args.rows_per_s, args.start_s, found)
    )
    process.start()
    theirs.close()
    collect_as_usual()  # like the command
    sampler = Sampler()
    sampler.start()
    began = time.monotonic()
    with interruptible(ends_process=True):
        summary = run_job(
            read_spec(str(spec), ()), SimulatedBackend(ours), ProgressDisplay(), extends=False, fresh=False, retry=None
        )
    ended = time.monotonic()
    ours.close()
    process.join()
    seen = json.loads(found.read_text())
    print(summary)
    print(f"{args.replicas:,} replicas, {args.rows:,} rows, {ended - began:.0f} s")
    print(*sampler.lines(seen["last_up"], seen["last_assigned"]), sep="\n")
    waits = sorted(seen["waits"])
    print(
        f"from a replica's message that it began its last lease to the next one's arrival: median "
        f"{1e3 * waits[len(waits) // 2]:.1f} ms, p99 {1e3 * waits[len(waits) * 99 // 100]:.1f} ms, longest "
        f"{1e3 * waits[-1]:.1f} ms, {len(waits):,} times"
    )
    print(f"engines were idle for {seen['idle_share']:.4%} of that time")


def _serve_alone(control: socket.socket, other: socket.socket, *rest: Any) -> None:
    other.close()
    serve(control, *rest)


if __name__ == "__main__":
    main()
