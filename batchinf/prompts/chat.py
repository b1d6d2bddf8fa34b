"""Renders conversations through the model's chat template, as vLLM's `LLM.chat` does."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from batchinf.base.errors import RowFailed
from batchinf.base.text import describe_error, name_type, shorten
from batchinf.prompts.templates import line_of
from batchinf.spec.input import InputSpec

# The variables that transformers passes to every chat template, besides the special tokens.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


def own_templates(folder: pathlib.Path) -> dict[str, str]:
    """The chat templates in a tokenizer's folder, by name; the main one is `default`.

    The order is that of transformers: chat_template.jinja overrides tokenizer_config.json, and that overrides the
    chat_template.json of older processors.
    """
    templates: dict[str, str] = {}
    for name in ("chat_template.json", "tokenizer_config.json"):
        templates |= _templates_in(folder / name)
    if (folder / "chat_template.jinja").is_file():
        templates = {"default": _read(folder / "chat_template.jinja")}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return templates | {path.stem: _read(path) for path in more}


def _templates_in(path: pathlib.Path) -> dict[str, str]:
    """The templates under `chat_template` of a JSON file."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    value = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(value, str):
        return {"default": value}
    named = value if isinstance(value, list) else []
    return {it["name"]: it["template"] for it in named if isinstance(it, dict) and {"name", "template"} <= it.keys()}


def _read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@functools.lru_cache(8)
def variables(template: str) -> frozenset[str]:
    """The names that a chat template takes from outside. Raises jinja2.TemplateSyntaxError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters.setdefault("tojson", str)
    environment.from_string(template)  # only this finds unknown filters
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which transformers adds to Jinja2 to mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


Message = dict[str, Any]

_PROBE = "a part of a text"


def read_messages(value: object, what: str, *, takes_images: bool = False) -> list[Message]:
    """Normalise a conversation: a list of messages, or JSON text of one. Raises RowFailed if it is invalid.

    Keys with a null are removed: Arrow fills a message with the keys of all others. `content` is text or a list of
    parts of text; a message with `tool_calls` needs none. Arguments of tool calls become mappings, which chat templates
    expect; OpenAI's format has them as text. what: names the value in errors, such as `column 'chat'`.

    takes_images: parts may be images. Each becomes `{type: image, source: …}`, or `{type: image}` without a source.
    """
    if value is None:
        raise RowFailed("null_prompt", f"{what} is null")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(what, f"text that is not JSON ({describe_error(error)})") from None
    elif isinstance(value, list):
        value = without_nulls(value)
    if not isinstance(value, list):
        raise _wrong(what, name_type(value))
    if not value:
        raise RowFailed("empty_prompt", f"{what} has no messages")
    messages: list[Message] = []
    for number, item in enumerate(value):
        try:
            messages.append(_read_message(item, takes_images=takes_images))
        except _Wrong as error:
            raise RowFailed("invalid_messages", f"{what}, message {number}: {error}") from None
    return messages


def read_tools(value: object, what: str) -> list[dict[str, Any]] | None:
    """The tools of a conversation: a list of mappings, or JSON text of one; None if there are none. Raises RowFailed.

    what: names the value in errors, such as `column 'tools'`.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowFailed("invalid_tools", f"got text that is not JSON ({describe_error(error)}) in {what}") from None
    if value is None or value in ("", []):
        return None
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        return [tool for tool in map(without_nulls, value) if isinstance(tool, dict)]
    got = "a list of other values" if isinstance(value, list) else name_type(value)
    raise RowFailed("invalid_tools", f"got {got} in {what}; expected a list of mappings, or JSON text of one")


def _wrong(what: str, got: str) -> RowFailed:
    return RowFailed("invalid_messages", f"got {got} in {what}; expected a list of messages, or JSON text of one")


class _Wrong(Exception):
    """Why a message is invalid."""


def _read_message(item: object, *, takes_images: bool) -> Message:
    """The normalised message. Raises _Wrong, as do the functions that it calls."""
    if not isinstance(item, dict):
        raise _Wrong(f"got {name_type(item)}; expected a mapping with role and content")
    message = _fields(item)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _Wrong(_wrong_role(item, role))
    if "content" not in message and "tool_calls" not in message:
        raise _Wrong(f"got no content from '{shorten(role, 60)}'")
    if takes_images and message.get("images"):
        raise _Wrong("got 'images' beside the content; give each image a part of its own in the content")
    message["content"] = _read_content(message.get("content", ""), takes_images=takes_images)
    if calls := _read_calls(message.pop("tool_calls", [])):
        message["tool_calls"] = calls
    return message


