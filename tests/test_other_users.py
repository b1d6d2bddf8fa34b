"""A job in a folder that several users share."""

import os
import pathlib
import stat
from typing import Any

import psutil
import pytest
from users import GROUP, ONE, OTHER, as_user, needs_users

import jobs

FEW: dict[str, Any] = {"input": {"limit": 60}, "parallel": {"data_parallel_size": 1}}


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of the group, whose new files belong to the group."""
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    return folder


def begun_by(user: int, umask: str, folder: pathlib.Path) -> pathlib.Path:
    """The spec of a job that a user has begun, and whose coordinator was killed. No process of it is left."""
    spec = jobs.spec_of(folder, **FEW)
    killed = jobs.run(
        "run", spec, prefix=as_user(user, umask), faults="coordinator.before_publish:2=kill", HOME=str(folder)
    )
    assert killed.returncode == -9, killed.stderr
    assert list((folder / "out" / "parts").iterdir())
    # Replicas end a moment after their coordinator, and may write a file until then.
    assert jobs.are_gone([process for process in psutil.process_iter() if process.uids().real == user])
    return spec


@needs_users()
@pytest.mark.slow
def test_another_user_of_the_group_resumes_a_job(shared: pathlib.Path) -> None:
    spec = begun_by(ONE, "002", shared)
    done = jobs.run("run", spec, prefix=as_user(OTHER, "002"), HOME=str(shared))
    assert done.returncode == 0, done.stderr
    assert [row["row_index"] for row in jobs.rows_of(shared / "out")] == list(range(60))
    found = [shared / "out", *(shared / "out").rglob("*")]
    assert {path.stat().st_uid for path in found} == {ONE, OTHER}
    for path in found:
        assert path.stat().st_gid == GROUP, path
        assert stat.S_IMODE(path.stat().st_mode) & stat.S_IWGRP, path


@needs_users()
@pytest.mark.slow
def test_a_user_who_may_not_write_is_refused_and_changes_nothing(shared: pathlib.Path) -> None:
    spec = begun_by(ONE, "022", shared)
    before = {path: path.stat().st_mtime_ns for path in (shared / "out").rglob("*")}
    refused = jobs.run("run", spec, prefix=as_user(OTHER), HOME=str(shared))
    assert refused.returncode == 2
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert str(shared / "out") in line and "permission" in line and "Traceback" not in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (shared / "out").rglob("*")} == before
    done = jobs.run("run", spec, prefix=as_user(ONE), HOME=str(shared))
    assert done.returncode == 0, done.stderr
    assert [row["row_index"] for row in jobs.rows_of(shared / "out")] == list(range(60))
