"""The manifest of a job in a bucket: numbered commit objects, each created only if its number is free.

Numbers go on over all epochs, so the first commit of a new epoch takes the number that an earlier process would use
next. That process then finds another's bytes there, and knows that it has lost the job: `LockLost`. It writes nothing
more. Objects are never replaced or deleted, because a free number behind the last one would let it go on.

A commit object is one line about itself, with the digest of the object before, and then the bytes of the commit as in
the local log. The local logs are a cache: `restore` makes them from the objects.
"""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from batchinf.base import faults
from batchinf.base.bucket import Bucket, StoreError
from batchinf.base.errors import OutputError
from batchinf.base.process import on_thread
from batchinf.base.storage import Folder
from batchinf.manifest.lock import LockLost
from batchinf.manifest.state import MANIFEST_FOLDER, list_logs

COMMITS_FOLDER = "commits"
# Names the last commit with a snapshot, so that a start needs none before it. A wrong or old number only costs time.
_SNAPSHOT = "snapshot"
_NAME = re.compile(r"\d{9}")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit object."""

    number: int
    epoch: int
    data: bytes
    """Lines of the log of that epoch."""
    digest: str
    """Of the whole object."""
    before: str
    """Digest of the object before; empty for the first."""


class Chain:
    """The commit objects of one job. Call `read` first."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.commits: list[Commit] = []
        """From the last snapshot on, as they were read."""
        self._last: tuple[int, str] = (0, "")
        self.before: Callable[[], object] = lambda: None
        """Called before each commit: stores what the commit refers to."""
        self.epoch = 0
        """Of the last commit of this process."""
        self._ended: OutputError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the job over. This one must write nothing more."""
        return isinstance(self._ended, LockLost)

    @property
    def last_epoch(self) -> int:
        """0 if there is no commit."""
        return self.commits[-1].epoch if self.commits else 0

    def read(self, *, from_first: bool = False) -> bool:
        """Read the commits that are not known yet. Whether there are any. Raises OutputError for damage.

        from_first: also those before the last snapshot, which a start does not need.
        """
        num_before = len(self.commits)
        # One round of requests if there is nothing new, and otherwise two.
        listing = on_thread(partial(self._bucket.sizes, COMMITS_FOLDER))
        snapshot = f"{COMMITS_FOLDER}/{_SNAPSHOT}"
        hinting = None if self.commits or from_first else on_thread(partial(self._bucket.get, snapshot))
        first = self._last[0] + 1
        following = self._bucket.get(_name(first))
        if hinting is not None and (hint := hinting.result()) is not None and re.fullmatch(rb"\d{1,9}", hint.data):
            first = int(hint.data)
            self._last = (first - 1, "")
        numbers = [int(name) for name in listing.result() if _NAME.fullmatch(name)]
        num_listed = sum(number >= first for number in numbers)
        if num_listed or following is not None:
            for commit in self._from(first, num_listed):
                self._add(commit)
        if first > 1 and not self.commits:
            raise self._damage(first, "it is missing")
        return len(self.commits) > num_before

    def _from(self, first: int, num_listed: int) -> Iterator[Commit]:
        # A listing may lack the newest ones: so one more is asked for, and then those after it.
        number = first
        for found in self._bucket.get_all(_name(first + index) for index in range(num_listed + 1)):
            if found is None:
                if number < first + num_listed:
                    raise self._damage(number, "it is missing, but later ones are there")
                return
            yield self._decode(number, found.data)
            number += 1
        while (found := self._bucket.get(_name(number))) is not None:
            yield self._decode(number, found.data)
            number += 1

    def _add(self, commit: Commit) -> None:
        if self.commits and commit.before != self._last[1]:
            raise self._damage(commit.number, "it does not follow the one before it")
        self.commits.append(commit)
        self._last = (commit.number, commit.digest)

    def commit(self, epoch: int, data: bytes, *, is_snapshot: bool = False) -> None:
        """Create the next commit object. Raises LockLost if another process has taken the job over."""
        if self._ended is not None:
            raise self._ended
        try:
            self.before()
            self._create(epoch, data, is_snapshot=is_snapshot)
        except OutputError as error:
            # After an error of the store, nobody knows whether the object is there. The next start reads it.
            self._ended = error
            raise

    def _create(self, epoch: int, data: bytes, *, is_snapshot: bool) -> None:
        number = self._last[0] + 1
        about = {
            "kind": "commit",
            "version": _VERSION,
            "number": number,
            "epoch": epoch,
            "token": uuid.uuid4().hex,
            "before": self._last[1],
        }
        body = json.dumps(about).encode() + b"\n" + data
        faults.point("chain.before_commit")
        if (there := self._bucket.put_new(_name(number), body)).data != body:
            whose = self._decode(number, there.data).epoch
            raise LockLost(
                f"{self._bucket.url} is no longer held by this process: another one runs it now (start {whose}); "
                "this process writes nothing more"
            )
        faults.point("chain.after_commit")
        self._last = (number, _digest(body))
        self.epoch = epoch
        if is_snapshot:
            with contextlib.suppress(StoreError):
                self._bucket.put(f"{COMMITS_FOLDER}/{_SNAPSHOT}", str(number).encode())

    def restore(self, folder: Folder) -> None:
        """Make the local logs those of the commits. The caller holds the local folder."""
        logs: dict[int, list[bytes]] = {}
        for commit in self.commits:
            logs.setdefault(commit.epoch, []).append(commit.data)
        folder.make(MANIFEST_FOLDER)
        for epoch, name in list_logs(folder):
            if epoch not in logs:
                folder.delete(name)
        for epoch, pieces in logs.items():
            name = f"{MANIFEST_FOLDER}/{epoch:06d}.jsonl"
            data = b"".join(pieces)
            if not folder.exists(name) or folder.read(name) != data:
                folder.write_atomic(name, data)

    def _decode(self, number: int, body: bytes) -> Commit:
        line, _, data = body.partition(b"\n")
        try:
            about: dict[str, Any] = json.loads(line)
            if about["version"] > _VERSION:
                raise OutputError(f"{self._bucket.url} was written by a newer batchinf: install a newer one")
            if about["number"] != number:
                raise self._damage(number, f"it says that it is number {about['number']}")
            return Commit(
                number=number,
                epoch=int(about["epoch"]),
                data=data,
                digest=_digest(body),
                before=str(about["before"]),
            )
        except (ValueError, KeyError, TypeError):
            raise self._damage(number, "it is not as it was written") from None

    def _damage(self, number: int, what: str) -> OutputError:
        return OutputError(
            f"{self._bucket.url}/{_name(number)} is damaged: {what}; restore it from a version or a backup, or give "
            "the job another output.path"
        )


def _name(number: int) -> str:
    return f"{COMMITS_FOLDER}/{number:09d}"


def _digest(body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body)
