"""Gives staged parts their names in `parts/`. For the parts of a bucket, see `output.mirror`."""

from collections.abc import Sequence

from batchinf.base import faults
from batchinf.base.storage import Folder
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import part_name
from batchinf.records import Part


def publish(parts: Sequence[Part], folder: Folder, manifest: Manifest, lock: JobLock) -> None:
    """Give staged parts their published names. The manifest says before which committed parts they replace."""
    lock.check()
    announce(parts, manifest)
    for part in parts:
        faults.point("coordinator.before_publish")
        _publish(f"staging/{part.file}", f"parts/{part_name(part.shard)}", folder, lock)
        faults.point("coordinator.after_publish")
    if parts:
        folder.sync("parts")


def announce(parts: Sequence[Part], manifest: Manifest) -> None:
    """Record which parts will replace committed ones. After a crash, the next start finishes the replacements."""
    replacements = [part for part in parts if part.retry]
    for part in replacements:
        manifest.replacing(part)
    if replacements:
        faults.point("coordinator.before_replacing")
        manifest.commit()
        faults.point("coordinator.after_replacing")


def _publish(staged: str, published: str, folder: Folder, lock: JobLock) -> None:
    """Give a staged part its name. Only the lock's holder replaces a file: a process may have been paused for long."""
    lock.check()
    try:
        is_new = folder.publish_new(staged, published)
    except FileNotFoundError:
        lock.check()
        raise
    if not is_new:
        lock.check()
        folder.publish(staged, published, durable=False)
