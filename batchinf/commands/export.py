"""`batchinf export`: the output of a job in another format, in the order of the input."""

import glob
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.base.paths import is_bucket
from batchinf.base.text import counted, list_names
from batchinf.export.base import ExportedJob, Format
from batchinf.export.dataset_card import card_of
from batchinf.export.files import STDOUT, Files, check_is_free, check_target
from batchinf.export.huggingface import CARD, DATA, HuggingFaceExport
from batchinf.export.jsonl import JsonLinesExport
from batchinf.export.openai_batch import OpenAIBatchExport
from batchinf.export.plain import CsvExport, ParquetExport
from batchinf.export.rows import Rows
from batchinf.results import Results
from batchinf.tasks.computed import LABEL, computed_columns

FORMATS: dict[str, type[Format]] = {
    format.name: format for format in (JsonLinesExport, CsvExport, ParquetExport, HuggingFaceExport, OpenAIBatchExport)
}
_MOST_FILES = 4
"""More are not all named to people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    num_rows: int
    files: tuple[str, ...]
    notes: tuple[str, ...]
    """What the export does not have, in lines for the user."""

    def lines(self) -> Iterator[str]:
        """For people."""
        yield from (f"note: {note}" for note in self.notes)
        files = self.files if len(self.files) <= _MOST_FILES else (*self.files[:2], f"{len(self.files) - 2} more files")
        yield f"{counted(self.num_rows, 'output row')} in {list_names(files)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and where to. The options of the command."""

    to: str | None = None
    """The name of a format; None: by the ending of `path`."""
    path: str = STDOUT
    """A file, `-` for stdout, an object of a bucket, or for a dataset a folder."""
    num_files: int = 1
    columns: Sequence[str] = ()
    """None are all."""
    where: str | None = None
    """An SQL expression over the output's columns."""
    overwrites: bool = False
    splits_errors: bool = True
    """Whether a format that has them apart writes error rows to a file of their own."""
    split: str = "train"
    """The name of the split, for `hf`."""


def export_job(out: str, request: ExportRequest) -> Exported:
    """Write the committed rows of the job in an output folder, in bounded memory. Raises UserError."""
    form = _format(request)
    _check_fits(form, request)
    job = ExportedJob(Results(out))
    notes = form.notes(job)
    schema = job.results.schema
    computed = computed_columns(job.task(job.spec).shown_columns, schema.names)
    _check_columns(request.columns, [*schema.names, *computed])
    notes += _notes(job, request, computed)
    rows = Rows(job.results, form.columns(request.columns, job.results), request.where, computed=computed)
    if form is HuggingFaceExport:
        _check_alone(request.path, _names(form, request))
        if not request.overwrites:
            check_is_free(os.path.join(request.path, CARD))  # it is written last
    with Files(overwrites=request.overwrites) as files:
        num_rows = _write(job, rows, files, form=form, request=request)
        if form is HuggingFaceExport:
            is_whole = request.where is None and not request.columns
            card = card_of(job, num_rows, request.where, split=request.split, is_whole=is_whole)
            files.open(os.path.join(request.path, CARD)).write(card.encode())
    return Exported(num_rows=num_rows, files=tuple(files.written), notes=tuple(notes))


def _notes(job: ExportedJob, request: ExportRequest, computed: Collection[str]) -> Iterator[str]:
    """What people should know of the rows, in any format. computed: names of columns that `head` and `export` make."""
    if LABEL in computed and not request.columns:
        yield f"the best choice is a place from 0; --columns takes {' and '.join(computed)}, too"
    if not job.results.is_done:
        yield f"the job is not done: {counted(len(job.results), 'row')} are committed so far"


def _write(job: ExportedJob, rows: Rows, files: Files, *, form: type[Format], request: ExportRequest) -> int:
    """Write the rows into the files of the request. Returns the number of rows."""
    error_name = _error_name(form, request)
    errors = None if error_name is None else files.open(error_name, is_optional=True)
    streams = [files.open(name) for name in _names(form, request)]
    writers = [form(job, rows.schema, stream, errors or stream) for stream in streams]
    num_rows = 0
    for number, batch in _pieces(rows, len(writers)):
        writers[number].write(batch)
        num_rows += batch.num_rows
    for writer in writers:
        writer.close()
    return num_rows


def _check_fits(form: type[Format], request: ExportRequest) -> None:
    """Raise UserError if the format does not fit the other options, or the output."""
    if request.path == STDOUT and (request.num_files > 1 or form is HuggingFaceExport):
        raise UserError("-o: got stdout, which holds one file; give a path")
    check_target(request.path)
    if form is HuggingFaceExport and is_bucket(request.path):
        raise UserError("-o: got a URL, but a dataset is a folder here: give a path, and upload it with `hf upload`")


def _check_alone(folder: str, names: Sequence[str]) -> None:
    """Raise UserError if the folder has other files of rows than these."""
    there = glob.glob(os.path.join(glob.escape(folder), DATA, "*.parquet"))
    if others := sorted({*there} - {*names}):
        raise UserError(
            f"-o: {others[0]} is there already, and `datasets` reads its rows, too; delete it, or give another folder"
        )


def _check_columns(columns: Sequence[str], names: Sequence[str]) -> None:
    if unknown := [name for name in columns if name not in names]:
        raise UserError(f"--columns: no column {list_names(unknown)}; the output has {list_names(names)}")


def _format(request: ExportRequest) -> type[Format]:
    allowed = list_names(FORMATS)
    if request.to is None:
        ending = pathlib.Path(request.path).suffix
        found = [form for form in FORMATS.values() if form.suffix == ending]
        if not found:
            raise UserError(f"--to: missing, and {request.path!r} does not say it; must be one of {allowed}")
        return found[0]
    if request.to not in FORMATS:
        raise UserError(f"--to: got {request.to}; must be one of {allowed}")
    return FORMATS[request.to]


def _names(form: type[Format], request: ExportRequest) -> list[str]:
    """The files: `rows.jsonl`, or `rows-00000-of-00004.jsonl` and so on."""
    base, ending = os.path.splitext(request.path)
    if form is HuggingFaceExport:
        base = os.path.join(request.path, DATA, request.split)
        ending = form.suffix
    elif request.num_files == 1:
        return [request.path]
    return [f"{base}-{number:05}-of-{request.num_files:05}{ending}" for number in range(request.num_files)]


def _error_name(form: type[Format], request: ExportRequest) -> str | None:
    """The file of the error rows; None: they go where the others go, always so for stdout."""
    splits_errors = form.splits_errors and request.splits_errors
    if not splits_errors or request.path == STDOUT:
        return None
    base, ending = os.path.splitext(request.path)
    return f"{base}.errors{ending}"


def _pieces(rows: Rows, num_files: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches, each with the number of its file: as many rows in each, and those of one `row_index` in one file."""
    num_rows = rows.count() if num_files > 1 else 0
    number = 0
    seen = 0
    last = None
    for positions, batch in rows.batches():
        start = 0
        for place, row_index in enumerate(positions.tolist() if num_files > 1 else ()):
            if number < num_files - 1 and seen >= num_rows * (number + 1) / num_files and row_index != last:
                yield number, batch.slice(start, place - start)
                start = place
                number += 1
            seen += 1
            last = row_index
        yield number, batch.slice(start)
