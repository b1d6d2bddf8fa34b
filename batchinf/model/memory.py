"""Memory that a model needs on a device, and batches that fit, computed from its config and weight files.

`plan`, `validate` and `run` use it. Needs neither weights nor a device, and imports neither torch nor transformers.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.model.cache import (
    BLOCK_TOKENS,
    ITEM_BYTES,
    KvCache,
    Pool,
    kv_cache_of,
    pool_of,
)
from batchinf.model.model import Model, text_section
from batchinf.model.parameters import Part, Tensor, described, stored
from batchinf.model.splits import Split, splits_of, why_not_split
from batchinf.model.weights import (
    MXFP4,
    PaddedExperts,
    Quantization,
    UnknownSizeError,
    Weights,
    indexed_bytes,
    quantization_of,
    weigh,
)
from batchinf.spec.job import JobSpec, ModelSpec

# `Task.default_batch_limits`: engine arguments by vocabulary size and device bytes (None on a CPU).
LimitsOf = Callable[[int | None, int | None], Mapping[str, int]]


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """The vocabulary size in a model's config; None if it does not say."""
    size = text_section(config).get("vocab_size") or config.get("vocab_size")
    return size if isinstance(size, int) else None


# vLLM's default in 0.32.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
GIB = 1 << 30


def share_of(engine: Mapping[str, Any]) -> float:
    """The share of a device's memory that vLLM takes with these arguments."""
    return float(engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION)


# What a step takes beside weights and cache, at least: activations, CUDA graphs, the sampler, CUDA's own memory.
RESERVE_BYTES = 2 * GIB

