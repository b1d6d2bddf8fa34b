"""The rows that `validate` shows, and the prompt lengths of a sample, as text. `validate` and `plan` use it."""

from collections.abc import Iterator, Sequence

from batchinf.base.text import counted, most_frequent, one_line, short_count
from batchinf.commands.shown_rows import LengthRange, PromptLengths, ScoredText, ShownRow, ShownSampling
from batchinf.prompts.row_sampling import setting

_COLUMNS = 80
_MOST_ERROR_CHARS = 400  # the advice is at the end of a message
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MOST_IDS = 16
# Shown characters of a prompt that the user did not name.
_HEAD_CHARS = 1200
_TAIL_CHARS = 600
_MOST_SCORED = 8
_MOST_SCORED_IDS = 12
_CONTEXT_CHARS = 600
_SCORED_CHARS = 400


def length_lines(lengths: PromptLengths) -> Iterator[str]:
    """A histogram, and the errors and cuts of rows."""
    is_all = lengths.num_sampled == lengths.num_rows
    which = f"all {lengths.num_rows:,}" if is_all else f"{lengths.num_sampled:,} of {lengths.num_rows:,}"
    if lengths.histogram:
        yield f"prompt lengths in tokens ({which} rows):"
        yield from bar_lines(lengths.histogram)
        yield (
            f"  p50 {lengths.p50:,} · p95 {lengths.p95:,} · max {lengths.longest:,} · "
            f"{'' if is_all else 'about '}{short_count(lengths.num_tokens)} prompt tokens in all"
        )
    if lengths.num_tight:
        verb = "leaves" if lengths.num_tight == 1 else "leave"
        yield (
            f"  {lengths.num_tight:,} of them {verb} less than max_tokens below max_model_len {lengths.max_model_len:,}"
        )
    if lengths.num_truncated:
        verb = "is" if lengths.num_truncated == 1 else "are"
        yield f"  {lengths.num_truncated:,} of them {verb} cut to fit (prompt_truncated)"
    if lengths.errors:
        yield from _error_lines(lengths)


def _error_lines(lengths: PromptLengths) -> Iterator[str]:
    num_errors = sum(error.num_rows for error in lengths.errors)
    yield f"  {num_errors:,} of {lengths.num_sampled:,} rows will be error rows:"
    shown, rest = most_frequent(lengths.errors)
    for error in shown:
        words = one_line(f"{error.num_rows:,} {error.error_type}, first row {error.first_row:,}: {error.first_message}")
        yield f"    {words if len(words) <= _MOST_ERROR_CHARS else words[: _MOST_ERROR_CHARS - 1] + '…'}"
    yield from (f"    {line}" for line in rest)


def bar_lines(ranges: Sequence[LengthRange]) -> Iterator[str]:
    """A histogram in 80 columns."""
    labels = [
        f"{bar.shortest:,}" if bar.shortest == bar.longest else f"{bar.shortest:,} – {bar.longest:,}" for bar in ranges
    ]
    most_rows = max(bar.num_rows for bar in ranges)
    label_width = max(map(len, labels))
    count_width = len(f"{most_rows:,}")
    most = _COLUMNS - label_width - count_width - 6
    for label, bar in zip(labels, ranges, strict=True):
        cells = _bar(bar.num_rows / most_rows * most)
        yield f"  {label:>{label_width}}  {bar.num_rows:>{count_width},}  {cells}".rstrip()


def _bar(width: float) -> str:
    whole, eighths = divmod(round(width * 8), 8)
    # Even the smallest number has a visible bar.
    return "█" * whole + _EIGHTHS[eighths or (1 if not whole and width > 0 else 0)].strip()


def row_lines(row: ShownRow) -> Iterator[str]:
    """A row as it will run. Long texts are cut unless the user named the row."""
    name = f"row {row.row_index}" + ("" if row.id is None else f", id {row.id!r}")
    if row.error is not None:
        yield f"{name}: {row.error.error_type}: {row.error.error_message}"
    elif row.scored:
        yield from _scored_lines(name, row)
    else:
        yield from _prompt_lines(name, row)
    if not row.is_run:
        yield "  not among the rows that are run"


