"""What the task makes of spans and completions, and of a job that is killed: windows and choices across the journal."""

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import jobs
from batchinf.base.errors import RowError
from batchinf.records import Completion, Prompt, Request, Result, Scoring, Span, TokenLogprobs
from batchinf.spec.job import JobSpec
from batchinf.tasks.score.task import Score

CHOICES = {"context_column": "c", "choices_column": "x", "answer_column": "a"}
PAIR = {"context_column": "c", "continuation_column": "t"}
TEXT = {"text_column": "t"}


def task_of(input: dict[str, Any], **sections: Any) -> Score:
    spec = {"model": "m", "task": "score", "input": {"path": "p", **input}, "output": {"path": "o"}, **sections}
    return Score(JobSpec.model_validate(spec))


def prompt_of(
    row: int, spans: Sequence[tuple[Sequence[int], int]], answer: int | None = None, num_bytes: int = 4
) -> Prompt:
    made = tuple(Span([*ids], start, num_bytes) for ids, start in spans)
    return Prompt(row, [*made[0].token_ids], None, None, scoring=Scoring(made, answer))


def completed(request: Request, logprobs: Sequence[float], k: int = 1, is_greedy: bool = True) -> Completion:
    """logprobs: of the prompt's tokens but the first."""
    ids = np.array(request.prompt_token_ids[1:], np.int32)
    top = np.tile(ids[:, None], (1, k + 1))
    top[:, 1:] += 0 if is_greedy else 1
    values = np.tile(np.array(logprobs, np.float32)[:, None], (1, k + 1))
    given = TokenLogprobs(top, values, np.full(len(ids), 1 if is_greedy else 2, np.int32))
    return Completion(request, np.array([9], np.int32), "length", prompt_logprobs=given)


def results_of(task: Score, prompt: Prompt, logprobs: Sequence[Sequence[float] | RowError], **how: Any) -> list[Result]:
    requests = task.expand(prompt, 512)
    results = []
    for request, values in zip(requests, logprobs, strict=True):
        error = values if isinstance(values, RowError) else None
        completion = None if isinstance(values, RowError) else completed(request, values, **how)
        results.append(Result(prompt, request.request_index, len(requests), completion, None, error, 1))
    return results


def rows_of(task: Score, results: Sequence[Result]) -> list[dict[str, Any]]:
    table = task.reduce(None, pa.Table.from_batches([task.encode(results)]))
    assert table.schema.equals(task.output_schema([]))
    table.validate(full=True)
    return table.to_pylist()


def test_a_continuation() -> None:
    task = task_of(PAIR)
    [row] = rows_of(task, results_of(task, prompt_of(3, [([5, 6, 7, 8], 2)]), [[-9.0, -1.0, -2.0]]))
    assert (row["row_index"], row["logprob_sum"], row["logprob_mean"], row["num_tokens"]) == (3, -3.0, -1.5, 2)
    assert row["perplexity"] == pytest.approx(np.exp(1.5))
    assert row["bits_per_byte"] == pytest.approx(3 / (4 * np.log(2)))
    assert (row["token_ids"], row["logprobs"], row["ranks"]) == ([7, 8], [-1.0, -2.0], [1, 1])
    assert (row["num_context_tokens"], row["num_prompt_tokens"], row["num_output_tokens"]) == (2, 4, 0)
    assert row["is_greedy"] and not row["prompt_truncated"] and row["error_type"] is None


def test_the_context_is_stored_where_all_is_asked_for() -> None:
    task = task_of(PAIR, score={"store": "all"}, sampling={"prompt_logprobs": 2})
    [row] = rows_of(task, results_of(task, prompt_of(0, [([5, 6, 7], 2)]), [[-9.0, -1.0]], k=2, is_greedy=False))
    assert (row["token_ids"], row["logprobs"], row["ranks"]) == ([5, 6, 7], [None, -9.0, -1.0], [None, 2, 2])
    assert row["top_token_ids"] == [None, [7, 7], [8, 8]] and row["logprob_sum"] == -1.0 and not row["is_greedy"]


def test_the_sums_alone() -> None:
    task = task_of(CHOICES, output={"path": "o", "include_token_logprobs": False})
    assert not [name for name in task.computed_schema.names if "ids" in name or name.endswith(("logprobs", "ranks"))]
    [row] = rows_of(task, results_of(task, prompt_of(0, [([5, 6, 7], 1), ([5, 8], 1)], 1), [[-1.0, -1.0], [-1.5]]))
    assert row["choice_logprob_sums"] == [-2.0, -1.5] and row["choice_num_tokens"] == [2, 1]


