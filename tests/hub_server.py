"""A small Hugging Face hub on loopback: models and data sets of a folder, as the real one serves.

    folder/models/<owner>/<name>/...     its files
    folder/datasets/<owner>/<name>/...

Repositories named `gated` or `private` want the token `hf_right`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_right"


@dataclass
class HubServer:
    """
    Attributes:
        endpoint: for `HF_ENDPOINT`.
        asked: method and path of every request.
        max_bytes: a file is cut after so many; None: none is.
    """

    folder: Path
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    max_bytes: int | None = None

    @property
    def num_downloads(self) -> int:
        return sum(line.startswith("GET") and "/resolve/" in line for line in self.asked)


@contextmanager
def serve_hub(folder: Path) -> Iterator[HubServer]:
    """Serves until the block ends."""
    hub = HubServer(folder)

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server_hub.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path):
            self._api(found[1], found[2], found[3] or "")
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file("datasets" if found[1] else "models", found[2], found[3], found[4])
        else:
            self._refuse(404, "EntryNotFound")

    def _repository(self, kind: str, name: str) -> Path | None:
        folder = self.server_hub.folder / kind / name
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if "gated" in name and not is_known:
            self._refuse(403, "GatedRepo")
        elif not folder.is_dir() or ("private" in name and not is_known):
            self._refuse(401, "RepoNotFound")
        else:
            return folder
        return None

    def _api(self, kind: str, name: str, rest: str) -> None:
        if (folder := self._repository(kind, name)) is None:
            return
        commit = commit_of(folder)
        entries = [_entry(folder, path) for path in _files(folder)]
        if rest.startswith("/tree/"):
            inside = re.fullmatch(r"/tree/[^/]+/?(.*)", rest)
            under = inside[1] if inside else ""
            self._json([entry for entry in entries if entry["path"].startswith(under)])
        elif rest == "/auth-check":
            self._json({})
        elif rest in ("", "/revision/main", f"/revision/{commit}"):
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            self._json({"id": name, "sha": commit, "siblings": siblings, "private": False})
        elif rest.startswith("/revision/"):
            self._refuse(404, "RevisionNotFound")
        elif rest.startswith("/paths-info/"):
            asked = json.loads(self._content)["paths"]
            self._json([entry for entry in entries if entry["path"] in asked])
        else:
            self._refuse(404, "EntryNotFound")

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        if (folder := self._repository(kind, name)) is None:
            return
        path = folder / file
        if revision not in ("main", commit_of(folder)):
            self._refuse(404, "RevisionNotFound")
        elif not path.is_file():
            self._refuse(404, "EntryNotFound")
        else:
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit_of(folder))
            self.send_header("ETag", f'"{_digest(path)}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[: self.server_hub.max_bytes])
                self.close_connection = self.server_hub.max_bytes is not None

    def _json(self, content: object) -> None:
        packed = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(packed)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def commit_of(folder: Path) -> str:
    """Of a repository's content."""
    return hashlib.sha1(b"".join(map(_packed, _files(folder)))).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}


def _digest(path: Path) -> str:
    return hashlib.sha1(_packed(path)).hexdigest()


def _packed(path: Path) -> bytes:
    return path.name.encode() + b"\0" + path.read_bytes()
