"""`batchinf head --row`: one row whole, with its prompt and its tokens decoded by the job's own tokenizer."""

import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from batchinf.base.errors import BatchinfError, UserError
from batchinf.base.parquet import open_part, readable_rows
from batchinf.base.text import choice_name, list_names, nested_text, one_line, plain, plain_line
from batchinf.commands.screen import cell
from batchinf.job.begun import open_begun
from batchinf.job.job import Job, begun_at, max_model_len
from batchinf.job.pictures import Picture, Pictures
from batchinf.manifest.versions import older_rules, rules_of, stored_spec
from batchinf.prompts.encoder import show, token_texts
from batchinf.records import Prompt
from batchinf.results import Results
from batchinf.spec.file import SpecFile
from batchinf.tasks.columns import IMAGE_DIGESTS, TOKEN_COLUMNS, UNRENDERED_HASH, prompt_hash
from batchinf.tasks.registry import stored_task, task_of

# Columns with a value for each token of the output or the prompt.
_OF_TOKENS = {f"{prefix}{name}" for prefix in ("", "prompt_") for name in ("token_ids", *TOKEN_COLUMNS)}
_ALTERNATIVES = "alternatives, with their probabilities"
_OF_CHOICE = "choice_"  # begins the names of columns with an item for each choice
# Texts that are longer are cut in the terminal; `--json` has them whole.
_MOST_CHARS = 10_000
_MOST_TOKENS = 500
# From so many on, equal special tokens are counted. An image has hundreds.
_REPEATED = 8
# Least probability → colour in the terminal. A likely token has none.
_COLOURS = ((0.9, ""), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "bold red"))


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the most likely tokens at a position."""

    text: str
    token_id: int
    logprob: float | None

    @property
    def share(self) -> str:
        """The probability as text."""
        return "–" if self.logprob is None else f"{probability(self.logprob):.1%}"


@dataclass(frozen=True, slots=True)
class Token:
    """A token with its stored values."""

    text: str
    token_id: int
    logprob: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]
    """The most likely first; the token itself is one of them."""


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Text between special tokens, or one special token."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class RowChoice:
    """One choice of a scored row."""

    text: str | None
    """None if neither the spec nor stored tokens tell."""
    values: dict[str, Any]
    """Its items of the columns `choice_…`, without those of tokens."""
    tokens: tuple[Token, ...]
    """With `output.include_token_logprobs` only."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """One output row."""

    fields: dict[str, Any]
    """Its columns without those of tokens."""
    decoded: str | None
    """The text of all tokens together, with special tokens; None without tokens."""
    stopped_by: str | None
    """The stop token or the stop string, in words; None if `stop_reason` is null."""
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[Token, ...]
    """With `prompt_logprobs` only."""
    choices: tuple[RowChoice, ...] = ()
    """Of a row with choices that are scored; `fields` has their columns, too."""
    places: tuple[str, ...] = ()
    """Columns with the place of one of them."""
    copies: tuple[str, ...] = ()
    """Columns that are copies of the input's."""

    @property
    def title(self) -> str:
        """The heading of a row's only sample: a row that is scored, or has vectors, has no output of the model."""
        return "output" if self.fields.get("num_output_tokens") else "result"

    @property
    def error(self) -> str | None:
        error = self.fields.get("error_type")
        return None if error is None else f"{error}: {self.fields.get('error_message')}"

    def shown_fields(self) -> Iterator[tuple[str, Any]]:
        """The columns that are shown beside the tokens and the error."""
        for name, value in self.fields.items():
            is_shown = name == "text" and isinstance(value, str) and value in (self.decoded or "")
            is_shown |= name.startswith("error_") and name not in self.copies
            if value is not None and not is_shown:
                yield name, self.stopped_by if name == "stop_reason" else value


@dataclass(frozen=True, slots=True)
class WholeRow:
    """A row with all its samples."""

    folder: str
    row: str
    same_id: tuple[int, ...]
    """Positions of other rows with this id."""
    prompt: tuple[PromptPiece, ...] | None
    prompt_note: str
    """Why the prompt cannot be shown; empty if it is."""
    pictures: tuple[Picture, ...]
    """The images of the row, as they are now."""
    pictures_note: str
    """Why they cannot be shown; empty if they are, or if the job has no images."""
    samples: tuple[RowSample, ...]


@dataclass(frozen=True, slots=True)
class BuiltAgain:
    """Prompts that were made again from the input."""

    job: Job
    begun_at: str | None
    """See `ChatTemplate`."""
    prompts: list[Prompt]
    """Their images are not loaded."""


