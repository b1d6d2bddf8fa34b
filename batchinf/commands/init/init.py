"""`batchinf init`: fills the template of a purpose with the columns of the user's data, and writes it as a spec."""

import importlib.resources
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from batchinf.base.errors import ModelError, UserError
from batchinf.base.storage import reason
from batchinf.base.text import list_names
from batchinf.commands.init.columns import InputColumns, look_at
from batchinf.commands.init.images import ImageColumns
from batchinf.model.files import check_name
from batchinf.model.model import resolve
from batchinf.prompts.templates import column_call
from batchinf.spec.job import ModelSpec
from batchinf.spec.output import output_problem
from batchinf.tasks.purposes import PURPOSES, Purpose

_DEFAULT_LABELS = ("positive", "negative", "neutral")
_PLAIN = re.compile(r"(?:\.{0,2}/)?[A-Za-z_][\w/.-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # of YAML 1.1 too, for other readers
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")  # a column that a Jinja2 template can name
# Columns that the outputs have themselves. A kept column of such a name gets another one.
_TAKEN = re.compile(
    "id|row_index|sample_index|text|reasoning|answer|attempts|positions|perplexity|is_greedy|is_joined|logits|embedding|ranking|relevance_.*|prompt.*"
    "|num_.*|error_.*|best.*|bits_.*|logprob.*|.*_reason|.*_logprobs?|.*token_ids|.*ranks"
    "|image_.*|choice_.*|answer_.*|unrendered_.*|tool_calls|request|query_.*|embeddings",
    re.IGNORECASE,  # SQL takes `Text` and `text` for one column
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """The options of `batchinf init`."""

    path: str
    """The file to write."""
    purpose: str
    """One of PURPOSES."""
    data: str
    model: str
    labels: tuple[str, ...] = ()
    """Empty: the words of a column, or the default."""
    encoding: str | None = None
    """Of CSV files; None: UTF-8."""
    out: str | None = None
    """The output folder; None: named as the spec."""


def write_spec(request: InitRequest) -> list[str]:
    """Write a spec that fits the data and the model.

    Returns:
        Lines for the user about the spec, and the next command.

    Raises:
        BatchinfError: The data cannot be read or is for another purpose, an option is wrong, or the file is there.
    """
    _check(request)
    columns = look_at(request.data, request.encoding)
    if request.labels:
        columns = replace(columns, labelled=None, label_counts=dict.fromkeys(request.labels, 0))
    if not PURPOSES[request.purpose].takes_images:
        columns = replace(columns, images=ImageColumns())
    has_template = has_chat_template(request.model)
    starter = _Starter(request, columns, is_chat=has_template is not False)
    starter.check()
    try:
        with open(request.path, "x", encoding="utf-8") as file:
            file.write(starter.spec())
    except FileExistsError:
        raise UserError(f"{request.path} is there already; give another name, or delete it yourself") from None
    except OSError as error:
        raise UserError(f"cannot write {request.path}: {reason(error)}") from error
    lines = list(starter.lines())
    if has_template is None:
        lines.append(f"the model {request.model} is not here yet; the spec assumes that it has a chat template")
    return [*lines, f"next: batchinf validate {shlex.quote(request.path)}"]


def _check(request: InitRequest) -> None:
    """Raise UserError for an unknown purpose, labels that it cannot use, and a place that no output can have."""
    if request.purpose not in PURPOSES:
        raise UserError(f"--for: got {request.purpose!r}; must be one of {', '.join(PURPOSES)}")
    if request.labels and not PURPOSES[request.purpose].takes_labels:
        raise UserError(f"--labels: got --for {request.purpose}, which has no labels; write --for label or --for score")
    if len(set(request.labels)) < len(request.labels):
        twice = dict.fromkeys(label for label in request.labels if request.labels.count(label) > 1)
        raise UserError(f"--labels: got {list_names(map(repr, twice))} more than once; give each label once")
    if request.out is not None and (problem := output_problem(request.out)) is not None:
        raise UserError(f"--out: {problem}")


def has_chat_template(model: str) -> bool | None:
    """Whether the model has a chat template; None if the model is not here.

    Raises ModelError if the name is neither that of a folder nor an id of the hub.
    """
    if not model:
        raise ModelError("--model: got empty text; give a Hugging Face id or a folder")
    model = os.path.expanduser(model)  # no shell expands the ~ of `--model=~/models/small`
    check_name("--model", model)
    try:
        return resolve(ModelSpec(name=model)).has_chat_template
    except ModelError:
        return None


@dataclass(frozen=True, slots=True)
class _Starter:
    """What a spec is about, for its template and for the user."""

    request: InitRequest
    columns: InputColumns
    is_chat: bool

    @property
    def purpose(self) -> Purpose:
        return PURPOSES[self.request.purpose]

    @property
    def has_labels(self) -> bool:
        """Whether the model chooses a label for each row."""
        has_some = bool(self.columns.images.names or self.request.labels)
        return self.purpose.has_labels or (self.purpose.scores_texts and has_some)

    @property
    def labels(self) -> Sequence[str]:
        return tuple(self.columns.label_counts) or _DEFAULT_LABELS

    @property
    def takes_messages(self) -> bool:
        """Whether conversations are the prompts as they are."""
        if self.has_labels or self.columns.messages is None:
            return False
        return self.columns.has_only_messages or (self.is_chat and self.purpose.continues_chats)

    def check(self) -> None:
        """Raise UserError if the data or the model is for another purpose."""
        purpose = self.request.purpose
        columns = self.columns
        if columns.is_batch and not self.purpose.takes_batch_files:
            raise UserError(
                f"--for: got {purpose}, but {columns.path} is an OpenAI batch file, whose lines are requests to "
                "generate, to embed or to score documents; write --for generate, --for embed or --for rerank, or make "
                "a file with the texts in a column"
            )
        if columns.text is None and not columns.images.names:
            *others, last = (name for name, each in PURPOSES.items() if each.takes_images)
            allowed = f"{', '.join(others)} or {last}"
            raise UserError(f"--for: got {purpose}, but {columns.path} has images and no text; write --for {allowed}")
        if self.purpose.scores_texts and not self.has_labels and columns.has_only_messages:
            raise UserError(
                f"--for: got score, but {columns.path} has only conversations, in {columns.text!r}; give --labels, or "
                "a column with the text of each row"
            )
        if self.has_labels and columns.has_only_messages and columns.images.are_in_parts:
            raise UserError(
                f"--for: the conversations in {columns.text!r} have images, and a text of them has none: write --for "
                "generate, and give the labels as sampling.structured_outputs"
            )

    def spec(self) -> str:
        """The YAML text of the spec."""
        lower = [name.lower() for name in self.columns.kept]
        renamed = [
            name
            for place, name in enumerate(self.columns.kept)
            if _TAKEN.fullmatch(name) or name.lower() in lower[:place]
        ]
        return _template().render(
            what=self.purpose.what,
            spec=shlex.quote(self.request.path),
            purpose=self.request.purpose,
            model=self.request.model,
            columns=self.columns,
            other_models=[name for name in self.columns.models if name != self.request.model],
            images=self.columns.images,
            has_labels=self.has_labels,
            labels=self.labels,
            is_chat=self.is_chat,
            takes_messages=self.takes_messages,
            words="\n".join(self._words()),
            out=self.request.out or f"out/{os.path.splitext(os.path.basename(self.request.path))[0]}",
            kept={name: f"input_{name}" if name in renamed else name for name in self.columns.kept},
            renamed=renamed,
        )

    def lines(self) -> Iterator[str]:
        """What the spec reads, for the user."""
        columns = self.columns
        read = [f"images from the column {column!r}" for column in columns.images.names]
        if columns.is_batch:
            read = ["an OpenAI batch file"]
        elif self.purpose.names_own_columns:
            read = ["queries and documents from the columns that you name there"]
        elif self.takes_messages:
            read.insert(0, f"conversations from the column {columns.messages!r}")
        elif columns.text is not None:
            read.insert(0, f"text from the column {columns.text!r}")
        yield f"{self.request.path}: rows from {columns.path} ({columns.num_rows:,}), {', '.join(read)}"
        for setting in columns.settings:
            yield f"input.{setting}"
        if self.purpose.scores_texts and not self.has_labels:
            yield "each text is scored alone; the spec says how to score choices or a continuation after each"
        if self.has_labels:
            source = "" if columns.labelled is None else f", the words of the column {columns.labelled!r}"
            yield f"labels: {', '.join(self.labels)}{source}; change them in {self.request.path} if they are not yours"

    def _words(self) -> list[str]:
        """The lines of the prompt: a question for the label, the row's text, or both; none if a picture is all."""
        columns = self.columns
        has_images = bool(columns.images.names)
        pictures = "pictures" if columns.images.are_several else "picture"
        question = []
        if self.has_labels:
            what = pictures if has_images else "text"
            question = [f"Which label fits the {what}? Answer with one of: {', '.join(self.labels)}."]
        if columns.text is not None and not (has_images and columns.has_only_messages):
            text = _text_of_row(columns, columns.text)
            return [*question, "", f"Text: {text}"] if question else [text]
        return question or ([f"Describe the {pictures}."] if self.purpose.is_asked else [])


def _text_of_row(columns: InputColumns, column: str) -> str:
    """A template of the row's text."""
    if columns.has_only_messages and not columns.has_json_messages:  # a template has no function that reads JSON
        message = "{{ message.role }}: {{ message.content }}{{ '\\n' }}"
        return f"{{% for message in {column} %}}{message}{{% endfor %}}"
    return f"{{{{ {column if _NAME.fullmatch(column) else column_call(column)} }}}}"


def _template() -> jinja2.Template:
    """The template of all specs. Its marks are no YAML and no marks of a prompt's template."""
    environment = jinja2.Environment(
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"yaml": _yaml, "path": lambda text: _yaml(text.replace("$", "$$"))}
    text = importlib.resources.files(__package__).joinpath("job.yaml").read_text(encoding="utf-8")
    return environment.from_string(text)


def _yaml(value: Any) -> str:
    """A text, a number, a list or a mapping as YAML of one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_yaml(name)}: {_yaml(each)}' for name, each in value.items())}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_yaml, value))}]"
    text = str(value)
    if isinstance(value, int) or (_PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
