"""The prompts of task `rerank`, cut as `input.on_overlong` says: pairs of a query and a document for a cross-encoder,
single texts for a bi-encoder."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.errors import RowError, RowFailed, SpecError
from batchinf.base.text import describe_error
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.chat import ChatTemplate
from batchinf.prompts.encoder import Side, begins_with_two, enough_tokens, show, side_of
from batchinf.prompts.openai.lines import Truncation, unsupported
from batchinf.prompts.openai.requests import RowRequest
from batchinf.records import Prompt, Reranking
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.vectors.rerank_lines import RerankReader, RerankRequest, name_of
from batchinf.tasks.vectors.section import CROSS_ENCODER, pooling_of

# One text, or a pair that the tokenizer joins.
Input = str | tuple[str, str]
_INPUTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The tokens of an input."""

    ids: list[int]
    type_start: int | None
    """See `Request.token_type_start`."""
    is_cut: bool


class RerankPrompts(PromptBuilder):
    """Rows → prompts with `inputs` and a `reranking`, as vLLM's server makes them."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None, **options: Any
    ) -> None:
        """See `PromptBuilder`. Raises SpecError for a tokenizer without character offsets."""
        super().__init__(spec, tokenizer, vocab_size, begun_at, **options)
        if not getattr(tokenizer, "is_fast", False):
            raise SpecError("model.tokenizer: task rerank needs a fast tokenizer; give a folder with a tokenizer.json")
        self._reader = RerankReader(spec)
        pooling = pooling_of(spec)
        self._is_cross = pooling.score_type == CROSS_ENCODER
        self._has_separator = pooling.use_sep_token is not False
        self._template = ChatTemplate(spec.input, tokenizer, begun_at) if spec.input.chat_template is not None else None
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        documents = (spec.input.documents_column, spec.input.document_column)
        self.task_columns = [column for column in documents if column is not None]
        self._side_of_lines = side_of(tokenizer)

    def surely_fits(self, row: Row, num_tokens: int) -> bool:
        """See `PromptBuilder`. A template adds text of any length."""
        return self._template is None and super().surely_fits(row, num_tokens)

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """See `PromptBuilder`. A row is an error row if one of its inputs gives no prompt."""
        requests = [self._read(row, max_model_len) for row in rows]
        encoded = self._encode([text for read in requests if not isinstance(read, RowError) for text in read[1]])
        prompts = []
        for row, read in zip(rows, requests, strict=True):
            if isinstance(read, RowError):
                prompts.append(Prompt(row.row_index, [], None, read))
                continue
            request, inputs = read
            encodings = list(itertools.islice(encoded, len(inputs)))
            prompts.append(self._prompt(row, request, encodings, max_model_len))
        return self.with_adapters(rows, prompts)

    # -- texts ---------------------------------------------------------------------------------------------------------

    def _read(self, row: Row, max_model_len: int | None) -> tuple[RerankRequest, list[Input]] | RowError:
        """The request of a row and its inputs, or the row's error."""
        try:
            request = self._reader.read_row(row)
            _check_limits(request, max_model_len)
            return request, self._inputs(request, max_model_len)
        except RowFailed as failed:
            return failed.error

    def _inputs(self, request: RerankRequest, max_model_len: int | None) -> list[Input]:
        """The pairs of a cross-encoder, or the single texts of a bi-encoder. Raises RowFailed."""
        sides = ((request.queries, request.max_tokens_per_query), (request.documents, request.max_tokens_per_doc))
        side = self._side_of(request)
        queries, documents = (
            [self._limited(text, num_tokens, side, max_model_len) for text in texts] for texts, num_tokens in sides
        )
        if not self._is_cross:
            return [*queries, *documents]
        pairs = zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True)
        return [self._joined(pair, request) for pair in pairs]

    def _joined(self, pair: tuple[str, str], request: RerankRequest) -> Input:
        """A query and a document by the template, or as vLLM tokenises a pair. Raises RowFailed."""
        if self._template is not None:
            messages = [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
            return self._template.render(messages, add_generation_prompt=False, **request.template_kwargs)
        # transformers' tokenizers take an empty second text for none.
        return pair if self._has_separator and pair[1] else "".join(pair)

    def _limited(self, text: str, num_tokens: int, side: Side, max_model_len: int | None) -> str:
        """The text with at most `num_tokens`; 0: any number. Raises RowFailed.

        Of a text that is far too long, a piece that is too long, which decides the outcome as the whole. side: the side
        of a prompt that is cut.
        """
        try:
            text = self._without_special.cut_text(text, num_tokens, "right") if num_tokens else text
            probed = None if max_model_len is None else self._encoder.probe(text, enough_tokens(max_model_len), side)
        except ValueError as error:
            raise RowFailed("tokenizer_error", f"the tokenizer failed: {error}") from None
        if probed is None:
            return text
        return text[: probed[1]] if side == "right" else text[-probed[1] :]

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _encode(self, inputs: Sequence[Input]) -> Iterator[Any]:
        """The tokenizers library's Encoding of each input, or the row's error."""
        for start in range(0, len(inputs), _INPUTS_AT_ONCE):
            some = inputs[start : start + _INPUTS_AT_ONCE]
            # One call takes either single texts or pairs.
            singles = iter(self._encode_alike([one for one in some if isinstance(one, str)]))
            pairs = iter(self._encode_alike([one for one in some if isinstance(one, tuple)]))
            for one in some:
                yield next(singles if isinstance(one, str) else pairs)

    def _encode_alike(self, inputs: Sequence[Input]) -> list[Any]:
        if not inputs:
            return []
        try:
            return list(self._tokenizer(inputs, verbose=False).encodings)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic in the tokenizers library
            if len(inputs) > 1:
                return [self._encode_alike([one])[0] for one in inputs]
            return [RowError("tokenizer_error", f"the tokenizer failed: {describe_error(error)}")]

    def _prompt(self, row: Row, request: RerankRequest, encodings: Sequence[Any], max_model_len: int | None) -> Prompt:
        encoded: list[_Encoded] = []
        for place, encoding in enumerate(encodings):
            try:
                encoded.append(self._fitted(encoding, request, max_model_len))
            except RowFailed as failed:
                error = self._named(failed.error, request, place)
                return Prompt(row.row_index, [], None, error, request=request.form)
        inputs = tuple(each.ids for each in encoded)
        text = "\n".join(show(self._tokenizer, ids) for ids in inputs) if self._keeps_text else None
        return Prompt(
            row.row_index,
            list(itertools.chain.from_iterable(inputs)),
            text,
            None,
            is_truncated=self._side is not None and any(each.is_cut for each in encoded),
            has_second_bos=any(begins_with_two(ids, self._bos) for ids in inputs),
            inputs=inputs,
            reranking=Reranking(
                num_queries=self._num_queries(request),
                top_n=request.top_n,
                token_type_starts=tuple(each.type_start for each in encoded),
                use_activation=request.use_activation,
            ),
            request=request.form,
        )

    def _num_queries(self, request: RerankRequest) -> int:
        """Of the inputs that are queries. They stand before the documents."""
        return 0 if self._is_cross else len(request.queries)

    def _named(self, error: RowError, request: RerankRequest, place: int) -> RowError:
        """The error with the name of its input."""
        first_document = self._num_queries(request)
        is_query = place < first_document
        texts = request.queries if is_query else request.documents
        if len(texts) == 1 and self._is_cross:
            return error
        name = name_of("query" if is_query else "document", place - (0 if is_query else first_document), texts)
        return RowError(error.error_type, f"{name}: {error.error_message}")

    def _side_of(self, request: RerankRequest) -> Side:
        """The side of a text that is cut if it is too long."""
        if request.truncation is not None:
            return request.truncation.side or self._side_of_lines
        return self._side or "right"

    def _fitted(self, encoding: Any, request: RerankRequest, max_model_len: int | None) -> _Encoded:
        """The tokens of an input, as the line's own `truncate_prompt_tokens` or the spec's `on_overlong` cuts them.

        Raises RowFailed if the engine cannot take them.
        """
        if isinstance(encoding, RowError):
            raise RowFailed(encoding.error_type, encoding.error_message)
        ids: list[int] = encoding.ids
        room = self._room(request.truncation, max_model_len)
        kept: Sequence[int] = range(len(ids))
        is_cut = False
        if room is not None and len(ids) > room:
            kept = self._places(encoding, room, request)
            is_cut = True
        types: list[int] = encoding.type_ids if self._has_types else [0] * len(ids)
        type_start = _type_start([types[place] for place in kept])
        kept_ids = [ids[place] for place in kept]
        self._check_ids(kept_ids, max_model_len)
        return _Encoded(kept_ids, type_start, is_cut)

    def _room(self, truncation: Truncation | None, max_model_len: int | None) -> int | None:
        """The most tokens of a prompt, which is cut to them; None: it is not cut, or they are not known yet."""
        if truncation is None:
            return None if self._side is None else max_model_len
        if max_model_len is not None and truncation.num_tokens > max_model_len:
            got = f"got {truncation.num_tokens:,}; must be at most max_model_len {max_model_len:,}"
            raise unsupported(f"body.truncate_prompt_tokens: {got}")
        return max_model_len if truncation.num_tokens < 0 else truncation.num_tokens

    def _places(self, encoding: Any, room: int, request: RerankRequest) -> Sequence[int]:
        """The places of the tokens that stay in this room. Raises RowFailed."""
        side = self._side_of(request)
        if request.truncation is not None and request.truncation.side is not None:
            # vLLM cuts the plain ids, with the special tokens there.
            return range(len(encoding.ids))[-room:] if side == "left" else range(room)
        only_second = request.max_tokens_per_doc > 0 and self._has_pairs
        return _kept(encoding.sequence_ids, room, side, only_second=only_second)

    @property
    def _has_pairs(self) -> bool:
        return self._is_cross and self._has_separator and self._template is None

    def _request(self, row: Row, max_model_len: int | None) -> RowRequest:
        """The query and all documents as one text, for outlines and previews."""
        try:
            request = self._reader.read_row(row)
        except RowFailed as failed:
            return RowRequest(error=failed.error)
        text = "\n".join([*request.queries, *request.documents])
        return RowRequest(text=text, adds_special_tokens=self._encoder is self._with_special)


def _check_limits(request: RerankRequest, max_model_len: int | None) -> None:
    """Raise RowFailed for a request whose limits are not below the engine's length, as with vLLM's server."""
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        number = getattr(request, name)
        if max_model_len is not None and number >= max_model_len:
            raise unsupported(f"body.{name}: got {number:,}; must be below max_model_len {max_model_len:,}")


def _type_start(types: Sequence[int]) -> int | None:
    """See `Request.token_type_start`. types: of the tokens of an input. Raises RowFailed."""
    start = bisect.bisect_left(types, 1)
    if types != [0] * start + [1] * (len(types) - start):
        words = "the tokenizer's token types are not those of a query and then a document: 0 and then 1"
        raise RowFailed("tokenizer_error", words)
    return start if start < len(types) else None  # all belong to the query, or the tokenizer has no types


def _kept(sequence_ids: Sequence[int | None], room: int, side: Side, *, only_second: bool) -> Sequence[int]:
    """The places of the tokens that stay: all special tokens, and `room` in all. As the tokenizers library cuts.

    sequence_ids: of each token, 0 for the first text, 1 for the second, None for special tokens. Raises RowFailed.
    """
    counts = [sequence_ids.count(0), sequence_ids.count(1)]
    room_of_texts = room - (len(sequence_ids) - sum(counts))
    if room_of_texts < 1:
        words = f"got {room:,} tokens for a prompt, which leaves no room beside the special tokens"
        raise RowFailed("prompt_too_long", words)
    limits = longest_first(counts[0], counts[1], room_of_texts)
    if only_second:
        limits = (counts[0], room_of_texts - counts[0])
        if limits[1] < 1:
            words = f"the query has {counts[0]:,} tokens, which leaves no room for the document in {room_of_texts:,}"
            raise RowFailed("prompt_too_long", words)
    kept = [place for place, sequence in enumerate(sequence_ids) if sequence is None]
    for sequence, limit in enumerate(limits):
        its = [place for place, of in enumerate(sequence_ids) if of == sequence]
        kept += its[:limit] if side == "right" else its[max(0, len(its) - limit) :]
    return sorted(kept)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay in `room`: the longer text is cut first, as the tokenizers library does it."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    if 2 * shorter > room:
        shorter = room // 2
    longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)