def read_whole_row(out: str, name: str) -> WholeRow:
    """The row with this id or, if no id matches, at this position. Raises UserError if it is not finished."""
    results = Results(out)
    found = _find(results, name)
    wholes = [row for row in found if row["row_index"] == found[0]["row_index"]]
    own_names = {*results.own_schema.names}
    rows = [{name: value for name, value in row.items() if name in own_names} for row in wholes]
    tokenizer = results.tokenizer()
    again = functools.cache(lambda: build_again(results, [found[0]["row_index"]]))
    prompt = None
    note = ""
    try:
        ids = _prompt_ids(results, rows, again)
        rows = [{**row, "prompt_token_ids": own} for row, own in zip(rows, ids, strict=True)]
        if any(own != ids[0] for own in ids):
            note = "the row has several; they are with the samples"
        else:
            prompt = tuple(_pieces(tokenizer, ids[0]))
    except BatchinfError as error:
        note = one_line(error)
    task = stored_task(results.spec)
    row_columns = task.row_columns
    pictures, pictures_note = _pictures(results, rows[0], again)
    shown = task_of(stored_spec(results.spec)).shown_columns
    places = {name: place for place, name in enumerate(results.schema.names)}
    copies = [name for name in places if name not in own_names]
    samples = [
        _sample(tokenizer, row, results.spec["sampling"]["stop"], row_columns, has_own=prompt is None) for row in rows
    ]
    fields = (
        sample.fields | {name: whole[name] for name in copies} for sample, whole in zip(samples, wholes, strict=True)
    )
    return WholeRow(
        folder=out,
        row=name,
        same_id=tuple(dict.fromkeys(row["row_index"] for row in found[len(rows) :])),
        prompt=prompt,
        prompt_note=note,
        pictures=pictures,
        pictures_note=pictures_note,
        samples=tuple(
            replace(
                sample,
                fields=dict(sorted(shown_fields.items(), key=lambda item: places.get(item[0], -1))),
                choices=tuple(_choices(tokenizer, row, shown.texts_of(whole))) if shown.choice_sums else (),
                places=tuple(shown.choices),
                copies=tuple(copies),
            )
            for sample, shown_fields, row, whole in zip(samples, fields, rows, wholes, strict=True)
        ),
    )


def _choices(tokenizer: Any, row: Mapping[str, Any], texts: Sequence[str]) -> Iterator[RowChoice]:
    """The choices of a scored row."""
    columns = {name.removeprefix(_OF_CHOICE): value for name, value in row.items() if name.startswith(_OF_CHOICE)}
    for place in range(len(columns.get("logprob_sums") or ())):
        own = {name: _at(value, place) for name, value in columns.items()}
        ids = own.get("token_ids")
        decoded = None if ids is None else show(tokenizer, ids)
        yield RowChoice(
            text=texts[place] if place < len(texts) else decoded,
            values={name: value for name, value in own.items() if name not in _OF_TOKENS},
            tokens=tuple(_tokens(tokenizer, own)),
        )


def _sample(
    tokenizer: Any, row: Mapping[str, Any], stop: Sequence[str], row_columns: Collection[str], *, has_own: bool
) -> RowSample:
    """stop: the job's stop strings. row_columns: names of columns of tokens in which the task stores other things.
    has_own: show the prompt of this sample, if it is known."""
    if has_own and row.get("prompt_token_ids"):
        row = {"prompt": None, **row} | {"prompt": show(tokenizer, row["prompt_token_ids"])}
    hidden = {*([] if has_own else ["prompt"]), *_OF_TOKENS}.difference(row_columns)
    of_tokens = {**row, **dict.fromkeys(row_columns)}
    return RowSample(
        fields={name: value for name, value in row.items() if name not in hidden},
        decoded=None if row.get("token_ids") is None else show(tokenizer, row["token_ids"]),
        stopped_by=_stopped_by(tokenizer, row, stop),
        tokens=tuple(_tokens(tokenizer, of_tokens)),
        prompt_tokens=tuple(_tokens(tokenizer, of_tokens, "prompt_")) if row.get("prompt_logprobs") is not None else (),
    )


def _find(results: Results, name: str) -> list[dict[str, Any]]:
    """The row's output rows, one for each sample, then those of other rows with the same id, by their positions."""
    keys = [key for key in ("id", "row_index") if key in results.schema.names]
    for key in keys:
        values = _candidates(results.schema.field(key), name)
        paths = results.parts if values is not None else ()
        if rows := [row for path in paths for row in _rows_in(path, key, values)]:
            return sorted(rows, key=lambda row: row["row_index"])
    raise _not_found(results, name, keys)


