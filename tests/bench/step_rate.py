"""How long the device waits for the scheduler: step rate and gaps with a stand-in worker, over real RPC.

    python -m tests.bench.step_rate --quick
    python -m tests.bench.step_rate --json step_rate.json

Two processes on a core each, connected by unix sockets:

* the real scheduler service with its default settings;
* this one, which plays both of its peers: a worker with a virtual device whose steps take --step-ms each, and the only
  tokenizer replica, which submits --num-seqs requests at a time and checks every token it receives. They share an
  event loop, since a third process would compete for the same core and add a wake-up per step.

A repeat is one batch of requests. Measured are --num-steps decode steps in which all requests have a row, on the
device's own timeline: the step rate relative to the ideal one, and the gap, which is the idle time of the device before
a step. For comparison the scheduler also runs in lockstep (--max-steps-in-flight 1), where each gap is a round trip.
Part of that gap is caused by the stand-in: while it reads outputs, an arriving step has to wait.

A repeat is discarded if it was disturbed: other processes and the hypervisor used more than 5 % of a core, or the
stand-in itself was often late. Figures are those of the best remaining repeat, or of the best one if none remains,
since a disturbance never improves a figure.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import uvloop

from lockstep.internal.v1 import worker_pb2
from shared.network.rpc import make_channel, make_server
from tests.bench.parts.exchange_load import Replica
from tests.bench.parts.machine import CpuTimes
from tests.bench.parts.report import Row, compare, limit, report
from tests.bench.parts.stand_in_worker import DeviceStep, StandInWorker
from tests.bench.parts.tokens import IntArray
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment

STEP_RATE_TARGET = 0.99
GAP_TARGET_PERCENT = 3.0
# Shorter steps are only reported.
MIN_TARGET_STEP_MS = 5.0

DEFAULT_DEPTH = 2
NUM_WARM_UP_STEPS = 50
# CPU times are read outside of the measured steps, because that takes milliseconds.
NUM_SETTLE_STEPS = 20
# With mixed steps the requests of a batch begin, and end, spread over as many steps as their prompts take.
NUM_COOL_DOWN_STEPS = 60
# The most tries, as a multiple of the requested number of undisturbed repeats.
MAX_TRIES = 3

MAX_FOREIGN_CPU_SHARE = 0.05
LATE_S = 1e-3
MAX_LATE_SHARE = 0.01

BLOCK_SIZE = 16
# The number of different prompt lengths, which are consecutive.
PROMPT_SPREAD = 128

QUICK_NUM_STEPS = 300
QUICK_NUM_REPEATS = 2

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a cell: batches of requests."""

    num_seqs: int
    num_prompt_tokens: int
    num_steps: int
    """Measured steps per batch."""
    in_phase: bool
    """Whether all rows open blocks in the same steps, instead of spread out as in ordinary loads."""

    @property
    def max_tokens(self) -> int:
        """The tokens that each request generates."""
        return NUM_WARM_UP_STEPS + self.num_steps + NUM_COOL_DOWN_STEPS

    @property
    def num_blocks(self) -> int:
        """Blocks for two batches: the second one gets unused blocks, later ones evict from the prefix cache."""
        return 2 * self.num_seqs * -(-(self.num_prompt_tokens + PROMPT_SPREAD + self.max_tokens) // BLOCK_SIZE)

    def prompt_lengths(self) -> IntArray:
        """The prompt lengths of one batch."""
        lengths = np.full(self.num_seqs, self.num_prompt_tokens)
        return lengths if self.in_phase else lengths + np.arange(self.num_seqs) % PROMPT_SPREAD


@dataclass(frozen=True, slots=True)
class Repeat:
    """The measurements of one batch of requests."""

    efficiency: float
    """Ideal duration of the steps / duration on the device's timeline."""
    delivered: float
    """Ideal duration of the steps / time in which the client received their tokens."""
    gaps: FloatArray
    """Idle time of the device before each step, as a fraction of a step."""
    scheduler_cpu_s: float
    """CPU time of the scheduler's process per step."""
    foreign_cpu_share: float
    """CPU use of other processes, in cores."""
    late_share: float
    """The share of results that the stand-in sent late."""

    @property
    def is_disturbed(self) -> bool:
        """Whether something besides the scheduler affected the figures."""
        return self.foreign_cpu_share > MAX_FOREIGN_CPU_SHARE or self.late_share > MAX_LATE_SHARE

    def gap_percent(self, percentile: int) -> float:
        """A percentile of the gaps, in percent of a step."""
        return float(np.percentile(self.gaps, percentile)) * 100

    def __str__(self) -> str:
        disturbance = f"others {self.foreign_cpu_share:.1%} of a core, {self.late_share:.1%} late"
        verdict = ", disturbed" if self.is_disturbed else ""
        return f"{self.efficiency:.2%}, gap p99 {self.gap_percent(99):.1f} % of a step ({disturbance}{verdict})"


class Cell:
    """A scheduler process between a stand-in worker and a stand-in replica."""

    def __init__(
        self, load: Load, step_s: float, *, worker: StandInWorker, replica: Replica, scheduler_pid: int
    ) -> None:
        self._load = load
        self._step_s = step_s
        self._worker = worker
        self._replica = replica
        self._scheduler_pid = scheduler_pid

    async def measure(self) -> Repeat:
        """Run and measure one batch of requests."""
        gc.collect()
        num_steps = self._load.num_steps
        num_steps_before = len(self._worker.steps)
        await self._replica.submit(self._load.prompt_lengths(), max_tokens=self._load.max_tokens)
        await self._replica.read_until(NUM_SETTLE_STEPS)
        cpu_before = CpuTimes.now(self._scheduler_pid)
        started_at = await self._replica.read_until(NUM_WARM_UP_STEPS)
        ended_at = await self._replica.read_until(NUM_WARM_UP_STEPS + num_steps)
        cpu = CpuTimes.now(self._scheduler_pid) - cpu_before
        await self._replica.read_to_end()
        steps = self._steady_steps(self._worker.steps[num_steps_before:])
        gaps = np.array([step.idle_s for step in steps]) / self._step_s
        return Repeat(
            efficiency=num_steps / (num_steps + float(gaps.sum())),
            delivered=num_steps * self._step_s / (ended_at - started_at),
            gaps=gaps,
            scheduler_cpu_s=cpu.watched_s / (NUM_WARM_UP_STEPS - NUM_SETTLE_STEPS + num_steps),
            foreign_cpu_share=cpu.foreign_s / cpu.wall_s,
            late_share=sum(step.late_s > LATE_S for step in steps) / num_steps,
        )

    def _steady_steps(self, steps: Sequence[DeviceStep]) -> Sequence[DeviceStep]:
        """Select the steps of a batch that are measured.

        Raises:
            RuntimeError: Too few steps had a row of every request.
        """
        full = [
            step for step in steps if step.kind == worker_pb2.STEP_KIND_DECODE and step.num_rows == self._load.num_seqs
        ]
        if len(full) < NUM_WARM_UP_STEPS + self._load.num_steps:
            raise RuntimeError(f"only {len(full)} steps with a row of every request")
        return full[NUM_WARM_UP_STEPS : NUM_WARM_UP_STEPS + self._load.num_steps]


def main() -> None:
    """Run the selected measurements, print the table, write the JSON."""
    args = _parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        raise SystemExit("at least two cores are needed: one is for the scheduler alone")
    # Before gRPC starts its threads.
    os.sched_setaffinity(0, cores[1:])
    gc.freeze()
    gc.disable()
    rows = uvloop.run(_run(args, scheduler_core=cores[0]))
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0, 2.0], help="durations of a step")
    parser.add_argument("--num-seqs", type=int, default=512, help="requests per batch")
    parser.add_argument("--num-prompt-tokens", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=1000, help="measured steps per repeat")
    parser.add_argument("--repeats", type=int, default=5, help="undisturbed repeats")
    parser.add_argument(
        "--in-phase", action="store_true", help="prompts of equal length, so that all open blocks in the same step"
    )
    parser.add_argument("--scheduler-flag", action="append", default=[], help="a flag for the scheduler service")
    parser.add_argument("--quick", action="store_true", help="few short repeats, even if disturbed: under a minute")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    if args.quick:
        args.num_steps, args.repeats = QUICK_NUM_STEPS, QUICK_NUM_REPEATS
    args.max_tries = args.repeats * (1 if args.quick else MAX_TRIES)
    return args


