"""`batchinf check` for a job in a bucket: compares its objects with its commits.

It fetches the commits, the chosen rows and the journal. Sizes of parts come from a listing. Only `--deep` fetches the
parts, one after the other, and keeps none. `--repair` gives damaged parts a name in `damaged/`, with the lock held.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, read_files
from batchinf.base.storage import DAMAGED, Folder
from batchinf.commands.check import (
    CheckFinding,
    CheckReport,
    JobCheck,
    check_coverage,
    check_journal,
    check_names,
    lost_selection,
    parts_of,
    summed_up,
)
from batchinf.commands.status import jobs_in
from batchinf.manifest.bucket_lock import BucketLock
from batchinf.manifest.chain import Chain
from batchinf.manifest.lock import live_holder
from batchinf.manifest.look import PATIENCE_S, Look, say_if_large
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.mirror import fetch_selection, unbundled
from batchinf.output.proof import NUM_THREADS, Flaw, PartsOfJob
from batchinf.records import Part
from batchinf.schedule.shards import shard_at

_SETTLE_S = 1.0


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


def _check(look: Look, job: JobFolder, state: State | None, *, is_deep: bool, repair: bool) -> JobCheck:
    own = look.named(job)
    check = JobCheck(own, None if job.slice is None else str(job.slice))
    if state is None:
        return dataclasses.replace(check, has_begun=False)
    try:
        lock = BucketLock(Bucket(own, PATIENCE_S))
        held = lock.held(lambda: state.last_epoch) if repair else contextlib.nullcontext()
        with held, tempfile.TemporaryDirectory() as scratch:
            job_check = _CheckOfJob(look, job, state, Folder(scratch), is_deep=is_deep)
            return job_check.checked(check, lock if repair else None)
    except OutputError as error:
        return dataclasses.replace(check, error=str(error))


class _CheckOfJob:
    """The check of a job or a slice that has begun."""

    def __init__(self, look: Look, job: JobFolder, state: State, scratch: Folder, *, is_deep: bool) -> None:
        """scratch: a folder for the parts that are fetched."""
        self._look = look
        self._job = job
        self._state = state
        self._scratch = scratch
        self._is_deep = is_deep
        self._bucket = Bucket(look.named(job), PATIENCE_S)

    def checked(self, check: JobCheck, lock: BucketLock | None) -> JobCheck:
        """The check with its findings. Raises OutputError if a commit is damaged, or if the store does not answer.

        lock: is held to move damaged parts aside; None: they stay.
        """
        Chain(self._bucket).read(from_first=True)
        self._read_state_again()
        num_parts = len(self._state.parts)
        is_held = lock is None and live_holder(self._job.folder) is not None
        fetch_selection(self._bucket, self._scratch, self._state)
        if lost := lost_selection(self._scratch, self._state):
            findings = [lost]
        else:
            findings = [*self._damaged_parts(is_held=is_held, lock=lock)]
        names = [listed.name for listed in self._bucket.list("parts")]
        self._read_state_again()
        findings += check_names(names, self._state)
        findings += check_coverage(self._state)
        self._fetch_journal()
        findings += check_journal(self._scratch, self._state)
        return summed_up(check, self._state, findings, num_parts_checked=num_parts, is_held=is_held)

    def _read_state_again(self) -> None:
        for job, state in Look(self._look.out).jobs():
            if job.slice == self._job.slice and state is not None:
                self._state = state

    def _damaged_parts(self, *, is_held: bool, lock: BucketLock | None) -> Iterator[CheckFinding]:
        flaws = self._flaws(sorted(self._state.parts))
        if flaws:
            # A running job may have replaced a part in the meantime.
            if is_held:
                time.sleep(_SETTLE_S)
            self._read_state_again()
            flaws = self._flaws(sorted(flaws))
        for shard, flaw in flaws.items():
            name = f"parts/{part_name(shard)}"
            moved_to = None if lock is None else self._move_aside(name, lock)
            # A run notices a part that is missing or has another size, and makes it again.
            yield CheckFinding("part_damaged", name, flaw.what, moved_to, needs_repair=not flaw.is_plain, shard=shard)

    def _move_aside(self, name: str, lock: BucketLock) -> str | None:
        """The name of a damaged part in `damaged/`; None if there is no such object."""
        if not self._bucket.has(name):
            return None
        taken = {listed.name for listed in self._bucket.list(DAMAGED)}
        base = name.rpartition("/")[2]
        names = itertools.chain([base], (f"{base}.{number}" for number in itertools.count(1)))
        moved_to = f"{DAMAGED}/{next(candidate for candidate in names if candidate not in taken)}"
        lock.check()
        self._bucket.move(name, moved_to)
        return moved_to

    def _flaws(self, shards: Sequence[int]) -> dict[int, Flaw]:
        sizes = {listed.name: listed.num_bytes for listed in self._bucket.list("parts")}
        flaws = {shard: flaw for shard in shards if (flaw := _size_flaw(self._state, sizes, shard)) is not None}
        if self._is_deep:
            whole = [shard for shard in shards if shard not in flaws]
            say_if_large(self._bucket.url, [self._state.parts[shard] for shard in whole])
            self._scratch.make("parts")
            parts = parts_of(self._scratch, self._state)
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                deep = pool.map(lambda shard: self._deep_flaw(parts, shard), whole)
                flaws |= {shard: flaw for shard, flaw in zip(whole, deep, strict=True) if flaw is not None}
        return dict(sorted(flaws.items()))

    def _deep_flaw(self, parts: PartsOfJob, shard: int) -> Flaw | None:
        path: pathlib.Path = self._scratch.path(f"parts/{part_name(shard)}")
        self._bucket.download(f"parts/{part_name(shard)}", path)
        place = shard_at(self._state.extents, shard)
        try:
            flaws = [parts.flaw(place, part, is_deep=True) for part in _allowed(self._state, shard)]
            flaw = None if None in flaws else flaws[0]
        finally:
            path.unlink(missing_ok=True)
        # A run compares only sizes.
        return None if flaw is None else dataclasses.replace(flaw, is_plain=False)

    def _fetch_journal(self) -> None:
        """Take the segments out of their bundles, as the next run does."""
        self._scratch.make("journal")
        for listed in self._bucket.list("journal"):
            found = self._bucket.get(f"journal/{listed.name}")
            for name, data in unbundled(found.data) if found is not None else ():
                self._scratch.write_atomic(f"journal/{name}", data, durable=False)


def _allowed(state: State, shard: int) -> list[Part]:
    """The committed part, and the one of a retry that was killed between its upload and its commit."""
    return [state.parts[shard], *(part for part in (state.replacing.get(shard),) if part is not None)]


def _size_flaw(state: State, sizes: dict[str, int], shard: int) -> Flaw | None:
    size = sizes.get(part_name(shard))
    expected = state.parts[shard].num_bytes
    if any(size == part.num_bytes for part in _allowed(state, shard)):
        return None
    what = "is missing" if size is None else f"has {size:,} bytes, but {expected:,} were written"
    return Flaw(what, is_plain=True)
