"""A closed-loop load on a running cell, measured by its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: time to first token, and mean time per output token after it, 0 if there is none."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a load: output tokens per second over its whole duration, including prefill, and every request."""

    tokens_per_s: float
    timings: tuple[Timing, ...]


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
    return Timing(first - start, (end - first) / max(num_tokens - 1, 1))
