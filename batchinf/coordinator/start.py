"""The start of an epoch, the same for every job: checks, replicas, and beside them the scan of the input; then `Work`.

`check_first` finds what can be found in milliseconds and writes nothing. Replicas start next: they need only the spec,
the model and their devices. `start` then reads the input, chooses the rows, begins or recovers the job in the manifest,
and tells the replicas about the rows. If anything on the way is refused, it ends them. `epoch` uses both.
"""

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, OutputError, SpecError
from batchinf.base.slices import claim_whole
from batchinf.base.stop_signals import shielded
from batchinf.base.storage import Folder
from batchinf.base.text import counted, describe_error
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.extend import add_extent, check_extended, has_more, said
from batchinf.coordinator.identity import IdentityGate
from batchinf.coordinator.recovery import note_ended, recover
from batchinf.coordinator.retry import RetryRequest, as_begun, take_request
from batchinf.engines.installed import StructuresCheck, is_cpu_build
from batchinf.fleet.backend import Backend
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launcher import Launcher, note_end, start_due, work_of
from batchinf.fleet.parallel import check_processor, with_degrees
from batchinf.fleet.speed import expected_speed
from batchinf.fleet.speed_text import expected_line
from batchinf.fleet.status import JobStatus, read_status
from batchinf.job import ordering
from batchinf.job.columns import column_warnings
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.model_len import with_known_length
from batchinf.job.open import Job, PreparedJob, check_drift, location_of, new_header, new_job_id, placing, prepare_job
from batchinf.job.sample import refuse_hopeless
from batchinf.manifest.lines import BEGINNING, CHOSEN, EXPECTED_SPEED
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import others_note
from batchinf.manifest.state import State, read_beginning, read_state
from batchinf.manifest.versions import begun_spec, later_columns, later_columns_line
from batchinf.model.content import Contents
from batchinf.output import journal
from batchinf.planning.beginnings import shared_share
from batchinf.prompts.checks import empty_files_note, first_row_warnings
from batchinf.prompts.row_sampling import setting
from batchinf.schedule.positions import Choice
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.schedule.shards import total_rows
from batchinf.source.rows import first_rows
from batchinf.spec.file import SpecFile, dump_spec

_LOST_TO_NAME = 20
_POLL_S, _LOOK_EVERY_S = 0.2, 1.0
CHECKING = "checking the structured outputs with vLLM, whose import takes 10 s or more"
NOTHING_NEW = "--extend: the input has no new files and no new rows"


@dataclass(frozen=True, slots=True)
class CheckedJob:
    """A job that has passed the first checks.

    prepared: for a retry, with the sampling that the job began with. retry: a predicate for the rows that run again.
    contents: the model's local files, as they are before an engine starts. overrides: the retry's sampling. extends:
    first take in new rows. has_rows: whether it is known, without the input, that rows will run; replicas can start
    then.
    """

    prepared: PreparedJob
    contents: Contents
    retry: str | None
    overrides: dict[str, Any]
    extends: bool
    has_rows: bool

    @property
    def state(self) -> State | None:
        """That of a job that has begun."""
        return self.prepared.state

    def open(self) -> Job:
        """Read the input, and check that it is still the job's."""
        job = self.prepared.open()
        if self.state is not None:
            if self.extends:
                check_extended(job, self.state)
            check_drift(job, self.state.header)
        return job


