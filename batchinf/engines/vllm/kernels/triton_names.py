"""Triton, as vLLM imports it. Without it, the kernels of this folder cannot be compiled, and vLLM's own run."""

import types
from typing import Any

from batchinf.engines.vllm.names import optional

_TRITON = "vllm.triton_utils"
_COST = "vLLM's own kernels run, which are slower"
HAS_TRITON: bool = optional(_TRITON, "HAS_TRITON", _COST, False)
triton: Any = optional(_TRITON, "triton", _COST, types.SimpleNamespace(jit=lambda kernel: kernel))
tl: Any = optional(_TRITON, "tl", _COST, types.SimpleNamespace(constexpr=None))
