"""What a stored row says: logprobs of tokens, or rows of numbers. The claims that `verify` holds against a reference; a
task that is to be verified has an entry in CLAIMS.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinf.base.errors import UserError
from batchinf.commands.verify.rows import StoredRow
from batchinf.records import Prompt, Request
from batchinf.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Claim:
    """Logprobs of a run of tokens of one sequence, as stored.

    kind: `output`, `prompt` or `scored`. token_ids: the whole sequence up to the run's last token. first: the run's
    first place in it, from 1. wanted: int64 [num_positions, k + 1], the token that stands there, then the k others
    that are stored. values: float32 [num_positions, k + 1], NaN where nothing is stored. has_top: the k others are the
    likeliest, in their order.
    """

    kind: str
    token_ids: list[int]
    first: int
    wanted: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    has_top: bool = True


@dataclass(frozen=True, slots=True)
class RowsClaim:
    """Rows of numbers of one sequence, as stored: logits, vectors, what a head says.

    kind: the column. token_ids: the whole sequence. positions: int64 [n], the tokens after which the rows are; None is
    one row of the whole sequence. values: [n, width], in the stored type. is_vector: see `RowsTally`.
    """

    kind: str
    token_ids: list[int]
    positions: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]
    is_vector: bool


RowValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskClaims:
    """How a task's rows are read.

    check: raises UserError where what is stored is not enough. columns: those that are needed, where they are stored.
    of: a row's claims, given its prompt and the requests that the task makes of it. rows: the columns of rows of
    numbers.
    """

    check: Callable[[JobSpec, pa.Schema], None]
    columns: tuple[str, ...]
    of: Callable[[StoredRow, Prompt, Sequence[Request]], Iterator[Claim | RowsClaim]]
    rows: Callable[[JobSpec], tuple[str, ...]] = lambda _: ()


def _check_generate(spec: JobSpec, schema: pa.Schema) -> None:
    if "logprobs" not in schema.names and "prompt_logprobs" not in schema.names:
        raise UserError(
            "the job stored no logprobs to verify; run one with sampling.logprobs or sampling.prompt_logprobs"
        )
    if "logprobs" in schema.names and "token_ids" not in schema.names:
        raise UserError("the job stored no token_ids, whose logprobs could be verified; run one with "
                        "output.include_token_ids: true")  # fmt: skip
    if spec.sampling.structured_outputs is not None:
        raise UserError("structured_outputs change the logprobs that are stored: they cannot be verified")


def _generate(stored: StoredRow, _: Prompt, requests: Sequence[Request]) -> Iterator[Claim]:
    row = stored.values
    prompt = requests[row["sample_index"]].prompt_token_ids
    if row.get("prompt_logprobs") is not None and len(prompt) > 1:
        # Nothing is stored of the first token.
        yield _claim(row, "prompt", prompt, 1, prompt[1:], "prompt_", 1)
    if row.get("logprobs") is not None and row["token_ids"]:
        yield _claim(row, "output", [*prompt, *row["token_ids"]], len(prompt), row["token_ids"], "", 0)


def _check_score(spec: JobSpec, schema: pa.Schema) -> None:
    if not spec.output.include_token_logprobs:
        raise UserError("the job stored sums alone; run one with output.include_token_logprobs: true")


def _score(stored: StoredRow, prompt: Prompt, requests: Sequence[Request]) -> Iterator[Claim]:
    row = stored.values
    spans = () if prompt.scoring is None else prompt.scoring.spans
    if "choice_logprobs" in row:
        kept = {name: values for name in _TOKENS if (values := row.get(f"choice_{name}")) is not None}
        rows = [{name: values[place] for name, values in kept.items()} for place in range(len(spans))]
    else:
        # Of a text, the windows' tokens end to end; where all of a context is stored, nothing is of its first token.
        has_all = len(spans) == 1 and len(row["logprobs"]) == len(spans[0].token_ids)
        starts = [1 if has_all else span.start for span in spans]
        ends = np.cumsum([len(span.token_ids) - start for span, start in zip(spans, starts, strict=True)]) + has_all
        rows = [
            {name: row[name][end - len(span.token_ids) + start : end] for name in _TOKENS if row.get(name) is not None}
            for span, start, end in zip(spans, starts, ends.tolist(), strict=True)
        ]
    for span, own in zip(spans, rows, strict=True):
        first = len(span.token_ids) - len(own["logprobs"])
        yield _claim(own, "scored", span.token_ids, first, span.token_ids[first:], "", 0)


def _claim(
    row: RowValues, kind: str, token_ids: list[int], first: int, own: list[int], prefix: str, skip: int
) -> Claim:
    wanted = np.asarray(own, np.int64)[:, None]
    values = _floats(row[f"{prefix}logprobs"][skip:])[:, None]
    top_ids, top = row.get(f"{prefix}top_token_ids"), row.get(f"{prefix}top_logprobs")
    if top_ids is not None and top is not None:
        wanted = np.concatenate([wanted, np.asarray(top_ids[skip:], np.int64)], axis=1)
        values = np.concatenate([values, np.stack([_floats(item) for item in top[skip:]])], axis=1)
    return Claim(kind, token_ids, first, wanted, values)


def _floats(values: Sequence[float | None]) -> npt.NDArray[np.float32]:
    return np.array([np.nan if value is None else value for value in values], np.float32)


def _nothing(_: JobSpec, __: pa.Schema) -> None:
    """All that is needed is always stored."""


def _logits(stored: StoredRow, _: Prompt, requests: Sequence[Request]) -> Iterator[RowsClaim]:
    [request] = requests
    # After the last output token nothing is stored.
    token_ids = [*request.prompt_token_ids, *(stored.values.get("token_ids") or ())[:-1]]
    yield from _at_positions(stored, token_ids, is_vector=False)


def _states(stored: StoredRow, _: Prompt, requests: Sequence[Request]) -> Iterator[RowsClaim]:
    yield from _at_positions(stored, requests[0].prompt_token_ids, is_vector=True)


def _at_positions(stored: StoredRow, token_ids: list[int], is_vector: bool) -> Iterator[RowsClaim]:
    positions = np.asarray(stored.values["positions"], np.int64)
    for name in stored.columns:
        values = stored.numbers(name)
        if len(positions) != len(values) or ((positions < 0) | (positions >= len(token_ids))).any():
            shown = ", ".join([*map(str, positions[:8]), *(["…"] if len(positions) > 8 else [])])
            raise UserError(
                f"row {stored.values['row_index']} has {len(values)} rows of {name} at the positions {shown} of "
                f"{len(token_ids)} tokens: its part is damaged; see batchinf check --deep"
            )
        if len(values):
            yield RowsClaim(name, token_ids, positions, values, is_vector)


def _of_prompt(is_vector: bool) -> Callable[[StoredRow, Prompt, Sequence[Request]], Iterator[RowsClaim]]:
    def claims(stored: StoredRow, _: Prompt, requests: Sequence[Request]) -> Iterator[RowsClaim]:
        for name in stored.columns:
            yield RowsClaim(name, requests[0].prompt_token_ids, None, stored.numbers(name), is_vector)

    return claims


def _names_of_states(spec: JobSpec) -> tuple[str, ...]:
    layers = spec.pooling.layers
    return ("hidden_states",) if layers is None else tuple(f"hidden_states_{layer}" for layer in layers)


def _name_of_classes(spec: JobSpec) -> tuple[str, ...]:
    return ("logits" if spec.pooling.use_activation is False else "probabilities",)


def _name_of_logits(spec: JobSpec) -> tuple[str, ...]:
    return () if spec.logits is None else (spec.logits.values,)


_TOKENS = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
CLAIMS: dict[str, TaskClaims] = {
    "generate": TaskClaims(
        _check_generate, ("token_ids", *_TOKENS, *(f"prompt_{name}" for name in _TOKENS)), _generate
    ),
    "score": TaskClaims(_check_score, (*_TOKENS, *(f"choice_{name}" for name in _TOKENS)), _score),
    "logits": TaskClaims(_nothing, ("positions", "token_ids"), _logits, _name_of_logits),
    "hidden_states": TaskClaims(_nothing, ("positions",), _states, _names_of_states),
    "embed": TaskClaims(_nothing, (), _of_prompt(is_vector=True), lambda _: ("embedding",)),
    "classify": TaskClaims(_nothing, (), _of_prompt(is_vector=False), _name_of_classes),
    "reward": TaskClaims(_nothing, (), _of_prompt(is_vector=False), lambda _: ("reward",)),
}
