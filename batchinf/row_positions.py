"""A row's own positions in its prompt, from a list column, checked against the prompt's tokens."""

from collections.abc import Sequence
from dataclasses import replace

from batchinf.errors import RowError
from batchinf.records import Prompt
from batchinf.source import Row
from batchinf.spec import JobSpec
from batchinf.words import name_type


class RowPositions:
    """Row → its positions. columns: the input columns that hold them: one, or none."""

    def __init__(self, spec: JobSpec) -> None:
        positions = None if spec.logits is None else spec.logits.positions
        self.columns: tuple[str, ...] = () if positions is None or isinstance(positions, str) else (positions.column,)

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their positions; one that has an error keeps it."""
        if not self.columns:
            return list(prompts)
        [column] = self.columns
        return [
            prompt if prompt.error is not None else _placed(prompt, column, row.values.get(column))
            for row, prompt in zip(rows, prompts, strict=True)
        ]


def _placed(prompt: Prompt, column: str, value: object) -> Prompt:
    num_tokens = len(prompt.token_ids)
    if not isinstance(value, list | tuple) or not value:
        got = "an empty list" if isinstance(value, list | tuple) else name_type(value)
        return _failed(prompt, f"got {got} in column '{column}'; expected a list of positions")
    for position in value:
        if isinstance(position, bool) or not isinstance(position, int):
            return _failed(prompt, f"got {name_type(position)} among the positions in column '{column}'")
        if not -num_tokens <= position < num_tokens:
            most = f"the prompt has {num_tokens:,} tokens, so that {num_tokens - 1:,} is the last"
            return _failed(prompt, f"got position {position} in column '{column}'; {most}")
    return replace(prompt, positions=tuple(position % num_tokens for position in value))


def _failed(prompt: Prompt, message: str) -> Prompt:
    return replace(prompt, error=RowError("invalid_positions", message))
