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
    Scratch,
    is_whole,
    load_entries,
    locked,
    read_record,
    save_entries,
    schema_of,
    schema_text,
    write_record,
)
from batchinf.source.digests import ReadDigests, Watch, changed
from batchinf.source.files import InputFile, Stamp, open_input, settled_stamp
from batchinf.source.formats.base import FileFormat
from batchinf.source.remote import UNKNOWN, RemoteFile, is_url
from batchinf.source.types import refuse_twins, settled_schema

SAVE_BYTES = 1 << 30  # of input: an interrupted scan of many files resumes from the last save


def scan_files(files: Sequence[InputFile], format: FileFormat, cache: Folder, digests: ReadDigests) -> list[FileEntry]:
    """The entry of each file: from the cache if path, size, mtime and inode are unchanged, else from a scan.

    If the size is the same, the file's content is compared first, and scanned only if it differs. Several processes may
    call this with one cache: one works under a lock, and the others find its result.
    """
    cache.make()
    known = load_entries(cache)
    trusted = [_trusted(file, format, known.get(file.name), cache) for file in files]
    found = [entry for entry in trusted if entry is not None]
    if len(found) == len(files):
        return found
    with locked(cache):
        return _scan_alone(files, format, cache, digests)


def _scan_alone(files: Sequence[InputFile], format: FileFormat, cache: Folder, digests: ReadDigests) -> list[FileEntry]:
    known = load_entries(cache)
    entries: dict[str, FileEntry] = {}
    unsaved_bytes = 0
    trusted = {file.name: _trusted(file, format, known.get(file.name), cache) for file in files}
    format.refuse_crashing([file for file in files if trusted[file.name] is None and not file.is_remote])
    for file in files:
        entry = trusted[file.name] or _unchanged(file, format, known.get(file.name), cache, digests)
        if entry is None:
            entry = _scan(file, format, cache, digests)
            unsaved_bytes += max(0, entry.size)
        entries[file.name] = entry
        if unsaved_bytes > SAVE_BYTES:
            digests.keep()
            save_entries(cache, {**known, **entries})
            unsaved_bytes = 0
    digests.keep()
    # Other entries stay: `files` may be only some of the job's files.
    save_entries(cache, {**known, **entries})
    return list(entries.values())


