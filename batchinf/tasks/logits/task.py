"""Task `logits`: logits or logprobs of all tokens, or of chosen ones, at positions of the prompt or the output."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import field_validator, model_validator

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import name_type
from batchinf.model.identity import Model
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import check_token_ids, load_tokenizer
from batchinf.records import Completion, Prompt, Request, Result, RowsWanted
from batchinf.source.rows import Row
from batchinf.spec.fields import IDENTITY, Positive, Section, Text, Texts, TokenIds, wrong
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import (
    INT32,
    ITEM,
    LIKELY_TOKENS,
    Task,
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
from batchinf.tasks.compare import ReferenceWanted, StoredRow, StoredVectors, Verification, vectors_at_positions
from batchinf.tasks.generate.task import seed_of
from batchinf.tasks.vectors.compare import VectorChanges

if TYPE_CHECKING:
    from batchinf.tasks.reference import Reference


class PositionColumn(Section):
    """The input column that holds each row's own positions."""

    column: Annotated[Text, IDENTITY]
    """A column with a list of positions in the prompt's tokens: 0 is the first, -1 the last."""


class LogitsSpec(Section):
    """Logits or logprobs of the whole vocabulary, or of chosen tokens, at chosen positions."""

    tokens: Annotated[Texts, IDENTITY] = ()
    """Texts of one token each, such as `[" A", " B"]`. Only their numbers are stored, in this order."""
    token_ids: Annotated[TokenIds, IDENTITY] = ()
    """Ids of tokens, instead of `tokens`. Without both fields the whole vocabulary is stored, in its order."""
    values: Annotated[Literal["logits", "logprobs"], IDENTITY] = "logits"
    """The model's logits, or their log-softmax over the whole vocabulary."""
    positions: Annotated[Literal["last", "all", "generated"] | PositionColumn, IDENTITY] = "last"
    """Positions to store. `last`: after the prompt's last token. `all`: after each token of the prompt. `generated`:
    where each output token was generated. `{column: name}`: after the tokens of the prompt whose positions a column
    lists."""
    dtype: Annotated[Literal["float16", "float32"], IDENTITY] = "float16"
    """Stored type."""
    vocab_size: Annotated[Positive | None, IDENTITY] = None
    """Size of the whole vocabulary; default: from the model's config."""

    @field_validator("positions", mode="before")
    @classmethod
    def _plain_positions(cls, positions: Any) -> Any:
        if positions in ("last", "all", "generated") or isinstance(positions, PositionColumn):
            return positions
        if isinstance(positions, dict) and [*positions] == ["column"]:
            column = positions["column"]
            if not isinstance(column, str) or not column:
                raise wrong(f"got {column!r}; must be the name of a column", "column")
            return positions
        raise wrong(f"got {positions!r}; must be last, all, generated or {{column: name}}")

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if len(set(self.token_ids)) < len(self.token_ids) or len(set(self.tokens)) < len(self.tokens):
            raise wrong("got a token twice; name each once", "token_ids" if self.token_ids else "tokens")
        return self

    @property
    def is_full(self) -> bool:
        """Whether the whole vocabulary is stored."""
        return not self.tokens and not self.token_ids

    @property
    def width(self) -> int:
        """Numbers in a row, of a resolved spec."""
        width = self.vocab_size if self.is_full else len(self.token_ids)
        assert width, "the section is not resolved"
        return width

    @property
    def item_bytes(self) -> int:
        """Size of one number."""
        return 2 if self.dtype == "float16" else 4


# Fields of `sampling` that concern what is stored of a generated text, or several texts.
_OF_TEXT = ("logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode", "structured_outputs", "stop")
# Fields of `sampling` that concern how a text is generated.
_OF_GENERATION = ("max_tokens", "min_tokens", "stop_token_ids", "columns")


def logits_of(spec: JobSpec) -> LogitsSpec:
    """The section of a spec, or the defaults if the spec has none."""
    section: LogitsSpec | None = getattr(spec, SECTION.name)
    return LogitsSpec() if section is None else section


