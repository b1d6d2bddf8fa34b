"""What a column of answers has: known datasets as they are stored, and jobs that keep what they began with."""

import csv
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.job.open import location_of, open_job
from batchinf.source.rows import Row, open_source
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.tasks.score.answers import AnswerReader, answers_in

LETTERS = ["A", "B", "C", "D"]
ENDINGS = ["ran.", "sat down.", "slept.", "fell."]
NUMBERS = ["0", "4", "2", "6"]

# A dataset: rows of answer and choices as it stores them, what they are, and the place of the right choice in each.
DATASETS: dict[str, tuple[list[tuple[object, Sequence[str]]], str, list[int | None]]] = {
    # `label` is text, and empty in the test split.
    "HellaSwag": ([("3", ENDINGS), ("1", ENDINGS), ("", ENDINGS), ("0", ENDINGS)], "places", [3, 1, None, 0]),
    # `answerKey` beside `choices.label`: 2 to 5 % of the rows have numbers from 1 in both.
    "ARC, labels": (
        [("C", LETTERS), ("2", ["1", "2", "3", "4"]), ("E", [*LETTERS, "E"]), ("4", ["1", "2", "3", "4"])],
        "texts", [2, 1, 4, 3],
    ),
    # The same keys beside A to D in the prompt: a number is not the place of a letter.
    "ARC, four letters": (
        [("B", LETTERS), ("2", LETTERS), ("A", LETTERS), ("4", LETTERS)], "texts", [1, None, 0, None]
    ),
    # Keys beside `choices.text` name no choice.
    "ARC, texts": ([("B", ENDINGS), ("2", ENDINGS), ("C", ENDINGS)], "texts", [None] * 3),
    "PIQA": ([(1, ENDINGS[:2]), (0, ENDINGS[:2]), (-1, ENDINGS[:2])], "places", [1, 0, None]),
    "MMLU": ([(1, NUMBERS), (3, ENDINGS), (0, NUMBERS)], "places", [1, 3, 0]),
    "MMLU, as text": ([("1", NUMBERS), ("2", NUMBERS), ("3", ENDINGS), ("0", NUMBERS)], "places", [1, 2, 3, 0]),
    "MMLU, letters": ([("B", LETTERS), ("D", LETTERS)], "texts", [1, 3]),
    # `answer` is text, counts from 1, and is empty in the test split.
    "WinoGrande": ([("1", ["Ann", "Eve"]), ("2", ["Kim", "Bob"]), ("", ["Kim", "Bob"])], "places_from_1", [0, 1, None]),
    "WinoGrande, as numbers": ([(2, ["Ann", "Eve"]), (1, ["Kim", "Bob"])], "places_from_1", [1, 0]),
    "CommonsenseQA": ([("E", [*LETTERS, "E"]), ("A", [*LETTERS, "E"]), ("", [*LETTERS, "E"])], "texts", [4, 0, None]),
    "OpenBookQA": ([("D", LETTERS), ("A", LETTERS)], "texts", [3, 0]),
    "BoolQ, label": ([(1, ["no", "yes"]), (0, ["no", "yes"])], "places", [1, 0]),
    "BoolQ, answer": ([(True, ["no", "yes"]), (False, ["no", "yes"])], "auto", [None, None]),
    "SciQ": ([("sat down.", ENDINGS), ("ran.", ENDINGS)], "texts", [1, 0]),
    # Answers of sums: texts of choices, though all are numbers, and one is a place, too.
    "sums": ([("95", ["106", "95"]), ("1", ["3", "1", "7"]), ("7", ["7", "10"])], "texts", [1, 1, 0]),
    # Product codes with blanks around them.
    "long codes": (
        [(" 12345678901", ["12345678901", "12345678902"]), ("12345678902", ["12345678901", "12345678902"])],
        "texts", [0, 1],
    ),
    "small numbers": ([("2", ["1", "2", "3"]), ("3", ["1", "2", "3"])], "texts", [1, 2]),
    "none known": ([(None, ENDINGS), ("", ENDINGS)], "auto", [None, None]),
    "not from 1": ([("4", ENDINGS), ("0", ENDINGS), ("2", ENDINGS)], "places", [None, 0, 2]),
    "beyond the last": ([("5", ENDINGS), ("1", ENDINGS), ("2", ENDINGS)], "places", [None, 1, 2]),
}  # fmt: skip


def write_jsonl(path: pathlib.Path, rows: Sequence[tuple[object, Sequence[str]]]) -> pathlib.Path:
    lines = (json.dumps({"q": "Q", "a": answer, "x": list(choices)}) for answer, choices in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_parquet(path: pathlib.Path, rows: Sequence[tuple[object, Sequence[str]]]) -> pathlib.Path:
    table = {"q": ["Q"] * len(rows), "a": [answer for answer, _ in rows], "x": [list(choices) for _, choices in rows]}
    pq.write_table(pa.table(table), path)
    return path


def write_csv(path: pathlib.Path, rows: Sequence[tuple[object, Sequence[str]]]) -> pathlib.Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["q", "a", "x"], *(("Q", a, json.dumps(list(x))) for a, x in rows)])
    return path


