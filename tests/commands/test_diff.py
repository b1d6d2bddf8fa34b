"""What changed between two jobs, held against what was changed in them."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extents import next_extent

import jobs
from batchinf.base.errors import OutputError, UserError
from batchinf.base.storage import Folder
from batchinf.commands.diff import IdentityChange, diff_jobs
from batchinf.manifest.log import Manifest

NUM_ROWS = 120


def job(folder: pathlib.Path, rows: list[dict[str, Any]], **sections: Any) -> str:
    """A finished job over these rows; its output folder."""
    folder.mkdir()
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"input": {"path": str(path), "id_column": "id"}, "output": {"keep_columns": [], "rows_per_shard": 50},
            "parallel": {"data_parallel_size": 1}}  # fmt: skip
    jobs.finish(jobs.spec_of(folder, **{**spec, **sections}, max_error_rate=1, scripted={"step_s": 0.0}))
    return str(folder / "out")


def rows(first: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"row-{i}", "prompt": f"Say {i}."} for i in range(first, first + NUM_ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Jobs a, and b over nearly the same rows: 100 are in both, one has another prompt and one has none."""
    folder = tmp_path_factory.mktemp("diff")
    job(folder / "a", rows())
    other = rows(20)
    other[5]["prompt"], other[6]["prompt"] = "Another.", ""
    job(folder / "b", other)
    return folder


def said(a: pathlib.Path, b: pathlib.Path, **options: Any) -> list[str]:
    wanted = {"on": None, "to": None, "num_examples": 0, **options}
    return list(diff_jobs(str(a / "out"), str(b / "out"), **wanted).lines())


