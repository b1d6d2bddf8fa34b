import gzip
import pathlib
import shutil
import threading

import pyarrow as pa
import pytest
from inputs import FORMATS, check, make_jsonl_folder, open_jsonl, refusal

from batchinf.base.errors import InputError
from batchinf.source import files as input_files
from batchinf.source import rows
from batchinf.source.files import InputLocation
from batchinf.source.formats import arrow, csv, parquet
from batchinf.source.rows import open_source

SMALL = [
    (input_files, "BLOCK_BYTES", 997),
    (csv, "BLOCK_BYTES", 997),
    (csv, "BATCH_ROWS", 10),
    (csv, "BATCH_BYTES", 500),
    (arrow, "BATCH_ROWS", 10),
    (arrow, "BATCH_BYTES", 500),
    (parquet, "BLOCK_BYTES", 997),
    (parquet, "BATCH_ROWS", 10),
    (parquet, "BATCH_BYTES", 500),
    (parquet, "GROUP_ROWS", 60),
    (rows, "OPEN_FILES", 1),
]


@pytest.fixture(params=["small spools", pytest.param("as it is", marks=pytest.mark.slow)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with limits so small that blocks, batches, row groups and held files all come into play."""
    if request.param == "small spools":
        for module, name, size in SMALL:
            monkeypatch.setattr(module, name, size)


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


def test_a_range_outside_is_refused(tmp_path: pathlib.Path) -> None:
    found = open_jsonl(tmp_path, {"x": 1})
    for start, stop in [(0, 2), (-1, 1), (1, 0)]:
        with pytest.raises(IndexError):
            found.read(start, stop)
    found.close()


def test_two_threads_read_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "OPEN_FILES", 1)
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


@pytest.mark.parametrize(
    ("files", "location", "message"),
    [
        ({"x.jsonl": b""}, InputLocation("x.jsonl"), "x.jsonl has no rows"),
        ({"x.jsonl": b"\n \n"}, InputLocation("x.jsonl"), "x.jsonl has no rows"),
        ({"x.csv": b""}, InputLocation("x.csv"), "x.csv has no rows"),
        ({"x.csv": b"a,b\n"}, InputLocation("x.csv"), "x.csv has no rows"),
        ({"x.csv": b"a,a\n1,2"}, InputLocation("x.csv"), "x.csv has two columns named 'a'"),
        ({"x.csv": b"\xff\xfea\n1"}, InputLocation("x.csv"), "its header is not utf-16: byte 0x31"),
        ({"x.csv": b'"a"b\n1'}, InputLocation("x.csv"), "its header is not CSV"),
        ({"x.parquet": b"PAR1 no more"}, InputLocation("x.parquet"), "x.parquet cannot be read as parquet"),
        ({"x.parquet": b""}, InputLocation("x.parquet"), "x.parquet cannot be read as parquet"),
        ({"x.arrow": b"no arrow at all"}, InputLocation("x.arrow"), "x.arrow cannot be read as arrow"),
        ({"x.jsonl.gz": gzip.compress(b"x" * 99)[:-9]}, InputLocation("x.jsonl.gz"), "cannot be read as jsonl"),
        ({"x.csv.gz": b"\x1f\x8b no gzip"}, InputLocation("x.csv.gz"), "cannot be read as csv"),
    ],
)
def test_one_clear_line_for_what_cannot_be_read(
    files: dict[str, bytes], location: InputLocation, message: str, tmp_path: pathlib.Path
) -> None:
    said = refusal(files, location, tmp_path)
    assert message in said
    assert "\n" not in said


def test_a_second_arrow_stream_in_a_file(tmp_path: pathlib.Path) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": ["x", "y"]}))
    stream = sink.getvalue().to_pybytes()
    (tmp_path / "two.arrow").write_bytes(stream * 2)
    (tmp_path / "open.arrow").write_bytes(stream[:-8])  # without its end, as of a writer that is still at work
    with pytest.raises(InputError, match=r"two\.arrow: more bytes follow the end of its Arrow stream"):
        open_source(InputLocation(str(tmp_path / "two.arrow")), tmp_path / "cache")
    assert open_source(InputLocation(str(tmp_path / "open.arrow")), tmp_path / "other").num_rows == 2


def test_arrow_files_joined_into_one(tmp_path: pathlib.Path) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": ["x", "y"]}), max_chunksize=1)
    file = sink.getvalue().to_pybytes()
    (tmp_path / "two.arrow").write_bytes(file * 2)  # its last footer names the batches of the first half
    (tmp_path / "one.arrow").write_bytes(file)
    with pytest.raises(InputError, match=r"two\.arrow: several Arrow files follow each other in it; write one file"):
        open_source(InputLocation(str(tmp_path / "two.arrow")), tmp_path / "cache")
    assert open_source(InputLocation(str(tmp_path / "one.arrow")), tmp_path / "other").num_rows == 2
