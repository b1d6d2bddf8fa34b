"""Accuracy and the second BOS: counted as plain Python counts them, after a kill and after a retry."""

import json
import pathlib
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import jobs
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.base.text import to_json
from batchinf.commands.status import job_status
from batchinf.manifest.commit_log import encode_commits, read_lines
from batchinf.output.remarks import remarks
from batchinf.prompts.encoder import begins_with_two, load_tokenizer
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of
from batchinf.tasks.score.accuracy import WINNERS, Accuracy, count_answers

BOS = "<|begin_of_text|>"
NUM_ROWS = 60


def counted(rows: list[dict[str, Any]]) -> Counter[str]:
    """In plain Python."""
    answered = [row for row in rows if row["answer"] is not None and row["best"] is not None]
    right = (sum(row[name] == row["answer"] for row in answered) for name in WINNERS)
    names = ("num_right", "num_right_per_token", "num_right_per_byte")
    return Counter(num_answered=len(answered), num_wrong_answers=0, **dict(zip(names, right, strict=True)))


def accuracy(rows: list[dict[str, Any]]) -> Accuracy:
    found = Accuracy.of(len(rows), counted(rows))
    assert found is not None
    return found


def drawn(seed: int, num_rows: int = 200) -> pa.Table:
    chance = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        is_bad, answer = chance.random() < 0.1, chance.choice([None, 0, 1, 2, 3])
        rows.append({"answer": answer} | {name: None if is_bad else chance.randrange(4) for name in WINNERS})
    return pa.Table.from_pylist(rows, pa.schema([(name, pa.int32()) for name in ("answer", *WINNERS)]))


@pytest.mark.parametrize("seed", range(4))
def test_counted_as_plain_python_counts(seed: int) -> None:
    table = drawn(seed)
    whole = count_answers(table)
    assert whole == counted(table.to_pylist())
    assert count_answers(table.slice(0, 0)) == dict.fromkeys(whole, 0)
    parts = [count_answers(rows) for rows in (table.slice(0, 60), table.slice(60))]
    assert {name: sum(part[name] for part in parts) for name in whole} == whole
    assert accuracy(table.to_pylist()).share == whole["num_right"] / whole["num_answered"]
    assert Accuracy.of(60, dict.fromkeys(whole, 0)) is None


# -- two BOS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(jobs.MODEL), False)


@pytest.mark.parametrize(
    ("sections", "values", "expected"),
    [
        ({}, {"prompt": "one"}, False),
        ({}, {"prompt": BOS + "one"}, True),
        ({}, {"prompt": f"one {BOS}{BOS}"}, False),
        ({"input": {"prompt_template": BOS + "{{ prompt }}"}}, {"prompt": "one"}, True),
        # The template writes one, and the tokenizer none behind it.
        ({"input": {"add_generation_prompt": True}}, {"prompt": "one"}, False),
        ({"input": {"chat_template": BOS * 2 + "{{ messages[0].content }}"}}, {"prompt": "one"}, True),
        ({"input": {"token_ids_column": "ids"}}, {"ids": [0, 0, 5]}, True),
        ({"input": {"token_ids_column": "ids"}}, {"ids": [0, 5, 0]}, False),
        ({"input": {"token_ids_column": "ids"}}, {"ids": [0]}, False),
        ({"task": "score", "input": {"context_column": "c", "continuation_column": "t"}}, {"c": "a", "t": " b"}, False),
        (
            {"task": "score", "input": {"context_column": "c", "continuation_column": "t"}},
            {"c": BOS + "a", "t": " b"},
            False,
        ),
        (
            {"task": "score", "input": {"context_column": "c", "continuation_column": "t"}},
            {"c": BOS * 2 + "a", "t": " b"},
            True,
        ),
        # Each text is scored so, which is said before the job begins, or meant.
        ({"task": "score", "input": {"text_column": "t"}}, {"t": "a"}, False),
        ({"task": "score", "input": {"text_column": "t"}, "score": {"add_bos_token": True}}, {"t": "a"}, False),
        ({"task": "score", "input": {"text_column": "t"}, "score": {"add_bos_token": False}}, {"t": "a"}, False),
        ({"task": "score", "input": {"text_column": "t"}, "score": {"add_bos_token": False}}, {"t": BOS + "a"}, True),
    ],
)
def test_prompts_that_begin_with_two(
    sections: dict[str, Any], values: dict[str, Any], expected: bool, tokenizer: Any
) -> None:
    where = {"path": "rows.jsonl", **sections.pop("input", {})}
    spec = JobSpec(model={"name": str(jobs.MODEL)}, input=where, output={"path": "out"}, **sections)
    [prompt] = task_of(spec).prompt_builder(tokenizer, None).build([Row(7, values, None)], 512)
    assert prompt.error is None
    assert prompt.has_second_bos == expected


