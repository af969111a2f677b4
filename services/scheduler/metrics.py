"""The scheduler's metrics, named after vLLM's: read when scraped, never on the step path."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.requests.tenant_totals import MAX_TENANTS, OTHER, TenantState
from services.scheduler.cell.state import CellState, RankState
from services.scheduler.core.policy import RECOVERY_BUCKETS_S, SchedulerCounters
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.server.idle_check import IdleCheck
from shared.network.tls import Certificates
from shared.process.metrics import make_process_registry
from shared.tenants.client_keys import ClientKeys


def make_registry(
    engine: Engine,
    idle_check: IdleCheck,
    certificates: Certificates | None,
    last_seen: LastSeen | None = None,
    client_keys: ClientKeys | None = None,
) -> CollectorRegistry:
    """Make a registry for a cell, the service's certificate and keys if it has them, and this process.

    Args:
        last_seen: What discovery saw; None if the workers are configured.
    """
    return make_process_registry(CellCollector(engine, idle_check, last_seen), certificates, client_keys)


class CellCollector(Collector):
    """A cell's metrics, from one snapshot. Counters start at 0 with the process; no label comes from a client:
    tenants are named by the operator.

    Sums over the ranks have no labels; those that a load balancer reads are told by each tokenizer too. A place that no
    endpoint has is no rank; what was computed on it counts in sums.
    """

    def __init__(self, engine: Engine, idle_check: IdleCheck, last_seen: LastSeen | None) -> None:
        self._engine = engine
        self._idle_check = idle_check
        self._last_seen = last_seen

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        state = self._engine.state()
        attached = GaugeMetricFamily(
            "lockstep_worker_attached", "Whether the rank's workers are attached (1) or not (0).", labels=["rank"]
        )
        for rank in _ranks(state):
            attached.add_metric([str(rank.rank)], int(rank.is_attached))
        yield attached
        if self._last_seen is not None:
            yield from _discovery_metrics(self._last_seen, self._engine.num_unplaced_endpoints)
        yield from _request_metrics(state)
        yield from _tenant_metrics(self._engine.tenants())
        yield from _kv_cache_metrics(state)
        yield _step_metric(state)
        yield from _recovery_metrics(state.counters)
        yield from _draft_metrics(state.counters)
        yield CounterMetricFamily(
            "lockstep_integrity_checks",
            "Checks of the scheduler's internal state, made when idle.",
            self._idle_check.num_checks,
        )
        yield CounterMetricFamily(
            "lockstep_integrity_failures", "Integrity checks that failed, each a bug.", self._idle_check.num_failures
        )


def _ranks(state: CellState) -> list[RankState]:
    return [rank for rank in state.ranks if not rank.is_vacant]


def _discovery_metrics(last_seen: LastSeen, num_unplaced: int) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lockstep_discovery_staleness_seconds",
        "Time since DNS or the Kubernetes API server last reported endpoints; the last ones stay in use.",
        max(0.0, time.monotonic() - last_seen.seen_at),
    )
    yield GaugeMetricFamily(
        "lockstep_discovery_endpoints", "Endpoints that discovery knows.", len(last_seen.endpoints or ())
    )
    yield GaugeMetricFamily(
        "lockstep_discovery_unplaced_endpoints",
        "Endpoints that are idle because --max-dp others have all places.",
        num_unplaced,
    )


def _request_metrics(state: CellState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lockstep_num_requests_waiting",
        "Choices waiting for their first step, or to be prefilled again.",
        state.num_waiting,
    )
    yield GaugeMetricFamily("lockstep_num_requests_running", "Choices that hold KV blocks.", state.num_running)
    waiting = GaugeMetricFamily(
        "lockstep_rank_num_requests_waiting", "Waiting choices that are placed on the rank.", labels=["rank"]
    )
    running = GaugeMetricFamily(
        "lockstep_rank_num_requests_running", "Choices that hold KV blocks of the rank.", labels=["rank"]
    )
    for rank in _ranks(state):
        waiting.add_metric([str(rank.rank)], rank.num_waiting)
        running.add_metric([str(rank.rank)], rank.num_running)
    yield waiting
    yield running
    yield CounterMetricFamily(
        "lockstep_requests_finished", "Choices that ended, for any reason.", state.counters.num_finished
    )
    yield CounterMetricFamily(
        "lockstep_num_preemptions",
        "Times a running choice gave its KV blocks back and was queued again, at its place by arrival.",
        state.counters.num_preemptions,
    )


def _tenant_metrics(tenants: list[TenantState]) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily(
        "lockstep_tenant_requests_in_flight",
        f"Choices of the tenant that wait or run; tenants beyond {MAX_TENANTS} are counted as `{OTHER}`.",
        labels=["tenant"],
    )
    waiting = GaugeMetricFamily(
        "lockstep_tenant_requests_waiting",
        "Choices of the tenant that wait to be admitted for the first time.",
        labels=["tenant"],
    )
    refused = CounterMetricFamily(
        "lockstep_tenant_requests_refused", "Requests above the tenant's limits, refused.", labels=["tenant"]
    )
    prompt_tokens = CounterMetricFamily(
        "lockstep_tenant_prompt_tokens",
        "Prompt tokens computed for the tenant, without cached ones, counted at each choice's first token.",
        labels=["tenant"],
    )
    completion_tokens = CounterMetricFamily(
        "lockstep_tenant_completion_tokens",
        "Completion tokens sampled for the tenant, counted at each choice's end.",
        labels=["tenant"],
    )
    for tenant in tenants:
        labels = [tenant.name]
        in_flight.add_metric(labels, tenant.num_in_flight)
        waiting.add_metric(labels, tenant.num_waiting)
        refused.add_metric(labels, tenant.total.num_refused)
        prompt_tokens.add_metric(labels, tenant.total.num_prompt_tokens)
        completion_tokens.add_metric(labels, tenant.total.num_completion_tokens)
    yield from (in_flight, waiting, refused, prompt_tokens, completion_tokens)


def _kv_cache_metrics(state: CellState) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "lockstep_kv_cache_usage_perc",
        "Used KV blocks over all, 0 to 1.",
        _usage(state.num_used_blocks, state.num_blocks),
    )
    usage = GaugeMetricFamily(
        "lockstep_rank_kv_cache_usage_perc", "Used KV blocks of the rank over all of its, 0 to 1.", labels=["rank"]
    )
    blocks = GaugeMetricFamily(
        "lockstep_kv_cache_blocks",
        "KV blocks by state, in sum the pool: used, cached (free, findable by their prefix), blank (free).",
        labels=["rank", "state"],
    )
    for rank in _ranks(state):
        name = str(rank.rank)
        usage.add_metric([name], _usage(rank.num_used_blocks, rank.num_blocks))
        blocks.add_metric([name, "used"], rank.num_used_blocks)
        blocks.add_metric([name, "cached"], rank.num_cached_blocks)
        blocks.add_metric([name, "blank"], rank.num_free_blocks - rank.num_cached_blocks)
    states = GaugeMetricFamily(
        "lockstep_state_checkpoints",
        "Recurrent states that the rank can save: used, or free; none for models without them.",
        labels=["rank", "state"],
    )
    for rank in _ranks(state):
        states.add_metric([str(rank.rank), "used"], rank.num_used_checkpoints)
        states.add_metric([str(rank.rank), "free"], rank.num_checkpoints - rank.num_used_checkpoints)
    yield usage
    yield blocks
    yield states
    yield GaugeMetricFamily("lockstep_kv_cache_block_size_tokens", "Tokens per KV block.", state.block_size)
    yield CounterMetricFamily(
        "lockstep_prefix_cache_queries",
        "Tokens looked up in the prefix cache by prefills.",
        state.counters.num_prefix_queried_tokens,
    )
    yield CounterMetricFamily(
        "lockstep_prefix_cache_hits", "Tokens found in the prefix cache.", state.counters.num_prefix_hit_tokens
    )
    yield CounterMetricFamily(
        "lockstep_prefix_tokens_lost_to_state",
        "Tokens found in the prefix cache, but computed again because no recurrent state was saved after them.",
        state.counters.num_prefix_tokens_lost_to_state,
    )


def _usage(num_used: int, num_blocks: int) -> float:
    return num_used / num_blocks if num_blocks else 0.0


def _step_metric(state: CellState) -> Metric:
    metric = CounterMetricFamily(
        "lockstep_steps",
        "Steps sent to workers, by kind; a dummy computes nothing, but collectives of other ranks need it.",
        labels=["rank", "kind"],
    )
    for rank in _ranks(state):
        for kind, count in asdict(rank.num_steps).items():
            metric.add_metric([str(rank.rank), kind], count)
    return metric


def _recovery_metrics(counters: SchedulerCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "lockstep_lost_epochs",
        "Times attached workers were lost or given up; their requests were queued again.",
        counters.num_lost_epochs,
    )
    bounds = [*map(str, RECOVERY_BUCKETS_S), "+Inf"]
    sums = itertools.accumulate(counters.recoveries_by_s)
    yield HistogramMetricFamily(
        "lockstep_recovery_seconds",
        "Time from the loss of workers until each request they were computing has another token or has ended.",
        buckets=list(zip(bounds, sums, strict=True)),
        sum_value=counters.recovery_s,
    )
    yield CounterMetricFamily(
        "lockstep_poison_requests",
        "Requests that failed because they were alone in two steps that their workers did not survive.",
        counters.num_poison_requests,
    )
    yield CounterMetricFamily(
        "lockstep_refused_models",
        "Attachments given up because the workers serve another model than the cell.",
        counters.num_refused_models,
    )
    yield CounterMetricFamily(
        "lockstep_unfit_workers",
        "Attachments given up because the workers report what the scheduler cannot use.",
        counters.num_unfit_workers,
    )
    yield CounterMetricFamily(
        "lockstep_late_results",
        "Step results that arrived twice, or after their workers had been given up.",
        counters.num_late_results,
    )


def _draft_metrics(counters: SchedulerCounters) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "lockstep_spec_decode_num_draft_tokens", "Tokens that the worker drafted.", counters.num_draft_tokens
    )
    yield CounterMetricFamily(
        "lockstep_spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        counters.num_accepted_tokens,
    )
