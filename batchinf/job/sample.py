"""A sample of a job's rows, spread evenly. `validate`, `plan` and the start of a job read it."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from batchinf.base.errors import RowError, UserError
from batchinf.base.text import without_numbers
from batchinf.job.job import Job, max_model_len
from batchinf.prompts.builder import PromptBuilder
from batchinf.source.rows import Row

MOST_SAMPLED = 1000
# Rows to read together. In an input with large row groups, one row takes as long as these.
RUN_ROWS = 10


def sample_rows(positions: Sequence[int], seed: int) -> Iterator[Sequence[int]]:
    """At most 1,000 of these rows, in short groups that are spread evenly. The seed determines the rows."""
    if len(positions) <= MOST_SAMPLED:
        yield positions
        return
    draw = random.Random(seed)
    num_runs = MOST_SAMPLED // RUN_ROWS
    for run in range(num_runs):
        first, stop = (len(positions) * number // num_runs for number in (run, run + 1))
        start = draw.randint(first, stop - RUN_ROWS)
        yield positions[start : start + RUN_ROWS]


def sampled_rows(
    job: Job, positions: Sequence[int], columns: Sequence[str], *, seed: int = 0, at_once: int = MOST_SAMPLED
) -> Iterator[list[Row]]:
    """The rows of `sample_rows` with these columns, some at once."""
    for sampled in sample_rows(positions, seed):
        for start in range(0, len(sampled), at_once):
            yield job.source.read_rows(np.sort(np.asarray(sampled[start : start + at_once], np.int64)), columns)


def refuse_hopeless(job: Job, positions: Sequence[int], make_builder: Callable[[], PromptBuilder]) -> None:
    """Raise UserError if all sampled rows would be error rows, unless `max_error_rate` is 1.

    positions: of the rows that run. make_builder: makes their prompts. Reads only as far as the first good row.
    `validate` reads the same sample.
    """
    if job.slice is not None:
        if job.spec.input.selects:
            return  # of the other slices, the chosen rows are not known here
        positions = range(job.source.num_rows)  # the rows of one slice may be bad by themselves
    if job.spec.max_error_rate == 1:
        return
    builder = make_builder()
    counts: Counter[tuple[str, str]] = Counter()
    firsts: dict[tuple[str, str], tuple[int, RowError]] = {}
    for rows in sampled_rows(job, positions, builder.columns, at_once=RUN_ROWS):
        for prompt in builder.build(rows, max_model_len(job)):
            if prompt.error is None:
                return
            key = prompt.error.error_type, without_numbers(prompt.error.error_message)
            counts[key] += 1
            firsts.setdefault(key, (prompt.row_index, prompt.error))
    if counts:
        raise hopeless(counts.total(), len(positions), *firsts[counts.most_common(1)[0][0]])


def hopeless(num_sampled: int, num_rows: int, row_index: int, error: RowError) -> UserError:
    """The error about a job all of whose sampled rows would be error rows. row_index, error: of one of them."""
    which = "" if num_sampled == num_rows else " of the sample"
    return UserError(
        f"all {num_sampled:,} rows{which} would be error rows; correct the spec or the input, or set max_error_rate 1 "
        f"to store them. Row {row_index:,}: {error.error_type}: {error.error_message}"
    )
