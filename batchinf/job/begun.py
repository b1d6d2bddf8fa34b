"""Opens a job that has begun, for commands that make its prompts again: `head --row` and `verify`."""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from batchinf.base.slices import SOURCE_FOLDER
from batchinf.base.storage import Folder
from batchinf.job.job import Job
from batchinf.job.open import location_of, open_job
from batchinf.job.repaired import repaired
from batchinf.manifest.state import State, read_jobs
from batchinf.spec.file import SpecFile


@contextlib.contextmanager
def open_begun(file: SpecFile, folder: str) -> Iterator[tuple[Job, State]]:
    """The job in `folder` (`Results.root`), all slices as one, and the state of the first slice that has begun."""
    state = next(state for _, state in read_jobs(folder) if state is not None)
    with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(folder, SOURCE_FOLDER)
        job = open_job(file, source if source.is_dir() else pathlib.Path(scratch), state, "leave")
        with contextlib.closing(job.source):
            if not (retries := state.repairs()):
                yield job, state
                return
            now = repaired(job.source, Folder(folder), location_of(job.spec), retries, state=state)
            with contextlib.closing(now):
                yield dataclasses.replace(job, source=now), state
