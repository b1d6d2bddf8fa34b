"""Runs a job: takes the lock, starts the job, runs its rows and its retries, and makes the summary."""

import os
import shutil
from dataclasses import dataclass

from batchinf.base.errors import ErrorRateExceeded, HopelessJob, OutputError
from batchinf.base.slices import check_place, job_folder
from batchinf.base.stop_signals import ahead_of_time_limit
from batchinf.base.storage import Folder
from batchinf.base.text import duration, short_count
from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Platforms
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launcher import work_of
from batchinf.fleet.quarantine import Trials
from batchinf.fleet.status import Telemetry
from batchinf.job.open import Job
from batchinf.manifest.lock import JobLock, await_free
from batchinf.manifest.state import Committed, State, last_epoch, read_state
from batchinf.output.parts import remarks
from batchinf.output.proof import changed_parts
from batchinf.run import progress
from batchinf.run.coordinator import Coordinator
from batchinf.run.extend import has_more
from batchinf.run.fresh import move_job_aside
from batchinf.run.progress import ProgressDisplay, forecast
from batchinf.run.retry import RetryPhase, begin_retry, next_phase
from batchinf.run.start import NOTHING_NEW, CheckedJob, StartedJob, check_first, start
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import PendingShards, total_rows, total_shards
from batchinf.spec.file import SpecFile

