"""`batchinf status`: the state of a job, read from its files only."""

import datetime
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from batchinf.base.cost import Cost
from batchinf.base.slices import read_cut
from batchinf.base.storage import Folder
from batchinf.base.text import counted, duration, list_names, short_count, size_text
from batchinf.coordinator.display import status_line
from batchinf.coordinator.ending import MOST_RETRIES, mended_text
from batchinf.fleet.speed_text import speed_lines, tokens_text
from batchinf.fleet.status import JobStatus, ReplicaStatus, read_status
from batchinf.manifest.lines import InputJob, Retry, Speed, StartedReplica
from batchinf.manifest.lock import Holder, live_holder
from batchinf.manifest.look import Look
from batchinf.manifest.state import State
from batchinf.manifest.versions import stored_spec
from batchinf.output.journal import num_results
from batchinf.output.remarks import non_finite_lines, rules_out_tokens
from batchinf.prompts.encoder import second_bos_lines
from batchinf.records import PartCounts
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.tasks.registry import TASKS, task_of

Activity = Literal["not begun", "starting", "running", "stopping", "ending", "stopped", "done"]


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """The process that runs a job."""

    pid: int
    host: str
    since: str
    """UTC in ISO format."""


@dataclass(frozen=True, slots=True)
class JobTotals:
    """The committed output of a job, or of all its slices that have begun."""

    model: str
    task: str
    begun_at: str
    """When the first slice began: UTC in ISO format."""
    num_starts: int
    """Number of epochs."""
    device_s: float
    """Time of replicas that have ended, times their GPUs."""
    has_devices: bool
    """Whether replicas had GPUs."""
    num_rows: int
    """Output rows of the whole job."""
    is_estimate: bool
    """Whether `num_rows` is an estimate by the committed parts, because rows may have their own number of samples."""
    num_rows_committed: int
    num_parts: int
    """Parts of the slices that have begun."""
    num_parts_committed: int
    num_errors: int
    num_bytes: int
    num_prompt_tokens: int
    num_output_tokens: int
    task_counts: dict[str, int]
    """What the task counts, by name; empty if it counts nothing."""
    num_nan_rows: int
    """Rows with a NaN among the model's numbers."""
    num_inf_rows: int
    """Rows with an infinity among the model's numbers."""
    rules_out_tokens: bool
    """Whether a structure or the sampling gives some tokens the logprob -inf."""
    num_second_bos: int
    """Rows whose prompts begin with two BOS tokens."""

    @property
    def all_rows(self) -> str:
        """`num_rows` in words."""
        return f"{'about ' if self.is_estimate else ''}{self.num_rows:,}"

    def lines(self, num_journalled: int) -> Iterator[str]:
        """num_journalled: finished requests that the journal keeps beside the parts."""
        yield (
            f"model {self.model}, task {self.task}, begun {self.begun_at}, {counted(self.num_starts, 'start')}, "
            f"{duration(self.device_s)} of {'GPU' if self.has_devices else 'replica'} time in replicas that have ended"
        )
        yield (
            f"committed: {self.num_rows_committed:,} of {self.all_rows} output rows in "
            f"{self.num_parts_committed:,} of {self.num_parts:,} parts, {self.num_errors:,} errors, "
            f"{size_text(self.num_bytes)}, {tokens_text(self.num_prompt_tokens, self.num_output_tokens)}"
        )
        if num_journalled:
            yield (
                f"not committed yet: {counted(num_journalled, 'request')} finished and kept in the journal; the "
                "next run writes their output rows without running them again"
            )
        yield from TASKS[self.task].count_lines(self.num_rows_committed, self.task_counts)
        yield from non_finite_lines(self.num_nan_rows, self.num_inf_rows, expects_inf=self.rules_out_tokens)
        yield from second_bos_lines(self.num_second_bos)


@dataclass(frozen=True, slots=True)
class RetryProgress:
    """A retry of a job."""

    number: int
    predicate: str
    """Chooses the rows."""
    overrides: dict[str, object]
    """Changed sampling fields."""
    num_parts: int
    num_parts_replaced: int
    num_rows: int
    """Input rows that ran again."""
    num_mended: int | None
    """See `Retry.num_mended`."""

    def line(self) -> str:
        changes = "".join(f", {name} {value}" for name, value in self.overrides.items())
        replaced = f"{self.num_parts_replaced:,} of {self.num_parts:,} parts replaced"
        mended = mended_text(self.num_mended, self.num_rows)
        return f"retry {self.number} ({self.predicate}{changes}): {replaced}" + (mended and f", {mended}")


