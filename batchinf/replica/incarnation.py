"""One incarnation of a replica: starts the engine, makes the pipeline around it, and obeys the coordinator.

For a retry, the engine may stay up: the same process is the next incarnation, with another pipeline around its engine.

A backend runs it, and gives it a port to the coordinator and memory for the record of requests in flight. The local
backend does so in `fleet/local/process.py`. The main thread starts the engine; another one opens the input and makes
the pipeline.
"""

import contextlib
import functools
import math
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, OutputError, UserError, out_of_memory_message
from batchinf.base.process import without_collection
from batchinf.base.storage import LASTING, Folder, disk_error
from batchinf.engines.installed import importing
from batchinf.engines.protocol import Engine
from batchinf.engines.scripted import ScriptedEngine, ScriptedPooling
from batchinf.job.open import location_of, open_job_input
from batchinf.job.repaired import repaired
from batchinf.manifest.names import retry_of
from batchinf.model.content import adapter_files, check_unchanged, stamps_of
from batchinf.prompts.encoder import load_tokenizer
from batchinf.replica.in_flight import InFlightRecord
from batchinf.replica.messages import (
    DISK_ERROR,
    STARTING_ENGINE,
    WAITING_FOR_INPUT,
    WARMING_UP,
    Assign,
    Command,
    Event,
    Failed,
    Launch,
    MayStore,
    Progress,
    Ready,
    Revoke,
    StartPhase,
    Stop,
    Stopped,
    Trial,
    Work,
)
from batchinf.replica.pipeline import Pipeline
from batchinf.replica.worker import Worker
from batchinf.schedule.positions import RunOrder
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

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
        self._in_flight = in_flight
        self._port = port
        self._abandon = abandon
        self._take(launch)
        self._folder = Folder(launch.folder)
        self._tokenizer: Any = None
        self._work: Work | None = None
        self._starts_engine = False
        num_forks = num_forks_of_vllm(math.prod(self._spec.parallel.sizes)) if self._spec.scripted is None else 0
        self._has_forked = fork_event(num_forks)
        self._worker: Worker | None = None
        self._progress_s = _PROGRESS_S
        self._is_gate_open = threading.Event()
        # vLLM loads an adapter again if it has more of them than fit into its memory.
        self._adapter_stamps = stamps_of(path for adapter in launch.adapters for path in adapter_files(adapter))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def _take(self, launch: Launch) -> None:
        self._launch = launch
        self._spec = JobSpec.model_validate_json(launch.spec)
        self._task = task_of(self._spec)  # its input is not fully known yet
        self._pipeline: Future[Pipeline] = Future()
        self._stop: Stop | None = None

    def run(self) -> None:
        """Start the engine, work until stopped, and send `Stopped`; then likewise for each `Launch` that follows."""
        began = time.monotonic()
        self._port.send(StartPhase("loading the tokenizer and opening the input", os.uname().nodename))
        with without_collection():
            self._tokenizer = load_tokenizer(self._launch.tokenizer_path, self._spec.model.trust_remote_code)
        with self._lock:
            work = self._work
            self._starts_engine = True
        if work is not None:
            self._open(work)
            self._pipeline.result()
        self._port.send(StartPhase(STARTING_ENGINE))
        engine = self._start_engine()
        self._has_forked.set()
        try:
            self._work_with(engine, began)
            while self._goes_on(engine):
                self._work_with(engine, time.monotonic())
        finally:
            with contextlib.suppress(Exception):
                engine.close()

    def _work_with(self, engine: Engine, began: float) -> None:
        """Work until stopped, and send `Stopped`. began: when this incarnation did, on the monotonic clock."""
        self._port.send(StartPhase(WARMING_UP, os.uname().nodename))
        engine.warm_up(self._task.warm_up_request())
        start_s = round(time.monotonic() - began, 3)
        if not self._pipeline.done():
            self._port.send(StartPhase(WAITING_FOR_INPUT))
        pipeline = self._pipeline.result()
        worker = pipeline.complete(engine, self._in_flight)
        with self._lock:
            self._worker = worker
            if self._stop is not None:
                worker.stop(self._stop.drain_s)
        self._port.send(Ready(engine.info, start_s))
        worker.run()
        if self._stop is not None and self._stop.keeps_engine:
            # It has no rows any more, so it ends at once. Its messages must not come after `Stopped`.
            worker.feeder.join()
            pipeline.source.close()
        with self._lock:
            self._worker = None
            self._port.send(worker.progress())
            # Before the engine ends, which may take seconds: nothing of the job depends on it any more.
            self._port.send(Stopped())

    def _goes_on(self, engine: Engine) -> bool:
        """Wait for another `Launch` if the engine stays up. Returns whether one came."""
        if engine.num_unfinished():
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._stop is None or not self._stop.keeps_engine)
            return self._stop is None

    def _start_engine(self) -> Engine:
        if self._spec.scripted is not None:
            return self._scripted_engine()
        launch = self._launch
        with importing(f"task {self._task.name}"):
            with without_collection():
                from batchinf.engines.vllm.engine import VllmEngine
            engine_class = VllmEngine
            if self._task.pooling is not None:
                from batchinf.engines.vllm.pooling import VllmPooling

                engine_class = VllmPooling
            return engine_class(
                self._task,
                launch.model_path,
                launch.tokenizer_path,
                revision=launch.revision,
                adapters=launch.adapters,
                ray_group=launch.ray_group,
            )

    def _scripted_engine(self) -> Engine:
        tokenizer = self._tokenizer
        assert self._spec.scripted is not None
        script = self._spec.scripted.model_copy(update={"max_model_len": scripted_length(self._spec)})
        if self._task.pooling is not None:
            return ScriptedPooling(self._task, script, len(tokenizer))
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        eos_token_id = getattr(tokenizer, "eos_token_id", None) or 0
        return ScriptedEngine(script, len(tokenizer), eos_token_id, encode=encode)

    def _open(self, work: Work) -> None:
        """Open the input and start the pipeline. If that fails, `run` raises the error when it needs the pipeline."""
        try:
            faults.point("replica.open")
            self._pipeline.set_result(self._start_pipeline(work))
        except BaseException as error:
            self._pipeline.set_exception(error)

    def _open_later(self, work: Work) -> None:
        self._has_forked.wait()
        self._open(work)

    def _start_pipeline(self, work: Work) -> Pipeline:
        spec = self._spec.model_copy(update={"input": InputSpec.model_validate_json(work.input)})
        source = open_job_input(spec, pathlib.Path(work.source_folder), work.taken, "ignore")
        given_rows = Pipeline.given_rows
        if work.repairs:
            source = repaired(source, self._folder, location_of(spec), work.repairs)
            if work.repairs[-1].number == retry_of(self._launch.incarnation):
                given_rows = source.newest_rows
        return Pipeline(
            task=work.columns.task(spec),
            source=source,
            tokenizer=self._tokenizer,
            folder=self._folder,
            incarnation=self._launch.incarnation,
            metadata=work.metadata,
            emit=self._port.send,
            order=RunOrder(self._folder, work.extents),
            begun_at=work.begun_at,
            may_store=self._may_store,
            columns=work.columns,
            given_rows=given_rows,
            retry=work.retry,
            has_forked=self._has_forked,
        )

    def _may_store(self) -> None:
        """Wait until the content gate is open. Raises DriftError if an adapter has changed since the start."""
        self._is_gate_open.wait()
        check_unchanged(self._adapter_stamps)

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
        sent: Progress | None = None
        sent_at = time.monotonic()
        while True:
            messages = self._port.receive(min(_PROGRESS_S / 4, self._progress_s))
            if self._port.is_closed:
                self._abandon()
                return
            for message in messages:
                self._obey(message)
            since_s = time.monotonic() - sent_at
            with self._lock:
                if self._worker is None or since_s < self._progress_s:
                    continue
                progress = self._worker.progress()
                if since_s >= _PROGRESS_S or sent is None or _says_more(progress, sent):
                    self._port.send(progress)
                    sent_at = time.monotonic()
                    sent = progress

    def _obey(self, message: Command) -> None:
        with self._changed:
            match message:
                case Launch():
                    faults.point("replica.again")
                    print(f"the engine stays up for incarnation {message.incarnation}", file=sys.stderr, flush=True)
                    self._take(message)
                    self._changed.notify_all()
                case Work():
                    self._work = message
                    if self._starts_engine:
                        threading.Thread(target=self._open_later, args=(message,), name="open", daemon=True).start()
                case Stop():
                    self._stop = message
                    self._changed.notify_all()
                    if self._worker is not None:
                        self._worker.stop(message.drain_s)
                case MayStore():
                    self._is_gate_open.set()
                case _:
                    self._pass_on(message)

    def _pass_on(self, message: Assign | Trial | Revoke) -> None:
        assert self._worker is not None, "leases come after `Ready`"
        feeder = self._worker.feeder
        match message:
            case Assign():
                self._progress_s = message.progress_s
                feeder.assign(message)
            case Trial():
                feeder.try_rows(message)
            case Revoke(leases):
                feeder.revoke(leases)


