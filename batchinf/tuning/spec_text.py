"""Puts settings into the text of a spec: each becomes one new line, and all others stay as they are."""

import json
import os
import pathlib
import re

from batchinf.base.errors import SpecError, UserError
from batchinf.spec.file import read_spec
from batchinf.tuning.candidates import Settings


def write_settings(path: str, settings: Settings) -> None:
    """Add the settings to a spec's file. Raises UserError, which names the lines to add by hand, if that fails."""
    file = pathlib.Path(os.path.realpath(path))
    wanted = read_spec(path, settings).spec
    text = file.read_text(encoding="utf-8")
    for name, value in settings.items():
        section, _, field = name.partition(".")
        text = _added(text, section, field, json.dumps(value))
    staged = file.with_name(f".{file.name}.tune")
    try:
        staged.write_text(text, encoding="utf-8")
        os.chmod(staged, file.stat().st_mode & 0o777)
        try:
            is_same = read_spec(staged).spec == wanted
        except SpecError:
            is_same = False
        if not is_same:
            lines = "; ".join(f"{name}: {json.dumps(value)}" for name, value in settings.items())
            raise UserError(f"{path}: the settings cannot be added by --write; add them yourself: {lines}")
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)


def _added(text: str, section: str, field: str, value: str) -> str:
    """The text with the field as the first of its section, or with a new section at its end."""
    heading = re.search(rf"^{section}:[ \t]*(#.*)?$", text, re.MULTILINE)
    if heading is None:
        return f"{text.rstrip()}\n\n{section}:\n  {field}: {value}\n"
    below = re.search(r"^([ \t]+)[^\s#]", text[heading.end() :], re.MULTILINE)
    indent = "  " if below is None else below[1]
    return f"{text[: heading.end()]}\n{indent}{field}: {value}{text[heading.end() :]}"
