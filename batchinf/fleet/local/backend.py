"""The local backend: runs replicas as processes of this host, and reads weights into its page cache.

It gives each process its environment, and ends process groups: its own, and those that an earlier coordinator left
behind, but no others.
"""

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
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchinf.base.storage import open_log
from batchinf.fleet.backend import DeviceWatch, EndedBy, Ending
from batchinf.fleet.devices import Slot
from batchinf.fleet.local import devices
from batchinf.fleet.local.channel import Channel, SharedMemory
from batchinf.manifest.lock import Holder, process_start
from batchinf.model import files as model_files
from batchinf.model.identity import Model
from batchinf.records import StartedReplica
from batchinf.replica.messages import Command, Event, Launch
from batchinf.replica.worker import InFlightRecord
from batchinf.spec.job import JobSpec


class GroupIdentity(BaseModel):
    """A replica's process group, as the manifest keeps it.

    boot_id: of the host, until it is booted again. pid_start_time: of the group's leader, in clock ticks since boot;
    with the process id it names one process for ever.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    host: str
    boot_id: str
    # 0 would be the caller's own group, 1 is init's.
    pgid: Annotated[int, Field(gt=1, lt=1 << 31)]
    pid_start_time: int

    @classmethod
    def of(cls, group: int) -> "GroupIdentity":
        """That of a group of this host."""
        me = Holder.this_process()
        return cls(host=me.host, boot_id=me.boot_id, pgid=group, pid_start_time=process_start(group) or 0)


def end_leftover(identity: dict[str, Any]) -> None:
    """End a process group of an earlier coordinator, if it is still there. One that may be another's is kept."""
    try:
        group = GroupIdentity.model_validate(identity)
    except ValidationError:
        return
    me = Holder.this_process()
    if (group.host, group.boot_id) != (me.host, me.boot_id):
        return
    # A process id is not used again while a group of that number has members; a leader that started at another time
    # is a stranger.
    started = process_start(group.pgid)
    if started is None or started == group.pid_start_time:
        # Waited for: a device is free only when those that held it are gone.
        end_process_group(group.pgid)


def end_process_group(group: int) -> None:
    """Send SIGKILL to a process group until no live process is left in it."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and members(group):
        try:
            os.killpg(group, signal.SIGKILL)
        except PermissionError:
            return
        except ProcessLookupError:
            pass
        time.sleep(0.02)


def members(group: int) -> list[int]:
    """Process ids of the live members of a process group; zombies do not count."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process.pid)
    return found


_PORTS_A_REPLICA = 40
_FIRST_PORT = 20_000


