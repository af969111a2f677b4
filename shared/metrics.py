"""Metrics for Prometheus, served by the service's own event loop.

Only `GET /metrics`, with limits on size and time: the Prometheus library's own server runs in a second thread, which
would slow down the step loop.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from shared.rpc import refuse_taken_socket

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0


async def serve_metrics(
    address: str, registry: CollectorRegistry, *, request_timeout_s: float = REQUEST_TIMEOUT_S
) -> asyncio.AbstractServer:
    """Answer `GET /metrics` until the server is closed.

    Args:
        address: unix:PATH or HOST:PORT; port 0 chooses a free one.
        registry: Its collectors run on the event loop.
        request_timeout_s: A connection not answered by then is closed.

    Raises:
        RuntimeError: the address is in use or not usable.
    """
    endpoint = _Endpoint(registry, request_timeout_s)
    try:
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            refuse_taken_socket(path)
            return await asyncio.start_unix_server(endpoint.answer, path, limit=MAX_REQUEST_BYTES)
        host, _, port = address.rpartition(":")
        return await asyncio.start_server(endpoint.answer, host.strip("[]"), int(port), limit=MAX_REQUEST_BYTES)
    except OSError as error:
        raise RuntimeError(f"{address}: {error}") from error


class _Endpoint:
    """A misbehaving client can only end its own connection."""

    def __init__(self, registry: CollectorRegistry, request_timeout_s: float) -> None:
        self._registry = registry
        self._request_timeout_s = request_timeout_s

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        match head.partition(b"\r\n")[0].split(b" "):
            case [method, target, b"HTTP/1.0" | b"HTTP/1.1"]:
                if target.partition(b"?")[0] != b"/metrics":
                    return _response(HTTPStatus.NOT_FOUND)
                if method != b"GET":
                    return _response(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET")
                page = generate_latest(self._registry)
                return _response(HTTPStatus.OK, f"Content-Type: {CONTENT_TYPE_PLAIN_0_0_4}", body=page)
            case _:
                return _response(HTTPStatus.BAD_REQUEST)


def _response(status: HTTPStatus, *headers: str, body: bytes = b"") -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *headers,
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body
