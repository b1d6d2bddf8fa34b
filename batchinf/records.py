"""What a row becomes on its way through a job: prompt, request, completion and result; and its lease and its part.

Frozen data, which all packages share. The row itself is `source.rows.Row`.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from batchinf.base.errors import RowError
from batchinf.base.json_types import Count, Flag, JsonText, PositiveCount, SharedText
from batchinf.spec.sampling import SamplingSpec

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to score: those from `start` on, given those before it. Both are at least one token."""

    token_ids: list[int]
    start: int
    num_bytes: int
    """Of the scored text in UTF-8. If a text has several windows, the first has all its bytes."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The spans of a row: a continuation, each choice, or each window of a text."""

    spans: tuple[Span, ...]
    answer: int | None = None
    """Index of the right choice; None if it is unknown."""
    answer_error: str | None = None
    """Why the row's own value is no choice."""
    neutral: tuple[Span, ...] = ()
    """The same choices after the neutral context; empty if the job has none."""
    joined: str | None = None
    """The first scored text that has a token in common with its context, so that its beginning is not scored."""


@dataclass(frozen=True, slots=True)
class Reranking:
    """How the scores of a row's documents follow from the results of its inputs."""

    num_queries: int
    """How many of the inputs are queries, the first ones; the others are documents. 0: each input is a pair."""
    top_n: int | None = None
    """How many documents the row's ranking has; None: it has no ranking."""
    token_type_starts: tuple[int | None, ...] = ()
    """Of each input, see `Request.token_type_start`."""
    use_activation: bool | None = None
    """See `Request.use_activation`."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that the model may call in its answer to a row."""

    functions: str
    """A list of OpenAI's tools as JSON text."""
    choice: Literal["auto", "required", "named"] = "auto"
    """Whether the model may call one of them, must call one, or must call the one that is named."""
    name: str | None = None
    """With `named`: the tool's name."""
    are_parallel: bool = True
    """Whether an answer may have several calls."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row made ready for an engine: its token ids, or the error why there are none."""

    row_index: int
    token_ids: list[int]
    text: str | None
    error: RowError | None
    sampling: SamplingSpec | None = None
    """The row's own; None is the job's."""
    is_truncated: bool = False
    """Whether the prompt was cut to fit."""
    positions: tuple[int, ...] | None = None
    """The row's own token positions, from 0, after which values are returned."""
    value_token_ids: tuple[tuple[int, ...], ...] | None = None
    """The row's own tokens whose logits are stored: one list for all positions, or one for each."""
    adapter: str | None = None
    """The name of its LoRA adapter; None is the plain model."""
    scoring: Scoring | None = None
    """The spans to score; `token_ids` are then the context's and those of all continuations."""
    has_second_bos: bool = False
    """Whether the engine's prompt begins with two BOS tokens."""
    inputs: tuple[list[int], ...] = ()
    """The token ids of each text of a row that has several, one request each; `token_ids` are then those of all."""
    dimensions: int | None = None
    """See `Request.dimensions`."""
    reranking: Reranking | None = None
    """What the `inputs` are, if they are queries and documents."""
    request: str | None = None
    """Of a line of a batch file: its URL, and what it asks of the form of its answer, as JSON text."""
    line_seed: int | None = None
    """The seed of a line of a batch file, from which its requests count on: see `Task.drawing_request`."""
    tools: Tools | None = None
    """Those whose calls are parsed; None: the text is taken as it is."""
    template_kwargs: str | None = None
    """The row's own variables of the chat template as JSON text, on which parsers of vLLM depend; None: the job's."""
    parts: "tuple[Prompt, ...]" = ()
    """The prompts of a row that has several, each with its own requests; `token_ids` are then those of all."""
    first_request: int = 0
    """Of a part: the index of its first request among those of the row."""
    image_sources: tuple[Any, ...] = ()
    """Where its images come from; `token_ids` then have one placeholder for each. Empty once they are loaded."""
    image_digests: tuple[str, ...] | None = None
    """SHA-256 of each image's bytes; None until they are loaded."""
    image_shapes: tuple[tuple[str, int, int], ...] = ()
    """Of each image with a digest: Pillow's name of the format; width and height of the upright image, in pixels."""
    image_positions: IntArray | None = None
    """The positions in `token_ids` at which the model sees images and no tokens."""
    unrendered_hash: int | None = None
    """Hash of `token_ids` with one placeholder for each image, and of the digests; None until they are loaded."""

    def part_of(self, request_index: int) -> "Prompt":
        """The part that has this request; the prompt itself if it has no parts."""
        return next((part for part in reversed(self.parts) if part.first_request <= request_index), self)


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """The logits or logprobs that a request asks for: `Completion.values` has one row for each position."""

    positions: Sequence[int] | None
    """Prompt tokens, from 0, after which a row is returned; None means a row for each generated token."""
    token_ids: tuple[int, ...] | None
    """The columns that the engine returns; None is the whole vocabulary in order."""
    width: int
    """Number of these columns."""
    dtype: str
    """`float16` or `float32`."""
    own_token_ids: tuple[tuple[int, ...], ...] | None = None
    """Tokens of this request, of which alone the numbers are kept: one list for all positions, or one for each."""

    def own_columns(self, rows: FloatArray) -> FloatArray:
        """[num_positions, num_ids] of the kept tokens, from rows [num_positions, width] of all."""
        if self.own_token_ids is None:
            return rows
        return np.take_along_axis(rows, np.array(self.own_token_ids), axis=1)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine. `(row_index, request_index)` names it within the job."""

    row_index: int
    request_index: int
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    _: KW_ONLY
    max_tokens: int = 1
    seed: int | None = None
    adapter: str | None = None
    """The LoRA adapter to run it with; None is the plain model."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Tokens whose logprobs are returned at each output position, instead of the likeliest tokens."""
    rows: RowsWanted | None = None
    """The logits to return."""
    tools: Tools | None = None
    """See `Prompt.tools`."""
    template_kwargs: str | None = None
    """See `Prompt.template_kwargs`."""
    dimensions: int | None = None
    """Numbers to which the pooling runner cuts its vector, in place of the job's."""
    use_activation: bool | None = None
    """Whether the pooling runner applies the model's activation, in place of the job's choice."""
    token_type_start: int | None = None
    """Place of the first token of type 1, the second of two texts; None: all tokens have type 0."""
    rendered: Any = None
    """The engine's own form of a prompt with images, with their tensors; None: the ids are the whole prompt."""
    is_shared: bool = False
    """Many rows may have the same request. A replica runs it once and gives its result to all of them."""

    @property
    def key(self) -> tuple[int, int]:
        return self.row_index, self.request_index


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of consecutive tokens, in the engine's order."""

    token_ids: IntArray
    """[num_tokens, k + 1], the token itself first, then ranks 1 to k (the token may stand twice)."""
    logprobs: FloatArray
    """[num_tokens, k + 1], natural logarithms."""
    ranks: IntArray
    """[num_tokens], the token's own rank, from 1."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, as the engine returns it. An aborted request makes no completion."""

    request: Request
    token_ids: IntArray
    """[num_output_tokens]."""
    finish_reason: str
    """`stop`, `length` or `repetition`; `error` if the engine cannot follow the request's structure, with its words as
    `stop_reason`."""
    stop_reason: int | str | None = None
    """The stop string or token id that ended it; None for the end-of-sequence token."""
    text: str | None = None
    """Set only if the engine itself decoded it (stop strings). Otherwise the writer decodes it, in batches."""
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    """[num_prompt_tokens - 1, k + 1]: the first token has none."""
    values: npt.NDArray[Any] | None = None
    """Float [num_positions, width]: logits or pooled vectors."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model made."""

    id: str
    name: str
    arguments: str
    """A JSON mapping as text."""


