"""A chat template as text: where a model keeps its own, and what one names. Imports no transformers."""

import functools
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

# What transformers gives to every chat template, beside the special tokens.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


def own_templates(folder: pathlib.Path) -> dict[str, str]:
    """The chat templates in a tokenizer's folder by name: `default`, and others where there are several.

    As transformers has it: chat_template.jinja counts before what tokenizer_config.json says, and that before the
    chat_template.json of older processors.
    """
    found: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found |= _named(_read_json(folder / name))
    if (folder / "chat_template.jinja").is_file():
        found = {"default": _read(folder / "chat_template.jinja")}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return found | {path.stem: _read(path) for path in more}


def _named(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        named = [one for one in value if isinstance(one, dict) and {"name", "template"} <= {*one}]
        return {one["name"]: one["template"] for one in named}
    return {}


def _read_json(path: pathlib.Path) -> object:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value.get("chat_template") if isinstance(value, dict) else None


def _read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@functools.lru_cache(8)
def variables(template: str) -> frozenset[str]:
    """The names that a chat template takes from outside. Raises jinja2.TemplateSyntaxError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters.setdefault("tojson", str)
    environment.from_string(template)  # unknown filters show here alone
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


class _Generation(jinja2.ext.Extension):
    """transformers' own tag, around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
