"""Jinja2's sandbox, in which a template can neither reach out, nor run for ever, nor fill the memory in one step.

Text that is made step by step and kept is bounded by the number of steps and the size of each, not in all.
"""

import datetime
import decimal
import functools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# Far beyond any model's context; a template that goes on for longer has run away.
LONGEST_TEXT = 64 << 20
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
        if operator == "*" and max(_num_items(left, right), _num_items(right, left)) > LONGEST_TEXT:
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
            elif any(isinstance(arg, int) and arg > LONGEST_TEXT for arg in args):
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
        if any(isinstance(arg, int) and arg > LONGEST_TEXT for arg in given) or any(map(_WIDE.search, texts)):
            raise RanAway
        if len(texts) == 3:  # replace: the text, what is looked for, what takes its place
            _refuse_long((len(texts[0]) + 1) * len(texts[2]))
        return function(*args, **kwargs)

    return sized


def _refuse_long(length: int) -> None:
    if length > LONGEST_TEXT:
        raise RanAway


def _refuse_wide(text: str, args: tuple[Any, ...]) -> None:
    is_wide = any((isinstance(a, int) and a > LONGEST_TEXT) or (isinstance(a, str) and a.isdigit()) for a in args)
    if _WIDE.search(text) or (_NESTED.search(text) and is_wide):
        raise RanAway


def _num_items(sequence: Any, factor: Any) -> int:
    """Length of `sequence * factor`; 0 where that is a number."""
    return len(sequence) * factor if isinstance(sequence, str | list | tuple) and isinstance(factor, int) else 0


def _num_bits(base: Any, exponent: Any) -> int:
    """Size of `base ** exponent` in bits, about; 0 where it is no whole number."""
    return base.bit_length() * exponent if isinstance(base, int) and isinstance(exponent, int) else 0
