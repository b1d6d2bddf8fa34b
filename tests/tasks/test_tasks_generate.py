"""The generate task: requests, encoded results and output rows, held against plain Python."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from batchinf.base.errors import RowError, SpecError
from batchinf.engines.scripted import ScriptedEngine
from batchinf.records import Completion, Prompt, Result, TokenLogprobs
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec, ModelSpec, ScriptedSpec
from batchinf.spec.output import OutputSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import seed_of
from batchinf.tasks.generate.task import Generate
from batchinf.tasks.registry import task_of

MAX_MODEL_LEN = 64


def make_spec(id_column: str | None = None, output: dict[str, Any] | None = None, **sampling: Any) -> JobSpec:
    return JobSpec(
        model="m",
        input=InputSpec(path="in", id_column=id_column),
        sampling=SamplingSpec(**{"temperature": 1.0, "max_tokens": 5, "seed": 7, **sampling}),
        output=OutputSpec(path="out", **(output or {})),
        scripted=ScriptedSpec(max_model_len=MAX_MODEL_LEN),
    )


def test_the_scripted_engine_chooses_of_the_structure() -> None:
    choices = {"a": [5], "b": [6, 7, 8, 9, 10]}
    spec = make_spec(structured_outputs={"choice": [*choices]})
    assert spec.scripted is not None
    engine = ScriptedEngine(spec.scripted, vocab_size=70_000, eos_token_id=2, encode=choices.__getitem__)
    prompts = [Prompt(row, [row, 1], None, None) for row in range(20)]
    requests = [request for prompt in prompts for request in task_of(spec).expand(prompt, MAX_MODEL_LEN)]
    found = {(*done.token_ids.tolist(), done.finish_reason) for done in map(engine.complete, requests)}
    assert found == {(5, 2, "stop"), (6, 7, 8, 9, 10, "length")}  # at most 5 tokens


def make_results(spec: JobSpec, rows: Sequence[int], error_rate: float = 0.2) -> list[Result]:
    """Results of these rows, sorted: completions of the scripted engine, and errors of every kind in between."""
    task = task_of(spec)
    assert spec.scripted is not None
    engine = ScriptedEngine(spec.scripted, vocab_size=70_000, eos_token_id=2)
    results = []
    for row in rows:
        chance = random.Random(row)
        ids = [chance.randrange(70_000) for _ in range(chance.randrange(1, 6))]
        if chance.random() < error_rate:
            error = RowError("no_prompt", f"row {row} \ud800")
            prompt = Prompt(row, [], None, error)
            results += [
                Result(prompt, request.request_index, spec.sampling.n, None, None, error, 1)
                for request in task.expand(prompt, MAX_MODEL_LEN)
            ]
            continue
        prompt = Prompt(row, ids, f"prompt {row} ü", None)
        for request in task.expand(prompt, MAX_MODEL_LEN):
            completion, text, refusal = engine.complete(request), "é" * chance.randrange(4), None
            if chance.random() < error_rate:
                completion, text, refusal = None, chance.choice([None, "half"]), RowError("refused", "no")
            elif chance.random() < 0.3:
                completion = with_stop_reason(completion, chance.choice([17, "END"]))
            results.append(Result(prompt, request.request_index, spec.sampling.n, completion, text, refusal, 2))
    return results


def with_stop_reason(completion: Completion, stop_reason: int | str) -> Completion:
    return Completion(
        completion.request,
        completion.token_ids,
        completion.finish_reason,
        stop_reason,
        None,
        completion.cumulative_logprob,
        completion.logprobs,
        completion.prompt_logprobs,
    )


def expected_row(spec: JobSpec, result: Result) -> dict[str, Any]:
    """What the journal is to hold of a result, in plain Python."""
    prompt, completion, error = result.prompt, result.completion, result.error
    ids = prompt.token_ids
    row: dict[str, Any] = {
        "row_index": prompt.row_index,
        "request_index": result.request_index,
        "num_requests": result.num_requests,
        "prompt_hash": signed_hash(ids) if ids else None,
    }
    if spec.output.include_prompt:
        row |= {"prompt": prompt.text, "prompt_token_ids": ids or None}
    row["text"] = result.text
    if spec.output.include_token_ids:
        row["token_ids"] = None if completion is None else completion.token_ids.tolist()
    stop_reason = None if completion is None else completion.stop_reason
    row["finish_reason"] = None if completion is None else completion.finish_reason
    row["stop_reason"] = None if stop_reason is None else str(stop_reason)
    row["cumulative_logprob"] = None if completion is None else completion.cumulative_logprob
    row |= expected_logprobs(spec, "", completion and completion.logprobs, spec.sampling.logprobs, [])
    row |= expected_logprobs(
        spec, "prompt_", completion and completion.prompt_logprobs, spec.sampling.prompt_logprobs, [None]
    )
    return row | {
        "num_prompt_tokens": len(ids) or None,
        "num_output_tokens": None if completion is None else len(completion.token_ids),
        "error_type": None if error is None else error.error_type,
        "error_message": None if error is None else error.error_message.replace("\ud800", "?"),
        "attempts": result.attempts,
        "has_second_bos": False,
    }


def expected_logprobs(
    spec: JobSpec, prefix: str, part: TokenLogprobs | None, k: int | None, first: list[None]
) -> dict[str, Any]:
    if k is None:
        return {}
    names = ("logprobs", "ranks") + (("top_token_ids", "top_logprobs") if k else ())
    if part is None:
        return {f"{prefix}{name}": None for name in names}
    logprobs = part.logprobs.astype(spec.output.logprobs_dtype)
    lists = {
        "logprobs": [float(row[0]) for row in logprobs],
        "ranks": part.ranks.tolist(),
        "top_token_ids": [row[1 : k + 1].tolist() for row in part.token_ids],
        "top_logprobs": [[float(value) for value in row[1 : k + 1]] for row in logprobs],
    }
    return {f"{prefix}{name}": first + lists[name] for name in names}


def signed_hash(ids: list[int]) -> int:
    number = xxhash.xxh3_64_intdigest(np.array(ids, "<i4").tobytes())
    return number - 2**64 if number >= 2**63 else number


SPECS = {
    "plain": make_spec(),
    "samples": make_spec(n=3, logprobs=0),
    "everything": make_spec(
        id_column="key", n=2, logprobs=3, prompt_logprobs=2, output={"include_prompt": True, "keep_columns": ("kept",)}
    ),
    "float16": make_spec(logprobs=2, prompt_logprobs=0, output={"logprobs_dtype": "float16"}),
    "no ids": make_spec(logprobs=1, output={"include_token_ids": False}),
}


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "given"),
    [(None, 10, 54), (20, 10, 20), (500, 10, 500), (None, 64, 1), (None, 0, 64)],
)
def test_max_tokens_is_what_was_asked_or_what_fits(asked: int | None, num_prompt_tokens: int, given: int) -> None:
    [request] = Generate(make_spec(max_tokens=asked)).expand(Prompt(3, [1] * num_prompt_tokens, "x", None), 64)
    assert request.max_tokens == given
    assert request.key == (3, 0)
    assert request.prompt_token_ids == [1] * num_prompt_tokens


def test_samples_have_seeds_of_their_own() -> None:
    task = Generate(make_spec(n=4))
    requests = [request for row in (5, 6) for request in task.expand(Prompt(row, [1], "x", None), 64)]
    assert [request.request_index for request in requests] == [0, 1, 2, 3] * 2
    assert [request.seed for request in requests] == [seed_of(7, row, index) for row in (5, 6) for index in range(4)]


def test_greedy_requests_have_no_seed() -> None:
    [request] = Generate(make_spec(temperature=0)).expand(Prompt(0, [1], "x", None), 64)
    assert request.seed is None


def test_a_prompt_with_an_error_has_as_many_requests() -> None:
    prompt = Prompt(0, [], None, RowError("no_prompt", ""))
    assert len(Generate(make_spec(n=3, max_tokens=None)).expand(prompt, 64)) == 3


def test_seeds_differ_fit_int64_and_never_change() -> None:
    keys = list(itertools.product((0, 1, 12), (0, 1, 11, 2**40), range(50)))
    seeds = {seed_of(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    # A resumed job draws the seeds that it began with, whatever the version.
    assert (seed_of(0, 0, 0), seed_of(7, 123_456_789, 3)) == (9169699564768075551, 6084162290165640822)


# -- results ---------------------------------------------------------------------------------------------------------


def test_schema_of_everything() -> None:
    def items(type: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("element", type))

    def logprobs(prefix: str) -> list[tuple[str, pa.DataType]]:
        return [
            (f"{prefix}logprobs", items(pa.float32())),
            (f"{prefix}ranks", items(pa.int32())),
            (f"{prefix}top_token_ids", items(items(pa.int32()))),
            (f"{prefix}top_logprobs", items(items(pa.float32()))),
        ]

    end = [
        ("num_prompt_tokens", pa.int32()),
        ("num_output_tokens", pa.int32()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("attempts", pa.int32()),
    ]
    middle = [
        ("prompt", pa.string()),
        ("prompt_token_ids", items(pa.int32())),
        ("text", pa.string()),
        ("token_ids", items(pa.int32())),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("cumulative_logprob", pa.float64()),
        *logprobs(""),
        *logprobs("prompt_"),
        *end,
    ]
    task = Generate(SPECS["everything"])
    keys = [("row_index", pa.int64()), ("request_index", pa.int32()), ("num_requests", pa.int32())]
    flag = ("has_second_bos", pa.bool_())
    assert task.result_schema == pa.schema([*keys, ("prompt_hash", pa.int64()), *middle, flag])
    head = [("id", pa.int16()), ("row_index", pa.int64()), ("prompt_hash", pa.int64()), ("sample_index", pa.int32())]
    columns = [pa.field("key", pa.int16()), pa.field("kept", pa.date32())]
    assert task.output_schema(columns) == pa.schema([*head, ("kept", pa.date32()), *middle])


def test_columns_not_asked_for_are_absent() -> None:
    assert (
        Generate(make_spec(output={"include_token_ids": False})).output_schema([]).names
        == (
            "row_index prompt_hash sample_index text finish_reason stop_reason cumulative_logprob num_prompt_tokens "
            "num_output_tokens error_type error_message attempts"
        ).split()
    )
    assert not {"top_token_ids", "top_logprobs"} & set(Generate(make_spec(logprobs=0)).result_schema.names)
    assert Generate(SPECS["float16"]).result_schema.field("logprobs").type.value_type == pa.float16()


@pytest.mark.parametrize("name", SPECS)
def test_encode_is_what_plain_python_says(name: str) -> None:
    spec = SPECS[name]
    results = make_results(spec, range(120))
    random.Random(0).shuffle(results)
    task = Generate(spec)
    batch = task.encode(results)
    batch.validate(full=True)
    assert batch.schema == task.result_schema
    assert batch.to_pylist() == [expected_row(spec, result) for result in results]
    assert task.encode([]).num_rows == 0
    assert any(row["error_type"] == "refused" and row["text"] == "half" for row in batch.to_pylist())


def test_encode_of_errors_alone() -> None:
    results = make_results(SPECS["everything"], range(10), error_rate=1.0)
    batch = Generate(SPECS["everything"]).encode(results)
    assert batch.to_pylist() == [expected_row(SPECS["everything"], result) for result in results]


def test_prompt_logprobs_are_aligned_to_the_prompt() -> None:
    spec = make_spec(prompt_logprobs=1, output={"include_prompt": True})
    for row in Generate(spec).encode(make_results(spec, range(20), error_rate=0)).to_pylist():
        for name in ("prompt_logprobs", "prompt_ranks", "prompt_top_token_ids", "prompt_top_logprobs"):
            assert len(row[name]) == len(row["prompt_token_ids"])
            assert [value is None for value in row[name]] == [True] + [False] * (len(row[name]) - 1)


def test_rows_with_an_empty_text_are_counted() -> None:
    def counted(texts: Sequence[str | None], errors: Sequence[str | None], **more: Any) -> dict[str, int] | None:
        model = ModelSpec(name="m", tool_parser=more.pop("parser", None))
        scripted = more.pop("scripted", None)
        task = Generate(make_spec().model_copy(update={"model": model, "scripted": scripted}))
        return task.count(
            pa.table({"text": pa.array(texts, pa.string()), "error_type": pa.array(errors, pa.string())} | more)
        )

    assert counted(["", None, " \n", "a"], [None, None, None, None]) == {"num_empty": 3}
    assert counted(["", None], ["refused", "refused"]) is None
    assert counted(["a"], [None]) is None
    assert counted([""], [None], scripted=ScriptedSpec()) is None
    calls = pa.array([[{"id": "1"}], None])
    assert counted([None, None], [None, None], tool_calls=calls, parser="hermes") == {"num_empty": 1}
    assert counted([None, None], [None, None], tool_calls=calls) == {"num_empty": 2}  # a kept column of that name
    [few] = Generate.count_lines(657, {"num_empty": 12})
    assert few.startswith("12 of 657 output rows without an error, but with an empty text; ")
    [all_of_them] = Generate.count_lines(657, {"num_empty": 657})
    assert all_of_them.startswith("warning: 657 of 657 output rows ")


def test_lone_surrogates_are_replaced() -> None:
    spec = make_spec(output={"include_prompt": True})
    error = RowError("bad", "\udc80 message")
    result = Result(Prompt(0, [], "x\ud800y", error), 0, 1, None, "\udfff", error, 1)
    [row] = Generate(spec).encode([result]).to_pylist()
    assert (row["prompt"], row["text"], row["error_message"]) == ("x?y", "?", "? message")


def test_logprobs_beyond_float16_are_infinite_without_a_warning() -> None:
    spec = SPECS["float16"]
    result = next(result for result in make_results(spec, range(9), error_rate=0))
    assert result.completion is not None
    assert result.completion.logprobs is not None
    result.completion.logprobs.logprobs[0, 0] = -1e9
    [row] = Generate(spec).encode([result]).to_pylist()
    assert row["logprobs"][0] == -np.inf


def test_logprobs_of_another_width_are_refused() -> None:
    results = make_results(make_spec(logprobs=2), range(5), error_rate=0)
    with pytest.raises(ValueError, match="not the shape"):
        Generate(make_spec(logprobs=3)).encode(results)


def test_more_items_than_an_offset_can_count_are_refused() -> None:
    spec = make_spec(logprobs=1000)
    [result] = make_results(spec, [0], error_rate=0)
    assert result.completion is not None
    # Zero strides: 2.2 million tokens of 1,000 logprobs in no memory at all.
    shape = (2_200_000, 1001)
    wide = TokenLogprobs(
        np.broadcast_to(np.int32(1), shape), np.broadcast_to(np.float32(-1), shape), np.ones(shape[0], np.int32)
    )
    completion = Completion(result.completion.request, np.ones(shape[0], np.int32), "length", logprobs=wide)
    with pytest.raises(OverflowError, match="2200000000 items"):
        Generate(spec).encode([Result(result.prompt, 0, 1, completion, "", None, 1)])


# -- output rows -----------------------------------------------------------------------------------------------------


def test_reduce_repeats_a_row_s_columns_for_each_sample() -> None:
    spec = make_spec(id_column="key", n=3)
    results = make_results(spec, [4, 5, 6])[1:-2]
    table = pa.Table.from_batches([Generate(spec).encode(results)])
    columns = pa.table({"key": ["a", "b", "c"], "kept": [1, None, 3]})
    output = Generate(spec).reduce(columns, table)
    assert output.column("id").to_pylist() == ["a", "a", "b", "b", "b", "c"]
    assert output.column("kept").to_pylist() == [1, 1, None, None, None, 3]
    assert output.column("sample_index").to_pylist() == [1, 2, 0, 1, 2, 0]
    assert output.column("row_index").to_pylist() == [4, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("name", ["text", "row_index", "error_type", "sample_index"])
def test_kept_columns_with_the_name_of_an_output_column_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"keep_columns: got {name}"):
        Generate(make_spec()).output_schema([pa.field("fine", pa.int8()), pa.field(name, pa.int8())])


def test_a_kept_column_may_be_named_as_what_is_not_in_the_output() -> None:
    assert "prompt" in Generate(make_spec()).output_schema([pa.field("prompt", pa.string())]).names
    with pytest.raises(SpecError):
        Generate(make_spec(id_column="key")).output_schema([pa.field("key", pa.int8()), pa.field("id", pa.int8())])


def written(tmp_path: Any, spec: JobSpec) -> tuple[str, pa.Table]:
    results = pa.Table.from_batches([task_of(spec).encode(make_results(spec, range(50)))])
    ids = pa.table({"key": [f"row {index}" for index in range(50)], "kept": [{"a": index} for index in range(50)]})
    table = task_of(spec).reduce(ids, results)
    path = str(tmp_path / "part.parquet")
    pq.write_table(table, path, **task_of(spec).parquet_options(table.schema))
    return path, table


def test_parquet_encodings(tmp_path: Any) -> None:
    path, table = written(tmp_path, SPECS["everything"])
    assert pq.read_table(path).schema.equals(table.schema)
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {column.path_in_schema: column for column in map(group.column, range(group.num_columns))}
    split = {name for name, column in columns.items() if "BYTE_STREAM_SPLIT" in column.encodings}
    assert {"top_logprobs.list.element.list.element", "token_ids.list.element", "prompt_ranks.list.element"} <= split
    dictionaries = {name for name, column in columns.items() if column.has_dictionary_page}
    assert {"finish_reason", "error_type", "attempts"} <= dictionaries
    assert not dictionaries & (split | {"text", "prompt", "id", "row_index"})
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert columns["row_index"].statistics.max == 49
    assert columns["top_logprobs.list.element.list.element"].statistics is None


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_readers_read_the_same_rows(tmp_path: Any, dtype: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    spec = make_spec(id_column="key", logprobs=2, output={"logprobs_dtype": dtype, "keep_columns": ("kept",)})
    path, table = written(tmp_path, spec)
    expected = table.to_pylist()
    assert polars.read_parquet(path).to_dicts() == expected
    found = duckdb.sql(f"select * from '{path}'").fetchall()
    assert found == [tuple(row.values()) for row in expected]
