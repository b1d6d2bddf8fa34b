import os
import pathlib
import tempfile

import pytest
from inputs import refusal

from batchinf.base.errors import InputError
from batchinf.source.files import InputLocation
from batchinf.source.find import find_files, is_dataset
from batchinf.source.rows import open_source


@pytest.mark.parametrize(
    ("files", "location", "message"),
    [
        ({}, InputLocation("none.jsonl"), "none.jsonl does not exist"),
        ({}, InputLocation("./no/such/folder"), "does not exist"),
        ({}, InputLocation("oci://bucket/x.jsonl"), "Install ocifs"),
        ({}, InputLocation("*.jsonl"), "no file matches"),
        (
            {"x.yaml": b"x"},
            InputLocation("x.yaml"),
            "the ending of x.yaml is not known; the formats are jsonl, json, parq",
        ),
        ({"x.parquet.gz": b"x"}, InputLocation("x.parquet.gz"), "ending of x.parquet.gz is not known"),
        ({"x.jsonl": b"{}"}, InputLocation("x.jsonl", "xml"), "format 'xml' is not known"),
        ({"x.jsonl": b"{}", "x.csv": b"a"}, InputLocation("x.*"), "mixes formats: x.csv, x.jsonl"),
        ({"f/x.jsonl": b"{}", "f/x.csv": b"a"}, InputLocation("f"), "f mixes formats"),
        ({"f/x.txt": b"a", "f/x.csv": b"a", "f/x.png": b""}, InputLocation("f"), "to csv or images or text, or narrow"),
        ({"f/x.md": b"x", "f/_x.csv": b"x", "f/.x.csv": b"x"}, InputLocation("f"), "f has no data file"),
        ({"f/x.csv": b"x"}, InputLocation("f", "jsonl"), "f has no jsonl file"),
        ({}, InputLocation("/dev/stdin", "jsonl"), "/dev/stdin is a pipe or a device"),
        ({}, InputLocation("/dev/null", "csv"), "/dev/null is a pipe or a device"),
        *(
            ({f"x.{ending}": text.encode(encoding)}, InputLocation(f"x.{ending}"), f"x.{ending} is UTF-16; save it as")
            for ending, text in (("jsonl", '{"a": 1}\n'), ("csv", "a,b\n1,2\n"), ("txt", "one\ntwo\n"))
            for encoding in ("utf-16", "utf-16-le", "utf-16-be")
            if (ending, encoding) != ("csv", "utf-16")  # read by its mark
        ),
    ],
)
def test_one_clear_line_for_what_cannot_be_found(
    files: dict[str, bytes], location: InputLocation, message: str, tmp_path: pathlib.Path
) -> None:
    said = refusal(files, location, tmp_path)
    assert message in said
    assert "\n" not in said


def test_a_named_pipe(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(InputError, match=r"x\.jsonl is a pipe or a device; a job reads its input more than once"):
        open_source(InputLocation(str(tmp_path / "x.jsonl")), tmp_path / "cache")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_a_file_in_shared_memory(tmp_path: pathlib.Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".jsonl") as file:
        file.write(b'{"prompt": "x"}\n')
        file.flush()
        assert open_source(InputLocation(file.name), tmp_path / "cache").num_rows == 1


def test_a_folder_that_is_told_its_format(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.jsonl").write_text("{}")
    found = open_source(InputLocation(str(tmp_path), "jsonl"), tmp_path / ".cache")
    assert found.num_rows == 1
    found.close()


@pytest.mark.parametrize(
    ("path", "is_asked"),
    [("rows", False), ("data/rows", False), ("data/x", False), ("other/rows", True), ("row", True), ("squad", True)],
)
def test_local_things_come_before_the_hub(
    path: str, is_asked: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path without its ending, and one in a folder that is here, are no ids of datasets."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "rows.jsonl.gz").touch()
    (tmp_path / "squad.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert is_dataset(InputLocation(path)) == is_asked
    assert is_dataset(InputLocation(path, "hf"))
    if not is_asked:
        with pytest.raises(InputError, match=r"or a Hugging Face dataset's id with input\.format: hf"):
            find_files(InputLocation(path))
