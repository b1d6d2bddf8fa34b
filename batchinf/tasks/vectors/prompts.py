"""The prompts of task `embed` over lines of a batch file: each line has one input or several."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchinf.base.errors import RowError
from batchinf.prompts.builder import Draft, PromptBuilder
from batchinf.prompts.encoder import Side
from batchinf.prompts.openai.fields import objection
from batchinf.prompts.openai.lines import (
    EMBEDDINGS_URL,
    LineReader,
    Refused,
    show,
    take_flags,
    take_template_kwargs,
)
from batchinf.prompts.openai.requests import BatchRequest
from batchinf.prompts.openai.truncation import Truncation, take_truncation
from batchinf.prompts.renderer import check_text
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.section import pooling_of

_ENCODINGS = ("float", "base64")
_FLAGS = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
_INPUTS = "one text, the token ids of one, a conversation, or a list of one of these"


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """A line."""

    inputs: list[BatchRequest]
    form: str
    """See `BatchRequest`."""
    dimensions: int | None = None
    """See `Prompt`."""
    adds_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; None: to texts, but not to conversations."""
    truncation: Truncation | None = None


class EmbeddingReader(LineReader[EmbeddingsRequest]):
    """Lines with `/v1/embeddings` → requests."""

    urls = (EMBEDDINGS_URL,)

    def __init__(self, spec: JobSpec) -> None:
        """See `LineReader`."""
        super().__init__(spec)
        self._pooling = pooling_of(spec)
        self._adds_generation_prompt = spec.input.add_generation_prompt

    def _read(self, values: Mapping[str, object]) -> EmbeddingsRequest:
        url, body = self.open(values)
        flags = take_flags(body, _FLAGS)
        adds = flags.pop("add_special_tokens", None)
        encoding = body.pop("encoding_format", "float")
        if encoding not in _ENCODINGS:
            raise Refused(f"body.encoding_format: got {show(encoding)}; must be {' or '.join(_ENCODINGS)}")
        dimensions = self._dimensions(body.pop("dimensions", None))
        truncation = take_truncation(body)
        inputs = self._inputs(body, flags)
        self._check_others(body)
        return EmbeddingsRequest(
            inputs=inputs,
            form=json.dumps({"url": url, "encoding_format": encoding}),
            dimensions=dimensions,
            adds_special_tokens=adds,
            truncation=truncation,
        )

    def _dimensions(self, number: object) -> int | None:
        """What a request asks for beside the job's; the engine knows whether the model was trained for it."""
        width = self._pooling.width
        if number is None or number == self._pooling.vector_width:
            return None
        if type(number) is not int or number < 1 or (width is not None and number > width):
            most = "" if width is None else f", at most {width}"
            raise Refused(f"body.dimensions: got {show(number)}; must be a whole number, at least 1{most}")
        return number

    def _inputs(self, body: dict[str, Any], flags: Mapping[str, bool]) -> list[BatchRequest]:
        """One or several, in the order of the answers."""
        name = "messages" if "messages" in body else "input"
        value = body.pop(name, None)
        if "input" in body:
            raise Refused("body.input: given beside body.messages; give one of them")
        items = _some_items(name, value)
        is_text = isinstance(items[0], str)
        if not is_text and not _are_ids(items[0]):
            chat = self._chat(body, flags)
            return [BatchRequest(messages=item, chat=chat) for item in items]
        of_chats = {**flags, "chat_template_kwargs": body.pop("chat_template_kwargs", None)}
        if others := list(filter(of_chats.get, of_chats)):
            raise Refused(f"body.{others[0]}: got it without a conversation; leave it out")
        return [BatchRequest(text=item) if is_text else BatchRequest(token_ids=item) for item in items]

    def _chat(self, body: dict[str, Any], flags: Mapping[str, bool]) -> dict[str, Any]:
        """The arguments of the chat template. As with vLLM's server, an assistant's turn is not begun by default."""
        kwargs = take_template_kwargs(body)
        if flags.get("add_generation_prompt") and flags.get("continue_final_message"):
            raise Refused("body.add_generation_prompt: got true with continue_final_message; give one of them")
        default = {"add_generation_prompt": bool(self._adds_generation_prompt)}
        return {**default, **flags, "chat_template_kwargs": kwargs}

    def _check_others(self, body: Mapping[str, Any]) -> None:
        """Raise Refused for a field that would change the output."""
        for name, value in body.items():
            if name == "use_activation":
                of_job = self._pooling.normalize
                if value is not of_job:
                    raise Refused(f"body.{name}: got {show(value)}, but all rows have pooling.normalize {of_job}")
            elif (why := objection(EMBEDDINGS_URL, name, value)) is not None:
                raise Refused(f"body.{name}: {why}")


def _some_items(name: str, value: object) -> list[Any]:
    """The inputs of the field `input` or `messages`, all of one kind. Raises Refused."""
    items = _items(value)
    if items is None or (name == "messages" and not _is_conversation(items[0])):
        got = "an empty list" if value == [] else show(value)
        words = "a conversation, or a list of several" if name == "messages" else _INPUTS
        raise Refused(f"body.{name}: got {got}; must be {words}")
    return items