# Families without defaults in their classes that matter here, and with full attention unless the config says more.
_PLAIN = frozenset("llama mistral qwen2 qwen3 mixtral qwen3_moe".split())
_PLAIN_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on devices: what it takes of each, and what is left. Sizes are in bytes; None if unknown."""

    weights: Weights | None
    """Over all devices of a replica, as `kv_cache`."""
    kv_cache: KvCache | None
    unknown: tuple[str, ...] = ()
    """Why weights or KV cache are unknown."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Of the text model, with the defaults of its class where they were needed."""
    parameters: Mapping[Part, int] = field(default_factory=dict)
    """By part; empty if they were not counted."""
    quantization: str = ""
    """In words; empty: none."""
    dtype: str = "bfloat16"
    """Of weights that are not quantized, and of arithmetic."""
    splits: tuple[Split, ...] = ()
    """What tensor-parallel ranks divide."""
    device_bytes: int | None = None
    """Memory of one device."""
    device_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    """The engine's longest sequence, in tokens."""
    batch_limits: Mapping[str, int] = field(default_factory=dict)
    """Engine arguments that the task sets unless the spec does."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The spec's arguments."""

    @property
    def total_weight_bytes(self) -> int | None:
        """Weights of all devices, if none is split."""
        return None if self.weights is None else self.weights.num_bytes

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers) if self.weights is not None else 1

    def tensor_degrees(self, most: int) -> list[int]:
        """The tensor-parallel sizes up to `most` that vLLM accepts."""
        return [degree for degree in range(1, most + 1) if why_not_split(self.splits, degree) is None]

    @property
    def limits(self) -> dict[str, int]:
        """`max_num_seqs` and `max_num_batched_tokens`: of the spec, else of the task, else vLLM's offline defaults."""
        defaults = default_limits(self.device_bytes, self.device_name)
        of_spec = {name: self.engine[name] for name in defaults if isinstance(self.engine.get(name), int)}
        return {**defaults, **self.batch_limits, **of_spec}

    @property
    def _rank_bytes(self) -> int | None:
        """Weights of one device, wherever they are kept."""
        if self.weights is None:
            return None
        return self.weights.rank_bytes(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def offloaded_bytes(self) -> int:
        """Weights of one device that `cpu_offload_gb` keeps in the host's memory."""
        return min(int(float(self.engine.get("cpu_offload_gb") or 0) * GIB), self._rank_bytes or 0)

    @property
    def weight_bytes(self) -> int | None:
        """Weights on one device, approximately: tensor-parallel ranks split nearly all weights."""
        return None if self._rank_bytes is None else self._rank_bytes - self.offloaded_bytes

    @property
    def step_bytes(self) -> int:
        """Memory of a step beside weights and cache: activations or the sampler's logits, at least `RESERVE_BYTES`.

        Activations: of a full batch, the widest layer at once, in 16 bits. Sampler: logits in 16 and 32 bits and
        logprobs in 32 for each sequence. vLLM measures both in its profiling run. What an image encoder takes is not
        counted.
        """
        limits = self.limits
        whole, split = _step_width(self.config)
        activations = limits["max_num_batched_tokens"] * 2 * (whole + split // self.tensor_parallel_size)
        sampler = limits["max_num_seqs"] * (vocab_size_of(self.config) or 0) * 10
        return max(RESERVE_BYTES, activations, sampler)

    def _pools(self, num_tokens: int, *, is_decoding: bool = False) -> list[Pool] | None:
        """The KV cache of one sequence, as vLLM allocates it. is_decoding: its prompt has been computed."""
        if self.kv_cache is None:
            return None
        # With asynchronous scheduling two batches are in flight.
        in_flight = 1 if is_decoding else 2 * self.limits["max_num_batched_tokens"]
        size = self.engine.get("block_size") or BLOCK_TOKENS
        return [
            pool_of(caches, num_tokens, self.tensor_parallel_size, in_flight_tokens=in_flight, block_tokens=size)
            for caches in self.kv_cache.stages(self.pipeline_parallel_size)
            if caches
        ]

    @property
    def sequence_bytes(self) -> int | None:
        """KV cache of one sequence of `max_model_len` on one device. With less, vLLM does not start."""
        pools = None if self.max_model_len is None else self._pools(self.max_model_len)
        return None if pools is None else max(pool.sequence_bytes for pool in pools)

    def left_bytes(self, gpu_memory_utilization: float) -> int | None:
        """vLLM's share less the weights: room for KV cache and activations. May be negative."""
        if self.weight_bytes is None or self.device_bytes is None:
            return None
        return int(self.device_bytes * gpu_memory_utilization) - self.weight_bytes

    def cache_bytes(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> int | None:
        """Memory of one device for the KV cache; `kv_cache_memory_bytes` if it is given. May be negative."""
        if isinstance(num_bytes := self.engine.get("kv_cache_memory_bytes"), int):
            return num_bytes
        left = self.left_bytes(gpu_memory_utilization)
        return None if left is None else left - reserve_bytes

    def sequences(
        self, num_tokens: int, gpu_memory_utilization: float, reserve_bytes: int = 0, *, is_decoding: bool = False
    ) -> float | None:
        """Sequences of `num_tokens` whose cache fits at the same time: as vLLM reports it, which is its worst case.

        is_decoding: while they generate. Layers with a sliding window then keep that window. In the worst case they
        also keep all tokens of the steps in flight.
        """
        room = self.cache_bytes(gpu_memory_utilization, reserve_bytes)
        pools = self._pools(num_tokens, is_decoding=is_decoding)
        return None if room is None or pools is None else min(pool.capacity(max(0, room)) for pool in pools)

    def most_tokens(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> int | None:
        """Tokens of KV cache that fit into what the weights leave, less `reserve_bytes`.

        If layers keep different numbers of tokens, counted in sequences of `max_model_len`, as vLLM reports it.
        """
        length = self.max_model_len or 1
        sequences = self.sequences(length, gpu_memory_utilization, reserve_bytes)
        return None if sequences is None else math.floor(sequences * length + 1e-6)

    def least_utilization(self, reserve_bytes: int = 0) -> float | None:
        """The smallest gpu_memory_utilization, in hundredths, that holds weights and one sequence; may be above 1."""
        if self.weight_bytes is None or self.sequence_bytes is None or not self.device_bytes:
            return None
        least_bytes = self.weight_bytes + self.sequence_bytes
        return math.ceil((least_bytes + reserve_bytes) / self.device_bytes * 100) / 100

    def fits(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> bool | None:
        """Whether the weights and one sequence of `max_model_len` fit."""
        least = self.least_utilization(reserve_bytes)
        return None if least is None else least <= gpu_memory_utilization + 1e-9


def default_limits(device_bytes: int | None, device_name: str = "") -> dict[str, int]:
    """vLLM's offline `max_num_seqs` and `max_num_batched_tokens` by device (`get_batch_defaults` in arg_utils.py)."""
    is_large = device_bytes is not None and (
        device_bytes >= 160 * GIB or (device_bytes >= 70 * GIB and "a100" not in device_name.lower())
    )
    return {"max_num_seqs": 1024 if is_large else 256, "max_num_batched_tokens": 16384 if is_large else 8192}


def fit_of(
    model: Model, spec: JobSpec, device_bytes: int | None, device_name: str = "", *, limits_of: LimitsOf | None = None
) -> Fit:
    """The job's model on devices of this size, by headers of weight files or by transformers (`described`).

    device_bytes: None without a device. limits_of: of the task.
    """
    shapes = _shapes_of(model, spec.model)
    dtype = weight_dtype(model.config, spec.model)
    unknown = []
    weights = kv_cache = None
    quantization = _quantization(model, spec.model)
    try:
        weights = _with_padding(_weights(model, spec.model, shapes), quantization, shapes.config, spec.engine)
    except UnknownSizeError as error:
        unknown.append(f"weights: {error}")
    try:
        if shapes.why_not_built and not shapes.stored and not _is_plain(shapes.config):
            raise UnknownSizeError(shapes.why_not_built)
        kv_cache = kv_cache_of(shapes.config, model.config, dtype, spec.engine)
    except UnknownSizeError as error:
        unknown.append(f"KV cache: {error}")
    length = spec.engine.get("max_model_len")
    tensor_parallel_size, pipeline_parallel_size = spec.parallel.sizes
    return Fit(
        weights,
        kv_cache,
        unknown=tuple(unknown),
        config=shapes.config,
        parameters=_counts(shapes.stored or shapes.built),
        quantization="" if quantization is None else quantization.name,
        dtype=dtype,
        # vLLM pads the blocks of weights that it quantizes itself.
        splits=splits_of(shapes.config, spec.engine, quantization if model.config.get("quantization_config") else None),
        device_bytes=device_bytes,
        device_name=device_name,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        max_model_len=length if isinstance(length, int) and length > 0 else model.max_model_len,
        batch_limits={} if limits_of is None else limits_of(vocab_size_of(model.config), device_bytes),
        engine=spec.engine,
    )


@dataclass(frozen=True, slots=True)
class _Shapes:
    """A model's tensors, as far as they are known."""

    config: Mapping[str, Any]
    """Of the text model, with the defaults of its class where they were needed."""
    stored: tuple[Tensor, ...]
    """By the headers of the weight files."""
    built: tuple[Tensor, ...]
    """By transformers; empty if it was not needed or cannot build the model."""
    why_not_built: str


def _shapes_of(model: Model, spec: ModelSpec) -> _Shapes:
    config = text_section(model.config)
    tensors: tuple[Tensor, ...] = ()
    if spec.load_format != "dummy":
        tensors = stored(pathlib.Path(model.path), spec.load_format, is_tied=bool(config.get("tie_word_embeddings")))
    if tensors and _is_plain(config):
        return _Shapes(config, tensors, (), "")
    folder = model.folder or model.tokenizer
    try:
        built = described(model.config, trust_remote_code=spec.trust_remote_code, folder=folder)
    except ModelError as error:
        return _Shapes(config, tensors, (), str(error))
    return _Shapes({**text_section(built.config), **config}, tensors, built.tensors, "")


def _counts(tensors: Sequence[Tensor]) -> dict[Part, int]:
    counts: dict[Part, int] = {}
    for tensor in tensors:
        if not tensor.is_other:
            packed = 2 if tensor.name.endswith("_blocks") else 1  # numbers in a byte of MXFP4
            counts[tensor.part] = counts.get(tensor.part, 0) + packed * tensor.num_parameters
    return counts


def _quantization(model: Model, spec: ModelSpec) -> Quantization | None:
    """None: none. One that is not known has no sizes, only a name."""
    try:
        return quantization_of(model.config, spec.quantization)
    except UnknownSizeError:
        return Quantization("unknown", 0, parts=())


def _is_plain(config: Mapping[str, Any]) -> bool:
    return (
        config.get("model_type") in _PLAIN
        and all(isinstance(config.get(key), int) for key in _PLAIN_KEYS)
        and not (config.get("sliding_window") and config.get("use_sliding_window") is not False)
    )


def _with_padding(
    weights: Weights, quantization: Quantization | None, config: Mapping[str, Any], engine: Mapping[str, Any]
) -> Weights:
    """The weights, with what vLLM pads if experts are in MXFP4."""
    if quantization is None or quantization.name != MXFP4:
        return weights
    # By an index, only the sum is known. Nearly all of it is experts.
    experts = weights.experts or weights.layers
    hidden = config.get("hidden_size")
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    padded = None
    if isinstance(hidden, int) and isinstance(width, int):
        padded = PaddedExperts(hidden, width, is_split=not engine.get("enable_expert_parallel"))
    return replace(weights, experts=experts, padded=padded)


def _weights(model: Model, spec: ModelSpec, shapes: _Shapes) -> Weights:
    """Of the weight files; else their index, if they are quantized; else counted. Raises UnknownSizeError."""
    num_layers = shapes.config.get("num_hidden_layers") or shapes.config.get("n_layer")
    is_tied = bool(shapes.config.get("tie_word_embeddings"))
    is_quantized = bool(model.config.get("quantization_config"))
    if shapes.stored and is_quantized:
        return weigh(shapes.stored, num_layers, None, None, is_tied=is_tied)
    if spec.load_format != "dummy" and not shapes.stored and (is_quantized or not shapes.built):
        total = indexed_bytes(pathlib.Path(model.folder or model.tokenizer))
        if total is not None:
            return Weights.of_total(total, num_layers or 1)
    tensors = shapes.stored or shapes.built
    if not tensors:
        why_not = shapes.why_not_built or "the config does not say enough"
        raise UnknownSizeError(f"they are not here, and {why_not}")
    item_bytes = ITEM_BYTES[weight_dtype(model.config, spec)]
    return weigh(tensors, num_layers, item_bytes, quantization_of(model.config, spec.quantization), is_tied=is_tied)


# Keys of models' configs for the experts of a layer, and for those that compute a token.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def named_number(config: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The number under the first of these keys; of a list, one for each layer, the mean. 0 without one."""
    for key in keys:
        value = config.get(key)
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(isinstance(number, int) for number in numbers):
            return sum(numbers) / len(numbers)
    return 0.0


def _step_width(config: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of a token's activations at the widest place of a layer: the MLP's input and output and three inside.

    In a mixture of experts, each chosen expert has its own.
    """
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 0)
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else int(inner)
    if chosen := math.ceil(named_number(config, CHOSEN_EXPERTS)):
        expert = config.get("moe_intermediate_size") or inner
        return hidden * (2 + chosen), 3 * chosen * int(max(expert) if isinstance(expert, list) else expert)
    return 2 * hidden, 3 * inner


def on_cpu(spec: ModelSpec) -> ModelSpec:
    """The model as an engine on a processor runs it: float32 is twice as fast as bfloat16 there."""
    return spec.model_copy(update={"dtype": "float32"}) if spec.dtype == "auto" else spec


def weight_dtype(config: Mapping[str, Any], spec: ModelSpec) -> str:
    """The type of weights and arithmetic on a GPU. By default vLLM runs float32 checkpoints in 16 bits."""
    if spec.dtype != "auto":
        return spec.dtype
    text = text_section(config)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    return "float16" if dtype in ("float16", "half") else "bfloat16"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:,.1f} MiB"
