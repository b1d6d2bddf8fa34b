"""The local files that decide a job's output, each identified by the digest of all its bytes.

Small files are digested at once, weights on a thread while engines load them. The user's cache has the digests of
weights, so that unchanged files are not read again. The commit of a hub id identifies its files; they are not here.
"""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import xxhash

from batchinf.base import faults
from batchinf.base.errors import DriftError, ModelError
from batchinf.base.paths import user_cache
from batchinf.base.storage import decode_record, disk_error, encode_record
from batchinf.base.text import counted
from batchinf.model import files as model_files
from batchinf.model.files import ADAPTER_CONFIG
from batchinf.model.lora import Adapter, adapter_places
from batchinf.model.model import Model
from batchinf.spec.job import ModelSpec

# Size, times of the last change of content and of inode, in nanoseconds, and inode number.
Stamp = tuple[int, int, int, int]

# Read at once. Each block takes Python's lock twice, which may take 10 ms while another thread computes.
_BLOCK_BYTES = 32 << 20
_NICENESS = 10  # the thread's share of a busy core is a tenth of that of others
# The clock of some file systems stands still for milliseconds. A file that has just changed may change once more and
# keep its stamp, so its digest is not kept.
_SETTLED_NS = 2 * 10**9
_ENTRY_VERSION = 1
_MOST_NAMED = 8


def _stamp_of(path: pathlib.Path) -> Stamp:
    """The stamp of a file. Opens it: only then does a network file system ask its server. Raises ModelError."""
    with _reading(path), path.open("rb", buffering=0) as file:
        return _stamp(file.fileno())


def _stamp(descriptor: int) -> Stamp:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot read {disk_error(error, path)}") from error


def stamps_of(paths: Iterable[pathlib.Path]) -> dict[pathlib.Path, Stamp]:
    """The stamp of each of these files."""
    return {path: _stamp_of(path) for path in paths}


def check_unchanged(stamps: Mapping[pathlib.Path, Stamp]) -> None:
    """Raise DriftError if one of these files has another stamp now."""
    for path, stamp in stamps.items():
        if not path.is_file() or _stamp_of(path) != stamp:
            raise _changed(path)


def _changed(path: pathlib.Path) -> DriftError:
    return DriftError(
        f"{path} was changed while the job ran, so that its rows could be of two models; leave the file as it is and "
        "run the same command again"
    )


def adapter_files(adapter: Adapter) -> list[pathlib.Path]:
    """The files of an adapter that vLLM reads."""
    folder = pathlib.Path(adapter.path)
    return [folder / name for name in (ADAPTER_CONFIG, *model_files.weight_files(folder, model_files.ADAPTER))]


def _small_files(model: Model, spec: ModelSpec, adapters: Sequence[Adapter]) -> dict[str, pathlib.Path]:
    """Configs, tokenizers and code in local folders, by name; see `Contents`. adapters: the local ones."""
    code = ("**/*.py",) if spec.trust_remote_code else ()
    files = {f"lora/{it.name}/{ADAPTER_CONFIG}": pathlib.Path(it.path, ADAPTER_CONFIG) for it in adapters}
    if model.commit is None:
        patterns = (*model_files.CONFIG_FILES, *model_files.TOKENIZER_FILES, *code)
        files |= _named(pathlib.Path(model.folder), patterns)
    if spec.tokenizer is not None and pathlib.Path(spec.tokenizer).is_dir():
        named = _named(pathlib.Path(model.tokenizer), (*model_files.TOKENIZER_FILES, *code))
        files |= {f"tokenizer/{name}": path for name, path in named.items()}
    return files


def _named(folder: pathlib.Path, patterns: tuple[str, ...]) -> dict[str, pathlib.Path]:
    return {path.relative_to(folder).as_posix(): path for path in model_files.matching(folder, patterns)}


def _large_files(model: Model, spec: ModelSpec, adapters: Sequence[Adapter]) -> dict[str, pathlib.Path]:
    """Weights in local folders, by name, in the order in which engines load them."""
    files = {}
    if model.commit is None:
        names = model_files.loaded_files(pathlib.Path(model.folder), spec.load_format)
        files = {name: pathlib.Path(model.folder, name) for name in names}
    for adapter in adapters:
        files |= {f"lora/{adapter.name}/{path.name}": path for path in adapter_files(adapter)[1:]}
    return files


