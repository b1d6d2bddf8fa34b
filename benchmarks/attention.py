"""The attention of decoding by itself: vLLM's FlashAttention and Triton kernels, and batchinf's. Needs a GPU.

    python benchmarks/attention.py                     # microseconds of one layer, by shape, batch and context
    python benchmarks/attention.py --tiles             # tiles of batchinf's kernel instead
    python benchmarks/attention.py --prompts 8         # a step that reads 8 prompts of 128 tokens besides

With `--prompts`, FlashAttention does all of the step, or the prompts alone beside our kernel. `--longest` gives one of
the requests that decode so many tokens, which a single program of our kernel reads for each head. Other contexts are
drawn between 0.75 and 1.25 of the stated length. `bytes` is the time in which the device's memory could give the keys
and values once, at `--bandwidth`. In brackets: the largest difference from FlashAttention's result. Batches of more
than four million tokens are left out.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

from batchinf.engines.vllm.kernels.attention import run_ours
from batchinf.engines.vllm.kernels.comparison import AttentionShape, example

# Heads, heads of keys, head size; and float8 or not.
MODELS = {
    "8B": AttentionShape(num_heads=32, num_key_heads=8, head_size=128, dtype=torch.bfloat16),
    "8B fp8": AttentionShape(num_heads=32, num_key_heads=8, head_size=128, dtype=torch.bfloat16, is_fp8=True),
    "1B": AttentionShape(num_heads=32, num_key_heads=8, head_size=64, dtype=torch.bfloat16),
    "0.6B": AttentionShape(num_heads=16, num_key_heads=8, head_size=128, dtype=torch.bfloat16),
}
_SPLITS = 32  # vLLM's limit for graphs
_PROMPT_TOKENS = 128
_MOST_TOKENS = 2048 * 2048
_TILES = (
    *((16, 1, 3), (16, 2, 3), (32, 1, 3), (32, 2, 3), (32, 4, 3), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4)),
    *((64, 8, 3), (128, 4, 2), (128, 8, 3)),
)


class Batch:
    """Requests that decode, and then requests that read a prompt, with their cache."""

    def __init__(self, model: str, num: int, context: int, num_prompts: int, longest: int = 0) -> None:
        chance = random.Random(1)
        self.num = num
        lengths = [chance.randint(max(1, context * 3 // 4), context * 5 // 4) for _ in range(num)]
        lengths += [_PROMPT_TOKENS] * num_prompts
        torch.manual_seed(1)
        self.given = example(lengths, MODELS[model], "cuda")
        if longest:
            self._lengthen(longest)
            lengths[0] = longest
        if num_prompts:
            query, shape = self.given["q"], (num + num_prompts * _PROMPT_TOKENS, *self.given["q"].shape[1:])
            counts = torch.tensor([0] + [1] * num + [_PROMPT_TOKENS] * num_prompts, device="cuda")
            self.given["q"] = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(query.dtype)
            self.given["out"] = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            self.given |= {"cu_seqlens_q": counts.cumsum(0).to(torch.int32), "max_seqlen_q": _PROMPT_TOKENS}
        keys = self.given["k"]
        self.num_bytes = sum(lengths) * keys.shape[2] * 2 * keys.shape[3] * keys.element_size()

    def _lengthen(self, longest: int) -> None:
        """Give the first request so many tokens, from blocks that other requests have too."""
        given, keys = self.given, self.given["k"]
        table = torch.zeros((len(given["block_table"]), -(-longest // keys.shape[1])), dtype=torch.int32, device="cuda")
        table[:, : given["block_table"].shape[1]] = given["block_table"]
        table[0] = torch.randint(len(keys), table[0].shape, device="cuda")
        given["seqused_k"][0] = longest
        given |= {"block_table": table, "max_seqlen_k": longest}

    def flash(self, out: torch.Tensor) -> Callable[[], Any]:
        """As vLLM does."""
        return planned({**self.given, "out": out})

    def split(self, out: torch.Tensor) -> Callable[[], Any]:
        given, num = {**self.given, "out": out}, self.num
        by_request = ("seqused_k", "block_table", "q_descale", "k_descale", "v_descale")
        by_token = ("q", "out")
        first = {name: given[name][:num] for name in (*by_request, *by_token)}
        rest = {name: given[name][num:] for name in (*by_request, *by_token)}
        run_rest = planned({**given, **rest, "cu_seqlens_q": given["cu_seqlens_q"][num:] - num})

        def run() -> None:
            run_ours({**given, **first})
            run_rest()

        return run

    def triton(self, out: torch.Tensor) -> Callable[[], Any]:
        given, is_fp8 = self.given, self.given["k"].element_size() == 1
        names = ("q_descale", "k_descale", "v_descale")
        scales = {name: given[name].flatten()[0] if is_fp8 else None for name in names}
        changed = {**given, **scales, "out": out, "window_size": (-1, -1), "softcap": 0}
        del changed["fa_version"]
        mode = KVQuantMode.FP8_PER_TENSOR if is_fp8 else KVQuantMode.NONE
        return lambda: unified_attention(**changed, kv_quant_mode=mode)

    def own(self, out: torch.Tensor, **shape: Any) -> Callable[[], Any]:
        given = {**self.given, "out": out}
        return lambda: run_ours(given, **shape)


def planned(given: dict[str, Any]) -> Callable[[], Any]:
    """FlashAttention, with the plan that vLLM makes once for all layers. Splits are limited in CUDA graphs only."""
    num_splits = _SPLITS if given["max_seqlen_q"] == 1 else 0
    plan = get_scheduler_metadata(
        batch_size=len(given["seqused_k"]), max_seqlen_q=given["max_seqlen_q"], max_seqlen_k=given["max_seqlen_k"],
        num_heads_q=given["q"].shape[1], num_heads_kv=given["k"].shape[2], headdim=given["q"].shape[2],
        cache_seqlens=given["seqused_k"], qkv_dtype=given["q"].dtype, cu_seqlens_q=given["cu_seqlens_q"],
        page_size=given["k"].shape[1], causal=True, num_splits=num_splits,
    )  # fmt: skip
    return lambda: flash_attn_varlen_func(**given, scheduler_metadata=plan, num_splits=num_splits)


def timed(run: Callable[[], Any], num: int = 20) -> float:
    """Median microseconds of a call on the device. A call may start several kernels."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(float(begin.elapsed_time(end)) for begin, end in events)


