"""The tokenizer's metrics: read when somebody asks, never on a stream's way."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.tokenizer.exchange.scheduler_client import SchedulerClient


def make_registry(scheduler: SchedulerClient) -> CollectorRegistry:
    """A registry with the metrics of a replica and those of this process: CPU time, memory, start, open files."""
    registry = CollectorRegistry()
    registry.register(ReplicaCollector(scheduler))
    ProcessCollector(registry=registry)
    return registry


class ReplicaCollector(Collector):
    """All metrics of a replica, of one moment. Counters start at 0 with the process; no label comes from a client."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        counters = self._scheduler.requests.counters
        yield GaugeMetricFamily(
            "lockstep_scheduler_linked", "Whether a scheduler is linked and serves, 1 or 0.", self._scheduler.is_linked
        )
        yield CounterMetricFamily(
            "lockstep_scheduler_links_lost", "Links to a scheduler that served and was lost.", counters.num_lost_links
        )
        yield CounterMetricFamily(
            "lockstep_requests_resubmitted",
            "Requests submitted again after their scheduler was lost, each time counted.",
            counters.num_resubmissions,
        )
        yield CounterMetricFamily(
            "lockstep_poison_requests",
            "Requests ended because schedulers died of them.",
            counters.num_poison_requests,
        )
        resumes = CounterMetricFamily(
            "lockstep_resumes",
            "Times choices went on after a worker or a scheduler was lost, counted at their end; exact where their "
            "bytes are those of an undisturbed run.",
            labels=["exact"],
        )
        resumes.add_metric(["true"], counters.num_exact_resumes)
        resumes.add_metric(["false"], counters.num_other_resumes)
        yield resumes
