"""Whether the comparisons at an engine's start refuse wrong variants of each piece that replaces vLLM's code.

    python benchmarks/mutants.py                        # on a GPU by Triton and FlashAttention 3, else by imitations
    python benchmarks/mutants.py --pieces attention     # some pieces

A variant, a mutant, is the source of a module with one expression replaced. Each piece must also be accepted unchanged.
The exit code is 1 if a mutant is accepted or a piece is not. A mutant that cannot be compiled is no mutant: it is named
too. `ms` is the time of the comparison of all cases of a piece, for mutants with the time to compile the kernels.

A process runs the mutants of a piece, as one of them may leave the device unusable; another process then runs the rest.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_PACKAGE = "batchinf.engines.vllm"
_TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
# What a comparison prints when a mutant has not run at all.
_NOT_RUN = ("CompilationError", "CompileTime", "PTXAS", "OutOfResources", "OutOfMemory", "CUDA error", "NameError")
_UNCHANGED = "unchanged"
_PIECE_S = 550


@dataclass(frozen=True)
class Mutant:
    """A wrong variant of a module: `old`, which occurs once in its source, is replaced by `new`."""

    name: str
    old: str
    new: str


ATTENTION = (
    Mutant("ignores tokens after 512", "tl.load(lengths + request)", "tl.minimum(tl.load(lengths + request), 512)"),
    Mutant("has block size 16 fixed", "BLOCK_SIZE=keys.shape[1],", "BLOCK_SIZE=16,"),
    Mutant("is wrong after the fifth request", "is_token = at < length",
           "is_token = (at < length) & ((request < 5) | (at > 0))"),
    Mutant("drops the scale of queries", "scale * tl.load(query_scale) * tl.load(key_scale)",
           "scale * tl.load(key_scale)"),
    Mutant("drops the scale of keys", "scale * tl.load(query_scale) * tl.load(key_scale)",
           "scale * tl.load(query_scale)"),
    Mutant("drops the scale of values", "acc = acc * tl.load(value_scale)", "acc = acc * 1.0"),
    Mutant("reads one token too many", "is_token = at < length", "is_token = at <= length"),
    Mutant("drops the newest token", "is_token = at < length", "is_token = at < length - 1"),
    Mutant("drops the last token of a tile", "is_token = at < length",
           "is_token = (at < length) & (tokens < TILE - 1)"),
    Mutant("reads the first head of keys", "+ head * head_stride", "+ 0 * head_stride"),
    Mutant("reads the blocks of the first request", "block_table + request * table_stride", "block_table"),
    Mutant("has a softmax of base 2", 'given["softmax_scale"] * _LOG2_E', 'given["softmax_scale"]'),
    Mutant("keeps the values of a lower maximum", "acc = acc * shrunk[:, None] +", "acc = acc +"),
    Mutant("keeps the weights of a lower maximum", "total = total * shrunk +", "total = total +"),
    Mutant("gives tokens behind the request a score", 's, float("-inf"))', "s, 0.0)"),
    Mutant("divides by zero without tokens", "tl.where(total == 0.0, 1.0, total)[:, None]", "total[:, None]"),
    Mutant("drops the last head of a group", "is_row = (rows < GROUP)[:, None]",
           "is_row = (rows < GROUP - 1)[:, None]"),
)  # fmt: skip

_REPLACED = "dataclasses.replace(common, max_query_len=most, max_seq_len=longest)"
WHOLE_STEPS = (
    Mutant("has the plan of the step's own prompts", "max_query_len=most, max", "max"),
    Mutant("has the plan of the step's own contexts", "max_query_len=most, max_seq_len=longest", "max_query_len=most"),
    Mutant("swaps both lengths", "max_query_len=most, max_seq_len=longest", "max_query_len=longest, max_seq_len=most"),
    Mutant("takes the longest context for a step's tokens", "most = config.scheduler_config.max_num_batched_tokens",
           "most = longest"),
    Mutant("takes a step's tokens for the longest context", "longest = config.model_config.max_model_len",
           "longest = config.scheduler_config.max_num_batched_tokens"),
    Mutant("cuts a copy of the lengths", "common.seq_lens.clamp_(max=longest)", "common.seq_lens.clamp(max=longest)"),
    Mutant("cuts the longest context by a token", "clamp_(max=longest)", "clamp_(max=longest - 1)"),
    Mutant("lengthens all contexts", "clamp_(max=longest)", "clamp_(min=longest)"),
    Mutant("gives requests the blocks of others", _REPLACED,
           _REPLACED[:-1] + ", block_table_tensor=common.block_table_tensor.roll(1, 0))"),
    Mutant("gives requests the lengths of others", _REPLACED, _REPLACED[:-1] + ", seq_lens=common.seq_lens.flip(0))"),
    Mutant("changes the step for other layers", f"common = {_REPLACED}",
           "common.max_query_len, common.max_seq_len = most, longest"),
    Mutant("keeps the plan in whole graphs", "if has_whole_steps(config.comp", "if not has_whole_steps(config.comp"),
)  # fmt: skip

SCORES = (
    Mutant("ignores the end of the vocabulary", "range(0, vocab_size, BLOCK)", "range(0, vocab_size - BLOCK, BLOCK)"),
    Mutant("reads behind the row", "at = start + groups\n        x = tl.load(row + at, mask=at < vocab_size,",
           "at = start + groups\n        x = tl.load(row + at, mask=at < vocab_size + 64,"),
    Mutant("counts only likelier tokens", "x >= own", "x > own"),
    Mutant("keeps the sum of a lower maximum", "total = total * tl.exp2((top - higher) * LOG2_E)", "total = total"),
    Mutant("has a softmax of base 2", "tl.exp2((x - higher[:, None]) * LOG2_E)", "tl.exp2(x - higher[:, None])"),
    Mutant("finds the likeliest in another step", "highest > top", "highest < top"),
    Mutant("is wrong after the fiftieth row", "token_id = tl.load(token_ids + row)",
           "token_id = tl.load(token_ids + tl.minimum(row, 50))"),
    Mutant("gives the likeliest its logit", "WIDTH + 1, -log_total", "WIDTH + 1, most - log_total"),
    Mutant("takes rows for contiguous", "row=logits + row * stride,\n        own=own,\n        vocab_size=vocab_size,\n"
           "        maxima=ranks", "row=logits + row * vocab_size,\n        own=own,\n        vocab_size=vocab_size,\n"
           "        maxima=ranks"),
    Mutant("searches the least segments", "maxima.topk(k, dim=-1, sorted=False)",
           "maxima.topk(k, dim=-1, largest=False, sorted=False)"),
    Mutant("loses the last segment", "num_segments = -(-vocab_size // _SEGMENT)",
           "num_segments = vocab_size // _SEGMENT"),
    Mutant("takes the last token twice", ".masked_fill_(ids >= vocab_size, -torch.inf)", ""),
    Mutant("subtracts in the logits' own type", "logits.gather(1, found_ids).float() - log_sums",
           "(logits.gather(1, found_ids) - log_sums.to(logits.dtype)).float()"),
    Mutant("reads the logits as 16-bit numbers", "own = tl.load(logits + row * stride + token_id).to(tl.float32)",
           "own = tl.load(logits + row * stride + token_id).to(tl.float16).to(tl.float32)"),
    Mutant("stores logprobs in the logits' own type", "logprobs = torch.empty((num_rows, k + 1), dtype=torch.float32",
           "logprobs = torch.empty((num_rows, k + 1), dtype=logits.dtype"),
)  # fmt: skip

JOINED = (
    Mutant("shifts the prompts by one", "outputs[place].new_prompt_logprobs_tensors = LogprobsTensors(*each)",
           "outputs[place - 1].new_prompt_logprobs_tensors = LogprobsTensors(*each)"),
    Mutant("reverses the lengths", "scores.cu_num_generated_tokens[1::2]",
           "scores.cu_num_generated_tokens[1::2][::-1]"),
    Mutant("swaps places and lengths", "((place, len(part.logprobs)) for", "((len(part.logprobs), place) for"),
    Mutant("drops the last row", "(torch.cat(each) for each", "(torch.cat(each)[:-1] for each"),
    Mutant("sends halves", "(torch.cat(each) for each", "(torch.cat(each).half() for each"),
    Mutant("swaps ids and ranks", "(part[:3] for _, part in found)", "(part[2::-1] for _, part in found)"),
    Mutant("joins results of several types", "*(tensor.dtype for tensor in part[:3])", "0"),
    Mutant("keeps the places", "outputs[place].new_prompt_logprobs_tensors = LogprobsTensors(*each)",
           "outputs[place].new_prompt_logprobs_tensors = LogprobsTensors(*each, list(places))"),
    Mutant("reverses the vectors", "torch.stack(vectors), places", "torch.stack(vectors[::-1]), places"),
    Mutant("gives the first prompt all vectors", "outputs[place].pooling_output = vector",
           "output.pooling_output = vector"),
    Mutant("leaves places as tokens", "places, output.new_token_ids = output.new_token_ids, []",
           "places = output.new_token_ids"),
    Mutant("joins vectors of several types", "{(vector.shape, vector.dtype) for", "{vector.shape for"),
)  # fmt: skip

# Each piece: the module with its comparison, and the mutants.
PIECES: dict[str, tuple[str, tuple[Mutant, ...]]] = {
    "attention": ("kernels.attention", ATTENTION),
    "whole steps": ("kernels.whole_steps", WHOLE_STEPS),
    "logprobs": ("kernels.scores", SCORES),
    "joined results": ("scheduling.joined", JOINED),
}


# -- the cases of each piece -------------------------------------------------------------------------------------------


@functools.cache
def has_gpu() -> bool:
    return importlib.import_module("vllm.platforms").current_platform.is_cuda()  # type: ignore[no-any-return]


def shape(heads: tuple[int, int, int], **more: Any) -> Any:
    """A `AttentionShape` of the pieces. heads: their number, that of keys, and their size."""
    num_heads, num_key_heads, head_size = heads
    more = {"dtype": torch.bfloat16, "scales": (0.5, 0.75, 2.0), **more}
    kind = importlib.import_module("batchinf.engines.vllm.kernels.comparison").AttentionShape
    return kind(num_heads=num_heads, num_key_heads=num_key_heads, head_size=head_size, **more)


def decoding_cases(is_mutant: bool) -> list[tuple[Any, int]]:
    """Shapes with their longest contexts."""
    if not has_gpu():
        cases = [(shape((4, 2, 64), block_size=32, is_fp8=is_fp8), 1100) for is_fp8 in (False, True)]
        return cases if is_mutant else [*cases, (shape((3, 1, 64), dtype=torch.float16), 700)]
    cases = [
        (shape((32, 8, 128), block_size=32), 131072),
        (shape((32, 8, 128), block_size=64, is_fp8=True, scales=(0.02, 0.05, 0.05)), 32768),
    ]
    more = [
        (shape((32, 8, 128)), 40960),
        (shape((32, 8, 64), dtype=torch.float16), 131072),
        (shape((28, 4, 128), block_size=128), 32768),
        (shape((16, 16, 128)), 8192),
        (shape((8, 1, 128), is_fp8=True), 131072),
        (shape((32, 8, 64), block_size=32, is_fp8=True), 40960),  # of float8, FlashAttention makes bfloat16 alone
    ]
    return cases if is_mutant else cases + more


def prompt_cases(is_mutant: bool) -> list[tuple[int, int, int]]:
    """Heads, heads of keys, head size."""
    if not has_gpu():
        return [(4, 2, 16)]
    return [(16, 8, 128)] if is_mutant else [(16, 8, 128), (32, 8, 64), (28, 4, 128), (12, 12, 64)]


def attention(own: Any, is_mutant: bool) -> bool:
    cases = decoding_cases(is_mutant)
    return all(own.is_right(flash_attention(), case, longest, device()) for case, longest in cases)


def whole_steps(own: Any, is_mutant: bool) -> bool:
    modes = importlib.import_module("vllm.config").CUDAGraphMode
    longest, most = (40960, 16384) if has_gpu() else (700, 900)
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=modes.FULL),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=most),
        model_config=types.SimpleNamespace(max_model_len=longest, dtype=torch.bfloat16),
        cache_config=types.SimpleNamespace(block_size=16),
    )
    cases = [
        shape(heads, is_fp8=is_fp8)
        for heads, is_fp8 in itertools.product(prompt_cases(is_mutant), (False, *([True] if has_gpu() else [])))
    ]
    return all(own.is_right(flash_attention(), plan(), config, case, device=device()) for case in cases)


def logprobs(own: Any, is_mutant: bool) -> bool:
    cases: list[tuple[int, torch.dtype, list[int]]] = [(5003, torch.bfloat16, [0, 1, 3])]
    if has_gpu():
        cases = [(50257, torch.bfloat16, [0, 1, 5])]
        more = [(128256, torch.bfloat16, [0, 1, 20]), (151936, torch.float16, [1, 100])]
        cases += [] if is_mutant else more
    return all(own.is_right(topk_scores(), size, dtype, device(), ks=ks) for size, dtype, ks in cases)


def joined_results(own: Any, is_mutant: bool) -> bool:
    return all(own.is_right(*case) for case in [(131072, 2), *([] if is_mutant else [(700, 21), (1, 1)])])


CHECKS: dict[str, Callable[[Any, bool], bool]] = {
    "attention": attention, "whole steps": whole_steps, "logprobs": logprobs, "joined results": joined_results,
}  # fmt: skip


# -- what they are compared with ---------------------------------------------------------------------------------------


def device() -> Any:
    return torch.device("cuda" if has_gpu() else "cpu")


def flash_attention() -> Callable[..., Any]:
    if not has_gpu():
        return pytorch_attention
    return importlib.import_module("vllm.v1.attention.backends.fa_utils").flash_attn_varlen_func  # type: ignore[no-any-return]


def plan() -> Any:
    if not has_gpu():
        return None
    return importlib.import_module("vllm.v1.attention.backends.fa_utils").get_scheduler_metadata


def pytorch_attention(**given: Any) -> None:
    """In place of FlashAttention over a paged cache. Like it, computes only `max_seqlen_q` tokens of a request."""
    query, keys, values, out, table = (given[name] for name in ("q", "k", "v", "out", "block_table"))
    group = query.shape[1] // keys.shape[-2]
    ends = given["cu_seqlens_q"].tolist()
    is_fp8 = query.element_size() == 1
    scales = [float(given[name].flatten()[0]) if is_fp8 else 1.0 for name in ("q_descale", "k_descale", "v_descale")]
    for request, (start, end) in enumerate(itertools.pairwise(ends)):
        end = min(end, start + given["max_seqlen_q"])
        if end <= start:
            continue
        at = torch.arange(int(given["seqused_k"][request]))
        blocks = table[request][at // keys.shape[1]].long()
        own = keys[blocks, at % keys.shape[1]], values[blocks, at % keys.shape[1]]
        num_keys, num = len(own[0]), ends[request + 1] - start
        if not num_keys:
            continue
        q, k, v = (
            (each.float() * scale).repeat_interleave(times, dim=1).transpose(0, 1)
            for each, scale, times in zip((query[start:end], *own), scales, (1, group, group), strict=True)
        )
        place = num_keys - num + torch.arange(end - start)[:, None]
        sees = torch.arange(num_keys)[None] <= (place if given["causal"] else num_keys)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=sees, scale=given["softmax_scale"]
        )  # fmt: skip
        out[start:end] = mixed.transpose(0, 1).to(out.dtype)


def topk_scores() -> Callable[..., Any]:
    if has_gpu():
        return importlib.import_module("vllm.v1.worker.gpu.sample.logprob").compute_topk_scores  # type: ignore[no-any-return]
    return pytorch_scores


def pytorch_scores(logits: Any, num_logprobs: int, token_ids: Any) -> Any:
    """In place of vLLM's `compute_topk_scores`. Of equal logits the first ones are taken, as on a GPU."""
    likeliest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_logprobs]
    ids = torch.cat((token_ids[:, None], likeliest), dim=1)
    ranks = (logits >= logits.gather(1, token_ids[:, None])).sum(-1)
    logprobs = logits.float().log_softmax(-1).gather(1, ids)
    return types.SimpleNamespace(logprob_token_ids=ids, logprobs=logprobs, selected_token_ranks=ranks)


