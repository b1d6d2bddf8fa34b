"""One engine kept full: what the feeder, the engine's thread and the writer do together, in this process."""

import errno
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jobs
from batchinf.base import faults
from batchinf.base.errors import EngineDeadError, InputError, RowError, RowFailed
from batchinf.base.storage import Folder
from batchinf.engines.scripted import ScriptedEngine
from batchinf.job.open import open_job_input
from batchinf.output.journal import Journal
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import Completion, Lease, Prompt, Request, Result
from batchinf.replica import incarnation, pipeline, writer
from batchinf.replica import worker as worker_module
from batchinf.replica.in_flight import RECORD_BYTES, InFlightRecord
from batchinf.replica.messages import Assign, Event, LeaseBegun, LeaseDone, Revoked
from batchinf.replica.pipeline import Pipeline
from batchinf.replica.token_count import TokenCount
from batchinf.replica.worker import Worker, window
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.registry import task_of

NUM_ROWS = 200
MAX_NUM_SEQS = 8


class WatchedEngine(ScriptedEngine):
    """Notes what it is given and how full it is at each step; `refuses` and `dies_at` make it unkind."""

    def __init__(self, spec: JobSpec, vocab_size: int) -> None:
        assert spec.scripted is not None
        super().__init__(spec.scripted, vocab_size, 0)
        self.added: list[tuple[int, int]] = []
        self.fill: list[int] = []
        self.refuses: set[int] = set()
        self.dies_at: int | None = None

    def add(self, request: Request) -> None:
        if request.row_index in self.refuses:
            raise RowFailed("invalid_request", f"row {request.row_index} is not to my taste")
        self.added.append(request.key)
        super().add(request)

    def step(self) -> list[Completion]:
        if len(self.fill) == self.dies_at:
            raise EngineDeadError("the engine died of the test")
        self.fill.append(min(self.num_unfinished(), MAX_NUM_SEQS))
        return super().step()


class Bench:
    """A worker with all that is around it but the process. Use: assign, then `run` or `start` and `stop`."""

    def __init__(self, folder: pathlib.Path, tokenizer: Any, rows: list[dict[str, Any]], **sections: Any) -> None:
        path = folder / "prompts.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.spec = JobSpec.model_validate(
            {
                "model": {"name": str(jobs.MODEL)},
                "input": {"path": str(path)},
                "output": {"path": str(folder / "out")},
                "checkpoint_interval_s": 0.1,
                **sections,
                "sampling": {"temperature": 0.0, "max_tokens": 8, **sections.get("sampling", {})},
                "scripted": {"max_num_seqs": MAX_NUM_SEQS, "step_s": 0.001, **sections.get("scripted", {})},
            }
        )
        self.folder = Folder(self.spec.output.path)
        self.folder.make("parts", "staging", "journal")
        self.source = open_job_input(self.spec, self.folder.path("source"), (), "refuse")
        self.task = task_of(self.spec)
        self.engine = WatchedEngine(self.spec, len(tokenizer))
        self.events: list[Event] = []
        self.tokenizer = tokenizer
        self.error: BaseException | None = None
        self.worker, self.feeder = self._assemble()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _assemble(self) -> tuple[Worker, Any]:
        name = f"000001.{len(list(self.folder.path('.').glob('life-*'))) + 1:04d}"
        self.folder.path(f"life-{name}").touch()
        self.in_flight = InFlightRecord(bytearray(RECORD_BYTES[0]))
        line = Pipeline(
            task=self.task,
            source=self.source,
            tokenizer=self.tokenizer,
            folder=self.folder,
            incarnation=name,
            metadata={},
            emit=self.events.append,
        )
        worker = line.complete(self.engine, self.in_flight)
        return worker, worker.feeder

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def assign(self, *bounds: tuple[int, int], first: int = 0) -> list[Lease]:
        shards = [Lease(index, *bound) for index, bound in enumerate(bounds, first)]
        self.feeder.assign(Assign(tuple(shards)))
        return shards

    def start(self) -> None:
        self._thread.start()

    def join(self, wait_s: float = 30.0) -> None:
        self._thread.join(wait_s)
        assert not self._thread.is_alive()

    def stop(self, drain_s: float = 0.0) -> None:
        self.worker.stop(drain_s)
        self.join()

    def close(self) -> None:
        """Leave no thread and no open file behind."""
        self.worker.stop(0.0)
        for thread in (self._thread, self.feeder):
            if thread.ident is not None:
                thread.join(30.0)
        self.source.close()

    def run(self, num_shards: int) -> None:
        """Until so many shards are closed."""
        self.start()
        self.wait_for(lambda: len(self.of(LeaseDone)) >= num_shards)
        self.stop()
        assert self.error is None

    def wait_for(self, condition: Callable[[], object]) -> None:
        def is_over() -> bool:
            assert self._thread.is_alive() or self.error is None, self.error
            return bool(condition())

        jobs.wait_until(is_over, 30.0)

    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def rows(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.path("staging").glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist() if files else []

    def journalled(self, *shards: Lease) -> list[dict[str, Any]]:
        journal = Journal(self.folder, "test", self.task.result_schema)
        tables = [s.table() for shard in shards for s in journal.recover(shard.index)[0]]
        return pa.concat_tables(tables).to_pylist() if tables else []


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(jobs.MODEL), False)


