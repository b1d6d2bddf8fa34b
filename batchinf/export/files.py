"""Where an export goes: files of this host, stdout, or objects of a bucket."""

import contextlib
import os
import pathlib
import re
import sys
import tempfile
import uuid
from typing import IO

from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError, UserError
from batchinf.base.paths import bucket_problem, check_is_here, is_bucket

STDOUT = "-"
_OPTION = "-o"
# Without a key in the URL, which no message may show.
_AT_THE_ROOT = re.compile(r"(s3|gs|az)://[\w.-]+/[\w.=+-]*", re.ASCII)


def local_stem(path: str) -> str:
    """The path without its ending; of an object of a bucket, its name without it, in the working folder."""
    return os.path.splitext(os.path.basename(path) if is_bucket(path) else path)[0]


def check_target(path: str) -> None:
    """Raise UserError for a place to which no file can be written."""
    if is_bucket(path):
        if _AT_THE_ROOT.fullmatch(path):
            raise UserError(
                f"{_OPTION}: got '{path}'; must be in a folder of the bucket: s3://bucket/folder/rows.jsonl"
            )
        folder, _, name = path.rpartition("/")
        if (problem := bucket_problem(folder)) is not None or not name:
            got = problem or f"got '{path}', which names no file"
            raise UserError(f"{_OPTION}: {got}; the file is in a folder of the bucket: s3://bucket/folder/rows.jsonl")
    elif path != STDOUT:
        check_is_here(path, _OPTION, "give a path here, or the URL of a bucket; `curl -T FILE URL` sends a file by PUT")


def check_is_free(path: str) -> None:
    """Raise UserError if a file of this name is there already."""
    if is_bucket(path):
        folder, _, name = path.rpartition("/")
        is_there = Bucket(folder).has(name)
    else:
        is_there = os.path.lexists(path)
    if is_there:
        raise UserError(f"{_OPTION}: {path} is there already; give another name, or --overwrite")


class Files:
    """The files of an export, for a `with` block. They get their names when all are whole; after an error, none do."""

    def __init__(self, *, overwrites: bool) -> None:
        """overwrites: files that are there already are replaced."""
        self._overwrites = overwrites
        self._streams = contextlib.ExitStack()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun: list[tuple[str, str, bool]] = []
        self.written: list[str] = []
        """The names, after the block."""

    def __enter__(self) -> "Files":
        return self

    def open(self, name: str, *, is_optional: bool = False) -> IO[bytes]:
        """A stream to a file or stdout. is_optional: left out if it stays empty. Raises UserError if it is there."""
        check_target(name)
        if name == STDOUT:
            self.written.append("stdout")
            return sys.stdout.buffer
        if os.path.exists(name) and not os.path.isfile(name):  # a rename would put a file in the place of /dev/null
            raise UserError(
                f"{_OPTION}: {name} is a folder, a device or a pipe; give the path of a file, or - for stdout"
            )
        if not self._overwrites:
            check_is_free(name)
        name = os.path.realpath(name) if os.path.islink(name) else name
        temporary = self._temporary(name)
        stream = open(temporary, "wb")  # noqa: SIM115  # `__exit__` closes it
        self._streams.callback(stream.close)
        self._begun.append((temporary, name, is_optional))
        return stream

    def _temporary(self, name: str) -> str:
        unique = uuid.uuid4().hex[:12]
        if is_bucket(name):
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="batchinf-export-")
            return os.path.join(self._folder.name, unique)
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        return f"{name}.{unique}.tmp"

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        self._streams.close()
        try:
            if failure is None:
                for temporary, name, is_optional in self._begun:
                    if is_optional and os.path.getsize(temporary) == 0:
                        _remove(name)  # the errors of an earlier export
                    else:
                        _deliver(temporary, name)
                        self.written.append(name)
        except OutputError:
            for _, name, _ in self._begun:  # those that were sent before it
                with contextlib.suppress(OutputError):
                    _remove(name)
            raise
        finally:
            for temporary, _, _ in self._begun:
                pathlib.Path(temporary).unlink(missing_ok=True)
            if self._folder is not None:
                self._folder.cleanup()


def _deliver(temporary: str, name: str) -> None:
    if is_bucket(name):
        folder, _, object_name = name.rpartition("/")
        Bucket(folder).write(object_name, pathlib.Path(temporary))
    else:
        os.replace(temporary, name)


def _remove(name: str) -> None:
    if is_bucket(name):
        folder, _, object_name = name.rpartition("/")
        Bucket(folder).delete([object_name])
    elif os.path.lexists(name):
        os.unlink(name)
