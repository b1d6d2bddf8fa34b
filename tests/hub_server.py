"""A replacement for the Hugging Face hub on 127.0.0.1, for finding and fetching models."""

import contextlib
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
    """The hub's answers about models. repos: id → revision → commit → files. refusals: id → answer."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.refs: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, dict[str, str]]] = {}
        self.gated_files: set[str] = set()
        self.asked: list[str] = []
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
        else:
            self.give("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_HEAD = do_GET  # noqa: N815

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

    def send_json(self, value: Any) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

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
    yield server
    close_session()
    server.shutdown()
    server.server_close()
