"""Extents for tests, cut as in a job without a selection."""

from collections.abc import Sequence

from batchinf.records import Extent
from batchinf.schedule.shards import total_shards


def next_extent(extents: Sequence[Extent], num_rows: int, rows_per_shard: int) -> Extent:
    """The extent of the next `num_rows` rows after these extents."""
    last = extents[-1] if extents else Extent.of_all(0, 0, 1, 0)
    first_shard = total_shards(extents)
    return Extent.of_all(last.start + last.num_rows, num_rows, rows_per_shard, first_shard, last.stop_row)
