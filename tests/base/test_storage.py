"""What is durable, seen by the calls of fsync."""

import os
import pathlib

import pytest

from batchinf.base.storage import Folder, write_named


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
