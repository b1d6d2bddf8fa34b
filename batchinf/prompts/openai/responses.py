"""Reads bodies of `/v1/responses` as those of chat completions, as vLLM's server does. The reader of lines uses it."""

import json
from collections.abc import Sequence
from typing import Any, cast

from batchinf.base.text import clip, name_type
from batchinf.prompts.openai.fields import fields_of, objection
from batchinf.prompts.openai.lines import RESPONSES_URL, Refused, show

_LOGPROBS = "message.output_text.logprobs"
# Others that `include` may ask for. They are of items that no text has.
_OF_OTHER_ITEMS = frozenset(
    """file_search_call.results web_search_call.results web_search_call.action.sources message.input_image.image_url
    computer_call_output.output.image_url code_interpreter_call.outputs reasoning.encrypted_content""".split()
)
# Of the request, in the answer, if they have their types.
_REPEATED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("instructions", "truncation", "user", "service_tier", "prompt_cache_key"), str),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("max_output_tokens", "max_tool_calls", "top_logprobs"), int),
    **dict.fromkeys(("metadata", "reasoning", "text"), dict),
    "parallel_tool_calls": bool,
    "store": bool,
    "tool_choice": (str, dict),
    "tools": list,
}
# Fields of `reasoning` that change no answer, with their only values if others would.
_OF_REASONING: dict[str, tuple[str, ...] | None] = {
    "summary": None,
    "generate_summary": None,
    "context": ("auto",),
    "mode": ("standard",),
}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# Names of fields in errors.
_OWN_NAMES = {
    "body.messages": "body.input",
    "body.response_format": "body.text.format",
    "body.reasoning_effort": "body.reasoning.effort",
    "body.verbosity": "body.text.verbosity",
}
_TOOL = "{type: function, name, description, parameters}"

Message = dict[str, Any]


