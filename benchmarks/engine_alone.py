"""The engine of a job alone: no tokenising, no writing, no coordinator. It shows what these leave of its speed.

    python benchmarks/engine_alone.py small-embed --rows 32768 --repeat 2         # one GPU, the workload's shape
    python benchmarks/engine_alone.py small-embed --rows 32768 --job-spec '{"engine": {"enable_prefix_caching": true}}'
    python benchmarks/engine_alone.py small-embed --shape tiny --rows 200         # a tiny model, on a CPU

Starts the engine in this process with the settings that a job of the spec gets, and keeps as many requests in it as a
replica does. All prompts run once to warm up, and then `--repeat` times; the prefix cache is emptied before each. The
time is from the first request to the last result. For each time: seconds and tokens a second, of the prompts if the
workload counts these.
"""

import argparse
import json
import os
import pathlib
import time
from dataclasses import replace

import pyarrow.parquet as pq
from run import chosen_engine, prepare, write_spec
from workloads import WORKLOADS, add_size_arguments, sized_by

from batchinf.engines.protocol import Engine
from batchinf.fleet.local.devices import visible_devices
from batchinf.fleet.local.environment import engine_environment
from batchinf.model.identity import resolve
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Request
from batchinf.replica.worker import window
from batchinf.spec.file import read_spec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of, task_type


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--job-spec", type=json.loads, default={}, help="JSON: sections that are merged into the spec")
    add_size_arguments(parser)
    args = parser.parse_args()
    workload = sized_by(args)
    model_folder, prompts = prepare(workload, args.out)
    path, _ = write_spec(workload, args.out / workload.name, model_folder, prompts, args.job_spec, "engine-alone")
    if not visible_devices():
        os.environ |= engine_environment((), len(os.sched_getaffinity(0)))
    spec = read_spec(path).spec
    model = resolve(spec.model)
    spec = spec.model_copy(update={"engine": {**chosen_engine(path), **spec.engine}})
    task = task_of(task_type(spec).resolve(spec, model))
    tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
    ids = tokenizer(pq.read_table(prompts)["prompt"].to_pylist())["input_ids"]
    warm_up = task.warm_up_request()
    requests = [
        replace(warm_up, row_index=row, prompt_token_ids=each, max_tokens=workload.max_tokens)
        for row, each in enumerate(ids)
    ]
    engine = engine_of(task, model.path, model.tokenizer)
    try:
        engine.warm_up(warm_up)
        print(f"engine: {json.dumps(spec.engine)}")
        for number in range(args.repeat + 1):
            engine._engine.reset_prefix_cache()  # type: ignore[attr-defined]
            seconds, num_output = seconds_of(engine, requests)
            num_tokens = sum(map(len, ids)) if workload.counts_prompts else num_output
            name = f"time {number}" if number else "warm-up"
            print(f"{name}: {seconds:.2f} s, {num_tokens / seconds:,.0f} tokens/s", flush=True)
    finally:
        engine.close()


def engine_of(task: Task, model: str, tokenizer: str) -> Engine:
    """vLLM, with the adapter that a replica takes."""
    if task.pooling is None:
        from batchinf.engines.vllm.engine import VllmEngine

        return VllmEngine(task, model, tokenizer)
    from batchinf.engines.vllm.pooling import VllmPooling

    return VllmPooling(task, model, tokenizer)


def seconds_of(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """Run all requests. Returns the time, and the number of output tokens."""
    most, started, num_done, num_output = window(engine.info.max_num_seqs), 0, 0, 0
    began = time.monotonic()
    while num_done < len(requests):
        while started < len(requests) and engine.num_unfinished() < most:
            engine.add(requests[started])
            started += 1
        finished = engine.step()
        engine.begun()
        num_done += len(finished)
        num_output += sum(len(completion.token_ids) for completion in finished)
    return time.monotonic() - began, num_output


if __name__ == "__main__":
    main()