def engine_environment(slot_devices: tuple[str, ...], num_cpus: int, replica: int) -> dict[str, str]:
    """Environment variables for a replica, to be set before it imports vLLM or torch.

    Values that the user has set are kept, except for the devices.
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


def sockets_folder(launch: Launch) -> pathlib.Path:
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
    """Remove the folders that replicas of a job left because their coordinator was killed. None of them may run."""
    _sweep_sockets(_sockets_prefix(job_id))


def _sockets_prefix(job_id: str) -> str:
    return f"batchinf-{job_id[:12]}-"


def _sweep_sockets(prefix: str) -> None:
    for folder in (pathlib.Path(tempfile.gettempdir()), cache_root()):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def own_cache_folder(launch: Launch) -> pathlib.Path:
    """Where vLLM keeps what one replica compiles, if that is not where it always does."""
    return cache_root() / f"{_replica_prefix(launch)}cache"


# A block whose first byte is in memory is taken to be there: another process has just read it.
_BLOCK_BYTES = 2 << 20
# Of the memory that is free: what is read beyond it would only push out what was read before.
_MOST = 0.5


def read_ahead(model: Model, load_format: str) -> threading.Thread | None:
    """Begin to read what is not in memory yet of the weights of a model in a folder here; None where none are read.

    Nothing waits for the thread, nor depends on it.
    """
    folder = pathlib.Path(model.path)
    if load_format == "dummy" or not folder.is_dir():
        return None
    paths = [path for name in model_files.weight_files(folder, load_format) if (path := folder / name).is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    if not 0 < num_bytes < psutil.virtual_memory().available * _MOST:
        return None
    thread = threading.Thread(target=_read, args=(paths,), name="read_ahead", daemon=True)
    thread.start()
    return thread


def _read(paths: Sequence[pathlib.Path]) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    for path in paths:
        # What cannot be read is said by who needs it.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            for offset in range(0, path.stat().st_size, _BLOCK_BYTES):
                if not _is_cached(file.fileno(), offset):
                    os.preadv(file.fileno(), [block], offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory; False where the file system cannot tell."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN: it would have to be read; EOPNOTSUPP
        return False


# The signals by which others end a process, unlike a segmentation fault, which is its own.
_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
# The ranks of a large engine each write a traceback.
_LOG_TAIL_BYTES = 1 << 20


@dataclass
class LocalReplica:
    """A running replica: its process, the channel to it, the memory that says what is in its engine.

    log_start: the byte of its log at which its lines begin. own_cache: the folder to which vLLM compiles, if it is not
    the one that replicas share; removed at its end. selector: listens to the channel.
    """

    incarnation: str
    process: "subprocess.Popen[bytes]"
    channel: Channel
    memory: SharedMemory
    log: pathlib.Path
    log_start: int
    sockets: pathlib.Path
    own_cache: pathlib.Path | None
    selector: selectors.BaseSelector | None
    started: float = field(default_factory=time.monotonic)

    @property
    def has_own_cache(self) -> bool:
        """See `ReplicaHandle`."""
        return self.own_cache is not None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """See `ReplicaHandle`: the replica's process id is its process group's and its session's too."""
        return GroupIdentity.of(self.process.pid).model_dump()

    def send(self, command: Command) -> None:
        """See `ReplicaHandle`."""
        self.channel.send(command)

    def has_ended(self) -> bool:
        """See `ReplicaHandle`: what it started may still run."""
        return self.process.poll() is not None

    def log_tail(self) -> list[str]:
        """See `ReplicaHandle`."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log_start, self.log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    def end(self) -> Ending:
        """See `ReplicaHandle`."""
        self.forget()
        lifetime_s, code = time.monotonic() - self.started, self.process.poll()
        end_process_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        # Last words may still be in the channel of a process that is gone.
        events: list[Event] = []
        while heard := self.channel.receive(0):
            events.extend(heard)
        in_flight = tuple(InFlightRecord(self.memory.memory).requests())
        self.channel.close()
        self.memory.close()
        for folder in filter(None, (self.sockets, self.own_cache)):
            shutil.rmtree(folder, ignore_errors=True)
        return Ending(_ended_by(code), _describe(code), tuple(events), in_flight, lifetime_s)

    def forget(self) -> None:
        """Stop listening to the channel."""
        if self.selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(self.channel)


def _ended_by(code: int | None) -> EndedBy:
    if code is None:
        return "coordinator"
    return "outside" if code in _FROM_OUTSIDE else "itself"


def _describe(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


class LocalBackend:
    """See `Backend`, whose methods are described there."""

    name = "local"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def devices(self) -> tuple[str, ...]:
        """See `Backend`: what CUDA_VISIBLE_DEVICES allows."""
        return devices.visible_devices()

    def device_size(self, device: str) -> tuple[int | None, str]:
        """See `Backend`."""
        return devices.device_size(device)

    def place(self, spec: JobSpec) -> list[Slot]:
        """See `Backend`."""
        return devices.place(spec, devices.visible_devices(), devices.own_cpus())

    def check_free(self, spec: JobSpec, slots: Sequence[Slot]) -> None:
        """See `Backend`."""
        devices.check_free(spec, slots)

    def watch_devices(self, names: Sequence[str]) -> DeviceWatch:
        """See `Backend`."""
        return devices.NvmlWatch(names)

    def read_ahead(self, model: Model, load_format: str) -> None:
        """See `Backend`: into the page cache."""
        read_ahead(model, load_format)

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> LocalReplica:
        """See `Backend`: in a session of its own."""
        ours, theirs = socket.socketpair()
        memory, sockets = SharedMemory.create(), sockets_folder(launch)
        own_cache = own_cache_folder(launch) if has_own_cache else None
        with theirs, open_log(log) as output:
            log_start = output.tell()
            process = subprocess.Popen(
                # -P: a `queue.py` in the user's folder must not take the place of Python's own.
                [
                    *(sys.executable, "-P", "-m", "batchinf.fleet.local.process"),
                    *(str(theirs.fileno()), launch.incarnation, str(memory.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(slot, sockets, own_cache),
                pass_fds=(theirs.fileno(), memory.fileno()),
                start_new_session=True,
            )
        channel = Channel(ours, launch.incarnation)
        channel.send(launch)
        replica = LocalReplica(
            launch.incarnation, process, channel, memory, log, log_start, sockets, own_cache, self._selector
        )
        self._selector.register(channel, selectors.EVENT_READ, replica)
        return replica

    def poll(self, wait_s: float) -> list[tuple[LocalReplica, Event]]:
        """See `Backend`."""
        events: list[tuple[LocalReplica, Event]] = []
        if not self._selector.get_map():
            time.sleep(wait_s)
            return events
        for key, _ in self._selector.select(wait_s):
            replica: LocalReplica = key.data
            events.extend((replica, event) for event in replica.channel.receive(0))
            if replica.channel.is_closed:
                replica.forget()
        return events

    def end_leftovers(self, replicas: Sequence[StartedReplica], job_id: str | None) -> None:
        """See `Backend`: only process groups of this host since it was booted."""
        for replica in replicas:
            if replica.backend == self.name:
                end_leftover(replica.identity)
        # A start removes the folders of its own replica only, and this epoch may have fewer replicas than the last.
        if job_id is not None:
            sweep_sockets(job_id)

    def is_cache_warm(self, key: str) -> bool:
        """See `Backend`: a file in vLLM's cache says so."""
        return (cache_root() / key).exists()

    def note_cache_warm(self, key: str) -> None:
        """See `Backend`."""
        cache_root().mkdir(parents=True, exist_ok=True)
        (cache_root() / key).touch()


def _environment(slot: Slot, sockets: pathlib.Path, own_cache: pathlib.Path | None) -> dict[str, str]:
    # The package may be run from a source tree that is not installed: a replica must find the same one.
    root = str(pathlib.Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        **engine_environment(slot.devices, len(slot.cpus), slot.replica),
        **({} if own_cache is None else {"VLLM_CACHE_ROOT": str(own_cache)}),
    }
