"""Any input as rows by position: JSONL, Parquet, CSV, text, Arrow (files, globs, folders) and Hugging Face datasets.

Finds the files and reads rows from them; what makes that cheap is found once by `spool` and kept in the cache folder.
"""

import bisect
import contextlib
import functools
import glob
import itertools
import json
import os
import pathlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from batchinf import spool
from batchinf.errors import InputError
from batchinf.spool import FileEntry, Format, InputFile
from batchinf.storage import Folder

OPEN_FILES = 16  # at once, of an input of many
CACHED_GROUPS = 2  # Parquet row groups of each open file

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_ALLOWED = f"the formats are {', '.join(dict.fromkeys(ENDINGS.values()))} and hf, by the endings {', '.join(ENDINGS)}"


@dataclass(frozen=True, slots=True)
class InputLocation:
    """Where the rows are."""

    path: str  # a file, a glob, a folder, or the id of a Hugging Face dataset
    format: str | None = None  # jsonl, parquet, csv, text, arrow or hf; None: by the names' endings
    split: str | None = None  # of a Hugging Face dataset; None: train
    revision: str | None = None  # of a Hugging Face dataset on the hub
    name: str | None = None  # the configuration of a Hugging Face dataset


@dataclass(frozen=True, slots=True)
class Row:
    """One input record."""

    row_index: int  # position in the source, from 0
    values: Mapping[str, object]  # column -> Python value; columns that the record lacks are absent
    error: str | None = None  # why the record cannot be read, with file and line; `values` is then empty


def open_source(input: InputLocation, cache: pathlib.Path) -> "Source":
    """The rows of `input`; what a first pass over them finds is kept in `cache`, a folder of its own.

    Opening again reads metadata alone: a file is trusted while its path, size and mtime are as they were. Processes may
    open one input with one cache at the same time. Raises `InputError` if there is nothing to read, or no row in it.
    """
    folder = Folder(cache)
    if _is_dataset(input):
        return _open_dataset(input, folder)
    format, files = find_files(input)
    entries = spool.examine(files, format, folder)
    schema = _settled_schema(entries, format)
    content = json.dumps([format, [(entry.hash, entry.num_rows) for entry in entries]])
    openers = [functools.partial(_reader, *found, schema, folder) for found in zip(files, entries, strict=True)]
    lengths = [entry.num_rows for entry in entries]
    return _not_empty(Source(openers, lengths, schema, xxhash.xxh3_128_hexdigest(content.encode())), input)


def _not_empty(source: "Source", input: InputLocation) -> "Source":
    if source.num_rows == 0:
        raise InputError(f"{input.path} has no rows; give an input with at least one")
    return source


def _settled_schema(entries: Sequence[FileEntry], format: Format) -> pa.Schema:
    """The columns of all files; where types differ what both fit in, else JSON (of JSONL) or string (of CSV)."""
    types: dict[str, pa.DataType | None] = {}
    for schema in {entry.schema: entry.arrow_schema() for entry in entries}.values():
        for field in schema:
            found = None if spool.is_json(field) else field.type
            known = types.get(field.name, found)
            types[field.name] = both = None if known is None else spool.merge_types(known, found)
            if both is None and format in ("parquet", "arrow"):
                both_types = f"{known} in one file and {found} in another"
                raise InputError(f"column {field.name!r} is {both_types}; write the files with one type")
    return pa.schema([_settled_field(name, type, format) for name, type in types.items()])


def _settled_field(name: str, type: pa.DataType | None, format: Format) -> pa.Field:
    if format == "jsonl" and (type is None or _has_empty_struct(type)):
        return spool.json_field(name)
    return pa.field(name, pa.string() if type is None else spool.plain(type))


def _has_empty_struct(type: pa.DataType) -> bool:  # Parquet cannot hold one
    children = [type.field(i).type for i in range(type.num_fields)]
    return (pa.types.is_struct(type) and not children) or any(map(_has_empty_struct, children))


# -- which files -----------------------------------------------------------------------------------------------------


