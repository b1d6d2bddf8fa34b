"""`status` of jobs that run or have died, from files alone: hosts, replicas, last sign of life, slices together."""

import contextlib
import json
import os
import pathlib
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.commands.status import JobState, StatusReport, _load, job_status
from batchinf.fleet.status import JobStatus, ReplicaStatus, read_status
from batchinf.manifest.lines import EndedReplica, Lost, StartedReplica
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import last_epoch, read_state

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
    """Parquet with one large row group: a retry makes its copy again."""
    rows = pa.table({"id": range(20_001), "prompt": ["a"] * 20_001})
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=len(rows))
    where = {"path": str(tmp_path / "rows.parquet"), "limit": 3}
    out = tmp_path / "it's out"
    quick = {"scripted": {"step_s": 0.0}, "parallel": {"data_parallel_size": 1}}
    spec = jobs.spec_of(tmp_path, input=where, output={"path": str(out), "keep_columns": []}, **quick)
    jobs.finish(spec)
    [copy] = (out / "source").glob("*.rows")
    copy.unlink()
    jobs.finish(spec, "--retry", "row_index = 1")
    assert copy.exists()
    assert [row["num_prompt_tokens"] for row in jobs.rows_of(out)] == [2] * 3


def test_a_price_of_a_gpu_hour_makes_cents(tmp_path: pathlib.Path) -> None:
    """Of replicas that have ended and of one that runs, with the price of the spec or of the command."""
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.0}, price_per_gpu_hour=2.0, parallel={"data_parallel_size": 1})
    jobs.finish(spec)
    done = job_status(out)
    assert done.cost is None and "cost" not in lines_of(done)  # it had no GPU
    folder = Folder(out)
    with contextlib.closing(Manifest(folder, last_epoch(folder) + 1, state=read_state(folder))) as log:
        log.record(EndedReplica("000009.0001", 3600.0, True))
        log.commit()
    report = job_status(out)
    totals = report.totals
    assert totals is not None and report.cost is not None
    assert report.cost.total == pytest.approx(2 * totals.device_s / 3600) and totals.device_s >= 3600
    num_tokens = totals.num_prompt_tokens + totals.num_output_tokens
    assert report.cost.cents_per_million_tokens * num_tokens / 1e6 == pytest.approx(100 * report.cost.total)
    assert report.cost.cents_per_thousand_rows * jobs.num_fewer / 1e3 == pytest.approx(100 * report.cost.total)
    assert " cents for a million tokens (prompt and output), " in lines_of(report)
    dearer = json.loads(jobs.run("status", out, "--price", "20", "--json").stdout)
    assert dearer["cost"]["total"] == pytest.approx(10 * report.cost.total)
    assert jobs.run("report", out, "--price", "20").returncode == 0
    assert f"{10 * report.cost.total:,.2f}" in (out / "report.html").read_text()

    # The time of a replica counts while a live process runs it, and not until then.
    with contextlib.closing(Manifest(folder, last_epoch(folder) + 1, state=read_state(folder))) as log:
        log.record(Lost([0]))
        log.record(StartedReplica(0, "000010.0001", "local", {}, ("0",), started_at=time.time()))
        log.commit()
    [stopped, later] = [job_status(out, price=3.6e6).cost for _ in range(2)]
    with JobLock(folder).held(lambda: 1):
        [first, second] = [job_status(out, price=3.6e6).cost for _ in range(2)]
    assert stopped is not None and first is not None and second is not None
    assert stopped == later and stopped.total < first.total < second.total


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
