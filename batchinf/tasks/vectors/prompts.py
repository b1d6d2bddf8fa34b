"""The prompts of task `embed` over lines of a batch file: each line has one input or several."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import RowError
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import side_of
from batchinf.prompts.openai.fields import objection
from batchinf.prompts.openai.lines import (
    EMBEDDINGS_URL,
    BodyReader,
    are_ids,
    show,
    take_flags,
    take_template_kwargs,
    take_truncation,
    unsupported,
)
from batchinf.prompts.openai.requests import RowRequest
from batchinf.records import Prompt
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.section import pooling_of

_ENCODINGS = ("float", "base64")
_FLAGS = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
_INPUTS = "one text, the token ids of one, a conversation, or a list of one of these"


class EmbeddingReader(BodyReader[RowRequest]):
    """Lines with `/v1/embeddings` → requests."""

    urls = (EMBEDDINGS_URL,)
    takes_images = False

    def __init__(self, spec: JobSpec) -> None:
        """See `BodyReader`."""
        super().__init__(spec)
        self._pooling = pooling_of(spec)
        self._adds_generation_prompt = spec.input.add_generation_prompt

    def read(self, values: Mapping[str, object]) -> RowRequest:
        url, body = self.open(values)
        flags = take_flags(body, _FLAGS)
        adds = flags.pop("add_special_tokens", None)
        encoding = body.pop("encoding_format", "float")
        if encoding not in _ENCODINGS:
            raise unsupported(f"body.encoding_format: got {show(encoding)}; must be {' or '.join(_ENCODINGS)}")
        dimensions = self._dimensions(body.pop("dimensions", None))
        truncation = take_truncation(body)
        inputs = self._inputs(body, flags)
        self._check_others(body)
        common: dict[str, Any] = {
            "form": json.dumps({"url": url, "encoding_format": encoding}),
            "dimensions": dimensions,
            "adds_special_tokens": adds,
            "truncation": truncation,
        }
        return RowRequest(**common, parts=tuple(RowRequest(**common, **item) for item in inputs))

    def _dimensions(self, number: object) -> int | None:
        """What a request asks for beside the job's; the engine knows whether the model was trained for it."""
        width = self._pooling.width
        if number is None or number == self._pooling.vector_width:
            return None
        if type(number) is not int or number < 1 or (width is not None and number > width):
            most = "" if width is None else f", at most {width}"
            raise unsupported(f"body.dimensions: got {show(number)}; must be a whole number, at least 1{most}")
        return number

    def _inputs(self, body: dict[str, Any], flags: Mapping[str, bool]) -> list[dict[str, Any]]:
        """One or several, in the order of the answers, each as fields of a request."""
        name = "messages" if "messages" in body else "input"
        value = body.pop(name, None)
        if "input" in body:
            raise unsupported("body.input: given beside body.messages; give one of them")
        items = _some_items(name, value)
        is_text = isinstance(items[0], str)
        if not is_text and not are_ids(items[0]):
            chat = self._chat(body, flags)
            return [{"messages": item, "chat": chat} for item in items]
        of_chats = {**flags, "chat_template_kwargs": body.pop("chat_template_kwargs", None)}
        if others := list(filter(of_chats.get, of_chats)):
            raise unsupported(f"body.{others[0]}: got it without a conversation; leave it out")
        return [{"text" if is_text else "token_ids": item} for item in items]

    def _chat(self, body: dict[str, Any], flags: Mapping[str, bool]) -> dict[str, Any]:
        """The arguments of the chat template. As with vLLM's server, an assistant's turn is not begun by default."""
        kwargs = take_template_kwargs(body)
        if flags.get("add_generation_prompt") and flags.get("continue_final_message"):
            raise unsupported("body.add_generation_prompt: got true with continue_final_message; give one of them")
        default = {"add_generation_prompt": bool(self._adds_generation_prompt)}
        return {**default, **flags, "chat_template_kwargs": kwargs}

    def _check_others(self, body: Mapping[str, Any]) -> None:
        """Raise RowFailed for a field that would change the output."""
        for name, value in body.items():
            if name == "use_activation":
                of_job = self._pooling.normalize
                if value is not of_job:
                    raise unsupported(f"body.{name}: got {show(value)}, but all rows have pooling.normalize {of_job}")
            elif (why := objection(EMBEDDINGS_URL, name, value)) is not None:
                raise unsupported(f"body.{name}: {why}")


def _some_items(name: str, value: object) -> list[Any]:
    """The inputs of the field `input` or `messages`, all of one kind. Raises RowFailed."""
    items = _items(value)
    if items is None or (name == "messages" and not _is_conversation(items[0])):
        got = "an empty list" if value == [] else show(value)
        words = "a conversation, or a list of several" if name == "messages" else _INPUTS
        raise unsupported(f"body.{name}: got {got}; must be {words}")
    return items


def _items(value: object) -> list[Any] | None:
    """The inputs, all of one kind; None if they are not."""
    if isinstance(value, str) or are_ids(value) or _is_conversation(value):
        return [value]
    if not isinstance(value, list) or not value:
        return None
    kinds = (lambda item: isinstance(item, str), are_ids, _is_conversation)
    return value if any(all(map(kind, value)) for kind in kinds) else None


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


class EmbeddingPrompts(PromptBuilder):
    """Lines → prompts with `inputs`."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None, **options: Any
    ) -> None:
        """See `PromptBuilder`."""
        super().__init__(spec, tokenizer, vocab_size, begun_at, **{**options, "reader": EmbeddingReader(spec)})
        self._side_of_lines = side_of(tokenizer)

    def _of_requests(self, parts: Sequence[RowRequest]) -> RowRequest:
        """See `PromptBuilder`. It has the first error of its inputs."""
        error = next((part.error for part in parts if part.error is not None), None)
        return replace(super()._of_requests(parts), error=error)

    def _of_parts(self, parts: Sequence[Prompt]) -> Prompt:
        """See `PromptBuilder`. A line is an error row if one of its inputs gives no prompt."""
        for place, part in enumerate(parts):
            if (error := part.error) is not None:
                if len(parts) > 1:
                    error = RowError(error.error_type, f"input {place}: {error.error_message}")
                return Prompt(part.row_index, [], None, error, request=part.request)
        return self._as_one(parts, inputs=tuple(part.token_ids for part in parts), sampling=None)
