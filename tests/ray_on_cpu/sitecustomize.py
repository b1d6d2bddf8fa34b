"""Lets vLLM's Ray executor run on a CPU, which vLLM's CPU platform does not offer: Ray's "GPUs" stand for processors.

So one engine over several hosts can be tried without GPUs. Only tensor parallelism: vLLM has no pipelines on a CPU.
Processes start faster by `quick/sitecustomize.py`, which Python does not find beside this file.
"""

import importlib.abc
import importlib.machinery
import pathlib
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType


class _PlatformWithRay(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "vllm.platforms.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"
            module.CpuPlatform.device_control_id_to_physical_device_id = classmethod(lambda _, name: int(name))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _PlatformWithRay())
runpy.run_path(str(pathlib.Path(__file__).parents[1] / "quick" / "sitecustomize.py"))
