"""Rows with their own sampling and kept columns with other names: what is taken, what is refused, and whole jobs."""

import datetime
import decimal
import json
import pathlib
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.engines import installed
from batchinf.prompts import row_sampling
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.renderer import check_columns
from batchinf.prompts.row_sampling import RowSampling, check_sampling_columns
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.source.types import JSON_MARK
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec
from batchinf.spec.reference import field_docs, json_schema
from batchinf.spec.sampling import MAPPINGS, PER_ROW_FIELDS, SamplingSpec
from batchinf.tasks.base import seed_of
from batchinf.tasks.generate.task import Generate

STOP = "must be a list of texts, or text; leave empty texts out, or give null for the job's own"
WHOLE = "must be a whole number, at least 1 and at most 2147483647"


def sampling(**fields: Any) -> SamplingSpec:
    return SamplingSpec(**{"temperature": 1.0, "max_tokens": 9, **fields})


def make_spec(**fields: Any) -> JobSpec:
    return JobSpec(model="m", input={"path": "in"}, output={"path": "out"}, sampling=sampling(**fields))


# -- values of a row -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 5, 5), ("max_tokens", 64.0, 64), ("max_tokens", decimal.Decimal("7"), 7),
        ("temperature", 0, 0), ("temperature", 0.5, 0.5), ("temperature", decimal.Decimal("0.25"), 0.25),
        ("top_p", 1, 1), ("top_k", 3.0, 3), ("min_p", 0.1, 0.1), ("seed", -5, -5), ("min_tokens", 9, 9),
        ("presence_penalty", -2, -2), ("frequency_penalty", 2.0, 2), ("repetition_penalty", 1.5, 1.5),
        ("stop", "x", ("x",)), ("stop", ["x", "y"], ("x", "y")), ("stop", [], ()), ("stop_token_ids", [1, 2], (1, 2)),
        ("logit_bias", {"5": 1, "6": None}, {5: 1.0}), ("logit_bias", '{"5": -2.5}', {5: -2.5}), ("logit_bias", {}, {}),
        ("logit_bias", [("5", 1.0), ("7", 2)], {5: 1.0, 7: 2.0}), ("allowed_token_ids", [5], (5,)),
        ("bad_words", "x", ("x",)), ("bad_words", ["x", " y"], ("x", " y")), ("thinking_token_budget", 3.0, 3),
        ("thinking_token_budget", -1, -1), ("repetition_detection", '{"max_pattern_size": 0}', {}),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 2, "min_pattern_size": None},
         {"max_pattern_size": 3, "min_pattern_size": 0, "min_count": 2}),
    ],
)  # fmt: skip
def test_a_row_s_value_takes_the_place_of_the_job_s(field: str, value: Any, expected: Any) -> None:
    rows = RowSampling(sampling(**{field: {"column": "own"}}))
    assert rows.columns == ("own",)
    found = rows.of({"own": value, "other": 1})
    assert isinstance(found, SamplingSpec)
    assert getattr(found, field) == expected
    assert type(getattr(found, field)) is type(getattr(SamplingSpec(**{field: expected}), field))
    own = {field, "columns", *([] if field == "max_tokens" else ["max_tokens"])}
    assert found.model_dump(exclude=own) == sampling().model_dump(exclude=own)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, f"sampling.max_tokens (column 'own'): got 0; {WHOLE}"),
        ("max_tokens", "64", f"sampling.max_tokens (column 'own'): got '64'; {WHOLE}"),
        ("max_tokens", True, f"sampling.max_tokens (column 'own'): got True; {WHOLE}"),
        ("max_tokens", 6.5, f"sampling.max_tokens (column 'own'): got 6.5; {WHOLE}"),
        ("max_tokens", float("nan"), f"sampling.max_tokens (column 'own'): got nan; {WHOLE}"),
        ("max_tokens", 1, "sampling.min_tokens: got 2 with max_tokens 1; must not be above it"),
        ("min_tokens", 10, "sampling.min_tokens (column 'own'): got 10 with max_tokens 9; must not be above it"),
        ("min_p", 2, "sampling.min_p (column 'own'): got 2; must be a number, at least 0 and at most 1"),
        ("temperature", 0, "sampling.n: got 3 with temperature 0; greedy samples are all equal: set n to 1, or a "
         "temperature above 0"),
        ("stop", [1], "sampling.stop (column 'own'): got [1]; must be a list of texts, or text"),
        ("stop", "", f"sampling.stop (column 'own'): got ''; {STOP}"),
        ("stop", [""], f"sampling.stop (column 'own'): got ['']; {STOP}"),
        ("stop", ["a", ""], f"sampling.stop (column 'own'): got ['a', '']; {STOP}"),
        ("stop", {"column": 1}, "sampling.stop (column 'own'): got {'column': 1}; must be a list of texts, or text"),
        ("logit_bias", {"a": 1}, "sampling.logit_bias (column 'own'): got 'a' as a key; must be token ids, each of "
         "them once; the model's tokenizer gives those of a word"),
        ("logit_bias", {"5": 101}, "sampling.logit_bias (column 'own'): got 101 for token 5; must be a number, at "
         "least -100 and at most 100"),
        ("logit_bias", {"5": float("nan")}, "sampling.logit_bias (column 'own'): got nan for token 5; must be a "
         "number, at least -100 and at most 100"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "sampling.logit_bias (column 'own'): got 1,025 tokens; must be "
         "at most 1,024, as vLLM's runner takes no more"),
        ("logit_bias", "[]", "sampling.logit_bias (column 'own'): got '[]'; must be a mapping"),
        ("logit_bias", {"column": 1}, "sampling.logit_bias (column 'own'): got {'column': 1}; must be a mapping"),
        ("allowed_token_ids", [], "sampling.allowed_token_ids (column 'own'): got no token; must be at least one, and "
         "without the field all are allowed"),
        ("repetition_detection", {"min_count": 2}, "sampling.repetition_detection.max_pattern_size (column 'own'): "
         "missing; must be the longest pattern that is looked for, in tokens"),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 1}, "sampling.repetition_detection.min_count "
         "(column 'own'): got 1; must be at least 2"),
        ("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3}, "sampling.repetition_detection."
         "min_pattern_size (column 'own'): got 3 with max_pattern_size 2; must not be above it"),
        ("repetition_detection", {"x": 1}, "sampling.repetition_detection.x (column 'own'): unknown field; it has "
         "max_pattern_size, min_pattern_size, min_count"),
        ("stop", {"a": 1}, "sampling.stop (column 'own'): got {'a': 1}; must be a list of texts, or text"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_an_error_of_its_row(field: str, value: Any, message: str) -> None:
    job = {"n": 3, "min_tokens": 2} if field != "min_tokens" else {}
    found = RowSampling(sampling(**{**job, field: {"column": "own"}})).of({"own": value})
    assert found == RowError("invalid_sampling", message)


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"1536": 1}), ("allowed_token_ids", [5, 1536])])
def test_a_token_outside_the_vocabulary_is_an_error_of_its_row(field: str, value: Any) -> None:
    rows = RowSampling(sampling(**{field: {"column": "own"}}), 1536)
    message = f"sampling.{field} (column 'own'): got token 1536; the model's vocabulary ends at 1535"
    assert rows.of({"own": value}) == RowError("invalid_sampling", message)
    message = f"sampling.{field}: got token 1536; the model's vocabulary ends at 1535"  # of a line of a batch file
    assert RowSampling(sampling(), 1536).with_values({field: value}) == RowError("invalid_sampling", message)
    assert isinstance(RowSampling(sampling(), 1537).with_values({field: value}), SamplingSpec)


