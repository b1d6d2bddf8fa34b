"""Warnings about the input's columns: values of several types, and known columns that a job leaves out.

Two ids that would be the same as text are refused. `start`, `open` and `validate` use it.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchinf.base.errors import InputError, SpecError
from batchinf.base.text import list_names, one_line
from batchinf.job.job import carried_columns
from batchinf.prompts.openai.lines import COLUMNS
from batchinf.prompts.renderer import named_columns
from batchinf.schedule.predicate import Predicate, PredicateError
from batchinf.source.rows import Source
from batchinf.source.types import extension_of, is_json_column, odd_value
from batchinf.spec.input import COLUMN_FORMS, PROMPT_FORMS
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import PER_ROW_FIELDS
from batchinf.tasks.base import Task

_READ_ROWS = 4096
# The first characters of JSON texts that are no JSON strings: only such a text can equal another value's JSON text.
_OF_VALUES = frozenset("-0123456789[{tfNI")


# Columns of well-known datasets: of conversations, of preferences, of requests.
_KNOWN = frozenset({
    "tools", "functions", "documents", "images", "image", "videos", "video", "audios", "audio", "chosen", "rejected",
    "chat_template_kwargs", "response_format", "tool_choice", *PER_ROW_FIELDS,
})  # fmt: skip
# A column of a prompt → those that belong to the prompt, too.
_BESIDE = {
    "instruction": {"input", "system", "history"}, "messages": {"system"}, "conversations": {"system"},
}  # fmt: skip


def column_warnings(task: Task, source: Source) -> Iterator[str]:
    """A line for each column of several types that the job uses, and one for columns that it may miss."""
    yield from _mixed_type_warnings(task.spec, source)
    yield from _bad_file_warnings(task.spec, source)
    used = {name for _, name in named_columns(task.spec, task.input_columns)}
    if task.spec.input.is_batch_file:
        if unused := [name for name in source.schema.names if name not in used]:
            yield (
                f"warning: lines of {task.spec.input.path} have {list_names(unused)} beside {', '.join(COLUMNS)}; the "
                f"job does not use {'it' if len(unused) == 1 else 'them'}; output.keep_columns copies a column"
            )
        return
    known = _KNOWN.union(*(_BESIDE.get(name, ()) for name in used))
    unused = [name for name in source.schema.names if name in known - used]
    if unused:
        yield (
            f"warning: the input has {list_names(unused)}, which nothing in the spec names, so the job does not use "
            f"{'it' if len(unused) == 1 else 'them'}; input.messages or input.prompt_template can put a column into "
            "the prompt, sampling.columns can take a setting from one, and output.keep_columns copies it"
        )


def _bad_file_warnings(spec: JobSpec, source: Source) -> Iterator[str]:
    """A warning for the files of which no row can have a prompt, as far as their columns say it."""
    where = spec.input
    needed = [getattr(where, form) for form in where.given(COLUMN_FORMS)]
    if not where.given(PROMPT_FORMS) and not where.has_own_conversations:
        needed = [spec.prompt_column]
    for names, files in source.files_by_columns.items():
        missing = [name for name in needed if name not in names]
        why = "no row can be read" if not names else f"no row has the column '{missing[0]}'" if missing else None
        if why is not None:
            yield f"warning: {list_names(files)}: {why}, so every row there becomes an error row; correct or move it"


def _mixed_type_warnings(spec: JobSpec, source: Source) -> Iterator[str]:
    for name in _used(spec, source.schema):
        field = source.schema.field(name)
        if is_json_column(field):
            yield (
                f"warning: the column '{name}' holds values of several types ({odd_value(field)}): texts stay as they "
                "are, and any other value becomes its JSON text"
            )


def _used(spec: JobSpec, schema: pa.Schema) -> list[str]:
    names = carried_columns(spec)
    if spec.input.where is not None:
        with contextlib.suppress(PredicateError):  # raised where rows are chosen
            names += Predicate(spec.input.where, schema, "input").columns
    return [name for name in dict.fromkeys(names) if name in schema.names]


def refuse_unstorable(spec: JobSpec, schema: pa.Schema) -> None:
    """Raise SpecError for an id or a kept column whose type the output cannot have."""
    ids = [("input.id_column", spec.input.id_column)] if spec.input.id_column is not None else []
    for place, name in (*ids, *(("output.keep_columns", name) for name in spec.output.keep_columns)):
        field = schema.field(name)
        if (extension := extension_of(field)) is not None:
            raise SpecError(
                f"{place}: the column '{name}' has the extension type {extension}, which the output would lose; write "
                f"it as {field.type}, or leave it out"
            )
        try:
            # The header alone: to make an empty table would import pandas, 0.1 s and 45 MiB in every start.
            pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
        except (pa.ArrowException, OSError) as error:
            raise SpecError(
                f"{place}: the column '{name}' has the type {field.type}, which Parquet cannot hold "
                f"({one_line(error, 200)}); write it as another type, or leave it out"
            ) from error


def refuse_equal_ids(column: str, source: Source) -> None:
    """Raise InputError if the id of one row is a text, and that of another row a value with this text."""
    if not is_json_column(source.schema.field(column)):
        return
    equal = _equal_hashes(column, source)
    for row_index in range(source.num_rows) if equal else ():
        [row] = source.read(row_index, row_index + 1, [column])
        text = _text_of_value(row.values.get(column))
        if text is not None and _hash(text) in equal:
            raise InputError(
                f"input.id_column: row {row_index:,} has {text} in '{column}', and another row has the text "
                f"{json.dumps(text)}: stored as text, these ids would be equal; write all ids as texts"
            )


def _equal_hashes(column: str, source: Source) -> set[int]:
    """Hashes that an id that is a text and the JSON text of an id that is none have in common."""
    of_texts = [np.zeros(0, np.uint64)]
    of_values = [np.zeros(0, np.uint64)]
    for start in range(0, source.num_rows, _READ_ROWS):
        rows = source.read(start, min(start + _READ_ROWS, source.num_rows), [column])
        ids = [row.values.get(column) for row in rows]
        of_texts.append(_hashes(id for id in ids if isinstance(id, str) and id[:1] in _OF_VALUES))
        of_values.append(_hashes(text for id in ids if (text := _text_of_value(id)) is not None))
    return set(np.intersect1d(np.concatenate(of_texts), np.concatenate(of_values)).tolist())


def _text_of_value(id: object) -> str | None:
    return None if id is None or isinstance(id, str) else json.dumps(id, ensure_ascii=False)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="replace"))


def _hashes(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.unique(np.array([_hash(text) for text in texts], np.uint64))
