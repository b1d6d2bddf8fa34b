"""Imports names of vLLM that the adapter does not strictly need."""

import importlib
from typing import Any

import vllm


def optional(module: str, name: str, cost: str, default: Any = None) -> Any:
    """`name` from vLLM's `module`. If this version has no such name: `default`, and a log line that says the cost."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        print(f"vLLM {vllm.__version__} has no {module}.{name}: {cost}", flush=True)
        return default
