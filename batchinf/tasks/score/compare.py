"""Compares the scores of two jobs for `diff`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError
from batchinf.base.ragged import common_lengths, reduce_runs
from batchinf.tasks.compare import (
    Changes,
    Deltas,
    DeltaSummary,
    JobOutput,
    TaskChanges,
    both_columns,
    clip_value,
    delta,
    equal,
    list_pair,
    number_deltas,
    value_pairs,
)
from batchinf.tasks.score.accuracy import ANSWER, BEST_PMI, WINNERS, Accuracy, count_answers

_SUMS = ("logprob_sum", "logprob_mean")
_CHOICE_SUMS = "choice_logprob_sums"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresCompared(TaskChanges):
    """The counts of rows with one text."""

    num_greedy_only_a: int
    """Rows that are greedy in job A only."""
    num_greedy_only_b: int
    num_other_lengths: int
    """Rows whose numbers of scored tokens differ."""
    logprob_sum: DeltaSummary
    logprob_mean: DeltaSummary
    token_logprobs: DeltaSummary
    """Of rows with the same tokens in both jobs."""

    def lines(self) -> Iterator[str]:
        if self.num_greedy_only_a:
            yield f"  is_greedy True -> False: {self.num_greedy_only_a:,}"
        if self.num_greedy_only_b:
            yield f"  is_greedy False -> True: {self.num_greedy_only_b:,}"
        if self.num_other_lengths:
            yield f"  other numbers of scored tokens: {self.num_other_lengths:,} rows, whose means are of other tokens"
        for name, deltas in (("logprob_sum", self.logprob_sum), ("logprob_mean", self.logprob_mean)):
            yield f"{name} of {deltas.num:,} rows: {deltas}"
        if self.token_logprobs.num:
            yield f"logprobs of {self.token_logprobs.num:,} tokens that both scored: {self.token_logprobs}"

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        yield f"  {key} {row['key']}: {_changed(row, ('is_greedy', *_SUMS))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesCompared(TaskChanges):
    """The counts of rows with choices."""

    num_other_best: int
    """Rows whose winners differ, as the next two fields."""
    num_other_best_per_token: int
    num_other_best_per_byte: int
    num_other_choices: int
    """Rows whose numbers of choices differ."""
    choice_logprob_sums: DeltaSummary
    """Of the choices of all other rows."""
    accuracy_a: Accuracy | None
    """None if no row of the job has an answer."""
    accuracy_b: Accuracy | None
    num_answered: int
    """Rows for which both jobs have an answer and scores."""
    num_right_to_wrong: int
    """How many of these changed, by `best`."""
    num_wrong_to_right: int

    def lines(self) -> Iterator[str]:
        for name in WINNERS:
            if num_rows := getattr(self, f"num_other_{name}"):
                yield f"  {name}: {num_rows:,} rows have another one"
        if self.num_other_choices:
            yield f"  other numbers of choices: {self.num_other_choices:,} rows"
        yield f"logprob sums of {self.choice_logprob_sums.num:,} choices: {self.choice_logprob_sums}"
        for name, accuracy in (("A", self.accuracy_a), ("B", self.accuracy_b)):
            if accuracy is not None:
                yield f"accuracy of {name}: {accuracy}"
        if self.num_answered:
            yield (
                f"  best right -> wrong: {self.num_right_to_wrong:,}, wrong -> right: {self.num_wrong_to_right:,}, of "
                f"{self.num_answered:,} rows with answers"
            )

    def example_lines(self, key: str, row: dict[str, Any]) -> Iterator[str]:
        answer = f" (answer {row['answer_a']})" if "answer_a" in row else ""
        winners = [name for name in WINNERS if row[f"{name}_a"] != row[f"{name}_b"]]
        yield f"  {key} {row['key']}{answer}: {_changed(row, winners)}"
        for name in "AB":
            sums = row[f"choice_logprob_sums_{name.lower()}"]
            yield f"    {name} {clip_value(None if sums is None else ' '.join(f'{value:.4f}' for value in sums))}"


def _changed(row: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {clip_value(row[f'{name}_a'])} -> {clip_value(row[f'{name}_b'])}" for name in names)


def begin_changes(a: JobOutput, b: JobOutput, num_examples: int) -> Changes:
    """The counter for these jobs. Raises OutputError if one job scores choices and the other one text for each row."""
    kinds = ["several choices" if _CHOICE_SUMS in job.own_schema.names else "one text" for job in (a, b)]
    if kinds[0] != kinds[1]:
        raise OutputError(
            f"{a.folder} scores {kinds[0]} of a row, and {b.folder} {kinds[1]}: compare jobs that score the same"
        )
    return (ScoreChanges if kinds[0] == "one text" else ChoiceChanges)(a, b, num_examples)


class ScoreChanges(Changes):
    """Rows with one text or continuation. A row has changed if `is_greedy` differs or only one job has a score."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        super().__init__(a, b, num_examples, (*_SUMS, "num_tokens", "is_greedy", "token_ids", "logprobs"))
        self._deltas = {name: Deltas() for name in _SUMS}
        self._tokens = Deltas()
        self._greedy: Counter[tuple[bool, bool]] = Counter()
        self._num_other_lengths = 0

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        columns: dict[str, Any] = {"is_changed": ~equal(rows, "is_greedy")}
        columns |= {f"delta_{name}": number_deltas(rows, name, deltas) for name, deltas in self._deltas.items()}
        if {"token_ids", "logprobs"} <= {*self.columns}:
            columns["max_abs_delta_logprob"] = self._token_deltas(rows)
        both = rows.filter(pc.and_(*(column.is_valid() for column in both_columns(rows, "is_greedy"))))
        self._greedy.update(value_pairs(both, "is_greedy"))
        self._num_other_lengths += int(np.count_nonzero(~equal(both, "num_tokens")))
        return columns | self._both(rows, *_SUMS, "num_tokens", "is_greedy")

    def _token_deltas(self, rows: pa.RecordBatch) -> pa.Array:
        """The greatest absolute difference over the tokens of each row; null if the tokens differ."""
        ids, other_ids = list_pair(rows, "token_ids")
        a, b = list_pair(rows, "logprobs")
        common = common_lengths(ids, other_ids)
        is_same = (common == ids.lengths) & (common == other_ids.lengths) & (common > 0)
        counts = np.where(is_same, np.minimum(a.lengths, b.lengths), 0)
        logprobs = a.values[a.heads(counts)]
        others = b.values[b.heads(counts)]
        deltas = delta(logprobs, others)
        # The first token of a text has no logprob in either job.
        is_first = np.isnan(logprobs) & np.isnan(others)
        self._tokens.add(deltas[~is_first])
        deltas[is_first] = 0.0
        return pa.array(reduce_runs(np.maximum, np.abs(deltas), counts), mask=~is_same)

    def _task_changes(self) -> ScoresCompared:
        return ScoresCompared(
            num_greedy_only_a=self._greedy[True, False],
            num_greedy_only_b=self._greedy[False, True],
            num_other_lengths=self._num_other_lengths,
            logprob_sum=self._deltas["logprob_sum"].summary(),
            logprob_mean=self._deltas["logprob_mean"].summary(),
            token_logprobs=self._tokens.summary(),
        )


