"""The accuracy of multiple-choice rows that have an `answer`. Parts count it, and `diff` compares two jobs by it."""

from dataclasses import dataclass, fields

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.records import PartCounts

ANSWER = "answer"
WINNERS = ("best", "best_per_token", "best_per_byte")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Those of a part's counts that concern rows with an answer, as reports and `--json` give them."""

    num_rows: int
    num_answered: int
    num_right: int
    num_right_per_token: int
    num_right_per_byte: int

    @classmethod
    def of(cls, counts: PartCounts) -> "Accuracy":
        """The accuracy that these counts say."""
        return cls(*(getattr(counts, own.name) for own in fields(cls)))

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


def count_right_answers(table: pa.Table) -> PartCounts:
    """Of output rows, whose columns are `answer` and the winners."""
    answer = table.column(ANSWER)
    # A row that failed, or with NaN among its scores, has no winner.
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
