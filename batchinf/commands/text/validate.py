"""The findings of `batchinf validate` as text."""

from collections.abc import Iterator, Sequence

from batchinf.base.reasons import most_frequent
from batchinf.base.text import counted, one_line, short_count
from batchinf.commands.shown_rows import LengthRange, PromptLengths, ScoredText, ShownRow, ShownSampling
from batchinf.commands.validate import (
    InputFound,
    ModelFound,
    OutputFound,
    Remark,
    RowsChosen,
    RowsDrawn,
    SpecFound,
    TaskFound,
    ValidateFinding,
)
from batchinf.model.memory import needs_lines
from batchinf.prompts.row_sampling import setting

_COLUMNS = 80
_MOST_ERROR_CHARS = 400  # the advice is at the end of a message
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MOST_IDS = 16
# Shown characters of a prompt that the user did not name.
_HEAD_CHARS, _TAIL_CHARS = 1200, 600
_MOST_SCORED, _MOST_SCORED_IDS = 8, 12
_CONTEXT_CHARS, _SCORED_CHARS = 600, 400


def finding_lines(finding: ValidateFinding) -> Iterator[str]:
    """The lines for one finding."""
    match finding:
        case SpecFound():
            yield f"spec {finding.path}: good"
        case ModelFound():
            yield from _model_lines(finding)
        case InputFound():
            yield f"input {finding.path}: {finding.num_rows:,} rows, content {finding.fingerprint}"
            yield "columns: " + ", ".join(f"{name} {type}" for name, type in finding.columns.items())
        case RowsChosen():
            yield f"chosen by {finding.chosen_by}: {finding.num_rows:,} of {finding.num_input_rows:,} input rows"
        case TaskFound():
            yield from _task_lines(finding)
        case Remark():
            yield finding.text
        case PromptLengths():
            yield ""
            yield from length_lines(finding)
        case RowsDrawn():
            yield from ("", f"rows drawn with --seed {finding.seed}:")
        case ShownRow():
            yield ""
            yield from row_lines(finding)
        case OutputFound():
            yield ""
            yield from _output_lines(finding)


def _model_lines(model: ModelFound) -> Iterator[str]:
    yield f"model {model.name}: {', '.join(model.architectures or ('of unknown architecture',))}; weights whole"
    where = f"commit {model.commit}" if model.commit else model.path
    yield f"  {where}, content {model.fingerprint}"
    for adapter in model.adapters:
        yield f"  LoRA adapter {adapter.name}: rank {adapter.rank}, content {adapter.fingerprint}"
    yield from needs_lines(model.fit, model.gpu_memory_utilization)


def _task_lines(task: TaskFound) -> Iterator[str]:
    """Sampling: first fields that are not vLLM's default, with their origin, then the others."""
    if task.stores:
        yield task.stores
    if task.sampling is not None:
        given = [f"{setting(it.name, it.value)} ({it.origin})" for it in task.sampling if it.origin != "default"]
        yield from _wrapped("sampling: ", given or ["nothing is given"])
        defaults = [setting(it.name, it.value) for it in task.sampling if it.origin == "default"]
        yield from _wrapped("  by default ", defaults)
    if task.row_sampling:
        columns = ", ".join(f"{field} in '{column}'" for field, column in task.row_sampling.items())
        yield f"each row's own sampling: {columns}; null is the job's"


def _wrapped(first: str, words: Sequence[str]) -> Iterator[str]:
    """Words with commas between them, in lines of 80 columns. No word is split."""
    line = first
    for number, word in enumerate(words):
        end = "," if number < len(words) - 1 else ""
        if len(line) + len(word) + len(end) > _COLUMNS and line.strip():
            yield line.rstrip()
            line = "  "
        line += f"{word}{end} "
    if words:
        yield line.rstrip()


def _output_lines(output: OutputFound) -> Iterator[str]:
    said = {
        "slices": f"a job in {output.num_slices} slices",
        "nothing": "a new job",
        "done job": "the job there is done",
        "unfinished job": f"a job with {output.num_parts:,} parts to go on with",
    }
    yield f"output {output.folder}: {said[output.holds]}"
    if output.others_note is not None:
        yield output.others_note
    if output.drift is not None:
        yield f"warning: {output.drift}"
    if output.room_warning is not None:
        yield output.room_warning


