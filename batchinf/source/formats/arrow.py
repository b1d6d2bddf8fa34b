"""Memory-mapped Arrow files: inputs, and spools, which are copies of inputs with slow access to single rows.

Artifacts: `rows`, the spool, an Arrow IPC file of small batches; `batches`, the first row of each batch of the spool
(or of the input itself) and then the number of rows.
"""

import contextlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.digests import Watch
from batchinf.source.files import InputFile, content_hash
from batchinf.source.formats.base import (
    ColumnarReader,
    FileFormat,
    Reader,
    SourceFile,
    check_num_rows,
    checked,
    spans,
)
from batchinf.source.types import MixedTypes, cast_column, plain_schema

BATCH_ROWS = 1024  # of a spool
BATCH_BYTES = 4 << 20
MAPPED_BYTES = 16 << 20  # read from a map before its pages are released
_MAGIC = b"ARROW1"
_FAULT_BYTES = 64 << 10  # that Linux maps at the first touch of a page

_BYTES = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


class Arrow(FileFormat):
    """Arrow IPC files and streams, including Feather version 2. Files of one input must have the same types."""

    name = "arrow"
    endings = (".arrow", ".feather", ".ipc")
    mixed_types = MixedTypes.REFUSED
    is_scanned_in_order = False

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        """See `FileFormat`. Streams, and files whose batches are compressed, are spooled."""
        digest = content_hash(file)
        with pa.memory_map(file.path) as mapped:
            try:
                reader = pa.ipc.open_file(mapped)
            except pa.ArrowInvalid:
                stream = pa.ipc.open_stream(mapped)
                schema = plain_schema(stream.schema)
                num_rows = spool(stream, schema, scratch)
                if mapped.tell() < mapped.size():
                    raise InputError(
                        f"{file.name}: more bytes follow the end of its Arrow stream; write one stream"
                    ) from None
                return scratch.entry(digest, num_rows, schema)
            if not _is_one_file(mapped):
                raise InputError(f"{file.name}: several Arrow files follow each other in it; write one file")
            schema = plain_schema(reader.schema)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            if not _is_mapped(reader, mapped):  # compressed: one row would cost its whole batch
                return scratch.entry(digest, spool(batches, schema, scratch), schema)
            counts = [checked(batch).num_rows for batch in batches]
            check_num_rows(file.name, sum(counts), counts)
            firsts = np.cumsum([0, *counts]).astype("<i8")
            scratch.create("batches").write(firsts.tobytes())
            return scratch.entry(digest, int(firsts[-1]), schema)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        with pa.memory_map(file.path) as mapped:
            try:
                return [dict.fromkeys(pa.ipc.open_file(mapped).schema.names)]
            except pa.ArrowInvalid:
                return [dict.fromkeys(pa.ipc.open_stream(mapped).schema.names)]

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        return ArrowReader(source_file)


def _is_one_file(mapped: pa.MemoryMappedFile) -> bool:
    """Whether the stream within an Arrow file ends at its footer. The last footer of joined files names wrong rows."""
    tail = len(_MAGIC) + 4  # which follow the footer: its length and the magic bytes
    mapped.seek(mapped.size() - tail)
    footer = mapped.size() - tail - int.from_bytes(mapped.read(4), "little")
    mapped.seek(len(_MAGIC) + 2)
    # Polars embeds no stream, and files of Arrow before 0.15 end theirs without a mark.
    with contextlib.suppress(OSError):
        for _ in pa.ipc.MessageReader.open_stream(mapped):
            pass
        return bool(mapped.tell() >= footer)
    return True


def _is_mapped(reader: pa.RecordBatchFileReader, mapped: pa.MemoryMappedFile) -> bool:
    """Whether the first batch with rows points into the file's memory map, so is not compressed."""
    mapped.seek(0)
    whole = mapped.read_buffer()
    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    batch = next((batch for batch in batches if batch.num_rows), None)
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer] if batch else []
    return all(whole.address <= b.address <= whole.address + whole.size for b in buffers if b.size)


# -- spools ----------------------------------------------------------------------------------------------------------


def spool(batches: Iterable[pa.RecordBatch], schema: pa.Schema, scratch: Scratch) -> int:
    """Write the artifacts and return the number of rows. Columns may be dictionaries of the schema's types."""
    firsts = scratch.create("batches")
    num_rows = 0
    with pa.ipc.new_file(scratch.create("rows"), schema) as writer:
        for batch in _small_batches(batches, schema):
            firsts.write(num_rows.to_bytes(8, "little"))
            writer.write_batch(batch)
            num_rows += batch.num_rows
    firsts.write(num_rows.to_bytes(8, "little"))
    return num_rows


def _small_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in map(checked, batches):
        step = min(BATCH_ROWS, max(1, 4 * BATCH_BYTES // _longest_dictionary_value(batch)))
        for start in range(0, batch.num_rows, step):
            columns = zip(batch.slice(start, step).columns, schema, strict=True)
            arrays = [cast_column(column, field.type) for column, field in columns]
            yield from _halves(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _longest_dictionary_value(batch: pa.RecordBatch) -> int:
    """In bytes: decoding replaces each index by such a value."""
    encoded = [column for column in batch.columns if pa.types.is_dictionary(column.type)]
    dictionaries = [column.dictionary for column in encoded if column.type.value_type in _BYTES]
    return max([1, *(pc.max(pc.binary_length(values)).as_py() or 1 for values in dictionaries)])


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= 1 or batch.nbytes <= BATCH_BYTES:
        yield batch
    else:
        middle = batch.num_rows // 2
        yield from _halves(batch.slice(0, middle))
        yield from _halves(batch.slice(middle))


# -- reading ---------------------------------------------------------------------------------------------------------


def copied(table: pa.Table) -> pa.Table:
    """A table in memory, without references to a memory map."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


class ArrowReader(ColumnarReader):
    """A memory-mapped Arrow file: the input itself or its spool."""

    def __init__(self, source_file: SourceFile) -> None:
        file = source_file.file
        entry = source_file.entry
        super().__init__(entry.arrow_schema())
        self._name = file.name
        rows = source_file.artifact("rows")
        self._firsts = source_file.numbers("batches")
        self._watch: Watch | None = None
        if rows is None and file.path == entry.path:
            self._watch = source_file.digests.watch(entry.content)
            self._watch.check()
        with open(rows or file.path, "rb") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._reader = pa.ipc.open_file(pa.py_buffer(self._mapped))
        self._num_touched_bytes = 0

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        if self._watch is None:
            return self._mapped_slice(start, stop, columns)
        return self._watch.read(lambda: copied(self._mapped_slice(start, stop, columns)))

    def _mapped_slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        schema = pa.schema([self._reader.schema.field(name) for name in columns])
        batches = [
            self._reader.get_batch(i).select(columns).slice(first, last - first)
            for i, first, last in spans(self._firsts, start, stop)
        ]
        table = pa.Table.from_batches(batches, schema)
        self._let_go(table.nbytes + len(batches) * len(columns) * _FAULT_BYTES)
        return table

    def _let_go(self, num_bytes: int) -> None:
        """Release pages that were read. Until then they count as this process's memory."""
        self._num_touched_bytes += num_bytes
        if self._num_touched_bytes > MAPPED_BYTES:
            self._mapped.madvise(mmap.MADV_DONTNEED)
            self._num_touched_bytes = 0

    def close(self) -> None:
        """See `Reader`. The map is freed with the last table that uses it."""
        del self._reader, self._mapped
