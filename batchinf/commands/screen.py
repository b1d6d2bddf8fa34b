"""Tables and colour for the terminal, through rich. Without a terminal, or with NO_COLOR, all is plain text."""

import os
import sys

from rich.console import Console
from rich.text import Text

from batchinf.base.text import nested_text, plain_line, value_text

_PIPE_COLUMNS = 160


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process with exit code 1


def console() -> Console:
    """Standard output. A pipe has 160 columns, unless COLUMNS says otherwise."""
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Screen(highlight=False, markup=False, emoji=False, width=_PIPE_COLUMNS if is_piped else None)


def cell(value: object, style: str = "") -> Text:
    """A value in one line. Nothing in it is obeyed: no markup, and no control character."""
    if value is None:
        return Text("–", "dim")
    if isinstance(value, float):
        return Text(f"{value:.4g}", style)
    if isinstance(value, list):
        return Text(_list_text(value), style)
    if isinstance(value, dict):
        return Text(plain_line(nested_text(value)), style)
    return Text(plain_line(value_text(value)), style)


def _list_text(values: list[object]) -> str:
    first = ", ".join(cell(value).plain for value in values[:4])
    return f"[{first}]" if len(values) <= 4 else f"[{first}, … {len(values):,}]"
