"""The versions of a job's input: which files and rows it had at the start, and what each `--extend` added.

The source is a sequence of file ranges, and a row's position is its place in it. A version's record is stored under the
fingerprint of its content and of all versions before it. It counts once an extent's manifest line names that
fingerprint. Files are found again by content, appended rows by the hash of the content before them.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import pyarrow as pa
import xxhash

from batchinf.base import faults
from batchinf.base.errors import BatchinfError, DriftError, InputError
from batchinf.base.storage import Folder
from batchinf.source.cache import (
    FileEntry,
    is_whole,
    load_entries,
    locked,
    read_record,
    save_entries,
    schema_of,
    schema_text,
    write_record,
)
from batchinf.source.digests import ReadDigests
from batchinf.source.files import InputFile
from batchinf.source.folders import chosen_values, with_folder_columns
from batchinf.source.formats.base import FileFormat, SourceFile
from batchinf.source.remote import is_url
from batchinf.source.scan import Scanner
from batchinf.source.types import settled_schema

VERSIONS_FOLDER = "versions"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive rows of a file."""

    file: int
    """Its number in the job, from 0, the same in each version that added rows of it."""
    name: str
    hash: str
    """Of its whole content in that version, as `content` and `num_bytes`; see `FileEntry`."""
    content: int
    num_bytes: int
    first_row: int
    stop_row: int
    """The number of rows of the whole content."""
    etag: str = ""
    """See `FileEntry`."""
    digest: str = ""
    """See `FileEntry`."""


@dataclass(frozen=True, slots=True)
class InputVersion:
    """A version of the input: the one before it, and the rows added after its rows."""

    before: str | None
    """Fingerprint of the version before; None for the first."""
    format: str
    schema: str
    """The merged columns of the whole version, as `schema_text`."""
    added: tuple[FileRange, ...]
    """The rows that the version before does not have."""

    @property
    def fingerprint(self) -> str:
        """Of the content of this version. Of the files' names only the values of folders count; see `folders`."""
        if self.before is None:
            parts: list[object] = [self.format, [(added.hash, added.stop_row) for added in self.added]]
        else:
            runs = [(added.file, added.hash, added.first_row, added.stop_row) for added in self.added]
            parts = [self.before, self.format, runs]
        schema = schema_of(self.schema)
        if any(values := [chosen_values(added.name, schema) for added in self.added]):
            parts.append(values)
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def save_version(cache: Folder, version: InputVersion) -> None:
    """Write a version's record unless it is there."""
    name = record_name(version.fingerprint)
    record = json.loads(json.dumps(asdict(version)))
    if read_record(cache, name) == record:
        return
    cache.make(VERSIONS_FOLDER)
    faults.point("input_version.before_record")
    write_record(cache, name, record)
    faults.point("input_version.after_record")


def load_versions(cache: Folder, fingerprint: str) -> list[InputVersion] | None:
    """The version of this fingerprint and all before it, the first one first; None if a record is damaged."""
    versions: list[InputVersion] = []
    before: str | None = fingerprint
    while before is not None:
        record = read_record(cache, record_name(before))
        try:
            added = tuple(FileRange(**added) for added in record["added"])
            versions.append(InputVersion(record["before"], record["format"], record["schema"], added))
        except (KeyError, TypeError):
            return None
        if versions[-1].fingerprint != before:
            return None
        before = versions[-1].before
    return versions[::-1]


def versions_at_once(cache: Folder, fingerprint: str) -> list[str] | None:
    """The fingerprint of each version up to this one, as if a job had begun with it. None: not known.

    A version whose rows would then have other positions keeps its own.
    """
    fingerprints: list[str] = []
    merged: list[FileRange] = []
    for version in load_versions(cache, fingerprint) or ():
        for added in version.added:
            if merged and (merged[-1].file, merged[-1].stop_row) == (added.file, added.first_row):
                added = replace(added, first_row=merged.pop().first_row)
            merged.append(added)
        is_in_place = all(added.first_row == 0 for added in merged)
        at_once = replace(version, before=None, added=tuple(merged)) if is_in_place else version
        fingerprints.append(at_once.fingerprint)
    return fingerprints or None


