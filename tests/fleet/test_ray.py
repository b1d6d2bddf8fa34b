"""Whole jobs on a real Ray cluster of several nodes on this host: kills at named steps, resumes, bad clusters."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import psutil
import pytest
import ray_cluster
from ray_cluster import TestCluster, spec_of

import jobs
from batchinf.fleet.devices import Slot
from batchinf.fleet.ray.actor import ReplicaActor, Report
from batchinf.fleet.ray.backend import RayBackend
from batchinf.fleet.ray.handle import RayReplica
from batchinf.manifest.lines import StartedReplica
from batchinf.replica.messages import Launch

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.fewer_rows,
    # Ray's own, in this process, which starts the clusters.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TestCluster]:
    """A head and two nodes for one replica each. A test that kills a node adds another."""
    with ray_cluster.running(2) as cluster:
        yield cluster


def start(spec: pathlib.Path, faults: str = "", **environment: str) -> "subprocess.Popen[str]":
    return jobs.start("run", spec, faults=faults, **environment)


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a job, which must succeed; what it said. Nothing of it may stay."""
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    jobs.wait_until(lambda: not ray_cluster.actors())
    return errors


def held_at(marker: pathlib.Path, process: "subprocess.Popen[str]") -> psutil.Process:
    """The replica that a fault holds."""
    jobs.wait_until(lambda: process.poll() is not None or (marker.exists() and marker.read_text()), 300)
    assert process.poll() is None, process.communicate()[1]
    return psutil.Process(int(marker.read_text()))


def backends_of(out: pathlib.Path) -> list[str]:
    return [event["backend"] for event in jobs.events_of(out, "replica_started")]


@pytest.mark.slow
def test_a_job_on_a_cluster_of_one_node(tmp_path: pathlib.Path) -> None:
    with ray_cluster.running(0, num_cpus=1) as cluster:
        errors = jobs.finish(jobs.spec_of(tmp_path, **cluster.section(resources={}), parallel=None)).stderr
        jobs.wait_until(lambda: not ray_cluster.actors())
        out = tmp_path / "out"
        assert jobs.rows_of(out) == list(jobs.unhurt())
        assert backends_of(out) == ["ray"]
        assert "1 replica on the cluster's processors" in errors
        assert "replica 0 incarnation 000001.0001" in (out / "logs" / "replica-0.log").read_text()
        assert not list(tmp_path.rglob(".batchinf-*")) and not list(jobs.MODEL.glob(".batchinf-*"))


@pytest.mark.slow
def test_images_on_a_cluster(tmp_path: pathlib.Path) -> None:
    ask = [{"role": "user", "content": [{"type": "image", "column": "photo"}, {"type": "text", "text": "Which?"}]}]
    job = {
        "model": str(jobs.ROOT / "sample_data" / "tiny-vision"),
        "input": {"path": str(jobs.ROOT / "sample_data" / "pictures.jsonl"), "messages": ask},
        "sampling": {"max_tokens": 4, "temperature": 1.0, "seed": 1},
        "output": {"keep_columns": []},
    }
    for name in ("here", "cluster"):
        (tmp_path / name).mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "here", **job, parallel={"data_parallel_size": 1}))
    with ray_cluster.running(0, num_cpus=1) as cluster:
        jobs.finish(jobs.spec_of(tmp_path / "cluster", **job, **cluster.section(resources={}), parallel=None))
        jobs.wait_until(lambda: not ray_cluster.actors())
    rows = jobs.rows_of(tmp_path / "cluster" / "out")
    assert rows == jobs.rows_of(tmp_path / "here" / "out")
    assert {len(row["image_digests"]) for row in rows} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "step"),
    [("node", "writer.close:2"), ("actor", "worker.store:3"), ("driver", "writer.close:2")],
)
def test_killed_at_a_step(victim: str, step: str, two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    marker, once, out = tmp_path / "held", tmp_path / "once", tmp_path / "out"
    once.mkdir()
    spec = spec_of(tmp_path, two_nodes)
    # A process of the same user with a group of its own, as another job of the host has.
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    process = start(spec, f"{step}=hold {marker}", BATCHINF_FAULTS_ONCE=str(once))
    replica = held_at(marker, process)
    assert replica in ray_cluster.actors()
    if victim == "node":
        two_nodes.kill(two_nodes.node_of(replica))
        two_nodes.restore(2)
    else:
        os.kill(process.pid if victim == "driver" else replica.ppid(), signal.SIGKILL)
    assert jobs.are_gone([replica]), "a replica outlived its actor"
    if victim == "driver":
        process.communicate(timeout=60)
        jobs.wait_until(lambda: not ray_cluster.actors())
        # The same job goes on with processes of this host.
        jobs.finish(jobs.spec_of(tmp_path, backend="local"))
    else:
        errors = finish(process)
        assert ("the loss of its node" if victim == "node" else "the end of its actor") in errors
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert set(backends_of(out)) == ({"ray", "local"} if victim == "driver" else {"ray"})
    if victim == "node":
        # Rows of a lost node count as not tried.
        assert set(jobs.table_of(out)["attempts"].to_pylist()) == {1}
    assert bystander.poll() is None, "a process group that no replica had was ended"
    bystander.kill()
    bystander.wait()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["", "replica", "driver"])