def test_what_utf_8_cannot_hold_is_shown_escaped() -> None:
    found = RowSampling(sampling(max_tokens={"column": "own"})).of({"own": "\ud800" * 99})
    assert isinstance(found, RowError)
    assert found.error_message.startswith("sampling.max_tokens (column 'own'): got '\\ud800\\ud800")
    found.error_message.encode()


def test_a_missing_value_is_the_job_s_and_kinds_are_told_apart() -> None:
    rows = RowSampling(sampling(max_tokens={"column": "own"}))
    assert rows.of({}) == rows.of({"own": None})
    assert isinstance(rows.of({"own": 1}), SamplingSpec)
    assert isinstance(rows.of({"own": True}), RowError)  # equal to 1, and hashes alike
    assert isinstance(rows.of({"own": 1.0}), SamplingSpec)
    ids = RowSampling(sampling(stop_token_ids={"column": "own"}))
    assert isinstance(ids.of({"own": [1]}), SamplingSpec)
    assert isinstance(ids.of({"own": [True]}), RowError)
    assert RowSampling(sampling()).of({"own": 1}) is None


def test_few_distinct_settings_are_made_once_and_many_do_not_pile_up() -> None:
    rows = RowSampling(sampling(seed={"column": "own"}, max_tokens={"column": "budget"}))
    assert rows.of({"own": 1, "budget": 2}) is rows.of({"own": 1, "budget": 2})
    for seed in range(2 * row_sampling._MOST_KNOWN):
        found = rows.of({"own": seed})
        assert isinstance(found, SamplingSpec)
        assert (found.seed, found.max_tokens) == (seed, None)
    assert len(rows._known) <= row_sampling._MOST_KNOWN