@dataclass(frozen=True, slots=True)
class Result:
    """One finished request: a completion or an error, and what the writer reads in the completion.

    A row is finished when it has `num_requests` results.
    """

    prompt: Prompt
    request_index: int
    num_requests: int
    completion: Completion | None
    text: str | None
    """Text that was produced is kept beside an error. None if a reasoning parser splits the reasoning off, and the
    reasoning did not end."""
    error: RowError | None
    attempts: int
    reasoning: str | None = None
    """The text before the answer, if a reasoning parser splits it off."""
    tool_calls: tuple[ToolCall, ...] | None = None
    """The calls in the answer; None without any."""
    num_reasoning_tokens: int | None = None
    """Output tokens of the reasoning, without its marks; None if they are not counted."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Places `start` to `stop` (exclusive) of the run order: the rows of one part."""

    index: Count
    start: Count
    stop: Count

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Lease(Shard):
    """Rows of one shard that a replica is given: all of them, or consecutive places of them.

    index: the shard's.
    """

    num_chosen: Count | None = None
    """How many of these rows run in a retry; None if all run."""
    is_whole: Flag = True
    """Whether these are all rows of the shard: the replica then makes the part. Otherwise it journals their results."""
    is_stored: Flag = False
    """Whether the journal has the results of all rows, by replicas that ran parts of the shard."""
    attempts: PositiveCount = 1
    """The number of the try, from 1."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Its name in messages: shard, start and stop.

        Without the stop, a late message about a lease that was given back could seem to be about the whole shard, which
        the same replica was given meanwhile to make its part.
        """
        return self.index, self.start, self.stop

    @property
    def num_to_run(self) -> int:
        """Rows that have to run, as far as is known without the journal."""
        if self.is_stored:
            return 0
        return self.num_rows if self.num_chosen is None else self.num_chosen


