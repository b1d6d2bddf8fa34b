"""Fetches the images of `http:` and `https:` URLs for `media.py`, which imports this with the first such URL.

URLs come from rows, so hosts and addresses are checked before each connection: that of the URL and that of each
redirect. A host is resolved once for a connection, and the connection goes to an address that was checked.
"""

import asyncio
import contextlib
import email.utils
import random
import re
import time
import weakref
from collections import OrderedDict
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import aiohttp
from aiohttp import ClientResponse, ClientSession
from fsspec.asyn import get_loop
from yarl import URL

from batchinf.base.errors import RowFailed
from batchinf.base.paths import shown_url
from batchinf.base.text import clip, counted, one_line
from batchinf.prompts.url_cache import UrlCache, cached
from batchinf.spec.images import ImageSettings
from batchinf.version import __version__

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_ABSENT = (404, 410)
_MAY_PASS = (408, 425, 429)  # of the statuses below 500
_FIRST_PAUSE_S = 0.5
_CLOSE_S = 5.0
# Rows that name the same image run near each other, and a row that runs again needs its images again.
_KEPT_BYTES = 64 << 20
# No compression: a few bytes could become very many.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"batchinf/{__version__}"}
# Gateways between IPv6 and IPv4 (NAT64) have an IPv4 address in the last bits of these.
_NAT64 = IPv6Network("64:ff9b::/96")
_DEFAULT_PORTS = (80, 443)


class _Failure(Exception):
    """A request failed and may succeed later. wait_s: what the server asks for."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason if wait_s is None else f"{reason}, and asks to wait {wait_s:,.0f} s")
        self.wait_s = wait_s


class AllowedHosts:
    """The hosts of `input.images.hosts`."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        self._ports: dict[str, set[int]] = {}
        for entry in hosts:
            match = re.fullmatch(r"\[?(?P<host>.+?)\]?(:(?P<port>\d+))?", entry)
            assert match is not None
            ports = _DEFAULT_PORTS if match["port"] is None else (int(match["port"]),)
            self._ports.setdefault(match["host"], set()).update(ports)

    def has(self, host: str, port: int) -> bool:
        """Whether a URL may have this host and this port. Wildcards do not stand for a part of an address."""
        names = [host]
        if not _is_address(host):
            labels = host.split(".")
            names += [f"*.{'.'.join(labels[start:])}" for start in range(1, len(labels))]
        return any(port in self._ports.get(name, ()) for name in names)

    def check(self, url: URL, name: str) -> None:
        """Raise RowFailed if a row may not name this URL. name: of the image, in messages."""
        if url.scheme not in ("http", "https") or url.host is None or url.port is None:
            raise RowFailed("image_forbidden", f"{name} leads to a URL that is neither http: nor https:")
        if url.user is not None or url.password is not None:
            raise RowFailed("image_forbidden", f"{name} has a user name or a password, which are not sent")
        host = url.raw_host or ""
        if not self.has(host, url.port):
            shown = f"[{host}]" if ":" in host else clip(host)
            shown += "" if url.is_default_port() else f":{url.port}"
            raise RowFailed("image_forbidden", f"{name} needs the host '{shown}', which is not in input.images.hosts; "
                             "add it there to allow it")  # fmt: skip

    def has_address(self, address: str, port: int) -> bool:
        """Whether a connection may go to this address, of an allowed host. Others than public ones must be named."""
        return _is_public(ip_address(address)) or self.has(address, port)


def check_url(url: str, hosts: AllowedHosts) -> None:
    """Raise RowFailed if a row may not name this URL."""
    name = f"'{clip(shown_url(url), 200)}'"
    try:
        hosts.check(URL(url), name)
    except ValueError:
        raise RowFailed("image_not_found", f"{name} is no valid URL") from None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether the address is one of the public internet, as is the IPv4 address within it."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return _is_public(IPv4Address(int(address) & 0xFFFFFFFF))
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if embedded:
            return _is_public(embedded)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


class _CheckedResolver(aiohttp.ThreadedResolver):
    """Resolves hosts, and refuses one if any of its addresses is neither public nor allowed."""

    def __init__(self, hosts: AllowedHosts) -> None:
        super().__init__()
        self._hosts = hosts

    async def resolve(self, host: str, port: int = 0, *arguments: Any, **options: Any) -> Any:
        """See aiohttp."""
        resolved = await super().resolve(host, port, *arguments, **options)
        for each in resolved:
            if not self._hosts.has_address(each["host"], port):
                raise RowFailed("image_forbidden", f"the host '{clip(host)}' of an image has the address "
                                 f"{each['host']}, which is not public; to allow it, name the address too in "
                                 "input.images.hosts")  # fmt: skip
        return resolved


