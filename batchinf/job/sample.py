"""A sample of a job's rows, spread evenly. `validate` and `plan` read it."""

import random
from collections.abc import Iterator, Sequence

MOST_SAMPLED = 1000
# Rows to read together. In an input with large row groups, one row takes as long as these.
RUN_ROWS = 10


def sample_rows(positions: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """At most 1,000 of these rows, in short groups that are spread evenly. The seed determines the rows."""
    if len(positions) <= MOST_SAMPLED:
        yield positions
        return
    draw, num_runs = random.Random(seed), MOST_SAMPLED // RUN_ROWS
    for run in range(num_runs):
        first, stop = (len(positions) * number // num_runs for number in (run, run + 1))
        start = draw.randint(first, stop - RUN_ROWS)
        yield positions[start : start + RUN_ROWS]
