"""A DuckDB database in a temporary folder, for rows that do not fit into memory: `exclude` and `ordering` use it."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.database import duckdb_batches, duckdb_errors, open_duckdb, register
from batchinf.base.errors import OutputError
from batchinf.base.parquet import absolute
from batchinf.base.storage import Folder
from batchinf.base.text import one_line
from batchinf.schedule.positions import RUN_FOLDER

_PREFIX = ".scratch-"
_FETCH_ROWS = 1 << 16


@contextlib.contextmanager
def scratch_database(folder: Folder, memory: str) -> Iterator["ScratchDatabase"]:
    """A database in the output folder, until the block ends. memory: its limit, such as `512MB`."""
    folder.make(RUN_FOLDER)
    where = folder.path(RUN_FOLDER)
    for leftover in where.glob(f"{_PREFIX}*"):  # of a killed process
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=where) as name:
        settings = {
            "memory_limit": memory,
            "temp_directory": name,
            "preserve_insertion_order": "false",
            # Compressing took a third of the time of sorting 200,000 rows by keys of 1,200 bytes.
            "force_compression": "uncompressed",
        }
        with open_duckdb(absolute(f"{name}/rows"), **settings) as connection:
            yield ScratchDatabase(connection, folder)


class ScratchDatabase:
    """The open database. Its methods raise OutputError if the folder or the memory does not suffice."""

    def __init__(self, connection: Any, folder: Folder) -> None:
        self._connection = connection
        self._folder = folder

    def run(self, statement: str, **tables: pa.Table) -> Any:
        """Run a statement, which may name `tables`. Returns DuckDB's result, which is fetched if it has rows."""
        with duckdb_errors(self._wrong):
            for name, table in tables.items():
                register(self._connection, name, table)
            return self._connection.execute(statement)

    def column(self, query: str, **tables: pa.Table) -> npt.NDArray[Any]:
        """The one column of a query's result. The query may name `tables`."""
        with duckdb_errors(self._wrong):
            [column] = self.run(query, **tables).fetchnumpy().values()
        return np.asarray(column)

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """The result of a query, some rows at a time."""
        with duckdb_errors(self._wrong):
            batches = duckdb_batches(self._connection.sql(query), _FETCH_ROWS)
        while True:
            with duckdb_errors(self._wrong):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _wrong(self, text: str) -> OutputError:
        where = self._folder.path(RUN_FOLDER)
        return OutputError(f"{where}: rows cannot be sorted or compared there: {one_line(text, 300)}")
