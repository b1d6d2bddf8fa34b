"""Columns whose values have several types: every pair of JSON kinds, wherever a job uses a column."""

import itertools
import json
import pathlib
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import open_jsonl
from test_choose import chosen_of, spec_over
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import InputError, SpecError
from batchinf.job.columns import column_warnings, refuse_equal_ids
from batchinf.job.open import open_job
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
TOKENIZER = PreTrainedTokenizerFast.from_pretrained(jobs.MODEL)


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
    spec = spec_over(
        tmp_path, [{"id": i, "prompt": "p", "x": value} for i, value in enumerate(values)], input={"where": "true"}
    )
    texts = [stored(pair, value) for value in values]
    for text in {text for text in texts if text is not None}:
        literal = "'" + text.replace("'", "''") + "'" if isinstance(text, str) else str(text)
        assert chosen_of(spec, f"input.where={json.dumps(f'x = {literal}')}") == [
            i for i, own in enumerate(texts) if own == text
        ]


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_prompts_and_answers_are_the_rows_own(pair: tuple[str, str], tmp_path: pathlib.Path) -> None:
    """A prompt is a text or an error row, and a template prints the value itself, whatever other rows have."""
    values = values_of(pair)
    source = open_jsonl(tmp_path, *[{"x": value, "c": ["plain-1", "42"]} for value in values])
    rows = source.read(0, len(values))
    source.close()

    def built(**input: Any) -> list[Any]:
        task = {"task": "score", "sampling": None} if "answer_column" in input else {}
        spec = read_spec(jobs.spec_of(tmp_path, input={"id_column": None, **input}, **task)).spec
        return task_of(spec).prompt_builder(TOKENIZER, None).build(rows, 512)

    for value, prompt in zip(values, built(prompt_column="x", apply_chat_template=False), strict=True):
        assert (prompt.error is None) == (isinstance(value, str) and value != "")
    for value, prompt in zip(values, built(prompt_template="<{{ x }}>"), strict=True):
        assert prompt.token_ids == (TOKENIZER(f"<{value}>").input_ids if value is not None else [])
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
    job = open_job(file, tmp_path / "cache")
    [line] = column_warnings(job.task, job.source)
    assert "'x' holds values of several types (a number in c.jsonl, but a text in a.jsonl)" in line
    assert job.source.read_columns(0, 3, ["x"])["x"].to_pylist() == ["x", None, "7"]
    assert np.array_equal(pa.array(chosen_of(spec, "input.where=x <> 'x'")), [2])
    job.source.close()


MESSAGES = [{"role": "user", "content": "Rain?"}]
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "sun", "description": "Sun."}}
PRINTS_TOOLS = "{% if tools %}TOOLS={{ tools | tojson }} {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def prompts_of(folder: pathlib.Path, rows: list[dict[str, Any]], **input: Any) -> list[Any]:
    folder.mkdir(exist_ok=True)
    given = {"messages_column": "messages", "chat_template": PRINTS_TOOLS, "id_column": None, **input}
    job = open_job(
        read_spec(spec_over(folder, rows, input=given, output={"include_prompt": True, "keep_columns": []})),
        folder / "cache",
    )
    builder = job.task.prompt_builder(TOKENIZER, None)
    read = job.source.read(0, job.source.num_rows, builder.columns)
    job.source.close()
    return builder.build(read, 512)