def find_files(input: InputLocation) -> tuple[Format, list[InputFile]]:
    """The files of a file, glob or folder, sorted by name, and their one format."""
    if input.format not in (None, "hf", *ENDINGS.values()):
        raise InputError(f"format {input.format!r} is not known; {_ALLOWED}")
    path = os.path.expanduser(input.path)
    if os.path.isfile(path):
        files = [InputFile(os.path.basename(path), os.path.abspath(path))]
    elif os.path.isdir(path):
        files = _in_folder(path, input)
    elif glob.has_magic(path):
        files = _by_glob(path)
    else:
        raise InputError(f"{input.path} does not exist; give a file, a glob, a folder, or a Hugging Face dataset's id")
    return _one_format(files, input), files


def _by_glob(path: str) -> list[InputFile]:
    root = os.path.dirname(re.split(r"[*?[]", path)[0])
    found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise InputError(f"no file matches {path}; mend the glob, or put it in quotes if a shell expanded it")
    return [InputFile(os.path.relpath(name, root or "."), os.path.abspath(name)) for name in found]


def _in_folder(path: str, input: InputLocation) -> list[InputFile]:
    """The data files below a folder: hidden ones, those that begin with _ and unknown endings are left out."""
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [os.path.join(folder, name) for name in names if not name.startswith((".", "_"))]
    wanted = [name for name in found if _format_of(name) in ({input.format} if input.format else {*ENDINGS.values()})]
    if not wanted:
        raise InputError(f"{input.path} has no {input.format or 'data'} file; {_ALLOWED} (.gz or .zst may follow)")
    return [InputFile(os.path.relpath(name, path), os.path.abspath(name)) for name in sorted(wanted)]


def _one_format(files: Sequence[InputFile], input: InputLocation) -> Format:
    if input.format is not None:
        return cast(Format, input.format)
    formats = {_format_of(file.name): file.name for file in files}
    if None in formats:
        raise InputError(f"the ending of {formats[None]} is not known; {_ALLOWED}; name it so, or set `format`")
    if len(formats) > 1:
        raise InputError(f"{input.path} mixes formats: {', '.join(formats.values())}; set `format` or narrow the path")
    return cast(Format, formats.popitem()[0])


def _format_of(name: str) -> Format | None:
    stem, ending = os.path.splitext(name.lower())
    if ending not in (".gz", ".zst"):
        return ENDINGS.get(ending)
    format = ENDINGS.get(os.path.splitext(stem)[1])
    return None if format in ("parquet", "arrow") else format


# -- reading ---------------------------------------------------------------------------------------------------------

Record = tuple[dict[str, Any], str | None]


