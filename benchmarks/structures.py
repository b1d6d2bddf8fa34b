"""The cost of checking finished texts against their schemas, and of masking tokens with vLLM's two main backends.

    python benchmarks/structures.py check --rows 10000
    python benchmarks/structures.py masks

`check` runs the same rows on the scripted engine with a schema and without one, as `worker_speed.py` does: texts of 25
values at 20,000 rows a minute. `masks` compiles two schemas and masks each token of a text, with a vocabulary of
128,256.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

from shapes import make_model, make_prompts
from worker_speed import run

from batchinf.prompts.encoder import load_tokenizer
from batchinf.spec.answer_schemas import Schema, objection, read_json
from batchinf.spec.job import JobSpec

_ROWS_A_MINUTE = 20_000
_NAMES = [f"field_{number}" for number in range(25)]
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "string", "minLength": 1} if number % 2 else {"type": "integer", "minimum": 0}
        for number, name in enumerate(_NAMES)
    },
    "required": _NAMES,
    "additionalProperties": False,
}
TEXT = json.dumps({name: "some words" if number % 2 else number for number, name in enumerate(_NAMES)})
MASKED: dict[str, tuple[dict[str, Any], str]] = {
    "a label and at most 200 letters": (
        {
            "type": "object",
            "properties": {"mood": {"enum": ["good", "bad"]}, "why": {"type": "string", "maxLength": 200}},
            "required": ["mood", "why"],
            "additionalProperties": False,
        },
        '{"mood": "good", "why": "the price was right and so was the taste, we will come again"}',
    ),
    "25 values": (SCHEMA, TEXT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "masks"))
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/structures"))
    args = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    shutil.rmtree(args.out, ignore_errors=True)
    model = make_model(args.shape, args.out / "model")
    if args.what == "masks":
        masks(load_tokenizer(str(model), False))
    else:
        check(args, model)


def check(args: argparse.Namespace, model: pathlib.Path) -> None:
    schema, text = Schema(json.dumps(SCHEMA)), TEXT
    each_us = _least_us(lambda: schema.breach(read_json(text)), 300)
    share = each_us * 1e-6 * _ROWS_A_MINUTE / 60
    at_speed = f"{share:.1%} of a core at {_ROWS_A_MINUTE:,} rows a minute"
    print(f"{each_us:.0f} µs a text of {len(TEXT):,} characters: {at_speed}")
    print(f"{_least_us(lambda: objection.__wrapped__(json.dumps(SCHEMA)), 5) / 1000:.1f} ms the schema, once")
    print(f"{_least_us(lambda: Schema(json.dumps(SCHEMA)), 20):.0f} µs to keep it, once in each replica")
    prompts = make_prompts(args.out / "prompts.parquet", args.shape, args.rows, 64)
    ids = load_tokenizer(str(model), False).encode(TEXT, add_special_tokens=False)
    # All sequences advance by a token in a step, and each row takes one step for each token and the end.
    step_s = args.max_num_seqs * 60 / (_ROWS_A_MINUTE * (len(ids) + 1))
    rates: dict[str, list[float]] = {"with": [], "without": []}
    writer: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(args.rounds):
        for name, structure in (("with", {"json": SCHEMA}), ("without", None)):
            spec = JobSpec.model_validate(
                {
                    "model": str(model),
                    "input": {"path": str(prompts), "prompt_column": "prompt", "id_column": "id"},
                    "sampling": {"temperature": 0.0, "max_tokens": len(ids) + 1, "structured_outputs": structure},
                    "output": {"path": str(args.out / f"{name}-{number}")},
                    "scripted": {"max_num_seqs": args.max_num_seqs, "step_s": step_s, "max_model_len": 8192},
                }
            )
            _, watch = run(spec, str(model), [ids])
            tokens = sum(part.num_output_tokens for part in watch.parts)
            assert not any(part.num_errors for part in watch.parts)
            rates[name].append(tokens / watch.wall_s)
            writer[name].append(watch.threads["writer"] / watch.wall_s)
    for name in rates:
        print(
            f"{name} a schema: {statistics.median(rates[name]):,.0f} output tokens/s, "
            f"writer {statistics.median(writer[name]):.1%} of a core"
        )
    print(f"{statistics.median(rates['with']) / statistics.median(rates['without']):.3f} of the speed without one")


def masks(tokenizer: Any) -> None:
    import llguidance.hf
    import llguidance.torch
    import torch
    import xgrammar

    torch.set_num_threads(1)
    guidance_tokens = llguidance.hf.from_tokenizer(tokenizer, len(tokenizer))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    for name, (schema, text) in MASKED.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        started = time.process_time()
        compiled = compiler.compile_json_schema(json.dumps(schema))
        compile_ms = (time.process_time() - started) * 1000
        mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))

        def with_xgrammar(compiled: Any = compiled, ids: list[int] = ids, mask: Any = mask) -> None:
            matcher = xgrammar.GrammarMatcher(compiled)
            for token_id in ids:
                matcher.fill_next_token_bitmask(mask, 0)
                assert matcher.accept_token(token_id)

        each_us = _least_us(with_xgrammar, 2) / len(ids)
        print(f"{name}, xgrammar: compiled in {compile_ms:,.1f} ms, {each_us:.0f} µs a mask")
        started = time.process_time()
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        llguidance.LLMatcher(guidance_tokens, grammar)
        compile_ms = (time.process_time() - started) * 1000
        mask = llguidance.torch.allocate_token_bitmask(1, guidance_tokens.vocab_size)

        def with_guidance(grammar: Any = grammar, ids: list[int] = ids, mask: Any = mask) -> None:
            matcher = llguidance.LLMatcher(guidance_tokens, grammar)
            for token_id in ids:
                llguidance.torch.fill_next_token_bitmask(matcher, mask, 0)
                assert matcher.consume_token(token_id)

        each_us = _least_us(with_guidance, 2) / len(ids)
        print(f"{name}, guidance: compiled in {compile_ms:,.1f} ms, {each_us:.0f} µs a mask")


def _least_us(call: Callable[[], object], number: int) -> float:
    """Processor time of a call in µs: the least of seven rounds."""
    least = float("inf")
    for _ in range(7):
        started = time.thread_time()
        for _ in range(number):
            call()
        least = min(least, (time.thread_time() - started) / number)
    return least * 1e6


if __name__ == "__main__":
    main()
