"""`events.jsonl`: whole lines are read, whatever happens to the others, and no write of it ends a job."""

import os
import pathlib

import pytest
from headers import header_of

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.events import EVENTS_FILE, EventLine, append_events, read_events
from batchinf.manifest.lock import LOCK, JobLock, LockLost
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import last_epoch, read_state

AT = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("manifest")
    return folder


def events(*names: str) -> list[EventLine]:
    return [EventLine(name, AT, {"replica": 1, "cause": "Ü"}) for name in names]


def names(folder: Folder) -> list[str]:
    return [event.name for event in read_events(folder)]


def test_events_are_read_as_they_were_written(folder: Folder) -> None:
    append_events(folder, events("ready", "death"))
    append_events(folder, events("ready"))
    assert names(folder) == ["ready", "death", "ready"]
    event = read_events(folder)[1]
    assert (event.at, event.time) == (AT, 1767225600.0)
    assert (event.fields["replica"], event.fields["cause"]) == (1, "Ü")


def test_a_file_cut_at_any_byte_has_the_whole_lines_before_and_all_later_ones(folder: Folder) -> None:
    append_events(folder, events("first", "second"))
    data = folder.read(EVENTS_FILE)
    for length in range(len(data) + 1):
        folder.path(EVENTS_FILE).write_bytes(data[:length])
        append_events(folder, events("later"))
        # A line is whole without its newline, too.
        num_whole = data[:length].count(b"}\n") + (data[:length].endswith(b"}"))
        assert names(folder) == [*["first", "second"][:num_whole], "later"]


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"1", b'{"name": 1, "at": 2}', b'{"name": "x", "at": "now"}', b"\xff"]
)
def test_other_lines_are_left_out(folder: Folder, line: bytes) -> None:
    append_events(folder, events("first"))
    with folder.path(EVENTS_FILE).open("ab") as file:
        file.write(line + b"\n")
    append_events(folder, events("later"))
    assert names(folder) == ["first", "later"]


def test_no_file_is_no_event(folder: Folder) -> None:
    assert read_events(folder) == []


def test_events_are_written_after_the_commit_and_only_by_the_holder(folder: Folder) -> None:
    lock = JobLock(folder)
    lock.acquire(lambda: last_epoch(folder))
    manifest = Manifest(folder, 1, lock)
    manifest.record(header_of())
    manifest.event("epoch", epoch=1)
    assert names(folder) == []
    held = folder.read(LOCK)
    folder.delete(LOCK)
    with pytest.raises(LockLost):
        manifest.commit()
    assert names(folder) == []
    folder.write_atomic(LOCK, held)
    manifest.commit()
    assert (names(folder), read_state(folder) is not None) == (["epoch"], True)
    size = folder.path("manifest/000001.jsonl").stat().st_size
    manifest.event("death", cause="signal 9")
    manifest.commit()
    assert names(folder) == ["epoch", "death"]
    assert folder.path("manifest/000001.jsonl").stat().st_size == size
    manifest.event("never")
    manifest.discard()
    manifest.commit()
    assert names(folder) == ["epoch", "death"]
    manifest.close()
    lock.release()


def test_a_file_that_cannot_be_written_ends_nothing(folder: Folder) -> None:
    folder.make(EVENTS_FILE)
    append_events(folder, events("ready"))
    os.rmdir(folder.path(EVENTS_FILE))
    folder.path(EVENTS_FILE).symlink_to(folder.path("elsewhere"))
    with pytest.raises(OutputError):  # but nobody writes through a link
        append_events(folder, events("ready"))
    assert not folder.exists("elsewhere")
