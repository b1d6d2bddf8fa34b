"""Rows of logits: their columns and Parquet, whole jobs killed and gone on with, and the reader's arrays."""

import contextlib
import pathlib
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchinf
import jobs
from batchinf.base.errors import RowError, SpecError
from batchinf.base.ragged import Ragged, to_ragged
from batchinf.engines.scripted import ScriptedEngine
from batchinf.job.disk_space import check_size
from batchinf.job.open import open_job
from batchinf.output import counts
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Prompt, Result
from batchinf.replica.worker import num_bytes
from batchinf.source.rows import Row
from batchinf.spec.file import read_spec
from batchinf.spec.job import JobSpec, ScriptedSpec
from batchinf.tasks.logits.section import logits_of
from batchinf.tasks.logits.task import Logits, with_positions, with_token_ids

WIDTH = 1000
BASE: dict[str, Any] = {"model": "m", "task": "logits", "input": {"path": "-"}, "output": {"path": "-"}}


def task_of(**logits: Any) -> Logits:
    sampling = {"temperature": 0.0, **({"max_tokens": 5} if logits.get("positions") == "generated" else {})}
    section = {"vocab_size": WIDTH, **logits}
    return Logits(JobSpec.model_validate({**BASE, "logits": section, "sampling": sampling}))


def results_of(task: Logits, prompts: list[Prompt]) -> list[Result]:
    engine = ScriptedEngine(ScriptedSpec(vary_lengths=False), WIDTH, 0)
    found = []
    for prompt in prompts:
        [request] = task.expand(prompt, 100)
        completion = None if prompt.error else engine.complete(request)
        found.append(Result(prompt, 0, 1, completion, None, prompt.error, 1))
    return found


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a", "b"]}, "body.prompt: got a list of 2; this job has one answer for each line"),
        ({"prompt": "a", "n": 2}, "body.n: got 2, but all rows have sampling.n 1"),
    ],
)
def test_a_line_of_a_batch_file_has_one_answer(body: dict[str, Any], message: str) -> None:
    """Several answers would have one key."""
    spec = {**BASE, "input": {"path": "-", "format": "openai"}, "logits": {"vocab_size": WIDTH}}
    builder = Logits(JobSpec.model_validate(spec)).prompt_builder(load_tokenizer(str(jobs.MODEL), False), None)
    line = {"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": body}
    [prompt] = builder.build([Row(0, line)], 64)
    assert prompt.error == RowError("unsupported_request", message)


