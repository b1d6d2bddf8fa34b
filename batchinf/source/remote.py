"""Input files behind a URL: fsspec lists them, gives their versions, and fetches each once.

Credentials come from the environment, never from the URL, because the URL is recorded.
"""

import contextlib
import importlib.util
import io
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import xxhash

from batchinf.base.bucket import file_system
from batchinf.base.errors import BatchinfError, InputError
from batchinf.base.store_errors import no_credentials, one_line
from batchinf.source.files import InputFile, InputLocation, Stamp
from batchinf.source.find import data_files, one_format
from batchinf.source.formats.base import FileFormat
from batchinf.source.left_out import LeftOut, in_words, note_folders, refuse_listed_table, refuse_twins

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # by which fsspec reads these URLs
UNKNOWN = -1  # in a stamp: the file system does not give this number
_NOT_ALLOWED = ("PermissionDeniedError", "UnauthenticatedError")  # errors of obstore
_HTTP = ("http", "https")
# Keys under which file systems give a file's version, the most reliable first.
_VERSIONS = (
    "ETag", "etag", "e_tag", "md5Hash", "checksum", "content_hash", "Content-MD5", "Digest", "sha", "CRC",
    "LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created",
)  # fmt: skip


def is_url(path: str) -> bool:
    """Whether an input's path is a URL for fsspec, such as `s3://bucket/*.jsonl` or `zip://a.csv::file:///x.zip`."""
    return "://" in path


@dataclass(frozen=True, slots=True)
class RemoteFile(InputFile):
    """A file that is fetched once."""

    system: Any = field(compare=False)
    """Of fsspec."""
    place: str = field(compare=False)
    """Its path within `system`."""
    info: Mapping[str, Any] = field(compare=False)
    """Its entry in the listing."""
    is_remote: ClassVar[bool] = True

    def stamp(self) -> Stamp:
        """The size, a number for the version, and 0; `UNKNOWN` for what is not known. See `InputFile`."""
        info = self.info if _version(self.info) is not None else self._fresh_info()
        return _stamp(info)

    def settled_stamp(self) -> Stamp:
        """The stamp as it is now; `stamp` may be as old as the listing."""
        return _stamp(self._fresh_info())

    @property
    def object_etag(self) -> str:
        """See `InputFile`. Only of what obstore reads, because `ranges` reads by it, too."""
        is_of_store = type(self.system).__module__.startswith("obstore")
        return str(self.info.get("e_tag") or "").strip('"') if is_of_store else ""

    def _fresh_info(self) -> Mapping[str, Any]:
        with _input_errors(self.path):
            self.system.invalidate_cache()
            return dict(self.system.info(self.place))

    def open(self) -> io.BufferedReader:
        """See `InputFile`. The stream cannot seek."""
        return io.BufferedReader(_Stream(self), 1 << 20)


