"""Random steps on which the pieces in this folder are compared with vLLM's own code when an engine starts.

A wrong piece is refused only if a wrong result is far from the right one. The attention of a request is a sum of random
values, so a limit for all numbers alike would accept any result for a long request, whose numbers are small. Here a
result has the limit that its own length allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The version of FlashAttention that the pieces are written for.
FLASH_ATTENTION = 3
# Keys and values of the example, in numbers: 128 MiB with 16 bits. More tokens share blocks of the cache.
_MOST_NUMBERS = 1 << 26
# Lengths on both sides of the edges of blocks and tiles.
SHORT = (1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)
# How far a result may be from vLLM's, as a part of its length. bfloat16 has 8 bits, so that correct results differ by
# about 0.003. FlashAttention also rounds its weights to float8, which has 4 bits.
_TOLERANCE = 0.02
_TOLERANCE_FP8 = 0.15
_MOST_FP8 = 448
# A scale of 1 would hide a kernel that does not read it.
SCALES = (0.5, 0.75, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The attention of a layer, as far as it decides how a kernel runs."""

    num_heads: int
    num_key_heads: int
    head_size: int
    dtype: torch.dtype
    """Of the model."""
    block_size: int = 16
    """Tokens of a block of the cache."""
    is_fp8: bool = False
    """Whether queries, keys and values are float8."""
    scales: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Of queries, keys and values, if these are float8."""

    @classmethod
    def of(cls, impl: Any, dtype: torch.dtype, block_size: int, scales: tuple[float, ...] = SCALES) -> "AttentionShape":
        """Of a layer. impl: vLLM's `FlashAttentionImpl` of the layer."""
        return cls(
            num_heads=impl.num_heads,
            num_key_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            dtype=dtype,
            block_size=block_size,
            is_fp8=impl.kv_cache_dtype.startswith("fp8"),
            scales=scales,
        )


