"""Places and positions: held against a plain list of the chosen rows."""

import pathlib
import random

import numpy as np
import pytest
from extents import extent_of_all, next_extent
from inputs import open_jsonl

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.records import Extent
from batchinf.schedule import selection as selections
from batchinf.schedule.selection import (
    RUN_FOLDER,
    Choice,
    RunOrder,
    Selection,
    ShardRows,
    read_selection,
    selection_name,
    write_selection,
)
from batchinf.schedule.shards import follows, shard_at, total_shards


def choose(folder: Folder, number: int, chosen: list[int], first_row: int, stop_row: int) -> str:
    selection = Selection(first_row, stop_row - first_row)
    selection.add(np.array(chosen, np.int64))
    assert selection.num_chosen == len(chosen)
    return write_selection(folder, number, selection, RUN_FOLDER)


def random_extents(folder: Folder, chance: random.Random) -> tuple[tuple[Extent, ...], list[int]]:
    """Some extents with and without a selection, and the positions at their places."""
    extents: list[Extent] = []
    rows: list[int] = []
    start, first_row = chance.choice([(0, 0), (7, 7), (3, 90)])
    for number in range(1, chance.randrange(2, 5)):
        stop_row = first_row + chance.randrange(1, 400)
        considered = range(first_row, stop_row)
        chosen = sorted(chance.sample(considered, chance.randrange(1, len(considered) + 1)))
        digest = None
        if chance.random() < 0.7:
            digest = choose(folder, number, chosen, first_row, stop_row)
        else:
            chosen = list(considered)
        choice = Choice(start, len(chosen), first_row, stop_row, digest)
        extent = choice.extent(chance.randrange(1, 60), total_shards(extents))
        assert follows(extents, extent)
        extents.append(extent)
        rows += chosen
        start, first_row = start + len(chosen), stop_row
    return tuple(extents), rows


@pytest.mark.parametrize("seed", range(40))
def test_places_are_those_of_a_list(seed: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selections, "_BLOCK_BYTES", 3)
    monkeypatch.setattr(selections, "_BLOCKS_AT_ONCE", 2)
    chance, folder = random.Random(seed), Folder(tmp_path)
    extents, rows = random_extents(folder, chance)
    order = RunOrder(folder, extents)
    assert order.num_places == len(rows)
    base = extents[0].start
    for extent in extents:
        for _ in range(5):
            start = chance.randrange(extent.start, extent.start + extent.num_rows + 1)
            stop = chance.randrange(start, extent.start + extent.num_rows + 1)
            if start == extent.start + extent.num_rows:
                continue
            assert order.rows(start, stop).tolist() == rows[start - base : stop - base]
    found = []
    for index, own in enumerate(order.shards()):
        shard = shard_at(extents, index)
        expected = rows[shard.start - base : shard.stop - base]
        assert own.positions().tolist() == expected
        assert (own.first, own.last, len(own)) == (expected[0], expected[-1], shard.num_rows)
        assert order.first_row(shard) == expected[0]
        assert [own.local(row) for row in expected] == list(range(len(expected)))
        around = np.arange(expected[0] - 3, expected[-1] + 4)
        places = [expected.index(row) if row in expected else -1 for row in around.tolist()]
        assert own.locals(around).tolist() == places
        assert [row in own for row in around.tolist()] == [place >= 0 for place in places]
        found += expected
    assert found == rows


def test_rows_that_come_later_follow_in_places_and_in_the_source(tmp_path: pathlib.Path) -> None:
    first = Choice(0, 10, 0, 1000, "digest").extent(4, 0)
    second = next_extent([first], 50, 5)
    assert (second.start, second.first_row, second.stop_row, second.first_shard) == (10, 1000, 1050, 4)
    order = RunOrder(Folder(tmp_path), [first, second])
    assert order.of(shard_at(order.extents, 4)).positions().tolist() == [1000, 1001, 1002, 1003, 1004]
    assert not follows([first], extent_of_all(10, 50, 5, 4))


@pytest.mark.parametrize("num_rows", [1, 8191, 8192, 8193, 50_000])
def test_counts_hold_at_the_edges_of_blocks(num_rows: int) -> None:
    whole = Selection(5, num_rows)
    whole.add(np.arange(5, 5 + num_rows))
    assert whole.num_chosen == num_rows
    assert whole.rows(0, num_rows).tolist() == list(range(5, 5 + num_rows))
    assert whole.rows(num_rows - 1, num_rows).tolist() == [4 + num_rows]
    last = Selection(5, num_rows)
    last.add(np.array([4 + num_rows]))
    assert last.rows(0, 1).tolist() == [4 + num_rows]
    with pytest.raises(IndexError):
        last.rows(1, 2)


def test_a_file_that_is_gone_or_another_is_refused(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)
    digest = choose(folder, 1, [3, 4, 9], 0, 12)
    extent = Extent(0, 3, 2, 0, 0, 12, digest)
    assert RunOrder(folder, [extent]).rows(0, 3).tolist() == [3, 4, 9]
    choose(folder, 1, [3, 4, 8], 0, 12)
    for _ in range(2):
        with pytest.raises(OutputError, match="gone or altered"):
            RunOrder(folder, [extent]).check()
        folder.delete(selection_name(1, RUN_FOLDER))
    assert choose(folder, 1, [3, 4, 9], 0, 12) == digest
    # A retry's file is none of the job's.
    assert read_selection(folder, 1, digest) is None


def test_sparse_rows_are_read_as_single_ones_are(tmp_path: pathlib.Path) -> None:
    source = open_jsonl(tmp_path, *[{"a": row, "b": f"text {row}"} for row in range(500)])
    chance = random.Random(3)
    for size in (0, 1, 2, 40, 400, 500):
        rows = np.array(sorted(chance.sample(range(500), size)), np.int64)
        assert [row.row_index for row in source.read_rows(rows, ["a"])] == rows.tolist()
        assert [row.values for row in source.read_rows(rows)] == [
            source.read(i, i + 1)[0].values for i in rows.tolist()
        ]
        assert source.columns_of(rows, ["b", "a"]).to_pydict() == {
            "b": [f"text {row}" for row in rows], "a": rows.tolist()
        }  # fmt: skip
    source.close()


def test_consecutive_rows_need_no_list() -> None:
    rows = ShardRows.of(np.arange(10, 20))
    assert rows.is_consecutive
    assert (rows.first, rows.last, len(rows)) == (10, 19, 10)
    assert not ShardRows.of(np.array([10, 12])).is_consecutive
