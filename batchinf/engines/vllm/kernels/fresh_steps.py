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
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from batchinf.engines.vllm.kernels.long_requests import chooser_of
from batchinf.engines.vllm.names import optional

_BACKEND = "vllm.v1.attention.backends.flash_attn"
_COST = "steps of prompts use the KV cache, which is slower for short ones"
_ATTRIBUTE = "is_for_fresh_steps"
_STARTS = "starts_of_batchinf"
_SEAM = ("forward", "do_kv_cache_update")
FLASH_ATTENTION = 3  # the version
# Tokens of the prompts in the comparison at the start.
_CHECKED_LENGTHS = (1, 7, 64, 65, 300)
_CHECKED_PADDING, _CHECKED_EMPTY = 20, 1018  # tokens, and prompts without any


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


def install(steps: FreshSteps, impls: Iterable[Any], dtype: torch.dtype) -> bool:
    """Let the attention of fresh steps go without the cache. False if vLLM's code is kept.

    impls: the attention of the model's layers. dtype: the model's.
    """
    impl, attend = optional(_BACKEND, "FlashAttentionImpl", _COST), optional(_BACKEND, "flash_attn_varlen_func", _COST)
    if attend is None or not all(hasattr(impl, name) for name in _SEAM):
        return False
    shapes = {(one.num_heads, one.num_kv_heads, one.head_size) for one in impls}
    if not all(is_right(attend, *shape, dtype) for shape in shapes):
        return False
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
        fresh_attention(attend, query, key, value, out, starts, longest, self.scale, **more)
        return output

    @functools.wraps(their_update)
    def do_kv_cache_update(self: Any, *arguments: Any, **named: Any) -> None:
        if not steps.is_fresh:
            their_update(self, *arguments, **named)

    for ours, original in ((forward, theirs), (do_kv_cache_update, their_update)):
        setattr(ours, _ATTRIBUTE, original)
        setattr(impl, ours.__name__, ours)
    return True


def with_padding(starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[n + 2] for `starts` [n + 1], see vLLM's `cu_seqlens_q`. The tokens behind the last prompt become one more."""
    return torch.cat((starts, starts.new_full((1,), num_tokens)))


def fresh_attention(
    attend: Callable[..., Any], query: Any, key: Any, value: Any, out: Any, starts: Any, longest: int, scale: float,
    **more: Any,
) -> None:  # fmt: skip
    """FlashAttention of each token over its prompt. starts: [n + 1] int32, see vLLM's `cu_seqlens_q`."""
    attend(
        q=query, k=key, v=value, out=out, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest,
        max_seqlen_k=longest, softmax_scale=scale, window_size=[-1, -1], fa_version=FLASH_ATTENTION, num_splits=1,
        **more,
    )  # fmt: skip


def is_right(
    attend: Callable[..., Any], num_heads: int, num_key_heads: int, head_size: int, dtype: torch.dtype,
    device: str = "cuda",
) -> bool:  # fmt: skip
    """Whether FlashAttention without a cache does what PyTorch's attention does with random numbers. Prints why not."""
    starts = [*itertools.accumulate((0, *_CHECKED_LENGTHS))]
    num_tokens, scale, group = starts[-1] + _CHECKED_PADDING, head_size**-0.5, num_heads // num_key_heads
    # As in a layer: keys and values lie beside the queries, and a graph is filled up with prompts without tokens.
    mixed = torch.randn((num_tokens, num_heads + 2 * num_key_heads, head_size), device=device, dtype=torch.float32)
    query, key, value = mixed.to(dtype).split((num_heads, num_key_heads, num_key_heads), dim=1)
    found = torch.empty(query.shape, dtype=dtype, device=device)
    filled = starts + starts[-1:] * _CHECKED_EMPTY
    try:
        places = with_padding(torch.tensor(filled, dtype=torch.int32, device=device), num_tokens)
        fresh_attention(attend, query, key, value, found, places, 4 * num_tokens, scale, causal=True)
        for start, end in itertools.pairwise([*starts, num_tokens]):
            mine, keys, values = (
                one[start:end].float().repeat_interleave(times, dim=1).transpose(0, 1)
                for one, times in ((query, 1), (key, group), (value, group))
            )
            expected = torch.nn.functional.scaled_dot_product_attention(mine, keys, values, is_causal=True, scale=scale)
            torch.testing.assert_close(found[start:end].float(), expected.transpose(0, 1), rtol=0.02, atol=0.02)
    except Exception as error:  # a library may fail in any way, and vLLM's own path does the work then
        print(f"{_COST}: {type(error).__name__}: {error}", flush=True)
        return False
    return True


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
