"""The Hugging Face hub: an id and a revision → a commit and its folder in this machine's cache, or why there is none.

Asks once, for ten seconds at most, and then makes do with the cache. Fetches all but the weights.
"""

import contextlib
import fnmatch
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from batchinf.base.errors import ModelError
from batchinf.model.files import TOKENIZER_FILES

T = TypeVar("T")

# A machine without a network can take a minute to notice (name servers, dropped packets).
_TIMEOUT_S = 10.0
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a repository, as far as it is in the cache; `is_online`: the hub can give what is not."""

    folder: pathlib.Path
    is_online: bool

    @property
    def commit(self) -> str:
        """The commit's hash."""
        return self.folder.name


def local_folder(field: str, name: str, config: str) -> pathlib.Path | None:
    """The folder that a field of the spec names; None for a hub id. Raises ModelError for what can be neither.

    config: the file that the folder must hold beside the weights, for the message.
    """
    folder = pathlib.Path(name)
    if folder.is_dir():
        return folder.absolute()
    if folder.is_file():
        raise ModelError(f"{field}: '{name}' is a file; give the folder that holds {config} and the weights")
    if name.startswith(("/", ".")) or name.count("/") > 1:
        raise ModelError(f"{field}: there is no folder '{name}'; a Hugging Face id would be 'org/name'")
    return None


def find(field: str, name: str, revision: str | None, is_whole: Callable[[pathlib.Path], bool]) -> Snapshot:
    """The commit that `revision` of `name` is now or, if the hub cannot say, was when it was cached.

    A commit hash whose cached folder `is_whole` is not asked about. field: the spec's, for messages. Raises ModelError.
    """
    from huggingface_hub import errors

    try:
        cached = _cached(name, revision)
    except errors.HFValidationError as error:
        raise ModelError(f"{field}: '{name}' is neither a folder here nor a Hugging Face id (org/name)") from error
    if cached is not None and cached.name == revision and is_whole(cached):
        return Snapshot(cached, is_online=False)
    try:
        return Snapshot(_fetch_small_files(name, revision), is_online=True)
    except (OSError, errors.HTTPError, ValueError) as error:  # type: ignore[attr-defined]
        if cached is None:
            raise ModelError(f"{field}: {_why_not(name, revision, error)}") from error
        return Snapshot(cached, is_online=False)


def fetch(field: str, name: str, commit: str, patterns: tuple[str, ...]) -> None:
    """Get these files of a commit into the cache. field: the spec's, for messages. Raises ModelError."""
    from huggingface_hub import errors, snapshot_download

    try:
        with _no_progress_bars():
            snapshot_download(name, revision=commit, allow_patterns=list(patterns))
    except (OSError, errors.HTTPError, ValueError) as error:  # type: ignore[attr-defined]
        raise ModelError(f"{field}: {_why_not(name, commit, error)}") from error


def _cached(name: str, revision: str | None) -> pathlib.Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json"):
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            return pathlib.Path(path).parent
    return None


def _fetch_small_files(name: str, revision: str | None) -> pathlib.Path:
    from huggingface_hub import HfApi, snapshot_download

    ask = functools.partial(HfApi().model_info, name, revision=revision, timeout=_TIMEOUT_S / 2)
    small = [file.rfilename for file in _within(_TIMEOUT_S, ask).siblings or () if _is_small(file.rfilename)]
    with _no_progress_bars():
        return pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=small or ["config.json"]))


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from huggingface_hub import utils

    were_disabled = utils.are_progress_bars_disabled()  # type: ignore[attr-defined]
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if not were_disabled:
            utils.enable_progress_bars()  # type: ignore[attr-defined]


def _is_small(name: str) -> bool:
    patterns = TOKENIZER_FILES if "/" in name else _SMALL_FILES
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, or TimeoutError; a call that hangs is left behind on a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return future.result(timeout_s)


def _why_not(name: str, revision: str | None, error: Exception) -> str:
    """Why the hub gave nothing, and what to do about it."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"'{name}' is gated; accept its licence at {page}, then run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"'{name}' has no revision '{revision}'; its branches and tags are at {page}/tree/main"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{_nowhere(name)}, nor a model '{name}' on the hub; check the name; a private one needs `hf auth login`"
    if status == 401:
        return f"the hub refuses this machine's token for '{name}'; run `hf auth login`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{_nowhere(name)} or in the hub cache, and HF_HUB_OFFLINE is set; unset it, or run `{command}` first"
    answer = f"answered with status {status}" if status else f"cannot be reached ({_brief(error)})"
    return f"{_nowhere(name)} or in the hub cache, and the hub {answer}; run `{command}` where there is a network"


def _nowhere(name: str) -> str:
    folder, _, last = name.rpartition("/")
    return f"there is no '{last}' in the folder '{folder}'" if os.path.isdir(folder) else f"there is no folder '{name}'"


def _brief(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {_TIMEOUT_S:.0f} s"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")
