"""What happens around an engine that starts: replicas that end meanwhile, and threads that wait for vLLM's forks."""

import pathlib
import subprocess
import sys

import pytest

import jobs


def test_a_replica_that_is_killed_while_its_engine_starts(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    starting, out = tmp_path / "starting", tmp_path / "out"
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1})
    once = str(tmp_path / "once")
    process = jobs.start("run", spec, faults=f"engine.start=hold {starting}", BATCHINF_FAULTS_ONCE=once)
    jobs.wait_until(lambda: starting.exists() and starting.read_text(), 120)
    jobs.kill(jobs.replicas_of(process.pid))
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.rows_of(out) == list(jobs.unhurt())
    # Nothing of it was in an engine: there is no suspect, and no try.
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}
    assert not jobs.events_of(out, "death")
    assert len(jobs.events_of(out, "replica_started")) == 2


@pytest.mark.parametrize("action", ["hold", "raise 5"])
def test_the_rows_of_a_replica_that_does_not_come_up_are_done_by_the_other(action: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    action = f"hold {tmp_path / 'held'}" if action == "hold" else action
    spec = jobs.spec_of(tmp_path, max_restarts=0, output={"rows_per_shard": 400}, scripted={"start_s": 1.0})
    jobs.finish(spec, faults=f"engine.start={action}", BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}
    assert len({part.replica for part in jobs.state_of(out).parts.values()}) == 1


def test_the_feeder_waits_for_the_fork() -> None:
    script = """
import os, subprocess, threading
from batchinf.replica.incarnation import fork_event

os.environ["TOKENIZERS_PARALLELISM"] = "true"
has_forked = fork_event(1)
began = []
thread = threading.Thread(target=lambda: (has_forked.wait(), began.append(os.getpid())))
thread.start()
subprocess.run(["true"], check=True)  # no fork of what is in this process
assert not has_forked.is_set() and not began
child = os.fork()
if not child:
    if not os.fork():  # nor does it begin in a child that forks
        os._exit(0)
    is_wrong = os.wait()[1] or began or has_forked.is_set() or os.environ["TOKENIZERS_PARALLELISM"] != "false"
    os._exit(1 if is_wrong else 0)
assert os.waitpid(child, 0)[1] == 0 and os.environ["TOKENIZERS_PARALLELISM"] == "true"
thread.join(120)
assert began == [os.getpid()]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=jobs.ROOT, timeout=60)
