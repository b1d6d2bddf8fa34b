"""The rivals of a job: vLLM as people usually call it, and as fast as possible. `run.py` starts it.

    python benchmarks/rivals.py GROUP.json

All runs of a group share one engine, because its start takes longer than most runs. Each run writes its result when it
is done. Kinds of run:

ceiling: one call of `LLM.generate` with token ids, without logprobs, text and structured outputs.
sorted: as ceiling, with rows sorted by text, so that prompts with the same beginning are neighbours.
flat: as ceiling, with the workload's logprobs as `flat_logprobs`; `detokenize=False`.
raw: as flat, but the logprobs stay the arrays that the engine core sends. vLLM's class for them is replaced.
embed, classify: one call of `LLM.embed` or `LLM.classify` with token ids.
defaults: one call with texts, or of `LLM.chat`, the workload's sampling and vLLM's defaults.
chunks: as defaults, in calls of `chunk_rows` rows, each followed by writing a Parquet file.
run-batch: `vllm run-batch`, each prompt as a user message. Its engine has the limits of that command.

The time counts from the first call to the return of the last row; with chunks to the last file, and with run-batch from
the opening of the input to the end of the output. The engine's start does not count, nor one warm-up call with the
run's own parameters and at most 32 output tokens; run-batch has none. `run_s` is all of a run but the engine's start.
"""

import asyncio
import gc
import json
import pathlib
import sys
import time
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import output_processor

_WARM_UP_ROWS, _WARM_UP_TOKENS = 32, 32


class KeptOut(output_processor.LogprobsProcessor):  # type: ignore[misc]
    """Replaces vLLM's class that converts a request's logprobs. This one stores them as they come."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        processor = super().from_new_request(None, request)
        processor.logprobs, processor.prompt_logprobs = [], []
        return processor

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.append(logprobs_lists)

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs.append(prompt_logprobs_tensors)


def main() -> None:
    """Start the engine of one group, then do each run."""
    group = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if current_platform.is_cpu():  # CPUs here cannot compile; the job does the same
        group["engine"]["enforce_eager"] = True
    if group["runs"][0]["call"] == "run-batch":
        _run_batch(group["engine"], group["runs"][0])
        return
    llm = LLM(**group["engine"])
    start_s = round(time.time() - psutil.Process().create_time(), 1)
    measured: dict[str, dict[str, Any]] = {}
    for run in group["runs"]:
        result, began = pathlib.Path(run.pop("result")), time.monotonic()
        key = json.dumps(run, sort_keys=True)
        is_shared = key in measured  # workloads that differ only in logprobs share a ceiling
        if not is_shared:
            measured[key] = {"start_s": start_s, **measure(llm, run, result)}
            measured[key]["run_s"] = round(time.monotonic() - began, 1)
        result.write_text(json.dumps({**measured[key], "is_shared": is_shared}))
        print(result.stem, result.parent.name, measured[key], flush=True)


def measure(llm: LLM, run: dict[str, Any], result: pathlib.Path) -> dict[str, Any]:
    """Seconds and tokens of one run."""
    rows = _rows(run)
    if run["call"] == "sorted":
        rows = rows.sort_by("prompt")
    texts = rows["prompt"].to_pylist()
    budgets = rows["max_tokens"].to_pylist() if run["has_budgets"] else [run["sampling"]["max_tokens"]] * len(texts)
    params, prompts = [params_of(run, budget) for budget in budgets], _prompts(llm, run, texts)
    own = output_processor.LogprobsProcessor
    output_processor.LogprobsProcessor = KeptOut if run["call"] == "raw" else own
    try:
        warm_up = [params_of(run, min(_WARM_UP_TOKENS, budget)) for budget in budgets[:_WARM_UP_ROWS]]
        _call(llm, run, prompts[:_WARM_UP_ROWS], warm_up)
        is_reset = llm.reset_prefix_cache()
        gc.collect()
        began = time.monotonic()
        if run["call"] == "chunks":
            folder = result.with_suffix("")
            folder.mkdir(exist_ok=True)
            outputs = _chunks(llm, run, prompts, params, folder)
        else:
            outputs = _call(llm, run, prompts, params)
        seconds = time.monotonic() - began
    finally:
        output_processor.LogprobsProcessor = own
    num_output, num_prompt = _count(outputs), sum(len(output.prompt_token_ids) for output in outputs)
    return {"prefix_cache_reset": is_reset, **_figures(seconds, len(prompts), num_output, num_prompt)}


def _rows(run: dict[str, Any]) -> pa.Table:
    return pq.read_table(run["prompts"]).slice(0, run["num_rows"])


def _prompts(llm: LLM, run: dict[str, Any], texts: list[str]) -> list[Any]:
    """What the call takes: token ids, texts or conversations."""
    conversations = [_messages(run, text) for text in texts] if run["system"] else []
    if run["call"] in ("defaults", "chunks"):
        return conversations or texts
    tokenizer = llm.get_tokenizer()
    if conversations:
        ids = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
               for each in conversations]  # fmt: skip
    else:
        ids = tokenizer(texts)["input_ids"]
    return [{"prompt_token_ids": each} for each in ids]


def _messages(run: dict[str, Any], text: str) -> list[dict[str, str]]:
    system = [{"role": "system", "content": run["system"]}] if run["system"] else []
    return [*system, {"role": "user", "content": text}]


def params_of(run: dict[str, Any], max_tokens: int) -> SamplingParams:
    """A run's parameters for one row."""
    given = {**run["sampling"], "max_tokens": max_tokens}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if run["call"] in ("raw", "flat"):
        return SamplingParams(**given, flat_logprobs=True, detokenize=False)
    return SamplingParams(**given, detokenize=run["call"] not in ("ceiling", "sorted"))


