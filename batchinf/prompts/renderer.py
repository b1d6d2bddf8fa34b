"""Makes the text of a prompt from a row and its tools, or takes its token ids. Names the columns that this needs."""

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import RowFailed, SpecError
from batchinf.base.text import list_names, name_type
from batchinf.prompts.chat import ChatTemplate, Message, read_messages, read_tools
from batchinf.prompts.encoder import Encoder
from batchinf.prompts.images import (
    ImageSource,
    Placeholders,
    empty_columns,
    images_of,
    render_conversation,
)
from batchinf.prompts.openai.lines import COLUMNS, BodyReader, missing_columns, unsupported
from batchinf.prompts.openai.requests import RowRequest
from batchinf.prompts.templates import RowTemplate, column_call
from batchinf.prompts.tools import tools_of_row
from batchinf.records import Tools
from batchinf.source.rows import Row
from batchinf.spec.fields import null_hint
from batchinf.spec.input import InputSpec, MessageSpec
from batchinf.spec.job import JobSpec

TOOLS = "tools"  # the column of datasets of conversations


def named_columns(spec: JobSpec, also: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of a spec field and the input column that it names. also: see `Task.input_columns`."""
    columns = {"input.id_column": spec.input.id_column, "input.adapter_column": spec.input.adapter_column}
    return [
        *Renderer(spec).named_columns,
        *((field, column) for field, column in columns.items() if column is not None),
        *(("output.keep_columns", column) for column in spec.output.keep_columns),
        *((f"sampling.{field}", column) for field, column in spec.sampling.columns.items()),
        *also,
    ]


def with_tools(where: InputSpec, columns: Iterable[str]) -> InputSpec:
    """The section with the default of `tools_column`, for an input with these columns."""
    is_default = where.tools_column is None and where.messages_column is not None and TOOLS in columns
    return where.model_copy(update={"tools_column": TOOLS}) if is_default else where


def check_columns(spec: JobSpec, schema_names: Iterable[str], also: Iterable[tuple[str, str]]) -> None:
    """Raise SpecError if the spec names a column that the input does not have. also: see `Task.input_columns`."""
    names = list(schema_names)
    is_line = spec.input.is_batch_file and not missing_columns(names)
    for field, name in named_columns(spec, also):
        if name in names or (is_line and name in COLUMNS):
            continue
        guess = ";"
        for close in difflib.get_close_matches(name, names, n=1):
            is_template = field.startswith(("input.prompt_t", "input.messages["))
            shown = column_call(close) if is_template and not close.isidentifier() else repr(close)
            guess = f"; did you mean {shown}?"
        whose = ""
        remedy = null_hint(name)
        if field == "input.prompt_column" and spec.input.prompt_column is None:
            whose = ", the default of this field"
            remedy = "; name one of them"
        raise SpecError(
            f"{field}: the input has no column '{name}'{whose}{guess} it has: {list_names(names)}{remedy}"
            f"{_other_reason(spec.input.path, name, names)}"
        )


def _other_reason(path: str, name: str, names: Sequence[str]) -> str:
    """Why a column may be missing that is there to the user's eyes."""
    signs = {";": ";", "\t": r"\t", "|": "|"}
    sign = next((sign for sign in signs if len(names) == 1 and sign in names[0]), None)
    if sign is not None:
        shown = signs[sign]
        return f"; do '{shown}' signs separate the columns of a CSV file? Then set input.csv.delimiter"
    if f"{name}=" in path:
        return f"; {name}=… is a folder of the path itself, and only folders below input.path are columns"
    return ""


class Renderer:
    """Row → its request, with text, or token ids if the row has them.

    named_columns: pairs of a spec field and the input column that it names, for all columns of the prompt.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Any = None,
        begun_at: str | None = None,
        *,
        lines: BodyReader[RowRequest] | None = None,
    ) -> None:
        """Compile the templates. Raises SpecError, with the template's line.

        tokenizer: applies the chat template and counts tokens for `truncate_tokens`. Without one, only the columns and
        plain templates can be used. begun_at: see `ChatTemplate`. lines: reads rows that are lines of a batch file.
        """
        self._input = where = spec.input
        self._column = spec.prompt_column
        cut = None if tokenizer is None else Encoder(tokenizer, adds_special_tokens=False).cut_text
        # By the field that has the template: of each message, or of the prompt.
        self._templates = {field: RowTemplate(text, field, cut) for field, text in _texts(where)}
        named = self._template_columns() if self._templates else self._plain_columns()
        self.named_columns = (*named, *where.image_columns)
        self.image_columns = tuple(dict.fromkeys(column for _, column in where.image_columns))
        refuses = where.images is not None and where.images.on_missing == "error"
        self.needs_images = refuses and bool(self.image_columns)
        self._is_chat = where.is_chat
        self._parses_calls = spec.model.tool_parser is not None
        self._lines = lines
        self._chat: ChatTemplate | None = None
        self._takes_images = where.has_images and (lines is None or lines.takes_images)
        if tokenizer is not None and self._is_chat:
            self._chat = ChatTemplate(where, tokenizer, begun_at)
        elif tokenizer is not None and lines is not None:
            # Without a chat template, each conversation becomes an error row.
            with contextlib.suppress(ValueError):
                self._chat = ChatTemplate(where, tokenizer, begun_at)

    def _template_columns(self) -> tuple[tuple[str, str], ...]:
        named = tuple((field, column) for field, template in self._templates.items() for column in template.columns)
        if named or self._input.image_columns:
            return named
        goes = "write {{ column }} where a row's value goes"
        if self._input.messages is not None:
            raise SpecError(f"input.messages: they name no column; {goes}")
        text = str(self._input.prompt_template)
        is_path = "\n" not in text and re.search(r"\.[a-z0-9]{2,5}$", text) is not None
        hint = f"; for a template in a file write {{file: {text}}}" if is_path else ""
        raise SpecError(f"input.prompt_template: it names no column; {goes}{hint}")

    def _plain_columns(self) -> tuple[tuple[str, str], ...]:
        if self._input.messages is not None:  # they have images alone
            return ()
        if self._input.is_batch_file:
            return tuple(("input.format openai", column) for column in COLUMNS)
        for field in ("messages_column", "token_ids_column"):
            if (column := getattr(self._input, field)) is not None:
                tools = self._input.tools_column
                return ((f"input.{field}", column), *([("input.tools_column", tools)] if tools is not None else []))
        for field in ("context_column", "text_column", "query_column"):
            if getattr(self._input, field) is not None:
                return ((f"input.{field}", self._column),)
        return (("input.prompt_column", self._column),)

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns of the prompt, without repeats."""
        return tuple(dict.fromkeys(column for _, column in self.named_columns))

    @property
    def printed(self) -> tuple[str, ...]:
        """The columns whose text templates print, without repeats; see `RowTemplate`."""
        return tuple(dict.fromkeys(column for template in self._templates.values() for column in template.printed))

    def render(self, row: Row) -> str:
        """The prompt's text, which is valid Unicode and not empty. Raises RowFailed."""
        return self.read(row, None).text or ""

    def _chat_text(self, messages: Sequence[Message], values: Mapping[str, object]) -> str:
        """The text of a conversation, with the row's tools. Without any, the job's options stay."""
        assert self._chat is not None, "a conversation needs the tokenizer's chat template"
        tools = self._own_tools(values)
        return check_text(self._chat.render(messages, **({} if tools is None else {"tools": tools})))

    def read(self, row: Row, placeholders: Placeholders | None) -> RowRequest:
        """The request of a row. Its token ids are not yet checked. Raises RowFailed, but not for one of several parts.

        placeholders: see `Renderer.placeholders`.
        """
        if self._lines is not None:
            line = self._rendered(self._lines.read_row(row), placeholders)
            parts = tuple(self._part(part, placeholders) for part in line.parts)
            return replace(line, parts=parts) if parts else line
        if row.error is not None:
            raise RowFailed("unreadable", row.error)
        if self.needs_images and len(empty_columns(row.values, self.image_columns)) == len(self.image_columns):
            raise RowFailed("image_missing", f"the row has no image in {list_names(self.image_columns)}; "
                            "input.images.on_missing: run lets such rows run")  # fmt: skip
        columns = self._input.images_column
        own = images_of(row.values, columns) if columns else []
        if not self._is_chat:
            return self._plain(row.values, tuple(own))
        messages = self._conversation(row.values)
        text, ids, images = render_conversation(
            messages, own, lambda them: self._chat_text(them, row.values), placeholders
        )
        tools = self._tools(row.values) if self._parses_calls else None
        return RowRequest(text=text, token_ids=ids, images=images, tools=tools, is_chat=True, sampling=None)

    def _plain(self, values: Mapping[str, object], images: tuple[ImageSource, ...]) -> RowRequest:
        """A prompt without the chat template."""
        if (column := self._input.token_ids_column) is not None:
            ids = take_list(values, column, "token ids", kind=int)
            return RowRequest(token_ids=ids, images=images, sampling=None)
        return RowRequest(text=check_text(self._text(values)), images=images, sampling=None)

    def _part(self, part: RowRequest, placeholders: Placeholders | None) -> RowRequest:
        try:
            return self._rendered(part, placeholders)
        except RowFailed as failed:
            return replace(part, error=failed.error)

    def _rendered(self, line: RowRequest, placeholders: Placeholders | None) -> RowRequest:
        """The request of a line with its messages as text. Raises RowFailed."""
        if line.messages is None:
            return line
        messages = read_messages(line.messages, "body.messages", takes_images=self._takes_images)
        text, ids, images = render_conversation(messages, (), functools.partial(self._line_text, line), placeholders)
        if images and line.truncation is not None:
            # vLLM counts all tokens of images, too, and refuses to cut them.
            hint = "whose images it could cut off: leave it out, and shorten the text"
            raise unsupported(f"body.truncate_prompt_tokens: got it in a line with images, {hint}")
        return replace(line, messages=None, text=text, token_ids=ids, is_chat=True, images=images)

    def _line_text(self, line: RowRequest, messages: list[Message]) -> str:
        """The text of a line's conversation, with the job's system prompt if it has none of its own."""
        system = self._input.system_prompt
        if system is not None and not any(it["role"] in ("system", "developer") for it in messages):
            messages = [{"role": "system", "content": system}, *messages]
        if self._chat is None:
            raise RowFailed("template_error", "the model has no chat template; give one as input.chat_template")
        options = dict(line.chat)
        options |= options.pop("chat_template_kwargs", {})
        if options.get("continue_final_message") and "add_generation_prompt" not in options:
            options["add_generation_prompt"] = False
        return self._chat.render(messages, **options)

    def placeholders(self, tokenizer: Any) -> Placeholders | None:
        """The tokens that stand for images; None in a job without images, or without a chat template that shows them.

        Raises SpecError if the job applies a chat template that does not show images.
        """
        if not self._input.has_images:
            return None
        if self._chat is not None:
            return Placeholders(self._chat, tokenizer)
        # A plain text may have a placeholder that no template says, and lines of a batch file need no template at all.
        needs_none = (ValueError,) if self._input.has_own_conversations else (ValueError, SpecError)
        with contextlib.suppress(*needs_none):
            return Placeholders(ChatTemplate(self._input, tokenizer, None), tokenizer)
        return None

    def _own_tools(self, values: Mapping[str, object]) -> list[dict[str, Any]] | None:
        """The tools in the row's column, or else those of the spec."""
        column = self._input.tools_column
        tools = None if column is None else read_tools(values.get(column), f"column '{column}'")
        return list(self._input.tools) if tools is None and self._input.tools is not None else tools

    def _tools(self, values: Mapping[str, object]) -> Tools | None:
        """The tools that the model may call in its answer to a row; None without any. Raises RowFailed."""
        tools = self._own_tools(values)
        if tools is None:
            return None
        return tools_of_row(tools, self._input.tool_choice, are_parallel=self._input.parallel_tool_calls)

    def _conversation(self, values: Mapping[str, object]) -> list[Message]:
        """The row's conversation, before the chat template."""
        messages = self._messages(values)
        system = self._input.system_prompt
        if system is None:
            return messages
        if messages[0]["role"] == "system":
            message = "the conversation begins with a system message of its own, beside input.system_prompt"
            raise RowFailed("invalid_messages", message)
        return [{"role": "system", "content": system}, *messages]

    def _messages(self, values: Mapping[str, object]) -> list[Message]:
        if (column := self._input.messages_column) is not None:
            return read_messages(take(values, column), f"column '{column}'", takes_images=self._takes_images)
        if self._input.messages is not None:
            return self._filled(self._input.messages, values)
        # The chat template's text is checked for invalid Unicode.
        return [{"role": "user", "content": self._text(values) or check_text("")}]

    def _filled(self, specs: Sequence[MessageSpec], values: Mapping[str, object]) -> list[Message]:
        """The messages of the spec with the values of a row in their templates."""
        return [
            {"role": message.role, "content": self._content(f"input.messages[{number}].content", message, values)}
            for number, message in enumerate(specs)
        ]

    def _content(self, field: str, message: MessageSpec, values: Mapping[str, object]) -> Any:
        """The text of a message; or its parts, the images with their sources."""
        if not message.parts:
            return self._templates[field].fill(values)
        parts: list[dict[str, Any]] = []
        for place, part in enumerate(message.parts):
            if part.column is not None:
                parts += [{"type": "image", "source": source} for source in images_of(values, [part.column])]
                continue
            parts.append({"type": "text", "text": self._templates[f"{field}[{place}].text"].fill(values)})
        return parts

    def _text(self, values: Mapping[str, object]) -> str:
        if (template := self._templates.get("input.prompt_template")) is not None:
            return template.fill(values)
        value = take(values, self._column)
        if isinstance(value, str):
            return value
        raise RowFailed("wrong_type", f"got {type(value).__name__} in column '{self._column}'; expected a string")


def _texts(where: InputSpec) -> Iterator[tuple[str, str]]:
    """Pairs of a field and the template in it: of each message, or of the prompt."""
    if where.prompt_template is not None:
        yield "input.prompt_template", where.prompt_template
    for number, message in enumerate(where.messages or ()):
        field = f"input.messages[{number}].content"
        if isinstance(message.content, str):
            yield field, message.content
        for place, part in enumerate(message.parts):
            if part.text is not None:
                yield f"{field}[{place}].text", part.text


def take(values: Mapping[str, object], column: str, null: str = "null_prompt") -> object:
    """The value of a column, never None. Raises RowFailed. null: the error type for a null."""
    if column not in values:
        raise RowFailed("missing_column", f"row has no column '{column}'")  # only the needed columns were read
    value = values[column]
    if value is None:
        raise RowFailed(null, f"column '{column}' is null")
    return value


def take_list(
    values: Mapping[str, object], column: str, items: str, *, kind: type | None = None, null: str = "null_prompt"
) -> list[Any]:
    """The list in a column, which may be JSON text. Raises RowFailed.

    items: in words, for the message. kind: the type of all items; None: any. null: see `take`.
    """
    value = take(values, column, null)
    got = name_type(value)
    if isinstance(value, str):
        try:
            value = json.loads(value)
            got = "text that is not a list in JSON"
        except (ValueError, RecursionError):
            got = "text that is not JSON"
    if isinstance(value, list):
        wrong = None if kind is None else next((at for at, item in enumerate(value) if type(item) is not kind), None)
        if wrong is None:
            return value
        got = f"a list with {name_type(value[wrong])} at place {wrong}"
    raise RowFailed("wrong_type", f"got {got} in column '{column}'; expected a list of {items}")


def check_text(text: str) -> str:
    """The text of a prompt. Raises RowFailed if it is empty or no valid Unicode."""
    if not text:
        raise RowFailed("empty_prompt", "the prompt is an empty string")
    check_unicode(text, "the prompt")
    return text


def check_unicode(text: str, name: str) -> None:
    """Raise RowFailed for a text with a lone surrogate, which no tokenizer takes. name: of the text, in the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"U+{ord(text[error.start]):04X} at character {error.start + 1:,}"
        raise RowFailed("invalid_unicode", f"{name} is not valid Unicode: lone surrogate {place}") from None
