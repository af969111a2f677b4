"""Errors on their way from a method to a client, and what servers refuse."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.errors import InvalidRequestError, KvCapacityExceededError, Violation
from shared.network.health import Health
from shared.network.rpc import ServerLimits, make_channel, make_server
from shared.network.statuses import StatusError, reason_of, status_from_rpc_error
from shared.tenants.client_keys import ClientKeys
from tests.support.clients.key_files import key_line, write_keys
from tests.support.system.ports import free_port

Failure = Callable[[grpc.aio.ServicerContext], Awaitable[None]]


class FailingServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Fails every call; a stream first gives one response."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def Tokenize(self, request: Any, context: Any) -> tokenizer_pb2.TokenizeResponse:
        await self._failure(context)
        return tokenizer_pb2.TokenizeResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        yield tokenizer_pb2.GenerateResponse(text="a")
        await self._failure(context)


def raising(error: Exception) -> Failure:
    async def failure(context: grpc.aio.ServicerContext) -> None:
        raise error

    return failure


@asynccontextmanager
async def failing_stub(tmp_path: Path, failure: Failure) -> AsyncIterator[Any]:
    address = f"unix:{tmp_path / 'x'}"
    server = make_server(address, [FailingServicer(failure)])
    await server.start()
    try:
        async with make_channel(address) as channel:
            yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    finally:
        await server.stop(None)


def logged_here(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What serving the calls logged, without what gRPC says late about an earlier test's event loop."""
    return [
        record
        for record in caplog.records
        if record.name in ("shared.network.call_interceptor", "shared.network.message_reader")
    ]


@pytest.mark.parametrize(("host", "internal"), [("127.0.0.1", False), ("localhost", False), ("127.0.0.2", True)])
async def test_no_proxy_is_used_to_loopback_or_inside_a_cell(
    monkeypatch: pytest.MonkeyPatch, host: str, *, internal: bool
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    health = Health(())
    address = f"{host}:{free_port()}"
    server = make_server(address, [health], internal=internal)
    await server.start()
    try:
        async with make_channel(address, internal=internal) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.stop(None)


async def fail_unary(tmp_path: Path, failure: Failure) -> tuple[grpc.StatusCode, status_pb2.Status]:
    async with failing_stub(tmp_path, failure) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest())
    return caught.value.code(), status_from_rpc_error(caught.value)


async def test_a_service_error_carries_its_reason_values_and_violations(tmp_path: Path) -> None:
    error = InvalidRequestError("top_p: bad", violations=[Violation("top_p", "OUT_OF_RANGE", "bad")], limit=1)

    code, status = await fail_unary(tmp_path, raising(error))

    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (code, status.code, status.message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        code_pb2.INVALID_ARGUMENT,
        "top_p: bad",
    )
    assert (info.domain, info.reason, dict(info.metadata)) == ("lockstep", "INVALID_REQUEST", {"limit": "1"})
    violation = bad_request.field_violations[0]
    assert (violation.field, violation.reason, violation.description) == ("top_p", "OUT_OF_RANGE", "bad")


async def test_a_stream_fails_after_the_responses_it_has_sent(tmp_path: Path) -> None:
    async with failing_stub(tmp_path, raising(KvCapacityExceededError("never fits"))) as stub:
        call = stub.Generate(tokenizer_pb2.GenerateRequest())
        assert (await call.read()).text == "a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(status_from_rpc_error(caught.value)) == "KV_CAPACITY_EXCEEDED"


async def test_an_unknown_errors_text_is_neither_logged_nor_revealed_to_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="shared.network.call_interceptor"):
        code, status = await fail_unary(tmp_path, raising(RuntimeError("the secret")))

    assert (code, reason_of(status)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in status.message
    assert "the secret" not in caplog.text
    # Type and place help to mend it.
    assert "_UntoldError: RuntimeError" in caplog.text
    assert Path(__file__).name in caplog.text


async def test_another_services_status_is_passed_on_unchanged(tmp_path: Path) -> None:
    original = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="gone")
    original.details.add().Pack(error_details_pb2.ErrorInfo(reason="SCHEDULER_LOST", domain="lockstep"))

    _, status = await fail_unary(tmp_path, raising(StatusError(original)))

    assert status == original


async def test_a_method_may_abort_by_itself(tmp_path: Path) -> None:
    async def abort(context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.ABORTED, "as it says")

    code, status = await fail_unary(tmp_path, abort)

    assert (code, status.message, reason_of(status)) == (grpc.StatusCode.ABORTED, "as it says", None)


class LackingServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Implements none of its methods."""

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)


async def test_a_method_missing_from_a_servicer_is_unsupported_and_not_a_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path / 'x'}"
    server = make_server(address, [LackingServicer()])
    await server.start()
    async with make_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        unary, stream = stub.Tokenize(tokenizer_pb2.TokenizeRequest()), stub.Generate(tokenizer_pb2.GenerateRequest())
        for answer in (unary, stream.read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert reason_of(status_from_rpc_error(caught.value)) == "NOT_SUPPORTED"
    await server.stop(None)
    assert not logged_here(caplog)


async def test_a_not_implemented_error_inside_a_method_is_a_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, status = await fail_unary(tmp_path, raising(NotImplementedError("abstract")))

    assert (code, reason_of(status)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert [record.message for record in logged_here(caplog)] == ["unexpected error"]


class EchoServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Waits until it may answer, and counts the waiting calls."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.calls: asyncio.Queue[None] = asyncio.Queue()

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)
        # Registered as a method that a cell port serves.
        echo = grpc.stream_stream_rpc_method_handler(self.echo, tokenizer_pb2.TokenizeRequest.FromString)
        service = grpc.method_handlers_generic_handler("lockstep.internal.v1.ExchangeService", {"Exchange": echo})
        server.add_generic_rpc_handlers((service,))

    async def Tokenize(self, request: Any, context: Any) -> tokenizer_pb2.TokenizeResponse:
        self.calls.put_nowait(None)
        await self.may_answer.wait()
        return tokenizer_pb2.TokenizeResponse()

    async def echo(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.text.encode()


@asynccontextmanager
async def echo_channel(
    tmp_path: Path,
    limits: ServerLimits = ServerLimits(),  # noqa: B008 - immutable
    *,
    internal: bool = False,
) -> AsyncIterator[tuple[EchoServicer, grpc.aio.Channel]]:
    address = f"unix:{tmp_path / 'x'}"
    servicer, health = EchoServicer(), Health(())
    server = make_server(address, [servicer, health], internal=internal, limits=limits)
    await server.start()
    try:
        async with make_channel(address) as channel:
            yield servicer, channel
    finally:
        await server.stop(None)


# A string field of one byte that is not UTF-8, and a field that is longer than the message.
UNPARSABLE = [b"\x0a\x01\xff", b"\x0a\x7fx"]


@pytest.mark.parametrize("message", UNPARSABLE)
async def test_a_message_that_cannot_be_parsed_is_an_invalid_request(
    tmp_path: Path, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with echo_channel(tmp_path) as (_, channel):
        tokenize = channel.unary_unary("/lockstep.v1.TokenizerService/Tokenize")
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokenize(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(status_from_rpc_error(caught.value)) == "INVALID_REQUEST"
    [record] = logged_here(caplog)
    assert (record.message, record.exc_info) == ("messages cannot be parsed", None)


@pytest.mark.parametrize("message", UNPARSABLE)
async def test_a_stream_ends_at_a_message_that_cannot_be_parsed(tmp_path: Path, message: bytes) -> None:
    async with echo_channel(tmp_path, internal=True) as (_, channel):
        call = channel.stream_stream("/lockstep.internal.v1.ExchangeService/Exchange")(iter([b"\x0a\x01a", message]))
        assert await call.read() == b"a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(status_from_rpc_error(caught.value)) == "INVALID_REQUEST"


# Fields of two bytes each, which no message has.
MANY_FIELDS = b"\x78\x01" * 100_000


@pytest.mark.parametrize("internal", [False, True])
async def test_messages_of_strangers_have_a_bounded_number_of_fields_on_either_port(
    tmp_path: Path, internal: bool
) -> None:
    async with echo_channel(tmp_path, internal=internal) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(MANY_FIELDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(status_from_rpc_error(caught.value)) == "INVALID_REQUEST"
    assert "at most 65536 fields" in (caught.value.details() or "")


async def test_messages_of_the_cells_own_services_are_not_counted(tmp_path: Path) -> None:
    async with echo_channel(tmp_path, internal=True) as (_, channel):
        exchange = channel.stream_stream("/lockstep.internal.v1.ExchangeService/Exchange")
        assert await exchange(iter([b"\x0a\x01a" + MANY_FIELDS])).read() == b"a"


# Frames of HTTP/2. Source: RFC 9113, sections 3.4, 4.1, 6.5, 6.7 and 6.8.
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, 0)) + bytes(4) + payload


async def count_pings(path: Path, num_pings: int) -> int:
    """Ping an idle connection, one after the other; the number answered before the server ends it."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
    num_answers = 0
    head = b""
    while num_answers < num_pings and head[3:4] != bytes((GOAWAY,)):
        if head[3:5] in (b"", bytes((PING, ACK))):
            writer.write(frame(PING, bytes(8)))
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3]))
        num_answers += head[3:5] == bytes((PING, ACK))
    writer.close()
    return num_answers


