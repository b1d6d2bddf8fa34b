"""The templates of the HTML pages. A page has no scripts or connections."""

import importlib.resources
import re
from typing import Any

import jinja2
from markupsafe import Markup

from batchinf.base.text import plain

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


def template(name: str) -> jinja2.Template:
    """The template `name` of this package, for HTML or Markdown.

    In all values, control characters and marks of direction are escaped, marks of HTML, and in Markdown its own marks.
    """
    is_html = name.endswith(".html")
    environment = jinja2.Environment(
        autoescape=is_html,
        finalize=_visible if is_html else _literal,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, utc=_utc, raw=Markup, fenced=_fenced)
    return environment.from_string(_text(name))


def _text(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _literal(value: Any) -> Any:
    return _MARKDOWN.sub(r"\\\1", plain(" ".join(value.splitlines()))) if type(value) is str else value


def _fenced(text: str) -> Markup:
    """A block of code. Its fence is longer than any run of backticks in the text."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=2))
    lines = "\n".join(plain(line) for line in text.splitlines())
    return Markup(f"{fence}yaml\n{lines}\n{fence}")


def _utc(at: str) -> str:
    return f"{at[:19].replace('T', ' ')} UTC"


def _visible(value: Any) -> Any:
    return plain(value) if type(value) is str else value


def _number(number: float) -> str:
    return f"{number:,.0f}" if isinstance(number, int) or abs(number) >= 1000 else f"{number:.4g}"
