"""Makes processes start faster, because starts take most of the suite's processor time.

On import, transformers looks at all packages and at the files of all its models; here it gets the same answers from a
file. Pyarrow looks for pandas and finds none, but other imports of pandas work; with `QUICK_WITH_PANDAS` in the
environment, pyarrow finds it too. Libraries that vLLM and transformers import only because they are installed are
hidden.

`QUICK_START_CLOCK=3600` makes the wall clock of the process jump: five times a second it is right, an hour early or an
hour late.
"""

import datetime
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import pathlib
import pickle
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _PandasUnseenByArrow(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "pandas":
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals["__name__"].startswith("importlib."):
                frame = frame.f_back
            # pyarrow's own frames are compiled and invisible, so this is the frame of its caller.
            if frame.f_globals["__name__"].partition(".")[0] in ("batchinf", "pyarrow"):
                raise ModuleNotFoundError(fullname)
        return None


class _ModelsReadAlready(importlib.abc.MetaPathFinder):
    """known: path → what transformers finds there."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "transformers.utils.import_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            read = module.create_import_structure_from_path
            module.create_import_structure_from_path = lambda path: self._known.get(str(path)) or read(path)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _move_clock(jump_s: float) -> None:
    real_time = time.time
    real_datetime = datetime.datetime

    def shift_s() -> float:
        return jump_s * (int(5 * time.monotonic()) % 3 - 1)

    class Moved(real_datetime):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real_datetime.now(tz) + datetime.timedelta(seconds=shift_s())

    time.time = lambda: real_time() + shift_s()
    time.time_ns = lambda: int(1e9 * time.time())
    datetime.datetime = Moved  # type: ignore[misc]


if jump := os.environ.get("QUICK_START_CLOCK"):
    _move_clock(float(jump))
if found := os.environ.get("QUICK_START"):
    packages, models = pickle.loads(pathlib.Path(found).read_bytes())
    importlib.metadata.packages_distributions = lambda: packages
    sys.meta_path[:0] = [_ModelsReadAlready(models)]
    if "QUICK_WITH_PANDAS" not in os.environ:
        sys.meta_path[:0] = [_PandasUnseenByArrow()]
    # Importing vLLM makes a million objects without garbage. The search for garbage would take a fifth of the time.
    gc.set_threshold(50_000, 20, 100)
    gc.unfreeze = lambda: None  # vLLM unfreezes when it ends and then collects twice
    for name in ("opentelemetry.exporter", "scipy", "sklearn"):
        sys.modules[name] = None  # type: ignore[assignment]
