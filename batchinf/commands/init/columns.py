"""What the columns of an input are for, by their names, types and first rows, as `batchinf init` takes them."""

import contextlib
import json
import os
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from batchinf.base.errors import UserError
from batchinf.base.text import escaped
from batchinf.commands.init.images import ImageColumns, as_list, find_images, is_named_as_picture
from batchinf.prompts.openai.lines import most_logprobs, named_model
from batchinf.source.files import CsvDialect, InputLocation
from batchinf.source.formats.images import FOLDER, NUM_BYTES, Images
from batchinf.source.formats.lines import BATCH_COLUMNS, TextLines
from batchinf.source.remote import is_url
from batchinf.source.rows import Row, Source, format_of, open_source
from batchinf.source.types import is_text
from batchinf.spec.input import CsvSpec

# Names of columns, the likeliest first.
_TEXTS = "prompt question instruction text content document body review comment sentence title input query message"
_IDS = "id uid uuid guid key custom_id example_id row_id doc_id path"
_LABELS = "label labels category class sentiment topic target intent"
_MESSAGES = "messages conversation conversations"
_NEVER_IDS = {
    *f"{_TEXTS} {_LABELS} answer answer_index correct_answer answerkey gold".split(),
    *"continuation completion response chosen output".split(),
}
_LOOKED_AT = 1000
_LOOKED_AT_BYTES = 8  # rows whose bytes are read
_MOST_LABELS = 12
_MOST_LABEL_CHARS = 40
_MOST_ID_CHARS = 40
_MOST_KEPT = 4
_MOST_KEPT_CHARS = 60  # of a value, on average
_NEARLY = 0.9  # of the values differ: ids that repeat by mistake
_SEPARATOR = re.compile(r"(?<=\w)[;\t|]")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")  # unique by chance: a later row may repeat it


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """What the columns of an input are for. A column is None if there is none that fits."""

    path: str
    """As in the spec."""
    num_rows: int
    names: tuple[str, ...]
    is_batch: bool
    """Whether the input is an OpenAI batch file."""
    models: tuple[str, ...]
    """The models that the first lines of a batch file name."""
    logprobs: Mapping[str, int]
    """The most logprobs that one of those lines asks for, in the fields of `sampling`."""
    num_looked_at: int
    """How many first rows tell all this."""
    text: str | None
    """The column with the text of a row. None only if there are images."""
    messages: str | None
    """The column with conversations."""
    has_json_messages: bool
    """Whether the conversations are JSON text."""
    id: str | None
    """One with a value of its own in each row."""
    repeated_id: str | None
    """Why a column like one of ids is not taken: `ticket repeats 'T-1019'`."""
    labelled: str | None
    """The column with labels."""
    label_counts: Mapping[str, int]
    """Label → number of the first rows that have it, in the order of the labels."""
    images: ImageColumns
    kept: tuple[str, ...]
    """Columns to copy to the output: the text, and short ones."""
    settings: tuple[str, ...]
    """Fields of `input` without which the files would be read in another way, each with a comment."""

    @property
    def has_only_messages(self) -> bool:
        """Whether the text of a row is its conversation, as no column has text."""
        return self.messages is not None and self.text == self.messages


def look_at(path: str, encoding: str | None = None) -> InputColumns:
    """What the input's columns are for.

    Args:
        path: The input, as in the spec.
        encoding: Of CSV files, if the user gives one.

    Raises:
        InputError: The input cannot be read.
        UserError: No column has text or images, or the encoding cannot be used.
    """
    settings = []
    is_captioned = _is_captioned(path)
    if is_captioned:
        settings.append("format: images    # the pictures, and not the text files beside them; for their lines: text")
    if encoding is not None:
        _check_encoding(encoding)
        settings.append(f"csv: {{encoding: {json.dumps(encoding)}}}    # as --encoding says")
    dialect = None if encoding is None else CsvDialect(encoding=encoding)
    where = InputLocation(path, csv=dialect, format=Images.name if is_captioned else None)
    with (
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(open_source(where, pathlib.Path(scratch))) as source,
    ):
        return replace(_columns(where, source), settings=tuple(settings))


def _is_captioned(path: str) -> bool:
    """Whether the input is a folder of pictures beside text files, such as captions.

    Without `input.format`, such a folder is read as text.
    """
    folder = os.path.expanduser(path)
    # A new job would refuse such a folder.
    where = InputLocation(path, is_new=False)
    if is_url(path) or not os.path.isdir(folder) or format_of(where) != TextLines.name:
        return False
    return any(is_named_as_picture(name) for _, _, files in os.walk(folder) for name in files)


