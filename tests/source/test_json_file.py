import contextlib
import json
import pathlib
import random

import pytest
from inputs import refusal

from batchinf.source.files import InputLocation
from batchinf.source.formats import json as json_format
from batchinf.source.rows import open_source


def read(tmp_path: pathlib.Path, content: bytes) -> list[object]:
    (tmp_path / "x.json").write_bytes(content)
    source = open_source(InputLocation(str(tmp_path / "x.json")), tmp_path / "cache")
    with contextlib.closing(source):
        return [row.error or dict(row.values) for row in source.read(0, source.num_rows)]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 64])
def test_values_across_blocks(num_bytes: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchinf.source.files.BLOCK_BYTES", num_bytes)
    monkeypatch.setattr(json_format, "BLOCK_BYTES", num_bytes)
    rng = random.Random(num_bytes)
    texts = ['a"b', "\\\\", '\\"', "{[", "]},", "\n", "ü", ""]
    rows = [{rng.choice(texts): [rng.choice(texts), {"k": rng.choice(texts)}], "n": n / 3} for n in range(40)]
    assert read(tmp_path, json.dumps(rows, indent=rng.choice([None, 2]), ensure_ascii=False).encode()) == rows
    assert read(tmp_path, "".join(json.dumps(row) for row in rows).encode()) == rows


def test_what_is_no_object_is_an_error_row(tmp_path: pathlib.Path) -> None:
    found = read(tmp_path, b'[{"a": 1}, [2], "x", {"a": 1 "b"}, {"a": "line\nbreak"}, {"a": \n 3}]')
    assert found[0] == {"a": 1} and found[-1] == {"a": 3}
    errors = ["not a JSON object but an array", "not a JSON object but a string", "not JSON", "not JSON: Invalid con"]
    for number, (message, error) in enumerate(zip(found[1:-1], errors, strict=True), 2):
        assert str(message).startswith(f"x.json value {number}: {error}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a"', "x.json is not JSON: value 2: the file ends within it; must be an array of objects"),
        (b'[{"a": 1}', "the file ends within it"),
        (b'[{"a": 1},]', "value 2: nothing stands there"),
        (b'[{"a": 1},,{}]', "value 2: nothing stands there"),
        (b'[{"a": 1}] {"a": 2}', "more after the end of the array"),
        (b'[{"a": 1}] 5', "more after the end of the array"),
        (b'{"a": 1}, {"a": 2}', "',' outside of a value"),
        (b'{"data": [{"a": 1}]}', "x.json is one JSON object; a file of this ending has an array of objects"),
        (b"5", "value 1: the file ends within it"),
        (b"[]", "x.json has no rows"),
        (b"", "x.json has no rows"),
        ('[{"a": 1}]'.encode("utf-16"), "x.json is UTF-16; save it as UTF-8"),
    ],
)
def test_refused(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    said = refusal({"x.json": content}, InputLocation("x.json"), tmp_path)
    assert message in said and "\n" not in said


def test_json_beside_data_is_no_data(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "info.json").write_text('{"rows": 1}')
    assert open_source(InputLocation(str(tmp_path)), tmp_path / "cache").num_rows == 1


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_equal_keys_are_named(name: str, tmp_path: pathlib.Path) -> None:
    """In an inner object, too, and beside a row that is not JSON. The last value counts, as in `json.loads`."""
    (tmp_path / name).write_text('{"a": 1}\n{"a": 2, "b": {"k": 1, "k": 2}}\n{"a" 3}\n{"a": 4, "a": 5}\n')
    source = open_source(InputLocation(str(tmp_path / name)), tmp_path / "cache")
    with contextlib.closing(source):
        assert source.remarks == {"row 1 has the key 'k' twice; of equal keys, the last one counts": [name]}
        assert [row.values.get("a") for row in source.read(0, 4)] == [1, 2, None, 5]
