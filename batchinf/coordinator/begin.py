"""Begins a new job in its manifest: its identity, its rows, and their cut into shards. `start` uses it."""

import uuid

from batchinf.base.errors import OutputError
from batchinf.base.slices import claim_whole
from batchinf.base.storage import Folder
from batchinf.fleet.launcher import Launcher
from batchinf.job.drift import now
from batchinf.job.job import Job, carried_fields
from batchinf.manifest.columns import Columns
from batchinf.manifest.lines import CHOSEN, Header
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import State, read_state
from batchinf.manifest.versions import FORMAT_VERSION
from batchinf.output import journal
from batchinf.records import Extent
from batchinf.schedule.positions import Choice
from batchinf.schedule.shards import choose_rows_per_shard
from batchinf.spec.file import dump_spec
from batchinf.version import __version__


def new_job_id() -> str:
    """A unique id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def begin_job(job: Job, manifest: Manifest, launcher: Launcher, choice: Choice, *, job_id: str) -> State:
    """Begin the job, durably, and return its state. choice: the rows that run, whose file is already written."""
    if job.slice is None:
        claim_whole(job.spec.output.path)
    # Segments without a manifest belong to no job.
    journal.drop(job.folder, dict.fromkeys(journal.list_shards(job.folder)))
    header, extent = new_header(job, len(launcher.slots), choice, job_id)
    notes = "".join(f"# {line}\n" for line in launcher.chosen.lines())
    job.folder.write_atomic("job.yaml", (dump_spec(job.spec) + notes).encode())
    job.source.keep_digests()
    manifest.header(header)
    manifest.extent(extent, job.source.fingerprint)
    if job.spec.input.selects:
        manifest.event(CHOSEN, kept_as=CHOSEN, num_rows=extent.num_rows, num_input_rows=job.source.num_rows)
    manifest.commit()
    return committed_state(job.folder)


def committed_state(folder: Folder) -> State:
    """The state that has just been committed. Raises OutputError if the manifest was deleted or replaced meanwhile."""
    state = read_state(folder)
    if state is None:
        raise OutputError(
            f"{folder.path('manifest')} was deleted or replaced while the job ran; restore the folder, or start a new "
            "job with --fresh"
        )
    return state


def new_header(job: Job, num_replicas: int, choice: Choice, job_id: str) -> tuple[Header, Extent]:
    """The manifest lines of a new job: its identity, and how its rows are cut into shards."""
    rows_per_shard = job.spec.output.rows_per_shard
    if rows_per_shard == "auto":
        rows_per_shard = auto_rows_per_shard(job, choice, num_replicas)
    header = Header(
        format_version=FORMAT_VERSION,
        batchinf_version=__version__,
        job_id=job_id,
        created_at=now(),
        identity=job.identity,
        fingerprint=job.fingerprint,
        layout={
            "rows_per_shard": rows_per_shard,
            **({} if choice.ordered_by == "input" else {"order": choice.ordered_by}),
        },
        spec=job.spec.model_dump(mode="json"),
        columns=Columns.of_new_job(job.task, carried_fields(job.spec, job.source.schema)),
    )
    return header, choice.extent(rows_per_shard, first_shard=0)


def auto_rows_per_shard(job: Job, choice: Choice, num_replicas: int) -> int:
    """The value of `output.rows_per_shard: auto` for these rows."""
    return choose_rows_per_shard(choice.num_rows, num_replicas, job.task.estimated_bytes_per_row())
