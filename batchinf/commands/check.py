"""`batchinf check`: compares a job's folder with its manifest and reports damage. `--repair` prepares the next run."""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from batchinf.base.errors import OutputError
from batchinf.base.parquet import open_part
from batchinf.base.paths import is_bucket
from batchinf.base.slices import job_folders, no_job_message, read_files
from batchinf.base.storage import Folder
from batchinf.base.text import utc_now
from batchinf.job.repaired import lost_files
from batchinf.manifest.commit_log import Fields, encode_commits, whole_lines
from batchinf.manifest.events import EventLine, append_events
from batchinf.manifest.lock import Holder, JobLock, live_holder
from batchinf.manifest.log import Manifest, snapshot_commits
from batchinf.manifest.names import parse_part_name, part_name
from batchinf.manifest.state import State, last_epoch, list_logs, read_beginning, read_state
from batchinf.manifest.versions import check_current, check_version, spec_text, stored_spec
from batchinf.output.journal import Journal, list_shards
from batchinf.output.parts import stated_part
from batchinf.output.proof import NUM_THREADS, Flaw, PartsOfJob, is_newer, job_of, other_owner
from batchinf.records import Part
from batchinf.schedule.positions import RunOrder, positions_name, read_positions
from batchinf.schedule.shards import Extent, shard_at, total_rows, total_shards
from batchinf.tasks.registry import task_of

_PARTS_TO_ASK = 100
_CHUNK = 1024
# The longest time between the manifest line of a part and its name in `parts/`.
_SETTLE_S = 1.0

