"""Requests to stop, wherever they meet a job: what each leaves time for, and that the job goes on unharmed."""

import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import duckdb
import pytest

import jobs
from batchinf import cli
from batchinf.base import stop_signals
from batchinf.base.errors import Interrupted, UserError
from batchinf.base.stop_signals import StopRequests, interruptible

# About 15 s of work on two replicas, whatever the machine.
LONG = {"max_num_seqs": 8, "step_s": 0.03}
TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.mark.parametrize(
    ("drain_timeout_s", "heard", "drain_s", "end_s"),
    [
        (20, [INT], 20, 30),
        (600, [USR1], 600, 610),
        (600, [HUP], 600, 610),
        (600, [TERM], 20, 25),
        (5, [TERM], 5, 15),
        (0, [TERM], 0, 10),
        (600, [USR1, TERM], 20, 25),
        (600, [TERM, USR1], 20, 25),
    ],
)
def test_what_each_request_leaves_time_for(
    drain_timeout_s: float, heard: list[int], drain_s: float, end_s: float
) -> None:
    requests = StopRequests(drain_timeout_s)
    assert not requests
    assert requests.drain_until == requests.end_by == math.inf
    now = time.monotonic()
    for number in heard:
        requests.note(number)
    assert requests
    assert requests.drain_until - now == pytest.approx(drain_s, abs=0.5)
    assert requests.end_by - now == pytest.approx(end_s, abs=0.5)


@pytest.mark.parametrize(
    ("heard", "is_at_once"),
    [([INT], False), ([INT, INT], True), ([TERM, INT], True), ([TERM, TERM], False), ([HUP, HUP, TERM], False)],
)
def test_only_ctrl_c_after_another_request_stops_at_once(heard: list[int], is_at_once: bool) -> None:
    requests = StopRequests(20)
    for number in heard:
        requests.note(number)
    assert requests.is_at_once == is_at_once


def test_an_interruption_that_was_swallowed_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals._requests, "is_open", True)
    monkeypatch.setattr(stop_signals._requests, "heard", [(TERM, time.monotonic())])
    requests = StopRequests(600)
    assert requests
    assert requests.name == "SIGTERM"


TWICE = """
import os, signal, sys, time
from batchinf.base.errors import Interrupted
from batchinf.base.stop_signals import interruptible
steps = []
try:
    with interruptible(ends_process=True):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            steps.append("the lock is freed")
except Interrupted as error:
    steps.append(str(error))
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(" ".join(steps))
"""


def test_more_signals_disturb_neither_the_unwinding_nor_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=jobs.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "the lock is freed stopped on SIGTERM")


PRESSED = """
import os, signal, sys, time
from batchinf.base.errors import Interrupted
from batchinf.base.stop_signals import interruptible
steps = []
try:
    with interruptible(ends_process=True):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            try:
                for wait_s in (0, 0.2, float(sys.argv[1])):
                    time.sleep(wait_s)
                    os.kill(os.getpid(), signal.SIGINT)
                steps.append("the lock is freed")
            except KeyboardInterrupt:
                steps.append("disturbed")
except Interrupted as error:
    sys.exit(" ".join([*steps, str(error)]))
"""


@pytest.mark.parametrize(("wait_s", "words"), [("0.1", "the lock is freed"), ("0.5", "disturbed")])
def test_ctrl_c_twice_within_half_a_second_counts_once(wait_s: str, words: str) -> None:
    """The terminal signals the process, and `timeout` or a launcher passes its own signal on."""
    command = [sys.executable, "-c", PRESSED, wait_s]
    done = subprocess.run(command, cwd=jobs.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, f"{words} stopped on SIGINT")


# -- whole jobs ------------------------------------------------------------------------------------------------------


def is_at_work(out: pathlib.Path) -> bool:
    snapshot = jobs.snapshot_of(out)
    return snapshot.get("state") == "running" and any(replica["in_flight"] for replica in snapshot["replicas"])


