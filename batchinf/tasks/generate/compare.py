"""Generated text of two jobs, for `diff`, and of a job and its reference, for `verify`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.ragged import to_ragged
from batchinf.records import Prompt, Request
from batchinf.tasks.compare import (
    TOKEN_COLUMNS,
    Changes,
    Comparison,
    Deltas,
    DeltaSummary,
    JobOutput,
    StoredLogprobs,
    StoredRow,
    Verification,
    clip_value,
    delta_text,
    equal,
    num_common,
    stored_logprobs,
)

_WANTED = ("prompt_hash", "text", "token_ids", "finish_reason", "cumulative_logprob", "logprobs", "error_type")


@dataclass(frozen=True, slots=True)
class FinishReasonChange:
    """Changed rows with these two finish reasons, which may be the same; None is that of an error row."""

    a: str | None
    b: str | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class TextsFound:
    """finish_reasons: of changed rows, the most frequent first. logprobs: of the tokens that both jobs gave, up to the
    first difference, in `num_compared_rows` rows.
    """

    finish_reasons: tuple[FinishReasonChange, ...]
    num_compared_rows: int
    logprobs: DeltaSummary


class TextChanges(Changes):
    """Of task generate. A row has changed where its token ids have, or, where they are not stored, its text."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        super().__init__(num_examples)
        self.columns = [name for name in _WANTED if name in a.schema.names and name in b.schema.names]
        self._has_ids = "token_ids" in self.columns
        self._has_logprobs = self._has_ids and "logprobs" in self.columns
        self._reasons: Counter[tuple[str | None, str | None]] = Counter()
        self._deltas = Deltas()
        self._num_compared = 0

    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """See `Changes`."""
        ids = [to_ragged(rows.column(f"token_ids_{name}")) for name in "ab"] if self._has_ids else []
        if ids:
            common = np.array([num_common(ids[0][row], ids[1][row]) for row in range(rows.num_rows)], np.int64)
            is_changed = (common < ids[0].lengths) | (common < ids[1].lengths) | (ids[0].is_null != ids[1].is_null)
        else:
            common = np.zeros(rows.num_rows, np.int64)
            is_changed = ~equal(rows, "text")
        columns: dict[str, Any] = {
            "is_changed": is_changed,
            "first_difference": pa.array(common, mask=~is_changed | (not ids)),
        }
        if self._has_logprobs:
            columns |= _deltas(rows, common)
        for name in ("text", "finish_reason", "cumulative_logprob"):
            if name in self.columns:
                columns |= {f"{name}_{job}": rows.column(f"{name}_{job}") for job in "ab"}
        return columns

    def count(self, table: pa.Table) -> None:
        """See `Changes`."""
        changed = table.filter(table["is_changed"])
        self._reasons.update(zip(*(changed[f"finish_reason_{job}"].to_pylist() for job in "ab"), strict=True))
        if not self._has_logprobs:
            return
        counts = table["num_compared_tokens"].to_numpy()
        self._num_compared += int(np.count_nonzero(counts))
        sums = (table[f"{name}_delta_logprob"].to_numpy() for name in ("sum", "sum_abs", "max_abs"))
        total, absolute, greatest = (found[~np.isnan(found)] for found in sums)
        self._deltas.add_sums(
            int(counts.sum()), 0, float(total.sum()), float(absolute.sum()), float(greatest.max(initial=0.0))
        )

    def own_found(self) -> TextsFound:
        """See `Changes`."""
        reasons = tuple(FinishReasonChange(a, b, num) for (a, b), num in self._reasons.most_common())
        return TextsFound(reasons, self._num_compared, self._deltas.summary())


def _deltas(rows: pa.RecordBatch, common: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Over each row's common tokens: how many there are, and the sum and the greatest of B's logprobs less A's."""
    a, b = (to_ragged(rows.column(f"logprobs_{name}")) for name in "ab")
    found = np.zeros((len(common), 3))
    counts = np.minimum(np.minimum(a.lengths, b.lengths), common)
    for row in np.flatnonzero(counts):
        delta = b[row][: counts[row]].astype(np.float64) - a[row][: counts[row]]
        found[row] = delta.sum(), np.abs(delta).sum(), np.abs(delta).max()
    is_null = counts == 0
    return {
        "num_common_tokens": common,
        "sum_delta_logprob": pa.array(found[:, 0], mask=is_null),
        "sum_abs_delta_logprob": pa.array(found[:, 1], mask=is_null),
        "max_abs_delta_logprob": pa.array(found[:, 2], mask=is_null),
        "num_compared_tokens": counts,
    }


def _lines(found: TextsFound) -> Iterator[str]:
    for reason in found.finish_reasons:
        if reason.a != reason.b:
            yield f"  finish_reason {reason.a} -> {reason.b}: {reason.num_rows:,}"
    if found.logprobs.num:
        yield (
            f"logprobs of {found.logprobs.num:,} tokens that both gave ({found.num_compared_rows:,} rows, up to the "
            f"first difference): {delta_text(found.logprobs)}"
        )


def _example_lines(key: str, row: dict[str, Any]) -> Iterator[str]:
    yield f"  {key} {row['key']}, sample {row['sample_index']}, other from token {row['first_difference']} on:"
    yield from (f"    {name} {clip_value(row[f'text_{name.lower()}'])}" for name in "AB")


COMPARISON = Comparison(TextChanges, _lines, _example_lines)


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
            # Nothing is stored of the first token.
            yield stored_logprobs(values, "prompt", ids, 1, ids[1:], "prompt_", 1)
        if values.get("logprobs") is not None and values["token_ids"]:
            own = values["token_ids"]
            yield stored_logprobs(values, "output", [*ids, *own], len(ids), own, "", 0)