def _trusted(file: InputFile, format: FileFormat, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or (entry.path, entry.format) != (file.path, format.name):
        return None
    stamp = file.stamp()
    is_same = UNKNOWN not in stamp and stamp == entry.stamp and is_whole(entry, cache)
    return entry if is_same else None


def _unchanged(
    file: InputFile, format: FileFormat, entry: FileEntry | None, cache: Folder, digests: ReadDigests
) -> FileEntry | None:
    if entry is None or entry.format != format.name or not is_whole(entry, cache):
        return None
    if not format.hashes_all and not digests.has(entry.content):
        return None  # nothing of it was read, so it may be any file
    size, mtime_ns, inode = stamp = _stamp_now(file)
    if size != entry.size or not format.is_same(file, entry, digests) or _stamp_now(file) != stamp:
        return None
    return replace(entry, path=file.path, mtime_ns=mtime_ns, inode=inode)


def _scan(file: InputFile, format: FileFormat, cache: Folder, digests: ReadDigests) -> FileEntry:
    if not file.is_remote:
        open_input(file).close()
    before, stamp = _stamp_now(file), file.stamp()
    with Scratch(cache, file, format.name) as scratch:
        try:
            found = format.scan(_local(file, format, scratch), scratch)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # the system: a full disk or the like
                raise
            raise _damaged(file, format, error) from error
        refuse_twins(found.schema.names, file.name)
        if _stamp_now(file) != before:
            raise InputError(f"{file.name} changed while it was read; start again once it is complete")
        if {"content", "rows"} <= scratch.roles:
            scratch.drop("content")
        ranges = (*found.ranges, *scratch.fetched)
        artifacts = scratch.publish(found.hash, ranges)
    # The same for each process that scans the same content, and another one for content that replaces it.
    content = xxhash.xxh3_64_intdigest(json.dumps([file.name, stamp, found.hash]).encode()) >> 1
    if not digests.note(content, ranges):
        raise changed(file.name)
    schema = schema_text(found.schema)
    return FileEntry(
        file.path, format.name, *stamp, found.hash, found.num_rows, schema, artifacts, found.num_bytes, content
    )


def spooled(file: InputFile, entry: FileEntry, format: FileFormat, cache: Folder, digests: ReadDigests) -> FileEntry:
    """The entry of a file whose rows are read in any order. Adds a copy if rows are slow to read one by one."""
    if not format.is_slow_by_row(entry) or not entry.num_rows:
        return entry
    with locked(cache):
        known = load_entries(cache)
        other = known.get(file.name)  # another process may have made the copy
        if other is not None and other.hash == entry.hash and not format.is_slow_by_row(other):
            return other
        with Scratch(cache, file, format.name) as scratch:
            local = local_copy(file, entry, cache)
            trusted = entry.stamp if local == file else local.stamp()
            watch = Watch(file.name, [local.path], [trusted], lambda: format.is_same(local, entry, digests))
            try:
                ranges = watch.read(lambda: format.spool(local, scratch))
            except (ValueError, LookupError, TypeError, pa.ArrowException) as error:
                raise _damaged(file, format, error) from error
            if not digests.note(entry.content, ranges):
                raise changed(file.name)
            digests.keep()
            made = scratch.publish(entry.hash, ranges)
        entry = replace(entry, artifacts={**entry.artifacts, **made})
        save_entries(cache, {**known, file.name: entry})
    return entry


def local_copy(file: InputFile, entry: FileEntry, cache: Folder) -> InputFile:
    """The cache's copy of a remote file if the scan kept one, else the file."""
    copy = entry.artifacts.get("content")
    return file if copy is None else InputFile(file.name, str(cache.path(copy.name)))


def _stamp_now(file: InputFile) -> Stamp:
    return file.fresh_stamp() if isinstance(file, RemoteFile) else settled_stamp(file.path)


def _local(file: InputFile, format: FileFormat, scratch: Scratch) -> InputFile:
    """The file, or a copy of a remote file if its format is not scanned from beginning to end."""
    if not file.is_remote or format.is_scanned_in_order:
        return file
    copy = scratch.fetch(file)
    format.refuse_crashing([copy])
    return copy


def _damaged(file: InputFile, format: FileFormat, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:500].encode(errors="backslashreplace").decode()
    return InputError(f"{file.name} cannot be read as {format.name}: {reason}; is it damaged?")


VERSIONS_FOLDER = "versions"


@dataclass(frozen=True, slots=True)
class FileRange:
    """Consecutive rows of a file.

    file: its number in the job, from 0, the same in each version that added rows of it. hash, num_bytes, content: of
    its whole content in that version, which has `stop_row` rows; see `FileEntry`.
    """

    file: int
    name: str
    hash: str
    content: int
    num_bytes: int
    first_row: int
    stop_row: int


@dataclass(frozen=True, slots=True)
class InputVersion:
    """A version of the input: the one before it, and the rows added after its rows.

    before: fingerprint of the version before; None for the first. schema: the merged columns of the whole version, as
    `schema_text`. added: the rows that the version before does not have.
    """

    before: str | None
    format: str
    schema: str
    added: tuple[FileRange, ...]

    @property
    def fingerprint(self) -> str:
        """Of the content of this version, not of the files' names."""
        if self.before is None:
            what: list[object] = [self.format, [(added.hash, added.stop_row) for added in self.added]]
        else:
            runs = [(added.file, added.hash, added.first_row, added.stop_row) for added in self.added]
            what = [self.before, self.format, runs]
        return xxhash.xxh3_128_hexdigest(json.dumps(what).encode())


def save_version(cache: Folder, version: InputVersion) -> None:
    """Write a version's record unless it is there."""
    name, record = _name(version.fingerprint), json.loads(json.dumps(asdict(version)))
    if read_record(cache, name) == record:
        return
    cache.make(VERSIONS_FOLDER)
    faults.point("input_version.before_record")
    write_record(cache, name, record)
    faults.point("input_version.after_record")


def load_versions(cache: Folder, fingerprint: str) -> list[InputVersion] | None:
    """The version of this fingerprint and all before it, the first one first; None if a record is damaged."""
    found: list[InputVersion] = []
    wanted: str | None = fingerprint
    while wanted is not None:
        record = read_record(cache, _name(wanted))
        try:
            added = tuple(FileRange(**added) for added in record["added"])
            found.append(InputVersion(record["before"], record["format"], record["schema"], added))
        except (KeyError, TypeError):
            return None
        if found[-1].fingerprint != wanted:
            return None
        wanted = found[-1].before
    return found[::-1]


def versions_at_once(cache: Folder, fingerprint: str) -> list[str] | None:
    """The fingerprint of each version up to this one, as if a job had begun with it. None: not known.

    A version whose rows would then have other positions keeps its own.
    """
    versions, found, merged = load_versions(cache, fingerprint), list[str](), list[FileRange]()
    for version in versions or ():
        for added in version.added:
            if merged and (merged[-1].file, merged[-1].stop_row) == (added.file, added.first_row):
                added = replace(added, first_row=merged.pop().first_row)
            merged.append(added)
        is_in_place = all(one.first_row == 0 for one in merged)
        at_once = replace(version, before=None, added=tuple(merged)) if is_in_place else version
        found.append(at_once.fingerprint)
    return found or None


def record_path(cache: Folder, fingerprint: str) -> str:
    """The path of a version's record."""
    return str(cache.path(_name(fingerprint)))


def latest_ranges(versions: Sequence[InputVersion]) -> list[FileRange]:
    """Each file's last range, by the files' numbers. It has the hash of the latest known content."""
    latest = {added.file: added for version in versions for added in version.added}
    return [latest[file] for file in range(len(latest))]


def _name(fingerprint: str) -> str:
    return f"{VERSIONS_FOLDER}/{fingerprint}.json"


# -- comparing the files with a version ------------------------------------------------------------------------------

ScannedFile = tuple[InputFile, FileEntry]
_NAMED = 3  # files that a message names
# Unknown files are read if they are so few and so small, because files without rows are not new.
_LOOKED_AT, _LOOKED_AT_BYTES = 100, 1 << 16


@dataclass(slots=True)
class FileComparison:
    """The files of a version, by number, compared with the files that are there now.

    unchanged: perhaps renamed. grown: with rows appended. unknown: files that the version does not have. new: these
    files, scanned, if that was asked for.
    """

    unchanged: dict[int, ScannedFile] = field(default_factory=dict)
    grown: dict[int, ScannedFile] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    unknown: list[InputFile] = field(default_factory=list)
    new: list[ScannedFile] = field(default_factory=list)

    @property
    def usable(self) -> dict[int, ScannedFile]:
        """The known files that have all rows of the version."""
        return {**self.unchanged, **self.grown}


def from_cache(known: Sequence[FileRange], cache: Folder) -> dict[int, ScannedFile] | None:
    """The known files by their cache entries, without a search for others; None if one has changed.

    A remote file's copy counts as the file; the remote system is not asked.
    """
    entries = load_entries(cache)
    by_content = {(entry.hash, entry.content): (name, entry) for name, entry in entries.items()}
    found: dict[int, ScannedFile] = {}
    for number, old in enumerate(known):
        name, entry = by_content.get((old.hash, old.content), ("", None))
        if entry is None or not _is_there(name, entry) or not is_whole(entry, cache):
            return None
        found[number] = (InputFile(name, entry.path), entry)
    return found


def _is_there(name: str, entry: FileEntry) -> bool:
    if is_url(entry.path):
        return True
    try:
        return InputFile(name, entry.path).stamp() == entry.stamp
    except OSError:
        return False


def compare_files(
    known: Sequence[FileRange],
    files: Sequence[InputFile],
    format: FileFormat,
    cache: Folder,
    digests: ReadDigests,
    *,
    scans_new: bool,
) -> FileComparison:
    """Compare files with those of a version: first by name and content, then by content alone."""
    compared = FileComparison()
    names = {old.name for old in known}
    free = _scanned([file for file in files if file.name in names], format, cache, digests)
    left = _match(known, free, compared, cache, digests, by_name=True)
    unknown = [file for file in files if file.name not in names]
    if left or scans_new:
        free.update(_scanned(unknown, format, cache, digests))
        left = _match(left, free, compared, cache, digests, by_name=False)
    _save_contents(compared, cache)
    for old in left:
        scanned = free.get(old.name)
        if scanned is not None and _has_grown(old, *scanned, format, cache):
            # It may have grown by blank lines only.
            place = compared.grown if scanned[1].num_rows > old.stop_row else compared.unchanged
            place[old.file] = free.pop(old.name)
        else:
            (compared.gone if scanned is None else compared.changed).append(old.name)
    matched = {file.name for file, _ in compared.usable.values()}
    compared.unknown = [file for file in files if file.name not in matched and file.name not in compared.changed]
    if scans_new:
        compared.new = [free[file.name] for file in compared.unknown]
    elif 0 < len(compared.unknown) <= _LOOKED_AT:
        compared.unknown = [file for file in compared.unknown if not _is_empty(file, format, cache, digests)]
    return compared


def _is_empty(file: InputFile, format: FileFormat, cache: Folder, digests: ReadDigests) -> bool:
    """Whether a file surely has no rows. It counts as new once it has rows, see `next_version`."""
    try:
        if file.is_remote or file.stamp()[0] > _LOOKED_AT_BYTES:
            return False
        [entry] = scan_files([file], format, cache, digests)
    except (BatchinfError, OSError):  # such as a damaged file: only --extend has to read it
        return False
    return entry.num_rows == 0


def _scanned(
    files: Sequence[InputFile], format: FileFormat, cache: Folder, digests: ReadDigests
) -> dict[str, ScannedFile]:
    entries = scan_files(files, format, cache, digests)
    return {file.name: (file, entry) for file, entry in zip(files, entries, strict=True)}


def _match(
    known: Sequence[FileRange],
    free: dict[str, ScannedFile],
    compared: FileComparison,
    cache: Folder,
    digests: ReadDigests,
    *,
    by_name: bool,
) -> list[FileRange]:
    """Move the files that have the content of known ones from `free` to `compared`. Returns the other known ones.

    A file that was scanned again may be matched with a known one of which nothing was read, but only after all others.
    """
    names = defaultdict[str, list[str]](list)
    for name in sorted(free):
        names[free[name][1].hash].append(name)
    left = list[FileRange]()
    for old in known if by_name else sorted(known, key=lambda old: not digests.has(old.content)):
        alike = [name for name in names[old.hash] if name in free and (name == old.name or not by_name)]
        for name in sorted(alike, key=lambda name: name != old.name):
            file, entry = free[name]
            is_same = entry.content == old.content
            if not is_same and (not by_name or digests.has(old.content)):
                is_same = digests.is_same(old.content, local_copy(file, entry, cache).path)
            if is_same:
                compared.unchanged[old.file] = free.pop(name)[0], replace(entry, content=old.content)
                break
        else:
            left.append(old)
    return sorted(left, key=lambda old: old.file)


def _save_contents(compared: FileComparison, cache: Folder) -> None:
    """Store which contents were found again, so that they are not compared once more."""
    found = {file.name: entry for file, entry in compared.unchanged.values()}
    known = load_entries(cache)
    if any(name in known and known[name].content != entry.content for name, entry in found.items()):
        with locked(cache):
            save_entries(cache, {**load_entries(cache), **found})


def _has_grown(old: FileRange, file: InputFile, entry: FileEntry, format: FileFormat, cache: Folder) -> bool:
    """Whether the file begins with its whole earlier content."""
    if entry.num_bytes <= old.num_bytes or entry.num_rows < old.stop_row:
        return False
    return format.prefix(file, entry, old.num_bytes, cache) == (old.hash, old.stop_row)


def refuse_changes(compared: FileComparison, path: str, *, takes_new: bool) -> None:
    """Raise DriftError if a known file is changed or gone, or if there are new files or rows and `takes_new` is off."""
    if what := _said({"changed": compared.changed, "gone": compared.gone}):
        raise DriftError(
            f"{path} is not the input that the job in the output folder began with: {what}; restore these to continue "
            "the job, or start a new job with another output.path, where `input.exclude: {job: OLD_OUTPUT, on: "
            "prompt_hash}` leaves out the unchanged rows"
        )
    if takes_new:
        return
    grown = [file.name for file, _ in compared.grown.values()]
    if what := _said({"new": [file.name for file in compared.unknown], "longer than before": grown}):
        raise DriftError(
            f"{path} has more than the job in the output folder knows: {what}; use --extend to run the new rows too, "
            "or move the new data away"
        )


def _said(files: Mapping[str, Sequence[str]]) -> str:
    said = []
    for what, names in files.items():
        number = "1 file is" if len(names) == 1 else f"{len(names):,} files are"
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        if names:
            said.append(f"{number} {what}: {', '.join(sorted(names)[:_NAMED])}{more}")
    return "; ".join(said)


# -- new versions ----------------------------------------------------------------------------------------------------


def first_version(
    format: FileFormat, files: Sequence[InputFile], cache: Folder, digests: ReadDigests
) -> tuple[InputVersion, dict[int, ScannedFile]]:
    """The version of a new job: all files."""
    scanned = dict(enumerate(zip(files, scan_files(files, format, cache, digests), strict=True)))
    added = tuple(_added(number, *scanned[number], 0) for number in scanned)
    return InputVersion(None, format.name, _settled(scanned, format), added), scanned


def next_version(
    before: InputVersion, known: Sequence[FileRange], compared: FileComparison, format: FileFormat
) -> tuple[InputVersion, dict[int, ScannedFile]] | None:
    """A version with the additions in the order of file names, and all files by number; None if nothing is new."""
    scanned = compared.usable
    runs = [(file.name, number, known[number].stop_row) for number, (file, _) in compared.grown.items()]
    # A new file counts once it has rows.
    for new in sorted((new for new in compared.new if new[1].num_rows), key=lambda new: new[0].name):
        runs.append((new[0].name, len(scanned), 0))
        scanned[len(scanned)] = new
    if not runs:
        return None
    added = tuple(_added(number, *scanned[number], first_row) for _, number, first_row in sorted(runs))
    return InputVersion(before.fingerprint, format.name, _settled(scanned, format), added), scanned


def _added(number: int, file: InputFile, entry: FileEntry, first_row: int) -> FileRange:
    return FileRange(number, file.name, entry.hash, entry.content, entry.num_bytes, first_row, entry.num_rows)


def _settled(scanned: dict[int, ScannedFile], format: FileFormat) -> str:
    """The columns of all files together, as `schema_text`."""
    first_files = dict[str, str]()
    for _, (file, entry) in sorted(scanned.items()):
        first_files.setdefault(entry.schema, file.name)
    schemas = ((name, schema_of(schema)) for schema, name in first_files.items())
    return schema_text(settled_schema(schemas, format.mixed_types))