def _not_found(results: Results, name: str, keys: Collection[str]) -> UserError:
    """The error for a row that is not there. keys: the columns that were looked through."""
    if "id" not in keys and _candidates(pa.field("row_index", pa.int64()), name) is None:
        return UserError(
            f"--row {name}: the job has no input.id_column, so a row is named by its position in the input, from 0"
        )
    named = "an id or a position" if "id" in keys else "a position, from 0"
    state = "" if results.is_done else "; the job is not done, and the row may come"
    return UserError(f"--row {name}: none of {results.num_rows:,} committed rows has this as {named}{state}")


def _candidates(field: pa.Field, name: str) -> pa.Array | None:
    """The values of the column that match what the user typed; None if none can."""
    try:
        return pa.array([name]).cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _rows_in(path: pathlib.Path, key: str, values: pa.Array) -> Iterator[dict[str, Any]]:
    with open_part(path) as file:
        for group in range(file.num_row_groups):
            matches = pc.is_in(file.read_row_group(group, [key]).column(0), values)
            if pc.any(matches).as_py():
                yield from readable_rows(file.read_row_group(group).filter(matches))


def _prompt_ids(
    results: Results, rows: Sequence[Mapping[str, Any]], again: Callable[[], BuiltAgain]
) -> list[list[int]]:
    """The token ids of each sample's prompt, stored or made again. Raises UserError."""
    if any(row.get("prompt_token_ids") is not None for row in rows):
        return [list(row["prompt_token_ids"] or ()) for row in rows]
    prompt = _only_prompt(again(), rows[0])
    parts = [prompt.part_of(sample.get("sample_index", 0)) for sample in rows]
    _check_same(parts, rows, older_rules(rules_of(results.spec)))
    if prompt.scoring is not None:
        span = prompt.scoring.spans[0]
        return [span.token_ids[: span.start]] * len(rows)
    return [part.token_ids for part in parts]


def build_again(results: Results, positions: Sequence[int]) -> BuiltAgain:
    """The prompts of the input rows at these ascending positions. Raises BatchinfError."""
    file = SpecFile(stored_spec(results.spec), {"": results.folder}, results.folder)
    with open_begun(file, results.root) as (job, state):
        builder = job.prompt_builder(state)
        rows = job.source.read_rows(np.asarray(positions, np.int64), builder.columns)
        return BuiltAgain(job, begun_at(job, state), builder.build(rows, max_model_len(job)))


def _only_prompt(built: BuiltAgain, row: Mapping[str, Any]) -> Prompt:
    """The prompt of the only row, whose images are placeholders. Raises UserError if it has no tokens."""
    [prompt] = built.prompts
    if prompt.error is not None and not prompt.token_ids:
        if row.get("error_type") is None:  # it has run, but cannot be made here and now
            raise UserError(f"the prompt cannot be made again: {prompt.error.error_message}")
        raise UserError("no prompt was run; the error below says why")
    return prompt


def _pictures(
    results: Results, row: Mapping[str, Any], again: Callable[[], BuiltAgain]
) -> tuple[tuple[Picture, ...], str]:
    """The images of a row, and why they are not shown."""
    if results.spec["input"].get("images") is None:  # absent in jobs of older versions
        return (), ""
    try:
        built = again()
    except BatchinfError as error:
        return (), one_line(error)
    [prompt] = built.prompts
    pictures = Pictures(built.job, has_copies=False, fetches=True)
    return pictures.of(prompt.image_sources, row.get(IMAGE_DIGESTS)), ""


def _check_same(parts: Sequence[Prompt], rows: Sequence[Mapping[str, Any]], note: str) -> None:
    """Raise UserError if the prompts of samples are not those of the run. note: see `older_rules`."""
    for part, sample in zip(parts, rows, strict=True):
        # Of a prompt with images, only the hash from before the processor added their tokens can be compared. Whether
        # the images are the same is said beside each of them.
        digests = part.image_sources and (sample.get(IMAGE_DIGESTS) or ())
        stored = sample.get(UNRENDERED_HASH) if part.image_sources else sample["prompt_hash"]
        is_known = part.error is None and stored is not None  # an error row may have none
        if is_known and prompt_hash(np.asarray(part.token_ids, np.int32), digests) != stored:
            if note:
                raise UserError(f"it is not known, because now it comes out otherwise than in the run; {note}")
            raise UserError(
                "the input has changed since the run, so the prompt is not known; output.include_prompt stores prompts"
            )


