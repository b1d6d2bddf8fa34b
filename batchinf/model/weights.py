"""Bytes of a model's weights on a device: the types of its parameters, quantization, and the stages of a pipeline."""

import fnmatch
import json
import math
import pathlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from batchinf.model.parameters import Part, Tensor

# Float types in a safetensors header, which vLLM casts to the model's type.
_CAST = ("F64", "F32", "F16", "BF16")
_STORED_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
                 "F4": 0.5}  # fmt: skip
INDEX = "model.safetensors.index.json"
MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's matrices are stored. Embeddings, head, norms and routers keep the model's type."""

    name: str
    """In words."""
    bits: int
    group_size: int | None = 0
    """Weights that share a scale; None: a row of the matrix; 0: the whole matrix."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block that shares a scale, in place of `group_size`."""
    scale_bytes: float = 4
    has_zeros: bool = False
    """Each scale has a zero point of `bits`."""
    parts: tuple[Part, ...] = ("linear", "expert")
    """The parts that are quantized."""
    ignored: tuple[str, ...] = ()
    """Patterns of the names that are not quantized."""

    def is_for(self, tensor: Tensor) -> bool:
        """Whether the tensor is quantized."""
        if tensor.part not in self.parts or tensor.is_other:
            return False
        return not any(_matches(pattern, tensor) for pattern in self.ignored)

    def block_of(self, tensor: Tensor) -> int:
        """The weights along a row that share a scale. A rank must have whole ones; MXFP4 is padded to them."""
        if not self.is_for(tensor) or self.name == MXFP4:
            return 1
        return self.block[1] if self.block is not None else self.group_size or 1

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


class UnknownSizeError(Exception):
    """The size of the weights or of the KV cache is not known; the message says why."""


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
}
for _kind in ("awq", "gptq"):
    _ON_LOADING |= dict.fromkeys((f"{_kind}_marlin", f"auto_{_kind}"), _ON_LOADING[_kind])


