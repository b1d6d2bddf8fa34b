"""A real Slurm with two nodes on this host, n1 and n2, each with two invented GPUs. `test_on_slurm.py` runs jobs on it.

`python tests/slurm/cluster.py --install` installs Debian's packages. `python tests/slurm/cluster.py FOLDER` starts a
cluster in a folder and ends it at Ctrl-C. It was tried with Slurm 22.05 as root.
"""

import contextlib
import getpass
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")

# cred_expire: how long a requeued job waits, 120 s by default. MinJobAge keeps ended jobs for `scontrol`.
CONF = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=30
MinJobAge=3600
MpiDefault=none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32 RealMemory=8000 Gres=gpu:a100:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=32 RealMemory=8000 Gres=gpu:a100:2
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=YES
"""


def install() -> None:
    """Install Slurm with apt-get if it is missing. Needs root."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        if os.geteuid() or shutil.which("apt-get") is None:
            sys.exit(f"{', '.join(missing)} is missing: install Slurm and munge, on Debian the packages "
                     f"{' '.join(PACKAGES)}")  # fmt: skip
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        if subprocess.run(command, check=False).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(command, check=True)


class Cluster:
    """A running cluster. environment: for the commands of Slurm."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        # Jobs have the PATH of the shell that submits them, here with the environment that runs the tests.
        path = f"{sys.prefix}/bin:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        folder.chmod(0o755)  # munged refuses a folder that others may write to
        self._write("munge.key", secrets.token_bytes(1024), 0o400)
        self._write("slurm.conf", CONF.format(folder=folder, user=getpass.getuser(), ports=_free_ports(3)).encode())
        gpus = [self._write(f"gpu{index}", b"") for index in range(2)]
        self._write("gres.conf", "".join(f"Name=gpu Type=a100 File={gpu}\n" for gpu in gpus).encode())
        self._start_munged()
        self._start("slurmctld", "-c", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self.wait_for_nodes()

    def _write(self, name: str, content: bytes, mode: int = 0o644) -> pathlib.Path:
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(mode)
        return path

    def _start_munged(self) -> None:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        own = [f"--{option}={self._folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "--force", "--foreground", *own)
        _wait_until(lambda: (self._folder / "munge.socket").exists(), lambda: "munged has no socket")

    def _start(self, *command: str) -> None:
        with (self._folder / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def call(self, *command: str, cwd: pathlib.Path | None = None, **environment: str) -> str:
        """Run a command of Slurm and return its output. Raises CalledProcessError, with its errors shown."""
        own = {**self.environment, **environment}
        return subprocess.run(command, cwd=cwd, env=own, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are idle."""

        def states() -> list[str]:
            with contextlib.suppress(subprocess.CalledProcessError):
                return self.call("sinfo", "--noheader", "--Node", "--format=%T").split()
            return []

        _wait_until(lambda: states() == ["idle"] * len(NODES), lambda: f"the nodes are {states()}, not idle")

    def state(self, job: str, field: str = "JobState") -> str:
        """A field of a job, or of a task of an array such as `7_1`, as `scontrol show job` names it."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)[field]

    def end_jobs(self) -> None:
        """Cancel all jobs and wait for their ends."""
        self.call("scancel", "--user", getpass.getuser())
        self.wait_for_nodes()

    def close(self) -> None:
        """End all jobs, and then the daemons with their children."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.end_jobs()
        for daemon in reversed(self._daemons):
            family = psutil.Process(daemon.pid).children(recursive=True)
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _wait_until(condition: Callable[[], object], message: Callable[[], str], wait_s: float = 180.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message())
        time.sleep(0.2)


def _free_ports(number: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    if sys.argv[1:] == ["--install"]:
        install()
        return
    folder = pathlib.Path(sys.argv[1]).resolve()
    with contextlib.closing(Cluster(folder)):
        print(f"export SLURM_CONF={folder}/slurm.conf", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
