"""The rows that `validate` shows, as they will run."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchinf.base.errors import InputError, RowError
from batchinf.base.text import counted
from batchinf.prompts.encoder import show
from batchinf.prompts.row_sampling import setting
from batchinf.records import Prompt, Request, Scoring, Span
from batchinf.source.rows import Source
from batchinf.spec.sampling import SamplingSpec

_LOOK_ROWS = 50_000
_MOST_IDS = 16
# Shown characters of a prompt that the user did not name.
_HEAD_CHARS = 1200
_TAIL_CHARS = 600
_MOST_SCORED = 8
_MOST_SCORED_IDS = 12
_CONTEXT_CHARS = 600
_SCORED_CHARS = 400


@dataclass(frozen=True, slots=True)
class RowSetting:
    """A field of sampling whose value a row changes."""

    name: str
    value: Any
    job_value: Any


@dataclass(frozen=True, slots=True)
class ShownSampling:
    """The sampling of a row."""

    own: tuple[RowSetting, ...]
    """Fields other than max_tokens that differ from the job's."""
    max_tokens: int | None
    """None: as many as fit."""
    job_max_tokens: int | None
    num_left: int | None
    """Tokens that fit after the prompt; None: unknown."""
    seed: int | None
    """Of the first sample; None: greedy."""
    num_samples: int

    def text(self) -> str:
        """Values of the row's own have the job's beside them."""
        words = []
        for changed in self.own:
            job_value = setting(changed.name, changed.job_value).removeprefix(f"{changed.name} ")
            words.append(f"{setting(changed.name, changed.value)} (the row's own; the job's is {job_value})")
        tokens = f"max_tokens {_max_tokens(self.max_tokens)}"
        if self.max_tokens != self.job_max_tokens:
            tokens += f" (the row's own; the job's is {_max_tokens(self.job_max_tokens)})"
        if self.max_tokens is not None and self.num_left is not None and self.max_tokens > self.num_left:
            tokens += f", of which {self.num_left:,} fit"
        seed = "greedy" if self.seed is None else f"seed {self.seed}"
        samples = "" if self.num_samples == 1 else f"{self.num_samples:,} samples, the first with "
        return ", ".join([*words, tokens, samples + seed])


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A continuation, a choice or a window of a text."""

    context: str
    num_context_tokens: int
    text: str
    token_ids: tuple[int, ...]
    """The scored tokens."""
    is_answer: bool


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A row as it will run."""

    row_index: int
    id: Any
    """From the job's `id_column`; None without one."""
    error: RowError | None
    """Why it will be an error row; other fields are then empty."""
    text: str = ""
    """The prompt as the model sees it."""
    token_ids: tuple[int, ...] = ()
    is_truncated: bool = False
    num_image_tokens: int = 0
    """Tokens that its images have more than their placeholders, which alone are in the text and the ids."""
    max_model_len: int | None = None
    """None: unknown."""
    sampling: ShownSampling | None = None
    """None if the task makes no text."""
    scored: tuple[ScoredText, ...] = ()
    """For tasks that score prompts."""
    neutral: ScoredText | None = None
    """The first choice after the neutral context; None without one."""
    num_requests: int = 1
    """Of the row, or of its first sample, without those after the neutral context."""
    request_note: str | None = None
    """What would spare requests, in the first row that it fits; None if nothing would."""
    is_run: bool = True
    """Whether the job runs it."""
    is_named: bool = False
    """Whether the user named this row."""

    def lines(self) -> Iterator[str]:
        """The row after an empty line. Long texts are cut unless the user named the row."""
        yield ""
        name = f"row {self.row_index}" + ("" if self.id is None else f", id {self.id!r}")
        if self.error is not None:
            yield f"{name}: {self.error.error_type}: {self.error.error_message}"
        elif self.scored:
            yield from self._scored_lines(name)
        else:
            yield from self._prompt_lines(name)
        if not self.is_run:
            yield "  not among the rows that are run"

    def _prompt_lines(self, name: str) -> Iterator[str]:
        room = ""
        num_tokens = len(self.token_ids) + self.num_image_tokens
        if self.sampling is not None and self.max_model_len is not None:
            room = f", room for {self.max_model_len - num_tokens:,} more in {self.max_model_len:,}"
        images = f" ({counted(self.num_image_tokens, 'image token')} not shown)" if self.num_image_tokens else ""
        yield f"{name}: {num_tokens:,} tokens{images}{room}{'; cut to fit' if self.is_truncated else ''}"
        for line in _shortened(self.text, self.is_named).split("\n"):
            # Spaces at the end of a line change the model's output but are invisible, so they are shown as dots.
            bare = line.rstrip(" ")
            yield f"  │ {bare}{'·' * (len(line) - len(bare))}"
        yield f"  token ids: {_ids(self.token_ids, _MOST_IDS)}"
        if self.sampling is not None:
            yield f"  sampling: {self.sampling.text()}"

    def _scored_lines(self, name: str) -> Iterator[str]:
        parts = "" if len(self.scored) == 1 else f" in {counted(self.num_requests, 'request')}"
        num_scored = sum(len(scored.token_ids) for scored in self.scored)
        room = "" if self.max_model_len is None else f", at most {self.max_model_len - 1:,} in one"
        cut = "; the context is cut to fit" if self.is_truncated else ""
        yield f"{name}: {counted(num_scored, 'token')} scored{parts}{room}{cut}"
        shown = self.scored if self.is_named else self.scored[:_MOST_SCORED]
        if self.request_note is not None:
            yield f"  note: {self.request_note}"
        before: tuple[int, str] | None = None
        for number, scored in enumerate(shown):
            context = (scored.num_context_tokens + self.num_image_tokens, scored.context)
            if context != before:
                yield from _block("context", *context, is_whole=self.is_named, from_end=True)
            before = context
            label = "scored" if len(self.scored) == 1 else f"scored {number}{' (the answer)' * scored.is_answer}"
            yield from _block(label, len(scored.token_ids), scored.text, is_whole=self.is_named)
            yield f"    token ids: {_ids(scored.token_ids, _MOST_SCORED_IDS)}"
        if len(shown) < len(self.scored):
            yield f"  … and {len(self.scored) - len(shown):,} more; --row shows them"
        if self.neutral is not None:
            neutral = (self.neutral.num_context_tokens, self.neutral.context)
            yield from _block("neutral context", *neutral, is_whole=self.is_named, from_end=True)


