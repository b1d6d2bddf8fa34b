"""The specs that `batchinf init` writes: one short commented YAML file for each purpose."""

import itertools
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchinf.base.errors import UserError
from batchinf.prompts.templates import column_call
from batchinf.spec.images import ImageSettings

_PLAIN = re.compile(r"(?:\.{0,2}/)?[A-Za-z_][\w/.-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}  # of YAML 1.1 too, for other readers
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")  # a column that a Jinja2 template can name
# Columns that the outputs have themselves. A kept column of such a name gets another one.
_TAKEN = re.compile(
    "id|row_index|sample_index|text|reasoning|answer|attempts|positions|perplexity|is_greedy|is_joined|logits|embedding"
    "|ranking|relevance_.*|prompt.*|num_.*|error_.*|best.*|bits_.*|logprob.*|.*_reason|.*_logprobs?|.*token_ids|.*ranks"
    "|image_.*|choice_.*|answer_.*|unrendered_.*|tool_calls|request|query_.*|embeddings",
    re.IGNORECASE,  # SQL takes `Text` and `text` for one column
)

# Purposes of `init --labels`.
TAKE_LABELS = ("label", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What `init` has found in the input. Columns are None if there is none that fits."""

    path: str
    """As in the spec."""
    num_rows: int
    columns: tuple[str, ...]
    text: str | None
    """The column with the text or question of a row. None only if there are images."""
    id: str | None
    """One with a value of its own in each row."""
    repeated_id: str | None
    """Why a column like one of ids is not taken: `ticket repeats 'T-1019'`."""
    messages: str | None
    has_json_messages: bool
    """Whether the conversations are JSON text."""
    labels: tuple[str, ...]
    """Words to choose from."""
    labelled: str | None
    """The column that has them."""
    choices: str | None
    """Texts to choose from in each row."""
    answer: str | None
    """The right one of them, or its place."""
    continuation: str | None
    """What follows the text."""
    query: str | None
    """What documents are ranked for."""
    documents: str | None
    """Lists of them."""
    document: str | None
    """One for each query."""
    kept: tuple[str, ...]
    """The text, and short columns."""
    is_batch: bool = False
    """Whether the input is an OpenAI batch file."""
    images: tuple[str, ...] = ()
    """Columns with images."""
    has_given_labels: bool = False
    """Whether the user gave the labels."""
    encoding: str | None = None
    """Of CSV files; None for the default."""
    has_given_encoding: bool = False
    """Whether the user gave the encoding. Otherwise it is a guess."""
    unreadable: str | None = None
    """How many of the first rows cannot be read, and why; None if all can."""
    image_hosts: tuple[str, ...] = ()
    """Of their URLs."""
    image_folders: tuple[str, ...] = ()
    """Of their objects in buckets."""
    lost_image: str | None = None
    """What to do about an image that is not where its path leads."""
    notes: tuple[str, ...] = ()
    """About files of the input, for people."""
    most_images: int = 0
    """Of a row."""
    is_captioned: bool = False
    """Whether the input is a folder of pictures beside text files, of which the pictures are read."""
    has_image_parts: bool = False
    """Whether conversations or lines of a batch file have parts that are images."""

    @property
    def text_column(self) -> str:
        """The column with the text, of an input without images."""
        assert self.text is not None
        return self.text

    @property
    def has_several_images(self) -> bool:
        """Whether a row has several images."""
        return len(self.images) > 1 or self.most_images > 1

    @property
    def has_only_messages(self) -> bool:
        """Whether the text of a row is its conversation, as no column has text."""
        return self.messages is not None and self.text == self.messages


@dataclass(frozen=True, slots=True)
class StarterWanted:
    """The model, whether it has a chat template, and the output folder."""

    model: str
    is_chat: bool
    out: str


def write_spec(purpose: str, path: str, data: Data, wanted: StarterWanted) -> str:
    """The YAML text of a spec. purpose: one of PURPOSES. path: of the spec, for the commands in its comments.

    Raises UserError if the data is for another purpose.
    """
    if data.is_batch and purpose not in ("generate", "embed", "rerank"):
        raise UserError(
            f"--for: got {purpose}, but {data.path} is an OpenAI batch file, whose lines are requests to generate, to "
            "embed or to score documents; write --for generate, --for embed or --for rerank, or make a file with the "
            "texts in a column"
        )
    if purpose not in _OF_IMAGES:
        data = replace(data, images=(), has_image_parts=False)
        if data.text is None:
            allowed = f"{', '.join(_OF_IMAGES[:-1])} or {_OF_IMAGES[-1]}"
            raise UserError(f"--for: got {purpose}, but {data.path} has images and no text; write --for {allowed}")
    what, asked, section = PURPOSES[purpose](data, wanted)
    why_no_id = f"; {data.repeated_id}" if data.repeated_id else ""
    guess = "" if data.has_given_encoding else "a guess: "
    shown = ", ".join(map(_yaml, data.columns[:12])) + (", …" if len(data.columns) > 12 else "")
    return "\n".join(
        [
            f"# {what}",
            f"#   batchinf validate {shlex.quote(path)}    checks it, and shows prompts as the model gets them",
            f"#   batchinf run {shlex.quote(path)}         runs it; the same command resumes it",
            "# All fields: docs/spec.md, or `batchinf schema` for an editor.",
            f"model: {_path(wanted.model)}",
            *([] if purpose in ("label", "generate") else [f"task: {purpose}"]),
            "",
            "input:",
            f"  path: {_path(data.path)}",
            *(["  format: images    # the folder has text files, too"] if data.is_captioned else []),
            *(
                [f"  csv: {{encoding: {data.encoding}}}    # {guess}look at the text in validate"]
                if data.encoding
                else []
            ),
            f"  # {data.num_rows:,} rows with the columns {shown}",
            f"  id_column: {_yaml(data.id)}    {_ID}" if data.id else f"  # id_column: NAME    {_ID}{why_no_id}",
            *asked,
            *_image_settings(data),
            "  # limit: 100    try the first rows only; a larger limit and `run --extend` go on from there",
            "",
            *([*section, ""] if section else []),
            "output:",
            f"  path: {_path(wanted.out)}",
            *(_kept(data.kept) if data.kept else []),
            "",
        ]
    )


_OF_IMAGES = ("label", "generate", "score", "embed")  # purposes with images in prompts
_FEW_IMAGES = ImageSettings().max_per_row

_ID = "# the output calls it `id`, for merges and `head --row`"

# What the spec does, lines of the section `input`, and those of the section between `input` and `output`.
_Starter = tuple[str, Sequence[str], Sequence[str]]


def _label(data: Data, wanted: StarterWanted) -> _Starter:
    labels = ", ".join(map(_yaml, data.labels))
    sampling = (
        "sampling:",
        "  temperature: 0.0",
        "  max_tokens: 32",
        "  logprobs: 0    # only the logprobs of the label's own tokens",
        "  logprobs_mode: processed_logprobs    # exp(cumulative_logprob): probability of the label, as spelled",
        f"  structured_outputs: {{choice: [{labels}]}}    # the output is one of these, or an error row",
    )
    return "Labels each row: the model chooses one of a few words.", _asked(data, wanted, _question(data)), sampling


def _question(data: Data) -> str:
    return f"{_which_label(data)} Answer with one of: {', '.join(data.labels)}."


def _which_label(data: Data) -> str:
    what = "text" if not data.images else "pictures" if data.has_several_images else "picture"
    return f"Which label fits the {what}?"


def _generate(data: Data, wanted: StarterWanted) -> _Starter:
    sampling = (
        "sampling:",
        "  temperature: 0.0    # greedy; vLLM's other parameters go here too: top_p, n, seed, stop",
        "  max_tokens: 256",
        "  # logprobs: 5       store the logprobs of the 5 most likely tokens at each position",
    )
    if data.is_batch:
        asked = [
            "  format: openai    # a line has its prompt and parameters; `sampling` is for those that it leaves out"
        ]
        return "Runs the requests of an OpenAI batch file.", asked, sampling
    return "Generates a text for each row.", _asked(data, wanted, ""), sampling


def _score(data: Data, wanted: StarterWanted) -> _Starter:
    if data.images or data.has_given_labels:
        return _score_labels(data, wanted)
    is_chat = data.text in (data.messages, data.continuation)  # no other column has text
    context = _conversations(data) if is_chat else f"  context_column: {_yaml(data.text_column)}"
    if data.choices is not None:
        lines = [context, f"  choices_column: {_yaml(data.choices)}"]
        if data.answer is not None:
            lines.append(f"  answer_column: {_yaml(data.answer)}    # the right choice: its text, or its place from 0")
        section = ['score: {target_delimiter: " "}    # between the context and each choice']
        return "Scores the choices of each row by their logprobs, and finds the best.", lines, section
    if data.continuation is not None:
        lines = [context, f"  continuation_column: {_yaml(data.continuation)}"]
        return "Scores a continuation of each row's text by its logprobs.", lines, ()
    if data.has_only_messages:
        raise UserError(
            f"--for: got score, but {data.path} has only conversations, in {data.text!r}; give a column with the text "
            "to score after each, such as 'response', or with the text of each row"
        )
    lines = [f"  text_column: {_yaml(data.text_column)}    # all of it is scored; long texts in windows"]
    section = ["score: {add_bos_token: false}    # the BOS that a tokenizer puts before a text is not scored"]
    return "Scores each text: logprobs, perplexity and bits per byte.", lines, section


def scores_labels(data: Data) -> bool:
    """Whether `score` scores the labels of `data`, and not choices or continuations of the rows."""
    return data.has_given_labels or (bool(data.images) and data.choices is None)


def _score_labels(data: Data, wanted: StarterWanted) -> _Starter:
    has_labels = scores_labels(data)
    lines = _asked(data, wanted, _question(data) if has_labels else _which_label(data))
    answer = data.labelled
    if has_labels:
        lines.append(f"  choices: [{', '.join(map(_yaml, data.labels))}]")
    else:
        lines.append(f"  choices_column: {_yaml(data.choices or '')}")
        answer = data.answer
    if answer is not None:
        lines.append(f"  answer_column: {_yaml(answer)}    # the right choice: its text, or its place from 0")
    section = () if wanted.is_chat else ('score: {target_delimiter: " "}    # between the prompt and each label',)
    what = "picture" if data.images else "text"
    return f"Scores the labels of each {what} by their logprobs, and finds the best.", lines, section


def _logits(data: Data, wanted: StarterWanted) -> _Starter:
    logits = (
        "logits:",
        "  positions: last    # after the prompt's last token; or all, generated, {column: NAME}",
        "  dtype: float16",
        '  # tokens: [" yes", " no"]    store only these, not the whole vocabulary; each must be one token',
    )
    return "Stores the logits of the next token after each prompt.", _asked(data, wanted, ""), logits


def _embed(data: Data, wanted: StarterWanted) -> _Starter:
    pooling = (
        "pooling:",
        "  normalize: true    # vectors of length 1: a dot product is the cosine",
        "  dtype: float32     # float16 halves the output",
    )
    if data.is_batch:
        asked = ["  format: openai    # a line has its inputs, and may have its own dimensions and encoding_format"]
        return "Embeds the inputs of an OpenAI batch file.", asked, pooling
    if data.images:
        what = "row's pictures" if data.has_several_images else "picture"
        return f"Stores a vector for each {what}.", _asked(data, wanted, "", describes=False), pooling
    prompt = _conversations(data) if data.has_only_messages else f"  prompt_column: {_yaml(data.text_column)}"
    return "Stores a vector for each text.", [prompt], pooling


def _rerank(data: Data, wanted: StarterWanted) -> _Starter:
    pooling = (
        "# pooling:",
        "#   score_type: cross-encoder    # or bi-encoder; default: by the model's config",
        "#   top_n: 10    # only the best documents in `ranking`; the scores are those of all",
    )
    if data.is_batch:
        asked = ["  format: openai    # a line has its texts, and may have its own top_n"]
        return "Scores and ranks the documents of an OpenAI batch file.", asked, pooling
    query = f"  query_column: {_yaml(data.query or data.text_column)}"
    if data.documents is not None:
        documents = f"  documents_column: {_yaml(data.documents)}    # a list of texts"
        return "Scores and ranks the documents of each query.", [query, documents], pooling
    if data.document is not None:
        document = f"  document_column: {_yaml(data.document)}    # one text for each query"
        return "Scores how well a document fits its query.", [query, document], pooling[:2]
    raise UserError(
        f"--for: got rerank, but {data.path} has no column with a document or a list of documents for each query, such "
        "as 'documents'"
    )


PURPOSES: dict[str, Callable[[Data, StarterWanted], _Starter]] = {
    "label": _label,
    "generate": _generate,
    "score": _score,
    "logits": _logits,
    "embed": _embed,
    "rerank": _rerank,
}


def _asked(data: Data, wanted: StarterWanted, instruction: str, *, describes: bool = True) -> list[str]:
    """The prompt: the row's images and text, after an instruction if there is one.

    describes: ask for a description if a row has only images.
    """
    if not instruction and (data.has_only_messages or (data.messages is not None and wanted.is_chat)):
        columns = [f"  images_column: [{', '.join(map(_yaml, data.images))}]"] if data.images else []
        return [_conversations(data), *columns]
    if data.images:
        return _asked_of_images(data, wanted, instruction, describes=describes)
    if not (instruction or wanted.is_chat) or not data.text_column.isprintable():
        turn = ["  add_generation_prompt: true    # each prompt is a user's message in the model's chat template"]
        return [f"  prompt_column: {_yaml(data.text_column)}", *(turn if wanted.is_chat else _other_prompts(data))]
    text = _text_of(data)
    if not wanted.is_chat:
        lines = [instruction, "", f"Text: {text}", "", "Label:"]
        return ["  prompt_template: |-    # {{ }} is a column of the row", *(f"    {line}".rstrip() for line in lines)]
    lines = [instruction, "", f"Text: {text}"] if instruction else [text]
    return [
        "  messages:    # a conversation, for the model's chat template; {{ }} is a column of the row",
        "    - role: user",
        "      content: |-",
        *(f"        {line}".rstrip() for line in lines),
    ]


def _other_prompts(data: Data) -> list[str]:
    """A comment about conversations that a model without a chat template cannot read."""
    if data.messages is None:
        return []
    return [f"  # messages_column: {_yaml(data.messages)}    conversations, for a model with a chat template"]


def _text_of(data: Data) -> str:
    """A template of the row's text."""
    name = data.text_column
    if data.has_only_messages and data.has_image_parts:
        raise UserError(
            f"--for: the conversations in {name!r} have images, and a text of them has none: write --for generate, "
            "and give the labels as sampling.structured_outputs"
        )
    if data.has_only_messages:
        message = "{{ message.role }}: {{ message.content }}{{ '\\n' }}"
        loop = f"{{% for message in {name} %}}{message}{{% endfor %}}"
        # A template has no function that reads JSON.
        return loop if not data.has_json_messages else f"{{{{ {name} }}}}"
    return f"{{{{ {name if _NAME.fullmatch(name) else column_call(name)} }}}}"


def _asked_of_images(data: Data, wanted: StarterWanted, instruction: str, *, describes: bool) -> list[str]:
    if not wanted.is_chat:
        raise UserError(
            f"--model: {wanted.model} has no chat template, so the place of an image in its prompts is not known; give "
            "another model, or write the spec: input.images_column, and input.prompt_template with the model's "
            "placeholder, see docs/how-to/images.md"
        )
    lines = _words_with_images(data, instruction, describes=describes)
    text = ["        - type: text", "          text: |-", *(f"            {line}".rstrip() for line in lines)]
    return [
        "  messages:    # a conversation, for the model's chat template; {{ }} is a column of the row",
        "    - role: user",
        "      content:",
        *itertools.chain.from_iterable(_image_lines(data, column) for column in data.images),
        *(text if lines else []),
    ]


def _words_with_images(data: Data, instruction: str, *, describes: bool) -> list[str]:
    """The lines of the text beside a row's images: an instruction, the row's text, or a question; none of a vector."""
    if data.text is not None and not data.has_only_messages:
        return [instruction, "", f"Text: {_text_of(data)}"] if instruction else [_text_of(data)]
    if instruction:
        return [instruction]
    return [f"Describe the {'pictures' if data.has_several_images else 'picture'}."] if describes else []


def _image_lines(data: Data, column: str) -> list[str]:
    """The part of an image, after the name of its column if there are several such columns."""
    image = f"        - {{type: image, column: {_yaml(column)}}}"
    return [f"        - {{type: text, text: {_yaml(f'{column}:')}}}", image] if len(data.images) > 1 else [image]


def _image_settings(data: Data) -> list[str]:
    """The section `input.images`, if the job needs it."""
    if not data.images and not data.has_image_parts:
        return []
    fields = [f"hosts: [{', '.join(map(_yaml, data.image_hosts))}]"] if data.image_hosts else []
    if data.image_folders:
        fields.append(f"folders: [{', '.join(map(_path, data.image_folders))}]")
    if data.most_images > _FEW_IMAGES:
        fields.append(f"max_per_row: {data.most_images}")
    if data.images and not fields:
        return []
    return [f"  images: {{{', '.join(fields)}}}    # where images may come from: docs/how-to/images.md"]


def _conversations(data: Data) -> str:
    return f"  messages_column: {_yaml(data.messages or '')}    # conversations, for the model's chat template"


def _kept(names: Sequence[str]) -> list[str]:
    """The field of the columns to copy, and why some of the copies have other names."""
    lower = [name.lower() for name in names]
    twice = [name for place, name in enumerate(names) if name.lower() in lower[:place]]
    taken = [name for name in names if _TAKEN.fullmatch(name) or name in twice]
    what = "    # input columns to copy to the output"
    if not taken:
        return [f"  keep_columns: [{', '.join(map(_yaml, names))}]{what}"]
    new = (f"{_yaml(name)}: {_yaml(f'input_{name}' if name in taken else name)}" for name in names)
    return [
        f"  # input_…: other columns of the output have the name{'s' * (len(taken) > 1)} {', '.join(taken)}",
        f"  keep_columns: {{{', '.join(new)}}}{what}",
    ]


def _path(text: str) -> str:
    return _yaml(text.replace("$", "$$"))


def _yaml(text: str) -> str:
    """Text as YAML, also within a list in brackets."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
