"""What there is to say of each field of a spec: for error messages, the reference in `docs/spec.md`, and editors."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from batchinf.spec.fields import Resume, Section, resume_of
from batchinf.spec.job import JobSpec, ModelSpec
from batchinf.spec.sampling import PER_ROW_FIELDS


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """What there is to say of a field or a section, for error messages and the reference in `docs/spec.md`.

    name: dotted, as in `sampling.max_tokens`; `input.messages[]` stands for each item of a list.
    allowed: its values in words. resume: None for a section.
    """

    name: str
    allowed: str
    is_required: bool
    default: Any
    resume: Resume | None
    meaning: str


@functools.cache
def field_docs() -> dict[str, FieldDoc]:
    """All sections and fields by name, in the order of the spec."""
    schema = JobSpec.model_json_schema()
    return {doc.name: doc for doc in _document(JobSpec, "", {**schema["$defs"], "JobSpec": schema})}


def _document(section: type[Section], prefix: str, schemas: dict[str, Any]) -> Iterator[FieldDoc]:
    for name, info in section.model_fields.items():
        types = [t for t in (info.annotation, *get_args(info.annotation)) if isinstance(t, type)]
        inner = next((t for t in types if issubclass(t, Section)), None)
        schema = schemas[section.__name__]["properties"][name]
        allowed = f"a mapping of fields ({', '.join(inner.model_fields)})" if inner else _in_words(schema)
        if "short" in schema:
            allowed = f"{_in_words(schema['short'])}, or {allowed}"
        if inner:
            allowed = ", or ".join([*map(_in_words, _plain_forms(schema)), allowed])
        yield FieldDoc(
            name=f"{prefix}{name}",
            allowed=f"text, or {allowed}" if inner is ModelSpec else allowed,
            is_required=info.is_required(),
            default=schema.get("default"),
            resume=None if inner else resume_of(info.json_schema_extra, f"{prefix}{name}"),
            meaning=" ".join((info.description or (inner and inner.__doc__) or "").split()),
        )
        if inner:
            yield from _document(inner, f"{prefix}{name}.", schemas)
        elif (item := _item(info.annotation)) is not None:
            allowed = f"a mapping of fields ({', '.join(item.model_fields)})"
            yield FieldDoc(f"{prefix}{name}[]", allowed, False, None, None, " ".join((item.__doc__ or "").split()))
            yield from _document(item, f"{prefix}{name}[].", schemas)


def _plain_forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """What a section may be given as, beside its mapping of fields."""
    return [form for form in schema.get("anyOf", ()) if "$ref" not in form and form != {"type": "null"}]


def _item(annotation: Any) -> type[Section] | None:
    """The section that each item of a list is, where that is so."""
    inside = [_item(argument) for argument in get_args(annotation)]
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else next(filter(None, inside), None)


_WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text"}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}


def _in_words(schema: dict[str, Any]) -> str:
    # Null is left out: it says the same as leaving out the field.
    if "anyOf" in schema:
        return ", or ".join(_in_words(choice) for choice in schema["anyOf"] if choice != {"type": "null"})
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if "items" in schema:
        noun, comma, limits = _in_words(schema["items"]).removeprefix("a ").partition(",")
        return f"a list of {noun}s{comma}{limits}"
    if "file" in schema.get("properties", {}):
        return "{file: path}"
    limits = " and ".join(f"{word} {schema[key]}" for key, word in _LIMITS.items() if key in schema)
    return _WORDS.get(schema.get("type", ""), "a mapping") + (limits and f", {limits}")


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a spec file, for editors."""
    schema = JobSpec.model_json_schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            if (short := field.pop("short", None)) is not None:
                section["properties"][name] = _with_form(field, short)
    sampling = schema["$defs"]["SamplingSpec"]["properties"]
    for name in PER_ROW_FIELDS:
        sampling[name] = _with_form(sampling[name], {"$ref": "#/$defs/Column"})
    schema["$defs"]["Column"] = {
        "title": "Column",
        "description": "The input column that holds each row's own value; null there is the job's.",
        "type": "object",
        "properties": {
            "column": {"title": "Column", "description": "Its name.", "type": "string", "minLength": 1},
        },
        "required": ["column"],
        "additionalProperties": False,
    }
    schema["properties"]["model"] = {
        "title": "Model",
        "description": f"{field_docs()['model'].meaning} Text is short for a mapping with that name.",
        "anyOf": [{"type": "string", "minLength": 1}, {"$ref": "#/$defs/ModelSpec"}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "batchinf job spec"}


def _with_form(field: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """A field's schema that allows another form too."""
    names = ("description", "default", "title", "resume")
    about: dict[str, Any] = {name: field[name] for name in names if name in field}
    own = {key: value for key, value in field.items() if key not in about}
    return {**about, "anyOf": [form, *own.get("anyOf", [own])]}
