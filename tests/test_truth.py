"""The comparison of `benchmarks/truth.py` accepts a model's own logprobs and finds wrong ones."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import jobs

PROMPTS = ([300, 2000, 3000], [1900, 2500, 4000, 258, 700, 1800, 3500])
OUTPUT = [2222, 3333, 4000, 1777]


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(jobs.ROOT / "benchmarks"))
    return importlib.import_module("truth")


def row_of(model: Any, prompt: list[int]) -> dict[str, Any]:
    """A job's row, from a run of the model over one sequence."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt + OUTPUT])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    top = logprobs.topk(2)
    return {
        "prompt_token_ids": prompt,
        "token_ids": OUTPUT,
        "logprobs": [float(each[token]) for each, token in zip(logprobs, OUTPUT, strict=True)],
        "top_token_ids": top.indices.tolist(),
        "top_logprobs": top.values.tolist(),
    }


def distance(truth: Any, reference: Any, rows: list[dict[str, Any]]) -> Any:
    stored = [truth.stored_logprobs(row, is_text=False) for row in rows]
    expected = reference.logprobs([(one.token_ids, one.tokens) for one in stored])
    return truth.Distance.of(truth.row_distances([one.logprobs for one in stored], expected))


def test_wrong_logprobs_are_far(truth: Any, tmp_path: pathlib.Path) -> None:
    folder = truth.make_architecture(truth.ARCHITECTURES["llama"], tmp_path / "model", "float32")
    reference = truth.Reference(folder, "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [row_of(model, prompt) for prompt in PROMPTS]
    right = distance(truth, reference, rows)
    assert right.worst < 1e-4 < reference.reach
    noise = truth.Distance(0.01, 0.02)
    assert right.is_near(noise)
    wrong = {
        "one position late": {"logprobs": rows[1]["logprobs"][1:] + rows[1]["logprobs"][:1]},
        "the most likely tokens alone": {"top_logprobs": [[b, a] for a, b in rows[1]["top_logprobs"]]},
        "another prompt": {"prompt_token_ids": [PROMPTS[1][0] + 1, *PROMPTS[1][1:]]},
        "not a number": {"logprobs": [float("nan"), *rows[1]["logprobs"][1:]]},
    }
    for change in wrong.values():
        assert not distance(truth, reference, [rows[0], {**rows[1], **change}]).is_near(noise)


def test_limits(truth: Any) -> None:
    noise = truth.Distance.of([0.01, 0.03])
    assert np.isclose(noise.mean, 0.02) and noise.worst == 0.03
    assert truth.Distance(0.0299, 0.0749).is_near(noise)
    assert not truth.Distance(0.0301, 0.03).is_near(noise)
    assert not truth.Distance(0.02, 0.0751).is_near(noise)
    assert truth.verdict_of(noise, noise, reach=2.0) == "near"
    assert truth.verdict_of(truth.Distance(0.04, 0.04), noise, reach=2.0) == "FAR"
    assert truth.verdict_of(noise, noise, reach=0.05).startswith("no verdict")