FOLDERS = ("manifest", "parts", "staging", "journal", "logs")


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals of a finished job, for the closing lines."""

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

    def lines(self) -> list[str]:
        verb = "was already done" if self.was_done else "done"
        return [
            f"{verb}: {self.num_rows:,} output rows, {self.num_errors:,} of them errors; "
            f"{short_count(self.num_prompt_tokens)} prompt and {short_count(self.num_output_tokens)} output tokens",
            f"{self.num_parts:,} Parquet files, {self.num_bytes / 2**20:,.1f} MiB, in {self.folder}/parts; "
            f"{self.device_s / 3600:.3f} device-hours ({duration(self.device_s)}) over all attempts",
            *self.remarks,
        ]


def run_job(
    file: SpecFile, backend: Backend, display: ProgressDisplay, retry: str | None, *, extends: bool, fresh: bool = False
) -> Summary:
    """Run a job or the rest of it. Must be called within `interruptible`, because only the coordinator drains.

    backend: where the replicas run, as `choose_backend` says. retry: a predicate for the rows of the finished job that
    run again. extends: first take in new rows of the input. fresh: move the folder's job aside and begin anew.

    Raises UserError, Interrupted, or, when all rows are done, ErrorRateExceeded.
    """
    if fresh:
        move_job_aside(file, backend, display)
    out, folder = file.spec.output.path, job_folder(file.spec.output.path, file.slice)
    check_place(out, file.slice)
    state = read_state(folder) if folder.exists("manifest") else None
    if state is None and retry is not None:
        raise OutputError(f"{out} holds no job to retry rows of; run it first, without --retry")
    if state is None and folder.exists("parts") and folder.list("parts"):
        raise OutputError(
            f"{folder.root} holds parts of a job whose manifest is gone: give the new job another output.path, or "
            "delete them yourself"
        )
    checked = check_first(file, state, retry, extends=extends)
    if state is not None and state.is_done and retry is None and _is_whole(folder, state):
        job = checked.open()
        if not extends or not has_more(job, state):
            if extends:
                display.say(NOTHING_NEW)
            return _finished(file, state, was_done=True)
    folder.make(*FOLDERS, *(() if file.slice is not None else ("source",)))
    try:
        with ahead_of_time_limit(file.spec.stop_before_s, display.say):
            _hold_and_run(checked, backend, display)
    finally:
        display.close()
    done = read_state(folder)
    assert done is not None
    return _finished(file, done, was_done=False)


def _is_whole(folder: Folder, state: State) -> bool:
    return RunOrder(folder, state.extents).is_whole and not changed_parts(folder, state)


def _hold_and_run(checked: CheckedJob, backend: Backend, display: ProgressDisplay) -> None:
    file, folder, lock = checked.prepared.file, checked.prepared.folder, JobLock(checked.prepared.folder)
    with lock.held(lambda: last_epoch(folder), display.say) as epoch:
        if file.slice is not None:
            # A slice that begins now may not be seen by a process that is about to move the whole folder.
            await_free(Folder(file.spec.output.path), display.say)
        state = read_state(folder, checked.state)
        if state is not checked.state:  # another process has run the job since
            checked = check_first(file, state, checked.retry, extends=checked.extends)
        with start(checked, backend, lock, epoch, display) as begun:
            if not begun.state.committed.all():
                _run_shards(begun, lock, display, begun.job, begun.state, begun.fleet)
            _run_retries(begun, lock, display)
            begun.manifest.done()
            begun.manifest.commit()
        _tidy(folder)


def _run_shards(
    begun: StartedJob,
    lock: JobLock,
    display: ProgressDisplay,
    job: Job,
    state: State,
    fleet: Fleet,
    phase: RetryPhase | None = None,
) -> None:
    """Run all shards that are not committed, or the rest of a retry. fleet: knows its work."""
    launcher, counts = begun.launcher, state.counts
    committed = Committed(int(state.committed.sum()), counts.num_rows, counts.num_errors)
    num_shards = total_shards(state.extents)
    num_rows = total_rows(state.extents) * job.task.num_rows_per_input
    is_done = state.committed
    num_chosen = None
    if phase is not None:
        num_rows = int(phase.num_chosen.sum()) * job.task.num_rows_per_input
        is_done = phase.num_chosen == 0
        committed = Committed(int(is_done.sum()), 0, 0)
        num_chosen = phase.num_chosen
    pending = PendingShards(state.extents, is_done, num_chosen, is_in_order=state.is_in_order)
    trials = Trials(RunOrder(job.folder, state.extents), state, is_done, fleet, begun.manifest)
    pending.withhold(trials.shards)
    platforms = Platforms(state, job.spec.same_device)
    telemetry = Telemetry(job.folder, launcher.epoch, launcher.backend.watch_devices(launcher.devices))
    try:
        Coordinator(
            job,
            begun.manifest,
            lock,
            fleet,
            pending,
            display,
            num_rows,
            num_shards,
            committed,
            platforms,
            trials,
            telemetry,
        ).run()
    except HopelessJob as error:
        found = read_state(job.folder)
        assert found is not None
        raise HopelessJob("\n".join([str(error), *progress.report(job, found)])) from None
    finally:
        telemetry.close()
    launcher.note_warm(fleet)


def _run_retries(begun: StartedJob, lock: JobLock, display: ProgressDisplay) -> None:
    """Begin the requested retry, unless it has begun before, and finish all retries that have begun."""
    job, manifest, request = begun.job, begun.manifest, begun.request
    state = read_state(job.folder)
    assert state is not None
    if request is not None and not request.is_under_way:
        display.say(f"looking for rows where {request.predicate.text}")
        if begin_retry(job, state, manifest, request) is None:
            display.say(f"no row matches {request.predicate.text}: nothing is run again")
    while (phase := next_phase(job, state, manifest)) is not None:
        num_rows, num_shards = int(phase.num_chosen.sum()), int((phase.num_chosen > 0).sum())
        display.say(f"{phase.retry}: {num_rows:,} input rows in {num_shards:,} shards run again")
        fleet = begun.launcher.fleet(state.header.job_id, phase.job.spec, phase.retry.number)
        fleet.give_work(work_of(phase.job, state, phase.retry))
        _run_shards(begun, lock, display, phase.job, state, fleet, phase)
        state = read_state(job.folder)
        assert state is not None


def _tidy(folder: Folder) -> None:
    """Empty the folders for work in progress."""
    for name in ("staging", "journal"):
        shutil.rmtree(folder.path(name), ignore_errors=True)
        folder.make(name)


def _finished(file: SpecFile, state: State, *, was_done: bool) -> Summary:
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
