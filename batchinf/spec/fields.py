"""What the sections of a spec are made of: their base class, the kinds of fields, and types that several share."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Resume = Literal["identity", "layout", "runtime"]

IDENTITY = Field(json_schema_extra={"resume": "identity"})
LAYOUT = Field(json_schema_extra={"resume": "layout"})
RUNTIME = Field(json_schema_extra={"resume": "runtime"})


def identity_or(short: dict[str, Any]) -> Any:
    """An identity field for which something else may be written, of this JSON schema, that a validator writes out."""
    return Field(json_schema_extra={"resume": "identity", "short": short})


# A text, or what a text says, taken from a file when the spec is read; see `spec.values`.
FROM_FILE = identity_or(
    {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"], "additionalProperties": False}
)


def wrong(reason: str, field: str = "") -> PydanticCustomError:
    """What a validator raises: `field` is the one to look at, below the section or field that is validated."""
    return PydanticCustomError("wrong", "{reason}", {"reason": reason, "field": field})


def _usable_path(path: str) -> str:
    if "\0" in path:
        raise wrong(f"got {path!r}; a path cannot hold a null character")
    if path.startswith("~"):
        raise wrong(f"got {path!r}, but there is no such user's home; for a name that begins with ~ write ./~")
    return path


# What vLLM and Arrow hold in 32 bits, and seconds that a clock can wait, are bounded here, so that nothing overflows.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_usable_path)]
# Strictness would refuse a list where a tuple is kept; the items stay strict.
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
TokenIds = Annotated[tuple[Whole, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of every mapping in a spec: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def resume_of(extra: Any, name: str) -> Resume:
    """What a field's `json_schema_extra` says of a change. Raises TypeError where it says nothing."""
    kind = (extra or {}).get("resume")
    if kind not in ("identity", "layout", "runtime"):
        raise TypeError(f"spec field {name} does not say what a change on resume means")
    return kind  # type: ignore[no-any-return]


def is_json(value: Any) -> bool:
    """Whether a value is made of text, finite numbers, true or false, null, lists and mappings."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return bool(json.loads(text.encode()) == value)
    except (TypeError, ValueError):
        return False


def as_tuple(value: Any) -> Any:
    """One text as a tuple of it, for fields that take one or several."""
    return (value,) if isinstance(value, str) else value