def _check_encoding(encoding: str) -> None:
    """Raise UserError for an encoding that the spec would not take."""
    try:
        CsvSpec(encoding=encoding)
    except ValidationError as error:
        raise UserError(f"--encoding: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _columns(where: InputLocation, source: Source) -> InputColumns:
    """The columns, without settings. Raises UserError if no column has text or images."""
    found = _FirstRows.of(where, source)
    messages = found.conversations()
    is_batch = found.types.keys() >= set(BATCH_COLUMNS)  # an id of a line may be the name of its picture
    images = find_images(where.path, [row.values for row in found.rows], [] if is_batch else list(found.types))
    texts = _without(found.texts(), [*images.names, messages])
    named_ids = found.named_ids()
    free = _without(texts, named_ids)
    # Beside images, other columns may be about them: labels, names.
    longest = None if images.names else max(free, key=found.mean_length, default=None)
    text = _first(free, _TEXTS) or longest or messages
    if text is None and not images.names:
        raise UserError(f"{where.path} has no column of text or images; it has {', '.join(found.types)}")
    possible_ids = _without([*texts, *images.names, *found.integers()], [text, *found.lists()])
    own_id, repeated_id = (named_ids[0], None) if named_ids else found.id_by_values(possible_ids)
    labelled = found.labelled(_without(free, [text]))
    short = _without(found.short(), [text, messages, own_id, *named_ids])[:_MOST_KEPT]
    return InputColumns(
        path=where.path,
        num_rows=source.num_rows,
        names=tuple(found.types),
        is_batch=is_batch,
        models=found.models() if is_batch else (),
        logprobs=found.logprobs() if is_batch else {},
        num_looked_at=len(found.rows),
        text=text,
        messages=messages,
        has_json_messages=messages in found.texts(),
        id=own_id,
        repeated_id=repeated_id,
        labelled=labelled,
        label_counts={} if labelled is None else dict(sorted(Counter(found.values[labelled]).items())),
        images=images,
        kept=() if is_batch else (*([text] if text in texts else []), *short),
        settings=(),
    )


@dataclass(frozen=True, slots=True)
class _FirstRows:
    """The first rows of the input that can be read."""

    rows: list[Row]
    types: dict[str, pa.DataType]
    values: dict[str, list[Any]]
    """Without nulls."""

    @classmethod
    def of(cls, where: InputLocation, source: Source) -> "_FirstRows":
        """Raises UserError if no row can be read, or if the columns of a CSV file are not separated."""
        types = {field.name: field.type for field in source.schema}
        _check_separated(where.path, list(types))
        all_rows = _first_rows(source)
        rows = [row for row in all_rows if row.error is None]
        if all_rows and not rows:
            raise UserError(f"{where.path}: no row can be read; the first: {all_rows[0].error}")
        columns = {name: [row.values.get(name) for row in rows] for name in types}
        return cls(
            rows=rows,
            types=types,
            values={name: [value for value in column if value is not None] for name, column in columns.items()},
        )

    def models(self) -> tuple[str, ...]:
        """The models that the lines of a batch file name."""
        names = (named_model(row.values)[1] for row in self.rows)
        return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))

    def logprobs(self) -> dict[str, int]:
        """The most logprobs that a line of a batch file asks for, in the fields of `sampling`."""
        most = most_logprobs(row.values for row in self.rows)
        return {field: number for field, number in most.items() if number is not None}

    def texts(self) -> list[str]:
        # A column with values of several types has the type of text, too.
        return [name for name, type in self.types.items() if is_text(type) and self._are_mostly(str, name)]

    def lists(self) -> list[str]:
        return [name for name, type in self.types.items() if pa.types.is_list(type) or self._are_mostly(list, name)]

    def integers(self) -> list[str]:
        return [name for name, type in self.types.items() if pa.types.is_integer(type)]

    def short(self) -> list[str]:
        """Columns whose values are short enough to copy them to the output."""
        long = {*self.lists(), *(name for name, type in self.types.items() if _has_bytes(type))}
        flat = [name for name in (FOLDER,) if name in self.types and not any(self.values[name])]
        names = _without(list(self.types), [*long, NUM_BYTES, *flat])
        return [name for name in names if self.mean_length(name) <= _MOST_KEPT_CHARS]

    def _are_mostly(self, kind: type, name: str) -> bool:
        values = self.values[name]
        return 2 * sum(isinstance(value, kind) for value in values) > len(values)

    def mean_length(self, name: str) -> float:
        return sum(len(str(value)) for value in self.values[name]) / max(1, len(self.values[name]))

    def named_ids(self) -> list[str]:
        """Columns with the name of an id, and another value in each row."""
        names = [name for name in self.types if _is_named_as_id(name)]
        unique = [name for name in names if len(set(map(str, self.values[name]))) == len(self.rows)]
        return sorted(unique, key=lambda name: name.lower() != "id")

    def id_by_values(self, possible: Collection[str]) -> tuple[str | None, str | None]:
        """The first of these columns that has ids by its values.

        Without any, a value that stands in two rows of a column that looks like one of ids.
        """
        names = [name for name in self.types if name in possible and name.lower() not in _NEVER_IDS]
        counts = {name: Counter(map(str, self.values[name])) for name in names}
        like_ids = [name for name in names if counts[name].total() == len(self.rows) and _are_ids(counts[name])]
        for name in like_ids:
            if len(counts[name]) == len(self.rows):
                return name, None
        for name in like_ids:
            if len(counts[name]) >= _NEARLY * len(self.rows):
                repeated = next(value for value, number in counts[name].items() if number > 1)
                return None, f"{escaped(name)} repeats {repeated!r}"
        return None, None

    def labelled(self, names: Sequence[str]) -> str | None:
        """The column of these that has labels: by its name, or the first by its values."""
        of_labels = [name for name in names if _are_labels(self.values[name])]
        return _first(of_labels, _LABELS) or next(iter(of_labels), None)

    def conversations(self) -> str | None:
        """The column with conversations: by its name, or the first whose conversations end with the user's turn."""
        lists = self.lists()
        named = _first([*lists, *filter(self._are_conversations_in_text, self.texts())], _MESSAGES)
        return named or next((name for name in self.types if self._are_questions(name)), None)

    def _are_conversations_in_text(self, name: str) -> bool:
        return all(_is_message(messages[0]) for messages in self._lists_of_messages(name)) and bool(self.values[name])

    def _lists_of_messages(self, name: str) -> Iterator[list[Any]]:
        """The conversations in a column, which may be JSON text; of another value a list of null."""
        for value in map(as_list, self.values[name]):
            yield value if isinstance(value, list) and value else [None]

    def _are_questions(self, name: str) -> bool:
        # A conversation that ends with the assistant's turn, such as `chosen`, is an answer and no prompt.
        lasts = [messages[-1] for messages in self._lists_of_messages(name)]
        return bool(lasts) and all(_is_message(last) and last["role"] != "assistant" for last in lasts)


