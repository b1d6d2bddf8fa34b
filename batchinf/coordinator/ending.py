"""The end of a run, as lines for people: the summary, what a stopped run kept, frequent errors, the forecast."""

import contextlib
import os
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from batchinf.base.errors import BatchinfError, ErrorRateExceeded, OutputError, RowError
from batchinf.base.parquet import open_part
from batchinf.base.slices import job_folder
from batchinf.base.storage import Folder
from batchinf.base.text import (
    ErrorGroup,
    clip,
    counted,
    most_frequent,
    size_text,
    time_taken,
    time_text,
    without_numbers,
)
from batchinf.coordinator.bad_files import bad_file_lines
from batchinf.fleet.speed_text import speed_lines, tokens_text
from batchinf.job.input_job import image_folder
from batchinf.job.job import Job
from batchinf.manifest.events import EventLine, read_events
from batchinf.manifest.lines import Chosen, Speed
from batchinf.manifest.names import part_name
from batchinf.manifest.state import State
from batchinf.output import journal
from batchinf.output.counts import error_rows
from batchinf.output.remarks import remarks
from batchinf.prompts.builder import PromptBuilder
from batchinf.schedule.shards import total_rows
from batchinf.spec.file import SpecFile
from batchinf.spec.input import InputSpec

_COLUMNS = ["row_index", "error_type", "error_message"]
# Limits that make the closing lines quick for a job of any size.
_MOST_PARTS = 200
_MOST_ROWS = 10_000
_SHOWN = 3
_PROMPT_CHARS = 200
MOST_RETRIES = 5
# Of an error's message, when the job is done and when it has ended early.
_DONE_CHARS = 200
_ENDED_CHARS = 300


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """The totals of a finished job. `print`, and a notebook, show its closing lines."""

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
    has_gpus: bool = False
    """Whether the devices are GPUs. Without one, a replica counts as a device."""
    was_done: bool = False
    """Whether nothing was left to run."""
    speed: Speed | None = None
    """Speed of this run; None if no engine worked."""
    errors: tuple[ErrorGroup, ...] = ()
    """Each reason of each error type, with its first row, the most frequent first."""
    image_folder: str | None = None
    """In which relative paths of images begin, if the image of a path was not found."""
    remarks: tuple[str, ...] = ()
    """Further lines, such as an accuracy or a forecast."""
    retry_command: str = ""
    """The command that runs the error rows again; empty without such rows, and for a spec from Python."""
    has_begun: bool = True
    """False if the input has no rows; then all numbers are 0."""

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
            f"{self._device_time()} over all attempts",
            *self.remarks,
            *_error_lines(self.errors, self.num_errors),
            *_image_folder_lines(self.image_folder),
            f"next: batchinf head {shlex.quote(self.folder)}{' --errors' if self.errors else ''}",
            *([f"run the error rows again: {self.retry_command}"] if self.retry_command else []),
        ]

    def _device_time(self) -> str:
        if not self.has_gpus:
            return f"{time_taken(self.device_s)} of replica time"
        return f"{self.device_s / 3600:.3f} GPU-hours ({time_taken(self.device_s)})"


def _error_lines(errors: Sequence[ErrorGroup], num_errors: int) -> Iterator[str]:
    num_counted = sum(failure.num_rows for failure in errors)
    if num_counted < num_errors:
        yield f"of the first {num_counted:,} error rows:"
    shown, rest = most_frequent(errors)
    for failure in shown:
        words = clip(failure.first_message, _DONE_CHARS)
        yield f"{failure.num_rows:,} × {failure.error_type}: {words} (as in row_index {failure.first_row})"
    yield from rest


def _image_folder(where: InputSpec, errors: Sequence[ErrorGroup]) -> str | None:
    """See `Summary.image_folder`."""
    not_found = [error.first_message for error in errors if error.error_type == "image_not_found"]
    return image_folder(where) if any("://" not in message for message in not_found) else None


def _retry_command(file: SpecFile) -> str:
    """Empty for a spec from Python. Fields that `--set` gave are not in it: the user gives them again, or others."""
    if not file.path.endswith((".yaml", ".yml")):
        return ""
    slice_ = [] if file.slice is None else ["--slice", str(file.slice)]
    more = ", with the same --set" if any(place.startswith("--set") for place in file.locations.values()) else ""
    return shlex.join(["batchinf", "run", file.path, *slice_, "--retry", "errors"]) + more


def _image_folder_lines(folder: str | None) -> list[str]:
    return [] if folder is None else [f"relative paths of images begin in {folder}"]


def nothing_to_run(file: SpecFile) -> Summary:
    """The summary of a job that does not begin, because its input has no rows."""
    folder = _named(file)
    remark = f"done: {file.spec.input.path} has no rows, so nothing ran, and {folder} holds no job"
    return Summary(folder, remarks=(remark,), has_begun=False)


def _named(file: SpecFile) -> str:
    """The folder of a job or a slice as the user names it: it may be in a bucket."""
    out = file.spec.output.path
    if file.spec.output.is_bucket:
        return out if file.slice is None else f"{out.rstrip('/')}/{file.slice.name}"
    return os.fspath(job_folder(out, file.slice).root)


