"""A hub of models on loopback, as far as downloads need it: Hugging Face's protocol over real HTTP.

Paths, headers and error codes are those that huggingface_hub reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_an_account_that_may"
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A model's files, all of one commit."""

    files: Mapping[str, bytes]
    branch: str = "main"
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a file's content that came in."""

    file: str
    start: int
    """The first byte that it asks for."""


@dataclass
class Hub:
    """The hub: what it has, what goes wrong, and what it was asked for."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    spoilt: dict[str, bytes] = field(default_factory=dict)
    """What some files have in place of their content, of the same length."""
    cuts_after: dict[str, int] = field(default_factory=dict)
    """After how many bytes the connection of some files is closed, once."""
    hangs_after: dict[str, int] = field(default_factory=dict)
    """After how many bytes the answer of some files stops, without an end."""
    has_hung: Event = field(default_factory=Event)
    requests: list[Request] = field(default_factory=list)
    closing: Event = field(default_factory=Event)

    @property
    def requested(self) -> list[str]:
        """The files whose contents were asked for."""
        return [request.file for request in self.requests]


@contextmanager
def run_model_hub() -> Iterator[Hub]:
    """A hub without models, which ends with the block."""

    class Handler(_Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.closing.set()
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class's name

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        info, file = _INFO.fullmatch(path), _FILE.fullmatch(path)
        match = info or file
        repository = self.hub.repositories.get(match[1]) if match else None
        if match is None or repository is None:
            self._refuse(404, "RepoNotFound")
        elif (match[2] or repository.branch) not in (repository.branch, repository.commit):
            self._refuse(404, "RevisionNotFound")
        elif info is not None:
            body = json.dumps(_describe(match[1], repository)).encode()
            self._send(200, body, {"Content-Type": "application/json"})
        elif repository.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(403, "GatedRepo")
        elif match[3] not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(repository, match[3], has_body=has_body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_file(self, repository: Repository, name: str, *, has_body: bool) -> None:
        content = repository.files[name]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{_git_hash(content)}"', "Accept-Ranges": "bytes"}
        if _is_large(name):
            headers |= {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        if not has_body:
            self._send(200, b"", headers | {"Content-Length": str(len(content))})
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.hub.requests.append(Request(name, start))
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = self.hub.spoilt.get(name, content)[start:]
        cut, hang = self.hub.cuts_after.pop(name, None), self.hub.hangs_after.get(name)
        headers["Content-Length"] = str(len(body))
        self._send(206 if start else 200, body[: hang if cut is None else cut], headers)
        if cut is not None:
            self.close_connection = True
        elif hang is not None:
            self.hub.has_hung.set()
            self.hub.closing.wait()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def _describe(name: str, repository: Repository) -> dict[str, object]:
    return {
        "id": name,
        "sha": repository.commit,
        "siblings": [_sibling(file, content) for file, content in repository.files.items()],
    }


def _sibling(name: str, content: bytes) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _git_hash(content)}
    if _is_large(name):
        # The Git hash is then that of a pointer, which is not downloaded.
        digest = hashlib.sha256(content).hexdigest()
        sibling |= {"blobId": "0" * 40, "lfs": {"sha256": digest, "size": len(content), "pointerSize": 134}}
    return sibling


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
