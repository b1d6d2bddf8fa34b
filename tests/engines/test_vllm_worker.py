"""Raw logprobs of structured outputs are the model's own, not those after the grammar's mask."""

import json
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import MODEL
from transformers import AutoTokenizer

from batchinf.base.errors import RowFailed
from batchinf.records import Completion, Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of

pytest.importorskip("vllm")
from batchinf.engines.vllm.engine import VllmEngine
from batchinf.engines.vllm.worker import RowsExtension

LABELS = ["positive", "negative", "no opinion at all"]
TOP = 5


class Extension:
    """A user's own part in vLLM's workers."""


def start(mode: Any, **engine: Any) -> VllmEngine:
    spec = JobSpec(
        model={"name": str(MODEL)},
        input={"path": "x"},
        output={"path": "y"},
        sampling=labelled(0.0, mode),
        engine={"max_model_len": 512, **engine},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return VllmEngine(task_of(spec), str(MODEL), str(MODEL))


def labelled(temperature: float, mode: Any = "raw_logprobs") -> SamplingSpec:
    structure = {"choice": LABELS}
    return SamplingSpec(temperature=temperature, logprobs=TOP, logprobs_mode=mode, structured_outputs=structure)


def complete(engine: VllmEngine, requests: Sequence[Request]) -> list[Completion]:
    for request in requests:
        engine.add(request)
    found = {}
    while engine.num_unfinished():
        found.update({completion.request.row_index: completion for completion in engine.step()})
    return [found[request.row_index] for request in requests]


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_raw_scores_of_a_label_are_the_models_own(mode: Any, vllm_engine: VllmEngine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (MODEL.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines[::60]]
    free = SamplingSpec(temperature=0, logprobs=TOP)
    engine = start(mode)
    try:
        # Some have a structure and others have none, some are greedy and others are sampled.
        found = complete(
            engine,
            [Request(row, 0, ids, labelled(row % 2, mode), max_tokens=16, seed=row) for row, ids in enumerate(prompts)]
            + [Request(100 + row, 0, ids, free, max_tokens=16) for row, ids in enumerate(prompts)],
        )
    finally:
        engine.close()
    # Without structures: the prompt with the label behind it, scored, and what the model would have said.
    scored = SamplingSpec(temperature=0, prompt_logprobs=0)
    labels = [completion.token_ids.tolist() for completion in found[: len(prompts)]]
    own = complete(
        vllm_engine,
        [Request(row, 0, prompts[row] + ids, scored, max_tokens=1) for row, ids in enumerate(labels)]
        + [Request(100 + row, 0, ids, free, max_tokens=16) for row, ids in enumerate(prompts)],
    )
    for row, (prompt, label) in enumerate(zip(prompts, labels, strict=True)):
        stored, alone, freely = found[row].logprobs, own[row].prompt_logprobs, own[len(prompts) + row].logprobs
        assert stored is not None
        assert alone is not None
        assert freely is not None
        assert tokenizer.decode(label, skip_special_tokens=True) in LABELS
        expected, scores = alone.logprobs[len(prompt) - 1 :, 0], stored.logprobs
        if mode == "raw_logits":  # they lack a constant of each position
            scores = scores - scores[:, 1:2] + freely.logprobs[0, 1]
            assert np.abs(stored.logprobs[0] - scores[0]).max() > 0.1
            expected, scores = expected[:1], scores[:1]
        np.testing.assert_allclose(scores[:, 0], expected, atol=1e-4)
        np.testing.assert_allclose(scores[0, 1:], freely.logprobs[0, 1:], atol=1e-4)
        assert stored.token_ids[0, 1:].tolist() == freely.token_ids[0, 1:].tolist()
        assert stored.ranks[0] == 1 + np.count_nonzero(freely.logprobs[0, 1:] > expected[0]) or stored.ranks[0] > TOP
        assert expected[0] < -2
        same = found[len(prompts) + row]
        assert same.token_ids.tolist() == own[len(prompts) + row].token_ids.tolist()


def test_raw_logprobs_are_refused_where_they_cannot_be_had(vllm_engine: VllmEngine) -> None:
    engine = start("raw_logprobs", worker_extension_cls=f"{__name__}.Extension")
    try:
        request = Request(0, 0, [5, 6, 7], labelled(0.0), max_tokens=16)
        words = r"^vLLM \S+ as it is set here gives no raw .* set sampling\.logprobs_mode to processed_logprobs"
        for add in (engine.add, engine.warm_up):
            with pytest.raises(RowFailed, match=words):
                add(request)
        without = labelled(0.0).model_copy(update={"logprobs": None})
        assert len(complete(engine, [Request(0, 0, [5, 6, 7], without, max_tokens=16)])) == 1
    finally:
        engine.close()


def test_the_second_runner_masks_a_copy() -> None:
    import torch

    class Grammar:
        def apply_grammar_bitmask(self, logits: Any, batch: str, ids: list[str], mask: Any) -> None:
            assert (batch, ids) == ("batch", ["a"])
            logits[0, mask] = float("-inf")

    class Sampler:
        def sample(self, logits: Any, batch: str, *, return_logprobs: bool) -> Any:
            assert (batch, return_logprobs) == ("batch", True)
            return logits.argmax(dim=-1).tolist()

    class Runner(types.SimpleNamespace):
        pass

    Runner.__module__ = "vllm.v1.worker.gpu.model_runner"
    runner = Runner(structured_outputs_worker=Grammar(), sampler=Sampler(), speculative_config=None)
    extension = RowsExtension()
    extension.model_runner = runner
    assert extension.install_late_mask()
    logits = torch.tensor([[1.0, 3.0, 2.0], [3.0, 1.0, 2.0]])
    before = logits.clone()
    runner.structured_outputs_worker.apply_grammar_bitmask(logits, "batch", ["a"], [1])
    assert runner.sampler.sample(logits, "batch", return_logprobs=True) == [2, 0]
    assert torch.equal(logits, before)
    assert runner.sampler.sample(logits, "batch", return_logprobs=True) == [1, 0]
    # Logits of a step in which nothing was sampled: the mask is not for those of the next.
    runner.structured_outputs_worker.apply_grammar_bitmask(logits, "batch", ["a"], [1])
    assert runner.sampler.sample(before, "batch", return_logprobs=True) == [1, 0]
    runner.speculative_config = "ngram"
    assert not extension.install_late_mask()
