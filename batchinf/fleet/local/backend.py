"""The local backend: runs replicas as processes of this host.

It ends only its own process groups and those that an earlier coordinator of the job left behind.
"""

import contextlib
import mmap
import os
import pathlib
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psutil

from batchinf.base.storage import open_log
from batchinf.engines.installed import cuda_of_build
from batchinf.fleet.backend import EndedBy, Ending
from batchinf.fleet.devices import DeviceLook, Slot
from batchinf.fleet.local import devices
from batchinf.fleet.local.channel import Channel
from batchinf.fleet.local.environment import (
    cache_root,
    claim_ports,
    make_own_cache,
    process_environment,
    sockets_folder,
    sweep_sockets,
)
from batchinf.fleet.local.process_group import (
    StoredGroup,
    bytes_read,
    end_leftover,
    end_process_group,
    kill_all_but_trackers,
    members,
)
from batchinf.manifest.lines import StartedReplica
from batchinf.model import files as model_files
from batchinf.model.model import Model
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.messages import Command, Event, Launch
from batchinf.spec.job import JobSpec

# Signals that come from other processes, unlike a segmentation fault.
_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
# The ranks of a large engine each write a traceback.
_LOG_TAIL_BYTES = 1 << 20
# Of a model's weights.
_BLOCK_BYTES = 2 << 20
# Share of the free memory. Reading more weights ahead would push the first files out of the page cache again.
_MOST = 0.5


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
    """A running replica: its process, the channel to it, and the memory with its requests in flight."""

    incarnation: str
    process: "subprocess.Popen[bytes]"
    channel: Channel
    memory: mmap.mmap
    """The record of its requests in flight, which outlives the process."""
    log: pathlib.Path
    log_start: int
    """The byte of its log at which its lines begin."""
    has_own_cache: bool
    folders: tuple[pathlib.Path, ...]
    """Deleted at its end: that of its sockets, and its own cache."""
    selector: selectors.BaseSelector | None
    """Listens to the channel."""
    started: float = field(default_factory=time.monotonic)
    seen: tuple[float, int | None] | None = None
    """Lifetime and exit code when its end began."""

    @cached_property
    def reference(self) -> dict[str, Any]:
        """See `ReplicaHandle`. The replica's process id is also the id of its process group and session."""
        return StoredGroup.of(self.process.pid).model_dump()

    def send(self, command: Command) -> None:
        self.channel.send(command)

    def renew(self, launch: Launch) -> float:
        now = time.monotonic()
        lifetime_s = now - self.started
        self.started = now
        self.incarnation = launch.incarnation
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.send(launch)
        return lifetime_s

    def has_ended(self) -> bool:
        """See `ReplicaHandle`. Processes that it started may still run."""
        return self.process.poll() is not None

    def log_tail(self) -> list[str]:
        return read_log(self.log, self.log_start)

    def start_activity(self) -> tuple[int, int]:
        """See `ReplicaHandle`."""
        num_printed = self.log.stat().st_size if self.log.exists() else 0
        return num_printed, bytes_read(self.process.pid) >> 20

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
        while messages := self.channel.receive(0):
            events.extend(messages)
        in_flight = () if self.memory.closed else tuple(InFlightRecord(self.memory).requests())
        self.channel.close()
        with contextlib.suppress(BufferError):  # an interrupted reader is released with its exception
            self.memory.close()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        return Ending(
            ended_by=_ended_by(code),
            description=f"signal {-code}" if code is not None and code < 0 else f"exit code {code}",
            events=tuple(events),
            in_flight=in_flight,
            lifetime_s=lifetime_s,
        )

    def forget(self) -> None:
        """Stop listening to the channel."""
        if self.selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(self.channel)


def _ended_by(code: int | None) -> EndedBy:
    if code is None:
        return "coordinator"
    return "outside" if code in _FROM_OUTSIDE else "itself"


def _new_memory() -> int:
    """A descriptor of anonymous memory, all zeros, which a replica inherits. It touches no disk. Linux only."""
    descriptor = os.memfd_create("batchinf-in-flight")
    preferred, least = RECORD_BYTES
    try:
        os.ftruncate(descriptor, preferred)
    except OSError:
        os.ftruncate(descriptor, least)
    return descriptor


