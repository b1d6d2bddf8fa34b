"""Text for people: values, names and errors in one short line, lines that fit a terminal, reasons of failed rows."""

import base64
import contextlib
import dataclasses
import datetime
import difflib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_SHOWN_NAMES = 20
_FEW_NAMES = 10


def near_path(path: str) -> str:
    """For a path that does not exist: a question with the name in its folder that is most like its own, or ""."""
    folder, name = os.path.split(path.rstrip("/"))
    with contextlib.suppress(OSError):
        if close := difflib.get_close_matches(name, os.listdir(folder or "."), n=1):
            return f"; did you mean {os.path.join(folder, close[0])}?"
    return ""


def list_names(names: Iterable[str], meant: str | None = None) -> str:
    """Names with commas between them: the first 20, or the 10 that are most like a missing name, `meant`."""
    names = list(names)
    most = _SHOWN_NAMES if meant is None else _FEW_NAMES
    if meant is not None and len(names) > most:
        names = list(dict.fromkeys([*difflib.get_close_matches(meant, names), *names]))
    more = f", and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def names_in(text: str) -> tuple[str, ...]:
    """The names between commas, without the blanks around them."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def one_line(text: object, most: int | None = None) -> str:
    """Text, or an exception's message, in one line, cut after `most` characters."""
    return " ".join(str(text).split())[:most]


def error_message(error: BaseException, most: int | None = None) -> str:
    """An exception's message in one line; the name of its type if it has none."""
    return one_line(error, most) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """An exception in one short line, with its type unless Jinja2 raised it."""
    import jinja2  # not for every command: it takes 15 ms

    words = shorten(one_line(error), 300)
    return words if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {words}"


def shorten(text: str, most: int) -> str:
    """The first `most` characters. Lone surrogates are escaped, as messages quote rows and UTF-8 cannot encode them."""
    short = text if len(text) <= most else text[:most] + "…"
    return short.encode(errors="backslashreplace").decode()


def clip(text: str, length: int = 60) -> str:
    """At most `length` characters in one line, with control characters escaped."""
    shown = escaped(text[: length + 1])
    return shown if len(text) <= length else f"{shown[:length]}…"


def escaped(text: str) -> str:
    """The text with Python's escapes for characters that cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_SCREEN_LINES = 40
_SCREEN_CHARS = 4000


def within_a_screen(message: str) -> str:
    """A message that quotes texts of any length, cut to about a screen: in the middle, as its end says what to do."""
    lines = message.split("\n")
    if len(lines) <= _SCREEN_LINES and len(message) <= _SCREEN_CHARS:
        return message
    if len(lines) > _SCREEN_LINES:
        num_left_out = len(lines) - _SCREEN_LINES + 1
        lines = [*lines[: _SCREEN_LINES - 2], f"… and {num_left_out:,} more lines …", lines[-1]]
    most = max(_SCREEN_CHARS // len(lines) - 3, 0)
    return "\n".join(
        line if len(line) <= most else f"{line[: most * 2 // 3]} … {line[len(line) - most // 3 :]}" for line in lines
    )


def plain(text: str) -> str:
    """Escape characters that a terminal would obey: control characters, and marks that change the direction of text.

    Names of columns and files, and rows, come from other people.
    """
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_OBEYED = re.compile("[\0-\b\v-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def plain_line(text: str, most: int = 2000) -> str:
    """`plain` in one line of at most `most` characters; a line break becomes ↵."""
    cut = text[: most + 1].replace("\r\n", "\n").replace("\n", "↵").replace("\t", " ")
    return plain(cut if len(text) <= most else f"{cut[:most]}…")


def name_type(value: object) -> str:
    """The type of a value, in JSON's terms."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def to_json(report: Any, *, ensure_ascii: bool = True) -> str:
    """A report as one line of JSON. A number that is not finite becomes null, bytes base64; a date becomes text."""
    return json.dumps(_values(report), default=_text_of, ensure_ascii=ensure_ascii)


def _text_of(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def nested_text(value: object) -> str:
    """A list or a mapping for people: JSON, with the number of bytes in place of bytes."""
    return json.dumps(value, ensure_ascii=False, default=value_text)


def value_text(value: object) -> str:
    """A single value for people: of bytes, such as an image, their number."""
    return size_text(len(value)) if isinstance(value, bytes) else str(value)


def _values(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _values(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def utc_now(timespec: str = "milliseconds") -> str:
    """The time in UTC, in ISO format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)


def duration(seconds: float | None) -> str:
    """`1h02m`, `3m20s` or `12s`; `?` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def time_taken(seconds: float) -> str:
    """`duration` of something that ran, which is never `0s`: `less than 1s`."""
    return duration(seconds) if seconds >= 1 else "less than 1s"


def time_text(seconds: float) -> str:
    """A rough time in one unit: `12 s`, `35 min`, `4.1 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def choice_name(place: int, choices: Sequence[str]) -> str | int:
    """The place of a choice with its text; the place alone if the text is unknown. A number as text has quotes."""
    if not 0 <= place < len(choices):
        return place
    text = choices[place]
    return f'{place}: "{text}"' if text.strip().isdecimal() else f"{place}: {text}"


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(num_bytes: float) -> str:
    """`230.4 kB`, `2.1 MB`, `96.4 GB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def short_count(number: float) -> str:
    """`950`, `12.3k`, `4.56M`, `7.8B`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


# -- reasons of errors -------------------------------------------------------------------------------------------------

# Errors of rows are grouped by type and reason, so that no row is counted under the message of a row that failed
# otherwise. A reason is a message without its numbers, the value after `got`, and the names of images.

# DuckDB reads it too.
VARYING = r"""(?:got|image [0-9]+:) (?:'[^']*'|"[^"]*")|[0-9][0-9,.]*"""
COMPARED_CHARS = 400
_SHOWN_OF_A_TYPE = 3


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Error rows of one type and one reason, and the first of them."""

    error_type: str
    num_rows: int
    first_row: int
    """Its position in the input."""
    first_message: str


def without_numbers(message: str) -> str:
    """The message, but equal for rows that failed for one reason."""
    return re.sub(VARYING, "#", message[:COMPARED_CHARS])


def most_frequent(groups: Iterable[ErrorGroup]) -> tuple[list[ErrorGroup], list[str]]:
    """At most three groups of each type, the most frequent first; then a line for each type with the rest."""
    num_groups = Counter[str]()
    num_rows = Counter[str]()  # of the groups that are not shown
    shown: list[ErrorGroup] = []
    for group in sorted(groups, key=lambda group: -group.num_rows):
        num_groups[group.error_type] += 1
        if num_groups[group.error_type] <= _SHOWN_OF_A_TYPE:
            shown.append(group)
        else:
            num_rows[group.error_type] += group.num_rows
    rest = []
    for error_type, number in num_rows.most_common():
        num_others = num_groups[error_type] - _SHOWN_OF_A_TYPE
        reasons = "another reason" if num_others == 1 else f"{num_others:,} other reasons"
        rest.append(f"{number:,} × {error_type} for {reasons}")
    return shown, rest


# -- lines of a terminal -----------------------------------------------------------------------------------------------

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
