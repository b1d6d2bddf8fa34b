"""A kernel for the attention of decoding: one new token for each request, over a paged cache of keys and values.

FlashAttention 3 runs one thread block on each multiprocessor, which handles one request and head after the other, in
tiles of 64 queries. Decoding with grouped queries fills 2 to 8 of these. For contexts of a few hundred tokens a tile
waits for memory longer than it works. This kernel has small programs, many at once on a multiprocessor, so that some
work while others wait. benchmarks/RESULTS.md compares both. FlashAttention does steps that also read prompts.

A program reads all tokens of a request, one after the other. If one request of many has tens of thousands of tokens,
FlashAttention is faster (`long_requests.py`).

An engine's start compares it with the installed FlashAttention 3.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm import envs
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.v1.attention.backends import flash_attn

from batchinf.base.text import one_line
from batchinf.engines.vllm.kernels.base_worker import Worker
from batchinf.engines.vllm.kernels.comparison import (
    FLASH_ATTENTION,
    SHORT,
    AttentionShape,
    attend,
    example,
    require_close,
    scales_of,
)
from batchinf.engines.vllm.kernels.long_requests import GraphChoice, all_agree
from batchinf.engines.vllm.known_sources import allowed

_ATTRIBUTE = "is_of_batchinf"
# Rows of a program's tile of queries: the least that the tensor cores take.
_ROWS = 16
_LOG2_E = 1.4426950408889634
# Tokens in one step of the kernel, the warps that share them, and the steps that are loaded ahead.
_SHAPE = (64, 2, 3)
_HEAD_SIZES = (64, 128)
# 512 requests with 8 heads of keys. For fewer ones FlashAttention splits long contexts, and is faster there.
_LEAST_PROGRAMS = 4096
# What vLLM gives FlashAttention for decoding over a paged cache. Other arguments change the result.
_GIVEN = frozenset(
    """q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap
    scheduler_metadata fa_version q_descale k_descale v_descale num_splits""".split()
)
_SCALES = ("q_descale", "k_descale", "v_descale")
# Tokens of the short requests in the comparison at the start. Graphs are filled up with requests without tokens.
_CHECKED = (0, *SHORT)
_CHECKED_TIMES = 15


# Triton evaluates annotations and does not know those of Python.
@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    keys,
    values,
    block_table,
    lengths,
    scale,
    query_scale,
    key_scale,
    value_scale,
    out_stride,
    query_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    IS_FP8: tl.constexpr,  # noqa: N803
):
    """One program for a request and a head of keys, which GROUP heads of queries share. Base-2 online softmax.

    With IS_FP8 the numbers are multiplied as float16, which holds all float8 numbers exactly.
    """
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + request)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_SIZE)
    of_rows = (head * GROUP + rows)[:, None] * HEAD_SIZE + dims[None, :]
    is_row = (rows < GROUP)[:, None]
    q = tl.load(query + request * query_stride + of_rows, mask=is_row, other=0.0)
    if IS_FP8:
        q = q.to(tl.float16)
        scale = scale * tl.load(query_scale) * tl.load(key_scale)
    top = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_SIZE], tl.float32)
    tokens = tl.arange(0, TILE)
    table = block_table + request * table_stride
    for start in tl.range(0, length, TILE, num_stages=STAGES):
        at = start + tokens
        is_token = at < length
        block = tl.load(table + at // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        place = block * block_stride + (at % BLOCK_SIZE) * token_stride + head * head_stride
        k = tl.load(keys + place[:, None] + dims[None, :], mask=is_token[:, None], other=0.0)
        v = tl.load(values + place[:, None] + dims[None, :], mask=is_token[:, None], other=0.0)
        if IS_FP8:
            k = k.to(tl.float16)
            v = v.to(tl.float16)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(is_token[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp2(s - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(p, axis=1)
        acc = acc * shrunk[:, None] + tl.dot(p.to(v.dtype), v)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a graph's unused rows have no tokens
    if IS_FP8:
        acc = acc * tl.load(value_scale)
    tl.store(out + request * out_stride + of_rows, acc.to(out.dtype.element_ty), mask=is_row)


def pays_in_step(num_requests: int, num_key_heads: int) -> bool:
    """Whether the kernel is faster in a step in which so many requests decode, and nothing else."""
    return num_requests * num_key_heads >= _LEAST_PROGRAMS


def takes(given: Mapping[str, Any]) -> bool:
    """Whether the kernel does what FlashAttention does with these arguments, by name, and is faster."""
    others = (value for name, value in given.items() if name not in _GIVEN)
    if given.get("max_seqlen_q") != 1 or any(value is not None and value is not False for value in others):
        return False
    query, keys, values = given["q"], given["k"], given["v"]
    out, table, lengths = given.get("out"), given.get("block_table"), given.get("seqused_k")
    if out is None or table is None or lengths is None or keys.dim() != 4:
        return False
    num_requests, num_heads, head_size = query.shape
    num_key_heads = keys.shape[2]
    window = given.get("window_size")
    return (
        given.get("causal") is True
        and given.get("fa_version") == FLASH_ATTENTION
        and (window is None or list(window) == [-1, -1])
        and not given.get("softcap")
        and given.get("softmax_scale") is not None
        and pays_in_step(num_requests, num_key_heads)
        and len(lengths) == num_requests == len(given["cu_seqlens_q"]) - 1  # one token each
        and _has_known_shape(num_heads, num_key_heads, head_size)
        and _has_known_numbers(query, keys, values, given)
        and query.stride()[1:] == out.stride()[1:] == (head_size, 1)
        and keys.stride() == values.stride()
        and keys.stride(3) == table.stride(1) == 1
        and table.dtype == lengths.dtype == torch.int32
    )


def _has_known_shape(num_heads: int, num_key_heads: int, head_size: int) -> bool:
    return head_size in _HEAD_SIZES and num_heads % num_key_heads == 0 and num_heads // num_key_heads <= _ROWS


def _has_known_numbers(query: Any, keys: Any, values: Any, given: Mapping[str, Any]) -> bool:
    """16-bit numbers, or float8 with one scale for all heads."""
    if not query.dtype == keys.dtype == values.dtype:
        return False
    if query.dtype in (torch.bfloat16, torch.float16):
        return True
    scales = [given.get(name) for name in _SCALES]
    return query.dtype == torch.float8_e4m3fn and all(
        scale is not None and scale.dtype == torch.float32 and not any(scale.stride()) for scale in scales
    )


def attention_of_decoding(theirs: Callable[..., Any], choice: GraphChoice) -> Callable[..., Any]:
    """Replaces `flash_attn_varlen_func`. Calls `theirs` for all but large numbers of requests that decode."""

    @functools.wraps(theirs)
    def flash_attn_varlen_func(*arguments: Any, **named: Any) -> Any:
        if not arguments and not choice.has_long_request and takes(named):
            run_ours(named)
            return named["out"]
        return theirs(*arguments, **named)

    setattr(flash_attn_varlen_func, _ATTRIBUTE, True)
    return flash_attn_varlen_func


def run_ours(given: Mapping[str, Any], shape: tuple[int, int, int] = _SHAPE) -> None:
    """Run the kernel with the arguments of FlashAttention that it takes. `out` is 0 for a request without tokens.

    q, out: [n, heads, head_size]. k, v: [blocks, block_size, key heads, head_size] with equal strides. block_table:
    int32 [n, most blocks]. seqused_k: int32 [n], with the query's own token. Scales: float32 on the device, used if q,
    k and v are float8. shape: tokens in a step of the kernel, its warps, and the steps that are loaded ahead.
    """
    out, query, keys, table = (given[name] for name in ("out", "q", "k", "block_table"))
    num_requests, num_heads, head_size = query.shape
    num_key_heads = keys.shape[2]
    tile, warps, stages = shape
    scales = (given.get(name) for name in _SCALES)
    decode_kernel[(num_requests, num_key_heads)](
        out, query, keys, given["v"], table, given["seqused_k"], given["softmax_scale"] * _LOG2_E, *scales,
        out.stride(0), query.stride(0), table.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
        BLOCK_SIZE=keys.shape[1], GROUP=num_heads // num_key_heads, HEAD_SIZE=head_size, ROWS=_ROWS, TILE=tile,
        STAGES=stages, IS_FP8=keys.element_size() == 1, num_warps=warps,
    )  # fmt: skip


class DecodingWorker(Worker):
    """vLLM's worker, which decodes large batches with the kernel above."""

    _graph_choice: GraphChoice | None = None

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM. Installs the kernel here, because vLLM captures its CUDA graphs in this step."""
        config, compilation = self.vllm_config, self.vllm_config.compilation_config
        mixed = compilation.cudagraph_mode.mixed_mode().name
        # A graph for all batches would have the kernel, and would also run prompts, which the kernel cannot.
        can = mixed != "FULL" and allowed("kernel")
        sizes = config.model_config.dtype, config.cache_config.block_size, config.model_config.max_model_len
        choice = GraphChoice(config.model_config.get_num_kv_heads(config.parallel_config), pays_in_step)
        is_ours = can and install(compilation.static_forward_context, *sizes, choice=choice)
        seconds = super().compile_or_warm_up_model()
        # Data parallel ranks agree on a step's graph after each has chosen.
        if mixed == "PIECEWISE" and config.parallel_config.data_parallel_size == 1:
            choice.leaves_graphs = all_agree(is_ours and allowed("long") and choice.install(self.model_runner))
        self._graph_choice = choice if is_ours else None
        return seconds

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM."""
        if self._graph_choice is not None:
            self._graph_choice.look(scheduler_output)
        return super().execute_model(scheduler_output)


