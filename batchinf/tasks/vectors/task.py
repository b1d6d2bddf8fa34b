"""The tasks that store vectors, one output row for each input row: `embed`, `classify`, `reward`, `hidden_states`."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import BatchinfError, SpecError
from batchinf.model.model import Model
from batchinf.prompts import checks
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.openai.lines import EMBEDDINGS_URL
from batchinf.records import FloatArray, Prompt, Request, Reranking, Result
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import LIKELY_TOKENS, PoolingWanted, ShownColumns, Task
from batchinf.tasks.columns import (
    ITEM,
    Fields,
    concatenate,
    float_type,
    list_array,
    list_of,
    number_lists,
    offsets_of,
    strings,
    vector_lists,
)
from batchinf.tasks.compare import ComparedColumns
from batchinf.tasks.row_groups import RowGroups
from batchinf.tasks.vectors.prompts import EmbeddingPrompts
from batchinf.tasks.vectors.section import (
    LINES_COLUMN,
    OPENAI_LINES,
    SECTION,
    config_of,
    is_activated,
    pooling_of,
    projected_width,
    resolved_fields,
    stored_columns,
)

Values = npt.NDArray[Any]


class Pooled(Task):
    """A task that stores `Completion.values` of vLLM's pooling runner."""

    section = SECTION
    takes_generation_config = False
    batch_urls: ClassVar[tuple[str, ...]] = ()
    output_room = 0
    pooling_tasks: ClassVar[tuple[str, ...]]
    """vLLM's names of the pooling tasks that fit, the best first."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._pooling = pooling_of(spec)
        self.dtype = np.dtype(self._pooling.dtype)
        self.width = self._pooling.vector_width

    @property
    def pooling(self) -> PoolingWanted:
        pooling_type = self._pooling.pooling_type
        return PoolingWanted(
            tasks=self.pooling_tasks,
            convert=self.pooling_tasks[0],
            width=self.width,
            use_activation=is_activated(self.spec),
            dimensions=self._pooling.dimensions,
            seq_pooling_type=None if pooling_type is None else pooling_type.upper(),
        )

    def result_fields(self) -> Fields:
        """See `Task`. By default a row has one vector."""
        [name] = stored_columns(self.spec)
        return [(name, vector_of(self.dtype, self.width))]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """The columns of `result_fields`.

        values: of each result, [num_positions, width]; None: an error. num_tokens: of each result's prompt.
        """
        [name] = stored_columns(self.spec)
        return {name: vector_array(values, self.dtype, self.width)}

    @classmethod
    def resolve(cls, spec: JobSpec, model: Model) -> JobSpec:
        """See `Task`: widths and labels."""
        pooling = pooling_of(spec).model_copy(update=resolved_fields(spec, model))
        return spec.model_copy(update={SECTION.name: pooling})

    def check_input(self) -> None:
        """See `Task`. Requests of a batch file ask for text or for embeddings."""
        if self.spec.input.is_batch_file and not self.batch_urls:
            raise SpecError(f"input.format: {OPENAI_LINES.format(task=self.name)}")

    def width_error(self, got: int) -> SpecError:
        num_layers = len(self._pooling.layers or (0,))
        of_layers = f" for {num_layers} layers" if num_layers > 1 else ""
        return SpecError(
            f"pooling.width: got {self.pooling.width} numbers in a vector{of_layers}, but the model gives {got}; set "
            f"pooling.width to {got // num_layers}"
        )

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        pooling = self.pooling
        num_positions = len(request.prompt_token_ids) if pooling.all_positions else 1
        return draw(num_positions * pooling.width).reshape(num_positions, pooling.width)

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        """See `Task`. Vectors hardly compress."""
        pooling = self.pooling
        return 100 + pooling.width * self.dtype.itemsize * (LIKELY_TOKENS if pooling.all_positions else 1)

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """A request for each input, which generates nothing. A row without several inputs has one."""
        reranking = prompt.reranking or Reranking(0)
        inputs = prompt.inputs or (prompt.token_ids,)
        return [
            Request(
                prompt.row_index,
                index,
                token_ids,
                self.spec.sampling,
                dimensions=prompt.dimensions,
                use_activation=reranking.use_activation,
                token_type_start=type_start,
            )
            for index, (token_ids, type_start) in enumerate(itertools.zip_longest(inputs, reranking.token_type_starts))
        ]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`."""
        values = [None if result.completion is None else result.completion.values for result in results]
        num_tokens = [len(result.prompt.token_ids) for result in results]
        return self.result_batch(results, self.vector_columns(values, num_tokens))


def vector_of(dtype: npt.DTypeLike, width: int) -> pa.DataType:
    """Vectors of `width` numbers each."""
    return pa.list_(pa.field(ITEM, float_type(dtype)), width)


