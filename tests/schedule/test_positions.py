"""Places, positions and their files: held against plain lists of rows."""

import pathlib
import random
import tempfile
from collections.abc import Sequence

import numpy as np
import pytest
from extents import extent_of_all, next_extent
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import open_jsonl

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.schedule.positions import (
    RETRY_FOLDER,
    Positions,
    RunOrder,
    ShardRows,
    positions_name,
    read_positions,
    write_positions,
)
from batchinf.schedule.shards import Extent, follows, shard_at, total_shards


def store(
    folder: Folder, number: int, rows: Sequence[int], stop_row: int = 1000, where: str = "selection"
) -> Positions:
    """Written in pieces of three."""
    pieces = (np.array(rows[start : start + 3], np.int64) for start in range(0, len(rows), 3))
    return write_positions(folder, number, pieces, stop_row, where=where)


def random_extents(folder: Folder, chance: random.Random) -> tuple[tuple[Extent, ...], list[int]]:
    """Some extents with and without a file, by position or not, and the positions at their places."""
    extents: list[Extent] = []
    rows: list[int] = []
    start, first_row = chance.choice([(0, 0), (7, 7), (3, 90)])
    for number in range(1, chance.randrange(2, 6)):
        stop_row = first_row + chance.randrange(1, 400)
        considered = range(first_row, stop_row)
        chosen, digest = list(considered), None
        if chance.random() < 0.7:
            chosen = sorted(chance.sample(considered, chance.randrange(len(considered) + 1)))
            if chance.random() < 0.5:
                chance.shuffle(chosen)
            digest = store(folder, number, chosen, stop_row).digest
        rows_per_shard = chance.randrange(1, 60)
        extent = Extent(start, len(chosen), rows_per_shard, total_shards(extents), first_row, stop_row, digest)
        assert follows(extents, extent)
        extents.append(extent)
        rows += chosen
        start, first_row = start + len(chosen), stop_row
    return tuple(extents), rows


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_run_order_is_a_list_of_positions(seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(scratch)
        extents, rows = random_extents(folder, chance)
        order, base = RunOrder(folder, extents), extents[0].start
        assert (len(order), list(order), order.is_whole) == (len(rows), rows, True)
        for _ in range(10):
            start, stop = sorted(chance.randrange(len(rows) + 1) for _ in range(2))
            assert order.rows(base + start, base + stop).tolist() == rows[start:stop] == order[start:stop]
            step = chance.randrange(1, 50)
            pieces = [piece.tolist() for piece in order.pieces(step, start, stop)]
            assert pieces == [rows[i : min(i + step, stop)] for i in range(start, stop, step)]
        for row in range(extents[0].first_row - 2, extents[-1].stop_row + 2):
            assert (row in order) == (row in rows)
        found = []
        for index, own in enumerate(order.shards()):
            shard = shard_at(extents, index)
            ran = rows[shard.start - base : shard.stop - base]
            assert own.at(own.to_run(0, len(own))).tolist() == ran
            middle = len(ran) // 2
            assert own.at(own.to_run(middle, len(own))).tolist() == ran[middle:]
            expected = sorted(ran)
            assert own.positions().tolist() == expected
            assert own.is_in_order == (ran == expected)
            assert (own.first, own.last, len(own)) == (expected[0], expected[-1], shard.num_rows)
            assert order.first_row(shard) == expected[0]
            assert [own.local(row) for row in expected] == list(range(len(expected)))
            least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
            around = np.array([least, *range(expected[0] - 3, expected[-1] + 4), most])
            places = [expected.index(row) if row in expected else -1 for row in around.tolist()]
            assert own.locals(around).tolist() == places
            assert [row in own for row in around.tolist()] == [place >= 0 for place in places]
            found += ran
        assert found == rows


def test_places_that_no_extent_has_are_refused(tmp_path: pathlib.Path) -> None:
    order = RunOrder(Folder(tmp_path), [extent_of_all(5, 10, 3, 0)])
    for start, stop in ((4, 6), (14, 16), (15, 16)):
        with pytest.raises(IndexError):
            order.rows(start, stop)
    assert (order[0], order[-1]) == (5, 14)
    for index in (10, -11):
        with pytest.raises(IndexError):
            order[index]


def test_rows_that_come_later_follow_in_places_and_in_the_source(tmp_path: pathlib.Path) -> None:
    first = Extent(0, 10, 4, 0, 0, 1000, "digest")
    second = next_extent([first], 50, 5)
    assert (second.start, second.first_row, second.stop_row, second.first_shard) == (10, 1000, 1050, 4)
    order = RunOrder(Folder(tmp_path), [first, second])
    assert order.of(shard_at(order.extents, 4)).positions().tolist() == [1000, 1001, 1002, 1003, 1004]
    assert not follows([first], extent_of_all(10, 50, 5, 4))


# -- files -------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ascending_positions_are_a_set_of_rows(seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(scratch)
        extents, rows = random_extents(folder, chance)
        chosen = set(chance.sample(rows, chance.randrange(len(rows) + 1)))
        stop_row = chance.choice([extents[-1].stop_row, 1 << 40])
        assert len(store(folder, 4, sorted(chosen), stop_row, RETRY_FOLDER)) == len(chosen)
        back = read_positions(folder, 4, where=RETRY_FOLDER)
        assert back is not None and back.stop_row == stop_row
        shards = list(RunOrder(folder, extents).shards())
        for own in shards:
            assert back.chosen(own).tolist() == [row in chosen for row in own.positions().tolist()]
        assert back.counts(shards).tolist() == [len(chosen & set(own.positions().tolist())) for own in shards]
        assert [row for piece in back.pieces(7) for row in piece.tolist()] == sorted(chosen)
        later = ShardRows(stop_row - 1, stop_row + 9)
        assert back.chosen(later).tolist() == [stop_row - 1 in chosen] + [False] * 9


@pytest.mark.parametrize("stop_row", [1000, 1 << 40])
def test_every_byte_of_the_file_is_guarded(stop_row: int, tmp_path: pathlib.Path) -> None:
    folder, name = Folder(tmp_path), positions_name(1)
    digest = store(folder, 1, [39, 3], stop_row).digest
    data = folder.read(name)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 4
        for other in (bytes(altered), data[:place], data + data[place:]):
            folder.write_atomic(name, other, durable=False)
            assert read_positions(folder, 1) is None
            assert read_positions(folder, 1, digest) is None
    folder.write_atomic(positions_name(2), data)
    assert read_positions(folder, 2) is None
    folder.write_atomic(name, data)
    found = read_positions(folder, 1, digest)
    assert found is not None and found.rows(0, 2).tolist() == [39, 3]
    assert read_positions(folder, 1, "another") is None
    # A retry's file is none of the job's.
    assert read_positions(folder, 1, digest, RETRY_FOLDER) is None


@pytest.mark.parametrize("change", ["gone", "another", "empty"])
def test_a_run_order_whose_file_is_gone_or_another_is_refused(change: str, tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)
    digest = store(folder, 1, [4, 2, 0, 1, 3]).digest
    extent = Extent(0, 5, 5, 0, 0, 5, digest)
    assert RunOrder(folder, [extent]).rows(1, 4).tolist() == [2, 0, 1]
    store(folder, 1, [0, 1, 2, 3, 4])
    if change == "gone":
        folder.delete(positions_name(1))
    elif change == "empty":
        folder.write_atomic(positions_name(1), b"")
    order = RunOrder(folder, [extent])
    assert not order.is_whole
    with pytest.raises(OutputError, match="gone or altered"):
        order.check()
    with pytest.raises(OutputError, match="gone or altered"):
        order.of(shard_at(order.extents, 0))


def test_a_file_that_is_not_finished_is_none(tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)

    def rows(error: type[BaseException]) -> object:
        yield np.array([1, 2])
        raise error

    before = store(folder, 1, [5, 6, 7]).digest
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error):
            write_positions(folder, 1, rows(error), 9)  # type: ignore[arg-type]
        assert read_positions(folder, 1, before) is not None
        assert [path.name for path in (tmp_path / "selection").iterdir()] == ["000001.positions"]


