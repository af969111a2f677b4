"""Floods of concurrent calls, by gRPC and HTTP, of health watches, and of streams that are opened only to be reset.

Every wait is bounded: a hang ends as DEADLINE_EXCEEDED or TimeoutError.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.client import greedy
from tests.support.clients.http_answers import COMPLETION, RefusedError, post_streamed, post_whole
from tests.support.clients.token_client import prompt_request
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment

# The allowed outcomes of a call in a flood.
EXPECTED = frozenset({"OK", "QUEUE_FULL"})
NUM_CHANNELS = 4


@dataclass
class Outcomes:
    """How calls ended: OK, the reason of an error, or the code of one without a reason."""

    counts: Counter[str] = field(default_factory=Counter)

    @property
    def unexpected(self) -> dict[str, int]:
        """The outcomes that must not occur."""
        return {name: count for name, count in self.counts.items() if name not in EXPECTED}

    async def add(self, call: Any) -> None:
        """Read a call's responses to its end."""
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            self._add_error(error)
        else:
            self.counts["OK"] += 1

    async def add_watch(self, watch: Any) -> None:
        """Read a health watch's first response, which must be SERVING."""
        try:
            response = await watch.read()
        except grpc.aio.AioRpcError as error:
            self._add_error(error)
        else:
            is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
            self.counts["OK" if is_serving else "NOT_SERVING"] += 1

    def _add_error(self, error: grpc.aio.AioRpcError) -> None:
        self.counts[reason_of(status_from_rpc_error(error)) or error.code().name] += 1


async def flood_with_calls(address: str, num_calls: int, *, is_scheduler: bool, max_tokens: int = 4) -> Outcomes:
    """Make `num_calls` concurrent `Generate` calls over a few channels, and wait for all."""
    outcomes = Outcomes()
    async with open_channels(address) as channels:
        calls = [
            start_generate(channels[number % NUM_CHANNELS], is_scheduler=is_scheduler, max_tokens=max_tokens)
            for number in range(num_calls)
        ]
        await asyncio.gather(*(outcomes.add(call) for call in calls))
    return outcomes


async def flood_with_posts(session: aiohttp.ClientSession, num_posts: int, *, max_tokens: int = 4) -> Outcomes:
    """Send `num_posts` completions at once over HTTP, every other one streamed, and wait for all.

    An answer is OK only if it is complete; a refusal is QUEUE_FULL only if it says when to retry.
    """
    outcomes = Outcomes()

    async def post(number: int) -> str:
        body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        ask = post_streamed if number % 2 else post_whole
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await ask(session, COMPLETION, body)
        except RefusedError as error:
            is_full = (error.status, error.code) == (429, "server_overloaded")
            says_when = int(error.headers["Retry-After"]) >= 1 and int(error.headers["retry-after-ms"]) > 0
            return "QUEUE_FULL" if is_full and says_when else str(error)
        return "OK" if len(answer.choices[0].token_ids) == max_tokens else "INCOMPLETE"

    outcomes.counts.update(await asyncio.gather(*map(post, range(num_posts))))
    return outcomes


async def flood_with_watches(address: str, num_watches: int) -> Outcomes:
    """Open `num_watches` concurrent health watches over a few channels; all stay open until every one has an answer."""
    outcomes = Outcomes()
    async with open_channels(address) as channels:
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in channels]
        watches = [
            stubs[number % NUM_CHANNELS].Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            for number in range(num_watches)
        ]
        await asyncio.gather(*(outcomes.add_watch(watch) for watch in watches))
        for watch in watches:
            watch.cancel()
    return outcomes


async def flood_with_resets(
    address: str, num_streams: int, *, is_scheduler: bool, num_neighbours: int = 32
) -> Outcomes:
    """Let another process open and reset `num_streams` streams while calls and a health watch run here.

    Returns:
        The outcomes of the calls here.

    Raises:
        RuntimeError: The process failed.
        TimeoutError: The process hangs.
    """
    outcomes = Outcomes()
    async with make_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(PATIENCE_S):
            await watch.read()
        resets = asyncio.create_task(_run_resetter(address, num_streams, is_scheduler))
        try:
            while not resets.done():
                calls = [
                    start_generate(channel, is_scheduler=is_scheduler, max_tokens=8) for _ in range(num_neighbours)
                ]
                await asyncio.gather(*(outcomes.add(call) for call in calls))
        finally:
            resets.cancel()
        await resets
        assert not watch.done(), "the health watch has ended"
        watch.cancel()
    return outcomes


@asynccontextmanager
async def open_channels(address: str) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Open a few channels, each with its own connection."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(make_channel(address)) for _ in range(NUM_CHANNELS)]


def start_generate(channel: grpc.aio.Channel, *, is_scheduler: bool, max_tokens: int) -> Any:
    """Start a `Generate` call of the scheduler or the tokenizer service."""
    if is_scheduler:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return scheduler.Generate(prompt_request([1, 2, 3], max_tokens=max_tokens), timeout=PATIENCE_S)
    request = tokenizer_pb2.GenerateRequest(text="Hello", sampling=greedy(max_tokens=max_tokens))
    return tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request, timeout=PATIENCE_S)


async def _run_resetter(address: str, num_streams: int, is_scheduler: bool) -> None:
    with _start_resetter(address, num_streams, is_scheduler) as process:
        assert process.stdout is not None
        try:
            # It writes a line whenever it has made progress.
            while await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE_S):
                pass
            exit_code = await asyncio.to_thread(process.wait, PATIENCE_S)
        finally:
            process.kill()
    if exit_code:
        raise RuntimeError(f"the client that resets streams ended with {exit_code}: its error is on stderr")


def _start_resetter(address: str, num_streams: int, is_scheduler: bool) -> subprocess.Popen[bytes]:
    role = "scheduler" if is_scheduler else "tokenizer"
    command = module_command("tests.support.clients.stream_resetter", address, role, str(num_streams))
    # Not asyncio's subprocess: uvloop's fork runs gRPC's fork handlers, and gRPC has threads in this process.
    return subprocess.Popen(command, cwd=ROOT, env=module_environment(), stdout=subprocess.PIPE)
