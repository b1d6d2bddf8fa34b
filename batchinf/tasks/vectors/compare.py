"""Compares the vectors of two jobs for `diff`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchinf.base.errors import OutputError
from batchinf.tasks.compare import Changes, Deltas, DeltaSummary, Floats, JobOutput, TaskChanges, delta, value_pairs
from batchinf.tasks.vector_changes import VectorChanges, common_vectors, vector_widths
from batchinf.tasks.vectors.section import LINES_COLUMN, RANKING, RERANK_COLUMNS

if TYPE_CHECKING:
    pass


class EmbedChanges(VectorChanges):
    """See `VectorChanges`."""

    has_cosine = True

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. The vectors of lines of a batch file have their widths row by row."""
        if all(LINES_COLUMN in job.own_schema.names for job in (a, b)):
            return [LINES_COLUMN]
        return super().vector_columns(a, b)


class HiddenStatesChanges(VectorChanges):
    """See `VectorChanges`."""

    has_cosine = True
    names = ("positions",)


class ClassifyChanges(VectorChanges):
    """A row has changed if its label differs."""

    names = ("label",)

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        """See `VectorChanges`. There are none if the classes or their order differ."""
        labels = [(job.spec.get("pooling") or {}).get("labels") for job in (a, b)]
        return common_vectors(a, b) if labels[0] == labels[1] else []


class RewardChanges(VectorChanges):
    """See `VectorChanges`. A reward may be one number for each row."""

    names = ("reward",)

    def vector_columns(self, a: JobOutput, b: JobOutput) -> list[str]:
        has_numbers = not vector_widths(a.own_schema) and not vector_widths(b.own_schema)
        return [] if has_numbers else super().vector_columns(a, b)


@dataclass(frozen=True, slots=True)
class RerankCompared(TaskChanges):
    """The counts of task `rerank`."""

    deltas: DeltaSummary
    """Of the scores of documents that both jobs have."""
    num_other_ranking: int
    """Rows whose documents have another order."""
    num_other_first: int
    """Rows with another best document."""

    def lines(self) -> Iterator[str]:
        """The counts as text."""
        yield f"relevance scores of {self.deltas.num:,} documents: {self.deltas}"
        if self.num_other_ranking:
            yield f"  the ranking differs in {self.num_other_ranking:,} rows, the best one in {self.num_other_first:,}"

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        words = ", the ranking differs" if row["is_other_ranking"] else ""
        yield f"  {key} {row['key']}: max_abs_delta {row['max_abs_delta'] or 0:.6g}{words}"


class RerankChanges(Changes):
    """A row has changed if any score differs."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        """Raises OutputError if one job has pairs and the other one lists of documents."""
        own = [name for name in RERANK_COLUMNS if all(name in job.own_schema.names for job in (a, b))]
        if not own:
            raise OutputError(
                f"{a.folder} and {b.folder}: one has a document for each row, the other one lists of them; compare two "
                "that hold the same"
            )
        super().__init__(a, b, num_examples, [*own, RANKING])
        self._scores = own[0]
        self._deltas = Deltas()
        self._num_other_ranking = 0
        self._num_other_first = 0

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        greatest = [self._greatest(a, b) for a, b in value_pairs(rows, self._scores)]
        is_same = [a == b for a, b in value_pairs(rows, self._scores)]
        is_other = np.zeros(rows.num_rows, np.bool_)
        if RANKING in self.columns:
            pairs = list(value_pairs(rows, RANKING))
            is_other[:] = [a != b and None not in (a, b) for a, b in pairs]
            self._num_other_ranking += int(is_other.sum())
            self._num_other_first += sum(a[:1] != b[:1] for a, b in pairs if None not in (a, b))
        return {
            "is_changed": np.array([not same for same in is_same], np.bool_),
            "is_other_ranking": is_other,
            "max_abs_delta": pa.array(greatest, pa.float64()),
        }

    def _greatest(self, a: Any, b: Any) -> float | None:
        """The greatest difference of a row's scores, which are all counted; None without scores in both jobs."""
        if a is None or b is None:
            return None
        one, other = (np.atleast_1d(np.asarray(scores, np.float64)) for scores in (a, b))
        both = min(len(one), len(other))
        deltas = delta(one[:both], other[:both])
        self._deltas.add(deltas)
        return float(np.nanmax(np.abs(deltas), initial=0.0))

    def _distances(self, table: pa.Table) -> Floats:
        """See `Changes`: the greatest difference; a row with scores in only one job comes first."""
        greatest = np.asarray(table["max_abs_delta"].to_numpy(zero_copy_only=False), np.float64)
        is_changed = np.asarray(table["is_changed"])
        return np.where(is_changed & np.isnan(greatest), np.inf, np.nan_to_num(greatest))

    def _task_changes(self) -> RerankCompared:
        return RerankCompared(self._deltas.summary(), self._num_other_ranking, self._num_other_first)
