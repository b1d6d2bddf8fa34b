"""The process around a worker: processor cores, signals, messages, last words.

Started as `python -m batchinf.replica FD INCARNATION MEMORY` in a session of its own, with its standard output and
error going to its log, one end of a socket pair as FD and its flight record as MEMORY. It never outlives its
coordinator: when the channel closes, the whole process group ends, engine processes included (vLLM's would otherwise
keep the device's memory).
"""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any

from batchinf import __version__
from batchinf.base import faults
from batchinf.base.errors import BatchinfError, EngineDeadError, OutputError
from batchinf.base.storage import LASTING, Folder, disk_error
from batchinf.engines.protocol import Engine
from batchinf.engines.scripted import ScriptedEngine, ScriptedPooling
from batchinf.job.open import open_job_input
from batchinf.prompts.encoder import load_tokenizer
from batchinf.replica.channel import Channel
from batchinf.replica.feeder import Feeder
from batchinf.replica.flight import FlightRecord
from batchinf.replica.messages import (
    DISK_ERROR,
    Assign,
    Begin,
    Command,
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
from batchinf.replica.start import UNFORKED, Limits, expected_limits, forks_engine_core, guard_forks
from batchinf.replica.worker import Worker, window
from batchinf.schedule.order import RunOrder
from batchinf.spec.input import InputSpec
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_PROGRESS_S = 1.0


class Replica:
    """One incarnation of a replica: everything between the channel and the engine."""

    def __init__(self, launch: Launch, channel: Channel, flight: FlightRecord) -> None:
        self._launch = launch
        self._flight = flight
        self._channel = channel
        self._spec = JobSpec.model_validate_json(launch.spec)
        self._folder = Folder(launch.folder)
        self._tokenizer: Any = None
        self._work: Work | None = None
        self._starts_engine = False
        self._front: Future[tuple[Front, Limits | None]] = Future()
        self._worker: Worker | None = None
        self._feeder: Feeder | None = None
        self._stop: Stop | None = None
        self._may_run = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Start the engine, work until stopped, say so."""
        started = time.monotonic()
        self._channel.send(StartPhase("loading the tokenizer and opening the input"))
        self._tokenizer = load_tokenizer(self._launch.tokenizer_path, self._spec.model.trust_remote_code)
        guard_forks()
        with self._lock:
            work, self._starts_engine = self._work, True
        if work is not None:
            self._open(work)
            self._front.result()
        self._channel.send(StartPhase("starting the engine"))
        engine = self._start_engine(self._tokenizer)
        try:
            self._channel.send(StartPhase("compiling kernels for the job's shapes"))
            engine.warm_up(task_of(self._spec).warm_up_request())
            start_s = round(time.monotonic() - started, 3)
            if not self._front.done():
                self._channel.send(StartPhase("waiting for the input"))
            front, limits = self._front.result()
            worker = front.complete(engine, limits, self._flight)
            with self._lock:
                self._worker = worker
                if self._stop is not None:
                    worker.stop(self._stop.drain_s)
            self._channel.send(Ready(engine.info, start_s))
            self._may_run.wait()
            worker.run()
            self._channel.send(worker.progress())
        finally:
            with contextlib.suppress(Exception):
                engine.close()
        self._channel.send(Stopped())

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

    def _start_front(self, work: Work) -> tuple[Front, Limits | None]:
        spec = self._spec.model_copy(update={"input": InputSpec.model_validate_json(work.input)})
        source = open_job_input(spec, pathlib.Path(work.source_folder), work.taken, "ignore")
        name, emit, order = self._launch.incarnation, self._channel.send, RunOrder(self._folder, work.extents)
        task, tokenizer, metadata, begun_at = task_of(spec), self._tokenizer, work.metadata, work.begun_at
        front = Front(task, source, tokenizer, self._folder, name, metadata, emit, order, begun_at)
        self._feeder = front.feeder
        limits = expected_limits(spec, *self._launch.config_limits, tokenizer)
        if limits is not None:
            front.start_early(limits, after_fork=spec.scripted is None and forks_engine_core())
            emit(TakesShards(window(limits.max_num_seqs)))
        return front, limits

    def listen(self, heard: list[Command]) -> None:
        """Obey the coordinator; end the process group when it is gone. Runs on its own thread.

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
                end_group()

    def _listen(self) -> None:
        last_progress = time.monotonic()
        while True:
            messages = self._channel.receive(_PROGRESS_S / 4)
            if self._channel.is_closed:
                end_group()
            for message in messages:
                self._obey(message)
            if self._worker is not None and time.monotonic() - last_progress >= _PROGRESS_S:
                self._channel.send(self._worker.progress())
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


def end_group() -> None:
    """End this process and all that it started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


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


def main() -> None:
    """Entry point of the process."""
    # The coordinator decides when to stop and says so: signals to the whole tree must not cut a replica short.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    while not (messages := channel.receive(None)):
        if channel.is_closed:
            sys.exit("the coordinator ended before it said what to do")
    launch: Launch
    launch, *others = messages
    if launch.cpus:
        os.sched_setaffinity(0, launch.cpus)
    try:
        print(f"batchinf {__version__} replica {launch.replica} incarnation {launch.incarnation}", flush=True)
        replica = Replica(launch, channel, FlightRecord(int(sys.argv[3])))
        threading.Thread(target=replica.listen, args=(others,), name="control", daemon=True).start()
        faults.point("replica.start")
        replica.run()
    except BaseException as error:
        # Its log may lie on the disk that is full.
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        channel.send(last_words(error))
        sys.exit(1 if isinstance(error, EngineDeadError) else 2)


if __name__ == "__main__":
    main()
