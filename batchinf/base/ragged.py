"""Arrow columns of lists and vectors as numpy arrays. `Results`, `diff` and `verify` read output columns with it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import OutputError, UserError


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths, stored end to end."""

    values: npt.NDArray[Any]
    """[num_values, ...], the values of all lists. If the items are lists of one length, such as the top k, that length
    is the second dimension. Null is NaN, or -1 for integers."""
    offsets: npt.NDArray[np.int64]
    """int64 [num_lists + 1]; list i is `values[offsets[i]:offsets[i + 1]]`."""
    is_null: npt.NDArray[np.bool_]
    """bool [num_lists]; null lists are empty."""

    def __len__(self) -> int:
        return len(self.is_null)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """The values of one list, as a view."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"got list {index} of {len(self)}")
        index %= len(self)
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def padded(self, fill: float | str, width: int | None = None) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """The lists as rows of one array.

        Args:
            fill: stands behind the values of shorter lists, such as -100, NaN or "".
            width: of a row. Longer lists lose their last values. None: the length of the longest list.

        Returns:
            The array, [num_lists, width, ...], and a mask, bool [num_lists, width], true where it has a value.

        Raises:
            UserError: if values of this type cannot be `fill`, as integers cannot be NaN.
        """
        if not np.can_cast(np.min_scalar_type(fill), self.values.dtype, "same_kind"):
            raise UserError(f"fill: got {fill!r}, which values of type {self.values.dtype} cannot have")
        width = int(self.lengths.max(initial=0)) if width is None else width
        lengths = np.minimum(self.lengths, width)
        mask = np.arange(width) < lengths[:, None]
        array = np.full((len(self), width, *self.values.shape[1:]), fill, self.values.dtype)
        array[mask] = self.values[self.heads(lengths)]
        return array, mask

    def take(self, places: npt.NDArray[np.int64]) -> "Ragged":
        """The lists at these indices, copied."""
        lengths = self.lengths[places]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Ragged(self.values[_runs(self.offsets[:-1][places], lengths)], offsets, self.is_null[places])

    def heads(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The indices in `values` of the first `lengths[i]` values of each list i."""
        return _runs(self.offsets[:-1], lengths)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each list, int64 [num_lists]."""
        return np.diff(self.offsets)

    def sum(self) -> npt.NDArray[np.float64]:
        """The sum of each list's values that are not NaN, float64 [num_lists, ...]; 0 if there are none."""
        values = self.values.astype(np.float64)
        # Infinities stay: a sum with a logprob of -inf is -inf.
        return reduce_runs(np.add, np.where(np.isnan(values), 0.0, values), self.lengths)

    def mean(self) -> npt.NDArray[np.float64]:
        """The mean of each list's values that are not NaN, float64 [num_lists, ...]; NaN if there are none."""
        counts = reduce_runs(np.add, (~np.isnan(self.values.astype(np.float64))).astype(np.float64), self.lengths)
        with np.errstate(invalid="ignore"):
            return self.sum() / counts


def reduce_runs(
    reduce: np.ufunc, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], empty: float = 0.0
) -> npt.NDArray[np.float64]:
    """Apply `reduce`, such as np.add, to runs of values, one after the other: float64 [num_runs, ...]."""
    # An empty run gets the value `empty`. reduceat would take the next value for it.
    reduced = np.full((len(lengths), *values.shape[1:]), empty, np.float64)
    is_full = lengths > 0
    if is_full.any():
        reduced[is_full] = reduce.reduceat(values, (np.cumsum(lengths) - lengths)[is_full])
    return reduced


def common_lengths(a: Ragged, b: Ragged) -> npt.NDArray[np.int64]:
    """int64 [num_lists]: how many values at the beginning are the same in both lists. NaN is the same as NaN."""
    lengths = np.minimum(a.lengths, b.lengths)
    within = _runs(np.zeros_like(lengths), lengths)
    one = a.values[a.heads(lengths)]
    other = b.values[b.heads(lengths)]
    is_other = (one != other) & ((one == one) | (other == other))
    return reduce_runs(np.minimum, np.where(is_other, within, np.repeat(lengths, lengths)), lengths).astype(np.int64)


def _runs(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indices of all runs, one run after the other. Run i has `lengths[i]` indices from `starts[i]` on."""
    before = np.cumsum(lengths) - lengths
    places: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return places


def to_ragged(array: pa.ListArray) -> Ragged:
    """A column of lists, or of lists of lists of one length. Raises OutputError if the inner lengths differ."""
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    inner = array.flatten()
    is_null = np.asarray(array.is_null())
    if pa.types.is_fixed_size_list(inner.type):
        # No copy: it is a view of the buffer into which Parquet was decoded.
        return Ragged(to_matrix(inner), offsets, is_null)
    if not pa.types.is_list(inner.type):
        return Ragged(_flat(inner), offsets, is_null)
    widths = pc.list_value_length(inner).to_numpy(zero_copy_only=False)
    known = widths[~np.isnan(widths)] if widths.dtype.kind == "f" else widths
    if len(known) and known.min() != known.max():
        raise _several_widths(known.min(), known.max())
    width = int(known[0]) if len(known) else 0
    flat = _flat(inner.flatten())
    values = _nulls((len(inner), width), flat.dtype)
    values[~np.asarray(inner.is_null())] = flat.reshape(len(known), width)
    return Ragged(values, offsets, is_null)


def _several_widths(least: float, most: float) -> OutputError:
    return OutputError(f"lists of {int(least)} to {int(most)} items are no array: read them with table() or batches()")


def to_matrix(array: pa.FixedSizeListArray) -> npt.NDArray[Any]:
    """[num_vectors, width]. Null vectors are NaN, or -1 for integers; without them it is a view of Arrow's memory."""
    width = array.type.list_size
    values = _flat(array.values.slice(array.offset * width, len(array) * width)).reshape(len(array), width)
    if array.null_count:
        values = values.copy()
        values[np.asarray(array.is_null())] = -1 if values.dtype.kind in "iu" else np.nan
    return values


def join_ragged(arrays: Iterable[pa.ListArray]) -> Ragged:
    """`to_ragged` of several arrays of one type, of which there must be at least one, in order.

    Raises OutputError if the items of some arrays are longer than those of others.
    """
    pieces = []
    has_no_width = []
    widths = set[int]()
    for array in arrays:
        pieces.append(to_ragged(array))
        # The width is unknown if all items are null, such as the top k of the first token of prompts.
        items = array.flatten()
        has_no_width.append(pa.types.is_list(items.type) and items.null_count == len(items))
        if not has_no_width[-1]:
            widths.update(pieces[-1].values.shape[1:])
    if len(widths) > 1:
        raise _several_widths(min(widths), max(widths))
    values = [
        _nulls((len(piece.values), *widths), piece.values.dtype) if no_width and widths else piece.values
        for piece, no_width in zip(pieces, has_no_width, strict=True)
    ]
    lengths = np.concatenate([piece.lengths for piece in pieces])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Ragged(np.concatenate(values), offsets, np.concatenate([piece.is_null for piece in pieces]))


def _nulls(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.full(shape, -1 if dtype.kind in "iu" else np.nan, dtype)


def _flat(array: pa.Array) -> npt.NDArray[Any]:
    """The values. Null becomes NaN, or -1 for integers, which so stay integers. float16 stays float16."""
    if not array.null_count:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if pa.types.is_integer(array.type):
        return np.asarray(array.fill_null(-1).to_numpy(zero_copy_only=False))
    values = np.array(array.to_numpy(zero_copy_only=False))
    values[np.asarray(array.is_null())] = np.nan
    return values
