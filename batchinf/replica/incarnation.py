"""One incarnation of a replica, in whatever a backend runs it: starts the engine and the pipeline, obeys commands.

A backend gives it a port to its coordinator and memory for the requests in flight. It knows of no process: the local
backend's entry point, which makes one around it, is `fleet/local/process.py`.
"""

import contextlib
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, EngineDeadError, OutputError
from batchinf.base.storage import LASTING, Folder, disk_error
from batchinf.engines.protocol import Engine
from batchinf.engines.scripted import ScriptedEngine, ScriptedPooling
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.replica.early_start import UNFORKED, EngineLimits, expected_limits, forks_engine_core, guard_forks
from batchinf.replica.feeder import Feeder
from batchinf.replica.messages import (
    DISK_ERROR,
    Assign,
    Begin,
    Command,
    Event,
    Failed,
    Launch,
    Ready,
    Revoke,
    StartPhase,
    Stop,
    Stopped,
    TakesShards,
    Trial,
    Work,
)
from batchinf.replica.pipeline import Front
from batchinf.replica.worker import InFlightRecord, Worker, window
from batchinf.schedule.selection import RunOrder
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_PROGRESS_S = 1.0


class Port(Protocol):
    """A replica's connection to its coordinator. Messages arrive in the order in which they were sent."""

    @property
    def is_closed(self) -> bool:
        """Whether the coordinator is gone, or wants nothing more of this incarnation."""

    def send(self, message: Event, /) -> None:
        """Send an event. May be called from any thread; does not raise if the coordinator is gone."""

    def receive(self, wait_s: float | None, /) -> list[Command]:
        """Commands that have come, after at most `wait_s` seconds. Called from one thread."""


class Incarnation:
    """Everything between the port and the engine.

    `run` starts the engine and works until it is stopped. `listen` runs on a thread of its own meanwhile.
    """

    def __init__(self, launch: Launch, port: Port, in_flight: InFlightRecord, abandon: Callable[[], object]) -> None:
        """abandon: end this incarnation at once, with all that it started; called when the coordinator is gone."""
        self._launch = launch
        self._in_flight = in_flight
        self._port = port
        self._abandon = abandon
        self._spec = JobSpec.model_validate_json(launch.spec)
        self._folder = Folder(launch.folder)
        self._tokenizer: Any = None
        self._work: Work | None = None
        self._starts_engine = False
        self._front: Future[tuple[Front, EngineLimits | None]] = Future()
        self._worker: Worker | None = None
        self._feeder: Feeder | None = None
        self._stop: Stop | None = None
        self._may_run = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Start the engine, work until stopped, say so."""
        started = time.monotonic()
        self._port.send(StartPhase("loading the tokenizer and opening the input"))
        self._tokenizer = load_tokenizer(self._launch.tokenizer_path, self._spec.model.trust_remote_code)
        guard_forks()
        with self._lock:
            work, self._starts_engine = self._work, True
        if work is not None:
            self._open(work)
            self._front.result()
        self._port.send(StartPhase("starting the engine"))
        engine = self._start_engine(self._tokenizer)
        try:
            self._port.send(StartPhase("compiling kernels for the job's shapes"))
            engine.warm_up(task_of(self._spec).warm_up_request())
            start_s = round(time.monotonic() - started, 3)
            if not self._front.done():
                self._port.send(StartPhase("waiting for the input"))
            front, limits = self._front.result()
            worker = front.complete(engine, limits, self._in_flight)
            with self._lock:
                self._worker = worker
                if self._stop is not None:
                    worker.stop(self._stop.drain_s)
            self._port.send(Ready(engine.info, start_s))
            self._may_run.wait()
            worker.run()
            self._port.send(worker.progress())
        finally:
            with contextlib.suppress(Exception):
                engine.close()
        self._port.send(Stopped())

    def _start_engine(self, tokenizer: object) -> Engine:
        task, script, launch = task_of(self._spec), self._spec.scripted, self._launch
        if script is not None:
            size = len(tokenizer)  # type: ignore[arg-type]
            if task.pooling is not None:
                return ScriptedPooling(task, script, size)
            return ScriptedEngine(script, size, getattr(tokenizer, "eos_token_id", None) or 0)
        if task.pooling is not None:
            from batchinf.engines.vllm.pooling import VllmPooling

            return VllmPooling(task, launch.model_path, launch.tokenizer_path, launch.revision, launch.adapters)
        from batchinf.engines.vllm.engine import VllmEngine

        return VllmEngine(task, launch.model_path, launch.tokenizer_path, launch.revision, launch.adapters)

    def _open(self, work: Work) -> None:
        """Open the input, and start what can be there before the engine; what fails is raised by who needs it."""
        try:
            # The engine may be starting by now, on another thread, and fork this process.
            with UNFORKED:
                faults.point("replica.open")
                self._front.set_result(self._start_front(work))
        except BaseException as error:
            self._front.set_exception(error)

    def _start_front(self, work: Work) -> tuple[Front, EngineLimits | None]:
        spec = self._spec.model_copy(update={"input": InputSpec.model_validate_json(work.input)})
        source = open_job_input(spec, pathlib.Path(work.source_folder), work.taken, "ignore")
        name, emit, order = self._launch.incarnation, self._port.send, RunOrder(self._folder, work.extents)
        task, tokenizer, metadata, begun_at = task_of(spec), self._tokenizer, work.metadata, work.begun_at
        front = Front(task, source, tokenizer, self._folder, name, metadata, emit, order, begun_at)
        self._feeder = front.feeder
        limits = expected_limits(spec, *self._launch.config_limits, tokenizer)
        if limits is not None:
            front.start_early(limits, after_fork=spec.scripted is None and forks_engine_core())
            emit(TakesShards(window(limits.max_num_seqs)))
        return front, limits

    def listen(self, heard: list[Command]) -> None:
        """Obey the coordinator; abandon all when it is gone. Runs on its own thread.

        heard: what it has said already, after `Launch`.
        """
        try:
            for message in heard:
                self._obey(message)
            self._listen()
        except BaseException:
            # Deaf, it would never hear that it has to end.
            try:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                self._abandon()

    def _listen(self) -> None:
        last_progress = time.monotonic()
        while True:
            messages = self._port.receive(_PROGRESS_S / 4)
            if self._port.is_closed:
                self._abandon()
                return
            for message in messages:
                self._obey(message)
            if self._worker is not None and time.monotonic() - last_progress >= _PROGRESS_S:
                self._port.send(self._worker.progress())
                last_progress = time.monotonic()

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
                    assert self._worker is not None, "who is told to begin is ready"
                    self._worker.begin()
                    self._may_run.set()
                case _:
                    assert self._feeder is not None, "shards come to who said that it takes them"
                    _give(self._feeder, message)


def _give(feeder: Feeder, message: Assign | Trial | Revoke) -> None:
    match message:
        case Assign():
            feeder.assign(message)
        case Trial():
            feeder.try_rows(message)
        case Revoke(shards):
            feeder.revoke(shards)


def last_words(error: BaseException) -> Failed:
    """What a replica says of the exception that ended it."""
    if isinstance(error, BatchinfError):
        was_killed = isinstance(error, EngineDeadError) and error.was_killed
        return Failed(type(error).__name__, str(error), error.exit_code, was_killed)
    if isinstance(error, OSError) and error.errno in LASTING:
        return Failed(DISK_ERROR, disk_error(error), OutputError.exit_code)
    if isinstance(error, OSError) and error.filename is not None:
        return Failed(type(error).__name__, disk_error(error), 1)
    return Failed(type(error).__name__, f"{type(error).__name__}: {error}", 1)