def held(process: "subprocess.Popen[str]", marker: pathlib.Path) -> None:
    jobs.wait_until(lambda: (marker.exists() and marker.read_text()) or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()


def assert_stopped(process: "subprocess.Popen[str]", out: pathlib.Path, words: str) -> None:
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert f"stopped on {words}" in errors
    assert "Traceback" not in errors
    assert not (out / "lock").exists()


def test_a_signal_to_the_whole_tree_at_once(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted=LONG, output={"rows_per_shard": 40}, drain_timeout_s=0.5)
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: is_at_work(out) or process.poll() is not None)
    for one in jobs.family(process.pid):
        one.send_signal(TERM)
    assert_stopped(process, out, "SIGTERM")
    assert not any(event["cause"] for event in jobs.events_of(out, "replica_ended"))
    jobs.finish(spec, "--set", "scripted.step_s=0")
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert len(jobs.events_of(out, "replica_started")) == 4


def test_ctrl_c_that_comes_twice_drains(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, scripted=LONG, output={"rows_per_shard": 40}, drain_timeout_s=60)
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: is_at_work(tmp_path / "out") or process.poll() is not None)
    process.send_signal(INT)
    time.sleep(0.1)
    process.send_signal(INT)
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert "runs again: nothing; no request was cut off" in errors


@pytest.mark.slow
def test_after_sigterm_all_is_over_before_the_kill_follows(tmp_path: pathlib.Path) -> None:
    """Engines stand still, and the drain would last ten minutes: the end comes by itself all the same."""
    marker, out = tmp_path / "held", tmp_path / "out"
    spec = jobs.spec_of(
        tmp_path, drain_timeout_s=600, output={"rows_per_shard": 10}, parallel={"data_parallel_size": 1}
    )
    process = jobs.start("run", spec, faults=f"engine.step:60=hold {marker}")
    held(process, marker)
    process.send_signal(TERM)
    started = time.monotonic()
    time.sleep(1)
    process.send_signal(TERM)  # as srun does, and whoever ends a whole tree
    time.sleep(1)
    assert process.poll() is None
    assert_stopped(process, out, "SIGTERM")
    assert time.monotonic() - started < 30
    marker.unlink()
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())


def test_a_stop_while_the_spec_is_read(tmp_path: pathlib.Path) -> None:
    spec = tmp_path / "job.yaml"
    os.mkfifo(spec)
    process = jobs.start("run", spec)
    writer: list[int] = []

    def has_reader() -> bool:
        with contextlib.suppress(OSError):
            writer.append(os.open(spec, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writer)

    jobs.wait_until(has_reader)
    process.send_signal(TERM)
    # The signal may come just before the read begins, which then waits for the end of the file.
    time.sleep(0.5)
    os.close(writer[0])
    assert_stopped(process, tmp_path, "SIGTERM")


def test_a_stop_while_another_hosts_lock_is_watched(tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path), tmp_path / "out"
    out.mkdir()
    names = ("host", "machine", "boot_id", "pid_namespace", "since", "token")
    lock = {**dict.fromkeys(names, "elsewhere.invalid"), "pid": 1, "start_time": 1}
    (out / "lock").write_text(json.dumps(lock))
    process = jobs.start("run", spec)
    assert process.stderr is not None
    assert "waiting" in process.stderr.readline()
    process.send_signal(HUP)
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert "stopped on SIGHUP" in errors
    assert json.loads((out / "lock").read_text()) == lock


def test_a_stop_during_recovery(tmp_path: pathlib.Path) -> None:
    marker, out, spec = tmp_path / "held", tmp_path / "out", jobs.spec_of(tmp_path)
    assert jobs.run("run", spec, faults="coordinator.before_publish:3=kill").returncode == -9
    # The line of this part is committed, and the next start is about to rename it.
    process = jobs.start("run", spec, faults=f"coordinator.before_publish:1=hold {marker}")
    held(process, marker)
    assert len(list((out / "parts").glob("*.parquet"))) == 2
    process.send_signal(USR1)
    assert_stopped(process, out, "SIGUSR1")
    marker.unlink(missing_ok=True)
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())


