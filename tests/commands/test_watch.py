"""`status --watch`: its text, and a job that is watched to its end without a terminal."""

import dataclasses
import io
import json
import os
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import jobs
from batchinf.base.slices import Cut, job_folders, write_cut
from batchinf.commands.status import JobState, StatusReport, job_status
from batchinf.commands.watch import _print_lines, watch, watch_text, why_ended
from batchinf.fleet.status import JobStatus
from batchinf.manifest.lock import JobLock


def running() -> StatusReport:
    counts = (1_234_567, 123_456, 12, {"prompt_too_long": 12}, 400, 40, 10**8, 10**7)
    progress = JobStatus("running", *counts, 50_000.0, 12_345.0, 3600.0, 0.0, (), (), 0.0)
    return StatusReport("out/job", None, None, None, (JobState("out/job", None, "running", progress=progress),))


def test_names_in_the_snapshot_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    shown: Any = SimpleNamespace(lines=lambda: ["replica 0 on host [/x], GPU [red]1", "out/\x1b[31mjob: running"])
    stream = io.StringIO()
    Console(file=stream, width=160).print(watch_text(shown))
    assert "replica 0 on host [/x], GPU [red]1" in stream.getvalue()
    assert "out/\\u001b[31mjob: running" in stream.getvalue()

    report = running()
    progress = dataclasses.replace(report.jobs[0].progress, errors={"\x1b]0;title\x07": 12})
    _print_lines(dataclasses.replace(report, jobs=(dataclasses.replace(report.jobs[0], progress=progress),)))
    assert "12 \\u001b]0;title\\u0007" in capsys.readouterr().out


def test_the_view_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    at_work: Any = SimpleNamespace(jobs=(SimpleNamespace(process="of another command"),))

    def print_to_nobody(report: StatusReport) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("batchinf.commands.watch.job_status", lambda out, price: at_work)
    monkeypatch.setattr("batchinf.commands.watch._print_json", print_to_nobody)
    assert watch("out", as_json=True) is at_work


def test_a_slice_that_reads_its_input_is_watched(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path)
    write_cut(out, Cut(2, 10))
    first, second = job_folders(out)
    second.root.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with JobLock(second).held(lambda: 0):
            assert [job.activity for job in job_status(out).jobs] == ["not begun", "starting"]
            assert f"  slice 1/2: starting, by pid {os.getpid()} " in str(job_status(out))
            watched = pool.submit(watch, out, as_json=True)
            shown = ""
            while not shown:
                shown = capsys.readouterr().out
                assert not watched.done() or shown
                time.sleep(0.01)
        report = watched.result(60)
    assert json.loads(shown.splitlines()[0])["jobs"][1]["process"]["pid"] == os.getpid()
    assert [*why_ended(report)] == ["the view ends: no slice runs now, and 2 slices have not begun"]
    last = dataclasses.replace(report, jobs=report.jobs[1:])
    assert [*why_ended(last)] == ["the view ends: no slice runs now, and slice 1/2 has not begun"]
    assert [*why_ended(running())] == []
    assert not first.root.exists()


@pytest.mark.slow
def test_a_job_is_watched_to_its_end(tmp_path: pathlib.Path) -> None:
    path = jobs.spec_of(tmp_path, scripted={"step_s": 0.02}, input={"limit": 100}, parallel={"data_parallel_size": 1})
    running = jobs.start("run", path)
    jobs.wait_until(lambda: any(one["num_running"] for one in jobs.snapshot_of(tmp_path / "out").get("replicas", [])))
    watched = jobs.run("status", "--watch", "--json", tmp_path / "out")
    assert watched.returncode == 0, watched.stderr
    assert jobs.end(running)[0] == 0
    looks = [json.loads(line) for line in watched.stdout.splitlines()]
    assert len(looks) > 1
    assert looks[0]["jobs"][0]["progress"]["replicas"][0]["num_running"] > 0
    assert looks[-1]["jobs"][0]["activity"] == "done"
    ended = jobs.run("status", "--watch", tmp_path / "out")
    assert "committed: 100 of 100 output rows" in ended.stdout
