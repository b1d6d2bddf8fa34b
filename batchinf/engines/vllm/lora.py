"""LoRA adapters in vLLM's words: engine arguments, requests' adapters, loading them before the first request."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from batchinf.base.errors import EngineStartError
from batchinf.base.text import one_line
from batchinf.model.lora import ADAPTER_CONFIG, Adapter, rank_for

# Adapters that one batch may have rows of, if the spec does not say: each takes its room on the device.
_MOST_IN_A_BATCH = 8
_MOST_IN_MEMORY = 64


def lora_arguments(adapters: tuple[Adapter, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """EngineArgs for these adapters; what the spec gives itself stays."""
    if not adapters:
        return {}
    number = len(adapters)
    chosen: dict[str, Any] = {"enable_lora": True, "max_lora_rank": rank_for(adapters)}
    chosen["max_loras"] = min(number, _MOST_IN_A_BATCH)
    if number > _MOST_IN_A_BATCH:
        chosen["max_cpu_loras"] = min(number, _MOST_IN_MEMORY)
    arguments: dict[str, Any] = {name: value for name, value in chosen.items() if name not in given}
    if current_platform.is_cpu():
        # In 0.32 its kernels take "no adapter", -1, for the last place (torch_ops/lora_ops.py), and give rows of the
        # plain model whatever adapter lies there. One place more than there are adapters stays empty: all zeros.
        arguments["max_loras"] = max(given.get("max_loras", 0), number + 1)
        arguments["max_cpu_loras"] = max(given.get("max_cpu_loras") or 0, number + 1)
        # An lm_head that could have an adapter breaks on prompt logprobs there: only what the adapters change can.
        modules = {module for adapter in adapters for module in adapter.modules}
        if all(adapter.modules for adapter in adapters) and not modules & {"experts", "base_layer"}:
            arguments["lora_target_modules"] = given.get("lora_target_modules") or sorted(modules)
    return arguments


def lora_requests(adapters: tuple[Adapter, ...]) -> dict[str | None, Any]:
    """vLLM's record of each adapter, by name; of None, the plain model's: None. Prefixes are cached by these names."""
    numbered = enumerate(adapters, start=1)
    return {None: None} | {
        adapter.name: LoRARequest(adapter.name, number, adapter.path) for number, adapter in numbered
    }


def load_adapters(engine: Any, requests: Mapping[str | None, Any]) -> None:
    """Load each once: one that cannot be loaded would kill the engine with a request. Raises EngineStartError."""
    for name, request in requests.items():
        if request is None:
            continue
        # 0.26 knows no ranks of single modules, and would scale them all by the one of the whole.
        config = json.loads((pathlib.Path(request.path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        known = {field.name for field in dataclasses.fields(PEFTHelper)}
        for key in ("rank_pattern", "alpha_pattern"):
            if config.get(key) and key not in known:
                raise EngineStartError(
                    f"the LoRA adapter '{name}' has a {key}, which this version of vLLM cannot apply"
                )
        try:
            engine.add_lora(request)
        except Exception as error:
            words = one_line(f"{type(error).__name__}: {error}", 400)
            raise EngineStartError(f"vLLM cannot load the LoRA adapter '{name}': {words}") from error
