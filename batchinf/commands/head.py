"""`batchinf head`: the first finished rows of a job, from its parts and its journal, while it runs or after."""

import contextlib
import pathlib
import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa
from rich import box
from rich.table import Table
from rich.text import Text

from batchinf.base.errors import UserError
from batchinf.base.parquet import open_part, readable_rows
from batchinf.base.slices import Slice, source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import choice_name, counted, list_names
from batchinf.commands.screen import cell
from batchinf.commands.status import job_status, jobs_in
from batchinf.job.job import carried_fields
from batchinf.job.open import open_job_input
from batchinf.manifest.look import Look
from batchinf.manifest.state import State
from batchinf.manifest.versions import stored_spec
from batchinf.output.counts import error_rows
from batchinf.output.journal import Journal
from batchinf.output.parts import output_rows
from batchinf.output.remarks import INVENTED
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at, total_shards
from batchinf.tasks.base import ShownColumns
from batchinf.tasks.columns import IMAGE_FACTS
from batchinf.tasks.computed import CONFIDENCE, computed_columns, confidence
from batchinf.tasks.registry import task_of

_IMAGES = "images"
_SHARDS_TO_LOOK_AT = 1000
_OF_ERRORS = ("error_type", "error_message")
_TITLES = {"finish_reason": "finish", "num_output_tokens": "tokens"}
# Widths in columns of the terminal. A column of longer values shares what the others leave.
_SHORT = 20
_LEAST = 24
_GAP = 2


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
    only_errors: bool = False
    """Whether only error rows were asked for."""
    is_invented: bool = False
    """Whether the scripted engine made the answers, and no model."""


def read_head(out: str, num_rows: int, *, columns: Sequence[str] = (), only_errors: bool = False) -> Head:
    """The first `num_rows` finished rows as Python values. columns: read only these. Raises UserError.

    If the rows have labels or choices, `confidence` may be asked for, too: the probability of the label, or of the best
    choice among all; and of choices `label`, the text of the best one.
    """
    look = Look(out)
    found = jobs_in(look)
    states = [(job, state) for job, state in found if state is not None]
    if not states:
        return Head(rows=(), columns=())
    spec = stored_spec(states[0][1].header.spec)
    shown = task_of(spec).shown_columns
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    for job, state in states:
        with contextlib.closing(
            _finished_tables(look, job, state, num_rows=num_rows, only_errors=only_errors)
        ) as tables:
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
        num_rows=_total([state for _, state in found], only_errors),
        only_errors=only_errors,
        is_invented=spec.scripted is not None,
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
    for name, column in computed_columns(shown, names).items():
        if name in columns:
            table = table.append_column(name, column.values(table))
    if unknown := [name for name in columns if name not in table.column_names]:
        raise UserError(f"--columns: no column {list_names(unknown)}; the output has {list_names(names, unknown[0])}")
    return table.select(list(columns))


def _finished_tables(
    look: Look, job: Folder, state: State, *, num_rows: int, only_errors: bool
) -> Generator[pa.Table, None, None]:
    with contextlib.ExitStack() as stack:
        journalled = None
        shards = list(range(min(total_shards(state.extents), _SHARDS_TO_LOOK_AT)))
        if only_errors:
            with_errors = {shard for shard, part in state.parts.items() if part.num_errors}
            shards = sorted(with_errors.union(shards).difference(state.parts.keys() - with_errors))
        for shard in shards:
            if shard in state.parts:
                yield from _part_tables(look.part(job, state.parts[shard]), only_errors)
            elif not look.is_bucket:  # a bucket's journal is for its next run alone
                if journalled is None:
                    journalled = _Journalled(job, state)
                    stack.callback(journalled.close)
                yield journalled.rows(shard, num_rows, only_errors=only_errors)


def _part_tables(path: pathlib.Path, only_errors: bool) -> Generator[pa.Table, None, None]:
    with open_part(path) as file:
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
        # The user may have named the folder of a slice itself.
        cache = source_folder(Folder(folder.root, Slice.of(state.header.identity)))
        self._source = open_job_input(self._spec, cache, state.source_fingerprints, "ignore")
        self._carried = carried_fields(self._spec, self._source)
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
        if not self._carried:
            return output_rows(self._recorded, self._task, None, results)
        columns = [self._source.read_fields(index, index + 1, self._carried, {}) for index in indices]
        empty = self._source.read_fields(0, 0, self._carried)
        return output_rows(self._recorded, self._task, pa.concat_tables(columns or [empty]), results)


