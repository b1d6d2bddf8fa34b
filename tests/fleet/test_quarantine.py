"""A row that kills the engine becomes an error row, in few restarts, and nothing else is lost: rule and whole jobs."""

import itertools
import json
import math
import mmap
import pathlib
import random
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from extents import extent_of_all

import batchinf
import jobs
from batchinf.base.storage import Folder, adapter
from batchinf.fleet.sharing.quarantine import Case, Quarantine, Trials
from batchinf.manifest.lines import EventLine
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.records import Lease
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.messages import Assign, InFlightRequest, Trial
from batchinf.schedule.positions import RunOrder

WINDOW = 64


class Engine:
    """Dies of some rows at their prompt, of others later; then all rows that it was given are in it."""

    def __init__(self, at_prompt: Iterable[int] = (), later: Iterable[int] = ()) -> None:
        self.at_prompt, self.later = set(at_prompt), set(later)

    def run(self, rows: Iterable[int], is_probe: bool = False) -> list[InFlightRequest] | None:
        """What was in flight at the engine's death; None if it lived."""
        there = list(rows)
        if self.at_prompt & set(there):
            return [InFlightRequest(row, False) for row in there]
        if self.later & set(there) and not is_probe:
            return [InFlightRequest(row, True) for row in there]
        return None


def of_shard(shard: int) -> Callable[[Lease], bool]:
    return lambda lease: lease.index == shard


def search(
    engine: Engine, rows: list[int], is_outside: bool = False, is_host_lost: bool = False
) -> tuple[list[int], int]:
    """Rows condemned and deaths until a run of all the others goes well. is_host_lost: each takes a host with it."""
    quarantine, condemned, deaths, is_fresh = Quarantine(), [], 0, True
    shards = [Lease(0, 0, max(rows) + 1)]
    while True:
        assert deaths < 200
        case = quarantine.of(0)
        if case is None or not case.is_on_trial:
            group: Iterable[int] = [row for row in rows if row not in condemned]
            in_flight = engine.run(group)
            if in_flight is None:
                return condemned, deaths
        else:
            group = case.groups[0]
            in_flight = engine.run(group, case.stage == "probe")
            if in_flight is None:
                is_fresh = False
                quarantine.survived(0, group)
                continue
        deaths += 1
        name, is_outside = f"life {deaths}", is_outside or is_host_lost
        case, row = quarantine.died(
            0, name, shards, in_flight, is_fresh=is_fresh, is_outside=is_outside, is_host_lost=is_host_lost
        )
        is_fresh = True
        assert adapter(Case).validate_python(asdict(case)) == case
        if row is not None:
            condemned.append(row)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 13, WINDOW])
def test_every_single_killer_is_found_within_the_bound(num_rows: int) -> None:
    rows = list(range(num_rows))
    for killer in rows:
        condemned, deaths = search(Engine(at_prompt=[killer]), rows)
        assert condemned == [killer]
        assert deaths <= 4
        condemned, deaths = search(Engine(later=[killer]), rows)
        assert condemned == [killer]
        assert deaths <= math.log2(num_rows) + 2
        condemned, deaths = search(Engine(at_prompt=[killer]), rows, is_outside=True)
        assert condemned == [killer]
        assert deaths <= 4


@pytest.mark.parametrize("num_rows", [2, 13, WINDOW])
def test_a_row_that_kills_its_host_is_found(num_rows: int) -> None:
    rows = list(range(num_rows))
    for killer in rows:
        condemned, deaths = search(Engine(at_prompt=[killer]), rows, is_host_lost=True)
        assert condemned == [killer]
        assert deaths <= 4
        condemned, deaths = search(Engine(later=[killer]), rows, is_host_lost=True)
        assert condemned == [killer]
        assert deaths <= math.log2(num_rows) + 3


def test_rows_of_a_lost_host_are_suspected_after_a_second_one() -> None:
    quarantine, shards = Quarantine(), [Lease(0, 0, 10), Lease(1, 10, 20)]

    def lost(replica: int, name: str, rows: Iterable[int]) -> Case:
        in_flight = [InFlightRequest(row, False) for row in rows]
        case, row = quarantine.died(replica, name, shards, in_flight, is_outside=True, is_host_lost=True)
        assert row is None
        assert adapter(Case).validate_python(asdict(case)) == case
        return case

    # Any replica may run their shards, and other rows on a second lost host are not suspected either.
    for name, rows in (("a", range(5)), ("b", range(5, 10))):
        assert not lost(0, name, rows).is_on_trial
        assert quarantine.of(0) is None
        assert not quarantine.leases
    case = lost(1, "c", [9, 12, 3])
    assert (case.stage, case.suspects, [lease.index for lease in case.leases]) == ("probe", (9, 3), [0, 1])
    assert quarantine.of(1) is case
    # An ordinary death of another replica knows nothing of lost hosts.
    case, _ = quarantine.died(0, "d", shards, [InFlightRequest(4, False)])
    assert case.stage == "replay"
    assert [sorted(quarantine.finished(of_shard(shard))) for shard in (0, 1)] == [
        ["a", "b", "d"],
        ["c"],
    ]


