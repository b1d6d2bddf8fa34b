"""Reads specs from YAML files or from Python: parses, takes in `{file: PATH}`, checks, overrides, locates errors."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from batchinf.base.errors import SpecError
from batchinf.base.paths import check_is_here, elsewhere
from batchinf.base.slices import Slice
from batchinf.base.storage import reason
from batchinf.base.text import clip, name_type, near_path
from batchinf.spec.explain import did_you_mean, elsewhere_in_spec, explain, field_names
from batchinf.spec.job import ENGINE_ARGUMENTS_ELSEWHERE, PATH_FIELDS, SECRET_NAME, JobSpec
from batchinf.spec.yaml_text import MAX_SPEC_BYTES, MAX_YAML_DEPTH, YamlReader, dump_yaml, got

# Limit for all `{file: path}` together. job.yaml has their content, and must be short enough to be read as a spec.
MAX_VALUE_BYTES = 960 << 10

# Fields of `input` and of `sampling.structured_outputs` that accept `{file: path}`. True: the content is parsed
# as YAML or JSON. All others take it as text.
_TEXTS = ("prompt_template", "system_prompt", "chat_template")
_STRUCTURES = {"json": True, "choice": True, "regex": False, "grammar": False, "structural_tag": True}


def _value_places(data: dict[str, Any]) -> Iterator[tuple[Any, Any, str, bool]]:
    """The places for `{file: path}`: (mapping, its key, the field's name, whether the file is parsed as YAML).

    Messages come before their contents, because the messages may be in a file too.
    """
    section = _mapping(data.get("input"))
    yield from ((section, name, f"input.{name}", False) for name in _TEXTS if name in section)
    for name in ("messages", "tools"):
        if name in section:
            yield section, name, f"input.{name}", True
    messages = section.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if "content" in _mapping(message):
            yield message, "content", f"input.messages[{number}].content", False
    in_retry = _mapping(_mapping(data.get("retry")).get("set"))
    for structure, field in (
        (_mapping(_mapping(data.get("sampling")).get("structured_outputs")), "sampling.structured_outputs"),
        (_mapping(in_retry.get("sampling.structured_outputs")), "retry.set.sampling.structured_outputs"),
    ):
        places = ((name, is_value) for name, is_value in _STRUCTURES.items() if name in structure)
        yield from ((structure, name, f"{field}.{name}", is_value) for name, is_value in places)


def _paths(data: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """The places of paths in a spec: (mapping or list, its key, the field's name)."""
    for section, name in PATH_FIELDS:
        yield from _texts(_mapping(data.get(section)), name, f"{section}.{name}")
    yield from _texts(_mapping(_mapping(data.get("input")).get("exclude")), "job", "input.exclude.job")


def _texts(holder: dict[str, Any], key: str, field: str) -> Iterator[tuple[Any, Any, str]]:
    """The location of the text under a key, or of each text in the mapping or the list there."""
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


MAX_ERRORS = 20  # fit on a screen


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A spec, and the locations where its fields are written."""

    spec: JobSpec
    locations: Mapping[str, str]
    """Dotted field → `jobs/x.yaml:7:3`, or the `--set` that gave it; '' → the file."""
    path: str
    slice: Slice | None = None
    """The slice to run."""

    def line(self, field: str, message: str) -> str:
        """The field's location, its name, and `message`. A field that is not written has its section's location."""
        return _line(self.locations, field, message)

    def error(self, field: str, message: str) -> SpecError:
        """An error about one field, for checks that need more than the spec itself."""
        return SpecError(self.line(field, message))


def with_task(file: SpecFile, task: str) -> SpecFile:
    """The spec with this task. Raises SpecError if the rest of the spec does not fit the task."""
    try:
        spec = JobSpec.model_validate({**file.spec.model_dump(mode="json", exclude_unset=True), "task": task})
    except ValidationError as error:
        raise _joined([_line(file.locations, *problem) for problem in explain(error)]) from None
    return replace(file, spec=spec)


def retried_structures(file: SpecFile) -> SpecFile | None:
    """The spec with the structured outputs of its section `retry`; None if that has none."""
    spec = file.spec
    if spec.retry is None or "sampling.structured_outputs" not in spec.retry.set:
        return None
    changes = {"sampling": spec.retry.sampling_of(spec.sampling), "retry": None}
    return replace(file, spec=spec.model_copy(update=changes))


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
        return SpecFile(JobSpec.model_validate(draft.data), draft.locations, draft.name)
    except ValidationError as error:
        raise _joined([_line(draft.locations, *problem) for problem in explain(error)]) from None


_IN_PYTHON = "spec"  # the location of a spec that is no file
_FORM_OF_SET = "must be field=value, such as --set sampling.max_tokens=64"


@dataclass(slots=True)
class _Draft:
    """A spec before it is checked."""

    data: dict[str, Any]
    locations: dict[str, str]
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
            raise SpecError(
                f"got {name_type(spec)} as the spec; must be the path of a YAML file, a mapping, or a JobSpec"
            )
        name = os.fspath(spec)
        reader = YamlReader(lambda mark: f"{name}:{mark.line + 1}:{mark.column + 1}")
        data = reader.read(_read_text(name))
        if not isinstance(data, dict):
            raise SpecError(f"{name}: got {got(data)}; must be a mapping of fields ({', '.join(field_names(''))})")
        return cls(data, {"": name, **reader.locations}, name)

    def __post_init__(self) -> None:
        self._write_out_model()

    def _write_out_model(self) -> None:
        # `model: name` is short for `model: {name: name}`. Overrides and expansions need the long form.
        if isinstance(self.data.get("model"), str):
            self.data["model"] = {"name": self.data["model"]}

    def override(self, text: str) -> None:
        """Set a field as `--set` does."""
        field, equals, value = text.partition("=")
        shown = f"{field}=…" if "://" in text or "@" in text else text  # a URL may have a secret in it
        location = f"--set {clip(shown)}"
        if not equals:
            raise SpecError(f"{location}: {_FORM_OF_SET}")
        reader = YamlReader(lambda mark: location)
        self.set(field.strip(), reader.read(value, field.strip()), location, reader.locations)

    def set(self, field: str, value: Any, location: str, inner_locations: Mapping[str, str] | None = None) -> None:
        """Set a dotted field. inner_locations: of the fields within the value."""
        *sections, last = field.split(".")
        if not all([*sections, last]):
            raise SpecError(f"{location}: {_FORM_OF_SET}")
        data = self._section(sections, location)
        data[last] = value
        self._leave_out_columns(field)
        for old in [name for name in self.locations if name.startswith((f"{field}.", f"{field}["))]:
            del self.locations[old]
        self.locations.update({**(inner_locations or {}), field: location})
        self._write_out_model()

    def _section(self, names: Sequence[str], location: str) -> dict[str, Any]:
        """The fields of a section, which is made if it is not there. location: of the field that is set in it."""
        data = self.data
        for depth, key in enumerate(names, 1):
            section = ".".join(names[:depth])
            if data.get(key) is None:
                data[key] = {}
                self.locations[section] = location
            if not isinstance(data[key], dict):
                raise SpecError(f"{location}: {section} is {got(data[key])}, which has no fields; set {section} itself")
            data = data[key]
        return data

    def expand_paths(self) -> None:
        """Expand environment variables and ~ in paths."""
        problems = []
        for holder, key, field in _paths(self.data):
            try:
                holder[key] = _expand(holder[key])
            except ValueError as error:
                problems.append(_line(self.locations, field, str(error)))
        if problems:
            raise _joined(problems)

    def _leave_out_columns(self, field: str) -> None:
        """Leave out the columns of a field of sampling that was set, because it applies to every row."""
        columns = _mapping(self.data.get("sampling")).get("columns")
        _, _, name = field.partition("sampling.")
        if not isinstance(columns, dict) or not name:
            return
        for column in [*columns]:
            if f"{column}.".startswith(f"{name}.") or f"{name}.".startswith(f"{column}."):
                del columns[column]

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
                problems.append(_line(self.locations, field, str(error)))
        if problems:
            raise _joined(problems)


def _plain(value: Any, field: str = "", depth: int = 0) -> Any:
    """A copy of a value from Python as YAML would give it. Raises SpecError."""
    if depth > MAX_YAML_DEPTH:
        raise SpecError(f"{_IN_PYTHON}: {clip(field)}: too deeply nested")
    if isinstance(value, Mapping):
        _check_names(value, field)
        return {key: _plain(item, f"{field}.{key}".lstrip("."), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{field}[{number}]", depth + 1) for number, item in enumerate(value)]
    if hasattr(value, "__array__"):
        return _plain_array(value, field)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_names(names: Iterable[Any], field: str) -> None:
    """names: of the fields within `field`."""
    for name in names:
        if not isinstance(name, str):
            where = clip(field) or "the spec"
            raise SpecError(f"{_IN_PYTHON}: {where}: got {clip(repr(name))} for a field's name; must be text")


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
    objections = {argument: _argument_objection(argument, public) for argument in file.spec.engine}
    problems = [file.line(f"engine.{name}", why) for name, why in objections.items() if why is not None]
    if problems:
        raise _joined(problems)


def _argument_objection(argument: str, public: Sequence[str] | None) -> str | None:
    """What is wrong with the name of an engine argument. public: see `known` of `check_engine_arguments`."""
    if argument in ENGINE_ARGUMENTS_ELSEWHERE:
        return f"say {ENGINE_ARGUMENTS_ELSEWHERE[argument]} instead"
    if public is None or argument in public:
        return None
    fields = {name: field for name, field in elsewhere_in_spec().items() if not field.startswith("engine")}
    hint = did_you_mean(argument, public, fields) or "; its EngineArgs have the names"
    return f"no engine argument of the installed vLLM{hint}"


def dump_spec(spec: JobSpec) -> str:
    """The spec as YAML with all defaults. `read_spec` reads an equal spec from it."""
    return dump_yaml(_as_written(spec))


def _as_written(spec: JobSpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json")
    for holder, key, _ in _paths(data):
        holder[key] = holder[key].replace("$", "$$")
    return data


def _read_text(name: str) -> str:
    check_is_here(name, "the spec", "fetch the file, and give its path")
    try:
        with open(name, "rb") as file:
            content = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        near = near_path(name) if isinstance(error, FileNotFoundError) else ""
        raise SpecError(f"{name}: {reason(error)}; must be a job spec, as `batchinf init` writes it{near}") from None
    if len(content) > MAX_SPEC_BYTES:
        raise SpecError(f"{name}: longer than {MAX_SPEC_BYTES} bytes; must be a job spec, as `batchinf init` writes it")
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
    value = YamlReader(lambda at: f"{name}:{at.line + 1}:{at.column + 1}").read(text)
    if value is None:
        raise ValueError(f"the file {clip(name)} has nothing in it")
    return value, len(content)


def _line(locations: Mapping[str, str], field: str, message: str) -> str:
    written = field
    while written not in locations:
        written = re.sub(r"(?:^|\.|\[)[^.\[]*\Z", "", written)
    return ": ".join(filter(None, [locations[written], clip(field, 200), message]))


def _joined(lines: Sequence[str]) -> SpecError:
    rest = [f"and {len(lines) - MAX_ERRORS} more"] if len(lines) > MAX_ERRORS else []
    return SpecError("\n".join([*lines[:MAX_ERRORS], *rest]))