# The problems before the empty line are damage. Those after it are harmless.
Problem = Literal[
    "manifest_damaged", "manifest_without_job", "manifest_incomplete", "manifest_of_other_job", "selection_lost",
    "repair_lost", "part_damaged", "part_unnamed", "extension_unnamed", "foreign_file", "spec_missing",

    "part_uploaded", "part_taken_in", "journal_damaged", "spec_restored",
]  # fmt: skip
_NOTES = {
    "part_uploaded": "is not in the manifest: the next run commits it if it is whole",
    "part_taken_in": "was not in the manifest; it is whole, and the manifest names it now",
    "journal_damaged": "is damaged; its results run again, unless a part has them",
    "spec_restored": "was missing; it is written again",
}
# For each problem: what is wrong with the file, by the fields of its finding, and what the user can do.
_WRONG = {
    "manifest_without_job": ("lacks the lines about the job", "restore it from a backup"),
    "manifest_incomplete": (
        "says that the job is done, but lacks {0.num_shards:,} of its parts, the first of them part {0.shard}",
        "restore it from a backup, or delete its last line and run again",
    ),
    "manifest_of_other_job": (
        "belongs to job {0.job_id}, but the parts belong to job {0.other_job_id}",
        "restore the right manifest, or move the parts away",
    ),
    "selection_lost": (
        "is gone or altered; it says which rows run and in which order", "run the job again: it chooses them again",
    ),
    "repair_lost": (
        "is gone or altered; it has input rows that {0.detail} took from a file",
        "restore it from a backup; a --retry with the same --input restores the copy of that file, too",
    ),
    "part_unnamed": (
        "is a part of this job that the manifest does not name, because it is older than the part",
        "check --repair takes it in",
    ),
    "extension_unnamed": (
        "is a part of this job with rows of an --extend that the manifest does not name, because it is older",
        "run the job with --extend, and then check --repair takes the part in",
    ),
    "foreign_file": ("is not a part of this job, but readers would read it as one", "move it away"),
    "spec_missing": ("is missing", "check --repair writes it again from the manifest"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A problem that was found."""

    problem: Problem
    file: str
    """Its name in the job's folder."""
    detail: str = ""
    """More about the problem, if there is more."""
    moved_to: str | None = None
    """Its name in `damaged/` after a repair."""
    needs_repair: bool = False
    """Whether the next run cannot notice it without a repair."""
    shard: int | None = None
    """The shard of a part or segment; of `manifest_incomplete`, the first missing shard."""
    num_shards: int | None = None
    """Of `manifest_incomplete`: the number of missing shards."""
    job_id: str | None = None
    """Of `manifest_of_other_job`: the job of the manifest."""
    other_job_id: str | None = None
    """Of `manifest_of_other_job`: the job of the parts."""

    @property
    def is_wrong(self) -> bool:
        """Whether the job is damaged, so that it is not whole."""
        return self.problem not in _NOTES

    def line(self, *, is_running: bool) -> str:
        if self.problem == "part_uploaded" and is_running:
            return f"note: {self.file} is not in the manifest: being published"
        if not self.is_wrong:
            return f"note: {self.file} {_NOTES[self.problem]}"
        if self.problem == "manifest_damaged":
            return f"wrong: {self.detail}"
        if self.problem == "part_damaged":
            return f"wrong: {self.file} {self.detail}; {self._part_remedy()}run the job again: its rows run again"
        what, remedy = _WRONG[self.problem]
        return f"wrong: {self.file} {what.format(self)}; {remedy}"

    def _part_remedy(self) -> str:
        if self.moved_to is not None:
            return f"moved to {self.moved_to}; "
        # A resume does not notice such a flaw, so the part must be moved aside first.
        return "check --deep --repair moves it aside; then " if self.needs_repair else ""


@dataclass(frozen=True, slots=True)
class JobCheck:
    """The findings in a job, or in one slice of a job."""

    folder: str
    slice: str | None
    """Such as `3/8`; None: a whole job."""
    has_begun: bool = True
    """If not, nothing can be wrong yet."""
    is_checked: bool = False
    """Whether the manifest could be read; if not, the numbers are 0."""
    findings: tuple[CheckFinding, ...] = ()
    num_parts: int = 0
    """Of the whole job."""
    num_parts_checked: int = 0
    num_rows: int = 0
    """Output rows of the whole job; if rows may have their own number of samples, an estimate by the parts."""
    num_rows_committed: int = 0
    activity: Literal["done", "running", "stopped", ""] = ""
    replaced_logs: tuple[str, ...] = ()
    """Names in `damaged/` of a damaged manifest's files, after a repair."""
    error: str | None = None
    """Why a slice could not be checked, or a manifest not be repaired."""

    @property
    def num_wrong(self) -> int:
        """Number of findings that are damage."""
        return sum(finding.is_wrong for finding in self.findings)

    @property
    def is_whole(self) -> bool:
        """Whether the job is undamaged."""
        return self.error is None and not self.num_wrong

    def lines(self, *, is_deep: bool) -> Iterator[str]:
        if not self.has_begun:
            yield "has not begun"
        for finding in self.findings:
            yield finding.line(is_running=self.activity == "running")
        if self.is_checked:
            looked_at = "sizes" if is_bucket(self.folder) else "sizes and footers"
            how = "every byte" if is_deep else f"{looked_at}; --deep reads every byte"
            states = {"running": "at work", "stopped": "not done; run it again to go on"}
            yield (
                f"checked {self.num_parts_checked:,} of {self.num_parts:,} parts, {self.num_rows_committed:,} of "
                f"{self.num_rows:,} output rows ({how}): {self.num_wrong:,} wrong, "
                f"{len(self.findings) - self.num_wrong:,} notes; the job is {states.get(self.activity, self.activity)}"
            )
        if self.slice is not None and not self.is_whole:
            yield self.verdict()

    def verdict(self) -> str:
        """Why the job is not whole, and what to do."""
        if self.error is not None:
            return self.error
        if self.replaced_logs:
            return (
                f"{self.folder}: its damaged manifest was replaced; the old one is {', '.join(self.replaced_logs)}; "
                "run the job again: whole parts are kept, all other rows run again"
            )
        if not self.is_checked:
            return (
                f"{self.folder}: nothing else can be checked without the manifest; check --repair makes a new one "
                "from its undamaged lines"
            )
        num_moved = sum(finding.moved_to is not None for finding in self.findings)
        moved = f", {num_moved:,} moved aside: run the job again" if num_moved else ""
        things = "1 thing is" if self.num_wrong == 1 else f"{self.num_wrong:,} things are"
        return f"{self.folder}: {things} wrong, see above{moved}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report of `check`."""

    folder: str
    is_deep: bool
    """Whether each byte was read."""
    is_repair: bool
    is_whole: bool
    jobs: tuple[JobCheck, ...]
    """One, or all slices in the order of their rows."""

    def lines(self) -> Iterator[str]:
        """A line for each finding, then a summary, for the job or for each of its slices."""
        for job in self.jobs:
            prefix = "" if job.slice is None else f"slice {job.slice}: "
            yield from (prefix + line for line in job.lines(is_deep=self.is_deep))

    def raise_if_wrong(self) -> None:
        """Raise OutputError if something is wrong."""
        if self.is_whole:
            return
        if self.jobs[0].slice is None:
            raise OutputError(self.jobs[0].verdict())
        num_wrong = sum(not job.is_whole for job in self.jobs)
        raise OutputError(f"{num_wrong} of the {len(self.jobs)} slices in {self.folder} have problems: see above")


def check_job(out: str, *, is_deep: bool, repair: bool) -> CheckReport:
    """Check the job in an output folder, or all of its slices.

    is_deep: read all bytes and the keys of all rows, and not only sizes and footers. repair: move damaged files aside,
    so that the next run makes them again. Raises OutputError if there is no job, if it cannot be repaired, or if a
    record that its slices share is damaged.
    """
    folders = job_folders(out)
    read_files(out)
    check = _check_job if folders[0].slice is None else _check_slice
    jobs = tuple(check(job, is_deep, repair) for job in folders)
    is_whole = all(job.is_whole for job in jobs)
    return CheckReport(folder=out, is_deep=is_deep, is_repair=repair, is_whole=is_whole, jobs=jobs)


def _check_slice(folder: Folder, is_deep: bool, repair: bool) -> JobCheck:
    if not folder.exists("manifest") or _is_beginning(folder):
        return JobCheck(str(folder.root), str(folder.slice), has_begun=False)
    try:
        return _check_job(folder, is_deep, repair)
    except OutputError as error:
        return JobCheck(str(folder.root), str(folder.slice), error=str(error))


def _check_job(folder: Folder, is_deep: bool, repair: bool) -> JobCheck:
    if not any(folder.exists(name) for name in ("manifest", "parts", "job.yaml")):
        raise OutputError(no_job_message(folder.root))
    if _is_beginning(folder):
        raise OutputError(
            f"{folder.root} holds no job yet: its input has not been read to the end; wait until the running job has "
            "read it, or run the job again"
        )
    check = JobCheck(str(folder.root), None if folder.slice is None else str(folder.slice))
    with JobLock(folder).held(lambda: last_epoch(folder)) if repair else contextlib.nullcontext() as epoch:
        try:
            state = read_state(folder)
        except OutputError as error:
            finding = CheckFinding("manifest_damaged", "manifest/", str(error))
        else:
            if state is not None:
                if repair:
                    check_current(folder, state.header, is_done=state.is_done)
                return FilesCheck(folder, state, is_deep=is_deep, is_repair=repair).checked(check)
            finding = CheckFinding("manifest_without_job", "manifest/")
        return _rebuilt(dataclasses.replace(check, findings=(finding,)), folder, epoch)


def _is_beginning(folder: Folder) -> bool:
    """Whether no run has written the job's header yet. Nothing can be damaged then."""
    if folder.list("parts"):
        return False
    with contextlib.suppress(OutputError):
        before = read_beginning(folder)
        # A run writes the spec just before the header.
        return not before.has_header and (before.job_id is not None or not folder.exists("job.yaml"))
    return False


def _rebuilt(check: JobCheck, folder: Folder, epoch: int | None) -> JobCheck:
    """epoch: of the lock; None: do not repair."""
    if epoch is None:
        return check
    try:
        check = dataclasses.replace(check, replaced_logs=tuple(rebuild_manifest(folder, epoch)))
    except OutputError as error:
        return dataclasses.replace(check, error=str(error))
    state = read_state(folder)
    return check if state is None else FilesCheck(folder, state, is_deep=False, is_repair=True).checked(check)


class FilesCheck:
    """The check of a job, or of a slice, that has begun, in a folder of this host."""

    def __init__(self, files: Folder, state: State, *, is_deep: bool, is_repair: bool) -> None:
        self.files = files
        self.state = state
        self.is_deep = is_deep
        self.is_repair = is_repair
        self._taken_in: list[Part] = []
        """Parts that a repair adds to the manifest."""

    def holder(self) -> Holder | None:
        """The process that seems to run the job."""
        return live_holder(self.files)

    def read_state(self) -> None:
        """Bring `state` up to date."""
        self.state = read_state(self.files, self.state) or self.state

    def part_names(self) -> Sequence[str]:
        """The names of all files in `parts/`."""
        return self.files.list("parts")

    def move_aside(self, name: str) -> str | None:
        """Move a damaged part to `damaged/`. Returns its name there; None if there is no such file."""
        return self.files.move_aside(name) if self.files.exists(name) else None

    def owner_of(self, shards: Sequence[int]) -> str | None:
        """The id of the other job, if the parts of these shards belong to other jobs only, as far as that is known."""
        return other_owner(self.files, self.state, shards)

    def other_findings(self) -> Iterator[CheckFinding]:
        """In the spec, the journal, and the files of repaired rows."""
        if not self.files.exists("job.yaml"):
            if self.is_repair:
                self.files.write_atomic("job.yaml", spec_text(self.state.header.spec, self.state.limit).encode())
            yield CheckFinding("spec_restored" if self.is_repair else "spec_missing", "job.yaml")
        yield from check_journal(self.files, self.state)
        for retry in self.state.repairs():
            yield from (CheckFinding("repair_lost", name, str(retry)) for name in lost_files(self.files, retry))

    def checked(self, check: JobCheck) -> JobCheck:
        """The check with its findings and its numbers."""
        num_parts = len(self.state.parts)
        lost = _lost_selection(self.files, self.state)
        findings = [*self._damaged_parts()] if lost is None else [lost]
        names = self.part_names()
        self.read_state()
        state = self.state
        findings += [*self._check_names(names), *_check_coverage(state), *self.other_findings()]
        if self._taken_in:
            self._commit_taken_in()
        task = task_of(stored_spec(state.header.spec))
        return dataclasses.replace(
            check,
            is_checked=True,
            findings=(*check.findings, *findings),
            num_parts=total_shards(state.extents),
            num_parts_checked=num_parts,
            num_rows=task.expected_rows(
                total_rows(state.extents), num_done=state.counts.num_rows, num_inputs_done=state.num_inputs_committed
            ),
            num_rows_committed=state.counts.num_rows,
            activity="done" if state.is_done else "running" if self._is_held() else "stopped",
        )

    def _is_held(self) -> bool:
        """Whether another process runs the job: a repair has the lock itself."""
        return not self.is_repair and self.holder() is not None

    def _damaged_parts(self) -> Iterator[CheckFinding]:
        flaws = self.flaws(sorted(self.state.parts))
        if flaws:
            # A running job may have replaced a part in the meantime.
            if self._is_held():
                time.sleep(_SETTLE_S)
            self.read_state()
            flaws = self.flaws(sorted(flaws.keys() & self.state.parts.keys()))
        owner = self.owner_of([*flaws]) if len(flaws) == len(self.state.parts) else None
        if owner is not None:
            job_id = self.state.header.job_id
            yield CheckFinding("manifest_of_other_job", "manifest/", job_id=job_id, other_job_id=owner)
            return
        for shard, flaw in flaws.items():
            name = f"parts/{part_name(shard)}"
            if self.is_newer(shard):
                yield self.unnamed(shard)
                continue
            moved_to = self.move_aside(name) if self.is_repair else None
            # Without a repair, a run makes the part again if it notices the flaw.
            needs_repair = not flaw.is_seen_by_run
            yield CheckFinding("part_damaged", name, flaw.what, moved_to, needs_repair=needs_repair, shard=shard)

    def flaws(self, shards: Sequence[int]) -> dict[int, Flaw]:
        """The flaws of these shards' parts."""
        parts = _parts_of(self.files, self.state)
        flaws = dict[int, Flaw]()
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for start in range(0, len(shards), _CHUNK):
                chunk = shards[start : start + _CHUNK]
                found = pool.map(functools.partial(self.flaw, parts), chunk)
                flaws.update({shard: flaw for shard, flaw in zip(chunk, found, strict=True) if flaw})
        return flaws

    def flaw(self, parts: PartsOfJob, shard: int) -> Flaw | None:
        """The flaw of a shard's part. parts: what the parts must be."""
        return parts.flaw(shard_at(self.state.extents, shard), self.state.parts[shard], is_deep=self.is_deep)

    def is_newer(self, shard: int) -> bool:
        """Whether a shard has a part that the manifest does not know yet."""
        return is_newer(self.files, shard, self.state)

    def _check_names(self, names: Iterable[str]) -> Iterator[CheckFinding]:
        """Readers take all of `parts/*.parquet`, so no other file may be there. names: read before the state."""
        named = {part_name(shard) for shard in self.state.parts} | {part_name(part.shard) for part in self._taken_in}
        for name in names:
            if name in named or not name.endswith(".parquet"):
                continue
            shard = parse_part_name(name)
            if shard is not None and shard < total_shards(self.state.extents):
                yield self.unnamed(shard)
            elif shard is not None and self.is_newer(shard):
                yield CheckFinding("extension_unnamed", f"parts/{name}", shard=shard)
            else:
                yield CheckFinding("foreign_file", f"parts/{name}")

    def unnamed(self, shard: int) -> CheckFinding:
        """The finding for a part that the manifest does not know yet. A repair takes it in, or moves it aside."""
        name = f"parts/{part_name(shard)}"
        if not self.is_newer(shard):
            return CheckFinding("foreign_file", name)
        if not self.is_repair:
            return CheckFinding("part_unnamed", name, shard=shard)
        if (part := whole_part(self.files, self.state, shard)) is None:
            return CheckFinding("part_damaged", name, "is not in the manifest and not whole", self.move_aside(name))
        self._taken_in.append(part)
        return CheckFinding("part_taken_in", name, shard=shard)

    def _commit_taken_in(self) -> None:
        with contextlib.closing(Manifest(self.files, last_epoch(self.files) + 1)) as manifest:
            for part in self._taken_in:
                manifest.part(part)
            manifest.commit()


def whole_part(folder: Folder, state: State, shard: int) -> Part | None:
    """The record of the file of a shard in `parts/`, if all of it is as it was written; None if it is not."""
    place = shard_at(state.extents, shard)
    name = f"parts/{part_name(shard)}"
    rows = RunOrder(folder, state.extents).of(place)
    part = stated_part(folder, name, place, state.header.fingerprint, rows=rows)
    if part is None or _parts_of(folder, state).flaw(place, part, is_deep=True) is not None:
        return None
    with contextlib.suppress(OutputError), open_part(folder.path(name), page_checksum_verification=True) as file:
        for index in range(file.num_row_groups):
            file.read_row_group(index)
        return part
    return None


def _lost_selection(folder: Folder, state: State) -> CheckFinding | None:
    """The finding for a file of chosen rows that is gone or altered; without it no part can be checked."""
    for number, extent in enumerate(state.extents, 1):
        if extent.positions is not None and read_positions(folder, number, extent.positions) is None:
            return CheckFinding("selection_lost", positions_name(number))
    return None


def _parts_of(folder: Folder, state: State) -> PartsOfJob:
    """What the parts must be. folder: has them, and the files of chosen rows."""
    task = task_of(stored_spec(state.header.spec))
    return PartsOfJob(
        folder=folder,
        job_id=state.header.job_id,
        order=RunOrder(folder, state.extents),
        num_samples=None if task.rows_vary else task.num_rows_per_input,
        schema=state.header.columns.part_schema,
    )


def _check_coverage(state: State) -> Iterator[CheckFinding]:
    if state.is_done and not state.committed.all():
        missing = (~state.committed).nonzero()[0]
        yield CheckFinding("manifest_incomplete", "manifest/", shard=int(missing[0]), num_shards=len(missing))


def check_journal(folder: Folder, state: State) -> Iterator[CheckFinding]:
    journal = Journal(folder, "check", state.header.columns.journal_schema)
    for shard in list_shards(folder):
        if shard not in state.parts:
            for name in journal.recover(shard)[1]:
                yield CheckFinding("journal_damaged", f"journal/{name}", shard=shard)


def rebuild_manifest(folder: Folder, epoch: int) -> list[str]:
    """Write a new log for the lock's `epoch` and move the others to `damaged/`. Returns their names there.

    Raises OutputError, without changes, if the lines about the job are lost or have another format.
    """
    logs = [name for _, name in list_logs(folder)]
    lines = {name: list(_useful_lines(folder, name)) for name in logs}
    owner = _owner(folder, lines)
    state = State()
    for log in lines.values():
        if all(fields.get("job_id", owner) == owner for fields in log):
            _apply(folder, state, log)
    if not state.has_header or not state.extents:
        raise OutputError(
            f"{folder.path('manifest')} cannot be repaired: its lines about the job are damaged; restore it from a "
            "backup, or give the job another output.path"
        )
    check_current(folder, state.header, is_done=False)
    state.done = None
    data = encode_commits(snapshot_commits(state, logs))
    if not folder.create_exclusive(f"manifest/{epoch:06d}.jsonl", data):
        raise OutputError(f"another process has just started on {folder.root}; run the same command again")
    append_events(folder, [EventLine("rebuilt", utc_now(), {"replaces": logs})])
    return [folder.move_aside(name) for name in logs]


def _useful_lines(folder: Folder, name: str) -> Iterator[Fields]:
    for fields in whole_lines(folder, name):
        check_version(folder, fields)
        yield fields


def _owner(folder: Folder, lines: dict[str, list[Fields]]) -> str | None:
    """The id of the job in the logs. If they are of several jobs, the one whose parts are in the folder."""
    stated = {fields["job_id"] for log in lines.values() for fields in log if "job_id" in fields}
    if len(stated) < 2:
        return next(iter(stated), None)
    names = itertools.islice(
        (name for name in folder.list("parts") if parse_part_name(name) is not None), _PARTS_TO_ASK
    )
    owners = Counter(job_of(folder, f"parts/{name}") for name in names)
    for owner, _ in owners.most_common():
        if owner in stated:
            return owner
    raise OutputError(
        f"{folder.path('manifest')} holds logs of several jobs, {', '.join(sorted(stated))}, and no part shows which "
        "of them belongs here: move the other logs away"
    )


def _is_same(extent: Extent, fields: Fields) -> bool:
    # `start` alone is not enough: an extent may have no rows, and the next one then has the same start.
    return all(getattr(extent, name) == fields[name] for name in ("start", "num_rows", "first_row"))


def _apply(folder: Folder, state: State, log: list[Fields]) -> None:
    try:
        for fields in log:
            # A snapshot repeats extents.
            if fields["kind"] == "extent" and any(_is_same(extent, fields) for extent in state.extents):
                continue
            # The file of a part whose line cannot be applied is looked at later.
            with contextlib.suppress(*((LookupError, ValueError) if fields["kind"] == "part" else ())):
                state.apply(fields)
    except (LookupError, ValueError) as error:
        raise OutputError(
            f"{folder.path('manifest')} cannot be repaired: a line about the division into shards is damaged; restore "
            "it from a backup, or give the job another output.path"
        ) from error
