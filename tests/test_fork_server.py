"""What tests/fork_server.py forks is to its parent, and to itself, what a new process is."""

import contextlib
import os
import pathlib
import signal
import subprocess

import pytest
from fork_server import READ_AT_IMPORT, ForkedPopen

import jobs


def new(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run `batchinf` in a new process: a prefix cannot be forked."""
    return jobs.run(*arguments, prefix=["env"], **environment)


def links_of(pid: int) -> set[str]:
    """The pipes and sockets that a process has open."""
    links = set()
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed meanwhile
            links.add(os.readlink(path))
    return {link for link in links if link.startswith(("pipe", "socket"))}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "no.yaml"], ["frobnicate"], ["status", "/nowhere"]], ids=str)
def test_it_says_and_ends_as_a_new_process_does(arguments: list[str]) -> None:
    expected, found = new(*arguments), jobs.run(*arguments)
    assert "env" in expected.args and "env" not in found.args
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


@pytest.mark.slow
def test_a_job_has_the_rows_of_a_new_process_s(tmp_path: pathlib.Path) -> None:
    few = {"input": {"limit": 40}, "parallel": {"data_parallel_size": 1}}
    for name, prefix in {"forked": [], "new": ["env"]}.items():
        (tmp_path / name).mkdir()
        jobs.finish(jobs.spec_of(tmp_path / name, **few), prefix=prefix)
    assert jobs.rows_of(tmp_path / "forked" / "out") == jobs.rows_of(tmp_path / "new" / "out")


def test_its_session_environment_folder_and_descriptors_are_its_own(tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "held"
    process = jobs.start("run", jobs.spec_of(tmp_path), faults=f"replica.start=hold {marker}", TMPDIR=str(tmp_path))
    jobs.wait_until(lambda: len(jobs.family(process.pid)) == 3)  # two replicas
    everyone = jobs.family(process.pid)
    jobs.wait_until(lambda: all(one.cwd() == str(jobs.ROOT) for one in everyone))
    jobs.wait_until(marker.exists)
    assert {os.getsid(one.pid) for one in everyone} == {one.pid for one in everyone}
    assert everyone[-1].cmdline()[1:4] == ["-m", "batchinf", "run"]
    # No end of a pipe or socket that another job or the server waits at, once the replicas have come so far. The
    # coordinator, the last, waits for its replicas at pipes of the server.
    servers = links_of(jobs.fork_server().pid)
    jobs.wait_until(lambda: not any(links_of(one.pid) & servers for one in everyone[:-1]))
    jobs.kill(everyone)
    assert process.wait(60) == -signal.SIGKILL
    assert jobs.are_gone(everyone)
    process.communicate()


def test_a_process_whose_libraries_would_read_another_environment_is_new() -> None:
    assert not jobs.fork_server().can_fork({**jobs.environment, **jobs.quick_start(), "HF_HOME": "/elsewhere"})
    assert jobs.fork_server().can_fork({**jobs.environment, **jobs.quick_start(), "BATCHINF_FAULTS": "x=kill"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ray", "vllm.entrypoints.llm", "lm_eval.tasks"])
def test_jobs_are_forked_whatever_libraries_have_changed(name: str) -> None:
    """Some change the environment when they are imported, and vLLM when an engine starts."""
    pytest.importorskip(name)
    changed = {name for name, _ in jobs.inherited().items() ^ jobs.environment.items()}
    assert not {name for name in changed if name.startswith(READ_AT_IMPORT)}
    process = jobs.start("--help", is_unhurt=True)
    process.communicate()
    assert isinstance(process, ForkedPopen)
