"""What tensor-parallel ranks divide, and which degrees vLLM accepts. `plan`, `auto` and the check of a spec use it.

This module follows vLLM 0.32: `verify_with_parallel_config` (config/model.py), `QKVParallelLinear`,
`VocabParallelEmbedding`, `MambaMixer2`, and the checks of quantized weights: `validate_fp8_block_shape` and
`validate_fp8_block_shape_moe` (quantization/utils/fp8_utils.py), `verify_group_size_divides_partition`. vLLM 0.32 also
cuts the blocks of FP8 experts smaller, on slower kernels; older versions refuse them. So `plan` and
`auto` leave these degrees out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batchinf.model.cache import first_number, head_dim_of, num_attention_heads, num_kv_heads
from batchinf.model.parameters import Tensor
from batchinf.model.weights import Quantization

_VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this


@dataclass(frozen=True, slots=True)
class Split:
    """A number of the model that the ranks divide."""

    name: str
    """In words."""
    size: int
    block: int = 1
    """The part of each rank must be a multiple of this, because so many weights share a scale."""
    may_repeat: bool = False
    """If there are more ranks than this, several ranks may have the same one."""

    def why_not(self, degree: int) -> str | None:
        """Why vLLM does not split the number over so many ranks; None if it does."""
        if self.may_repeat and degree % self.size == 0:
            return None
        if self.size % degree:
            return f"{self.name} ({self.size:,}) cannot be divided by {degree}"
        part = self.size // degree
        if degree > 1 and part % self.block:
            return (
                f"{self.name}, {self.size:,} / {degree} = {part:,}, is not a multiple of the {self.block} weights that "
                "share a scale"
            )
        return None


def splits_of(
    config: Mapping[str, Any], engine: Mapping[str, Any], quantization: Quantization | None = None
) -> tuple[Split, ...]:
    """What the ranks of a model divide. config: of the text model. quantization: of its checkpoint."""
    splits = [
        Split(name, size, 1 if layer is None or quantization is None else quantization.block_of(layer))
        for name, size, layer in _sizes(config, engine)
        if size
    ]
    if heads := num_kv_heads(config):
        splits.append(Split("the number of key and value heads", heads, may_repeat=True))
    return tuple(splits)


def why_not_split(splits: tuple[Split, ...], degree: int) -> str | None:
    """The first reason why vLLM does not split a model over so many ranks; None if it does."""
    return next(filter(None, (split.why_not(degree) for split in splits)), None)


def _sizes(config: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Tensor | None]]:
    """Names and sizes; and, if quantized weights are cut along it, the matrix whose rows are cut."""
    heads = num_attention_heads(config)
    head_dim = first_number(config, "v_head_dim") or head_dim_of(config)
    yield "the number of attention heads", heads, None
    if heads and head_dim:
        yield "the width of attention", heads * head_dim, _matrix("self_attn.o_proj", config)
    yield from _mlp_sizes(config, engine)
    yield "the number of key heads of linear attention", first_number(config, "linear_num_key_heads"), None
    yield "the number of value heads of linear attention", first_number(config, "linear_num_value_heads"), None
    mamba_heads = first_number(config, "mamba_num_heads mamba_n_heads n_mamba_heads")
    yield "the number of Mamba heads", mamba_heads, None
    groups = first_number(config, "mamba_n_groups n_groups mamba_ngroups")
    if mamba_heads and groups != 1:
        yield "the number of Mamba groups", groups, None
    if vocabulary := first_number(config, "vocab_size"):
        yield "the vocabulary, padded", -(-vocabulary // _VOCABULARY) * _VOCABULARY, None


def _mlp_sizes(config: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Tensor]]:
    """Widths of experts and of the MLP. A model of experts may have an MLP in some layers."""
    experts = first_number(config, "moe_intermediate_size")
    inner = first_number(config, "intermediate_size")
    has_dense = not experts or bool(config.get("first_k_dense_replace") or config.get("mlp_only_layers"))
    is_named = bool(config.get("moe_intermediate_size"))
    if not is_named and first_number(config, "num_local_experts num_experts"):  # Mixtral, gpt-oss
        experts = inner
        has_dense = False
    if not engine.get("enable_expert_parallel"):  # with it, ranks have whole experts
        yield "the width of the experts", experts, _matrix("mlp.experts.0.down_proj", config, "expert")
    yield "the width of the shared experts", _shared_width(config), _matrix("mlp.shared_expert.down_proj", config)
    if has_dense:
        yield "the width of the MLP", inner, _matrix("mlp.down_proj", config)


def _shared_width(config: Mapping[str, Any]) -> int | None:
    """Of the experts that compute all tokens, which vLLM has as one."""
    if width := first_number(config, "shared_expert_intermediate_size"):
        return width
    number = first_number(config, "n_shared_experts")
    return None if not number else number * (first_number(config, "moe_intermediate_size") or 0)


def _matrix(name: str, config: Mapping[str, Any], part: Any = "linear") -> Tensor:
    """A matrix of the last layer, by the name that checkpoints give it."""
    last = (first_number(config, "num_hidden_layers") or 1) - 1
    return Tensor(name=f"model.layers.*.{name}", part=part, shape=(), layer=last)