@pytest.fixture
def bench(tmp_path: pathlib.Path, tokenizer: Any) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(rows: list[dict[str, Any]] | None = None, **sections: Any) -> Bench:
        rows = rows or [{"prompt": f"Once upon a time there were {index} owls."} for index in range(NUM_ROWS)]
        made.append(Bench(tmp_path, tokenizer, rows, **sections))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def set_faults(text: str) -> None:
        monkeypatch.setattr(faults, "_FAULTS", faults._parse(text))
        monkeypatch.setattr(faults, "_passages", {})

    return set_faults


def evenly(num_rows: int, each: int) -> list[tuple[int, int]]:
    return [(start, min(start + each, num_rows)) for start in range(0, num_rows, each)]


def test_the_engine_is_not_drained_at_the_edges_of_shards(bench: Callable[..., Bench]) -> None:
    # Ten rows a shard, eight of them at once: a barrier would leave the engine two thirds full at best.
    one = bench(scripted={"step_s": 0.003, "vary_lengths": False})
    one.assign(*evenly(NUM_ROWS, 10))
    one.run(NUM_ROWS // 10)
    body = one.engine.fill[: -2 * 8]
    assert min(body) >= 1
    assert sum(body) / len(body) > 0.95 * MAX_NUM_SEQS
    assert len(one.engine.added) == len(set(one.engine.added)) == NUM_ROWS
    assert [row["row_index"] for row in one.rows()] == list(range(NUM_ROWS))


def test_the_engine_never_holds_more_than_its_window(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.003})
    seen: list[int] = []
    add = one.engine.add
    one.engine.add = lambda request: (add(request), seen.append(one.engine.num_unfinished()))[0]  # type: ignore[method-assign]
    one.assign((0, NUM_ROWS))
    one.run(1)
    assert max(seen) == window(MAX_NUM_SEQS) == 10