def test_more_rows_than_32_bits_count_keep_their_positions(tmp_path: pathlib.Path) -> None:
    far = 1 << 40
    stored = store(Folder(tmp_path), 1, [far, 3], far + 1)
    assert stored.rows(0, 2).tolist() == [far, 3]
    for stop_row, num_bytes in (((1 << 32) - 1, 4), (1 << 32, 8)):
        stored = store(Folder(tmp_path), 1, [stop_row - 1], stop_row)
        assert stored.rows(0, 1).tolist() == [stop_row - 1]
        assert stored.chosen(ShardRows(stop_row - 2, stop_row + 1)).tolist() == [False, True, False]
        assert (tmp_path / positions_name(1)).stat().st_size == 64 + num_bytes


# -- rows --------------------------------------------------------------------------------------------------------------


def test_sparse_rows_are_read_as_single_ones_are(tmp_path: pathlib.Path) -> None:
    source = open_jsonl(tmp_path, *[{"a": row, "b": f"text {row}"} for row in range(500)])
    chance = random.Random(3)
    for size in (0, 1, 2, 40, 400, 500):
        rows = np.array(sorted(chance.sample(range(500), size)), np.int64)
        assert [row.row_index for row in source.read_rows(rows, ["a"])] == rows.tolist()
        assert [row.values for row in source.read_rows(rows)] == [
            source.read(i, i + 1)[0].values for i in rows.tolist()
        ]
        assert source.fields_of(rows, [source.schema.field(name) for name in ("b", "a")]).to_pydict() == {
            "b": [f"text {row}" for row in rows], "a": rows.tolist()
        }  # fmt: skip
    source.close()


def test_consecutive_rows_need_no_list() -> None:
    rows = ShardRows.of(np.arange(10, 20))
    assert rows.is_consecutive
    assert (rows.first, rows.last, len(rows)) == (10, 19, 10)
    assert not ShardRows.of(np.array([10, 12])).is_consecutive


def test_all_rows_of_a_shard_may_be_consecutive_and_run_in_another_order() -> None:
    own = ShardRows.of(np.array([7, 5, 6]))
    assert own.is_consecutive and not own.is_in_order
    assert own.at(own.to_run(0, 3)).tolist() == [7, 5, 6]
    assert own.positions().tolist() == [5, 6, 7]
