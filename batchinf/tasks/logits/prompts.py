"""Prompts of task logits: the positions that each row names, and the token ids of the spec's tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import name_type
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.logits.section import logits_of

_MOST_SHOWN = 6


class LogitsPrompts(PromptBuilder):
    """Rows → prompts with their positions, if a column has them."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> None:
        super().__init__(spec, tokenizer, vocab_size, begun_at)
        self._positions = RowPositions(spec)

    @property
    def columns(self) -> tuple[str, ...]:
        """See `PromptBuilder`; also the column of positions."""
        return tuple(dict.fromkeys([*super().columns, *self._positions.columns]))

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """See `PromptBuilder`."""
        return self._positions.apply(rows, prompts)


class RowPositions:
    """Row → its positions. columns: the input columns that hold them: one, or none."""

    def __init__(self, spec: JobSpec) -> None:
        positions = logits_of(spec).positions
        self.columns: tuple[str, ...] = () if isinstance(positions, str) else (positions.column,)

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


def ids_of(tokens: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of texts that are one token each. Raises SpecError."""
    found = []
    for number, text in enumerate(tokens):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            shown = ", ".join(f"{tokenizer.decode([id])!r} ({id})" for id in ids[:_MOST_SHOWN])
            more = f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else ""
            raise SpecError(f"logits.tokens[{number}]: got {text!r}, which is {len(ids)} tokens: {shown}{more}; "
                            "must be one token, perhaps with a space before it")  # fmt: skip
        if ids[0] in found:
            raise SpecError(
                f"logits.tokens[{number}]: got {text!r}, which is the same token as another; name each once"
            )
        found.append(int(ids[0]))
    return tuple(found)