class ChoiceChanges(Changes):
    """Rows with several choices. A row has changed if one of its winners differs."""

    def __init__(self, a: JobOutput, b: JobOutput, num_examples: int) -> None:
        has_answer = all(
            ANSWER in job.own_schema.names and job.own_schema.field(ANSWER).type == pa.int32() for job in (a, b)
        )
        has_pmi = all(BEST_PMI in job.own_schema.names for job in (a, b))
        self._winners = (*WINNERS, BEST_PMI) if has_pmi else WINNERS
        self._shown = (*self._winners, _CHOICE_SUMS, *([ANSWER] if has_answer else []))
        super().__init__(a, b, num_examples, self._shown)
        self._deltas = Deltas()
        self._changed: Counter[str] = Counter()
        self._num_rows = 0
        self._answers: dict[str, Counter[str]] = {"a": Counter(), "b": Counter()}
        self._flips: Counter[tuple[bool, bool]] = Counter()

    def _compare(self, rows: pa.RecordBatch) -> dict[str, Any]:
        has_changed = {name: ~equal(rows, name) for name in WINNERS}
        self._changed.update({name: int(np.count_nonzero(is_other)) for name, is_other in has_changed.items()})
        self._num_rows += rows.num_rows
        if ANSWER in self.columns:
            self._count_answers(rows)
        is_changed = np.logical_or.reduce([*has_changed.values()])
        return {"is_changed": is_changed, **self._sum_deltas(rows), **self._both(rows, *self._shown)}

    def _sum_deltas(self, rows: pa.RecordBatch) -> dict[str, Any]:
        """For each row's choices: the mean difference and the greatest absolute difference of B's sums minus A's.

        Null if one job has no choices or their numbers differ.
        """
        a, b = list_pair(rows, _CHOICE_SUMS)
        is_other = (a.lengths != b.lengths) & ~a.is_null & ~b.is_null
        self._changed["choices"] += int(np.count_nonzero(is_other))
        counts = np.where(a.lengths == b.lengths, a.lengths, 0)
        deltas = delta(a.values[a.heads(counts)], b.values[b.heads(counts)])
        self._deltas.add(deltas)
        means = reduce_runs(np.add, deltas, counts) / np.maximum(counts, 1)
        return {
            "mean_delta_logprob_sum": pa.array(means, mask=counts == 0),
            "max_abs_delta_logprob_sum": pa.array(reduce_runs(np.maximum, np.abs(deltas), counts), mask=counts == 0),
        }

    def _count_answers(self, rows: pa.RecordBatch) -> None:
        is_right = []
        for job, counts in self._answers.items():
            columns = pa.table({name: rows[f"{name}_{job}"] for name in (ANSWER, *self._winners)})
            counts.update(count_answers(columns))
            is_right.append(pc.equal(columns[ANSWER], columns[WINNERS[0]]).to_pylist())
        self._flips.update((a, b) for a, b in zip(*is_right, strict=True) if a is not None and b is not None)

    def _task_changes(self) -> ChoicesCompared:
        return ChoicesCompared(
            **{f"num_other_{name}": self._changed[name] for name in (*WINNERS, "choices")},
            choice_logprob_sums=self._deltas.summary(),
            accuracy_a=Accuracy.of(self._num_rows, self._answers["a"]),
            accuracy_b=Accuracy.of(self._num_rows, self._answers["b"]),
            num_answered=self._flips.total(),
            num_right_to_wrong=self._flips[True, False],
            num_wrong_to_right=self._flips[False, True],
        )
