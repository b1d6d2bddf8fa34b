"""A row that kills the engine becomes an error row, in few restarts, and nothing else is lost: whole jobs."""

import itertools
import json
import math
import mmap
import pathlib
import random
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from extents import extent_of_all

import batchinf
import jobs
from batchinf.base.storage import Folder
from batchinf.fleet.sharing.quarantine import Case, Quarantine
from batchinf.manifest.lines import Condemned, Suspects, record_line
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.records import Lease
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.messages import Assign, Trial
from batchinf.schedule.positions import RunOrder


def bound(num_rows: int) -> int:
    """The most deaths for one row that kills, with so many rows in the engine."""
    return math.floor(math.log2(num_rows)) + 3


WINDOW = 10  # rows in an engine with `max_num_seqs` 8


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
    ("point", "action"),
    [
        ("prompt", "die"),
        pytest.param("output", "kill SIGSEGV", marks=[pytest.mark.slow, pytest.mark.real_starts]),
    ],
)
def test_a_row_that_kills_becomes_an_error_row(point: str, action: str, tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output=SHARDS)
    done = jobs.finish(spec, faults=f"engine.{point}.137:*={action}")
    out = tmp_path / "out"
    check_rows(out, [137])
    deaths = deaths_of(out)
    assert 3 <= len(deaths) <= bound(WINDOW)
    # Healthy replicas are not killed in turn: from the second death on, the suspects stay with one.
    assert len({death["replica"] for death in deaths[1:]}) == 1
    assert "row 137 kills the engine: it becomes an error row" in done.stderr
    state = jobs.state_of(out)
    assert (state.of(Suspects), state.of(Condemned)) == ([], [])


@pytest.mark.parametrize(
    ("point", "action"),
    [("prompt", "die"), pytest.param("output", "kill SIGSEGV", marks=pytest.mark.slow)],
)
def test_a_row_that_kills_in_a_shard_of_four_replicas(point: str, action: str, tmp_path: pathlib.Path) -> None:
    """All rows are one shard, which is cut over the replicas, in leases of one row to sixteen."""
    sections = {"input": {"limit": 64}, "output": {"rows_per_shard": 73}, "parallel": {"data_parallel_size": 4}}
    spec = jobs.spec_of(tmp_path, **sections, scripted={"step_s": 0.02, "start_s": 1.0}, max_error_rate=0.1)
    jobs.finish(spec, faults=f"engine.{point}.30:*={action}")
    rows, unhurt = jobs.rows_of(tmp_path / "out"), jobs.unhurt()
    assert [row["row_index"] for row in rows] == list(range(64))
    assert [row["row_index"] for row, good in zip(rows, unhurt, strict=False) if row["text"] != good["text"]] == [30]
    assert rows[30]["error_type"] == "engine_death"
    deaths = deaths_of(tmp_path / "out")
    assert 3 <= len(deaths) <= bound(WINDOW)
    assert len({death["replica"] for death in deaths[1:]}) == 1
    assert not list((tmp_path / "out" / "journal").iterdir())


@pytest.mark.slow
def test_an_idle_replica_takes_over_no_suspects(tmp_path: pathlib.Path) -> None:
    """Three rows of three shards are suspects, the others are done by the time that those run again."""
    sections = {"input": {"limit": 12}, "output": {"rows_per_shard": 2}, "scripted": {"step_s": 0.03}}
    # A shard begins while the ones before it run; until it has begun it can be taken back.
    slow = "feeder.begin:*=sleep 0.2"
    jobs.finish(jobs.spec_of(tmp_path, **sections, max_error_rate=0.1), faults=f"{slow},engine.prompt.5:*=die")
    deaths = deaths_of(tmp_path / "out")
    assert 3 <= len(deaths) <= bound(WINDOW)
    assert len({death["replica"] for death in deaths[1:]}) == 1
    assert [row["row_index"] for row in jobs.rows_of(tmp_path / "out") if row["error_type"]] == [5]


NUM_MANY = 5000