def _fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message or a part that are not null."""
    return {key: value for key, value in item.items() if value is not None}


def _wrong_role(item: dict[str, Any], role: object) -> str:
    if item.keys() >= {"from", "value"}:
        return "got ShareGPT's from and value; expected role and content: human is user, and gpt is assistant"
    keys = ", ".join(map(str, item)) or "nothing"
    got = f"no role, but {keys}" if role is None else f"{name_type(role)} for role"
    return shorten(f"got {got}; expected text such as 'user'", 300)


def _read_content(content: object, *, takes_images: bool) -> str | list[dict[str, Any]]:
    """The content with its parts in one form: text as a mapping, and an image as `_read_image` makes it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Wrong(f"got {name_type(content)} for content; expected text, or a list of parts of text")
    return [_read_part(part, takes_images=takes_images) for part in content]


def _read_part(part: object, *, takes_images: bool) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _Wrong(f"got {name_type(part)} for a part of content; expected {{type: text, text: …}}")
    kind = part.get("type")
    if kind in IMAGE_PARTS:
        if not takes_images:
            raise _Wrong(f"got a part of type {kind!r}; {_NO_IMAGES}")
        return _read_image(part)
    if kind != "text":
        kinds = ", ".join(map(repr, ("text", *IMAGE_PARTS))) if takes_images else "'text'"
        raise _Wrong(shorten(f"got a part of type {kind!r}; only parts of type {kinds} are supported", 200))
    fields = _fields(part)
    if not isinstance(fields.get("text"), str):
        raise _Wrong(f"got {name_type(fields.get('text'))} for the text of a part; expected text")
    # Templates of several models show an image for such a key; others would ignore it.
    for key in ("image", "image_url"):
        if key in fields:
            raise _Wrong(f"got {key!r} in a part of type 'text'; give the image a part of its own")
    return fields


_NO_IMAGES = "only parts of type 'text' are supported, unless the spec has input.images"
# Types of parts with an image → the keys that may have its source. Without any of them, a column has it.
IMAGE_PARTS = {"image": ("image", "url", "path"), "image_url": ("image_url",), "input_image": ("image_url",)}
_DETAILS = ("auto", "high")  # no model here gets a smaller copy


def _read_image(part: dict[str, Any]) -> dict[str, Any]:
    """A part with an image in one form. Nothing that it says is ignored."""
    fields = _fields(part)
    kind = fields.pop("type")
    given = [key for key in IMAGE_PARTS[kind] if key in fields]
    if len(given) > 1:
        raise _Wrong(f"got {given[1]} beside {given[0]} in a part of type '{kind}'; give one of them")
    if not given and kind != "image":
        raise _Wrong(f"got no image_url in a part of type '{kind}'")
    image: dict[str, Any] = {"type": "image"}
    if given:
        image["source"] = source = _take_source(fields, given[0])
        if not isinstance(source, str | bytes | dict):
            raise _Wrong(f"got {name_type(source)} for the image of a part of type '{kind}'; expected a path or a URL")
    _check_options(kind, fields)
    return image


def _take_source(fields: dict[str, Any], key: str) -> object:
    """Remove the source of an image from the fields of its part. The others of a mapping in `image_url` join them."""
    source = fields.pop(key)
    if key != "image_url" or not isinstance(source, dict):
        return source
    fields |= _fields(source)
    return fields.pop("url", None)


def _check_options(kind: str, fields: dict[str, Any]) -> None:
    """Raise _Wrong if a part of this type cannot have these fields beside the source of its image."""
    detail = fields.pop("detail", "auto")
    if detail not in _DETAILS:
        got = f"got the detail {shorten(repr(detail), 40)} in a part of type '{kind}'"
        raise _Wrong(f"{got}; models get the whole image: leave it out, or write auto or high")
    if fields:
        raise _Wrong(shorten(f"got {next(iter(fields))!r} in a part of type '{kind}', which is not supported", 200))


def source_of_part(part: Mapping[str, Any]) -> Any:
    """The source of an image in a part of a type of `IMAGE_PARTS`, valid or not; None if it has none."""
    source = next((part[key] for key in IMAGE_PARTS[part["type"]] if part.get(key) is not None), None)
    return source.get("url") if part["type"] != "image" and isinstance(source, dict) else source


def _read_calls(calls: object) -> list[object]:
    """The tool calls of a message, one or a list, as chat templates expect them."""
    try:
        return [_with_arguments(call) for call in (calls if isinstance(calls, list) else [calls])]
    except (ValueError, RecursionError) as error:
        raise _Wrong(shorten(f"got arguments of a tool call that are no JSON mapping: {error}", 300)) from None


