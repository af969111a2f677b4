"""One HTTP connection: how many there may be, how large and slow a head may be, and what a bad one is answered.

aiohttp answers a bad head by itself, in text/plain and with a traceback in its log that quotes the client. It limits
the lines of a head, but not all of them together, nor what surrounds the chunks of a body.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler
from typing_extensions import override

from services.tokenizer.http.connections.limits import MAX_HEAD_BYTES, MAX_HEADERS, MAX_LINE_BYTES, HttpLimits
from services.tokenizer.http.connections.unread import UnreadWatch
from services.tokenizer.http.refusals import HttpError

logger = logging.getLogger(__name__)

SERVER = "lockstep"
"""The server's name in its answers."""

# A chunk of one byte takes six: more than this around the bytes of a body is no way to send it.
_MAX_WIRE_BYTES_PER_BYTE = 8
# What comes is read in such pieces. A head that follows something else in one may be longer by less than a piece.
_PIECE_BYTES = 4096
# Bytes that are dropped after a head that cannot be read. A client that sends more is not waiting for an answer.
_MAX_DROPPED_BYTES = 1024 * 1024


class Connections:
    """The open connections.

    At the limit a new one replaces the one that has waited longest for a complete request, so that connections which
    send nothing cannot keep others out. Clients and proxies may keep idle ones as long as they like otherwise: a
    server that closes them by a timer races with requests that are already on their way.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        # In the order in which they began to wait.
        self._waiting: dict[Connection, None] = {}

    def try_add(self, connection: Connection) -> bool:
        """Whether there was room for a connection."""
        if len(self._open) >= self.limits.max_connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.remove(longest)
            longest.abort()
        self._open.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection, if it is known."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def note_waiting(self, connection: Connection) -> None:
        """A connection waits for a request from now on."""
        if connection in self._open:
            self._waiting[connection] = None

    def note_request(self, connection: Connection) -> None:
        """A connection has a request that is being answered."""
        self._waiting.pop(connection, None)


class Connection(RequestHandler):
    """Refuses a connection above the limit, and one whose head does not come, or does not end."""

    __slots__ = (
        "_body",
        "_connections",
        "_head_timer",
        "_ignores_input",
        "_num_dropped_bytes",
        "_num_requests_seen",
        "_num_surrounding_bytes",
        "_num_unanswered",
        "_unread",
    )

    def __init__(self, server: web.Server, connections: Connections) -> None:
        self._connections = connections
        limits = connections.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            # None turns it off.
            access_log=None,  # type: ignore[arg-type]
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            lingering_time=limits.lingering_s,
            auto_decompress=False,
        )
        self._unread = UnreadWatch(limits.max_unread_s, self._is_handled)
        self._head_timer: asyncio.TimerHandle | None = None
        self._ignores_input = False
        self._num_dropped_bytes = 0
        self._num_requests_seen = 0
        # Requests whose heads have come and whose answers have not been written.
        self._num_unanswered = 0
        # The body of the last request that has come: what follows it is the next head.
        self._body: StreamReader | None = None
        # Bytes received since the last head's end that are not a body's.
        self._num_surrounding_bytes = 0

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._connections.try_add(self):
            message = "too many connections are open"
            self._refuse(HttpError(HTTPStatus.TOO_MANY_REQUESTS, "server_overloaded", message, headers=_RETRY))
            return
        self._connections.note_waiting(self)
        self._await_head()

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_head_timer()
        self._connections.remove(self)
        super().connection_lost(exc)
        self._unread.stop()

    @override
    def data_received(self, data: bytes) -> None:
        # In small pieces, since a head may begin in any of them, and never beyond where the head must end.
        start = 0
        while True:
            room = MAX_HEAD_BYTES - self._num_surrounding_bytes
            size = min(_PIECE_BYTES, room) if room > 0 and not self._is_in_body else _PIECE_BYTES
            self._receive(data[start : start + size])
            start += size
            if start >= len(data):
                return

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        if not self._is_handled():
            self._watch_unread()

    def force_close(self) -> None:
        """See `RequestHandler`; what is unsent is still sent, if it is read."""
        self._watch_unread()
        super().force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See `RequestHandler`; an error of aiohttp's own, before any route, gets this API's form."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(HttpError(resp.status, "invalid_request", HTTPStatus(resp.status).phrase))
        self._watch_unread()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._num_unanswered -= 1
            self._note_requests()
            self._watch_unread()
            if self._num_unanswered == 0:
                self._connections.note_waiting(self)
                if self._num_surrounding_bytes:
                    self._await_head()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - it quotes the head
    ) -> web.StreamResponse:
        """Answer a head that cannot be read; its text stays out of the answer and the log."""
        logger.debug("bad HTTP head", extra={"error_type": type(exc).__name__})
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = error_response(_head_error(status, exc))
        response.force_close()
        return response

    def log_exception(self, *_args: Any, **kw: Any) -> None:
        """Log the type of an exception only: its text may be the client's."""
        error = kw.get("exc_info")
        # A body that was not read and is broken.
        if not isinstance(error, web.RequestPayloadError):
            logger.error("unexpected error", extra={"error_type": type(error).__name__})

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def _receive(self, data: bytes) -> None:
        if self._ignores_input:
            self._num_dropped_bytes += len(data)
            if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
                self.abort()
            return
        is_body = self._is_in_body
        if data and not is_body and self._num_unanswered == 0:
            self._await_head()
        if data and not is_body and self._num_surrounding_bytes >= MAX_HEAD_BYTES:
            self._refuse_head()
            return
        self._num_surrounding_bytes += len(data)
        super().data_received(data)
        if self._note_requests():
            return
        if is_body and self._body is not None and self._body.is_eof():
            self._num_surrounding_bytes = 0
            return
        if is_body and self._body is not None:
            num_allowed = MAX_HEAD_BYTES + _MAX_WIRE_BYTES_PER_BYTE * self._body.total_bytes
            if self._num_surrounding_bytes > num_allowed:
                self._ignores_input = True
                self._body.set_exception(_broken_body())

    @property
    def _is_in_body(self) -> bool:
        """Whether what comes next belongs to a body."""
        return self._body is not None and not self._body.is_eof()

    def _refuse_head(self) -> None:
        message = f"the head exceeds {MAX_HEAD_BYTES} bytes"
        self._refuse(HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message))

    def _note_requests(self) -> bool:
        """Whether heads have come since the last call; they are queued."""
        num_new = self._request_count - self._num_requests_seen
        if num_new == 0:
            return False
        before, self._num_requests_seen = self._body, self._request_count
        message, self._body = self._messages[-1]
        if not isinstance(message, RawRequestMessage):
            # The last head, or the body before it, cannot be read, and so nothing after it.
            self._ignores_input = True
            if before is not None and not before.is_eof():
                before.set_exception(_broken_body())
        elif message.version not in (HttpVersion10, HttpVersion11):
            self._refuse(HttpError(HTTPStatus.BAD_REQUEST, "invalid_request", "the HTTP version is not supported"))
            return True
        self._num_unanswered += num_new
        self._num_surrounding_bytes = 0
        self._cancel_head_timer()
        self._connections.note_request(self)
        return True

    def _await_head(self) -> None:
        if self._head_timer is None:
            head_s = self._connections.limits.head_s
            self._head_timer = asyncio.get_running_loop().call_later(head_s, self._end_slow_head)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        self._head_timer = None
        self._refuse(HttpError(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the head did not arrive in time"))

    def _is_handled(self) -> bool:
        """Whether a handler runs; it may write a stream, whose own writer watches it."""
        return self._current_request is not None

    def _watch_unread(self) -> None:
        if self.transport is not None and self.transport.get_write_buffer_size() > 0:
            self._unread.start(self.transport)

    def _refuse(self, error: HttpError) -> None:
        """Close, with an answer unless earlier ones are to come."""
        self._ignores_input = True
        self._cancel_head_timer()
        if self._num_unanswered > 0:
            self.abort()
        elif self.transport is not None:
            self.transport.write(_raw_response(error))
            self.force_close()


_RETRY = {"Retry-After": "1", "retry-after-ms": "1000"}


def error_response(error: HttpError, *, body: bytes | None = None) -> web.Response:
    """The answer to a request that failed, with the body that it has in OpenAI's API unless another is given."""
    body = error.body() if body is None else body
    response = web.Response(status=error.status, body=body, content_type="application/json", headers=error.headers)
    response.headers["Server"] = SERVER
    if error.headers.get("Connection") == "close":
        response.force_close()
    return response


def _broken_body() -> web.RequestPayloadError:
    return web.RequestPayloadError("the body is broken")


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
