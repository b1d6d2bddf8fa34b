"""Finds the local files of an input (a file, a glob or a folder) and their one format; `rows` opens them.

`remote` finds the files of URLs.
"""

import glob
import os
import re
from collections.abc import Iterable, Sequence

from batchinf.base.errors import InputError
from batchinf.base.paths import folder_problem, is_bucket
from batchinf.base.text import near_path
from batchinf.source.files import InputFile, InputLocation
from batchinf.source.formats.base import FileFormat
from batchinf.source.formats.huggingface import HUGGING_FACE, is_saved, looks_like_id
from batchinf.source.formats.registry import ALLOWED, COMPRESSED, file_format, format_by_ending
from batchinf.source.left_out import (
    NOT_FILES,
    LeftOut,
    in_words,
    note_folders,
    note_others,
    note_splits,
    refuse_captions,
    refuse_table,
    refuse_twins,
    walk,
)

# The pandas function that reads a file of an unsupported format, for the error message.
_PANDAS = {
    ".xls": "read_excel(NAME)",
    ".xlsx": "read_excel(NAME)",
}


class NoInputError(InputError):
    """The path of the input names nothing."""


def is_dataset(input: InputLocation) -> bool:
    """Whether the input is a Hugging Face dataset: by `format`, saved as one, or named like one."""
    path = os.path.expanduser(input.path)
    if input.format is not None:
        return input.format == HUGGING_FACE
    if os.path.exists(path):
        return is_saved(path)
    # Local things come first: without a network, the hub takes half a minute to say that it has no such dataset.
    is_near = os.path.isdir(os.path.dirname(path)) or any(map(format_by_ending, glob.glob(f"{glob.escape(path)}.*")))
    return looks_like_id(path) and format_by_ending(path) is None and not is_near


def find_files(input: InputLocation, left_out: LeftOut | None = None) -> tuple[FileFormat, list[InputFile]]:
    """The files of a file, glob or folder, sorted by name, and their one format.

    left_out: gets the names of the files of a folder that are no rows, by the remark about them.
    """
    if input.parts is not None:
        return one_format(files := list(input.parts()), input), files
    path = os.path.expanduser(input.path)
    if _is_device(path):
        raise InputError(
            f"{input.path} is a pipe or a device; a job reads its input more than once, so write the rows to a file"
        )
    root = os.path.dirname(path)
    if os.path.isfile(path):
        names = [path]
    elif os.path.isdir(path):
        if input.is_new:
            refuse_table(path)
        names = data_files(walk(path, left_out), input, left_out, root=path)
        root = path
    elif glob.has_magic(path):
        root = _root_of(path)
        names = _by_glob(input, path, root, {} if left_out is None else left_out)
    else:
        raise NoInputError(
            f"{input.path} does not exist{'' if os.path.isabs(path) else ' in the working folder'}; give a file, "
            "a glob, a folder, or a Hugging Face dataset's id"
            f"{' with input.format: hf' if looks_like_id(path) and format_by_ending(path) is None else ''}"
            f"{near_path(path)}"
        )
    files = [InputFile(os.path.relpath(name, root or "."), os.path.abspath(name)) for name in names]
    if input.is_new:
        refuse_twins(files, input.path)
    return one_format(files, input), files


def _is_device(path: str) -> bool:
    """Whether this is a pipe or a device, which can be read once."""
    is_plain = os.path.isfile(path) or os.path.isdir(path)
    # The files in /proc and /dev/fd are others for each process. /dev/shm is a folder like any other.
    return path.startswith(("/dev/fd/", "/dev/std", "/proc/")) or (os.path.exists(path) and not is_plain)


def folder_of(path: str) -> str | None:
    """The folder to which paths in the rows of an input are relative, on this host or in a bucket.

    None for another URL or a dataset of the hub. In a bucket, a name with the ending of a format is that of a file.
    """
    if is_bucket(path) and folder_problem(path) is None:
        is_file = glob.has_magic(path) or format_by_ending(path) is not None
        return (_root_of(path) if is_file else path).rstrip("/")
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return os.path.abspath(path)
    is_here = os.path.isfile(path) or ("://" not in path and glob.has_magic(path))
    return os.path.abspath(_root_of(path) or ".") if is_here else None


