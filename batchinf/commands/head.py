"""`batchinf head`: the first finished rows of a job, from its parts and its journal, while it runs or after."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import UserError
from batchinf.base.parquet import open_part, readable_rows
from batchinf.base.slices import Slice, job_folders, source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import list_names
from batchinf.commands.status import open_state, read_job, stored_spec
from batchinf.job.job import carried_columns
from batchinf.job.open import open_job_input
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output.journal import Journal, error_rows
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.tasks.registry import task_of

CONFIDENCE = "confidence"
_SHARDS_TO_LOOK_AT = 1000


@dataclass(frozen=True, slots=True)
class Head:
    """The first finished rows: those of the first parts, in input order within a part.

    columns: names of all columns; empty if no row is finished. kept: those that come from the input, without the id.
    choices: the texts that `best` counts, if all rows have the same. num_rows: all rows, or error rows if only these
    were asked for; None if the job is not done. writes_labels: the model wrote one of a few labels, and
    `cumulative_logprob` is among these. row_columns: see `Task`.
    """

    rows: tuple[dict[str, Any], ...]
    columns: tuple[str, ...]
    kept: tuple[str, ...]
    choices: tuple[str, ...]
    num_rows: int | None
    writes_labels: bool = False
    row_columns: frozenset[str] = frozenset()


def read_head(out: str, num_rows: int, *, columns: Sequence[str] = (), only_errors: bool = False) -> Head:
    """The first `num_rows` finished rows as Python values. columns: read only these. Raises UserError.

    If the model wrote labels, `confidence` may be asked for, too: exp(cumulative_logprob).
    """
    rows: list[dict[str, Any]] = []
    names: tuple[str, ...] = ()
    jobs = job_folders(out)
    found = [open_state(out)] if jobs[0].slice is None else [(job.folder, read_job(job.folder)) for job in jobs]
    states = [(folder, state) for folder, state in found if state is not None]
    spec = stored_spec(states[0][1].header.spec) if states else None
    writes_labels = (
        spec is not None
        and "choice" in (spec.sampling.structured_outputs or {})
        and spec.sampling.logprobs_mode == "processed_logprobs"
    )
    for folder, state in states:
        with contextlib.closing(_finished_tables(folder, state, num_rows, only_errors)) as tables:
            for table in tables:
                names = tuple(table.column_names)
                if writes_labels and CONFIDENCE in columns and CONFIDENCE not in names:
                    table = table.append_column(CONFIDENCE, pc.exp(table["cumulative_logprob"]))
                if unknown := [name for name in columns if name not in table.column_names]:
                    raise UserError(
                        f"--columns: no column {list_names(unknown)}; the output has {list_names(names, unknown[0])}"
                    )
                chosen = table.slice(0, num_rows - len(rows)).select(list(columns) or list(names))
                rows.extend(readable_rows(chosen))
                if len(rows) >= num_rows:
                    break
    kept, choices = ((), ()) if spec is None else (spec.output.keep_columns.values(), spec.input.choices or ())
    counts = [state.counts.num_errors if only_errors else state.counts.num_rows for _, state in states]
    is_done = len(states) == len(jobs) and all(state.is_done for _, state in states)
    num_all = sum(counts) if is_done else None
    row_columns = frozenset[str]() if spec is None else task_of(spec).row_columns
    return Head(tuple(rows), names, tuple(kept), choices, num_all, writes_labels, row_columns)


def _finished_tables(folder: Folder, state: State, num_rows: int, only_errors: bool) -> Generator[pa.Table, None, None]:
    with contextlib.ExitStack() as stack:
        journalled = None
        shards = list(range(min(total_shards(state.extents), _SHARDS_TO_LOOK_AT)))
        if only_errors:
            with_errors = {shard for shard, part in state.parts.items() if part.num_errors}
            shards = sorted(with_errors.union(shards).difference(state.parts.keys() - with_errors))
        for shard in shards:
            if shard in state.parts:
                yield from _part_tables(folder, f"parts/{part_name(shard)}", only_errors)
            else:
                if journalled is None:
                    journalled = _Journalled(folder, state)
                    stack.callback(journalled.close)
                yield journalled.rows(shard, num_rows, only_errors=only_errors)


def _part_tables(folder: Folder, name: str, only_errors: bool) -> Generator[pa.Table, None, None]:
    with open_part(folder.path(name)) as file:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index)
            yield error_rows(table) if only_errors else table


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
        self._source.close()

    def rows(self, shard: int, num_rows: int, *, only_errors: bool) -> pa.Table:
        """The journal's first results of one shard, as output rows."""
        tables = self._journal.tables(shard)
        results = pa.concat_tables([self._task.result_schema.empty_table(), *tables])
        own = self._order.of(shard_at(self._order.extents, shard))
        is_own = pa.array(own.locals(results["row_index"].to_numpy()) >= 0)
        order = [("row_index", "ascending"), ("request_index", "ascending")]
        results = results.filter(is_own)
        results = (error_rows(results) if only_errors else results).sort_by(order).slice(0, num_rows)
        indices = list(dict.fromkeys(results["row_index"].to_pylist()))
        if not self._columns:
            return self._task.reduce(None, results)
        columns = [self._source.read_columns(index, index + 1, self._columns, {}) for index in indices]
        empty = self._source.read_columns(0, 0, self._columns)
        return self._task.reduce(pa.concat_tables(columns or [empty]), results)
