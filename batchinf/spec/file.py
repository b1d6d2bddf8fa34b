"""Reads specs from YAML files or from Python: parses, checks, applies overrides; errors have line and column."""

import difflib
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchinf.base.errors import SpecError
from batchinf.base.places import check_is_here, elsewhere
from batchinf.base.slices import Slice
from batchinf.base.storage import reason
from batchinf.base.text import clip, name_type, near_path
from batchinf.spec.fields import null_hint
from batchinf.spec.job import (
    ENGINE_ARGUMENTS_ELSEWHERE,
    PATH_FIELDS,
    RUNTIME_ENGINE_ARGUMENTS,
    SECRET_NAME,
    JobSpec,
    field_docs,
    is_task_section,
)

# Limit for all `{file: path}` together. job.yaml has their content, and must be short enough to be read as a spec.
MAX_VALUE_BYTES = 960 << 10

# Fields of `input` and of `sampling.structured_outputs` that accept `{file: path}`. True: the content is parsed
# as YAML or JSON. All others take it as text.
_TEXTS = ("prompt_template", "system_prompt", "chat_template")
_STRUCTURES = {"json": True, "choice": True, "regex": False, "grammar": False}


def _value_places(data: dict[str, Any]) -> Iterator[tuple[Any, Any, str, bool]]:
    """The places for `{file: path}`: (mapping, its key, the field's name, whether the file is parsed as YAML).

    Messages come before their contents, because the messages may be in a file too.
    """
    section = _mapping(data.get("input"))
    yield from ((section, name, f"input.{name}", False) for name in _TEXTS if name in section)
    if "messages" in section:
        yield section, "messages", "input.messages", True
    messages = section.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if "content" in _mapping(message):
            yield message, "content", f"input.messages[{number}].content", False
    structure = _mapping(_mapping(data.get("sampling")).get("structured_outputs"))
    for name, is_value in _STRUCTURES.items():
        if name in structure:
            yield structure, name, f"sampling.structured_outputs.{name}", is_value


