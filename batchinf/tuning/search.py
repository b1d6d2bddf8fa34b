"""Successive halving: many candidates on few rows, the fastest third of them on twice as many, and so on.

An engine's start takes as long as a trial's work, so few rounds are better than many: a round of two is the last. The
spec as it is runs in every round, so that the winner is compared with it on the same rows. Source: K. Jamieson,
A. Talwalkar, Non-stochastic best arm identification and hyperparameter optimization (AISTATS 2016).
"""

import math
import statistics
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

    The first round goes on as long as the budget has time for the later ones, by the starts of the trials so far.

    num_rows: rows in the first round. most_rows: rows of the input. left_s: gives the seconds left of the budget.
    measure: runs a candidate on a number of rows; its last argument tells the user which trial this is.
    """
    base = measure(candidates[0], num_rows, "round 1")
    remaining = [*candidates[1:]]
    trials, rounds = [base], [[base]]
    num_planned, num_left_out, is_cut = 0, 0, False
    while remaining:
        for place, candidate in enumerate(remaining):
            if len(rounds) > 1:
                num_now = len(remaining) if _expected_s(trials, rounds[-1][0].num_rows) <= left_s() else place
            else:
                num_now = place + _affordable(trials, place, len(remaining) - place, most_rows, left_s())
            if num_now == place:
                num_left_out = len(candidates) - 1 - place if len(rounds) == 1 else num_left_out
                is_cut, remaining = place < num_planned, remaining[:place]
                break
            num_planned = num_now
            label = f"round {len(rounds)}, {place + 1} of {num_planned}"
            rounds[-1].append(measure(candidate, rounds[-1][0].num_rows, label))
            trials.append(rounds[-1][-1])
        more_rows = min(2 * rounds[-1][0].num_rows, most_rows)
        first = rounds[-1][0]
        ranked = sorted((it for it in rounds[-1][1:] if not it.error), key=lambda it: -gain_of(it, first, most_rows))
        is_last = len(remaining) <= 2 or more_rows == rounds[-1][0].num_rows
        remaining = [trial.candidate for trial in ranked[: math.ceil(len(remaining) / _KEPT)]]
        if is_cut or is_last or not remaining:
            break
        if _expected_s(trials, more_rows) * 2 > left_s():
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


def _expected_s(trials: Sequence[TuneTrial], num_rows: int) -> float:
    """The time of a trial. The first trial's start counts only without others: it compiles what later ones load."""
    base, starts = trials[0], [trial.start_s for trial in trials[1:] if not trial.error]
    return (statistics.median(starts) if starts else base.start_s) + base.work_s * num_rows / base.num_rows


def _affordable(trials: Sequence[TuneTrial], num_tried: int, most: int, most_rows: int, left_s: float) -> int:
    """How many more candidates of the first round fit into `left_s` with all later rounds, at most `most`.

    num_tried: candidates of the first round that have run. All count as fast as the spec as it is.
    """
    for number in range(most, 0, -1):
        num_rows, num_remaining = trials[0].num_rows, num_tried + number
        total = number * _expected_s(trials, num_rows)
        while num_remaining > 2 and (more_rows := min(2 * num_rows, most_rows)) != num_rows:
            num_remaining, num_rows = math.ceil(num_remaining / _KEPT), more_rows
            total += (num_remaining + 1) * _expected_s(trials, num_rows)
        if total <= left_s:
            return number
    return 0
