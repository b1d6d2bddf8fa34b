"""A server that forks the processes of jobs in tests: a fork takes 20 ms, a new process a second for its imports.

`jobs.start` starts one server for all processes of a run of the tests. The server forks `batchinf`, and also the
replicas of a forked `batchinf`. It has one thread and runs no job. A forked process gets the session, streams,
environment, folder, arguments and signal handlers of a new one, and runs its module, script or code as Python does.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.context
import os
import pathlib
import pkgutil
import random
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

# Other imports of a job on the scripted engine.
_MODULES = """duckdb filecmp numpy.ma numpy.random pynvml transformers transformers.tokenization_utils_tokenizers
    typer._click.decorators""".split()
# Further imports of a job on real vLLM on a CPU; they take 10 s.
_VLLM = "batchinf.engines.vllm"
_VLLM_MODULES = """vllm.model_executor.layers.quantization.online vllm.model_executor.models.llama vllm.renderers.hf
    vllm.v1.attention.backends.cpu_attn vllm.v1.worker.cpu_worker""".split()
# Only `batchinf verify` imports these, with PyTorch: a fork of a process that has it takes twice as long, so the server
# without vLLM leaves them out.
_WITH_PYTORCH = ("batchinf.commands.reference", "batchinf.commands.verify")
# Python or libraries read these when they start. A process cannot be forked if one of them differs.
READ_AT_IMPORT = ("HF_", "HOME", "HUGGINGFACE_", "LD_", "PYTHON", "QUICK_START", "TRANSFORMERS_", "XDG_")
# Read when needed: the tests set the first for batchinf's own cache, and the hub's library reads its token for each
# request.
_READ_LATER = ("XDG_CACHE_HOME", "HF_TOKEN")
_LONGEST_COMMAND = 4000
_CODE = ["-P", "-c"]
_PAIR = struct.Struct("ii")


class ForkedPopen(subprocess.Popen[Any]):
    """A `Popen` whose process a server forks. The server is the parent and sends the exit status."""

    def __init__(self, address: str, replicas: str, *args: Any, **options: Any) -> None:
        """address: of the server. replicas: address of the server that forks the process's replicas."""
        self._address, self._replicas = address, replicas
        super().__init__(*args, **options)

    def _execute_child(  # type: ignore[override]
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: tuple[int, ...],
        cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *others: Any,
    ) -> None:  # fmt: skip
        umask = os.umask(0o077)
        os.umask(umask)
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": [*args],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or os.getcwd()),
            "umask": umask,
            "numbers": [0, 1, 2, *pass_fds],
            "parent": os.getpid(),
            "replicas": self._replicas,
        }
        content = json.dumps(request).encode()
        self._ending, theirs = os.pipe()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            socket.send_fds(connection, [struct.pack("i", len(content))], [theirs, *streams, *pass_fds])
            os.close(theirs)
            connection.sendall(content)
            self.pid, _ = _PAIR.unpack(os.read(self._ending, _PAIR.size))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._ending], [], [], 0)[0]:
            return 0, 0
        content = os.read(self._ending, _PAIR.size)
        os.close(self._ending)
        return _PAIR.unpack(content) if content else (self.pid, signal.SIGKILL)  # empty: the server has ended


class ForkServer:
    """Starts a server, which can fork processes with its own environment. Harmless variables may differ."""

    def __init__(
        self, environment: Mapping[str, str], *, has_vllm: bool = False, shared: pathlib.Path | None = None
    ) -> None:
        """shared: a path for all processes that use one server. The first of them starts it."""
        self.environment = _read_at_import(environment)
        """The variables in which a process that it forks may not differ."""
        self._has_vllm = has_vllm
        self.process: subprocess.Popen[bytes] | None = None
        if shared is None:
            ours, self._in_use = os.pipe()
            self.address, self.pid = self._start(environment, ours)
        else:
            self.address, self.pid = self._find(environment, shared)

    def _find(self, environment: Mapping[str, str], shared: pathlib.Path) -> tuple[str, int]:
        """The server that another process has started, or a new one. It ends once no process keeps the pipe open."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(shared)
        self._in_use = os.open(shared, os.O_RDWR)
        with open(f"{shared}.address", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            address, pid = json.loads(file.read() or '["", 0]')
            if not _is_there(address):
                address, pid = self._start(environment, os.open(shared, os.O_RDONLY))
                file.truncate(0)
                file.write(json.dumps([address, pid]))
        return address, pid

    def _start(self, environment: Mapping[str, str], ours: int) -> tuple[str, int]:
        """Start the server, which ends when the pipe `ours` does. Returns its address and process id."""
        address = f"\0batchinf-tests-{os.getpid()}-{secrets.randbits(64):x}"
        # Forked processes overwrite the long command.
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, address[1:], "vllm" if self._has_vllm else "", "-" * _LONGEST_COMMAND],
            env=environment,
            stdin=ours,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        os.close(ours)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.process.stdout.close()
        return address, self.process.pid

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        return _read_at_import(environment) == self.environment

    def start(self, replicas: "ForkServer", *args: Any, **options: Any) -> ForkedPopen:
        """Like `subprocess.Popen`. replicas: the server that forks the replicas of this process."""
        return ForkedPopen(self.address, replicas.address, *args, **options)

    def variable(self, name: str = "FORKED_BY", environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """For the environment of programs that are to use this server: see `address_for`.

        environment: theirs, if what differs from the server's is nothing to what it forks.
        """
        return {name: json.dumps([self.address, _read_at_import(environment or self.environment)])}

    def leave(self) -> None:
        """Use the server no more. It ends when the last process does so; forked processes keep running."""
        os.close(self._in_use)

    def close(self) -> None:
        """Leave the server. The process that has started it waits for its end."""
        self.leave()
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the server, if this process has started it."""
        if self.process is not None:
            self.process.wait()


