"""Throughput and latency of one cell at several concurrencies, and its CPU use when idle.

    python -m tests.bench.serve models/smollm2-135m-instruct-float32 --reference --temperature 1 --idle

Prompts are random token ids, never reused and without common prefixes; each answer has exactly `--num-output-tokens`
tokens (`ignore_eos`). With --reference every round also times transformers' `generate` at batch 1, fp32, greedy, on all
cores, on prompts of the same kind. It runs while the cell is idle, which uses 1 % of a core, and waits while the cell
is measured. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop

from lockstep.v1 import common_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.bench.parts.load import Measurement, measure
from tests.bench.parts.reference import Reference, start_reference
from tests.bench.parts.report import Row, compare, limit, report
from tests.bench.parts.tokens import PromptSource
from tests.support.cells.cell import find_cell_processes, start_cell

# The least throughput relative to the reference, by concurrency, and of sampling relative to greedy.
TARGETS = {1: 1.5, 32: 8.0}
SAMPLED_TARGET = 0.7
IDLE_TARGET_PERCENT = 1.0
IDLE_S = 60.0
# At concurrency 1 a single request is not enough for a figure.
MIN_REQUESTS = 2
NUM_REFERENCE_REQUESTS = 2
NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of load."""

    concurrency: int
    temperature: float

    @property
    def name(self) -> str:
        """Its name in the tables."""
        sampling = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"{sampling}, concurrency {self.concurrency}"


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    with contextlib.ExitStack() as stack:
        address = args.target
        if address is None:
            address = stack.enter_context(start_cell(args.model_dir, "--log-level=warning", *args.serve_flag)).address
        processes = find_cell_processes(address)
        reference = stack.enter_context(start_reference(args.model_dir)) if args.reference else None
        rows = uvloop.run(_run_rounds(args, address, reference)) if args.concurrency else []
        if args.idle is not None:
            rows += _measure_idle(processes, args.idle)
    print(f"{len(os.sched_getaffinity(0))} cores, {args.rounds} rounds, {args.num_prompt_tokens} prompt tokens")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="the model of the cell")
    parser.add_argument("--target", help="the address of a running cell; by default one is started")
    parser.add_argument("--serve-flag", action="append", default=[], help="a flag for the started cell")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32], help="concurrent requests")
    parser.add_argument("--temperature", type=float, help="also measure sampling at this temperature")
    parser.add_argument("--reference", action="store_true", help="alternate with transformers' generate")
    parser.add_argument(
        "--idle", type=float, nargs="?", const=IDLE_S, metavar="S", help=f"also measure the idle services: {IDLE_S:g} s"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompt-tokens", type=int, default=128)
    parser.add_argument("--num-output-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


async def _run_rounds(args: argparse.Namespace, address: str, reference: Reference | None) -> list[Row]:
    temperatures = [0.0] if args.temperature is None else [0.0, args.temperature]
    kinds = [Kind(concurrency, temperature) for concurrency in args.concurrency for temperature in temperatures]
    prompts = PromptSource(args.num_prompt_tokens)
    kind_to_measurements: dict[Kind, list[Measurement]] = defaultdict(list)
    reference_tokens_per_s: list[float] = []
    async with make_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for kind in kinds:
            await _measure_kind(stub, kind, prompts, NUM_WARM_UP_TOKENS)
        if reference is not None:
            reference.tokens_per_s(prompts.take(1), NUM_WARM_UP_TOKENS)
        for _ in range(args.rounds):
            for kind in kinds:
                measurement = await _measure_kind(stub, kind, prompts, args.num_output_tokens)
                kind_to_measurements[kind].append(measurement)
            if reference is not None:
                figure = reference.tokens_per_s(prompts.take(NUM_REFERENCE_REQUESTS), args.num_output_tokens)
                reference_tokens_per_s.append(figure)
    return _summarise(kind_to_measurements, reference_tokens_per_s)


async def _measure_kind(
    stub: tokenizer_pb2_grpc.TokenizerServiceStub, kind: Kind, prompts: PromptSource, num_output_tokens: int
) -> Measurement:
    sampling = common_pb2.SamplingParams(
        max_tokens=num_output_tokens, temperature=kind.temperature, seed=1, ignore_eos=True
    )
    taken = prompts.take(max(kind.concurrency, MIN_REQUESTS))
    return await measure(stub, taken, concurrency=kind.concurrency, sampling=sampling)


def _summarise(kind_to_measurements: dict[Kind, list[Measurement]], reference_tokens_per_s: list[float]) -> list[Row]:
    rows: list[Row] = []
    throughput = {
        kind: statistics.median(measurement.tokens_per_s for measurement in measurements)
        for kind, measurements in kind_to_measurements.items()
    }
    if reference_tokens_per_s:
        reference = statistics.median(reference_tokens_per_s)
        rows.append(Row("transformers generate, batch 1", reference, "tokens/s"))
    for kind, value in throughput.items():
        metric = f"output, {kind.name}"
        if kind.temperature:
            greedy = throughput[Kind(kind.concurrency, 0.0)]
            rows.append(compare(metric, value, "tokens/s", reference=greedy, at_least=SAMPLED_TARGET))
        elif reference_tokens_per_s:
            target = TARGETS.get(kind.concurrency)
            rows.append(compare(metric, value, "tokens/s", reference=reference, at_least=target))
        else:
            rows.append(Row(metric, value, "tokens/s"))
        rows += _latency_rows(kind, kind_to_measurements[kind])
    return rows


def _latency_rows(kind: Kind, measurements: Sequence[Measurement]) -> Iterator[Row]:
    timings = [timing for measurement in measurements for timing in measurement.timings]
    name_to_seconds = {"TTFT": [t.ttft_s for t in timings], "TPOT": [t.tpot_s for t in timings]}
    for name, seconds in name_to_seconds.items():
        yield Row(f"{name} median, {kind.name}", float(np.median(seconds)) * 1e3, "ms")
        yield Row(f"{name} p99, {kind.name}", float(np.percentile(seconds, 99)) * 1e3, "ms")


def _measure_idle(processes: Sequence[psutil.Process], duration_s: float) -> Iterator[Row]:
    before = [_cpu_s(process) for process in processes]
    time.sleep(duration_s)
    percents = [
        (_cpu_s(process) - earlier) / duration_s * 100 for process, earlier in zip(processes, before, strict=True)
    ]
    metric = f"CPU of the idle services and launcher over {duration_s:g} s"
    yield limit(metric, sum(percents), "% of core", at_most=IDLE_TARGET_PERCENT)
    for process, percent in zip(processes, percents, strict=True):
        yield Row(f"  {_module(process)}", percent, "% of core")


def _module(process: psutil.Process) -> str:
    command: list[str] = process.cmdline()
    return command[command.index("-m") + 1]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
