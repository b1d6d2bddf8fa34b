"""Rows to look at: found by id in its own type, drawn again by a seed, shown as they will run."""

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.errors import InputError, RowError
from batchinf.commands.validate.shown_rows import find_row, random_rows, shown_row
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt, Request
from batchinf.source.files import InputLocation
from batchinf.source.rows import Source, open_source
from batchinf.spec.sampling import SamplingSpec


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Iterator[Source]:
    table = pa.table(
        {
            "text": ["a", None, "7", "é", "a"],
            "number": pa.array([5, None, 7, -1, 5], pa.int32()),
            "share": [0.5, None, 1.0, 2.5, 0.5],
            "day": pa.array([datetime.date(2026, 1, number) for number in range(1, 6)]),
            "list": [[1], [2], [3], None, [5]],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with contextlib.closing(open_source(InputLocation(str(tmp_path / "rows.parquet")), tmp_path / "cache")) as source:
        yield source


@pytest.mark.parametrize(
    ("column", "wanted", "row"),
    [("text", "a", 0), ("text", "7", 2), ("text", "é", 3), ("number", "7", 2), ("number", "-1", 3), ("share", "1", 2),
     ("share", "2.5", 3), ("day", "2026-01-05", 4), (None, "4", 4)],
)  # fmt: skip
def test_a_row_is_found_by_its_id(source: Source, column: str | None, wanted: str, row: int) -> None:
    assert find_row(source, column, wanted) == row


@pytest.mark.parametrize(
    ("column", "wanted", "message"),
    [
        ("text", "b", "--row b: none of 5 rows has this in 'text' (string)"),
        ("text", "", "--row : none of 5 rows has this in 'text' (string)"),
        ("number", "8", "--row 8: none of 5 rows has this in 'number' (int32)"),
        ("number", "7.0", "--row 7.0: the ids in 'number' are int32; give one of them"),
        ("number", "seven", "--row seven: the ids in 'number' are int32; give one of them"),
        ("list", "1", "--row 1: the ids in 'list' are list<item: int64>; give one of them"),
        (None, "5", "--row 5: the job has no id_column, so a row is named by its position, 0 to 4"),
        (None, "-1", "--row -1: the job has no id_column, so a row is named by its position, 0 to 4"),
        (None, "a", "--row a: the job has no id_column, so a row is named by its position, 0 to 4"),
    ],
)
def test_a_row_that_is_not_there(source: Source, column: str | None, wanted: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        find_row(source, column, wanted)
    assert str(refused.value) == message


def test_ids_of_mixed_types_are_found_as_they_are_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 7}\n{"id": "7"}\n{"id": "é"}\n{"id": {"a": 1}}\n')
    with contextlib.closing(open_source(InputLocation(str(tmp_path / "rows.jsonl")), tmp_path / "cache")) as source:
        assert [find_row(source, "id", wanted) for wanted in ("7", "é", '{"a": 1}')] == [0, 2, 3]


def test_an_id_far_down_is_found(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"id": range(120_000)}), tmp_path / "rows.parquet")
    with contextlib.closing(open_source(InputLocation(str(tmp_path / "rows.parquet")), tmp_path / "cache")) as source:
        assert find_row(source, "id", "119999") == 119_999


def test_a_seed_draws_the_same_rows() -> None:
    drawn = random_rows(range(100, 100_000), 20, 3)
    assert drawn == sorted(set(drawn)) == random_rows(range(100, 100_000), 20, 3)
    assert len(drawn) == 20
    assert set(drawn) <= set(range(100, 100_000))
    assert drawn != random_rows(range(100, 100_000), 20, 4)
    assert random_rows(range(5, 8), 20, 3) == [5, 6, 7]


JOB = SamplingSpec(temperature=0.0, top_p=1.0, max_tokens=64)


