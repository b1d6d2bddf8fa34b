"""Compares numbers and vectors of two jobs, for `diff`, and of a job and its reference, for `verify`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, to_matrix, to_ragged
from batchinf.records import BoolArray, Int64Array, Prompt, Request
from batchinf.tasks.compare import (
    Changes,
    Comparison,
    Deltas,
    DeltaSummary,
    JobOutput,
    ReferenceWanted,
    StoredRow,
    StoredVectors,
    Verification,
    clip_value,
    delta,
    delta_text,
    equal,
    num_common,
    vectors_at_positions,
)
from batchinf.tasks.vectors.section import pooling_of

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


_BLOCK = 1 << 17  # numbers that are compared at once; as float64 they fit the processor's cache
_COSINE_TASKS = ("embed", "hidden_states")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LabelChange:
    """Number of rows whose label is `a` in one job and `b` in the other; None: no label."""

    a: str | None
    b: str | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class ColumnFound:
    """A compared column of vectors. None: the field does not apply to the task.

    num_rows, num_vectors: how many were compared. num_same_top1: vectors whose largest number is at the same index
    (logits). mean_cosine, min_cosine: between the vectors of A and B (embed, hidden_states).
    """

    name: str
    num_rows: int
    num_vectors: int
    deltas: DeltaSummary
    num_same_top1: int | None
    mean_cosine: float | None
    min_cosine: float | None


@dataclass(frozen=True, slots=True)
class VectorsFound:
    """labels: of rows with another label, the most frequent first. rewards: None unless each row has one number."""

    labels: tuple[LabelChange, ...]
    rewards: DeltaSummary | None
    columns: tuple[ColumnFound, ...]


def check_comparable(a: JobOutput, b: JobOutput) -> None:
    """Raise OutputError if the jobs' vectors cannot be compared: other columns, widths or tokens."""
    task = a.spec.get("task")
    own, other = ({**_widths(job.schema)} for job in (a, b))
    shared = [name for name in own if own[name] == other.get(name)]
    if task == "logits":
        tokens = [(job.spec.get("logits") or {}).get("token_ids") for job in (a, b)]
        if shared and tokens[0] != tokens[1]:
            raise OutputError(
                f"{a.folder} holds {shared[0]} of other tokens than {b.folder}: compare two with the same logits.tokens"
            )
    if shared or task == "classify" or (task == "reward" and not own and not other):
        return
    said = [", ".join(f"{name} of {width:,}" for name, width in found.items()) or "one number a row"
            for found in (own, other)]  # fmt: skip
    raise OutputError(f"{a.folder} holds {said[0]}, and {b.folder} {said[1]}: compare two that hold the same")


def _widths(schema: pa.Schema) -> dict[str, int]:
    """The columns of vectors, with their widths."""
    return {field.name: width for field in schema if (width := _width(field.type)) is not None}


def _width(type: pa.DataType) -> int | None:
    if pa.types.is_list(type):
        return _width(type.value_type)
    is_vector = pa.types.is_fixed_size_list(type) and pa.types.is_floating(type.value_type)
    return int(type.list_size) if is_vector else None


