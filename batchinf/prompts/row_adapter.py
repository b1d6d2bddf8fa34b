"""The LoRA adapter that a row names in a column. Prompt builders use it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import RowError
from batchinf.base.text import list_names, name_type, shorten
from batchinf.model.lora import adapter_places
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec

_SHOWN_CHARS = 60


class RowAdapter:
    """Row → the name of its adapter. columns: the input column that holds it, or none."""

    def __init__(self, spec: JobSpec) -> None:
        self._names = tuple(adapter_places(spec.model))
        self.is_set = bool(self._names)  # whether prompts have adapters
        self._column = spec.input.adapter_column
        self.columns: tuple[str, ...] = () if self._column is None else (self._column,)

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their adapters. A prompt with an error keeps the error."""
        if not self._names:
            return list(prompts)
        if self._column is None:
            [name] = self._names
            return [replace(prompt, adapter=name) for prompt in prompts]
        return [
            prompt if prompt.error is not None else self._applied(prompt, row.values.get(self._column))
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def _applied(self, prompt: Prompt, value: Any) -> Prompt:
        if value is None:
            return prompt
        if isinstance(value, str) and value in self._names:
            return replace(prompt, adapter=value)
        shown = f"'{shorten(value, _SHOWN_CHARS)}'" if isinstance(value, str) else name_type(value)
        got = f"got {shown} in column '{self._column}'"
        message = f"{got}; the adapters are: {list_names(sorted(self._names))}; null is the plain model"
        return replace(prompt, token_ids=[], error=RowError("unknown_adapter", message))
