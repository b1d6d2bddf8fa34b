"""The only access to the output folder: every file in it is written, renamed, listed and deleted here.

The folder is local or on a shared file system. Names are relative paths with forward slashes. "Durable" means that the
file and its folder are fsynced when a method returns. A disk error is an OSError that names the file; `disk_error` adds
what to do.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import stat
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

import xxhash

from batchinf.base import faults
from batchinf.base.errors import OutputError
from batchinf.base.text import one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from batchinf.base.slices import Slice

DAMAGED = "damaged"
_TEMPORARY = ".tmp-"
_T = TypeVar("_T")
# Errors that only the user can fix. The first one stops the job, because other replicas would fail the same way.
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "free space within the quota, or ask for a larger quota",
    errno.EROFS: "make it writable again",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check the disk (the system's log says more)",
    errno.EACCES: "give this user permission for it",
    errno.EPERM: "give this user permission for it",
    errno.EXDEV: "files are renamed between the folders of a job, so keep all of them on one file system",
}


class Folder:
    """The output folder of one job, or of one slice."""

    def __init__(self, root: str | os.PathLike[str], slice_: "Slice | None" = None) -> None:
        self.root = pathlib.Path(root)
        self.slice = slice_

    def path(self, name: str) -> pathlib.Path:
        """The path of `name`, for readers that need one (memory maps, Parquet)."""
        return self.root / name

    def make(self, *names: str) -> None:
        """Create the folder and the named folders below it, durably."""
        if self.root.is_symlink() and not self.root.exists():
            raise OutputError(
                f"the output folder {self.root} is a symbolic link to {os.readlink(self.root)}, which does not exist; "
                "make that folder, or remove the link"
            )
        try:
            _make(self.root)
            for name in names:
                if self.path(name).is_symlink():
                    raise _is_link(self.path(name))
                _make(self.path(name))
        except OSError as error:
            raise OutputError(f"cannot create the output folder {disk_error(error, self.root)}") from error

    @contextlib.contextmanager
    def writing(
        self,
        name: str,
        fault: str = "storage.write",
        *,
        durable: bool = True,
        final_name: Callable[[], str] | None = None,
    ) -> Iterator[IO[bytes]]:
        """A binary file that appears under `name`, whole and durable, when the block ends without an error.

        final_name: makes another name in the same folder, when the whole file is written.
        """
        target = self.path(name)
        temporary = _temporary(target)
        try:
            with create(temporary, target) as file:
                yield file
                with naming(target):
                    faults.point(f"{fault}.before_fsync")
                    if durable:
                        _sync(file)
                    else:
                        file.flush()
            if final_name is not None:
                target = self.path(final_name())
            with naming(target):
                faults.point(f"{fault}.before_rename")
                temporary.replace(target)
                faults.point(f"{fault}.after_rename")
                if durable:
                    sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def write_atomic(self, name: str, data: bytes, *, durable: bool = True, fault: str = "storage.write") -> None:
        """Replace `name` by `data` in one step. `durable=False` skips the fsync, for files that may be lost."""
        with self.writing(name, fault, durable=durable) as file:
            file.write(data)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Create `name`, whole and durable, unless it exists. True if this call created it."""
        target = self.path(name)
        temporary = _temporary(target)
        try:
            with naming(target), create(temporary, target) as file:
                file.write(data)
                faults.point("storage.create.before_fsync")
                _sync(file)
            if not _link(temporary, target):
                return False
        except _NoLinksError:
            return self._create_without_links(target, data)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        sync_folder(target.parent)
        return True

    def _create_without_links(self, target: pathlib.Path, data: bytes) -> bool:
        # Some shared file systems have no hard links. O_EXCL still lets only one process create the file.
        try:
            file = create(target)
        except FileExistsError:
            return False
        try:
            with naming(target), file:
                file.write(data)
                _sync(file)
        except BaseException:
            # Half a file would count as a whole one.
            with contextlib.suppress(OSError):
                target.unlink()
            raise
        sync_folder(target.parent)
        return True

    def publish(self, source: str, target: str, *, durable: bool = True) -> None:
        """Rename `source` to `target`; both are in this folder.

        durable=False: the caller calls `sync` for the folder of `target`. After a crash, `source` may be back.
        """
        with naming(self.path(target)):
            faults.point("storage.publish.before_rename")
        self.path(source).replace(self.path(target))
        if durable:
            sync_folder(self.path(target).parent)
            sync_folder(self.path(source).parent)

    def sync(self, folder: str) -> None:
        """Make the names of files in `folder` durable."""
        sync_folder(self.path(folder))

    def list(self, folder: str, prefix: str | tuple[str, ...] = "") -> list[str]:
        """Names (not paths) in `folder` that begin with a prefix, sorted, without half-written files."""
        return sorted(entry.name for entry in self._entries(folder) if entry.name.startswith(prefix))

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file in `folder`, without half-written ones."""
        sizes = {}
        for entry in self._entries(folder):
            with contextlib.suppress(FileNotFoundError):  # another process may delete one meanwhile
                sizes[entry.name] = entry.stat().st_size
        return sizes

    def half_written(self, folder: str) -> tuple[pathlib.Path, ...]:
        """Half-written files, and folders of that kind, in `folder`."""
        return tuple(pathlib.Path(entry.path) for entry in self._entries(folder, half_written=True))

    def _entries(self, folder: str, *, half_written: bool = False) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path(folder)) as entries:
            yield from (entry for entry in entries if entry.name.startswith(_TEMPORARY) == half_written)

    def refuse_pipes(self) -> None:
        """Raise OutputError for a named pipe in this folder or below it: a process that opens one waits for ever."""
        folders = [self.root]
        while folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(pathlib.Path(entry.path))
                    elif not entry.is_file() and pathlib.Path(entry.path).is_fifo():
                        raise _is_pipe(entry.path)

    def sweep(self, folder: str) -> None:
        """Delete half-written files, and folders of that kind, in `folder`."""
        for path in self.half_written(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        path = self.path(name)
        if path.is_fifo():
            raise _is_pipe(path)
        return path.read_bytes()

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder `name`."""
        return self.path(name).exists()

    def move_aside(self, name: str) -> str:
        """Move a damaged file to `damaged/`, under a name that is free there; returns the name. It deletes nothing."""
        self.make(DAMAGED)
        target = free_name(f"{DAMAGED}/{name.rpartition('/')[2]}", self.exists)
        self.publish(name, target)
        return target

    def delete(self, name: str) -> None:
        """Delete the file `name` if it exists."""
        self.path(name).unlink(missing_ok=True)


