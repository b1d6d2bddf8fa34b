"""The tokenizer of gpt-oss, made of the encoding that its parser uses. The model's own is not at hand."""

from typing import Any

import pytest


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