def vector_array(values: Sequence[Values | None], dtype: np.dtype[Any], width: int) -> pa.Array:
    """fixed_size_list[width] from values [1, width]; None becomes null."""
    nothing = np.zeros((1, width), dtype)
    check_shapes(values, width)
    flat = concatenate([nothing if value is None else value for value in values], dtype).reshape(-1)
    is_null = np.array([value is None for value in values], np.bool_)
    mask = pa.array(is_null) if is_null.any() else None
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), type=vector_of(dtype, width), mask=mask)


def vector_list_array(values: Sequence[Values | None], dtype: np.dtype[Any]) -> pa.ListArray:
    """list<list<float>> from values [1, any width], one vector each; None becomes null."""
    vectors = number_lists([value.reshape(-1) for value in values if value is not None], dtype)
    is_null = np.array([value is None for value in values], np.bool_)
    return list_array(offsets_of(~is_null), vectors, is_null)


def count_inputs(results: Sequence[Result]) -> pa.Array:
    """Number of tokens of the input of each result; null if its row has none."""
    inputs = (result.prompt.inputs[result.request_index : result.request_index + 1] for result in results)
    return pa.array([len(token_ids[0]) if token_ids else None for token_ids in inputs], pa.int32())


def check_shapes(values: Sequence[Values | None], width: int, num_positions: Sequence[int] | None = None) -> None:
    """Raise BatchinfError if values of the engine are not [num_positions, width]. num_positions: default 1 each."""
    for place, value in enumerate(values):
        expected = (1 if num_positions is None else num_positions[place], width)
        if value is not None and value.shape != expected:
            raise BatchinfError(f"the engine gave values of the shape {value.shape} where {expected} were expected")


class Embed(Pooled):
    """`embedding`: fixed_size_list<float32 or float16>[width], of length 1 unless the spec says otherwise.

    A line of a batch file has several inputs, and numbers of dimensions of its own. So their column is `embeddings`,
    list<list<float>>: a vector for each input.
    """

    name = "embed"
    takes_images = True
    vector_column = "embedding"
    compared = ComparedColumns(decides=("embedding", LINES_COLUMN))
    pooling_tasks = ("embed",)
    batch_urls = (EMBEDDINGS_URL,)

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._has_lines = stored_columns(spec) == (LINES_COLUMN,)
        self.prompts = EmbeddingPrompts if self._has_lines else PromptBuilder

    def why_unverified(self, model: Model) -> str | None:
        """See `Task`."""
        if projected_width(model, self.spec) is None:
            return None
        return f"'{model.name}' has a dense layer behind it (modules.json), which transformers does not apply"

    def result_fields(self) -> Fields:
        """See `Task`. A line has a vector for each input."""
        return (
            [(LINES_COLUMN, list_of(list_of(float_type(self.dtype))))] if self._has_lines else super().result_fields()
        )

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`. The result of one input of a line is a list of one vector."""
        if not self._has_lines:
            return super().encode(results)
        values = [None if result.completion is None else result.completion.values for result in results]
        columns = {LINES_COLUMN: vector_list_array(values, self.dtype), "num_prompt_tokens": count_inputs(results)}
        return self.result_batch(results, columns)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`. If a request of a line failed, the line has its error and no vectors."""
        if not self._has_lines:
            return super().reduce(columns, results)
        rows = RowGroups(results)
        arrays = {**rows.shared(), LINES_COLUMN: rows.joined(LINES_COLUMN)}
        return self.output_table(columns, {name: arrays[name] for name in self.computed_schema.names})

    def describe(self) -> str:
        length = "of length 1" if self._pooling.normalize else "as it is"
        each = "input of a line" if self._has_lines else "row"
        return f"task embed: a vector of {self.width:,} {self._pooling.dtype} for each {each}, {length}"

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        return checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=False, is_embedded=True)

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        values = super().scripted_values(request, draw)[:, : request.dimensions]
        if not self._pooling.normalize:
            return values
        unit: FloatArray = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        return unit


class Classify(Pooled):
    """`label` string and its `score` float32; `probabilities` (or `logits`) fixed_size_list<float32>[num_labels].

    The label is the class with the highest value, the first one of equals; null if all of a row's values are NaN.
    """

    name = "classify"
    takes_images = True
    compared = ComparedColumns(decides=("label",))
    pooling_tasks = ("classify",)

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._labels = np.array(self._pooling.labels or (), np.object_)

    @classmethod
    def other_meanings(cls, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
        """See `Task`: the numbers of other classes, or of the same ones in another order."""
        labels = [(spec.get("pooling") or {}).get("labels") for spec in (a, b)]
        return ("probabilities", "logits") if labels[0] != labels[1] else ()

    def describe(self) -> str:
        labels = self._pooling.labels or ()
        more = ", …" if len(labels) > 8 else ""
        [column] = stored_columns(self.spec)
        return f"task classify: {column} of {self.width:,} labels: {', '.join(labels[:8])}{more}"

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        yield from super().prompt_warnings(model, source)
        if self.width == 1:
            yield (
                f"warning: the model has one class, so that each row has the label '{self._labels[0]}'; task reward "
                "stores its number"
            )
        if is_activated(self.spec) and config_of(self.spec, model).get("problem_type") == "regression":
            yield (
                "warning: the model's config has problem_type regression: its numbers are no probabilities, and "
                "`probabilities` has them as they are; task reward stores them as rewards"
            )

    def width_error(self, got: int) -> SpecError:
        return SpecError(f"pooling.labels: got {self.width} classes, but the model has {got}; name each of them")

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        values = super().scripted_values(request, draw)
        if not is_activated(self.spec):
            return values
        shares: FloatArray = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return shares

    def result_fields(self) -> Fields:
        return [("label", pa.string()), ("score", pa.float32()), *super().result_fields()]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        vectors = super().vector_columns(values, num_tokens)
        best = [None if value is None or np.isnan(value).all() else int(np.nanargmax(value)) for value in values]
        labels = [None if place is None else str(self._labels[place]) for place in best]
        scores = [
            None if value is None or place is None else float(value[0, place])
            for value, place in zip(values, best, strict=True)
        ]
        return {"label": strings(labels), "score": pa.array(scores, pa.float32()), **vectors}


class Reward(Pooled):
    """`reward`: float32, or fixed_size_list<float32>[width] if the model's head has several outputs."""

    name = "reward"
    takes_images = True
    compared = ComparedColumns(decides=("reward",))
    # Some reward models give a number for each token; only the last token's counts.
    pooling_tasks = ("classify", "token_classify")

    def describe(self) -> str:
        return f"task reward: {'a number' if self.width == 1 else f'{self.width:,} numbers'} for each row"

    def result_fields(self) -> Fields:
        return [("reward", pa.float32())] if self.width == 1 else super().result_fields()

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        if self.width > 1:
            return super().vector_columns(values, num_tokens)
        check_shapes(values, self.width)
        return {"reward": pa.array([None if value is None else float(value[0, 0]) for value in values], pa.float32())}


