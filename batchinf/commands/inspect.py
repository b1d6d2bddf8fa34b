"""`batchinf inspect`: one row whole, with its prompt and its tokens decoded by the job's own tokenizer."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import BatchinfError, UserError
from batchinf.base.parquet import open_part, readable_rows
from batchinf.base.slices import SOURCE_FOLDER, job_folders
from batchinf.base.text import one_line
from batchinf.job.job import begun_at, max_model_len
from batchinf.job.open import open_job
from batchinf.manifest.state import read_state
from batchinf.manifest.versions import stored_spec
from batchinf.prompts.encoder import show, token_texts
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.tasks.columns import prompt_hash
from batchinf.tasks.registry import stored_task
from batchinf.tasks.stored import TOKEN_COLUMNS

# Columns of numbers for each token, by what they are of: `output` or `scored` tokens, and the prompt's.
_PREFIXES = ("", "prompt_")
_NOT_FIELDS = {f"{prefix}{name}" for prefix in _PREFIXES for name in ("token_ids", *TOKEN_COLUMNS)} | {"prompt"}


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the most likely tokens at a position."""

    text: str
    token_id: int
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its stored values. alternatives: the most likely first; the token itself is one of them."""

    text: str
    token_id: int
    logprob: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Text between special tokens, or one special token."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class InspectedSample:
    """One output row. fields: its columns without those of tokens. prompt_tokens: with `prompt_logprobs` only.

    decoded: the text of all tokens together, with special tokens; None without tokens. stopped_by: the stop token or
    the stop string, in words; None if `stop_reason` is null.
    """

    fields: dict[str, Any]
    decoded: str | None
    stopped_by: str | None
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class InspectReport:
    """A row with all its samples. prompt: None if it cannot be shown, for the reason in `prompt_note`.

    same_id: positions of other rows with this id.
    """

    folder: str
    row: str
    same_id: tuple[int, ...]
    prompt: tuple[PromptPiece, ...] | None
    prompt_note: str
    samples: tuple[InspectedSample, ...]


def inspect_row(out: str, wanted: str) -> InspectReport:
    """The row with this id or, if no id matches, at this position. Raises UserError if it is not finished."""
    results = Results(out)
    found = _find(results, wanted)
    rows = [row for row in found if row["row_index"] == found[0]["row_index"]]
    same_id = dict.fromkeys(row["row_index"] for row in found[len(rows) :])
    tokenizer = results.tokenizer()
    prompt, note = None, ""
    try:
        ids = _prompt_ids(results, rows[0], tokenizer)
        prompt = tuple(_pieces(tokenizer, ids))
        rows = [{**row, "prompt_token_ids": ids} for row in rows]
    except BatchinfError as error:
        note = one_line(error)
    row_columns = stored_task(results.spec).row_columns
    samples = tuple(
        InspectedSample(
            {name: value for name, value in row.items() if name not in _NOT_FIELDS - row_columns},
            None if row.get("token_ids") is None else show(tokenizer, row["token_ids"]),
            _stopped_by(tokenizer, row, results.spec["sampling"]["stop"]),
            *(tuple(_tokens(tokenizer, {**row, **dict.fromkeys(row_columns)}, prefix)) for prefix in _PREFIXES),
        )
        for row in rows
    )
    return InspectReport(out, wanted, tuple(same_id), prompt, note, samples)


def _find(results: Results, wanted: str) -> list[dict[str, Any]]:
    """The row's output rows, one for each sample, then those of other rows with the same id, by their positions."""
    keys = [name for name in ("id", "row_index") if name in results.schema.names]
    for key in keys:
        values = _candidates(results.schema.field(key), wanted)
        paths = results.parts if values is not None else ()
        if rows := [row for path in paths for row in _rows_in(path, key, values)]:
            return sorted(rows, key=lambda row: row["row_index"])
    if "id" not in keys and _candidates(pa.field("row_index", pa.int64()), wanted) is None:
        raise UserError(
            f"--row {wanted}: the job has no input.id_column, so a row is named by its position in the input, from 0"
        )
    named = "an id or a position" if "id" in keys else "a position, from 0"
    state = "" if results.is_done else "; the job is not done, and the row may come"
    raise UserError(f"--row {wanted}: none of {results.num_rows:,} committed rows has this as {named}{state}")


