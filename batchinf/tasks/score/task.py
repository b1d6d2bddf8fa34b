"""Task `score`: logprobs of a continuation, of several choices, or of a whole text.

An input row is one output row. It has one request for each continuation, choice or window. Choices of one token each
after the same context share one request.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import SpecError
from batchinf.model.identity import Model
from batchinf.prompts import checks
from batchinf.prompts.encoder import Encoder, load_tokenizer
from batchinf.records import Completion, FloatArray, IntArray, Prompt, Request, Result, Span, TokenLogprobs
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import (
    LIKELY_TOKENS,
    Task,
    Tokens,
    error_columns,
    id_lists,
    key_columns,
    list_array,
    list_of,
    logprob_columns,
    logprob_fields,
    offsets_of,
    prompt_columns,
    result_schema,
    without_requests,
)
from batchinf.tasks.score.compare import ANSWER, ANSWER_ERROR, ScoreVerification, begin_changes
from batchinf.tasks.score.prompts import NUM_RESERVED, SECTION, ScorePrompts, has_choices, score_of, scored_columns

# The most that vLLM takes for one request (MAX_LOGPROB_TOKEN_IDS, 0.26 to 0.33).
_MOST_IN_ONE_PASS = 128
_SUMS = (
    ("logprob_sums", pa.float64()),
    ("num_tokens", pa.int32()),
    ("num_bytes", pa.int64()),
    ("is_greedy", pa.bool_()),
)

FloatSums = npt.NDArray[np.float64]


def score_sampling(sampling: SamplingSpec) -> SamplingSpec:
    """The engine's sampling: logprobs of the prompt's tokens, and of at least the likeliest token at each position.

    `is_greedy` needs the likeliest token's id. The rank is not enough: two tokens with equal logprobs both have rank 2.
    """
    return SamplingSpec(temperature=0.0, prompt_logprobs=max(1, sampling.prompt_logprobs or 0))


class Score(Task):
    """Task `score`: logprobs of given texts."""

    name = "score"
    comparison = staticmethod(begin_changes)
    verification = ScoreVerification
    section = SECTION
    takes_generation_config = False

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._k = spec.sampling.prompt_logprobs or 0
        self._has_tokens = spec.output.include_token_logprobs
        self._is_choice = has_choices(spec.input)
        self._stores_all = score_of(spec).store == "all"
        self._logprob_dtype = np.dtype(spec.output.logprobs_dtype)
        self._together = score_of(spec).one_pass and self._is_choice and self._k == 0
        self._sampling = score_sampling(spec.sampling)
        self._one_pass = SamplingSpec(temperature=0.0)

    @property
    def reads_prompt_logits(self) -> bool:
        return True

    @property
    def reads_prefix_cache(self) -> bool:
        """See `Task`. The request for all choices of a row asks for no logprobs of its prompt."""
        return self._together

    @property
    def only_scores(self) -> bool:
        """See `Task`."""
        return True

    @property
    def least_model_len(self) -> int:
        """See `Task`: windows are longer than their overlap."""
        return score_of(self.spec).window_overlap + NUM_RESERVED + 1

    @property
    def input_columns(self) -> tuple[tuple[str, str], ...]:
        """See `Task`: the columns of what is scored."""
        return tuple(scored_columns(self.spec.input))

    def resolve(self, model: Model) -> JobSpec:
        """See `Task`. Checks that windows are longer than their overlap."""
        overlap, length = score_of(self.spec).window_overlap, checks.model_len_limit(self.spec, model)
        if length is not None and overlap >= length - NUM_RESERVED:
            raise SpecError(f"score.window_overlap: got {overlap:,}; must be below max_model_len - {NUM_RESERVED} = "
                            f"{length - NUM_RESERVED:,}, the tokens of a window")  # fmt: skip
        return self.spec

    def prompt_builder(self, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> ScorePrompts:
        return ScorePrompts(self.spec, tokenizer, vocab_size, begun_at)

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        """See `Task`. Texts are scored without a chat template, and `Boundary` decides about BOS."""
        yield from checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=True, may_lack_template=True)
        if self.spec.input.text_column is not None and score_of(self.spec).add_bos_token is None:
            yield from _bos_warning(self.spec, model)

    def warm_up_request(self) -> Request:
        return Request(-1, 0, [1] * 8, self._sampling, 1, None)

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        tokens = LIKELY_TOKENS if self._has_tokens else 0
        return 200 + tokens * 9 * (1 + self._k)

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """A request for each span, or one for all choices. A prompt with an error has one, which never runs."""
        spans = () if prompt.scoring is None else prompt.scoring.spans
        if not spans:
            return [Request(prompt.row_index, 0, prompt.token_ids, self._sampling, 1, None)]
        if self._is_together(spans):
            ids = tuple(span.token_ids[-1] for span in spans)
            context = spans[0].token_ids[:-1]
            return [Request(prompt.row_index, 0, context, self._one_pass, 1, None, logprob_token_ids=ids)]
        return [
            Request(prompt.row_index, index, span.token_ids, self._sampling, 1, None)
            for index, span in enumerate(spans)
        ]

    def _is_together(self, spans: Sequence[Span]) -> bool:
        is_single = all(span.start == len(span.token_ids) - 1 for span in spans)
        return self._together and is_single and 1 < len(spans) <= _MOST_IN_ONE_PASS

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. With choices, each value is a list: of one choice, or of all if they share a request."""
        scores = [self._scores(result) for result in results]
        is_missing = np.array([not spans for spans in scores], np.bool_)
        scorings = [result.prompt.scoring for result in results]
        arrays: dict[str, pa.Array] = {
            **key_columns(results),
            **prompt_columns(results, self.spec.output.include_prompt),
            **error_columns(results),
            ANSWER: pa.array([scoring and scoring.answer for scoring in scorings], pa.int32()),
            ANSWER_ERROR: pa.array([scoring and scoring.answer_error for scoring in scorings], pa.string()),
            "num_prompt_tokens": pa.array([_num_run(result) for result in results], pa.int32()),
            "num_context_tokens": pa.array([_num_context(result) for result in results], pa.int32()),
            "num_output_tokens": pa.array([None if not spans else 0 for spans in scores], pa.int32()),
        }
        flat = [score for spans in scores for score in spans]
        offsets = offsets_of([len(spans) for spans in scores])

        def column(values: pa.Array) -> pa.Array:
            """The values of the results, from those of the scores."""
            if self._is_choice:
                return list_array(offsets, values, is_missing)
            places = np.where(is_missing, 0, offsets[:-1])
            return values.take(pa.array(places, pa.int64(), mask=is_missing))

        prefix = "choice_" if self._is_choice else ""
        for name, values in self._score_columns(flat).items():
            arrays[prefix + name] = column(values)
        if not self._is_choice:
            arrays["logprob_sum"] = arrays.pop("logprob_sums")
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def _scores(self, result: Result) -> list["_Score"]:
        """The scores of a request; none if it failed."""
        completion, scoring = result.completion, result.prompt.scoring
        if completion is None or scoring is None or result.error is not None:
            return []
        if completion.prompt_logprobs is not None:
            span = scoring.spans[result.request_index]
            return [_Score(span, completion.prompt_logprobs, self._stores_all)]
        return list(_one_pass_scores(scoring.spans, completion))

    def _score_columns(self, scores: Sequence["_Score"]) -> dict[str, pa.Array]:
        columns = {
            "logprob_sums": pa.array([score.logprob_sum for score in scores], pa.float64()),
            "num_tokens": pa.array([score.num_tokens for score in scores], pa.int32()),
            "num_bytes": pa.array([score.span.num_bytes for score in scores], pa.int64()),
            "is_greedy": pa.array([score.is_greedy for score in scores], pa.bool_()),
        }
        if not self._has_tokens:
            return columns
        tokens = Tokens([score.stored for score in scores], num_leading=int(self._stores_all))
        columns["token_ids"] = id_lists([score.stored_ids for score in scores])
        columns |= logprob_columns("", tokens, self._k, self._logprob_dtype)
        if self._together:
            columns["ranks"] = _without_zeros(columns["ranks"])
        return columns

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`. If a request of a row failed, the row has its error and no scores."""
        rows = _Rows(results)
        arrays = {name: rows.first(name) for name in results.column_names}
        arrays["attempts"] = pa.array(np.maximum.reduceat(rows.numbers("attempts"), rows.starts), pa.int32())
        arrays["num_prompt_tokens"] = rows.total("num_prompt_tokens", pa.int32())
        arrays["num_output_tokens"] = rows.of_good(np.zeros(rows.num_good, np.int32), pa.int32())
        for name in ("error_type", "error_message"):
            arrays[name] = rows.first_error(name)
        token_names = [name for name in results.column_names if pa.types.is_list(results.schema.field(name).type)]
        token_names = [name for name in token_names if name not in ("prompt_token_ids",)]
        arrays |= {name: rows.joined(name) for name in token_names}
        arrays |= self._winners(rows) if self._is_choice else self._totals(rows)
        return self.output_table(columns, {name: arrays[name] for name in self.own.names})

    def _totals(self, rows: "_Rows") -> dict[str, pa.Array]:
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

    def _winners(self, rows: "_Rows") -> dict[str, pa.Array]:
        sums, starts = rows.flat("choice_logprob_sums")
        with np.errstate(invalid="ignore"):
            values = {
                "best": sums,
                "best_per_token": sums / rows.flat("choice_num_tokens")[0],
                "best_per_byte": sums / rows.flat("choice_num_bytes")[0],
            }
        return {name: rows.winner(each, starts) for name, each in values.items()}

    # -- columns -------------------------------------------------------------------------------------------------------

    def _token_fields(self) -> list[tuple[str, pa.DataType]]:
        if not self._has_tokens:
            return []
        logprob = pa.float16() if self.spec.output.logprobs_dtype == "float16" else pa.float32()
        return [("token_ids", list_of(pa.int32())), *logprob_fields("", self._k, logprob)]

    def result_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Task`: the scores, which an output row has, too."""
        fields = [*_SUMS, *self._token_fields()]
        if self._is_choice:
            return [(f"choice_{name}", list_of(type)) for name, type in fields]
        return [("logprob_sum", pa.float64()), *fields[1:]]

    @functools.cached_property
    def result_schema(self) -> pa.Schema:
        return self._schema(self.result_fields())

    @functools.cached_property
    def own(self) -> pa.Schema:
        return without_requests(self._schema(self._own_fields()))

    def _schema(self, scored: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
        where = self.spec.input
        answer = [(ANSWER, pa.int32()), (ANSWER_ERROR, pa.string())] if where.answer_column is not None else []
        context = [] if where.text_column is not None else [("num_context_tokens", pa.int32())]
        return result_schema(self.spec, [*scored, *answer, *context], may_truncate=where.text_column is None)

    def _own_fields(self) -> list[tuple[str, pa.DataType]]:
        scored = self.result_fields()
        if self._is_choice:
            return [*((name, pa.int32()) for name in ("best", "best_per_token", "best_per_byte")), *scored]
        means = [(name, pa.float64()) for name in ("logprob_mean", "perplexity", "bits_per_byte")]
        return [scored[0], *means, *scored[1:]]


class _Score:
    """One scored span. stored, stored_ids: logprobs and ids of the tokens to store."""

    __slots__ = ("is_greedy", "logprob_sum", "num_tokens", "span", "stored", "stored_ids")

    def __init__(self, span: Span, logprobs: TokenLogprobs, stores_all: bool) -> None:
        """logprobs: of all tokens of the span but the first."""
        own = slice(span.start - 1, None)
        values, ids = logprobs.logprobs[own, 0], logprobs.token_ids[own]
        self.span = span
        self.num_tokens = len(span.token_ids) - span.start
        self.logprob_sum = float(values.sum(dtype=np.float64))
        self.is_greedy = bool(np.array_equal(ids[:, 0], ids[:, 1]))
        kept = slice(None) if stores_all else own
        self.stored = TokenLogprobs(logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept])
        self.stored_ids: IntArray = np.array(span.token_ids if stores_all else span.token_ids[span.start :], np.int32)


class _OneOfMany(_Score):
    """One of several single-token choices that share a request. Its rank is unknown; 0 stands for that."""

    __slots__ = ()

    def __init__(self, span: Span, logprob: float, is_greedy: bool) -> None:
        self.span, self.num_tokens = span, 1
        self.logprob_sum, self.is_greedy = logprob, is_greedy
        self.stored_ids = np.array(span.token_ids[-1:], np.int32)
        values: FloatArray = np.array([[logprob]], np.float32)
        self.stored = TokenLogprobs(self.stored_ids.reshape(1, 1), values, np.zeros(1, np.int32))


def _one_pass_scores(spans: Sequence[Span], completion: Completion) -> Iterator[_Score]:
    """Scores from one generated token: the logprobs of all choices at its position. The token is the greedy one."""
    assert completion.logprobs is not None
    [greedy, *_], [_, *logprobs] = completion.logprobs.token_ids[0].tolist(), completion.logprobs.logprobs[0].tolist()
    for span, logprob in zip(spans, logprobs, strict=True):
        yield _OneOfMany(span, logprob, span.token_ids[-1] == greedy)


def _num_run(result: Result) -> int | None:
    """Number of tokens that the engine got for a request."""
    if result.completion is not None:
        return len(result.completion.request.prompt_token_ids)
    scoring = result.prompt.scoring
    if scoring is None:
        return None
    return len(scoring.spans[result.request_index].token_ids)


def _num_context(result: Result) -> int | None:
    scoring = result.prompt.scoring
    return None if scoring is None else scoring.spans[result.request_index].start


def _bos_warning(spec: JobSpec, model: Model) -> Iterator[str]:
    tokenizer = load_tokenizer(model.tokenizer, spec.model.trust_remote_code)
    ids, bos = Encoder(tokenizer, adds_special_tokens=True).encode_one("a"), tokenizer.bos_token_id
    if isinstance(ids, list) and bos is not None and ids[0] == bos:
        yield (
            f"warning: each request begins with two {tokenizer.bos_token}, which your texts need not contain: a score "
            "job puts one before each text, and the tokenizer adds another one, which is scored, as in "
            "lm-evaluation-harness; score.add_bos_token: false leaves the tokenizer's out, and true keeps it without "
            "this warning"
        )


def _without_zeros(lists: pa.ListArray) -> pa.ListArray:
    values = lists.values
    return pa.ListArray.from_arrays(lists.offsets, pc.if_else(pc.equal(values, 0), None, values), type=lists.type)


class _Rows:
    """Sorted results, grouped by row.

    starts: index of each row's first result. num_good: rows without an error. good_counts: number of results of each of
    them.
    """

    def __init__(self, results: pa.Table) -> None:
        self._results = results.combine_chunks()
        row_index = self.numbers("row_index")
        self.starts = np.flatnonzero(np.diff(row_index, prepend=row_index[:1] - 1))
        self._counts = np.diff(np.append(self.starts, len(row_index)))
        self._row_of = np.repeat(np.arange(len(self.starts)), self._counts)
        is_error = np.asarray(self._column("error_type").is_valid())
        self._is_bad = np.logical_or.reduceat(is_error, self.starts) if len(self.starts) else is_error
        # Each row's first result with an error; without errors, its first result.
        self._error_at = self.starts.copy()
        places = np.flatnonzero(is_error)
        rows, firsts = np.unique(self._row_of[places], return_index=True)
        self._error_at[rows] = places[firsts]
        self._good = self._results.filter(pa.array(~self._is_bad[self._row_of])).combine_chunks()
        self.good_counts = self._counts[~self._is_bad]
        self._good_starts = np.cumsum(self.good_counts) - self.good_counts
        self.num_good = len(self.good_counts)

    def _column(self, name: str, table: pa.Table | None = None) -> pa.Array:
        chunks = (self._results if table is None else table).column(name)
        return chunks.combine_chunks() if chunks.num_chunks != 1 else chunks.chunk(0)

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column without nulls, as numpy array."""
        return np.asarray(self._column(name).to_numpy(zero_copy_only=False))

    def first(self, name: str) -> pa.Array:
        """Each row's value from its first result."""
        return self._column(name).take(pa.array(self.starts))

    def first_error(self, name: str) -> pa.Array:
        """Each row's value from its first failed result; null if none failed."""
        return self._column(name).take(pa.array(self._error_at))

    def total(self, name: str, type: pa.DataType) -> pa.Array:
        """Each row's sum; null if all its values are null."""
        column = self._column(name)
        sums = np.add.reduceat(np.asarray(column.fill_null(0)).astype(np.int64), self.starts)
        is_valid = np.logical_or.reduceat(np.asarray(column.is_valid()), self.starts)
        return pa.array(sums, pa.int64(), mask=~is_valid).cast(type)

    def good_sums(self, name: str) -> npt.NDArray[Any]:
        """The sum of each row without an error."""
        values = np.asarray(self._column(name, self._good).to_numpy(zero_copy_only=False))
        values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
        return np.add.reduceat(values, self._good_starts) if self.num_good else values

    def of_good(self, values: npt.NDArray[Any], type: pa.DataType) -> pa.Array:
        """A column of all rows from values of the rows without an error; null for the others."""
        spread = np.zeros(len(self._is_bad), values.dtype)
        spread[~self._is_bad] = values
        return pa.array(spread, mask=self._is_bad).cast(type)

    def joined(self, name: str) -> pa.Array:
        """The lists of each row's results, end to end; null for rows with an error."""
        column = self._column(name, self._good)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        totals = np.zeros(len(self._is_bad), np.int64)
        if self.num_good:
            totals[~self._is_bad] = np.add.reduceat(lengths, self._good_starts)
        return list_array(offsets_of(totals), column.flatten(), self._is_bad)

    def flat(self, name: str) -> tuple[FloatSums, npt.NDArray[np.int64]]:
        """The list items of all rows without an error, and the index of each row's first item."""
        column = self._column(name, self._good)
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
        totals = np.add.reduceat(lengths, self._good_starts) if self.num_good else lengths
        values = column.flatten().to_numpy(zero_copy_only=False)
        return values.astype(np.float64), np.cumsum(totals) - totals

    def winner(self, values: FloatSums, starts: npt.NDArray[np.int64]) -> pa.Array:
        """The place of each row's largest item, the first one of equals; null if an item is NaN."""
        best = np.full(self.num_good, -1)
        if self.num_good:
            counts = np.diff(np.append(starts, len(values)))
            row_of = np.repeat(np.arange(self.num_good), counts)
            places = np.flatnonzero(values == np.maximum.reduceat(values, starts)[row_of])
            rows, firsts = np.unique(row_of[places], return_index=True)
            best[rows] = places[firsts] - starts[rows]
        column = self.of_good(best, pa.int32())
        return pc.if_else(pc.less(column, 0), None, column)