TAG = {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("json", {"type": "object", "title": None}, '{"type": "object"}'),
        ("json", '{"const": null}', '{"const": null}'),
        ("json", {"anyOf": [{"type": "null", "x": None}]}, '{"anyOf": [{"type": "null"}]}'),
        ("choice", ["a", "b"], ["a", "b"]), ("choice", '["a"]', ["a"]), ("regex", '["a"]', '["a"]'),
        ("grammar", "root ::= x", "root ::= x"),
        ("structural_tag", TAG, json.dumps({"type": "structural_tag", **TAG})),
        ("structural_tag", '{"format": {}}', '{"type": "structural_tag", "format": {}}'),
    ],
)  # fmt: skip
def test_a_row_s_structure_takes_the_place_of_the_job_s(kind: str, value: Any, expected: Any) -> None:
    rows = RowSampling(sampling(structured_outputs={kind: {"column": "own"}}))
    assert rows.columns == ("own",)
    own, job = rows.of({"own": value}), rows.of({"own": None})
    assert isinstance(own, SamplingSpec)
    assert isinstance(job, SamplingSpec)
    assert (own.structured_outputs, job.structured_outputs) == ({kind: expected}, None)
    both = RowSampling(sampling(columns={f"structured_outputs.{kind}": "own"}, structured_outputs={"regex": "x"}))
    fallback = both.of({})
    assert isinstance(fallback, SamplingSpec)
    assert fallback.structured_outputs == {"regex": "x"}
    assert both.of({"own": value}) == own.model_copy(update={"columns": both.of({}).columns})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", "{", 'got text that is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 '
         "(char 1); must be a JSON schema, as a mapping, as text or as {file: path}"),
        ("json", {"type": "objet"}, "not a JSON schema that texts can be checked against: at $.type: 'objet' is not "
         "valid under any of the given schemas"),
        ("choice", [], "got []; must be a list of texts"), ("choice", "a", 'got "a"; must be a list of texts'),
        ("regex", 5, "got 5; must be text"),
    ],
)  # fmt: skip
def test_a_structure_that_cannot_be_is_an_error_of_its_row(kind: str, value: Any, message: str) -> None:
    found = RowSampling(sampling(structured_outputs={kind: {"column": "own"}})).of({"own": value})
    assert found == RowError("invalid_sampling", f"sampling.structured_outputs.{kind} (column 'own'): {message}")


