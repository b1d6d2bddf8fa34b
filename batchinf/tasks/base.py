"""The interface `Task`, through which the rest of the package uses tasks."""

import abc
import contextlib
import functools
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.bucket import NEEDS_OBSTORE
from batchinf.base.errors import SpecError
from batchinf.base.paths import is_bucket
from batchinf.base.text import counted
from batchinf.model.model import Model
from batchinf.prompts import checks
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.openai.lines import CHAT_URL, COMPLETIONS_URL
from batchinf.prompts.openai.requests import BatchReader
from batchinf.records import FloatArray, Prompt, Request, Result, RowsWanted
from batchinf.source.rows import Source
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.tasks.columns import (
    IMAGE_DIGESTS,
    UNRENDERED_HASH,
    Fields,
    leaf_of,
    repeat,
    result_schema,
    shared_columns,
    without_requests,
)
from batchinf.tasks.compare import ComparedColumns

_KEYS = ("row_index", "prompt_hash", "sample_index")
# No dictionary encoding: nearly every value is different.
_HASHES = ("prompt_hash", UNRENDERED_HASH)
_UNIQUE = frozenset({"id", "row_index", *_HASHES, "prompt", "text", "reasoning", "cumulative_logprob"})
_NO_STATISTICS = frozenset({"prompt", "text", "reasoning", "error_message"})
# Assumed number of tokens of a prompt or an output whose length is unknown.
LIKELY_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingWanted:
    """What a task needs from vLLM's pooling runner."""

    tasks: tuple[str, ...]
    """vLLM's names of the pooling tasks that fit, the best first."""
    convert: str
    """vLLM's engine argument."""
    width: int
    """Numbers for each position."""
    use_activation: bool = False
    """vLLM's pooling parameter of each request, as is `dimensions`."""
    dimensions: int | None = None
    seq_pooling_type: str | None = None
    """Of the pooler, as is `tok_pooling_type`; None: the model's own."""
    tok_pooling_type: str | None = None
    layers: tuple[int, ...] = ()
    """The layers whose states are needed; -1: the last layer, before the final norm; empty: the model's output."""
    all_positions: bool = False
    """Whether each token of a prompt gives values, or only the last one."""


@dataclass(frozen=True, slots=True)
class ShownColumns:
    """How `head` shows the columns of a task."""

    names: tuple[str, ...] = ()
    """The columns that say most of a row. Others are shown only if they are asked for."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The texts of the choices, by the name of the column that has the place of one."""
    label_logprob: str | None = None
    """The column with the logarithm of the probability of a label, which is shown as that probability."""
    choice_sums: str | None = None
    """The column with the logprob of each choice, from which `head` makes the probability of the best one."""
    choices_column: str | None = None
    """The column of the output that has each row's own choices, if `choices` are not known."""

    def texts_of(self, row: Mapping[str, Any]) -> Sequence[str]:
        """The texts of a row's choices: those of all rows, or a list, or JSON text of one; empty: not known."""
        if of_all := next(iter(self.choices.values()), ()):
            return of_all
        value = row.get(self.choices_column or "")
        with contextlib.suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        return [str(item) for item in value] if isinstance(value, list) else ()


