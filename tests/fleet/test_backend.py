"""A second backend, of threads, runs whole jobs: the coordinator knows no process of a replica's."""

import io
import pathlib
import re
import signal
import subprocess
from typing import Any

import pytest

import batchinf
import jobs
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.run import run_job
from batchinf.fleet.engine_defaults import MEASUREMENT
from batchinf.fleet.local.backend import LocalBackend
from batchinf.manifest.lines import StartedReplica
from batchinf.spec.file import read_spec

PACKAGE = pathlib.Path(batchinf.__file__).parent
# What processes, sockets and devices of one host are called.
LOCAL_WORDS = re.compile(
    r"(?<![a-z])(?:get)?pids?(?![a-z])|pgid|getpgrp|killpg|socketpair|memfd|pynvml|VLLM_PORT|\.process\."
)
# Of the coordinator's own process, and of an engine's, whichever backend runs it.
ALLOWED = {
    "base/faults.py": {"pid", "getpid"},  # faults kill the process that passes them
    "manifest/lock.py": {"pid", "getpid"},  # the lock's holder is a coordinator
    "commands/status.py": {"pid", ".process."},  # of the coordinator, as the lock names it
    "commands/push.py": {"getpid"},  # its own process ends with that of the command
    "source/cache.py": {"getpid"},  # a temporary name
    "engines/vllm/engine.py": {"pynvml"},  # the driver's version
    "engines/vllm/hosts.py": {"VLLM_PORT"},  # an engine over several hosts has none of one host
    "fleet/ray/actor.py": {"VLLM_PORT"},  # the coordinator's is not another host's
}


def start(spec: pathlib.Path, **environment: str) -> "subprocess.Popen[str]":
    """Start a job on threads."""
    folder = pathlib.Path(__file__).parent
    command = ["in_process", str(spec)]
    return jobs.start_module(jobs.fork_server(), command, folder, environment, stderr=subprocess.PIPE)


def finish(spec: pathlib.Path, **environment: str) -> str:
    """Run a job on threads, which must end well; what it said."""
    process = start(spec, **environment)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


def backends_of(out: pathlib.Path) -> list[str]:
    return [event["backend"] for event in jobs.events_of(out, "replica_started")]


def test_a_job_on_threads_has_the_rows_of_one_on_processes(tmp_path: pathlib.Path) -> None:
    finish(jobs.spec_of(tmp_path))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert backends_of(out) == ["in-process"] * 2
    assert jobs.state_of(out).of(StartedReplica) == []
    assert {event["replica"] for event in jobs.events_of(out, "ready")} == {0, 1}


def test_rows_of_a_replica_that_is_lost_run_again(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output={"rows_per_shard": 20}, checkpoint_interval_s=60)
    said = finish(spec, LOSES="000001.0001")
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert max(jobs.table_of(out)["attempts"].to_pylist()) == 2
    [lost, *_] = jobs.events_of(out, "replica_ended")
    assert (lost["incarnation"], lost["cause"]) == ("000001.0001", "ended with the loss of its thread")
    assert not jobs.events_of(out, "death")  # nobody suspects its rows
    assert "replica 0 restarting: ended with the loss of its thread" in said


def test_hosts_that_are_lost_before_a_row_is_finished_give_up_no_replica(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1}, max_restarts=1)
    said = finish(spec, LOSES_HOSTS="4")
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert len(backends_of(out)) == 5
    assert said.count("ended with the loss of its thread") == 4