def _pieces(tokenizer: Any, token_ids: Sequence[int]) -> Iterator[PromptPiece]:
    # The marks of a chat are special in tokenizer.json, and are no named tokens of the tokenizer.
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}
    for is_special, run in itertools.groupby(token_ids, special.__contains__):
        if not is_special:
            yield PromptPiece(show(tokenizer, list(run)), is_special)
            continue
        for token_id, same in itertools.groupby(run):
            text = show(tokenizer, [token_id])
            number = len(list(same))
            yield PromptPiece(text * number if number < _REPEATED else f"{text} × {number:,} ", is_special)


def _stopped_by(tokenizer: Any, row: Mapping[str, Any], stop: Sequence[str]) -> str | None:
    """stop: the job's stop strings. `stop_reason` has a token's id as text, and a stop string may look the same."""
    reason = row.get("stop_reason")
    token_ids = row.get("token_ids")
    if reason is None:
        return None
    is_token = reason.isdecimal() and reason not in stop and (not token_ids or token_ids[-1] == int(reason))
    return f"the token {token_texts(tokenizer, [int(reason)])[0]!r} ({reason})" if is_token else f"the text {reason!r}"


def _tokens(tokenizer: Any, row: Mapping[str, Any], prefix: str = "") -> Iterator[Token]:
    token_ids = row.get(f"{prefix}token_ids") or []
    logprobs, ranks, top_ids, top_logprobs = (row.get(f"{prefix}{name}") for name in TOKEN_COLUMNS)
    for place, text in enumerate(token_texts(tokenizer, token_ids)):
        pairs = zip(_at(top_ids, place) or [], _at(top_logprobs, place) or [], strict=False)
        yield Token(
            text=text,
            token_id=token_ids[place],
            logprob=_at(logprobs, place),
            rank=_at(ranks, place),
            alternatives=tuple(
                Alternative(token_texts(tokenizer, [token_id])[0], token_id, logprob)
                for token_id, logprob in pairs
                if token_id is not None
            ),
        )


def _at(values: Sequence[Any] | None, place: int) -> Any:
    return None if values is None or place >= len(values) else values[place]


def row_items(report: WholeRow) -> Iterator[RenderableType]:
    """The row as texts and tables for rich."""
    yield Text(f"{plain_line(report.folder)}: row {plain_line(report.row)}", "bold")
    if report.same_id:
        position = report.samples[0].fields["row_index"]
        others = list_names(map(str, report.same_id))
        yield Text(f"Rows at other positions have this id too: {others}", "yellow")
        yield Text(f"This is the row at position {position}. Give another position in place of the id.", "yellow")
    yield from _heading("prompt")
    if report.prompt is None:
        yield Text(f"not shown: {plain_line(report.prompt_note)}", "dim")
    else:
        prompt = Text()
        for piece in report.prompt:
            prompt.append(plain(piece.text), "bold cyan" if piece.is_special else "")
        yield _cut(prompt)
    yield from _picture_items(report)
    for number, sample in enumerate(report.samples):
        yield from _heading(sample.title if len(report.samples) == 1 else f"sample {number}")
        yield from _sample_items(sample)


def _picture_items(report: WholeRow) -> Iterator[RenderableType]:
    """A table of the images of the row."""
    if not report.pictures and not report.pictures_note:
        return
    yield from _heading("images")
    if report.pictures_note:
        yield Text(f"not shown: {plain_line(report.pictures_note)}", "dim")
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for picture in report.pictures:
        about = Text(picture.about) if picture.about else Text(plain_line(picture.note), "red")
        table.add_row(Text(plain_line(picture.name)), about, Text(picture.short_digest, "dim"))
    yield table


def _sample_items(sample: RowSample) -> Iterator[RenderableType]:
    if sample.error is not None:
        yield Text(plain(sample.error), "red")
    if sample.decoded is not None:
        yield _cut(_coloured(sample.decoded, sample.tokens))
        yield Text()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in sample.shown_fields():
        if sample.choices and name.startswith(_OF_CHOICE) and name not in sample.copies:
            continue  # in the table of choices
        table.add_row(Text(plain_line(name), "dim"), _whole(value, sample.choices if name in sample.places else ()))
    yield table
    if sample.choices:
        yield from _choice_items(sample.choices)
    yield from _token_items("prompt tokens", sample.prompt_tokens)
    yield from _token_items("tokens", sample.tokens)


