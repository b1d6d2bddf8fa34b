"""The section `input` of a spec: where the rows come from, which of them run, and which columns make the prompt."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchinf.base.paths import PASSWORD, bucket_problem, elsewhere, is_bucket
from batchinf.source.files import CsvDialect
from batchinf.source.formats.csv import Csv
from batchinf.source.formats.huggingface import HUGGING_FACE
from batchinf.source.formats.lines import OPENAI
from batchinf.source.formats.registry import FORMAT_NAMES
from batchinf.spec.fields import (
    FROM_FILE,
    IDENTITY,
    LAYOUT,
    RUNTIME,
    Path,
    Positive,
    Section,
    Text,
    as_tuple,
    is_json,
    on_this_host,
    without,
    wrong,
)
from batchinf.spec.images import ImageSettings, PartSpec
from batchinf.spec.tools import objection_to

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[FORMAT_NAMES]

# What the column of answers has.
Answers = Literal["auto", "texts", "places", "places_from_1"]

# A spec gives at most one of these.
PROMPT_FORMS = (
    "prompt_column", "prompt_template", "messages", "messages_column", "token_ids_column", "context_column",
    "text_column", "query_column",
)  # fmt: skip
# Those that name the one column without which a row has no prompt.
COLUMN_FORMS = tuple(form for form in PROMPT_FORMS if form.endswith("_column"))
# If any of these is given, prompts go through the chat template.
CHAT_FIELDS = (
    "messages", "messages_column", "system_prompt", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "tools",
)  # fmt: skip
# Refused keys of `chat_template_kwargs` → the field to write instead; empty: the key is an argument of the tokenizer.
KWARGS_ELSEWHERE = {
    "add_generation_prompt": "input.add_generation_prompt", "continue_final_message": "input.continue_final_message",
    "chat_template": "input.chat_template", "messages": "input.messages", "conversation": "input.messages",
    **dict.fromkeys(("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
                     "return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now"), ""),
}  # fmt: skip


class MessageSpec(Section):
    """One message of a conversation."""

    role: Annotated[Text, IDENTITY]
    """Role of the message: `system`, `user`, `assistant`, or another role that the chat template knows."""
    content: Annotated[Annotated[tuple[PartSpec, ...], Field(strict=False, min_length=1)] | str, FROM_FILE]
    """Text of the message: a Jinja2 template over the row's columns. Or a list of parts, texts and images."""

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """The parts of a content that is a list; empty for a text."""
        return () if isinstance(self.content, str) else self.content


def _has_images(message: object) -> bool:
    """Whether a message of a spec that is not checked yet has a part of type image."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list | tuple) else ()
    return any(isinstance(part, dict) and part.get("type") == "image" for part in parts)


_JobFolder = Annotated[Path, on_this_host("copy the job's output folder to this host, and give the copy")]


def _place_problem(path: str) -> str | None:
    if is_bucket(path) and not path.startswith("hf:"):
        return bucket_problem(path)
    return elsewhere(path, "give a folder of this host, or s3://…, gs://… or az://…")


class ExcludeSpec(Section):
    """Rows that earlier jobs have done."""

    job: Annotated[Annotated[tuple[_JobFolder, ...], Field(strict=False, min_length=1)] | _JobFolder,
                   AfterValidator(as_tuple), IDENTITY]  # fmt: skip
    """Output folder of a job, or several. Rows that have an output row without an error there are left out."""
    on: Annotated[Literal["id", "prompt_hash"], IDENTITY]
    """How rows are compared: by their `id`, or by the token ids of their prompts."""


class CsvSpec(Section):
    """How CSV files are written."""

    delimiter: Annotated[Text | None, IDENTITY] = None
    """The character between two fields. Default: tab for `.tsv`, else comma. Another one of comma, semicolon, tab and
    vertical bar is taken, and a note says so, if it alone gives a file's header and first row as many fields."""
    quotechar: Annotated[str, IDENTITY] = '"'
    """The character around a field that has delimiters or line breaks in it. Empty: there is none, quotes are text."""
    encoding: Annotated[Text | None, IDENTITY] = None
    """Of the text, by Python's name, such as `cp1252` or `utf-16`. Default: UTF-8; if the file begins with the mark of
    UTF-16, that, and a note says so."""
    null_values: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | str, AfterValidator(as_tuple), IDENTITY
    ] = ()
    """Fields that are null, such as `["", NA]`. Without them, an empty field of a column of text is an empty text."""

    escapechar: Annotated[Text | None, IDENTITY] = None
    """The character before a quote within a field, such as `\\` in files of Spark and MySQL, or before itself; before
    any other character it is text. Default: none, and a quote within a field is written twice."""

    @field_validator("delimiter", "quotechar", "escapechar")
    @classmethod
    def _one_character(cls, sign: str | None) -> str | None:
        if sign in ("\n", "\r") or len(sign or "") > 1:
            raise wrong(f'got {sign!r}; must be one character, and no line break; a tab is "\\t" in double quotes')
        return sign

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str | None) -> str | None:
        try:
            "".encode(encoding or "utf-8")
        except (LookupError, ValueError):
            raise wrong(f"got {encoding!r}; must be an encoding of text that Python has, such as utf-8, cp1252, "
                        "latin-1, utf-16 or shift_jis") from None  # fmt: skip
        return encoding

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.delimiter is not None and self.delimiter == self.quotechar:
            raise wrong(f"got {self.quotechar!r}, which is the delimiter, too; must be another character", "quotechar")
        if self.escapechar is not None and self.escapechar in (self.delimiter, self.quotechar):
            raise wrong(f"got {self.escapechar!r}, which is the delimiter or the quotechar, too; must be another "
                        "character", "escapechar")  # fmt: skip
        if self.escapechar is not None and not self.quotechar:
            raise wrong("got it beside an empty quotechar, so that there is no quote to escape; leave it out",
                        "escapechar")  # fmt: skip
        return self

    @property
    def dialect(self) -> CsvDialect:
        """As formats see it."""
        return CsvDialect(**self.model_dump())