# -- prompt lengths ----------------------------------------------------------------------------------------------------


def length_lines(found: PromptLengths) -> Iterator[str]:
    """A histogram, and the errors and cuts of rows."""
    is_all = found.num_sampled == found.num_rows
    which = f"all {found.num_rows:,}" if is_all else f"{found.num_sampled:,} of {found.num_rows:,}"
    if found.histogram:
        yield f"prompt lengths in tokens ({which} rows):"
        yield from bar_lines(found.histogram)
        yield (
            f"  p50 {found.p50:,} · p95 {found.p95:,} · max {found.longest:,} · "
            f"{'' if is_all else 'about '}{short_count(found.num_tokens)} prompt tokens in all"
        )
    if found.num_tight:
        verb = "leaves" if found.num_tight == 1 else "leave"
        yield f"  {found.num_tight:,} of them {verb} less than max_tokens below max_model_len {found.max_model_len:,}"
    if found.num_truncated:
        verb = "is" if found.num_truncated == 1 else "are"
        yield f"  {found.num_truncated:,} of them {verb} cut to fit (prompt_truncated)"
    if found.errors:
        num_errors = sum(error.num_rows for error in found.errors)
        yield f"  {num_errors:,} of {found.num_sampled:,} rows will be error rows:"
        shown, rest = most_frequent(found.errors)
        for error in shown:
            words = one_line(
                f"{error.num_rows:,} {error.error_type}, first row {error.first_row:,}: {error.first_message}"
            )
            yield f"    {words if len(words) <= _MOST_ERROR_CHARS else words[: _MOST_ERROR_CHARS - 1] + '…'}"
        yield from (f"    {line}" for line in rest)


def bar_lines(ranges: Sequence[LengthRange]) -> Iterator[str]:
    """A histogram in 80 columns."""
    labels = [f"{it.shortest:,}" if it.shortest == it.longest else f"{it.shortest:,} – {it.longest:,}" for it in ranges]
    most_rows = max(it.num_rows for it in ranges)
    label_width, count_width = max(map(len, labels)), len(f"{most_rows:,}")
    most = _COLUMNS - label_width - count_width - 6
    for label, it in zip(labels, ranges, strict=True):
        bar = _bar(it.num_rows / most_rows * most)
        yield f"  {label:>{label_width}}  {it.num_rows:>{count_width},}  {bar}".rstrip()


def _bar(width: float) -> str:
    whole, eighths = divmod(round(width * 8), 8)
    # Even the smallest number has a visible bar.
    return "█" * whole + _EIGHTHS[eighths or (1 if not whole and width > 0 else 0)].strip()


# -- rows --------------------------------------------------------------------------------------------------------------


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
    ids, room = row.token_ids, ""
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
    for own in row.own:
        jobs_own = setting(own.name, own.job_value).removeprefix(f"{own.name} ")
        words.append(f"{setting(own.name, own.value)} (the row's own; the job's is {jobs_own})")
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
            yield from _block("context", *context, row.is_named, from_end=True)
        before = context
        label = _label(number, scored, len(row.scored))
        yield from _block(label, len(scored.token_ids), scored.text, row.is_named)
        yield f"    token ids: {_ids(scored.token_ids, _MOST_SCORED_IDS)}"
    if len(shown) < len(row.scored):
        yield f"  … and {len(row.scored) - len(shown):,} more; --row shows them"


def _label(number: int, scored: ScoredText, num_scored: int) -> str:
    return "scored" if num_scored == 1 else f"scored {number}" + (" (the answer)" if scored.is_answer else "")


def _block(label: str, num_tokens: int, text: str, is_whole: bool, from_end: bool = False) -> Iterator[str]:
    """A piece of text with a bar at its left. Spaces at its ends, which are part of tokens, are shown as dots."""
    yield f"  {label}, {num_tokens:,} {'token' if num_tokens == 1 else 'tokens'}:"
    most = _CONTEXT_CHARS if from_end else _SCORED_CHARS
    if not is_whole and len(text) > most:
        text = f"…{text[-most:]}" if from_end else f"{text[:most]}…"
    for line in text.split("\n"):
        bare = line.strip(" ")
        left = len(line) - len(line.lstrip(" ")) if bare else 0
        yield f"  │ {'·' * left}{bare}{'·' * (len(line) - len(bare) - left)}"
