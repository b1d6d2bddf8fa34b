"""The report of `check` as text."""

from collections.abc import Iterator

from batchinf.base.errors import OutputError
from batchinf.commands.check import CheckFinding, CheckReport, JobCheck

_AGAIN = "run the job again: its rows run again"
# For each problem: what is wrong with the file, and what the user can do.
_WRONG = {
    "manifest_without_job": ("lacks the lines about the job", "restore it from a backup"),
    "selection_lost": (
        "is gone or altered; it says which rows run and in which order", "run the job again: it chooses them again",
    ),
    "foreign_file": ("is not a part of this job, but readers would read it as one", "move it away"),
    "spec_missing": ("is missing", "check --repair writes it again from the manifest"),
}  # fmt: skip
_NOTES = {
    "journal_damaged": "is damaged; its results run again, unless a part has them",
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
