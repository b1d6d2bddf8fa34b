"""Logprobs of a step's prompts that are copied from the device together, held against vLLM's copies one by one."""

import types
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from batchinf.engines.vllm import copies, worker


class Counting(copies.LogprobsTensors):  # type: ignore[misc]
    """LogprobsTensors that count their copies. On a CPU, vLLM's own copy returns the same tensors."""

    copies: list[int] = []  # noqa: RUF012

    def to_cpu_nonblocking(self) -> "Counting":
        self.copies.append(len(self.logprobs))
        return Counting(*(tensor.clone() for tensor in self[:3]))


def scores(num_tokens: int, width: int = 2) -> Counting:
    random = torch.Generator().manual_seed(num_tokens)
    token_ids = torch.randint(0, 1000, (num_tokens, width), generator=random, dtype=torch.int32)
    return Counting(token_ids, torch.rand(num_tokens, width, generator=random), token_ids[:, 0] % 7)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(copies, "LogprobsTensors", Counting)
    monkeypatch.setattr(Counting, "copies", [])
    return Counting.copies


def copied_by_vllm(found: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's AsyncOutput does with the dict of a step."""
    return {name: part.to_cpu_nonblocking() if part is not None else None for name, part in found.items()}


def joined(found: dict[str, Any]) -> dict[str, Any]:
    worker = types.SimpleNamespace(compute_prompt_logprobs=lambda *arguments, **named: found)
    copies.join_prompt_scores(types.SimpleNamespace(prompt_logprobs_worker=worker))
    return copied_by_vllm(worker.compute_prompt_logprobs("logits", hidden_states="states"))


@pytest.mark.parametrize("lengths", [[5, 1, 127], [3, 3], [128] * 128])
def test_prompts_of_a_step_are_copied_once(lengths: list[int], counted: list[int]) -> None:
    found = {f"request-{number}": scores(length) for number, length in enumerate(lengths)}
    own = joined(found)
    assert counted == [sum(lengths)]
    assert list(own) == list(found)
    for name, expected in copied_by_vllm(found).items():
        for tensor, theirs in zip(own[name][:3], expected[:3], strict=True):
            assert tensor.dtype == theirs.dtype and torch.equal(tensor, theirs)


@pytest.mark.parametrize(
    "found", [{}, {"a": scores(4)}, {"a": scores(4), "b": scores(4, 6)}, {"a": scores(4), "b": scores(5), "c": None}]
)
def test_prompts_that_cannot_be_joined_are_left_to_vllm(found: dict[str, Any], counted: list[int]) -> None:
    own = joined(found)
    there = {name: part for name, part in found.items() if part is not None}
    assert len(counted) == len(there) and own.keys() == found.keys()
    assert all(torch.equal(own[name].logprobs, part.logprobs) for name, part in there.items())


def test_a_worker_with_the_v2_runner_joins_them(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    found = {"a": scores(4), "b": scores(5)}
    extension = worker.RowsExtension()
    prompts = types.SimpleNamespace(compute_prompt_logprobs=lambda: found)
    extension.model_runner = types.SimpleNamespace(prompt_logprobs_worker=prompts)
    monkeypatch.setattr(worker, "_is_v2", lambda runner: True)
    monkeypatch.setattr(worker, "_install_kernels", lambda runner, ks: False)  # whether or not the kernels are used
    assert not extension.install_scores([1])
    copied_by_vllm(prompts.compute_prompt_logprobs())
    assert counted == [9]


def test_a_runner_without_prompt_logprobs_is_left_alone() -> None:
    copies.join_prompt_scores(types.SimpleNamespace())
    copies.join_prompt_scores(types.SimpleNamespace(prompt_logprobs_worker=None))
