"""The section `sampling` of a spec: vLLM's sampling parameters under vLLM's names."""

import difflib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchinf.base.text import clip
from batchinf.spec.fields import IDENTITY, Positive, Section, Text, Texts, TokenIds, Whole, as_tuple, is_json, wrong

# Fields that a row may set for itself. None of them changes the output's columns or the engine.
PER_ROW_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed",
)  # fmt: skip
STRUCTURES = ("json", "regex", "choice", "grammar")


class SamplingSpec(Section):
    """vLLM's sampling parameters under vLLM's names. Unset fields come from the model's generation_config."""

    n: Annotated[int, Field(ge=1, le=16_384), IDENTITY] = 1
    """Samples for each row. Each sample is an output row with its own `sample_index` and seed."""
    temperature: Annotated[float | None, Field(ge=0, le=2), IDENTITY] = None
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float | None, Field(gt=0, le=1), IDENTITY] = None
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: Annotated[Whole | None, IDENTITY] = None
    """Sample from this many most likely tokens; 0 is all."""
    min_p: Annotated[float | None, Field(ge=0, le=1), IDENTITY] = None
    """Minimum probability of a token relative to the most likely token."""
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2), IDENTITY] = None
    """Penalty for tokens that are in the output already."""
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2), IDENTITY] = None
    """Penalty for tokens that are in the output already, multiplied by how often they are there."""
    repetition_penalty: Annotated[float | None, Field(gt=0), IDENTITY] = None
    """Factor for tokens that are in the prompt or the output; 1 is none."""
    max_tokens: Annotated[Positive | None, IDENTITY] = None
    """Maximum output tokens of a sample; default: as many as fit in `max_model_len`."""
    min_tokens: Annotated[Whole, IDENTITY] = 0
    """Minimum output tokens before a sample may end."""
    stop: Annotated[Texts | Text, AfterValidator(as_tuple), IDENTITY] = ()
    """Strings that end a sample. With them, the engine has to decode the text itself."""
    stop_token_ids: Annotated[TokenIds, IDENTITY] = ()
    """Token ids that end a sample, in addition to the model's own."""
    include_stop_str_in_output: Annotated[bool, IDENTITY] = False
    """Keep the stop string in the text."""
    ignore_eos: Annotated[bool, IDENTITY] = False
    """Continue after the end-of-sequence token."""
    skip_special_tokens: Annotated[bool, IDENTITY] = True
    """Leave special tokens out of the text."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), IDENTITY] = 0
    """The job's seed. The seed of a sampled request is a hash of it, the row and the request."""
    logprobs: Annotated[int | None, Field(ge=0, le=1000), IDENTITY] = None
    """Store each output token's logprob and rank, and the logprobs of this many most likely tokens; unset: none."""
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=1000), IDENTITY] = None
    """Store each prompt token's logprob and rank, and the logprobs of this many most likely tokens; unset: none."""
    logprob_token_ids: Annotated[TokenIds, Field(max_length=128), IDENTITY] = ()
    """Store the logprobs of these tokens at each output position, in this order, instead of the most likely ones."""
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"], IDENTITY
    ] = "raw_logprobs"
    """Values in the logprob columns. Raw: from the model's distribution. Processed: from the distribution after
    temperature, penalties, top k, top p and min p; for the prompt the same as raw. Logits are before the softmax."""
    structured_outputs: Annotated[dict[str, Any] | None, IDENTITY] = None
    """Restrict the text to one of `json` (a JSON schema), `regex`, `choice` (a list of texts) and `grammar`. Each may
    be `{file: path}`."""
    columns: Annotated[dict[str, Text], IDENTITY] = Field(default_factory=dict)
    """A mapping from fields to the columns with each row's own value. If that value is null, the job's value is used.
    `max_tokens: {column: budget}` is short for `columns: {max_tokens: budget}`."""

    @model_validator(mode="before")
    @classmethod
    def _short_columns(cls, data: Any) -> Any:
        # `max_tokens: {column: budget}` becomes `columns: {max_tokens: budget}`, so the fields keep their plain types.
        fields = data.items() if isinstance(data, dict) else ()
        short = {name: _column(name, value) for name, value in fields if _is_short(name, value)}
        if not short:
            return data
        columns = data.get("columns") or {}
        plain = {name: value for name, value in fields if name not in short}
        return {**plain, "columns": {**columns, **short} if isinstance(columns, dict) else columns}

    @field_validator("columns", mode="before")
    @classmethod
    def _per_row_only(cls, columns: Any) -> Any:
        for name, column in columns.items() if isinstance(columns, dict) else ():
            _column(name, {"column": column})
        return columns

    @field_validator("structured_outputs")
    @classmethod
    def _one_structure(cls, structure: dict[str, Any] | None) -> dict[str, Any] | None:
        if structure is None:
            return None
        if len(structure) != 1 or not set(structure) <= set(STRUCTURES):
            raise wrong(f"got {', '.join(structure) or 'nothing'}; must be one of {', '.join(STRUCTURES)}")
        [(kind, value)] = structure.items()
        if not _is_structure(kind, value):
            got = clip(json.dumps(value, default=str))
            raise wrong(f"got {got}; must be {_allowed_structure(kind, value)}", kind)
        return {"json": _schema_text(value)} if kind == "json" else structure

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise wrong(f"got {self.n} with temperature 0; greedy samples are all equal: set n to 1, "
                         "or a temperature above 0", "n")  # fmt: skip
        if self.logprob_token_ids and self.logprobs:
            raise wrong(f"got {self.logprobs} with logprob_token_ids; the engine gives the likeliest tokens or the "
                         "chosen ones: leave out one of them", "logprobs")  # fmt: skip
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong(f"got {self.min_tokens} with max_tokens {self.max_tokens}; must not be above it", "min_tokens")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


