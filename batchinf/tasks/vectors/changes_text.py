"""Words for what changed between two jobs' numbers."""

from collections.abc import Iterator
from typing import Any

from batchinf.tasks.changes import Comparison
from batchinf.tasks.changes_text import clip_value, delta_text
from batchinf.tasks.vectors.changes import ColumnFound, VectorChanges, VectorsFound

_MOST_LABELS = 10
# Columns of the table that are not shown of an example.
_NOT_SHOWN = ("key", "is_", "error_type", "sample_index")


def _lines(found: VectorsFound) -> Iterator[str]:
    for label in found.labels[:_MOST_LABELS]:
        yield f"  label {clip_value(label.a)} -> {clip_value(label.b)}: {label.num_rows:,}"
    if found.rewards is not None and found.rewards.num:
        yield f"reward of {found.rewards.num:,} rows: {delta_text(found.rewards)}"
    for column in found.columns:
        if column.num_vectors:
            yield from _column_lines(column)


def _column_lines(column: ColumnFound) -> Iterator[str]:
    yield f"{column.name} of {column.num_rows:,} rows, {column.num_vectors:,} vectors: {delta_text(column.deltas)}"
    if column.num_same_top1 is not None:
        share = column.num_same_top1 / column.num_vectors
        yield f"  the likeliest token is the same in {column.num_same_top1:,} of them ({share:.2%})"
    if column.mean_cosine is not None:
        yield f"  cosine {column.mean_cosine:.8f} on average, at least {column.min_cosine:.8f}"


def _example_lines(key: str, row: dict[str, Any]) -> Iterator[str]:
    if "label_a" in row:
        yield f"  {key} {row['key']}: label {clip_value(row['label_a'])} -> {clip_value(row['label_b'])}"
        return
    shown = ", ".join(
        f"{name} {value:.6g}" for name, value in row.items() if not name.startswith(_NOT_SHOWN) and value is not None
    )
    yield f"  {key} {row['key']}: {shown}"


COMPARISON = Comparison(VectorChanges, _lines, _example_lines)
