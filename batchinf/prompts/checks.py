"""Checks of prompts before a job runs: chat templates, truncation, order, and a second BOS. `job.open` uses it."""

import itertools
import json
import pathlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import jinja2
import numpy as np

from batchinf.base.errors import RowFailed, SpecError
from batchinf.base.text import clip, counted, describe_error, list_names
from batchinf.model.files import PROCESSOR_FILES
from batchinf.model.model import Model
from batchinf.prompts.chat import GIVEN, Message, own_templates, read_messages, variables
from batchinf.prompts.encoder import Encoder, check_tokenizer, load_tokenizer
from batchinf.prompts.images import empty_columns
from batchinf.prompts.openai.lines import body_of
from batchinf.prompts.renderer import Renderer
from batchinf.source.rows import Row, Source
from batchinf.spec.input import CHAT_FIELDS, InputSpec
from batchinf.spec.job import JobSpec

# Rows to search for a second BOS. Usually one template writes it into all of them.
_MOST_NOTES = 20  # of remarks about files
_LOOKED_AT = 256
_LOOKED_AT_IDS = 10_000
# A look at the first rows delays the first request. Where rows are large, it ends after this time.
_LOOK_S = 0.2
_FIRST_READ = 32
_ROLES = ("system", "developer", "user", "assistant", "tool")  # those of OpenAI's format


def check_prompts(spec: JobSpec, model: Model) -> None:
    """Raise SpecError for a missing or broken chat template, and for truncation that leaves no room for a prompt.

    spec: resolved. Loads the tokenizer only for a job with images.
    """
    if spec.input.has_images:
        _check_images(spec, model)
    if spec.input.is_chat:
        _check_chat(spec.input, model)
    most = spec.sampling.max_tokens
    length = spec.length_limit(model.max_model_len)
    if spec.input.on_overlong != "error" and length is not None and (most or 1) >= length:
        raise SpecError(f"input.on_overlong: max_tokens {most} leaves no room for a prompt in max_model_len={length}; "
                        "lower sampling.max_tokens")  # fmt: skip


def _check_images(spec: JobSpec, model: Model) -> None:
    """Raise SpecError if the model's folder has nothing that is about images, or its chat template shows none."""
    folder = pathlib.Path(model.folder)
    if "vision_config" in model.config or any((folder / name).is_file() for name in PROCESSOR_FILES):
        if spec.input.is_chat:
            _check_chat(spec.input, model)
            tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
            Renderer(spec, tokenizer).placeholders(tokenizer)
        return
    field = next((field for field, _ in spec.input.image_columns), "input.images")
    raise SpecError(f"{field}: the model '{model.name}' takes no images: its config has no vision_config; give one "
                    "that does, or leave it out")  # fmt: skip


def _check_chat(where: InputSpec, model: Model) -> None:
    names = _template_variables(where, model)
    if where.chat_template is not None and "messages" not in names:
        words = "it has nothing of `messages` in it, so that all prompts would be the same; is it a file's path? "
        raise SpecError(f"input.chat_template: {words}Write input.chat_template: {{file: path}}")
    if where.tools is not None and "tools" not in names:
        words = "the chat template has no variable `tools`, so the model would not see them; give one that has it"
        raise SpecError(f"input.tools: {words} as input.chat_template")
    for name in where.chat_template_kwargs or {}:
        if name not in names:
            free = sorted(names - GIVEN - {"bos_token", "eos_token", "pad_token", "unk_token"})
            words = f"the chat template has no variable '{name}'; it has: {list_names(free) or 'none'}"
            raise SpecError(f"input.chat_template_kwargs: {words}")


def _template_variables(where: InputSpec, model: Model) -> frozenset[str]:
    """The variables of the spec's chat template, else of the model's.

    Raises SpecError if no template works, ModelError if the model has no tokenizer.
    """
    templates = own_templates(pathlib.Path(model.tokenizer))
    template = where.chat_template or "default"
    if where.chat_template is None and template not in templates:
        check_tokenizer(model.tokenizer)  # without one, the template is not all that is missing
        field = next(field for field in CHAT_FIELDS if getattr(where, field) is not None)
        others = f"; it has others, whose names input.chat_template takes: {list_names(templates)}" if templates else ""
        raise SpecError(
            f"input.{field}: it needs a chat template, and the model '{model.name}' has none{others}; give one as "
            "input.chat_template: {file: template.jinja}",
        )
    try:
        return variables(templates.get(template, template))
    except jinja2.TemplateSyntaxError as error:
        whose = "" if where.chat_template is not None else f"the chat template of '{model.name}' is broken: "
        raise SpecError(f"input.chat_template: {whose}line {error.lineno}: {describe_error(error)}") from error


