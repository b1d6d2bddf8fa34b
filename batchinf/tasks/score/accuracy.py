"""The accuracy of multiple-choice rows that have an `answer`. Parts count it, and `diff` compares two jobs by it."""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

ANSWER = "answer"
WINNERS = ("best", "best_per_token", "best_per_byte")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """num_answered: rows with an answer and with scores. num_right: those whose `best` is the answer; the others those
    whose `best_per_token` and `best_per_byte` is. num_rows: all output rows.
    """

    num_rows: int = 0
    num_answered: int = 0
    num_right: int = 0
    num_right_per_token: int = 0
    num_right_per_byte: int = 0

    def __add__(self, other: "Accuracy") -> "Accuracy":
        return Accuracy(
            self.num_rows + other.num_rows,
            self.num_answered + other.num_answered,
            self.num_right + other.num_right,
            self.num_right_per_token + other.num_right_per_token,
            self.num_right_per_byte + other.num_right_per_byte,
        )

    @property
    def shares(self) -> tuple[float, float, float]:
        """Raw, by token and by byte; 0 where nothing is answered."""
        numbers = (self.num_right, self.num_right_per_token, self.num_right_per_byte)
        raw, per_token, per_byte = (number / max(1, self.num_answered) for number in numbers)
        return raw, per_token, per_byte

    def __str__(self) -> str:
        raw, per_token, per_byte = self.shares
        return (
            f"best {raw:.2%} ({self.num_right:,}), best_per_token {per_token:.2%} ({self.num_right_per_token:,}), "
            f"best_per_byte {per_byte:.2%} ({self.num_right_per_byte:,}) of {self.num_answered:,} rows"
        )


def count_right_answers(table: pa.Table) -> Accuracy:
    """Of output rows, whose columns are `answer` and the winners."""
    answer = table.column(ANSWER)
    # A row that failed, or with NaN among its scores, has no winner.
    is_answered = pc.and_(answer.is_valid(), table.column(WINNERS[0]).is_valid())
    right = (_num(pc.equal(answer, table.column(name))) for name in WINNERS)
    return Accuracy(table.num_rows, _num(is_answered), *right)


def _num(is_such: pa.ChunkedArray) -> int:
    return int(pc.sum(is_such, min_count=0).as_py())
