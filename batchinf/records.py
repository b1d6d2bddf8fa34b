"""Types of values in stored JSON: strict, and within the bounds that readers rely on.

A record that is read again declares its fields with them, so that one definition serves writing, reading and checking.
"""

import datetime
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from batchinf.base.errors import RowError
from batchinf.spec.sampling import SamplingSpec

Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
# Half characters are valid JSON, but no text: pydantic looks for them only where a length is asked for.
JsonText = Annotated[str, Field(strict=True, min_length=0)]
# One object for all equal texts, where few differ among many records.
SharedText = Annotated[JsonText, AfterValidator(sys.intern)]


def _is_time(text: str) -> str:
    if datetime.datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without its zone")
    return text


# In ISO format, with its zone.
Time = Annotated[JsonText, AfterValidator(_is_time)]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to be scored: those from `start` on, at least one, given those before, at least one too.

    num_bytes: of the text that they stand for; of a text in several windows the first has all.
    """

    token_ids: list[int]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is scored of a row: a continuation, each choice, or each window of a text. answer: the right choice."""

    spans: tuple[Span, ...]
    answer: int | None = None


IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
Uint64Array = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of rows that is cut on its own; rows that come later are a new extent, and earlier cuts never move.

    The first seven eighths are cut every `rows_per_shard` rows, the last eighth every `rows_per_shard // 4`, so that
    replicas end together. `start` is a place in the run order, `first_shard` the index of the first shard.
    The rows were chosen among those at the positions `first_row` to `stop_row` (exclusive) of the source. selection:
    digest of the file that says which they are; None where it is all of them. order: digest of the file that says in
    which order they run; None is that of their positions.
    """

    start: Count
    num_rows: Count
    rows_per_shard: PositiveCount
    first_shard: Count
    first_row: Count
    stop_row: Count
    selection: JsonText | None = None
    order: JsonText | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Places `start` to `stop` (exclusive) of the run order: the unit that is assigned, written and resumed.

    num_chosen: how many of its rows are to be run, where that is not all of them.
    """

    index: int
    start: int
    stop: int
    num_chosen: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows in the shard."""
        return self.stop - self.start

    @property
    def num_to_run(self) -> int:
        """Rows that are to be run."""
        return self.num_rows if self.num_chosen is None else self.num_chosen


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row made ready for an engine: its token ids, or why there are none.

    sampling: the row's own, where rows differ in it; None is the job's. is_truncated: it was cut to fit. positions: the
    row's own, from 0, of the tokens after which something is wanted. adapter: the name of its LoRA adapter; None is the
    plain model. scoring: what is scored of it; `token_ids` are then the context's and those of all continuations.
    has_second_bos: what the engine is given begins with two BOS.
    """

    row_index: int
    token_ids: list[int]
    text: str | None
    error: RowError | None
    sampling: SamplingSpec | None = None
    is_truncated: bool = False
    positions: tuple[int, ...] | None = None
    adapter: str | None = None
    scoring: Scoring | None = None
    has_second_bos: bool = False


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """Logits or logprobs that a request is after: `Completion.values`, one row for each position.

    positions: of the prompt's tokens, from 0, after which a row is wanted; None is where each output token was
    generated. token_ids: the columns; None is the whole vocabulary in its order. width: how many columns. dtype:
    `float16` or `float32`.
    """

    positions: Sequence[int] | None
    token_ids: tuple[int, ...] | None
    width: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Request:
    """What goes into an engine. `(row_index, request_index)` is its name within the job.

    adapter: the LoRA adapter to run it with; None is the plain model. logprob_token_ids: tokens whose logprobs are
    wanted at each output position, in the place of the likeliest ones. rows: logits that are wanted.
    """

    row_index: int
    request_index: int
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    max_tokens: int
    seed: int | None
    adapter: str | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    rows: RowsWanted | None = None

    @property
    def key(self) -> tuple[int, int]:
        """`(row_index, request_index)`."""
        return self.row_index, self.request_index


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of a run of tokens, in the order of the engine.

    token_ids: int32 [num_tokens, k + 1], the token itself first, then ranks 1 to k (the token may stand twice).
    logprobs: float32 [num_tokens, k + 1], natural logarithms.
    ranks: int32 [num_tokens], the token's own rank, from 1.
    """

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray


@dataclass(frozen=True, slots=True)
class Completion:
    """What comes out of an engine, finished.

    token_ids: int32 [num_output_tokens].
    finish_reason: `stop`, `length` or `repetition`; never a cut-short output.
    stop_reason: the stop string or token id that ended it; None for the end-of-sequence token.
    text: only where the engine itself had to decode (stop strings); else it is decoded later, in batches.
    prompt_logprobs: [num_prompt_tokens - 1, k + 1]: the first token has none.
    values: float [num_positions, width], what tasks other than text are after: logits, or pooled vectors.
    """

    request: Request
    token_ids: IntArray
    finish_reason: str
    stop_reason: int | str | None = None
    text: str | None = None
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    values: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished request, ready to be stored: a completion with its text, or an error.

    A row is finished when it has `num_requests` results. Text that was produced stays beside an error. reasoning: what
    the model thought before the text, where that is split off; the text is None where it never came to an end.
    """

    prompt: Prompt
    request_index: int
    num_requests: int
    completion: Completion | None
    text: str | None
    error: RowError | None
    attempts: int
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says of itself; it goes into the manifest and into each part's metadata."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    device: str
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One look at a running engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