def test_columns_of_structures_are_checked_and_only_one_is_allowed() -> None:
    schema = pa.schema([("s", pa.struct([("type", pa.string())])), ("t", pa.string()), ("l", pa.list_(pa.string()))])
    fits = {"json": "st", "structural_tag": "st", "choice": "tl", "regex": "t", "grammar": "t"}
    for kind, columns in fits.items():
        for column in schema.names:
            job = sampling(structured_outputs={kind: {"column": column}})
            if column in columns:
                check_sampling_columns(job, schema)
            else:
                with pytest.raises(SpecError, match=f"sampling.structured_outputs.{kind}: the column '{column}' holds"):
                    check_sampling_columns(job, schema)
    with pytest.raises(ValueError, match="got columns of json and choice"):
        sampling(columns={"structured_outputs.json": "a", "structured_outputs.choice": "b"})


def test_a_structure_is_the_job_s_for_every_row() -> None:
    job = sampling(seed={"column": "own"}, structured_outputs={"json": {"type": "object"}})
    found = RowSampling(job).of({"own": 1})
    assert isinstance(found, SamplingSpec)
    assert found.structured_outputs == job.structured_outputs == {"json": '{"type": "object"}'}


# -- prompts and requests --------------------------------------------------------------------------------------------


def test_prompts_carry_their_rows_sampling() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(jobs.MODEL)
    builder = PromptBuilder(make_spec(max_tokens={"column": "budget"}), tokenizer, None)
    assert builder.columns == ("prompt", "budget")
    values = [{"prompt": "Once", "budget": 3}, {"prompt": "Once"}, {"prompt": "Once", "budget": -1}, {"budget": -1}]
    own, job, refused, broken = builder.build([Row(index, each) for index, each in enumerate(values)], None)
    assert own.sampling is not None
    assert job.sampling is not None
    assert (own.sampling.max_tokens, job.sampling.max_tokens) == (3, None)
    assert own.token_ids == refused.token_ids  # what was produced stays beside the error
    assert refused.error is not None
    assert refused.error.error_type == "invalid_sampling"
    assert broken.error is not None
    assert broken.error.error_type == "missing_column"


def test_requests_are_as_the_row_says() -> None:
    task = Generate(make_spec(n=2, seed=5))
    plain = task.expand(Prompt(7, [1, 2], None, None), 64)
    own = task.expand(Prompt(7, [1, 2], None, None, sampling(n=2, max_tokens=3, seed=6)), 64)
    open_ended = task.expand(Prompt(7, [1, 2], None, None, sampling(n=2, max_tokens=None)), 64)
    greedy = task.expand(Prompt(7, [1, 2], None, None, sampling(temperature=0)), 64)
    assert [request.seed for request in plain] == [seed_of(5, 7, 0), seed_of(5, 7, 1)]
    assert [request.seed for request in own] == [seed_of(6, 7, 0), seed_of(6, 7, 1)]
    assert [request.max_tokens for request in (*plain, *own, *open_ended)] == [9, 9, 3, 3, 62, 62]
    assert [request.seed for request in greedy] == [None]


