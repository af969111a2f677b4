"""A client of the tokenizer service that collects whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.rpc import make_channel


class CellAddresses(Protocol):
    """A cell that can be reached."""

    @property
    def address(self) -> str:
        """Where its tokenizer service answers."""

    @property
    def scheduler_address(self) -> str:
        """Where its scheduler service answers."""


@dataclass
class Completion:
    """A whole answer: `text` and `token_ids` of all responses joined."""

    accepted: tokenizer_pb2.Accepted
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: tokenizer_pb2.Finish | None = None

    @property
    def reason(self) -> str:
        """The finish reason's name without its prefix."""
        assert self.finish is not None
        return common_pb2.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")


class Client:
    """Speaks to one cell."""

    def __init__(self, tokenizer: grpc.aio.Channel, scheduler: grpc.aio.Channel) -> None:
        self.tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer)
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        self.admin: Any = scheduler_pb2_grpc.SchedulerAdminServiceStub(scheduler)

    async def generate(self, request: tokenizer_pb2.GenerateRequest, *, deadline_s: float | None = None) -> Completion:
        """Send one request and collect its answer.

        Raises:
            grpc.aio.AioRpcError: the request failed.
        """
        completion: Completion | None = None
        async for response in self.tokenizer.Generate(request, timeout=deadline_s):
            if completion is None:
                completion = Completion(response.accepted)
            assert completion.finish is None, "a response behind the last one"
            completion.text += response.text
            completion.token_ids += response.token_ids
            if response.HasField("finish"):
                completion.finish = response.finish
        assert completion is not None
        assert completion.finish is not None, "the stream ended without a finish"
        return completion

    async def generate_all(self, requests: Iterable[tokenizer_pb2.GenerateRequest]) -> list[Completion]:
        """Send all requests at once."""
        return await asyncio.gather(*(self.generate(request) for request in requests))

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The scheduler's state."""
        state: scheduler_pb2.GetStateResponse = await self.scheduler.GetState(scheduler_pb2.GetStateRequest())
        return state

    async def wait_until_idle(self) -> scheduler_pb2.GetStateResponse:
        """Wait until no request holds blocks or waits; fails after a minute."""
        return await self.wait_until(
            lambda state: not (state.num_used_blocks or state.num_waiting or state.num_running)
        )

    async def wait_until(
        self, condition: Callable[[scheduler_pb2.GetStateResponse], object]
    ) -> scheduler_pb2.GetStateResponse:
        """Wait until the scheduler's state is as wanted, and return it; fails after a minute."""
        async with asyncio.timeout(60):
            while True:
                state = await self.state()
                if condition(state):
                    return state
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connect(cell: CellAddresses) -> AsyncIterator[Client]:
    """A client of a running cell."""
    async with make_channel(cell.address) as tokenizer, make_channel(cell.scheduler_address) as scheduler:
        yield Client(tokenizer, scheduler)


def text_request(text: str, **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for a text prompt, greedy unless said otherwise."""
    return tokenizer_pb2.GenerateRequest(text=text, sampling=greedy(**sampling))


def token_request(token_ids: list[int], **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for a prompt of token ids, greedy unless said otherwise."""
    tokens = common_pb2.TokenSequence(token_ids=token_ids)
    return tokenizer_pb2.GenerateRequest(tokens=tokens, sampling=greedy(**sampling))


def chat_request(*messages: tuple[str, str], **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for (role, content) messages, greedy unless said otherwise."""
    return tokenizer_pb2.GenerateRequest(chat=chat(*messages), sampling=greedy(**sampling))


def chat(*messages: tuple[str, str]) -> tokenizer_pb2.Chat:
    """A conversation of (role, content) messages."""
    return tokenizer_pb2.Chat(
        messages=[tokenizer_pb2.ChatMessage(role=f"ROLE_{role.upper()}", content=content) for role, content in messages]
    )


def greedy(**sampling: Any) -> common_pb2.SamplingParams:
    """Sampling parameters, greedy unless said otherwise."""
    return common_pb2.SamplingParams(**{"temperature": 0.0, **sampling})
