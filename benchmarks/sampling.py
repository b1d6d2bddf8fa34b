"""What logprobs cost on the device: milliseconds of one step's kernels of vLLM's V2 runner, by k.

    python benchmarks/sampling.py                                   # 1,024 requests, Llama 3's vocabulary, bfloat16
    python benchmarks/sampling.py --tiles --k 0 1 20                # tiles of batchinf's kernels instead

A job and the raw engine both pay this cost. The logits are random. CUDA events time 20 calls after 3 warm-up calls; the
result is the median of 5 such rounds. Needs a GPU.
"""

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable

import torch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from batchinf.engines.vllm.kernels.scores import is_right, takes, token_scores

_ROUNDS, _CALLS, _WARM_UPS = 5, 20, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, nargs="*", default=[0, 1, 5, 20, 100])
    parser.add_argument("--tiles", action="store_true", help="only batchinf's kernels, with several tiles")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    logits = torch.randn(args.requests, args.vocab_size, device="cuda").to(dtype)
    sampled = logits.argmax(dim=-1)
    if not is_right(compute_topk_scores, args.vocab_size, dtype, logits.device, ks=args.k):
        sys.exit("batchinf's kernels do not give what vLLM's kernels give")
    if args.tiles:
        compare_tiles(logits, sampled, args.k)
        return
    print("| per step | ms |\n| --- | ---: |")
    print(f"| argmax | {milliseconds(lambda: logits.argmax(dim=-1)):.2f} |")
    for k in args.k:
        print(f"| logprobs={k} | {milliseconds(functools.partial(compute_topk_scores, logits, k, sampled)):.2f} |")
        if takes(k, args.vocab_size):
            ms = milliseconds(functools.partial(token_scores, logits, sampled, k))
            print(f"| logprobs={k}, batchinf's kernels | {ms:.2f} |")
        if k:
            print(f"| of it torch.topk | {milliseconds(functools.partial(torch.topk, logits, k, dim=-1)):.2f} |")


def compare_tiles(logits: torch.Tensor, sampled: torch.Tensor, ks: list[int]) -> None:
    """Print milliseconds for each k and tile: elements of a row in one step, and warps."""
    print("| k | elements | warps | ms |\n| ---: | ---: | ---: | ---: |")
    for k, block, num_warps in itertools.product(ks, (1024, 2048, 4096, 8192), (4, 8, 16)):
        ms = milliseconds(functools.partial(token_scores, logits, sampled, k, (block, num_warps)))
        print(f"| {k} | {block} | {num_warps} | {ms:.3f} |", flush=True)


def milliseconds(call: Callable[[], object]) -> float:
    for _ in range(_WARM_UPS):
        call()
    rounds: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(_CALLS):
            call()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / _CALLS)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