def check_first(file: SpecFile, state: State | None, retry: str | None = None, *, extends: bool = False) -> CheckedJob:
    """The checks that take milliseconds: spec, model, settings of the job in the folder, files, and first rows.

    Raises UserError, and writes nothing.
    """
    prepared = prepare_job(file, state, "take" if extends and state is not None else "refuse")
    if state is not None:
        begun_spec(prepared.folder, state.header)
    contents = Contents(prepared.model, prepared.spec.model, prepared.adapters)
    others = [] if state is None else contents.differences(state.files)
    overrides: dict[str, Any] = {}
    has_rows = state is None or not state.committed.all()
    if state is None:
        with placing(file):
            rows, where = first_rows(location_of(file.spec)), file.spec.input.where
        try:
            prepared = prepared if rows is None else prepared.over(rows)
            if rows is not None and where is not None:
                Predicate(where, pa.schema({name: pa.null() for row in rows for name in row}.items()), "input")
        except (SpecError, PredicateError):
            has_rows = False  # later rows may be other ones: the scan decides, and replicas wait for it
    elif retry is None:
        check_drift(prepared, state.header, files=others)
    else:
        if is_cpu_build():  # the launcher checks the sampling that the job began with
            with placing(file):
                check_processor(prepared.spec, prepared.spec.length_limit(prepared.model.max_model_len))
        prepared, overrides = as_begun(prepared, state.header, others)
    return CheckedJob(prepared, contents, retry, overrides, extends, has_rows)


def with_known_degrees(checked: CheckedJob, backend: Backend, display: ProgressDisplay) -> CheckedJob:
    """The job with numbers in place of `auto` for the tensor and pipeline-parallel sizes. Raises SpecError."""
    prepared = checked.prepared
    begun_with = None if checked.state is None else checked.state.header.spec["parallel"]
    file = with_degrees(prepared.file, backend, display.say, begun_with)
    if file is prepared.file:
        return checked
    spec = prepared.spec.model_copy(update={"parallel": file.spec.parallel})
    return replace(checked, prepared=replace(prepared, file=file, spec=spec))


@dataclass(frozen=True, slots=True)
class StartedJob:
    """A job whose rows can run. fleet: its replicas, which know their work; none runs if all shards are committed.

    identity: lets replicas store results.
    """

    job: Job
    state: State
    manifest: Manifest
    launcher: Launcher
    fleet: Fleet
    identity: IdentityGate
    request: RetryRequest | None


