"""What changed between two jobs of a task, column by column: each is compared by its Arrow type. `diff` shows it.

Texts and integers are equal or not, fractions have deltas, lists a first difference and a largest delta, and vectors a
cosine. NaN equals NaN, and null equals null.
"""

import abc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, common_lengths, reduce_runs, to_matrix, to_ragged
from batchinf.records import BoolArray, Int64Array
from batchinf.tasks.columns import IMAGE_DIGESTS

Floats = npt.NDArray[np.float64]
# Columns that say which items of the other lists of a row belong together: those up to their first difference.
_ALIGNING = ("token_ids", "positions")
VALUE_TOKEN_IDS = "value_token_ids"  # the tokens of a row's logits, if they differ from row to row
_BLOCK = 1 << 17  # numbers that are compared at once; as float64 they fit into the processor's cache
_MAX_CHARS = 120


class JobOutput(Protocol):
    """The job data that a comparison needs: its folder, its stored spec and its output's columns."""

    folder: str
    spec: dict[str, Any]

    @property
    def own_schema(self) -> pa.Schema:
        """The output's columns without copies of input columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedColumns:
    """The columns that a task has compared."""

    decides: tuple[str, ...] = ()
    """A row has changed if it differs in one of these; empty: in a column of vectors."""
    others: tuple[str, ...] = ()
    """Columns besides those and the ones of vectors."""
    by_largest: bool = False
    """Whether vectors differ only if their largest numbers are at different indices."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChanges:
    """What changed in a column. None: the field does not apply to its type."""

    name: str
    num_changed: int
    """Rows that differ in it."""
    deltas: DeltaSummary | None = None
    """Of numbers. Of lists and vectors: up to the first different token or position."""
    num_left_out: int = 0
    """Numbers that both rows have after it."""
    num_vectors: int | None = None
    """How many were compared."""
    num_same_largest: int | None = None
    """Vectors whose largest number is at the same index."""
    mean_cosine: float | None = None
    """Between the vectors of A and B, as is `min_cosine`."""
    min_cosine: float | None = None

    def line(self) -> str:
        """The counts as text."""
        facts = [f"{self.name}: {self.num_changed:,} rows differ"]
        if self.deltas is not None and self.deltas.num:
            after = f", without {self.num_left_out:,} after the first other token or position" * bool(self.num_left_out)
            facts.append(f"of {self.deltas.num:,} numbers{after}, {self.deltas}")
        if self.num_vectors and self.num_same_largest is not None:
            share = self.num_same_largest / self.num_vectors
            facts.append(f"the largest is the same in {self.num_same_largest:,} of {self.num_vectors:,} ({share:.2%})")
        if self.mean_cosine is not None:
            facts.append(f"cosine {self.mean_cosine:.8f} on average, at least {self.min_cosine:.8f}")
        return "; ".join(facts)


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
    decides: tuple[str, ...]
    """The columns of which one differs in a changed row."""
    columns: tuple[ColumnChanges, ...]
    examples: tuple[dict[str, Any], ...]
    """Rows of the table of `Changes.take`: the changed rows with the largest deltas, or the first ones."""


class Deltas:
    """Differences, B - A, over all rows."""

    def __init__(self) -> None:
        self._sums = np.zeros(4)
        self._greatest = 0.0

    def add(self, deltas: Floats) -> None:
        """Add differences."""
        known = deltas[np.isfinite(deltas)]
        absolute = np.abs(known)
        self._sums += [len(known), len(deltas) - len(known), known.sum(), absolute.sum()]
        self._greatest = max(self._greatest, float(absolute.max(initial=0.0)))

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