def free_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """The name, or the first of `name.1`, `name.2` and so on that is not taken."""
    names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
    return next(itertools.filterfalse(is_taken, names))


# In the first lines of each HTML page that a command writes.
PAGE_MARK = b'<meta name="generator" content="batchinf">'
_MARK_WITHIN = 1000


def write_named(path: pathlib.Path, data: bytes, mark: bytes = b"") -> None:
    """Write a file that the user has named; see `writing_named`.

    mark: text in the first lines of all files that the command writes. A file without it is not replaced.
    """
    with writing_named(path, lambda there: has_mark(there, mark)) as file:
        file.write(data)


@contextlib.contextmanager
def naming_option(path: str | os.PathLike[str], option: str) -> Iterator[None]:
    """Turn a disk error into an OutputError that says which option names another file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}; name another file with {option}") from error


def has_mark(path: pathlib.Path, mark: bytes) -> bool:
    """Whether the text is in the first lines of a file."""
    with path.open("rb") as file:
        return mark in file.read(_MARK_WITHIN)


@contextlib.contextmanager
def writing_named(path: pathlib.Path, is_own: Callable[[pathlib.Path], bool]) -> Iterator[IO[bytes]]:
    """A binary file that the user has named, outside of a job. A regular file is replaced in one step.

    A link, a device or a pipe stays, and what it stands for is written: a rename would put a file in the place of
    /dev/null, if root runs it. is_own: see `refuse_foreign`. Raises OSError.
    """
    refuse_foreign(path, is_own)
    if path.name and (not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode)):
        with Folder(path.parent).writing(path.name, durable=False) as file:
            yield file
    else:
        with path.open("wb") as file:
            yield file


def refuse_foreign(path: pathlib.Path, is_own: Callable[[pathlib.Path], bool]) -> None:
    """Raise FileExistsError if the path leads to a file, such as the job's spec, that the command has not written.

    is_own: whether the command has written it. An empty file may be replaced.
    """
    if path.is_file() and path.stat().st_size and not is_own(path):
        raise FileExistsError(errno.EEXIST, "a file is there that this command has not written", os.fspath(path))


class _NoLinksError(Exception):
    """The file system has no hard links here."""


def _link(source: pathlib.Path, target: pathlib.Path) -> bool:
    """Give a file a second name unless that is taken. True if this call gave it."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        # EXDEV: some file systems link only within one folder.
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS):
            raise _NoLinksError from error
        raise
    return True


