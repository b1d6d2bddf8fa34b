"""The fields of a spec in words, for error messages and the reference, and as a JSON schema for editors."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from batchinf.spec.fields import Resume, Section, resume_of
from batchinf.spec.job import JobSpec, ModelSpec
from batchinf.spec.sampling import PER_ROW_FIELDS


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """A field or section in words, for error messages and the reference in `docs/spec.md`."""

    name: str
    """Dotted, as in `sampling.max_tokens`; `input.messages[]` stands for each item of a list."""
    allowed: str
    """The allowed values in words, without null."""
    meaning: str
    is_required: bool = False
    default: Any = None
    resume: Resume | None = None
    """None for a section."""
    takes_null: bool = False


def _schema() -> dict[str, Any]:
    """Pydantic's JSON schema, with the text under each field as its description."""
    schema = JobSpec.model_json_schema()
    schemas = {**schema["$defs"], "JobSpec": schema}
    for section in Section.__subclasses__():
        if section.__name__ in schemas:
            for name, meaning in section.meanings().items():
                schemas[section.__name__]["properties"][name].setdefault("description", meaning)
    return schema


@functools.cache
def field_docs() -> dict[str, FieldDoc]:
    """All sections and fields by name, in the order of the spec."""
    schema = _schema()
    return {doc.name: doc for doc in _document(JobSpec, "", {**schema["$defs"], "JobSpec": schema})}


def _document(section: type[Section], prefix: str, schemas: dict[str, Any]) -> Iterator[FieldDoc]:
    for name, info in section.model_fields.items():
        field = f"{prefix}{name}"
        types = [t for t in (info.annotation, *get_args(info.annotation)) if isinstance(t, type)]
        inner = next((t for t in types if issubclass(t, Section)), None)
        schema = schemas[section.__name__]["properties"][name]
        meaning = schema.get("description") or (inner and inner.__doc__) or ""
        yield FieldDoc(
            name=field,
            allowed=_allowed(schema, inner),
            is_required=info.is_required(),
            default=schema.get("default"),
            resume=None if inner else resume_of(info.json_schema_extra, field),
            meaning=" ".join(meaning.split()),
            takes_null={"type": "null"} in schema.get("anyOf", ()),
        )
        if inner:
            yield from _document(inner, f"{field}.", schemas)
        elif (item := _item(info.annotation)) is not None:
            yield FieldDoc(
                name=f"{field}[]",
                allowed=_fields_in_words(item),
                meaning=" ".join((item.__doc__ or "").split()),
            )
            yield from _document(item, f"{field}[].", schemas)


def _allowed(schema: dict[str, Any], inner: type[Section] | None) -> str:
    """The allowed values of a field, or of a section with all forms that it accepts besides its mapping of fields."""
    forms = ["text"] if inner is ModelSpec else []
    if inner is not None:
        plain = [form for form in schema.get("anyOf", ()) if "$ref" not in form and form != {"type": "null"}]
        forms += map(_in_words, plain)
    if "short" in schema:
        forms.append(_in_words(schema["short"]))
    return ", or ".join([*forms, _in_words(schema) if inner is None else _fields_in_words(inner)])


def _fields_in_words(section: type[Section]) -> str:
    return f"a mapping of fields ({', '.join(section.model_fields)})"


def _item(annotation: Any) -> type[Section] | None:
    """The class of a list's items, if they are sections."""
    inside = [_item(argument) for argument in get_args(annotation)]
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation if is_section else next(filter(None, inside), None)


_WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text"}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}


def _any_in_words(choices: list[dict[str, Any]]) -> str:
    # Null is not mentioned: it means the same as leaving out the field.
    return ", or ".join(_in_words(choice) for choice in choices if choice != {"type": "null"})


def _in_words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return _any_in_words(schema["anyOf"])
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
    """JSON schema (draft 2020-12) of a spec file, which editors use."""
    schema = _schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            if (short := field.pop("short", None)) is not None:
                section["properties"][name] = _with_form(field, short)
    where = schema["$defs"]["InputSpec"]
    where["required"].remove("path")
    where["anyOf"] = [{"required": ["path"]}, {"required": ["job"]}]
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
    """A field's schema, extended by another form."""
    names = ("description", "default", "title", "resume")
    about: dict[str, Any] = {name: field[name] for name in names if name in field}
    plain = {key: value for key, value in field.items() if key not in about}
    return {**about, "anyOf": [form, *plain.get("anyOf", [plain])]}