def check_order(spec: JobSpec) -> None:
    """Raise SpecError if `input.order` cannot help: without a prefix cache, or if all rows have the same max_tokens."""
    order = spec.input.order
    if order == "prefix" and spec.engine.get("enable_prefix_caching") is False:
        raise SpecError(
            "input.order: got prefix, which is for vLLM's prefix cache, and engine.enable_prefix_caching is false: "
            "leave one of them out"
        )
    if order == "longest" and not spec.rows_may_set("max_tokens"):
        raise SpecError(
            "input.order: got longest, but all rows have the same max_tokens; name the column of each row's own, as in "
            "sampling.max_tokens: {column: budget}, or leave it out"
        )


def prompt_warnings(
    spec: JobSpec,
    model: Model,
    source: Source,
    *,
    reads_prompt_logits: bool,
    may_lack_template: bool = False,
    is_embedded: bool = False,
) -> Iterator[str]:
    """A line for each setting that works but is probably a mistake. Call it through `Task.prompt_warnings`.

    reads_prompt_logits: see `Task`. may_lack_template: do not warn of texts without the chat template or with a second
    BOS. is_embedded: do not warn of texts without the chat template: models of vectors take plain texts, and many have
    the template of the model that they were made from.
    """
    where = spec.input
    is_text = not (may_lack_template or where.is_chat or where.has_own_conversations) and where.token_ids_column is None
    if is_text and model.has_chat_template and not is_embedded and where.apply_chat_template is None:
        form = "prompt_template" if where.prompt_template is not None else "prompt_column"
        yield (
            f"warning: the model has a chat template, which input.{form} alone does not apply; "
            "input.add_generation_prompt: true makes each prompt a user's message, and input.apply_chat_template: "
            "false says that plain text is meant"
        )
    if where.order == "prefix" and reads_prompt_logits:
        yield (
            "warning: input.order: prefix saves nothing here, because vLLM does not use its prefix cache for prompts "
            "whose logprobs are asked for; leave it out"
        )
    if where.is_batch_file and where.exclude is not None and where.exclude.on == "prompt_hash":
        yield (
            "warning: input.exclude.on: prompt_hash compares the tokens of a line's prompts alone: lines with the same "
            "tokens are left out, even if they ask for something else, such as other sampling, dimensions or top_n; "
            "id compares custom_id"
        )
    yield from _conversation_warnings(where)
    yield from _unread_warnings(spec, model, source)
    if is_text and (warning := _second_bos(spec, model, source)) is not None:
        yield warning


def _conversation_warnings(where: InputSpec) -> Iterator[str]:
    says_how = where.continue_final_message is not None or where.add_generation_prompt is not None
    if where.messages is not None and where.messages[-1].role == "assistant" and not says_how:
        yield (
            "warning: the last of input.messages is the assistant's, and the model begins a new turn after it; "
            "input.continue_final_message: true lets the model continue that message"
        )
    if where.system_prompt is not None and any(mark in where.system_prompt for mark in ("{{", "{%")):
        yield (
            "warning: input.system_prompt is plain text, in which {{ … }} stays as it is; "
            "write a message of the role system under input.messages for a template"
        )


def _unread_warnings(spec: JobSpec, model: Model, source: Source) -> Iterator[str]:
    """What the first rows give to a chat template that never reads it."""
    where = spec.input
    if not where.has_own_conversations:
        return
    template = own_templates(pathlib.Path(model.tokenizer)).get(where.chat_template or "default", where.chat_template)
    if template is None:
        return
    try:
        names = variables(template) | GIVEN
    except jinja2.TemplateSyntaxError:
        return
    column = where.messages_column
    rows = _first_rows(source, _first_positions(spec, source), ["body" if column is None else column])
    conversations = {row.row_index: _conversation_of(row, column) for row in rows}
    for words, first in _unread(conversations, template, names).items():
        yield (
            f"warning: some of the first {len(conversations):,} rows (row {first} first) have {words}, so the model "
            "does not see them; give another template as input.chat_template, or leave them out"
        )
    if column is not None:
        messages = {index: found for index, (found, _) in conversations.items() if isinstance(found, list)}
        yield from _last_turn_warning(where, messages)
        yield from _role_warning(spec, model, source, conversations=messages, template=template)


def _last_turn_warning(where: InputSpec, conversations: Mapping[int, list[Message]]) -> Iterator[str]:
    """A warning if conversations of rows end with the assistant's message, and the model would begin another turn."""
    if where.continue_final_message is not None or where.add_generation_prompt is not None:
        return
    rows = [index for index, messages in conversations.items() if messages[-1]["role"] == "assistant"]
    if rows:
        yield (
            f"warning: {len(rows):,} of the first {len(conversations):,} conversations (row {rows[0]} first) "
            f"{'end' if len(rows) > 1 else 'ends'} with a message of the assistant, and the model begins a new turn "
            "after it; leave a reference answer out of the messages; input.continue_final_message: true lets the model "
            "continue that message, and input.add_generation_prompt says whether a new turn is meant"
        )