def quantization_of(config: Mapping[str, Any], method: str | None) -> Quantization | None:
    """The quantization of a config's checkpoint, else the one that vLLM applies when it loads; None: none.

    method: the spec's `model.quantization`. Raises UnknownSizeError.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if isinstance(section, Mapping) and section:
        ignored = section.get("ignore") or section.get("modules_to_not_convert") or section.get("exclude_modules")
        return replace(_of_checkpoint(section), ignored=tuple(map(str, ignored or ())))
    if method is None:
        return None
    if method not in _ON_LOADING:
        raise UnknownSizeError(f"quantization {method} is of a size of its own")
    return _ON_LOADING[method]


def _of_checkpoint(section: Mapping[str, Any]) -> Quantization:
    method = str(section.get("quant_method") or ("modelopt" if "quant_algo" in section else ""))
    method = method.replace("_", "-").lower()
    if method in ("awq", "gptq", "auto-round", "intel/auto-round", "auto-awq", "auto-gptq", "moe-wna16", "inc"):
        return _of_groups(method, section)
    if method == "compressed-tensors":
        return _compressed(section)
    if method in ("fp8", "fbgemm-fp8", "modelopt", "modelopt-fp4", "modelopt-mxfp8", "quark"):
        return _of_floats(method, section)
    if method in ("mxfp4", "gpt-oss-mxfp4"):
        return Quantization(MXFP4, 4, 32, scale_bytes=1, parts=("expert",))
    if method == "bitsandbytes":
        return Quantization(method, 4, 64) if section.get("load_in_4bit") else Quantization(method, 8, None)
    words = json.dumps(section).lower()
    for name, bits, group_size in (("int4", 4, 128), ("int8", 8, None), ("float8", 8, None)):
        if method == "torchao" and name in words:
            return Quantization(f"torchao {name}", bits, group_size, scale_bytes=2)
    raise UnknownSizeError(f"the checkpoint's quantization {method or 'without a name'} is of a size of its own")


def _of_groups(method: str, section: Mapping[str, Any]) -> Quantization:
    bits = section.get("bits") or section.get("w_bit") or section.get("num_bits") or 4
    size = section.get("group_size", section.get("q_group_size", 128))
    group_size = None if size in (-1, None) else int(size)
    return Quantization(method, int(bits), group_size, scale_bytes=2, has_zeros=True)


def _of_floats(method: str, section: Mapping[str, Any]) -> Quantization:
    words = json.dumps(section).lower()
    if "nvfp4" in words or method == "modelopt-fp4":
        return _ON_LOADING["nvfp4_per_token"]
    if "mxfp8" in words or method == "modelopt-mxfp8":
        return _ON_LOADING["mxfp8"]
    if method == "quark" and "fp4" in words:
        return Quantization(MXFP4, 4, 32, scale_bytes=1)
    block = section.get("weight_block_size")
    sizes = (int(block[0]), int(block[1])) if block else None
    return Quantization("fp8", 8, None if method == "fbgemm-fp8" else 0, block=sizes)


def _group_size(strategy: str | None, size: Any) -> int | None:
    """Weights that share a scale: a number in a row, None for a whole row, 0 for the whole tensor."""
    if strategy in ("group", "tensor_group") and size and size > 0:
        return int(size)
    return None if strategy == "channel" else 0


def _compressed(section: Mapping[str, Any]) -> Quantization:
    groups = [group.get("weights") for group in (section.get("config_groups") or {}).values()]
    weights = next(filter(None, groups), None)
    if weights is None:
        raise UnknownSizeError("the checkpoint's compressed-tensors config has no group with weights")
    bits = int(weights["num_bits"])
    strategy = weights.get("strategy")
    if strategy == "block" and weights.get("block_structure"):
        rows, columns = map(int, weights["block_structure"])
        return Quantization("fp8", bits, block=(rows, columns))
    return Quantization(
        name=f"{'fp' if weights.get('type') == 'float' else 'int'}{bits}",
        bits=bits,
        group_size=_group_size(strategy, weights.get("group_size")),
        scale_bytes=1 if strategy == "tensor_group" else 2,
        has_zeros=weights.get("symmetric") is False,
    )


@dataclass(frozen=True, slots=True)
class PaddedExperts:
    """Experts in MXFP4, whose matrices vLLM pads on each rank to the tiles of its kernels.

    Marlin and FlashInfer's TRT-LLM kernels have these tiles. The rule is
    `mxfp4_round_up_hidden_size_and_intermediate_size` in vLLM's layers/fused_moe/oracle/mxfp4.py. gpt-oss-120b then
    takes 65.97 GiB (vllm#23278). The Triton kernels on Hopper pad less: 64.38 GiB (vllm#33155).
    """

    hidden: int
    width: int
    """Of one expert."""
    is_split: bool = True
    """Whether tensor-parallel ranks split each expert; with expert parallelism they have whole ones."""

    def factor(self, tensor_parallel_size: int) -> float:
        """The size of the padded matrices of all ranks, as a multiple of the size without padding."""
        ranks = tensor_parallel_size if self.is_split else 1
        width = ranks * _rounded_up(math.ceil(self.width / ranks), 128)
        return _rounded_up(self.hidden, 256) * width / (self.hidden * self.width)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's weights."""

    layers: tuple[float, ...]
    """Of each layer, without padding."""
    first: float = 0
    """Outside of the layers, on the first stage of a pipeline."""
    last: float = 0
    """Outside of the layers, on the last stage of a pipeline."""
    shared: float = 0
    """Embeddings that are also the head."""
    parts: tuple[tuple[str, int], ...] = ()
    """The same bytes by part."""
    experts: tuple[float, ...] = ()
    """Of these, the bytes of the experts of each layer."""
    padded: PaddedExperts | None = None
    """What vLLM makes of the experts, if it pads them."""

    @classmethod
    def of_total(cls, num_bytes: float, num_layers: int = 1) -> "Weights":
        """Weights of which only the sum is known."""
        return cls((num_bytes / num_layers,) * num_layers)

    @property
    def num_bytes(self) -> int:
        """On one device."""
        return round(sum(self._padded_layers(1)) + self.first + self.last + self.shared)

    def _padded_layers(self, tensor_parallel_size: int) -> tuple[float, ...]:
        """Of each layer, on all tensor-parallel ranks together."""
        if self.padded is None or not self.experts:
            return self.layers
        added = self.padded.factor(tensor_parallel_size) - 1
        return tuple(size + added * experts for size, experts in zip(self.layers, self.experts, strict=True))

    def rank_bytes(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1) -> int:
        """On the device with the most. Tensor-parallel ranks split nearly all weights."""
        layers = iter(self._padded_layers(tensor_parallel_size))
        stages = [sum(islice(layers, size)) for size in stage_sizes(len(self.layers), pipeline_parallel_size)]
        stages[0] += self.first + self.shared
        stages[-1] += self.last + (self.shared if len(stages) > 1 else 0)
        return math.ceil(round(max(stages), 3) / tensor_parallel_size)


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
    num_layers = num_layers or _num_layers(tensors)
    places = defaultdict[int | str, float](float)
    experts = defaultdict[int, float](float)
    parts = defaultdict[str, float](float)
    for tensor in tensors:
        if tensor.layer is None or tensor.layer < num_layers:
            size = _size(tensor, item_bytes, quantization)
            places[_place(tensor, is_tied)] += size
            if tensor.layer is not None and tensor.is_of_experts:
                experts[tensor.layer] += size
            parts[_part_name(tensor)] += size
    return Weights(
        layers=tuple(places[layer] for layer in range(num_layers)),
        first=places["first"],
        last=places["last"],
        shared=places["shared"],
        parts=tuple((name, round(size)) for name, size in parts.items()),
        experts=tuple(experts[layer] for layer in range(num_layers)),
    )


_NAMES: dict[Part, str] = {"linear": "layers", "expert": "experts", "embedding": "embeddings", "head": "head",
                           "other": "norms and others"}  # fmt: skip


def _part_name(tensor: Tensor) -> str:
    return "image and audio encoders" if tensor.is_other else _NAMES[tensor.part]


def _num_layers(tensors: Sequence[Tensor]) -> int:
    """The number of layers, by the last one that a tensor names."""
    return 1 + max((tensor.layer for tensor in tensors if tensor.layer is not None), default=0)


def _place(tensor: Tensor, is_tied: bool) -> int | str:
    """The tensor's layer, or the field of `Weights` to which it counts."""
    if tensor.layer is not None:
        return tensor.layer
    if tensor.part == "embedding":
        return "shared" if is_tied else "first"
    return "first" if tensor.is_other else "last"


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