def _paths(data: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """The places of paths in a spec: (mapping or list, its key, the field's name)."""
    for section, name in PATH_FIELDS:
        yield from _texts(_mapping(data.get(section)), name, f"{section}.{name}")
    yield from _texts(_mapping(_mapping(data.get("input")).get("exclude")), "job", "input.exclude.job")


def _texts(holder: dict[str, Any], key: str, field: str) -> Iterator[tuple[Any, Any, str]]:
    """The place of the text under a key, or of each text in the mapping or the list there."""
    value = holder.get(key)
    if isinstance(value, str):
        yield holder, key, field
    elif isinstance(value, dict):
        yield from ((value, name, f"{field}.{name}") for name in value if isinstance(value[name], str))
    elif isinstance(value, list):
        yield from ((value, number, f"{field}[{number}]") for number, item in enumerate(value) if isinstance(item, str))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _expand(path: str) -> str:
    """Expand environment variables and ~ in a path. Raises ValueError with a message of one line."""

    def variable(match: re.Match[str]) -> str:
        value = "$" if match[0] == "$$" else os.environ.get(match[1] or match[2])
        plain = "or write $$ for a plain $"
        if not value:
            raise ValueError(f"{clip(match[0])} is unset or empty in the environment; set it, {plain}")
        if re.search(SECRET_NAME, match[0]):
            named = f"{clip(match[0])} is named like a secret, and paths are recorded"
            raise ValueError(f"{named}; take another variable, {plain}")
        return value

    expanded = re.sub(r"\$(?:(\$|[A-Za-z_][A-Za-z_0-9]*)|\{([^}]*)\})", variable, path)
    return expanded if "\0" in expanded else os.path.expanduser(expanded)


# A spec is a page of text. With these limits a wrong or hostile file is refused quickly.
MAX_SPEC_BYTES = 2**20
MAX_NODES = 10_000
MAX_YAML_DEPTH = 50
MAX_ERRORS = 10

_TAG = "tag:yaml.org,2002:"
_DIGITS = "(?:0|[1-9][0-9]{0,99})"  # any number that makes sense; longer ones are text
_OCTAL_OR_HEX = "0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}"
_FLOAT = rf"[-+]?(?:\.[0-9]+|{_DIGITS}(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
# By tag: the pattern of a scalar, and the function that makes its value.
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda text: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    "int": (re.compile(rf"(?:[-+]?{_DIGITS}|{_OCTAL_OR_HEX})\Z"), lambda text: int(text, 0)),
    "float": (re.compile(rf"(?:{_FLOAT})\Z"), lambda text: float(re.sub(r"\.(?=[inIN])", "", text))),
    "merge": (re.compile(r"<<\Z"), str),
    "str": (re.compile(""), str),
}
_IMPLICIT = [(f"{_TAG}{name}", pattern) for name, (pattern, _) in _SCALARS.items() if name != "str"]


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A spec, and the places where its fields are written."""

    spec: JobSpec
    places: Mapping[str, str]
    """Dotted field → `jobs/x.yaml:7:3`, or the `--set` that gave it; '' → the file."""
    path: str
    slice: Slice | None = None
    """The slice to run."""

    def line(self, field: str, message: str) -> str:
        """The field's place, its name, and `message`. A field that is not written has its section's place."""
        return _line(self.places, field, message)

    def error(self, field: str, message: str) -> SpecError:
        """An error about one field, for checks that need more than the spec itself."""
        return SpecError(self.line(field, message))


SpecSource = str | os.PathLike[str] | Mapping[str, Any] | JobSpec
Overrides = Sequence[str] | Mapping[str, Any]


def list_of(items: Sequence[Any]) -> list[Any]:
    """The items that a caller in Python gives. One text alone is one item: its letters are none."""
    return [items] if isinstance(items, str) else list(items)


def read_spec(spec: SpecSource, overrides: Overrides = ()) -> SpecFile:
    """Read a spec and set the fields of `overrides`, in order. Raises SpecError, one line for each error.

    spec: a YAML file, the same as a mapping, or a checked spec. overrides: `field=value` with the value in YAML, or a
    mapping from dotted fields to values. Environment variables and ~ are expanded in path fields, except in those of a
    checked spec; relative paths stay relative to the working folder.
    """
    if isinstance(spec, JobSpec) and not overrides:
        return SpecFile(spec, {"": _IN_PYTHON}, _IN_PYTHON)
    draft = _Draft.of(spec)
    for override in overrides.items() if isinstance(overrides, Mapping) else list_of(overrides):
        if isinstance(override, str):
            draft.override(override)
        else:
            field, value = override
            draft.set(field, _plain(value, field), f"override {clip(field)}")
    draft.expand_paths()
    draft.take_in_files()
    try:
        return SpecFile(JobSpec.model_validate(draft.data), draft.places, draft.name)
    except ValidationError as error:
        raise _joined([_line(draft.places, *problem) for problem in _explain(error)]) from None


_IN_PYTHON = "spec"  # the place of a spec that is no file
_FORM_OF_SET = "must be field=value, such as --set sampling.max_tokens=64"


@dataclass(slots=True)
class _Draft:
    """A spec before it is checked."""

    data: dict[str, Any]
    places: dict[str, str]
    """See `SpecFile`."""
    name: str
    """Of the file."""

    @classmethod
    def of(cls, spec: SpecSource) -> "_Draft":
        if isinstance(spec, JobSpec):
            return cls(_as_written(spec), {"": _IN_PYTHON}, _IN_PYTHON)
        if isinstance(spec, Mapping):
            return cls(_plain(spec), {"": _IN_PYTHON}, _IN_PYTHON)
        if not isinstance(spec, str | os.PathLike):
            got = name_type(spec)
            raise SpecError(f"got {got} as the spec; must be the path of a YAML file, a mapping, or a JobSpec")
        name = os.fspath(spec)
        reader = _Reader(lambda mark: f"{name}:{mark.line + 1}:{mark.column + 1}")
        data = reader.read(_read_text(name))
        if not isinstance(data, dict):
            raise SpecError(f"{name}: got {_got(data)}; must be a mapping of fields ({', '.join(_children(''))})")
        return cls(data, {"": name, **reader.places}, name)

    def __post_init__(self) -> None:
        self._write_out_model()

    def _write_out_model(self) -> None:
        # `model: name` is short for `model: {name: name}`. Overrides and expansions need the long form.
        if isinstance(self.data.get("model"), str):
            self.data["model"] = {"name": self.data["model"]}

    def override(self, text: str) -> None:
        """Set a field as `--set` does."""
        field, equals, value = text.partition("=")
        shown = f"{field}=…" if "://" in text else text  # a URL may have a secret in it
        place = f"--set {clip(shown)}"
        if not equals:
            raise SpecError(f"{place}: {_FORM_OF_SET}")
        reader = _Reader(lambda mark: place)
        self.set(field.strip(), reader.read(value, field.strip()), place, reader.places)

    def set(self, field: str, value: Any, place: str, inner_places: Mapping[str, str] | None = None) -> None:
        """Set a dotted field. inner_places: of the fields within the value."""
        *sections, last = field.split(".")
        if not all([*sections, last]):
            raise SpecError(f"{place}: {_FORM_OF_SET}")
        data = self.data
        for depth, key in enumerate(sections, 1):
            section = ".".join(sections[:depth])
            if data.get(key) is None:
                data[key] = {}
                self.places[section] = place
            if not isinstance(data[key], dict):
                raise SpecError(f"{place}: {section} is {_got(data[key])}, which has no fields; set {section} itself")
            data = data[key]
        data[last] = value
        if sections == ["sampling"] and isinstance(data.get("columns"), dict):
            data["columns"].pop(last, None)  # the override applies to every row
        for old in [name for name in self.places if name.startswith((f"{field}.", f"{field}["))]:
            del self.places[old]
        self.places.update({**(inner_places or {}), field: place})
        self._write_out_model()

    def expand_paths(self) -> None:
        """Expand environment variables and ~ in paths."""
        problems = []
        for holder, key, field in _paths(self.data):
            try:
                holder[key] = _expand(holder[key])
            except ValueError as error:
                problems.append(_line(self.places, field, str(error)))
        if problems:
            raise _joined(problems)

    def take_in_files(self) -> None:
        """Replace each `{file: path}` by the content of the file."""
        problems = []
        rest = MAX_VALUE_BYTES
        for holder, key, field, is_value in _value_places(self.data):
            file = holder[key]
            if not (isinstance(file, dict) and [*file] == ["file"] and isinstance(file["file"], str)):
                continue
            try:
                holder[key], num_bytes = _read_value(file["file"], is_value, rest)
                rest -= num_bytes
            except ValueError as error:
                problems.append(_line(self.places, field, str(error)))
        if problems:
            raise _joined(problems)


def _plain(value: Any, field: str = "", depth: int = 0) -> Any:
    """A copy of a value from Python as YAML would give it. Raises SpecError."""
    if depth > MAX_YAML_DEPTH:
        raise SpecError(f"{_IN_PYTHON}: {clip(field)}: too deeply nested")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                where = clip(field) or "the spec"
                raise SpecError(f"{_IN_PYTHON}: {where}: got {clip(repr(key))} for a field's name; must be text")
        return {key: _plain(item, f"{field}.{key}".lstrip("."), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{field}[{number}]", depth + 1) for number, item in enumerate(value)]
    if hasattr(value, "__array__"):
        return _plain_array(value, field)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _plain_array(value: Any, field: str) -> Any:
    """The one number in a value of pandas, polars, NumPy, PyArrow or torch, such as `column.max()` gives."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise SpecError(
        f"{_IN_PYTHON}: {clip(field)}: got a {type(value).__name__}; must be plain values. Rows come from a file: "
        'write them, as with to_parquet("rows.parquet"), and give its path as input.path'
    )


