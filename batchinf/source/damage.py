"""Checks Arrow data before its values are read, since damaged data can crash the process; reads what is whole."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchinf.base.errors import InputError

MAX_ROWS = 2**40  # of one file; where a footer claims more, nothing could be planned with it


def check_batch(batch: pa.RecordBatch) -> None:
    """Raise `pa.ArrowException` if the batch cannot be looked at safely. Text that is not UTF-8 is: it is bytes."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        batch.validate()
        for column in batch.columns:
            column.cast(_as_bytes(column.type)).validate(full=True)


def _as_bytes(type: pa.DataType) -> pa.DataType:
    """The type with bytes in place of text, at every depth."""
    if isinstance(type, pa.ListType):
        return pa.list_(_as_bytes(type.value_type))
    if isinstance(type, pa.LargeListType):
        return pa.large_list(_as_bytes(type.value_type))
    if isinstance(type, pa.StructType):
        return pa.struct([pa.field(field.name, _as_bytes(field.type)) for field in type])
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(type, type)


def check_num_rows(name: str, claimed: int, counts: Sequence[int]) -> None:
    """Raise `InputError` unless a file has as many rows as it claims, and not more than can be."""
    if claimed != sum(counts) or min(counts, default=0) < 0 or claimed > MAX_ROWS:
        raise InputError(f"{name} claims {claimed:,} rows and holds {sum(counts):,}; is it damaged?")


def python_rows(table: pa.Table) -> list[tuple[dict[str, Any], str | None]]:
    """The rows of a table as Python values; one that has none (text that is not UTF-8, the year 30000) says why."""
    names = table.column_names
    try:
        lists = [column.to_pylist() for column in table.columns]
    except Exception:  # the values decide: what converts them may raise anything
        return [_row(table, number) for number in range(table.num_rows)]
    return [(dict(zip(names, values, strict=True)), None) for values in zip(*lists, strict=True)]


def _row(table: pa.Table, number: int) -> tuple[dict[str, Any], str | None]:
    values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            values[name] = column[number].as_py()
        except Exception as error:
            reason = str(error).encode(errors="backslashreplace").decode()[:300]
            return {}, f"column {name!r} cannot be read: {reason}"
    return values, None


def with_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column whose text is UTF-8: bytes that are not become the replacement character."""
    as_bytes = _as_bytes(column.type)
    if as_bytes.equals(column.type):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        values = [_text(value.as_py(), column.type) for value in column.cast(as_bytes)]
        return pa.chunked_array([pa.array(values, column.type)])
    return column


def _text(value: Any, type: pa.DataType) -> Any:
    if value is None:
        return None
    if isinstance(type, pa.StructType):
        return {field.name: _text(value[field.name], field.type) for field in type}
    if isinstance(type, pa.ListType | pa.LargeListType):
        return [_text(item, type.value_type) for item in value]
    is_text = pa.types.is_string(type) or pa.types.is_large_string(type)
    return value.decode(errors="replace") if is_text else value
