"""The only door to the output folder: every file in it is written, renamed, listed and deleted here.

A local folder (or one on a shared file system). Names are relative paths with forward slashes. What a method says is
durable when it returns has been fsynced, its folder too. An object store could stand behind the same verbs.
"""

import contextlib
import errno
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import IO

from batchinf import faults
from batchinf.errors import OutputError

_TEMPORARY = ".tmp-"


class Folder:
    """The output folder of one job."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = pathlib.Path(root)

    def path(self, name: str) -> pathlib.Path:
        """Where `name` lies on this machine, for readers that want a path (memory maps, Parquet)."""
        return self.root / name

    def make(self, *names: str) -> None:
        """Create the folder and the named folders below it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for name in names:
                if self.path(name).is_symlink():
                    raise _is_link(self.path(name))
                self.path(name).mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot create the output folder {self.root}: {reason(error)}") from error

    @contextlib.contextmanager
    def writing(self, name: str, fault: str = "storage.write") -> Iterator[IO[bytes]]:
        """A binary file that appears under `name`, whole and durable, when the block ends without an error."""
        target = self.path(name)
        temporary = target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")
        try:
            with temporary.open("xb") as file:
                yield file
                faults.point(f"{fault}.before_fsync")
                file.flush()
                os.fsync(file.fileno())
            faults.point(f"{fault}.before_rename")
            temporary.replace(target)
            faults.point(f"{fault}.after_rename")
            sync_folder(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def write_atomic(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Replace `name` by `data` in one step. `durable=False` spares the fsync where losing it costs nothing."""
        if durable:
            with self.writing(name) as file:
                file.write(data)
            return
        target = self.path(name)
        temporary = target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")
        temporary.write_bytes(data)
        temporary.replace(target)

    def create_exclusive(self, name: str, data: bytes = b"") -> bool:
        """Create `name`, whole and durable, unless it exists; says whether it was this call that created it."""
        target = self.path(name)
        temporary = target.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            return self._create_without_links(target, data)
        finally:
            temporary.unlink()
        sync_folder(target.parent)
        return True

    def _create_without_links(self, target: pathlib.Path, data: bytes) -> bool:
        # Some shared file systems have no hard links: O_EXCL still elects one creator there.
        try:
            with target.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        sync_folder(target.parent)
        return True

    def publish(self, source: str, target: str) -> None:
        """Rename `source` to `target`, durably; both lie in this folder."""
        self.path(source).replace(self.path(target))
        sync_folder(self.path(target).parent)
        sync_folder(self.path(source).parent)

    def list(self, folder: str, prefix: str = "") -> list[str]:
        """Names (not paths) in `folder` that begin with `prefix`, sorted, without half-written files."""
        try:
            with os.scandir(self.path(folder)) as entries:
                return sorted(
                    entry.name
                    for entry in entries
                    if entry.name.startswith(prefix) and not entry.name.startswith(_TEMPORARY)
                )
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file in `folder`, without half-written ones."""
        try:
            with os.scandir(self.path(folder)) as entries:
                return {e.name: e.stat().st_size for e in entries if not e.name.startswith(_TEMPORARY)}
        except FileNotFoundError:
            return {}

    def sweep(self, folder: str) -> None:
        """Delete what interrupted writes left half done in `folder`."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path(folder)) as entries:
            for entry in entries:
                if entry.name.startswith(_TEMPORARY):
                    pathlib.Path(entry.path).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """The bytes of `name`."""
        return self.path(name).read_bytes()

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder `name`."""
        return self.path(name).exists()

    def delete(self, name: str) -> None:
        """Delete the file `name`; it is no error if it is gone."""
        self.path(name).unlink(missing_ok=True)


def _is_link(path: pathlib.Path) -> OutputError:
    # Who can plant a link could otherwise have files written, swept and deleted elsewhere.
    return OutputError(f"{path} is a symbolic link, which is not followed; remove it, or set output.path to its target")


def open_log(path: pathlib.Path) -> IO[bytes]:
    """A log to append to. Raises OutputError for a symbolic link."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "ab")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise


def sync_folder(path: pathlib.Path) -> None:
    """Make renames, creations and deletions in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse to fsync a folder; their renames are durable by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def reason(error: OSError) -> str:
    """The operating system's words for an error, without the number."""
    return (error.strerror or str(error)).lower()
