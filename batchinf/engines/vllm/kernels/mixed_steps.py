"""Steps whose requests are not all for the kernel: some read their prompts, or one of them is very long.

vLLM gives all of a step with prompts to one call of FlashAttention in each layer, which then decodes up to 2.8 times as
slowly as the kernel. Here the kernel handles the requests that decode and are the first of the batch, and
FlashAttention the others. With vLLM's V2 runner, which sorts them, these are all that decode. With its V1 runner, which
0.26 has for models with experts, they are those before the first prompt. FlashAttention needs a plan for the others.
vLLM's own builder makes it once a step for all layers, and a tensor of the step's metadata carries it to them. A step
with one very long request is FlashAttention's alone (`long_requests.py`).

Written for the sources of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchinf.engines.vllm.kernels.comparison import (
    AttentionShape,
    Planner,
    attend_as,
    common_of,
    example,
    require_close,
)
from batchinf.engines.vllm.kernels.long_requests import is_even
from batchinf.engines.vllm.names import optional

_ATTRIBUTE = "batchinf_mixed_step"
_COST = "FlashAttention decodes in steps that read prompts, which is slower"
# In the comparison at the start: tokens of the requests that decode, and new ones and all of the others. None is the
# longest request of the engine. The others include one that decodes, as in the V1 runner.
_CHECKED_DECODES = tuple(range(33, 65)) * 16
_CHECKED_PROMPTS = ((9, 40), (1, 3), (65, None), (1, 1), (130, 130), (2, 300))


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step whose first `num_decodes` requests, with one new token each, are for the kernel.

    others: vLLM's metadata of the other ones; None if all are FlashAttention's.
    """

    num_decodes: int
    others: Any

    def decodes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of FlashAttention for the requests that decode. given: those for the whole step."""
        num = self.num_decodes
        return {
            **given,
            "q": given["q"][:num],
            "out": given["out"][:num],
            "seqused_k": given["seqused_k"][:num],
            "cu_seqlens_q": given["cu_seqlens_q"][: num + 1],
            "max_seqlen_q": 1,
        }

    def prompts(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of FlashAttention for the other requests."""
        num, others = self.num_decodes, self.others
        scales = {name: given[name][num:] for name in ("q_descale", "k_descale", "v_descale")
                  if given.get(name) is not None}  # fmt: skip
        return {
            **given,
            **scales,
            "q": given["q"][num:],
            "out": given["out"][num:],
            # Not those of `others`: vLLM may copy a step's metadata with another table.
            "seqused_k": given["seqused_k"][num:],
            "block_table": given["block_table"][num:],
            "cu_seqlens_q": others.query_start_loc,
            "max_seqlen_q": others.max_query_len,
            "max_seqlen_k": others.max_seq_len,
            "scheduler_metadata": others.scheduler_metadata,
            "num_splits": others.max_num_splits,
        }


def mixed_step_of(given: Mapping[str, Any]) -> MixedStep | None:
    """The step that these arguments of FlashAttention are from; None if it is not mixed, or they read no cache."""
    if given.get("seqused_k") is None or given.get("block_table") is None:
        return None
    return getattr(given.get("cu_seqlens_q"), _ATTRIBUTE, None)


def install(builder_class: Any, pays: Callable[[int, int], bool]) -> None:
    """Let vLLM's `FlashAttentionMetadataBuilder` make plans for mixed steps. Does so once in a process.

    pays: whether the kernel is faster for so many requests that decode, with so many heads of keys.
    """
    theirs = builder_class.build
    if hasattr(theirs, _ATTRIBUTE):
        return

    @functools.wraps(theirs)
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *more: Any, **named: Any) -> Any:
        common = common_attn_metadata
        num = num_decodes_of(common)
        # vLLM's subclasses give it changed batches, for layers that see less than all tokens before one.
        is_ours = type(self) is builder_class and _has_known_lengths(common)
        if is_ours and common.max_query_len == 1 and not _is_even(common.seq_lens_cpu_upper_bound, self.num_heads_kv):
            return marked(theirs(self, common_prefix_len, common, *more, **named), MixedStep(0, None))
        if not (
            is_ours
            and pays(num, self.num_heads_kv)
            and _is_plain(self, common_prefix_len, common)
            and _is_even(common.seq_lens_cpu_upper_bound[:num], self.num_heads_kv)
        ):
            return theirs(self, common_prefix_len, common, *more, **named)
        has_graphs = self.use_full_cuda_graph
        # For graphs, the builder keeps one plan in a buffer, and lets FlashAttention take memory for up to 32 splits.
        self.use_full_cuda_graph = False
        try:
            others = theirs(self, 0, without_first(common, num), *more, **named)
        finally:
            self.use_full_cuda_graph = has_graphs
        return marked(theirs(self, common_prefix_len, common, *more, **named), MixedStep(num, others))

    setattr(build, _ATTRIBUTE, True)
    builder_class.build = build


