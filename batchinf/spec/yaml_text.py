"""YAML as specs use it, version 1.2 with plain values only: reads it with the location of each field, and writes it."""

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from batchinf.base.errors import SpecError
from batchinf.base.paths import shown_url
from batchinf.base.text import clip

# A spec is a page of text. With these limits a wrong or hostile file is refused quickly.
MAX_SPEC_BYTES = 2**20
MAX_NODES = 10_000
MAX_YAML_DEPTH = 50

_TAG = "tag:yaml.org,2002:"
_DIGITS = "(?:0|[1-9][0-9]{0,99})"  # any number that makes sense; longer ones are text
_OCTAL_OR_HEX = "0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}"
FLOAT = rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# By tag: the pattern of a scalar, and the function that makes its value.
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda text: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    "int": (re.compile(rf"(?:[-+]?{_DIGITS}|{_OCTAL_OR_HEX})\Z"), lambda text: int(text, 0)),
    "float": (re.compile(rf"(?:{FLOAT})\Z"), lambda text: float(re.sub(r"\.(?=[inIN])", "", text))),
    "merge": (re.compile(r"<<\Z"), str),
    "str": (re.compile(""), str),
}
_IMPLICIT = [(f"{_TAG}{name}", pattern) for name, (pattern, _) in _SCALARS.items() if name != "str"]


