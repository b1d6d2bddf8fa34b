"""What the tasks have in common: the output's columns around their own, and how they are stored."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchinf.base.errors import SpecError
from batchinf.prompts import encoder
from batchinf.spec.job import JobSpec
from batchinf.tasks.columns import leaf_of, list_of, repeat

_OF_RESULTS = frozenset({"request_index", "num_requests", encoder.SECOND_BOS_COLUMN})
_KEYS = ("row_index", "prompt_hash", "sample_index")
# Kept out of dictionaries: nearly every value is different.
_UNIQUE = frozenset({"id", "row_index", "prompt_hash", "prompt", "text", "reasoning", "cumulative_logprob"})
_NO_STATISTICS = frozenset({"prompt", "text", "reasoning", "error_message"})


def result_schema(
    spec: JobSpec, own: Sequence[tuple[str, pa.DataType]], *, may_truncate: bool | None = None
) -> pa.Schema:
    """What the journal holds of a task: keys, the prompt, what is the task's own, counts and errors.

    may_truncate: whether `prompt_truncated` is there; default: where `input.on_overlong` cuts.
    """
    prompt = [("prompt", pa.string()), ("prompt_token_ids", list_of(pa.int32()))]
    may_truncate = spec.input.on_overlong != "error" if may_truncate is None else may_truncate
    fields = [
        ("row_index", pa.int64()),
        ("request_index", pa.int32()),
        ("num_requests", pa.int32()),
        ("prompt_hash", pa.int64()),
        *(prompt if spec.output.include_prompt else []),
        *own,
        ("num_prompt_tokens", pa.int32()),
        *([("prompt_truncated", pa.bool_())] if may_truncate else []),
        ("num_output_tokens", pa.int32()),
        ("error_type", pa.string()),
        ("error_message", pa.string()),
        ("attempts", pa.int32()),
        (encoder.SECOND_BOS_COLUMN, pa.bool_()),
    ]
    return pa.schema(fields)


def without_requests(schema: pa.Schema) -> pa.Schema:
    """The fields of a result that are those of an output row too."""
    return pa.schema([field for field in schema if field.name not in _OF_RESULTS])


class TaskBase:
    """A task's output: `id`, keys, kept columns, and then what is its own.

    own: the output's columns that do not come from the source; the keys among them are the first.
    """

    joins_requests = False
    row_group_bytes: int | None = None
    result_schema: pa.Schema
    own: pa.Schema

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._has_id = spec.input.id_column is not None
        self._new_names = spec.output.keep_columns

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """id · row_index · prompt_hash · sample_index where there is one · kept columns · everything else."""
        ids, kept = (columns[:1], columns[1:]) if self._has_id else ((), columns)
        kept = [field.with_name(self._name(field.name)) for field in kept]
        keys = [field for field in self.own if field.name in _KEYS]
        others = [field for field in self.own if field.name not in _KEYS]
        fields = [*(field.with_name("id") for field in ids), *keys, *kept, *others]
        names = [field.name for field in fields]
        taken = sorted({field.name for field in kept if names.count(field.name) > 1})
        if taken:
            names_of = {new: column for column, new in self._new_names.items()}
            own, other = ("columns", "other names") if len(taken) > 1 else ("a column", "another name")
            raise SpecError(
                f"output.keep_columns: got {', '.join(taken)}, which the output has {own} of its own for; "
                f"give {'them' if len(taken) > 1 else 'it'} {other}, as in "
                f"{{{names_of.get(taken[0], taken[0])}: input_{taken[0]}}}"
            )
        return pa.schema([pa.field(field.name, field.type) for field in fields])

    def output_table(self, columns: pa.Table | None, own: dict[str, Any]) -> pa.Table:
        """The task's own columns, by name, beside those of the source: see `Task.reduce`.

        columns: a row for each distinct `row_index` of `own`, whose rows are sorted by it.
        """
        schema = self.output_schema([] if columns is None else list(columns.schema))
        arrays = dict(own)
        if columns is not None:
            columns = repeat(columns, arrays["row_index"].to_numpy())
            kept = columns.column_names[1:] if self._has_id else columns.column_names
            names = [*(["id"] if self._has_id else []), *map(self._name, kept)]
            arrays |= dict(zip(names, columns.columns, strict=True))
        return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """zstd 1, byte-stream split on numbers in lists, dictionaries where values repeat, checksums on pages."""
        own = {*self.own.names} - {"sample_index"}
        flat = [field.name for field in schema if not pa.types.is_nested(field.type)]
        leaves = [leaf_of(field) for field in schema if field.name in own and pa.types.is_nested(field.type)]
        # DuckDB reads no split float16, which would be 1.55 bytes a logprob against 1.77.
        split = [
            path for path, item in leaves if pa.types.is_primitive(item) and item not in (pa.float16(), pa.bool_())
        ]
        numbers = [
            name
            for name in flat
            if name in own and (name == "prompt_hash" or self.own.field(name).type in (pa.float64(), pa.float32()))
        ]
        return {
            "compression": "zstd",
            "compression_level": 1,
            "use_dictionary": [name for name in flat if name not in _UNIQUE and name not in numbers],
            "use_byte_stream_split": [*split, *numbers],
            "write_statistics": [name for name in flat if name not in _NO_STATISTICS],
            "write_page_checksum": True,
        }

    def _name(self, column: str) -> str:
        """What a kept column is called in the output."""
        return self._new_names.get(column, column)
