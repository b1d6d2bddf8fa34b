"""Digests that tell a job whether the bytes that it reads are still those that it has taken in.

A file is trusted while its size, mtime and inode are unchanged. If they are not, its content is compared: lines with
the digests of their blocks, which the scan keeps; Parquet that is read where it lies with the digests of the column
chunks that the job has read, which `ReadDigests` keeps; other files as a whole.
"""

import io
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TypeVar

import numpy as np
import xxhash

from batchinf.base import faults
from batchinf.base.errors import DriftError
from batchinf.base.storage import Folder, naming, open_log, sync_folder
from batchinf.source.files import BLOCK_BYTES, InputFile, ReadRange, Stamp, settled_stamp, stamp

T = TypeVar("T")


def changed(name: str) -> DriftError:
    """The error for a file that is not as the job has taken it in."""
    return DriftError(
        f"{name} has changed since the job first read it, so the job stops; restore the file and run the same command "
        "again, or start a new job with another output.path"
    )


class Watch:
    """Files that are read while they may change. What `read` returns comes from the content that the job has taken in.

    Several threads may call it.
    """

    def __init__(self, name: str, paths: Sequence[str], trusted: Sequence[Stamp], is_same: Callable[[], bool]) -> None:
        """trusted: the stamps of the paths with the right content. is_same: whether the paths have that content now."""
        self._name = name
        self._paths = paths
        self._is_same = is_same
        self._lock = threading.RLock()
        self.trusted = list(trusted)

    def read(self, read: Callable[[], T]) -> T:
        """Call `read` and return its result, again if the files were touched meanwhile.

        The result must not refer to the files, as a memory map does. Raises DriftError if the content has changed.
        """
        while True:
            self.check()
            try:
                result = read()
            except Exception:
                self.check()  # bytes that do not fit together may be those of a changed file
                raise
            if self._stamps(stamp) == self.trusted:
                return result

    def check(self) -> None:
        """Compare the content if the stamps are not the trusted ones. Raises DriftError if it has changed."""
        if self._stamps(stamp) == self.trusted:
            return
        with self._lock:
            while (now := self._stamps(settled_stamp)) != self.trusted:
                if not self._is_same():
                    raise changed(self._name)
                if self._stamps(stamp) == now:
                    self.trusted = now

    def _stamps(self, look: Callable[[str], Stamp]) -> list[Stamp]:
        try:
            return [look(path) for path in self._paths]
        except FileNotFoundError as error:
            raise changed(self._name) from error


# -- Parquet: a digest for each range that was read --------------------------------------------------------------------

_FOLDER = "digests"
_RECORD = np.dtype([(name, "<u8") for name in ("content", "offset", "num_bytes", "digest", "check")])
_CONTRADICTED = -1  # instead of a digest, if two processes kept different ones


