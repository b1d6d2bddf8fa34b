"""Hugging Face datasets: folders written by `save_to_disk`, and dataset ids, which are downloaded once."""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.source.cache import locked, read_record, write_record
from batchinf.source.files import InputLocation, stamp
from batchinf.source.formats.base import ColumnarReader, InputFormat, check_batch
from batchinf.source.types import MixedTypes, settled_schema

_SAVED_RECORD = "saved.json"  # in the cache folder: the stamps of the files that were checked


def check_saved(path: str, cache: Folder) -> None:
    """Raise `InputError` unless the folder has all files that it names, and their Arrow data is valid.

    The data is checked once, and again if a file's size or mtime changes.
    """
    root = pathlib.Path(path)
    try:
        files = [file for folder in _splits(root) for file in _data_files(folder)]
        stamps = [[str(file.relative_to(root)), *stamp(str(file))] for file in files]
        if read_record(cache, _SAVED_RECORD).get("files") == stamps:
            return
        for file in files:
            _look_through(file)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300].encode(errors="backslashreplace").decode()
        raise InputError(f"{path} cannot be loaded as a Hugging Face dataset: {reason}; is it damaged?") from error
    cache.make()
    with locked(cache):
        write_record(cache, _SAVED_RECORD, {"files": stamps})


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
    # A downloaded dataset must not make us read other files of this machine.
    if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"it names {name!r}, which is not in the folder")
    return name


def _look_through(file: pathlib.Path) -> None:
    if not file.is_file():
        raise ValueError(f"{file.name} is missing, or no file")
    with pa.memory_map(os.fspath(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        for batch in stream:
            check_batch(batch)


_RECORD = "dataset.json"  # in the cache folder: the Arrow files of a dataset of the hub


class HuggingFace(InputFormat):
    """A Hugging Face dataset: a saved folder, or an id of the hub. `open_dataset` opens it as a whole."""

    name = "hf"


def looks_like_id(path: str) -> bool:
    """Whether a path that does not exist could be a dataset's id, such as `openai/gsm8k`."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None


def is_saved(path: str) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


class DatasetReader(ColumnarReader):
    """A dataset, read from its memory-mapped Arrow table."""

    def __init__(self, dataset: Any, fingerprint: str) -> None:
        self.schema = settled_schema([dataset.features.arrow_schema], MixedTypes.REFUSED)
        super().__init__(self.schema, self.schema)
        self.num_rows: int = dataset.num_rows
        self.fingerprint = fingerprint
        self._dataset = dataset.with_format("arrow")

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        return self._dataset[start:stop].select(columns)


def open_dataset(input: InputLocation, cache: Folder) -> DatasetReader:
    """The dataset. `cache` records the files that came from the hub. Raises `InputError` if it cannot be loaded."""
    if is_saved(path := os.path.expanduser(input.path)):
        check_saved(path, cache)
        dataset = _load(input)
        return DatasetReader(dataset, _saved_fingerprint(dataset))
    return DatasetReader(*_open_hub_dataset(input, cache))


def _load(input: InputLocation) -> Any:
    import datasets  # takes 1 s, only for datasets

    path, split = os.path.expanduser(input.path), input.split or "train"
    try:
        if not is_saved(path):
            return datasets.load_dataset(path, input.name, split=split, revision=input.revision)
        found = datasets.load_from_disk(path)
    except Exception as error:  # `datasets`, the hub's client and the dataset's reader may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = input.path if os.path.exists(path) else f"there is no file or folder {input.path}, and it"
        raise InputError(
            f"{what} cannot be loaded as a Hugging Face dataset: {reason}; "
            "check its id, `name`, `split` and `revision`, and the network"
        ) from error
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise InputError(f"{input.path} has no split {split!r}; set `split` to one of {', '.join(found)}")
    return found[split]


def _saved_fingerprint(dataset: Any) -> str:
    """Covers the features, the row count, and the size, first and last 64 KiB of each Arrow file, but no path."""
    digest = xxhash.xxh3_128(f"{dataset.num_rows} {dataset.features}".encode())
    for path in _files(dataset):
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(size.to_bytes(8, "little") + stream.read(1 << 16))
            stream.seek(max(0, size - (1 << 16)))
            digest.update(stream.read())
    return digest.hexdigest()


def _open_hub_dataset(input: InputLocation, cache: Folder) -> tuple[Any, str]:
    """The dataset, and the fingerprint that `datasets` derives from repository, commit, configuration and split.

    The hub is asked once. Later the dataset comes from its local Arrow files, so a resumed job has the same rows.
    """
    asked = [input.path, input.name, input.split, input.revision]
    known = read_record(cache, _RECORD)
    if known.get("asked") == asked and (dataset := _from_files(known)) is not None:
        return dataset, known["fingerprint"]
    dataset = _load(input)
    found = {"asked": asked, "num_rows": dataset.num_rows, "fingerprint": dataset._fingerprint}
    cache.make()
    with locked(cache):
        write_record(cache, _RECORD, {**found, "files": _stamps(_files(dataset))})
    return dataset, dataset._fingerprint


def _files(dataset: Any) -> list[str]:
    return [file["filename"] for file in dataset.cache_files]


def _stamps(paths: Iterable[str]) -> list[list[Any]]:
    return [[path, *stamp(path)] for path in paths]


def _from_files(known: Mapping[str, Any]) -> Any | None:
    import datasets

    paths = [path for path, _, _ in known["files"]]
    if not paths or not all(map(os.path.isfile, paths)) or _stamps(paths) != known["files"]:
        return None
    dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
    return dataset if dataset.num_rows == known["num_rows"] else None  # else a slice or a selection of the files
