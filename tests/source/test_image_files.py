"""Pictures as rows: one row for each file, which is known by its name and its content."""

import os
import pathlib
import shutil

import pytest
from PIL import Image

from batchinf.base.errors import DriftError
from batchinf.prompts.media import FORMATS
from batchinf.source.files import InputLocation
from batchinf.source.formats.images import Images
from batchinf.source.rows import NewRows, Source, open_source


def opened(folder: pathlib.Path, taken: tuple[str, ...] = (), new: NewRows = "refuse") -> Source:
    return open_source(InputLocation(str(folder / "in")), folder / "cache", taken, new)


@pytest.fixture
def pictures(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("b.png", "cats/a.jpg", "a.png"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_bytes(b"same" if name != "cats/a.jpg" else b"other")
    return tmp_path / "in"


def paths(source: Source) -> list[object]:
    return [row.values["path"] for row in source.read(0, source.num_rows)]


def test_endings_are_those_of_the_formats_that_are_decoded() -> None:
    Image.init()
    endings = {ending for ending, format in Image.registered_extensions().items() if format in FORMATS}
    assert set(Images.endings) <= endings
    assert {Image.registered_extensions()[ending] for ending in Images.endings} == set(FORMATS)


def test_pictures_are_sorted_and_new_ones_come_last(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = opened(tmp_path)
    assert paths(first) == ["a.png", "b.png", "cats/a.jpg"]
    assert [row.values["folder"] for row in first.read(0, 3)] == ["", "", "cats"]
    shutil.copy(pictures / "a.png", pictures / "aa.png")
    with pytest.raises(DriftError, match=r"new: aa\.png; use --extend"):
        opened(tmp_path, first.fingerprints)
    extended = opened(tmp_path, first.fingerprints, "take")
    assert paths(extended) == ["a.png", "b.png", "cats/a.jpg", "aa.png"]
    assert extended.fingerprints[0] == first.fingerprint
    assert paths(opened(tmp_path, extended.fingerprints, "ignore")) == paths(extended)


def test_a_glob_has_the_same_rows(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = open_source(InputLocation(str(pictures / "**" / "*.*")), tmp_path / "of glob")
    assert paths(source) == paths(opened(tmp_path))
    assert source.fingerprint == opened(tmp_path).fingerprint


def test_pictures_beside_other_data_are_no_rows(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (pictures / "rows.jsonl").write_text('{"photo": "a.png"}\n')
    source = opened(tmp_path)
    assert (source.num_rows, source.schema.names) == (1, ["photo"])
    named = open_source(InputLocation(str(pictures), "images"), tmp_path / "named")
    assert paths(named) == ["a.png", "b.png", "cats/a.jpg"]


def test_files_of_unknown_endings_are_named(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert opened(tmp_path).remarks == {}
    (pictures / "cats" / "b.picture").write_bytes(b"same")
    (pictures / ".hidden").touch()
    source = opened(tmp_path)
    assert source.num_rows == 3
    assert list(source.remarks.values()) == [["cats/b.picture"]]
    assert list(opened(tmp_path, source.fingerprints).remarks.values()) == [["cats/b.picture"]]


def test_a_renamed_picture_is_noticed_and_a_changed_one_is_read(pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = opened(tmp_path)
    taken = source.fingerprints
    (pictures / "a.png").rename(pictures / "z.png")
    with pytest.raises(DriftError, match=r"1 file is gone: a\.png"):
        opened(tmp_path, taken, "take")
    (pictures / "z.png").rename(pictures / "a.png")
    os.utime(pictures / "a.png", (0, 0))
    assert paths(opened(tmp_path, taken)) == ["a.png", "b.png", "cats/a.jpg"]
    (pictures / "a.png").write_bytes(b"else")
    changed = opened(tmp_path, taken)  # the digests of rows tell pictures apart
    assert changed.read_columns(0, 1, ["path", "num_bytes"]).to_pylist() == [{"path": "a.png", "num_bytes": 4}]


def test_a_name_that_is_no_text_makes_an_error_row(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    pathlib.Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/\xff.png")).write_bytes(b"x")
    source = opened(tmp_path)
    [row] = source.read(0, 1)
    assert row.error is not None
    assert "is not UTF-8; rename the file" in row.error
    row.error.encode()
    assert source.read_columns(0, 1, ["path", "num_bytes"], {}).to_pylist() == [{"path": None, "num_bytes": None}]
