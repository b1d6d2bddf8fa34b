"""The folder that keeps the results of the scan: an entry for each input file, and the artifacts that it names.

Every JSON file in it has a version and a checksum. An artifact is trusted while its size and samples of its bytes match
its entry. A damaged file counts as absent and is made again.
"""

import base64
import contextlib
import fcntl
import glob
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

import pyarrow as pa
import xxhash

from batchinf.base import faults
from batchinf.base.storage import Folder, create, decode_record, encode_record, naming
from batchinf.source.files import BLOCK_BYTES, InputFile, Stamp

CACHE_VERSION = 2
FURTHER_COLUMNS = "columns"  # an artifact: see `FileEntry`
# There may be millions of further columns, most of them with one of these types.
_SHORT_TYPES = {"n": pa.null(), "b": pa.bool_(), "i": pa.int32(), "l": pa.int64(), "d": pa.float64(), "s": pa.string()}


@dataclass(frozen=True, slots=True)
class Artifact:
    """A cache file."""

    name: str
    """In the cache folder."""
    size: int
    check: str
    """A hash over samples of its bytes."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One input file and the results of its scan."""

    path: str
    format: str
    size: int
    """Of the stamp, as `mtime_ns` and `inode`. The stamp of a remote file has other numbers."""
    mtime_ns: int
    inode: int
    hash: str
    """Covers the decompressed content. For Parquet it covers the file's size and the footer, which has sizes,
    statistics and offsets of every column chunk."""
    num_rows: int
    schema: str
    artifacts: Mapping[str, Artifact]
    """By role: `offsets` and `blanks` (int64, see `formats/lines.py`), `digests` (also there), `lines` (a
    decompressed copy), `rows` (an Arrow spool), `batches` (int64, first row of each Arrow batch, then the row count),
    `content` (a copy of a remote file), `footer` (a sparse one, see `ranges`), `columns` (those beyond the first 4,096;
    see `further_line`)."""
    num_bytes: int
    """Of the decompressed content, if the format lets rows be appended; else 0."""
    content: int
    """The number under which `ReadDigests` knows the content."""
    etag: str = ""
    """Of an object in a store of which the cache has only ranges."""
    digest: str = ""
    """Of all bytes of a Parquet file whose rows are read from a copy. Without it and without an ETag, `ReadDigests` has
    the digests of the column chunks that were read."""

    @property
    def stamp(self) -> Stamp:
        """See `InputFile.stamp`."""
        return self.size, self.mtime_ns, self.inode

    def arrow_schema(self) -> pa.Schema:
        """The columns of this file alone; a JSON column has `JSON_MARK`."""
        return schema_of(self.schema)


def schema_of(text: str) -> pa.Schema:
    """The inverse of `schema_text`."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def schema_text(schema: pa.Schema) -> str:
    """A schema as text, as entries store it."""
    return base64.b64encode(schema.serialize()).decode()


def further_columns(entry: FileEntry, names: Collection[str], cache: Folder) -> pa.Schema | None:
    """Each occurrence of these columns among those that an entry's schema leaves out; None: it leaves out none."""
    artifact = entry.artifacts.get(FURTHER_COLUMNS)
    if artifact is None:
        return None
    fields: list[pa.Field] = []
    with open(cache.path(artifact.name), encoding="utf-8") as lines:
        for stored in map(json.loads, lines):
            for name in names:
                short = stored.get(name)
                if short is not None:
                    fields += [pa.field(name, _SHORT_TYPES[short])] if short in _SHORT_TYPES else schema_of(short)
    return pa.schema(fields)


def further_line(columns: pa.Schema) -> bytes:
    """Further columns of some rows as a line of the artifact: a mapping from names to types."""
    short_of = {type: short for short, type in _SHORT_TYPES.items()}
    shorts = {field.name: short_of.get(field.type) for field in columns if not field.metadata}
    types = {field.name: shorts.get(field.name) or schema_text(pa.schema([field])) for field in columns}
    return json.dumps(types).encode() + b"\n"


def load_entries(cache: Folder) -> dict[str, FileEntry]:
    """The entries by the names of their input files."""

    entries = {}
    for name, stored in read_record(cache, "files.json").items():
        artifacts = {role: Artifact(**artifact) for role, artifact in stored["artifacts"].items()}
        entries[name] = FileEntry(**{**stored, "artifacts": artifacts})
    return entries


def save_entries(cache: Folder, entries: Mapping[str, FileEntry]) -> None:
    """Replace all entries by these."""
    write_record(cache, "files.json", {name: asdict(entry) for name, entry in entries.items()})


def read_record(cache: Folder, name: str) -> dict[str, Any]:
    """The content of a JSON file of the cache; empty if it is absent, damaged or of another version."""
    try:
        return decode_record(cache.read(name), CACHE_VERSION)
    except (OSError, ValueError):
        return {}


def write_record(cache: Folder, name: str, content: Mapping[str, object]) -> None:
    """Write a JSON file with its version and checksum, whole or not at all."""
    cache.write_atomic(name, encode_record(CACHE_VERSION, content))


