"""Task `logits`: logits or logprobs of all tokens, or of chosen ones, at positions of the prompt or the output."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import name_type
from batchinf.model.model import Model
from batchinf.prompts.builder import PromptBuilder
from batchinf.prompts.encoder import check_token_ids, load_tokenizer
from batchinf.records import Completion, Prompt, Request, Result, RowsWanted
from batchinf.source.rows import Row
from batchinf.spec.job import JobSpec
from batchinf.spec.sampling import SamplingSpec
from batchinf.tasks.base import LIKELY_TOKENS, ShownColumns, Task
from batchinf.tasks.columns import (
    INT32,
    ITEM,
    Fields,
    float_type,
    leaf_of,
    list_of,
    number_lists,
    output_columns,
    strings,
    vector_lists,
)
from batchinf.tasks.compare import VALUE_TOKEN_IDS, ComparedColumns
from batchinf.tasks.logits.section import SECTION, LogitsSpec, logits_of

_GREEDY = SamplingSpec(temperature=0.0, max_tokens=1)
# Assumed if the size of the vocabulary is unknown.
_LARGE_VOCABULARY = 262_144
# Memory for the rows of one step's prompts in float32, with their copies.
_STEP_BYTES = 2 << 30
# Each running request holds its rows of the whole vocabulary in memory, 256 KB a row.
_MAX_NUM_SEQS = 256
# Assumed number of positions of a row that names them in a column.
_LIKELY_POSITIONS = 4


class LogitsPrompts(PromptBuilder):
    """Rows → prompts, with their positions and their ids of tokens if columns have them."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None, **options: Any
    ) -> None:
        """See `PromptBuilder`."""
        super().__init__(spec, tokenizer, vocab_size, begun_at, **options)
        self._logits = logits_of(spec)
        self.task_columns = [column for _, column in self._logits.input_columns]

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """The prompts with their positions and ids. A prompt with an error keeps the error."""
        if not self._logits.input_columns:
            return prompts
        return [self._with_own_values(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]

    def _with_own_values(self, row: Row, prompt: Prompt) -> Prompt:
        logits = self._logits
        if logits.positions_column is not None and prompt.error is None:
            prompt = with_positions(prompt, logits.positions_column, row.values.get(logits.positions_column))
        if logits.token_ids_column is not None and prompt.error is None:
            prompt = with_token_ids(prompt, logits, row.values.get(logits.token_ids_column))
        return prompt


def with_positions(prompt: Prompt, column: str, value: object) -> Prompt:
    """The prompt with the positions in `value`, or with the error why they are none."""
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


def with_token_ids(prompt: Prompt, logits: LogitsSpec, value: Any) -> Prompt:
    """The prompt with the ids in `value`, or with the error why they are none.

    value: `logits.num_token_ids` ids for all positions, or a list of that many for each position.
    """
    is_nested = isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value)
    message = _wrong_lists(prompt, logits, value) if is_nested else _objection(logits, value)
    if message is not None:
        return _failed(prompt, f"{message}, in column '{logits.token_ids_column}'", "invalid_token_ids")
    return replace(prompt, value_token_ids=tuple(map(tuple, value if is_nested else [value])))


def _wrong_lists(prompt: Prompt, logits: LogitsSpec, lists: Sequence[object]) -> str | None:
    """Why these are no lists of ids, one for each position; None if they are."""
    message = next((message for ids in lists if (message := _objection(logits, ids))), None)
    return message or _wrong_number_of_lists(prompt, logits.positions, len(lists))


def _objection(logits: LogitsSpec, ids: object) -> str | None:
    """Why this is no list of `num_token_ids` ids; None if it is."""
    if not isinstance(ids, list | tuple):
        return f"got {name_type(ids)}; expected a list of {logits.num_token_ids} ids of tokens"
    if len(ids) != logits.num_token_ids:
        return f"got a list of {len(ids)} ids of tokens; logits.num_token_ids is {logits.num_token_ids}"
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            return f"got {name_type(token_id)} among the ids of tokens"
        if not 0 <= token_id < logits.engine_width:
            return (
                f"got token {token_id}; must be at least 0 and at most {logits.engine_width - 1}, the vocabulary's last"
            )
    return None


def _wrong_number_of_lists(prompt: Prompt, positions: object, num_lists: int) -> str | None:
    if positions == "generated":
        return "got a list of ids for each position; with logits.positions: generated it must be one list for all"
    if positions == "all" and prompt.image_sources:
        return "got a list of ids for each position of a prompt with images; it must be one list for all"
    num_positions = {"last": 1, "all": len(prompt.token_ids)}.get(str(positions), len(prompt.positions or ()))
    return None if num_lists == num_positions else f"got {num_lists} lists of ids for {num_positions} positions"


def _failed(prompt: Prompt, message: str, error_type: str = "invalid_positions") -> Prompt:
    return replace(prompt, error=RowError(error_type, message))


