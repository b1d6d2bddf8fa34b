"""Bytes of a model's weights on a device: the types of its parameters, quantization, and the stages of a pipeline."""

import fnmatch
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.model.parameters import Part, Tensor

# Float types in a safetensors header, which vLLM casts to the model's type.
_CAST = ("F64", "F32", "F16", "BF16")
_STORED_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
                 "F4": 0.5}  # fmt: skip
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's matrices are stored. Embeddings, head, norms and routers keep the model's type.

    name: in words. group_size: weights that share a scale; None: a row of the matrix; 0: the whole matrix. block: of
    two sizes, for a scale for each block. has_zeros: each scale has a zero point of `bits`. parts: that are quantized.
    ignored: patterns of names that are not.
    """

    name: str
    bits: int
    group_size: int | None = 0
    block: tuple[int, int] | None = None
    scale_bytes: float = 4
    has_zeros: bool = False
    parts: tuple[Part, ...] = ("linear", "expert")
    ignored: tuple[str, ...] = ()

    def is_for(self, tensor: Tensor) -> bool:
        """Whether the tensor is quantized."""
        if tensor.part not in self.parts or tensor.is_other:
            return False
        return not any(_matches(pattern, tensor) for pattern in self.ignored)

    def bytes_of(self, tensor: Tensor) -> float:
        """Weights, scales and zero points."""
        *many, rows, columns = (1, *tensor.shape)[-3:] if len(tensor.shape) < 3 else tensor.shape
        matrices = tensor.number * math.prod(many)
        if self.block is not None:
            scales = matrices * math.ceil(rows / self.block[0]) * math.ceil(columns / self.block[1])
        elif self.group_size is None:
            scales = matrices * rows
        else:
            scales = matrices * rows * math.ceil(columns / self.group_size) if self.group_size else matrices
        zeros = scales * self.bits / 8 if self.has_zeros else 0
        return tensor.num_parameters * self.bits / 8 + scales * self.scale_bytes + zeros


def _matches(pattern: str, tensor: Tensor) -> bool:
    """A name, the beginning or the end of one, or `re:` and an expression, as checkpoints list what they leave out."""
    layer = "" if tensor.layer is None else str(tensor.layer)
    name = tensor.name.replace("*", layer, 1)
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


class UnknownWeightsError(Exception):
    """The size of the weights is not known; the message says why."""


# Types that vLLM makes of 16-bit weights when it loads them, by the spec's `model.quantization`.
_ON_LOADING = {
    "fp8": Quantization("fp8", 8),
    "fp8_per_tensor": Quantization("fp8", 8),
    "fp8_per_channel": Quantization("fp8", 8, None),
    "fp8_per_block": Quantization("fp8", 8, block=(128, 128)),
    "int8_per_channel_weight_only": Quantization("int8", 8, None),
    "mxfp8": Quantization("mxfp8", 8, 32, scale_bytes=1),
    "nvfp4_per_token": Quantization("nvfp4", 4, 16, scale_bytes=1),
    "experts_int8": Quantization("int8 experts", 8, None, parts=("expert",)),
    "bitsandbytes": Quantization("bitsandbytes nf4", 4, 64),
    # Not names of vLLM: what quantized twins of a model would take, for `plan`.
    "awq": Quantization("awq", 4, 128, scale_bytes=2, has_zeros=True),
    "gptq": Quantization("gptq", 4, 128, scale_bytes=2, has_zeros=True),
    "int4": Quantization("int4", 4, 128, scale_bytes=2),
    "int8": Quantization("int8", 8, None, scale_bytes=2),
}  # fmt: skip
_ON_LOADING |= {name: _ON_LOADING[kind] for name, kind in [("awq_marlin", "awq"), ("auto_awq", "awq"),
                ("gptq_marlin", "gptq"), ("auto_gptq", "gptq")]}  # fmt: skip


def quantization_of(config: Mapping[str, Any], wanted: str | None) -> Quantization | None:
    """The quantization of a config's checkpoint, else the one that vLLM applies when it loads; None: none.

    wanted: the spec's `model.quantization`. Raises UnknownWeightsError.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if isinstance(found, Mapping) and found:
        return _of_checkpoint(found)
    if wanted is None:
        return None
    if wanted not in _ON_LOADING:
        raise UnknownWeightsError(f"quantization {wanted} is of a size of its own")
    return _ON_LOADING[wanted]