async def _run(args: argparse.Namespace, scheduler_core: int) -> list[Row]:
    load = Load(args.num_seqs, args.num_prompt_tokens, args.num_steps, args.in_phase)
    rows: list[Row] = []
    for step_ms in args.step_ms:
        for depth in (DEFAULT_DEPTH, 1):
            flags = [f"--max-steps-in-flight={depth}", f"--max-num-seqs={load.num_seqs}", *args.scheduler_flag]
            name = f"{step_ms:g} ms a step, {'lockstep' if depth == 1 else f'{depth} in flight'}"
            async with _start_cell(load, step_ms / 1e3, flags, scheduler_core) as cell:
                repeats = await _measure(cell, name, num_repeats=args.repeats, max_tries=args.max_tries)
            has_target = depth == DEFAULT_DEPTH and step_ms >= MIN_TARGET_STEP_MS
            rows += _summarise(repeats, name, ideal=1e3 / step_ms, has_target=has_target)
    return rows


async def _measure(cell: Cell, name: str, *, num_repeats: int, max_tries: int) -> list[Repeat]:
    """Measure until `num_repeats` were undisturbed or the tries are used up; reports each on stderr."""
    repeats: list[Repeat] = []
    while len(repeats) < max_tries and sum(not repeat.is_disturbed for repeat in repeats) < num_repeats:
        repeats.append(await cell.measure())
        print(f"{name}: {repeats[-1]}", file=sys.stderr)
    return repeats