class _Reader(Protocol):
    """One file (or dataset) of a source: positions count from its own first row."""

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]: ...

    def table(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table: ...

    def close(self) -> None: ...


class Source:
    """Rows by position, over all files of an input in the order of their names.

    Two threads may read at once; they take turns.
    """

    num_rows: int
    schema: pa.Schema  # every column with its settled type; a column of mixed JSON types is string, `spool.JSON_MARK`
    fingerprint: str  # of the content, not of where it is

    def __init__(
        self, openers: Sequence[Callable[[], _Reader]], lengths: Sequence[int], schema: pa.Schema, fingerprint: str
    ) -> None:
        self._readers = _Recent[int, _Reader](OPEN_FILES, lambda i: openers[i](), lambda reader: reader.close())
        self._firsts = [0, *itertools.accumulate(lengths)]
        self._turn = threading.Lock()
        self.num_rows = self._firsts[-1]
        self.schema = schema
        self.fingerprint = fingerprint

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> list[Row]:
        """Rows `start` to `stop`, with the values of `columns` (None: all) as they are in the record."""
        records: list[Record] = []
        with self._turn:
            for reader, first, last in self._spans(start, stop):
                records += reader.records(first, last, columns)
        return [Row(start + i, values, error) for i, (values, error) in enumerate(records)]

    def read_columns(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """`stop - start` rows as a table of the types in `schema`; null where a record is broken or lacks the column.

        Lone surrogates, which Arrow cannot hold, come out as `?`. Raises `KeyError` for a column not in `schema`.
        """
        schema = pa.schema([self.schema.field(name) for name in columns])
        with self._turn:
            tables = [reader.table(first, last, columns) for reader, first, last in self._spans(start, stop)]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _spans(self, start: int, stop: int) -> Iterator[tuple[_Reader, int, int]]:
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        for i, first, last in _spans(self._firsts, start, stop):
            yield self._readers.get(i), first, last

    def close(self) -> None:
        """Close the files; the source is not read afterwards."""
        with self._turn:
            self._readers.clear()


def _spans(firsts: Sequence[int] | npt.NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Which runs rows `start` to `stop` lie in, run i being `firsts[i]` to `firsts[i + 1]`: (i, from, to) within it."""
    i = max(0, bisect.bisect_right(firsts, start) - 1)
    while start < stop:
        end = min(stop, int(firsts[i + 1]))
        if start < end:
            yield i, start - int(firsts[i]), end - int(firsts[i])
        start, i = end, i + 1


K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The few values used last; the others are closed, and made again when they are asked for."""

    def __init__(self, size: int, make: Callable[[K], V], close: Callable[[V], None]) -> None:
        self._size, self._make, self._close = size, make, close
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V:
        if key not in self._values:
            while len(self._values) >= self._size:
                self._close(self._values.popitem(last=False)[1])
            self._values[key] = self._make(key)
        self._values.move_to_end(key)
        return self._values[key]

    def clear(self) -> None:
        while self._values:
            self._close(self._values.popitem()[1])


class _Lines:
    """JSON lines or text, by the offsets of its lines."""

    def __init__(self, file: InputFile, entry: FileEntry, schema: pa.Schema, cache: Folder) -> None:
        self._name, self._schema = file.name, schema
        self._offsets = spool.map_int64(cache, entry.artifacts["offsets"])
        self._blanks = spool.map_int64(cache, entry.artifacts.get("blanks"))
        self._is_json = entry.format == "jsonl"
        copy = entry.artifacts.get("lines")
        self._file = open(cache.path(copy.name) if copy else file.path, "rb")  # noqa: SIM115

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        return [self._record(start + i, line, columns) for i, line in enumerate(self._lines(start, stop))]

    def _record(self, row: int, line: bytes | None, columns: Sequence[str] | None) -> Record:
        try:
            if line is None:
                raise ValueError(f"longer than {spool.MAX_LINE_BYTES:,} bytes")
            values = spool.parse_json_line(line) if self._is_json else spool.parse_text_line(line)
        except ValueError as error:
            num_blanks = int(np.searchsorted(self._blanks, row, side="right"))
            return {}, f"{self._name} line {row + num_blanks + 1}: {error}"
        return (values if columns is None else {name: values[name] for name in columns if name in values}), None

    def _lines(self, start: int, stop: int) -> list[bytes | None]:
        """The rows' lines, without line ends; None for one that is too long."""
        first, last = int(self._offsets[start]), int(self._offsets[stop])
        if last - first > spool.MAX_LINE_BYTES and stop - start > 1:
            middle = (start + stop) // 2
            return self._lines(start, middle) + self._lines(middle, stop)
        data = os.pread(self._file.fileno(), min(last - first, spool.MAX_LINE_BYTES + 1), first)
        if b"\n" not in data and len(data) > spool.MAX_LINE_BYTES:
            return [None]
        lines = spool.split_lines(data) if self._is_json else data.removesuffix(b"\n").split(b"\n")
        if len(lines) != stop - start:
            raise InputError(f"{self._name} changed while it was read; start again once it is complete")
        return cast("list[bytes | None]", lines)

    def table(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        records = [values for values, _ in self.records(start, stop, columns)]
        fields = [self._schema.field(name) for name in columns]
        arrays = [_to_arrow([record.get(field.name) for record in records], field) for field in fields]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def close(self) -> None:
        self._file.close()


def _to_arrow(values: list[Any], field: pa.Field) -> pa.Array:
    if spool.is_json(field):
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, UnicodeError, OverflowError):
        return pa.array([_fit(value, field.type) for value in values], field.type)


def _fit(value: Any, type: pa.DataType) -> Any:
    """The value as one that Arrow takes for the type: no lone surrogates, no integers where floats are; else null."""
    if pa.types.is_string(type) and isinstance(value, str):
        return value.encode(errors="replace").decode()
    if pa.types.is_list(type) and isinstance(value, list):
        return [_fit(item, type.value_type) for item in value]
    if pa.types.is_struct(type) and isinstance(value, dict):
        return {field.name: _fit(value.get(field.name), field.type) for field in type}
    if pa.types.is_floating(type) and isinstance(value, int):
        return float(value)
    with contextlib.suppress(pa.ArrowException, OverflowError):
        return pa.scalar(value, type).as_py()
    return None


class _Columnar:
    """Arrow data: a format says only how to slice rows out of it."""

    def __init__(self, schema: pa.Schema, names: Iterable[str]) -> None:
        self._schema = schema  # of the source
        self._names = dict.fromkeys(names)  # of the columns that are in this file

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        names = [name for name in (self._names if columns is None else columns) if name in self._names]
        table = self.table(start, stop, names)
        if not names:
            return [({}, None) for _ in range(start, stop)]
        lists = [column.to_pylist() for column in table.columns]
        return [(dict(zip(names, values, strict=True)), None) for values in zip(*lists, strict=True)]

    def table(self, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        here = self._slice(start, stop, [name for name in columns if name in self._names])
        fields = [self._schema.field(name) for name in columns]
        arrays = [
            self._cast(here.column(field.name), field.type)
            if field.name in self._names
            else pa.nulls(stop - start, field.type)
            for field in fields
        ]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields))

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        raise NotImplementedError

    def _cast(self, column: pa.ChunkedArray, type: pa.DataType) -> pa.ChunkedArray:
        return column if column.type.equals(type) else column.cast(type, safe=False)

    def close(self) -> None:
        pass


class _Arrow(_Columnar):
    """A memory-mapped Arrow file: the input itself, or the spool of it."""

    def __init__(self, file: InputFile, entry: FileEntry, schema: pa.Schema, cache: Folder) -> None:
        super().__init__(schema, entry.arrow_schema().names)
        rows = entry.artifacts.get("rows")
        self._firsts = spool.map_int64(cache, entry.artifacts["batches"])
        self._mapped = pa.memory_map(str(cache.path(rows.name)) if rows else file.path)
        self._reader = pa.ipc.open_file(self._mapped)

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        schema = pa.schema([self._reader.schema.field(name) for name in columns])
        batches = [
            self._reader.get_batch(i).select(columns).slice(first, last - first)
            for i, first, last in _spans(self._firsts, start, stop)
        ]
        return pa.Table.from_batches(batches, schema)

    def close(self) -> None:
        self._mapped.close()


class _Csv(_Arrow):
    """The spool of a CSV file: strings, and why a row is none."""

    def __init__(self, file: InputFile, entry: FileEntry, schema: pa.Schema, cache: Folder) -> None:
        super().__init__(file, entry, schema, cache)
        self._name = file.name

    def records(self, start: int, stop: int, columns: Sequence[str] | None) -> list[Record]:
        errors = self._slice(start, stop, [spool.CSV_ERRORS]).column(0).to_pylist()
        return [
            record if error is None else ({}, f"{self._name} {error}")
            for record, error in zip(super().records(start, stop, columns), errors, strict=True)
        ]

    def _cast(self, column: pa.ChunkedArray, type: pa.DataType) -> pa.ChunkedArray:
        if pa.types.is_string(type):
            return column
        return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column).cast(type)


class _Parquet(_Columnar):
    """A Parquet file of small row groups, the last few of which are held as far as their columns were asked for."""

    def __init__(self, file: InputFile, entry: FileEntry, schema: pa.Schema) -> None:
        super().__init__(schema, entry.arrow_schema().names)
        metadata = pq.read_metadata(file.path)
        repeated = spool.repeated_columns(metadata)
        self._file = pq.ParquetFile(file.path, metadata=metadata, read_dictionary=repeated)
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        self._firsts = [0, *itertools.accumulate(group.num_rows for group in groups)]
        self._groups = _Recent[int, dict[str, pa.ChunkedArray]](CACHED_GROUPS, lambda i: {}, lambda columns: None)

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        tables = [
            pa.table({name: column.slice(first, last - first) for name, column in self._group(i, columns).items()})
            for i, first, last in _spans(self._firsts, start, stop)
        ]
        return pa.concat_tables(tables)

    def _group(self, i: int, columns: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        held = self._groups.get(i)
        if missing := [name for name in columns if name not in held]:
            read = self._file.read_row_group(i, missing, use_threads=False)
            held.update(zip(read.column_names, read.columns, strict=True))
        return {name: held[name] for name in columns}

    def close(self) -> None:
        self._groups.clear()
        self._file.close()


def _reader(file: InputFile, entry: FileEntry, schema: pa.Schema, cache: Folder) -> _Reader:
    if entry.format in ("jsonl", "text"):
        return _Lines(file, entry, schema, cache)
    if entry.format == "csv":
        return _Csv(file, entry, schema, cache)
    if entry.format == "parquet" and "rows" not in entry.artifacts:
        return _Parquet(file, entry, schema)
    return _Arrow(file, entry, schema, cache)


# -- Hugging Face datasets -------------------------------------------------------------------------------------------


def _is_dataset(input: InputLocation) -> bool:
    path = os.path.expanduser(input.path)
    if input.format is not None or os.path.exists(path):
        return input.format == "hf" or (input.format is None and _is_saved(path))
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None and _format_of(path) is None


def _is_saved(path: str) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


class _Dataset(_Columnar):
    """A Hugging Face dataset, read from its memory-mapped Arrow table."""

    def __init__(self, dataset: Any, schema: pa.Schema) -> None:
        super().__init__(schema, schema.names)
        self._dataset = dataset.with_format("arrow")

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        return self._dataset[start:stop].select(columns)


def _open_dataset(input: InputLocation, cache: Folder) -> Source:
    if _is_saved(path := os.path.expanduser(input.path)):
        dataset = _load(input, path)
        fingerprint = _saved_fingerprint(dataset)
    else:
        dataset, fingerprint = _open_hub_dataset(input, cache)
    schema = spool.plain_schema(dataset.features.arrow_schema)
    opener = functools.partial(_Dataset, dataset, schema)
    return _not_empty(Source([opener], [dataset.num_rows], schema, fingerprint), input)


def _load(input: InputLocation, path: str) -> Any:
    import datasets  # 1 s, which inputs of files do not pay

    try:
        if _is_saved(path):
            found = datasets.load_from_disk(path)
        else:
            split = input.split or "train"
            return datasets.load_dataset(path, input.name, split=split, revision=input.revision)
    except Exception as error:  # whatever `datasets`, the hub's client and the data's own reader may raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = input.path if os.path.exists(path) else f"there is no file or folder {input.path}, and it"
        raise InputError(
            f"{what} cannot be loaded as a Hugging Face dataset: {reason}; "
            "check its id, `name`, `split` and `revision`, and the network"
        ) from error
    if not isinstance(found, dict):
        return found
    if (split := input.split or "train") not in found:
        raise InputError(f"{input.path} has no split {split!r}; set `split` to one of {', '.join(found)}")
    return found[split]


def _saved_fingerprint(dataset: Any) -> str:
    """Covers the features, the row count, and the size, first and last 64 KiB of each Arrow file; not its path."""
    digest = xxhash.xxh3_128(f"{dataset.num_rows} {dataset.features}".encode())
    for file in dataset.cache_files:
        with open(file["filename"], "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(size.to_bytes(8, "little") + stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return digest.hexdigest()


def _open_hub_dataset(input: InputLocation, cache: Folder) -> tuple[Any, str]:
    """The dataset, and the fingerprint that `datasets` derives from repository, commit, configuration and split.

    Opened again, it comes from the Arrow files that it was prepared as: the hub is asked once, and a job goes on with
    what it began with.
    """
    asked = [input.path, input.name, input.split, input.revision]
    known = spool.read_record(cache, "dataset.json")
    if known.get("asked") == asked and (dataset := _from_files(known)) is not None:
        return dataset, known["fingerprint"]
    dataset = _load(input, os.path.expanduser(input.path))
    found = {"asked": asked, "num_rows": dataset.num_rows, "fingerprint": dataset._fingerprint}
    cache.make()
    with spool.locked(cache):
        spool.write_record(cache, "dataset.json", {**found, "files": _stamps(dataset.cache_files)})
    return dataset, dataset._fingerprint


def _stamps(files: Iterable[Mapping[str, str]]) -> list[list[Any]]:
    return [[file["filename"], *spool.stamp(file["filename"])] for file in files]


def _from_files(known: Mapping[str, Any]) -> Any | None:
    import datasets

    paths = [path for path, _, _ in known["files"]]
    if not paths or not all(map(os.path.isfile, paths)) or _stamps({"filename": p} for p in paths) != known["files"]:
        return None
    dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
    return dataset if dataset.num_rows == known["num_rows"] else None  # else a slice or a selection of the files
