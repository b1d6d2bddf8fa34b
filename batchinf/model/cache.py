"""Bytes of a model's KV cache by layer, from its config: as vLLM 0.32's cache specs have them, on each rank.

Kinds of layers: full attention, attention in a sliding window or in chunks, latent attention (MLA), and layers with a
state of one size for each sequence (Mamba, linear attention).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from batchinf.model.weights import stage_sizes

Kind = Literal["full", "window", "chunk", "latent", "state"]

BLOCK_TOKENS = 16  # vLLM's default on CUDA devices
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "fp8": 1, "fp8_e4m3": 1,
               "fp8_e5m2": 1, "fp8_inc": 1}  # fmt: skip
# Families whose latent attention vLLM caches as one compressed row (`is_deepseek_mla` in model_arch_config_convertor).
_LATENT = frozenset(
    """deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite kimi_k2 kimi_linear longcat_flash
    pangu_ultra_moe""".split()
)
_WINDOWS = ("sliding_attention", "local", "local_attention", "sliding_window")
_STATES = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "linear", "m", "hybrid")
_FULL = ("full_attention", "attention", "global", "*", "full")


class UnknownCacheError(Exception):
    """The KV cache of a model is not known by its config; the message says why."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state of one sequence: (numbers, bytes of each) that tensor-parallel ranks split.

    num_groups, group_bytes: of Mamba 2, which vLLM gives more groups if the ranks do not divide them.
    """

    split: tuple[tuple[int, int], ...]
    num_groups: int = 0
    group_bytes: int = 0

    def num_bytes(self, tensor_parallel_size: int) -> int:
        """On one rank."""
        extra = tensor_parallel_size - self.num_groups if self.num_groups % tensor_parallel_size else 0
        total = sum(number * size for number, size in self.split) + max(0, extra) * self.group_bytes
        return total // tensor_parallel_size


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer. A token takes num_heads × width × item_bytes, plus `extra_bytes` on every rank.

    width: items of one head: its key and its value, or MLA's compressed row, which has one head on every rank.
    window: the tokens that a `window` or `chunk` layer keeps. state: of a `state` layer.
    """

    kind: Kind
    num_heads: int = 0
    width: int = 0
    item_bytes: int = 0
    extra_bytes: int = 0
    window: int | None = None
    state: LayerState | None = None

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
    """The caches of a model's layers, in their order. A layer may have none, or two. dtype: in words."""

    layers: tuple[tuple[LayerCache, ...], ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Of a cached number of the first attention layer; 0 without attention."""
        return next((cache.item_bytes for layer in self.layers for cache in layer if cache.item_bytes), 0)

    def in_fp8(self) -> "KvCache":
        """The same cache with `kv_cache_dtype: fp8`."""
        layers = tuple(tuple(replace(it, item_bytes=min(1, it.item_bytes)) for it in layer) for layer in self.layers)
        return KvCache(layers, "fp8")

    def stages(self, pipeline_parallel_size: int = 1) -> Iterator[list[LayerCache]]:
        """The caches on each stage of a pipeline."""
        start = 0
        for size in stage_sizes(len(self.layers), pipeline_parallel_size):
            yield [cache for layer in self.layers[start : start + size] for cache in layer]
            start += size

    def _fullest(self, pipeline_parallel_size: int, bytes_of: Callable[[LayerCache], int]) -> int:
        return max(sum(map(bytes_of, caches)) for caches in self.stages(pipeline_parallel_size))

    def bytes_per_token(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """Of one more token of a long sequence, on the device with the most."""
        return self._fullest(
            pipeline_parallel_size,
            lambda it: 0 if it.window is not None or it.state is not None else it.token_bytes(tensor_parallel_size),
        )

    def sequence_bytes(self, num_tokens: int, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """Of one sequence, on the device with the most."""
        return self._fullest(pipeline_parallel_size, lambda it: it.sequence_bytes(num_tokens, tensor_parallel_size))

    def pools(
        self,
        num_tokens: int,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        in_flight_tokens: int = 0,
        block_tokens: int = BLOCK_TOKENS,
    ) -> "list[Pool]":
        """What one sequence of `num_tokens` takes of each stage, in the blocks of vLLM's allocator.

        in_flight_tokens: that a window layer keeps beyond its window, because they are being computed.
        """
        return [
            _pool(caches, num_tokens, tensor_parallel_size, in_flight_tokens, block_tokens)
            for caches in self.stages(pipeline_parallel_size)
            if caches
        ]


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of blocks of one stage, which all groups of layers share. num_blocks: of one sequence."""

    block_bytes: int
    num_blocks: float

    @property
    def sequence_bytes(self) -> int:
        """Of one sequence on one rank."""
        return math.ceil(self.block_bytes * self.num_blocks)

    def capacity(self, num_bytes: int) -> float:
        """Sequences that this much memory holds."""
        return num_bytes // self.block_bytes / self.num_blocks


def _pool(caches: list[LayerCache], num_tokens: int, tensor: int, in_flight: int, block_tokens: int) -> Pool:
    """Groups of layers and the blocks that each takes, as `get_kv_cache_groups` in vLLM's v1/core/kv_cache_utils.py."""
    pages = [it.token_bytes(tensor) for it in caches if it.state is None]
    states = [it.state.num_bytes(tensor) for it in caches if it.state is not None]
    if not pages:
        return Pool(sum(states), 1)
    if not states and all(it.window is None for it in caches):
        return Pool(sum(pages), num_tokens)
    # A block of attention becomes as large as a state, which is padded to it; a narrower page gets more tokens.
    page = max(pages) * block_tokens
    page *= max(1, math.ceil(max(states, default=0) / page))
    kinds: dict[tuple[Any, ...], int] = {}
    for it in caches:
        key = ("state",) if it.state is not None else (it.kind, it.window, page // it.token_bytes(tensor))
        kinds[key] = kinds.get(key, 0) + 1
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if most < fewest * 1.5 else fewest
    num_blocks = 0
    for (kind, *sizes), number in kinds.items():
        each = 1
        if kind != "state":
            window, block = sizes
            kept = num_tokens if window is None else min(window - (kind == "window") + in_flight, num_tokens)
            # A sliding window may begin in the middle of a block.
            each = math.ceil(kept / block) + (kind == "window")
        num_blocks += math.ceil(number / group_size) * each
    return Pool(group_size * page, num_blocks)


# -- from a config ---------------------------------------------------------------------------------------------------


def kv_cache_of(
    config: Mapping[str, Any],
    whole: Mapping[str, Any],
    model_dtype: str,
    kv_cache_dtype: str,
    mamba_ssm_cache_dtype: str = "auto",
) -> KvCache:
    """The KV cache by a model's config. config: the text section of the `whole` one. Raises UnknownCacheError.

    kv_cache_dtype: vLLM's argument; `auto`: as the checkpoint chooses, else the model's type. mamba_ssm_cache_dtype:
    vLLM's argument, of the states of recurrent layers; `auto`: as the config says, else the model's type.
    """
    if whole.get("is_encoder_decoder"):
        raise UnknownCacheError(f"{whole.get('model_type', 'this model')} has an encoder and a decoder")
    dtype = _checkpoints_type(whole) if kv_cache_dtype == "auto" else kv_cache_dtype
    dtype = model_dtype if dtype is None else dtype
    if dtype not in _ITEM_BYTES:
        raise UnknownCacheError(f"kv_cache_dtype {dtype} is of a size of its own")
    num_layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if num_layers is None:
        raise UnknownCacheError("the config does not give the number of layers")
    kinds = _kinds(config, num_layers)
    num_cached = num_layers - (_first(config, "num_kv_shared_layers") or 0)
    if mamba_ssm_cache_dtype == "auto":
        mamba_ssm_cache_dtype = _state_dtype(config) or model_dtype
    item, state = _ITEM_BYTES[dtype], (_ITEM_BYTES[model_dtype], _ITEM_BYTES.get(mamba_ssm_cache_dtype, 4))
    layers = [_layer(config, kind, item, state) if number < num_cached else () for number, kind in enumerate(kinds)]
    if not any(layers):
        raise UnknownCacheError("the config gives no layer that keeps anything")
    return KvCache(tuple(layers), dtype)


def _state_dtype(config: Mapping[str, Any]) -> str | None:
    """What vLLM's model_executor/models/config.py takes for Nemotron-H and Qwen3.5."""
    family = str(config.get("model_type"))
    if family.startswith("nemotron_h"):
        return str(config.get("mamba_ssm_cache_dtype") or "float32")
    named = config.get("mamba_ssm_dtype") if family.startswith("qwen3_5") else None
    return None if named is None else str(named)


def _layer(
    config: Mapping[str, Any], kind: str, item_bytes: int, state_bytes: tuple[int, int]
) -> tuple[LayerCache, ...]:
    if kind == "none":
        return ()
    if kind == "both":  # Falcon-H1: attention and a state in each layer
        return (_attention(config, item_bytes, None), LayerCache("state", state=_state(config, state_bytes)))
    if kind == "state":
        return (LayerCache("state", state=_state(config, state_bytes)),)
    window = None
    if kind in ("window", "chunk"):
        keys = ("sliding_window", "sliding_window_size", "local_attention")
        window = _first(config, *(keys if kind == "window" else ("attention_chunk_size",)))
        if window is None:
            raise UnknownCacheError("the config does not give the size of its window")
    if config.get("model_type") in _LATENT and isinstance(config.get("kv_lora_rank"), int) and kind == "full":
        return (_latent(config, item_bytes),)
    cache = _attention(config, item_bytes, window)
    return (replace(cache, kind="chunk") if kind == "chunk" else cache,)


def _latent(config: Mapping[str, Any], item_bytes: int) -> LayerCache:
    rope = config.get("qk_rope_head_dim")
    if not isinstance(rope, int):
        raise UnknownCacheError("the config does not give qk_rope_head_dim")
    if config.get("index_topk"):
        # DeepSeek sparse attention: an index of bytes with a scale of 4 bytes for each 128; in fp8, rows of 656 bytes.
        index = _first(config, "index_head_dim") or 128
        extra = index + index // 128 * 4
        return LayerCache("latent", 1, 656 if item_bytes == 1 else config["kv_lora_rank"] + rope, item_bytes, extra)
    return LayerCache("latent", 1, config["kv_lora_rank"] + rope, item_bytes)


def _attention(config: Mapping[str, Any], item_bytes: int, window: int | None) -> LayerCache:
    heads, head_dim = num_kv_heads(config), head_dim_of(config)
    if heads is None or head_dim is None:
        raise UnknownCacheError("the config does not give layers, heads and their size")
    return LayerCache("full" if window is None else "window", heads, 2 * head_dim, item_bytes, 0, window)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """`full`, `window`, `chunk`, `state`, `both` or `none` for each layer."""
    family = str(config.get("model_type", ""))
    if family.startswith(("mamba", "falcon_mamba")):
        return ["state"] * num_layers
    if family == "falcon_h1":
        return ["both"] * num_layers
    named = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if named:
        return [_kind_of(str(name), family) for name in list(named)[:num_layers]]
    if isinstance(period := config.get("attn_layer_period"), int):
        offset = _first(config, "attn_layer_offset") or 0
        return ["full" if layer % period == offset else "state" for layer in range(num_layers)]
    if isinstance(chosen := config.get("attn_layer_indices"), list):
        return ["full" if layer in chosen else "state" for layer in range(num_layers)]
    others = [key for key in _OTHER_CACHES if config.get(key)]
    if others or any(isinstance(config.get(key), list) for key in ("num_key_value_heads", "num_attention_heads")):
        raise UnknownCacheError(f"{family or 'this model'} does not keep every token in every layer")
    # Qwen2 configs name a window that is not used.
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False
    return ["window" if has_window else "full"] * num_layers


# A config with one of these keys and without a list of kinds has layers of several kinds.
_OTHER_CACHES = ("sliding_window_pattern", "_sliding_window_pattern", "attention_chunk_size", "full_attention_interval",
                 "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "block_configs", "compress_ratios",
                 "cross_attention_layers")  # fmt: skip


def _kind_of(name: str, family: str) -> str:
    if name in _WINDOWS:
        return "window"
    if name == "chunked_attention":
        return "chunk"
    if name == "hybrid" and family in ("zamba2", "zamba"):
        return "both"
    if name.lower() in _STATES:
        return "state"
    if name in _FULL:
        return "full"
    if name in ("-", "E", "mlp", "moe"):  # layers of Nemotron-H that keep nothing
        return "none"
    raise UnknownCacheError(f"layers of type {name} are not known")


def _state(config: Mapping[str, Any], sizes: tuple[int, int]) -> LayerState:
    """Shapes by `MambaStateShapeCalculator` in vLLM's model_executor/layers/mamba/mamba_utils.py.

    sizes: bytes of a number of the convolution's state and of the recurrent one.
    """
    item_bytes, recurrent_bytes = sizes
    hidden = _first(config, "hidden_size") or 0
    if (keys := _first(config, "linear_num_key_heads")) is not None:  # gated delta net: Qwen3-Next and later
        values, key_dim = _needed(config, "linear_num_value_heads"), _needed(config, "linear_key_head_dim")
        value_dim, kernel = _needed(config, "linear_value_head_dim"), _needed(config, "linear_conv_kernel_dim")
        convolved = 2 * keys * key_dim + values * value_dim
        return LayerState(((convolved * (kernel - 1), item_bytes), (values * value_dim * key_dim, recurrent_bytes)))
    if (length := _first(config, "conv_L_cache")) is not None:  # short convolutions: LFM2
        return LayerState(((hidden * (length - 1), item_bytes),))
    kernel = _first(config, "mamba_d_conv", "conv_kernel", "conv_kernel_size") or 4
    size = _needed(config, "mamba_d_state", "ssm_state_size", "state_size")
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    if config.get("model_type") == "mamba2":
        heads = _first(config, "num_heads")
    is_second = heads is not None and config.get("model_type") not in ("jamba", "falcon_mamba", "mamba", "zamba")
    expand = _first(config, "mamba_expand", "expand") or 2
    if not is_second or heads is None:
        inner = _first(config, "intermediate_size") if config.get("model_type") in ("mamba", "falcon_mamba") else None
        inner = inner or expand * hidden
        return LayerState(((inner * (kernel - 1), item_bytes), (inner * size, recurrent_bytes)))
    is_plain = config.get("model_type") == "mamba2"
    head_keys = ("head_dim",) if is_plain else ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    head_dim = _first(config, *head_keys) or expand * hidden // heads
    groups = _first(config, "mamba_n_groups", "n_groups", "mamba_ngroups") or 1
    group_items = 2 * size * (kernel - 1)
    convolved = heads * head_dim * (kernel - 1) + groups * group_items
    split = ((convolved, item_bytes), (heads * head_dim * size, recurrent_bytes))
    return LayerState(split, groups, group_items * item_bytes)


def _needed(config: Mapping[str, Any], *keys: str) -> int:
    found = _first(config, *keys)
    if found is None:
        raise UnknownCacheError(f"the config does not give {keys[0]}")
    return found


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    found = (config[key] for key in keys if isinstance(config.get(key), int) and not isinstance(config[key], bool))
    return next(found, None)


def num_attention_heads(config: Mapping[str, Any]) -> int | None:
    """Query heads, which tensor-parallel ranks must divide."""
    return _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads")


def num_kv_heads(config: Mapping[str, Any]) -> int | None:
    """Heads of keys and values."""
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    # As in vLLM's `get_total_num_kv_heads`.
    found = _first(config, "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    return num_attention_heads(config) if found is None else found


def head_dim_of(config: Mapping[str, Any]) -> int | None:
    """Size of a head."""
    given = _first(config, "attention_head_dim" if config.get("model_type") == "zamba2" else "head_dim")
    hidden, heads = _first(config, "hidden_size", "n_embd", "d_model"), num_attention_heads(config)
    return given or (hidden // heads if hidden and heads else None)


def _checkpoints_type(config: Mapping[str, Any]) -> str | None:
    """The type that a quantized checkpoint names for its cache; None: the model's."""
    found = config.get("quantization_config") or {}
    scheme, algorithm = found.get("kv_cache_scheme"), found.get("kv_cache_quant_algo")
    inner = found.get("quantization")
    if algorithm is None and isinstance(inner, Mapping):
        algorithm = inner.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
        return "fp8" if is_fp8 else "that the checkpoint chooses"
    if algorithm:
        return "fp8" if str(algorithm).upper() == "FP8" else str(algorithm)
    return None