PROMPTS = [
    Prompt(0, [4, 5, 6], "a", None, positions=(2, 0)),
    Prompt(1, [], "b", RowError("empty_prompt", "no tokens")),
    Prompt(2, [7], "c", None, positions=(0,)),
]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("last", [[2], None, [0]]),
        ("all", [[0, 1, 2], None, [0]]),
        ("generated", [[2, 3, 4, 5, 6], None, [0, 1, 2, 3, 4]]),
        ({"column": "places"}, [[2, 0], None, [0]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_columns(positions: Any, expected: list[list[int] | None], dtype: Any) -> None:
    task = task_of(positions=positions, dtype=dtype, values="logprobs")
    results = results_of(task, PROMPTS)
    batch = task.encode(results)
    assert batch.schema.equals(task.result_schema)
    assert batch.column("positions").to_pylist() == expected
    ragged = to_ragged(batch.column("logprobs"))
    assert ragged.values.dtype == dtype
    assert ragged.is_null.tolist() == [False, True, False]
    for row, result in enumerate(results):
        if result.completion is not None:
            assert np.array_equal(ragged[row], result.completion.values)
    is_generated = positions == "generated"
    assert ("token_ids" in batch.schema.names) == is_generated
    numbers = [None if places is None else len(places) if is_generated else 0 for places in expected]
    assert batch.column("num_output_tokens").to_pylist() == numbers


def test_chosen_tokens_come_in_the_order_in_which_they_are_named() -> None:
    full, few = task_of(), task_of(token_ids=[998, 3, 40])
    [all_of_it] = [r.completion.values for r in results_of(full, PROMPTS[:1]) if r.completion]
    [columns] = [r.completion.values for r in results_of(few, PROMPTS[:1]) if r.completion]
    assert all_of_it is not None
    assert np.array_equal(columns, all_of_it[:, [998, 3, 40]])


@pytest.mark.parametrize(
    ("positions", "ids"),
    [
        ("last", ((998, 3),)),
        ("generated", ((998, 3),)),
        ("all", ((998, 3), (4, 4), (0, 999))),
        ({"column": "places"}, ((40, 3), (5, 6))),
    ],
)
def test_a_rows_own_tokens(positions: Any, ids: tuple[tuple[int, ...], ...]) -> None:
    full = task_of(positions=positions, dtype="float32")
    own = task_of(positions=positions, dtype="float32", token_ids_column="ids", num_token_ids=2)
    prompt = replace(PROMPTS[0], value_token_ids=ids)
    [all_of_it] = [r.completion.values for r in results_of(full, PROMPTS[:1]) if r.completion]
    batch = own.encode(results_of(own, [prompt, PROMPTS[1]]))
    assert all_of_it is not None
    each = np.broadcast_to(np.array(ids), (len(all_of_it), 2))
    assert batch.schema.equals(own.result_schema)
    assert batch.column("value_token_ids").to_pylist() == [each.tolist(), None]
    expected = [[row[chosen].tolist() for row, chosen in zip(all_of_it, each, strict=True)], None]
    assert batch.column("logits").to_pylist() == expected


def test_a_queue_knows_their_size() -> None:
    [result] = results_of(task_of(positions="all", dtype="float32"), PROMPTS[:1])
    assert result.completion is not None
    assert num_bytes(result.completion) > 3 * WIDTH * 4


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_arrays_are_views_of_what_parquet_was_decoded_into(dtype: Any, tmp_path: pathlib.Path) -> None:
    task = task_of(positions="all", dtype=dtype)
    table = task.reduce(None, pa.Table.from_batches([task.encode(results_of(task, PROMPTS))]))
    pq.write_table(table, tmp_path / "a.parquet", **task.parquet_options(table.schema))
    column = pq.read_table(tmp_path / "a.parquet").column("logits").chunk(0)
    assert column.type == table.schema.field("logits").type
    values = to_ragged(column).values
    assert values.shape == (4, WIDTH)
    assert np.shares_memory(values, np.frombuffer(column.values.values.buffers()[1], dtype))
    assert pq.read_table(tmp_path / "a.parquet").equals(table)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("start", [0, 1])
def test_numbers_that_are_not_finite_are_counted(bad: float, dtype: Any, start: int) -> None:
    task = task_of(positions="all", dtype=dtype)
    results = results_of(task, [Prompt(row, [row + 1] * 3, None, None) for row in range(4)])
    assert counts.number_columns(task.result_schema) == ("logits",)
    for number in (0, 2):
        values: npt.NDArray[Any] | None = results[number].completion.values  # type: ignore[union-attr]
        assert values is not None
        values[2, 999] = bad
    table = pa.Table.from_batches([task.encode(results)]).slice(start)
    assert counts.count_non_finite_rows(table, ["logits"]) == ((2 - start, 0) if np.isnan(bad) else (0, 2 - start))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0, -1, 2], (0, 2, 2)),
        ([-3], (0,)),
        ([3], "got position 3 in column 'places'; the prompt has 3 tokens, so that 2 is the last"),
        ([-4], "got position -4 in column 'places'; the prompt has 3 tokens, so that 2 is the last"),
        ([], "got an empty list in column 'places'; expected a list of positions"),
        ([True], "got true or false among the positions in column 'places'"),
        (2, "got a value of type int in column 'places'; expected a list of positions"),
        (None, "got null in column 'places'; expected a list of positions"),
    ],
)
def test_a_rows_own_positions(value: Any, expected: Any) -> None:
    prompt = with_positions(Prompt(0, [4, 5, 6], None, None), "places", value)
    found = prompt.positions if prompt.error is None else prompt.error.error_message
    assert found == expected


