"""Gives committed parts their names in `parts/`. For the parts of a bucket, see `output.mirror`."""

from collections.abc import Callable, Sequence

from batchinf.base import faults
from batchinf.base.storage import Folder
from batchinf.manifest.names import published_file, staged_file
from batchinf.records import Part


def publish(parts: Sequence[Part], folder: Folder, check_lock: Callable[[], object]) -> None:
    """Rename staged parts into `parts/`. Their lines are committed: after a crash, the next start renames them.

    check_lock: raises LockLost if another process has taken the job over. By the digest in its name, a process that was
    paused for long renames only what it has committed.
    """
    for part in parts:
        faults.point("coordinator.before_publish")
        check_lock()
        try:
            folder.publish(staged_file(part), published_file(part), durable=False)
        except FileNotFoundError:
            check_lock()
            raise
        faults.point("coordinator.after_publish")
    if parts:
        folder.sync("parts")
