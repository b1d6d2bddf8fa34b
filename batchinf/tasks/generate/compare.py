"""Compares the generated texts of two jobs for `diff`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchinf.base.ragged import common_lengths, reduce_runs
from batchinf.base.text import plain_line
from batchinf.records import Int64Array
from batchinf.spec.sampling import CHOICE_COLUMN
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
    value_changes,
    value_pairs,
)

_MOST_LABELS = 12
_LABEL_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsCompared(TaskChanges):
    """The counts of task generate."""

    num_other_tokens: int
    """Rows with the same text by other tokens."""
    labels: tuple[ValueChange, ...] | None
    """Texts in A and B, changed or not, of jobs whose structured outputs are choices; None for others, and for an error
    row's text."""
    finish_reasons: tuple[ValueChange, ...]
    """Of rows with another text or other tokens; None for an error row."""
    num_compared_rows: int
    logprobs: DeltaSummary
    """Of the tokens that both jobs generated, up to the first difference, in `num_compared_rows` rows."""

    def headline(self, num_changed: int, num_both: int) -> Iterator[str]:
        [line] = TaskChanges.headline(self, num_changed, num_both)
        line = line if self.labels is None else line.replace("outputs:", "labels:")
        subject = "1 other has" if self.num_other_tokens == 1 else f"{self.num_other_tokens:,} others have"
        yield line + (f"; {subject} the same text, made of different tokens" if self.num_other_tokens else "")
        if self.labels is not None:
            yield from confusion_lines(self.labels)

    def lines(self) -> Iterator[str]:
        for reason in self.finish_reasons:
            if reason.a != reason.b:
                yield f"  finish_reason {reason.a} -> {reason.b}: {reason.num_rows:,}"
        if self.logprobs.num:
            yield (
                f"logprobs of {self.logprobs.num:,} tokens that both gave ({self.num_compared_rows:,} rows, up to the "
                f"first difference): {self.logprobs}"
            )

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        token = row["first_difference"]
        where = "" if token is None else f", other from token {token} on"
        yield f"  {key} {row['key']}, sample {row['sample_index']}{where}:"
        for name in "AB":
            text = row[f"text_{name.lower()}"]
            calls = _calls_of(row.get(f"tool_calls_{name.lower()}"))
            answer = text if calls is None else (text or "") + str(calls)
            yield f"    {name} {clip_value(answer)}"


def confusion_lines(labels: Sequence[ValueChange]) -> Iterator[str]:
    """A matrix of numbers of rows: the labels of A down, those of B across. Of many labels: the changes alone."""
    names = sorted({name for change in labels for name in (change.a, change.b)}, key=lambda name: (name is None, name))
    if len(names) > _MOST_LABELS:
        changed = [change for change in labels if change.a != change.b]
        for change in changed[:_MOST_LABELS]:
            yield f"  {_label(change.a)} -> {_label(change.b)}: {change.num_rows:,}"
    else:
        yield from _matrix_lines(names, labels)


def _matrix_lines(names: Sequence[str | None], labels: Sequence[ValueChange]) -> Iterator[str]:
    numbers = {(change.a, change.b): f"{change.num_rows:,}" for change in labels if change.num_rows}
    rows = [["  A \\ B", *map(_label, names)]]
    rows += [[f"  {_label(a)}", *(numbers.get((a, b), "·") for b in names)] for a in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *padded])


def _label(name: str | None) -> str:
    return "(error)" if name is None else plain_line(name, _LABEL_CHARS)


_SHOWN = ("text", "tool_calls", "finish_reason", "cumulative_logprob")


def _calls_of(calls: list[dict[str, str]] | None) -> list[tuple[str, str]] | None:
    """Names and arguments of calls. Their ids differ between jobs."""
    return None if calls is None else [(call["name"], call["arguments"]) for call in calls]


class TextChanges(Changes):
    """Task generate. A row has changed if its text or its tool calls differ. By other tokens alone: counted apart."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        super().__init__(a, b, num_examples, (*_SHOWN, "token_ids", "logprobs"))
        self._reasons: Counter[tuple[str | None, str | None]] = Counter()
        self._labels: Counter[tuple[str | None, str | None]] | None = None
        if _has_choices(a) and _has_choices(b):
            self._labels = Counter()
        self._deltas = Deltas()
        self._num_compared_rows = 0
        self._num_other_tokens = 0

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        is_other = ~equal(rows, "text")
        if "tool_calls" in self.columns:
            pairs = zip(*(column.to_pylist() for column in both_columns(rows, "tool_calls")), strict=True)
            is_other |= np.array([_calls_of(a) != _calls_of(b) for a, b in pairs], np.bool_)
        columns: dict[str, Any] = {
            "is_changed": is_other,
            "has_other_tokens": pa.nulls(rows.num_rows, pa.bool_()),
            "first_difference": pa.nulls(rows.num_rows, pa.int64()),
        }
        if "token_ids" in self.columns:
            a, b = list_pair(rows, "token_ids")
            common = common_lengths(a, b)
            has_other_tokens = (common < a.lengths) | (common < b.lengths) | (a.is_null != b.is_null)
            columns["has_other_tokens"] = has_other_tokens
            columns["first_difference"] = pa.array(common, mask=~has_other_tokens)
            self._num_other_tokens += int((has_other_tokens & ~is_other).sum())
            is_other = is_other | has_other_tokens
            if "logprobs" in self.columns:
                columns |= self._logprob_deltas(rows, common)
        self._reasons.update(value_pairs(rows.filter(pa.array(is_other)), "finish_reason"))
        if self._labels is not None:
            self._labels.update(value_pairs(rows, "text"))
        return columns | self._both(rows, *_SHOWN)

    def _distances(self, table: pa.Table) -> Floats:
        """Other texts first, then the same text by other tokens."""
        has_other_tokens = table["has_other_tokens"].fill_null(False).to_numpy()
        return np.asarray(2.0 * np.asarray(table["is_changed"]) + has_other_tokens, np.float64)

    def _logprob_deltas(self, rows: pa.RecordBatch, common: Int64Array) -> dict[str, Any]:
        """For each row's common tokens: their number, and the sum and the maximum of B's logprobs minus A's."""
        a, b = list_pair(rows, "logprobs")
        counts = np.minimum(np.minimum(a.lengths, b.lengths), common)
        deltas = delta(a.values[a.heads(counts)], b.values[b.heads(counts)])
        self._deltas.add(deltas)
        self._num_compared_rows += int(np.count_nonzero(counts))
        is_null = counts == 0
        return {
            "num_common_tokens": common,
            "sum_delta_logprob": pa.array(reduce_runs(np.add, deltas, counts), mask=is_null),
            "sum_abs_delta_logprob": pa.array(reduce_runs(np.add, np.abs(deltas), counts), mask=is_null),
            "max_abs_delta_logprob": pa.array(reduce_runs(np.maximum, np.abs(deltas), counts), mask=is_null),
            "num_compared_tokens": counts,
        }

    def _task_changes(self) -> TextsCompared:
        return TextsCompared(
            num_other_tokens=self._num_other_tokens,
            labels=None if self._labels is None else value_changes(self._labels),
            finish_reasons=value_changes(self._reasons),
            num_compared_rows=self._num_compared_rows,
            logprobs=self._deltas.summary(),
        )


def _has_choices(job: JobOutput) -> bool:
    sampling = job.spec["sampling"]
    return "choice" in (sampling.get("structured_outputs") or {}) or CHOICE_COLUMN in (sampling.get("columns") or {})
