"""The stored tokens of a row, put together from the columns that hold their ids, logprobs, ranks and alternatives."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchinf.prompts.encoder import show, token_texts

PREFIXES = ("", "prompt_")
"""Of the columns of output tokens and of prompt tokens."""


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
    """The texts of tokens by one tokenizer. Each is decoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def text(self, token_id: int) -> str:
        """The token's text, or its name in the vocabulary if it holds a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            [text] = token_texts(self._tokenizer, [token_id])
            self._texts[token_id] = text
        return text

    def utf8(self, token_id: int) -> list[int] | None:
        """The bytes of the token's text; None if it holds a part of a character."""
        if token_id not in self._bytes:
            text = show(self._tokenizer, [token_id])
            self._bytes[token_id] = None if "\ufffd" in text else [*text.encode()]
        return self._bytes[token_id]
