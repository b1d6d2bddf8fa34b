"""`status` of jobs that run or have died, from files alone: hosts, replicas, last sign of life, slices together."""

import os
import pathlib
import time

import jobs
from batchinf.commands.status import StatusReport, job_status
from batchinf.commands.text.status import status_lines

HOST = os.uname().nodename


def lines_of(report: StatusReport) -> str:
    return "\n".join(status_lines(report))


def test_slices_that_run_are_summed_up(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted={"max_num_seqs": 2, "step_s": 0.05, "device": "A100"})
    processes = [jobs.start("run", spec, "--slice", f"{index}/3") for index in range(2)]

    def are_up() -> bool:
        report = job_status(str(out)) if (out / "slices.json").exists() else None
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
    assert f"now: 1 host(s): {HOST} · 4 of 4 replicas up · 1 restarts" in lines_of(report)
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