def test_windows_become_one_text() -> None:
    task = task_of(TEXT)
    spans = [([0, 1, 2], 1), ([1, 2, 3, 4], 2), ([4, 5], 1)]
    scoring = Scoring(tuple(Span(ids, start, 7 if start == 1 and ids[0] == 0 else 0) for ids, start in spans))
    prompt = Prompt(0, [1, 2, 3, 4, 5], None, None, scoring=scoring)
    [row] = rows_of(task, results_of(task, prompt, [[-1.0, -2.0], [-9.0, -3.0, -4.0], [-5.0]]))
    assert (row["token_ids"], row["logprobs"]) == ([1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0])
    assert (row["logprob_sum"], row["num_tokens"], row["num_bytes"], row["num_prompt_tokens"]) == (-15.0, 5, 7, 9)
    assert row["is_greedy"] and "num_context_tokens" not in row


def test_winners() -> None:
    """The largest sum, by token, by byte; the first of equal ones; none where one is not a number."""
    task = task_of(CHOICES, score={"one_pass": False})
    long = Prompt(0, [1], None, None, scoring=Scoring((Span([1, 2], 1, 9), Span([1, 2, 3, 4], 1, 12)), 1))
    equal, broken = (prompt_of(row, [([1, 2], 1), ([1, 3], 1), ([1, 4], 1)]) for row in (1, 2))
    results = results_of(task, long, [[-2.0], [-1.0] * 3])
    results += results_of(task, equal, [[-2.0], [-1.0], [-1.0]]) + results_of(task, broken, [[-2.0], [np.nan], [-1.0]])
    rows = rows_of(task, results)
    names = ("best", "best_per_token", "best_per_byte", "answer")
    assert [[row[name] for name in names] for row in rows] == [[0, 1, 0, 1], [1, 1, 1, None], [None] * 4]


@pytest.mark.parametrize(
    ("spans", "sections", "is_noted"),
    [
        ([([1, 2, 7, 5], 2), ([1, 2, 7, 6], 2)], {}, True),
        ([([1, 2, 7, 5], 3), ([1, 2, 7, 6], 3)], {}, False),  # one request already
        ([([1, 2, 7, 5], 2), ([1, 2, 8, 6], 2)], {}, False),
        ([([1, 2, 7, 5], 2), ([1, 2, 7, 5, 6], 2)], {}, False),
        ([([1, 2, 7, 5], 2), ([1, 2, 7, 6], 2)], {"score": {"one_pass": False}}, False),
    ],
)
def test_choices_that_could_share_a_request_are_named(spans: Any, sections: Any, is_noted: bool) -> None:
    note = task_of(CHOICES, **sections).request_note(prompt_of(0, spans))
    assert (note is not None) == is_noted
    assert note is None or "begins with 1 token that" in note


def test_single_tokens_go_in_one_pass() -> None:
    task = task_of(CHOICES)
    prompt = prompt_of(0, [([1, 2, 7], 2), ([1, 2, 8], 2)], 1)
    [request] = task.expand(prompt, 512)
    assert (request.prompt_token_ids, request.logprob_token_ids, request.max_tokens) == ([1, 2], (7, 8), 1)
    assert request.sampling.prompt_logprobs is None
    given = TokenLogprobs(
        np.array([[8, 7, 8]], np.int32), np.array([[-0.5, -3.0, -0.5]], np.float32), np.ones(1, np.int32)
    )
    completion = Completion(request, np.array([8], np.int32), "length", logprobs=given)
    [row] = rows_of(task, [Result(prompt, 0, 1, completion, None, None, 1)])
    assert row["choice_logprob_sums"] == [-3.0, -0.5] and row["choice_is_greedy"] == [False, True]
    assert (row["choice_token_ids"], row["choice_logprobs"]) == ([[7], [8]], [[-3.0], [-0.5]])
    assert row["choice_ranks"] == [[None], [None]] and row["best"] == 1
    for input, sections in ((CHOICES, {"score": {"one_pass": False}}), (CHOICES, {"sampling": {"prompt_logprobs": 1}})):
        assert len(task_of(input, **sections).expand(prompt, 512)) == 2
    assert len(task.expand(prompt_of(0, [([1, 2, 7, 8], 2), ([1, 2, 8], 2)]), 512)) == 2


