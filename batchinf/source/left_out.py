"""What a folder of input files leaves out, and what must not be read as plain files; `find` and `remote` use it.

A new job refuses a folder that would give it wrong rows. A job that has begun goes on with the files that it reads.
"""

import glob
import itertools
import os
import pathlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from batchinf.base.errors import InputError
from batchinf.base.text import list_names
from batchinf.source.files import COMPRESSIONS, InputFile
from batchinf.source.formats.base import FileFormat
from batchinf.source.formats.images import Images
from batchinf.source.formats.json import Json
from batchinf.source.formats.lines import TextLines
from batchinf.source.formats.registry import format_by_ending

# Names of files left out → the remark about them.
LeftOut = dict[str, list[str]]

UNKNOWN = "no row is made of a file with an unknown ending"
NOT_FILES = "not read, as it is a pipe or a device"
LINKS = "a link to a folder is not followed; a glob follows it, such as `{path}/**/*.jsonl`"
FOLDERS = "a glob does not read the files of a folder; `{path}/*` does, or give the path of the folder"
SPLITS = "files of several splits are read together; a glob reads one split, such as `{path}/**/*{split}*`"
JSON = "not read beside files of another format; `input.format: json` reads these files alone"
PICTURES = "no row is made of a picture beside other data; `input.format: images` makes one of each"

# How datasets on the hub name the files of a split, as in data/train-00000-of-00001.parquet.
_SPLIT = re.compile(r"(?:^|[/._-])(train|test|training|testing|validation|valid|val|dev|eval|evaluation)(?=[/._-])")

_ABOUT_DATASETS = ("dataset_info.json", "dataset_infos.json")  # `datasets` writes them beside its files

# Signs of tables whose log says which files count: a name in a folder of the table → the kind of table.
_LOGS = (("_delta_log", "a Delta table"), (".hoodie", "a Hudi table"), ("metadata/*.metadata.json", "an Iceberg table"))
_LOG_FOLDERS = {sign.partition("/")[0] for sign, _ in _LOGS}
_LOG = re.compile(r"(?:^|/)(?:(_delta_log)(?:/|$)|(\.hoodie)(?:/|$)|(metadata)/[^/]*\.metadata\.json$)")


def walk(path: str, left_out: LeftOut | None = None) -> list[str]:
    """The files below a folder, without hidden ones and those that begin with _. left_out: see `find_files`."""
    paths = []
    folders = [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file() or not os.path.exists(entry.path):  # a link to nothing is refused when it is read
                    paths.append(entry.path)
                elif left_out is not None:
                    remark = LINKS.format(path=path.rstrip("/")) if entry.is_dir() else NOT_FILES
                    left_out.setdefault(remark, []).append(os.path.relpath(entry.path, path))
    return paths


def note_others(names: Iterable[str], left_out: LeftOut, *, is_named: bool, root: str | None) -> None:
    """Note the files of a folder that are no rows. names: of these files; paths if they are of this host.

    is_named: whether the spec names the format. root: the folder, if it is of this host.
    """
    for name in sorted(names):
        format = format_by_ending(name)
        if format is None:
            remark = UNKNOWN
        elif isinstance(format, Images) and not is_named:
            remark = PICTURES
        elif isinstance(format, Json) and not is_named and os.path.basename(name) not in _ABOUT_DATASETS:
            remark = JSON
        else:
            continue
        left_out.setdefault(remark, []).append(name if root is None else os.path.relpath(name, root))


def note_folders(folders: Iterable[str], files: Iterable[str], left_out: LeftOut, path: str) -> None:
    """Note the folders that a glob matches, if it matches no file in them. Spark and Dask name folders `x.jsonl`.

    files: that the glob matches. Both are names below the same folder.
    """
    read = {file[:end] for file in files for end, sign in enumerate(file) if sign == "/"}
    if unread := sorted({folder.rstrip("/") for folder in folders} - read):
        left_out[FOLDERS.format(path=path.rstrip("/"))] = unread


def note_splits(names: Iterable[str], left_out: LeftOut, path: str) -> None:
    """Note files that are named after different splits, with the first of each. names: below the folder."""
    firsts: dict[str, str] = {}
    for name in names:
        for split in _SPLIT.findall(name)[-1:]:
            firsts.setdefault(split, name)
    if len(firsts) > 1:
        left_out[SPLITS.format(path=path.rstrip("/"), split=max(firsts))] = list(firsts.values())


def in_words(left_out: LeftOut) -> str:
    """What was left out, to follow a message."""
    return "".join(f"; {list_names(names)}: {remark}" for remark, names in left_out.items())


def refuse_twins(files: Sequence[InputFile], path: str) -> None:
    """Raise InputError if a file stands beside its compressed copy: its rows would run twice."""
    names = defaultdict[str, list[str]](list)
    for file in files:
        stem, ending = os.path.splitext(file.name)
        names[stem if ending.lower() in COMPRESSIONS else file.name].append(file.name)
    for both in names.values():
        if len(both) > 1:
            raise InputError(
                f"{path} has {' and '.join(sorted(both))}, so that its rows would run twice; move one of them away, or "
                "narrow the path"
            )


def refuse_captions(found: Mapping[str, FileFormat], path: str) -> None:
    """Raise InputError if pictures stand beside files of plain text, and nothing else: either may be the rows.

    found: the format of each file of a folder.
    """
    texts = [name for name, format in found.items() if isinstance(format, TextLines)]
    pictures = [name for name, format in found.items() if isinstance(format, Images)]
    if texts and pictures and len(texts) + len(pictures) == len(found):
        raise InputError(
            f"{path} has {len(pictures):,} of pictures and {len(texts):,} of text, such as "
            f"{os.path.basename(min(texts))}; set `input.format: {Images.name}` to make a row of each picture, or "
            f"`input.format: {TextLines.name}` to make one of each line of the texts"
        )


def refuse_table(path: str) -> None:
    """Raise InputError if a folder of this host is a table of Delta, Iceberg or Hudi, or within one."""
    folder = pathlib.Path(path).resolve()
    below = (inner for inner, folders, _ in os.walk(path) if not _LOG_FOLDERS.isdisjoint(folders))
    for place in itertools.chain(map(str, (folder, *folder.parents)), below):
        for sign, kind in _LOGS:
            if glob.glob(os.path.join(glob.escape(place), sign)):
                raise _table_error(path, kind)


def refuse_listed_table(names: Collection[str], path: str) -> None:
    """Raise InputError if one of these files or folders, below a folder, is of the log of a table."""
    kinds = {sign.partition("/")[0]: kind for sign, kind in _LOGS}
    for name in names:
        if (found := _LOG.search(name)) is not None:
            raise _table_error(path, kinds[found[1] or found[2] or found[3]])


def _table_error(path: str, kind: str) -> InputError:
    return InputError(
        f"{path} is or has {kind}, whose log says which of its files count: with all of them, deleted rows run "
        f"again; export it, or give a glob such as {path.rstrip('/')}/**/*.parquet to read all files"
    )
