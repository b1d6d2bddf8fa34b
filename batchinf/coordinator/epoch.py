"""Runs a job: takes the lock, starts the job, runs its rows and its retries, and makes the summary."""

import contextlib
import functools
import time
from dataclasses import asdict

from batchinf.base.errors import HopelessJob, Interrupted, NoRowsError, OutputError
from batchinf.base.slices import check_place, job_folder
from batchinf.base.stop_signals import ahead_of_time_limit
from batchinf.base.storage import Folder
from batchinf.coordinator import progress
from batchinf.coordinator.coordinator import Coordinator
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.ending import StoppedWork, Summary, finished, nothing_to_run, stopped_lines
from batchinf.coordinator.extend import has_more
from batchinf.coordinator.fresh import move_job_aside
from batchinf.coordinator.recovery import has_leftovers, tidy
from batchinf.coordinator.retry import RetryPhase, begin_retry, next_phase
from batchinf.coordinator.start import NOTHING_NEW, CheckedJob, StartedJob, check_first, start
from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Platforms
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launcher import work_of
from batchinf.fleet.quarantine import Trials
from batchinf.fleet.speed import measured_speed
from batchinf.fleet.status import Telemetry
from batchinf.job.open import Job
from batchinf.manifest.lines import SPEED
from batchinf.manifest.lock import JobLock, await_free
from batchinf.manifest.state import Committed, State, last_epoch, read_state
from batchinf.output.proof import changed_parts
from batchinf.schedule.leases import PendingRows
from batchinf.schedule.positions import RunOrder, chosen_in_order
from batchinf.schedule.shards import total_rows, total_shards
from batchinf.spec.file import SpecFile

FOLDERS = ("manifest", "parts", "staging", "journal", "logs")


def run_job(
    file: SpecFile,
    backend: Backend,
    display: ProgressDisplay,
    retry: str | None,
    *,
    extends: bool,
    fresh: bool,
    begins_together: bool = False,
) -> Summary:
    """Run a job or the rest of it. Must be called within `interruptible`, because only the coordinator drains.

    backend: where the replicas run, as `choose_backend` says. retry: a predicate for the rows of the finished job that
    run again. extends: first take in new rows of the input. fresh: move the folder's job aside and start a new one.
    begins_together: no replica begins its rows before the engines of all are up; for trials, which measure the speed.

    Raises UserError, Interrupted, or, when all rows are done, ErrorRateExceeded.
    """
    began = time.monotonic()
    if fresh:
        move_job_aside(file, backend, display)
    out, folder = file.spec.output.path, job_folder(file.spec.output.path, file.slice)
    check_place(out, file.slice)
    state = read_state(folder) if folder.exists("manifest") else None
    _check_held(folder, state, retry)
    checked = check_first(file, state, retry, extends=extends)
    if state is not None and state.is_done and retry is None and _is_whole(folder, state):
        job = checked.open()
        with contextlib.closing(job.source):
            is_finished = not extends or not has_more(job, state)
        if is_finished:
            if extends:
                display.say(NOTHING_NEW)
            if has_leftovers(folder):
                _tidy_late(folder)
            return finished(file, state, was_done=True)
    folder.make(*FOLDERS, *(() if file.slice is not None else ("source",)))
    try:
        with ahead_of_time_limit(file.spec.stop_before_s, display.say):
            _hold_and_run(checked, backend, display, began, begins_together=begins_together)
    except NoRowsError:
        if read_state(folder) is not None or retry is not None:
            raise
        return nothing_to_run(file)
    finally:
        display.close()
    done = read_state(folder)
    assert done is not None
    return finished(file, done)


def _check_held(folder: Folder, state: State | None, retry: str | None) -> None:
    """Raise OutputError if a folder without a job holds parts, or if rows of its job should run again."""
    if state is None and retry is not None:
        raise OutputError(f"{folder.root} holds no job whose rows could run again; run it first, without --retry")
    if state is None and folder.exists("parts") and folder.list("parts"):
        raise OutputError(
            f"{folder.root} holds parts of a job without its manifest: give the new job another output.path, or delete "
            "the parts"
        )


def _is_whole(folder: Folder, state: State) -> bool:
    return RunOrder(folder, state.extents).is_whole and not changed_parts(folder, state)


def _hold_and_run(
    checked: CheckedJob, backend: Backend, display: ProgressDisplay, began: float, *, begins_together: bool
) -> None:
    """began: start of the run, in seconds of the monotonic clock."""
    file, folder, lock = checked.prepared.file, checked.prepared.folder, JobLock(checked.prepared.folder)
    with lock.held(lambda: last_epoch(folder), display.say) as epoch:
        if file.slice is not None:
            # A slice that begins now may not be seen by a process that is about to move the whole folder.
            await_free(Folder(file.spec.output.path), display.say)
        state = read_state(folder, checked.state)
        if state is not checked.state:  # another process has run the job since, or moved it
            _check_held(folder, state, checked.retry)
            checked = check_first(file, state, checked.retry, extends=checked.extends)
        with start(checked, backend, lock, epoch, display) as begun:
            if not begun.state.committed.all():
                fleet = begun.fleet
                _run_shards(begun, lock, display, begun.job, begun.state, fleet, begins_together=begins_together)
            _run_retries(begun, lock, display)
            _note_speed(begun, time.monotonic() - began)
            begun.manifest.done()
            begun.manifest.commit()
        tidy(folder)