def test_tools_beside_messages_are_those_of_the_chat_template(tmp_path: pathlib.Path) -> None:
    """As vLLM's `LLM.chat(tools=...)` gives them; a list, its JSON text, or none."""
    listed = [{"messages": MESSAGES, "tools": tools} for tools in ([TOOL], [TOOL, OTHER], [], None, json.dumps([TOOL]))]
    rows = [*listed, {"messages": MESSAGES}, {"messages": MESSAGES, "tools": ""}]
    texts = [prompt.text for prompt in prompts_of(tmp_path / "a", rows)]
    expected = [
        TOKENIZER.apply_chat_template(MESSAGES, tools=tools, chat_template=PRINTS_TOOLS, tokenize=False)
        for tools in ([TOOL], [TOOL, OTHER], None, None, [TOOL], None, None)
    ]
    assert texts == expected
    assert texts[0].startswith('TOOLS=[{"type": "function"')
    named = [{"messages": MESSAGES, "mine": [TOOL]}]
    assert prompts_of(tmp_path / "b", named, tools_column="mine")[0].text == texts[0]
    assert prompts_of(tmp_path / "b", named)[0].text == "Rain?"
    # Arrow fills each mapping with the keys of all others.
    bare = {"type": "function", "function": {"name": "fog"}}
    pq.write_table(pa.Table.from_pylist([{"messages": MESSAGES, "tools": [OTHER, bare]}]), tmp_path / "rows.parquet")
    [prompt] = prompts_of(tmp_path / "c", [], path=str(tmp_path / "rows.parquet"))
    options = {"chat_template": PRINTS_TOOLS, "tokenize": False}
    assert prompt.text == TOKENIZER.apply_chat_template(MESSAGES, tools=[OTHER, bare], **options)


@pytest.mark.parametrize("tools", ["rain", '{"a": 1}', ["rain"], {"name": "rain"}, 7, [None]])
def test_other_values_are_no_tools(tools: Any, tmp_path: pathlib.Path) -> None:
    [prompt] = prompts_of(tmp_path, [{"messages": MESSAGES, "tools": tools}])
    assert prompt.error is not None and prompt.error.error_type == "invalid_tools"


def test_tools_that_the_template_would_ignore_are_an_error(tmp_path: pathlib.Path) -> None:
    rows = [{"messages": MESSAGES, "tools": tools} for tools in ([TOOL], [])]
    without = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ignored, none = prompts_of(tmp_path, rows, chat_template=without)
    assert ignored.error is not None and "has no variable `tools`" in ignored.error.error_message
    assert none.text == "Rain?"


def test_a_job_keeps_its_tools_when_it_is_resumed(tmp_path: pathlib.Path) -> None:
    rows = [{"id": i, "messages": MESSAGES, "tools": [TOOL]} for i in range(3)]
    input = {"messages_column": "messages", "chat_template": PRINTS_TOOLS}
    spec = spec_over(tmp_path, rows, input=input, output={"include_prompt": True, "keep_columns": []})
    jobs.finish(spec)
    assert jobs.rows_of(tmp_path / "out")[0]["prompt"].startswith("TOOLS=")
    with (tmp_path / "input.jsonl").open("a") as file:
        file.write(json.dumps({"id": 3, "messages": MESSAGES, "tools": [OTHER]}) + "\n")
    jobs.finish(spec, "--extend")
    assert [row["prompt"].startswith("TOOLS=") for row in jobs.rows_of(tmp_path / "out")] == [True] * 4


@pytest.mark.parametrize(
    ("columns", "input", "named"),
    [
        (["messages", "functions", "images"], {"messages_column": "messages"}, "functions, images"),
        (["messages", "system", "temperature"], {"messages_column": "messages"}, "system, temperature"),
        (["prompt", "chosen", "rejected"], {}, "chosen, rejected"),
        (["instruction", "input", "output"], {"prompt_column": "instruction"}, "input"),
        (["instruction", "input"], {"prompt_template": "{{ instruction }} {{ input }}"}, None),
        (["prompt", "tools"], {}, "tools"),
        (["prompt", "input", "output", "system"], {}, None),
    ],
)
def test_known_columns_that_the_job_leaves_out_are_named(
    columns: list[str], input: dict[str, Any], named: str | None, tmp_path: pathlib.Path
) -> None:
    values = {"messages": MESSAGES}
    spec = spec_over(tmp_path, [{name: values.get(name, "x") for name in columns}], input={"id_column": None, **input})
    job = open_job(read_spec(spec), tmp_path / "cache")
    lines = list(column_warnings(job.task, job.source))
    job.source.close()
    assert [line.split(", which")[0] for line in lines] == (
        [] if named is None else [f"warning: the input has {named}"]
    )