def _root_of(pattern: str) -> str:
    """The folder before the first sign of a glob."""
    return os.path.dirname(re.split(r"[*?[]", pattern)[0])


def _by_glob(input: InputLocation, path: str, root: str, left_out: LeftOut) -> list[str]:
    matches = sorted(glob.glob(path, recursive=True))
    # A link to nothing is refused when it is read. A job that has begun goes on without it.
    names = [name for name in matches if os.path.isfile(name) or (input.is_new and not os.path.exists(name))]
    below = {name: os.path.relpath(name, root or ".") for name in matches}
    folders = [name for name in matches if os.path.isdir(name) and below[name] != "."]
    note_folders((below[name] for name in folders), (below[name] for name in names), left_out, input.path)
    if devices := [below[name] for name in matches if _is_device(name)]:
        left_out[NOT_FILES] = devices
    if not names:
        raise NoInputError(
            f"no file matches {path}{in_words(left_out)}; correct the glob, or put it in quotes if a shell expanded it"
        )
    return names


def data_files(
    names: Iterable[str], input: InputLocation, left_out: LeftOut | None = None, *, root: str | None = None
) -> list[str]:
    """The files of a folder that have an ending of the input's format, sorted; `InputError` if there is none.

    left_out: see `find_files`. root: the folder, if the names are paths of this host.
    """
    names = list(names)
    left_out = {} if left_out is None else left_out
    found = {name: format for name in names if (format := format_by_ending(name)) is not None}
    if input.format is None and input.began_as in {format.name for format in found.values()}:
        found = {name: format for name, format in found.items() if format.name == input.began_as}
    elif input.format is None and not all(format.is_often_beside_data for format in found.values()):
        if input.is_new:
            refuse_captions(found, input.path)
        found = {name: format for name, format in found.items() if not format.is_often_beside_data}
    files = sorted(name for name, format in found.items() if input.format in (None, format.name))
    note_others({*names} - {*files}, left_out, is_named=input.format is not None, root=root)
    if not files:
        compressed = " or ".join(COMPRESSED)
        what = input.format or "data"
        raise InputError(f"{input.path} has no {what} file{in_words(left_out)}; {ALLOWED} ({compressed} may follow)")
    note_splits((name if root is None else os.path.relpath(name, root) for name in files), left_out, input.path)
    return files


def one_format(files: Sequence[InputFile], input: InputLocation) -> FileFormat:
    """The one format of all files, as given or by their endings; `InputError` if there is none."""
    if input.format is not None:
        if (format := file_format(input.format)) is None:
            raise InputError(f"format {input.format!r} is not known; {ALLOWED}")
        return format.for_input(input)
    last_files: dict[FileFormat, str] = {}
    for file in files:
        if (format := format_by_ending(file.name)) is None:
            read = _PANDAS.get(os.path.splitext(file.name)[1].lower())
            other = "" if read is None else f"; or make one in pandas: {read}.to_parquet('rows.parquet')"
            raise InputError(
                f"the ending of {file.name} is not known; {ALLOWED}; name it so, or set `input.format`{other}"
            )
        last_files[format] = file.name
    if len(last_files) > 1:
        names = ", ".join(last_files.values())
        offered = _offered(input.path, last_files)
        raise InputError(f"{input.path} mixes formats: {names}; set `input.format` to {offered}, or narrow the path")
    return next(iter(last_files)).for_input(input)


def _offered(path: str, formats: Iterable[FileFormat]) -> str:
    """The formats that a mixed input may be read as, with those of a folder that are passed over beside others."""
    names = {format.name for format in formats}
    for _, _, files in os.walk(os.path.expanduser(path)):
        names |= {format.name for format in map(format_by_ending, files) if format and format.is_often_beside_data}
    return " or ".join(sorted(names))
