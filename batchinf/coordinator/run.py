"""Runs a job: checks it, takes the lock, starts it, runs its rows, tries rows again, and makes the summary.

It decides whether another retry follows. `retry` chooses the rows of one.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchinf.base.errors import (
    HopelessJob,
    Interrupted,
    NoRowsError,
    OutputError,
    UserError,
    check_addresses,
)
from batchinf.base.process import on_thread
from batchinf.base.slices import job_folder, read_cut, refuse_other_cut, source_folder
from batchinf.base.storage import Folder
from batchinf.base.text import counted
from batchinf.coordinator.begin import NOTHING_NEW, committed_state, has_more
from batchinf.coordinator.coordinator import Coordinator
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.ending import (
    Summary,
    earlier_lines,
    ended_early_lines,
    finished,
    nothing_to_run,
)
from batchinf.coordinator.epoch import Epoch
from batchinf.coordinator.fresh import move_job_aside
from batchinf.coordinator.recovery import has_leftovers, judge_by, tidy
from batchinf.coordinator.repair import repair_file
from batchinf.coordinator.retry import (
    UnfinishedRetry,
    as_begun,
    begin_retry,
    count_mended,
    covered,
    next_retry,
    retry_overrides,
    retry_predicate,
)
from batchinf.coordinator.row_count import RowCount
from batchinf.coordinator.start import fetch_input, open_checked, start
from batchinf.engines.installed import is_cpu_build
from batchinf.fleet.backend import Backend
from batchinf.fleet.launch import end_all, turn_to
from batchinf.fleet.parallel import check_processor
from batchinf.fleet.sharing.quarantine import Quarantine
from batchinf.fleet.speed import measured_speed
from batchinf.fleet.status import Telemetry
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, PreparedJob
from batchinf.job.open import naming_lines, prepare_run
from batchinf.manifest.lines import Done, Retry
from batchinf.manifest.lock import JobLock, await_free
from batchinf.manifest.state import State, last_epoch, read_state
from batchinf.manifest.versions import begun_spec
from batchinf.model.content import Contents
from batchinf.output.mirror import Mirror
from batchinf.output.proof import changed_parts
from batchinf.output.restore import restore_shared
from batchinf.schedule.leases import PendingRows
from batchinf.schedule.positions import RunOrder, chosen_in_order
from batchinf.schedule.predicate import Predicate
from batchinf.schedule.shards import total_rows
from batchinf.source.repairs import keep_copy
from batchinf.spec.file import SpecFile

_ROWS_AT_ONCE = 1 << 16
_REPORT_BYTES = 256 << 20  # of parts that are fetched from a bucket for the closing lines
FOLDERS = ("manifest", "parts", "staging", "journal", "logs")


def run_job(
    file: SpecFile,
    backend: Backend,
    display: ProgressDisplay,
    retry: str | None,
    *,
    extends: bool,
    fresh: bool,
    input: str | None = None,
    begins_together: bool = False,
    check_id: Callable[[str | None], None] = lambda job_id: None,
) -> Summary:
    """Run a job or the rest of it. Must be called within `interruptible`, because only the coordinator drains.

    backend: where the replicas run, as `choose_backend` says. retry: a predicate for the rows of the finished job that
    run again. input: a file from which the retry takes rows. extends: first take in new rows of the input. fresh: move
    the folder's job aside and start a new one. begins_together: no replica begins its rows before the engines of all
    are up; for trials, which measure the speed. check_id: called before any row runs with the id of the folder's job,
    or None; it may raise UserError.

    Raises UserError, Interrupted, or, when all rows are done, ErrorRateExceeded.
    """
    check_addresses()
    given = None if input is None else repair_file(input, file.spec)
    with mirrored(file, display, fresh=fresh) as mirror:
        began = time.monotonic()
        out = file.spec.output.folder
        folder = job_folder(out, file.slice)
        if fresh:
            check_id(None)
            _move_aside(file, backend, display)
        refuse_other_cut(out, file.slice)
        state = read_state(folder)
        _check_held(folder, state, retry)
        prepared, contents = _prepare(file, state, retry, extends=extends)
        check_id(None if state is None else state.header.job_id)
        if state is not None and _is_finished(prepared, state, mirror, display):
            if extends:
                display.say(NOTHING_NEW)
            _tidy_late(folder, mirror)
            return _ended(file, state, mirror, was_done=True)
        folder.make(*FOLDERS, *(() if file.slice is not None else ("source",)))
        try:
            with _held(file, folder, display, mirror) as (lock, number):
                current = read_state(folder, state)
                if current is not state:  # another process has run the job since, or moved it
                    _check_held(folder, current, retry)
                    prepared, contents = _prepare(file, current, retry, extends=extends)
                with start(
                    prepared, contents, backend, lock=lock, number=number, display=display, mirror=mirror, given=given
                ) as epoch:
                    earlier = earlier_lines(epoch.job, epoch.state)
                    _run_all(epoch, began, begins_together=begins_together)
                _tidy(folder, mirror)
        except NoRowsError:
            if read_state(folder) is not None:
                raise
            return nothing_to_run(file)
        finally:
            display.close()
        return _ended(file, committed_state(folder), mirror, earlier=earlier)


def _move_aside(file: SpecFile, backend: Backend, display: ProgressDisplay) -> None:
    """Move the folder's job aside for `--fresh`."""
    if file.slice is not None:
        refuse_other_cut(file.spec.output.folder, file.slice)
    prepared, _ = _prepare(file, None)
    move_job_aside(prepared, backend, display)


