"""The first pass over an input file, and what it leaves in the cache folder: content hash, row count, column types,
line offsets, and memory-mapped Arrow spools of whatever has no cheap access by position.

Which files there are, and how rows are read from what is found here, is `source`'s.
"""

import base64
import contextlib
import csv
import fcntl
import io
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from batchinf.errors import InputError
from batchinf.storage import Folder

VERSION = 1
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20  # a longer line is an error row: it is never held in memory
BATCH_ROWS, BATCH_BYTES = 1024, 4 << 20  # of a spool
GROUP_ROWS, GROUP_BYTES = 20_000, 64 << 20  # a Parquet row group up to this size is read directly
MAX_COLUMNS = 4096  # of JSON lines: further names stay in the rows, but are not in the schema
MAX_NESTED = 256  # fields within one column; more is kept as JSON
MAX_DEPTH = 16
JSON_MARK = {b"batchinf:json": b"1"}
CSV_ERRORS = "batchinf:error"  # the spool's last column: why a row could not be read
WHITESPACE = b" \t\r\n"  # JSON's own

Format = Literal["jsonl", "parquet", "csv", "text", "arrow"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file; `name` is what error messages call it, `path` is where it is."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Artifact:
    """A cache file: its name in the cache folder, its size, and a hash over samples of its bytes."""

    name: str
    size: int
    check: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the first pass found in one input file.

    `hash` covers the decompressed content; of Parquet, the footer (sizes, statistics and places of every column
    chunk) and the file's size. `artifacts` by role: `offsets` and `blanks` (int64, see `index_lines`), `lines` (a
    decompressed copy), `rows` (an Arrow spool), `batches` (int64, first row of each Arrow batch, then the row count).
    """

    path: str
    format: Format
    size: int
    mtime_ns: int
    hash: str
    num_rows: int
    schema: str
    artifacts: Mapping[str, Artifact]

    def arrow_schema(self) -> pa.Schema:
        """Columns as found in this file alone; a JSON column carries `JSON_MARK`."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))


def examine(files: Sequence[InputFile], format: Format, cache: Folder) -> list[FileEntry]:
    """What is in each file: from the cache where path, size and mtime are as they were, else from a first pass.

    A file whose size is the same but not its path or mtime is hashed, and read again only if the hash differs.
    Processes may call this at once on one cache: one works, under a lock, and the others find its result.
    """
    cache.make()
    known = _load(cache)
    trusted = [_trusted(file, format, known.get(file.name), cache) for file in files]
    found = [entry for entry in trusted if entry is not None]
    if len(found) == len(files):
        return found
    with locked(cache):
        return _examine_alone(files, format, cache)


def _examine_alone(files: Sequence[InputFile], format: Format, cache: Folder) -> list[FileEntry]:
    known = _load(cache)
    entries: dict[str, FileEntry] = {}
    unsaved_bytes = 0
    for file in files:
        old = known.get(file.name)
        entry = _trusted(file, format, old, cache) or _unchanged(file, format, old, cache)
        if entry is None:
            entry = _first_pass(file, format, cache)
            unsaved_bytes += entry.size
        entries[file.name] = entry
        if unsaved_bytes > 1 << 30:  # so that an interrupted first pass over many files goes on from here
            _save(cache, {**known, **entries})
            unsaved_bytes = 0
    _save(cache, entries)
    return list(entries.values())