def _temporary(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")


class _NamedFile(io.FileIO):
    """A file whose errors name it. The system's own errors do so only when a file is opened."""

    def __init__(self, path: pathlib.Path, mode: str, name: pathlib.Path) -> None:
        self._named = name
        with naming(name):
            super().__init__(os.fspath(path), mode)

    def write(self, data: Any) -> int:
        """Write all or a part of `data`; returns the number of bytes written."""
        with naming(self._named):
            return super().write(data) or 0


def create(path: pathlib.Path, name: pathlib.Path | None = None) -> IO[bytes]:
    """A new file for writing. name: its name in errors, if `path` is a temporary one."""
    return io.BufferedWriter(_NamedFile(path, "xb", name or path))


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Disk errors in this block name `path`, unless they name another file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or pathlib.Path(os.fsdecode(error.filename)).name.startswith(_TEMPORARY):
            error.filename = os.fspath(path)
            error.filename2 = None
        raise


def _is_link(path: pathlib.Path) -> OutputError:
    # A planted link could make us write and delete files elsewhere.
    return OutputError(f"{path} is a symbolic link, which is not followed; remove it, or set output.path to its target")


def _is_pipe(path: str | os.PathLike[str]) -> OutputError:
    return OutputError(f"{os.fspath(path)} is a named pipe, and no file of a job is one; remove it")


def open_log(path: pathlib.Path) -> IO[bytes]:
    """A log to append to. Raises OutputError for a symbolic link."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "ab")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise


def _make(path: pathlib.Path) -> None:
    """Make a folder, and those above it, unless it is there. Files in it are durable only if its own name is."""
    if path.is_dir():
        return
    _make(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a user may have the right to make a folder, but not to list it
        sync_folder(path.parent)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: pathlib.Path) -> None:
    """Make renames, creations and deletions in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to fsync a folder; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """The operating system's words for an error, without the number; Arrow's own in one line."""
    return one_line(error.strerror or error).lower()


def disk_error(error: OSError, path: str | os.PathLike[str] | None = None) -> str:
    """One line for the user: the file (`path`, if the error names none), the system's error, and what to do."""
    where = error.filename if error.filename is not None else path
    where = os.fsdecode(where) if isinstance(where, bytes) else where
    words = reason(error) if where is None else f"{where}: {reason(error)}"
    if error.errno not in _REMEDIES:
        return words
    remedy = _REMEDIES[error.errno]
    if error.errno == errno.ENOSPC and where is not None and _lacks_inodes(str(where)):
        remedy = "it can hold no more files (no inodes are free): delete some there"
    return f"{words}; {remedy}, then run the same command again: all finished parts are kept"


def _lacks_inodes(path: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.statvfs(os.path.dirname(path) or ".")
        return status.f_files > 0 and status.f_favail == 0
    return False


# -- what begins a binary file, and records ----------------------------------------------------------------------------

_MAGIC = b"batchinf"
_VERSION = 1
# Magic, format version, the four fields, 8 bytes to spare; then the xxh3-64 of all these.
_STRUCT = struct.Struct("<8sIIQQ16s8x")
HEADER_BYTES = _STRUCT.size + 8


def file_digest(path: pathlib.Path) -> str:
    """xxh3-128 of a file's bytes, 32 hexadecimal digits."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class HashingWriter(io.RawIOBase):
    """Passes bytes on to a file and tracks their number and xxh3-128. Closing it leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        self._file.write(data)
        return num_bytes

    def digest(self) -> bytes:
        """xxh3-128 of the written bytes, 16 bytes."""
        return self._digest.digest()

    def hexdigest(self) -> str:
        """xxh3-128 of the written bytes, 32 hexadecimal digits."""
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a binary file."""

    number: int
    """Of its shard, retry or extent."""
    first: int
    """Depends on the format, as `second` does."""
    second: int
    digest: bytes
    """xxh3-128 of all that follows the header."""

    def encode(self) -> bytes:
        fields = _STRUCT.pack(_MAGIC, _VERSION, *astuple(self))
        return fields + xxhash.xxh3_64_digest(fields)

    @classmethod
    def decode(cls, data: bytes) -> "FileHeader | None":
        """The header in the first 64 bytes; None if they are damaged or of another format version."""
        fields = data[: _STRUCT.size]
        if len(data) < HEADER_BYTES or xxhash.xxh3_64_digest(fields) != data[_STRUCT.size : HEADER_BYTES]:
            return None
        magic, version, *values = _STRUCT.unpack(fields)
        return cls(*values) if (magic, version) == (_MAGIC, _VERSION) else None


# -- records -----------------------------------------------------------------------------------------------------------


class NewerRecord(ValueError):
    """The file was written by a newer batchinf."""


def encode_record(version: int, content: Mapping[str, object]) -> bytes:
    """A small JSON file with a version and a checksum: `{"version": 1, "checksum": "…", "content": {…}}`."""
    return json.dumps({"version": version, "checksum": _checksum(content), "content": content}).encode()


def decode_record(data: bytes, version: int) -> dict[str, Any]:
    """The content of a file. Raises NewerRecord, or ValueError if it is damaged or of an older version."""
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("not a record")
    stored_version = record.get("version")
    if isinstance(stored_version, int) and stored_version > version:
        raise NewerRecord
    content = record.get("content")
    if stored_version != version or not isinstance(content, dict) or record.get("checksum") != _checksum(content):
        raise ValueError("damaged, or of an older version")
    return content


_adapters: "dict[type, TypeAdapter[Any]]" = {}


def adapter(record: type[_T]) -> "TypeAdapter[_T]":
    """Reads and writes a type of records. Each is made when it is first used, because that takes 0.3 to 4 ms."""
    if record not in _adapters:
        from pydantic import TypeAdapter

        _adapters[record] = TypeAdapter(record)
    return _adapters[record]


def _checksum(content: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
