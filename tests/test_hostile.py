"""Every row of sample_data/hostile.jsonl comes out: the good ones right, the bad ones with words that help."""

import json
import pathlib
from typing import Any

import pytest

import jobs

HOSTILE = jobs.ROOT / "sample_data" / "hostile.jsonl"
SECTIONS: dict[str, Any] = {
    "input": {"prompt_column": "prompt"},
    "output": {"keep_columns": ["kind"], "include_prompt": True},
    "parallel": {"data_parallel_size": 1},
    "scripted": {"max_model_len": 512, "step_s": 0.0},
}
# What a message must say, by the kind of row.
WORDS = {
    "empty": "empty",
    "missing_column": "prompt",
    "null": "null",
    "wrong_type": "got int",
    "over_long": "512",
    "broken_json": "hostile.jsonl",
    "lone_surrogate": "surrogate",
    "invalid_utf8": "hostile.jsonl",
    "megabyte": "512",
}


@pytest.fixture(scope="module")
def kinds() -> list[str]:
    """Of each line; those that are no JSON begin like JSON all the same."""
    lines = HOSTILE.read_bytes().splitlines()
    return [line.split(b'"kind": "')[1].split(b'"')[0].decode() for line in lines]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict[str, Any]], Any]:
    folder = tmp_path_factory.mktemp("hostile")
    spec = jobs.spec_of(folder, **{**SECTIONS, "input": {"path": str(HOSTILE), "id_column": "id"}})
    done = jobs.run("run", spec)
    return spec, jobs.rows_of(folder / "out"), done


def test_every_row_comes_out(hostile: Any, kinds: list[str]) -> None:
    _, rows, _ = hostile
    assert [row["row_index"] for row in rows] == list(range(len(kinds)))
    assert [row["error_type"] is None for row in rows] == [kind == "good" for kind in kinds]


def test_too_many_errors_exit_with_3_and_may_be_accepted(hostile: Any, kinds: list[str]) -> None:
    spec, _, done = hostile
    num_bad = sum(kind != "good" for kind in kinds)
    assert done.returncode == 3
    assert f"{num_bad / len(kinds):.1%}" in done.stderr
    assert "max_error_rate" in done.stderr
    assert "Traceback" not in done.stderr
    accepted = jobs.run("run", spec, "--set", "max_error_rate=0.9")
    assert accepted.returncode == 0
    assert f"{len(kinds)} output rows, {num_bad} of them errors" in accepted.stdout


def test_bad_rows_say_what_is_wrong_with_them(hostile: Any, kinds: list[str]) -> None:
    _, rows, _ = hostile
    assert set(kinds) == {"good", *WORDS}
    for kind, row in zip(kinds, rows, strict=True):
        if kind != "good":
            assert WORDS[kind] in row["error_message"], (kind, row["error_message"])
            assert len(row["error_message"]) < 1000
            assert row["text"] is None
            assert row["token_ids"] is None
            assert row["finish_reason"] is None
            assert row["num_output_tokens"] is None


@pytest.mark.parametrize("kind", ["broken_json", "invalid_utf8"])
def test_a_broken_line_is_named_by_file_and_line(kind: str, hostile: Any, kinds: list[str]) -> None:
    _, rows, _ = hostile
    index = kinds.index(kind)
    assert "hostile.jsonl" in rows[index]["error_message"]
    assert f"line {index + 1}" in rows[index]["error_message"]
    assert rows[index]["id"] is None


def test_bad_rows_keep_their_columns(hostile: Any, kinds: list[str]) -> None:
    _, rows, _ = hostile
    whole = [kind for kind in kinds if kind not in ("broken_json", "invalid_utf8")]
    assert [row["kind"] for row in rows if row["kind"] is not None] == whole
    assert [row["id"] is None for row in rows] == [kind in ("broken_json", "invalid_utf8") for kind in kinds]


def test_good_rows_are_as_among_good_ones(hostile: Any, tmp_path: pathlib.Path) -> None:
    _, rows, _ = hostile
    good = tmp_path / "good.jsonl"
    lines = HOSTILE.read_bytes().splitlines(keepends=True)
    good.write_bytes(b"".join(line for line in lines if b'"kind": "good"' in line))
    jobs.finish(jobs.spec_of(tmp_path, **{**SECTIONS, "input": {"path": str(good), "id_column": "id"}}))
    expected = {row["id"]: row for row in jobs.rows_of(tmp_path / "out")}
    for row in rows:
        if row["error_type"] is None:
            # Greedy: the position plays no part.
            assert {**row, "row_index": 0} == {**expected.pop(row["id"]), "row_index": 0}
    assert not expected


def test_a_job_of_nothing_but_bad_rows_ends(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps({"id": str(index), "prompt": ""}) + "\n" for index in range(40)))
    given = {"input": {"path": str(path)}, "output": {"keep_columns": []}}
    spec = jobs.spec_of(tmp_path, **{**SECTIONS, **given}, max_error_rate=1.0)
    jobs.finish(spec)
    rows = jobs.rows_of(tmp_path / "out")
    assert len(rows) == 40
    assert {row["error_type"] for row in rows} != {None}
