"""`batchinf init`: writes a short commented spec that fits the data and the model."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pydantic import ValidationError

from batchinf.base.errors import ImageError, ModelError, UserError
from batchinf.base.places import is_bucket, is_http
from batchinf.base.storage import reason
from batchinf.base.text import clip, counted, list_names, names_in
from batchinf.model.files import check_name
from batchinf.model.identity import resolve
from batchinf.prompts.chat import IMAGE_PARTS, source_of_part
from batchinf.prompts.checks import input_notes
from batchinf.prompts.images import ImageSource, sources_of
from batchinf.prompts.media import ImageLoader, is_in_base64
from batchinf.source.files import CsvDialect, InputLocation
from batchinf.source.find import find_files, folder_of
from batchinf.source.formats.csv import Csv, seems_cp1252
from batchinf.source.formats.images import FOLDER, NUM_BYTES, PATH, Images
from batchinf.source.formats.lines import OpenAIBatch, TextLines
from batchinf.source.remote import is_url
from batchinf.source.rows import Row, Source, format_of, open_source
from batchinf.source.types import is_text
from batchinf.spec.images import ImageSettings
from batchinf.spec.input import CsvSpec
from batchinf.spec.job import ModelSpec
from batchinf.tasks.starters import PURPOSES, TAKE_LABELS, Data, StarterWanted, scores_labels, write_spec

# Names of columns, the likeliest first.
_TEXTS = "prompt question instruction text content document body review comment sentence title input query message"
_IDS = "id uid uuid guid key custom_id example_id row_id doc_id"
_LABELS = "label labels category class sentiment topic target intent"
_MESSAGES = "messages conversation conversations"
_CHOICES = "choices options answers endings"
_ANSWERS = "answer answer_index correct_answer answerKey label target gold"
_QUERIES = "query question text_1 prompt instruction"
_DOCUMENTS = "documents passages candidates docs contexts items choices"  # lists
_DOCUMENT = "document passage text_2 context text content"
_CONTINUATIONS = "continuation completion response chosen target output answer"
_OF_A_ROW = {*f"{_TEXTS} {_LABELS} {_ANSWERS} {_CONTINUATIONS}".lower().split()}  # never an id
_LOOKED_AT = 1000
_IMAGES_LOOKED_AT = 8  # values of a column that may have images
_MOST_FOLDERS = 4  # of buckets that a spec names; of more, it names the buckets
_MOST_FOLDERS_WALKED = 1000
_MOST_LABELS = 12
_MOST_LABEL_CHARS = 40
_MOST_ID_CHARS = 40
_MOST_KEPT = 4
_MOST_KEPT_CHARS = 60  # of a value, on average
_NEARLY = 0.9  # of the values differ: ids that repeat by mistake
_SEPARATOR = re.compile(r"(?<=\w)[;\t|]")
_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")  # unique by chance: a later row may repeat it
_DEFAULT_LABELS = ("positive", "negative", "neutral")


def look_at(path: str, labels: Sequence[str] = (), encoding: str | None = None) -> Data:
    """What the input's columns are for, by their names and the first 1,000 rows.

    labels, encoding: those that the user gives. Raises InputError if the input cannot be read, UserError if no column
    has text or images.
    """
    is_given = encoding is not None
    captioned = _captioned(path)
    if encoding is not None:
        _check_encoding(path, encoding)
    elif captioned is None:
        encoding = _encoding(path)
    dialect = None if encoding is None else CsvDialect(encoding=encoding)
    where = InputLocation(path, csv=dialect, format=None if captioned is None else Images.name)
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(where, pathlib.Path(scratch))
        with contextlib.closing(source):
            data = _data(where, source, labels)
            notes = (*([] if captioned is None else [captioned]), *input_notes(source))
            is_captioned = captioned is not None
            return replace(
                data, encoding=encoding, has_given_encoding=is_given, is_captioned=is_captioned, notes=tuple(notes)
            )


def _captioned(path: str) -> str | None:
    """A line about a folder with pictures beside text files, such as captions, which are read as text without a word
    of the spec; None for another input."""
    folder = os.path.expanduser(path)
    # A new job would refuse such a folder.
    where = InputLocation(path, is_new=False)
    if is_url(path) or not os.path.isdir(folder) or format_of(where) != TextLines.name:
        return None
    names = [name for _, _, files in os.walk(folder) for name in files]
    num_pictures = sum(map(_is_named_as_picture, names))
    if not num_pictures:
        return None
    num_texts = sum(name.lower().endswith(TextLines.endings) for name in names)
    return (
        f"{path} has {counted(num_pictures, 'picture')} beside {counted(num_texts, 'text file')}: the spec reads the "
        "pictures (input.format: images); for the lines of the texts, write input.format: text"
    )


def _encoding(path: str) -> str | None:
    """The encoding of local CSV files that are not UTF-8, for the spec; None for the default."""
    where = InputLocation(path)
    if is_url(path) or format_of(where) != Csv.name:
        return None
    return "cp1252" if all(map(seems_cp1252, find_files(where)[1])) else None


def _check_encoding(path: str, encoding: str) -> None:
    """Raise UserError for an encoding that the spec would not take."""
    try:
        CsvSpec(encoding=encoding)
    except ValidationError as error:
        raise UserError(f"--encoding: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    if is_url(path) or format_of(InputLocation(path)) != Csv.name:
        raise UserError(f"--encoding: got {encoding} for {path}; it is for local CSV files, leave it out")


def _unreadable(rows: Sequence[Row]) -> str | None:
    """How many of the first rows cannot be read, and why; None if all can."""
    errors = [row.error for row in rows if row.error is not None]
    if not errors:
        return None
    return f"{len(errors):,} of the first {counted(len(rows), 'row')} cannot be read; the first: {errors[0]}"


def _first_rows(path: str, source: Source) -> list[Row]:
    """The rows to look at. Raises UserError if there are rows and none can be read.

    Columns with bytes, which may be images of megabytes, are there in a few rows only.
    """
    plain = [field.name for field in source.schema if not _has_bytes(field.type)]
    num_rows = min(_LOOKED_AT, source.num_rows)
    num_whole = num_rows if len(plain) == len(source.schema) else min(_IMAGES_LOOKED_AT, num_rows)
    rows = [*source.read(0, num_whole), *source.read(num_whole, num_rows, plain)]
    if rows and all(row.error is not None for row in rows):
        raise UserError(f"{path}: no row can be read; the first: {rows[0].error}")
    return rows


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


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of the input, with the values of its first rows."""

    rows: list[Row]
    types: dict[str, pa.DataType]
    values: dict[str, list[Any]]
    """Without nulls."""
    is_folder: bool
    """Whether the rows are the files of a folder of images."""
    unreadable: str | None
    """See `Data`."""

    @classmethod
    def of(cls, where: InputLocation, source: Source) -> "_Columns":
        """Raises UserError if no row can be read, or if the columns of a CSV file are not separated."""
        types = {field.name: field.type for field in source.schema}
        _check_separated(where.path, list(types))
        first_rows = _first_rows(where.path, source)
        rows = [row for row in first_rows if row.error is None]
        columns = {name: [row.values.get(name) for row in rows] for name in types}
        values = {name: [value for value in column if value is not None] for name, column in columns.items()}
        is_folder = format_of(where) == Images.name
        return cls(rows, types, values, is_folder=is_folder, unreadable=_unreadable(first_rows))

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
        if self.is_folder:
            long.add(NUM_BYTES)
        return [name for name in self.types if name not in long and self.mean_length(name) <= _MOST_KEPT_CHARS]

    def text_lists(self) -> list[str]:
        """Columns in which each value is a list of texts."""
        return [name for name, values in self.values.items() if values and all(map(_is_text_list, values))]

    def _are_mostly(self, kind: type, name: str) -> bool:
        values = self.values[name]
        return 2 * sum(isinstance(value, kind) for value in values) > len(values)

    def mean_length(self, name: str) -> float:
        return sum(len(str(value)) for value in self.values[name]) / max(1, len(self.values[name]))

    def named_ids(self) -> list[str]:
        """Columns with the name of an id, and another value in each row."""
        if self.is_folder:
            return [PATH]
        names = [name for name in self.types if _named(name, _IDS)]
        unique = [name for name in names if len(set(map(str, self.values[name]))) == len(self.rows)]
        return sorted(unique, key=lambda name: name.lower() != "id")

    def repeat(self, name: str) -> str | None:
        """Why a column that looks like one of ids is none: `ticket repeats 'T-1019'`. None if it does not look so."""
        words = list(map(str, self.values[name]))
        num_rows = len(self.rows)
        distinct = set(words)
        if len(words) < num_rows or not num_rows * _NEARLY <= len(distinct) < num_rows or not _are_ids(distinct):
            return None
        first = next(word for word, number in Counter(words).items() if number > 1)
        return f"{name} repeats {first!r}"

    def conversations(self) -> str | None:
        """The column with conversations: by its name, or the first whose conversations end with the user's turn."""
        lists = self.lists()
        named = _first([*lists, *filter(self._are_conversations_in_text, self.texts())], _MESSAGES)
        return named or next((name for name in self.types if self._are_questions(name)), None)

    def _are_conversations_in_text(self, name: str) -> bool:
        return all(_is_message(messages[0]) for messages in self._lists_of_messages(name)) and bool(self.values[name])

    def _lists_of_messages(self, name: str) -> Iterator[list[Any]]:
        """The conversations in a column, which may be JSON text; of another value a list of null."""
        for value in map(_as_list, self.values[name]):
            yield value if isinstance(value, list) and value else [None]

    def _are_questions(self, name: str) -> bool:
        # A conversation that ends with the assistant's turn, such as `chosen`, is an answer and no prompt.
        lasts = [messages[-1] for messages in self._lists_of_messages(name)]
        return bool(lasts) and all(_is_message(last) and last["role"] != "assistant" for last in lasts)

    def choices(self) -> str | None:
        """The column with lists of texts to choose from."""
        return next((name for name in self.text_lists() if name in _CHOICES.split()), None)

    def are_answers(self, name: str, choices: str) -> bool:
        """Whether each row's value is one of its choices."""
        pairs = [(row.values.get(name), row.values.get(choices)) for row in self.rows]
        return all(answer in _as_list(texts) for answer, texts in pairs if None not in (answer, texts))


