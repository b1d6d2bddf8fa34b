"""Rows that `validate` shows, each as it will run, and how long the prompts of a sample of rows are."""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError, RowError
from batchinf.prompts.encoder import show
from batchinf.records import Int64Array, Prompt, Request, Span
from batchinf.source.rows import Source
from batchinf.source.types import is_json_column
from batchinf.spec.sampling import SamplingSpec

MOST_SAMPLED = 1000
# Rows that are read together: an input with large row groups takes as long for one row as for these.
_RUN_ROWS = 10
_MOST_BARS = 12


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Prompts of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class PromptErrors:
    """Rows of the sample that will be error rows of one type, and the first of them."""

    error_type: str
    num_rows: int
    first_row: int
    first_message: str


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Lengths in tokens of the prompts of `num_sampled` rows, of `num_rows` that are run.

    histogram: of prompts without an error, ascending; p50, p95 and longest: None where there are none. num_tokens: of
    all rows, estimated from the sample. max_model_len: None if it is not known. num_tight: rows after whose prompt
    `max_tokens` do not fit. num_truncated: prompts that were cut to fit. errors: the most frequent first.
    """

    num_rows: int
    num_sampled: int
    max_model_len: int | None
    histogram: tuple[LengthRange, ...]
    p50: int | None
    p95: int | None
    longest: int | None
    num_tokens: int
    num_tight: int
    num_truncated: int
    errors: tuple[PromptErrors, ...]


@dataclass(slots=True)
class LengthCounts:
    """Counts a sample. num_rows: that are run. room: the longest prompt and output together, None if not known.

    lengths: of prompts without an error. errors: rows by error type; firsts: the first of each. num_truncated,
    num_tight: see `PromptLengths`.
    """

    num_rows: int
    room: int | None
    max_tokens: int | None
    lengths: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, PromptErrors] = field(default_factory=dict)
    num_truncated: int = 0
    num_tight: int = 0

    def add(self, prompt: Prompt) -> None:
        """Take in a row."""
        if (error := prompt.error) is not None:
            self.errors[error.error_type] += 1
            first = PromptErrors(error.error_type, 0, prompt.row_index, error.error_message)
            self.firsts.setdefault(error.error_type, first)
            return
        length, sampling = len(prompt.token_ids), prompt.sampling
        self.lengths.append(length)
        self.num_truncated += prompt.is_truncated
        wanted = self.max_tokens if sampling is None else sampling.max_tokens
        self.num_tight += wanted is not None and self.room is not None and length + wanted > self.room

    def summary(self) -> PromptLengths:
        """What was counted."""
        lengths, num_sampled = sorted(self.lengths), len(self.lengths) + self.errors.total()
        errors = (
            PromptErrors(name, number, self.firsts[name].first_row, self.firsts[name].first_message)
            for name, number in self.errors.most_common()
        )
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


def sample_rows(positions: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """At most 1,000 of these rows in short runs, spread evenly over all of them: ascending, the same for a seed."""
    if len(positions) <= MOST_SAMPLED:
        yield positions
        return
    draw, num_runs = random.Random(seed), MOST_SAMPLED // _RUN_ROWS
    for run in range(num_runs):
        first, stop = (len(positions) * number // num_runs for number in (run, run + 1))
        start = draw.randint(first, stop - _RUN_ROWS)
        yield positions[start : start + _RUN_ROWS]


def histogram(lengths: Sequence[int]) -> tuple[LengthRange, ...]:
    """Even steps or, where the longest are far from the others, doubling ones."""
    if not lengths:
        return ()
    edges = _edges(sorted(lengths))
    ranges = zip(itertools.pairwise(edges), np.histogram(lengths, edges)[0].tolist(), strict=True)
    return tuple(LengthRange(low, high - 1, number) for (low, high), number in ranges)


def _edges(lengths: Sequence[int]) -> list[int]:
    """Ascending; the first is the shortest length or below it, the last above the longest."""
    shortest, longest = lengths[0], lengths[-1]
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
    """A field of sampling in which a row differs from the job."""

    name: str
    value: Any
    job_value: Any


@dataclass(frozen=True, slots=True)
class ShownSampling:
    """How a row is sampled.

    own: fields that are not the job's, but for max_tokens, whose None is what fits. num_left: tokens that fit after its
    prompt; None if that is not known. seed: of the first sample; None is greedy.
    """

    own: tuple[RowSetting, ...]
    max_tokens: int | None
    job_max_tokens: int | None
    num_left: int | None
    seed: int | None
    num_samples: int


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A continuation, a choice or a window of a text. token_ids: those that are scored."""

    context: str
    num_context_tokens: int
    text: str
    token_ids: tuple[int, ...]
    is_answer: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as it will run.

    id: of the column `id_column`; None if the job has none. error: why it will be an error row; the rest is then empty.
    text: the prompt as the model sees it. max_model_len: None if it is not known. sampling: None where no text is made.
    scored: of a task that scores prompts. is_run: the job runs it. is_named: the user asked for this row.
    """

    row_index: int
    id: Any
    error: RowError | None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    is_truncated: bool = False
    max_model_len: int | None = None
    sampling: ShownSampling | None = None
    scored: tuple[ScoredText, ...] = ()
    is_run: bool = True
    is_named: bool = False


def shown_row(
    prompt: Prompt,
    row_id: object,
    request: Request,
    tokenizer: object,
    job_sampling: SamplingSpec | None,
    max_model_len: int | None,
    *,
    is_run: bool,
    is_named: bool,
) -> ShownRow:
    """request: the row's first. job_sampling: None where no text is made."""
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
    found = []
    ids: list[int] | None = None
    context = ""
    for number, span in enumerate(spans):
        if span.token_ids[: span.start] != ids:
            ids = span.token_ids[: span.start]
            context = show(tokenizer, ids)
        own = span.token_ids[span.start :]
        found.append(ScoredText(context, span.start, show(tokenizer, own), tuple(own), number == answer))
    return tuple(found)


