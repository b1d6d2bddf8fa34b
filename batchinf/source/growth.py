"""The files and rows that a job has taken in, by generation, and how a resume finds the files again."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import xxhash

from batchinf.base import faults
from batchinf.base.errors import DriftError
from batchinf.base.storage import Folder
from batchinf.source.cache import FileEntry, is_whole, load_entries, read_record, schema_text, write_record
from batchinf.source.files import Format, InputFile
from batchinf.source.first_pass import examine
from batchinf.source.formats.csv import csv_front
from batchinf.source.formats.lines import line_front
from batchinf.source.remote import is_url
from batchinf.source.types import settled_schema

GENERATIONS_FOLDER = "generations"


@dataclass(frozen=True, slots=True)
class FileRange:
    """A run of a file's rows.

    file: its number in the job, from 0, the same in each generation that took rows of it. hash, num_bytes: of its
    content then, which has `stop_row` rows.
    """

    file: int
    name: str
    hash: str
    num_bytes: int
    first_row: int
    stop_row: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What was taken in at once. before: the fingerprint of the generation before, None for the first.

    schema: the settled columns of all that was taken in so far, as `schema_text`.
    """

    before: str | None
    format: Format
    schema: str
    segments: tuple[FileRange, ...]

    @property
    def fingerprint(self) -> str:
        """Of the content of this generation and all before it; not of where or what the files were."""
        if self.before is None:
            what: list[object] = [self.format, [(segment.hash, segment.stop_row) for segment in self.segments]]
        else:
            runs = [(segment.file, segment.hash, segment.first_row, segment.stop_row) for segment in self.segments]
            what = [self.before, self.format, runs]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())

    @property
    def num_rows(self) -> int:
        """Rows that were taken in then."""
        return sum(segment.stop_row - segment.first_row for segment in self.segments)


def save_generation(cache: Folder, generation: Generation) -> None:
    """Record a generation, unless it is recorded."""
    name = _name(generation.fingerprint)
    if read_record(cache, name):
        return
    content = {
        "before": generation.before,
        "format": generation.format,
        "schema": generation.schema,
        "segments": [astuple(segment) for segment in generation.segments],
    }
    cache.make(GENERATIONS_FOLDER)
    faults.point("generations.before_record")
    write_record(cache, name, json.loads(json.dumps(content)))
    faults.point("generations.after_record")


def load_generations(cache: Folder, fingerprint: str) -> list[Generation] | None:
    """The generation of this fingerprint and all before it, the first one first; None if a record is not whole."""
    found: list[Generation] = []
    wanted: str | None = fingerprint
    while wanted is not None:
        record = read_record(cache, _name(wanted))
        try:
            segments = tuple(FileRange(*segment) for segment in record["segments"])
            found.append(Generation(record["before"], record["format"], record["schema"], segments))
        except (KeyError, TypeError):
            return None
        if found[-1].fingerprint != wanted:
            return None
        wanted = found[-1].before
    return found[::-1]


def record_path(cache: Folder, fingerprint: str) -> str:
    """Where a record lies."""
    return str(cache.path(_name(fingerprint)))


def latest_segments(generations: Sequence[Generation]) -> list[FileRange]:
    """Each file's last segment, which says what its content was, by the files' numbers."""
    latest = {segment.file: segment for generation in generations for segment in generation.segments}
    return [latest[file] for file in range(len(latest))]


def _name(fingerprint: str) -> str:
    return f"{GENERATIONS_FOLDER}/{fingerprint}.json"


Held = tuple[InputFile, FileEntry]
_NAMED = 3  # of many files


@dataclass(slots=True)
class Intake:
    """What became of the files that a job knows, by their numbers, and which files it does not know.

    found: as they were, under whatever name. grown: as they were, with more behind it. new: only looked into where
    that was asked for.
    """

    found: dict[int, Held] = field(default_factory=dict)
    grown: dict[int, Held] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unknown: list[InputFile] = field(default_factory=list)
    new: list[Held] = field(default_factory=list)

    @property
    def held(self) -> dict[int, Held]:
        """Every known file that is there."""
        return {**self.found, **self.grown}


def from_cache(known: Sequence[FileRange], cache: Folder) -> dict[int, Held] | None:
    """The known files by what the cache says of them, without a look for others; None if one is not as it was.

    A remote file's copy stands for it: nothing is asked of where it came from.
    """
    entries = load_entries(cache)
    by_hash = {entry.hash: (name, entry) for name, entry in entries.items()}
    found: dict[int, Held] = {}
    for number, segment in enumerate(known):
        own = entries.get(segment.name)
        name, entry = (segment.name, own) if own is not None else ("", None)
        if entry is None or entry.hash != segment.hash:
            name, entry = by_hash.get(segment.hash, ("", None))
        if entry is None or not _is_there(name, entry) or not is_whole(entry, cache):
            return None
        found[number] = (InputFile(name, entry.path), entry)
    return found


def _is_there(name: str, entry: FileEntry) -> bool:
    if is_url(entry.path):
        return True
    try:
        return InputFile(name, entry.path).stamp() == (entry.size, entry.mtime_ns)
    except OSError:
        return False


