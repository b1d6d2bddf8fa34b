"""What is counted of two jobs' rows side by side, whatever the task; each kind of output adds what is its own."""

import abc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.records import BoolArray

MAX_SHOWN_CHARS = 120


class Changes(abc.ABC):
    """columns, wide: of both jobs, to be compared; the wide ones are given apart. A row that has changed is one whose
    output is another one; each kind says what that is.
    """

    columns: Sequence[str] = ()
    wide: Sequence[str] = ()

    def __init__(self, num_examples: int) -> None:
        self.num_both = self.num_other_prompts = self.num_changed = 0
        self.errors: Counter[tuple[bool, bool]] = Counter()
        self.examples: list[dict[str, Any]] = []
        self.num_examples = num_examples

    def take(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> pa.Table:
        """Compare some rows, and count what is found. The table has a row for each: `key`, `is_same_prompt`,
        `is_changed`, what is the kind's own, and `error_type_a` and `error_type_b`.
        """
        columns: dict[str, Any] = {name: rows.column(name) for name in ("key", "sample_index") if name in _names(rows)}
        columns["is_same_prompt"] = equal(rows, "prompt_hash")
        columns |= self.compare(rows, wide)
        columns |= {f"error_type_{job}": rows.column(f"error_type_{job}") for job in "ab"}
        table = pa.table(columns)
        self.num_both += table.num_rows
        self.num_other_prompts += table.num_rows - int(np.count_nonzero(table["is_same_prompt"].to_numpy()))
        self.num_changed += int(np.count_nonzero(table["is_changed"].to_numpy()))
        errors = (np.asarray(table[f"error_type_{job}"].is_valid()) for job in "ab")
        self.errors.update(zip(*(found.tolist() for found in errors), strict=True))
        self.count(table)
        self.remember(table)
        return table

    @abc.abstractmethod
    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """The columns of the table that are the kind's own, `is_changed` first."""

    @abc.abstractmethod
    def count(self, table: pa.Table) -> None:
        """Count what is the kind's own."""

    def remember(self, table: pa.Table) -> None:
        """Keep examples: the first rows that have changed."""
        wanted = self.num_examples - len(self.examples)
        if wanted > 0:
            self.examples += table.filter(table["is_changed"]).slice(0, wanted).to_pylist()

    def lines(self, key: str, only_a: int, only_b: int) -> Iterator[str]:
        """All of it, for people."""
        alone = f"; {only_a:,} only in A, {only_b:,} only in B" if only_a or only_b else ""
        yield f"rows: {self.num_both:,} in both, by {key}{alone}"
        if self.num_other_prompts:
            yield (
                f"prompts: {self.num_other_prompts:,} rows have other token ids: a changed template, tokenizer or input"
            )
        if self.errors[False, True] or self.errors[True, False]:
            yield f"errors: {self.errors[False, True]:,} rows only in B, {self.errors[True, False]:,} only in A"
        share = self.num_changed / max(1, self.num_both)
        yield f"outputs: {self.num_changed:,} of {self.num_both:,} changed ({share:.2%})"
        yield from self.own_lines()
        for row in self.examples:
            yield from self.example_lines(key, row)

    @abc.abstractmethod
    def own_lines(self) -> Iterator[str]:
        """What is the kind's own, for people."""

    @abc.abstractmethod
    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        """A row of the table, for people."""


class Deltas:
    """Differences, B - A, over all rows: of those that are finite."""

    def __init__(self) -> None:
        self.num = self.num_others = 0
        self.total = self.total_abs = self.greatest = 0.0

    def add(self, deltas: npt.NDArray[np.float64]) -> None:
        """Take in some; one that is not finite is counted apart."""
        known = deltas[np.isfinite(deltas)]
        total, total_abs = float(known.sum()), float(np.abs(known).sum())
        self.add_sums(len(known), len(deltas) - len(known), total, total_abs, float(np.abs(known).max(initial=0.0)))

    def add_sums(self, num: int, num_others: int, total: float, total_abs: float, greatest: float) -> None:
        """Take in some that were summed already."""
        self.num, self.num_others = self.num + num, self.num_others + num_others
        self.total, self.total_abs = self.total + total, self.total_abs + total_abs
        self.greatest = max(self.greatest, greatest)

    def __str__(self) -> str:
        mean, mean_abs = self.total / max(1, self.num), self.total_abs / max(1, self.num)
        others = f"; {self.num_others:,} more are not finite" if self.num_others else ""
        return f"B - A is {mean:+.2e} on average, |B - A| {mean_abs:.2e}, at most {self.greatest:.2e}{others}"


def delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """B - A in float64; 0 where both are the same infinity."""
    a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float64] = b - a
    if not np.isfinite(found).all():
        found[a == b] = 0.0
    return found


def equal(rows: pa.RecordBatch, name: str) -> BoolArray:
    """Whether both jobs have the same there, or both nothing."""
    a, b = (rows.column(f"{name}_{job}") for job in "ab")
    is_same = pc.fill_null(pc.equal(a, b), False)
    return np.asarray(pc.or_(is_same, pc.and_(a.is_null(), b.is_null())).to_numpy(zero_copy_only=False), np.bool_)


def num_common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """How many items from the beginning are the same."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:MAX_SHOWN_CHARS] if isinstance(value, str) and "\n" in text else text[:MAX_SHOWN_CHARS]


def _names(rows: pa.RecordBatch) -> list[str]:
    return list(rows.schema.names)