class ChosenRows(Sequence[int]):
    """Positions of rows, ascending, which are looked up when they are asked for."""

    def __init__(self, num_rows: int, rows: Callable[[int, int], Int64Array]) -> None:
        """rows: the positions of those number `start` to `stop` (exclusive)."""
        self._num_rows, self._rows = num_rows, rows

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(index)
            return int(self._rows(index % len(self), index % len(self) + 1)[0])
        start, stop, step = index.indices(len(self))
        found: list[int] = self._rows(start, max(start, stop)).tolist()
        return found[::step]


def random_rows(positions: Sequence[int], num_rows: int, seed: int) -> list[int]:
    """So many of these rows, ascending, the same for a seed."""
    drawn = random.Random(seed).sample(range(len(positions)), min(num_rows, len(positions)))
    return [positions[number] for number in sorted(drawn)]


def find_row(source: Source, id_column: str | None, wanted: str) -> int:
    """The first row with this id, read as the column's own type; where there are no ids, the row at this position.

    Reads the column up to there. Raises InputError.
    """
    if id_column is None:
        return _position(source, wanted)
    field = source.schema.field(id_column)
    ids = _as_type(field, wanted)
    for start in range(0, source.num_rows, _LOOK_ROWS):
        table = source.read_columns(start, min(start + _LOOK_ROWS, source.num_rows), [id_column])
        place: int = pc.index(pc.is_in(table.column(0), ids), True).as_py()
        if place >= 0:
            return start + place
    raise InputError(f"--row {wanted}: none of {source.num_rows:,} rows has this in '{id_column}' ({field.type})")


def _position(source: Source, wanted: str) -> int:
    if not wanted.isascii() or not wanted.isdigit() or int(wanted) >= source.num_rows:
        raise InputError(
            f"--row {wanted}: the job has no id_column, so a row is named by its position, 0 to {source.num_rows - 1:,}"
        )
    return int(wanted)


def _as_type(field: pa.Field, wanted: str) -> pa.Array:
    """What the column may hold for it. A column of mixed types holds JSON."""
    if is_json_column(field):
        return pa.array(list(dict.fromkeys([wanted, json.dumps(wanted, ensure_ascii=False), json.dumps(wanted)])))
    try:
        return pa.array([wanted]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"--row {wanted}: the ids in '{field.name}' are {field.type}; give one of them") from None
