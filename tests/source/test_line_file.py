import gzip
import json
import os
import pathlib
import shutil
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inputs import holds, open_jsonl, peaks

from batchinf.source import files as input_files
from batchinf.source.files import InputLocation
from batchinf.source.formats import lines as line_format
from batchinf.source.rows import open_source
from batchinf.source.types import is_json_column, is_utf8

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
        record = json.loads(line.removeprefix("\ufeff"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(json_lines, max_size=20),
    end=st.sampled_from(["", "\n"]),
    block=st.sampled_from([3, 7, 1 << 20]),
    few=st.sampled_from([0, 2, 64]),
)
def test_jsonl_of_any_lines(
    lines: list[str], end: str, block: int, few: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "BLOCK_BYTES", block)
    monkeypatch.setattr(line_format, "_FEW_LINES", few)
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
            if is_json_column(field):
                if isinstance(value, str):
                    assert stored == value.encode(errors="replace").decode()
                else:
                    text = None if value is None else json.dumps(value, ensure_ascii=False)
                    assert stored == (text if text is None or is_utf8(text) else json.dumps(value))
            else:
                assert holds(stored, value)
    found.close()


@pytest.mark.parametrize("format", ["jsonl", "text"])
def test_a_line_too_long_to_hold_is_an_error_row(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_format, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(input_files, "BLOCK_BYTES", 16)
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


def test_memory_for_a_small_column_of_long_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_format, "MAX_LINE_BYTES", 1 << 20)
    found = open_jsonl(tmp_path, *[{"text": "x" * 100_000, "id": number} for number in range(300)])
    found.read_columns(0, 1, ["id"])
    tracemalloc.start()
    assert found.read_columns(0, 300, ["id"]).column("id").to_pylist() == list(range(300))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All rows are 30 MB; those that are read at once, and one of them parsed, are no more than this.
    assert peak < 6 << 20
    found.close()


def test_memory_for_one_huge_line(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "x.jsonl", "wb") as stream:
        stream.truncate(400 << 20)
        stream.seek(0, os.SEEK_END)
        stream.write(b'\n{"id": 5}\n')
    first_pass, with_rows, *found = peaks(tmp_path / "x.jsonl", tmp_path / "cache", 1, 2)
    assert found == [2, 5]
    assert first_pass < 100
    assert with_rows < 200


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1E+309", "9" * 400 + ".5"])
@pytest.mark.parametrize("value", ["{}", "[0.5, {}]", '{{"deep": [{}]}}'])
def test_a_number_that_no_float_holds_is_an_error_row(number: str, value: str, tmp_path: pathlib.Path) -> None:
    lines = [f'{{"id": {i}, "x": {value.format(0.5 if i % 3 else number)}}}' for i in range(7)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    found = open_source(InputLocation(str(tmp_path / "x.jsonl")), tmp_path / "cache")
    for i, row in enumerate(found.read(0, 7)):
        assert (row.error is None) == (i % 3 > 0)
        if row.error is not None:
            assert row.error.startswith(f"x.jsonl line {i + 1}: the number {number[:40]}")
    assert "inf" not in str(found.read_columns(0, 7, ["x"]).to_pylist()).lower()
    found.close()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt", "x.csv"])
def test_files_with_byte_order_marks_that_were_joined(name: str, end: str, tmp_path: pathlib.Path) -> None:
    line, head = {"x.jsonl": ('{{"text": "{}"}}', ""), "x.txt": ("{}", ""), "x.csv": ('"{}"', "text" + end)}[name]
    texts = ["one", "two \ufeff", "three", "four"]
    first, second = (end.join(map(line.format, half)) + end for half in (texts[:2], texts[2:]))
    (tmp_path / name).write_bytes(f"\ufeff{head}{first}\ufeff{second}".encode())
    found = open_source(InputLocation(str(tmp_path / name)), tmp_path / "cache")
    assert [(row.values, row.error) for row in found.read(0, found.num_rows)] == [({"text": t}, None) for t in texts]
    found.close()


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_values_are_those_of_the_file_and_not_of_the_columns_type(
    name: str, is_shuffled: bool, tmp_path: pathlib.Path
) -> None:
    """A key that is absent stays absent, and 1 does not become 1.0, whatever the other rows have."""
    values: list[object] = [{"a": 1}, {"a": 1, "b": None}, {}, {"a": 1.0}, None, [{"a": 1}, {"b": 2}]]
    rows = [{"v": value} for value in values] + [{"other": 1}]
    content = json.dumps(rows) if name == "x.json" else "\n".join(map(json.dumps, rows))
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    source = open_source(InputLocation(str(tmp_path / name), is_shuffled=is_shuffled), tmp_path / "cache")
    for columns in (None, ["v", "other"]):
        assert [json.dumps(row.values) for row in source.read(0, len(rows), columns)] == list(map(json.dumps, rows))
    source.close()
