"""A sample of a job's rows, spread evenly. `validate` and `plan` read it."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from batchinf.records import Int64Array

MOST_SAMPLED = 1000
# Rows to read together. In an input with large row groups, one row takes as long as these.
RUN_ROWS = 10


class ChosenRows(Sequence[int]):
    """Positions of rows, ascending, which are looked up on access."""

    def __init__(self, num_rows: int, rows: Callable[[int, int], Int64Array]) -> None:
        """rows: returns the positions of the rows with numbers `start` to `stop` (exclusive)."""
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


def sample_rows(positions: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """At most 1,000 of these rows, ascending, in short groups that are spread evenly. The seed determines the rows."""
    if len(positions) <= MOST_SAMPLED:
        yield positions
        return
    draw, num_runs = random.Random(seed), MOST_SAMPLED // RUN_ROWS
    for run in range(num_runs):
        first, stop = (len(positions) * number // num_runs for number in (run, run + 1))
        start = draw.randint(first, stop - RUN_ROWS)
        yield positions[start : start + RUN_ROWS]