class _Images:
    """The columns that have images, and those in conversations."""

    def __init__(self, path: str, columns: _Columns) -> None:
        self._values = columns.values
        self._base_folder = folder_of(path)
        self.lost: dict[str, str] = {}
        """By columns that name pictures, none of which is there: the first of these names."""
        self.coded: list[str] = []
        """The columns with base64 of pictures without `data:`."""
        self._loader = ImageLoader(ImageSettings(), base_folder=self._base_folder)
        self.names = [name for name in columns.types if self._has_images(name)]
        parts = [_sources_in_parts(list(row.values.values())) for row in columns.rows]
        rows = [
            [*of_row, *(source for name in self.names for source in _images_in(row.values.get(name)))]
            for row, of_row in zip(columns.rows, parts, strict=True)
        ]
        self.most = max(map(len, rows), default=0)
        urls = [source for source in itertools.chain.from_iterable(rows) if isinstance(source, str)]
        self.hosts = tuple(dict.fromkeys(filter(None, map(_host, filter(is_http, urls)))))
        self.folders = self._folders(urls)
        self.are_in_parts = any(parts)

    def _folders(self, urls: Sequence[str]) -> tuple[str, ...]:
        """The folders of buckets with images, or the buckets if there are many."""
        # A folder of a bucket that the input is in itself need not be allowed.
        own = f"{self._base_folder}/"
        beyond = (url for url in urls if is_bucket(url) and not url.startswith(own))
        folders = tuple(dict.fromkeys(url.rpartition("/")[0] for url in beyond))
        if len(folders) <= _MOST_FOLDERS:
            return folders
        return tuple(dict.fromkeys("/".join(folder.split("/")[:3]) for folder in folders))

    def unless_lost(self, text: str | None) -> str | None:
        """The column of texts; None if they name pictures that are not there: then it becomes the column of images."""
        if text is None or text not in self.lost:
            return text
        self.names = [text]
        return None

    def _has_images(self, name: str) -> bool:
        sources = [source for value in self._values[name][:_IMAGES_LOOKED_AT] for source in _images_in(value)]
        sources = sources[:_IMAGES_LOOKED_AT]
        if any(map(self._is_image, sources)):
            return True
        if any(isinstance(source, str) and is_in_base64(source) for source in sources):
            self.coded.append(name)
            return True
        names = [source for source in sources if isinstance(source, str) and _is_named_as_picture(source)]
        if names and len(names) == len(sources):
            self.lost[name] = names[0]
        return False

    def _is_image(self, source: ImageSource) -> bool:
        if isinstance(source, str) and (is_http(source) or is_bucket(source)):
            return _is_named_as_picture(source.partition("?")[0])
        try:
            self._loader.load(source)
        except ImageError:
            return False
        return True

    @property
    def lost_line(self) -> str | None:
        """What to do about pictures that a job cannot read as they are; None if there are none."""
        if self.coded:
            return (
                f"column {self.coded[0]!r} has pictures in base64 without data:, which a job does not read: write "
                "data:image/png;base64, before each of them, also of other kinds"
            )
        if not self.lost or self._base_folder is None or is_bucket(self._base_folder):
            return None
        column, lost = next(iter(self.lost.items()))
        shown = f"column {column!r}: '{clip(lost, 200)}'"
        line = f"{shown} is no picture in {self._base_folder}, where relative paths begin"
        name = os.path.basename(lost)
        for number, (folder, folders, files) in enumerate(os.walk(self._base_folder)):
            folders[:] = [each for each in folders if not each.startswith(".")]
            if name in files and folder != self._base_folder:
                where = os.path.relpath(folder, self._base_folder)
                return f"{line}, but there is one in {where}: write paths such as {where}/{name} into the column"
            if number == _MOST_FOLDERS_WALKED:
                break
        return f"{line}: correct the paths, or give absolute ones and name their folder in input.images.folders"


