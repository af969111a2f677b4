"""Decode steps and prefills of dense models, beside the floor of the same device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import islice

from tests.bench.gpu.cases import Case
from tests.bench.gpu.configs import CONFIGS
from tests.bench.gpu.floors import decode_size, prefill_size, step_works
from tests.bench.gpu.runners import BLOCK_SIZE, GREEDY, Bench, Held, Sampling, decode_ahead, enters
from tests.bench.gpu.watch import Counts, watched
from tests.bench.report import Row, compare, limit
from tests.support.worker_steps import prefill_step

SHAPES = ("qwen3-8b", "qwen3-0.6b", "llama-3.1-8b")
TINY_SHAPES = ("tiny",)
# The shape whose long context is measured.
LONG = ("qwen3-8b", "tiny")
# Qwen3's own defaults.
QWEN3_SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20)
SAMPLING_TARGET = 1.1
REPLAY_TARGET_US = 100.0
PREFILL_TARGET = 0.6
LONG_TARGET = 0.6
_WARM_UP_STEPS = 4
# Weights, and graphs of 37 batch sizes.
_LOAD_S, _CASE_S, _LONG_S = 60.0, 8.0, 15.0


def cases(bench: Bench) -> Iterator[Case]:
    """Each shape's prefill, decode steps at each batch size, sampling, and a long context."""
    for shape in bench.options.selected(SHAPES, TINY_SHAPES):
        effort = bench.options.effort
        held = Held(shape, dense_limits(bench))
        yield Case(f"{shape}: load", _LOAD_S, partial(load_rows, bench, held, shape))
        if held.runner is None:
            continue
        yield Case(f"{shape}: prefill", _CASE_S, partial(_prefill_rows, bench, held, shape))
        for batch_size in effort.batch_sizes:
            target = decode_target(shape, batch_size)
            measure = partial(decode_rows, bench, held, shape, num_seqs=batch_size, target=target)
            yield Case(f"{shape}: decode of {batch_size}", _CASE_S, measure)
        if not shape.startswith("llama"):
            yield Case(f"{shape}: sampling", 2 * _CASE_S, partial(_sampling_rows, bench, held, shape))
        if shape in LONG:
            measure = partial(decode_rows, bench, held, shape, num_seqs=1, context=effort.long_context)
            target = None if bench.options.is_tiny else LONG_TARGET
            yield Case(f"{shape}: long context", _LONG_S, partial(measure, target=target))
        held.free()


def decode_target(shape: str, batch_size: int) -> float | None:
    """The least part of a decode step after 1024 tokens that its floor should be."""
    if shape in {"qwen3-8b", "llama-3.1-8b"}:
        return 0.75 if batch_size <= 32 else 0.7
    if shape == "qwen3-0.6b":
        return 0.33 if batch_size <= 8 else 0.6
    return None


def dense_limits(bench: Bench) -> dict[str, int]:
    """What is asked of `ModelRunner.attach`."""
    effort = bench.options.effort
    num_prompts, length = effort.prefill
    return {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": max(*effort.batch_sizes, num_prompts),
        "max_num_batched_tokens": num_prompts * length,
    }


def load_rows(bench: Bench, held: Held, shape: str, backend: str = "auto") -> Iterator[Row]:
    """Make the weights, capture the graphs, and count what that compiled."""
    with watched() as counts:
        load_s = bench.clock.seconds(lambda: _load(bench, held, shape, backend))
        yield Row(f"{held.name}: weights made", load_s, "s")
        attach_s = bench.clock.seconds(held.attach)
    name = f"{held.name}: attached, with {held.loaded.num_blocks} blocks and {counts.num_captures} captures"
    yield Row(name, attach_s, "s")
    yield Row(f"{held.name}: kernels compiled by then", counts.num_compiled, "kernels")


def _load(bench: Bench, held: Held, shape: str, backend: str) -> None:
    held.runner = bench.make_runner(shape, backend)


def decode_rows(
    bench: Bench,
    held: Held,
    shape: str,
    *,
    num_seqs: int,
    target: float | None,
    context: int | None = None,
    num_touched: float = 0.0,
) -> Iterator[Row]:
    """A decode step's mean time, each launched one ahead, and what the steps did that they must not do."""
    context = bench.options.effort.context if context is None else context
    step_s, counts = timed_decode(bench, held, num_seqs=num_seqs, context=context)
    size = decode_size(num_seqs, context, num_touched)
    floor_s = bench.rates.floor_s(step_works(CONFIGS[shape], bench.item_bytes, size))
    name = f"{held.name}: decode step of {num_seqs} after {context}"
    yield compare(name, floor_s * 1e3, "ms floor", reference=step_s * 1e3, at_least=target)
    yield from _watched_rows(f"{held.name}, {num_seqs} after {context}", counts)


def timed_decode(
    bench: Bench, held: Held, *, num_seqs: int, context: int, sampling: Sampling = GREEDY
) -> tuple[float, Counts]:
    """The mean seconds of a decode step, after a warm-up, and what happened meanwhile."""
    num_steps = bench.options.effort.num_steps
    held.fill(num_seqs, context, num_later=num_steps + _WARM_UP_STEPS + 1, sampling=sampling)
    decode_ahead(held.loaded, _WARM_UP_STEPS)
    with watched() as counts:
        seconds = bench.clock.seconds(lambda: decode_ahead(held.loaded, num_steps))
    return seconds / num_steps, counts


def _watched_rows(name: str, counts: Counts) -> Iterator[Row]:
    late = counts.num_compiled + counts.num_captures
    yield limit(f"{name}: compilations and captures after the warm-up", late, "times", at_most=0)
    if counts.replays_s:
        replay_us = statistics.median(counts.replays_s) * 1e6
        yield limit(f"{name}: the host's time for a replay", replay_us, "us", at_most=REPLAY_TARGET_US)


def _sampling_rows(bench: Bench, held: Held, shape: str) -> Iterator[Row]:
    effort = bench.options.effort
    num_seqs = max(effort.batch_sizes)
    greedy_s, _ = timed_decode(bench, held, num_seqs=num_seqs, context=effort.context)
    sampled_s, counts = timed_decode(bench, held, num_seqs=num_seqs, context=effort.context, sampling=QWEN3_SAMPLING)
    name = f"{shape}: decode step of {num_seqs}, sampled, beside greedy"
    target = None if bench.options.is_tiny else SAMPLING_TARGET
    yield compare(name, sampled_s * 1e3, "ms", reference=greedy_s * 1e3, at_most=target)
    yield from _watched_rows(f"{shape}, {num_seqs} sampled", counts)


def _prefill_rows(bench: Bench, held: Held, shape: str) -> Iterator[Row]:
    num_seqs, length = bench.options.effort.prefill
    step = prefill_step(*islice(enters(length, length + 1), num_seqs))

    def prefill_s() -> float:
        held.attach()
        return bench.clock.seconds(lambda: held.loaded.run_step(step))

    prefill_s()
    step_s = statistics.median(prefill_s() for _ in range(3))
    works = step_works(CONFIGS[shape], bench.item_bytes, prefill_size(num_seqs, length))
    floor_s = bench.rates.floor_s(works)
    target = PREFILL_TARGET if "8b" in shape else None
    name = f"{shape}: prefill of {num_seqs} x {length}"
    yield compare(name, floor_s * 1e3, "ms floor", reference=step_s * 1e3, at_least=target)
