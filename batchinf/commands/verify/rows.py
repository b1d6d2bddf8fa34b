"""Some finished rows of a job, drawn at random: what is stored of them, and large columns once they are asked for."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import UserError
from batchinf.base.ragged import to_matrix, to_ragged
from batchinf.results import Results


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An output row. values: its small columns, by name. columns: the names of the large ones. part, group,
    place: where it lies.
    """

    values: dict[str, Any]
    columns: tuple[str, ...]
    part: pathlib.Path
    group: int
    place: int

    def numbers(self, column: str) -> npt.NDArray[Any]:
        """[num_rows, width] of a column of vectors, of lists of them, or of numbers, in the stored type."""
        with pq.ParquetFile(self.part) as part:
            found = part.read_row_group(self.group, [column]).column(0).combine_chunks()
        own = found.slice(self.place, 1)
        if pa.types.is_list(own.type):
            return to_ragged(own)[0]
        if pa.types.is_fixed_size_list(own.type):
            return to_matrix(own)
        return np.asarray(own.to_numpy(zero_copy_only=False)).reshape(1, 1)


def choose_places(results: Results, num_rows: int, seed: int) -> list[int]:
    """The places of `num_rows` output rows without an error among all, ascending: those with the lowest of random
    numbers.
    """
    random = np.random.default_rng(seed)
    places, keys = np.zeros(0, np.int64), np.zeros(0)
    start = 0
    for batch in results.batches(["error_type"], 65536):
        is_good = np.asarray(batch.column(0).is_null())
        places = np.concatenate([places, start + np.flatnonzero(is_good)])
        keys = np.concatenate([keys, random.random(len(is_good))[is_good]])
        lowest = np.argsort(keys, kind="stable")[:num_rows]
        places, keys, start = places[lowest], keys[lowest], start + len(is_good)
    if not len(places):
        raise UserError(f"{results.folder} has no row without an error yet; run the job first")
    return sorted(int(place) for place in places)


def read(
    results: Results, places: Sequence[int], columns: Sequence[str], large: tuple[str, ...] = ()
) -> list[StoredRow]:
    """The rows at these places, with these columns where they are stored; only row groups that hold one are read.

    large: columns that `StoredRow.numbers` is to read, and nothing here.
    """
    names = set(results.schema.names)
    wanted = [name for name in ("row_index", "sample_index", "prompt_hash", *columns) if name in names]
    found: list[StoredRow] = []
    start, left = 0, list(places)
    for path in results.parts:
        with pq.ParquetFile(path) as part:
            for group in range(part.num_row_groups):
                stop = start + part.metadata.row_group(group).num_rows
                here = [place - start for place in left if place < stop]
                if here:
                    rows = part.read_row_group(group, wanted).take(here).to_pylist()
                    found += [
                        StoredRow({"sample_index": 0, **row}, large, path, group, place)
                        for row, place in zip(rows, here, strict=True)
                    ]
                    left = left[len(here) :]
                start = stop
    return found
