"""Recovers what an earlier epoch of the job left: accounts for its replicas, takes its parts in, sweeps its files.

Only files with names of our own pattern are touched, and no file in `parts/` is deleted. No row can be lost here: the
shard of a part that is not taken in runs again.
"""

import functools
import shutil

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, file_digest
from batchinf.coordinator.publishing import publish
from batchinf.fleet.status import JobStatus
from batchinf.job.job import Job
from batchinf.manifest.lines import EndedReplica, Lost, StartedReplica
from batchinf.manifest.lock import LOCK, is_free
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import PUSH_FOLDER, parse_part_name, parse_staging_name, staged_file
from batchinf.manifest.state import State
from batchinf.output import journal
from batchinf.output.mirror import Mirror
from batchinf.output.parts import stated_part
from batchinf.output.proof import changed_parts, is_newer, job_of
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.records import Part
from batchinf.schedule.positions import REPAIR_FOLDERS, RETRY_FOLDER, RUN_FOLDER, RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.source.repairs import REPAIRS_FOLDER, scan_folder
from batchinf.source.versions import VERSIONS_FOLDER

_IN_PROGRESS = ("staging", "journal")  # empty when the job is done
_UNTIL_DONE = (IMAGES_FOLDER, PUSH_FOLDER)
_OWN = (
    "",
    "parts",
    *_IN_PROGRESS,
    "manifest",
    RETRY_FOLDER,
    RUN_FOLDER,
    REPAIRS_FOLDER,
    *REPAIR_FOLDERS,
)


def note_ended(state: State, status: JobStatus | None, manifest: Manifest, seen_at: float = 0.0) -> None:
    """Record in the manifest that replicas of a killed coordinator have ended, with their device time.

    Their end is the time when the coordinator was last seen: that of `status`, or `seen_at` (seconds since 1970),
    whichever is later.
    """
    last_seen = max(seen_at, status.updated_at if status is not None else 0.0)
    for replica in state.of(StartedReplica):
        lifetime_s = 0.0 if replica.started_at is None else max(0.0, last_seen - replica.started_at)
        device_s = round(lifetime_s * replica.num_devices, 1)
        cause = "its coordinator was killed"
        manifest.record(EndedReplica(replica.incarnation, device_s, bool(replica.devices)))
        manifest.event("replica_ended", incarnation=replica.incarnation, device_s=device_s, cause=cause)


def recover(job: Job, state: State, manifest: Manifest, mirror: Mirror | None = None) -> tuple[list[int], list[int]]:
    """Make folder and manifest consistent. The caller commits the new lines of the manifest.

    mirror: of a job in a bucket, which holds the parts.
    Returns the indices of the shards whose staged parts were taken in, and of those whose parts were lost. Raises
    OutputError if the manifest is older than the parts.
    """
    folder = job.folder
    _sweep(folder)
    adopted, lost = (
        _recover_folder(job, state, manifest) if mirror is None else _recover_bucket(job, state, manifest, mirror)
    )
    closed = (
        shard
        for shard in journal.list_shards(folder)
        if shard >= total_shards(state.extents) or (shard < len(state.committed) and state.committed[shard])
    )
    # Keeps the segments of a retry whose new part has not replaced the shard's part yet.
    journal.drop(folder, {shard: state.parts[shard].retry if shard in state.parts else None for shard in closed})
    return adopted, lost


def _sweep(folder: Folder) -> None:
    for name in _own(folder):
        folder.sweep(name)


def _own(folder: Folder) -> list[str]:
    """The folders in which a killed process may have left half of a file."""
    copies = [f"{REPAIRS_FOLDER}/{name}" for name in folder.list(REPAIRS_FOLDER)]
    scans = ["source", *(scan_folder(copy) for copy in copies)]
    return [*_OWN, *copies, *scans, *(f"{scan}/{VERSIONS_FOLDER}" for scan in scans)]


def has_leftovers(folder: Folder) -> bool:
    """Whether killed processes left files in the folder of a finished job. False while a process may hold the job.

    Each moment of a process that takes, holds or frees the lock leaves one of these files.
    """
    if not is_free(folder):
        return False
    in_progress = any(map(folder.exists, _UNTIL_DONE)) or any(folder.list(name) for name in _IN_PROGRESS)
    return bool(in_progress or folder.list("", LOCK) or any(folder.half_written(name) for name in _own(folder)))


def tidy(folder: Folder) -> None:
    """Delete the temporary files of a finished job. The caller holds the job's lock."""
    _sweep(folder)
    for name in _IN_PROGRESS:
        shutil.rmtree(folder.path(name), ignore_errors=True)
        folder.make(name)
    for name in _UNTIL_DONE:
        shutil.rmtree(folder.path(name), ignore_errors=True)