def earlier_lines(job: Job, state: State) -> list[str]:
    """The rows that earlier runs have finished, if this one has rows to run. state: at the start of this run."""
    num_kept = journal.num_results(job.folder, state.parts)
    if state.committed.all() or not (state.counts.num_rows or num_kept):
        return []
    in_parts = f"{counted(state.counts.num_rows, 'output row')} in parts"
    in_journal = f"{counted(num_kept, 'request' if job.task.joins_requests else 'row')} from the journal"
    found = [text for text, num in ((in_parts, state.counts.num_rows), (in_journal, num_kept)) if num]
    return [f"from earlier runs: {', '.join(found)}"]


def mended_text(num_mended: int | None, num_rows: int) -> str:
    """What a retry mended, for people; empty before that is counted."""
    return "" if num_mended is None else f"{num_mended:,} of {counted(num_rows, 'input row')} mended"


def _retry_lines(state: State) -> Iterator[str]:
    """What the last attempts to run rows again have mended."""
    retries = [retry for _, retry in sorted(state.retries.items()) if retry.num_mended is not None]
    for retry in retries[-MOST_RETRIES:]:
        yield f"{retry}: {mended_text(retry.num_mended, retry.num_rows)}"


def finished(file: SpecFile, state: State, *, was_done: bool = False, earlier: Sequence[str] = ()) -> Summary:
    """The summary of a job that is done. was_done: nothing was left to run. Raises ErrorRateExceeded.

    earlier: see `earlier_lines`.
    """
    folder = job_folder(file.spec.output.folder, file.slice)
    counts = state.counts
    errors = tuple(commonest(folder, state, most=None)) if counts.num_errors else ()
    bad_files = bad_file_lines(folder, state)
    slower = () if was_done else state.slower
    summary = Summary(
        folder=_named(file),
        num_rows=counts.num_rows,
        num_errors=counts.num_errors,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=counts.num_output_tokens,
        num_parts=len(state.parts),
        num_bytes=state.num_bytes,
        device_s=state.device_s,
        has_gpus=state.has_devices,
        was_done=was_done,
        speed=None if was_done else state.speed,
        errors=errors,
        image_folder=_image_folder(file.spec.input, errors),
        retry_command=_retry_command(file) if counts.num_errors else "",
        remarks=(*earlier, *slower, *_retry_lines(state), *remarks([state]), *bad_files, *forecast(folder, state)),
    )
    rate = summary.num_errors / max(1, summary.num_rows)
    if rate > file.spec.max_error_rate:
        push = file.spec.output.push_to_hub
        raise ErrorRateExceeded(
            f"{rate:.1%} of the output rows are errors, more than max_error_rate {file.spec.max_error_rate:.1%}; "
            "all rows are stored, with error_type and error_message; a higher max_error_rate allows this"
            + ("\n" if push is None else f"; nothing is pushed to {push.repository}\n")
            + "\n".join(summary.lines())
        )
    return summary


# -- errors ------------------------------------------------------------------------------------------------------------


def commonest(
    folder: Folder, state: State, stored: journal.Journal | None = None, most: int | None = _SHOWN
) -> list[ErrorGroup]:
    """The `most` most frequent failures among the first 10,000 error rows in parts and journal; None: all of them."""
    failures: dict[tuple[str, str], ErrorGroup] = {}
    num_looked_at = 0
    with contextlib.closing(_error_tables(folder, state, stored)) as tables:
        for table in tables:
            for row in table.slice(0, _MOST_ROWS - num_looked_at).to_pylist():
                message = row["error_message"] or ""
                key = row["error_type"], without_numbers(message)
                failure = failures.get(key) or ErrorGroup(row["error_type"], 0, row["row_index"], message)
                failures[key] = replace(failure, num_rows=failure.num_rows + 1)
            num_looked_at += table.num_rows
            if num_looked_at >= _MOST_ROWS:
                break
    return sorted(failures.values(), key=lambda failure: -failure.num_rows)[:most]


def _error_tables(folder: Folder, state: State, stored: journal.Journal | None) -> Generator[pa.Table, None, None]:
    with_errors = [shard for shard, part in sorted(state.parts.items()) if part.num_errors]
    for shard in with_errors[:_MOST_PARTS]:
        # This is only a report. A part that is missing must not change the job's result.
        with contextlib.suppress(OutputError), open_part(folder.path(f"parts/{part_name(shard)}")) as file:
            for index in range(file.num_row_groups):
                yield error_rows(file.read_row_group(index, columns=_COLUMNS))
    if stored is not None:
        for shard in sorted(set(journal.list_shards(folder)) - state.parts.keys()):
            for table in stored.tables(shard):
                yield error_rows(table.select(_COLUMNS))


def failure_lines(failures: Sequence[ErrorGroup], prompts: Sequence[str]) -> list[str]:
    """The failures as lines. prompts: one for each failure, or none."""
    lines = ["the commonest errors:"] if failures else []
    for place, failure in enumerate(failures):
        words = clip(failure.first_message, _ENDED_CHARS)
        lines.append(f"  {failure.num_rows:,} × {failure.error_type}: {words}")
        if prompts:
            lines.append(f"      row {failure.first_row}: {prompts[place]}")
    return lines


