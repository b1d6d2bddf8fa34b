"""Exports of the columns as they are: Parquet, and CSV with lists as JSON text."""

import base64
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from batchinf.export.base import ExportedJob, Format, json_of, values_of

_GROUP_BYTES = 16 << 20


class ParquetExport(Format):
    """The columns with their types."""

    name = "parquet"
    suffix = ".parquet"

    def __init__(self, job: ExportedJob, schema: pa.Schema, stream: IO[bytes], errors: IO[bytes]) -> None:
        super().__init__(job, schema, stream, errors)
        self._writer = pq.ParquetWriter(stream, schema, compression="zstd")
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """See `Format`. Rows of about 16 MiB become one row group."""
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held))
        self._held = []
        self._held_bytes = 0
        # Arrow's allocator would keep what the encoded pages took.
        pa.default_memory_pool().release_unused()


class CsvExport(Format):
    """A header and a line for each row. A null is an empty field, and an empty text is `""`."""

    name = "csv"
    suffix = ".csv"

    def __init__(self, job: ExportedJob, schema: pa.Schema, stream: IO[bytes], errors: IO[bytes]) -> None:
        super().__init__(job, schema, stream, errors)
        self._has_text = [_becomes_text(field.type) for field in schema]
        fields = [
            field.with_type(pa.string()) if becomes_text else field
            for field, becomes_text in zip(schema, self._has_text, strict=True)
        ]
        self._schema = pa.schema(fields)
        self._writer = pyarrow.csv.CSVWriter(stream, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [
            pa.array(map(_text, values_of(column)), pa.string()) if becomes_text else column
            for column, becomes_text in zip(batch.columns, self._has_text, strict=True)
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _becomes_text(type: pa.DataType) -> bool:
    """Whether values of a type are JSON text in a field, because CSV has no such values."""
    is_bytes = pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_fixed_size_binary(type)
    return bool(is_bytes or pa.types.is_nested(type))


def _text(value: Any) -> str | None:
    """The JSON text of a list or a mapping; the base64 of bytes."""
    if value is None:
        return None
    return base64.b64encode(value).decode() if isinstance(value, bytes) else json_of(value).decode()
