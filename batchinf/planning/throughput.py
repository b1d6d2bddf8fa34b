"""Predicts tokens a second with a roofline model of the engine's steps: arithmetic, memory, links and Python.

Williams, Waterman and Patterson, "Roofline" (CACM 52:4, 2009): a step takes as long as its arithmetic or its reads of
memory, whichever is more. Arithmetic of a transformer: 2 FLOP for each active parameter and token (Kaplan et al.,
arXiv:2001.08361, section 2.1), and 4 × heads × head size FLOP for each pair of tokens in attention. All-reduce:
2 (n - 1) / n of the bytes over each link (NCCL tests, PERFORMANCE.md). The arithmetic of image encoders is not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinf.model.cache import head_dim_of, num_attention_heads
from batchinf.model.memory import CHOSEN_EXPERTS, NUM_EXPERTS, Fit, named_number
from batchinf.planning.gpus import Gpu
from batchinf.spec.job import WHOLE_STEPS

# Shares of the peaks that vLLM reaches, and the engine's Python, measured on one H200
# (benchmarks/history/vllm-0.26.md). They are the same for all models and GPUs.
_MATRIX_SHARE = {"fp8": 0.50, "other": 0.60}
# Of that share, what vLLM's kernel for the matrices of experts reaches with full tiles. From the one job of
# Qwen3-30B-A3B with vLLM 0.32 (16,067 output tokens a second, 256 in, 128 out, at 192 tokens for each expert).
_EXPERTS_SHARE = 0.60
# Half of an expert's last tile is empty on average. By vLLM's settings (`fused_moe/configs`), a tile has 16 to 128
# tokens, and between these about twice as many as an expert has.
_EMPTY_TOKENS = (8, 64)
_MEMORY_SHARE = 0.80
_LINK_SHARE = 0.60
STEP_S = 6e-3  # for each step
SEQUENCE_S = 6e-6  # for each sequence of a step
REQUEST_S = 150e-6  # for each request, once
# Seconds to start the kernels of a layer in a step that only reads prompts, unless it is one CUDA graph.
LAYER_S = 0.55e-3
# The share of the shorter of device and Python that the longer one does not hide.
_NOT_HIDDEN = 0.25
# A step that makes tokens takes longer by this factor in a pipeline: its stages wait for each other. Measured with two:
# 1.10 and 1.31 for 8B, 1.54 for 70B (benchmarks/RESULTS.md, benchmarks/history/vllm-0.26.md).
_STAGES_WAIT = 1.3
# Memory that the logprobs of a prompt's token read and write, for each entry of the vocabulary, in one pass.
_LOGPROB_BYTES = 8
_PCIE = 25e9  # bytes a second in one direction, between GPUs without NVLink


@dataclass(frozen=True, slots=True)
class Shape:
    """The cost of a token: the parameters of the matrices that compute it, in all layers and the head."""

    layer_parameters: float
    """Parameters of all layers, without experts."""
    expert_parameters: float
    """Parameters of the chosen experts."""
    expert_share: float
    """The share of the tokens that one expert computes; 0 without experts."""
    head_parameters: float
    layer_bytes: float
    """Size of all weights of the layers."""
    attention_width: int
    """Heads × head size, summed over all layers that see all tokens."""
    window_width: int
    """The same for layers with a window."""
    window: int
    """That window in tokens."""
    hidden: int
    """The hidden size."""
    num_layers: int
    dtype: str


def shape_of(fit: Fit) -> Shape | None:
    """The shape, from the counted parameters and the config; None if they are not known."""
    counts = fit.parameters
    hidden = fit.config.get("hidden_size")
    experts = counts.get("expert", 0)
    chosen = _expert_share(fit) if experts else 0.0
    if fit.weights is None or fit.kv_cache is None or not counts or not isinstance(hidden, int) or chosen is None:
        return None
    windows_or_none = [kind.window for layer in fit.kv_cache.layers for kind in layer if kind.state is None]
    windows = [window for window in windows_or_none if window is not None]
    width = (num_attention_heads(fit.config) or 0) * (head_dim_of(fit.config) or 0)
    return Shape(
        layer_parameters=counts.get("linear", 0),
        expert_parameters=experts * chosen,
        expert_share=chosen,
        # With tied embeddings there is no head of its own.
        head_parameters=counts.get("head") or counts.get("embedding", 0),
        layer_bytes=sum(fit.weights.layers),
        attention_width=width * (len(windows_or_none) - len(windows)),
        window_width=width * len(windows),
        window=max(windows, default=0),
        hidden=hidden,
        num_layers=fit.num_layers,
        dtype="fp8" if fit.quantization == "fp8" else fit.dtype,
    )


def _expert_share(fit: Fit) -> float | None:
    """The share of the experts that compute a token; None if the config does not tell how many are chosen."""
    number = named_number(fit.config, NUM_EXPERTS)
    chosen = named_number(fit.config, CHOSEN_EXPERTS)
    return chosen / number if number and chosen else None


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a job."""

    num_requests: int
    prompt_tokens: float
    """Tokens of a prompt, on average."""
    output_tokens: float
    """Tokens of an output, on average."""
    longest_output: int
    """Tokens of the longest output."""
    logits: Literal["all", "last", "none"] = "last"
    """The tokens that the head computes; `none` means that nothing is generated."""
    cached_tokens: int = 0
    """Tokens of each prompt that vLLM's prefix cache has, because all prompts begin with them."""
    is_assumed: bool = False
    """Whether no rows were read, so that all numbers are assumed."""

    @property
    def text(self) -> str:
        """The lengths, for people."""
        outputs = f" and outputs of {self.output_tokens:,.0f}" if self.output_tokens else ""
        return f"{'assumed ' if self.is_assumed else ''}prompts of {self.prompt_tokens:,.0f}{outputs} tokens"

    @property
    def num_tokens(self) -> float:
        """Of all prompts and outputs."""
        return self.num_requests * (self.prompt_tokens + self.output_tokens)

    @property
    def computed_tokens(self) -> float:
        """Of a prompt, on average."""
        return max(1.0, self.prompt_tokens - self.cached_tokens)


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long one replica takes."""

    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: int
    """Sequences at the same time."""
    at_once: int
    """The same, if there are enough of them."""
    limited_by: str
    """The longest part of a step."""

    @property
    def tokens_per_s(self) -> float:
        """Of prompts and outputs together."""
        return self.prompt_tokens_per_s + self.output_tokens_per_s


def prediction_of(fit: Fit, shape: Shape, *, gpu: Gpu, work: Workload, share: float) -> Prediction:
    """Time of the work on one replica. fit: at its degrees."""
    pipeline = fit.pipeline_parallel_size
    num_devices = fit.tensor_parallel_size * pipeline
    limits = fit.limits

    def fitting(tokens: float, limit: int) -> int:
        number = fit.sequences(max(1, round(tokens)), share, fit.step_bytes, is_decoding=True) or 1.0
        return max(1, min(limit, int(number)))

    limit = min(limits["max_num_seqs"], work.num_requests)
    prompt = work.computed_tokens  # the cache holds the beginning of all prompts once
    at_once = fitting(prompt + work.output_tokens / 2, limits["max_num_seqs"])
    running = min(at_once, limit)
    starts = running / max(1.0, work.output_tokens)
    # vLLM takes in as many prompts as the cache holds. While these grow, it drops the newest, and computes them again.
    dropped = 1 - fitting(prompt + work.output_tokens, limit) / fitting(prompt, limit)
    again = dropped * (prompt + work.output_tokens / 2)
    # In a step each running sequence makes a token, and prompts of new ones are computed with it.
    prompt_tokens = starts * (prompt + again)
    decoded = running
    if work.output_tokens <= 1:  # all is prefill: a full batch
        prompt_tokens = min(limits["max_num_batched_tokens"], work.num_requests * prompt)
        starts = prompt_tokens / prompt
        running = max(1, math.ceil(starts))
        at_once = max(1, math.ceil(limits["max_num_batched_tokens"] / prompt))
        decoded = 0
    parts = _step(fit, shape, gpu, work, prompt_tokens=prompt_tokens, decoded=decoded, running=running)
    # More tokens than a batch takes are several steps, and so are the batches in the stages of a pipeline.
    num_steps = pipeline * max(1.0, (prompt_tokens + decoded) / limits["max_num_batched_tokens"])
    is_one_graph = num_devices == 1 and has_whole_steps(fit.engine)
    launch_s = shape.num_layers / pipeline * LAYER_S if not decoded and not is_one_graph else 0.0
    device_s = sum(parts.values())
    python_s = num_steps * (STEP_S + launch_s) + running * SEQUENCE_S + starts * REQUEST_S
    step_s = max(device_s, python_s) + _NOT_HIDDEN * min(device_s, python_s)
    if pipeline > 1 and decoded:
        step_s *= _STAGES_WAIT
    seconds = work.num_requests * step_s / starts
    if decoded:  # the last sequences end alone
        weights_s = shape.layer_bytes / fit.tensor_parallel_size / gpu.bandwidth / _MEMORY_SHARE
        seconds += max(0.0, work.longest_output - work.output_tokens) * (STEP_S + weights_s)
    limited_by = "the engine's Python" if python_s > device_s else max(parts, key=lambda name: parts[name])
    if decoded and running < min(limits["max_num_seqs"], work.num_requests):
        limited_by = f"the cache, which holds {running:,} of {limits['max_num_seqs']:,} sequences"
    return Prediction(
        seconds=seconds,
        prompt_tokens_per_s=work.num_requests * work.prompt_tokens / seconds,
        output_tokens_per_s=work.num_requests * work.output_tokens / seconds,
        running=running,
        at_once=at_once,
        limited_by=limited_by,
    )


def has_whole_steps(engine: Mapping[str, Any]) -> bool:
    """Whether engine arguments ask for one CUDA graph for each step of prompts; see `fleet.engine_defaults`."""
    config = engine.get("additional_config")
    return isinstance(config, Mapping) and bool(config.get(WHOLE_STEPS))


def _step(
    fit: Fit, shape: Shape, gpu: Gpu, work: Workload, *, prompt_tokens: float, decoded: int, running: int
) -> dict[str, float]:
    """Seconds that one device works on a step of all running sequences, by what it waits for."""
    tensor = fit.tensor_parallel_size
    pipeline = fit.pipeline_parallel_size
    cache = fit.kv_cache
    assert cache is not None
    tokens = prompt_tokens + decoded
    memory = gpu.bandwidth * _MEMORY_SHARE
    plain = (gpu.bf16 or gpu.fp16) * _MATRIX_SHARE["other"]
    matrices = gpu.flops(shape.dtype) * _MATRIX_SHARE.get(shape.dtype, _MATRIX_SHARE["other"])
    of_expert = tokens * shape.expert_share
    least, most = _EMPTY_TOKENS
    filled = of_expert / (of_expert + min(max(of_expert, least), most))
    parameters = shape.layer_parameters + shape.expert_parameters / (_EXPERTS_SHARE * filled or 1.0)
    linear = 2 * parameters * tokens / matrices / tensor / pipeline
    # Each stage of a pipeline reads its weights for each of as many batches.
    weights = shape.layer_bytes / memory / tensor
    head_tokens = {"all": tokens, "last": float(running), "none": 0.0}[work.logits]
    seen = work.cached_tokens + work.computed_tokens / 2
    pairs = (shape.attention_width * seen + shape.window_width * min(seen, shape.window)) * prompt_tokens
    others = (2 * shape.head_parameters * head_tokens + 4 * pairs) / plain / tensor / pipeline
    if work.logits == "all":
        others += head_tokens * shape.head_parameters / shape.hidden * _LOGPROB_BYTES / memory
    kept = round(work.prompt_tokens + work.output_tokens / 2)
    # The cache is read; the states of recurrent layers, which have no tokens, are also written.
    states = cache.sequence_bytes(0, tensor, pipeline)
    read = decoded * (cache.sequence_bytes(kept, tensor, pipeline) + states) / memory
    # Two all-reduces in each layer, of 16 bits.
    sums = 2 * (tensor - 1) / tensor * 2 * shape.num_layers * tokens * shape.hidden * 2 / pipeline
    return {
        "arithmetic": others + (linear if linear >= weights else 0.0),
        "memory": read + (weights if weights > linear else 0.0),
        "links between GPUs": sums / ((gpu.link or _PCIE) * _LINK_SHARE),
    }
