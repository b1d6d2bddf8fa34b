"""`batchinf slurm` on a real Slurm of two nodes: scripts that are accepted, signalled, queued again and killed."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import cluster
import psutil
import pytest
import stores
import yaml

import jobs
from batchinf.commands.status import job_status

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SCRIPTS = jobs.ROOT / "jobs" / "slurm"
FILES = sorted(path for path in SCRIPTS.glob("*.sbatch") if path.stem not in ("two_nodes", "bucket"))
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
WAIT_S = 300.0  # a job is up in seconds, but in minutes on a busy machine


@pytest.fixture(scope="module")
def slurm() -> Iterator[cluster.Cluster]:
    # A short path: munged's socket must fit into 107 bytes.
    folder = pathlib.Path(f"/tmp/batchinf-slurm-{os.getpid()}")
    with contextlib.closing(cluster.Cluster(folder)) as started:
        yield started
    shutil.rmtree(folder)


@pytest.fixture
def submit(slurm: cluster.Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Submits a job with `batchinf slurm` and returns its id. No job outlives the test."""
    for name, value in {**slurm.environment, **jobs.quick_start()}.items():
        monkeypatch.setenv(name, value)

    def submitted(spec: pathlib.Path, *options: str) -> str:
        done = jobs.run("slurm", spec, "--sbatch", "cpus-per-task=2", *options, "--submit")
        assert done.returncode == 0, done.stderr
        [job] = re.findall(r"submitted job (\d+)", done.stdout)
        return str(job)

    yield submitted
    slurm.end_jobs()


def wait_for(slurm: cluster.Cluster, job: str, wait_s: float = WAIT_S) -> str:
    """The state in which a job ends."""
    jobs.wait_until(lambda: time.sleep(0.5) or slurm.state(job) in ENDED, wait_s)
    return slurm.state(job)


def log_of(folder: pathlib.Path) -> str:
    return "\n".join(path.read_text() for path in sorted((folder / "out.slurm").glob("*.log")))


def num_committed(out: pathlib.Path) -> int:
    with contextlib.suppress(Exception):
        return jobs.state_of(out).counts.num_rows
    return 0


def test_a_job_is_signalled_before_its_limit_and_queued_again_until_it_is_done(
    slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path
) -> None:
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.09}, stop_before_s=11, drain_timeout_s=1)
    job = submit(spec, "--time", "1", "--gpus", "a100:1")
    assert wait_for(slurm, job) == "COMPLETED", log_of(tmp_path)
    assert int(slurm.state(job, "Restarts")) >= 1
    assert "SIGUSR1: running requests have up to 1 s to finish" in log_of(tmp_path)
    assert "Exited with exit code 75" in log_of(tmp_path)
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())
    assert jobs.state_of(tmp_path / "out").last_epoch == int(slurm.state(job, "Restarts")) + 1


def test_a_job_that_never_finishes_a_row_is_not_queued_for_ever(
    slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path
) -> None:
    spec = jobs.spec_of(tmp_path, scripted={"start_s": 1000}, parallel={"data_parallel_size": 1})
    job = submit(spec, "--max-requeues", "1")
    for num_starts in (1, 2):
        jobs.wait_until(lambda n=num_starts: len(_starts(tmp_path / "out")) == n, WAIT_S)
        slurm.call("scancel", "--signal=USR1", job)
    assert wait_for(slurm, job) == "FAILED", log_of(tmp_path)
    assert slurm.state(job, "Restarts") == "1"
    log = log_of(tmp_path)
    assert "queued again: requeue 1 of at most 1 without a new finished row" in log
    assert "not queued again: 1 requeue(s) in a row brought no new finished row (--max-requeues 1)" in log


def _starts(out: pathlib.Path) -> list[dict[str, Any]]:
    with contextlib.suppress(Exception):
        return jobs.events_of(out, "replica_started")
    return []


