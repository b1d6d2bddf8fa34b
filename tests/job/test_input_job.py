"""`input.job`: the output of one job is the input of another, which goes on when the first one does."""

import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
import pytest
import stores

import batchinf
import jobs

pytestmark = pytest.mark.usefixtures("quick_replicas")

ONE = {"parallel": {"data_parallel_size": 1}}


def write_rows(folder: pathlib.Path, name: str, prompts: Sequence[str | None]) -> None:
    (folder / "input").mkdir(exist_ok=True)
    rows = [{"id": f"{name}{row}", "language": "en", "prompt": prompt} for row, prompt in enumerate(prompts)]
    (folder / "input" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_in(folder: pathlib.Path) -> pathlib.Path:
    output = {"rows_per_shard": 2, "keep_columns": ["language", "prompt"], "path": str(folder / "first")}
    return jobs.spec_of(folder, input={"path": str(folder / "input")}, output=output, max_error_rate=1.0, **ONE)


def second_in(folder: pathlib.Path, **input_: Any) -> pathlib.Path:
    where: dict[str, Any] = {"path": None, "job": str(folder / "first"), "where": "error_type is null", **input_}
    spec = json.loads(jobs.spec_of(folder, input=where, **ONE).read_text())
    spec["input"] |= {"prompt_template": "{{ prompt }} {{ text }} {{ row_index }}"}
    spec["output"] |= {"keep_columns": {"language": "language", "text": "answer", "row_index": "place"}}
    path = folder / "second.yaml"
    path.write_text(json.dumps(spec))
    return path


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of two jobs, of which the second one has read the output of the first."""
    folder = tmp_path_factory.mktemp("chained")
    write_rows(folder, "a", ["One", "Two", None, "Four", "Five"])
    jobs.finish(first_in(folder))
    # Only the manifest says which files are parts.
    shutil.copy(folder / "first" / "parts" / "part-000000.parquet", folder / "first" / "parts" / "part-000009.parquet")
    jobs.finish(second_in(folder))
    return folder


def rows_of_both(folder: pathlib.Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The good rows of the first job, each with its row of the second job."""
    first = [row for row in batchinf.open(folder / "first").table().to_pylist() if row["error_type"] is None]
    return list(zip(first, jobs.rows_of(folder / "out"), strict=True))


def test_only_new_rows_of_the_first_job_run(chained: pathlib.Path) -> None:
    (chained / "first" / "parts" / "part-000009.parquet").unlink()
    for first, second in rows_of_both(chained):
        assert second["id"] == first["id"] and second["answer"] == first["text"]
        assert second["place"] == first["row_index"]
    state = jobs.state_of(chained / "out")
    of_first = jobs.state_of(chained / "first")
    input_job = state.header.input_job
    assert input_job is not None
    assert (input_job.job_id, input_job.num_rows) == (of_first.header.job_id, 5)
    said = jobs.run("status", chained / "out").stdout
    assert f"input: 5 output rows of the job in {chained / 'first'} (id {of_first.header.job_id})" in said

    before = {path.name: path.read_bytes() for path in (chained / "out" / "parts").iterdir()}
    write_rows(chained, "b", ["Six", "Seven"])
    jobs.finish(first_in(chained), "--extend")
    spec = second_in(chained)
    with pytest.raises(
        batchinf.DriftError, match=r"1 file is new: parts/part-000003.parquet; use --extend to run the new rows too$"
    ):
        batchinf.run(spec, quiet=True)
    assert "extended: 2 more input rows" in jobs.finish(spec, "--extend").stderr
    assert len(rows_of_both(chained)) == 6
    for name, data in before.items():
        assert (chained / "out" / "parts" / name).read_bytes() == data
    now = jobs.state_of(chained / "out")
    input_job = now.header.input_job
    assert input_job is not None
    assert (input_job.num_rows, input_job.num_parts) == (7, 4)

    # A retry replaces a part of the first job.
    jobs.finish(first_in(chained), "--retry", "id = 'a1'", "--set", "sampling.max_tokens=2")
    with pytest.raises(
        batchinf.DriftError, match=r"parts/part-000000.parquet; that job has run rows again since: start a new job"
    ):
        batchinf.run(spec, quiet=True)


def test_a_first_job_that_cannot_be_read(chained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(batchinf.UserError, match=words):
            batchinf.run(second_in(tmp_path), quiet=True)

    refused("input.job: .*first does not exist; must be the output folder of a job")
    (tmp_path / "first").mkdir()
    refused("input.job: .*first holds no job")
    shutil.copytree(chained / "input", tmp_path / "input")
    died = jobs.run("run", first_in(tmp_path), faults="coordinator.after_publish=kill")
    assert died.returncode == -9
    refused("input.job: the job in .*first is not done")
    jobs.finish(first_in(tmp_path))
    (tmp_path / "first" / "parts" / "part-000001.parquet").write_bytes(b"")
    refused("part-000001.parquet is gone or altered; run the job in .*first again")


def test_slices_are_read_in_the_order_of_their_rows(tmp_path: pathlib.Path) -> None:
    write_rows(tmp_path, "a", [f"Row {row}" for row in range(7)])
    jobs.finish(first_in(tmp_path), "--slice", "1/2")
    with pytest.raises(batchinf.UserError, match="run 1 of its 2 slices to the end first"):
        batchinf.run(second_in(tmp_path), quiet=True)
    jobs.finish(first_in(tmp_path), "--slice", "0/2")
    jobs.finish(second_in(tmp_path))
    both = rows_of_both(tmp_path)
    assert [second["id"] for _, second in both] == [f"a{row}" for row in range(7)]
    assert [second["answer"] for _, second in both] == [first["text"] for first, _ in both]


@pytest.mark.slow
def test_on_vllm_a_job_as_input_is_like_its_rows_in_a_file(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    write_rows(tmp_path, "a", ["One", "Two", None, "Four"])
    jobs.finish(first_in(tmp_path))
    pq.write_table(batchinf.open(tmp_path / "first").table(), tmp_path / "rows.parquet")
    found = []
    for where in ({}, {"path": str(tmp_path / "rows.parquet"), "job": None}):
        spec = json.loads(second_in(tmp_path, **where).read_text())
        del spec["scripted"]
        spec["engine"] = {"max_model_len": 512, "max_num_seqs": 4}
        spec["output"]["path"] = str(tmp_path / f"second{len(found)}")
        (tmp_path / "second.yaml").write_text(json.dumps(spec))
        jobs.finish(tmp_path / "second.yaml", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        found.append(jobs.rows_of(tmp_path / f"second{len(found)}"))
    assert found[0] == found[1]
    assert [row["id"] for row in found[0]] == ["a0", "a1", "a3"]


@pytest.mark.slow
@pytest.mark.fewer_rows
def test_the_first_job_may_be_in_a_bucket(url: str, store: stores.Proxy, tmp_path: pathlib.Path) -> None:
    write_rows(tmp_path, "a", ["One", "Two", None, "Four", "Five"])
    first = json.loads(first_in(tmp_path).read_text())
    first["output"] |= {"path": f"{url}/first", "work_dir": str(tmp_path / "work")}
    spec_of_first = tmp_path / "first.yaml"
    spec_of_first.write_text(json.dumps(first))
    second = second_in(tmp_path, job=f"{url}/first")
    too_early = jobs.run("run", second, **store.environment)
    assert too_early.returncode == 2 and f"input.job: {url}/first holds no job that has begun" in too_early.stderr
    jobs.finish(spec_of_first, **store.environment)
    jobs.finish(second, **store.environment)
    write_rows(tmp_path, "b", ["Six", "Seven"])
    jobs.finish(spec_of_first, "--extend", **store.environment)
    refused = jobs.run("run", second, **store.environment)
    assert refused.returncode == 2 and "1 file is new: parts/part-000003.parquet; use --extend" in refused.stderr
    jobs.finish(second, "--extend", **store.environment)
    good = [row for row in stores.rows(f"{url}/first") if row["error_type"] is None]
    found = [(row["id"], row["answer"], row["place"]) for row in jobs.rows_of(tmp_path / "out")]
    assert found == [(row["id"], row["text"], row["row_index"]) for row in good] and len(found) == 6
    state = jobs.state_of(tmp_path / "out")
    assert state.header.input_job is not None and state.header.input_job.path == f"{url}/first"
