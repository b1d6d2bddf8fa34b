"""Two hosts made of network and process namespaces, joined by one cable, with a Ray cluster over both. As root.

They share the file system, except what a test mounts on one of them. The loopback address of one host is not that of
the other, so a forgotten 127.0.0.1 shows.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import ray_cluster

import jobs

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 6399
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def why_not() -> str:
    """Why there can be no such hosts here; "" if there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"batchinf-try-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


@dataclass(slots=True)
class TwoHosts:
    """Hosts 0, with the head of the cluster, and 1. Each has one CPU, and a GPU by name only."""

    folder: pathlib.Path = field(default_factory=lambda: pathlib.Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp")))
    names: tuple[str, str] = field(default_factory=lambda: _names())
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{_ADDRESSES[0]}:{_PORT}"

    def prefix(self, host: int = 0) -> list[str]:
        """A command that runs the rest on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def begin(self) -> None:
        """Lay the cable, and start Ray on both hosts."""
        a, b = self.names
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for name, address in zip(self.names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        store = ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        self._ray(0, [*head, *store])
        jobs.wait_until(lambda: self._is_up(0), 60)
        self._ray(1, [f"--address={self.address}", *store])
        jobs.wait_until(lambda: self._is_up(1), 60)

    @contextlib.contextmanager
    def mounted(self, path: pathlib.Path, *what: str) -> Iterator[None]:
        """Let host 1 alone see another folder or file at a path. what: arguments of mount."""
        [first] = psutil.Process(self.processes[1].pid).children()
        inside = ["nsenter", "--target", str(first.pid), "--mount", "--pid"]
        subprocess.run([*inside, "mount", *what, str(path)], check=True, capture_output=True)
        yield
        subprocess.run([*inside, "umount", str(path)], check=True, capture_output=True)

    def _ray(self, host: int, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={_ADDRESSES[host]}"]
        # Ray keeps the host's address in its folder, so each host has one of its own.
        own = "" if host == 0 else f"mount -t tmpfs none {self.folder} && "
        script = f"mount --make-rprivate / && {own}exec {shlex.join([*command, *arguments])}"
        with (self.folder / f"host-{host}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    # Ray takes a node manager that it sees among the processes for its own host's.
                    [*self.prefix(host), *_OWN_PROCESSES, "sh", "-c", script],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **ray_cluster.SETTINGS, **jobs.quick_start(), "PYTHONPATH": ""},
                    start_new_session=True,
                )
            )

    def _is_up(self, host: int) -> bool:
        assert self.processes[host].poll() is None, (self.folder / f"host-{host}.log").read_text()
        return "This command will now block" in (self.folder / f"host-{host}.log").read_text()

    def left(self) -> list[str]:
        """The replicas, engines and ranks that run on a host."""
        words = ("batchinf.fleet.local.process", "ReplicaActor", "RayWorkerProc", "EngineCore")
        commands = [_command(pid) for name in self.names for pid in _pids(name)]
        return [command for command in commands if any(word in command for word in words)]

    def end(self) -> None:
        """End all processes on both hosts, and remove the hosts."""
        for name in self.names:
            for pid in _pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(30)
        for name in self.names:
            _ip("netns", "delete", name)
        shutil.rmtree(self.folder, ignore_errors=True)


def _names() -> tuple[str, str]:
    mark = uuid.uuid4().hex[:6]
    return f"batchinf-a-{mark}", f"batchinf-b-{mark}"


def _pids(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def running() -> Iterator[TwoHosts]:
    """Two hosts with a cluster."""
    hosts = TwoHosts()
    try:
        hosts.begin()
        yield hosts
    finally:
        hosts.end()
