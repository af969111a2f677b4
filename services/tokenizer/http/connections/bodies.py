"""Reads the bodies of requests: how large, how slow and in which form they may be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeVar

from aiohttp import HttpVersion11, web

from services.tokenizer.http.connections.inflation import ACCEPTED, INFLATERS, MAX_PIECE_BYTES
from services.tokenizer.http.connections.limits import MAX_BODY_BYTES
from services.tokenizer.http.reading.body_readers import BodyReaders
from services.tokenizer.http.reading.parsing import parse_body
from services.tokenizer.http.refusals import HttpError
from shared.network.turns import CallTurns, Slots

BODY_S = web.AppKey("body_s", float)
"""How long a body may take to arrive."""
BODY_READERS = web.AppKey("body_readers", BodyReaders)
"""Read large bodies."""
CALL_TURNS = web.AppKey("call_turns", CallTurns)
"""Take up the requests whose bodies have come."""
LARGE_BODIES = web.AppKey("large_bodies", Slots)
"""Held while a large body is read: one of many small values takes 30 times its size."""

# Reading more than this would be noticeable in streams: it takes up to 20 ms.
_MAX_BYTES_ON_LOOP = 32 * 1024


_CLOSE = {"Connection": "close"}

ReadT = TypeVar("ReadT")


async def read_body(request: web.Request, read: partial[ReadT]) -> ReadT:
    """Read the body, a JSON object, and what `read`, one of `readers`, makes of it; a large one in another process.

    Raises:
        HttpError: it is no JSON object, too large, too slow or broken, or `read` refuses it.
    """
    _check_form(request)
    if _is_awaiting_approval(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The answer has not begun.
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(request.app[BODY_S]):
            data = await _read(request)
    except TimeoutError:
        message = f"the body did not arrive within {request.app[BODY_S]:.0f} s"
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message, headers=_CLOSE) from None
    except (web.RequestPayloadError, ConnectionError, ValueError):
        raise HttpError(HTTPStatus.BAD_REQUEST, "invalid_request", "the body is broken", headers=_CLOSE) from None
    await request.app[CALL_TURNS].wait()
    if len(data) > _MAX_BYTES_ON_LOOP:
        async with request.app[LARGE_BODIES]:
            read_request: ReadT = await request.app[BODY_READERS].read(read.func.__name__, read.keywords, data)
            return read_request
    return read(parse_body(data))


async def check_expectation(request: web.Request) -> None:
    """See aiohttp's `expect_handler`; the client is told to go on when its host, route, and body's form are checked.

    Raises:
        HTTPExpectationFailed: the client expects something else.
    """
    if request.version == HttpVersion11 and not _is_awaiting_approval(request):
        raise web.HTTPExpectationFailed


def _is_awaiting_approval(request: web.Request) -> bool:
    expected = request.headers.get("Expect", "")
    return request.version == HttpVersion11 and expected.lower() == "100-continue"


def _check_form(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise _unsupported("the body must be application/json")
    if _encoding(request) not in INFLATERS:
        raise _unsupported(f"the body must be plain, or compressed by {ACCEPTED}", {"Accept-Encoding": ACCEPTED})
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise _unsupported("the body must be UTF-8")
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise _too_large()


async def _read(request: web.Request) -> bytes:
    """The body, inflated; its limit holds for what came, and for what has been inflated of it so far."""
    data, num_received, inflater = bytearray(), 0, INFLATERS[_encoding(request)]()
    async for chunk in request.content.iter_any():
        num_received += len(chunk)
        for piece in inflater.push(chunk):
            data += piece
            if max(num_received, len(data)) > MAX_BODY_BYTES:
                raise _too_large()
            if len(piece) == MAX_PIECE_BYTES:
                # A little can inflate to much, and streams go on meanwhile.
                await asyncio.sleep(0)
        if num_received > MAX_BODY_BYTES:
            raise _too_large()
    inflater.end()
    return bytes(data)


def _encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "identity").strip().lower()


def _unsupported(message: str, headers: Mapping[str, str] = MappingProxyType({})) -> HttpError:
    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    return HttpError(status, "unsupported_media_type", message, headers={**_CLOSE, **headers})


def _too_large() -> HttpError:
    message = f"the body exceeds {MAX_BODY_BYTES} bytes"
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_too_large", message, headers=_CLOSE)
