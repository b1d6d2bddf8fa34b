"""Opens a job that has begun, for commands that make its prompts again, and finds its model: `head --row`, `verify`."""

import contextlib
import dataclasses
import glob
import os
import pathlib
import tempfile
from collections.abc import Iterator

from batchinf.base.errors import UserError
from batchinf.base.slices import SOURCE_FOLDER
from batchinf.base.storage import Folder
from batchinf.job.job import Job
from batchinf.job.open import location_of, open_job
from batchinf.job.repaired import repaired
from batchinf.manifest.state import State, read_jobs
from batchinf.manifest.versions import older_rules, rules_of
from batchinf.spec.file import SpecFile
from batchinf.spec.job import JobSpec


@contextlib.contextmanager
def open_begun(file: SpecFile, folder: str) -> Iterator[tuple[Job, State]]:
    """The job in `folder` (`Results.root`), all slices as one, and the state of the first slice that has begun."""
    state = next(state for _, state in read_jobs(folder) if state is not None)
    file = from_here(file, state.header.input_folder, folder)
    rules_note = older_rules(rules_of(state.header.spec))
    try:
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
            source = pathlib.Path(folder, SOURCE_FOLDER)
            job = open_job(file, source if source.is_dir() else pathlib.Path(scratch), state, "leave")
            job = dataclasses.replace(job, spec=_served_as(job.spec, state.header.spec["model"]["name"]))
            opened.enter_context(contextlib.closing(job.source))
            if retries := state.repairs():
                now = repaired(job.source, Folder(folder), location_of(job.spec), retries, state=state)
                opened.enter_context(contextlib.closing(now))
                job = dataclasses.replace(job, source=now)
            yield job, state
    except UserError as error:
        if not rules_note:
            raise
        raise type(error)(f"{error}; {rules_note}") from error


def from_here(file: SpecFile, input_folder: str | None, folder: str) -> SpecFile:
    """The spec with the relative paths of input and model as they are from the folder in which the job began.

    They stay as they are if nothing is there. input_folder: see `Header`. folder: the output folder.
    """
    spec = file.spec
    bases = [_base_of(spec.output.path, os.path.abspath(folder))]
    if input_folder is not None and spec.input.job is None:
        bases += [_base_of(path, input_folder) for path in (os.path.dirname(spec.input.path), spec.input.path)]
    for base in filter(None, bases):
        path = os.path.join(base, spec.input.path)
        name = os.path.join(base, spec.model.name)
        has_input = bool(glob.glob(path))
        has_model = os.path.isdir(name)
        if has_input or has_model:
            model = spec.model.model_copy(update={"name": name}) if has_model else spec.model
            where = spec.input.model_copy(update={"path": path}) if has_input else spec.input
            return dataclasses.replace(file, spec=spec.model_copy(update={"input": where, "model": model}))
    return file


def _served_as(spec: JobSpec, name: str) -> JobSpec:
    """The spec, in which lines of a batch file may give the model this name: that with which the job began."""
    served = spec.engine.get("served_model_name") or []
    names = [*([served] if isinstance(served, str) else served), name]
    return spec.model_copy(update={"engine": {**spec.engine, "served_model_name": names}})


def _base_of(path: str, there: str) -> str | None:
    """The folder from which a relative path leads to this place; None for another path."""
    tail = os.path.normpath(path or ".")
    if tail == ".":
        return there
    base = there.removesuffix(os.sep + tail)
    return base if base != there and not os.path.isabs(tail) else None
