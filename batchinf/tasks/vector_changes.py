"""Counts what changed between two jobs that store vectors. The tasks with vectors adapt it for `diff`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, common_lengths, reduce_runs, to_matrix, to_ragged
from batchinf.records import BoolArray, Int64Array
from batchinf.tasks.compare import (
    Changes,
    Deltas,
    DeltaSummary,
    Floats,
    JobOutput,
    TaskChanges,
    ValueChange,
    both_columns,
    clip_value,
    delta,
    equal,
    list_pair,
    number_deltas,
    value_changes,
    value_pairs,
)

_BLOCK = 1 << 17  # numbers that are compared at once; as float64 they fit into the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChanges:
    """A compared column of vectors. None: the field does not apply to the task."""

    name: str
    num_rows: int
    """How many rows were compared."""
    num_vectors: int
    deltas: DeltaSummary
    num_same_top1: int | None
    """Vectors whose largest number is at the same index."""
    mean_cosine: float | None
    """Between the vectors of A and B, as is `min_cosine`."""
    min_cosine: float | None

    def lines(self) -> Iterator[str]:
        """The counts as text."""
        yield f"{self.name} of {self.num_rows:,} rows, {self.num_vectors:,} vectors: {self.deltas}"
        if self.num_same_top1 is not None:
            share = self.num_same_top1 / self.num_vectors
            yield f"  the likeliest token is the same in {self.num_same_top1:,} of them ({share:.2%})"
        if self.mean_cosine is not None:
            yield f"  cosine {self.mean_cosine:.8f} on average, at least {self.min_cosine:.8f}"


_MOST_LABELS = 10
# Examples do not show these columns of the table.
_NOT_SHOWN = ("key", "is_", "error_type", "sample_index")


@dataclass(frozen=True, slots=True)
class VectorsCompared(TaskChanges):
    """The counts of a task that stores vectors."""

    labels: tuple[ValueChange, ...]
    """Of rows whose labels differ; None: no label."""
    rewards: DeltaSummary | None
    """Only if each row has one number."""
    columns: tuple[ColumnChanges, ...]

    def lines(self) -> Iterator[str]:
        for label in self.labels[:_MOST_LABELS]:
            yield f"  label {clip_value(label.a)} -> {clip_value(label.b)}: {label.num_rows:,}"
        if self.rewards is not None and self.rewards.num:
            yield f"reward of {self.rewards.num:,} rows: {self.rewards}"
        for column in self.columns:
            if column.num_vectors:
                yield from column.lines()

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        if "label_a" in row:
            shown = f"label {clip_value(row['label_a'])} -> {clip_value(row['label_b'])}"
        else:
            shown = ", ".join(
                f"{name} {value:.6g}"
                for name, value in row.items()
                if not name.startswith(_NOT_SHOWN) and value is not None
            )
        yield f"  {key} {row['key']}: {shown}"


def common_vectors(a: JobOutput, b: JobOutput) -> list[str]:
    """The columns of vectors that both jobs have with the same width."""
    others = vector_widths(b.own_schema)
    return [name for name, width in vector_widths(a.own_schema).items() if width == others.get(name)]


def vector_widths(schema: pa.Schema) -> dict[str, int]:
    """The columns of vectors, with their widths."""
    return {field.name: width for field in schema if (width := _width(field.type)) is not None}


def _width(type: pa.DataType) -> int | None:
    if pa.types.is_list(type):
        return _width(type.value_type)
    is_vector = pa.types.is_fixed_size_list(type) and pa.types.is_floating(type.value_type)
    return int(type.list_size) if is_vector else None


class VectorChanges(Changes):
    """Changes of vectors. A row has changed if any number differs, or if only one job has values."""

    has_top1: ClassVar[bool] = False
    """Whether a row has changed only if the largest number of a vector is at another index."""
    has_cosine: ClassVar[bool] = False
    """Whether the cosine between the vectors of A and B is counted."""
    names: ClassVar[tuple[str, ...]] = ()
    """The task's columns that are compared besides those of vectors, or that say which vectors belong together."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        """Raises OutputError if the two cannot be compared: see `vector_columns`."""
        self.wide = self.vector_columns(a, b)
        super().__init__(a, b, num_examples, [name for name in self.names if name not in self.wide])
        self._vectors = {name: _Vectors(name, self.has_cosine, self.has_top1) for name in self.wide}
        self._rewards = Deltas()
        self._labels: Counter[tuple[str | None, str | None]] = Counter()

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """The columns of vectors that can be compared.

        Raises OutputError if the numbers of the two jobs mean different things: their columns, widths or tokens differ.
        """
        if shared := common_vectors(a, b):
            return shared
        held = [
            ", ".join(f"{name} of {width:,}" for name, width in vector_widths(job.own_schema).items())
            or "one number a row"
            for job in (a, b)
        ]
        raise OutputError(f"{a.folder} holds {held[0]}, and {b.folder} {held[1]}: compare two that hold the same")

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """If there are several columns of vectors, each has its own columns in the table, with its name as prefix."""
        is_changed = np.zeros(rows.num_rows, np.bool_)
        columns: dict[str, Any] = {"is_changed": is_changed}
        for name, vectors in self._vectors.items():
            a, b = (_lists(column) for column in both_columns(rows, name))
            compared, is_other = vectors.compare(a, b, self._counts_of(rows, a, b))
            is_changed |= is_other
            prefix = f"{name}_" if len(self._vectors) > 1 else ""
            columns |= {f"{prefix}{key}": values for key, values in compared.items()}
        if "reward" in self.columns:
            columns["delta"] = number_deltas(rows, "reward", self._rewards)
            is_changed[:] = ~equal(rows, "reward")
        if "label" in self.columns:
            is_changed[:] = ~equal(rows, "label")
            self._labels.update(value_pairs(rows.filter(pa.array(is_changed)), "label"))
        return columns | self._both(rows, "label", "reward")

    def _counts_of(self, rows: pa.RecordBatch, a: Ragged, b: Ragged) -> Int64Array:
        """How many vectors at the beginning of each row can be compared."""
        counts: Int64Array = np.minimum(a.lengths, b.lengths)
        if "token_ids" in self.columns:
            # The vector from which the first different token was sampled still depends on the same tokens.
            return np.minimum(counts, common_lengths(*list_pair(rows, "token_ids")) + 1)
        if "positions" in self.columns:
            has_several = (a.lengths > 1) | (b.lengths > 1)
            return np.where(has_several, np.minimum(counts, common_lengths(*list_pair(rows, "positions"))), counts)
        return counts

    def _distances(self, table: pa.Table) -> Floats:
        """See `Changes` for rows with labels; for other rows, the greatest difference."""
        if "label" in self.columns:
            return super()._distances(table)
        names = [name for name in table.column_names if name.endswith("max_abs_delta") or name == "delta"]
        greatest: Floats = np.max([np.nan_to_num(np.abs(table[name].to_numpy())) for name in names], axis=0)
        return greatest

    def _task_changes(self) -> VectorsCompared:
        return VectorsCompared(
            value_changes(self._labels),
            self._rewards.summary() if "reward" in self.columns else None,
            tuple(vectors.summary() for vectors in self._vectors.values()),
        )