def test_a_model_without_bos() -> None:
    assert not begins_with_two([5, 5], None)
    assert not begins_with_two([], 0)


# -- whole jobs --------------------------------------------------------------------------------------------------------


def is_doubled(row: int) -> bool:
    return row % 4 == 1


def rows() -> list[dict[str, Any]]:
    return [
        {"c": (BOS * 2 if is_doubled(i) else "") + f"Question {i}:", "x": [f" {i}", " one", f" no {i * 7}"],
         "a": None if i % 6 == 5 else i % 3}
        for i in range(NUM_ROWS)
    ]  # fmt: skip


def said_of(out: pathlib.Path) -> list[str]:
    """What is to be said of the job, counted anew from its rows."""
    found = accuracy(jobs.rows_of(out))
    assert 0 < found.num_right < found.num_answered < NUM_ROWS
    num_doubled = sum(map(is_doubled, range(NUM_ROWS)))
    return [
        f"accuracy: best {jobs.share_said(found.num_right, found.num_answered)}, best_per_token "
        f"{jobs.share_said(found.num_right_per_token, found.num_answered)}, best_per_byte "
        f"{jobs.share_said(found.num_right_per_byte, found.num_answered)} of {found.num_answered} rows; "
        f"input.answers: places; {NUM_ROWS - found.num_answered} other rows are error rows, or have no answer or no "
        "scores",
        f"warning: the prompts of {num_doubled} input rows begin with two BOS tokens: ",
    ]