def by_kernel(model: str, num: int, context: int, num_prompts: int, longest: int, bandwidth: float) -> str:
    batch = Batch(model, num, context, num_prompts, longest)
    cells = [f"| {model} | {num:,} | {context:,} | {batch.num_bytes / bandwidth / 1e6:.0f}"]
    expected = None
    for kind in ("flash", "split") if num_prompts else ("flash", "triton", "own"):
        out = torch.empty_like(batch.given["out"])
        try:
            run = getattr(batch, kind)(out)
            took = timed(run)
            if kind == "flash":
                expected = out.float()
            far = "" if expected is None else f" ({(out.float() - expected).abs().max().item():.0e})"
            cells.append(f"{took:.0f}{far}")
        except Exception as error:
            cells.append(f"{type(error).__name__}: {str(error)[:80]}")
    return " | ".join(cells) + " |"


def by_tile(model: str, num: int, context: int) -> str:
    batch = Batch(model, num, context, 0)
    out, expected = batch.given["out"], torch.empty_like(batch.given["out"])
    flash = timed(batch.flash(expected))
    found = []
    for shape in _TILES:
        try:
            found.append((timed(batch.own(out, shape=shape), 5), shape))
        except Exception as error:
            print(shape, type(error).__name__, str(error)[:80])
    fastest = ", ".join(f"{shape} {took:.0f}" for took, shape in sorted(found)[:8])
    return f"{model}, {num:,} x {context:,}: flash {flash:.0f}; {fastest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--requests", default="512,1024,2048")
    parser.add_argument("--contexts", default="128,512,1024,2048,4096")
    parser.add_argument("--tiles", action="store_true", help="tiles of batchinf's kernel")
    parser.add_argument("--prompts", type=int, default=0, help="prompts of 128 tokens that the step reads besides")
    parser.add_argument("--longest", type=int, default=0, help="tokens of one of the requests that decode")
    parser.add_argument("--bandwidth", type=float, default=4.8, help="of the device's memory, TB/s")
    args = parser.parse_args()
    numbers, contexts = ([int(each) for each in text.split(",")] for text in (args.requests, args.contexts))
    if not args.tiles:
        kinds = ["FlashAttention 3, µs", *(["split, µs"] if args.prompts else ["Triton, µs", "batchinf's, µs"])]
        print(" | ".join(["| model | requests | context | bytes, µs", *kinds]) + " |")
        print("| --- |" + " ---: |" * (3 + len(kinds)))
    for model in args.models.split(","):
        for num, context in itertools.product(numbers, contexts):
            if num * context > _MOST_TOKENS:
                continue
            if args.tiles:
                print(by_tile(model, num, context), flush=True)
            else:
                print(by_kernel(model, num, context, args.prompts, args.longest, args.bandwidth), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
