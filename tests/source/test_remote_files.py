"""Inputs that a URL names: fetched once, known again, and one clear line where they cannot be had."""

import contextlib
import functools
import gzip
import http.server
import json
import os
import pathlib
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inputs import FILES, FORMATS, check, data_files

from batchinf.base.errors import DriftError, InputError
from batchinf.source import remote
from batchinf.source.files import InputLocation
from batchinf.source.formats import parquet
from batchinf.source.remote import find_remote
from batchinf.source.rows import open_source


class Server(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, which gives Last-Modified, but no ranges. What it is asked is noted."""

    asked: list[str]
    says_version = True
    cuts: str | None = None  # a path of whose content only half is sent

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == self.cuts:
            data = pathlib.Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        elif self.path.startswith("/secret"):
            self.send_error(403)
        else:
            self._answer(super().do_GET)

    def _answer(self, answer: Callable[[], None]) -> None:
        """`/moved/FILE` leads to a signed URL of a file, as object stores give them. `/broken?…` fails."""
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"{self.path.removeprefix('/moved')}?X-Amz-Signature=SENTINEL")
            self.end_headers()
        elif self.path.startswith("/broken"):
            self.send_error(500)
        else:
            answer()

    def do_HEAD(self) -> None:
        if self.path.startswith("/secret"):
            self.send_error(403)
        else:
            self._answer(super().do_HEAD)

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.says_version:
            super().send_header(keyword, value)


class Served:
    """A folder behind a URL."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.handler = type("Handler", (Server,), {"asked": []})
        handler = functools.partial(self.handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def fetched(self) -> list[str]:
        """Paths of files whose content was sent."""
        return [path for path in self.handler.asked if not path.endswith("/")]

    def close(self) -> None:
        """Switch it off."""
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Served]:
    (tmp_path / "web").mkdir()
    found = Served(tmp_path / "web")
    yield found
    found.close()
    fsspec.filesystem("http").clear_instance_cache()


def write(path: pathlib.Path, *numbers: int) -> None:
    path.write_text("".join(json.dumps({"x": number}) + "\n" for number in numbers))


def rows_of(url: str, cache: pathlib.Path, taken: tuple[str, ...] = (), new: str = "refuse") -> list[object]:
    source = open_source(InputLocation(url), cache, taken, new)
    found = [row.values["x"] for row in source.read(0, source.num_rows)]
    source.close()
    return found


def test_a_signed_url_to_which_a_server_leads_is_kept_nowhere(served: Served, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "web" / "a.jsonl", 1, 2)
    assert rows_of(f"{served.url}/moved/a.jsonl", tmp_path / "cache") == [1, 2]
    assert any("SENTINEL" in path for path in served.handler.asked)
    for path in (tmp_path / "cache").rglob("*"):
        assert path.is_dir() or b"SENTINEL" not in path.read_bytes(), path
    with pytest.raises(InputError, match="broken") as caught:
        rows_of(f"{served.url}/moved/broken.jsonl", tmp_path / "cache")
    assert "SENTINEL" not in str(caught.value)


@pytest.mark.parametrize("format", [name for name in FILES if name != "images"])
def test_every_format_over_http_is_what_the_files_are(
    format: str, served: Served, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 60)
    path, expected = FORMATS[format](tmp_path / "web")
    local = open_source(InputLocation(path), tmp_path / "local cache")
    local.close()
    name = path.removeprefix(str(tmp_path / "web")).lstrip("/")
    urls = [f"{served.url}/{name}"] if name and "*" not in name else [f"{served.url}/{file.name}" for file in
            data_files(tmp_path / "web")] if "*" in name else [f"{served.url}/"]  # fmt: skip
    if len(urls) == 1:
        found = open_source(InputLocation(urls[0]), tmp_path / "cache")
        assert found.fingerprint == local.fingerprint
        num_fetched = len(served.fetched)
        served.close()
        again = open_source(InputLocation(urls[0]), tmp_path / "cache", found.fingerprints)
        for source in (found, again):
            check(source, expected)
            source.close()
        assert len(served.fetched) == num_fetched
    else:
        num_rows = 0
        for number, url in enumerate(urls):
            found = open_source(InputLocation(url), tmp_path / f"cache {number}")
            num_rows += found.num_rows
            found.close()
        assert num_rows == len(expected)


def test_pictures_behind_a_url_are_refused(served: Served, tmp_path: pathlib.Path) -> None:
    FORMATS["images"](tmp_path / "web")
    with pytest.raises(InputError, match="copy them to a folder, or make a file with their URLs in a column"):
        open_source(InputLocation(f"{served.url}/"), tmp_path / "cache")


@pytest.mark.parametrize("kind", ["file", "memory", "zip", "folder", "glob"])
def test_other_file_systems(kind: str, tmp_path: pathlib.Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write(data / "a.jsonl", 1, 2)
    (data / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 3}\n'))
    (data / "_x.jsonl").write_text("not data")
    if kind == "memory":
        memory = fsspec.filesystem("memory")
        memory.pipe("/data/a.jsonl", (data / "a.jsonl").read_bytes())
        memory.pipe("/data/b.jsonl.gz", (data / "b.jsonl.gz").read_bytes())
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as packed:
        for name in ("a.jsonl", "b.jsonl.gz"):
            packed.write(data / name, name)
    url = {
        "file": f"file://{data}/a.jsonl",
        "memory": "memory://data",
        "zip": f"zip://*.jsonl*::file://{tmp_path}/x.zip",
        "folder": f"file://{data}",
        "glob": f"file://{data}/[ab].*",
    }[kind]
    _, files = find_remote(InputLocation(url))
    assert [file.name for file in files] == (["a.jsonl"] if kind == "file" else ["a.jsonl", "b.jsonl.gz"])
    assert rows_of(url, tmp_path / "cache") == ([1, 2] if kind == "file" else [1, 2, 3])
    if kind == "memory":
        fsspec.filesystem("memory").rm("/data", recursive=True)
    (taken,) = (path.stem for path in (tmp_path / "cache" / "versions").iterdir())
    shutil.rmtree(data)
    (tmp_path / "x.zip").unlink()
    assert rows_of(url, tmp_path / "cache", (taken,)) == ([1, 2] if kind == "file" else [1, 2, 3])


def test_only_what_is_new_is_fetched(served: Served, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "web" / "b.jsonl", 1, 2)
    write(tmp_path / "web" / "c.jsonl", 3)
    first = open_source(InputLocation(f"{served.url}/"), tmp_path / "cache")
    first.close()
    write(tmp_path / "web" / "a.jsonl", 4)
    served.handler.asked.clear()
    assert rows_of(f"{served.url}/", tmp_path / "cache", first.fingerprints) == [1, 2, 3]
    assert served.handler.asked == []
    assert rows_of(f"{served.url}/", tmp_path / "cache", first.fingerprints, "take") == [1, 2, 3, 4]
    assert served.fetched == ["/a.jsonl"]
    write(tmp_path / "web" / "c.jsonl", 5)
    os.utime(tmp_path / "web" / "c.jsonl", (1, 1))
    with pytest.raises(DriftError, match=r"1 file is changed: c\.jsonl"):
        rows_of(f"{served.url}/", tmp_path / "cache", first.fingerprints, "take")


def test_a_version_that_nobody_says_is_told_by_the_content(served: Served, tmp_path: pathlib.Path) -> None:
    served.handler.says_version = False
    write(tmp_path / "web" / "a.jsonl", 1, 2)
    url = f"{served.url}/a.jsonl"
    first = open_source(InputLocation(url), tmp_path / "cache")
    first.close()
    assert rows_of(url, tmp_path / "cache", first.fingerprints, "take") == [1, 2]
    assert served.fetched == ["/a.jsonl"] * 2
    write(tmp_path / "web" / "a.jsonl", 1, 3)
    with pytest.raises(DriftError, match=r"1 file is changed: a\.jsonl"):
        rows_of(url, tmp_path / "cache", first.fingerprints, "take")


def test_another_url_is_looked_at(served: Served, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "web" / "a.jsonl", 1, 2)
    write(tmp_path / "web" / "b.jsonl", 1, 2)
    write(tmp_path / "web" / "c.jsonl", 3, 4)
    first = open_source(InputLocation(f"{served.url}/a.jsonl"), tmp_path / "cache")
    first.close()
    assert rows_of(f"{served.url}/b.jsonl", tmp_path / "cache", first.fingerprints) == [1, 2]
    with pytest.raises(DriftError, match=r"1 file is gone: a\.jsonl"):
        rows_of(f"{served.url}/c.jsonl", tmp_path / "cache", first.fingerprints)


def test_a_lost_copy_is_fetched_again(served: Served, tmp_path: pathlib.Path) -> None:
    write(tmp_path / "web" / "a.jsonl", 1, 2)
    url = f"{served.url}/a.jsonl"
    first = open_source(InputLocation(url), tmp_path / "cache")
    first.close()
    for path in (tmp_path / "cache").glob("*.lines"):
        path.write_bytes(b"torn")
    assert rows_of(url, tmp_path / "cache", first.fingerprints) == [1, 2]
    assert len(served.fetched) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none.jsonl", "{url}/none.jsonl does not exist: correct the URL, or put the file there"),
        ("/secret.jsonl", "{url}/secret.jsonl cannot be read: no permission; give credentials in the environment, in "
                          "the way of its library"),
        ("/*.csv", "no file matches {url}/*.csv; correct the URL, or put it in quotes if a shell expanded it"),
        ("/x.yaml", "the ending of x.yaml is not known; the formats are"),
        ("/half.jsonl", "{url}/half.jsonl cannot be read: "),
    ],
)  # fmt: skip
def test_one_clear_line_for_what_cannot_be_had(path: str, message: str, served: Served, tmp_path: pathlib.Path) -> None:
    served.handler.cuts = "/half.jsonl"
    for name in ("x.yaml", "half.jsonl"):
        write(tmp_path / "web" / name, *range(1000))
    with pytest.raises(InputError) as raised:
        rows_of(served.url + path, tmp_path / "cache")
    assert str(raised.value).startswith(message.format(url=served.url))
    assert "\n" not in str(raised.value)