def ended_early_lines(job: Job, state: State) -> list[str]:
    """The report of a job that ended early: frequent errors with a prompt for each, what is kept, and what to do."""
    failures = commonest(job.folder, state, journal.Journal(job.folder, "look", state.header.columns.journal_schema))
    return [
        *failure_lines(failures, _prompts(job, failures, state)),
        *_image_folder_lines(_image_folder(job.spec.input, failures)),
        f"kept: {state.counts.num_rows:,} output rows in {len(state.parts):,} parts, and all other finished requests "
        "in the journal",
        "correct the spec or the input and give the new job another output.path; or continue this job despite its "
        "errors: run the same command with --set max_error_rate=1",
    ]


def _prompts(job: Job, failures: Sequence[ErrorGroup], state: State) -> list[str]:
    try:
        builder = job.prompt_builder(state)
    except BatchinfError:
        return []
    return [_prompt(job, builder, failure.first_row) for failure in failures]


def _prompt(job: Job, builder: PromptBuilder, row_index: int) -> str:
    [row] = job.source.read(row_index, row_index + 1, builder.columns)
    text = builder.preview(row, _PROMPT_CHARS)
    if isinstance(text, RowError):
        return f"no prompt can be made of {clip(str(dict(row.values)), _PROMPT_CHARS)}"
    return f"prompt '{clip(text, _PROMPT_CHARS)}'"


# -- the forecast ------------------------------------------------------------------------------------------------------


def forecast(folder: Folder, state: State) -> list[str]:
    """Lines that forecast the cost of all rows, if `input.sample` or `limit` made a finished job smaller.

    Device time is the time in which engines had rows, over all attempts, by the job's events. Without them, there are
    no lines.
    """
    where = state.header.spec["input"]
    is_part = where.get("sample") is not None or where.get("limit") is not None
    chosen = state.of(Chosen)
    if not chosen or not is_part or not state.extents or not chosen[0].num_rows:
        return []
    events = read_events(folder)
    batch = _num_at_once(events)
    if not batch:
        return []
    num_run = total_rows(state.extents)
    num_all, whose = _all_rows(state, where, chosen[0].num_input_rows)
    factor = num_all / num_run
    run_s = max(0.0, state.device_s - _idle_s(events))
    device = "GPU" if state.has_devices else "replica"
    is_small = state.counts.num_rows < batch
    lines = [
        f"forecast from {num_run:,} input rows, which took {time_text(run_s)} of {device} time: {whose} take "
        f"{'at most' if is_small else 'about'} {time_text(run_s * factor)} and {size_text(state.num_bytes * factor)}, "
        "plus the start of the engines"
    ]
    if is_small:
        lines.append(
            f"so few rows do not fill the engines, which run {batch:,} requests at once: a larger sample gives a "
            "better forecast"
        )
    return lines


def _all_rows(state: State, where: Mapping[str, Any], num_input_rows: int) -> tuple[int, str]:
    """How many rows the job has without `sample` and `limit`, and these rows in words. where: the section `input`."""
    named = [name for name in ("where", "exclude") if where.get(name) is not None]
    if not named:
        return num_input_rows, f"all {num_input_rows:,} input rows"
    num_considered = state.extents[-1].stop_row - state.extents[0].first_row
    share = total_rows(state.extents) / num_considered
    num_all = round(share / (where.get("sample") or 1.0) * num_input_rows)
    return num_all, f"all input rows that pass {' and '.join(named)}, about {num_all:,},"


def _num_at_once(events: Sequence[EventLine]) -> int:
    """Requests that all engines together run at once."""
    ready = {event.fields.get("replica", 0): event for event in events if event.name == "ready"}
    return sum(int(event.fields.get("max_num_seqs", 0)) for event in ready.values())


def _idle_s(events: Sequence[EventLine]) -> float:
    """Device time in which engines had no rows: while they started, waited for the input, or ended."""
    started: dict[str, EventLine] = {}
    idle_since: dict[str, EventLine] = {}
    total = 0.0
    for event in events:
        name = event.fields.get("incarnation", "")
        if event.name == "replica_started":
            started[name] = idle_since[name] = event
        elif event.name == "ready":
            replica = event.fields.get("replica", 0)
            names = [name for name in idle_since if started[name].fields.get("replica", 0) == replica]
            total += _device_s(started[names[-1]], idle_since.pop(names[-1]), event) if names else 0.0
        elif event.name == "all_committed":
            idle_since.update({name: event for name in started if name not in idle_since})
        elif event.name == "replica_ended":
            start = started.pop(name, None)
            since = idle_since.pop(name, None)
            if since is start is not None:
                total += event.fields.get("device_s", 0.0)
            elif since is not None and start is not None:
                total += _device_s(start, since, event)
    return total


def _device_s(start: EventLine, since: EventLine, until: EventLine) -> float:
    return max(0.0, until.time - since.time) * float(start.fields.get("num_devices", 1))
