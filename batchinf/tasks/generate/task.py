"""Task `generate`: n samples of each prompt. Each sample is an output row with its tokens and their logprobs."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.text import counted
from batchinf.model.model import Model
from batchinf.records import Prompt, Request, Result, ToolCall
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import CHOICE_COLUMN, SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS, ShownColumns, Task
from batchinf.tasks.columns import (
    Fields,
    Tokens,
    float_type,
    list_of,
    logprob_columns,
    logprob_fields,
    output_columns,
    strings,
)
from batchinf.tasks.compare import ComparedColumns


class Generate(Task):
    """See `Task`. `spec.sampling` is resolved, so its temperature is never None."""

    name = "generate"
    compared = ComparedColumns(
        decides=("text", "tool_calls"), others=("finish_reason", "cumulative_logprob", "token_ids", "logprobs")
    )
    makes_text = True
    takes_images = True
    draws_tokens = True
    joins_requests = False

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self.num_rows_per_input = spec.sampling.n
        self.rows_vary = spec.rows_may_set("n")
        self._sampling = spec.sampling
        self._output = spec.output
        self._logprob_dtype = np.dtype(spec.output.logprobs_dtype)

    def why_unverified(self, model: Model) -> str | None:
        """See `Task`."""
        return None

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        """See `Task`: 5 bytes for each stored logprob with its token id, 6 for a token and its text."""
        sampling = self._sampling
        stored = 0 if sampling.logprobs is None else sampling.logprobs + 1
        stored = max(stored, len(sampling.logprob_token_ids) + 1 if sampling.logprob_token_ids else 0)
        tokens = sampling.max_tokens or LIKELY_TOKENS
        # Few outputs reach a high limit. If all do, parts are four times as large as planned.
        tokens = min(tokens, 4 * LIKELY_TOKENS) + max(0, tokens - 4 * LIKELY_TOKENS) // 4
        return sampling.n * (100 + tokens * (6 + 5 * stored))

    @functools.cached_property
    def computed_schema(self) -> pa.Schema:
        fields = list(super().computed_schema)
        return pa.schema([*fields[:2], pa.field("sample_index", pa.int32()), *fields[2:]])

    @property
    def shown_columns(self) -> ShownColumns:
        """See `Task`. The probability of a label is that of all its tokens, if logprobs count the labels alone."""
        sampling = self._sampling
        has_choices = "choice" in (sampling.structured_outputs or {}) or CHOICE_COLUMN in sampling.columns
        is_label = has_choices and sampling.logprobs_mode == "processed_logprobs"
        names = ("text", "reasoning", "tool_calls", "finish_reason", "chosen_logprobs")
        return ShownColumns(names, label_logprob="cumulative_logprob" if is_label else None)

    def result_fields(self) -> Fields:
        output = self._output
        sampling = self._sampling
        logprob = float_type(output.logprobs_dtype)
        return [
            ("text", pa.string()),
            *(_REASONING if self.spec.model.reasoning_parser is not None else []),
            *([("tool_calls", _CALLS)] if self.spec.model.tool_parser is not None else []),
            *([("token_ids", list_of(pa.int32()))] if output.include_token_ids else []),
            ("finish_reason", pa.string()),
            ("stop_reason", pa.string()),
            ("cumulative_logprob", pa.float64()),
            *logprob_fields("", _num_top(sampling), logprob),
            # The chosen tokens are in the order of the spec.
            *([("chosen_logprobs", list_of(list_of(logprob)))] if sampling.logprob_token_ids else []),
            *logprob_fields("prompt_", sampling.prompt_logprobs, logprob),
        ]

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        sampling = prompt.sampling or self._sampling
        chosen = sampling.logprob_token_ids or None
        indices = range(prompt.first_request, prompt.first_request + sampling.n)
        return [self.drawing_request(prompt, index, max_model_len, logprob_token_ids=chosen) for index in indices]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. A null is what was never produced."""
        sampling = self._sampling
        dtype = self._logprob_dtype
        completions = [result.completion for result in results]
        tokens = Tokens([None if c is None else c.logprobs for c in completions])
        # The prompt's first token has no logprob: null at position 0 keeps these aligned to `prompt_token_ids`.
        prompt_tokens = Tokens(
            [None if c is None else c.prompt_logprobs for c in completions],
            num_leading=1,
            unread=[result.prompt.image_positions for result in results],
        )
        columns = {
            **output_columns(completions),
            **_text_columns(results),
            **logprob_columns("", tokens, _num_top(sampling), dtype),
            **logprob_columns("prompt_", prompt_tokens, sampling.prompt_logprobs, dtype),
        }
        if num_chosen := len(sampling.logprob_token_ids):
            columns["chosen_logprobs"] = tokens.top([part.logprobs for part in tokens.parts], num_chosen, dtype)
        return self.result_batch(results, columns)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`: each result is a row with a `sample_index`."""
        arrays = {name: results.column(name) for name in results.column_names}
        return self.output_table(columns, arrays | {"sample_index": arrays["request_index"]})

    def count(self, rows: pa.Table) -> dict[str, int] | None:
        """See `Task`. num_empty: rows without an error, a text and a tool call."""
        counts = super().count(rows) or {}
        if self.spec.scripted is not None:
            return counts or None  # its texts are no model's, and many are empty
        text = pc.fill_null(rows.column("text"), "")
        is_empty = pc.and_(pc.equal(pc.utf8_trim_whitespace(text), ""), pc.is_null(rows.column("error_type")))
        if self.spec.model.tool_parser is not None and "tool_calls" not in self.left_out:
            is_empty = pc.and_(is_empty, pc.is_null(rows.column("tool_calls")))
        num_empty = pc.sum(is_empty, min_count=0).as_py()
        return {**counts, **({"num_empty": num_empty} if num_empty else {})} or None

    @classmethod
    def count_lines(cls, num_rows: int, counts: Mapping[str, int]) -> Iterator[str]:
        """See `Task`."""
        yield from super().count_lines(num_rows, counts)
        if num_empty := counts.get("num_empty"):
            warning = "warning: " if num_empty == num_rows else ""
            rows = counted(num_rows, "output row")
            yield (
                f"{warning}{num_empty:,} of {rows} without an error, but with an empty text; num_output_tokens and "
                "finish_reason show whether the model ended at once, a stop string came first, or reasoning used up "
                "max_tokens"
            )


def _text_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    completions = [result.completion for result in results]
    stops = [None if c is None or c.stop_reason is None else str(c.stop_reason) for c in completions]
    return {
        "text": strings([result.text for result in results]),
        "reasoning": strings([result.reasoning for result in results]),
        "num_reasoning_tokens": pa.array([result.num_reasoning_tokens for result in results], pa.int32()),
        "tool_calls": _call_lists([result.tool_calls for result in results]),
        "finish_reason": strings([None if c is None else c.finish_reason for c in completions]),
        "stop_reason": strings(stops),
    }


_REASONING: Fields = [("reasoning", pa.string()), ("num_reasoning_tokens", pa.int32())]
_CALLS = list_of(pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())]))


def _call_lists(answers: Sequence[tuple[ToolCall, ...] | None]) -> pa.Array:
    return pa.array([None if calls is None else [asdict(call) for call in calls] for calls in answers], _CALLS)


def _num_top(sampling: SamplingSpec) -> int | None:
    """Number of likeliest tokens that are stored, or None. Chosen tokens come with the token's own logprob and rank."""
    return 0 if sampling.logprob_token_ids else sampling.logprobs
