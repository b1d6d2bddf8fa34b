"""Begins a new job in its manifest, and extends one for `--extend`, which adds new files, rows or a higher limit.

Existing rows keep their positions and shards. An extent begins to count with the commit of its manifest line. After a
crash before that, its files mean nothing and are written again.
"""

from dataclasses import replace

import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import InputError
from batchinf.base.slices import claim_whole
from batchinf.base.storage import Folder
from batchinf.base.text import utc_now
from batchinf.fleet.engine_defaults import lines_of
from batchinf.fleet.fleet import Fleet
from batchinf.job import ordering
from batchinf.job.choose import Say, choose
from batchinf.job.disk_space import bytes_per_row
from batchinf.job.input_job import image_folder, input_job
from batchinf.job.job import Job, carried_fields
from batchinf.job.open import location_of
from batchinf.manifest.columns import Columns
from batchinf.manifest.commit_log import gone
from batchinf.manifest.lines import Chosen, Header, InputJob
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State, read_state
from batchinf.manifest.versions import FORMAT_VERSION, spec_text
from batchinf.output import journal
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import Extent, choose_rows_per_shard, total_rows, total_shards, uncut
from batchinf.source.find import is_dataset
from batchinf.source.types import is_json_column, is_utf8
from batchinf.spec.file import dump_spec
from batchinf.version import __version__

NOTHING_NEW = "--extend: the input has no new files and no new rows"


def begin_job(job: Job, manifest: Manifest, fleet: Fleet, rows: Extent, *, ordered_by: str, job_id: str) -> State:
    """Begin the job, durably, and return its state. rows: those that run, not cut yet; their file is written.

    ordered_by: the value of `input.order` by which they run.
    """
    if job.slice is None:
        claim_whole(job.spec.output.folder, job.spec.output.bucket())
    # Segments without a manifest belong to no job.
    journal.drop(job.folder, dict.fromkeys(journal.list_shards(job.folder)))
    header, extent = new_header(job, len(fleet.replicas), rows, job_id, ordered_by=ordered_by)
    notes = "".join(f"# {line}\n" for line in lines_of(fleet.settings.chosen))
    job.folder.write_atomic("job.yaml", (dump_spec(job.spec) + notes).encode())
    job.source.keep_digests()
    manifest.record(header)
    manifest.extent(extent, job.source.fingerprint)
    if job.spec.input.selects:
        manifest.record(Chosen(extent.num_rows, job.source.num_rows))
    manifest.commit()
    return committed_state(job.folder)


def committed_state(folder: Folder) -> State:
    """The state that has just been committed. Raises OutputError if the manifest was deleted or replaced meanwhile."""
    if (state := read_state(folder)) is None:
        raise gone(folder.path("manifest"))
    return state


def new_header(
    job: Job, num_replicas: int, rows: Extent, job_id: str, *, ordered_by: str = "input"
) -> tuple[Header, Extent]:
    """The manifest lines of a new job: its identity, and its rows cut into shards. See `begin_job`."""
    rows_per_shard = job.spec.output.rows_per_shard
    if rows_per_shard == "auto":
        rows_per_shard = auto_rows_per_shard(job, rows.num_rows, num_replicas)
    folder = image_folder(job.spec.input)
    header = Header(
        format_version=FORMAT_VERSION,
        batchinf_version=__version__,
        job_id=job_id,
        created_at=utc_now("seconds"),
        identity=job.identity,
        fingerprint=job.fingerprint,
        layout={
            "rows_per_shard": rows_per_shard,
            **({} if ordered_by == "input" else {"order": ordered_by}),
        },
        spec=job.spec.model_dump(mode="json"),
        columns=Columns.of_new_job(job.task, carried_fields(job.spec, job.source)),
        input_job=_input_job(job),
        input_folder=folder if folder is not None and is_utf8(folder) else None,
    )
    return header, replace(rows, rows_per_shard=rows_per_shard)


def _input_job(job: Job) -> InputJob | None:
    """The job in `input.job`; None without one. Raises InputError if its output has changed since it was read."""
    if (out := job.spec.input.job) is None:
        return None
    other = input_job(out)
    if other.num_rows != job.source.num_rows:
        raise InputError(f"the job in {out} changed while its output was read; start again once it is done")
    return other


def auto_rows_per_shard(job: Job, num_rows: int, num_replicas: int) -> int:
    """The value of `output.rows_per_shard: auto` for so many rows."""
    return choose_rows_per_shard(num_rows, num_replicas, bytes_per_row(job))