def stamp(path: str) -> tuple[int, int]:
    """Size in bytes and mtime in nanoseconds: while both are as they were, so is the content."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _trusted(file: InputFile, format: Format, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or (entry.path, entry.format) != (file.path, format):
        return None
    is_same = stamp(file.path) == (entry.size, entry.mtime_ns) and _is_whole(entry, cache)
    return entry if is_same else None


def _unchanged(file: InputFile, format: Format, entry: FileEntry | None, cache: Folder) -> FileEntry | None:
    if entry is None or entry.format != format or not _is_whole(entry, cache):
        return None
    size, mtime_ns = stamp(file.path)
    if size != entry.size or _content_hash(file, format) != entry.hash:
        return None
    return replace(entry, path=file.path, mtime_ns=mtime_ns)


def _is_whole(entry: FileEntry, cache: Folder) -> bool:
    return all(_artifact(cache, artifact.name) == artifact for artifact in entry.artifacts.values())


def _content_hash(file: InputFile, format: Format) -> str:
    with open_input(file) as stream:
        if format == "parquet":
            return _parquet_hash(stream)
        digest = xxhash.xxh3_128()
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
        return digest.hexdigest()


# -- the cache folder ------------------------------------------------------------------------------------------------


def read_record(cache: Folder, name: str) -> dict[str, Any]:
    """The content of a JSON file of this module; empty if it is absent, torn, foreign or of another version."""
    try:
        record = json.loads(cache.read(name))
        is_ours = record["version"] == VERSION and record["checksum"] == _checksum(record["content"])
        return dict(record["content"]) if is_ours else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_record(cache: Folder, name: str, content: Mapping[str, object]) -> None:
    """Write a JSON file with its version and checksum, whole or not at all."""
    record = {"version": VERSION, "checksum": _checksum(content), "content": content}
    cache.write_atomic(name, json.dumps(record).encode())


def _checksum(content: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _load(cache: Folder) -> dict[str, FileEntry]:
    def entry(found: dict[str, Any]) -> FileEntry:
        return FileEntry(**{**found, "artifacts": {k: Artifact(**a) for k, a in found["artifacts"].items()}})

    return {name: entry(found) for name, found in read_record(cache, "files.json").items()}


def _save(cache: Folder, entries: Mapping[str, FileEntry]) -> None:
    write_record(cache, "files.json", {name: asdict(entry) for name, entry in entries.items()})


@contextlib.contextmanager
def locked(cache: Folder) -> Iterator[None]:
    """Hold the cache alone, against other processes that would fill it."""
    with open(cache.path("lock"), "ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: renames keep concurrent first passes apart
            fcntl.flock(lock, fcntl.LOCK_EX)
            cache.sweep("")
        yield


def _artifact(cache: Folder, name: str) -> Artifact | None:
    """The cache file as it is now; of a long one 16 samples, as the offsets of 100 million rows are 800 MB."""
    try:
        with open(cache.path(name), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest = xxhash.xxh3_64()
            for sample in range(16 if size > 16 * 4096 else 1):
                stream.seek((size - 4096) * sample // 15 if sample else 0)
                digest.update(stream.read(4096 if size > 16 * 4096 else -1))
    except OSError:
        return None
    return Artifact(name, size, digest.hexdigest())


class Scratch:
    """Cache files in the making: under temporary names until `publish`, removed if it is never reached."""

    def __init__(self, cache: Folder, key: str) -> None:
        self._cache, self._key = cache, key
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *exception: object) -> None:
        for role, stream in self._files.items():
            stream.close()
            self._cache.delete(self._temporary(role))

    def _temporary(self, role: str) -> str:
        return f".tmp-{os.getpid()}-{self._key}.{role}"

    def create(self, role: str) -> BinaryIO:
        """A new file for writing."""
        self._files[role] = open(self._cache.path(self._temporary(role)), "wb")  # noqa: SIM115
        return self._files[role]

    def publish(self, content_hash: str) -> dict[str, Artifact]:
        """Make the files that are not empty durable, under names with the input's hash: those never change."""
        artifacts = {}
        for role, stream in self._files.items():
            stream.flush()
            os.fsync(stream.fileno())
            name = f"{self._key}.{content_hash}.{role}"
            if stream.tell():
                self._cache.publish(self._temporary(role), name)
                artifacts[role] = _artifact(self._cache, name)
        return {role: artifact for role, artifact in artifacts.items() if artifact is not None}


def map_int64(cache: Folder, artifact: Artifact | None) -> npt.NDArray[np.int64]:
    """An int64 artifact, memory-mapped; empty if there is none."""
    if artifact is None:
        return np.zeros(0, np.int64)
    return np.memmap(cache.path(artifact.name), np.dtype("<i8"), "r")


# -- one first pass --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    hash: str
    num_rows: int
    schema: pa.Schema


