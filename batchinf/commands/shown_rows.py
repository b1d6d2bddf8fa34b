"""The rows that `validate` shows, as they will run, and the prompt lengths of a sample of rows."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError, RowError
from batchinf.base.text import reason
from batchinf.prompts.encoder import show
from batchinf.records import Prompt, Request, Span
from batchinf.source.rows import Source
from batchinf.spec.sampling import SamplingSpec

_MOST_BARS = 12


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Number of rows whose prompts have `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class PromptErrors:
    """Rows of the sample that will have an error of one type for one reason, and the first of them."""

    error_type: str
    num_rows: int
    first_row: int
    first_message: str


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Prompt lengths in tokens, from a sample of `num_sampled` of the `num_rows` rows that run."""

    num_rows: int
    num_sampled: int
    max_model_len: int | None
    """None: unknown."""
    histogram: tuple[LengthRange, ...]
    """Of prompts without an error, ascending."""
    p50: int | None
    """None without such prompts, as are `p95` and `longest`."""
    p95: int | None
    longest: int | None
    num_tokens: int
    """Of all rows, estimated from the sample."""
    num_tight: int
    """Rows whose prompt leaves no room for `max_tokens`."""
    num_truncated: int
    """Prompts that were cut to fit."""
    errors: tuple[PromptErrors, ...]
    """The most frequent first."""


@dataclass(slots=True)
class LengthCounts:
    """Counts the prompts of a sample."""

    num_rows: int
    """Rows that run."""
    room: int | None
    """The most tokens of prompt and output together; None: unknown."""
    max_tokens: int | None
    lengths: list[int] = field(default_factory=list)
    """Of prompts without an error."""
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by type and reason."""
    firsts: dict[tuple[str, str], PromptErrors] = field(default_factory=dict)
    """The first of each."""
    num_truncated: int = 0
    num_tight: int = 0

    def add(self, prompt: Prompt) -> None:
        if (error := prompt.error) is not None:
            key = error.error_type, reason(error.error_message)
            self.errors[key] += 1
            self.firsts.setdefault(key, PromptErrors(error.error_type, 0, prompt.row_index, error.error_message))
            return
        length = len(prompt.token_ids)
        self.lengths.append(length)
        self.num_truncated += prompt.is_truncated
        max_tokens = self.max_tokens if prompt.sampling is None else prompt.sampling.max_tokens
        self.num_tight += max_tokens is not None and self.room is not None and length + max_tokens > self.room

    def summary(self) -> PromptLengths:
        lengths = sorted(self.lengths)
        num_sampled = len(lengths) + self.errors.total()
        errors = (replace(self.firsts[key], num_rows=number) for key, number in self.errors.most_common())
        return PromptLengths(
            num_rows=self.num_rows,
            num_sampled=num_sampled,
            max_model_len=self.room,
            histogram=histogram(lengths),
            p50=lengths[len(lengths) // 2] if lengths else None,
            p95=lengths[len(lengths) * 95 // 100] if lengths else None,
            longest=lengths[-1] if lengths else None,
            num_tokens=sum(lengths) * self.num_rows // max(1, num_sampled),
            num_tight=self.num_tight,
            num_truncated=self.num_truncated,
            errors=tuple(errors),
        )


def histogram(lengths: Sequence[int]) -> tuple[LengthRange, ...]:
    """Equal steps, or doubling steps if the longest prompts are far longer than the median."""
    if not lengths:
        return ()
    edges = _edges(sorted(lengths))
    ranges = zip(itertools.pairwise(edges), np.histogram(lengths, edges)[0].tolist(), strict=True)
    return tuple(LengthRange(low, high - 1, number) for (low, high), number in ranges)


def _edges(lengths: Sequence[int]) -> list[int]:
    """Ascending edges. The first is at most the shortest length, the last is above the longest."""
    shortest = lengths[0]
    longest = lengths[-1]
    if longest > 8 * max(1, lengths[len(lengths) // 2]):
        edges = [0 if shortest == 0 else 1 << (shortest.bit_length() - 1)]
        while edges[-1] <= longest:
            edges.append(max(1, 2 * edges[-1]))
        return edges
    step = next(
        base * 10**power
        for power in range(10)
        for base in (1, 2, 5)
        if (longest // (base * 10**power)) - (shortest // (base * 10**power)) < _MOST_BARS
    )
    return list(range(shortest // step * step, longest + step + 1, step))[: longest // step - shortest // step + 2]


_LOOK_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class RowSetting:
    """A field of sampling whose value a row changes."""

    name: str
    value: Any
    job_value: Any


@dataclass(frozen=True, slots=True)
class ShownSampling:
    """The sampling of a row."""

    own: tuple[RowSetting, ...]
    """Fields other than max_tokens that differ from the job's."""
    max_tokens: int | None
    """None: as many as fit."""
    job_max_tokens: int | None
    num_left: int | None
    """Tokens that fit after the prompt; None: unknown."""
    seed: int | None
    """Of the first sample; None: greedy."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A continuation, a choice or a window of a text."""

    context: str
    num_context_tokens: int
    text: str
    token_ids: tuple[int, ...]
    """The scored tokens."""
    is_answer: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as it will run."""

    row_index: int
    id: Any
    """From the job's `id_column`; None without one."""
    error: RowError | None
    """Why it will be an error row; other fields are then empty."""
    text: str = ""
    """The prompt as the model sees it."""
    token_ids: tuple[int, ...] = ()
    is_truncated: bool = False
    max_model_len: int | None = None
    """None: unknown."""
    sampling: ShownSampling | None = None
    """None if the task makes no text."""
    scored: tuple[ScoredText, ...] = ()
    """For tasks that score prompts."""
    is_run: bool = True
    """Whether the job runs it."""
    is_named: bool = False
    """Whether the user named this row."""


