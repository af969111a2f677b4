"""A real Envoy in front of tokenizers, with a configuration beside the chart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from shared.network.addresses import join_address, split_address
from shared.network.tls import TlsFiles
from tests.support.system.package_tools import tool
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT

_FILES = ROOT / "deploy" / "helm" / "lockstep" / "files"
CONFIGS = {"grpc": _FILES / "envoy.yaml", "http": _FILES / "envoy-http.yaml"}
"""The configuration for clients of each protocol."""
_POLL_S = 0.02


class EnvoyConfig:
    """A configuration, with the addresses of a test: of tokenizers, of the listener and of the admin interface."""

    def __init__(self, tokenizers: Sequence[str], tls: TlsFiles | None = None, *, protocol: str = "grpc") -> None:
        """Read that of a protocol; `tokenizers` are at `HOST:PORT`, and without `tls` they have none."""
        self.address, self.admin_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._config: dict[str, Any] = yaml.safe_load(CONFIGS[protocol].read_text(encoding="utf-8"))
        self._config["admin"] = {"address": _socket(self.admin_address)}
        resources = self._config["static_resources"]
        [self._listener], [cluster] = resources["listeners"], resources["clusters"]
        self._cluster: dict[str, Any] = cluster
        self._listener["address"] = _socket(self.address)
        if protocol == "http":
            # A tokenizer on loopback takes no other host.
            self.health_check["http_health_check"]["host"] = "localhost"
        [group] = cluster["load_assignment"]["endpoints"]
        group["lb_endpoints"] = [{"endpoint": {"address": _socket(address)}} for address in tokenizers]
        if tls is None:
            del cluster["transport_socket"]
        else:
            context = cluster["transport_socket"]["typed_config"]["common_tls_context"]["validation_context"]
            context["trusted_ca"]["filename"] = str(tls.authority)
            [name] = context["match_typed_subject_alt_names"]
            name["matcher"]["exact"] = f"tokenizer.{tls.trust_domain}"

    @property
    def manager(self) -> dict[str, Any]:
        """How clients' connections are served."""
        [chain] = self._listener["filter_chains"]
        [manager] = chain["filters"]
        config: dict[str, Any] = manager["typed_config"]
        return config

    @property
    def route(self) -> dict[str, Any]:
        """What is done with a call."""
        [host] = self.manager["route_config"]["virtual_hosts"]
        action: dict[str, Any] = host["routes"][-1]["route"]
        return action

    @property
    def cluster(self) -> dict[str, Any]:
        """What Envoy knows of tokenizers."""
        return self._cluster

    @property
    def health_check(self) -> dict[str, Any]:
        """How it asks whether a tokenizer gets calls."""
        check: dict[str, Any]
        [check] = self._cluster["health_checks"]
        return check

    @property
    def keepalive(self) -> dict[str, Any]:
        """How often tokenizers are pinged."""
        [protocol] = self._cluster["typed_extension_protocol_options"].values()
        options: dict[str, Any] = protocol["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
        return options

    def write(self, path: Path) -> None:
        """Write it as JSON, which Envoy reads."""
        path.write_text(json.dumps(self._config), encoding="utf-8")


class Envoy:
    """A running Envoy; `start_envoy` makes one.

    Attributes:
        address: Where clients call it.
    """

    def __init__(self, config: EnvoyConfig) -> None:
        self.address = config.address
        self._admin = f"http://{config.admin_address}"

    async def wait_for_healthy(self, *tokenizers: str) -> None:
        """Wait until exactly these tokenizers get calls, by Envoy's own health checks; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            healthy = await self.healthy()
            while healthy != set(tokenizers):
                await asyncio.sleep(_POLL_S)
                healthy = await self.healthy()

    async def healthy(self) -> set[str]:
        """The tokenizers that get calls; none before Envoy answers."""
        with contextlib.suppress(urllib.error.URLError):
            clusters = json.loads(await asyncio.to_thread(self._ask, "/clusters?format=json"))["cluster_statuses"]
            return {_address(host) for each in clusters for host in each["host_statuses"] if _is_healthy(host)}
        return set()

    async def stat(self, name: str) -> int:
        """A counter of the cluster of tokenizers; 0 before Envoy answers."""
        path = f"/stats?format=json&filter=^cluster\\.tokenizers\\.{name}$"
        with contextlib.suppress(urllib.error.URLError):
            return sum(each["value"] for each in json.loads(await asyncio.to_thread(self._ask, path))["stats"])
        return 0

    def _ask(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self._admin}{path}") as response:
            return bytes(response.read())


@contextlib.contextmanager
def start_envoy(config: EnvoyConfig, folder: Path) -> Iterator[Envoy]:
    """Start Envoy without waiting for it; it is killed at the end."""
    path = folder / "envoy.json"
    config.write(path)
    flags = ["--config-path", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    with subprocess.Popen([str(tool("envoy")), *flags]) as process:
        try:
            yield Envoy(config)
        finally:
            process.kill()


def _socket(address: str) -> dict[str, Any]:
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}


def _address(host: dict[str, Any]) -> str:
    socket = host["address"]["socket_address"]
    return join_address(socket["address"], socket["port_value"])


def _is_healthy(host: dict[str, Any]) -> bool:
    status = host["health_status"]
    return status.get("eds_health_status") == "HEALTHY" and "failed_active_health_check" not in status
