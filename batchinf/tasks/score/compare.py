"""Compares scores of two jobs, for `diff`, and of a job and its reference, for `verify`; counts right answers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError, UserError
from batchinf.base.ragged import Ragged, to_ragged
from batchinf.records import BoolArray, PartCounts, Prompt, Request, Span
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
    delta,
    delta_text,
    equal,
    stored_logprobs,
)

ANSWER = "answer"
WINNERS = ("best", "best_per_token", "best_per_byte")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of rows with an answer, as reports and `--json` show it. The fields are those of `PartCounts`."""

    num_rows: int
    num_answered: int
    num_right: int
    num_right_per_token: int
    num_right_per_byte: int

    @classmethod
    def of(cls, counts: PartCounts) -> "Accuracy":
        """The accuracy in these counts."""
        return cls(*(getattr(counts, own.name) for own in fields(cls)))

    @property
    def shares(self) -> tuple[float, float, float]:
        """Share of right answers: raw, per token and per byte; 0 without answered rows."""
        numbers = (self.num_right, self.num_right_per_token, self.num_right_per_byte)
        raw, per_token, per_byte = (number / max(1, self.num_answered) for number in numbers)
        return raw, per_token, per_byte

    def __str__(self) -> str:
        raw, per_token, per_byte = self.shares
        return (
            f"best {raw:.2%} ({self.num_right:,}), best_per_token {per_token:.2%} ({self.num_right_per_token:,}), "
            f"best_per_byte {per_byte:.2%} ({self.num_right_per_byte:,}) of {self.num_answered:,} rows"
        )


def count_right_answers(table: pa.Table) -> PartCounts:
    """The counts of a table with the columns `answer` and `WINNERS`."""
    answer = table.column(ANSWER)
    # A failed row has no winner, and neither has a row with NaN among its scores.
    is_answered = pc.and_(answer.is_valid(), table.column(WINNERS[0]).is_valid())
    raw, per_token, per_byte = (_num(pc.equal(answer, table.column(name))) for name in WINNERS)
    return PartCounts(
        num_rows=table.num_rows,
        num_answered=_num(is_answered),
        num_right=raw,
        num_right_per_token=per_token,
        num_right_per_byte=per_byte,
    )


def _num(is_such: pa.ChunkedArray) -> int:
    return int(pc.sum(is_such, min_count=0).as_py())


_SUMS = ("logprob_sum", "logprob_mean")


@dataclass(frozen=True, slots=True)
class ScoresFound:
    """num_greedy_only_a, num_greedy_only_b: rows that are greedy in only one job. num_other_lengths: rows whose numbers
    of scored tokens differ. token_logprobs: of rows with the same tokens in both jobs.
    """

    num_greedy_only_a: int
    num_greedy_only_b: int
    num_other_lengths: int
    logprob_sum: DeltaSummary
    logprob_mean: DeltaSummary
    token_logprobs: DeltaSummary


