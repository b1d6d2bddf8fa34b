"""FlashAttention 3 over the prompts of a step in one layer: with the KV cache, and without it. Needs a GPU.

    python benchmarks/prompt_attention.py                          # microseconds by heads and length
    python benchmarks/prompt_attention.py --tokens 8192 --requests 256

A step of `--tokens` tokens runs as in a CUDA graph for `--requests` requests: requests without tokens fill it up, and
FlashAttention has the plan for the longest prompt that a step can have. `20-380` stands for prompts of mixed lengths.
With the cache, the time to write the keys and values is left out. In brackets: the largest difference from PyTorch's
attention in float32.
"""

import argparse
import itertools
import random
from collections.abc import Callable

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

from batchinf.engines.vllm.kernels.fresh_steps import fresh_attention, with_padding

# Heads, heads of keys, head size.
MODELS = {"0.6B": (16, 8, 128), "1B": (32, 8, 64)}
LENGTHS = {"16": (16, 16), "128": (128, 128), "20-380": (20, 380), "512": (512, 512), "2048": (2048, 2048)}
_BLOCK_SIZE, _CALLS, _REPEATS = 16, 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--requests", type=int, default=1024, help="of a CUDA graph")
    args = parser.parse_args()
    print("| heads of | prompts of | with the cache, µs | without it, µs |\n| --- | ---: | ---: | ---: |", flush=True)
    for (model, heads), (length, ends) in itertools.product(MODELS.items(), LENGTHS.items()):
        layer = Layer(heads, lengths_of(args.tokens, *ends), args.requests)
        cells = [f"{timed(run):.0f} ({layer.error(run):.4f})" for run in (layer.with_cache, layer.without_cache)]
        print(f"| {model} | {length} | {' | '.join(cells)} |", flush=True)


def lengths_of(num_tokens: int, shortest: int, longest: int) -> list[int]:
    """Lengths between these that have `num_tokens` together; the last one may be shorter."""
    chance, lengths = random.Random(1), [0]
    while (rest := num_tokens - sum(lengths)) > 0:
        lengths.append(min(rest, chance.randint(shortest, longest)))
    return lengths[1:]


class Layer:
    """One layer's queries, keys and values of prompts, and the same keys and values in a cache."""

    def __init__(
        self, heads: tuple[int, int, int], lengths: list[int], num_requests: int, device: str = "cuda"
    ) -> None:
        num_heads, num_key_heads, head_size = heads
        torch.manual_seed(1)
        self.num_tokens, self.scale = sum(lengths), head_size**-0.5
        mixed = torch.randn((self.num_tokens, num_heads + 2 * num_key_heads, head_size), device=device)
        self.query, self.key, self.value = mixed.bfloat16().split((num_heads, num_key_heads, num_key_heads), dim=1)
        self.out = torch.empty(self.query.shape, dtype=torch.bfloat16, device=device)
        self.lengths = lengths + [0] * (num_requests - len(lengths))
        self.starts = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        self.used = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        # A block of the cache for each started 16 tokens of a prompt, in order.
        counts = [-(-length // _BLOCK_SIZE) for length in self.lengths]
        firsts = [0, *itertools.accumulate(counts)]
        self.table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        places: list[int] = []
        for request, (first, count, length) in enumerate(zip(firsts[:-1], counts, self.lengths, strict=True)):
            self.table[request, :count] = torch.arange(first, first + count)
            places += range(first * _BLOCK_SIZE, first * _BLOCK_SIZE + length)
        self.table = self.table.to(device)
        cache = torch.zeros((firsts[-1] * _BLOCK_SIZE, num_key_heads, 2 * head_size), device=device).bfloat16()
        cache[torch.tensor(places, device=device)] = torch.cat((self.key, self.value), dim=-1)
        blocks = cache.view(firsts[-1], _BLOCK_SIZE, num_key_heads, 2 * head_size)
        blocks = blocks.transpose(1, 2).contiguous().transpose(1, 2)  # as vLLM lays it out
        self.cached_key, self.cached_value = blocks.split(head_size, dim=-1)
        self._plan: torch.Tensor | None = None

    def with_cache(self) -> None:
        if self._plan is None:
            self._plan = get_scheduler_metadata(
                batch_size=len(self.lengths), max_seqlen_q=self.num_tokens, max_seqlen_k=self.num_tokens,
                num_heads_q=self.query.shape[1], num_heads_kv=self.key.shape[1], headdim=self.query.shape[2],
                cache_seqlens=self.used, qkv_dtype=torch.bfloat16, cu_seqlens_q=self.starts, page_size=_BLOCK_SIZE,
                causal=True, window_size=(-1, -1), num_splits=1,
            )  # fmt: skip
        flash_attn_varlen_func(
            q=self.query, k=self.cached_key, v=self.cached_value, out=self.out, cu_seqlens_q=self.starts,
            seqused_k=self.used, max_seqlen_q=self.num_tokens, max_seqlen_k=self.num_tokens, softmax_scale=self.scale,
            causal=True, window_size=[-1, -1], block_table=self.table, scheduler_metadata=self._plan, fa_version=3,
            num_splits=1,
        )  # fmt: skip

    def without_cache(self, attend: Callable[..., object] = flash_attn_varlen_func) -> None:
        starts = with_padding(self.starts, self.num_tokens)
        tensors = {"q": self.query, "k": self.key, "v": self.value, "out": self.out}
        fresh_attention(attend, tensors, starts, longest=self.num_tokens, scale=self.scale, causal=True)

    def error(self, run: Callable[[], object]) -> float:
        """The largest difference of all results from float32."""
        run()
        group, most = self.query.shape[1] // self.key.shape[1], 0.0
        ends = itertools.accumulate(self.lengths)
        for end, length in zip(ends, self.lengths, strict=True):
            if length:
                query, key, value, found = (
                    each[end - length : end].float().repeat_interleave(times, dim=1).transpose(0, 1)
                    for each, times in ((self.query, 1), (self.key, group), (self.value, group), (self.out, 1))
                )
                exact = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, scale=self.scale
                )
                most = max(most, (found - exact).abs().max().item())
        return most


def timed(run: Callable[[], object]) -> float:
    """Microseconds of a call, within a CUDA graph of several: the best of a few."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    found: list[float] = []
    for _ in range(_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / _CALLS * 1000)
    return min(found)


if __name__ == "__main__":
    main()
