"""Parquet. Files of small row groups are read directly. Others are spooled, because one row costs its row group."""

import functools
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.parquet import ParquetFile, absolute
from batchinf.base.text import list_names
from batchinf.source.cache import FileEntry, Scratch
from batchinf.source.digests import DigestedFile, Watch, changed
from batchinf.source.files import BLOCK_BYTES, InputFile, InputLocation, ReadRange, Stamp, open_bytes
from batchinf.source.formats.arrow import BATCH_BYTES, BATCH_ROWS, ArrowReader, spool
from batchinf.source.formats.base import (
    SAMPLED_ROWS,
    ColumnarReader,
    FileFormat,
    Reader,
    SourceFile,
    check_num_rows,
    spans,
)
from batchinf.source.ranges import RangedFile, RangeReader
from batchinf.source.types import MixedTypes, cast_column, plain_schema, remark_of, with_remark

GROUP_ROWS = 20_000  # a row group up to this size is read directly
GROUP_BYTES = 64 << 20
_SKIPPED_ROWS = 16_384
CACHED_GROUPS = 2  # of each open file


class Parquet(FileFormat):
    """Parquet files. Files of one input must have the same types."""

    name = "parquet"
    endings = (".parquet", ".pq")
    mixed_types = MixedTypes.REFUSED
    is_scanned_in_order = False
    is_read_by_ranges = True
    hashes_all = False

    def __init__(self, *, is_shuffled: bool = False) -> None:
        """See `InputLocation`. In a shuffled input, each row would cost its row group, so all files are spooled."""
        self._is_shuffled = is_shuffled

    @property
    def key(self) -> str:
        return f"{_WHOLE_INT96}, shuffled" if self._is_shuffled else _WHOLE_INT96

    def for_input(self, input: InputLocation) -> FileFormat:
        super().for_input(input)
        return Parquet(is_shuffled=input.is_shuffled)

    def scan(self, file: InputFile, scratch: Scratch) -> FileEntry:
        """See `FileFormat`. Only the footer is read, unless the file is spooled."""
        metadata = pq.read_metadata(absolute(file.path))
        schema = _schema_of(file, metadata)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        check_num_rows(file.name, metadata.num_rows, [group.num_rows for group in groups])
        # As readers do: pyarrow decodes the names of chunks only when they are asked for.
        _repeated_columns(metadata)
        _may_be_wide(metadata)
        if not self._is_quick_by_row(metadata):
            row_bytes = max([1, *(group.total_byte_size // max(1, group.num_rows) for group in groups)])
            batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
            num_rows = spool(_batches(file, metadata, batch_rows), schema, scratch)
            check_num_rows(file.name, metadata.num_rows, [num_rows])
        return scratch.entry(_footer_hash(file), metadata.num_rows, schema)

    def first_rows(self, file: InputFile) -> Sequence[Mapping[str, object]]:
        return [dict.fromkeys(pq.read_schema(absolute(file.path)).names)]

    def reader(self, source_file: SourceFile, read_types: pa.Schema) -> Reader:
        is_spooled = "rows" in source_file.entry.artifacts
        return ArrowReader(source_file) if is_spooled else _ParquetReader(source_file)

    def is_same(self, source_file: SourceFile) -> bool:
        """See `FileFormat`. Of a file that is read in place, it reads the footer and the chunks that were read before.

        Of a remote file, the footer costs as many requests as the whole file.
        """
        file = source_file.file
        entry = source_file.entry
        if file.is_remote or entry.digest:
            return not file.is_remote and super().is_same(source_file)
        return _footer_hash(file) == entry.hash and source_file.digests.is_same(entry.content, file)

    def has_quick_rows(self, file: InputFile) -> bool:
        return self._is_quick_by_row(pq.read_metadata(absolute(file.path)))

    def _is_quick_by_row(self, metadata: pq.FileMetaData) -> bool:
        """Whether rows are read from the file itself, and not from a spool."""
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        is_small = all(group.num_rows <= GROUP_ROWS and group.total_byte_size <= GROUP_BYTES for group in groups)
        return is_small and not self._is_shuffled

    def refuse_crashing(self, new: Sequence[InputFile]) -> None:
        """See `FileFormat`. Another process reads the footers, which takes half a second and a second read of each."""
        if not new:
            return
        paths = json.dumps([file.path for file in new])
        # -P: a `json.py` in the user's folder must not replace Python's.
        command = [sys.executable, "-P", "-c", _PROBE]
        done = subprocess.run(command, input=paths, capture_output=True, text=True, check=False)
        num_seen = len(done.stdout.splitlines())
        if done.returncode < 0 and num_seen < len(new):
            name = new[num_seen].name
            raise InputError(f"{name} cannot be read as {self.name}: its footer is not whole; is it damaged?")

    def sample(self, file: InputFile, num_runs: int, seed: int, to: pathlib.Path) -> float | None:
        """See `FileFormat`. A run begins at most `_SKIPPED_ROWS` rows after the start of a row group."""
        if file.is_remote:
            return None
        draw = random.Random(seed)
        metadata = pq.read_metadata(absolute(file.path))
        groups = [number for number in range(metadata.num_row_groups) if metadata.row_group(number).num_rows]
        chosen = sorted(draw.sample(groups, min(num_runs, len(groups))))
        batches = []
        with ParquetFile(file.path, pre_buffer=False, buffer_size=BLOCK_BYTES, **_INT96_TO_MICROSECONDS) as parquet:
            for group in chosen:
                rows = min(metadata.row_group(group).num_rows, _SKIPPED_ROWS)
                # As many runs from each group, at least one, one after the other.
                each = -(-num_runs // len(chosen))
                numbers = {draw.randrange(-(-rows // SAMPLED_ROWS)) for _ in range(each)}
                read = parquet.iter_batches(batch_size=SAMPLED_ROWS, row_groups=[group], use_threads=False)
                first = itertools.islice(read, max(numbers) + 1)
                batches += [batch for number, batch in enumerate(first) if number in numbers]
        if batches:
            pq.write_table(pa.Table.from_batches(batches), absolute(to), row_group_size=GROUP_ROWS)
        return float(metadata.num_rows)


def _footer_hash(file: InputFile) -> str:
    """The hash of the file's size and the footer (sizes, statistics and offsets of every column chunk)."""
    with open_bytes(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        footer_bytes = int.from_bytes(stream.read(8)[:4], "little")
        stream.seek(max(0, size - 8 - footer_bytes))
        digest = xxhash.xxh3_128(stream.read(footer_bytes))
    digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


# The probe ignores Python exceptions: the scan raises them again and reports them.
_PROBE = """
import json, sys
import pyarrow.parquet as pq
for number, path in enumerate(json.load(sys.stdin)):
    try:
        metadata = pq.read_metadata(path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in range(group.num_columns):
                group.column(column)
    except Exception:
        pass
    print(number, flush=True)
"""


# The format of files whose INT96 timestamps are read as microseconds. Spark, Hive and Impala write such timestamps. In
# nanoseconds, as pyarrow reads them otherwise, 9999-12-31 wraps around to the year 1816.
_WHOLE_INT96 = "parquet by rules 2"
_INT96_TO_MICROSECONDS = {"coerce_int96_timestamp_unit": "us"}  # an option of `ParquetFile`


def _schema_of(file: InputFile, metadata: pq.FileMetaData) -> pa.Schema:
    """The columns, with a remark if timestamps lose digits."""
    columns = map(metadata.schema.column, range(metadata.num_columns))
    names = dict.fromkeys(column.path.partition(".")[0] for column in columns if column.physical_type == "INT96")
    if not names:
        return plain_schema(metadata.schema.to_arrow_schema())
    with ParquetFile(file.path, metadata=metadata, **_INT96_TO_MICROSECONDS) as parquet:
        schema = plain_schema(parquet.schema_arrow)
    words = f"INT96 timestamps ({list_names(list(names))}) are read to the microsecond"
    words = "; ".join(filter(None, (remark_of(schema), words)))
    return with_remark(schema, words)


def _batches(file: InputFile, metadata: pq.FileMetaData, batch_rows: int) -> Iterator[pa.RecordBatch]:
    # A buffered stream without pre-buffering reads a row group page by page. A group of 1 million rows and 208 MB takes
    # 24 MiB of memory; the defaults take 190 MiB before the first row, and a memory map keeps as much resident.
    repeated = _repeated_columns(metadata)
    options = {"pre_buffer": False, "buffer_size": BLOCK_BYTES, "read_dictionary": repeated, **_INT96_TO_MICROSECONDS}
    with ParquetFile(file.path, metadata=metadata, **options) as parquet:
        yield from parquet.iter_batches(batch_size=batch_rows, use_threads=False)


def _repeated_columns(metadata: pq.FileMetaData) -> list[str]:
    """Byte columns with few distinct values. They are read as dictionaries: decoded, 1 MB could become 20 GB."""
    if metadata.num_row_groups == 0:
        return []
    group = metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    # In a damaged footer, a chunk may name a column that the schema has not.
    known = {metadata.schema.column(i).path for i in range(metadata.num_columns)}
    return [
        chunk.path_in_schema
        for chunk in chunks
        if chunk.has_dictionary_page
        and chunk.physical_type == "BYTE_ARRAY"
        and chunk.total_uncompressed_size < (2 << 20) + 16 * chunk.num_values  # a dictionary has up to 1 MiB
        and "." not in chunk.path_in_schema
        and chunk.path_in_schema in known
    ]


def _may_be_wide(metadata: pq.FileMetaData) -> frozenset[str]:
    """Columns of lists or structs with dictionaries: a few bytes in the file may be gigabytes of text."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(i) for group in groups for i in range(group.num_columns))
    return frozenset(
        chunk.path_in_schema.split(".")[0]
        for chunk in chunks
        if "." in chunk.path_in_schema and chunk.has_dictionary_page and chunk.physical_type == "BYTE_ARRAY"
    )


class _Stream:
    """A column of a row group of which only a few rows are decoded at a time, from the first to the last."""

    def __init__(self, group: int, batches: Iterator[pa.RecordBatch]) -> None:
        self.group = group
        self.start = 0
        self._stop = 0
        self._batches = batches
        self._batch: pa.RecordBatch | None = None

    def read(self, first: int, last: int) -> Iterator[pa.Array]:
        """Rows `first` to `last`, which are not before `start`."""
        while first < last:
            while self._batch is None or first >= self._stop:
                self._batch = next(self._batches)
                self.start = self._stop
                self._stop += self._batch.num_rows
            piece = self._batch.column(0).slice(first - self.start, last - first)
            yield piece
            first += len(piece)


def _no_columns(group: int) -> dict[str, pa.ChunkedArray]:
    """Of a row group of which nothing was read yet."""
    return {}


class _ParquetReader(ColumnarReader):
    """A file of small row groups. It caches the columns that were read of the last few groups.

    A column that would take too much memory is read as a `_Stream`.
    """

    def __init__(self, source_file: SourceFile) -> None:
        file = source_file.file
        entry = source_file.entry
        digests = source_file.digests
        super().__init__(entry.arrow_schema())
        self._name = file.name
        self._path = file.path
        self._input = file
        self._entry = entry
        self._digests = digests
        # A copy in the cache is not watched.
        is_copy = file.path != entry.path
        self._watch = Watch(file.name, (), (), lambda: True) if is_copy else digests.watch(entry.content)
        self._opened: list[Stamp] | None = None
        self._held = functools.lru_cache(CACHED_GROUPS)(_no_columns)
        self._streams = dict[str, _Stream]()
        self._wide_rows = dict[tuple[int, str], int | None]()
        self._watch.read(self._open)

    def _open(self) -> None:
        """Open the file, and again if another file with its content has taken its place."""
        if self._opened == self._watch.trusted:
            return
        if self._opened is not None:
            self.close()
        self._opened = self._watch.trusted
        if self._opened not in ([], [self._entry.stamp]):
            self._digests.compare_all()
        metadata = pq.read_metadata(absolute(self._path))
        repeated = _repeated_columns(metadata)
        ranged = self._input if isinstance(self._input, RangedFile) else None
        self._bytes = DigestedFile(self._path) if ranged is None else RangeReader(ranged)
        options = {"pre_buffer": False, "read_dictionary": repeated, **_INT96_TO_MICROSECONDS}
        self._file = ParquetFile(self._bytes, metadata=metadata, **options)
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        self._firsts = [0, *itertools.accumulate(group.num_rows for group in groups)]
        self._may_be_wide = _may_be_wide(metadata)

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        groups = spans(self._firsts, start, stop)
        return pa.concat_tables([self._of_group(i, first, last, columns) for i, first, last in groups])

    def _of_group(self, i: int, first: int, last: int, columns: list[str]) -> pa.Table:
        """Rows of one row group, by their places in it."""
        wide = {name: rows for name in columns if (rows := self._rows_at_once(i, name)) is not None}
        held = self._group(i, [name for name in columns if name not in wide])
        read = {name: column.slice(first, last - first) for name, column in held.items()}
        read |= {name: cast_column(read[name], self._columns[name].type) for name in read.keys() & self._may_be_wide}
        for name, num_rows in wide.items():
            # Cast piece by piece: Arrow casts all values behind a slice of lists.
            type = self._columns[name].type
            pieces = self._stream(i, name, num_rows, first).read(first, last)
            read[name] = pa.chunked_array([cast_column(piece, type) for piece in pieces], type)
        return pa.table({name: read[name] for name in columns})

    def _rows_at_once(self, i: int, name: str) -> int | None:
        """How many rows of a column to decode at once; None: all of a group. The group's first row decides."""
        if name not in self._may_be_wide:
            return None
        if (i, name) not in self._wide_rows:
            num_rows = self._firsts[i + 1] - self._firsts[i]
            first = next(self._few_rows(i, name, 1), None)
            row_bytes = 0 if first is None else cast_column(first.column(0), self._columns[name].type).nbytes
            is_wide = row_bytes * num_rows > GROUP_BYTES
            self._wide_rows[i, name] = max(1, BATCH_BYTES // row_bytes) if is_wide else None
        return self._wide_rows[i, name]

    def _stream(self, i: int, name: str, num_rows: int, first: int) -> _Stream:
        """The stream of a column that can still read the row `first` of a group."""
        stream = self._streams.get(name)
        if stream is None or stream.group != i or first < stream.start:
            stream = self._streams[name] = _Stream(i, self._few_rows(i, name, num_rows))
        return stream

    def _few_rows(self, i: int, name: str, num_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a group, decoded `num_rows` at a time."""
        self._watch.read(self._open)
        batches = self._file.iter_batches(num_rows, [i], [name], use_threads=False)

        def read_on() -> tuple[pa.RecordBatch | None, list[ReadRange]]:
            self._bytes.taken()
            return next(batches, None), self._bytes.taken()

        while True:
            batch, ranges = self._watch.read(read_on)
            if not self._digests.note(self._entry.content, ranges):
                raise changed(self._name)
            if batch is None:
                return
            yield batch

    def _group(self, i: int, columns: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        held = self._held(i)
        if missing := [name for name in columns if name not in held]:
            read, ranges = self._watch.read(lambda: self._read(i, missing))
            if not self._digests.note(self._entry.content, ranges):
                raise changed(self._name)
            held.update(zip(read.column_names, read.columns, strict=True))
        return {name: held[name] for name in columns}

    def _read(self, i: int, columns: list[str]) -> tuple[pa.Table, list[ReadRange]]:
        self._open()
        self._bytes.taken()
        return self._file.read_row_group(i, columns, use_threads=False), self._bytes.taken()

    def close(self) -> None:
        self._held.cache_clear()
        self._streams.clear()
        self._file.close()
        self._bytes.close()
