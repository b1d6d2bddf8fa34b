"""Jobs from Python: `batchinf.run`, `validate`, `status` and `open`, on the main thread and on others."""

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from typing import Any

import psutil
import pytest
import yaml

import batchinf
import jobs
from batchinf.base import errors

pytestmark = pytest.mark.usefixtures("quick_replicas")

QUICK = {"scripted": {"max_num_seqs": 256, "step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
SLOW = {"scripted": {"max_num_seqs": 4, "step_s": 0.05}, "parallel": {"data_parallel_size": 1}, "drain_timeout_s": 0.2}


def spec(folder: pathlib.Path, **sections: Any) -> dict[str, Any]:
    """A job's spec as a mapping."""
    found: dict[str, Any] = yaml.safe_load(jobs.spec_of(folder, **sections).read_text())
    return found


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], batchinf.RunResults, list[batchinf.JobStatus]]:
    """A job that ran on another thread, with its summary and the calls of its progress callback."""
    given = spec(tmp_path_factory.mktemp("api"), **QUICK)
    seen: list[batchinf.JobStatus] = []
    found: list[batchinf.RunResults] = []
    thread = threading.Thread(target=lambda: found.append(batchinf.run(given, progress=seen.append, quiet=True)))
    thread.start()
    thread.join()
    return given, found[0], seen


def test_a_job_of_another_thread_is_done(done: Any) -> None:
    given, results, seen = done
    summary = results.summary
    assert (summary.num_rows, summary.num_errors, summary.was_done) == (jobs.num_fewer, 0, False)
    assert seen[-1].state == "done"
    assert seen[-1].num_rows_done == jobs.num_fewer
    assert results.table().num_rows == jobs.num_fewer
    assert batchinf.status(given["output"]["path"]).jobs[0].activity == "done"
    assert str(results).startswith(f"done: {jobs.num_fewer} output rows")
    state = str(batchinf.status(given["output"]["path"])).splitlines()
    assert state[0] == f"{given['output']['path']}: done"
    assert state[2].startswith(f"committed: {jobs.num_fewer} of {jobs.num_fewer} output rows")


def test_a_run_returns_results_that_are_read_when_they_are_used(
    done: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, *_ = done
    monkeypatch.chdir(pathlib.Path(given["output"]["path"]).parent)
    results = batchinf.run(given, overrides={"output.path": "out"}, quiet=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(results, batchinf.Results) and len(results) == results.summary.num_rows == jobs.num_fewer
    with pytest.raises(AttributeError, match="'RunResults' object has no attribute 'tabel'"):
        results.tabel  # type: ignore[attr-defined]  # noqa: B018
    (tmp_path / "rows.jsonl").write_text("")
    nothing = batchinf.run({**given, "input": {"path": "rows.jsonl"}}, overrides={"output.path": "new"}, quiet=True)
    assert repr(nothing).startswith("done: rows.jsonl has no rows") and nothing.summary.num_rows == 0
    for _ in range(2):
        with pytest.raises(batchinf.OutputError, match="new holds no job"):
            len(nothing)


def test_calls_leave_no_open_file(done: Any) -> None:
    given, *_ = done
    gc.collect()
    before, kept = psutil.Process().num_fds(), []
    for _ in range(3):
        assert batchinf.run(given, quiet=True).summary.was_done
        with pytest.raises(batchinf.DriftError) as refused:
            batchinf.run(given, overrides={"sampling.max_tokens": 3}, quiet=True)
        kept.append(refused)  # its frames have the backend
    assert psutil.Process().num_fds() <= before


def test_a_spec_may_be_a_mapping_a_file_or_an_object(done: Any, tmp_path: pathlib.Path) -> None:
    given, *_ = done
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(given))
    for form in (given, path, str(path), batchinf.JobSpec.model_validate(given)):
        assert batchinf.run(form, quiet=True).summary.was_done
        with pytest.raises(batchinf.DriftError):
            batchinf.run(form, overrides={"sampling.max_tokens": 3}, quiet=True)
    with pytest.raises(batchinf.SpecError, match="must be the path of a YAML file"):
        batchinf.run(3)  # type: ignore[arg-type]


def test_one_text_in_place_of_several_is_one(done: Any) -> None:
    given, *_ = done
    assert batchinf.run(given, overrides="checkpoint_interval_s=3", quiet=True).summary.was_done
    assert [row.id for row in batchinf.validate(given, rows="en-0041").rows] == ["en-0041"]
    assert batchinf.open(given["output"]["path"]).table(name for name in ["id", "text"]).num_columns == 2  # type: ignore[arg-type]
    with pytest.raises(batchinf.UserError, match="retry: got true or false; must be `errors`, or an SQL expression"):
        batchinf.run(given, retry=True)  # type: ignore[arg-type]
    with pytest.raises(batchinf.UserError, match="slice: got a value of type int; must be text such as '3/8'"):
        batchinf.run(given, slice=0)  # type: ignore[arg-type]


def test_the_callers_mapping_stays_as_it_is(done: Any, tmp_path: pathlib.Path) -> None:
    given = {**done[0], "model": jobs.MODEL, "output": {"path": tmp_path / "new"}}
    before = {**given}
    report = batchinf.validate(given, overrides={"sampling.max_tokens": 3, "input.limit": 5}, rows=["en-0041"])
    assert given == before
    assert report.prompt_lengths.num_rows == 5
    assert [row.id for row in report.rows] == ["en-0041"]
    assert {it.name: it.value for it in report.task.sampling or ()}["max_tokens"] == 3


def test_a_report_shows_the_lines_of_its_command(done: Any, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({**done[0], "model": str(jobs.MODEL), "output": {"path": str(tmp_path / "new")}}))
    drawn = ("--set", "input.limit=5", "--random", "--seed", "3")
    report = batchinf.validate(path, overrides={"input.limit": 5}, random=True, seed=3)
    assert jobs.run("validate", path, *drawn).stdout.splitlines() == repr(report).splitlines()
    plan = batchinf.plan(jobs.MODEL, gpu=["h200"])
    assert jobs.run("plan", jobs.MODEL, "--gpu", "h200").stdout.splitlines() == str(plan).splitlines()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"max_tokens": "3"}}, "spec: sampling.max_tokens: got '3'; must be a whole number"),
        ({"sampling": {1: 2}}, "spec: sampling: got 1 for a field's name; must be text"),
        ({"input": {"path": "x", "promt_column": "y"}}, "spec: input.promt_column: unknown field; did you mean"),
        ({"input": {"path": object()}}, 'spec: input.path: got "<object'),
    ],
)
def test_a_wrong_mapping_is_one_clear_line(change: dict[str, Any], message: str, done: Any) -> None:
    with pytest.raises(batchinf.SpecError) as raised:
        batchinf.validate({**done[0], **change})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_errors_are_those_of_the_tree() -> None:
    tree = {error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, Exception)}
    internal = {errors.EngineDeadError, errors.RowFailed}
    assert {getattr(batchinf, name) for name in batchinf.__all__ if hasattr(errors, name)} == tree - internal
    with pytest.raises(batchinf.OutputError, match="holds no job"):
        batchinf.open("nowhere")


