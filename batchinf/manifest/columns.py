"""The columns of a job's files. The header records them when the job begins, and every later version keeps to them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pyarrow as pa
from pydantic import AfterValidator

from batchinf.base.errors import OutputError
from batchinf.base.json_types import JsonText
from batchinf.source.cache import schema_of, schema_text
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import Task
from batchinf.tasks.registry import task_of

_schema_of = functools.lru_cache(maxsize=16)(schema_of)


def _checked(text: str) -> str:
    try:
        schema_of(text)
    except (pa.ArrowException, OSError) as error:
        raise ValueError("not an Arrow schema") from error
    return text


SchemaText = Annotated[JsonText, AfterValidator(_checked)]


@dataclass(frozen=True, slots=True)
class Columns:
    """The Arrow schemas of a job's files, as `schema_text` writes them."""

    journal: SchemaText
    """Of each journal segment."""
    part: SchemaText
    """Of each part."""

    @classmethod
    def of_new_job(cls, task: Task, carried: Sequence[pa.Field]) -> "Columns":
        """The columns that this version gives to a job. carried: those of the input that the output has, too."""
        return cls(journal=schema_text(task.result_schema), part=schema_text(task.output_schema(carried)))

    @property
    def journal_schema(self) -> pa.Schema:
        return _schema_of(self.journal)

    @property
    def part_schema(self) -> pa.Schema:
        return _schema_of(self.part)

    def task(self, spec: JobSpec) -> Task:
        """The task of a job with these columns: its output has no others."""
        task = task_of(spec)
        task.left_out = frozenset(task.computed_schema.names) - self._computed(spec).keys()
        return task

    def later(self, spec: JobSpec) -> list[str]:
        """The columns that only this version has. Raises OutputError if it lacks one, or gives it another type."""
        task = task_of(spec)
        later = dict[str, None]()
        journal = (_types(self.journal_schema), _types(task.result_schema))
        output = (self._computed(spec), _types(task.computed_schema))
        for begun, now in (journal, output):
            for name, type in begun.items():
                if now.get(name) != type:
                    writes = f"writes {now[name]}" if name in now else "does not have it"
                    raise OutputError(f"began with the column {name!r} of type {type}, and this version {writes}")
            later |= dict.fromkeys(name for name in now if name not in begun)
        return list(later)

    def _computed(self, spec: JobSpec) -> dict[str, pa.DataType]:
        """The columns of the output that do not come from the input, with their types."""
        carried = {*spec.output.keep_columns.values(), *([] if spec.input.id_column is None else ["id"])}
        return {name: type for name, type in _types(self.part_schema).items() if name not in carried}


def _types(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in schema}
