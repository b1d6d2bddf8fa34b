"""Folders of `save_to_disk`, before `datasets` opens them: which files they name, and whether those are safe to map."""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from batchinf.arrow_damage import check_batch
from batchinf.errors import InputError
from batchinf.input_files import stamp
from batchinf.source_cache import locked, read_record, write_record
from batchinf.storage import Folder

_RECORD = "saved.json"  # in the cache folder: the files that were looked through, as they were then


def check_saved(path: str, cache: Folder) -> None:
    """Raise `InputError` unless all that the folder names lies in it, and all its Arrow data is whole.

    The data is looked through once, and again if a file's size or mtime is another.
    """
    root = pathlib.Path(path)
    try:
        files = [file for folder in _splits(root) for file in _data_files(folder)]
        stamps = [[str(file.relative_to(root)), *stamp(str(file))] for file in files]
        if read_record(cache, _RECORD).get("files") == stamps:
            return
        for file in files:
            _look_through(file)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300].encode(errors="backslashreplace").decode()
        raise InputError(f"{path} cannot be loaded as a Hugging Face dataset: {reason}; is it damaged?") from error
    cache.make()
    with locked(cache):
        write_record(cache, _RECORD, {"files": stamps})


def _splits(root: pathlib.Path) -> Iterator[pathlib.Path]:
    if not (root / "dataset_dict.json").is_file():
        yield root
        return
    for name in _object(root / "dataset_dict.json")["splits"]:
        yield root / _inside(name)


def _data_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for file in _object(folder / "state.json")["_data_files"]:
        yield folder / _inside(file["filename"])


def _object(path: pathlib.Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return value


def _inside(name: Any) -> str:
    # A dataset from elsewhere must not have other files of this machine read in its name.
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"it names {name!r}, which is not in the folder")
    return name


def _look_through(file: pathlib.Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file.name} is missing, or no file")
    with pa.memory_map(os.fspath(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        for batch in stream:
            check_batch(batch)
