"""The start of an epoch, the same for every job: replicas, and beside them the scan of the input; then `Work`.

`run` has made the checks that take milliseconds. Replicas start next: they need only the spec, the model and their
devices. If anything on the way is refused, they end.
"""

import contextlib
import functools
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from batchinf.base import faults
from batchinf.base.stop_signals import shielded
from batchinf.base.storage import Folder
from batchinf.base.text import counted, size_text
from batchinf.coordinator.begin import begin_job, check_extended, extend_job
from batchinf.coordinator.content_gate import ContentGate
from batchinf.coordinator.display import ProgressDisplay
from batchinf.coordinator.epoch import Epoch
from batchinf.coordinator.recovery import note_ended, recover
from batchinf.coordinator.repair import RepairFile
from batchinf.coordinator.retry import check_retry, new_retry
from batchinf.engines.installed import StructuresCheck
from batchinf.fleet.backend import Backend
from batchinf.fleet.fleet import Fleet
from batchinf.fleet.launch import choose_engines, end_all, ending, new_fleet, start_due, work_of
from batchinf.fleet.parallel import with_degrees
from batchinf.fleet.status import JobStatus, read_status
from batchinf.job import ordering
from batchinf.job.choose import Say
from batchinf.job.columns import column_warnings
from batchinf.job.disk_space import check_size, room_warning
from batchinf.job.drift import check_drift
from batchinf.job.job import Job, PreparedJob, carried_columns, max_model_len
from batchinf.job.model_len import with_known_length
from batchinf.job.open import naming_lines, open_input
from batchinf.job.resolve import with_known_degrees
from batchinf.job.sample import RUN_ROWS, refuse_hopeless, sample_rows
from batchinf.manifest.lines import Recovered, StartedReplica
from batchinf.manifest.lock import JobLock
from batchinf.manifest.log import Manifest
from batchinf.manifest.names import others_note
from batchinf.manifest.state import State, read_beginning
from batchinf.manifest.versions import check_current, later_columns, later_columns_line
from batchinf.model.content import Contents
from batchinf.output import journal
from batchinf.output.mirror import Mirror
from batchinf.planning.images import SampledImages
from batchinf.planning.prompt_lengths import LengthCounts
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.checks import first_row_warnings, input_notes
from batchinf.prompts.row_sampling import setting
from batchinf.records import Int64Array, Prompt
from batchinf.schedule.positions import RunOrder
from batchinf.schedule.shards import shard_at, total_rows
from batchinf.spec.file import retried_structures

_LOST_TO_NAME = 20
_POLL_S = 0.2
_LOOK_EVERY_S = 1.0
_LOOK_S = 1.0  # for a sample of the rows, while the engines start
CHECKING = "checking the structured outputs with vLLM, whose import takes 10 s or more"


