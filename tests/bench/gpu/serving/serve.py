"""A cell under load, beside transformers' continuous batching and beside the same runner driven in process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.gpu.cases import Case
from tests.bench.gpu.runners import BLOCK_SIZE, Bench, free_memory
from tests.bench.gpu.serving.cells import DummyCell, Loaded, start_dummy_cell
from tests.bench.gpu.serving.client import Clients, start_clients
from tests.bench.gpu.serving.in_process import PlainLoop
from tests.bench.gpu.serving.requests import Request, draw_requests, num_output_tokens
from tests.bench.gpu.serving.traced import idle_between_steps
from tests.bench.gpu.watch import Counts, watched
from tests.bench.parts.report import Row, compare, limit
from tests.bench.peers.environments import LeftOutError
from tests.bench.peers.gpu_peer import run_transformers

SHAPES, START_SHAPES, TINY_SHAPES = ("qwen3-0.6b",), ("qwen3-8b",), ("tiny",)
IN_PROCESS_TARGET = 0.85
PEER_TARGET = 3.0
IDLE_TARGETS = {"qwen3-8b": 0.03, "qwen3-0.6b": 0.1}
START_TARGET_S, NEXT_START_TARGET_S = 120.0, 30.0
MAX_NUM_SEQS = 512
KERNELS = Path.home() / ".triton" / "cache"
"""Where Triton keeps what it compiled, for all stages but the start of a cell."""
_NEW_KERNELS = "kernels"
"""There, below the benchmark's own folder."""
_WARM_UP_PART = 16
# On a GPU, warm-ups and starts included.
_CELL_S, _IN_PROCESS_S, _PEER_S, _START_S = 90.0, 60.0, 150.0, 90.0


def cases(bench: Bench) -> Iterator[Case]:
    """The cell first; the others are what it is compared with."""
    for shape in bench.options.selected(SHAPES, TINY_SHAPES):
        effort = bench.options.effort
        free_memory()
        requests = draw_requests(effort.num_requests, effort.lengths, seed=1)
        cell_rates: list[float] = []
        yield Case(f"{shape}: a cell", _CELL_S, partial(_cell_rows, bench, shape, requests, cell_rates))
        if not cell_rates:
            continue
        measure = partial(_in_process_rows, bench, shape, requests, cell_rates[0])
        yield Case(f"{shape}: the runner in process", _IN_PROCESS_S, measure)
        yield Case(f"{shape}: transformers", _PEER_S, partial(_peer_rows, bench, shape, requests, cell_rates[0]))


def start_cases(bench: Bench) -> Iterator[Case]:
    """From start to serving, with kernels to compile and with compiled ones; and then how idle the device is."""
    for shape in bench.options.selected(START_SHAPES, TINY_SHAPES):
        free_memory()
        if bench.device.type == "cuda":
            # Elsewhere there are no kernels to compile.
            yield Case(f"{shape}: start", _START_S, partial(_start_rows, bench, shape))
        yield Case(f"{shape}: start again", _START_S, partial(_next_start_rows, bench, shape))


def _cell_rows(bench: Bench, shape: str, requests: list[Request], cell_rates: list[float]) -> Iterator[Row]:
    effort = bench.options.effort
    flags = f"--scheduler.max-num-seqs={MAX_NUM_SEQS}", f"--scheduler.max-waiting-requests={2 * len(requests)}"
    with start_clients(effort.num_clients) as clients, start_dummy_cell(bench, shape, KERNELS, *flags) as cell:
        clients.send(cell.cell.address, _warm_up(bench))
        loaded = cell.load(clients, requests)
        idle_rows = list(_idle_rows(bench, shape, cell, clients))
    served = loaded.served
    cell_rates.append(served.tokens_per_s)
    name = f"{shape}: {len(requests)} requests, {served.num_tokens} tokens of answers"
    yield Row(f"{name}: a cell", served.tokens_per_s, "tokens/s")
    yield Row(f"{name}: TTFT, median", statistics.median(served.ttfts_s), "s")
    yield from _loaded_rows(shape, loaded)
    yield from idle_rows