def _images_in(value: object) -> list[ImageSource]:
    sources = sources_of(value, "")
    return sources if isinstance(sources, list) else []


def _is_named_as_picture(text: str) -> bool:
    return text.lower().endswith(Images.endings) and "\n" not in text


def _host(url: str) -> str | None:
    """The host of a URL, as `input.images.hosts` takes it; None for a URL that is wrong."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    return None


def _sources_in_parts(value: object) -> list[object]:
    """The sources of all parts with images in conversations, or in a line of a batch file; None of a bare part."""
    if isinstance(value, str) and '"image' in value:
        value = _as_list(value)
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in IMAGE_PARTS:
            return [source_of_part(value)]
        value = list(value.values())
    return [source for each in value for source in _sources_in_parts(each)] if isinstance(value, list) else []


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _data(where: InputLocation, source: Source, labels: Sequence[str]) -> Data:
    path = where.path
    columns = _Columns.of(where, source)
    images = _Images(path, columns)
    messages = columns.conversations()
    texts = _without(columns.texts(), [*images.names, messages])
    named_ids = columns.named_ids()
    choices = columns.choices()
    free = _without(texts, [*named_ids, choices])
    text = images.unless_lost(_text(columns, free, has_images=bool(images.names)) or messages)
    if text is None and not images.names:
        raise UserError(f"{path} has no column of text or images; it has {', '.join(columns.types)}")
    possible_ids = _without([*texts, *images.names, *columns.integers()], [text, *columns.lists()])
    ids, repeated = _ids(columns, named_ids, possible_ids)
    others = _without(free, [text])
    labelled = None if labels else _labelled(columns, others)
    query = _first(free, _QUERIES) or text
    is_batch = columns.types.keys() >= set(OpenAIBatch.columns)
    short = _without(columns.short(), [text, choices, messages, *ids])[:_MOST_KEPT]
    return Data(
        path=path,
        num_rows=source.num_rows,
        columns=tuple(columns.types),
        text=text,
        id=next(iter(ids), None),
        repeated_id=repeated,
        messages=messages,
        has_json_messages=messages in columns.texts(),
        labels=tuple(labels) or _words_of(columns, labelled),
        has_given_labels=bool(labels),
        labelled=labelled,
        choices=choices,
        answer=_answer(columns, free, choices),
        query=query,
        images=tuple(images.names),
        image_hosts=images.hosts,
        image_folders=images.folders,
        lost_image=None if is_batch else images.lost_line,  # an id of a line may be the name of its picture
        most_images=images.most,
        has_image_parts=images.are_in_parts,
        documents=_first(columns.text_lists(), _DOCUMENTS),
        document=_first(_without(free, [query]), _DOCUMENT),
        continuation=_first(others if messages is None else free, _CONTINUATIONS),
        kept=() if is_batch else (*([text] if text in texts else []), *short),
        is_batch=is_batch,
        unreadable=columns.unreadable,
    )


def _without(names: Sequence[str], others: Collection[str | None]) -> list[str]:
    return [name for name in names if name not in others]


def _text(columns: _Columns, names: Sequence[str], *, has_images: bool) -> str | None:
    """The column with the text of a row: by its name, else the one with the longest values."""
    # Beside images, other columns may be about them: labels, names.
    longest = None if has_images else max(names, key=columns.mean_length, default=None)
    return _first(names, _TEXTS) or longest


def _labelled(columns: _Columns, names: Sequence[str]) -> str | None:
    """The column that has labels: by its name, or the first by its values."""
    of_labels = [name for name in names if _are_labels(columns.values[name])]
    return _first(of_labels, _LABELS) or next(iter(of_labels), None)


def _words_of(columns: _Columns, labelled: str | None) -> tuple[str, ...]:
    return _DEFAULT_LABELS if labelled is None else tuple(sorted(set(columns.values[labelled])))


def _ids(columns: _Columns, named: list[str], possible: Collection[str]) -> tuple[list[str], str | None]:
    """The columns of ids: those with such a name, else those of the possible ones that are ids by their values.

    Without any of them, also a value that stands in two rows of a column that looks like one of ids.
    """
    if named:
        return named, None
    others = [name for name in columns.types if name in possible and name.lower() not in _OF_A_ROW]
    distinct = {name: set(map(str, columns.values[name])) for name in others}
    ids = [name for name in others if len(distinct[name]) == len(columns.rows) and _are_ids(distinct[name])]
    return ids, None if ids else next(filter(None, map(columns.repeat, others)), None)


def _answer(columns: _Columns, free: Sequence[str], choices: str | None) -> str | None:
    """The column with the right choice, as its place or its text."""
    if choices is None:
        return None
    texts = [name for name in free if name.lower() in _ANSWERS.lower().split() and columns.are_answers(name, choices)]
    return _first([*columns.integers(), *texts], _ANSWERS)


def _named(name: str, known: str) -> bool:
    return name.lower() in known.lower().split() or re.sub(r"^[a-z]+_", "", name.lower()) in known.lower().split()


def _first(names: Sequence[str], known: str) -> str | None:
    """The name that is known best."""
    return next((name for word in known.lower().split() for name in names if name.lower() == word), None)


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


def _is_text_list(value: Any) -> bool:
    texts = _as_list(value)
    return isinstance(texts, list) and all(isinstance(text, str) for text in texts)


def _as_list(value: Any) -> Any:
    """A list that CSV holds as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


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


