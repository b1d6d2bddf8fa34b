"""Compares generated text: of two jobs for `diff`, and of a job and its reference for `verify`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.ragged import common_lengths, reduce_runs
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
    """The counts of task generate. finish_reasons: of changed rows; None for an error row.

    logprobs: of the tokens that both jobs generated, up to the first difference, in `num_compared_rows` rows.
    """

    finish_reasons: tuple[ValueChange, ...]
    num_compared_rows: int
    logprobs: DeltaSummary

    def lines(self) -> Iterator[str]:
        """See `Found`."""
        for reason in self.finish_reasons:
            if reason.a != reason.b:
                yield f"  finish_reason {reason.a} -> {reason.b}: {reason.num_rows:,}"
        if self.logprobs.num:
            yield (
                f"logprobs of {self.logprobs.num:,} tokens that both gave ({self.num_compared_rows:,} rows, up to the "
                f"first difference): {self.logprobs}"
            )

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        """See `Found`."""
        yield f"  {key} {row['key']}, sample {row['sample_index']}, other from token {row['first_difference']} on:"
        yield from (f"    {name} {clip_value(row[f'text_{name.lower()}'])}" for name in "AB")


_SHOWN = ("text", "finish_reason", "cumulative_logprob")


class TextChanges(Changes):
    """Task generate. A row has changed if its token ids differ; if they are not stored, if its text differs."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        super().__init__(a, b, num_examples, (*_SHOWN, "token_ids", "logprobs"))
        self._reasons: Counter[tuple[str | None, str | None]] = Counter()
        self._deltas = Deltas()
        self._num_compared = 0

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        columns: dict[str, Any]
        if "token_ids" in self.columns:
            a, b = list_pair(rows, "token_ids")
            common = common_lengths(a, b)
            is_changed = (common < a.lengths) | (common < b.lengths) | (a.is_null != b.is_null)
            columns = {"is_changed": is_changed, "first_difference": pa.array(common, mask=~is_changed)}
            if "logprobs" in self.columns:
                columns |= self._logprob_deltas(rows, common)
        else:
            is_changed = ~equal(rows, "text")
            columns = {"is_changed": is_changed, "first_difference": pa.nulls(rows.num_rows, pa.int64())}
        self._reasons.update(value_pairs(rows.filter(pa.array(is_changed)), "finish_reason"))
        return columns | self._both(rows, *_SHOWN)

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
        return TextsFound(value_changes(self._reasons), self._num_compared, self._deltas.summary())


class TextVerification(Verification):
    """See `Verification`."""

    columns = ("token_ids", *TOKEN_COLUMNS, *(f"prompt_{name}" for name in TOKEN_COLUMNS))

    def check(self, schema: pa.Schema) -> None:
        """See `Verification`."""
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
        """See `Verification`."""
        values = row.values
        ids = requests[values["sample_index"]].prompt_token_ids
        if values.get("prompt_logprobs") is not None and len(ids) > 1:
            # The first token has no logprob.
            yield stored_logprobs(values, "prompt", ids, 1, ids[1:], "prompt_", 1)
        if values.get("logprobs") is not None and values["token_ids"]:
            own = values["token_ids"]
            yield stored_logprobs(values, "output", [*ids, *own], len(ids), own, "", 0)