def shown_row(
    prompt: Prompt,
    row_id: object,
    request: Request,
    *,
    tokenizer: object,
    job_sampling: SamplingSpec | None,
    max_model_len: int | None,
    is_run: bool,
    is_named: bool,
) -> ShownRow:
    """request: the row's first one. job_sampling: None if the task makes no text."""
    if prompt.error is not None:
        return ShownRow(prompt.row_index, row_id, prompt.error, is_run=is_run, is_named=is_named)
    left = None if max_model_len is None else max_model_len - len(prompt.token_ids)
    return ShownRow(
        row_index=prompt.row_index,
        id=row_id,
        error=None,
        text=show(tokenizer, prompt.token_ids) if prompt.scoring is None else "",
        token_ids=tuple(prompt.token_ids),
        is_truncated=prompt.is_truncated,
        max_model_len=max_model_len,
        sampling=None if job_sampling is None else _sampling(request, prompt.sampling, job_sampling, left),
        scored=() if prompt.scoring is None else _scored(prompt.scoring.spans, prompt.scoring.answer, tokenizer),
        is_run=is_run,
        is_named=is_named,
    )


def _sampling(request: Request, own: SamplingSpec | None, job: SamplingSpec, left: int | None) -> ShownSampling:
    values = {} if own is None else job.model_dump(exclude={"columns", "structured_outputs", "max_tokens"})
    changed = (RowSetting(name, getattr(own, name), value) for name, value in values.items())
    return ShownSampling(
        own=tuple(setting for setting in changed if setting.value != setting.job_value),
        max_tokens=job.max_tokens if own is None else own.max_tokens,
        job_max_tokens=job.max_tokens,
        num_left=left,
        seed=request.seed,
        num_samples=job.n,
    )


def _scored(spans: Sequence[Span], answer: int | None, tokenizer: object) -> tuple[ScoredText, ...]:
    contexts: dict[tuple[int, ...], str] = {}
    texts = []
    for number, span in enumerate(spans):
        context = tuple(span.token_ids[: span.start])
        scored = span.token_ids[span.start :]
        if context not in contexts:
            contexts = {context: show(tokenizer, context)}
        text = ScoredText(
            context=contexts[context],
            num_context_tokens=span.start,
            text=show(tokenizer, scored),
            token_ids=tuple(scored),
            is_answer=number == answer,
        )
        texts.append(text)
    return tuple(texts)


def random_rows(positions: Sequence[int], num_rows: int, seed: int) -> list[int]:
    """A random sample of these rows, in their order. The seed determines it."""
    drawn = random.Random(seed).sample(range(len(positions)), min(num_rows, len(positions)))
    return [positions[number] for number in sorted(drawn)]


def find_row(source: Source, id_column: str | None, text: str) -> int:
    """The first row with this id, converted to the column's type; without a column of ids, the row at this position.

    Reads the column up to that row. Raises InputError.
    """
    if id_column is None:
        if not text.isascii() or not text.isdigit() or int(text) >= source.num_rows:
            raise InputError(
                f"--row {text}: the job has no id_column, so a row is named by its position, 0 to "
                f"{source.num_rows - 1:,}"
            )
        return int(text)
    field = source.schema.field(id_column)
    try:
        ids = pa.array([text]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"--row {text}: the ids in '{field.name}' are {field.type}; give one of them") from None
    for start in range(0, source.num_rows, _LOOK_ROWS):
        table = source.read_columns(start, min(start + _LOOK_ROWS, source.num_rows), [id_column], {})
        place: int = pc.index(pc.is_in(table.column(0), ids), True).as_py()
        if place >= 0:
            return start + place
    raise InputError(f"--row {text}: none of {source.num_rows:,} rows has this in '{id_column}' ({field.type})")
