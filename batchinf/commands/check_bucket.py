"""`batchinf check` for a job in a bucket: compares its objects with its commits.

It fetches the commits, the chosen rows and the journal. Sizes of parts come from a listing. Only `--deep` fetches the
parts, one after the other, and keeps none. `--repair` gives damaged parts a name in `damaged/`, with the lock held.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError
from batchinf.base.slices import read_files
from batchinf.base.storage import DAMAGED, Folder, free_name
from batchinf.commands.check import (
    CheckFinding,
    CheckReport,
    FilesCheck,
    JobCheck,
    check_journal,
)
from batchinf.commands.status import jobs_in
from batchinf.manifest.bucket_lock import BucketLock
from batchinf.manifest.chain import Chain
from batchinf.manifest.lock import Holder, live_holder
from batchinf.manifest.look import PATIENCE_S, Look, say_if_large
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.bundles import unbundled, whole_segments
from batchinf.output.proof import Flaw, PartsOfJob, is_newer
from batchinf.output.restore import fetch_selection


def check_bucket(url: str, *, is_deep: bool, repair: bool = False) -> CheckReport:
    """Check the job at a URL, or all of its slices. Raises OutputError if there is none, or for a damaged commit.

    is_deep: read all bytes and the keys of all rows, and not only sizes. repair: move damaged parts aside, so that the
    next run makes them again.
    """
    look = Look(url)
    read_files(look.root)
    jobs = tuple(_check(look, job, state, is_deep=is_deep, repair=repair) for job, state in jobs_in(look))
    is_whole = all(job.is_whole for job in jobs)
    return CheckReport(folder=look.out, is_deep=is_deep, is_repair=repair, is_whole=is_whole, jobs=jobs)


def _check(look: Look, job: Folder, state: State | None, *, is_deep: bool, repair: bool) -> JobCheck:
    own = look.named(job)
    check = JobCheck(own, None if job.slice is None else str(job.slice))
    if state is None:
        return dataclasses.replace(check, has_begun=False)
    try:
        lock = BucketLock(Bucket(own, PATIENCE_S))
        held = lock.held(lambda: state.last_epoch) if repair else contextlib.nullcontext()
        with held, tempfile.TemporaryDirectory() as scratch:
            own_lock = lock if repair else None
            return _BucketCheck(look, job, state, Folder(scratch), is_deep=is_deep, lock=own_lock).checked(check)
    except OutputError as error:
        return dataclasses.replace(check, error=str(error))


class _BucketCheck(FilesCheck):
    """The check of a job in a bucket. Its files are fetched into a folder of this host while they are read."""

    def __init__(
        self, look: Look, job: Folder, state: State, scratch: Folder, *, is_deep: bool, lock: BucketLock | None
    ) -> None:
        """scratch: an empty folder for its files. lock: is held to move damaged parts aside; None: they stay."""
        super().__init__(scratch, state, is_deep=is_deep, is_repair=lock is not None)
        self._look = look
        self._job = job
        self._lock = lock
        self._bucket = Bucket(look.named(job), PATIENCE_S)
        self._sizes: dict[str, int] = {}
        scratch.make("parts", "journal")

    def checked(self, check: JobCheck) -> JobCheck:
        """See `FilesCheck`. Raises OutputError if a commit is damaged, or if the store does not answer."""
        Chain(self._bucket).read(from_first=True)
        self.read_state()
        fetch_selection(self._bucket, self.files, self.state)
        return super().checked(check)

    def holder(self) -> Holder | None:
        return live_holder(self._job)

    def read_state(self) -> None:
        for job, state in Look(self._look.out).jobs():
            if job.slice == self._job.slice and state is not None:
                self.state = state

    def part_names(self) -> Sequence[str]:
        return [*self._bucket.sizes("parts")]

    def move_aside(self, name: str) -> str | None:
        assert self._lock is not None
        if not self._bucket.has(name):
            return None
        taken = self._bucket.sizes(DAMAGED)
        moved_to = f"{DAMAGED}/{free_name(name.rpartition('/')[2], taken.__contains__)}"
        self._lock.check()
        self._bucket.move(name, moved_to)
        return moved_to

    def owner_of(self, shards: Sequence[int]) -> str | None:
        return None  # damaged parts are not kept here

    def other_findings(self) -> Iterator[CheckFinding]:
        """In the journal, whose segments are taken out of their bundles, as the next run does."""
        bundles = (self._bucket.get(f"journal/{name}") for name in self._bucket.sizes("journal"))
        pieces = (piece for found in bundles if found is not None for piece in unbundled(found.data))
        for name, data in whole_segments(pieces):
            self.files.write_atomic(f"journal/{name}", data, durable=False)
        return check_journal(self.files, self.state)

    def flaws(self, shards: Sequence[int]) -> dict[int, Flaw]:
        self._sizes = self._bucket.sizes("parts")
        if self.is_deep:
            whole = [shard for shard in shards if self._size_flaw(shard) is None]
            say_if_large(self._bucket.url, [self.state.parts[shard] for shard in whole])
        return super().flaws(shards)

    def flaw(self, parts: PartsOfJob, shard: int) -> Flaw | None:
        size_flaw = self._size_flaw(shard)
        # A retry may have uploaded a replacement, and been killed before its commit: the next run commits it.
        is_retrying = bool(self.state.retries) and not self.state.is_done
        if size_flaw is None and not self.is_deep:
            return None
        if size_flaw is not None and not (is_retrying and part_name(shard) in self._sizes):
            return size_flaw
        path: pathlib.Path = self.files.path(f"parts/{part_name(shard)}")
        self._bucket.download(f"parts/{part_name(shard)}", path)
        try:
            if is_retrying and is_newer(self.files, shard, self.state):
                return None
            flaw = size_flaw or super().flaw(parts, shard)
        finally:
            path.unlink(missing_ok=True)
        # A run compares only sizes.
        return None if flaw is None else dataclasses.replace(flaw, is_seen_by_run=size_flaw is not None)

    def is_newer(self, shard: int) -> bool:
        return False  # see `flaw`

    def unnamed(self, shard: int) -> CheckFinding:
        return CheckFinding("part_uploaded", f"parts/{part_name(shard)}", shard=shard)

    def _size_flaw(self, shard: int) -> Flaw | None:
        size = self._sizes.get(part_name(shard))
        expected = self.state.parts[shard].num_bytes
        if size == expected:
            return None
        what = "is missing" if size is None else f"has {size:,} bytes, but {expected:,} were written"
        return Flaw(what, is_seen_by_run=True)
