"""How commands that read find a job: in its folder, or in a bucket by a local copy of all but the parts.

The copy is in the user's cache folder. It gets the manifest, the status and the lock at each look, and a part when that
is read: it then has the part's digest in its name, and is never fetched again. A copy that no command has
used for a week is deleted.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import overload

from batchinf.base.bucket import Bucket
from batchinf.base.errors import OutputError
from batchinf.base.paths import LARGE_BYTES, bucket_problem, folder_name, is_bucket, user_cache
from batchinf.base.slices import CUT_RECORD, job_folders
from batchinf.base.storage import Folder, file_digest
from batchinf.base.text import counted, size_text
from batchinf.manifest.chain import Chain
from batchinf.manifest.lock import LOCK, not_begun_message
from batchinf.manifest.names import part_name, published_file, readable_file
from batchinf.manifest.state import MANIFEST_FOLDER, State, read_jobs
from batchinf.records import Part

PATIENCE_S = 20.0
"""How long a command that reads waits for a store."""
_KEPT_S = 7 * 24 * 3600.0
_FREE = b"free"


class Look:
    """A job's output, as it is now."""

    def __init__(self, out: object) -> None:
        """out: the output folder, or the URL of one in a bucket. Raises UserError for anything else."""
        self.out = _bucket_name(out) or folder_name(out)
        self.is_bucket = is_bucket(self.out)
        self.root = _copy(self.out) if self.is_bucket else self.out
        """The folder of this host that has the job's files, without its parts if they are in a bucket."""

    def jobs(self) -> list[tuple[Folder, State | None]]:
        """The job, or all its slices in row order, each with its state; None if it has not begun."""
        return [*read_jobs(self.root)]

    def begun(self) -> list[tuple[Folder, State]]:
        """Of `jobs` those that have begun."""
        return [(job, state) for job, state in self.jobs() if state is not None]

    def nothing(self) -> OutputError:
        """The error for an output without a job that has begun."""
        if not self.is_bucket:
            return OutputError(not_begun_message(self.out))
        return OutputError(f"{self.out} holds no job that has begun; give the output.path of a job")

    def named(self, job: Folder) -> str:
        """The folder of a job or a slice as the user would name it."""
        if not self.is_bucket:
            return str(job.root)
        return self.out if job.slice is None else f"{self.out}/{job.slice.name}"

    def part(self, job: Folder, part: Part) -> pathlib.Path:
        """The file of a committed part, which is fetched from the bucket at its first use."""
        name = published_file(part)
        if not self.is_bucket:
            return job.path(readable_file(job, part))
        path = job.path(f"parts/{part.digest}-{part_name(part.shard)}")
        if not path.exists():
            job.make("parts")
            temporary = path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name}")
            is_there = Bucket(self.named(job), PATIENCE_S).download(name, temporary)
            if is_there is None or file_digest(temporary) != part.digest:
                temporary.unlink(missing_ok=True)
                what = "is missing" if is_there is None else "is not the committed part"
                raise OutputError(f"{self.named(job)}/{name} {what}: run the job again, which makes it again")
            for other in path.parent.glob(f"[!.]*-{part_name(part.shard)}"):
                other.unlink(missing_ok=True)  # before a retry, or half of one
            temporary.replace(path)
        return path

    def copy_folder(self, job: Folder, name: str) -> None:
        """Bring the copy of a folder of small files up to date."""
        if not self.is_bucket:
            return
        bucket = Bucket(self.named(job), PATIENCE_S)
        sizes = job.sizes(name)
        job.make(name)
        for file, num_bytes in bucket.sizes(name).items():
            if sizes.get(file) != num_bytes:
                bucket.download(f"{name}/{file}", job.path(f"{name}/{file}"))

    def copy_file(self, job: Folder, name: str) -> None:
        """Bring the copy of a small file up to date."""
        if self.is_bucket:
            _copy_files(Bucket(self.named(job), PATIENCE_S), job, (name,))

    def parts(self, begun: Sequence[tuple[Folder, State]]) -> "PartFiles":
        """The files of all committed parts of these jobs."""
        return PartFiles(self, [(job, state.parts[shard]) for job, state in begun for shard in sorted(state.parts)])

    def has(self, job: Folder, part: Part) -> bool:
        """Whether the file of a part is here."""
        return not self.is_bucket or job.exists(f"parts/{part.digest}-{part_name(part.shard)}")


class PartFiles(Sequence[pathlib.Path]):
    """The files of parts; those in a bucket are fetched one by one as they are read."""

    def __init__(self, look: Look, parts: Sequence[tuple[Folder, Part]]) -> None:
        self._look = look
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[pathlib.Path]:
        say_if_large(self._look.out, [part for job, part in self._parts if not self._look.has(job, part)])
        return (self._look.part(job, part) for job, part in self._parts)

    @overload
    def __getitem__(self, index: int) -> pathlib.Path: ...
    @overload
    def __getitem__(self, index: slice) -> "PartFiles": ...
    def __getitem__(self, index: int | slice) -> "pathlib.Path | PartFiles":
        if isinstance(index, slice):
            return PartFiles(self._look, self._parts[index])
        job, part = self._parts[index]
        return self._look.part(job, part)


def say_if_large(url: str, parts: Sequence[Part]) -> None:
    """Say on stderr how much is about to be fetched, if that may take long."""
    if (num_bytes := sum(part.num_bytes for part in parts)) >= LARGE_BYTES:
        print(f"reading {counted(len(parts), 'part')}, {size_text(num_bytes)}, of {url}", file=sys.stderr)


def _bucket_name(out: object) -> str | None:
    """The URL of a bucket without a last slash; None for anything else."""
    if not isinstance(out, str) or not is_bucket(out):
        return None
    if (problem := bucket_problem(out)) is not None:
        raise OutputError(f"the output: {problem}")
    return out.rstrip("/")


def _copy(url: str) -> str:
    """Bring the local copy up to date; returns its folder."""
    root = Folder(user_cache("copies") / hashlib.sha256(url.encode()).hexdigest()[:16])
    _copy_files(Bucket(url, PATIENCE_S), root, (CUT_RECORD,))
    root.make()
    os.utime(root.root)
    _delete_old(root.root.parent)
    for job in job_folders(str(root.root)):
        own = url if job.slice is None else f"{url}/{job.slice.name}"
        chain = _chain(own)
        chain.read()
        if chain.commits or job.exists(MANIFEST_FOLDER):  # the bucket's job may be gone
            chain.restore(job)
        _copy_files(Bucket(own, PATIENCE_S), job, ("status.json", "job.yaml", LOCK))
    return str(root.root)


@functools.cache
def _chain(url: str) -> Chain:
    """The commits that this process has read already."""
    return Chain(Bucket(url, PATIENCE_S))


def _delete_old(copies: pathlib.Path) -> None:
    for copy in copies.iterdir():
        with contextlib.suppress(OSError):
            if copy.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(copy)


def _copy_files(bucket: Bucket, folder: Folder, names: Sequence[str]) -> None:
    for name in names:
        there = bucket.get(name)
        if there is None or there.data == _FREE:
            folder.delete(name)
        else:
            folder.make()
            folder.write_atomic(name, there.data, durable=False)
