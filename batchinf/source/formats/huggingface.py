"""Hugging Face datasets: folders written by `save_to_disk`, and dataset ids, which are downloaded once."""

import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import xxhash

from batchinf.base.errors import InputError
from batchinf.base.storage import Folder
from batchinf.base.text import list_names
from batchinf.source.cache import locked, read_record, write_record
from batchinf.source.digests import Watch, changed
from batchinf.source.files import InputFile, InputLocation, Stamp, content_hash, refuse_pointers, settled_stamp, stamp
from batchinf.source.formats.arrow import copied
from batchinf.source.formats.base import ColumnarReader, checked
from batchinf.source.types import MixedTypes, settled_schema

# What `save_to_disk` writes beside the Arrow files.
_OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json")
_SAVED_RECORD = "saved.json"  # in the cache folder: the stamps of the files that were checked


def check_saved(path: str, cache: Folder) -> dict[str, list[Any]]:
    """Raise `InputError` unless the folder has all files that it names, and their Arrow data is valid.

    The data is checked and digested once, and again if a file's stamp changes. Returns stamp and digest of each file.
    """
    root = pathlib.Path(path)

    def stamps(look: Callable[[str], Stamp]) -> list[list[Any]]:
        return [[str(file.relative_to(root)), *look(str(file))] for file in files]

    try:
        files = list(_data_files(root))
        known = read_record(cache, _SAVED_RECORD).get("files", [])
        settled = stamps(settled_stamp)
        is_known = [entry[:-1] for entry in known] == settled
        if not is_known:
            for file in files:
                _look_through(file)
            known = [[*entry, _digest(str(file))] for file, entry in zip(files, settled, strict=True)]
            if settled != stamps(stamp):
                raise changed(path)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:300].encode(errors="backslashreplace").decode()
        raise InputError(f"{path} cannot be loaded as a Hugging Face dataset: {reason}; is it damaged?") from error
    if not is_known:
        _keep(cache, _SAVED_RECORD, {"files": known})
    return {os.path.realpath(file): entry[1:] for file, entry in zip(files, known, strict=True)}


def _keep(cache: Folder, name: str, record: Mapping[str, object]) -> None:
    cache.make()
    with locked(cache):
        write_record(cache, name, record)


def _digest(path: str) -> str:
    return content_hash(InputFile(os.path.basename(path), path))