class VectorChanges(Changes):
    """Tasks that store numbers. A row has changed if one of these differs: the likeliest token at a position (logits),
    the label (classify), or any number (other tasks). It has also changed if only one job has values.
    """

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        """Raises OutputError: see `check_comparable`."""
        super().__init__(num_examples)
        check_comparable(a, b)
        self._task = a.spec.get("task")
        own, other = _widths(a.schema), _widths(b.schema)
        self.wide = [name for name in own if own[name] == other.get(name)]
        if self._task == "classify" and _labels(a) != _labels(b):
            self.wide = []  # other classes, or in another order
        wanted = ["prompt_hash", "label", "positions", "token_ids", "error_type"]
        if self._task == "reward" and not self.wide:
            wanted.append("reward")
        self.columns = [name for name in wanted if all(name in job.schema.names for job in (a, b))]
        self._sums = {name: _Sums() for name in self.wide}
        self._rewards = Deltas()
        self._labels: Counter[tuple[str | None, str | None]] = Counter()

    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """See `Changes`. Several columns of vectors have their own result columns, prefixed with their names."""
        found = {
            name: self._compared(rows, name, *(_lists(table.column(name)) for table in wide)) for name in self.wide
        }
        is_changed = self._are_changed(rows, list(found.values()))
        columns: dict[str, Any] = {"is_changed": is_changed}
        for name, compared in found.items():
            prefix = f"{name}_" if len(found) > 1 else ""
            columns |= {f"{prefix}{key}": values for key, values in compared.columns(self._task).items()}
            self._sums[name].add(compared)
        if "reward" in self.columns:
            a, b = (rows.column(f"reward_{job}").to_numpy(zero_copy_only=False) for job in "ab")
            is_null = np.asarray(rows.column("reward_a").is_null()) | np.asarray(rows.column("reward_b").is_null())
            differences = delta(a, b)
            self._rewards.add(differences[~is_null])
            columns["delta"] = pa.array(differences, mask=is_null)
        for name in ("label", "reward"):
            if name in self.columns:
                columns |= {f"{name}_{job}": rows.column(f"{name}_{job}") for job in "ab"}
        return columns

    def _compared(self, rows: pa.RecordBatch, name: str, a: Ragged, b: Ragged) -> "_Compared":
        counts = np.minimum(a.lengths, b.lengths)
        if "token_ids" in self.columns:
            # The first differing token was drawn from a vector that still depends on equal tokens only.
            ids = [to_ragged(rows.column(f"token_ids_{job}")) for job in "ab"]
            same = [num_common(ids[0][row], ids[1][row]) + 1 for row in range(len(counts))]
            counts = np.minimum(counts, same)
        elif "positions" in self.columns:
            places = [to_ragged(rows.column(f"positions_{job}")) for job in "ab"]
            for row in np.flatnonzero((a.lengths > 1) | (b.lengths > 1)):
                counts[row] = min(counts[row], num_common(places[0][row], places[1][row]))
        return _Compared.of(a, b, counts, self._task)

    def _are_changed(self, rows: pa.RecordBatch, found: Sequence["_Compared"]) -> BoolArray:
        if "label" in self.columns:
            return ~equal(rows, "label")
        if "reward" in self.columns:
            return ~equal(rows, "reward")
        is_changed = np.zeros(rows.num_rows, np.bool_)
        for compared in found:
            is_changed |= compared.is_one_null
            is_changed |= compared.is_other_top1 if self._task == "logits" else compared.is_other
        return is_changed

    def count(self, table: pa.Table) -> None:
        """See `Changes`."""
        if "label" in self.columns:
            changed = table.filter(table["is_changed"])
            self._labels.update(zip(*(changed[f"label_{job}"].to_pylist() for job in "ab"), strict=True))

    def remember(self, table: pa.Table) -> None:
        """Keep the rows with the largest differences; for labels, the first changed rows."""
        if "label" in self.columns or not self.num_examples:
            super().remember(table)
            return
        names = [name for name in table.column_names if name.endswith("max_abs_delta") or name == "delta"]
        distances = np.max([np.nan_to_num(np.abs(table[name].to_numpy()), nan=-1.0) for name in names], axis=0)
        furthest = np.argsort(-distances, kind="stable")[: self.num_examples]
        rows = zip(table.take(pa.array(furthest)).to_pylist(), distances[furthest], strict=True)
        both = [*self.examples, *({**row, "_distance": distance} for row, distance in rows)]
        found = sorted(both, key=lambda row: -row["_distance"])[: self.num_examples]
        self.examples = [row for row in found if row["_distance"] > 0]

    def own_found(self) -> VectorsFound:
        """See `Changes`."""
        return VectorsFound(
            tuple(LabelChange(a, b, num) for (a, b), num in self._labels.most_common()),
            self._rewards.summary() if "reward" in self.columns else None,
            tuple(found.summary(name, self._task) for name, found in self._sums.items()),
        )


