"""The section `logits` of a spec: which numbers are stored, at which positions of each row's prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import field_validator, model_validator

from batchinf.base.errors import RowError, SpecError
from batchinf.base.text import name_type
from batchinf.prompts.builder import PromptBuilder
from batchinf.records import Prompt
from batchinf.source.rows import Row
from batchinf.spec.fields import IDENTITY, Positive, Section, Text, Texts, TokenIds, wrong
from batchinf.spec.job import JobSpec, TaskSection


class PositionColumn(Section):
    """The input column that holds each row's own positions."""

    column: Annotated[Text, IDENTITY]
    """A list of positions in the prompt's tokens: 0 is the first, -1 the last."""


class LogitsSpec(Section):
    """Logits or logprobs of the whole vocabulary, or of chosen tokens, at chosen positions."""

    tokens: Annotated[Texts, IDENTITY] = ()
    """Texts that are one token each, such as `[" A", " B"]`: only theirs are stored, in this order."""
    token_ids: Annotated[TokenIds, IDENTITY] = ()
    """The same by id. Without tokens and ids all of the vocabulary is stored, in its order."""
    values: Annotated[Literal["logits", "logprobs"], IDENTITY] = "logits"
    """Logits as the model gives them, or their log-softmax, over the whole vocabulary in either case."""
    positions: Annotated[Literal["last", "all", "generated"] | PositionColumn, IDENTITY] = "last"
    """After the prompt's last token, after each of the prompt's tokens, where each output token was generated, or
    `{column: name}`: after those tokens of the prompt that a list column names."""
    dtype: Annotated[Literal["float16", "float32"], IDENTITY] = "float16"
    """Stored type."""
    vocab_size: Annotated[Positive | None, IDENTITY] = None
    """Numbers in a row of the whole vocabulary; default: what the model's config says."""

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
        """Whether all of the vocabulary is stored."""
        return not self.tokens and not self.token_ids

    @property
    def width(self) -> int:
        """Numbers in a row, once tokens and vocabulary are resolved."""
        width = self.vocab_size if self.is_full else len(self.token_ids)
        assert width, "the section is not resolved"
        return width

    @property
    def item_bytes(self) -> int:
        """Of one number."""
        return 2 if self.dtype == "float16" else 4


# Fields of `sampling` that say what is stored of a generated text, or that there are several of them.
_OF_TEXT = ("logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode", "structured_outputs", "stop")
# Those that say how a text is generated.
_OF_GENERATION = ("max_tokens", "min_tokens", "stop_token_ids", "columns")


def logits_of(spec: JobSpec) -> LogitsSpec:
    """The section of a spec, or the defaults if the spec has none."""
    section: LogitsSpec | None = getattr(spec, SECTION.name)
    return LogitsSpec() if section is None else section


def _check(spec: JobSpec) -> None:
    """Raise an error for a validator if the section does not fit the task or the section `sampling`."""
    if spec.task != "logits":
        if getattr(spec, SECTION.name) is not None:
            raise wrong(f"must be left out with task {spec.task}; or say task: logits", "logits")
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
                "has no meaning where nothing is generated; leave it out, or say logits.positions: generated",
                f"sampling.{name}",
            )


def _default(section: Section, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True, validated_data={})


SECTION = TaskSection(
    "logits",
    Annotated[LogitsSpec | None, IDENTITY],
    None,
    _check,
    "What task logits stores; default: the logits of the whole vocabulary after each prompt's last token.",
)


_MOST_SHOWN = 6


class LogitsPrompts(PromptBuilder):
    """Rows → prompts with their positions, if a column has them."""

    def __init__(self, spec: JobSpec, tokenizer: Any, vocab_size: int | None, begun_at: str | None = None) -> None:
        super().__init__(spec, tokenizer, vocab_size, begun_at)
        self._positions = RowPositions(spec)

    @property
    def columns(self) -> tuple[str, ...]:
        """See `PromptBuilder`; also the column of positions."""
        return tuple(dict.fromkeys([*super().columns, *self._positions.columns]))

    def with_own_values(self, rows: Sequence[Row], prompts: list[Prompt]) -> list[Prompt]:
        """See `PromptBuilder`."""
        return self._positions.apply(rows, prompts)


class RowPositions:
    """Row → its positions. columns: the input columns that hold them: one, or none."""

    def __init__(self, spec: JobSpec) -> None:
        positions = logits_of(spec).positions
        self.columns: tuple[str, ...] = () if isinstance(positions, str) else (positions.column,)

    def apply(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of these rows with their positions; one that has an error keeps it."""
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


def ids_of(tokens: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of texts that are one token each. Raises SpecError."""
    found = []
    for number, text in enumerate(tokens):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            shown = ", ".join(f"{tokenizer.decode([id])!r} ({id})" for id in ids[:_MOST_SHOWN])
            more = f" and {len(ids) - _MOST_SHOWN} more" if len(ids) > _MOST_SHOWN else ""
            raise SpecError(f"logits.tokens[{number}]: got {text!r}, which is {len(ids)} tokens: {shown}{more}; "
                            "must be one token, perhaps with a space before it")  # fmt: skip
        if ids[0] in found:
            raise SpecError(
                f"logits.tokens[{number}]: got {text!r}, which is the same token as another; name each once"
            )
        found.append(int(ids[0]))
    return tuple(found)
