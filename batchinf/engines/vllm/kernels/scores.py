"""Kernels for logprobs: a token's logprob and rank, and the likeliest tokens, in one pass over the logits.

vLLM's V2 runner calls `torch.topk`, which makes several passes, and then makes three. An engine's start compares the
kernels with its function. Run with Triton 3.6.0 on an NVIDIA H200.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

from batchinf.base.text import one_line

# Elements of a row in one step of a kernel, and the warps that share them.
_TILE = (2048, 8)
# Neighbouring elements that one thread reads at once: 16 bytes of 16-bit numbers.
_GROUP = 8
# Neighbouring elements of a row of which the kernel keeps the maximum.
_SEGMENT = 128
_LOG2_E = 1.4426950408889634
_CHECKED_ROWS = 64


# Triton evaluates annotations and does not know those of Python.
@triton.jit  # type: ignore[untyped-decorator]
def one_pass(  # type: ignore[no-untyped-def]
    row,
    own,
    vocab_size,
    maxima,
    num_segments,
    SEGMENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    LOG2_E: tl.constexpr,  # noqa: N803
):
    """The maximum of a row, the log of the sum of exp(element - maximum), the maximum's first place, and own's rank.

    own: an element of the row. SEGMENT: 0, or so many neighbours whose maximum is stored in `maxima`. GROUP: neighbours
    of which one thread keeps the maximum, the step in which it came, and the sum of exp(element - maximum). The maximum
    starts at a finite number, because -inf - -inf is not a number.
    """
    groups = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    top = tl.full([BLOCK // GROUP], -3.0e38, tl.float32)
    step = tl.zeros([BLOCK // GROUP], tl.int32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    rank = tl.zeros([BLOCK // GROUP], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + groups
        x = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        highest = tl.max(x, axis=1)
        if SEGMENT > 0:
            segments = start // SEGMENT + tl.arange(0, BLOCK // SEGMENT)
            of_segments = tl.max(tl.reshape(highest, (BLOCK // SEGMENT, SEGMENT // GROUP)), axis=1)
            tl.store(maxima + segments, of_segments, mask=segments < num_segments)
        step = tl.where(highest > top, start, step)
        higher = tl.maximum(top, highest)
        added = tl.sum(tl.exp2((x - higher[:, None]) * LOG2_E), axis=1)
        total = total * tl.exp2((top - higher) * LOG2_E) + added
        top = higher
        rank += tl.sum(((x >= own) & (at < vocab_size)).to(tl.int32), axis=1)
    most = tl.max(top, axis=0)
    log_total = tl.log(tl.sum(total * tl.exp2((top - most) * LOG2_E), axis=0))
    at = tl.min(tl.where(top == most, step, vocab_size), axis=0) + tl.arange(0, BLOCK)
    x = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    likeliest = tl.min(tl.where(x == most, at, vocab_size), axis=0)
    likeliest = tl.where(likeliest < vocab_size, likeliest, 0)  # no element of a row without numbers is its maximum
    return most, log_total, likeliest, tl.sum(rank, axis=0)


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
    GROUP: tl.constexpr,  # noqa: N803
    LOG2_E: tl.constexpr,  # noqa: N803
):
    """One program a row. WIDTH: 1, or 2 with the likeliest token."""
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + row)
    own = tl.load(logits + row * stride + token_id).to(tl.float32)
    most, log_total, likeliest, rank = one_pass(
        row=logits + row * stride,
        own=own,
        vocab_size=vocab_size,
        maxima=ranks,
        num_segments=0,
        SEGMENT=0,
        BLOCK=BLOCK,
        GROUP=GROUP,
        LOG2_E=LOG2_E,
    )
    tl.store(found_ids + row * WIDTH, token_id)
    tl.store(logprobs + row * WIDTH, own - most - log_total)
    tl.store(ranks + row, rank)
    if WIDTH == 2:
        tl.store(found_ids + row * WIDTH + 1, likeliest.to(tl.int64))
        tl.store(logprobs + row * WIDTH + 1, -log_total)


@triton.jit  # type: ignore[untyped-decorator]
def maxima_kernel(  # type: ignore[no-untyped-def]
    log_sums,
    ranks,
    maxima,
    logits,
    stride,
    token_ids,
    vocab_size,
    num_segments,
    SEGMENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    LOG2_E: tl.constexpr,  # noqa: N803
):
    """One program a row: the log of the sum of exp(element), the token's rank, and the maximum of each segment."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    place = maxima + row * num_segments
    most, log_total, _, rank = one_pass(
        row=logits + row * stride,
        own=own,
        vocab_size=vocab_size,
        maxima=place,
        num_segments=num_segments,
        SEGMENT=SEGMENT,
        BLOCK=BLOCK,
        GROUP=GROUP,
        LOG2_E=LOG2_E,
    )
    tl.store(log_sums + row, most + log_total)
    tl.store(ranks + row, rank)


def takes(k: int, vocab_size: int) -> bool:
    """Whether `token_scores` is for this k: for large ones, the segments that it searches are much of the row."""
    return k <= 1 or k * _SEGMENT * 8 <= vocab_size


