"""The reports of `status` and `check` as text."""

import time
from collections import Counter
from collections.abc import Iterator

from batchinf.base.errors import OutputError
from batchinf.base.text import counted, duration, list_names, short_count, size_text
from batchinf.commands.check import CheckFinding, CheckReport, JobCheck
from batchinf.commands.status import JobState, JobTotals, Load, RetryProgress, StatusReport
from batchinf.coordinator.display import status_line
from batchinf.fleet.speed import expected_line, speed_lines
from batchinf.fleet.status import ReplicaStatus
from batchinf.output.counts import accuracy_lines, non_finite_lines
from batchinf.prompts.encoder import second_bos_lines


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
            yield f"  slice {job.slice} has not begun"
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
        f"KV cache {replica.kv_cache_usage:.0%}, {counted(replica.restarts, 'restart')}"
    )


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
    yield from accuracy_lines(totals.accuracy)
    yield from non_finite_lines(totals.num_nan_rows, totals.num_inf_rows, expects_inf=totals.rules_out_tokens)
    yield from second_bos_lines(totals.num_second_bos)


_AGAIN = "run the job again: its rows run again"
# Problem → what is wrong with the file, and what to do.
_WRONG = {
    "manifest_without_job": ("lacks the lines about the job", "restore it from a backup"),
    "selection_lost": (
        "is gone or altered; it says which rows run and in which order", "run the job again: it chooses them again",
    ),
    "foreign_file": ("is not a part of this job, but readers would read it as one", "move it away"),
    "spec_missing": ("is missing", "check --repair writes it again from the manifest"),
}  # fmt: skip
_NOTES = {
    "journal_damaged": "is damaged and was ignored; its results run again",
    "spec_restored": "was missing; it is written again",
}


def check_lines(report: CheckReport) -> Iterator[str]:
    """A line for each finding, then a summary, for the job or for each of its slices."""
    for job in report.jobs:
        prefix = "" if job.slice is None else f"slice {job.slice}: "
        if not job.has_begun:
            yield f"{prefix}has not begun"
            continue
        for line in _job_lines(job, report.is_deep):
            yield prefix + line
        error = _job_error(job)
        if job.slice is not None and error is not None:
            yield prefix + error


def raise_if_wrong(report: CheckReport) -> None:
    """Raise OutputError if something is wrong."""
    if report.is_whole:
        return
    if report.jobs[0].slice is None:
        raise OutputError(_job_error(report.jobs[0]))
    num_wrong = sum(not job.is_whole for job in report.jobs)
    raise OutputError(f"{num_wrong} of the {len(report.jobs)} slices in {report.folder} have problems: see above")


def _job_lines(job: JobCheck, is_deep: bool) -> Iterator[str]:
    for finding in job.findings:
        yield _wrong_line(finding) if finding.is_wrong else _note_line(finding, job.activity == "running")
    if job.is_checked:
        how = "every byte" if is_deep else "sizes and footers; --deep reads every byte"
        states = {"running": "at work", "stopped": "not done; run it again to go on"}
        yield (
            f"checked {job.num_parts_checked:,} of {job.num_parts:,} parts, {job.num_rows_committed:,} of "
            f"{job.num_rows:,} output rows ({how}): {job.num_wrong:,} wrong, "
            f"{len(job.findings) - job.num_wrong:,} notes; the job is {states.get(job.activity, job.activity)}"
        )


def _note_line(finding: CheckFinding, is_running: bool) -> str:
    if finding.problem == "part_unnamed":
        when = "being published" if is_running else "the next run adopts it if it is whole"
        return f"note: {finding.file} is not in the manifest: {when}"
    return f"note: {finding.file} {_NOTES[finding.problem]}"


def _wrong_line(finding: CheckFinding) -> str:
    if finding.problem == "manifest_damaged":
        return f"wrong: {finding.detail}"
    what, remedy = _what_and_remedy(finding)
    return f"wrong: {finding.file} {what}; {remedy}"


def _what_and_remedy(finding: CheckFinding) -> tuple[str, str]:
    if finding.problem == "part_damaged":
        if finding.moved_to is not None:
            return finding.detail, f"moved to {finding.moved_to}; {_AGAIN}"
        # A resume does not notice such a flaw, so the part must be moved aside first.
        aside = "check --deep --repair moves it aside; then " if finding.needs_repair else ""
        return finding.detail, aside + _AGAIN
    if finding.problem == "manifest_of_other_job":
        what = f"belongs to job {finding.job_id}, but the parts belong to job {finding.other_job_id}"
        return what, "restore the right manifest, or move the parts away"
    if finding.problem == "manifest_incomplete":
        what = f"says that the job is done, but shard {finding.shard} of {finding.num_shards:,} is missing in it"
        return what, "restore it from a backup, or delete its last line and run again"
    return _WRONG[finding.problem]


def _job_error(job: JobCheck) -> str | None:
    if job.error is not None or not job.num_wrong:
        return job.error
    if job.replaced_logs:
        return (
            f"{job.folder}: its damaged manifest was replaced; the old one is {', '.join(job.replaced_logs)}; run the "
            "job again: whole parts are kept, all other rows run again"
        )
    if not job.is_checked:
        return (
            f"{job.folder}: nothing else can be checked without the manifest; check --repair makes a new one from its "
            "undamaged lines"
        )
    num_moved = sum(finding.moved_to is not None for finding in job.findings)
    moved = f", {num_moved:,} moved aside: run the job again" if num_moved else ""
    things = "1 thing is" if job.num_wrong == 1 else f"{job.num_wrong:,} things are"
    return f"{job.folder}: {things} wrong, see above{moved}"