# Counts that few jobs have are written only if they are not 0.
_RARE = {"is_rare": True}
_NOT_WRITTEN = {"is_written": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """Counts of a part's output rows. Manifest lines, footers, their checks and all sums derive from these fields.

    They are counted while the part is written, so `status` adds up lines and reads no part. A new count of all tasks is
    one more field, and code for it in `count_rows` of `output/counts.py`; a task counts in `Task.count`.
    """

    num_rows: Count = 0
    num_errors: Count = 0
    num_prompt_tokens: Count = 0
    """Tokens of the prompts that an engine answered."""
    num_output_tokens: Count = 0
    num_nan_rows: Count = 0
    """Rows with a NaN among the model's numbers."""
    num_inf_rows: Count = 0
    """Rows with an infinity among the model's numbers."""
    num_second_bos: Count = field(default=0, metadata=_RARE)
    """Rows whose prompts begin with two BOS tokens."""
    task_counts: dict[SharedText, Count] | None = field(default=None, metadata=_RARE)
    """The task's own counts, by name; None if it has none."""

    @classmethod
    def sum(cls, counts: Iterable["PartCounts"]) -> Self:
        parts = list(counts)
        numbers = map(sum, zip(*map(_numbers_of, parts), strict=True))
        of_task: Counter[str] | None = None
        for part in parts:
            if part.task_counts is not None:
                of_task = of_task or Counter(dict.fromkeys(part.task_counts, 0))
                of_task.update(part.task_counts)
        task_counts = None if of_task is None else dict(of_task)
        return cls(**dict(zip(_NUMBER_NAMES, numbers, strict=False)), task_counts=task_counts)

    def __add__(self, other: "PartCounts") -> Self:
        return self.sum((self, other))

    def written(self) -> dict[str, Any]:
        """The counts by name, as a manifest line and a footer have them."""
        counts = ((name, getattr(self, name)) for name in COUNT_NAMES)
        return {name: count for name, count in counts if count or name in ALWAYS_WRITTEN}


COUNT_NAMES = tuple(count.name for count in fields(PartCounts))
ALWAYS_WRITTEN = frozenset(count.name for count in fields(PartCounts) if not count.metadata.get("is_rare"))
_NUMBER_NAMES = tuple(name for name in COUNT_NAMES if name != "task_counts")
_numbers_of = operator.attrgetter(*_NUMBER_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(PartCounts):
    """A Parquet file that holds one whole shard, and its manifest line. About 500 bytes of memory."""

    shard: Count
    num_bytes: Count
    digest: JsonText
    """xxh3-128 of its bytes, which its name in `staging/` has, too."""
    retry: Count = 0
    """The last retry that it has been through; 0 for none."""
    replica: Count | None = None
    """Which replica made it, if known."""
    incarnation: SharedText = ""
    num_kept: Count = field(default=0, metadata=_NOT_WRITTEN)
    """Rows that a retry copied from the part that this one replaces, for the coordinator that commits the part."""
    num_kept_errors: Count = field(default=0, metadata=_NOT_WRITTEN)
    """Errors among these rows."""
    replaces: JsonText = field(default="", metadata=_NOT_WRITTEN)
    """The digest of the part from which a retry made it."""