class ReadDigests:
    """The digests of all ranges that a job, and its other slices, have read of files that no scan reads whole.

    In the cache's folder `digests` each process appends to a file of its own. `content` is the number of a file's
    content, see `FileEntry`. `keep` must be called before a result is made durable.
    """

    def __init__(self, cache: Folder) -> None:
        self._cache = cache
        self._name = uuid.uuid4().hex
        # Locks are taken in this order: `_keeping`, the lock of a `Watch`, `_lock`.
        self._keeping = threading.Lock()
        self._lock = threading.Lock()
        self._known = defaultdict[int, dict[tuple[int, int], int]](dict)
        self._fresh: list[tuple[int, ...]] = []
        self._num_seen = defaultdict[str, int](int)  # bytes of each file in the folder
        self.watches: dict[int, Watch] = {}
        """Of the files of this host, by content."""

    def watch(self, content: int) -> Watch:
        """The watch of a file that is about to be read. What other processes have read of it counts from now on."""
        with self._lock:
            self._load()
        return self.watches[content]

    def compare_all(self) -> None:
        """Compare each file of the source whose stamp has changed. Raises DriftError for one that has changed.

        A file that no process has read yet has no digests to compare, but it may now have the rows of a file that was
        read.
        """
        for watch in self.watches.values():
            watch.check()

    def note(self, content: int, ranges: Iterable[ReadRange]) -> bool:
        """Add ranges that were read. False if one of them had other bytes before."""
        with self._lock:
            known = self._known[content]
            for offset, num_bytes, digest in ranges:
                if (offset, num_bytes) not in known:
                    known[offset, num_bytes] = digest
                    self._fresh.append((content, offset, num_bytes, digest))
                elif known[offset, num_bytes] != digest:
                    return False
        return True

    def is_same(self, content: int, file: InputFile) -> bool:
        """Whether a file has all ranges that were read of this content."""
        with self._lock:
            self._load()
            known = sorted(self._known[content].items())
        if not known:
            return True
        with file.reader() as opened:
            return all(_digest(opened, offset, num_bytes) == digest for (offset, num_bytes), digest in known)

    def has(self, content: int) -> bool:
        """Whether ranges of this content were read."""
        with self._lock:
            self._load()
            return bool(self._known[content])

    def keep(self) -> None:
        """Make the ranges durable that were read up to now. Raises DriftError if their files have changed since."""
        with self._keeping:
            with self._lock:
                fresh = self._fresh
                self._fresh = []
            if not fresh:
                return
            try:
                self._append(fresh)
            except BaseException:
                with self._lock:
                    self._fresh = fresh + self._fresh
                raise

    def _append(self, fresh: Sequence[tuple[int, ...]]) -> None:
        self._cache.make(_FOLDER)
        path = self._cache.path(f"{_FOLDER}/{self._name}")
        with naming(path), open_log(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            try:
                file.write(_encoded(fresh))
                file.flush()
                faults.point("digests.before_fsync")
                os.fsync(file.fileno())
                if not num_bytes:
                    sync_folder(path.parent)
                # Only now: a process that opens a changed file after this check finds these digests.
                for content in {record[0] for record in fresh} & self.watches.keys():
                    self.watches[content].check()
            except BaseException:
                os.ftruncate(file.fileno(), num_bytes)
                raise

    def _load(self) -> None:
        """Add what all processes have kept since the last call."""
        for name, size in self._cache.sizes(_FOLDER).items():
            if size <= self._num_seen[name]:
                continue
            with self._cache.path(f"{_FOLDER}/{name}").open("rb") as file:
                file.seek(self._num_seen[name])
                data = file.read(size - self._num_seen[name])
            num_whole = 0
            for number, (content, offset, num_bytes, digest) in _decoded(data):
                known = self._known[content]
                if known.setdefault((offset, num_bytes), digest) != digest:
                    known[offset, num_bytes] = _CONTRADICTED
                num_whole = number + 1
            # Damaged records at the end may be of an append that is under way.
            self._num_seen[name] += num_whole * _RECORD.itemsize


def _encoded(records: Sequence[tuple[int, ...]]) -> bytes:
    array = np.array([(*record, 0) for record in records], _RECORD)
    array["check"] = [_check(record) for record in array]
    return array.tobytes()


def _decoded(data: bytes) -> Iterable[tuple[int, tuple[int, int, int, int]]]:
    """The records of a file, with their numbers. A record that is torn or altered counts as absent."""
    for number, record in enumerate(np.frombuffer(data, _RECORD, len(data) // _RECORD.itemsize)):
        if record["check"] == _check(record):
            content, offset, num_bytes, digest, _ = record.tolist()
            yield number, (content, offset, num_bytes, digest)


def _check(record: np.void) -> int:
    return xxhash.xxh3_64_intdigest(record.tobytes()[:-8])


def _digest(file: IO[bytes], offset: int, num_bytes: int) -> int:
    digest = xxhash.xxh3_64()
    file.seek(offset)
    while num_bytes and (block := file.read(min(num_bytes, BLOCK_BYTES))):
        digest.update(block)
        num_bytes -= len(block)
    return digest.intdigest()


class DigestedFile(io.FileIO):
    """A file for pyarrow that digests what is read of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._ranges: list[ReadRange] = []

    def read(self, num_bytes: int | None = -1) -> bytes:
        start = self.tell()
        data = self._bytes(num_bytes)
        if data:
            self._ranges.append((start, len(data), xxhash.xxh3_64_intdigest(data)))
        return data

    def _bytes(self, num_bytes: int | None) -> bytes:
        return super().read(num_bytes) or b""

    def taken(self) -> list[ReadRange]:
        """The ranges that were read since the last call."""
        ranges = self._ranges
        self._ranges = []
        return ranges
