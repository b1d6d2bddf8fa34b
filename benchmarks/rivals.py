"""What a job is measured against: `LLM.generate` as people call it, and as fast as it goes.

    python benchmarks/rivals.py WORKLOAD.json ceiling|defaults|chunks RESULT.json

ceiling: one call, no logprobs, not detokenised. defaults: one call with the workload's logprobs and vLLM's defaults.
chunks: the same in calls of `chunk_rows` rows with a Parquet file written after each. The time counts from the first
call to the last row's return (chunks: to the last file); the engine's start and one warm-up call do not.
"""

import json
import pathlib
import sys
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from vllm import LLM, SamplingParams


def main() -> None:
    """Run one rival and write what it took."""
    workload = json.loads(pathlib.Path(sys.argv[1]).read_text())
    kind, result = sys.argv[2], pathlib.Path(sys.argv[3])
    prompts = pq.read_table(workload["prompts"])["prompt"].to_pylist()
    started = time.monotonic()
    llm = LLM(
        model=workload["model"],
        load_format="dummy",
        dtype=workload["dtype"],
        quantization=workload["quantization"],
        tensor_parallel_size=workload["tensor_parallel_size"],
        max_logprobs=max(20, workload["sampling"].get("logprobs") or 0),
        **workload["engine"],
    )
    start_s = time.monotonic() - started
    params = _params(workload["sampling"], is_ceiling=kind == "ceiling")
    llm.generate(prompts[:32], params, use_tqdm=False)
    began = time.monotonic()
    if kind == "chunks":
        num_tokens = _chunks(llm, prompts, params, workload["chunk_rows"], result)
    else:
        num_tokens = _one_call(llm, prompts, params)
    seconds = time.monotonic() - began
    figures = {
        "start_s": round(start_s, 1),
        "seconds": round(seconds, 2),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "prompt_tokens_per_s": round(len(prompts) * workload["prompt_tokens"] / seconds, 1),
    }
    result.write_text(json.dumps(figures))


def _params(sampling: dict[str, Any], *, is_ceiling: bool) -> SamplingParams:
    if not is_ceiling:
        return SamplingParams(**sampling)
    bare = {name: value for name, value in sampling.items() if name not in ("logprobs", "prompt_logprobs", "stop")}
    return SamplingParams(**bare, detokenize=False)


def _one_call(llm: LLM, prompts: list[str], params: SamplingParams) -> int:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _chunks(llm: LLM, prompts: list[str], params: SamplingParams, size: int, result: pathlib.Path) -> int:
    num_tokens = 0
    for start in range(0, len(prompts), size):
        outputs = llm.generate(prompts[start : start + size], params, use_tqdm=False)
        rows = [
            {
                "text": output.outputs[0].text,
                "token_ids": list(output.outputs[0].token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in position.items()}
                    for position in output.outputs[0].logprobs or []
                ],
            }
            for output in outputs
        ]
        for row in rows:
            row["logprobs"] = json.dumps(row["logprobs"])
        pq.write_table(pa.Table.from_pylist(rows), result.with_name(f"chunk-{start:07d}.parquet"))
        num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    return num_tokens


if __name__ == "__main__":
    main()
