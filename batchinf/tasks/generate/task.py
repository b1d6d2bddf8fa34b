"""Task `generate`: n samples of each prompt. Each sample is an output row with its tokens and their logprobs."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchinf.records import Prompt, Request, Result
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import (
    LIKELY_TOKENS,
    Task,
    Tokens,
    chosen_columns,
    chosen_fields,
    error_columns,
    key_columns,
    list_of,
    logprob_columns,
    logprob_fields,
    output_columns,
    prompt_columns,
    text_columns,
)
from batchinf.tasks.generate.compare import TextChanges, TextVerification


def seed_of(job_seed: int, row_index: int, request_index: int) -> int:
    """A request's own seed, in [0, 2**63).

    With 31 bits, one row of 1,000 samples in 4,300 would have two equal seeds. A seed is not negative, because vLLM
    takes -1 for no seed. vLLM stores seeds as int64; CUDA generators use all bits, CPU generators the low 32.
    """
    digest = hashlib.blake2b(f"{job_seed},{row_index},{request_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generate(Task):
    """See `Task`. `spec.sampling` is resolved, so its temperature is never None."""

    name = "generate"
    comparison = TextChanges
    verification = TextVerification
    makes_text = True
    joins_requests = False

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._sampling = spec.sampling
        self._output = spec.output
        self._logprob_dtype = np.dtype(spec.output.logprobs_dtype)

    @property
    def draws_tokens(self) -> bool:
        return True

    @property
    def num_rows_per_input(self) -> int:
        return self._sampling.n

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
    def own(self) -> pa.Schema:
        results = list(super().own)
        return pa.schema([*results[:2], pa.field("sample_index", pa.int32()), *results[2:]])

    def result_fields(self) -> list[tuple[str, pa.DataType]]:
        output, sampling = self._output, self._sampling
        logprob = pa.float16() if output.logprobs_dtype == "float16" else pa.float32()
        return [
            ("text", pa.string()),
            *([("reasoning", pa.string())] if self.spec.model.reasoning_parser is not None else []),
            *([("token_ids", list_of(pa.int32()))] if output.include_token_ids else []),
            ("finish_reason", pa.string()),
            ("stop_reason", pa.string()),
            ("cumulative_logprob", pa.float64()),
            *logprob_fields("", _num_top(sampling), logprob),
            *chosen_fields(len(sampling.logprob_token_ids), logprob),
            *logprob_fields("prompt_", sampling.prompt_logprobs, logprob),
        ]

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """n requests. `max_tokens` is the user's, even if `max_model_len` leaves less; without one, all that fits."""
        sampling = prompt.sampling or self._sampling
        max_tokens = sampling.max_tokens or max(1, max_model_len - len(prompt.token_ids))
        is_greedy = sampling.temperature == 0
        return [
            Request(
                row_index=prompt.row_index,
                request_index=index,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                max_tokens=max_tokens,
                seed=None if is_greedy else seed_of(sampling.seed, prompt.row_index, index),
                logprob_token_ids=sampling.logprob_token_ids or None,
            )
            for index in range(sampling.n)
        ]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. A null is what was never produced."""
        sampling, dtype = self._sampling, self._logprob_dtype
        completions = [result.completion for result in results]
        logprobs = [None if c is None else c.logprobs for c in completions]
        prompt_logprobs = [None if c is None else c.prompt_logprobs for c in completions]
        arrays = {
            **key_columns(results),
            **prompt_columns(results, self._output.include_prompt),
            **output_columns(completions),
            **text_columns(results),
            **error_columns(results),
            **logprob_columns("", Tokens(logprobs), _num_top(sampling), dtype),
            **chosen_columns(Tokens(logprobs), len(sampling.logprob_token_ids), dtype),
            # The prompt's first token has no logprob: null at position 0 keeps these aligned to `prompt_token_ids`.
            **logprob_columns("prompt_", Tokens(prompt_logprobs, num_leading=1), sampling.prompt_logprobs, dtype),
        }
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`: each result is a row with a `sample_index`."""
        arrays = {name: results.column(name) for name in results.column_names}
        return self.output_table(columns, arrays | {"sample_index": arrays["request_index"]})


def _num_top(sampling: SamplingSpec) -> int | None:
    """Number of likeliest tokens that are stored, or None. Chosen tokens come with the token's own logprob and rank."""
    return 0 if sampling.logprob_token_ids else sampling.logprobs
