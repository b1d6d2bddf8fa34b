"""Estimates what a job will write. Warns if the disk has too little room, refuses above `output.max_output_bytes`."""

import functools
import os
import pathlib

import numpy as np

from batchinf.base.text import size_text
from batchinf.job.job import Job, carried_columns
from batchinf.manifest.state import State
from batchinf.output.counts import row_bytes
from batchinf.prompts.encoder import load_tokenizer
from batchinf.prompts.row_sampling import whole_number
from batchinf.records import Prompt
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.spec.sampling import MOST_SAMPLES, STRUCTURE_FIELDS, SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS, Task
from batchinf.tasks.registry import task_of

# Input rows whose kept columns are measured.
_NUM_MEASURED = 64
# Input rows whose prompts are made, for tasks whose output depends on them.
_NUM_SAMPLED = 256
# Size of a result in the journal, which is uncompressed and has its own ids, relative to a part.
_JOURNAL_FACTOR = 3
# Open shards of a replica: the current one and the next one.
_OPEN_SHARDS = 2
# Segments, logs and temporary files besides the parts.
_OTHER_FILES = 64


def room_warning(
    job: Job, state: State | None, num_replicas: int, num_rows: int | None = None, *, copy_bytes: int = 0
) -> str | None:
    """A line for the user if the rest of the job will not fit on the file system of `output.path`; else None.

    state: None for a new job. num_rows: rows that run; None: all. Quotas are ignored, because there is no portable way
    to read them. copy_bytes: of the copies of input files that `run` will make.
    """
    status = _file_system(job.folder.root)
    if status is None or job.spec.output.is_bucket:  # parts leave the folder for the bucket
        return None
    num_free = status.f_bavail * status.f_frsize
    num_bytes = _estimated_bytes(job, state, num_replicas, num_rows) + copy_bytes
    where = f"{job.folder.root} may not have room for the job"
    # Only a warning: the estimate can be wrong, and a job with a full disk can be resumed.
    if num_bytes > num_free:
        return (
            f"warning: {where}: about {_gib(num_bytes)} will be written, {_gib(num_free)} are free; if the disk is "
            "full before the end, make room and run the same command again"
        )
    num_shards_left = 0 if state is None else total_shards(state.extents) - int(state.committed.sum())
    num_files = num_shards_left + _OTHER_FILES
    if status.f_files > 0 and num_files > status.f_favail:
        return f"warning: {where}: about {num_files:,} files will be made, it can hold {status.f_favail:,} more"
    return None


def free_bytes(path: str) -> int | None:
    """What is free on the file system of a folder, which need not be there yet; None if that is not known."""
    status = _file_system(pathlib.Path(path))
    return None if status is None else status.f_bavail * status.f_frsize


def _file_system(path: pathlib.Path) -> os.statvfs_result | None:
    """That of a folder, or of its nearest parent that exists; None if it does not say."""
    path = path.absolute()
    try:
        return os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    except OSError:
        return None


def check_size(job: Job, num_rows: int | None) -> None:
    """Raise SpecError if the estimated output is above `output.max_output_bytes`.

    num_rows: rows that run; None for a job that has begun, which is never refused.
    """
    if num_rows is None:
        return
    task = job.task
    max_bytes = job.spec.output.max_output_bytes
    limit = task.default_max_output_bytes if max_bytes is None else max_bytes
    if limit is None:
        return
    per_row = _bytes_per_row(job, num_rows, limit)
    num_bytes = num_rows * per_row
    if num_bytes <= limit:
        return
    default = "" if max_bytes else ", the default"
    remedies = ", ".join(["take fewer rows (input.limit)", *task.size_remedies])
    raise job.file.error(
        "output.max_output_bytes",
        f"the output of {num_rows:,} rows is estimated at {size_text(num_bytes)} ({size_text(per_row)} each), more "
        f"than {size_text(limit)}{default}; {remedies}, or raise it to {_round_up(num_bytes)}",
    )


def _bytes_per_row(job: Job, num_rows: int, limit: int) -> int:
    """The estimate for each of so many rows, by their prompts if the size is near the limit."""
    per_row = round(bytes_per_row(job))
    where = job.spec.input
    are_first = where.where is None and where.sample is None and where.exclude is None
    rows = job.rows[:num_rows] if are_first else job.rows
    # An estimate without prompts is assumed to be at most 64 times too low.
    if job.task.sizes_by_prompts and len(rows) and num_rows * per_row > limit // 64:
        return job.task.estimated_bytes_per_row(_sample(job, rows))
    return per_row


