"""Names of vLLM that the adapter can do without."""

import importlib
from typing import Any

import vllm


def optional(module: str, name: str, cost: str, default: Any = None) -> Any:
    """`name` of vLLM's `module`. Where this version has none: `default`, and a line in the log that says the cost."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        print(f"vLLM {vllm.__version__} has no {module}.{name}: {cost}", flush=True)
        return default
