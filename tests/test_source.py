import csv
import gzip
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinf import source, spool
from batchinf.errors import InputError
from batchinf.source import InputLocation, Row, Source, open_source

Records = list[dict[str, object] | str]  # a string: part of the error
Make = Callable[[pathlib.Path], tuple[str, Records]]


def records(num_rows: int, seed: int = 0) -> list[dict[str, object]]:
    rng = random.Random(seed)
    words = ["a", "héllo", "日本", "two words", "😀", 'q"uote', "com,ma", "new\nline", ""]
    return [
        {
            "id": i,
            "prompt": " ".join(rng.choices(words, k=rng.randint(0, 9))),
            "score": rng.choice([0.5, -1.25, 3.0]),
            "is_odd": i % 2 == 1,
            "tags": rng.choices(words, k=i % 3),
            "meta": {"k": i, "v": rng.choice(words)},
        }
        for i in range(num_rows)
    ]


def jsonl_lines(rows: list[dict[str, object]]) -> tuple[bytes, Records]:
    """Lines with what goes wrong in real files among them."""
    lines, expected = [], Records()
    for i, row in enumerate(rows):
        line = json.dumps(row, ensure_ascii=i % 2 == 0).encode()
        lines.append(line + b"\r" * (i % 7 == 0))
        expected.append(row)
        if i % 10 == 3:
            lines += [b"", b"  \t", b"\r"]
        if i % 25 == 9:
            for broken, why in [
                (b'{"id": 1 "prompt": 2}', "not JSON: Expecting ',' delimiter at character 10"),
                (b'{"id": 1', "not JSON"),
                (b'{"id": 1} {"id": 2}', "not JSON: Extra data"),
                (b"[1, 2]", "not a JSON object but an array"),
                (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at byte 13"),
                (b"[" * 100_000, "not JSON: nested too deeply"),
                (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
            ]:
                lines.append(broken)
                expected.append(f"line {len(lines)}: {why}")
    return b"\n".join(lines), expected


def make_jsonl(folder: pathlib.Path) -> tuple[str, Records]:
    data, expected = jsonl_lines(records(300))
    (folder / "prompts.jsonl").write_bytes(data)
    return str(folder / "prompts.jsonl"), [f"prompts.jsonl {r}" if isinstance(r, str) else r for r in expected]


def make_jsonl_folder(folder: pathlib.Path) -> tuple[str, Records]:
    expected = Records()
    (folder / "README.md").write_text("not data")
    for name, pack, num_rows in [
        ("a.jsonl", bytes, 70),
        ("b.jsonl.gz", gzip.compress, 50),
        ("c/d.jsonl.zst", lambda data: pa.compress(data, "zstd", asbytes=True), 40),
        ("e.jsonl", lambda data: b"\xef\xbb\xbf" + data, 30),
        ("f.jsonl", lambda data: b"\n\n", 0),
    ]:
        data, some = jsonl_lines(records(num_rows, seed=num_rows))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pack(data))
        expected += [f"{name} {r}" if isinstance(r, str) else r for r in some]
    return str(folder), expected


def make_text(folder: pathlib.Path) -> tuple[str, Records]:
    lines = [b"first", b"", "日本 ".encode(), b"a\rb", b"bad \xff", b"x" * 3000] * 40
    (folder / "prompts.txt").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "q.txt.gz").write_bytes(gzip.compress(b"\r\n".join(lines)))
    expected = Records()
    for name in ("prompts.txt", "q.txt.gz"):
        for i, line in enumerate(lines):
            is_bad = b"\xff" in line
            expected.append(f"{name} line {i + 1}: not UTF-8" if is_bad else {"text": line.decode(errors="replace")})
    return str(folder / "*.t*"), expected