def head_table(head: Head, columns: Sequence[str], width: int) -> Iterator[Table | str]:
    """The table, then a line about columns that do not fit, and one if there are more rows.

    columns: those that the user named; empty: those that say most.
    """
    head = head if columns else _with_images(_with_confidence(head))
    grid = {name: _Column.of(head, name, is_named=bool(columns)) for name in _names(head, columns)}
    names = list(grid)
    widths = {name: column.width for name, column in grid.items()}
    if not columns and not head.only_errors:
        main = "text" if "text" in names else names[-1]
        widths[main] = max(widths[main], _show_errors(head, grid[main].cells))
    left_out = _fit(names, widths, [] if columns else _dispensable(names, head, widths), width)
    yield _table([(grid[name], widths[name]) for name in names])
    yield from _remarks(head, left_out)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table before it is cut to a width."""

    title: Text
    values: list[Any]
    cells: list[Text]
    is_whole: bool
    """Whether a long value goes on in the next line; else it is cut."""

    @classmethod
    def of(cls, head: Head, name: str, *, is_named: bool) -> "_Column":
        """is_named: by the user."""
        values = [_shown(head, name, row) for row in head.rows]
        title = cell(name if is_named else _TITLES.get(name, name))
        return cls(title, values, list(map(cell, values)), is_whole=name in _OF_ERRORS and not is_named)

    @property
    def width(self) -> int:
        return max(text.cell_len for text in (self.title, *self.cells))

    def add_to(self, table: Table, width: int) -> None:
        side: Literal["left", "right"] = "right" if _is_number(self.values) else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if self.is_whole else "ellipsis"
        table.add_column(self.title, justify=side, no_wrap=not self.is_whole, overflow=overflow, width=width)


def _table(columns: Sequence[tuple[_Column, int]]) -> Table:
    """The table of these columns, each with its width."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for column, width in columns:
        column.add_to(table, width)
    for row in zip(*(column.cells for column, _ in columns), strict=True):
        table.add_row(*row)
    return table


def _names(head: Head, columns: Sequence[str]) -> list[str]:
    """The columns of the table, in its order."""
    return list(columns) or (_chosen_of_errors(head) if head.only_errors else _chosen(head))


def _with_confidence(head: Head) -> Head:
    """With the column of the probability of a label or of the best choice, if the rows have one."""
    if not _has_confidence(head):
        return head
    rows = tuple({CONFIDENCE: confidence(head.shown, row), **row} for row in head.rows)
    return replace(head, rows=rows)


def _has_confidence(head: Head) -> bool:
    return head.shown.choice_sums is not None or head.shown.label_logprob in head.columns


def _with_images(head: Head) -> Head:
    """With a column of the formats and sizes of each row's images, if the rows have any. It counts as a kept one."""
    shown = [_images_text(*(row.get(name) or () for name, _ in IMAGE_FACTS)) for row in head.rows]
    if not any(shown) or _IMAGES in head.columns:
        return head
    rows = tuple({**row, _IMAGES: text} for row, text in zip(head.rows, shown, strict=True))
    return replace(head, rows=rows, kept=(*head.kept, _IMAGES))


def _images_text(formats: Sequence[str], widths: Sequence[int], heights: Sequence[int]) -> str | None:
    """`PNG 96 × 64`, and the number of others; None without images."""
    if not formats:
        return None
    more = f" and {len(formats) - 1} more" if len(formats) > 1 else ""
    return f"{formats[0]} {widths[0]:,} × {heights[0]:,}{more}"


def _remarks(head: Head, left_out: Sequence[str]) -> Iterator[str]:
    if head.is_invented:
        yield INVENTED
    if left_out:
        facts = [name for name, _ in IMAGE_FACTS]
        named = [column for name in left_out for column in (facts if name == _IMAGES else [name])]
        yield f"no room for {list_names(named)}: see --columns and --json"
    if head.num_rows is None:
        yield f"{counted(len(head.rows), 'row')} shown; the job is not done"
    elif len(head.rows) < head.num_rows:
        yield f"{len(head.rows):,} of {head.num_rows:,} rows; -n shows more"


def _is_number(values: Iterable[Any]) -> bool:
    """Whether all values are numbers, and some are known."""
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) for value in known)


