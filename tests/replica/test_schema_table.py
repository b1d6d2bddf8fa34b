"""The table of JSON schemas: each keyword, in two dialects, at the root and within, against the check and backends.

A finished text keeps its schema or is an error row, whatever the backend enforces. A row of the table is a schema,
texts that keep it and texts that break it. `schemas/cases.jsonl` has more from a public suite.
"""

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

import jobs
from batchinf.records import Completion, Request
from batchinf.replica.answers import StructureChecks
from batchinf.spec.answer_schemas import objection
from batchinf.spec.sampling import SamplingSpec

CASES = pathlib.Path(__file__).parent / "schemas" / "cases.jsonl"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
LATEST = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class Case:
    """name: the keyword, or the words of the suite."""

    name: str
    schema: dict[str, Any]
    good: list[Any]
    bad: list[Any]


# Schemas of both dialects: (keyword, schema, values that keep it, values that break it).
BOTH: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("type", {"type": "string"}, ["a", ""], [1, None, []]),
    ("type", {"type": "integer"}, [1, -5], [1.5, "1"]),
    ("type", {"type": "number"}, [1, 1.5], ["1", True]),
    ("type", {"type": "boolean"}, [True], [0, "true"]),
    ("type", {"type": "null"}, [None], [0]),
    ("type", {"type": ["string", "null"]}, ["a", None], [1]),
    ("enum", {"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    ("const", {"const": {"a": 1}}, [{"a": 1}], [{"a": 2}, {}]),
    ("minimum", {"type": "integer", "minimum": 5}, [5, 17], [4, -1]),
    ("minimum", {"minimum": 5}, [5, "a"], [4, 4.9]),
    ("maximum", {"type": "integer", "maximum": 5}, [5, -7], [6, 50]),
    ("maximum", {"type": "number", "maximum": 0.5}, [0.5, -7], [0.51, 50]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 5}, [6], [5]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 5}, [4.5], [5, 6]),
    ("multipleOf", {"type": "integer", "multipleOf": 5}, [0, 15], [7, 12]),
    ("multipleOf", {"type": "number", "multipleOf": 0.01}, [0.07, 1.1], [0.075]),
    ("multipleOf", {"multipleOf": 3}, [9, "a"], [10]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "日本"], ["a", ""]),
    ("minLength", {"minLength": 2}, ["ab", 1], ["a"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["ab", "😀😀"], ["abc"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{3}$"}, ["ABC"], ["AB", "abc"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{3}$", "maxLength": 3}, ["ABC"], ["ABCD", "ab"]),
    ("pattern", {"type": "string", "pattern": r"^\d+$"}, ["12"], ["٣", "a"]),
    ("pattern", {"type": "string", "pattern": "^(?!no)[a-z]+$"}, ["yes"], ["nope"]),
    ("pattern", {"type": "string", "pattern": r"^[\w-]+\.$"}, ["a-b."], ["é."]),
    ("format", {"type": "string", "format": "made-up"}, ["anything"], [1]),
    ("items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, "a"]]),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2]], [[1], []]),
    ("maxItems", {"type": "array", "maxItems": 1}, [[], [1]], [[1, 2]]),
    ("uniqueItems", {"type": "array", "items": {"enum": ["p", "q"]}, "uniqueItems": True}, [["p", "q"]], [["p", "p"]]),
    ("uniqueItems", {"uniqueItems": True}, [[1, 2], "a"], [[1, 1], [1, 1.0]]),
    ("contains", {"type": "array", "contains": {"const": 1}}, [[2, 1]], [[2], []]),
    ("properties", {"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}, {"b": "x"}], [{"a": "x"}]),
    ("required", {"type": "object", "properties": {"a": {}}, "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    ("required", {"type": "object", "properties": {"a": {}}, "required": ["b"]}, [{"b": 1}], [{}, {"a": 1}]),
    ("additionalProperties", {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
     [{"a": 1}, {}], [{"b": 1}, {"a": 1, "b": 1}]),
    ("additionalProperties", {"type": "object", "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^n": {"type": "integer"}}},
     [{"n1": 1}, {"a": "x"}], [{"n1": "x"}]),
    ("patternProperties", {"type": "object", "patternProperties": {r"^\d$": {}}, "additionalProperties": False},
     [{"1": 1}], [{"٣": 1}, {"a": 1}]),
    ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ("propertyNames", {"type": "object", "properties": {"ab": {}}, "propertyNames": {"pattern": "^a"}},
     [{"ab": 1}], [{"b": 1}]),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "a"]),
    ("allOf", {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]}, ["yes"], ["maybe", 42]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [3, "a"], ["ab", None]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5], [3, 1.5]),
    ("not", {"type": "string", "not": {"const": "a"}}, ["b"], ["a", 1]),
    ("not", {"not": {"type": "string"}}, [1, None], ["a"]),
    ("if", {"properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"],
            "if": {"properties": {"mood": {"const": "bad"}}}, "then": {"required": ["why"]}},
     [{"mood": "good"}, {"mood": "bad", "why": 1}], [{"mood": "bad"}]),
    ("if", {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}, [3, "a"], [2, None]),
    ("$ref", {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}}, ["x"], [1]),
    ("default", {"type": "integer", "default": "x", "title": "T", "description": "D", "examples": [1]}, [1], ["x"]),
]  # fmt: skip
ONLY_7: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 2}, {"b": 1}], [{"a": 1}]),
    ("dependencies", {"type": "object", "dependencies": {"a": {"required": ["b"]}}}, [{"b": 1}], [{"a": 1}]),
    ("items", {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"]], [["a", 1]]),
    ("additionalItems", {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[1]], [[1, 2]]),
]
ONLY_LATEST: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}], [{"a": 1}]),
    ("prefixItems", {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
     [[1], []], [["a"], [1, 2]]),
    ("minContains", {"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1, 1]], [[1]]),
    ("maxContains", {"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1, 2]], [[1, 1]]),
    ("unevaluatedProperties", {"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
     [{"a": 1}], [{"b": 1}]),
    ("unevaluatedProperties", {"type": "object", "$ref": "#/$defs/a", "unevaluatedProperties": False,
                               "$defs": {"a": {"patternProperties": {r"^\d$": {}}}}}, [{"1": 1}], [{"٣": 1}]),
    ("unevaluatedProperties", {"type": "object", "if": {"patternProperties": {r"^\p{L}$": {"type": "integer"}}},
                               "else": {"properties": {"b": {}}}, "unevaluatedProperties": False},
     [{"é": 1}, {"b": "x"}], [{"é": "x"}, {"1": 1}]),
    ("unevaluatedItems", {"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    ("$defs", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "maxLength": 1}, ["x"], [1, "xy"]),
    ("$anchor", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "string"}}}, ["x"], [1]),
    ("$dynamicRef", {"$dynamicRef": "#here", "$defs": {"a": {"$dynamicAnchor": "here", "type": "string"}}}, ["x"], [1]),
    ("$id", {"$id": "https://example.com/a", "$ref": "b", "$defs": {"b": {"$id": "b", "type": "null"}}}, [None], [1]),
]  # fmt: skip


def made() -> Iterator[Case]:
    """Each schema in its dialects, at the root and, if it names no other part of itself, within an object."""
    for dialect, own in ((LATEST, ONLY_LATEST), (DRAFT_7, ONLY_7)):
        for name, schema, good, bad in (*BOTH, *own):
            yield Case(name, {"$schema": dialect, **schema}, good, bad)
            if "#" not in json.dumps(schema) and "$id" not in schema:
                inside = {
                    "type": "object",
                    "properties": {"v": schema},
                    "required": ["v"],
                    "additionalProperties": False,
                }
                wrap = [[{"v": value} for value in values] for values in (good, bad)]
                yield Case(f"{name} within", {"$schema": dialect, **inside}, *wrap)


def taken() -> Iterator[Case]:
    for line in CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        yield Case(case["description"], case["schema"], case["good"], case["bad"])


TABLE = [*made(), *taken()]


def test_the_table_is_large() -> None:
    assert len(TABLE) >= 200
    assert len([*taken()]) >= 40
    assert len({json.dumps(case.schema, sort_keys=True) for case in TABLE}) == len(TABLE)


def error_type(case: Case, value: Any, checks: StructureChecks, reason: str = "stop") -> str | None:
    request = Request(0, 0, [1], SamplingSpec(), max_tokens=9)
    completion = Completion(request, np.zeros(1, np.int32), reason)
    found = checks.error({"json": json.dumps(case.schema)}, json.dumps(value), completion)
    return None if found is None else found.error_type


def test_each_finished_text_keeps_its_schema_or_is_an_error_row() -> None:
    checks = StructureChecks(None)
    for case in TABLE:
        assert objection(json.dumps(case.schema)) is None, case
        for value in case.good:
            assert error_type(case, value, checks) is None, (case, value)
        for value in case.bad:
            assert error_type(case, value, checks) == "structure_violated", (case, value)
            assert error_type(case, value, checks, "length") is None


def guided(schema: str, value: Any) -> bool:
    """Whether guidance lets an engine write this value."""
    import llguidance

    from batchinf.engines.vllm.structured_output.guidance import relaxed

    made = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(
        relaxed(schema)[0]))  # fmt: skip
    token_ids = list(json.dumps(value, ensure_ascii=False).encode())
    return bool(made.try_consume_tokens(token_ids) == len(token_ids) and made.is_accepting())


def test_what_guidance_takes_whole_it_enforces() -> None:
    """A schema of which it says nothing lets no text pass that breaks it. Of others, validate names the keywords."""
    pytest.importorskip("llguidance")
    from batchinf.engines.vllm.structured_output.guidance import relaxed

    let_through, kept_out = [], []
    for case in TABLE:
        schema = json.dumps(case.schema)
        if relaxed(schema)[1]:
            continue
        let_through += [(case.name, value) for value in case.bad if guided(schema, value)]
        kept_out += [(case.name, value) for value in case.good if not guided(schema, value)]
    # U+FEFF is a space for ECMA-262 and none for llguidance: the check finds it.
    assert let_through == [("ECMA 262 \\S matches everything but whitespace", "\ufeff")]
    assert kept_out == [("ECMA 262 \\s matches whitespace", "\ufeff")]


@pytest.mark.parametrize(
    ("schema", "keywords"),
    [
        ({"uniqueItems": True, "not": {}}, {"uniqueItems", "not"}),
        ({"if": {}, "then": {}}, {"if", "then"}),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, {"oneOf"}),
        ({"pattern": "^(?!no)"}, {"pattern"}),
        ({"patternProperties": {"^(?!no)": {}, "^a": {}}, "additionalProperties": False}, {"pattern"}),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, {"dependentRequired"}),
        ({"format": "made-up", "type": "string", "minimum": 3}, set()),
        ({"enum": [{"pattern": "(?!a)", "not": 1}]}, set()),
    ],
)
def test_guidance_names_what_it_leaves_out(schema: dict[str, Any], keywords: set[str]) -> None:
    pytest.importorskip("llguidance")
    from batchinf.engines.vllm.structured_output.guidance import relaxed

    assert set(relaxed(json.dumps(schema))[1]) == keywords


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "at $.type: 'strin' is not valid under any of the given schemas"),
        ({"$ref": "https://example.com/a"}, "$ref: got https://example.com/a, which is not in the schema"),
        ({"items": {"$ref": "#/$defs/a"}}, "$ref: got #/$defs/a, which is not in the schema"),
        ({"properties": {"a": {"pattern": "["}}}, "pattern: got [, which is no regular expression of ECMA-262"),
        ({"patternProperties": {"(": {}}}, "pattern: got (, which is no regular expression of ECMA-262"),
        ({"$schema": "https://example.com/mine"}, "$schema: got https://example.com/mine; must be a dialect of JSON"),
        ({"items": {"$schema": DRAFT_7}}, f"$schema: got {DRAFT_7} inside; must be one dialect for the whole"),
        ({"$ref": "#"}, "it is nested too deeply, or refers to itself without end"),
        ({"minimum": "5"}, "at $.minimum: '5' is not of type 'number'"),
        ([], "got []; must be a mapping"),
    ],
)
def test_a_schema_that_texts_cannot_be_checked_against_is_refused(schema: Any, words: str) -> None:
    found = objection(json.dumps(schema))
    assert found is not None and found.startswith(words)


