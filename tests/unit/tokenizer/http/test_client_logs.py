"""What clients do wrong leaves nothing at ERROR in the log, and one line a minute of a kind at WARNING."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2
from tests.support.tokenizer.exchange_peer import Row
from tests.support.tokenizer.http_client import HttpService

GENERATE = "/lockstep.v1.TokenizerService/Generate"
HELLO = tokenizer_pb2.GenerateRequest(text="The fox")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = '{"prompt": "The fox", "stream": true}'


async def grpc_deadline(http: HttpService) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.stub.Complete(tokenizer_pb2.CompleteRequest(request=HELLO), timeout=0.05)


async def grpc_deadline_of_a_stream(http: HttpService) -> None:
    call = http.service.stub.Generate(HELLO, timeout=0.1)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def grpc_deadline_without_a_scheduler(http: HttpService) -> None:
    http.service.peer.end_stream()
    while (await http.get("/health")).status == 200:
        pass
    await grpc_deadline(http)
    await grpc_deadline_of_a_stream(http)
    await http.service.link()


async def grpc_deadline_that_has_passed(http: HttpService) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.stub.Complete(tokenizer_pb2.CompleteRequest(request=HELLO), timeout=0.0001)


async def grpc_cancel(http: HttpService) -> None:
    call = http.service.stub.Generate(HELLO)
    await call.read()
    call.cancel()
    await http.service.peer.aborts.get()


async def grpc_bad_bytes(http: HttpService) -> None:
    for data in (b"\xff\xff", b"\x0a\xff", b"\x0a\x02\xff\xff"):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await http.service.channel.unary_unary(GENERATE)(data)


async def grpc_unknown_method(http: HttpService) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.channel.unary_unary(f"{GENERATE}x")(b"")


async def grpc_wrong_kind(http: HttpService) -> None:
    async def messages() -> Any:
        yield HELLO.SerializeToString()
        yield HELLO.SerializeToString()

    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.channel.stream_unary(GENERATE)(messages(), timeout=0.2)


async def grpc_too_large(http: HttpService) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.channel.unary_unary(GENERATE)(b"\x0a" + b"x" * (5 << 20))


async def grpc_refused(http: HttpService) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await http.service.stub.Complete(tokenizer_pb2.CompleteRequest())


async def no_http2(http: HttpService) -> None:
    path = http.service.http_address.removeprefix("unix:").replace("http.sock", "tokenizer.sock")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xff\1\0\0\0\0\1x"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(1), 1)
        reset(writer)


def reset(writer: asyncio.StreamWriter) -> None:
    one = writer.get_extra_info("socket")
    if one.family != socket.AF_UNIX:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def send(http: HttpService, data: str, *, waits: bool = False) -> None:
    """Send bytes to the HTTP port, and end the connection; with `waits` once there is an answer."""
    reader, writer = await asyncio.open_unix_connection(http.service.http_address.removeprefix("unix:"))
    writer.write(data.encode("latin-1"))
    await writer.drain()
    if waits:
        await reader.read(1)
    reset(writer)


async def http_half_head(http: HttpService) -> None:
    await send(http, HEAD)


async def http_half_body(http: HttpService) -> None:
    await send(http, f"{HEAD}Content-Length: 1000\r\n\r\n{BODY}")


async def http_broken_chunks(http: HttpService) -> None:
    await send(http, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\n{{}}\r\nzz\r\n", waits=True)


async def http_half_chunk(http: HttpService) -> None:
    await send(http, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n500\r\n{{}}")


async def http_bad_head(http: HttpService) -> None:
    await send(http, "\x16\x03\x01\x02\x00\r\n\r\n", waits=True)


async def http_bad_body(http: HttpService) -> None:
    for body in ("\xff\xfe", "{", "[" * 5000, '{"a": 1e999}', "null"):
        await send(http, f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}", waits=True)


async def http_reset_before_an_answer(http: HttpService) -> None:
    await send(http, f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}")


async def http_reset_of_a_stream(http: HttpService) -> None:
    path = http.service.http_address.removeprefix("unix:")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
    submit = await http.service.peer.submits.get()
    http.service.peer.send(Row(submit.handle, 0, [70]))
    await reader.read(1)
    reset(writer)
    http.service.peer.send(*(Row(submit.handle, index, [70]) for index in range(1, 20)))
    await http.service.peer.aborts.get()


async def http_deadline(http: HttpService) -> None:
    for is_streamed in (False, True):
        await http.post("/v1/completions", {"prompt": "The fox", "timeout_s": 0.05, "stream": is_streamed})


async def http_refused(http: HttpService) -> None:
    for given in ("text/plain", "application/json; charset=latin-1"):
        await http.ask("POST", "/v1/completions", data=BODY, headers={"Content-Type": given})
    for body in ({}, {"prompt": 1}, {"prompt": "x", "max_tokens": -1}, {"prompt": "x", "model": "other"}):
        await http.post("/v1/completions", body)
    await http.post("/nope", {})
    await http.ask("DELETE", "/v1/models")


FAULTS: list[Callable[[HttpService], Awaitable[None]]] = [
    grpc_deadline,
    grpc_deadline_of_a_stream,
    grpc_deadline_without_a_scheduler,
    grpc_deadline_that_has_passed,
    grpc_cancel,
    grpc_bad_bytes,
    grpc_unknown_method,
    grpc_wrong_kind,
    grpc_too_large,
    grpc_refused,
    no_http2,
    http_half_head,
    http_half_body,
    http_broken_chunks,
    http_half_chunk,
    http_bad_head,
    http_bad_body,
    http_reset_before_an_answer,
    http_reset_of_a_stream,
    http_deadline,
    http_refused,
]


# Lines about the cell, which is not the client's doing.
_OF_CELL = ("no link to the scheduler",)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_what_clients_do_wrong_is_no_error_and_at_most_one_warning_in_the_log(
    http: HttpService, caplog: pytest.LogCaptureFixture, fault: Callable[[HttpService], Awaitable[None]]
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await fault(http)
            while not http.service.peer.submits.empty():
                http.service.peer.submits.get_nowait()
        # It is answered after what the fault has left.
        assert (await http.get("/ping")).status == 200
        page = (await http.get("/metrics")).body
    of_clients = [one for one in caplog.records if one.message not in _OF_CELL]
    assert [one.message for one in of_clients if one.levelno >= logging.ERROR] == []
    assert all(count == 1 for count in Counter((one.name, one.message) for one in of_clients).values())
    assert b'lockstep_request_failure_total{reason="OTHER"} 0.0' in page