def _show_errors(head: Head, cells: list[Text]) -> int:
    """Put the message of each error row into its cell. Returns the width that the messages need."""
    errors: list[Text] = []
    for number, row in enumerate(head.rows):
        if (error := row.get("error_type")) is not None:
            cells[number] = cell(f"{error}: {row.get('error_message') or ''}".rstrip(": "), "red")
            errors.append(cells[number])
    # Among other rows, a message takes no room from the columns with their texts.
    most = _SHORT if len(errors) < len(head.rows) else None
    return max([1, *(min(text.cell_len, most or text.cell_len) for text in errors)])


def _shown(head: Head, column: str, row: Mapping[str, Any]) -> Any:
    """The value of a cell. The place of a choice has the choice's text behind it."""
    value = row.get(column)
    if column in head.shown.choices and isinstance(value, int):
        return choice_name(value, head.shown.texts_of(row))
    return value


def _fit(names: list[str], widths: dict[str, int], may_go: list[str], width: int) -> list[str]:
    """Cut `widths` to the terminal's width. Takes columns of `may_go` from `names` if they do not fit; returns them."""
    left_out: list[str] = []
    while True:
        long = [name for name in names if widths[name] > _SHORT]
        room = _room(names, long, widths, width)
        going = [name for name in may_go if name in names]
        if room >= sum(min(_LEAST, widths[name]) for name in long) or not going:
            break
        left_out.insert(0, going[-1])
        names.remove(going[-1])
    _share(room, long, widths)
    return left_out


def _room(names: list[str], long: list[str], widths: dict[str, int], width: int) -> int:
    """What the other columns leave to the long ones."""
    return width - _GAP * (len(names) - 1) - sum(widths[name] for name in names if name not in long)


def _share(room: int, names: list[str], widths: dict[str, int]) -> None:
    """Cut the widths of these columns to the room. The shortest first: what it does not need is left to the others."""
    for number, name in enumerate(sorted(names, key=widths.__getitem__)):
        widths[name] = max(1, min(widths[name], room // (len(names) - number)))
        room -= widths[name]


def _dispensable(names: Sequence[str], head: Head, widths: Mapping[str, int]) -> list[str]:
    """Columns that may be left out, the last one first.

    row_index goes first, and a second column of the ids; then long kept columns, then the task's own except the first,
    then short kept columns.
    """
    ids = [name for name in head.kept if "id" in names and all(row.get(name) == row.get("id") for row in head.rows)]
    results = [name for name in names if name not in ("id", "row_index", "sample_index", *_OF_ERRORS, *head.kept)]
    # The column with the largest number goes first.
    order = {name: 2 * (widths[name] > _SHORT) for name in head.kept}
    order |= dict.fromkeys(results[1:], 1) | dict.fromkeys(("row_index", *ids), 3)
    return sorted((name for name in names if name in order), key=order.__getitem__)


def _chosen(head: Head) -> list[str]:
    names = ["id" if "id" in head.columns else "row_index"]
    if any(row.get("sample_index") for row in head.rows):
        names.append("sample_index")
    says_most = {*head.shown.names}
    if any(row.get("num_output_tokens") for row in head.rows):
        says_most.add("num_output_tokens")
    results = [name for name in head.columns if name in says_most]
    if _has_confidence(head):
        places = {name: place for place, name in enumerate(head.shown.names)}
        results.sort(key=lambda name: places.get(name, len(places)))
        results.insert(1, CONFIDENCE)
    return [*names, *head.kept, *results]


def _chosen_of_errors(head: Head) -> list[str]:
    """What went wrong stands first: it is there at any width."""
    name = "id" if "id" in head.columns else "row_index"
    sample = ["sample_index"] if any(row.get("sample_index") for row in head.rows) else []
    return [*(column for column in _OF_ERRORS if column in head.columns), name, *sample, *head.kept]


def nothing_line(out: str, *, only_errors: bool) -> str:
    """Why there is no row to show."""
    report = job_status(out)
    num_done = 0 if report.totals is None else report.totals.num_rows_committed
    if only_errors and num_done:
        return f"{out}: none of the {num_done:,} finished output rows is an error row"
    activity = ", ".join(dict.fromkeys(job.activity for job in report.jobs))
    more = (
        "run the job again to go on"
        if activity == "stopped"
        else f"batchinf status {shlex.quote(out)} shows its progress"
    )
    return f"{out}: no {'error row' if only_errors else 'row'} is finished yet; the job is {activity}: {more}"
