"""One incarnation of a replica: starts the engine and the pipeline around it, and obeys the coordinator.

The pipeline is the feeder, the writer and their queues. All but the writer is made before the engine is ready, so that
prompts are tokenised while it starts. A backend runs an incarnation: it gives it a port to the coordinator and memory
for the record of requests in flight. The local backend runs it in `fleet/local/process.py`.

The main thread starts the engine; another one opens the input and makes the feeder and the decoder. vLLM may fork its
engine core from this process. The feeder starts after that fork; later forks wait until it is between two batches.
"""

import contextlib
import functools
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, EngineDeadError, OutputError, UserError, out_of_memory_message
from batchinf.base.process import without_collection
from batchinf.base.storage import LASTING, Folder, disk_error
from batchinf.engines.installed import importing
from batchinf.engines.protocol import Engine
from batchinf.engines.scripted import ScriptedEngine, ScriptedPooling
from batchinf.job.job import carried_columns
from batchinf.job.open import open_job_input
from batchinf.manifest.columns import Columns
from batchinf.manifest.names import retry_of
from batchinf.model.content import Unchanged, adapter_files
from batchinf.output.journal import Journal
from batchinf.output.open_lease import OpenLease
from batchinf.output.parts import PartTarget, write_part
from batchinf.output.replace import write_replacement
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import load_tokenizer
from batchinf.records import EngineInfo, Lease, Part
from batchinf.replica.feeder import UNFORKED, ByteQueue, FailedRow, Feeder, PendingRequest
from batchinf.replica.messages import (
    DISK_ERROR,
    STARTING_ENGINE,
    WARMING_UP,
    Assign,
    Begin,
    Command,
    Event,
    Failed,
    Identified,
    Launch,
    Progress,
    Ready,
    Revoke,
    StartPhase,
    Stop,
    Stopped,
    TakesLeases,
    Trial,
    Work,
)
from batchinf.replica.text import Answers, Detokenizer, NoAnswers
from batchinf.replica.worker import InFlightRecord, Worker, window
from batchinf.replica.writer import WIDE, Finished, Writer
from batchinf.schedule.positions import RETRY_FOLDER, RunOrder, ShardRows, stored_positions
from batchinf.source.rows import Source
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of

# vLLM's default on devices of 70 GiB and more; on others it is 256.
_LIKELY_SEQS = 1024


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """max_num_seqs: a likely value if the spec has none. No output depends on it."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int


def expected_limits(
    spec: JobSpec, max_model_len: int | None, vocab_size: int | None, tokenizer: Sized
) -> EngineLimits | None:
    """The limits that the engine will probably have; None if they cannot be known before it starts.

    max_model_len, vocab_size: from the model's config.
    """
    if spec.scripted is not None:
        return EngineLimits(_scripted_length(spec), len(tokenizer), spec.scripted.max_num_seqs)
    given = spec.engine.get("max_model_len", max_model_len)
    if not isinstance(given, int) or given <= 0 or vocab_size is None:  # -1: vLLM fits it to the memory
        return None
    most = spec.engine.get("max_num_seqs")
    return EngineLimits(given, vocab_size, most if isinstance(most, int) and most > 0 else _LIKELY_SEQS)


def _scripted_length(spec: JobSpec) -> int:
    length = spec.length_limit(None)
    assert length is not None, "the scripted engine has a length of its own"
    return length


class _Forks:
    """The state of this process's forks; changed only while `UNFORKED` is held."""

    is_guarded = False
    have_been = False  # whether there was one since `guard_forks`
    waiting: ClassVar[list[Callable[[], object]]] = []


def guard_forks() -> None:
    """Make forks of this process wait for `UNFORKED`. May be called again."""
    with UNFORKED:
        if not _Forks.is_guarded:
            _Forks.is_guarded = True
            os.register_at_fork(before=UNFORKED.acquire, after_in_parent=_in_parent, after_in_child=_in_child)


def forks_engine_core() -> bool:
    """Whether vLLM will fork its engine core from this process, by its environment variables."""
    is_apart = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    return is_apart and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") == "fork"