@dataclass(frozen=True, slots=True)
class ChoicesFound:
    """num_other_best and the next two: rows with another winner. num_other_choices: rows with different numbers of
    choices. choice_logprob_sums: of the choices of all other rows. accuracy_a, accuracy_b: None if the job has no
    answers. num_answered: rows with an answer and scores in both jobs. num_right_to_wrong, num_wrong_to_right: those of
    them whose `best` changed so.
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
    """The `Changes` of two jobs. Raises OutputError if one job scores choices and the other one text a row."""
    kinds = ["several choices" if "choice_logprob_sums" in job.schema.names else "one text" for job in (a, b)]
    if kinds[0] != kinds[1]:
        raise OutputError(
            f"{a.folder} scores {kinds[0]} of a row, and {b.folder} {kinds[1]}: compare two that score the same"
        )
    return (ScoreChanges if kinds[0] == "one text" else ChoiceChanges)([a.schema, b.schema], num_examples)


class ScoreChanges(Changes):
    """Rows with one text or continuation. A row has changed if `is_greedy` differs or only one job has a score."""

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
        """See `Changes`. `max_abs_delta_logprob` is null for a row whose tokens differ."""
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
                # The first token of a sequence has no logprob in either job.
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
    """Rows with several choices. A row has changed if one of its winners differs."""

    def __init__(self, schemas: Sequence[pa.Schema], num_examples: int) -> None:
        super().__init__(num_examples)
        wanted = ("prompt_hash", *WINNERS, "choice_logprob_sums", ANSWER, "error_type")
        has_answer = all("choice_logprob_sums" in schema.names and ANSWER in schema.names for schema in schemas)
        self._has_answer = has_answer and all(schema.field(ANSWER).type == pa.int32() for schema in schemas)
        self.columns = [name for name in wanted if name != ANSWER or self._has_answer]
        self._deltas = Deltas()
        self._changed: Counter[str] = Counter()
        self._right_answers = [PartCounts(), PartCounts()]
        self._flips: Counter[tuple[bool, bool]] = Counter()
        self._num_other_choices = 0

    def compare(self, rows: pa.RecordBatch, wide: Sequence[pa.Table]) -> dict[str, Any]:
        """See `Changes`. The deltas are B - A over a row's choices; null if the jobs' numbers of choices differ."""
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
            own = pa.table({name: table[f"{name}_{job}"] for name in (ANSWER, *WINNERS)})
            self._right_answers[place] += count_right_answers(own)
            is_right.append(pc.equal(table[f"{ANSWER}_{job}"], table[f"{WINNERS[0]}_{job}"]).to_pylist())
        self._flips.update((a, b) for a, b in zip(*is_right, strict=True) if a is not None and b is not None)

    def own_found(self) -> ChoicesFound:
        """See `Changes`."""
        a, b = (Accuracy.of(counts) if counts.num_answered else None for counts in self._right_answers)
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


def _lines(found: ScoresFound | ChoicesFound) -> Iterator[str]:
    yield from _choice_lines(found) if isinstance(found, ChoicesFound) else _score_lines(found)


def _score_lines(found: ScoresFound) -> Iterator[str]:
    if found.num_greedy_only_a:
        yield f"  is_greedy True -> False: {found.num_greedy_only_a:,}"
    if found.num_greedy_only_b:
        yield f"  is_greedy False -> True: {found.num_greedy_only_b:,}"
    if found.num_other_lengths:
        yield f"  other numbers of scored tokens: {found.num_other_lengths:,} rows, whose means are of other tokens"
    for name, deltas in (("logprob_sum", found.logprob_sum), ("logprob_mean", found.logprob_mean)):
        yield f"{name} of {deltas.num:,} rows: {delta_text(deltas)}"
    if found.token_logprobs.num:
        yield f"logprobs of {found.token_logprobs.num:,} tokens that both scored: {delta_text(found.token_logprobs)}"


def _choice_lines(found: ChoicesFound) -> Iterator[str]:
    changed = (found.num_other_best, found.num_other_best_per_token, found.num_other_best_per_byte)
    for name, num_rows in zip(WINNERS, changed, strict=True):
        if num_rows:
            yield f"  {name}: {num_rows:,} rows have another one"
    if found.num_other_choices:
        yield f"  other numbers of choices: {found.num_other_choices:,} rows"
    yield f"logprob sums of {found.choice_logprob_sums.num:,} choices: {delta_text(found.choice_logprob_sums)}"
    for name, accuracy in (("A", found.accuracy_a), ("B", found.accuracy_b)):
        if accuracy is not None:
            yield f"accuracy of {name}: {accuracy}"
    if found.num_answered:
        yield (
            f"  best right -> wrong: {found.num_right_to_wrong:,}, wrong -> right: {found.num_wrong_to_right:,}, of "
            f"{found.num_answered:,} rows with answers"
        )


def _example_lines(key: str, row: dict[str, Any]) -> Iterator[str]:
    if "is_greedy_a" in row:
        yield f"  {key} {row['key']}: {_changed(row, ('is_greedy', 'logprob_sum', 'logprob_mean'))}"
        return
    answer = f" (answer {row['answer_a']})" if "answer_a" in row else ""
    winners = [name for name in WINNERS if row[f"{name}_a"] != row[f"{name}_b"]]
    yield f"  {key} {row['key']}{answer}: {_changed(row, winners)}"
    for name in "AB":
        sums = row[f"choice_logprob_sums_{name.lower()}"]
        yield f"    {name} {clip_value(None if sums is None else ' '.join(f'{value:.4f}' for value in sums))}"


def _changed(row: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {clip_value(row[f'{name}_a'])} -> {clip_value(row[f'{name}_b'])}" for name in names)


COMPARISON = Comparison(begin_changes, _lines, _example_lines)


class ScoreVerification(Verification):
    """See `Verification`."""

    columns = (*TOKEN_COLUMNS, *(f"choice_{name}" for name in TOKEN_COLUMNS))

    def check(self, schema: pa.Schema) -> None:
        """See `Verification`."""
        if not self.spec.output.include_token_logprobs:
            raise UserError("the job stored sums alone; run one with output.include_token_logprobs: true")

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredLogprobs]:
        """See `Verification`. One for each span."""
        spans = () if prompt.scoring is None else prompt.scoring.spans
        columns = _of_choices if "choice_logprobs" in row.values else _of_windows
        for span, own in zip(spans, columns(row.values, spans), strict=True):
            first = len(span.token_ids) - len(own["logprobs"])
            yield stored_logprobs(own, "scored", span.token_ids, first, span.token_ids[first:], "", 0)


def _of_choices(row: dict[str, Any], spans: Sequence[Span]) -> list[dict[str, Any]]:
    kept = {name: values for name in TOKEN_COLUMNS if (values := row.get(f"choice_{name}")) is not None}
    return [{name: values[place] for name, values in kept.items()} for place in range(len(spans))]


def _of_windows(row: dict[str, Any], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The columns of each window of a text. The output stores the windows end to end."""
    # With `store: all` the first token is stored, too; it has no logprob.
    has_all = len(spans) == 1 and len(row["logprobs"]) == len(spans[0].token_ids)
    starts = [1 if has_all else span.start for span in spans]
    ends = np.cumsum([len(span.token_ids) - start for span, start in zip(spans, starts, strict=True)]) + has_all
    return [
        {
            name: row[name][end - len(span.token_ids) + start : end]
            for name in TOKEN_COLUMNS
            if row.get(name) is not None
        }
        for span, start, end in zip(spans, starts, ends.tolist(), strict=True)
    ]
