"""The templates of the HTML pages. A page has no scripts or connections."""

import importlib.resources
from typing import Any

import jinja2

from batchinf.base.text import plain


def template(name: str) -> jinja2.Template:
    """The template `name` of this package. In all values, marks of HTML, control characters and marks of direction are
    escaped.
    """
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, utc=_utc)
    return environment.from_string(_text(name))


def _text(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _utc(at: str) -> str:
    return f"{at[:19].replace('T', ' ')} UTC"


def _visible(value: Any) -> Any:
    return plain(value) if type(value) is str else value


def _number(number: float) -> str:
    return f"{number:,.0f}" if isinstance(number, int) or abs(number) >= 1000 else f"{number:.4g}"
