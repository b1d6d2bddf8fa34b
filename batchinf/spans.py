"""What is scored of a row, as token ids."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to be scored: those from `start` on, at least one, given those before, at least one too.

    num_bytes: of the text that they stand for; of a text in several windows the first has all.
    """

    token_ids: list[int]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is scored of a row: a continuation, each choice, or each window of a text. answer: the right choice."""

    spans: tuple[Span, ...]
    answer: int | None = None
