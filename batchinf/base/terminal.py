"""The width of a terminal, and lines that fit it. The command line and the progress display use it."""

import contextlib
import os
import textwrap
from typing import TextIO


def terminal_width(stream: TextIO) -> int:
    """Cells of a terminal's line; 80 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def wrapped(line: str, stream: TextIO) -> str:
    """The line, broken between words if the stream is a terminal, which would cut words. Elsewhere it stays whole."""
    if not stream.isatty():
        return line
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    width = terminal_width(stream)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
