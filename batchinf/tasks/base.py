"""The task: what a job does with each row. Each task is a subclass of `Task` in a module or folder of its own.

Code outside `tasks/` asks the task of a spec (`registry.task_of`) and never looks at the task's name or section.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from batchinf.base.errors import SpecError
from batchinf.model.identity import Model
from batchinf.model.memory import scored_tokens_at_once
from batchinf.prompts import checks, encoder
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import FloatArray, Prompt, Request, Result, RowsWanted
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.tasks.changes import NO_COMPARISON, Comparison
from batchinf.tasks.columns import leaf_of, list_of, repeat
from batchinf.tasks.verification import NoVerification, Verification

_OF_RESULTS = frozenset({"request_index", "num_requests", encoder.SECOND_BOS_COLUMN})
_KEYS = ("row_index", "prompt_hash", "sample_index")
# Kept out of dictionaries: nearly every value is different.
_UNIQUE = frozenset({"id", "row_index", "prompt_hash", "prompt", "text", "reasoning", "cumulative_logprob"})
_NO_STATISTICS = frozenset({"prompt", "text", "reasoning", "error_message"})
# A guess at the number of tokens of a prompt or an output whose length is unknown.
LIKELY_TOKENS = 256


def result_schema(
    spec: JobSpec, own: Sequence[tuple[str, pa.DataType]], *, may_truncate: bool | None = None
) -> pa.Schema:
    """The journal's columns of a task: keys, the prompt, the task's own columns, counts and errors.

    may_truncate: whether there is a column `prompt_truncated`; default: if `input.on_overlong` cuts.
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


@dataclass(frozen=True, slots=True)
class PoolingWanted:
    """What a task asks of vLLM's pooling runner.

    tasks: vLLM's names of the pooling tasks that will do, the best first. convert: vLLM's engine argument.
    use_activation, dimensions: of each request. seq_pooling_type, tok_pooling_type: of the pooler; None keeps the
    model's own. layers: the layers whose states are wanted; -1 is the last one before the final norm; empty is the
    model's output. all_positions: whether values of all of a prompt's tokens are wanted, not of the last one only.
    width: numbers for each position.
    """

    tasks: tuple[str, ...]
    convert: str
    width: int
    use_activation: bool = False
    dimensions: int | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    layers: tuple[int, ...] = ()
    all_positions: bool = False


