"""Processes that start sooner, for most of the suite's processor time goes into their start.

What transformers asks of all packages when it is imported comes out of a file, with the same answer. And pyarrow, which
looks for pandas as soon as it meets a Python value, finds none; whoever imports pandas by name gets it.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType


class _PandasUnseenByArrow(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "pandas":
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals["__name__"].startswith("importlib."):
                frame = frame.f_back
            # pyarrow's own frames are compiled and do not show: its caller is the one seen.
            if frame.f_globals["__name__"].partition(".")[0] in ("batchinf", "pyarrow"):
                raise ModuleNotFoundError(fullname)
        return None


if found := os.environ.get("PACKAGES_DISTRIBUTIONS"):
    importlib.metadata.packages_distributions = lambda: json.loads(pathlib.Path(found).read_text())
    sys.meta_path.insert(0, _PandasUnseenByArrow())
