"""Rows that `validate` shows: each with its prompt, length, sampling and the tokens that are scored."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError
from batchinf.prompts.encoder import show
from batchinf.prompts.row_values import setting
from batchinf.records import Int64Array, Prompt, Request, Span
from batchinf.source.rows import Source
from batchinf.source.types import is_json_column
from batchinf.spec.sampling import SamplingSpec

_MOST_IDS = 16
_LOOK_ROWS = 50_000
# Of a prompt that was not asked for by name.
_HEAD_CHARS, _TAIL_CHARS = 1200, 600


class ChosenRows(Sequence[int]):
    """Positions of rows, ascending, which are looked up when they are asked for."""

    def __init__(self, num_rows: int, rows: Callable[[int, int], Int64Array]) -> None:
        """rows: the positions of those number `start` to `stop` (exclusive)."""
        self._num_rows, self._rows = num_rows, rows

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(index)
            return int(self._rows(index % len(self), index % len(self) + 1)[0])
        start, stop, step = index.indices(len(self))
        found: list[int] = self._rows(start, max(start, stop)).tolist()
        return found[::step]


def random_rows(positions: Sequence[int], num_rows: int, seed: int) -> list[int]:
    """So many of these rows, ascending, the same for a seed."""
    drawn = random.Random(seed).sample(range(len(positions)), min(num_rows, len(positions)))
    return [positions[number] for number in sorted(drawn)]


def find_row(source: Source, id_column: str | None, wanted: str) -> int:
    """The first row with this id, read as the column's own type; where there are no ids, the row at this position.

    Reads the column up to there. Raises InputError.
    """
    if id_column is None:
        return _position(source, wanted)
    field = source.schema.field(id_column)
    ids = _as_type(field, wanted)
    for start in range(0, source.num_rows, _LOOK_ROWS):
        table = source.read_columns(start, min(start + _LOOK_ROWS, source.num_rows), [id_column])
        place: int = pc.index(pc.is_in(table.column(0), ids), True).as_py()
        if place >= 0:
            return start + place
    raise InputError(f"--row {wanted}: none of {source.num_rows:,} rows has this in '{id_column}' ({field.type})")


def _position(source: Source, wanted: str) -> int:
    if not wanted.isascii() or not wanted.isdigit() or int(wanted) >= source.num_rows:
        raise InputError(
            f"--row {wanted}: the job has no id_column, so a row is named by its position, 0 to {source.num_rows - 1:,}"
        )
    return int(wanted)


def _as_type(field: pa.Field, wanted: str) -> pa.Array:
    """What the column may hold for it. A column of mixed types holds JSON."""
    if is_json_column(field):
        return pa.array(list(dict.fromkeys([wanted, json.dumps(wanted, ensure_ascii=False), json.dumps(wanted)])))
    try:
        return pa.array([wanted]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"--row {wanted}: the ids in '{field.name}' are {field.type}; give one of them") from None


def row_lines(
    prompt: Prompt,
    row_id: object,
    request: Request,
    tokenizer: object,
    job_sampling: SamplingSpec,
    max_model_len: int | None,
    is_whole: bool,
) -> Iterator[str]:
    """What of a row will reach the engine. request: its first. is_whole: show all of a long prompt."""
    name = f"row {prompt.row_index}" + ("" if row_id is None else f", id {row_id!r}")
    if prompt.error is not None:
        yield f"{name}: {prompt.error.error_type}: {prompt.error.error_message}"
        return
    ids = prompt.token_ids
    makes_text = job_sampling.temperature is not None  # filled in, where there is sampling
    room = f", room for {max_model_len - len(ids):,} more in {max_model_len:,}" if max_model_len is not None else ""
    cut = "; cut to fit" if prompt.is_truncated else ""
    yield f"{name}: {len(ids):,} tokens{room if makes_text else ''}{cut}"
    for line in _clip(show(tokenizer, ids), is_whole).split("\n"):
        # Blanks at a line's end change what a model says; nobody would see them.
        bare = line.rstrip(" ")
        yield f"  │ {bare}{'·' * (len(line) - len(bare))}"
    yield f"  token ids: {', '.join(map(str, ids[:_MOST_IDS]))}{'' if len(ids) <= _MOST_IDS else ', …'}"
    left = None if max_model_len is None else max_model_len - len(ids)
    if makes_text:
        yield f"  sampling: {_sampling(request, prompt.sampling, job_sampling, left)}"


def _clip(text: str, is_whole: bool) -> str:
    num_left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
    if is_whole or num_left_out <= 100:
        return text
    return f"{text[:_HEAD_CHARS]}\n[… {num_left_out:,} characters; --row shows them …]\n{text[-_TAIL_CHARS:]}"


def _sampling(request: Request, own: SamplingSpec | None, job: SamplingSpec, left: int | None) -> str:
    """What counts for a row, its own value beside the job's. left: tokens that fit after its prompt."""
    words = []
    for name, value in job.model_dump(exclude={"columns", "structured_outputs"}).items():
        mine = value if own is None else getattr(own, name)
        if mine != value and name != "max_tokens":
            jobs_own = setting(name, value).removeprefix(f"{name} ")
            words.append(f"{setting(name, mine)} (the row's own; the job's is {jobs_own})")
    asked = job.max_tokens if own is None else own.max_tokens
    tokens = "max_tokens " + ("what fits" if asked is None else f"{asked:,}")
    if asked != job.max_tokens:
        tokens += f" (the row's own; the job's is {'what fits' if job.max_tokens is None else f'{job.max_tokens:,}'})"
    if asked is not None and left is not None and asked > left:
        tokens += f", of which {left:,} fit"
    seed = "greedy" if request.seed is None else f"seed {request.seed}"
    samples = "" if job.n == 1 else f"{job.n:,} samples, the first with "
    return ", ".join([*words, tokens, samples + seed])


