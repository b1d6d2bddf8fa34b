"""`--extend`: adds new files, new rows and a higher limit to a job as a new extent, which `epoch` then runs.

Existing rows keep their positions and shards. The extent begins to count with the commit of its manifest line. After a
crash before that, its files mean nothing and are written again.
"""

from dataclasses import replace

import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import InputError
from batchinf.job import ordering
from batchinf.job.choose import Say, choose
from batchinf.job.open import Job, auto_rows_per_shard, carried_columns
from batchinf.manifest.lines import CHOSEN
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State
from batchinf.schedule.positions import Choice
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.source.find import is_dataset
from batchinf.source.types import is_json_column
from batchinf.spec.file import SpecFile, dump_spec
from batchinf.spec.job import JobSpec


def check_extended(job: Job, state: State) -> None:
    """Raise InputError if the new input does not fit the job. job: with everything that its input has now."""
    if job.source.fingerprints[0] != state.source_fingerprints[0] and is_dataset(job.location):
        raise InputError(
            f"{job.spec.input.path} is a Hugging Face dataset that has changed: --extend cannot tell which of its rows "
            "are new; give the new rows as files, or to a new job with input.exclude"
        )
    if has_more(job, state):
        _check_types(job)


def has_more(job: Job, state: State) -> bool:
    """Whether there are new files, new rows or a higher limit."""
    return job.source.fingerprint != state.source_fingerprints[-1] or job.spec.input.limit != state.limit


def _check_types(job: Job) -> None:
    """Check that kept columns have the same types as before, because readers read all parts as one table."""
    before, now = job.source.schemas[0], job.source.schema
    for name in carried_columns(job.spec):
        # A text stays as it is if later rows have other values, so the rows that are done are the same.
        if not before.field(name).equals(now.field(name)):
            was, is_now = (_type_of(schema.field(name)) for schema in (before, now))
            raise InputError(
                f"column {name!r} is {was} in the job's output, but {is_now} with the new rows of "
                f"{job.spec.input.path}; write it as {was} there, or run the new rows as another job"
            )


def _type_of(field: pa.Field) -> str:
    return "of mixed types" if is_json_column(field) else str(field.type)


def add_extent(job: Job, file: SpecFile, state: State, manifest: Manifest, num_replicas: int, say: Say) -> int:
    """Add the new rows to the job, durably. Returns how many of them will run."""
    choice = _chosen(job, file, state, manifest, say)
    ordered_by = state.header.layout.get("order", "input")
    choice = replace(choice, start=total_rows(state.extents), ordered_by=ordered_by)
    choice = ordering.in_order(job, choice, state, say, manifest.check_lock)
    extent = choice.extent(_rows_per_shard(job, state, choice, num_replicas), total_shards(state.extents))
    if job.spec.input.selects:
        num_rows = total_rows(state.extents) + choice.num_rows
        manifest.event(CHOSEN, kept_as=CHOSEN, num_rows=num_rows, num_input_rows=job.source.num_rows)
    job.source.keep_digests()
    faults.point("extend.before_line")
    manifest.extent(extent, job.source.fingerprint, {"limit": job.spec.input.limit})
    manifest.commit()
    faults.point("extend.after_line")
    if job.spec.input.limit != state.limit:
        job.folder.write_atomic("job.yaml", spec_text(state, job.spec.input.limit).encode())
    return choice.num_rows


def spec_text(state: State, limit: int | None) -> str:
    """The text of `job.yaml`: the original spec with the current limit."""
    spec = state.header.spec
    return dump_spec(JobSpec.model_validate({**spec, "input": {**spec["input"], "limit": limit}}))


def _chosen(job: Job, file: SpecFile, state: State, manifest: Manifest, say: Say) -> Choice:
    """The new rows that the job's fields choose, up to its limit."""
    number, rows = len(state.extents) + 1, range(state.extents[-1].stop_row, job.source.num_rows)
    limit, check_lock = job.spec.input.limit, manifest.check_lock
    left = None if limit is None else limit - total_rows(state.extents)
    if left == 0 or not rows:
        return Choice(number, 0, 0, rows.start, rows.start)
    own = job.folder, number
    return choose(job, file, rows, left, *own, say=say, check_lock=check_lock, may_be_none=True, state=state)


def _rows_per_shard(job: Job, state: State, choice: Choice, num_replicas: int) -> int:
    """The user's number, or one that fits the new rows, which may be many more than the first ones."""
    if state.header.spec.get("output", {}).get("rows_per_shard", "auto") != "auto":
        return int(state.header.layout["rows_per_shard"])
    return auto_rows_per_shard(job, choice, num_replicas)


def said(job: Job, state: State, num_rows: int) -> str:
    """A line for the user about the new rows."""
    num_new = job.source.num_rows - state.extents[-1].stop_row
    return f"extended: {num_rows:,} more input rows to run, out of {num_new:,} that the job had not seen"