def take_in(
    known: Sequence[FileRange], files: Sequence[InputFile], format: Format, cache: Folder, *, looks_at_new: bool
) -> Intake:
    """Hold `files` against what the job knows: first by name and content, then by content alone."""
    intake = Intake()
    names = {segment.name for segment in known}
    free = _examined([file for file in files if file.name in names], format, cache)
    left = _by_name(known, free, intake)
    intake.unknown = [file for file in files if file.name not in names]
    if left or looks_at_new:
        free.update(_examined(intake.unknown, format, cache))
        left = _by_content(left, free, intake)
    for segment in left:
        held = free.get(segment.name)
        if held is not None and _is_grown(segment, *held, cache):
            # What came may be blank lines alone.
            place = intake.grown if held[1].num_rows > segment.stop_row else intake.found
            place[segment.file] = free.pop(segment.name)
        else:
            (intake.gone if held is None else intake.changed).append(segment.name)
    held_names = {file.name for file, _ in intake.held.values()}
    intake.unknown = [file for file in files if file.name not in held_names and file.name not in intake.changed]
    if looks_at_new:
        intake.new = [free[file.name] for file in intake.unknown]
    return intake


def _examined(files: Sequence[InputFile], format: Format, cache: Folder) -> dict[str, Held]:
    return {file.name: (file, entry) for file, entry in zip(files, examine(files, format, cache), strict=True)}


def _by_name(known: Sequence[FileRange], free: dict[str, Held], intake: Intake) -> list[FileRange]:
    left = []
    for segment in known:
        if segment.name in free and free[segment.name][1].hash == segment.hash:
            intake.found[segment.file] = free.pop(segment.name)
        else:
            left.append(segment)
    return left


def _by_content(known: Sequence[FileRange], free: dict[str, Held], intake: Intake) -> list[FileRange]:
    names = defaultdict[str, list[str]](list)
    for name in sorted(free, reverse=True):
        names[free[name][1].hash].append(name)
    left = []
    for segment in known:
        if alike := names[segment.hash]:
            intake.found[segment.file] = free.pop(alike.pop())
        else:
            left.append(segment)
    return left


def _is_grown(segment: FileRange, file: InputFile, entry: FileEntry, cache: Folder) -> bool:
    """Whether the file begins with all that it was, to the last line's end."""
    if entry.num_bytes <= segment.num_bytes or entry.num_rows < segment.stop_row:
        return False
    if entry.format in ("jsonl", "text"):
        front = line_front(file, entry, segment.num_bytes, cache)
    elif entry.format == "csv":
        front = csv_front(file, segment.num_bytes)
    else:
        return False
    return front == (segment.hash, segment.stop_row)


def check_intake(intake: Intake, path: str, *, takes_new: bool) -> None:
    """Raise DriftError, in one line, where a known file is not as it was, or where there is more that is not taken."""
    if what := _said({"changed": intake.changed, "gone": intake.gone}):
        raise DriftError(
            f"{path} is not the input that the job in the output folder has taken in: {what}; put these back as they "
            "were to go on with it, or give the new job another output.path"
        )
    if takes_new:
        return
    grown = [file.name for file, _ in intake.grown.values()]
    if what := _said({"new": [file.name for file in intake.unknown], "longer than before": grown}):
        raise DriftError(
            f"{path} has more than the job in the output folder has taken in: {what}; run with --extend to take that "
            "too, or move it away"
        )


def _said(files: Mapping[str, Sequence[str]]) -> str:
    """What became of files, with the first few of their names."""
    said = []
    for what, names in files.items():
        number = "1 file is" if len(names) == 1 else f"{len(names):,} files are"
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        if names:
            said.append(f"{number} {what}: {', '.join(sorted(names)[:_NAMED])}{more}")
    return "; ".join(said)


def next_generation(
    before: Generation, known: Sequence[FileRange], intake: Intake
) -> tuple[Generation, dict[int, Held]] | None:
    """What is new, in the order of the files' names, and all files by their numbers; None if nothing is."""
    held = intake.held
    runs = [(file.name, number, known[number].stop_row) for number, (file, _) in intake.grown.items()]
    # A file without rows is none, until it has some.
    for new in sorted((new for new in intake.new if new[1].num_rows), key=lambda new: new[0].name):
        runs.append((new[0].name, len(held), 0))
        held[len(held)] = new
    if not runs:
        return None
    segments = []
    for name, number, first_row in sorted(runs):
        entry = held[number][1]
        segments.append(FileRange(number, name, entry.hash, entry.num_bytes, first_row, entry.num_rows))
    return Generation(before.fingerprint, before.format, settled(held, before.format), tuple(segments)), held


def first_generation(format: Format, files: Sequence[InputFile], cache: Folder) -> tuple[Generation, dict[int, Held]]:
    """All files that there are."""
    held = dict(enumerate(zip(files, examine(files, format, cache), strict=True)))
    segments = (
        FileRange(number, file.name, entry.hash, entry.num_bytes, 0, entry.num_rows)
        for number, (file, entry) in held.items()
    )
    return Generation(None, format, settled(held, format), tuple(segments)), held


def settled(held: dict[int, Held], format: Format) -> str:
    """The columns of all files together, as `schema_text`."""
    schemas = {entry.schema: entry.arrow_schema() for _, (_, entry) in sorted(held.items())}
    return schema_text(settled_schema(schemas.values(), format))