def after_first_fork(call: Callable[[], object]) -> None:
    """Run `call` once, after the first fork of this process since `guard_forks`; at once if that has happened."""
    with UNFORKED:
        if not _Forks.have_been:
            _Forks.waiting.append(call)
            return
    call()


def _in_parent() -> None:
    _Forks.have_been = True
    calls = [*_Forks.waiting]
    _Forks.waiting.clear()
    UNFORKED.release()
    for call in calls:
        call()


def _in_child() -> None:
    # The calls belong to the parent, even if the child is forked in turn.
    _Forks.waiting.clear()
    UNFORKED.release()
    # Tokenizers read it at each call. With "true" they would wait for threads that only the parent has.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# A row that fails before it reaches the engine, with its message.
_FAILED_ROW_BYTES = 1 << 10
# Bounds of the queue before the engine and of the queue before the writer.
_READY_BYTES = 64 << 20
_FINISHED_BYTES = 96 << 20


class Pipeline:
    """The feeder, the queues and the decoder around an engine, made before the engine is up."""

    def __init__(
        self,
        task: Task,
        source: Source,
        tokenizer: object,
        folder: Folder,
        incarnation: str,
        metadata: Mapping[str, str],
        emit: Callable[[Event], None],
        order: RunOrder | None = None,
        begun_at: str | None = None,
        may_store: Callable[[], object] = lambda: None,
        columns: Columns | None = None,
    ) -> None:
        """order: None if rows run in the order of their positions. may_store: waits until results may be durable.

        columns: those of the job's files; None: all that the task has.
        """
        self._spec, self._task, self._source, self._tokenizer = task.spec, task, source, tokenizer
        self._folder, self._incarnation, self._metadata, self._emit = folder, incarnation, metadata, emit
        self._order, self._begun_at = order, begun_at
        self._may_store = may_store
        carried = [source.schema.field(name) for name in carried_columns(task.spec)]
        self._columns = columns or Columns.of_new_job(task, carried)
        self._journal = Journal(folder, incarnation, self._columns.journal_schema, self._before_segment)
        self._retry = retry_of(incarnation)
        self._chosen = stored_positions(folder, self._retry, where=RETRY_FOLDER) if self._retry else None
        self._ready: ByteQueue[PendingRequest] = ByteQueue(1, _READY_BYTES)
        self._finished: ByteQueue[Finished | FailedRow] = ByteQueue(1 << 30, _FINISHED_BYTES)
        self.feeder = Feeder(source, task, self._open_lease, self._ready, self._fail, emit)
        self._detokenizer_claim = threading.Lock()
        self._detokenizer: Future[Detokenizer | None] = Future()

    def start_early(self, limits: EngineLimits, *, after_fork: bool = False) -> None:
        """Let the feeder make as many requests, by these limits, as fill the engine and the queue before it.

        after_fork: start it only after this process has been forked.
        """
        guard_forks()
        self._ready.resize(window(limits.max_num_seqs) + _num_ready(limits.max_num_seqs))
        self.feeder.expect(self._prompts_by(limits.vocab_size), limits.max_model_len)
        start = threading.Thread(target=self._start, name="start", daemon=True).start
        if after_fork:
            after_first_fork(start)
        else:
            start()

    def _start(self) -> None:
        """Make the detokenizer, which takes 1 s for a large vocabulary, and then start the feeder."""
        self._make_detokenizer()
        self.feeder.start_once()

    def _make_detokenizer(self) -> None:
        if not self._detokenizer_claim.acquire(blocking=False):
            return
        try:
            with UNFORKED:
                self._detokenizer.set_result(Detokenizer(self._tokenizer) if self._task.makes_text else None)
        except BaseException as error:
            self._detokenizer.set_exception(error)

    def complete(self, engine: Engine, expected: EngineLimits | None, in_flight: InFlightRecord) -> Worker:
        """The worker. expected: the limits that the feeder has used; if the engine's differ, it starts anew."""
        info = engine.info
        self._ready.resize(_num_ready(info.max_num_seqs))
        prompts = self._prompts_by(info.vocab_size)
        if expected is None:
            self.feeder.expect(prompts, info.max_model_len)
        elif (expected.max_model_len, expected.vocab_size) != (info.max_model_len, info.vocab_size):
            self.feeder.settle(prompts, info.max_model_len)
        self._make_detokenizer()  # does nothing if the feeder was started early
        answers = answers_of(self._spec, self._tokenizer, self._detokenizer.result())
        room = WIDE if self._task.has_wide_results else None
        write, interval_s = self._write_by(info), self._spec.checkpoint_interval_s
        writer = Writer(self._finished, self._task, answers, write, self._emit, interval_s, room)
        counts_output = self._task.draws_tokens
        return Worker(engine, self._ready, self._finished, self.feeder, writer, in_flight, counts_output=counts_output)

    def _prompts_by(self, vocab_size: int) -> Callable[[], PromptBuilder]:
        return functools.partial(self._task.prompt_builder, self._tokenizer, vocab_size, self._begun_at)

    def _open_lease(self, lease: Lease) -> OpenLease:
        rows = ShardRows(lease.start, lease.stop) if self._order is None else self._order.of(lease)
        chosen = None if self._chosen is None else self._chosen.chosen(rows)
        opened = OpenLease(lease, self._task, self._journal, chosen, rows)
        opened.recover()
        return opened

    def _fail(self, row: FailedRow) -> None:
        self._finished.put(row, _FAILED_ROW_BYTES * len(row.results))

    def _before_segment(self) -> None:
        # The writer waits here. Its queue fills up, and admission waits.
        self._may_store()
        self._source.keep_digests()

    def _write_by(self, info: EngineInfo) -> Callable[[OpenLease], Part]:
        versions = {f"batchinf.version.{name}": text for name, text in info.versions.items()}
        stored = {**self._metadata, **versions, "batchinf.device": info.device}
        write_file = write_replacement if self._retry else write_part
        target = PartTarget(
            folder=self._folder,
            source=self._source,
            carried=tuple(carried_columns(self._spec)),
            columns=self._columns,
            metadata=stored,
            incarnation=self._incarnation,
        )

        def write(shard: OpenLease) -> Part:
            self._may_store()
            return write_file(target, shard)

        return write


