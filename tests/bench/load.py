"""A closed-loop load on a running cell, measured by its client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

# From here on all tokens are ordinary in every vocabulary used here; the first ones may be special.
_FIRST_TOKEN_ID = 1000
_LAST_TOKEN_ID = 40_000


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: time to first token, and mean time per output token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a load: output tokens per second over its whole duration, including prefill, and every request."""

    tokens_per_s: float
    timings: tuple[Timing, ...]


class PromptSource:
    """Random prompts, never reused and without common prefixes, so that the prefix cache has no effect."""

    def __init__(self, num_tokens: int, *, seed: int = 1) -> None:
        self._num_tokens = num_tokens
        self._random = random.Random(seed)

    def take(self, count: int) -> list[list[int]]:
        """Draw the next prompts."""
        return [
            [self._random.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(self._num_tokens)]
            for _ in range(count)
        ]


async def measure(
    stub: tokenizer_pb2_grpc.TokenizerServiceStub,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    sampling: common_pb2.SamplingParams,
) -> Measurement:
    """Send every prompt with `concurrency` in flight, each as soon as an earlier one has ended."""
    waiting = iter(prompts)
    timings: list[Timing] = []
    start = time.perf_counter()
    await asyncio.gather(*(_send_from(waiting, stub, sampling, timings) for _ in range(concurrency)))
    duration_s = time.perf_counter() - start
    return Measurement(len(prompts) * sampling.max_tokens / duration_s, tuple(timings))


async def _send_from(
    waiting: Iterator[Sequence[int]],
    stub: tokenizer_pb2_grpc.TokenizerServiceStub,
    sampling: common_pb2.SamplingParams,
    timings: list[Timing],
) -> None:
    for prompt in waiting:
        tokens = common_pb2.TokenSequence(token_ids=prompt)
        timings.append(await _time_request(stub, tokenizer_pb2.GenerateRequest(tokens=tokens, sampling=sampling)))


async def _time_request(
    stub: tokenizer_pb2_grpc.TokenizerServiceStub, request: tokenizer_pb2.GenerateRequest
) -> Timing:
    start = time.perf_counter()
    first: float | None = None
    usage = common_pb2.Usage()
    async for response in stub.Generate(request):
        if first is None and response.token_ids:
            first = time.perf_counter()
        usage = response.finish.usage
    end = time.perf_counter()
    num_tokens = request.sampling.max_tokens
    if first is None or usage.num_completion_tokens != num_tokens or usage.num_cached_tokens:
        raise RuntimeError(f"unexpected usage: {usage}")
    return Timing(first - start, (end - first) / (num_tokens - 1))
