"""The end of a run: the summary of a finished job and its closing lines."""

import os
from dataclasses import dataclass

from batchinf.base.errors import ErrorRateExceeded
from batchinf.base.slices import job_folder
from batchinf.base.text import duration, short_count
from batchinf.manifest.state import State
from batchinf.output.parts import remarks
from batchinf.results import Results
from batchinf.run import progress
from batchinf.run.progress import forecast
from batchinf.spec.file import SpecFile


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals of a finished job, which `batchinf.run` returns. `print` shows its closing lines.

    folder: the job's, or the slice's. num_rows, num_errors: output rows. num_prompt_tokens, num_output_tokens: of all
    rows. num_parts: Parquet files. device_s: device time over all attempts, in seconds. was_done: nothing was left to
    run. remarks: further lines, such as an accuracy or a forecast.
    """

    folder: str
    num_rows: int
    num_errors: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_parts: int
    num_bytes: int
    device_s: float
    was_done: bool
    remarks: tuple[str, ...]

    @property
    def results(self) -> Results:
        """The output, as of `batchinf.open`."""
        return Results(self.folder)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        verb = "was already done" if self.was_done else "done"
        return [
            f"{verb}: {self.num_rows:,} output rows, {self.num_errors:,} of them errors; "
            f"{short_count(self.num_prompt_tokens)} prompt and {short_count(self.num_output_tokens)} output tokens",
            f"{self.num_parts:,} Parquet files, {self.num_bytes / 2**20:,.1f} MiB, in {self.folder}/parts; "
            f"{self.device_s / 3600:.3f} device-hours ({duration(self.device_s)}) over all attempts",
            *self.remarks,
        ]


def finished(file: SpecFile, state: State, *, was_done: bool) -> Summary:
    """The summary of a job that is done. Raises ErrorRateExceeded."""
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
        remarks=(*remarks([state]), *forecast(state)),
    )
    rate = summary.num_errors / max(1, summary.num_rows)
    if rate > file.spec.max_error_rate:
        raise ErrorRateExceeded(
            f"{rate:.1%} of the output rows are errors, more than max_error_rate {file.spec.max_error_rate:.1%}; "
            "see the columns error_type and error_message\n"
            + "\n".join([*progress.failure_lines(progress.commonest(folder, state)), *summary.lines()])
        )
    return summary
