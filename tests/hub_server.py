"""A replacement for the Hugging Face hub on 127.0.0.1: models are found and fetched, datasets pushed and read."""

import base64
import contextlib
import hashlib
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class Hub(ThreadingHTTPServer):
    """The hub's answers about models, and about datasets, whose ids are here `datasets/USER/NAME`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.refs: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}
        self.gated_files: set[str] = set()
        self.asked: list[str] = []
        self.visibility: dict[str, str] = {}
        self.uploads: dict[str, bytes] = {}
        self.delay_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *arguments: object) -> None:
        """Ignore errors: clients close the connection after the headers."""


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        time.sleep(self.server.delay_s)
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

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        body = self.body()
        if "Authorization" not in self.headers:
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

    def do_PUT(self) -> None:
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
        elif commit is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        elif rest[:1] == ["tree"]:
            files = self.server.commits[commit].items()
            self.send_json([{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in files])
        else:
            self.send_json(
                {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in self.server.commits[commit]]}
            )

    def give(self, name: str, commit: str, file: str) -> None:
        if name in self.server.gated_files:
            self.send(403, {"X-Error-Code": "GatedRepo"})
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
def serving(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process uses instead of the real one, with an empty cache in `folder`."""
    from huggingface_hub import close_session, constants

    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
    server.shutdown()
    server.server_close()