# -- --extend ----------------------------------------------------------------------------------------------------------


def check_extended(job: Job, state: State) -> None:
    """Raise InputError if the new input does not fit the job. job: with everything that its input has now."""
    if job.source.fingerprints[0] != state.source_fingerprints[0] and is_dataset(location_of(job.spec)):
        raise InputError(_changed_dataset(job))
    if has_more(job, state):
        _check_types(job)


def _changed_dataset(job: Job) -> str:
    """Why `--extend` is refused, and how else the new rows can run."""
    path = job.spec.input.path
    key = "prompt_hash" if job.spec.input.id_column is None else "id"
    return (
        f"{path} is a Hugging Face dataset that has changed: --extend cannot tell which of its rows are new, so this "
        f"job cannot take them in; a new job over {path} with "
        f"`input.exclude: {{job: {job.spec.output.path}, on: {key}}}` and another `output.path` runs only them"
    )


def has_more(job: Job, state: State) -> bool:
    """Whether there are new files, new rows or a higher limit."""
    return job.source.fingerprint != state.source_fingerprints[-1] or job.spec.input.limit != state.limit


def _check_types(job: Job) -> None:
    """Check that kept columns have the same types as before, because readers read all parts as one table."""
    fields = zip(carried_fields(job.spec, job.source, 0), carried_fields(job.spec, job.source), strict=True)
    for before, now in fields:
        # A text stays as it is if later rows have other values, so the rows that are done are the same.
        if not before.equals(now):
            was = _type_of(before)
            is_now = _type_of(now)
            raise InputError(
                f"column {now.name!r} is {was} in the job's output, but {is_now} with the new rows of "
                f"{job.spec.input.path}; write it as {was} there, or run the new rows as another job"
            )


def _type_of(field: pa.Field) -> str:
    return "of mixed types" if is_json_column(field) else str(field.type)


def extend_job(job: Job, state: State, manifest: Manifest, *, num_replicas: int, say: Say) -> State:
    """Add the new rows to the job, durably, and return its state."""
    if not has_more(job, state):
        say(NOTHING_NEW)
        return state
    chosen = _chosen(job, state, manifest, say)
    ordered_by = str(state.header.layout.get("order", "input"))
    [rows] = ordering.in_order(job, chosen, ordered_by, state, say=say, check_lock=manifest.check_lock).extents
    extent = replace(
        rows,
        start=total_rows(state.extents),
        rows_per_shard=_rows_per_shard(job, state, rows.num_rows, num_replicas),
        first_shard=total_shards(state.extents),
    )
    if job.spec.input.selects:
        manifest.record(Chosen(total_rows(state.extents) + extent.num_rows, job.source.num_rows))
    if (other := _input_job(job)) is not None:
        manifest.record(replace(state.header, input_job=other))
    job.source.keep_digests()
    faults.point("extend.before_line")
    manifest.extent(extent, job.source.fingerprint, {"limit": job.spec.input.limit})
    manifest.commit()
    faults.point("extend.after_line")
    if job.spec.input.limit != state.limit:
        job.folder.write_atomic("job.yaml", spec_text(state.header.spec, job.spec.input.limit).encode())
    num_new = job.source.num_rows - state.extents[-1].stop_row
    say(f"extended: {extent.num_rows:,} more input rows to run, out of {num_new:,} that the job had not seen")
    return committed_state(job.folder)


def _chosen(job: Job, state: State, manifest: Manifest, say: Say) -> RunOrder:
    number = len(state.extents) + 1
    rows = range(state.extents[-1].stop_row, job.source.num_rows)
    limit = job.spec.input.limit
    left = None if limit is None else limit - total_rows(state.extents)
    if left == 0 or not rows:
        return RunOrder(job.folder, [uncut(rows[:0])], number)
    return choose(
        job,
        rows,
        job.folder,
        limit=left,
        number=number,
        say=say,
        check_lock=manifest.check_lock,
        may_be_none=True,
        state=state,
    )


def _rows_per_shard(job: Job, state: State, num_rows: int, num_replicas: int) -> int:
    """The user's number, or one that fits the new rows, which may be many more than the first ones."""
    if state.header.spec.get("output", {}).get("rows_per_shard", "auto") != "auto":
        return int(state.header.layout["rows_per_shard"])
    return auto_rows_per_shard(job, num_rows, num_replicas)