def _run_shards(
    begun: StartedJob,
    lock: JobLock,
    display: ProgressDisplay,
    job: Job,
    state: State,
    fleet: Fleet,
    phase: RetryPhase | None = None,
    *,
    begins_together: bool = False,
) -> None:
    """Run all shards that are not committed, or the rest of a retry. fleet: knows its work."""
    launcher, counts = begun.launcher, state.counts
    committed = Committed(int(state.committed.sum()), counts.num_rows, counts.num_errors)
    num_shards = total_shards(state.extents)
    num_rows = total_rows(state.extents) * job.task.num_rows_per_input
    is_done = state.committed
    num_chosen = chosen_of = None
    order = RunOrder(job.folder, state.extents)
    if phase is not None:
        num_rows = int(phase.num_chosen.sum()) * job.task.num_rows_per_input
        is_done = phase.num_chosen == 0
        committed = Committed(int(is_done.sum()), 0, 0)
        num_chosen, chosen_of = phase.num_chosen, functools.partial(chosen_in_order, order, phase.chosen)
    pending = PendingRows(state.extents, is_done, num_chosen, chosen_of=chosen_of, is_in_order=state.is_in_order)
    trials = Trials(order, state, is_done, fleet, begun.manifest)
    pending.withhold(trials.leases.values())
    platforms = Platforms(state, job.spec.same_device)
    telemetry = Telemetry(job.folder, launcher.epoch, launcher.backend.watch_devices(launcher.devices))
    coordinator = Coordinator(
        job=job,
        manifest=begun.manifest,
        lock=lock,
        fleet=fleet,
        pending=pending,
        display=display,
        num_rows=num_rows,
        num_shards=num_shards,
        committed=committed,
        platforms=platforms,
        trials=trials,
        telemetry=telemetry,
        identity=begun.identity,
        most_tokens=_most_tokens(job),
        begins_together=begins_together,
    )
    try:
        coordinator.run()
    except Interrupted as error:
        found = read_state(job.folder)
        assert found is not None
        work = StoppedWork(
            num_rows,
            committed.num_rows,
            committed.num_shards - int(is_done.sum()) if phase else len(found.parts),
            coordinator.num_rows_in_journal,
            job.task.joins_requests,
            phase.retry.number if phase else None,
        )
        kept = stopped_lines(job.folder, found, work, coordinator.num_unfinished, coordinator.requests.advice)
        raise Interrupted("\n".join([str(error), *kept])) from None
    except HopelessJob as error:
        found = read_state(job.folder)
        assert found is not None
        raise HopelessJob("\n".join([str(error), *progress.ended_early_lines(job, found)])) from None
    finally:
        telemetry.close()
    launcher.note_warm(fleet)


def _most_tokens(job: Job) -> int | None:
    """The most tokens that a row generates; None if the job's spec does not say."""
    sampling = job.spec.sampling
    has_own = "max_tokens" in (sampling.columns or {})
    return sampling.max_tokens if job.task.draws_tokens and not has_own else None


def _run_retries(begun: StartedJob, lock: JobLock, display: ProgressDisplay) -> None:
    """Begin the requested retry, unless it has begun before, and finish all retries that have begun."""
    job, manifest, request = begun.job, begun.manifest, begun.request
    state = read_state(job.folder)
    assert state is not None
    if request is not None and not request.is_under_way:
        display.say(f"looking for rows where {request.predicate.text}")
        if begin_retry(job, state, manifest, request) is None:
            display.say(f"no row matches {request.predicate.text}: no row runs again")
    while (phase := next_phase(job, state, manifest)) is not None:
        num_rows, num_shards = int(phase.num_chosen.sum()), int((phase.num_chosen > 0).sum())
        display.say(f"{phase.retry}: {num_rows:,} input rows in {num_shards:,} shards run again")
        fleet = begun.launcher.fleet(state.header.job_id, phase.job.spec, phase.retry.number)
        fleet.give_work(work_of(phase.job, state, phase.retry))
        try:
            _run_shards(begun, lock, display, phase.job, state, fleet, phase)
        finally:
            fleet.kill()
        state = read_state(job.folder)
        assert state is not None


def _note_speed(begun: StartedJob, run_s: float) -> None:
    """Add the run's speed to the manifest's next commit. If the run has none, remove that of an earlier run."""
    state = read_state(begun.job.folder)
    assert state is not None
    speed = measured_speed(begun.job.folder, state, run_s)
    if speed is not None:
        begun.manifest.event(SPEED, kept_as=SPEED, speed=asdict(speed))
    elif state.speed is not None:
        begun.manifest.event("forgotten", kept_as=SPEED)


def _tidy_late(folder: Folder) -> None:
    """Tidy up for processes that were killed when the job was done, if the folder can be written."""
    with contextlib.suppress(OutputError, OSError), JobLock(folder).held(lambda: last_epoch(folder)):
        state = read_state(folder)
        if state is not None and state.is_done:  # no other process has begun a retry since
            tidy(folder)