def example(
    lengths: Sequence[int], shape: AttentionShape, device: str, counts: Sequence[int] | None = None
) -> dict[str, Any]:
    """Arguments of FlashAttention for requests of these lengths, with random numbers over a paged cache.

    counts: new tokens of each request, its last ones; None is one of each. `out` has no numbers yet, so that a result
    which is never written is found.
    """
    block_size = shape.block_size
    num_key_heads = shape.num_key_heads
    head_size = shape.head_size
    dtype = shape.dtype
    scales = shape.scales
    num = len(lengths)
    counts = [1] * len(lengths) if counts is None else list(counts)
    blocks_of = [-(-length // block_size) for length in lengths]
    num_blocks = max(1, min(sum(blocks_of), _MOST_NUMBERS // (block_size * num_key_heads * 2 * head_size)))
    cache = torch.randn((num_blocks, num_key_heads, block_size, 2 * head_size), device=device, dtype=dtype)
    query = torch.randn((sum(counts), shape.num_heads, head_size), device=device, dtype=dtype)
    out = torch.full(query.shape, torch.nan, device=device, dtype=dtype)
    if shape.is_fp8:
        cache[..., :head_size] /= scales[1]
        cache[..., head_size:] /= scales[2]
        cache, query = (
            each.clamp_(-_MOST_FP8, _MOST_FP8).to(torch.float8_e4m3fn) for each in (cache, query / scales[0])
        )
    keys, values = cache.transpose(1, 2).split(head_size, dim=-1)  # as vLLM's backend does
    table = torch.randint(num_blocks, (num, max(1, *blocks_of)))
    places = torch.cat([torch.randperm(num_blocks) for _ in range(-(-sum(blocks_of) // num_blocks))])
    for row, (used, own) in enumerate(zip(blocks_of, places[: sum(blocks_of)].split(blocks_of), strict=True)):
        table[row, :used] = own
    starts = torch.tensor([0, *counts]).cumsum(0)
    q_scale, k_scale, v_scale = (torch.tensor(scale, device=device).expand(num, num_key_heads) for scale in scales)
    return {
        "q": query,
        "k": keys,
        "v": values,
        "out": out,
        "cu_seqlens_q": starts.to(device, torch.int32),
        "max_seqlen_q": max(counts),
        "seqused_k": torch.tensor(lengths, device=device, dtype=torch.int32),
        "max_seqlen_k": max(lengths),
        "softmax_scale": head_size**-0.5,
        "causal": True,
        "block_table": table.to(device, torch.int32),
        "fa_version": FLASH_ATTENTION,
        "q_descale": q_scale,
        "k_descale": k_scale,
        "v_descale": v_scale,
    }


def scales_of(layer: Any) -> tuple[float, ...]:
    """The layer's own scales of queries, keys and values in float8, or others where it has 1, many or none."""
    found = [getattr(layer, name, None) for name in ("_q_scale", "_k_scale", "_v_scale")]
    own = [float(scale) if isinstance(scale, torch.Tensor) and scale.numel() == 1 else 1.0 for scale in found]
    return tuple(other if scale == 1 else scale for scale, other in zip(own, SCALES, strict=True))


def require_close(found: torch.Tensor, expected: torch.Tensor, is_fp8: bool = False) -> None:
    """AssertionError if a result of one token and head is far from vLLM's. found, expected: [..., head_size]."""
    expected = expected.float()
    far = (found.float() - expected).norm(dim=-1)
    length = expected.norm(dim=-1)
    part = torch.where(far == 0, far, far / length)
    limit = _TOLERANCE_FP8 if is_fp8 else _TOLERANCE
    is_close = part <= limit
    if not bool(is_close.all()):
        worst = part.nan_to_num(nan=torch.inf).max().item()
        num = int((~is_close).sum())
        raise AssertionError(f"{num} of {part.numel()} results differ by up to {worst:.3g} of their length; "
                             f"{limit} is allowed")  # fmt: skip


def attend(theirs: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
    """What FlashAttention gives for an example."""
    out = torch.full_like(given["out"], torch.nan)
    theirs(**{**given, "out": out})
    return out


def common_of(given: dict[str, Any]) -> Any:
    """vLLM's description of the step of an example."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = given["cu_seqlens_q"]
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=given["seqused_k"].clone(),
        num_reqs=len(given["seqused_k"]), num_actual_tokens=len(given["q"]),
        max_query_len=given["max_seqlen_q"], max_seq_len=given["max_seqlen_k"], block_table_tensor=given["block_table"],
        slot_mapping=torch.zeros(len(given["q"]), dtype=torch.int64, device=starts.device),
    )  # fmt: skip


class Planner:
    """Makes FlashAttention's plan of a step as vLLM's `FlashAttentionMetadataBuilder` does. Others replace `build`.

    plan: vLLM's `get_scheduler_metadata`, None without a GPU. given: an example.
    """

    def __init__(self, plan: Any, given: dict[str, Any], vllm_config: Any) -> None:
        self.plan = plan
        self.given = given
        self.vllm_config = vllm_config

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> dict[str, Any]:
        """See vLLM. Returns the arguments that vLLM's layers give FlashAttention for the step."""
        common = common_attn_metadata
        query = self.given["q"]
        keys = self.given["k"]
        plan = self.plan and self.plan(
            batch_size=common.num_reqs, max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len,
            num_heads_q=query.shape[1], num_heads_kv=keys.shape[2], headdim=query.shape[2],
            cache_seqlens=common.seq_lens, qkv_dtype=query.dtype, cu_seqlens_q=common.query_start_loc,
            page_size=keys.shape[1], causal=common.causal, window_size=(-1, -1), num_splits=0,
        )  # fmt: skip
        return {
            "cu_seqlens_q": common.query_start_loc, "max_seqlen_q": common.max_query_len, "seqused_k": common.seq_lens,
            "max_seqlen_k": common.max_seq_len, "block_table": common.block_table_tensor, "scheduler_metadata": plan,
            "window_size": [-1, -1], "softcap": 0, "num_splits": 0,
        }  # fmt: skip
