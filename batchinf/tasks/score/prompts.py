"""The section `score` of a spec, and its prompts: contexts with continuations or choices, or windows of a text."""

import decimal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from batchinf.base.errors import RowError
from batchinf.base.text import clip, list_names, name_type
from batchinf.prompts.builder import PromptBuilder, read_list, take, unicode_error
from batchinf.prompts.encoder import Encoder, begins_with_two, show
from batchinf.prompts.row_sampling import whole_number
from batchinf.records import Prompt, Scoring, Span
from batchinf.source.rows import Row
from batchinf.spec.fields import IDENTITY, Section, Whole, wrong
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.spec.sampling import SamplingSpec

# A spec has one of the first four fields. The others go with them.
SCORED_FORMS = ("text_column", "continuation_column", "choices_column", "choices")
SCORE_COLUMNS = (*SCORED_FORMS, "context_column", "answer_column")


class ScoreSpec(Section):
    """How texts are scored; the defaults are those of lm-evaluation-harness."""

    add_bos_token: Annotated[bool | None, IDENTITY] = None
    """Add the tokenizer's special tokens to a text; default: as the tokenizer does by itself."""
    target_delimiter: Annotated[str, IDENTITY] = ""
    """Text between the context and each continuation or choice. It does not count as their bytes."""
    window_overlap: Annotated[Whole, IDENTITY] = 0
    """Tokens of context that each window of a long text takes from the window before, in addition to its last token."""
    one_pass: Annotated[bool, IDENTITY] = True
    """Score the choices of a row with one request if each is a single token. `choice_ranks` is null then."""
    store: Annotated[Literal["span", "all"], IDENTITY] = "span"
    """Tokens whose ids, logprobs and ranks are stored. `span`: the continuation's; `all`: also the context's."""


def score_of(spec: JobSpec) -> ScoreSpec:
    """The section of a spec."""
    section: ScoreSpec = getattr(spec, SECTION.name)
    return section


def _check(spec: JobSpec) -> None:
    """Raise a validator's error if the section or the scored columns do not fit the task or other fields."""
    task, where, sampling, score = spec.task, spec.input, spec.sampling, score_of(spec)
    include_token_logprobs = spec.output.include_token_logprobs
    if task != "score":
        for column in SCORE_COLUMNS:
            if getattr(where, column) is not None:
                raise wrong(f"got it with task {task}; must be left out, or set task: score", f"input.{column}")
        for field in score.model_dump(exclude_defaults=True):
            raise wrong(f"got it with task {task}; must be left out, or set task: score", f"score.{field}")
        if not include_token_logprobs:
            raise wrong(f"got false with task {task}; must be left out: it stores the logprobs that sampling.logprobs "
                        "asks for", "output.include_token_logprobs")  # fmt: skip
        return
    _check_input(where)
    _check_sampling(sampling)
    if not include_token_logprobs and sampling.prompt_logprobs is not None:
        raise wrong(f"got {sampling.prompt_logprobs} with output.include_token_logprobs false; leave out one of them",
                    "sampling.prompt_logprobs")  # fmt: skip
    if score.store == "all":
        if where.continuation_column is None:
            raise wrong("got all without input.continuation_column; all tokens of a text are stored anyway, and "
                        "choices would store their context again and again: leave it out", "score.store")  # fmt: skip
        if not include_token_logprobs:
            raise wrong("got all with output.include_token_logprobs false; leave out one of them", "score.store")
    if score.window_overlap and where.text_column is None:
        raise wrong(f"got {score.window_overlap} without input.text_column; only a text is scored in windows: "
                    "leave it out", "score.window_overlap")  # fmt: skip
    if score.target_delimiter and where.text_column is not None:
        raise wrong("got it with input.text_column, which has no context: leave it out", "score.target_delimiter")


def has_choices(where: InputSpec) -> bool:
    """Whether several texts are scored after each context."""
    return where.choices_column is not None or where.choices is not None


def scored_columns(where: InputSpec) -> list[tuple[str, str]]:
    """Pairs of a spec field and the column that it names, for all columns besides the context's."""
    fields = ("continuation_column", "choices_column", "answer_column")
    return [(f"input.{field}", column) for field in fields if (column := getattr(where, field)) is not None]


