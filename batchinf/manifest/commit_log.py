"""The bytes of a log of the manifest: JSON objects, one per line, in atomic commits. `log.py` appends them.

Each line ends with its checksum; the last line of a commit also has the commit's number. A commit begins only when the
one before it is on disk, so a crash tears only the last one. A flipped byte in the last commit looks like a torn tail,
and that commit counts as never written. Anywhere else it is reported as damage.
"""

import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder

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
