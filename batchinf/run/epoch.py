"""One epoch of a job: takes the lock, opens or begins the job, recovers, runs the rest, and makes the summary."""

import itertools
import os
import pathlib
import shutil
from dataclasses import dataclass

from batchinf.base import faults
from batchinf.base.errors import ErrorRateExceeded, HopelessJob, OutputError
from batchinf.base.slices import check_place, is_slice_folder, job_folder
from batchinf.base.stop_signals import ahead_of_time_limit
from batchinf.base.storage import Folder, reason, sync_folder
from batchinf.base.text import duration, short_count
from batchinf.engines.installed import check_structures
from batchinf.fleet.backend import Backend
from batchinf.fleet.devices import Platforms
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launcher import Launcher, work_of
from batchinf.fleet.quarantine import Trials
from batchinf.fleet.status import Telemetry, read_status
from batchinf.job import ordering
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.open import Job, check_drift, location_of, new_header, open_job
from batchinf.manifest.lines import CHOSEN
from batchinf.manifest.lock import LOCK, JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.state import Committed, State, last_epoch, read_state
from batchinf.output import journal
from batchinf.output.parts import remarks
from batchinf.output.proof import changed_parts
from batchinf.prompts.builder import setting
from batchinf.run import progress
from batchinf.run.coordinator import Coordinator
from batchinf.run.extend import add_extent, has_more, open_extended, said
from batchinf.run.head_start import HeadStart
from batchinf.run.progress import ProgressDisplay, forecast
from batchinf.run.recovery import note_ended, recover
from batchinf.run.retry import RetryPhase, RetryRequest, begin_retry, next_phase, take_request
from batchinf.schedule.positions import Choice, RunOrder
from batchinf.schedule.shards import PendingShards, total_rows, total_shards
from batchinf.source.find import find_files, is_dataset
from batchinf.source.remote import is_url
from batchinf.spec.file import SpecFile, dump_spec

# A folder with one of these holds a job or its remains.
_SIGNS = ("manifest", "parts", "job.yaml")


def move_job_aside(path: str, display: ProgressDisplay) -> None:
    """Move the job in the folder `path` to the first free name of `path.1`, `path.2`, ...; None if there is no job.

    The move is durable on return. Raises OutputError if another process runs the job or the folder cannot be moved.
    """
    # Move the folder, not a link to it, so that the new job stays on the same disk.
    root = pathlib.Path(path).resolve()
    folder = Folder(root)
    if not any(folder.exists(name) for name in _SIGNS):
        if pathlib.Path(path).is_symlink():
            folder.make()
        return
    with JobLock(folder).held(lambda: last_epoch(folder), display.say):
        aside = _rename(root)
        # The lock moved with the folder.
        Folder(aside).delete(LOCK)
    folder.make()
    display.say(f"moved the job in {path} to {aside}; it begins anew")


