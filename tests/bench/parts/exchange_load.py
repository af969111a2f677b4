"""A stand-in for a tokenizer replica: submits batches of requests over one Exchange stream and checks every token."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import common_pb2
from shared.network.heartbeat import HEARTBEAT_S
from shared.request.limits import TOKEN_DTYPE
from tests.bench.parts.tokens import VOCABULARY, IntArray, expected_tokens

CONNECT_TIMEOUT_S = 30.0

_HANDLE_DTYPE = np.dtype("<u4")


class Replica:
    """One stream, with one batch of requests at a time; their prompts share no prefix.

    Each request's seed is its handle, which identifies it to the stand-in worker. Any token of the wrong value, order
    or number raises RuntimeError.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = exchange_pb2_grpc.ExchangeServiceStub(channel)
        self._call = stub.Exchange(wait_for_ready=True)
        self._turn = asyncio.Lock()
        self._beats = asyncio.create_task(self._beat())
        self._random = np.random.default_rng(1)
        self._first_handle = 1
        self._max_tokens = 0
        self._num_running = 0
        # Tokens received so far, by request of the batch.
        self._num_tokens: IntArray = np.empty(0, np.int64)

    async def connect(self) -> None:
        """Wait until the scheduler has a worker.

        Raises:
            TimeoutError: It got none within 30 s.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            response = await self._call.read()
            while response is not grpc.aio.EOF and response.HasField("heartbeat"):
                response = await self._call.read()
        if response is grpc.aio.EOF or not response.HasField("cell_info"):
            raise RuntimeError(f"unexpected first message of an Exchange: {response}")

    async def submit(self, prompt_lengths: IntArray, *, max_tokens: int) -> None:
        """Submit one request per prompt length, for exactly `max_tokens` each; the previous batch must have ended."""
        self._first_handle += len(self._num_tokens)
        self._max_tokens = max_tokens
        self._num_running = len(prompt_lengths)
        self._num_tokens = np.zeros(len(prompt_lengths), np.int64)
        submits = [
            exchange_pb2.Submit(
                handle=handle,
                request_id=f"request-{handle}",
                prompt_token_ids=self._random.integers(VOCABULARY, size=length).astype(TOKEN_DTYPE).tobytes(),
                max_tokens=max_tokens,
                top_p=1.0,
                seed=handle,
                ignore_eos=True,
                attempt=1,
            )
            for handle, length in enumerate(prompt_lengths, self._first_handle)
        ]
        await self._write(exchange_pb2.ExchangeRequest(submits=submits))

    async def read_until(self, num_tokens: int) -> float:
        """Read until each request has `num_tokens` tokens; returns when that was, in seconds of `time.monotonic`."""
        while self._num_tokens.min() < num_tokens:
            await self._read()
        return time.monotonic()

    async def read_to_end(self) -> None:
        """Read until every request has ended."""
        while self._num_running:
            await self._read()

    def close(self) -> None:
        """End the stream."""
        self._beats.cancel()
        self._call.cancel()

    async def _write(self, message: exchange_pb2.ExchangeRequest) -> None:
        async with self._turn:
            await self._call.write(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._write(exchange_pb2.ExchangeRequest(is_heartbeat=True))

    async def _read(self) -> None:
        response = await self._call.read()
        if response is grpc.aio.EOF:
            raise RuntimeError(f"the scheduler ended the stream: {await self._call.details()}")
        outputs = response.outputs
        if outputs.handles:
            self._take_tokens(outputs)
        for end in outputs.ends:
            self._take_end(end)

    def _take_tokens(self, outputs: exchange_pb2.Outputs) -> None:
        requests = np.frombuffer(outputs.handles, _HANDLE_DTYPE).astype(np.int64) - self._first_handle
        counts = np.frombuffer(outputs.counts, TOKEN_DTYPE)
        first_indexes = np.frombuffer(outputs.first_indexes, TOKEN_DTYPE)
        if not np.array_equal(first_indexes, self._num_tokens[requests]):
            raise RuntimeError("a token is missing or repeated")
        # Rows may have several tokens; most have one.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        seeds = np.repeat(requests, counts) + self._first_handle
        expected = expected_tokens(seeds, np.repeat(first_indexes, counts) + offsets)
        if not np.array_equal(np.frombuffer(outputs.token_ids, TOKEN_DTYPE), expected):
            raise RuntimeError("a token is not the one that the worker sampled")
        self._num_tokens[requests] += counts

    def _take_end(self, end: exchange_pb2.RequestEnd) -> None:
        has_all = self._num_tokens[end.handle - self._first_handle] == end.num_completion_tokens == self._max_tokens
        if end.finish_reason != common_pb2.FINISH_REASON_MAX_TOKENS or not has_all:
            raise RuntimeError(f"a request did not end at max_tokens: {end}")
        self._num_running -= 1