def _first_rows(source: Source) -> list[Row]:
    """The rows to look at. Columns with bytes, which may be images of megabytes, are there in a few rows only."""
    plain = [field.name for field in source.schema if not _has_bytes(field.type)]
    num_rows = min(_LOOKED_AT, source.num_rows)
    num_whole = num_rows if len(plain) == len(source.schema) else min(_LOOKED_AT_BYTES, num_rows)
    return [*source.read(0, num_whole), *source.read(num_whole, num_rows, plain)]


def _has_bytes(type: pa.DataType) -> bool:
    """Whether values of this type have bytes, at any depth."""
    children = [type.field(place).type for place in range(type.num_fields)]
    return pa.types.is_binary(type) or pa.types.is_large_binary(type) or any(map(_has_bytes, children))


def _check_separated(path: str, names: Sequence[str]) -> None:
    """Raise UserError for one column whose name has a sign that may separate several."""
    if len(names) == 1 and (separator := _SEPARATOR.search(names[0])) is not None:
        raise UserError(
            f"{path} has one column, {names[0]!r}, so {separator[0]!r} seems to separate its columns, but its first "
            "row has another number of them: mend it, or write a spec with "
            f"`input.csv: {{delimiter: {separator[0]!r}}}`"
        )


def _without(names: Sequence[str], others: Collection[str | None]) -> list[str]:
    return [name for name in names if name not in others]


def _first(names: Sequence[str], known: str) -> str | None:
    """The name that is known best."""
    return next((name for word in known.split() for name in names if name.lower() == word), None)


def _is_named_as_id(name: str) -> bool:
    """Whether a name is that of an id, alone or after a word: `review_id`."""
    return any(word in _IDS.split() for word in (name.lower(), re.sub(r"^[a-z]+_", "", name.lower())))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _are_labels(values: Sequence[Any]) -> bool:
    if not all(isinstance(value, str) for value in values):
        return False
    kinds = set(values)
    return 2 <= len(kinds) <= min(_MOST_LABELS, len(values) // 2) and all(
        0 < len(kind) <= _MOST_LABEL_CHARS and kind.isprintable() for kind in kinds
    )


def _are_ids(words: Collection[str]) -> bool:
    """Whether these different values are short, and of one word."""
    return len(words) > 1 and all(
        len(word) <= _MOST_ID_CHARS and len(word.split()) == 1 and not _DATE.fullmatch(word) for word in words
    )
