"""Steps that read prompts as one CUDA graph each, attention included.

vLLM starts a step of prompts in three pieces for each layer. For a small model this takes the engine's Python as long
as the GPU's work. One graph of a whole step starts at once. vLLM can capture such a graph for prompts
(`cudagraph_mode: FULL`), but its V2 runner captures it with a few tokens for each request. FlashAttention 3 chooses its
tiles by the longest request, so steps with other lengths would need another graph: it would read their plan with the
wrong tiles, or let a token see the tokens after it. Here FlashAttention always gets the largest lengths that a step can
have. The real lengths are on the GPU, where it reads them.

Written for the sources of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from batchinf.engines.vllm.kernels import fresh_steps
from batchinf.engines.vllm.kernels.base_worker import Worker
from batchinf.engines.vllm.known_sources import allowed
from batchinf.engines.vllm.names import optional
from batchinf.engines.vllm.scheduling.whole_prompts import takes_prompts_whole
from batchinf.spec.job import WHOLE_STEPS

_BACKEND = "vllm.v1.attention.backends.flash_attn"
_LAYERS = "vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"
_COST = "steps of prompts start layer by layer, which is slower for small models"
_ATTRIBUTE = "is_for_any_lengths"
_DECODER = "decoder"


class PromptWorker(Worker):
    """vLLM's worker for engines that only read prompts. With `cudagraph_mode: FULL`, a graph is for any lengths."""

    _steps: fresh_steps.FreshSteps | None = None

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
            layers = getattr(compilation, "static_forward_context", {})
            can = allowed("whole") and is_known(layers) and install()
            if is_ours and not can:
                print(_COST, flush=True)
                compilation.cudagraph_mode = mode.PIECEWISE
            impls, dtype = attention_of(layers), self.vllm_config.model_config.dtype
            if can and takes_prompts_whole(self.vllm_config) and fresh_steps.fits(impls, dtype) and allowed("fresh"):
                steps = fresh_steps.FreshSteps()
                self._steps = steps if fresh_steps.install(steps, impls, dtype) else None
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM, which captures the graphs here."""
        if self._steps is not None and not fresh_steps.capture_fresh_steps(self.model_runner, self._steps):
            self._steps = None
        if self._steps is not None:
            print("steps of whole prompts do without the KV cache", flush=True)
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM. Tells the attention whether this step needs the cache."""
        if self._steps is None:
            return super().execute_model(scheduler_output)
        with self._steps.running(fresh_steps.is_fresh(scheduler_output)):
            return super().execute_model(scheduler_output)


def has_whole_steps(compilation: Any) -> bool:
    """Whether steps that read prompts run as whole graphs."""
    return bool(compilation.cudagraph_mode.mixed_mode().name == "FULL")


def is_known(layers: Mapping[str, Any]) -> bool:
    """Whether FlashAttention 3 does the attention of all layers, over a cache. layers: of the model, by name.

    Layers with a state, such as Mamba's, have no such attention.
    """
    kind = optional(_BACKEND, "FlashAttentionImpl", _COST)
    found = attention_of(layers)
    return bool(found) and all(
        type(impl) is kind
        and impl.vllm_flash_attn_version == fresh_steps.FLASH_ATTENTION
        and impl.attn_type == _DECODER
        for impl in found
    )


def attention_of(layers: Mapping[str, Any]) -> list[Any]:
    """The implementation of each layer with a cache, None for a layer with a state."""
    layer_kind = optional(*_LAYERS, _COST)
    if layer_kind is None:
        return []
    return [getattr(layer, "impl", None) for layer in layers.values() if isinstance(layer, layer_kind)]


def install() -> bool:
    """Let FlashAttention's plans be for any lengths. False if this version plans in a way that is not known."""
    builder = optional(_BACKEND, "FlashAttentionMetadataBuilder", _COST)
    theirs = getattr(builder, "build", None)
    if theirs is None:
        return False
    if hasattr(theirs, _ATTRIBUTE):
        return True

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
    return True
