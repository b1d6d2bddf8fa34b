"""Two coordinators on one output folder, of one host and of two, with and without file locks: one works.

Two hosts are two sets of namespaces (names, processes, network) of this one, where the system gives them to a test;
else a process that goes by another host's name.
"""

import pathlib
import subprocess

import pytest

import jobs

# About 20 s of work, in shards so large that nothing is committed in its first half.
LONG = {"max_num_seqs": 8, "step_s": 0.03}
ELSEWHERE = ("unshare", "-n", "-u", "-p", "-f", "--kill-child", "--mount-proc", "sh", "-c")
ELSEWHERE += ('hostname elsewhere; exec "$@"', "sh")
NO_LOCKS = """
import errno, fcntl
def refuse(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
"""
OTHER_NAME = """
import os
uname = os.uname
os.uname = lambda: os.uname_result(("Linux", "elsewhere", *uname()[2:]))
"""


def can_unshare() -> bool:
    return subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode == 0


def python_path(folder: pathlib.Path, code: str) -> str:
    """A PYTHONPATH with which each new Python begins with this code."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return f"{folder}:{jobs.ROOT}"


def start_elsewhere(folder: pathlib.Path, *arguments: str | pathlib.Path) -> "subprocess.Popen[str]":
    """Start `batchinf` on another host."""
    if can_unshare():
        return jobs.start(*arguments, prefix=ELSEWHERE)
    return jobs.start(*arguments, PYTHONPATH=python_path(folder / "site", OTHER_NAME))


def error_line(errors: str) -> str:
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("error: ")]
    return line


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_at_work(out: pathlib.Path) -> bool:
    snapshot = jobs.snapshot_of(out)
    return snapshot.get("state") == "running" and any(replica["in_flight"] for replica in snapshot["replicas"])


@pytest.mark.fewer_rows
@pytest.mark.parametrize("is_begun", [False, True], ids=["a new job", "a dead holder's"])
@pytest.mark.parametrize("has_locks", [True, *jobs.slowly(False)], ids=["with flock", "without flock"])
def test_two_that_start_at_once(has_locks: bool, is_begun: bool, tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path), tmp_path / "out"
    environment = {} if has_locks else {"PYTHONPATH": python_path(tmp_path / "site", NO_LOCKS)}
    if is_begun:
        assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill", **environment).returncode == -9
        assert (out / "lock").exists()
    both = [jobs.start("run", spec, **environment) for _ in range(2)]
    ends = sorted((jobs.end(process) for process in both), key=lambda end: end[0])
    assert ends[1][0] == 2, ends
    words = error_line(ends[1][2])
    if has_locks or not is_begun:
        assert ends[0][0] == 0, ends
        assert any(f"is being run by pid {process.pid} on host" in words for process in both)
    else:
        # Who takes a dead holder's lock away may find only then that another did so too: one works, or none.
        assert ends[0][0] in (0, 2), ends
    jobs.finish(spec)
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert not (out / "lock").exists()


def test_one_of_another_host_is_told_who_holds_the_job(tmp_path: pathlib.Path) -> None:
    # In one shard, so that no part is committed meanwhile.
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1}, output={"rows_per_shard": 10_000})
    out, marker = tmp_path / "out", tmp_path / "held"
    process = jobs.start("run", spec, faults=f"engine.step:60=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or process.poll() is not None, 120)
    before = files_of(out / "manifest")
    # It cannot see whether that process lives, and watches its heart for some seconds.
    code, _, errors = jobs.end(start_elsewhere(tmp_path, "run", spec))
    assert code == 2, errors
    assert f"is being run by pid {process.pid} on host" in error_line(errors)
    assert files_of(out / "manifest") == before
    marker.unlink()
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.rows_of(out) == list(jobs.unhurt())


@pytest.mark.parametrize("successor", ["here", *jobs.slowly(None, "elsewhere")])
def test_a_holder_that_lost_its_lock_ends_before_it_commits(successor: str | None, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    spec = jobs.spec_of(tmp_path, scripted=LONG, output={"rows_per_shard": 300})
    loser = jobs.start("run", spec)
    jobs.wait_until(lambda: is_at_work(out) or loser.poll() is not None, 120)
    everyone = jobs.family(loser.pid)
    log = out / "manifest" / "000001.jsonl"
    before = log.read_bytes()
    (out / "lock").unlink()
    quick = ("run", spec, "--set", "scripted.step_s=0")
    match successor:
        case "here":
            winner = jobs.start(*quick)
        case "elsewhere":
            winner = start_elsewhere(tmp_path, *quick)
    code, _, errors = jobs.end(loser)
    assert code == 2, errors
    assert "is no longer held by this process: " in error_line(errors)
    assert jobs.are_gone(everyone)
    if successor is None:
        assert files_of(out / "parts") == {}
        assert files_of(out / "manifest") == {log.name: before}
        # It did not work on until there was something to commit.
        assert jobs.snapshot_of(out)["num_rows_done"] < 300
        winner = jobs.start(*quick)
    code, _, errors = jobs.end(winner)
    assert code == 0, errors
    assert log.read_bytes() == before
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert jobs.state_of(out).last_epoch == 2


def test_a_holder_that_stood_still_touches_nothing_of_its_successors(tmp_path: pathlib.Path) -> None:
    """As on a machine that was suspended right after it had looked at its lock."""
    spec, out, marker = jobs.spec_of(tmp_path), tmp_path / "out", tmp_path / "held"
    loser = jobs.start("run", spec, faults=f"storage.publish.before_rename:5=hold {marker}")
    jobs.wait_until(lambda: marker.exists() or loser.poll() is not None, 120)
    (out / "lock").unlink()
    jobs.finish(spec)
    files = {name: files_of(out / name) for name in ("parts", "manifest")}
    marker.unlink()
    code, _, errors = jobs.end(loser)
    assert code == 2, errors
    assert "is no longer held by this process: its lock file is gone" in error_line(errors)
    assert {name: files_of(out / name) for name in files} == files
    assert jobs.snapshot_of(out)["state"] == "done"
    assert jobs.rows_of(out) == list(jobs.unhurt())