@contextlib.asynccontextmanager
async def _start_cell(load: Load, step_s: float, flags: Sequence[str], scheduler_core: int) -> AsyncIterator[Cell]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        listen, worker_address = f"unix:{directory}/cell", f"unix:{directory}/worker"
        worker = StandInWorker(step_s, load.num_blocks)
        server = make_server(worker_address, [worker], internal=True)
        await server.start()
        links = [f"--listen=unix:{directory}/scheduler", f"--cell-listen={listen}", f"--workers={worker_address}"]
        flags = [*links, f"--kv-cache-block-size={BLOCK_SIZE}", *flags]
        with _start_scheduler(flags, scheduler_core) as pid:
            async with make_channel(listen, internal=True) as channel:
                replica = Replica(channel)
                await replica.connect()
                yield Cell(load, step_s, worker=worker, replica=replica, scheduler_pid=pid)
                replica.close()
        await server.stop(0)


@contextlib.contextmanager
def _start_scheduler(flags: Sequence[str], core: int) -> Iterator[int]:
    """Run the service's process alone on its core; yields the process id."""
    command = module_command("services.scheduler", "--log-level=warning", *flags)
    process = subprocess.Popen(command, cwd=ROOT, env=module_environment())
    try:
        os.sched_setaffinity(process.pid, {core})
        yield process.pid
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _summarise(repeats: Sequence[Repeat], name: str, *, ideal: float, has_target: bool) -> Iterator[Row]:
    undisturbed = [repeat for repeat in repeats if not repeat.is_disturbed]
    judged = undisturbed or repeats
    best = max(judged, key=lambda repeat: repeat.efficiency)
    median = statistics.median(repeat.efficiency for repeat in judged)
    at_least = STEP_RATE_TARGET if has_target else None
    yield compare(f"{name}: step rate, best", best.efficiency * ideal, "steps/s", reference=ideal, at_least=at_least)
    yield compare(f"{name}: step rate, median", median * ideal, "steps/s", reference=ideal)
    yield compare(f"{name}: steps delivered", best.delivered * ideal, "steps/s", reference=ideal)
    yield Row(f"{name}: gap median", best.gap_percent(50), "% of step")
    gap_p99 = Row(f"{name}: gap p99", best.gap_percent(99), "% of step")
    yield limit(gap_p99.metric, gap_p99.value, gap_p99.unit, at_most=GAP_TARGET_PERCENT) if has_target else gap_p99
    yield Row(f"{name}: scheduler CPU", best.scheduler_cpu_s * 1e6, "us a step")
    yield Row(f"{name}: disturbed repeats", len(repeats) - len(undisturbed), f"of {len(repeats)}")


if __name__ == "__main__":
    main()