def _rename(root: pathlib.Path) -> pathlib.Path:
    # A slice's name must not match `slice-*`, by which readers find the parts of all slices.
    prefix = "old-" if is_slice_folder(root.name) else ""
    names = (root.with_name(f"{prefix}{root.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    faults.point("fresh.before_rename")
    try:
        root.rename(aside)
        sync_folder(root.parent)
    except OSError as error:
        raise OutputError(
            f"cannot move {root} to {aside}: {reason(error)}; move it yourself, or give the job another output.path"
        ) from error
    faults.point("fresh.after_rename")
    return aside


FOLDERS = ("manifest", "parts", "staging", "journal", "logs")
_LOST_TO_NAME = 20
NOTHING_NEW = "--extend: the input has nothing that the job has not taken in"


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


def run_job(file: SpecFile, backend: Backend, display: ProgressDisplay, retry: str | None, *, extends: bool) -> Summary:
    """Run a job or the rest of it. Must be called within `interruptible`, because only the coordinator drains.

    backend: where the replicas run, as `choose_backend` says. retry: a predicate for the rows of the finished job that
    run again. extends: first take in new rows of the input.

    Raises UserError, Interrupted, or, when all rows are done, ErrorRateExceeded.
    """
    check_place(file.spec.output.path, file.slice)
    folder = job_folder(file.spec.output.path, file.slice)
    state = read_state(folder) if folder.exists("manifest") else None
    if state is None and retry is not None:
        raise OutputError(f"{file.spec.output.path} holds no job to retry rows of; run it first, without --retry")
    if state is not None and state.is_done and retry is None and _is_whole(folder, state):
        job = open_extended(file, state) if extends else open_job(file, state=state)
        check_drift(job, state.header)
        if not extends or not has_more(job, state):
            if extends:
                display.say(NOTHING_NEW)
            return _finished(file, state, was_done=True)
    if state is None:
        check_input_is_there(file)
    folder.make(*FOLDERS, *(() if file.slice is not None else ("source",)))
    with ahead_of_time_limit(file.spec.stop_before_s, display.say):
        _hold_and_run(file, backend, folder, state, display, retry, extends)
    done = read_state(folder)
    assert done is not None
    return _finished(file, done, was_done=False)


def check_input_is_there(file: SpecFile) -> None:
    """Raise InputError before a folder is made or moved, as from the wrong working folder."""
    location = location_of(file.spec)
    if not is_url(location.path) and not is_dataset(location):
        find_files(location)


def _is_whole(folder: Folder, state: State) -> bool:
    return RunOrder(folder, state.extents).is_whole and not changed_parts(folder, state)


def _hold_and_run(
    file: SpecFile,
    backend: Backend,
    folder: Folder,
    state: State | None,
    display: ProgressDisplay,
    retry: str | None,
    extends: bool,
) -> None:
    lock = JobLock(folder)
    try:
        with lock.held(lambda: last_epoch(folder), display.say) as epoch:
            _run_epoch(file, backend, folder, read_state(folder, state), lock, epoch, display, retry, extends)
    finally:
        display.close()


def _run_epoch(
    file: SpecFile,
    backend: Backend,
    folder: Folder,
    state: State | None,
    lock: JobLock,
    epoch: int,
    display: ProgressDisplay,
    retry: str | None,
    extends: bool,
) -> None:
    display.say("opening model and input")
    with HeadStart(backend, folder, epoch, lock, state, display.say) as ahead:
        if extends and state is not None:
            job = open_extended(file, state)
        else:
            job = open_job(file, state=state, found=ahead.found)
        request = None
        if state is not None:
            if retry is None:
                check_drift(job, state.header)
            else:
                job, request = take_request(job, state, retry)
            backend.end_leftovers(state.running_replicas, state.job_id)
        if job.spec.scripted is None and (state is None or request is not None):
            for line in check_structures(file, job.model.tokenizer):
                display.say(line)
        launcher = ahead.launcher or Launcher.of(
            backend, job.spec, job.model, job.adapters, folder, epoch, state, display.say
        )
        num_replicas = len(launcher.slots)
        choice = ordering.begin_or_restore(job, file, state, display.say, lock.check)
        check_size(file, job, None if choice is None else choice.num_rows)
        manifest = ahead.open_manifest()
        if state is None:
            state = _begin(job, manifest, num_replicas, choice, ahead.job_id)
        else:
            note_ended(state, read_status(folder), manifest)
            if extends:
                state = _extend(job, file, state, manifest, num_replicas, display)
        _recover(job, state, manifest, epoch, display)
        _say_what(job, state, launcher, display)
        if (warning := room_warning(job, state, num_replicas)) is not None:
            display.say(warning)
        if not state.committed.all():
            for line in job.task.prompt_warnings(job.model, job.source):
                display.say(line)
            _run_rest(job, state, manifest, lock, launcher, display, fleet=ahead.fleet)
        ahead.end()
        _run_retries(job, manifest, lock, launcher, display, request)
        manifest.done()
        manifest.commit()
        manifest.close()
    _tidy(folder)


def _recover(job: Job, state: State, manifest: Manifest, epoch: int, display: ProgressDisplay) -> None:
    found = recover(job, state.extents, state, manifest)
    manifest.event("epoch", epoch=epoch, job_id=state.header.job_id, adopted=len(found.adopted), lost=list(found.lost))
    manifest.commit()
    for shard in found.lost[:_LOST_TO_NAME]:
        display.say(f"warning: part {shard} is gone or altered; its rows run again")
    if len(found.lost) > _LOST_TO_NAME:
        display.say(f"warning: so are {len(found.lost) - _LOST_TO_NAME:,} more; their rows run again too")


def _extend(
    job: Job, file: SpecFile, state: State, manifest: Manifest, num_replicas: int, display: ProgressDisplay
) -> State:
    if not has_more(job, state):
        display.say(NOTHING_NEW)
        return state
    num_rows = add_extent(job, file, state, manifest, num_replicas, display.say)
    display.say(said(job, state, num_rows))
    extended = read_state(job.folder)
    assert extended is not None
    return extended


def _begin(job: Job, manifest: Manifest, num_replicas: int, choice: Choice | None, job_id: str) -> State:
    if job.folder.list("parts"):
        raise OutputError(
            f"{job.folder.root} holds parts of a job whose manifest is gone: give the new job another output.path, or "
            "delete them yourself"
        )
    # Segments without a manifest belong to no job.
    for shard in journal.list_shards(job.folder):
        journal.drop(job.folder, shard)
    header, extent = new_header(job, num_replicas, choice, job_id)
    job.folder.write_atomic("job.yaml", dump_spec(job.spec).encode())
    job.source.keep_digests()
    manifest.header(header)
    manifest.extent(extent, job.source.fingerprint)
    if job.spec.input.selects:
        manifest.event(CHOSEN, kept_as=CHOSEN, num_rows=extent.num_rows, num_input_rows=job.source.num_rows)
    manifest.commit()
    state = read_state(job.folder)
    assert state is not None
    return state


def _run_rest(
    job: Job,
    state: State,
    manifest: Manifest,
    lock: JobLock,
    launcher: Launcher,
    display: ProgressDisplay,
    phase: RetryPhase | None = None,
    fleet: Fleet | None = None,
) -> None:
    """Run all shards that are not committed, or the rest of a retry. fleet: replicas that already run."""
    retry = None if phase is None else phase.retry
    fleet = fleet or launcher.fleet(state.header.job_id, job.spec, 0 if retry is None else retry.number)
    fleet.give_work(work_of(job, state, retry))
    counts = state.counts
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
    trials = Trials(RunOrder(job.folder, state.extents), state, is_done, fleet, manifest)
    pending.withhold(trials.shards)
    platforms = Platforms(state, job.spec.same_device)
    telemetry = Telemetry(job.folder, launcher.epoch, launcher.backend.watch_devices(launcher.devices))
    try:
        Coordinator(
            job, manifest, lock, fleet, pending, display, num_rows, num_shards, committed, platforms, trials, telemetry
        ).run()
    except HopelessJob as error:
        found = read_state(job.folder)
        assert found is not None
        raise HopelessJob("\n".join([str(error), *progress.report(job, found)])) from None
    finally:
        telemetry.close()
    launcher.note_warm(fleet)


def _run_retries(
    job: Job,
    manifest: Manifest,
    lock: JobLock,
    launcher: Launcher,
    display: ProgressDisplay,
    request: RetryRequest | None,
) -> None:
    """Begin the requested retry, unless it has begun before, and finish all retries that have begun."""
    state = read_state(job.folder)
    assert state is not None
    if request is not None and not request.is_under_way:
        display.say(f"looking for rows where {request.predicate.text}")
        if begin_retry(job, state, manifest, request) is None:
            display.say(f"no row matches {request.predicate.text}: nothing is run again")
    while (phase := next_phase(job, state, manifest)) is not None:
        num_rows, num_shards = int(phase.num_chosen.sum()), int((phase.num_chosen > 0).sum())
        display.say(f"{phase.retry}: {num_rows:,} input rows in {num_shards:,} shards run again")
        _run_rest(phase.job, state, manifest, lock, launcher, display, phase)
        state = read_state(job.folder)
        assert state is not None


def _say_what(job: Job, state: State, launcher: Launcher, display: ProgressDisplay) -> None:
    slots = launcher.slots
    sampling = ", ".join(
        setting(name, getattr(job.spec.sampling, name)) + ("" if origin == "spec" else f" ({origin})")
        for name, origin in job.origins.items()
    )
    task = job.task
    display.say(task.describe() or (f"sampling: {sampling}" if task.draws_tokens else f"task: {task.name}"))
    done, shards = int(state.committed.sum()), len(state.committed)
    samples = f" with {task.num_rows_per_input:,} samples each" if task.num_rows_per_input > 1 else ""
    display.say(
        ("" if job.slice is None else f"slice {job.slice}: ")
        + f"{total_rows(state.extents):,} input rows{samples} in {shards:,} shards, {done:,} of them done; "
        + f"{len(slots)} replica(s) on "
        + (", ".join("+".join(slot.devices) for slot in slots) if slots[0].devices else "this machine's processor")
    )


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
