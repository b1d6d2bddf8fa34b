"""Columns from the names of folders, as Hive writes them: a file in `lang=de/` has the column `lang` with `de`."""

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from batchinf.source.formats.base import Reader, Record
from batchinf.source.types import Lost

_NULL = "__HIVE_DEFAULT_PARTITION__"  # the folder of rows without a value
_MARK = {b"batchinf:folder": b"1"}


def folder_values(name: str) -> dict[str, str | None]:
    """The columns and values in the folders of a file's name."""
    parts = [folder.partition("=") for folder in name.split("/")[:-1]]
    return {unquote(key): None if value == _NULL else unquote(value) for key, equals, value in parts if key and equals}


def with_folder_columns(schema: pa.Schema, names: Iterable[str]) -> pa.Schema:
    """The columns of all files, and those of their folders, as text. Files that have a column of that name keep it.

    names: of the files.
    """
    columns = dict.fromkeys(column for name in names if "=" in name for column in folder_values(name))
    fields = [pa.field(column, pa.string(), metadata=_MARK) for column in columns if column not in schema.names]
    return pa.schema([*schema, *fields])


def chosen_values(name: str, schema: pa.Schema) -> dict[str, str | None]:
    """The values of a file's folders for the columns of a schema that are made of folders."""
    columns = [field.name for field in schema if (field.metadata or {}).items() >= _MARK.items()]
    values = folder_values(name) if columns else {}
    return {column: values.get(column) for column in columns}


class FolderReader:
    """A reader whose rows have these values, too."""

    def __init__(self, reader: Reader, values: Mapping[str, str | None]) -> None:
        self._reader = reader
        self._values = values

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        """See `Reader`."""
        chosen = {name: value for name, value in self._values.items() if columns is None or name in columns}
        records = self._reader.records(start, stop, columns)
        return [(values if error else {**values, **chosen}, error) for values, error in records]

    def table(self, start: int, stop: int, fields: pa.Schema, lost: Lost | None) -> pa.Table:
        """See `Reader`. A broken record has the values of its folders."""
        own = pa.schema([field for field in fields if field.name not in self._values])
        read = iter(self._reader.table(start, stop, own, lost).columns)
        arrays = [
            pa.array([self._values[field.name]] * (stop - start), pa.string())
            if field.name in self._values
            else next(read)
            for field in fields
        ]
        return pa.Table.from_arrays(arrays, names=fields.names)

    def close(self) -> None:
        """See `Reader`."""
        self._reader.close()
