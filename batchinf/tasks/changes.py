"""What `diff` counts whatever the task is, and the words for it. Each task adds its own."""

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError
from batchinf.records import BoolArray


class JobOutput(Protocol):
    """What a comparison needs to know of a job: its folder, its stored spec and its output's columns."""

    folder: str
    spec: dict[str, Any]

    @property
    def schema(self) -> pa.Schema:
        """The output's columns."""


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """Differences, B - A. num: those that are finite, of which the others are; the means are 0 where there are none."""

    num: int
    num_not_finite: int
    mean: float
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What changed in the rows that are in both jobs.

    num_other_prompts: rows whose prompts have other token ids. own: a dataclass of the task. examples: rows of the
    table that `Changes.take` gives, the first that have changed or those that are furthest apart.
    """

    num_both: int
    num_changed: int
    num_other_prompts: int
    num_errors_only_a: int
    num_errors_only_b: int
    own: Any
    examples: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How `diff` compares two jobs of a task.

    begin: checks that the two can be compared and gives what counts; raises OutputError. lines: the words for
    `RowChanges.own`. example_lines: those for one of the examples, joined by the key that is named.
    """

    begin: Callable[[JobOutput, JobOutput, int], "Changes"]
    lines: Callable[[Any], Iterator[str]]
    example_lines: Callable[[str, dict[str, Any]], Iterator[str]]


def _no_begin(a: JobOutput, b: JobOutput, num_examples: int) -> "Changes":
    raise OutputError(f"{a.folder} is of task {a.spec['task']}, whose outputs cannot be compared")


# Of a task that does not say how.
NO_COMPARISON = Comparison(_no_begin, lambda own: iter(()), lambda key, row: iter(()))


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

    def found(self) -> RowChanges:
        """All that was counted."""
        only_a, only_b = self.errors[True, False], self.errors[False, True]
        examples = ({name: row[name] for name in row if name != "_distance"} for row in self.examples)
        return RowChanges(
            self.num_both, self.num_changed, self.num_other_prompts, only_a, only_b, self.own_found(), tuple(examples)
        )

    @abc.abstractmethod
    def own_found(self) -> object:
        """What was counted that is the task's own, as a dataclass."""


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

    def summary(self) -> DeltaSummary:
        """All of them."""
        num = max(1, self.num)
        return DeltaSummary(self.num, self.num_others, self.total / num, self.total_abs / num, self.greatest)


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


def _names(rows: pa.RecordBatch) -> list[str]:
    return list(rows.schema.names)


_MAX_CHARS = 120


def delta_text(deltas: DeltaSummary) -> str:
    """The differences in one line."""
    others = f"; {deltas.num_not_finite:,} more are not finite" if deltas.num_not_finite else ""
    return (
        f"B - A is {deltas.mean:+.2e} on average, |B - A| {deltas.mean_abs:.2e}, at most {deltas.max_abs:.2e}{others}"
    )


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]