def _says_more(progress: Progress, before: Progress) -> bool:
    """Whether the engine has finished or begun rows since, so that it may have room for more."""

    def of(report: Progress) -> tuple[int, int, int]:
        return report.engine.num_running, report.engine.num_waiting, report.num_rows + report.num_unstored

    return of(progress) != of(before)


# -- vLLM's forks ------------------------------------------------------------------------------------------------------


def num_forks_of_vllm(num_devices: int) -> int:
    """How often vLLM will fork this process, by its environment variables.

    It forks its engine core. If the core is in this process, it forks the workers of several devices.
    """
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork") != "fork":
        return 0
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
        return 1
    return num_devices if num_devices > 1 else 0


def fork_event(num_forks: int) -> threading.Event:
    """Set once this process has been forked; if several forks are to come, the caller sets it after them.

    Threads that open the input and make the detokenizer while the engine starts wait for it. A child would keep the
    locks that these hold at the fork. num_forks: how many are to come.
    """
    event = threading.Event()
    to_set = [event] if num_forks == 1 else []

    def after_in_child() -> None:
        # If the child forks in turn: no thread waits there, and one may have held the event's lock at the fork.
        to_set.clear()
        # Tokenizers read it at each call. With "true" they would wait for threads that only the parent has.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def after_in_parent() -> None:
        for waited_for in to_set:
            waited_for.set()

    if num_forks == 0:
        event.set()
    else:
        os.register_at_fork(after_in_child=after_in_child, after_in_parent=after_in_parent)
    return event


def last_words(error: BaseException) -> Failed:
    """The last message of a replica: the exception that ended it."""
    if isinstance(error, BatchinfError):
        return Failed(type(error).__name__, str(error), error.exit_code)
    if (words := out_of_memory_message(error)) is not None:
        return Failed(type(error).__name__, words, UserError.exit_code)
    if isinstance(error, OSError) and error.errno in LASTING:
        return Failed(DISK_ERROR, disk_error(error), OutputError.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        return Failed(type(error).__name__, disk_error(error), 1)
    return Failed(type(error).__name__, f"{type(error).__name__}: {error}", 1)


def scripted_length(spec: JobSpec) -> int:
    """The `max_model_len` of a scripted engine."""
    length = spec.length_limit(None)
    assert length is not None, "the scripted engine has a length of its own"
    return length
