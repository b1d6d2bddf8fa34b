"""What is done with a row: each task is one file that makes requests of it, and output rows of their results."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from batchinf.records import Prompt, Request, Result
from batchinf.spec.job import JobSpec
from batchinf.tasks.generate.task import Generate
from batchinf.tasks.logits.task import Logits
from batchinf.tasks.score.task import Score
from batchinf.tasks.vectors.task import Classify, Embed, HiddenStates, Reward

_TASKS: dict[str, Callable[[JobSpec], "Task"]] = {
    "generate": Generate,
    "score": Score,
    "logits": Logits,
    "embed": Embed,
    "classify": Classify,
    "reward": Reward,
    "hidden_states": HiddenStates,
}


class Task(Protocol):
    """Expand, encode, reduce. Pure: what comes out depends on the spec and the arguments alone.

    result_schema: what the journal holds, one row for each result. It begins with `row_index` int64, `request_index`
    int32, `num_requests` int32, and has `num_prompt_tokens` and `num_output_tokens` int32 and `error_type` string.
    joins_requests: each input row is one output row, made of all of its results; else each result is one, and has
    `sample_index`. Output rows have `num_prompt_tokens`, `num_output_tokens` and `error_type`, too. row_group_bytes: of
    its parts; None is the usual.
    """

    result_schema: pa.Schema
    joins_requests: bool
    row_group_bytes: int | None

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """All requests of a row, by `request_index` from 0; at least one, and as many for a prompt with an error."""

    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """Results, in their order, as a batch of `result_schema`. Raises OverflowError over 2**31 - 1 list items."""

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """The output's columns, given those that come from the source. Raises SpecError where names collide."""

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """The output rows, as `output_schema` has them, for a run of results sorted by (row_index, request_index).

        columns: one row for each distinct `row_index` in the results, in order: `id` first if the job has one, then
        the kept columns. None if there are neither. A run may begin and end within a row's requests, unless the task
        joins them.
        """

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """How `pyarrow.parquet.ParquetWriter` is to store tables of this output schema."""


def get_task(spec: JobSpec) -> Task:
    """The task that a resolved spec names."""
    return _TASKS[spec.task](spec)