class Task(abc.ABC):
    """What a job does with each row, for one spec. The results depend only on the spec and the arguments.

    The attributes also work with an unresolved spec. Requests and schemas need the resolved one.
    """

    name: ClassVar[str]
    """As in the field `task` of a spec."""
    section: ClassVar[TaskSection | None] = None
    """The task's section of the spec."""
    makes_text: ClassVar[bool] = False
    """Whether its completions are decoded to text and checked against the job's structure."""
    takes_generation_config: ClassVar[bool] = True
    """Whether the model's `generation_config` gives defaults for the section `sampling`."""
    vector_column: ClassVar[str | None] = None
    """The column with the one vector of each row, for a task whose output is that."""
    only_scores: ClassVar[bool] = False
    """Whether all results are logprobs of given tokens."""
    output_room: ClassVar[int] = 1
    """Tokens that must fit `max_model_len` after a prompt."""
    joins_requests: ClassVar[bool] = True
    """Whether all results of an input row make one output row. Otherwise each result is an output row and has a
    `sample_index`."""
    row_group_bytes: ClassVar[int | None] = None
    """Size of a row group of its parts; None: the usual size."""
    has_wide_results: ClassVar[bool] = False
    """Whether a result can take several MB, so that the writer needs larger buffers."""
    default_max_output_bytes: ClassVar[int | None] = None
    """Of `output.max_output_bytes`; None: no limit."""
    batch_urls: ClassVar[tuple[str, ...]] = (CHAT_URL, COMPLETIONS_URL)
    """The URLs of the lines of OpenAI batch files that it runs; empty: it runs no such file."""
    takes_images: ClassVar[bool] = False
    """Whether its prompts may have images."""
    row_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns of a row's results with names that other tasks use for those of tokens."""
    compared: ClassVar[ComparedColumns] = ComparedColumns()
    """The columns that `diff` compares in two jobs of the task, besides those of vectors."""

    prompts: type[PromptBuilder] = PromptBuilder
    """Makes prompts of rows."""
    draws_tokens: bool = False
    """Whether output tokens are stored, so that the section `sampling` matters."""
    num_rows_per_input: int = 1
    """Output rows for each input row; if rows have their own number, of a row that says nothing."""
    rows_vary: bool = False
    """Whether rows may have their own number of output rows."""
    reads_prompt_logits: bool
    """Whether the logits at the prompt's own tokens are needed. For these, vLLM does not use its prefix cache."""
    reads_prefix_cache: bool
    """Whether some requests may read vLLM's prefix cache. If none does, vLLM need not fill it."""
    input_columns: tuple[tuple[str, str], ...] = ()
    """Pairs of a spec field and the input column that it names, for columns other than the prompt's."""
    least_model_len: int = 1
    """The smallest `max_model_len` that the task's section allows."""
    logprobs_mode: str
    """vLLM's engine argument of this name."""
    sizes_by_prompts: bool = False
    """Whether `estimated_bytes_per_row` is better with a sample of prompts."""
    size_remedies: tuple[str, ...] = ("store less of each",)
    """How a user can make the output smaller, for error messages."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.reads_prompt_logits = spec.sampling.prompt_logprobs is not None
        self.reads_prefix_cache = spec.sampling.prompt_logprobs is None or spec.rows_may_set("prompt_logprobs")
        self.logprobs_mode = spec.sampling.logprobs_mode
        self._has_id = spec.input.id_column is not None
        self._new_names = spec.output.keep_columns
        self.left_out: frozenset[str] = frozenset()  # columns that the output lacks: the job began without them

    # -- the spec ------------------------------------------------------------------------------------------------------

    @classmethod
    def resolve(cls, spec: JobSpec, model: Model) -> JobSpec:
        """The spec with all values that depend on the model. Its sampling is already resolved. Raises SpecError."""
        return spec

    @classmethod
    def settle(cls, spec: JobSpec, source: Source, say: Callable[[str], None]) -> JobSpec:
        """The spec with all values that depend on the rows of the whole input. Called when a job begins.

        say: gets a line if that takes long.
        """
        return spec

    def check_input(self) -> None:  # noqa: B027  # most tasks run all formats
        """Raise SpecError if the task cannot run this input format. Called when the input is open."""

    @classmethod
    def check_images(cls, spec: JobSpec) -> None:
        """Raise SpecError if the job has images and the task takes none. Called before an engine starts."""
        if spec.input.has_images and not cls.takes_images:
            field = next((field for field, _ in spec.input.image_columns), "input.images")
            raise SpecError(f"{field}: got it with task {cls.name}, which takes no images yet: leave it out")
        images = spec.input.images
        if images is not None and any(map(is_bucket, images.folders)) and importlib.util.find_spec("obstore") is None:
            raise SpecError(f"input.images.folders: {NEEDS_OBSTORE}")

    @classmethod
    def other_meanings(cls, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
        """Columns whose numbers mean other things in two jobs with these stored specs; `diff` leaves them out."""
        return ()

    def why_unverified(self, model: Model) -> str | None:
        """Why `verify` cannot compare the task's numbers with those of transformers; None: it can."""
        return f"task {self.name} cannot be verified, only generate, score, logits and embed can"

    def describe(self) -> str:
        """A line that tells users what is stored of each row; empty if the task's name and the sampling say enough."""
        return ""

    # -- prompts and requests ------------------------------------------------------------------------------------------

    def prompt_builder(self, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> PromptBuilder:
        """Makes prompts of the job's rows; see `PromptBuilder`."""
        reader = BatchReader(self.spec, has_samples=not self.joins_requests)
        return self.prompts(self.spec, tokenizer, vocab_size, begun_at, output_room=self.output_room, reader=reader)

    def prompt_warnings(self, model: Model, source: Source) -> Iterator[str]:
        """A line for each setting that works but is probably a mistake."""
        return checks.prompt_warnings(self.spec, model, source, reads_prompt_logits=self.reads_prompt_logits)

    @abc.abstractmethod
    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """All requests of a prompt, in the order of `request_index`. At least one, even if the prompt has an error."""

    def requests(self, prompt: Prompt, max_model_len: int) -> list[tuple[Prompt, Request]]:
        """All requests of a row as `expand` makes them, each with its prompt: that of the row, or one of its parts."""
        parts = prompt.parts or (prompt,)
        return [(part, request) for part in parts for request in self.expand(part, max_model_len)]

    def request_note(self, prompt: Prompt) -> str | None:
        """What would spare requests of this row, for `validate`; None if nothing would."""
        return None

    def drawing_request(
        self,
        prompt: Prompt,
        index: int,
        max_model_len: int,
        *,
        logprob_token_ids: tuple[int, ...] | None = None,
        rows: RowsWanted | None = None,
    ) -> Request:
        """A request whose output tokens are stored.

        `max_tokens` is the user's, even if `max_model_len` leaves less; without one, all that fits. As in vLLM's
        server, sample i of a batch line that gives a seed has that seed plus i. Any other seed is hashed with the row.
        """
        sampling = prompt.sampling or self.spec.sampling
        if prompt.line_seed is None:
            seed = seed_of(sampling.seed, prompt.row_index, index)
        else:
            seed = _int64(prompt.line_seed + index - prompt.first_request)
        return Request(
            row_index=prompt.row_index,
            request_index=index,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            max_tokens=sampling.max_tokens or max(1, max_model_len - len(prompt.token_ids)),
            seed=None if sampling.temperature == 0 else seed,
            logprob_token_ids=logprob_token_ids,
            rows=rows,
            tools=prompt.tools,
            template_kwargs=prompt.template_kwargs,
        )

    def warm_up_request(self) -> Request:
        """A small request like those of the job: with the same logprobs, and with a seed if the job samples."""
        sampling = self.spec.sampling
        return Request(-1, 0, [1] * 8, sampling, max_tokens=4, seed=None if sampling.temperature == 0 else 0)

    # -- engines -------------------------------------------------------------------------------------------------------

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
        """Estimated size in Parquet of all output rows of one input row, if it does not say how many it has.

        prompts: a sample of valid prompts, for tasks with `sizes_by_prompts`; None before prompts are read.
        """
        return 100

    def expected_rows(self, num_inputs: int, *, num_done: int, num_inputs_done: float) -> int:
        """Output rows of so many input rows. If rows have their own number, an estimate by those that are done."""
        if not self.rows_vary or num_inputs_done <= 0:
            return num_inputs * self.num_rows_per_input
        return max(num_done, round(num_inputs * num_done / num_inputs_done))

    # -- results and output rows ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def result_fields(self) -> Fields:
        """The task's own columns of a result."""

    @functools.cached_property
    def result_schema(self) -> pa.Schema:
        """The journal's columns, one row for each result.

        It begins with `row_index` int64, `request_index` int32, `num_requests` int32, and has `num_prompt_tokens` and
        `num_output_tokens` int32 and `error_type` string.
        """
        return result_schema(self.spec, self.result_fields())

    @functools.cached_property
    def computed_schema(self) -> pa.Schema:
        """The output's columns that do not come from the source. The keys come first."""
        return without_requests(self.result_schema)

    @property
    def shown_columns(self) -> ShownColumns:
        """How `head` shows the output's columns. Default: all that the task computes."""
        return ShownColumns(tuple(name for name, _ in self.result_fields()))

    @abc.abstractmethod
    def encode(self, results: Sequence[Result]) -> pa.RecordBatch:
        """Results, in their order, as a batch of `result_schema`. Raises OverflowError above 2**31 - 1 list items."""

    def result_batch(self, results: Sequence[Result], columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """A batch of `result_schema`: these columns of the task, and those that all tasks have."""
        has_images = self.spec.input.has_images
        arrays = {**shared_columns(results, self.spec.output.include_prompt, has_images=has_images), **columns}
        schema = self.result_schema
        return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)

    def reduce(self, columns: pa.Table | None, results: pa.Table) -> pa.Table:
        """The output rows, in `output_schema`, of results sorted by (row_index, request_index). Default: a row each.

        columns: one row for each distinct `row_index` in the results, in order: `id` first if the job has one, then
        the kept columns; None without such columns. The results may begin and end in the middle of an input row, unless
        the task joins requests.
        """
        return self.output_table(columns, {name: results.column(name) for name in results.column_names})

    # -- counts --------------------------------------------------------------------------------------------------------

    def count(self, rows: pa.Table) -> dict[str, int] | None:
        """The task's own counts of output rows, which are summed over parts; None if this job has none.

        Each part's footer and manifest line keep them as `task_counts`. Those of all tasks are of rows without an error
        that have fewer images than the spec names columns of them (`num_few_images`), or none (`num_no_images`).
        """
        num_columns = len(self.spec.input.image_columns)
        if not num_columns or IMAGE_DIGESTS in self.left_out:
            return None
        good = rows.column(IMAGE_DIGESTS).filter(pc.is_null(rows.column("error_type")))
        num_images = pc.list_value_length(good)
        few = pc.sum(pc.less(num_images, num_columns), min_count=0).as_py()
        none = pc.sum(pc.equal(num_images, 0), min_count=0).as_py()
        return {"num_few_images": few, "num_no_images": none} if few else None

    @classmethod
    def count_lines(cls, num_rows: int, counts: Mapping[str, int]) -> Iterator[str]:
        """Remarks on the summed counts of `num_rows` output rows, for people to read."""
        rows = counted(num_rows, "output row")
        none = counts.get("num_no_images", 0)
        if none:
            yield f"{none:,} of {rows} ran without an image, since their columns of images are empty"
        if some := counts.get("num_few_images", 0) - none:
            yield f"{some:,} of {rows} ran with fewer images than the job has columns of them, since some are empty"

    @classmethod
    def count_figures(cls, num_rows: int, counts: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
        """Figures of these counts for the report's page: title, value and note of each."""
        return iter(())

    # -- tables --------------------------------------------------------------------------------------------------------

    def output_schema(self, columns: Sequence[pa.Field]) -> pa.Schema:
        """id · row_index · prompt_hash · sample_index, if the task has it · kept columns · all other columns.

        columns: those from the source. Raises SpecError if two columns have the same name.
        """
        ids, kept = (columns[:1], columns[1:]) if self._has_id else ((), columns)
        kept = [field.with_name(self._name(field.name)) for field in kept]
        computed = [field for field in self.computed_schema if field.name not in self.left_out]
        keys = [field for field in computed if field.name in _KEYS]
        others = [field for field in computed if field.name not in _KEYS]
        fields = [*(field.with_name("id") for field in ids), *keys, *kept, *others]
        names = [field.name for field in fields]
        if taken := sorted({field.name for field in kept if names.count(field.name) > 1}):
            raise self._taken_error(taken)
        return pa.schema([pa.field(field.name, field.type) for field in fields])

    def _taken_error(self, names: Sequence[str]) -> SpecError:
        """The error if kept columns have these names, which the output's own columns have."""
        column = {new: column for column, new in self._new_names.items()}.get(names[0], names[0])
        own, them, other = ("columns", "them", "other names") if names[1:] else ("a column", "it", "another name")
        return SpecError(
            f"output.keep_columns: got {', '.join(names)}, which the output has {own} of its own for; "
            f"give {them} {other}, as in {{{column}: input_{names[0]}}}"
        )

    def check_case(self, columns: Sequence[pa.Field]) -> None:
        """Raise SpecError for a kept column whose name differs by case only from that of another output column.

        columns: see `output_schema`. SQL takes both names for one: DuckDB's `select text` then returns `Text`.
        """
        names = self.output_schema(columns).names
        for column in columns[1:] if self._has_id else columns:
            kept = self._name(column.name)
            for name in names:
                if name != kept and name.lower() == kept.lower():
                    raise SpecError(
                        f"output.keep_columns: got {kept} beside the output's column {name}, which SQL takes for the "
                        f"same name; give it another one, as in {{{column.name}: input_{kept}}}"
                    )

    def output_table(self, columns: pa.Table | None, computed: Mapping[str, Any]) -> pa.Table:
        """The output table with the computed columns and those of the source.

        columns: see `reduce`. computed: by name, sorted by `row_index`.
        """
        schema = self.output_schema([] if columns is None else list(columns.schema))
        arrays = dict(computed)
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
        flat = [field.name for field in schema if not pa.types.is_nested(field.type)]
        leaves = [leaf_of(schema.field(name)) for name in self.computed_schema.names if name not in self.left_out]
        split = [path for path, item in leaves if _is_split(path, item)]
        return {
            "compression": "zstd",
            "compression_level": 1,
            "use_dictionary": sorted({*flat} - _UNIQUE - {*split}),
            "use_byte_stream_split": split,
            "write_statistics": sorted({*flat} - _NO_STATISTICS),
            "write_page_checksum": True,
        }

    def _name(self, column: str) -> str:
        """The name of a kept column in the output."""
        return self._new_names.get(column, column)


def seed_of(job_seed: int, row_index: int, request_index: int) -> int:
    """A request's own seed, in [0, 2**63).

    With 31 bits, one row of 1,000 samples in 4,300 would have two equal seeds. A seed is not negative, because vLLM
    takes -1 for no seed. vLLM stores seeds as int64; CUDA generators use all bits, CPU generators the low 32.
    """
    digest = hashlib.blake2b(f"{job_seed},{row_index},{request_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _int64(number: int) -> int:
    """The number as vLLM's int64 holds it: beyond the largest one it goes on with the smallest."""
    return (number + 2**63) % 2**64 - 2**63


def _is_split(path: str, item: pa.DataType) -> bool:
    """Whether a computed column's leaf is byte-stream split: numbers in lists, floats, and hashes."""
    if ".list." in path:
        # DuckDB cannot read byte-stream split float16. It would save 0.22 of 1.77 bytes a logprob.
        return bool(pa.types.is_primitive(item)) and item not in (pa.float16(), pa.bool_())
    return path in _HASHES or item in (pa.float64(), pa.float32())
