"""The prompts of task `logits`, with each row's own positions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import RowError
from batchinf.base.text import name_type
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.logits.section import logits_of


class LogitsPrompts(PromptBuilder):
    """Rows → prompts, with their positions if a column has them."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None) -> None:
        super().__init__(spec, tokenizer, vocab_size, begun_at)
        self._column = logits_of(spec).positions_column

    @property
    def columns(self) -> tuple[str, ...]:
        """See `PromptBuilder`; also the column of positions."""
        positions = () if self._column is None else (self._column,)
        return tuple(dict.fromkeys([*super().columns, *positions]))

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with their positions. A prompt with an error keeps the error."""
        column = self._column
        if column is None:
            return prompts
        return [
            prompt if prompt.error is not None else with_positions(prompt, column, row.values.get(column))
            for row, prompt in zip(rows, prompts, strict=True)
        ]


def with_positions(prompt: Prompt, column: str, value: object) -> Prompt:
    """The prompt with the positions in `value`, or with the error why they are none."""
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
