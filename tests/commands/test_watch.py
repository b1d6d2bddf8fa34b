"""`status --watch`: its table at two widths, and a job that is watched to its end without a terminal."""

import dataclasses
import io
import json
import os
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console

import jobs
from batchinf.base.slices import Cut, job_folders, write_cut
from batchinf.commands.status import JobState, StatusReport, job_status
from batchinf.commands.watch import _print_lines, watch, watch_view, why_ended
from batchinf.fleet.devices import DeviceLook
from batchinf.fleet.status import JobStatus, ReplicaStatus
from batchinf.manifest.lock import JobLock

GIB = 2**30


def report_with(replicas: tuple[ReplicaStatus, ...], devices: tuple[DeviceLook, ...], slice_: str | None = None) -> Any:
    errors = {"prompt_too_long": 12}
    counts = (1_234_567, 123_456, 12, errors, 400, 40, 10**8, 10**7)
    progress = JobStatus("running", *counts, 50_000.0, 12_345.0, 3600.0, 0.0, replicas, devices, 0.0)
    job = JobState("out/\x1b[31mjob", slice_, "running", progress=progress)
    return StatusReport("out/\x1b[31mjob", None, None, None, (job,))


REPLICAS = (
    ReplicaStatus(0, "running", "n1", "", ("0", "1"), "H100", 1228, 1024, 204, 0.87, 0.41, 0, None),
    ReplicaStatus(
        1, "starting the engine", "n1", "loading weights 57/191", ("2", "3"), "", 0, 0, 0, 0.0, None, 2, None
    ),
)
DEVICES = tuple(DeviceLook(str(i), 71 * GIB, 80 * GIB, 98 + i % 2, 612.4) for i in range(3))


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_of_replicas_and_devices(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width).print(watch_view(report_with(REPLICAS, DEVICES), width))
    plain = stream.getvalue()
    lines = [line.rstrip() for line in plain.splitlines()]
    assert "…" not in plain
    rows = [line.split() for line in lines]
    # The figures of the engine stand in the row of the replica's first device.
    assert ["0", "up", "0", "71/80", "GiB", "98%", "612", "W", "1,024", "204", "87%", "41%", "0"] in rows
    assert ["1", "71/80", "GiB", "99%", "612", "W"] in rows
    assert ["1", "starting", "2", "71/80", "GiB", "98%", "612", "W", "0", "0", "0%", "–", "2"] in rows
    assert ["3", "–", "–", "–"] in rows
    assert "123,456/1,234,567" in plain
    assert ("replica 1: loading weights 57/191" in plain) == (width == 160)
    assert "\\x1b[31mjob" in plain


def test_uuids_of_gpus_cut_no_other_word() -> None:
    names = ("GPU-1b2c3d4e-1111-2222-3333-444444444444", "MIG-5f6a7b8c-1111-2222-3333-444444444444")
    replicas = (dataclasses.replace(REPLICAS[0], devices=names),)
    devices = tuple(DeviceLook(name, 71 * GIB, 141 * GIB, 100, 699.0) for name in names)
    stream = io.StringIO()
    Console(file=stream, width=80).print(watch_view(report_with(replicas, devices), 80))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert "replica state GPU memory load power running waiting cache hits restarts".split() in lines
    [first] = [line for line in lines if line[2:3] and line[2].startswith("1b2c3d")]
    assert first[3:] == ["71/141", "GiB", "100%", "699", "W", "1,024", "204", "87%", "41%", "0"]


def test_names_in_the_snapshot_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_with((dataclasses.replace(REPLICAS[0], devices=("[/x]", "[red]1")),), ())
    stream = io.StringIO()
    Console(file=stream, width=160).print(watch_view(report, 160))
    assert "[/x]" in stream.getvalue()
    assert "[red]1" in stream.getvalue()

    progress = dataclasses.replace(report.jobs[0].progress, errors={"\x1b]0;title\x07": 12})
    _print_lines(dataclasses.replace(report, jobs=(dataclasses.replace(report.jobs[0], progress=progress),)))
    assert "12 \\u001b]0;title\\u0007" in capsys.readouterr().out


def test_a_slice_that_reads_its_input_is_watched(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path)
    write_cut(out, Cut(2, 10))
    first, second = (folder.folder for folder in job_folders(out))
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
    assert [*why_ended(report_with((), ()))] == []
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
