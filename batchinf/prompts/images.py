"""The images of a prompt before they are loaded: in columns, in parts of conversations, and their places in the ids."""

import functools
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from batchinf.base.errors import RowError, RowFailed, SpecError
from batchinf.base.text import counted, name_type, shorten
from batchinf.prompts.chat import ChatTemplate, Message
from batchinf.prompts.encoder import Encoder
from batchinf.records import IntArray, Prompt, Span

WRONG_PLACES = "image_placeholder"  # the error type of a prompt that has not one place for each image
_TOO_MANY = "a text must not spell it beside the places of the images"
_NO_IMAGE = "leave out rows without an image by input.where, or write the prompt of such rows without it"
_TOO_FEW = (
    "write it where an image goes; or set input.add_generation_prompt: true, which makes the prompt a message of the "
    "user with its images first"
)
ImageSource = str | bytes | Mapping[str, Any]
_Read = TypeVar("_Read")


def sources_of(value: object, column: str) -> list[ImageSource]:
    """The images in the value of a column: one, a list of them, JSON text of a list, or none: null or an empty text.

    Raises RowFailed for another value.
    """
    if value is None or value == "":
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [str(value)]  # a path may begin with a bracket
    sources: list[ImageSource] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str | bytes | Mapping):
            got = f"got {name_type(item)} for an image in column '{column}'"
            allowed = "a path, a URL, the bytes of a file, a mapping with bytes or path, or a list of these"
            raise RowFailed("wrong_type", f"{got}; expected {allowed}")
        sources.append(item)
    return sources


def empty_columns(values: Mapping[str, object], columns: Iterable[str]) -> list[str]:
    """Those of these columns in which a row has no image."""
    return [column for column in columns if _is_empty(values.get(column), column)]


def _is_empty(value: object, column: str) -> bool:
    try:
        return not sources_of(value, column)
    except RowFailed:  # it has a value, though not an image
        return False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt with images as an engine has made it ready."""

    token_ids: list[int]
    """With all tokens of an image in place of its placeholder."""
    image_positions: IntArray
    """See `Prompt.image_positions`."""
    num_bytes: int
    """Of the tensors."""
    for_ids: Callable[[list[int]], Any]
    """Makes `Request.rendered` for ids that begin with `token_ids`."""


def images_of(values: Mapping[str, object], columns: Iterable[str]) -> list[ImageSource]:
    """The images that a row has in these columns, in their order. Raises RowFailed."""
    return [source for column in columns for source in sources_of(values.get(column), column)]


def place_images(
    messages: Sequence[Message], own: Sequence[ImageSource]
) -> tuple[list[Message], tuple[ImageSource, ...]]:
    """The conversation as chat templates take it, and its images in their order. Raises RowFailed.

    own: images of columns. They fill the parts of images without a source. If there is no such part, they come first in
    the first message of the user.
    """
    parts = _image_parts(messages)
    if not own and not parts:
        return list(messages), ()
    num_open = sum("source" not in part for part in parts)
    if own and not num_open:
        messages = _before_first_text(messages, own)
        if not messages:
            raise RowFailed(WRONG_PLACES, "the conversation has no message of the user for the images of the row")
    elif len(own) != num_open:
        have = f"{counted(num_open, 'part')} of type image without a source"
        raise RowFailed(WRONG_PLACES, f"got {counted(len(own), 'image')} for {have}; give one for each")
    left = iter(own)
    sources = tuple(part["source"] if "source" in part else next(left) for part in _image_parts(messages))
    return [_with_bare_images(message) for message in messages], sources


def _image_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image"]


def _before_first_text(messages: Sequence[Message], own: Sequence[ImageSource]) -> list[Message]:
    """The conversation with these images first in the first message of the user; empty without such a message."""
    place = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if place is None:
        return []
    content = messages[place]["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    images = [{"type": "image", "source": source} for source in own]
    return [*messages[:place], {**messages[place], "content": [*images, *parts]}, *messages[place + 1 :]]


def _with_bare_images(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


def _texts_of(messages: Sequence[Message]) -> Iterable[str]:
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")


def _with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with its texts changed."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [
            {**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content
        ]}  # fmt: skip
    return {**message, "content": change(content)} if isinstance(content, str) else message


def _renamed(token_id: int) -> str:
    return f"\uf8f2{token_id}\uf8f3"


class Placeholders:
    """The tokens by which a model's chat template marks the place of an image, and the check that each image has one.

    The engine puts an image into the first place that it finds. So a placeholder that a row's text spells would take
    the image, and the real place would stay empty. In a conversation such a text is encoded as text.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        """Raises SpecError if the template does not show images, or shows them by plain text."""
        mark = template.image_mark()
        if not mark:
            raise SpecError("input.images: the job has images, but the chat template does not show parts of type "
                            "image; give one that does as input.chat_template, or another model")  # fmt: skip
        added = set(tokenizer.get_added_vocab().values())
        ids = tokenizer(mark, add_special_tokens=False, verbose=False)["input_ids"]
        self._tokenizer = tokenizer
        self._in_mark = Counter(token_id for token_id in ids if token_id in added)
        self._spelled = {token_id: str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in self._in_mark}
        # No row can have these texts: they differ in each process.
        self._hidden = {spelled: f"\uf8f0{secrets.token_hex(8)}\uf8f1" for spelled in self._spelled.values()}
        if not self._in_mark:
            raise SpecError(f"input.images: the chat template shows an image as {shorten(repr(mark), 80)}, which is no "
                            "token of its own in the tokenizer; such models are not supported yet")  # fmt: skip

    def as_text(self, messages: Sequence[Message], render: Callable[[list[Message]], str]) -> list[int] | None:
        """The ids of a conversation in which texts spell a placeholder: of tokens that make this text.

        None if no text does so, or if the tokenizer has no such ids. render: applies the chat template.
        """
        if not any(spelled in text for text in _texts_of(messages) for spelled in self._hidden):
            return None
        if self._encoder is None:
            return None
        try:
            rendered = render([_with_texts(message, self._hide) for message in messages])
        except RowFailed:
            return None
        for token_id, spelled in self._spelled.items():
            rendered = rendered.replace(spelled, _renamed(token_id))
        for spelled, hidden in self._hidden.items():
            rendered = rendered.replace(hidden, spelled)
        ids = self._encoder.encode_one(rendered)
        return None if isinstance(ids, RowError) else ids

    def _hide(self, text: str) -> str:
        for spelled, hidden in self._hidden.items():
            text = text.replace(spelled, hidden)
        return text

    @functools.cached_property
    def _encoder(self) -> Encoder | None:
        """Encodes with other names for the placeholders; None if the tokenizer cannot be changed so."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        config = json.loads(backend.to_str())
        names = {spelled: _renamed(token_id) for token_id, spelled in self._spelled.items()}
        for added in config["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        vocabulary = config["model"].get("vocab")
        if isinstance(vocabulary, dict):
            config["model"]["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
        try:
            renamed = Tokenizer.from_str(json.dumps(config))
        except Exception:  # tokenizers raises nothing more exact
            return None
        ids = {token_id: added.content for token_id, added in renamed.get_added_tokens_decoder().items()}
        if ids != {added["id"]: added["content"] for added in config["added_tokens"]}:
            return None
        return Encoder(PreTrainedTokenizerFast(tokenizer_object=renamed), adds_special_tokens=False)

    @property
    def first_id(self) -> int:
        """The token with which the place of an image begins."""
        token_id: int = next(iter(self._in_mark))
        return token_id

    def check(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raise RowFailed if these ids do not have exactly one place for each image."""
        for token_id, number in self._in_mark.items():
            got = token_ids.count(token_id)
            if got == number * num_images:
                continue
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            has = f"the prompt has {counted(got, 'token')} '{token}' for {counted(num_images, 'image')}"
            hint = _NO_IMAGE if not num_images else _TOO_MANY if got > number * num_images else _TOO_FEW
            raise RowFailed(WRONG_PLACES, f"{has}; expected {number} for each image: {hint}")


