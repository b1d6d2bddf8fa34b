"""A job's rows, some of which retries took from other files (`--input`). Replicas and `head --row` read them."""

import functools
from collections.abc import Iterable, Iterator

import numpy as np

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.lines import Repair, Retry
from batchinf.manifest.state import State
from batchinf.records import Int64Array
from batchinf.schedule.positions import REPAIR_FOLDERS, Positions, RunOrder, positions_name, read_positions
from batchinf.source.files import InputLocation
from batchinf.source.repairs import RepairedRows, RepairedSource, copied_file, copy_name, is_intact, open_copy
from batchinf.source.rows import Source


def repaired(
    source: Source, folder: Folder, where: InputLocation, retries: Iterable[Retry], *, state: State | None = None
) -> RepairedSource:
    """A further source of the same rows, with those that these retries took from files; the latest retry wins.

    where: the job's input. state: leaves out rows of parts that a retry has not replaced yet. Raises OutputError if a
    file of the repair is gone or altered.
    """
    repairs = []
    for retry in retries:
        if (repair := retry.repair) is None:
            continue
        rows, places = (_stored(folder, retry.number, repair, where) for where in REPAIR_FOLDERS)
        copy = open_copy(
            folder, repair.content, repair.name, where=where, schema=source.schema, taken=[repair.fingerprint]
        )
        behind = frozenset[int]() if state is None or state.is_done else _behind(folder, retry.number, state, rows)
        repairs.append(RepairedRows(copy, functools.partial(_find, rows, places, behind=behind)))
    return RepairedSource(source, repairs)


def lost_files(folder: Folder, retry: Retry) -> Iterator[str]:
    """The files of a repair that are gone or altered, by their names in the job's folder."""
    if (repair := retry.repair) is None:
        return
    if not is_intact(copied_file(folder, repair.content, repair.name), repair.content):
        yield copy_name(repair.content, repair.name)
    for where, digest in zip(REPAIR_FOLDERS, (repair.rows, repair.places), strict=True):
        if read_positions(folder, retry.number, digest, where) is None:
            yield positions_name(retry.number, where)


def _stored(folder: Folder, number: int, repair: Repair, where: str) -> Positions:
    digest = repair.rows if where == REPAIR_FOLDERS[0] else repair.places
    if (positions := read_positions(folder, number, digest, where)) is None:
        name = folder.path(positions_name(number, where))
        raise OutputError(f"{name} is gone or altered; it says which rows were repaired, so restore it from a backup")
    return positions


def _behind(folder: Folder, number: int, state: State, rows: Positions) -> frozenset[int]:
    """The repaired rows whose parts the retry has not replaced yet."""
    behind: set[int] = set()
    for shard, of_shard in enumerate(RunOrder(folder, state.extents).shards()):
        if shard not in state.parts or state.parts[shard].retry < number:
            span = rows.between(of_shard.first, of_shard.last + 1)
            stored = rows.rows(span.start, span.stop)
            behind.update(stored[of_shard.locals(stored) >= 0].tolist())
    return frozenset(behind)


def _find(
    rows: Positions, places: Positions, first: int, stop: int, *, behind: frozenset[int]
) -> tuple[Int64Array, Int64Array]:
    span = rows.between(first, stop)
    found = rows.rows(span.start, span.stop)
    in_copy = places.rows(span.start, span.stop)
    if behind:
        is_done = np.array([row not in behind for row in found.tolist()], np.bool_)
        return found[is_done], in_copy[is_done]
    return found, in_copy
