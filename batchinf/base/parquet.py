"""Reads the columns of a Parquet file by their names."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

_Read = TypeVar("_Read", pa.Table, pa.RecordBatch)


class ParquetFile(pq.ParquetFile):  # type: ignore[misc]
    """pyarrow's `ParquetFile`, but a name is a column's and no path.

    To pyarrow the name `a` is also the column `a.b`, and `a.b` is also field `b` of a struct `a`, which it then returns
    with this field alone. All files that may have columns of users are read by this class.
    """

    def read(self, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
        return _only(super().read(columns, **options), columns)

    def read_row_group(self, i: int, columns: Sequence[str] | None = None, **options: Any) -> pa.Table:
        return _only(super().read_row_group(i, columns, **options), columns)

    def iter_batches(
        self, batch_size: int = 65536, row_groups: Any = None, columns: Sequence[str] | None = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        for batch in super().iter_batches(batch_size, row_groups, columns, **options):
            yield _only(batch, columns)


def _only(read: _Read, columns: Sequence[str] | None) -> _Read:
    return read if columns is None else read.select(list(columns))
