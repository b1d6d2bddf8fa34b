"""The prompts of task `score`: contexts with continuations or choices, or windows of a text."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchinf.base.errors import RowError, RowFailed
from batchinf.base.text import clip, name_type
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import Encoder, begins_with_two
from batchinf.prompts.images import ImageSource
from batchinf.prompts.openai.requests import RowRequest
from batchinf.prompts.renderer import check_unicode, take, take_list
from batchinf.records import Prompt, Scoring, Span
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.tasks.score.answers import AnswerReader
from batchinf.tasks.score.section import has_choices, score_of, scored_columns

# Tokens of `max_model_len` that a window cannot use as input: vLLM runs a prompt only if one more token fits after it,
# and gives no logprob for a prompt's first token.
NUM_RESERVED = 2
_SHOWN_CHARS = 20
_SHOWN_TOKENS = 20


def windows(token_ids: Sequence[int], prefix: int, max_seq_len: int, overlap: int) -> Iterator[tuple[list[int], int]]:
    """The windows of a text: token ids of context and scored tokens, and the index of the first scored one.

    As in lm-evaluation-harness: `make_disjoint_window` of `get_rolling_token_windows` with `context_len = overlap + 1`.
    Each token is scored once, the first one after the prefix. The last window is filled up with context.
    max_seq_len: the most input tokens of a window; the window has one more, its last scored token.
    """
    if not 0 <= overlap < max_seq_len:
        raise ValueError(f"got an overlap of {overlap} for windows of {max_seq_len} tokens")
    ids = list(token_ids)
    stop = min(max_seq_len, len(ids))
    if stop:
        yield [prefix, *ids[:stop]], 1
    while stop < len(ids):
        num_scored = min(len(ids) - stop, max_seq_len - overlap)
        stop += num_scored
        start = stop - max_seq_len - 1
        yield ids[start:stop], stop - num_scored - start


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A row before its batch is encoded."""

    row: Row
    context: str | list[int] | None
    """As text or ids; None: a text without context."""
    targets: list[str]
    """The texts to score."""
    num_bytes: list[int]
    """Of each target, without the delimiter."""
    answer: int | str | None = None
    """The place of the right choice, or why the row's value is none."""
    asks: list[tuple[str, Encoder]]
    """Texts to encode: for the context, then for `neutral`."""
    neutral: str | list[int] | None = None
    """The context with the values of `score.neutral`; None without that."""
    images: tuple[ImageSource, ...] = ()
    """Of the context."""
    text: str | None = None
    """Of a context as ids, if it is known."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """The tokens of a row."""

    token_ids: list[int]
    """Of the context and all scored texts."""
    spans: tuple[Span, ...]
    is_cut: bool = False
    """Whether a context was cut to fit."""
    neutral: tuple[Span, ...] = ()
    joined: str | None = None
    """See `Scoring`, as `neutral`."""


class ScorePrompts(PromptBuilder):
    """Rows → prompts with a `scoring`."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None, **options: Any
    ) -> None:
        """See `PromptBuilder`."""
        super().__init__(spec, tokenizer, vocab_size, begun_at, **options)
        self.task_columns = [name for _, name in scored_columns(spec.input)]
        self._input = spec.input
        self._score = score_of(spec)
        self._answers = AnswerReader(spec.input)
        # The token before a text's first token, so that this one can be scored, as lm-evaluation-harness's `hf` does.
        self._prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        self._prefix_text = "" if self._prefix is None else str(tokenizer.decode([self._prefix]))
        # A chat template writes the special tokens itself.
        self._adds = not spec.input.is_chat and self._score.add_bos_token is not False
        # If the tokenizer adds BOS, every text is scored after two of them. That is not counted here: `prompt_warnings`
        # warns of it before the job, or the spec asks for it.
        adds = spec.input.text_column is not None and self._adds
        self._counts_bos = not (adds and self._with_special.begins_with(self._bos))

    def surely_fits(self, row: Row, num_tokens: int) -> bool:
        """See `PromptBuilder`. Always False, because the scored texts count too."""
        return False

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """One prompt for each row, in order. Each of its spans has fewer tokens than `max_model_len`."""
        drafts = [self._read_or_error(row) for row in rows]
        encoded = self._ids_of([ask for draft in drafts if isinstance(draft, _Draft) for ask in draft.asks])
        prompts = []
        for row, draft in zip(rows, drafts, strict=True):
            if isinstance(draft, RowError):
                prompts.append(Prompt(row.row_index, [], None, draft))
            else:
                ids = list(itertools.islice(encoded, len(draft.asks)))
                # A context with images is not cut: the engine says whether it fits.
                most = None if draft.images else max_model_len
                prompts.append(self._prompt(draft, ids, most))
        return self.with_adapters(rows, prompts)

    # -- texts of a row ------------------------------------------------------------------------------------------------

    def _read_or_error(self, row: Row) -> _Draft | RowError:
        try:
            return self._read(row)
        except RowFailed as failed:
            return failed.error

    def _read(self, row: Row) -> _Draft:
        if row.error is not None:
            raise RowFailed("unreadable", row.error)
        if self._input.text_column is not None:
            return self._read_text(row)
        context = self._context(row)
        texts = self._targets(row)
        neutral = self._neutral_context(row)
        targets = [self._score.target_delimiter + text for text in texts]
        before = context.prompt
        return _Draft(
            row=row,
            context=before,
            targets=targets,
            num_bytes=[len(text.encode()) for text in texts],
            answer=self._answers.read(row, texts),
            asks=[*self._asks(before, targets), *self._asks(neutral, targets)],
            images=context.images,
            neutral=neutral,
            text=context.text,
        )

    def _read_text(self, row: Row) -> _Draft:
        """A row whose whole text is scored."""
        text = self._renderer.render(row)
        asks = [(text, self._encoder_of(text))]
        return _Draft(row=row, context=None, targets=[text], num_bytes=[len(text.encode())], asks=asks)

    def _neutral_context(self, row: Row) -> str | list[int] | None:
        """The row's context with the values of `score.neutral`; None without these."""
        if self._score.neutral is None:
            return None
        with _naming_neutral():
            return self._context(replace(row, values={**row.values, **self._score.neutral})).prompt

    def _context(self, row: Row) -> RowRequest:
        try:
            return self._renderer.read(row, self._placeholders)
        except RowFailed as failed:
            # An empty context is valid: see `_pair`.
            if failed.error.error_type != "empty_prompt" or self._input.is_chat or self._has_images:
                raise
            return RowRequest(text="")

    def _asks(self, context: str | list[int] | None, targets: Sequence[str]) -> Iterator[tuple[str, Encoder]]:
        """The context, then each target joined to it. A context that is empty or token ids is left out.

        Nothing without a context.
        """
        if context is None:
            return
        if not isinstance(context, str) or not context:
            yield from ((target, self._without_special) for target in targets)
            return
        # Tokens begin with white space, so that at the end of the context belongs to the targets.
        for text in (context.rstrip(), *(context + target for target in targets)):
            yield text, self._encoder_of(text)

    def _encoder_of(self, text: str) -> Encoder:
        """It adds the tokenizer's special tokens, but not to a text that begins with the prefix itself."""
        has_prefix = bool(self._prefix_text) and text.startswith(self._prefix_text)
        return self._with_special if self._adds and not has_prefix else self._without_special

    def _targets(self, row: Row) -> list[str]:
        if self._input.choices is not None:
            return list(self._input.choices)
        if self._input.continuation_column is not None:
            name = f"column '{self._input.continuation_column}'"
            return [_scored_text(take(row.values, self._input.continuation_column, "null_continuation"), name)]
        column = self._input.choices_column or ""
        choices = take_list(row.values, column, "texts", null="null_choices")
        if not choices:
            raise RowFailed("no_choices", f"the list in column '{column}' is empty; nothing can be scored")
        return [_scored_text(text, f"choice {place} of column '{column}'") for place, text in enumerate(choices)]

    # -- tokens of a row -----------------------------------------------------------------------------------------------

    def _scored(self, draft: _Draft, encoded: Sequence[list[int] | RowError], max_model_len: int | None) -> _Scored:
        """The row's tokens and spans. encoded: `draft.asks`."""
        ids = [each for each in encoded if isinstance(each, list)]
        error = next((each for each in encoded if isinstance(each, RowError)), None)
        if error is not None:
            raise RowFailed(error.error_type, error.error_message)
        if draft.context is None:
            return self._windows(ids[0], draft.num_bytes[0], max_model_len)
        scored = self._after(draft.context, ids, draft, max_model_len)
        if draft.neutral is None:
            return scored
        with _naming_neutral():
            neutral = self._after(draft.neutral, ids[-self._num_asks(draft.neutral, draft) :], draft, max_model_len)
        is_cut = scored.is_cut or neutral.is_cut
        return replace(scored, neutral=neutral.spans, is_cut=is_cut, joined=scored.joined or neutral.joined)

    def _num_asks(self, context: str | list[int], draft: _Draft) -> int:
        return sum(1 for _ in self._asks(context, draft.targets))

    def _after(
        self, context: str | list[int], ids: list[list[int]], draft: _Draft, max_model_len: int | None
    ) -> _Scored:
        """The scored texts after one context. ids: of the texts of `_asks`, first those for this context."""
        pairs: list[tuple[list[int], list[int]]] = []
        for place in range(len(draft.targets)):
            pair = self._pair(context, ids, place)
            self._check_length(pair[1], place, max_model_len)
            pairs.append(pair)
        scored = self._fitted(pairs, draft.num_bytes, max_model_len)
        return replace(scored, joined=self._joined(context, ids, draft.targets))

    def _joined(self, context: str | list[int], ids: list[list[int]], targets: Sequence[str]) -> str | None:
        """See `Scoring`. ids: of the texts of `_asks`. It takes 1 % of the time to encode them."""
        if not isinstance(context, str) or not context:
            return None
        num_context = len(ids[0])
        wholes = enumerate(ids[1 : 1 + len(targets)])
        place, whole = next(((place, whole) for place, whole in wholes if whole[:num_context] != ids[0]), (0, None))
        if whole is None:
            return None
        scored = self._tokenizer.decode(whole[num_context : num_context + _SHOWN_TOKENS])
        texts = (repr(clip(text, _SHOWN_CHARS)) for text in (targets[place], scored))
        return f"{context.rstrip()[-_SHOWN_CHARS:]!r} + {' scores '.join(texts)}"

    def _fitted(
        self, pairs: Sequence[tuple[list[int], list[int]]], num_bytes: Sequence[int], max_model_len: int | None
    ) -> _Scored:
        """The spans of contexts and scored texts. A context is cut at its left if both do not fit."""
        first = None if max_model_len is None else -(max_model_len - NUM_RESERVED + 1)
        wholes = [[*context, *target][first:] for context, target in pairs]
        starts = [len(whole) - len(target) for whole, (_, target) in zip(wholes, pairs, strict=True)]
        is_cut = any(start < len(context) for start, (context, _) in zip(starts, pairs, strict=True))
        everything = [*pairs[0][0], *itertools.chain.from_iterable(target for _, target in pairs)]
        return _Scored(everything, tuple(map(Span, wholes, starts, num_bytes)), is_cut)

    def _check_length(self, ids: list[int], place: int, max_model_len: int | None) -> None:
        """Raise RowFailed if this scored text has no tokens, or too many."""
        name = f"choice {place}" if has_choices(self._input) else "the continuation"
        if not ids:
            raise RowFailed("empty_continuation", f"{name} has no tokens of its own behind the context: the tokenizer "
                            "joins them; a space in score.target_delimiter may part them")  # fmt: skip
        if max_model_len is not None and len(ids) > (most := max_model_len - NUM_RESERVED):
            raise RowFailed("prompt_too_long", f"{name} alone has {len(ids):,} tokens; at most {most:,} fit "
                            f"max_model_len={max_model_len} behind one of context")  # fmt: skip

    def _pair(self, context: str | list[int], ids: list[list[int]], place: int) -> tuple[list[int], list[int]]:
        """The tokens of the context and of one of the scored texts.

        A context as text and each scored text were encoded together. They are split after as many tokens as the context
        alone has, as lm-evaluation-harness does: `TemplateLM._encode_pair` after encoding.
        """
        if isinstance(context, str) and context:
            context_ids = ids[0]
            target = ids[place + 1][len(context_ids) :]
        else:
            context_ids = [] if isinstance(context, str) else context
            target = ids[place]
        if context_ids:
            return context_ids, target
        prefix = self._prefix
        if prefix is None:
            message = "the context is empty, and the tokenizer has neither BOS nor EOS to score a first token by"
            raise RowFailed("empty_context", message)
        # The prefix replaces an empty context. If the scored text begins with it, that token moves.
        return [prefix], target[1:] if target[:1] == [prefix] else target

    def _windows(self, ids: list[int], num_bytes: int, max_model_len: int | None) -> _Scored:
        if not ids:
            raise RowFailed("empty_prompt", "the text has no tokens")
        most = len(ids) + 1 if max_model_len is None else max_model_len - NUM_RESERVED
        if self._prefix is None:
            raise RowFailed("empty_context", "the tokenizer has neither BOS nor EOS to score a first token by")
        overlap = self._score.window_overlap if len(ids) > most else 0
        if overlap >= most:
            message = f"score.window_overlap {overlap:,} leaves nothing of a window: max_model_len - 2 = {most:,}"
            raise RowFailed("prompt_too_long", message)
        pieces = enumerate(windows(ids, self._prefix, most, overlap))
        return _Scored(ids, tuple(Span(piece, start, 0 if place else num_bytes) for place, (piece, start) in pieces))

    def _check_spans(self, spans: Sequence[Span], num_images: int) -> None:
        """Raise RowFailed for spans with ids outside the vocabulary, or without one place for each image."""
        low = min(min(span.token_ids) for span in spans)
        high = max(max(span.token_ids) for span in spans)
        self.check_vocabulary(low, high)
        for span in spans:
            self.check_places(span.token_ids, num_images)

    def _prompt(self, draft: _Draft, encoded: Sequence[list[int] | RowError], max_model_len: int | None) -> Prompt:
        """encoded: `draft.asks`."""
        index = draft.row.row_index
        text = draft.text or (draft.context if draft.context is not None else draft.targets[0])
        kept = text if self._keeps_text and isinstance(text, str) else None
        try:
            scored = self._scored(draft, encoded, max_model_len)
            self._check_spans([*scored.spans, *scored.neutral], len(draft.images))
        except RowFailed as failed:
            return Prompt(index, [], kept, failed.error)
        # A row is scored without its answer, too: only the accuracy needs that.
        answer = draft.answer
        place, answer_error = (None, answer) if isinstance(answer, str) else (answer, None)
        scoring = Scoring(scored.spans, place, answer_error, neutral=scored.neutral, joined=scored.joined)
        return Prompt(
            row_index=index,
            token_ids=scored.token_ids,
            text=kept,
            error=None,
            is_truncated=scored.is_cut,
            scoring=scoring,
            has_second_bos=self._counts_bos and begins_with_two(scored.spans[0].token_ids, self._bos),
            image_sources=draft.images,
            image_digests=self.digests_before(draft.images),
        )


def _scored_text(text: Any, name: str) -> str:
    """The text. Raises RowFailed if it cannot be scored. name: of the text, in the message."""
    if not isinstance(text, str):
        raise RowFailed("wrong_type", f"got {name_type(text)} in {name}; expected text")
    if not text:
        raise RowFailed("empty_continuation", f"{name} is an empty string; nothing can be scored")
    check_unicode(text, name)
    return text


@contextlib.contextmanager
def _naming_neutral() -> Iterator[None]:
    """Put `score.neutral` into the message of an error that the block raises."""
    try:
        yield
    except RowFailed as failed:
        raise RowFailed(failed.error.error_type, f"score.neutral: {failed.error.error_message}") from failed
