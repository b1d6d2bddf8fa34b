"""The width of a terminal, and lines that fit it. The command line and the progress display use it."""

import contextlib
import os
from typing import TextIO

# A line that begins with it is part of a text, such as a prompt, and is shown as it is.
QUOTE = "│ "


def terminal_width(stream: TextIO) -> int:
    """Cells of a terminal's line; 80 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def wrapped(line: str, stream: TextIO) -> str:
    """The line, broken between words if the stream is a terminal, which would cut words. Elsewhere it stays whole."""
    if not stream.isatty():
        return line
    from rich.cells import cell_len, chop_cells

    width = terminal_width(stream)
    if cell_len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip(" "))]
    if line.startswith(QUOTE, len(indent)):
        start = indent + QUOTE
        return "\n".join(start + piece for piece in chop_cells(line[len(start) :], max(1, width - len(start))))
    first, *words = line.strip(" ").split(" ")
    lines = [indent + first]
    for word in words:
        if cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines[-1] = lines[-1].rstrip(" ")
            lines.append(f"{indent}  {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)
