"""Starts, watches and ends replicas as processes of this host."""

import contextlib
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from batchinf.base.storage import open_log
from batchinf.replica.channel import Channel
from batchinf.replica.flight import FlightRecord
from batchinf.replica.messages import Command, Event, Launch

_PORTS_A_REPLICA = 40
_FIRST_PORT = 20_000


@dataclass(slots=True)
class LocalReplica:
    """A running replica: its process, the channel to it, what is in its engine.

    log_start: where its lines begin in its log. own_cache: where vLLM keeps what it compiles, if that is not where it
    always does; it ends with the replica.
    """

    launch: Launch
    process: "subprocess.Popen[bytes]"
    channel: Channel
    flight: FlightRecord
    log: pathlib.Path
    log_start: int
    sockets: pathlib.Path
    own_cache: pathlib.Path | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """The replica's process id, which is its process group's and its session's too."""
        return self.process.pid

    def send(self, message: Command) -> None:
        """Give a command."""
        self.channel.send(message)

    def has_ended(self) -> bool:
        """Whether the replica's own process is gone."""
        return self.process.poll() is not None

    def lifetime_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    def kill(self) -> None:
        """End the whole process group and wait until it is gone."""
        end_process_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.channel.close()
        self.flight.close()
        for folder in filter(None, (self.sockets, self.own_cache)):
            shutil.rmtree(folder, ignore_errors=True)


class LocalBackend:
    """One interface for each kind of place to run in: `start`, `poll`, `end`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def start(
        self, launch: Launch, log: pathlib.Path, environment: Mapping[str, str], *, has_own_cache: bool = False
    ) -> LocalReplica:
        """Start a replica in a session of its own, its output appended to `log`."""
        ours, theirs = socket.socketpair()
        flight = FlightRecord.create()
        # The package may be run from a source tree that is not installed: a replica must find the same one.
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        sockets = _sockets_folder(launch)
        own_cache = cache_root() / f"{_replica_prefix(launch)}cache" if has_own_cache else None
        own = {} if own_cache is None else {"VLLM_CACHE_ROOT": str(own_cache)}
        with theirs, open_log(log) as output:
            log_start = output.tell()
            process = subprocess.Popen(
                # -P: a `queue.py` in the user's folder must not take the place of Python's own.
                [
                    *(sys.executable, "-P", "-m", "batchinf.replica.process"),
                    *(str(theirs.fileno()), launch.incarnation, str(flight.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PYTHONUNBUFFERED": "1",
                    "VLLM_RPC_BASE_PATH": str(sockets),
                    **environment,
                    **own,
                },
                pass_fds=(theirs.fileno(), flight.fileno()),
                start_new_session=True,
            )
        channel = Channel(ours, launch.incarnation)
        channel.send(launch)
        replica = LocalReplica(launch, process, channel, flight, log, log_start, sockets, own_cache)
        self._selector.register(channel, selectors.EVENT_READ, replica)
        return replica

    def poll(self, wait_s: float) -> list[tuple[LocalReplica, Event]]:
        """What replicas have said, after at most `wait_s` seconds."""
        events: list[tuple[LocalReplica, Event]] = []
        if not self._selector.get_map():
            time.sleep(wait_s)
            return events
        for key, _ in self._selector.select(wait_s):
            replica: LocalReplica = key.data
            events.extend((replica, event) for event in replica.channel.receive(0))
            if replica.channel.is_closed:
                self._forget(replica)
        return events

    def end(self, replica: LocalReplica) -> None:
        """Kill what is left of a replica and forget it."""
        self._forget(replica)
        replica.kill()

    def _forget(self, replica: LocalReplica) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(replica.channel)


def _sockets_folder(launch: Launch) -> pathlib.Path:
    """An empty folder for vLLM's socket files, which it leaves behind; their paths have a limit of 107 bytes.

    One that an earlier incarnation left, because its coordinator was killed, is removed.
    """
    prefix = _replica_prefix(launch)
    _sweep_sockets(prefix)
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix))


def cache_root() -> pathlib.Path:
    """What batchinf keeps beside what vLLM has compiled."""
    return pathlib.Path(os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm"), "batchinf")


def _replica_prefix(launch: Launch) -> str:
    return f"{_sockets_prefix(launch.job_id)}{launch.replica}-"


def sweep_sockets(job_id: str) -> None:
    """Remove what replicas of a job left on this host because their coordinator was killed. None of them may run."""
    _sweep_sockets(_sockets_prefix(job_id))


def _sockets_prefix(job_id: str) -> str:
    return f"batchinf-{job_id[:12]}-"


def _sweep_sockets(prefix: str) -> None:
    for folder in (pathlib.Path(tempfile.gettempdir()), cache_root()):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def engine_environment(slot_devices: tuple[str, ...], num_cpus: int, replica: int) -> dict[str, str]:
    """What a replica's environment says before vLLM or torch is imported in it.

    Values that the user has set are left alone, save the devices.
    """
    wanted = {
        "OMP_NUM_THREADS": str(max(1, num_cpus)),
        "RAYON_NUM_THREADS": str(max(1, min(8, num_cpus))),
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM 0.26 picks ports at random and two replicas can race for one: each gets a range of its own.
        "VLLM_PORT": str(_FIRST_PORT + os.getpid() % 500 * _PORTS_A_REPLICA + replica * _PORTS_A_REPLICA),
        # A replica is on one host: what listens in it must not be reached from others. Gloo would take the address
        # that the host's name has, and vLLM that of the interface that leads out.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not slot_devices:
        wanted |= {
            # The engine core in the replica's own process: starts in a tenth of the time.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
    chosen = {name: value for name, value in wanted.items() if name not in os.environ}
    if slot_devices:
        chosen["CUDA_VISIBLE_DEVICES"] = ",".join(slot_devices)
    return chosen


def end_process_group(group: int, wait_s: float = 10.0) -> bool:
    """SIGKILL a process group and wait until no live process is left in it; whether there was one."""
    deadline = time.monotonic() + wait_s
    was_there = False
    while time.monotonic() < deadline and members(group):
        was_there = True
        try:
            os.killpg(group, signal.SIGKILL)
        except PermissionError:
            return False
        except ProcessLookupError:
            pass
        time.sleep(0.02)
    return was_there


def members(group: int) -> list[int]:
    """Process ids of the live members of a process group; zombies do not count."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found
