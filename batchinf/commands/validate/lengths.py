"""How long an input's prompts are, from a sample of its rows: a histogram, and what will be error rows."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from batchinf.fleet.status import short_count
from batchinf.records import Prompt

MOST_SAMPLED = 1000
# Rows that are read together: an input with large row groups takes as long for one row as for these.
_RUN_ROWS = 10
_MOST_BARS = 12
_COLUMNS = 80
_MOST_CHARS = 120  # of what is said of an error
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(slots=True)
class TokenLengths:
    """Of a sample. num_rows: of the whole input. room: the longest prompt and output together, None if not known.

    lengths: of prompts without an error. errors: rows by error type; firsts: the first of each. num_truncated: prompts
    that were cut to fit. num_tight: those after which `max_tokens` do not fit.
    """

    num_rows: int
    room: int | None
    max_tokens: int | None
    lengths: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, Prompt] = field(default_factory=dict)
    num_truncated: int = 0
    num_tight: int = 0

    def add(self, prompt: Prompt) -> None:
        """Take in a row."""
        if prompt.error is not None:
            self.errors[prompt.error.error_type] += 1
            self.firsts.setdefault(prompt.error.error_type, prompt)
            return
        length, sampling = len(prompt.token_ids), prompt.sampling
        self.lengths.append(length)
        self.num_truncated += prompt.is_truncated
        wanted = self.max_tokens if sampling is None else sampling.max_tokens
        self.num_tight += wanted is not None and self.room is not None and length + wanted > self.room

    @property
    def num_sampled(self) -> int:
        """Rows that were looked at."""
        return len(self.lengths) + self.errors.total()

    def lines(self) -> Iterator[str]:
        """For people."""
        is_all = self.num_sampled == self.num_rows
        which = f"all {self.num_rows:,}" if is_all else f"{self.num_sampled:,} of {self.num_rows:,}"
        yield f"prompt lengths in tokens ({which} rows):"
        if self.lengths:
            yield from bars(self.lengths)
            lengths = sorted(self.lengths)
            total = sum(lengths) * self.num_rows // self.num_sampled
            yield (
                f"  p50 {lengths[len(lengths) // 2]:,} · p95 {lengths[len(lengths) * 95 // 100]:,} · "
                f"max {lengths[-1]:,} · {'' if is_all else 'about '}{short_count(total)} prompt tokens in all"
            )
        if self.num_tight:
            verb = "leaves" if self.num_tight == 1 else "leave"
            yield f"  {self.num_tight:,} of them {verb} less than max_tokens below max_model_len {self.room:,}"
        if self.num_truncated:
            verb = "is" if self.num_truncated == 1 else "are"
            yield f"  {self.num_truncated:,} of them {verb} cut to fit (prompt_truncated)"
        if self.errors:
            yield f"  {self.errors.total():,} of {self.num_sampled:,} rows will be error rows:"
            for name, number in self.errors.most_common():
                first = self.firsts[name]
                words = " ".join(f"{number:,} {name}, first row {first.row_index:,}: {_message(first)}".split())
                yield f"    {words if len(words) <= _MOST_CHARS else words[: _MOST_CHARS - 1] + '…'}"


def _message(prompt: Prompt) -> str:
    return "" if prompt.error is None else prompt.error.error_message


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


def bars(lengths: Sequence[int]) -> Iterator[str]:
    """A histogram in 80 columns: even steps or, where the longest are far from the others, doubling ones."""
    edges = _edges(sorted(lengths))
    counts = [0] * (len(edges) - 1)
    for length in lengths:
        counts[next(number for number in range(len(counts)) if length < edges[number + 1])] += 1
    labels = [f"{low:,}" if high - low == 1 else f"{low:,} – {high - 1:,}" for low, high in itertools.pairwise(edges)]
    label_width, count_width = max(map(len, labels)), len(f"{max(counts):,}")
    most = _COLUMNS - label_width - count_width - 6
    for label, number in zip(labels, counts, strict=True):
        yield f"  {label:>{label_width}}  {number:>{count_width},}  {_bar(number / max(counts) * most)}".rstrip()


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


def _bar(width: float) -> str:
    whole, eighths = divmod(round(width * 8), 8)
    # The least is seen, too.
    return "█" * whole + _EIGHTHS[eighths or (1 if not whole and width > 0 else 0)].strip()
