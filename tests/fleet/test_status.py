"""Rates and the time left: of the time in which engines run rows, and only once there is something to make them of."""

import datetime
import pathlib
from dataclasses import replace

import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.engines.protocol import EngineStats
from batchinf.fleet.status import Rates
from batchinf.manifest.events import read_events
from batchinf.replica.messages import Progress


def reports(num_rows: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Progress]:
    """Of two incarnations, with so many rows and tokens together."""
    first = Progress(0, {}, 1, num_output_tokens, 0, 0, 0.0, EngineStats())
    return [first, replace(first, num_answered=num_rows, num_prompt_tokens=num_prompt_tokens - 1, num_output_tokens=0)]


def test_nothing_is_said_before_the_first_token() -> None:
    rates = Rates()
    assert (rates.tokens_per_s, rates.left_s(100, 0)) == (None, None)
    rates.look(10.0, [])
    rates.look(12.0, [])
    assert (rates.tokens_per_s, rates.left_s(100, 8)) == (None, None)


def test_tokens_count_before_a_row_is_finished() -> None:
    rates = Rates()
    rates.look(10.0, [])
    rates.look(12.0, reports(0, 400, 60))
    assert rates.tokens_per_s == (200.0, 30.0)
    assert rates.left_s(100, 8) is None


def test_time_left_needs_as_many_rows_as_the_engines_hold() -> None:
    rates = Rates()
    rates.look(0.0, [])
    rates.look(4.0, reports(7, 400, 60))
    assert rates.left_s(100, 8) is None
    rates.look(5.0, reports(10, 500, 70))
    assert rates.left_s(100, 8) == 50.0


def test_rates_are_those_of_the_last_minute() -> None:
    rates = Rates()
    for second in range(200):
        rates.look(float(second), reports(second, 10 * second, 1000 + 2 * max(0, second - 100)))
    assert rates.tokens_per_s == (10.0, 2.0)


@pytest.mark.slow
def test_the_start_of_an_engine_is_no_running_time(tmp_path: pathlib.Path) -> None:
    scripted = {"start_s": 3.0, "step_s": 0.01, "vary_lengths": False}
    jobs.finish(jobs.spec_of(tmp_path, scripted=scripted, parallel={"data_parallel_size": 1}))
    status, events = jobs.snapshot_of(tmp_path / "out"), read_events(Folder(tmp_path / "out"))
    at = {event.name: datetime.datetime.fromisoformat(event.at) for event in events}
    run_s = (at["all_committed"] - at["ready"]).total_seconds()
    assert status["num_output_tokens"] == sum(row["num_output_tokens"] or 0 for row in jobs.rows_of(tmp_path / "out"))
    assert status["output_tokens_per_s"] == pytest.approx(status["num_output_tokens"] / run_s, rel=0.5)


def test_a_job_that_is_done_at_the_first_look_has_rates(tmp_path: pathlib.Path) -> None:
    jobs.finish(jobs.spec_of(tmp_path, input={"limit": 5}, parallel={"data_parallel_size": 1}))
    status = jobs.snapshot_of(tmp_path / "out")
    assert min(status["prompt_tokens_per_s"], status["output_tokens_per_s"]) > 0