def render_conversation(
    messages: Sequence[Message],
    own: Sequence[ImageSource],
    render: Callable[[list[Message]], str],
    placeholders: Placeholders | None,
) -> tuple[str, list[int] | None, tuple[ImageSource, ...]]:
    """The text of a conversation, its ids if it spells a placeholder, and its images. Raises RowFailed.

    own: see `place_images`. render: see `Placeholders.as_text`.
    """
    with_places, sources = place_images(messages, own)
    text = render(with_places)
    ids = placeholders.as_text(with_places, render) if sources and placeholders is not None else None
    return text, ids, sources


# -- prompts whose images are looked at --------------------------------------------------------------------------------


def read_images(sources: Sequence[ImageSource], max_per_row: int, read: Callable[[ImageSource], _Read]) -> list[_Read]:
    """What `read` makes of each image of a row. Raises RowFailed if there are too many, or with the image's number."""
    if len(sources) > max_per_row:
        allowed = f"input.images.max_per_row allows {max_per_row:,}"
        raise RowFailed("too_many_images", f"the row has {len(sources):,} images; {allowed}")
    made = []
    for number, source in enumerate(sources, start=1):
        try:
            made.append(read(source))
        except RowFailed as failed:
            error = failed.error
            raise RowFailed(error.error_type, f"image {number}: {error.error_message}") from failed
    return made


def shared_ids(prompt: Prompt) -> list[int]:
    """The ids with which all requests of a row begin, and which have all of its placeholders."""
    if prompt.scoring is None:
        return prompt.token_ids
    first = prompt.scoring.spans[0]
    return first.token_ids[: first.start]


def with_rendered(prompt: Prompt, num_replaced: int, rendered: RenderedPrompt) -> Prompt:
    """The prompt with the rendered ids in place of its first `num_replaced` ones."""

    def longer(token_ids: list[int]) -> list[int]:
        return [*rendered.token_ids, *token_ids[num_replaced:]]

    scoring = prompt.scoring
    if scoring is not None:
        shift = len(rendered.token_ids) - num_replaced
        spans = (Span(longer(span.token_ids), span.start + shift, span.num_bytes) for span in scoring.spans)
        scoring = replace(scoring, spans=tuple(spans))
    return replace(
        prompt,
        token_ids=longer(prompt.token_ids),
        scoring=scoring,
        image_positions=rendered.image_positions,
    )