def run_all(
    tmp_path: pathlib.Path, table: list[Case], config: dict[str, Any] | None
) -> list[tuple[Case, dict[str, Any]]]:
    """Run each schema as the structure of an early and of a late row on real vLLM."""
    cases = [*table, *reversed(table)]
    with (tmp_path / "in.jsonl").open("w", encoding="utf-8") as file:
        for index, case in enumerate(cases):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": case.schema}}
            body = {"model": str(jobs.MODEL), "prompt": "So", "max_tokens": 48, "response_format": form}
            line = {"custom_id": f"{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(f"{json.dumps(line)}\n")
    spec = jobs.spec_of(
        tmp_path,
        input={"path": str(tmp_path / "in.jsonl"), "id_column": "custom_id"},
        sampling={"temperature": 1.0, "logprobs": None},
        engine={"max_model_len": 128, "max_num_seqs": 64, **({"structured_outputs_config": config} if config else {})},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted=None,
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return [(cases[int(row["id"])], row) for row in jobs.rows_of(tmp_path / "out")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "config",
    # lm-format-enforcer asks for a package named vllm, which the build for processors is not.
    [None, {"backend": "guidance", "disable_any_whitespace": True}, {"backend": "xgrammar"}, {"backend": "outlines"}],
    ids=str,
)  # fmt: skip
def test_no_backend_stores_a_text_that_breaks_its_schema(config: dict[str, Any] | None, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("vllm")
    # The check is the same for all backends. outlines compiles many schemas for 5 s and gives them up.
    table = TABLE if config is None else TABLE[:12] if config["backend"] == "outlines" else TABLE[::4]
    found = run_all(tmp_path, table, config)
    assert len(found) == 2 * len(table)
    finished, violated = 0, 0
    for case, row in found:
        violated += row["error_type"] == "structure_violated"
        if row["error_type"] is None and row["finish_reason"] == "stop":
            finished += 1
            # jsonschema itself, which has Python's patterns and inexact numbers
            if not {"pattern", "multipleOf", "patternProperties"} & set(
                json.dumps(case.schema).replace('"', " ").split()
            ):
                plain = validator_for(case.schema, default=Draft202012Validator)(case.schema)
                plain.validate(json.loads(row["text"]))
    print(f"{finished} finished, {violated} violated, of {len(found)}: {config}")
    assert finished > len(found) / 20
    # Which schemas outlines gives up depends on the time that it has, so it may leave no text that breaks its schema.
    assert violated > 0 or config == {"backend": "outlines"}