def shown_row(
    prompt: Prompt,
    row_id: object,
    request: Request,
    *,
    tokenizer: object,
    job_sampling: SamplingSpec | None,
    max_model_len: int | None,
) -> ShownRow:
    """request: the row's first one. job_sampling: None if the task makes no text."""
    if prompt.error is not None:
        return ShownRow(prompt.row_index, row_id, prompt.error)
    left = None if max_model_len is None else max_model_len - len(prompt.token_ids)
    scoring = prompt.scoring or Scoring(())
    return ShownRow(
        row_index=prompt.row_index,
        id=row_id,
        error=None,
        text=show(tokenizer, prompt.token_ids) if prompt.scoring is None else "",
        token_ids=tuple(prompt.token_ids),
        is_truncated=prompt.is_truncated,
        max_model_len=max_model_len,
        sampling=None if job_sampling is None else _sampling(request, prompt.sampling, job_sampling, left),
        scored=_scored(scoring.spans, scoring.answer, tokenizer),
        neutral=next(iter(_scored(scoring.neutral[:1], None, tokenizer)), None),
    )


def _sampling(request: Request, own: SamplingSpec | None, job: SamplingSpec, left: int | None) -> ShownSampling:
    values, job_values = (
        {} if own is None else each.model_dump(exclude={"columns", "structured_outputs", "max_tokens"})
        for each in (own or job, job)
    )
    changed = (RowSetting(name, value, job_values[name]) for name, value in values.items())
    return ShownSampling(
        own=tuple(setting for setting in changed if setting.value != setting.job_value),
        max_tokens=job.max_tokens if own is None else own.max_tokens,
        job_max_tokens=job.max_tokens,
        num_left=left,
        seed=request.seed,
        num_samples=(own or job).n,
    )


def _scored(spans: Sequence[Span], answer: int | None, tokenizer: object) -> tuple[ScoredText, ...]:
    contexts: dict[tuple[int, ...], str] = {}
    texts = []
    for number, span in enumerate(spans):
        context = tuple(span.token_ids[: span.start])
        scored = span.token_ids[span.start :]
        if context not in contexts:
            contexts = {context: show(tokenizer, context)}
        text = ScoredText(
            context=contexts[context],
            num_context_tokens=span.start,
            text=show(tokenizer, scored),
            token_ids=tuple(scored),
            is_answer=number == answer,
        )
        texts.append(text)
    return tuple(texts)


def random_rows(positions: Sequence[int], num_rows: int, seed: int) -> list[int]:
    """A random sample of these rows, in their order. The seed determines it."""
    drawn = random.Random(seed).sample(range(len(positions)), min(num_rows, len(positions)))
    return [positions[number] for number in sorted(drawn)]


def find_row(source: Source, id_column: str | None, text: str) -> int:
    """The first row with this id, as the column's type; without ids, the row at this position. Raises InputError."""
    if id_column is None:
        if not text.isascii() or not text.isdigit() or int(text) >= source.num_rows:
            raise InputError(
                f"--row {text}: the job has no id_column, so a row is named by its position, 0 to "
                f"{source.num_rows - 1:,}"
            )
        return int(text)
    field = source.id_field(id_column)
    try:
        ids = pa.array([text]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(f"--row {text}: the ids in '{field.name}' are {field.type}; give one of them") from None
    for start in range(0, source.num_rows, _LOOK_ROWS):
        table = source.read_fields(start, min(start + _LOOK_ROWS, source.num_rows), [field], {})
        place: int = pc.index(pc.is_in(table.column(0), ids), True).as_py()
        if place >= 0:
            return start + place
    raise InputError(f"--row {text}: none of {source.num_rows:,} rows has this in '{id_column}' ({field.type})")


def _shortened(text: str, is_whole: bool) -> str:
    num_left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
    if is_whole or num_left_out <= 100:
        return text
    return f"{text[:_HEAD_CHARS]}\n[… {num_left_out:,} characters; --row shows them …]\n{text[-_TAIL_CHARS:]}"


def _ids(ids: Sequence[int], most: int) -> str:
    return f"{', '.join(map(str, ids[:most]))}{'' if len(ids) <= most else ', …'}"


def _max_tokens(value: int | None) -> str:
    return "what fits" if value is None else f"{value:,}"


def _block(label: str, num_tokens: int, text: str, *, is_whole: bool, from_end: bool = False) -> Iterator[str]:
    """A piece of text with a bar at its left. Spaces at its ends, which are part of tokens, are shown as dots."""
    yield f"  {label}, {num_tokens:,} {'token' if num_tokens == 1 else 'tokens'}:"
    most = _CONTEXT_CHARS if from_end else _SCORED_CHARS
    if not is_whole and len(text) > most:
        text = f"…{text[-most:]}" if from_end else f"{text[:most]}…"
    for line in text.split("\n"):
        bare = line.strip(" ")
        left = len(line) - len(line.lstrip(" ")) if bare else 0
        yield f"  │ {'·' * left}{bare}{'·' * (len(line) - len(bare) - left)}"