UNSTORABLE = {
    "interval": (pa.month_day_nano_interval(), "which Parquet cannot hold"),
    "run ends": (pa.run_end_encoded(pa.int32(), pa.string()), "which Parquet cannot hold"),
    "sparse union": (pa.sparse_union([pa.field("a", pa.int32())]), "which Parquet cannot hold"),
    "dense union": (pa.dense_union([pa.field("a", pa.int32())]), "which Parquet cannot hold"),
    "no fields": (pa.struct([]), "which Parquet cannot hold"),
    "no fields, deep": (pa.list_(pa.struct([("a", pa.struct([]))])), "which Parquet cannot hold"),
    "negative scale": (pa.decimal128(5, -2), "which Parquet cannot hold"),
    "negative scale, deep": (pa.list_(pa.decimal256(5, -2)), "which Parquet cannot hold"),
    "no bytes": (pa.binary(0), "which Parquet cannot hold"),
    "uuid": (pa.uuid(), "extension type arrow.uuid, which the output would lose; write it as fixed_size_binary"),
    "json": (pa.json_(), "extension type arrow.json"),
    "tensor": (pa.fixed_shape_tensor(pa.int32(), [2]), "extension type arrow.fixed_shape_tensor"),
    "uuid, deep": (pa.struct([("a", pa.uuid())]), "extension type arrow.uuid"),
}


@pytest.mark.parametrize("place", ["input.id_column", "output.keep_columns"])
@pytest.mark.parametrize(("type", "message"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_columns_that_the_output_cannot_hold_are_refused_first(
    type: pa.DataType, message: str, place: str, tmp_path: pathlib.Path
) -> None:
    table = pa.table({"prompt": ["Say 1."], "x": pa.nulls(1, type)})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    own = {"input": {"id_column": "x"}} if place == "input.id_column" else {"output": {"keep_columns": ["x"]}}
    given = {"input": {"id_column": None}, "output": {"keep_columns": []}, **own}
    given["input"]["path"] = str(tmp_path / "rows.arrow")
    spec = jobs.spec_of(tmp_path, **given)
    with pytest.raises(SpecError, match=re.escape(message)) as refused:
        open_job(read_spec(spec), tmp_path / "cache")
    assert f"{place}: the column 'x' has the" in str(refused.value)
    given = {"input": {"id_column": None, "path": str(tmp_path / "rows.arrow")}, "output": {"keep_columns": []}}
    open_job(read_spec(jobs.spec_of(tmp_path, **given)), tmp_path / "cache").source.close()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["Text"], "got Text beside the output's column text, which SQL takes for the same name; give it another one, "
         "as in {Text: input_Text}"),
        ({"other": "ROW_INDEX"}, "got ROW_INDEX beside the output's column row_index, which SQL takes for the same "
         "name; give it another one, as in {other: input_ROW_INDEX}"),
        (["ID"], "got ID beside the output's column id"),
        (["other", "Other"], "got other beside the output's column Other"),
    ],
)  # fmt: skip
def test_names_that_differ_by_case_only_are_refused_for_new_jobs(
    keep: Any, message: str, tmp_path: pathlib.Path
) -> None:
    record = {"id": 1, "prompt": "Say 1.", "Text": "a", "ID": 2, "other": "b", "Other": "c"}
    spec = spec_over(tmp_path, [record], output={"keep_columns": keep})
    with pytest.raises(SpecError, match=re.escape(f"output.keep_columns: {message}")):
        open_job(read_spec(spec), tmp_path / "cache")
    renamed = {"Text": "input_Text", "ID": "id_2", "other": "one"}
    open_job(read_spec(spec, {"output.keep_columns": renamed}), tmp_path / "cache").source.close()
