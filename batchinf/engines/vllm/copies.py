"""Copies of the logprobs of a step's prompts from the GPU: one for all requests, where vLLM makes three for each.

In a trace (`benchmarks/kineto.py small-score`), a copy takes 16 µs of the engine process. A step that reads 128 short
prompts makes 384 copies. Compared with the source of 0.26.0 and 0.32.0. Versions with other names keep vLLM's copies.
"""

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
