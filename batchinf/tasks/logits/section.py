"""The section `logits` of a spec."""

from collections.abc import Container
from typing import Annotated, Any, Literal, Self

from pydantic import field_validator, model_validator

from batchinf.spec.fields import IDENTITY, Positive, Section, Text, Texts, TokenIds, wrong
from batchinf.spec.job import JobSpec, TaskSection


class PositionColumn(Section):
    """The input column that holds each row's own positions."""

    column: Annotated[Text, IDENTITY]
    """A column with a list of positions in the prompt's tokens: 0 is the first, -1 the last."""


class LogitsSpec(Section):
    """Logits or logprobs of the whole vocabulary, or of chosen tokens, at chosen positions."""

    tokens: Annotated[Texts, IDENTITY] = ()
    """Texts of one token each, such as `[" A", " B"]`. Only their numbers are stored, in this order."""
    token_ids: Annotated[TokenIds, IDENTITY] = ()
    """Ids of tokens, instead of `tokens`. If no tokens are named, the whole vocabulary is stored, in its order."""
    token_ids_column: Annotated[Text | None, IDENTITY] = None
    """A column with each row's own ids, instead of `tokens`: one list for all positions, or one for each position."""
    num_token_ids: Annotated[Positive | None, IDENTITY] = None
    """How many ids each list in `token_ids_column` has."""
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
        if self.token_ids_column is not None and (self.tokens or self.token_ids):
            raise wrong(
                f"must be left out beside {'tokens' if self.tokens else 'token_ids'}, or that field", "token_ids_column"
            )
        if (self.token_ids_column is None) != (self.num_token_ids is None):
            has_number = self.token_ids_column is None
            raise wrong(
                "must be left out, as it has no meaning without token_ids_column"
                if has_number
                else "missing; must be how many ids each list in token_ids_column has",
                "num_token_ids",
            )
        return self

    @property
    def is_full(self) -> bool:
        """Whether the whole vocabulary is stored."""
        return self.reads_vocabulary and self.token_ids_column is None

    @property
    def reads_vocabulary(self) -> bool:
        """Whether the engine returns the whole vocabulary. A row's own ids are taken from it afterwards."""
        return not self.tokens and not self.token_ids

    @property
    def positions_column(self) -> str | None:
        """The input column that holds each row's own positions."""
        return None if isinstance(self.positions, str) else self.positions.column

    @property
    def input_columns(self) -> tuple[tuple[str, str], ...]:
        """The columns that rows' own values come from, each after the field that names it."""
        columns = (("logits.positions", self.positions_column), ("logits.token_ids_column", self.token_ids_column))
        return tuple((field, column) for field, column in columns if column is not None)

    @property
    def width(self) -> int:
        """Stored numbers of a position, of a resolved spec."""
        return self.num_token_ids or self.engine_width

    @property
    def engine_width(self) -> int:
        """Numbers of a position that the engine returns, of a resolved spec."""
        width = self.vocab_size if self.reads_vocabulary else len(self.token_ids)
        assert width, "the section is not resolved"
        return width


# Fields of `sampling` that concern what is stored of a generated text, or several texts.
_OF_TEXT = ("logprobs", "prompt_logprobs", "logprob_token_ids", "logprobs_mode", "structured_outputs", "stop")
# Fields of `sampling` that concern how a text is generated.
_OF_GENERATION = (
    "max_tokens", "min_tokens", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words",
    "thinking_token_budget", "repetition_detection", "columns",
)  # fmt: skip


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
    changed = _set_fields(spec)
    if name := next((name for name in _OF_TEXT if name in changed), None):
        instead = "; logits.values says which numbers are stored" if "logprob" in name else ""
        raise wrong(f"has no meaning with task logits{instead}; leave it out", f"sampling.{name}")
    if "n" in changed or "n" in spec.sampling.columns:
        raise wrong("must be 1 with task logits; leave it out", "sampling.n")
    if logits_of(spec).positions != "generated":
        _check_nothing_generated(changed)


def _set_fields(spec: JobSpec) -> set[str]:
    """The fields of `sampling` that the spec sets."""
    changed = set(spec.sampling.model_dump(exclude_defaults=True))
    return changed | {"structured_outputs"} if spec.sampling.may_have("structured_outputs") else changed


def _check_nothing_generated(changed: Container[str]) -> None:
    """changed: see `_set_fields`."""
    for name in _OF_GENERATION:
        if name in changed:
            raise wrong(
                "has no meaning where nothing is generated; leave it out, or set logits.positions: generated",
                f"sampling.{name}",
            )


SECTION = TaskSection(
    name="logits",
    annotation=Annotated[LogitsSpec | None, IDENTITY],
    default=None,
    check=_check,
    meaning="What task `logits` stores; default: the logits of the whole vocabulary after each prompt's last token.",
)