def _recover_folder(job: Job, state: State, manifest: Manifest) -> tuple[list[int], list[int]]:
    """See `recover`."""
    folder = job.folder
    staged = ((name, digest, state.parts.get(shard)) for name, shard, digest in _staged(folder))
    named = [(name, line) for name, digest, line in staged if line is not None and line.digest == digest]
    publish(
        [line for name, line in named if file_digest(folder.path(name)) == line.digest], folder, manifest.check_lock
    )
    lost = changed_parts(folder, state)
    _move_unknown(folder, state, {*lost})
    _forget(state, manifest, lost)
    adopted = []
    for name, shard, _ in _staged(folder):
        part = _whole(job, state, name, shard)
        if part is None:
            folder.delete(name)
            continue
        manifest.part(part)
        state.note(part)
        adopted.append(part)
    if adopted:
        manifest.commit()
        publish(adopted, folder, manifest.check_lock)
    return [part.shard for part in adopted], lost


def _recover_bucket(job: Job, state: State, manifest: Manifest, mirror: Mirror) -> tuple[list[int], list[int]]:
    """See `recover`. Uploads and commits whole staged parts; those that the bucket has without a commit are staged.

    A replacement that was uploaded without a commit is committed here if its size is another one, else by the retry.
    """
    judge_by(mirror, job, state)
    found = {shard: mirror.find_part(state.parts[shard]) for shard in mirror.changed_parts(state)}
    lost = [shard for shard, part in found.items() if part is None]
    adopted = [part for part in found.values() if part is not None]
    _forget(state, manifest, lost)
    for part in adopted:
        _commit_uploaded(part, state, manifest, mirror)
    for name, shard, _ in _staged(job.folder):
        staged = _whole(job, state, name, shard)
        there = None if staged is None else _uploaded(staged, state.parts.get(shard), mirror)
        if there is not None:
            adopted.append(there)
            _commit_uploaded(there, state, manifest, mirror)
        job.folder.delete(name)
    return [part.shard for part in adopted], lost


def _uploaded(part: Part, line: Part | None, mirror: Mirror) -> Part | None:
    """Upload a staged part. Returns the part that is there then; None if another file is there.

    line: the committed part of its shard, which it replaces.
    """
    there = None if line is None else mirror.find_part(line)
    if there is None and line is not None:
        return None
    return mirror.put_part(part) if there is line else there


def _commit_uploaded(part: Part, state: State, manifest: Manifest, mirror: Mirror) -> None:
    manifest.part(part)
    state.note(part)
    mirror.note_committed([part])


def _staged(folder: Folder) -> list[tuple[str, int, str]]:
    """The staged parts: file, shard and digest."""
    names = ((f"staging/{name}", parse_staging_name(name)) for name in folder.list("staging"))
    return [(name, *parsed) for name, parsed in names if parsed is not None]


def _move_unknown(folder: Folder, state: State, lost: set[int]) -> None:
    """Move files in the places of parts that are not those of the manifest to `damaged/`.

    lost: committed shards whose part is another file or none. Raises OutputError for a part of the job that is newer
    than the manifest.
    """
    for name in folder.list("parts"):
        shard = parse_part_name(name)
        if shard is None or (shard in state.parts and shard not in lost):
            continue
        if is_newer(folder, shard, state):
            first = "" if shard < total_shards(state.extents) else "run with --extend for its rows, and then "
            raise OutputError(
                f"{folder.path('parts')}/{name} is a part of this job that the manifest does not name: the manifest is "
                f"older, as in a backup; {first}`batchinf check {folder.root} --repair` takes such parts in"
            )
        folder.move_aside(f"parts/{name}")


def _forget(state: State, manifest: Manifest, lost: list[int]) -> None:
    """Treat committed parts that are missing or exchanged as not committed, so that their shards run again."""
    for shard in lost:
        state.forget(shard)
    if lost:
        # This line must come before those of adopted parts, because the last line about a shard counts.
        manifest.record(Lost(lost))


def judge_by(mirror: Mirror, job: Job, state: State) -> None:
    """Let the mirror judge parts that it finds in the bucket by this state of the job."""
    mirror.judge = functools.partial(_whole, job, state)


def _whole(job: Job, state: State, name: str, index: int) -> Part | None:
    """The record of a staged part without a line, if it is whole and newer than the shard's committed part."""
    if index >= total_shards(state.extents):
        return None
    shard = shard_at(state.extents, index)
    rows = RunOrder(job.folder, state.extents).of(shard)
    part = stated_part(job.folder, name, shard, job.fingerprint, rows=rows)
    if part is None or staged_file(part) != name or job_of(job.folder, name) != state.header.job_id:
        return None
    if part.retry and part.retry not in state.retries:
        return None
    line = state.parts.get(index)
    if line is None or (part.retry > line.retry and part.replaces == line.digest):
        return part
    return None
