"""The tokenizer's Prometheus metrics, collected only when scraped, never while streaming."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.tokenizer.exchange.scheduler_client import SchedulerClient
from shared.tls import Certificates
from shared.tls_metrics import TlsCollector


def make_registry(scheduler: SchedulerClient, certificates: Certificates | None) -> CollectorRegistry:
    """The metrics of the replica, of its certificate if it has one, and of the process."""
    registry = CollectorRegistry()
    if certificates is not None:
        registry.register(TlsCollector(certificates))
    registry.register(ReplicaCollector(scheduler))
    ProcessCollector(registry=registry)
    return registry


class ReplicaCollector(Collector):
    """Collects a replica's metrics. Counters start at 0 with the process. Labels never hold client data."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        counters = self._scheduler.counters
        yield GaugeMetricFamily(
            "lockstep_scheduler_linked", "1 if linked to a serving scheduler, otherwise 0.", self._scheduler.is_linked
        )
        yield CounterMetricFamily(
            "lockstep_scheduler_links_lost", "Links lost to a scheduler that was serving.", counters.num_lost_links
        )
        yield CounterMetricFamily(
            "lockstep_requests_resubmitted",
            "Resubmissions of requests whose scheduler was lost.",
            counters.num_resubmissions,
        )
        yield CounterMetricFamily(
            "lockstep_poison_requests",
            "Requests ended because they killed schedulers.",
            counters.num_poison_requests,
        )
        resumes = CounterMetricFamily(
            "lockstep_resumes",
            "Resumes of choices after a worker or a scheduler was lost, counted when the choice ends; exact if its "
            "bytes are those of an undisturbed run.",
            labels=["exact"],
        )
        resumes.add_metric(["true"], counters.num_exact_resumes)
        resumes.add_metric(["false"], counters.num_other_resumes)
        yield resumes