def spec_over(path: pathlib.Path, **input: Any) -> JobSpec:
    where = {"path": str(path), "context_column": "q", "choices_column": "x", "answer_column": "a", **input}
    return JobSpec.model_validate({"model": "m", "task": "score", "input": where, "output": {"path": "o"}})


def places_of(spec: JobSpec, cache: pathlib.Path) -> tuple[str, list[int | None]]:
    """What the answers are, and the place of each."""
    source = open_source(location_of(spec), cache)
    answers = answers_in(spec.input, source, print)
    reader = AnswerReader(spec.input.model_copy(update={"answers": answers}))
    rows = source.read(0, source.num_rows)
    read = [reader.read(row, spec.input.choices or list_of(row.values["x"])) for row in rows]
    source.close()
    return answers, [place if isinstance(place, int) else None for place in read]


def list_of(value: Any) -> list[str]:
    return list(json.loads(value)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_csv])
def test_known_datasets(name: str, write: Any, tmp_path: pathlib.Path) -> None:
    rows, answers, places = DATASETS[name]
    path = write(tmp_path / f"rows.{write.__name__.removeprefix('write_')}", rows)
    if write is write_csv and answers == "auto" and rows[0][0] is True:
        answers = "texts"  # CSV has the words True and False, which are no choices
    assert places_of(spec_over(path), tmp_path / "cache") == (answers, places)


def test_stars_are_labels_whatever_their_places(tmp_path: pathlib.Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [("1", ()), ("3", ()), (2, ())])
    spec = spec_over(path, choices=["1", "2", "3"], choices_column=None)
    assert places_of(spec, tmp_path / "cache") == ("texts", [0, 2, 1])


def test_the_first_text_that_is_a_choice_decides(tmp_path: pathlib.Path) -> None:
    """However many numbers stand before it."""
    path = write_jsonl(tmp_path / "rows.jsonl", [("1", LETTERS)] * 5000 + [("B", LETTERS)])
    answers, places = places_of(spec_over(path), tmp_path / "cache")
    assert answers == "texts" and places == [None] * 5000 + [1]


# `answers` of the spec decides, also for a column that looks different.
SAID = [
    ("texts", "2", LETTERS, "got '2' in column 'a'; expected the text of a choice, or null"),
    ("texts", 2, LETTERS, "got 2 in column 'a'; expected the text of a choice, or null"),
    ("texts", 95, ["106", "95"], 1),
    ("texts", " 95", ["106", "95"], 1),
    ("places", "2", ["2", "1", "0"], 2),
    ("places", "B", LETTERS, "got 'B' in column 'a'; expected the place of a choice, from 0, or null"),
    ("places", "4", LETTERS, "got 4 in column 'a'; the row's choices are 0 to 3"),
    ("places_from_1", "4", LETTERS, 3),
    ("places_from_1", 0, LETTERS, "got 0 in column 'a'; the row's choices are 1 to 4"),
    ("places_from_1", "A", LETTERS, "got 'A' in column 'a'; expected the place of a choice, from 1, or null"),
]


@pytest.mark.parametrize(("answers", "value", "choices", "expected"), SAID)
def test_the_spec_may_say_what_answers_are(
    answers: str, value: object, choices: Sequence[str], expected: int | str
) -> None:
    reader = AnswerReader(spec_over(pathlib.Path("rows.jsonl"), answers=answers).input)
    assert reader.read(Row(0, {"a": value}), choices) == expected


# -- whole jobs --------------------------------------------------------------------------------------------------------

MIXED: list[tuple[object, Sequence[str]]] = [
    (("B", "2", "1", "A", "4", None)[number % 6], LETTERS) for number in range(36)
]


def job_over(folder: pathlib.Path, rows: Sequence[tuple[object, Sequence[str]]], **sections: Any) -> pathlib.Path:
    """A quick job over files in `folder/data`."""
    (folder / "data").mkdir(parents=True)
    write_jsonl(folder / "data" / "a.jsonl", rows)
    where = {"path": str(folder / "data"), "id_column": None, "context_column": "q", "choices": LETTERS,
             "answer_column": "a", **sections.pop("input", {})}  # fmt: skip
    defaults: dict[str, Any] = {
        "task": "score", "sampling": None, "input": where, "output": {"keep_columns": [], "rows_per_shard": 6},
        "parallel": {"data_parallel_size": 1}, "scripted": {"max_num_seqs": 4, "step_s": 0.0},
    }  # fmt: skip
    return jobs.spec_of(folder, **{**defaults, **sections})