def _first_pass(file: InputFile, format: Format, cache: Folder) -> FileEntry:
    open_input(file).close()
    before = stamp(file.path)
    with Scratch(cache, xxhash.xxh3_64_hexdigest(f"{VERSION} {format} {file.name}".encode())) as scratch:
        try:
            found = _PASSES[format](file, scratch)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:  # the system's, such as a full disk: not the file's content
                raise
            raise InputError(f"{file.name} cannot be read as {format}: {error}; is it damaged?") from error
        if stamp(file.path) != before:
            raise InputError(f"{file.name} changed while it was read; start again once it is complete")
        artifacts = scratch.publish(found.hash)
    _refuse_twins(file, found.schema.names)
    schema = base64.b64encode(found.schema.serialize()).decode()
    return FileEntry(file.path, format, *before, found.hash, found.num_rows, schema, artifacts)


def _refuse_twins(file: InputFile, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twin = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{file.name} has two columns named {twin!r}; rename one of them")


def open_input(file: InputFile) -> BinaryIO:
    """A file's content, decompressed if its first bytes are gzip's or zstandard's; `InputError` if unreadable."""
    try:
        stream = open(file.path, "rb")  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror}; mend its permissions or its path") from error
    kind = _compression(file)
    return stream if kind is None else pa.CompressedInputStream(stream, kind)


def _compression(file: InputFile) -> str | None:
    with open(file.path, "rb") as stream:
        head = stream.read(4)
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    return "zstd" if head == b"\x28\xb5\x2f\xfd" else None


# -- lines -----------------------------------------------------------------------------------------------------------


