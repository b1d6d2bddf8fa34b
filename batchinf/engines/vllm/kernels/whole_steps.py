"""Steps that read prompts as one CUDA graph each, attention included.

vLLM starts a step of prompts in three pieces for each layer. For a small model this takes the engine's Python as long
as the GPU's work. One graph of a whole step starts at once. vLLM can capture such a graph for prompts
(`cudagraph_mode: FULL`), but its V2 runner captures it with a few tokens for each request. FlashAttention 3 chooses its
tiles by the longest request, so steps with other lengths would need another graph: it would read their plan with the
wrong tiles, or let a token see the tokens after it. Here FlashAttention always gets the largest lengths that a step can
have. The real lengths are on the GPU, where it reads them.

Written for the sources of vLLM 0.32.0 and 0.33.0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends import flash_attn

from batchinf.base.text import one_line
from batchinf.engines.vllm.kernels.base_worker import Worker
from batchinf.engines.vllm.kernels.comparison import (
    FLASH_ATTENTION,
    SHORT,
    AttentionShape,
    Planner,
    attend,
    common_of,
    example,
    require_close,
)
from batchinf.engines.vllm.known_sources import allowed
from batchinf.spec.job import WHOLE_STEPS

_COST = "steps of prompts start layer by layer, which is slower for small models"
_ATTRIBUTE = "is_for_any_lengths"
_DECODER = "decoder"


class PromptWorker(Worker):
    """vLLM's worker for engines that only read prompts. With `cudagraph_mode: FULL`, a graph is for any lengths."""

    def load_model(self, *arguments: Any, **named: Any) -> Any:
        """See vLLM. Decides here, because the layers exist now and vLLM has not chosen its graphs.

        For models that make vectors, vLLM has changed FULL to PIECEWISE. A user's own FULL stays.
        """
        compilation = self.vllm_config.compilation_config
        mode = type(compilation.cudagraph_mode)
        is_ours = bool(self.vllm_config.additional_config.get(WHOLE_STEPS))
        if is_ours and compilation.cudagraph_mode == mode.PIECEWISE:
            compilation.cudagraph_mode = mode.FULL
        loaded = super().load_model(*arguments, **named)
        if has_whole_steps(compilation):
            can = allowed("whole") and are_right(compilation.static_forward_context, self.vllm_config)
            if can:
                install()
            elif is_ours:
                print(_COST, flush=True)
                compilation.cudagraph_mode = mode.PIECEWISE
        return loaded


def has_whole_steps(compilation: Any) -> bool:
    """Whether steps that read prompts run as whole graphs."""
    return bool(compilation.cudagraph_mode.mixed_mode().name == "FULL")


def are_right(layers: Mapping[str, Any], vllm_config: Any) -> bool:
    """Whether FlashAttention 3 does the attention of all layers, over a cache, and passes the comparison for each.

    layers: of the model, by name.
    """
    theirs, plan = (getattr(flash_attn, name, None) for name in ("flash_attn_varlen_func", "get_scheduler_metadata"))
    if theirs is None:
        return False
    # None for layers with a state, such as Mamba's, which have no such attention.
    impls: list[Any] = [
        getattr(layer, "impl", None) for layer in layers.values() if isinstance(layer, AttentionLayerBase)
    ]
    is_known = impls and all(
        type(impl) is flash_attn.FlashAttentionImpl
        and impl.vllm_flash_attn_version == FLASH_ATTENTION
        and impl.attn_type == _DECODER
        for impl in impls
    )
    sizes = vllm_config.model_config.dtype, vllm_config.cache_config.block_size
    shapes = {AttentionShape.of(impl, *sizes) for impl in impls} if is_known else set()
    return bool(shapes) and all(is_right(theirs, plan, vllm_config, shape) for shape in shapes)


def is_right(
    theirs: Callable[..., Any], plan: Any, vllm_config: Any, shape: AttentionShape, *, device: str = "cuda"
) -> bool:
    """Whether FlashAttention with the plan for any lengths gives what it gives without one. Prints why not.

    plan: vLLM's `get_scheduler_metadata`, which does not exist without a GPU.
    """
    longest = vllm_config.model_config.max_model_len
    most = vllm_config.scheduler_config.max_num_batched_tokens
    # The longest request has only its last tokens in the step.
    lengths = [min(length, longest) for length in (*SHORT, longest, *SHORT)]
    counts = [min(length, SHORT[-1], most) for length in lengths]
    try:
        given = example(lengths, shape, device, counts)
        common = common_of(given)
        expected = attend(theirs, given)
        builder: Any = type("CheckedPlanner", (Planner,), {})
        install(builder)
        planner = builder(plan, given, vllm_config)
        planned = planner.build(0, common)
        require_close(attend(theirs, {**given, **planned}), expected, shape.is_fp8)
        # A graph that is captured for longer requests would read past the table of their blocks.
        longer = {"seqused_k": given["seqused_k"] + longest, "max_seqlen_k": 2 * longest}
        captured = common_of({**given, **longer})
        graph = planner.build(0, captured)
        plans = [(each["max_seqlen_q"], each["max_seqlen_k"]) for each in (planned, graph)]
        seen = [lengths, *([longest] * len(lengths) for _ in (captured, graph))]
        read = [each.tolist() for each in (planned["seqused_k"], captured.seq_lens, graph["seqused_k"])]
        if plans != [(most, longest)] * 2 or read != seen:
            raise AssertionError(
                f"a plan is for {plans} tokens of a step and a request, but must be for {most, longest}"
            )
        if (common.max_query_len, common.max_seq_len) != (max(counts), max(lengths)):
            raise AssertionError("the plan has changed the lengths of the step, which other layers read")
    except Exception as error:  # a library may fail in any way, and vLLM's own graphs do the work then
        print(f"{_COST}: {one_line(f'{type(error).__name__}: {error}', 1000)}", flush=True)
        return False
    return True


def install(builder: Any = None) -> None:
    """Let FlashAttention's plans be for any lengths. builder: the class that makes plans; None is vLLM's."""
    builder = builder or flash_attn.FlashAttentionMetadataBuilder
    theirs = builder.build
    if hasattr(theirs, _ATTRIBUTE):
        return

    @functools.wraps(theirs)
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *more: Any, **named: Any) -> Any:
        config, common = self.vllm_config, common_attn_metadata
        if has_whole_steps(config.compilation_config):
            longest = config.model_config.max_model_len
            # vLLM captures large graphs with longer requests, which would read past the table of their blocks.
            common.seq_lens.clamp_(max=longest)
            most = config.scheduler_config.max_num_batched_tokens
            common = dataclasses.replace(common, max_query_len=most, max_seq_len=longest)
        return theirs(self, common_prefix_len, common, *more, **named)

    setattr(build, _ATTRIBUTE, True)
    builder.build = build
