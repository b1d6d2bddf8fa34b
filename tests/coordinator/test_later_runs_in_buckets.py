"""`--retry` and `--extend` of jobs in a bucket: killed at each step, and gone on with on an empty machine."""

import json
import pathlib
import re
from typing import Any

import pytest
import stores

import jobs

pytestmark = [pytest.mark.fewer_rows]

# As in test_retry.py: some prompts are too long for min_tokens.
BASE: dict[str, Any] = {
    "sampling": {"max_tokens": None, "min_tokens": 40, "logprobs": 1},
    "parallel": {"data_parallel_size": 1},
    "output": {"rows_per_shard": 60},
    "scripted": {"step_s": 0.0, "max_model_len": 128},
    "max_error_rate": 1.0,
}
ERRORS = ("--retry", "errors", "--set", "sampling.min_tokens=0")
RETRY_STEPS = (
    "retry.before_line",
    "retry.after_line",
    "coordinator.before_drop:1",
    "mirror.before_part:2",
    "mirror.after_part:1",
    "mirror.after_part:2",
    "coordinator.before_drop:3",
)
EXTEND_STEPS = ("input_version.after_record", "extend.before_line", "extend.after_line", "mirror.after_part:1")
FAST = ("mirror.after_part:1",)


def _steps(steps: tuple[str, ...]) -> list[Any]:
    return [pytest.param(step, marks=[] if step in FAST else [pytest.mark.slow]) for step in steps]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of a local job, before and after a retry of its errors."""
    folder = tmp_path_factory.mktemp("local")
    spec = jobs.spec_of(folder, **BASE)
    jobs.finish(spec)
    before = jobs.rows_of(folder / "out")
    jobs.finish(spec, *ERRORS)
    return before, jobs.rows_of(folder / "out")


@pytest.mark.parametrize(
    ("step", "keeps_folder"),
    # The machine's folder makes a difference where a part is on its way; tests/bucket_model.py keeps some, too.
    [
        *(pytest.param(step, False, marks=[] if step in FAST else [pytest.mark.slow]) for step in RETRY_STEPS),
        *(pytest.param(step, True, marks=pytest.mark.slow) for step in RETRY_STEPS[1:6:2]),
    ],
)
def test_a_retry_goes_on_on_an_empty_machine(
    step: str,
    keeps_folder: bool,
    expected: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    url: str,
    store: stores.Proxy,
    tmp_path: pathlib.Path,
) -> None:
    spec = stores.spec_of(tmp_path, url, **BASE)
    jobs.finish(spec, **store.environment)
    assert stores.rows(url) == expected[0]
    stores.lose_host(tmp_path)
    if step in FAST:
        # The closing lines are about parts that are fetched.
        again = jobs.finish(spec, "--set", "output.store_timeout_s=5", **store.environment)
        assert "was already done" in again.stdout and " × invalid_sampling: " in again.stdout
        stores.lose_host(tmp_path)
    killed = jobs.run("run", spec, *ERRORS, faults=f"{step}=kill", **store.environment)
    assert killed.returncode == -9, killed.stderr
    assert re.search(r"fetching [1-9] parts, ", killed.stderr)
    if not keeps_folder:
        stores.lose_host(tmp_path)
    # Each row is there once, as before or as after the retry.
    found = stores.rows(url)
    assert len(found) == len(expected[0])
    assert all(row in (before, after) for row, before, after in zip(found, *expected, strict=True))
    jobs.finish(spec, *ERRORS, **store.environment)
    assert set(stores.names(url, "parts")) == stores.committed(url)
    assert stores.rows(url) == expected[1]
    assert not stores.names(url, "journal")
    checked = jobs.run("check", url, "--deep", **store.environment, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert checked.returncode == 0, checked.stderr
    # Later runs have nothing to do.
    assert "was already done" in jobs.finish(spec, **store.environment).stdout


@pytest.mark.slow
def test_only_the_parts_of_a_retry_are_fetched_and_written(
    url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    spec = stores.spec_of(tmp_path, url, **BASE)
    jobs.finish(spec, **store.environment)
    before = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    done = jobs.finish(spec, "--retry", "row_index = 70", **store.environment)
    assert "fetching 6 parts, " in done.stderr
    after = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    assert [name for name in before if before[name] != after[name]] == ["part-000001.parquet"]
    nothing = jobs.finish(spec, "--retry", "row_index = 1000000", **store.environment)
    assert "no row matches" in nothing.stderr


@pytest.mark.slow
def test_a_zombie_replaces_no_part_that_is_committed(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    spec = stores.spec_of(tmp_path / "a", url, **BASE)
    jobs.finish(spec, **store.environment)
    marker = tmp_path / "held"
    zombie = jobs.start("run", spec, *ERRORS, faults=f"mirror.before_part:1=hold {marker}", **store.environment)
    jobs.wait_until(lambda: marker.exists() and marker.read_text())
    with stores.file_system().open_output_stream(f"{url.removeprefix('s3://')}/lock") as file:
        file.write(b"free")
    other = stores.spec_of(tmp_path / "b", url, **BASE)
    first = jobs.run("run", other, *ERRORS, **store.environment)
    if first.returncode != 0:  # another commit of the zombie came between; it ends at its next look at the lock
        assert first.returncode == 2 and "no longer held" in first.stderr, first.stderr
        jobs.finish(other, *ERRORS, **store.environment)
    before = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    marker.unlink()
    _, errors = zombie.communicate(timeout=200)
    assert zombie.returncode == 2, errors
    assert {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")} == before
    checked = jobs.run("check", url, "--deep", **store.environment, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("step", _steps(EXTEND_STEPS))
def test_an_extension_goes_on_on_an_empty_machine(
    step: str, url: str, store: stores.Proxy, tmp_path: pathlib.Path
) -> None:
    data = tmp_path / "data"

    def write(name: str, *numbers: int) -> None:
        rows = ({"id": number, "prompt": f"prompt {number}", "language": "en"} for number in numbers)
        (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    data.mkdir()
    quick = {
        "input": {"path": str(data)},
        "sampling": {"max_tokens": 4},
        "parallel": {"data_parallel_size": 1},
        "output": {"rows_per_shard": 8},
        "scripted": {"max_num_seqs": 64, "step_s": 0.0},
    }
    (tmp_path / "local").mkdir()
    local = jobs.spec_of(
        tmp_path / "local", **{**quick, "output": {"path": str(tmp_path / "local" / "out"), "rows_per_shard": 8}}
    )
    spec = stores.spec_of(tmp_path, url, **quick)
    write("b.jsonl", *range(20))
    jobs.finish(local)
    jobs.finish(spec, **store.environment)
    before = {name: stores.read(url, f"parts/{name}") for name in stores.names(url, "parts")}
    # A file in front, and rows behind those that the job knows.
    write("a.jsonl", *range(100, 110))
    write("b.jsonl", *range(25))
    jobs.finish(local, "--extend")
    stores.lose_host(tmp_path)
    killed = jobs.run("run", spec, "--extend", faults=f"{step}=kill", **store.environment)
    assert killed.returncode == -9, killed.stderr
    stores.lose_host(tmp_path)
    jobs.finish(spec, "--extend", **store.environment)
    assert stores.rows(url) == jobs.rows_of(tmp_path / "local" / "out")
    assert {name: stores.read(url, f"parts/{name}") for name in before} == before
    # The versions of the input are in the bucket: a later run on an empty machine knows where each row is.
    stores.lose_host(tmp_path)
    write("c.jsonl", 200)
    again = jobs.finish(spec, "--extend", **store.environment)
    assert "extended: 1 more input rows" in again.stderr
    assert [row["id"] for row in stores.rows(url)][-1] == 200