def parse_json_line(line: bytes) -> dict[str, object]:
    """One line of JSON lines; `ValueError` says why it is no record."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_JSON_NAMES[type(record)]}; write {{...}} on each line")
    return record


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    NoneType: "null",
}


def parse_text_line(line: bytes) -> dict[str, object]:
    """One line of text as the column `text`; `ValueError` if it is not UTF-8."""
    try:
        return {"text": line.removesuffix(b"\r").decode()}
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start + 1}"


def _pass_jsonl(file: InputFile, scratch: Scratch) -> _Found:
    types = ColumnTypes()
    content_hash, num_rows = index_lines(
        file, scratch, lambda run: types.add(_records(split_lines(run))), has_blanks=False
    )
    return _Found(content_hash, num_rows, types.schema())


def _pass_text(file: InputFile, scratch: Scratch) -> _Found:
    content_hash, num_rows = index_lines(file, scratch, lambda run: None, has_blanks=True)
    return _Found(content_hash, num_rows, pa.schema([("text", pa.string())]))


def index_lines(
    file: InputFile, scratch: Scratch, on_lines: Callable[[bytes], None], *, has_blanks: bool
) -> tuple[str, int]:
    """Hash a file of lines and write where its rows begin; returns the hash and the number of rows.

    Artifacts: `offsets`, each row's first byte and then the file's size; `blanks`, for each line that is no row the
    number of rows before it (so that a row's line number is known without a second array); `lines`, the decompressed
    copy, if the file is compressed. `on_lines` gets runs of whole lines of about `BLOCK_BYTES`.
    """
    offsets, blanks = scratch.create("offsets"), scratch.create("blanks")
    copy = scratch.create("lines") if _compression(file) else None
    digest, num_rows, size = xxhash.xxh3_128(), 0, 0

    def blocks() -> Iterator[bytes]:
        nonlocal size
        with open_input(file) as stream:
            while block := stream.read(BLOCK_BYTES):
                size += len(block)
                digest.update(block)
                if copy:
                    copy.write(block)
                yield block

    for offset, run in _whole_lines(blocks()):
        starts, is_row = _line_starts(run, has_blanks)
        offsets.write((starts[is_row] + offset).astype("<i8").tobytes())
        blanks.write((np.cumsum(is_row)[~is_row] + num_rows).astype("<i8").tobytes())
        num_rows += int(is_row.sum())
        if run is not None:
            on_lines(run)
    offsets.write(np.array([size], "<i8").tobytes())
    return digest.hexdigest(), num_rows


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Runs of whole lines with their offsets, without a byte order mark; None stands for a line that is too long."""
    offset, held, num_held, is_skipping = 0, list[bytes](), 0, False
    for block in blocks:
        if offset == num_held == 0 and block.startswith(b"\xef\xbb\xbf"):
            offset, block = 3, block[3:]
        if is_skipping:
            rest = block.find(b"\n") + 1
            offset += rest or len(block)
            block, is_skipping = (block[rest:], False) if rest else (b"", True)
        cut = block.rfind(b"\n") + 1
        if cut:
            run = b"".join((*held, block[:cut]))
            yield offset, run
            offset, held, num_held = offset + len(run), [], 0
        held.append(block[cut:])
        num_held += len(block) - cut
        if num_held > MAX_LINE_BYTES:
            yield offset, None
            offset, held, num_held, is_skipping = offset + num_held, [], 0, True
    if num_held:
        yield offset, b"".join(held)


def _line_starts(run: bytes | None, has_blanks: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where the lines of a run begin, and which of them are rows."""
    if run is None:
        return np.zeros(1, np.int64), np.ones(1, np.bool_)
    data = np.frombuffer(run, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1 if run.endswith(b"\n") else ends + 1))
    is_row = np.ones(len(starts), np.bool_)
    if not has_blanks:
        first = data[starts]
        is_row &= first != ord("\n")
        for line in np.flatnonzero((first == ord("\r")) | (first == ord(" ")) | (first == ord("\t"))):
            end = ends[line] if line < len(ends) else len(run)
            is_row[line] = bool(run[starts[line] : end].strip(WHITESPACE))
    return starts, is_row


def split_lines(run: bytes) -> list[bytes]:
    """The lines of a run that are not blank, without their ends."""
    return [line for line in run.split(b"\n") if line.strip(WHITESPACE)]


def _records(lines: Sequence[bytes]) -> list[dict[str, object]]:
    """The records among the lines; broken lines are left out."""
    if len(lines) > 1:
        try:  # many lines in one call: three times as fast as one for each
            records = json.loads(f"[{b','.join(lines).decode()}]")
            if len(records) == len(lines) and set(map(type, records)) == {dict}:
                return cast("list[dict[str, object]]", records)
        except (ValueError, RecursionError):
            pass
        middle = len(lines) // 2
        return _records(lines[:middle]) + _records(lines[middle:])
    with contextlib.suppress(ValueError):
        return [parse_json_line(line) for line in lines]
    return []


# -- column types ----------------------------------------------------------------------------------------------------


class ColumnTypes:
    """The Arrow types of JSON values, settled as runs of records go by. A mixed column is JSON, and stays so."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType | None] = {}

    def add(self, records: Iterable[Mapping[str, object]]) -> None:
        """Settle one run of records with those before."""
        for name, values in _by_name(records).items():
            if name not in self._types and (len(self._types) >= MAX_COLUMNS or not _is_utf8(name)):
                continue
            known = self._types.get(name, pa.null())
            settled = None if known is None else merge_types(known, _settle(values))
            self._types[name] = None if settled is None or _num_fields(settled) > MAX_NESTED else settled

    def schema(self) -> pa.Schema:
        """The columns in the order in which they were met."""
        return pa.schema([json_field(name) if t is None else pa.field(name, t) for name, t in self._types.items()])


def _by_name(records: Iterable[Mapping[str, object]]) -> Mapping[str, list[object]]:
    columns: defaultdict[str, list[object]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            columns[name].append(value)
    return columns


def json_field(name: str) -> pa.Field:
    """A column that holds any JSON value as its text."""
    return pa.field(name, pa.string(), metadata=JSON_MARK)


def is_json(field: pa.Field) -> bool:
    """Whether a column holds JSON values as their text."""
    return (field.metadata or {}).get(b"batchinf:json") == b"1"


def merge_types(a: pa.DataType, b: pa.DataType | None) -> pa.DataType | None:
    """The type that both fit in (null in anything, int64 in float64, fields in a struct), or None."""
    if b is None or a.equals(b):
        return b
    schemas = [pa.schema([("", a)]), pa.schema([("", b)])]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _num_fields(type: pa.DataType) -> int:
    return 1 + sum(_num_fields(type.field(i).type) for i in range(type.num_fields))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _settle(values: Iterable[object], depth: int = 0) -> pa.DataType | None:
    """The one type of all these JSON values, or None if there is none that keeps them as they are."""
    present: list[Any] = [value for value in values if value is not None]
    kinds = set(map(type, present))
    if kinds <= {int, float} and kinds:
        integers = present if kinds == {int} else [value for value in present if type(value) is int]
        is_wide = bool(integers) and (min(integers) < -(2**63) or max(integers) >= 2**63)
        return None if is_wide else pa.int64() if kinds == {int} else pa.float64()
    if len(kinds) > 1 or depth > MAX_DEPTH:
        return None
    if kinds == {dict}:
        return _settle_struct(present, depth)
    if kinds == {list}:
        item = _settle(itertools.chain.from_iterable(present), depth + 1)
        return None if item is None else pa.list_(item)
    return pa.string() if kinds == {str} else pa.bool_() if kinds == {bool} else pa.null()


def _settle_struct(records: Sequence[Mapping[str, object]], depth: int) -> pa.DataType | None:
    columns = _by_name(records)
    if len(columns) > MAX_NESTED or not all(map(_is_utf8, columns)):
        return None
    fields = []
    for name, values in columns.items():
        if (settled := _settle(values, depth + 1)) is None:
            return None
        fields.append(pa.field(name, settled))
    return pa.struct(fields)


# -- Arrow spools ----------------------------------------------------------------------------------------------------


class _Spool:
    """An Arrow IPC file of small batches, with the first row of each batch beside it."""

    def __init__(self, scratch: Scratch, schema: pa.Schema) -> None:
        self._batches = scratch.create("batches")
        self._schema = schema
        self._writer = pa.ipc.new_file(scratch.create("rows"), schema)
        self.num_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows; their columns may be dictionaries of the schema's types."""
        step = min(BATCH_ROWS, max(1, 4 * BATCH_BYTES // _longest_dictionary_value(batch)))
        for start in range(0, batch.num_rows, step):
            for small in _halves(cast_batch(batch.slice(start, step), self._schema)):
                self._batches.write(self.num_rows.to_bytes(8, "little"))
                self._writer.write_batch(small)
                self.num_rows += small.num_rows

    def close(self) -> None:
        self._batches.write(self.num_rows.to_bytes(8, "little"))
        self._writer.close()


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= 1 or batch.nbytes <= BATCH_BYTES:
        yield batch
    else:
        middle = batch.num_rows // 2
        yield from _halves(batch.slice(0, middle))
        yield from _halves(batch.slice(middle))


def _longest_dictionary_value(batch: pa.RecordBatch) -> int:
    """In bytes: what a few bytes of indices may grow to when the column is decoded."""
    longest = 1
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _is_bytes(column.type.value_type):
            longest = max(longest, pc.max(pc.binary_length(column.dictionary)).as_py() or 1)
    return longest


def _is_bytes(type: pa.DataType) -> bool:
    return any(is_type(type) for is_type in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string))


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The same rows in the types of `schema`, column by column."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type, safe=False)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The columns as they are handed out: no dictionaries, views or extension types, and no metadata."""
    return pa.schema([pa.field(field.name, plain(field.type)) for field in schema])


def plain(type: pa.DataType) -> pa.DataType:
    """The type as it is handed out."""
    if isinstance(type, pa.DictionaryType):
        return plain(type.value_type)
    if isinstance(type, pa.BaseExtensionType):
        return plain(type.storage_type)
    if isinstance(type, pa.ListType):
        return pa.list_(plain(type.value_type))
    if isinstance(type, pa.LargeListType):
        return pa.large_list(plain(type.value_type))
    if isinstance(type, pa.StructType):
        return pa.struct([pa.field(field.name, plain(field.type)) for field in type])
    return {pa.null(): pa.string(), pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(type, type)


def _parquet_hash(stream: BinaryIO) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - 8))
    footer_bytes = int.from_bytes(stream.read(8)[:4], "little")
    stream.seek(max(0, size - 8 - footer_bytes))
    digest = xxhash.xxh3_128(stream.read(footer_bytes))
    digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


def repeated_columns(metadata: pq.FileMetaData) -> list[str]:
    """Byte columns that are stored as few values many times: read as dictionaries, or 1 MB of them becomes 20 GB."""
    if metadata.num_row_groups == 0:
        return []
    group = metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    return [
        chunk.path_in_schema
        for chunk in chunks
        if chunk.has_dictionary_page
        and chunk.physical_type == "BYTE_ARRAY"
        and chunk.total_uncompressed_size < (2 << 20) + 16 * chunk.num_values  # a dictionary has up to 1 MiB
        and "." not in chunk.path_in_schema
    ]


def _pass_parquet(file: InputFile, scratch: Scratch) -> _Found:
    metadata = pq.read_metadata(file.path)
    with open_input(file) as stream:
        content_hash = _parquet_hash(stream)
    schema = plain_schema(metadata.schema.to_arrow_schema())
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    if any(group.num_rows > GROUP_ROWS or group.total_byte_size > GROUP_BYTES for group in groups):
        row_bytes = max(group.total_byte_size // max(1, group.num_rows) for group in groups)
        batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))
        _spool_parquet(file, scratch, schema, repeated_columns(metadata), batch_rows)
    return _Found(content_hash, metadata.num_rows, schema)


def _spool_parquet(file: InputFile, scratch: Scratch, schema: pa.Schema, repeated: list[str], batch_rows: int) -> None:
    # A buffered stream without pre-buffering reads a row group page by page: 24 MiB for a group of 1 million rows and
    # 208 MB, where the defaults take 190 MiB before the first row, and a memory map leaves as much resident.
    spool = _Spool(scratch, schema)
    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=BLOCK_BYTES, read_dictionary=repeated) as parquet:
        for batch in parquet.iter_batches(batch_size=batch_rows, use_threads=False):
            spool.write(batch)
    spool.close()


def _pass_arrow(file: InputFile, scratch: Scratch) -> _Found:
    content_hash = _content_hash(file, "arrow")
    with pa.memory_map(file.path) as mapped:
        try:
            reader = pa.ipc.open_file(mapped)
        except pa.ArrowInvalid:
            stream = pa.ipc.open_stream(mapped)
            return _spool_arrow(stream, stream.schema, content_hash, scratch)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        if not _is_mapped(reader, mapped):  # compressed: each batch would be decompressed whole for any of its rows
            return _spool_arrow(batches, reader.schema, content_hash, scratch)
        firsts = np.cumsum([0, *(batch.num_rows for batch in batches)]).astype("<i8")
        scratch.create("batches").write(firsts.tobytes())
        return _Found(content_hash, int(firsts[-1]), plain_schema(reader.schema))


def _spool_arrow(batches: Iterable[pa.RecordBatch], schema: pa.Schema, content_hash: str, scratch: Scratch) -> _Found:
    spool = _Spool(scratch, plain_schema(schema))
    for batch in batches:
        spool.write(batch)
    spool.close()
    return _Found(content_hash, spool.num_rows, plain_schema(schema))


def _is_mapped(reader: pa.RecordBatchFileReader, mapped: pa.MemoryMappedFile) -> bool:
    """Whether the first batch with rows lies in the file's memory map as it is."""
    mapped.seek(0)
    whole = mapped.read_buffer()
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    batch = next((batch for batch in batches if batch.num_rows), None)
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer] if batch else []
    return all(whole.address <= b.address <= whole.address + whole.size for b in buffers if b.size)