@contextlib.contextmanager
def _held(
    file: SpecFile, folder: Folder, display: ProgressDisplay, mirror: Mirror | None
) -> Iterator[tuple[JobLock, int]]:
    """The lock of a job, held, and the number of the epoch that begins."""
    lock, take_over = _lock_of(folder, mirror)
    with lock.held(take_over, display.say) as number:
        if file.slice is not None:
            # A slice that begins now may not be seen by a process that is about to move the whole folder.
            await_free(Folder(file.spec.output.folder), display.say)
        yield lock, number


def _lock_of(folder: Folder, mirror: Mirror | None) -> tuple[JobLock, Callable[[], int]]:
    """The lock of a job, and what finds its last epoch once the lock is held."""
    if mirror is not None:
        return mirror.lock, mirror.take_over
    return JobLock(folder), functools.partial(last_epoch, folder)


@contextlib.contextmanager
def mirrored(file: SpecFile, display: ProgressDisplay, *, fresh: bool) -> Iterator[Mirror | None]:
    """The mirror of a job in a bucket, with its work folder held and made like the bucket; None for a folder.

    Raises UserError, also for `--fresh`.
    """
    output = file.spec.output
    if (bucket := output.bucket()) is None:
        yield None
        return
    if fresh:
        raise UserError(
            f"--fresh cannot rename {output.path}, which is in a bucket: give the new job another output.path, or "
            "delete the old objects first"
        )
    # The first reads of the restore run beside the probe. They change only the work folder, which is a cache.
    probing = on_thread(bucket.probe)
    folder = job_folder(output.folder, file.slice)
    folder.make()
    with JobLock(folder).held(lambda: 0, display.say):
        own = bucket if file.slice is None else bucket.at(file.slice.name)
        source = Folder(source_folder(folder))
        mirror = Mirror(own, folder, source, interval_s=file.spec.checkpoint_interval_s, say=display.say)
        sharing = on_thread(
            functools.partial(restore_shared, bucket, Folder(output.folder), is_alone=file.slice is None)
        )
        mirror.restore()
        sharing.result()
        tidying = probing.result()
        display.say(f"the output goes to {output.path}; the job works in {folder.root}")
        own.patience_s = output.store_timeout_s
        try:
            yield mirror
        finally:
            mirror.close()
            tidying.result()


def _ended(
    file: SpecFile, state: State, mirror: Mirror | None, *, was_done: bool = False, earlier: Sequence[str] = ()
) -> Summary:
    """See `finished`. Fetches the first parts with error rows, for the closing lines."""
    if mirror is not None:
        with contextlib.suppress(OutputError):  # only a report
            parts = [part for _, part in sorted(state.parts.items()) if part.num_errors]
            mirror.fetch_some(parts, _REPORT_BYTES)
    return finished(file, state, was_done=was_done, earlier=earlier)


def _prepare(
    file: SpecFile, state: State | None, retry: str | None = None, *, extends: bool = False
) -> tuple[PreparedJob, Contents]:
    """The checks that take milliseconds and write nothing: spec, model, settings of the folder's job, first rows.

    Returns the job, and the model's local files as they are before an engine starts. state: of the job in the folder.
    retry: a predicate for the rows that run again. extends: take in new rows of the input. Raises UserError.
    """
    prepared = prepare_run(file, state, "take" if extends and state is not None else "refuse")
    if state is not None:
        begun_spec(prepared.folder, state.header)
    contents = Contents(prepared.model, prepared.spec.model, prepared.adapters)
    if state is None:
        return prepared, contents
    differences = contents.differences(state.files)
    prepared = replace(prepared, retry=retry, has_rows=not state.committed.all())
    if retry is None:
        check_drift(prepared, state.header, files=differences)
        return prepared, contents
    if is_cpu_build():  # `choose_engines` checks the sampling that the job began with
        with naming_lines(file):
            check_processor(prepared.spec, prepared.spec.length_limit(prepared.model.max_model_len))
    return as_begun(prepared, state.header, differences), contents