def _call(llm: LLM, run: dict[str, Any], prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    lora = LoRARequest("lora", 1, run["lora"]) if run["lora"] else None
    if run["call"] == "embed":
        return list(llm.embed(prompts, use_tqdm=False, lora_request=lora))
    if run["call"] == "classify":
        return list(llm.classify(prompts, use_tqdm=False, lora_request=lora))
    if run["system"] and run["call"] in ("defaults", "chunks"):
        return list(llm.chat(prompts, params, use_tqdm=False, lora_request=lora))
    return list(llm.generate(prompts, params, use_tqdm=False, lora_request=lora))


def _count(outputs: list[Any]) -> int:
    """Output tokens of all samples. A pooled output is no list of samples, and has none."""
    return sum(len(sample.token_ids) for out in outputs if isinstance(out.outputs, list) for sample in out.outputs)


def _figures(seconds: float, num_rows: int, num_output: int, num_prompt: int) -> dict[str, Any]:
    return {
        "num_rows": num_rows,
        "seconds": round(seconds, 2),
        "num_output_tokens": num_output,
        "num_prompt_tokens": num_prompt,
        "output_tokens_per_s": round(num_output / seconds, 1),
        "prompt_tokens_per_s": round(num_prompt / seconds, 1),
    }


def _chunks(
    llm: LLM, run: dict[str, Any], prompts: list[Any], params: list[SamplingParams], folder: pathlib.Path
) -> list[Any]:
    found, size = [], run["chunk_rows"]
    for start in range(0, len(prompts), size):
        outputs = _call(llm, run, prompts[start : start + size], params[start : start + size])
        rows = [
            {
                "text": output.outputs[0].text,
                "token_ids": list(output.outputs[0].token_ids),
                "logprobs": json.dumps(_plain(output.outputs[0].logprobs)),
                "prompt_logprobs": json.dumps(_plain(output.prompt_logprobs)),
            }
            for output in outputs
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"chunk-{start:07d}.parquet")
        found += outputs
    return found


def _plain(logprobs: Any) -> list[dict[str, float]]:
    return [{str(token): entry.logprob for token, entry in (position or {}).items()} for position in logprobs or []]


# -- vllm run-batch ----------------------------------------------------------------------------------------------------


def _run_batch(engine: dict[str, Any], run: dict[str, Any]) -> None:
    """`vllm run-batch` in this process, with a clock around its work."""
    try:
        from vllm.entrypoints.launchers import run_batch as command
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai import run_batch as command
    result, began = pathlib.Path(run["result"]), time.monotonic()
    inputs, outputs = result.with_suffix(".input.jsonl"), result.with_suffix(".output.jsonl")
    _write_batch(inputs, engine["model"], run)
    options = [_option(name, value) for name, value in engine.items() if value is not None]
    sys.argv = ["run-batch", "-i", str(inputs), "-o", str(outputs), *(word for option in options for word in option)]
    work, seconds = command.run_batch, list[float]()

    async def timed(*args: Any, **more: Any) -> None:
        started = time.monotonic()
        await work(*args, **more)
        seconds.append(time.monotonic() - started)

    command.run_batch = timed
    asyncio.run(command.main(command.parse_args()))
    answers = [json.loads(line) for line in outputs.open()]
    used = [answer["response"]["body"]["usage"] for answer in answers]
    num_output, num_prompt = (sum(each[name] for each in used) for name in ("completion_tokens", "prompt_tokens"))
    figures = _figures(seconds[0], len(answers), num_output, num_prompt)
    result.write_text(json.dumps({**figures, "run_s": round(time.monotonic() - began, 1)}))
    print(result.stem, result.parent.name, figures, flush=True)


def _write_batch(path: pathlib.Path, model: str, run: dict[str, Any]) -> None:
    """The rows as OpenAI's batch requests."""
    body = {"model": model, **run["sampling"]}
    num_logprobs = body.pop("logprobs", None)
    if num_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": num_logprobs}
    rows = _rows(run)
    budgets = rows["max_tokens"].to_pylist() if run["has_budgets"] else [body["max_tokens"]] * len(rows)
    with path.open("w") as file:
        for number, (text, budget) in enumerate(zip(rows["prompt"].to_pylist(), budgets, strict=True)):
            request = {**body, "max_tokens": budget, "messages": _messages(run, text)}
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": request}
            file.write(json.dumps(line) + "\n")


def _option(name: str, value: Any) -> list[str]:
    """An engine argument as words of vLLM's command line."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


if __name__ == "__main__":
    main()
