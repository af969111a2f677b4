"""EndpointSlices as the API server's JSON, and a service account's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.kubernetes.kube_api import NAMESPACE, TOKEN
from tests.support.kubernetes.kube_store import Object

SERVICE = "workers"
SLICES = ("endpointslices", NAMESPACE)


def endpoint(address: str | None, **conditions: bool) -> Object:
    """An endpoint; None leaves it without an address."""
    return {"addresses": [] if address is None else [address], "conditions": conditions}


def make_slice(
    name: str, endpoints: list[Object] | None, *, port: int = 50053, service: str = SERVICE, **fields: Any
) -> Object:
    """A slice of a service, whose port is named `grpc`."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        **fields,
    }


def write_service_account(directory: Path, namespace: str = NAMESPACE) -> Path:
    """What kubelet mounts into a pod; returns the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "token").write_text(TOKEN, encoding="utf-8")
    (directory / "namespace").write_text(namespace, encoding="utf-8")
    return directory
