"""Runs commands in forked children of a warm process, and strikes a child at its n-th step. tests/job_model.py uses it.

Steps are the moments before and after each write, rename, link, deletion, creation and fsync in a folder, each message
between coordinator and replicas, and each fault point. The replicas are threads of the child. A strike kills the child,
cuts the power, ends a replica or its engine, sends a signal, fails the disk, moves the clock, changes an input file, or
takes a file of the output away.

A power cut loses what was not fsynced: the end of a file's data, and the last changes of a folder's names. Nothing is
fsynced in truth, because only such cuts need it.
"""

import atexit
import builtins
import contextlib
import datetime
import errno
import faulthandler
import functools
import gc
import importlib
import json
import mmap
import os
import pathlib
import pkgutil
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

ROOT = pathlib.Path(__file__).resolve().parents[1]
_NOTE = struct.Struct("i?100s")  # number of steps, whether the strike came, its step
_LONGEST_S = 60.0
_DISK = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}
SIGNALS = ("SIGINT", "SIGTERM")


@dataclass(frozen=True, slots=True)
class Strike:
    """at: number of the step. seed: of what is left to chance. lasts: a disk goes on failing.

    shift_s: of a moved clock. edits: files of the input by path, with their new content in hexadecimal digits; for
    `deleted` and `replaced`, the folder and the pattern of the file's name in it.
    """

    kind: str
    at: int
    seed: int = 0
    lasts: bool = False
    shift_s: float = 0.0
    edits: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. code: negative for a signal. step: the step of the strike; empty if it did not come.

    cpu_s: processor time.
    """

    code: int
    errors: str
    output: str
    num_steps: int
    step: str
    cpu_s: float


class Warm:
    """A process with all imports, which forks a child for each command."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def run(
        self, folder: pathlib.Path, arguments: Sequence[str], strike: Strike | None, killer: int | None = None
    ) -> Ended:
        """Run `batchinf` with these arguments. folder: the steps in it count; what the command prints goes there.

        killer: the row whose prompt ends any engine.
        """
        request = {
            "folder": str(folder),
            "arguments": [*arguments],
            "strike": None if strike is None else asdict(strike),
            "killer": killer,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        printed = [(folder / name).read_text(errors="replace") for name in ("errors.txt", "output.txt")]
        return Ended(answer["code"], *printed, answer["num_steps"], answer["step"], answer["cpu_s"])

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()


# The rest of the module runs in the warm process and in its children.


class Gone(BaseException):
    """Ends the threads of a replica that was killed."""


class Hooks:
    """Counts the steps of this process, and strikes at one of them."""

    def __init__(self, folder: pathlib.Path, strike: Strike | None, note: mmap.mmap) -> None:
        self._folder = os.fspath(folder) + "/"
        self._strike = strike
        self._note = note
        self._num_steps = 0
        self._lock = threading.RLock()
        self._random = random.Random(0 if strike is None else strike.seed)
        self._disk = Disk(folder) if strike is not None and strike.kind == "power cut" else None
        self._fails = False
        self._lost: set[Any] = set()
        self._victim: Any = None
        self.shift_s = 0.0

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, name: str, can_fail: str = "", tear: Callable[[], object] = lambda: None) -> None:
        """Pass a step. can_fail: the file whose operation a failing disk refuses. tear: does a part of it."""
        replica = getattr(threading.current_thread(), "replica", None)
        if replica is not None and replica in self._lost:
            raise Gone
        strike = self._strike
        with self._lock:
            if self._fails and can_fail:
                raise OSError(_DISK[strike.kind], os.strerror(_DISK[strike.kind]), can_fail)  # type: ignore[union-attr]
            self._num_steps += 1
            self._write_note(False, b"")
            if strike is None or self._num_steps < strike.at or self._fails:
                return
            kind = strike.kind
            if (kind in ("replica", "engine") and replica is None) or (kind == "engine" and name != "engine.step"):
                return
            if kind in _DISK and not can_fail:
                return
            if kind in ("deleted", "replaced") and not _victims(strike):
                return
            self._strike = None
            self._write_note(True, name.encode()[:100])
            self._strike_now(strike, replica, can_fail, tear)

    def _write_note(self, has_struck: bool, name: bytes) -> None:
        if has_struck or not self._note[4]:
            self._note[: _NOTE.size] = _NOTE.pack(self._num_steps, has_struck, name)
        else:
            self._note[:4] = struct.pack("i", self._num_steps)

    def _strike_now(self, strike: Strike, replica: Any, path: str, tear: Callable[[], object]) -> None:
        match strike.kind:
            case "everything":
                if self._random.random() < 0.5:
                    tear()
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            case "power cut":
                if self._random.random() < 0.5:
                    tear()
                assert self._disk is not None
                self._disk.cut(self._random)
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            case "replica":
                self._lost.add(replica)
                replica.is_lost = True
                raise Gone
            case "engine":
                from batchinf.base.errors import EngineDeadError

                raise EngineDeadError("the engine core was killed")
            case "clock":
                self.shift_s += strike.shift_s
            case "edit":
                for name, content in strike.edits.items():
                    with _open(name, "r+b") as file:
                        file.write(bytes.fromhex(content))
                        file.truncate()
            case "deleted" | "replaced":
                _take_away(_victims(strike)[0], is_replaced=strike.kind == "replaced")
            case "SIGINT" | "SIGTERM":
                os.kill(os.getpid(), signal.Signals[strike.kind])
            case kind:
                self._strike = strike
                self._fails = strike.lasts
                if not strike.lasts:
                    self._strike = None
                raise OSError(_DISK[kind], os.strerror(_DISK[kind]), path)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _is_ours(self, path: str) -> bool:
        return path.startswith(self._folder)

    def operation(self, name: str, call: Callable[..., Any], note: Callable[..., None] | None = None) -> Any:
        """`call` of one or two paths with a step before and after. note: tells the disk before it is done."""

        @functools.wraps(call)
        def hooked(first: Any, *args: Any, **options: Any) -> Any:
            paths = [_path_of(first, options.get("dir_fd"))]
            if args and isinstance(args[0], str | os.PathLike):
                paths.append(os.fspath(args[0]))
            if not self._is_ours(paths[-1]):
                return call(first, *args, **options)
            short = f"{name} {paths[-1][len(self._folder) :]}"
            self.step(f"before {short}", "" if name in ("unlink", "rmdir") else paths[-1])
            with self._lock:
                if self._disk is not None and note is not None:
                    note(self._disk, *paths)
                result = call(first, *args, **options)
            self.step(f"after {short}")
            return result

        return hooked

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not self._is_ours(path + "/"):
            return
        self.step(f"before fsync {path[len(self._folder) :]}", path)
        with self._lock:
            if self._disk is not None:
                self._disk.synced(descriptor)
        self.step(f"after fsync {path[len(self._folder) :]}")

    def write(self, call: Callable[[Any, Any], int | None]) -> Any:
        """A method that writes to a file, which may be torn."""

        def hooked(file: Any, data: Any) -> int | None:
            path = os.readlink(f"/proc/self/fd/{(getattr(file, '_file', file)).fileno()}")
            part = memoryview(data)[: self._random.randrange(len(data) + 1)] if self._strike is not None else b""
            self.step(f"before write {path[len(self._folder) :]}", path, lambda: call(file, part))
            with self._lock:
                return call(file, data)

        return hooked

    def opening(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit hook: a file is made."""
        if event != "open" or not isinstance(args[0], str | bytes | os.PathLike) or not args[2] & os.O_CREAT:
            return
        path = os.fsdecode(args[0])
        if not self._is_ours(path):
            return
        if not os.path.exists(path):
            self.step(f"create {path[len(self._folder) :]}", path)
            if self._disk is not None:
                with self._lock:
                    self._disk.created(path)


def _victims(strike: Strike) -> list[pathlib.Path]:
    [(folder, pattern)] = strike.edits.items()
    if pattern == ".":
        return [pathlib.Path(folder)] if os.path.exists(folder) else []
    return sorted(path for path in pathlib.Path(folder).glob(pattern) if not path.name.startswith(".tmp-"))


def _take_away(path: pathlib.Path, *, is_replaced: bool) -> None:
    """Delete a file or folder, or put another file of its size, or an empty folder, in its place."""
    is_folder, size = path.is_dir(), path.stat().st_size
    _real["rename"](path, path.parent.parent / f"taken-{path.name}" if is_folder else path.with_name(".taken"))
    if is_replaced and is_folder:
        _real["mkdir"](path)
    elif is_replaced:
        with _open(path, "wb") as file:
            file.write(b"x" * size)
    if not is_folder:
        _real["unlink"](path.with_name(".taken"))


def _path_of(name: Any, folder: int | None) -> str:
    name = os.fsdecode(name) if not isinstance(name, int) else os.readlink(f"/proc/self/fd/{name}")
    return name if folder is None else f"{os.readlink(f'/proc/self/fd/{folder}')}/{name}"


_open = builtins.open
_real = {name: getattr(os, name) for name in ("rename", "link", "unlink", "mkdir", "truncate", "replace")}


class Disk:
    """What of a folder would survive a power cut."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._root = folder
        self._stash = folder / ".stash"
        shutil.rmtree(self._stash, ignore_errors=True)
        self._stash.mkdir()
        self._num_stashed = 0
        # Bytes of each file that are on the disk, by its inode.
        self._sizes = {(found := path.stat()).st_ino: found.st_size for path in self._files()}
        # Changes of names that are not on the disk: the folder, and what undoes them.
        self._changes: list[tuple[str, Callable[[], object]]] = []

    def _files(self) -> Iterator[pathlib.Path]:
        for path in (self._root / "jobs").rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path

    def synced(self, descriptor: int) -> None:
        """A file or a folder was fsynced."""
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self._changes = [change for change in self._changes if change[0] != path]
        else:
            self._sizes[found.st_ino] = found.st_size

    def created(self, path: str) -> None:
        self._changes.append((os.path.dirname(path), lambda: _real["unlink"](path)))

    def made(self, path: str) -> None:
        if not os.path.lexists(path):
            self._changes.append((os.path.dirname(path), lambda: shutil.rmtree(path)))

    def linked(self, source: str, target: str) -> None:
        if not os.path.lexists(target):
            self._changes.append((os.path.dirname(target), lambda: _real["unlink"](target)))

    def removed(self, path: str) -> None:
        if (kept := self._keep(path)) is not None:
            self._changes.append((os.path.dirname(path), lambda: _real["link"](kept, path)))

    def renamed(self, source: str, target: str) -> None:
        kept = self._keep(target)

        def undo() -> None:
            _real["rename"](target, source)
            if kept is not None:
                _real["link"](kept, target)

        self._changes.append((os.path.dirname(target), undo))

    def _keep(self, path: str) -> str | None:
        self._num_stashed += 1
        kept = str(self._stash / str(self._num_stashed))
        try:
            _real["link"](path, kept)
        except OSError:
            return None
        return kept

    def cut(self, chance: random.Random) -> None:
        """Lose the last changes of names, and ends of files, as far as they are not on the disk."""
        num_kept = chance.randint(0, len(self._changes))
        for _, undo in reversed(self._changes[num_kept:]):
            with contextlib.suppress(OSError):
                undo()
        for path in self._files():
            found = path.stat()
            size = self._sizes.get(found.st_ino, 0)
            if found.st_size > size and (lost := chance.choice(("end", "zeros", "nothing"))) != "nothing":
                left = chance.randint(size, found.st_size)
                _real["truncate"](path, left)
                if lost == "zeros":
                    _real["truncate"](path, found.st_size)


# -- a child -----------------------------------------------------------------------------------------------------------


def _install(hooks: Hooks, killer: int | None) -> None:
    """Put the hooks into this process. killer: see `Warm.run`."""
    from batchinf.base import faults, storage
    from batchinf.base.errors import EngineDeadError
    from batchinf.manifest.log import Manifest

    notes = {"rename": Disk.renamed, "replace": Disk.renamed, "link": Disk.linked, "unlink": Disk.removed}
    for name in ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "ftruncate", "truncate"):
        note = notes.get(name, Disk.made if name == "mkdir" else Disk.removed if name == "remove" else None)
        setattr(os, name, hooks.operation(name, getattr(os, name), note))
    os.fsync = hooks.fsync  # type: ignore[assignment]
    storage._NamedFile.write = hooks.write(storage._NamedFile.write)  # type: ignore[method-assign]
    Manifest._write = hooks.write(Manifest._write)  # type: ignore[method-assign]

    def point(name: str, item: object = "") -> None:
        hooks.step(f"{name}.{item}" if name == "engine.output" else name)
        if name == "engine.prompt" and item == killer:
            raise EngineDeadError("the engine core was killed by a row")

    faults.point = point
    sys.addaudithook(hooks.opening)
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if not hasattr(thread, "replica"):
            thread.replica = getattr(threading.current_thread(), "replica", None)  # type: ignore[attr-defined]
        start(thread)

    threading.Thread.start = starting  # type: ignore[method-assign]
    real_time, real_datetime = time.time, datetime.datetime
    time.time = lambda: real_time() + hooks.shift_s

    class Moved(real_datetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real_datetime.now(tz) + datetime.timedelta(seconds=hooks.shift_s)

    datetime.datetime = Moved  # type: ignore[misc]


def _backend(hooks: Hooks) -> Any:
    """Replicas as threads, which a strike can kill."""
    from in_process import InProcessBackend, ThreadReplica

    from batchinf.fleet.backend import Ending
    from batchinf.replica.in_flight import InFlightRecord
    from batchinf.replica.messages import Stop

    class Replica(ThreadReplica):
        is_lost = False

        def _run(self) -> None:
            threading.current_thread().replica = self  # type: ignore[attr-defined]
            with contextlib.suppress(Gone):
                super()._run()

        def hear(self, event: Any) -> None:
            hooks.step(f"message {type(event).__name__}")
            super().hear(event)

        def send(self, command: Any) -> None:
            hooks.step(f"message {type(command).__name__}")
            super().send(command)

        def has_ended(self) -> bool:
            return self.is_lost or super().has_ended()

        def end(self) -> Ending:
            if not self.is_lost and self._thread.is_alive():
                self.send(Stop(0.0))
                self._thread.join(5.0)
            was_alive = self._thread.is_alive()
            # As SIGKILL: from here on it changes nothing.
            hooks._lost.add(self)
            self.is_closed = True
            events, self.events = tuple(self.events), []
            in_flight = tuple(InFlightRecord(self._memory).requests())
            how: Any = "outside" if self.is_lost else "coordinator" if was_alive else "itself"
            return Ending(how, "the end of its thread", events, in_flight, time.monotonic() - self._started)

    class Backend(InProcessBackend):
        def start(self, launch: Any, slot: Any, log: pathlib.Path, *, has_own_cache: bool = False) -> Any:
            replica = Replica(launch, self._has_events, is_lost_later=False)
            self._replicas.append(replica)
            return replica

    return Backend()


def _become(request: dict[str, Any], note: mmap.mmap) -> NoReturn:
    """Run a command in this forked process."""
    os.setsid()
    folder = pathlib.Path(request["folder"])
    for number, name in ((1, "output.txt"), (2, "errors.txt")):
        with _open(folder / name, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", -1, "utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
    faulthandler.dump_traceback_later(_LONGEST_S * 0.8, file=2)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    strike = None if request["strike"] is None else Strike(**request["strike"])
    hooks = Hooks(folder, strike, note)
    backend = _backend(hooks)
    api: Any = sys.modules["batchinf.api"]
    api.choose_backend = lambda spec: backend
    sys.argv = ["batchinf", *request["arguments"]]
    _install(hooks, request["killer"])
    code: Any = 0
    try:
        sys.modules["batchinf.cli"].main()  # type: ignore[attr-defined]
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code or 0)


def _wait(pid: int) -> tuple[int, float]:
    """The exit code of a child, negative for a signal, and its processor time."""
    deadline = time.monotonic() + _LONGEST_S
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1, 0.0
        time.sleep(0.001)


def _make_cheap() -> None:
    """Do once what each child would do again."""
    import typer

    from batchinf.source.formats import parquet

    command = typer.main.get_command(sys.modules["batchinf.cli"].app)  # type: ignore[attr-defined]
    typer.main.get_command = lambda app: command
    # Another process reads Parquet footers first. No file of the model has one that crashes it.
    all_read = lambda command, input, **_: subprocess.CompletedProcess(command, 0, "\n" * len(json.loads(input)), "")  # noqa: E731
    parquet.subprocess = types.SimpleNamespace(run=all_read)  # type: ignore[attr-defined]


def main() -> None:
    """Import everything that jobs need, then serve requests until standard input ends."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fleet")]
    import fork_server

    for _, name, _ in pkgutil.walk_packages(importlib.import_module("batchinf").__path__, "batchinf."):
        if name != "batchinf.__main__" and not name.startswith(("batchinf.engines.vllm", "batchinf.fleet.ray")):
            importlib.import_module(name)
    for name in [*fork_server._MODULES, "in_process", "batchinf.cli"]:
        importlib.import_module(name)
    _make_cheap()
    gc.collect()
    gc.freeze()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    for line in requests:
        request, note = json.loads(line), mmap.mmap(-1, 4096)
        pid = os.fork()
        if pid == 0:
            atexit._clear()
            _become(request, note)
        code, cpu_s = _wait(pid)
        num_steps, has_struck, name = _NOTE.unpack(note[: _NOTE.size])
        step = name.rstrip(b"\0").decode(errors="replace") if has_struck else ""
        answer = {"code": code, "num_steps": num_steps, "step": step, "cpu_s": cpu_s}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
