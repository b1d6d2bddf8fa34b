"""A line's own `truncate_prompt_tokens`: cuts a prompt as vLLM's server does. The readers of batch files use it."""

from dataclasses import dataclass
from typing import Any, cast

from batchinf.base.errors import RowError
from batchinf.prompts.encoder import Encoder, Side
from batchinf.prompts.openai.lines import Refused, show


@dataclass(frozen=True, slots=True)
class Truncation:
    """How vLLM's server cuts a prompt that is too long."""

    num_tokens: int
    """That are kept; -1: as many as fit."""
    side: Side | None
    """The side that is cut, with the special tokens there. None: the tokenizer's, and special tokens stay."""

    def cut(
        self, ids: list[int], encoder: Encoder | None, *, most: int | None, room: int | None, default_side: Side
    ) -> list[int] | RowError:
        """The ids that are kept, or the row's error.

        encoder: has made the ids of a text; None: they were given. most: the greatest allowed number of tokens; None if
        unknown. room: the number for -1. default_side: what vLLM's tokenizer cuts.
        """
        if most is not None and self.num_tokens > most:
            got = f"got {self.num_tokens:,}; must be at most {most:,}, which max_model_len leaves"
            return RowError("unsupported_request", f"body.truncate_prompt_tokens: {got}")
        kept = room if self.num_tokens < 0 else self.num_tokens
        if kept is None or len(ids) <= kept:
            return ids
        side = self.side or default_side
        if kept > 0 and (self.side is not None or encoder is None):
            return ids[-kept:] if side == "left" else ids[:kept]
        cut = encoder.cut(ids, kept, side) if kept > 0 and encoder is not None else None
        words = f"body.truncate_prompt_tokens: got {kept:,}, which leaves no room beside the special tokens"
        return RowError("unsupported_request", words) if cut is None else cut


def take_truncation(body: dict[str, Any]) -> Truncation | None:
    """The truncation that a body asks for, which is taken out of it. Raises Refused."""
    number = body.pop("truncate_prompt_tokens", None)
    side = body.pop("truncation_side", None)
    if side not in (None, "left", "right"):
        raise Refused(f"body.truncation_side: got {show(side)}; must be left or right")
    if number is None:  # as in vLLM, the side alone means nothing
        return None
    if type(number) is not int or number < -1 or number == 0:
        raise Refused(f"body.truncate_prompt_tokens: got {show(number)}; must be a whole number, at least 1, or -1")
    return Truncation(number, cast(Side | None, side))
