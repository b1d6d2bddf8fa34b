"""The workloads of `run.py`, by name. Sizes are parameters, so that a small version of each runs anywhere."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

BLOCK_TOKENS = 32  # of the KV cache; vLLM's CPU build refuses 16
STARTS_S = {"cold": 75.0, "warm": 45.0}  # an engine of the 8B shape on an H200, without and with its compile cache


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with `prompt_tokens` tokens in and `max_tokens` out (the end-of-sequence token is ignored).

    slow_rows: rows for the rivals `defaults` and `chunks`, which are several times slower. rivals: the kinds to compare
    with. h200: tokens a second measured or expected on one H200, only for planning; of the output, or of the prompt if
    only one token comes out. chunk_rows: rows for one call of the rival `chunks`. order: the job's `input.order`. task:
    the job's; a scoring task scores each prompt. scripted_step_s: run on the scripted engine, with at least this time a
    step. prefix_tokens: the beginning of the prompt that `rows_per_prefix` rows share, shuffled. The KV cache then
    holds a third of all prefixes. own_engine: engine arguments of job and rivals in place of those that follow from the
    other fields. job_engine: of the job alone. job_parallel: more fields of the job's section `parallel`.
    """

    name: str
    task: str = "generate"
    shape: str = "llama-3.1-8b"
    num_rows: int = 8192
    slow_rows: int = 2048
    prompt_tokens: int = 256
    max_tokens: int = 128
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | None = None
    log_normal: bool = False
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int = 2048
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    chunk_rows: int = 1024
    order: str = "input"
    scripted_step_s: float | None = None
    prefix_tokens: int = 0
    rows_per_prefix: int = 8
    own_engine: dict[str, Any] | None = None
    job_engine: dict[str, Any] | None = None
    job_parallel: dict[str, Any] = field(default_factory=dict)
    rivals: tuple[str, ...] = ("ceiling",)
    h200: Mapping[str, float] = field(default_factory=dict)

    @property
    def engine(self) -> dict[str, Any]:
        """EngineArgs for job and rivals: offline limits, and a prefix cache only for workloads with prefixes."""
        if self.own_engine is not None:
            return self.own_engine
        arguments: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": bool(self.prefix_tokens),
        }
        if self.prefix_tokens:
            num_tokens = self.num_rows // self.data_parallel_size // self.rows_per_prefix * self.prefix_tokens // 3
            arguments |= {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": num_tokens // BLOCK_TOKENS}
        return arguments if self.kv_cache_dtype is None else {**arguments, "kv_cache_dtype": self.kv_cache_dtype}

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens count, and not output tokens."""
        return self.max_tokens == 1

    @property
    def is_embedding(self) -> bool:
        """Whether the job embeds its prompts."""
        return self.task == "embed"

    def sampling(self) -> dict[str, Any]:
        """Sampling fields of a spec, which are also fields of SamplingParams."""
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": self.max_tokens, "ignore_eos": True}
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        if self.stop is not None:
            fields["stop"] = [self.stop]
        return fields

    def budgets(self) -> list[int] | None:
        """Output tokens of each row, if they differ. A rival with fewer rows uses the first ones."""
        return log_normal_lengths(self.num_rows, most=self.max_tokens) if self.log_normal else None

    def rows_of(self, kind: str) -> int:
        """Number of rows that a rival runs."""
        return min(self.num_rows, self.slow_rows) if kind in ("defaults", "chunks") else self.num_rows

    def num_tokens(self, kind: str) -> int:
        """Number of tokens that count, of the job or a rival."""
        num_rows = self.rows_of(kind)
        if self.is_scoring:
            return num_rows * self.prompt_tokens
        budgets = self.budgets()
        return sum(budgets[:num_rows]) if budgets else num_rows * self.max_tokens

    def sized(self, num_rows: int | None, shape: str | None, replicas: int | None = None) -> "Workload":
        """The workload with other sizes. replicas: their number; each has as many rows as before."""
        sized = replace(self, num_rows=num_rows or self.num_rows, shape=shape or self.shape)
        if num_rows:
            sized = replace(sized, slow_rows=min(num_rows, self.slow_rows))
        if replicas:
            rows = sized.num_rows // sized.data_parallel_size * replicas
            rivals = self.rivals if replicas == 1 else ()  # the run with one replica measures the rivals
            name = f"{self.name}-dp{replicas}"
            sized = replace(sized, name=name, data_parallel_size=replicas, num_rows=rows, rivals=rivals)
        return sized


_TOP5 = {"batchinf": 11897, "ceiling": 12039, "defaults": 6626, "chunks": 6000}
_TOP20 = {"batchinf": 11668, "ceiling": 11802, "defaults": 3286, "chunks": 3000}
_SMALL = {"batchinf": 45203, "ceiling": 59143}
_SCORE = {"batchinf": 38300, "ceiling": 42660, "raw": 38800, "defaults": 16357}
_LOG_NORMAL = {"batchinf": 12500, "ceiling": 12650, "chunks": 6500}
_FP8 = {"batchinf": 24000, "ceiling": 24388}
_PREFIXES: dict[str, Any] = {
    "num_rows": 18432, "prompt_tokens": 576, "prefix_tokens": 512, "max_tokens": 16, "max_model_len": 1024,
}  # fmt: skip
_SEVENTY: dict[str, Any] = {
    "shape": "llama-3.3-70b", "prompt_tokens": 128, "quantization": "fp8", "tensor_parallel_size": 2, "logprobs": 5,
}  # fmt: skip

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("plain", h200=_TOP5),
        Workload("top5", logprobs=5, slow_rows=4096, h200=_TOP5),
        Workload("top20", logprobs=20, rivals=("ceiling", "defaults", "chunks"), h200=_TOP20),
        Workload("stop", logprobs=5, stop="\u2603 never \u2603", h200=_TOP5),
        Workload("small-plain", shape="llama-3.2-1b", num_rows=32768, prompt_tokens=128, h200=_SMALL),
        Workload("small-top20", shape="llama-3.2-1b", num_rows=32768, prompt_tokens=128, logprobs=20, h200=_SMALL),
        Workload(
            "score0", num_rows=2560, slow_rows=2560, prompt_tokens=1024, max_tokens=1, prompt_logprobs=0,
            rivals=("raw",), h200=_SCORE,
        ),
        Workload(
            "score5", num_rows=2560, slow_rows=1024, prompt_tokens=1024, max_tokens=1, prompt_logprobs=5,
            rivals=("raw", "defaults"), h200=_SCORE,
        ),
        # Task `score` needs the logprob of each token and of the likeliest one.
        Workload(
            "score-task", task="score", num_rows=2560, prompt_tokens=1024, max_tokens=1, prompt_logprobs=1,
            rivals=("raw",), h200=_SCORE,
        ),
        # 128-token texts for a small scorer and a small embedder, as vLLM comes.
        Workload(
            "small-score", task="score", shape="qwen3-0.6b", num_rows=65536, prompt_tokens=128, max_tokens=1,
            prompt_logprobs=1, own_engine={}, rivals=("raw",), h200={"batchinf": 130000, "raw": 130000},
        ),
        Workload(
            "small-embed", task="embed", shape="qwen3-0.6b", num_rows=131072, prompt_tokens=128, max_tokens=1,
            own_engine={}, rivals=("embed",), h200={"batchinf": 253000, "embed": 247000},
        ),
        # The lengths are a column of the input, which the job reads with `max_tokens: {column: max_tokens}`.
        Workload(
            "lognormal", num_rows=6000, slow_rows=6000, prompt_tokens=128, max_tokens=1500, logprobs=5,
            log_normal=True, order="longest", rivals=("ceiling", "chunks"), h200=_LOG_NORMAL,
        ),
        Workload(
            "lognormal-input", num_rows=6000, slow_rows=6000, prompt_tokens=128, max_tokens=1500, logprobs=5,
            log_normal=True, rivals=(), h200={"batchinf": _LOG_NORMAL["batchinf"]},
        ),
        # 18,432 prompts of 576 tokens have 2,304 different prefixes of 512 tokens. The cache holds 768 of them.
        Workload("prefix", order="prefix", rivals=("sorted",), h200={"batchinf": 4500, "sorted": 4600}, **_PREFIXES),
        Workload("prefix-input", rivals=(), h200={"batchinf": 1300}, **_PREFIXES),
        Workload(
            "fp8", num_rows=16384, prompt_tokens=128, quantization="fp8", kv_cache_dtype="fp8", max_num_seqs=2048,
            h200=_FP8,
        ),
        Workload(
            "fp8-top5", num_rows=16384, prompt_tokens=128, quantization="fp8", kv_cache_dtype="fp8", max_num_seqs=2048,
            logprobs=5, h200=_FP8,
        ),
        Workload("tp2", logprobs=5, tensor_parallel_size=2, h200={"batchinf": 19315, "ceiling": 19862}),
        Workload("dp2", logprobs=5, data_parallel_size=2, num_rows=16384, rivals=(), h200={"batchinf": 23476}),
        Workload("seventy-one", num_rows=3072, rivals=(), h200={"batchinf": 5980}, **_SEVENTY),
        # A guess: no run on four devices has been measured.
        Workload("seventy", num_rows=6144, data_parallel_size=2, rivals=(), h200={"batchinf": 11500}, **_SEVENTY),
    )
}  # fmt: skip


def log_normal_lengths(num_rows: int, mean: float = 179.0, most: int = 1500, seed: int = 0) -> list[int]:
    """Output lengths: log-normal with sigma 0.8, at most `most`."""
    chance, sigma = random.Random(seed), 0.8
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, min(most, round(chance.lognormvariate(mu, sigma)))) for _ in range(num_rows)]
