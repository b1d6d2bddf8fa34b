"""`--fresh`: a job's output folder is moved aside, never deleted, so that the job begins anew."""

import itertools
import os
import pathlib

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, reason, sync_folder
from batchinf.manifest.lock import LOCK, JobLock
from batchinf.manifest.state import last_epoch
from batchinf.run.progress import ProgressDisplay

# One of these, and there is a job, or what is left of one.
_SIGNS = ("manifest", "parts", "job.yaml")


def move_job_aside(path: str, display: ProgressDisplay) -> pathlib.Path | None:
    """Move the job in the folder `path` to the first free of `path.1`, `path.2`, ...; None if there is none.

    Durable when it returns. Raises OutputError while another process runs the job, or if the folder cannot be moved.
    """
    # Not a link to it: the job is to begin anew where it was, on the same disk.
    root = pathlib.Path(path).resolve()
    folder = Folder(root)
    if not any(folder.exists(name) for name in _SIGNS):
        if pathlib.Path(path).is_symlink():
            folder.make()
        return None
    with JobLock(folder).held(lambda: last_epoch(folder), display.say):
        aside = _rename(root)
        # It went along, and is of use to nobody there.
        Folder(aside).delete(LOCK)
    folder.make()
    display.say(f"moved the job in {path} to {aside}; it begins anew")
    return aside


def _rename(root: pathlib.Path) -> pathlib.Path:
    names = (root.with_name(f"{root.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
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
