"""`batchinf head`: the first finished rows of a job, from its parts and its journal, while it runs or after."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import UserError
from batchinf.base.parquet import open_part, readable_rows
from batchinf.base.slices import Slice, job_folders, source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import list_names
from batchinf.commands.status import open_state, read_job
from batchinf.job.job import carried_columns
from batchinf.job.open import open_job_input
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.manifest.versions import stored_spec
from batchinf.output.batches import error_rows
from batchinf.output.journal import Journal
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.tasks.base import ShownColumns
from batchinf.tasks.registry import task_of

CONFIDENCE = "confidence"
_SHARDS_TO_LOOK_AT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first finished rows: those of the first parts, in input order within a part."""

    rows: tuple[dict[str, Any], ...]
    columns: tuple[str, ...]
    """Names of all columns; empty if no row is finished."""
    kept: tuple[str, ...] = ()
    """Columns that come from the input, without the id."""
    shown: ShownColumns = field(default_factory=ShownColumns)
    """How the task's own columns are shown."""
    num_rows: int | None = None
    """All rows, or error rows if only these were asked for; None if the job is not done."""


def read_head(out: str, num_rows: int, *, columns: Sequence[str] = (), only_errors: bool = False) -> Head:
    """The first `num_rows` finished rows as Python values. columns: read only these. Raises UserError.

    If the rows have labels, `confidence` may be asked for, too: the probability of the label.
    """
    jobs = job_folders(out)
    opened = [open_state(out)] if jobs[0].slice is None else [(job.folder, read_job(job.folder)) for job in jobs]
    states = [(folder, state) for folder, state in opened if state is not None]
    if not states:
        return Head(rows=(), columns=())
    spec = stored_spec(states[0][1].header.spec)
    shown = task_of(spec).shown_columns
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    for folder, state in states:
        with contextlib.closing(_finished_tables(folder, state, num_rows, only_errors)) as tables:
            for table in tables:
                names = table.column_names
                chosen = _chosen_columns(table, columns, shown).slice(0, num_rows - len(rows))
                rows.extend(readable_rows(chosen))
                if len(rows) >= num_rows:
                    break
    return Head(
        rows=tuple(rows),
        columns=tuple(names),
        kept=tuple(spec.output.keep_columns.values()),
        shown=shown,
        num_rows=_total([state for _, state in opened], only_errors),
    )


def _total(states: Sequence[State | None], only_errors: bool) -> int | None:
    """The number of all rows, or of error rows; None if the job is not done."""
    done = [state.counts for state in states if state is not None and state.is_done]
    if len(done) < len(states):
        return None
    return sum(counts.num_errors if only_errors else counts.num_rows for counts in done)


def _chosen_columns(table: pa.Table, columns: Sequence[str], shown: ShownColumns) -> pa.Table:
    """These columns of the table, or all of them. Raises UserError."""
    names = table.column_names
    if not columns:
        return table
    if shown.label_logprob is not None and CONFIDENCE in columns and CONFIDENCE not in names:
        table = table.append_column(CONFIDENCE, pc.exp(table[shown.label_logprob]))
    if unknown := [name for name in columns if name not in table.column_names]:
        raise UserError(f"--columns: no column {list_names(unknown)}; the output has {list_names(names, unknown[0])}")
    return table.select(list(columns))


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
        self._recorded = state.header.columns
        self._task = self._recorded.task(self._spec)
        self._journal = Journal(folder, "look", self._recorded.journal_schema)
        cache = source_folder(folder, Slice.of(state.header.identity))
        self._source = open_job_input(self._spec, cache, state.source_fingerprints, "ignore")
        self._columns = carried_columns(self._spec)
        self._order = RunOrder(folder, state.extents)

    def close(self) -> None:
        self._source.close()

    def rows(self, shard: int, num_rows: int, *, only_errors: bool) -> pa.Table:
        """The journal's first results of one shard, as output rows."""
        tables = self._journal.tables(shard)
        results = pa.concat_tables([self._recorded.journal_schema.empty_table(), *tables])
        rows = self._order.of(shard_at(self._order.extents, shard))
        results = results.filter(pa.array(rows.locals(results["row_index"].to_numpy()) >= 0))
        order = [("row_index", "ascending"), ("request_index", "ascending")]
        results = (error_rows(results) if only_errors else results).sort_by(order).slice(0, num_rows)
        indices = list(dict.fromkeys(results["row_index"].to_pylist()))
        if not self._columns:
            return self._recorded.output_rows(self._task, None, results)
        columns = [self._source.read_columns(index, index + 1, self._columns, {}) for index in indices]
        empty = self._source.read_columns(0, 0, self._columns)
        return self._recorded.output_rows(self._task, pa.concat_tables(columns or [empty]), results)