class Contents:
    """The local files of a job's model, tokenizer and adapters, and their digests as far as they are known.

    digests: xxh3-128 by the file's name: in the model's folder, or after `tokenizer/` or `lora/NAME/`.
    """

    def __init__(self, model: Model, spec: ModelSpec, adapters: tuple[Adapter, ...]) -> None:
        """Digests the small files, and looks for the large ones in the cache. Raises ModelError."""
        places = adapter_places(spec)
        local = [adapter for adapter in adapters if pathlib.Path(places[adapter.name]).is_dir()]
        small = _small_files(model, spec, local)
        self._paths = small | _large_files(model, spec, local)
        # Of the files before engines begin to load them.
        self.stamps = stamps_of(self._paths.values())
        self.digests: dict[str, str] = {}
        for name, path in self._paths.items():
            digest = _digest(path, self._stamp(path)) if name in small else _kept(path, self._stamp(path))
            if digest is not None:
                self.digests[name] = digest
        self._left = [name for name in self._paths if name not in self.digests]
        self.num_bytes = sum(self._stamp(self._paths[name])[0] for name in self._left)
        self.num_bytes_read = 0
        self._error: BaseException | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def _stamp(self, path: pathlib.Path) -> Stamp:
        return self.stamps[path]

    @property
    def is_known(self) -> bool:
        """Whether there is a digest of each file. Raises DriftError or ModelError if a file cannot have one."""
        if self._error is not None:
            raise self._error
        return len(self.digests) == len(self._paths)

    def start(self) -> None:
        """Begin to digest the files that are left, in the order in which engines load them. Does not wait."""
        if self._left:
            self._thread = threading.Thread(target=self._run, name="digests", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(5.0)  # a file system may hang

    def differences(self, before: Mapping[str, str]) -> list[str]:
        """Lines about the files that differ from those that a job began with, as far as their digests are known.

        before: digests by name; empty if the job has none yet. Without local files there are no lines: the job's
        identity tells a folder from a hub id.
        """
        if not before or not self._paths:
            return []
        lines = []
        for name in sorted(before.keys() | self._paths.keys()):
            path = self._paths.get(name)
            if path is None:
                lines.append(f"  {name}: the job began with it, and now it is missing")
            elif name not in before:
                lines.append(f"  {name}: the job began without it ({path})")
            elif self.digests.get(name, before[name]) != before[name]:
                lines.append(f"  {name}: its bytes are not those that the job began with ({path})")
        more = len(lines) - _MOST_NAMED
        return [*lines[:_MOST_NAMED], *([f"  and {counted(more, 'more file')}"] if more > 0 else [])]

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            for name in self._left:
                path = self._paths[name]
                began_ns = time.time_ns()
                faults.point("content.digest")
                digest = _digest(path, self._stamp(path), self._note)
                if max(self._stamp(path)[1:3]) < began_ns - _SETTLED_NS:
                    _keep(path, self._stamp(path), digest)
                self.digests[name] = digest
        except _ClosedError:
            pass
        except BaseException as error:
            self._error = error

    def _note(self, num_bytes: int) -> None:
        self.num_bytes_read += num_bytes
        if self._is_closed.is_set():
            raise _ClosedError


class _ClosedError(Exception):
    """Nobody needs the digests any more."""


def _digest(path: pathlib.Path, stamp: Stamp, note: Callable[[int], object] = lambda _: None) -> str:
    """The digest of a file's bytes. note: gets the size of each block. Raises DriftError if the stamp is another."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(max(1, min(stamp[0], _BLOCK_BYTES))))
    with _reading(path), path.open("rb", buffering=0) as file:
        is_same = _stamp(file.fileno()) == stamp
        while is_same and (num_bytes := file.readinto(block)):
            digest.update(block[:num_bytes])
            note(num_bytes)
        if not is_same or _stamp(file.fileno()) != stamp:
            raise _changed(path)
    return digest.hexdigest()


# -- the user's cache ------------------------------------------------------------------------------------------------


def _entry(path: pathlib.Path) -> pathlib.Path:
    name = xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve()))
    return user_cache("digests") / f"{name}.json"


def _kept(path: pathlib.Path, stamp: Stamp) -> str | None:
    """The digest in the cache, if it is of a file with this path and this stamp."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no cache, damage, no home folder
        entry = decode_record(_entry(path).read_bytes(), _ENTRY_VERSION)
        if entry == {"path": os.fspath(path.resolve()), "stamp": list(stamp), "digest": entry.get("digest")}:
            return str(entry["digest"])
    return None


def _keep(path: pathlib.Path, stamp: Stamp, digest: str) -> None:
    """Put a digest into the cache in one step, if the cache can be written."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        content = {"path": os.fspath(path.resolve()), "stamp": list(stamp), "digest": digest}
        model_files.write_cached(_entry(path), encode_record(_ENTRY_VERSION, content))