@dataclass(frozen=True, slots=True)
class _Compared:
    """Comparison of a column of vectors in some rows. All fields have one item for each row; NaN: nothing was compared.

    counts: compared vectors. total to greatest: over all numbers of the row's vectors. num_others: differences that are
    not finite, which the sums leave out. sum_cosine, min_cosine, num_top1: over the vectors. is_other: whether any
    number differs.
    """

    counts: Int64Array
    total: Floats
    total_abs: Floats
    num_finite: Int64Array
    num_others: Int64Array
    greatest: Floats
    sum_cosine: Floats
    min_cosine: Floats
    num_top1: Int64Array
    is_one_null: BoolArray
    is_other: BoolArray

    @classmethod
    def of(cls, a: Ragged, b: Ragged, counts: Int64Array, task: str | None) -> "_Compared":
        """Compare the first `counts` vectors of each row."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        num, row_of = int(offsets[-1]), np.repeat(np.arange(len(counts)), counts)
        within = np.arange(num) - offsets[:-1][row_of]
        places = [found.offsets[:-1][row_of] + within for found in (a, b)]
        width = a.values.shape[1] if a.values.ndim > 1 else 1
        step = max(1, _BLOCK // width)
        sums = np.zeros((num, 6))
        for start in range(0, num, step):
            own, other = (found.values[at[start : start + step]] for found, at in zip((a, b), places, strict=True))
            sums[start : start + step] = _of_vectors(own, other, task)
        starts, is_full = offsets[:-1], counts > 0

        def per_row(add: Any, column: int, empty: float) -> Floats:
            found = np.full(len(counts), empty, np.float64)
            if is_full.any():
                found[is_full] = add.reduceat(sums[:, column], starts[is_full])
            return found

        num_finite = per_row(np.add, 2, 0).astype(np.int64)
        cosine = per_row(np.add, 4, np.nan), per_row(np.minimum, 4, np.nan)
        greatest, num_top1 = per_row(np.maximum, 3, np.nan), per_row(np.add, 5, 0).astype(np.int64)
        num_others = counts * width - num_finite
        is_other = (np.nan_to_num(greatest) > 0) | (num_others > 0) | (a.lengths != b.lengths)
        total, total_abs = per_row(np.add, 0, 0), per_row(np.add, 1, 0)
        is_one_null = a.is_null != b.is_null
        return cls(counts, total, total_abs, num_finite, num_others, greatest, *cosine, num_top1, is_one_null, is_other)

    @property
    def is_other_top1(self) -> BoolArray:
        """Whether the index of the largest number differs in one of the row's vectors."""
        found: BoolArray = self.num_top1 < self.counts
        return found

    def columns(self, task: str | None) -> dict[str, Any]:
        """The columns of the table of `Changes`; null if nothing was compared."""
        is_null = self.counts == 0
        with np.errstate(invalid="ignore"):
            means = self.total_abs / self.num_finite
        columns = {
            "num_compared_vectors": pa.array(self.counts),
            "max_abs_delta": pa.array(self.greatest, mask=is_null),
            "mean_abs_delta": pa.array(means, mask=is_null | (self.num_finite == 0)),
        }
        if task in _COSINE_TASKS:
            columns["min_cosine"] = pa.array(self.min_cosine, mask=is_null | np.isnan(self.min_cosine))
        if task == "logits":
            columns["num_same_top1"] = pa.array(self.num_top1)
        return columns


def _of_vectors(a: npt.NDArray[Any], b: npt.NDArray[Any], task: str | None) -> Floats:
    """[num_vectors, 6]: sum, sum of absolutes and number of finite differences, the largest absolute difference, the
    cosine, and 1 if the largest number is at the same index.
    """
    # Arithmetic on float16 is slow.
    a, b = a.astype(np.float64), b.astype(np.float64)
    sums = np.zeros((len(a), 6))
    if task in _COSINE_TASKS:
        with np.errstate(divide="ignore", invalid="ignore"):
            lengths = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
            sums[:, 4] = np.einsum("ij,ij->i", a, b) / lengths
    if task == "logits":
        sums[:, 5] = a.argmax(1) == b.argmax(1)
    found, sums[:, 2] = delta(a, b), a.shape[1]
    if not np.isfinite(found).all():
        is_finite = np.isfinite(found)
        sums[:, 2] = is_finite.sum(1)
        found[~is_finite] = 0.0
    sums[:, 0] = found.sum(1)
    np.abs(found, out=found)
    sums[:, 1], sums[:, 3] = found.sum(1), found.max(1)
    return sums


