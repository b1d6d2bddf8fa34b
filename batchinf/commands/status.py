"""`batchinf status`: the state of a job, read from its files only."""

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from batchinf.base.errors import OutputError
from batchinf.base.slices import JobFolder, job_folders, read_cut
from batchinf.base.storage import Folder
from batchinf.fleet.status import JobStatus, ReplicaStatus, read_status
from batchinf.manifest.lock import Holder, live_holder, not_begun_message
from batchinf.manifest.state import State, read_state
from batchinf.manifest.versions import stored_spec
from batchinf.output.counts import rules_out_tokens
from batchinf.output.journal import num_results
from batchinf.records import ExpectedSpeed, PartCounts, Speed
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.tasks.registry import task_of

Activity = Literal["not begun", "starting", "running", "stopping", "ending", "stopped", "done"]


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """The process that runs a job. since: UTC in ISO format."""

    pid: int
    host: str
    since: str


@dataclass(frozen=True, slots=True)
class JobTotals:
    """The committed output of a job, or of all its slices that have begun.

    begun_at: UTC in ISO format, of the first slice. num_starts: number of epochs. device_s: device time of replicas
    that have ended. num_rows: output rows of the whole job. num_parts: of the slices that have begun. task_counts: what
    the task counts, by name; empty if it counts nothing.
    num_nan_rows, num_inf_rows: rows with a NaN, or an infinity, among the model's numbers.
    rules_out_tokens: whether a structure or the sampling gives some tokens the logprob -inf.
    num_second_bos: rows whose prompts begin with two BOS tokens.
    """

    model: str
    task: str
    begun_at: str
    num_starts: int
    device_s: float
    num_rows: int
    num_rows_committed: int
    num_parts: int
    num_parts_committed: int
    num_errors: int
    num_bytes: int
    num_prompt_tokens: int
    num_output_tokens: int
    task_counts: dict[str, int]
    num_nan_rows: int
    num_inf_rows: int
    rules_out_tokens: bool
    num_second_bos: int


