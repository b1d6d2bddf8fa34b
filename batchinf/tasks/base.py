"""The interface `Task`, through which the rest of the package uses tasks, and the Arrow columns that tasks share."""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from batchinf.base.errors import SpecError
from batchinf.model.identity import Model
from batchinf.prompts import checks, encoder
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import Completion, FloatArray, IntArray, Prompt, Request, Result, RowsWanted, TokenLogprobs
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.tasks.compare import Comparison, NoVerification, Verification, no_comparison

# Parquet's name for the items of a list. So a file reads back with the schema that it was written with.
ITEM = "element"
INT32 = np.dtype(np.int32)
_MAX_OFFSET = 2**31 - 1


def logprob_fields(prefix: str, k: int | None, logprob: pa.DataType) -> list[tuple[str, pa.DataType]]:
    if k is None:
        return []
    fields = [(f"{prefix}logprobs", list_of(logprob)), (f"{prefix}ranks", list_of(pa.int32()))]
    if k > 0:
        fields.append((f"{prefix}top_token_ids", list_of(list_of(pa.int32()))))
        fields.append((f"{prefix}top_logprobs", list_of(list_of(logprob))))
    return fields


def chosen_fields(num_chosen: int, logprob: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """The column with the logprobs of the chosen tokens at each position, in the order of the spec."""
    return [("chosen_logprobs", list_of(list_of(logprob)))] if num_chosen else []


def chosen_columns(tokens: "Tokens", num_chosen: int, dtype: np.dtype[Any]) -> dict[str, pa.Array]:
    pieces = [part.logprobs for part in tokens.parts]
    return {"chosen_logprobs": tokens.top(pieces, num_chosen, dtype)} if num_chosen else {}


def list_of(item: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field(ITEM, item))


def leaf_of(field: pa.Field) -> tuple[str, pa.DataType]:
    """Path and type of a column's leaf in Parquet."""
    path, item = field.name, field.type
    while pa.types.is_list(item) or pa.types.is_fixed_size_list(item):
        path, item = f"{path}.list.{ITEM}", item.value_type
    return path, item


def key_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    return {
        "row_index": pa.array([result.prompt.row_index for result in results], pa.int64()),
        "request_index": pa.array([result.request_index for result in results], pa.int32()),
        "num_requests": pa.array([result.num_requests for result in results], pa.int32()),
        "attempts": pa.array([result.attempts for result in results], pa.int32()),
    }


def text_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    completions = [result.completion for result in results]
    stops = [None if c is None or c.stop_reason is None else str(c.stop_reason) for c in completions]
    return {
        "text": strings([result.text for result in results]),
        "reasoning": strings([result.reasoning for result in results]),
        "finish_reason": strings([None if c is None else c.finish_reason for c in completions]),
        "stop_reason": strings(stops),
    }


def error_columns(results: Sequence[Result]) -> dict[str, pa.Array]:
    errors = [result.error for result in results]
    return {
        "error_type": strings([None if error is None else error.error_type for error in errors]),
        "error_message": strings([None if error is None else error.error_message for error in errors]),
    }


def prompt_columns(results: Sequence[Result], include_prompt: bool) -> dict[str, pa.Array]:
    prompts = [result.prompt for result in results]
    # A row's samples share one Prompt. Its ids are converted only once, which costs 20 ns a token.
    ids = {id(prompt): np.array(prompt.token_ids, np.int32) for prompt in {id(p): p for p in prompts}.values()}
    hashes = {key: prompt_hash(value) for key, value in ids.items()}
    columns = {
        "prompt_hash": pa.array([hashes[id(prompt)] for prompt in prompts], pa.int64()),
        "num_prompt_tokens": pa.array([len(prompt.token_ids) or None for prompt in prompts], pa.int32()),
        encoder.SECOND_BOS_COLUMN: pa.array([prompt.has_second_bos for prompt in prompts], pa.bool_()),
        "prompt_truncated": pa.array([p.is_truncated if p.token_ids else None for p in prompts], pa.bool_()),
    }
    if include_prompt:
        columns["prompt"] = strings([prompt.text for prompt in prompts])
        columns["prompt_token_ids"] = id_lists([ids[id(p)] if p.token_ids else None for p in prompts])
    return columns


def prompt_hash(token_ids: IntArray) -> int | None:
    """xxh3-64 of the ids as little-endian int32, as a signed number; None without ids."""
    if not len(token_ids):
        return None
    return int.from_bytes(xxhash.xxh3_64_digest(token_ids.data), "big", signed=True)


def output_columns(completions: Sequence[Completion | None]) -> dict[str, pa.Array]:
    token_ids = [None if completion is None else completion.token_ids for completion in completions]
    sums = [None if completion is None else completion.cumulative_logprob for completion in completions]
    return {
        "token_ids": id_lists(token_ids),
        "cumulative_logprob": pa.array(sums, pa.float64()),
        "num_output_tokens": pa.array([None if ids is None else len(ids) for ids in token_ids], pa.int32()),
    }


def id_lists(parts: Sequence[IntArray | None]) -> pa.ListArray:
    offsets = offsets_of([0 if part is None else len(part) for part in parts])
    flat = concatenate([part for part in parts if part is not None], INT32)
    return list_array(offsets, pa.array(flat), np.array([part is None for part in parts], np.bool_))


def strings(values: list[str | None]) -> pa.StringArray:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        # Error messages of other libraries may have lone surrogates, which Arrow's UTF-8 cannot hold.
        encoded = [None if value is None else value.encode("utf-8", "replace") for value in values]
        return pa.array(encoded, pa.binary()).cast(pa.string())


def logprob_columns(prefix: str, tokens: "Tokens", k: int | None, dtype: np.dtype[Any]) -> dict[str, pa.Array]:
    if k is None:
        return {}
    columns = {
        f"{prefix}logprobs": tokens.column([part.logprobs[:, 0] for part in tokens.parts], dtype),
        f"{prefix}ranks": tokens.column([part.ranks for part in tokens.parts], INT32),
    }
    if k > 0:
        columns[f"{prefix}top_token_ids"] = tokens.top([part.token_ids for part in tokens.parts], k, INT32)
        columns[f"{prefix}top_logprobs"] = tokens.top([part.logprobs for part in tokens.parts], k, dtype)
    return columns


class Tokens:
    """Makes list columns from the tokens of several completions.

    parts: one for each result; None: the list is null. num_leading: number of nulls before the tokens of each part.
    """

    def __init__(self, parts: Sequence[TokenLogprobs | None], num_leading: int = 0) -> None:
        self.parts = [part for part in parts if part is not None]
        self._is_missing = np.array([part is None for part in parts], np.bool_)
        self._offsets = offsets_of([0 if part is None else len(part.ranks) + num_leading for part in parts])
        self._num_tokens = int(self._offsets[-1])
        self._is_null: npt.NDArray[np.bool_] | None = None
        if num_leading:
            self._is_null = np.zeros(self._num_tokens, np.bool_)
            self._is_null[self._offsets[:-1][~self._is_missing]] = True

    def column(self, pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> pa.ListArray:
        """list<dtype> from one piece [num_tokens] for each part."""
        flat = concatenate(pieces, dtype)
        if self._is_null is None:
            return list_array(self._offsets, pa.array(flat), self._is_missing)
        spread = np.zeros(self._num_tokens, dtype)
        spread[~self._is_null] = flat
        return list_array(self._offsets, pa.array(spread, mask=self._is_null), self._is_missing)

    def top(self, pieces: Sequence[npt.NDArray[Any]], k: int, dtype: np.dtype[Any]) -> pa.ListArray:
        """list<list<dtype>> from columns 1 to k of one piece [num_tokens, k + 1] for each part."""
        lengths = np.full(self._num_tokens, k)
        if self._is_null is not None:
            lengths[self._is_null] = 0
        offsets = offsets_of(lengths)
        flat = concatenate([piece[:, 1 : k + 1] for piece in pieces], dtype).reshape(-1)
        return list_array(self._offsets, list_array(offsets, pa.array(flat), self._is_null), self._is_missing)


def concatenate(pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not pieces:
        return np.zeros(0, dtype)
    with np.errstate(over="ignore"):  # float16 turns very small logprobs into -inf
        return np.concatenate(pieces, dtype=dtype, casting="same_kind")


def offsets_of(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Arrow's offsets of lists with these lengths. Raises OverflowError."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) and ends[-1] > _MAX_OFFSET:
        raise OverflowError(f"got {ends[-1]} items for one column of lists, which holds 2**31 - 1; encode fewer")
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return offsets


def list_array(offsets: npt.NDArray[np.int32], values: pa.Array, is_null: npt.NDArray[np.bool_] | None) -> pa.ListArray:
    if offsets[-1] != len(values):  # Arrow itself would read beyond the end
        raise ValueError(f"got {len(values)} values for lists of {offsets[-1]}: not the shape that the spec asks for")
    mask = None if is_null is None or not is_null.any() else pa.array(is_null)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=list_of(values.type), mask=mask)


def repeat(columns: pa.Table, row_index: npt.NDArray[np.int64]) -> pa.Table:
    """Each row of `columns`, repeated for each of its results. row_index: that of each result, sorted."""
    if columns.num_rows == len(row_index):
        return columns
    is_next = np.diff(row_index, prepend=row_index[:1]) != 0
    return columns.take(pa.array(np.cumsum(is_next)))


_OF_RESULTS = frozenset({"request_index", "num_requests", encoder.SECOND_BOS_COLUMN})
_KEYS = ("row_index", "prompt_hash", "sample_index")
# No dictionary encoding: nearly every value is different.
_UNIQUE = frozenset({"id", "row_index", "prompt_hash", "prompt", "text", "reasoning", "cumulative_logprob"})
_NO_STATISTICS = frozenset({"prompt", "text", "reasoning", "error_message"})
# Assumed number of tokens of a prompt or an output whose length is unknown.
LIKELY_TOKENS = 256


def result_schema(
    spec: JobSpec, own: Sequence[tuple[str, pa.DataType]], *, may_truncate: bool | None = None
) -> pa.Schema:
    """The journal's columns of a task: keys, the prompt, the task's own columns, counts and errors.

    may_truncate: whether there is a column `prompt_truncated`; default: whether `input.on_overlong` cuts.
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
    """The fields of a result that an output row has, too."""
    return pa.schema([field for field in schema if field.name not in _OF_RESULTS])


@dataclass(frozen=True, slots=True)
class PoolingWanted:
    """What a task needs from vLLM's pooling runner.

    tasks: vLLM's names of the pooling tasks that fit, the best first. convert: vLLM's engine argument.
    width: numbers for each position. use_activation, dimensions: vLLM's pooling parameters of each request.
    seq_pooling_type, tok_pooling_type: of the pooler; None: the model's own. layers: the layers whose states are
    needed; -1: the last layer, before the final norm; empty: the model's output.
    all_positions: whether each token of a prompt gives values, or only the last one.
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
    """What a job does with each row, for one spec. The results depend only on the spec and the arguments.

    `resolve` and the properties also work with an unresolved spec. Requests and schemas need the resolved one.

    name: as in the field `task` of a spec. section: its section of the spec, if it has one.
    makes_text: whether its completions are decoded to text and checked against the job's structure.
    takes_generation_config: whether the model's `generation_config` gives defaults for the section `sampling`.
    output_room: tokens that must fit `max_model_len` after a prompt.
    joins_requests: whether all results of an input row make one output row. Otherwise each result is an output row and
    has a `sample_index`.
    row_group_bytes: size of a row group of its parts; None: the usual size.
    has_wide_results: whether a result can take several MB, so that the writer needs larger buffers.
    default_max_output_bytes: of `output.max_output_bytes`; None: no limit.
    row_columns: columns of a row's results with names that other tasks use for those of tokens.
    comparison: how `diff` compares two jobs of the task.
    verification: what `verify` compares of its rows.
    """

    name: ClassVar[str]
    section: ClassVar[TaskSection | None] = None
    makes_text: ClassVar[bool] = False
    takes_generation_config: ClassVar[bool] = True
    output_room: ClassVar[int] = 1
    joins_requests: ClassVar[bool] = True
    row_group_bytes: ClassVar[int | None] = None
    has_wide_results: ClassVar[bool] = False
    default_max_output_bytes: ClassVar[int | None] = None
    row_columns: ClassVar[frozenset[str]] = frozenset()
    comparison: ClassVar[Comparison] = no_comparison
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
        """Whether the logits at the prompt's own tokens are needed. For these, vLLM does not use its prefix cache."""
        return self.spec.sampling.prompt_logprobs is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether some requests may read vLLM's prefix cache. If none does, vLLM need not fill it."""
        return self.spec.sampling.prompt_logprobs is None or self.spec.input.is_batch_file

    @property
    def only_scores(self) -> bool:
        """Whether all results are logprobs of given tokens."""
        return False

    @property
    def input_columns(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a spec field and the input column that it names, for columns other than the prompt's."""
        return ()

    @property
    def least_model_len(self) -> int:
        """The smallest `max_model_len` that the task's section allows."""
        return 1

    def resolve(self, model: Model) -> JobSpec:
        """The spec with all values that depend on the model. Its sampling is already resolved. Raises SpecError."""
        return self.spec

    def check_input(self) -> None:  # noqa: B027  # most tasks run all formats
        """Raise SpecError if the task cannot run this input format. Called when the input is open."""

    def describe(self) -> str:
        """A line that tells users what is stored of each row; empty if the task's name and the sampling say enough."""
        return ""

    # -- prompts and requests ------------------------------------------------------------------------------------------

    def prompt_builder(self, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> PromptBuilder:
        """Makes prompts of the job's rows; see `PromptBuilder`."""
        return PromptBuilder(self.spec, tokenizer, vocab_size, begun_at, output_room=self.output_room)

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        """A line for each setting that works but is probably a mistake."""
        return checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=self.reads_prompt_logits)

    @abc.abstractmethod
    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """All requests of a row, in the order of `request_index`. At least one, even if the prompt has an error."""

    def warm_up_request(self) -> Request:
        """A small request like those of the job: with the same logprobs, and with a seed if the job samples."""
        sampling = self.spec.sampling
        return Request(-1, 0, [1] * 8, sampling, 4, None if sampling.temperature == 0 else 0)

    # -- engines -------------------------------------------------------------------------------------------------------

    @property
    def logprobs_mode(self) -> str:
        """vLLM's engine argument of this name."""
        return self.spec.sampling.logprobs_mode

    @property
    def vocabulary_rows(self) -> RowsWanted | None:
        """The rows of logits or logprobs that all requests need, or None."""
        return None

    @property
    def pooling(self) -> PoolingWanted | None:
        """What the task needs from vLLM's pooling runner; None if it needs the generating runner."""
        return None

    def width_error(self, got: int) -> SpecError:
        """The error if the pooling runner gives `got` numbers for each position, which is the wrong number."""
        raise NotImplementedError

    def scripted_values(self, request: Request, draw: Callable[[int], FloatArray]) -> FloatArray:
        """What the scripted engine returns in place of the pooling runner: float32 [num_positions, width].

        draw: returns the given number of values, which depend only on the prompt.
        """
        raise NotImplementedError

    def default_batch_limits(self, vocab_size: int | None, device_bytes: int | None) -> dict[str, int]:
        """`max_num_seqs` and `max_num_batched_tokens`, if vLLM's defaults do not fit the task.

        vocab_size: None if unknown. device_bytes: memory of one device; None on a CPU.
        """
        return {}

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        """Estimated size in Parquet of all output rows of one input row.

        prompts: a sample of valid prompts, for tasks with `sizes_by_prompts`; None before prompts are read.
        """
        return 100

    @property
    def sizes_by_prompts(self) -> bool:
        """Whether `estimated_bytes_per_row` is better with a sample of prompts."""
        return False

    @property
    def size_remedies(self) -> tuple[str, ...]:
        """How a user can make the output smaller, for error messages."""
        return ("store less of each",)

    # -- results and output rows ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def result_fields(self) -> list[tuple[str, pa.DataType]]:
        """The task's own columns of a result."""

    @functools.cached_property
    def result_schema(self) -> pa.Schema:
        """The journal's columns, one row for each result.

        It begins with `row_index` int64, `request_index` int32, `num_requests` int32, and has `num_prompt_tokens` and
        `num_output_tokens` int32 and `error_type` string.
        """
        return result_schema(self.spec, self.result_fields())

    @functools.cached_property
    def own(self) -> pa.Schema:
        """The output's columns that do not come from the source. The keys come first."""
        return without_requests(self.result_schema)

    @abc.abstractmethod
    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """Results, in their order, as a batch of `result_schema`. Raises OverflowError above 2**31 - 1 list items."""

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """The output rows, in `output_schema`, of results sorted by (row_index, request_index). Default: a row each.

        columns: one row for each distinct `row_index` in the results, in order: `id` first if the job has one, then
        the kept columns; None without such columns. The results may begin and end in the middle of an input row, unless
        the task joins requests.
        """
        return self.output_table(columns, {name: results.column(name) for name in results.column_names})

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """id · row_index · prompt_hash · sample_index, if the task has it · kept columns · all other columns.

        columns: those from the source. Raises SpecError if two columns have the same name.
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
        """The output table with the task's own columns and those of the source.

        columns: see `reduce`. own: by name, sorted by `row_index`.
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
        # DuckDB cannot read byte-stream split float16. It would save 0.22 of 1.77 bytes a logprob.
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