def install(
    layers: Mapping[str, Any], dtype: torch.dtype, block_size: int, longest: int, *, choice: GraphChoice
) -> bool:
    """Let FlashAttention leave large batches that decode to the kernel. False if vLLM's code is kept.

    layers: the model's layers, by name, of which some have attention. dtype, longest: the model's type, and tokens of
    its longest request. choice: knows the steps that FlashAttention keeps.
    """
    theirs = getattr(flash_attn, "flash_attn_varlen_func", None)
    # With that variable, vLLM's results do not depend on the batch; the kernel is not for all batches.
    if theirs is None or getattr(envs, "VLLM_BATCH_INVARIANT", False):
        return False
    if hasattr(theirs, _ATTRIBUTE):  # it is ours, for an earlier engine of this process
        theirs = theirs.__wrapped__
    # Each shape has the scales of one of its layers.
    shapes = {
        AttentionShape.of(impl, dtype, block_size): AttentionShape.of(impl, dtype, block_size, scales_of(layer))
        for layer, impl in ((layer, getattr(layer, "impl", None)) for layer in layers.values())
        if isinstance(impl, flash_attn.FlashAttentionImpl) and _is_known(impl)
    }
    if not shapes or not all(is_right(theirs, shape, longest) for shape in shapes.values()):
        return False
    flash_attn.flash_attn_varlen_func = attention_of_decoding(theirs, choice)
    return True


