"""What is in each input file: from the cache where the file is as it was, else from a first pass, kept in the cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.source.cache import (
    FileEntry,
    FileFindings,
    Scratch,
    is_whole,
    load_entries,
    locked,
    save_entries,
    schema_text,
)
from batchinf.source.damage import probe_footers
from batchinf.source.files import Format, InputFile, content_hash, open_input
from batchinf.source.formats.arrow import pass_arrow
from batchinf.source.formats.csv import pass_csv
from batchinf.source.formats.lines import pass_jsonl, pass_text
from batchinf.source.formats.parquet import parquet_hash, pass_parquet, spool_parquet
from batchinf.source.remote import UNKNOWN, RemoteFile
from batchinf.source.types import refuse_twins

SAVE_BYTES = 1 << 30  # of input: an interrupted first pass over many files goes on from the last save

_PASSES: dict[Format, Callable[[InputFile, Scratch], FileFindings]] = {
    "jsonl": pass_jsonl,
    "text": pass_text,
    "csv": pass_csv,
    "parquet": pass_parquet,
    "arrow": pass_arrow,
}


def examine(files: Sequence[InputFile], format: Format, cache: Folder) -> list[FileEntry]:
    """What is in each file: from the cache where path, size and mtime are as they were, else from a first pass.

    A file whose size is the same but not its path or mtime is hashed, and read again only if the hash differs.
    Processes may call this at once on one cache: one works, under a lock, and the others find its result.
    """
    cache.make()
    known = load_entries(cache)
    trusted = [_trusted(file, format, known.get(file.name), cache) for file in files]
    found = [entry for entry in trusted if entry is not None]
    if len(found) == len(files):
        return found
    with locked(cache):
        return _examine_alone(files, format, cache)


def _examine_alone(files: Sequence[InputFile], format: Format, cache: Folder) -> list[FileEntry]:
    known = load_entries(cache)
    entries: dict[str, FileEntry] = {}
    unsaved_bytes = 0
    if format == "parquet":
        local = [file for file in files if not file.is_remote]
        probe_footers([file for file in local if _trusted(file, format, known.get(file.name), cache) is None])
    for file in files:
        old = known.get(file.name)
        entry = _trusted(file, format, old, cache) or _unchanged(file, format, old, cache)
        if entry is None:
            entry = _first_pass(file, format, cache)
            unsaved_bytes += max(0, entry.size)
        entries[file.name] = entry
        if unsaved_bytes > SAVE_BYTES:
            save_entries(cache, {**known, **entries})
            unsaved_bytes = 0
    # Others stay: a file that is looked at alone is one of many that the job has taken in.
    save_entries(cache, {**known, **entries})
    return list(entries.values())


def _trusted(file: InputFile, format: Format, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or (entry.path, entry.format) != (file.path, format):
        return None
    stamp = file.stamp()
    is_same = UNKNOWN not in stamp and stamp == (entry.size, entry.mtime_ns) and is_whole(entry, cache)
    return entry if is_same else None


def _unchanged(file: InputFile, format: Format, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or entry.format != format or not is_whole(entry, cache):
        return None
    if file.is_remote and format == "parquet":  # its footer costs as many requests as the whole
        return None
    size, mtime_ns = file.stamp()
    if size != entry.size or _hash(file, format) != entry.hash:
        return None
    return replace(entry, path=file.path, mtime_ns=mtime_ns)


def _hash(file: InputFile, format: Format) -> str:
    return parquet_hash(file) if format == "parquet" else content_hash(file)


def _first_pass(file: InputFile, format: Format, cache: Folder) -> FileEntry:
    if not file.is_remote:
        open_input(file).close()
    before, stamp = _now(file), file.stamp()
    with Scratch(cache, file, format) as scratch:
        try:
            found = _PASSES[format](_local(file, format, scratch), scratch)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # the system's, such as a full disk: not the file's content
                raise
            raise InputError(f"{file.name} cannot be read as {format}: {_words(error)}; is it damaged?") from error
        refuse_twins(found.schema.names, file.name)
        if _now(file) != before:
            raise InputError(f"{file.name} changed while it was read; start again once it is complete")
        if {"content", "rows"} <= scratch.roles:
            scratch.drop("content")
        artifacts = scratch.publish(found.hash)
    schema = schema_text(found.schema)
    return FileEntry(file.path, format, *stamp, found.hash, found.num_rows, schema, artifacts, found.num_bytes)


def spooled(file: InputFile, entry: FileEntry, cache: Folder) -> FileEntry:
    """The entry with a copy of a Parquet file whose rows can be read in any order, which row groups cannot."""
    if entry.format != "parquet" or "rows" in entry.artifacts or not entry.num_rows:
        return entry
    with locked(cache):
        known = load_entries(cache)
        if "rows" in known.get(file.name, entry).artifacts and known[file.name].hash == entry.hash:
            return known[file.name]
        copy = entry.artifacts.get("content")
        source = file if copy is None else InputFile(file.name, str(cache.path(copy.name)))
        with Scratch(cache, file, "parquet") as scratch:
            try:
                spool_parquet(source, scratch)
            except (ValueError, LookupError, TypeError, pa.ArrowException) as error:
                raise InputError(f"{file.name} cannot be read as parquet: {_words(error)}; is it damaged?") from error
            made = scratch.publish(entry.hash)
        entry = replace(entry, artifacts={**entry.artifacts, **made})
        save_entries(cache, {**known, file.name: entry})
    return entry


def _now(file: InputFile) -> tuple[int, int]:
    return file.fresh_stamp() if isinstance(file, RemoteFile) else file.stamp()


def _local(file: InputFile, format: Format, scratch: Scratch) -> InputFile:
    """The file, or a copy of a remote one where rows are not read from its beginning to its end."""
    if not file.is_remote or format not in ("parquet", "arrow"):
        return file
    copy = scratch.fetch(file)
    if format == "parquet":
        probe_footers([copy])
    return copy


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:500].encode(errors="backslashreplace").decode()