def test_tensors_of_images_in_the_engine_are_bounded(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    picture = jobs.ROOT / "sample_data" / "pictures" / "red-circle.png"
    num_bytes = 96 * 64 * 3  # that the scripted engine counts for it
    monkeypatch.setattr(worker_module, "IMAGE_BYTES", 2 * num_bytes)
    path = tmp_path / "pictures.jsonl"
    rows = [{"prompt": f"row {number}", "photo": picture.name} for number in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"path": str(path), "images_column": "photo"}
    (tmp_path / picture.name).write_bytes(picture.read_bytes())
    one = bench(input=where)
    one.assign((0, 40))
    one.run(num_shards=1)
    assert len(one.engine.added) == 40
    assert max(one.engine.fill) == 2
    assert one.worker._image_bytes == 0


def test_the_feeder_rests_while_the_engine_is_filled(bench: Callable[..., Bench]) -> None:
    # Awake, it would contend with the engine's thread for the interpreter.
    one = bench()
    add, is_full = one.engine.add, []

    def slowly(request: Request) -> None:
        time.sleep(0.005)
        is_full.append(one.worker.ready.is_full)
        add(request)

    one.engine.add = slowly  # type: ignore[method-assign]
    one.assign((0, NUM_ROWS))
    one.run(1)
    assert is_full == [False] * NUM_ROWS


def test_the_rows_are_what_the_engine_answered(bench: Callable[..., Bench]) -> None:
    one = bench(sampling={"logprobs": 2, "n": 2, "temperature": 0.5})
    one.assign((0, 50), (50, 51))
    one.run(2)
    rows = one.rows()
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [(i, s) for i in range(51) for s in range(2)]
    prompts, max_model_len = one.feeder._builder, one.feeder.max_model_len
    for prompt in prompts.build(one.source.read(0, 51, prompts.columns), max_model_len):
        for request in one.task.expand(prompt, max_model_len):
            answer = one.engine.complete(request)
            row = rows[2 * request.row_index + request.request_index]
            assert row["token_ids"] == answer.token_ids.tolist()
            assert row["logprobs"] == answer.logprobs.logprobs[:, 0].tolist()
            assert row["cumulative_logprob"] == answer.cumulative_logprob
    assert rows[0]["token_ids"] != rows[1]["token_ids"]


def test_only_what_has_not_begun_is_given_back(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.005})
    shards = one.assign(*evenly(NUM_ROWS, 20))
    one.start()
    one.wait_for(lambda: len(one.of(LeaseBegun)) >= 2)
    one.feeder.revoke([shard.key for shard in shards] + [(99, 0, 20)])
    [revoked] = one.of(Revoked)
    one.wait_for(lambda: len(one.of(LeaseDone)) >= len(shards) - len(revoked.leases))
    one.feeder.revoke([shards[9].key])
    one.stop()
    begun = [event.lease[0] for event in one.of(LeaseBegun)]
    assert len(revoked.leases) >= 5  # the feeder runs ahead by its queue's bound and no more
    assert sorted([*begun, *(lease.index for lease in revoked.leases)]) == [shard.index for shard in shards]
    assert sorted(event.lease.index for event in one.of(LeaseDone)) == begun
    assert {row["row_index"] // 20 for row in one.rows()} == set(begun)
    assert one.of(Revoked)[1:] == [Revoked(())]


def test_a_refused_request_is_an_error_row(bench: Callable[..., Bench]) -> None:
    one = bench(sampling={"n": 2, "temperature": 0.5})
    one.engine.refuses = {3, 9}
    one.assign((0, 10), (10, 20))
    one.run(2)
    bad = [row for row in one.rows() if row["error_type"] is not None]
    assert [(row["row_index"], row["sample_index"]) for row in bad] == [(3, 0), (3, 1), (9, 0), (9, 1)]
    assert {row["error_type"] for row in bad} == {"invalid_request"}
    assert "row 3 is not to my taste" in bad[0]["error_message"]
    assert all(row["text"] is None and row["token_ids"] is None for row in bad)
    progress = one.worker.progress()
    assert (sum(progress.errors.values()), progress.num_rows, progress.num_answered) == (4, 40, 36)
    assert not one.worker._entries  # nothing is held of rows that are over


def test_tokens_are_counted_as_they_are_generated(bench: Callable[..., Bench]) -> None:
    one = bench(sampling={"max_tokens": 64}, scripted={"step_s": 0.01, "vary_lengths": False})
    one.assign((0, 20))
    one.start()
    one.wait_for(lambda: len(one.engine.fill) > 10)
    early = one.worker.progress()
    assert early.num_rows == early.num_answered == 0
    # Eight prompts are run, each has a token a step.
    assert 8 * 10 <= early.num_output_tokens <= 8 * 64
    assert early.num_prompt_tokens == sum(len(ids) for ids in prompt_ids(one, 8))
    one.wait_for(lambda: one.of(LeaseDone))
    one.stop()
    late = one.worker.progress()
    assert (late.num_rows, late.num_answered, late.num_output_tokens) == (20, 20, 20 * 64)
    assert late.num_prompt_tokens == sum(len(ids) for ids in prompt_ids(one, 20))


def prompt_ids(one: Bench, num_rows: int) -> list[list[int]]:
    prompts, max_model_len = one.feeder._builder, one.feeder.max_model_len
    built = prompts.build(one.source.read(0, num_rows, prompts.columns), max_model_len)
    return [prompt.token_ids for prompt in built]


def test_tokens_of_a_pipeline_and_of_preempted_requests_are_counted_once() -> None:
    requests = [Request(row, 0, [1] * 5, SamplingSpec(), max_tokens=8) for row in range(4)]
    pipeline = TokenCount(counts_output=True, pipeline_parallel_size=2)
    pipeline.step(requests, [], 4)
    for _ in range(6):  # each step is one stage's, with half of the requests
        pipeline.step([], [], 4)
    assert pipeline.latest == (20, 4 + 12)
    preempting = TokenCount(counts_output=True)
    preempting.step(requests, [], 4)
    for _ in range(6):
        preempting.step([], [], 3)
    assert preempting.latest == (20, 4 + 18)
    completions = [Completion(request, [7] * 8, "length") for request in requests]
    for count in (pipeline, preempting):
        count.step([], completions, 0)
        assert count.latest == (20, 32)


def test_a_row_of_several_requests_is_finished_once(bench: Callable[..., Bench], tmp_path: pathlib.Path) -> None:
    rows = [{"context": f"Question {index}:", "choices": [" one", " two", " three"]} for index in range(10)]
    where = {"context_column": "context", "choices_column": "choices"}
    given = {"path": str(tmp_path / "prompts.jsonl"), **where}
    one = bench(rows, task="score", input=given, sampling={"temperature": None, "max_tokens": None})
    one.assign((0, 10))
    one.run(1)
    progress = one.worker.progress()
    assert (progress.num_rows, progress.num_answered, progress.num_output_tokens) == (10, 10, 0)


def test_a_request_of_many_rows_runs_once(bench: Callable[..., Bench], tmp_path: pathlib.Path) -> None:
    """The choices after a neutral context: only rows of the first window run them again."""
    rows = [{"context": f"Question {index}:", "choices": [" one", " two of"]} for index in range(100)]
    where = {"context_column": "context", "choices_column": "choices"}
    one = bench(rows, task="score", input={"path": str(tmp_path / "prompts.jsonl"), **where},
                score={"neutral": {"context": "N/A"}}, sampling={"temperature": None, "max_tokens": None})  # fmt: skip
    one.assign((0, 100))
    one.run(1)
    sums = [row["choice_neutral_logprob_sums"] for row in one.rows()]
    assert one.worker.progress().num_rows == 100
    assert len(sums[0]) == 2 and sums == [sums[0]] * 100
    assert sum(index >= 2 for _, index in one.engine.added) <= 2 * window(MAX_NUM_SEQS)
    assert sum(index < 2 for _, index in one.engine.added) == 200


def test_bad_rows_never_reach_the_engine(bench: Callable[..., Bench]) -> None:
    rows = [{"prompt": text} for text in ["good", "", None, "x " * 3000]]
    one = bench(rows)
    one.assign((0, 4))
    one.run(1)
    assert [row["error_type"] is None for row in one.rows()] == [True, False, False, False]
    assert all(row["error_message"] for row in one.rows()[1:])
    assert one.engine.added == [(0, 0)]
    assert (one.worker.progress().num_rows, one.worker.progress().num_answered) == (4, 1)


def test_admission_waits_for_the_disk(
    bench: Callable[..., Bench], fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FINISHED_BYTES", 4_000)
    fault("journal.before_fsync=sleep 1.0")
    one = bench()
    waiting: list[int] = []
    step = one.engine.step
    one.engine.step = lambda: (waiting.append(len(one.worker.finished)), step())[1]  # type: ignore[method-assign]
    one.assign((0, NUM_ROWS))
    one.run(1)
    assert one.worker.progress().stalled_by_disk_s > 0.3
    assert max(waiting) * 200 <= 4_000 + 200 * 2 * window(MAX_NUM_SEQS)
    assert len(one.rows()) == NUM_ROWS


def test_admission_waits_for_parts_that_are_slow_to_write(
    bench: Callable[..., Bench], fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FINISHED_BYTES", 4_000)
    monkeypatch.setattr(writer, "_MOST_BYTES", 4_000)
    fault("parts.before_fsync:1=sleep 0.7,parts.before_fsync:2=sleep 0.7")
    one = bench()
    # The bound alone journals here, not the clock: a shard that was journalled just before it closed holds nothing.
    one.worker.writer.checkpoint_interval_s, one.worker.writer._next_checkpoint = 60.0, float("inf")
    closing: list[int] = []
    step = one.engine.step
    one.engine.step = lambda: (closing.append(one.worker.writer._closing_bytes()), step())[1]  # type: ignore[method-assign]
    one.assign(*evenly(NUM_ROWS, 10))
    one.run(NUM_ROWS // 10)
    assert one.worker.progress().stalled_by_disk_s > 0.3
    # Beyond the bound goes at most what was in the queue.
    assert 4_000 < max(closing) < 9_000
    assert len(one.rows()) == NUM_ROWS


def test_bad_rows_do_not_pile_up_in_memory(
    bench: Callable[..., Bench], fault: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_FINISHED_BYTES", 1_000_000)
    fault("journal.before_fsync=sleep 1.0")
    one = bench([{"prompt": ""}] * 10_000)
    one.assign((0, 10_000))
    one.start()
    sizes: list[int] = []
    one.wait_for(lambda: sizes.append(len(one.worker.finished)) or one.of(LeaseDone))
    one.stop()
    assert max(sizes) <= 1_100
    assert len(one.rows()) == 10_000


def test_a_stop_stores_what_finishes_in_time(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.01})
    [shard] = one.assign((0, NUM_ROWS))
    one.start()
    one.wait_for(lambda: len(one.engine.added) > 40)
    one.stop(drain_s=20.0)
    assert one.error is None
    assert 40 < len(one.engine.added) < NUM_ROWS
    assert one.engine.num_unfinished() == 0
    kept = {(row["row_index"], row["request_index"]) for row in one.journalled(shard)}
    assert kept == set(one.engine.added)


def test_a_checkpoint_that_is_asked_for_during_another_one_is_not_forgotten(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a stop comes while a slow disk journals: what finishes meanwhile is journalled now, not in an hour."""
    one = bench(checkpoint_interval_s=3600.0, scripted={"step_s": 0.01})
    is_journalling = threading.Event()
    may_go_on = threading.Event()
    checkpoint = one.worker.writer._checkpoint

    def slow_checkpoint() -> None:
        checkpoint()
        is_journalling.set()
        may_go_on.wait(30)

    monkeypatch.setattr(one.worker.writer, "_checkpoint", slow_checkpoint)
    [lease] = one.assign((0, NUM_ROWS))
    one.start()
    one.worker.writer.checkpoint_soon()
    assert is_journalling.wait(30)
    num_before = len(one.journalled(lease))
    one.worker.writer.checkpoint_soon()
    one.wait_for(lambda: one.worker.progress().num_unstored)
    may_go_on.set()
    one.wait_for(lambda: len(one.journalled(lease)) > num_before)
    assert not one.of(LeaseDone)


def test_a_stop_at_once_stores_nothing_cut_short(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.01})
    [shard] = one.assign((0, NUM_ROWS))
    one.start()
    one.wait_for(lambda: len(one.engine.added) > 40)
    one.stop(drain_s=0.0)
    assert one.error is None
    live = one.engine.num_unfinished()
    kept = one.journalled(shard)
    assert live
    assert len(kept) == len(one.engine.added) - live
    assert {row["finish_reason"] for row in kept} <= {"stop", "length"}


def test_what_is_journalled_is_not_run_again(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.005}, sampling={"n": 3, "temperature": 0.5})
    shards = one.assign((0, 100), (100, NUM_ROWS))
    one.start()
    one.wait_for(lambda: len(one.engine.added) > 60)
    one.stop(drain_s=0.0)
    kept = one.journalled(*shards)
    other = bench(scripted={"step_s": 0.0}, sampling={"n": 3, "temperature": 0.5})
    other.assign((0, 100), (100, NUM_ROWS))
    other.run(2)
    assert len(kept) + len(other.engine.added) == 3 * NUM_ROWS
    assert {(row["row_index"], row["request_index"]) for row in kept}.isdisjoint(other.engine.added)
    assert sum(event.num_recovered for event in other.of(LeaseBegun)) == len(kept)
    rows = [(row["row_index"], row["sample_index"]) for row in other.rows()]
    assert rows == [(index, sample) for index in range(NUM_ROWS) for sample in range(3)]


def test_a_shard_that_the_journal_holds_whole_is_closed_at_once(
    bench: Callable[..., Bench], fault: Callable[[str], None]
) -> None:
    one = bench()
    one.assign((0, 20))
    fault("journal.before_fsync=raise 5,parts.before_fsync=raise 5")
    one.start()
    one.join()
    assert isinstance(one.error, OSError)
    fault("")
    two = bench()
    [shard] = two.assign((0, 20))
    two.worker.writer._close_finished = lambda: None  # type: ignore[method-assign]
    two.start()
    two.wait_for(lambda: len(two.journalled(shard)) == 20)
    two.stop()
    three = bench()
    three.assign((0, 20))
    three.run(1)
    assert three.engine.added == []
    assert len(three.rows()) == 20


@pytest.mark.parametrize("where", ["journal.before_fsync", "parts.before_rename"])
def test_an_error_of_the_writer_ends_the_worker(
    where: str, bench: Callable[..., Bench], fault: Callable[[str], None]
) -> None:
    fault(f"{where}=raise {errno.ENOSPC}")
    one = bench(scripted={"step_s": 0.005})
    one.assign((0, 100), (100, NUM_ROWS))
    one.start()
    one.join()
    assert isinstance(one.error, OSError)
    assert one.error.errno == errno.ENOSPC
    assert incarnation.last_words(one.error).exit_code == 2
    assert "no space left" in incarnation.last_words(one.error).cause


def test_an_error_of_the_feeder_ends_the_worker(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    read = type(one.source).read

    def failing(source: Any, start: int, stop: int, *rest: Any) -> Any:
        if start >= 100:
            raise InputError("the input is not what it was")
        return read(source, start, stop, *rest)

    monkeypatch.setattr(type(one.source), "read", failing)
    shards = one.assign((0, 20), (100, 150))
    one.start()
    one.join()
    assert isinstance(one.error, InputError)
    assert incarnation.last_words(one.error).cause == "the input is not what it was"
    # What had finished by then is stored.
    assert len(one.rows()) + len(one.journalled(*shards)) == len(one.engine.added) - one.engine.num_unfinished()


def test_a_dead_engine_ends_the_worker_with_what_had_finished(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.engine.dies_at = 40
    [shard] = one.assign((0, NUM_ROWS))
    one.start()
    one.join()
    assert isinstance(one.error, EngineDeadError)
    assert len(one.journalled(shard)) == len(one.engine.added) - one.engine.num_unfinished() > 0


def test_an_engine_that_dies_of_the_stop_is_no_error(bench: Callable[..., Bench]) -> None:
    one = bench(scripted={"step_s": 0.01})
    one.assign((0, NUM_ROWS))
    one.start()
    one.wait_for(lambda: one.engine.added)
    one.worker.stop(30.0)
    one.engine.dies_at = len(one.engine.fill) + 2
    one.join()
    assert one.error is None


def test_the_writer_stores_all_that_was_there_when_it_was_told_to_finish(bench: Callable[..., Bench]) -> None:
    # The last result and the end come together, right after the writer has found its queue empty.
    one = bench()
    store, queue = one.worker.writer, one.worker.finished
    opened = one.feeder.open_lease(Lease(0, 0, 1))
    store.track(opened)
    prompt = Prompt(0, [], None, RowError("empty_prompt", "it is empty"))
    row, take = (opened, Result(prompt, 0, 1, None, None, prompt.error, 1)), queue.take
    ending: list[threading.Thread] = []

    def take_and_end(*arguments: Any) -> list[Any]:
        taken = take(*arguments)
        if not ending:
            queue.put_all([(row, 0)])
            ending.append(threading.Thread(target=store.finish))
            ending[0].start()
            jobs.wait_until(lambda: store._is_stopping)
        return taken

    queue.take = take_and_end  # type: ignore[method-assign]
    store.start()
    store.join()
    ending[0].join()
    assert [row["error_type"] for row in one.rows()] == ["empty_prompt"]