def _token_items(title: str, tokens: Sequence[Token]) -> Iterator[RenderableType]:
    """A table of tokens, if their logprobs are known. Tokens of images have none, and are left out."""
    if all(token.logprob is None for token in tokens):
        return
    placed = [((place,), token) for place, token in enumerate(tokens) if token.logprob is not None or not place]
    yield from _heading(title)
    yield _token_table(["#"], placed[:_MOST_TOKENS])
    if len(placed) > _MOST_TOKENS:
        yield Text(f"… and {len(placed) - _MOST_TOKENS:,} more; --json has them all", "dim")


def _coloured(text: str, tokens: Sequence[Token]) -> Text:
    """A text in the colours of its tokens. A character that consists of several tokens cannot have all of them."""
    coloured = Text()
    for token in tokens:
        coloured.append(plain(token.text), _colour(token))
    return coloured if coloured.plain == plain(text) else Text(plain(text))


def _whole(value: Any, choices: Sequence[RowChoice]) -> Text:
    """A value without cuts, up to a page of text. choices: those of which the value is a place."""
    if isinstance(value, int) and 0 <= value < len(choices) and (text := choices[value].text) is not None:
        return _cut(
            Text(plain_line(str(choice_name(value, [choice.text or "" for choice in choices])), len(text) + 20))
        )
    if isinstance(value, list | dict):
        value = nested_text(value)
    return _cut(Text(plain_line(value, len(value)))) if isinstance(value, str) else cell(value)


def _choice_items(choices: Sequence[RowChoice]) -> Iterator[RenderableType]:
    """A table of the choices, and one of their tokens."""
    yield from _heading("choices")
    table = _table("choice", ["#", *choices[0].values])
    for place, choice in enumerate(choices):
        text = Text("–", "dim") if choice.text is None else _cut(Text(plain_line(choice.text, len(choice.text))))
        table.add_row(text, str(place), *(cell(value) for value in choice.values.values()))
    yield table
    if any(choice.text is None for choice in choices):
        yield Text("their texts are in the input; output.keep_columns stores a column", "dim")
    yield from _choice_tokens(choices)


def _choice_tokens(choices: Sequence[RowChoice]) -> Iterator[RenderableType]:
    numbered = ((place, enumerate(choice.tokens)) for place, choice in enumerate(choices))
    rows = [((place, number), token) for place, tokens in numbered for number, token in tokens]
    if rows:
        yield from _heading("tokens of the choices")
        yield _token_table(["choice", "#"], rows)


def _table(text: str, names: Sequence[str]) -> Table:
    """An empty table. text: the column of text, which is at the left; it is the first one if no other is named so."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in names if text in names else (text, *names):
        table.add_column(name, justify="left" if name == text else "right", no_wrap=name != "choice")
    return table


def _token_table(names: Sequence[str], rows: Sequence[tuple[Sequence[int], Token]]) -> Table:
    """rows: each with the values of the first columns, which have these names."""
    table = _table("token", [*names, "token", "logprob", "rank"])
    has_others = any(token.alternatives for _, token in rows)
    if has_others:
        table.add_column(_ALTERNATIVES)
    for places, token in rows:
        logprob = "–" if token.logprob is None else f"{token.logprob:.2f}"
        rank = "–" if token.rank is None else str(token.rank)
        text = Text(token_text(token.text), _colour(token))
        table.add_row(*map(str, places), text, logprob, rank, *([_alternatives(token)] if has_others else []))
    return table


def _alternatives(token: Token) -> Text:
    alternatives = Text()
    for other in token.alternatives:
        alternatives.append(token_text(other.text), "bold" if other.token_id == token.token_id else "")
        alternatives.append(f" {other.share}   ", "dim")
    alternatives.rstrip()
    return alternatives


def token_text(text: str) -> str:
    """A token with its spaces visible."""
    return plain_line(text, 40).replace(" ", "·")


def probability(logprob: float) -> float:
    """The probability of a token; 0 for NaN."""
    return 0.0 if math.isnan(logprob) else math.exp(min(0.0, logprob))


def _colour(token: Token) -> str:
    if token.logprob is None:
        return ""
    return next(colour for least, colour in _COLOURS if probability(token.logprob) >= least)


def _heading(text: str) -> Iterator[RenderableType]:
    """After an empty line."""
    yield Text()
    yield Text(text, "bold underline")


def _cut(text: Text) -> Text:
    if len(text) > _MOST_CHARS:
        num_more = len(text) - _MOST_CHARS
        text = text[:_MOST_CHARS]
        text.append(f"… and {num_more:,} characters more; --json has them all", "dim")
    return text