@dataclass(frozen=True, slots=True)
class RowsRepaired:
    """Rows that a retry took from a file (`--input`)."""

    retry: int
    """Its number."""
    path: str
    """Of the file, as it was given."""
    num_rows: int

    def line(self) -> str:
        return f"retry {self.retry} took {counted(self.num_rows, 'input row')} from {self.path}"


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job, or of one slice."""

    folder: str
    slice: str | None
    """Such as `3/8`; None: a whole job."""
    activity: Activity
    process: RunningProcess | None = None
    """None unless a live process seems to run the job."""
    totals: JobTotals | None = None
    """None before the job has begun."""
    extents: tuple[int, ...] = ()
    """Numbers of input rows that were added at the beginning and by each `--extend`."""
    input_job: InputJob | None = None
    """The job whose output it reads."""
    retries: tuple[RetryProgress, ...] = ()
    """The last ones."""
    repairs: tuple[RowsRepaired, ...] = ()
    """Of all retries."""
    progress: JobStatus | None = None
    """The `status.json` of a live job."""
    progress_age_s: float | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    """Those of a live job, or of one whose process died."""
    num_journalled: int = 0
    """Finished requests that a stopped job keeps beside its parts."""
    speed: Speed | None = None
    """Speed of the last run of a job that is done."""
    slower: tuple[str, ...] = ()
    """What the engines of the last run did without, if it makes them much slower."""

    @property
    def _activity_text(self) -> str:
        if self.process is not None:
            process = self.process
            return f"{self.activity}, by pid {process.pid} on host {process.host} since {process.since}"
        return (
            self.activity if self.activity == "done" else "stopped before its end; run the same command again to go on"
        )

    def lines(self, load: "Load | None") -> Iterator[str]:
        """The lines of a whole job. load: of its replicas."""
        assert self.totals is not None
        yield f"{self.folder}: {self._activity_text}"
        yield from self.totals.lines(self.num_journalled)
        yield from self._source_lines()
        if self.speed is not None:
            yield from speed_lines(self.speed)
        yield from self._progress_lines("")
        if load is not None:
            yield load.line()
        for replica in self.replicas:
            is_live = self.progress is not None
            yield f"  {_place(replica)}: {_condition(replica, is_live=is_live)}{_last_sign(replica)}"

    def _source_lines(self) -> Iterator[str]:
        """Where the rows come from: extensions, another job, retries and their files."""
        if len(self.extents) > 1:
            counts = ", ".join(f"{num_rows:,}" for num_rows in self.extents)
            yield f"input rows came in {len(self.extents)} times: {counts}"
        if (other := self.input_job) is not None:
            yield f"input: {other.num_rows:,} output rows of the job in {other.path} (id {other.job_id})"
        yield from (retry.line() for retry in self.retries)
        yield from (repair.line() for repair in self.repairs)

    def slice_lines(self) -> Iterator[str]:
        """A line of a slice, and more about its last run."""
        if self.totals is None:
            words = " has not begun" if self.process is None else f": {self._activity_text}"
            yield f"  slice {self.slice}{words}"
            return
        totals = self.totals
        rows = f"{totals.num_rows_committed:,} of {totals.all_rows} output rows, {totals.num_errors:,} errors"
        yield f"  slice {self.slice}: {self._activity_text}; {rows}"
        yield from self._progress_lines("    ")

    def _progress_lines(self, indent: str) -> Iterator[str]:
        yield from (f"{indent}{line}" for line in self.slower)
        if self.progress is not None:
            yield f"{indent}{duration(self.progress_age_s)} ago: {status_line(self.progress)}"


@dataclass(frozen=True, slots=True)
class Load:
    """All replicas of a running job, or of all slices that run. Rates are over the last minute.

    Rates and `left_s` are None until there is enough data for them.
    """

    hosts: tuple[str, ...]
    """Sorted."""
    num_replicas: int
    num_up: int
    """Replicas with a running engine."""
    num_devices: int
    """GPUs."""
    num_restarts: int
    """Restarts since the jobs were started."""
    prompt_tokens_per_s: float | None
    output_tokens_per_s: float | None
    left_s: float | None
    """Time left of the slice that takes longest."""

    def line(self, *, has_rates: bool = False) -> str:
        parts = [
            *([f"{counted(len(self.hosts), 'host')}: {list_names(self.hosts)}"] if self.hosts else []),
            f"{self.num_up} of {counted(self.num_replicas, 'replica')} up",
            *([counted(self.num_devices, "GPU")] if self.num_devices else []),
            counted(self.num_restarts, "restart"),
        ]
        if has_rates:
            rates = (("in", self.prompt_tokens_per_s), ("out", self.output_tokens_per_s))
            parts += [f"{name} {short_count(rate)} tok/s" for name, rate in rates if rate is not None]
            parts += [] if self.left_s is None else [f"{duration(self.left_s)} left"]
        return "now: " + " · ".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class StatusReport:
    """The report of `status`. `print`, and a notebook, show its lines."""

    folder: str
    num_slices: int | None
    totals: JobTotals | None
    """Totals of the jobs that have begun."""
    load: Load | None
    """Replicas of the jobs that run; None if none runs."""
    jobs: tuple[JobState, ...]
    """One job, or all slices in the order of their rows."""
    cost: Cost | None = None
    """Of all replicas until now, those that run included, by committed rows; None without a price or GPUs."""

    def lines(self) -> Iterator[str]:
        """The job and its totals. For a job in slices: their sum, and lines for each."""
        if self.num_slices is None:
            [job] = self.jobs
            yield from job.lines(self.load)
            yield from self._cost_lines()
            return
        counts = Counter(job.activity for job in self.jobs)
        numbers = ", ".join(f"{number} {name}" for name, number in counts.items())
        yield f"{self.folder}: {self.num_slices} slices: {numbers}"
        if self.totals is not None:
            yield from self.totals.lines(sum(job.num_journalled for job in self.jobs))
        if self.load is not None:
            yield self.load.line(has_rates=True)
        for job in self.jobs:
            yield from job.slice_lines()
        yield from self._cost_lines()

    def _cost_lines(self) -> Iterator[str]:
        if self.cost is not None:
            yield self.cost.text

    def __repr__(self) -> str:
        return "\n".join(self.lines())


def _place(replica: ReplicaStatus) -> str:
    host = f" on host {replica.host}" if replica.host else ""
    devices = f", GPU {', '.join(replica.devices)}" if replica.devices else ""
    model = f" ({replica.device})" if replica.devices and replica.device else ""
    return f"replica {replica.replica}{host}{devices}{model}"


def _condition(replica: ReplicaStatus, *, is_live: bool) -> str:
    if not is_live:
        return f"{counted(replica.restarts, 'restart')} in the last run"
    busy = "" if replica.busy is None else f", busy {replica.busy:.0%} of the time"
    return (
        f"{replica.state}, {counted(replica.in_flight, 'request')} in the engine, {replica.num_running} running, "
        f"KV cache {replica.kv_cache_usage:.0%}, {counted(replica.num_rows, 'row')}{busy}, "
        f"{counted(replica.restarts, 'restart')}"
    )


def _last_sign(replica: ReplicaStatus) -> str:
    if replica.heard_at is None:
        return ""
    return f", last heard from {duration(max(0.0, time.time() - replica.heard_at))} ago"


def job_status(out: str | os.PathLike[str], price: float | None = None) -> StatusReport:
    """The state of the job in an output folder. Raises OutputError without a job.

    price: of a GPU for an hour; None: that of the spec with which the job began.
    """
    look = Look(out)
    found = jobs_in(look)
    jobs = tuple(_job_state(job, state, look.named(job)) for job, state in found)
    totals = jobs[0].totals
    cut = read_cut(look.root)
    begun = [state for _, state in found if state is not None]
    running_s = sum(_running_s(state) for job, (_, state) in zip(jobs, found, strict=True) if state and job.process)
    if cut is not None:
        # The number of a slice's rows is known before it begins, but not that of its parts.
        totals = _totals(begun, cut.num_rows) if begun else None
    num_slices = None if cut is None else cut.num_slices
    return StatusReport(
        folder=look.out,
        num_slices=num_slices,
        totals=totals,
        load=_load(jobs),
        jobs=jobs,
        cost=_cost(begun, running_s, price),
    )


def jobs_in(look: Look) -> list[tuple[Folder, State | None]]:
    """The job in an output folder, or its slices, with their states. Raises OutputError without a job."""
    found = look.jobs()
    if found[0][0].slice is None and found[0][1] is None:
        raise look.nothing()
    return found


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
        prompt_tokens_per_s=_sum(map(attrgetter("prompt_tokens_per_s"), running)),
        output_tokens_per_s=_sum(map(attrgetter("output_tokens_per_s"), running)),
        left_s=_longest(map(attrgetter("left_s"), running)),
    )


def _num_devices(progress: JobStatus) -> int:
    """Devices of one job. Each job has its own names: under Slurm, two jobs may call different GPUs 0."""
    return len({device for replica in progress.replicas for device in replica.devices})


def _sum(rates: Iterable[float | None]) -> float | None:
    """The sum of those that are known; None if none is."""
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


def _longest(times_s: Iterable[float | None]) -> float | None:
    """The longest time; None if one is not known."""
    known = list(times_s)
    return None if None in known else max(time_s or 0.0 for time_s in known)


def _job_state(job: Folder, state: State | None, folder: str = "") -> JobState:
    folder = folder or str(job.root)
    name = None if job.slice is None else str(job.slice)
    holder = None if state is not None and state.is_done else live_holder(job)
    process = None if holder is None else RunningProcess(holder.pid, holder.host, holder.since)
    # A process that holds the lock reads the input, before it begins the slice.
    job_state = JobState(folder, name, "not begun" if holder is None else "starting", process)
    return job_state if state is None else _begun(job_state, job, state, holder)


def _begun(job_state: JobState, job: Folder, state: State, holder: Holder | None) -> JobState:
    """Add what the files of a job say that has begun. holder: the process that runs it."""
    job_state = replace(
        job_state,
        totals=_totals([state], total_rows(state.extents)),
        extents=tuple(extent.num_rows for extent in state.extents),
        input_job=state.header.input_job,
        retries=tuple(_retry(state, state.retries[number]) for number in sorted(state.retries)[-MOST_RETRIES:]),
        repairs=_repairs(state),
        slower=state.slower,
    )
    if state.is_done:
        return replace(job_state, activity="done", speed=state.speed)
    last = read_status(job)
    if holder is None:
        # A process that has ended its replicas writes "stopped" last.
        replicas = () if last is None or last.state == "stopped" else last.replicas
        num_journalled = num_results(job, state.parts)
        return replace(job_state, activity="stopped", replicas=replicas, num_journalled=num_journalled)
    # Before the holder has written its first snapshot, the last one is from an earlier run.
    snapshot = last if last is not None and last.updated_at >= _since(holder) else None
    return replace(
        job_state,
        activity=_activity(snapshot),
        progress=snapshot,
        progress_age_s=None if snapshot is None else time.time() - snapshot.updated_at,
        replicas=() if last is None else last.replicas,
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


def _totals(states: Sequence[State], num_inputs: int) -> JobTotals:
    """num_inputs: input rows of the whole job."""
    first = min(states, key=lambda state: state.header.created_at)
    spec = stored_spec(first.header.spec)
    task = task_of(spec)
    counts = PartCounts.sum(state.counts for state in states)
    num_committed = sum(state.num_inputs_committed for state in states)
    return JobTotals(
        model=spec.model.name,
        task=task.name,
        begun_at=first.header.created_at,
        num_starts=sum(state.last_epoch for state in states),
        device_s=sum(state.device_s for state in states),
        has_devices=any(state.has_devices for state in states),
        num_rows=task.expected_rows(num_inputs, num_done=counts.num_rows, num_inputs_done=num_committed),
        is_estimate=task.rows_vary and num_committed < num_inputs,
        num_rows_committed=counts.num_rows,
        num_parts=sum(total_shards(state.extents) for state in states),
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


def _cost(states: Sequence[State], running_s: float, price: float | None) -> Cost | None:
    """running_s: the time of replicas that run, times their GPUs. price: see `job_status`."""
    if not any(state.has_devices for state in states):
        return None
    price = stored_spec(states[0].header.spec).price_per_gpu_hour if price is None else price
    counts = PartCounts.sum(state.counts for state in states)
    return Cost.of(
        price,
        running_s + sum(state.device_s for state in states),
        num_tokens=counts.num_prompt_tokens + counts.num_output_tokens,
        num_rows=sum(state.num_inputs_committed for state in states),
    )


def _running_s(state: State) -> float:
    """The time until now of the replicas of a live process, times their GPUs."""
    running = state.of(StartedReplica)
    return sum((time.time() - each.started_at) * each.num_devices for each in running if each.started_at is not None)


def _retry(state: State, retry: Retry) -> RetryProgress:
    num_replaced = min(retry.num_shards, sum(part.retry >= retry.number for part in state.parts.values()))
    return RetryProgress(
        number=retry.number,
        predicate=retry.predicate,
        overrides=retry.overrides,
        num_parts=retry.num_shards,
        num_parts_replaced=num_replaced,
        num_rows=retry.num_rows,
        num_mended=retry.num_mended,
    )


def _repairs(state: State) -> tuple[RowsRepaired, ...]:
    return tuple(
        RowsRepaired(retry.number, retry.repair.path, retry.repair.num_rows)
        for retry in state.repairs()
        if retry.repair is not None
    )
