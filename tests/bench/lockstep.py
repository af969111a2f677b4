"""The cost of running coupled ranks in lockstep: one scheduler's plan against an all-reduce before every step.

    python -m tests.bench.lockstep --quick
    python -m tests.bench.lockstep --json lockstep.json

    wall    the wall-clock overhead of a step with 1, 2 and 4 ranks, each a process: the real scheduler service,
            stand-in workers, and one tokenizer replica, which is this process. With workers that answer at once it is
            the whole round trip: plan, transfer and wait. With steps of --step-ms it is the idle time of a device
            before a step when the scheduler sends one ahead. Both are compared with the all-reduce on Gloo, over the
            same number of processes, that ranks without a common scheduler wait for
    cpu     processor time of the scheduler per step of all ranks, by ranks and rows: the engine and its messages.
            Tensor parallelism adds no stream and no plan, so 8 ranks represent 8 x 8
    dummies the share of ranks' steps that are dummies, and throughput, simulated, against ATOM's rules on the same
            arrivals

The processes of a cell and those of the all-reduce share the machine's cores and take turns, repeat by repeat. Other
work on the machine increases every figure, so wall-clock figures are those of the best repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import uvloop

from lockstep.internal.v1 import worker_pb2
from services.scheduler.core.policy import SchedulerPolicy
from shared.network.rpc import make_channel
from tests.bench.parts.engine_steps import CoupledEngine
from tests.bench.parts.exchange_load import Replica
from tests.bench.parts.report import Row, compare, report, run_sections
from tests.bench.parts.stand_in_worker import DeviceStep
from tests.simulation.coupled_cells import LOADS, Load, Outcome, run_atom, run_ours
from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT, module_command, module_environment

NUM_RANKS = (1, 2, 4)
NUM_WARM_UP_STEPS = 50
ROWS_PER_RANK = 8
NUM_PROMPT_TOKENS = 64
# The most idle time, relative to an all-reduce.
GAP_TARGET = 1.0

CPU_DP_SIZES = (1, 2, 4, 8)
CPU_ROWS = (64, 512)
# The most growth of the cost per rank; not 1, because caches hold less of each of many ranks.
CPU_TARGET = 1.15

DUMMY_DP_SIZE = 4
DUMMY_SEEDS = (1, 2, 3)
DUMMY_POLICY = SchedulerPolicy(
    max_num_seqs=64, max_num_batched_tokens=4096, enable_mixed_steps=False, max_prefill_wait_steps=2
)
DUMMY_TARGET = 1.0
THROUGHPUT_TARGET = 0.995

_GLOO_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Effort:
    """The length of a run."""

    num_repeats: int
    num_steps: int
    num_cpu_turns: int
    num_cpu_steps: int


FULL = Effort(num_repeats=5, num_steps=1000, num_cpu_turns=20, num_cpu_steps=100)
QUICK = Effort(num_repeats=1, num_steps=100, num_cpu_turns=2, num_cpu_steps=25)


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch of requests, in seconds per step: wall time, idle time of a device, and the scheduler's CPU time."""

    step_s: float
    idle_s: float
    scheduler_cpu_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The repeats with one number of ranks."""

    null: list[Turn] = field(default_factory=list)
    """With workers that answer at once."""
    ahead: list[Turn] = field(default_factory=list)
    """With a step sent ahead."""
    agreements: list[list[float]] = field(default_factory=list)
    """Seconds of each all-reduce."""


def main() -> None:
    """Run the selected sections, print the table, write the JSON."""
    args = _parse_args()
    rows = run_sections(SECTIONS, args.only, args)
    print(f"{len(os.sched_getaffinity(0))} cores, {args.effort.num_repeats} repeats")
    report(rows, args.json)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short repeats")
    parser.add_argument("--step-ms", type=float, default=5.0, help="duration of a step when one is sent ahead")
    parser.add_argument(
        "--num-ranks", type=int, nargs="+", default=list(NUM_RANKS), metavar="N", help="ranks of the wall section"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="the sections to run")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    args.effort = QUICK if args.quick else FULL
    return args


# Wall clock.


def _wall(args: argparse.Namespace) -> Iterator[Row]:
    num_steps, step_us = args.effort.num_steps, args.step_ms * 1e3
    for num_ranks in args.num_ranks:
        measured = Measured()
        for _ in range(args.effort.num_repeats):
            measured.null.append(uvloop.run(_measure_cell(num_ranks, 0.0, depth=1, num_steps=num_steps)))
            measured.ahead.append(uvloop.run(_measure_cell(num_ranks, step_us, depth=2, num_steps=num_steps)))
            measured.agreements.append(_measure_gloo(num_ranks, num_steps))
        yield from _wall_rows(num_ranks, measured, args.step_ms)


def _wall_rows(num_ranks: int, measured: Measured, step_ms: float) -> Iterator[Row]:
    name = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    agreement_us = min(map(statistics.fmean, measured.agreements)) * 1e6
    yield Row(f"{name}: all-reduce, mean", agreement_us, "us")
    yield Row(f"{name}: all-reduce, p99", min(map(_p99, measured.agreements)) * 1e6, "us")
    turn_us = min(turn.step_s for turn in measured.null) * 1e6
    yield compare(f"{name}: plan + wire + wait", turn_us, "us", reference=agreement_us)
    idle_us = min(turn.idle_s for turn in measured.ahead) * 1e6
    # A single rank needs no agreement.
    at_most = GAP_TARGET if num_ranks > 1 else None
    metric = f"{name}: device idle, {step_ms:g} ms steps, one ahead"
    yield compare(metric, idle_us, "us", reference=agreement_us, at_most=at_most)
    yield Row(f"{name}: scheduler CPU a step", min(turn.scheduler_cpu_s for turn in measured.ahead) * 1e6, "us")


def _p99(durations: Sequence[float]) -> float:
    return float(np.percentile(durations, 99))


async def _measure_cell(num_ranks: int, step_us: float, *, depth: int, num_steps: int) -> Turn:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        workers = [_start_worker(directory, rank, num_ranks, step_us) for rank in range(num_ranks)]
        listen = f"unix:{directory}/cell"
        flags = [f"--listen=unix:{directory}/scheduler", f"--cell-listen={listen}"]
        flags += [f"--max-steps-in-flight={depth}", f"--max-num-seqs={ROWS_PER_RANK}"]
        flags.append("--workers=" + ",".join(f"unix:{directory}/worker-{rank}" for rank in range(num_ranks)))
        if num_ranks > 1:
            flags.append("--coupled")
        with _started(["services.scheduler", "--log-level=warning", *flags]) as scheduler:
            async with _connect(listen) as replica:
                began_at, ended_at, cpu_s = await _run_batch(replica, scheduler.pid, num_ranks, num_steps)
        idle_s = [_idle_s(worker, began_at, ended_at) for worker in workers]
    return Turn((ended_at - began_at) / num_steps, statistics.fmean(idle_s), cpu_s / num_steps)


async def _run_batch(
    replica: Replica, scheduler_pid: int, num_ranks: int, num_steps: int
) -> tuple[float, float, float]:
    """Serve requests that fill all ranks; returns the start and end of the measured steps, and their CPU time."""
    prompts = np.full(num_ranks * ROWS_PER_RANK, NUM_PROMPT_TOKENS)
    await replica.submit(prompts, max_tokens=2 * NUM_WARM_UP_STEPS + num_steps)
    began_at = await replica.read_until(NUM_WARM_UP_STEPS)
    cpu_s = _cpu_s(scheduler_pid)
    ended_at = await replica.read_until(NUM_WARM_UP_STEPS + num_steps)
    cpu_s = _cpu_s(scheduler_pid) - cpu_s
    await replica.read_to_end()
    return began_at, ended_at, cpu_s


@contextlib.asynccontextmanager
async def _connect(listen: str) -> AsyncIterator[Replica]:
    async with make_channel(listen, internal=True) as channel:
        replica = Replica(channel)
        try:
            await replica.connect()
            yield replica
        finally:
            replica.close()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _start_worker(directory: str, rank: int, num_ranks: int, step_us: float) -> subprocess.Popen[str]:
    flags = [f"--address=unix:{directory}/worker-{rank}", f"--dp-rank={rank}", f"--dp-size={num_ranks}"]
    return _start(["tests.bench.parts.stand_in_worker", *flags, f"--step-us={step_us}"])


def _idle_s(worker: subprocess.Popen[str], began_at: float, ended_at: float) -> float:
    """End a worker; returns the mean idle time of its device before the decode steps in a time span."""
    output, _ = worker.communicate(timeout=PATIENCE_S)
    steps = [DeviceStep(*fields) for fields in json.loads(output)]
    idle_s = [
        step.idle_s
        for step in steps
        if began_at <= step.started_at <= ended_at and step.kind == worker_pb2.STEP_KIND_DECODE
    ]
    return statistics.fmean(idle_s)


def _measure_gloo(num_ranks: int, num_steps: int) -> list[float]:
    """Seconds of each all-reduce on rank 0."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        flags = [f"--size={num_ranks}", f"--store={directory}/store", f"--num-steps={num_steps}"]
        ranks = [_start(["tests.bench.parts.gloo_rank", f"--rank={rank}", *flags]) for rank in range(num_ranks)]
        outputs = [rank.communicate(timeout=_GLOO_TIMEOUT_S)[0] for rank in ranks]
    durations: list[float] = json.loads(outputs[0])
    return durations


