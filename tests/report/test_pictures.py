"""The images of rows on the pages of `inspect` and `report`: small copies of those that the job ran, and no others."""

import base64
import html.parser
import io
import pathlib
import re
import shutil

import numpy as np
import pytest
from pictures import VISION, data_url, png, write_lines
from PIL import Image

import batchinf.job.pictures
import jobs
from batchinf.commands.whole_row import read_whole_row
from batchinf.report.page import report_page

HOSTILE = "\"><script>document.title='ran'<b>.png"
COLOURS = {HOSTILE: (200, 30, 40), "later.png": (20, 160, 60), "gone.png": (30, 60, 200)}
ASK = [{"role": "user", "content": [{"type": "image", "column": "photos"}, {"type": "text", "text": "Say {{ id }}."}]}]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished job. Since then, one of its pictures is another one, and one is gone."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, colour in COLOURS.items():
        Image.new("RGB", (900, 600), colour).save(folder / name, "png")
    rows = [
        {"id": "shown", "photos": [HOSTILE, data_url(png(np.full((20, 30, 3), 90)))]},
        {"id": "lost", "photos": ["later.png", "gone.png"]},
        {"id": "none", "photos": []},
        {"id": "wrong", "photos": ["never.png", "later.png"]},
    ]
    path = jobs.spec_of(
        folder,
        model=str(VISION),
        input={"path": str(write_lines(folder / "rows.jsonl", rows)), "messages": ASK},
        sampling={"max_tokens": 4, "temperature": 0.0, "logprobs": 0},
        parallel={"data_parallel_size": 1},
        output={"keep_columns": []},
        max_error_rate=1.0,
    )
    jobs.finish(path)
    shutil.copy(folder / "gone.png", folder / "later.png")
    (folder / "gone.png").unlink()
    return folder / "out"


class Page(html.parser.HTMLParser):
    """The elements of a page with a source, and the names of all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]


def copies_of(text: str) -> list[Image.Image]:
    """The pictures of a page, which loads nothing else and runs nothing."""
    page = Page(text)
    assert "script" not in page.tags
    assert 'img-src data:"' in text
    pictures = [source for source in page.sources if not source.startswith("#")]
    mark = "data:image/jpeg;base64,"
    assert all(source.startswith(mark) for source in pictures)
    return [Image.open(io.BytesIO(base64.b64decode(source.removeprefix(mark)))) for source in pictures]


def test_the_pictures_of_a_row_are_listed(out: pathlib.Path) -> None:
    pictures = read_whole_row(str(out), "shown").pictures
    assert [picture.about.rpartition(", ")[0] for picture in pictures] == ["900 × 600, PNG", "30 × 20, PNG"]
    assert pictures[1].name == "a data: URL in the input"
    assert [picture.data_url for picture in pictures] == [None, None]


def test_another_picture_in_the_place_of_one_is_not_shown(out: pathlib.Path) -> None:
    changed, gone = read_whole_row(str(out), "lost").pictures
    assert "it has changed since the job ran the row" in changed.note
    assert "it is not there any more: 'gone.png' does not exist" in gone.note


def test_error_rows_and_rows_without_images(out: pathlib.Path) -> None:
    assert read_whole_row(str(out), "none").pictures == ()
    missing, loaded = read_whole_row(str(out), "wrong").pictures
    assert missing.note == f"'never.png' does not exist; relative paths begin in {out.parent}"
    assert loaded.about


def test_head_has_formats_and_sizes(out: pathlib.Path) -> None:
    lines = jobs.run("head", out, COLUMNS="140").stdout.splitlines()
    [of_two] = [line for line in lines if line.startswith("shown")]
    assert "PNG 900 × 600 and 1 more" in of_two
    assert not any("×" in line for line in lines if line.startswith(("none", "wrong")))
    narrow = jobs.run("head", out, COLUMNS="36").stdout
    assert "image_formats, image_widths, image_heights: see --columns" in " ".join(narrow.split())


def test_the_report_shows_the_pictures_of_its_sample_rows(out: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = report_page(str(out))
    groups = page.count('<td class="text">')
    assert 0 < len(copies_of(page)) <= 2 * groups
    assert "it has changed since the job ran the row" in page
    monkeypatch.setattr(batchinf.job.pictures, "_MOST_BYTES", 2000)
    bounded = report_page(str(out))
    assert "the page has no room for more pictures" in bounded
    assert sum(map(len, re.findall('data:image[^"]*', bounded))) <= 2000


def test_a_report_without_the_input_says_why_it_has_no_pictures(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows = out.parent / "rows.jsonl"
    rows.rename(tmp_path / "rows.jsonl")
    try:
        page = report_page(str(out))
        assert "rows.jsonl" in read_whole_row(str(out), "shown").pictures_note
    finally:
        (tmp_path / "rows.jsonl").rename(rows)
    assert copies_of(page) == []
    assert "not shown: " in page