def test_a_cancelled_job_stays_cancelled(slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    job = submit(jobs.spec_of(tmp_path, scripted={"step_s": 0.1}))
    jobs.wait_until(lambda: num_committed(out), WAIT_S)
    slurm.call("scancel", job)
    jobs.wait_until(lambda: "Exited with exit code 75" in log_of(tmp_path), WAIT_S)
    slurm.wait_for_nodes()
    assert (slurm.state(job), slurm.state(job, "Restarts")) == ("CANCELLED", "0")
    assert job_status(str(out)).jobs[0].activity == "stopped"


def test_a_node_that_fails_costs_no_row(slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path) -> None:
    job = submit(jobs.spec_of(tmp_path, scripted={"step_s": 0.03}))
    jobs.wait_until(lambda: num_committed(tmp_path / "out"), WAIT_S)
    node = slurm.state(job, "BatchHost")
    slurm.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    jobs.wait_until(lambda: slurm.state(job, "Restarts") == "1", WAIT_S)
    with contextlib.suppress(subprocess.CalledProcessError):  # refused if the node has come back by itself
        slurm.call("scontrol", "update", f"nodename={node}", "state=resume")
    assert wait_for(slurm, job) == "COMPLETED", log_of(tmp_path)
    assert slurm.state(job, "Restarts") == "1"
    assert jobs.rows_of(tmp_path / "out") == list(jobs.unhurt())


def test_an_array_of_three_with_one_task_killed(slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.04}, parallel={"data_parallel_size": 1})
    job = submit(spec, "--array", "3")
    jobs.wait_until(lambda: all(num_committed(out / f"slice-{index}") for index in range(3)), WAIT_S)
    report = job_status(str(out))
    assert report.load is not None
    assert (report.load.num_replicas, report.load.hosts) == (3, (os.uname().nodename,))
    process = report.jobs[1].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert [wait_for(slurm, f"{job}_{index}") for index in range(3)] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert [job.activity for job in job_status(str(out)).jobs] == ["done", "stopped", "done"]

    again = slurm.call("sbatch", "--parsable", "--array=1", f"{out}.slurm/job.sbatch", cwd=jobs.ROOT)
    assert wait_for(slurm, f"{again}_1") == "COMPLETED", log_of(tmp_path)
    assert [job.activity for job in job_status(str(out)).jobs] == ["done"] * 3
    rows = [row for index in range(3) for row in jobs.rows_of(out / f"slice-{index}")]
    assert rows == list(jobs.unhurt())


def test_an_array_of_which_one_task_runs_at_a_time(slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1})
    job = submit(spec, "--array", "2%1")
    assert slurm.state(job, "ArrayTaskThrottle") == "1"
    assert [wait_for(slurm, f"{job}_{index}") for index in range(2)] == ["COMPLETED"] * 2
    assert slurm.state(f"{job}_1", "StartTime") >= slurm.state(f"{job}_0", "EndTime")
    assert [row for index in range(2) for row in jobs.rows_of(tmp_path / "out" / f"slice-{index}")] == list(
        jobs.unhurt()
    )


def test_a_job_on_two_nodes_with_ray_is_signalled_and_queued_again(
    slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    # A replica takes all cores of a node, so that each of the two has one.
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.05}, ray={"resources": {"CPU": 2}})
    job = submit(spec, "--nodes", "2")
    jobs.wait_until(lambda: num_committed(out), WAIT_S)
    load = job_status(str(out)).load
    assert load is not None
    assert (load.num_replicas, load.hosts) == (2, (os.uname().nodename,))
    slurm.call("scancel", "--signal=USR1", job)  # to all steps, as before the time limit
    assert wait_for(slurm, job) == "COMPLETED", log_of(tmp_path)
    assert slurm.state(job, "Restarts") == "1"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    # A cluster of its own in each run.
    started = jobs.events_of(out, "replica_started")
    assert len({(event["backend"], event["identity"]["cluster"]) for event in started}) == 2
    slurm.wait_for_nodes()
    assert not list(pathlib.Path("/tmp").glob(f"ray-{job}-*"))
    assert not [p for p in psutil.process_iter(["cmdline"]) if f"/tmp/ray-{job}-" in " ".join(p.info["cmdline"] or [])]


def test_a_node_of_ray_that_fails_for_good(slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path) -> None:
    """The job goes on with the other node, and says that it does."""
    out = tmp_path / "out"
    job = submit(jobs.spec_of(tmp_path, scripted={"step_s": 0.06}, ray={"resources": {"CPU": 2}}), "--nodes", "2")
    jobs.wait_until(lambda: num_committed(out), WAIT_S)
    _fail_second_node(job)
    assert wait_for(slurm, job) == "COMPLETED", log_of(tmp_path)
    assert "the nodes that are left cannot hold replica" in " ".join(log_of(tmp_path).split())
    assert slurm.state(job, "Restarts") == "0"
    assert jobs.rows_of(out) == list(jobs.unhurt())


