"""Runs whole jobs in tests: starts commands as users do, injects faults, and reads rows as readers see them."""

import atexit
import collections
import contextlib
import fcntl
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pickle
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fork_server import ForkServer

from batchinf.base.errors import RowFailed
from batchinf.base.storage import Folder
from batchinf.manifest.events import read_events
from batchinf.manifest.state import State, read_state
from batchinf.records import Completion, Prompt, Result

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "sample_data" / "tiny-llama"
PROMPTS = ROOT / "sample_data" / "prompts.jsonl"
FEWEST = 160
SHARED_FOLDER = "TESTS_SHARED_FOLDER"  # a variable

# Whether a process that a test kills may be forked by a server instead of a new Python. conftest.py sets it for each
# test; the model of the job does not.
may_fork = False
# Whether jobs have `num_fewer` rows instead of 657. conftest.py sets it for each test without the mark `all_rows`; the
# model of the job does not. A run of quick tests has FEWEST.
has_fewer_rows = False
num_fewer = 240
fork_servers: list[ForkServer] = []
_own_servers: list[ForkServer] = []  # see `own_server`
# The latest processes of `start`. conftest.py kills those of a test that fails.
started: collections.deque[subprocess.Popen[str]] = collections.deque(maxlen=50)
environment = dict(os.environ)  # of the servers, without variables of single tests
# cv2, vLLM's engine, lm_eval and Ray set these in the process that uses them. Processes that tests start do not
# inherit them: a server forks no process whose libraries would read other variables than its own.
SET_BY_LIBRARIES = ("HF_XET_HIGH_PERFORMANCE", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONBREAKPOINT")


def unread(completion: Completion) -> Result:
    """The result of a completion whose text is not read yet."""
    return Result(Prompt(completion.request.row_index, [1], None, None), 0, 1, completion, None, None, 1)


def prompts() -> pathlib.Path:
    """The sample prompts, or the first of them."""
    return _fewer_prompts(num_fewer) if has_fewer_rows else PROMPTS


@functools.cache
def _fewer_prompts(num_rows: int) -> pathlib.Path:
    lines = PROMPTS.read_bytes().splitlines(keepends=True)
    with tempfile.NamedTemporaryFile(prefix="prompts-", suffix=".jsonl", delete=False) as file:
        file.writelines(lines[:num_rows])
    path = pathlib.Path(file.name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def spec_of(folder: pathlib.Path, **sections: Any) -> pathlib.Path:
    """Write a spec for the scripted engine and return its path. sections: merged over a small default."""
    spec: dict[str, Any] = {
        "model": str(MODEL),
        "input": {"path": str(prompts()), "id_column": "id"},
        "sampling": {"temperature": 0.0, "max_tokens": 32, "logprobs": 2},
        "parallel": {"data_parallel_size": 2},
        # Many small parts, as a large job has them: `auto` makes four of so few rows.
        "output": {"path": str(folder / "out"), "keep_columns": ["language"], "rows_per_shard": 18},
        "checkpoint_interval_s": 0.2,
        "scripted": {"max_num_seqs": 8, "step_s": 0.001},
    }
    for name, section in sections.items():
        if section is None:
            spec.pop(name, None)
        elif isinstance(section, dict) and isinstance(spec.get(name), dict):
            spec[name] = {**spec[name], **section}
        else:
            spec[name] = section
    path = folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


@functools.cache
def shared_folder() -> pathlib.Path:
    """Where the processes of one run of the tests find what the first of them has made."""
    if found := os.environ.get(SHARED_FOLDER):
        return pathlib.Path(found)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="batchinf-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[SHARED_FOLDER] = str(folder)
    return folder


@functools.cache
def quick_start() -> dict[str, str]:
    """The environment in which processes start faster and find this checkout: see `quick/sitecustomize.py`."""
    path = shared_folder() / "quick-start.pickle"
    with (shared_folder() / "quick-start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(_what_starts_read())
    return {
        "PYTHONPATH": f"{ROOT / 'tests' / 'quick'}{os.pathsep}{ROOT}",
        "QUICK_START": str(path),
        # If it is set, each process would compile all of batchinf again.
        "PYTHONDONTWRITEBYTECODE": "",
    }


def start_quickly() -> None:
    """Give this process what others have read, before it imports transformers: a second."""
    packages, models = pickle.loads(pathlib.Path(quick_start()["QUICK_START"]).read_bytes())
    importlib.metadata.packages_distributions = lambda: packages
    if "transformers.utils.import_utils" not in sys.modules:
        quick = runpy.run_path(str(ROOT / "tests" / "quick" / "sitecustomize.py"))
        sys.meta_path.insert(0, quick["_ModelsReadAlready"](models))


def _what_starts_read() -> bytes:
    packages = importlib.metadata.packages_distributions()
    importlib.metadata.packages_distributions = lambda: packages  # transformers asks for it, too
    from transformers.utils.import_utils import __file__, create_import_structure_from_path

    models = pathlib.Path(__file__).parents[1] / "models"
    read = {str(path): create_import_structure_from_path(path) for path in (models, models / "__init__.py")}
    return pickle.dumps((packages, read))


def start(
    *arguments: str | pathlib.Path,
    faults: str = "",
    prefix: Sequence[str] = (),
    is_unhurt: bool = False,
    is_refused: bool = False,
    **environment: str,
) -> "subprocess.Popen[str]":
    """Start `batchinf` with these arguments, in its own session.

    prefix: a command that runs the rest. is_unhurt: nothing kills the process, so it may always be forked.
    is_refused: no engine of vLLM starts, so no server has to import vLLM.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        # Processes inherit ignored signals, and a test run in the background of a shell ignores SIGINT.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    own = {**inherited(), "BATCHINF_FAULTS": faults, **quick_start(), **environment}
    command = [*prefix, sys.executable, "-m", "batchinf", *map(str, arguments)]
    options = {"cwd": ROOT, "env": own, "start_new_session": True, "text": True}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    may_be_forked = (may_fork or is_unhurt) and not prefix
    if may_be_forked and fork_server().can_fork(own):
        replicas = fork_server(has_vllm=True) if not is_refused and _is_of_vllm(*arguments) else fork_server()
        server = replicas if arguments[:1] == ("verify",) else fork_server()  # `verify` imports PyTorch
        process = server.start(replicas, command, **streams, **options)
    elif may_be_forked and (able := [server for server in _own_servers if server.can_fork(own)]):
        process = able[0].start(able[0], command, **streams, **options)
    else:
        process = subprocess.Popen(command, **streams, **options)
    started.append(process)
    return process


def inherited() -> dict[str, str]:
    """The environment of this process, without changes that libraries have made."""
    changed = {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}
    return {**changed, **{name: environment[name] for name in SET_BY_LIBRARIES if name in environment}}


def _is_of_vllm(command: object, path: str | pathlib.Path = "", *_: object) -> bool:
    """Whether a command runs a job on real vLLM or asks a process that imports PyTorch, and vLLM is installed."""
    if importlib.util.find_spec("vllm") is None or path == "--help":
        return False
    if command in ("plan", "run-batch", "verify"):
        return True
    if command != "run" or not pathlib.Path(path).is_file():
        return False
    return "scripted" not in pathlib.Path(path).read_text(encoding="utf-8", errors="replace")


@functools.cache
def fork_server(*, has_vllm: bool = False) -> ForkServer:
    """The fork server of all processes of this run of the tests, with or without vLLM. It ends with the last one."""
    shared = shared_folder() / ("server-with-vllm" if has_vllm else "server")
    server = ForkServer({**environment, **quick_start()}, has_vllm=has_vllm, shared=shared)
    if not fork_servers:
        atexit.register(_leave_servers)
    fork_servers.append(server)
    return server


@contextlib.contextmanager
def own_server(**environment: str) -> Iterator[ForkServer]:
    """In this block, a server of its own forks processes with these variables, which differ from those of others.

    For a whole file: a server takes 4 s of processor time to start, as three processes do. It has no vLLM.
    """
    server = ForkServer({**inherited(), **quick_start(), **environment})
    fork_servers.append(server)
    _own_servers.append(server)
    try:
        yield server
    finally:
        _own_servers.remove(server)
        fork_servers.remove(server)
        server.close()


def _leave_servers() -> None:
    # All before the first wait: each of two processes may have started one of two servers that both use.
    for server in fork_servers:
        server.leave()
    for server in fork_servers:
        server.wait()


def run(*arguments: str | pathlib.Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `batchinf` to its end."""
    process = start(*arguments, is_unhurt=not options.get("faults"), **options)
    out, err = process.communicate(timeout=800)  # pytest's limit for a test is shorter, if the test has none of its own
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_vllm(module: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a program on vLLM, as `start_vllm` does. It must succeed. Returns what it prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start_vllm(module, *arguments, environment=environment, **pipes)
    out, errors = process.communicate(timeout=580)
    assert process.returncode == 0, errors[-4000:]
    return out


def start_vllm(
    module: str, *arguments: str, environment: Mapping[str, str] = MappingProxyType({}), **streams: Any
) -> "subprocess.Popen[str]":
    """Start a module of vLLM, or of the tests' folder, like `python -m`. A server forks it: the imports take 10 s."""
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    return start_module(fork_server(has_vllm=True), [module, *arguments], ROOT / "tests", own, **streams)


def start_module(
    server: ForkServer, command: Sequence[str], folder: pathlib.Path, environment: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[str]":
    """Start a module and its arguments like `python -m` in a folder, whose modules it finds. The server forks it."""
    own = {**inherited(), **quick_start(), **environment}
    assert server.can_fork(own)
    process = server.start(
        server, [sys.executable, "-m", *command], cwd=folder, env=own, start_new_session=True, text=True, **streams
    )
    started.append(process)
    return process


def finish(path: pathlib.Path, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a job that must succeed."""
    done = run("run", path, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def table_of(out: pathlib.Path) -> pa.Table:
    """All parts in the order of their names."""
    paths = sorted((out / "parts").glob("*.parquet"))
    # Each is opened once, because a retry may replace it meanwhile.
    return pa.concat_tables([pq.read_table(pa.BufferReader(path.read_bytes())) for path in paths])


def rows_of(out: pathlib.Path) -> list[dict[str, Any]]:
    """All rows, without `attempts`, which depends on faults."""
    return table_of(out).drop_columns(["attempts"]).to_pylist()


def unhurt(sampling: str = "{}") -> tuple[dict[str, Any], ...]:
    """The rows of an uninterrupted job. sampling: changed fields, as JSON."""
    return _unhurt(sampling, num_fewer if has_fewer_rows else 500)


@functools.cache
def _unhurt(sampling: str, least: int) -> tuple[dict[str, Any], ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        one = {"data_parallel_size": 1}
        finish(spec_of(path, sampling=json.loads(sampling), scripted={"step_s": 0.0}, parallel=one))
        rows = tuple(rows_of(path / "out"))
    assert len({row["row_index"] for row in rows}) >= least
    return rows


def state_of(out: pathlib.Path) -> State:
    """The state in the manifest."""
    state = read_state(Folder(out))
    assert state is not None
    return state


def events_of(out: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """The fields of all events of one name."""
    return [event.fields for event in read_events(Folder(out)) if event.name == name]


def snapshot_of(out: pathlib.Path) -> dict[str, Any]:
    """The content of `status.json`; empty without one."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads((out / "status.json").read_text())
    return {}


def end(process: "subprocess.Popen[str]", wait_s: float = 240.0) -> tuple[int, str, str]:
    """Wait for a process. Returns exit code, output and errors. None of its processes may survive."""
    everyone = family(process.pid)
    out, errors = process.communicate(timeout=wait_s)
    assert are_gone(everyone)
    return process.returncode, out, errors


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants, the root last. A fork server and what it forks for others are left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        # The tests' own process is the parent of the server, which forks for the other workers of pytest, too.
        servers = [psutil.Process(server.pid) for server in fork_servers if server.pid != pid]
        of_servers = {one for server in servers for one in (server, *_children(server))}
        own = [one for one in root.children(recursive=True) if one not in of_servers]
        return [*dict.fromkeys([*_forked_for(pid), *own]), root]
    return []


def _forked_for(pid: int) -> list[psutil.Process]:
    """Processes that the fork server has forked for a process. Their parent is the server."""
    forked = [process for server in fork_servers for process in psutil.Process(server.pid).children()]
    own = [process for process in forked if f"of-{pid}" in _command(process)]
    return [one for process in own for one in (*_children(process), process)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def replicas_of(pid: int) -> list[psutil.Process]:
    """The replicas of a coordinator."""
    return [p for p in family(pid)[:-1] if "batchinf.fleet.local.process" in _command(p)]


def engine_cores_of(pid: int) -> list[psutil.Process]:
    """The processes in which the replicas of a forked coordinator have their engines. The server forks the replicas."""
    servers = {server.pid for server in fork_servers}
    replicas = [process for process in replicas_of(pid) if process.ppid() in servers]
    return [
        core for replica in replicas for core in replica.children() if "resource_tracker" not in str(_command(core))
    ]


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL them all."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def wait_until(condition: Callable[[], object], wait_s: float = 120.0) -> None:
    """Wait for a condition to hold."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def are_gone(processes: list[psutil.Process], wait_s: float = 60.0) -> bool:
    """Whether all of these processes end within `wait_s` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def slowly(*cases: Any) -> list[Any]:
    """Cases of a parametrized test that only `make test-slow` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def share_said(number: int, num_rows: int) -> str:
    """The share of right rows with its standard error and their number, as the lines of an accuracy have it."""
    right = [1.0] * number + [0.0] * (num_rows - number)
    return f"{number / num_rows:.2%} ± {statistics.stdev(right) / num_rows**0.5:.2%} ({number})"


def or_error(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function makes of a row, or the row's error."""
    try:
        return make(*arguments, **options)
    except RowFailed as failed:
        return failed.error
