"""The tasks that store vectors, one output row for each input row: `embed`, `classify`, `reward`, `hidden_states`."""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import BatchinfError
from batchinf.records import Prompt, Request, Result
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import TaskBase, result_schema, without_requests
from batchinf.tasks.columns import (
    ITEM,
    concatenate,
    error_columns,
    id_lists,
    key_columns,
    list_of,
    offsets_of,
    prompt_columns,
    strings,
)

Values = npt.NDArray[Any]


class Pooled(TaskBase, abc.ABC):
    """A task of which each file says what it keeps of `Completion.values`: `vector_fields` and `vector_columns`."""

    joins_requests = True  # a row has one request, and no samples

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self.dtype = np.dtype(spec.pooling.dtype)
        self.width = spec.pooling.vector_width
        self.result_schema = result_schema(spec, self.vector_fields())
        self.own = without_requests(self.result_schema)

    @abc.abstractmethod
    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """The task's own columns."""

    @abc.abstractmethod
    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """Them, from what the engine gave for each result, [num_positions, width], or None where it gave nothing.

        num_tokens: in each result's prompt.
        """

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """One request, which generates nothing."""
        return [Request(prompt.row_index, 0, prompt.token_ids, self.spec.sampling, max_tokens=1, seed=None)]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`."""
        values = [None if result.completion is None else result.completion.values for result in results]
        counts = pa.array([None if result.completion is None else 0 for result in results], pa.int32())
        arrays = {
            **key_columns(results),
            **prompt_columns(results, self.spec.output.include_prompt),
            **self.vector_columns(values, [len(result.prompt.token_ids) for result in results]),
            "num_output_tokens": counts,
            **error_columns(results),
        }
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`: each result is a row."""
        return self.output_table(columns, {name: results.column(name) for name in results.column_names})


def vector_of(dtype: npt.DTypeLike, width: int) -> pa.DataType:
    """Vectors of `width` numbers each."""
    return pa.list_(pa.field(ITEM, pa.from_numpy_dtype(dtype)), width)


def vector_array(values: Sequence[Values | None], dtype: np.dtype[Any], width: int) -> pa.Array:
    """fixed_size_list[width], one vector for each [1, width]; null where there is none."""
    nothing = np.zeros((1, width), dtype)
    check_shapes(values, width)
    flat = concatenate([nothing if value is None else value for value in values], dtype).reshape(-1)
    is_null = np.array([value is None for value in values], np.bool_)
    mask = pa.array(is_null) if is_null.any() else None
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=vector_of(dtype, width), mask=mask)


def vector_lists(values: Sequence[Values | None], dtype: np.dtype[Any], width: int) -> pa.Array:
    """list<fixed_size_list[width]>, as many vectors as each [num_positions, width] has; null where there is none."""
    flat = concatenate([value for value in values if value is not None], dtype).reshape(-1)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=vector_of(dtype, width))
    offsets = offsets_of([0 if value is None else len(value) for value in values])
    is_null = np.array([value is None for value in values], np.bool_)
    mask = pa.array(is_null) if is_null.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), vectors, type=list_of(vectors.type), mask=mask)


def check_shapes(values: Sequence[Values | None], width: int, num_positions: Sequence[int] | None = None) -> None:
    """Raise BatchinfError where the engine gave another shape than [num_positions (1), width]."""
    for place, value in enumerate(values):
        expected = (1 if num_positions is None else num_positions[place], width)
        if value is not None and value.shape != expected:
            raise BatchinfError(f"the engine gave values of the shape {value.shape} where {expected} were expected")


class Embed(Pooled):
    """`embedding`: fixed_size_list<float32 or float16>[width], of length 1 unless the spec says otherwise."""

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("embedding", vector_of(self.dtype, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        return {"embedding": vector_array(values, self.dtype, self.width)}


_FLOAT = np.dtype(np.float32)


class Classify(Pooled):
    """`label` string and its `score` float32; `probabilities` (or `logits`) fixed_size_list<float32>[num_labels].

    The label is the class with the highest value, the first of equals; null where all of a row's values are NaN.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._labels = np.array(spec.pooling.labels or (), np.object_)
        self._column = "logits" if spec.pooling.use_activation is False else "probabilities"
        super().__init__(spec)

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("label", pa.string()), ("score", pa.float32()), (self._column, vector_of(_FLOAT, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        vectors = vector_array(values, _FLOAT, self.width)
        best = [None if value is None or np.isnan(value).all() else int(np.nanargmax(value)) for value in values]
        labels = [None if place is None else str(self._labels[place]) for place in best]
        scores = [
            None if value is None or place is None else float(value[0, place])
            for value, place in zip(values, best, strict=True)
        ]
        return {"label": strings(labels), "score": pa.array(scores, pa.float32()), self._column: vectors}


class Reward(Pooled):
    """`reward`: float32, or fixed_size_list<float32>[width] where the model's head has several outputs."""

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        return [("reward", pa.float32() if self.width == 1 else vector_of(_FLOAT, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`."""
        if self.width > 1:
            return {"reward": vector_array(values, _FLOAT, self.width)}
        check_shapes(values, self.width)
        return {"reward": pa.array([None if value is None else float(value[0, 0]) for value in values], pa.float32())}


class HiddenStates(Pooled):
    """`positions` list<int32>, from 0 in the prompt, and a list of as many vectors: `hidden_states`, the model's
    output, or for each of the spec's layers a column `hidden_states_8`: list<fixed_size_list<float>[width]>.
    """

    def __init__(self, spec: JobSpec) -> None:
        layers = spec.pooling.layers
        self._names = ["hidden_states"] if layers is None else [f"hidden_states_{layer}" for layer in layers]
        self._has_all = spec.pooling.positions == "all"
        super().__init__(spec)

    def vector_fields(self) -> list[tuple[str, pa.DataType]]:
        """See `Pooled`."""
        vectors = list_of(vector_of(self.dtype, self.width))
        return [("positions", list_of(pa.int32())), *((name, vectors) for name in self._names)]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`. The engine gives the layers' vectors side by side, in the order of the spec."""
        width, firsts = self.width, [0 if self._has_all else count - 1 for count in num_tokens]
        lengths = [count - first for first, count in zip(firsts, num_tokens, strict=True)]
        check_shapes(values, width * len(self._names), lengths)
        places = [
            None if value is None else np.arange(first, count, dtype=np.int32)
            for value, first, count in zip(values, firsts, num_tokens, strict=True)
        ]
        columns = {
            name: vector_lists(
                [None if value is None else value[:, number * width : (number + 1) * width] for value in values],
                self.dtype,
                width,
            )
            for number, name in enumerate(self._names)
        }
        return {"positions": id_lists(places), **columns}
