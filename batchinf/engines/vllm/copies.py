"""Copies of a step's results from the GPU: one for all requests, where vLLM makes one or three for each.

In a trace (`benchmarks/kineto.py small-score`), a copy takes 16 µs of the engine process. A step that reads 128 short
prompts makes 384 copies for logprobs of prompts, or 128 for vectors. Compared with the source of 0.26.0 and 0.32.0.
`join_vectors` was tested in the V1 runner of 0.32.0. Versions with other names keep vLLM's copies.
"""

import importlib
from typing import Any

import torch

from batchinf.engines.vllm.names import optional

LogprobsTensors: Any = optional("vllm.v1.outputs", "LogprobsTensors", "logprobs of prompts are copied one by one")


def join_prompt_scores(runner: Any) -> None:
    """Let the V2 runner copy the logprobs of all prompts of a step together."""
    worker: Any = getattr(runner, "prompt_logprobs_worker", None)
    theirs = getattr(worker, "compute_prompt_logprobs", None)
    if theirs is None or not hasattr(LogprobsTensors, "to_cpu_nonblocking"):
        return

    def compute_prompt_logprobs(*arguments: Any, **named: Any) -> dict[str, Any]:
        found: dict[str, Any] = theirs(*arguments, **named)
        if len(found) < 2 or any(part is None for part in found.values()):
            return found
        if len({(part.logprobs.device, part.logprobs.shape[1]) for part in found.values()}) > 1:
            return found
        joined = _Joined(list(found.values()))
        return {name: _Part(joined, index) for index, name in enumerate(found)}

    worker.compute_prompt_logprobs = compute_prompt_logprobs


class _Joined:
    """LogprobsTensors of several prompts in one. Like vLLM, it holds the tensors on the GPU until they are copied."""

    def __init__(self, parts: list[Any]) -> None:
        self._lengths = [len(part.logprobs) for part in parts]
        self._all = LogprobsTensors(
            *(torch.cat(tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
        )
        self._parts: list[Any] = []

    def part(self, index: int) -> Any:
        """In the host's memory, when the copy has ended. The first call starts the copy."""
        if not self._parts:
            tensors = self._all.to_cpu_nonblocking()[:3]
            split = (tensor.split(self._lengths) for tensor in tensors)
            self._parts = [LogprobsTensors(*each) for each in zip(*split, strict=True)]
        return self._parts[index]


class _Part:
    """Stands for the LogprobsTensors of one prompt. vLLM only calls its `to_cpu_nonblocking`."""

    def __init__(self, joined: _Joined, index: int) -> None:
        self._joined, self._index = joined, index

    def to_cpu_nonblocking(self) -> Any:
        return self._joined.part(self._index)


_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"


def copy_all_vectors() -> None:
    """Let the V1 runner copy all vectors of a step, also those of prompts that are not finished.

    Otherwise vLLM sends the places of the finished ones to the GPU, and waits until the GPU has them. With asynchronous
    scheduling, the next step would be prepared only after that. Vectors of unfinished prompts are not used.
    """
    try:
        module: Any = importlib.import_module(_V1_RUNNER)
    except ImportError:
        return
    theirs = getattr(module, "_copy_pooler_output_to_cpu", None)
    if theirs is not None and theirs.__module__ != __name__:
        module._copy_pooler_output_to_cpu = all_vectors(theirs)


def all_vectors(theirs: Any) -> Any:
    """Replaces `_copy_pooler_output_to_cpu`, which is called with these names. Calls `theirs` for other results."""

    def copied(raw_pooler_output: Any, finished_mask: list[bool]) -> list[Any]:
        is_joined = isinstance(raw_pooler_output, torch.Tensor) and len(raw_pooler_output) == len(finished_mask)
        if not is_joined or not any(finished_mask):
            copies: list[Any] = theirs(raw_pooler_output=raw_pooler_output, finished_mask=finished_mask)
            return copies
        vectors = raw_pooler_output.to("cpu", non_blocking=True)
        return [vector if is_finished else None for vector, is_finished in zip(vectors, finished_mask, strict=True)]

    return copied


def join_vectors(runner: Any) -> None:
    """Let a runner copy the vectors of all requests of a step together, if all are for the same pooling task.

    vLLM's pooler makes a list of one tensor for each request, as requests could be for different tasks.
    """
    pooler: Any = getattr(getattr(runner, "model", None), "pooler", None)
    of_task = getattr(pooler, "poolers_by_task", None)
    if of_task is None or type(pooler).__name__ != "DispatchPooler":
        return
    theirs = pooler.forward

    def forward(hidden_states: Any, pooling_metadata: Any) -> Any:
        tasks = set(pooling_metadata.tasks)
        alone = of_task[next(iter(tasks))] if len(tasks) == 1 and tasks <= of_task.keys() else theirs
        return alone(hidden_states, pooling_metadata)

    pooler.forward = forward
    copy_all_vectors()