def written_lines(path: str, data: Data, purpose: str, spec_text: str = "") -> list[str]:
    """What the spec in `path` reads, for the user. spec_text: of this spec."""
    read = [] if data.text is None else [f"text from the column {data.text!r}"]
    if "\n  messages_column:" in spec_text:
        read = [f"conversations from the column {data.messages!r}"]
    read += [f"images from the column {column!r}" for column in data.images]
    from_ = "an OpenAI batch file" if data.is_batch else ", ".join(read)
    lines = [f"{path}: rows from {data.path} ({data.num_rows:,}), {from_}"]
    if data.encoding is not None:
        guess = "" if data.has_given_encoding else ", which is a guess"
        lines.append(f"the spec reads {data.path} as {data.encoding}{guess}; check the text that validate shows, and "
                     "correct input.csv.encoding if it is another")  # fmt: skip
    if data.unreadable is not None:
        lines.append(f"warning: {data.unreadable}")
    if data.image_hosts:
        lines.append(f"images are fetched from {list_names(data.image_hosts)}, the hosts of the first rows; see "
                     f"input.images.hosts in {path}")  # fmt: skip
    if data.image_folders:
        lines.append(f"images are read from {list_names(data.image_folders)}, the folders of the first rows; see "
                     f"input.images.folders in {path}")  # fmt: skip
    if data.lost_image is not None:
        lines.append(f"warning: {data.lost_image}")
    lines.extend(data.notes)
    lines.extend(_label_lines(path, data, purpose))
    return lines