def rewrite(out: pathlib.Path, change: Any) -> None:
    """Put other values into each part of a job."""
    for path in sorted((out / "parts").iterdir()):
        table = pq.read_table(path)
        pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def test_joined_by_id(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    to = tmp_path / "diff.parquet"
    lines = said(folder / "a", folder / "b", to=str(to), num_examples=1)
    assert lines[0] == "outputs: 2 of 100 changed (2.00%), by text"
    assert lines[1] == f"A {folder}/a/out: 120 rows, model {jobs.MODEL}, device none"
    paths = [f"{folder}/{name}/rows.jsonl (120 rows)" for name in "ab"]
    assert f"  input: {paths[0]} -> {paths[1]}" in lines
    assert "rows: 100 in both, by id; 20 only in A, 20 only in B" in lines
    assert "prompts: 2 rows have other token ids: a changed template, tokenizer or input" in lines
    assert "errors: 1 rows only in B, 0 only in A" in lines
    assert "  id row-25, sample 0:" in lines
    assert lines[-1] == f"100 rows in {to}"
    table = pq.read_table(to)
    assert table["key"].to_pylist() == [f"row-{i}" for i in range(20, 120)]
    changed = table.filter(table["is_changed"])
    assert changed["key"].to_pylist() == ["row-25", "row-26"]
    assert changed["is_same_prompt"].to_pylist() == [False, False]
    assert changed["error_type_b"].to_pylist() == [None, "empty_prompt"]
    assert changed["text_b"].to_pylist()[1] is None
    assert set(table["logprobs_max_abs_delta"].drop_null().to_pylist()) == {0.0}


def test_the_file_replaces_only_files_of_diff(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a, b = str(folder / "a" / "out"), str(folder / "b" / "out")
    spec, data, to = (tmp_path / name for name in ("job.yaml", "input.parquet", "diff.parquet"))
    spec.write_text("model: mine")
    pq.write_table(pa.table({"text": ["mine"]}), data)
    own = data.read_bytes()
    for path in (spec, data):
        with pytest.raises(UserError, match=f"--out: {path} cannot be written: a file is there that this command has"):
            diff_jobs(a, b, to=str(path))
    assert (spec.read_text(), data.read_bytes()) == ("model: mine", own)
    diff_jobs(a, b, to=str(to))
    assert pq.read_table(to).num_rows == 100
    diff_jobs(a, a, to=str(to))
    assert pq.read_table(to).num_rows == 120
    diff_jobs(a, b, to="/dev/null")
    assert pathlib.Path("/dev/null").is_char_device()


def test_nothing_changed(folder: pathlib.Path) -> None:
    lines = said(folder / "a", folder / "a", num_examples=5)
    assert "rows: 120 in both, by row_index" in lines
    assert "outputs: 0 of 120 changed (0.00%), by text" in lines
    assert not any(line.startswith("  ") for line in lines)


def test_logprobs_up_to_the_first_difference(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = tmp_path / "c"
    job(other, rows())
    before = jobs.table_of(other / "out")

    def change(table: pa.Table) -> pa.Table:
        """From the second half of each output on other tokens; logprobs a little higher, then much lower."""
        ids, logprobs = table["token_ids"].to_pylist(), table["logprobs"].to_pylist()
        for row, values in zip(ids, logprobs, strict=True):
            half = len(row) // 2
            row[half:] = [token + 1 for token in row[half:]]
            values[:half] = [value + 0.25 for value in values[:half]]
            values[half:] = [value - 100 for value in values[half:]]
        for name, column in (("token_ids", ids), ("logprobs", logprobs)):
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(column, table[name].type))
        return table

    rewrite(other / "out", change)
    halves = [len(ids) // 2 for ids in before["token_ids"].to_pylist()]
    num_tokens = sum(map(len, before["token_ids"].to_pylist()))
    to = tmp_path / "diff.parquet"
    lines = said(folder / "a", other, to=str(to))
    # A reader sees no difference: the texts are the same.
    assert lines[0] == "outputs: 0 of 120 changed (0.00%), by text"
    assert any(line.startswith("token_ids: 120 rows differ") for line in lines)
    table = pq.read_table(to)
    assert not any(table["is_changed"].to_pylist())
    counted = (
        f"of {sum(halves):,} numbers, without {num_tokens - sum(halves):,} after the first other token or position"
    )
    said_of_them = "B - A is +2.50e-01 on average, |B - A| 2.50e-01, at most 2.50e-01"
    assert f"logprobs: 120 rows differ; {counted}, {said_of_them}" in lines
    table = pq.read_table(to)
    assert table["token_ids_first_difference"].to_pylist() == halves
    assert set(table["logprobs_max_abs_delta"].drop_null().to_pylist()) == {0.25}


def test_logprobs_of_other_texts_without_token_ids(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "c")
    others: list[int] = []

    def change(table: pa.Table) -> pa.Table:
        """The first text of each part is another one. All logprobs are higher."""
        texts, logprobs = table["text"].to_pylist(), table["logprobs"].to_pylist()
        others.append(len(logprobs[0]))
        values = [[value + 0.25 for value in row] for row in logprobs]
        for name, column in (("text", ["another", *texts[1:]]), ("logprobs", values)):
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(column, table[name].type))
        return table.drop_columns("token_ids")

    num = sum(map(len, jobs.table_of(tmp_path / "c" / "out")["logprobs"].to_pylist()))
    rewrite(tmp_path / "c" / "out", change)
    counted = f"of {num - sum(others):,} numbers, without {sum(others)} after the first other token or position"
    [line] = [line for line in said(folder / "a", tmp_path / "c") if line.startswith("logprobs: ")]
    assert line.startswith(f"logprobs: 120 rows differ; {counted}, B - A is +2.50e-01 on average")


def test_an_error_of_one_job_that_keeps_its_output(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "c")

    def change(table: pa.Table) -> pa.Table:
        types = pa.array([None, "structure_error", *[None] * (len(table) - 2)])
        return table.set_column(table.schema.get_field_index("error_type"), "error_type", types)

    rewrite(tmp_path / "c" / "out", change)
    lines = said(folder / "a", tmp_path / "c", num_examples=1)
    assert lines[0] == "outputs: 5 of 120 changed (4.17%), by text"
    assert lines[-1] == "    error_type nothing -> structure_error"


def extended(job: pathlib.Path, to: pathlib.Path, later: str) -> pathlib.Path:
    """A copy of a job that has taken in a later version of its input, with this fingerprint."""
    shutil.copytree(job, to)
    state = jobs.state_of(to / "out")
    manifest = Manifest(Folder(to / "out"), state.last_epoch + 1)
    manifest.extent(next_extent(state.extents, 0, 1), later)
    manifest.commit()
    manifest.close()
    return to


def test_rows_that_came_later_may_be_others(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    one = extended(folder / "a", tmp_path / "one", "a week later")
    other = extended(folder / "a", tmp_path / "other", "another week later")
    assert "rows: 120 in both, by row_index" in said(folder / "a", one)
    assert "rows: 120 in both, by id" in said(one, other)


def test_an_input_that_one_job_took_in_bit_by_bit(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One job began with fewer rows of the input that the other had from its beginning."""
    one = tmp_path / "one"
    job(one, rows()[:60])
    assert f"  input: {one}/rows.jsonl (60 rows) -> {folder}/a/rows.jsonl (120 rows)" in said(one, folder / "a")
    with (one / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows()[60:])
    jobs.finish(one / "job.yaml", "--extend")
    for pair in ((one, folder / "a"), (folder / "a", one)):
        lines = said(*pair)
        assert not any(line.startswith("  input: ") for line in lines)
        assert "rows: 120 in both, by row_index" in lines
        assert "outputs: 0 of 120 changed (0.00%), by text" in lines


def test_the_same_files_in_another_order(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A job that took in `a.jsonl` after `b.jsonl`, and one that had both from its beginning."""
    data = tmp_path / "data"
    data.mkdir()
    texts = ["".join(json.dumps(row) + "\n" for row in rows(first)) for first in (0, NUM_ROWS)]
    (data / "b.jsonl").write_text(texts[1])
    job(tmp_path / "one", [], input={"path": str(data), "id_column": "id"})
    (data / "a.jsonl").write_text(texts[0])
    jobs.finish(tmp_path / "one" / "job.yaml", "--extend")
    job(tmp_path / "other", [], input={"path": str(data), "id_column": "id"})
    lines = said(tmp_path / "one", tmp_path / "other")
    assert f"  input: the same files of {data}, with their rows in another order" in lines
    assert "rows: 240 in both, by id" in lines
    report = diff_jobs(str(tmp_path / "one" / "out"), str(folder / "a" / "out"))
    assert not report.has_same_files


def test_a_file_that_changed_between_two_jobs(folder: pathlib.Path) -> None:
    report = diff_jobs(str(folder / "a" / "out"), str(folder / "b" / "out"))
    later = dataclasses.replace(report.b, input_path=report.a.input_path, num_input_rows=1400)
    assert (
        f"  input: {report.a.input_path} has changed from one job to the other; A has read 120 rows of it, B 1,400"
    ) in dataclasses.replace(report, b=later).lines()


def test_what_cannot_be_joined(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    nameless = tmp_path / "d"
    job(nameless, rows(), input={"path": str(nameless / "rows.jsonl"), "id_column": None})
    with pytest.raises(UserError, match="had different inputs, and at least one has no id by which rows"):
        said(folder / "b", nameless)
    with pytest.raises(UserError, match="--on id: at least one of the jobs has no id"):
        said(folder / "a", nameless, on="id")
    with pytest.raises(UserError, match="--on: got 'name'; must be row_index or id"):
        said(folder / "a", nameless, on="name")
    # The same rows at the same places, whatever else the jobs had.
    assert "outputs: 0 of 120 changed (0.00%), by text" in said(folder / "a", nameless, on="row_index")


def test_where_to_write(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"--out: .*nowhere/x\.parquet cannot be written"):
        said(folder / "a", folder / "a", to=str(tmp_path / "nowhere" / "x.parquet"))


def test_of_a_long_setting_the_difference_is_shown() -> None:
    body = "Answer with one of: positive, negative, mixed. " * 5
    line = IdentityChange("input.messages", f"{body}Text: {{{{ a }}}}", f"{body}Review: {{{{ a }}}}").line()
    assert (
        line == "  input.messages: …itive, negative, mixed. Text: {{ a }}' -> …itive, negative, mixed. Review: {{ a }}'"
    )
    cut = IdentityChange("x", "same", "s" + "y" * 500).line()
    assert cut == f"  x: 'same' -> 's{'y' * 118}…"
    assert IdentityChange("x", None, {"a": 1}).line() == "  x: None -> {'a': 1}"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_part_that_cannot_be_read_is_named(damage: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder / "a/out", tmp_path / "a")
    part = sorted((tmp_path / "a/parts").iterdir())[1]
    part.write_bytes(part.read_bytes()[:500])
    if damage == "missing":
        part.unlink()
    with pytest.raises(OutputError, match=f"{part.name} cannot be read") as raised:
        diff_jobs(str(tmp_path / "a"), str(folder / "b/out"))
    assert "\n" not in str(raised.value)


def test_parts_of_different_columns(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The columns of each part are found by their names: one part has a column more, and before the others."""
    shutil.copytree(folder / "a/out", tmp_path / "a")
    part = min((tmp_path / "a/parts").iterdir())
    table = pq.read_table(part)
    pq.write_table(table.add_column(0, "extra", pa.array(range(table.num_rows))), part)
    report = diff_jobs(str(tmp_path / "a"), str(folder / "a/out"), on="id")
    same = diff_jobs(str(folder / "a/out"), str(folder / "a/out"), on="id")
    assert report.changes == same.changes
