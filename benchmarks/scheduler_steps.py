"""What a step costs in the scheduler of vLLM's engine core: vLLM's own, and ours with and without its short loops.

    python benchmarks/scheduler_steps.py --requests 2048 --logprobs 20
    python benchmarks/scheduler_steps.py --score        # prompts of 128 tokens that are only read, 16,384 tokens a step
    python benchmarks/scheduler_steps.py --structured --requests 1024   # with the JSON schema of the workload `json`

Prints processor milliseconds a step in the schedulers of the installed vLLM, with asynchronous scheduling and without a
model: the tokens and logprobs of a step are made up. The batch is full, requests end all the time and others wait, as
in a job. `admit` makes the requests and adds them, with the hashes of their blocks. `mask` fills the mask of
the allowed tokens, of a made-up vocabulary of 128,256 words. Needs no device.
"""

import argparse
import gc
import json
import math
import random
import string
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from batchinf.engines.vllm.scheduling.scheduler import scheduler

MODEL = Path(__file__).parent.parent / "sample_data" / "tiny-llama"
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 128


SIZES: dict[str, Any] = {"block_size": _BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)


def groups_of(kind: str, max_model_len: int) -> list[KVCacheSpec]:
    """The groups of cache of a kind of model: `full`, `windows` (as gpt-oss), or `states` (as Qwen3.5)."""
    window = SlidingWindowSpec(sliding_window=128, **SIZES)
    state = MambaSpec(block_size=max_model_len, shapes=((1,),), dtypes=(torch.float32,))
    return {"full": [FULL], "windows": [FULL, window], "states": [FULL, state, state, state]}[kind]


def arguments(
    num_blocks: int,
    max_num_seqs: int,
    is_async: bool,
    is_caching: bool,
    max_model_len: int = 1024,
    *,
    groups: Sequence[KVCacheSpec] = (FULL,),
) -> dict[str, Any]:
    """Arguments of vLLM's schedulers, for a model with these groups of cache."""
    init_none_hash(sha256)
    engine = EngineArgs(
        model=str(MODEL),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(64, 8 * max_num_seqs),
        enable_prefix_caching=is_caching,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    config = engine.create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = num_blocks
    return {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(
            num_blocks, [], [KVCacheGroupSpec([str(at)], spec) for at, spec in enumerate(groups)]
        ),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": math.lcm(*(spec.block_size for spec in groups)),
        "hash_block_size": _BLOCK_SIZE,
        "log_stats": True,
    }


def request(name: str, prompt: list[int], is_caching: bool, **params: Any) -> Request:
    hasher = get_request_block_hasher(_BLOCK_SIZE, sha256) if is_caching else None
    final = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
    sampling = SamplingParams(**{**final, **params})
    return Request(name, prompt, sampling, None, block_hasher=hasher, arrival_time=0.0)


class Load:
    """A full batch of requests that end at different steps, of which some always wait.

    k: logprobs of output tokens. reads: the prompts alone are read, with a logprob of each token. grammar: makes the
    state of a grammar for each request.
    """

    def __init__(
        self,
        made: Any,
        num: int,
        k: int | None,
        *,
        reads: bool = False,
        grammar: Callable[[], Any] | None = None,
        prompt_tokens: int = _PROMPT_TOKENS,
    ) -> None:
        self.made, self.num, self.k, self.reads, self.grammar = made, num, k, reads, grammar
        self.prompt_tokens = prompt_tokens
        self.num_added = 0
        self.random = np.random.default_rng(1)
        self.flying: deque[tuple[Any, list[str]]] = deque()
        self.tokens: dict[str, int] = {}  # the next token of each request, if it has a grammar
        self.spent = {"admit": 0.0, "schedule": 0.0, "update": 0.0, "mask": 0.0}
        rows = num + 1
        if k is not None:
            shape = rows, k + 1
            self.arrays = np.ones(shape, np.int64), np.ones(shape, np.float32), np.ones(rows, np.int64)

    def step(self) -> None:
        while len(self.made.requests) < self.num * 1.2:
            # The first requests end one after the other, the others after 128 tokens.
            most = 1 + self.num_added % 128 if self.num_added < self.num else 128
            prompt = self.random.integers(0, 1000, self.prompt_tokens).tolist()
            caches = self.made.kv_cache_manager.enable_caching
            wanted = {"max_tokens": 1, "prompt_logprobs": 1} if self.reads else {"max_tokens": most}
            began = time.process_time()
            name = f"{self.num_added}-0-0123abcd"
            new = request(name, prompt, caches, logprobs=self.k, **wanted)
            if self.grammar is not None:
                structure = StructuredOutputsParams(regex="unused")
                new.structured_output_request = StructuredOutputRequest(structure, self.grammar())
            self.made.add_request(new)
            self.spent["admit"] += time.process_time() - began
            self.num_added += 1
        began = time.process_time()
        scheduled = self.made.schedule()
        self.spent["schedule"] += time.process_time() - began
        ready = [name for name in scheduled.num_scheduled_tokens if not self.made.requests[name].is_prefill_chunk]
        self.flying.append((scheduled, ready))
        if len(self.flying) == 2:
            self.update()
        if self.grammar is not None:
            self.mask(scheduled)

    def mask(self, scheduled: Any) -> None:
        """Fill the mask of a step, and choose one of the allowed tokens for each request."""
        began = time.process_time()
        given = self.made.get_grammar_bitmask(scheduled)
        self.spent["mask"] += time.process_time() - began
        if given is not None:
            for name, row in zip(given.structured_output_request_ids, given.grammar_bitmask, strict=True):
                word = self.random.choice(np.flatnonzero(row))
                bits = np.flatnonzero(np.unpackbits(row[word : word + 1].view(np.uint8), bitorder="little"))
                self.tokens[name] = int(32 * word + bits[0])

    def update(self) -> None:
        scheduled, ready = self.flying.popleft()
        is_ready = set(ready)
        names = list(scheduled.num_scheduled_tokens)
        given = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[self.tokens.get(name, 5)] if name in is_ready else [] for name in names],
            logprobs=None if self.k is None else LogprobsLists(*self.arrays),
        )
        began = time.process_time()
        self.made.update_from_output(scheduled, given)
        self.spent["update"] += time.process_time() - began


