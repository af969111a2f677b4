"""A DNS server for pods: dnsmasq, which answers with the addresses of EndpointSlices, ready or published as if."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.kubernetes.control_plane import ApiServer, running
from tests.support.kubernetes.machine import DNS_ADDRESS

_PERIOD_S = 0.5
_DNS = """
keep-in-foreground
bind-interfaces
no-hosts
no-resolv
user=root
local=/cluster.local/
listen-address={address}
addn-hosts={hosts}
pid-file={hosts}.pid
"""


def endpoints(server: ApiServer) -> Iterator[tuple[str, str, str]]:
    """The addresses that are ready: `SERVICE.NAMESPACE`, the pod's name of its own or nothing, the address."""
    for each in server.get("/apis/discovery.k8s.io/v1/endpointslices")["items"]:
        service = each["metadata"].get("labels", {}).get("kubernetes.io/service-name", "")
        for endpoint in each["endpoints"] or ():
            if endpoint["conditions"].get("ready"):
                name = f"{service}.{each['metadata']['namespace']}"
                yield name, endpoint.get("hostname", ""), endpoint["addresses"][0]


@contextmanager
def run_dns(server: ApiServer, folder: Path) -> Iterator[None]:
    """Run it; it follows the API server."""
    hosts, config, is_over = folder / "hosts", folder / "dnsmasq.conf", threading.Event()
    hosts.touch()
    config.write_text(_DNS.format(address=DNS_ADDRESS, hosts=hosts), encoding="utf-8")
    with running("dnsmasq", {"conf-file": config}, folder) as process:

        def follow() -> None:
            while not is_over.wait(_PERIOD_S):
                text = hosts.read_text(encoding="utf-8")
                with suppress(OSError):
                    text = "".join(sorted(_host_lines(server)))
                if text != hosts.read_text(encoding="utf-8"):
                    hosts.write_text(text, encoding="utf-8")
                    process.send_signal(signal.SIGHUP)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def _host_lines(server: ApiServer) -> Iterator[str]:
    for service, host, address in endpoints(server):
        yield f"{address} {service}.svc.cluster.local\n"
        if host:
            yield f"{address} {host}.{service}.svc.cluster.local\n"