def _idle_rows(bench: Bench, shape: str, cell: DummyCell, clients: Clients) -> Iterator[Row]:
    """How idle the device is while steps are traced, in a load of its own: a worker pauses to write a trace."""
    effort = bench.options.effort
    requests = draw_requests(max(1, effort.num_requests // 4), effort.lengths, seed=4)
    is_gpu = bench.device.type == "cuda"
    runs = cell.trace(clients, requests, num_steps=effort.num_steps, is_gpu=is_gpu)
    name = f"{shape}: the device idle between {effort.num_steps} traced steps"
    if not runs:
        yield Row(f"{name}: missing, as the trace has no kernels", 1, "traces")
        return
    idle, target = idle_between_steps(runs) * 100, IDLE_TARGETS.get(shape)
    yield Row(name, idle, "%") if target is None else limit(name, idle, "%", at_most=100 * target)


def _loaded_rows(shape: str, loaded: Loaded) -> Iterator[Row]:
    yield Row(f"{shape}: time that counts as no step's", loaded.outside_steps * 100, "%")
    yield limit(f"{shape}: kernels compiled while serving", loaded.num_compiled, "kernels", at_most=0)


def _in_process_rows(bench: Bench, shape: str, requests: list[Request], cell_rate: float) -> Iterator[Row]:
    seconds, counts = _timed_in_process(bench, shape, requests)
    free_memory()
    target = None if bench.options.is_tiny else IN_PROCESS_TARGET
    name, rate = f"{shape}: a cell, beside the runner in process", num_output_tokens(requests) / seconds
    yield compare(name, cell_rate, "tokens/s", reference=rate, at_least=target)
    late = counts.num_compiled + counts.num_captures
    yield limit(f"{shape}, in process: compilations and captures after the warm-up", late, "times", at_most=0)


def _timed_in_process(bench: Bench, shape: str, requests: list[Request]) -> tuple[float, Counts]:
    runner = bench.make_runner(shape)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": runner.step_proposal.num_prompt_tokens}

    def serve(some: list[Request]) -> None:
        runner.attach(block_size=BLOCK_SIZE, **limits)
        assert PlainLoop(runner, **limits).serve(some) == num_output_tokens(some), "an answer is not whole"

    serve(_warm_up(bench))
    with watched() as counts:
        return bench.clock.seconds(lambda: serve(requests)), counts


def _peer_rows(bench: Bench, shape: str, requests: list[Request], cell_rate: float) -> Iterator[Row]:
    try:
        peer = run_transformers(bench.model_dir(shape), bench.device.type, requests, _warm_up(bench))
    except LeftOutError as error:
        yield Row(f"{shape}: peer missing: {error}", 1, "peers")
        return
    target = None if bench.options.is_tiny else PEER_TARGET
    name = f"{shape}: a cell, beside transformers {peer.version} with {peer.attention} and {peer.graphs}"
    yield compare(name, cell_rate, "tokens/s", reference=peer.tokens_per_s, at_least=target)


def _start_rows(bench: Bench, shape: str) -> Iterator[Row]:
    started_at = time.monotonic()
    with start_dummy_cell(bench, shape, bench.folder / _NEW_KERNELS):
        seconds = time.monotonic() - started_at
    yield limit(f"{shape}: from start to serving, kernels to compile", seconds, "s", at_most=START_TARGET_S)


def _next_start_rows(bench: Bench, shape: str) -> Iterator[Row]:
    effort = bench.options.effort
    requests = draw_requests(max(1, effort.num_requests // 4), effort.lengths, seed=2)
    with start_clients(effort.num_clients) as clients:
        started_at = time.monotonic()
        with start_dummy_cell(bench, shape, bench.folder / _NEW_KERNELS) as cell:
            seconds = time.monotonic() - started_at
            yield limit(f"{shape}: from start to serving, kernels compiled", seconds, "s", at_most=NEXT_START_TARGET_S)
            clients.send(cell.cell.address, _warm_up(bench))
            yield from _loaded_rows(shape, cell.load(clients, requests))
            yield from _idle_rows(bench, shape, cell, clients)


def _warm_up(bench: Bench) -> list[Request]:
    """Other requests than those that are measured, whose prompts a prefix cache would know."""
    effort = bench.options.effort
    return draw_requests(-(-effort.num_requests // _WARM_UP_PART), effort.lengths, seed=3)
