import random

import numpy as np
import pytest
from extents import extent_of_all, next_extent
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinf.records import Shard
from batchinf.schedule.shards import (
    MAX_ROWS_PER_SHARD,
    PART_BYTES,
    SHARDS_PER_REPLICA,
    SMALL_SHARD_ROWS,
    Extent,
    choose_rows_per_shard,
    num_shards,
    rows_of_shards,
    shard_at,
    total_rows,
    total_shards,
)

cut = st.tuples(st.integers(0, 300), st.integers(1, 40))


def cut_by_hand(num_rows: int, rows_per_shard: int) -> list[range]:
    """The cuts of one extent, row by row."""
    spans: list[range] = []
    first_fine = num_rows - num_rows // 8
    for row in range(num_rows):
        most = rows_per_shard if row < first_fine else max(1, rows_per_shard // 4)
        if not spans or row == first_fine or len(spans[-1]) == most:
            spans.append(range(row, row + 1))
        else:
            spans[-1] = range(spans[-1].start, row + 1)
    return spans


def extents_of(cuts: list[tuple[int, int]]) -> tuple[Extent, ...]:
    extents: tuple[Extent, ...] = ()
    for num_rows, rows_per_shard in cuts:
        extents += (next_extent(extents, num_rows, rows_per_shard),)
    return extents


@given(cut)
def test_cuts_are_those_made_by_hand(cut: tuple[int, int]) -> None:
    extents = extents_of([cut])
    shards = [shard_at(extents, index) for index in range(num_shards(extents[0]))]
    assert [range(shard.start, shard.stop) for shard in shards] == cut_by_hand(*cut)
    assert [shard.index for shard in shards] == list(range(len(shards)))


@settings(deadline=None)
@given(st.lists(cut, min_size=1, max_size=5))
def test_extents_cover_every_row_once_and_never_move_a_cut(cuts: list[tuple[int, int]]) -> None:
    extents = extents_of(cuts)
    shards = [shard_at(extents, index) for index in range(total_shards(extents))]
    rows = [row for shard in shards for row in range(shard.start, shard.stop)]
    assert rows == list(range(sum(num_rows for num_rows, _ in cuts)))
    assert total_rows(extents) == len(rows)
    earlier = extents[:-1]
    assert [shard_at(earlier, index) for index in range(total_shards(earlier))] == shards[: total_shards(earlier)]


@given(st.lists(cut, min_size=1, max_size=4), st.randoms())
def test_rows_of_some_shards(cuts: list[tuple[int, int]], chance: random.Random) -> None:
    extents = extents_of(cuts)
    shards = [shard_at(extents, index) for index in range(total_shards(extents))]
    is_counted = np.array([chance.random() < 0.5 for _ in shards], np.bool_)
    expected = sum(shard.num_rows for shard in shards if is_counted[shard.index])
    assert rows_of_shards(extents, is_counted) == expected


@pytest.mark.parametrize("index", [-1, 6])
def test_no_shard_beyond_the_cuts(index: int) -> None:
    with pytest.raises(IndexError, match=f"got shard {index}; the job has 6"):
        shard_at(extents_of([(32, 8)]), index)


def test_a_hundred_million_rows_are_arithmetic() -> None:
    extents = extents_of([(100_000_000, 50_000), (1_000_000_000_000, 3)])
    last = total_shards(extents) - 1
    assert num_shards(extents[0]) == 1750 + 1000
    assert shard_at(extents, 1749) == Shard(1749, 87_450_000, 87_500_000)
    assert shard_at(extents, 1750) == Shard(1750, 87_500_000, 87_512_500)
    assert shard_at(extents, last).stop == 1_000_100_000_000


@given(st.integers(0, 10**9), st.integers(1, 64), st.floats(0, 1e9))
def test_chosen_rows_per_shard(num_rows: int, num_replicas: int, bytes_per_row: float) -> None:
    rows = choose_rows_per_shard(num_rows, num_replicas, bytes_per_row)
    assert 1 <= rows <= MAX_ROWS_PER_SHARD
    assert rows <= SMALL_SHARD_ROWS or rows * SHARDS_PER_REPLICA * num_replicas <= num_rows
    # Half of the replicas or more have work.
    assert 2 * num_shards(extent_of_all(0, num_rows, rows, 0)) >= min(num_rows, num_replicas)
    # No more than what makes 64 MiB, and less only for one of the bounds above.
    assert rows == 1 or (rows - 1) * bytes_per_row < PART_BYTES
    share = -(-(num_rows - num_rows // 8) // num_replicas)
    bounds = (MAX_ROWS_PER_SHARD, num_rows // (SHARDS_PER_REPLICA * num_replicas), SMALL_SHARD_ROWS, share, 1)
    assert rows * max(bytes_per_row, 1) >= PART_BYTES or rows in bounds


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "bytes_per_row", "expected"),
    [
        (657, 2, 6_500, 4), (657, 1, 6_500, 4), (35, 2, 100, 3), (1, 8, 100, 1), (657, 2, 300_000, 5),
        (12_000, 2, 6_500, 45), (100_000, 8, 6_500, 178),
    ],
)  # fmt: skip
def test_a_small_job_has_few_parts(num_rows: int, num_replicas: int, bytes_per_row: int, expected: int) -> None:
    rows = choose_rows_per_shard(num_rows, num_replicas, bytes_per_row)
    assert num_shards(extent_of_all(0, num_rows, rows, 0)) == expected
