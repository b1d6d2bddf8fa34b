"""Base classes of what `diff` counts, and what tasks use to compare columns. Each task adds its own counts."""

import abc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.ragged import Ragged, to_ragged
from batchinf.records import BoolArray
from batchinf.tasks.columns import IMAGE_DIGESTS

Floats = npt.NDArray[np.float64]


class JobOutput(Protocol):
    """The job data that a comparison needs: its folder, its stored spec and its output's columns."""

    folder: str
    spec: dict[str, Any]

    @property
    def own_schema(self) -> pa.Schema:
        """The output's columns without copies of input columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSummary:
    """Differences B - A. The mean and the greatest are of the finite ones, and 0 if there are none."""

    num: int
    """How many are finite."""
    num_not_finite: int
    mean: float
    mean_abs: float
    max_abs: float

    def __str__(self) -> str:
        others = f"; {self.num_not_finite:,} more are not finite" if self.num_not_finite else ""
        return f"B - A is {self.mean:+.2e} on average, |B - A| {self.mean_abs:.2e}, at most {self.max_abs:.2e}{others}"


class TaskChanges(abc.ABC):
    """What a task has counted: a dataclass. `--json` shows its fields as `changes.own`."""

    __slots__ = ()

    def headline(self, num_changed: int, num_both: int) -> Iterator[str]:
        """The lines that come first: how much has changed for a reader."""
        yield f"outputs: {num_changed:,} of {num_both:,} changed ({num_changed / max(1, num_both):.2%})"

    @abc.abstractmethod
    def lines(self) -> Iterator[str]:
        """The counts as text."""

    @abc.abstractmethod
    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        """One of the examples as text. key: the name of the column that the rows were joined by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """What changed in the rows that are in both jobs."""

    num_both: int = 0
    num_changed: int = 0
    num_other_prompts: int = 0
    """Rows whose prompts differ in token ids or images."""
    num_other_images: int = 0
    """Those of them whose images differ. 0 if one of the jobs has no images."""
    num_errors_only_a: int = 0
    num_errors_only_b: int = 0
    own: TaskChanges
    """What the task has counted."""
    examples: tuple[dict[str, Any], ...]
    """Rows of the table of `Changes.take`: the first changed rows, or the rows with the greatest distance."""


