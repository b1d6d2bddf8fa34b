"""Compares generated text: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.ragged import common_lengths, reduce_runs
from batchinf.base.text import plain_line
from batchinf.records import Int64Array, Prompt, Request
from batchinf.tasks.compare import (
    TOKEN_COLUMNS,
    Changes,
    Deltas,
    DeltaSummary,
    Found,
    JobOutput,
    StoredLogprobs,
    StoredRow,
    ValueChange,
    Verification,
    clip_value,
    delta,
    equal,
    list_pair,
    stored_logprobs,
    value_changes,
    value_pairs,
)


@dataclass(frozen=True, slots=True)
class TextsFound(Found):
    """The counts of task generate. finish_reasons: of rows with another text or other tokens; None for an error row.

    num_other_tokens: rows with the same text by other tokens. labels: texts in A and B, changed or not, of jobs whose
    structured outputs are choices; None for others, and for an error row's text. logprobs: of the tokens that both jobs
    generated, up to the first difference, in `num_compared_rows` rows.
    """

    num_other_tokens: int
    labels: tuple[ValueChange, ...] | None
    finish_reasons: tuple[ValueChange, ...]
    num_compared_rows: int
    logprobs: DeltaSummary

    def headline(self, num_changed: int, num_both: int) -> Iterator[str]:
        [line] = Found.headline(self, num_changed, num_both)
        what = line if self.labels is None else line.replace("outputs:", "labels:")
        is_one = self.num_other_tokens == 1
        subject = "1 other has" if is_one else f"{self.num_other_tokens:,} others have"
        yield what + (f"; {subject} the same text, made of different tokens" if self.num_other_tokens else "")
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
        yield from (f"    {name} {clip_value(row[f'text_{name.lower()}'])}" for name in "AB")


_MOST_LABELS, _LABEL_CHARS = 12, 16


def confusion_lines(labels: Sequence[ValueChange]) -> Iterator[str]:
    """A matrix of numbers of rows: the labels of A down, those of B across. Of many labels: the changes alone."""
    names = sorted({name for change in labels for name in (change.a, change.b)}, key=lambda name: (name is None, name))
    if len(names) > _MOST_LABELS:
        changed = [change for change in labels if change.a != change.b]
        for change in changed[:_MOST_LABELS]:
            yield f"  {_label(change.a)} -> {_label(change.b)}: {change.num_rows:,}"
        return
    numbers = {(change.a, change.b): change.num_rows for change in labels}
    shown = [_label(name) for name in names]
    width = max(map(len, shown), default=0)
    widths = [
        max(len(name), *(len(f"{numbers.get((a, b), 0):,}") for a in names))
        for name, b in zip(shown, names, strict=True)
    ]
    yield "  ".join(
        ["  A \\ B".ljust(width + 2), *(name.rjust(wide) for name, wide in zip(shown, widths, strict=True))]
    )
    for a, name in zip(names, shown, strict=True):
        cells = [f"{number:,}" if (number := numbers.get((a, b), 0)) else "·" for b in names]
        yield "  ".join([f"  {name}".ljust(width + 2), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))])


def _label(name: str | None) -> str:
    return "(error)" if name is None else plain_line(name, _LABEL_CHARS)


_SHOWN = ("text", "finish_reason", "cumulative_logprob")


class TextChanges(Changes):
    """Task generate. A row has changed if its text differs. The same text by other tokens is counted apart."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        super().__init__(a, b, num_examples, (*_SHOWN, "token_ids", "logprobs"))
        self._reasons: Counter[tuple[str | None, str | None]] = Counter()
        self._labels: Counter[tuple[str | None, str | None]] | None = None
        if _has_choices(a) and _has_choices(b):
            self._labels = Counter()
        self._deltas = Deltas()
        self._num_compared = self._num_other_tokens = 0

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        columns: dict[str, Any] = {"is_changed": ~equal(rows, "text")}
        is_other = columns["is_changed"]
        columns["has_other_tokens"] = pa.nulls(rows.num_rows, pa.bool_())
        columns["first_difference"] = pa.nulls(rows.num_rows, pa.int64())
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

    def _distances(self, table: pa.Table) -> npt.NDArray[np.float64]:
        """Other texts first, then the same text by other tokens."""
        has_other_tokens = table["has_other_tokens"].fill_null(False).to_numpy()
        return np.asarray(2.0 * np.asarray(table["is_changed"]) + has_other_tokens, np.float64)

    def _logprob_deltas(self, rows: pa.RecordBatch, common: Int64Array) -> dict[str, Any]:
        """For each row's common tokens: their number, and the sum and the maximum of B's logprobs minus A's."""
        a, b = list_pair(rows, "logprobs")
        counts = np.minimum(np.minimum(a.lengths, b.lengths), common)
        found = delta(a.values[a.heads(counts)], b.values[b.heads(counts)])
        self._deltas.add(found)
        self._num_compared += int(np.count_nonzero(counts))
        is_null = counts == 0
        return {
            "num_common_tokens": common,
            "sum_delta_logprob": pa.array(reduce_runs(np.add, found, counts), mask=is_null),
            "sum_abs_delta_logprob": pa.array(reduce_runs(np.add, np.abs(found), counts), mask=is_null),
            "max_abs_delta_logprob": pa.array(reduce_runs(np.maximum, np.abs(found), counts), mask=is_null),
            "num_compared_tokens": counts,
        }

    def _own_found(self) -> TextsFound:
        return TextsFound(
            self._num_other_tokens,
            None if self._labels is None else value_changes(self._labels),
            value_changes(self._reasons),
            self._num_compared,
            self._deltas.summary(),
        )


def _has_choices(job: JobOutput) -> bool:
    return bool((job.spec["sampling"].get("structured_outputs") or {}).get("choice"))


class TextVerification(Verification):
    """Compares the logprobs of generated tokens and of prompt tokens."""

    columns = ("token_ids", *TOKEN_COLUMNS, *(f"prompt_{name}" for name in TOKEN_COLUMNS))

    def check(self, schema: pa.Schema) -> None:
        if "logprobs" not in schema.names and "prompt_logprobs" not in schema.names:
            raise UserError(
                "the job stored no logprobs to verify; run one with sampling.logprobs or sampling.prompt_logprobs"
            )
        if "logprobs" in schema.names and "token_ids" not in schema.names:
            raise UserError(
                "the job stored no token_ids, whose logprobs could be verified; run one with "
                "output.include_token_ids: true"
            )

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredLogprobs]:
        values = row.values
        ids = requests[values["sample_index"]].prompt_token_ids
        if values.get("prompt_logprobs") is not None and len(ids) > 1:
            # The first token has no logprob.
            yield stored_logprobs(values, "prompt", ids, 1, ids[1:], "prompt_", 1)
        if values.get("logprobs") is not None and values["token_ids"]:
            own = values["token_ids"]
            yield stored_logprobs(values, "output", [*ids, *own], len(ids), own, "", 0)
