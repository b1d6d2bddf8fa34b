"""The rows of `head` as a table."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from batchinf.base.text import choice_name, counted, list_names
from batchinf.commands.head import CONFIDENCE, Head
from batchinf.commands.status import job_status
from batchinf.commands.text.screen import cell

# Columns that are left out unless they are asked for: bookkeeping, prompts, and what there is for each token.
_LEFT_OUT = re.compile(
    "row_index|sample_index|prompt|prompt_.*|.*token_ids|.*logprobs|.*ranks|positions|stop_reason|cumulative_logprob"
    "|num_prompt_tokens|num_bytes|num_context_tokens|choice_num_.*|choice_is_greedy|attempts|error_.*|has_second_bos"
)
# Without a wish for columns it is shown for labels only, and as a probability.
_CONFIDENCE = "cumulative_logprob"
_TITLES = {"finish_reason": "finish", "num_output_tokens": "tokens", _CONFIDENCE: CONFIDENCE}
# Widths in columns of the terminal. A column of longer values shares what the others leave.
_SHORT, _LEAST, _GAP = 20, 24, 2


def head_table(head: Head, wanted: Sequence[str], width: int) -> Iterator[Table | str]:
    """The table, then a line about columns that do not fit, and one if there are more rows.

    wanted: columns; empty: those that say most.
    """
    names = list(wanted) or _chosen(head)
    titles = {name: cell(name if wanted else _TITLES.get(name, name)) for name in names}
    shown = [{name: _shown(head, name, row.get(name), wanted) for name in names} for row in head.rows]
    cells = {name: [cell(row[name]) for row in shown] for name in names}
    widths = {name: max(text.cell_len for text in (titles[name], *cells[name])) for name in names}
    if not wanted:
        place, errors = _main(names), dict[int, Text]()
        for number, row in enumerate(head.rows):
            if (error := row.get("error") or row.get("error_type")) is not None:
                errors[number] = cell(f"{error}: {row.get('error_message') or ''}".rstrip(": "), "red")
                cells[place][number] = errors[number]
        # Among other rows, a message takes no room from the columns with their texts.
        most = _SHORT if len(errors) < len(head.rows) else None
        widths[place] = max(widths[place], *(min(text.cell_len, most or text.cell_len) for text in errors.values()), 1)
    left_out = _fit(names, widths, [] if wanted else _dispensable(names, head, widths), width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in names:
        values = [row[name] for row in shown if row[name] is not None]
        is_number = bool(values) and all(isinstance(value, int | float) for value in values)
        table.add_column(
            titles[name],
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=widths[name],
        )
    for number in range(len(head.rows)):
        table.add_row(*(cells[name][number] for name in names))
    yield table
    if left_out:
        yield f"no room for {list_names(left_out)}: see --columns and --json"
    if head.num_rows is None:
        yield f"{counted(len(head.rows), 'row')} shown; the job is not done"
    elif len(head.rows) < head.num_rows:
        yield f"{len(head.rows):,} of {head.num_rows:,} rows; -n shows more"


def _shown(head: Head, column: str, value: Any, wanted: Sequence[str]) -> Any:
    """The value of a cell. The place of a choice has the choice's text behind it, and a confidence is no logarithm."""
    if column == _CONFIDENCE and not wanted and value is not None:
        return math.exp(value)
    if column.startswith(("best", "answer")) and column not in head.kept and isinstance(value, int):
        return choice_name(value, head.choices)
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


def _main(names: Sequence[str]) -> str:
    return "text" if "text" in names else names[-1]


def _dispensable(names: Sequence[str], head: Head, widths: Mapping[str, int]) -> list[str]:
    """Columns that may be left out, the last one first.

    row_index goes first, and a second column of the ids; then long kept columns, then the task's own except the first,
    then short kept columns.
    """
    ids = [name for name in head.kept if "id" in names and all(row.get(name) == row.get("id") for row in head.rows)]
    kept = [name for name in head.kept if name not in ids]
    own = [name for name in names if name not in head.kept and name not in ("id", "row_index", "sample_index")]
    by_length = sorted(kept, key=lambda name: widths[name] > _SHORT)
    num_short = sum(widths[name] <= _SHORT for name in kept)
    return [
        *by_length[:num_short],
        *own[1:],
        *by_length[num_short:],
        *(name for name in names if name == "row_index" or name in ids),
    ]


def _chosen(head: Head) -> list[str]:
    names = ["id" if "id" in head.columns else "row_index"]
    if any(row.get("sample_index") for row in head.rows):
        names.append("sample_index")
    results = {*head.row_columns, "chosen_logprobs", *([_CONFIDENCE] if head.writes_labels else [])}
    own = [name for name in head.columns if name not in {*names, *head.kept}]
    own = [name for name in own if name in results or not _LEFT_OUT.fullmatch(name)]
    if head.writes_labels:
        own.sort(key=lambda name: name not in ("text", _CONFIDENCE))  # the last ones are left out first
    return [
        *names,
        *head.kept,
        *(name for name in own if name != "num_output_tokens" or any(row.get(name) for row in head.rows)),
    ]


def nothing_line(out: str, *, only_errors: bool) -> str:
    """Why there is no row to show."""
    report = job_status(out)
    num_done = 0 if report.totals is None else report.totals.num_rows_committed
    if only_errors and num_done:
        return f"{out}: none of the {num_done:,} finished output rows is an error row"
    activity = ", ".join(dict.fromkeys(job.activity for job in report.jobs))
    more = "run the job again to go on" if activity == "stopped" else f"batchinf status {out} shows its progress"
    return f"{out}: no {'error row' if only_errors else 'row'} is finished yet; the job is {activity}: {more}"
