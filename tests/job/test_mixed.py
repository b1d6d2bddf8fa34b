"""Columns whose values have several types: every pair of JSON kinds, wherever a job uses a column."""

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from inputs import open_jsonl
from test_choose import chosen_of, spec_over
from transformers import AutoTokenizer

import jobs
from batchinf.base.errors import InputError
from batchinf.job.mixed import mixed_type_warnings, refuse_equal_ids
from batchinf.spec.file import read_spec
from batchinf.tasks.registry import task_of

KINDS: dict[str, list[Any]] = {
    "text": ["plain-1", '"quoted"', "42", "null", "[1]", ""],
    "integer": [7, -(2**63), 2**70],
    "float": [0.5, 1e300],
    "bool": [True, False],
    "list": [["a"], [1, None]],
    "mapping": [{"a": 1}, {"a": "x", "b": [1]}],
    "null": [None],
}
PAIRS = list(itertools.combinations(KINDS, 2))
NAMES = [f"{a}_{b}" for a, b in PAIRS]


def values_of(pair: tuple[str, str]) -> list[Any]:
    """The values of both kinds in turn."""
    return [value for both in itertools.zip_longest(*(KINDS[kind] for kind in pair)) for value in both]


def stored(pair: tuple[str, str], value: Any) -> Any:
    """A text is itself; another value is its JSON text, unless one type of Arrow holds all values of the column."""
    if value is None or isinstance(value, str):
        return value
    if set(pair) in ({"bool", "null"}, {"float", "null"}):
        return value
    return json.dumps(value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished job with a kept column for each pair of kinds; its ids are texts and a number."""
    folder = tmp_path_factory.mktemp("mixed")
    columns = {name: values_of(pair) for name, pair in zip(NAMES, PAIRS, strict=True)}
    rows = [dict(zip(columns, row, strict=True)) for row in itertools.zip_longest(*columns.values())]
    ids: list[Any] = [f"plain-{i}" for i in range(len(rows))]
    ids[2] = 42
    records = [{"id": id, "prompt": "Say 1.", **row} for id, row in zip(ids, rows, strict=True)]
    done = jobs.finish(spec_over(folder, records, output={"keep_columns": NAMES}))
    (folder / "said").write_text(done.stderr)
    return folder


def test_kept_columns_and_ids(finished: pathlib.Path) -> None:
    table = jobs.table_of(finished / "out")
    for name, pair in zip(NAMES, PAIRS, strict=True):
        expected = [stored(pair, value) for value in values_of(pair)]
        assert table[name].to_pylist()[: len(expected)] == expected, name
    assert table["id"].to_pylist()[:4] == ["plain-0", "plain-1", "42", "plain-3"]


def test_a_line_names_each_such_column_and_its_first_odd_row(finished: pathlib.Path) -> None:
    said = (finished / "said").read_text()
    assert (
        "warning: the column 'id' holds values of several types (in input.jsonl, row 2 has a number, where earlier "
        "rows have a text): texts stay as they are, and any other value becomes its JSON text"
    ) in said
    single = {"bool_null", "float_null", "text_null"}
    assert {name for name in NAMES if f"the column '{name}' holds" in said} == {*NAMES} - single


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_where_compares_the_text_that_is_stored(pair: tuple[str, str], tmp_path: pathlib.Path) -> None:
    values = values_of(pair)
    spec = spec_over(tmp_path, [{"id": i, "prompt": "p", "x": value} for i, value in enumerate(values)], input={"where": "true"})
    texts = [stored(pair, value) for value in values]
    for text in {text for text in texts if text is not None}:
        literal = "'" + text.replace("'", "''") + "'" if isinstance(text, str) else str(text)
        assert chosen_of(spec, f"input.where={json.dumps(f'x = {literal}')}") == [i for i, own in enumerate(texts) if own == text]


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_prompts_and_answers_have_the_rows_own_values(pair: tuple[str, str], tmp_path: pathlib.Path) -> None:
    """A prompt is a text or an error row, and a template prints the value itself, whatever other rows have."""
    values = values_of(pair)
    source = open_jsonl(tmp_path, *[{"x": value, "c": ["plain-1", "42"]} for value in values])
    rows, tokenizer = source.read(0, len(values)), AutoTokenizer.from_pretrained(jobs.MODEL)
    source.close()

    def built(**input: Any) -> list[Any]:
        task = {"task": "score", "sampling": None} if "answer_column" in input else {}
        spec = read_spec(jobs.spec_of(tmp_path, input={"id_column": None, **input}, **task)).spec
        return task_of(spec).prompt_builder(tokenizer, None).build(rows, 512)

    for value, prompt in zip(values, built(prompt_column="x", apply_chat_template=False), strict=True):
        assert (prompt.error is None) == (isinstance(value, str) and value != "")
    for value, prompt in zip(values, built(prompt_template="<{{ x }}>"), strict=True):
        assert prompt.token_ids == (tokenizer(f"<{value}>").input_ids if value is not None else [])
    answers = built(context_column="x", choices_column="c", answer_column="x")
    assert [prompt.scoring and prompt.scoring.answer for prompt in answers if prompt.error is None] == [
        {"plain-1": 0, "42": 1}.get(value) for value in values if isinstance(value, str)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("42", 42), ("-0.5", -0.5), ("true", True), ("[1, 2]", [1, 2]), ('{"a": "é"}', {"a": "é"}), ("[]", [])],
)
def test_ids_that_would_become_equal_are_refused(text: str, value: Any, tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"x{i}"} for i in range(5000)]
    source = open_jsonl(tmp_path, {"id": text}, *rows, {"id": value})
    with pytest.raises(InputError, match=r"input.id_column: row 5,001 has .* in 'id', and another row has the text"):
        refuse_equal_ids("id", source)
    source.close()
    other = open_jsonl(tmp_path, {"id": text + " "}, *rows, {"id": value}, {"id": value}, {"id": None}, "broken")
    refuse_equal_ids("id", other)
    other.close()


def test_files_of_different_types_are_named(tmp_path: pathlib.Path) -> None:
    for name, value in (("a", "x"), ("b", None), ("c", 7)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, "prompt": "p", "x": value}))
    spec = jobs.spec_of(tmp_path, input={"path": str(tmp_path / "*.jsonl")}, output={"keep_columns": ["x"]})
    file = read_spec(spec)
    from batchinf.job.open import open_job

    job = open_job(file, tmp_path / "cache")
    [line] = mixed_type_warnings(job.spec, job.source)
    assert "'x' holds values of several types (a number in c.jsonl, but a text in a.jsonl)" in line
    assert job.source.read_columns(0, 3, ["x"])["x"].to_pylist() == ["x", None, "7"]
    assert np.array_equal(pa.array(chosen_of(spec, "input.where=x <> 'x'")), [2])
    job.source.close()
