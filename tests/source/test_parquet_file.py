import contextlib
import datetime
import pathlib
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from inputs import peaks

from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.formats import parquet
from batchinf.source.rows import open_source


def test_changed_parquet_changes_the_fingerprint(tmp_path: pathlib.Path) -> None:
    found = []
    for i, prompt in enumerate(["a", "b"]):
        pq.write_table(pa.table({"x": [prompt] * 100}), tmp_path / "x.parquet")
        found.append(open_source(InputLocation(str(tmp_path / "x.parquet")), tmp_path / str(i)))
        found[-1].close()
    assert found[0].fingerprint != found[1].fingerprint


def test_a_name_with_a_dot_beside_a_struct(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [{"b": "inside", "c": 1}], "a.b": ["beside"], "p": ["x"]}), path)
    with contextlib.closing(open_source(InputLocation(str(path)), tmp_path / "cache")) as source:
        for columns in (["a.b", "p"], ["a", "p"], ["a", "a.b"]):  # the reader keeps what it has read
            [row] = source.read_columns(0, 1, columns).to_pylist()
            assert row == {name: {"a": {"b": "inside", "c": 1}, "a.b": "beside", "p": "x"}[name] for name in columns}


@pytest.mark.parametrize("group_rows", [2, 30_000], ids=["read directly", "spooled"])
def test_times_in_96_bits_keep_their_year(group_rows: int, tmp_path: pathlib.Path) -> None:
    """Spark, Hive and Impala write them. As nanoseconds, the end of time would be the year 1816."""
    times = [
        datetime.datetime(9999, 12, 31),
        datetime.datetime(1, 1, 1),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 456789),
    ]
    times += [times[2]] * (group_rows if group_rows > parquet.GROUP_ROWS else 0)
    table = pa.table({"t": pa.array(times, pa.timestamp("us")), "l": pa.array([[t] for t in times])})
    pq.write_table(table, tmp_path / "x.parquet", group_rows, use_deprecated_int96_timestamps=True)
    location = InputLocation(str(tmp_path / "x.parquet"))
    for _ in range(2):  # the second time, by what the cache has of it
        with contextlib.closing(open_source(location, tmp_path / "cache")) as source:
            assert [row["t"] for row in source.read_columns(0, 3, ["t"]).to_pylist()] == times[:3]
            assert [row.values for row in source.read(1, 3)] == [{"t": t, "l": [t]} for t in times[1:3]]
            assert [*source.remarks] == ["INT96 timestamps (t, l) are read to the microsecond"]


@pytest.mark.parametrize(
    ("num_rows", "num_chars", "is_repeated", "group_rows", "num_read"),
    [
        # One row group of 1 million rows, spooled.
        pytest.param(1_000_000, 300, False, 20_000, 1000, marks=pytest.mark.slow),
        (12_000, 25_000, True, 20_000, 10),  # one value in all rows of a group that is read directly
        pytest.param(1000, 300_000, True, 100, 10, marks=pytest.mark.slow),  # the same, spooled
    ],
)
def test_memory_for_one_huge_row_group(
    num_rows: int, num_chars: int, is_repeated: bool, group_rows: int, num_read: int, tmp_path: pathlib.Path
) -> None:
    width = pa.array(["x" * num_chars if is_repeated else "x" * (num_chars - 7)])
    texts = width.take(pa.array([0] * num_rows, pa.int32()))
    if not is_repeated:
        texts = pc.binary_join_element_wise(texts, pa.array([f"{i:07d}" for i in range(num_rows)]), "")
    assert texts.nbytes >= 300_000_000
    rows = pa.table({"id": range(num_rows), "text": texts})
    compression = "snappy" if is_repeated else "none"
    pq.write_table(rows, tmp_path / "x.parquet", num_rows, use_dictionary=is_repeated, compression=compression)
    for bound in (90, 20):  # MiB: of the first pass, and of opening again
        first_pass, with_rows, *found = peaks(tmp_path / "x.parquet", tmp_path / "cache", group_rows, num_read)
        assert found == [num_read, num_rows - 1]
        assert first_pass < bound
        assert with_rows < bound + 50


@pytest.mark.parametrize("is_dictionary", [False, True])
@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), [3, 3, 0, 6, 2]], ids=["on", "back", "about"])
def test_a_column_that_is_wide_only_when_decoded_is_read_by_rows(
    order: Iterable[int], is_dictionary: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kB in the file are lists of long texts. Decoded at once they would take gigabytes."""
    monkeypatch.setattr(parquet, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 50_000)
    texts = ["x" * 10_000, "y" * 9_000]
    lists = [[texts[i % 2]] * (i % 4 + 1) for i in range(14)]
    type = pa.list_(pa.dictionary(pa.int32(), pa.string()) if is_dictionary else pa.string())
    few = pa.array([["a", str(i % 3)] for i in range(14)])
    table = pa.table({"docs": pa.array(lists).cast(type), "few": few, "id": range(14)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=7)
    decoded = list[int]()
    real = parquet.cast_column
    monkeypatch.setattr(parquet, "cast_column", lambda column, to: decoded.append(len(column)) or real(column, to))
    with contextlib.closing(open_source(InputLocation(str(tmp_path / "x.parquet")), tmp_path / "cache")) as source:
        for row in order:
            for start, stop in ((row, row + 1), (row + 4, row + 7)):
                read = source.read_columns(start, stop, ["id", "docs", "few"]).to_pylist()
                expected = [{"id": i, "docs": lists[i], "few": few[i].as_py()} for i in range(start, stop)]
                assert read == expected
                assert [row.values for row in source.read(start, stop)] == expected
    assert max(decoded) <= 5  # of 7 in a row group


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_times_that_lose_digits_are_named(ending: str, tmp_path: pathlib.Path) -> None:
    times = pa.array([3_723_000_000_005], pa.time64("ns"))
    table = pa.table(
        {"t": times, "l": pa.ListArray.from_arrays([0, 1], times), "u": times.cast(pa.time64("us"), safe=False)}
    )
    path = tmp_path / f"x.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    with contextlib.closing(open_source(InputLocation(str(path)), tmp_path / "cache")) as source:
        assert [*source.remarks] == ["times in nanoseconds (t, l) are read to the microsecond"]
        assert source.read(0, 1)[0].values["t"] == datetime.time(1, 2, 3)


def test_a_name_of_a_chunk_that_is_no_text_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    """pyarrow decodes the names of chunks, which repeat those of the schema, only when they are asked for."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"nested": [{"field": n} for n in range(9)]}), path, use_dictionary=False)
    before, name, after = path.read_bytes().rpartition(b"nested")
    path.write_bytes(before + b"\x97" + name[1:] + after)
    assert pq.read_schema(path).names == ["nested"]
    with pytest.raises(InputError, match=r"rows\.parquet"):
        open_source(InputLocation(str(path)), tmp_path / "cache")
