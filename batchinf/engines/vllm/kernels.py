"""A kernel for logprobs of prompts: a token's logprob and rank, and the likeliest token, in one pass over the logits.

vLLM's V2 runner makes three passes after `torch.topk`. Compared with the functions of 0.26.0 in Triton's interpreter,
for float16 and float32 and vocabularies of 3,000 and 151,936, and with the source of 0.32.0. Triton 3.6.0 compiles it
for compute capability 9.0. Not run on a GPU yet.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

# Elements of a row in one step of the kernel, and the warps that share them.
_BLOCK, _WARPS = 4096, 8
_CHECKED_ROWS = 64


# Triton evaluates annotations and does not know those of Python.
@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(  # type: ignore[no-untyped-def]
    found_ids,
    logprobs,
    ranks,
    logits,
    stride,
    token_ids,
    vocab_size,
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One program a row. WIDTH: 1, or 2 with the likeliest token.

    Each lane keeps the maximum of its elements, where it is, and the sum of exp(element - maximum). The maximum starts
    at a finite number, because -inf - -inf is not a number.
    """
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + row)
    own = tl.load(logits + row * stride + token_id).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3.0e38, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + lanes
        x = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        is_above = x > top
        shrunk = tl.exp(-tl.abs(x - top))
        total = tl.where(is_above, total * shrunk + 1.0, total + shrunk)
        place = tl.where(is_above, at, place)
        top = tl.where(is_above, x, top)
        rank += ((x >= own) & (at < vocab_size)).to(tl.int32)
    most = tl.max(top, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp(top - most), axis=0))
    tl.store(found_ids + row * WIDTH, token_id)
    tl.store(logprobs + row * WIDTH, own - most - log_total)
    tl.store(ranks + row, tl.sum(rank, axis=0))
    if WIDTH == 2:
        likeliest = tl.min(tl.where(top == most, place, vocab_size), axis=0)
        tl.store(found_ids + row * WIDTH + 1, likeliest.to(tl.int64))
        tl.store(logprobs + row * WIDTH + 1, -log_total)


def token_scores(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[Any, Any, Any]:
    """[n, k + 1] token ids, [n, k + 1] logprobs and [n] ranks of logits [n, vocab_size]; k: 0, or 1 for the likeliest.

    token_ids: [n]. A token's rank is the number of tokens that are as likely or likelier. Of equally likely tokens the
    first one is the likeliest.
    """
    num_rows, vocab_size = logits.shape
    found_ids = torch.empty((num_rows, k + 1), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((num_rows, k + 1), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    score_kernel[(num_rows,)](
        found_ids, logprobs, ranks, logits, logits.stride(0), token_ids, vocab_size,
        WIDTH=k + 1, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return found_ids, logprobs, ranks


def is_right(theirs: Callable[..., Any], vocab_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `token_scores` runs on this device and gives what vLLM's `compute_topk_scores` gives for random logits.

    Prints why not.
    """
    if not HAS_TRITON:
        return False
    logits = torch.randn((_CHECKED_ROWS, vocab_size), device=device).to(dtype)
    token_ids = torch.randint(vocab_size, (_CHECKED_ROWS,), device=device)
    try:
        for k in (0, 1):
            ids, logprobs, ranks = token_scores(logits, token_ids, k)
            expected = theirs(logits, k, token_ids)
            torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ranks, expected.selected_token_ranks.to(ranks.dtype), rtol=0, atol=0)
            # Either one of two tokens with equal logits may be the likeliest.
            own, other = (logits.gather(1, found.long()) for found in (ids, expected.logprob_token_ids))
            torch.testing.assert_close(own, other, rtol=0, atol=0)
    except Exception as error:  # a compiler may fail in any way, and vLLM's own kernels do the work then
        print(f"the kernel for logprobs of prompts is not used: {type(error).__name__}: {error}", flush=True)
        return False
    return True
