"""Rows that earlier jobs have done: what these did, as sorted keys in a file, and which of a job's own are among them.

Out of core: a block of the file and a block of the job's own keys are in memory at a time, whatever the number of rows.
"""

import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from batchinf.column_types import is_json
from batchinf.errors import OutputError, SpecError
from batchinf.job_state import read_state
from batchinf.part_names import part_name
from batchinf.row_hash import texts
from batchinf.slices import job_folders
from batchinf.storage import Folder

# 16 bytes each; sorting takes as much again.
BLOCK_KEYS = 1 << 20
_ROWS_AT_ONCE = 1 << 16

Uint64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


class Keys(NamedTuple):
    """What rows are known by: two uint64 arrays [num_rows], and bool [num_rows] that says which rows have a key."""

    high: Uint64Array
    low: Uint64Array
    is_valid: BoolArray


def keys_of(column: pa.ChunkedArray, field: pa.Field) -> Keys:
    """Integers are their own keys, of whatever width; anything else is known by the xxh3-128 of its text."""
    if pa.types.is_integer(field.type):
        is_valid = pc.is_valid(column).to_numpy()
        high = pc.fill_null(column, 0).to_numpy().astype(np.uint64)  # a negative one wraps around
        return Keys(high, np.zeros(len(high), np.uint64), is_valid)
    values = texts(column, field)
    data = b"".join(bytes(16) if text is None else xxhash.xxh3_128_digest(text) for text in values)
    both = np.frombuffer(data, "<u8").reshape(-1, 2)
    return Keys(both[:, 0].copy(), both[:, 1].copy(), np.array([text is not None for text in values], np.bool_))


class Excluded:
    """The keys of rows that have an output row without an error in some jobs, as they are now."""

    def __init__(self, scratch: pathlib.Path | None) -> None:
        """scratch: the folder for a file of 16 bytes a row, which has no name and goes with the process."""
        self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        self._sizes: list[int] = []
        self.num_keys = 0

    @classmethod
    def by(cls, jobs: Sequence[str], column: str, own: pa.Field, scratch: pathlib.Path | None) -> "Excluded":
        """By `id` or `prompt_hash`; own: the field that it is compared with.

        Raises SpecError, without the field's name, and OutputError where what a job has done cannot be read.
        """
        if is_json(own):
            raise SpecError(
                f"got id, but {own.name} holds values of several types, and nothing tells theirs; say prompt_hash"
            )
        found = cls(scratch)
        try:
            found._take(_keys_of_jobs(jobs, column, own))
        except BaseException:
            found.close()
            raise
        return found

    def _take(self, pieces: Iterable[Keys]) -> None:
        held: list[Keys] = []
        for keys in pieces:
            held.append(keys)
            if sum(len(some.high) for some in held) >= BLOCK_KEYS:
                self._add(held)
                held = []
        self._add(held)

    def _add(self, held: Sequence[Keys]) -> None:
        high = np.concatenate([keys.high[keys.is_valid] for keys in held] or [np.zeros(0, np.uint64)])
        low = np.concatenate([keys.low[keys.is_valid] for keys in held] or [np.zeros(0, np.uint64)])
        if len(high):
            order = np.argsort(high)
            self._file.write(high[order].data)
            self._file.write(low[order].data)
            self._sizes.append(len(high))
            self.num_keys += len(high)

    def among(self, keys: Keys) -> BoolArray:
        """Which of these keys are excluded, bool [num_rows]; what has no key is not."""
        self._file.flush()
        order = np.argsort(keys.high)
        high, low = keys.high[order], keys.low[order]
        hits = np.zeros(len(order), np.bool_)
        offset = 0
        for size in self._sizes:
            data = np.frombuffer(os.pread(self._file.fileno(), 16 * size, offset), np.uint64)
            offset += 16 * size
            places = np.minimum(np.searchsorted(data[:size], high), size - 1)
            hits |= (data[:size][places] == high) & (data[size:][places] == low)
        found = np.zeros(len(order), np.bool_)
        found[order] = hits
        return found & keys.is_valid

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _keys_of_jobs(jobs: Iterable[str], column: str, own: pa.Field) -> Iterator[Keys]:
    for out in jobs:
        folders = [found.folder for found in job_folders(out)]
        begun = [folder for folder in folders if folder.exists("manifest") and read_state(folder) is not None]
        if not begun:
            raise SpecError(f"{out} holds no job: there is no manifest in it; give a job's output.path")
        for folder in begun:
            yield from _keys_of_parts(out, folder, column, own)


def _keys_of_parts(out: str, folder: Folder, column: str, own: pa.Field) -> Iterator[Keys]:
    state = read_state(folder)
    assert state is not None
    for shard in sorted(state.parts):
        path = folder.path(f"parts/{part_name(shard)}")
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                _check_type(out, file.schema_arrow, column, own)
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[column, "error_type"]):
                    table = pa.Table.from_batches([batch])
                    good = table.filter(pc.is_null(table.column("error_type")))
                    yield keys_of(good.column(column), good.schema.field(column))
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise OutputError(f"{path} cannot be read: {reason}; batchinf check {out} says what is wrong") from error


def _check_type(out: str, schema: pa.Schema, column: str, own: pa.Field) -> None:
    if column not in schema.names:
        raise SpecError(f"got id, but the rows in {out} have none: that job has no id_column; say prompt_hash")
    theirs = schema.field(column).type
    if _family(theirs) != _family(own.type):
        raise SpecError(
            f"got {column}, but {own.name} is {own.type} here and {theirs} in {out}, so that none would be the same; "
            "give both one type, or say prompt_hash"
        )


def _family(type: pa.DataType) -> str:
    if pa.types.is_integer(type):
        return "integer"
    return "text" if pa.types.is_string(type) or pa.types.is_large_string(type) else str(type)
