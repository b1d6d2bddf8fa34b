"""Extents for tests, cut as in a job without a selection."""

from collections.abc import Sequence

from batchinf.schedule.shards import Extent, total_shards


def next_extent(extents: Sequence[Extent], num_rows: int, rows_per_shard: int) -> Extent:
    """The extent of the next `num_rows` rows after these extents."""
    last = extents[-1] if extents else extent_of_all(0, 0, 1, 0)
    first_shard = total_shards(extents)
    return extent_of_all(last.start + last.num_rows, num_rows, rows_per_shard, first_shard, last.stop_row)


def extent_of_all(
    start: int, num_rows: int, rows_per_shard: int, first_shard: int, first_row: int | None = None
) -> Extent:
    """All rows from `first_row` on, or, where it is None, from the position that is the same as the place."""
    first_row = start if first_row is None else first_row
    return Extent(start, num_rows, rows_per_shard, first_shard, first_row, first_row + num_rows)