def _data_files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """The Arrow files of a dataset, or of all splits."""
    splits = root / "dataset_dict.json"
    folders = [root / _inside(name) for name in _object(splits)["splits"]] if splits.is_file() else [root]
    for folder in folders:
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
    refuse_pointers([InputFile(file.name, os.fspath(file))])
    with pa.memory_map(os.fspath(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
        for batch in stream:
            checked(batch)


# The value of `input.format` for a dataset: a saved folder, or an id of the hub. `open_dataset` opens it as a whole.
HUGGING_FACE = "hf"
_DEFAULT_SPLIT = "train"
_RECORD = "dataset.json"  # in the cache folder: the Arrow files of a dataset of the hub


def looks_like_id(path: str) -> bool:
    """Whether a path that does not exist could be a dataset's id, such as `openai/gsm8k`."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", path) is not None


def is_saved(path: str) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def has_splits(path: str) -> bool:
    """Whether a folder was written by `DatasetDict.save_to_disk`."""
    return os.path.isfile(os.path.join(path, "dataset_dict.json"))


class DatasetReader(ColumnarReader):
    """A dataset, read from its memory-mapped Arrow table."""

    def __init__(
        self, name: str, dataset: Any, about: str, files: Sequence[Sequence[Any]], *, remarks: Sequence[str] = ()
    ) -> None:
        """files: path, stamp and digest of each Arrow file; none if the dataset is in memory. remarks: for the user.

        The fingerprint covers `about` and each byte of the files, but no path.
        """
        self.schema = settled_schema([(name, dataset.features.arrow_schema)], MixedTypes.REFUSED)
        super().__init__(self.schema)
        self.num_rows: int = dataset.num_rows
        self.remarks = remarks
        self._dataset = dataset.with_format("arrow")
        self._name = name
        digests = [file[-1] for file in files]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps([about, digests]).encode())
        paths = [file[0] for file in files]
        trusted = [(file[1], file[2], file[3]) for file in files]
        self._watch = Watch(name, paths, trusted, lambda: list(map(_digest, paths)) == digests)

    def _slice(self, start: int, stop: int, columns: list[str]) -> pa.Table:
        return self._watch.read(lambda: copied(self._dataset[start:stop].select(columns)))


def open_dataset(input: InputLocation, cache: Folder) -> DatasetReader:
    """The dataset. `cache` records the files that came from the hub. Raises `InputError` if it cannot be loaded."""
    if is_saved(path := os.path.expanduser(input.path)):
        checked = check_saved(path, cache)
        dataset = _load(input)
        files = [[file, *checked[os.path.realpath(file)]] for file in _files(dataset)]
        about = f"{dataset.num_rows} {dataset.features}"
        remarks = [*_unnamed_split(input, _saved_splits(path)), *_unnamed_files(path, checked)]
        return DatasetReader(input.path, dataset, about, files, remarks=remarks)
    return _open_hub_dataset(input, cache)


def _saved_splits(path: str) -> Sequence[str]:
    splits = pathlib.Path(path, "dataset_dict.json")
    return [str(name) for name in _object(splits)["splits"]] if splits.is_file() else ()


def _unnamed_split(input: InputLocation, names: Sequence[str]) -> Iterator[str]:
    """A remark about the split that is read of several, if the spec names none. names: of all splits."""
    if input.split is None and len(names) > 1:
        yield f"the split {_DEFAULT_SPLIT} is read, of {', '.join(names)}; `input.split` names another one"


def _unnamed_files(path: str, named: Collection[str]) -> Iterator[str]:
    """A remark about files in the folder that are no part of the dataset. named: real paths of those that are."""
    names = []
    for file in sorted(pathlib.Path(path).rglob("*")):
        inside = file.relative_to(path)
        # `datasets` itself writes cache-….arrow beside a dataset.
        is_own = file.name in _OF_DATASETS or file.name.startswith("cache-") or os.path.realpath(file) in named
        if file.is_file() and not is_own and not any(part.startswith((".", "_")) for part in inside.parts):
            names.append(str(inside))
    if names:
        yield f"the dataset has only the files that state.json names, so these are not read: {list_names(names)}"


def _load(input: InputLocation) -> Any:
    import datasets  # takes 1 s, only for datasets

    path = os.path.expanduser(input.path)
    split = input.split or _DEFAULT_SPLIT
    try:
        if not is_saved(path):
            return datasets.load_dataset(path, input.name, split=split, revision=input.revision)
        saved = datasets.load_from_disk(path)
    except Exception as error:  # `datasets`, the hub's client and the dataset's reader may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = input.path if os.path.exists(path) else f"there is no file or folder {input.path}, and it"
        raise InputError(
            f"{what} cannot be loaded as a Hugging Face dataset: {reason}; "
            "check its id, `name`, `split` and `revision`, and the network"
        ) from error
    if not isinstance(saved, dict):
        return saved
    if split not in saved:
        raise InputError(f"{input.path} has no split {split!r}; set `split` to one of {', '.join(saved)}")
    return saved[split]


def _open_hub_dataset(input: InputLocation, cache: Folder) -> DatasetReader:
    """The dataset. Its fingerprint covers repository, commit, configuration and split, and the Arrow files.

    The hub is asked once. Later the dataset comes from its local Arrow files, so a resumed job has the same rows.
    """
    asked = [input.path, input.name, input.split, input.revision]
    known = read_record(cache, _RECORD)
    if known.get("asked") != asked:
        known = {"files": []}
    dataset = _from_files(known)
    about = known.get("about")
    splits = known.get("splits", [])  # jobs of earlier versions do not have them
    if dataset is None:
        dataset = _load(input)
        about = dataset._fingerprint
        splits = [*(dataset.info.splits or ())]
    # A file whose stamp has changed is read again: the content counts.
    digests = {tuple(file[:-1]): file[-1] for file in known["files"]}
    stamps = [(path, *settled_stamp(path)) for path in _files(dataset)]
    files = [[*stamped, digests.get(stamped) or _digest(stamped[0])] for stamped in stamps]
    record = {"asked": asked, "num_rows": dataset.num_rows, "about": about, "splits": splits, "files": files}
    if record != known:
        _keep(cache, _RECORD, record)
    return DatasetReader(input.path, dataset, str(about), files, remarks=[*_unnamed_split(input, splits)])


def _files(dataset: Any) -> list[str]:
    return [file["filename"] for file in dataset.cache_files]


def _from_files(known: Mapping[str, Any]) -> Any | None:
    import datasets

    paths = [file[0] for file in known["files"]]
    if not paths or not all(map(os.path.isfile, paths)):
        return None
    try:
        dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
    except (pa.ArrowException, OSError, ValueError):
        return None  # damaged since
    return dataset if dataset.num_rows == known["num_rows"] else None  # else a slice or a selection of the files
