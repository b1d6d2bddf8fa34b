"""JSON schemas of structured outputs: what is wrong with a schema, and where a text breaks it.

Schemas of specs and of rows are checked here when they are first seen, and replicas check finished texts. Patterns are
ECMA-262's, which Python's `re` is not: it has other digits, another `$` and no `\\p{L}`. `format` is an annotation.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs
import referencing
import referencing.jsonschema
import regress
from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema_specifications import REGISTRY
from referencing.jsonschema import lookup_recursive_ref

from batchinf.base.text import clip

_MOST_PATTERNS = 4096
_MOST_SCHEMAS = 256
_MOST_DIGITS = 10_000
_SHOWN_CHARS = 200
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class UncheckableError(Exception):
    """The text is JSON, but has a number with too many digits to compute with."""


# -- values ----------------------------------------------------------------------------------------------------------


class _Number(Fraction):
    """A number of a JSON text, exact: as a float, 0.07 is no multiple of 0.01."""

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> "_Number":
        try:
            exact = Decimal(text)
        except ArithmeticError:  # its exponent has 19 digits
            exact = Decimal("Infinity")
        if not exact.is_finite() or (exact and abs(exact.adjusted()) > _MOST_DIGITS):
            raise UncheckableError(f"the number {clip(text)} has too many digits")
        number = super().__new__(cls, exact)
        number._text = text
        return number

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__


def _integer(text: str) -> int | _Number:
    return int(text) if len(text) < 1000 else _Number(text)  # Python refuses 4,300 digits


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_int=_integer, parse_float=_Number, parse_constant=_no_constant)


def read_json(text: str) -> Any:
    """The value of a JSON text, for `Schema.breach`. Raises ValueError, RecursionError or UncheckableError."""
    return _JSON.decode(text)


# -- patterns --------------------------------------------------------------------------------------------------------


@functools.lru_cache(_MOST_PATTERNS)
def _pattern(text: str) -> Any:
    # In Unicode mode, as JSON Schema says. Many schemas have escapes such as `\-` that only the other mode allows.
    with contextlib.suppress(regress.RegressError):
        return regress.Regex(text, "u")
    return regress.Regex(text)


def _matches(pattern: str, text: str) -> bool:
    try:
        return _pattern(pattern).find(text) is not None
    except UnicodeEncodeError:  # half of a surrogate pair, which a JSON text can have as an escape
        return _pattern(pattern).find(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")) is not None


# -- keywords with patterns, as jsonschema calls them ----------------------------------------------------------------

_KEYWORDS = Draft202012Validator.VALIDATORS


def _check_pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_matching(validator: Any, patterns: dict[str, Any], instance: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, part in patterns.items():
            for name in instance:
                if _matches(pattern, name):
                    yield from validator.descend(instance[name], part, path=name, schema_path=pattern)


def _check_additional(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        rest = {name: value for name, value in instance.items() if not _names(schema, name)}
        yield from _KEYWORDS["additionalProperties"](validator, part, rest, {})


def _check_unevaluated(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        others = {keyword: value for keyword, value in schema.items() if keyword != "unevaluatedProperties"}
        evaluated = set(_evaluated(validator, instance, others))
        rest = {name: value for name, value in instance.items() if name not in evaluated}
        yield from _KEYWORDS["unevaluatedProperties"](validator, part, rest, {})


def _names(schema: Any, name: str) -> bool:
    """Whether `properties` or `patternProperties` of a schema name a property."""
    patterns = schema.get("patternProperties", ())
    return name in schema.get("properties", ()) or any(_matches(pattern, name) for pattern in patterns)


def _evaluated(validator: Any, instance: dict[str, Any], schema: Any) -> Iterator[str]:
    """Yield the properties that a schema evaluates, itself or by the schemas in it for the same object."""
    if not isinstance(schema, dict):
        return
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        yield from instance
    yield from (name for name in instance if _names(schema, name))
    for keyword in _REFERENCES:
        if keyword in schema:
            recursive = keyword == "$recursiveRef"
            resolver = validator._resolver
            target = lookup_recursive_ref(resolver) if recursive else resolver.lookup(schema[keyword])
            there = validator.evolve(schema=target.contents, _resolver=target.resolver)
            yield from _evaluated(there, instance, target.contents)
    parts = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    parts += [part for name, part in schema.get("dependentSchemas", {}).items() if name in instance]
    if "if" in schema:
        holds = next(validator.descend(instance, schema["if"]), None) is None
        parts += [schema["if"], schema.get("then" if holds else "else", True)]
    for part in parts:
        if next(validator.descend(instance, part), None) is None:
            yield from _evaluated(validator, instance, part)


_WITH_PATTERNS = {
    "pattern": _check_pattern,
    "patternProperties": _check_matching,
    "additionalProperties": _check_additional,
    "unevaluatedProperties": _check_unevaluated,
}

# -- schemas ---------------------------------------------------------------------------------------------------------


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int | Fraction) and not isinstance(value, bool) and value.denominator == 1


@functools.cache
def _dialect(uri: str | None) -> Any:
    """jsonschema's validator of a dialect, with patterns of ECMA-262 and exact numbers; None if it is unknown."""
    base: Any = Draft202012Validator if uri is None else validators.validator_for({"$schema": uri}, default=None)
    if base is None:
        return None
    keywords = {name: check for name, check in _WITH_PATTERNS.items() if name in base.VALIDATORS}
    dialect: Any = validators.extend(base, keywords, type_checker=base.TYPE_CHECKER.redefine("integer", _is_integer))
    dialect.evolve = attrs.evolve  # jsonschema's own would take its plain validator where a `$ref` leads to a `$schema`
    return dialect