class HiddenStates(Pooled):
    """`positions` list<int32>, from 0 in the prompt, and one vector for each: list<fixed_size_list<float>[width]>.

    The column is `hidden_states`, the model's output, or one like `hidden_states_8` for each layer of the spec.
    """

    name = "hidden_states"
    takes_images = True

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._names = stored_columns(spec)
        self._has_all = self._pooling.positions == "all"

    @property
    def shown_columns(self) -> ShownColumns:
        return ShownColumns(self._names)

    def describe(self) -> str:
        pooling = self._pooling
        which = "each token" if self._has_all else "the last token"
        if pooling.layers is not None:
            where = f"after {'layer' if len(pooling.layers) == 1 else 'layers'} {', '.join(map(str, pooling.layers))}"
        else:
            norm = "with the final norm" if pooling.final_norm else "before the norm"
            where = f"after the last layer, {norm}"
        return f"task hidden_states: {self.width:,} {pooling.dtype} for {which} of a prompt, {where}"

    @property
    def pooling(self) -> PoolingWanted:
        """See `Task`. The layers' vectors are concatenated in the order of the spec."""
        pooling = self._pooling
        return PoolingWanted(
            tasks=("token_embed",) if self._has_all else ("embed",),
            convert="embed",
            width=self.width * len(self._names),
            seq_pooling_type="LAST",
            tok_pooling_type="ALL",
            layers=pooling.layers or (() if pooling.final_norm else (-1,)),
            all_positions=self._has_all,
        )

    def result_fields(self) -> Fields:
        vectors = list_of(vector_of(self.dtype, self.width))
        return [("positions", list_of(pa.int32())), *((name, vectors) for name in self._names)]

    def vector_columns(self, values: Sequence[Values | None], num_tokens: Sequence[int]) -> dict[str, pa.Array]:
        """See `Pooled`. The engine concatenates the layers' vectors in the order of the spec."""
        width = self.width
        firsts = [0 if self._has_all else count - 1 for count in num_tokens]
        lengths = [count - first for first, count in zip(firsts, num_tokens, strict=True)]
        check_shapes(values, width * len(self._names), lengths)
        places = [
            None if value is None else np.arange(first, count, dtype=np.int32)
            for value, first, count in zip(values, firsts, num_tokens, strict=True)
        ]
        columns = {"positions": number_lists(places)}
        for number, name in enumerate(self._names):
            layer = slice(number * width, (number + 1) * width)
            vectors = [None if value is None else value[:, layer] for value in values]
            columns[name] = vector_lists(vectors, self.dtype, vector_of(self.dtype, width))
        return columns
