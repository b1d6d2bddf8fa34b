"""What changed between two jobs' scores.

Of a text or a continuation its sum and mean; of choices the winners too, and the accuracy where there are answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError
from batchinf.base.ragged import Ragged, to_ragged
from batchinf.records import BoolArray
from batchinf.tasks.changes import Changes, Deltas, DeltaSummary, JobOutput, delta, equal
from batchinf.tasks.score.accuracy import ANSWER, WINNERS, Accuracy, count_right_answers

_SUMS = ("logprob_sum", "logprob_mean")


@dataclass(frozen=True, slots=True)
class ScoresFound:
    """num_greedy_only_a, num_greedy_only_b: rows that are greedy in one job alone. num_other_lengths: rows with other
    numbers of scored tokens. token_logprobs: of rows whose tokens are the same in both.
    """

    num_greedy_only_a: int
    num_greedy_only_b: int
    num_other_lengths: int
    logprob_sum: DeltaSummary
    logprob_mean: DeltaSummary
    token_logprobs: DeltaSummary


@dataclass(frozen=True, slots=True)
class ChoicesFound:
    """num_other_best and the next: rows with another winner. num_other_choices: rows with other numbers of choices.
    choice_logprob_sums: of the choices of all other rows. accuracy_a, accuracy_b: None where the job has no answers.
    num_right_to_wrong, num_wrong_to_right: rows by `best`, of num_answered that both jobs have an answer and scores of.
    """

    num_other_best: int
    num_other_best_per_token: int
    num_other_best_per_byte: int
    num_other_choices: int
    choice_logprob_sums: DeltaSummary
    accuracy_a: Accuracy | None
    accuracy_b: Accuracy | None
    num_answered: int
    num_right_to_wrong: int
    num_wrong_to_right: int


def begin_changes(a: JobOutput, b: JobOutput, num_examples: int) -> Changes:
    """What counts the changes. Raises OutputError where one job scores choices, and the other one text a row."""
    kinds = ["several choices" if "choice_logprob_sums" in job.schema.names else "one text" for job in (a, b)]
    if kinds[0] != kinds[1]:
        raise OutputError(
            f"{a.folder} scores {kinds[0]} of a row, and {b.folder} {kinds[1]}: compare two that score the same"
        )
    return (ScoreChanges if kinds[0] == "one text" else ChoiceChanges)([a.schema, b.schema], num_examples)


class ScoreChanges(Changes):
    """Of a text or a continuation. A row has changed where `is_greedy` has, or where one of the two has no score."""

    def __init__(self, schemas: Sequence[pa.Schema], num_examples: int) -> None:
        super().__init__(num_examples)
        wanted = ("prompt_hash", *_SUMS, "num_tokens", "is_greedy", "token_ids", "logprobs", "error_type")
        self.columns = [name for name in wanted if all(name in schema.names for schema in schemas)]
        self._has_tokens = {"token_ids", "logprobs"} <= {*self.columns}
        self._deltas = {name: Deltas() for name in _SUMS}
        self._tokens = Deltas()
        self._greedy: Counter[tuple[bool, bool]] = Counter()
        self._num_other_lengths = 0

    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """See `Changes`. `max_abs_delta_logprob` is over the tokens of rows whose tokens are the same in both."""
        columns: dict[str, Any] = {"is_changed": ~equal(rows, "is_greedy")}
        for name in _SUMS:
            a, b = (_floats(rows, f"{name}_{job}") for job in "ab")
            is_null = _one_is_null(rows, name)
            found = delta(a, b)
            self._deltas[name].add(found[~is_null])
            columns[f"delta_{name}"] = pa.array(found, mask=is_null)
        if self._has_tokens:
            columns["max_abs_delta_logprob"] = self._token_deltas(rows)
        for name in (*_SUMS, "num_tokens", "is_greedy"):
            columns |= {f"{name}_{job}": rows.column(f"{name}_{job}") for job in "ab"}
        return columns

    def _token_deltas(self, rows: pa.RecordBatch) -> pa.Array:
        ids, logprobs = (
            [to_ragged(rows.column(f"{name}_{job}")) for job in "ab"] for name in ("token_ids", "logprobs")
        )
        greatest, is_null = np.zeros(rows.num_rows), np.ones(rows.num_rows, np.bool_)
        for row in range(rows.num_rows):
            if len(ids[0][row]) and np.array_equal(ids[0][row], ids[1][row]):
                # The first of all tokens has no logprob in either.
                own, other = (found[row] for found in logprobs)
                found = delta(own, other)[~(np.isnan(own) & np.isnan(other))]
                self._tokens.add(found)
                greatest[row], is_null[row] = np.abs(found).max(initial=0.0), False
        return pa.array(greatest, mask=is_null)

    def count(self, table: pa.Table) -> None:
        """See `Changes`."""
        both = table.filter(_both_valid(table, "is_greedy"))
        self._greedy.update(zip(*(both[f"is_greedy_{job}"].to_pylist() for job in "ab"), strict=True))
        lengths = (both[f"num_tokens_{job}"].to_numpy() for job in "ab")
        self._num_other_lengths += int(np.count_nonzero(np.not_equal(*lengths)))

    def own_found(self) -> ScoresFound:
        """See `Changes`."""
        return ScoresFound(
            self._greedy[True, False],
            self._greedy[False, True],
            self._num_other_lengths,
            self._deltas["logprob_sum"].summary(),
            self._deltas["logprob_mean"].summary(),
            self._tokens.summary(),
        )


class ChoiceChanges(Changes):
    """Of several choices a row. A row has changed where one of its winners has."""

    def __init__(self, schemas: Sequence[pa.Schema], num_examples: int) -> None:
        super().__init__(num_examples)
        wanted = ("prompt_hash", *WINNERS, "choice_logprob_sums", ANSWER, "error_type")
        has_answer = all("choice_logprob_sums" in schema.names and ANSWER in schema.names for schema in schemas)
        self._has_answer = has_answer and all(schema.field(ANSWER).type == pa.int32() for schema in schemas)
        self.columns = [name for name in wanted if name != ANSWER or self._has_answer]
        self._deltas = Deltas()
        self._changed: Counter[str] = Counter()
        self._accuracy = [Accuracy(), Accuracy()]
        self._flips: Counter[tuple[bool, bool]] = Counter()
        self._num_other_choices = 0

    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """See `Changes`. Over a row's choices: the mean and the greatest of B's sums less A's; null where one of the
        two has none, or others in number.
        """
        is_changed = np.zeros(rows.num_rows, np.bool_)
        for name in WINNERS:
            has_changed = ~equal(rows, name)
            self._changed[name] += int(np.count_nonzero(has_changed))
            is_changed |= has_changed
        sums = [to_ragged(rows.column(f"choice_logprob_sums_{job}")) for job in "ab"]
        columns: dict[str, Any] = {"is_changed": is_changed, **self._sum_deltas(*sums)}
        for name in self.columns:
            if name not in ("prompt_hash", "error_type"):
                columns |= {f"{name}_{job}": rows.column(f"{name}_{job}") for job in "ab"}
        return columns

    def _sum_deltas(self, a: Ragged, b: Ragged) -> dict[str, Any]:
        means, greatest, is_null = np.zeros(len(a)), np.zeros(len(a)), np.ones(len(a), np.bool_)
        self._num_other_choices += int(np.count_nonzero((a.lengths != b.lengths) & ~a.is_null & ~b.is_null))
        for row in np.flatnonzero((a.lengths == b.lengths) & (a.lengths > 0)):
            found = delta(a[row], b[row])
            self._deltas.add(found)
            means[row], greatest[row], is_null[row] = found.mean(), np.abs(found).max(), False
        return {
            "mean_delta_logprob_sum": pa.array(means, mask=is_null),
            "max_abs_delta_logprob_sum": pa.array(greatest, mask=is_null),
        }

    def count(self, table: pa.Table) -> None:
        """See `Changes`."""
        if not self._has_answer:
            return
        is_right = []
        for place, job in enumerate("ab"):
            self._accuracy[place] += count_right_answers(pa.table({n: table[f"{n}_{job}"] for n in (ANSWER, *WINNERS)}))
            is_right.append(pc.equal(table[f"{ANSWER}_{job}"], table[f"{WINNERS[0]}_{job}"]).to_pylist())
        self._flips.update((a, b) for a, b in zip(*is_right, strict=True) if a is not None and b is not None)

    def own_found(self) -> ChoicesFound:
        """See `Changes`."""
        a, b = (accuracy if accuracy.num_answered else None for accuracy in self._accuracy)
        return ChoicesFound(
            num_other_best=self._changed["best"],
            num_other_best_per_token=self._changed["best_per_token"],
            num_other_best_per_byte=self._changed["best_per_byte"],
            num_other_choices=self._num_other_choices,
            choice_logprob_sums=self._deltas.summary(),
            accuracy_a=a,
            accuracy_b=b,
            num_answered=self._flips.total(),
            num_right_to_wrong=self._flips[True, False],
            num_wrong_to_right=self._flips[False, True],
        )


def _floats(rows: pa.RecordBatch, name: str) -> Any:
    return np.asarray(rows.column(name).to_numpy(zero_copy_only=False), np.float64)


def _one_is_null(rows: pa.RecordBatch, name: str) -> BoolArray:
    a, b = (np.asarray(rows.column(f"{name}_{job}").is_null()) for job in "ab")
    found: BoolArray = a | b
    return found


def _both_valid(table: pa.Table, name: str) -> pa.ChunkedArray:
    a, b = (np.asarray(table[f"{name}_{job}"].is_valid()) for job in "ab")
    return pa.chunked_array([pa.array(a & b)])