def _role_warning(
    spec: JobSpec, model: Model, source: Source, *, conversations: Mapping[int, list[Message]], template: str
) -> Iterator[str]:
    """A warning if rows have roles that the chat template does not name, and it makes prompts of them all the same."""
    roles = {
        index: [role for role in dict.fromkeys(message["role"] for message in messages) if role not in _ROLES
                and f"'{role}'" not in template and f'"{role}"' not in template]
        for index, messages in conversations.items()
    }  # fmt: skip
    rows = [index for index, unusual in roles.items() if unusual]
    if not rows:
        return
    # Loading a tokenizer takes seconds, so it is loaded only if the rows give a reason.
    renderer = Renderer(spec, load_tokenizer(model.tokenizer, spec.model.trust_remote_code))
    [first] = source.read_rows(np.asarray(rows[:1], np.int64), renderer.columns)
    try:
        renderer.render(first)
    except RowFailed:
        return
    names = list_names(dict.fromkeys(role for unusual in roles.values() for role in unusual))
    yield (
        f"warning: {len(rows):,} of the first {len(conversations):,} conversations (row {rows[0]} first) "
        f"{'have' if len(rows) > 1 else 'has'} roles that the chat template does not name: {names}; it writes them "
        f"as they are, or leaves their messages out; usual roles are {', '.join(_ROLES)}"
    )


def _unread(
    conversations: Mapping[int, tuple[object, Iterable[str]]], template: str, names: Collection[str]
) -> dict[str, int]:
    """What a template with these variables never reads of conversations, in words, with the first row that has it.

    conversations: of rows, each with the names of its own variables.
    """
    # A template that prints whole messages shows their calls, too.
    shows_calls = "tool_calls" in template or "tojson" in template
    unread: dict[str, int] = {}
    for row_index, (messages, options) in conversations.items():
        if not shows_calls and isinstance(messages, list) and any("tool_calls" in message for message in messages):
            unread.setdefault("tool_calls of messages, which the chat template does not show", row_index)
        for name in options:
            if name not in names:
                unread.setdefault(f"chat_template_kwargs.{name}, which the chat template never reads", row_index)
    return unread


def _conversation_of(row: Row, column: str | None) -> tuple[object, Iterable[str]]:
    """The messages of a row, and the names of its own template variables. column: None for a line of a batch file."""
    try:
        body = {"messages": row.values.get(column)} if column is not None else body_of(row.values)
    except (ValueError, RecursionError):
        return None, ()
    if not isinstance(body, dict) or body.get("messages") is None:
        return None, ()
    options = body.get("chat_template_kwargs")
    try:
        messages = read_messages(body["messages"], "messages", takes_images=True)
    except RowFailed:
        return None, ()
    return messages, options if isinstance(options, dict) else ()


class EmptyValues:
    """Counts rows in which a column of a template has no text. Such a row runs: only a null is an error.

    Not of a `prompt_column`, because an empty prompt is an error row.
    """

    def __init__(self, spec: JobSpec) -> None:
        renderer = Renderer(spec)
        self._printed = renderer.printed
        self._image_columns = renderer.image_columns
        self._needs_images = renderer.needs_images
        self._without_images: tuple[list[int], list[int]] = ([], [])  # rows without any, and without some
        self.columns = tuple(dict.fromkeys((*self._printed, *self._image_columns)))
        self._num_rows = 0
        self._empty_rows = {name: list[int]() for name in self._printed}

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._num_rows += 1
            for name, empty_rows in self._empty_rows.items():
                value = row.values.get(name)
                if isinstance(value, str) and not value.strip():
                    empty_rows.append(row.row_index)
            if row.error is None and (empty := empty_columns(row.values, self._image_columns)):
                self._without_images[len(empty) < len(self._image_columns)].append(row.row_index)

    def warnings(self) -> Iterator[str]:
        for name, rows in self._empty_rows.items():
            if rows:
                has, they = ("has", "it runs") if len(rows) == 1 else ("have", "they run")
                column = name.replace('"', '""')
                yield (
                    f"warning: {len(rows):,} of {self._num_rows:,} sampled rows {has} no text in '{name}' (row "
                    f"{rows[0]} first), and {they} all the same; input.where: trim(\"{column}\") <> '' leaves such "
                    "rows out"
                )
        names = " or ".join(f"'{name}'" for name in self._image_columns)
        run = "such rows run all the same; input.where can leave them out"
        fail = "such rows are error rows, unless input.images.on_missing is run"
        remedies = (fail if self._needs_images else run, run)
        places = (f"in {names}", f"in one of the columns {names}")
        for rows, place, remedy in zip(self._without_images, places, remedies, strict=True):
            if rows:
                yield (
                    f"warning: {counted(len(rows), 'row')} of {self._num_rows:,} sampled without a picture {place} "
                    f"(row {rows[0]} first): {remedy}"
                )


