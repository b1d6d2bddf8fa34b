"""Reads Parquet files: columns by their names, and parts of an output, whose damage is an error that names the file."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.base.text import one_line

_Read = TypeVar("_Read", pa.Table, pa.RecordBatch)


def absolute(path: str | os.PathLike[str]) -> str:
    """The path as pyarrow, DuckDB and fsspec need it: they take the relative path `run:1/a.parquet` for a URL."""
    return os.path.abspath(path)


class ParquetFile(pq.ParquetFile):  # type: ignore[misc]
    """pyarrow's `ParquetFile`, but a name is always that of a column, never a path.

    To pyarrow the name `a` is also the column `a.b`, and `a.b` is also field `b` of a struct `a`, which it then returns
    with this field alone. All files that may have columns of users are read by this class.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        super().__init__(absolute(source) if isinstance(source, str | os.PathLike) else source, **options)

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


@contextlib.contextmanager
def open_part(path: str | os.PathLike[str], **options: Any) -> Iterator[ParquetFile]:
    """Open a part for a `with` block. All readers of parts use this function.

    options: of `ParquetFile`. Raises OutputError if the part is damaged or missing. Besides Arrow's own errors, pyarrow
    raises UnicodeDecodeError for names in a footer, and EOFError.
    """
    try:
        with ParquetFile(path, **options) as file:
            yield file
    except MemoryError:  # also Arrow's: the file may be whole
        raise
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        raise OutputError(
            f"{os.fspath(path)} cannot be read: {one_line(error, 300)}; `batchinf check --deep --repair` moves damaged "
            "parts aside, and the next run makes them again"
        ) from error
