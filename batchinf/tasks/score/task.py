"""Task `score`: logprobs of a continuation, of several choices, or of a whole text.

An input row is one output row. It has one request for each continuation, choice or window. Choices of one token each
after the same context share one request.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import SpecError
from batchinf.base.text import counted, list_names
from batchinf.model.model import Model
from batchinf.prompts import checks
from batchinf.prompts.encoder import Encoder, load_tokenizer
from batchinf.prompts.renderer import Renderer
from batchinf.records import IntArray, Prompt, Request, Result, Scoring, Span, TokenLogprobs
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS, ShownColumns, Task
from batchinf.tasks.columns import (
    Fields,
    Tokens,
    float_type,
    list_array,
    list_of,
    logprob_columns,
    logprob_fields,
    number_lists,
    offsets_of,
    result_schema,
    without_requests,
)
from batchinf.tasks.compare import ComparedColumns
from batchinf.tasks.row_groups import RowGroups
from batchinf.tasks.score.accuracy import ANSWER, ANSWER_ERROR, BEST_PMI, WINNERS, Accuracy, answer_lines, count_answers
from batchinf.tasks.score.answers import MEANINGS, answers_in
from batchinf.tasks.score.prompts import NUM_RESERVED, ScorePrompts
from batchinf.tasks.score.section import SECTION, has_choices, score_of, scored_columns

# The most that vLLM takes for one request (MAX_LOGPROB_TOKEN_IDS).
_MOST_IN_ONE_PASS = 128
# Columns that are means of others.
_NEUTRAL_SUMS = "choice_neutral_logprob_sums"
IS_JOINED = "is_joined"
_MEANS = ("logprob_mean", "perplexity", "bits_per_byte")
# Counts of rows → the columns that mark them.
_FLAGS = {"num_cut": "prompt_truncated", "num_joined": IS_JOINED}


class Score(Task):
    """Task `score`: logprobs of given texts."""

    name = "score"
    prompts = ScorePrompts
    compared = ComparedColumns(
        decides=("is_greedy", *WINNERS),
        others=(BEST_PMI, "answer", "choice_logprob_sums", "logprob_sum", "logprob_mean", "num_tokens", "token_ids",
                "logprobs"),
    )  # fmt: skip
    section = SECTION
    takes_images = True
    batch_urls = ()
    only_scores = True
    takes_generation_config = False

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._k = spec.sampling.prompt_logprobs or 0
        self._has_tokens = spec.output.include_token_logprobs
        self._is_choice = has_choices(spec.input)
        self._sum_name = "logprob_sums" if self._is_choice else "logprob_sum"
        self._stores_all = score_of(spec).store == "all"
        self._logprob_dtype = np.dtype(spec.output.logprobs_dtype)
        self._is_neutral = score_of(spec).neutral is not None
        self._winner_names = (*WINNERS, BEST_PMI) if self._is_neutral else WINNERS
        self._together = score_of(spec).one_pass and self._is_choice and self._k == 0
        # `is_greedy` needs the likeliest token's id. The rank is not enough: two tokens with equal logprobs both have
        # rank 2.
        self._sampling = SamplingSpec(temperature=0.0, prompt_logprobs=max(1, self._k))
        self._one_pass = SamplingSpec(temperature=0.0)
        self.reads_prompt_logits = True
        self.reads_prefix_cache = self._together  # the request for all choices of a row needs no logprobs of its prompt
        self.least_model_len = score_of(spec).window_overlap + NUM_RESERVED + 1  # windows are longer than their overlap
        self.input_columns = tuple(scored_columns(spec.input))

    @classmethod
    def resolve(cls, spec: JobSpec, model: Model) -> JobSpec:
        """See `Task`. Checks that windows are longer than their overlap, and the columns of `score.neutral`."""
        read = Renderer(spec).columns
        for name in score_of(spec).neutral or ():
            if name not in read:
                raise SpecError(f"score.neutral: got '{name}', which the context does not read; it reads: "
                                f"{list_names(read)}")  # fmt: skip
        overlap = score_of(spec).window_overlap
        length = spec.length_limit(model.max_model_len)
        if length is not None and overlap >= length - NUM_RESERVED:
            raise SpecError(f"score.window_overlap: got {overlap:,}; must be below max_model_len - {NUM_RESERVED} = "
                            f"{length - NUM_RESERVED:,}, the tokens of a window")  # fmt: skip
        return spec

    @classmethod
    def settle(cls, spec: JobSpec, source: Source, say: Callable[[str], None]) -> JobSpec:
        """See `Task`. Decides `input.answers`."""
        where = spec.input
        if where.answer_column is None or where.answers != "auto":
            return spec
        return spec.model_copy(update={"input": where.model_copy(update={"answers": answers_in(where, source, say)})})

    def describe(self) -> str:
        """See `Task`."""
        where = self.spec.input
        if where.answers == "auto":
            return ""
        return f"task: score; the answers in '{where.answer_column}' are {MEANINGS[where.answers]}"

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        """See `Task`. Texts are scored without a chat template, and `ScorePrompts` decides about BOS."""
        yield from checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=True, may_lack_template=True)
        if self.spec.input.text_column is not None and score_of(self.spec).add_bos_token is None:
            yield from _bos_warning(self.spec, model)

    def why_unverified(self, model: Model) -> str | None:
        """See `Task`."""
        return None

    def warm_up_request(self) -> Request:
        return Request(-1, 0, [1] * 8, self._sampling)

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        tokens = LIKELY_TOKENS if self._has_tokens else 0
        return 200 + tokens * 9 * (1 + self._k)

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """A request for each span, or one for all choices. A prompt with an error has one, which never runs."""
        if prompt.scoring is None or not prompt.scoring.spans:
            return [Request(prompt.row_index, 0, prompt.token_ids, self._sampling)]
        requests = [
            self._request(spans, prompt.row_index, is_neutral) for spans, is_neutral in self._parts(prompt.scoring)
        ]
        return [replace(request, request_index=index) for index, request in enumerate(requests)]

    def request_note(self, prompt: Prompt) -> str | None:
        """See `Task`. Choices of several tokens need one request if they differ in their last token only."""
        spans = prompt.scoring.spans if prompt.scoring is not None else ()
        if not self._together or not 1 < len(spans) <= _MOST_IN_ONE_PASS or self._is_together(spans):
            return None
        if len({(span.start, *span.token_ids[:-1]) for span in spans}) > 1:
            return None
        shared = len(spans[0].token_ids) - spans[0].start - 1
        return (
            f"each choice has its own request, because it begins with {counted(shared, 'token')} that all choices "
            "share, such as white space from the end of the context. If the context ends with other text, one "
            "request may score all choices: docs/how-to/label.md shows how"
        )

    def _request(self, spans: Sequence[Span], row: int, is_shared: bool) -> Request:
        """The request that scores these spans, with another `request_index`."""
        ids = spans[0].token_ids
        if not self._is_together(spans):
            return Request(row, 0, ids, self._sampling, is_shared=is_shared)
        choices = tuple(span.token_ids[-1] for span in spans)
        return Request(row, 0, ids[:-1], self._one_pass, logprob_token_ids=choices, is_shared=is_shared)

    def _parts(self, scoring: Scoring) -> Iterator[tuple[Sequence[Span], bool]]:
        """The spans of each request of a row, and whether they follow the neutral context."""
        for spans, is_neutral in ((scoring.spans, False), (scoring.neutral, True)):
            if self._is_together(spans):
                yield spans, is_neutral
            else:
                yield from (([span], is_neutral) for span in spans)

    def _part(self, result: Result) -> tuple[Sequence[Span], bool]:
        """See `_parts`; no spans for a row without a valid prompt."""
        scoring = result.prompt.scoring
        if scoring is None or not scoring.spans:
            return (), False
        return next(itertools.islice(self._parts(scoring), result.request_index, None))

    def _is_together(self, spans: Sequence[Span]) -> bool:
        is_single = all(span.start == len(span.token_ids) - 1 for span in spans)
        return self._together and is_single and 1 < len(spans) <= _MOST_IN_ONE_PASS

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. With choices, each value is a list: of one choice, or of all if they share a request."""
        parts = [self._part(result) for result in results]
        every = [self._scores(result, spans) for result, (spans, _) in zip(results, parts, strict=True)]
        is_missing = np.array([not scores for scores in every], np.bool_)
        # The results after a row's own context and those after the neutral one fill different columns.
        own = [() if is_neutral else scores for scores, (_, is_neutral) in zip(every, parts, strict=True)]
        num_output_tokens = pa.array(np.zeros(len(every), np.int32), mask=is_missing)
        columns = {**_prompt_columns(results, parts), "num_output_tokens": num_output_tokens}
        if self._is_neutral:
            neutral = [scores if is_neutral else () for scores, (_, is_neutral) in zip(every, parts, strict=True)]
            sums = pa.array([score.logprob_sum for scores in neutral for score in scores], pa.float64())
            columns[_NEUTRAL_SUMS] = list_array(offsets_of([*map(len, neutral)]), sums, is_missing)
        offsets = offsets_of([*map(len, own)])
        first = pa.array(np.where(is_missing, 0, offsets[:-1]), pa.int64(), mask=is_missing)
        for name, values in self._score_columns([score for scores in own for score in scores]).items():
            if self._is_choice:
                columns[f"choice_{name}"] = list_array(offsets, values, is_missing)
            else:
                columns[name] = values.take(first)
        return self.result_batch(results, columns)

    def _scores(self, result: Result, spans: Sequence[Span]) -> "list[_Score]":
        """The scores of a request with these spans; none if it failed."""
        completion = result.completion
        if completion is None or not spans or result.error is not None:
            return []
        if completion.prompt_logprobs is not None:
            unread = result.prompt.image_positions if self._stores_all else None
            return [_span_score(spans[0], completion.prompt_logprobs, stores_all=self._stores_all, unread=unread)]
        assert completion.logprobs is not None
        return list(_one_pass_scores(spans, completion.logprobs))

    def _score_columns(self, scores: "Sequence[_Score]") -> dict[str, pa.Array]:
        """The columns of `result_fields`, without their prefix, with a value for each score."""
        columns = {
            self._sum_name: pa.array([score.logprob_sum for score in scores], pa.float64()),
            "num_tokens": pa.array([score.num_tokens for score in scores], pa.int32()),
            "num_bytes": pa.array([score.span.num_bytes for score in scores], pa.int64()),
            "is_greedy": pa.array([score.is_greedy for score in scores], pa.bool_()),
        }
        if self._has_tokens:
            unread = [score.unread for score in scores]
            tokens = Tokens([score.stored for score in scores], num_leading=int(self._stores_all), unread=unread)
            columns["token_ids"] = number_lists([score.stored_ids for score in scores])
            columns |= logprob_columns("", tokens, self._k, self._logprob_dtype)
            if self._together:
                columns["ranks"] = _without_zeros(columns["ranks"])
        return columns

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`. If a request of a row failed, the row has its error and no scores."""
        rows = RowGroups(results)
        arrays = rows.shared()
        for name, type in self.result_fields():
            if pa.types.is_list(type):
                arrays[name] = rows.joined(name)
        arrays |= self._winners(rows) if self._is_choice else self._totals(rows)
        return self.output_table(columns, {name: arrays[name] for name in self.computed_schema.names})

    def _totals(self, rows: RowGroups) -> dict[str, pa.Array]:
        sums, num_tokens, num_bytes = (rows.good_sums(name) for name in ("logprob_sum", "num_tokens", "num_bytes"))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            mean = sums / num_tokens
            derived = {
                "logprob_sum": sums,
                "logprob_mean": mean,
                "perplexity": np.exp(-mean),
                "bits_per_byte": -sums / (num_bytes * np.log(2)),
            }
        arrays = {name: rows.of_good(values, pa.float64()) for name, values in derived.items()}
        arrays["num_tokens"] = rows.of_good(num_tokens, pa.int32())
        arrays["num_bytes"] = rows.of_good(num_bytes, pa.int64())
        arrays["is_greedy"] = rows.of_good(rows.good_sums("is_greedy") == rows.good_counts, pa.bool_())
        return arrays

    def _winners(self, rows: RowGroups) -> dict[str, pa.Array]:
        sums = rows.flat("choice_logprob_sums")
        with np.errstate(invalid="ignore"):
            values = (sums, sums / rows.flat("choice_num_tokens"), sums / rows.flat("choice_num_bytes"))
            winners = dict(zip(WINNERS, values, strict=True))
            if self._is_neutral:
                winners[BEST_PMI] = sums - rows.flat(_NEUTRAL_SUMS)
        return {name: rows.winner("choice_logprob_sums", each) for name, each in winners.items()}

    # -- columns -------------------------------------------------------------------------------------------------------

    def result_fields(self) -> Fields:
        """See `Task`: the scores, which an output row has, too."""
        fields = [
            (self._sum_name, pa.float64()),
            ("num_tokens", pa.int32()),
            ("num_bytes", pa.int64()),
            ("is_greedy", pa.bool_()),
        ]
        if self._has_tokens:
            logprob = float_type(self.spec.output.logprobs_dtype)
            fields += [("token_ids", list_of(pa.int32())), *logprob_fields("", self._k, logprob)]
        if not self._is_choice:
            return fields
        neutral = [(_NEUTRAL_SUMS, list_of(pa.float64()))] if self._is_neutral else []
        return [*((f"choice_{name}", list_of(type)) for name, type in fields), *neutral]

    @functools.cached_property
    def result_schema(self) -> pa.Schema:
        return self._schema(self.result_fields())

    @functools.cached_property
    def computed_schema(self) -> pa.Schema:
        scores = self.result_fields()
        if self._is_choice:
            return without_requests(self._schema([*((name, pa.int32()) for name in self._winner_names), *scores]))
        means = [(name, pa.float64()) for name in _MEANS]
        return without_requests(self._schema([scores[0], *means, *scores[1:]]))

    def _schema(self, scores: Fields) -> pa.Schema:
        where = self.spec.input
        answer = [(ANSWER, pa.int32()), (ANSWER_ERROR, pa.string())] if where.answer_column is not None else []
        context = [("num_context_tokens", pa.int32()), (IS_JOINED, pa.bool_())] if where.text_column is None else []
        return result_schema(self.spec, [*scores, *answer, *context], may_truncate=where.text_column is None)

    @property
    def shown_columns(self) -> ShownColumns:
        if not self._is_choice:
            return ShownColumns(("logprob_sum", *_MEANS, "num_tokens", "is_greedy"))
        # Without a column of answers, a kept column may have that name, and its numbers are no places.
        answers = [ANSWER] if self.spec.input.answer_column is not None else []
        choices = dict.fromkeys((*self._winner_names, *answers), self.spec.input.choices or ())
        best, *others = self._winner_names
        return ShownColumns(
            (best, ANSWER, *others, "choice_logprob_sums", ANSWER_ERROR),
            choices=choices,
            choice_sums="choice_logprob_sums",
            choices_column=self.spec.output.keep_columns.get(self.spec.input.choices_column or ""),
        )

    # -- counts --------------------------------------------------------------------------------------------------------

    def count(self, rows: pa.Table) -> dict[str, int] | None:
        """See `Task` and `count_answers`."""
        # A kept column may have a name that the task does not use. A job may have begun without these columns.
        has_answers = self.spec.input.answer_column is not None and not self.left_out & {ANSWER, *WINNERS}
        own = {ANSWER, ANSWER_ERROR, *self._winner_names} - self.left_out
        own_rows = rows.select([name for name in rows.schema.names if name in own])
        counts = super().count(rows) or {}
        counts |= count_answers(own_rows, self.spec.input.answers) if has_answers else {}
        for name, column in _FLAGS.items():
            if self.spec.input.text_column is None and column not in self.left_out:
                num_rows = pc.sum(rows.column(column), min_count=0).as_py()
                counts |= {name: num_rows} if num_rows else {}
        return counts or None

    @classmethod
    def count_lines(cls, num_rows: int, counts: Mapping[str, int]) -> Iterator[str]:
        yield from super().count_lines(num_rows, counts)
        yield from answer_lines(num_rows, counts)
        if num_cut := counts.get("num_cut"):
            yield (
                f"warning: the context of {counted(num_cut, 'output row')} was cut at the left end to fit "
                "(prompt_truncated), so instructions there may be gone; shorten the text with truncate_tokens, or put "
                "the instructions behind it"
            )
        if num_joined := counts.get("num_joined"):
            verb = "has" if num_joined == 1 else "have"
            yield (
                f"warning: {counted(num_joined, 'output row')} {verb} a token that joins the end of the context and "
                f"the beginning of the scored text, which is not scored ({IS_JOINED}); docs/tasks.md says what to do"
            )

    @classmethod
    def count_figures(cls, num_rows: int, counts: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
        if (accuracy := Accuracy.of(num_rows, counts)) is not None:
            yield "accuracy", f"{accuracy.share:.2%}", "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """One scored span."""

    span: Span
    num_tokens: int
    logprob_sum: float
    is_greedy: bool
    stored: TokenLogprobs
    """Logprobs of the tokens to store."""
    stored_ids: IntArray
    unread: IntArray | None = None
    """Positions in `stored_ids` of images, whose tokens the model did not read."""


def _span_score(span: Span, logprobs: TokenLogprobs, *, stores_all: bool, unread: IntArray | None) -> _Score:
    """logprobs: of all tokens of the span but the first."""
    scored = slice(span.start - 1, None)
    ids = logprobs.token_ids[scored]
    kept = slice(None) if stores_all else scored
    return _Score(
        span=span,
        num_tokens=len(span.token_ids) - span.start,
        logprob_sum=float(logprobs.logprobs[scored, 0].sum(dtype=np.float64)),
        is_greedy=bool(np.array_equal(ids[:, 0], ids[:, 1])),
        stored=TokenLogprobs(logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept]),
        stored_ids=np.array(span.token_ids if stores_all else span.token_ids[span.start :], np.int32),
        unread=unread,
    )


def _one_pass_scores(spans: Sequence[Span], logprobs: TokenLogprobs) -> Iterator[_Score]:
    """Scores of single-token choices, from the logprobs of all choices at one position. The token there is the greedy
    one. The ranks of the others are unknown; 0 stands for that.
    """
    greedy = logprobs.token_ids[0, 0]
    for place, span in enumerate(spans, 1):
        ids = np.array(span.token_ids[-1:], np.int32)
        value = logprobs.logprobs[:1, place : place + 1]
        yield _Score(
            span=span,
            num_tokens=1,
            logprob_sum=float(value[0, 0]),
            is_greedy=bool(ids[0] == greedy),
            stored=TokenLogprobs(ids.reshape(1, 1), value, np.zeros(1, np.int32)),
            stored_ids=ids,
        )


def _prompt_columns(results: Sequence[Result], parts: Sequence[tuple[Sequence[Span], bool]]) -> dict[str, pa.Array]:
    """The columns that depend on prompts alone. parts: see `Score._part`."""
    scorings = [result.prompt.scoring or Scoring(()) for result in results]
    first = [spans[0] if spans else None for spans, _ in parts]
    # A shared request runs once for many rows. Its tokens are not counted for any of them.
    num_run = [
        0 if is_neutral else _num_run(result, spans[0] if spans else None)
        for result, (spans, is_neutral) in zip(results, parts, strict=True)
    ]
    return {
        ANSWER: pa.array([scoring.answer for scoring in scorings], pa.int32()),
        ANSWER_ERROR: pa.array([scoring.answer_error for scoring in scorings], pa.string()),
        IS_JOINED: pa.array(
            [scoring.joined is not None if scoring.spans else None for scoring in scorings], pa.bool_()
        ),
        "num_prompt_tokens": pa.array(num_run, pa.int32()),
        "num_context_tokens": pa.array([span and span.start for span in first], pa.int32()),
    }


def _num_run(result: Result, span: Span | None) -> int | None:
    """Number of tokens that the engine got for a request."""
    if result.completion is not None:
        return len(result.completion.request.prompt_token_ids)
    return None if span is None else len(span.token_ids)


def _bos_warning(spec: JobSpec, model: Model) -> Iterator[str]:
    tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
    if Encoder(tokenizer, adds_special_tokens=True).begins_with(tokenizer.bos_token_id):
        yield (
            f"warning: each request begins with two {tokenizer.bos_token}, which your texts need not contain: a score "
            "job puts one before each text, and the tokenizer adds another one, which is scored, as in "
            "lm-evaluation-harness; score.add_bos_token: false leaves the tokenizer's out, and true keeps it without "
            "this warning"
        )


def _without_zeros(lists: pa.ListArray) -> pa.ListArray:
    values = lists.values
    return pa.ListArray.from_arrays(lists.offsets, pc.if_else(pc.equal(values, 0), None, values), type=lists.type)
