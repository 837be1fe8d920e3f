"""A local server that implements the Hugging Face Hub protocol, with faults on demand.

It creates repositories and branches. It accepts uploads (preupload, LFS batch, PUT with verification,
commit). It serves listings and files (resolve with ETag and commit, LFS by a redirect to another host,
ranges). Error responses quote the received token, so that tests can check that covpool does not print it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "sEcReT" * 5
LFS = (".safetensors", ".parquet")


@dataclass
class Repository:
    """Files by commit, and commits by branch."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        state = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        name = hashlib.sha1(repr((branch, len(self.commits), sorted(state))).encode()).hexdigest()
        self.commits[name], self.branches[branch] = state, name
        return name

    def at(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


@dataclass
class Fault:
    """A fault for the next ``times`` requests that match ``method`` and ``path``."""

    method: str
    path: str
    act: Callable[[Handler], None]
    times: int = 1000


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(self, method: str, path: str, act: Callable[[Handler], None], times: int = 1000) -> None:
        self.faults.append(Fault(method, path, act, times))

    def put(self, name: str, files: dict[str, bytes], **options: Any) -> str:
        """Commit files to a repository, as if someone had pushed them."""
        return self.repositories.setdefault(name, Repository(**options)).commit("main", files)

    def asked(self, method: str, path: str) -> int:
        return sum(one == method and re.search(path, other) is not None for one, other in self.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.server.requests.append((self.command, parts.path))
        for fault in self.server.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, parts.path):
                fault.times -= 1
                return fault.act(self)
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, parts.path)
            if found and self.command in method:
                return answer(self, *(unquote(word) for word in found.groups() if word))
        self.error(404, "")
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815  # the names of http.server

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: object, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")

    def error(self, status: int, code: str, **headers: str) -> None:
        message = f"you sent {self.headers.get('Authorization')}"
        more = {"X_Error_Code": code} if code else {}
        self.send(status, json.dumps({"error": message}).encode(), X_Error_Message=message, **more, **headers)

    def found(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self.is_known):
            self.error(404 if self.is_known else 401, "RepoNotFound")
            return None
        if repository.gated:
            self.error(403, "GatedRepo")
            return None
        return repository

    def create(self) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if not self.is_known:
            return self.error(401, "")
        if name in self.server.repositories:
            return self.json({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        self.server.repositories[name] = made = Repository(private=wanted.get("visibility") == "private")
        made.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return self.json({"url": f"{self.server.url}/{name}", "name": name})

    def branch(self, name: str, branch: str) -> None:
        if repository := self.found(name):
            if branch in repository.branches:
                return self.error(409, "")
            repository.branches[branch] = repository.branches["main"]
            return self.json({})
        return None

    def validate(self) -> None:
        assert json.loads(self.body)["content"].startswith("---\n")
        self.json({"errors": [], "warnings": []})

    def preupload(self, name: str, branch: str) -> None:
        if self.found(name):
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            modes = [(path, "lfs" if path.endswith(LFS) else "regular") for path in paths]
            self.json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]})

    def batch(self, name: str) -> None:
        objects = json.loads(self.body)["objects"]
        for one in objects:
            if one["oid"] not in self.server.objects:
                one["actions"] = {
                    "upload": {"href": f"{self.server.url}/lfs/{one['oid']}"},
                    "verify": {"href": f"{self.server.url}/lfs-verify"},
                }
        self.json({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.error(400, "")
        self.server.objects[oid] = self.body
        return self.send(200)

    def verify(self) -> None:
        wanted = json.loads(self.body)
        is_there = len(self.server.objects.get(wanted["oid"], b"")) == wanted["size"]
        self.json({}, 200 if is_there else 404)

    def commit(self, name: str, branch: str) -> None:
        files = {}
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        if repository := self.found(name):
            commit = repository.commit(branch, files)
            self.json({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})

    def information(self, name: str, revision: str = "main") -> None:
        if repository := self.found(name):
            commit = repository.at(revision)
            if commit is None:
                return self.error(404, "RevisionNotFound")
            return self.json({"id": name, "sha": commit, "private": repository.private, "siblings": []})
        return None

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self.found(name)
        if repository is None:
            return None
        commit = repository.at(revision)
        if commit is None:
            return self.error(404, "RevisionNotFound")
        if path not in repository.commits[commit]:
            return self.error(404, "EntryNotFound", X_Repo_Commit=commit)
        data = repository.commits[commit][path]
        oid = hashlib.sha256(data).hexdigest()
        if not path.endswith(LFS):
            etag = hashlib.sha1(data).hexdigest()
            return self.send(200, data, ETag=f'"{etag}"', X_Repo_Commit=commit)
        self.server.objects[oid] = data
        return self.send(
            302,
            Location=f"http://localhost:{self.server.server_port}/cdn/{oid}",
            X_Repo_Commit=commit,
            X_Linked_Etag=f'"{oid}"',
            X_Linked_Size=str(len(data)),
        )

    def content(self, oid: str) -> None:
        assert "Authorization" not in self.headers, "the token went to another host"
        data = self.server.objects[oid]
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(part[1]), int(part[2] or len(data) - 1)
            return self.send(
                206,
                data[first : last + 1],
                Content_Range=f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}",
            )
        return self.send(200, data)

    def entries(self, name: str, revision: str) -> list[dict[str, Any]] | None:
        repository = self.found(name)
        if repository is None:
            return None
        commit = repository.at(revision)
        if commit is None:
            self.error(404, "RevisionNotFound")
            return None
        files = repository.commits[commit]
        folders = {path.rpartition("/")[0] for path in files} - {""}
        listed: list[dict[str, Any]] = [
            {"type": "directory", "oid": "0", "size": 0, "path": f} for f in folders
        ]
        for path, data in files.items():
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            more = {"lfs": lfs} if path.endswith(LFS) else {}
            listed.append({"type": "file", "oid": "1", "size": len(data), "path": path, **more})
        return sorted(listed, key=lambda entry: str(entry["path"]))

    def tree(self, name: str, revision: str, folder: str = "") -> None:
        listed = self.entries(name, revision)
        if listed is not None:
            is_deep = self.query.get("recursive", "").lower() in ("1", "true")
            start = f"{folder.strip('/')}/" if folder.strip("/") else ""
            inside = [one for one in listed if one["path"].startswith(start)]
            self.json([one for one in inside if is_deep or "/" not in one["path"][len(start) :]])

    def paths(self, name: str, revision: str) -> None:
        listed = self.entries(name, revision)
        if listed is not None:
            text = self.body.decode()
            wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
            self.json([one for one in listed if one["path"] in wanted])


NAME = r"(?:datasets/)?([\w.-]+/[\w.-]+)"
API = r"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("POST",), "/api/repos/create", Handler.create),
    (("POST",), "/api/validate-yaml", Handler.validate),
    (("POST",), f"{API}/branch/([^/]+)", Handler.branch),
    (("POST",), f"{API}/preupload/([^/]+)", Handler.preupload),
    (("POST",), f"{API}/commit/([^/]+)", Handler.commit),
    (("POST",), f"{API}/paths-info/([^/]+)", Handler.paths),
    (("POST",), f"/{NAME}\\.git/info/lfs/objects/batch", Handler.batch),
    (("PUT",), r"/lfs/(\w+)", Handler.put_object),
    (("POST",), "/lfs-verify", Handler.verify),
    (("GET",), f"{API}/tree/([^/]+)(/.*)?", Handler.tree),
    (("GET",), f"{API}/revision/([^/]+)", Handler.information),
    (("GET",), API, Handler.information),
    (("GET", "HEAD"), f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
    (("GET", "HEAD"), r"/cdn/(\w+)", Handler.content),
]


@contextmanager
def running() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


# Faults.


def status(code: int, error: str = "", **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.error(code, error, **headers)


def text(body: bytes, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(200, body, **headers)


def redirect_to_itself(handler: Handler) -> None:
    handler.send(302, Location=handler.path)


def close(handler: Handler) -> None:
    """Close the connection without a response."""
    handler.close_connection = True
    handler.connection.shutdown(2)


def cut(handler: Handler) -> None:
    """Announce the full size of a file, then send only half of it."""
    data = handler.server.objects[handler.path.rpartition("/")[2]]
    handler.send(200, data[: len(data) // 2], Content_Length=str(len(data)))
    close(handler)


def changed(handler: Handler) -> None:
    """Send the same number of bytes, with one bit changed."""
    data = bytearray(handler.server.objects[handler.path.rpartition("/")[2]])
    data[-1] ^= 1
    handler.send(200, bytes(data))


def shorter(handler: Handler) -> None:
    """Send a complete response with fewer bytes."""
    handler.send(200, handler.server.objects[handler.path.rpartition("/")[2]][:-10])