@contextlib.contextmanager
def start(
    prepared: PreparedJob,
    contents: Contents,
    backend: Backend,
    *,
    lock: JobLock,
    number: int,
    display: ProgressDisplay,
    mirror: Mirror | None = None,
    given: RepairFile | None = None,
) -> Iterator[Epoch]:
    """Start replicas and open the job beside them. When the block ends, all of these replicas have ended.

    number: of the epoch. contents: the model's local files. mirror: of a job in a bucket. given: the file from which a
    retry takes rows.
    """
    if prepared.state is not None:
        check_current(prepared.folder, prepared.state.header, is_done=prepared.state.is_done)
    prepared = with_known_length(prepared, display.say)
    prepared = with_known_degrees(prepared, functools.partial(with_degrees, backend=backend, say=display.say))
    _note_later_columns(prepared, display.say)
    if prepared.spec.scripted is None:
        backend.read_ahead(prepared.model, prepared.spec.model.load_format)
    before = prepared.state or read_beginning(prepared.folder)
    backend.end_leftovers(before.of(StartedReplica), before.job_id)
    job_id = before.job_id or uuid.uuid4().hex
    with naming_lines(prepared.file):
        launched, settings, slots = choose_engines(prepared, backend, say=display.say)
    make_fleet = functools.partial(
        new_fleet, backend=backend, settings=settings, slots=slots, job_id=job_id, epoch=number
    )
    fleet = make_fleet(launched)
    chain = None if mirror is None else mirror.chain
    # The id is durable before replicas start: they make files outside the job's folder with the id in their names.
    new_id = job_id if prepared.state is None else None
    manifest = Manifest(prepared.folder, number, lock, prepared.state, chain=chain, new_id=new_id)
    if mirror is not None:
        mirror.start()
    note_ended(before, read_status(prepared.folder), manifest, lock.predecessor_seen_at)
    with contextlib.closing(manifest), contextlib.ExitStack() as opened, ending(fleet, manifest):
        opened.callback(contents.close)
        contents.start()  # behind `read_ahead`, so that the disk is read once
        if prepared.state is None and (note := others_note(Folder(prepared.file.spec.output.folder))) is not None:
            display.say(note)
        checks = [opened.enter_context(check) for check in _structures_checks(prepared)]
        _start_replicas(prepared, fleet, manifest, display.say)
        job = open_checked(prepared, display.say)
        opened.callback(job.source.close)
        if launched.spec.input.format != job.spec.input.format:
            # Only later rows show that the input is a batch file. Its engines have other arguments.
            end_all(fleet, manifest)
            fleet = make_fleet(job, num_before=fleet.num_incarnations)
            opened.enter_context(ending(fleet, manifest))
        state = prepared.state
        for line in check_retry(job, state):
            display.say(line)
        retry = None if state is None else new_retry(job, state, prepared.retry, prepared.overrides, given=given)
        # One for both looks at the first rows: to load a tokenizer of 128,000 tokens takes 0.7 s of processor time.
        make_builder = functools.cache(job.prompt_builder)
        if state is None and job.slice is not None:
            # The first slice that chooses its rows decides what the output folder holds: one that is refused must not.
            _await(checks, fleet, 0, display)
            refuse_hopeless(job, (), make_builder)
        state = _begun(
            prepared,
            job,
            checks,
            manifest=manifest,
            fleet=fleet,
            job_id=job_id,
            make_builder=make_builder,
            display=display,
        )
        _recover(job, state, manifest, number=number, say=display.say, mirror=mirror)
        gate = ContentGate(contents=contents, job=job, before=state.files, manifest=manifest, say=display.say)
        gate.look(fleet)
        manifest.commit()  # after the look, which may have made one commit of all
        faults.point("start.recovered")
        for line in _job_lines(job, state, fleet, prepared.overrides):
            display.say(line)
        if state.committed.all():
            end_all(fleet, manifest)  # the recovery took all parts in that were missing
        else:
            is_new = prepared.state is None
            _give_work(job, state, fleet, is_new=is_new, make_builder=make_builder, say=display.say)
        make_builder.cache_clear()
        yield Epoch(
            job=job,
            state=state,
            lock=lock,
            manifest=manifest,
            fleet=fleet,
            content_gate=gate,
            display=display,
            retry=retry,
            overrides=prepared.overrides,
            given=given,
            mirror=mirror,
        )


# -- without the input -------------------------------------------------------------------------------------------------


def _note_later_columns(prepared: PreparedJob, say: Say) -> None:
    """Name columns of this version that a job of an earlier one goes on without."""
    if prepared.state is not None and (later := later_columns(prepared.folder, prepared.state.header)):
        say(later_columns_line(later))


def _structures_checks(prepared: PreparedJob) -> Iterator[StructuresCheck]:
    """The checks of structured outputs, which run beside the start; none for a job that has passed them.

    Those of the section `retry` may be new in each run.
    """
    tokenizer = prepared.model.tokenizer
    if prepared.spec.scripted is None and (prepared.state is None or prepared.retry is not None):
        yield StructuresCheck(prepared.file, tokenizer)
    if prepared.spec.scripted is None and (file := retried_structures(prepared.file)) is not None:
        yield StructuresCheck(file, tokenizer)


def _start_replicas(prepared: PreparedJob, fleet: Fleet, manifest: Manifest, say: Say) -> None:
    if not prepared.has_rows:
        say("reading the input")
        return
    say(f"starting {counted(len(fleet.replicas), 'replica')} while the input is read")
    with shielded():
        start_due(fleet, manifest)
    faults.point("start.replicas")


