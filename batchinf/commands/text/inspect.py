"""A row of `inspect` for the terminal. `report.row_page` makes a page of it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from batchinf.base.text import list_names, plain, plain_line
from batchinf.commands.inspect import InspectedSample, InspectReport, Token
from batchinf.commands.text.screen import cell

# Texts that are longer are cut in the terminal; the page has them whole.
_MOST_CHARS = 10_000
_MOST_TOKENS = 500
# Least probability → colour in the terminal. A likely token has none.
_COLOURS = ((0.9, ""), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "bold red"))


def row_items(report: InspectReport) -> Iterator[RenderableType]:
    """The row as texts and tables for rich."""
    yield Text(f"{plain_line(report.folder)}: row {plain_line(report.row)}", "bold")
    if report.same_id:
        yield Text(f"Rows at other positions have this id too: {list_names(map(str, report.same_id[:5]))}", "yellow")
    yield Text()
    yield _title("prompt")
    if report.prompt is None:
        yield Text(f"not shown: {plain_line(report.prompt_note)}", "dim")
    else:
        prompt = Text()
        for piece in report.prompt:
            prompt.append(plain(piece.text), "bold cyan" if piece.is_special else "")
        yield _cut(prompt)
    for number, sample in enumerate(report.samples):
        yield Text()
        yield _title(sample_title(sample) if len(report.samples) == 1 else f"sample {number}")
        yield from _sample_items(sample)


def sample_title(sample: InspectedSample) -> str:
    """The heading of a row's only sample: a row that is scored, or has vectors, has no output of the model."""
    return "output" if sample.fields.get("num_output_tokens") else "result"


def _sample_items(sample: InspectedSample) -> Iterator[RenderableType]:
    if sample.fields.get("error_type") is not None:
        yield Text(plain(f"{sample.fields['error_type']}: {sample.fields.get('error_message')}"), "red")
    if sample.decoded is not None:
        coloured = Text()
        for token in sample.tokens:
            coloured.append(plain(token.text), _colour(token))
        # A character that consists of several tokens cannot have all their colours.
        yield _cut(coloured if coloured.plain == plain(sample.decoded) else Text(plain(sample.decoded)))
        yield Text()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in shown_fields(sample):
        table.add_row(Text(plain_line(name), "dim"), cell(value))
    yield table
    for title, tokens in (("prompt tokens", sample.prompt_tokens), ("tokens", sample.tokens)):
        if any(token.logprob is not None for token in tokens):
            yield Text()
            yield _title(title)
            yield _token_table(tokens)
            if len(tokens) > _MOST_TOKENS:
                yield Text(f"… and {len(tokens) - _MOST_TOKENS:,} more; --html FILE has them all", "dim")


def shown_fields(sample: InspectedSample) -> Iterator[tuple[str, Any]]:
    """The columns that are shown beside the tokens."""
    for name, value in sample.fields.items():
        is_shown = name == "text" and isinstance(value, str) and value in (sample.decoded or "")
        if value is not None and not is_shown and not name.startswith("error_"):
            yield name, sample.stopped_by if name == "stop_reason" else value


def _token_table(tokens: Sequence[Token]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name in ("#", "token", "logprob", "rank"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    if any(token.alternatives for token in tokens[:_MOST_TOKENS]):
        table.add_column("alternatives, with their probabilities")
    for place, token in enumerate(tokens[:_MOST_TOKENS]):
        logprob = "–" if token.logprob is None else f"{token.logprob:.2f}"
        rank = "–" if token.rank is None else str(token.rank)
        text = Text(token_text(token.text), _colour(token))
        table.add_row(str(place), text, logprob, rank, *([_alternatives(token)] if len(table.columns) > 4 else []))
    return table


def _alternatives(token: Token) -> Text:
    alternatives = Text()
    for other in token.alternatives:
        alternatives.append(token_text(other.text), "bold" if other.token_id == token.token_id else "")
        alternatives.append(f" {share(other.logprob)}   ", "dim")
    alternatives.rstrip()
    return alternatives


def token_text(text: str) -> str:
    """A token with its spaces visible."""
    return plain_line(text, 40).replace(" ", "·")


def share(logprob: float | None) -> str:
    """The probability as text."""
    return "–" if logprob is None else f"{probability(logprob):.1%}"


def probability(logprob: float) -> float:
    """The probability of a token; 0 for NaN."""
    return 0.0 if math.isnan(logprob) else math.exp(min(0.0, logprob))


def _colour(token: Token) -> str:
    if token.logprob is None:
        return ""
    return next(colour for least, colour in _COLOURS if probability(token.logprob) >= least)


def _title(text: str) -> Text:
    return Text(text, "bold underline")


def _cut(text: Text) -> Text:
    if len(text) > _MOST_CHARS:
        num_more = len(text) - _MOST_CHARS
        text = text[:_MOST_CHARS]
        text.append(f"… and {num_more:,} characters more; --html FILE has them all", "dim")
    return text