def _prompt_lines(name: str, row: ShownRow) -> Iterator[str]:
    ids = row.token_ids
    room = ""
    if row.sampling is not None and row.max_model_len is not None:
        room = f", room for {row.max_model_len - len(ids):,} more in {row.max_model_len:,}"
    yield f"{name}: {len(ids):,} tokens{room}{'; cut to fit' if row.is_truncated else ''}"
    for line in _shortened(row.text, row.is_named).split("\n"):
        # Spaces at the end of a line change the model's output but are invisible, so they are shown as dots.
        bare = line.rstrip(" ")
        yield f"  │ {bare}{'·' * (len(line) - len(bare))}"
    yield f"  token ids: {_ids(ids, _MOST_IDS)}"
    if row.sampling is not None:
        yield f"  sampling: {_sampling(row.sampling)}"


def _shortened(text: str, is_whole: bool) -> str:
    num_left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
    if is_whole or num_left_out <= 100:
        return text
    return f"{text[:_HEAD_CHARS]}\n[… {num_left_out:,} characters; --row shows them …]\n{text[-_TAIL_CHARS:]}"


def _ids(ids: Sequence[int], most: int) -> str:
    return f"{', '.join(map(str, ids[:most]))}{'' if len(ids) <= most else ', …'}"


def _sampling(row: ShownSampling) -> str:
    """A row's sampling. Values of its own have the job's beside them."""
    words = []
    for changed in row.own:
        job_value = setting(changed.name, changed.job_value).removeprefix(f"{changed.name} ")
        words.append(f"{setting(changed.name, changed.value)} (the row's own; the job's is {job_value})")
    tokens = f"max_tokens {_max_tokens(row.max_tokens)}"
    if row.max_tokens != row.job_max_tokens:
        tokens += f" (the row's own; the job's is {_max_tokens(row.job_max_tokens)})"
    if row.max_tokens is not None and row.num_left is not None and row.max_tokens > row.num_left:
        tokens += f", of which {row.num_left:,} fit"
    seed = "greedy" if row.seed is None else f"seed {row.seed}"
    samples = "" if row.num_samples == 1 else f"{row.num_samples:,} samples, the first with "
    return ", ".join([*words, tokens, samples + seed])


def _max_tokens(value: int | None) -> str:
    return "what fits" if value is None else f"{value:,}"


def _scored_lines(name: str, row: ShownRow) -> Iterator[str]:
    parts = "" if len(row.scored) == 1 else f" in {len(row.scored):,} requests"
    num_scored = sum(len(scored.token_ids) for scored in row.scored)
    room = "" if row.max_model_len is None else f", at most {row.max_model_len - 1:,} in one"
    cut = "; the context is cut to fit" if row.is_truncated else ""
    yield f"{name}: {counted(num_scored, 'token')} scored{parts}{room}{cut}"
    shown = row.scored if row.is_named else row.scored[:_MOST_SCORED]
    before: tuple[int, str] | None = None
    for number, scored in enumerate(shown):
        context = (scored.num_context_tokens, scored.context)
        if context != before:
            yield from _block("context", *context, is_whole=row.is_named, from_end=True)
        before = context
        label = _label(number, scored, len(row.scored))
        yield from _block(label, len(scored.token_ids), scored.text, is_whole=row.is_named)
        yield f"    token ids: {_ids(scored.token_ids, _MOST_SCORED_IDS)}"
    if len(shown) < len(row.scored):
        yield f"  … and {len(row.scored) - len(shown):,} more; --row shows them"


def _label(number: int, scored: ScoredText, num_scored: int) -> str:
    return "scored" if num_scored == 1 else f"scored {number}" + (" (the answer)" if scored.is_answer else "")


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
