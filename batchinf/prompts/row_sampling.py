"""The sampling that rows set for themselves: `sampling.columns`, and the fields of batch files."""

import contextlib
import decimal
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import shorten
from batchinf.prompts.chat import without_nulls
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.source.types import is_json_column, is_text
from batchinf.spec.reference import field_docs
from batchinf.spec.sampling import MAPPINGS, PER_ROW_FIELDS, STRUCTURE_FIELDS, SamplingSpec, allowed_structure

# Size of the cache of checked settings. To check one costs about 20 µs, a hit less than 1 µs.
_MOST_KNOWN = 4096
_SHOWN_CHARS = 60
# What a row cannot have.
_OF_A_SPEC = ", or {file: path}"
_LISTS = frozenset({"stop", "stop_token_ids", "allowed_token_ids", "bad_words", "structured_outputs.choice"})
_TEXTS = frozenset({"stop", "bad_words", *STRUCTURE_FIELDS})
# `field_docs` knows these too, but takes 0.3 s in each process, and the first row would wait for that.
WHOLE_FIELDS = frozenset({"max_tokens", "min_tokens", "n", "seed", "thinking_token_budget", "top_k"})


class RowSampling:
    """Row → its sampling. columns: the input columns that hold it, without repeats."""

    def __init__(self, sampling: SamplingSpec, vocab_size: int | None = None) -> None:
        """sampling: the job's, resolved. `sampling.columns` maps the fields that rows set to their columns. vocab_size:
        ids at or above it are refused, as vLLM refuses them; None: not known."""
        self._vocab_size = vocab_size
        self._fields = dict(sampling.columns)
        self.is_set = bool(self._fields)  # whether rows have values of their own
        self._job = sampling.model_dump(exclude={"columns", "structured_outputs"})
        # A schema is long and nearly always the same for all rows, so it is not checked again for each row.
        self._structure = {"structured_outputs": sampling.structured_outputs}
        self._known: dict[tuple[Any, ...], SamplingSpec | RowError] = {}
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(self._fields.values()))

    def of(self, values: Mapping[str, Any]) -> SamplingSpec | RowError | None:
        """The sampling of a row with these values, or its error; None if rows have no values of their own.

        A null or missing value means the job's value.
        """
        if not self._fields:
            return None
        return self.with_values({field: values.get(column) for field, column in self._fields.items()})

    def with_values(self, values: Mapping[str, Any]) -> SamplingSpec | RowError:
        """The job's sampling with these values in place of its own, or the row's error. Null: the job's value."""
        # 1, 1.0 and True are equal and have one hash, but only some of them may be valid.
        key = (*values, *map(_hashable, values.values()))
        sampling = self._known.get(key)
        if sampling is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            sampling = self._known[key] = self._make(values)
        return sampling

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their sampling. A prompt with an error keeps the error."""
        return [self._applied(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

    def _applied(self, row: Row, prompt: Prompt) -> Prompt:
        sampling = self.of(row.values)
        if isinstance(sampling, RowError):
            return replace(prompt, error=prompt.error or sampling)
        return replace(prompt, sampling=sampling)  # an error row has as many samples, too

    def _make(self, row_values: Mapping[str, Any]) -> SamplingSpec | RowError:
        values = {field: _as_in_a_spec(field, value) for field, value in row_values.items() if value is not None}
        for field in values.keys() & STRUCTURE_FIELDS.keys():
            values["structured_outputs"] = {STRUCTURE_FIELDS[field]: values.pop(field)}
        # SamplingSpec may read a mapping as the name of a column. In a row that is an error, and so is True.
        values |= {field: True for field, value in values.items() if _names_column(field, value)}
        try:
            sampling = SamplingSpec.model_validate({**self._job, **values})
        except ValidationError as error:
            return RowError("invalid_sampling", self._reason(error, row_values))
        for field in ("logit_bias", "allowed_token_ids"):
            highest = max(getattr(sampling, field) or (), default=0)
            if self._vocab_size is not None and highest >= self._vocab_size:
                last = self._vocab_size - 1
                message = (
                    f"sampling.{field}{self._column(field)}: got token {highest}; the model's vocabulary ends at {last}"
                )
                return RowError("invalid_sampling", message)
        return sampling if "structured_outputs" in values else sampling.model_copy(update=self._structure)

    def _column(self, field: str, inner: str = "") -> str:
        column = self._fields.get(field + inner, self._fields.get(field))
        return "" if column is None else f" (column '{column}')"

    def _reason(self, error: ValidationError, row_values: Mapping[str, Any]) -> str:
        first = error.errors(include_url=False)[0]
        context = first.get("ctx", {})
        field = str(context.get("field") or "") if not first["loc"] else str(first["loc"][0])
        inner = f".{context['field']}" if first["loc"] and context.get("field") else ""
        column = self._column(field, inner)
        if first["type"] == "wrong":
            return f"sampling.{field}{inner}{column}: {context['reason'].removesuffix(_OF_A_SPEC)}"
        doc = field_docs()[f"sampling.{field}"]
        value = row_values.get(field)
        shown = shorten(f"'{value}'" if isinstance(value, str) else str(value), _SHOWN_CHARS)
        return f"sampling.{field}{column}: got {shown}; must be {doc.allowed}{_empty_hint(field, value)}"


def _empty_hint(field: str, value: Any) -> str:
    has_empty = field in _TEXTS and "" in (value if isinstance(value, list) else (value,))
    return "; leave empty texts out, or give null for the job's own" if has_empty else ""


def _names_column(field: str, value: Any) -> bool:
    """Whether SamplingSpec would read the value as the name of a column."""
    is_column = isinstance(value, dict) and (field not in MAPPINGS or [*value] == ["column"])
    return is_column and field in PER_ROW_FIELDS


def check_sampling_columns(sampling: SamplingSpec, schema: pa.Schema) -> None:
    """Raise SpecError if a column has a type that can hold no valid value of its field. The columns must exist.

    A column of mixed JSON values passes: its values are checked row by row.
    """
    for field, column in sampling.columns.items():
        type = schema.field(column).type
        if not is_json_column(schema.field(column)) and not _may_fit(field, type):
            words = "text, or nothing at all" if is_text(type) else str(type)
            kind = STRUCTURE_FIELDS.get(field)
            allowed = (
                field_docs()[f"sampling.{field}"].allowed
                if kind is None
                else allowed_structure(kind).removesuffix(_OF_A_SPEC)
            )
            raise SpecError(
                f"sampling.{field}: the column '{column}' holds {words}; "
                f"each value must be {allowed}, or null for the job's own"
            )


def _may_fit(field: str, type: pa.DataType) -> bool:
    if pa.types.is_null(type):
        return True
    is_list = any(test(type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    if is_list and field in _LISTS:
        return _may_fit(field, type.value_type) if not pa.types.is_nested(type.value_type) else False
    if field in MAPPINGS or STRUCTURE_FIELDS.get(field) in ("json", "structural_tag"):
        return is_text(type) or pa.types.is_struct(type) or pa.types.is_map(type)
    if field in _TEXTS:
        return is_text(type)
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type))


def _hashable(value: Any) -> Any:
    kind = value.__class__
    return repr(value) if kind is list or kind is dict else (kind, value)


def setting(field: str, value: Any) -> str:
    """A field of sampling with its value, in words: `stop ["END"]`, `max_tokens what fits`."""
    if field == "max_tokens" and value is None:
        return "max_tokens what fits"
    return f"{field} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"


def _as_in_a_spec(field: str, value: Any) -> Any:
    if field in WHOLE_FIELDS:
        value = whole_number(value)
    if field in MAPPINGS or field in STRUCTURE_FIELDS:
        value = _mapping(value, is_parsed=STRUCTURE_FIELDS.get(field) not in ("regex", "grammar"))
    return float(value) if isinstance(value, decimal.Decimal) and value.is_finite() else value


def _mapping(value: Any, *, is_parsed: bool) -> Any:
    """A mapping or list, from JSON text, or from Arrow, which gives null to a key that only other rows have.

    is_parsed: whether text is JSON. As JSON text, a mapping keeps its nulls.
    """
    if isinstance(value, str):
        if is_parsed:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(value)
        return value
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):  # of Arrow's type `map`
        value = dict(value)
    return without_nulls(value)


def whole_number(value: Any) -> Any:
    """A whole number as int. Columns with nulls often hold whole numbers as floats, and databases as decimals."""
    if isinstance(value, decimal.Decimal):  # `value % 1` fails for more than 28 digits
        is_whole = value.is_finite() and value == value.to_integral_value()
    else:
        is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole else value
