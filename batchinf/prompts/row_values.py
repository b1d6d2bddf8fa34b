"""Values that a row sets for itself from its columns: sampling parameters and LoRA adapter."""

import decimal
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import list_names, name_type, shorten
from batchinf.model.lora import adapter_places
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.source.types import is_json_column
from batchinf.spec.docs import field_docs
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS, SamplingSpec

# Distinct settings that are remembered: one costs some 20 µs to check, and to find again less than 1.
_MOST_KNOWN = 4096
_SHOWN_CHARS = 60
_LISTS = frozenset({"stop", "stop_token_ids"})
_TEXTS = frozenset({"stop"})


class RowSampling:
    """Row → its sampling. columns: the input columns that hold it, each once."""

    def __init__(self, sampling: SamplingSpec) -> None:
        """sampling: the job's, resolved; `sampling.columns` says of which fields each row has its own value."""
        self._fields = dict(sampling.columns)
        self._job = sampling.model_dump(exclude={"columns", "structured_outputs"})
        # Long, and the same for all rows, or nearly all: not checked again for each.
        self._structure = {"structured_outputs": sampling.structured_outputs}
        self._known: dict[tuple[Any, ...], SamplingSpec | RowError] = {}
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(self._fields.values()))

    def of(self, values: Mapping[str, Any]) -> SamplingSpec | RowError | None:
        """What a row with these values is sampled with, or why it cannot be; None is as the job says.

        A null, or no value at all, is the job's value.
        """
        if not self._fields:
            return None
        return self.with_values({field: values.get(column) for field, column in self._fields.items()})

    def with_values(self, given: Mapping[str, Any]) -> SamplingSpec | RowError:
        """The job's sampling with these values of fields in place of its own; null is the job's."""
        # 1, 1.0 and true are equal and hash alike, and are not the same.
        key = (*given, *map(_hashable, given.values()))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._make(given)
        return found

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their sampling; one that has an error keeps it."""
        if not self._fields:
            return list(prompts)
        return [self._applied(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

    def _applied(self, row: Row, prompt: Prompt) -> Prompt:
        if prompt.error is not None:
            return prompt
        found = self.of(row.values)
        return replace(prompt, error=found) if isinstance(found, RowError) else replace(prompt, sampling=found)

    def _make(self, given: Mapping[str, Any]) -> SamplingSpec | RowError:
        own = {field: _as_in_a_spec(field, value) for field, value in given.items() if value is not None}
        try:
            # In a spec a mapping names a column; in a row it is a value that cannot be.
            own |= {field: True for field, value in own.items() if isinstance(value, dict) and field in PER_ROW_FIELDS}
            made = SamplingSpec.model_validate({**self._job, **own})
            return made if "structured_outputs" in own else made.model_copy(update=self._structure)
        except ValidationError as error:
            return RowError("invalid_sampling", self._reason(error, given))

    def _reason(self, error: ValidationError, given: Mapping[str, Any]) -> str:
        first = error.errors(include_url=False)[0]
        context = first.get("ctx", {})
        field = str(context.get("field") or "") if not first["loc"] else str(first["loc"][0])
        column = f" (column '{self._fields[field]}')" if field in self._fields else ""
        if first["type"] == "wrong":
            return f"sampling.{field}{column}: {context['reason']}"
        doc, value = field_docs()[f"sampling.{field}"], given.get(field)
        shown = shorten(f"'{value}'" if isinstance(value, str) else str(value), _SHOWN_CHARS)
        return f"sampling.{field}{column}: got {shown}; must be {doc.allowed}"


def check_sampling_columns(sampling: SamplingSpec, schema: pa.Schema) -> None:
    """Raise SpecError where a column is of a type of which no value fits its field; the columns must be there.

    A column of mixed JSON values is let through: each row is looked at when it comes.
    """
    for field, column in sampling.columns.items():
        found = schema.field(column)
        if not is_json_column(found) and not _may_fit(field, found.type):
            words = "text, or nothing at all" if _is_text(found.type) else str(found.type)
            raise SpecError(
                f"sampling.{field}: the column '{column}' holds {words}; "
                f"each value must be {field_docs()[f'sampling.{field}'].allowed}, or null for the job's own"
            )


def wanted_columns(sampling: SamplingSpec) -> Iterator[tuple[str, str]]:
    """The dotted field and the column of each value that rows have of their own."""
    return ((f"sampling.{field}", column) for field, column in sampling.columns.items())


def _may_fit(field: str, type: pa.DataType) -> bool:
    if pa.types.is_null(type):
        return True
    is_list = any(test(type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    if is_list and field in _LISTS:
        return _may_fit(field, type.value_type) if not pa.types.is_nested(type.value_type) else False
    if field in _TEXTS:
        return _is_text(type)
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type))


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type))


def _hashable(value: Any) -> Any:
    kind = value.__class__
    return repr(value) if kind is list or kind is dict else (kind, value)


def setting(field: str, value: Any) -> str:
    """A field of sampling with its value, as a spec would have it: `stop ["END"]`, `max_tokens what fits`."""
    if field == "max_tokens" and value is None:
        return "max_tokens what fits"
    return f"{field} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"


def _as_in_a_spec(field: str, value: Any) -> Any:
    """A number as the spec has it: columns with nulls often hold whole numbers as floats, databases decimals."""
    if isinstance(value, decimal.Decimal) and value.is_finite():
        value = float(value) if value % 1 else int(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer() and _is_whole(field):
        return int(value)
    return value


def _is_whole(field: str) -> bool:
    return field_docs()[f"sampling.{field}"].allowed.startswith("a whole number")


class RowAdapter:
    """Row → the name of its adapter. columns: the input column that holds it, if one does."""

    def __init__(self, spec: JobSpec) -> None:
        self._names = tuple(adapter_places(spec.model))
        self._column = spec.input.adapter_column
        self.columns: tuple[str, ...] = () if self._column is None else (self._column,)

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their adapters; one that has an error keeps it."""
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
