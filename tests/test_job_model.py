"""The model of the job with fixed choices, and the faults that it strikes with. `make model` draws other choices."""

import os
import pathlib
import random
from typing import Any

import crashes
import job_model
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test


def try_jobs(make_runner: type, num_jobs: int, num_steps: int) -> job_model.Figures:
    """Try jobs, of which the first does nothing. Returns what was struck in them."""
    figures = job_model.Figures()
    machine: Any = type("Machine", (job_model.JobModel,), {"make_runner": make_runner, "figures": figures})
    options = settings(
        max_examples=num_jobs + 1, stateful_step_count=num_steps, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(machine, settings=options)
    finally:
        machine.close_runner()
    return figures


def test_jobs_struck_at_their_steps() -> None:
    figures = try_jobs(job_model.Fast, 1, 6)
    assert figures.num_kills
    assert figures.rows > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_more_jobs_struck_at_their_steps() -> None:
    figures = try_jobs(job_model.Fast, 5, 8)
    assert figures.strikes["everything"] and figures.strikes["power cut"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jobs_of_real_processes() -> None:
    figures = try_jobs(job_model.Real, 4, 6)
    assert figures.num_kills


# -- a power cut -------------------------------------------------------------------------------------------------------


def sync(disk: crashes.Disk, path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    disk.synced(descriptor)
    os.close(descriptor)


class Last(random.Random):
    """Loses as much as can be lost."""

    def randint(self, a: int, b: int) -> int:
        return a

    def choice(self, seq: Any) -> Any:
        return seq[0]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder of a job with two files, which are on the disk."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    for name in ("old", "other"):
        (folder / name).write_bytes(name.encode())
    return folder


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_power_cut_loses_a_rename_that_was_not_synced(is_synced: bool, folder: pathlib.Path) -> None:
    disk = crashes.Disk(folder.parent)
    disk.renamed(str(folder / "old"), str(folder / "other"))
    (folder / "old").replace(folder / "other")
    if is_synced:
        sync(disk, folder)
    disk.cut(Last())
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == ({"other": "old"} if is_synced else {"old": "old", "other": "other"})


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_power_cut_loses_bytes_that_were_not_synced(is_synced: bool, folder: pathlib.Path) -> None:
    disk = crashes.Disk(folder.parent)
    with (folder / "old").open("ab") as file:
        file.write(b" and new")
    if is_synced:
        sync(disk, folder / "old")
    disk.cut(Last())
    assert (folder / "old").read_text() == ("old and new" if is_synced else "old")


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_power_cut_loses_what_was_made_or_deleted_and_not_synced(is_synced: bool, folder: pathlib.Path) -> None:
    disk = crashes.Disk(folder.parent)
    disk.created(str(folder / "new"))
    (folder / "new").touch()
    disk.removed(str(folder / "old"))
    (folder / "old").unlink()
    if is_synced:
        sync(disk, folder)
    disk.cut(Last())
    assert {path.name for path in folder.iterdir()} == ({"new", "other"} if is_synced else {"old", "other"})
