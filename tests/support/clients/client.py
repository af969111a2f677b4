"""A client of the tokenizer service that collects whole answers and checks the invariants of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.system.patience import PATIENCE_S


class CellAddresses(Protocol):
    """The addresses of a running cell."""

    @property
    def address(self) -> str:
        """The address of its tokenizer service."""

    @property
    def scheduler_address(self) -> str:
        """The address of its scheduler service for clients."""

    @property
    def cell_address(self) -> str:
        """The address of its scheduler service for the cell."""


@dataclass
class Completion:
    """A whole choice, joined from all its responses. `accepted` and `prompt_logprobs` belong to its prompt."""

    accepted: tokenizer_pb2.Accepted
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: tokenizer_pb2.Finish | None = None
    reasoning: str = ""
    tool_calls: list[tokenizer_pb2.ToolCall] = field(default_factory=list)
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The finish reason's name without its prefix."""
        assert self.finish is not None
        return common_pb2.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_")

    def add(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Add the choice's next response."""
        assert self.finish is None, "a response after the last one"
        assert len(response.logprobs) in (0, len(response.token_ids)), "log-probabilities do not match the tokens"
        assert not (response.prompt_logprobs and self.token_ids), "prompt log-probabilities after the first token"
        self.text += response.text
        self.token_ids += response.token_ids
        self.reasoning += response.reasoning
        self.logprobs += response.logprobs
        self.prompt_logprobs += response.prompt_logprobs
        for delta in response.tool_calls:
            self._add_call(delta)
        if response.HasField("finish"):
            self.finish = response.finish

    def _add_call(self, delta: tokenizer_pb2.ToolCallDelta) -> None:
        if delta.index == len(self.tool_calls):
            self.tool_calls.append(tokenizer_pb2.ToolCall(id=delta.id, name=delta.name))
            assert delta.name, "a call without a name"
        else:
            assert (delta.id, delta.name) == ("", ""), "a call's id or name twice"
        self.tool_calls[delta.index].arguments += delta.arguments


@dataclass
class Answer:
    """All choices of a call, by (prompt, choice) number; sorted once complete."""

    choices: dict[tuple[int, int], Completion] = field(default_factory=dict)
    usage: common_pb2.Usage | None = None

    @property
    def texts(self) -> list[str]:
        """The choices' texts: prompt by prompt, each prompt's choices in order."""
        return [choice.text for _, choice in sorted(self.choices.items())]

    def add(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Add the call's next response."""
        assert self.usage is None, "a response after the last one"
        place = (response.prompt, response.choice)
        if place not in self.choices:
            first = self.choices.get((response.prompt, 0))
            assert (first is None) == response.HasField("accepted"), "accepted must come first, once per prompt"
            self.choices[place] = Completion(response.accepted if first is None else first.accepted)
        self.choices[place].add(response)
        if response.HasField("usage"):
            self.usage = response.usage

    def complete(self) -> None:
        """Check that every choice has finished and that the usage is their total, and sort the choices."""
        self.choices = dict(sorted(self.choices.items()))
        assert self.usage is not None, "the stream ended without the usage"
        finishes = {place: choice.finish for place, choice in self.choices.items()}
        assert None not in finishes.values(), "the stream ended without a finish"
        usages = {place: finish.usage for place, finish in finishes.items() if finish is not None}
        firsts = [usage for (_, number), usage in usages.items() if number == 0]
        assert self.usage == common_pb2.Usage(
            num_prompt_tokens=sum(usage.num_prompt_tokens for usage in firsts),
            num_cached_tokens=sum(usage.num_cached_tokens for usage in firsts),
            num_completion_tokens=sum(usage.num_completion_tokens for usage in usages.values()),
            num_reasoning_tokens=sum(usage.num_reasoning_tokens for usage in usages.values()),
        )


async def read_answer(call: AsyncIterable[tokenizer_pb2.GenerateResponse]) -> Answer:
    """Read all responses of a call.

    Raises:
        grpc.aio.AioRpcError: The call failed.
    """
    answer = Answer()
    async for response in call:
        answer.add(response)
    answer.complete()
    return answer


class Client:
    """A client of one cell's tokenizer and scheduler services."""

    def __init__(self, tokenizer: grpc.aio.Channel, scheduler: grpc.aio.Channel, cell: grpc.aio.Channel) -> None:
        self.tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer)
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        self._operator: Any = scheduler_pb2_grpc.SchedulerServiceStub(cell)

    async def generate(self, request: tokenizer_pb2.GenerateRequest, *, deadline_s: float | None = None) -> Completion:
        """Send one request for one choice and collect its answer.

        Raises:
            grpc.aio.AioRpcError: The request failed.
        """
        [completion] = (await self.generate_choices(request, deadline_s=deadline_s)).choices.values()
        return completion

    async def generate_choices(
        self, request: tokenizer_pb2.GenerateRequest, *, deadline_s: float | None = None
    ) -> Answer:
        """Send one request and collect all choices of all its prompts.

        Raises:
            grpc.aio.AioRpcError: The request failed.
        """
        return await read_answer(self.tokenizer.Generate(request, timeout=deadline_s))

    async def generate_all(self, requests: Iterable[tokenizer_pb2.GenerateRequest]) -> list[Completion]:
        """Send all requests concurrently."""
        return await asyncio.gather(*(self.generate(request) for request in requests))

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The scheduler's state."""
        state: scheduler_pb2.GetStateResponse = await self._operator.GetState(scheduler_pb2.GetStateRequest())
        return state

    async def abort(self, request_id: str) -> None:
        """Abort a request of any client."""
        await self.scheduler.Abort(scheduler_pb2.AbortRequest(request_id=request_id))

    async def wait_until_idle(self) -> scheduler_pb2.GetStateResponse:
        """Wait until no request is running or waiting and no block is in use; fails after five minutes."""
        return await self.wait_until(
            lambda state: not (state.num_used_blocks or state.num_waiting or state.num_running)
        )

    async def wait_until(
        self, condition: Callable[[scheduler_pb2.GetStateResponse], object]
    ) -> scheduler_pb2.GetStateResponse:
        """Wait until the scheduler's state meets a condition, and return it; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state = await self.state()
                if condition(state):
                    return state
                await asyncio.sleep(0.01)


@asynccontextmanager
async def connect(cell: CellAddresses) -> AsyncIterator[Client]:
    """Connect to a running cell."""
    async with (
        make_channel(cell.address) as tokenizer,
        make_channel(cell.scheduler_address) as scheduler,
        make_channel(cell.cell_address, internal=True) as operator,
    ):
        yield Client(tokenizer, scheduler, operator)


def text_request(text: str, **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for a text prompt, greedy by default."""
    return tokenizer_pb2.GenerateRequest(text=text, sampling=greedy(**sampling))


def token_request(token_ids: list[int], **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for a prompt of token ids, greedy by default."""
    tokens = common_pb2.TokenSequence(token_ids=token_ids)
    return tokenizer_pb2.GenerateRequest(tokens=tokens, sampling=greedy(**sampling))


def varied_requests(count: int, *, max_tokens: int) -> list[tokenizer_pb2.GenerateRequest]:
    """Requests with different prompts, greedy and sampled in turn, whose answers have `max_tokens` tokens."""
    return [
        token_request(
            [3 + number, 9, 40 + number],
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=1.0 if number % 2 else 0.0,
            seed=number,
        )
        for number in range(count)
    ]


def chat_request(*messages: tuple[str, str], **sampling: Any) -> tokenizer_pb2.GenerateRequest:
    """A request for (role, content) messages, greedy by default."""
    return tokenizer_pb2.GenerateRequest(chat=chat(*messages), sampling=greedy(**sampling))


def chat(*messages: tuple[str, str]) -> tokenizer_pb2.Chat:
    """A conversation of (role, content) messages."""
    return tokenizer_pb2.Chat(
        messages=[tokenizer_pb2.ChatMessage(role=f"ROLE_{role.upper()}", content=content) for role, content in messages]
    )


def greedy(**sampling: Any) -> common_pb2.SamplingParams:
    """Sampling parameters, greedy by default."""
    return common_pb2.SamplingParams(**{"temperature": 0.0, **sampling})
