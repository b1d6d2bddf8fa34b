"""An S3 server for tests, on loopback, and a proxy before it that fails like a store and a network do."""

import atexit
import contextlib
import functools
import http.client
import http.server
import io
import json
import math
import os
import pathlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.json
import pyarrow.parquet as pq
import xxhash

import jobs

BUCKET = "jobs"
_PIECE_BYTES = 1 << 13
NAMESPACE = "user"  # of Hugging Face: the proxy serves its buckets below this folder, as the hub's gateway does
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-of-the-key", "AWS_REGION": "us-east-1"}
# The share of these faults is the same. The last ones leave the request undone.
FAULTS = ("drop", "cut", "500 after", "slow", "500", "503", "409", "429")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@functools.cache
def server() -> int:
    """The port of the server, which ends with this process."""
    port = free_port()
    environment = {**os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(process.kill)
    deadline = time.monotonic() + 240
    while True:
        with contextlib.suppress(OSError):
            assert _ask(port, "PUT", f"/{BUCKET}") == 200
            return port
        assert time.monotonic() < deadline and process.poll() is None, "the S3 server does not start"
        time.sleep(0.1)


def make_bucket(name: str) -> None:
    assert _ask(server(), "PUT", f"/{name}") == 200


def _ask(port: int, method: str, path: str) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request(method, path)
        with connection.getresponse() as response:
            response.read()
            return response.status


class Proxy:
    """Forwards requests to the server, and fails some of them.

    fault: for the method and the path of a request, one of FAULTS, `absent`, `unconditional`, `delay` with seconds, or
    a status, perhaps with a code, such as `403` or `400 ExpiredToken`; "" for none. bytes_per_s: the speed of the link,
    which the contents of all requests share, and the contents of all answers.
    """

    def __init__(
        self, fault: Callable[[str, str], str] = lambda method, path: "", bytes_per_s: float = math.inf
    ) -> None:
        self.fault = fault
        self.bytes_per_s = bytes_per_s
        self._is_free_at = {"up": 0.0, "down": 0.0}
        self.seen: list[tuple[str, str]] = []
        self.num_bytes: Counter[str] = Counter()
        """Bytes of the answers, by the path of the object."""
        self.num_moved: Counter[str] = Counter()
        """Bytes that the link has moved, `up` to the store and `down`."""
        self.sent: list[tuple[str, int]] = []
        """Path and bytes of each content that arrived whole."""
        self.num_open = 0
        """Requests that are not answered yet."""
        self._counting = threading.Lock()
        self._port = server()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                with proxy._counted():
                    proxy._handle(self)

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = handle_any  # noqa: N815

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass  # a process that was killed closes its connections

        self._server = Server(("127.0.0.1", 0), Handler)
        if bytes_per_s < math.inf:  # otherwise the kernel takes megabytes at once
            self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """That of a process that uses the store."""
        return {"AWS_ENDPOINT_URL": self.url, **KEYS}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._counting:
            self.num_open += 1
        try:
            yield
        finally:
            with self._counting:
                self.num_open -= 1

    def _over_link(self, way: str, read: Callable[[int], bytes], num_bytes: int) -> Iterator[bytes]:
        """Pieces of a content, each when the link has moved it."""
        while num_bytes and (piece := read(min(num_bytes, _PIECE_BYTES))):
            num_bytes -= len(piece)
            with self._counting:
                self.num_moved[way] += len(piece)
                free_at = max(self._is_free_at[way], time.monotonic()) + len(piece) / self.bytes_per_s
                self._is_free_at[way] = free_at
            if self.bytes_per_s < math.inf:
                time.sleep(max(0.0, free_at - time.monotonic()))
            yield piece

    def _handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        num_bytes = int(request.headers.get("Content-Length") or 0)
        body = b"".join(self._over_link("up", request.rfile.read, num_bytes))
        if len(body) < num_bytes:
            request.close_connection = True
            return
        method = request.command
        path = request.path
        if body:
            self.sent.append((path, num_bytes))
        if path.startswith(f"/{NAMESPACE}/"):
            # Hugging Face's gateway answers a GET with the place of the content, on another host, which takes no key.
            path = path.removeprefix(f"/{NAMESPACE}")
            if method == "GET" and "list-type" not in path:
                place = f"http://localhost:{self._server.server_address[1]}{path}"
                _answer(request, 302, b"", {"Location": place})
                return
            assert "Authorization" in request.headers and not any("x-amz-meta" in name for name in request.headers)
        self.seen.append((method, path))
        fault = self.fault(method, path)
        if fault == "absent":
            request.close_connection = True
            return
        if fault == "slow":
            time.sleep(0.3)
        elif fault.startswith("delay "):
            time.sleep(float(fault.partition(" ")[2]))
        elif fault[:1].isdecimal() and fault != "500 after":
            status, _, code = fault.partition(" ")
            _answer(request, int(status), f"<Error><Code>{code or 'Injected'}</Code></Error>".encode())
            return
        headers = dict(request.headers.items())
        if fault == "unconditional":
            headers = {name: value for name, value in headers.items() if not name.lower().startswith("if-")}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                content = response.read()
        finally:
            connection.close()
        with self._counting:
            self.num_bytes[path.partition("?")[0]] += len(content)
        if fault == "drop" or (fault == "cut" and (not content or method == "HEAD")):
            request.close_connection = True
        elif fault == "cut":
            _answer(request, response.status, content, dict(response.getheaders()), num_sent=len(content) // 2)
            request.close_connection = True
        elif fault == "500 after":
            _answer(request, 500, b"<Error><Code>InternalError</Code></Error>")
        else:
            moved = self._over_link("down", io.BytesIO(content).read, len(content))
            _answer(request, response.status, content, dict(response.getheaders()), moved=moved)


def _answer(
    request: http.server.BaseHTTPRequestHandler,
    status: int,
    content: bytes,
    headers: dict[str, str] | None = None,
    *,
    num_sent: int | None = None,
    moved: Iterable[bytes] = (),
) -> None:
    """num_sent: so many bytes of the content are sent; None: all. moved: the content as a link moves it."""
    request.send_response_only(status)
    for name, value in (headers or {}).items():
        if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
            request.send_header(name, value)
    is_head = request.command == "HEAD"
    lengths = [value for name, value in (headers or {}).items() if name.lower() == "content-length"]
    length = "".join(lengths) or "0" if is_head else str(len(content))
    request.send_header("Content-Length", length)
    request.end_headers()
    if not is_head:
        for piece in moved or (content[:num_sent],):
            request.wfile.write(piece)


def often(share: float, seed: int = 0, faults: Sequence[str] = FAULTS) -> Callable[[str, str], str]:
    """Faults in this share of the requests."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def fault(method: str, path: str) -> str:
        with lock:
            return chance.choice(faults) if chance.random() < share else ""

    return fault


@contextlib.contextmanager
def proxy(fault: Callable[[str, str], str] = lambda method, path: "", bytes_per_s: float = math.inf) -> Iterator[Proxy]:
    made = Proxy(fault, bytes_per_s)
    try:
        yield made
    finally:
        made.close()


# -- what other readers see --------------------------------------------------------------------------------------------


def file_system() -> pyarrow.fs.S3FileSystem:
    return pyarrow.fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{server()}",
        scheme="http",
        access_key=KEYS["AWS_ACCESS_KEY_ID"],
        secret_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region=KEYS["AWS_REGION"],
    )


def names(url: str, folder: str = "") -> dict[str, int]:
    """Sizes of the objects in a folder, by name."""
    selector = pyarrow.fs.FileSelector(f"{url.removeprefix('s3://')}/{folder}", allow_not_found=True, recursive=True)
    return {info.base_name: info.size for info in file_system().get_file_info(selector) if info.is_file}


def lose_host(folder: pathlib.Path) -> None:
    """Take away what the host has of the jobs in a folder. Replicas of a killed run may still write for a moment."""
    (folder / "work").rename(folder / f"lost-{time.monotonic_ns()}")


def read(url: str, name: str) -> bytes:
    with file_system().open_input_stream(f"{url.removeprefix('s3://')}/{name}") as file:
        return bytes(file.read())


def put(url: str, data: bytes) -> None:
    """Write an object."""
    with file_system().open_output_stream(url.removeprefix("s3://"), compression=None) as file:
        file.write(data)


def prompts_with_pictures(*, is_swapped: bool = False) -> bytes:
    """The sample prompts as Parquet, with a column of 2 MB that no job reads. All values have one footer.

    is_swapped: the texts of two rows of the same length are exchanged.
    """
    table = pyarrow.json.read_json(jobs.prompts())
    texts = table.column("prompt").to_pylist()
    if is_swapped:
        first, second = next((i, j) for i in range(20) for j in range(i) if len(texts[i]) == len(texts[j]))
        texts[first], texts[second] = texts[second], texts[first]
    table = table.set_column(table.column_names.index("prompt"), "prompt", pa.array(texts))
    pictures = random.Random(1).randbytes(9000 * table.num_rows)
    column = pa.array([pictures[9000 * row : 9000 * (row + 1)] for row in range(table.num_rows)])
    buffer = io.BytesIO()
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table.append_column("picture", column), buffer, row_group_size=20, **plain)
    return buffer.getvalue()


def table(url: str) -> pa.Table:
    """All rows that a reader finds below `parts/`, in order."""
    found = ds.dataset(f"{url.removeprefix('s3://')}/parts", filesystem=file_system(), format="parquet").to_table()
    return found.sort_by([("row_index", "ascending")])


def rows(url: str) -> list[dict[str, Any]]:
    """All rows, without `attempts`, which depends on faults."""
    return table(url).drop_columns(["attempts"]).to_pylist()


@functools.cache
def _duckdb() -> Any:
    """A connection of DuckDB that reads the server."""
    import duckdb
    from fsspec.implementations.arrow import ArrowFSWrapper

    class Store(ArrowFSWrapper):  # type: ignore[misc]  # fsspec has no types
        protocol = "s3"

    connection = duckdb.connect()
    connection.register_filesystem(Store(file_system()))
    return connection


def rows_by_duckdb(url: str) -> list[dict[str, Any]]:
    """What DuckDB reads by a pattern of the parts' names, in order; without `attempts`, which depends on faults."""
    query = f"select * exclude (attempts) from read_parquet('{url}/parts/*.parquet') order by row_index"
    found: list[dict[str, Any]] = _duckdb().sql(query).to_arrow_table().to_pylist()
    return found


def lines(url: str) -> list[dict[str, Any]]:
    """The lines of all commits, by plain JSON."""
    found = []
    for name in sorted(name for name in names(url, "commits") if name.isdecimal()):
        found += [json.loads(line) for line in read(url, f"commits/{name}").splitlines()]
    return found


def events(url: str, name: str) -> list[dict[str, Any]]:
    """The events of one name."""
    found = [json.loads(line) for line in read(url, "events.jsonl").splitlines()]
    return [event for event in found if event["name"] == name]


def num_journalled(url: str) -> int:
    """Results in the bucket's journal of shards without a part, by the headers of the segments."""
    num_results = 0
    parts = names(url, "parts")
    begun: dict[str, int] = {}
    for name in sorted(names(url, "journal")):
        try:
            sizes, _, data = read(url, f"journal/{name}").partition(b"\n")
        except FileNotFoundError:  # its shards have become parts meanwhile
            continue
        for segment, size, *place in json.loads(sizes):
            first, num_bytes = place or (0, size)
            if first == 0:
                begun[segment] = struct.unpack_from("<8sIIQQ", data)[4]
            is_whole = first + size == num_bytes
            if is_whole and f"part-{segment.partition('-')[0]}.parquet" not in parts:
                num_results += begun[segment]
            data = data[size:]
    return num_results


def committed(url: str) -> set[str]:
    """The names of the parts that the commits name."""
    return {*commits_of_parts(url)}


def commits_of_parts(url: str) -> dict[str, dict[str, Any]]:
    """The last committed line of each part, by the name of the part."""
    return {f"part-{line['shard']:06d}.parquet": line for line in lines(url) if line["kind"] == "part"}


def digests(url: str) -> dict[str, str]:
    """The digests of all parts that are there, by name, as commits have them."""
    return {name: xxhash.xxh3_128_hexdigest(read(url, f"parts/{name}")) for name in names(url, "parts")}


def spec_of(folder: pathlib.Path, url: str, **sections: Any) -> pathlib.Path:
    """A spec of a job whose output is at the URL. Its work folder is beside the spec."""
    output = {"path": url, "work_dir": str(folder / "work"), **sections.pop("output", {})}
    return jobs.spec_of(folder, output=output, **sections)