def _check_held(folder: Folder, state: State | None, retry: str | None) -> None:
    """Raise OutputError if a folder without a job holds parts, or if rows of its job should run again."""
    if state is None and retry is not None:
        raise OutputError(f"{folder.root} holds no job whose rows could run again; run it first, without --retry")
    if state is None and folder.exists("parts") and folder.list("parts"):
        raise OutputError(
            f"{folder.root} holds parts of a job without its manifest: give the new job another output.path, or delete "
            "the parts"
        )


def _is_finished(prepared: PreparedJob, state: State, mirror: Mirror | None, display: ProgressDisplay) -> bool:
    """Whether nothing is to run: no retry, no shard, no part that has changed, and no new row if it takes them in."""
    folder = prepared.folder
    if prepared.retry is not None or not (state.is_done and RunOrder(folder, state.extents).is_whole):
        return False
    if prepared.slice is not None and read_cut(prepared.spec.output.folder) is None:  # a start writes it again
        return False
    if changed_parts(folder, state) if mirror is None else mirror.changed_parts(state):
        return False
    job = open_checked(prepared, display.say)
    with contextlib.closing(job.source):
        return prepared.new != "take" or not has_more(job, state)


def _run_all(epoch: Epoch, began: float, *, begins_together: bool) -> None:
    """Run all rows and retries that are left. Then the job is done. began: see `time.monotonic`."""
    if not epoch.state.committed.all():
        _run_shards(epoch, epoch.job, epoch.state, begins_together=begins_together)
    _run_retries(epoch)
    end_all(epoch.fleet, epoch.manifest)
    epoch.manifest.record(Done(epoch.speed and replace(epoch.speed, run_s=time.monotonic() - began)))
    epoch.manifest.commit()


def _run_shards(
    epoch: Epoch,
    job: Job,
    state: State,
    *,
    unfinished: UnfinishedRetry | None = None,
    begins_together: bool = False,
) -> None:
    """Run all shards that are not committed, or the rest of a retry, whose work the fleet knows."""
    fleet = epoch.fleet
    retry = None if unfinished is None else unfinished.retry
    order = RunOrder(job.folder, state.extents)
    num_chosen = chosen_of = None
    if unfinished is None:
        is_done = state.committed
        count = RowCount(
            task=job.task,
            replicas=fleet.replicas,
            num_inputs=total_rows(state.extents),
            num_committed_shards=int(is_done.sum()),
            num_committed_rows=state.counts.num_rows,
            num_committed_errors=state.counts.num_errors,
            num_committed_inputs=state.num_inputs_committed,
        )
    else:
        num_chosen = unfinished.num_chosen
        chosen_of = functools.partial(chosen_in_order, order, unfinished.chosen)
        is_done = num_chosen == 0
        num_left = int(num_chosen.sum())
        count = RowCount(
            task=job.task, replicas=fleet.replicas, num_inputs=num_left, num_committed_shards=int(is_done.sum())
        )
    pending = PendingRows(state.extents, is_done, num_chosen, chosen_of=chosen_of, is_in_order=state.is_in_order)
    quarantine = Quarantine(order, state, is_done, fleet=fleet, manifest=epoch.manifest)
    pending.withhold(quarantine.leases.values())
    telemetry = Telemetry(job.folder, fleet.epoch, functools.partial(fleet.backend.device_looks, fleet.devices))
    coordinator = Coordinator(
        epoch=epoch,
        job=job,
        state=state,
        fleet=fleet,
        pending=pending,
        quarantine=quarantine,
        telemetry=telemetry,
        count=count,
        num_chosen=num_chosen,
        retry=retry,
        begins_together=begins_together,
        keeps_engines=_may_follow(epoch, retry),
    )
    try:
        coordinator.run()
    except Interrupted as error:
        kept = coordinator.kept_lines(committed_state(job.folder))
        raise Interrupted("\n".join([str(error), *kept])) from None
    except HopelessJob as error:
        lines = ended_early_lines(job, committed_state(job.folder))
        raise HopelessJob("\n".join([str(error), *lines])) from None
    fleet.note_cache_warm()
    if epoch.speed is None and coordinator.work_s is not None:  # the few rows of later retries say little
        epoch.speed = measured_speed(job.folder, state, fleet, coordinator.work_s)
    if coordinator.requests:  # it came when all rows were done
        epoch.stops.append(coordinator.requests.name)