def _is_there(address: str) -> bool:
    """Whether a server listens at an address."""
    with socket.socket(socket.AF_UNIX) as connection:
        return bool(address) and connection.connect_ex(address) == 0


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in environment if name.startswith(READ_AT_IMPORT) and name not in _READ_LATER]
    return {name: environment[name] for name in names}


def address_for(environment: Mapping[str, str], name: str = "FORKED_BY") -> str | None:
    """The address of the server that a variable names, if it can fork a process with this environment."""
    address, own = json.loads(environment.get(name, "[null, null]"))
    return address if own == _read_at_import(environment) else None


# The rest of the module runs in the server and in forked processes.


def _serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request until standard input ends. Returns only in forked processes, with the request."""
    awake, alarm = socket.socketpair()
    for end in (awake, alarm):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    endings: dict[int, int] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    os.dup2(2, 1)
    while True:
        ready, _, _ = select.select([0, listener, awake], [], [])
        if 0 in ready:
            os._exit(0)
        if awake in ready:
            awake.recv(4096)
            _report_ended(endings)
        if listener in ready and (forked := _fork(listener.accept()[0], endings)) is not None:
            signal.set_wakeup_fd(-1)
            for end in (awake, alarm, listener):
                end.detach()
            return forked


def _fork(connection: socket.socket, endings: dict[int, int]) -> tuple[dict[str, Any], list[int]] | None:
    descriptors: list[int] = []
    try:
        with connection:
            connection.settimeout(10.0)
            head, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
            with connection.makefile("rb") as file:
                content = file.read(struct.unpack("i", head)[0])
            request = json.loads(content)
    except (OSError, ValueError, struct.error):
        # The requesting process has ended.
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    with warnings.catch_warnings():
        # Python 3.12 warns of jemalloc's thread, but jemalloc starts a new one after a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        return request, descriptors
    endings[pid], *others = descriptors
    for descriptor in others:
        os.close(descriptor)
    return None


def _report_ended(endings: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            ending = endings.pop(ended[0])
            _tell(ending, *ended)
            os.close(ending)


def _tell(ending: int, *pair: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent may have been killed
        os.write(ending, _PAIR.pack(*pair))


def _become(request: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    """Turn this process into the requested one, as if it were new. Returns what it runs."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = request["command"]
    _show([*command, f"of-{request['parent']}"])
    ending, *others = descriptors
    _tell(ending, os.getpid(), 0)  # only now may its parent look for it or end its process group
    _place(others, request["numbers"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()
    faults = sys.modules["batchinf.base.faults"]
    faults._FAULTS = faults._parse(os.environ.get("BATCHINF_FAULTS", ""))  # type: ignore[attr-defined]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    # The server's stream objects are set up for the server's own files.
    sys.stdout = os.fdopen(1, "w", 1 if is_unbuffered else -1, "utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    os.getppid = functools.partial(_parent, request["parent"])
    if command[1:3] == _CODE:
        sys.argv = ["-c", *command[4:]]
        return functools.partial(exec, command[3], {"__name__": "__main__"})
    module, *arguments = command[command.index("-m") + 1 :] if "-m" in command[:3] else command[1:]
    sys.argv = [module, *arguments]
    if "-P" not in command:
        sys.path.insert(0, os.path.dirname(module) if _is_script(module) else request["folder"])
    if module == "batchinf" or _is_script(module):
        may_fork = is_replica if module == "batchinf" else _is_any
        subprocess.Popen = forking(request["replicas"], may_fork)  # type: ignore[misc]
    elif module in sys.modules:
        # It becomes the main module.
        package, _, name = module.rpartition(".")
        delattr(sys.modules[package], name)
        del sys.modules[module]
    if _is_script(module):
        return functools.partial(runpy.run_path, module, run_name="__main__")
    return functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True)


def _parent(pid: int) -> int:
    """The process that has asked for this one while it runs, as if it were the parent. The server is that."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if not select.select([descriptor], [], [], 0)[0]:
                return pid
        finally:
            os.close(descriptor)
    return 1


def _is_script(module: str) -> bool:
    return module.endswith(".py")


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Move descriptors to their numbers, and close all others."""
    first = max(*numbers, *descriptors, 255) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for descriptor in descriptors]
    os.closerange(3, first)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(first, max(moved) + 1)


def _show(command: list[str]) -> None:
    """Overwrite the server's command line, which `ps` and psutil show."""
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    content = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def is_replica(command: Sequence[str]) -> bool:
    """A replica, a query to vLLM, or a first look at a file that may crash its reader."""
    return command[1:3] in (["-P", "-m"], _CODE)


def _is_any(command: Sequence[str]) -> bool:
    """What a script starts: a replica, `batchinf`, or another script."""
    return is_replica(command) or command[1:3] == ["-m", "batchinf"] or _is_script(command[1])


def forking(server: str, may_fork: Callable[[Sequence[str]], bool] = is_replica) -> Any:
    """A `subprocess.Popen` whose processes a server forks, where `may_fork` says so."""
    new = subprocess.Popen

    class Popen(ForkedPopen):
        def __new__(cls, command: Any, *args: Any, **options: Any) -> Any:
            if may_fork(command):
                return super().__new__(cls)
            return new(command, *args, **options)

        def __init__(self, command: Any, *args: Any, **options: Any) -> None:
            super().__init__(server, server, command, *args, **options)

    return Popen


def _run(main: Callable[[], object]) -> NoReturn:
    """Run a main module and exit like Python, but free nothing: that takes 1 s in a fork."""
    code: Any = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code or 0)