def make_csv(folder: pathlib.Path) -> tuple[str, Records]:
    expected = Records()
    rng = random.Random(1)
    for name, first in [("a.csv", 0), ("b.csv.gz", 1000)]:
        with (gzip.open if name.endswith("gz") else open)(folder / name, "wt", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", "prompt", "score", "code", "maybe"])
            line = 2
            for row in records(300, seed=first):
                code, maybe = f"{rng.randrange(1000):03d}", rng.choice([None, 7])
                writer.writerow([first + row["id"], row["prompt"], row["score"], code, maybe])
                expected.append(
                    {
                        "id": first + row["id"],
                        "prompt": row["prompt"],
                        "score": row["score"],
                        "code": code,
                        "maybe": maybe,
                    }
                )
                line += 1 + str(row["prompt"]).count("\n")
                if row["id"] % 40 == 7:
                    stream.write("\nonly,two\n")
                    expected.append(f"{name} line {line + 1}: 2 fields where the header has 5")
                    stream.write('1,"a"b,2,3,4\n')
                    expected.append(f"{name} line {line + 2}: not CSV")
                    line += 3
    return str(folder), expected


def table(num_rows: int, seed: int = 0) -> pa.Table:
    rows = pa.Table.from_pylist(records(num_rows, seed))
    kind = pa.array([f"kind {i % 3}" for i in range(num_rows)]).dictionary_encode()
    return rows.append_column("kind", kind).append_column("none", pa.nulls(num_rows))


def make_parquet(folder: pathlib.Path) -> tuple[str, Records]:
    first, second = table(300), table(200, seed=1).drop_columns("score")
    pq.write_table(first, folder / "a.parquet", row_group_size=70)
    pq.write_table(second, folder / "b.parquet", row_group_size=7)
    return str(folder), first.to_pylist() + second.to_pylist()


def make_arrow(folder: pathlib.Path) -> tuple[str, Records]:
    rows = table(500)
    with pa.ipc.new_file(folder / "a.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=33)
    with pa.ipc.new_stream(folder / "b.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=490)
    pyarrow.feather.write_feather(rows, folder / "c.feather", compression="lz4")
    return str(folder / "*.*"), rows.to_pylist() * 3


def make_saved(folder: pathlib.Path) -> tuple[str, Records]:
    rows = records(300)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=3)
    return str(folder / "saved"), list(rows)


def make_saved_dict(folder: pathlib.Path) -> tuple[str, Records]:
    splits = {"test": datasets.Dataset.from_list(records(5)), "train": datasets.Dataset.from_list(records(90, 1))}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return str(folder / "saved"), list(records(90, 1))


FORMATS: dict[str, Make] = {
    "jsonl": make_jsonl,
    "jsonl folder": make_jsonl_folder,
    "text": make_text,
    "csv": make_csv,
    "parquet": make_parquet,
    "arrow": make_arrow,
    "saved": make_saved,
    "saved dict": make_saved_dict,
}
FILES = sorted(FORMATS.keys() - {"saved", "saved dict"})


@pytest.fixture(params=["small spools", "as it is"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with limits so small that blocks, batches, row groups and held files all come into play."""
    if request.param == "small spools":
        monkeypatch.setattr(spool, "BLOCK_BYTES", 997)
        monkeypatch.setattr(spool, "BATCH_ROWS", 10)
        monkeypatch.setattr(spool, "GROUP_ROWS", 60)
        monkeypatch.setattr(spool, "BATCH_BYTES", 500)
        monkeypatch.setattr(source, "OPEN_FILES", 1)


def check(found: Source, expected: Records) -> None:
    """`read` and `read_columns` of random ranges, against the whole in memory."""
    assert found.num_rows == len(expected)
    rng = random.Random(2)
    names = found.schema.names
    ranges = [(0, len(expected)), (0, 0), (len(expected), len(expected)), (len(expected) - 1, len(expected))]
    ranges += [sorted(rng.choices(range(len(expected) + 1), k=2)) for _ in range(40)]
    for start, stop in ranges:
        columns = rng.choice([None, [], rng.sample(names, rng.randint(1, len(names)))])
        wanted = [r if columns is None or isinstance(r, str) else select(r, columns) for r in expected[start:stop]]
        rows = found.read(start, stop, columns if columns is None else [*columns, "no such column"])
        assert [row.row_index for row in rows] == list(range(start, stop))
        assert [same(row, record) for row, record in zip(rows, wanted, strict=True)] == wanted

        columns = rng.sample(names, rng.randint(1, len(names)))
        read = found.read_columns(start, stop, columns)
        assert read.schema == pa.schema([found.schema.field(name) for name in columns])
        records = [{} if isinstance(r, str) else r for r in expected[start:stop]]
        assert read.to_pylist() == [{name: r.get(name) for name in columns} for r in records]


def select(record: dict[str, object], columns: list[str]) -> dict[str, object]:
    return {name: record[name] for name in columns if name in record}


def same(row: Row, expected: dict[str, object] | str) -> dict[str, object] | str:
    """What was read, in the form of what was expected."""
    if isinstance(expected, str) and row.error is not None and row.error.startswith(expected) and not row.values:
        return expected
    assert row.error is None
    return dict(row.values)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("format", FORMATS)
def test_any_range_is_what_a_whole_reading_has(format: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    path, expected = FORMATS[format](tmp_path / "data")
    for _ in range(2):
        found = open_source(InputLocation(path), tmp_path / "cache")
        check(found, expected)
        found.close()
    assert not list((tmp_path / "cache").glob(".tmp*"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
json_lines = st.one_of(
    st.dictionaries(st.sampled_from(["a", "b", "c", "\ud800", ""]), json_values, max_size=4).map(json.dumps),
    st.dictionaries(st.sampled_from("ab"), st.integers(-9, 9) | st.floats(-9, 9), max_size=2).map(json.dumps),
    json_values.map(json.dumps),
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(
        ["", " ", "\t\r", "{", "}", '{"a": [{}', "{}]}", "{},{}", '{"a": NaN}', '{"a": "\\ud800"}', "\ufeff{}"]
    ),
)


def expected_of_line(line: str) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(json_lines, max_size=20), end=st.sampled_from(["", "\n"]), block=st.sampled_from([3, 7, 1 << 20]))
def test_jsonl_of_any_lines(
    lines: list[str], end: str, block: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "BLOCK_BYTES", block)
    path = tmp_path / "x.jsonl"
    path.write_bytes(("\n".join([*lines, '{"last": 1}']) + end).encode())
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    if lines and lines[0].startswith("\ufeff"):
        lines = [lines[0][1:], *lines[1:]]
    expected = [(i, expected_of_line(line)) for i, line in enumerate(lines, 1) if line.strip(" \t\r")]

    found = open_source(InputLocation(str(path)), tmp_path / "cache")
    rows = found.read(0, found.num_rows)[:-1]
    assert [json.dumps(dict(row.values)) for row in rows] == [json.dumps(record or {}) for _, record in expected]
    for row, (number, record) in zip(rows, expected, strict=True):
        assert (row.error is None) == (record is not None)
        assert row.error is None or row.error.startswith(f"x.jsonl line {number}: not ")

    read = found.read_columns(0, found.num_rows - 1, found.schema.names)
    for field in found.schema:
        values = [(record or {}).get(field.name) for _, record in expected]
        for value, stored in zip(values, read.column(field.name).to_pylist(), strict=True):
            if spool.is_json(field):
                text = None if value is None else json.dumps(value, ensure_ascii=False)
                assert stored == (text and text.encode(errors="replace").decode())
            else:
                assert holds(stored, value)
    found.close()


def holds(stored: object, value: object) -> bool:
    """Whether a typed column has kept a value, but for integers as floats, nulls in structs and `?` for surrogates."""
    if isinstance(value, dict) and isinstance(stored, dict):
        return value.keys() <= stored.keys() and all(holds(stored[name], value.get(name)) for name in stored)
    if isinstance(value, list) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(holds, stored, value))
    if isinstance(value, str):
        return stored == value.encode(errors="replace").decode()
    if isinstance(value, int) and isinstance(stored, float):
        return float(value) == stored
    return type(stored) is type(value) and (stored == value or (stored != stored and value != value))


def open_jsonl(tmp_path: pathlib.Path, *lines: object) -> Source:
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return open_source(InputLocation(str(path)), tmp_path / f"cache of {path.name}")


@pytest.mark.parametrize(
    ("values", "type"),
    [
        ([True, None, False], pa.bool_()),
        ([1, -(2**63), 2**63 - 1], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([2**60 + 1, 2.5], pa.float64()),
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
    monkeypatch.setattr(spool, "BLOCK_BYTES", block)
    found = open_jsonl(tmp_path, *[{"x": value} for value in values], "broken", {"y": 1})
    field = found.schema.field("x")
    assert field.type == (type or pa.string())
    assert spool.is_json(field) == (type is None)
    if type is None:
        stored = found.read_columns(0, len(values), ["x"]).column("x").to_pylist()
        assert [text and json.loads(text.replace("?", "\\ud800")) for text in stored] == values
    assert [row.values.get("x") for row in found.read(0, len(values))] == values
    found.close()


def test_types_are_settled_over_all_files(tmp_path: pathlib.Path) -> None:
    for name, value in [("a", 1), ("b", 2.5), ("c", None)]:
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"x": value, "y": value and name, "z": [name, value][name == "b"]})
        )
    found = open_source(InputLocation(str(tmp_path / "*.jsonl")), tmp_path / "cache")
    assert [spool.is_json(field) for field in found.schema] == [False, False, True]
    assert found.read_columns(0, 3, ["x", "y", "z"]).to_pylist() == [
        {"x": 1.0, "y": "a", "z": '"a"'},
        {"x": 2.5, "y": "b", "z": "2.5"},
        {"x": None, "y": None, "z": '"c"'},
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
    monkeypatch.setattr(spool, "BATCH_ROWS", batch_rows)
    (tmp_path / "x.csv").write_text("\ufeffk,x\r\n" + "".join(f"k,{cell.strip('_')}\r\n" for cell in cells.split()))
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    assert found.schema.field("x").type == type
    assert [row.values["x"] for row in found.read(0, found.num_rows)] == values
    assert found.read_columns(0, found.num_rows, ["x"]).column("x").to_pylist() == values
    found.close()


def test_csv_that_is_not_utf8_or_never_closes_a_quote(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'a,b\n1,2\n\xff,3\n4,5\n6,"open\n7,8\n')
    found = open_source(InputLocation(str(tmp_path / "x.csv")), tmp_path / "cache")
    rows = found.read(0, found.num_rows)
    assert [row.error and row.error.partition(":")[0] for row in rows] == [None, "x.csv line 3", None, "x.csv line 5"]
    assert rows[2].values == {"a": 4, "b": 5}
    found.close()


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_line_too_long_to_hold_is_an_error_row(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(spool, "BLOCK_BYTES", 16)
    lengths = [10, 100, 101, 10, 500, 500, 10, 90, 90]
    lines = [json.dumps({"x": "y" * (length - 9)}) for length in lengths]
    assert [len(line) for line in lines] == lengths
    (tmp_path / "x").write_text("\n".join(lines))
    found = open_source(InputLocation(str(tmp_path / "x"), format), tmp_path / "cache")
    for start, stop in [(0, 9), (2, 3), (3, 6), (6, 9)]:
        errors = [row.error for row in found.read(start, stop)]
        assert errors == [
            f"x line {i + 1}: longer than 100 bytes" if lengths[i] > 100 else None for i in range(start, stop)
        ]
    found.close()


def test_lines_of_a_megabyte(tmp_path: pathlib.Path) -> None:
    texts = [chr(97 + i) * (1_300_000 * (i % 3) + 1) for i in range(9)]
    found = open_jsonl(tmp_path, *[{"x": text} for text in texts])
    assert [row.values["x"] for row in found.read(0, 9)] == texts
    assert found.read_columns(3, 6, ["x"]).column("x").to_pylist() == texts[3:6]
    found.close()


def test_columns_beyond_a_bound_stay_in_the_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_COLUMNS", 3)
    found = open_jsonl(tmp_path, *[{f"x{i}": i} for i in range(5)])
    assert found.schema.names == ["x0", "x1", "x2"]
    assert found.read(4, 5)[0].values == {"x4": 4}
    with pytest.raises(KeyError):
        found.read_columns(0, 1, ["x4"])
    found.close()


def test_a_range_outside_is_refused(tmp_path: pathlib.Path) -> None:
    found = open_jsonl(tmp_path, {"x": 1})
    for start, stop in [(0, 2), (-1, 1), (1, 0)]:
        with pytest.raises(IndexError):
            found.read(start, stop)
    found.close()


# -- the cache -------------------------------------------------------------------------------------------------------


def data_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_reopening_does_not_read_the_data(tmp_path: pathlib.Path) -> None:
    path, _ = make_jsonl(tmp_path)
    first = open_source(InputLocation(path), tmp_path / "cache")
    stat = os.stat(path)
    pathlib.Path(path).write_bytes(b"?" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = open_source(InputLocation(path), tmp_path / "cache")
    assert (again.num_rows, again.schema, again.fingerprint) == (first.num_rows, first.schema, first.fingerprint)
    first.close()
    again.close()


@pytest.mark.parametrize("format", FORMATS)
def test_the_fingerprint_is_of_the_content(format: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "one").mkdir()
    path, expected = FORMATS[format](tmp_path / "one")
    first = open_source(InputLocation(path), tmp_path / "cache")
    first.close()
    shutil.move(tmp_path / "one", tmp_path / "two")
    moved_path = path.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    for cache in ("cache", "another cache"):
        moved = open_source(InputLocation(moved_path), tmp_path / cache)
        assert moved.fingerprint == first.fingerprint
        check(moved, expected)
        moved.close()


@pytest.mark.parametrize("format", FILES)
def test_a_touched_file_is_hashed_and_not_read_again(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    path, expected = FORMATS[format](tmp_path / "data")
    first = open_source(InputLocation(path), tmp_path / "cache")
    first.close()
    for file in data_files(tmp_path / "data"):
        os.utime(file, ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(spool, "_first_pass", None)
        touched = open_source(InputLocation(path), tmp_path / "cache")
    assert touched.fingerprint == first.fingerprint
    check(touched, expected)
    touched.close()


@pytest.mark.parametrize("is_same_size", [True, False])
def test_changed_content_is_read_again(is_same_size: bool, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    first = open_source(InputLocation(str(path)), tmp_path / "cache")
    first.close()
    path.write_text('{"x": 1}\n{"y": 2}\n' if is_same_size else '{"x": 1}\n\n{"y": 2}\n')
    os.utime(path, ns=(0, 0))
    second = open_source(InputLocation(str(path)), tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert [row.values for row in second.read(0, 2)] == [{"x": 1}, {"y": 2}]
    second.close()


def test_changed_parquet_changes_the_fingerprint(tmp_path: pathlib.Path) -> None:
    found = []
    for i, prompt in enumerate(["a", "b"]):
        pq.write_table(pa.table({"x": [prompt] * 100}), tmp_path / "x.parquet")
        found.append(open_source(InputLocation(str(tmp_path / "x.parquet")), tmp_path / str(i)))
        found[-1].close()
    assert found[0].fingerprint != found[1].fingerprint


def flip(data: bytes) -> bytes:
    return data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]


@pytest.mark.parametrize("tear", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"x", flip])
@pytest.mark.parametrize("format", ["jsonl folder", "csv"])
def test_a_torn_cache_is_made_again(format: str, tear: Callable[[bytes], bytes], tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    path, expected = FORMATS[format](tmp_path / "data")
    first = open_source(InputLocation(path), tmp_path / "cache")
    first.close()
    for file in data_files(tmp_path / "cache"):
        if not (data := file.read_bytes()):
            continue
        file.write_bytes(tear(data))
        again = open_source(InputLocation(path), tmp_path / "cache")
        rows = again.read(0, again.num_rows)
        assert [same(row, record) for row, record in zip(rows, expected, strict=True)] == expected
        assert again.fingerprint == first.fingerprint
        assert file.read_bytes() == data
        again.close()


def test_a_foreign_or_older_cache_is_made_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected = make_jsonl(tmp_path)
    monkeypatch.setattr(spool, "VERSION", 0)
    open_source(InputLocation(path), tmp_path / "cache").close()
    monkeypatch.undo()
    for content in (None, b"[]", b"{}", b'{"version": 1, "content": {}, "checksum": 3}'):
        if content:
            (tmp_path / "cache" / "files.json").write_bytes(content)
        found = open_source(InputLocation(path), tmp_path / "cache")
        check(found, expected)
        found.close()


def test_the_same_cache_for_another_format(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_text('{"text": 1}\n\n2\n')
    for format, num_rows in [("jsonl", 2), ("text", 3), ("jsonl", 2)]:
        found = open_source(InputLocation(str(tmp_path / "x"), format), tmp_path / "cache")
        assert found.num_rows == num_rows
        found.close()


def test_concurrent_first_opens(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    path, expected = make_jsonl_folder(tmp_path / "data")
    code = (
        "import sys, pathlib; from batchinf.source import *\n"
        "s = open_source(InputLocation(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "print(s.fingerprint, len([r for r in s.read(0, s.num_rows) if r.error is None]))"
    )
    command = [sys.executable, "-c", code, path, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0].split()[1] for process in processes}
    assert found == {str(sum(isinstance(record, dict) for record in expected))}


def test_two_threads_read_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "OPEN_FILES", 1)
    path, expected = make_jsonl_folder(tmp_path)
    found = open_source(InputLocation(path), tmp_path / ".cache")
    failures: list[BaseException] = []

    def read() -> None:
        try:
            check(found, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found.close()


def test_a_first_pass_that_was_killed_leaves_nothing_in_the_way(tmp_path: pathlib.Path) -> None:
    path, expected = make_jsonl(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".tmp-1-x.offsets").write_bytes(b"half")
    found = open_source(InputLocation(path), tmp_path / "cache")
    check(found, expected)
    assert not (tmp_path / "cache" / ".tmp-1-x.offsets").exists()
    found.close()


def test_a_file_that_grows_during_the_first_pass(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"x": 1}\n')

    def grow(self: object, records: object) -> None:
        path.write_text('{"x": 1}\n{"x": 2}\n')

    monkeypatch.setattr(spool.ColumnTypes, "add", grow)
    with pytest.raises(InputError, match="changed while it was read"):
        open_source(InputLocation(str(path)), tmp_path / "cache")
    assert not [file for file in data_files(tmp_path / "cache") if file.name != "lock"]


# -- Hugging Face datasets -------------------------------------------------------------------------------------------


def test_a_dataset_by_id_is_asked_for_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    rows = records(200)
    (tmp_path / "repo").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "repo" / "train-0.parquet")
    location = InputLocation(str(tmp_path / "repo"), "hf", split="train")
    first = open_source(location, tmp_path / "cache")
    check(first, list(rows))
    first.close()
    shutil.rmtree(tmp_path / "repo")
    again = open_source(location, tmp_path / "cache")
    check(again, list(rows))
    assert again.fingerprint == first.fingerprint
    again.close()
    with pytest.raises(InputError, match=r"there is no file or folder .* cannot be loaded as a Hugging Face dataset"):
        open_source(location, tmp_path / "another cache")


def test_a_slice_of_a_split(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.jsonl").write_text("".join(f'{{"x": {i}}}\n' for i in range(50)))
    for _ in range(2):
        found = open_source(InputLocation(str(tmp_path / "repo"), "hf", split="train[10:30]"), tmp_path / "cache")
        assert [row.values["x"] for row in found.read(0, found.num_rows)] == list(range(10, 30))
        found.close()


def test_the_fingerprint_of_a_saved_dataset_is_of_its_rows(tmp_path: pathlib.Path) -> None:
    found = []
    for name, word in [("a", "x"), ("b", "x"), ("c", "y")]:
        datasets.Dataset.from_list([{"prompt": word}] * 10).save_to_disk(tmp_path / name)
        found.append(open_source(InputLocation(str(tmp_path / name)), tmp_path / f"cache {name}").fingerprint)
    assert found[0] == found[1] != found[2]


def test_a_dataset_that_the_hub_does_not_give(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys, pathlib; from batchinf.source import *; from batchinf.errors import InputError\n"
        "try: open_source(InputLocation('no-such/dataset'), pathlib.Path(sys.argv[1]))\n"
        "except InputError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("there is no file or folder no-such/dataset, and it cannot be loaded as a ")
    assert done.stdout.count("\n") == 1


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "location", "message"),
    [
        ({}, InputLocation("none.jsonl"), "none.jsonl does not exist"),
        ({}, InputLocation("./no/such/folder"), "does not exist"),
        ({}, InputLocation("s3://bucket/x.jsonl"), "does not exist; give a file"),
        ({}, InputLocation("*.jsonl"), "no file matches"),
        ({"x.yaml": b"x"}, InputLocation("x.yaml"), "the ending of x.yaml is not known; the formats are jsonl, parq"),
        ({"x.parquet.gz": b"x"}, InputLocation("x.parquet.gz"), "ending of x.parquet.gz is not known"),
        ({"x.jsonl": b"{}"}, InputLocation("x.jsonl", "xml"), "format 'xml' is not known"),
        ({"x.jsonl": b"{}", "x.csv": b"a"}, InputLocation("x.*"), "mixes formats: x.csv, x.jsonl"),
        ({"f/x.jsonl": b"{}", "f/x.csv": b"a"}, InputLocation("f"), "f mixes formats"),
        ({"f/x.md": b"x", "f/_x.csv": b"x", "f/.x.csv": b"x"}, InputLocation("f"), "f has no data file"),
        ({"f/x.csv": b"x"}, InputLocation("f", "jsonl"), "f has no jsonl file"),
        ({"x.jsonl": b""}, InputLocation("x.jsonl"), "x.jsonl has no rows"),
        ({"x.jsonl": b"\n \n"}, InputLocation("x.jsonl"), "x.jsonl has no rows"),
        ({"x.csv": b""}, InputLocation("x.csv"), "x.csv has no rows"),
        ({"x.csv": b"a,b\n"}, InputLocation("x.csv"), "x.csv has no rows"),
        ({"x.csv": b"a,a\n1,2"}, InputLocation("x.csv"), "x.csv has two columns named 'a'"),
        ({"x.csv": b"\xff\xfea\n1"}, InputLocation("x.csv"), "its header is not UTF-8"),
        ({"x.csv": b'"a"b\n1'}, InputLocation("x.csv"), "its header is not CSV"),
        ({"x.parquet": b"PAR1 no more"}, InputLocation("x.parquet"), "x.parquet cannot be read as parquet"),
        ({"x.parquet": b""}, InputLocation("x.parquet"), "x.parquet cannot be read as parquet"),
        ({"x.arrow": b"no arrow at all"}, InputLocation("x.arrow"), "x.arrow cannot be read as arrow"),
        ({"x.jsonl.gz": gzip.compress(b"x" * 99)[:-9]}, InputLocation("x.jsonl.gz"), "cannot be read as jsonl"),
        ({"x.csv.gz": b"\x1f\x8b no gzip"}, InputLocation("x.csv.gz"), "cannot be read as csv"),
    ],
)
def test_one_clear_line_for_what_cannot_be_read(
    files: dict[str, bytes],
    location: InputLocation,
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in files.items():
        pathlib.Path(name).parent.mkdir(exist_ok=True)
        pathlib.Path(name).write_bytes(data)
    with pytest.raises(InputError) as raised:
        open_source(location, tmp_path / "cache")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parquet_files_whose_types_do_not_meet(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="column 'x' is int64 in one file and string in another"):
        open_source(InputLocation(str(tmp_path)), tmp_path / ".cache")


def test_a_folder_that_is_told_its_format(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.jsonl").write_text("{}")
    found = open_source(InputLocation(str(tmp_path), "jsonl"), tmp_path / ".cache")
    assert found.num_rows == 1
    found.close()


# -- memory ----------------------------------------------------------------------------------------------------------

READ_HUGE = """
import pathlib, sys
from batchinf import spool
from batchinf.source import InputLocation, open_source
def peak():  # not ru_maxrss, which starts at what the parent has
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
spool.GROUP_ROWS, num_rows = map(int, sys.argv[3:])
before = peak()
source = open_source(InputLocation(sys.argv[1]), pathlib.Path(sys.argv[2]))
first_pass = peak() - before
rows = source.read(source.num_rows - num_rows, source.num_rows)
print(first_pass, peak() - before, len(rows), rows[-1].values["id"])
"""


def peaks(path: pathlib.Path, cache: pathlib.Path, group_rows: int, num_rows: int) -> list[int]:
    """MiB of memory that the first pass took, and reading the last `num_rows` with it; how many were read; the last."""
    command = [sys.executable, "-c", READ_HUGE, str(path), str(cache), str(group_rows), str(num_rows)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.parametrize(
    ("num_rows", "num_chars", "is_repeated", "group_rows", "num_read"),
    [
        (1_000_000, 300, False, 20_000, 1000),  # one row group of 1 million rows, spooled
        (12_000, 25_000, True, 20_000, 10),  # one value in all rows of a group that is read directly
        (1000, 300_000, True, 100, 10),  # the same, spooled
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
    pq.write_table(rows, tmp_path / "x.parquet", row_group_size=num_rows, use_dictionary=is_repeated)
    for bound in (90, 20):  # MiB: of the first pass, and of opening again
        first_pass, with_rows, *found = peaks(tmp_path / "x.parquet", tmp_path / "cache", group_rows, num_read)
        print(first_pass, with_rows)
        assert found == [num_read, num_rows - 1]
        assert first_pass < bound
        assert with_rows < bound + 50
