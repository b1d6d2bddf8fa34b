"""The history of a job from samples: what each replica did, rates, pauses, restarts."""

import json
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.fleet.status import read_looks
from batchinf.manifest.events import EventLine
from batchinf.report.timeline import Mark, Period, timeline

BEGAN = 1_700_000_000.0


def sample(replica: int, incarnation: str, state: str = "running", **counts: float) -> dict[str, Any]:
    known = {"steps": 0, "stalled_by_disk_s": 0.0, "num_running": 0}
    rows = {"num_prompt_tokens": 0, "num_output_tokens": 0, "num_answered": 0}
    return {"replica": replica, "incarnation": incarnation, "state": state, **known, **rows, **counts}


def look(at_s: float, *replicas: dict[str, Any]) -> dict[str, Any]:
    return {"at": BEGAN + at_s, "replicas": list(replicas)}


def test_nothing_is_known_without_samples() -> None:
    assert timeline({"": (list, ())}) is None
    broken: Any = [{"at": "x"}, 5, {"at": 1, "replicas": [{"replica": 0}]}]
    assert timeline({"": (lambda: broken, ())}) is None


def test_phases_and_rates() -> None:
    first = "000001.0001"
    looks = [
        look(0, sample(0, first, "starting the engine")),
        look(10, sample(0, first)),
        look(20, sample(0, first, steps=5, num_running=4, num_output_tokens=1000, num_answered=10)),
        look(30, sample(0, first, steps=5, num_output_tokens=1000, num_answered=10)),
        look(40, sample(0, first, steps=6, num_output_tokens=1000, num_answered=10, stalled_by_disk_s=9.0)),
    ]
    found = timeline({"": (lambda: looks, ())})
    assert found is not None
    assert found.periods == (
        Period("0", "starting", 0.0, 10.0),
        Period("0", "busy", 10.0, 20.0),
        Period("0", "idle", 20.0, 30.0),
        Period("0", "waiting for the disk", 30.0, 40.0),
    )
    spent = {"busy": 10, "idle": 10, "waiting for the disk": 10, "starting": 10, "down": 0, "stopped": 0}
    assert found.phases["0"] == spent
    waits = [look(0, sample(0, first)), look(10, sample(0, first, "ended")), look(20, sample(0, first, "ended"))]
    without_rows = timeline({"": (lambda: waits, ())})
    assert without_rows is not None
    assert without_rows.periods == (Period("0", "idle", 0.0, 20.0),)
    assert sum(one.output_tokens_per_s * (one.stop_s - one.start_s) for one in found.throughput) == pytest.approx(1000)
    assert [one.output_tokens_per_s for one in found.throughput if 11 < one.start_s < 18] == [pytest.approx(100)] * 6