def latest_ranges(versions: Sequence[InputVersion]) -> list[FileRange]:
    """Each file's last range, by the files' numbers. It has the hash of the latest known content."""
    latest = {added.file: added for version in versions for added in version.added}
    return [latest[file] for file in range(len(latest))]


def contents_of(cache: Folder, fingerprint: str) -> list[tuple[str, int, int]] | None:
    """The hash, bytes and rows of each file of a version, sorted; None if they are not known."""
    versions = load_versions(cache, fingerprint)
    if versions is None:
        return None
    return sorted((file.hash, file.num_bytes, file.stop_row) for file in latest_ranges(versions))


def record_name(fingerprint: str) -> str:
    """The file of a version's record."""
    return f"{VERSIONS_FOLDER}/{fingerprint}.json"


# -- comparing the files with a version ------------------------------------------------------------------------------

_NAMED = 3  # files that a message names
# Unknown files are read if they are so few and so small, because files without rows are not new.
_LOOKED_AT = 100
_LOOKED_AT_BYTES = 1 << 16


@dataclass(slots=True)
class FileComparison:
    """The files of a version, by number, compared with the files that are there now."""

    scanner: Scanner
    free: dict[str, SourceFile] = field(default_factory=dict)
    """Files by name that are not yet known to be one of the version's."""
    unchanged: dict[int, SourceFile] = field(default_factory=dict)
    """Perhaps renamed."""
    grown: dict[int, SourceFile] = field(default_factory=dict)
    """With rows appended."""
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unknown: list[InputFile] = field(default_factory=list)
    """Files that the version does not have."""
    new: list[SourceFile] = field(default_factory=list)
    """The unknown files, scanned, if that was asked for."""

    @property
    def usable(self) -> dict[int, SourceFile]:
        """The known files that have all rows of the version."""
        return {**self.unchanged, **self.grown}

    def scan(self, files: Sequence[InputFile]) -> None:
        """Add files to the free ones."""
        self.free |= {file.name: file for file in self.scanner.scan(files)}

    def match(self, known: Sequence[FileRange], *, by_name: bool) -> list[FileRange]:
        """Find the free files that have the content of known ones. Returns the other known ones.

        A file that was scanned again may be matched with a known one of which nothing was read, but only after all
        others.
        """
        digests = self.scanner.digests
        names = defaultdict[str, list[str]](list)
        for name in sorted(self.free):
            names[self.free[name].entry.hash].append(name)
        unmatched: list[FileRange] = []
        for old in known if by_name else sorted(known, key=lambda old: not digests.has(old.content)):
            alike = [name for name in names[old.hash] if name in self.free and (name == old.name or not by_name)]
            # By the rules of another version of batchinf, the same bytes may be other rows.
            alike = [name for name in alike if self.free[name].entry.num_rows == old.stop_row]
            for name in sorted(alike, key=lambda name: name != old.name):
                file = self.free[name]
                entry = file.entry
                is_same = entry.content == old.content
                if old.digest and entry.digest:
                    is_same = entry.digest == old.digest
                elif digests.has(old.content):
                    is_same = is_same or digests.is_same(old.content, file.local_copy())
                elif not by_name and not is_same:
                    # Nothing was read of it here. Another machine may have read an object, whose ETag then counts.
                    is_same = not old.etag or entry.etag in ("", old.etag)
                if is_same:
                    self.unchanged[old.file] = replace(self.free.pop(name), entry=replace(entry, content=old.content))
                    break
            else:
                unmatched.append(old)
        return sorted(unmatched, key=lambda old: old.file)

    def compare_grown(self, known: Sequence[FileRange]) -> None:
        """Compare known files, whose content is not there any more, with files that may have rows appended to it."""
        gone = [old for old in known if old.name not in self.free]
        for old in known:
            if old.name in self.free and not self._take_grown(old, old.name):
                self.changed.append(old.name)
        looks = len(gone) * len(self.free) <= _LOOKED_AT
        for old in gone:
            # Renamed as well. An empty file is the beginning of any other, and a copy leaves open which one it is.
            others = [name for name, file in self.free.items() if looks and _has_grown(self.scanner, old, file)]
            if len(others) != 1 or not old.stop_row or not self._take_grown(old, others[0]):
                self.gone.append(old.name)

    def _take_grown(self, old: FileRange, name: str) -> bool:
        """Take the free file of this name as a known one if it begins with its content. Returns whether it does."""
        if not _has_grown(self.scanner, old, self.free[name]):
            return False
        file = self.free.pop(name)
        # It may have grown by blank lines only.
        place = self.grown if file.entry.num_rows > old.stop_row else self.unchanged
        place[old.file] = file
        return True

    def save_contents(self) -> None:
        """Store which contents were found again, so that they are not compared once more."""
        cache = self.scanner.cache
        entries = {file.name: file.entry for file in self.unchanged.values()}
        known = load_entries(cache)
        if any(name in known and known[name].content != entry.content for name, entry in entries.items()):
            with locked(cache):
                save_entries(cache, {**load_entries(cache), **entries})


