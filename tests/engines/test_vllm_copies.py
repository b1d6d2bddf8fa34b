"""Results of a step that are copied from the device together, held against vLLM's copies one by one."""

import types
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.pooler.special import DispatchPooler
from vllm.v1.worker import gpu_model_runner

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
    copies.join_vectors(types.SimpleNamespace(model=torch.nn.Linear(2, 2)))


class Pooler(torch.nn.Module):
    """A pooler of vLLM for one task: twice the states."""

    def get_supported_tasks(self) -> set[str]:
        return {"embed", "classify"}

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: Any) -> torch.Tensor:
        return hidden_states[: len(pooling_metadata.tasks)] * 2


class Metadata:
    """Of vLLM's PoolingMetadata what DispatchPooler reads."""

    pooling_cursor = None

    def __init__(self, tasks: list[str]) -> None:
        self.tasks = tasks

    def __getitem__(self, part: slice) -> "Metadata":
        return Metadata(self.tasks[part])


@pytest.mark.parametrize(
    ("tasks", "is_joined"), [(["embed"] * 3, True), (["embed", "classify", "embed"], False), ([], False)]
)
def test_vectors_of_one_task_are_one_tensor(tasks: list[str], is_joined: bool) -> None:
    pooler = DispatchPooler({"embed": Pooler(), "classify": Pooler()})  # type: ignore[dict-item]
    states = torch.rand(3, 4)
    theirs = pooler(states, Metadata(tasks))
    copies.join_vectors(types.SimpleNamespace(model=types.SimpleNamespace(pooler=pooler)))
    own = pooler(states, Metadata(tasks))
    assert isinstance(own, torch.Tensor) is is_joined
    assert len(own) == len(theirs) == len(tasks)
    assert all(torch.equal(one, other) for one, other in zip(own, theirs, strict=True))


def test_a_task_that_the_model_has_not_is_left_to_vllm() -> None:
    pooler = DispatchPooler({"embed": Pooler()})  # type: ignore[dict-item]
    copies.join_vectors(types.SimpleNamespace(model=types.SimpleNamespace(pooler=pooler)))
    with pytest.raises(ValueError, match="Unsupported task"):
        pooler(torch.rand(1, 4), Metadata(["classify"]))


def vllms_own_copy() -> Any:
    """An engine that ran in this process may have installed ours."""
    found: Any = gpu_model_runner._copy_pooler_output_to_cpu
    return found.__closure__[0].cell_contents if found.__module__ == copies.__name__ else found


def test_vectors_are_copied_whole_if_some_prompts_are_not_finished() -> None:
    calls: list[int] = []

    def theirs(raw_pooler_output: Any, finished_mask: list[bool]) -> list[Any]:
        calls.append(len(finished_mask))
        copied_apart: list[Any] = vllms_own_copy()(raw_pooler_output, finished_mask)
        return copied_apart

    copied, vectors = copies.all_vectors(theirs), torch.rand(3, 4)
    for mask in ([True, False, True], [True, True, True], [False, True, False]):
        own = copied(raw_pooler_output=vectors, finished_mask=mask)
        expected = theirs(vectors, mask)
        calls.clear()
        assert [vector is not None for vector in own] == mask
        assert all(one is other or torch.equal(one, other) for one, other in zip(own, expected, strict=True))
    # vLLM's own code has all other cases.
    assert copied(vectors, [False] * 3) == [None] * 3
    assert torch.equal(copied([torch.ones(2), None], [True, True])[0], torch.ones(2))
    with pytest.raises(ValueError, match="does not match"):
        copied(vectors, [True] * 2)
    assert calls == [3, 2, 2]


def test_a_pooling_worker_installs_that_once(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = vllms_own_copy()
    monkeypatch.setattr(gpu_model_runner, "_copy_pooler_output_to_cpu", theirs)
    for _ in range(2):
        pooler = DispatchPooler({"embed": Pooler()})  # type: ignore[dict-item]
        copies.join_vectors(types.SimpleNamespace(model=types.SimpleNamespace(pooler=pooler)))
        assert gpu_model_runner._copy_pooler_output_to_cpu is not theirs
        assert vllms_own_copy() is theirs
