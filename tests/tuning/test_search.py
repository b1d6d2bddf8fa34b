"""The search of the fastest settings: what runs, on how many rows, and what wins."""

import dataclasses
import math

import pytest

from batchinf.tuning.candidates import Candidate, candidates
from batchinf.tuning.search import gain_of, search
from batchinf.tuning.trial import TuneTrial

START_S = 10.0


class Clock:
    """Trials of known speeds: rows a second by the candidate's `speed`, or an error without one."""

    def __init__(self, budget_s: float = 1e9) -> None:
        self.left_s = budget_s
        self.ran: list[tuple[float, int]] = []

    def measure(self, candidate: Candidate, num_rows: int, place: str) -> TuneTrial:
        speed = candidate.settings.get("speed", 100.0)
        self.ran.append((speed, num_rows))
        self.left_s -= START_S + (num_rows / speed if speed else 0)
        return trial_of(speed, num_rows=num_rows, candidate=candidate, error="" if speed else "does not start")

    def search(self, speeds: list[float], num_rows: int = 1000, most_rows: int = 10**9):  # type: ignore[no-untyped-def]
        field = [Candidate(), *(Candidate({"speed": speed}) for speed in speeds)]
        return search(field, num_rows=num_rows, most_rows=most_rows, left_s=lambda: self.left_s, measure=self.measure)


def test_the_fastest_third_goes_on_with_twice_as_many_rows() -> None:
    clock = Clock()
    found = clock.search([90.0, 130.0, 80.0, 120.0, 110.0, 125.0, 70.0])
    assert clock.ran == [
        (100, 1000), (90, 1000), (130, 1000), (80, 1000), (120, 1000), (110, 1000), (125, 1000), (70, 1000),
        (100, 2000), (130, 2000), (125, 2000), (120, 2000),
        (100, 4000), (130, 4000),
    ]  # fmt: skip
    assert (found.best.rows_per_s, found.best.num_rows, found.gain) == (130, 4000, 1.3)
    assert not found.is_cut


def test_a_gain_below_two_percent_is_none() -> None:
    found = Clock().search([101.0, 99.0])
    assert found.best is found.base
    assert found.gain == 1


def trial_of(
    speed: float, late_s: float = 0.0, num_rows: int = 1000, candidate: Candidate | None = None, error: str = ""
) -> TuneTrial:
    return TuneTrial(
        candidate or Candidate(),
        num_rows,
        rows_per_s=speed,
        start_s=START_S,
        work_s=num_rows / (speed or 1),
        late_s=late_s,
        error=error,
    )


@pytest.mark.parametrize(("num_rows", "late_s", "gain"), [
    (6000, 0.0, 1.5),
    (6000, 30.0, 60 / (30 + 30 / 1.5)),
    (6000, 60.0, 1.0),
    (2000, 60.0, 1.0),  # done before the late engine is up
    (10**9, 30.0, 1.5),
])  # fmt: skip
def test_engines_that_start_late_gain_on_the_rest_of_the_input(num_rows: int, late_s: float, gain: float) -> None:
    assert gain_of(trial_of(150.0, late_s), trial_of(100.0), num_rows) == pytest.approx(gain, rel=1e-4)
    assert gain_of(trial_of(150.0, late_s + 9.0), trial_of(100.0, 9.0), num_rows) == pytest.approx(gain, rel=1e-4)


def test_a_gain_over_a_short_input_may_be_another_than_over_a_long_one() -> None:
    def measure(candidate: Candidate, num_rows: int, place: str) -> TuneTrial:
        return trial_of(*candidate.settings.get("given", (100.0, 0.0)), num_rows)

    field = [Candidate(), Candidate({"given": (150.0, 30.0)}), Candidate({"given": (110.0, 0.0)})]
    for most_rows, best in ((4000, 110.0), (40_000, 150.0)):
        found = search(field, num_rows=1000, most_rows=most_rows, left_s=lambda: 1e9, measure=measure)
        assert found.best.rows_per_s == best
        assert found.gain == gain_of(found.best, found.base, most_rows) > 1.05


def test_what_does_not_start_is_out() -> None:
    clock = Clock()
    assert clock.search([0.0, 0.0, 120.0]).best.rows_per_s == 120
    assert clock.ran == [(100, 1000), (0, 1000), (0, 1000), (120, 1000), (100, 2000), (120, 2000)]
    assert Clock().search([0.0]).best.rows_per_s == 100


def test_rows_end_with_the_input() -> None:
    clock = Clock()
    found = clock.search([110.0, 120.0, 130.0, 140.0], most_rows=1500)
    assert {num_rows for _, num_rows in clock.ran} == {1000, 1500}
    assert found.best.rows_per_s == 140


@pytest.mark.parametrize("budget_s", [25.0, 45.0, 100.0, 200.0, 400.0])
def test_the_budget_decides_how_many_are_tried(budget_s: float) -> None:
    clock = Clock(budget_s)
    found = clock.search([100.0 + place for place in range(20)])
    assert clock.left_s >= -0.1 * budget_s
    num_tried = sum(num_rows == 1000 for _, num_rows in clock.ran) - 1
    assert found.num_left_out == 20 - num_tried
    # Of those tried, a third goes on.
    assert sum(num_rows == 2000 for _, num_rows in clock.ran) == (1 + math.ceil(num_tried / 3) if num_tried > 2 else 0)
    assert num_tried == {25.0: 0, 45.0: 1, 100.0: 2, 200.0: 4, 400.0: 8}[budget_s]


def test_a_slow_first_start_does_not_count_for_later_trials() -> None:
    """It compiles what later ones load."""
    clock, starts = Clock(), [60.0]

    def measure(candidate: Candidate, num_rows: int, place: str) -> TuneTrial:
        trial = clock.measure(candidate, num_rows, place)
        return dataclasses.replace(trial, start_s=starts.pop() if starts else START_S)

    field = [Candidate(), *(Candidate({"speed": 90.0 + place}) for place in range(20))]
    spent_s = [0.0]

    def timed(candidate: Candidate, num_rows: int, place: str) -> TuneTrial:
        trial = measure(candidate, num_rows, place)
        spent_s[0] += trial.start_s + trial.work_s
        return trial

    found = search(field, num_rows=1000, most_rows=1000, left_s=lambda: 300.0 - spent_s[0], measure=timed)
    assert len(found.trials) == 1 + 11  # 70 s, and 20 s each
    assert (found.num_left_out, found.is_cut) == (9, False)


def test_a_slow_candidate_does_not_break_the_budget_by_much() -> None:
    clock = Clock(150.0)
    found = clock.search([5.0, 200.0, 300.0])
    assert found.is_cut
    assert found.best.rows_per_s == 100


def test_single_changes_come_before_combinations() -> None:
    found = [one.settings for one in candidates([[{"a": 1}, {"a": 2}], [{"b": 3}]])]
    assert found == [{}, {"a": 1}, {"a": 2}, {"b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert len(list(candidates([[{"a": n} for n in range(3)], [{"b": n} for n in range(4)]]))) == math.prod((4, 5))
