"""`batchinf init`: writes a short commented spec that fits the data and the model."""

import contextlib
import json
import os
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from batchinf.base.errors import ModelError, UserError
from batchinf.base.storage import reason
from batchinf.base.text import list_names, names_in
from batchinf.model.files import check_name
from batchinf.model.identity import resolve
from batchinf.source.files import InputLocation
from batchinf.source.formats.lines import OpenAIBatch
from batchinf.source.rows import Row, Source, open_source
from batchinf.source.types import is_text
from batchinf.spec.job import ModelSpec
from batchinf.tasks.starters import PURPOSES, Data, StarterWanted, write_spec

__all__ = ["StarterWanted", "has_chat_template", "labels_in", "look_at", "write"]

# Names of columns, the likeliest first.
_TEXTS = "prompt question instruction text content document body review comment sentence title input query message"
_IDS = "id uid uuid guid key custom_id example_id row_id doc_id"
_LABELS = "label labels category class sentiment topic target intent"
_MESSAGES = "messages conversation conversations"
_CHOICES = "choices options answers endings"
_ANSWERS = "answer answer_index correct_answer answerKey label target gold"
_CONTINUATIONS = "continuation completion response chosen target output answer"
_OF_A_ROW = {*f"{_TEXTS} {_LABELS} {_ANSWERS} {_CONTINUATIONS}".lower().split()}  # never an id
_LOOKED_AT = 1000
_MOST_LABELS, _MOST_LABEL_CHARS = 12, 40
_MOST_ID_CHARS = 40
_MOST_KEPT = 4
_NEARLY = 0.9  # of the values differ: ids that repeat by mistake
_SEPARATOR = re.compile(r"(?<=\w)[;\t|]")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")  # unique by chance: a later row may repeat it
_DEFAULT_LABELS = ("positive", "negative", "neutral")