def _sample(job: Job, rows: range) -> list[Prompt]:
    """Valid prompts from all parts of the input."""
    places = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _NUM_SAMPLED)).astype(np.int64))
    builder = job.prompt_builder()
    prompts = builder.build(job.source.read_rows(places, builder.columns), job.model.max_model_len)
    return [prompt for prompt in prompts if prompt.error is None]


def _round_up(num_bytes: int) -> int:
    digits = 10 ** max(0, len(str(num_bytes)) - 2)
    return int(-(-num_bytes // digits) * digits)


def _estimated_bytes(job: Job, state: State | None, num_replicas: int, num_rows: int | None) -> int:
    """Bytes of the remaining parts and the journal, by the existing parts, or else by the spec and the first rows."""
    if num_rows is None:
        num_rows = len(job.rows) if state is None else total_rows(state.extents)
    per_row = round(bytes_per_row(job) + mean_samples(job) * _kept_bytes(job))
    if state is None:
        return num_rows * per_row
    num_done = state.num_inputs_committed
    if num_done:
        per_row = -(-state.num_bytes // num_done)
    num_left = max(0, num_rows - num_done)
    in_journal = num_replicas * _OPEN_SHARDS * max(extent.rows_per_shard for extent in state.extents)
    return num_left * per_row + min(num_left, in_journal) * per_row * _JOURNAL_FACTOR


def bytes_per_row(job: Job) -> float:
    """Estimated size in Parquet of all output rows of one input row."""
    task = job.task
    has_own = any(field in job.spec.sampling.columns for field in STRUCTURE_FIELDS)  # rows with other structures
    if (most := choice_tokens(job)) is not None and not has_own:
        task = task_of_length(job, min(most, job.spec.sampling.max_tokens or LIKELY_TOKENS))
    return task.estimated_bytes_per_row() * mean_samples(job) / job.task.num_rows_per_input


def mean_samples(job: Job) -> float:
    """Output rows for each input row; of rows with a column of their own numbers, the mean of the first ones.

    Lines of a batch file count as rows that say nothing.
    """
    of_job = job.task.num_rows_per_input
    column = job.spec.sampling.columns.get("n")
    num_rows = min(_NUM_MEASURED, len(job.rows))
    if column is None or not num_rows:
        return of_job
    rows = job.source.read_rows(np.arange(job.rows.start, job.rows.start + num_rows), [column])
    given = [whole_number(row.values.get(column)) for row in rows]
    # A row with another number becomes an error row.
    return sum(n if isinstance(n, int) and 0 < n <= MOST_SAMPLES else of_job for n in given) / num_rows


def _kept_bytes(job: Job) -> int:
    """Average size of a row's kept columns in memory, from the first rows."""
    start = job.rows.start
    num_rows = min(_NUM_MEASURED, len(job.rows))
    columns = list(dict.fromkeys(carried_columns(job.spec)))
    if not columns or not num_rows:
        return 0
    return int(row_bytes(job.source.read_columns(start, start + num_rows, columns, {})).sum()) // num_rows


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def choice_tokens(job: Job, sampling: SamplingSpec | None = None) -> int | None:
    """Tokens of the longest choice and of the end, if outputs can only be one of their choices; None for other outputs.

    sampling: the row's own; None: the job's.
    """
    choices = ((sampling or job.spec.sampling).structured_outputs or {}).get("choice")
    # A reasoning parser leaves the reasoning before the choice free.
    if not choices or not job.task.draws_tokens or job.spec.model.reasoning_parser is not None:
        return None
    return _longest(tuple(choices), job.model.tokenizer, job.spec.model.trust_remote_code)


@functools.lru_cache(maxsize=1024)
def _longest(choices: tuple[str, ...], tokenizer_folder: str, trust_remote_code: bool) -> int:
    tokenizer = load_tokenizer(tokenizer_folder, trust_remote_code)
    return 1 + max(len(tokenizer.encode(text, add_special_tokens=False)) for text in choices)


def task_of_length(job: Job, max_tokens: int) -> Task:
    """The job's task with outputs of at most so many tokens, for estimates of its size."""
    sampling = job.spec.sampling.model_copy(update={"max_tokens": max_tokens})
    return task_of(job.spec.model_copy(update={"sampling": sampling}))