@contextlib.contextmanager
def locked(cache: Folder) -> Iterator[None]:
    """Lock the cache against other processes that would fill it."""
    with open(cache.path("lock"), "ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: renames keep concurrent scans apart
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Some shared file systems lock only within one host, so temporary files of other hosts stay.
            for leftover in cache.path("").glob(f"{glob.escape(_temporary())}*"):
                leftover.unlink(missing_ok=True)
        yield


def _temporary() -> str:
    return f".tmp-{os.uname().nodename}-"


# -- artifacts -------------------------------------------------------------------------------------------------------


def is_whole(entry: FileEntry, cache: Folder) -> bool:
    """Whether all artifacts of an entry are undamaged."""
    try:
        return all(_artifact(cache, artifact.name) == artifact for artifact in entry.artifacts.values())
    except OSError:
        return False


def _artifact(cache: Folder, name: str) -> Artifact:
    """The cache file as it is now. Of a long file 16 samples: the offsets of 100 million rows are 800 MB."""
    with open(cache.path(name), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = xxhash.xxh3_64()
        num_samples, num_bytes = (16, 4096) if size > 16 * 4096 else (1, size)
        for sample in range(num_samples):
            stream.seek((size - num_bytes) * sample // 15)
            digest.update(stream.read(num_bytes))
    return Artifact(name, size, digest.hexdigest())


class Scratch:
    """The new artifacts of one input file: under temporary names until `publish`, and deleted without it."""

    def __init__(self, cache: Folder, file: InputFile, format: str) -> None:
        self._cache = cache
        self._file = file
        self._format = format
        self._stamp = file.stamp()
        self._key = xxhash.xxh3_64_hexdigest(f"{CACHE_VERSION} {format} {file.name}".encode(errors="surrogateescape"))
        self._files: dict[str, IO[bytes]] = {}
        self.etag = ""  # of an object of which only the end was fetched

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *exception: object) -> None:
        for role, stream in self._files.items():
            with contextlib.suppress(OSError):  # on a full disk, flushing the buffer fails again
                stream.close()
            self._cache.delete(self._temporary(role))

    def _temporary(self, role: str) -> str:
        return f"{_temporary()}{os.getpid()}-{self._key}.{role}"

    def create(self, role: str) -> IO[bytes]:
        """A new file for writing."""
        self._cache.delete(self._temporary(role))
        self._files[role] = create(self._cache.path(self._temporary(role)), self._cache.root)
        return self._files[role]

    def fetch(self, file: InputFile) -> InputFile:
        """Copy a remote file; the copy has the role `content`."""
        copy = self.create("content")
        with file.open() as stream:
            while block := stream.read(BLOCK_BYTES):
                copy.write(block)
        copy.flush()
        return InputFile(file.name, os.fspath(self._cache.path(self._temporary("content"))))

    def fetch_end(self, file: InputFile, end: bytes, etag: str) -> InputFile:
        """A sparse file with the size of a remote file and its last bytes; it has the role `footer`.

        etag: of the object with this end.
        """
        self.etag = etag
        copy = self.create("footer")
        copy.seek(file.stamp()[0] - len(end))
        copy.write(end)
        copy.flush()
        return InputFile(file.name, os.fspath(self._cache.path(self._temporary("footer"))))

    def drop(self, role: str) -> None:
        """Delete a new file."""
        self.etag = ""
        self._files.pop(role).close()
        self._cache.delete(self._temporary(role))

    @property
    def is_spooled(self) -> bool:
        """Whether the rows have been copied to a spool."""
        return "rows" in self._files and self._files["rows"].tell() > 0

    def entry(self, content_hash: str, num_rows: int, schema: pa.Schema, num_bytes: int = 0) -> FileEntry:
        """What the scan has found, without the artifacts, which are not published yet.

        schema: of this file alone; a JSON column has `JSON_MARK`.
        """
        size, mtime_ns, inode = self._stamp
        # The same for each process that scans the same content, and another one for content that replaces it.
        content = xxhash.xxh3_64_intdigest(json.dumps([self._file.name, self._stamp, content_hash]).encode()) >> 1
        return FileEntry(
            path=self._file.path,
            format=self._format,
            size=size,
            mtime_ns=mtime_ns,
            inode=inode,
            hash=content_hash,
            num_rows=num_rows,
            schema=schema_text(schema),
            artifacts={},
            num_bytes=num_bytes,
            content=content,
            etag=self.etag,
        )

    def publish(self, content_hash: str) -> dict[str, Artifact]:
        """Make the non-empty files durable. Their names have a hash of the input's content, so they never change.

        The copy of a remote file is not kept beside its spool.
        """
        artifacts = {}
        is_spooled = self.is_spooled
        for role, stream in self._files.items():
            if not stream.tell() or (role == "content" and is_spooled):
                continue
            with naming(self._cache.root):
                stream.flush()
                faults.point("source.before_fsync")
                os.fsync(stream.fileno())
            name = f"{self._key}.{content_hash}.{role}"
            self._cache.publish(self._temporary(role), name)
            artifacts[role] = _artifact(self._cache, name)
        return artifacts
