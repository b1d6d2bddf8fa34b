"""The rows of `head` as a table."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from batchinf.base.text import choice_name, counted, list_names
from batchinf.commands.head import CONFIDENCE, Head
from batchinf.commands.status import job_status
from batchinf.commands.text.screen import cell

_TITLES = {"finish_reason": "finish", "num_output_tokens": "tokens"}
# Widths in columns of the terminal. A column of longer values shares what the others leave.
_SHORT = 20
_LEAST = 24
_GAP = 2


def head_table(head: Head, columns: Sequence[str], width: int) -> Iterator[Table | str]:
    """The table, then a line about columns that do not fit, and one if there are more rows.

    columns: those that the user named; empty: those that say most.
    """
    names = list(columns) or _chosen(head)
    titles = {name: cell(name if columns else _title(head, name)) for name in names}
    shown = [{name: _shown(head, name, row.get(name), columns) for name in names} for row in head.rows]
    cells = {name: [cell(row[name]) for row in shown] for name in names}
    widths = {name: max(text.cell_len for text in (titles[name], *cells[name])) for name in names}
    if not columns:
        main = "text" if "text" in names else names[-1]
        widths[main] = max(widths[main], _show_errors(head, cells[main]))
    left_out = _fit(names, widths, [] if columns else _dispensable(names, head, widths), width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in names:
        side: Literal["left", "right"] = "right" if _is_number(row[name] for row in shown) else "left"
        table.add_column(titles[name], justify=side, no_wrap=True, overflow="ellipsis", width=widths[name])
    for number in range(len(head.rows)):
        table.add_row(*(cells[name][number] for name in names))
    yield table
    if left_out:
        yield f"no room for {list_names(left_out)}: see --columns and --json"
    if head.num_rows is None:
        yield f"{counted(len(head.rows), 'row')} shown; the job is not done"
    elif len(head.rows) < head.num_rows:
        yield f"{len(head.rows):,} of {head.num_rows:,} rows; -n shows more"


def _is_number(values: Iterable[Any]) -> bool:
    """Whether all values are numbers, and some are known."""
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(value, int | float) for value in known)


def _title(head: Head, name: str) -> str:
    return CONFIDENCE if name == head.shown.label_logprob else _TITLES.get(name, name)


def _show_errors(head: Head, cells: list[Text]) -> int:
    """Put the message of each error row into its cell. Returns the width that the messages need."""
    errors: list[Text] = []
    for number, row in enumerate(head.rows):
        if (error := row.get("error") or row.get("error_type")) is not None:
            cells[number] = cell(f"{error}: {row.get('error_message') or ''}".rstrip(": "), "red")
            errors.append(cells[number])
    # Among other rows, a message takes no room from the columns with their texts.
    most = _SHORT if len(errors) < len(head.rows) else None
    return max([1, *(min(text.cell_len, most or text.cell_len) for text in errors)])


def _shown(head: Head, column: str, value: Any, columns: Sequence[str]) -> Any:
    """The value of a cell. The place of a choice has the choice's text behind it, and a confidence is no logarithm."""
    if column == head.shown.label_logprob and not columns and value is not None:
        return math.exp(value)
    if column in head.shown.choices and isinstance(value, int):
        return choice_name(value, head.shown.choices[column])
    return value


def _fit(names: list[str], widths: dict[str, int], may_go: list[str], width: int) -> list[str]:
    """Cut `widths` to the terminal's width. Takes columns of `may_go` from `names` if they do not fit; returns them."""
    left_out: list[str] = []
    while True:
        long = [name for name in names if widths[name] > _SHORT]
        room = width - _GAP * (len(names) - 1) - sum(widths[name] for name in names if name not in long)
        going = [name for name in may_go if name in names]
        if room >= sum(min(_LEAST, widths[name]) for name in long) or not going:
            break
        left_out.insert(0, going[-1])
        names.remove(going[-1])
    # The shortest first: what it does not need is left to the others.
    for number, name in enumerate(sorted(long, key=lambda name: widths[name])):
        widths[name] = max(1, min(widths[name], room // (len(long) - number)))
        room -= widths[name]
    return left_out


def _dispensable(names: Sequence[str], head: Head, widths: Mapping[str, int]) -> list[str]:
    """Columns that may be left out, the last one first.

    row_index goes first, and a second column of the ids; then long kept columns, then the task's own except the first,
    then short kept columns.
    """
    ids = [name for name in head.kept if "id" in names and all(row.get(name) == row.get("id") for row in head.rows)]
    kept = [name for name in head.kept if name not in ids]
    results = [name for name in names if name not in head.kept and name not in ("id", "row_index", "sample_index")]
    by_length = sorted(kept, key=lambda name: widths[name] > _SHORT)
    num_short = sum(widths[name] <= _SHORT for name in kept)
    return [
        *by_length[:num_short],
        *results[1:],
        *by_length[num_short:],
        *(name for name in names if name == "row_index" or name in ids),
    ]


def _chosen(head: Head) -> list[str]:
    names = ["id" if "id" in head.columns else "row_index"]
    if any(row.get("sample_index") for row in head.rows):
        names.append("sample_index")
    says_most = {*head.shown.names, head.shown.label_logprob}
    if any(row.get("num_output_tokens") for row in head.rows):
        says_most.add("num_output_tokens")
    results = [name for name in head.columns if name in says_most]
    if (label := head.shown.label_logprob) is not None:
        results.sort(key=lambda name: name not in ("text", label))  # the last ones are left out first
    return [*names, *head.kept, *results]


def nothing_line(out: str, *, only_errors: bool) -> str:
    """Why there is no row to show."""
    report = job_status(out)
    num_done = 0 if report.totals is None else report.totals.num_rows_committed
    if only_errors and num_done:
        return f"{out}: none of the {num_done:,} finished output rows is an error row"
    activity = ", ".join(dict.fromkeys(job.activity for job in report.jobs))
    more = "run the job again to go on" if activity == "stopped" else f"batchinf status {out} shows its progress"
    return f"{out}: no {'error row' if only_errors else 'row'} is finished yet; the job is {activity}: {more}"