def lines_of(
    prompt: Prompt,
    row_id: object = None,
    seed: int | None = None,
    num: int = 1,
    room: int | None = 512,
    is_whole: bool = False,
) -> list[str]:
    tokenizer = load_tokenizer(str(jobs.MODEL), False)
    request = Request(prompt.row_index, 0, prompt.token_ids, JOB, max_tokens=64, seed=seed)
    job = JOB.model_copy(update={"n": num})
    row = shown_row(
        prompt,
        row_id,
        request,
        tokenizer=tokenizer,
        job_sampling=job,
        max_model_len=room,
    )
    return list(dataclasses.replace(row, is_named=is_whole).lines())[1:]


def ids(text: str) -> list[int]:
    return list(load_tokenizer(str(jobs.MODEL), False)(text)["input_ids"])


def test_special_tokens_and_blanks_at_the_end_are_seen() -> None:
    shown = lines_of(Prompt(3, ids("One \n\ntwo  "), None, None), row_id="x")
    num = len(ids("One \n\ntwo  "))
    assert shown[0] == f"row 3, id 'x': {num} tokens, room for {512 - num} more in 512"
    assert shown[1:4] == ["  │ <|begin_of_text|>One·", "  │ ", "  │ two··"]
    assert shown[4].startswith("  token ids: 0, ")
    assert shown[5:] == ["  sampling: max_tokens 64, greedy"]


def test_an_error_is_shown_in_place_of_a_prompt() -> None:
    prompt = Prompt(3, [], None, RowError("null_prompt", "column 'prompt' is null"))
    assert lines_of(prompt, row_id=9) == ["row 3, id 9: null_prompt: column 'prompt' is null"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_long_prompt_is_shown_whole_where_it_is_named(is_whole: bool) -> None:
    text = "Once upon a time. " * 300
    shown = lines_of(Prompt(0, ids(text), None, None), room=None, is_whole=is_whole)
    assert shown[0] == f"row 0: {len(ids(text)):,} tokens"
    prompt = "\n".join(line.removeprefix("  │ ") for line in shown if line.startswith("  │"))
    if is_whole:
        assert prompt == "<|begin_of_text|>" + text[:-1] + "·"
    else:
        assert prompt.split("\n")[1] == "[… 3,617 characters; --row shows them …]"
        assert prompt.endswith(text[-600:-1] + "·")


@pytest.mark.parametrize(
    ("own", "room", "words"),
    [
        ({"max_tokens": 9}, 512, "max_tokens 9 (the row's own; the job's is 64), greedy"),
        ({"temperature": 0.7, "stop": ("x",)}, 512,
         "temperature 0.7 (the row's own; the job's is 0.0), stop [\"x\"] (the row's own; the job's is []), "
         "max_tokens 64, greedy"),
        ({"max_tokens": None}, 512, "max_tokens what fits (the row's own; the job's is 64), greedy"),
        ({}, 20, "max_tokens 64, of which 18 fit, greedy"),
    ],
)  # fmt: skip
def test_what_is_a_rows_own_is_told_from_the_jobs(own: dict[str, object], room: int, words: str) -> None:
    sampling = SamplingSpec.model_validate({**JOB.model_dump(), **own}) if own else None
    prompt = Prompt(0, [0, 50], None, None, sampling=sampling)
    assert lines_of(prompt, room=room)[-1] == f"  sampling: {words}"


def test_samples_have_seeds() -> None:
    prompt = Prompt(0, [0, 50], None, None, is_truncated=True)
    shown = lines_of(prompt, seed=12, num=3)
    assert shown[0] == "row 0: 2 tokens, room for 510 more in 512; cut to fit"
    assert shown[-1] == "  sampling: max_tokens 64, 3 samples, the first with seed 12"


def test_the_id_may_be_the_prompt(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("body\none\ntwo\n")
    given = {"path": str(path), "id_column": "body", "prompt_column": "body"}
    shown = jobs.run("validate", jobs.spec_of(tmp_path, input=given, output={"keep_columns": []}))
    assert shown.returncode == 0, shown.stderr
    assert "one" in shown.stdout
