"""The results of one input row each, for output rows that several results make."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.tasks.columns import list_array, offsets_of


class RowGroups:
    """Sorted results, grouped by row."""

    def __init__(self, results: pa.Table) -> None:
        self._results = results.combine_chunks()
        row_index = self.numbers("row_index")
        self.starts = np.flatnonzero(np.diff(row_index, prepend=row_index[:1] - 1))  # each row's first result
        counts = np.diff(np.append(self.starts, len(row_index)))
        row_of = np.repeat(np.arange(len(self.starts)), counts)
        is_error = np.asarray(self._column("error_type").is_valid())
        self._is_bad = np.logical_or.reduceat(is_error, self.starts) if len(self.starts) else is_error
        # Each row's first result with an error; without errors, its first result.
        self._error_at = self.starts.copy()
        places = np.flatnonzero(is_error)
        rows, firsts = np.unique(row_of[places], return_index=True)
        self._error_at[rows] = places[firsts]
        self._good = self._results.filter(pa.array(~self._is_bad[row_of])).combine_chunks()
        self.good_counts = counts[~self._is_bad]  # number of results of each row without an error
        self._good_starts = np.cumsum(self.good_counts) - self.good_counts
        self.num_good = len(self.good_counts)

    def _column(self, name: str, table: pa.Table | None = None) -> pa.Array:
        chunks = (self._results if table is None else table).column(name)
        return chunks.combine_chunks() if chunks.num_chunks != 1 else chunks.chunk(0)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column without nulls, as numpy array."""
        return np.asarray(self._column(name).to_numpy(zero_copy_only=False))

    def shared(self) -> dict[str, pa.Array]:
        """All columns of the output rows: counts and errors of all results of a row, other values of its first one."""
        arrays = {name: self.first(name) for name in self._results.column_names}
        arrays["attempts"] = pa.array(np.maximum.reduceat(self.numbers("attempts"), self.starts), pa.int32())
        arrays["num_prompt_tokens"] = self.total("num_prompt_tokens", pa.int32())
        arrays["num_output_tokens"] = self.of_good(np.zeros(self.num_good, np.int32), pa.int32())
        for name in ("error_type", "error_message"):
            arrays[name] = self.first_error(name)
        return arrays

    def first(self, name: str) -> pa.Array:
        """Each row's value from its first result."""
        return self._column(name).take(pa.array(self.starts))

    def first_error(self, name: str) -> pa.Array:
        """Each row's value from its first failed result; null if none failed."""
        return self._column(name).take(pa.array(self._error_at))

    def total(self, name: str, type: pa.DataType) -> pa.Array:
        """Each row's sum; null if all its values are null."""
        column = self._column(name)
        sums = np.add.reduceat(np.asarray(column.fill_null(0)).astype(np.int64), self.starts)
        is_valid = np.logical_or.reduceat(np.asarray(column.is_valid()), self.starts)
        return pa.array(sums, pa.int64(), mask=~is_valid).cast(type)

    def good_sums(self, name: str) -> npt.NDArray[Any]:
        """The sum of each row without an error."""
        values = np.asarray(self._column(name, self._good).to_numpy(zero_copy_only=False))
        values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
        return np.add.reduceat(values, self._good_starts) if self.num_good else values

    def of_good(self, values: npt.NDArray[Any], type: pa.DataType) -> pa.Array:
        """A column of all rows from values of the rows without an error; null for the others."""
        spread = np.zeros(len(self._is_bad), values.dtype)
        spread[~self._is_bad] = values
        return pa.array(spread, mask=self._is_bad).cast(type)

    def joined(self, name: str) -> pa.Array:
        """The lists of each row's results, end to end; null for rows with an error."""
        column = self._column(name, self._good)
        totals = np.zeros(len(self._is_bad), np.int64)
        totals[~self._is_bad] = self._total_lengths(column)
        return list_array(offsets_of(totals), column.flatten(), self._is_bad)

    def flat(self, name: str) -> npt.NDArray[np.float64]:
        """The list items of all rows without an error."""
        items = self._column(name, self._good).flatten()
        return np.asarray(items.to_numpy(zero_copy_only=False), np.float64)

    def winner(self, name: str, values: npt.NDArray[np.float64]) -> pa.Array:
        """The place of each row's largest value, the first one of equals; null if a value is NaN.

        values: one for each list item of the column `name` in rows without an error.
        """
        best = np.full(self.num_good, -1)
        if self.num_good:
            counts = self._total_lengths(self._column(name, self._good))
            starts = np.cumsum(counts) - counts
            row_of = np.repeat(np.arange(self.num_good), counts)
            places = np.flatnonzero(values == np.maximum.reduceat(values, starts)[row_of])
            rows, firsts = np.unique(row_of[places], return_index=True)
            best[rows] = places[firsts] - starts[rows]
        column = self.of_good(best, pa.int32())
        return pc.if_else(pc.less(column, 0), None, column)

    def _total_lengths(self, column: pa.ListArray) -> npt.NDArray[np.int64]:
        """The number of list items of each row without an error."""
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        return np.add.reduceat(lengths, self._good_starts) if self.num_good else lengths
