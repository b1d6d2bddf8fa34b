"""Jinja2 templates over a row's columns. They are sandboxed, and the length of their text is limited."""

import datetime
import decimal
import functools
import inspect
import json
import math
import re
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes
from jinja2.utils import missing

from batchinf.base.errors import RowFailed, SpecError
from batchinf.base.text import describe_error, escaped, list_names
from batchinf.source.types import WrittenNumber

# Far more than any model's context.
MAX_TEXT_CHARS = 64 << 20


class NullPrinted(Exception):
    """A template prints a null or NaN. Jinja2 would print the words None and nan."""


class TooMuchText(Exception):
    """A template makes more text than any model accepts."""


class Absent(jinja2.StrictUndefined):
    """A column that a row does not have. It prints as little as a null, and is false like a null in `x or ''`.

    A key that a value lacks is an error also there: nothing else would show a wrong name.
    """

    def __bool__(self) -> bool:  # type: ignore[override]
        return False if self._undefined_obj is missing else self._fail_with_undefined_error()


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of templates over rows: nothing is random, and printing a null is an error."""

    intercepted_binops = frozenset({"*", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=Absent, autoescape=False, keep_trailing_newline=True, finalize=_printed)
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        self.filters[_PRINTED] = _refuse_missing
        self.filters[_PRINTED_TEXT] = _printed
        self.filters[_ALL_PRINTED] = _refuse_missing_items
        self.filters[_ALL_PRINTED_TEXTS] = _printed_items

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See jinja2. A row may give the factor, so a text is not repeated beyond the limit."""
        if operator == "*" and max(_num_items(left, right), _num_items(right, left)) > MAX_TEXT_CHARS:
            raise TooMuchText
        if operator == "%" and isinstance(left, str):
            right = _PrintedDict(right) if isinstance(right, dict) else tuple(_refuse_missing_items(_as_tuple(right)))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """See jinja2. Methods of times that read the machine's clock or time zone are errors."""
        moment = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        formats = name in ("format", "format_map")
        if formats and isinstance(getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None), str):
            _refuse_missing_items([*args, *kwargs.values()])
            args = tuple(_PrintedDict(value) if isinstance(value, dict) else value for value in args)
        is_class = isinstance(moment, type) and issubclass(moment, datetime.date)
        if (is_class and name in _OF_THE_CLOCK) or (
            isinstance(moment, datetime.date) and _is_local(moment, name, args)
        ):
            raise jinja2.TemplateRuntimeError(
                f"{name}() depends on the machine's clock or time zone; a template may use only the row's values"
            )
        return super().call(__context, __obj, *args, **kwargs)


_OF_THE_CLOCK = frozenset({"now", "today", "utcnow", "fromtimestamp"})


def _is_local(moment: datetime.date, name: str, args: tuple[Any, ...]) -> bool:
    """Whether this call of a method reads the time zone of the machine."""
    if name == "strftime":
        return "%s" in str(args[:1])  # seconds since 1970, as the C library counts them
    has_zone = getattr(moment, "tzinfo", None) is not None
    return (name == "timestamp" and not has_zone) or (name == "astimezone" and not (has_zone and args))


_WITHOUT_NAN = "{{ x if x == x else '' }} would print nothing"


def _is_nan(value: object) -> bool:
    """Not a number of a CSV file, which is printed as it stands there."""
    return type(value) is float and math.isnan(value)


def _num_items(sequence: Any, factor: Any) -> int:
    """Length of `sequence * factor`; 0 if the product is a number."""
    return len(sequence) * factor if isinstance(sequence, str | list | tuple) and isinstance(factor, int) else 0


def _refuse_missing(value: Any) -> Any:
    """The value, if it can be printed. NaN is what pandas writes into JSON where a value is missing."""
    if _is_nan(value):
        raise NullPrinted
    return _refuse_unprintable(value)


def _printed(value: Any) -> Any:
    """As `_refuse_missing`, and a decimal in plain digits: Python writes 0E-9 for the 0 of nine decimals."""
    if isinstance(value, dict | list | tuple):
        return _refuse_missing(_with_bare_texts(value))
    return format(value, "f") if isinstance(value, decimal.Decimal) else _refuse_missing(value)