class Changes(abc.ABC):
    """Counts what changed between two jobs of a task. Each task defines when the output of a row has changed."""

    wide: Sequence[str] = ()
    """Columns of vectors, which can be large."""
    columns: list[str]
    """The other columns of both jobs that are needed."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int, columns: Sequence[str]) -> None:
        """columns: those of the task. Only columns that both jobs have are compared."""
        names = ("prompt_hash", IMAGE_DIGESTS, *columns, "error_type")
        self.columns = [name for name in names if name in a.own_schema.names and name in b.own_schema.names]
        self._num_examples = num_examples
        self._examples: list[tuple[float, dict[str, Any]]] = []
        self._counts: Counter[str] = Counter()

    def take(self, rows: pa.RecordBatch) -> pa.Table:
        """Compare rows of both jobs, whose columns are named `…_a` and `…_b`.

        The table has one row for each of them, with the columns `key`, `is_same_prompt`, `is_changed`, the task's own
        columns, `error_type_a` and `error_type_b`.
        """
        columns: dict[str, Any] = {name: rows[name] for name in ("key", "sample_index") if name in rows.schema.names}
        columns["is_same_prompt"] = equal(rows, "prompt_hash")
        columns |= self._compare(rows)
        columns |= self._both(rows, "error_type")
        a, b = (np.asarray(errors.is_valid()) for errors in both_columns(rows, "error_type"))
        self._counts.update(
            num_both=rows.num_rows,
            num_changed=int(np.count_nonzero(columns["is_changed"])),
            num_other_prompts=int(np.count_nonzero(~columns["is_same_prompt"])),
            num_other_images=int(np.count_nonzero(~self._are_same_images(rows))),
            num_errors_only_a=int(np.count_nonzero(a & ~b)),
            num_errors_only_b=int(np.count_nonzero(b & ~a)),
        )
        table = pa.table(columns)
        distances = self._distances(table)
        furthest = np.argsort(-distances, kind="stable")[: self._num_examples]
        examples = zip(distances[furthest].tolist(), table.take(pa.array(furthest)).to_pylist(), strict=True)
        by_distance = sorted([*self._examples, *examples], key=lambda example: -example[0])
        self._examples = by_distance[: self._num_examples]
        return table

    def _are_same_images(self, rows: pa.RecordBatch) -> BoolArray:
        if IMAGE_DIGESTS not in self.columns:
            return np.ones(rows.num_rows, np.bool_)
        a, b = (pc.binary_join(digests, " ") for digests in both_columns(rows, IMAGE_DIGESTS))
        # Of an image that could not be loaded, nothing is known.
        return np.asarray(pc.fill_null(pc.equal(a, b), True).to_numpy(zero_copy_only=False), np.bool_)

    @abc.abstractmethod
    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """Make the task's own counts. Returns the task's columns of the table, `is_changed` first."""

    def _distances(self, table: pa.Table) -> Floats:
        """The distance of A and B in each row; 0 if they are the same. The most distant rows become the examples."""
        return np.asarray(table["is_changed"], np.float64)

    def _both(self, rows: pa.RecordBatch, *names: str) -> dict[str, pa.Array]:
        return {f"{name}_{job}": rows[f"{name}_{job}"] for name in names if name in self.columns for job in "ab"}

    def summary(self) -> RowChanges:
        """All counts."""
        examples = tuple(row for distance, row in self._examples if distance > 0)
        return RowChanges(**self._counts, own=self._task_changes(), examples=examples)

    @abc.abstractmethod
    def _task_changes(self) -> TaskChanges:
        """What the task has counted."""


class Comparison(Protocol):
    """Begins the comparison of two jobs of a task. Raises OutputError if they cannot be compared."""

    def __call__(self, a: JobOutput, b: JobOutput, num_examples: int) -> Changes: ...


class Deltas:
    """Differences, B - A, over all rows."""

    def __init__(self) -> None:
        self._sums = np.zeros(4)
        self._greatest = 0.0

    def add(self, deltas: Floats) -> None:
        """Add differences."""
        known = deltas[np.isfinite(deltas)]
        absolute = np.abs(known)
        sums = [len(known), len(deltas) - len(known), known.sum(), absolute.sum()]
        self.add_sums(sums, absolute.max(initial=0.0))

    def add_sums(self, sums: Sequence[float], greatest: float) -> None:
        """Add differences that are summed already.

        sums: the number of finite ones, the number of others, the sum of the finite ones, the sum of their absolute
        values. greatest: the greatest of these absolute values.
        """
        self._sums += sums
        self._greatest = max(self._greatest, float(greatest))

    def summary(self) -> DeltaSummary:
        """The summary of all differences."""
        num, num_others, total, total_abs = self._sums.tolist()
        return DeltaSummary(
            num=int(num),
            num_not_finite=int(num_others),
            mean=total / max(1, num),
            mean_abs=total_abs / max(1, num),
            max_abs=self._greatest,
        )


def delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
    """B - A in float64; 0 if both are the same infinity."""
    a = a.astype(np.float64, copy=False)
    b = b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        deltas: Floats = b - a
    if not np.isfinite(deltas).all():
        deltas[a == b] = 0.0
    return deltas


def number_deltas(rows: pa.RecordBatch, name: str, to: Deltas) -> pa.Array:
    """B - A of a column of numbers; null where A or B is null. Adds all other differences to `to`."""
    a, b = both_columns(rows, name)
    is_null = np.asarray(a.is_null()) | np.asarray(b.is_null())
    deltas = delta(*(np.asarray(numbers.to_numpy(zero_copy_only=False)) for numbers in (a, b)))
    to.add(deltas[~is_null])
    return pa.array(deltas, mask=is_null)


def both_columns(rows: pa.RecordBatch, name: str) -> list[Any]:
    """The column of A and the column of B."""
    return [rows[f"{name}_{job}"] for job in "ab"]


def list_pair(rows: pa.RecordBatch, name: str) -> list[Ragged]:
    """The column of A and the column of B, which have lists."""
    return [to_ragged(column) for column in both_columns(rows, name)]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """How many rows have the value `a` in job A and `b` in job B. The two may be the same."""

    a: str | None
    b: str | None
    num_rows: int


def value_changes(pairs: Counter[tuple[str | None, str | None]]) -> tuple[ValueChange, ...]:
    """The changes, the most frequent first."""
    return tuple(ValueChange(a, b, num_rows) for (a, b), num_rows in pairs.most_common())


def value_pairs(rows: pa.RecordBatch, name: str) -> Iterator[tuple[Any, Any]]:
    """The values of the column in A and B, row by row."""
    return zip(*(column.to_pylist() for column in both_columns(rows, name)), strict=True)


def equal(rows: pa.RecordBatch, name: str) -> BoolArray:
    """Whether both jobs have the same value, or both have null; bool [num_rows]."""
    a, b = both_columns(rows, name)
    is_same = pc.fill_null(pc.equal(a, b), False)
    return np.asarray(pc.or_(is_same, pc.and_(a.is_null(), b.is_null())).to_numpy(zero_copy_only=False), np.bool_)


_MAX_CHARS = 120


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = "nothing" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]