# Few jobs have such a count: it is written only where it is not 0.
_RARE = {"is_rare": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCounts:
    """What is counted of a part's output rows. Each count is defined here and nowhere else.

    The record of a part, its manifest line, the entries of its footer, the checks of both and all sums derive from
    these fields. A new count is one more field, and the code that counts it in `output.counts.count_rows`.
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
    num_answered: Count = field(default=0, metadata=_RARE)
    """Rows with an `answer` and with scores."""
    num_right: Count = field(default=0, metadata=_RARE)
    """Rows whose `best` is the answer."""
    num_right_per_token: Count = field(default=0, metadata=_RARE)
    """Rows whose `best_per_token` is the answer."""
    num_right_per_byte: Count = field(default=0, metadata=_RARE)
    """Rows whose `best_per_byte` is the answer."""

    @classmethod
    def sum(cls, counts: Iterable["PartCounts"]) -> Self:
        """The sum of each count."""
        sums = map(sum, zip(*map(_counts_of, counts), strict=True))
        return cls(**dict(zip(COUNT_NAMES, sums, strict=False)))

    def __add__(self, other: "PartCounts") -> Self:
        return self.sum((self, other))

    def written(self) -> dict[str, int]:
        """The counts by name, as a manifest line and a footer have them."""
        counts = zip(COUNT_NAMES, _counts_of(self), strict=True)
        return {name: number for name, number in counts if number or name in ALWAYS_WRITTEN}


COUNT_NAMES = tuple(count.name for count in fields(PartCounts))
_counts_of = operator.attrgetter(*COUNT_NAMES)
ALWAYS_WRITTEN = frozenset(count.name for count in fields(PartCounts) if not count.metadata.get("is_rare"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(PartCounts):
    """A Parquet file that holds one whole shard, and its manifest line. About 500 bytes of memory.

    file: its name in `staging/` or, once published, what it will be in `parts/`.
    digest: xxh3-128 of its bytes.
    retry: the last retry that it has been through; 0 for none.
    replica, incarnation: which made it, where that is known.
    num_kept, num_kept_errors: rows, and errors among them, that it has from the part in whose place it comes. The
    coordinator that commits the part needs them; they are not written.
    """

    shard: Count
    file: JsonText
    num_bytes: Count
    digest: JsonText
    retry: Count = 0
    replica: Count | None = None
    incarnation: SharedText = ""
    num_kept: Count = field(default=0, metadata={"is_written": False})
    num_kept_errors: Count = field(default=0, metadata={"is_written": False})


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """An incarnation of a replica, as its `replica_started` event says.

    identity: JSON values by which the backend of that name finds it again, such as a process group. Only that backend
    reads them.
    """

    replica: Count
    incarnation: JsonText
    backend: JsonText
    identity: dict[JsonText, Any]