def repeated(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body that its answer repeats."""
    return {name: body[name] for name, kind in _REPEATED.items() if isinstance(body.get(name), kind)}


def as_chat(body: dict[str, Any], *, takes_images: bool = False) -> dict[str, Any]:
    """The body of a chat completion with the same answer. Raises Refused for what has no such form.

    takes_images: messages may have parts with images, which stay as they are.
    """
    known = fields_of(RESPONSES_URL)
    for name, value in body.items():
        is_used = name in known and known[name].use == "used"
        if not is_used and (why := objection(RESPONSES_URL, name, value)) is not None:
            raise Refused(f"body.{name}: {why}")
    chat = {name: value for name, value in body.items() if known[name].use == "used"}
    top = chat.pop("top_logprobs", 0)
    if _has_logprobs(chat.pop("include", [])):  # without it, vLLM gives no logprobs either
        chat |= {"logprobs": True, "top_logprobs": top}
    if "max_output_tokens" in chat:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    chat |= _reasoning(chat.pop("reasoning", {}))
    chat |= _text(chat.pop("text", {}))
    if "tools" in chat:
        chat["tools"] = _tools(chat["tools"])
    if isinstance(chat.get("tool_choice"), dict):
        chat["tool_choice"] = _tool_choice(chat["tool_choice"])
    items = chat.pop("input", None)
    chat["messages"] = _messages(chat.pop("instructions", None), items, takes_images=takes_images)
    if _is_open(items):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def in_own_names(message: str) -> str:
    """An error of a chat completion's body, with the name that the field has here."""
    field, colon, reason = message.partition(":")
    return f"{_OWN_NAMES.get(field, field)}{colon}{reason}"


def _has_logprobs(include: object) -> bool:
    """Whether the answer has logprobs."""
    if not isinstance(include, list):
        raise Refused(f"body.include: got {show(include)}; must be a list of texts")
    for name in include:
        if name != _LOGPROBS and name not in _OF_OTHER_ITEMS:
            raise Refused(f"body.include: got {show(name)}; must be {_LOGPROBS}")
    return _LOGPROBS in include


def _reasoning(reasoning: object) -> dict[str, Any]:
    fields = _mapping(reasoning, "reasoning")
    for name, value in fields.items():
        only = _OF_REASONING.get(name)
        if name != "effort" and (name not in _OF_REASONING or (only is not None and value not in only)):
            raise Refused(f"body.reasoning.{name}: got {show(value)}, which is not supported")
    return {"reasoning_effort": fields["effort"]} if "effort" in fields else {}


def _text(text: object) -> dict[str, Any]:
    fields = _mapping(text, "text")
    given = {"verbosity": fields.pop("verbosity")} if "verbosity" in fields else {}
    form = _mapping(fields.pop("format", {}), "text.format")
    for name, value in fields.items():
        raise Refused(f"body.text.{name}: got {show(value)}; it has format and verbosity")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    return {**given, "response_format": form} if form else given


def _tools(tools: object) -> list[dict[str, Any]]:
    """Flat tools in the form of chat completions."""
    if not isinstance(tools, list):
        raise Refused(f"body.tools: got {name_type(tools)}; must be a list")
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            got = name_type(tool) if kind is None else f"a tool of type {clip(str(kind))}, which batchinf does not run"
            raise Refused(f"body.tools: got {got}; must be {_TOOL}")
        if "name" not in tool:
            raise Refused(f"body.tools: got a function without a name; must be {_TOOL}")
    return [{"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in tools]


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        allowed = "none, auto, required, or {type: function, name: …}"
        raise Refused(f"body.tool_choice: got {clip(json.dumps(choice))}; must be {allowed}")
    return {"type": "function", "function": {"name": choice["name"]}}


def _messages(instructions: object, items: object, *, takes_images: bool) -> list[Message]:
    if not isinstance(instructions, str | None):
        raise Refused(f"body.instructions: got {show(instructions)}; must be text")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        got = "an empty list" if items == [] else show(items)
        raise Refused(f"body.input: got {got}; must be text or a list of items")
    for place, item in enumerate(items):
        try:
            _add(messages, _mapping(item, f"input[{place}]"), takes_images=takes_images)
        except Refused as error:
            text = str(error)
            raise Refused(text if text.startswith("body.") else f"body.input[{place}]: {text}") from None
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _add(messages: list[Message], item: dict[str, Any], *, takes_images: bool) -> None:
    """Add an item to the messages. Reasoning, text and calls that follow each other are one message, as in vLLM."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    if kind == "function_call":
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
        if last:
            last["tool_calls"] = [*last.get("tool_calls", []), *calls]
        else:
            messages.append({"role": "assistant", "tool_calls": calls})
    elif kind == "function_call_output":
        content = _joined(item.get("output"))
        messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _put(messages, last, "reasoning", _thoughts(item))
    elif kind == "message" and item.get("role") == "assistant":
        _put(messages, last, "content", _joined(item.get("content")))
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), takes_images=takes_images)})
    else:
        raise Refused(f"got an item of type {show(kind)}; only texts, reasoning, function calls and outputs are read")


def _put(messages: list[Message], last: Message, key: str, text: str) -> None:
    """Into the last message, if that is an assistant's without it, or else into a new one."""
    if last and key not in last:
        last[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _thoughts(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Refused("got encrypted_content, which only OpenAI can read; leave out the item")
    return _joined([*(item.get("content") or ()), *(() if item.get("content") else item.get("summary") or ())], {
        "reasoning_text": "text", "summary_text": "text",
    })  # fmt: skip


def _content(content: object, *, takes_images: bool) -> str | list[dict[str, Any]]:
    """Text, or parts of text as in chat completions, and images as they are."""
    if isinstance(content, str):
        return content
    if not (takes_images and isinstance(content, list)):
        return [{"type": "text", "text": text} for text in _texts(content, _PARTS)]
    return [part if _is_image(part) else {"type": "text", "text": _texts([part], _PARTS)[0]} for part in content]


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _joined(content: object, kinds: dict[str, str] = _PARTS) -> str:
    return content if isinstance(content, str) else "\n".join(_texts(content, kinds))


def _texts(content: object, kinds: dict[str, str]) -> Sequence[str]:
    if not isinstance(content, list):
        raise Refused(f"got {name_type(content)} for content; must be text, or a list of parts of text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds[kind]) if kind in kinds else None
        if not isinstance(text, str):
            got = name_type(part) if kind is None else f"a part of type {show(kind)}"
            raise Refused(f"got {got}; only parts with text are read: {', '.join(kinds)}")
        texts.append(text)
    return texts


def _is_open(items: object) -> bool:
    """Whether the model continues the last item, as with vLLM's server."""
    last = items[-1] if isinstance(items, list) else {}
    is_text = last.get("type", "message") in ("message", "reasoning")
    return is_text and last.get("status") in ("in_progress", "incomplete")


def _mapping(value: object, name: str) -> dict[str, Any]:
    """A copy without nulls. Raises Refused for another value."""
    if not isinstance(value, dict):
        raise Refused(f"body.{name}: got {name_type(value)}; must be a mapping")
    return cast(dict[str, Any], {key: item for key, item in value.items() if item is not None})
