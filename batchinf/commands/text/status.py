"""The report of `status` as text."""

import time
from collections import Counter
from collections.abc import Iterator

from batchinf.base.text import counted, duration, list_names, short_count, size_text
from batchinf.commands.status import JobState, JobTotals, Load, RetryProgress, StatusReport
from batchinf.coordinator.display import status_line
from batchinf.fleet.speed_text import expected_line, speed_lines
from batchinf.fleet.status import ReplicaStatus
from batchinf.output.counts import non_finite_lines
from batchinf.prompts.encoder import second_bos_lines
from batchinf.tasks.registry import task_named


def status_lines(report: StatusReport) -> Iterator[str]:
    """The job and its totals. For a job in slices: their sum, and one or two lines for each."""
    if report.num_slices is not None:
        yield from _slices_lines(report, report.num_slices)
        return
    [job] = report.jobs
    assert job.totals is not None
    yield f"{report.folder}: {_activity(job)}"
    yield from _total_lines(job.totals, job.num_journalled)
    if len(job.extents) > 1:
        yield f"input rows came in {len(job.extents)} times: {', '.join(f'{num_rows:,}' for num_rows in job.extents)}"
    if job.retry is not None:
        yield _retry_line(job.retry)
    if job.speed is not None:
        yield from speed_lines(job.speed)
    if job.expected_speed is not None:
        yield expected_line(job.expected_speed)
    yield from _progress_lines(job, "")
    yield from _load_lines(report.load)
    for replica in job.replicas:
        yield f"  {_place(replica)}: {_condition(replica, job)}{_last_sign(replica)}"


def _slices_lines(report: StatusReport, num_slices: int) -> Iterator[str]:
    numbers = Counter(job.activity for job in report.jobs)
    yield f"{report.folder}: {num_slices} slices: " + ", ".join(f"{number} {name}" for name, number in numbers.items())
    if report.totals is not None:
        yield from _total_lines(report.totals, sum(job.num_journalled for job in report.jobs))
    yield from _load_lines(report.load, has_rates=True)
    for job in report.jobs:
        if job.totals is None:
            yield (
                f"  slice {job.slice} has not begun"
                if job.process is None
                else f"  slice {job.slice}: {_activity(job)}"
            )
            continue
        totals = job.totals
        rows = f"{totals.num_rows_committed:,} of {totals.num_rows:,} output rows, {totals.num_errors:,} errors"
        yield f"  slice {job.slice}: {_activity(job)}; {rows}"
        yield from _progress_lines(job, "    ")


def _activity(job: JobState) -> str:
    if job.process is not None:
        return f"{job.activity}, by pid {job.process.pid} on host {job.process.host} since {job.process.since}"
    return job.activity if job.activity == "done" else "stopped before its end; run the same command again to go on"


def _progress_lines(job: JobState, indent: str) -> Iterator[str]:
    if job.progress is not None:
        yield f"{indent}{duration(job.progress_age_s)} ago: {status_line(job.progress)}"


def _load_lines(load: Load | None, *, has_rates: bool = False) -> Iterator[str]:
    if load is None:
        return
    parts = [
        *([f"{counted(len(load.hosts), 'host')}: {list_names(load.hosts)}"] if load.hosts else []),
        f"{load.num_up} of {counted(load.num_replicas, 'replica')} up",
        *([counted(load.num_devices, "GPU")] if load.num_devices else []),
        counted(load.num_restarts, "restart"),
    ]
    if has_rates:
        rates = (("in", load.prompt_tokens_per_s), ("out", load.output_tokens_per_s))
        parts += [f"{name} {short_count(rate)} tok/s" for name, rate in rates if rate is not None]
        parts += [] if load.left_s is None else [f"{duration(load.left_s)} left"]
    yield "now: " + " · ".join(parts)


def _place(replica: ReplicaStatus) -> str:
    host = f" on host {replica.host}" if replica.host else ""
    devices = f", GPU {', '.join(replica.devices)}" if replica.devices else ""
    model = f" ({replica.device})" if replica.devices and replica.device else ""
    return f"replica {replica.replica}{host}{devices}{model}"


def _condition(replica: ReplicaStatus, job: JobState) -> str:
    if job.progress is None:
        return f"{counted(replica.restarts, 'restart')} in the last run"
    return (
        f"{replica.state}, {counted(replica.in_flight, 'request')} in the engine, {replica.num_running} running, "
        f"KV cache {replica.kv_cache_usage:.0%}, {counted(replica.num_rows, 'row')}{_busy(replica)}, "
        f"{counted(replica.restarts, 'restart')}"
    )


def _busy(replica: ReplicaStatus) -> str:
    return "" if replica.busy is None else f", busy {replica.busy:.0%} of the time"


def _last_sign(replica: ReplicaStatus) -> str:
    if replica.heard_at is None:
        return ""
    return f", last heard from {duration(max(0.0, time.time() - replica.heard_at))} ago"


def _retry_line(retry: RetryProgress) -> str:
    changes = "".join(f", {name} {value}" for name, value in retry.overrides.items())
    replaced = f"{retry.num_parts_replaced:,} of {retry.num_parts:,} parts replaced"
    return f"retry {retry.number} ({retry.predicate}{changes}): {replaced}"


def _total_lines(totals: JobTotals, num_journalled: int) -> Iterator[str]:
    yield (
        f"model {totals.model}, task {totals.task}, begun {totals.begun_at}, {counted(totals.num_starts, 'start')}, "
        f"{duration(totals.device_s)} of device time in ended replicas"
    )
    yield (
        f"committed: {totals.num_rows_committed:,} of {totals.num_rows:,} output rows in "
        f"{totals.num_parts_committed:,} of {totals.num_parts:,} parts, {totals.num_errors:,} errors, "
        f"{size_text(totals.num_bytes)}, {short_count(totals.num_prompt_tokens)} prompt and "
        f"{short_count(totals.num_output_tokens)} output tokens"
    )
    if num_journalled:
        yield f"not committed yet: {counted(num_journalled, 'request')} finished and kept in the journal"
    yield from task_named(totals.task).count_lines(totals.num_rows_committed, totals.task_counts)
    yield from non_finite_lines(totals.num_nan_rows, totals.num_inf_rows, expects_inf=totals.rules_out_tokens)
    yield from second_bos_lines(totals.num_second_bos)
