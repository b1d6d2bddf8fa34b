"""Shards that are read and tokenised while an engine starts: the same rows as ever, and nobody has to wait for them."""

import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base.storage import Folder
from batchinf.engines.scripted import ScriptedEngine
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Lease
from batchinf.replica.messages import Assign, Event, LeaseBegun, LeaseDone, Revoked
from batchinf.replica.worker import RECORD_BYTES, EngineLimits, InFlightRecord, Pipeline, expected_limits
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

NUM_ROWS, MAX_MODEL_LEN = 60, 24
SHARDS = [Lease(index, index * 10, index * 10 + 10) for index in range(NUM_ROWS // 10)]


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
        self.pipeline = Pipeline(
            task=task_of(self.spec),
            source=self.source,
            tokenizer=self.tokenizer,
            folder=self.folder,
            incarnation="000001.0001",
            metadata={},
            emit=self.events.append,
        )
        self.feeder, self.expected = self.pipeline.feeder, expected
        self.in_flight = InFlightRecord(bytearray(RECORD_BYTES[0]))
        if expected is not None:
            self.pipeline.start_early(expected)

    def assign(self, *shards: Lease) -> None:
        self.feeder.assign(Assign(shards))

    def wait_for(self, *rows: int) -> None:
        """Until these rows wait for the engine, or have failed."""

        def waiting() -> set[int]:
            ready = [pending.prompt.row_index for pending, _ in list(self.pipeline._ready._items)]
            failed = [row.results[0].prompt.row_index for row, _ in list(self.pipeline._finished._items)]
            return {*ready, *failed}

        jobs.wait_until(lambda: waiting() >= set(rows))

    def run(self, num_shards: int) -> list[dict[str, Any]]:
        """The engine comes up, and runs what there is; the rows."""
        assert self.spec.scripted is not None
        assert not self.of(LeaseBegun)
        engine = ScriptedEngine(self.spec.scripted, len(self.tokenizer), 0)
        worker = self.pipeline.complete(engine, self.expected, self.in_flight)
        worker.begin()
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            jobs.wait_until(lambda: len(self.of(LeaseDone)) >= num_shards or not thread.is_alive())
        finally:
            worker.stop(0.0)
            thread.join(120)
        self.num_stored = worker.progress().num_rows
        files = sorted(self.folder.path("staging").glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()

    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def close(self) -> None:
        self.feeder.stop()
        self.pipeline._finished.close()
        if self.feeder.ident is not None:
            self.feeder.join(120)
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
    assert [event.lease[0] for event in one.of(LeaseBegun)] == list(range(len(SHARDS)))


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
    assert sorted(event.lease[0] for event in one.of(LeaseBegun)) == list(range(len(SHARDS)))


def test_all_can_be_taken_back_before_the_engine_is_up(
    early: Callable[[EngineLimits | None], Early], late_rows: list[dict[str, Any]], size: int
) -> None:
    # Room for 2 + 16 requests: the first shard is whole and waits, the second is being put in, the others are unread.
    one = early(EngineLimits(MAX_MODEL_LEN, size, 2))
    one.assign(*SHARDS)
    one.wait_for(*range(15))
    one.feeder.revoke([SHARDS[0].key, SHARDS[1].key, SHARDS[5].key])
    one.wait_for(*range(20, 30))
    one.feeder.revoke([SHARDS[2].key])
    one.assign(SHARDS[0])
    rows = one.run(3)
    kept = {row for shard in (SHARDS[0], *SHARDS[3:5]) for row in range(shard.start, shard.stop)}
    assert rows == [row for row in late_rows if row["row_index"] in kept]
    assert not one.of(Revoked)
    assert one.num_stored == len(rows)
    assert sorted(event.lease[0] for event in one.of(LeaseBegun)) == [0, 3, 4]


def test_after_the_beginning_a_replica_is_asked(early: Callable[[EngineLimits | None], Early], size: int) -> None:
    one = early(EngineLimits(MAX_MODEL_LEN, size, 64))
    one.assign(SHARDS[0])
    one.wait_for(*range(10))
    one.run(1)
    one.feeder.revoke([SHARDS[0].key, SHARDS[4].key])
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


def test_the_feeder_waits_for_the_fork() -> None:
    script = """
import os, subprocess, threading
from batchinf.replica.incarnation import FirstFork

os.environ["TOKENIZERS_PARALLELISM"] = "true"
fork = FirstFork(1)
began = []
thread = threading.Thread(target=lambda: began.append(os.getpid()))
fork.after(thread.start)
subprocess.run(["true"], check=True)  # no fork of what is in this process
assert not began
child = os.fork()
if not child:
    if not os.fork():  # nor does it begin in a child that forks
        os._exit(0)
    os._exit(1 if os.wait()[1] or began or os.environ["TOKENIZERS_PARALLELISM"] != "false" else 0)
assert os.waitpid(child, 0)[1] == 0 and os.environ["TOKENIZERS_PARALLELISM"] == "true"
thread.join(120)
assert began == [os.getpid()]
if not os.fork():  # `start` would raise if it were called again
    os._exit(0)
os.wait()
fork.after(lambda: began.append("late"))
assert began[1:] == ["late"]
never = FirstFork(1)
never.after(lambda: began.append("released"))
assert began[2:] == []
never.release()
assert began[2:] == ["released"]
FirstFork(0).after(lambda: began.append("at once"))
assert began[3:] == ["at once"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=jobs.ROOT, timeout=60)