# -- running them ------------------------------------------------------------------------------------------------------

_numbers = itertools.count()


def load(name: str, mutant: Mutant | None = None, folder: str = "") -> Any:
    """A copy of a module of the adapter, or a mutant of it. Triton reads its source from a file in `folder`."""
    source = inspect.getsource(importlib.import_module(f"{_PACKAGE}.{name}"))
    if mutant is not None:
        if source.count(mutant.old) != 1:
            raise ValueError(
                f"{name} has {source.count(mutant.old)} times the text that a mutant replaces: {mutant.old}"
            )
        source = source.replace(mutant.old, mutant.new)
    file = pathlib.Path(folder) / f"mutant_{next(_numbers)}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        imitate(module)
    return module


def imitations() -> contextlib.AbstractContextManager[Any]:
    """Lets PyTorch answer as on a GPU where none is: `topk` takes the first of equal ones."""
    if has_gpu():
        return contextlib.nullcontext()
    return unittest.mock.patch.object(torch.Tensor, "topk", first_of_equal)


def first_of_equal(values: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    found = torch.sort(values, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((found.values[..., :k], found.indices[..., :k]))


def imitate(module: Any) -> None:
    """Let PyTorch run a module's kernels, which is slow: with fewer short requests."""
    if hasattr(module, "_CHECKED_TIMES"):
        module._CHECKED_TIMES = 4
    if not hasattr(module, "tl"):
        return
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    triton = importlib.import_module("triton_on_cpu")
    torch.set_num_threads(1)  # the tensors of a program are small
    module.tl, module.HAS_TRITON = triton.language, True
    for kernel in ("decode_kernel", "score_kernel", "maxima_kernel"):
        if hasattr(module, kernel):
            setattr(module, kernel, triton.Launcher(getattr(module, kernel)))


def run(piece: str, mutant: Mutant | None, folder: str) -> dict[str, Any]:
    """Compares a piece. Returns whether it is accepted, what the comparison printed, and its milliseconds."""
    printed = io.StringIO()
    torch.manual_seed(1)
    try:
        own = load(PIECES[piece][0], mutant, folder)
        began = time.monotonic()
        with contextlib.redirect_stdout(printed), imitations():
            is_accepted = CHECKS[piece](own, mutant is not None)
            if has_gpu():
                torch.cuda.synchronize()
            took = time.monotonic() - began
            if mutant is None and is_accepted and has_gpu():  # once more, without the time to compile
                began = time.monotonic()
                is_accepted = CHECKS[piece](own, False)
                torch.cuda.synchronize()
                took = time.monotonic() - began
    except Exception as error:
        return {"is_accepted": None, "printed": f"{type(error).__name__}: {error}", "ms": 0.0}
    return {"is_accepted": is_accepted, "printed": printed.getvalue().strip(), "ms": 1e3 * took}


def verdict(found: dict[str, Any], is_mutant: bool) -> tuple[str, bool]:
    """In words, and whether it is what it must be."""
    printed = " ".join(found["printed"].split())
    printed = printed[printed.rfind(" ", 0, printed.find("Error: ")) + 1 :][:120]  # the error alone
    if found["is_accepted"]:
        return ("ACCEPTED", False) if is_mutant else ("accepted", True)
    if found["is_accepted"] is None or any(word in printed for word in _NOT_RUN):
        return f"does not run: {printed}", False
    return f"refused: {printed}", is_mutant


def run_here(piece: str, first: int) -> None:
    """Prints a line of JSON for each of a piece's variants from `first` on; the first is the piece unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in list(enumerate((None, *PIECES[piece][1])))[first:]:
            found = run(piece, mutant, folder)
            print("found " + json.dumps({"number": number, **found}), flush=True)
            if "CUDA error" in found["printed"] or "illegal" in found["printed"]:
                return  # the device is unusable for this process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_here(args.run[0], int(args.run[1]))
        return 0
    print("| piece | variant | outcome | ms |\n| --- | --- | --- | ---: |", flush=True)
    num_wrong = 0
    for piece in args.pieces.split(","):
        names, number = [_UNCHANGED, *(mutant.name for mutant in PIECES[piece][1])], 0
        while number < len(names):
            before = number
            for found in in_process(piece, number):
                text, is_right = verdict(found, found["number"] > 0)
                num_wrong += not is_right
                print(
                    f"| {piece} | {names[found['number']]} | {text.replace('|', '/')} | {found['ms']:.0f} |", flush=True
                )
                number = found["number"] + 1
            if number == before:
                num_wrong += 1
                print(f"| {piece} | {names[number]} | its process ended | |", flush=True)
                number += 1
    print(f"\n{num_wrong} of these are not as they must be" if num_wrong else "\nAll are as they must be.", flush=True)
    return int(num_wrong > 0)


def in_process(piece: str, first: int) -> Iterator[dict[str, Any]]:
    """What a process of its own finds for a piece's variants from `first` on, until it ends or its time is over."""
    command = [sys.executable, __file__, "--run", piece, str(first)]
    with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as child:  # fmt: skip
        timer = threading.Timer(_PIECE_S, child.kill)
        timer.start()
        for line in child.stdout or ():
            if line.startswith("found "):
                yield json.loads(line.removeprefix("found "))
        timer.cancel()
        if child.wait():
            errors.seek(0)
            print(errors.read()[-2000:], file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
