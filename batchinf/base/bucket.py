"""The only access to an object store: a prefix of a bucket, such as `s3://bucket/job`, as a place of named objects.

obstore does the requests. It is imported when a bucket is opened, and only in processes that never fork afterwards: a
forked child of a process that has used it hangs. Every request runs on a thread of its own, because Ctrl-C does not end
one.

A slow link is no failure. The last large request that was sent gives the speed of the link, and with it the time that a
request of so many bytes may take. An answer may take any time, as long as bytes arrive.

No answer to a conditional request is believed. If the connection ends after the store has applied it, the repeated
request meets its own object. Some stores also answer "conflict" when nothing was stored. So after any error the object
is read: the same bytes are ours, an absent object means to try again, and other bytes are those of another process.
"""

import contextlib
import functools
import importlib.util
import math
import mmap
import os
import pathlib
import random
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import xxhash

from batchinf.base.errors import OutputError
from batchinf.base.paths import bucket_and_prefix
from batchinf.base.process import on_thread
from batchinf.base.storage import create
from batchinf.base.store_errors import NO_BUCKET, is_refused, no_credentials, one_line, remedy

NEEDS_OBSTORE = "a bucket needs the package obstore: install it with pip install 'batchinf[buckets]'"
PATIENCE_S = 60.0
"""How long a request is tried again, unless the caller says otherwise."""
MOST_BYTES = 5 << 30  # of one request with a condition
_SILENCE_S = 20  # how long a store may be silent
_LONG_S = 3600
_LONGEST_S = 7 * 86_400  # 5 GiB at 10 kB/s; what ends a request is its silence, or its own limit
_LOOK_S = 0.2
_MEASURED_BYTES = 256 << 10  # a smaller request says more about the store's delay than about the link
_FIRST_BYTES_PER_S = 64 << 10  # a guess, until a request has been measured
_SLOWEST_BYTES_PER_S = 4 << 10  # a slower request has failed
_SLACK = 8  # other requests share the link: four parts, a bundle of the journal and a heartbeat
_READ_BYTES = 4 << 20
_NUM_AT_ONCE = 16
_TIDY_PATIENCE_S = 5.0
_BEHIND = re.compile("InvalidRange|status code: 416")
_PART_BYTES = 8 << 20
_MOST_PARTS = 9000  # S3 takes 10,000
_NUM_PARTS_AT_ONCE = 4
_T = TypeVar("_T")


class StoreError(OutputError):
    """The store has refused a request, or has not answered for long."""


@dataclass(frozen=True, slots=True)
class Object:
    """An object that was read."""

    data: bytes
    etag: str