@pytest.mark.parametrize(("out", "got"), [(None, "null"), (["out"], "a list"), (b"out", "a value of type bytes")])
@pytest.mark.parametrize("function", [batchinf.open, batchinf.status])
def test_a_folder_that_is_no_path_is_one_clear_line(function: Any, out: Any, got: str) -> None:
    with pytest.raises(batchinf.OutputError) as raised:
        function(out)
    assert str(raised.value) == f"got {got} as the output folder; must be its path, such as 'out/my-job'"


def test_an_event_stops_a_job_of_any_thread_and_it_resumes(done: Any, tmp_path: pathlib.Path) -> None:
    given, stop, found = spec(tmp_path, **SLOW), threading.Event(), list[BaseException]()

    def work() -> None:
        with pytest.raises(batchinf.Interrupted) as raised:
            batchinf.run(given, stop=stop, quiet=True, progress=lambda now: now.state == "running" and stop.set())
        found.append(raised.value)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [str(error).splitlines()[0] for error in found] == ["stopped on request"]
    assert not jobs.replicas_of(os.getpid())
    assert batchinf.status(tmp_path / "out").jobs[0].activity == "stopped"
    # The requests of one run are not those of the next.
    batchinf.run(given, overrides={"scripted.step_s": 0.0}, quiet=True)
    assert jobs.rows_of(tmp_path / "out") == jobs.rows_of(pathlib.Path(done[1].folder))


def test_an_exception_of_the_callback_ends_the_job(tmp_path: pathlib.Path) -> None:
    calls = list[str]()

    def tell(status: batchinf.JobStatus) -> None:
        calls.append(status.state)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        batchinf.run(spec(tmp_path, **SLOW), progress=tell, quiet=True)
    assert len(calls) == 1
    assert not jobs.replicas_of(os.getpid())
    assert not (tmp_path / "out" / "lock").exists()


INTERRUPTED = """
import os, signal, sys
import psutil
import batchinf

def tell(status):
    if status.state == "running":
        os.kill(os.getpid(), signal.SIGINT)

before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
if sys.argv[2] == "own":
    signal.signal(signal.SIGTERM, lambda *_: print("mine"))
    before[1] = signal.getsignal(signal.SIGTERM)
try:
    batchinf.run(sys.argv[1], progress=tell, quiet=True)
except batchinf.Interrupted as error:
    print(str(error).splitlines()[0])
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
assert not psutil.Process().children(recursive=True)
if sys.argv[2] == "own":
    os.kill(os.getpid(), signal.SIGTERM)
print(batchinf.run(sys.argv[1], overrides={"scripted.step_s": 0.0}, quiet=True).num_rows)
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("a program's own again")
"""


@pytest.mark.slow
@pytest.mark.fewer_rows
def test_ctrl_c_stops_the_job_and_the_program_goes_on(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, **SLOW)
    environment = {**os.environ, **jobs.quick_start()}
    run = [sys.executable, "-c", INTERRUPTED, str(path), "own"]
    # The tests may run with SIGINT ignored, as a background job of a shell does.
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, preexec_fn=restore)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["stopped on SIGINT", "mine", str(jobs.num_fewer), "a program's own again"]
