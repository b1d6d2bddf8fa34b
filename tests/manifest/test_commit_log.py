import errno
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.commit_log import encode_commits, read_lines
from batchinf.manifest.lines import Beginning, record_line
from batchinf.manifest.log import Manifest

NAME = "manifest/000001.jsonl"
COMMITS: list[list[dict[str, Any]]] = [
    [{"kind": "a", "text": "é\n\x00\ud800"}, {"kind": "b"}],
    [{"kind": "c", "value": [1, 2.5, None, {"commit": 9, "crc": "0"}]}],
    [{"kind": "d"}, {"kind": "e"}, {"kind": "f"}],
    [{"kind": "g"}],
    [{"kind": "h"}, {"kind": "i"}],
]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make("manifest")
    return folder


def commit(manifest: Manifest, lines: list[dict[str, Any]]) -> None:
    """Commit lines of any kind."""
    manifest._lines += lines
    manifest.commit()


def lines_of(commits: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [line for commit in commits for line in commit]


def read(folder: Folder) -> list[dict[str, Any]]:
    return [fields for _, fields in read_lines(folder, NAME)]


def write(folder: Folder, data: bytes) -> None:
    folder.path(NAME).write_bytes(data)


def ends() -> list[int]:
    """Where each commit ends, in bytes; the first stands for no commit at all."""
    return [len(encode_commits(COMMITS[:num])) for num in range(len(COMMITS) + 1)]


def whole_at(offset: int) -> int:
    """Commits that end at or before an offset."""
    return sum(end <= offset for end in ends()[1:])


def test_what_is_committed_is_read(folder: Folder) -> None:
    manifest = Manifest(folder, 1)
    for num, lines in enumerate(COMMITS):
        assert read(folder) == lines_of(COMMITS[:num])
        commit(manifest, lines)
    manifest.close()
    assert folder.read(NAME) == encode_commits(COMMITS)
    assert list(read_lines(folder, NAME)) == list(enumerate(lines_of(COMMITS), 1))


def test_commits_follow_those_with_which_a_log_is_created(folder: Folder) -> None:
    manifest = Manifest(folder, 1, new_id="job")
    commit(manifest, COMMITS[0])
    manifest.close()
    assert folder.read(NAME) == encode_commits([[record_line(Beginning("job"))], COMMITS[0]])


def test_lines_are_json_that_anyone_can_read(folder: Folder) -> None:
    # crc32 of `{"kind":"a"}` and of `{"kind":"b","commit":7}`.
    assert encode_commits([[{"kind": "a"}, {"kind": "b"}]], 6) == (
        b'{"kind":"a","crc":"f87f4e9d"}\n{"kind":"b","commit":7,"crc":"59f4e76b"}\n'
    )


def test_a_crash_at_any_byte_leaves_whole_commits(folder: Folder) -> None:
    data = encode_commits(COMMITS)
    write(folder, data)
    for size in reversed(range(len(data) + 1)):
        os.truncate(folder.path(NAME), size)
        assert read(folder) == lines_of(COMMITS[: whole_at(size)])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0), st.integers(0), st.binary(max_size=200))
def test_a_torn_commit_may_hold_anything(folder: Folder, start: int, length: int, garbage: bytes) -> None:
    # After a power cut pages of the last commit may be missing, zero or old, in any order, each in its place.
    begin, end = ends()[-2:]
    start = begin + start % (end - begin)
    tail = bytearray(encode_commits(COMMITS))
    length %= end - start + 1
    tail[start : start + length] = ((garbage or b"\0") * length)[:length]
    if bytes(tail) != encode_commits(COMMITS):
        write(folder, bytes(tail))
        assert read(folder) == lines_of(COMMITS[:-1])


def test_every_bit_that_flips_is_noticed(folder: Folder) -> None:
    data, last = encode_commits(COMMITS), ends()[-2]
    write(folder, data)
    # In place: a file system may flush each file that is written anew.
    with folder.path(NAME).open("r+b", buffering=0) as file:
        for place in range(8 * len(data)):
            offset, bit = divmod(place, 8)
            os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << bit]), offset)
            if offset >= last:
                assert read(folder) == lines_of(COMMITS[:-1])
            else:
                with pytest.raises(
                    OutputError, match=r"000001.jsonl is damaged: line \d+ .*; restore it from a backup"
                ):
                    read(folder)
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert read(folder) == lines_of(COMMITS)


def test_a_lost_line_end_takes_at_most_two_commits(folder: Folder) -> None:
    # The last commit, of one line, runs into the one before it: together they are a torn tail.
    data = encode_commits(COMMITS[:4])
    write(folder, data[: ends()[3] - 1] + b"?" + data[ends()[3] :])
    assert read(folder) == lines_of(COMMITS[:2])


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_commit_that_is_missing_is_damage(folder: Folder, cut: int) -> None:
    write(folder, encode_commits(COMMITS)[: ends()[cut]] + encode_commits(COMMITS)[ends()[cut + 1] :])
    with pytest.raises(OutputError, match=f"ends commit {cut + 2}, but commit {cut + 1} was expected"):
        read(folder)


# -- writes that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 20, len(encode_commits([COMMITS[1]], 1)) - 5])
def test_a_full_disk_is_recovered_from(folder: Folder, room: int) -> None:
    manifest = Manifest(folder, 1)
    commit(manifest, COMMITS[0])
    before = folder.read(NAME)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*000001.jsonl: file too large; .*: all finished parts"):
            commit(manifest, COMMITS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.read(NAME) == before
    manifest.commit()  # the lines have waited
    manifest.close()
    assert folder.read(NAME) == encode_commits(COMMITS[:2])


COMMIT_TWICE = """
import sys
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder
from batchinf.manifest.log import Manifest
manifest = Manifest(Folder(sys.argv[1]), 1)
for value in range(3):
    try:
        manifest._lines += [{"kind": "a", "value": value}, {"kind": "b"}]
        manifest.commit()
    except OutputError as error:
        print(error)
        manifest.discard()
"""


def commit_with_fault(folder: Folder, fault: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "BATCHINF_FAULTS": fault}
    command = [sys.executable, "-c", COMMIT_TWICE, os.fspath(folder.root)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("step", ["before_write", "mid_line", "after_write"])
def test_a_write_that_fails_leaves_nothing(folder: Folder, step: str) -> None:
    done = commit_with_fault(folder, f"manifest.{step}:2=raise {errno.ENOSPC}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "000001.jsonl: no space left on device; make room there, then run the same command again" in done.stdout
    assert folder.read(NAME) == encode_commits([[{"kind": "a", "value": value}, {"kind": "b"}] for value in (0, 2)])


@pytest.mark.parametrize(
    ("step", "num"), [("before_write", 1), ("mid_line", 1), ("after_write", 2), ("after_fsync", 2)]
)
def test_killed_while_committing(folder: Folder, step: str, num: int) -> None:
    assert commit_with_fault(folder, f"manifest.{step}:2=kill").returncode == -9
    assert read(folder) == lines_of([[{"kind": "a", "value": value}, {"kind": "b"}] for value in range(num)])


def test_a_log_that_does_not_open(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OutputError, match=r"cannot create .*: no such file or directory"):
        Manifest(Folder(tmp_path / "missing"), 1)