class _Sums:
    """Totals of one column of vectors over all rows."""

    def __init__(self) -> None:
        self._num_vectors = self._num_rows = self._num_top1 = self._num_cosines = 0
        self._cosine, self._least = 0.0, 1.0
        self._deltas = Deltas()

    def add(self, rows: _Compared) -> None:
        self._num_vectors += int(rows.counts.sum())
        self._num_rows += int(np.count_nonzero(rows.counts))
        self._num_top1 += int(rows.num_top1.sum())
        is_known = ~np.isnan(rows.sum_cosine)
        self._num_cosines += int(rows.counts[is_known].sum())
        self._cosine += float(rows.sum_cosine[is_known].sum())
        self._least = min(self._least, float(rows.min_cosine[is_known].min(initial=1.0)))
        self._deltas.add_sums(
            int(rows.num_finite.sum()),
            int(rows.num_others.sum()),
            float(rows.total.sum()),
            float(rows.total_abs.sum()),
            float(np.nan_to_num(rows.greatest).max(initial=0.0)),
        )

    def summary(self, name: str, task: str | None) -> ColumnFound:
        has_cosine = task in _COSINE_TASKS and self._num_cosines > 0
        return ColumnFound(
            name,
            self._num_rows,
            self._num_vectors,
            self._deltas.summary(),
            self._num_top1 if task == "logits" else None,
            self._cosine / self._num_cosines if has_cosine else None,
            self._least if has_cosine else None,
        )


def _lists(column: pa.ChunkedArray) -> Ragged:
    """A column of vectors or of lists of vectors, as lists of vectors."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if pa.types.is_list(array.type):
        return to_ragged(array)
    is_null = np.asarray(array.is_null())
    lengths = (~is_null).astype(np.int64)
    return Ragged(to_matrix(array)[~is_null], np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), is_null)


def _labels(job: JobOutput) -> object:
    return (job.spec.get("pooling") or {}).get("labels")


_MOST_LABELS = 10
# Examples do not show these columns of the table.
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


class _OfPrompt(Verification):
    """One vector of a whole prompt."""

    has_direction = False

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        """See `Verification`."""
        for name in row.columns:
            yield StoredVectors(name, requests[0].prompt_token_ids, None, row.numbers(name), self.has_direction)


class EmbedVerification(_OfPrompt):
    """See `Verification`."""

    has_direction = True
    is_relative = True
    vector_columns = ("embedding",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import EmbedReference

        return EmbedReference(self.spec, wanted)


class HiddenStatesVerification(Verification):
    """See `Verification`."""

    columns = ("positions",)
    is_relative = True

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """See `Verification`."""
        layers = pooling_of(self.spec).layers
        return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        """See `Verification`."""
        yield from vectors_at_positions(row, requests[0].prompt_token_ids, has_direction=True)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import HiddenStatesReference

        return HiddenStatesReference(self.spec, wanted)


class _OfHead(_OfPrompt):
    @property
    def is_active(self) -> bool:
        """Whether a softmax or a sigmoid is applied to the head's logits."""
        return bool(pooling_of(self.spec).use_activation)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        """See `Verification`."""
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=self.is_active)


class ClassifyVerification(_OfHead):
    """See `Verification`."""

    @property
    def is_active(self) -> bool:
        """See `_OfHead`."""
        return pooling_of(self.spec).use_activation is not False

    @property
    def is_relative(self) -> bool:
        """See `Verification`."""
        return self.is_active

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """See `Verification`."""
        return ("probabilities" if self.is_active else "logits",)


class RewardVerification(_OfHead):
    """See `Verification`."""

    vector_columns = ("reward",)
