"""Scored rows for people to look at before a job runs: where the context ends and what is scored behind it."""

from collections.abc import Iterator

from batchinf.prompt import show
from batchinf.records import Prompt
from batchinf.spans import Span

_MOST_SPANS, _MOST_IDS = 8, 12
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
        yield f"    token ids: {', '.join(map(str, ids[:_MOST_IDS]))}{'' if len(ids) <= _MOST_IDS else ', …'}"
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
