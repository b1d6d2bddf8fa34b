"""Columns that `head` and `export` compute from the output: the best choice's text, and how sure the model was."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.tasks.base import ShownColumns

CONFIDENCE = "confidence"
LABEL = "label"


@dataclass(frozen=True, slots=True)
class ComputedColumn:
    """A column that the output does not store."""

    type: pa.DataType
    sources: tuple[str, ...]
    """The columns of the output from which it is computed."""
    values: Callable[[pa.Table | pa.RecordBatch], pa.Array | pa.ChunkedArray]
    """From rows that have these columns."""


def computed_columns(shown: ShownColumns, names: Collection[str]) -> dict[str, ComputedColumn]:
    """The columns that may be asked for beside those of the output. names: of the output's own columns."""
    found: dict[str, ComputedColumn] = {}
    if shown.label_logprob is not None:
        source = shown.label_logprob
        found[CONFIDENCE] = ComputedColumn(pa.float64(), (source,), lambda rows: pc.exp(rows[source]))
    elif shown.choice_sums is not None:
        sums = shown.choice_sums
        found[CONFIDENCE] = ComputedColumn(
            pa.float64(), (sums,), lambda rows: pa.array(map(best_share, rows[sums].to_pylist()), pa.float64())
        )
    if (best := next(iter(shown.choices), None)) is not None:
        of_row = () if shown.choices_column is None else (shown.choices_column,)
        if of_row or shown.choices[best]:
            found[LABEL] = ComputedColumn(pa.string(), (best, *of_row), lambda rows: _labels(shown, best, rows))
    return {name: column for name, column in found.items() if name not in names and {*column.sources} <= {*names}}


def _labels(shown: ShownColumns, best: str, rows: pa.Table | pa.RecordBatch) -> pa.Array:
    """The texts of the best choices; null for a row without one."""
    columns = [best] if shown.choices_column is None else [best, shown.choices_column]
    return pa.array((_text(row[best], shown.texts_of(row)) for row in rows.select(columns).to_pylist()), pa.string())


def _text(place: int | None, texts: Sequence[str]) -> str | None:
    return texts[place] if place is not None and 0 <= place < len(texts) else None


def confidence(shown: ShownColumns, row: Mapping[str, Any]) -> float | None:
    """The probability of a row's label or best choice; None without any."""
    if shown.label_logprob is None:
        return best_share(row.get(shown.choice_sums or ""))
    logprob = row.get(shown.label_logprob)
    return None if logprob is None else math.exp(logprob)


def best_share(sums: Sequence[float] | None) -> float | None:
    """The probability of the best choice among all, from their logprobs; None without any."""
    if not sums or any(math.isnan(value) for value in sums):
        return None
    best = max(sums)
    return None if math.isinf(best) else 1 / sum(math.exp(value - best) for value in sums)
