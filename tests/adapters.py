"""Makes LoRA adapters of the sample model from a seed, strong enough to change the output."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file

# Module of a layer: (width in, width out).
WIDTHS = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (128, 64), "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (128, 320), "mlp.up_proj": (128, 320), "mlp.down_proj": (320, 128),
}  # fmt: skip
LAYERS = tuple(f"model.layers.{number}" for number in range(4))
SCALE = 0.1


def make_adapter(
    folder: pathlib.Path,
    seed: int,
    rank: int = 8,
    modules: tuple[str, ...] = tuple(WIDTHS),
    *,
    layers: tuple[str, ...] = LAYERS,
    widths: Mapping[str, tuple[int, int]] = WIDTHS,
    **config: Any,
) -> pathlib.Path:
    """Write an adapter to `folder` in PEFT's format."""
    random = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer in layers:
        for module in modules:
            name = f"base_model.model.{layer}.{module}"
            before, after = widths[module]
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, before, generator=random) * SCALE
            tensors[f"{name}.lora_B.weight"] = torch.randn(after, rank, generator=random) * SCALE
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted(module.partition(".")[2] for module in modules)
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": targets, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder
