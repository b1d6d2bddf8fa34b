"""What a spec takes from around it, between YAML and the checks of fields: environment variables, values from files.

What the file of a `{file: path}` says is put in the field's place: it counts in the fingerprint, and job.yaml stands
alone.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from batchinf.base.storage import reason
from batchinf.base.text import clip

# Of all files together: job.yaml, which holds what they say, stays short enough to be read as a spec.
MAX_VALUE_BYTES = 960 << 10

# Fields of `input` and of `sampling.structured_outputs`. Text is taken as it is, a value as YAML or JSON has it.
_TEXTS = ("prompt_template", "system_prompt", "chat_template")
_STRUCTURES = {"json": True, "choice": True, "regex": False, "grammar": False}

_SECRETS = "(?i)TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH"  # in a variable's name: its value must stand in no file

# (text, path) -> value: reads YAML. Raises SpecError, with its place in the file.
Parse = Callable[[str, str], Any]


class Files:
    """Puts what files say in the place of `{file: path}`; `problems` collects what is wrong, by field."""

    def __init__(self, parse: Parse) -> None:
        self._parse = parse
        self._num_bytes = 0
        self.problems: list[tuple[str, str]] = []

    def fill(self, data: dict[str, Any]) -> None:
        """Fill in all values of a spec's plain data, in place."""
        for owner, key, field, is_value in _places(data):
            file = owner[key]
            if isinstance(file, dict) and [*file] == ["file"] and isinstance(file["file"], str):
                try:
                    owner[key] = self._read(file["file"], is_value)
                except KeyError as error:
                    self.problems.append((field, f"{error.args[0]}, or write $$ for a plain $"))
                except ValueError as error:
                    self.problems.append((field, str(error)))

    def _read(self, path: str, is_value: bool) -> Any:
        name = expand(path)
        if not name or "\0" in name:
            raise ValueError(f"got {path!r}; file must be the path of a file")
        try:
            with open(name, "rb") as file:
                content = file.read(MAX_VALUE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"cannot read the file {clip(name)}: {reason(error)}") from None
        self._num_bytes += len(content)
        if self._num_bytes > MAX_VALUE_BYTES:
            raise ValueError(
                f"the file {clip(name)} is too large; all that a spec takes in may be {MAX_VALUE_BYTES:,} bytes"
            )
        try:
            text = content.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise ValueError(f"the file {clip(name)} is not UTF-8, at line {line}; save it as UTF-8") from None
        # The end of the last line is the editor's, not the text's.
        if not is_value:
            return text.removesuffix("\n")
        value = self._parse(text, name)
        if value is None:
            raise ValueError(f"the file {clip(name)} has nothing in it")
        return value


def _places(data: dict[str, Any]) -> Iterator[tuple[Any, Any, str, bool]]:
    """Where such a value may stand: what holds it, under which key, the field's name, whether it is more than text.

    Messages come first and then what is in them, as they may be from a file themselves.
    """
    section = data.get("input")
    if isinstance(section, dict):
        yield from ((section, name, f"input.{name}", False) for name in _TEXTS if name in section)
        if "messages" in section:
            yield section, "messages", "input.messages", True
        if isinstance(section.get("messages"), list):
            for number, message in enumerate(section["messages"]):
                if isinstance(message, dict) and "content" in message:
                    yield message, "content", f"input.messages[{number}].content", False
    sampling = data.get("sampling")
    structure = sampling.get("structured_outputs") if isinstance(sampling, dict) else None
    if isinstance(structure, dict):
        for name, is_value in _STRUCTURES.items():
            if name in structure:
                yield structure, name, f"sampling.structured_outputs.{name}", is_value


def each_path(data: dict[str, Any], fields: Iterable[tuple[str, str]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where there is a path in one of these fields of a spec: what holds it, under which key, the field's name."""
    for section, name in fields:
        held = data.get(section)
        value = held.get(name) if isinstance(held, dict) else None
        if isinstance(held, dict) and isinstance(value, str):
            yield held, name, f"{section}.{name}"
        elif isinstance(value, dict):
            yield from ((value, key, f"{section}.{name}.{key}") for key in value if isinstance(value[key], str))


def expand(path: str) -> str:
    """A path with environment variables and ~ written out. Raises KeyError with what is wrong."""

    def variable(match: re.Match[str]) -> str:
        value = "$" if match[0] == "$$" else os.environ.get(match[1] or match[2])
        if not value:
            raise KeyError(f"{clip(match[0])} is unset or empty in the environment; set it")
        if re.search(_SECRETS, match[0]):
            raise KeyError(f"{clip(match[0])} is named like a secret, and paths are recorded; take another variable")
        return value

    expanded = re.sub(r"\$(?:(\$|[A-Za-z_][A-Za-z_0-9]*)|\{([^}]*)\})", variable, path)
    return expanded if "\0" in expanded else os.path.expanduser(expanded)
