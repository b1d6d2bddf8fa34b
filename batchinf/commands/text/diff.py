"""The lines of `batchinf diff`. What a task counts has its words in the task's folder."""

from collections.abc import Iterator

from batchinf.commands.diff import ComparedJob, DiffReport
from batchinf.tasks.changes_text import clip_value
from batchinf.tasks.registry import task_named


def diff_lines(report: DiffReport, to: str | None) -> Iterator[str]:
    """The two jobs, then what changed, then examples. to: the file that was asked for."""
    yield from (_job_line(name, job) for name, job in (("A", report.a), ("B", report.b)))
    for change in report.identity_changes:
        yield f"  {change.name}: {clip_value(repr(change.a))} -> {clip_value(repr(change.b))}"
    yield from _change_lines(report)
    words = task_named(report.task).comparison
    yield from words.lines(report.changes.own)
    for row in report.changes.examples:
        yield from words.example_lines(report.key, row)
    if to is not None:
        num_rows = report.changes.num_both
        yield f"{num_rows:,} rows in {to}" if num_rows else f"no row is in both: {to} is not written"


def _job_line(name: str, job: ComparedJob) -> str:
    about = {"model": job.model, "vllm": job.vllm, "torch": job.torch, "device": job.device}
    said = ", ".join(f"{key} {value}" for key, value in about.items() if value is not None)
    return f"{name} {job.folder}: {job.num_rows:,} rows{'' if job.is_done else ', not done'}, {said}"


def _change_lines(report: DiffReport) -> Iterator[str]:
    found, only_a, only_b = report.changes, report.num_only_a, report.num_only_b
    alone = f"; {only_a:,} only in A, {only_b:,} only in B" if only_a or only_b else ""
    yield f"rows: {found.num_both:,} in both, by {report.key}{alone}"
    if found.num_other_prompts:
        yield f"prompts: {found.num_other_prompts:,} rows have other token ids: a changed template, tokenizer or input"
    if found.num_errors_only_a or found.num_errors_only_b:
        yield f"errors: {found.num_errors_only_b:,} rows only in B, {found.num_errors_only_a:,} only in A"
    share = found.num_changed / max(1, found.num_both)
    yield f"outputs: {found.num_changed:,} of {found.num_both:,} changed ({share:.2%})"