def test_standard_errors_are_the_harness_s() -> None:
    harness = pytest.importorskip("lm_eval.api.metrics")
    numbers = {"num_right": 3, "num_right_per_token": 0, "num_right_per_byte": 7}
    errors = [harness.mean_stderr([1] * number + [0] * (7 - number)) for number in numbers.values()]
    assert str(Accuracy(num_rows=9, num_answered=7, **numbers)) == (
        f"best {3 / 7:.2%} ± {errors[0]:.2%} (3), best_per_token 0.00% ± 0.00% (0), "
        "best_per_byte 100.00% ± 0.00% (7) of 7 rows"
    )
    one = Accuracy(num_rows=1, num_answered=1, num_right=1, num_right_per_token=1, num_right_per_byte=1)
    assert "±" not in str(one)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Killed amid the first shard, some of whose results are in the journal; then finished; then a retry."""
    folder = tmp_path_factory.mktemp("job")
    path, out, marker = folder / "rows.jsonl", folder / "out", folder / "held"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    where = {"path": str(path), "id_column": None, "context_column": "c", "choices_column": "x", "answer_column": "a"}
    spec = jobs.spec_of(folder, task="score", sampling=None, input=where, parallel={"data_parallel_size": 1},
                        output={"keep_columns": [], "rows_per_shard": 25}, checkpoint_interval_s=0.05,
                        scripted={"max_num_seqs": 3, "step_s": 0.02})  # fmt: skip
    process = jobs.start("run", spec, faults=f"engine.step:15=hold {marker}")
    jobs.wait_until(lambda: marker.exists() and list((out / "journal").iterdir()))
    everyone = jobs.family(process.pid)
    jobs.kill(everyone)
    process.communicate()
    assert jobs.are_gone(everyone)
    seen: dict[str, Any] = {"out": out, "killed": "\n".join(job_status(str(out)).lines())}
    seen["run"] = jobs.finish(spec, "--set", "scripted.step_s=0").stdout
    seen["said"] = said_of(out)
    seen["retried"] = jobs.finish(spec, "--retry", "row_index % 5 = 1", "--set", "scripted.step_s=0").stdout
    seen["status"] = "\n".join(job_status(str(out)).lines())
    return seen


@pytest.mark.slow
def test_right_after_a_kill_and_after_a_retry(job: dict[str, Any]) -> None:
    assert "accuracy" not in job["killed"] and "BOS" not in job["killed"]
    for text in (job["run"], job["retried"], job["status"]):
        assert [text.count(line) for line in job["said"]] == [1, 1]
        assert text.count("BOS") == text.count("accuracy: ") == 1
    # As the engine repeats, rows that ran again are the same.
    assert said_of(job["out"]) == job["said"]


@pytest.mark.slow
def test_a_report_has_only_the_counts_of_answers(job: dict[str, Any]) -> None:
    said = json.loads(to_json(job_status(str(job["out"]))))["totals"]["task_counts"]
    rows = jobs.rows_of(job["out"])
    assert said == {**counted(rows), "num_places": sum(row["answer"] is not None for row in rows)}


def test_slices_are_summed(job: dict[str, Any]) -> None:
    state = jobs.state_of(job["out"])
    found = accuracy(jobs.rows_of(job["out"]) * 2)
    others = f"{2 * NUM_ROWS - found.num_answered} other rows are error rows, or have no answer or no scores"
    invented, accuracies, *_ = remarks([state] * 2)
    assert invented == "the answers are invented: the spec has `scripted`, so no model ran"
    assert accuracies == f"accuracy: {found}; input.answers: places; {others}"


def test_a_line_of_counts_that_are_none_is_damage(job: dict[str, Any], tmp_path: pathlib.Path) -> None:
    folder = Folder(job["out"])
    [log, *_] = sorted(folder.list("manifest"))
    lines = [fields for _, fields in read_lines(folder, f"manifest/{log}")]
    part = next(fields for fields in lines if fields["kind"] == "part")
    assert part["task_counts"]["num_answered"] > 0
    part["task_counts"]["num_answered"] = "many"
    (tmp_path / "out" / "manifest").mkdir(parents=True)
    plain = [{k: v for k, v in fields.items() if k not in ("crc", "commit")} for fields in lines]
    (tmp_path / "out" / "manifest" / "000001.jsonl").write_bytes(encode_commits([plain]))
    with pytest.raises(OutputError, match="contradicts the lines before it"):
        job_status(str(tmp_path / "out"))


def test_rows_whose_answers_are_no_choices_are_scored_and_counted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text,label\n1,Good.,pos\n2,Fine.,Pos\n3,Bad.,\n4,Poor.,neg\n")
    input = {"path": str(tmp_path / "rows.csv"), "context_column": "text", "choices": ["pos", "neg"]}
    score = {"task": "score", "sampling": None, "input": {**input, "answer_column": "label"}}
    done = jobs.finish(jobs.spec_of(tmp_path, output={"keep_columns": []}, **score))
    line = (
        "warning: 2 output rows have values in input.answer_column that are no choices (input.answers: texts): they "
        "are scored, their answer is null, and answer_error says why"
    )
    assert line in done.stdout
    rows = jobs.rows_of(tmp_path / "out")
    assert [row["answer"] for row in rows] == [0, None, None, 1]
    assert [row["best"] is not None for row in rows] == [True] * 4
    assert [row["error_type"] for row in rows] == [None] * 4
    assert [row["answer_error"] is None for row in rows] == [True, False, False, True]
    assert rows[1]["answer_error"].startswith("got 'Pos' in column 'label'; expected one of input.choices (pos, neg)")
    assert "cut at the left" not in done.stdout
    status = json.loads(jobs.run("status", tmp_path / "out", "--json").stdout)
    assert status["totals"]["task_counts"]["num_wrong_answers"] == 2
    assert line in jobs.run("status", tmp_path / "out").stdout
    validated = jobs.run("validate", tmp_path / "job.yaml")
    assert "warning: 2 of 4 sampled rows have values in input.answer_column that are no choices" in validated.stdout


def test_contexts_that_are_cut_are_counted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.csv").write_text(f"id,text\n1,Good.\n2,{'long ' * 200}\n3,{'longer ' * 200}\n")
    input = {"path": str(tmp_path / "rows.csv"), "context_column": "text", "choices": ["pos", "neg"]}
    sections = {"input": input, "output": {"keep_columns": []}, "engine": {"max_model_len": 64}}
    done = jobs.finish(jobs.spec_of(tmp_path, task="score", sampling=None, **sections))
    line = "warning: the context of 2 output rows was cut at the left end to fit (prompt_truncated)"
    assert line in done.stdout and line in jobs.run("status", tmp_path / "out").stdout
    assert [row["prompt_truncated"] for row in jobs.rows_of(tmp_path / "out")] == [False, True, True]


def test_tokens_that_join_context_and_text_are_counted(tmp_path: pathlib.Path) -> None:
    pairs = [("looked", " down"), ("looked do", "wn and saw h"), ("", "wn"), ("do", "wn there"), (None, "x")]
    lines = (json.dumps({"id": number, "c": c, "t": t}) for number, (c, t) in enumerate(pairs))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    input = {"path": str(tmp_path / "rows.jsonl"), "context_column": "c", "continuation_column": "t"}
    spec = jobs.spec_of(
        tmp_path, task="score", sampling=None, input=input, output={"keep_columns": []}, max_error_rate=1.0
    )
    done = jobs.finish(spec)
    assert [row["is_joined"] for row in jobs.rows_of(tmp_path / "out")] == [False, True, False, True, None]
    line = (
        "warning: 2 output rows have a token that joins the end of the context and the beginning of the scored text, "
    )
    assert line in done.stdout and line in jobs.run("status", tmp_path / "out").stdout
    first = "part them. Row 1: 'looked do' + 'wn and saw h' scores ' and saw h'"
    for text in (done.stderr, jobs.run("validate", spec).stdout):
        assert "warning: in 2 of 4 sampled rows a token joins" in text and first in text
    jobs.finish(spec, "--set", f"output.path={tmp_path / 'apart'}", "--set", "score.target_delimiter=' '")
    assert not any(row["is_joined"] for row in jobs.rows_of(tmp_path / "apart"))