def test_several_killers_are_all_found_and_nobody_else() -> None:
    chance = random.Random(0)
    rows = list(range(WINDOW))
    for _ in range(50):
        killers = chance.sample(rows, 4)
        engine = Engine(at_prompt=killers[:2], later=killers[2:])
        condemned, _ = search(engine, rows)
        assert sorted(condemned) == sorted(killers)


def test_one_death_accuses_nobody() -> None:
    quarantine = Quarantine()
    case, row = quarantine.died(0, "a", [Lease(3, 10, 20), Lease(4, 20, 30)], [InFlightRequest(12, True)])
    assert (case.is_on_trial, row, case.leases) == (False, None, (Lease(3, 10, 20),))
    # Another death, with others in the engine: they were not there the first time.
    case, row = quarantine.died(0, "b", [Lease(3, 10, 20), Lease(4, 20, 30)], [InFlightRequest(25, True)])
    assert (case.is_on_trial, row, len(case.leases), case.suspects) == (False, None, 2, (25,))
    assert quarantine.of(1) is None


def test_a_killing_from_outside_condemns_only_who_was_alone_twice() -> None:
    quarantine, shards = Quarantine(), [Lease(0, 0, 10)]
    for name in "abc":
        case, row = quarantine.died(0, name, shards, [InFlightRequest(7, True)], is_outside=True)
        assert row is None
    assert case.doubted == 7
    cleared = quarantine.survived(0, [7])
    assert cleared is not None
    assert not cleared.is_on_trial
    rows = [quarantine.died(0, name, shards, [InFlightRequest(7, True)], is_outside=True)[1] for name in "defg"]
    assert rows == [None, None, None, 7]


def test_cases_are_handed_over_and_closed() -> None:
    cases = [
        Case(name, replica, (Lease(replica, replica, replica + 1),), (replica,)) for replica, name in enumerate("abc")
    ]
    quarantine = Quarantine(cases)
    quarantine.hand_over([1])
    assert [quarantine.of(replica) is not None for replica in range(3)] == [False, True, False]
    assert [quarantine.finished(of_shard(shard)) for shard in range(3)] == [["a"], ["b"], ["c"]]
    assert quarantine.of(1) is None


def test_requests_in_flight_are_read_from_the_memory_that_a_replica_wrote() -> None:
    shared = mmap.mmap(-1, RECORD_BYTES[1])
    record = InFlightRecord(shared)
    slots = [record.enter(row) for row in (5, 6, 7, 6)]
    record.note_output(slots[1])
    record.leave(slots[0])
    slots.append(record.enter(8))
    found = InFlightRecord(shared).requests()
    assert [(one.row_index, one.has_output) for one in found] == [(6, True), (7, False), (6, False), (8, False)]
    shared.close()


# Whole jobs. Shards of 60 rows, so that a replica has suspects in some of its shards and not in others.
SHARDS = {"rows_per_shard": 30}


def check_rows(out: pathlib.Path, killers: Iterable[int]) -> None:
    """All rows are those of an unhurt run, but the killers, which say why they have no text."""
    rows, unhurt = jobs.rows_of(out), jobs.unhurt()
    wrong = [row["row_index"] for row, good in zip(rows, unhurt, strict=True) if row != good]
    assert wrong == sorted(killers)
    for killer in wrong:
        row = rows[killer]
        assert (row["row_index"], row["id"]) == (unhurt[killer]["row_index"], unhurt[killer]["id"])
        assert (row["error_type"], row["text"], row["finish_reason"]) == ("engine_death", None, None)
        assert "died whenever this row was in it" in row["error_message"]


def deaths_of(out: pathlib.Path) -> list[dict[str, object]]:
    return jobs.events_of(out, "death")


@pytest.mark.fewer_rows
@pytest.mark.parametrize(
    ("point", "action", "most"),
    [
        ("prompt", "die", 4),
        pytest.param("output", "kill SIGSEGV", 5, marks=[pytest.mark.slow, pytest.mark.real_starts]),
    ],
)
def test_a_row_that_kills_becomes_an_error_row(point: str, action: str, most: int, tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output=SHARDS)
    done = jobs.finish(spec, faults=f"engine.{point}.137:*={action}")
    out = tmp_path / "out"
    check_rows(out, [137])
    deaths = deaths_of(out)
    # max_num_seqs is 8: at most log2(8) + 2 for a row that kills late.
    assert 3 <= len(deaths) <= most
    # The others are not killed in turn.
    assert len({death["replica"] for death in deaths}) == 1
    assert "row 137 kills the engine: it becomes an error row" in done.stderr
    assert [name for name in jobs.state_of(out).kept if name != "speed" and not name.startswith("platform/")] == []