def _with_arguments(call: object) -> object:
    """The call with its arguments as a mapping. Raises ValueError or RecursionError if they are none."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(name_type(arguments))
    return {**call, "function": {**function, "arguments": arguments}}


def without_nulls(value: object) -> object:
    """A value without the keys whose value is null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


class ChatTemplate:
    """Messages → text, by `input.chat_template` or the tokenizer's own template."""

    def __init__(self, spec: InputSpec, tokenizer: Any, begun_at: str | None) -> None:
        """begun_at: when the job began, in ISO format with its UTC offset; default: now. Templates that print the date
        get this moment in UTC, so that a resume renders the same text.
        """
        self._tokenizer = tokenizer
        self._source = _source(spec.chat_template, tokenizer)
        self._options: dict[str, Any] = {**(spec.chat_template_kwargs or {})}
        continues = bool(spec.continue_final_message)
        adds_header = not continues if spec.add_generation_prompt is None else spec.add_generation_prompt
        self._options |= {"add_generation_prompt": adds_header, "continue_final_message": continues}
        moment = datetime.datetime.now(datetime.UTC) if begun_at is None else datetime.datetime.fromisoformat(begun_at)
        if "strftime_now" in self._source:
            # transformers' own function reads the clock. A variable with the same name takes precedence over it.
            self._options["strftime_now"] = moment.astimezone(datetime.UTC).strftime
        self._takes = {name for name in ("tools", "documents") if name in variables(self._source)}
        self._takes_parts = self._renders_parts()
        self._knows_developer = "'developer'" in self._source or '"developer"' in self._source

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The prompt's text, with all special tokens. options: override `chat_template_kwargs`.

        Raises RowFailed for any exception of the template, and for tools that the template would ignore.
        """
        for name in ("tools", "documents"):
            if options.get(name) and name not in self._takes:
                words = f"the row has {name}, but the chat template has no variable `{name}`, so the model would not "
                raise RowFailed("template_error", f"{words}see them")
        try:
            return self._apply(self._fit(messages), options)
        except Exception as error:
            # Templates and tokenizers' own code may raise anything.
            words = f"the chat template failed{line_of(error)}: {describe_error(error)}"
            raise RowFailed("template_error", words) from error

    def _apply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._source, tokenize=False, **{**self._options, **options}
            )
        )

    def _fit(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form that the template expects, as vLLM prepares them.

        One difference: `LLM.chat` turns plain text into a part if the template takes parts. Here it stays text, as in
        transformers. The results differ only if the template treats text and parts differently.
        """
        fitted = [dict(message) for message in messages]
        if not self._takes_parts:
            for message in fitted:
                if isinstance(message["content"], list):
                    message["content"] = _joined(message["content"])
        if not self._knows_developer and any(message["role"] == "developer" for message in fitted):
            fitted = _as_system(fitted)
        return fitted

    def image_mark(self) -> str:
        """What the template writes for an image; empty if it does not show images."""
        options = {"add_generation_prompt": False, "continue_final_message": False}
        text = {"type": "text", "text": _PROBE}
        try:
            without, shown = (
                self._apply([{"role": "user", "content": parts}], options)
                for parts in ([text], [{"type": "image"}, text])
            )
        except Exception:
            return ""
        if not self._takes_parts or len(shown) <= len(without):
            return ""
        start = next((place for place, sign in enumerate(without) if sign != shown[place]), len(without))
        return shown[start : start + len(shown) - len(without)]

    def _renders_parts(self) -> bool:
        """Whether the template takes a list of parts. Others print the list in Python's or JSON's notation."""
        options = {"add_generation_prompt": False, "continue_final_message": False}
        try:
            text = self._apply([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}], options)
        except Exception:
            return False
        return _PROBE in text and not any(sign in text for sign in ("{'type': 'text'", '{"type": "text"'))


def _source(template: str | None, tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template(template))
    except ValueError:
        # Older processors keep it in chat_template.json, which tokenizers do not read.
        templates = own_templates(pathlib.Path(str(tokenizer.name_or_path)))
        if "default" not in templates:
            raise
        return templates["default"]


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _as_system(messages: Sequence[Message]) -> list[Message]:
    """The messages with all of the roles `developer` and `system` joined into one system message at the beginning."""
    roles = ("developer", "system")
    contents = [message["content"] for message in messages if message["role"] in roles]
    texts = [content if isinstance(content, str) else _joined(content) for content in contents]
    others = [message for message in messages if message["role"] not in roles]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]
