"""`batchinf status`: the state of a job, read from its files only."""

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, job_folders, read_cut
from batchinf.base.storage import Folder
from batchinf.commands.text.status import (
    Activity,
    JobState,
    JobTotals,
    Load,
    RetryProgress,
    RunningProcess,
    StatusReport,
)
from batchinf.fleet.status import JobStatus, read_status
from batchinf.manifest.lock import Holder, live_holder, not_begun_message
from batchinf.manifest.state import State, read_state
from batchinf.manifest.versions import stored_spec
from batchinf.output.counts import rules_out_tokens
from batchinf.output.journal import num_results
from batchinf.records import PartCounts
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.tasks.registry import task_of


def job_status(out: str) -> StatusReport:
    """The state of the job in an output folder. Raises OutputError without a job."""
    folders = job_folders(out)
    if folders[0].slice is None:
        job = _job_state(folders[0], open_state(out)[1])
        return StatusReport(folder=out, num_slices=None, totals=job.totals, load=_load([job]), jobs=(job,))
    states = [read_job(slice_folder.folder) for slice_folder in folders]
    jobs = tuple(map(_job_state, folders, states))
    begun = [state for state in states if state is not None]
    totals = _slice_totals(out, begun) if begun else None
    return StatusReport(folder=out, num_slices=len(folders), totals=totals, load=_load(jobs), jobs=jobs)


def _load(jobs: Sequence[JobState]) -> Load | None:
    running = [job.progress for job in jobs if job.progress is not None]
    if not running:
        return None
    replicas = [replica for progress in running for replica in progress.replicas]
    return Load(
        hosts=tuple(sorted({replica.host for replica in replicas if replica.host})),
        num_replicas=len(replicas),
        num_up=sum(replica.state == "running" for replica in replicas),
        num_devices=sum(map(_num_devices, running)),
        num_restarts=sum(replica.restarts for replica in replicas),
        prompt_tokens_per_s=_sum(progress.prompt_tokens_per_s for progress in running),
        output_tokens_per_s=_sum(progress.output_tokens_per_s for progress in running),
        left_s=_longest(progress.left_s for progress in running),
    )


def _num_devices(progress: JobStatus) -> int:
    """Devices of one job, whose replicas may share some.

    Each job has its own names: under Slurm, two jobs may call different GPUs 0.
    """
    return len({device for replica in progress.replicas for device in replica.devices})


def _sum(rates: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


def _longest(times_s: Iterable[float | None]) -> float | None:
    """The longest time; None if one is not known."""
    known = list(times_s)
    return None if None in known else max(time_s or 0.0 for time_s in known)


def _slice_totals(out: str, begun: Sequence[State]) -> JobTotals:
    cut = read_cut(out)
    assert cut is not None
    # The number of a slice's parts is unknown before it begins, but the number of its rows is known.
    num_parts = sum(total_shards(state.extents) for state in begun)
    return _totals(begun, cut.num_rows * cut.identity.get("sampling.n", 1), num_parts)


def _job_state(job: JobFolder, state: State | None) -> JobState:
    folder = str(job.folder.root)
    name = None if job.slice is None else str(job.slice)
    holder = None if state is not None and state.is_done else live_holder(job.folder)
    process = None if holder is None else RunningProcess(holder.pid, holder.host, holder.since)
    if state is None:
        # A process that holds the lock reads the input, before it begins the slice.
        return JobState(folder, name, "not begun" if holder is None else "starting", process)
    num_rows = total_rows(state.extents) * task_of(stored_spec(state.header.spec)).num_rows_per_input
    job_state = JobState(
        folder=folder,
        slice=name,
        activity="done",
        process=process,
        totals=_totals([state], num_rows, total_shards(state.extents)),
        extents=tuple(extent.num_rows for extent in state.extents),
        retry=_retry(state),
        slower=state.slower,
    )
    last = read_status(job.folder)
    if state.is_done:
        return replace(job_state, speed=state.speed)
    if holder is None:
        # A process that has ended its replicas writes "stopped" last.
        replicas = () if last is None or last.state == "stopped" else last.replicas
        num_journalled = num_results(job.folder, state.parts)
        return replace(job_state, activity="stopped", replicas=replicas, num_journalled=num_journalled)
    # Before the holder has written its first snapshot, the last one is from an earlier run.
    snapshot = last if last is not None and last.updated_at >= _since(holder) else None
    return replace(
        job_state,
        activity=_activity(snapshot),
        progress=snapshot,
        progress_age_s=None if snapshot is None else time.time() - snapshot.updated_at,
        replicas=() if last is None else last.replicas,
        expected_speed=state.expected_speed,
    )


def _since(holder: Holder) -> float:
    """When a holder took the lock, in whole seconds since 1970; 0.0 if its lock file is damaged."""
    try:
        return datetime.datetime.fromisoformat(holder.since).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _activity(snapshot: JobStatus | None) -> Activity:
    # A snapshot of an ended job is from an earlier run.
    match None if snapshot is None else snapshot.state:
        case "running" | "stopping" | "ending" as activity:
            return activity
        case _:
            return "starting"


def _totals(states: Sequence[State], num_rows: int, num_parts: int) -> JobTotals:
    first = min(states, key=lambda state: state.header.created_at)
    spec = stored_spec(first.header.spec)
    counts = PartCounts.sum(state.counts for state in states)
    return JobTotals(
        model=spec.model.name,
        task=task_of(spec).name,
        begun_at=first.header.created_at,
        num_starts=sum(state.last_epoch for state in states),
        device_s=sum(state.device_s for state in states),
        num_rows=num_rows,
        num_rows_committed=counts.num_rows,
        num_parts=num_parts,
        num_parts_committed=sum(len(state.parts) for state in states),
        num_errors=counts.num_errors,
        num_bytes=sum(state.num_bytes for state in states),
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=counts.num_output_tokens,
        task_counts=counts.task_counts or {},
        num_nan_rows=counts.num_nan_rows,
        num_inf_rows=counts.num_inf_rows,
        rules_out_tokens=rules_out_tokens(first.header.spec),
        num_second_bos=counts.num_second_bos,
    )


def _retry(state: State) -> RetryProgress | None:
    if not state.retries:
        return None
    retry = state.retries[max(state.retries)]
    num_replaced = sum(part.retry == retry.number for part in state.parts.values())
    return RetryProgress(
        number=retry.number,
        predicate=retry.predicate,
        overrides=retry.overrides,
        num_parts=retry.num_shards,
        num_parts_replaced=num_replaced,
    )


def open_state(out: str) -> tuple[Folder, State]:
    """The folder and state of a job without slices. Raises OutputError without a job."""
    folder = Folder(out)
    if (state := read_job(folder)) is not None:
        return folder, state
    raise OutputError(not_begun_message(out))


def read_job(folder: Folder) -> State | None:
    """The state in a job's manifest; None before the job has begun."""
    return read_state(folder) if folder.exists("manifest") else None