def _is_short(name: str, value: Any) -> bool:
    """Whether a field's value is `{column: name}`, or was meant so."""
    return isinstance(value, dict) and (name in PER_ROW_FIELDS or [*value] == ["column"])


def _column(name: str, value: dict[str, Any]) -> str:
    """The column name in `{column: name}`."""
    if name not in PER_ROW_FIELDS:
        close = difflib.get_close_matches(name, PER_ROW_FIELDS, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]}? " if close else ""
        raise wrong(
            f"must be the job's, as a row cannot have its own; {meant}it can have {', '.join(PER_ROW_FIELDS)}", name
        )
    column = value.get("column")
    if len(value) != 1 or not (isinstance(column, str) and column):
        shown = f"{{{', '.join(f'{key}: {clip(json.dumps(item, default=str))}' for key, item in value.items())}}}"
        raise wrong(f"got {shown}; must be a value, or {{column: name}} with the column of each row's own", name)
    return column


def _is_structure(kind: str, value: Any) -> bool:
    if kind == "json":
        return is_json(value) and isinstance(value, dict | str)
    if kind == "choice":
        return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
    return isinstance(value, str) and bool(value)


def _allowed_structure(kind: str, value: Any) -> str:
    if kind == "choice" and not isinstance(value, str):
        return f"a list of texts{'; text that looks like something else needs quotes' if value else ''}"
    allowed = {"json": "a JSON schema, as a mapping or as text", "choice": "a list of texts"}
    return f"{allowed.get(kind, 'text')}, or {{file: path}}"


def _schema_text(schema: dict[str, Any] | str) -> str:
    """A JSON schema as text. Text keeps the order of the properties, which is the order in the output."""
    from batchinf.spec.answer_schemas import objection  # 0.1 s, only for jobs with a schema

    try:
        text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        allowed = "a JSON schema, as a mapping, as text or as {file: path}"
        raise wrong(f"got text that is not JSON: {error}; must be {allowed}", "json") from None
    if (problem := objection(text)) is not None:
        raise wrong(f"not a JSON schema that texts can be checked against: {problem}", "json")
    return text
