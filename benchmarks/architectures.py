"""Makes small models of many architectures, with random weights in which attention matters. `truth.py` uses them.

vLLM's dummy weights are so small that attention changes next to nothing. Here the numbers before each softmax of the
attention have a standard deviation of about 3. Biases, sinks and the weights of norms are random too.
"""

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 4096
BOS, EOS = 256, 257  # of `make_tokenizer`
_HIDDEN = 512
_SPREAD = 1.8 / _HIDDEN**0.5  # standard deviation of the weights of matrices
_SMALL: dict[str, Any] = {
    "hidden_size": _HIDDEN, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "initializer_range": _SPREAD, "bos_token_id": BOS, "eos_token_id": EOS,
    "pad_token_id": EOS,
}  # fmt: skip
_EIGHT_HEADS = {"num_attention_heads": 8}  # whose size is hidden_size / 8, for configs without head_dim
_WINDOWS = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA = {
    **_EIGHT_HEADS, "head_dim": 128, "query_pre_attn_scalar": 128, "tie_word_embeddings": True, **_WINDOWS,
}  # fmt: skip
_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0}  # low enough to matter
_MAMBA = {
    "mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 64,
}  # fmt: skip
_GRANITE = {
    **_EIGHT_HEADS, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 1024, "attention_multiplier": 0.125, "position_embedding_type": "rope",
    "mamba_expand": 1, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 64,
}  # fmt: skip
_NO_PREFIXES = {"enable_prefix_caching": False}  # with it, vLLM 0.32 wants chunks, which jobs on a CPU do without
_EXPERTS = {
    "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}  # fmt: skip
# Three of four layers are gated delta nets. vLLM's own choice for their prompts on Hopper needs FlashInfer.
_DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 128,
}  # fmt: skip
_TRITON = {"gdn_prefill_backend": "triton"}
_TIED = ("model.embed_tokens.weight", "model.norm.weight")
_ADAPTED, _RANK, _ALPHA = ("q_proj", "v_proj"), 8, 16
ADAPTER = "adapter"
_TEXT = ("generate", "score")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A small model and the jobs that run with it."""

    model_type: str
    """The name in transformers."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of its config that differ from those of all."""
    tasks: tuple[str, ...] = _TEXT
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments of both jobs."""
    has_adapter: bool = False
    """Whether the jobs run with a LoRA adapter."""


ARCHITECTURES = {
    "llama": Architecture("llama", tasks=(*_TEXT, "greedy", "embed", "logits")),
    "llama-128": Architecture("llama", {**_EIGHT_HEADS, "head_dim": 128}),
    "qwen2": Architecture("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}),
    "qwen3": Architecture("qwen3", tasks=(*_TEXT, "embed", "logits")),
    "mistral-window": Architecture("mistral", {"sliding_window": 128}),
    "gemma2": Architecture("gemma2", {**_GEMMA, **_CAPS}, tasks=(*_TEXT, "embed", "logits")),
    "gemma3": Architecture("gemma3_text", _GEMMA),
    "phi3": Architecture("phi3", _EIGHT_HEADS),
    "olmo2": Architecture("olmo2", _EIGHT_HEADS),
    "gpt-oss": Architecture("gpt_oss", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Architecture("qwen3_moe", _EXPERTS),
    "falcon-h1": Architecture("falcon_h1", _MAMBA, engine=_NO_PREFIXES),
    "granite-hybrid": Architecture("granitemoehybrid", _GRANITE, engine=_NO_PREFIXES),
    "qwen3.5": Architecture("qwen3_5_text", _DELTA_NETS, ("generate",), _TRITON),
    "qwen3.5-no-prefixes": Architecture("qwen3_5_text", _DELTA_NETS, ("generate",), _TRITON | _NO_PREFIXES),
    "llama-lora": Architecture("llama", has_adapter=True),
    "llama-fp8-cache": Architecture("llama", engine={"kv_cache_dtype": "fp8"}),
}


def make_architecture(architecture: Architecture, folder: pathlib.Path, dtype: str) -> pathlib.Path:
    """Write a model with its tokenizer, and its LoRA adapter if it has one. Returns the model's folder.

    dtype: of the weights; `bfloat16` or `float32`.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture.model_type, **_SMALL | architecture.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _randomize(name, weight)
            if config.tie_word_embeddings and name in _TIED:
                # The likeliest token would always be the one that was read last.
                weight.copy_(0.2 * weight if "embed_tokens" in name else weight + 4.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    make_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if architecture.has_adapter:
        _make_adapter(model, folder / ADAPTER)
    return folder


def _randomize(name: str, weight: torch.Tensor) -> None:
    """Change the weights that transformers does not make random."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        weight += 0.8  # normed queries and keys would give numbers before the softmax of a standard deviation of 1
    if name.endswith("experts.down_proj"):
        weight *= 0.3  # rounding alone makes a router choose other experts, which would be most of the noise
    if "norm" in name:
        weight += 0.2 * torch.randn_like(weight)
    elif name.endswith(("_proj.bias", "router.bias", "_proj_bias", "sinks")):
        weight += 0.5 * torch.randn_like(weight)


def _make_adapter(model: Any, folder: pathlib.Path) -> None:
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(_ADAPTED):
            wide, narrow = module.weight.shape
            for half, shape in (("A", (_RANK, narrow)), ("B", (wide, _RANK))):
                value = torch.randn(shape) * _SPREAD
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = value.to(module.weight.dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": _ADAPTED, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def merge_adapter(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Add the adapter's tensors, by their names in its file, to the weights of transformers' model."""
    for name, value in tensors.items():
        if (stem := name.removesuffix(".lora_B.weight")) != name:
            weight = model.get_submodule(stem.removeprefix("base_model.model.")).weight
            delta = value.float() @ tensors[f"{stem}.lora_A.weight"].float() * _ALPHA / _RANK
            weight.data += delta.to(weight.device)