def look_at(path: str, labels: Sequence[str] = ()) -> Data:
    """What the input's columns are for, by their names and the first 1,000 rows. labels: those that the user gives.

    Raises InputError if the input cannot be read, UserError if no column has text.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(InputLocation(path), pathlib.Path(scratch))
        with contextlib.closing(source):
            return _data(path, source, labels)


def _data(path: str, source: Source, labels: Sequence[str]) -> Data:
    names = tuple(field.name for field in source.schema)
    rows = [row for row in source.read(0, min(_LOOKED_AT, source.num_rows)) if row.error is None]
    if len(names) == 1 and (found := _SEPARATOR.search(names[0])) is not None:
        raise UserError(
            f"{path} has one column, {names[0]!r}, so {found[0]!r} seems to separate its columns; must be a comma: "
            f"pandas.read_csv({path!r}, sep={found[0]!r}).to_csv('commas.csv', index=False) writes such a file"
        )
    if source.num_rows and not rows:
        [first] = source.read(0, 1)
        raise UserError(f"{path}: no row can be read; the first: {first.error}")
    values = {name: [row.values.get(name) for row in rows] for name in names}
    values = {name: [value for value in column if value is not None] for name, column in values.items()}
    # A column with values of several types has the type of text, too.
    texts = [field.name for field in source.schema if is_text(field.type) and _are_mostly(str, values[field.name])]
    lists = [
        field.name for field in source.schema if pa.types.is_list(field.type) or _are_mostly(list, values[field.name])
    ]
    ids = [name for name in names if _named(name, _IDS) and len(set(map(str, values[name]))) == len(rows)]
    ids.sort(key=lambda name: name.lower() != "id")
    chosen_from = {name: [_as_list(value) for value in values[name]] for name in names if name in _CHOICES.split()}
    choices = next((name for name, column in chosen_from.items() if column and _are_texts(column)), None)
    free = [name for name in texts if name not in (*ids, choices)]
    messages = _first(lists, _MESSAGES)
    text = _first(free, _TEXTS) or max(free, key=lambda name: _mean_length(values[name]), default=messages)
    if text is None:
        raise UserError(f"{path} has no column of text; it has {', '.join(names)}")
    of_labels = [name for name in free if name != text and _are_labels(values[name])]
    labelled = _first(of_labels, _LABELS) or next(iter(of_labels), None)
    integers = [field.name for field in source.schema if pa.types.is_integer(field.type)]
    others = [name for name in [*texts, *integers] if name != text and name.lower() not in _OF_A_ROW]
    ids += [name for name in names if name in others and not ids and _are_ids(values[name], len(rows))]
    repeats = [_repeat(name, values[name], len(rows)) for name in names if not ids and name in others]
    answers = [name for name in free if choices and _first([name], _ANSWERS) and _are_answers(rows, name, choices)]
    is_batch = OpenAIBatch.has_its_columns(names)
    short = [name for name in names if name not in {text, choices, *ids, *lists} and _mean_length(values[name]) <= 60]
    return Data(
        path=path,
        num_rows=source.num_rows,
        columns=names,
        text=text,
        id=ids[0] if ids else None,
        repeated_id=next(filter(None, repeats), None),
        messages=messages,
        labels=tuple(labels) or (_DEFAULT_LABELS if labelled is None else tuple(sorted(map(str, {*values[labelled]})))),
        labelled=None if labels else labelled,
        choices=choices,
        answer=None if choices is None else _first([*integers, *answers], _ANSWERS),
        continuation=_first([name for name in free if name != text or messages is not None], _CONTINUATIONS),
        kept=() if is_batch else (*([text] if text in texts else []), *short[:_MOST_KEPT]),
        is_batch=is_batch,
    )


def _are_mostly(kind: type, values: Sequence[Any]) -> bool:
    return 2 * sum(isinstance(value, kind) for value in values) > len(values)


def _named(name: str, known: str) -> bool:
    return name.lower() in known.lower().split() or re.sub(r"^[a-z]+_", "", name.lower()) in known.lower().split()


def _first(names: Sequence[str], known: str) -> str | None:
    """The name that is known best."""
    places = {word: place for place, word in enumerate(known.lower().split())}
    return min((name for name in names if name.lower() in places), key=lambda name: places[name.lower()], default=None)


def _mean_length(values: Sequence[Any]) -> float:
    return sum(len(str(value)) for value in values) / max(1, len(values))


def _are_labels(values: Sequence[Any]) -> bool:
    if not all(isinstance(value, str) for value in values):
        return False
    kinds = set(values)
    return 2 <= len(kinds) <= min(_MOST_LABELS, len(values) // 2) and all(
        0 < len(kind) <= _MOST_LABEL_CHARS and kind.isprintable() for kind in kinds
    )


def _are_ids(values: Sequence[Any], num_rows: int) -> bool:
    """Whether each row has a short value of its own, in one word."""
    words = {str(value) for value in values}
    return 1 < len(words) == num_rows and all(
        len(word) <= _MOST_ID_CHARS and len(word.split()) == 1 and not _DATE.fullmatch(word) for word in words
    )


def _repeat(name: str, values: Sequence[Any], num_rows: int) -> str | None:
    """Why a column that looks like one of ids is none: `ticket repeats 'T-1019'`. None if it does not look like one."""
    words = list(map(str, values))
    distinct = list(dict.fromkeys(words))
    if len(words) < num_rows or not num_rows * _NEARLY <= len(distinct) < num_rows:
        return None
    first = next(word for word, number in Counter(words).items() if number > 1)
    return f"{name} repeats {first!r}" if _are_ids(distinct, len(distinct)) else None


def _as_list(value: Any) -> Any:
    """A list that CSV holds as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _are_answers(rows: Sequence[Row], name: str, choices: str) -> bool:
    """Whether each row's value is one of its choices."""
    pairs = [(row.values.get(name), row.values.get(choices)) for row in rows]
    return all(answer in _as_list(texts) for answer, texts in pairs if None not in (answer, texts))


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, list) and all(isinstance(item, str) for item in value) for value in values)


def has_chat_template(model: str) -> bool | None:
    """Whether the model has a chat template; None if the model is not here.

    Raises ModelError if the name is neither that of a folder nor an id of the hub.
    """
    if not model:
        raise ModelError("--model: got empty text; give a Hugging Face id or a folder")
    check_name("--model", model)
    try:
        return resolve(ModelSpec(name=model)).has_chat_template
    except ModelError:
        return None


def labels_in(text: str) -> tuple[str, ...]:
    """The words between commas. Raises UserError if one is there twice."""
    words = names_in(text)
    if twice := [word for word, number in Counter(words).items() if number > 1]:
        raise UserError(f"--labels: got {list_names(map(repr, twice))} more than once; give each label once")
    return words


def check_purpose(purpose: str) -> None:
    """Raise UserError for a purpose that `init` does not know."""
    if purpose not in PURPOSES:
        raise UserError(f"--for: got {purpose!r}; must be one of {', '.join(PURPOSES)}")


def write(path: str, purpose: str, data: Data, wanted: StarterWanted) -> None:
    """Write the spec. Raises UserError if there is a file already, or if the data is for another purpose."""
    check_purpose(purpose)
    text = write_spec(purpose, path, data, wanted)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; give another name, or delete it yourself") from None
    except OSError as error:
        raise UserError(f"cannot write {os.fspath(path)}: {reason(error)}") from error
