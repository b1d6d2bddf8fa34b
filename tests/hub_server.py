"""A replacement for the Hugging Face hub on 127.0.0.1: models are found and fetched, datasets pushed and read."""

import base64
import contextlib
import hashlib
import io
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest

TOKEN = "hf_AbCdEfToken"


def as_parquet(lines: pathlib.Path) -> bytes:
    """The rows of a file of JSON lines as a Parquet file."""
    file = io.BytesIO()
    pq.write_table(pyarrow.json.read_json(lines), file)
    return file.getvalue()


class Hub(ThreadingHTTPServer):
    """The hub's answers about models, and about datasets, whose ids are here `datasets/USER/NAME`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.clear()

    def clear(self) -> None:
        """Forget all, as a new hub."""
        self.refs: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}
        self.gated_files: set[str] = set()
        self.asked: list[str] = []
        self.visibility: dict[str, str] = {}
        self.uploads: dict[str, bytes] = {}
        self.delay_s = 0.0
        self.read_only: set[str] = set()
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        """For the method and the path of a request: a status such as `500`, `cut`, `cut after`, or "" for none."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add_dataset(self, name: str, files: Mapping[str, bytes], visibility: str = "private") -> None:
        """Add a dataset with these files, or replace one."""
        commit = f"{len(self.commits) + 1:040x}"
        self.refs[f"datasets/{name}"] = {"main": commit}
        self.commits[commit] = {".gitattributes": b"", **files}
        self.visibility[f"datasets/{name}"] = visibility

    def environment(self, folder: pathlib.Path) -> dict[str, str]:
        """That of a process that uses this hub, with its cache in a folder."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hf"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
        }

    def files(self, name: str) -> dict[str, bytes]:
        """The files of a dataset."""
        return self.commits[self.refs[f"datasets/{name}"]["main"]]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a dataset, without `attempts`, which depends on faults."""
        files = [io.BytesIO(data) for path, data in sorted(self.files(name).items()) if path.startswith("data/")]
        return pa.concat_tables(map(pq.read_table, files)).drop_columns(["attempts"]).to_pylist()

    def handle_error(self, *arguments: object) -> None:
        """Ignore errors: clients close the connection after the headers."""


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def handle_one(self, answer: Callable[[str], None]) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        time.sleep(self.server.delay_s)
        fault = self.server.fault(self.command, path)
        if fault.isdecimal():
            self.send(int(fault), {})
        elif fault == "cut after":
            self.wfile = io.BytesIO()
            answer(path)
        elif fault != "cut":
            answer(path)

    def do_GET(self) -> None:
        self.handle_one(self.answer_get)

    def do_POST(self) -> None:
        self.handle_one(self.answer_post)

    def do_PUT(self) -> None:
        self.handle_one(self.answer_put)

    def answer_get(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        elif parts[:2] == ["api", "datasets"]:
            self.describe("/".join(parts[1:4]), parts[4:])
        elif parts[0] == "api":
            self.send(404, {})
        elif parts[0] == "datasets":
            self.give("/".join(parts[:3]), parts[4], "/".join(parts[5:]))
        else:
            self.give("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_HEAD = do_GET  # noqa: N815

    def answer_post(self, path: str) -> None:
        parts = path.strip("/").split("/")
        body = self.body()
        if "/paths-info/" in path:
            self.describe_paths("/".join(parts[1:4]), parts[5], body)
        elif "Authorization" not in self.headers:
            self.send(401, {})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"datasets/{asked['organization']}/{asked['name']}"
            if name in self.server.refusals:
                self.send(*self.server.refusals[name])
            elif name in self.server.refs:
                self.send_json({"url": f"{self.server.url}/{name}"}, status=409)
            else:
                self.server.refs[name] = {"main": "0" * 40}
                self.server.commits["0" * 40] = {".gitattributes": b""}
                self.server.visibility[name] = asked["visibility"]
                self.send_json({"url": f"{self.server.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".parquet", ".png")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.send_json({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**thing, "actions": {"upload": {"href": f"{self.server.url}/lfs/{thing['oid']}"}}}
                for thing in json.loads(body)["objects"]
            ]
            self.send_json({"transfer": "basic", "objects": objects})
        elif parts[:2] == ["api", "datasets"] and parts[4] == "commit":
            self.commit("/".join(parts[1:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self.send(404, {})

    def answer_put(self, path: str) -> None:
        data = b"".join(self.chunks()) if "chunked" in self.headers.get("Transfer-Encoding", "") else self.body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.uploads[oid] = data
        self.send(200, {})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def commit(self, name: str, operations: list[dict[str, Any]]) -> None:
        files = dict(self.server.commits[self.server.refs[name]["main"]])
        parent = operations[0]["value"].get("parentCommit")
        if parent not in (None, self.server.refs[name]["main"]):
            self.send(412, {})
            return
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del files[value["path"]]
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.uploads[value["oid"]]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.server.commits[commit] = files
        self.server.refs[name]["main"] = commit
        self.send_json({"success": True, "commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"})

    def describe(self, name: str, rest: list[str]) -> None:
        refs = self.server.refs.get(name, {})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = refs.get(revision, revision if revision in self.server.commits else None)
        if name in self.server.refusals:
            self.send(*self.server.refusals[name])
        elif name not in self.server.refs:
            self.send(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif rest == ["auth-check", "write"]:
            self.send(403 if name in self.server.read_only else 200, {})
        elif commit is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        elif rest[:1] == ["tree"]:
            self.describe_tree(commit, "".join(f"{folder}/" for folder in rest[2:]))
        else:
            self.send_json(
                {
                    "id": name.removeprefix("datasets/"),
                    "sha": commit,
                    "private": self.server.visibility.get(name) == "private",
                    "siblings": [{"rfilename": n} for n in self.server.commits[commit]],
                }
            )

    def describe_tree(self, commit: str, folder: str) -> None:
        files = {name: data for name, data in self.server.commits[commit].items() if name.startswith(folder)}
        if "recursive=true" in self.path.lower():
            direct = files
        else:
            direct = {name: data for name, data in files.items() if "/" not in name.removeprefix(folder)}
        folders = {folder + name.removeprefix(folder).split("/")[0] for name in files.keys() - direct.keys()}
        found = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in direct.items()]
        self.send_json([*found, *({"type": "directory", "path": path, "oid": path} for path in sorted(folders))])

    def describe_paths(self, name: str, revision: str, body: bytes) -> None:
        files = self.server.commits[self.server.refs[name].get(revision, revision)]
        wanted = [path.rstrip("/") for path in json.loads(body)["paths"]]
        found = [{"type": "file", "path": n, "size": len(files[n]), "oid": n} for n in wanted if n in files]
        folders = {path for path in wanted if any(file.startswith(f"{path}/") for file in files)}
        self.send_json([*found, *({"type": "directory", "path": path, "oid": path} for path in sorted(folders))])

    def give(self, name: str, commit: str, file: str) -> None:
        if name in self.server.gated_files:
            self.send(403, {"X-Error-Code": "GatedRepo"})
            return
        commit = self.server.refs.get(name, {}).get(commit, commit)
        if file not in self.server.commits[commit]:
            self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = self.server.commits[commit][file]
        self.send(200, {"ETag": f'"{hash((commit, file)):x}"', "X-Repo-Commit": commit}, data)

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError):
                self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def listening() -> Iterator[Hub]:
    """A hub on a port of this host."""
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def serving(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, given: Hub | None = None) -> Iterator[Hub]:
    """A hub that this process uses instead of the real one, with an empty cache in `folder`.

    given: a hub that listens already, which is emptied first. The tests of a file share one, because a server forks
    only jobs whose environment is the server's, and that has the address of the hub.
    """
    if given is None:
        with listening() as hub, serving(folder, monkeypatch, hub):
            yield hub
        return
    from huggingface_hub import close_session, constants

    server = given
    server.clear()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol, with another server
    yield server
    close_session()