def is_right(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    plan: Any,
    shape: AttentionShape,
    *,
    longest: int,
    device: str = "cuda",
) -> bool:
    """Whether a mixed step has the same results divided between both kernels as with FlashAttention alone.

    theirs, plan: vLLM's `flash_attn_varlen_func`, and its `get_scheduler_metadata`, which does not exist without a GPU.
    ours: what replaces `theirs`. The rest: see `attention.is_right`. Prints why not.
    """
    kind = optional("vllm.v1.attention.backend", "CommonAttentionMetadata", _COST)
    if kind is None:
        return False
    new, lengths = zip(*((count, length or max(longest, count)) for count, length in _CHECKED_PROMPTS), strict=True)
    try:
        given = example(_CHECKED_DECODES + lengths, shape, device, counts=(1,) * len(_CHECKED_DECODES) + new)
        config = types.SimpleNamespace(speculative_config=None)
        common = common_of(given, kind)
        expected = attend_as(theirs, given, Planner(plan, given, config).build(0, common))
        builder: Any = type("CheckedPlanner", (Planner,), {})
        install(builder, lambda num, heads: True)
        metadata = builder(plan, given, config).build(0, common)
        require_close(attend_as(ours, given, metadata), expected, shape.is_fp8)
    except Exception as error:  # a compiler may fail in any way, and FlashAttention does the work then
        print(f"{_COST}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def marked(metadata: Any, step: MixedStep) -> Any:
    """vLLM's metadata, which carries the step to all layers."""
    # Another object for the same memory: other builders of the step may share vLLM's.
    metadata.query_start_loc = metadata.query_start_loc[:]
    setattr(metadata.query_start_loc, _ATTRIBUTE, step)
    return metadata


def num_decodes_of(common: Any) -> int:
    """How many of the first requests have one new token. 0 for a step in which all have, which needs no plan."""
    if common.max_query_len == 1:
        return 0
    counts = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy())
    return int(np.argmax(counts != 1))


def _is_plain(builder: Any, common_prefix_len: int, common: Any) -> bool:
    """Whether each token sees all tokens before it, and nothing else."""
    return (
        common_prefix_len == 0
        and common.causal is True
        and common.mm_req_doc_ranges is None
        and builder.dcp_world_size == 1
        and builder.vllm_config.speculative_config is None  # vLLM changes the metadata between drafts
    )


def _has_known_lengths(common: Any) -> bool:
    """Whether the host knows how many tokens each request has, at most."""
    lengths = common.seq_lens_cpu_upper_bound
    return lengths is not None and len(lengths) == common.num_reqs


def _is_even(lengths: Any, num_key_heads: int) -> bool:
    return is_even(int(lengths.max()), int(lengths.sum()), num_key_heads)


def without_first(common: Any, num: int) -> Any:
    """vLLM's description of a step without its first `num` requests, which have one new token each."""
    starts = common.query_start_loc_cpu[num:] - num
    lengths = common.seq_lens_cpu_upper_bound[num:]
    return dataclasses.replace(
        common,
        query_start_loc=common.query_start_loc[num:] - num,
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[num:],
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=common.num_reqs - num,
        num_actual_tokens=common.num_actual_tokens - num,
        max_query_len=int(np.diff(starts.numpy()).max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=common.block_table_tensor[num:],
        slot_mapping=common.slot_mapping[num:],
    )
