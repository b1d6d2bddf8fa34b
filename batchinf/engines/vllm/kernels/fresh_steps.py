"""Attention of steps of whole prompts, which reads keys and values where the layer has just written them.

vLLM writes the keys and values of each step into its cache, and FlashAttention reads them there, block by block. A
prompt that only has to be read is never read again. If all prompts of a step are computed from their first to their
last token, the step needs no cache: it is not written, and FlashAttention reads whole tiles of keys and values. A step
with a part of a longer prompt is computed as vLLM does it, without a CUDA graph.

FlashAttention reads the keys and values of a whole tile, which may reach into the next prompt. Their weight is 0, but
0 times infinity is not a number. For this reason models in float16, which may overflow, keep the cache. The tokens that
fill up a CUDA graph are treated as one more prompt, so that their attention is computed too. Otherwise it would be
whatever the memory held before.

Written for the sources of vLLM 0.26.0, 0.32.0 and 0.33.0.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from batchinf.engines.vllm.kernels.comparison import FLASH_ATTENTION, SHORT, AttentionShape, example, require_close
from batchinf.engines.vllm.kernels.long_requests import chooser_of
from batchinf.engines.vllm.names import optional

_BACKEND = "vllm.v1.attention.backends.flash_attn"
_COST = "steps of prompts use the KV cache, which is slower for short ones"
_ATTRIBUTE = "is_for_fresh_steps"
_STARTS = "starts_of_batchinf"
_SEAM = ("forward", "do_kv_cache_update")
# The comparison at the start: tokens behind the prompts, prompts without tokens, and the numbers of the queries.
_CHECKED_PADDING = 20
_CHECKED_EMPTY = 1000
_CHECKED_NUMBERS = 1 << 23


class FreshSteps:
    """Whether the step that is running needs no cache. Graphs are captured for such steps."""

    def __init__(self) -> None:
        self.is_fresh = False

    @contextlib.contextmanager
    def running(self, is_fresh: bool) -> Iterator[None]:
        """Set the answer for one step. Between steps it is False, so a step that comes another way keeps the cache."""
        self.is_fresh = is_fresh
        try:
            yield
        finally:
            self.is_fresh = False


def is_fresh(scheduled: Any) -> bool:
    """Whether a step has whole prompts, and nothing else. scheduled: what the scheduler gives the step."""
    tokens = scheduled.num_scheduled_tokens
    new = scheduled.scheduled_new_reqs
    are_whole = all(tokens[one.req_id] == len(one.prompt_token_ids or ()) for one in new)
    return are_whole and not scheduled.scheduled_cached_reqs.req_ids


def fits(impls: Iterable[Any], dtype: torch.dtype) -> bool:
    """Whether layers with such attention have all that they need in their own keys and values."""
    return dtype == torch.bfloat16 and all(
        tuple(impl.sliding_window) == (-1, -1) and impl.kv_sharing_target_layer_name is None for impl in impls
    )


def install(steps: FreshSteps, impls: Iterable[Any], dtype: torch.dtype, block_size: int, longest: int) -> bool:
    """Let the attention of fresh steps go without the cache. False if vLLM's code is kept.

    impls: the attention of the model's layers. dtype, longest: the model's type, and tokens of its longest request.
    """
    impl, attend = optional(_BACKEND, "FlashAttentionImpl", _COST), optional(_BACKEND, "flash_attn_varlen_func", _COST)
    if attend is None or not all(hasattr(impl, name) for name in _SEAM):
        return False
    shapes = {
        AttentionShape(
            num_heads=one.num_heads,
            num_key_heads=one.num_kv_heads,
            head_size=one.head_size,
            dtype=dtype,
            block_size=block_size,
        )
        for one in impls
    }
    if not all(is_right(attend, shape, longest) for shape in shapes):
        return False
    _replace(impl, steps, attend)
    return True


def _replace(impl: Any, steps: FreshSteps, attend: Callable[..., Any]) -> None:
    """impl: vLLM's `FlashAttentionImpl`. attend: its `flash_attn_varlen_func`."""
    theirs, their_update = impl.forward, impl.do_kv_cache_update
    if hasattr(theirs, _ATTRIBUTE):
        theirs, their_update = (getattr(each, _ATTRIBUTE) for each in (theirs, their_update))

    @functools.wraps(theirs)
    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        *scales: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if not steps.is_fresh or attn_metadata is None:
            return theirs(self, layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named)
        num_tokens, longest = attn_metadata.num_actual_tokens, attn_metadata.max_query_len
        # Once for all layers of a step. A graph that is captured has to do it itself.
        is_captured = torch.cuda.is_current_stream_capturing()
        was_captured, starts = getattr(attn_metadata, _STARTS, (None, None))
        if was_captured is not is_captured:
            starts = with_padding(attn_metadata.query_start_loc, num_tokens)
            setattr(attn_metadata, _STARTS, (is_captured, starts))
        query, key, value, out = (each[:num_tokens] for each in (query, key, value, output))
        more = {"causal": attn_metadata.causal, "softcap": self.logits_soft_cap, "s_aux": self.sinks}
        tensors = {"q": query, "k": key, "v": value, "out": out}
        fresh_attention(attend, tensors, starts, longest=longest, scale=self.scale, **more)
        return output

    @functools.wraps(their_update)
    def do_kv_cache_update(self: Any, *arguments: Any, **named: Any) -> None:
        if not steps.is_fresh:
            their_update(self, *arguments, **named)

    for ours, original in ((forward, theirs), (do_kv_cache_update, their_update)):
        setattr(ours, _ATTRIBUTE, original)
        setattr(impl, ours.__name__, ours)


