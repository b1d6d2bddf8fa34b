"""What is durable, seen by the calls of fsync."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator

import pytest

from batchinf.base.errors import OutputError
from batchinf.base.slices import CUT_RECORD
from batchinf.base.storage import Folder, reason, write_named
from batchinf.manifest.state import read_jobs


def test_a_folder_is_durable_before_files_are_put_into_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    folder = Folder(tmp_path / "a" / "b")
    folder.make("c")
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    folder.make("c")
    assert len(synced) == 3


def test_a_folder_is_made_where_names_may_not_be_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: pathlib.Path, flags: int, *more: int) -> int:
        if path == tmp_path:
            raise PermissionError(13, "permission denied", str(path))
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    Folder(tmp_path / "a").make("c")
    assert (tmp_path / "a" / "c").is_dir()


def test_links_and_devices_stay_when_they_are_written(tmp_path: pathlib.Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("old")
    link.symlink_to(file)
    write_named(link, b"new")
    assert (link.is_symlink(), file.read_text()) == (True, "new")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_named(pipe, b"new")
    assert (pipe.is_fifo(), os.read(reader, 100)) == (True, b"new")
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_named(pathlib.Path(""), b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


@pytest.mark.parametrize("name", ["manifest/000001.jsonl", "parts/part-000000.parquet", "job.yaml", CUT_RECORD])
def test_a_pipe_in_the_folder_of_a_job_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    def end(*_: object) -> None:
        raise TimeoutError

    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(10)
    try:
        with pytest.raises(OutputError, match=f"{name} is a named pipe"):
            list(read_jobs(str(tmp_path)))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_sizes_of_files_are_known_if_one_of_them_goes_meanwhile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    scan = os.scandir

    @contextlib.contextmanager
    def and_delete(path: pathlib.Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = list(entries)
            (tmp_path / "b").unlink()
            yield iter(found)

    monkeypatch.setattr(os, "scandir", and_delete)
    assert Folder(tmp_path).sizes("") == {"a": 1, "c": 1}


def test_a_named_file_of_others_stays(tmp_path: pathlib.Path) -> None:
    file, link, empty = (tmp_path / name for name in ("file", "link", "empty"))
    link.symlink_to(file)
    file.write_text("mine")
    empty.touch()
    for path in (file, link):
        with pytest.raises(FileExistsError):
            write_named(path, b"mark 1", b"mark")
    assert file.read_text() == "mine"
    write_named(empty, b"mark 1", b"mark")
    write_named(empty, b"mark 2", b"mark")
    assert empty.read_text() == "mark 2"


def test_the_reason_of_an_error_is_one_line() -> None:
    assert reason(OSError("Couldn't read:\n type \\u000f\n")) == "couldn't read: type \\u000f"
