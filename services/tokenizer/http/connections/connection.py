"""One HTTP connection: how many there may be, how long a head may take, and what a bad one is answered.

aiohttp answers a bad head by itself, in text/plain and with a traceback in its log that quotes the client.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from services.tokenizer.http.errors import HttpError

logger = logging.getLogger(__name__)

SERVER = "lockstep"
"""The server's name in its answers."""
HEAD_S = 10.0
MAX_LINE_BYTES = 8190
MAX_HEADERS = 100
_LINGERING_S = 2.0


class Connections:
    """Counts the open connections."""

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.num_open = 0


class Connection(RequestHandler):
    """Refuses a connection above the limit, and one whose head does not come."""

    __slots__ = ("_connections", "_has_request", "_head_timer", "_is_counted")

    def __init__(self, server: web.Server, connections: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            # None turns it off.
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=_LINGERING_S,
            auto_decompress=False,
        )
        self._connections = connections
        self._is_counted = False
        self._has_request = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if self._connections.num_open >= self._connections.max_open:
            message = "too many connections are open"
            self._refuse(HttpError(HTTPStatus.TOO_MANY_REQUESTS, "server_overloaded", message, headers=_RETRY))
            return
        self._connections.num_open += 1
        self._is_counted = True
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See `asyncio.Protocol`."""
        self.note_head()
        if self._is_counted:
            self._is_counted = False
            self._connections.num_open -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if not self._has_request:
            self._await_head()
        super().data_received(data)

    def note_head(self) -> None:
        """A head has come; its request is being answered."""
        self._has_request = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See `RequestHandler`; an error of aiohttp's own, before any route, gets this API's form."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(HttpError(resp.status, "invalid_request", HTTPStatus(resp.status).phrase))
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.note_head()
            self._has_request = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it quotes the head
    ) -> web.StreamResponse:
        """Answer a head that cannot be read; its text stays out of the answer and the log."""
        self.note_head()
        logger.debug("bad HTTP head", extra={"error_type": type(exc).__name__})
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = error_response(_head_error(status, exc))
        response.force_close()
        return response

    def log_exception(self, *_args: Any, **kw: Any) -> None:
        """Log the type of an exception only: its text may be the client's."""
        error = kw.get("exc_info")
        logger.error("unexpected error", extra={"error_type": type(error).__name__})

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._end_slow_head)

    def _end_slow_head(self) -> None:
        self._head_timer = None
        self._refuse(HttpError(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the head did not arrive in time"))

    def _refuse(self, error: HttpError) -> None:
        if self.transport is not None:
            self.transport.write(_raw_response(error))
        self.force_close()


_RETRY = {"Retry-After": "1", "retry-after-ms": "1000"}


def error_response(error: HttpError) -> web.Response:
    """The answer to a request that failed."""
    response = web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=error.headers
    )
    response.headers["Server"] = SERVER
    if error.headers.get("Connection") == "close":
        response.force_close()
    return response


def _head_error(status: int, error: BaseException | None) -> HttpError:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return HttpError(status, "internal", "internal error")
    if isinstance(error, LineTooLong):
        message = f"a line of the head exceeds {MAX_LINE_BYTES} bytes"
        return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message)
    return HttpError(HTTPStatus.BAD_REQUEST, "invalid_request", "the request's head is not valid HTTP")


def _raw_response(error: HttpError) -> bytes:
    body = error.body()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *(f"{name}: {value}" for name, value in error.headers.items()),
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body