def with_padding(starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[n + 2] for `starts` [n + 1], see vLLM's `cu_seqlens_q`. The tokens behind the last prompt become one more."""
    return torch.cat((starts, starts.new_full((1,), num_tokens)))


def fresh_attention(
    attend: Callable[..., Any], tensors: Mapping[str, Any], starts: Any, *, longest: int, scale: float, **more: Any
) -> None:
    """FlashAttention of each token over its prompt.

    tensors: `q`, `k`, `v` and `out`. starts: [n + 1] int32, see vLLM's `cu_seqlens_q`.
    """
    attend(
        **tensors, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
        softmax_scale=scale, window_size=[-1, -1], fa_version=FLASH_ATTENTION, num_splits=1, **more,
    )  # fmt: skip


def is_right(attend: Callable[..., Any], shape: AttentionShape, longest: int, device: str = "cuda") -> bool:
    """Whether attention without a cache gives what FlashAttention gives with one. Prints why not.

    One prompt has `longest` tokens, or as many as fit, among many short ones.
    """
    num_heads = shape.num_heads
    num_key_heads = shape.num_key_heads
    head_size = shape.head_size
    steps = FreshSteps()
    layer: Any = type("CheckedLayer", (_CheckedLayer,), {})(attend, head_size)
    _replace(type(layer), steps, attend)
    longest = min(longest, _CHECKED_NUMBERS // (num_heads * head_size))
    try:
        # Two steps, because something of the first could be left in the second.
        for lengths in (SHORT[::-1], (*SHORT, longest, *SHORT)):
            # A graph is filled up with prompts without tokens. Tokens behind the prompts are computed as one more.
            all_lengths = *lengths, _CHECKED_PADDING
            given = example(all_lengths, shape, device, counts=all_lengths)
            num_tokens = len(given["q"])
            starts = given["cu_seqlens_q"][:-1]
            # As in a layer: keys and values lie beside the queries.
            width = num_heads + 2 * num_key_heads
            mixed = torch.randn((num_tokens + 3, width, head_size), device=device, dtype=shape.dtype)
            tensors = mixed.split((num_heads, num_key_heads, num_key_heads), dim=1)
            metadata = types.SimpleNamespace(
                num_actual_tokens=num_tokens, max_query_len=4 * num_tokens, causal=True,
                query_start_loc=torch.cat((starts, starts[-1:].expand(_CHECKED_EMPTY))),
            )  # fmt: skip
            found, expected = (mixed.new_full((num_tokens + 3, num_heads, head_size), torch.nan) for _ in range(2))
            cache, is_written = layer.begin(given)
            with steps.running(is_fresh=True):
                layer.do_kv_cache_update(None, *tensors[1:], cache, None)
                layer.forward(None, *tensors, cache, metadata, found)
            if bool(is_written()):
                raise AssertionError("a step that needs no cache has written it")
            layer.do_kv_cache_update(None, *tensors[1:], cache, None)
            if not bool(is_written()):
                raise AssertionError("a step that needs the cache has not written it")
            layer.forward(None, *tensors, cache, metadata, expected)
            require_close(found[:num_tokens], expected[:num_tokens])
    except Exception as error:  # a library may fail in any way, and vLLM's own path does the work then
        print(f"{_COST}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


class _CheckedLayer:
    """Takes the place of vLLM's `FlashAttentionImpl` in the comparison: writes the cache, and reads it."""

    logits_soft_cap = 0
    sinks = None

    def __init__(self, attend: Callable[..., Any], head_size: int) -> None:
        self._attend = attend
        self.scale = head_size**-0.5
        self._given: dict[str, Any] = {}

    def begin(self, given: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
        """Empty the cache for an example, whose requests have only new tokens. Returns it, and whether it has any."""
        self._given = given
        cache = given["k"], given["v"]
        for each in cache:
            each.zero_()
        return cache, lambda: cache[0].any() or cache[1].any()

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        starts = self._given["cu_seqlens_q"]
        table = self._given["block_table"]
        block_size = kv_cache[0].shape[1]
        counts = starts.diff().long()
        request = torch.repeat_interleave(torch.arange(len(counts), device=starts.device), counts)
        at = torch.arange(len(request), device=starts.device) - starts[request]
        block = table[request, at // block_size].long()
        for each, new in zip(kv_cache, (key, value), strict=True):
            each[block, at % block_size] = new[: len(request)]

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *scales: Any
    ) -> Any:  # fmt: skip
        num = attn_metadata.num_actual_tokens
        self._attend(**{**self._given, "q": query[:num], "out": output[:num], "window_size": [-1, -1]})
        return output


def capture_fresh_steps(runner: Any, steps: FreshSteps) -> bool:
    """Capture CUDA graphs for fresh steps, and run other steps without a graph. Call it before the capture.

    False if vLLM captures or chooses graphs in a way that is not known.
    """
    chooser, modes = chooser_of(runner), optional("vllm.config", "CUDAGraphMode", _COST)
    their_capture = getattr(runner, "capture_model", None)
    if chooser is None or modes is None or their_capture is None:
        return False
    theirs = chooser.dispatch

    @functools.wraps(their_capture)
    def capture_model(*arguments: Any, **named: Any) -> Any:
        with steps.running(is_fresh=True):
            return their_capture(*arguments, **named)

    @functools.wraps(theirs)
    def dispatch(*arguments: Any, **named: Any) -> Any:
        found = theirs(*arguments, **named)
        if steps.is_fresh:
            return found
        given = inspect.signature(theirs).bind(*arguments, **named).arguments
        if isinstance(found, tuple):  # the V1 runner's: a mode, and the size of the graph
            return theirs(given["num_tokens"], valid_modes={modes.NONE})
        sizes = {name: given[name] for name in ("num_reqs", "num_tokens")}
        return dataclasses.replace(found, cg_mode=modes.NONE, uniform_token_count=None, **sizes)

    chooser.dispatch, runner.capture_model = dispatch, capture_model
    return True
