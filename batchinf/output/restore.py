"""Gives a work folder what it lacks of the files in its job's bucket, or of the records that slices share."""

from collections.abc import Sequence
from functools import partial

from batchinf.base.bucket import Bucket, Object, together
from batchinf.base.slices import CUT_RECORD, FILES_RECORD
from batchinf.base.storage import Folder
from batchinf.manifest.events import EVENTS_FILE
from batchinf.manifest.state import State
from batchinf.schedule.positions import RETRY_FOLDER, RUN_FOLDER, positions_name, read_positions


def fetch_selection(bucket: Bucket, folder: Folder, state: State) -> set[str]:
    """Download the files of chosen rows that the folder lacks. Returns the names of all that the bucket has."""
    digests = {(RUN_FOLDER, number): extent.positions for number, extent in enumerate(state.extents, 1)}
    digests |= {(RETRY_FOLDER, number): retry.positions for number, retry in state.retries.items()}
    listed = names_in(bucket, (RUN_FOLDER, RETRY_FOLDER))
    folder.make(RUN_FOLDER, RETRY_FOLDER)

    def is_there(where: str, number: int) -> bool:
        digest = digests[where, number]
        return digest is None or read_positions(folder, number, digest, where) is not None

    for where, number in digests:
        name = positions_name(number, where)
        candidates = (each for each in listed if each.startswith(f"{name}-"))
        while not is_there(where, number) and (candidate := next(candidates, None)) is not None:
            bucket.download(candidate, folder.path(name))
    return {*listed}


def names_in(bucket: Bucket, folders: Sequence[str]) -> list[str]:
    """The names of all objects in these folders of the bucket."""
    listings = together(partial(bucket.sizes, folder) for folder in folders)
    return [f"{folder}/{name}" for folder, listing in zip(folders, listings, strict=True) for name in listing]


def restore_shared(bucket: Bucket, folder: Folder, *, is_alone: bool) -> None:
    """Make the records that all slices share those of the bucket.

    is_alone: the caller holds the whole folder, so that one which the bucket does not have is of an earlier job.
    """
    names = (CUT_RECORD, FILES_RECORD)
    for name, there in zip(names, bucket.get_all(names), strict=True):
        if there is not None:
            folder.make()
            folder.write_atomic(name, there.data)
        elif is_alone:
            folder.delete(name)


def restore_events(folder: Folder, found: Object | None) -> None:
    """Make the folder's events those of the bucket, unless they go on from these. found: in the bucket."""
    if found is not None and not (folder.exists(EVENTS_FILE) and folder.read(EVENTS_FILE).startswith(found.data)):
        folder.write_atomic(EVENTS_FILE, found.data, durable=False)