def _of_checkpoint(found: Mapping[str, Any]) -> Quantization:
    method = str(found.get("quant_method") or ("modelopt" if "quant_algo" in found else "")).replace("_", "-").lower()
    ignored = tuple(map(str, found.get("ignore") or found.get("modules_to_not_convert") or
                        found.get("exclude_modules") or ()))  # fmt: skip
    bits = found.get("bits") or found.get("w_bit") or found.get("num_bits")
    group_size = found.get("group_size", found.get("q_group_size", 128))
    group_size = None if group_size in (-1, None) else int(group_size)
    if method in ("awq", "gptq", "auto-round", "intel/auto-round", "auto-awq", "auto-gptq", "moe-wna16", "inc"):
        return Quantization(method, int(bits or 4), group_size, scale_bytes=2, has_zeros=True, ignored=ignored)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(found, ignored)
    if method in ("fp8", "fbgemm-fp8", "modelopt", "modelopt-fp4", "modelopt-mxfp8", "quark"):
        return _of_floats(method, found, ignored)
    if method in ("mxfp4", "gpt-oss-mxfp4"):
        return Quantization("mxfp4", 4, 32, scale_bytes=1, parts=("expert",), ignored=ignored)
    if method == "bitsandbytes":
        is_half = bool(found.get("load_in_4bit"))
        return Quantization(method, 4 if is_half else 8, 64 if is_half else None, ignored=ignored)
    if method == "torchao":
        words = json.dumps(found).lower()
        for name, size in (("int4", 4), ("int8", 8), ("float8", 8)):
            if name in words:
                return Quantization(f"torchao {name}", size, 128 if size == 4 else None, scale_bytes=2, ignored=ignored)
    raise UnknownWeightsError(f"the checkpoint's quantization {method or 'without a name'} is of a size of its own")