class Task(abc.ABC):
    """What a job does with each row, for one spec. Results depend on the spec and on the arguments alone.

    Properties of a spec that is not resolved yet may be asked for; requests and schemas need the resolved one.

    name: as in the field `task` of a spec. section: its section of the spec, if it has one.
    makes_text: whether its completions are decoded to text, and judged against the job's structure.
    scores_prompts: whether its prompts have a `scoring`.
    takes_generation_config: whether the model's `generation_config` gives defaults for the section `sampling`.
    output_room: tokens that must fit `max_model_len` behind a prompt.
    joins_requests: each input row is one output row, made of all of its results; else each result is one, and has
    `sample_index`.
    row_group_bytes: size of a row group of its parts; None is the usual size.
    has_wide_results: whether a result can take several MB, so that the writer needs larger buffers.
    default_max_output_bytes: of `output.max_output_bytes`; None is no limit.
    comparison: how `diff` compares two jobs of the task.
    verification: what `verify` compares of its rows.
    """

    name: ClassVar[str]
    section: ClassVar[TaskSection | None] = None
    makes_text: ClassVar[bool] = False
    scores_prompts: ClassVar[bool] = False
    takes_generation_config: ClassVar[bool] = True
    output_room: ClassVar[int] = 1
    joins_requests: ClassVar[bool] = True
    row_group_bytes: ClassVar[int | None] = None
    has_wide_results: ClassVar[bool] = False
    default_max_output_bytes: ClassVar[int | None] = None
    comparison: ClassVar[Comparison] = NO_COMPARISON
    verification: ClassVar[type[Verification]] = NoVerification

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._has_id = spec.input.id_column is not None
        self._new_names = spec.output.keep_columns

    # -- the spec ------------------------------------------------------------------------------------------------------

    @property
    def draws_tokens(self) -> bool:
        """Whether output tokens are stored, so that the section `sampling` matters."""
        return False

    @property
    def num_rows_per_input(self) -> int:
        """Output rows for each input row."""
        return 1

    @property
    def reads_prompt_logits(self) -> bool:
        """Whether the logits at the prompts' own tokens are needed. vLLM then takes nothing from its prefix cache."""
        return self.spec.sampling.prompt_logprobs is not None

    @property
    def input_columns(self) -> tuple[tuple[str, str], ...]:
        """Input columns that the task needs beside the prompt's, each behind the field of the spec that names it."""
        return ()

    def resolve(self, model: Model) -> JobSpec:
        """The spec with all that the model decides filled in. Raises SpecError, in one line that begins with the field.

        The spec's sampling is resolved already.
        """
        return self.spec

    def check_input(self) -> None:  # noqa: B027  # most tasks run all formats
        """Raise SpecError if the task cannot run an input of this format, which is known once the input is open."""

    def describe(self) -> str:
        """A line for people that says what is stored of each row; empty if the task's name and the sampling say it."""
        return ""

    # -- prompts and requests ------------------------------------------------------------------------------------------

    def prompt_builder(self, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> PromptBuilder:
        """Makes prompts of the job's rows; see `PromptBuilder`."""
        return PromptBuilder(self.spec, tokenizer, vocab_size, begun_at, self.output_room)

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        """A line for each setting that works, but is probably a mistake."""
        return checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=self.reads_prompt_logits)

    @abc.abstractmethod
    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """All requests of a row, by `request_index` from 0; at least one, and as many for a prompt with an error."""

    def warm_up_request(self) -> Request:
        """A small request of the job's own shape: the same logprobs, and seeded if the job samples."""
        sampling = self.spec.sampling
        return Request(-1, 0, [1] * 8, sampling, 4, None if sampling.temperature == 0 else 0)

    # -- engines -------------------------------------------------------------------------------------------------------

    @property
    def logprobs_mode(self) -> str:
        """vLLM's engine argument of this name."""
        return self.spec.sampling.logprobs_mode

    @property
    def vocabulary_rows(self) -> RowsWanted | None:
        """The rows of logits or logprobs that all requests want; None if they want none."""
        return None

    @property
    def pooling(self) -> PoolingWanted | None:
        """What vLLM's pooling runner is asked for; None if the task needs the runner that generates."""
        return None

    def width_error(self, got: int) -> SpecError:
        """The error if the pooling runner gives so many numbers for each position, and not as many as wanted."""
        raise NotImplementedError

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        """The scripted engine's answer in place of the pooling runner's: float32 [num_positions, width].

        draw: gives so many numbers, which depend on the prompt alone.
        """
        raise NotImplementedError

    def default_batch_limits(
        self, vocab_size: int | None, device_bytes: int | None, gpu_memory_utilization: float
    ) -> dict[str, int]:
        """`max_num_seqs` and `max_num_batched_tokens`, each where vLLM's default does not fit the task.

        vocab_size: None if unknown. device_bytes: memory of one device; None on a CPU.
        """
        if not self.reads_prompt_logits or device_bytes is None:
            return {}
        return {"max_num_batched_tokens": scored_tokens_at_once(device_bytes, gpu_memory_utilization, vocab_size)}

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        """A guess at the size in Parquet of all output rows of one input row.

        prompts: a sample of the job's without errors, for tasks with `sizes_by_prompts`; None before they are read.
        """
        return 100

    @property
    def sizes_by_prompts(self) -> bool:
        """Whether the guess above is better with some of the job's prompts."""
        return False

    @property
    def size_remedies(self) -> tuple[str, ...]:
        """What can be changed in a spec so that the output gets smaller."""
        return ("store less of each",)

    # -- results and output rows ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def result_fields(self) -> list[tuple[str, pa.DataType]]:
        """The columns of a result that are the task's own."""

    @functools.cached_property
    def result_schema(self) -> pa.Schema:
        """The journal's columns, one row for each result.

        It begins with `row_index` int64, `request_index` int32, `num_requests` int32, and has `num_prompt_tokens` and
        `num_output_tokens` int32 and `error_type` string.
        """
        return result_schema(self.spec, self.result_fields())

    @functools.cached_property
    def own(self) -> pa.Schema:
        """The output's columns that do not come from the source; the keys are the first."""
        return without_requests(self.result_schema)

    @abc.abstractmethod
    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """Results, in their order, as a batch of `result_schema`. Raises OverflowError over 2**31 - 1 list items."""

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """The output rows, as `output_schema` has them, for a run of results sorted by (row_index, request_index).

        columns: one row for each distinct `row_index` in the results, in order: `id` first if the job has one, then
        the kept columns. None if there are neither. A run may begin and end within a row's requests, unless the task
        joins them. By default each result is a row.
        """
        return self.output_table(columns, {name: results.column(name) for name in results.column_names})

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """id · row_index · prompt_hash · sample_index where there is one · kept columns · everything else.

        columns: those that come from the source. Raises SpecError if two columns have one name.
        """
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
        """The task's own columns, by name, beside those of the source: see `reduce`.

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
        """Options of `pyarrow.parquet.ParquetWriter` for tables of this output schema.

        zstd 1, byte-stream split on numbers in lists, dictionaries where values repeat, checksums on pages.
        """
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
        """The name of a kept column in the output."""
        return self._new_names.get(column, column)
