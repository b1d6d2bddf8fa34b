"""The rivals of a job: `LLM.generate` as people usually call it, and as fast as possible. `run.py` starts it.

    python benchmarks/rivals.py GROUP.json

All runs of a group share one engine, because its start takes longer than most runs. Each run writes its result when it
is done. Kinds of run:

ceiling: one call with token ids, without logprobs and text.
sorted: as ceiling, with rows sorted by text, so that prompts with the same beginning are neighbours.
embed: one call of `LLM.embed` with token ids.
raw: as ceiling, with the workload's logprobs, which stay the arrays that the engine core sends.
defaults: one call with texts, the workload's sampling and vLLM's defaults.
chunks: as defaults, in calls of `chunk_rows` rows, each followed by writing a Parquet file.

The time counts from the first call to the return of the last row (chunks: to the last file). The engine's start and one
warm-up call with the run's own parameters do not count.
"""

import gc
import json
import pathlib
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.v1.engine import output_processor

OUTPUTS = ("logprobs", "prompt_logprobs", "stop")


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
    started = time.monotonic()
    if current_platform.is_cpu():  # CPUs here cannot compile; the job does the same
        group["engine"]["enforce_eager"] = True
    llm = LLM(**group["engine"])
    start_s = round(time.monotonic() - started, 1)
    measured: dict[str, dict[str, Any]] = {}
    for run in group["runs"]:
        result = pathlib.Path(run.pop("result"))
        key = json.dumps(run, sort_keys=True)
        if key not in measured:  # workloads that differ only in logprobs share a ceiling
            measured[key] = {"start_s": start_s, **measure(llm, run, result)}
        result.write_text(json.dumps(measured[key]))
        print(result.stem, result.parent.name, measured[key], flush=True)


def measure(llm: LLM, run: dict[str, Any], result: pathlib.Path) -> dict[str, Any]:
    """Seconds and tokens of one run."""
    rows = pq.read_table(run["prompts"]).slice(0, run["num_rows"])
    if run["kind"] == "sorted":
        rows = rows.sort_by("prompt")
    texts = rows["prompt"].to_pylist()
    budgets = rows["max_tokens"].to_pylist() if run["has_budgets"] else [run["sampling"]["max_tokens"]] * len(texts)
    params = [params_of(run["sampling"], run["kind"], budget) for budget in budgets]
    prompts: list[Any] = texts
    if run["kind"] in ("ceiling", "raw", "sorted", "embed"):
        ids = llm.get_tokenizer()(texts)["input_ids"]
        prompts = [{"prompt_token_ids": each} for each in ids]
    own = output_processor.LogprobsProcessor
    output_processor.LogprobsProcessor = KeptOut if run["kind"] == "raw" else own
    try:
        if run["kind"] == "embed":
            llm.embed(prompts[:32], use_tqdm=False)
        else:
            llm.generate(prompts[:32], params[:32], use_tqdm=False)
        llm.reset_prefix_cache()
        gc.collect()
        began = time.monotonic()
        if run["kind"] == "embed":
            num_tokens = len(llm.embed(prompts, use_tqdm=False))
        elif run["kind"] == "chunks":
            num_tokens = _chunks(llm, prompts, params, run["chunk_rows"], result)
        else:
            num_tokens = _count(llm.generate(prompts, params, use_tqdm=False))
        seconds = time.monotonic() - began
    finally:
        output_processor.LogprobsProcessor = own
    return {
        "num_rows": len(prompts),
        "seconds": round(seconds, 2),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "prompt_tokens_per_s": round(len(prompts) * run["prompt_tokens"] / seconds, 1),
    }


def params_of(sampling: dict[str, Any], kind: str, max_tokens: int) -> SamplingParams:
    """A run's parameters for one row."""
    given = {**sampling, "max_tokens": max_tokens}
    if kind in ("ceiling", "sorted"):
        return SamplingParams(**{name: value for name, value in given.items() if name not in OUTPUTS}, detokenize=False)
    return SamplingParams(**given, flat_logprobs=True, detokenize=False) if kind == "raw" else SamplingParams(**given)


def _count(outputs: list[Any]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _chunks(llm: LLM, prompts: list[Any], params: list[SamplingParams], size: int, result: pathlib.Path) -> int:
    num_tokens = 0
    for start in range(0, len(prompts), size):
        outputs = llm.generate(prompts[start : start + size], params[start : start + size], use_tqdm=False)
        rows = [
            {
                "text": output.outputs[0].text,
                "token_ids": list(output.outputs[0].token_ids),
                "logprobs": json.dumps(_plain(output.outputs[0].logprobs)),
                "prompt_logprobs": json.dumps(_plain(output.prompt_logprobs)),
            }
            for output in outputs
        ]
        pq.write_table(pa.Table.from_pylist(rows), result.with_name(f"chunk-{start:07d}.parquet"))
        num_tokens += _count(outputs)
    return num_tokens


def _plain(logprobs: Any) -> list[dict[str, float]]:
    return [{str(token): entry.logprob for token, entry in (position or {}).items()} for position in logprobs or []]


if __name__ == "__main__":
    main()
