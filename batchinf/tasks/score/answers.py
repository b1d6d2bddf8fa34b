"""What the values of `input.answer_column` mean: texts of choices, or places. `Score` and `ScorePrompts` use it."""

import decimal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from batchinf.base.errors import RowFailed
from batchinf.base.text import clip, list_names, name_type
from batchinf.prompts.renderer import take, take_list
from batchinf.prompts.row_sampling import whole_number
from batchinf.source.rows import Row, Source
from batchinf.spec.input import Answers, InputSpec

_READ_ROWS = 4096
# By `input.answers`, what `run` and `validate` say of a job's answers.
MEANINGS = {
    "texts": "texts of choices",
    "places": "places of choices, from 0",
    "places_from_1": "places of choices, from 1",
}


class AnswerReader:
    """Answers of rows → places of choices, as `input.answers` says; if it is `auto`, each row decides for itself."""

    def __init__(self, where: InputSpec) -> None:
        self._column = where.answer_column
        self._labels = where.choices
        self._answers = "texts" if where.answers == "auto" and _are_numbers(where.choices) else where.answers
        self._first = int(where.answers == "places_from_1")

    def read(self, row: Row, choices: Sequence[str]) -> int | str | None:
        """The place of the right choice; None if it is unknown; a text that says why the row's value is no choice."""
        column = self._column
        if column is None or (column in row.values and row.values[column] is None):
            return None
        try:
            value = whole_number(take(row.values, column, ""))
        except RowFailed as failed:
            return failed.error.error_message
        if isinstance(value, bool) or not isinstance(value, int | str):
            return self._error(value)
        if self._answers == "texts":
            text = str(value)
            text = text.strip() if text.strip().isdecimal() else text
            return choices.index(text) if text in choices else self._error(value)
        place = value if isinstance(value, int) else number_in(value)
        if self._answers == "auto" and value in choices:
            if place is not None and choices[place : place + 1] not in ([], [value]):
                return (f"got '{value}' in column '{column}', the text of a choice and the place of another one; give "
                        "places as numbers, not as text")  # fmt: skip
            return choices.index(value)
        if place is None:
            return self._error(value)
        if self._first <= place < len(choices) + self._first:
            return place - self._first
        last = len(choices) - 1 + self._first
        return f"got {place} in column '{column}'; the row's choices are {self._first} to {last}"

    def _error(self, value: object) -> str:
        if isinstance(value, str):
            got = f"'{clip(value, 40)}'"
        else:
            is_number = isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)
            got = str(value) if is_number else name_type(value)
        hint = "" if value != "" else '; input.csv: {null_values: [""]} makes empty fields of CSV files null'
        return f"got {got} in column '{self._column}'; expected {self._expected}, or null{hint}"

    @property
    def _expected(self) -> str:
        if self._answers == "auto":
            return "the text of a choice, its place from 0"
        if self._answers != "texts":
            return f"the place of a choice, from {self._first}"
        return "the text of a choice" if self._labels is None else f"one of input.choices ({list_names(self._labels)})"


def number_in(text: str) -> int | None:
    """The whole number that a text has in digits; None if it is none."""
    return int(text) if text.isascii() and text.strip().isdecimal() and len(text) < 10 else None


def _are_numbers(choices: Sequence[str] | None) -> bool:
    """Whether all choices of a spec are whole numbers, such as stars: an answer is one of them then, and no place."""
    return choices is not None and all(text.isascii() and text.isdecimal() for text in choices)


# -- the whole column --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Counts:
    """Rows with an answer."""

    num_texts: int = 0
    """Those that are no whole numbers."""
    num_numbers: int = 0
    """Whole numbers, as numbers or as texts."""
    num_choices: int = 0
    """Numbers that are texts of their row's choices."""
    num_places: int = 0
    """Numbers that are places of choices, from 0."""
    num_places_from_1: int = 0

    def add(self, number: int, choices: Sequence[str], *, may_be_text: bool) -> None:
        self.num_numbers += 1
        self.num_choices += may_be_text and str(number) in choices
        self.num_places += 0 <= number < len(choices)
        self.num_places_from_1 += 1 <= number <= len(choices)

    @property
    def answers(self) -> Answers:
        """What the column has, if no text in it is a choice, but for numbers; `auto` without any."""
        if not self.num_texts and not self.num_numbers:
            return "auto"
        if self.num_texts > self.num_numbers or (self.num_choices and self.num_choices >= self.num_places):
            return "texts"
        return "places_from_1" if self.num_places < self.num_places_from_1 == self.num_numbers else "places"


_MANY_ROWS = 300_000  # some seconds


def answers_in(where: InputSpec, source: Source, say: Callable[[str], None]) -> Answers:
    """What `input.answers: auto` stands for, by the answers of all rows; `auto` if no row has one.

    The first text that is a choice of its row decides, unless it is a number. Otherwise all rows are read with their
    choices, in this thread.
    """
    if _are_numbers(where.choices):
        return "texts"
    type = source.schema.field(where.answer_column or "").type
    # JSON and Parquet have numbers, which are never texts of choices. CSV has only texts.
    may_be_text = source.prints_fields or pa.types.is_string(type) or pa.types.is_large_string(type)
    counts = _Counts()
    if source.num_rows >= _MANY_ROWS:
        say(
            f"input.answers auto: reading the answers of at most {source.num_rows:,} rows before the engines start; "
            "`input.answers: texts` or `places` in the spec saves this"
        )
    for value, choices in _answers(where, source):
        number = value if isinstance(value, int) else number_in(value)
        if number is not None:
            counts.add(number, choices, may_be_text=may_be_text)
        elif value in choices:
            return "texts"
        else:
            counts.num_texts += 1
        if number == 0 and not may_be_text:
            return "places"
    return counts.answers


def _answers(where: InputSpec, source: Source) -> Iterator[tuple[int | str, Sequence[str]]]:
    """The answer of each row that has one, and the row's choices."""
    answer = where.answer_column or ""
    names = [answer] if where.choices_column is None else [answer, where.choices_column]
    for start in range(0, source.num_rows, _READ_ROWS):
        for row in source.read(start, min(start + _READ_ROWS, source.num_rows), names):
            value = whole_number(row.values.get(answer))
            if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
                continue
            try:
                choices = where.choices or take_list(row.values, where.choices_column or "", "texts")
            except RowFailed:
                continue
            yield value, choices
