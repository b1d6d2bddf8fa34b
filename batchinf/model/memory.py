"""Memory that a model needs on a device, and batches that fit, computed from its config and weight files.

`plan`, `validate` and `run` use it. Needs neither weights nor a device, and imports neither torch nor transformers.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.model.cache import (
    BLOCK_TOKENS,
    KvCache,
    Pool,
    UnknownCacheError,
    kv_cache_of,
    num_attention_heads,
    num_kv_heads,
)
from batchinf.model.identity import Model, text_section
from batchinf.model.parameters import Described, Part, Tensor, described, stored
from batchinf.model.weights import UnknownWeightsError, Weights, indexed_bytes, quantization_of, weigh
from batchinf.spec.job import JobSpec, ModelSpec

# `Task.default_batch_limits`: engine arguments by vocabulary size and device bytes (None on a CPU).
LimitsOf = Callable[[int | None, int | None], Mapping[str, int]]


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """The vocabulary size in a model's config; None if it does not say."""
    found = text_section(config).get("vocab_size") or config.get("vocab_size")
    return found if isinstance(found, int) else None


# vLLM's default in 0.26 and 0.32.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
GIB = 1 << 30

# What a step takes beside weights and cache, at least: activations, CUDA graphs, the sampler, CUDA's own memory.
RESERVE_BYTES = 2 * GIB

_TYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
# Families without defaults in their classes that matter here, and with full attention unless the config says more.
_PLAIN = frozenset("llama mistral qwen2 qwen3 mixtral qwen3_moe".split())
_PLAIN_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's memory over all devices of a replica; None if unknown. unknown: the reasons.

    config: of the text model, with the defaults of its class where they were needed. parameters: by part; empty if they
    were not counted. quantization: in words; empty: none. dtype: of what is not quantized.
    """

    weights: Weights | None
    kv_cache: KvCache | None
    unknown: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[Part, int] = field(default_factory=dict)
    quantization: str = ""
    dtype: str = "bfloat16"

    @property
    def weight_bytes(self) -> int | None:
        """On one device."""
        return None if self.weights is None else self.weights.num_bytes

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers) if self.weights is not None else 1

    def tensor_degrees(self, most: int) -> list[int]:
        """The tensor-parallel sizes up to `most` that vLLM accepts.

        Query heads must divide, and KV heads too, or be divided; so must the width of the MLP.
        """
        heads, kv_heads = num_attention_heads(self.config), num_kv_heads(self.config)
        inner = self.config.get("moe_intermediate_size") or self.config.get("intermediate_size")
        return [
            degree
            for degree in range(1, most + 1)
            if (heads is None or heads % degree == 0)
            and (kv_heads is None or kv_heads % degree == 0 or degree % kv_heads == 0)
            and (not isinstance(inner, int) or inner % degree == 0)
        ]


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on devices: what it takes of each, and what is left. Sizes are in bytes; None if unknown.

    device_bytes: memory of one device. max_model_len: the engine's longest sequence, in tokens. batch_limits: engine
    arguments that the task sets unless the spec does. engine: the spec's arguments.
    """

    needs: Needs
    device_bytes: int | None = None
    device_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    batch_limits: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> dict[str, int]:
        """`max_num_seqs` and `max_num_batched_tokens`: of the spec, else of the task, else vLLM's offline defaults."""
        defaults = default_limits(self.device_bytes, self.device_name)
        given = {name: self.engine[name] for name in defaults if isinstance(self.engine.get(name), int)}
        return {**defaults, **self.batch_limits, **given}

    @property
    def offloaded_bytes(self) -> int:
        """Weights of one device that `cpu_offload_gb` keeps in the host's memory."""
        wanted = int(float(self.engine.get("cpu_offload_gb") or 0) * GIB)
        return 0 if self.needs.weights is None else min(wanted, self._all_weights())

    def _all_weights(self) -> int:
        assert self.needs.weights is not None
        return self.needs.weights.rank_bytes(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def weight_bytes(self) -> int | None:
        """Weights on one device, approximately: tensor-parallel ranks split nearly all weights."""
        return None if self.needs.weights is None else self._all_weights() - self.offloaded_bytes

    @property
    def step_bytes(self) -> int:
        """Memory of a step beside weights and cache: activations or the sampler's logits, at least `RESERVE_BYTES`.

        Activations: of a full batch, the widest layer at once, in 16 bits. Sampler: logits in 16 and 32 bits and
        logprobs in 32 for each sequence. vLLM measures both in its profiling run.
        """
        limits, (whole, split) = self.limits, _step_width(self.needs.config)
        activations = limits["max_num_batched_tokens"] * 2 * (whole + split // self.tensor_parallel_size)
        sampler = limits["max_num_seqs"] * (vocab_size_of(self.needs.config) or 0) * 10
        return max(RESERVE_BYTES, activations, sampler)

    @property
    def bytes_per_token(self) -> int | None:
        """KV cache of one more token of a long sequence on one device."""
        if self.needs.kv_cache is None:
            return None
        return self.needs.kv_cache.bytes_per_token(self.tensor_parallel_size, self.pipeline_parallel_size)

    def sequence_bytes_of(self, num_tokens: int) -> int | None:
        """KV cache of one sequence on one device, as vLLM allocates it."""
        pools = self._pools(num_tokens)
        return None if pools is None else max(pool.sequence_bytes for pool in pools)

    def _pools(self, num_tokens: int) -> list[Pool] | None:
        if self.needs.kv_cache is None:
            return None
        # With asynchronous scheduling two batches are in flight.
        in_flight = 2 * self.limits["max_num_batched_tokens"]
        block_tokens = self.engine.get("block_size") or BLOCK_TOKENS
        return self.needs.kv_cache.pools(
            num_tokens, self.tensor_parallel_size, self.pipeline_parallel_size, in_flight, block_tokens
        )

    @property
    def sequence_bytes(self) -> int | None:
        """KV cache of one sequence of `max_model_len` on one device. With less, vLLM does not start."""
        return None if self.max_model_len is None else self.sequence_bytes_of(self.max_model_len)

    @property
    def least_bytes(self) -> int | None:
        """Weights and one sequence on one device."""
        if self.weight_bytes is None or self.sequence_bytes is None:
            return None
        return self.weight_bytes + self.sequence_bytes

    def left_bytes(self, gpu_memory_utilization: float) -> int | None:
        """vLLM's share less the weights: room for KV cache and activations. May be negative."""
        if self.weight_bytes is None or self.device_bytes is None:
            return None
        return int(self.device_bytes * gpu_memory_utilization) - self.weight_bytes

    def cache_bytes(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> int | None:
        """Memory of one device for the KV cache; `kv_cache_memory_bytes` if it is given. May be negative."""
        if isinstance(given := self.engine.get("kv_cache_memory_bytes"), int):
            return given
        left = self.left_bytes(gpu_memory_utilization)
        return None if left is None else left - reserve_bytes

    def sequences(self, num_tokens: int, gpu_memory_utilization: float, reserve_bytes: int = 0) -> float | None:
        """Sequences of `num_tokens` whose cache fits at the same time."""
        room, pools = self.cache_bytes(gpu_memory_utilization, reserve_bytes), self._pools(num_tokens)
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
        if self.least_bytes is None or not self.device_bytes:
            return None
        return math.ceil((self.least_bytes + reserve_bytes) / self.device_bytes * 100) / 100

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


def needs_of(model: Model, spec: ModelSpec, engine: Mapping[str, Any]) -> Needs:
    """A model's needs under these settings. Reads headers of local weight files, never weights.

    A family that is not plain is built by transformers, in another process; see `described`.
    """
    raw, unknown = text_section(model.config), []
    tensors: tuple[Tensor, ...] = ()
    if spec.load_format != "dummy":
        tensors = stored(pathlib.Path(model.path), spec.load_format, is_tied=bool(raw.get("tie_word_embeddings")))
    built, why_not = None, ""
    if not (tensors and _is_plain(raw)):
        try:
            built = described(
                model.config, trust_remote_code=spec.trust_remote_code, folder=model.folder or model.tokenizer
            )
        except ModelError as error:
            why_not = str(error)
    config = raw if built is None else {**text_section(built.config), **raw}
    try:
        weights = _weights(model, spec, config, tensors, built, why_not)
    except UnknownWeightsError as error:
        weights = None
        unknown.append(f"weights: {error}")
    dtype, cache_dtype = weight_dtype(model.config, spec), str(engine.get("kv_cache_dtype", "auto"))
    try:
        if built is None and not tensors and not _is_plain(raw) and why_not:
            raise UnknownCacheError(why_not)
        state_dtype = str(engine.get("mamba_ssm_cache_dtype", "auto"))
        kv_cache = kv_cache_of(config, model.config, dtype, cache_dtype, state_dtype)
    except UnknownCacheError as error:
        kv_cache = None
        unknown.append(f"KV cache: {error}")
    return Needs(
        weights,
        kv_cache,
        tuple(unknown),
        config,
        _counts(tensors or (built.tensors if built is not None else ())),
        _quantization_name(model, spec),
        dtype,
    )


def _counts(tensors: Sequence[Tensor]) -> dict[Part, int]:
    counts: dict[Part, int] = {}
    for tensor in tensors:
        if not tensor.is_other:
            packed = 2 if tensor.name.endswith("_blocks") else 1  # numbers in a byte of MXFP4
            counts[tensor.part] = counts.get(tensor.part, 0) + packed * tensor.num_parameters
    return counts


def _quantization_name(model: Model, spec: ModelSpec) -> str:
    try:
        found = quantization_of(model.config, spec.quantization)
    except UnknownWeightsError:
        return "unknown"
    return "" if found is None else found.name


def _is_plain(config: Mapping[str, Any]) -> bool:
    return (
        config.get("model_type") in _PLAIN
        and all(isinstance(config.get(key), int) for key in _PLAIN_KEYS)
        and not (config.get("sliding_window") and config.get("use_sliding_window") is not False)
    )


def _weights(
    model: Model,
    spec: ModelSpec,
    config: Mapping[str, Any],
    tensors: tuple[Tensor, ...],
    built: Described | None,
    why_not: str,
) -> Weights:
    """Of the weight files; else their index, if they are quantized; else counted. Raises UnknownWeightsError."""
    item_bytes = _TYPE_BYTES[weight_dtype(model.config, spec)]
    num_layers = config.get("num_hidden_layers") or config.get("n_layer")
    is_tied = bool(config.get("tie_word_embeddings"))
    is_quantized = bool(model.config.get("quantization_config"))
    if tensors and is_quantized:
        return weigh(tensors, num_layers, None, None, is_tied=is_tied)
    indexed = None if spec.load_format == "dummy" else indexed_bytes(pathlib.Path(model.folder or model.tokenizer))
    if indexed is not None and not tensors and (is_quantized or built is None):
        return Weights.of_total(indexed, num_layers or 1)
    tensors = tensors or (() if built is None else built.tensors)
    if not tensors:
        raise UnknownWeightsError(f"they are not here, and {why_not or 'the config does not say enough'}")
    return weigh(tensors, num_layers, item_bytes, quantization_of(model.config, spec.quantization), is_tied=is_tied)


# Keys of models' configs for the experts of a layer, and for those that compute a token.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def named_number(config: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The number under the first of these keys; of a list, one for each layer, the mean. 0 without one."""
    for key in keys:
        each = given if isinstance(given := config.get(key), list) else [given]
        if each and all(isinstance(number, int) for number in each):
            return sum(each) / len(each)
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


def fit_of(
    model: Model, spec: JobSpec, device_bytes: int | None, device_name: str = "", limits_of: LimitsOf | None = None
) -> Fit:
    """The job's model on devices of this size. device_bytes: None without a device. limits_of: of the task."""
    length = spec.engine.get("max_model_len")
    return Fit(
        needs_of(model, spec.model, spec.engine),
        device_bytes,
        device_name,
        *spec.parallel.sizes,
        length if isinstance(length, int) and length > 0 else model.max_model_len,
        {} if limits_of is None else limits_of(vocab_size_of(model.config), device_bytes),
        spec.engine,
    )


def on_cpu(spec: ModelSpec) -> ModelSpec:
    """The model as an engine on a processor runs it: float32 is twice as fast as bfloat16 there."""
    return spec.model_copy(update={"dtype": "float32"}) if spec.dtype == "auto" else spec


def weight_dtype(config: Mapping[str, Any], spec: ModelSpec) -> str:
    """The type of weights and arithmetic on a GPU. By default vLLM runs float32 checkpoints in 16 bits."""
    if spec.dtype != "auto":
        return spec.dtype
    named = text_section(config).get("dtype") or text_section(config).get("torch_dtype") or config.get("torch_dtype")
    return "float16" if named in ("float16", "half") else "bfloat16"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:,.1f} MiB"


def needs_lines(fit: Fit, gpu_memory_utilization: float) -> list[str]:
    """Lines for people: the model's memory, and what fits on one device if there is one."""
    needs, parts = fit.needs, []
    if needs.weight_bytes is not None:
        parts.append(f"weights {gib(needs.weight_bytes)}")
    if needs.kv_cache is not None:
        each = needs.kv_cache.bytes_per_token()
        where = f" ({fit.device_name})" if fit.device_bytes is None and fit.device_name else ""
        parts.append(f"KV cache {each * 1000 / 2**20:,.1f} MiB for 1,000 tokens in {needs.kv_cache.dtype}{where}")
    parts += [f"unknown: {why}" for why in needs.unknown]
    degree = fit.tensor_parallel_size * fit.pipeline_parallel_size
    shared = f", over {degree} devices" if degree > 1 else ""
    return [f"memory: {'; '.join(parts)}{shared}", *_device_lines(fit, gpu_memory_utilization)]


def _device_lines(fit: Fit, share: float) -> list[str]:
    if fit.device_bytes is None:
        return []
    device = f"one device here ({fit.device_name or 'GPU'}, {gib(fit.device_bytes)})"
    at = f"at gpu_memory_utilization {share:g}"
    left, tokens, fits = fit.left_bytes(share), fit.most_tokens(share), fit.fits(share)
    if left is not None and left <= 0:
        return [f"{device}: the weights alone do not fit {at}"]
    if tokens is None:
        return []
    length = "" if fit.max_model_len is None else f"; one sequence of max_model_len {fit.max_model_len:,} "
    length += "" if not length else "fits" if fits else "does not"
    return [f"{device} holds at most {tokens:,} tokens {at}, less what activations take{length}"]
