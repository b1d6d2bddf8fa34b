"""Majority vote and pass@k over the samples of each input row. `Results` offers them."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import OutputError


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer that most samples of one input row have."""

    row_index: int
    answer: Any
    """Of several with equal votes, the one that came first; None if no sample has an answer."""
    num_votes: int
    """Samples with this answer."""
    num_samples: int
    """All samples of the row, also those without an answer."""


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The probability that at least one of k samples of a row is right, as the mean over the rows."""

    k: int
    value: float
    stderr: float
    """Standard error of the mean over the rows; NaN for one row."""
    num_rows: int
    """Input rows."""

    def __str__(self) -> str:
        error = "" if math.isnan(self.stderr) else f" ± {self.stderr:.2%}"
        return f"pass@{self.k} {self.value:.2%}{error} of {self.num_rows:,} rows"


def majority(rows: npt.NDArray[np.int64], answers: Sequence[Hashable]) -> list[Vote]:
    """One vote for each input row, in the order of the rows.

    rows: [num_samples], the input row of each sample. answers: of each sample; None, NaN or pandas.NA for none.
    """
    _check(rows, answers, "answers")
    counts: dict[int, Counter[Hashable]] = {}
    sizes: Counter[int] = Counter()
    for row, answer in zip(rows.tolist(), answers, strict=True):
        votes = counts.setdefault(row, Counter())
        sizes[row] += 1
        if not isinstance(answer, Hashable):
            raise OutputError(f"answers: got a {type(answer).__name__}; must be texts, numbers or tuples")
        if not _is_missing(answer):
            votes[answer] += 1
    found = []
    for row, votes in counts.items():
        [(answer, num_votes)] = votes.most_common(1) or [(None, 0)]
        found.append(Vote(row, answer, num_votes, sizes[row]))
    return found


def _is_missing(answer: Hashable) -> bool:
    try:
        return answer is None or bool(answer != answer)  # NaN of any type, and pandas.NaT
    except TypeError:  # pandas.NA, which is neither equal nor unequal
        return True


def pass_at_k(
    rows: npt.NDArray[np.int64],
    is_right: Sequence[bool],
    k: int,
    where_samples_are: str = "sampling.n says how many a row has",
) -> PassAtK:
    """pass@k by the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k).

    n: samples of a row; c: those that are right. rows: [num_samples], the input row of each sample. is_right: whether
    each sample is right. where_samples_are: ends the error. Raises OutputError if a row has fewer than k samples.
    """
    _check(rows, is_right, "is_right")
    right = np.asarray(is_right)
    if right.dtype != np.bool_:
        raise OutputError(f"is_right: got values of type {right.dtype}; must be true or false for each output row")
    if not len(rows):
        raise OutputError("there is no output row yet, so pass@k is not known")
    names, places = np.unique(rows, return_inverse=True)
    nums = np.bincount(places)
    if k < 1 or k > nums.min():
        raise OutputError(
            f"k: got {k}; must be from 1 to {nums.min()}, the samples of row_index {names[nums.argmin()]}; "
            f"{where_samples_are}"
        )
    rights = np.bincount(places, right)
    values = [
        1.0 - math.comb(num - num_right, k) / math.comb(num, k)
        for num, num_right in zip(nums.tolist(), rights.astype(int).tolist(), strict=True)
    ]
    stderr = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return PassAtK(k, float(np.mean(values)), stderr, len(values))


def _check(rows: npt.NDArray[np.int64], values: Sequence[Any], name: str) -> None:
    if len(values) != len(rows):
        raise OutputError(f"{name}: got {len(values):,}; must be one for each of the {len(rows):,} output rows")
