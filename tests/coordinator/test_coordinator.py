"""Replicas that fail, hang or lag, requests to stop, a lost lock: what becomes of the job, and of its rows."""

import contextlib
import dataclasses
import gc
import json
import mmap
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
import pytest
from fleets import fleet_of

import jobs
from batchinf.base.storage import Folder
from batchinf.commands.head import read_head
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Fleet, full_message, last_error
from batchinf.fleet.local.backend import LocalBackend, LocalReplica
from batchinf.fleet.local.channel import Channel
from batchinf.fleet.replica import FleetReplica
from batchinf.manifest.lines import StartedReplica
from batchinf.output.journal import Journal
from batchinf.records import Lease, Part
from batchinf.replica.in_flight import RECORD_BYTES
from batchinf.replica.messages import Failed, Launch, LeaseDone, Stopped
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

# About 20 s of work on two replicas, whatever the machine: time enough to meet it at work.
LONG = {"max_num_seqs": 8, "step_s": 0.02, "vary_lengths": False}
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def held(process: "subprocess.Popen[str]", marker: pathlib.Path) -> int:
    """Wait until a process stands still at a fault; its id."""
    jobs.wait_until(lambda: (marker.exists() and marker.read_text()) or process.poll() is not None, 120)
    assert process.poll() is None, process.communicate()
    return int(marker.read_text())


def num_journalled(out: pathlib.Path) -> int:
    """Results in all segments."""
    state = jobs.state_of(out)
    task = task_of(JobSpec.model_validate(state.header.spec))
    journal = Journal(Folder(out), "test", task.result_schema)
    return sum(s.table().num_rows for shard in range(len(state.committed)) for s in journal.recover(shard)[0])


def is_at_work(out: pathlib.Path) -> bool:
    """Whether a replica has said that requests are in its engine."""
    snapshot = jobs.snapshot_of(out)
    return snapshot.get("state") == "running" and any(replica["in_flight"] for replica in snapshot["replicas"])


def error_line(errors: str) -> str:
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    return line


