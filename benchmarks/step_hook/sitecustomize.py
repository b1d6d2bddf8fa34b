"""Makes vLLM's scheduler log the beginning and size of each step, in processes that have this folder on their path.

Lines of `STEP_LOG-PID.txt`: seconds on the monotonic clock, tokens, requests. Twenty are written at a time, which costs
a microsecond a step.
"""

import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm.v1.core.sched.scheduler":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _log(module.Scheduler)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _log(scheduler: Any) -> None:
    schedule, lines = scheduler.schedule, []

    def logged(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        step = schedule(self, *arguments, **named)
        lines.append(f"{began:.6f} {step.total_num_scheduled_tokens} {len(step.num_scheduled_tokens)}\n")
        if len(lines) >= 20 or not step.total_num_scheduled_tokens:
            with pathlib.Path(f"{os.environ['STEP_LOG']}-{os.getpid()}.txt").open("a") as file:
                file.writelines(lines)
            lines.clear()
        return step

    scheduler.schedule = logged


if "STEP_LOG" in os.environ:
    sys.meta_path.insert(0, _Hook())
