"""An append-only file of JSON objects, one per line, in atomic commits. Each log of the manifest is one.

Each line ends with its checksum; the last line of a commit also has the commit's number. A commit begins only when the
one before it is on disk, so a crash tears only the last one. A flipped byte in the last commit looks like a torn tail,
and that commit counts as never written. Anywhere else it is reported as damage.
"""

import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder, disk_error

Fields = dict[str, Any]

_CHECKSUM = b',"crc":"%08x"}\n'
_CHECKSUM_BYTES = len(_CHECKSUM % 0)


def encode_commits(commits: Iterable[Sequence[Fields]], num_before: int = 0) -> bytes:
    """The bytes of commits, each of one line or more, that come after `num_before` others."""
    data = []
    for number, lines in enumerate(commits, num_before + 1):
        data += [_encode(fields) for fields in lines[:-1]]
        data.append(_encode({**lines[-1], "commit": number}))
    return b"".join(data)


def read_lines(folder: Folder, name: str) -> Iterator[tuple[int, Fields]]:
    """(line number, fields) of the lines of whole commits, up to a torn tail. Raises OutputError for damage."""
    num_commits = 0
    commit: list[tuple[int, Fields]] = []
    with folder.path(name).open("rb") as file:
        for number, line in enumerate(file, 1):
            fields = _decode(line)
            if fields is None:
                # A line without a newline was the last one, even if the file has grown since.
                if line.endswith(b"\n") and _has_later_commit(file, num_commits + 1):
                    raise damage(folder, name, f"line {number} is not as it was written")
                return
            commit.append((number, fields))
            mark = fields.pop("commit", None)
            if mark is not None:
                num_commits += 1
                if mark != num_commits:
                    what = f"line {number} ends commit {mark}, but commit {num_commits} was expected"
                    raise damage(folder, name, what)
                yield from commit
                commit = []


def whole_lines(folder: Folder, name: str) -> Iterator[Fields]:
    """The fields of each undamaged line, wherever the damage is; for `check --repair`."""
    with folder.path(name).open("rb") as file:
        for line in file:
            if (fields := _decode(line)) is not None:
                fields.pop("commit", None)
                yield fields


def _has_later_commit(lines: Iterable[bytes], number: int) -> bool:
    marks = ((_decode(line) or {}).get("commit") for line in lines)
    return any(isinstance(mark, int) and mark > number for mark in marks)


def damage(folder: Folder, name: str, what: str) -> OutputError:
    """The error for a damaged file."""
    remedy = "restore it from a backup, or give the job another output.path"
    return OutputError(f"{folder.path(name)} is damaged: {what}; {remedy}")


def _encode(fields: Fields) -> bytes:
    body = json.dumps(fields, separators=(",", ":")).encode()
    return body[:-1] + _CHECKSUM % zlib.crc32(body)


def _decode(line: bytes) -> Fields | None:
    """A line's fields; None if the checksum is wrong. The checksum covers the line without the checksum itself."""
    body = line[:-_CHECKSUM_BYTES]
    if line[-_CHECKSUM_BYTES:] != _CHECKSUM % zlib.crc32(b"}", zlib.crc32(body)):
        return None
    try:
        fields: Fields = json.loads(body.decode() + "}")
    except (ValueError, RecursionError):  # a right checksum does not prove that we wrote the line
        return None
    return fields


def gone(path: pathlib.Path) -> OutputError:
    """The error for a log, or for all of them, that somebody else has taken away."""
    return OutputError(
        f"{path} was deleted or replaced while the job ran; restore the folder, or start a new job with --fresh"
    )


class CommitLog:
    """Appends to a log, which must exist and which no other process writes."""

    def __init__(
        self, folder: Folder, name: str, num_commits: int, first: Callable[[bytes], object] | None = None
    ) -> None:
        """num_commits: those that the file has. first: stores each commit elsewhere before; the file is a copy."""
        self._first = first
        self._is_behind = False
        self._path = folder.path(name)
        self._num_commits = num_commits
        self._is_torn = False
        try:
            self._file: BinaryIO = self._path.open("ab", buffering=0)
        except OSError as error:
            raise self._not_written(error) from error
        self._num_bytes = self._file.seek(0, os.SEEK_END)

    def commit(self, lines: Sequence[Fields]) -> None:
        """Append lines as one commit, durable on return. Raises OutputError after a half-written commit is removed."""
        data = encode_commits([lines], self._num_commits)
        if self._first is not None:
            if self._is_behind:
                raise OutputError(f"{self._path} lacks a commit since a disk error; run the same command again")
            self._first(data)
            self._is_behind = True
        try:
            self._append(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._mend()
            raise self._not_written(error) from error
        self._num_bytes += len(data)
        self._num_commits += 1
        self._is_behind = False
        faults.point("manifest.after_fsync")

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        self._mend()
        faults.point("manifest.before_write")
        self._is_torn = True
        # Two writes, so that tests can kill between them. It costs 5 µs; the fsync takes hundreds.
        half = len(data) // 2
        self._write(data[:half])
        faults.point("manifest.mid_line")
        self._write(data[half:])
        faults.point("manifest.after_write")
        os.fsync(self._file.fileno())
        self._check_place()
        self._is_torn = False

    def _check_place(self) -> None:
        """Raise OutputError if the file was deleted or replaced: no reader would see what is written to it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return
        raise gone(self._path)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _mend(self) -> None:
        """Cut off what a failed commit left behind."""
        if self._is_torn:
            os.ftruncate(self._file.fileno(), self._num_bytes)
            self._is_torn = False

    def _not_written(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {disk_error(error, self._path)}")