class _Stream(io.RawIOBase):
    """A remote file's bytes from the first to the last. All errors are `InputError`."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._num_bytes = 0
        # Over HTTP one request for the whole file: not every server supports ranges.
        options = {"block_size": 0} if _protocol(file.system) in _HTTP else {}
        with _input_errors(file.path):
            self._stream = file.system.open(file.place, "rb", **options)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        num_read = 0
        while num_read < len(view):
            with _input_errors(self._file.path):
                block = self._stream.read(len(view) - num_read)
            if not block:
                break
            view[num_read : num_read + len(block)] = block
            num_read += len(block)
        self._num_bytes += num_read
        size = self._file.info.get("size")
        if num_read < len(view) and size is not None and self._num_bytes < size:
            raise InputError(f"{self._file.path} ended after {self._num_bytes:,} of {size:,} bytes; try again")
        return num_read

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):
                self._stream.close()
                if _protocol(self._file.system) in _HTTP:  # its `close` only schedules the closing of the connection
                    from fsspec.asyn import sync

                    sync(self._stream.loop, self._stream._close)
        super().close()


def find_remote(input: InputLocation, left_out: LeftOut | None = None) -> tuple[FileFormat, list[InputFile]]:
    """The files of a URL of a file, glob or folder, sorted by name, and their one format.

    left_out: see `find_files`.
    """
    with _input_errors(input.path):
        system, path = _connect(input.path)
        listing = _list(system, path)
    chain = input.path.partition("::")[2]
    files: list[InputFile] = []
    for name, place in _chosen(input, path, listing, left_out, is_glob=_is_glob(system, path)).items():
        url = system.unstrip_protocol(place) + (f"::{chain}" if chain else "")
        files.append(RemoteFile(name, url, system=system, place=place, info=listing[place]))
    if input.is_new:
        refuse_twins(files, input.path)
        if path not in listing and not _is_glob(system, path) and _protocol(system) not in _HTTP:
            _refuse_table_above(system, path, input.path)
    return one_format(files, input), files


def _refuse_table_above(system: Any, path: str, url: str) -> None:
    """Raise InputError if a folder stands in a table of Delta, Iceberg or Hudi.

    Lists the two folders above it, with one request for each 1,000 entries, and one more for a folder `metadata` there.
    Folders of partitions, such as `day=1`, do not count. The root of a bucket is not listed: it may have millions.
    """
    parts = path.strip("/").split("/")
    above = ["/".join(parts[:depth]) for depth in range(len(parts) - 1, 1, -1) if "=" not in parts[depth - 1]]
    for folder in above[:2]:
        names = []
        with contextlib.suppress(Exception):  # without permission for these folders, the job reads its own all the same
            names = [place.rstrip("/").rpartition("/")[2] for place in system.ls(folder, detail=False)]
            if "metadata" in names:
                names += [_name(folder, place) for place in system.ls(f"{folder}/metadata", detail=False)]
        refuse_listed_table(names, url)


def objects_in(url: str) -> list[InputFile]:
    """The objects in a folder of a bucket, with their names there. Raises InputError if they cannot be listed."""
    with _input_errors(url):
        system, path = _connect(url)
        found = system.find(path, detail=True)
    return [
        RemoteFile(_name(path, place), system.unstrip_protocol(place), system=system, place=place, info=info)
        for place, info in sorted(found.items())
    ]


_HIDDEN = re.compile(r"(^|/)[._]")


def _chosen(
    input: InputLocation, path: str, listing: Mapping[str, Any], left_out: LeftOut | None, *, is_glob: bool
) -> dict[str, str]:
    """Choose the files that a URL means. Returns name → place, sorted. listing: place → what is known of a file."""
    if not is_glob and path in listing:
        return {re.split(r"[?#]", path)[0].rstrip("/").rpartition("/")[2] or path: path}
    places = {name: place for place in listing if (name := _name(path, place))}
    if is_glob:
        return _matched(input, places, listing, {} if left_out is None else left_out)
    if input.is_new:
        refuse_listed_table(places, input.path)
    names = data_files(itertools.filterfalse(_HIDDEN.search, places), input, left_out)
    return {name: places[name] for name in names}


def _matched(
    input: InputLocation, places: Mapping[str, str], listing: Mapping[str, Any], left_out: LeftOut
) -> dict[str, str]:
    """The files that a glob matches; see `_chosen`."""
    names = sorted(name for name, place in places.items() if listing[place].get("type") == "file")
    folders = (name for name, place in places.items() if listing[place].get("type") == "directory")
    note_folders(folders, names, left_out, input.path)
    if not names:
        raise InputError(
            f"no file matches {input.path}{in_words(left_out)}; correct the URL, or put it in quotes if a shell "
            "expanded it"
        )
    return {name: places[name] for name in names}


def _connect(url: str) -> tuple[Any, str]:
    """The file system and the path in it."""
    from fsspec.core import url_to_fs

    scheme, _, path = url.partition("://")
    if _is_of_obstore(scheme):
        return file_system(scheme), path
    options: dict[str, Any] = {}
    for protocol in _HTTP:
        if re.search(rf"(^|::){protocol}://", url):
            import aiohttp

            # The default, 5 minutes for a whole file, is too short for a large one.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)
            options[protocol] = {"client_kwargs": {"timeout": timeout}}
    system, path = url_to_fs(url, **options)
    return system, path


def _is_of_obstore(scheme: str) -> bool:
    """Whether the package that fsspec wants for these URLs is missing, and the one for buckets is here."""
    wanted = _PACKAGES.get(scheme)
    return wanted is not None and not importlib.util.find_spec(wanted) and bool(importlib.util.find_spec("obstore"))


def _list(system: Any, path: str) -> dict[str, dict[str, Any]]:
    """The listing's entry of each wanted file, by its path; of a glob also those of folders that it matches."""
    is_http = _protocol(system) in _HTTP
    if _is_glob(system, path):
        if is_http:  # fails if the server does not answer; `glob` would find no files
            system.ls(re.split(r"[*[]", path)[0].rpartition("/")[0] + "/", detail=False)
        return dict(system.glob(path, detail=True))
    if is_http and path.endswith("/"):
        walked = system.walk(path, on_error="raise", detail=True)
        return {info["name"]: info for _, _, files in walked for info in files.values()}
    info = system.info(path)
    if info.get("type") == "directory":
        return dict(system.find(path, detail=True))
    return {path: info}


