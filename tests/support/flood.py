"""More calls at once than a service can serve, and streams that are opened only to be reset."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.rpc import make_channel, reason_of, status_from_rpc_error
from tests.support.client import greedy
from tests.support.token_client import prompt_request

# What a call may end with in a flood.
EXPECTED = frozenset({"OK", "QUEUE_FULL"})
NUM_CHANNELS = 4


@dataclass
class Outcomes:
    """How calls ended: OK, the reason of an error, or the code of one without a reason."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def unexpected(self) -> dict[str, int]:
        """Those that nobody may meet."""
        return {name: count for name, count in self.counts.items() if name not in EXPECTED}

    async def add(self, call: Any) -> None:
        """Read a call's responses to its end."""
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            self.counts[reason_of(status_from_rpc_error(error)) or error.code().name] += 1
        else:
            self.counts["OK"] += 1


async def flood_with_calls(address: str, num_calls: int, *, is_scheduler: bool, max_tokens: int = 4) -> Outcomes:
    """Make so many `Generate` calls at once, over a few channels, and wait for all."""
    outcomes = Outcomes()
    channels = [make_channel(address) for _ in range(NUM_CHANNELS)]
    calls = [_generate(channels[number % NUM_CHANNELS], is_scheduler, max_tokens) for number in range(num_calls)]
    await asyncio.gather(*(outcomes.add(call) for call in calls))
    for channel in channels:
        await channel.close()
    return outcomes


async def flood_with_resets(address: str, num_streams: int, *, is_scheduler: bool, num_neighbours: int = 4) -> Outcomes:
    """Open and reset so many streams beside a few calls and a health watch; returns how the neighbours ended."""
    outcomes = Outcomes()
    async with make_channel(address) as channel, make_channel(address) as hostile:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        resets = asyncio.create_task(_reset_streams(hostile, num_streams, is_scheduler))
        while not resets.done():
            calls = [_generate(channel, is_scheduler, 8) for _ in range(num_neighbours)]
            await asyncio.gather(*(outcomes.add(call) for call in calls))
        await resets
        assert not watch.done(), "a neighbour's watch has ended"
        watch.cancel()
    return outcomes


async def _reset_streams(channel: grpc.aio.Channel, num_streams: int, is_scheduler: bool) -> None:
    for number in range(num_streams):
        call = _generate(channel, is_scheduler, 400)
        # Some are reset before they leave, most when they have been sent.
        if number % 4:
            await asyncio.sleep(0)
        call.cancel()


def _generate(channel: grpc.aio.Channel, is_scheduler: bool, max_tokens: int) -> Any:
    if is_scheduler:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return stub.Generate(prompt_request([1, 2, 3], max_tokens=max_tokens))
    request = tokenizer_pb2.GenerateRequest(text="Hello", sampling=greedy(max_tokens=max_tokens))
    return tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request)