def test_no_node_is_left_that_can_hold_a_replica(
    slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 75 after `placement_timeout_s`. Slurm queues the job again, and it is finished with both nodes."""
    out = tmp_path / "out"
    ray = {"resources": {"slot": 1}, "placement_timeout_s": 5}
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.1}, parallel={"data_parallel_size": 1}, ray=ray)
    _use_a_ray_with_a_slot_on_the_second_node(tmp_path / "bin", monkeypatch)
    job = submit(spec, "--nodes", "2")
    jobs.wait_until(lambda: num_committed(out), WAIT_S)
    _fail_second_node(job)
    assert wait_for(slurm, job) == "COMPLETED", log_of(tmp_path)
    words = " ".join(log_of(tmp_path).split())
    assert "stopped: the nodes that are left could hold no replica for 5 s" in words
    assert "queued again: requeue 1" in words
    assert slurm.state(job, "Restarts") == "1"
    assert jobs.rows_of(out) == list(jobs.unhurt())


def _use_a_ray_with_a_slot_on_the_second_node(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another `ray` first on the PATH, whose node has a resource `slot` unless it is the head."""
    folder.mkdir()
    (folder / "ray").write_text(
        "#!/bin/bash\n"
        """case " $* " in *" --address="*) set -- "$@" --resources '{"slot": 1}' ;; esac\n"""
        f'exec {sys.prefix}/bin/ray "$@"\n'
    )
    (folder / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def _fail_second_node(job: str) -> None:
    """Kill Ray's node that is not the head, as if its host had failed."""
    of_job = [p for p in psutil.process_iter() if f"/tmp/ray-{job}-" in " ".join(_command(p))]
    raylets = [p for p in of_job if p.name() == "raylet"]
    [lost] = [raylet for raylet in raylets if not any("--head" in _command(parent) for parent in raylet.parents())]
    # First the shell that would start Ray again.
    for process in (*reversed(lost.parents()[:2]), lost):
        process.kill()


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _make_quickstart(folder: pathlib.Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "out" / "quickstart.slurm").mkdir(parents=True)
    (folder / "sample_data").symlink_to(jobs.ROOT / "sample_data")
    spec = yaml.safe_load((jobs.ROOT / "jobs" / "quickstart.yaml").read_text())
    (folder / "jobs" / "quickstart.yaml").write_text(yaml.safe_dump({**spec, "scripted": {}}))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_the_files_that_the_docs_show(file: pathlib.Path, slurm: cluster.Cluster, tmp_path: pathlib.Path) -> None:
    """Run as they are, in a folder whose quickstart has the scripted engine."""
    _make_quickstart(tmp_path)
    assert not subprocess.run(["sbatch", "--test-only", file], env=slurm.environment, check=False).returncode
    job = slurm.call("sbatch", "--parsable", str(file), cwd=tmp_path, **jobs.quick_start())
    tasks = [f"{job}_{index}" for index in range(3)] if file.stem == "array" else [job]
    assert [wait_for(slurm, task) for task in tasks] == ["COMPLETED"] * len(tasks)
    report = job_status(str(tmp_path / "out" / "quickstart"))
    assert report.totals is not None
    assert [job.activity for job in report.jobs] == ["done"] * len(tasks)
    assert report.totals.num_rows_committed == report.totals.num_rows == len(jobs.unhurt())


def test_the_file_of_an_array_whose_slices_are_in_a_bucket(slurm: cluster.Cluster, tmp_path: pathlib.Path) -> None:
    _make_quickstart(tmp_path)
    (tmp_path / "answers.slurm").mkdir()
    stores.make_bucket("my-bucket")
    with stores.proxy() as store:
        environment = {**store.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        script = str(SCRIPTS / "bucket.sbatch")
        job = slurm.call("sbatch", "--parsable", script, cwd=tmp_path, **jobs.quick_start(), **environment)
        logs = tmp_path / "answers.slurm"
        for index in range(8):
            assert wait_for(slurm, f"{job}_{index}") == "COMPLETED", [log.read_text() for log in logs.iterdir()]
        exported = jobs.run("export", "s3://my-bucket/answers", "-o", tmp_path / "rows.jsonl", **environment)
    assert exported.returncode == 0, exported.stderr
    found = [json.loads(line)["row_index"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert found == [row["row_index"] for row in jobs.unhurt()]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sbatch=partition=nowhere", "invalid partition specified: nowhere"),
        ("--gpus=h100:1", "Requested node configuration is not available"),
        ("--sbatch=no-such-option", "unrecognized option '--no-such-option'"),
    ],
)
def test_a_script_that_slurm_refuses_is_not_submitted(
    option: str, message: str, slurm: cluster.Cluster, submit: Any, tmp_path: pathlib.Path
) -> None:
    before = slurm.call("squeue", "--noheader", "--format=%i")
    refused = jobs.run("slurm", jobs.spec_of(tmp_path), option, "--submit")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(rf"error: sbatch refuses \S+: .*{message}.*\n", refused.stderr)
    assert slurm.call("squeue", "--noheader", "--format=%i") == before