def _of_floats(method: str, found: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantization:
    words = json.dumps(found).lower()
    if "nvfp4" in words or (method == "modelopt-fp4"):
        return Quantization("nvfp4", 4, 16, scale_bytes=1, ignored=ignored)
    if "mxfp8" in words or method == "modelopt-mxfp8":
        return Quantization("mxfp8", 8, 32, scale_bytes=1, ignored=ignored)
    if method == "quark" and ("fp4" in words or "mxfp4" in words):
        return Quantization("mxfp4", 4, 32, scale_bytes=1, ignored=ignored)
    block = found.get("weight_block_size")
    sizes = (int(block[0]), int(block[1])) if block else None
    return Quantization("fp8", 8, None if method == "fbgemm-fp8" else 0, block=sizes, ignored=ignored)


def _compressed(found: Mapping[str, Any], ignored: tuple[str, ...]) -> Quantization:
    groups = [group.get("weights") for group in (found.get("config_groups") or {}).values() if group.get("weights")]
    if not groups:
        raise UnknownWeightsError("the checkpoint's compressed-tensors config has no group with weights")
    weights = groups[0]
    bits, strategy, size = int(weights["num_bits"]), weights.get("strategy"), weights.get("group_size")
    if strategy == "block" and weights.get("block_structure"):
        rows, columns = map(int, weights["block_structure"])
        return Quantization("fp8", bits, block=(rows, columns), ignored=ignored)
    has_groups = strategy in ("group", "tensor_group") and size and size > 0
    group_size = int(size) if has_groups else None if strategy == "channel" else 0
    scale_bytes = 1 if strategy == "tensor_group" else 2
    has_zeros = weights.get("symmetric") is False
    name = f"{'fp' if weights.get('type') == 'float' else 'int'}{bits}"
    return Quantization(name, bits, group_size, scale_bytes=scale_bytes, has_zeros=has_zeros, ignored=ignored)


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's weights. layers: of each layer. first, last: outside of the layers, on the first and the last
    stage of a pipeline. shared: embeddings that are also the head. parts: the same bytes by part.
    """

    layers: tuple[float, ...]
    first: float
    last: float
    shared: float
    parts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_total(cls, num_bytes: float, num_layers: int = 1) -> "Weights":
        """Weights of which only the sum is known."""
        return cls((num_bytes / num_layers,) * num_layers, 0, 0, 0)

    def halved(self) -> "Weights":
        """About what fp8 makes of 16 bits."""
        layers = tuple(size / 2 for size in self.layers)
        return Weights(layers, self.first / 2, self.last / 2, self.shared / 2)

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return round(sum(self.layers) + self.first + self.last + self.shared)

    def rank_bytes(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """On the device with the most. Tensor-parallel ranks split nearly all weights."""
        fullest, start, stages = 0.0, 0, stage_sizes(len(self.layers), pipeline_parallel_size)
        for stage, num_layers in enumerate(stages):
            size = sum(self.layers[start : start + num_layers])
            is_first, is_last = stage == 0, stage == len(stages) - 1
            size += self.first * is_first + self.last * is_last + self.shared * (is_first or is_last)
            fullest, start = max(fullest, size), start + num_layers
        return math.ceil(round(fullest, 3) / tensor_parallel_size)


def stage_sizes(num_layers: int, pipeline_parallel_size: int) -> list[int]:
    """Layers of each stage, as vLLM's `get_pp_indices` (distributed/utils.py) cuts them."""
    each, more = divmod(num_layers, pipeline_parallel_size)
    sizes = [each] * pipeline_parallel_size
    for place in range(2, more + 2):
        sizes[-place] += 1
    return sizes


def weigh(
    tensors: Sequence[Tensor],
    num_layers: int | None,
    item_bytes: int | None,
    quantization: Quantization | None,
    *,
    is_tied: bool,
) -> Weights:
    """Bytes of each tensor in the type that vLLM uses.

    item_bytes: of all that is not quantized; None: as stored. Layers beyond `num_layers` predict further tokens; vLLM
    does not load them.
    """
    num_layers = num_layers or 1 + max((it.layer for it in tensors if it.layer is not None), default=0)
    layers, outside = [0.0] * num_layers, {"first": 0.0, "last": 0.0, "shared": 0.0}
    parts: dict[str, float] = {}
    for tensor in tensors:
        if tensor.layer is not None and tensor.layer >= num_layers:
            continue
        size = _size(tensor, item_bytes, quantization)
        name = "image and audio encoders" if tensor.is_other else _NAMES[tensor.part]
        parts[name] = parts.get(name, 0.0) + size
        if tensor.layer is not None:
            layers[tensor.layer] += size
        elif tensor.part == "embedding":
            outside["shared" if is_tied else "first"] += size
        else:
            outside["first" if tensor.is_other else "last"] += size
    return Weights(tuple(layers), outside["first"], outside["last"], outside["shared"],
                   tuple((name, round(size)) for name, size in parts.items()))  # fmt: skip


_NAMES: dict[Part, str] = {"linear": "layers", "expert": "experts", "embedding": "embeddings", "head": "head",
                           "other": "norms and others"}  # fmt: skip


def _size(tensor: Tensor, item_bytes: int | None, quantization: Quantization | None) -> float:
    is_cast = tensor.dtype in ("", *_CAST) and item_bytes is not None
    if is_cast and quantization is not None and quantization.is_for(tensor):
        return quantization.bytes_of(tensor)
    if is_cast:
        return tensor.num_parameters * (item_bytes or 0)
    return tensor.num_parameters * _STORED_BYTES.get(tensor.dtype, 1)


def indexed_bytes(folder: pathlib.Path) -> int | None:
    """`total_size` of a folder's safetensors index; None without one."""
    try:
        total = json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(total) if isinstance(total, int | float) and total > 0 else None
