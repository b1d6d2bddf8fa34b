"""Logprobs of the prompts of a step, sent as one and split in the front end, held against those sent one by one."""

import random
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from test_vllm_score import STORY, score
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from batchinf.engines.vllm.scheduling import joined
from batchinf.engines.vllm.worker import RowsExtension, join_results

if TYPE_CHECKING:
    from batchinf.engines.vllm.engine import VllmEngine


def scores(num_rows: int, width: int = 2, dtype: torch.dtype = torch.float32) -> LogprobsTensors:
    token_ids = torch.randint(0, 100_000, (num_rows, width), dtype=torch.int32)
    return LogprobsTensors(token_ids, torch.randn(num_rows, width).to(dtype), token_ids[:, 0] % 7)


def message(parts: list[LogprobsTensors | None]) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(str(number), [number], None, part) for number, part in enumerate(parts)]


def sent(outputs: list[EngineCoreOutput]) -> list[Any]:
    """The outputs after vLLM has packed and unpacked them."""
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    decoded: list[Any] = MsgpackDecoder(EngineCoreOutputs).decode([bytearray(part) for part in encoded]).outputs
    return decoded


def are_equal(own: list[EngineCoreOutput], theirs: list[EngineCoreOutput]) -> bool:
    assert [output.request_id for output in own] == [output.request_id for output in theirs]
    pairs = [(a.new_prompt_logprobs_tensors, b.new_prompt_logprobs_tensors) for a, b in zip(own, theirs, strict=True)]
    return all(
        (a is None and b is None)
        or (a[3] is None and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=True)))
        for a, b in pairs
    )


@pytest.mark.parametrize("seed", range(20))
def test_each_request_gets_its_own(seed: int) -> None:
    choose = random.Random(seed)
    width = choose.choice([1, 2, 21])
    parts = [
        scores(choose.randint(1, 200), width) if choose.random() < 0.7 else None for _ in range(choose.randint(2, 90))
    ]
    together, alone = message(parts), message(parts)
    joined.join_scores(together)
    having = [output for output in together if output.new_prompt_logprobs_tensors is not None]
    assert len(having) == min(1, len([part for part in parts if part is not None]))
    arrived = sent(together)
    joined.split(arrived)
    assert are_equal(arrived, sent(alone))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [None, None],
        [None, scores(5), None],
        [scores(5), scores(5, width=3)],
        [scores(5), scores(5, dtype=torch.float16)],
        [scores(5), scores(5)._replace(cu_num_generated_tokens=[0])],
        [scores(400, width=8000), scores(400, width=8000)],  # rows of a vocabulary
    ],
)
def test_others_are_sent_as_vllm_sends_them(parts: list[LogprobsTensors | None]) -> None:
    outputs = message(parts)
    joined.join_scores(outputs)
    assert all(output.new_prompt_logprobs_tensors is part for output, part in zip(outputs, parts, strict=True))
    if not any(part is not None and part[3] for part in parts):
        joined.split(outputs)
        assert all(output.new_prompt_logprobs_tensors is part for output, part in zip(outputs, parts, strict=True))


def vectors(parts: list[torch.Tensor | None]) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(str(number), [], pooling_output=part) for number, part in enumerate(parts)]


@pytest.mark.parametrize("seed", range(10))
def test_each_request_gets_its_own_vector(seed: int) -> None:
    choose = random.Random(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    parts = [torch.randn(300).to(dtype) if choose.random() < 0.8 else None for _ in range(choose.randint(2, 90))]
    together = vectors(parts)
    joined.join_vectors(together)
    assert [output.pooling_output is not None for output in together].count(True) == 1
    arrived = sent(together)
    joined.split(arrived)
    assert [output.new_token_ids for output in arrived] == [[] for _ in parts]
    for output, part in zip(arrived, parts, strict=True):
        assert (output.pooling_output is None) == (part is None)
        assert part is None or (part.dtype == output.pooling_output.dtype and torch.equal(part, output.pooling_output))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [None, torch.randn(4), None],
        [torch.randn(4), torch.randn(5)],
        [torch.randn(4), torch.randn(4).half()],
        [torch.randn(3, 4), torch.randn(3, 4)],  # of all positions
        [torch.randn(0), torch.randn(4)],  # of a request that was aborted
        [torch.randn(1 << 21), torch.randn(1 << 21), torch.randn(1 << 21)],
    ],
)
def test_other_vectors_are_sent_as_vllm_sends_them(parts: list[torch.Tensor | None]) -> None:
    outputs = vectors(parts)
    joined.join_vectors(outputs)
    joined.split(outputs)
    assert all(output.pooling_output is part for output, part in zip(outputs, parts, strict=True))


def test_a_front_end_splits_before_it_reads() -> None:
    outputs = message([scores(3), scores(4)])
    joined.join_scores(outputs)
    seen: list[Any] = []
    process_outputs = joined.splitting(lambda *given, **named: seen.append((given, named)) or "done")
    assert process_outputs(outputs, 1.5, iteration_stats=None) == "done"
    assert seen == [((outputs, 1.5), {"iteration_stats": None})]
    assert [len(output.new_prompt_logprobs_tensors.logprobs) for output in outputs] == [3, 4]  # type: ignore[union-attr]


def test_a_worker_without_a_scheduler_in_its_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with tensor parallelism, where each worker has a process of its own."""
    monkeypatch.setattr(joined, "_schedulers", {})
    worker = RowsExtension()
    worker.vllm_config = types.SimpleNamespace(instance_id="1")
    front = types.SimpleNamespace(process_outputs=print)
    engine = types.SimpleNamespace(
        output_processor=front,
        collective_rpc=lambda name, args: [getattr(worker, name)(*args)],
        vllm_config=types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(worker_extension_cls="batchinf.engines.vllm.worker.RowsExtension"),
            model_config=types.SimpleNamespace(max_model_len=500),
        ),
    )
    join_results(engine)
    assert front.process_outputs is print
    other, own = (
        types.SimpleNamespace(joins_results=False, vllm_config=types.SimpleNamespace(instance_id=name)) for name in "21"
    )
    monkeypatch.setattr(joined, "_schedulers", {"2": other})
    join_results(engine)
    assert front.process_outputs is print
    monkeypatch.setattr(joined, "_schedulers", {"2": other, "1": own})
    join_results(engine)
    assert front.process_outputs is not print and own.joins_results and not other.joins_results
    front.process_outputs = print
    monkeypatch.setattr(joined, "is_right", lambda *given, **named: False)
    join_results(engine)
    assert front.process_outputs is print


def test_real_texts_scored_together_have_the_scores_of_each_alone(
    vllm_engine: "VllmEngine", monkeypatch: pytest.MonkeyPatch
) -> None:
    num_joined: list[int] = []
    theirs = joined.split

    def split(outputs: list[Any]) -> None:
        before = [output.new_prompt_logprobs_tensors is not None for output in outputs].count(True)
        theirs(outputs)
        num_joined.append([output.new_prompt_logprobs_tensors is not None for output in outputs].count(True) - before)

    monkeypatch.setattr(joined, "split", split)
    rows = [{"text": STORY[: 20 + 3 * number]} for number in range(12)]
    together = score(vllm_engine, rows, {"text_column": "text"})
    assert sum(num_joined) >= 6
    num_joined.clear()
    for row, expected in zip(rows, together, strict=True):
        alone = score(vllm_engine, [row], {"text_column": "text"})[0]
        assert alone["token_ids"] == expected["token_ids"] and alone["ranks"] == expected["ranks"]
        np.testing.assert_allclose(alone["logprobs"], expected["logprobs"], atol=1e-4)
    assert not any(num_joined)
