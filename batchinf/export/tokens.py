"""The stored tokens of a row, put together from the columns that hold their ids, logprobs, ranks and alternatives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinf.prompts.encoder import show

PREFIXES = ("", "prompt_")
"""Of the columns of output tokens and of prompt tokens."""
_MOST_BEGUN = 8  # tokens of a character that is not complete; a valid one has at most 4 bytes


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A token at its position. A value is None where it has none, as at a prompt's first token."""

    id: int
    logprob: float | None
    rank: int | None
    top: list[tuple[int, float]] | None
    """Ids and logprobs of the likeliest tokens, the likeliest first; None if the job stores none."""


def token_columns(prefix: str, schema: pa.Schema) -> list[str]:
    """The columns of an output from which `tokens_of` reads; none if it does not store ids with logprobs."""
    ids = f"{prefix}token_ids"
    logprobs = f"{prefix}logprobs"
    ranks = f"{prefix}ranks"
    if not {ids, logprobs, ranks} <= {*schema.names}:
        return []
    return [ids, logprobs, ranks, *(name for name in _top(prefix) if name in schema.names)]


def tokens_of(prefix: str, row: Mapping[str, Any]) -> Iterator[StoredToken]:
    """The tokens of a row. row: the values of `token_columns`, lists of one length."""
    ids, logprobs, ranks = (row[f"{prefix}{name}"] for name in ("token_ids", "logprobs", "ranks"))
    top_ids, top_logprobs = (row.get(name) for name in _top(prefix))
    for place, (token_id, logprob, rank) in enumerate(zip(ids, logprobs, ranks, strict=True)):
        top = None
        if top_ids is not None and top_logprobs is not None and top_ids[place] is not None:
            top = list(zip(top_ids[place], top_logprobs[place], strict=True))
        yield StoredToken(token_id, logprob, rank, top)


def _top(prefix: str) -> tuple[str, str]:
    return f"{prefix}top_token_ids", f"{prefix}top_logprobs"


class TokenTexts:
    """The texts of tokens by one tokenizer, as in the answers of vLLM's server: joined, they are the text of the row.

    A token that ends within a character adds nothing, and the one that completes it adds the whole character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def spell(self, tokens: Iterable[StoredToken]) -> Iterator[tuple[str, list[str]]]:
        """The text that each token adds to those before it, and what each of its alternatives would add."""
        begun: list[int] = []  # tokens with the beginning of a character
        for token in tokens:
            others = [_whole(self._text(begun, other)) for other, _ in token.top or ()]
            text = self._text(begun, token.id)
            if len(begun) == _MOST_BEGUN or _whole(text):
                begun = []
                yield text, others
                continue
            begun.append(token.id)
            yield "", others

    def _text(self, begun: Sequence[int], token_id: int) -> str:
        if begun:
            return show(self._tokenizer, [*begun, token_id])
        text = self._texts.get(token_id)
        if text is None:
            # Beside itself, because tokenizers drop the space at the beginning of a text.
            alone = show(self._tokenizer, [token_id])
            text = show(self._tokenizer, [token_id, token_id]).removeprefix(alone)
            text = self._texts[token_id] = alone if "\ufffd" in alone else text
        return text


def _whole(text: str) -> str:
    """The text, or nothing if it ends within a character."""
    return "" if text.endswith("\ufffd") else text
