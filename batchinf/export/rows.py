"""The rows of an export: in the order of the input, those that a predicate chooses, in bounded memory."""

import contextlib
import math
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.results import Results
from batchinf.schedule.predicate import Predicate
from batchinf.tasks.computed import ComputedColumn

_BATCH_BYTES = 8 << 20
_MOST_ROWS = 4096
_BUCKET_BYTES = 32 << 20
_MOST_BUCKETS = 500  # each is an open file
_ORDER = ("row_index", "sample_index")


class Rows:
    """The rows to export: these columns, in this order, of rows for which `where`, an SQL expression, is true."""

    def __init__(
        self, results: Results, columns: Sequence[str], where: str | None, *, computed: Mapping[str, ComputedColumn]
    ) -> None:
        """computed: columns that the output lacks, by name. Raises PredicateError for a wrong expression."""
        self._results = results
        self._columns = list(columns)
        self._computed = {name: computed[name] for name in columns if name in computed}
        self._where = None if where is None else Predicate(where, results.schema, option="--where")
        sources = (name for column in self._computed.values() for name in column.sources)
        needed = {*columns, *sources, *_ORDER, *(() if self._where is None else self._where.columns)}
        self._needed = [name for name in results.schema.names if name in needed]

    @property
    def schema(self) -> pa.Schema:
        """Of each batch."""
        return pa.schema([self._field(name) for name in self._columns])

    def _field(self, name: str) -> pa.Field:
        if (column := self._computed.get(name)) is not None:
            return pa.field(name, column.type)
        return self._results.schema.field(name)

    def count(self) -> int:
        """How many rows there are. Reads the columns of `where`."""
        if self._where is None:
            return self._results.num_rows
        batches = self._results.batches(self._where.columns)
        return sum(int(self._where.mask(pa.Table.from_batches([batch])).sum()) for batch in batches)

    def batches(self) -> Iterator[tuple[npt.NDArray[np.int64], pa.RecordBatch]]:
        """The rows with their positions in the input, about 8 MB at a time. A row that is larger comes alone."""
        batches = self._chosen()
        for batch in batches if self._results.is_in_order else self._sorted(batches):
            positions = batch["row_index"].to_numpy()
            for name, column in self._computed.items():
                batch = batch.append_column(name, column.values(batch))
            yield positions, batch.select(self._columns)

    def _chosen(self) -> Iterator[pa.RecordBatch]:
        row_bytes = self._num_bytes() / max(1, self._results.num_rows)
        num_rows = min(_MOST_ROWS, max(1, int(_BATCH_BYTES / max(1, row_bytes))))
        for batch in self._results.batches(self._needed, num_rows):
            if self._where is not None:
                batch = batch.filter(pa.array(self._where.mask(pa.Table.from_batches([batch]))))
            yield batch

    def _num_bytes(self) -> int:
        """Of the needed columns in memory, about: Parquet counts dictionary-encoded values once."""
        return self._results.num_bytes(self._needed)

    def _sorted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows by position: a first pass puts them into files of ranges of positions, a second sorts each file."""
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        order = [(name, "ascending") for name in _ORDER if name in self._needed]
        num_buckets = min(_MOST_BUCKETS, 1 + self._num_bytes() // _BUCKET_BYTES)
        width = math.ceil(max(1, self._results.num_input_rows) / num_buckets)
        with tempfile.TemporaryDirectory(prefix="batchinf-export-") as folder, contextlib.ExitStack() as stack:
            writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
            for batch in batches:
                buckets = batch["row_index"].to_numpy() // width
                for bucket in sorted({*buckets.tolist()}):
                    if bucket not in writers:
                        writer = pa.ipc.new_stream(_bucket_file(folder, bucket), batch.schema, options=options)
                        writers[bucket] = stack.enter_context(writer)
                    writers[bucket].write_batch(batch.filter(pa.array(buckets == bucket)))
            stack.close()
            for bucket in sorted(writers):
                path = _bucket_file(folder, bucket)
                with pa.ipc.open_stream(path.read_bytes()) as reader:
                    rows = reader.read_all().sort_by(order)
                path.unlink()
                yield from rows.combine_chunks().to_batches(_MOST_ROWS)


def _bucket_file(folder: str, bucket: int) -> pathlib.Path:
    return pathlib.Path(folder, f"{bucket}.arrows")
