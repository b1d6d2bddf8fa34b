"""Decodes the tokens of completions like vLLM, but in batches."""

import copy
import json
from collections.abc import Sequence
from itertools import compress, groupby
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from batchinf.records import Completion
from batchinf.spec.sampling import SamplingSpec

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens at a prompt's end that are searched for a safe place to begin decoding.
_TAIL_TOKENS = 16
# vLLM's INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET, for tokenizers written in Python.
_SLOW_OFFSET = 5


class Detokenizer:
    """Decodes with one tokenizer of transformers, fast (Rust) or slow (Python)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = None
        self._anchors: frozenset[int] | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            # A copy: if one tokenizer encodes on another thread meanwhile, it fails with "Already borrowed".
            self._backend = copy.deepcopy(backend)
            self._anchors = _anchors(self._backend) if _decodes_locally(self._backend) else None

    def decode(self, completions: Sequence[Completion], sampling: SamplingSpec) -> list[str]:
        """Text of each completion. Completions that the engine decoded (stop strings) keep their text."""
        texts = [completion.text for completion in completions]
        missing = [text is None for text in texts]
        left = list(compress(completions, missing))
        prompts = [completion.request.prompt_token_ids for completion in left]
        outputs = [_text_token_ids(completion, sampling) for completion in left]
        decoded = iter(self._decode(prompts, outputs, sampling.skip_special_tokens))
        return [next(decoded) if text is None else text for text in texts]

    def _decode(self, prompts: list[list[int]], outputs: list[list[int]], skip_special: bool) -> list[str]:
        pairs = list(zip(prompts, outputs, strict=True))
        if self._backend is None:
            return [_replay_slow(self._tokenizer, prompt, output, skip_special) for prompt, output in pairs]
        if self._anchors is None:
            return [_replay(self._backend, prompt, output, skip_special) for prompt, output in pairs]
        return self._decode_batch(self._backend, pairs, self._anchors, skip_special)

    def _decode_batch(
        self, backend: Tokenizer, pairs: list[tuple[list[int], list[int]]], anchors: frozenset[int], skip_special: bool
    ) -> list[str]:
        """The text after the context's text, if that equals vLLM's stream; else a replay of the stream.

        With a decoder of `_decodes_locally`, a token's text depends on its neighbours only (a) if it is the first
        token decoded, or (b) if it is a byte of a character. For (a), the context begins with an ordinary token, so no
        output token is the first. For (b), text without U+FFFD has only whole characters; the stream then cuts at
        character ends and holds nothing back. If the context does not end with U+FFFD, the prompt too ends with a whole
        character. Otherwise the stream would return text of the prompt, or start anew.
        """
        contexts = [_context(prompt, anchors) for prompt, _ in pairs]
        before = backend.decode_batch(contexts, skip_special)
        whole = backend.decode_batch(
            [context + output for context, (_, output) in zip(contexts, pairs, strict=True)], skip_special
        )
        texts = []
        for (prompt, output), prefix, text in zip(pairs, before, whole, strict=True):
            is_same = text.startswith(prefix) and not prefix.endswith(_REPLACEMENT)
            is_same = is_same and _REPLACEMENT not in text[len(prefix) :]
            texts.append(text[len(prefix) :] if is_same else _replay(backend, prompt, output, skip_special))
        return texts


def _text_token_ids(completion: Completion, sampling: SamplingSpec) -> list[int]:
    """The output tokens that make text: without the token that stopped it, such as the end-of-sequence token."""
    token_ids: list[int] = completion.token_ids.tolist()
    if completion.finish_reason == "stop" and not sampling.include_stop_str_in_output:
        token_ids.pop()
    return token_ids


def _context(prompt: list[int], anchors: frozenset[int]) -> list[int]:
    """The prompt's end from an ordinary token on; the whole prompt if there is none."""
    tail = prompt[-_TAIL_TOKENS:]
    for index, token_id in enumerate(tail):
        if token_id in anchors:
            return tail[index:]
    return prompt


def _anchors(backend: Tokenizer) -> frozenset[int]:
    """Ids of ordinary tokens: those that are never skipped and are no single byte."""
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return frozenset(
        token_id
        for token, token_id in vocabulary.items()
        if token_id not in added and token and not (len(token) == 6 and token.startswith("<0x"))
    )


def _decodes_locally(backend: Tokenizer) -> bool:
    """Whether a token's text depends only on being the first and on adjacent bytes: see `_decode_batch`.

    True for the decoders of Llama 3, Qwen and GPT (ByteLevel), of Llama 2, Mistral and Gemma (spaces, bytes, and at
    most one leading space stripped), of T5 (Metaspace) and of BERT (WordPiece).
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None or decoder["type"] in ("ByteLevel", "Metaspace", "WordPiece"):
        return decoder is not None
    if decoder["type"] != "Sequence":
        return False
    parts = decoder["decoders"]
    names = [part["type"] for part in parts]
    if names not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    puts_spaces = parts[0]["pattern"] == {"String": "▁"} and parts[0]["content"] == " "
    strip = parts[-1] if names[-1] == "Strip" else {"start": 0, "stop": 0}
    return puts_spaces and strip["start"] <= 1 and strip["stop"] == 0


def _replay(backend: Tokenizer, prompt: list[int], output: list[int], skip_special: bool) -> str:
    """The text by vLLM's FastIncrementalDetokenizer, 0.26 to 0.33."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=skip_special)
    pieces = []
    for token_id in output:
        try:
            piece = stream.step(backend, token_id)
        except Exception as error:  # tokenizers raises a bare Exception
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = DecodeStream(skip_special_tokens=skip_special)
            piece = stream.step(backend, token_id)
        pieces.append(piece or "")
    return "".join(pieces)


def _replay_slow(tokenizer: Any, prompt: list[int], output: list[int], skip_special: bool) -> str:
    """The text by vLLM's SlowIncrementalDetokenizer, 0.26 to 0.33, for tokenizers written in Python."""
    added = frozenset(tokenizer.get_added_vocab())
    skipped = frozenset(tokenizer.all_special_tokens if skip_special else ())
    tokens = _tokens(tokenizer, prompt[-_SLOW_OFFSET - 2 :], skip_special)
    read = len(tokens)
    prefix = max(read - _SLOW_OFFSET, 0)
    size = len(tokenizer)
    pieces = []
    for token_id in output:
        tokens += _tokens(tokenizer, [token_id], skip_special) if token_id < size else [""]
        before = _slow_text(tokenizer, tokens[prefix:read], added, skipped)
        text = _slow_text(tokenizer, tokens[prefix:], added, skipped)
        if len(text) > len(before) and not text.endswith(_REPLACEMENT):
            pieces.append(text[len(before) :])
            prefix = read
            read = len(tokens)
    return "".join(pieces)


def _tokens(tokenizer: Any, token_ids: list[int], skip_special: bool) -> list[str]:
    tokens = tokenizer.convert_ids_to_tokens(token_ids, skip_special_tokens=skip_special)
    return ["" if token is None else token for token in tokens]


def _slow_text(tokenizer: Any, tokens: list[str], added: frozenset[str], skipped: frozenset[str]) -> str:
    """The text of tokens. Added tokens are not decoded, and spaces separate them from the rest."""
    if not added:
        return str(tokenizer.convert_tokens_to_string(tokens))
    kept = [token for token in tokens if token not in skipped]
    texts: list[str] = []
    for is_added, group in groupby(kept, added.__contains__):
        run = list(group)
        texts += run if is_added else [tokenizer.convert_tokens_to_string(run)]
    return " ".join(texts)


# Text, the prompt's token ids and the output's → reasoning and answer; either may be None.
