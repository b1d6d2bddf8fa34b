"""The accuracy of rows with an answer: its counts, which parts keep, and its lines for people."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.spec.input import Answers
from batchinf.tasks.score.answers import MEANINGS

ANSWER = "answer"
ANSWER_ERROR = "answer_error"
BEST_PMI = "best_pmi"
WINNERS = ("best", "best_per_token", "best_per_byte")


def count_answers(rows: pa.Table | pa.RecordBatch, answers: Answers = "auto") -> dict[str, int]:
    """The counts of rows with the columns `answer` and `WINNERS`, and perhaps `answer_error` and `BEST_PMI`.

    num_answered: rows with an answer and with scores. num_wrong_answers: rows with an `answer_error`: their value in
    the column of answers is no choice. num_right, …_per_token, …_per_byte, …_pmi: rows whose winners are the answer.
    num_texts, num_places, num_places_from_1: rows with a value in that column, by `input.answers`.
    """
    answer = rows.column(ANSWER)
    has_error = ANSWER_ERROR in rows.schema.names
    best, per_token, per_byte = (_num(pc.equal(answer, rows.column(name))) for name in WINNERS)
    pmi = {"num_right_pmi": _num(pc.equal(answer, rows.column(BEST_PMI)))} if BEST_PMI in rows.schema.names else {}
    num_given = _num(pc.or_(answer.is_valid(), rows.column(ANSWER_ERROR).is_valid())) if has_error else 0
    return {
        # A failed row has no winner. A row with NaN among its scores has no winner either.
        "num_answered": _num(pc.and_(answer.is_valid(), rows.column(WINNERS[0]).is_valid())),
        "num_wrong_answers": _num(rows.column(ANSWER_ERROR).is_valid()) if has_error else 0,
        "num_right": best,
        "num_right_per_token": per_token,
        "num_right_per_byte": per_byte,
        **pmi,
        **({f"num_{answers}": num_given} if answers != "auto" and num_given else {}),
    }


def _num(is_true: pa.ChunkedArray) -> int:
    return int(pc.sum(is_true, min_count=0).as_py())


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of rows with an answer, as `--json` of `diff` shows it. The fields are those of `count_answers`."""

    num_rows: int
    num_answered: int
    num_right: int
    num_right_per_token: int
    num_right_per_byte: int
    num_right_pmi: int | None = None
    """None without `score.neutral`."""

    @classmethod
    def of(cls, num_rows: int, counts: Mapping[str, int]) -> "Accuracy | None":
        """The accuracy in these counts; None without an answered row."""
        if not counts.get("num_answered"):
            return None
        known = {field.name: counts[field.name] for field in fields(cls)[1:] if field.name in counts}
        return cls(num_rows=num_rows, **known)

    @property
    def share(self) -> float:
        """The share of right answers by `best`."""
        return self.num_right / self.num_answered

    def __str__(self) -> str:
        numbers = (self.num_right, self.num_right_per_token, self.num_right_per_byte, self.num_right_pmi)
        shown = ", ".join(
            f"{name} {self._share_text(number / self.num_answered)} ({number:,})"
            for name, number in zip((*WINNERS, BEST_PMI), numbers, strict=True)
            if number is not None
        )
        return f"{shown} of {self.num_answered:,} rows"

    def _share_text(self, share: float) -> str:
        """With its standard error as lm-evaluation-harness gives it: by the variance of the sample, over n - 1."""
        if self.num_answered < 2:
            return f"{share:.2%}"
        return f"{share:.2%} ± {math.sqrt(share * (1 - share) / (self.num_answered - 1)):.2%}"


def answer_lines(num_rows: int, counts: Mapping[str, int]) -> Iterator[str]:
    """The accuracy, and a warning of rows whose value in the column of answers is no choice, if there are any."""
    decided = next((f"input.answers: {answers}" for answers in MEANINGS if f"num_{answers}" in counts), "")
    if (accuracy := Accuracy.of(num_rows, counts)) is not None:
        num_others = num_rows - accuracy.num_answered
        are = "other row is an error row, or has" if num_others == 1 else "other rows are error rows, or have"
        others = [f"{num_others:,} {are} no answer or no scores"] if num_others else []
        yield "; ".join([f"accuracy: {accuracy}", *([decided] if decided else []), *others])
    if num_wrong := counts.get("num_wrong_answers"):
        have, are = ("row has a value", "is no choice") if num_wrong == 1 else ("rows have values", "are no choices")
        yield (
            f"warning: {num_wrong:,} output {have} in input.answer_column that {are}{f' ({decided})' * bool(decided)}: "
            "they are scored, their answer is null, and answer_error says why"
        )