# -- CSV -------------------------------------------------------------------------------------------------------------

_INTEGER = r"^(0|-?[1-9][0-9]*)$"  # what str(int(v)) gives back: not 007, which is no number but a code
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_EXACT_DIGITS = 15  # of an integer that float64 holds exactly, whatever they are


class _CsvTypes:
    """The types of CSV columns: int64 or float64 if each value that is not empty is one, exactly; else string."""

    def __init__(self, names: Sequence[str]) -> None:
        self._kinds: dict[str, set[str]] = {name: set() for name in names}

    def add(self, columns: Mapping[str, pa.StringArray]) -> None:
        for name, column in columns.items():
            if "string" not in self._kinds[name]:
                self._kinds[name] |= _csv_kinds(column.filter(pc.not_equal(column, "")))

    def schema(self) -> pa.Schema:
        return pa.schema([(name, _csv_type(kinds)) for name, kinds in self._kinds.items()])


def _csv_kinds(values: pa.StringArray) -> set[str]:
    if len(values) == 0:
        return set()
    is_integer = pc.match_substring_regex(values, _INTEGER)
    integers = values.filter(is_integer)
    kinds = {"integer"} if len(integers) else set()
    if len(integers) and pc.max(pc.binary_length(integers)).as_py() > _EXACT_DIGITS:
        kinds.add("long integer")
        try:
            integers.cast(pa.int64())
        except pa.ArrowInvalid:
            return {"string"}
    if len(integers) < len(values):
        kinds.add("number" if pc.all(pc.match_substring_regex(values, _NUMBER)).as_py() else "string")
    return kinds


