"""Bytes of a model's KV cache by layer, from its config: as vLLM 0.32's cache specs have them, on each rank.

Kinds of layers: full attention, attention in a sliding window or in chunks, latent attention (MLA), and layers with a
state of one size for each sequence (Mamba, linear attention).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchinf.model.weights import UnknownSizeError, stage_sizes

BLOCK_TOKENS = 16  # vLLM's default on CUDA devices
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "fp8": 1, "fp8_e4m3": 1,
              "fp8_e5m2": 1, "fp8_inc": 1}  # fmt: skip
# Families whose latent attention vLLM caches as one compressed row (`is_deepseek_mla` in model_arch_config_convertor).
_LATENT = frozenset(
    """deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite kimi_k2 kimi_linear longcat_flash
    pangu_ultra_moe""".split()
)
# The names that configs give to kinds of layers. `none`: layers of Nemotron-H that keep nothing.
_KINDS = {
    "chunked_attention": "chunk",
    **dict.fromkeys(("sliding_attention", "local", "local_attention", "sliding_window"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "conv", "linear", "m", "hybrid"), "state"),
    **dict.fromkeys(("full_attention", "attention", "global", "*", "full"), "full"),
    **dict.fromkeys(("-", "E", "mlp", "moe"), "none"),
}
_WINDOW_KEYS = {
    "window": "sliding_window sliding_window_size local_attention",
    "chunk": "attention_chunk_size",
}


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state of one sequence."""

    split: tuple[tuple[int, int], ...]
    """(numbers, bytes of each) that tensor-parallel ranks split."""
    num_groups: int = 0
    """Groups of Mamba 2. vLLM adds groups if the ranks do not divide them."""
    group_bytes: int = 0

    def num_bytes(self, tensor_parallel_size: int) -> int:
        """On one rank."""
        extra = tensor_parallel_size - self.num_groups if self.num_groups % tensor_parallel_size else 0
        total = sum(number * size for number, size in self.split) + max(0, extra) * self.group_bytes
        return total // tensor_parallel_size


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer. A token takes num_heads × width × item_bytes, plus `extra_bytes` on every rank."""

    kind: str
    """`full`, `window` or `chunk` attention, `latent` attention (MLA), or a `state`."""
    num_heads: int = 0
    width: int = 0
    """Items of one head: its key and its value, or MLA's compressed row, which has one head on every rank."""
    item_bytes: int = 0
    extra_bytes: int = 0
    window: int | None = None
    """The tokens that a `window` or `chunk` layer keeps."""
    state: LayerState | None = None
    """Of a `state` layer."""

    def token_bytes(self, tensor_parallel_size: int = 1) -> int:
        """On one rank. A head is not split: if there are more ranks than heads, several ranks keep the same one."""
        heads = max(1, self.num_heads // tensor_parallel_size) if self.num_heads else 0
        return heads * self.width * self.item_bytes + self.extra_bytes

    def sequence_bytes(self, num_tokens: int, tensor_parallel_size: int = 1) -> int:
        """Of one sequence on one rank."""
        if self.state is not None:
            return self.state.num_bytes(tensor_parallel_size)
        kept = num_tokens if self.window is None else min(num_tokens, self.window)
        return kept * self.token_bytes(tensor_parallel_size)


@dataclass(frozen=True, slots=True)
class KvCache:
    """The caches of a model's layers."""

    layers: tuple[tuple[LayerCache, ...], ...]
    """In the order of the layers. A layer may have no cache, or two."""
    dtype: str
    """The type in words."""

    @property
    def has_states(self) -> bool:
        """Whether a layer is recurrent."""
        return any(cache.state is not None for layer in self.layers for cache in layer)

    def stages(self, pipeline_parallel_size: int) -> Iterator[list[LayerCache]]:
        """The caches on each stage of a pipeline."""
        start = 0
        for size in stage_sizes(len(self.layers), pipeline_parallel_size):
            yield [cache for layer in self.layers[start : start + size] for cache in layer]
            start += size

    def bytes_per_token(self) -> int:
        """Of one more token of a long sequence, on one device."""
        return sum(cache.token_bytes() for layer in self.layers for cache in layer if cache.window is None)

    def sequence_bytes(self, num_tokens: int, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """Of one sequence, on the device with the most."""
        stages = self.stages(pipeline_parallel_size)
        return max(sum(it.sequence_bytes(num_tokens, tensor_parallel_size) for it in caches) for caches in stages)


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of blocks of one stage, which all groups of layers share."""

    block_bytes: int
    num_blocks: float
    """Blocks of one sequence."""

    @property
    def sequence_bytes(self) -> int:
        """Of one sequence on one rank."""
        return math.ceil(self.block_bytes * self.num_blocks)

    def capacity(self, num_bytes: int) -> float:
        """Sequences that this much memory holds."""
        return num_bytes // self.block_bytes / self.num_blocks


def pool_of(
    caches: list[LayerCache], num_tokens: int, tensor_parallel_size: int, *, in_flight_tokens: int, block_tokens: int
) -> Pool:
    """The blocks of vLLM's allocator that one sequence of `num_tokens` takes on a stage with these caches.

    Groups of layers and the blocks of each are those of `get_kv_cache_groups` in vLLM's v1/core/kv_cache_utils.py.
    in_flight_tokens: that a window layer keeps beyond its window, because they are being computed.
    """
    attention = [it for it in caches if it.state is None]
    pages = [it.token_bytes(tensor_parallel_size) for it in attention]
    states = [it.state.num_bytes(tensor_parallel_size) for it in caches if it.state is not None]
    if not pages:
        return Pool(sum(states), 1)
    if not states and all(it.window is None for it in attention):
        return Pool(sum(pages), num_tokens)
    # A block of attention becomes as large as a state, which is padded to it; a narrower page gets more tokens.
    block_bytes = max(pages) * block_tokens
    block_bytes *= max(1, math.ceil(max(states, default=0) / block_bytes))
    kinds = Counter((it.kind, it.window, block_bytes // page) for it, page in zip(attention, pages, strict=True))
    numbers = [*kinds.values(), *([len(states)] if states else [])]
    group_size = max(numbers) if max(numbers) < min(numbers) * 1.5 else min(numbers)
    num_blocks = math.ceil(len(states) / group_size)
    for (kind, window, tokens_of_block), number in kinds.items():
        is_window = kind == "window"
        kept = num_tokens if window is None else min(window - is_window + in_flight_tokens, num_tokens)
        # A sliding window may begin in the middle of a block.
        num_blocks += math.ceil(number / group_size) * (math.ceil(kept / tokens_of_block) + is_window)
    return Pool(group_size * block_bytes, num_blocks)


# -- from a config ---------------------------------------------------------------------------------------------------


def kv_cache_of(
    config: Mapping[str, Any], whole: Mapping[str, Any], model_dtype: str, engine: Mapping[str, Any]
) -> KvCache:
    """The KV cache by a model's config. config: the text section of the `whole` one. Raises UnknownSizeError.

    engine: vLLM's arguments. If `kv_cache_dtype` is `auto`, the type is as the checkpoint chooses, else the model's. If
    `mamba_ssm_cache_dtype` is, the states of recurrent layers have the type that the config says, else the model's.
    """
    if whole.get("is_encoder_decoder"):
        raise UnknownSizeError(f"{whole.get('model_type', 'this model')} has an encoder and a decoder")
    dtype = _dtype_of(engine, "kv_cache_dtype", _checkpoint_dtype(whole)) or model_dtype
    if dtype not in ITEM_BYTES:
        raise UnknownSizeError(f"kv_cache_dtype {dtype} is of a size of its own")
    num_layers = _needed(config, "num_hidden_layers n_layer num_layers n_layers", "the number of layers")
    state_dtype = _dtype_of(engine, "mamba_ssm_cache_dtype", _state_dtype(config)) or model_dtype
    sizes = _ItemBytes(ITEM_BYTES[dtype], ITEM_BYTES[model_dtype], ITEM_BYTES.get(state_dtype, 4))
    kinds = _kinds(config, num_layers)
    num_cached = num_layers - (first_number(config, "num_kv_shared_layers") or 0)
    layers = [_layer(config, kind, sizes) if number < num_cached else () for number, kind in enumerate(kinds)]
    if not any(layers):
        raise UnknownSizeError("the config gives no layer that keeps anything")
    return KvCache(tuple(layers), dtype)


def _dtype_of(engine: Mapping[str, Any], argument: str, by_config: str | None) -> str | None:
    """The type that an engine argument names; if it is `auto`, that of the config."""
    asked = str(engine.get(argument, "auto"))
    return by_config if asked == "auto" else asked


@dataclass(frozen=True, slots=True)
class _ItemBytes:
    """Bytes of a number in a cache, by what it belongs to."""

    attention: int
    convolution: int
    recurrent: int


def _state_dtype(config: Mapping[str, Any]) -> str | None:
    """What vLLM's model_executor/models/config.py takes for Nemotron-H and Qwen3.5."""
    family = str(config.get("model_type"))
    if family.startswith("nemotron_h"):
        return str(config.get("mamba_ssm_cache_dtype") or "float32")
    named = config.get("mamba_ssm_dtype") if family.startswith("qwen3_5") else None
    return None if named is None else str(named)


def _layer(config: Mapping[str, Any], kind: str, sizes: _ItemBytes) -> tuple[LayerCache, ...]:
    if kind == "none":
        return ()
    if kind in ("state", "both"):
        state = LayerCache("state", state=_state(config, sizes))
        # Falcon-H1 has attention and a state in each layer.
        return (state,) if kind == "state" else (_attention(config, sizes.attention), state)
    if kind == "full" and config.get("model_type") in _LATENT and isinstance(config.get("kv_lora_rank"), int):
        return (_latent(config, sizes.attention),)
    if kind == "full":
        return (_attention(config, sizes.attention),)
    window = _needed(config, _WINDOW_KEYS[kind], "the size of its window")
    return (replace(_attention(config, sizes.attention), kind=kind, window=window),)


def _latent(config: Mapping[str, Any], item_bytes: int) -> LayerCache:
    rope = _needed(config, "qk_rope_head_dim")
    plain = LayerCache("latent", num_heads=1, width=config["kv_lora_rank"] + rope, item_bytes=item_bytes)
    if not config.get("index_topk"):
        return plain
    # DeepSeek sparse attention: an index of bytes with a scale of 4 bytes for each 128; in fp8, rows of 656 bytes.
    index = first_number(config, "index_head_dim") or 128
    return replace(plain, width=656 if item_bytes == 1 else plain.width, extra_bytes=index + index // 128 * 4)


def _attention(config: Mapping[str, Any], item_bytes: int) -> LayerCache:
    num_heads = num_kv_heads(config)
    head_dim = head_dim_of(config)
    if num_heads is None or head_dim is None:
        raise UnknownSizeError("the config does not give layers, heads and their size")
    return LayerCache("full", num_heads=num_heads, width=2 * head_dim, item_bytes=item_bytes)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """`full`, `window`, `chunk`, `state`, `both` or `none` for each layer."""
    family = str(config.get("model_type", ""))
    if family.startswith(("mamba", "falcon_mamba")):
        return ["state"] * num_layers
    if family == "falcon_h1":
        return ["both"] * num_layers
    names = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if names:
        return [_kind_of(str(name), family) for name in list(names)[:num_layers]]
    if (attending := _attention_layers(config, num_layers)) is not None:
        return ["full" if layer in attending else "state" for layer in range(num_layers)]
    return [_common_kind(config, family)] * num_layers


def _common_kind(config: Mapping[str, Any], family: str) -> str:
    """The kind of all layers, by a config that does not name any."""
    has_lists = any(isinstance(config.get(key), list) for key in ("num_key_value_heads", "num_attention_heads"))
    if has_lists or any(map(config.get, _OTHER_CACHES)):
        raise UnknownSizeError(f"{family or 'this model'} does not keep every token in every layer")
    # Qwen2 configs name a window that is not used.
    is_full = not config.get("sliding_window") or config.get("use_sliding_window", True) is False
    return "full" if is_full else "window"


# A config with one of these keys and without a list of kinds has layers of several kinds.
_OTHER_CACHES = ("sliding_window_pattern", "_sliding_window_pattern", "attention_chunk_size", "full_attention_interval",
                 "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "block_configs", "compress_ratios",
                 "cross_attention_layers")  # fmt: skip


def _attention_layers(config: Mapping[str, Any], num_layers: int) -> Collection[int] | None:
    """The layers with attention, if the config numbers them; the others have a state."""
    if isinstance(period := config.get("attn_layer_period"), int):
        return range(first_number(config, "attn_layer_offset") or 0, num_layers, period)
    indices = config.get("attn_layer_indices")
    return indices if isinstance(indices, list) else None


def _kind_of(name: str, family: str) -> str:
    if name == "hybrid" and family in ("zamba2", "zamba"):
        return "both"
    kind = _KINDS.get(name) or _KINDS.get(name.lower())
    if kind is None:
        raise UnknownSizeError(f"layers of type {name} are not known")
    return kind


def _state(config: Mapping[str, Any], sizes: _ItemBytes) -> LayerState:
    """Shapes by `MambaStateShapeCalculator` in vLLM's model_executor/layers/mamba/mamba_utils.py."""
    hidden = first_number(config, "hidden_size") or 0
    if (num_keys := first_number(config, "linear_num_key_heads")) is not None:  # gated delta net: Qwen3-Next and later
        num_values = _needed(config, "linear_num_value_heads")
        key_dim = _needed(config, "linear_key_head_dim")
        value_dim = _needed(config, "linear_value_head_dim")
        kernel = _needed(config, "linear_conv_kernel_dim")
        convolved = 2 * num_keys * key_dim + num_values * value_dim
        return _two_states(convolved * (kernel - 1), num_values * value_dim * key_dim, sizes)
    if (length := first_number(config, "conv_L_cache")) is not None:  # short convolutions: LFM2
        return LayerState(((hidden * (length - 1), sizes.convolution),))
    return _mamba_state(config, hidden, sizes)


def _two_states(convolved: int, recurrent: int, sizes: _ItemBytes) -> LayerState:
    return LayerState(((convolved, sizes.convolution), (recurrent, sizes.recurrent)))


def _inner_width(config: Mapping[str, Any]) -> Any:
    """The width of a layer of Mamba 1, for the families whose configs give it."""
    return first_number(config, "intermediate_size") if config.get("model_type") in ("mamba", "falcon_mamba") else None


def _mamba_state(config: Mapping[str, Any], hidden: int, sizes: _ItemBytes) -> LayerState:
    family = config.get("model_type")
    kernel = first_number(config, "mamba_d_conv conv_kernel conv_kernel_size") or 4
    size = _needed(config, "mamba_d_state ssm_state_size state_size")
    expand = first_number(config, "mamba_expand expand") or 2
    is_plain = family == "mamba2"  # keys without `mamba_`
    num_heads = first_number(config, "num_heads" if is_plain else "mamba_n_heads mamba_num_heads n_mamba_heads")
    if num_heads is None or family in ("jamba", "falcon_mamba", "mamba", "zamba"):  # Mamba 1
        inner = _inner_width(config) or expand * hidden
        return _two_states(inner * (kernel - 1), inner * size, sizes)
    dim_keys = "head_dim" if is_plain else "mamba_d_head mamba_head_dim mamba_headdim"
    head_dim = first_number(config, dim_keys) or expand * hidden // num_heads
    num_groups = first_number(config, "mamba_n_groups n_groups mamba_ngroups") or 1
    group_items = 2 * size * (kernel - 1)
    convolved = num_heads * head_dim * (kernel - 1) + num_groups * group_items
    state = _two_states(convolved, num_heads * head_dim * size, sizes)
    return replace(state, num_groups=num_groups, group_bytes=group_items * sizes.convolution)


def _needed(config: Mapping[str, Any], keys: str, words: str = "") -> int:
    number = first_number(config, keys)
    if number is None:
        raise UnknownSizeError(f"the config does not give {words or keys.split()[0]}")
    return number


def first_number(config: Mapping[str, Any], keys: str) -> int | None:
    """The whole number under the first of these keys that has one. keys: with blanks between them."""
    values = map(config.get, keys.split())
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def num_attention_heads(config: Mapping[str, Any]) -> int | None:
    """Query heads, which tensor-parallel ranks must divide."""
    return first_number(config, "num_attention_heads n_head n_heads num_heads")


def num_kv_heads(config: Mapping[str, Any]) -> int | None:
    """Heads of keys and values."""
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    # As in vLLM's `get_total_num_kv_heads`.
    number = first_number(config, "n_head_kv num_kv_heads num_key_value_heads multi_query_group_num")
    return num_attention_heads(config) if number is None else number


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """Size of a head."""
    if size := first_number(config, "attention_head_dim" if config.get("model_type") == "zamba2" else "head_dim"):
        return size
    hidden = first_number(config, "hidden_size n_embd d_model")
    num_heads = num_attention_heads(config)
    return hidden // num_heads if hidden and num_heads else None


def _checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    """The type that a quantized checkpoint names for its cache; None: the model's."""
    section = config.get("quantization_config") or {}
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
        return "fp8" if is_fp8 else "that the checkpoint chooses"
    inner = section.get("quantization")
    algorithm = section.get("kv_cache_quant_algo")
    if algorithm is None and isinstance(inner, Mapping):
        algorithm = inner.get("kv_cache_quant_algo")
    return "fp8" if str(algorithm).upper() == "FP8" else str(algorithm) if algorithm else None