def test_killed_and_gone_on_with(tmp_path: pathlib.Path) -> None:
    sections: dict[str, Any] = {
        "task": "logits",
        "sampling": None,
        "input": {"limit": 120},
        "logits": {"positions": "all"},
        "output": {"rows_per_shard": 30, "keep_columns": ["language"]},
    }
    for name in ("hurt", "unhurt"):
        (tmp_path / name).mkdir()
    whole = jobs.spec_of(tmp_path / "unhurt", **sections, scripted={"step_s": 0.0})
    jobs.finish(whole)
    # A step takes longer than the time between checkpoints, so that results are journalled before their shard is full.
    slow: dict[str, Any] = {"checkpoint_interval_s": 0.01, "scripted": {"step_s": 0.05}}
    spec, marker, once = jobs.spec_of(tmp_path / "hurt", **sections, **slow), tmp_path / "held", tmp_path / "once"
    once.mkdir()
    process = jobs.start("run", spec, faults=f"journal.before_fsync=hold {marker}", BATCHINF_FAULTS_ONCE=str(once))
    jobs.wait_until(marker.exists)
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    jobs.finish(spec)
    drop = ["attempts"]
    hurt, unhurt = (jobs.table_of(tmp_path / name / "out").drop_columns(drop) for name in ("hurt", "unhurt"))
    assert hurt.num_rows == 120
    assert hurt.equals(unhurt)
    results = batchinf.open(tmp_path / "hurt" / "out")
    ragged, positions = results.ragged("logits"), results.ragged("positions")
    assert ragged.values.shape == (int(results.array("num_prompt_tokens").sum()), 1536)
    assert np.array_equal(ragged.offsets, positions.offsets)
    pieces = list(results.arrays("row_index", "logits", num_rows=7))
    found = [piece["logits"] for piece in pieces if isinstance(piece["logits"], Ragged)]
    assert np.array_equal(np.concatenate([lists.values for lists in found]), ragged.values)
    assert max(len(lists) for lists in found) == 7
    assert np.array_equal(np.concatenate([piece["row_index"] for piece in pieces]), results.array("row_index"))


@pytest.mark.parametrize(
    ("logits", "limit", "is_refused"),
    [
        ({"positions": "last"}, 60 * 1536 * 2 + 60 * 104, False),
        ({"positions": "last"}, 60 * 1536 * 2 + 60 * 104 - 1, True),
        ({"positions": "last", "dtype": "float32"}, 60 * 1536 * 2 + 60 * 104, True),
        ({"positions": "last", "token_ids": [5, 7]}, 60 * (2 * 2 + 104), False),
        # The mean of these prompts is 29.8 tokens.
        ({"positions": "all"}, 60 * 30 * 1536 * 2 + 60 * 30 * 4 + 60 * 100, False),
        ({"positions": "all"}, 60 * 29 * 1536 * 2 + 60 * 30 * 4 + 60 * 100, True),
    ],
)
def test_what_would_be_too_large_is_refused(
    logits: dict[str, Any], limit: int, is_refused: bool, tmp_path: pathlib.Path
) -> None:
    spec = jobs.spec_of(
        tmp_path, task="logits", logits=logits, sampling=None, input={"limit": 60}, output={"max_output_bytes": limit}
    )
    file = read_spec(spec)
    job = open_job(file, tmp_path / "cache")
    with (
        contextlib.closing(job.source),
        pytest.raises(SpecError) if is_refused else contextlib.nullcontext(),
    ):
        check_size(job, 60)


@pytest.mark.parametrize(
    ("positions", "value", "expected"),
    [
        ("all", [4, 999], ((4, 999),)),
        ("generated", [4, 999], ((4, 999),)),
        ("last", [[4, 999]], ((4, 999),)),
        ("all", [[4, 5], [6, 7], [8, 9]], ((4, 5), (6, 7), (8, 9))),
        ({"column": "places"}, [[4, 5], [6, 7]], ((4, 5), (6, 7))),
        ("all", [[4, 5]], "got 1 lists of ids for 3 positions, in column 'ids'"),
        ({"column": "places"}, [[4, 5]], "got 1 lists of ids for 2 positions, in column 'ids'"),
        ("generated", [[4, 5]], "got a list of ids for each position; with logits.positions: generated it must be one "
                                "list for all, in column 'ids'"),
        ("all", [4], "got a list of 1 ids of tokens; logits.num_token_ids is 2, in column 'ids'"),
        ("all", [], "got a list of 0 ids of tokens; logits.num_token_ids is 2, in column 'ids'"),
        ("all", None, "got null; expected a list of 2 ids of tokens, in column 'ids'"),
        ("last", [[4, 5], 6], "got a value of type int; expected a list of 2 ids of tokens, in column 'ids'"),
        ("all", [4, True], "got true or false among the ids of tokens, in column 'ids'"),
        ("all", [4, -1], "got token -1; must be at least 0 and at most 999, the vocabulary's last, in column 'ids'"),
        ("all", [1000, 4], "got token 1000; must be at least 0 and at most 999, the vocabulary's last, in column "
                           "'ids'"),
    ],
)  # fmt: skip
def test_ids_of_a_rows_own_tokens(positions: Any, value: Any, expected: Any) -> None:
    logits = logits_of(task_of(positions=positions, token_ids_column="ids", num_token_ids=2).spec)
    prompt = with_token_ids(PROMPTS[0], logits, value)
    assert (prompt.value_token_ids if prompt.error is None else prompt.error.error_message) == expected
    assert prompt.error is None or prompt.error.error_type == "invalid_token_ids"