def from_cache(known: Sequence[FileRange], cache: Folder, digests: ReadDigests) -> dict[int, SourceFile] | None:
    """The known files by their cache entries, without a search for others; None if one has changed.

    A remote file's copy counts as the file; the remote system is not asked.
    """
    entries = load_entries(cache)
    by_content = {(entry.hash, entry.content): (name, entry) for name, entry in entries.items()}
    scanned: dict[int, SourceFile] = {}
    for number, old in enumerate(known):
        name, entry = by_content.get((old.hash, old.content), ("", None))
        if entry is None or not _is_there(name, entry) or not is_whole(entry, cache):
            return None
        scanned[number] = SourceFile(InputFile(name, entry.path), entry, cache, digests)
    return scanned


def _is_there(name: str, entry: FileEntry) -> bool:
    if is_url(entry.path):
        return True
    try:
        return InputFile(name, entry.path).stamp() == entry.stamp
    except InputError:
        return False


def compare_files(
    scanner: Scanner, known: Sequence[FileRange], files: Sequence[InputFile], *, scans_new: bool
) -> FileComparison:
    """Compare files with those of a version: first by name and content, then by content alone."""
    compared = FileComparison(scanner)
    names = {old.name for old in known}
    unknown = [file for file in files if file.name not in names]
    compared.scan([file for file in files if file.name in names])
    unmatched = compared.match(known, by_name=True)
    if unmatched or scans_new:
        compared.scan(unknown)
        unmatched = compared.match(unmatched, by_name=False)
    compared.save_contents()
    compared.compare_grown(unmatched)
    names = {*compared.changed, *(file.name for file in compared.usable.values())}
    compared.unknown = [file for file in files if file.name not in names]
    if scans_new:
        compared.new = [compared.free[file.name] for file in compared.unknown]
    elif len(compared.unknown) <= _LOOKED_AT:
        compared.unknown = [file for file in compared.unknown if not _is_empty(scanner, file)]
    return compared


def _is_empty(scanner: Scanner, file: InputFile) -> bool:
    """Whether a file surely has no rows. It counts as new once it has rows, see `next_version`."""
    try:
        if file.is_remote or file.stamp()[0] > _LOOKED_AT_BYTES:
            return False
        [scanned] = scanner.scan([file])
    except (BatchinfError, OSError):  # such as a damaged file: only --extend has to read it
        return False
    return scanned.entry.num_rows == 0


def _has_grown(scanner: Scanner, old: FileRange, file: SourceFile) -> bool:
    """Whether the file begins with its whole earlier content."""
    if file.entry.num_bytes <= old.num_bytes or file.entry.num_rows < old.stop_row:
        return False
    return scanner.format.prefix(file, old.num_bytes) == (old.hash, old.stop_row)