# -- requests to stop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_request_to_stop_exits_with_75_and_loses_nothing(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, scripted={**LONG, "vary_lengths": True}, output={"rows_per_shard": 100})
    out, finished = tmp_path / "out", 0
    for number in STOPS:
        process = jobs.start("run", spec)
        jobs.wait_until(lambda run=process: is_at_work(out) or run.poll() is not None)
        process.send_signal(number)
        code, _, errors = jobs.end(process)
        assert code == 75, errors
        assert number.name in errors
        assert "Traceback" not in errors
        assert jobs.snapshot_of(out)["state"] == "stopped"
        assert not (out / "lock").exists()
        before, finished = finished, jobs.state_of(out).counts.num_rows + num_journalled(out)
        assert finished > before
    assert "stopped before its end" in jobs.run("status", out).stdout
    jobs.finish(spec, "--set", "scripted.step_s=0")
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_job_is_opened(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "held"
    process = jobs.start("run", jobs.spec_of(tmp_path), faults=f"storage.write.before_fsync=hold {marker}")
    held(process, marker)
    process.send_signal(number)
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert number.name in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out" / "lock").exists()


def test_a_stop_does_not_wait_for_engines_that_start(tmp_path: pathlib.Path) -> None:
    process = jobs.start("run", jobs.spec_of(tmp_path, scripted={"start_s": 300}))
    jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out") or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert time.monotonic() - started < 100


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job whose engines stand still after 60 steps, looked at while it runs; then stopped by two signals."""
    folder = tmp_path_factory.mktemp("stuck")
    marker, out = folder / "held", folder / "out"
    spec = jobs.spec_of(folder, drain_timeout_s=600, output={"rows_per_shard": 10}, parallel={"data_parallel_size": 1})
    process = jobs.start("run", spec, faults=f"engine.step:60=hold {marker}")
    held(process, marker)
    has_both = lambda: num_journalled(out) and jobs.state_of(out).counts.num_rows  # noqa: E731
    jobs.wait_until(lambda: has_both() and jobs.snapshot_of(out)["state"] == "running")
    seen = {
        "pid": process.pid,
        "second": jobs.run("run", spec),
        "status": jobs.run("status", out),
        "head": list(read_head(str(out), 1000).rows),
        "committed": jobs.state_of(out).counts.num_rows,
    }
    process.send_signal(signal.SIGINT)
    # Two that come within half a second count once.
    jobs.wait_until(lambda: jobs.snapshot_of(out)["state"] == "stopping" or process.poll() is not None)
    time.sleep(1.0)
    seen["is_draining"] = process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    seen["end"] = jobs.end(process)
    seen["ended_in_s"] = time.monotonic() - started
    marker.unlink(missing_ok=True)
    jobs.finish(spec)
    return {**seen, "rows": jobs.rows_of(out)}


def test_a_second_coordinator_is_told_who_holds_the_job(stuck: dict[str, Any]) -> None:
    assert stuck["second"].returncode == 2
    assert f"pid {stuck['pid']} on host" in error_line(stuck["second"].stderr)


def test_status_of_a_live_job(stuck: dict[str, Any]) -> None:
    assert stuck["status"].returncode == 0
    assert f"running, by pid {stuck['pid']} on host" in stuck["status"].stdout
    assert re.search(r"replica 0 on host \S+: running", stuck["status"].stdout)


def test_head_of_a_live_job_reads_parts_and_journal(stuck: dict[str, Any]) -> None:
    rows = [{name: value for name, value in row.items() if name != "attempts"} for row in stuck["head"]]
    expected = {row["row_index"]: row for row in jobs.unhurt()}
    assert len(rows) > stuck["committed"] > 0
    assert [row["row_index"] for row in rows] == sorted({row["row_index"] for row in rows})
    assert rows == [expected[row["row_index"]] for row in rows]


def test_a_second_signal_stops_at_once(stuck: dict[str, Any]) -> None:
    code, _, errors = stuck["end"]
    assert stuck["is_draining"]
    assert code == 75, errors
    assert stuck["ended_in_s"] < 100
    assert stuck["rows"] == list(jobs.unhurt())


@pytest.mark.slow
def test_under_nohup_a_hangup_is_passed_over(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, scripted={"step_s": 0.005})
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-P", "-m", "batchinf", "run", str(spec)]
    # In a folder whose modules have the names of Python's own.
    for name in ("queue.py", "json.py", "tokenizers.py"):
        (tmp_path / name).write_text("raise RuntimeError('this is not the module that was asked for')")
    environment = {**os.environ, "PYTHONPATH": str(jobs.ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    jobs.wait_until(lambda: jobs.snapshot_of(tmp_path / "out") or process.poll() is not None)
    process.send_signal(signal.SIGHUP)
    code, _, errors = jobs.end(process)
    assert code == 0, errors


# -- what a crash costs ----------------------------------------------------------------------------------------------


def test_a_crash_costs_at_most_an_interval_of_finished_requests(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted=LONG, checkpoint_interval_s=1.0, output={"rows_per_shard": 400})
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: jobs.snapshot_of(out).get("num_rows_done", 0) > 30 or process.poll() is not None)
    finished = jobs.snapshot_of(out)["num_rows_done"]
    time.sleep(2.0)  # the interval, and the same again for a slow disk
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    assert jobs.state_of(out).counts.num_rows == 0
    kept = num_journalled(out)
    assert kept >= finished > 30
    jobs.finish(spec, "--set", "scripted.step_s=0")
    assert sum(event["num_requests"] for event in jobs.events_of(out, "recovered")) == kept
    # The device time of replicas that nobody saw end counts too.
    ended = {event["incarnation"]: event["device_s"] for event in jobs.events_of(out, "replica_ended")}
    started = [event["incarnation"] for event in jobs.events_of(out, "replica_started")]
    assert sorted(ended) == sorted(started)
    assert all(ended[incarnation] > 0.5 for incarnation in started[:2])  # the resume may take less
    assert jobs.state_of(out).of(StartedReplica) == []


@pytest.mark.slow
def test_samples_are_the_same_after_a_crash(tmp_path: pathlib.Path) -> None:
    sampling = {"n": 3, "temperature": 0.8, "max_tokens": 12}
    spec = jobs.spec_of(tmp_path, sampling=sampling, output={"rows_per_shard": 50})
    killed = jobs.run("run", spec, faults="coordinator.after_publish:2=kill")
    assert killed.returncode == -9
    jobs.finish(spec)
    rows = jobs.rows_of(tmp_path / "out")
    assert rows == list(jobs.unhurt(json.dumps(sampling)))
    assert len({tuple(row["token_ids"]) for row in rows[:30]}) > 20


# -- replicas that fail ----------------------------------------------------------------------------------------------


def test_engines_that_cannot_start_are_given_up_with_the_cause(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, max_restarts=1)
    failed = jobs.run("run", spec, faults="replica.start=raise 5")
    assert failed.returncode == 2
    assert "Input/output error" in error_line(failed.stderr)
    starts = [event["replica"] for event in jobs.events_of(tmp_path / "out", "replica_started")]
    assert sorted(starts) == [0, 0, 1, 1]
    assert jobs.snapshot_of(tmp_path / "out")["state"] == "failed"


def test_replicas_that_are_killed_at_the_start_are_given_up_with_the_cause(tmp_path: pathlib.Path) -> None:
    failed = jobs.run("run", jobs.spec_of(tmp_path, max_restarts=0), faults="replica.start=kill SIGSEGV")
    assert failed.returncode == 2
    assert "signal 11" in error_line(failed.stderr)


def test_the_others_go_on_without_a_replica_that_is_given_up(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    spec = jobs.spec_of(tmp_path, max_restarts=0)
    jobs.finish(spec, faults="replica.start=raise 5", BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert len({part.replica for part in jobs.state_of(out).parts.values()}) == 1
    assert len(jobs.events_of(out, "replica_started")) == 2


@pytest.mark.slow
def test_a_replica_that_dies_of_what_it_recovers_is_given_up(tmp_path: pathlib.Path) -> None:
    # What comes out of the journal is no progress: without this the replica would be started for ever.
    marker, out = tmp_path / "held", tmp_path / "out"
    parallel, output = {"data_parallel_size": 1}, {"rows_per_shard": 600}
    spec = jobs.spec_of(tmp_path, max_restarts=0, parallel=parallel, output=output)
    process = jobs.start("run", spec, faults=f"engine.step:99=hold {marker}")
    held(process, marker)
    jobs.wait_until(lambda: num_journalled(out))
    jobs.kill(jobs.family(process.pid))
    process.communicate()
    # Time for it to say how much it has, before it dies. The search for a row that is to blame ends, too.
    failed = jobs.run("run", spec, "--set", "max_restarts=1", faults="engine.step:2=sleep 1.5,engine.step:3=kill")
    assert failed.returncode == 2
    assert "signal 9" in error_line(failed.stderr)
    assert 2 <= len(jobs.events_of(out, "recovered")) < 20


def test_an_engine_that_makes_no_step_is_started_again(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    spec = jobs.spec_of(tmp_path, stall_timeout_s=3)
    jobs.finish(spec, faults="engine.step:30=sleep 600", BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    causes = [event["cause"] for event in jobs.events_of(out, "replica_ended") if event["cause"]]
    assert len(causes) == 1
    assert "no step for 3 s" in causes[0]


@pytest.mark.parametrize("fault", ["replica.start=sleep 600", "replica.open=kill SIGSTOP"])
def test_a_replica_that_hangs_before_its_engine_is_up_is_started_again(fault: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    spec = jobs.spec_of(tmp_path, start_timeout_s=4, parallel={"data_parallel_size": 1})
    done = jobs.finish(spec, faults=fault, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    causes = [event["cause"] for event in jobs.events_of(out, "replica_ended") if event["cause"]]
    assert len(causes) == 1
    assert causes[0].startswith("its start made no progress for 4 s (start_timeout_s)")
    assert causes[0] in done.stderr


@pytest.mark.slow
def test_a_stopped_replica_does_not_block_the_coordinator(tmp_path: pathlib.Path) -> None:
    """The template is larger than the buffer of a socket, so that the first message does not fit into it."""
    template = "{{ prompt }}{# " + "x" * 1_000_000 + " #}"
    spec = jobs.spec_of(tmp_path, input={"prompt_template": template}, scripted={"step_s": 0.02})
    process = jobs.start("run", spec)
    jobs.wait_until(lambda: jobs.replicas_of(process.pid) or process.poll() is not None)
    jobs.replicas_of(process.pid)[0].send_signal(signal.SIGSTOP)
    out = tmp_path / "out"
    jobs.wait_until(lambda: is_at_work(out) or process.poll() is not None)
    before = jobs.snapshot_of(out)["updated_at"]
    jobs.wait_until(lambda: jobs.snapshot_of(out)["updated_at"] > before + 1)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, errors = jobs.end(process)
    assert code == 75, errors
    assert time.monotonic() - began < 25
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())


def test_a_slow_replica_holds_nobody_back(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    marker, out = tmp_path / "held", tmp_path / "out"
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 8})
    process = jobs.start(
        "run", spec, faults=f"engine.step:5=hold {marker}", BATCHINF_FAULTS_ONCE=str(tmp_path / "once")
    )
    held(process, marker)
    # One stands still with what it had begun: ten rows in the engine and sixteen ready, in shards of eight.
    total = len(jobs.state_of(out).committed)
    jobs.wait_until(lambda: len(jobs.state_of(out).parts) >= total - 6 or process.poll() is not None)
    assert process.poll() is None
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.rows_of(out) == list(jobs.unhurt())
    by_replica = [part.replica for part in jobs.state_of(out).parts.values()]
    assert min(by_replica.count(0), by_replica.count(1)) <= 8
    # A shard that was taken back had not been tried.
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}


# -- a lock that is lost; see also test_two_at_once ------------------------------------------------------------------


def test_a_lock_that_is_lost_ends_the_job_without_another_word(tmp_path: pathlib.Path) -> None:
    marker, out = tmp_path / "held", tmp_path / "out"
    process = jobs.start("run", jobs.spec_of(tmp_path), faults=f"coordinator.after_publish:4=hold {marker}")
    held(process, marker)
    lock = json.loads((out / "lock").read_text())
    (out / "lock").write_text(json.dumps({**lock, "token": "another", "pid": 1, "host": "elsewhere"}))
    before = {path: path.read_bytes() for path in [*(out / "manifest").iterdir(), out / "status.json"]}
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 2
    assert "pid 1 on host elsewhere" in error_line(errors)
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((out / "lock").read_text())["token"] == "another"


# -- the pieces, without a job ---------------------------------------------------------------------------------------


SLOT = Slot(0, (), ())


def launch_of(folder: pathlib.Path, incarnation: str = "000001.0001") -> Launch:
    return Launch(0, incarnation, str(folder), folder.name, "{}", "m", "t", None)


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Fleet:
    return fleet_of(LocalBackend(), [SLOT], lambda slot, name: launch_of(tmp_path, name), tmp_path)


def start_process(
    fleet: Fleet, number: int, command: list[str], stack: contextlib.ExitStack, folder: pathlib.Path
) -> tuple["subprocess.Popen[bytes]", Channel]:
    """Let a process take the place of a replica's. Returns it, and its end of the channel."""
    name = f"000001.{number:04d}"
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(command, start_new_session=True)
    sockets = folder / f"sockets-{number}"
    sockets.mkdir()
    fleet.handles[number] = LocalReplica(
        incarnation=name,
        process=process,
        channel=Channel(ours),
        memory=mmap.mmap(-1, RECORD_BYTES[1]),
        log=folder / "log",
        log_start=0,
        has_own_cache=False,
        folders=(sockets,),
        selector=None,
    )
    fleet.replicas[number].start(name, time.monotonic())
    other_end = Channel(theirs)
    stack.callback(other_end.close)
    return process, other_end


def test_the_last_words_of_a_replica_are_heard(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    [replica] = fleet.replicas
    with contextlib.ExitStack() as stack:
        process, other_end = start_process(fleet, 0, ["true"], stack, tmp_path)
        process.wait()
        lease = Lease(7, 70, 71)
        replica.give([lease, Lease(8, 80, 81)])
        part = Part(shard=7, num_rows=1, num_bytes=1, digest="")
        other_end.send(LeaseDone(lease, 1, part=part))
        other_end.send(Failed("OSError", "the cause", 1))
    [ended] = fleet.reap()
    [finished] = ended.finished
    assert (finished.lease, finished.part) == (lease, dataclasses.replace(part, replica=0, incarnation="000001.0000"))
    assert ended.leases == (Lease(8, 80, 81),)
    assert ended.cause == replica.cause == "the cause"
    assert not (replica.is_live or fleet.handles)
    assert not (tmp_path / "sockets-0").exists()


def test_engines_are_ended_once_their_rows_are_stored(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    """A second after its replica has said so while others work; at once when all have."""
    first, *_ = fleet.replicas
    fleet.replicas += [FleetReplica(dataclasses.replace(SLOT, replica=number), 1) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        processes = []
        for replica in fleet.replicas:
            processes.append(start_process(fleet, replica.number, ["sleep", "600"], stack, tmp_path)[0])
            replica.stop()
        first.hear(Stopped(), now=time.monotonic() + 60, at=0.0)
        assert fleet.reap() == []
        first.hear(Stopped(), now=time.monotonic() - 60, at=0.0)
        [ended] = fleet.reap()
        assert (ended.replica, ended.was_asked, ended.in_flight) == (first, True, ())
        fleet.replicas[1].hear(Stopped(), now=time.monotonic(), at=0.0)
        assert fleet.reap() == []
        fleet.replicas[2].hear(Stopped(), now=time.monotonic(), at=0.0)
        assert [end.replica.number for end in fleet.reap()] == [1, 2]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 3
    assert [replica.state for replica in fleet.replicas] == ["ended"] * 3


def test_restarts_leave_no_open_file_and_no_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = LocalBackend()
    gc.collect()  # what other tests have left open must not be closed in between
    before = psutil.Process().num_fds()
    for number in range(8):
        replica = backend.start(launch_of(tmp_path, f"000001.{number:04d}"), SLOT, tmp_path / "log")
        assert replica.folders[0].is_dir()
        replica.end()
        assert not psutil.pid_exists(replica.process.pid)
    assert psutil.Process().num_fds() <= before
    assert backend.poll(0) == []
    # What a coordinator that was killed has left is removed at the next start.
    abandoned = backend.start(launch_of(tmp_path), SLOT, tmp_path / "log")
    replica = backend.start(launch_of(tmp_path), SLOT, tmp_path / "log")
    assert not abandoned.folders[0].exists()
    for one in (abandoned, replica):
        one.end()
    backend.close()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_replica_without_a_coordinator_ends(tmp_path: pathlib.Path) -> None:
    backend = LocalBackend()
    replica = backend.start(launch_of(tmp_path), SLOT, tmp_path / "log")
    replica.channel.close()
    assert replica.process.wait(60) != 0
    replica.end()
    backend.close()


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        ("a line\nanother\n", ""),
        ("ValueError: first\nRuntimeError: Engine core initialization failed.\n", "ValueError: first"),
        ("x torch.OutOfMemoryError: CUDA out of memory. Tried\n", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        ("(EngineCore pid=3) ERROR 01-01 [core.py:1] OSError: no such file\n", "OSError: no such file"),
    ],
)
def test_the_cause_is_quoted_from_the_log(log: str, expected: str) -> None:
    assert last_error(log.splitlines()) == expected


def test_words_that_point_elsewhere_are_followed(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "(EngineCore pid=7) ValueError: an earlier life's trouble\n"
        "(EngineCore pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    start = len(log.read_text().partition("\n")[0]) + 1
    with subprocess.Popen(["true"]) as process:
        nothing: Any = None
        replica = LocalReplica(
            incarnation="000001.0001",
            process=process,
            channel=nothing,
            memory=nothing,
            log=log,
            log_start=start,
            has_own_cache=False,
            folders=(tmp_path,),
            selector=None,
        )
    words = "vLLM could not start: RuntimeError: Engine core initialization failed. See root cause above."
    told = full_message(words, replica)
    assert told.endswith("its log says: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert full_message("a plain cause", replica) == "a plain cause"
