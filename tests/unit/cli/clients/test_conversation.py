"""What `lockstep chat` sends in each turn, and its errors for a wrong address."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from services.cli.clients.conversation import Conversation
from services.cli.clients.wrong_service import ADMIN, TOKENIZER, WrongServiceError, explain_wrong_service
from shared.errors import NotReadyError
from shared.network.health import Health
from shared.network.rpc import make_channel, make_server


class Tokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Answers each chat with the number of its messages, refuses "bad", and never ends its answer to "long"."""

    def __init__(self) -> None:
        self.chats: list[list[tuple[int, str]]] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this release")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        self.chats.append([(message.role, message.content) for message in request.chat.messages])
        *_, last = self.chats[-1]
        if last[1] == "bad":
            raise NotReadyError("not yet")
        yield tokenizer_pb2.GenerateResponse(text=f"{len(self.chats[-1])}")
        if last[1] == "long":
            await asyncio.Event().wait()
        yield tokenizer_pb2.GenerateResponse(finish=tokenizer_pb2.Finish(reason=common_pb2.FINISH_REASON_EOS))


class Screen(io.StringIO):
    """Signals when something was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_text = asyncio.Event()

    def write(self, text: str) -> int:
        self.has_text.set()
        return super().write(text)


@pytest.fixture
async def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture
async def channel(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = make_server(f"unix:{tmp_path}/socket", [tokenizer, Health((TOKENIZER,))])
    await server.start()
    async with make_channel(f"unix:{tmp_path}/socket") as opened:
        yield opened
    await server.stop(0)


SYSTEM, USER, ASSISTANT = tokenizer_pb2.ROLE_SYSTEM, tokenizer_pb2.ROLE_USER, tokenizer_pb2.ROLE_ASSISTANT


async def test_each_turn_is_sent_with_the_previous_ones(channel: grpc.aio.Channel, tokenizer: Tokenizer) -> None:
    conversation = Conversation(channel, tokenizer_pb2.GenerateRequest(), "be brief")
    await conversation.answer("one")
    await conversation.answer("two")
    assert tokenizer.chats[-1] == [(SYSTEM, "be brief"), (USER, "one"), (ASSISTANT, "2"), (USER, "two")]

    conversation.reset()
    conversation.system = ""
    await conversation.answer("three")
    assert tokenizer.chats[-1] == [(USER, "three")]


async def test_a_failed_turn_keeps_the_conversation(channel: grpc.aio.Channel, tokenizer: Tokenizer) -> None:
    conversation = Conversation(channel, tokenizer_pb2.GenerateRequest())
    await conversation.answer("one")
    with pytest.raises(grpc.aio.AioRpcError):
        await conversation.answer("bad")
    await conversation.answer("two")
    assert tokenizer.chats[-1] == [(USER, "one"), (ASSISTANT, "1"), (USER, "two")]


async def test_a_stopped_answer_is_kept_up_to_that_point(
    channel: grpc.aio.Channel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    conversation = Conversation(channel, tokenizer_pb2.GenerateRequest())
    answering = asyncio.create_task(conversation.answer("long"))
    await screen.has_text.wait()
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    await conversation.answer("two")
    assert tokenizer.chats[-1] == [(USER, "long"), (ASSISTANT, "1"), (USER, "two")]


async def test_another_services_address_is_reported_with_the_command_for_it(channel: grpc.aio.Channel) -> None:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    with pytest.raises(WrongServiceError, match=r"^HERE is the tokenizer's address: `lockstep top` asks the scheduler"):
        async with explain_wrong_service(channel, "HERE", ADMIN):
            await stub.GetState(scheduler_pb2.GetStateRequest())


async def test_an_error_of_the_right_service_is_not_rewritten(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with explain_wrong_service(channel, "HERE", TOKENIZER):
            await tokenizer_pb2_grpc.TokenizerServiceStub(channel).GetModelInfo(tokenizer_pb2.GetModelInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