def answers_of(out: pathlib.Path) -> list[tuple[int | None, bool]]:
    return [(row["answer"], row["answer_error"] is not None) for row in jobs.rows_of(out)]


TEXTS = [((1, False), (None, True), (None, True), (0, False), (None, True), (None, False))[n % 6] for n in range(36)]


def test_numbers_in_a_column_of_texts_are_errors_that_are_said(tmp_path: pathlib.Path) -> None:
    spec = job_over(tmp_path, MIXED)
    done = jobs.finish(spec)
    assert answers_of(tmp_path / "out") == TEXTS
    error = next(row["answer_error"] for row in jobs.rows_of(tmp_path / "out") if row["answer_error"])
    assert error == "got '2' in column 'a'; expected one of input.choices (A, B, C, D), or null"
    assert "task: score; the answers in 'a' are texts of choices\n" in done.stderr
    status = jobs.run("status", tmp_path / "out").stdout
    for text in (done.stdout, status):
        assert " of 12 rows; input.answers: texts; 24 other rows are" in text
        assert "18 output rows have values in input.answer_column that are no choices (input.answers: texts)" in text
    validated = jobs.run("validate", spec, "--set", f"output.path={tmp_path / 'new'}").stdout
    assert "the answers in 'a' are texts of choices" in validated
    assert "warning: 18 of 36 sampled rows have values in input.answer_column that are no choices" in validated


def test_a_job_keeps_what_its_answers_were(tmp_path: pathlib.Path) -> None:
    """Killed, resumed, extended by rows that look otherwise, and retried."""
    spec = job_over(tmp_path, [("1", LETTERS), ("0", LETTERS)] * 12)
    assert jobs.run("run", spec, faults="coordinator.after_publish:2=kill").returncode != 0
    assert "the answers in 'a' are places of choices, from 0" in jobs.finish(spec).stderr
    write_jsonl(tmp_path / "data" / "b.jsonl", [("B", LETTERS), ("2", LETTERS)])
    jobs.finish(spec, "--extend")
    jobs.finish(spec, "--retry", "row_index >= 20", "--set", "sampling.prompt_logprobs=null")
    assert answers_of(tmp_path / "out") == [(1, False), (0, False)] * 12 + [(None, True), (2, False)]
    refused = jobs.run("run", spec, "--set", "input.answers=texts")
    assert refused.returncode == 2
    assert 'input.answers: the job has "places", now it is "texts"' in refused.stderr
    # A new job over the same rows takes them all into account.
    jobs.finish(spec, "--set", f"output.path={tmp_path / 'new'}")
    assert answers_of(tmp_path / "new")[-2:] == [(1, False), (None, True)]


def test_reading_many_answers_is_announced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["q", "a", "x"], *(("Q", "1", json.dumps(LETTERS)) for _ in range(3))])
    said: list[str] = []
    for num_rows in (3, 4):
        monkeypatch.setattr("batchinf.tasks.score.answers._MANY_ROWS", num_rows)
        source = open_source(location_of(spec_over(path)), tmp_path / "cache")
        assert answers_in(spec_over(path).input, source, said.append) == "places"
        source.close()
    [line] = said
    assert line.startswith("input.answers auto: reading the answers of at most 3 rows before the engines start; ")


def test_slices_have_one_meaning(tmp_path: pathlib.Path) -> None:
    """That of the whole input, of which the first slice has only numbers."""
    rows = [("1", LETTERS)] * 12 + [("B", LETTERS)] * 12
    spec = job_over(tmp_path, rows)
    for number in (0, 1):
        jobs.finish(spec, "--slice", f"{number}/2")
    parts = [answers_of(tmp_path / "out" / f"slice-{number}") for number in (0, 1)]
    assert parts == [[(None, True)] * 12, [(1, False)] * 12]
    assert "input.answers: texts" in jobs.run("status", tmp_path / "out").stdout


def test_answers_are_decided_before_an_automatic_length(tmp_path: pathlib.Path) -> None:
    done = jobs.finish(job_over(tmp_path, MIXED, engine={"max_model_len": "auto"}))
    assert done.stderr.count("the answers in 'a' are texts of choices") == 1
    assert answers_of(tmp_path / "out") == TEXTS


def test_a_begun_job_is_opened_without_its_answers(tmp_path: pathlib.Path) -> None:
    spec = job_over(tmp_path, MIXED)
    jobs.finish(spec)
    with_state = open_job(read_spec(spec), state=jobs.state_of(tmp_path / "out"))
    assert with_state.spec.input.answers == with_state.identity["input.answers"] == "texts"
    with_state.source.close()
