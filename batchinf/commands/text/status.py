"""The lines of `batchinf status`."""

from collections import Counter
from collections.abc import Iterator

from batchinf.commands.status import JobState, RetryProgress, StatusReport, Totals
from batchinf.fleet.status import duration, short_count, status_line
from batchinf.output.counts import accuracy_lines, non_finite_lines
from batchinf.prompts.encoder import second_bos_lines


def status_lines(report: StatusReport) -> Iterator[str]:
    """The job and its totals; of a job in slices their sum, and a line or two for each."""
    if report.num_slices is not None:
        yield from _slices_lines(report, report.num_slices)
        return
    [job] = report.jobs
    assert job.totals is not None
    yield f"{report.folder}: {_activity(job)}"
    yield from _total_lines(job.totals)
    if len(job.extents) > 1:
        yield f"rows came in {len(job.extents)} times: {', '.join(f'{num_rows:,}' for num_rows in job.extents)}"
    if job.retry is not None:
        yield _retry_line(job.retry)
    yield from _progress_lines(job, "")
    if job.progress is not None:
        for replica in job.progress.replicas:
            yield (
                f"  replica {replica.replica}: {replica.state}, {replica.in_flight} requests in the engine, "
                f"{replica.num_running} running, KV cache {replica.kv_cache_usage:.0%}, {replica.restarts} restarts"
            )


def _slices_lines(report: StatusReport, num_slices: int) -> Iterator[str]:
    numbers = Counter(job.activity for job in report.jobs)
    yield f"{report.folder}: {num_slices} slices: " + ", ".join(f"{number} {name}" for name, number in numbers.items())
    if report.totals is not None:
        yield from _total_lines(report.totals)
    for job in report.jobs:
        if job.totals is None:
            yield f"  slice {job.slice} has not begun"
            continue
        totals = job.totals
        rows = f"{totals.num_rows_committed:,} of {totals.num_rows:,} rows, {totals.num_errors:,} errors"
        yield f"  slice {job.slice}: {_activity(job)}; {rows}"
        yield from _progress_lines(job, "    ")


def _activity(job: JobState) -> str:
    if job.process is not None:
        return f"{job.activity}, by pid {job.process.pid} on host {job.process.host} since {job.process.since}"
    return job.activity if job.activity == "done" else "stopped before its end; run the same command again to go on"


def _progress_lines(job: JobState, indent: str) -> Iterator[str]:
    if job.progress is not None:
        yield f"{indent}{duration(job.progress_age_s)} ago: {status_line(job.progress)}"


def _retry_line(retry: RetryProgress) -> str:
    changes = "".join(f", {name} {value}" for name, value in retry.overrides.items())
    replaced = f"{retry.num_parts_replaced:,} of {retry.num_parts:,} parts replaced"
    return f"retry {retry.number} ({retry.predicate}{changes}): {replaced}"


def _total_lines(totals: Totals) -> Iterator[str]:
    yield (
        f"model {totals.model}, task {totals.task}, begun {totals.begun_at}, {totals.num_starts} start(s), "
        f"{duration(totals.device_s)} of device time in ended replicas"
    )
    yield (
        f"committed: {totals.num_rows_committed:,} of {totals.num_rows:,} rows in "
        f"{totals.num_parts_committed:,} of {totals.num_parts:,} parts, {totals.num_errors:,} errors, "
        f"{totals.num_bytes / 2**20:,.1f} MiB, {short_count(totals.num_prompt_tokens)} prompt and "
        f"{short_count(totals.num_output_tokens)} output tokens"
    )
    yield from accuracy_lines(totals.accuracy)
    yield from non_finite_lines(totals.num_nan_rows, totals.num_inf_rows)
    yield from second_bos_lines(totals.num_second_bos)
