"""The workloads that are measured, by name; sizes are parameters, so that a small version of each runs anywhere."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of `prompt_tokens` tokens in and `max_tokens` out (the end-of-sequence token is ignored).

    engine: vLLM's EngineArgs, for the job and its rivals alike. chunk_rows: what rival (c) gives to one call.
    """

    name: str
    shape: str = "llama-3.1-8b"
    num_rows: int = 8192
    prompt_tokens: int = 256
    max_tokens: int = 128
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | None = None
    log_normal: bool = False
    dtype: str = "bfloat16"
    quantization: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    chunk_rows: int = 1024

    @property
    def engine(self) -> dict[str, Any]:
        """Engine arguments as BASELINES of vLLM users have them: offline limits, no prefix cache."""
        return {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
        }

    def sampling(self) -> dict[str, Any]:
        """Sampling fields of a spec, which are SamplingParams' too."""
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": self.max_tokens, "ignore_eos": True}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        if self.stop is not None:
            fields["stop"] = [self.stop]
        return fields

    def sized(self, num_rows: int | None, shape: str | None) -> "Workload":
        """The same with other sizes."""
        return replace(self, num_rows=num_rows or self.num_rows, shape=shape or self.shape)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("plain"),
        Workload("top5", logprobs=5),
        Workload("top20", logprobs=20),
        Workload("stop", logprobs=5, stop="\u2603 never \u2603"),
        Workload("small-top20", shape="llama-3.2-1b", num_rows=32768, prompt_tokens=128, logprobs=20),
        Workload("tp2", logprobs=5, tensor_parallel_size=2),
        Workload("dp2", logprobs=5, data_parallel_size=2, num_rows=16384),
    )
}


def log_normal_lengths(num_rows: int, mean: float = 179.0, most: int = 1500, seed: int = 0) -> list[int]:
    """Output lengths as they come: log-normal with sigma 0.8, cut at `most`."""
    chance, sigma = random.Random(seed), 0.8
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, min(most, round(chance.lognormvariate(mu, sigma)))) for _ in range(num_rows)]
