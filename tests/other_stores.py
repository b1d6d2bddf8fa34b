"""Stores other than S3 for tests: Azurite, Microsoft's own emulator of Azure Blob Storage, and a stub of Google's.

The stub is written from the documentation of Google's XML API. It is not proven to do what Google Cloud Storage does.
"""

import atexit
import base64
import contextlib
import functools
import hashlib
import hmac
import http.client
import http.server
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from email.utils import formatdate
from xml.sax.saxutils import escape

import stores

# -- Azure -------------------------------------------------------------------------------------------------------------

CONTAINER = "jobs"


def azurite_command() -> list[str] | None:
    """The command of Azurite: that on PATH, or that of the folder in which `npm i azurite` ran, as AZURITE says."""
    if (found := shutil.which("azurite-blob")) is not None:
        return [found]
    script = pathlib.Path(os.environ.get("AZURITE", "/"), "node_modules/azurite/dist/src/blob/main.js")
    node = shutil.which("node")
    return [node, str(script)] if node is not None and script.exists() else None


@functools.cache
def azurite() -> dict[str, str]:
    """The environment of a process that uses Azurite, which ends with this process."""
    command = azurite_command()
    assert command is not None
    port = stores.free_port()
    folder = tempfile.mkdtemp(prefix="azurite-")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder]
    process = subprocess.Popen(
        [*command, *options, "--silent", "--disableTelemetry", "--skipApiVersionCheck"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        assert time.monotonic() < deadline and process.poll() is None, "Azurite does not start"
        time.sleep(0.1)
    environment = {
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        # The public key of every emulator.
        "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2U"
        "VErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    }
    _make_container(environment)
    return environment


def _make_container(environment: dict[str, str]) -> None:
    """obstore makes no container, so this signs one request by hand: a PUT with `restype=container`."""
    account = environment["AZURE_STORAGE_ACCOUNT_NAME"]
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    resource = f"/{account}/{account}/{CONTAINER}\nrestype:container"
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{headers}{resource}"
    key = base64.b64decode(environment["AZURE_STORAGE_ACCOUNT_KEY"])
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    place = urllib.parse.urlsplit(environment["AZURITE_BLOB_STORAGE_URL"])
    assert place.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(
            "PUT",
            f"/{account}/{CONTAINER}?restype=container",
            headers={
                "x-ms-date": date,
                "x-ms-version": "2021-08-06",
                "Authorization": f"SharedKey {account}:{signature}",
                "Content-Length": "0",
            },
        )
        with connection.getresponse() as response:
            assert response.status == 201, response.read()


# -- Google, a stub ----------------------------------------------------------------------------------------------------


class _Stub(http.server.BaseHTTPRequestHandler):
    """PUT with x-goog-if-generation-match, GET, HEAD, DELETE, and a listing. One lock makes each request atomic."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, tuple[bytes, int]]
    """Content and generation, by bucket and name."""
    lock: threading.Lock
    generations: Iterator[int]

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.lock:
            _, generation = self.objects.get(self._name, (b"", 0))
            wanted = self.headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != generation:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            self.objects[self._name] = data, next(self.generations)
            self._answer(200, b"", self.objects[self._name])

    def do_GET(self) -> None:
        with self.lock:
            if "list-type" in self.path:
                self._answer(200, self._listing())
            elif (found := self.objects.get(self._name)) is None:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self._answer(200, found[0], found)

    do_HEAD = do_GET  # noqa: N815

    def do_DELETE(self) -> None:
        with self.lock:
            is_there = self.objects.pop(self._name, None) is not None
        self._answer(204 if is_there else 404, b"")

    @property
    def _name(self) -> str:
        return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.lstrip("/"))

    def _listing(self) -> bytes:
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        bucket = self._name.rstrip("/")
        prefix = f"{bucket}/{asked.get('prefix', [''])[0]}"
        found = sorted((name, data) for name, data in self.objects.items() if name.startswith(prefix))
        items = "".join(
            f"<Contents><Key>{escape(name.removeprefix(f'{bucket}/'))}</Key><Size>{len(data)}</Size>"
            f'<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"{generation}"</ETag></Contents>'
            for name, (data, generation) in found
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def _answer(self, status: int, content: bytes, found: tuple[bytes, int] | None = None) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        size = len(content)
        if asked is not None and status == 200:
            first = int(asked[1])
            content = content[first : int(asked[2] or size) + 1]
            self.send_response_only(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        else:
            self.send_response_only(status)
        if found is not None:
            self.send_header("ETag", f'"{hashlib.md5(found[0]).hexdigest()}"')
            self.send_header("x-goog-generation", str(found[1]))
            self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@functools.cache
def google_stub() -> dict[str, str]:
    """The environment of a process that uses the stub."""
    own = {"objects": {}, "lock": threading.Lock(), "generations": itertools.count(1_000_000)}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Stub,), own))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)}
