"""A whole job on real vLLM whose model thinks before it answers in a structure, each row within a budget of its own."""

import json
import pathlib
import shutil

import pytest

import jobs

pytest.importorskip("vllm")

CHOICES = ["positive", "negative"]


@pytest.fixture
def thinker(tmp_path: pathlib.Path) -> pathlib.Path:
    """The sample model with two of its special tokens called marks of thinking: its tokenizer has none."""
    folder = tmp_path / "thinker"
    shutil.copytree(jobs.MODEL, folder)
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for token, mark in (("<|start_header_id|>", "<think>"), ("<|end_header_id|>", "</think>")):
        tokenizer = tokenizer.replace(token, mark)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_structure_begins_after_the_thinking(thinker: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = [
        {
            "id": index,
            "prompt": f"So <think>hm {index}" + ("</think>" if index % 2 else ""),
            "budget": 3 + 5 * (index % 3),
        }
        for index in range(12)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(thinker), "reasoning_parser": "deepseek_r1"},
        input={"path": str(tmp_path / "in.jsonl")},
        sampling={
            "temperature": 1.0,
            "max_tokens": {"column": "budget"},
            "logprobs": None,
            "structured_outputs": {"choice": CHOICES},
        },
        engine={"max_model_len": 128, "max_num_seqs": 16, "structured_outputs_config": {"backend": "xgrammar"}},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted=None,
        max_error_rate=1.0,
    )
    done = jobs.finish(spec)
    # tests/coordinator/test_start.py has what is shown until then.
    assert "structured outputs: choice, compiled by xgrammar" in done.stderr
    found = jobs.rows_of(tmp_path / "out")
    assert [row["id"] for row in found] == list(range(12))
    for row, given in zip(found, rows, strict=True):
        assert row["num_output_tokens"] <= given["budget"]
        if row["id"] % 2:
            # Its prompt has shut the thinking: the structure begins at once.
            assert row["reasoning"] is None
            assert any(choice.startswith(row["text"]) for choice in CHOICES)
            assert (row["error_type"] is None) == (row["text"] in CHOICES)
        elif row["text"] is None:
            assert row["reasoning"] is not None
            assert row["error_type"] == "invalid_choice"
            cut = f": cut off after {row['num_output_tokens']} tokens" if row["finish_reason"] == "length" else ""
            why = f"(finish_reason {row['finish_reason']}{cut})"
            assert row["error_message"] == f"no text came after the reasoning {why}"
    thought = [row["reasoning"] for row in found if row["text"] is None]
    assert sum(not any(choice.startswith(each) for choice in CHOICES) for each in thought) >= 3  # as it pleased
    assert {row["text"] for row in found} & set(CHOICES)


@pytest.mark.slow
def test_each_row_has_its_own_fields_of_sampling(thinker: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A budget ends the thinking; a repetition ends the text, and a retry without it finds these rows."""
    stuck = {"logit_bias": {"11": 100}, "repetition_detection": {"max_pattern_size": 1, "min_count": 5}}
    own = [{"thinking": 0}, {"thinking": 4}, {"thinking": -1}, {}, stuck, {"allowed_token_ids": [20, 21]}]
    rows = [{"id": index, "prompt": f"So <think>hm {index}", **own[index % 6]} for index in range(18)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {name: name for name in ("logit_bias", "repetition_detection", "allowed_token_ids")}
    spec = jobs.spec_of(
        tmp_path,
        model={"name": str(thinker), "reasoning_parser": "deepseek_r1"},
        input={"path": str(tmp_path / "in.jsonl")},
        sampling={
            "temperature": 1.0,
            "max_tokens": 24,
            "ignore_eos": True,
            "logprobs": None,
            "columns": {"thinking_token_budget": "thinking", **columns},
        },
        engine={"max_model_len": 128, "max_num_seqs": 32},
        output={"keep_columns": []},
        parallel={"data_parallel_size": 1},
        scripted=None,
    )
    jobs.finish(spec)
    found = jobs.rows_of(tmp_path / "out")
    tokenizer = json.loads((thinker / "tokenizer.json").read_text())
    [end] = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "</think>"]
    for row, given in zip(found, rows, strict=True):
        assert row["error_type"] is None
        if (budget := given.get("thinking")) is not None and budget >= 0:
            assert row["token_ids"].index(end) <= budget
        elif given.get("logit_bias"):
            assert (row["token_ids"], row["finish_reason"]) == ([11] * 5, "repetition")
        elif given.get("allowed_token_ids"):
            assert set(row["token_ids"]) <= {20, 21}
        else:
            assert row["token_ids"][:5].count(end) == 0
    again = ("--retry", "finish_reason = 'repetition'", "--set", "sampling.repetition_detection={max_pattern_size: 0}")
    jobs.finish(spec, *again)
    for old, new in zip(found, jobs.rows_of(tmp_path / "out"), strict=True):
        if old["finish_reason"] == "repetition":
            assert (new["token_ids"], new["finish_reason"]) == ([11] * 24, "length")
        else:
            assert new == old
