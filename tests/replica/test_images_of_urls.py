"""Jobs with images from a server over TLS: it is busy, stalls, drips and lies, and the job is killed and resumed."""

import hashlib
import os
import pathlib
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from picture_server import PICTURE, Server, certificates, serving
from pictures import VISION, write_lines

import jobs
from batchinf.base.storage import Folder
from batchinf.prompts.url_cache import UrlCache

SAMPLES = sorted((jobs.ROOT / "sample_data" / "pictures").iterdir())
ASK = [{"role": "user", "content": [{"type": "text", "text": "{{ id }}: "}, {"type": "image", "column": "photo"}]}]
# Paths of the server → the type of the error.
BAD = {
    "status/404": "image_not_found",
    "status/500": "image_unavailable",
    "stall/1": "image_timeout",
    "drip/body": "image_timeout",
    "cut/1": "image_unavailable",
    "long/1": "image_too_large",
    "short/1": "image_broken",
    "garbage/1": "image_unavailable",
    "to/http:%2F%2F127.0.0.1:1%2Fx": "image_forbidden",
}
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pathlib.Path]:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(authority: tuple[Any, pathlib.Path]) -> Iterator[Server]:
    with serving(tls=authority[0]) as made:
        made.pictures = {path.name: path.read_bytes() for path in SAMPLES}
        yield made


def spec_of(folder: pathlib.Path, photos: list[str], **images: Any) -> pathlib.Path:
    folder.mkdir()
    lines = [{"id": f"row-{number}", "photo": photo} for number, photo in enumerate(photos)]
    where = {"path": str(write_lines(folder / "rows.jsonl", lines)), "messages": ASK, "images": images}
    return jobs.spec_of(folder, model=str(VISION), input=where, sampling={"max_tokens": 4, "temperature": 0.0},
                        parallel={"data_parallel_size": 1}, output={"keep_columns": [], "rows_per_shard": 8},
                        max_error_rate=1.0, max_restarts=0, checkpoint_interval_s=0.01)  # fmt: skip


def run(path: pathlib.Path, authority: tuple[Any, pathlib.Path], *arguments: str, faults: str = "") -> Any:
    """In a process that reads the certificates anew."""
    return jobs.run("run", path, *arguments, prefix=["env"], faults=faults, SSL_CERT_FILE=str(authority[1]))


def rows_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [{**row, "attempts": None, "error_message": None} for row in jobs.rows_of(path.parent / "out")]


@pytest.mark.slow
def test_a_killed_job_fetches_no_image_twice(
    server: Server, authority: tuple[Any, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    names = [path.name for path in SAMPLES]
    urls = [f"{server.url}/image/{name}?key=SENTINEL" for name in names]
    # The last rows name the images of the first rows again.
    photos = [*urls[:10], *(f"{server.url}/{bad}" for bad in BAD), f"{server.url}/busy/429", f"{server.url}/busy/503",
              *urls]  # fmt: skip
    path = spec_of(tmp_path / "job", photos, hosts=[server.host], timeout_s=4, retries=3)
    killed = run(path, authority, faults="worker.store:6=kill")
    assert killed.returncode != 0
    num_before = len(server.asked)
    assert num_before > 0
    assert list((tmp_path / "job" / "out" / "images").rglob("*"))
    done = run(path, authority)
    assert done.returncode == 0, done.stderr
    asked = Counter(server.asked)
    assert [asked[f"/image/{name}?key=SENTINEL"] for name in names] == [1] * len(names)
    assert (asked["/busy/429"], asked["/busy/503"]) == (3, 3)
    out = tmp_path / "job" / "out"
    assert not (out / "images").exists()
    assert not [file for file in out.rglob("*.log") if b"SENTINEL" in file.read_bytes()]

    rows = rows_of(path)
    bad = range(10, 10 + len(BAD))
    assert [rows[number]["error_type"] for number in bad] == list(BAD.values())
    # The same pictures from files.
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "busy.png").write_bytes(PICTURE)
    files = [f"{SAMPLES[0].parent}/{name}" for name in names]
    busy = str(tmp_path / "files" / "busy.png")
    local = [*files[:10], *["gone.png"] * len(BAD), busy, busy, *files]
    folders = [str(SAMPLES[0].parent), str(tmp_path / "files")]
    of_files = spec_of(tmp_path / "local", local, folders=folders)
    jobs.finish(of_files)
    same = [number for number in range(len(photos)) if number not in bad]
    expected = rows_of(of_files)
    assert [rows[number] for number in same] == [expected[number] for number in same]

    # A retry fetches again, and notices another picture.
    server.pictures[names[0]] = SAMPLES[1].read_bytes()
    changed = run(path, authority, "--retry", "row_index < 2")
    assert changed.returncode == 2
    assert f"row 0: image 1 ('{server.url}/image/{names[0]}') has changed" in changed.stderr
    assert rows_of(path) == rows


@pytest.mark.slow
def test_a_server_that_no_authority_vouches_for(
    server: Server, authority: tuple[Any, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    path = spec_of(tmp_path / "job", [f"{server.url}/image/1"], hosts=[server.host])
    jobs.finish(path)
    [row] = jobs.rows_of(tmp_path / "job" / "out")
    assert row["error_type"] == "image_unavailable"
    assert "certificate" in row["error_message"].lower()


def _name(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


def _set_age(file: pathlib.Path, seconds: int) -> None:
    os.utime(file, (1_700_000_000 + seconds,) * 2)


def test_the_cache_keeps_the_images_that_were_used_last(tmp_path: pathlib.Path) -> None:
    cache = UrlCache(Folder(tmp_path / "images"), 1000 * 20)
    for number in range(60):
        cache.put(f"https://a/{number}", bytes([number]) * 1000)
        assert cache.get("https://a/0") == bytes(1000)
        # Modification times of one tick would be equal.
        [file] = (tmp_path / "images").glob(f"{_name(f'https://a/{number}')}*")
        _set_age(file, number)
        _set_age(next((tmp_path / "images").glob(f"{_name('https://a/0')}*")), number + 1)
    sizes = [file.stat().st_size for file in (tmp_path / "images").iterdir()]
    assert 10_000 < sum(sizes) <= 22_000
    assert cache.get("https://a/59") == bytes([59]) * 1000
    assert cache.get("https://a/1") is None
    assert not [file for file in (tmp_path / "images").iterdir() if "https" in file.name]


def test_a_cache_that_cannot_write_says_so_once(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").write_text("no folder")
    cache = UrlCache(Folder(tmp_path / "images"), 1 << 20)
    for _ in range(2):
        cache.put("https://a/b", b"picture")
    assert cache.get("https://a/b") is None
    assert capfd.readouterr().err.count("warning: an image of a URL cannot be kept in ") == 1


def test_a_torn_file_of_the_cache_is_not_used(tmp_path: pathlib.Path) -> None:
    cache = UrlCache(Folder(tmp_path / "images"), 1 << 20)
    cache.put("https://a/b", b"picture")
    assert cache.get("https://a/b") == b"picture"
    [file] = (tmp_path / "images").iterdir()
    for torn in (file.read_bytes()[:-1], b"", file.read_bytes()[:32] + b"Picture"):
        file.write_bytes(torn)
        assert cache.get("https://a/b") is None
    cache.put("https://a/b", b"x" * (1 << 18))  # larger than its share
    assert file.read_bytes() == file.read_bytes()[:32] + b"Picture"
