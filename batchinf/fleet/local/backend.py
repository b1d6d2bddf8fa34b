"""The local backend: runs replicas as processes of this host, and reads weights into its page cache.

It sets the environment of each process. It ends only its own process groups and those that an earlier coordinator of
the job left behind.
"""

import contextlib
import os
import pathlib
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchinf.base.errors import EngineStartError
from batchinf.base.storage import open_log
from batchinf.engines.installed import cuda_of_build, vllm_version
from batchinf.engines.protocol import DEVICE_LOCK
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
    """A replica's process group, as the manifest stores it.

    boot_id: of the host; a reboot changes it. pid_start_time: of the group's leader, in clock ticks since boot; no
    other process of this boot has the same process id and start time.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    host: str
    boot_id: str
    # 0 is the caller's own group, 1 is init's.
    pgid: Annotated[int, Field(gt=1, lt=1 << 31)]
    pid_start_time: int

    @classmethod
    def of(cls, group: int) -> "GroupIdentity":
        """The identity of a group of this host."""
        me = Holder.this_process()
        return cls(host=me.host, boot_id=me.boot_id, pgid=group, pid_start_time=process_start(group) or 0)


def end_leftover(identity: dict[str, Any]) -> None:
    """End a process group of an earlier coordinator, unless it may be another program's."""
    try:
        group = GroupIdentity.model_validate(identity)
    except ValidationError:
        return
    me = Holder.this_process()
    if (group.host, group.boot_id) != (me.host, me.boot_id):
        return
    # A process id is not reused while a group of that number has members. A leader with another start time is another
    # program's.
    started = process_start(group.pgid)
    if started is None or started == group.pid_start_time:
        # This waits, because a device is free only when its processes are gone.
        end_process_group(group.pgid)


# On a busy host a tracker may still be starting.
_TRACKERS_END_S = 5.0


def end_process_group(group: int) -> None:
    """Send SIGKILL to a process group until it has no live process.

    Python's resource trackers come last: once all others have ended, they delete the shared memory of the ranks of an
    engine, and end by themselves. Killed with them, each engine would leave some of it until the host reboots.
    """
    began, last = time.monotonic(), 0.0
    with contextlib.suppress(psutil.AccessDenied):
        while (passed := time.monotonic() - began) < 10.0 and (found := members(group)):
            last = passed if kill_all_but_trackers(found) else last
            if passed - last > _TRACKERS_END_S:
                _kill(found)
            time.sleep(0.02)


def kill_all_but_trackers(processes: Sequence[psutil.Process]) -> bool:
    """Send SIGKILL to all processes but resource trackers; False if there are no others. Raises psutil.AccessDenied."""
    others = [process for process in processes if not _is_tracker(process)]
    _kill(others)
    return bool(others)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def members(group: int) -> list[psutil.Process]:
    """The live members of a process group; zombies do not count."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                found.append(process)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


_PORTS_A_REPLICA = 40
_FIRST_PORT = 20_000
_PORT_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")


def claim_ports() -> socket.socket:
    """Claim ports for one replica: the 39 after the one that the socket is bound to.

    The kernel lets one process of the host bind a port, so the claim holds until the last copy of the socket is closed.
    """
    low, high = map(int, _PORT_RANGE.read_text().split())
    firsts = range(_FIRST_PORT, 65_536 - _PORTS_A_REPLICA, _PORTS_A_REPLICA)
    # The kernel gives ports from `low` to `high` to any program: they come last.
    for first in sorted(firsts, key=lambda first: low - _PORTS_A_REPLICA < first <= high):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
        else:
            return claim
    raise EngineStartError("found no free ports for a replica; set VLLM_PORT to the first of 40 free ones")


def engine_environment(slot_devices: tuple[str, ...], num_cpus: int) -> dict[str, str]:
    """Environment variables for a replica, to be set before it imports vLLM or torch.

    Values that the user has set stay, except for the devices.
    """
    wanted = {
        "RAYON_NUM_THREADS": str(max(1, min(8, num_cpus))),
        "TOKENIZERS_PARALLELISM": "true",
        "VLLM_NO_USAGE_STATS": "1",
        # A replica is on one host, so its ports must not be reachable from others. By default Gloo takes the address
        # of the host's name, and vLLM that of the outgoing interface.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if slot_devices:
        # Threads that wait for work slow the engine's own thread. From 0.32 on vLLM takes one by itself if this is not
        # set: structured outputs are then 2 to 6 times as fast (vllm#49013).
        if (version := vllm_version()) is not None and version < (0, 32):
            wanted["OMP_NUM_THREADS"] = "1"
        # Without it, PyTorch puts vLLM's Triton kernels into the folder of the model that it compiles, and vLLM looks
        # for them elsewhere when it loads the compiled model. So a second start would compile them again, for 15 s.
        wanted["TRITON_CACHE_DIR"] = os.fspath(cache_root() / "triton")
    else:
        wanted |= {
            "OMP_NUM_THREADS": str(max(1, num_cpus)),
            # The engine core in the replica's own process starts in a tenth of the time.
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
    """An empty folder for vLLM's socket files, which vLLM does not delete. Their paths have at most 107 bytes.

    Deletes the folder that an earlier incarnation left if its coordinator was killed.
    """
    prefix = _replica_prefix(launch)
    _sweep_sockets(prefix)
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix))


def cache_root() -> pathlib.Path:
    """batchinf's folder in vLLM's cache."""
    return pathlib.Path(os.environ.get("VLLM_CACHE_ROOT", pathlib.Path.home() / ".cache" / "vllm"), "batchinf")


def _replica_prefix(launch: Launch) -> str:
    return f"{_sockets_prefix(launch.job_id)}{launch.replica}-"


def sweep_sockets(job_id: str) -> None:
    """Delete folders of a job's replicas whose coordinator was killed. None of the replicas may still run."""
    _sweep_sockets(_sockets_prefix(job_id))