@pytest.mark.parametrize(
    ("point", "action", "most"),
    [("prompt", "die", 4), pytest.param("output", "kill SIGSEGV", 6, marks=pytest.mark.slow)],
)
def test_a_row_that_kills_in_a_shard_of_four_replicas(
    point: str, action: str, most: int, tmp_path: pathlib.Path
) -> None:
    """All rows are one shard, which is cut over the replicas, in leases of one row to sixteen."""
    sections = {"input": {"limit": 64}, "output": {"rows_per_shard": 73}, "parallel": {"data_parallel_size": 4}}
    spec = jobs.spec_of(tmp_path, **sections, scripted={"step_s": 0.02, "start_s": 1.0}, max_error_rate=0.1)
    jobs.finish(spec, faults=f"engine.{point}.30:*={action}")
    rows, unhurt = jobs.rows_of(tmp_path / "out"), jobs.unhurt()
    assert [row["row_index"] for row in rows] == list(range(64))
    assert [row["row_index"] for row, good in zip(rows, unhurt, strict=False) if row["text"] != good["text"]] == [30]
    assert rows[30]["error_type"] == "engine_death"
    deaths = deaths_of(tmp_path / "out")
    assert 3 <= len(deaths) <= most
    assert len({death["replica"] for death in deaths}) == 1
    assert not list((tmp_path / "out" / "journal").iterdir())


@pytest.mark.slow
def test_an_idle_replica_takes_over_no_suspects(tmp_path: pathlib.Path) -> None:
    """Three rows of three shards are suspects, the others are done by the time that those run again."""
    sections = {"input": {"limit": 12}, "output": {"rows_per_shard": 2}, "scripted": {"step_s": 0.03}}
    # A shard begins while the ones before it run; until it has begun it can be taken back.
    slow = "feeder.begin:*=sleep 0.2"
    jobs.finish(jobs.spec_of(tmp_path, **sections, max_error_rate=0.1), faults=f"{slow},engine.prompt.5:*=die")
    deaths = deaths_of(tmp_path / "out")
    assert 3 <= len(deaths) <= 4
    assert len({death["replica"] for death in deaths}) == 1
    assert [row["row_index"] for row in jobs.rows_of(tmp_path / "out") if row["error_type"]] == [5]


@pytest.mark.slow
@pytest.mark.all_rows
def test_several_rows_that_kill(tmp_path: pathlib.Path) -> None:
    points = ("prompt.100", "prompt.101", "output.103", "prompt.400")
    spec = jobs.spec_of(tmp_path, output=SHARDS)
    done = jobs.run("run", spec, faults=",".join(f"engine.{point}:*=die" for point in points))
    assert done.returncode == 0, done.stderr
    check_rows(tmp_path / "out", [100, 101, 103, 400])


def test_a_death_without_a_culprit_costs_nothing_but_a_restart(tmp_path: pathlib.Path) -> None:
    once = tmp_path / "once"
    once.mkdir()
    spec = jobs.spec_of(tmp_path, output=SHARDS)
    faults = "engine.step:40=die,engine.step:41=die,engine.step:90=die"
    jobs.finish(spec, faults=faults, BATCHINF_FAULTS_ONCE=str(once))
    check_rows(tmp_path / "out", [])


@pytest.mark.fewer_rows
@pytest.mark.slow
def test_samples_of_a_row_share_its_fate(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output=SHARDS, sampling={"n": 3, "temperature": 1.0, "max_tokens": 16})
    jobs.finish(spec, faults="engine.prompt.137:*=die")
    rows = jobs.rows_of(tmp_path / "out")
    errors = [(row["row_index"], row["sample_index"]) for row in rows if row["error_type"] == "engine_death"]
    assert errors == [(137, 0), (137, 1), (137, 2)]


