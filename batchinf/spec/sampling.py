"""The section `sampling` of a spec: vLLM's sampling parameters under vLLM's names."""

import difflib
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from batchinf.base.text import clip
from batchinf.spec.fields import IDENTITY, Positive, Section, Text, Texts, TokenIds, Whole, as_tuple, is_json, wrong

# Fields that a row may set for itself. None of them changes the output's columns or the engine.
PER_ROW_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed", "logit_bias", "allowed_token_ids", "bad_words",
    "thinking_token_budget", "repetition_detection",
)  # fmt: skip
# Fields whose values are mappings, which a row may also have as JSON text.
MAPPINGS = ("logit_bias", "repetition_detection")
# vLLM's V2 runner holds no more for a request. One with more would end its engine.
_MOST_TOKENS = 1024
MOST_SAMPLES = 16_384  # of a row
STRUCTURES = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")
CHOICE_COLUMN = "structured_outputs.choice"
# Kinds of structures that rows may have for themselves, by the names that `columns` has for them.
STRUCTURE_FIELDS = {f"structured_outputs.{kind}": kind for kind in STRUCTURES if kind != "json_object"}


# Fields of vLLM's SamplingParams that are no fields here, each with the reason.
_OF_PROMPTS = (
    "only vLLM's V2 runner takes it. task: logits with logits.values: logprobs, logits.token_ids_column and "
    "logits.positions stores the same logprobs with each runner"
)
NOT_TAKEN = {
    "prompt_logprob_start": _OF_PROMPTS,
    "prompt_logprob_token_ids": _OF_PROMPTS,
    "watermarking": "a watermark of engine.watermark_config is on all rows",
    "spaces_between_special_tokens": "texts are decoded as with its default, true",
    "extra_args": "it is for samplers of one's own, and what they do cannot be known from the spec",
    "routed_experts_prompt_start": "the experts of tokens are not stored",
    "trace_decode_token_ids": "it is for tests of vLLM; task: score gives the logprobs of a given text",
    "stream_interval": "nothing is streamed",
    "output_kind": "only whole outputs are stored",
    "flat_logprobs": "batchinf sets it",
    "detokenize": "batchinf sets it: texts are decoded beside the engine",
    "skip_clone": "batchinf sets it",
    "skip_reading_prefix_cache": "vLLM sets it where it is needed",
    "output_text_buffer_length": "vLLM sets it",
}


# Fields of vLLM's RepetitionDetectionParams.
_REPETITION = ("max_pattern_size", "min_pattern_size", "min_count")


def _repetition(value: dict[str, int]) -> dict[str, int]:
    """All three fields, or nothing where nothing is looked for."""
    if unknown := [name for name in value if name not in _REPETITION]:
        raise wrong(f"unknown field; it has {', '.join(_REPETITION)}", unknown[0])
    if value and "max_pattern_size" not in value:
        raise wrong("missing; must be the longest pattern that is looked for, in tokens", "max_pattern_size")
    most, least, count = (value.get(name, 0) for name in _REPETITION)
    if least > most:
        raise wrong(f"got {least} with max_pattern_size {most}; must not be above it", "min_pattern_size")
    if most and count < 2:
        raise wrong(f"got {count}; must be at least 2", "min_count")
    return {"max_pattern_size": most, "min_pattern_size": least, "min_count": count} if most else {}


def _token_id(key: Any) -> int | None:
    """A key of a mapping by token ids, as a number; None for any other key. JSON has only text as keys."""
    token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        return None
    return token_id if 0 <= token_id < 2**31 else None


def _bias(value: Any) -> Any:
    """A mapping by token ids, as numbers."""
    if not isinstance(value, dict):
        return value
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        token_id = _token_id(key)
        if token_id is None or token_id in biases:
            raise wrong(f"got {clip(repr(key))} as a key; must be token ids, each of them once; the model's tokenizer "
                        "gives those of a word")  # fmt: skip
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise wrong(f"got {clip(repr(bias))} for token {token_id}; must be a number, at least -100 and at most 100")
        biases[token_id] = bias
    return _not_too_many(biases)


def _not_too_many(tokens: Any) -> Any:
    if tokens is not None and len(tokens) > _MOST_TOKENS:
        raise wrong(f"got {len(tokens):,} tokens; must be at most {_MOST_TOKENS:,}, as vLLM's runner takes no more")
    return tokens


