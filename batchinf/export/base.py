"""What a format of an export is: it writes batches of rows to a binary stream."""

import abc
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import msgspec
import pyarrow as pa

from batchinf.base.parquet import readable_rows
from batchinf.export.tokens import TokenTexts
from batchinf.manifest.versions import stored_spec
from batchinf.results import Results
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import stored_task


@dataclass(frozen=True)
class ExportedJob:
    """The job whose rows are exported."""

    results: Results

    @functools.cached_property
    def spec(self) -> JobSpec:
        """As the job began."""
        return stored_spec(self.results.spec)

    @functools.cached_property
    def task(self) -> type[Task]:
        """Of the job."""
        return stored_task(self.results.spec)

    @functools.cached_property
    def tokens(self) -> TokenTexts:
        """The texts of its tokens. Raises ModelError if its tokenizer is not here, DriftError if it has changed."""
        return TokenTexts(self.results.tokenizer())


class Format(abc.ABC):
    """Writes one file. Its caller opens and closes the streams, and calls `close` after the last batch."""

    name: ClassVar[str]
    """As `--to` has it."""
    suffix: ClassVar[str]
    """The ending of the file's name."""
    splits_errors: ClassVar[bool] = False
    """Whether error rows go to a stream of their own."""

    def __init__(self, job: ExportedJob, schema: pa.Schema, stream: IO[bytes], errors: IO[bytes]) -> None:
        """schema: of the batches that `write` gets. errors: for error rows, if the format has them apart."""
        self.job = job
        self.schema = schema
        self.stream = stream
        self.errors = errors

    @classmethod
    def notes(cls, job: ExportedJob) -> list[str]:
        """What the format leaves out of the job's output, in lines for the user.

        Raises UserError for a job whose output it has no form for.
        """
        return []

    @classmethod
    def columns(cls, wanted: Sequence[str], results: Results) -> list[str]:
        """The columns that the format reads to write these. wanted: none are all. results: of the job."""
        return list(dict.fromkeys(wanted)) or results.schema.names

    @abc.abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Write the next rows. All rows of one `row_index` go to one file."""

    def close(self) -> None:  # noqa: B027  # most formats hold nothing back
        """Write what was held back, and the end of the file."""


def json_of(value: object) -> bytes:
    """JSON text. A number that is not finite becomes null, bytes become base64, a time its ISO form."""
    return _ENCODER.encode(value)


def json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A line of JSON for each row, as `json_of` writes values."""
    return _ENCODER.encode_lines(rows)


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch, with the values that `values_of` gives."""
    columns = map(values_of, batch.columns)
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def values_of(column: pa.Array) -> list[Any]:
    """The values of a column. A time in nanoseconds is its text, because Python's times end at the microsecond.

    So is a value that Python cannot build, such as a time after the year 9999.
    """
    type = _with_text_of_times(column.type)
    column = column if type == column.type else column.cast(type)
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        return [row["value"] for row in readable_rows(pa.table({"value": column}))]
    return values


def _with_text_of_times(type: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_with_text_of_times(field.type)) for field in type])
    if pa.types.is_map(type):
        return pa.map_(_with_text_of_times(type.key_type), _with_text_of_times(type.item_type))
    if pa.types.is_list(type) or pa.types.is_large_list(type):
        make = pa.list_ if pa.types.is_list(type) else pa.large_list
        return make(type.value_field.with_type(_with_text_of_times(type.value_type)))
    return pa.string() if type == pa.time64("ns") else type


def _json_value(value: object) -> str:
    """Of types that are unknown to the encoder, such as a time in nanoseconds."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_json_value)