class LocalBackend:
    """See `Backend`, whose methods are described there."""

    name = "local"
    processors = "this machine's processor"

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._watch: devices.NvmlWatch | None = None

    def devices(self) -> tuple[str, ...]:
        """See `Backend`. Limited by CUDA_VISIBLE_DEVICES."""
        return devices.visible_devices()

    def device_size(self, device: str) -> tuple[int | None, str]:
        return devices.device_size(device)

    def slots_for(self, spec: JobSpec) -> list[Slot]:
        if spec.scripted is not None:
            return devices.slots_on_processor(spec.parallel, devices.own_cpus())
        visible = devices.visible_devices()
        if visible:
            devices.check_driver(cuda_of_build())
        return devices.slots_on(spec.parallel, visible, devices.own_cpus())

    def check_hosts(self, output: pathlib.Path, model: pathlib.Path | None) -> Sequence[str]:
        """See `Backend`. There is one host."""
        return ()

    def check_free(self, engine: Mapping[str, Any], slots: Sequence[Slot]) -> None:
        devices.check_free(engine, slots)

    def device_looks(self, names: Sequence[str]) -> tuple[DeviceLook, ...]:
        if self._watch is None and names:
            self._watch = devices.NvmlWatch(names)
        return () if self._watch is None else self._watch.looks()

    def read_ahead(self, model: Model, load_format: str) -> None:
        """See `Backend`. Reads into the page cache."""
        read_ahead(model, load_format)

    def start(self, launch: Launch, slot: Slot, log: pathlib.Path, *, has_own_cache: bool = False) -> LocalReplica:
        """See `Backend`. The process has its own session."""
        ours, theirs = socket.socketpair()
        descriptor = _new_memory()
        memory = mmap.mmap(descriptor, 0)
        sockets = sockets_folder(launch)
        own_cache = make_own_cache(launch) if has_own_cache else None
        # vLLM finds a free port first and binds it later: two replicas with the same ports can race for one.
        with theirs, claim_ports() as ports, open_log(log) as output:
            log_start = output.tell()
            process = subprocess.Popen(
                # -P: a `queue.py` in the user's folder must not replace Python's.
                [
                    *(sys.executable, "-P", "-m", "batchinf.fleet.local.process"),
                    *(str(theirs.fileno()), str(descriptor)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=process_environment(slot, sockets=sockets, own_cache=own_cache, port=ports.getsockname()[1] + 1),
                # The replica's copy of `ports` holds the claim until it ends.
                pass_fds=(theirs.fileno(), descriptor, ports.fileno()),
                start_new_session=True,
            )
        os.close(descriptor)
        # One replica that does not read must not hold up the coordinator, or the starts of others.
        channel = Channel(ours, sends_later=True)
        channel.send(launch)
        replica = LocalReplica(
            incarnation=launch.incarnation,
            process=process,
            channel=channel,
            memory=memory,
            log=log,
            log_start=log_start,
            has_own_cache=has_own_cache,
            folders=(sockets,) if own_cache is None else (sockets, own_cache),
            selector=self._selector,
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
        if self._watch is not None:
            self._watch.close()
        self._selector.close()


def read_ahead(model: Model, load_format: str) -> threading.Thread | None:
    """Begin to read a local model's weights into the page cache, so that all replicas of the host load them from there.

    The disk is read while vLLM is imported. Copies of all tensors of 4 GB then take 2 to 4 s; without, 7 to 11 s
    (benchmarks/history/processor.md). The thread that digests the weights reads them too, but it does not run if the
    digests are known, nor on other hosts of a cluster.

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
    block = bytearray(_BLOCK_BYTES)
    for path in paths:
        # Errors are ignored: the engine reports them when it loads the file.
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            # All bytes are read. Copies of bytes that only the kernel has read ahead were slower than from disk.
            # Weights that are in memory already are read at 10 GB/s.
            while file.readinto(block):
                pass
