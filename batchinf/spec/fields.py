"""Base class, kinds of fields and shared types of the sections of a spec."""

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from batchinf.base.paths import elsewhere, shown_url

Resume = Literal["identity", "layout", "runtime"]

IDENTITY = Field(json_schema_extra={"resume": "identity"})
LAYOUT = Field(json_schema_extra={"resume": "layout"})
RUNTIME = Field(json_schema_extra={"resume": "runtime"})


def identity_or(short: dict[str, Any]) -> Any:
    """An identity field that also accepts a short form with this JSON schema. A validator expands the short form."""
    return Field(json_schema_extra={"resume": "identity", "short": short})


def runtime_or(short: dict[str, Any]) -> Any:
    """A runtime field that also accepts a short form, as `identity_or`."""
    return Field(json_schema_extra={"resume": "runtime", "short": short})


# The value may be `{file: path}`. `spec.file` then reads it from that file.
FROM_FILE = identity_or(
    {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"], "additionalProperties": False}
)


def wrong(reason: str, field: str = "") -> PydanticCustomError:
    """The error that a validator raises. field: the faulty field, relative to the validated section or field."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason, "field": field})


def null_hint(value: object) -> str:
    """For an error about text that was meant as null: in YAML, `none` is text."""
    return "; for no value write null" if isinstance(value, str) and value.strip().lower() == "none" else ""


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise wrong(f"got {shown_url(path)!r}; a path cannot hold a null character")
    if path.startswith("~"):
        raise wrong(f"got {path!r}, but there is no such user's home; for a name that begins with ~ write ./~")
    return path


def without(problem: Callable[[str], str | None]) -> AfterValidator:
    """A validator that refuses a text if `problem` returns a message about it."""

    def check(text: str) -> str:
        if (message := problem(text)) is not None:
            raise wrong(message)
        return text

    return AfterValidator(check)


def on_this_host(instead: str) -> AfterValidator:
    """Refuses places such as `s3://bucket/x`. instead: what to do."""
    return without(lambda path: elsewhere(path, instead))


# vLLM and Arrow store these numbers in 32 bits.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_usable_path)]
# Strict mode would refuse YAML's lists for tuples. The items stay strict.
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
TokenIds = Annotated[tuple[Whole, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of every mapping in a spec: immutable, strict about types, without unknown keys."""

    # Pydantic's use_attribute_docstrings would parse the source at each import: 6 % of the time of `batchinf status`.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The text under each field, by the field's name."""
        [source] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(source, ast.ClassDef)
        return {
            field.target.id: inspect.cleandoc(str(text.value.value))
            for field, text in itertools.pairwise(source.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }


def resume_of(extra: Any, name: str) -> Resume:
    """The kind of a field, from its `json_schema_extra`. Raises TypeError if it has none."""
    kind = (extra or {}).get("resume")
    if kind not in ("identity", "layout", "runtime"):
        raise TypeError(f"spec field {name} does not say what a change on resume means")
    return kind  # type: ignore[no-any-return]


def is_json(value: Any) -> bool:
    """Whether JSON can hold a value without changing it."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return bool(json.loads(text.encode()) == value)
    except (TypeError, ValueError):
        return False


def as_tuple(value: Any) -> Any:
    """A single text as a tuple, for fields that take one or several texts."""
    return (value,) if isinstance(value, str) else value