class ObjectTooLargeError(Exception):
    """An object has more bytes than the caller takes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes:,} bytes")
        self.num_bytes = num_bytes


class _AgainError(Exception):
    """Nothing is stored: the request is to be tried again."""


class _TooSlowError(Exception):
    """A request was given up. No TimeoutError: that of a future says that it is not done."""


class Bucket:
    """The objects below one URL. Threads may share it. Methods raise StoreError."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        """patience_s: how long a request is tried again until the store answers."""
        self.url = url.rstrip("/")
        # Google's conditions take the generation of an object, which obstore calls its version.
        self._etag_key = "version" if self.url.startswith("gs:") else "e_tag"
        self._obstore = _import_obstore()
        # obstore counts the time of a request's content as silence: so contents are sent by the other store.
        self._reads = _store(self.url, _LONGEST_S, silence_s=_SILENCE_S)
        self._writes = _store(self.url, _LONGEST_S)
        self.bytes_per_s: float | None = None
        """How fast the last large request was sent, beside others; None before the first."""
        self.patience_s = patience_s
        self.is_stopped: Callable[[], bool] = lambda: False
        """Asked while a request is waited for; it then ends as if the patience were over."""
        self.failing_since: float | None = None
        """Monotonic, in seconds; None while the store answers. Only requests of small objects end it: the others wait
        for long, so they may succeed on a store that is too slow for a heartbeat."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called after an attempt has failed, in the thread that waits."""
        self.failure = ""

    def at(self, name: str) -> "Bucket":
        """The objects below `name`."""
        return Bucket(f"{self.url}/{name}", self.patience_s)

    def _limit_s(self, num_bytes: int) -> float:
        """How long a request with so many bytes may take."""
        return _SILENCE_S + num_bytes / max(_SLOWEST_BYTES_PER_S, (self.bytes_per_s or 0.0) / _SLACK)

    def bytes_in(self, seconds: float) -> int:
        """The bytes that the link takes in this time; a guess until a large request was sent."""
        return int((self.bytes_per_s or _FIRST_BYTES_PER_S) * seconds)

    # -- small objects -------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Object | None:
        """An object; None if it is absent."""
        return self._try(lambda: self._read(name), name)

    def read_once(self, name: str, *, most_bytes: int, timeout_s: float) -> bytes:
        """The bytes of an object, by one request.

        Raises FileNotFoundError, PermissionError, ObjectTooLargeError and TimeoutError, each with a message of one line
        without the object's name, and StoreError for a failure that may pass.
        """

        def attempt() -> bytes:
            found = self._obstore.get(self._reads, name)
            if found.meta["size"] > most_bytes:
                raise ObjectTooLargeError(found.meta["size"])
            return bytes(found.bytes())

        future = on_thread(attempt)
        try:
            return future.result(timeout_s)
        except NotYet:
            raise TimeoutError("the store has not answered") from None
        except ObjectTooLargeError:
            raise
        except FileNotFoundError as error:
            is_there = not NO_BUCKET.search(str(error))
            raise FileNotFoundError(
                "does not exist" if is_there else "does not exist: there is no such bucket"
            ) from None
        except Exception as error:
            if missing := no_credentials(error):
                raise PermissionError(missing) from None
            if is_refused(error):
                raise PermissionError(f"the store refused it: {one_line(error)}") from None
            raise StoreError(one_line(error)) from None

    def get_range(self, name: str, first: int, stop: int) -> Object | None:
        """The bytes `first` to `stop` of an object, with its ETag; None if it is absent or shorter than `first`."""

        def attempt() -> Object | None:
            with _passing_over_absent(may_be_shorter=True):
                found = self._obstore.get(self._reads, name, options={"range": (first, stop)})
                return Object(bytes(found.bytes()), str(found.meta["e_tag"]))
            return None

        return self._try(attempt, name, is_large=True)

    def get_ranges(self, name: str, ranges: Iterable[tuple[int, int]]) -> Iterator[Object | None]:
        """Several ranges of one object, all at a time; see `get_range`."""
        begun = [on_thread(functools.partial(self.get_range, name, first, stop)) for first, stop in ranges]
        yield from (future.result() for future in begun)

    def get_all(self, names: Iterable[str]) -> Iterator[Object | None]:
        """Objects in the order of `names`, several at a time."""
        return together(functools.partial(self.get, name) for name in names)

    def put(self, name: str, data: bytes, patience_s: float | None = None) -> None:
        """Write an object; the last writer wins."""
        self._try(lambda: self._put(name, data), name, patience_s)

    def put_new(self, name: str, data: bytes, is_needed: Callable[[], bool] = lambda: True) -> Object:
        """Create an object. Returns the one that is there now: with these bytes, or that of another process.

        is_needed: asked before each further attempt.
        """

        def attempt() -> Object:
            try:
                return Object(data, self._etag_of(self._put(name, data, "create")))
            except Exception as error:
                return self._read_after(name, error)

        return self._try(attempt, name, is_needed=is_needed)

    def put_if(self, name: str, data: bytes, etag: str, patience_s: float | None = None) -> str | None:
        """Replace an object that still has this ETag. Returns the new one; None if another process has changed it."""

        def attempt() -> str | None:
            try:
                return self._etag_of(self._put(name, data, self._only_if(etag)))
            except Exception as error:
                if remedy(error):
                    raise
                there = self._read(name)
                if there is not None and there.data != data and there.etag == etag:
                    raise _AgainError from error
                return there.etag if there is not None and there.data == data else None

        return self._try(attempt, name, patience_s)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, several at a time; one that is absent is passed over."""
        deletions = ((functools.partial(self._delete, name), name) for name in names)
        deque(together(functools.partial(self._try, *deletion) for deletion in deletions), maxlen=0)

    def move(self, name: str, to: str) -> None:
        """Give an object another name. The store copies it; there are both names for a moment."""
        self._try(lambda: self._obstore.copy(self._writes, name, to), name, is_large=True)
        self.delete([name])

    def sizes(self, folder: str, after: str = "") -> dict[str, int]:
        """The bytes of each object in a folder by its name, sorted. after: only those whose names come later."""

        def attempt() -> dict[str, int]:
            pages = self._obstore.list(self._reads, prefix=folder)
            metas = [meta for page in pages for meta in page]
            # Some stores do not sort, and some do not know where to begin.
            sizes = {meta["path"].removeprefix(f"{folder}/"): meta["size"] for meta in metas}
            return {name: sizes[name] for name in sorted(sizes) if name > after}

        return self._try(attempt, f"{folder}/")

    def has(self, name: str) -> bool:
        """Whether the object is there."""

        def attempt() -> bool:
            with _passing_over_absent():
                self._obstore.head(self._reads, name)
                return True
            return False

        return self._try(attempt, name)

    # -- files ---------------------------------------------------------------------------------------------------------

    def upload(self, name: str, path: pathlib.Path, etag: str | None = None) -> str | None:
        """Create an object from a file, or replace the one with this ETag.

        None if it now has exactly the file's bytes; otherwise the ETag of the object of another process. The file is
        mapped into memory, so that it costs none. Tried again until the store answers.
        """
        if (num_bytes := path.stat().st_size) > MOST_BYTES:
            raise StoreError(f"{path} has {num_bytes:,} bytes, but {self.url} takes 5 GiB: set output.rows_per_shard")
        mode: Any = "create" if etag is None else self._only_if(etag)

        def attempt() -> str | None:
            with path.open("rb") as file:
                # Not closed: a request that was given up may still have it.
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            try:
                self._put(name, content, mode)
            except Exception as error:
                if remedy(error):
                    raise
                digest, there = self._digest(name, error)
                if digest == xxhash.xxh3_128_digest(content):
                    return None
                if there == etag:
                    raise _AgainError from error
                return there
            return None

        return self._try(attempt, name, is_large=True)

    def write(self, name: str, path: pathlib.Path) -> None:
        """Write an object from a file of any size, in parts; the last writer wins. It is there when it is whole."""
        part_bytes = max(_PART_BYTES, -(-path.stat().st_size // _MOST_PARTS))

        def attempt() -> None:
            self._obstore.put(self._writes, name, path, chunk_size=part_bytes, max_concurrency=_NUM_PARTS_AT_ONCE)

        self._try(attempt, name, is_large=True)

    def download(self, name: str, path: pathlib.Path) -> str | None:
        """Read an object into a new file; returns its ETag, or None if it is absent.

        Raises OSError if this host's disk does not take it.
        """

        def attempt() -> str | None:
            path.unlink(missing_ok=True)
            try:
                found = self._obstore.get(self._reads, name)
            except FileNotFoundError:
                return None
            try:
                with create(path) as file:
                    for piece in found.stream(min_chunk_size=_READ_BYTES):
                        file.write(piece)
            except OSError:
                with contextlib.suppress(OSError):
                    path.unlink()  # half of it would keep a full disk full
                raise
            return self._etag_of(found.meta)

        return self._try(attempt, name, is_large=True)

    # -- the store -----------------------------------------------------------------------------------------------------

    def probe(self) -> "Future[None]":
        """Raise StoreError unless the store can be written and keeps conditions.

        Three requests, and one to tidy up, which goes on: wait for it before the process ends.
        """
        name = f"probe-{uuid.uuid4().hex}"
        self.put_new(name, b"1")
        modes = ("create", self._only_if("1" if self._etag_key == "version" else '"0"'))
        tries = (functools.partial(self._is_refused, name, mode) for mode in modes)
        try:
            is_kept = all([*together(functools.partial(self._try, attempt, name) for attempt in tries)])
        finally:
            tidying = on_thread(functools.partial(self._delete_probe, name))
        if not is_kept:
            tidying.result()
            raise StoreError(
                f"{self.url}: this store ignores the conditions of requests (If-None-Match, If-Match), so two "
                "processes could write one job; give a bucket of a store that keeps them, or a folder"
            )
        return tidying

    def _delete_probe(self, name: str) -> None:
        with contextlib.suppress(StoreError):
            self._try(functools.partial(self._delete, name), name, _TIDY_PATIENCE_S)

    def _is_refused(self, name: str, mode: Any) -> bool:
        try:
            self._put(name, b"2", mode)
        except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
            return True
        return False

    def _etag_of(self, meta: Any) -> str:
        """That of an object that was read or written: what changes with its content."""
        return str(meta[self._etag_key])

    def _only_if(self, etag: str) -> Any:
        """The mode of a request that is only for the object with this ETag."""
        return {self._etag_key: etag}

    def _read(self, name: str) -> Object | None:
        with _passing_over_absent():
            found = self._obstore.get(self._reads, name)
            return Object(bytes(found.bytes()), self._etag_of(found.meta))
        return None

    def _read_after(self, name: str, error: Exception) -> Object:
        """What is there after a request that has failed."""
        if remedy(error):
            raise error
        if (there := self._read(name)) is None:
            raise _AgainError from error
        return there

    def _digest(self, name: str, error: Exception) -> tuple[bytes, str]:
        try:
            found = self._obstore.get(self._reads, name)
        except FileNotFoundError:
            raise _AgainError from error
        digest = xxhash.xxh3_128()
        for piece in found.stream(min_chunk_size=_READ_BYTES):
            digest.update(piece)
        return digest.digest(), self._etag_of(found.meta)

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._reads, name)

    def _put(self, name: str, data: "bytes | mmap.mmap", mode: Any = "overwrite") -> Any:
        """Send one object by one request, which is given up if it takes too long for its size, or at a stop."""
        import asyncio  # not for every command: it takes 20 ms

        async def put() -> Any:
            request = asyncio.ensure_future(self._obstore.put_async(self._writes, name, data, mode=mode))
            while not (await asyncio.wait({request}, timeout=_LOOK_S))[0]:
                if time.monotonic() > began + limit_s or self.is_stopped():
                    request.cancel()  # which closes its connection: a request that goes on would take the link
                    raise _TooSlowError(f"{len(data):,} bytes were not sent in {time.monotonic() - began:.0f} s")
            return await request

        limit_s = self._limit_s(len(data))
        began = time.monotonic()
        try:
            meta = asyncio.run(put())
        except _TooSlowError:
            if time.monotonic() > began + limit_s:
                self.bytes_per_s = min(self.bytes_per_s or math.inf, len(data) / limit_s) / 2
            raise
        if len(data) >= _MEASURED_BYTES:
            self.bytes_per_s = len(data) / (time.monotonic() - began)
        return meta

    def _try(
        self,
        attempt: Callable[[], _T],
        name: str,
        patience_s: float | None = None,
        *,
        is_large: bool = False,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> _T:
        """The result of `attempt`, which is tried again after an error until the patience is over."""
        patience_s = self.patience_s if patience_s is None else patience_s
        began = time.monotonic()
        pause_s = 0.05
        while True:
            try:
                result = self._wait(on_thread(attempt))
            except StoreError:
                raise
            except Exception as error:
                cause = error.__cause__ if isinstance(error, _AgainError) and error.__cause__ else error
                if isinstance(cause, OSError) and cause.filename is not None:
                    raise  # of this host's disk, which no store mends: obstore's errors name no file
                if what_to_do := remedy(cause):
                    raise StoreError(
                        f"{self.url}/{name}: {one_line(cause)}; {what_to_do}; then run the same command again"
                    ) from error
                self.failure = one_line(cause)
                self.failing_since = self.failing_since or time.monotonic()
                self.on_failure()
            else:
                if not is_large:
                    self.failing_since = None
                return result
            left_s = began + patience_s - time.monotonic()
            if self.is_stopped() or left_s <= 0 or not is_needed():
                raise StoreError(
                    f"{self.url}/{name}: the store has not taken a request for "
                    f"{time.monotonic() - began:.0f} s: {self.failure}; nothing is lost: run the same "
                    "command again when it answers"
                )
            time.sleep(min(random.random() * pause_s, left_s))  # the last attempt is when the patience is over
            pause_s = min(2 * pause_s, 5.0)

    def _wait(self, future: "Future[_T]") -> _T:
        while True:
            with contextlib.suppress(NotYet):
                return future.result(_LOOK_S)
            if not future.done() and self.is_stopped():
                raise _AgainError("no answer yet")


@contextlib.contextmanager
def _passing_over_absent(*, may_be_shorter: bool = False) -> Iterator[None]:
    """End the block if the object is absent. may_be_shorter: also if it has no bytes in the range that is asked for.

    An answer that was cut just before its end is asked for again from there, with the same error: it is tried again.
    """
    try:
        yield
    except Exception as error:
        is_absent = isinstance(error, FileNotFoundError) and not remedy(error)
        if not is_absent and not (may_be_shorter and _BEHIND.search(str(error))):
            raise


def together(calls: Iterable[Callable[[], _T]], at_once: int = _NUM_AT_ONCE) -> Iterator[_T]:
    """The results of calls that do not depend on each other, in their order. `at_once` of them run at a time."""
    waiting: deque[Future[_T]] = deque()
    for call in calls:
        if len(waiting) == at_once:
            yield waiting.popleft().result()
        waiting.append(on_thread(call))
    while waiting:
        yield waiting.popleft().result()


# -- obstore -----------------------------------------------------------------------------------------------------------


def _import_obstore() -> Any:
    try:
        import obstore
    except ImportError:
        raise StoreError(NEEDS_OBSTORE) from None
    return obstore


def _store(url: str, longest_s: int, silence_s: int | None = None) -> Any:
    import obstore.store as stores

    scheme, bucket, prefix = bucket_and_prefix(url)
    options = {**_options(longest_s, silence_s), "retry_config": {"max_retries": 0}, "prefix": prefix or None}
    match scheme:
        case "s3":
            return stores.S3Store(bucket, **options, **_s3_endpoint(), **_aws_credentials())
        case "hub":
            namespace, name = bucket.split("/")
            endpoint = f"{_hub_gateway()}/{namespace}"
            return stores.S3Store(name, endpoint=endpoint, region="us-east-1", **options, **_aws_credentials())
        case "gs":
            return stores.GCSStore(bucket, **options)
    return stores.AzureStore(bucket, **options)


def file_system(scheme: str) -> Any:
    """A file system of fsspec for reading `s3://`, `gs://` or `az://`, with the credentials of a `Bucket`."""
    _import_obstore()
    from obstore.fsspec import FsspecStore

    own = {"config": _s3_endpoint(), **_aws_credentials()} if scheme == "s3" else {}
    return FsspecStore(scheme, **_options(_LONG_S), **own)  # type: ignore[call-overload]


def _hub_gateway() -> str:
    return os.environ.get("BATCHINF_HF_GATEWAY", "https://s3.hf.co").rstrip("/")


def _options(longest_s: int, silence_s: int | None = None) -> dict[str, Any]:
    endpoint = _s3_endpoint().get("endpoint", "")
    client = {
        "timeout": timedelta(seconds=longest_s),
        "connect_timeout": timedelta(seconds=5),
        "allow_http": not endpoint.startswith("https:"),
    }
    if silence_s is not None:
        client["read_timeout"] = timedelta(seconds=silence_s)
    return {"client_options": client}


def _s3_endpoint() -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {"endpoint": endpoint} if endpoint else {}


def _aws_credentials() -> dict[str, Any]:
    """A provider that also knows profiles, which obstore does not read; none if the environment has the key."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    if any(os.environ.get(name) for name in names) or importlib.util.find_spec("boto3") is None:
        return {}
    import boto3  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    return {} if session.get_credentials() is None else {"credential_provider": Boto3CredentialProvider(session)}