def _is_glob(system: Any, path: str) -> bool:
    return any(sign in path for sign in ("*[" if _protocol(system) in _HTTP else "*?["))


def _name(path: str, place: str) -> str:
    """A file's name: its path below the folder, or below the last folder before a glob's wildcards."""
    root = re.split(r"[*?[]", path)[0]
    root = root if root == path else root.rpartition("/")[0]
    return place.removeprefix(root).lstrip("/")


def _protocol(system: Any) -> str:
    return system.protocol if isinstance(system.protocol, str) else str(system.protocol[0])


def _version(info: Mapping[str, Any]) -> str | None:
    return next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key) not in (None, "")), None)


def _stamp(info: Mapping[str, Any]) -> Stamp:
    size = info.get("size")
    version = _version(info)
    number = UNKNOWN if version is None else xxhash.xxh3_64_intdigest(version.encode()) >> 1
    return UNKNOWN if size is None else int(size), number, 0


@contextlib.contextmanager
def _input_errors(url: str) -> Iterator[None]:
    """Turn any error of a file system, its library or the network into one line for the user."""
    try:
        yield
    except BatchinfError:
        raise
    except Exception as error:  # each file system's library has errors of its own
        raise InputError(_line(url, error)) from error


def _line(url: str, error: BaseException) -> str:
    # fsspec reports every HTTP failure as a file that does not exist; the cause is chained.
    why = (error.__cause__ or error) if isinstance(error, FileNotFoundError) else error
    status = getattr(why, "status", None)
    if isinstance(why, ImportError):
        return f"{url} cannot be read, as a package is missing: {_words(why)}"
    if isinstance(why, PermissionError) or status in (401, 403) or type(why).__name__ in _NOT_ALLOWED:
        return f"{url} cannot be read: no permission; give credentials in the environment, in the way of its library"
    if isinstance(why, FileNotFoundError) or status in (404, 410):
        return f"{url} does not exist: correct the URL, or put the file there"
    if missing := no_credentials(why):
        return f"{url} cannot be read: {missing}"
    return f"{url} cannot be read: {_words(why)}; check the URL, the network, and credentials in the environment"


def _words(error: BaseException) -> str:
    # A server may lead to a signed URL, which a library then quotes. Messages go into logs that other people may read.
    if type(error).__module__.startswith("obstore"):
        return one_line(error)
    words = re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1?…", str(error))
    return " ".join(words.split())[:300] or type(error).__name__
