"""How long prompts delay streaming answers, and what the remedy costs the prompts, on a CPU.

    python -m tests.bench.interference models/smollm2-135m-instruct --json interference.json
    python -m tests.bench.interference models/smollm2-135m-instruct --num-prompts 4 --num-prompt-tokens 2048

While answers stream, prompts are submitted all at once, each with one output token. The gaps between a client's
responses while prompts are computed are the inter-token latencies (ITL). They are compared with the time of a lone
chunk: the mean over the chunks of a prompt of the same length on the idle cell. The time of a single-chunk prompt,
which attends to nothing before it, is also reported.

The same is measured with the settings of a GPU, 16384 tokens per step and prefill first, as the bound for prompt
throughput. To shorten the run that cell may get fewer prompts (`--num-reference-prompts`), since its rate settles soon.
Both cells run at the same time and take turns, round by round; figures are medians over the rounds. No two prompts
share a prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import uvloop

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.bench.parts.report import Row, compare, report
from tests.bench.parts.tokens import PromptSource
from tests.support.cells.cell import start_cell

CHUNK_TOKENS = 512
PREFILL_FIRST = ("--scheduler.max-num-batched-tokens=16384", "--scheduler.enable-mixed-steps=false")
# Bounds on ITL / lone chunk time, and on prompt tokens per second relative to prefill first.
ITL_TARGET = 3.0
THROUGHPUT_TARGET = 0.9
NUM_STREAM_PROMPT_TOKENS = 16
NUM_LONE_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class Round:
    """One round on one cell."""

    one_chunk_s: float
    """The time of a single-chunk prompt on the idle cell."""
    lone_chunk_s: float
    """The mean time per chunk of a long prompt on the idle cell."""
    gaps_s: list[float]
    """Gaps between responses of streaming answers while prompts were computed."""
    tokens_per_s: float
    """Prompt tokens per second."""


def main() -> None:
    """Run the rounds, print the table, write the JSON."""
    args = _parse_args()
    flags = ["--log-level=warning", *args.serve_flag]
    with (
        start_cell(args.model_dir, *flags) as mixed,
        start_cell(args.model_dir, *flags, *PREFILL_FIRST) as prefill_first,
    ):
        rounds = uvloop.run(_run(args, (mixed.address, prefill_first.address)))
    print(f"{len(os.sched_getaffinity(0))} cores, {args.rounds} rounds, {args.num_streams} streams")
    print(
        f"{args.num_prompts} prompts of {args.num_prompt_tokens} tokens, {args.num_reference_prompts} of prefill first"
    )
    report(list(_summarise(*rounds)), args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="the model to serve")
    parser.add_argument("--num-streams", type=int, default=8, help="streaming answers")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--num-reference-prompts", type=int, help="prompts for the prefill-first cell, if different")
    parser.add_argument("--num-prompt-tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve-flag", action="append", default=[], help="a flag for both cells")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    args.num_reference_prompts = args.num_reference_prompts or args.num_prompts
    return args


async def _run(args: argparse.Namespace, addresses: Sequence[str]) -> list[list[Round]]:
    rounds: list[list[Round]] = [[] for _ in addresses]
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(make_channel(address)) for address in addresses]
        counts = (args.num_prompts, args.num_reference_prompts)
        loads = [
            Load(tokenizer_pb2_grpc.TokenizerServiceStub(channel), num_prompts, args)
            for channel, num_prompts in zip(channels, counts, strict=True)
        ]
        for _ in range(args.rounds):
            for load, measured in zip(loads, rounds, strict=True):
                measured.append(await load.run())
    return rounds


class Load:
    """The load on one cell."""

    def __init__(
        self, stub: tokenizer_pb2_grpc.TokenizerServiceStub, num_prompts: int, args: argparse.Namespace
    ) -> None:
        self._stub = stub
        self._num_streams = args.num_streams
        self._num_prompts = num_prompts
        self._num_prompt_tokens = args.num_prompt_tokens
        self._prompts = PromptSource(args.num_prompt_tokens)
        self._chunks = PromptSource(CHUNK_TOKENS, seed=2)
        self._stream_prompts = PromptSource(NUM_STREAM_PROMPT_TOKENS, seed=3)

    async def run(self) -> Round:
        """Run one round."""
        # The first one is a warm-up.
        lone_s = [await self._compute(prompt) for prompt in self._chunks.take(1 + NUM_LONE_CHUNKS)][1:]
        [long_prompt] = self._prompts.take(1)
        num_chunks = self._num_prompt_tokens / CHUNK_TOKENS
        lone_chunk_s = await self._compute(long_prompt) / num_chunks
        arrivals: list[list[float]] = [[] for _ in range(self._num_streams)]
        async with self._streaming(arrivals):
            started_at = time.perf_counter()
            await asyncio.gather(*map(self._compute, self._prompts.take(self._num_prompts)))
            ended_at = time.perf_counter()
        tokens_per_s = self._num_prompts * self._num_prompt_tokens / (ended_at - started_at)
        gaps_s = [gap for times in arrivals for gap in _gaps(times, started_at, ended_at)]
        return Round(statistics.median(lone_s), lone_chunk_s, gaps_s, tokens_per_s)

    async def _compute(self, prompt: Sequence[int]) -> float:
        """Seconds until the only token requested after a prompt."""
        started_at = time.perf_counter()
        async for response in self._generate(prompt, 1):
            usage = response.finish.usage
        if usage.num_completion_tokens != 1 or usage.num_cached_tokens:
            raise RuntimeError(f"unexpected usage: {usage}")
        return time.perf_counter() - started_at

    @contextlib.asynccontextmanager
    async def _streaming(self, arrivals: Sequence[list[float]]) -> AsyncIterator[None]:
        """Keep answers streaming, all of them already begun; records the arrival times of their responses."""
        begun = [asyncio.Event() for _ in arrivals]
        prompts = self._stream_prompts.take(len(arrivals))
        tasks = [asyncio.create_task(self._stream(*each)) for each in zip(prompts, arrivals, begun, strict=True)]
        try:
            for event in begun:
                await event.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        if not all(isinstance(end, asyncio.CancelledError) for end in ended):
            raise RuntimeError("an answer ended before the prompts did")

    async def _stream(self, prompt: Sequence[int], arrivals: list[float], begun: asyncio.Event) -> None:
        # Almost as long as the context allows.
        async for response in self._generate(prompt, 8000):
            if response.token_ids:
                arrivals.append(time.perf_counter())
                begun.set()

    def _generate(
        self, prompt: Sequence[int], max_tokens: int
    ) -> grpc.aio.UnaryStreamCall[tokenizer_pb2.GenerateRequest, tokenizer_pb2.GenerateResponse]:
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        tokens = common_pb2.TokenSequence(token_ids=prompt)
        return self._stub.Generate(tokenizer_pb2.GenerateRequest(tokens=tokens, sampling=sampling))


def _gaps(times: Sequence[float], started_at: float, ended_at: float) -> Iterator[float]:
    """Yield the gaps that overlap a time span; the last one may be open."""
    for earlier, later in zip(times, [*times[1:], ended_at], strict=True):
        if later > started_at and earlier < ended_at:
            yield later - earlier


def _summarise(mixed: Sequence[Round], prefill_first: Sequence[Round]) -> Iterator[Row]:
    lone_chunk_ms = 1e3 * statistics.median(one.lone_chunk_s for one in mixed)
    one_chunk_ms = 1e3 * statistics.median(one.one_chunk_s for one in mixed)
    yield Row("a lone prompt of one chunk", one_chunk_ms, "ms")
    yield Row("a lone chunk, mean of a long prompt's", lone_chunk_ms, "ms")
    p99_ms = _percentile_ms(mixed, 99)
    yield compare("ITL p99 beside prompts", p99_ms, "ms", reference=lone_chunk_ms, at_most=ITL_TARGET)
    yield compare("  the same, by a prompt of one chunk", p99_ms, "ms", reference=one_chunk_ms)
    yield Row("  median", _percentile_ms(mixed, 50), "ms")
    yield Row("  p99, prefill first", _percentile_ms(prefill_first, 99), "ms")
    yield Row("  longest, prefill first", _percentile_ms(prefill_first, 100), "ms")
    own, other = (statistics.median(one.tokens_per_s for one in rounds) for rounds in (mixed, prefill_first))
    yield compare("prompt tokens, beside prefill first", own, "tokens/s", reference=other, at_least=THROUGHPUT_TARGET)


def _percentile_ms(rounds: Sequence[Round], percentile: int) -> float:
    return 1e3 * statistics.median(float(np.percentile(one.gaps_s, percentile)) for one in rounds)


if __name__ == "__main__":
    main()