def _sockets_prefix(job_id: str) -> str:
    return f"batchinf-{job_id[:12]}-"


def _sweep_sockets(prefix: str) -> None:
    for folder in (pathlib.Path(tempfile.gettempdir()), cache_root()):
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def own_cache_folder(launch: Launch) -> pathlib.Path:
    """vLLM's cache folder for a replica that does not use the shared one."""
    return cache_root() / f"{_replica_prefix(launch)}cache"


def _make_own_cache(launch: Launch) -> pathlib.Path:
    """Make the folder, with a copy of vLLM's information about model classes. Without it, a start takes 18 s longer."""
    folder = own_cache_folder(launch)
    known = cache_root().parent / _MODEL_CLASSES
    if known.is_dir():
        with contextlib.suppress(OSError):  # another process may change it meanwhile, and vLLM can do without it
            shutil.copytree(known, folder / _MODEL_CLASSES, dirs_exist_ok=True)
    return folder


_MODEL_CLASSES = "modelinfos"

# If the first byte of a block is in memory, the whole block is assumed to be: another process has just read it.
_BLOCK_BYTES = 2 << 20
# Share of the free memory: reading more would only evict what was read before.
_MOST = 0.5


def read_ahead(model: Model, load_format: str) -> threading.Thread | None:
    """Begin to read a local model's weights into the page cache, so that all replicas of the host load them from there.

    Returns None if there is nothing to read or too little free memory. Nothing waits for the thread.
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
        # Errors are ignored: the engine reports them when it loads the file.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            for offset in range(0, path.stat().st_size, _BLOCK_BYTES):
                if not _is_cached(file.fileno(), offset):
                    os.preadv(file.fileno(), [block], offset)


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` is in memory; False if the file system cannot tell."""
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:  # EAGAIN: not in memory; EOPNOTSUPP
        return False


# Signals that come from other processes, unlike a segmentation fault.
_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
# The ranks of a large engine each write a traceback.
_LOG_TAIL_BYTES = 1 << 20