@contextlib.contextmanager
def start(
    checked: CheckedJob, backend: Backend, lock: JobLock, epoch: int, display: ProgressDisplay
) -> Iterator[StartedJob]:
    """Start replicas and open the job beside them. When the block ends, all of these replicas have ended."""
    checked = replace(checked, prepared=with_known_length(checked.prepared, display.say))
    checked = with_known_degrees(checked, backend, display)
    prepared, state, folder = checked.prepared, checked.state, checked.prepared.folder
    if state is not None and (later := later_columns(folder, state.header)):
        display.say(later_columns_line(later))
    file, before = prepared.file, state or read_beginning(folder)
    if prepared.spec.scripted is None:
        backend.read_ahead(prepared.model, prepared.spec.model.load_format)
    backend.end_leftovers(before.running_replicas, before.job_id)
    with placing(file):
        launcher = Launcher.of(
            backend=backend,
            spec=prepared.spec,
            model=prepared.model,
            adapters=prepared.adapters,
            folder=folder,
            epoch=epoch,
            state=state,
            say=display.say,
            shared_share=functools.partial(shared_share, file),
        )
    manifest = Manifest(folder, epoch, lock, state)
    note_ended(before, read_status(folder), manifest, lock.predecessor_seen_at)
    job_id = before.job_id or new_job_id()
    fleet, opened = launcher.fleet(job_id), contextlib.ExitStack()
    try:
        opened.callback(checked.contents.close)
        checked.contents.start()  # behind `read_ahead`, so that the disk is read once
        if state is None:
            # Replicas make files outside the job's folder with the id in their names. So the id is stored first.
            manifest.event(BEGINNING, job_id=job_id)
            manifest.commit()
            if (note := others_note(Folder(file.spec.output.path))) is not None:
                display.say(note)
        check = None
        if prepared.spec.scripted is None and (state is None or checked.retry is not None):
            check = opened.enter_context(StructuresCheck(file, prepared.model.tokenizer))
        if checked.has_rows:
            display.say(f"starting {counted(len(launcher.slots), 'replica')} while the input is read")
            with shielded():
                start_due(fleet, manifest)
            faults.point("start.replicas")
        else:
            display.say("reading the input")
        job = checked.open()
        opened.callback(job.source.close)
        if job.spec.input.format != launcher.spec.input.format:
            # Only later rows show that it is a batch file, for which engines start with other arguments.
            _end(fleet, manifest)
            launcher = replace(launcher, spec=job.spec)
            fleet = launcher.fleet(job_id, num_before=fleet.num_incarnations)
        request = None if state is None else take_request(job, state, checked.retry, checked.overrides)
        choice = ordering.begin_or_restore(job, file, state, display.say, lock.check)
        check_size(file, job, None if choice is None else choice.num_rows)
        if choice is not None:
            refuse_hopeless(job, choice.order(job.folder))
        if check is not None:
            num_rows = 0 if choice is None else choice.num_rows * job.task.num_rows_per_input
            _await(check, fleet, num_rows, display)
        if state is None:
            state = _begin(job, manifest, launcher, choice, job_id)
        elif checked.extends:
            state = _extend(job, file, state, manifest, len(launcher.slots), display)
        _recover(job, state, manifest, epoch, display)
        identity = IdentityGate(checked.contents, job, state.files, manifest, display.say)
        identity.look(fleet)
        _say_what(job, state, launcher, display, checked.overrides)
        if (warning := room_warning(job, state, len(launcher.slots))) is not None:
            display.say(warning)
        if state.committed.all():
            _end(fleet, manifest)  # the recovery adopted all parts that were missing
        else:
            fleet.give_work(work_of(job, state, None))  # the replicas open the input during the next look at it
            lines = (
                *empty_files_note(job.source),
                *column_warnings(job.task, job.source),
                *job.task.prompt_warnings(job.model, job.source),
                *first_row_warnings(job.spec, job.source),
            )
            for line in lines:
                display.say(line)
            _note_expected(job, state, launcher, manifest, display)
        yield StartedJob(job, state, manifest, launcher, fleet, identity, request)
    except BaseException:
        # Later errors, for example from a full disk, must not hide the first one.
        with contextlib.suppress(BatchinfError, OSError):
            manifest.discard()
            _end(fleet, manifest)
        raise
    finally:
        fleet.kill()  # those that live still: a second Ctrl-C may have ended the first call
        opened.close()
        manifest.close()


def _await(check: StructuresCheck, fleet: Fleet, num_rows: int, display: ProgressDisplay) -> None:
    """Show how the engines start until the check is done. num_rows: of the job's output; 0 for a retry."""
    with check:
        if not check.is_done:
            display.say(CHECKING)
        next_look = 0.0
        while not check.is_done:
            # Replicas without work say only what they do, or that they have failed: the coordinator looks for that.
            fleet.poll(_POLL_S)
            if num_rows and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_EVERY_S
                fleet.look_at_starts()
                display.show(JobStatus.starting(num_rows, [replica.status() for replica in fleet.replicas]))
        for line in check.lines():
            display.say(line)


def _note_expected(job: Job, state: State, launcher: Launcher, manifest: Manifest, display: ProgressDisplay) -> None:
    """Predict the speed while the engines start, and store it."""
    if job.spec.scripted is not None:
        return
    try:
        expected = expected_speed(job, state, launcher.settings, [slot.sharers for slot in launcher.slots])
    except Exception as error:  # the job does not depend on it
        display.say(f"note: the speed could not be predicted: {describe_error(error)}")
        return
    if expected is not None:
        display.say(expected_line(expected))
        manifest.event(EXPECTED_SPEED, kept_as=EXPECTED_SPEED, epoch=launcher.epoch, speed=asdict(expected))
        manifest.commit()