def _csv_type(kinds: set[str]) -> pa.DataType:
    if not kinds:
        return pa.null()
    if kinds <= {"integer", "long integer"}:
        return pa.int64()
    return pa.float64() if kinds <= {"integer", "number"} else pa.string()


class _Hashed(io.RawIOBase):
    """A stream that hashes what is read through it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read(len(buffer))
        self.digest.update(block)
        buffer[: len(block)] = block
        return len(block)


class _CsvRows:
    """The rows of a CSV file: its fields as strings, or one string that says what is wrong with the row."""

    def __init__(self, file: InputFile, stream: io.RawIOBase) -> None:
        csv.field_size_limit(MAX_LINE_BYTES)
        self._text = io.TextIOWrapper(
            io.BufferedReader(stream, BLOCK_BYTES), "utf-8-sig", "surrogateescape", newline=""
        )
        self._reader = csv.reader(self._lines(), strict=True)
        self.num_chars, self._is_utf8 = 0, True
        try:
            self.header = next((row for row in self._reader if row), [])
        except csv.Error as error:
            raise InputError(f"{file.name}: its header is not CSV: {error}") from None
        if not self._is_utf8:
            raise InputError(f"{file.name}: its header is not UTF-8; save the file as UTF-8")
        _refuse_twins(file, self.header)

    def _lines(self) -> Iterator[str]:
        for line in iter(lambda: self._text.readline(MAX_LINE_BYTES), ""):
            self.num_chars += len(line)
            self._is_utf8 &= line.isascii() or _is_utf8(line)  # bytes that are not come as lone surrogates
            yield line

    def __iter__(self) -> Iterator[list[str] | str]:
        width = len(self.header)
        while True:
            line = self._reader.line_num + 1
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._is_utf8 = True
                yield f"line {line}: not CSV: {error}"
                continue
            if not self._is_utf8:
                self._is_utf8 = True
                yield f"line {line}: not UTF-8"
            elif len(row) == width:
                yield row
            elif row:
                yield f"line {line}: {len(row)} fields where the header has {width}"


def _pass_csv(file: InputFile, scratch: Scratch) -> _Found:
    with open_input(file) as stream:
        hashed = _Hashed(stream)
        rows = _CsvRows(file, hashed)
        types = _CsvTypes(rows.header)
        spool = _Spool(scratch, pa.schema([(name, pa.string()) for name in (*rows.header, CSV_ERRORS)]))
        for batch in _csv_batches(rows):
            spool.write(batch)
            types.add(dict(zip(rows.header, batch.columns[:-1], strict=True)))
        spool.close()
    return _Found(hashed.digest.hexdigest(), spool.num_rows, types.schema())


def _csv_batches(rows: _CsvRows) -> Iterator[pa.RecordBatch]:
    held: list[list[str] | str] = []
    num_chars = rows.num_chars
    for row in rows:
        held.append(row)
        if len(held) == BATCH_ROWS or rows.num_chars - num_chars > BATCH_BYTES:
            yield _csv_batch(held, rows.header)
            held, num_chars = [], rows.num_chars
    if held:
        yield _csv_batch(held, rows.header)


def _csv_batch(rows: Sequence[list[str] | str], header: Sequence[str]) -> pa.RecordBatch:
    nothing = [None] * len(header)
    fields = zip(*(nothing if isinstance(row, str) else row for row in rows), strict=True)
    errors = [row if isinstance(row, str) else None for row in rows]
    columns = [pa.array(values, pa.string()) for values in (*fields, errors)]
    return pa.RecordBatch.from_arrays(columns, names=[*header, CSV_ERRORS])


_PASSES: dict[Format, Callable[[InputFile, Scratch], _Found]] = {
    "jsonl": _pass_jsonl,
    "text": _pass_text,
    "csv": _pass_csv,
    "parquet": _pass_parquet,
    "arrow": _pass_arrow,
}
