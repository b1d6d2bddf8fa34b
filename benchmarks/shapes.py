"""Makes model folders with real shapes and prompts with exact lengths. All benchmarks on vLLM use them.

`make_model` writes config, generation config and a byte-level BPE tokenizer with the shape's vocabulary size, for
vLLM's `load_format: dummy`. `make_prompts` writes Parquet rows with random text of an exact number of tokens.
`make_adapter` writes a LoRA adapter with random weights.
"""

import itertools
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_MOE = {
    **_QWEN, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _pattern(num_layers: int, *kinds: str) -> list[str]:
    """The kinds of all layers of a model that repeats a few in turn."""
    return [kinds[place % len(kinds)] for place in range(num_layers)]


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "llama-3.3-70b": {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
    # Windows of 128 tokens and sinks in every second layer; in bfloat16, where the published weights are MXFP4.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "layer_types": _pattern(24, "sliding_attention", "full_attention"), "vocab_size": 201088,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True, "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "sliding_window": 512,
        "layer_types": _pattern(26, *["sliding_attention"] * 5, "full_attention"), "vocab_size": 262144,
        "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "gemma3-12b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 3840,
        "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "sliding_window": 1024,
        "layer_types": _pattern(48, *["sliding_attention"] * 5, "full_attention"), "vocab_size": 262208,
        "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # Every sixth layer sees all tokens, with other heads; the others have windows. Each has a dense part and experts.
    "gemma4-26b-a4b": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 2816,
        "intermediate_size": 2112, "moe_intermediate_size": 704, "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "num_global_key_value_heads": 2, "global_head_dim": 512,
        "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": _pattern(30, *["sliding_attention"] * 5, "full_attention"), "enable_moe_block": True,
        "num_experts": 128, "top_k_experts": 8, "hidden_size_per_layer_input": 0, "vocab_size": 262144,
        "max_position_embeddings": 262144, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "full_attention_interval": 4, "layer_types": _pattern(40, *["linear_attention"] * 3, "full_attention"),
        "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    # Granite 4.0 H Micro: Mamba 2 in 36 of 40 layers, without experts.
    "granite4-h-3b": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 2048,
        "intermediate_size": 8192, "shared_intermediate_size": 8192, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": ["attention" if place in (5, 15, 25, 35) else "mamba" for place in range(40)],
        "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 256, "position_embedding_type": "nope", "embedding_multiplier": 12,
        "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8, "vocab_size": 100352,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip


def make_model(shape: str, folder: pathlib.Path, num_labels: int = 0) -> pathlib.Path:
    """Write a model folder with this shape, without weights. num_labels: of a classifier; 0 is a language model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape], "torch_dtype": "bfloat16", "bos_token_id": 256, "eos_token_id": 257}
    if num_labels:
        head = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
        labels = [f"label {number}" for number in range(num_labels)]
        config |= {"architectures": [head], "num_labels": num_labels, "pad_token_id": 257}
        config |= {"id2label": dict(enumerate(labels)), "label2id": {name: at for at, name in enumerate(labels)}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 257}))
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    names["chat_template"] = _CHAT
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE with exactly `vocab_size` entries. Each of `words(vocab_size)` is one token.

    Its merges are: two letters; a space and two letters; a space and four letters.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<bos>", "<eos>"])}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)

    pairs = ["".join(pair) for pair in itertools.product(_LETTERS, repeat=2)]
    for pair in pairs:
        merge(pair[0], pair[1])
    for pair in pairs:
        merge("Ġ", pair)
    for left, right in itertools.islice(_whole_words(), vocab_size - len(vocabulary)):
        merge(f"Ġ{left}", right)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>")])
    return tokenizer


def words(vocab_size: int) -> list[str]:
    """Words that are one token each after a space."""
    num_words = vocab_size - 258 - 2 * len(_LETTERS) ** 2
    return ["".join(word) for word in itertools.islice(_whole_words(), num_words)]


def _whole_words() -> Iterator[tuple[str, str]]:
    # Merges apply in alphabetical order. If the two middle letters come first in it, the word is split.
    pairs = ["".join(pair) for pair in itertools.product(_LETTERS, repeat=2)]
    for left, right in itertools.product(pairs, repeat=2):
        middle = left[1] + right[0]
        if middle > min(left, right) or middle == left:
            yield left, right


def make_adapter(shape: str, folder: pathlib.Path, rank: int) -> pathlib.Path:
    """Write a LoRA adapter of the query and value projections, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config, random_ = SHAPES[shape], np.random.default_rng(0)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    widths = {"q_proj": heads * head_dim, "v_proj": config["num_key_value_heads"] * head_dim}
    tensors = {}
    for layer, (module, width) in itertools.product(range(config["num_hidden_layers"]), widths.items()):
        name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        for half, size in (("A", (rank, hidden)), ("B", (width, rank))):
            tensors[f"{name}.lora_{half}.weight"] = random_.normal(0, 0.01, size).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(widths), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def make_text(shape: str, num_tokens: int, seed: int = 1) -> str:
    """Random text of exactly `num_tokens` tokens."""
    chance = random.Random(seed)
    return " " + " ".join(chance.choices(words(SHAPES[shape]["vocab_size"]), k=num_tokens))


def make_prompts(
    path: pathlib.Path,
    shape: str,
    num_rows: int,
    num_tokens: int,
    seed: int = 0,
    budgets: list[int] | None = None,
    prefix_tokens: int = 0,
    rows_per_prefix: int = 1,
    first_tokens: int = 0,
) -> pathlib.Path:
    """Write rows `id`, `prompt` (exactly `num_tokens` tokens) and, if given, `max_tokens`.

    prefix_tokens: tokens at the beginning of a prompt that `rows_per_prefix` rows share, anywhere in the file.
    first_tokens: of the first row, in place of `num_tokens`.
    """
    vocabulary = words(SHAPES[shape]["vocab_size"])
    chance = random.Random(seed)
    num_own = num_tokens - prefix_tokens
    prompts = [" " + " ".join(chance.choices(vocabulary, k=num_own)) for _ in range(num_rows)]
    if prefix_tokens:
        num_prefixes = -(-num_rows // rows_per_prefix)
        prefixes = [" " + " ".join(chance.choices(vocabulary, k=prefix_tokens)) for _ in range(num_prefixes)]
        prompts = [prefixes[row % num_prefixes] + prompt for row, prompt in enumerate(prompts)]
        chance.shuffle(prompts)
    if first_tokens:
        prompts[0] = " " + " ".join(chance.choices(vocabulary, k=first_tokens))
    columns: dict[str, Any] = {"id": list(range(num_rows)), "prompt": prompts}
    if budgets is not None:
        columns["max_tokens"] = pa.array(budgets, pa.int32())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2000)
    return path
