"""`batchinf check`: is a job's folder what its manifest says, and what is wrong where; with repair by running again.

It reads files alone and needs no lock, so that it can look at a job at work; `repair` takes the lock, moves what is
damaged to `damaged/` and leaves the rest to the next run, which makes anew whatever is not there.
"""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from batchinf.base.errors import OutputError
from batchinf.base.slices import job_folders
from batchinf.base.storage import Folder
from batchinf.commands.repair import move_file_aside, rebuild_manifest
from batchinf.manifest.lock import LOCK, Holder, JobLock, judge
from batchinf.manifest.names import parse_part_name, part_name
from batchinf.manifest.state import State, last_epoch, read_beginning, read_state
from batchinf.output.journal import Journal, list_shards
from batchinf.output.proof import NUM_THREADS, Flaw, find_flaw, other_owner
from batchinf.run.extend import spec_text
from batchinf.schedule.order import RunOrder
from batchinf.schedule.selection import RUN_FOLDER, permutation_name, read_permutation, read_selection, selection_name
from batchinf.schedule.shards import shard_at, total_rows, total_shards
from batchinf.spec.job import JobSpec
from batchinf.tasks.registry import task_of

_CHUNK = 1024
# A part that is being put in place and its line are this far apart at most.
_SETTLE_S = 1.0
_AGAIN = "run the job again: its rows run again"


@dataclass(slots=True)
class _Looked:
    """What has been looked at, and what is wrong with it."""

    num_parts: int = 0
    num_wrong: int = 0
    num_notes: int = 0
    num_moved: int = 0

    def wrong(self, name: str, what: str, remedy: str) -> str:
        """A line, counted."""
        self.num_wrong += 1
        return f"wrong: {name} {what}; {remedy}"

    def note(self, line: str) -> str:
        """A line on what harms nothing, counted."""
        self.num_notes += 1
        return f"note: {line}"


def check_lines(out: str, *, is_deep: bool = False, repair: bool = False) -> Iterator[str]:
    """A line for each thing that is wrong, then a summary; of a job in slices for each of them.

    is_deep: all bytes and the keys of all rows are read, not sizes and footers alone. repair: what is damaged is moved
    aside, for the next run. Raises OutputError after the last line if something is wrong, or if there is no job.
    """
    jobs = job_folders(out)
    if jobs[0].slice is None:
        yield from _check_job(jobs[0].folder, is_deep=is_deep, repair=repair)
        return
    num_wrong = 0
    for job in jobs:
        if not job.folder.exists("manifest") or _is_beginning(job.folder):
            yield f"slice {job.slice}: has not begun"
            continue
        try:
            for line in _check_job(job.folder, is_deep=is_deep, repair=repair):
                yield f"slice {job.slice}: {line}"
        except OutputError as error:
            num_wrong += 1
            yield f"slice {job.slice}: {error}"
    if num_wrong:
        raise OutputError(f"{num_wrong} of the {len(jobs)} slices in {out} are not as they should be: see above")


def _check_job(folder: Folder, *, is_deep: bool, repair: bool) -> Iterator[str]:
    out = folder.root
    if not any(folder.exists(name) for name in ("manifest", "parts", "job.yaml")):
        raise OutputError(f"{out} holds no job: there is no manifest in it; give a job's output.path")
    if _is_beginning(folder):
        raise OutputError(
            f"{out} holds no job yet: its input has not been read to the end; wait for the run that does so, or run it "
            "again"
        )
    held = JobLock(folder).held(lambda: last_epoch(folder)) if repair else contextlib.nullcontext()
    with held as epoch:
        yield from _check(folder, _Looked(), is_deep, epoch)


def _is_beginning(folder: Folder) -> bool:
    """Whether no run of the job has come to its header: nothing can be wrong with it then."""
    if folder.list("parts"):
        return False
    with contextlib.suppress(OutputError):
        before = read_beginning(folder)
        # The spec is written just before the header.
        return not before.has_header and (before.job_id is not None or not folder.exists("job.yaml"))
    return False


def _check(folder: Folder, looked: _Looked, is_deep: bool, epoch: int | None) -> Iterator[str]:
    """epoch: of the lock, where things are to be repaired."""
    try:
        state = read_state(folder)
    except OutputError as error:
        yield f"wrong: {error}"
        raise _mend_manifest(folder, epoch) from error
    if state is None:
        yield looked.wrong("manifest/", "does not say what the job is", "put back a copy of it")
        raise _mend_manifest(folder, epoch)
    yield from _check_parts(folder, state, looked, is_deep, epoch is not None)
    state = read_state(folder, state) or state
    yield from _check_names(folder, state, looked)
    yield from _check_coverage(state, looked)
    yield from _check_spec(folder, state, looked, epoch is not None)
    yield from _check_journal(folder, state, looked)
    yield _summary(folder, state, looked, is_deep)
    if looked.num_wrong:
        raise _end(folder, looked)


def _mend_manifest(folder: Folder, epoch: int | None) -> OutputError:
    if epoch is None:
        return OutputError(
            f"{folder.root}: without its manifest nothing else can be checked; check --repair makes a new one of the "
            "lines that are whole"
        )
    names = rebuild_manifest(folder, epoch)
    return OutputError(
        f"{folder.root}: its manifest was damaged and is made anew, the old one is {', '.join(names)}; run the job "
        "again: parts that are whole are taken over, the rest runs again"
    )


