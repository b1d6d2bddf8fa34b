"""The workloads of `run.py`, by name. Sizes are parameters, so that a small version of each runs anywhere."""

import argparse
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

BLOCK_TOKENS = 32  # of the KV cache; vLLM's CPU build refuses 16
STARTS_S = {"cold": 90.0, "warm": 40.0}  # an engine of the 8B shape on an H200, without and with its compile cache
# Sampling fields that the rival `ceiling` does without. The end of sequence has its own rule: see `Workload.sampling`.
OUTPUTS = ("logprobs", "prompt_logprobs", "stop", "structured_outputs")
# A string of a fixed length keeps every row under the grammar's mask for about as many tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "label": {"enum": ["positive", "negative", "neutral", "unclear"]},
        "stars": {"enum": [1, 2, 3, 4, 5]},
        "reason": {"type": "string", "minLength": 80, "maxLength": 80},
    },
    "required": ["label", "stars", "reason"],
    "additionalProperties": False,
}


CHOICES = ["positive", "negative", "neutral", "unclear", "spam", "question", "complaint", "praise"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows with `prompt_tokens` tokens in and `max_tokens` out (the end-of-sequence token is ignored).

    slow_rows: rows for the rivals in `SLOW`, which are several times slower. rivals: the kinds to compare with. h200:
    tokens a second measured on one H200, by kind, only for planning. counts_prompts: tokens a second are of the
    prompts, not of the outputs. chunk_rows: rows for one call of the rival `chunks`. order: the job's `input.order`.
    task: the job's; a scoring task scores each prompt. scripted_step_s: run on the scripted engine, with at least this
    time a step. prefix_tokens: the beginning of the prompt that `rows_per_prefix` rows share, shuffled. The KV cache
    then holds a third of all prefixes. ends: an end-of-sequence token ends a row. structure: field and value of
    `structured_outputs`; a row then has about `mean_tokens` tokens. log_normal: rows have different lengths, at most
    `max_tokens`, with the mean `mean_tokens`, or 179. system_tokens: of the system prompt that all rows share; each
    prompt is then a user message. first_tokens: of the first prompt, which may be longer than the others.
    num_labels: classes of a classifier. lora_rank: of one adapter for all rows. own_engine: engine arguments of job and
    rivals in place of those that follow from the other fields; an empty one leaves them to vLLM and batchinf.
    job_engine: of the job alone. job_parallel: more fields of the job's section `parallel`.
    """

    name: str
    task: str = "generate"
    shape: str = "llama-3.1-8b"
    num_rows: int = 8192
    slow_rows: int = 2048
    prompt_tokens: int = 256
    max_tokens: int = 128
    mean_tokens: int | None = None
    n: int = 1
    temperature: float = 0.0
    ends: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | None = None
    structure: tuple[str, Any] | None = None
    log_normal: bool = False
    counts_prompts: bool = False
    system_tokens: int = 0
    first_tokens: int = 0
    num_labels: int = 0
    lora_rank: int = 0
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
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
    def rival_engine(self) -> dict[str, Any]:
        """Arguments of `LLM` for the rivals, except for the model and `max_logprobs`."""
        pools = {"embed": "embed", "classify": "classify"}.get(self.task)
        return {
            "load_format": "dummy",
            "dtype": self.dtype,
            "quantization": self.quantization,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            **({"runner": "pooling", "convert": pools} if pools else {}),
            **({"enable_lora": True, "max_lora_rank": self.lora_rank} if self.lora_rank else {}),
            **self.engine,
        }

    @property
    def num_devices(self) -> int:
        """Devices that the job uses."""
        return self.num_rival_devices * self.data_parallel_size

    @property
    def num_rival_devices(self) -> int:
        """Devices that a rival uses, which is one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def model_name(self) -> str:
        """The name of the model's folder."""
        return f"{self.shape}-{self.num_labels}-labels" if self.num_labels else self.shape

    def call_of(self, kind: str) -> str:
        """How a rival calls vLLM. The tuned one makes the fastest call that does the workload's work."""
        if kind != "tuned":
            return kind
        return {"embed": "embed", "classify": "classify", "score": "raw"}.get(self.task, "ceiling")

    def sampling(self, kind: str = "") -> dict[str, Any]:
        """Sampling fields of a spec or a rival, which are also fields of SamplingParams."""
        fields: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, "ignore_eos": True}
        if self.n > 1:
            fields["n"] = self.n
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.prompt_logprobs
        if self.stop is not None:
            fields["stop"] = [self.stop]
        if self.structure is not None:
            fields["structured_outputs"] = dict([self.structure])
        if self.call_of(kind) in ("ceiling", "sorted"):
            fields = {name: value for name, value in fields.items() if name not in OUTPUTS}
        # A grammar ends a row with the end-of-sequence token.
        if self.ends or "structured_outputs" in fields:
            fields["ignore_eos"] = False
        return fields

    def budgets(self) -> list[int] | None:
        """Output tokens of each row, if they differ. A rival with fewer rows uses the first ones."""
        if not self.log_normal:
            return None
        return log_normal_lengths(self.num_rows, self.mean_tokens or 179.0, self.max_tokens)

    def rows_of(self, kind: str) -> int:
        """Number of rows that a rival runs."""
        return min(self.num_rows, self.slow_rows) if kind in SLOW else self.num_rows

    def num_tokens(self, kind: str) -> int:
        """Number of tokens that count, of the job or a rival."""
        num_rows = self.rows_of(kind)
        if self.counts_prompts:
            return num_rows * self.prompt_tokens
        budgets = self.budgets()
        each = self.mean_tokens if self.mean_tokens and "structured_outputs" in self.sampling(kind) else self.max_tokens
        return sum(budgets[:num_rows]) if budgets else num_rows * self.n * each

    def seconds(self, kind: str) -> tuple[float, bool]:
        """How long the job or a rival runs on an H200 beside its start, and whether that is a guess."""
        num_tokens = self.num_tokens(kind)
        if kind in self.h200:
            return num_tokens / self.h200[kind], False
        job = self.h200.get("batchinf", 10_000.0)
        return num_tokens / (job * SHARES.get(kind, 1.0)), True

    def sized(
        self,
        num_rows: int | None,
        shape: str | None,
        replicas: int | None = None,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> "Workload":
        """The workload with other sizes. replicas: their number; each has as many rows as before."""
        sized = replace(
            self,
            num_rows=num_rows or self.num_rows,
            shape=shape or self.shape,
            prompt_tokens=prompt_tokens or self.prompt_tokens,
            max_tokens=max_tokens or self.max_tokens,
        )
        if num_rows:
            sized = replace(sized, slow_rows=min(num_rows, self.slow_rows))
        if replicas:
            rows = sized.num_rows // sized.data_parallel_size * replicas
            rivals = self.rivals if replicas == 1 else ()  # the run with one replica measures the rivals
            name = f"{self.name}-dp{replicas}"
            h200 = {kind: speed * replicas / sized.data_parallel_size for kind, speed in self.h200.items()}
            parallel = {key: value for key, value in self.job_parallel.items() if key != "data_parallel_size"}
            sized = replace(sized, name=name, data_parallel_size=replicas, num_rows=rows, rivals=rivals, h200=h200)
            sized = replace(sized, job_parallel=parallel)
        return sized


# Rivals in the order of running, the fastest first. Those in SLOW run `slow_rows` rows.
KINDS = (
    "raw", "flat", "embed", "classify", "ceiling", "tuned", "sorted", "defaults", "chunks", "run-batch",
)  # fmt: skip
SLOW = ("defaults", "chunks", "run-batch")
# Where a kind is not measured: its guessed speed, as a share of the job's.
SHARES = {"tuned": 1.03, "flat": 0.95, "defaults": 0.35, "chunks": 0.3, "run-batch": 0.15}

_TOP5 = {"batchinf": 11897, "ceiling": 12039, "defaults": 6626, "chunks": 6000}
_TOP20 = {"batchinf": 11668, "ceiling": 11802, "flat": 11288, "tuned": 11906, "defaults": 3286, "chunks": 3000}
_SMALL = {"batchinf": 45203, "ceiling": 59143}
_SCORE = {"batchinf": 38300, "ceiling": 42660, "raw": 38800, "defaults": 16357}
_LOG_NORMAL = {"batchinf": 12500, "ceiling": 12650, "raw": 12543, "chunks": 6500}
_FP8 = {"batchinf": 24000, "ceiling": 24388}
_PREFIXES: dict[str, Any] = {
    "num_rows": 18432, "prompt_tokens": 576, "prefix_tokens": 512, "max_tokens": 16, "max_model_len": 1024,
}  # fmt: skip
_SEVENTY: dict[str, Any] = {
    "shape": "llama-3.3-70b", "prompt_tokens": 128, "quantization": "fp8", "tensor_parallel_size": 2, "logprobs": 5,
}  # fmt: skip
# Specs without a section `engine`. vLLM and batchinf choose everything, for the rivals vLLM alone.
_BARE: dict[str, Any] = {"own_engine": {}}
# The number of replicas on the device is batchinf's choice too.
_SMALL_BARE: dict[str, Any] = {"own_engine": {}, "job_parallel": {"data_parallel_size": "auto"}}

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
            rivals=("raw",), counts_prompts=True, h200=_SCORE,
        ),
        Workload(
            "score5", num_rows=2560, slow_rows=1024, prompt_tokens=1024, max_tokens=1, prompt_logprobs=5,
            rivals=("raw", "defaults"), counts_prompts=True, h200=_SCORE,
        ),
        # Task `score` needs the logprob of each token and of the likeliest one.
        Workload(
            "score-task", task="score", num_rows=2560, prompt_tokens=1024, max_tokens=1, prompt_logprobs=1,
            rivals=("raw",), counts_prompts=True, h200=_SCORE,
        ),
        # 128-token texts for a small scorer, embedder and classifier, as vLLM comes.
        Workload(
            "small-score", task="score", shape="qwen3-0.6b", num_rows=32768, prompt_tokens=128, max_tokens=1,
            prompt_logprobs=1, counts_prompts=True, rivals=("raw",), h200={"batchinf": 376637, "raw": 194151},
            **_SMALL_BARE,
        ),
        Workload(
            "small-embed", task="embed", shape="qwen3-0.6b", num_rows=65536, prompt_tokens=128, max_tokens=1,
            counts_prompts=True, rivals=("embed",), h200={"batchinf": 516525, "embed": 212001}, **_SMALL_BARE,
        ),
        Workload(
            "small-classify", task="classify", shape="qwen3-0.6b", num_labels=8, num_rows=65536, prompt_tokens=128,
            max_tokens=1, counts_prompts=True, rivals=("classify",), h200={"batchinf": 509481, "classify": 231022},
            **_SMALL_BARE,
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
        # From here to `ngram`, as vLLM and batchinf come. The first ones are rows of the targets of 0.26.
        Workload(
            "bare-top20", logprobs=20, num_rows=3072, slow_rows=1024, rivals=("ceiling", "tuned"),
            h200={**_TOP20, "batchinf": 12407, "ceiling": 11342, "tuned": 11990}, **_BARE,
        ),
        Workload(
            "bare-small-top20", shape="llama-3.2-1b", num_rows=12288, prompt_tokens=128, logprobs=20,
            h200={"batchinf": 90311, "ceiling": 31406}, **_SMALL_BARE,
        ),
        # vLLM keeps the cache in 16 bits unless it is told otherwise, so the cache's type is in the spec.
        Workload(
            "bare-fp8", num_rows=8192, prompt_tokens=128, quantization="fp8", own_engine={"kv_cache_dtype": "fp8"},
            h200={"batchinf": 28299, "ceiling": 24971},
        ),
        Workload(
            "bare-lognormal", num_rows=3000, slow_rows=3000, prompt_tokens=128, max_tokens=1500, logprobs=5,
            log_normal=True, rivals=("raw", "ceiling"), h200={**_LOG_NORMAL, "batchinf": 15599}, **_BARE,
        ),
        # The ceiling has no grammar: raw / ceiling is what the mask costs. The grammar allows white space, which greedy
        # random weights would choose for ever. So this job draws its tokens.
        Workload(
            "json", num_rows=4096, prompt_tokens=128, max_tokens=160, mean_tokens=95, temperature=1.0,
            structure=("json", SCHEMA), rivals=("raw", "ceiling"),
            h200={"batchinf": 13452, "raw": 9635, "ceiling": 14841}, **_BARE,
        ),
        Workload(
            "choice", num_rows=8192, prompt_tokens=128, max_tokens=16, mean_tokens=6, temperature=1.0,
            structure=("choice", CHOICES), rivals=("raw",), **_BARE,
        ),
        Workload(
            "long-out", num_rows=96, prompt_tokens=128, max_tokens=8000, logprobs=20, rivals=("flat",),
            h200={"batchinf": 5427, "flat": 5442}, **_BARE,
        ),
        # A batch of prompts with 512 tokens, beside one with 32,768, with the kernel for decoding, which a small model
        # has only if the spec says so.
        Workload(
            "uneven", shape="llama-3.2-1b", num_rows=1024, prompt_tokens=512, first_tokens=32768, max_tokens=512,
            job_engine={"worker_cls": "batchinf.engines.vllm.kernels.attention.DecodingWorker"},
            h200={"batchinf": 52529}, **_BARE,
        ),
        Workload(
            "long-in", num_rows=256, prompt_tokens=8000, max_tokens=32, logprobs=5, counts_prompts=True,
            rivals=("raw",), h200={"batchinf": 36207, "raw": 36319}, **_BARE,
        ),
        # Prompts come one by one, as rows end, and nearly each step reads some.
        Workload(
            "long-answers", num_rows=2048, prompt_tokens=128, max_tokens=2048, mean_tokens=1000, logprobs=5,
            log_normal=True, rivals=("ceiling",), **_BARE,
        ),
        # Random weights choose the end of sequence once in as many tokens as the vocabulary has. So it can end a row,
        # but the lengths come from the column `max_tokens`.
        Workload(
            "sampled", num_rows=3000, slow_rows=3000, prompt_tokens=128, max_tokens=1500, logprobs=5, temperature=0.8,
            ends=True, log_normal=True, rivals=("raw",), h200={"batchinf": 15625, "raw": 13402}, **_BARE,
        ),
        Workload(
            "chat", num_rows=4096, prompt_tokens=128, system_tokens=1024, rivals=("ceiling", "defaults"),
            h200={"batchinf": 13481, "ceiling": 11274}, **_BARE,
        ),
        Workload(
            "n8", num_rows=512, n=8, temperature=0.8, logprobs=1, rivals=("raw",),
            h200={"batchinf": 23312, "raw": 16223}, **_BARE,
        ),
        Workload(
            "moe", shape="qwen3-30b-a3b", num_rows=4096, logprobs=5, rivals=("raw", "ceiling"),
            h200={"batchinf": 14794, "raw": 6926, "ceiling": 8610}, **_BARE,
        ),
        # Models of 2026: windows and sinks, windows, windows and experts, gated delta nets, Mamba.
        Workload(
            "gpt-oss", shape="gpt-oss-20b", num_rows=4096, logprobs=20, h200={"batchinf": 16952, "ceiling": 13562},
            **_BARE,
        ),
        Workload(
            "gemma3", shape="gemma3-12b", num_rows=4096, logprobs=20, h200={"batchinf": 5840, "ceiling": 5248},
            **_BARE,
        ),
        Workload("small-gemma3", shape="gemma3-1b", num_rows=8192, prompt_tokens=128, logprobs=20, **_BARE),
        Workload("gemma4", shape="gemma4-26b-a4b", num_rows=4096, logprobs=20, **_BARE),
        # vLLM's own choice on Hopper needs FlashInfer.
        Workload(
            "qwen3.5", shape="qwen3.5-35b-a3b", num_rows=3072, logprobs=20, h200={"batchinf": 11679, "ceiling": 6247},
            own_engine={"gdn_prefill_backend": "triton"},
        ),
        Workload(
            "granite4", shape="granite4-h-3b", num_rows=8192, logprobs=20, h200={"batchinf": 7652, "ceiling": 5864},
            **_BARE,
        ),
        Workload(
            "lora", num_rows=4096, logprobs=5, lora_rank=16, rivals=("raw",), h200={"batchinf": 10010, "raw": 7097},
            **_BARE,
        ),
        # Greedy outputs of random weights repeat themselves, so more proposals are accepted than in real text.
        Workload(
            "ngram", num_rows=2048, prompt_tokens=256, rivals=("ceiling",), h200={"batchinf": 11648, "ceiling": 11443},
            own_engine={
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
            },
        ),
        Workload("tp2", logprobs=5, tensor_parallel_size=2, h200={"batchinf": 19315, "ceiling": 19862}),
        Workload("tp2-fp8", logprobs=5, tensor_parallel_size=2, quantization="fp8", **_BARE),
        Workload("pp2", logprobs=5, pipeline_parallel_size=2, **_BARE),
        Workload("dp2", logprobs=5, data_parallel_size=2, num_rows=16384, rivals=(), h200={"batchinf": 23476}),
        Workload("seventy-one", num_rows=3072, rivals=(), h200={"batchinf": 5980}, **_SEVENTY),
        Workload("seventy", num_rows=6144, data_parallel_size=2, rivals=(), h200={"batchinf": 11729}, **_SEVENTY),
    )
}  # fmt: skip


def log_normal_lengths(num_rows: int, mean: float = 179.0, most: int = 1500, seed: int = 0) -> list[int]:
    """Output lengths: log-normal with sigma 0.8, at most `most`."""
    chance, sigma = random.Random(seed), 0.8
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, min(most, round(chance.lognormvariate(mu, sigma)))) for _ in range(num_rows)]


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `sized_by` reads."""
    parser.add_argument("--shape")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--dtype")


def sized_by(args: argparse.Namespace) -> Workload:
    """The workload `args.workload` in the sizes of the command line."""
    workload = WORKLOADS[args.workload].sized(args.rows, args.shape)
    return replace(workload, dtype=args.dtype) if args.dtype else workload
