"""Shards that are read and tokenised while an engine starts: the same rows as ever, and nobody has to wait for them."""

import json
import pathlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extents import extent_of_all

import jobs
from batchinf.base.storage import Folder
from batchinf.engines.scripted import ScriptedEngine
from batchinf.fleet.assignment import Assignment
from batchinf.fleet.devices import Slot
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.local.backend import LocalBackend
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import EngineInfo, Shard
from batchinf.replica import incarnation
from batchinf.replica.incarnation import EngineLimits, Pipeline, expected_limits
from batchinf.replica.messages import Assign, Begin, Event, Revoke, Revoked, ShardBegun, ShardClosed
from batchinf.replica.worker import RECORD_BYTES, InFlightRecord
from batchinf.schedule.shards import PendingShards, total_shards
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

NUM_ROWS, MAX_MODEL_LEN = 60, 24
SHARDS = [Shard(index, index * 10, index * 10 + 10) for index in range(NUM_ROWS // 10)]


class Early:
    """What a replica has around an engine that is not up yet."""

    def __init__(self, folder: pathlib.Path, expected: EngineLimits | None) -> None:
        rows = [{"prompt": "one two three four " * (number % 7)} for number in range(NUM_ROWS)]
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.spec = JobSpec.model_validate(
            {
                "model": {"name": str(jobs.MODEL)},
                "input": {"path": str(path)},
                "output": {"path": str(folder / "out")},
                "sampling": {"temperature": 0.0, "logprobs": 1},
                "scripted": {"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN},
            }
        )
        self.folder = Folder(self.spec.output.path)
        self.folder.make("parts", "staging", "journal")
        self.tokenizer = load_tokenizer(str(jobs.MODEL), False)
        self.source = open_job_input(self.spec, self.folder.path("source"), (), "refuse")
        self.events: list[Event] = []
        task, name, emit = task_of(self.spec), "000001.0001", self.events.append
        self.pipeline = Pipeline(task, self.source, self.tokenizer, self.folder, name, {}, emit)
        self.feeder, self.expected = self.pipeline.feeder, expected
        self.in_flight = InFlightRecord(bytearray(RECORD_BYTES[0]))
        if expected is not None:
            self.pipeline.start_early(expected)

    def assign(self, *shards: Shard) -> None:
        self.feeder.assign(Assign(shards, 1))

    def wait_for(self, *rows: int) -> None:
        """Until these rows wait for the engine, or have failed."""

        def waiting() -> set[int]:
            ready = [pending.prompt.row_index for pending, _ in list(self.pipeline._ready._items)]
            failed = [row.results[0].prompt.row_index for row, _ in list(self.pipeline._finished._items)]
            return {*ready, *failed}

        jobs.wait_until(lambda: waiting() >= set(rows), 30)

    def run(self, num_shards: int) -> list[dict[str, Any]]:
        """The engine comes up, and runs what there is; the rows."""
        assert self.spec.scripted is not None
        assert not self.of(ShardBegun)
        engine = ScriptedEngine(self.spec.scripted, len(self.tokenizer), 0)
        worker = self.pipeline.complete(engine, self.expected, self.in_flight)
        worker.begin()
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            jobs.wait_until(lambda: len(self.of(ShardClosed)) >= num_shards or not thread.is_alive(), 30)
        finally:
            worker.stop(0.0)
            thread.join(30)
        self.num_stored = worker.progress().num_rows
        files = sorted(self.folder.path("staging").glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()

    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def close(self) -> None:
        self.feeder.stop()
        self.pipeline._finished.close()
        if self.feeder.ident is not None:
            self.feeder.join(30)
        self.source.close()


@pytest.fixture(scope="module")
def size() -> int:
    return len(load_tokenizer(str(jobs.MODEL), False))


@pytest.fixture
def early(tmp_path: pathlib.Path) -> Iterator[Callable[[EngineLimits | None], Early]]:
    made: list[Early] = []

    def make(expected: EngineLimits | None) -> Early:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Early(folder, expected))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def late_rows(early: Callable[[EngineLimits | None], Early]) -> list[dict[str, Any]]:
    """The rows of an engine that was up before it was given any."""
    one = early(None)
    one.assign(*SHARDS)
    rows = one.run(len(SHARDS))
    assert {row["error_type"] for row in rows} == {None, "empty_prompt", "prompt_too_long"}
    return rows


def test_requests_wait_for_the_engine_and_nothing_has_begun(
    early: Callable[[EngineLimits | None], Early], late_rows: list[dict[str, Any]], size: int
) -> None:
    one = early(EngineLimits(MAX_MODEL_LEN, size, 64))
    one.assign(*SHARDS)
    one.wait_for(*range(NUM_ROWS))
    rows = one.run(len(SHARDS))
    assert rows == late_rows
    assert [event.shard for event in one.of(ShardBegun)] == list(range(len(SHARDS)))


@pytest.mark.parametrize(
    "expected",
    [
        EngineLimits(2048, 1536, 64),
        EngineLimits(8, 1536, 64),
        EngineLimits(MAX_MODEL_LEN, 300, 64),
        EngineLimits(8, 300, 2),
    ],
)
def test_where_the_engine_has_other_limits_all_detokenizer_claim_anew(
    expected: EngineLimits, early: Callable[[EngineLimits | None], Early], late_rows: list[dict[str, Any]]
) -> None:
    one = early(expected)
    one.assign(*SHARDS)
    one.wait_for(*range(7))
    assert one.run(len(SHARDS)) == late_rows
    assert sorted(event.shard for event in one.of(ShardBegun)) == list(range(len(SHARDS)))


def test_all_can_be_taken_back_before_the_engine_is_up(
    early: Callable[[EngineLimits | None], Early], late_rows: list[dict[str, Any]], size: int
) -> None:
    # Room for 2 + 16 requests: the first shard is whole and waits, the second is being put in, the others are unread.
    one = early(EngineLimits(MAX_MODEL_LEN, size, 2))
    one.assign(*SHARDS)
    one.wait_for(*range(15))
    one.feeder.revoke([0, 1, 5])
    one.wait_for(*range(20, 30))
    one.feeder.revoke([2])
    one.assign(SHARDS[0])
    rows = one.run(3)
    kept = {row for shard in (SHARDS[0], *SHARDS[3:5]) for row in range(shard.start, shard.stop)}
    assert rows == [row for row in late_rows if row["row_index"] in kept]
    assert not one.of(Revoked)
    assert one.num_stored == len(rows)
    assert sorted(event.shard for event in one.of(ShardBegun)) == [0, 3, 4]


def test_after_the_beginning_a_replica_is_asked(early: Callable[[EngineLimits | None], Early], size: int) -> None:
    one = early(EngineLimits(MAX_MODEL_LEN, size, 64))
    one.assign(SHARDS[0])
    one.wait_for(*range(10))
    one.run(1)
    one.feeder.revoke([0, 4])
    assert one.of(Revoked) == [Revoked(())]


@pytest.mark.parametrize(
    ("engine", "config", "expected"),
    [
        ({}, (4096, 300), EngineLimits(4096, 300, 1024)),
        ({"max_model_len": 512, "max_num_seqs": 8}, (4096, 300), EngineLimits(512, 300, 8)),
        ({"max_model_len": 512}, (None, 300), EngineLimits(512, 300, 1024)),
        ({}, (None, 300), None),
        ({}, (4096, None), None),
        # What vLLM makes of these is its own affair.
        ({"max_model_len": -1}, (4096, 300), None),
        ({"max_model_len": "auto"}, (4096, 300), None),
    ],
)
def test_limits_that_are_known_before(
    engine: dict[str, Any], config: tuple[int | None, int | None], expected: EngineLimits | None
) -> None:
    sections = {"model": {"name": "m"}, "input": {"path": "p"}, "output": {"path": "o"}, "engine": engine}
    assert expected_limits(JobSpec.model_validate(sections), *config, []) == expected


# -- the coordinator's side --------------------------------------------------------------------------------------------


class Told:
    """In the place of a replica: what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.incarnation = "000001.0001"
        self.send = self.messages.append


class Bench:
    """Replicas that prepare shards until they are told to begin, and what they are told."""

    def __init__(self, folder: pathlib.Path, cases: set[int], *, begins_together: bool = False) -> None:
        self.fleet = Fleet(
            LocalBackend(),
            [Slot(number, (), ()) for number in range(2)],
            1,
            None,
            1,
            folder,
            1,
            60.0,
            True,  # type: ignore[arg-type]
        )
        self.told = [Told(), Told()]
        for replica, told in zip(self.fleet.replicas, self.told, strict=True):
            replica.handle, replica.early_window = told, 20  # type: ignore[assignment]
        extents = (extent_of_all(0, 80, 10, 0, 0),)
        self.pending = PendingShards(extents, np.zeros(total_shards(extents), np.bool_))
        trials: Any = types.SimpleNamespace(
            movable=lambda replica: tuple(replica.unbegun),
            give=lambda _: None,
            has_case=lambda replica: replica.number in cases,
            is_on_trial=lambda _: False,
            condemned_in=lambda _: (),
        )
        self.assignment = Assignment(self.fleet, self.pending, trials, begins_together=begins_together)

    def come_up(self, number: int, max_num_seqs: int = 200) -> None:
        self.fleet.replicas[number].info = EngineInfo(16, max_num_seqs, 16, "none", versions={})
        self.assignment.begin(self.fleet.replicas[number])


def given(told: Told) -> list[tuple[int, int]]:
    """Shards that were given, each with its attempt."""
    assigned = [message for message in told.messages if isinstance(message, Assign)]
    return [(shard.index, message.attempts) for message in assigned for shard in message.shards]


def test_who_takes_over_a_case_begins_with_nothing_else(tmp_path: pathlib.Path) -> None:
    cases: set[int] = set()
    bench = Bench(tmp_path, cases)
    bench.assignment.assign()
    assert [given(told) for told in bench.told] == [[(0, 1), (2, 1)], [(1, 1), (3, 1)]]
    cases.add(0)
    bench.come_up(1)
    bench.come_up(0)
    assert bench.told[1].messages[-1] == Begin()
    assert bench.told[0].messages[-2:] == [Revoke((0, 2)), Begin()]
    assert not bench.fleet.replicas[0].shards
    assert bench.pending.take().index == 0


def test_between_two_rounds_only_those_that_were_heard_are_given_shards(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set())
    bench.assignment.assign()
    before = [given(told) for told in bench.told]
    one, other = bench.fleet.replicas
    for replica in (one, other):
        del replica.shards[next(iter(replica.shards))]
    bench.assignment.assign_to([other])
    assert given(bench.told[0]) == before[0]
    assert given(bench.told[1]) == [*before[1], (4, 1)]
    bench.assignment.assign()
    assert given(bench.told[0]) == [*before[0], (5, 1)]


def test_between_two_rounds_a_replica_with_a_case_waits_for_it(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, {0})
    bench.come_up(0)
    bench.come_up(1)
    bench.assignment.assign_to(bench.fleet.replicas)
    assert not given(bench.told[0])
    assert given(bench.told[1])


def test_who_has_a_case_is_given_nothing_early(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, {0})
    bench.assignment.assign()
    assert [given(told) for told in bench.told] == [[], [(0, 1), (1, 1)]]


def test_who_is_up_takes_what_a_deaf_one_prepares_and_it_was_not_tried(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set())
    bench.assignment.assign()
    bench.come_up(1)
    slow, quick = bench.fleet.replicas
    bench.assignment.assign()
    # It is given the rest at once, but keeps its hands off the other's while it has more to do itself.
    assert (len(bench.pending), set(slow.shards)) == (0, {0, 2})
    while quick.shards:
        del quick.shards[next(iter(quick.shards))]
        bench.assignment.assign()
    assert not slow.shards
    assert sorted(given(bench.told[1])) == [(index, 1) for index in range(12)]
    assert given(bench.told[0]) == [(0, 1), (2, 1)]


def begun(bench: Bench) -> list[int]:
    """The replicas that were told to begin, once for each time."""
    return [number for number, told in enumerate(bench.told) for message in told.messages if message == Begin()]


def test_together_all_begin_with_an_equal_share_once_the_last_is_up(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    one, other = bench.fleet.replicas
    one.early_window, other.early_window = 100, None
    bench.assignment.assign()
    assert len(one.shards) == 12  # all rows fit its window
    other.early_window = 100
    bench.assignment.assign()
    shares = [dict(one.shards), dict(other.shards)]
    assert [sum(shard.num_rows for shard in share.values()) for share in shares] == [40, 40]
    bench.come_up(1)
    for _ in range(2):
        bench.assignment.assign()
        bench.assignment.assign_to([other])
    assert begun(bench) == []
    bench.come_up(0)
    bench.assignment.assign()
    bench.assignment.assign()
    assert begun(bench) == [0, 1]
    assert [one.shards, other.shards] == shares
    for replica, told in zip((one, other), bench.told, strict=True):
        # Each keeps the rows that it begins. Rows that moved from one to the other count as tried once.
        assert isinstance(told.messages[-2], Assign)
        assert {attempt for index, attempt in given(told) if index in replica.shards} == {1}


def test_together_rows_beyond_the_windows_wait_until_all_begin(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.assignment.assign()
    bench.come_up(0, 16)
    for _ in range(3):
        bench.assignment.assign()
    assert [given(told) for told in bench.told] == [[(0, 1), (2, 1)], [(1, 1), (3, 1)]]
    bench.come_up(1, 16)
    bench.assignment.assign()
    assert begun(bench) == [0, 1]
    assert [replica.outstanding_rows for replica in bench.fleet.replicas] == [40, 38]


def test_together_an_engine_with_a_larger_window_than_expected_gets_no_larger_share(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.assignment.assign()
    for number in range(2):
        bench.come_up(number)
        bench.assignment.assign()
    assert begun(bench) == [0, 1]
    assert [replica.outstanding_rows for replica in bench.fleet.replicas] == [40, 40]


@pytest.mark.parametrize("is_given_up", [False, True])
def test_together_nobody_waits_for_one_that_fails_at_its_start(is_given_up: bool, tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.assignment.assign()
    bench.come_up(0)
    bench.assignment.assign()
    assert begun(bench) == []
    failed = bench.fleet.replicas[1]
    end: Any = types.SimpleNamespace(replica=failed, shards=tuple(failed.shards.values()), was_host_lost=False)
    failed.handle, failed.is_given_up, failed.restarts = None, is_given_up, 0 if is_given_up else 1
    failed.shards.clear()
    bench.assignment.note_ended(end, ())
    if not is_given_up:
        failed.handle = bench.told[1]  # type: ignore[assignment]
    bench.assignment.assign()
    assert begun(bench) == [0]
    if not is_given_up:
        bench.come_up(1)
        assert begun(bench) == [0, 1]


@pytest.mark.parametrize("is_back", [True, False])
def test_together_all_wait_for_each_other_again_if_all_fail_their_first_start(
    is_back: bool, tmp_path: pathlib.Path
) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.assignment.assign()
    for replica in bench.fleet.replicas:
        end: Any = types.SimpleNamespace(replica=replica, shards=tuple(replica.shards.values()), was_host_lost=False)
        replica.handle, replica.restarts = None, 1
        replica.shards.clear()
        bench.assignment.note_ended(end, ())
        bench.assignment.assign()
    one, other = bench.fleet.replicas
    one.handle = bench.told[0]  # type: ignore[assignment]
    if is_back:
        other.handle = bench.told[1]  # type: ignore[assignment]
    bench.come_up(0)
    bench.assignment.assign()
    assert begun(bench) == []
    other.handle = bench.told[1]  # type: ignore[assignment]
    bench.come_up(1)
    bench.assignment.assign()
    assert begun(bench) == [0, 1]
    assert [replica.outstanding_rows for replica in bench.fleet.replicas] == [40, 40]


def test_together_nobody_waits_for_one_that_fails_more_often_than_another(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    one, other = bench.fleet.replicas
    one.restarts, other.restarts = 1, 2
    bench.come_up(0)
    bench.assignment.assign()
    assert begun(bench) == [0]


def test_together_one_that_ends_while_it_waits_has_tried_nothing(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.assignment.assign()
    bench.come_up(0, 16)
    bench.assignment.assign()
    ended, other = bench.fleet.replicas
    end: Any = types.SimpleNamespace(replica=ended, shards=tuple(ended.shards.values()), was_host_lost=False)
    ended.handle, ended.restarts = None, 1
    ended.shards.clear()
    bench.assignment.note_ended(end, ())
    bench.come_up(1, 16)
    bench.assignment.assign()
    assert begun(bench) == [1]
    while other.shards:
        del other.shards[next(iter(other.shards))]
        bench.assignment.assign()
    assert sorted(given(bench.told[1])) == [(index, 1) for index in range(12)]


def test_together_nobody_waits_for_longer_than_an_engine_may_stall(tmp_path: pathlib.Path) -> None:
    bench = Bench(tmp_path, set(), begins_together=True)
    bench.fleet.stall_timeout_s = 0.0
    bench.assignment.assign()
    assert begun(bench) == []
    bench.come_up(1)
    bench.assignment.assign()
    assert begun(bench) == [1]


# -- whole jobs --------------------------------------------------------------------------------------------------------


def test_a_replica_that_is_killed_while_it_prepares_shards(tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    starting, reading, out = tmp_path / "starting", tmp_path / "reading", tmp_path / "out"
    spec = jobs.spec_of(tmp_path, parallel={"data_parallel_size": 1})
    faults = f"engine.start=hold {starting},feeder.read=hold {reading}"
    process = jobs.start("run", spec, faults=faults, BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    jobs.wait_until(lambda: all(path.exists() and path.read_text() for path in (starting, reading)), 120)
    jobs.kill(jobs.replicas_of(process.pid))
    code, _, errors = jobs.end(process)
    assert code == 0, errors
    assert jobs.rows_of(out) == list(jobs.unhurt())
    # Nothing of it was in an engine: there is no suspect, and no try.
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}
    assert not jobs.events_of(out, "death")
    assert len(jobs.events_of(out, "replica_started")) == 2


@pytest.mark.parametrize("action", ["hold", "raise 5"])
def test_shards_of_a_replica_that_does_not_come_up_are_done_by_the_other(action: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "once").mkdir()
    action = f"hold {tmp_path / 'held'}" if action == "hold" else action
    # Both have their share of the shards by the time that the other one is up.
    spec = jobs.spec_of(tmp_path, max_restarts=0, output={"rows_per_shard": 400}, scripted={"start_s": 1.0})
    jobs.finish(spec, faults=f"engine.start={action}", BATCHINF_FAULTS_ONCE=str(tmp_path / "once"))
    out = tmp_path / "out"
    assert jobs.rows_of(out) == list(jobs.unhurt())
    assert {row["attempts"] for row in jobs.table_of(out).select(["attempts"]).to_pylist()} == {1}
    assert len({part.replica for part in jobs.state_of(out).parts.values()}) == 1


def test_a_process_is_forked_only_between_two_pieces_of_work() -> None:
    script = """
import os, threading, time
from batchinf.replica.feeder import UNFORKED
from batchinf.replica.incarnation import guard_forks

os.environ["TOKENIZERS_PARALLELISM"] = "true"
guard_forks()
has_begun, done = threading.Event(), []

def work():
    with UNFORKED:
        has_begun.set()
        time.sleep(0.2)
        done.append(1)

threading.Thread(target=work).start()
has_begun.wait()
child = os.fork()
if not child:
    is_free = UNFORKED.acquire(blocking=False)
    os._exit(0 if done and is_free and os.environ["TOKENIZERS_PARALLELISM"] == "false" else 1)
assert os.waitpid(child, 0)[1] == 0 and os.environ["TOKENIZERS_PARALLELISM"] == "true"
with UNFORKED:
    pass
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=jobs.ROOT, timeout=60)


def test_the_feeder_waits_for_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert incarnation.forks_engine_core()
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert not incarnation.forks_engine_core()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert not incarnation.forks_engine_core()
    script = """
import os, subprocess, threading
from batchinf.replica.incarnation import after_first_fork, guard_forks

guard_forks()
began = []
thread = threading.Thread(target=lambda: began.append(os.getpid()))
after_first_fork(thread.start)
subprocess.run(["true"], check=True)  # no fork of what is in this process
assert not began
child = os.fork()
if not child:
    if not os.fork():  # nor does it begin in a child that forks
        os._exit(0)
    os._exit(1 if os.wait()[1] or began else 0)
assert os.waitpid(child, 0)[1] == 0
thread.join(30)
assert began == [os.getpid()]
if not os.fork():  # `start` would raise if it were called again
    os._exit(0)
os.wait()
guard_forks()
after_first_fork(lambda: began.append("late"))
assert began[1:] == ["late"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=jobs.ROOT, timeout=60)