def test_an_interruption_within_exec_has_the_exit_code_too(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, signal, sys\nfrom batchinf.base.errors import Interrupted\n"
        "from batchinf.base.stop_signals import interruptible\n"
        "try:\n    with interruptible(ends_process=True):\n        exec('os.kill(os.getpid(), signal.SIGHUP)')\n"
        "except Interrupted as error:\n    sys.exit(error.exit_code)\n"
    )
    (tmp_path / "interrupted.py").write_text(code)
    path = os.pathsep.join((str(tmp_path), str(jobs.ROOT)))
    done = subprocess.run([sys.executable, "-m", "interrupted"], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 75


BUILDS_A_CLASS = """
import importlib.abc, os, signal, sys
import batchinf.__main__, pydantic_core

class Signals:
    def __repr__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "it"

class Before(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "batchinf.commands.plan.plan":
            pydantic_core.SchemaValidator({"type": "literal", "expected": [Signals()]})

sys.meta_path.insert(0, Before())
sys.argv = ["batchinf", "run", "no-such.yaml"]
batchinf.__main__.main()
"""


def test_a_signal_while_pydantic_builds_a_class_of_the_spec() -> None:
    """pydantic raises an error of its own if an interruption comes while it reads the values of a field."""
    done = subprocess.run(
        [sys.executable, "-c", BUILDS_A_CLASS], cwd=jobs.ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (75, "stopped on SIGTERM"), done.stderr


@interruptible()
def opens_a_job(*, is_stopped: bool) -> None:
    try:
        if is_stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("no such column")
    except BaseException as error:  # DuckDB's error, which becomes one of a predicate
        raise UserError(f"where: got 'x': {type(error).__name__}: {error}") from None


def test_an_interruption_that_a_library_makes_an_error_of() -> None:
    with pytest.raises(Interrupted, match="stopped on SIGTERM"):
        opens_a_job(is_stopped=True)
    with pytest.raises(UserError, match="no such column"):
        opens_a_job(is_stopped=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_duckdb_runs_a_query(number: signal.Signals) -> None:
    strike = threading.Timer(0.2, os.kill, (os.getpid(), number))
    strike.start()
    alone = duckdb.connect(config={"threads": 1})  # with others, the main thread may wait for them and see no signal
    with pytest.raises(Interrupted, match=f"stopped on {number.name}"), interruptible():
        alone.execute("SELECT sum(i % 7) FROM range(20_000_000_000) numbers(i)").fetchall()
    with pytest.raises(RuntimeError, match="Query interrupted"), interruptible():
        raise RuntimeError("Query interrupted")  # no stop was asked for


@pytest.mark.parametrize("last", [TERM, USR1])
def test_a_signal_between_the_handlers_and_the_block(last: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS]
    install = signal.signal

    def install_and_strike(number: int, handler: object) -> object:
        before = install(number, handler)  # type: ignore[arg-type]
        if number == last and hasattr(handler, "is_batchinf"):
            os.kill(os.getpid(), TERM)
        return before

    monkeypatch.setattr(signal, "signal", install_and_strike)
    with pytest.raises(Interrupted, match="stopped on SIGTERM"), stop_signals.interruptible():
        raise AssertionError("the block must not begin")
    assert [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS] == usual


def test_a_command_that_a_signal_ends_before_its_block_has_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def struck(*_: object, **__: object) -> Iterator[None]:
        raise stop_signals.StopAskedFor(TERM)
        yield

    monkeypatch.setattr(cli.jobs, "interruptible", struck)
    with pytest.raises(Interrupted, match="stopped on SIGTERM") as caught:
        cli.app(["run", "job.yaml"], standalone_mode=False)
    assert caught.value.exit_code == 75
