"""Cuts a job's rows into shards, each the rows of one file. Pure computation.

Everything is arithmetic over a few extents, so 100 million rows take no more memory than ten.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchinf.base.json_types import Count, JsonText, PositiveCount
from batchinf.records import Shard

PART_BYTES = 64 * 2**20
MAX_ROWS_PER_SHARD = 50_000
# Each replica gets at least this many shards while many rows are left.
SHARDS_PER_REPLICA = 16
# Smaller shards make many small files. Replicas share the rows of a shard, so they do not end a job sooner.
SMALL_SHARD_ROWS = 320


@dataclass(frozen=True, slots=True)
class Extent:
    """Rows that were taken in together, with their own cuts. Later rows make a new extent, so earlier cuts never move.

    The first seven eighths are cut every `rows_per_shard` rows, the last eighth every `rows_per_shard // 4`, so that
    replicas end together. The rows were chosen among the positions `first_row` to `stop_row` (exclusive) of the source.
    """

    start: Count
    """The first place in the run order."""
    num_rows: Count
    rows_per_shard: PositiveCount
    first_shard: Count
    """Index of the first shard."""
    first_row: Count
    stop_row: Count
    positions: JsonText | None = None
    """Digest of the file with the chosen rows in run order; None if all were chosen and run by position."""


def uncut(rows: range, start: int = 0) -> Extent:
    """All rows at these positions, from the place `start` on, before they are cut into shards of more than one row."""
    return Extent(start, len(rows), rows_per_shard=1, first_shard=0, first_row=rows.start, stop_row=rows.stop)


def follows(extents: Sequence[Extent], extent: Extent) -> bool:
    """Whether an extent may follow these. The first may begin anywhere, because a slice has only some of the rows."""
    if not extents:
        return extent.first_shard == 0
    last = extents[-1]
    expected = (last.start + last.num_rows, total_shards(extents), last.stop_row)
    return (extent.start, extent.first_shard, extent.first_row) == expected


def num_shards(extent: Extent) -> int:
    """Shards in one extent."""
    coarse_rows, fine = _cuts(extent)
    return _ceil_div(coarse_rows, extent.rows_per_shard) + _ceil_div(extent.num_rows - coarse_rows, fine)


def total_shards(extents: Sequence[Extent]) -> int:
    """Shards in all extents."""
    return extents[-1].first_shard + num_shards(extents[-1]) if extents else 0


def total_rows(extents: Sequence[Extent]) -> int:
    """Rows in all extents."""
    return sum(extent.num_rows for extent in extents)


def rows_of_shards(extents: Sequence[Extent], is_counted: npt.NDArray[np.bool_]) -> int:
    """Rows in the shards that count. is_counted: bool [total_shards]."""
    total = 0
    for extent in extents:
        coarse_rows, fine = _cuts(extent)
        first = extent.first_shard
        for num_rows, rows_per_shard in ((coarse_rows, extent.rows_per_shard), (extent.num_rows - coarse_rows, fine)):
            number = _ceil_div(num_rows, rows_per_shard)
            counted = is_counted[first : first + number]
            # All have the same size, except that the last one may be smaller.
            missing = number * rows_per_shard - num_rows if number and counted[-1] else 0
            total += int(np.count_nonzero(counted)) * rows_per_shard - missing
            first += number
    return total


def shard_at(extents: Sequence[Extent], index: int) -> Shard:
    """The shard of this index, counted over all extents. Raises IndexError if there is none."""
    if not 0 <= index < total_shards(extents):
        raise IndexError(f"got shard {index}; the job has {total_shards(extents)}")
    extent = extents[bisect.bisect_right(extents, index, key=lambda extent: extent.first_shard) - 1]
    start, stop = _span(extent, index - extent.first_shard)
    return Shard(index, extent.start + start, extent.start + stop)


def choose_rows_per_shard(num_rows: int, num_replicas: int, estimated_bytes_per_row: float) -> int:
    """Rows in a shard: for parts of 64 MiB or a little more, at most 50,000, and at least 16 shards for each replica.

    In a small job, a replica has fewer than 16 shards, and no shard has more than `SMALL_SHARD_ROWS` rows.
    """
    by_bytes = math.ceil(PART_BYTES / max(estimated_bytes_per_row, 1.0))
    by_replicas = num_rows // (SHARDS_PER_REPLICA * num_replicas)
    by_share = _ceil_div(num_rows - num_rows // 8, num_replicas)
    return max(1, min(by_bytes, MAX_ROWS_PER_SHARD, max(by_replicas, min(SMALL_SHARD_ROWS, by_share))))


def _cuts(extent: Extent) -> tuple[int, int]:
    # The number of rows that are cut into large shards, and the number of rows in a small shard.
    return extent.num_rows - extent.num_rows // 8, max(1, extent.rows_per_shard // 4)


def _span(extent: Extent, place: int) -> tuple[int, int]:
    coarse_rows, fine = _cuts(extent)
    num_coarse = _ceil_div(coarse_rows, extent.rows_per_shard)
    if place < num_coarse:
        start = place * extent.rows_per_shard
        return start, min(start + extent.rows_per_shard, coarse_rows)
    start = coarse_rows + (place - num_coarse) * fine
    return start, min(start + fine, extent.num_rows)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
