"""The metrics of every process, of its certificate, and of its clients' keys."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.network.tls import Certificates
from shared.tenants.client_keys import ClientKeys


def make_process_registry(
    collector: Collector, certificates: Certificates | None, client_keys: ClientKeys | None = None
) -> CollectorRegistry:
    """What `collector` collects, and the metrics of the process, its certificate and its keys, if it has them."""
    registry = CollectorRegistry()
    if certificates is not None:
        registry.register(TlsCollector(certificates))
    if client_keys is not None:
        registry.register(ClientKeysCollector(client_keys))
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


class ClientKeysCollector(Collector):
    """Collects how many keys are accepted, and whether their file is usable. A scrape reads a changed file too."""

    def __init__(self, client_keys: ClientKeys) -> None:
        self._client_keys = client_keys

    def collect(self) -> Iterator[Metric]:
        """See the library's `Collector`."""
        yield GaugeMetricFamily(
            "lockstep_client_keys", "Keys of clients that are accepted.", self._client_keys.num_keys
        )
        yield GaugeMetricFamily(
            "lockstep_client_keys_stale",
            "1 while the file of clients' keys is gone or cannot be used, so that the last good one's count; otherwise "
            "0.",
            self._client_keys.is_stale,
        )