def read_log(path: pathlib.Path, start: int) -> list[str]:
    """The last lines of a log, from the byte `start` on, about 1 MiB at most; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


@dataclass
class LocalReplica:
    """A running replica: its process, the channel to it, and the memory with its requests in flight.

    log_start: the byte of its log at which its lines begin. own_cache: vLLM's cache folder if it is not the shared one;
    deleted at its end. selector: listens to the channel. seen: lifetime and exit code when its end began.
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
    seen: tuple[float, int | None] | None = None

    @property
    def has_own_cache(self) -> bool:
        return self.own_cache is not None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """See `ReplicaHandle`. The replica's process id is also the id of its process group and session."""
        return GroupIdentity.of(self.process.pid).model_dump()

    def send(self, command: Command) -> None:
        self.channel.send(command)

    def has_ended(self) -> bool:
        """See `ReplicaHandle`. Processes that it started may still run."""
        return self.process.poll() is not None

    def log_tail(self) -> list[str]:
        return read_log(self.log, self.log_start)

    def begin_end(self) -> None:
        self.seen = self.seen or (time.monotonic() - self.started, self.process.poll())
        with contextlib.suppress(psutil.AccessDenied):
            kill_all_but_trackers(members(self.process.pid))

    def end(self) -> Ending:
        self.forget()
        lifetime_s, code = self.seen or (time.monotonic() - self.started, self.process.poll())
        end_process_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        # The channel of a dead process may still hold its last messages.
        events: list[Event] = []
        while heard := self.channel.receive(0):
            events.extend(heard)
        in_flight = () if self.memory.is_closed else tuple(InFlightRecord(self.memory.memory).requests())
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
    processors = "this machine's processor"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def devices(self) -> tuple[str, ...]:
        """See `Backend`. Limited by CUDA_VISIBLE_DEVICES."""
        return devices.visible_devices()

    def device_size(self, device: str) -> tuple[int | None, str]:
        return devices.device_size(device)

    def place(self, spec: JobSpec) -> list[Slot]:
        visible = devices.visible_devices()
        if visible and spec.scripted is None:
            devices.check_driver(cuda_of_build())
        return devices.place(spec, visible, devices.own_cpus())

    def check_hosts(self, output: pathlib.Path, model: pathlib.Path | None) -> None:
        """See `Backend`. There is one host."""

    def check_free(self, engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        devices.check_free(engine, slots)

    def watch_devices(self, names: Sequence[str]) -> DeviceWatch:
        return devices.NvmlWatch(names)

    def read_ahead(self, model: Model, load_format: str) -> None:
        """See `Backend`. Reads into the page cache."""
        read_ahead(model, load_format)

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> LocalReplica:
        """See `Backend`. The process has its own session."""
        ours, theirs = socket.socketpair()
        memory, sockets = SharedMemory.create(), sockets_folder(launch)
        own_cache = _make_own_cache(launch) if has_own_cache else None
        # vLLM finds a free port first and binds it later: two replicas with the same ports can race for one.
        with theirs, claim_ports() as ports, open_log(log) as output:
            log_start = output.tell()
            process = subprocess.Popen(
                # -P: a `queue.py` in the user's folder must not replace Python's.
                [
                    *(sys.executable, "-P", "-m", "batchinf.fleet.local.process"),
                    *(str(theirs.fileno()), launch.incarnation, str(memory.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(slot, sockets, own_cache, ports.getsockname()[1] + 1),
                # The replica's copy of `ports` holds the claim until it ends.
                pass_fds=(theirs.fileno(), memory.fileno(), ports.fileno()),
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
        """See `Backend`. Ends only process groups of this host and this boot."""
        for replica in replicas:
            if replica.backend == self.name:
                end_leftover(replica.identity)
        # A start deletes the folders only of its own replica, and this epoch may have fewer replicas than the last.
        if job_id is not None:
            sweep_sockets(job_id)

    def is_cache_warm(self, key: str) -> bool:
        """See `Backend`. A file in vLLM's cache says so."""
        return (cache_root() / key).exists()

    def note_cache_warm(self, key: str) -> None:
        cache_root().mkdir(parents=True, exist_ok=True)
        (cache_root() / key).touch()

    def close(self) -> None:
        self._selector.close()


def _device_lock(slot: Slot) -> pathlib.Path:
    """The file that replicas on the same device lock while their engine starts."""
    name = re.sub(r"[^0-9A-Za-z-]", "-", "-".join(slot.devices))
    folder = pathlib.Path(tempfile.gettempdir(), f"batchinf-devices-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EngineStartError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
    return folder / f"{name}.lock"


def _environment(slot: Slot, sockets: pathlib.Path, own_cache: pathlib.Path | None, port: int) -> dict[str, str]:
    # The package may run from a source tree that is not installed. A replica must import the same one.
    root = str(pathlib.Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {
        "VLLM_PORT": str(port),
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        **engine_environment(slot.devices, len(slot.cpus)),
        **({} if own_cache is None else {"VLLM_CACHE_ROOT": str(own_cache)}),
        **({DEVICE_LOCK: str(_device_lock(slot))} if slot.sharers > 1 else {}),
    }
