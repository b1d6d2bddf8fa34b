"""Logits or logprobs of the whole vocabulary, or of chosen tokens, at positions of the prompt or of what follows it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.records import Completion, Prompt, Request, Result, RowsWanted
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import TaskBase, result_schema, without_requests
from batchinf.tasks.columns import (
    INT32,
    ITEM,
    concatenate,
    error_columns,
    id_lists,
    key_columns,
    leaf_of,
    list_array,
    list_of,
    offsets_of,
    output_columns,
    prompt_columns,
    strings,
)
from batchinf.tasks.generate.task import seed_of

_GREEDY = SamplingSpec(temperature=0.0, max_tokens=1)


class Logits(TaskBase):
    """See `Task`. `spec.logits` is the resolved one: it knows its ids, or how large the vocabulary is."""

    joins_requests = True
    # Parquet's writer holds 12 bytes beside each number of a row group: 0.8 GB beside the usual 128 MiB of float16.
    row_group_bytes: int | None = 16 << 20

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        assert spec.logits is not None
        self._logits = spec.logits
        self._is_generated = spec.logits.positions == "generated"
        self._dtype = np.dtype(spec.logits.dtype)
        self.result_schema = result_schema(spec, _own_fields(spec))
        self.own = without_requests(self.result_schema)

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """One request. The row after a prompt's last token is that of its first output token."""
        num_tokens, sampling = len(prompt.token_ids), _GREEDY
        max_tokens, seed = 1, None
        if self._is_generated:
            sampling = prompt.sampling or self.spec.sampling
            max_tokens = sampling.max_tokens or max(1, max_model_len - num_tokens)
            seed = None if sampling.temperature == 0 else seed_of(sampling.seed, prompt.row_index, 0)
        logits = self._logits
        rows = RowsWanted(self._positions(prompt), logits.token_ids or None, logits.width, logits.dtype)
        return [Request(prompt.row_index, 0, prompt.token_ids, sampling, max_tokens, seed, rows=rows)]

    def _positions(self, prompt: Prompt) -> Sequence[int] | None:
        num_tokens = len(prompt.token_ids)
        match self._logits.positions:
            case "generated":
                return None
            case "all":
                return range(num_tokens)
            case "last":
                return range(num_tokens - 1, num_tokens)
        return prompt.positions or ()

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. A null is what was never produced."""
        completions = [result.completion for result in results]
        arrays = {
            **key_columns(results),
            **prompt_columns(results, self.spec.output.include_prompt),
            **output_columns(completions),
            **({} if self._is_generated else {"num_output_tokens": _nothing(completions)}),
            **error_columns(results),
            "finish_reason": strings([None if c is None else c.finish_reason for c in completions]),
            "positions": id_lists([None if c is None else _positions(c) for c in completions]),
            self._logits.values: self._rows([None if c is None else c.values for c in completions]),
        }
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def _rows(self, parts: Sequence[npt.NDArray[Any] | None]) -> pa.ListArray:
        """list<fixed_size_list<dtype>[width]> of parts [num_positions, width] each, which are copied once."""
        width = self._logits.width
        known = [part for part in parts if part is not None]
        for part in known:
            if part.shape[1] != width:
                raise ValueError(f"got rows of {part.shape[1]} numbers; the job's have {width}")
        flat = concatenate([part.reshape(-1) for part in known], self._dtype)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=row_type(pa.from_numpy_dtype(self._dtype), width))
        is_null = np.array([part is None for part in parts], np.bool_)
        return list_array(offsets_of([0 if part is None else len(part) for part in parts]), rows, is_null)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`: each result is a row."""
        return self.output_table(columns, {name: results.column(name) for name in results.column_names})

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """The rows plain and uncompressed: zstd makes them hardly smaller for half of the speed, and a split of float16
        is not read by DuckDB.
        """
        options, name = super().parquet_options(schema), self._logits.values
        paths = {field.name: leaf_of(field)[0] for field in schema}
        return options | {
            "compression": {path: "none" if column == name else "zstd" for column, path in paths.items()},
            "compression_level": {path: 1 for column, path in paths.items() if column != name},
            "use_byte_stream_split": [path for path in options["use_byte_stream_split"] if path != paths[name]],
        }

    def warm_up_request(self) -> Request:
        """A small request of the job's own shape."""
        prompt = Prompt(-1, [1] * 8, None, None, positions=None)
        if self.spec.logits is not None and not isinstance(self.spec.logits.positions, str):
            prompt = Prompt(-1, [1] * 8, None, None, positions=(0, 7))
        [request] = self.expand(prompt, 12)
        return request


def row_type(item: pa.DataType, width: int) -> pa.DataType:
    """Without nulls inside: it is written twice as fast, and read four times."""
    return pa.list_(pa.field(ITEM, item, nullable=False), width)


def _nothing(completions: Sequence[Completion | None]) -> pa.Int32Array:
    """The engine draws a token behind each prompt, of which nobody hears."""
    return pa.array([None if completion is None else 0 for completion in completions], pa.int32())


def _positions(completion: Completion) -> npt.NDArray[np.int32]:
    """int32 [num_positions]: the token after which each row comes, counted from the prompt's first."""
    rows, request = completion.request.rows, completion.request
    assert rows is not None
    if rows.positions is not None:
        return np.asarray(rows.positions, np.int32)
    first = len(request.prompt_token_ids) - 1
    return np.arange(first, first + len(completion.token_ids), dtype=INT32)


def _own_fields(spec: JobSpec) -> list[tuple[str, pa.DataType]]:
    logits = spec.logits
    assert logits is not None
    item = pa.float16() if logits.dtype == "float16" else pa.float32()
    generated = [("token_ids", list_of(pa.int32())), ("finish_reason", pa.string())]
    return [
        ("positions", list_of(pa.int32())),
        (logits.values, list_of(row_type(item, logits.width))),
        *(generated if logits.positions == "generated" else []),
    ]
