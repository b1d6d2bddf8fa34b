"""Words for pydantic's errors of a spec: the field, the value that it has, what is allowed, and what was meant."""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchinf.spec.fields import null_hint
from batchinf.spec.job import RUNTIME_ENGINE_ARGUMENTS, is_task_section
from batchinf.spec.reference import field_docs
from batchinf.spec.yaml_text import FLOAT, got, shown_text

# Section → names that people try, most of them from other programs → the field, from the same section or the top.
OTHER_NAMES = {
    "input": {
        **dict.fromkeys(("template", "prompt_format"), "prompt_template"),
        **dict.fromkeys(("prompt", "column", "text"), "prompt_column"),
        **dict.fromkeys(("system", "system_message", "instructions"), "system_prompt"),
        **dict.fromkeys(("file", "files", "data", "dataset"), "path"),
        **dict.fromkeys(("filter", "query"), "where"),
        **dict.fromkeys(("delimiter", "sep", "separator"), "csv.delimiter"),
        **{name: f"csv.{name}" for name in ("encoding", "null_values", "quotechar")},
    },
    "input.csv": {**dict.fromkeys(("sep", "separator"), "delimiter"), "na_values": "null_values"},
    "sampling": {
        **{f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")},
        **dict.fromkeys(("json_schema", "response_format"), "structured_outputs.json"),
        "guided_decoding": "structured_outputs",
        "choice": "structured_outputs.choice",
        **dict.fromkeys(("max_new_tokens", "max_output_tokens", "max_completion_tokens"), "max_tokens"),
        **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
        **dict.fromkeys(("num_return_sequences", "num_samples"), "n"),
        **dict.fromkeys(("do_sample", "temp"), "temperature"),
        **dict.fromkeys(("top_logprobs", "num_logprobs"), "logprobs"),
        **dict.fromkeys(("logits_bias", "token_bias"), "logit_bias"),
    },
    "output": {
        **dict.fromkeys(("dir", "folder", "directory", "output_dir"), "path"),
        **dict.fromkeys(("columns", "keep"), "keep_columns"),
    },
    "output.push_to_hub": {
        **dict.fromkeys(("repo", "repo_id", "name", "path", "dataset"), "repository"),
        "private": "public",
        "force": "overwrite",
    },
    "": {
        **dict.fromkeys(("prompts", "data", "dataset"), "input.path"),
        **dict.fromkeys(("out", "output_dir", "output_path"), "output.path"),
        **dict.fromkeys(("prompt", "template"), "input.prompt_template"),
        **dict.fromkeys(("system", "system_message"), "input.system_prompt"),
        **dict.fromkeys(("generation", "sampling_params", "generation_config"), "sampling"),
        **dict.fromkeys(("choice", "guided_choice"), "sampling.structured_outputs.choice"),
        **dict.fromkeys(("gpus", "num_gpus", "replicas"), "parallel.data_parallel_size"),
        **dict.fromkeys(("vllm", "engine_args"), "engine"),
    },
}


def explain(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Each wrong field once, with its error. If a field accepts several types, pydantic gives an error for each.

    The fields of a section are listed at its first unknown one.
    """
    listed: set[str] = set()
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
        yield field + item, _message(field, details, {each["type"] for each in errors}, listed)


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


def _message(field: str, details: ErrorDetails, types: set[str], listed: set[str]) -> str:
    if details["type"] == "extra_forbidden":
        return _unknown_field(field, str(details["loc"][-1]), listed)
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
    return f"got {got(value)}; must be {doc.allowed}{hint}"


def _unknown_field(field: str, name: str, listed: set[str]) -> str:
    """name: the last part of `field`. listed: sections whose fields have been listed; this one is added."""
    section = _doc_name(field.removesuffix(name).removesuffix("."))
    names = field_names(section)
    # In a task's section, a field with the same name in another section has another meaning.
    elsewhere = {} if is_task_section(section) else elsewhere_in_spec()
    meant = OTHER_NAMES.get(section, {}).get(name.strip().lower().replace("-", "_"))
    hint = f"; did you mean {meant}?" if meant else did_you_mean(name, names, elsewhere)
    if section in listed:
        return f"unknown field{hint}"
    listed.add(section)
    return f"unknown field{hint or '.'} Allowed: {', '.join(names)}"


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
            return f"; for a list of one write [{shown_text(value)}]"
        case str() if types & {"int_type", "float_type"} and re.match(rf"(?:{FLOAT})\Z", value):
            return "; write it without quotes"
        case float() if "int_type" in types and value.is_integer() and abs(value) < 2**31:
            return f"; write it as {value:.0f}"
        case bool() | int() | float() if "string_type" in types:
            return "; text that looks like something else needs quotes"
    return ""


def field_names(section: str) -> list[str]:
    names = [field.rpartition(".") for field in field_docs() if not field.endswith("]")]
    return [name for above, _, name in names if above == section]


@functools.cache
def elsewhere_in_spec() -> dict[str, str]:
    """Field name → where the spec has it, for hints to users who wrote the field in the wrong section."""
    hints = {name: f"engine.{name}" for name in ("max_model_len", *sorted(RUNTIME_ENGINE_ARGUMENTS))}
    for field in field_docs():
        section, _, name = field.rpartition(".")
        if section != "scripted" and not field.endswith("]"):
            shown = field if section else f"{field}, at the top level"
            hints[name] = f"{hints[name]} or {shown}" if name in hints else shown
            hints[field] = f"{name}, within {section}" if section else shown
    return hints


def did_you_mean(name: str, allowed: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    names = {**elsewhere, **{each: each for each in allowed}}
    close = difflib.get_close_matches(name.strip().lower().replace("-", "_")[:100], names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""
