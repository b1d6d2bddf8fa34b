"""Scans input files: finds the rows, columns and content hash of each, and keeps them in the cache of the source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from batchinf.base.errors import InputError
from batchinf.base.paths import LARGE_BYTES
from batchinf.base.storage import Folder
from batchinf.base.text import counted, size_text
from batchinf.source.cache import FileEntry, Scratch, is_whole, load_entries, locked, save_entries
from batchinf.source.digests import ReadDigests
from batchinf.source.files import InputFile, content_hash, open_bytes, refuse_pointers
from batchinf.source.formats.base import FileFormat, SourceFile
from batchinf.source.ranges import footer_of
from batchinf.source.remote import UNKNOWN
from batchinf.source.types import refuse_twins

SAVE_BYTES = 1 << 30  # of input: an interrupted scan of many files resumes from the last save


@dataclass(frozen=True, slots=True)
class Scanner:
    """Scans the files of one input."""

    format: FileFormat
    cache: Folder
    digests: ReadDigests
    """Of ranges that were read, for formats whose hash does not cover all bytes."""
    say: Callable[[str], None]
    """Shows a line before a large copy."""

    def scan(self, files: Sequence[InputFile]) -> list[SourceFile]:
        """The files with their entries: from the cache if path, size, mtime and inode are unchanged, else from a scan.

        If the size is the same, the file's content is compared first, and scanned only if it differs. Several processes
        may call this with one cache: one works under a lock, and the others find its result.
        """
        self.cache.make()
        known = load_entries(self.cache)
        entries = [entry for file in files if (entry := self._trusted(file, known.get(file.name))) is not None]
        if len(entries) < len(files):
            with locked(self.cache):
                entries = self._scan_alone(files)
        return [self._scanned(file, entry) for file, entry in zip(files, entries, strict=True)]

    def _scanned(self, file: InputFile, entry: FileEntry) -> SourceFile:
        return SourceFile(file, entry, self.cache, self.digests)

    def _scan_alone(self, files: Sequence[InputFile]) -> list[FileEntry]:
        known = load_entries(self.cache)
        entries: dict[str, FileEntry] = {}
        unsaved_bytes = 0
        trusted = {file.name: self._trusted(file, known.get(file.name)) for file in files}
        self.format.refuse_crashing([file for file in files if trusted[file.name] is None and not file.is_remote])
        self._say_copies([file for file in files if trusted[file.name] is None and not self._is_ranged(file)])
        for file in files:
            entry = trusted[file.name] or self._unchanged(file, known.get(file.name))
            if entry is None:
                entry = self.scan_one(file)
                unsaved_bytes += max(0, entry.size)
            entries[file.name] = entry
            if unsaved_bytes > SAVE_BYTES:
                save_entries(self.cache, {**known, **entries})
                unsaved_bytes = 0
        # Other entries stay: `files` may be only some of the job's files.
        save_entries(self.cache, {**known, **entries})
        return list(entries.values())

    def _trusted(self, file: InputFile, entry: FileEntry | None) -> FileEntry | None:
        """The entry if the file's stamp is unchanged."""
        if entry is None or (entry.path, entry.format) != (file.path, self.format.key):
            return None
        stamp = file.stamp()
        is_same = UNKNOWN not in stamp and stamp == entry.stamp and is_whole(entry, self.cache)
        return entry if is_same else None

    def _unchanged(self, file: InputFile, entry: FileEntry | None) -> FileEntry | None:
        """The entry with the file's stamp, if its content is unchanged."""
        if entry is None or entry.format != self.format.key or not is_whole(entry, self.cache):
            return None
        if not (self.format.hashes_all or entry.digest or self.digests.has(entry.content)):
            return None  # nothing of it was read, so it may be any file
        size, mtime_ns, inode = stamp = file.settled_stamp()
        if size != entry.size or not self.format.is_same(self._scanned(file, entry)) or file.settled_stamp() != stamp:
            return None
        return replace(entry, path=file.path, mtime_ns=mtime_ns, inode=inode)

    def scan_one(self, file: InputFile) -> FileEntry:
        """Scan a file. Raises InputError if it is damaged or changes meanwhile."""
        if not file.is_remote:
            open_bytes(file).close()
        before = file.settled_stamp()
        with Scratch(self.cache, file, self.format.key) as scratch:
            try:
                local = self._local(file, scratch)
                entry = self.format.scan(local, scratch)
                is_copied = (local is not file and not scratch.etag) or scratch.is_spooled
                digest = content_hash(local) if is_copied and not self.format.hashes_all else ""
            except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
                if getattr(error, "errno", None) is not None:  # the system: a full disk or the like
                    raise
                raise self._damaged(file, error) from error
            refuse_twins(entry.arrow_schema().names, file.name)
            if file.settled_stamp() != before:
                raise InputError(f"{file.name} changed while it was read; start again once it is complete")
            return replace(entry, artifacts=scratch.publish(digest or entry.hash), digest=digest)

    def _local(self, file: InputFile, scratch: Scratch) -> InputFile:
        """The file, or a copy of a remote file if its format is not scanned from beginning to end.

        The copy is sparse if the store gives ranges of the file and the format needs only some of them.
        """
        if not file.is_remote or self.format.is_scanned_in_order:
            return file
        end = footer_of(file) if self._is_ranged(file) else None
        if end is not None:
            copy = scratch.fetch_end(file, end.data, end.etag)
            self.format.refuse_crashing([copy])
            if self.format.has_quick_rows(copy):
                return copy
            scratch.drop("footer")
        if self._is_ranged(file):
            self._say_copies([file])
        copy = scratch.fetch(file)
        refuse_pointers([copy])
        self.format.refuse_crashing([copy])
        return copy

    def _is_ranged(self, file: InputFile) -> bool:
        """Whether a store gives ranges of this file, and the format may need only some of them."""
        return bool(file.object_etag) and self.format.is_read_by_ranges

    def _say_copies(self, files: Sequence[InputFile]) -> None:
        """Say how much is about to be copied whole, if that may take long."""
        sizes = [max(0, file.stamp()[0]) for file in files if file.is_remote]
        if sum(sizes) >= LARGE_BYTES:
            self.say(
                f"copying {counted(len(sizes), 'file')} of the input, {size_text(sum(sizes))}, from "
                f"{files[0].path.rpartition('/')[0]}/ to {self.cache.root}"
            )

    def _damaged(self, file: InputFile, error: Exception) -> InputError:
        reason = " ".join(str(error).split())[:500].encode(errors="backslashreplace").decode()
        return InputError(f"{file.name} cannot be read as {self.format.name}: {reason}; is it damaged?")
