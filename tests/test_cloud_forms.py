"""The forms of jobs in a bucket for Kubernetes and SkyPilot: their own commands, run as the platform runs them.

A node is a folder with the job's spec and an empty home. The environment has only what the platform and the form set,
and the stand-in for the hub. All nodes have one path of their homes, so a server can fork their processes.
"""

import os
import pathlib
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import stores
import yaml
from fork_server import ForkServer
from hub_server import TOKEN, Hub, as_parquet, listening, serving

import jobs

pytestmark = [pytest.mark.fewer_rows]
INDEX = 3


class Nodes:
    """One after another, and each with an empty home."""

    def __init__(self, folder: pathlib.Path, hub: Hub, server: ForkServer) -> None:
        self.hub = hub
        self._folder, self._server = folder, server
        commands = folder / "bin"
        commands.mkdir()
        (commands / "batchinf").write_text(
            f'#!/bin/sh\nexec {sys.executable} -S {jobs.ROOT / "tests" / "forked.py"} "$@"\n'
        )
        (commands / "batchinf").chmod(0o755)

    def run(
        self, command: Sequence[str], home: pathlib.Path, environment: Mapping[str, str], faults: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a new node. home: the path of its home afterwards, and of the folder that it runs in."""
        (self._folder / "home").symlink_to(home)
        own = {
            **self._server.environment,
            **self._server.variable(),
            "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            **environment,
            "BATCHINF_FAULTS": faults,
        }
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        if command[0] == sys.executable:
            process: Any = self._server.start(self._server, command, cwd=home, env=own, **pipes)
        else:
            process = subprocess.Popen(command, cwd=home, env=own, **pipes)
        out, errors = process.communicate(timeout=300)
        (self._folder / "home").unlink()
        assert (process.returncode == 0) == (not faults), errors
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    home = folder / "home"
    with listening() as hub, jobs.own_server(HOME=str(home), **hub.environment(home)) as server:
        yield Nodes(folder, hub, server)


def _form(name: str) -> Any:
    return yaml.safe_load((jobs.ROOT / "jobs" / name).read_text())


def _kubernetes() -> tuple[list[str], dict[str, str], int]:
    """The command of a pod, its environment beside the secret's, and the number of slices."""
    job = _form("kubernetes/slices.yaml")["spec"]
    assert job["completionMode"] == "Indexed" and job["parallelism"] <= job["completions"]
    # Exit code 75, and 2 if the lost pod still seems to run, are not final: the next pod of the index goes on.
    [final] = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert not {2, 75} & {*final} and job["backoffLimitPerIndex"] > 0
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert pod["restartPolicy"] == "Never" and container["resources"]["limits"]["nvidia.com/gpu"] > 0
    environment = {each["name"]: each["value"] for each in container.get("env", ())}
    return container["command"], {**environment, "JOB_COMPLETION_INDEX": str(INDEX)}, job["completions"]


def _skypilot() -> tuple[list[str], dict[str, str], int]:
    """The same of a managed job."""
    task = _form("skypilot/slice.yaml")
    assert 75 in task["resources"]["job_recovery"]["recover_on_exit_codes"] and task["workdir"] == "."
    text = (jobs.ROOT / "jobs" / "skypilot" / "slice.yaml").read_text()
    # A secret without a value is that of the command, which takes it from the environment.
    assert {*re.findall(r"--secret (\w+)", text)} == {*task["secrets"]} == {*stores.KEYS}
    [number] = re.findall(r"/(\d+)$", task["run"])
    assert f"seq 0 {int(number) - 1}" in text and "--env SLICE=" in text
    environment = {**{name: str(value) for name, value in task["envs"].items()}, "SLICE": str(INDEX)}
    return ["bash", "-c", task["run"]], environment, int(number)


@pytest.mark.slow
@pytest.mark.parametrize("form", [_kubernetes, _skypilot])
def test_a_lost_slice_goes_on_on_another_node(
    form: Any, url: str, store: stores.Proxy, nodes: Nodes, tmp_path: pathlib.Path
) -> None:
    command, environment, num_slices = form()
    for node, faults in (("a", "mirror.after_bundle:1=kill"), ("b", "")):
        home = tmp_path / node
        home.mkdir()
        spec = {"output": {"path": url, "rows_per_shard": 6}, "scripted": {"step_s": 0.005}}
        jobs.spec_of(home, **spec, parallel={"data_parallel_size": 1})
        nodes.run(command, home, {**store.environment, **environment}, faults)
        assert list((home / ".cache" / "batchinf" / "jobs").iterdir())  # it works in the node's home
    rows = jobs.unhurt()
    own_rows = rows[INDEX * len(rows) // num_slices : (INDEX + 1) * len(rows) // num_slices]
    slice_url = f"{url}/slice-{INDEX}"
    assert stores.rows(slice_url) == list(own_rows)
    starts = [line for line in stores.lines(slice_url) if line["kind"] == "recovered"]
    assert len(starts) == 2  # the second start went on with the job of the first


@pytest.mark.slow
def test_the_script_of_hugging_face_jobs(nodes: Nodes, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stand-ins for the hub and for the gateway of its buckets."""
    name = uuid.uuid4().hex[:12]
    settings = [
        f"model={jobs.MODEL}",
        "engine={}",
        "scripted={max_num_seqs: 8, step_s: 0.005}",
        f"input={{path: {stores.NAMESPACE}/prompts, id_column: id}}",
        "sampling={temperature: 0.0, max_tokens: 32, logprobs: 2}",
        "output.keep_columns=[language]",
        "output.rows_per_shard=18",
        "checkpoint_interval_s=0.2",
        "parallel={data_parallel_size: 1}",
        f"output.path=hf://buckets/{stores.NAMESPACE}/{stores.BUCKET}/{name}",
    ]
    command = [sys.executable, str(jobs.ROOT / "jobs" / "huggingface" / "job.py"), stores.NAMESPACE, *settings]
    with serving(tmp_path, monkeypatch, nodes.hub) as hub, stores.proxy() as gateway:
        data = {"data/train-00000-of-00001.parquet": as_parquet(jobs.prompts())}
        hub.add_dataset(f"{stores.NAMESPACE}/prompts", data)
        for node, faults in (("a", "mirror.after_bundle:2=kill"), ("b", "")):
            home = tmp_path / node
            home.mkdir()
            ended = nodes.run(
                command, home, {"HF_TOKEN": TOKEN, **stores.KEYS, "BATCHINF_HF_GATEWAY": gateway.url}, faults
            )
            assert not any(TOKEN.encode() in path.read_bytes() for path in home.rglob("*") if path.is_file())
        answers = hub.rows(f"{stores.NAMESPACE}/answers")
    assert answers == stores.rows(f"s3://{stores.BUCKET}/{name}") == list(jobs.unhurt())
    assert (
        "pushed to the hub" in ended.stdout
        and len((jobs.ROOT / "jobs/huggingface/job.py").read_text().splitlines()) <= 60
    )
