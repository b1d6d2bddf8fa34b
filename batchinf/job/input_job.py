"""`input.job`: the output rows of another job as the input. Its manifest says which parts it has committed."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchinf.base.errors import InputError, SpecError
from batchinf.base.paths import is_bucket
from batchinf.base.slices import read_cut
from batchinf.base.storage import Folder
from batchinf.manifest.lines import InputJob
from batchinf.manifest.look import Look
from batchinf.manifest.names import published_file
from batchinf.manifest.state import State, read_jobs
from batchinf.records import Part
from batchinf.source.files import InputFile
from batchinf.source.find import folder_of
from batchinf.source.remote import objects_in
from batchinf.spec.input import InputSpec


def committed_parts(out: str, *, must_be_done: bool = True) -> list[InputFile]:
    """The committed parts of the job in a folder or a bucket, or of all its slices, in the order of their rows.

    must_be_done: raise SpecError unless all of its rows are done. Also raises InputError for a part that is gone.
    """
    files = []
    look = _look(out)
    for job, state in _jobs(look, must_be_done=must_be_done):
        slice_folder = "" if job.slice is None else f"{job.root.name}/"
        parts = {published_file(part): part for _, part in sorted(state.parts.items())}
        found = _found(look, job, parts)
        for name, part in parts.items():
            file = found.get(name)
            if file is None or (must_be_done and file.stamp()[0] != part.num_bytes):
                where = f"{look.named(job)}/{name}"
                raise InputError(f"{where} is gone or altered; run the job in {out} again, which makes it again")
            files.append(replace(file, name=f"{slice_folder}{name}"))
    return files


def _found(look: Look, job: Folder, parts: Mapping[str, Part]) -> dict[str, InputFile]:
    """Those of these parts of a job that are there, by name."""
    if look.is_bucket:
        return {f"parts/{file.name}": file for file in objects_in(f"{look.named(job)}/parts")} if parts else {}
    paths = {name: os.path.abspath(look.part(job, part)) for name, part in parts.items()}
    return {name: InputFile(name, path) for name, path in paths.items() if os.path.exists(path)}


def input_job(out: str) -> InputJob:
    """The job in a folder or a bucket, as it is now. Raises SpecError unless it is done."""
    jobs = _jobs(_look(out), must_be_done=True)
    first = jobs[0][1].header
    return InputJob(
        path=out,
        job_id=first.job_id,
        fingerprint=first.fingerprint,
        num_rows=sum(state.counts.num_rows for _, state in jobs),
        num_parts=sum(len(state.parts) for _, state in jobs),
        epoch=sum(state.last_epoch for _, state in jobs),
    )


def image_folder(where: InputSpec) -> str | None:
    """The folder in which relative paths of images begin; None if it is not on this host.

    Rows of another job have the paths of its input.
    """
    path = where.path
    job = where.job
    while job is not None:
        jobs = [] if is_bucket(job) else read_jobs(os.path.expanduser(job))
        begun = [state for _, state in jobs if state is not None]
        if not begun:
            return None
        header = begun[0].header
        if header.input_folder is not None:
            return header.input_folder
        of_job = header.spec["input"]
        path = str(of_job["path"])
        job = of_job.get("job")
    return folder_of(path)


def _look(out: str) -> Look:
    out = out if is_bucket(out) else os.path.expanduser(out)
    if not is_bucket(out) and not os.path.isdir(out):
        raise SpecError(f"input.job: {out} does not exist; must be the output folder of a job")
    return Look(out)


def _jobs(look: Look, *, must_be_done: bool) -> Sequence[tuple[Folder, State]]:
    """The job, or all its slices in row order, each with its state."""
    begun = look.begun()
    if not begun:
        raise SpecError(f"input.job: {look.nothing()}")
    cut = read_cut(look.root)
    num_missing = (1 if cut is None else cut.num_slices) - sum(state.is_done for _, state in begun)
    if must_be_done and num_missing:
        what = "it" if cut is None else f"{num_missing:,} of its {cut.num_slices:,} slices"
        raise SpecError(
            f"input.job: the job in {look.out} is not done, and its other rows would be missing: run {what} to the end "
            "first"
        )
    return begun