# -- what a spec may say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (make_spec(max_tokens={"column": "budgt"}), "sampling.max_tokens: the input has no column 'budgt'; did you "
         "mean 'budget'? it has: prompt, budget, note, tags"),
        (make_spec(max_tokens={"column": "note"}), "sampling.max_tokens: the column 'note' holds text, or nothing at "
         "all; each value must be a whole number, at least 1 and at most 2147483647, or null for the job's own"),
        (make_spec(temperature={"column": "tags"}), "sampling.temperature: the column 'tags' holds list<item: string>; "
         "each value must be a number, at least 0 and at most 2, or null for the job's own"),
        (make_spec(stop={"column": "budget"}), "sampling.stop: the column 'budget' holds int64; each value must be a "
         "list of texts, or text, or null for the job's own"),
        (make_spec(stop_token_ids={"column": "tags"}), "sampling.stop_token_ids: the column 'tags' holds list<item: "
         "string>; each value must be a list of whole numbers, at least 0 and at most 2147483647, or null for the "
         "job's own"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_are_refused(spec: JobSpec, message: str) -> None:
    tags = pa.list_(pa.field("item", pa.string()))
    schema = pa.schema([("prompt", pa.string()), ("budget", pa.int64()), ("note", pa.string()), ("tags", tags)])

    def check() -> None:
        check_columns(spec, schema.names, ())
        check_sampling_columns(spec.sampling, schema)

    with pytest.raises(SpecError) as caught:
        check()
    assert str(caught.value) == message


def test_columns_that_may_fit_are_let_through() -> None:
    mixed = pa.field("mixed", pa.string(), metadata=JSON_MARK)
    schema = pa.schema(
        [mixed, ("n", pa.null()), ("d", pa.decimal128(9, 2)), ("t", pa.list_(pa.string())), ("l", pa.large_string())]
    )
    schema = schema.append(pa.field("s", pa.struct([("5", pa.float64())])))
    schema = schema.append(pa.field("m", pa.map_(pa.string(), pa.float64())))
    fits = [("logit_bias", name) for name in ("s", "m", "l", "mixed")]
    fits += [("max_tokens", "mixed"), ("stop", "mixed"), ("seed", "n"), ("top_p", "d"), ("stop", "t"), ("stop", "l")]
    for field, column in fits:
        check_sampling_columns(sampling(**{field: {"column": column}}), schema)


def test_set_wins_over_a_column_however_it_was_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job.yaml"
    for written in (
        "{max_tokens: {column: b}, top_p: {column: p}}",
        "{columns: {max_tokens: b, top_p: p}, max_tokens: 5}",
    ):
        path.write_text(f"model: a/b\ninput: {{path: x}}\noutput: {{path: out}}\nsampling: {written}\n")
        assert read_spec(path).spec.sampling.columns == {"max_tokens": "b", "top_p": "p"}
        found = read_spec(path, ["sampling.max_tokens=5"]).spec.sampling
        assert (found.max_tokens, found.columns) == (5, {"top_p": "p"})


@pytest.mark.parametrize("override", ["sampling.structured_outputs={regex: x}", "sampling.structured_outputs.regex=x"])
def test_set_wins_over_a_column_of_structures(override: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job.yaml"
    for written in ("{structured_outputs: {regex: {column: r}}}", "{columns: {structured_outputs.regex: r}}"):
        path.write_text(f"model: a/b\ninput: {{path: x}}\noutput: {{path: out}}\nsampling: {written}\n")
        assert read_spec(path).spec.sampling.columns == {"structured_outputs.regex": "r"}
        found = read_spec(path, [override]).spec.sampling
        assert (found.structured_outputs, found.columns) == ({"regex": "x"}, {})


def test_editors_allow_a_column_for_these_fields_alone() -> None:
    schema = jsonschema.Draft202012Validator(json_schema())

    def allows(**sampling: Any) -> bool:
        return schema.is_valid({"model": "m", "input": {"path": "i"}, "output": {"path": "o"}, "sampling": sampling})

    for field in SamplingSpec.model_fields:
        assert allows(**{field: {"column": "c"}}) == (
            field in PER_ROW_FIELDS or field in ("columns", "structured_outputs")
        )
        assert not allows(**{field: {"colum": 1}}) or field in ("structured_outputs", *MAPPINGS)
    assert allows(max_tokens=5, stop=["a"], temperature=0.5)
    assert not allows(max_tokens=0)


def test_the_order_of_kept_columns_and_of_a_schema_s_properties_is_identity() -> None:
    from batchinf.spec.job import fields, fingerprint

    def known_by(**sections: Any) -> str:
        spec = JobSpec.model_validate({"model": "m", "input": {"path": "i"}, "output": {"path": "o"}, **sections})
        return fingerprint(fields(spec, "identity"))

    one, other = ({"output": {"path": "o", "keep_columns": list(names)}} for names in ("ab", "ba"))
    assert known_by(**one) != known_by(**other)
    assert known_by(**one) == known_by(output={"path": "o", "keep_columns": {"a": "a", "b": "b"}})
    one, other = (
        {"sampling": {"structured_outputs": {"json": {"properties": {name: {} for name in names}}}}}
        for names in ("ab", "ba")
    )
    assert known_by(**one) != known_by(**other)


# -- whole jobs ------------------------------------------------------------------------------------------------------

WHEN = datetime.datetime(2024, 2, 29, 12, 30, 0, 123456)
KEPT = {"prompt": "text_in", "price": "price", "when": "seen_at", "tags": "tags", "about": "text_about"}


def inputs() -> dict[str, Any]:
    """Columns of 40 rows; every fifth has a budget of 0, which cannot be."""
    count = range(40)
    return {
        "key": [index * 2**40 for index in count],
        "prompt": [f"Row {index} begins" for index in count],
        "budget": [None if index % 7 == 3 else 0 if index % 5 == 4 else 1 + index % 6 for index in count],
        "price": [decimal.Decimal(index) / 100 for index in count],
        "when": [WHEN + datetime.timedelta(seconds=index) for index in count],
        "tags": [[f"t{index}", None][: index % 3] for index in count],
        "about": [None if index % 4 == 3 else {"a": index, "b": str(index)} for index in count],
    }


def test_a_job_with_budgets_and_renamed_columns_from_parquet_and_its_retry(tmp_path: pathlib.Path) -> None:
    source = pa.table(inputs()).cast(
        pa.schema(
            [("key", pa.int64()), ("prompt", pa.large_string()), ("budget", pa.int16()), ("price", pa.decimal128(9, 2)),
             ("when", pa.timestamp("us")), ("tags", pa.list_(pa.string())),
             ("about", pa.struct([("a", pa.int32()), ("b", pa.string())]))]
        )
    )  # fmt: skip
    pq.write_table(source, tmp_path / "in.parquet")
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(tmp_path / "in.parquet"), "id_column": "key"},
        sampling={"max_tokens": {"column": "budget"}, "columns": {"max_tokens": "budget"}, "logprobs": None},
        output={"path": str(tmp_path / "out"), "keep_columns": KEPT, "rows_per_shard": 16},
        parallel={"data_parallel_size": 1},
        scripted={"max_model_len": 24, "vary_lengths": False, "step_s": 0},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    table = jobs.table_of(tmp_path / "out")
    assert table.column_names[:4] == ["id", "row_index", "prompt_hash", "sample_index"]
    assert table.column_names[4:10] == [*KEPT.values(), "text"]
    assert table.schema.field("id").type == pa.int64()
    for name, new in KEPT.items():
        assert table.column(new).to_pylist() == source.column(name).to_pylist()
        assert table.schema.field(new).type in (source.schema.field(name).type, pa.string())
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == source.column("key").to_pylist()
    for row, budget in zip(rows, source.column("budget").to_pylist(), strict=True):
        if budget == 0:
            assert (row["error_type"], row["num_output_tokens"]) == ("invalid_sampling", None)
            assert row["error_message"] == f"sampling.max_tokens (column 'budget'): got 0; {WHOLE}"
            assert row["num_prompt_tokens"] > 0
        else:
            # The script ends all at their limit; without one they end where the model's length does.
            fits = 24 - row["num_prompt_tokens"]
            assert row["num_output_tokens"] == (fits if budget is None else budget)
    jobs.finish(spec, "--retry", "error_type = 'invalid_sampling'", "--set", "sampling.max_tokens=2")
    again = jobs.table_of(tmp_path / "out").to_pylist()
    for old, new, budget in zip(rows, again, source.column("budget").to_pylist(), strict=True):
        assert new["num_output_tokens"] == (2 if budget == 0 else old["num_output_tokens"])
        assert new["error_type"] is None
        assert {name: old[name] for name in KEPT.values()} == {name: new[name] for name in KEPT.values()}


def test_renamed_columns_and_what_a_structure_misses_from_json_lines(tmp_path: pathlib.Path) -> None:
    rows = [{"key": f"k{index}", "prompt": f"Row {index}", "text": {"a": [index]}, "odd": index if index % 2 else "x",
             "stop": ["zz"] if index % 2 else "zz"} for index in range(12)]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(tmp_path / "in.jsonl"), "id_column": "key"},
        sampling={"stop": {"column": "stop"}, "structured_outputs": {"json": {"type": "object"}}, "logprobs": None},
        output={"path": str(tmp_path / "out"), "keep_columns": {"text": "input_text", "odd": "odd"}},
        parallel={"data_parallel_size": 1},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    found = jobs.table_of(tmp_path / "out").to_pylist()
    assert [row["id"] for row in found] == [row["key"] for row in rows]
    assert [row["input_text"] for row in found] == [row["text"] for row in rows]
    assert [row["odd"] for row in found] == [str(row["odd"]) for row in rows]
    for row in found:  # the script writes no JSON: what it wrote stays beside the error, and counts
        assert row["error_type"] == "invalid_json"
        assert row["error_message"].startswith("the text does not parse as JSON (finish_reason ")
        assert row["text"] is not None
        assert len(row["token_ids"]) == row["num_output_tokens"] > 0
    assert jobs.state_of(tmp_path / "out").counts.num_errors == 12