def _check(spec: JobSpec) -> None:
    """Raise an error for a validator if the section does not fit the task or the section `sampling`."""
    if spec.task != "logits":
        if getattr(spec, SECTION.name) is not None:
            raise wrong(f"must be left out with task {spec.task}; or set task: logits", "logits")
        return
    sampling, positions = spec.sampling, logits_of(spec).positions
    given = {name for name in type(sampling).model_fields if getattr(sampling, name) != _default(sampling, name)}
    for name in _OF_TEXT:
        if name in given:
            instead = "; logits.values says which numbers are stored" if "logprob" in name else ""
            raise wrong(f"has no meaning with task logits{instead}; leave it out", f"sampling.{name}")
    if "n" in given:
        raise wrong("must be 1 with task logits; leave it out", "sampling.n")
    for name in () if positions == "generated" else _OF_GENERATION:
        if name in given:
            raise wrong(
                "has no meaning where nothing is generated; leave it out, or set logits.positions: generated",
                f"sampling.{name}",
            )


def _default(section: Section, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True, validated_data={})


SECTION = TaskSection(
    "logits",
    Annotated[LogitsSpec | None, IDENTITY],
    None,
    _check,
    "What task `logits` stores; default: the logits of the whole vocabulary after each prompt's last token.",
)


_MOST_SHOWN = 6


class LogitsPrompts(PromptBuilder):
    """Rows → prompts, with their positions if a column has them."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None) -> None:
        super().__init__(spec, tokenizer, vocab_size, begun_at)
        self._positions = RowPositions(spec)

    @property
    def columns(self) -> tuple[str, ...]:
        """See `PromptBuilder`; also the column of positions."""
        return tuple(dict.fromkeys([*super().columns, *self._positions.columns]))

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        return self._positions.apply(rows, prompts)


class RowPositions:
    """Row → its positions. columns: the input columns that hold them: one, or none."""

    def __init__(self, spec: JobSpec) -> None:
        positions = logits_of(spec).positions
        self.columns: tuple[str, ...] = () if isinstance(positions, str) else (positions.column,)

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their positions. A prompt with an error keeps the error."""
        if not self.columns:
            return list(prompts)
        [column] = self.columns
        return [
            prompt if prompt.error is not None else _placed(prompt, column, row.values.get(column))
            for row, prompt in zip(rows, prompts, strict=True)
        ]


def _placed(prompt: Prompt, column: str, value: object) -> Prompt:
    num_tokens = len(prompt.token_ids)
    if not isinstance(value, list | tuple) or not value:
        got = "an empty list" if isinstance(value, list | tuple) else name_type(value)
        return _failed(prompt, f"got {got} in column '{column}'; expected a list of positions")
    for position in value:
        if isinstance(position, bool) or not isinstance(position, int):
            return _failed(prompt, f"got {name_type(position)} among the positions in column '{column}'")
        if not -num_tokens <= position < num_tokens:
            most = f"the prompt has {num_tokens:,} tokens, so that {num_tokens - 1:,} is the last"
            return _failed(prompt, f"got position {position} in column '{column}'; {most}")
    return replace(prompt, positions=tuple(position % num_tokens for position in value))


def _failed(prompt: Prompt, message: str) -> Prompt:
    return replace(prompt, error=RowError("invalid_positions", message))


def _advice(text: str, tokenizer: Any) -> str:
    """The same text with or without a space before it, if that is one token."""
    other = text[1:] if text.startswith(" ") else f" {text}"
    is_one = bool(other) and len(tokenizer.encode(other, add_special_tokens=False)) == 1
    return f", such as {other!r}" if is_one else ""


