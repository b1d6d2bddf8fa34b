import os
import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import FILES, FORMATS, check, data_files, make_jsonl, make_jsonl_folder

from batchinf.base.errors import InputError
from batchinf.source import scan
from batchinf.source.files import InputLocation
from batchinf.source.rows import open_source
from batchinf.source.scan import Scanner
from batchinf.source.types import JsonTypes


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


@pytest.mark.parametrize("format", FILES)
def test_a_touched_file_is_hashed_and_not_read_again(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    path, expected = FORMATS[format](tmp_path / "data")
    first = open_source(InputLocation(path), tmp_path / "cache")
    first.read(0, first.num_rows)  # Parquet of which nothing was read has only its footer to compare, and is scanned
    first.keep_digests()
    first.close()
    for file in data_files(tmp_path / "data"):
        os.utime(file, ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Scanner, "scan_one", None)
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
        "import sys, pathlib; from batchinf.source.rows import *\n"
        "s = open_source(InputLocation(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
        "print(s.fingerprint, len([r for r in s.read(0, s.num_rows) if r.error is None]))"
    )
    command = [sys.executable, "-c", code, path, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate()[0].split()[1] for process in processes}
    assert found == {str(sum(isinstance(record, dict) for record in expected))}


def test_a_scan_that_was_killed_leaves_nothing_in_the_way(tmp_path: pathlib.Path) -> None:
    path, expected = make_jsonl(tmp_path)
    (tmp_path / "cache").mkdir()
    leftover, of_another_host = (f".tmp-{host}-1-x.offsets" for host in (os.uname().nodename, "elsewhere.invalid"))
    (tmp_path / "cache" / leftover).write_bytes(b"half")
    (tmp_path / "cache" / of_another_host).write_bytes(b"in the making")
    found = open_source(InputLocation(path), tmp_path / "cache")
    check(found, expected)
    assert not (tmp_path / "cache" / leftover).exists()
    assert (tmp_path / "cache" / of_another_host).exists()
    found.close()


def test_a_file_that_grows_during_the_scan(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"x": 1}\n')

    def grow(self: object, records: object, rows: object) -> None:
        path.write_text('{"x": 1}\n{"x": 2}\n')

    monkeypatch.setattr(JsonTypes, "add", grow)
    with pytest.raises(InputError, match="changed while it was read"):
        open_source(InputLocation(str(path)), tmp_path / "cache")
    assert not [file for file in data_files(tmp_path / "cache") if file.name != "lock"]


def test_an_interrupted_scan_goes_on_where_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "SAVE_BYTES", 0)
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x,x\n1,2\n")
    with pytest.raises(InputError, match=r"b\.csv has two columns"):
        open_source(InputLocation(str(tmp_path / "*.csv")), tmp_path / "cache")
    (tmp_path / "b.csv").write_text("x\n2\n")
    scanned = []
    scan_one = Scanner.scan_one
    monkeypatch.setattr(Scanner, "scan_one", lambda self, file: scanned.append(file.name) or scan_one(self, file))
    found = open_source(InputLocation(str(tmp_path / "*.csv")), tmp_path / "cache")
    assert scanned == ["b.csv"]
    assert [row.values for row in found.read(0, 2)] == [{"x": 1}, {"x": 2}]
    found.close()


def test_columns_of_one_name_are_refused_and_leave_nothing(tmp_path: pathlib.Path) -> None:
    pq.write_table(pa.table([[1], [2]], ["x", "x"]), tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet has two columns named 'x'"):
        open_source(InputLocation(str(tmp_path / "x.parquet")), tmp_path / "cache")
    assert [file.name for file in data_files(tmp_path / "cache")] == ["lock"]
