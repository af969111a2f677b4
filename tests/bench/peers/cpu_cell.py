"""Our whole cell as a contestant on CPUs: requests go through all three services, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from lockstep.v1 import common_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.bench.parts.load import Measurement, measure
from tests.support.cells.cell import Cell, start_cell


class CellEngine:
    """A client of a running cell; created by `start_cell_engine`.

    Attributes:
        cell: The cell, which is idle between calls.
    """

    def __init__(self, cell: Cell, runner: asyncio.Runner) -> None:
        self.cell = cell
        self._runner = runner
        self._num_requests_to_tpots_s: dict[int, list[float]] = defaultdict(list)

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`."""
        sampling = common_pb2.SamplingParams(max_tokens=num_output_tokens, ignore_eos=True, temperature=0.0)
        measurement = self._runner.run(self._measure(prompts, sampling))
        if num_output_tokens > 1:
            tpots_s = [timing.tpot_s for timing in measurement.timings]
            self._num_requests_to_tpots_s[len(prompts)].append(statistics.median(tpots_s))
        return len(prompts) * num_output_tokens / measurement.tokens_per_s

    def step_s(self, num_requests: int) -> float:
        """The shortest time between two tokens so far with this many requests: the median of each load's requests."""
        return min(self._num_requests_to_tpots_s[num_requests])

    async def _measure(self, prompts: Sequence[Sequence[int]], sampling: common_pb2.SamplingParams) -> Measurement:
        async with make_channel(self.cell.address) as channel:
            await channel.channel_ready()
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            return await measure(stub, prompts, concurrency=len(prompts), sampling=sampling)


@contextlib.contextmanager
def start_cell_engine(model_dir: Path, *flags: str) -> Iterator[CellEngine]:
    """Start a cell with these flags of `lockstep serve`, and stop it at the end."""
    with (
        start_cell(model_dir, "--log-level=warning", *flags) as cell,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        yield CellEngine(cell, runner)
