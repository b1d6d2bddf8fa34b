"""Text for error messages and reports: values, names and other programs' errors in one short line."""

from collections.abc import Iterable

import jinja2

_SHOWN_NAMES = 20


def list_names(names: Iterable[str]) -> str:
    """Names with commas between them, the first ones where they are many."""
    names = list(names)
    more = f", and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def one_line(text: object, most: int | None = None) -> str:
    """Text, or an exception's message, in one line, cut after `most` characters."""
    return " ".join(str(text).split())[:most]


def error_message(error: BaseException, most: int | None = None) -> str:
    """An exception's message in one line; the name of its type where it has none."""
    return one_line(error, most) or type(error).__name__


def describe_error(error: BaseException) -> str:
    """An exception in one short line; its type too unless it is Jinja2's own, whose words say enough."""
    words = shorten(one_line(error), 300)
    return words if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {words}"


def shorten(text: str, most: int) -> str:
    """At most so many characters, and none that UTF-8 cannot encode: what a row holds may be quoted in it."""
    short = text if len(text) <= most else text[:most] + "…"
    return short.encode(errors="backslashreplace").decode()


def clip(text: str, length: int = 60) -> str:
    """At most `length` characters in one line, without what a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: length + 1])
    return shown if len(text) <= length else f"{shown[:length]}…"


def name_type(value: object) -> str:
    """What a value is, as people who write JSON call it."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")
