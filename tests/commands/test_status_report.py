"""`status` of jobs that run or have died, from files alone: hosts, replicas, last sign of life, slices together."""

import os
import pathlib
import subprocess
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.commands.status import InputCopies, JobState, StatusReport, _load, job_status
from batchinf.fleet.status import JobStatus, ReplicaStatus, read_status
from batchinf.manifest.lock import JobLock

HOST = os.uname().nodename


def lines_of(report: StatusReport) -> str:
    return "\n".join(report.lines())


@pytest.mark.slow
def test_slices_that_run_are_summed_up(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted={"max_num_seqs": 2, "step_s": 0.05, "device": "A100"})
    processes = [jobs.start("run", spec, "--slice", f"{index}/3") for index in range(2)]

    def are_up() -> bool:
        report = job_status(str(out)) if (out / "cut.json").exists() else None
        return report is not None and report.load is not None and report.load.num_up == 4

    jobs.wait_until(are_up)
    jobs.kill(jobs.replicas_of(processes[1].pid)[:1])
    jobs.wait_until(lambda: (load := job_status(str(out)).load) is not None and load.num_restarts == 1 and are_up())
    report, now = job_status(str(out)), time.time()
    assert report.load is not None
    assert (report.load.hosts, report.load.num_replicas, report.load.num_devices) == ((HOST,), 4, 0)
    assert report.load.output_tokens_per_s == round(
        sum(job.progress.output_tokens_per_s or 0 for job in report.jobs if job.progress is not None), 1
    )
    assert f"now: 1 host: {HOST} · 4 of 4 replicas up · 1 restart" in lines_of(report)
    assert "slice 2/3 has not begun" in lines_of(report)
    replicas = [replica for job in report.jobs for replica in job.replicas]
    assert [(replica.host, replica.device) for replica in replicas] == [(HOST, "A100")] * 4
    assert all(now - 30 < (replica.heard_at or 0.0) <= now for replica in replicas)

    for process in processes:
        everyone = jobs.family(process.pid)
        jobs.kill(everyone)
        process.communicate()
        assert jobs.are_gone(everyone)
    left = job_status(str(out))
    assert left.load is None
    killed = job_status(str(out / "slice-1"))
    assert (killed.jobs[0].activity, killed.jobs[0].progress) == ("stopped", None)
    assert sum(replica.restarts for replica in killed.jobs[0].replicas) == 1
    assert f"  replica 0 on host {HOST}: " in lines_of(killed)
    assert " restarts in the last run, last heard from " in lines_of(killed)

    # The next process has the lock, and has not written a snapshot yet. The lock's time is in whole seconds.
    folder = Folder(out / "slice-1")
    snapshot = read_status(folder)
    assert snapshot is not None
    jobs.wait_until(lambda: time.time() >= snapshot.updated_at + 1)
    with JobLock(folder).held(lambda: 1):
        resumed = job_status(str(out / "slice-1"))
    assert (resumed.jobs[0].activity, resumed.jobs[0].progress, resumed.load) == ("starting", None, None)


def test_copies_of_the_input_may_be_deleted(tmp_path: pathlib.Path) -> None:
    """Parquet with one large row group: `status` says how to delete its copy, and a retry makes it again."""
    rows = pa.table({"id": range(20_001), "prompt": ["a"] * 20_001})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=len(rows))
    where = {"path": str(tmp_path / "rows.parquet"), "limit": 3}
    out = tmp_path / "it's out"
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
    spec = jobs.spec_of(tmp_path, input=where, output={"path": str(out), "keep_columns": []}, **quick)
    jobs.finish(spec)
    [copy] = (out / "source").glob("*.rows")
    copies = job_status(str(out)).input_copies
    assert copies == InputCopies(copy.stat().st_size, ("source/*.rows",))
    [line] = [line for line in lines_of(job_status(str(out))).split("\n") if line.startswith("copies of the input: ")]
    command = line.partition("them: ")[2].partition(" deletes")[0]
    subprocess.run(command, shell=True, check=True)
    assert not copy.exists() and job_status(str(out)).input_copies is None
    jobs.finish(spec, "--retry", "row_index = 1")
    assert copy.exists()
    assert [row["num_prompt_tokens"] for row in jobs.rows_of(out)] == [2] * 3


def test_a_device_that_two_replicas_share_is_one() -> None:
    def slice_with(*devices: tuple[str, ...]) -> JobState:
        replicas = tuple(
            ReplicaStatus(number, "running", host, "", names, "A100", 0, 0, 0, 0.0, None, 0, None)
            for number, (host, names) in enumerate(zip((HOST, ""), devices, strict=True))
        )
        progress = JobStatus("running", 1, 0, 0, {}, 1, 0, 0, 0, None, None, None, 0.0, replicas, (), 0.0)
        return JobState("out", None, "running", progress=progress)

    load = _load([slice_with(("0", "1"), ("0", "1")), slice_with(("0",), ("1",))])
    assert load is not None
    assert load.num_devices == 4