def _is_known(impl: Any) -> bool:
    """Whether the kernel can do the attention of a layer: each token sees all before it, with nothing added."""
    return (
        impl.vllm_flash_attn_version == FLASH_ATTENTION
        and _has_known_shape(impl.num_heads, impl.num_kv_heads, impl.head_size)
        and impl.sliding_window in (None, (-1, -1))
        and not impl.logits_soft_cap
        and impl.alibi_slopes is None
        and impl.sinks is None
    )


def is_right(theirs: Callable[..., Any], shape: AttentionShape, longest: int, device: str = "cuda") -> bool:
    """Whether the kernel runs on this device and gives what FlashAttention gives for random numbers. Prints why not.

    One request has `longest` tokens, among many short ones.
    """
    if not HAS_TRITON:
        return False
    try:
        lengths = (_CHECKED * _CHECKED_TIMES)[:-1]
        lengths = (*lengths[: len(lengths) // 2], longest, *lengths[len(lengths) // 2 :])
        given = example(lengths, shape, device)
        expected = attend(theirs, given)
        expected[given["seqused_k"] == 0] = 0
        run_ours(given)
        require_close(given["out"], expected, shape.is_fp8)
    except Exception as error:  # a compiler may fail in any way, and FlashAttention does the work then
        print(f"the kernel for decoding is not used: {one_line(f'{type(error).__name__}: {error}', 1000)}", flush=True)
        return False
    return True
