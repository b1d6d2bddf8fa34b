"""Scans each input file once, and keeps in the cache what was found: its rows, columns and content hash.

`versions` scans the files of a job's input, and `rows` reads rows with what was found.
"""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.source.cache import FileEntry, Scratch, is_whole, load_entries, locked, save_entries, schema_text
from batchinf.source.files import InputFile, open_input
from batchinf.source.formats.base import FileFormat
from batchinf.source.remote import UNKNOWN, RemoteFile
from batchinf.source.types import refuse_twins

SAVE_BYTES = 1 << 30  # of input: an interrupted scan of many files goes on from the last save


def scan_files(files: Sequence[InputFile], format: FileFormat, cache: Folder) -> list[FileEntry]:
    """What is in each file: from the cache where path, size and mtime are as they were, else from a scan.

    A file whose size is the same but not its path or mtime is hashed, and scanned again only if the hash differs.
    Processes may call this at once on one cache: one works, under a lock, and the others find its result.
    """
    cache.make()
    known = load_entries(cache)
    trusted = [_trusted(file, format, known.get(file.name), cache) for file in files]
    found = [entry for entry in trusted if entry is not None]
    if len(found) == len(files):
        return found
    with locked(cache):
        return _scan_alone(files, format, cache)


def _scan_alone(files: Sequence[InputFile], format: FileFormat, cache: Folder) -> list[FileEntry]:
    known = load_entries(cache)
    entries: dict[str, FileEntry] = {}
    unsaved_bytes = 0
    trusted = {file.name: _trusted(file, format, known.get(file.name), cache) for file in files}
    format.refuse_crashing([file for file in files if trusted[file.name] is None and not file.is_remote])
    for file in files:
        entry = trusted[file.name] or _unchanged(file, format, known.get(file.name), cache)
        if entry is None:
            entry = _scan(file, format, cache)
            unsaved_bytes += max(0, entry.size)
        entries[file.name] = entry
        if unsaved_bytes > SAVE_BYTES:
            save_entries(cache, {**known, **entries})
            unsaved_bytes = 0
    # Others stay: a file that is looked at alone is one of many that the job has taken in.
    save_entries(cache, {**known, **entries})
    return list(entries.values())


def _trusted(file: InputFile, format: FileFormat, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or (entry.path, entry.format) != (file.path, format.name):
        return None
    stamp = file.stamp()
    is_same = UNKNOWN not in stamp and stamp == (entry.size, entry.mtime_ns) and is_whole(entry, cache)
    return entry if is_same else None


def _unchanged(file: InputFile, format: FileFormat, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or entry.format != format.name or not is_whole(entry, cache):
        return None
    size, mtime_ns = file.stamp()
    if size != entry.size or format.content_hash(file) != entry.hash:
        return None
    return replace(entry, path=file.path, mtime_ns=mtime_ns)


def _scan(file: InputFile, format: FileFormat, cache: Folder) -> FileEntry:
    if not file.is_remote:
        open_input(file).close()
    before, stamp = _stamp_now(file), file.stamp()
    with Scratch(cache, file, format.name) as scratch:
        try:
            found = format.scan(_local(file, format, scratch), scratch)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # the system's, such as a full disk: not the file's content
                raise
            raise _damaged(file, format, error) from error
        refuse_twins(found.schema.names, file.name)
        if _stamp_now(file) != before:
            raise InputError(f"{file.name} changed while it was read; start again once it is complete")
        if {"content", "rows"} <= scratch.roles:
            scratch.drop("content")
        artifacts = scratch.publish(found.hash)
    schema = schema_text(found.schema)
    return FileEntry(file.path, format.name, *stamp, found.hash, found.num_rows, schema, artifacts, found.num_bytes)


def spooled(file: InputFile, entry: FileEntry, format: FileFormat, cache: Folder) -> FileEntry:
    """The entry of a file whose rows are read in any order: with a copy if they are slow to read one by one."""
    if not format.is_slow_by_row(entry) or not entry.num_rows:
        return entry
    with locked(cache):
        known = load_entries(cache)
        other = known.get(file.name)  # another process may have made the copy
        if other is not None and other.hash == entry.hash and not format.is_slow_by_row(other):
            return other
        with Scratch(cache, file, format.name) as scratch:
            try:
                format.spool(local_copy(file, entry, cache), scratch)
            except (ValueError, LookupError, TypeError, pa.ArrowException) as error:
                raise _damaged(file, format, error) from error
            made = scratch.publish(entry.hash)
        entry = replace(entry, artifacts={**entry.artifacts, **made})
        save_entries(cache, {**known, file.name: entry})
    return entry


def local_copy(file: InputFile, entry: FileEntry, cache: Folder) -> InputFile:
    """The cache's copy of a remote file, if the scan kept one; else the file."""
    copy = entry.artifacts.get("content")
    return file if copy is None else InputFile(file.name, str(cache.path(copy.name)))


def _stamp_now(file: InputFile) -> tuple[int, int]:
    return file.fresh_stamp() if isinstance(file, RemoteFile) else file.stamp()


def _local(file: InputFile, format: FileFormat, scratch: Scratch) -> InputFile:
    """The file, or a copy of a remote one where rows are not read from its beginning to its end."""
    if not file.is_remote or format.is_scanned_in_order:
        return file
    copy = scratch.fetch(file)
    format.refuse_crashing([copy])
    return copy


def _damaged(file: InputFile, format: FileFormat, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:500].encode(errors="backslashreplace").decode()
    return InputError(f"{file.name} cannot be read as {format.name}: {reason}; is it damaged?")