def spec_of_many(folder: pathlib.Path, num_replicas: int) -> pathlib.Path:
    """A job of 5,000 rows, with 77 rows in each engine."""
    lines = jobs.PROMPTS.read_bytes().splitlines()
    rows = [{**json.loads(lines[n % len(lines)]), "id": str(n)} for n in range(NUM_MANY)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"input": {"path": str(folder / "prompts.jsonl")}, "parallel": {"data_parallel_size": num_replicas}}
    scripted = {"max_num_seqs": 64, "step_s": 0.002}
    return jobs.spec_of(folder, **sections, output={"rows_per_shard": 200}, scripted=scripted)


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job of 5,000 rows that was never hurt."""
    folder = tmp_path_factory.mktemp("many")
    jobs.finish(spec_of_many(folder, 1))
    return jobs.rows_of(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "action", "num_replicas"),
    [("prompt", "die", 1), ("prompt", "kill SIGKILL", 4), ("output", "die", 4), ("output", "kill SIGKILL", 1)],
)
def test_a_row_that_kills_among_5000(
    point: str, action: str, num_replicas: int, tmp_path: pathlib.Path, many_rows: list[dict[str, Any]]
) -> None:
    killer = random.Random(f"{point} {action} {num_replicas}").randrange(NUM_MANY)
    jobs.finish(spec_of_many(tmp_path, num_replicas), faults=f"engine.{point}.{killer}:*={action}")
    out = tmp_path / "out"
    rows = jobs.rows_of(out)
    assert [row["row_index"] for row, good in zip(rows, many_rows, strict=True) if row != good] == [killer]
    assert rows[killer]["error_type"] == "engine_death"
    deaths = deaths_of(out)
    print(f"{point}, {action}, {num_replicas} replicas: row {killer}, {len(deaths)} deaths")
    assert 3 <= len(deaths) <= bound(77)
    assert len({death["replica"] for death in deaths[1:]}) == 1
    state = jobs.state_of(out)
    assert (state.of(Suspects), state.of(Condemned)) == ([], [])


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
        return len(deaths_of(out))

    jobs.wait_until(lambda: deaths() >= num_deaths or process.poll() is not None)
    jobs.kill(jobs.family(process.pid)[-1:])
    process.communicate(timeout=60)
    assert process.returncode == -9
    # With another number of replicas, so that the case may have to go to another.
    jobs.finish(spec, "--set", "parallel.data_parallel_size=1", faults=faults)
    check_rows(out, [137])
    assert len(deaths_of(out)) <= bound(WINDOW)


@pytest.mark.slow
def test_a_machine_that_always_dies_is_given_up_and_condemns_no_row(tmp_path: pathlib.Path) -> None:
    spec = jobs.spec_of(tmp_path, output=SHARDS, parallel={"data_parallel_size": 1}, max_restarts=2)
    done = jobs.run("run", spec, faults="engine.step:*=die")
    assert done.returncode == 2
    assert "no replica is left" in done.stderr
    assert not jobs.events_of(tmp_path / "out", "condemned")
    assert jobs.state_of(tmp_path / "out").of(Suspects)


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
    assert len(deaths_of(tmp_path / "hurt" / "out")) <= bound(4)


def test_each_group_that_survives_is_followed_by_the_next_and_the_last_by_all_rows(tmp_path: pathlib.Path) -> None:
    given: list[object] = []
    fleet: Any = types.SimpleNamespace(
        replicas=[
            types.SimpleNamespace(number=0, is_running=True, is_given_up=False, current=types.SimpleNamespace(name="a"))
        ],
        give=lambda replica, message: given.append(message),
    )
    extents = (extent_of_all(0, 20, 20, 0),)
    # The replica of the case is not there any more.
    case = Case("a", (7, 8, 9), (Lease(0, 0, 20),), replica=3)
    folder = Folder(tmp_path)
    folder.make("manifest")
    state = State()
    state.apply(record_line(case))
    manifest = Manifest(folder, 1)
    quarantine = Quarantine(RunOrder(folder, extents), state, np.zeros(1, np.bool_), fleet=fleet, manifest=manifest)
    assert list(quarantine.leases) == [(0, 0, 20)]
    for rows in ((7,), (8,), (9,), ()):
        quarantine.give()
        quarantine.give()  # nothing is given twice
        quarantine.survived(fleet.replicas[0], rows)
    manifest.close()
    again = (Lease(0, 0, 20, attempts=2),)
    assert given == [*(Trial(again, (row,)) for row in (7, 8, 9)), Assign(again)]
    assert not quarantine.leases