def test_a_request_that_fails_makes_its_row_an_error() -> None:
    task = task_of(CHOICES)
    spans = [([1, 2, 3], 1), ([1, 4, 5], 1)]
    good, bad, none = prompt_of(0, spans, 1), prompt_of(1, spans), Prompt(2, [], None, RowError("no_choices", "none"))
    refused = RowError("refused", "no")
    results = results_of(task, good, [[-1.0, -1.0], [-2.0, -2.0]]) + results_of(task, bad, [[-1.0, -1.0], refused])
    results.append(Result(none, 0, len(task.expand(none, 512)), None, None, none.error, 1))
    for order in itertools.permutations([results[:2], results[2:4], results[4:]]):
        rows = rows_of(task, sorted(itertools.chain(*order), key=lambda result: result.prompt.row_index))
        assert [row["error_type"] for row in rows] == [None, "refused", "no_choices"]
        assert [row["choice_logprob_sums"] for row in rows] == [[-2.0, -4.0], None, None]
        assert [row["choice_token_ids"] for row in rows] == [[[2, 3], [4, 5]], None, None]
        assert [row["best"] for row in rows] == [0, None, None]
        assert [row["num_output_tokens"] for row in rows] == [0, None, None]
    assert [row["error_message"] for row in rows_of(task, results[2:])] == ["no", "none"]


def input_of(folder: pathlib.Path) -> pathlib.Path:
    """60 rows: texts of up to nine windows, choices of one token and of several, errors among them."""
    rows = []
    for number in range(60):
        choices = [" a", " b", "."] if number % 3 == 0 else [" there was", " a", " x y z"][: 1 + number % 3]
        rows.append({"id": number, "t": "Once upon a time " * (number % 13) or None, "c": f"It was {number}",
                     "x": choices if number % 20 else [], "a": 0})  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("input", [TEXT, CHOICES], ids=["windows", "choices"])
def test_killed_and_gone_on_with(tmp_path: pathlib.Path, input: dict[str, str]) -> None:
    """kill -9 while some requests of a row are in the journal and others are not: the rows of a run never hurt."""
    rows = []
    for name, step_s in (("hurt", 0.02), ("unhurt", 0)):
        folder = tmp_path / name
        folder.mkdir()
        spec = jobs.spec_of(folder, task="score", sampling=None, max_error_rate=1.0, checkpoint_interval_s=0.05,
                            input={"path": str(input_of(tmp_path)), **input}, parallel={"data_parallel_size": 1},
                            output={"keep_columns": ["c"], "rows_per_shard": 30},
                            score={"neutral": {"c": "It was"}} if input is CHOICES else None,
                            scripted={"max_num_seqs": 3, "max_model_len": 12, "step_s": step_s})  # fmt: skip
        if name == "hurt":
            marker = tmp_path / "held"  # amid the first shard
            process = jobs.start("run", spec, faults=f"engine.step:15=hold {marker}")
            jobs.wait_until(lambda: marker.exists() and list((folder / "out" / "journal").iterdir()))  # noqa: B023
            everyone = jobs.family(process.pid)
            jobs.kill(everyone)
            process.communicate()
            assert jobs.are_gone(everyone)
            assert not jobs.state_of(folder / "out").parts
        jobs.finish(spec)
        rows.append(jobs.rows_of(folder / "out"))
    assert rows[0] == rows[1] and len(rows[0]) == 60
    assert {row["error_type"] for row in rows[0]} > {None}
    if input is TEXT:
        assert max(row["num_tokens"] for row in rows[0] if row["num_tokens"]) > 40


def test_answers_are_counted_only_if_the_task_has_them() -> None:
    rows = pa.table(
        {"answer": [0, 1, None], "best": [0, 0, 0], "best_per_token": [0, 1, 1], "best_per_byte": [1, 1, 1]}
    )
    for name in ("prompt_truncated", "is_joined"):
        rows = rows.append_column(name, pa.array([False] * 3))
    # A kept column with the name of a winner that the task does not have.
    rows = rows.append_column("best_pmi", pa.array(["x"] * 3))
    counts = task_of(CHOICES).count(rows)
    assert counts is not None and (counts["num_answered"], counts["num_right"], counts["num_right_per_token"]) == (
        2,
        1,
        2,
    )
    assert "num_right_pmi" not in counts
    # A kept column of this name.
    without = task_of({"context_column": "c", "choices_column": "x"})
    assert without.count(rows) is None
    assert "answer" in task_of(CHOICES).shown_columns.choices.keys() - without.shown_columns.choices.keys()
    assert task_of(TEXT).count(rows.select(["answer"])) is None
    begun_without = task_of(CHOICES)
    begun_without.left_out = frozenset({"answer", "answer_error"})
    assert begun_without.count(rows.drop_columns(["answer"])) is None
