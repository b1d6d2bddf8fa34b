"""Sample rows of the report: the best, the worst and some at random; and the table of answers against choices."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinf.base.text import choice_name, clip
from batchinf.tasks.columns import IMAGE_DIGESTS

_EACH = 3
_CHARS = 300
_ID_CHARS = 80
_MOST_CHOICES = 24
_MOST_KEPT = 4
# The share of the best choice in the probabilities of all choices. The sums of their logprobs are a list.
CHOICE_PROBABILITY = (
    "1 / list_sum(list_transform(choice_logprob_sums, lambda x: exp(x - list_max(choice_logprob_sums))))"
)
# How sure the model was of a row, by the columns that say it: their names, SQL, and words for people.
_QUALITIES = (
    (("choice_probability",), "choice_probability", "probability of the best choice among all"),
    (("logprob_mean",), "logprob_mean", "logprob_mean"),
    (("label", "score"), "score", "score of the label"),
    (
        ("cumulative_logprob", "num_output_tokens"),
        "cumulative_logprob / nullif(num_output_tokens, 0)",
        "mean logprob of a token",
    ),
)

Query = Callable[[str], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row as an example."""

    kind: str
    """`best`, `worst` or `random`."""
    quality: float | None
    """How sure the model was; None if no column says it."""
    row_index: int
    id: str
    prompt: str
    """Empty if the job does not store prompts."""
    kept: tuple[tuple[str, str], ...]
    """Names and values of columns that the job keeps of the input, such as a true label."""
    output: str
    """Its text, its label or its best choice; empty if the task has none of them."""
    image_digests: tuple[str, ...] = ()
    """Of its images."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Examples of a job's rows without an error."""

    rows: tuple[SampleRow, ...]
    by: str
    """What `quality` is, for people; empty if no column says how sure the model was."""
    has_prompts: bool = True
    """Whether the job stores prompts."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """How many rows have which answer and which best choice."""

    choices: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """[answer][best]."""


def samples(query: Query, columns: Collection[str], choices: Sequence[str], *, kept: Sequence[str] = ()) -> Samples:
    """Some rows of the view `output`. columns: those that it has, beside those of lists other than of digests.

    kept: columns of the input that are in the view, too.
    """
    if not {"row_index", "error_type"} <= set(columns):
        return Samples((), "")
    quality, by = _quality(columns)
    output = next((name for name in ("text", "label", "best") if name in columns), "NULL")
    kept = kept[:_MOST_KEPT]
    rows = _rows_sql(columns, quality, output, kept=kept)
    is_known = "AND quality IS NOT NULL AND isfinite(quality)"
    [(num_known,)] = query(f"SELECT count(*) FROM ({rows} {is_known})")
    orders = {
        "best": f"{is_known} ORDER BY quality DESC, row_index",
        "worst": f"{is_known} ORDER BY quality, row_index",
        "random": "ORDER BY hash(row_index), row_index",
    }
    # The same row is no example of the best and of the worst.
    limits = {"best": min(_EACH, (num_known + 1) // 2), "worst": min(_EACH, num_known // 2), "random": _EACH}
    return Samples(
        tuple(
            _sample_row(kind, row, output, choices=choices, kept=kept)
            for kind, order in orders.items()
            for row in query(f"{rows} {order} LIMIT {limits[kind]}")
        ),
        by if num_known else "",
        has_prompts="prompt" in columns,
    )


def _sample_row(
    kind: str, row: Sequence[Any], output: str, *, choices: Sequence[str], kept: Sequence[str]
) -> SampleRow:
    """row: as `_rows_sql` chooses its columns."""
    row_index, quality, id_, prompt, text, answer, digests, values = row
    return SampleRow(
        kind=kind,
        quality=quality,
        row_index=row_index,
        id=clip(id_ or "", _ID_CHARS),
        prompt=clip(prompt or "", _CHARS),
        kept=tuple(
            (clip(name, _ID_CHARS), clip(value, _CHARS))
            for name, value in zip(kept, values, strict=True)
            if value is not None
        ),
        output=clip(_output(output, text, answer, choices), _CHARS),
        image_digests=tuple(digests or ()),
    )


def _quality(columns: Collection[str]) -> tuple[str, str]:
    """How sure the model was of a row: SQL, and words for people. `NULL` without words if no column says it."""
    return next(((sql, words) for names, sql, words in _QUALITIES if set(names) <= set(columns)), ("NULL", ""))


def _rows_sql(columns: Collection[str], quality: str, output: str, *, kept: Sequence[str]) -> str:
    """The query for all rows without an error. Columns that the output lacks are null."""
    answer = "answer" if output == "best" and "answer" in columns else "NULL"
    id_, prompt, digests = (name if name in columns else "NULL" for name in ("id", "prompt", IMAGE_DIGESTS))
    values = ", ".join('left("' + name.replace('"', '""') + '"::VARCHAR, 2000)' for name in kept)
    return (
        f"SELECT row_index, ({quality})::DOUBLE AS quality, left({id_}::VARCHAR, 500), left({prompt}::VARCHAR, 2000), "
        f"left({output}::VARCHAR, 2000), {answer}, {digests}, [{values}] FROM output WHERE error_type IS NULL"
    )


def _output(column: str, text: str | None, answer: int | None, choices: Sequence[str]) -> str:
    if column != "best" or text is None:
        return text or ""
    best = str(choice_name(int(text), choices))
    return best if answer is None else f"{best} (answer {choice_name(answer, choices)})"


def confusion(query: Query, columns: Collection[str], choices: Sequence[str]) -> Confusion | None:
    """The table of a job whose rows have the same choices and an answer; None for another job."""
    if not {"best", "answer"} <= set(columns) or not 1 < len(choices) <= _MOST_CHOICES:
        return None
    sql = "SELECT answer, best, count(*) FROM output WHERE answer IS NOT NULL AND best IS NOT NULL GROUP BY ALL"
    numbers = {(answer, best): num for answer, best, num in query(sql)}
    places = range(len(choices))
    counts = tuple(tuple(numbers.get((answer, best), 0) for best in places) for answer in places)
    return Confusion(tuple(clip(choice, 40) for choice in choices), counts) if numbers else None


def sample_groups(found: Samples) -> Iterator[tuple[str, list[SampleRow]]]:
    """The rows by their kind, with a title for each."""
    titles = {"best": f"The most sure: {found.by}", "worst": f"The least sure: {found.by}", "random": "At random"}
    for kind, title in titles.items():
        if rows := [row for row in found.rows if row.kind == kind]:
            yield title, rows