def _candidates(field: pa.Field, wanted: str) -> pa.Array | None:
    """The values that match it in the column; None if none can."""
    try:
        return pa.array([wanted]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _rows_in(path: pathlib.Path, key: str, values: pa.Array) -> Iterator[dict[str, Any]]:
    with open_part(path) as file:
        for group in range(file.num_row_groups):
            is_wanted = pc.is_in(file.read_row_group(group, [key]).column(0), values)
            if pc.any(is_wanted).as_py():
                yield from readable_rows(file.read_row_group(group).filter(is_wanted))


def _prompt_ids(results: Results, row: Mapping[str, Any], tokenizer: Any) -> Sequence[int]:
    """The prompt's token ids, stored or made again. Raises UserError."""
    if (stored := row.get("prompt_token_ids")) is not None:
        return list(stored)
    if row["prompt_hash"] is None:
        raise UserError("the row has no prompt")
    spec = stored_spec(results.spec)
    with contextlib.ExitStack() as stack:
        own = pathlib.Path(results.folder, SOURCE_FOLDER)
        cache = own if own.is_dir() else pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = [job.folder for job in job_folders(results.folder) if job.folder.exists("manifest")]
        state = next(state for folder in folders if (state := read_state(folder)) is not None)
        job = open_job(SpecFile(spec, {"": results.folder}, results.folder), cache, state, "leave")
        stack.enter_context(contextlib.closing(job.source))
        builder = job.task.prompt_builder(tokenizer, job.model.vocab_size, begun_at(job, state.header))
        [source_row] = job.source.read(row["row_index"], row["row_index"] + 1, builder.columns)
        [prompt] = builder.build([source_row], max_model_len(job))
    if prompt.scoring is not None:
        span = prompt.scoring.spans[0]
        return span.token_ids[: span.start]
    if prompt.error is None and prompt_hash(_int32(prompt.token_ids)) != row["prompt_hash"]:
        raise UserError(
            "the input has changed since the run, so the prompt is not known; output.include_prompt stores prompts"
        )
    return prompt.token_ids


def _int32(token_ids: Sequence[int]) -> Any:
    return pa.array(token_ids, pa.int32()).to_numpy()


def _pieces(tokenizer: Any, token_ids: Sequence[int]) -> Iterator[PromptPiece]:
    special, run = set(tokenizer.all_special_ids), list[int]()
    for token_id in token_ids:
        if token_id not in special:
            run.append(token_id)
            continue
        if run:
            yield PromptPiece(show(tokenizer, run), False)
        yield PromptPiece(show(tokenizer, [token_id]), True)
        run = []
    if run:
        yield PromptPiece(show(tokenizer, run), False)


def _stopped_by(tokenizer: Any, row: Mapping[str, Any], stop: Sequence[str]) -> str | None:
    """stop: the job's stop strings. `stop_reason` has a token's id as text, and a stop string may look the same."""
    reason, token_ids = row.get("stop_reason"), row.get("token_ids")
    if reason is None:
        return None
    is_token = reason.isdecimal() and reason not in stop and (not token_ids or token_ids[-1] == int(reason))
    return f"the token {token_texts(tokenizer, [int(reason)])[0]!r} ({reason})" if is_token else f"the text {reason!r}"


def _tokens(tokenizer: Any, row: Mapping[str, Any], prefix: str) -> Iterator[Token]:
    token_ids, logprobs, ranks, top_ids, top = (row.get(f"{prefix}{name}") for name in ("token_ids", *TOKEN_COLUMNS))
    if token_ids is None or (prefix and logprobs is None):
        return
    for place, text in enumerate(token_texts(tokenizer, token_ids)):
        ids, values = _at(top_ids, place) or [], _at(top, place) or []
        texts = token_texts(tokenizer, [token_id for token_id in ids if token_id is not None])
        others = zip(texts, (token_id for token_id in ids if token_id is not None), values, strict=False)
        yield Token(
            text, token_ids[place], _at(logprobs, place), _at(ranks, place), tuple(Alternative(*o) for o in others)
        )


def _at(values: Sequence[Any] | None, place: int) -> Any:
    return None if values is None or place >= len(values) else values[place]