def _check_input(where: InputSpec) -> None:
    given = [column for column in SCORED_FORMS if getattr(where, column) is not None]
    contexts = [form for form in PROMPT_FORMS if form != "text_column" and getattr(where, form) is not None]
    if not given:
        raise wrong("missing; must be text_column, or a context with continuation_column, choices_column or choices, "
                    "for task score", "input")  # fmt: skip
    if len(given) > 1:
        raise wrong(f"got {given[1]} beside {given[0]}; give one of them", f"input.{given[1]}")
    if where.text_column is not None:
        if where.is_chat:
            raise wrong("got it with a field of chat; a conversation can only be a context: name the column of the "
                        "text after it in continuation_column", "input.text_column")  # fmt: skip
    elif not contexts:
        raise wrong(f"got it without a context; name its column in context_column, or give another of "
                    f"{', '.join(form for form in PROMPT_FORMS if form not in ('text_column', 'context_column'))}",
                    f"input.{given[0]}")  # fmt: skip
    if where.answer_column is not None and not has_choices(where):
        raise wrong("got it without choices_column or choices; it is the right one of them: leave it out",
                    "input.answer_column")  # fmt: skip
    if where.is_batch_file:
        raise wrong("got openai with task score; its lines have prompts and nothing to score", "input.format")
    if where.on_overlong != "error":
        raise wrong(f"got {where.on_overlong} with task score, which cuts a long context at its left and scores a long "
                    "text in windows: leave it out", "input.on_overlong")  # fmt: skip


def _check_sampling(sampling: SamplingSpec) -> None:
    changed: dict[str, Any] = sampling.model_dump(exclude_defaults=True, exclude={"prompt_logprobs"})
    for field in changed:
        raise wrong("got it with task score, which generates nothing; only prompt_logprobs counts: leave it out",
                    f"sampling.{field}")  # fmt: skip


SECTION = TaskSection("score", ScoreSpec, ScoreSpec(), _check)


# Tokens of `max_model_len` that a window cannot use as input: vLLM runs a prompt only if one more token fits after it,
# and gives no logprob for a prompt's first token.
NUM_RESERVED = 2


@dataclass(frozen=True, slots=True)
class Boundary:
    """How a tokenizer begins texts.

    prefix: the token before a text's first token, so that this one can be scored; None: the tokenizer has none.
    prefix_text: that token as text. A text that begins with it gets no special tokens. adds: whether other texts do.
    """

    prefix: int | None
    prefix_text: str
    adds: bool

    @classmethod
    def of(cls, tokenizer: Any, *, is_chat: bool, add_bos_token: bool | None) -> "Boundary":
        """The same rules as lm-evaluation-harness's `hf` model. is_chat: a chat template writes the special tokens."""
        prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        text = "" if prefix is None else str(tokenizer.decode([prefix]))
        return cls(prefix, text, not is_chat and add_bos_token is not False)

    def adds_to(self, text: str) -> bool:
        """Whether this text is encoded with the tokenizer's special tokens."""
        return self.adds and not (self.prefix_text and text.startswith(self.prefix_text))


def split_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Move white space from the end of the context to the continuation: tokens begin with white space."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def pair(context_ids: list[int], whole_ids: list[int]) -> tuple[list[int], list[int]]:
    """Split the tokens of context + continuation after as many as the context alone has, as lm-evaluation-harness does.

    This is `TemplateLM._encode_pair` after encoding.
    """
    return context_ids, whole_ids[len(context_ids) :]


def prefixed(prefix: int, continuation_ids: list[int]) -> tuple[list[int], list[int]]:
    """Replace an empty context by the prefix. If the continuation begins with the prefix, move that one."""
    if continuation_ids[:1] == [prefix]:
        return continuation_ids[:1], continuation_ids[1:]
    return [prefix], continuation_ids


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


def span_of(context_ids: list[int], continuation_ids: list[int], num_bytes: int, most: int | None) -> Span:
    """A continuation after its context. The context is cut at its left if both have more than `most` tokens."""
    ids = context_ids + continuation_ids
    ids = ids if most is None else ids[-most:]
    return Span(ids, len(ids) - len(continuation_ids), num_bytes)


