"""Images of URLs on disk: a run and its resumes fetch none of them twice. `downloads.py` uses it."""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable

from batchinf.base.errors import OutputError
from batchinf.base.storage import Folder

IMAGES_FOLDER = "images"  # in the output folder, until the job is done
_DIGEST_BYTES = hashlib.sha256().digest_size
_SHARE = 16  # of the limit, after which a process looks at the whole folder again


class UrlCache:
    """About the last `max_bytes` of images that were used, by URL. Threads and processes may share a folder."""

    def __init__(self, folder: Folder, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_new_bytes = 0
        self._has_warned = False

    def get(self, url: str) -> bytes | None:
        """The bytes of an image; None if they are not here or damaged."""
        try:
            stored = self._folder.read(_name(url))
            os.utime(self._folder.path(_name(url)))
        except OSError:
            return None
        data = stored[_DIGEST_BYTES:]
        return data if hashlib.sha256(data).digest() == stored[:_DIGEST_BYTES] else None

    def put(self, url: str, data: bytes) -> None:
        """Keep an image. On an error of the disk, the image is fetched again later. The first one is in the log."""
        if len(data) > self._max_bytes // _SHARE:
            return
        try:
            self._folder.make()
            self._folder.write_atomic(_name(url), hashlib.sha256(data).digest() + data, durable=False, fault="images")
        except (OSError, OutputError) as error:
            self._warn(error)
        with self._lock:
            self._num_new_bytes += len(data)
            if self._num_new_bytes > self._max_bytes // _SHARE:
                self._num_new_bytes = 0
                self._drop_oldest()

    def _warn(self, error: Exception) -> None:
        with self._lock:
            is_first = not self._has_warned
            self._has_warned = True
        if is_first:
            print(
                f"warning: an image of a URL cannot be kept in {self._folder.root}, so that a resume fetches it again: "
                f"{error}",
                file=sys.stderr,
                flush=True,
            )

    def _drop_oldest(self) -> None:
        entries: list[tuple[int, int, str]] = []
        with contextlib.suppress(OSError), os.scandir(self._folder.root) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry.name))
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, name in sorted(entries):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                self._folder.delete(name)
            excess -= size


def cached(cache: UrlCache | None, url: str, fetch: Callable[[], bytes]) -> bytes:
    """The bytes of an image, which are fetched and kept if the cache does not have them."""
    data = None if cache is None else cache.get(url)
    if data is None:
        data = fetch()
        if cache is not None:
            cache.put(url, data)
    return data


def _name(url: str) -> str:
    # A URL may have a secret, so the folder has no URLs.
    return hashlib.sha256(url.encode(errors="replace")).hexdigest()
