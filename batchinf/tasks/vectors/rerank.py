"""Task `rerank`: scores of documents for a query, by a cross-encoder or by the cosine of embeddings."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import SpecError
from batchinf.model.model import Model
from batchinf.prompts import checks
from batchinf.prompts.openai.lines import RERANK_URL, SCORE_URL
from batchinf.records import FloatArray, Prompt, Request, Reranking, Result
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec
from batchinf.tasks.base import PoolingWanted, ShownColumns
from batchinf.tasks.columns import (
    Fields,
    list_of,
    number_lists,
    result_schema,
    without_requests,
)
from batchinf.tasks.compare import ComparedColumns
from batchinf.tasks.row_groups import RowGroups
from batchinf.tasks.vectors.rerank_prompts import RerankPrompts
from batchinf.tasks.vectors.section import CROSS_ENCODER, RANKING, RERANK_COLUMNS, is_activated, stored_columns
from batchinf.tasks.vectors.task import Pooled, check_shapes, count_inputs, vector_list_array

_FLOAT32 = np.dtype(np.float32)
_LIKELY_DOCUMENTS = 10
_LEAST_LENGTH = 1e-8  # of vectors, in torch's cosine
# Columns of results: the number or the vector of an input, and what becomes of a row's.
_SCORES = RERANK_COLUMNS[1]
_VECTORS = "embeddings"


class Rerank(Pooled):
    """`relevance_scores` list<float32>, in the order of the documents, and `ranking` list<int32>: their places from 0,
    the best first. With `input.document_column`, a row has one `relevance_score`, float32.

    A cross-encoder has a request for each document, a bi-encoder one for each query and each document.
    """

    name = "rerank"
    prompts = RerankPrompts
    compared = ComparedColumns(decides=RERANK_COLUMNS, others=(RANKING,))
    batch_urls = (RERANK_URL, SCORE_URL)
    pooling_tasks = ("classify",)

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        where = spec.input
        self._is_cross = self._pooling.score_type == CROSS_ENCODER
        self._is_pair = where.document_column is not None
        names = where.given(("documents_column", "document_column"))
        self.input_columns = tuple((f"input.{name}", getattr(where, name)) for name in names)

    @property
    def pooling(self) -> PoolingWanted:
        """See `Task`."""
        wanted = super().pooling
        return wanted if self._is_cross else replace(wanted, tasks=("embed",), convert="embed")

    def check_input(self) -> None:
        """See `Task`. Without lines, columns must be named."""
        if not self.spec.input.is_batch_file and self.spec.input.query_column is None:
            raise SpecError(
                "input.query_column: missing; name the column of the query, and in input.documents_column that of the "
                "documents"
            )

    def describe(self) -> str:
        if not self._is_cross:
            how = "the cosine of two embeddings"
        else:
            how = f"a cross-encoder's number, {'with' if is_activated(self.spec) else 'without'} its activation"
        return f"task rerank: a score for each document: {how}"

    def width_error(self, got: int) -> SpecError:
        if not self._is_cross:
            return super().width_error(got)
        return SpecError(f"model.name: the model's head has {got} labels; task rerank needs one with 1")

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        """See `Task`."""
        return 100 + 8 * (1 if self._is_pair else _LIKELY_DOCUMENTS)

    # -- prompts and requests ------------------------------------------------------------------------------------------

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        return checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=False, is_embedded=True)

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        values = super().scripted_values(request, draw)
        is_raw = not is_activated(self.spec) if request.use_activation is None else not request.use_activation
        if not self._is_cross or is_raw:
            return values
        shares: FloatArray = np.reciprocal(1 + np.exp(-values), dtype=np.float32)
        return shares

    # -- results and output rows ---------------------------------------------------------------------------------------

    def result_fields(self) -> Fields:
        """See `Task`. A result has the score of a pair; or the vector of a text, in a list of one, and no score yet."""
        vectors = [] if self._is_cross else [(_VECTORS, list_of(list_of(pa.float32())))]
        return [self._score_field, *vectors, ("num_queries", pa.int32()), ("top_n", pa.int32())]

    @property
    def _score_field(self) -> tuple[str, pa.DataType]:
        [name] = stored_columns(self.spec)
        return name, pa.float32() if self._is_pair else list_of(pa.float32())

    def _output_fields(self) -> Fields:
        return [self._score_field, *([] if self._is_pair else [(RANKING, list_of(pa.int32()))])]

    @functools.cached_property
    def computed_schema(self) -> pa.Schema:
        return without_requests(result_schema(self.spec, self._output_fields()))

    @property
    def shown_columns(self) -> ShownColumns:
        return ShownColumns(tuple(name for name, _ in self._output_fields()))

    def _score(self, value: Any) -> Any:
        """That of a cross-encoder."""
        return None if value is None or not self._is_cross else value[0]

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """See `Task.encode`."""
        values = [None if result.completion is None else result.completion.values for result in results]
        check_shapes(values, self.width)
        rerankings = [result.prompt.reranking or Reranking(0) for result in results]
        columns = {
            "num_prompt_tokens": count_inputs(results),
            "num_queries": pa.array([reranking.num_queries for reranking in rerankings], pa.int32()),
            "top_n": pa.array([reranking.top_n for reranking in rerankings], pa.int32()),
        }
        columns |= self._score_column([self._score(value) for value in values])
        if not self._is_cross:
            columns[_VECTORS] = vector_list_array(values, _FLOAT32)
        return self.result_batch(results, columns)

    def _score_column(self, rows: "Sequence[FloatArray | None]") -> dict[str, pa.Array]:
        """The scores of each row or result as a column; None becomes null."""
        name, type = self._score_field
        if self._is_pair:
            return {name: pa.array([None if row is None else row[0] for row in rows], type)}
        return {name: number_lists(rows, _FLOAT32)}

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """See `Task.reduce`. If a request of a row failed, the row has its error and no scores."""
        rows = RowGroups(results)
        arrays = rows.shared()
        if not self._is_cross:
            arrays |= self._score_column(self._cosines(rows))
        elif not self._is_pair:
            arrays[_SCORES] = rows.joined(_SCORES)
        if not self._is_pair:
            scores = [None if row is None else np.array(row, np.float32) for row in arrays[_SCORES].to_pylist()]
            top_ns = rows.first("top_n").to_pylist()
            arrays[RANKING] = number_lists(
                [
                    None if row is None or top_n is None else ranked(row)[:top_n]
                    for row, top_n in zip(scores, top_ns, strict=True)
                ]
            )
        return self.output_table(columns, {name: arrays[name] for name in self.computed_schema.names})

    def _cosines(self, rows: RowGroups) -> "list[FloatArray | None]":
        """The scores of a row's documents, from the vectors of its queries and its documents."""
        lists = rows.joined(_VECTORS)
        vectors = lists.flatten().flatten().to_numpy(zero_copy_only=False).reshape(-1, self.width)
        found: list[FloatArray | None] = []
        start = 0
        lengths = lists.value_lengths().to_pylist()
        for length, num_queries in zip(lengths, rows.first("num_queries").to_pylist(), strict=True):
            if length is None:
                found.append(None)
                continue
            of_row = vectors[start : start + length]
            start += length
            found.append(cosines(of_row[:num_queries], of_row[num_queries:]))
        return found


def cosines(queries: npt.NDArray[Any], documents: npt.NDArray[Any]) -> FloatArray:
    """float32 [num_documents], from vectors of one query or of as many as documents, as torch computes it."""
    one = queries.astype(np.float64)
    other = documents.astype(np.float64)
    lengths = [np.maximum(np.linalg.norm(each, axis=1), _LEAST_LENGTH) for each in (one, other)]
    found: FloatArray = ((one * other).sum(axis=1) / lengths[0] / lengths[1]).astype(np.float32)
    return found


def ranked(scores: FloatArray) -> npt.NDArray[np.int32]:
    """The places of the scores, the greatest first; equal ones in their order, and NaN last."""
    return np.argsort(-scores, kind="stable").astype(np.int32)
