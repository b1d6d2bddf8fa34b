"""The tokenizer of gpt-oss, made of the encoding that its parser uses. The model's own is not at hand."""

import itertools
import json
import pathlib
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode


class HarmonyTokenizer:
    """As much of a tokenizer as the parsers of gpt-oss need."""

    vocab_size = 201_088
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()
    is_fast = True

    def __init__(self) -> None:
        harmony = pytest.importorskip("openai_harmony")
        try:
            self._encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
        except harmony.HarmonyError:  # it is downloaded where it is not at hand
            pytest.skip("no encoding of gpt-oss")

    def __deepcopy__(self, memo: object) -> "HarmonyTokenizer":
        return self

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._encoding.encode(text, allowed_special="all"))

    def get_vocab(self) -> dict[str, int]:
        marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>", "<|constrain|>")
        return {mark: self.encode(mark)[0] for mark in marks}

    def decode(self, token_ids: list[int]) -> str:
        return str(self._encoding.decode(token_ids))

    def token(self, text: str) -> int:
        """The id of a text that is one token."""
        [token_id] = self.encode(text)
        return token_id

    def write(self, folder: pathlib.Path) -> None:
        """Write it as a tokenizer of transformers. Without merges, it decodes all tokens, but encodes single bytes."""
        signs = bytes_to_unicode()
        first_mark = 199_998
        inner = self._encoding._inner
        vocabulary = {
            "".join(signs[byte] for byte in bytes(inner.decode_bytes([token_id]))): token_id
            for token_id in range(first_mark)
        }
        marks = {}
        for token_id in range(first_mark, self.vocab_size):
            try:
                marks[inner.decode_utf8([token_id])] = token_id
            except Exception:  # not all numbers have a token
                marks[f"<|unused_{token_id}|>"] = token_id
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | marks, merges=[]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in marks])
        made.add_tokens(["assistant"])  # the end of a prompt, which the model must know
        made.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|return|>",
            "pad_token": "<|endoftext|>",
            "chat_template": _TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


# -- a model -----------------------------------------------------------------------------------------------------------

_TEMPLATE = """{%- for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
_THOUGHT = "<|channel|>analysis<|message|>So it is<|end|><|start|>assistant<|channel|>"
_ANSWER = "<|channel|>final<|message|>Yes!<|return|>"
_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
_SIZE = 64


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """A random gpt-oss of two layers that writes one token after another as they stand above.

    Where a token has several successors, the model prefers the first, then the second, so that `presence_penalty` 1
    makes it go on to the answer after a thought, and a bias of 2 on `CALL_IDS` makes it call a tool.
    """
    tokenizer = HarmonyTokenizer()
    config = transformers.GptOssConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=_SIZE, intermediate_size=_SIZE, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=131_072, eos_token_id=[200_002, 200_012], pad_token_id=199_999,
        tie_word_embeddings=False, sliding_window=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    place: dict[int, int] = {}
    follows: dict[int, list[int]] = {}
    for text in (_THOUGHT, _ANSWER, _CALL):
        for token_id, following in itertools.pairwise(tokenizer.encode(text)):
            place.setdefault(token_id, len(place))
            if following not in follows.setdefault(token_id, []):
                follows[token_id].append(following)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        for token_id, index in place.items():
            model.model.embed_tokens.weight[token_id] = 0
            model.model.embed_tokens.weight[token_id, index] = 10.0
            for rank, following in enumerate(follows[token_id]):
                # The last norm makes a vector of one number that is the square root of its size.
                model.lm_head.weight[following, index] = (2.4 - 0.4 * rank) / _SIZE**0.5
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.write(folder)
    return folder


CALL_STEPS = ("comment", '{"')
