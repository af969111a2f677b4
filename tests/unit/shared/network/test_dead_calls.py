"""Handlers that go on after their call is over: its deadline has passed, or its client is gone."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.errors import DeadlinePassedError
from shared.network.response_writer import ResponseWriter
from shared.network.rpc import ServerLimits, make_channel, make_server

ENDS = ("error", "write", "writer", "answer")
Response = tokenizer_pb2.GenerateResponse


class Late(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Ends each call in its own way, after gRPC has cancelled it."""

    def __init__(self, end: str) -> None:
        self.end = end
        self.begun = asyncio.Event()
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on `server`."""
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def Generate(self, request: tokenizer_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        error: BaseException | None = None
        try:
            await self._end_late(context)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.ended.put_nowait(error)

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.TokenizeResponse:
        try:
            await self._end_late(context)
        finally:
            self.ended.put_nowait(None)
        return tokenizer_pb2.TokenizeResponse()

    async def _end_late(self, context: grpc.aio.ServicerContext) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.end == "write":
                await context.write(Response(text="x"))
            elif self.end == "writer":
                with ResponseWriter(context, 30.0) as writer:
                    await writer.write(Response(text="x"))
            elif self.end == "error":
                raise DeadlinePassedError("the deadline passed") from None


@pytest.mark.parametrize(
    ("end", "method", "is_cancelled"), list(itertools.product(ENDS, ("stream", "one"), (False, True)))
)
async def test_a_call_that_ends_after_its_client_leaves_nothing_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str, method: str, is_cancelled: bool
) -> None:
    if method == "one" and end.startswith("write"):
        end = "answer"
    servicer, address = Late(end), f"unix:{tmp_path}/server"
    server = make_server(address, [servicer], limits=ServerLimits())
    await server.start()
    async with make_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

        async def call() -> None:
            timeout_s = None if is_cancelled else 0.2
            if method == "one":
                await stub.Tokenize(tokenizer_pb2.TokenizeRequest(), timeout=timeout_s)
            else:
                await stub.Generate(tokenizer_pb2.GenerateRequest(), timeout=timeout_s).read()

        with caplog.at_level(logging.WARNING):
            # A deadline may pass before the call has reached its handler.
            while not servicer.begun.is_set():
                calling = asyncio.create_task(call())
                if is_cancelled:
                    await servicer.begun.wait()
                    calling.cancel()
                with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                    await calling
            error = await servicer.ended.get()
            await server.stop(0)
    if end == "writer":
        assert isinstance(error, asyncio.CancelledError)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