@functools.cache
def _metaschema(dialect: Any) -> Any:
    return dialect(dialect.META_SCHEMA, registry=REGISTRY)


class Schema:
    """A schema that texts are held against. Not for several threads at once."""

    def __init__(self, text: str) -> None:
        """text: JSON. Raises ValueError with what is wrong with the schema."""
        schema = _read_schema(text)
        dialect = _dialect_of(schema)
        # A registry without a way to retrieve anything: a `$ref` to another place is refused.
        self._validator = dialect(schema, registry=referencing.Registry())

    def breach(self, value: Any) -> str | None:
        """Where a value of `read_json` first breaks the schema, and how; None if it does not."""
        error = next(self._validator.iter_errors(value), None)
        return None if error is None else f"at {error.json_path}: {_words(error)}"


def _words(error: Any) -> str:
    if error.validator is None:
        return "nothing is allowed here"
    message = str(error.message)
    if len(message) <= _SHOWN_CHARS:
        return message
    return f"breaks {error.validator}: {clip(repr(error.validator_value))}"


def _read_schema(text: str) -> Any:
    try:
        return read_json(text)
    except UncheckableError as error:
        raise ValueError(str(error)) from None


def _dialect_of(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"got {clip(repr(schema))}; must be a mapping")
    uri = schema.get("$schema") if isinstance(schema, dict) else None
    if uri is not None and not isinstance(uri, str):
        raise ValueError(f"$schema: got {clip(repr(uri))}; must be the address of a dialect")
    dialect = _dialect(uri)
    if dialect is None:
        raise ValueError(
            f"$schema: got {clip(str(uri))}; must be a dialect of JSON Schema from draft 3 to 2020-12, such as "
            f"{Draft202012Validator.META_SCHEMA['$id']}"
        )
    return dialect


@functools.lru_cache(_MOST_SCHEMAS)
def objection(text: str) -> str | None:
    """What is wrong with a schema, as JSON text: its form, a pattern, or a reference; None if it can be used.

    It takes 1 ms for a small schema and 25 ms for one of 25 properties.
    """
    try:
        schema = _read_schema(text)
        dialect = _dialect_of(schema)
        if (error := next(_metaschema(dialect).iter_errors(schema), None)) is not None:
            return f"at {error.json_path}: {_words(error)}"
        _check_parts(schema, dialect)
        next(dialect(schema, registry=referencing.Registry()).iter_errors(None), None)
    except ValueError as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply, or refers to itself without end"
    return None


def _is_dialect(part: Any, dialect: Any) -> bool:
    """Whether a part is a dialect's own schema, to which a `$ref` leads. Raises ValueError for a part in another one.

    dialect: as the whole schema names it.
    """
    if part.get("$schema", dialect) == dialect:
        return False
    if str(part.get("$id") or part.get("id")) not in REGISTRY:
        raise ValueError(f"$schema: got {clip(str(part['$schema']))} inside; must be one dialect for the whole")
    return True


def _check_parts(schema: Any, dialect: Any) -> None:
    """Raise ValueError for a reference that leads nowhere or out of the schema, a bad pattern, or a second dialect."""
    address = dialect.META_SCHEMA.get("$id") or dialect.META_SCHEMA["id"]
    specification = referencing.jsonschema.specification_with(address)
    root = specification.create_resource(schema)
    left = [(root, REGISTRY.resolver_with_root(root))]
    seen: set[int] = set()
    while left:
        resource, resolver = left.pop()
        part = resource.contents
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        _check_patterns(part)
        if part is not schema and _is_dialect(part, schema.get("$schema")):
            continue
        for name in _REFERENCES:
            if isinstance(reference := part.get(name), str):
                target = _resolved(resolver, name, reference)
                left.append((specification.create_resource(target.contents), target.resolver))
        left += [(each, resolver.in_subresource(each)) for each in resource.subresources()]


def _resolved(resolver: Any, name: str, reference: str) -> Any:
    try:
        return resolver.lookup(reference)
    except referencing.exceptions.Unresolvable:
        raise ValueError(
            f"{name}: got {clip(reference)}, which is not in the schema; nothing is read from elsewhere"
        ) from None


def _check_patterns(part: dict[str, Any]) -> None:
    patterns = [part.get("pattern"), *(part.get("patternProperties") or ())]
    for pattern in patterns:
        if isinstance(pattern, str):
            try:
                _pattern(pattern)
            except regress.RegressError as error:
                raise ValueError(f"pattern: got {clip(pattern)}, which is no regular expression of ECMA-262: "
                                 f"{error}") from None  # fmt: skip