class _Bare(str):
    """A text that a list prints without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _with_bare_texts(value: Any) -> Any:
    """The value, with each part as it is printed alone: Python writes a time in a list as datetime.time(1, 2)."""
    if isinstance(value, dict):
        return {key: _with_bare_texts(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_bare_texts, value))
    if isinstance(value, _PRINTED_BARE):
        return _Bare(_printed(value))
    return _refuse_unprintable(value) if isinstance(value, bytes) else value


_PRINTED_BARE = (decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, uuid.UUID)


def _refuse_missing_items(values: Any) -> Any:
    """As `_refuse_missing`, for each of these values. Jinja2 maps and joins nothing for a null in place of them."""
    return None if values is None else [_refuse_missing(value) for value in values]


def _printed_items(values: Any) -> Any:
    """As `_refuse_missing_items`, with `_printed`."""
    return None if values is None else [_printed(value) for value in values]


class _PrintedDict(dict[Any, Any]):
    """A dictionary from which a text is made: only the values that the text names are refused."""

    def __getitem__(self, key: Any) -> Any:
        return _refuse_missing(super().__getitem__(key))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _refuse_unprintable(value: Any) -> Any:
    if value is None:
        raise NullPrinted
    if inspect.isroutine(value):  # its text has an address, which is another one in each process
        name = value.__name__
        raise jinja2.TemplateRuntimeError(f"it prints the method '{name}' of a value; value['{name}'] is its key")
    if any(isinstance(part, bytes) for part in (value.values() if isinstance(value, dict) else (value,))):
        raise jinja2.TemplateRuntimeError(
            "it prints bytes; images stand in parts of type image, or input.images_column"
        )
    return value


def _tojson(  # noqa: PLR0917  # templates call it as they call that of transformers
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` as in chat templates: unlike Jinja2's own filter, it escapes nothing for HTML. Dates become ISO text."""
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises an error with its name
    text = json.dumps(
        _with_marks(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_json_text,
    )
    return _MARKED.sub(r"\1", text)


# Stands in a text before a number that is to be printed as it stands in the file. No file has a text with it.
_MARK = "\ud800batchinf:"
_MARKED = re.compile(r'"(?:\ud800|\\ud800)batchinf:([^"]*)"')


def _with_marks(value: Any) -> Any:
    """The value with a marked text for each `WrittenNumber`, for which `json` has no other way."""
    if isinstance(value, WrittenNumber):
        return f"{_MARK}{value}"
    if isinstance(value, dict):
        return {str(key) if isinstance(key, WrittenNumber) else key: _with_marks(item) for key, item in value.items()}
    return list(map(_with_marks, value)) if isinstance(value, list | tuple) else value


def _json_text(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


# (text, most tokens, side) -> text; see `Encoder.cut_text`.
CutFunction = Callable[[str, int, Any], str]

_SIDES = ("left", "right")
# What a user writes for a column with a name of several words, or with signs in it.
_SEVERAL_WORDS = re.compile(r"\{\{-?\s*(\w+(?:[ .-]+\w+)+)\s*[|}]")


class RowTemplate:
    """A template from a field of the spec.

    columns: the columns that it uses, sorted. printed: those of them that it prints without asking whether they have a
    value.
    """

    def __init__(self, source: str, field: str, cut: CutFunction | None) -> None:
        """cut: the function that the filter `truncate_tokens` calls; None if no row will be rendered.

        Raises SpecError, with the line, for a wrong template.
        """
        # For the messages of error rows: `the template`, or the name of one template of a conversation.
        self._name = "the template" if field == "input.prompt_template" else f"the template {field}"
        environment = Environment()
        environment.filters["truncate_tokens"] = functools.partial(_truncate, cut)
        try:
            tree = environment.parse(source)
            self._aliases = _Aliases(tree).aliases
            _TextsOfNulls().visit(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            match = _SEVERAL_WORDS.search(source)
            hint = "" if match is None else f"; the column of this name would be {{{{ {column_call(match[1])} }}}}"
            raise SpecError(f"{field}, line {error.lineno}: {describe_error(error)}{hint}") from error
        if any(True for _ in jinja2.meta.find_referenced_templates(tree)):
            raise SpecError(f"{field}: it includes another template; write it as one")
        for line, words in _wrong_calls(tree):
            raise SpecError(f"{field}, line {line}: {words}")
        names = {alias: column for column, alias in self._aliases.items()}
        variables = jinja2.meta.find_undeclared_variables(tree) | _not_called(tree, environment.globals)
        self._functions = environment.globals.keys() - variables
        printed = variables - set(_asked_for(tree))
        self.columns = tuple(sorted({names.get(name, name) for name in variables}))
        self.printed = tuple(sorted({names.get(name, name) for name in printed}))

    def fill(self, values: Mapping[str, object]) -> str:
        """The text for a row's values. Raises RowFailed."""
        aliased = {alias: values[column] for column, alias in self._aliases.items() if column in values}
        if self._functions & values.keys():  # a column has the name of a function that the template calls
            values = {name: value for name, value in values.items() if name not in self._functions}
        try:
            return self._text({**values, **aliased} if aliased else values)
        except NullPrinted:
            nulls = [name for name in self.columns if values.get(name, "") is None]
            if not nulls and (odd := [name for name in self.columns if _is_nan(values.get(name))]):
                raise RowFailed(
                    "null_prompt", f"{self._name} prints a NaN (NaN here: {list_names(odd)}); {_WITHOUT_NAN}"
                ) from None
            where = f" (null here: {list_names(nulls)})" if nulls else ""
            raise RowFailed(
                "null_prompt", f"{self._name} prints a null{where}; {{{{ x or '' }}}} would print nothing"
            ) from None
        except TooMuchText:
            raise RowFailed("template_error", f"{self._name} makes more than {MAX_TEXT_CHARS:,} characters") from None
        except Exception as error:
            # A template may call any method of a row's values, so it may raise any exception.
            words = describe_error(error)
            for column, alias in self._aliases.items():
                words = words.replace(f"'{alias}'", f"'{column}'")
            raise RowFailed("template_error", f"{self._name} failed{line_of(error)}: {words}") from error

    def _text(self, values: Mapping[str, object]) -> str:
        pieces = []
        length = 0
        for piece in self._template.generate(values):
            length += len(piece)
            if length > MAX_TEXT_CHARS:
                raise TooMuchText
            pieces.append(piece)
        return "".join(pieces)


def _not_called(tree: nodes.Template, functions: Mapping[str, object]) -> set[str]:
    """Names of functions such as `range` that a template does not call: they are columns of this name."""
    names = list(tree.find_all(nodes.Name))
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    own = {name.name for name in names if name.ctx != "load"}
    return {name.name for name in names if name.name in functions and id(name) not in called} - own


def column_call(column: str) -> str:
    """How a template names a column whose name is no Jinja2 name."""
    return f"column({escaped(json.dumps(column, ensure_ascii=False))})"


class _Aliases(jinja2.visitor.NodeTransformer):
    """Puts a variable into a template in place of each `column("NAME")`. aliases: column → variable."""

    def __init__(self, tree: nodes.Template) -> None:
        self.aliases: dict[str, str] = {}
        self.visit(tree)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802 - the name is Jinja2's
        is_ours = isinstance(node.node, nodes.Name) and node.node.name == "column"
        match node.args:
            case [nodes.Const(value=str(column))] if is_ours and not node.kwargs:
                alias = self.aliases.setdefault(column, f"_column_{len(self.aliases)}")
                return nodes.Name(alias, "load", lineno=node.lineno)
        return self.generic_visit(node)


class _TextsOfNulls(jinja2.visitor.NodeTransformer):
    """Lets filters that make text of any value, and `~`, refuse a null, of which they would make the word None."""

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802 - the name is Jinja2's
        self.generic_visit(node)
        is_of_each = node.name == "join" and not (node.args[1:] or node.kwargs)
        match node.args:
            case [nodes.Const(value=name)] if node.name == "map":
                is_of_each = name in _OF_ONE_TEXT
        if node.node is not None and (is_of_each or node.name in _OF_ONE_TEXT):
            node.node = _filtered(node.node, _ALL_PRINTED_TEXTS if is_of_each else _PRINTED_TEXT)
        if node.node is not None and node.name in _WITH_DEFAULT and not (node.args or node.kwargs):
            node.node = _filtered(node.node, _PRINTED)
        if node.name == "format":
            node.args = [_filtered(value, _PRINTED) for value in node.args]
            if node.dyn_args is not None:
                node.dyn_args = _filtered(node.dyn_args, _ALL_PRINTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the name is Jinja2's
        self.generic_visit(node)
        node.nodes = [_filtered(value, _PRINTED_TEXT) for value in node.nodes]
        return node


# Names that no template can write.
_PRINTED = "printed value"
_PRINTED_TEXT = "printed text"
_ALL_PRINTED = "printed values"
_ALL_PRINTED_TEXTS = "printed texts"
# Filters that make a text of their value, whatever it is.
_OF_ONE_TEXT = (
    *("capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "pprint", "replace", "safe"),
    *("string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap"),
)
# Filters that make a 0 of what is no number, unless the template names another value.
_WITH_DEFAULT = ("int", "float")


def _filtered(value: nodes.Expr, name: str) -> nodes.Expr:
    # Jinja2 takes the filter's arguments by place only.
    by_place: tuple[Any, ...] = (value, name, [], [], None, None)
    return nodes.Filter(*by_place, lineno=value.lineno)


def _asked_for(tree: nodes.Template) -> Iterator[str]:
    """Names in conditions, in `x or ''`, and in `x | default('')`."""
    places: list[nodes.Node] = [node.test for node in tree.find_all(nodes.If)]
    places += [node.test for node in tree.find_all(nodes.CondExpr)]
    places += tree.find_all((nodes.Or, nodes.And, nodes.Test))
    places += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    for place in places:
        names = [place] if isinstance(place, nodes.Name) else place.find_all(nodes.Name)
        yield from (name.name for name in names if isinstance(name, nodes.Name))


def line_of(error: BaseException) -> str:
    """The line of the template that raised an exception, as ` at line 3`; empty if it is not known."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


def _truncate(cut: CutFunction | None, value: Any, num_tokens: Any, side: Any = "right") -> Any:
    """`{{ text | truncate_tokens(n) }}` is the text of the first n tokens; with side="left", of the last n."""
    if (words := _objection(num_tokens, side)) is not None:
        raise jinja2.TemplateRuntimeError(words)
    return value if value is None or _is_nan(value) or cut is None else cut(str(value), num_tokens, side)


def _objection(num_tokens: object, side: object) -> str | None:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        return f"truncate_tokens: got {num_tokens!r} for the number of tokens; must be a whole number, at least 0"
    if side not in _SIDES:
        return f"truncate_tokens: got side={side!r}; must be 'left' (the last tokens stay) or 'right'"
    return None


def _wrong_calls(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    """Calls of `truncate_tokens` that are wrong for every row: (line, message)."""
    for node in tree.find_all(nodes.Filter):
        if node.name != "truncate_tokens" or node.dyn_args is not None or node.dyn_kwargs is not None:
            continue
        arguments: dict[str, nodes.Expr] = dict(zip(("num_tokens", "side"), node.args, strict=False))
        arguments |= {str(pair.key): pair.value for pair in node.kwargs}
        if "num_tokens" not in arguments or len(node.args) > 2 or arguments.keys() - {"num_tokens", "side"}:
            yield node.lineno, "truncate_tokens: call it as truncate_tokens(n), or truncate_tokens(n, side='left')"
            continue
        known = {name: value.value for name, value in arguments.items() if isinstance(value, nodes.Const)}
        if (words := _objection(known.get("num_tokens", 0), known.get("side", "left"))) is not None:
            yield node.lineno, words
