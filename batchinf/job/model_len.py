"""`engine.max_model_len: auto`: a number from the longest row and its output, found by a pass over all rows."""

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from batchinf.base.storage import Folder
from batchinf.job.choose import Say, choose
from batchinf.job.job import Job, PreparedJob, max_model_len
from batchinf.job.open import open_input
from batchinf.job.resolve import with_longest
from batchinf.model.model import Model, text_section
from batchinf.records import Int64Array, Prompt
from batchinf.spec.job import JobSpec

# Lengths are multiples of it, so that a few more tokens in later rows still fit.
_STEP = 256
_ROWS_AT_ONCE = 256
_LONG = 1 << 30
_LINE_EVERY_S = 10.0


def with_known_length(
    prepared: PreparedJob, say: Say, cache: pathlib.Path | None = None, *, progress: Say | None = None
) -> PreparedJob:
    """The job with a number in place of `auto`, by all rows, the same for all slices. Raises UserError.

    A job without `auto` stays as it is. progress: gets the lines that are of use only while the rows are read; `say` by
    default.
    """
    if not prepared.spec.has_auto_length:
        return prepared
    progress = progress or say
    progress("engine.max_model_len auto: reading all rows before the engines start")
    job = open_input(prepared, cache, progress)
    with contextlib.closing(job.source):
        longest = _longest(job, progress)
        length = rounded(job, longest)
    say(f"engine.max_model_len {length:,}: the longest row takes {longest:,} tokens with its output")
    return with_longest(prepared, length, job.spec.input.answers)


def rounded(job: Job, longest: int) -> int:
    """`max_model_len` for a job whose longest request takes so many tokens; at most what the model takes."""
    length = max(-(-longest // _STEP) * _STEP, job.task.least_model_len)
    return min(length, max_model_len(job) or length)


def length_warning(spec: JobSpec, model: Model, context: int | None = None) -> str | None:
    """Why vLLM refuses the length of `engine.max_model_len`, or `plan --context`; None if it does not."""
    field = "engine.max_model_len" if context is None else "--context"
    number = spec.engine.get("max_model_len") if context is None else context
    # With LongRoPE, the config's `max_position_embeddings` is more than what vLLM takes without a number.
    lengths = (model.max_model_len, text_section(model.config).get("max_position_embeddings"))
    most = max((length for length in lengths if isinstance(length, int)), default=None)
    if spec.scripted is not None or spec.engine.get("hf_overrides") or most is None:
        return None
    if not isinstance(number, int) or number <= most:
        return None
    return (
        f"{field} {number:,} is more than the {most:,} tokens that the model's config allows; vLLM refuses it, unless "
        "engine.hf_overrides changes the config"
    )


def _once(job: Job) -> Job:
    """The job with one request for each row, which stands for all of its samples: they may be millions."""
    sampling = job.spec.sampling
    columns = {name: column for name, column in sampling.columns.items() if name != "n"}
    sampling = sampling.model_copy(update={"n": 1, "columns": columns})
    return replace(job, spec=job.spec.model_copy(update={"sampling": sampling}))


def _longest(job: Job, progress: Say) -> int:
    """The tokens of the longest request with its output. Rows that the model cannot take do not count.

    A row is not tokenised if its size in bytes shows that it is no longer than another one.
    """
    job = _once(job)
    builder = job.prompt_builder()
    most = max_model_len(job)
    longest = 1
    num_read = 0
    next_line = time.monotonic() + _LINE_EVERY_S
    for positions in _pieces(job):
        if time.monotonic() >= next_line:
            next_line += _LINE_EVERY_S
            progress(
                f"engine.max_model_len auto: {num_read:,} rows read, of {job.source.num_rows:,} rows of the input at "
                f"most; the longest takes {longest:,} tokens"
            )
        num_read += len(positions)
        rows = job.source.read_rows(positions, builder.columns)
        prompts = builder.build([row for row in rows if not builder.surely_fits(row, longest)], most)
        longest = max([longest, *_lengths(job, prompts, most or _LONG)])
        if most is not None and longest >= most:
            return most
    return longest


def _lengths(job: Job, prompts: Iterable[Prompt], most: int) -> Iterator[int]:
    """The tokens of each request with its output."""
    for prompt in prompts:
        if prompt.error is None:
            for _, request in job.task.requests(prompt, most):
                # One more: a request for all choices of a row lacks the choice, which is one token.
                yield len(request.prompt_token_ids) + request.max_tokens + 1


def _pieces(job: Job) -> Iterator[Int64Array]:
    """Positions of the rows that may run, in all slices, with those that `exclude` leaves out by their prompts."""
    where = job.spec.input
    rows = range(job.source.num_rows)
    if where.exclude is not None:
        where = where.model_copy(update={"exclude": None, "limit": None})
    if not where.selects:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            yield np.arange(start, min(start + _ROWS_AT_ONCE, len(rows)), dtype=np.int64)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Folder(scratch)
        selecting = replace(job, spec=job.spec.model_copy(update={"input": where}))
        yield from choose(selecting, rows, folder, limit=where.limit).pieces(_ROWS_AT_ONCE)