@dataclass(frozen=True, slots=True)
class RetryProgress:
    """The last `--retry` of a job. predicate: chooses the rows. overrides: changed sampling fields."""

    number: int
    predicate: str
    overrides: dict[str, object]
    num_parts: int
    num_parts_replaced: int


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job, or of one slice.

    slice: such as `3/8`; None: a whole job. process: None unless a live process seems to run it. totals: None before it
    has begun. extents: numbers of input rows that were added at the beginning and by each `--extend`. progress: a live
    job's `status.json`, which is `progress_age_s` seconds old. replicas: of a live job, or of one whose process died.
    num_journalled: finished requests that a stopped job keeps beside its parts. expected_speed: of a live job.
    speed: of the last run of a job that is done.
    """

    folder: str
    slice: str | None
    activity: Activity
    process: RunningProcess | None = None
    totals: JobTotals | None = None
    extents: tuple[int, ...] = ()
    retry: RetryProgress | None = None
    progress: JobStatus | None = None
    progress_age_s: float | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    num_journalled: int = 0
    expected_speed: ExpectedSpeed | None = None
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """All replicas of a running job, or of all slices that run. num_up: those with a running engine.

    hosts: sorted. num_devices: GPUs. num_restarts: since the jobs were started. Rates are over the last minute. left_s:
    of the slice that takes longest. Rates and `left_s` are None until there is enough data for them.
    """

    hosts: tuple[str, ...]
    num_replicas: int
    num_up: int
    num_devices: int
    num_restarts: int
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    left_s: float | None


@dataclass(frozen=True, slots=True, repr=False)
class StatusReport:
    """The report of `status`. `print`, and a notebook, show its lines.

    jobs: one, or all slices in the order of their rows. totals: of those that have begun. load: of those
    that run; None if none runs.
    """

    folder: str
    num_slices: int | None
    totals: JobTotals | None
    load: Load | None
    jobs: tuple[JobState, ...]

    def __repr__(self) -> str:
        from batchinf.commands.text.status import status_lines  # it imports this module

        return "\n".join(status_lines(self))


def job_status(out: str) -> StatusReport:
    """The state of the job in an output folder. Raises OutputError without a job."""
    folders = job_folders(out)
    if folders[0].slice is None:
        job = _job_state(folders[0], open_state(out)[1])
        return StatusReport(out, None, job.totals, _load([job]), (job,))
    found = [(job, read_job(job.folder)) for job in folders]
    jobs = tuple(_job_state(job, state) for job, state in found)
    begun = [(job.folder, state) for job, state in found if state is not None]
    return StatusReport(out, len(folders), _slice_totals(out, begun) if begun else None, _load(jobs), jobs)


def _load(jobs: Sequence[JobState]) -> Load | None:
    running = [job.progress for job in jobs if job.progress is not None]
    if not running:
        return None
    replicas = [replica for progress in running for replica in progress.replicas]
    return Load(
        hosts=tuple(sorted({replica.host for replica in replicas if replica.host})),
        num_replicas=len(replicas),
        num_up=sum(replica.state == "running" for replica in replicas),
        # Replicas may share a device. Each job has its own names: under Slurm, two may call different GPUs 0.
        num_devices=sum(len({name for one in job.replicas for name in one.devices}) for job in running),
        num_restarts=sum(replica.restarts for replica in replicas),
        prompt_tokens_per_s=_sum(progress.prompt_tokens_per_s for progress in running),
        output_tokens_per_s=_sum(progress.output_tokens_per_s for progress in running),
        left_s=None if any(progress.left_s is None for progress in running) else max(p.left_s or 0.0 for p in running),
    )


def _sum(rates: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


def _slice_totals(out: str, begun: Sequence[tuple[Folder, State]]) -> JobTotals:
    cut = read_cut(out)
    assert cut is not None
    # The number of a slice's parts is unknown before it begins, but the number of its rows is known.
    num_parts = sum(total_shards(state.extents) for _, state in begun)
    return _totals(begun, cut.num_rows * cut.identity.get("sampling.n", 1), num_parts)


def _job_state(job: JobFolder, state: State | None) -> JobState:
    name = None if job.slice is None else str(job.slice)
    holder = None if state is not None and state.is_done else live_holder(job.folder)
    process = None if holder is None else RunningProcess(holder.pid, holder.host, holder.since)
    if state is None:
        # A process that holds the lock reads the input, before it begins the slice.
        return JobState(str(job.folder.root), name, "not begun" if holder is None else "starting", process)
    last = read_status(job.folder)
    # Without a holder, or before this one has written its first, the snapshot is from an earlier run.
    snapshot = last if holder is not None and last is not None and last.updated_at >= _since(holder) else None
    is_stopped = holder is None and not state.is_done
    num_rows = total_rows(state.extents) * task_of(stored_spec(state.header.spec)).num_rows_per_input
    return JobState(
        folder=str(job.folder.root),
        slice=name,
        activity="done" if state.is_done else "stopped" if is_stopped else _activity(snapshot),
        process=process,
        totals=_totals([(job.folder, state)], num_rows, total_shards(state.extents)),
        extents=tuple(extent.num_rows for extent in state.extents),
        retry=_retry(state),
        progress=snapshot,
        progress_age_s=None if snapshot is None else time.time() - snapshot.updated_at,
        # A process that has ended its replicas writes "stopped" last.
        replicas=() if last is None or state.is_done or (is_stopped and last.state == "stopped") else last.replicas,
        num_journalled=num_results(job.folder, state.parts) if is_stopped else 0,
        expected_speed=None if holder is None else state.expected_speed,
        speed=state.speed if state.is_done else None,
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


def _totals(jobs: Sequence[tuple[Folder, State]], num_rows: int, num_parts: int) -> JobTotals:
    states = [state for _, state in jobs]
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
    return RetryProgress(retry.number, retry.predicate, retry.overrides, retry.num_shards, num_replaced)


def open_state(out: str) -> tuple[Folder, State]:
    """The folder and state of a job without slices. Raises OutputError without a job."""
    folder = Folder(out)
    if (state := read_job(folder)) is not None:
        return folder, state
    raise OutputError(not_begun_message(out))


def read_job(folder: Folder) -> State | None:
    """The state in a job's manifest; None before the job has begun."""
    return read_state(folder) if folder.exists("manifest") else None