def test_rows_choose_among_their_own_texts_and_a_killed_job_goes_on(tmp_path: pathlib.Path) -> None:
    rows = [{"id": index, "prompt": f"Row {index}", "labels": [f"a{index}", f"b{index}"] if index % 3 else None}
            for index in range(60)]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = []
    for name, faults in (("whole", ""), ("killed", "coordinator.after_publish:2=kill")):
        folder = tmp_path / name
        folder.mkdir()
        spec = jobs.spec_of(
            folder,
            input={"path": str(tmp_path / "in.jsonl")},
            sampling={"structured_outputs": {"choice": {"column": "labels"}}, "logprobs": None, "max_tokens": 40},
            output={"keep_columns": []},
            parallel={"data_parallel_size": 1},
        )
        if faults:
            assert jobs.run("run", spec, faults=faults).returncode != 0
        jobs.finish(spec)
        found.append(jobs.rows_of(folder / "out"))
    assert found[0] == found[1]
    for row, given in zip(found[0], rows, strict=True):
        assert row["error_type"] is None
        assert given["labels"] is None or row["text"] in given["labels"]
    assert {row["text"][0] for row in found[0] if rows[row["id"]]["labels"]} == {"a", "b"}


def test_a_field_that_the_installed_vllm_lacks_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sampling_params.py").write_text("class SamplingParams:\n    top_p: float = 1.0\n    stop: str = ''\n")
    (tmp_path / "job.yaml").write_text("model: a/b\ninput: {path: x}\noutput: {path: out}\nsampling: {top_p: 0.5}\n")
    with monkeypatch.context() as patch:
        patch.setattr(installed, "_folder_of", lambda package: tmp_path)
        installed._fields_of.cache_clear()
        installed.check_sampling_fields(read_spec(tmp_path / "job.yaml"))
        for override in ("sampling.bad_words=[x]", "sampling.bad_words={column: c}"):
            with pytest.raises(
                SpecError, match=r"sampling\.bad_words: no sampling parameter of the installed vLLM; leave"
            ):
                installed.check_sampling_fields(read_spec(tmp_path / "job.yaml", [override]))
    installed._fields_of.cache_clear()


def test_the_whole_numbers_are_those_of_the_spec() -> None:
    docs = field_docs()
    whole = {name for name in PER_ROW_FIELDS if docs[f"sampling.{name}"].allowed.startswith("a whole number")}
    assert whole == row_sampling.WHOLE_FIELDS
