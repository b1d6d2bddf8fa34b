"""The examples of `docs/examples/`, run as their first lines say, over small jobs."""

import json
import math
import pathlib
import re
import shutil
import subprocess

import pytest

import jobs

EXAMPLES = jobs.ROOT / "docs" / "examples"
QUICK = {"parallel": {"data_parallel_size": 1}, "scripted": {"step_s": 0.0}}


def run(name: str, out: pathlib.Path, *arguments: str) -> str:
    shutil.copy(EXAMPLES / name, out.parent)  # Python would write its bytecode beside the pages
    command = [name.removesuffix(".py"), str(out), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = jobs.start_module(jobs.fork_server(), command, out.parent, {}, **pipes)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return said


def test_entropy_over_positions(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, sampling={"logprobs": 20}, input={"limit": 40}, **QUICK))
    said = run("topk_entropy.py", tmp_path / "out")
    lines = [line.split() for line in said.splitlines()[2:]]
    num_tokens = sum(len(row["token_ids"]) for row in jobs.rows_of(tmp_path / "out"))
    assert sum(int(line[1].replace(",", "")) for line in lines) == num_tokens
    for _, _, _, lower, _, upper in lines:
        assert 0 <= float(lower) <= float(upper) <= 17 * 0.6932


def test_perplexity_by_source(tmp_path: pathlib.Path) -> None:
    where = {"text_column": "prompt", "limit": 60}
    jobs.finish(jobs.spec_of(tmp_path, task="score", sampling=None, input=where, **QUICK))
    said = run("perplexity_by_source.py", tmp_path / "out", "language")
    assert "a BOS, it counts as a scored token" in said
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines()[4:]}
    rows = [row for row in jobs.rows_of(tmp_path / "out") if row["language"] == "en"]
    num_tokens = sum(row["num_tokens"] for row in rows)
    perplexity = math.exp(-sum(row["logprob_sum"] for row in rows) / num_tokens)
    assert lines["en"][:3] == [f"{len(rows):,}", f"{num_tokens:,}", f"{perplexity:.2f}"]


def test_calibration(tmp_path: pathlib.Path) -> None:
    text = (jobs.ROOT / "sample_data" / "questions.jsonl").read_text(encoding="utf-8")
    questions = [json.loads(line) for line in text.splitlines()]
    questions[3]["answer"] = None
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    where = {
        "path": str(tmp_path / "questions.jsonl"),
        "prompt_template": "Question: {{ question }}\nAnswer:",
        "choices_column": "choices",
        "answer_column": "answer",
        "limit": 50,
    }
    sections = {"input": where, "output": {"keep_columns": []}, **QUICK}
    jobs.finish(jobs.spec_of(tmp_path, task="score", sampling=None, **sections))
    said = run("calibration.py", tmp_path / "out")
    rows = [row for row in jobs.rows_of(tmp_path / "out") if row["answer"] is not None]
    assert len(rows) == 49
    share = sum(row["best"] == row["answer"] for row in rows) / len(rows)
    assert f"best: {share:.3f} ± " in said
    tables = said.split("probabilities from ")[1:]
    for table, is_per_byte in zip(tables, (False, True), strict=True):
        confidence = []
        for row in rows:
            lengths = row["choice_num_bytes"] if is_per_byte else [1] * len(row["choice_num_bytes"])
            scores = [total / length for total, length in zip(row["choice_logprob_sums"], lengths, strict=True)]
            confidence.append(1 / sum(math.exp(score - max(scores)) for score in scores))
        lines = [line.split() for line in table.splitlines() if "–" in line]
        assert sum(int(line[-3]) for line in lines) == len(rows)
        assert sum(int(line[-3]) * float(line[-2]) for line in lines) == pytest.approx(sum(confidence), abs=0.1)
        assert "expected calibration error: 0." in table


def test_teacher_logits(tmp_path: pathlib.Path) -> None:
    sections = {"logits": {"positions": "all"}, "input": {"limit": 20}, **QUICK}
    jobs.finish(jobs.spec_of(tmp_path, task="logits", sampling=None, **sections))
    said = run("teacher_logits.py", tmp_path / "out")
    num_positions = sum(row["num_prompt_tokens"] for row in jobs.rows_of(tmp_path / "out"))
    assert f"{num_positions:,} positions; the 64 likeliest tokens have 0." in said


def test_each_example_says_how_it_is_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf"^#     python docs/examples/{path.name} out/", path.read_text(), re.M), path.name
