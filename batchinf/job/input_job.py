"""`input.job`: the output rows of another job as the input. Its manifest says which parts it has committed."""

import os
from collections.abc import Sequence

from batchinf.base.errors import InputError, SpecError
from batchinf.base.slices import JobFolder, read_cut
from batchinf.manifest.lock import not_begun_message
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State, read_jobs
from batchinf.records import InputJob
from batchinf.source.files import InputFile
from batchinf.source.find import folder_of
from batchinf.spec.input import InputSpec


def committed_parts(out: str, *, must_be_done: bool = True) -> list[InputFile]:
    """The committed parts of the job in a folder, or of all its slices, in the order of their rows.

    must_be_done: raise SpecError unless all of its rows are done. Also raises InputError for a part that is gone.
    """
    files = []
    for job, state in _jobs(out, must_be_done=must_be_done):
        folder = "" if job.slice is None else f"{job.folder.root.name}/"
        for shard, part in sorted(state.parts.items()):
            name = f"parts/{part_name(shard)}"
            path = os.path.abspath(job.folder.path(name))
            if must_be_done and (not os.path.exists(path) or os.path.getsize(path) != part.num_bytes):
                raise InputError(f"{path} is gone or altered; run the job in {out} again, which makes it again")
            files.append(InputFile(f"{folder}{name}", path))
    return files


def input_job(out: str) -> InputJob:
    """The job in a folder, as it is now. Raises SpecError unless it is done."""
    jobs = _jobs(out, must_be_done=True)
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
        begun = [state for _, state in read_jobs(os.path.expanduser(job)) if state is not None]
        if not begun:
            return None
        of_job = begun[0].header.spec["input"]
        path = str(of_job["path"])
        job = of_job.get("job")
    return folder_of(path)


def _jobs(out: str, *, must_be_done: bool) -> Sequence[tuple[JobFolder, State]]:
    """The job in a folder, or all its slices in row order, each with its state."""
    out = os.path.expanduser(out)
    if not os.path.isdir(out):
        raise SpecError(f"input.job: {out} does not exist; must be the output folder of a job")
    jobs = [*read_jobs(out)]
    begun = [(job, state) for job, state in jobs if state is not None]
    if not begun:
        raise SpecError(f"input.job: {not_begun_message(out)}")
    cut = read_cut(out)
    num_missing = (1 if cut is None else cut.num_slices) - sum(state.is_done for _, state in begun)
    if must_be_done and num_missing:
        what = "it" if cut is None else f"{num_missing:,} of its {cut.num_slices:,} slices"
        raise SpecError(
            f"input.job: the job in {out} is not done, and its other rows would be missing: run {what} to the end first"
        )
    return begun