def check_engine_arguments(file: SpecFile, known: frozenset[str] | None) -> None:
    """Raise SpecError for names under `engine` that are not in vLLM's EngineArgs, or for which the spec has a field.

    known: the names that the installed vLLM has. None: no vLLM is installed, and all names pass.
    """
    public = None if known is None else [name for name in known if not name.startswith("_")]
    problems = []
    for argument in file.spec.engine:
        if argument in ENGINE_ARGUMENTS_ELSEWHERE:
            problems.append(file.line(f"engine.{argument}", f"say {ENGINE_ARGUMENTS_ELSEWHERE[argument]} instead"))
        elif public is not None and argument not in public:
            fields = {name: field for name, field in _elsewhere().items() if not field.startswith("engine")}
            hint = _did_you_mean(argument, public, fields) or "; its EngineArgs have the names"
            problems.append(file.line(f"engine.{argument}", f"no engine argument of the installed vLLM{hint}"))
    if problems:
        raise _joined(problems)


def dump_spec(spec: JobSpec) -> str:
    """The spec as YAML with all defaults. `read_spec` reads an equal spec from it."""
    return dump_yaml(_as_written(spec))


def dump_yaml(data: dict[str, Any]) -> str:
    """Fields as YAML that `read_spec` reads as the same values."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31))


def _as_written(spec: JobSpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json")
    for holder, key, _ in _paths(data):
        holder[key] = holder[key].replace("$", "$$")
    return data


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


class _Reader:
    """Turns YAML into plain values and notes the place of each field."""

    def __init__(self, place: Callable[[yaml.Mark], str]) -> None:
        self.places: dict[str, str] = {}
        self._place = place
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
                # The end of the file says nothing; the place of the quote does.
                mark = error.context_mark or mark
                what = "the quote that begins here is not closed"
            elif isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
                what += "; indent with spaces" if "\\t" in what else "; does a text need quotes?"
        raise SpecError(f"{self._place(mark)}: not valid YAML: {what}")

    def _wrong(self, node: yaml.Node, message: str) -> SpecError:
        return SpecError(f"{self._place(node.start_mark)}: {message}")

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
        pattern, make = _SCALARS.get(tag, (None, str))
        if not isinstance(node, yaml.ScalarNode) or pattern is None or not pattern.match(node.value):
            raise self._wrong(node, f"tag {clip(node.tag.replace(_TAG, '!!'))} is not allowed here; leave it out")
        if re.search("[\ud800-\udfff]", node.value):
            raise self._wrong(node, f"got {_got(node.value)}, which holds half a character (a surrogate)")
        return make(node.value)

    def _named(self, field: str, name: yaml.Node, node: yaml.Node, depth: int) -> Any:
        self.places[field] = self._place(name.start_mark)
        return self._value(node, field, depth + 1)

    def _pairs(self, node: yaml.Node, depth: int) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        # A mapping's own keys win over merged keys (`<<: *base`), and earlier bases win over later ones.
        self._spend(node, depth, 1 + len(node.value))
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, "<< takes a mapping, or a list of mappings")
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                for base in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    merged = {**self._pairs(base, depth + 1), **merged}
                continue
            key = self._value(key_node, "", depth)
            if not isinstance(key, str):
                raise self._wrong(key_node, f"got {_got(key)} for a field's name; must be text: does it need quotes?")
            if key in pairs:
                raise self._wrong(key_node, f"{clip(key)}: given twice; leave one of them out")
            pairs[key] = key_node, value_node
        return {**merged, **pairs}


def _mark(line: int = 0, column: int = 0) -> yaml.Mark:
    return yaml.Mark(name="", index=0, line=line, column=column, buffer=None, pointer=0)


def _read_text(name: str) -> str:
    check_is_here(name, "the spec", "fetch the file, and give its path")
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        near = near_path(name) if isinstance(error, FileNotFoundError) else ""
        raise SpecError(f"{name}: {reason(error)}; must be a job spec, such as jobs/quickstart.yaml{near}") from None
    if len(content) > MAX_SPEC_BYTES:
        raise SpecError(f"{name}: longer than {MAX_SPEC_BYTES} bytes; must be a job spec, such as jobs/quickstart.yaml")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].split(b"\n")
        raise SpecError(f"{name}:{len(before)}:{len(before[-1]) + 1}: not UTF-8; save the file as UTF-8") from None


def _read_value(path: str, is_value: bool, most: int) -> tuple[Any, int]:
    """A file's value and its size in bytes. Raises ValueError with a message of one line; SpecError for wrong YAML."""
    name = _expand(path)
    if not name or "\0" in name:
        raise ValueError(f"got {path!r}; file must be the path of a file")
    if (message := elsewhere(name, "fetch the file, and give its path")) is not None:
        raise ValueError(message)
    try:
        with open(name, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            limit = f"all that a spec takes in may be {MAX_VALUE_BYTES:,} bytes"
            raise ValueError(f"the file {clip(name)} is too large; {limit}")
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ValueError(f"cannot read the file {clip(name)}: {reason(error)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"the file {clip(name)} is not UTF-8, at line {line}; save it as UTF-8") from None
    if not is_value:  # editors add the last line break; it does not belong to the text
        return text.removesuffix("\n"), len(content)
    value = _Reader(lambda at: f"{name}:{at.line + 1}:{at.column + 1}").read(text)
    if value is None:
        raise ValueError(f"the file {clip(name)} has nothing in it")
    return value, len(content)


def _line(places: Mapping[str, str], field: str, message: str) -> str:
    written = field
    while written not in places:
        written = re.sub(r"(?:^|\.|\[)[^.\[]*\Z", "", written)
    return ": ".join(filter(None, [places[written], clip(field, 200), message]))


def _joined(lines: Sequence[str]) -> SpecError:
    rest = [f"and {len(lines) - MAX_ERRORS} more"] if len(lines) > MAX_ERRORS else []
    return SpecError("\n".join([*lines[:MAX_ERRORS], *rest]))


def _explain(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Each wrong field once, with its error. If a field accepts several types, pydantic gives an error for each."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_field.setdefault(_field(details), []).append(details)
    for field, errors in by_field.items():
        if any(other.startswith(f"{field}[") for other in by_field):
            continue  # the list's own error: too short without its wrong items
        # Where one of the types fits, its validator's own words say more.
        details = max(errors, key=lambda each: (each["type"] == "wrong", len(each["loc"])))
        numbers = [part for part in details["loc"] if isinstance(part, int)]
        item = "".join(f"[{number}]" for number in numbers[field.count("[") :])
        yield field + item, _message(field, details, {each["type"] for each in errors})


def _field(details: ErrorDetails) -> str:
    """The field that an error is about, without the parts of its `loc` that name one of several types."""
    *parts, unknown = details["loc"] if details["type"] == "extra_forbidden" else (*details["loc"], None)
    field = ""
    for part in parts:
        longer = f"{field}[{part}]" if isinstance(part, int) else f"{field}.{part}".lstrip(".")
        field = longer if _doc_name(longer) in field_docs() else field
    return ".".join(str(part) for part in (field, unknown, details.get("ctx", {}).get("field")) if part)


def _doc_name(field: str) -> str:
    return re.sub(r"\[[0-9]+\]", "[]", field)


def _message(field: str, details: ErrorDetails, types: set[str]) -> str:
    if details["type"] == "extra_forbidden":
        name = str(details["loc"][-1])
        section = _doc_name(field.removesuffix(name).removesuffix("."))
        names = _children(section)
        # In a task's section, a field with the same name in another section has another meaning.
        elsewhere = {} if is_task_section(section) else _elsewhere()
        return f"unknown field{_did_you_mean(name, names, elsewhere) or '.'} Allowed: {', '.join(names)}"
    if details["type"] in ("wrong", "value_error"):
        return str(details["ctx"].get("reason") or details["ctx"]["error"])
    doc = field_docs()[_doc_name(field)]
    if details["type"] == "missing":
        return f"missing; must be {doc.allowed}. {doc.meaning}"
    value = details["input"]
    if value is None and not doc.is_required:
        hint = "; leave it out for its default"
    else:
        hint = (null_hint(value) if doc.takes_null else "") or _hint(value, types, doc.allowed)
    return f"got {_got(value)}; must be {doc.allowed}{hint}"


def _hint(value: Any, types: set[str], allowed: str) -> str:
    match value:
        # No literal "": to compare pandas.NA with it fails.
        case str() if not value and allowed.startswith("a list of texts"):
            return "; leave empty texts out"
        case str() | list() if not value:
            return " that is not empty"
        case str() if "a list of mappings" in allowed:
            return ', such as [{role: user, content: "…"}]'
        case str() if "tuple_type" in types or allowed.startswith("a list of texts"):
            return f"; for a list of one write [{clip(value)}]"
        case str() if types & {"int_type", "float_type"} and re.match(rf"(?:{_FLOAT})\Z", value):
            return "; write it without quotes"
        case float() if "int_type" in types and value.is_integer() and abs(value) < 2**31:
            return f"; write it as {value:.0f}"
        case bool() | int() | float() if "string_type" in types:
            return "; text that looks like something else needs quotes"
    return ""


def _children(section: str) -> list[str]:
    names = [field.rpartition(".") for field in field_docs() if not field.endswith("]")]
    return [name for above, _, name in names if above == section]


@functools.cache
def _elsewhere() -> dict[str, str]:
    """Field name → where the spec has it, for hints to users who wrote the field in the wrong section."""
    hints = {name: f"engine.{name}" for name in ("max_model_len", *sorted(RUNTIME_ENGINE_ARGUMENTS))}
    for field in field_docs():
        section, _, name = field.rpartition(".")
        if section != "scripted" and not field.endswith("]"):
            shown = field if section else f"{field}, at the top level"
            hints[name] = f"{hints[name]} or {shown}" if name in hints else shown
            hints[field] = f"{name}, within {section}" if section else shown
    return hints


def _did_you_mean(name: str, allowed: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    names = {**elsewhere, **{each: each for each in allowed}}
    close = difflib.get_close_matches(name.strip().lower().replace("-", "_")[:100], names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _got(value: Any) -> str:
    if isinstance(value, str):
        return f"'{clip(value)}'" if value else "empty text"
    if isinstance(value, list | dict):
        return f"{'a' if value else 'an empty'} {'list' if isinstance(value, list) else 'mapping'}"
    return "nothing (null)" if value is None else clip(json.dumps(value, default=repr))
