"""Reads Parquet files: columns by their names, and parts of an output, whose damage is an error that names the file."""

import contextlib
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
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


def readable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table as Python values, for people. A value that Python cannot build is there as a text."""
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    except Exception:  # the conversion of a value may raise anything
        columns = {name: list(map(_python_value, table.column(name))) for name in table.column_names}
        return [{name: values[row] for name, values in columns.items()} for row in range(table.num_rows)]


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except Exception:
        # Text of a time is its moment in UTC. In a damaged part, text may not be UTF-8.
        with contextlib.suppress(pa.ArrowException, UnicodeDecodeError):
            stored = value.cast(pa.int64()) if pa.types.is_temporal(value.type) else value.cast(pa.string())
            return f"{stored.as_py()} ({value.type})"
        return f"a value that Python cannot build ({value.type})"


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


def joined_schema(paths: Iterable[pathlib.Path]) -> pa.Schema:
    """The columns of all parts, without metadata. Parts that another version of batchinf wrote may have other columns.

    Raises OutputError if a column has two types, or if a part cannot be read.
    """
    joined = pa.schema([])
    types: dict[str, tuple[pa.DataType, pathlib.Path]] = {}
    for path in paths:
        with open_part(path) as file:
            schema = file.schema_arrow.remove_metadata()
        if schema.equals(joined):
            continue
        for field in schema:
            type, first = types.setdefault(field.name, (field.type, path))
            if not type.equals(field.type):
                raise OutputError(
                    f"column {field.name!r} is {type} in {first} and {field.type} in {path.name}, so the parts cannot "
                    "be read as one table; read them one by one, or run the job again in a new folder"
                )
        joined = pa.unify_schemas([joined, schema])
    return joined
