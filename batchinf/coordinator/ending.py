"""The end of a run: the summary of a finished job, and what a stopped one has kept. Both as lines for people."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchinf.base.errors import ErrorRateExceeded
from batchinf.base.slices import job_folder
from batchinf.base.storage import Folder
from batchinf.base.text import clip, counted, most_frequent, size_text, time_taken
from batchinf.coordinator.progress import Failure, commonest, forecast
from batchinf.fleet.speed_text import speed_lines, tokens_text
from batchinf.manifest.state import State
from batchinf.output import journal
from batchinf.output.counts import remarks
from batchinf.records import Speed
from batchinf.results import Results
from batchinf.spec.file import SpecFile

_MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The totals of a finished job, which `batchinf.run` returns. `print`, and a notebook, show its closing lines."""

    folder: str
    """The job's folder, or the slice's."""
    num_rows: int = 0
    """Output rows."""
    num_errors: int = 0
    """Output rows with an error."""
    num_prompt_tokens: int = 0
    """Tokens of all prompts."""
    num_output_tokens: int = 0
    """Tokens of all outputs."""
    num_parts: int = 0
    """Parquet files."""
    num_bytes: int = 0
    """Size of these files."""
    device_s: float = 0.0
    """Device time over all attempts, in seconds."""
    was_done: bool = False
    """Whether nothing was left to run."""
    speed: Speed | None = None
    """Speed of this run; None if no engine worked."""
    errors: tuple[Failure, ...] = ()
    """Each reason of each error type, with its first row, the most frequent first."""
    remarks: tuple[str, ...] = ()
    """Further lines, such as an accuracy or a forecast."""
    has_begun: bool = True
    """False if the input has no rows; then all numbers are 0."""

    @property
    def results(self) -> Results:
        """The output, as of `batchinf.open`."""
        return Results(self.folder)

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """What was done, how fast, where it is, each kind of error with an example, and the next command."""
        if not self.has_begun:
            return list(self.remarks)
        verb = "was already done" if self.was_done else "done"
        files = "Parquet file" if self.num_parts == 1 else "Parquet files"
        return [
            f"{verb}: {counted(self.num_rows, 'output row')}, {self.num_errors:,} of them errors; "
            f"{tokens_text(self.num_prompt_tokens, self.num_output_tokens)}",
            *(() if self.speed is None else speed_lines(self.speed)),
            f"{self.num_parts:,} {files}, {size_text(self.num_bytes)}, in {self.folder}/parts; "
            f"{self.device_s / 3600:.3f} device-hours ({time_taken(self.device_s)}) over all attempts",
            *self.remarks,
            *_error_lines(self.errors, self.num_errors),
            f"next: batchinf head {self.folder}{' --errors' if self.errors else ''}",
        ]


def _error_lines(errors: Sequence[Failure], num_errors: int) -> Iterator[str]:
    num_counted = sum(failure.num_rows for failure in errors)
    if num_counted < num_errors:
        yield f"of the first {num_counted:,} error rows:"
    shown, rest = most_frequent(errors)
    for failure in shown:
        words = clip(failure.error_message, _MESSAGE_CHARS)
        yield f"{failure.num_rows:,} × {failure.error_type}: {words} (as in row_index {failure.row_index})"
    yield from rest


def nothing_to_run(file: SpecFile) -> Summary:
    """The summary of a job that does not begin, because its input has no rows."""
    folder = os.fspath(job_folder(file.spec.output.path, file.slice).root)
    remark = f"done: {file.spec.input.path} has no rows, so nothing ran, and {folder} holds no job"
    return Summary(folder, remarks=(remark,), has_begun=False)


def finished(file: SpecFile, state: State, *, was_done: bool = False) -> Summary:
    """The summary of a job that is done. was_done: nothing was left to run.

    Raises ErrorRateExceeded, whose message has the summary's lines.
    """
    folder = job_folder(file.spec.output.path, file.slice)
    counts = state.counts
    summary = Summary(
        folder=os.fspath(folder.root),
        num_rows=counts.num_rows,
        num_errors=counts.num_errors,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=counts.num_output_tokens,
        num_parts=len(state.parts),
        num_bytes=state.num_bytes,
        device_s=state.device_s,
        was_done=was_done,
        speed=None if was_done else state.speed,
        errors=tuple(commonest(folder, state, most=None)) if counts.num_errors else (),
        remarks=(*(() if was_done else state.slower), *remarks([state]), *forecast(state)),
    )
    rate = summary.num_errors / max(1, summary.num_rows)
    if rate > file.spec.max_error_rate:
        raise ErrorRateExceeded(
            f"{rate:.1%} of the output rows are errors, more than max_error_rate {file.spec.max_error_rate:.1%}; "
            "all rows are stored, with error_type and error_message; a higher max_error_rate allows this\n"
            + "\n".join(summary.lines())
        )
    return summary


@dataclass(frozen=True, slots=True)
class StoppedWork:
    """The work of a stopped run, and how much of it is done."""

    num_rows: int
    """Output rows of the job, or those that were left of a retry."""
    num_part_rows: int
    """Those of them that are in parts."""
    num_parts: int
    num_open_rows: int
    """Finished rows that are in no part; some may not be in the journal."""
    num_unfinished: int
    """Requests that were in the engines at the end."""
    joins_requests: bool
    """Whether an output row may have several requests."""
    retry: int | None = None
    """The number of the retry."""


def stopped_lines(folder: Folder, state: State, work: StoppedWork, advice: str) -> Iterator[str]:
    """The lines of a stopped job: rows kept, rows that run again, rows still to run. advice: how to keep more."""
    num_kept = journal.num_results(folder, state.parts)
    num_kept_rows = min(work.num_open_rows, num_kept) if work.joins_requests else num_kept
    num_left = max(0, work.num_rows - work.num_part_rows - num_kept_rows)
    of_retry = "" if work.retry is None else f" that retry {work.retry} has to run"
    parts = counted(work.num_parts, "part" if work.retry is None else "replaced part")
    yield (
        f"  kept: {work.num_rows - num_left:,} of {work.num_rows:,} output rows{of_retry}: {work.num_part_rows:,} in "
        f"{parts}, and {counted(num_kept, 'finished request')} in the journal"
    )
    if work.num_unfinished:
        yield f"  runs again: {counted(work.num_unfinished, 'request')} that the engines had begun; {advice}"
    else:
        yield "  runs again: nothing; no request was cut off"
    yield f"  still to run: {counted(num_left, 'output row')}"