@contextlib.contextmanager
def _started(module_and_flags: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = _start(module_and_flags)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def _start(module_and_flags: Sequence[str]) -> subprocess.Popen[str]:
    environment = module_environment() | {"OMP_NUM_THREADS": "1"}
    command = module_command(*module_and_flags)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


# The scheduler's processor time.


def _cpu(args: argparse.Namespace) -> Iterator[Row]:
    for num_rows in CPU_ROWS:
        engines = {dp_size: CoupledEngine(dp_size, num_rows) for dp_size in CPU_DP_SIZES}
        step_us = dict.fromkeys(engines, math.inf)
        # In short turns, since the machine's speed varies over time.
        for _ in range(args.effort.num_cpu_turns):
            for dp_size, engine in engines.items():
                step_us[dp_size] = min(step_us[dp_size], engine.measure_step_s(args.effort.num_cpu_steps) * 1e6)
        for dp_size, value in step_us.items():
            yield Row(f"{dp_size} x {num_rows} rows: scheduler CPU a step", value, "us")
        most = CPU_DP_SIZES[-1]
        metric = f"  of these a rank, {most} of them beside 1"
        yield compare(metric, step_us[most] / most, "us", reference=step_us[1], at_most=CPU_TARGET)


# Dummies.


def _dummies(_: argparse.Namespace) -> Iterator[Row]:
    for load in LOADS:
        ours, atom = _serve(load, run_ours), _serve(load, run_atom)
        # When requests arrive in multiples of the ranks, round robin is already optimal.
        has_target = load.burst == 1
        yield compare(
            f"{load.name}, {DUMMY_DP_SIZE} ranks: dummies, beside ATOM's rules",
            ours.dummy_share * 100,
            "%",
            reference=atom.dummy_share * 100,
            at_most=DUMMY_TARGET if has_target else None,
        )
        yield compare(
            f"{load.name}, {DUMMY_DP_SIZE} ranks: throughput",
            ours.tokens_per_s,
            "tokens/s",
            reference=atom.tokens_per_s,
            at_least=THROUGHPUT_TARGET,
        )


def _serve(load: Load, run: Callable[..., Outcome]) -> Outcome:
    outcomes = [run(load.draw(seed), DUMMY_DP_SIZE, DUMMY_POLICY) for seed in DUMMY_SEEDS]
    return Outcome(
        sum(one.num_rank_steps for one in outcomes),
        sum(one.num_dummies for one in outcomes),
        sum(one.num_tokens for one in outcomes),
        sum(one.duration_s for one in outcomes),
    )


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {"wall": _wall, "cpu": _cpu, "dummies": _dummies}

if __name__ == "__main__":
    main()