def refuse_changes(compared: FileComparison, path: str, *, takes_new: bool, is_job: bool = False) -> None:
    """Raise DriftError if a known file is changed or gone, or if there are new files or rows and `takes_new` is off.

    is_job: the files are the parts of another job, `path` is its folder.
    """
    if changes := _in_words({"changed": compared.changed, "gone": compared.gone}):
        restore = "restore these to continue the job, and give corrected rows as a file of their own with --retry "
        advice = f"{restore}errors --input FILE; or " if not is_job else "that job has run rows again since: "
        raise DriftError(
            f"{path} is not the input that the job in the output folder began with: {changes}; {advice}start a new job "
            "with another output.path, where `input.exclude: {job: OLD_OUTPUT, on: prompt_hash}` leaves out the "
            "unchanged rows"
        )
    if takes_new:
        return
    grown = [file.name for file in compared.grown.values()]
    if additions := _in_words({"new": [file.name for file in compared.unknown], "longer than before": grown}):
        advice = "use --extend to run the new rows too" + ("" if is_job else ", or move the new data away")
        raise DriftError(f"{path} has more than the job in the output folder knows: {additions}; {advice}")


def _in_words(files: Mapping[str, Sequence[str]]) -> str:
    sentences = []
    for state, names in files.items():
        number = "1 file is" if len(names) == 1 else f"{len(names):,} files are"
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        if names:
            sentences.append(f"{number} {state}: {', '.join(sorted(names)[:_NAMED])}{more}")
    return "; ".join(sentences)


# -- new versions ----------------------------------------------------------------------------------------------------


def first_version(scanner: Scanner, files: Sequence[InputFile]) -> tuple[InputVersion, dict[int, SourceFile]]:
    """The version of a new job: all files."""
    scanned = dict(enumerate(scanner.scan(files)))
    added = tuple(_added(number, file, 0) for number, file in scanned.items())
    return InputVersion(None, scanner.format.name, _settled(scanned, scanner.format), added), scanned


def fitted_beside(version: InputVersion, other: pa.Schema, format: FileFormat) -> InputVersion:
    """The version with types that hold the values of another source, too. Raises InputError if there are none."""
    schemas = [("the job's input", other), (version.added[0].name, schema_of(version.schema))]
    return replace(version, schema=schema_text(settled_schema(schemas, format.mixed_types)))


def next_version(
    before: InputVersion, known: Sequence[FileRange], compared: FileComparison, format: FileFormat
) -> tuple[InputVersion, dict[int, SourceFile]] | None:
    """A version with the additions in the order of file names, and all files by number; None if nothing is new."""
    scanned = compared.usable
    runs = [(file.name, number, known[number].stop_row) for number, file in compared.grown.items()]
    # A new file counts once it has rows.
    for new in sorted((new for new in compared.new if new.entry.num_rows), key=lambda new: new.name):
        runs.append((new.name, len(scanned), 0))
        scanned[len(scanned)] = new
    if not runs:
        return None
    added = tuple(_added(number, scanned[number], first_row) for _, number, first_row in sorted(runs))
    return InputVersion(before.fingerprint, format.name, _settled(scanned, format), added), scanned


def _added(number: int, file: SourceFile, first_row: int) -> FileRange:
    entry = file.entry
    return FileRange(
        file=number,
        name=file.name,
        hash=entry.hash,
        content=entry.content,
        num_bytes=entry.num_bytes,
        first_row=first_row,
        stop_row=entry.num_rows,
        etag=entry.etag,
        digest=entry.digest,
    )


def _settled(scanned: dict[int, SourceFile], format: FileFormat) -> str:
    """The columns of all files together, as `schema_text`."""
    first_files = dict[str, str]()
    for number in sorted(scanned):
        first_files.setdefault(scanned[number].entry.schema, scanned[number].name)
    schemas = ((name, schema_of(schema)) for schema, name in first_files.items())
    names = [file.name for file in scanned.values()]
    return schema_text(with_folder_columns(settled_schema(schemas, format.mixed_types), names))