def _items(value: object) -> list[Any] | None:
    """The inputs, all of one kind; None if they are not."""
    if isinstance(value, str) or _are_ids(value) or _is_conversation(value):
        return [value]
    if not isinstance(value, list) or not value:
        return None
    kinds = (lambda item: isinstance(item, str), _are_ids, _is_conversation)
    return value if any(all(map(kind, value)) for kind in kinds) else None


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line before its batch is encoded."""

    request: EmbeddingsRequest | RowError
    drafts: list[Draft] = field(default_factory=list)
    """Of its inputs."""


class EmbeddingPrompts(PromptBuilder):
    """Lines → prompts with `inputs`."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None) -> None:
        """See `PromptBuilder`."""
        super().__init__(spec, tokenizer, vocab_size, begun_at, output_room=0)
        self._reader = EmbeddingReader(spec)
        self._tokenizer_side: Side = "left" if getattr(tokenizer, "truncation_side", None) == "left" else "right"

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """See `PromptBuilder`. A line is an error row if one of its inputs gives no prompt."""
        lines = [self._line(row, max_model_len) for row in rows]
        encoded = self._encoded([draft for line in lines for draft in line.drafts])
        prompts = [
            self._prompt(row, line, list(itertools.islice(encoded, len(line.drafts))), max_model_len)
            for row, line in zip(rows, lines, strict=True)
        ]
        return self._adapter.apply(rows, prompts)

    def _line(self, row: Row, max_model_len: int | None) -> _Line:
        request = self._reader.read_row(row)
        if isinstance(request, RowError):
            return _Line(request)
        return _Line(request, [self._input(request, item, max_model_len) for item in request.inputs])

    def _input(self, request: EmbeddingsRequest, item: BatchRequest, max_model_len: int | None) -> Draft:
        assert self._batch is not None, "the input is a batch file"
        rendered = self._batch.rendered(item)
        if isinstance(rendered, RowError):
            return Draft(None, rendered)
        if rendered.text is None:
            return Draft(None, rendered.token_ids)
        adds = request.adds_special_tokens
        encoder = self._encoder if (not rendered.is_chat if adds is None else adds) else self._chat_encoder
        text = check_text(rendered.text)
        # A text that is cut is not too long.
        draft = self._text_draft(text, encoder, None if request.truncation is not None else max_model_len)
        return Draft(draft.text, draft.ids, draft.encoder, is_chat=rendered.is_chat)

    def _prompt(
        self, row: Row, line: _Line, encoded: Sequence[list[int] | RowError], max_model_len: int | None
    ) -> Prompt:
        request = line.request
        if isinstance(request, RowError):
            return Prompt(row.row_index, [], None, request)
        prompts = []
        for place, (draft, ids) in enumerate(zip(line.drafts, encoded, strict=True)):
            prompt = self._finish(row, draft, self._truncated(request, draft, ids, max_model_len), max_model_len)
            if (error := prompt.error) is not None:
                if len(encoded) > 1:
                    error = RowError(error.error_type, f"input {place}: {error.error_message}")
                return Prompt(row.row_index, [], None, error, request=request.form)
            prompts.append(prompt)
        return Prompt(
            row.row_index,
            [token_id for prompt in prompts for token_id in prompt.token_ids],
            "\n".join(texts) if (texts := [prompt.text for prompt in prompts if prompt.text is not None]) else None,
            None,
            is_truncated=any(prompt.is_truncated for prompt in prompts),
            has_second_bos=any(prompt.has_second_bos for prompt in prompts),
            inputs=tuple(prompt.token_ids for prompt in prompts),
            dimensions=request.dimensions,
            request=request.form,
        )

    def _truncated(
        self, request: EmbeddingsRequest, draft: Draft, ids: list[int] | RowError, max_model_len: int | None
    ) -> list[int] | RowError:
        """The ids as the line's own `truncate_prompt_tokens` cuts them: as vLLM's server does."""
        wanted = request.truncation
        if wanted is None or isinstance(ids, RowError):
            return ids
        side = self._tokenizer_side
        return wanted.cut(ids, draft.encoder, most=max_model_len, room=max_model_len, default_side=side)

    def _draft(self, row: Row, max_model_len: int | None) -> Draft:
        """All inputs of a line as one text or list of ids, for outlines and previews."""
        line = self._line(row, None)
        if isinstance(line.request, RowError):
            return Draft(None, line.request)
        if failed := [draft.ids for draft in line.drafts if isinstance(draft.ids, RowError)]:
            return Draft(None, failed[0])
        form = line.request.form
        if line.drafts[0].encoder is None:
            ids = [token_id for draft in line.drafts if isinstance(draft.ids, list) for token_id in draft.ids]
            return Draft(None, ids, request=form)
        texts = [draft.text or "" for draft in line.drafts]
        return Draft("\n".join(texts), None, line.drafts[0].encoder, request=form)
