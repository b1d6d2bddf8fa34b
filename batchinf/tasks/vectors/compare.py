"""Compares numbers and vectors: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, common_lengths, reduce_runs, to_matrix, to_ragged
from batchinf.records import BoolArray, Int64Array, Prompt, Request
from batchinf.tasks.compare import (
    Changes,
    Deltas,
    DeltaSummary,
    Found,
    JobOutput,
    ReferenceWanted,
    StoredRow,
    StoredVectors,
    ValueChange,
    Verification,
    both_columns,
    clip_value,
    delta,
    equal,
    list_pair,
    number_deltas,
    value_changes,
    value_pairs,
    vectors_at_positions,
)
from batchinf.tasks.vectors.section import pooling_of

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


_BLOCK = 1 << 17  # numbers that are compared at once; as float64 they fit into the processor's cache

Floats = npt.NDArray[np.float64]


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
class VectorsFound(Found):
    """labels: of rows whose labels differ; None: no label. rewards: only if each row has one number, else None."""

    labels: tuple[ValueChange, ...]
    rewards: DeltaSummary | None
    columns: tuple[ColumnFound, ...]

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
            own = {name: value for name, value in row.items() if not name.startswith(_NOT_SHOWN) and value is not None}
            shown = ", ".join(f"{name} {value:.6g}" for name, value in own.items())
        yield f"  {key} {row['key']}: {shown}"


def comparable_columns(a: JobOutput, b: JobOutput) -> list[str]:
    """The columns of vectors that can be compared.

    Raises OutputError if the numbers of the two jobs mean different things: their columns, widths or tokens differ.
    """
    task = a.spec.get("task")
    own, other = (_widths(job.schema) for job in (a, b))
    shared = [name for name in own if own[name] == other.get(name)]
    if task == "logits":
        tokens = [(job.spec.get("logits") or {}).get("token_ids") for job in (a, b)]
        if shared and tokens[0] != tokens[1]:
            raise OutputError(
                f"{a.folder} holds {shared[0]} of other tokens than {b.folder}: compare jobs with the same "
                "logits.tokens"
            )
    if task == "classify":
        labels = [(job.spec.get("pooling") or {}).get("labels") for job in (a, b)]
        return shared if labels[0] == labels[1] else []  # the classes or their order differ
    if shared or (task == "reward" and not own and not other):
        return shared
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
    """Changes of tasks that store numbers.

    A row has changed if one of these differs: the likeliest token at a position (logits), the label (classify), or any
    number (other tasks). It has also changed if only one job has values.
    """

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        """Raises OutputError if the two cannot be compared: see `comparable_columns`."""
        self.wide = comparable_columns(a, b)
        task = str(a.spec.get("task"))
        numbers = ("reward",) if task == "reward" and not self.wide else ()
        super().__init__(a, b, num_examples, ("label", "positions", "token_ids", *numbers))
        self._vectors = {name: _Vectors(name, task) for name in self.wide}
        self._rewards = Deltas()
        self._labels: Counter[tuple[str | None, str | None]] = Counter()

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """If there are several columns of vectors, each has its own columns in the table, with its name as prefix."""
        is_changed = np.zeros(rows.num_rows, np.bool_)
        columns: dict[str, Any] = {"is_changed": is_changed}
        for name, vectors in self._vectors.items():
            a, b = (_lists(column) for column in both_columns(rows, name))
            found, is_other = vectors.compare(a, b, self._counts_of(rows, a, b))
            is_changed |= is_other
            prefix = f"{name}_" if len(self._vectors) > 1 else ""
            columns |= {f"{prefix}{key}": values for key, values in found.items()}
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
        found: Floats = np.max([np.nan_to_num(np.abs(table[name].to_numpy())) for name in names], axis=0)
        return found

    def _own_found(self) -> VectorsFound:
        return VectorsFound(
            value_changes(self._labels),
            self._rewards.summary() if "reward" in self.columns else None,
            tuple(vectors.found() for vectors in self._vectors.values()),
        )


class _Vectors:
    """Counts what changed in one column of vectors. Differences that are not finite are left out of all sums."""

    def __init__(self, name: str, task: str) -> None:
        self._name = name
        self._has_cosine, self._has_top1 = task in ("embed", "hidden_states"), task == "logits"
        self._num_rows = self._num_vectors = self._num_top1 = self._num_cosines = 0
        self._cosine, self._least = 0.0, 1.0
        self._deltas = Deltas()

    def compare(self, a: Ragged, b: Ragged, counts: Int64Array) -> tuple[dict[str, Any], BoolArray]:
        """Compare the first `counts` vectors of each row.

        Returns the columns of the table, with null if a row has no such vector, and which rows have changed.
        """
        width, own, other = a.values.shape[1], a.heads(counts), b.heads(counts)
        sums = np.zeros((len(own), 6))
        step = max(1, _BLOCK // width)
        for start in range(0, len(own), step):
            block = slice(start, start + step)
            sums[block] = self._sums(a.values[own[block]], b.values[other[block]])
        total, total_abs, num_finite, _, cosine, num_top1 = reduce_runs(np.add, sums, counts).T
        greatest = reduce_runs(np.maximum, sums[:, 3], counts)
        least = reduce_runs(np.minimum, sums[:, 4], counts, empty=1.0)
        num_others = counts * width - num_finite

        self._num_rows += int(np.count_nonzero(counts))
        self._num_vectors += len(own)
        self._num_top1 += int(num_top1.sum())
        is_known = ~np.isnan(cosine)
        self._num_cosines += int(counts[is_known].sum())
        self._cosine += float(cosine[is_known].sum())
        self._least = min(self._least, float(least[is_known].min(initial=1.0)))
        sums_of_all = [found.sum() for found in (num_finite, num_others, total, total_abs)]
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

    def _sums(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Floats:
        """[num_vectors, 6]: of the finite differences the sum, the sum of absolute values, the number and the greatest
        absolute value; then the cosine, and 1 if the greatest number is at the same index.
        """
        # Converted once, because numpy computes slowly with half floats.
        a, b = a.astype(np.float64), b.astype(np.float64)
        sums = np.zeros((len(a), 6))
        if self._has_cosine:
            with np.errstate(divide="ignore", invalid="ignore"):
                lengths = np.sqrt(np.einsum("ij,ij->i", a, a) * np.einsum("ij,ij->i", b, b))
                sums[:, 4] = np.einsum("ij,ij->i", a, b) / lengths
        if self._has_top1:
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

    def found(self) -> ColumnFound:
        """All counts."""
        has_cosine = self._has_cosine and self._num_cosines > 0
        return ColumnFound(
            self._name,
            self._num_rows,
            self._num_vectors,
            self._deltas.summary(),
            self._num_top1 if self._has_top1 else None,
            self._cosine / self._num_cosines if has_cosine else None,
            self._least if has_cosine else None,
        )


def _lists(array: pa.Array) -> Ragged:
    """A column of vectors, or of lists of them, as lists of vectors."""
    if pa.types.is_list(array.type):
        return to_ragged(array)
    is_null = np.asarray(array.is_null())
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(~is_null)])
    return Ragged(to_matrix(array)[~is_null], offsets, is_null)


class _OfPrompt(Verification):
    """Verifies tasks that store one vector for a whole prompt."""

    has_direction = False

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        for name in row.columns:
            yield StoredVectors(name, requests[0].prompt_token_ids, None, row.numbers(name), self.has_direction)


class EmbedVerification(_OfPrompt):
    """Compares the vectors of `embed`."""

    has_direction = True
    is_relative = True
    vector_columns = ("embedding",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import EmbedReference

        return EmbedReference(self.spec, wanted)


class HiddenStatesVerification(Verification):
    """Compares the states of `hidden_states`, layer by layer."""

    columns = ("positions",)
    is_relative = True

    @property
    def vector_columns(self) -> tuple[str, ...]:
        layers = pooling_of(self.spec).layers
        return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        yield from vectors_at_positions(row, requests[0].prompt_token_ids, has_direction=True)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HiddenStatesReference

        return HiddenStatesReference(self.spec, wanted)


class ClassifyVerification(_OfPrompt):
    """Compares the scores of all labels."""

    @property
    def is_relative(self) -> bool:
        """Whether a softmax or a sigmoid is applied to the head's logits."""
        return pooling_of(self.spec).use_activation is not False

    @property
    def vector_columns(self) -> tuple[str, ...]:
        return ("probabilities" if self.is_relative else "logits",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=self.is_relative)


class RewardVerification(_OfPrompt):
    """Compares the reward."""

    vector_columns = ("reward",)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.vectors.reference import HeadReference

        return HeadReference(self.spec, wanted, is_active=bool(pooling_of(self.spec).use_activation))