@dataclass(slots=True)
class _Draft:
    """A row before its batch is encoded.

    context: as text or ids; None: a text without context. targets: the texts to score. num_bytes: of each target.
    answer: the place of the right choice, or why the row's value is none.
    asks: texts to encode, each with whether the tokenizer adds its special tokens.
    """

    row: Row
    context: str | list[int] | None
    targets: list[str]
    num_bytes: list[int]
    answer: int | str | None
    asks: list[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class _Scored:
    """token_ids: of the context and all scored texts. is_cut: whether a context was cut to fit."""

    token_ids: list[int]
    spans: tuple[Span, ...]
    is_cut: bool = False


class ScorePrompts(PromptBuilder):
    """Rows → prompts with a `scoring`."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None) -> None:
        super().__init__(spec, tokenizer, vocab_size, begun_at)
        self._where, self._score = spec.input, score_of(spec)
        # Whole numbers as labels, such as stars: a number in the column of answers is a label then, not a place.
        self._counts_labels = all(text.isascii() and text.isdecimal() for text in spec.input.choices or [""])
        self._boundary = Boundary.of(tokenizer, is_chat=spec.input.is_chat, add_bos_token=self._score.add_bos_token)
        self._without_special, self._with_special = Encoder(tokenizer, False), Encoder(tokenizer, True)
        # If the tokenizer adds BOS, every text is scored after two of them. That is not counted here: `prompt_warnings`
        # warns of it before the job, or the spec asks for it.
        adds = spec.input.text_column is not None and self._boundary.adds
        self._counts_bos = not (adds and self._with_special.begins_with(self._bos))

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns of the context and of the scored texts."""
        return tuple(dict.fromkeys([*super().columns, *(name for _, name in scored_columns(self._where))]))

    def surely_fits(self, row: Row, num_tokens: int) -> bool:
        """See `PromptBuilder`. Always False, because the scored texts count too."""
        return False

    def build(self, rows: Sequence[Row], max_model_len: int | None) -> list[Prompt]:
        """One prompt for each row, in order. Each of its spans has fewer tokens than `max_model_len`."""
        drafts = [self._read(row) for row in rows]
        asks = [ask for draft in drafts if isinstance(draft, _Draft) for ask in draft.asks]
        encoded = {
            adds: encoder.encode([text for text, wanted in asks if wanted == adds])
            for adds, encoder in ((False, self._without_special), (True, self._with_special))
        }
        prompts = []
        for row, draft in zip(rows, drafts, strict=True):
            if isinstance(draft, RowError):
                prompts.append(Prompt(row.row_index, [], None, draft))
                continue
            found = [next(encoded[adds]) for _, adds in draft.asks]
            failed = next((ids for ids in found if isinstance(ids, RowError)), None)
            ids = [ids for ids in found if isinstance(ids, list)]
            prompts.append(self._made(draft, failed or self._scored(draft, ids, max_model_len)))
        return self._adapter.apply(rows, prompts)

    # -- texts of a row ------------------------------------------------------------------------------------------------

    def _read(self, row: Row) -> _Draft | RowError:
        if row.error is not None:
            return RowError("unreadable", row.error)
        if self._where.text_column is not None:
            text = self._renderer.render(row)
            if isinstance(text, RowError):
                return text
            return _Draft(row, None, [text], [len(text.encode())], None, [(text, self._boundary.adds_to(text))])
        context = self._context(row)
        if isinstance(context, RowError):
            return context
        targets = self._targets(row)
        if isinstance(targets, RowError):
            return targets
        answer = self._answer(row, targets)
        num_bytes = [len(target.encode()) for target in targets]
        targets = [self._score.target_delimiter + target for target in targets]
        return _Draft(row, context, targets, num_bytes, answer, list(self._asks(context, targets)))

    def _context(self, row: Row) -> str | list[int] | RowError:
        if self._where.token_ids_column is not None:
            return self._renderer.token_ids(row)
        text = self._renderer.render(row)
        # An empty context is valid: see `prefixed`.
        is_empty = isinstance(text, RowError) and text.error_type == "empty_prompt" and not self._where.is_chat
        return "" if is_empty else text

    def _asks(self, context: str | list[int], targets: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """The context, then each target joined to it. A context that is empty or token ids is left out."""
        if not isinstance(context, str) or not context:
            yield from ((target, False) for target in targets)
            return
        bare = context.rstrip()
        yield bare, self._boundary.adds_to(bare)
        for target in targets:
            whole = "".join(split_spaces(context, target))
            yield whole, self._boundary.adds_to(whole)

    def _targets(self, row: Row) -> list[str] | RowError:
        if self._where.continuation_column is not None:
            value = take(row.values, self._where.continuation_column, "null_continuation")
            if isinstance(value, RowError):
                return value
            texts: list[Any] = [value]
            names = [f"column '{self._where.continuation_column}'"]
        elif self._where.choices is not None:
            return list(self._where.choices)
        else:
            column = self._where.choices_column or ""
            choices = _choices(row, column)
            if isinstance(choices, RowError):
                return choices
            texts, names = choices, [f"choice {place} of column '{column}'" for place in range(len(choices))]
        for text, name in zip(texts, names, strict=True):
            if (wrong := _wrong_text(text, name)) is not None:
                return wrong
        return texts

    def _answer(self, row: Row, choices: list[str]) -> int | str | None:
        """The place of the right choice; None if it is unknown; a text that says why the row's value is no choice.

        A number is a place; a text is a choice's, or a place in digits.

        If `input.choices` are whole numbers, numbers and texts are choices and never places.
        """
        column = self._where.answer_column
        if column is None or (column in row.values and row.values[column] is None):
            return None
        value = take(row.values, column, "")
        if isinstance(value, RowError):
            return value.error_message
        value = whole_number(value)
        if self._counts_labels and isinstance(value, int | str) and not isinstance(value, bool):
            if (text := str(value).strip()) in choices:
                return choices.index(text)
            return self._wrong_answer(value)
        place = value
        if isinstance(value, str):
            is_digits = value.strip().isdecimal() and value.isascii() and len(value) < 10
            place = int(value) if is_digits else None
            if value in choices:
                if place is not None and choices[place : place + 1] not in ([], [value]):
                    return (f"got '{value}' in column '{column}', the text of a choice and the place of another one; "
                            "give places as numbers, not as text")  # fmt: skip
                return choices.index(value)
            if place is None:
                return self._wrong_answer(value)
        if isinstance(place, bool) or not isinstance(place, int):
            return self._wrong_answer(value)
        if not 0 <= place < len(choices):
            return f"got {place} in column '{column}'; the row's choices are 0 to {len(choices) - 1}"
        return place

    def _wrong_answer(self, value: Any) -> str:
        if isinstance(value, str):
            got = f"'{clip(value, 40)}'"
        else:
            is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
            got = str(value) if is_number else name_type(value)
        labels = f"one of input.choices ({list_names(self._where.choices or ())})"
        allowed = labels if self._counts_labels else "the text of a choice, its place from 0"
        return f"got {got} in column '{self._where.answer_column}'; expected {allowed}, or null"

    # -- tokens of a row -----------------------------------------------------------------------------------------------

    def _scored(self, draft: _Draft, ids: list[list[int]], max_model_len: int | None) -> _Scored | RowError:
        """The row's tokens and spans, or its error."""
        if draft.context is None:
            return self._windows(ids[0], draft.num_bytes[0], max_model_len)
        spans: list[Span] = []
        everything: list[int] = []
        is_cut = False
        most = None if max_model_len is None else max_model_len - NUM_RESERVED
        for place, num_bytes in enumerate(draft.num_bytes):
            name = f"choice {place}" if has_choices(self._where) else "the continuation"
            parts = self._pair(draft.context, ids, place)
            if isinstance(parts, RowError):
                return parts
            context_ids, continuation_ids = parts
            if not continuation_ids:
                return RowError("empty_continuation", f"{name} has no tokens of its own behind the context: the "
                                "tokenizer joins them; a space in score.target_delimiter may part them")  # fmt: skip
            if most is not None and len(continuation_ids) > most:
                return RowError("prompt_too_long", f"{name} alone has {len(continuation_ids):,} tokens; at most "
                                f"{most:,} fit max_model_len={max_model_len} behind one of context")  # fmt: skip
            spans.append(span_of(context_ids, continuation_ids, num_bytes, None if most is None else most + 1))
            everything += continuation_ids if place else context_ids + continuation_ids
            is_cut |= len(spans[-1].token_ids) < len(context_ids) + len(continuation_ids)
        return _Scored(everything, tuple(spans), is_cut)

    def _pair(
        self, context: str | list[int], ids: list[list[int]], place: int
    ) -> tuple[list[int], list[int]] | RowError:
        context_ids, continuation_ids = context, ids[place]
        if isinstance(context, str):
            context_ids, continuation_ids = pair(ids[0], ids[place + 1]) if context else ([], ids[place])
        assert isinstance(context_ids, list)
        if context_ids:
            return context_ids, continuation_ids
        if self._boundary.prefix is None:
            message = "the context is empty, and the tokenizer has neither BOS nor EOS to score a first token by"
            return RowError("empty_context", message)
        return prefixed(self._boundary.prefix, continuation_ids)

    def _windows(self, ids: list[int], num_bytes: int, max_model_len: int | None) -> _Scored | RowError:
        if not ids:
            return RowError("empty_prompt", "the text has no tokens")
        most, prefix = len(ids) + 1 if max_model_len is None else max_model_len - NUM_RESERVED, self._boundary.prefix
        if prefix is None:
            return RowError("empty_context", "the tokenizer has neither BOS nor EOS to score a first token by")
        overlap = self._score.window_overlap if len(ids) > most else 0
        if overlap >= most:
            message = f"score.window_overlap {overlap:,} leaves nothing of a window: max_model_len - 2 = {most:,}"
            return RowError("prompt_too_long", message)
        pieces = enumerate(windows(ids, prefix, most, overlap))
        return _Scored(ids, tuple(Span(piece, start, 0 if place else num_bytes) for place, (piece, start) in pieces))

    def _made(self, draft: _Draft, scored: _Scored | RowError) -> Prompt:
        index, text = draft.row.row_index, draft.context if draft.context is not None else draft.targets[0]
        kept = text if self._keeps_text and isinstance(text, str) else None
        if isinstance(scored, RowError):
            return Prompt(index, [], kept, scored)
        if (wrong := self._outside(scored.spans)) is not None:
            return Prompt(index, [], kept, wrong)
        # A row is scored without its answer, too: only the accuracy needs that.
        answer = draft.answer
        scoring = Scoring(scored.spans, None, answer) if isinstance(answer, str) else Scoring(scored.spans, answer)
        is_doubled = self._counts_bos and begins_with_two(scored.spans[0].token_ids, self._bos)
        return Prompt(
            index, scored.token_ids, kept, None, is_truncated=scored.is_cut, scoring=scoring, has_second_bos=is_doubled
        )

    def _outside(self, spans: Sequence[Span]) -> RowError | None:
        """The error of a row with an id outside the vocabulary, which would crash the engine."""
        low = min(min(span.token_ids) for span in spans)
        high = max(max(span.token_ids) for span in spans)
        if low >= 0 and (self._vocab_size is None or high < self._vocab_size):
            return None
        if low < 0:
            return RowError("invalid_token_id", f"got token id {low}; must not be negative")
        shown = "" if self._takes_ids else f" ('{show(self._tokenizer, [high])}')"
        return RowError("invalid_token_id", f"token id {high}{shown} is outside the model's vocabulary of "
                        f"{self._vocab_size:,}")  # fmt: skip


def _choices(row: Row, column: str) -> list[Any] | RowError:
    value = take(row.values, column, "null_choices")
    if isinstance(value, RowError):
        return value
    value, got = read_list(value)
    if not isinstance(value, list):
        return RowError("wrong_type", f"got {got} in column '{column}'; expected a list of texts")
    return value or RowError("no_choices", f"the list in column '{column}' is empty; nothing can be scored")


def _wrong_text(text: object, name: str) -> RowError | None:
    if not isinstance(text, str):
        return RowError("wrong_type", f"got {name_type(text)} in {name}; expected text")
    if not text:
        return RowError("empty_continuation", f"{name} is an empty string; nothing can be scored")
    return unicode_error(text, name)