@pytest.mark.fewer_rows
@pytest.mark.slow
@pytest.mark.real_starts
@pytest.mark.parametrize("num_deaths", [3])
def test_a_coordinator_that_is_killed_forgets_no_death(num_deaths: int, tmp_path: pathlib.Path) -> None:
    spec, out = jobs.spec_of(tmp_path, output=SHARDS), tmp_path / "out"
    faults = "engine.output.137:*=die"
    process = jobs.start("run", spec, faults=faults)

    def deaths() -> int:
        state = jobs.read_state(jobs.Folder(out)) if (out / "manifest").is_dir() else None
        return sum(event.name == "death" for event in state.events) if state is not None else 0

    jobs.wait_until(lambda: deaths() >= num_deaths or process.poll() is not None)
    jobs.kill(jobs.family(process.pid)[-1:])
    process.communicate(timeout=60)
    assert process.returncode == -9
    # With another number of replicas, so that the case may have to go to another.
    jobs.finish(spec, "--set", "parallel.data_parallel_size=1", faults=faults)
    check_rows(out, [137])
    assert len(deaths_of(out)) <= math.log2(8) + 2


@pytest.mark.slow
def test_a_machine_that_always_dies_condemns_few_rows_and_gives_up(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output=SHARDS, parallel={"data_parallel_size": 1}, max_restarts=2)
    done = jobs.run("run", spec, faults="engine.step:*=die")
    assert done.returncode == 2
    assert "no replica is left" in done.stderr
    events = jobs.events_of(tmp_path / "out", "condemned")
    assert len(events) <= 3
    assert [name for name in jobs.state_of(tmp_path / "out").kept if name.startswith("case/")]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_vllm_replicas")
def test_a_row_that_kills_real_vllm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a seeded request whose prompt comes in chunks is the end of vLLM's engine."""
    # Such a job is refused otherwise.
    monkeypatch.setattr("batchinf.fleet.parallel.check_processor", lambda spec, max_model_len: None)
    words = "the quick brown fox jumps over the lazy dog and runs away ".split()
    prompts = [" ".join(itertools.islice(itertools.cycle(words[n % 5 :]), 6)) for n in range(24)]
    prompts[10] = " ".join(itertools.islice(itertools.cycle(words), 200))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    sections = {
        "input": {"path": str(tmp_path / "prompts.jsonl"), "id_column": None},
        "sampling": {"temperature": 0.8, "max_tokens": 8, "logprobs": None},
        "output": {"keep_columns": [], "rows_per_shard": 6},
        "parallel": {"data_parallel_size": 1},
        "max_error_rate": 0.1,
        "scripted": None,
    }
    found = []
    for name, engine in {"hurt": {"max_num_batched_tokens": 128, "enable_chunked_prefill": True}, "unhurt": {}}.items():
        folder = tmp_path / name
        folder.mkdir()
        spec = jobs.spec_of(folder, engine={"max_model_len": 512, "max_num_seqs": 3, **engine}, **sections)
        batchinf.run(spec, quiet=True)
        found.append(jobs.rows_of(folder / "out"))
    hurt, unhurt = found
    assert [row["row_index"] for row, good in zip(hurt, unhurt, strict=True) if row != good] == [10]
    assert hurt[10]["error_type"] == "engine_death"
    assert unhurt[10]["num_output_tokens"] > 0
    assert len(deaths_of(tmp_path / "hurt" / "out")) <= 4


def test_the_same_rows_may_be_tried_twice_in_turn(tmp_path: pathlib.Path) -> None:
    """Rows that were probed come last in halves too; each trial that went well is followed by the next."""
    given: list[object] = []
    fleet: Any = types.SimpleNamespace(
        replicas=[
            types.SimpleNamespace(number=0, is_running=True, is_live=True, current=types.SimpleNamespace(name="a"))
        ],
        give=lambda replica, message: given.append(message),
    )
    extents = (extent_of_all(0, 20, 20, 0),)
    case = Case("a", 0, (Lease(0, 0, 20),), (7, 8), "probe", (8,), ((7, 8), (8,)))
    folder = Folder(tmp_path)
    folder.make("manifest")
    state = State()
    state.kept["case/a"] = EventLine("death", "", {"kept_as": "case/a", **asdict(case)})
    manifest = Manifest(folder, 1)
    trials = Trials(RunOrder(folder, extents), state, np.zeros(1, np.bool_), fleet=fleet, manifest=manifest)
    leases = [Lease(4, 80, 90), Lease(0, 0, 20), Lease(0, 20, 30)]
    assert trials.movable(types.SimpleNamespace(unbegun=leases)) == (leases[0], leases[2])  # type: ignore[arg-type]
    for rows in ((8,), (7,), (8,), (8,), ()):
        trials.give()
        trials.give()  # nothing is given twice
        trials.survived(fleet.replicas[0], rows)
    manifest.close()
    again = (Lease(0, 0, 20, attempts=2),)
    halves = [Trial(again, ((row,),), is_probe=False) for row in (7, 8, 8)]
    assert given == [Trial(again, ((8,),), is_probe=True), *halves, Assign(again)]