class Downloads:
    """Fetches images. Threads may share it; the requests run on the thread of fsspec's event loop."""

    def __init__(self, settings: ImageSettings, cache: UrlCache | None = None) -> None:
        self._settings = settings
        self._cache = cache
        self._hosts = AllowedHosts(settings.hosts)
        self._loop = get_loop()
        # The rest is used on the thread of the loop alone.
        self._session: ClientSession | None = None
        self._running: dict[str, asyncio.Task[bytes]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._num_kept_bytes = 0

    def fetch(self, url: str) -> bytes:
        """The bytes of an image. What is in the cache is not fetched. Raises RowFailed."""
        check_url(url, self._hosts)  # before the cache: an earlier run may have allowed more hosts
        try:
            return cached(
                self._cache, url, lambda: asyncio.run_coroutine_threadsafe(self._fetch_once(url), self._loop).result()
            )
        except RowFailed as failed:  # rows that wait for the same download get the same exception
            raise RowFailed(failed.error.error_type, failed.error.error_message) from None

    async def _fetch_once(self, url: str) -> bytes:
        if url in self._kept:
            self._kept.move_to_end(url)
            return self._kept[url]
        task = self._running.get(url)
        if task is None:
            task = self._running[url] = asyncio.ensure_future(self._fetch(url))
            task.add_done_callback(lambda _: self._running.pop(url))
        data = await task
        self._keep(url, data)
        return data

    def _keep(self, url: str, data: bytes) -> None:
        if url not in self._kept:
            self._kept[url] = data
            self._num_kept_bytes += len(data)
        while self._num_kept_bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= len(oldest)

    async def _fetch(self, url: str) -> bytes:
        name = f"'{clip(shown_url(url), 200)}'"
        timeout_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._with_retries(URL(url), name)
        except TimeoutError:
            raise RowFailed("image_timeout", f"{name} was not fetched in {timeout_s:g} s (input.images.timeout_s)"
                             ) from None  # fmt: skip

    async def _with_retries(self, url: URL, name: str) -> bytes:
        end = time.monotonic() + self._settings.timeout_s
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return await self._follow(url, name)
            except _Failure as failure:
                pause_s = failure.wait_s
                if pause_s is None:
                    pause_s = _FIRST_PAUSE_S * 2 ** (num_tries - 1) * random.uniform(0.5, 1)
                if num_tries > self._settings.retries or time.monotonic() + pause_s > end:
                    raise RowFailed("image_unavailable", f"{name} was not fetched in {counted(num_tries, 'request')}: "
                                     f"{failure}") from failure  # fmt: skip
            await asyncio.sleep(pause_s)

    async def _follow(self, url: URL, name: str) -> bytes:
        """The bytes of an image, after redirects. Raises RowFailed, and _Failure if a retry may help."""
        session = self._session or self._new_session()
        for _ in range(_MAX_REDIRECTS + 1):
            self._hosts.check(url, name)
            try:
                async with session.get(url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        _check_status(response, name)
                        return await self._body(response, name)
                    url = url.join(URL(response.headers.get("Location", "")))
            except aiohttp.ClientSSLError as error:
                raise RowFailed("image_unavailable", f"{name} was not fetched: {_reason(error)}") from error
            except TimeoutError:
                raise
            except (aiohttp.ClientError, OSError) as error:
                raise _Failure(_reason(error)) from error
            except ValueError:
                raise RowFailed("image_unavailable", f"{name} leads to an invalid URL") from None
        raise RowFailed("image_unavailable", f"{name} has more than {_MAX_REDIRECTS} redirects")

    def _new_session(self) -> ClientSession:
        self._session = ClientSession(
            connector=aiohttp.TCPConnector(resolver=_CheckedResolver(self._hosts), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        weakref.finalize(self, _close, self._session, self._loop)
        return self._session

    async def _body(self, response: ClientResponse, name: str) -> bytes:
        self._check_size(response.content_length or 0, name)
        data = bytearray()
        async for block in response.content.iter_any():
            data += block
            self._check_size(len(data), name)
        return bytes(data)

    def _check_size(self, num_bytes: int, name: str) -> None:
        most = self._settings.max_bytes
        if num_bytes > most:
            raise RowFailed("image_too_large", f"{name} has at least {num_bytes:,} bytes, and input.images.max_bytes "
                             f"allows {most:,}")  # fmt: skip


def _close(session: ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no thread of a loop, which must not wait for itself
        with contextlib.suppress(TimeoutError):
            closing.result(_CLOSE_S)


def _check_status(response: ClientResponse, name: str) -> None:
    status = response.status
    if status in _ABSENT:
        raise RowFailed("image_not_found", f"{name} does not exist: the server answered with status {status}")
    if status >= 500 or status in _MAY_PASS:
        raise _Failure(f"the server answered with status {status}", _wait_s(response.headers.get("Retry-After")))
    if status != 200:
        raise RowFailed("image_unavailable", f"{name} was not fetched: the server answered with status {status}")


def _wait_s(retry_after: str | None) -> float | None:
    """The seconds that a header `Retry-After` asks for: a number, or a time. None without a valid one."""
    if retry_after is None:
        return None
    if re.fullmatch("[0-9]{1,9}", retry_after):
        return float(retry_after)
    try:
        moment = email.utils.parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - time.time())


def _reason(error: Exception) -> str:
    """What went wrong, without the queries of URLs."""
    match error:
        case aiohttp.ClientPayloadError():
            return "the connection ended before the image was complete"
        case aiohttp.ClientResponseError():
            return "the server's answer is not valid HTTP"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection"
        case aiohttp.ClientConnectorError():  # with a host and no path
            return clip(one_line(str(error), 200), 200)
    return type(error).__name__
