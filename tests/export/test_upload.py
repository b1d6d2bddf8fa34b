"""Exports to a bucket and to a URL by PUT: whole, or not there."""

import http.server
import json
import pathlib
import threading
import uuid
from collections.abc import Iterator

import pytest
import stores

import jobs
from batchinf.base.errors import OutputError, UserError
from batchinf.commands.export import Exported, ExportRequest, export_job
from batchinf.commands.run_batch import batch_run, write_answers
from batchinf.export import files

pytestmark = pytest.mark.usefixtures("store_of_this_process")

NUM_ROWS = 24


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("job")
    rows = [{"id": f"r{n}", "prompt": "a" if n else ""} for n in range(NUM_ROWS)]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = jobs.spec_of(
        folder,
        input={"path": str(folder / "in.jsonl")},
        output={"keep_columns": []},
        scripted={"step_s": 0.0},
        max_error_rate=1.0,
    )
    jobs.finish(spec)
    return folder / "out"


def exported(out: pathlib.Path, path: pathlib.Path | str, **options: object) -> Exported:
    return export_job(str(out), ExportRequest(path=str(path), **options))  # type: ignore[arg-type]


# -- buckets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> str:
    return f"s3://{stores.BUCKET}/{uuid.uuid4().hex[:12]}"


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "openai-batch"])
def test_an_object_has_the_bytes_of_the_file(
    form: str, out: pathlib.Path, tmp_path: pathlib.Path, folder: str, store: stores.Proxy
) -> None:
    exported(out, tmp_path / "rows.x", to=form)
    done = exported(out, f"{folder}/rows.x", to=form)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(done.files) == [f"{folder}/{name}" for name in written]
    assert [*stores.names(folder)] == written
    for name in written:
        assert stores.read(folder, name) == (tmp_path / name).read_bytes()


def test_several_objects_and_one_that_is_there(out: pathlib.Path, folder: str, store: stores.Proxy) -> None:
    store.fault = stores.often(0.2, seed=3, faults=("500", "503", "drop"))
    exported(out, f"{folder}/rows.jsonl", num_files=3)
    names = [f"rows-{number:05}-of-00003.jsonl" for number in range(3)]
    assert sorted(stores.names(folder)) == names
    lines = b"".join(stores.read(folder, name) for name in names).splitlines()
    assert [json.loads(line)["row_index"] for line in lines] == [*range(NUM_ROWS)]
    with pytest.raises(UserError, match=r"^-o: s3://.*rows-00000-of-00003\.jsonl is there already; "):
        exported(out, f"{folder}/rows.jsonl", num_files=3)
    exported(out, f"{folder}/rows.jsonl", num_files=3, overwrites=True, columns=("id",))
    assert stores.read(folder, names[0]).startswith(b'{"id":"r0"}\n')


def test_a_large_object_goes_in_parts(
    tmp_path: pathlib.Path, folder: str, store: stores.Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (90 << 10)  # 22.5 MiB
    with files.Files(overwrites=False) as made:
        made.open(f"{folder}/large").write(data)
    assert stores.read(folder, "large") == data
    assert sum(method == "PUT" and "partNumber" in path for method, path in store.seen) == 3


def test_after_a_failure_no_object_is_there(out: pathlib.Path, folder: str, store: stores.Proxy) -> None:
    def fault(method: str, path: str) -> str:
        return "403" if method == "PUT" and "errors" not in path else ""

    store.fault = fault
    with pytest.raises(OutputError, match="check that the key is right"):
        exported(out, f"{folder}/rows.jsonl", to="openai-batch")
    assert stores.names(folder) == {}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("s3://jobs/rows.jsonl", "the file is in a folder of the bucket"),
        ("s3://key@jobs/a/rows.jsonl", "with a key, a query or a fragment in it"),
        ("s3://jobs/a/", "which names no file"),
        ("ssh://host/rows.jsonl", "give a path here, or the URL of a bucket or of a server that takes PUT"),
        ("https://host/", "which names no file"),
    ],
)
def test_places_that_take_no_file(path: str, words: str, out: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^-o: got ") as raised:
        exported(out, path, to="jsonl")
    assert words in str(raised.value)


def test_what_a_url_cannot_hold(out: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"^--files: got several for a URL"):
        exported(out, "https://host/rows.jsonl", num_files=2)
    for path in ("https://host/rows", "s3://jobs/a/rows"):
        with pytest.raises(UserError, match=r"^-o: got a URL, but a dataset is a folder here"):
            exported(out, path, to="hf")


# -- PUT ---------------------------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """A web server that keeps what it gets by PUT. The first requests fail with the statuses in `fails`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fails: list[int] = []
        self.num_requests = 0
        self.kept: dict[str, bytes] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_requests += 1
        status = self.server.fails.pop(0) if self.server.fails else 201
        if status == 201:
            self.server.kept[self.path] = data
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(files, "_PAUSE_S", 0.01)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_file_is_sent_by_put(out: pathlib.Path, tmp_path: pathlib.Path, web: Server) -> None:
    exported(out, tmp_path / "rows.jsonl")
    web.fails = [500, 503, 429]
    done = exported(out, f"{web.url}/a/rows.jsonl?signature=secret")
    assert web.kept == {"/a/rows.jsonl?signature=secret": (tmp_path / "rows.jsonl").read_bytes()}
    assert done.files == (f"{web.url}/a/rows.jsonl",)


@pytest.mark.parametrize(("fails", "num_requests"), [([403], 1), ([500] * 5, 5)])
def test_a_server_that_does_not_take_it(fails: list[int], num_requests: int, out: pathlib.Path, web: Server) -> None:
    web.fails = [*fails]
    with pytest.raises(OutputError, match=r"/rows\.jsonl: the file could not be sent by PUT: HTTP Error ") as raised:
        exported(out, f"{web.url}/rows.jsonl?signature=secret")
    assert "secret" not in str(raised.value)
    assert (web.kept, web.num_requests) == ({}, num_requests)


def test_the_answers_of_run_batch_go_to_a_url(tmp_path: pathlib.Path, web: Server) -> None:
    bodies = [{"prompt": "a", "max_tokens": 3}, {"prompt": []}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    target = f"{web.url}/answers.jsonl?key=a"
    assert batch_run("in.jsonl", target, str(jobs.MODEL), []).folder == "answers.job"
    run = batch_run(str(tmp_path / "in.jsonl"), target, str(jobs.MODEL), [], folder=str(tmp_path / "answers.job"))
    (tmp_path / "job.json").write_text(json.dumps({**run.spec, "scripted": {"step_s": 0.0}}))
    jobs.finish(tmp_path / "job.json")
    write_answers(run, has_rows=True)
    [kept] = web.kept.values()
    assert [json.loads(line)["custom_id"] for line in kept.splitlines()] == ["0", "1"]
    write_answers(run, has_rows=False)
    assert [*web.kept.values()] == [b""]
