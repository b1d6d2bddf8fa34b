"""Successive halving: many candidates on few rows, the fastest third of them on twice as many, and so on.

An engine's start takes as long as a trial's work, so few rounds are better than many: a round of two is the last. The
spec as it is runs in every round, so that the winner is compared with it on the same rows. Source: K. Jamieson,
A. Talwalkar, Non-stochastic best arm identification and hyperparameter optimization (AISTATS 2016).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from batchinf.tuning.candidates import Candidate
from batchinf.tuning.trial import TuneTrial

# Settings that gain less are not worth a longer spec: two equal trials differ by as much.
LEAST_GAIN = 1.02
_KEPT = 3  # one candidate in three goes on to the next round


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials, and the best settings."""

    num_rows: int
    """Rows of the input."""
    trials: tuple[TuneTrial, ...]
    best: TuneTrial
    base: TuneTrial
    """The spec as it is, on the same rows as `best`, which it is itself if no settings gain 2 %."""
    num_left_out: int
    """Candidates for which the budget has no time."""
    is_cut: bool
    """The budget ended before the last comparison."""

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
    *,
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
    base = candidates[0]
    first, num_planned = _first_round(
        candidates, num_rows=num_rows, most_rows=most_rows, left_s=left_s, measure=measure
    )
    rounds = [first]
    num_left_out = len(candidates) - len(first)
    is_cut = len(first) - 1 < num_planned
    while not is_cut and (chosen := _for_next_round(rounds[-1], most_rows)):
        num_rows = min(2 * num_rows, most_rows)
        if 2 * _expected_s([*chain(*rounds)], num_rows) > left_s():
            is_cut = True
            break
        label = f"round {len(rounds) + 1}"
        rounds.append([measure(base, num_rows, label)])
        for place, candidate in enumerate(chosen, 1):
            if _expected_s([*chain(*rounds)], num_rows) > left_s():
                is_cut = True
                break
            rounds[-1].append(measure(candidate, num_rows, f"{label}, {place} of {len(chosen)}"))
    # A round that was cut after its first trial compares nothing.
    last = next((trials for trials in reversed(rounds) if len(trials) > 1), rounds[0])
    best = max(last, key=lambda trial: gain_of(trial, last[0], most_rows))
    if gain_of(best, last[0], most_rows) < LEAST_GAIN:
        best = last[0]
    return SearchResult(
        num_rows=most_rows,
        trials=tuple(chain(*rounds)),
        best=best,
        base=last[0],
        num_left_out=num_left_out,
        is_cut=is_cut,
    )


def _first_round(
    candidates: Sequence[Candidate],
    *,
    num_rows: int,
    most_rows: int,
    left_s: Callable[[], float],
    measure: Callable[[Candidate, int, str], TuneTrial],
) -> tuple[list[TuneTrial], int]:
    """The trials of the first round, and how many of the candidates after the first one it was planned for."""
    base, *others = candidates
    trials = [measure(base, num_rows, "round 1")]
    num_planned = 0
    for place, candidate in enumerate(others):
        num_more = _affordable(trials, len(others) - place, most_rows, left_s())
        if not num_more:
            break
        num_planned = place + num_more
        trials.append(measure(candidate, num_rows, f"round 1, {place + 1} of {num_planned}"))
    return trials, num_planned


def _for_next_round(trials: Sequence[TuneTrial], most_rows: int) -> list[Candidate]:
    """The fastest third of a round's candidates; none after the last round."""
    base, *others = trials
    if len(others) <= 2 or base.num_rows == most_rows:
        return []
    ranked = sorted((trial for trial in others if not trial.error), key=lambda trial: -gain_of(trial, base, most_rows))
    return [trial.candidate for trial in ranked[: math.ceil(len(others) / _KEPT)]]


def _expected_s(trials: Sequence[TuneTrial], num_rows: int) -> float:
    """The time of a trial. The first trial's start counts only without others: it compiles what later ones load."""
    base = trials[0]
    starts = [trial.start_s for trial in trials[1:] if not trial.error]
    return (statistics.median(starts) if starts else base.start_s) + base.work_s * num_rows / base.num_rows


def _affordable(trials: Sequence[TuneTrial], most: int, most_rows: int, left_s: float) -> int:
    """How many more candidates of the first round fit into `left_s` with all later rounds, at most `most`.

    trials: of the first round, so far. All candidates count as fast as the spec as it is.
    """
    for number in range(most, 0, -1):
        num_rows = trials[0].num_rows
        num_remaining = len(trials) - 1 + number
        total_s = number * _expected_s(trials, num_rows)
        while num_remaining > 2 and num_rows != most_rows:
            num_rows = min(2 * num_rows, most_rows)
            num_remaining = math.ceil(num_remaining / _KEPT)
            total_s += (num_remaining + 1) * _expected_s(trials, num_rows)
        if total_s <= left_s:
            return number
    return 0
