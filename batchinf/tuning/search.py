"""Successive halving: many candidates on few rows, the fastest third of them on twice as many, and so on.

An engine's start takes as long as a trial's work, so few rounds are better than many: a round of two is the last. The
spec as it is runs in every round, so that the winner is compared with it on the same rows. Source: K. Jamieson,
A. Talwalkar, Non-stochastic best arm identification and hyperparameter optimization (AISTATS 2016).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchinf.tuning.settings import Candidate
from batchinf.tuning.trial import TuneTrial

# Settings that gain less are not worth a longer spec: two equal trials differ by as much.
LEAST_GAIN = 1.02
_KEPT = 3  # one candidate in three goes on to the next round


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials, and the best settings. best, base: on the same rows; equal if no settings gain 2 %.

    num_rows: of the input. num_left_out: candidates for which the budget has no time. is_cut: the budget ended before
    the last comparison.
    """

    num_rows: int
    trials: tuple[TuneTrial, ...]
    best: TuneTrial
    base: TuneTrial
    num_left_out: int
    is_cut: bool

    @property
    def gain(self) -> float:
        """How many times as fast the whole input is done as by the spec as it is."""
        return gain_of(self.best, self.base, self.num_rows)


def gain_of(trial: TuneTrial, base: TuneTrial, num_rows: int) -> float:
    """How many times as fast an input of `num_rows` rows is done as with the settings of `base`.

    Engines of one device start one after the other. Until the last one is up, the job has the speed of `base`.
    """
    base_s = num_rows * base.work_s / base.num_rows
    late_s = min(base_s, max(0.0, trial.late_s - base.late_s))
    if not trial.rows_per_s:
        return 0.0
    return base_s / (late_s + (base_s - late_s) * base.rows_per_s / trial.rows_per_s)


def search(
    candidates: Sequence[Candidate],
    num_rows: int,
    most_rows: int,
    left_s: Callable[[], float],
    measure: Callable[[Candidate, int, str], TuneTrial],
) -> SearchResult:
    """The fastest of the candidates, of which the first is the spec as it is.

    num_rows: rows in the first round. most_rows: rows of the input. left_s: gives the seconds left of the budget.
    measure: runs a candidate on a number of rows; its last argument tells the user which trial this is.
    """
    base = measure(candidates[0], num_rows, "round 1")
    remaining = [*candidates[1 : 1 + _affordable(base, len(candidates) - 1, most_rows, left_s())]]
    trials, rounds = [base], [[base]]
    num_left_out, is_cut = len(candidates) - 1 - len(remaining), False
    while remaining:
        for place, candidate in enumerate(remaining):
            if _expected_s(base, rounds[-1][0].num_rows) > left_s():
                is_cut = True
                break
            label = f"round {len(rounds)}, {place + 1} of {len(remaining)}"
            rounds[-1].append(measure(candidate, rounds[-1][0].num_rows, label))
            trials.append(rounds[-1][-1])
        more_rows = min(2 * rounds[-1][0].num_rows, most_rows)
        first = rounds[-1][0]
        ranked = sorted((it for it in rounds[-1][1:] if not it.error), key=lambda it: -gain_of(it, first, most_rows))
        is_last = len(remaining) <= 2 or more_rows == rounds[-1][0].num_rows
        remaining = [trial.candidate for trial in ranked[: math.ceil(len(remaining) / _KEPT)]]
        if is_cut or is_last or not remaining:
            break
        if _expected_s(base, more_rows) * 2 > left_s():
            is_cut = True
            break
        rounds.append([measure(candidates[0], more_rows, f"round {len(rounds) + 1}")])
        trials.append(rounds[-1][0])
    # A round that was cut after its first trial compares nothing.
    last = next((round for round in reversed(rounds) if len(round) > 1), rounds[0])
    best = max(last, key=lambda trial: gain_of(trial, last[0], most_rows))
    if gain_of(best, last[0], most_rows) < LEAST_GAIN:
        best = last[0]
    return SearchResult(most_rows, tuple(trials), best, last[0], num_left_out, is_cut)


def _expected_s(base: TuneTrial, num_rows: int) -> float:
    return base.start_s + base.work_s * num_rows / base.num_rows


def _affordable(base: TuneTrial, most: int, most_rows: int, left_s: float) -> int:
    """The largest number of candidates whose rounds fit into `left_s`, at the speed of the spec as it is."""
    for number in range(most, 0, -1):
        total, num_remaining, num_rows = 0.0, number, base.num_rows
        is_first = True
        while True:
            total += (num_remaining + (0 if is_first else 1)) * _expected_s(base, num_rows)
            more_rows = min(2 * num_rows, most_rows)
            if num_remaining <= 2 or more_rows == num_rows:
                break
            num_remaining, num_rows, is_first = math.ceil(num_remaining / _KEPT), more_rows, False
        if total <= left_s:
            return number
    return 0