def test_one_clear_line_without_network_package_or_protocol(served: Served, tmp_path: pathlib.Path) -> None:
    served.close()
    for path in ("a.jsonl", "", "*.jsonl"):
        with pytest.raises(InputError, match="check the URL, the network, and credentials in the environment"):
            rows_of(f"{served.url}/{path}", tmp_path / "cache")
    with pytest.raises(InputError, match=r"nothing://a\.jsonl cannot be read: Protocol not known: nothing; check"):
        rows_of("nothing://a.jsonl", tmp_path / "cache")
    with contextlib.suppress(ImportError):
        import adlfs  # noqa: F401

        return
    with pytest.raises(InputError, match=r"abfs://x/a\.jsonl cannot be read, as a package is missing: Install adlfs"):
        rows_of("abfs://x/a.jsonl", tmp_path / "cache")


def test_a_file_that_ends_early_is_not_taken_for_whole(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "a.jsonl", 1, 2)
    _, (file,) = find_remote(InputLocation(f"file://{tmp_path}/a.jsonl"))
    assert isinstance(file, remote.RemoteFile)
    os.truncate(tmp_path / "a.jsonl", 9)
    with pytest.raises(InputError, match="ended after 9 of 18 bytes; try again"), file.open() as stream:
        stream.read()


def test_a_large_row_group_is_spooled_and_its_copy_dropped(
    served: Served, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 1)
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "web" / "a.parquet")
    assert rows_of(f"{served.url}/a.parquet", tmp_path / "cache") == [1, 2, 3]
    assert {path.suffix for path in (tmp_path / "cache").glob("*.*.*")} == {".rows", ".batches"}
