"""The metrics of every process, and of its certificate."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.network.tls import Certificates


def make_process_registry(collector: Collector, certificates: Certificates | None) -> CollectorRegistry:
    """What `collector` collects, and the metrics of the process and of its certificate, if it has one."""
    registry = CollectorRegistry()
    if certificates is not None:
        registry.register(TlsCollector(certificates))
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


class TlsCollector(Collector):
    """Collects when the certificate expires, and how often its renewal failed. A scrape reads changed files too."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        yield CounterMetricFamily(
            "lockstep_tls_failed_reads",
            "Changes of the TLS files that could not be used; the last good ones stay in use.",
            self._certificates.num_failed_reads,
        )
        yield GaugeMetricFamily(
            "lockstep_tls_certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, in Unix time.",
            self._certificates.expires_at.timestamp(),
        )
