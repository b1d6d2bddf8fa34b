"""The tools of a prompt, by the spec or a row. Finds the parser of a model's calls, for `model.tool_parser: auto`."""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from batchinf.base.errors import RowFailed, SpecError
from batchinf.base.text import clip, name_type
from batchinf.model.model import Model
from batchinf.prompts.chat import own_templates
from batchinf.prompts.openai.lines import unsupported
from batchinf.records import Tools
from batchinf.spec.job import ModelSpec
from batchinf.spec.tools import as_served, objection_to

_NO_PARSER = (
    "nothing says how the model writes its calls: name vLLM's parser in model.tool_parser, such as hermes, or auto; "
    "tool_choice none shows the tools to the model and takes its text as it is"
)


def tools_of_line(body: dict[str, Any], *, has_parser: bool) -> tuple[list[dict[str, Any]], Tools | None]:
    """The tools of a body, whose fields are taken out, for the chat template, and those that the model may call.

    has_parser: whether the job can parse calls. Raises RowFailed.
    """
    fields = ("tools", "tool_choice", "parallel_tool_calls")
    given = {name: body.pop(name) for name in fields if name in body}
    are_parallel = given.get("parallel_tool_calls", True)
    if not isinstance(are_parallel, bool):
        raise unsupported(f"body.parallel_tool_calls: got {name_type(are_parallel)}; must be true or false")
    rendered = _rendered(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if not rendered:
        if choice not in ("none", "auto"):
            raise unsupported(f"body.tool_choice: got {clip(json.dumps(choice))}, but there are no tools")
        return [], None
    kind, name = _choice(choice, rendered, "body.tool_choice", unsupported)
    if kind == "none":
        return rendered, None
    if not has_parser:
        raise unsupported(f"body.tools: got tools with tool_choice {name or kind}, but {_NO_PARSER}")
    functions = json.dumps(given["tools"], ensure_ascii=False)
    return rendered, Tools(functions, kind, name, are_parallel)


def _rendered(tools: object) -> list[dict[str, Any]]:
    """The tools for the chat template, as vLLM's server gives them. Raises RowFailed."""
    if not isinstance(tools, list):
        raise unsupported(f"body.tools: got {name_type(tools)}; must be a list")
    for tool in tools:
        if (objection := objection_to(tool)) is not None:
            raise unsupported(f"body.tools: {objection}")
    return [as_served(tool) for tool in tools]


def _choice(
    choice: object, tools: Sequence[dict[str, Any]], field: str, failure: Callable[[str], RowFailed]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    """The kind of a choice, and the tool's name if one is named. Raises `failure`."""
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            names = [tool["function"]["name"] for tool in tools]
            if name not in names:
                raise failure(f"{field}: got {clip(name)}; the tools are {', '.join(map(clip, names))}")
            return "named", name
    allowed = 'none, auto, required, or {"type": "function", "function": {"name": …}}'
    raise failure(f"{field}: got {clip(json.dumps(choice))}; must be {allowed}")


def tools_of_row(tools: Sequence[dict[str, Any]], choice: str | None, *, are_parallel: bool) -> Tools | None:
    """The tools of a row, from its column or the spec; None if the model may call none of them.

    choice: as in `input.tool_choice`. Raises RowFailed.
    """
    if choice == "none" or not tools:
        return None
    for tool in tools:
        if (objection := objection_to(tool)) is not None:
            raise _invalid(objection)
    choices = ("auto", "required")
    wanted = choice or "auto"
    named = {"type": "function", "function": {"name": wanted}}
    kind, name = _choice(wanted if wanted in choices else named, tools, "input.tool_choice", _invalid)
    assert kind != "none"
    try:
        return Tools(json.dumps(list(tools), ensure_ascii=False), kind, name, are_parallel)
    except (TypeError, ValueError) as error:  # of values that JSON does not have, such as dates
        raise _invalid(f"the tools are no JSON: {error}") from None


def _invalid(message: str) -> RowFailed:
    return RowFailed("invalid_tools", message)


# -- the parser of a model --------------------------------------------------------------------------------------------

_HERMES = ("<tool_call>", "hermes")
_QWEN_CODER = ("<function=", "qwen3_coder")
# By `model_type`: marks of the model's chat template, each with the parser of the calls that have it. The first mark
# that the template has counts: one type of model may have several forms of calls.
_PARSERS: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2": (_HERMES,),
    "qwen2_moe": (_HERMES,),
    "qwen3": (_QWEN_CODER, _HERMES),
    "qwen3_moe": (_QWEN_CODER, _HERMES),
    "qwen3_next": (_QWEN_CODER, _HERMES),
    "qwen3_5": (_QWEN_CODER,),
    "qwen3_5_moe": (_QWEN_CODER,),
    "llama": (_HERMES, ('"parameters": dictionary of argument name', "llama3_json")),
    "mistral": (("[TOOL_CALLS]", "mistral"),),
    "glm4_moe": (("<arg_key>", "glm45"),),
    "gpt_oss": (("<|channel|>", "openai"),),
    "granite": (("<|tool_call|>", "granite"),),
    "granitemoehybrid": (("<tool_call>", "granite4"),),
    "kimi_k2": (("<|tool_calls_section_begin|>", "kimi_k2"),),
    "minimax_m2": (("<minimax:tool_call>", "minimax_m2"),),
    "seed_oss": (("<seed:tool_call>", "seed_oss"),),
}
_AUTO = "auto"


def with_tool_parser(spec: ModelSpec, model: Model, chat_template: str | None) -> ModelSpec:
    """The section with the parser's name in place of `auto`. chat_template: see `input.chat_template`.

    Raises SpecError for a model whose parser is not known.
    """
    if spec.tool_parser != _AUTO:
        return spec
    kind = str(model.config.get("model_type"))
    templates = own_templates(pathlib.Path(model.tokenizer))
    template = templates.get(chat_template or "default", chat_template or "")
    for mark, parser in _PARSERS.get(kind, ()):
        if mark in template:
            return spec.model_copy(update={"tool_parser": parser})
    if kind in _PARSERS:
        marks = " or ".join(mark for mark, _ in _PARSERS[kind])
        why = f"whose chat template has no {marks}"
    else:
        why = f"of type {kind}"
    known = ", ".join(sorted(_PARSERS))
    raise SpecError(
        f"model.tool_parser: got auto, but the parser of '{model.name}', {why}, is not known; give vLLM's name of it. "
        f"Types of models with a known one: {known}"
    )