@pytest.mark.parametrize(
    ("step_s", "own"),
    [
        (0.5, {"input": {"limit": 8}, "sampling": {"max_tokens": 4}}),
        (4.0, {"input": {"limit": 16, "text_column": "prompt"}, "sampling": None, "task": "score"}),  # several samples
    ],
)
def test_the_engine_of_a_real_run_is_busy_for_at_least_its_steps(
    step_s: float, own: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """It sleeps in each step, so a slow machine only adds to the time. Half of it bears how far apart samples are."""
    scripted = {"step_s": step_s, "vary_lengths": False}
    jobs.finish(jobs.spec_of(tmp_path, **{**own, "scripted": scripted, "parallel": {"data_parallel_size": 1}}))
    looks = [*read_looks(Folder(tmp_path / "out"))]
    [last] = looks[-1]["replicas"]
    assert last["steps"] >= 2 and last["busy_s"] >= last["steps"] * step_s - 0.001
    found = timeline({"": (lambda: looks, ())})
    assert found is not None
    [phases] = found.phases.values()
    assert phases["busy"] >= last["steps"] * step_s / 2


def test_a_long_step_is_busy_and_broken_lines_are_left_out(tmp_path: pathlib.Path) -> None:
    """A step of a task without texts may take longer than the time between samples."""
    looks = [look(at, sample(0, "000001.0001", steps=3, busy_s=busy_s)) for at, busy_s in ((0, 1), (10, 10), (20, 11))]
    lines = [json.dumps(looks[0]), "[" * 100_000, json.dumps(looks[1]), '{"at": 1', json.dumps(looks[2])]
    (tmp_path / "telemetry").mkdir()
    (tmp_path / "telemetry" / "000001.jsonl").write_text("\n".join(lines))
    read = [*read_looks(Folder(str(tmp_path)))]
    assert read == looks
    found = timeline({"": (lambda: read, ())})
    assert found is not None
    assert [(period.phase, period.stop_s) for period in found.periods] == [("busy", 10.0), ("idle", 20.0)]


def test_a_pause_takes_no_time_and_a_death_does() -> None:
    looks = [
        look(0, sample(0, "000001.0001"), sample(1, "000001.0002")),
        look(10, sample(0, "000001.0001", steps=9, num_answered=5), sample(1, "000001.0002", steps=9, num_answered=5)),
        look(20, sample(0, "000001.0003"), sample(1, "000001.0002", steps=20, num_answered=9)),
        look(3620, sample(0, "000002.0001"), sample(1, "000002.0002")),
        look(3630, sample(0, "000002.0001", steps=1, num_answered=2), sample(1, "000002.0002")),
    ]
    events = [
        EventLine("epoch", "2023-11-14T22:13:20+00:00", {}),
        EventLine("replica_started", "2023-11-14T22:13:20+00:00", {"replica": 0, "incarnation": "000001.0001"}),
        EventLine("replica_ended", "2023-11-14T22:13:33+00:00", {"incarnation": "000001.0001", "cause": "signal 9"}),
        EventLine("replica_ended", "2023-11-14T22:13:41+00:00", {"incarnation": "000001.0002", "cause": ""}),
        EventLine("epoch", "2023-11-14T23:13:39+00:00", {}),
    ]
    found = timeline({"": (lambda: looks, events)})
    assert found is not None
    assert found.work_s == 30.0
    assert found.marks == (
        Mark("restart", 13.0, "2023-11-14T22:13:33+00:00", "replica 0 ended: signal 9"),
        Mark("resume", 20.0, "2023-11-14T23:13:40+00:00", "resumed after a pause of 1h00m"),
    )
    assert [period for period in found.periods if period.replica == "0"] == [
        Period("0", "busy", 0.0, 10.0),
        Period("0", "down", 10.0, 20.0),
        Period("0", "busy", 20.0, 30.0),
    ]
    rows = sum(one.rows_per_s * (one.stop_s - one.start_s) for one in found.throughput)
    assert rows == pytest.approx(5 + 9 + 2)


def test_an_engine_that_stays_up_between_two_attempts_is_idle() -> None:
    looks = [
        look(0, sample(0, "000001.0001")),
        look(10, sample(0, "000001.0001", "waiting", steps=5, num_running=4)),
        look(20, sample(0, "000001.r000001.0002")),
        look(30, sample(0, "000001.r000001.0002", "ended", steps=5, num_running=4)),
    ]
    found = timeline({"": (lambda: looks, ())})
    assert found is not None
    assert [(period.phase, period.start_s) for period in found.periods] == [
        ("busy", 0.0),
        ("idle", 10.0),
        ("busy", 20.0),
    ]


def test_a_replica_is_not_down_between_a_stop_and_a_resume() -> None:
    looks = [
        look(0, sample(0, "000001.0001")),
        look(10, sample(0, "000001.0001", steps=9)),
        look(15, sample(0, "000002.0001", "starting the engine")),
        look(20, sample(0, "000002.0001")),
        look(22, sample(0, "000002.0002", "starting the engine")),
    ]
    found = timeline({"": (lambda: looks, [])})
    assert found is not None
    assert [(one.phase, one.start_s) for one in found.periods] == [
        ("busy", 0.0), ("stopped", 10.0), ("starting", 15.0), ("down", 20.0),
    ]  # fmt: skip


def test_a_replica_is_down_only_in_a_run_that_has_it() -> None:
    """Replica 1 joins at the resume; replica 0 was given up in the first run."""
    looks = [
        look(0, sample(0, "000001.0001"), sample(2, "000001.0002", steps=1)),
        *(look(at, sample(2, "000001.0002", steps=at)) for at in (20, 40)),
        look(45, sample(0, "000002.0001"), sample(2, "000002.0003")),
        look(50, sample(0, "000002.0001", steps=9), sample(1, "000002.0002"), sample(2, "000002.0003")),
        look(55, sample(0, "000002.0001", steps=19), sample(1, "000002.0002", steps=9), sample(2, "000002.0003")),
    ]
    found = timeline({"": (lambda: looks, [])})
    assert found is not None
    periods = {name: [(p.phase, p.start_s) for p in found.periods if p.replica == name] for name in "01"}
    assert periods["0"] == [("down", 0.0), ("stopped", 40.0), ("busy", 45.0)]
    assert periods["1"] == [("stopped", 0.0), ("down", 45.0), ("busy", 50.0)]


def test_slices_one_after_the_other_are_not_down() -> None:
    def looks(began_s: float) -> list[dict[str, Any]]:
        counts: Any = {"steps": 5, "num_output_tokens": 100}
        return [look(began_s + at, sample(0, "000001.0001", **(counts if at else {}))) for at in (0, 10)]

    found = timeline({"0/2": (lambda: looks(0), ()), "1/2": (lambda: looks(30), ())})
    assert found is not None
    assert [(p.replica, p.phase, p.start_s, p.stop_s) for p in found.periods] == [
        ("0/2: 0", "busy", 0.0, 10.0), ("0/2: 0", "stopped", 10.0, 40.0),
        ("1/2: 0", "stopped", 0.0, 30.0), ("1/2: 0", "busy", 30.0, 40.0),
    ]  # fmt: skip
    assert (found.num_runs, found.engines_s, found.total("output_tokens_per_s")) == (2, 20.0, pytest.approx(200))
    at_once = timeline({"0/2": (lambda: looks(0), ()), "1/2": (lambda: looks(5), ())})
    assert at_once is not None
    assert (at_once.num_runs, at_once.engines_s) == (2, 15.0)


def test_the_speed_of_engines_is_over_all_runs() -> None:
    """A run that ends well, one that is killed as its engine starts, and a resume."""
    looks = [
        look(0, sample(0, "000001.0001", "starting the engine")),
        look(10, sample(0, "000001.0001")),
        look(20, sample(0, "000001.0001", steps=5, num_output_tokens=900)),
        look(1000, sample(0, "000002.0001", "starting the engine")),
        look(1010, sample(0, "000002.0001", "starting the engine")),
        look(2000, sample(0, "000003.0001", "starting the engine")),
        look(2020, sample(0, "000003.0001")),
        look(2025, sample(0, "000003.0001", steps=1, num_output_tokens=100)),
    ]
    found = timeline({"": (lambda: looks, [])})
    assert found is not None
    assert (found.num_runs, found.engines_s, found.work_s) == (2, 15.0, 55.0)
    assert found.total("output_tokens_per_s") == pytest.approx(1000)


def test_a_long_job_takes_little_memory() -> None:
    """A replica that is busy for two of three samples: its periods are fewer, its seconds are all there."""
    num_samples = 20_000
    is_alive: weakref.WeakSet[Sample] = weakref.WeakSet()
    most_alive = 0

    def looks() -> Iterator[dict[str, Any]]:
        nonlocal most_alive
        for number in range(num_samples):
            steps = number - number // 3
            one = Sample(sample(0, "000001.0001", steps=steps, num_output_tokens=10 * number))
            is_alive.add(one)
            most_alive = max(most_alive, len(is_alive))
            yield look(15.0 * number, one)

    found = timeline({"": (looks, ())})
    assert found is not None
    assert most_alive < 10
    assert len(found.periods) <= 801
    work_s = 15.0 * (num_samples - 1)
    assert (found.periods[0].start_s, found.periods[-1].stop_s, found.work_s) == (0.0, work_s, work_s)
    seconds = found.phases["0"]
    assert (seconds["busy"], seconds["idle"]) == (
        pytest.approx(work_s * 2 / 3, rel=1e-3),
        pytest.approx(work_s / 3, rel=1e-3),
    )
    assert found.total("output_tokens_per_s") == pytest.approx(10 * num_samples, rel=1e-3)


class Sample(dict[str, Any]):
    """A sample that tells when it is gone."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_samples_in_any_order_make_one_clock() -> None:
    """Slices one after the other, and a clock that was set back: pauses are where no slice has a sample."""
    first = [look(at, sample(0, "000001.0001", steps=int(at))) for at in (0, 50, 100, 500, 550)]
    second = [look(at, sample(0, "000001.0001", steps=int(at))) for at in (130, 180, 140, 400, 445)]
    found = timeline({"0/2": (lambda: first, ()), "1/2": (lambda: second, ())})
    assert found is not None
    assert found.work_s == 180 + 150
    assert [(mark.at_s, mark.text) for mark in found.marks] == [(180, "resumed after a pause of 3m40s")]


def test_slices_have_their_own_replicas() -> None:
    looks = [look(0, sample(0, "000001.0001")), look(5, sample(0, "000001.0001", steps=1))]
    found = timeline({"0/2": (lambda: looks, ()), "1/2": (lambda: looks, ())})
    assert found is not None
    assert found.replicas == ("0/2: 0", "1/2: 0")