def _num_ready(max_num_seqs: int) -> int:
    """Requests that wait before a full engine."""
    return max(16, window(max_num_seqs) // 2)


def answers_of(spec: JobSpec, tokenizer: object, detokenizer: Detokenizer | None) -> Answers | NoAnswers:
    """The reader of completions. Imports vLLM only for reasoning parsers, regexes and grammars.

    The scripted engine ignores regexes and grammars. detokenizer: None for tasks without text.
    """
    if detokenizer is None:
        return NoAnswers()
    split, matcher_of = None, None
    if spec.model.reasoning_parser is not None:
        from batchinf.engines.vllm.structures import reasoner_of

        split = reasoner_of(spec, tokenizer).split
    if spec.scripted is None and (spec.sampling.structured_outputs or {}).keys() & {"regex", "grammar"}:
        from batchinf.engines.vllm.arguments import structures_backend
        from batchinf.engines.vllm.structures import matcher

        matcher_of = functools.partial(matcher, backend=structures_backend(spec.engine))
    return Answers(spec, tokenizer, detokenizer, split, matcher_of)


# A progress message comes at least so often. `Assign.progress_s` may ask for more of them.
_PROGRESS_S = 1.0


class Port(Protocol):
    """A replica's connection to its coordinator. Messages arrive in the order in which they were sent."""

    @property
    def is_closed(self) -> bool:
        """Whether the coordinator is gone or has dropped this incarnation."""

    def send(self, message: Event, /) -> None:
        """Send an event, from any thread. Does not raise if the coordinator is gone."""

    def receive(self, wait_s: float | None, /) -> list[Command]:
        """The commands that have arrived, after at most `wait_s` seconds. Called from one thread."""


class Incarnation:
    """The part between the port and the engine. `run` starts the engine and works; `listen` runs on its own thread."""

    def __init__(self, launch: Launch, port: Port, in_flight: InFlightRecord, abandon: Callable[[], object]) -> None:
        """abandon: end this incarnation at once, with all that it started; called when the coordinator is gone."""
        self._launch = launch
        self._in_flight = in_flight
        self._port = port
        self._abandon = abandon
        self._spec = JobSpec.model_validate_json(launch.spec)
        self._task = task_of(self._spec)  # its input is not fully known yet
        self._folder = Folder(launch.folder)
        self._tokenizer: Any = None
        self._work: Work | None = None
        self._starts_engine = False
        self._pipeline: Future[tuple[Pipeline, EngineLimits | None]] = Future()
        self._worker: Worker | None = None
        self._feeder: Feeder | None = None
        self._stop: Stop | None = None
        self._progress_s = _PROGRESS_S
        self._may_run = threading.Event()
        self._is_identified = threading.Event()
        # vLLM loads an adapter again if it has more of them than fit into its memory.
        self._adapters = Unchanged(path for adapter in launch.adapters for path in adapter_files(adapter))
        self._lock = threading.Lock()

    def run(self) -> None:
        """Start the engine, work until stopped, and send `Stopped`."""
        started = time.monotonic()
        self._port.send(StartPhase("loading the tokenizer and opening the input", os.uname().nodename))
        with without_collection():
            self._tokenizer = load_tokenizer(self._launch.tokenizer_path, self._spec.model.trust_remote_code)
        guard_forks()
        with self._lock:
            work, self._starts_engine = self._work, True
        if work is not None:
            self._open(work)
            self._pipeline.result()
        self._port.send(StartPhase(STARTING_ENGINE))
        engine = self._start_engine(self._tokenizer)
        try:
            self._port.send(StartPhase(WARMING_UP))
            engine.warm_up(self._task.warm_up_request())
            start_s = round(time.monotonic() - started, 3)
            if not self._pipeline.done():
                self._port.send(StartPhase("waiting for the input"))
            pipeline, limits = self._pipeline.result()
            worker = pipeline.complete(engine, limits, self._in_flight)
            with self._lock:
                self._worker = worker
                if self._stop is not None:
                    worker.stop(self._stop.drain_s)
            self._port.send(Ready(engine.info, start_s))
            self._may_run.wait()
            worker.run()
            self._port.send(worker.progress())
            # Before the engine ends, which may take seconds: nothing of the job depends on it any more.
            self._port.send(Stopped())
        finally:
            with contextlib.suppress(Exception):
                engine.close()

    def _start_engine(self, tokenizer: Any) -> Engine:
        task, script, launch = self._task, self._spec.scripted, self._launch
        if script is not None:
            size = len(tokenizer)
            script = script.model_copy(update={"max_model_len": _scripted_length(self._spec)})
            if task.pooling is not None:
                return ScriptedPooling(task, script, size)
            texts = (self._spec.sampling.structured_outputs or {}).get("choice") or ()
            choices = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            return ScriptedEngine(script, size, getattr(tokenizer, "eos_token_id", None) or 0, choices)
        given = task, launch.model_path, launch.tokenizer_path, launch.revision, launch.adapters, launch.ray_group
        with importing(f"task {task.name}"):
            with without_collection():
                from batchinf.engines.vllm.engine import VllmEngine
            if task.pooling is None:
                return VllmEngine(*given)
            from batchinf.engines.vllm.pooling import VllmPooling

            return VllmPooling(*given)

    def _open(self, work: Work) -> None:
        """Open the input and start the pipeline. If that fails, `run` raises the error when it needs the pipeline."""
        try:
            # The engine may be starting on another thread by now, and fork this process.
            with UNFORKED:
                faults.point("replica.open")
                self._pipeline.set_result(self._start_pipeline(work))
        except BaseException as error:
            self._pipeline.set_exception(error)

    def _start_pipeline(self, work: Work) -> tuple[Pipeline, EngineLimits | None]:
        spec = self._spec.model_copy(update={"input": InputSpec.model_validate_json(work.input)})
        source = open_job_input(spec, pathlib.Path(work.source_folder), work.taken, "ignore")
        name, emit, order = self._launch.incarnation, self._port.send, RunOrder(self._folder, work.extents)
        task, tokenizer, metadata, begun_at = work.columns.task(spec), self._tokenizer, work.metadata, work.begun_at
        pipeline = Pipeline(
            task, source, tokenizer, self._folder, name, metadata, emit, order, begun_at, self._may_store, work.columns
        )
        self._feeder = pipeline.feeder
        limits = expected_limits(spec, *self._launch.config_limits, tokenizer)
        if limits is not None:
            pipeline.start_early(limits, after_fork=spec.scripted is None and forks_engine_core())
            emit(TakesLeases(window(limits.max_num_seqs)))
        return pipeline, limits

    def _may_store(self) -> None:
        """Wait until the model's digests are durable. Raises DriftError if an adapter has changed since the start."""
        self._is_identified.wait()
        self._adapters.check()

    def listen(self, heard: list[Command]) -> None:
        """Obey the coordinator; abandon all when it is gone. Runs on its own thread.

        heard: commands that came with `Launch`.
        """
        try:
            for message in heard:
                self._obey(message)
            self._listen()
        except BaseException:
            # Without this thread, the process would never receive the command to end.
            try:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                self._abandon()

    def _listen(self) -> None:
        sent_at, sent = time.monotonic(), None
        while True:
            messages = self._port.receive(min(_PROGRESS_S / 4, self._progress_s))
            if self._port.is_closed:
                self._abandon()
                return
            for message in messages:
                self._obey(message)
            since_s = time.monotonic() - sent_at
            if self._worker is None or since_s < self._progress_s:
                continue
            progress = self._worker.progress()
            if since_s >= _PROGRESS_S or sent is None or _says_more(progress, sent):
                self._port.send(progress)
                sent_at, sent = time.monotonic(), progress

    def _obey(self, message: Command) -> None:
        with self._lock:
            match message:
                case Work():
                    self._work = message
                    if self._starts_engine:
                        threading.Thread(target=self._open, args=(message,), name="open", daemon=True).start()
                case Stop():
                    self._stop = message
                    if self._worker is not None:
                        self._worker.stop(message.drain_s)
                    self._may_run.set()
                case Begin():
                    assert self._worker is not None, "`Begin` comes after `Ready`"
                    self._worker.begin()
                    self._may_run.set()
                case Identified():
                    self._is_identified.set()
                case _:
                    if isinstance(message, Assign):
                        self._progress_s = message.progress_s
                    assert self._feeder is not None, "leases come after `TakesLeases`"
                    _give(self._feeder, message)


def _give(feeder: Feeder, message: Assign | Trial | Revoke) -> None:
    match message:
        case Assign():
            feeder.assign(message)
        case Trial():
            feeder.try_rows(message)
        case Revoke(leases):
            feeder.revoke(leases)


def _says_more(progress: Progress, before: Progress) -> bool:
    """Whether the engine has finished or begun rows since, so that it may have room for more."""
    old, new = before.engine, progress.engine
    moved = (old.num_running, old.num_waiting) != (new.num_running, new.num_waiting)
    finished = (before.num_rows + before.num_unstored, progress.num_rows + progress.num_unstored)
    return moved or finished[0] != finished[1]


def last_words(error: BaseException) -> Failed:
    """The last message of a replica: the exception that ended it."""
    if isinstance(error, BatchinfError):
        was_killed = isinstance(error, EngineDeadError) and error.was_killed
        return Failed(type(error).__name__, str(error), error.exit_code, was_killed)
    if (words := out_of_memory_message(error)) is not None:
        return Failed(type(error).__name__, words, UserError.exit_code)
    if isinstance(error, OSError) and error.errno in LASTING:
        return Failed(DISK_ERROR, disk_error(error), OutputError.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        return Failed(type(error).__name__, disk_error(error), 1)
    return Failed(type(error).__name__, f"{type(error).__name__}: {error}", 1)
