"""The search of the fastest settings: what runs within the budget, and what wins."""

import math

import pytest

from batchinf.tuning.candidates import Settings, candidates
from batchinf.tuning.trial import TuneTrial
from batchinf.tuning.tune import best_of, search

START_S = 10.0


def trial_of(
    speed: float, late_s: float = 0.0, start_s: float = START_S, settings: Settings | None = None
) -> TuneTrial:
    """Of 1,000 rows. A speed of 0 is a trial that did not start."""
    return TuneTrial(
        settings or {},
        1000,
        rows_per_s=speed,
        start_s=start_s,
        work_s=1000 / speed if speed else 0.0,
        late_s=late_s,
        error="" if speed else "does not start",
    )


def searched(speeds: list[float], budget_s: float = 1e9, first_start_s: float = START_S) -> list[TuneTrial]:
    """Trials of the spec as it is, 100 rows a second, and of settings with these speeds."""

    def measure(settings: Settings, label: str) -> TuneTrial:
        start_s = START_S if settings else first_start_s
        return trial_of(settings.get("speed", 100.0), start_s=start_s, settings=settings)

    return search([{}, *({"speed": speed} for speed in speeds)], budget_s, measure)


def test_each_candidate_runs_once_and_the_fastest_wins() -> None:
    trials = searched([90.0, 130.0, 0.0, 120.0])
    assert [trial.rows_per_s for trial in trials] == [100, 90, 130, 0, 120]
    best = best_of(trials, 10**9)
    assert best.settings == {"speed": 130.0}
    assert best.gain(trials[0], 10**9) == 1.3
    assert trials[3].gain(trials[0], 10**9) == 0


def test_a_gain_below_two_percent_is_none() -> None:
    trials = searched([101.0, 99.0])
    assert best_of(trials, 10**9) is trials[0]
    assert best_of(searched([0.0]), 1000).rows_per_s == 100


@pytest.mark.parametrize(("num_rows", "late_s", "gain"), [
    (6000, 0.0, 1.5),
    (6000, 30.0, 60 / (30 + 30 / 1.5)),
    (6000, 60.0, 1.0),
    (2000, 60.0, 1.0),  # done before the late engine is up
    (10**9, 30.0, 1.5),
])  # fmt: skip
def test_engines_that_start_late_gain_on_the_rest_of_the_input(num_rows: int, late_s: float, gain: float) -> None:
    assert trial_of(150.0, late_s).gain(trial_of(100.0), num_rows) == pytest.approx(gain, rel=1e-4)
    assert trial_of(150.0, late_s + 9.0).gain(trial_of(100.0, 9.0), num_rows) == pytest.approx(gain, rel=1e-4)


def test_a_gain_over_a_short_input_may_be_another_than_over_a_long_one() -> None:
    trials = [trial_of(100.0), trial_of(150.0, 30.0), trial_of(110.0)]
    assert [best_of(trials, num_rows).rows_per_s for num_rows in (4000, 40_000)] == [110.0, 150.0]


@pytest.mark.parametrize(("budget_s", "num_trials"), [(25.0, 1), (45.0, 2), (100.0, 5), (399.0, 19), (400.0, 20)])
def test_the_budget_decides_how_many_are_tried(budget_s: float, num_trials: int) -> None:
    assert len(searched([100.0] * 30, budget_s)) == num_trials


def test_a_slow_first_start_does_not_count_for_later_trials() -> None:
    """It compiles what later ones load."""
    assert len(searched([100.0] * 30, budget_s=300.0, first_start_s=60.0)) == 1 + 11  # 70 s, and 20 s each


def test_single_changes_come_before_combinations() -> None:
    found = [*candidates([[{"a": 1}, {"a": 2}], [{"b": 3}]])]
    assert found == [{}, {"a": 1}, {"a": 2}, {"b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert len(list(candidates([[{"a": n} for n in range(3)], [{"b": n} for n in range(4)]]))) == math.prod((4, 5))