def _may_follow(epoch: Epoch, retry: Retry | None) -> bool:
    """Whether another retry may follow this one, or the first run of all rows (None)."""
    section = epoch.job.spec.retry
    num_attempts = 0 if retry is None else retry.attempt
    if section is not None and num_attempts < section.attempts:
        return True
    return epoch.retry is not None and (retry is None or retry.is_automatic)


def _run_retries(epoch: Epoch) -> None:
    """Finish all retries that have begun, try rows again as the spec says, and run the retry that the user asks for.

    A job that was done is not tried again without the user's retry.
    """
    folder = epoch.job.folder
    if epoch.given is not None:
        keep_copy(folder, epoch.given.file)  # it may be the file of an earlier retry, whose copy was lost
    state = _finish_retries(epoch, committed_state(folder))
    if not epoch.state.is_done:
        state = _try_again(epoch, state)
    if epoch.retry is not None and _begin(epoch, state, epoch.retry, epoch.overrides):
        _try_again(epoch, _finish_retries(epoch, state))


def _try_again(epoch: Epoch, state: State) -> State:
    """Run the rows again that the section `retry` of the spec names, until none is left or all attempts were made."""
    if (predicate := retry_predicate(epoch.job, state)) is None:
        return state
    assert epoch.job.spec.retry is not None
    without_rows = state.extents[-1].stop_row
    for attempt in range(1, epoch.job.spec.retry.attempts + 1):
        first_row = covered(state, attempt)
        if first_row >= without_rows:
            continue
        if _begin(epoch, state, predicate, retry_overrides(epoch.job), attempt=attempt):
            state = _finish_retries(epoch, state)
        else:
            without_rows = first_row
    return state


def _begin(
    epoch: Epoch, state: State, predicate: Predicate, overrides: Mapping[str, Any], *, attempt: int | None = None
) -> bool:
    """Begin a retry, and return whether there are rows to run. attempt: of the spec's section; None: by hand."""
    say = epoch.display.say
    say(f"looking for the rows to run again: {predicate.text}" + ("" if attempt is None else f" (attempt {attempt})"))
    begun = begin_retry(
        epoch.job,
        state,
        epoch.manifest,
        predicate,
        overrides=overrides,
        attempt=attempt,
        given=epoch.given if attempt is None else None,
        say=say,
        mirror=epoch.mirror,
    )
    if begun is None:
        say(f"no row matches {predicate.text}: no row runs again")
    return begun is not None


def _finish_retries(epoch: Epoch, state: State) -> State:
    """Run the rest of all retries that have begun. Raises Interrupted if a stop came before one of them."""
    job = epoch.job
    manifest = epoch.manifest
    say = epoch.display.say
    if epoch.mirror is not None:
        judge_by(epoch.mirror, job, state)
    while (unfinished := next_retry(job, state, manifest, epoch.mirror)) is not None:
        retry = unfinished.retry
        num_rows = int(unfinished.num_chosen.sum())
        num_shards = int((unfinished.num_chosen > 0).sum())
        if epoch.stops:
            raise Interrupted(f"stopped on {epoch.stops[0]}")
        say(f"{retry}: {counted(num_rows, 'input row')} in {counted(num_shards, 'shard')} to run again")
        fetch_input(unfinished.job, state, unfinished.chosen.pieces(_ROWS_AT_ONCE), say)
        turn_to(epoch.fleet, manifest, job=unfinished.job, state=state, retry=retry, say=say)
        _run_shards(epoch, unfinished.job, state, unfinished=unfinished)
        state = committed_state(job.folder)
        if epoch.mirror is not None:
            judge_by(epoch.mirror, job, state)
    count_mended(job, state, manifest, epoch.mirror)
    return state


def _tidy(folder: Folder, mirror: Mirror | None) -> None:
    tidy(folder)
    if mirror is not None:
        mirror.finish()


def _tidy_late(folder: Folder, mirror: Mirror | None) -> None:
    """Tidy up for processes that were killed when the job was done, if the folder or the bucket can be written."""
    if not (has_leftovers(folder) if mirror is None else mirror.has_leftovers()):
        return
    lock, take_over = _lock_of(folder, mirror)
    with contextlib.suppress(OutputError, OSError), lock.held(take_over):
        state = read_state(folder)
        if state is not None and state.is_done:  # no other process has begun a retry since
            _tidy(folder, mirror)