def test_engines_stay_up_for_an_attempt(victim: str, two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    """victim: killed when an engine is told to go on."""
    marker, once, out = tmp_path / "held", tmp_path / "once", tmp_path / "out"
    once.mkdir()
    spec = spec_of(tmp_path, two_nodes, retry={"attempts": 2, "where": "row_index < 60"})
    process = start(spec, f"replica.again=hold {marker}" if victim else "", BATCHINF_FAULTS_ONCE=str(once))
    if victim:
        replica = held_at(marker, process)
        (process if victim == "driver" else replica).kill()
        marker.unlink()
    if victim == "driver":
        process.wait()
        process = start(spec)
    finish(process)
    rows = jobs.table_of(out).select(["row_index", "attempts"]).to_pylist()
    assert {row["attempts"] >= 3 for row in rows if row["row_index"] < 60} == {True}
    assert [retry.attempt for retry in jobs.state_of(out).retries.values()] == [1, 2]
    assert jobs.state_of(out).of(StartedReplica) == []
    groups = [event["identity"]["group"] for event in jobs.events_of(out, "replica_started")]
    # After a death, a short attempt may end before the new engine is up, which the next attempt then starts again.
    assert len({*groups}) == 2 if not victim else 2 < len({*groups}) < len(groups)


@pytest.mark.parametrize("has_answered", [True, False])
def test_a_coordinator_that_did_not_poll_for_minutes(
    has_answered: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between two attempts, while it looks for rows: only a node that did not answer meanwhile is lost."""
    monkeypatch.setattr(RayReplica, "_place", lambda self: None)
    cluster = mock.MagicMock()
    cluster.live_ids.return_value = frozenset({"node"})
    cluster.ray.wait.side_effect = lambda calls, **_: (calls, []) if has_answered else ([], calls)
    cluster.ray.get.return_value = Report(0, (), None, (), (0, 0), has_ended=False)
    backend = RayBackend(mock.MagicMock())
    backend.__dict__["_cluster"] = cluster
    replica = RayReplica(cluster, mock.MagicMock(), name="group", bundles=(), log=tmp_path / "log")
    replica._actor, replica._nodes, replica._up_since = mock.MagicMock(), frozenset({"node"}), time.monotonic() - 300
    replica._heard_at, replica.calls = time.monotonic() - 200, {"call": "listen"}
    backend._replicas["000001.0001"] = replica, Slot(0, (), ())
    backend.poll(0.01)
    assert replica.has_ended() is not has_answered


def test_a_start_with_an_engine_that_is_up_is_looked_at() -> None:
    """What it reads and prints counts as progress again."""
    actor = ReplicaActor()
    actor._replica = mock.MagicMock(start_activity=lambda: (7, 7), has_ended=lambda: False)
    actor._is_up = True
    assert actor.listen(0, 0.0).start_activity == (0, 0)
    actor.take(0, [Launch(0, "000001.r000001.0002", "", "job", "", "", "", None)])
    assert actor.listen(0, 0.0).start_activity == (7, 7)


@pytest.mark.slow
def test_replicas_that_no_node_can_hold_any_more(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    slow = {"step_s": 0.1, "max_num_seqs": 2}
    process = start(spec_of(tmp_path, two_nodes, scripted=slow, ray=two_nodes.ray(placement_timeout_s=1)))

    def states() -> list[str]:
        return sorted(replica["state"] for replica in jobs.snapshot_of(out).get("replicas", []))

    def has(*expected: str) -> bool:
        return process.poll() is not None or states() == [*expected]

    jobs.wait_until(lambda: has("running", "running"), 300)
    two_nodes.kill(two_nodes.nodes[0])
    jobs.wait_until(lambda: has("running", "waiting for a node"), 120)
    assert process.poll() is None, process.communicate()[1]
    two_nodes.kill(two_nodes.nodes[0])
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 75, errors
    asks = "each asks for 1 CPU, 1 slot, and `ray status` shows what the nodes have"
    words = " ".join(errors.split())
    assert f"warning: the nodes that are left cannot hold replica 1: {asks}" in words or f"replica 0: {asks}" in words
    assert "the other replicas go on, and it starts when a node joins" in words
    assert "no replica can run; if no node joins, the job stops with exit code 75 in 1 s (ray.placement_tim" in words
    assert "stopped: the nodes that are left could hold no replica for 1 s" in words
    two_nodes.restore(2)
    finish(start(spec_of(tmp_path, two_nodes)))
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
def test_a_node_that_is_lost_while_the_job_starts(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    marker, out = tmp_path / "held", tmp_path / "out"
    process = start(spec_of(tmp_path, two_nodes), f"ray.nodes_seen=hold {marker}")
    held_at(marker, process)
    two_nodes.kill(two_nodes.nodes[0])
    marker.unlink()
    errors = " ".join(finish(process).split())
    two_nodes.restore(2)
    assert "of the cluster was lost just now; it is left out" in errors
    assert "the nodes that are left cannot hold replica" in errors
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.slow
def test_a_row_that_kills_its_node_is_found(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    marker, out = tmp_path / "held", tmp_path / "out"
    spec = spec_of(tmp_path, two_nodes, input={"limit": 40}, max_error_rate=0.1, output={"rows_per_shard": 10})
    process = start(spec, f"engine.prompt.20:*=hold {marker}")
    # It is read meanwhile: Ray prints 10 KB for each lost node, and six of them fill a pipe.
    pool = ThreadPoolExecutor()
    finished = pool.submit(finish, process)
    num_lost = 0
    while not finished.done():
        if marker.exists() and (text := marker.read_text()):
            # The coordinator has to hear which rows are in the engine: at first once a second.
            time.sleep(1.5)
            replica = psutil.Process(int(text))
            node = two_nodes.node_of(replica)
            # Without its file, this replica would go on. And the next one that holds may write the file before the node
            # is gone; without that, it would run the row.
            replica.suspend()
            marker.unlink()
            two_nodes.kill(node)
            assert jobs.are_gone([replica]), "a replica outlived its actor"
            two_nodes.restore(2)
            num_lost += 1
        time.sleep(0.05)
    errors = finished.result()
    assert [row["row_index"] for row in jobs.rows_of(out) if row["error_type"]] == [20]
    assert 3 <= num_lost <= 6
    lines = map(json.loads, (out / "manifest" / "000001.jsonl").read_text().splitlines())
    first, second, *_ = [fields for fields in lines if fields["kind"] == "suspects"]
    assert first["replica"] is None
    assert second["replica"] is not None
    assert "rows that were in the engine count as not tried" in errors


@pytest.mark.slow
def test_a_job_that_began_with_processes_goes_on_in_a_cluster(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    slow, out = {"step_s": 0.02, "max_num_seqs": 4}, tmp_path / "out"
    process = start(jobs.spec_of(tmp_path, scripted=slow))
    jobs.wait_until(lambda: process.poll() is not None or jobs.snapshot_of(out).get("num_shards_done", 0))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    process.communicate()
    # In a cluster: told to stop once more, and then to the end.
    process = start(spec_of(tmp_path, two_nodes, scripted=slow, drain_timeout_s=0))
    done = jobs.snapshot_of(out)["num_shards_done"]
    jobs.wait_until(lambda: process.poll() is not None or jobs.snapshot_of(out).get("num_shards_done", 0) > done, 120)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    jobs.wait_until(lambda: not ray_cluster.actors())
    finish(start(spec_of(tmp_path, two_nodes)))
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert backends_of(out) == ["local", "local", "ray", "ray", "ray", "ray"]


def refused(spec: pathlib.Path, **options: Any) -> str:
    """What a job says that must be refused: one line."""
    done = jobs.run("run", spec, **options)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.slow
def test_no_cluster_at_the_address(tmp_path: pathlib.Path) -> None:
    said = refused(jobs.spec_of(tmp_path, backend="ray", ray={"address": "127.0.0.1:1"}))
    assert "no Ray cluster answers at 127.0.0.1:1" in said
    assert "RAY_ADDRESS" in refused(jobs.spec_of(tmp_path, backend="ray"))


@pytest.mark.slow
def test_ray_is_not_installed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')")
    path = os.pathsep.join([str(tmp_path), jobs.quick_start()["PYTHONPATH"]])
    said = refused(jobs.spec_of(tmp_path, backend="ray", ray={"address": "127.0.0.1:1"}), PYTHONPATH=path)
    assert "pip install 'batchinf[ray]'" in said


PROGRAM = """
import sys, threading, batchinf, ray
spec, address = sys.argv[1:]
def run(limit, **options):
    found = []
    def job():
        overrides = {"input.limit": limit, "output.path": f"{spec}.out-{limit}", **options}
        try:
            found.append(batchinf.run(spec, overrides=overrides, quiet=True).num_rows)
        except batchinf.UserError as error:
            found.append(str(error))
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    print(found[0], ray.is_initialized())
run(3)
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
run(4)
host, _, port = address.rpartition(":")
run(5, **{"ray.address": f"{host}:{int(port) - 1}"})
run(6, **{"ray.address": f"127.0.0.1:{port}"})
"""


@pytest.mark.slow
def test_a_program_keeps_its_own_connection_and_no_other(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    spec = spec_of(tmp_path, two_nodes, parallel={"data_parallel_size": 1})
    command = [sys.executable, "-c", PROGRAM, str(spec), two_nodes.address]
    done = subprocess.run(
        command, env={**os.environ, **jobs.quick_start()}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = done.stdout.splitlines()
    assert (first, second, fourth) == ("3 False", "4 True", "6 True")
    assert "this Python process is connected to the Ray cluster at" in third and third.endswith("True")


@pytest.mark.slow
def test_a_group_that_can_never_be_placed(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    said = refused(spec_of(tmp_path, two_nodes, parallel={"data_parallel_size": 3}))
    assert "3 replica(s) can never be placed: each asks for 1 CPU, 1 slot" in said
    said = refused(jobs.spec_of(tmp_path, **two_nodes.section(resources={"CPU": 5}), parallel=None))
    assert "1 replica(s) can never be placed: each asks for 5 CPU" in said


@pytest.mark.slow
def test_a_node_with_a_gpu(tmp_path: pathlib.Path) -> None:
    """Ray only counts the GPU; vLLM runs on the processors. The replica takes the way of one with a GPU."""
    pytest.importorskip("vllm")
    real: dict[str, Any] = {
        "engine": {"max_model_len": 512, "max_num_seqs": 4},
        "input": {"limit": 3},
        "scripted": None,
    }
    with ray_cluster.running(0) as cluster:
        cluster.add(num_gpus=1)
        errors = jobs.finish(spec_of(tmp_path, cluster, **real, parallel=None)).stderr
    assert "1 replica on gpu-0" in errors
    assert len(jobs.rows_of(tmp_path / "out")) == 3


@pytest.mark.slow
def test_real_vllm_on_two_nodes_of_which_one_is_killed(two_nodes: TestCluster, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    lines = jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines[::16]) + "\n", encoding="utf-8")
    real: dict[str, Any] = {
        "input": {"path": str(prompts)},
        "engine": {"max_model_len": 512, "max_num_seqs": 4},
        "scripted": None,
        "output": {"rows_per_shard": 4},
    }
    (tmp_path / "alone").mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "alone", **real, parallel={"data_parallel_size": 1}))
    marker, once, out = tmp_path / "held", tmp_path / "once", tmp_path / "out"
    once.mkdir()
    process = start(
        spec_of(tmp_path, two_nodes, **real), f"engine.step:20=hold {marker}", BATCHINF_FAULTS_ONCE=str(once)
    )
    two_nodes.kill(two_nodes.node_of(held_at(marker, process)))
    two_nodes.restore(2)
    assert "the loss of its node" in finish(process)
    assert jobs.rows_of(out) == jobs.rows_of(tmp_path / "alone" / "out")
