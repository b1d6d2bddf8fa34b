"""Where the scored tokens of a row begin and end: the pairs and windows of lm-evaluation-harness, token for token.

Encoding is the caller's: these functions are given texts' token ids, and say which texts to encode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.spans import Span

# vLLM runs a prompt only if one more token fits after it, and gives no logprob for a prompt's first token: so much of
# `max_model_len` is not for tokens that others are predicted from.
NUM_RESERVED = 2


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a tokenizer begins texts. prefix: the token that the first token of a text is scored by; None: it has none.

    prefix_text: that token as text; a text that begins with it gets no special tokens. adds: whether others do.
    """

    prefix: int | None
    prefix_text: str
    adds: bool

    @classmethod
    def of(cls, tokenizer: Any, *, is_chat: bool = False, add_bos_token: bool | None = None) -> "Boundary":
        """As lm-evaluation-harness's `hf` model has it. is_chat: a chat template has written the special tokens."""
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        text = "" if prefix is None else str(tokenizer.decode([prefix]))
        return cls(prefix, text, not is_chat and add_bos_token is not False)

    def adds_to(self, text: str) -> bool:
        """Whether this text is encoded with the tokenizer's special tokens."""
        return self.adds and not (self.prefix_text and text.startswith(self.prefix_text))


def split_spaces(context: str, continuation: str) -> tuple[str, str]:
    """White space at the end of the context goes to the continuation, as tokens begin with it and do not end so."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def pair(context_ids: list[int], whole_ids: list[int]) -> tuple[list[int], list[int]]:
    """`TemplateLM._encode_pair` after encoding: the tokens of the whole behind as many as the context alone has."""
    return context_ids, whole_ids[len(context_ids) :]


def prefixed(prefix: int, continuation_ids: list[int]) -> tuple[list[int], list[int]]:
    """What stands for an empty context: the prefix, unless the continuation begins with it."""
    if continuation_ids[:1] == [prefix]:
        return continuation_ids[:1], continuation_ids[1:]
    return [prefix], continuation_ids


def windows(token_ids: Sequence[int], prefix: int, max_seq_len: int, overlap: int) -> Iterator[tuple[list[int], int]]:
    """A text's windows, in each the context and then what is scored, and where that begins.

    `make_disjoint_window` of `get_rolling_token_windows` with `context_len = overlap + 1`: each token is scored once,
    the first given the prefix; the last window is filled up with context. max_seq_len: most tokens of a window that
    others are predicted from; it has one more.
    """
    if not 0 <= overlap < max_seq_len:
        raise ValueError(f"got an overlap of {overlap} for windows of {max_seq_len} tokens")
    ids = list(token_ids)
    stop = min(max_seq_len, len(ids))
    if stop:
        yield [prefix, *ids[:stop]], 1
    while stop < len(ids):
        num_scored = min(len(ids) - stop, max_seq_len - overlap)
        stop += num_scored
        start = stop - max_seq_len - 1
        yield ids[start:stop], stop - num_scored - start


def span_of(context_ids: list[int], continuation_ids: list[int], num_bytes: int, most: int | None) -> Span:
    """A continuation after its context, of which at least the last token stays where both are over `most` tokens."""
    ids = context_ids + continuation_ids
    ids = ids if most is None else ids[-most:]
    return Span(ids, len(ids) - len(continuation_ids), num_bytes)
