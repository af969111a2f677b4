"""The scheduler's metrics, named after vLLM's: read from the engine when somebody asks, never on the step path."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.engine import CellState, Engine
from services.scheduler.idle_check import IdleCheck


def make_registry(engine: Engine, idle_check: IdleCheck) -> CollectorRegistry:
    """A registry with the metrics of a cell and those of this process: CPU time, memory, start, open files."""
    registry = CollectorRegistry()
    registry.register(CellCollector(engine, idle_check))
    ProcessCollector(registry=registry)
    return registry


class CellCollector(Collector):
    """All metrics of a cell, of one moment. Counters start at 0 with the process; no label comes from a client."""

    def __init__(self, engine: Engine, idle_check: IdleCheck) -> None:
        self._engine = engine
        self._idle_check = idle_check

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        state = self._engine.state()
        yield GaugeMetricFamily(
            "lockstep_worker_attached", "Whether a worker is attached and steps can run, 1 or 0.", int(state.ready)
        )
        yield from _request_metrics(state)
        yield from _kv_cache_metrics(state)
        yield from _step_metrics(state)
        yield from _draft_metrics(state)
        yield CounterMetricFamily(
            "lockstep_integrity_checks",
            "Checks of the scheduler's own books, made when idle.",
            self._idle_check.num_checks,
        )
        yield CounterMetricFamily(
            "lockstep_integrity_failures", "Of those, checks that failed: a bug.", self._idle_check.num_failures
        )


def _request_metrics(state: CellState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lockstep_num_requests_waiting",
        "Choices of requests that wait for their first step, or to be prefilled again.",
        state.num_waiting,
    )
    yield GaugeMetricFamily(
        "lockstep_num_requests_running", "Choices of requests that hold KV blocks.", state.num_running
    )
    yield CounterMetricFamily(
        "lockstep_requests_finished", "Choices of requests that ended, by whatever reason.", state.counters.num_finished
    )
    yield CounterMetricFamily(
        "lockstep_preemptions",
        "Times a choice that ran gave its KV blocks back and went to the front of the queue.",
        state.counters.num_preemptions,
    )


def _kv_cache_metrics(state: CellState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lockstep_kv_cache_usage_ratio",
        "Used KV blocks over all, 0 to 1.",
        state.num_used_blocks / state.num_blocks if state.num_blocks else 0.0,
    )
    blocks = GaugeMetricFamily(
        "lockstep_kv_cache_blocks",
        "KV blocks by state, together the pool: used, cached (free, with a prefix somebody may ask for), blank (free).",
        labels=["state"],
    )
    blocks.add_metric(["used"], state.num_used_blocks)
    blocks.add_metric(["cached"], state.num_cached_blocks)
    blocks.add_metric(["blank"], state.num_free_blocks - state.num_cached_blocks)
    yield blocks
    yield GaugeMetricFamily("lockstep_kv_cache_block_size_tokens", "Tokens per KV block.", state.block_size)
    yield CounterMetricFamily(
        "lockstep_prefix_cache_queries",
        "Tokens that prefills asked the prefix cache for.",
        state.counters.num_prefix_queried_tokens,
    )
    yield CounterMetricFamily(
        "lockstep_prefix_cache_hits", "Of those, tokens found in it.", state.counters.num_prefix_hit_tokens
    )


def _step_metrics(state: CellState) -> Iterator[Metric]:
    steps = CounterMetricFamily("lockstep_steps", "Steps sent to the worker, by kind.", labels=["kind"])
    steps.add_metric(["prefill"], state.counters.num_prefill_steps)
    steps.add_metric(["decode"], state.counters.num_decode_steps)
    steps.add_metric(["mixed"], state.counters.num_mixed_steps)
    yield steps
    yield CounterMetricFamily(
        "lockstep_lost_epochs",
        "Times the attached worker was lost or given up; its requests were queued again.",
        state.counters.num_lost_epochs,
    )


def _draft_metrics(state: CellState) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "lockstep_spec_decode_num_draft_tokens", "Tokens that the worker drafted.", state.counters.num_draft_tokens
    )
    yield CounterMetricFamily(
        "lockstep_spec_decode_num_accepted_tokens",
        "Of those, tokens that turned out to be the ones drawn.",
        state.counters.num_accepted_tokens,
    )