class Logits(Task):
    """See `Task`. The section of a resolved spec has its token ids, or the size of the vocabulary."""

    name = "logits"
    prompts = LogitsPrompts
    takes_images = True
    compared = ComparedColumns(others=("token_ids",), by_largest=True)
    section = SECTION
    # Parquet's writer needs 12 more bytes for each number of a row group: 0.8 GB for the usual 128 MiB of float16.
    row_group_bytes = 16 << 20
    has_wide_results = True
    default_max_output_bytes = 10**12
    row_columns = frozenset({"logprobs"})

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self._logits = logits_of(spec)
        self._dtype = np.dtype(self._logits.dtype)
        self.draws_tokens = self._logits.positions == "generated"
        # The last token's logits are not among them: they are also those of the first output token.
        self.reads_prompt_logits = self._logits.positions not in ("last", "generated")
        self.sizes_by_prompts = self.reads_prompt_logits
        self.logprobs_mode = f"raw_{self._logits.values}"
        self.input_columns = self._logits.input_columns
        self.size_remedies = (
            *(("only some tokens (logits.tokens)",) if self._logits.is_full else ()),
            *(() if self._logits.positions == "last" else ("fewer positions (logits.positions)",)),
            *(() if self._logits.dtype == "float16" else ("float16 (logits.dtype)",)),
        )

    @property
    def _vector(self) -> pa.DataType:
        """A vector whose numbers are never null: it is written twice as fast and read four times as fast."""
        return pa.list_(pa.field(ITEM, float_type(self._logits.dtype), nullable=False), self._logits.width)

    @property
    def _ids_vector(self) -> pa.DataType | None:
        """The type of the ids that belong to a vector; None if they are the same for all rows."""
        num_ids = self._logits.num_token_ids
        return None if num_ids is None else pa.list_(pa.field(ITEM, pa.int32(), nullable=False), num_ids)

    @classmethod
    def resolve(cls, spec: JobSpec, model: Model) -> JobSpec:
        """See `Task`: the ids of the section's tokens, or the size of the vocabulary."""
        logits = logits_of(spec)
        check_token_ids("logits.token_ids", logits.token_ids, model)
        if logits.positions_column is not None and spec.input.has_images:
            raise SpecError(
                "logits.positions: got a column in a job with images; only the model's processor knows how many tokens "
                "an image has, so positions must be last, all or generated"
            )
        if logits.positions_column is not None and spec.input.on_overlong != "error":
            raise SpecError(
                "input.on_overlong: positions in a column count the tokens of the uncut prompt; leave it out"
            )
        if logits.tokens or logits.token_ids:
            logits = _with_ids(logits, spec, model)
        else:
            logits = _with_vocabulary(logits, model)
        update: dict[str, Any] = {SECTION.name: logits}
        if logits.positions != "generated":  # drop a limit from the model's generation_config
            update["sampling"] = spec.sampling.model_copy(update={"max_tokens": None})
        return spec.model_copy(update=update)

    @property
    def vocabulary_rows(self) -> RowsWanted:
        """See `Task`. Its positions are those of the generated tokens; `expand` sets each prompt's own."""
        logits = self._logits
        return RowsWanted(None, logits.token_ids or None, logits.engine_width, logits.dtype)

    def default_batch_limits(self, vocab_size: int | None, device_bytes: int | None) -> dict[str, int]:
        if not self._logits.reads_vocabulary:
            return {}
        limits = {"max_num_seqs": _MAX_NUM_SEQS}
        if self.reads_prompt_logits and device_bytes is not None:
            width = self._logits.vocab_size or vocab_size or _LARGE_VOCABULARY
            limits["max_num_batched_tokens"] = max(512, min(8192, _STEP_BYTES // (8 * width)))
        return limits

    def estimated_bytes_per_row(self, prompts: Sequence[Prompt] | None = None) -> int:
        num_positions = self._likely_positions() if prompts is None else _mean_positions(prompts)
        id_bytes = 0 if self._logits.token_ids_column is None else INT32.itemsize
        return 100 + int(num_positions * (4 + self._logits.width * (id_bytes + self._dtype.itemsize)))

    def _likely_positions(self) -> int:
        match self._logits.positions:
            case "last":
                return 1
            case "all":
                return LIKELY_TOKENS
            case "generated":
                return self.spec.sampling.max_tokens or LIKELY_TOKENS
        return _LIKELY_POSITIONS

    def result_fields(self) -> Fields:
        logits = self._logits
        generated = [("token_ids", list_of(pa.int32())), ("finish_reason", pa.string())]
        return [
            ("positions", list_of(pa.int32())),
            (logits.values, list_of(self._vector)),
            *([] if self._ids_vector is None else [(VALUE_TOKEN_IDS, list_of(self._ids_vector))]),
            *(generated if self.draws_tokens else []),
        ]

    @property
    def shown_columns(self) -> ShownColumns:
        return ShownColumns((self._logits.values, "finish_reason"))

    @classmethod
    def other_meanings(cls, a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
        """See `Task`: the numbers of other tokens."""
        one, other = (spec.get("logits") or {} for spec in (a, b))
        is_other = any(one.get(name) != other.get(name) for name in ("token_ids", "num_token_ids"))
        return ("logits", "logprobs") if is_other else ()

    def why_unverified(self, model: Model) -> str | None:
        """See `Task`."""
        return None

    def expand(self, prompt: Prompt, max_model_len: int) -> list[Request]:
        """One request. The row after the prompt's last token is that of the first output token, so one is generated."""
        rows = replace(self.vocabulary_rows, positions=self._positions(prompt), own_token_ids=prompt.value_token_ids)
        if self.draws_tokens:
            return [self.drawing_request(prompt, 0, max_model_len, rows=rows)]
        return [Request(prompt.row_index, 0, prompt.token_ids, _GREEDY, rows=rows)]

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
        values = [None if c is None else c.values for c in completions]
        columns = {
            # The one token that the engine generates after a prompt is not stored.
            **(output_columns(completions) if self.draws_tokens else {}),
            "finish_reason": strings([None if c is None else c.finish_reason for c in completions]),
            "positions": number_lists([None if c is None else _positions(c) for c in completions]),
            self._logits.values: vector_lists(values, self._dtype, self._vector),
            **self._ids_column(completions),
        }
        return self.result_batch(results, columns)

    def _ids_column(self, completions: Sequence[Completion | None]) -> dict[str, pa.Array]:
        """The column of the ids that belong to the vectors; empty if they are the same for all rows."""
        if self._ids_vector is None:
            return {}
        ids = [None if c is None else _value_token_ids(c) for c in completions]
        return {VALUE_TOKEN_IDS: vector_lists(ids, INT32, self._ids_vector)}

    def parquet_options(self, schema: pa.Schema) -> dict[str, Any]:
        """See `Task`. The rows are stored plain and uncompressed: zstd hardly shrinks them and halves the speed. DuckDB
        cannot read byte-stream split float16.
        """
        options = super().parquet_options(schema)
        name = self._logits.values
        paths = {field.name: leaf_of(field)[0] for field in schema}
        return options | {
            "compression": {path: "none" if column == name else "zstd" for column, path in paths.items()},
            "compression_level": {path: 1 for column, path in paths.items() if column != name},
            "use_byte_stream_split": [path for path in options["use_byte_stream_split"] if path != paths[name]],
        }

    def warm_up_request(self) -> Request:
        positions = None if self._logits.positions_column is None else (0, 7)
        ids = None if self._logits.num_token_ids is None else ((0,) * self._logits.num_token_ids,)
        prompt = Prompt(-1, [1] * 8, None, None, positions=positions, value_token_ids=ids)
        [request] = self.expand(prompt, 12)
        return request


_MOST_SHOWN = 6


def _with_ids(logits: LogitsSpec, spec: JobSpec, model: Model) -> LogitsSpec:
    """The section with the ids of its tokens."""
    if not logits.tokens:
        return logits
    ids = ids_of(logits.tokens, load_tokenizer(model.tokenizer, spec.model.trust_remote_code))
    if logits.token_ids and logits.token_ids != ids:
        raise SpecError(
            f"logits.token_ids: got {list(logits.token_ids)}, but logits.tokens are {list(ids)}; leave out one of them"
        )
    return logits.model_copy(update={"token_ids": ids})


def _with_vocabulary(logits: LogitsSpec, model: Model) -> LogitsSpec:
    """The section with the size of the vocabulary."""
    vocab_size = logits.vocab_size or model.vocab_size
    if vocab_size is None:
        raise SpecError("logits.vocab_size: missing, and the model's config does not say it; give it")
    if vocab_size != (model.vocab_size or vocab_size):
        raise SpecError(f"logits.vocab_size: got {vocab_size}; the model's is {model.vocab_size}: leave it out")
    return logits.model_copy(update={"vocab_size": vocab_size})


def _advice(text: str, tokenizer: Any) -> str:
    """The same text with or without a space before it, if that is one token."""
    other = text[1:] if text.startswith(" ") else f" {text}"
    is_one = bool(other) and len(tokenizer.encode(other, add_special_tokens=False)) == 1
    return f", such as {other!r}" if is_one else ""


def ids_of(tokens: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of texts. Raises SpecError if a text is not one token."""
    found: list[int] = []
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


def _positions(completion: Completion) -> npt.NDArray[np.int32]:
    """int32 [num_positions]: for each row, the index of the token before it, from the prompt's first."""
    request = completion.request
    assert request.rows is not None
    if request.rows.positions is not None:
        return np.asarray(request.rows.positions, np.int32)
    first = len(request.prompt_token_ids) - 1
    return np.arange(first, first + len(completion.token_ids), dtype=INT32)


def _value_token_ids(completion: Completion) -> npt.NDArray[np.int32]:
    """int32 [num_positions, num_token_ids]: the ids of each number in `Completion.values`."""
    rows = completion.request.rows
    assert rows is not None
    assert completion.values is not None
    return np.broadcast_to(np.array(rows.own_token_ids, np.int32), completion.values.shape)


def _mean_positions(prompts: Sequence[Prompt]) -> float:
    counts = [len(prompt.token_ids) if prompt.positions is None else len(prompt.positions) for prompt in prompts]
    return float(np.mean(counts)) if counts else 0.0
