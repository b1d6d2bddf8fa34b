"""Ends an engine and says what its owner sees: `python -m dying_engines HOW MODEL`, for `test_vllm_engine.py`.

HOW is the signal that kills the engine core in its process, or `exception` for one in a step of an engine in this one.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from batchinf.base.errors import EngineDeadError
from batchinf.engines.vllm.engine import VllmEngine
from batchinf.records import Request
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of


def kill(model: str, number: int) -> dict[str, Any]:
    sampling = SamplingSpec(temperature=0, ignore_eos=True, logprobs=2)
    spec = JobSpec(model={"name": model}, input={"path": "x"}, output={"path": "y"}, engine={"max_model_len": 512})
    engine = VllmEngine(task_of(spec), model, model)
    warm = sampling.model_copy(update={"min_tokens": 10})
    engine.warm_up(Request(-1, 0, [1] * 8, warm, max_tokens=4))
    for row in range(12):
        engine.add(Request(row, 0, [5, 6, 7 + row], sampling, max_tokens=4 if row < 4 else 480))
    completions = []
    error = None
    while not completions:
        completions += engine.step()
    os.kill(engine._engine.engine_core.resources.engine_manager.processes[0].pid, number)
    started = time.monotonic()
    try:
        while time.monotonic() < started + 60:
            completions += engine.step()
    except EngineDeadError as caught:
        error = str(caught)
    engine.close()
    completed = [[len(completion.token_ids), completion.finish_reason] for completion in completions]
    return {"error": error, "completed": completed, "num_unfinished": engine.num_unfinished()}


def message(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except EngineDeadError as error:
        return [str(error), type(error.__cause__).__name__]


def fail(model: str) -> dict[str, Any]:
    # In this process; a seeded request whose prompt comes in chunks is more than vLLM's engine on a CPU can bear.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sampling = SamplingSpec(temperature=0.9)
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    spec = JobSpec(model={"name": model}, input={"path": "x"}, output={"path": "y"}, engine=sizes)
    engine = VllmEngine(task_of(spec), model, model)
    request = Request(0, 0, [5] * 200, sampling, max_tokens=8, seed=1)
    engine.add(request)
    seen = {"step": message(engine.step), "again": message(engine.step), "add": message(engine.add, request)}
    seen["num_unfinished"] = engine.num_unfinished()
    engine.close()
    engine.close()
    seen["closed"] = message(engine.step)
    another = VllmEngine(task_of(spec), model, model)
    another.add(Request(0, 0, [5] * 20, sampling, max_tokens=1, seed=1))
    seen["another"] = len(another.step())
    another.close()
    return seen


if __name__ == "__main__":
    how, model = sys.argv[1:]
    print(json.dumps(fail(model) if how == "exception" else kill(model, getattr(signal, how))))
