"""Recovers what an earlier epoch of the job left: accounts for its replicas, adopts its parts, sweeps its files.

Only files with names of our own pattern are touched. No row can be lost here: a part that is not adopted is run again.
"""

import contextlib
import functools
import shutil

from batchinf.base.storage import Folder, file_digest
from batchinf.fleet.status import JobStatus
from batchinf.job.job import Job
from batchinf.manifest.lock import LOCK, is_free
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import parse_part_name, parse_staging_name, part_name
from batchinf.manifest.state import State
from batchinf.output import journal
from batchinf.output.mirror import Mirror
from batchinf.output.parts import verify_part
from batchinf.output.proof import changed_parts, job_of
from batchinf.output.replace import replaces
from batchinf.prompts.url_cache import IMAGES_FOLDER
from batchinf.records import Part
from batchinf.schedule.positions import REPAIR_FOLDERS, RETRY_FOLDER, RUN_FOLDER, RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.source.repairs import REPAIRS_FOLDER, scan_folder
from batchinf.source.versions import VERSIONS_FOLDER

_IN_PROGRESS = ("staging", "journal")  # empty when the job is done
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

    Their end is the time when the coordinator was last seen: that of `status`, of its last event, or `seen_at` (seconds
    since 1970), whichever is latest.
    """
    starts = {event.fields["incarnation"]: event for event in state.events if event.name == "replica_started"}
    last_seen = max((event.time for event in state.events), default=0.0)
    last_seen = max(last_seen, seen_at, status.updated_at if status is not None else 0.0)
    for replica in state.running_replicas:
        device_s = 0.0
        if (start := starts.get(replica.incarnation)) is not None:
            num_devices = float(start.fields.get("num_devices", 1))
            device_s = round(max(0.0, last_seen - start.time) * num_devices, 1)
        cause = "its coordinator was killed"
        manifest.event("replica_ended", incarnation=replica.incarnation, device_s=device_s, cause=cause)


def recover(job: Job, state: State, manifest: Manifest, mirror: Mirror | None = None) -> tuple[list[int], list[int]]:
    """Make folder and manifest consistent. The caller commits the new lines of the manifest.

    mirror: of a job in a bucket, which holds the parts.
    Returns the indices of the shards whose parts were adopted, and of those whose parts were lost.
    """
    folder = job.folder
    _sweep(folder)
    if mirror is None:
        _settle(folder, state, manifest)
        lost = _check_parts(state, manifest, changed_parts(folder, state))
    else:
        judge_by(mirror, job, state)
        unknown = _settle_uploaded(state, manifest, mirror)
        lost = _check_parts(state, manifest, sorted({*unknown, *mirror.changed_parts(state)}))
    if mirror is None:
        adopted = [*_adopt(job, state, manifest, "parts"), *_adopt(job, state, manifest, "staging")]
    else:
        adopted = _adopt_uploaded(job, state, manifest, mirror)
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
    in_progress = folder.exists(IMAGES_FOLDER) or any(folder.list(name) for name in _IN_PROGRESS)
    return bool(in_progress or folder.list("", LOCK) or any(folder.half_written(name) for name in _own(folder)))


def tidy(folder: Folder) -> None:
    """Delete the temporary files of a finished job. The caller holds the job's lock."""
    _sweep(folder)
    for name in _IN_PROGRESS:
        shutil.rmtree(folder.path(name), ignore_errors=True)
        folder.make(name)
    shutil.rmtree(folder.path(IMAGES_FOLDER), ignore_errors=True)


def _check_parts(state: State, manifest: Manifest, lost: list[int]) -> list[int]:
    """Treat committed parts that are missing or exchanged as not committed, so that their shards run again."""
    for shard in lost:
        state.forget(shard)
    if lost:
        # This line must come before those of adopted parts, because the last line about a shard counts.
        manifest.event("lost", shards=lost)
    return lost


def _settle(folder: Folder, state: State, manifest: Manifest) -> None:
    """Finish replacements that a crash interrupted between the `replacing` line and the new part's line."""
    for shard, line in list(state.replacing.items()):
        name = f"parts/{part_name(shard)}"
        staged = f"staging/{line.file}"
        is_there = _digest(folder, name) == line.digest
        if not is_there and parse_staging_name(line.file) == shard and _digest(folder, staged) == line.digest:
            folder.publish(staged, name)
            is_there = True
        if is_there:
            manifest.part(line)
            state.note(line)
        else:
            # The new part is lost. The old one stays if it is whole, and the retry's rows run again.
            state.replacing.pop(shard)


def judge_by(mirror: Mirror, job: Job, state: State) -> None:
    """Let the mirror judge parts that it finds in the bucket by this state of the job."""
    mirror.judge = functools.partial(_whole, job, state)


def _settle_uploaded(state: State, manifest: Manifest, mirror: Mirror) -> list[int]:
    """The same for a job in a bucket. Returns the shards whose part there is neither the old nor the new one."""
    unknown = []
    for shard, line in list(state.replacing.items()):
        state.replacing.pop(shard)
        if (old := state.parts.get(shard)) is None:
            continue
        there = mirror.settle(old, line)
        if there is None:
            unknown.append(shard)
        elif there is not old:
            manifest.part(there)
            state.note(there)
            mirror.note_committed([there])
    return unknown


def _digest(folder: Folder, name: str) -> str | None:
    with contextlib.suppress(OSError):
        return file_digest(folder.path(name))
    return None


def _whole(job: Job, state: State, name: str, index: int) -> Part | None:
    """The record of a part without a manifest line, if it is whole and newer than the shard's committed part."""
    if index >= total_shards(state.extents):
        return None
    shard = shard_at(state.extents, index)
    rows = RunOrder(job.folder, state.extents).of(shard)
    part = verify_part(job.folder, name, shard, job.fingerprint, rows=rows)
    if part is None or job_of(job.folder, name) != state.header.job_id:
        return None
    if part.retry and part.retry not in state.retries:
        return None
    if index not in state.parts:
        return part
    is_next = part.retry > state.parts[index].retry
    old = f"parts/{part_name(index)}"
    return part if is_next and job.folder.exists(old) and replaces(job.folder, name, old) else None


def _adopt(job: Job, state: State, manifest: Manifest, where: str) -> list[int]:
    """Commit whole parts that the manifest does not name yet, and delete the others."""
    adopted = []
    for name in job.folder.list(where):
        index = parse_part_name(name) if where == "parts" else parse_staging_name(name)
        if index is None or (where == "parts" and index in state.parts):
            continue
        part = _whole(job, state, f"{where}/{name}", index)
        if part is None:
            job.folder.delete(f"{where}/{name}")
            continue
        if index in state.parts:
            manifest.replacing(part)
            manifest.commit()
        if where == "staging":
            job.folder.publish(f"staging/{name}", f"parts/{part_name(index)}")
        manifest.part(part)
        state.note(part)
        adopted.append(index)
    return adopted


def _adopt_uploaded(job: Job, state: State, manifest: Manifest, mirror: Mirror) -> list[int]:
    """Upload and commit whole staged parts that the manifest does not name yet, and delete their files.

    Those that the bucket had without a commit are staged, too.
    """
    adopted = []
    for name in job.folder.list("staging"):
        staged = f"staging/{name}"
        index = parse_staging_name(name)
        part = None if index is None or index in state.parts else _whole(job, state, staged, index)
        if part is not None and index is not None:
            part = mirror.put_part(part, staged)
            manifest.part(part)
            state.note(part)
            mirror.note_committed([part])
            adopted.append(index)
        if index is not None:
            job.folder.delete(staged)
    return adopted