def _check_parts(folder: Folder, state: State, looked: _Looked, is_deep: bool, repair: bool) -> Iterator[str]:
    looked.num_parts = len(state.parts)
    for number, extent in enumerate(state.extents, 1):
        name = selection_name(number, RUN_FOLDER)
        if extent.selection is not None and read_selection(folder, number, extent.selection, RUN_FOLDER) is None:
            yield looked.wrong(
                name, "is gone or altered, and says which rows are run", "run the job again: it chooses them again"
            )
            return
        if extent.order is not None and read_permutation(folder, number, extent.order) is None:
            yield looked.wrong(
                permutation_name(number), "is gone or altered, and says in which order rows are run",
                "run the job again: it orders them again",
            )  # fmt: skip
            return
    flaws = _flaws(folder, state, sorted(state.parts), is_deep)
    if flaws:
        # A job at work may have put another part in a part's place since: what counts is what it says of it now.
        if _is_live(folder):
            time.sleep(_SETTLE_S)
        state = read_state(folder, state) or state
        flaws = _flaws(folder, state, sorted(flaws.keys() & state.parts.keys()), is_deep)
    owner = other_owner(folder, state, list(flaws)) if len(flaws) == len(state.parts) else None
    if owner is not None:
        what = f"is of job {state.header.job_id}, the parts are of job {owner}"
        yield looked.wrong("manifest/", what, "put the right manifest back, or move the parts away")
        return
    for shard, flaw in flaws.items():
        name = f"parts/{part_name(shard)}"
        if repair and folder.exists(name):
            looked.num_moved += 1
            remedy = f"moved to {move_file_aside(folder, name)}; {_AGAIN}"
        else:
            # What a resume does not see by itself has to be moved out of its way.
            remedy = _AGAIN if flaw.is_plain else f"check --deep --repair moves it aside; then {_AGAIN}"
        yield looked.wrong(name, flaw.what, remedy)


def _flaws(folder: Folder, state: State, shards: list[int], is_deep: bool) -> dict[int, Flaw]:
    num_samples = task_of(JobSpec.model_validate(state.header.spec)).num_rows_per_input
    order = RunOrder(folder, state.extents)

    def look(shard: int) -> Flaw | None:
        place = shard_at(state.extents, shard)
        return find_flaw(folder, state.header.job_id, place, state.parts[shard], num_samples, order, is_deep=is_deep)

    found = {}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for start in range(0, len(shards), _CHUNK):
            chunk = shards[start : start + _CHUNK]
            found.update({shard: flaw for shard, flaw in zip(chunk, pool.map(look, chunk), strict=True) if flaw})
    return found


def _check_names(folder: Folder, state: State, looked: _Looked) -> Iterator[str]:
    """Readers take `parts/*.parquet`: nothing else may have such a name."""
    strangers = [name for name in folder.list("parts") if name.endswith(".parquet")]
    state = read_state(folder, state) or state
    named = {part_name(shard) for shard in state.parts}
    for name in strangers:
        if name in named:
            continue
        shard = parse_part_name(name)
        if shard is not None and name == part_name(shard) and shard < total_shards(state.extents):
            when = "being published" if _is_live(folder) else "the next run takes it over if it is whole"
            yield looked.note(f"parts/{name} is named by no line of the manifest: {when}")
        else:
            yield looked.wrong(f"parts/{name}", "is no part of this job, and readers take it for one", "move it away")


def _check_coverage(state: State, looked: _Looked) -> Iterator[str]:
    if state.is_done and not state.committed.all():
        missing = (~state.committed).nonzero()[0]
        what = f"says that the job is done, but not its shard {missing[0]} ({len(missing):,} in all)"
        yield looked.wrong("manifest/", what, "put back a whole copy of it, or delete its last line and run again")


def _check_spec(folder: Folder, state: State, looked: _Looked, repair: bool) -> Iterator[str]:
    if folder.exists("job.yaml"):
        return
    if repair:
        folder.write_atomic("job.yaml", spec_text(state, state.limit).encode())
        yield looked.note("job.yaml was missing; it is written again")
    else:
        yield looked.wrong("job.yaml", "is missing", "check --repair writes it again from the manifest")


def _check_journal(folder: Folder, state: State, looked: _Looked) -> Iterator[str]:
    schema = task_of(JobSpec.model_validate(state.header.spec)).result_schema
    journal = Journal(folder, "check", schema)
    for shard in list_shards(folder):
        if shard in state.parts:
            continue
        for name in journal.recover(shard).damaged:
            yield looked.note(f"journal/{name} is damaged: left out, its results run again")


def _summary(folder: Folder, state: State, looked: _Looked, is_deep: bool) -> str:
    num_rows = total_rows(state.extents) * task_of(JobSpec.model_validate(state.header.spec)).num_rows_per_input
    live = "at work" if _is_live(folder) else "not done; run it again to go on"
    how = "every byte" if is_deep else "sizes and footers; --deep reads every byte"
    return (
        f"checked {looked.num_parts:,} of {total_shards(state.extents):,} parts, {state.num_rows:,} of {num_rows:,} "
        f"rows ({how}): {looked.num_wrong:,} wrong, {looked.num_notes:,} notes; the job is "
        + ("done" if state.is_done else live)
    )


def _end(folder: Folder, looked: _Looked) -> OutputError:
    moved = f", {looked.num_moved:,} moved aside: run the job again" if looked.num_moved else ""
    things = "1 thing is" if looked.num_wrong == 1 else f"{looked.num_wrong:,} things are"
    return OutputError(f"{folder.root}: {things} wrong, see above{moved}")


def _is_live(folder: Folder) -> bool:
    try:
        holder = Holder.decode(folder.read(LOCK))
    except OSError:
        return False
    return holder is not None and judge(holder) != "dead"
