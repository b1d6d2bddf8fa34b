"""Arrow batches of results: their sizes, their errors, and how they are put together. Journal and parts use it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Small batches are joined up to this size, because random access is faster with few large ones.
BATCH_BYTES = 4 << 20

_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)


def count_errors(error_types: pa.Array | pa.ChunkedArray) -> "Counter[str]":
    """Numbers of values that are not null."""
    if error_types.null_count == len(error_types):
        return Counter()
    counts = error_types.drop_null().value_counts()
    return Counter(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))


def error_rows(table: pa.Table) -> pa.Table:
    """The rows of a table with the column `error_type` that are error rows."""
    return table.filter(table.column("error_type").is_valid())


def groups(pieces: Iterable[_Rows], limit: int) -> Iterator[list[_Rows]]:
    """Consecutive pieces with at most `limit` bytes together, or a larger one alone."""
    group: list[_Rows] = []
    group_bytes = 0
    for piece in pieces:
        if group and group_bytes + piece.nbytes > limit:
            yield group
            group = []
            group_bytes = 0
        group.append(piece)
        group_bytes += piece.nbytes
    if group:
        yield group


def joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same results in as few batches as BATCH_BYTES allows. Larger batches stay as they are."""
    for group in groups(batches, BATCH_BYTES):
        yield group[0] if len(group) == 1 else pa.concat_batches(group)


def row_bytes(table: pa.Table | pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Size of each row in memory, int64 [num_rows]. For types that no task uses it is the column's mean."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            total[start : start + len(chunk)] += _item_bytes(chunk).astype(np.int64)
            start += len(chunk)
    return total


def leaves(array: pa.Array) -> tuple[pa.Array, npt.NDArray[Any], npt.NDArray[Any]]:
    """The leaves of nested lists, the bounds of each item's leaves, and the bytes of each item's lists in the offsets.

    Reads only the offsets at the items' bounds at each depth, never the tokens.
    """
    bounds: npt.NDArray[Any] = np.arange(len(array) + 1)
    total: npt.NDArray[Any] = np.zeros(len(array))
    while pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            # A slice shares `values` with its whole array, so the offset counts.
            bounds = (bounds + array.offset) * array.type.list_size
            array = array.values
            continue
        bounds = _offsets(array, np.int32)[bounds]
        array = array.values
        total += 4 * np.diff(bounds)
    return array, bounds, total


def _item_bytes(array: pa.Array) -> npt.NDArray[Any]:
    array, bounds, total = leaves(array)
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        return total + np.diff(_offsets(array, np.int32)[bounds])
    if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        return total + np.diff(_offsets(array, np.int64)[bounds])
    width: float = array.nbytes / max(1, len(array))
    return total + np.diff(bounds) * width


def _offsets(array: pa.Array, dtype: type[np.int32 | np.int64]) -> npt.NDArray[Any]:
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(len(array) + 1, dtype)
    return np.frombuffer(buffer, dtype)[array.offset : array.offset + len(array) + 1]