def json_grammar(num: int, manager: StructuredOutputManager) -> Callable[[], Any]:
    """A function that makes states of a grammar, and room for the masks of `num` requests in `manager`."""
    from workloads import SCHEMA

    chance = random.Random(1)
    words = {chr(code) for code in range(32, 127)}
    while len(words) < 128_000:
        word = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9)))
        words.add(chance.choice(["", " ", " ", '"', ","]) + word)
    vocabulary = [*sorted(words), *(f"<{number}>" for number in range(256))]
    stop = len(vocabulary) - 1
    known = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[stop])
    compiled = xgrammar.GrammarCompiler(known).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    manager._grammar_bitmask = xgrammar.allocate_token_bitmask(num, len(vocabulary))
    return lambda: XgrammarGrammar(len(vocabulary), xgrammar.GrammarMatcher(compiled), compiled)


def made_by(title: str, made_of: dict[str, Any]) -> Any:
    """A scheduler, with the runner that a GPU has."""
    made: Any = AsyncScheduler(**made_of) if title == "vLLM's own" else scheduler(**made_of)
    made.use_v2_model_runner = True
    if title == "outputs held back":
        made._changes = None
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--logprobs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompt-tokens", type=int, default=_PROMPT_TOKENS)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--groups", choices=("full", "windows", "states"), default="full", help="of the KV cache")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--score", action="store_true", help="prompts are only read, with logprobs of their tokens")
    kind.add_argument("--structured", action="store_true", help="outputs follow a JSON schema")
    args = parser.parse_args()
    num, is_caching = args.requests, not args.no_prefix_caching
    made_of = arguments(num * 40, num, True, is_caching, groups=groups_of(args.groups, 1024))
    grammar = json_grammar(num, made_of["structured_output_manager"]) if args.structured else None
    columns = ["admit", "schedule", "update", *(["mask"] if grammar else []), "all"]
    lines = [" | ".join(["| of a step", *(f"{column}, ms" for column in columns)]) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for k in (None,) if args.score else (None, args.logprobs):
        for title in ("vLLM's own", "outputs held back", "outputs held back, short loops"):
            gc.collect()
            gc.freeze()  # as vLLM does when an engine has started
            made = made_by(title, made_of)
            load = Load(made, num, k, reads=args.score, grammar=grammar, prompt_tokens=args.prompt_tokens)
            for _ in range(150):  # until the first requests are gone
                load.step()
            load.spent = dict.fromkeys(load.spent, 0.0)
            for _ in range(args.steps):
                load.step()
            spent = [load.spent[column] / args.steps * 1e3 for column in columns[:-1]]
            what = "scoring" if args.score else "no logprobs" if k is None else f"top {k}"
            name = f"{title}, {what}" + (", structured" if grammar else "")
            lines.append(" | ".join([f"| {name}", *(f"{each:.2f}" for each in (*spent, sum(spent)))]) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
