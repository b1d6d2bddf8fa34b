"""Rows of an input that were repaired: a copy of the file with the new rows, and the source that reads them instead.

`job/repaired.py` knows which rows of a job are repaired.
"""

import hashlib
import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError, OutputError
from batchinf.base.storage import Folder
from batchinf.source.cache import load_entries
from batchinf.source.files import BLOCK_BYTES, InputFile, InputLocation
from batchinf.source.find import is_dataset
from batchinf.source.formats.base import Reader
from batchinf.source.rows import Source, open_source

REPAIRS_FOLDER = "repairs"  # in a job's folder: the copies, and which rows come from which place in them


def content_digest(file: InputFile) -> str:
    """The xxh3-128 of a file's name and bytes: the name of its copy."""
    name = file.name.encode(errors="surrogateescape") + b"\0"
    with file.open() as stream:
        return hashlib.file_digest(stream, lambda: xxhash.xxh3_128(name)).hexdigest()


def keep_copy(folder: Folder, file: InputFile) -> str:
    """Copy a file durably into a job's folder, unless an intact copy is there. Returns the digest that names the copy.

    The job reads the copy, so the file may change or go afterwards. Raises InputError if it changes meanwhile.
    """
    digest = content_digest(file)
    copy = copied_file(folder, digest, file.name)
    if is_intact(copy, digest):
        return digest
    folder.make(REPAIRS_FOLDER, f"{REPAIRS_FOLDER}/{digest}")
    with folder.writing(copy_name(digest, file.name), "repair.copy") as target, file.open() as stream:
        shutil.copyfileobj(stream, target, BLOCK_BYTES)
    if not is_intact(copy, digest):
        raise InputError(f"{file.path} changed while it was read; start again once it is complete")
    return digest


def copied_file(folder: Folder, digest: str, name: str) -> InputFile:
    """The copy of a file of this name, which may not be there."""
    return InputFile(name, str(folder.path(copy_name(digest, name))))


def is_intact(copy: InputFile, digest: str) -> bool:
    """Whether a copy is there, with its content."""
    try:
        return content_digest(copy) == digest
    except InputError:
        return False


def copy_name(digest: str, name: str) -> str:
    """The copy of a file of this name, in the job's folder."""
    return f"{REPAIRS_FOLDER}/{digest}/{name}"


def open_copy(
    folder: Folder, digest: str, name: str, *, where: InputLocation, schema: pa.Schema, taken: Sequence[str] = ()
) -> Source:
    """The rows of a copy, with types that hold their values and those of the job's input.

    where: the job's input, whose options the file has, too. schema: the input's columns. taken: the fingerprint that
    the copy had when its rows were taken. Raises OutputError if it is not there any more.
    """
    copy = copied_file(folder, digest, name)
    format = None if is_dataset(where) else where.format
    location = InputLocation(
        copy.path,
        format,
        csv=where.csv,
        text_columns=where.text_columns,
        named=where.named,
        is_shuffled=True,
    )
    if taken and not is_intact(copy, digest):
        raise OutputError(
            f"{copy.path} is gone or altered; it has repaired rows of the job: run the job again with the --retry and "
            f"the --input that brought {name}, which restores it"
        )
    return open_source(location, _scan(folder, digest), taken, "ignore" if taken else "refuse", beside=schema)


def own_columns(folder: Folder, digest: str, name: str) -> list[str]:
    """The columns of a copy that is open, without those that only the job's input has."""
    return list(load_entries(Folder(_scan(folder, digest)))[name].arrow_schema().names)


def _scan(folder: Folder, digest: str) -> pathlib.Path:
    return folder.path(scan_folder(f"{REPAIRS_FOLDER}/{digest}"))


def scan_folder(copy: str) -> str:
    """The folder with the results of the scan of a copy, in the folder of the copy."""
    return f"{copy}/scan"


@dataclass(frozen=True, slots=True)
class RepairedRows:
    """Rows that another source has in place of the input."""

    source: Source
    find: Callable[[int, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    """The repaired rows from a first to a last position (exclusive), ascending, and their places in `source`."""


class RepairedSource(Source):
    """An input, some of whose rows come from repairs. It has the input's columns, types and fingerprints."""

    def __init__(self, source: Source, repairs: Sequence[RepairedRows]) -> None:
        """repairs: the latest last. It wins where several have a row."""
        super().__init__(source._openers, source._runs, source.schemas, source.fingerprints, digests=source._digests)
        self.empty_files = source.empty_files
        self.remarks = source.remarks
        self.prints_fields = source.prints_fields
        self._repairs = tuple(repairs)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[Reader, int, int]]:
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        owners = np.full(stop - start, -1, np.int64)
        places = np.arange(start, stop, dtype=np.int64)
        for number, repair in enumerate(self._repairs):
            rows, in_repair = repair.find(start, stop)
            owners[rows - start] = number
            places[rows - start] = in_repair
        is_cut = (np.diff(owners) != 0) | (np.diff(places) != 1)
        edges = [0, *(np.flatnonzero(is_cut) + 1).tolist(), stop - start]
        for first, last in itertools.pairwise(edges):
            if first == last:
                continue
            place = int(places[first])
            owner = int(owners[first])
            if owner < 0:
                yield from super()._spans(place, place + last - first)
            else:
                yield from self._repairs[owner].source._spans(place, place + last - first)

    def newest_rows(self, start: int, stop: int) -> frozenset[int]:
        """The rows from `start` to `stop` (exclusive) that come from the latest repair."""
        rows, _ = self._repairs[-1].find(start, stop)
        return frozenset(rows.tolist())

    def close(self) -> None:
        """See `Source`."""
        for repair in self._repairs:
            repair.source.close()
        super().close()
