"""A server of pictures that stalls, drips, lies and leads elsewhere, over HTTP or TLS."""

import contextlib
import hashlib
import io
import pathlib
import ssl
import subprocess
import threading
import urllib.parse
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image


def noise(size: int = 64) -> Image.Image:
    return Image.frombytes("RGB", (size, size), hashlib.shake_128(b"noise").digest(3 * size * size))


def _encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


PICTURE = _encoded(noise())


class Server(ThreadingHTTPServer):
    """A server of images. What it does is the first word of the path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str = "127.0.0.1", port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__((address, port), Answer)
        if tls is not None:  # each request's thread does its handshake
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.scheme = "http" if tls is None else "https"
        self.pictures: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.is_over = threading.Event()

    @property
    def host(self) -> str:
        return f"{self.server_address[0]!s}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}"

    def handle_error(self, *arguments: object) -> None:
        """Clients close the connection while bytes are sent."""


class Answer(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = urllib.parse.urlsplit(self.path).path
        word, _, rest = path.strip("/").partition("/")
        getattr(self, word)(urllib.parse.unquote(rest))

    def give(self, data: bytes, num_bytes: int | None = None, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if num_bytes is None else num_bytes))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = num_bytes is not None

    def image(self, rest: str) -> None:
        self.give(self.server.pictures.get(rest, PICTURE))

    def status(self, rest: str) -> None:
        self.give(b"", status=int(rest), Retry_After="0")

    def busy(self, rest: str) -> None:
        """Busy twice, and then an image."""
        if self.server.asked.count(self.path) > 2:
            self.give(PICTURE)
        else:
            self.give(b"", status=int(rest), Retry_After="0")

    def wait(self, rest: str) -> None:
        self.give(b"", status=503, Retry_After=rest)

    def to(self, rest: str) -> None:
        self.give(b"", status=302, Location=rest)

    def stall(self, rest: str) -> None:
        self.server.is_over.wait()

    def drip(self, rest: str) -> None:
        """A byte in a tenth of a second, after the headers or in place of them."""
        if rest == "body":
            self.give(b"", len(PICTURE))
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not self.server.is_over.wait(0.1):
            self.wfile.write(b"x")

    def cut(self, rest: str) -> None:
        self.give(PICTURE[:99], len(PICTURE))

    def long(self, rest: str) -> None:
        self.give(b"", 10**15)

    def short(self, rest: str) -> None:
        self.give(PICTURE[:99])

    def more(self, rest: str) -> None:
        """More bytes than the headers say."""
        self.give(PICTURE, 99)

    def endless(self, rest: str) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.is_over.is_set():
            self.wfile.write(bytes(1 << 16))

    def garbage(self, rest: str) -> None:
        self.wfile.write(b"SSH-2.0-SECRET\r\n")
        self.close_connection = True

    def compressed(self, rest: str) -> None:
        self.give(zlib.compress(bytes(64 << 20)), Content_Encoding="deflate")


@contextlib.contextmanager
def serving(*address: Any, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    with Server(*address, tls=tls) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()


def certificates(folder: pathlib.Path) -> tuple[ssl.SSLContext, pathlib.Path]:
    """TLS for a server on 127.0.0.1, and the file with the authority that signed its certificate."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=An authority for a test")
    openssl("req", "-x509", *new, "-keyout", "own.key", "-out", "own.pem", "-subj", "/CN=127.0.0.1", "-CA", "ca.pem",
            "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem", folder / "own.key")
    return context, folder / "ca.pem"
