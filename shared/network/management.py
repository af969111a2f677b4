"""The management port: a process's metrics and probes as plain HTTP, served by its own event loop.

Only GET and HEAD of `/metrics`, `/livez`, `/readyz` and `/startupz`, with limits on size, time and connections, since
any address may be served: the probes of a kubelet have no certificate. The Prometheus library's own server runs in a
second thread, which would slow down the step loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from shared.network.addresses import is_any_host_of_both_families, split_address
from shared.network.listening import listen_on_both_families, reason_of_failure, refuse_taken_socket
from shared.network.probes import Probes

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64

_TEXT = "text/plain; charset=utf-8"
_METHODS = (b"GET", b"HEAD")


async def serve_management(
    address: str | None, registry: CollectorRegistry, probes: Probes, *, request_timeout_s: float = REQUEST_TIMEOUT_S
) -> asyncio.Server | None:
    """Answer until the server is closed.

    Args:
        address: `--manage-listen`: unix:PATH or HOST:PORT, where port 0 chooses a free one. None serves nothing.
        registry: Its collectors run on the event loop.
        probes: What `/livez`, `/startupz` and `/readyz` answer.
        request_timeout_s: A connection not answered by then is closed.

    Raises:
        RuntimeError: the address is in use or not usable.
    """
    if address is None:
        return None
    endpoint = _Endpoint(_routes(registry, probes), request_timeout_s)
    try:
        server = await _listen(address, endpoint)
    except (OSError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"--manage-listen: {address}: {reason_of_failure(error)}") from error
    logger.info("serving metrics and probes", extra={"addresses": [socket.getsockname() for socket in server.sockets]})
    return server


async def _listen(address: str, endpoint: _Endpoint) -> asyncio.Server:
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        refuse_taken_socket(path)
        return await asyncio.start_unix_server(endpoint.answer, path, limit=MAX_REQUEST_BYTES)
    host, port = split_address(address)
    if is_any_host_of_both_families(host):
        listener = listen_on_both_families(port, backlog=MAX_CONNECTIONS)
        return await asyncio.start_server(endpoint.answer, sock=listener, limit=MAX_REQUEST_BYTES)
    return await asyncio.start_server(endpoint.answer, host, port, limit=MAX_REQUEST_BYTES)


@dataclass(frozen=True, slots=True)
class _Page:
    status: HTTPStatus
    body: bytes = b""
    content_type: str = _TEXT


_Route = Callable[[], _Page]


def _routes(registry: CollectorRegistry, probes: Probes) -> dict[bytes, _Route]:
    return {
        b"/metrics": lambda: _Page(HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4),
        b"/livez": lambda: _probe(probes.why_not_alive),
        b"/startupz": lambda: _probe(probes.why_not_started),
        b"/readyz": lambda: _probe(probes.why_not_ready),
    }


def _probe(why_not: str | None) -> _Page:
    status = HTTPStatus.OK if why_not is None else HTTPStatus.SERVICE_UNAVAILABLE
    return _Page(status, f"{why_not or 'ok'}\n".encode())


class _Endpoint:
    """A misbehaving client can only end its own connection.

    When there are too many, the oldest is closed: connections that are held open do not keep a probe out, whose request
    comes with its connection.
    """

    def __init__(self, routes: dict[bytes, _Route], request_timeout_s: float) -> None:
        self._routes = routes
        self._request_timeout_s = request_timeout_s
        # In order of their opening.
        self._connections: dict[asyncio.StreamWriter, None] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                writer.write(await self._respond(reader))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, ConnectionError):
            # The client is too slow or gone, so there is no one to report the error to.
            pass
        finally:
            writer.transport.abort()
            self._connections.pop(writer, None)

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(_Page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        match head.partition(b"\r\n")[0].split(b" "):
            case [method, target, b"HTTP/1.0" | b"HTTP/1.1"]:
                route = self._routes.get(target.partition(b"?")[0])
                if route is None:
                    return _response(_Page(HTTPStatus.NOT_FOUND))
                if method not in _METHODS:
                    return _response(_Page(HTTPStatus.METHOD_NOT_ALLOWED), "Allow: GET, HEAD")
                return _response(route(), has_body=method == b"GET")
            case _:
                return _response(_Page(HTTPStatus.BAD_REQUEST))


def _response(page: _Page, *headers: str, has_body: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        *headers,
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Connection: close",
    ]
    head = "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
    return head + page.body if has_body else head