def _label_lines(path: str, data: Data, purpose: str) -> Iterator[str]:
    """The labels of the spec in `path` and where they come from, if it has some."""
    if purpose != "label" and not (purpose in TAKE_LABELS and scores_labels(data)):
        return
    is_of_folders = data.labelled == FOLDER and PATH in data.images
    words = "the names of the folders" if is_of_folders else f"the words of the column {data.labelled!r}"
    source = "" if data.labelled is None else f", {words}"
    yield f"labels: {', '.join(data.labels)}{source}; change them in {path} if they are not yours"


def labels_in(text: str) -> tuple[str, ...]:
    """The words between commas. Raises UserError if one is there twice."""
    words = names_in(text)
    if twice := [word for word, number in Counter(words).items() if number > 1]:
        raise UserError(f"--labels: got {list_names(map(repr, twice))} more than once; give each label once")
    return words


def check_purpose(purpose: str, *, has_labels: bool = False) -> None:
    """Raise UserError for a purpose that `init` does not know, or that has no use for labels."""
    if purpose not in PURPOSES:
        raise UserError(f"--for: got {purpose!r}; must be one of {', '.join(PURPOSES)}")
    if has_labels and purpose not in TAKE_LABELS:
        raise UserError(f"--labels: got --for {purpose}, which has no labels; write --for label or --for score")


def write(path: str, purpose: str, data: Data, wanted: StarterWanted) -> str:
    """Write the spec, and return its text.

    Raises UserError if there is a file already, or if the data is for another purpose.
    """
    text = write_spec(purpose, path, data, wanted)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; give another name, or delete it yourself") from None
    except OSError as error:
        raise UserError(f"cannot write {os.fspath(path)}: {reason(error)}") from error
    return text