# -- with the input ----------------------------------------------------------------------------------------------------


def open_checked(prepared: PreparedJob, say: Say) -> Job:
    """Read the input, and check that it is still the job's."""
    job = open_input(prepared, say=say)
    if prepared.state is not None:
        if prepared.new == "take":
            check_extended(job, prepared.state)
        check_drift(job, prepared.state.header)
    return job


def _begun(
    prepared: PreparedJob,
    job: Job,
    checks: list[StructuresCheck],
    *,
    manifest: Manifest,
    fleet: Fleet,
    job_id: str,
    make_builder: Callable[[], PromptBuilder],
    display: ProgressDisplay,
) -> State:
    """Begin a new job, after the check of its structures. If it has begun, take new rows in if it is to be extended."""
    state = prepared.state
    if state is None:
        order, ordered_by = ordering.begin(job, display.say, manifest.check_lock)
        check_size(job, len(order))
        if job.slice is None:
            refuse_hopeless(job, order, make_builder)
        _await(checks, fleet, len(order) * job.task.num_rows_per_input, display)
        return begin_job(job, manifest, fleet, order.extents[0], ordered_by=ordered_by, job_id=job_id)
    ordering.restore(job, state, display.say)
    _await(checks, fleet, 0, display)
    if prepared.new == "take":
        state = extend_job(job, state, manifest, num_replicas=len(fleet.replicas), say=display.say)
    return state


def _await(checks: list[StructuresCheck], fleet: Fleet, num_rows: int, display: ProgressDisplay) -> None:
    """Show how the engines start until the checks are done, and take them off the list.

    num_rows: of the job's output, to be shown; 0 if it is not known.
    """
    while checks:
        check = checks.pop(0)
        if not check.is_done:
            display.say(CHECKING)
        next_look = 0.0
        while not check.is_done:
            # Replicas without work say only what they do, or that they have failed: the coordinator looks for that.
            fleet.poll(_POLL_S)
            if num_rows and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_EVERY_S
                fleet.look_at_starts()
                replicas = tuple(replica.status() for replica in fleet.replicas)
                display.show(JobStatus("starting", num_rows, replicas=replicas))
        for line in check.lines():
            display.say(line)


def fetch_input(job: Job, state: State, pieces: Iterable[Int64Array], say: Say) -> None:
    """Fetch what replicas will read of an input in a store and the cache lacks, so that they need no key.

    pieces: positions of the rows.
    """
    if not job.source.ranged:
        return
    columns = [*job.prompt_builder(state).columns, *carried_columns(job.spec)]
    unfetched = job.source.unfetched(pieces, columns)
    num_bytes = sum(stop - first for _, spans in unfetched for first, stop in spans)
    if num_bytes:
        whole = sum(file.stamp()[0] for file, _ in unfetched)
        say(f"fetching {size_text(num_bytes)} of {size_text(whole)} of the input: the columns and rows that run")
    for file, spans in unfetched:
        file.fetch(spans)


# -- with the manifest -------------------------------------------------------------------------------------------------


def _recover(
    job: Job, state: State, manifest: Manifest, *, number: int, say: Say, mirror: Mirror | None = None
) -> None:
    """The caller commits the new lines of the manifest."""
    adopted, lost = recover(job, state, manifest, mirror)
    manifest.record(Recovered(state.header.job_id))
    manifest.event("epoch", epoch=number, job_id=state.header.job_id, adopted=len(adopted), lost=lost)
    for shard in lost[:_LOST_TO_NAME]:
        rows = counted(shard_at(state.extents, shard).num_rows, "input row")
        say(f"warning: part {shard} is gone or altered: {rows} run again; an altered file is kept in damaged/")
    if more := lost[_LOST_TO_NAME:]:
        rows = counted(sum(shard_at(state.extents, shard).num_rows for shard in more), "input row")
        say(f"warning: {len(more):,} more parts are gone or altered: {rows} run again")