def _end(fleet: Fleet, manifest: Manifest) -> None:
    """End the replicas that run, and commit their ends."""
    with shielded():
        for ended in fleet.kill():
            note_end(manifest, ended)
        manifest.commit()


def _begin(job: Job, manifest: Manifest, launcher: Launcher, choice: Choice | None, job_id: str) -> State:
    if job.slice is None:
        claim_whole(job.spec.output.path)
    # Segments without a manifest belong to no job.
    journal.drop(job.folder, dict.fromkeys(journal.list_shards(job.folder)))
    header, extent = new_header(job, len(launcher.slots), choice, job_id)
    notes = "".join(f"# {line}\n" for line in launcher.chosen.lines())
    job.folder.write_atomic("job.yaml", (dump_spec(job.spec) + notes).encode())
    job.source.keep_digests()
    manifest.header(header)
    manifest.extent(extent, job.source.fingerprint)
    if job.spec.input.selects:
        manifest.event(CHOSEN, kept_as=CHOSEN, num_rows=extent.num_rows, num_input_rows=job.source.num_rows)
    manifest.commit()
    return _state_of(job.folder)


def _state_of(folder: Folder) -> State:
    """The state that has just been committed. Raises OutputError if the manifest was deleted or replaced meanwhile."""
    state = read_state(folder)
    if state is None:
        raise OutputError(
            f"{folder.path('manifest')} was deleted or replaced while the job ran; restore the folder, or start a new "
            "job with --fresh"
        )
    return state


def _extend(
    job: Job, file: SpecFile, state: State, manifest: Manifest, num_replicas: int, display: ProgressDisplay
) -> State:
    if not has_more(job, state):
        display.say(NOTHING_NEW)
        return state
    num_rows = add_extent(job, file, state, manifest, num_replicas, display.say)
    display.say(said(job, state, num_rows))
    return _state_of(job.folder)


def _recover(job: Job, state: State, manifest: Manifest, epoch: int, display: ProgressDisplay) -> None:
    found = recover(job, state.extents, state, manifest)
    manifest.event("epoch", epoch=epoch, job_id=state.header.job_id, adopted=len(found.adopted), lost=list(found.lost))
    manifest.commit()
    for shard in found.lost[:_LOST_TO_NAME]:
        display.say(f"warning: part {shard} is gone or altered; its rows run again")
    if len(found.lost) > _LOST_TO_NAME:
        display.say(
            f"warning: {len(found.lost) - _LOST_TO_NAME:,} more parts are gone or altered; their rows run again"
        )


def _say_what(
    job: Job, state: State, launcher: Launcher, display: ProgressDisplay, overrides: Mapping[str, Any]
) -> None:
    """overrides: the retry's sampling, by the fields of the spec."""
    slots = launcher.slots
    sampling = ", ".join(
        setting(name, getattr(job.spec.sampling, name)) + ("" if origin == "spec" else f" ({origin})")
        for name, origin in job.origins.items()
    )
    if overrides:
        changes = (setting(name.removeprefix("sampling."), value) for name, value in overrides.items())
        sampling += f"; in this retry {', '.join(changes)}"
    task = job.task
    display.say(task.describe() or (f"sampling: {sampling}" if task.draws_tokens else f"task: {task.name}"))
    done, shards = int(state.committed.sum()), len(state.committed)
    num_kept = journal.num_results(job.folder, state.parts)
    kept = f", {counted(num_kept, 'request')} finished and kept in the journal" if num_kept else ""
    samples = f" with {task.num_rows_per_input:,} samples each" if task.num_rows_per_input > 1 else ""
    display.say(
        ("" if job.slice is None else f"slice {job.slice}: ")
        + f"{total_rows(state.extents):,} input rows{samples} in {shards:,} shards, {done:,} of these shards done{kept}"
        + f"; {counted(len(slots), 'replica')} on "
        + (", ".join("+".join(slot.devices) for slot in slots) if slots[0].devices else launcher.backend.processors)
    )
