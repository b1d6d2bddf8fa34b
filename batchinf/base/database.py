"""Opens DuckDB with the same settings on every machine, and converts its errors. Nothing else opens it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from batchinf.base.stop_signals import is_interruption

_SETTINGS: dict[str, str] = {
    "threads": "2",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_persistent_secrets": "false",
    "python_enable_replacements": "false",
    "default_null_order": "NULLS_LAST",
    "default_order": "ASC",
    "integer_division": "false",
    "ieee_floating_point_ops": "true",
}
# DuckDB takes these only after it has opened. Without the first one, it takes the time zone of the machine.
_AFTERWARDS = {"TimeZone": "UTC", "Calendar": "gregorian", "default_collation": ""}


def open_duckdb(path: str = ":memory:", **settings: str) -> Any:
    """A connection whose results depend on data and queries alone: not on time zone, locale, home or number of cores.

    settings: of DuckDB, besides those that are the same everywhere.
    """
    import duckdb

    connection = duckdb.connect(path, config={**_SETTINGS, **settings})
    for name, value in _AFTERWARDS.items():
        connection.execute(f"SET {name} = '{value}'")
    connection.execute("SET lock_configuration = true")
    return connection


def register(connection: Any, name: str, table: pa.Table) -> None:
    """Let queries name a table. DuckDB refuses slices of structs in structs, so a table with structs is copied."""
    if any(map(pa.types.is_struct, table.schema.types)):
        table = table.filter(pa.repeat(True, len(table)))
    connection.register(name, table)


@contextlib.contextmanager
def duckdb_errors(as_ours: Callable[[str], Exception]) -> Iterator[None]:
    """Convert DuckDB's errors: `as_ours` makes the error from their text, and a stop becomes KeyboardInterrupt."""
    import duckdb

    try:
        yield
    except (duckdb.InterruptException, RuntimeError) as error:
        if is_interruption(error):
            raise KeyboardInterrupt from None
        raise
    except duckdb.Error as error:
        raise as_ours(str(error)) from None


def duckdb_batches(result: Any, num_rows: int) -> Iterator[pa.RecordBatch]:
    """A DuckDB result, at most `num_rows` rows at a time."""
    # DuckDB 2 renamed it.
    read = result.to_arrow_reader if hasattr(result, "to_arrow_reader") else result.fetch_arrow_reader
    return iter(read(num_rows))
