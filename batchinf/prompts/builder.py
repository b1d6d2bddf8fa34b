"""Makes prompts from rows: the text or token ids, the row's own sampling and its adapter. Feeders use it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchinf.base.errors import RowError, RowFailed
from batchinf.base.text import list_names, name_type, shorten
from batchinf.model.lora import adapter_places
from batchinf.prompts.encoder import Encoder, Side, begins_with_two, enough_tokens, show
from batchinf.prompts.images import ImageSource
from batchinf.prompts.openai.lines import BodyReader
from batchinf.prompts.openai.requests import BatchReader, RowRequest
from batchinf.prompts.renderer import Renderer, check_text
from batchinf.prompts.row_sampling import RowSampling
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec

_MOST_ADDED = 16  # special tokens that a tokenizer puts around a text
# By `input.on_overlong`, the side of a prompt that is cut.
_SIDES: dict[str, Side] = {"truncate_left": "left", "truncate_right": "right"}
_SHOWN_CHARS = 60


class PromptBuilder:
    """Rows → prompts."""

    task_columns: Sequence[str] = ()
    """Further columns that a task reads of each row. Subclasses set them."""

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: Any,
        vocab_size: int | None,
        begun_at: str | None = None,
        *,
        output_room: int = 1,
        reader: BodyReader[RowRequest] | None = None,
    ) -> None:
        """vocab_size: ids at or above it would crash the engine; None: not known. begun_at: see `ChatTemplate`.
        output_room: number of tokens that must fit after a prompt. reader: of the lines of a batch file; None: a
        `BatchReader`.
        """
        are_lines = spec.input.is_batch_file
        lines = (reader or BatchReader(spec)) if are_lines else None
        self._renderer = Renderer(spec, tokenizer, begun_at, lines=lines)
        self._sampling = RowSampling(spec.sampling, vocab_size)
        self._adapters = tuple(adapter_places(spec.model))
        self._adapter_column = spec.input.adapter_column
        self._placeholders = self._renderer.placeholders(tokenizer)
        self._are_lines = are_lines
        self._with_special = Encoder(tokenizer, adds_special_tokens=True)
        self._without_special = Encoder(tokenizer, adds_special_tokens=False)
        # A chat template writes all special tokens. The tokenizer must not add its own a second time.
        adds = not spec.input.is_chat or are_lines
        self._encoder = self._with_special if adds else self._without_special
        self._has_images = spec.input.has_images
        self._has_places_in_text = spec.input.has_places_in_text
        self._tokenizer = tokenizer
        self._bos: int | None = getattr(tokenizer, "bos_token_id", None)
        self._takes_ids = spec.input.token_ids_column is not None or are_lines
        self._keeps_text = spec.output.include_prompt
        # vLLM's tokenizer cuts the beginning where a text is generated.
        self._side_of_lines: Side = "left"
        self._side = _SIDES.get(spec.input.on_overlong)
        self._max_tokens = spec.sampling.max_tokens
        self._num_samples = spec.sampling.n
        self._output_room = output_room
        self._vocab_size = vocab_size

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns of the prompt, of the row's own sampling, of its adapter, and of the task."""
        adapter = [] if self._adapter_column is None else [self._adapter_column]
        own = (*self._sampling.columns, *adapter, *self.task_columns)
        return tuple(dict.fromkeys([*self._renderer.columns, *own]))

    @property
    def image_id(self) -> int | None:
        """The token with which the place of an image begins; None if the tokenizer does not tell."""
        return None if self._placeholders is None else self._placeholders.first_id

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """One prompt for each row, in order. A prompt leaves room for `output_room` tokens in `max_model_len`.

        With `on_overlong`, a prompt that leaves no room for the row's own `max_tokens`, or else the job's, is cut.
        """
        requests = [self._request(row, max_model_len) for row in rows]
        encoded = self._encoded([part for request in requests for part in request.parts or (request,)])
        prompts = []
        for row, request in zip(rows, requests, strict=True):
            parts = [self._finish(row, part, next(encoded), max_model_len) for part in request.parts or (request,)]
            prompts.append(self._of_parts(parts) if request.parts else parts[0])
        prompts = self.with_adapters(rows, self.with_own_values(rows, prompts))
        # Lines have their sampling already.
        return self._sampling.apply(rows, prompts) if self._sampling.is_set and not self._are_lines else prompts

    def _of_parts(self, parts: Sequence[Prompt]) -> Prompt:
        """The prompt of a line with several prompts. It has an error if all of them have one."""
        num_samples = parts[0].sampling.n if parts[0].sampling is not None else self._num_samples
        numbered = (replace(part, first_request=num_samples * place) for place, part in enumerate(parts))
        return self._as_one(parts, parts=tuple(numbered))

    def _as_one(self, parts: Sequence[Prompt], /, **fields: Any) -> Prompt:
        """The first prompt with what all of them have together, and with these other fields."""
        errors = [part.error for part in parts]
        texts = [part.text for part in parts if part.text is not None]
        return replace(
            parts[0],
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            text="\n".join(texts) if texts else None,
            error=None if None in errors else errors[0],
            is_truncated=any(part.is_truncated for part in parts),
            has_second_bos=any(part.has_second_bos for part in parts),
            **fields,
        )

    def _encoded(self, requests: Sequence[RowRequest]) -> Iterator[list[int] | RowError]:
        """The ids or the error of each request, in order. All texts are encoded together."""
        encoders = [self._encoder_for(request) for request in requests]
        encoded = self._ids_of(
            [(it.text or "", of) for it, of in zip(requests, encoders, strict=True) if of is not None]
        )
        for request, encoder in zip(requests, encoders, strict=True):
            yield next(encoded) if encoder is not None else request.error or request.token_ids or []

    def _encoder_for(self, request: RowRequest) -> Encoder | None:
        """The encoder of a request's text; None if it has ids already, or an error."""
        if request.error is not None or request.token_ids is not None:
            return None
        adds = not request.is_chat if request.adds_special_tokens is None else request.adds_special_tokens
        return self._with_special if adds else self._without_special

    def _ids_of(self, texts: Sequence[tuple[str, Encoder]]) -> Iterator[list[int] | RowError]:
        """The ids or the error of each text, in order. The texts of an encoder are encoded together."""
        encoded = {
            encoder: encoder.encode([text for text, its in texts if its is encoder])
            for encoder in (self._with_special, self._without_special)
        }
        return (next(encoded[encoder]) for _, encoder in texts)

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with the values that a task reads from each row. Tasks override it in subclasses."""
        return prompts

    def with_adapters(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """The prompts of these rows with the names of their adapters. A prompt with an error keeps the error."""
        if not self._adapters:
            return prompts
        if (column := self._adapter_column) is None:
            [name] = self._adapters
            return [replace(prompt, adapter=name) for prompt in prompts]
        return [
            prompt if prompt.error is not None else self._with_adapter(prompt, row.values.get(column))
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def _with_adapter(self, prompt: Prompt, value: Any) -> Prompt:
        if value is None:
            return prompt
        if isinstance(value, str) and value in self._adapters:
            return replace(prompt, adapter=value)
        shown = f"'{shorten(value, _SHOWN_CHARS)}'" if isinstance(value, str) else name_type(value)
        got = f"got {shown} in column '{self._adapter_column}'"
        message = f"{got}; the adapters are: {list_names(sorted(self._adapters))}; null is the plain model"
        return replace(prompt, token_ids=[], error=RowError("unknown_adapter", message))

    def outline(self, row: Row) -> "Outline":
        """The text and output length of a row, without tokenising its prompt."""
        request = self._request(row, None)
        sampling = request.own_sampling or self._sampling.of(row.values)
        most = sampling.max_tokens if isinstance(sampling, SamplingSpec) else self._max_tokens
        if request.error is not None or isinstance(sampling, RowError):
            return Outline(None, most)
        if request.token_ids is None:
            return Outline((request.text or "").encode(), most)
        # The mask keeps invalid ids from overflowing here. They become error rows when the prompt is built.
        return Outline(b"".join((token & 0xFFFFFFFF).to_bytes(4, "little") for token in request.token_ids), most)

    def surely_fits(self, row: Row, num_tokens: int) -> bool:
        """Whether a row's prompt and output take at most `num_tokens`. False: not known without tokenising the prompt.

        A tokenizer makes at most one token of each ASCII character.
        """
        outline = self.outline(row)
        if outline.beginning is None or outline.max_tokens is None or not outline.beginning.isascii():
            return False
        return len(outline.beginning) + _MOST_ADDED + outline.max_tokens < num_tokens

    def preview(self, row: Row, num_chars: int) -> str | RowError:
        """The beginning of a row's text as the model sees it, with special tokens, for people to read."""
        request = self._request(row, None)
        if request.error is not None:
            return request.error
        text = request.text or ""
        if (encoder := self._encoder_for(request)) is None:
            return show(self._tokenizer, (request.token_ids or [])[:num_chars])[:num_chars]
        beginning = text[:num_chars]
        ids = encoder.encode_one(beginning)
        shown = beginning if isinstance(ids, RowError) else show(self._tokenizer, ids)
        return shown if len(text) <= num_chars else f"{shown}… ({len(text):,} characters)"

    def _request(self, row: Row, max_model_len: int | None) -> RowRequest:
        """The row's request, with its ids or its error if its text is not to be encoded."""
        try:
            request = self._renderer.read(row, self._placeholders)
        except RowFailed as failed:
            return RowRequest(error=failed.error)
        own = None if request.sampling is None else self._sampling.with_values(request.sampling)
        if isinstance(own, RowError):
            return replace(request, error=own, parts=())
        parts = [self._checked(part, own, max_model_len) for part in request.parts or (request,)]
        return self._of_requests(parts) if request.parts else parts[0]

    def _of_requests(self, parts: Sequence[RowRequest]) -> RowRequest:
        """The prompts of a line as one text or list of ids, for outlines and previews."""
        if all(self._encoder_for(part) is None for part in parts):
            ids = [token_id for part in parts for token_id in part.token_ids or ()]
            return replace(parts[0], token_ids=ids, error=None, parts=tuple(parts))
        return replace(parts[0], text="\n".join(part.text or "" for part in parts), parts=tuple(parts))

    def _checked(self, request: RowRequest, own: SamplingSpec | None, max_model_len: int | None) -> RowRequest:
        """The request of one prompt, with its sampling, and with the ids of a text that is too long, or its error."""
        if own is not None:
            request = replace(request, own_sampling=own)
        if (encoder := self._encoder_for(request)) is None:
            return request
        try:
            text = check_text(request.text or "")
            # A text that is cut is not too long.
            if max_model_len is None or request.truncation is not None:
                return request
            ids = self._ids_of_long(text, encoder, max_model_len)
        except RowFailed as failed:
            return replace(request, text=None, error=failed.error)
        return request if ids is None else replace(request, token_ids=ids)

    def _ids_of_long(self, text: str, encoder: Encoder, max_model_len: int) -> list[int] | None:
        """The ids of a piece of a text that is too long, so that the rest is not tokenised; None of another text.

        Raises RowFailed if that makes it an error row.
        """
        probed = encoder.probe(text, enough_tokens(max_model_len), self._side or "right")
        if probed is None:
            return None
        ids, num_chars = probed
        if isinstance(ids, RowError):
            raise RowFailed(ids.error_type, ids.error_message)
        if self._side is None:
            got = f"{len(text):,} characters, of which the first {num_chars:,} are {len(ids):,} tokens"
            raise self._too_long(got, max_model_len)
        return ids

    def _finish(self, row: Row, request: RowRequest, ids: list[int] | RowError, max_model_len: int | None) -> Prompt:
        sampling = request.own_sampling
        text = request.text if self._keeps_text else None
        try:
            if isinstance(ids, RowError):
                raise RowFailed(ids.error_type, ids.error_message)
            kept = self._cut_to_fit(row, request, ids, max_model_len)
            self._check_ids(kept, max_model_len)
            self.check_places(kept, len(request.images))
        except RowFailed as failed:
            return Prompt(row.row_index, [], text, failed.error, sampling=sampling, request=request.form)
        return Prompt(
            row.row_index,
            kept,
            text,
            None,
            sampling=sampling,
            is_truncated=kept is not ids,
            has_second_bos=begins_with_two(kept, self._bos),
            dimensions=request.dimensions,
            request=request.form,
            line_seed=_line_seed(request),
            tools=request.tools,
            template_kwargs=_template_kwargs(request.chat),
            image_sources=request.images,
            image_digests=self.digests_before(request.images),
        )

    def digests_before(self, images: Sequence[ImageSource]) -> tuple[str, ...] | None:
        """`Prompt.image_digests` of a prompt whose images are not loaded: none of no images."""
        return () if self._has_images and not images else None

    def check_places(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raise RowFailed if a prompt has not exactly one place for each of its images.

        A prompt without images may spell a place, except where the text says where images stand.
        """
        if self._placeholders is not None and (num_images or self._has_places_in_text):
            self._placeholders.check(token_ids, num_images)

    def _cut_to_fit(self, row: Row, request: RowRequest, ids: list[int], max_model_len: int | None) -> list[int]:
        """The ids, cut if the row's line or the spec wants that. Raises RowFailed."""
        if (wanted := request.truncation) is not None:
            room = None if max_model_len is None else max_model_len - self._output_room
            encoder = self._encoder_for(request)
            return wanted.cut(ids, encoder, most=max_model_len, room=room, default_side=self._side_of_lines)
        # A conversation is not cut: it would lose its instructions or the assistant's header.
        if self._side is None or max_model_len is None or request.is_chat:
            return ids
        sampling = request.own_sampling or self._sampling.of(row.values)
        room = sampling.max_tokens if isinstance(sampling, SamplingSpec) else self._max_tokens
        return self._cut(ids, max_model_len, room or self._output_room, self._side)

    def _cut(self, ids: list[int], max_model_len: int, room: int, side: Side) -> list[int]:
        """The ids with `room` left for the output."""
        cut = self._encoder.cut(ids, max_model_len - room, side)
        if cut is None:
            message = f"max_tokens {room:,} leaves no room for a prompt in max_model_len={max_model_len}"
            raise RowFailed("prompt_too_long", message)
        return cut

    def _check_ids(self, ids: list[int], max_model_len: int | None) -> None:
        """Raise RowFailed if the engine cannot take these ids."""
        if not ids:
            raise RowFailed("empty_prompt", "the prompt has no tokens")
        if max_model_len is not None and len(ids) + self._output_room > max_model_len:
            raise self._too_long(f"{len(ids):,} tokens", max_model_len)
        # A tokenizer, too, may have more ids than the model.
        self.check_vocabulary(min(ids) if self._takes_ids else 0, max(ids))

    def check_vocabulary(self, low: int, high: int) -> None:
        """Raise RowFailed if a row's least or greatest id is outside the vocabulary, which would crash the engine."""
        if low < 0:
            raise RowFailed("invalid_token_id", f"got token id {low}; must not be negative")
        if self._vocab_size is not None and high >= self._vocab_size:
            shown = "" if self._takes_ids else f" ('{show(self._tokenizer, [high])}')"
            raise RowFailed(
                "invalid_token_id", f"token id {high}{shown} is outside the model's vocabulary of {self._vocab_size:,}"
            )

    def _too_long(self, got: str, max_model_len: int) -> RowFailed:
        most = f"at most {max_model_len - self._output_room:,} fit max_model_len={max_model_len}"
        return RowFailed("prompt_too_long", f"got {got}; {most}")


@dataclass(frozen=True, slots=True)
class Outline:
    """The text and output length of a row, for sorting and estimates."""

    beginning: bytes | None
    """The prompt's text in UTF-8, or 4 bytes for each token id; None for an error row."""
    max_tokens: int | None
    """The most tokens of the output; None: as many as fit."""


def _line_seed(request: RowRequest) -> int | None:
    """The seed that a line of a batch file gives; None without one, and for -1, which is vLLM's word for none."""
    given = (request.sampling or {}).get("seed")
    return None if request.own_sampling is None or given in (None, -1) else request.own_sampling.seed


def _template_kwargs(chat: Mapping[str, Any]) -> str | None:
    """`Prompt.template_kwargs` of a request. chat: the arguments of the chat template."""
    variables = chat.get("chat_template_kwargs")
    return json.dumps(variables) if variables else None