class _Column(abc.ABC):
    """Counts what changed in a column."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_changed = 0
        self._num_left_out = 0

    @abc.abstractmethod
    def compare(self, a: pa.Array, b: pa.Array, most: Int64Array | None) -> tuple[BoolArray, dict[str, Any]]:
        """Which rows differ, and the columns of the table. most: how many items of each list belong together."""

    def summary(self) -> ColumnChanges:
        """All counts."""
        return ColumnChanges(name=self.name, num_changed=self.num_changed)


class _Values(_Column):
    """Texts, flags, and integers, which are places or counts. Ids of tool calls, which differ, are left out."""

    def compare(self, a: pa.Array, b: pa.Array, most: Int64Array | None) -> tuple[BoolArray, dict[str, Any]]:
        columns = {f"{self.name}_a": a, f"{self.name}_b": b}
        if pa.types.is_nested(a.type):
            pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
            return np.array([_without_ids(x) != _without_ids(y) for x, y in pairs], np.bool_), columns
        return ~equal(a, b), columns


class _Numbers(_Column):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._deltas = Deltas()

    def compare(self, a: pa.Array, b: pa.Array, most: Int64Array | None) -> tuple[BoolArray, dict[str, Any]]:
        is_null = np.asarray(a.is_null()) | np.asarray(b.is_null())
        deltas = delta(*(np.asarray(numbers.to_numpy(zero_copy_only=False)) for numbers in (a, b)))
        self._deltas.add(deltas[~is_null])
        columns = {f"{self.name}_a": a, f"{self.name}_b": b, f"{self.name}_delta": pa.array(deltas, mask=is_null)}
        return ~equal(a, b), columns

    def summary(self) -> ColumnChanges:
        return ColumnChanges(name=self.name, num_changed=self.num_changed, deltas=self._deltas.summary())


class _Lists(_Column):
    """Lists of numbers. Only fractions have deltas: integers are ids or places."""

    def __init__(self, name: str, has_deltas: bool) -> None:
        super().__init__(name)
        self._deltas = Deltas()
        self._has_deltas = has_deltas

    def compare(self, a: pa.Array, b: pa.Array, most: Int64Array | None) -> tuple[BoolArray, dict[str, Any]]:
        one = to_ragged(a)
        other = to_ragged(b)
        common = common_lengths(one, other)
        is_changed = (common < one.lengths) | (common < other.lengths) | (one.is_null != other.is_null)
        columns: dict[str, Any] = {f"{self.name}_first_difference": pa.array(common, mask=~is_changed)}
        if self._has_deltas:
            counts, num_left_out = _counts(one, other, most)
            self._num_left_out += num_left_out
            deltas = delta(one.values[one.heads(counts)], other.values[other.heads(counts)])
            self._deltas.add(deltas)
            greatest = reduce_runs(np.maximum, np.nan_to_num(np.abs(deltas), nan=0.0, posinf=0.0), counts)
            columns[f"{self.name}_max_abs_delta"] = pa.array(greatest, mask=counts == 0)
        return is_changed, columns

    def summary(self) -> ColumnChanges:
        deltas = self._deltas.summary() if self._has_deltas else None
        return ColumnChanges(
            name=self.name, num_changed=self.num_changed, deltas=deltas, num_left_out=self._num_left_out
        )


class _Vectors(_Column):
    """Vectors of a row, or lists of them."""

    def __init__(self, name: str, by_largest: bool) -> None:
        super().__init__(name)
        self._by_largest = by_largest
        self._deltas = Deltas()
        self._num_vectors = 0
        self._num_same_largest = 0
        self._cosines = np.zeros(2)
        self._least = 1.0

    def compare(self, a: pa.Array, b: pa.Array, most: Int64Array | None) -> tuple[BoolArray, dict[str, Any]]:
        one = _vector_lists(a)
        other = _vector_lists(b)
        counts, num_left_out = _counts(one, other, most)
        self._num_left_out += num_left_out * one.values.shape[1]
        if counts.any() and one.values.shape[1] != other.values.shape[1]:
            widths = f"{one.values.shape[1]:,} and of {other.values.shape[1]:,}"
            raise OutputError(f"{self.name}: vectors of {widths} numbers cannot be compared")
        sums = self._sums_of(one.values, one.heads(counts), other.values, other.heads(counts))
        greatest = reduce_runs(np.maximum, sums[:, 0], counts)
        least = reduce_runs(np.minimum, sums[:, 1], counts, empty=1.0)
        num_same = reduce_runs(np.add, sums[:, 2], counts)
        is_other = reduce_runs(np.maximum, sums[:, 3], counts) > 0
        known = sums[:, 1][~np.isnan(sums[:, 1])]
        self._num_vectors += len(sums)
        self._num_same_largest += int(sums[:, 2].sum())
        self._cosines += [len(known), known.sum()]
        self._least = min(self._least, float(known.min(initial=1.0)))
        is_changed = num_same < counts if self._by_largest else is_other | (one.lengths != other.lengths)
        columns = {
            f"{self.name}_num_compared": pa.array(counts),
            f"{self.name}_max_abs_delta": pa.array(greatest, mask=counts == 0),
            f"{self.name}_min_cosine": pa.array(least, mask=(counts == 0) | np.isnan(least)),
        }
        return is_changed | (one.is_null != other.is_null), columns

    def _sums_of(self, a: npt.NDArray[Any], rows: Int64Array, b: npt.NDArray[Any], other_rows: Int64Array) -> Floats:
        """[num_vectors, 4], made a block at a time: the greatest finite difference, the cosine, whether the largest
        number is at the same index, and whether any number differs."""
        sums = np.zeros((len(rows), 4))
        step = max(1, _BLOCK // max(1, a.shape[1]))
        for start in range(0, len(rows), step):
            block = slice(start, start + step)
            # Converted once, because numpy computes slowly with half floats.
            one = a[rows[block]].astype(np.float64)
            other = b[other_rows[block]].astype(np.float64)
            deltas = delta(one, other)
            self._deltas.add(deltas.reshape(-1))
            with np.errstate(divide="ignore", invalid="ignore"):
                lengths = np.sqrt(np.einsum("ij,ij->i", one, one) * np.einsum("ij,ij->i", other, other))
                sums[block, 1] = np.einsum("ij,ij->i", one, other) / lengths
            sums[block, 2] = one.argmax(1) == other.argmax(1)
            sums[block, 3] = (deltas != 0).any(axis=1)
            sums[block, 0] = np.nan_to_num(np.abs(deltas), nan=0.0, posinf=0.0).max(axis=1)
        return sums

    def summary(self) -> ColumnChanges:
        num_cosines, total = self._cosines.tolist()
        return ColumnChanges(
            name=self.name,
            num_changed=self.num_changed,
            deltas=self._deltas.summary(),
            num_left_out=self._num_left_out,
            num_vectors=self._num_vectors,
            num_same_largest=self._num_same_largest if self._by_largest else None,
            mean_cosine=total / num_cosines if num_cosines and not self._by_largest else None,
            min_cosine=self._least if num_cosines and not self._by_largest else None,
        )


class Changes:
    """Counts what changed between two jobs of a task."""

    def __init__(
        self,
        a: JobOutput,
        b: JobOutput,
        compared: ComparedColumns,
        *,
        num_examples: int,
        left_out: Sequence[str] = (),
    ) -> None:
        """left_out: columns whose numbers mean other things in both. Raises OutputError if no column decides."""
        types = {field.name: field.type for field in a.own_schema}
        others = {field.name: field.type for field in b.own_schema}
        both = [name for name in types if name in others and _kind(types[name]) == _kind(others[name])]
        both = [name for name in both if name not in left_out]
        has_lists = {name for name in compared.decides if name in both and _has_lists(types[name])}
        self.wide = [name for name in both if _is_vectors(types[name]) or name in has_lists]
        names = [name for name in (*compared.decides, *compared.others) if name in both and name not in self.wide]
        self.decides = tuple(name for name in compared.decides if name in both) or (
            () if compared.decides else tuple(self.wide)
        )
        if not self.decides:
            raise OutputError(_no_common(a, b, compared))
        self._columns = {name: _counter(name, types[name], compared) for name in (*names, *self.wide)}
        needed = ("prompt_hash", IMAGE_DIGESTS, "error_type", *_ALIGNING, VALUE_TOKEN_IDS)
        self.columns = [*names, *(name for name in needed if name in both and name not in names)]
        self._num_examples = num_examples
        self._examples: list[tuple[float, dict[str, Any]]] = []
        self._counts: Counter[str] = Counter()

    def take(self, rows: pa.RecordBatch) -> pa.Table:
        """Compare rows of both jobs, whose columns are named `…_a` and `…_b`.

        The table has one row for each of them, with the columns `key`, `is_same_prompt`, `is_changed`, those of each
        compared column, `error_type_a` and `error_type_b`.
        """
        columns: dict[str, Any] = {name: rows[name] for name in ("key", "sample_index") if name in rows.schema.names}
        columns["is_same_prompt"] = equal(*_pair(rows, "prompt_hash"))
        is_changed = np.zeros(rows.num_rows, np.bool_)
        columns["is_changed"] = is_changed
        most = self._aligned(rows)
        greatest = np.zeros(rows.num_rows)
        for name, column in self._columns.items():
            a, b = _pair(rows, name)
            is_other, own = column.compare(a, b, most)
            column.num_changed += int(np.count_nonzero(is_other))
            columns |= own
            if name in self.decides:
                is_changed |= is_other
                deltas = own.get(f"{name}_max_abs_delta", own.get(f"{name}_delta"))
                greatest = greatest if deltas is None else np.maximum(greatest, _absolute(deltas))
        a, b = _pair(rows, "error_type")
        columns |= {"error_type_a": a, "error_type_b": b}
        is_error, is_other_error = (np.asarray(errors.is_valid()) for errors in (a, b))
        is_changed |= is_error != is_other_error  # an error row may keep an equal output
        self._counts.update(
            num_both=rows.num_rows,
            num_changed=int(np.count_nonzero(is_changed)),
            num_other_prompts=int(np.count_nonzero(~columns["is_same_prompt"])),
            num_other_images=int(np.count_nonzero(~self._are_same_images(rows))),
            num_errors_only_a=int(np.count_nonzero(is_error & ~is_other_error)),
            num_errors_only_b=int(np.count_nonzero(is_other_error & ~is_error)),
        )
        table = pa.table(columns)
        self._keep_examples(table, np.where(is_changed, 1 + greatest, 0.0))
        return table

    def _keep_examples(self, table: pa.Table, distances: Floats) -> None:
        furthest = np.argsort(-distances, kind="stable")[: self._num_examples]
        examples = zip(distances[furthest].tolist(), table.take(pa.array(furthest)).to_pylist(), strict=True)
        by_distance = sorted([*self._examples, *examples], key=lambda example: -example[0])
        self._examples = by_distance[: self._num_examples]

    def _aligned(self, rows: pa.RecordBatch) -> Int64Array | None:
        """How many items of each list belong together; None: all. Raises OutputError if the tokens of logits differ."""
        if VALUE_TOKEN_IDS in self.columns:
            a, b = map(to_ragged, _pair(rows, VALUE_TOKEN_IDS))
            counts = np.minimum(a.lengths, b.lengths)
            if not np.array_equal(a.values[a.heads(counts)], b.values[b.heads(counts)]):
                raise OutputError(f"{VALUE_TOKEN_IDS} of the two jobs differ: compare jobs with the same ids")
        most: Int64Array | None = None
        for name in (name for name in _ALIGNING if name in self.columns):
            a, b = map(to_ragged, _pair(rows, name))
            has_several = (a.lengths > 1) | (b.lengths > 1) | (name == "token_ids")
            # The vector from which the first different token was drawn still depends on the same tokens.
            same = common_lengths(a, b) + (name == "token_ids" and bool(self.wide))
            common = np.where(has_several, same, np.iinfo(np.int64).max)
            most = common if most is None else np.minimum(most, common)
        if most is None and "text" in self.columns:
            # Without their tokens, it is not known where two texts part.
            most = np.where(equal(*_pair(rows, "text")), np.iinfo(np.int64).max, 0)
        return most

    def _are_same_images(self, rows: pa.RecordBatch) -> BoolArray:
        if IMAGE_DIGESTS not in self.columns:
            return np.ones(rows.num_rows, np.bool_)
        a, b = (pc.binary_join(digests, " ") for digests in _pair(rows, IMAGE_DIGESTS))
        # Of an image that could not be loaded, nothing is known.
        return np.asarray(pc.fill_null(pc.equal(a, b), True).to_numpy(zero_copy_only=False), np.bool_)

    def summary(self) -> RowChanges:
        """All counts."""
        examples = tuple(row for distance, row in self._examples if distance > 0)
        columns = tuple(column.summary() for column in self._columns.values())
        return RowChanges(**self._counts, decides=self.decides, columns=columns, examples=examples)


def example_lines(key: str, row: Mapping[str, Any]) -> Iterator[str]:
    """A changed row as text. key: the column by which rows were joined."""
    sample = f", sample {row['sample_index']}" if row.get("sample_index") is not None else ""
    yield f"  {key} {row['key']}{sample}:"
    for name, value in row.items():
        other = row.get(f"{name[:-2]}_b")
        if name.endswith("_a") and f"{name[:-2]}_b" in row and value != other:
            if isinstance(value, str) and isinstance(other, str) and len(value) + len(other) > _MAX_CHARS // 3:
                yield f"    {name[:-2]} A {clip_value(value)}"
                yield f"    {name[:-2]} B {clip_value(other)}"
            else:
                yield f"    {name[:-2]} {clip_value(value)} -> {clip_value(other)}"
        elif name.endswith(("_first_difference", "_max_abs_delta", "_min_cosine")) and value is not None:
            yield f"    {name} {value:.6g}"


def _counter(name: str, type: pa.DataType, compared: ComparedColumns) -> _Column:
    if _is_vectors(type) or _has_lists(type):
        return _Vectors(name, compared.by_largest)
    if pa.types.is_list(type) and not pa.types.is_nested(type.value_type) and not pa.types.is_string(type.value_type):
        return _Lists(name, pa.types.is_floating(type.value_type))
    return _Numbers(name) if pa.types.is_floating(type) else _Values(name)


def _is_vectors(type: pa.DataType) -> bool:
    """Whether a column has vectors of fractions, or lists of them."""
    inner = type.value_type if pa.types.is_list(type) else type
    return bool(pa.types.is_fixed_size_list(inner) and pa.types.is_floating(inner.value_type))


def _has_lists(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) and pa.types.is_list(type.value_type))


def _kind(type: pa.DataType) -> str:
    """The type without the width of its numbers."""
    return str(type).replace("halffloat", "double").replace("float", "double")


def _no_common(a: JobOutput, b: JobOutput, compared: ComparedColumns) -> str:
    held = []
    for job in (a, b):
        fields = [field for field in job.own_schema if field.name in compared.decides or _is_vectors(field.type)]
        held.append(f"{job.folder} has {', '.join(f'{field.name} ({field.type})' for field in fields) or 'none'}")
    return f"no column that decides whether a row has changed means the same in both jobs: {', and '.join(held)}"


def _absolute(deltas: pa.Array) -> Floats:
    values = np.asarray(deltas.to_numpy(zero_copy_only=False), np.float64)
    absolute: Floats = np.nan_to_num(np.abs(values), nan=0.0)
    return absolute


def _counts(a: Ragged, b: Ragged, most: Int64Array | None) -> tuple[Int64Array, int]:
    """How many items of each list are compared, and how many that both have are left out."""
    counts: Int64Array = np.minimum(a.lengths, b.lengths)
    kept = counts if most is None else np.minimum(counts, most)
    return kept, int((counts - kept).sum())


def _vector_lists(array: pa.Array) -> Ragged:
    """A column of vectors, or of lists of them, as lists of vectors."""
    if pa.types.is_list(array.type):
        return to_ragged(array)
    is_null = np.asarray(array.is_null())
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_null)])
    return Ragged(to_matrix(array)[~is_null], offsets, is_null)


def delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
    """B - A in float64; 0 if both are the same infinity, or both NaN."""
    a = a.astype(np.float64, copy=False)
    b = b.astype(np.float64, copy=False)
    with np.errstate(invalid="ignore"):
        deltas: Floats = b - a
    if not np.isfinite(deltas).all():
        deltas[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return deltas


def _pair(rows: pa.RecordBatch, name: str) -> list[Any]:
    """The column of A and the column of B."""
    return [rows[f"{name}_{job}"] for job in "ab"]


def equal(a: pa.Array, b: pa.Array) -> BoolArray:
    """Whether both have the same value, both null or both NaN; bool [num_rows]."""
    is_same = pc.or_(pc.fill_null(pc.equal(a, b), False), pc.and_(a.is_null(), b.is_null()))
    if pa.types.is_floating(a.type):
        is_same = pc.or_(is_same, pc.fill_null(pc.and_(pc.is_nan(a), pc.is_nan(b)), False))
    return np.asarray(is_same.to_numpy(zero_copy_only=False), np.bool_)


def _without_ids(value: Any) -> Any:
    """Calls without their ids, which differ between jobs."""
    is_calls = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return [{name: own for name, own in item.items() if name != "id"} for item in value] if is_calls else value


def clip_value(value: Any) -> str:
    """A value in one short line."""
    text = f"{value:.6g}" if isinstance(value, float) else "nothing" if value is None else str(value)
    return repr(text)[:_MAX_CHARS] if isinstance(value, str) and "\n" in text else text[:_MAX_CHARS]
