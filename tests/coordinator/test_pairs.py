"""Every pair of commands on one output folder, started within 10 ms of each other: no row is lost, doubled or altered.

`PAIR_TRIALS=50 python -m pytest tests/coordinator/test_pairs.py -m "slow or not slow"` repeats each pair with other
delays.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

import batchinf
import jobs
from batchinf.base.errors import UserError
from batchinf.base.slices import job_folders

TRIALS = int(os.environ.get("PAIR_TRIALS", "1"))
# The job has the first rows; `--extend` adds the others.
FIRST, ALL = 40, 60
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "SPEC"),
    "slice": ("run", "SPEC", "--slice", "0/2"),
    "fresh": ("run", "SPEC", "--fresh"),
    "retry": ("run", "SPEC", "--retry", "true"),
    "extend": ("run", "SPEC", "--extend", "--set", f"input.limit={ALL}"),
    "repair": ("check", "OUT", "--repair"),
    "open": (),
}
# What the folder holds before: nothing, a whole job or two slices, done or killed at work.
STATES = ("new", "done", "killed", "sliced")
QUICK = [("new", "run", "slice"), ("done", "fresh", "retry")]


def cases() -> list[Any]:
    """QUICK, then every other pair in each state; without `PAIR_TRIALS` each in one state."""
    found = [pytest.param(*case, id=" ".join(case)) for case in QUICK]
    for place, (one, other) in enumerate(itertools.combinations_with_replacement(COMMANDS, 2)):
        states = STATES if TRIALS > 1 else STATES[place % len(STATES) :][:1]
        for case in ((state, one, other) for state in states):
            if case not in QUICK and case[1:] != ("open", "open"):
                found.append(pytest.param(*case, marks=pytest.mark.slow, id=" ".join(case)))
    return found


def spec_in(folder: pathlib.Path) -> pathlib.Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(line + "\n" for line in jobs.PROMPTS.read_text().split("\n")[:ALL]))
    return jobs.spec_of(
        folder,
        input={"path": str(prompts), "limit": FIRST},
        output={"rows_per_shard": 10},
        parallel={"data_parallel_size": 1},
    )


@pytest.fixture(scope="module")
def folder_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Makes the output folder of a state, once."""

    @functools.cache
    def make(state: str) -> pathlib.Path:
        spec = spec_in(tmp_path_factory.mktemp(state))
        match state:
            case "done":
                jobs.finish(spec)
            case "killed":
                assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode == -9
            case "sliced":
                jobs.finish(spec, "--slice", "0/2")
                faults = "coordinator.after_publish:2=kill"
                assert jobs.run("run", spec, "--slice", "1/2", faults=faults).returncode == -9
        return spec.parent / "out"

    return make


def rows_at(out: pathlib.Path) -> list[dict[str, Any]]:
    """The committed rows; none if there is no job."""
    try:
        results = batchinf.open(out)
        return results.table().drop_columns(["attempts"]).to_pylist() if results.parts else []
    except UserError:
        return []


def read_until(process: "subprocess.Popen[str] | None", out: pathlib.Path, *, may_go: bool) -> None:
    """Open the job again and again while a process works on it. All rows that are found are right."""
    expected = {row["row_index"]: row for row in jobs.unhurt()}
    for _ in itertools.count():
        is_over = process is None or process.poll() is not None
        # A folder that is moved aside takes its parts with it.
        with contextlib.suppress(*([FileNotFoundError] if may_go else [])):
            rows = rows_at(out)
            assert rows == [expected[row["row_index"]] for row in rows]
        if is_over:
            return
        time.sleep(0.05)


def finish(spec: pathlib.Path, out: pathlib.Path) -> None:
    """Finish what the folder holds now, as its users would."""
    folders = job_folders(str(out))
    if folders[0].slice is not None:
        for job in folders:
            jobs.finish(spec, "--slice", str(job.slice))
        return
    if (out / "job.yaml").exists() and jobs.run("status", out).returncode == 0:
        jobs.finish(spec, "--set", f"input.limit={jobs.state_of(out).limit}")
    else:
        jobs.finish(spec)


def is_told(code: int, errors: str) -> bool:
    """Whether a command was done, or refused in one clear line."""
    return code == 0 or (code == 2 and errors.count("error: ") == 1 and "Traceback" not in errors)


@pytest.mark.parametrize(("state", "one", "other"), cases())
def test_two_commands_at_once(
    state: str, one: str, other: str, folder_in: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        spec, out = spec_in(folder), folder / "out"
        if folder_in(state).exists():
            shutil.copytree(folder_in(state), out)
        delay_s = random.Random(f"{state} {one} {other} {trial}").uniform(-0.01, 0.01)
        started: list[subprocess.Popen[str]] = []
        for name in (one, other) if delay_s > 0 else (other, one):
            if COMMANDS[name]:
                places = {"SPEC": str(spec), "OUT": str(out)}
                started.append(jobs.start(*(places.get(word, word) for word in COMMANDS[name]), is_unhurt=True))
                time.sleep(abs(delay_s))
        if "open" in (one, other):
            read_until(started[0], out, may_go="fresh" in (one, other))
        for process in started:
            code, _, errors = jobs.end(process)
            assert is_told(code, errors), (trial, process.args, errors)
        finish(spec, out)
        rows = rows_at(out)
        assert len(rows) in (FIRST, ALL)
        assert rows == list(jobs.unhurt()[: len(rows)]), trial
        assert jobs.run("check", out, "--deep").returncode == 0
        for aside in (*folder.glob("out.*"), *out.glob("old-*")):
            read_until(None, aside, may_go=False)
        shutil.rmtree(folder)