class InputSpec(Section):
    """Where the rows come from, which of them run, and how a row becomes a prompt."""

    path: Annotated[Path, RUNTIME]
    """A file, a glob, a folder, a URL that fsspec reads, or a Hugging Face dataset id. Files are known by content.
    Not with `job`."""
    job: Annotated[Annotated[Path, without(_place_problem)] | None, RUNTIME] = None
    """The output folder of a job that is done, instead of `path`, also in a bucket, such as `s3://bucket/first`: its
    output rows are the rows, with all columns."""
    format: Annotated[FormatName | None, RUNTIME] = None
    """Default: from the name's ending. `openai` is JSONL of OpenAI's batch API, also recognised by its lines."""
    csv: Annotated[CsvSpec | None, IDENTITY] = None
    """How CSV files are written: delimiter, quotes, encoding, null values."""
    split: Annotated[Text | None, IDENTITY] = None
    """Split of a Hugging Face dataset; default `train`."""
    name: Annotated[Text | None, IDENTITY] = None
    """Configuration of a Hugging Face dataset."""
    revision: Annotated[Text | None, IDENTITY] = None
    """Revision of a Hugging Face dataset."""
    prompt_column: Annotated[Text | None, IDENTITY] = None
    """The column that holds the prompt, as text; default `prompt`, unless another form of prompt is given."""
    prompt_template: Annotated[Text | None, FROM_FILE] = None
    """A Jinja2 template over the row's columns, instead of `prompt_column`."""
    messages: Annotated[Annotated[tuple[MessageSpec, ...], Field(strict=False, min_length=1)] | None, FROM_FILE] = None
    """A conversation. Its contents are Jinja2 templates over the row's columns; the chat template is applied."""
    messages_column: Annotated[Text | None, IDENTITY] = None
    """The column that holds the conversation: a list of messages with `role` and `content`, or JSON text of one."""
    tools_column: Annotated[Text | None, IDENTITY] = None
    """The column with the tools of each row's conversation, for the chat template: a list of mappings, or JSON text of
    one; null: none. Default with `messages_column`: `tools`, if the input has such a column."""
    tools: Annotated[Annotated[tuple[dict[str, Any], ...], Field(strict=False, min_length=1)] | None, FROM_FILE] = None
    """Tools of all conversations, in OpenAI's form; a row with tools in `tools_column` has those instead."""
    tool_choice: Annotated[Text | None, IDENTITY] = None
    """With `model.tool_parser`: `auto` (default), `required`, `none`, or the name of the tool to call."""
    parallel_tool_calls: Annotated[bool, IDENTITY] = True
    """With `model.tool_parser`: whether an answer may have several calls."""
    images_column: Annotated[
        Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | Text | None, AfterValidator(as_tuple), IDENTITY
    ] = None
    """The column with the images of a row, or several columns: a path relative to the input, a `file:` or `data:` URL,
    the bytes of a file, a mapping with `bytes` or `path`, or a list of these; null or an empty text: none."""
    images: Annotated[ImageSettings | None, IDENTITY] = None
    """Limits of images, and where they may come from. If it is given, parts of conversations and of lines of batch
    files may be images. Default: unset, or all of its defaults with `images_column` or a part of type `image`."""
    token_ids_column: Annotated[Text | None, IDENTITY] = None
    """The column that holds the prompt's token ids: a list, or JSON text of one. Nothing is added to them."""
    text_column: Annotated[Text | None, IDENTITY] = None
    """Task `score`: the column with the text. All of it is scored; long texts are scored in windows."""
    context_column: Annotated[Text | None, IDENTITY] = None
    """Task `score`: the column with the context, which is not scored. It replaces the other forms of prompt."""
    continuation_column: Annotated[Text | None, IDENTITY] = None
    """Task `score`: the column with the text that is scored after the context."""
    choices_column: Annotated[Text | None, IDENTITY] = None
    """Task `score`: the column with several texts to score after the context: a list, or JSON text of one."""
    choices: Annotated[Annotated[tuple[Text, ...], Field(strict=False, min_length=2)] | None, IDENTITY] = None
    """Task `score`: texts to score after the context of every row, such as labels, instead of `choices_column`."""
    answer_column: Annotated[Text | None, IDENTITY] = None
    """Task `score`: the column with the right choice: its text, or its place from 0; null if it is unknown.
    If `choices` are whole numbers, an answer is one of them and no place."""
    answers: Annotated[Answers, IDENTITY] = "auto"
    """Task `score`: what `answer_column` has: `texts` of choices, `places` from 0, or `places_from_1`. `auto`: what all
    answers of the input show when the job begins."""
    query_column: Annotated[Text | None, IDENTITY] = None
    """Task `rerank`: the column with the query. It replaces the other forms of prompt."""
    documents_column: Annotated[Text | None, IDENTITY] = None
    """Task `rerank`: the column with the documents that are scored and ranked for the query: a list of texts, or JSON
    text of one."""
    document_column: Annotated[Text | None, IDENTITY] = None
    """Task `rerank`: the column with one text that is scored for the query, instead of `documents_column`."""
    system_prompt: Annotated[Text | None, FROM_FILE] = None
    """A system message before the others, as plain text. Like each chat field, it applies the chat template."""
    chat_template: Annotated[Text | None, FROM_FILE] = None
    """A Jinja2 chat template instead of the model's default one, or the name of another template of the model. Task
    `rerank`: makes the prompt of a cross-encoder from two messages with the roles `query` and `document`."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, IDENTITY] = None
    """Further variables of the chat template, such as `enable_thinking: false`."""
    add_generation_prompt: Annotated[bool | None, IDENTITY] = None
    """End the prompt with the header of the assistant's turn; default true, except with `continue_final_message`."""
    continue_final_message: Annotated[bool | None, IDENTITY] = None
    """Leave the last message open, so that the model continues it."""
    apply_chat_template: Annotated[Literal[False] | None, RUNTIME] = None
    """`false` says that plain text is meant, for a model with a chat template. Without it, a warning is printed."""
    on_overlong: Annotated[Literal["error", "truncate_left", "truncate_right"], IDENTITY] = "error"
    """`error`: a row is an error row if its prompt leaves no room for one output token. `truncate_left`,
    `truncate_right`: a prompt that leaves no room for `max_tokens` is cut at its beginning or end, and
    `prompt_truncated` is true."""
    adapter_column: Annotated[Text | None, IDENTITY] = None
    """The column that names the row's adapter, one of `model.lora`; null is the plain model."""
    id_column: Annotated[Text | None, IDENTITY] = None
    """The column that is copied to the output as `id`, with its type."""
    where: Annotated[Text | None, IDENTITY] = None
    """Run only rows for which this expression in DuckDB's SQL over the input columns is true."""
    sample: Annotated[float | None, Field(gt=0, le=1), IDENTITY] = None
    """Run about this share of the rows, chosen by a hash of their content. Their positions do not matter."""
    limit: Annotated[Positive | None, IDENTITY] = None
    """Run at most this many rows, the first ones. `--extend` can raise it."""
    exclude: Annotated[ExcludeSpec | None, IDENTITY] = None
    """Leave out rows that earlier jobs have done."""
    order: Annotated[Literal["input", "prefix", "longest", "auto"], LAYOUT] = "input"
    """The order in which rows run. It also decides which rows are in a part. `input`: as in the input. `prefix`: rows
    whose prompts begin alike run one after the other, so that vLLM's prefix cache is used. `longest`: the half of the
    rows with the larger `max_tokens` runs first. `auto`: chosen from a sample."""

    @model_validator(mode="before")
    @classmethod
    def _path_of_job(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("job"), str) and values.get("path") is None:
            return {**values, "path": values["job"]}
        return values

    @field_validator("path")
    @classmethod
    def _no_secrets(cls, path: str) -> str:
        # The spec is stored in the output folder, which other people may read.
        if "://" in path and PASSWORD.search(path):
            raise wrong("got a URL with a password in it, which would be recorded; leave `user:password@` out and give "
                        "credentials in the environment, as the file system's library takes them")  # fmt: skip
        if "://" in path and re.search(r"[?&](X-Amz-Signature|X-Goog-Signature|Signature|sig|access_token)=", path):
            raise wrong("got a signed URL, whose signature would be recorded; give the plain URL and credentials in "
                        "the environment, or fetch the file and give its path")  # fmt: skip
        return path

    @model_validator(mode="before")
    @classmethod
    def _with_image_settings(cls, data: Any) -> Any:
        # A column with images alone means `images: {}`, so that its fields, which a resume may change, are there.
        if not isinstance(data, dict) or data.get("images") is not None:
            return data
        messages = data.get("messages")
        has_images = isinstance(messages, list | tuple) and any(map(_has_images, messages))
        return {**data, "images": {}} if has_images or data.get("images_column") else data

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        forms = self.given(PROMPT_FORMS)
        if len(forms) > 1:
            raise wrong(f"got {forms[1]} beside {forms[0]}; give one of them", forms[1])
        if self.tools_column is not None and self.messages_column is None:
            raise wrong("got it without messages_column; must be given beside the column of the conversations that "
                        "have these tools", "tools_column")  # fmt: skip
        if self.is_chat:
            self._check_chat()
        self._check_tools()
        self._check_exclude()
        self._check_job()
        self._check_format()
        if self.has_images:
            self._check_images()
        return self

    def _check_images(self) -> None:
        if self.job is not None and is_bucket(self.job):
            # Replicas look in the other job for the folder of its images, and have no access to a bucket.
            raise wrong(f"got {self.job!r} in a job with images; must be a folder of this host: copy it here", "job")
        if self.text_column is not None:
            raise wrong("got it in a job with images, which a whole text cannot have: leave the images out, or score "
                        "choices or a continuation after a prompt with images", "text_column")  # fmt: skip
        if self.query_column is not None:
            raise wrong("got it in a job with images, which queries and documents cannot have: leave the images out. "
                        "To rank pictures, embed them and the query with task embed, or score yes and no after each",
                        "query_column")  # fmt: skip
        if self.on_overlong != "error":
            raise wrong(f"got {self.on_overlong} in a job with images; it would cut images off: leave it out",
                        "on_overlong")  # fmt: skip

    def _check_exclude(self) -> None:
        if self.exclude is not None and self.exclude.on == "id" and self.id_column is None and not self.is_batch_file:
            raise wrong("got id, but the job has no id_column: set it, or use prompt_hash", "exclude.on")

    def _check_job(self) -> None:
        if self.job is None:
            return
        if self.path != self.job:
            raise wrong(
                f"got {self.job!r} beside path {self.path!r}; must be given alone: leave one of them out", "job"
            )
        for field in self.given(("format", Csv.name, "split", "name", "revision")):
            raise wrong("got it beside job, whose output is read as it is; must be left out", field)

    def _check_format(self) -> None:
        if self.csv is not None and self.format not in (None, Csv.name):
            raise wrong(f"got it with format {self.format}; only {Csv.name} has a delimiter and the like: leave it out",
                        Csv.name)  # fmt: skip
        for field in self.given(("split", "name", "revision")):
            if self.format not in (None, HUGGING_FACE):
                raise wrong(f"got {getattr(self, field)!r} with format {self.format}; only a Hugging Face dataset "
                             f"(format {HUGGING_FACE}) has a {field}: leave it out", field)  # fmt: skip

    def _check_chat(self) -> None:
        asked = self.given(CHAT_FIELDS)[0]
        if self.apply_chat_template is not None:
            raise wrong(f"got false beside {asked}, which applies the chat template; give one of them",
                        "apply_chat_template")  # fmt: skip
        if self.token_ids_column is not None:
            raise wrong("got it beside token_ids_column, whose ids are taken as they are; give one of them", asked)
        if self.on_overlong != "error":
            raise wrong(f"got {self.on_overlong} with {asked}; it would cut the instructions or the assistant's header "
                        "off a conversation: cut a long column with {{ column | truncate_tokens(n) }}",
                        "on_overlong")  # fmt: skip
        if self.messages is not None and self.messages[0].role == "system" and self.system_prompt is not None:
            raise wrong("got it beside messages, which begin with a system message; give one of them", "system_prompt")
        self._check_turn()

    def _check_turn(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong((
                "got true with continue_final_message; the model continues the final message or begins a new turn: "
                "give one of them"
            ), "add_generation_prompt")  # fmt: skip

    def _check_tools(self) -> None:
        if self.is_batch_file:
            for name in self.given(("tools", "tool_choice")):
                raise wrong("got it with format openai, whose lines have their own; leave it out", name)
        elif self.tool_choice is not None and self.tools is None and self.messages_column is None:
            raise wrong(
                f"got {self.tool_choice!r} without tools; must be given beside tools or tools_column", "tool_choice"
            )
        self._check_tool_name()

    def _check_tool_name(self) -> None:
        is_name = self.tool_choice not in (None, "none", "auto", "required")
        if is_name and self.tools is not None and self.tools_column is None:
            names = [tool["function"]["name"] for tool in self.tools]
            if self.tool_choice not in names:
                allowed = f"none, auto, required or the name of a tool: {', '.join(names)}"
                raise wrong(f"got {self.tool_choice!r}; must be {allowed}", "tool_choice")

    @field_validator("tools")
    @classmethod
    def _openai_tools(cls, tools: tuple[dict[str, Any], ...] | None) -> tuple[dict[str, Any], ...] | None:
        for tool in tools or ():
            if not is_json(tool):
                raise wrong("must be made of text, finite numbers, true or false, null, lists and mappings")
            if (objection := objection_to(tool)) is not None:
                raise wrong(objection)
        return tools

    @field_validator("chat_template_kwargs")
    @classmethod
    def _plain_kwargs(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        if not is_json(kwargs):
            raise wrong("must be made of text, finite numbers, true or false, null, lists and mappings")
        for name in kwargs or {}:
            if name in KWARGS_ELSEWHERE:
                instead = f"use {KWARGS_ELSEWHERE[name]} instead" if KWARGS_ELSEWHERE[name] else "leave it out"
                raise wrong(f"it is no variable of a chat template; {instead}", name)
        return kwargs

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of these fields that are not null."""
        return [name for name in names if getattr(self, name) is not None]

    @property
    def is_batch_file(self) -> bool:
        """Whether each line is a request of OpenAI's batch API."""
        return self.format == OPENAI

    @property
    def has_own_conversations(self) -> bool:
        """Whether a row may have a conversation of its own: in a column, or as a line of a batch file."""
        return self.messages_column is not None or self.is_batch_file

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through a chat template."""
        return bool(self.given(CHAT_FIELDS))

    @property
    def image_columns(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a field and the column with images that it names."""
        named = [("input.images_column", column) for column in self.images_column or ()]
        for number, message in enumerate(self.messages or ()):
            for place, part in enumerate(message.parts):
                if part.column is not None:
                    named.append((f"input.messages[{number}].content[{place}].column", part.column))
        return tuple(named)

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return self.images is not None

    @property
    def has_places_in_text(self) -> bool:
        """Whether the text of a prompt says where its images stand."""
        return bool(self.images_column) and not self.is_chat

    @property
    def selects(self) -> bool:
        """Whether the spec chooses among the rows."""
        return bool(self.given(("where", "sample", "limit", "exclude")))