class _Vectors:
    """Counts what changed in one column of vectors. Differences that are not finite are left out of all sums."""

    def __init__(self, name: str, has_cosine: bool, has_top1: bool) -> None:
        self._name = name
        self._has_cosine = has_cosine
        self._has_top1 = has_top1
        self._num_rows = 0
        self._num_vectors = 0
        self._num_top1 = 0
        self._num_cosines = 0
        self._cosine = 0.0
        self._least = 1.0
        self._deltas = Deltas()

    def compare(self, a: Ragged, b: Ragged, counts: Int64Array) -> tuple[dict[str, Any], BoolArray]:
        """Compare the first `counts` vectors of each row.

        Returns the columns of the table, with null if a row has no such vector, and which rows have changed.
        """
        sums = self._sums_of(a.values, a.heads(counts), b.values, b.heads(counts))
        total, total_abs, num_finite, _, cosine, num_top1 = reduce_runs(np.add, sums, counts).T
        greatest = reduce_runs(np.maximum, sums[:, 3], counts)
        least = reduce_runs(np.minimum, sums[:, 4], counts, empty=1.0)
        num_others = counts * a.values.shape[1] - num_finite

        self._num_rows += int(np.count_nonzero(counts))
        self._num_vectors += len(sums)
        self._num_top1 += int(num_top1.sum())
        is_known = ~np.isnan(cosine)
        self._num_cosines += int(counts[is_known].sum())
        self._cosine += float(cosine[is_known].sum())
        self._least = min(self._least, float(least[is_known].min(initial=1.0)))
        sums_of_all = [numbers.sum() for numbers in (num_finite, num_others, total, total_abs)]
        self._deltas.add_sums(sums_of_all, greatest.max(initial=0.0))

        is_null = counts == 0
        with np.errstate(invalid="ignore"):
            means = total_abs / num_finite
        columns = {
            "num_compared_vectors": pa.array(counts),
            "max_abs_delta": pa.array(greatest, mask=is_null),
            "mean_abs_delta": pa.array(means, mask=num_finite == 0),
        }
        is_changed = (greatest > 0) | (num_others > 0) | (a.lengths != b.lengths)
        if self._has_cosine:
            columns["min_cosine"] = pa.array(least, mask=is_null | np.isnan(least))
        if self._has_top1:
            columns["num_same_top1"] = pa.array(num_top1.astype(np.int64))
            is_changed = num_top1 < counts
        return columns, is_changed | (a.is_null != b.is_null)

    def _sums_of(self, a: npt.NDArray[Any], rows: Int64Array, b: npt.NDArray[Any], other_rows: Int64Array) -> Floats:
        """The sums of these rows of a and b, a block at a time."""
        sums = np.zeros((len(rows), 6))
        if len(rows) and a.shape[1] != b.shape[1]:
            raise OutputError(
                f"{self._name}: vectors of {a.shape[1]:,} and of {b.shape[1]:,} numbers cannot be compared"
            )
        step = max(1, _BLOCK // max(1, a.shape[1]))
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            sums[block] = self._sums(a[rows[block]], b[other_rows[block]])
        return sums

    def _sums(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
        """[num_vectors, 6]: of the finite differences the sum, the sum of absolute values, the number and the greatest
        absolute value; then the cosine, and 1 if the greatest number is at the same index.
        """
        # Converted once, because numpy computes slowly with half floats.
        a = a.astype(np.float64)
        b = b.astype(np.float64)
        sums = np.zeros((len(a), 6))
        if self._has_cosine:
            with np.errstate(divide="ignore", invalid="ignore"):
                lengths = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
                sums[:, 4] = np.einsum("ij,ij->i", a, b) / lengths
        if self._has_top1:
            sums[:, 5] = a.argmax(1) == b.argmax(1)
        deltas = delta(a, b)
        sums[:, 2] = a.shape[1]
        is_finite = np.isfinite(deltas)
        if not is_finite.all():
            sums[:, 2] = is_finite.sum(1)
            deltas[~is_finite] = 0.0
        sums[:, 0] = deltas.sum(1)
        np.abs(deltas, out=deltas)
        sums[:, 1] = deltas.sum(1)
        sums[:, 3] = deltas.max(1)
        return sums

    def summary(self) -> ColumnChanges:
        """All counts."""
        has_cosine = self._has_cosine and self._num_cosines > 0
        return ColumnChanges(
            name=self._name,
            num_rows=self._num_rows,
            num_vectors=self._num_vectors,
            deltas=self._deltas.summary(),
            num_same_top1=self._num_top1 if self._has_top1 else None,
            mean_cosine=self._cosine / self._num_cosines if has_cosine else None,
            min_cosine=self._least if has_cosine else None,
        )


def _lists(array: pa.Array) -> Ragged:
    """A column of vectors, or of lists of them, as lists of vectors."""
    if pa.types.is_list(array.type):
        return to_ragged(array)
    is_null = np.asarray(array.is_null())
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_null)])
    return Ragged(to_matrix(array)[~is_null], offsets, is_null)
