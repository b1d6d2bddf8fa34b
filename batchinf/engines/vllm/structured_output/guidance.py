"""What llguidance, the library of vLLM's backend `guidance`, makes of a structure. Imports nothing else of vLLM."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
from llguidance import LLMatcher

_MOST_SCHEMAS = 1024
_MOST_PATTERNS = 4096
_LENIENT = "x-guidance"
_MAPS = frozenset({"properties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


@functools.lru_cache(_MOST_SCHEMAS)
def relaxed(schema: str) -> tuple[str, tuple[str, ...]]:
    """The schema for the engine, as JSON text, and the keywords of the schema that it will not enforce.

    By itself, llguidance refuses a schema with a keyword that it does not have. Here it leaves such keywords out and
    enforces the rest; finished texts are held against the whole schema. Raises ValueError if it cannot take the rest.
    """
    made = json.loads(schema)
    if not isinstance(made, dict):
        return schema, ()
    own = made.get(_LENIENT)
    made[_LENIENT] = {**(own if isinstance(own, dict) else {}), "lenient": True}
    is_bad, messages = _validated(made)
    left_out: list[str] = []
    if is_bad and _free_bad_patterns(made):
        left_out.append("pattern")
        is_bad, messages = _validated(made)
    if is_bad:
        raise ValueError("; ".join(messages))
    return json.dumps(made, ensure_ascii=False), tuple(dict.fromkeys([*left_out, *_names(messages)]))


def _validated(schema: dict[str, Any]) -> tuple[bool, list[str]]:
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        is_bad, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except Exception as error:  # the library's own, of any type
        return True, [str(error)]
    return bool(is_bad), [str(message) for message in messages]


def _names(warnings: list[str]) -> Iterator[str]:
    """The keywords that warnings name. An unknown `format` is none: it is an annotation."""
    for warning in warnings:
        if warning.startswith("Unimplemented keys: "):
            yield from json.loads(warning.removeprefix("Unimplemented keys: "))
        elif not warning.startswith("Unknown format"):
            yield warning.split()[0]


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            for name, value in part.items():
                if name in _MAPS or name == "patternProperties":
                    left += value.values() if isinstance(value, dict) else ()
                elif name not in _VALUES:
                    left.append(value)


@functools.lru_cache(_MOST_PATTERNS)
def _takes_pattern(pattern: str) -> bool:
    is_bad, _ = _validated({"type": "string", "pattern": pattern})
    return not is_bad


def _free_bad_patterns(schema: dict[str, Any]) -> bool:
    """Remove the patterns that llguidance cannot take, so that such strings and names are free. False without any."""
    has_bad = False
    for part in _parts(schema):
        if isinstance(part.get("pattern"), str) and not _takes_pattern(part["pattern"]):
            del part["pattern"]
            has_bad = True
        named = part.get("patternProperties")
        if isinstance(named, dict) and not all(map(_takes_pattern, named)):
            part["patternProperties"] = {name: value for name, value in named.items() if _takes_pattern(name)}
            part.pop("additionalProperties", None)
            has_bad = True
    return has_bad


@functools.cache
def _bytes_tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


def matcher(kind: str, text: str) -> Callable[[str], bool]:
    """A function that says whether a text matches a whole regex or grammar. Raises what llguidance raises.

    It takes time in proportion to the text, whatever the regex; Python's `re` may run forever.
    """
    grammar = llguidance.grammar_from(kind, text)
    if LLMatcher.validate_grammar(grammar):
        raise ValueError("it does not compile")
    made = LLMatcher(_bytes_tokenizer(), grammar)

    def is_whole(text: str) -> bool:
        made.reset()
        token_ids = list(text.encode(errors="replace"))
        num_taken = made.try_consume_tokens(token_ids)
        return num_taken == len(token_ids) and bool(made.is_accepting())

    return is_whole
