"""The images of a prompt before they are loaded: in columns, in parts of conversations, and their places in the ids."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import counted, name_type, shorten
from batchinf.prompts.chat import ChatTemplate, Message
from batchinf.spec.input import InputSpec

WRONG_PLACES = "image_placeholder"  # the error type of a prompt that has not one place for each image
# For commands that make prompts without an engine.
NO_IMAGE_TOKENS = (
    "warning: images are not loaded here: the lengths have one placeholder in place of the tokens of each image, and "
    "images that cannot be used are found only by `run`"
)
_TOO_MANY = "a text must not spell it beside the places of the images"
_TOO_FEW = (
    "write it where an image goes; or set input.add_generation_prompt: true, which makes the prompt a message of the "
    "user with its images first"
)
ImageSource = str | bytes | Mapping[str, Any]


def sources_of(value: object, column: str) -> list[ImageSource] | RowError:
    """The images in the value of a column: one, a list of them, JSON text of a list, or none: null or an empty text."""
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
            return RowError("wrong_type", f"{got}; expected {allowed}")
        sources.append(item)
    return sources


@dataclass(frozen=True, slots=True)
class TextWithImages:
    """A prompt that has images: the text, or the token ids, with a placeholder for each."""

    text: str | list[int]
    sources: tuple[ImageSource, ...]


class ImageColumns:
    """The images that rows have in columns, and their places in the row's conversation."""

    def __init__(self, where: InputSpec) -> None:
        self._columns = where.images_column or ()
        # By the place of a message in `input.messages`, the column of each of its parts; None: a text.
        self._of_parts = [[part.column for part in message.parts] for message in where.messages or ()]

    def read(self, values: Mapping[str, object]) -> list[ImageSource] | RowError:
        """The images in the columns of `input.images_column`, in their order."""
        return _joined(values, self._columns)

    def parts_of(self, number: int, texts: Iterable[str], values: Mapping[str, object]) -> list[Any] | RowError:
        """The content of a message of the spec: its texts, and its images with their sources."""
        left = iter(texts)
        parts: list[dict[str, Any]] = []
        for column in self._of_parts[number]:
            if column is None:
                parts.append({"type": "text", "text": next(left)})
                continue
            sources = _joined(values, [column])
            if isinstance(sources, RowError):
                return sources
            parts += [{"type": "image", "source": source} for source in sources]
        return parts


def _joined(values: Mapping[str, object], columns: Iterable[str]) -> list[ImageSource] | RowError:
    sources: list[ImageSource] = []
    for column in columns:
        of_column = sources_of(values.get(column), column)
        if isinstance(of_column, RowError):
            return of_column
        sources += of_column
    return sources


def place_images(
    messages: Sequence[Message], own: Sequence[ImageSource]
) -> tuple[list[Message], tuple[ImageSource, ...]] | RowError:
    """The conversation as chat templates take it, and its images in their order.

    own: images of columns. They fill the parts of images without a source. If there is no such part, they come first in
    the first message of the user.
    """
    num_open = sum("source" not in part for part in _image_parts(messages))
    if own and not num_open:
        messages = _before_first_text(messages, own)
        if not messages:
            return RowError(WRONG_PLACES, "the conversation has no message of the user for the images of the row")
    elif len(own) != num_open:
        have = f"{counted(num_open, 'part')} of type image without a source"
        return RowError(WRONG_PLACES, f"got {counted(len(own), 'image')} for {have}; give one for each")
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


class Placeholders:
    """The tokens by which a model's chat template marks the place of an image, and the check that each image has one.

    The engine puts an image into the first place that it finds. So a placeholder that a row's text spells would take
    the image, and the real place would stay empty.
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
        if not self._in_mark:
            raise SpecError(f"input.images: the chat template shows an image as {shorten(repr(mark), 80)}, which is no "
                            "token of its own in the tokenizer; such models are not supported yet")  # fmt: skip

    def objection(self, token_ids: Sequence[int], num_images: int) -> RowError | None:
        """Why these ids do not have exactly one place for each image."""
        for token_id, number in self._in_mark.items():
            got = token_ids.count(token_id)
            if got == number * num_images:
                continue
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            has = f"the prompt has {counted(got, 'token')} '{token}' for {counted(num_images, 'image')}"
            hint = _TOO_MANY if got > number * num_images else _TOO_FEW
            return RowError(WRONG_PLACES, f"{has}; expected {number} for each image: {hint}")
        return None
