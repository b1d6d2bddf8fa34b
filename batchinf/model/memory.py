"""Memory that a model needs on a device, and batches that fit, computed from its config and weight files."""

import math
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinf.base.errors import ModelError
from batchinf.model import files as model_files
from batchinf.model.identity import Model, text_section
from batchinf.spec.job import JobSpec, ModelSpec

# For each prompt token and vocabulary entry: a logit of 16 bits and a logprob of 32.
_SCORED_BYTES = 6
_LARGE_VOCABULARY = 262_144
# `Task.default_batch_limits`: engine arguments by vocabulary size, device bytes (None on a CPU) and
# `gpu_memory_utilization`.
LimitsOf = Callable[[int | None, int | None, float], Mapping[str, int]]


def scored_tokens_at_once(device_bytes: int, gpu_memory_utilization: float, vocab_size: int | None) -> int:
    """`max_num_batched_tokens` for prompt logprobs, so that their logits fit beside vLLM's share.

    vLLM's V1 runner allocates tokens × vocabulary × 6 bytes that its memory profiling does not see; the V2 runner works
    on 1,024 rows at a time. The logits get half of what vLLM leaves free. At least 1,024, because each of the running
    sequences may have a token in a step.
    """
    free_bytes = device_bytes * (1 - gpu_memory_utilization) / 2
    fit = int(free_bytes / (_SCORED_BYTES * (vocab_size or _LARGE_VOCABULARY)))
    return max(1024, min(8192, fit // 256 * 256))


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """The vocabulary size in a model's config; None if it does not say."""
    found = text_section(config).get("vocab_size") or config.get("vocab_size")
    return found if isinstance(found, int) else None


# vLLM's default in 0.26 and 0.32.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
GIB = 1 << 30

_ITEM_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_CACHE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Float types in a safetensors header, which vLLM casts to the model's type.
_CAST = ("F64", "F32", "F16", "BF16")
# Decoders with attention, then a gated MLP or experts of that kind.
_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_SPARSE = ("mixtral", "qwen3_moe")
# A config with one of these keys does not cache each token's keys and values in each layer.
_OTHER_CACHES = (
    "sliding_window_pattern", "attention_chunk_size", "num_kv_shared_layers", "hybrid_override_pattern",
    "attn_layer_period", "full_attention_interval", "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size",
    "layers_block_type", "block_configs", "index_topk", "index_head_dim", "compress_ratios", "cross_attention_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KvCache:
    """A cached token takes `item_bytes` × `width` for each of `num_heads` heads of `num_layers` layers.

    width: items of one head: keys and values, or MLA's one compressed row, which every tensor-parallel rank keeps
    whole. dtype: in words.
    """

    num_layers: int
    num_heads: int
    width: int
    item_bytes: int
    dtype: str

    def bytes_per_token(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """On one device. A head is not split: if there are more ranks than heads, several ranks keep the same one."""
        num_layers = math.ceil(self.num_layers / pipeline_parallel_size)
        num_heads = max(1, math.ceil(self.num_heads / tensor_parallel_size))
        return num_layers * num_heads * self.width * self.item_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's memory over all devices of a replica; None if unknown. unknown: the reasons."""

    weight_bytes: int | None
    kv_cache: KvCache | None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on devices: what it takes of each, and what is left. Sizes are in bytes; None if unknown.

    device_bytes: memory of one device. max_model_len: the engine's longest sequence, in tokens. batch_limits: engine
    arguments that the task sets unless the spec does.
    """

    needs: Needs
    device_bytes: int | None = None
    device_name: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    batch_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int | None:
        """Weights on one device, approximately: tensor-parallel ranks split nearly all weights."""
        degree = self.tensor_parallel_size * self.pipeline_parallel_size
        return None if self.needs.weight_bytes is None else math.ceil(self.needs.weight_bytes / degree)

    @property
    def bytes_per_token(self) -> int | None:
        """KV cache of one token on one device."""
        if self.needs.kv_cache is None:
            return None
        return self.needs.kv_cache.bytes_per_token(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def sequence_bytes(self) -> int | None:
        """KV cache of one sequence of `max_model_len` on one device. With less, vLLM does not start."""
        if self.bytes_per_token is None or self.max_model_len is None:
            return None
        return self.bytes_per_token * self.max_model_len

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

    def most_tokens(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> int | None:
        """Tokens of KV cache that fit into what the weights leave, less `reserve_bytes`."""
        left = self.left_bytes(gpu_memory_utilization)
        if left is None or not self.bytes_per_token:
            return None
        return max(0, left - reserve_bytes) // self.bytes_per_token

    def least_utilization(self, reserve_bytes: int = 0) -> float | None:
        """The smallest gpu_memory_utilization, in hundredths, that holds weights and one sequence; may be above 1."""
        if self.least_bytes is None or not self.device_bytes:
            return None
        return math.ceil((self.least_bytes + reserve_bytes) / self.device_bytes * 100) / 100

    def fits(self, gpu_memory_utilization: float, reserve_bytes: int = 0) -> bool | None:
        """Whether the weights and one sequence of `max_model_len` fit."""
        least = self.least_utilization(reserve_bytes)
        return None if least is None else least <= gpu_memory_utilization + 1e-9


def needs_of(model: Model, spec: ModelSpec, engine: Mapping[str, Any]) -> Needs:
    """A model's needs under these settings. Reads headers of local weight files, never weights."""
    config, unknown = text_section(model.config), []
    weight_bytes, why = _weight_bytes(model, spec)
    if weight_bytes is None:
        unknown.append(f"weights: {why}")
    kv_cache, why = kv_cache_of(config, model.config, spec, str(engine.get("kv_cache_dtype", "auto")))
    if kv_cache is None:
        unknown.append(f"KV cache: {why}")
    return Needs(weight_bytes, kv_cache, tuple(unknown))


def fit_of(
    model: Model, spec: JobSpec, device_bytes: int | None, device_name: str = "", limits_of: LimitsOf | None = None
) -> Fit:
    """The job's model on devices of this size. device_bytes: None without a device. limits_of: of the task."""
    length = spec.engine.get("max_model_len")
    share = spec.engine.get("gpu_memory_utilization") or DEFAULT_GPU_MEMORY_UTILIZATION
    return Fit(
        needs_of(model, spec.model, spec.engine),
        device_bytes,
        device_name,
        spec.parallel.tensor_parallel_size,
        spec.parallel.pipeline_parallel_size,
        length if isinstance(length, int) and length > 0 else model.max_model_len,
        {} if limits_of is None else limits_of(vocab_size_of(model.config), device_bytes, float(share)),
    )


def on_cpu(spec: ModelSpec) -> ModelSpec:
    """The model as an engine on a processor runs it: float32 is twice as fast as bfloat16 there."""
    return spec.model_copy(update={"dtype": "float32"}) if spec.dtype == "auto" else spec


def kv_cache_of(
    config: Mapping[str, Any], whole: Mapping[str, Any], spec: ModelSpec, kv_cache_dtype: str
) -> tuple[KvCache | None, str]:
    """The KV cache by a model's config, or why it is unknown. config: the text section of the `whole` config."""
    num_layers, num_heads = _first(config, "num_hidden_layers", "n_layer"), _num_kv_heads(config)
    types = {str(kind) for kind in config.get("layer_types") or ()}
    others = [key for key in _OTHER_CACHES if config.get(key)]
    if others or types - {"full_attention"} or whole.get("is_encoder_decoder") or _has_window(config):
        return None, f"{whole.get('model_type', 'this model')} does not keep every token in every layer"
    item_bytes, dtype = _cache_type(whole, spec, kv_cache_dtype)
    if item_bytes is None:
        return None, f"kv_cache_dtype {dtype} is of a size of its own"
    if isinstance(config.get("kv_lora_rank"), int):
        if item_bytes == 1 or not isinstance(config.get("qk_rope_head_dim"), int) or num_layers is None:
            return None, "a compressed cache (MLA) of a form of its own"
        return KvCache(num_layers, 1, config["kv_lora_rank"] + config["qk_rope_head_dim"], item_bytes, dtype), ""
    head_dim = _head_dim(config)
    if num_layers is None or num_heads is None or head_dim is None:
        return None, "the config does not give layers, heads and their size"
    return KvCache(num_layers, num_heads, 2 * head_dim, item_bytes, dtype), ""


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)


def _num_kv_heads(config: Mapping[str, Any]) -> int | None:
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    if any(isinstance(config.get(key), list) for key in ("num_key_value_heads", "num_attention_heads")):
        return None
    return _first(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_heads", "n_head")


def _head_dim(config: Mapping[str, Any]) -> int | None:
    hidden_size, num_heads = _first(config, "hidden_size", "n_embd"), _first(config, "num_attention_heads", "n_head")
    fallback = hidden_size // num_heads if hidden_size and num_heads else None
    return _first(config, "head_dim") or fallback


def _has_window(config: Mapping[str, Any]) -> bool:
    # Qwen2 configs name a window that is not used.
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False


def _cache_type(config: Mapping[str, Any], spec: ModelSpec, kv_cache_dtype: str) -> tuple[int | None, str]:
    """Bytes of an item and the type in words."""
    if kv_cache_dtype != "auto":
        return _CACHE_BYTES.get(kv_cache_dtype), kv_cache_dtype
    quantization = config.get("quantization_config") or {}
    if any(quantization.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo", "quantization")):
        return None, "that the checkpoint chooses"
    dtype = weight_dtype(config, spec)
    return _ITEM_BYTES[dtype], dtype


def weight_dtype(config: Mapping[str, Any], spec: ModelSpec) -> str:
    """The type of weights and arithmetic on a GPU. By default vLLM runs float32 checkpoints in 16 bits."""
    if spec.dtype != "auto":
        return spec.dtype
    named = text_section(config).get("dtype") or text_section(config).get("torch_dtype") or config.get("torch_dtype")
    return "float16" if named in ("float16", "half") else "bfloat16"


def _weight_bytes(model: Model, spec: ModelSpec) -> tuple[int | None, str]:
    item_bytes = _ITEM_BYTES[weight_dtype(model.config, spec)]
    is_quantized = bool(model.config.get("quantization_config"))
    if spec.quantization not in (None, "fp8") and not is_quantized:
        return None, f"quantization {spec.quantization} is of a size of its own"
    is_fp8 = spec.quantization == "fp8" and not is_quantized
    if spec.load_format != "dummy" and (stored := _stored_bytes(model, spec, item_bytes, is_fp8, is_quantized)):
        return stored, ""
    if is_quantized:
        return None, "they are quantized, and not here yet"
    parameters = parameters_of(text_section(model.config)) if not _is_multimodal(model.config) else None
    if parameters is None:
        return None, f"they are not here, and {model.config.get('model_type', 'this model')} is not known by its config"
    in_layers, others = parameters
    return in_layers * (1 if is_fp8 else item_bytes) + others * item_bytes, ""


def _is_multimodal(config: Mapping[str, Any]) -> bool:
    return text_section(config) is not config


def _stored_bytes(model: Model, spec: ModelSpec, item_bytes: int, is_fp8: bool, is_quantized: bool) -> int | None:
    """Bytes by the headers of safetensors files, with each tensor in the type that vLLM uses; None without them."""
    folder, total = pathlib.Path(model.path), 0
    if not folder.is_dir():
        return None
    is_tied = bool(text_section(model.config).get("tie_word_embeddings"))
    try:
        names = model_files.weight_files(folder, spec.load_format)
        for name in names:
            if not name.endswith(".safetensors"):
                return None
            tensors, _ = model_files.read_header(folder / name)
            for tensor, header in tensors.items():
                if is_tied and tensor.endswith("lm_head.weight"):
                    continue
                size = header["data_offsets"][1] - header["data_offsets"][0]
                if header["dtype"] in _CAST and not is_quantized:
                    is_linear = len(header["shape"]) == 2 and ".layers." in tensor
                    size = math.prod(header["shape"]) * (1 if is_fp8 and is_linear else item_bytes)
                total += size
    except (OSError, ValueError, AttributeError, ModelError):
        return None
    return total or None


def parameters_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Parameters in the layers' matrices, and all others, by the config's shapes; None for an unknown family."""
    family, hidden = config.get("model_type"), config.get("hidden_size")
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    head_dim, num_kv_heads = _head_dim(config), _num_kv_heads(config)
    if family not in _DENSE + _SPARSE or not all(isinstance(config.get(key), int) for key in keys):
        return None
    assert isinstance(hidden, int)
    if head_dim is None or num_kv_heads is None:
        return None
    num_layers, query, keys_values = (
        config["num_hidden_layers"],
        config["num_attention_heads"] * head_dim,
        (2 * num_kv_heads * head_dim),
    )
    matrices = hidden * (query + keys_values) + query * hidden + _mlp(config, str(family), hidden)
    vectors = 2 * hidden
    if family == "qwen2":
        vectors += query + keys_values  # biases
    if family in ("qwen3", "qwen3_moe"):
        vectors += 2 * head_dim  # norms of query and key
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return num_layers * matrices, num_layers * vectors + embeddings + hidden


def _mlp(config: Mapping[str, Any], family: str, hidden: int) -> int:
    if family in _DENSE:
        return 3 * hidden * int(config["intermediate_size"])
    num_experts = _first(config, "num_local_experts", "num_experts") or 1
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return num_experts * (3 * hidden * int(width) + hidden)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:,.1f} MiB"


def needs_lines(fit: Fit, gpu_memory_utilization: float) -> list[str]:
    """Lines for people: the model's memory, and what fits on one device if there is one."""
    needs, parts = fit.needs, []
    if needs.weight_bytes is not None:
        parts.append(f"weights {gib(needs.weight_bytes)}")
    if needs.kv_cache is not None:
        each = needs.kv_cache.bytes_per_token()
        parts.append(f"KV cache {each * 1000 / 2**20:,.1f} MiB for 1,000 tokens in {needs.kv_cache.dtype}")
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
