"""A step that only decodes, in which one request is much longer than the others. Needs a GPU.

    python benchmarks/long_requests.py llama-3.2-1b --num 1024 --context 512 --longest 16384,32768,65536 --out results

Times the whole step with batchinf's kernel, in one CUDA graph, and with vLLM's FlashAttention between the graphs of the
layers. `long_requests.py` of the package decides between the two; here its limit is set so that it always, or never,
leaves the graph. A step's time is that of `LLM.generate` for `--tokens` more tokens, divided by their number. All
prompts are in the prefix cache.
"""

import argparse
import os
import pathlib
import random
import statistics
import time
from typing import Any

from shapes import SHAPES, make_model
from vllm import LLM, SamplingParams

from batchinf.engines.vllm.kernels.attention import DecodingWorker
from batchinf.fleet.engine_defaults import graph_sizes

_FIRST_TOKENS = 16  # in the call that is subtracted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES), metavar="shape", help="of the model")
    parser.add_argument("--num", type=int, default=1024, help="requests")
    parser.add_argument("--context", type=int, default=512, help="tokens of the prompts but the first")
    parser.add_argument("--longest", default="16384,32768,65536", help="tokens of the first prompt")
    parser.add_argument("--tokens", type=int, default=96, help="that are timed")
    parser.add_argument("--repeat", type=int, default=3, help="the median is shown")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    args = parser.parse_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the function that is sent to the worker
    lengths = sorted(int(length) for length in args.longest.split(","))
    model = args.out / "models" / args.shape
    make_model(args.shape, model)
    engine = LLM(
        str(model), load_format="dummy", max_model_len=lengths[-1] + _FIRST_TOKENS + args.tokens,
        max_num_seqs=args.num, worker_cls=f"{DecodingWorker.__module__}.{DecodingWorker.__qualname__}",
        compilation_config={"cudagraph_capture_sizes": graph_sizes(args.num)},
    )  # fmt: skip
    chance = random.Random(1)
    top = SHAPES[args.shape]["vocab_size"] - 1
    first = chance.choices(range(top), k=lengths[-1])
    others = [chance.choices(range(top), k=args.context) for _ in range(args.num - 1)]
    print("| longest | part of all tokens | kernel, ms | FlashAttention, ms | ratio |", flush=True)
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for longest in lengths:
        prompts = [{"prompt_token_ids": ids} for ids in (first[:longest], *others)]
        generate(engine, prompts, 1)  # fills the cache
        spent = {leaves: statistics.median(times(engine, prompts, leaves, args)) for leaves in (False, True)}
        # In the middle of the timed steps.
        total = longest + (args.num - 1) * args.context + args.num * (_FIRST_TOKENS + args.tokens / 2)
        print(
            f"| {longest:,} | 1/{total / longest:.1f} | {spent[False] * 1000:.2f} | {spent[True] * 1000:.2f} | "
            f"{spent[False] / spent[True]:.3f} |", flush=True,
        )  # fmt: skip


def times(engine: Any, prompts: list[Any], leaves: bool, args: argparse.Namespace) -> list[float]:
    """Seconds of a step, once for each repetition. leaves: with FlashAttention, not in one graph."""
    engine.collective_rpc(set_limit, args=(2**40 if leaves else 0,))
    found = []
    for _ in range(args.repeat):
        short, long = (generate(engine, prompts, _FIRST_TOKENS + more) for more in (0, args.tokens))
        found.append((long - short) / args.tokens)
    (num_left,) = engine.collective_rpc(num_left_graph)
    assert num_left >= args.repeat * args.tokens if leaves else num_left == 0, num_left
    return found


def generate(engine: Any, prompts: list[Any], num_tokens: int) -> float:
    """Seconds of a call with so many output tokens of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def set_limit(worker: Any, parts: int) -> None:
    """In the engine core: leave the graph if the longest request has more than the `parts`-th part of all tokens."""
    from batchinf.engines.vllm.kernels import long_requests

    long_requests._PARTS_OF_LONGEST = parts
    choice: Any = getattr(worker, "worker", worker)._graph_choice
    if not hasattr(choice, "num_left"):
        look = choice.look

        def counting(scheduler_output: Any) -> None:
            look(scheduler_output)
            choice.num_left += choice.has_long_request

        choice.look = counting
    choice.num_left = 0


def num_left_graph(worker: Any) -> int:
    """In the engine core: how many steps have left the graph since the limit was set."""
    choice: Any = getattr(worker, "worker", worker)._graph_choice
    return int(choice.num_left)


if __name__ == "__main__":
    main()
