"""A flood of one tenant's calls, in a process of its own.

    python -m tests.support.clients.flood_process KIND NUM_CALLS KEY ADDRESS HTTP_ADDRESS

It keeps so many calls open until its stdin ends: what ends is asked again, what is refused after a pause. It writes a
line once it has made the first calls, and at the end another, JSON with how calls ended.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.client import greedy, token_request
from tests.support.clients.flood import NUM_CHANNELS, open_channels
from tests.support.clients.http_answers import COMPLETION
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment

Request = tokenizer_pb2.GenerateRequest
# About as long as the tiny model's context allows.
LONG = 500
_NUM_MESSAGES = 1000
_PAUSE_S = 0.2


def _stream(number: int) -> Request:
    return token_request([1 + number % 50, 2, 3], max_tokens=LONG, ignore_eos=True)


def _choices(number: int) -> Request:
    request = _stream(number)
    request.sampling.n = 8
    return request


def _chat(number: int) -> Request:
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        tokenizer_pb2.ChatMessage(role=next(roles), content=f"{number} {place}") for place in range(_NUM_MESSAGES)
    ]
    return Request(
        chat=tokenizer_pb2.Chat(messages=messages), sampling=greedy(max_tokens=4), truncate_prompt_tokens=100
    )


def _grammar(number: int) -> Request:
    # Each is another one, so that none is remembered.
    form = tokenizer_pb2.StructuredOutput(regex=f"([a-z]{{1,{200 + number}}}x){{{1 + number % 40}}}[0-9]{{1,300}}")
    return Request(text="The fox", structured_output=form, sampling=greedy(max_tokens=4))


def _long_prompt(number: int) -> Request:
    # Of 8,000 tokens, of which a small model gets what it can read; no two have a block in common that is cached.
    text = f"the quick brown fox {number} jumps over the lazy dog " * 890
    return Request(text=text, sampling=greedy(max_tokens=4), truncate_prompt_tokens=8000)


GRPC_KINDS: dict[str, Callable[[int], Request]] = {
    "streams": _stream,
    "choices": _choices,
    "chats": _chat,
    "grammars": _grammar,
    "prompts": _long_prompt,
}
HTTP_KIND = "http"
KINDS = (*GRPC_KINDS, HTTP_KIND)


@asynccontextmanager
async def run_flood(
    kind: str, num_calls: int, key: str, address: str, http_address: str
) -> AsyncIterator[Counter[str]]:
    """Run the process; what is yielded has, at the end, how many calls ended in which way."""
    outcomes = Counter[str]()
    with _start(kind, str(num_calls), key, address, http_address) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE_S), "no flood"
            yield outcomes
            process.stdin.close()
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), PATIENCE_S)
            outcomes.update(json.loads(line))
        finally:
            process.kill()


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    command = module_command("tests.support.clients.flood_process", *arguments)
    # Not asyncio's subprocess: uvloop's fork runs gRPC's fork handlers, and gRPC has threads in this process.
    return subprocess.Popen(command, cwd=ROOT, env=module_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """Run until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("num_calls", type=int)
    parser.add_argument("key")
    parser.add_argument("address")
    parser.add_argument("http_address")
    args = parser.parse_args()
    flood = _flood_http if args.kind == HTTP_KIND else _flood_grpc
    _say(json.dumps(asyncio.run(flood(args))))


async def _flood_grpc(args: argparse.Namespace) -> Counter[str]:
    outcomes, make = Counter[str](), GRPC_KINDS[args.kind]
    metadata = (("authorization", f"Bearer {args.key}"),)
    async with open_channels(args.address) as channels:
        stubs: list[Any] = [tokenizer_pb2_grpc.TokenizerServiceStub(channel) for channel in channels]

        async def ask(number: int) -> None:
            try:
                async for _ in stubs[number % NUM_CHANNELS].Generate(make(number), metadata=metadata):
                    pass
            except grpc.aio.AioRpcError as error:
                outcomes[reason_of(status_from_rpc_error(error)) or error.code().name] += 1
                await asyncio.sleep(_PAUSE_S)
            else:
                outcomes["OK"] += 1

        await _keep_asking(ask, args.num_calls)
    return outcomes


async def _flood_http(args: argparse.Namespace) -> Counter[str]:
    outcomes = Counter[str]()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    headers = {"Authorization": f"Bearer {args.key}"}
    async with aiohttp.ClientSession(
        f"http://{args.http_address}", connector=connector, timeout=timeout, headers=headers
    ) as session:

        async def ask(number: int) -> None:
            prompt = [1 + number % 50, 2, 3]
            body = {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "stream": True}
            try:
                async with session.post(COMPLETION, json=body) as answer:
                    outcomes["OK" if answer.status == 200 else (await answer.json())["error"]["code"]] += 1
                    async for _ in answer.content.iter_any():
                        pass
            except aiohttp.ClientError as error:
                outcomes[type(error).__name__] += 1
                await asyncio.sleep(_PAUSE_S)

        await _keep_asking(ask, args.num_calls)
    return outcomes


async def _keep_asking(ask: Callable[[int], Awaitable[None]], num_calls: int) -> None:
    async def ask_for_ever(first: int) -> None:
        for number in itertools.count(first, num_calls):
            await ask(number)

    tasks = [asyncio.create_task(ask_for_ever(number)) for number in range(num_calls)]
    await asyncio.sleep(0)
    _say("begun")
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