def ids_of(tokens: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of texts. Raises SpecError if a text is not one token."""
    found = []
    for number, text in enumerate(tokens):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            shown = ", ".join(f"{tokenizer.decode([id])!r} ({id})" for id in ids[:_MOST_SHOWN])
            more = f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else ""
            raise SpecError(f"logits.tokens[{number}]: got {text!r}, which is {len(ids)} tokens: {shown}{more}; "
                            f"must be one token{_advice(text, tokenizer)}, or use task: score with "
                            "input.choices, which takes texts of several tokens")  # fmt: skip
        if ids[0] in found:
            raise SpecError(
                f"logits.tokens[{number}]: got {text!r}, which is the same token as another; name each once"
            )
        found.append(int(ids[0]))
    return tuple(found)


class LogitsVerification(Verification):
    """Compares the logits at each stored position."""

    columns = ("positions", "token_ids")

    @property
    def vector_columns(self) -> tuple[str, ...]:
        return (logits_of(self.spec).values,)

    @property
    def is_half(self) -> bool:
        return super().is_half or logits_of(self.spec).dtype == "float16"

    def stored(self, row: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[StoredVectors]:
        [request] = requests
        # The last output token has no row after it.
        token_ids = [*request.prompt_token_ids, *(row.values.get("token_ids") or ())[:-1]]
        yield from vectors_at_positions(row, token_ids, has_direction=False)

    def reference(self, wanted: ReferenceWanted) -> "Reference":
        from batchinf.tasks.logits.reference import LogitsReference

        return LogitsReference(self.spec, wanted)


_GREEDY = SamplingSpec(temperature=0.0, max_tokens=1)
# Assumed if the size of the vocabulary is unknown.
_LARGE_VOCABULARY = 262_144
# Memory for the rows of one step's prompts in float32, with their copies.
_STEP_BYTES = 2 << 30
# Each running request holds its rows of the whole vocabulary in memory, 256 KB a row.
_MAX_NUM_SEQS = 256
# Assumed number of positions of a row that names them in a column.
_LIKELY_POSITIONS = 4


class Logits(Task):
    """See `Task`. The section of a resolved spec has its token ids, or the size of the vocabulary."""

    name = "logits"
    comparison = VectorChanges
    verification = LogitsVerification
    section = SECTION
    # Parquet's writer needs 12 more bytes for each number of a row group: 0.8 GB for the usual 128 MiB of float16.
    row_group_bytes = 16 << 20
    has_wide_results = True
    default_max_output_bytes = 10**12
    row_columns = frozenset({"logprobs"})

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._logits = logits_of(spec)
        self._is_generated = self._logits.positions == "generated"
        self._dtype = np.dtype(self._logits.dtype)

    @property
    def draws_tokens(self) -> bool:
        return self._is_generated

    @property
    def reads_prompt_logits(self) -> bool:
        """See `Task`. The last token's logits are not among them: they are also those of the first output token."""
        return self._logits.positions not in ("last", "generated")

    @property
    def input_columns(self) -> tuple[tuple[str, str], ...]:
        """See `Task`: the column of positions."""
        return tuple(("logits.positions", column) for column in RowPositions(self.spec).columns)

    def resolve(self, model: Model) -> JobSpec:
        """See `Task`: the ids of the section's tokens, or the size of the vocabulary."""
        spec, logits = self.spec, self._logits
        if not self._is_generated:  # drop a limit from the model's generation_config
            spec = spec.model_copy(update={"sampling": spec.sampling.model_copy(update={"max_tokens": None})})
        check_token_ids("logits.token_ids", logits.token_ids, model)
        if not isinstance(logits.positions, str) and spec.input.on_overlong != "error":
            raise SpecError(
                "input.on_overlong: positions in a column count the tokens of the uncut prompt; leave it out"
            )
        return spec.model_copy(update={SECTION.name: self._with_ids(model) or self._with_vocabulary(model)})

    def _with_ids(self, model: Model) -> LogitsSpec | None:
        """The section with its token ids; None if it names no tokens."""
        logits = self._logits
        if not logits.tokens:
            return logits if logits.token_ids else None
        ids = ids_of(logits.tokens, load_tokenizer(model.tokenizer, self.spec.model.trust_remote_code))
        if logits.token_ids and logits.token_ids != ids:
            raise SpecError(
                f"logits.token_ids: got {list(logits.token_ids)}, but logits.tokens are {list(ids)}; leave out one of "
                "them"
            )
        return logits.model_copy(update={"token_ids": ids})

    def _with_vocabulary(self, model: Model) -> LogitsSpec:
        given = self._logits.vocab_size
        if model.vocab_size is None and given is None:
            raise SpecError("logits.vocab_size: missing, and the model's config does not say it; give it")
        if None not in (model.vocab_size, given) and model.vocab_size != given:
            raise SpecError(f"logits.vocab_size: got {given}; the model's is {model.vocab_size}: leave it out")
        return self._logits.model_copy(update={"vocab_size": given or model.vocab_size})

    def prompt_builder(self, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> LogitsPrompts:
        return LogitsPrompts(self.spec, tokenizer, vocab_size, begun_at)

    @property
    def logprobs_mode(self) -> str:
        return f"raw_{self._logits.values}"

    @property
    def vocabulary_rows(self) -> RowsWanted:
        """See `Task`. Its positions are those of the generated tokens; `expand` sets each prompt's own."""
        logits = self._logits
        return RowsWanted(None, logits.token_ids or None, logits.width, logits.dtype)

    def default_batch_limits(self, vocab_size: int | None, device_bytes: int | None) -> dict[str, int]:
        if not self._logits.is_full:
            return {}
        limits = {"max_num_seqs": _MAX_NUM_SEQS}
        if self.reads_prompt_logits and device_bytes is not None:
            width = self._logits.vocab_size or vocab_size or _LARGE_VOCABULARY
            limits["max_num_batched_tokens"] = max(512, min(8192, _STEP_BYTES // (8 * width)))
        return limits

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        logits = self._logits
        num_positions = self._likely_positions() if prompts is None else _mean_positions(prompts)
        return 100 + int(num_positions * (4 + logits.width * logits.item_bytes))

    def _likely_positions(self) -> int:
        match self._logits.positions:
            case "last":
                return 1
            case "all":
                return LIKELY_TOKENS
            case "generated":
                return self.spec.sampling.max_tokens or LIKELY_TOKENS
        return _LIKELY_POSITIONS

    @property
    def sizes_by_prompts(self) -> bool:
        return self.reads_prompt_logits

    @property
    def size_remedies(self) -> tuple[str, ...]:
        logits = self._logits
        return (
            *(("only some tokens (logits.tokens)",) if logits.is_full else ()),
            *(() if logits.positions == "last" else ("fewer positions (logits.positions)",)),
            *(() if logits.dtype == "float16" else ("float16 (logits.dtype)",)),
        )

    def result_fields(self) -> list[tuple[str, pa.DataType]]:
        logits = self._logits
        item = pa.float16() if logits.dtype == "float16" else pa.float32()
        generated = [("token_ids", list_of(pa.int32())), ("finish_reason", pa.string())]
        return [
            ("positions", list_of(pa.int32())),
            (logits.values, list_of(row_type(item, logits.width))),
            *(generated if self._is_generated else []),
        ]

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """One request. The row after the prompt's last token is that of the first output token, so one is generated."""
        num_tokens, sampling = len(prompt.token_ids), _GREEDY
        max_tokens, seed = 1, None
        if self._is_generated:
            sampling = prompt.sampling or self.spec.sampling
            max_tokens = sampling.max_tokens or max(1, max_model_len - num_tokens)
            seed = None if sampling.temperature == 0 else seed_of(sampling.seed, prompt.row_index, 0)
        rows = replace(self.vocabulary_rows, positions=self._positions(prompt))
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
        """list<fixed_size_list<dtype>[width]> from parts [num_positions, width], which are copied once."""
        width = self._logits.width
        known = [part for part in parts if part is not None]
        for part in known:
            if part.shape[1] != width:
                raise ValueError(f"got rows of {part.shape[1]} numbers; the job's have {width}")
        flat = concatenate([part.reshape(-1) for part in known], self._dtype)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=row_type(pa.from_numpy_dtype(self._dtype), width))
        is_null = np.array([part is None for part in parts], np.bool_)
        return list_array(offsets_of([0 if part is None else len(part) for part in parts]), rows, is_null)

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """See `Task`. The rows are stored plain and uncompressed: zstd hardly shrinks them and halves the speed. DuckDB
        cannot read byte-stream split float16.
        """
        options, name = super().parquet_options(schema), self._logits.values
        paths = {field.name: leaf_of(field)[0] for field in schema}
        return options | {
            "compression": {path: "none" if column == name else "zstd" for column, path in paths.items()},
            "compression_level": {path: 1 for column, path in paths.items() if column != name},
            "use_byte_stream_split": [path for path in options["use_byte_stream_split"] if path != paths[name]],
        }

    def warm_up_request(self) -> Request:
        has_own = not isinstance(self._logits.positions, str)
        [request] = self.expand(Prompt(-1, [1] * 8, None, None, positions=(0, 7) if has_own else None), 12)
        return request


def row_type(item: pa.DataType, width: int) -> pa.DataType:
    """A vector whose numbers are never null: it is written twice as fast and read four times as fast."""
    return pa.list_(pa.field(ITEM, item, nullable=False), width)


def _nothing(completions: Sequence[Completion | None]) -> pa.Int32Array:
    """`num_output_tokens`: 0, because the one token that the engine generates is not stored."""
    return pa.array([None if completion is None else 0 for completion in completions], pa.int32())


def _positions(completion: Completion) -> npt.NDArray[np.int32]:
    """int32 [num_positions]: for each row, the index of the token before it, from the prompt's first."""
    rows, request = completion.request.rows, completion.request
    assert rows is not None
    if rows.positions is not None:
        return np.asarray(rows.positions, np.int32)
    first = len(request.prompt_token_ids) - 1
    return np.arange(first, first + len(completion.token_ids), dtype=INT32)


def _mean_positions(prompts: Sequence[Prompt]) -> float:
    counts = [len(prompt.token_ids) if prompt.positions is None else len(prompt.positions) for prompt in prompts]
    return float(np.mean(counts)) if counts else 0.0
