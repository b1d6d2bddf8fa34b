"""Majority votes, and pass@k against all subsets of k samples."""

import itertools
import math
import re
import statistics

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinf.base.errors import OutputError
from batchinf.base.votes import Vote, majority, pass_at_k


def test_the_commonest_answer_wins_and_of_equals_the_first() -> None:
    rows = np.array([4, 4, 4, 4, 7, 7, 9, 9, 9])
    answers = [None, "b", "a", "a", "y", "x", float("nan"), None, None]
    assert majority(rows, answers) == [Vote(4, "a", 2, 4), Vote(7, "y", 1, 2), Vote(9, None, 0, 3)]
    missing = [pandas.NA, pandas.NA, 3, None, pandas.NaT, pandas.NaT, *np.full(2, np.nan, np.float32), 5]
    assert majority(rows, missing) == [Vote(4, 3, 1, 4), Vote(7, None, 0, 2), Vote(9, 5, 1, 3)]
    with pytest.raises(OutputError, match="answers: got 2; must be one for each of the 9 output rows"):
        majority(rows, ["a", "b"])


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=6), min_size=2, max_size=5), st.integers(1, 3))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples: list[list[bool]], k: int) -> None:
    rows = np.array([10 * row for row, right in enumerate(samples) for _ in right])
    found = pass_at_k(rows, [value for right in samples for value in right], k)
    each = [statistics.fmean(any(subset) for subset in itertools.combinations(right, k)) for right in samples]
    assert found.num_rows == len(samples)
    assert found.value == pytest.approx(statistics.fmean(each))
    assert found.stderr == pytest.approx(statistics.stdev(each) / math.sqrt(len(each)))


def test_what_pass_at_k_refuses() -> None:
    rows = np.array([0, 0, 5])
    message = "k: got 2; must be from 1 to 1, the samples of row_index 5; sampling.n says how many a row has"
    with pytest.raises(OutputError, match=re.escape(message)):
        pass_at_k(rows, [True, False, True], 2)
    with pytest.raises(OutputError, match="k: got 0; must be from 1 to 1"):
        pass_at_k(rows, [True, False, True], 0)
    with pytest.raises(OutputError, match="is_right: got values of type float64; must be true or false"):
        pass_at_k(rows, [1.0, 0.0, 0.5], 1)  # type: ignore[list-item]
    with pytest.raises(OutputError, match="no output row yet"):
        pass_at_k(np.array([], np.int64), np.array([], np.bool_), 1)  # type: ignore[arg-type]
    assert str(pass_at_k(np.array([1, 1]), [True, False], 1)) == "pass@1 50.00% of 1 rows"