def test_a_row_that_kills_the_engine_is_found(tmp_path: pathlib.Path) -> None:
    out, fault = tmp_path / "out", "engine.prompt.20:*=die"
    finish(jobs.spec_of(tmp_path), BATCHINF_FAULTS=fault)
    rows = jobs.rows_of(out)
    assert [row["row_index"] for row in rows if row["error_type"] is not None] == [20]
    assert [row for row in rows if row["row_index"] != 20] == [row for row in jobs.unhurt() if row["row_index"] != 20]
    assert [event["row_index"] for event in jobs.events_of(out, "condemned")] == [20]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 75), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_job_that_is_stopped_goes_on_with_processes(number: int, code: int, tmp_path: pathlib.Path) -> None:
    slow, out = {"step_s": 0.02, "max_num_seqs": 4}, tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted=slow, drain_timeout_s=0, output={"rows_per_shard": 20})
    process = start(spec)
    jobs.wait_until(lambda: process.poll() is not None or jobs.snapshot_of(out).get("num_shards_done", 0))
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert 0 < len(jobs.state_of(out).parts) < len(jobs.state_of(out).committed)
    jobs.finish(jobs.spec_of(tmp_path, output={"rows_per_shard": 20}))
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert backends_of(out) == ["in-process", "in-process", "local", "local"]


def test_only_the_local_backend_knows_processes_and_sockets() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        words = set(LOCAL_WORDS.findall(path.read_text(encoding="utf-8")))
        if not name.startswith("fleet/local/") and (more := words - ALLOWED.get(name, set())):
            found[name] = more
    assert not found


def interrupted(backend: Any, times: int) -> list[Any]:
    """Let Ctrl-C come when the backend ends a replica, so many times. Returns the replicas that it starts."""
    start, replicas, left = backend.start, [], [KeyboardInterrupt] * times

    def started(*given: Any, **options: Any) -> Any:
        replica = start(*given, **options)
        end = replica.end

        def interrupted_end() -> Any:
            if left:
                raise left.pop()
            return end()

        replica.end = interrupted_end
        replicas.append(replica)
        return replica

    backend.start = started
    return replicas


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_no_replica(tmp_path: pathlib.Path) -> None:
    """At a refusal after replicas have started, and in a retry."""
    common: dict[str, Any] = {"sampling": {"max_tokens": 2}, "parallel": {"data_parallel_size": 1}}
    display = ProgressDisplay(io.StringIO())
    refused, finished = {"where": "id = 'none'"}, {"limit": 4}
    for times, retry, given in ((1, None, refused), (2, "true", finished)):
        spec, backend = jobs.spec_of(tmp_path, input=given, **common), LocalBackend()
        if retry is not None:
            jobs.finish(spec)
        replicas = interrupted(backend, times)
        with pytest.raises(KeyboardInterrupt):
            run_job(read_spec(spec, ()), backend, display, retry, extends=False, fresh=False)
        backend.close()
        assert len(replicas) == 1 and replicas[0].has_ended()


def test_chosen_engine_arguments_are_shown_and_stored_with_their_reasons(tmp_path: pathlib.Path) -> None:
    said = finish(jobs.spec_of(tmp_path), DEVICE="NVIDIA H200")
    [size] = re.findall(r"^  max_num_seqs (\d+): a small model", said, re.MULTILINE)
    stored = (tmp_path / "out" / "job.yaml").read_text()
    assert f"#   max_num_seqs {size}: a small model" in stored
    assert "#   compilation_config " in stored
    assert MEASUREMENT in said and MEASUREMENT in stored
    file, heading = MEASUREMENT.rstrip('"').split(', "', 1)
    assert f"## {heading}" in (jobs.ROOT / file).read_text()
    # They are notes: the spec's own section stays as it was.
    assert read_spec(str(tmp_path / "out" / "job.yaml")).spec.engine == {}


@pytest.mark.parametrize("beginning", ["", "Say what this text is about, in the fewest words that you can find: " * 6])
def test_an_embedding_job_reads_some_prompts_before_it_chooses(tmp_path: pathlib.Path, beginning: str) -> None:
    template = beginning + "{{ prompt }}"
    spec = jobs.spec_of(tmp_path, task="embed", sampling=None, input={"prompt_template": template})
    said = finish(spec, DEVICE="NVIDIA H200")
    assert "  async_scheduling true: " in said
    assert ("  enable_prefix_caching false: " in said) is (not beginning)