def token_scores(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, tile: tuple[int, int] | None = None
) -> tuple[Any, Any, Any]:
    """[n, k + 1] token ids, [n, k + 1] logprobs and [n] ranks of logits [n, vocab_size]; k: of the likeliest tokens.

    token_ids: [n]. A token's rank is the number of tokens that are as likely or likelier. Of equally likely tokens the
    first ones are taken, as `torch.topk` does on a GPU. tile: elements of a row in one step, and the warps that share
    them; None is the fastest in benchmarks/history/vllm-0.26.md.
    """
    (num_rows, vocab_size), (block, num_warps) = logits.shape, tile or _TILE
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if k > 1:
        num_segments = -(-vocab_size // _SEGMENT)
        maxima = logits.new_empty((num_rows, num_segments))
        log_sums = torch.empty((num_rows, 1), dtype=torch.float32, device=logits.device)
        maxima_kernel[(num_rows,)](
            log_sums=log_sums, ranks=ranks, maxima=maxima, logits=logits, stride=logits.stride(0), token_ids=token_ids,
            vocab_size=vocab_size, num_segments=num_segments, SEGMENT=_SEGMENT, BLOCK=block, GROUP=_GROUP,
            LOG2_E=_LOG2_E, num_warps=num_warps,
        )  # fmt: skip
        found_ids = torch.cat((token_ids[:, None], _likeliest(logits, maxima, k)), dim=1)
        return found_ids, logits.gather(1, found_ids).float() - log_sums, ranks
    found_ids = torch.empty((num_rows, k + 1), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((num_rows, k + 1), dtype=torch.float32, device=logits.device)
    score_kernel[(num_rows,)](
        found_ids=found_ids, logprobs=logprobs, ranks=ranks, logits=logits, stride=logits.stride(0),
        token_ids=token_ids, vocab_size=vocab_size, WIDTH=k + 1, BLOCK=block, GROUP=_GROUP, LOG2_E=_LOG2_E,
        num_warps=num_warps,
    )  # fmt: skip
    return found_ids, logprobs, ranks


def _likeliest(logits: torch.Tensor, maxima: torch.Tensor, k: int) -> torch.Tensor:
    """[n, k] ids of the largest logits, found in the k segments with the largest maxima.

    These segments hold them: the k-th largest maximum is at most the k-th largest logit. In ascending order, the first
    of equal logits stay first.
    """
    vocab_size = logits.shape[1]
    segments = maxima.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    ids = (segments[:, :, None] * _SEGMENT + torch.arange(_SEGMENT, device=logits.device)).flatten(1)
    if vocab_size % _SEGMENT == 0:
        within = logits.gather(1, ids)
    else:  # the last segment ends behind the row
        within = logits.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, -torch.inf)
    return ids.gather(1, within.topk(k, dim=-1).indices).clamp_(max=vocab_size - 1)


def is_right(
    theirs: Callable[..., Any], vocab_size: int, dtype: torch.dtype, device: torch.device, *, ks: Iterable[int]
) -> bool:
    """Whether `token_scores` runs on this device and gives what vLLM's `compute_topk_scores` gives for random logits.

    Prints why not. Skips each k that the kernels do not take, because vLLM's code is used there anyway.
    """
    if not HAS_TRITON:
        return False
    try:
        # vLLM takes raw scores of the model's own type, and processed ones of float32.
        for logits in (_checked_logits(vocab_size, kind, device) for kind in dict.fromkeys((dtype, torch.float32))):
            token_ids = torch.randint(vocab_size, (len(logits),), device=device)
            token_ids[:2], token_ids[_CHECKED_ROWS:] = logits[:2].argmax(-1), vocab_size - 1
            for k in (k for k in ks if takes(k, vocab_size)):
                _require_equal(logits, token_scores(logits, token_ids, k), theirs(logits, k, token_ids))
    except Exception as error:  # a compiler may fail in any way, and vLLM's own kernels do the work then
        print(
            f"the kernels for logprobs are not used: {one_line(f'{type(error).__name__}: {error}', 1000)}", flush=True
        )
        return False
    return True


def _checked_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random rows, and then special ones. Behind each row are larger numbers, as where vLLM fills up a vocabulary."""
    num_special = 6
    wide = torch.randn((_CHECKED_ROWS + num_special, vocab_size + 64), device=device).to(dtype)
    wide[:, vocab_size:] = 1000.0
    logits = wide[:, :vocab_size]
    even, peaked, late, ends, rising, falling = logits[_CHECKED_ROWS:]
    even.fill_(2.5)
    peaked *= 20
    late[: vocab_size * 3 // 4] = -torch.inf
    ends[0] = ends[-1] = 20.0
    rising.copy_(torch.linspace(-8, 8, vocab_size))
    falling.copy_(torch.linspace(8, -8, vocab_size))
    return logits


def _require_equal(logits: torch.Tensor, ours: tuple[Any, Any, Any], theirs: Any) -> None:
    """AssertionError if our token ids, logprobs and ranks are not vLLM's."""
    ids, logprobs, ranks = ours
    torch.testing.assert_close(logprobs, theirs.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ranks, theirs.selected_token_ranks.to(ranks.dtype), rtol=0, atol=0)
    their_ids = theirs.logprob_token_ids.long()
    torch.testing.assert_close(ids[:, 0].long(), their_ids[:, 0], rtol=0, atol=0)
    # Each of several tokens with equal logits may be among the likeliest, but only once.
    own, other = (logits.gather(1, found) for found in (ids.long(), their_ids))
    torch.testing.assert_close(own, other, rtol=0, atol=0)
    likeliest = ids[:, 1:].sort(dim=-1).values
    if bool((likeliest.diff() == 0).any()):
        raise AssertionError("a token is twice among the likeliest")
    if ids.shape[1] > 2:  # vLLM and the kernels take the first ones of a random row
        rows = slice(0, _CHECKED_ROWS)
        torch.testing.assert_close(likeliest[rows], their_ids[rows, 1:].sort(dim=-1).values, rtol=0, atol=0)
