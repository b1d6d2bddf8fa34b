"""`batchinf head`: the first finished rows of a job, from its parts and its journal."""

import contextlib
from collections.abc import Generator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinf.base.errors import OutputError
from batchinf.base.slices import Slice, job_folders, source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import one_line
from batchinf.commands.status import open_state, read_job, stored_spec
from batchinf.job.open import carried_columns, open_job_input
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.journal import Journal
from batchinf.schedule.order import RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.source.damage import python_rows
from batchinf.tasks.registry import task_of

_SHARDS_TO_LOOK_AT = 1000


def head_rows(out: str, num_rows: int) -> list[dict[str, Any]]:
    """The first `num_rows` finished rows as Python values, in the order of their places in the input; with an
    `input.order` of its own, those of the job's first parts.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.closing(_tables_of_all(out, num_rows)) as tables:
        for table in tables:
            found = python_rows(table.slice(0, num_rows - len(rows)))
            rows.extend(values or {"error": error} for values, error in found)
            if len(rows) >= num_rows:
                break
    return rows


def _tables_of_all(out: str, num_rows: int) -> Generator[pa.Table, None, None]:
    jobs = job_folders(out)
    if jobs[0].slice is None:
        yield from _finished_tables(*open_state(out), num_rows)
        return
    for job in jobs:
        if (state := read_job(job.folder)) is not None:
            yield from _finished_tables(job.folder, state, num_rows)


def _finished_tables(folder: Folder, state: State, num_rows: int) -> Generator[pa.Table, None, None]:
    with contextlib.ExitStack() as stack:
        journalled = None
        for shard in range(min(total_shards(state.extents), _SHARDS_TO_LOOK_AT)):
            if shard in state.parts:
                yield from _part_tables(folder, f"parts/{part_name(shard)}")
            else:
                if journalled is None:
                    journalled = _Journalled(folder, state)
                    stack.callback(journalled.close)
                yield journalled.rows(shard, num_rows)


def _part_tables(folder: Folder, name: str) -> Generator[pa.Table, None, None]:
    try:
        with pq.ParquetFile(folder.path(name)) as file:
            yield from (file.read_row_group(index) for index in range(file.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OutputError(f"{folder.path(name)} is damaged: {one_line(error, 300)}") from error


class _Journalled:
    """Finished rows that are in no part yet."""

    def __init__(self, folder: Folder, state: State) -> None:
        self._spec = stored_spec(state.header.spec)
        self._task = task_of(self._spec)
        self._journal = Journal(folder, "look", self._task.result_schema)
        cache = source_folder(folder, Slice.of(state.header.identity))
        self._source = open_job_input(self._spec, cache, state.source_fingerprints, "ignore")
        self._columns = carried_columns(self._spec)
        self._order = RunOrder(folder, state.extents)

    def close(self) -> None:
        """Close the input."""
        self._source.close()

    def rows(self, shard: int, num_rows: int) -> pa.Table:
        """The journal's first results of one shard, as output rows."""
        # Segments that are gone by now are in a part: they are seen at the next look.
        tables = []
        for segment in self._journal.recover(shard).segments:
            with contextlib.suppress(FileNotFoundError):
                tables.append(segment.table())
        results = pa.concat_tables(tables or [self._task.result_schema.empty_table()])
        own = self._order.of(shard_at(self._order.extents, shard))
        is_own = pa.array(own.locals(results["row_index"].to_numpy()) >= 0)
        order = [("row_index", "ascending"), ("request_index", "ascending")]
        results = results.filter(is_own).sort_by(order).slice(0, num_rows)
        indices = list(dict.fromkeys(results["row_index"].to_pylist()))
        if not self._columns:
            return self._task.reduce(None, results)
        columns = [self._source.read_columns(index, index + 1, self._columns) for index in indices]
        empty = self._source.read_columns(0, 0, self._columns)
        return self._task.reduce(pa.concat_tables(columns or [empty]), results)