def first_row_warnings(spec: JobSpec, source: Source, positions: Sequence[int]) -> Iterator[str]:
    """Warnings of empty values and repeated ids in the first of these rows."""
    empty = EmptyValues(spec)
    if empty.columns:
        empty.add(_first_rows(source, positions[:_LOOKED_AT], empty.columns))
    yield from empty.warnings()
    yield from repeated_id_warning(spec, source, positions)


def input_notes(source: Source) -> Iterator[str]:
    """Lines about files that decide by their own beginning how they are read, about the split that is read of several,
    and about files without rows."""
    for remark, names in itertools.islice(source.remarks.items(), _MOST_NOTES):
        yield f"note: {list_names(names)}: {remark}"
    if (num_left := len(source.remarks) - _MOST_NOTES) > 0:
        yield f"note: {counted(num_left, 'more remark')} about single files; `validate` of a file shows its own"
    if empty := source.empty_files:
        yield f"note: {counted(len(empty), 'input file')} without rows: {list_names(empty)}"


def repeated_id_warning(spec: JobSpec, source: Source, positions: Sequence[int]) -> Iterator[str]:
    """A warning if two of the first 10,000 of these rows have the same id, or of as many as can be read in 0.2 s."""
    name = spec.input.id_column
    if name is None:
        return
    rows_of: dict[str, list[int]] = {}
    num_rows = 0
    for row in _first_rows(source, positions[:_LOOKED_AT_IDS], [name]):
        num_rows += 1
        if (value := row.values.get(name)) is not None:
            rows_of.setdefault(str(value), []).append(row.row_index)
    repeated = {value: rows for value, rows in rows_of.items() if len(rows) > 1}
    for value, rows in repeated.items():
        first, second = sorted(rows[:2])
        num_repeated = sum(map(len, repeated.values()))
        yield (
            f"warning: input.id_column: {num_repeated:,} of {counted(num_rows, 'row')} that were looked at share their "
            f"'{name}' with another one, such as rows {first:,} and {second:,} with {clip(value)}; a merge by id "
            "multiplies such rows, a merge by row_index does not"
        )
        return


def _first_positions(spec: JobSpec, source: Source) -> range:
    """Of the first rows: none if the spec chooses rows, because these may be other ones."""
    where = spec.input
    chooses = where.where is not None or where.exclude is not None or where.sample is not None
    return range(0 if chooses else min(source.num_rows, _LOOKED_AT, where.limit or _LOOKED_AT))


def _first_rows(source: Source, positions: Sequence[int], columns: Sequence[str]) -> Iterator[Row]:
    """The rows at these positions, from the first on, or as many as can be read in 0.2 s."""
    began = time.monotonic()
    start = 0
    num_rows = _FIRST_READ
    while start < len(positions):
        some = np.asarray(positions[start : start + num_rows], np.int64)
        yield from source.read_rows(np.sort(some), columns)
        # The next read takes twice as long. Many small ones would decode a row group of Parquet again and again.
        if 3 * (time.monotonic() - began) >= _LOOK_S:
            return
        start += num_rows
        num_rows *= 2


def _second_bos(spec: JobSpec, model: Model, source: Source) -> str | None:
    bos = _bos(pathlib.Path(model.tokenizer))
    renderer = Renderer(spec)
    if bos is None:
        return None
    looked_at = _first_rows(source, range(min(source.num_rows, _LOOKED_AT)), renderer.columns)
    texts = [_text_of(renderer, row) for row in looked_at]
    doubled = [number for number, text in enumerate(texts) if text is not None and text.startswith(bos)]
    if not doubled:
        return None
    # Loading a tokenizer takes seconds, so it is loaded only if the texts give a reason.
    encoder = Encoder(load_tokenizer(model.tokenizer, spec.model.trust_remote_code), adds_special_tokens=True)
    ids = encoder.encode_one(bos)
    if not isinstance(ids, list) or len(ids) < 2 or ids[0] != ids[1]:
        return None
    return (
        f"warning: of the first {len(texts):,} prompts {len(doubled):,} (row {doubled[0]} first) begin with {bos}, "
        f"and the tokenizer puts another {bos} before it; leave it out of the text"
    )


def _text_of(renderer: Renderer, row: Row) -> str | None:
    """The text of a row's prompt; None for an error row."""
    try:
        return renderer.render(row)
    except RowFailed:
        return None


def _bos(folder: pathlib.Path) -> str | None:
    """The BOS token in the tokenizer's files."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads((folder / name).read_bytes()).get("bos_token")
        except (OSError, ValueError, AttributeError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None