_MOST_SPANS, _MOST_SPAN_IDS = 8, 12
_CONTEXT_CHARS, _SCORED_CHARS = 600, 400


def score_lines(
    prompt: Prompt, row_id: object, tokenizer: object, max_model_len: int | None, is_whole: bool
) -> Iterator[str]:
    """What of a row is scored. is_whole: show all of long texts, and all choices or windows."""
    name = f"row {prompt.row_index}" + ("" if row_id is None else f", id {row_id!r}")
    if prompt.error is not None:
        yield f"{name}: {prompt.error.error_type}: {prompt.error.error_message}"
        return
    assert prompt.scoring is not None
    spans = prompt.scoring.spans
    parts = "" if len(spans) == 1 else f" in {len(spans):,} requests"
    scored = sum(len(span.token_ids) - span.start for span in spans)
    room = "" if max_model_len is None else f", at most {max_model_len - 1:,} in one"
    cut = "; the context is cut to fit" if prompt.is_truncated else ""
    yield f"{name}: {scored:,} tokens scored{parts}{room}{cut}"
    shown = spans if is_whole else spans[:_MOST_SPANS]
    before: list[int] | None = None
    for number, span in enumerate(shown):
        context = span.token_ids[: span.start]
        if context != before:
            yield from _block("context", span.start, show(tokenizer, context), is_whole, from_end=True)
        before = context
        yield from _block(_label(number, prompt), *_scored(span, tokenizer), is_whole)
        ids = span.token_ids[span.start :]
        yield f"    token ids: {', '.join(map(str, ids[:_MOST_SPAN_IDS]))}{'' if len(ids) <= _MOST_SPAN_IDS else ', …'}"
    if len(shown) < len(spans):
        yield f"  … and {len(spans) - len(shown):,} more; --row shows them"


def _scored(span: Span, tokenizer: object) -> tuple[int, str]:
    return len(span.token_ids) - span.start, show(tokenizer, span.token_ids[span.start :])


def _label(number: int, prompt: Prompt) -> str:
    assert prompt.scoring is not None
    if len(prompt.scoring.spans) == 1:
        return "scored"
    return f"scored {number}" + (" (the answer)" if number == prompt.scoring.answer else "")


def _block(label: str, num_tokens: int, text: str, is_whole: bool, from_end: bool = False) -> Iterator[str]:
    """A piece of text behind a line at its left; blanks at its ends are part of tokens, and seen as dots."""
    yield f"  {label}, {num_tokens:,} {'token' if num_tokens == 1 else 'tokens'}:"
    most = _CONTEXT_CHARS if from_end else _SCORED_CHARS
    if not is_whole and len(text) > most:
        text = f"…{text[-most:]}" if from_end else f"{text[:most]}…"
    for line in text.split("\n"):
        bare = line.strip(" ")
        left = len(line) - len(line.lstrip(" ")) if bare else 0
        yield f"  │ {'·' * left}{bare}{'·' * (len(line) - len(bare) - left)}"
