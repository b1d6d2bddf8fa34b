"""The site of the documents, built once as `make docs` does: no warning, nothing from other hosts, no gap."""

import html.parser
import os
import pathlib
import re
import subprocess
import sys

import pytest
import typer.main
import yaml

import batchinf
import jobs
from batchinf.cli import app

# Attributes whose file a browser loads by itself.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href", "object": "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=jobs.ROOT, env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


class Loads(html.parser.HTMLParser):
    """Collects what a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if value and name == LOADED.get(tag)]


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: pathlib.Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    loads = {page.name: Loads(page.read_text(encoding="utf-8")).found for page in pages}
    assert all(loads.values())
    assert {name: found for name, all_ in loads.items() if (found := [one for one in all_ if "//" in one])} == {}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"@import|url\(['\"]?https?:", styles) == []


@pytest.mark.slow
def test_the_reference_is_whole(site: pathlib.Path) -> None:
    commands = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert [name for name in typer.main.get_group(app).commands if f'id="batchinf-{name}"' not in commands] == []
    python = "".join(
        (site / "reference" / f"{name}.html").read_text(encoding="utf-8") for name in ("python", "exit-codes")
    )
    assert [name for name in batchinf.__all__ if not re.search(rf"\b{name}\b", python)] == []


@pytest.mark.slow
def test_what_only_the_tests_read_is_not_on_the_site(site: pathlib.Path) -> None:
    assert [page.name for page in site.rglob("*.html") if "<!-- run" in page.read_text(encoding="utf-8")] == []


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((jobs.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", batchinf.__version__)
    assert citation["license"] == "Apache-2.0"
