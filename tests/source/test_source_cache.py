import pathlib
from collections.abc import Callable

import pytest
from inputs import FORMATS, check, data_files, make_jsonl, same

from batchinf.base.storage import Folder
from batchinf.source import cache
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source


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
    open_source(InputLocation(path), tmp_path / "cache").close()
    folder = Folder(tmp_path / "cache")
    wrong = cache.read_record(folder, "files.json")
    wrong["prompts.jsonl"]["num_rows"] = 7
    monkeypatch.setattr(cache, "CACHE_VERSION", 0)
    cache.write_record(folder, "files.json", wrong)
    monkeypatch.undo()
    other_version = folder.read("files.json")
    for content in (other_version, b"[]", b"{}", b'{"version": 1, "content": {}, "checksum": 3}'):
        (tmp_path / "cache" / "files.json").write_bytes(content)
        found = open_source(InputLocation(path), tmp_path / "cache")
        check(found, expected)
        found.close()


def test_a_lost_artifact_is_made_again(tmp_path: pathlib.Path) -> None:
    path, expected = make_jsonl(tmp_path)
    open_source(InputLocation(path), tmp_path / "cache").close()
    lost = [file for file in data_files(tmp_path / "cache") if file.name not in ("lock", "files.json")]
    for file in lost:
        file.unlink()
        found = open_source(InputLocation(path), tmp_path / "cache")
        check(found, expected)
        assert file.exists()
        found.close()
    assert len(lost) == 4