def _make_adapters() -> None:
    """Make the readers of records, which each process of a job would make for itself: 0.1 s of a coordinator."""
    names = ("base.storage", "manifest.lines", "fleet.local.channel")
    storage, lines, channel = (sys.modules[f"batchinf.{name}"] for name in names)
    others = {
        "base.slices": ["Cut"],
        "fleet.sharing.quarantine": ["Case"],
        "fleet.status": ["JobStatus", "_Sample"],
        "manifest.lock": ["Holder"],
        "manifest.events": ["EventLine"],
        "manifest.lines": ["Extent", "Part"],
        "output.parts": ["PartCounts"],
    }
    named = [getattr(sys.modules[f"batchinf.{module}"], name) for module, names in others.items() for name in names]
    for record in [*lines._RECORDS.values(), *channel._KINDS.values(), *named]:
        storage.adapter(record)


def _draw(vocab_size: int = 1536, k: int = 2) -> None:
    """Draw what the scripted engine draws once in a process: for the sample model, and the logprobs of most jobs."""
    draws = sys.modules["batchinf.engines.scripted"]._Draws(vocab_size)
    draws._top[k] = draws._draw_top(k)


def main() -> None:
    """Import everything that jobs need, then fork processes."""
    address, vllm, _ = sys.argv[1:]
    own = [name for _, name, _ in pkgutil.walk_packages(importlib.import_module("batchinf").__path__, "batchinf.")]
    for name in own + _MODULES + _VLLM_MODULES * bool(vllm):
        if name != "batchinf.__main__" and (vllm or not name.startswith((_VLLM, *_WITH_PYTORCH))):
            importlib.import_module(name)
    assert vllm or "torch" not in sys.modules
    if vllm:
        # On CPUs vLLM spawns the processes of its engine, which then import it again. On GPUs it forks them, too.
        contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        contexts["spawn"] = contexts["fork"]
    # Each command would build the whole command line, and end what torch has registered: most of a short one's time.
    typer = importlib.import_module("typer.main")
    typer.get_command = functools.cache(typer.get_command)  # type: ignore[attr-defined]
    typer.get_command(sys.modules["batchinf.cli"].app)
    _make_adapters()
    _draw()
    for registered in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        registered.atexit = False
    gc.collect()
    gc.freeze()
    _run(_become(*_serve("\0" + address)))


if __name__ == "__main__":
    main()
