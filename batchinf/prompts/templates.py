"""Jinja2 templates over a row's columns, and the sandbox that bounds their steps, memory and reach."""

import datetime
import decimal
import functools
import json
import re
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import describe_error, list_names

# Far beyond any model's context; a template that goes on for longer has run away.
MAX_TEXT_CHARS = 64 << 20
MOST_STEPS = 1_000_000  # turns of loops, and calls: about a second
_MOST_BITS = 1 << 20
_SIZED_FILTERS = ("batch", "center", "format", "indent", "replace", "slice", "tojson", "truncate", "wordwrap")
_WIDE = re.compile(r"%[-#0 +]*\d{8,}|%[^a-zA-Z%]*\.\d{8,}|\{[^{}]*:[^{}]*\d{8,}")
_NESTED = re.compile(r"\{[^{}]*\{|%[^a-zA-Z%]*\*")


class NullPrinted(Exception):
    """A template prints a null, which would read as the word None."""


class RanAway(Exception):
    """A template makes more than any model takes, or goes on for ever."""


class Environment(jinja2.sandbox.SandboxedEnvironment):
    """For templates over rows: nothing is random, a null is no text. One thread renders at a time."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined, autoescape=False, keep_trailing_newline=True, finalize=self._print
        )
        self._num_steps = self._num_chars = 0
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        self.filters |= {name: _sized(self.filters[name]) for name in _SIZED_FILTERS}
        self.filters |= {"batchinf_counted": self._counted, "batchinf_joined": _joined}

    def guarded(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template, its loops counted."""
        guarded = _Guards().visit(tree)
        # As jinja2's own `from_string` has it, which takes a tree as well.
        return self.from_string(guarded)

    def begin(self) -> None:
        """Forget what was counted: the next render has it all to itself."""
        self._num_steps = self._num_chars = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See jinja2: refuses what would fill the memory."""
        if operator == "*" and max(_num_items(left, right), _num_items(right, left)) > MAX_TEXT_CHARS:
            raise RanAway
        if operator == "**" and _num_bits(left, right) > _MOST_BITS:
            raise RanAway
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _refuse_long(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """See jinja2. Its odd names leave all others to the templates' own arguments."""
        __self._step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name in ("format", "format_map"):
                _refuse_wide(owner, (*args, *kwargs.values()))
            elif name == "replace" and len(args) > 1 and isinstance(args[1], str):
                _refuse_long((len(owner) + 1) * len(args[1]))
            elif any(isinstance(arg, int) and arg > MAX_TEXT_CHARS for arg in args):
                raise RanAway
        return super().call(__context, __obj, *args, **kwargs)

    def _print(self, value: Any) -> Any:
        if value is None:
            raise NullPrinted
        if isinstance(value, str):
            # Printed into a block that is kept, text can double with each step.
            self._num_chars += len(value)
            _refuse_long(self._num_chars)
        return value

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MOST_STEPS:
            raise RanAway(f"the template takes more than {MOST_STEPS:,} steps")


class _Guards(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "batchinf_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, "batchinf_joined", [], [], None, None, lineno=node.lineno)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As chat templates have it, in contrast to Jinja2's own: nothing is escaped for HTML. Dates are ISO text."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, with its name
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_json_text
    )


def _json_text(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _joined(pieces: Iterable[Any]) -> str:
    texts = [str(piece) for piece in pieces]
    _refuse_long(sum(map(len, texts)))
    return "".join(texts)


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses a width, a number of items or a format that would fill the memory."""

    @functools.wraps(function)  # its marks of what Jinja2 passes to it, too
    def sized(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        texts = [arg for arg in given if isinstance(arg, str)]
        if any(isinstance(arg, int) and arg > MAX_TEXT_CHARS for arg in given) or any(map(_WIDE.search, texts)):
            raise RanAway
        if len(texts) == 3:  # replace: the text, what is looked for, what takes its place
            _refuse_long((len(texts[0]) + 1) * len(texts[2]))
        return function(*args, **kwargs)

    return sized


def _refuse_long(length: int) -> None:
    if length > MAX_TEXT_CHARS:
        raise RanAway


def _refuse_wide(text: str, args: tuple[Any, ...]) -> None:
    is_wide = any((isinstance(a, int) and a > MAX_TEXT_CHARS) or (isinstance(a, str) and a.isdigit()) for a in args)
    if _WIDE.search(text) or (_NESTED.search(text) and is_wide):
        raise RanAway


def _num_items(sequence: Any, factor: Any) -> int:
    """Length of `sequence * factor`; 0 where that is a number."""
    return len(sequence) * factor if isinstance(sequence, str | list | tuple) and isinstance(factor, int) else 0


def _num_bits(base: Any, exponent: Any) -> int:
    """Size of `base ** exponent` in bits, about; 0 where it is no whole number."""
    return base.bit_length() * exponent if isinstance(base, int) and isinstance(exponent, int) else 0


# (text, most tokens, side) -> text; see `TextCutter`.
CutFunction = Callable[[str, int, Any], str]

_SIDES = ("left", "right")


class RowTemplate:
    """A template of one of the spec's fields. columns: those that it names, sorted."""

    def __init__(self, source: str, field: str, cut: CutFunction | None = None) -> None:
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
            raise SpecError(f"{field}, line {error.lineno}: {describe_error(error)}") from error
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
                if length > MAX_TEXT_CHARS:
                    raise RanAway
                pieces.append(piece)
        except NullPrinted:
            nulls = [name for name in self.columns if values.get(name, "") is None]
            where = f" (null here: {list_names(nulls)})" if nulls else ""
            return RowError("null_prompt", f"{self._name} prints a null{where}; {{{{ x or '' }}}} would print nothing")
        except RanAway as error:
            message = str(error) or f"the template makes more than {MAX_TEXT_CHARS:,} characters"
            return RowError("template_error", message)
        except Exception as error:
            # A template calls what it likes on what a row holds, so anything may come out.
            return RowError("template_error", f"{self._name} failed{line_of(error)}: {describe_error(error)}")
        return "".join(pieces)


def line_of(error: BaseException) -> str:
    """Where in its template an exception was raised, as ` at line 3`; empty where that is not known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


class _Truncate:
    """`{{ text | truncate_tokens(n) }}` is the text of the first n tokens; with side="left", of the last n."""

    def __init__(self, cut: CutFunction | None) -> None:
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
