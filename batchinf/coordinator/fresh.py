"""`--fresh`: makes all checks of the new job, and then moves the folder's job, or one slice of it, aside."""

import contextlib
import functools
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.slices import CUT_RECORD, SOURCE_FOLDER, is_slice_folder
from batchinf.base.storage import Folder, reason, sync_folder
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.retry import check_retry
from batchinf.coordinator.start import CHECKING
from batchinf.engines.installed import StructuresCheck
from batchinf.fleet.backend import Backend
from batchinf.fleet.launch import choose_engines
from batchinf.fleet.parallel import with_degrees
from batchinf.job.choose import choose
from batchinf.job.disk_space import check_size
from batchinf.job.drift import check_cut
from batchinf.job.job import PreparedJob
from batchinf.job.open import open_input
from batchinf.job.resolve import with_known_degrees
from batchinf.job.sample import refuse_hopeless
from batchinf.manifest.lines import StartedReplica
from batchinf.manifest.lock import LOCK, JobLock, await_free, live_holder
from batchinf.manifest.names import other_names, say_names
from batchinf.manifest.state import last_epoch, read_beginning
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.spec.file import SpecFile, retried_structures

# A folder with one of these holds a job or its remains.
_SIGNS = ("manifest", "parts", "job.yaml", CUT_RECORD)
# In the old job's folder: the scan of the new job's input. If it stays behind, the next `--fresh` deletes it.
_SCAN = ".tmp-fresh"


def move_job_aside(prepared: PreparedJob, backend: Backend, display: ProgressDisplay) -> None:
    """Move a job to the first free name of `OUT.1`, `OUT.2`, ..., if there is one and the new one can begin.

    A whole job begins anew in place of a whole job or of all slices, and a slice in place of itself. The move is
    durable on return. Raises UserError, and moves nothing, if the new job cannot begin, if another process runs a job
    in the folder, if it holds other files too, or if it cannot be moved.
    """
    file = prepared.file
    # Move the folder, not a link to it, so that the new job stays on the same disk.
    link = prepared.folder.root
    folder = Folder(link.resolve())
    folder.make()
    with JobLock(folder).held(lambda: last_epoch(folder), display.say):
        _sweep_moved(folder.root)
        # Only now: another process may have moved the job since.
        if not any(folder.exists(name) for name in _SIGNS):
            return
        # Slices that begin later see the lock of the whole folder.
        beside = _beside(file, folder)
        moved = [folder] if file.slice is not None else [folder, *beside]
        _refuse_others(link, moved)
        for other in beside:
            await_free(other, display.say)
        for old in moved:
            _end_leftovers(old, backend)
        try:
            _check_all(prepared, backend, folder=folder, display=display)
            aside = _rename(folder.root)
        finally:
            shutil.rmtree(folder.path(_SCAN), ignore_errors=True)
        try:
            folder.make()
            if (aside / _SCAN).exists():
                with contextlib.suppress(OSError):  # the start scans the input again
                    (aside / _SCAN).rename(folder.path(SOURCE_FOLDER))
                shutil.rmtree(aside / _SCAN, ignore_errors=True)
        finally:
            # The lock moved with the folder, and kept `_sweep_moved` of other processes away.
            Folder(aside).delete(LOCK)
    fetches = ", and fetches the images of URLs again" if (aside / IMAGES_FOLDER).exists() else ""
    display.say(f"moved the old job from {link} to {aside}; a new job starts{fetches}")


def _refuse_others(link: pathlib.Path, moved: list[Folder]) -> None:
    """Raise OutputError if the folder holds files that are not batchinf's: one rename would move them, too."""
    names = [os.path.relpath(old.path(name), moved[0].root) for old in moved for name in other_names(old)]
    if names:
        raise OutputError(
            f"--fresh: {link} holds files that are not the job's: {say_names(names)}; --fresh moves the whole folder, "
            "so move them out of it first, or give the new job another output.path"
        )


def _end_leftovers(folder: Folder, backend: Backend) -> None:
    """End the replicas that an old job's coordinator left running: they occupy devices and write into the folder."""
    with contextlib.suppress(OutputError):  # a damaged manifest names no replicas, and is moved aside too
        old = read_beginning(folder)
        backend.end_leftovers(old.of(StartedReplica), old.job_id)


def _sweep_moved(root: pathlib.Path) -> None:
    """Delete what processes left in folders that they had just moved aside when they were killed: scan and lock."""
    for moved in map(Folder, itertools.takewhile(os.path.lexists, _names(root))):
        if moved.exists(_SCAN) and live_holder(moved) is None:
            with contextlib.suppress(OutputError), JobLock(moved).held(lambda: 0):
                shutil.rmtree(moved.path(_SCAN), ignore_errors=True)


def _beside(file: SpecFile, folder: Folder) -> list[Folder]:
    """The other folders in which no job may run: for a whole job its slices, for a slice the whole job's folder."""
    if file.slice is not None:
        return [Folder(file.spec.output.path)]
    return [Folder(folder.path(name)) for name in folder.list("") if is_slice_folder(name)]


def _check_all(prepared: PreparedJob, backend: Backend, *, folder: Folder, display: ProgressDisplay) -> None:
    """Make the checks of a start that `run` has not made, and start nothing.

    A whole job scans its input into `_SCAN` of its folder, so that its start has the results.
    """
    prepared = with_known_degrees(prepared, functools.partial(with_degrees, backend=backend, say=display.say))
    choose_engines(replace(prepared, folder=folder), backend, say=display.say, by_rows=False)
    folder.sweep("")
    job = open_input(prepared, None if prepared.file.slice is not None else folder.path(_SCAN), display.say)
    with contextlib.closing(job.source):
        if job.slice is not None:
            check_cut(job)
        list(check_retry(job, None))
        files = [prepared.file, retried_structures(prepared.file)] if job.spec.scripted is None else []
        for spec_file in filter(None, files):
            with StructuresCheck(spec_file, job.model.tokenizer) as check:
                if not check.is_done:
                    display.say(CHECKING)
                list(check.lines())
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.root) as scratch:
            rows = range(job.source.num_rows)
            chosen = choose(job, rows, Folder(scratch), limit=job.spec.input.limit)
            refuse_hopeless(job, chosen, job.prompt_builder)
        check_size(job, len(chosen) if job.slice is None else len(job.slice.rows(len(chosen))))


def _names(root: pathlib.Path) -> Iterator[pathlib.Path]:
    # A slice's name must not match `slice-*`, by which readers find the parts of all slices.
    prefix = "old-" if is_slice_folder(root.name) else ""
    return (root.with_name(f"{prefix}{root.name}.{number}") for number in itertools.count(1))


def _rename(root: pathlib.Path) -> pathlib.Path:
    aside = next(name for name in _names(root) if not os.path.lexists(name))
    faults.point("fresh.before_rename")
    try:
        root.rename(aside)
        sync_folder(root.parent)
    except OSError as error:
        raise OutputError(
            f"cannot move {root} to {aside}: {reason(error)}; move it yourself, or give the job another output.path"
        ) from error
    faults.point("fresh.after_rename")
    return aside
