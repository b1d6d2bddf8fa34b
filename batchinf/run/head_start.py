"""Starts replicas while the input is read, and lets the backend read the weights into memory. `epoch` uses it."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from batchinf.base import faults
from batchinf.base.errors import BatchinfError
from batchinf.base.stop_signals import shielded
from batchinf.base.storage import Folder
from batchinf.fleet.backend import Backend
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launcher import Launcher, note_end, note_started
from batchinf.job.open import location_of, new_job_id
from batchinf.manifest.lines import HEAD_START
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State, read_beginning
from batchinf.model.identity import Model
from batchinf.model.lora import Adapter
from batchinf.prompts.openai import may_be_batch
from batchinf.run.recovery import note_ended
from batchinf.source.files import InputLocation
from batchinf.source.find import find_files, is_dataset
from batchinf.source.remote import is_url
from batchinf.spec.job import JobSpec

# From these sizes on, reading the input takes long: a third of a second for 64 MiB of lines, and more if rows are
# chosen or ordered by their content. With less input, the user sees errors in it before replicas start.
_MANY_BYTES, _MANY_LOOKED_AT = 64 << 20, 8 << 20


class HeadStart:
    """A context for opening a job. When it ends, all replicas that it started have ended.

    launcher, fleet: of the replicas that were started early, or None. job_id: the new job's.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Folder,
        epoch: int,
        lock: JobLock,
        state: State | None,
        say: Callable[[str], None],
    ) -> None:
        """state: of a resumed job, whose replicas are not started early; None: a new job."""
        self._backend = backend
        self._folder, self._epoch, self._lock, self._state, self._say = folder, epoch, lock, state, say
        self._before = State() if state is not None else read_beginning(folder)
        self._manifest: Manifest | None = None
        self.job_id = self._before.job_id or new_job_id()
        self.launcher: Launcher | None = None
        self.fleet: Fleet | None = None

    def __enter__(self) -> Self:
        self._backend.end_leftovers(self._before.running_replicas, self._before.job_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Later errors, for example from a full disk, must not hide the first one.
        with contextlib.suppress(BatchinfError, OSError):
            self.end()
        if self._manifest is not None:
            with contextlib.suppress(OSError):
                self._manifest.close()

    def found(self, spec: JobSpec, model: Model, adapters: tuple[Adapter, ...]) -> None:
        """The callback `found` of `open_job`, before the input is read."""
        if spec.scripted is None:
            self._backend.read_ahead(model, spec.model.load_format)
        # Parts without a manifest are an error, which is raised later.
        if self._state is None and not self._folder.list("parts") and takes_long(spec) and is_known(spec):
            self._start(spec, model, adapters)

    def _start(self, spec: JobSpec, model: Model, adapters: tuple[Adapter, ...]) -> None:
        launcher = Launcher.of(self._backend, spec, model, adapters, self._folder, self._epoch, None, self._say)
        manifest = self.open_manifest()
        manifest.event(HEAD_START, job_id=self.job_id)
        # Replicas make files outside the job's folder with the id in their names. So the id is stored first.
        manifest.commit()
        self._say(f"starting {len(launcher.slots)} replica(s) while the input is read")
        with shielded():
            self.launcher, self.fleet = launcher, launcher.fleet(self.job_id)
            note_started(manifest, self._backend, self.fleet.start_due())
        faults.point("head_start.started")

    def open_manifest(self) -> Manifest:
        """The log of this epoch, which is created on the first call."""
        if self._manifest is None:
            self._manifest = Manifest(self._folder, self._epoch, self._lock, self._state)
            note_ended(self._before, None, self._manifest, self._lock.predecessor_seen_at)
        return self._manifest

    def end(self) -> None:
        """End replicas that still run. If there are any, uncommitted lines about the job are dropped."""
        if self.fleet is None or self._manifest is None:
            return
        with shielded():
            ended = self.fleet.kill()
            if ended:
                self._manifest.discard()
                for one in ended:
                    note_end(self._manifest, one)
                self._manifest.commit()


def takes_long(spec: JobSpec) -> bool:
    """Whether the input takes long to read, judged by its size."""
    location, given = location_of(spec), spec.input
    if is_url(location.path) or is_dataset(location):
        return True
    looks_at_rows = given.order != "input" or any(
        choice is not None for choice in (given.where, given.exclude, given.sample)
    )
    return _has_bytes(location, _MANY_LOOKED_AT if looks_at_rows else _MANY_BYTES)


def _has_bytes(location: InputLocation, num_bytes: int) -> bool:
    """Whether the input's files have more than `num_bytes` bytes in total."""
    try:
        for file in find_files(location)[1]:
            num_bytes -= file.stamp()[0]
            if num_bytes < 0:
                return True
    except (BatchinfError, OSError):
        pass  # the scan reports it
    return False


def is_known(spec: JobSpec) -> bool:
    """Whether the engine's arguments are known before the scan. With a reasoning parser they depend on the format."""
    return spec.model.reasoning_parser is None or not may_be_batch(spec.input)
