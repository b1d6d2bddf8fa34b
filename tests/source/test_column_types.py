import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import holds, open_jsonl

from batchinf.base.errors import InputError
from batchinf.source import files as input_files
from batchinf.source import types
from batchinf.source.files import InputLocation
from batchinf.source.formats import arrow, csv
from batchinf.source.rows import open_source
from batchinf.source.types import is_json_column


@pytest.mark.parametrize(
    ("values", "type"),
    [
        ([True, None, False], pa.bool_()),
        ([1, -(2**63), 2**63 - 1], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([2**53, 2.5], pa.float64()),
        ([2**53 + 1, 2.5], None),
        ([-(2**53) - 1, 2.5], None),
        ([[2**53 + 1], [2.5]], None),
        ([1, 2**63], None),
        ([1.5, -(2**63) - 1], None),
        ([1, True], None),
        (["a", 1], None),
        (["a", None], pa.string()),
        ([None, None], pa.string()),
        ([[1], [], [2.5, None]], pa.list_(pa.float64())),
        ([[], []], pa.list_(pa.string())),
        ([[1], ["a"]], None),
        ([[1], 1], None),
        ([{"a": 1}, {"b": "x"}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([{"a": 1}, {"a": "x"}], None),
        ([{}], None),
        ([{str(i): i for i in range(300)}], None),
        ([{"\ud800": 1}], None),
        ([[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]], None),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_column_types(
    values: list[object],
    type: pa.DataType | None,
    block: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_files, "BLOCK_BYTES", block)
    found = open_jsonl(tmp_path, *[{"x": value} for value in values], "broken", {"y": 1})
    field = found.schema.field("x")
    assert field.type == (type or pa.string())
    assert is_json_column(field) == (type is None)
    stored = found.read_columns(0, len(values), ["x"]).column("x").to_pylist()
    if type is None:
        own = [value if isinstance(value, str) else text and json.loads(text.replace("?", "\\ud800"))
               for text, value in zip(stored, values, strict=True)]  # fmt: skip
        assert own == values
    else:
        assert all(map(holds, stored, values))
    assert [row.values.get("x") for row in found.read(0, len(values))] == values
    found.close()


def test_types_are_settled_over_all_files(tmp_path: pathlib.Path) -> None:
    for name, value in [("a", 1), ("b", 2.5), ("c", None)]:
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"x": value, "y": value and name, "z": [name, value][name == "b"]})
        )
    found = open_source(InputLocation(str(tmp_path / "*.jsonl")), tmp_path / "cache")
    assert [is_json_column(field) for field in found.schema] == [False, False, True]
    assert found.read_columns(0, 3, ["x", "y", "z"]).to_pylist() == [
        {"x": 1.0, "y": "a", "z": "a"},
        {"x": 2.5, "y": "b", "z": "2.5"},
        {"x": None, "y": None, "z": "c"},
    ]
    found.close()


@pytest.mark.parametrize(
    ("cells", "type", "values"),
    [
        ("1 -2 0", pa.int64(), [1, -2, 0]),
        ("1 2.5 1e3", pa.float64(), [1.0, 2.5, 1000.0]),
        ("9223372036854775807 1", pa.int64(), [2**63 - 1, 1]),
        ("9223372036854775808 1", pa.string(), ["9223372036854775808", "1"]),
        ("9007199254740993 1.5", pa.string(), ["9007199254740993", "1.5"]),
        ("007 1", pa.string(), ["007", "1"]),
        ("-0 1", pa.float64(), [-0.0, 1.0]),
        ("1 _ 2", pa.int64(), [1, None, 2]),
        ("a _ 2", pa.string(), ["a", "", "2"]),
        ("_ _", pa.string(), ["", ""]),
        ("nan 1", pa.string(), ["nan", "1"]),
        ("1e400 1", pa.string(), ["1e400", "1"]),
        ("-1e400 0.5", pa.string(), ["-1e400", "0.5"]),
    ],
)
@pytest.mark.parametrize("batch_rows", [1, 1024])
def test_csv_types(
    cells: str,
    type: pa.DataType,
    values: list[object],
    batch_rows: int,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(csv, "BATCH_ROWS", batch_rows)
    monkeypatch.setattr(arrow, "BATCH_ROWS", batch_rows)
    (tmp_path / "x.csv").write_text("\ufeffk,x\r\n" + "".join(f"k,{cell.strip('_')}\r\n" for cell in cells.split()))
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    assert found.schema.field("x").type == type
    assert [row.values["x"] for row in found.read(0, found.num_rows)] == values
    assert found.read_columns(0, found.num_rows, ["x"]).column("x").to_pylist() == values
    found.close()


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_wide_integers_of_one_file_and_floats_of_another(ending: str, tmp_path: pathlib.Path) -> None:
    for name, value in (("a", 2**53 + 1), ("b", 0.5), ("c", 7)):
        line = json.dumps({"x": value}) if ending == "jsonl" else f"x\n{value}\n"
        (tmp_path / f"{name}.{ending}").write_text(line)
    found = open_source(InputLocation(str(tmp_path)), tmp_path / ".cache")
    assert found.read_columns(0, 3, ["x"]).column("x").to_pylist() == [str(2**53 + 1), "0.5", "7"]
    found.close()


def test_columns_beyond_a_bound_stay_in_the_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "MAX_COLUMNS", 3)
    found = open_jsonl(tmp_path, *[{f"x{i}": i} for i in range(5)])
    assert found.schema.names == ["x0", "x1", "x2"]
    assert found.read(4, 5)[0].values == {"x4": 4}
    with pytest.raises(KeyError):
        found.read_columns(0, 1, ["x4"])
    found.close()


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_named_column_is_found_wherever_it_stands(
    block: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "MAX_COLUMNS", 3)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", block)
    many = {f"x{i}": i for i in range(5)}
    own = [{"late": 1, "mixed": "a", "é": ["x"]}, {"late": 2.5, "mixed": 7}, {"late": None, "mixed": None, "é": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({**many, **row}) + "\n" for row in own))
    (tmp_path / "b.jsonl").write_text(json.dumps({"late": 3, "mixed": [1]}) + "\n")
    wanted = ["late", "mixed", "é"]
    for _ in range(2):  # from a scan, and from its results
        location = InputLocation(str(tmp_path), named=(*wanted, "none"))
        found = open_source(location, tmp_path / ".cache")
        assert set(found.schema.names) == {"x0", "x1", "x2", *wanted}
        assert found.read_columns(0, 4, wanted).to_pydict() == {
            "late": [1.0, 2.5, None, 3.0], "mixed": ["a", "7", None, "[1]"], "é": [["x"], None, None, None],
        }  # fmt: skip
        found.close()


def test_parquet_files_whose_types_do_not_meet(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"column 'x' is int64 in a\.parquet and string in b\.parquet"):
        open_source(InputLocation(str(tmp_path)), tmp_path / ".cache")


def test_parquet_files_whose_types_meet(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [2**60 + 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [0.5], "y": [b"b"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.nulls(1)}), tmp_path / "c.parquet")
    found = open_source(InputLocation(str(tmp_path)), tmp_path / ".cache")
    assert [row.values for row in found.read(0, 3)] == [{"x": 2**60 + 1}, {"x": 0.5, "y": b"b"}, {"x": None}]
    lost = dict[int, str]()
    table = found.read_columns(0, 3, ["y", "x"], lost)
    assert table.to_pydict() == {"y": [None, b"b", None], "x": [None, 0.5, None]}
    reason = (
        "a.parquet: column 'x' has 1152921504606846977 (int64), which double, the column's type over all files, cannot "
        "hold; write the files with one type"
    )
    assert lost == {0: reason}
    with pytest.raises(InputError, match=re.escape(reason)):
        found.read_columns(0, 3, ["x"])
    found.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.uint64(), pa.int64()),
        (pa.uint64(), pa.int8()),
        (pa.int64(), pa.decimal128(10, 2)),
        (pa.float64(), pa.decimal128(10, 2)),
        (pa.list_(pa.uint64()), pa.list_(pa.int64())),
        (pa.struct([("a", pa.uint64())]), pa.struct([("a", pa.int64())])),
    ],
)
def test_types_that_no_type_holds_together(first: pa.DataType, second: pa.DataType, tmp_path: pathlib.Path) -> None:
    for name, type in (("a", first), ("b", second)):
        with pa.ipc.new_file(tmp_path / f"{name}.arrow", pa.schema([("x", type)])) as writer:
            writer.write_table(pa.table({"x": pa.nulls(1, type)}))
    message = f"column 'x' is {first} in a.arrow and {second} in b.arrow; write the files with one type"
    with pytest.raises(InputError, match=re.escape(message)):
        open_source(InputLocation(str(tmp_path)), tmp_path / ".cache")


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_categories_as_polars_writes_them(make: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    categories = pa.array(["p", "q"], pa.string_view())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.uint32()), categories)
    table = pa.table({"kind": column})
    with make(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    source = open_source(InputLocation(str(tmp_path / "x.arrow")), tmp_path / "cache")
    assert [row.values["kind"] for row in source.read(0, 3)] == ["p", "q", None]
    assert source.read_columns(0, 3, ["kind"])["kind"].to_pylist() == ["p", "q", None]
