"""A fake Kubernetes API server over real HTTP, for lists and watches, with RBAC and with faults.

Writes are made in the test's process, through `store`. What it answers was compared with real servers of versions 1.20
and 1.36: list, watch from a version, bookmarks, 403, 404, 409, 410 and 504 in a watch as an event.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.kubernetes.kube_store import ApiError, Kind, KubeStore, Object
from tests.support.system.patience import PATIENCE_S

TOKEN = "token-of-the-scheduler"
NAMESPACE = "serving"
# What the scheduler's Role allows, and nothing else.
ROLE: Object = {
    "kind": "Role",
    "rules": [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}],
}
_BOOKMARK_S = 0.2


@dataclass
class Faults:
    """What goes wrong from now on; a test sets the fields."""

    status: int | None = None
    """Answer every request with this status."""
    watch_status: int | None = None
    """Answer every watch with this status."""
    hangs: bool = False
    """Accept requests and never answer."""
    is_half_open: bool = False
    """Watches stay open and send nothing more."""
    loses_deletes: bool = False
    """Watches do not report deletions."""
    closes_watches: bool = False
    """End every watch at once."""
    error_event: int | None = None
    """Begin every watch with an ERROR event of this code."""


@dataclass(frozen=True)
class Request:
    """A request that came in."""

    at: float
    verb: str
    resource_version: str


@dataclass
class KubeApi:
    """The server; see `run_kube_api`."""

    store: KubeStore = field(default_factory=KubeStore)
    faults: Faults = field(default_factory=Faults)
    role: Object = field(default_factory=lambda: ROLE)
    namespace: str = NAMESPACE
    requests: list[Request] = field(default_factory=list)
    is_over: bool = False
    url: str = ""
    _connections: set[socket.socket] = field(default_factory=set)

    def cut_connections(self) -> None:
        """Break every open connection in the middle of what it does."""
        for connection in list(self._connections):
            # The other side may have closed it.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def note_request(self, verb: str, resource_version: str) -> None:
        """Record a request."""
        with self.store.changed:
            self.requests.append(Request(time.monotonic(), verb, resource_version))
            self.store.changed.notify_all()

    def wait_for_requests(self, count: int) -> None:
        """Wait until there were this many requests; fails after five minutes."""
        with self.store.changed:
            assert self.store.changed.wait_for(lambda: len(self.requests) >= count, PATIENCE_S), "too few requests"

    def wake(self) -> None:
        """Let handlers notice changed faults."""
        with self.store.changed:
            self.store.changed.notify_all()

    def check_allowed(self, verb: str, group: str, plural: str) -> None:
        """Check a request against the Role.

        Raises:
            ApiError: 403.
        """
        for rule in self.role["rules"]:
            if verb in rule["verbs"] and plural in rule["resources"] and group in rule["apiGroups"]:
                return
        message = f'{plural}.{group} is forbidden: User "scheduler" cannot {verb} resource "{plural}"'
        raise ApiError(403, "Forbidden", message)

    def wait(self, timeout_s: float) -> None:
        """Wait for a change; the caller holds `store.changed`."""
        self.store.changed.wait(timeout_s)


@contextmanager
def run_kube_api(port: int, namespace: str = NAMESPACE) -> Iterator[KubeApi]:
    """Serve on a port of loopback; the caller's account may use one namespace."""
    api = KubeApi(url=f"http://127.0.0.1:{port}", namespace=namespace)

    class Handler(_Handler):
        kube = api

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield api
    finally:
        api.is_over = True
        api.wake()
        api.cut_connections()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kube: KubeApi

    def setup(self) -> None:
        super().setup()
        self.kube._connections.add(self.connection)

    def finish(self) -> None:
        self.kube._connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        verb = "watch" if query.get("watch") in ("true", "True", "1") else "list"
        self.kube.note_request(verb, query.get("resourceVersion", ""))
        try:
            self._misbehave(verb)
            group, kind = self._authorize(verb, parts.path)
            if verb == "list":
                self._list(group, kind, query)
            else:
                self._watch(kind, query)
        except ApiError as error:
            self._answer(error.code, error.status)
        except OSError:
            self.close_connection = True

    def _misbehave(self, verb: str) -> None:
        faults = self.kube.faults
        with self.kube.store.changed:
            while faults.hangs and not self.kube.is_over:
                self.kube.wait(1.0)
        status = faults.status or (faults.watch_status if verb == "watch" else None)
        if status is not None:
            raise ApiError(status, "InternalError", "a fault")

    def _authorize(self, verb: str, path: str) -> tuple[str, Kind]:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise ApiError(401, "Unauthorized", "Unauthorized")
        _, _, group, _, _, namespace, plural = path.split("/")
        if namespace != self.kube.namespace:
            raise ApiError(403, "Forbidden", f'cannot {verb} {plural} in the namespace "{namespace}"')
        self.kube.check_allowed(verb, group, plural)
        return group, (plural, namespace)

    def _list(self, group: str, kind: Kind, query: dict[str, str]) -> None:
        version, items = self.kube.store.select(kind, _selector(query))
        metadata = {"resourceVersion": str(version)}
        self._answer(200, {"kind": "List", "apiVersion": f"{group}/v1", "metadata": metadata, "items": items})

    def _watch(self, kind: Kind, query: dict[str, str]) -> None:
        """Send events until the time is over, as chunks of HTTP."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        faults, version = self.kube.faults, int(query["resourceVersion"])
        ends_at = time.monotonic() + float(query.get("timeoutSeconds", "1800"))
        try:
            if faults.error_event is not None:
                raise ApiError(faults.error_event, "Expired", "a fault")
            while time.monotonic() < ends_at and not (self.kube.is_over or faults.closes_watches):
                version = self._send_news(kind, _selector(query), version)
        except ApiError as error:
            # After the headers, an error is an event.
            self._chunk({"type": "ERROR", "object": error.status})
        self.wfile.write(b"0\r\n\r\n")

    def _send_news(self, kind: Kind, selector: dict[str, str], version: int) -> int:
        """Send what is new, or else a bookmark; returns the version up to which all is sent."""
        store, faults = self.kube.store, self.kube.faults
        with store.changed:
            changes = store.changes_since(version, kind)
            if not changes:
                self.kube.wait(_BOOKMARK_S)
                changes = store.changes_since(version, kind)
            version = store.version
        events = [event for change in changes if (event := change.event_for(selector)) is not None]
        if faults.loses_deletes:
            events = [event for event in events if event["type"] != "DELETED"]
        bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(version)}}
        for event in events or [{"type": "BOOKMARK", "object": bookmark}]:
            if not faults.is_half_open:
                self._chunk(event)
        return version

    def _chunk(self, event: Object) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _answer(self, code: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _selector(query: dict[str, str]) -> dict[str, str]:
    return dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
