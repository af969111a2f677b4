"""The clients of a front end, in a process of their own: they read streams, by gRPC or by HTTP, and check their length.

    python -m tests.bench.peers.http_clients

They are ordinary clients in Python: `grpc.aio` with one channel for all streams, and `aiohttp` with a connection each.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc

from lockstep.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.bench.peers.http_load import MODEL_NAME, PROMPT
from tests.bench.peers.protocol import serve

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": PROMPT}]},
    "completion": {"prompt": PROMPT},
}
PERCENTILE = 99


@dataclass(slots=True)
class Stream:
    """What a client has read of a stream."""

    num_pieces: int = 0
    text: str = ""
    first_token_s: float = 0.0
    """From the request on."""


class Streams:
    """A number of streams at once, in each run."""

    def __init__(self, *, kind: str, address: str, num_streams: int, num_tokens: int) -> None:
        self._runner = asyncio.Runner()
        self._num_streams = num_streams
        self._stack = AsyncExitStack()
        self._read = self._runner.run(_open(self._stack, kind, address, num_tokens))

    def run(self) -> dict[str, float]:
        """Read all streams to their ends."""
        streams = self._runner.run(self._read_all())
        return {
            "num_pieces": sum(stream.num_pieces for stream in streams),
            "num_text_bytes": sum(len(stream.text.encode()) for stream in streams),
        }

    async def _read_all(self) -> Sequence[Stream]:
        return await asyncio.gather(*(self._read() for _ in range(self._num_streams)))


class FirstTokens:
    """One request at a time, by gRPC and by HTTP in turn, on connections that stay open."""

    def __init__(self, *, address: str, http_address: str, num_requests: int) -> None:
        self._runner = asyncio.Runner()
        self._num_requests = num_requests
        self._stack = AsyncExitStack()
        self._reads = self._runner.run(self._open(address, http_address))
        self._runner.run(self._measure(num_requests))

    def run(self) -> dict[str, float]:
        """The times until a client has an answer's first token, in ms."""
        figures = {}
        for kind, times_s in self._runner.run(self._measure(self._num_requests)).items():
            figures[f"{kind}_median_ms"] = 1e3 * statistics.median(times_s)
            figures[f"{kind}_p{PERCENTILE}_ms"] = 1e3 * statistics.quantiles(times_s, n=100)[PERCENTILE - 1]
        return figures

    async def _open(self, address: str, http_address: str) -> dict[str, Callable[[], Awaitable[Stream]]]:
        return {
            "grpc": await _open(self._stack, "grpc", address, 1),
            "http": await _open(self._stack, "chat", http_address, 1, is_kept=True),
        }

    async def _measure(self, num_requests: int) -> dict[str, list[float]]:
        times_s: dict[str, list[float]] = {kind: [] for kind in self._reads}
        for _ in range(num_requests):
            for kind, read in self._reads.items():
                times_s[kind].append((await read()).first_token_s)
        return times_s


async def _open(
    stack: AsyncExitStack, kind: str, address: str, num_tokens: int, *, is_kept: bool = False
) -> Callable[[], Awaitable[Stream]]:
    """Returns what reads a stream; `is_kept` if HTTP connections serve further requests."""
    if kind == "grpc":
        channel = await stack.enter_async_context(make_channel(address))
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return lambda: _read_grpc(stub, num_tokens)
    connector = aiohttp.TCPConnector(limit=0, force_close=not is_kept)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
    body = {"model": MODEL_NAME, "max_tokens": num_tokens, "stream": True, "ignore_eos": True, **PROMPTS[kind]}
    return lambda: _read_http(session, f"http://{address}{PATHS[kind]}", body)


async def _read_grpc(stub: tokenizer_pb2_grpc.TokenizerServiceStub, num_tokens: int) -> Stream:
    began_at, stream = time.perf_counter(), Stream()
    request = tokenizer_pb2.GenerateRequest()
    request.chat.messages.add(role=tokenizer_pb2.ROLE_USER, content=PROMPT)
    request.sampling.max_tokens, request.sampling.ignore_eos = num_tokens, True
    call: grpc.aio.UnaryStreamCall[Any, tokenizer_pb2.GenerateResponse] = stub.Generate(request)
    async for response in call:
        if not response.token_ids:
            continue
        if not stream.num_pieces:
            stream.first_token_s = time.perf_counter() - began_at
        stream.num_pieces += 1
        stream.text += response.text
    return stream


async def _read_http(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    began_at, stream = time.perf_counter(), Stream()
    chunks: list[bytes] = []
    async with session.post(url, json=body) as response:
        async for chunk in response.content.iter_any():
            if not chunks:
                stream.first_token_s = time.perf_counter() - began_at
            chunks.append(chunk)
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {b''.join(chunks)!r}")
    *events, done, rest = b"".join(chunks).split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        raise RuntimeError(f"a stream ended with {done!r}")
    for event in events:
        if event.startswith(b":"):
            # A comment, of a server that had nothing to say for a while.
            continue
        [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        stream.num_pieces += bool(text)
        stream.text += text or ""
    return stream


if __name__ == "__main__":
    serve({"streams": Streams, "first_tokens": FirstTokens})
