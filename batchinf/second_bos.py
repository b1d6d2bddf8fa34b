"""A second BOS: prompts that begin with two of the tokens that begin a text, of which the model expects one.

It mostly comes of a template, or a text, that writes what the tokenizer adds by itself. Such prompts run as they are;
they are counted.
"""

from collections.abc import Sequence

COLUMN = "has_second_bos"  # of a result, in the journal; the output has no such column


def begins_with_two(token_ids: Sequence[int], bos_token_id: int | None) -> bool:
    """Whether the first two tokens are both the one that begins a text."""
    return len(token_ids) > 1 and token_ids[0] == bos_token_id and token_ids[1] == bos_token_id


def lines(num_rows: int) -> list[str]:
    """For people; nothing where no prompt begins so. num_rows: of the input."""
    if not num_rows:
        return []
    return [
        f"warning: the prompts of {num_rows:,} rows begin with two BOS tokens: the tokenizer, or the chat template, "
        "writes one, so leave it out of the text"
    ]