@pytest.mark.parametrize("internal", [False, True])
async def test_only_a_client_port_tolerates_many_pings_of_an_idle_client(tmp_path: Path, internal: bool) -> None:
    server = make_server(f"unix:{tmp_path}/x", [Health(())], internal=internal)
    await server.start()
    assert (await count_pings(tmp_path / "x", 50) < 50) is internal
    await server.stop(None)


async def test_a_connection_that_is_too_old_ends_after_its_calls(tmp_path: Path) -> None:
    async with echo_channel(tmp_path, ServerLimits(max_connection_age_s=0.05)) as (servicer, channel):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        call = asyncio.ensure_future(stub.Tokenize(tokenizer_pb2.TokenizeRequest()))
        await servicer.calls.get()
        # The server has asked the client to leave.
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        servicer.may_answer.set()
        await call
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest())


async def test_calls_above_the_limit_get_a_retry_delay_and_health_still_answers(
    tmp_path: Path,
) -> None:
    async with echo_channel(tmp_path, ServerLimits(max_open_calls=2)) as (servicer, channel):
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        open_calls = [asyncio.ensure_future(stub.Tokenize(tokenizer_pb2.TokenizeRequest())) for _ in range(2)]
        for _ in open_calls:
            await servicer.calls.get()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest())
        status = status_from_rpc_error(caught.value)
        retry_info = error_details_pb2.RetryInfo()
        assert (caught.value.code(), reason_of(status)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert status.details[1].Unpack(retry_info)
        assert retry_info.retry_delay.seconds == 1
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        servicer.may_answer.set()
        await asyncio.gather(*open_calls)
        await stub.Tokenize(tokenizer_pb2.TokenizeRequest())


async def test_a_tenants_open_calls_leave_room_for_others(tmp_path: Path) -> None:
    keys = ClientKeys(write_keys(tmp_path / "keys", key_line("loud", "a"), key_line("quiet", "b")))

    def call(channel: grpc.aio.Channel, key: str) -> Any:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return stub.Tokenize(tokenizer_pb2.TokenizeRequest(), metadata=(("x-api-key", key),))

    async with echo_channel(tmp_path, ServerLimits(max_open_calls=10, client_keys=keys)) as (servicer, channel):
        open_calls = [asyncio.ensure_future(call(channel, "loud")) for _ in range(8)]
        for _ in open_calls:
            await servicer.calls.get()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "loud")
        status = status_from_rpc_error(caught.value)
        retry_info = error_details_pb2.RetryInfo()
        assert (caught.value.code(), reason_of(status)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        assert status.details[1].Unpack(retry_info)
        open_calls.append(asyncio.ensure_future(call(channel, "quiet")))
        await servicer.calls.get()
        servicer.may_answer.set()
        await asyncio.gather(*open_calls)
        await call(channel, "loud")


async def test_a_taken_port_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=address):
            make_server(address, [])


async def test_two_servers_do_not_share_a_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    first = make_server(address, [])
    await first.start()

    with pytest.raises(RuntimeError, match=f"cannot listen on {address}: Address already in use"):
        make_server(address, [])

    await first.stop(None)


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        (f"unix:/tmp/{'x' * 200}", "the path has 205 bytes, and that of a socket at most 107"),
        ("unix:/nowhere/socket", "No such file or directory"),
        ("unix:/proc/version", "the file is not a socket"),
        ("192.0.2.1:7", "Cannot assign requested address"),
    ],
)
async def test_the_cause_of_an_unusable_address_is_named(address: str, cause: str) -> None:
    with pytest.raises(RuntimeError, match=f"cannot listen on {address}: {cause}"):
        make_server(address, [])


async def test_a_socket_is_refused_while_its_server_is_running_and_replaced_afterwards(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'x'}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "x"))
    server = make_server(address, [])
    await server.start()

    with pytest.raises(RuntimeError, match="already in use"):
        make_server(address, [])

    await server.stop(None)


async def test_grpc_refuses_messages_above_4_mib(tmp_path: Path) -> None:
    async with failing_stub(tmp_path, raising(RuntimeError("must not be reached"))) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="x" * 5 * 1024 * 1024))

    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