def _job_lines(job: Job, state: State, fleet: Fleet, overrides: Mapping[str, Any]) -> Iterator[str]:
    """The task with its sampling, the rows and where they run, and a warning about the disk.

    overrides: the retry's sampling, by the fields of the spec.
    """
    task = job.task
    yield task.describe() or (_sampling_line(job, overrides) if task.draws_tokens else f"task: {task.name}")
    num_kept = journal.num_results(job.folder, state.parts)
    kept = f", {counted(num_kept, 'request')} finished and kept in the journal" if num_kept else ""
    samples = f" with {task.num_rows_per_input:,} samples each" if task.num_rows_per_input > 1 else ""
    if "n" in job.spec.sampling.columns:
        samples = f" with the samples of column '{job.spec.sampling.columns['n']}'"
    slots = [replica.slot for replica in fleet.replicas]
    devices = ", ".join("+".join(slot.devices) for slot in slots)
    yield (
        ("" if job.slice is None else f"slice {job.slice}: ")
        + f"{counted(total_rows(state.extents), 'input row')}{samples} in {counted(len(state.committed), 'shard')}, "
        + f"{int(state.committed.sum()):,} of them done{kept}; {counted(len(slots), 'replica')} on "
        + (devices if slots[0].devices else fleet.backend.processors)
    )
    if (warning := room_warning(job, state, len(slots))) is not None:
        yield warning


def _sampling_line(job: Job, overrides: Mapping[str, Any]) -> str:
    sampling = ", ".join(
        setting(name, getattr(job.spec.sampling, name)) + ("" if origin == "spec" else f" ({origin})")
        for name, origin in job.origins.items()
    )
    if overrides:
        changes = (setting(name.removeprefix("sampling."), value) for name, value in overrides.items())
        sampling += f"; in this retry {', '.join(changes)}"
    return f"sampling: {sampling}"


def _give_work(
    job: Job,
    state: State,
    fleet: Fleet,
    *,
    is_new: bool,
    make_builder: Callable[[], PromptBuilder],
    say: Say,
) -> None:
    """Tell the replicas about the rows, and say what can be said of them while they open the input."""
    order = RunOrder(job.folder, state.extents)
    open_shards = np.flatnonzero(~state.committed).tolist()
    pieces = (order.of(shard_at(state.extents, shard)).positions() for shard in open_shards)
    fetch_input(job, state, pieces, say)
    fleet.give_work(work_of(job, state, None))
    _warn(job, order, say, make_builder() if is_new else None)


def _warn(job: Job, positions: Sequence[int], say: Say, builder: PromptBuilder | None) -> None:
    """positions: of all rows of the job. builder: makes the prompts of a new job; None if the job goes on."""
    for line in (
        *input_notes(job.source),
        *column_warnings(job.task, job.source),
        *job.task.prompt_warnings(job.model, job.source),
        *first_row_warnings(job.spec, job.source, positions),
        *(() if builder is None else _error_row_lines(job, positions, builder)),
    ):
        say(line)


def _error_row_lines(job: Job, positions: Sequence[int], builder: PromptBuilder) -> Iterator[str]:
    """The rows of a sample that will be error rows, as `validate` prints them. positions: of the rows that run.

    It reads the same rows as `validate`, or as many of them as can be read in `_LOOK_S`, from all parts of the input.
    """
    groups = [group for sampled in sample_rows(positions, 0) for group in _groups(sampled)]
    random.Random(0).shuffle(groups)
    images = SampledImages(job, builder)
    prompts: list[Prompt] = []
    began = time.monotonic()
    for group in groups:
        rows = job.source.read_rows(np.sort(np.asarray(group, np.int64)), builder.columns)
        prompts += images.looked_at(builder.build(rows, max_model_len(job)))
        if time.monotonic() - began > _LOOK_S:
            break
    counts = LengthCounts(len(positions), max_model_len(job), job.spec.sampling.max_tokens)
    for prompt in sorted(prompts, key=lambda prompt: prompt.row_index):
        counts.add(prompt)
    lengths = counts.summary()
    yield from (line.removeprefix("  ") for line in lengths.error_lines())
    yield from lengths.error_rate_warning(job.spec.max_error_rate)
    yield from counts.scoring_warnings()


def _groups(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    return (positions[start : start + RUN_ROWS] for start in range(0, len(positions), RUN_ROWS))
