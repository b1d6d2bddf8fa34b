"""How long an input's prompts are, from a sample of its rows, and which of them will be error rows. For `validate`."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from batchinf.records import Prompt

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
    counts = [0] * (len(edges) - 1)
    for length in lengths:
        counts[next(number for number in range(len(counts)) if length < edges[number + 1])] += 1
    ranges = zip(itertools.pairwise(edges), counts, strict=True)
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