def _some_allowed(token_ids: tuple[int, ...] | None) -> Any:
    if token_ids == ():
        raise wrong("got no token; must be at least one, and without the field all are allowed")
    return _not_too_many(token_ids)


class SamplingSpec(Section):
    """vLLM's sampling parameters under vLLM's names. Unset fields come from the model's generation_config."""

    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES), IDENTITY] = 1
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
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias), IDENTITY] = Field(default_factory=dict)
    """A mapping from token ids to numbers from -100 to 100, which are added to their logits; at most 1,024."""
    allowed_token_ids: Annotated[TokenIds | None, AfterValidator(_some_allowed), IDENTITY] = None
    """The only tokens that the output may have, at most 1,024; unset: all. Without the end-of-sequence token among
    them, each output has `max_tokens`."""
    bad_words: Annotated[Texts | Text, AfterValidator(as_tuple), IDENTITY] = ()
    """Texts that the output may not have, as the tokenizer writes them at the beginning of a text or after a space."""
    thinking_token_budget: Annotated[int | None, Field(ge=-1, le=2**31 - 1), IDENTITY] = None
    """Maximum tokens of the reasoning, after which its end is forced; -1 is no limit. Needs `model.reasoning_parser` or
    `engine.reasoning_config`."""
    repetition_detection: Annotated[dict[str, Whole], AfterValidator(_repetition), IDENTITY] = Field(
        default_factory=dict
    )
    """End an output when a pattern of `min_pattern_size` to `max_pattern_size` tokens stands `min_count` times at its
    end, with `finish_reason` `repetition`. A `max_pattern_size` of 0 is no detection."""
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
    """Restrict the text to one of `json` (a JSON schema), `regex`, `choice` (a list of texts), `grammar`,
    `structural_tag` (JSON schemas between tags) and `json_object: true`. Each may be `{file: path}`, or
    `{column: name}` for each row's own."""
    columns: Annotated[dict[str, Text], IDENTITY] = Field(default_factory=dict)
    """A mapping from fields to the columns with each row's own value. If that value is null, the job's value is used.
    `max_tokens: {column: budget}` is short for `columns: {max_tokens: budget}`."""

    @model_validator(mode="before")
    @classmethod
    def _none_of_others(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name in NOT_TAKEN:
                raise wrong(f"not supported: {NOT_TAKEN[name]}; leave it out", name)
        return data

    @model_validator(mode="before")
    @classmethod
    def _short_columns(cls, data: Any) -> Any:
        # `max_tokens: {column: budget}` becomes `columns: {max_tokens: budget}`, so the fields keep their plain types.
        fields = data.items() if isinstance(data, dict) else ()
        short = {name: _column(name, value) for name, value in fields if _is_short(name, value)}
        left_out = set(short)
        if of_structure := _structure_column(data):
            short |= of_structure
            left_out.add("structured_outputs")
        if not short:
            return data
        columns = data.get("columns") or {}
        for name, column in short.items():
            if isinstance(columns, dict) and columns.get(name, column) != column:
                raise wrong(f"got {columns[name]!r} beside {name}: {{column: {column}}}, and {column!r} counted until "
                            "now; give one of them", f"columns.{name}")  # fmt: skip
        plain = {name: value for name, value in fields if name not in left_out}
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
            raise wrong(f"got {got}; must be {allowed_structure(kind, value)}", kind)
        if kind == "json_object":  # the schema that all of vLLM's backends make of it
            return {"json": _schema_text({"type": "object"})}
        return {kind: _schema_text(value) if kind == "json" else _tag_text(value)} if kind in _IN_JSON else structure

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if len(kinds := [kind for field, kind in STRUCTURE_FIELDS.items() if field in self.columns]) > 1:
            raise wrong(f"got columns of {' and '.join(kinds)}; must be one of them, as a row has one structure",
                        "structured_outputs")  # fmt: skip
        if self.temperature == 0 and self.n > 1:
            raise wrong(f"got {self.n} with temperature 0; greedy samples are all equal: set n to 1, "
                         "or a temperature above 0", "n")  # fmt: skip
        if self.logprob_token_ids and self.logprobs:
            raise wrong(f"got {self.logprobs} with logprob_token_ids; the engine gives the likeliest tokens or the "
                         "chosen ones: leave out one of them", "logprobs")  # fmt: skip
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong(f"got {self.min_tokens} with max_tokens {self.max_tokens}; must not be above it", "min_tokens")
        return self

    def may_have(self, field: str) -> bool:
        """Whether the job, or a row by a column, sets a field whose default is null."""
        return getattr(self, field) is not None or any(name.partition(".")[0] == field for name in self.columns)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop


def _structure_column(data: Any) -> dict[str, str]:
    """The column of `structured_outputs: {kind: {column: name}}`, by the name of the field in `columns`."""
    structure = data.get("structured_outputs") if isinstance(data, dict) else None
    for kind, value in structure.items() if isinstance(structure, dict) and len(structure) == 1 else ():
        field = f"structured_outputs.{kind}"
        if field in STRUCTURE_FIELDS and isinstance(value, dict) and [*value] == ["column"]:
            return {field: _column(field, value)}
    return {}


def _is_short(name: str, value: Any) -> bool:
    """Whether a field's value is `{column: name}`, or was meant so."""
    return isinstance(value, dict) and ((name in PER_ROW_FIELDS and name not in MAPPINGS) or [*value] == ["column"])


def _column(name: str, value: dict[str, Any]) -> str:
    """The column name in `{column: name}`."""
    if name not in PER_ROW_FIELDS and name not in STRUCTURE_FIELDS:
        close = difflib.get_close_matches(name, PER_ROW_FIELDS, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]}? " if close else ""
        names = ", ".join((*PER_ROW_FIELDS, *STRUCTURE_FIELDS))
        raise wrong(f"must be the job's, as a row cannot have its own; {meant}it can have {names}", name)
    column = value.get("column")
    if len(value) != 1 or not (isinstance(column, str) and column):
        shown = f"{{{', '.join(f'{key}: {clip(json.dumps(item, default=str))}' for key, item in value.items())}}}"
        raise wrong(f"got {shown}; must be a value, or {{column: name}} with the column of each row's own", name)
    return column


