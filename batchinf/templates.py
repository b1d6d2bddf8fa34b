"""Jinja2 templates over a row's columns, compiled in the sandbox: which columns they name, and the text of a row."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from batchinf.errors import RowError, SpecError
from batchinf.sandbox import LONGEST_TEXT, Environment, NullPrinted, RanAway
from batchinf.words import describe, list_names

# (text, most tokens, side) -> text; see `TextCutter`.
Cut = Callable[[str, int, Any], str]

_SIDES = ("left", "right")


class RowTemplate:
    """A template of one of the spec's fields. columns: those that it names, sorted."""

    def __init__(self, source: str, field: str, cut: Cut | None = None) -> None:
        """cut: what the filter `truncate_tokens` calls; None where nothing is going to be rendered.

        Raises SpecError, with its line, for a template that cannot be.
        """
        # In words for error rows: `the template`, or which of a conversation's.
        self._name = "the template" if field == "input.prompt_template" else f"the template {field}"
        self._environment = Environment()
        self._environment.filters["truncate_tokens"] = _Truncate(cut)
        try:
            tree = self._environment.parse(source)
            self._environment.from_string(source)  # its errors name lines; those of a changed tree do not
            has_includes = any(True for _ in jinja2.meta.find_referenced_templates(tree))
            self.columns = tuple(sorted(jinja2.meta.find_undeclared_variables(tree)))
            wrong_calls = list(_wrong_calls(tree))
            self._template = self._environment.guarded(tree)
        except jinja2.TemplateSyntaxError as error:
            raise SpecError(f"{field}, line {error.lineno}: {describe(error)}") from error
        if has_includes:
            raise SpecError(f"{field}: it includes another template; write it as one")
        for line, words in wrong_calls:
            raise SpecError(f"{field}, line {line}: {words}")

    def fill(self, values: Mapping[str, object]) -> str | RowError:
        """The text for a row's values, or why there is none."""
        pieces, length = [], 0
        self._environment.begin()
        try:
            for piece in self._template.generate(values):
                length += len(piece)
                if length > LONGEST_TEXT:
                    raise RanAway
                pieces.append(piece)
        except NullPrinted:
            nulls = [name for name in self.columns if values.get(name, "") is None]
            where = f" (null here: {list_names(nulls)})" if nulls else ""
            return RowError("null_prompt", f"{self._name} prints a null{where}; {{{{ x or '' }}}} would print nothing")
        except RanAway as error:
            message = str(error) or f"the template makes more than {LONGEST_TEXT:,} characters"
            return RowError("template_error", message)
        except Exception as error:
            # A template calls what it likes on what a row holds, so anything may come out.
            return RowError("template_error", f"{self._name} failed{line_of(error)}: {describe(error)}")
        return "".join(pieces)


def line_of(error: BaseException) -> str:
    """Where in its template an exception was raised, as ` at line 3`; empty where that is not known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


class _Truncate:
    """`{{ text | truncate_tokens(n) }}` is the text of the first n tokens; with side="left", of the last n."""

    def __init__(self, cut: Cut | None) -> None:
        self._cut = cut

    def __call__(self, value: Any, num_tokens: Any, side: Any = "right") -> Any:
        if (words := _objection(num_tokens, side)) is not None:
            raise jinja2.TemplateRuntimeError(words)
        if value is None or self._cut is None:
            return value
        return self._cut(str(value), num_tokens, side)


def _objection(num_tokens: object, side: object) -> str | None:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        return f"truncate_tokens: got {num_tokens!r} for the number of tokens; must be a whole number, at least 0"
    if side not in _SIDES:
        return f"truncate_tokens: got side={side!r}; must be 'left' (the last tokens stay) or 'right'"
    return None


def _wrong_calls(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    """Calls of `truncate_tokens` that no row can make right, with their lines."""
    for node in tree.find_all(nodes.Filter):
        if node.name != "truncate_tokens" or node.dyn_args is not None or node.dyn_kwargs is not None:
            continue
        given: dict[str, nodes.Expr] = dict(zip(("num_tokens", "side"), node.args, strict=False))
        given |= {str(pair.key): pair.value for pair in node.kwargs}
        if "num_tokens" not in given or len(node.args) > 2 or given.keys() - {"num_tokens", "side"}:
            yield node.lineno, "truncate_tokens: call it as truncate_tokens(n), or truncate_tokens(n, side='left')"
            continue
        known = {name: value.value for name, value in given.items() if isinstance(value, nodes.Const)}
        if (words := _objection(known.get("num_tokens", 0), known.get("side", "left"))) is not None:
            yield node.lineno, words