def dump_yaml(data: dict[str, Any]) -> str:
    """Fields as YAML that `read_spec` reads as the same values."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {None: _IMPLICIT}  # noqa: RUF012
    num_nodes = 0
    depth = 0

    def get_single_node(self) -> yaml.Node | None:
        try:
            return super().get_single_node()
        except (ValueError, OverflowError):  # numbers that PyYAML does not check
            raise yaml.MarkedYAMLError(problem="impossible number", problem_mark=self.get_mark()) from None

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_nodes += 1
        self.depth += 1
        if self.depth > MAX_YAML_DEPTH or self.num_nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem="too long or too deeply nested", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    # Uses the rules of YAML 1.1 too, so that text is quoted if a reader of either version could mistake it for a number
    # or another value.
    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: _IMPLICIT}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # If they are not escaped, the other line breaks of YAML 1.1 are read back as \n.
        style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else "|" if "\n" in text else None
        return self.represent_scalar(f"{_TAG}str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


class YamlReader:
    """Turns YAML into plain values and notes the location of each field."""

    def __init__(self, location: Callable[[yaml.Mark], str]) -> None:
        self.locations: dict[str, str] = {}
        self._location = location
        self._budget = MAX_SPEC_BYTES  # characters, with all aliases expanded

    def read(self, text: str, field: str = "") -> Any:
        """The value of the YAML in `text`; None if it is empty. field: the name of the value."""
        try:
            node = _Loader(text).get_single_node()
            return None if node is None else self._value(node, field, 0)
        except yaml.reader.ReaderError as error:
            lines = text[: error.position].split("\n")
            mark = _mark(len(lines) - 1, len(lines[-1]))
            what = f"character U+{error.character:04X}"
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or _mark()
            what = ", ".join(filter(None, [error.context, error.problem]))
            if error.context == "while scanning a quoted scalar" and "end of stream" in str(error.problem):
                # The end of the file says nothing; the location of the quote does.
                mark = error.context_mark or mark
                what = "the quote that begins here is not closed"
            elif isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
                what = _after_quote(text, mark) or what + (
                    "; indent with spaces" if "\\t" in what else "; does a text need quotes?"
                )
        raise SpecError(f"{self._location(mark)}: not valid YAML: {what}")

    def _wrong(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(f"{self._location(node.start_mark)}: {message}")

    def _spend(self, node: yaml.Node, depth: int, num_characters: int) -> None:
        self._budget -= num_characters
        if self._budget < 0 or depth > MAX_YAML_DEPTH:
            raise self._wrong(node, "too long or too deeply nested with its aliases written out")

    def _value(self, node: yaml.Node, field: str, depth: int) -> Any:
        self._spend(node, depth, 1 + len(field) + len(node.value))
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and tag == "map":
            prefix = f"{field}." if field else ""
            return {key: self._named(f"{prefix}{key}", *pair, depth) for key, pair in self._pairs(node, depth).items()}
        if isinstance(node, yaml.SequenceNode) and tag == "seq":
            return [self._named(f"{field}[{i}]", item, item, depth) for i, item in enumerate(node.value)]
        return self._scalar(node, tag)

    def _scalar(self, node: yaml.Node, tag: str) -> Any:
        pattern, make = _SCALARS.get(tag, (None, str))
        if not isinstance(node, yaml.ScalarNode) or pattern is None or not pattern.match(node.value):
            raise self._wrong(node, f"tag {clip(node.tag.replace(_TAG, '!!'))} is not allowed here; leave it out")
        # JSON, which is YAML too, writes an emoji as two escapes.
        value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        if re.search("[\ud800-\udfff]", value):
            raise self._wrong(node, f"got {got(value)}, which holds half a character (a surrogate)")
        return make(value)

    def _named(self, field: str, name: yaml.Node, node: yaml.Node, depth: int) -> Any:
        self.locations[field] = self._location(name.start_mark)
        return self._value(node, field, depth + 1)

    def _pairs(self, node: yaml.Node, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        # A mapping's own keys win over merged keys (`<<: *base`), and earlier bases win over later ones.
        self._spend(node, depth, 1 + len(node.value))
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, "<< takes a mapping, or a list of mappings")
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        has_merge = False
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                if has_merge:
                    raise self._wrong(key_node, "<<: given twice; write one with a list, such as <<: [*a, *b]")
                has_merge = True
                for base in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    merged = {**self._pairs(base, depth + 1), **merged}
                continue
            key = self._value(key_node, "", depth)
            if not isinstance(key, str):
                is_word = isinstance(key_node, yaml.ScalarNode) and key_node.value
                quoted = f'write "{clip(key_node.value)}"' if is_word else "does it need quotes?"
                raise self._wrong(key_node, f"got {got(key)} for a field's name; must be text: {quoted}")
            if key in pairs:
                raise self._wrong(key_node, f"{clip(key)}: given twice; leave one of them out")
            pairs[key] = key_node, value_node
        return {**merged, **pairs}


def _after_quote(text: str, mark: yaml.Mark) -> str:
    """What to write if a value begins with a quote and goes on behind it, as a name in SQL does; empty: it does not."""
    line = [*text.split("\n"), ""][mark.line]
    # The look behind begins a search at each word, not at each character: a word of 500,000 would take hours.
    found = re.search(r"""(?<![\w.])([\w.]+): +("[^"]*"|'[^']*') +[^ #,}\]]""", line[: mark.column + 1])
    if found is None:
        return ""
    value = "" if "{" in line[: found.start()] else f": {clip(line[found.start(2) :].strip())}"
    way = "" if value else " in a section without braces,"
    return (
        f"the value of {found[1]} ends with its second quote, but the line goes on; write{way} `{found[1]}: >-` and "
        f"the value on the next line, indented{value}"
    )


def _mark(line: int = 0, column: int = 0) -> yaml.Mark:
    return yaml.Mark(name="", index=0, line=line, column=column, buffer=None, pointer=0)


def shown_text(text: str) -> str:
    """The beginning of a text; of a URL without what may be a secret."""
    has_password = re.match(r"[^\s/:@]+:\S+@", text)
    return clip(shown_url(f"//{text}")[2:] if has_password else shown_url(text) if "://" in text else text)


def got(value: Any) -> str:
    """A value as error messages show it."""
    if isinstance(value, str):
        return f"'{shown_text(value)}'" if value else "empty text"
    if isinstance(value, list | dict):
        return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
    return "nothing (null)" if value is None else clip(json.dumps(value, default=repr))
