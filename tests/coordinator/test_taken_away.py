"""Each file and folder of the output is deleted or replaced under a running job, at several of its steps.

Afterwards all rows are there after at most one more `run`, or one line names the file. The commands run in forked
children (tests/crashes.py).
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import job_model
import pytest
from crashes import Ended, Strike, Warm

import jobs

# The process that forks the commands takes 5 s to start.
pytestmark = pytest.mark.slow

NUM_ROWS = 18
# What is in the folder of a job that has begun, and in that of a retry. "." is the whole folder.
BEGUN = (
    ".", "manifest", "manifest/*.jsonl", "parts", "parts/*.parquet", "staging", "journal", "journal/*", "source",
    "source/files.json", "source/*.offsets", "source/versions", "source/versions/*", "selection",
    "selection/*.positions", "telemetry", "telemetry/*", "logs", "job.yaml", "cut.json", "lock", "status.json",
    "events.jsonl",
)  # fmt: skip
RETRIED = ("retry", "retry/*.positions", "parts/*.parquet", "manifest/*.jsonl", "selection/*.positions", "journal/*")
STEPS = (200, 330)


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm({**jobs.environment, **jobs.quick_start()})
    yield process
    process.close()


class Job:
    """A job over lines, in an order and with a predicate, so that its folder has every kind of file."""

    def __init__(self, folder: pathlib.Path, warm: Warm) -> None:
        (folder / "jobs").mkdir()
        path = folder / "rows.jsonl"
        path.write_bytes(job_model.content_of(job_model.all_rows()[:NUM_ROWS], ".jsonl"))
        self.folder, self.out, self._warm = folder, folder / "jobs" / "out", warm
        more: dict[str, Any] = {"input": {"order": "prefix", "where": "language <> 'fr'"}}
        self.spec = job_model.spec_of(folder, self.out, path, more)
        spec = json.loads(self.spec.read_text())
        self.spec.write_text(json.dumps({**spec, "max_restarts": 1}))

    def run(self, *arguments: str, strike: Strike | None = None) -> Ended:
        return self._warm.run(self.folder, ["run", str(self.spec), *arguments], strike)

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows = job_model.rows_in([self.out])
        return sorted(rows, key=lambda row: int(row["row_index"]))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Job:
    """A job that nothing has hurt."""
    job = Job(tmp_path_factory.mktemp("unhurt"), warm)
    assert job.run().code == 0
    return job


def has(job: Job, rows: list[dict[str, Any]]) -> bool:
    try:
        return job.rows == rows
    except job_model.Difference:  # a part that was replaced
        return False


def check(job: Job, what: str, ended: Ended, rows: list[dict[str, Any]], *arguments: str) -> None:
    """All rows are there after at most one more run, or each run is refused in one line that names the file."""
    assert ended.step, "the strike did not come"
    name = str(job.out) if what == "." else what.rpartition("/")[0] or what
    if what == "lock":
        (job.out / "lock").unlink(missing_ok=True)  # the next run would wait 60 s for its holder
    for _ in range(2):
        if ended.code == 0 and has(job, rows):
            return
        assert ended.code in (0, 2), (ended.code, ended.errors)
        if ended.code == 2:
            lines = [line for line in ended.errors.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1 and "Traceback" not in ended.errors, ended.errors
            assert name in lines[0], lines
        ended = job.run(*arguments)
    if ended.code == 2:
        assert name in ended.errors and what.startswith("manifest"), ended.errors
    else:
        assert has(job, rows), ended.errors


def cases(names: tuple[str, ...], *, steps: tuple[int, ...]) -> Iterator[Any]:
    for name in names:
        for how in ("deleted", "replaced"):
            for step in steps[how == "replaced" and len(steps) > 1 :]:
                yield name, how, step


@pytest.mark.parametrize(("what", "how", "step"), [*cases(BEGUN, steps=STEPS)])
def test_under_a_running_job(what: str, how: str, step: int, done: Job, tmp_path: pathlib.Path, warm: Warm) -> None:
    job = Job(tmp_path, warm)
    ended = job.run(strike=Strike(how, step, edits={str(job.out): what}))
    check(job, what, ended, done.rows)


@pytest.mark.parametrize(("what", "how", "step"), [*cases(RETRIED, steps=(120,))])
def test_under_a_retry(what: str, how: str, step: int, done: Job, tmp_path: pathlib.Path, warm: Warm) -> None:
    job = Job(tmp_path, warm)
    assert job.run().code == 0
    ended = job.run("--retry", "true", strike=Strike(how, step, edits={str(job.out): what}))
    check(job, what, ended, done.rows)


def test_the_table_has_every_file(tmp_path: pathlib.Path, warm: Warm) -> None:
    job = Job(tmp_path, warm)
    assert job.run(strike=Strike("everything", STEPS[1])).code == -9
    listed = {path for name in {*BEGUN[1:], *RETRIED} for path in job.out.glob(name)}
    missing = [path for path in job.out.rglob("*") if path not in listed and not path.name.startswith(".tmp-")]
    assert not [path for path in missing if path.parent.name not in ("staging", "source")], missing
