"""Numbers of the model's that are not finite: stored as the engine gave them, and counted, so that nobody averages them
unawares. Logprobs and their sums, logits, vectors, rewards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BoolArray = npt.NDArray[np.bool_]
# Numbers that are looked at together, so that what is made of them stays in the processor's cache.
_PIECE = 1 << 18


def number_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Names of a task's own columns that are floating-point numbers, or lists of them, however deep."""
    return tuple(field.name for field in schema if _is_floating(field.type))


def _is_lists(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) or pa.types.is_fixed_size_list(type))


def _is_floating(item: pa.DataType) -> bool:
    while _is_lists(item):
        item = item.value_type
    return bool(pa.types.is_floating(item))


def count_rows(table: pa.Table, names: Sequence[str]) -> tuple[int, int]:
    """Rows with a NaN, and rows with an infinity, in any of these columns.

    Where all is finite it costs 0.2 ns a float32, 1.5 a float16: at top 20 and 190,000 tokens a second 0.1 % of a core.
    """
    has_nan, has_inf = np.zeros(table.num_rows, np.bool_), np.zeros(table.num_rows, np.bool_)
    for name in names:
        start = 0
        for chunk in table.column(name).chunks:
            rows = slice(start, start + len(chunk))
            _mark(chunk, has_nan[rows], has_inf[rows])
            start = rows.stop
    return int(np.count_nonzero(has_nan)), int(np.count_nonzero(has_inf))


def _mark(lists: pa.Array, has_nan: BoolArray, has_inf: BoolArray) -> None:
    bounds: npt.NDArray[Any] = np.arange(len(lists) + 1)
    array = lists
    while _is_lists(array.type):
        if pa.types.is_fixed_size_list(array.type):
            bounds, array = (array.offset + bounds) * array.type.list_size, array.values
        else:
            bounds, array = array.offsets.to_numpy()[bounds], array.values
    if array.buffers()[1] is None:
        return
    flat = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())
    values = flat[array.offset + bounds[0] : array.offset + bounds[-1]]
    if _are_finite(values):
        return
    # What stands in the place of a null is nobody's number.
    is_valid = array.slice(bounds[0], len(values)).is_valid().to_numpy(zero_copy_only=False)
    _mark_rows(np.isnan(values) & is_valid, bounds - bounds[0], has_nan)
    _mark_rows(np.isinf(values) & is_valid, bounds - bounds[0], has_inf)


def _are_finite(values: npt.NDArray[Any]) -> bool:
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    # All bits of the exponent are set: a tenth of the time of isfinite, which widens each number.
    bits = values.view(np.uint16)
    pieces = (bits[start : start + _PIECE] for start in range(0, len(bits), _PIECE))
    return not any(((piece & 0x7C00) == 0x7C00).any() for piece in pieces)


def _mark_rows(is_such: BoolArray, bounds: npt.NDArray[Any], rows: BoolArray) -> None:
    counts = np.concatenate([[0], np.cumsum(is_such)])
    rows |= np.diff(counts[bounds]) > 0


def lines(num_nan_rows: int, num_inf_rows: int) -> list[str]:
    """For people; nothing where all is finite."""
    said = []
    if num_nan_rows:
        said.append(
            f"warning: {num_nan_rows:,} rows have NaN among the model's numbers, whose arithmetic failed there; "
            "they are kept as they are"
        )
    if num_inf_rows:
        said.append(f"{num_inf_rows:,} rows have an infinity among the model's numbers, as masked tokens have")
    return said
