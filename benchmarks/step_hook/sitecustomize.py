"""Makes vLLM's scheduler log or trace its steps, or leaves out pieces of the engine layer, in processes that have this
folder on their path.

`KERNEL_LOG-kernels-PID.json` counts steps with batchinf's own attention or graphs, and calls of the attention.

Lines of `STEP_LOG-PID.txt`: seconds on the monotonic clock, tokens, requests, requests that waited before the step, and
those that began in it. Twenty are written at a time, which costs a microsecond a step.

`STEP_TRACE-plain.json.gz` and `STEP_TRACE-stacks.json.gz` are traces of PyTorch's profiler, of STEP_TRACE_STEPS steps
each, the second one with Python's functions, whose recording slows the steps. They begin with a decoding step, after
STEP_TRACE_AFTER decoding steps; with STEP_TRACE_PROMPTS, steps that read prompts count too. Each begins a block
`schedule`.

STEP_WITHOUT: names of `PIECES` with commas between them. vLLM's own code does the work of these.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_ENGINE = "batchinf.engines.vllm"
# Pieces of the engine layer: a module, a name in it, and what a call of that name returns where the piece is left out.
PIECES: dict[str, list[tuple[str, str, Any]]] = {
    "attention": [(f"{_ENGINE}.kernels.attention", "install", False)],
    "graph_choice": [(f"{_ENGINE}.kernels.long_requests", "GraphChoice.install", False)],
    "whole_steps": [(f"{_ENGINE}.kernels.whole_steps", "install", False)],
    "token_loops": [(f"{_ENGINE}.scheduling.scheduler", "_block_changes", None)],
    "holding": [(f"{_ENGINE}.scheduling.scheduler", "_is_held_back", False)],
    "joined": [(f"{_ENGINE}.scheduling.joined", "start_joining", False)],
    "scores": [(f"{_ENGINE}.kernels.scores", "is_right", False)],
}


class _Hook(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        names = [name for name in os.environ.get("STEP_WITHOUT", "").split(",") if name]
        if unknown := [name for name in names if name not in PIECES]:
            # Python prints other errors of this module and goes on, so the job would run with all pieces.
            sys.exit(f"STEP_WITHOUT: got {', '.join(unknown)}; there are {', '.join(PIECES)}")
        self._left_out = [place for name in names for place in PIECES[name]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        left_out = [(name, found) for module, name, found in self._left_out if module == fullname]
        if fullname not in _CHANGES and not left_out:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for name, found in left_out:
                _leave_out(module, name, found)
            for variable, change in _CHANGES.get(fullname, {}).items():
                if variable in os.environ:
                    change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _leave_out(module: ModuleType, name: str, found: Any) -> None:
    *owner, last = name.split(".")
    place: Any = getattr(module, owner[0]) if owner else module
    assert hasattr(place, last), f"{module.__name__} has no {name}"

    def left_out(*_: Any, **__: Any) -> Any:
        print(f"left out for this run: {module.__name__}.{name}", flush=True)
        return found

    setattr(place, last, left_out)


def _log(module: Any) -> None:
    scheduler = module.Scheduler
    schedule, lines = scheduler.schedule, list[str]()

    def write() -> None:
        with pathlib.Path(f"{os.environ['STEP_LOG']}-{os.getpid()}.txt").open("a") as file:
            file.writelines(lines)
        lines.clear()

    def logged(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        num_waiting = len(self.waiting) + len(getattr(self, "skipped_waiting", ()))
        step = schedule(self, *arguments, **named)
        counts = step.total_num_scheduled_tokens, len(step.num_scheduled_tokens), num_waiting
        lines.append(f"{began:.6f} {' '.join(map(str, counts))} {len(step.scheduled_new_reqs)}\n")
        if len(lines) >= 20 or not step.total_num_scheduled_tokens:
            write()
        return step

    atexit.register(lambda: write() if lines else None)  # a process that is killed loses the last lines
    scheduler.schedule = logged


def _trace(module: Any) -> None:
    scheduler = module.Scheduler
    schedule = scheduler.schedule
    after, num_steps = int(os.environ["STEP_TRACE_AFTER"]), int(os.environ["STEP_TRACE_STEPS"])
    kinds, seen, left, takes_prompts = ["plain", "stacks"], 0, 0, "STEP_TRACE_PROMPTS" in os.environ
    running: list[Any] = []

    def traced(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal seen, left
        import torch

        if running and not left:
            _end(running.pop(), kinds.pop(0))
            seen = after // 2  # the export has stopped the engine
        if running:
            with torch.profiler.record_function("schedule"):
                step = schedule(self, *arguments, **named)
            left -= 1
            return step
        step = schedule(self, *arguments, **named)
        seen += step.total_num_scheduled_tokens == len(step.num_scheduled_tokens) > 0 or takes_prompts
        if kinds and seen >= after:
            running.append(torch.profiler.profile(with_stack=kinds[0] == "stacks"))  # of all activities there are
            running[0].start()
            left = num_steps + 1  # the beginning of one more step ends the last
        return step

    scheduler.schedule = traced


def _end(profiler: Any, kind: str) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.stop()
    path = f"{os.environ['STEP_TRACE']}-{kind}.json.gz"
    profiler.export_chrome_trace(f"{path}.part.gz")
    os.replace(f"{path}.part.gz", path)


_counts: dict[str, int] = {}


def _count(name: str) -> None:
    _counts[name] = _counts.get(name, 0) + 1


def _count_decoding(module: Any) -> None:
    install, run, execute = module.attention_of_decoding, module.run_ours, module.DecodingWorker.execute_model

    def attention_of_decoding(*arguments: Any, **named: Any) -> Any:
        _counts.clear()  # the calls of the comparison at the start
        return install(*arguments, **named)

    def run_ours(*arguments: Any, **named: Any) -> None:
        _count("kernel_calls")  # a graph calls it when it is captured
        run(*arguments, **named)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        tokens = list(scheduler_output.num_scheduled_tokens.values())
        config, num_decodes = self.vllm_config, tokens.count(1)
        heads = config.model_config.get_num_kv_heads(config.parallel_config)
        if num_decodes == len(tokens) and module.pays_in_step(num_decodes, heads):
            _count("decode_steps")
        _save()
        return execute(self, scheduler_output)

    module.attention_of_decoding, module.run_ours = attention_of_decoding, run_ours
    module.DecodingWorker.execute_model = execute_model


def _count_whole(module: Any) -> None:
    execute = module.PromptWorker.execute_model

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if scheduler_output.num_scheduled_tokens and module.has_whole_steps(self.vllm_config.compilation_config):
            _count("whole_steps")
            _save()
        return execute(self, scheduler_output)

    module.PromptWorker.execute_model = execute_model


def _save() -> None:
    pathlib.Path(f"{os.environ['KERNEL_LOG']}-kernels-{os.getpid()}.json").write_text(json.dumps(_counts))


# What is changed in a module after its import, by the variable that asks for it.
_CHANGES: dict[str, dict[str, Callable[[Any], None]]] = {
    "vllm.v1.core.sched.scheduler": {"STEP_LOG": _log, "STEP_TRACE": _trace},
    f"{_ENGINE}.kernels.attention": {"KERNEL_LOG": _count_decoding},
    f"{_ENGINE}.kernels.whole_steps": {"KERNEL_LOG": _count_whole},
}

if {"STEP_LOG", "STEP_TRACE", "KERNEL_LOG", "STEP_WITHOUT"} & os.environ.keys():
    sys.meta_path.insert(0, _Hook())