# Kinds whose value is kept as JSON text.
_IN_JSON = ("json", "structural_tag")


def _is_structure(kind: str, value: Any) -> bool:
    if kind in _IN_JSON:
        return is_json(value) and isinstance(value, dict | str)
    if kind == "json_object":
        return value is True
    if kind == "choice":
        return _is_list(value, _is_text)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    """Whether a value is a list of such items, with at least one."""
    return isinstance(value, list) and bool(value) and all(map(is_item, value))


def allowed_structure(kind: str, value: Any = None) -> str:
    """The allowed values of a kind of structures, in words. value: the wrong one."""
    if kind == "choice" and not isinstance(value, str):
        return f"a list of texts{'; text that looks like something else needs quotes' if value else ''}"
    if kind == "json_object":
        return "true"
    mapping = "as a mapping or as text"
    allowed = {
        "json": f"a JSON schema, {mapping}",
        "structural_tag": f"a structural tag, {mapping}",
        "choice": "a list of texts",
    }
    return f"{allowed.get(kind, 'text')}, or {{file: path}}"


_TAG = (
    "must be a mapping with `structures`, each with the texts `begin` and `end` and a mapping `schema`, and with "
    "`triggers`, a list of texts; or with a mapping `format`"
)


def _is_tag_structure(value: Any) -> bool:
    parts = {"begin": str, "end": str, "schema": dict}
    return isinstance(value, dict) and all(isinstance(value.get(name), kind) for name, kind in parts.items())


def _tag_text(value: dict[str, Any] | str) -> str:
    """A structural tag as text. Raises what `wrong` gives for one without the parts that backends read unchecked."""
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise wrong(f"got text that is not JSON: {error}; {_TAG}", "structural_tag") from None
    tag = tag if isinstance(tag, dict) else {}
    is_old = _is_list(tag.get("triggers"), _is_text) and _is_list(tag.get("structures"), _is_tag_structure)
    if not is_old and not isinstance(tag.get("format"), dict):
        raise wrong(f"got {clip(json.dumps(value, default=str))}; {_TAG}", "structural_tag")
    return json.dumps({"type": "structural_tag", **tag}, ensure_ascii=False)


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
