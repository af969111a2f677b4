"""Alerts fire in a real Prometheus that scrapes rendered pods, and every query has an answer there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from shared.network.rpc import make_channel
from tests.deploy.test_dashboards import DASHBOARDS, panels
from tests.support.clients.client import Client, token_request
from tests.support.deploy.chart import CHART, find, render
from tests.support.deploy.prometheus import Prometheus, run_prometheus
from tests.support.deploy.rendered_pods import NAMESPACE, Cluster, Pod, running
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.polling import poll_until

SERVICES = ("worker", "scheduler", "tokenizer")
VARIABLES = {"$__rate_interval": "5m", "$namespace": NAMESPACE, "$cell": "demo"}
# Panels of what the demo does not have: drafts, TLS, a GPU, discovery, clients' keys, recurrent states.
UNANSWERED = {
    "Accepted drafts",
    "Certificates expire in",
    "Clients' keys",
    "Discovery",
    "GPU memory",
    "KV cache in use",
    "Memory of the KV cache and of states",
    "TLS files that cannot be used",
}
VALUES = {
    "cellDefaults": {"workers": {"settings": {"num-threads": 1, "kv-cache-num-blocks": 256}}},
    "monitoring": {"podMonitor": True, "rules": True},
}


@asynccontextmanager
async def monitored_demo(folder: Path) -> AsyncIterator[tuple[Cluster, Prometheus]]:
    """Run the CPU demo and a Prometheus until all targets are scraped."""
    objects = render(CHART / "examples" / "cpu-demo.yaml", values=VALUES)
    [claim] = find(objects, "PersistentVolumeClaim")
    cluster = Cluster(objects, folder / "cluster", {claim["metadata"]["name"]: folder / "models"})
    # As if the job had downloaded it.
    place = cluster.of("worker")[0].spec["containers"][0]["args"][0].removeprefix("/models/")
    write_tiny_llama(folder / "models" / place, changes={"num_hidden_layers": 2})
    pods = [pod for component in SERVICES for pod in cluster.of(component)]
    with run_prometheus(folder / "prometheus", objects, cluster.pods) as prometheus, running(pods):
        for pod in pods:
            await pod.wait_until_probed("readinessProbe")
        await poll_until(prometheus.is_ready, bool)
        # A port for each pod, and one more for the worker's rank.
        await poll_until(lambda: prometheus.query("up == 1"), lambda samples: len(samples) == len(pods) + 1)
        yield cluster, prometheus


async def load(cluster: Cluster) -> None:
    """Have requests answered, and so few refused that no alert is due."""
    ports = [("tokenizer", "grpc"), ("scheduler", "direct"), ("scheduler", "cell")]
    async with AsyncExitStack() as stack:
        channels = []
        for component, port in ports:
            pod = cluster.of(component)[0]
            channels.append(await stack.enter_async_context(make_channel(f"{pod.address}:{pod.port(port)}")))
        client = Client(*channels)
        await client.generate_all([token_request([3, 9, n], max_tokens=20, ignore_eos=True) for n in range(8)])
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate(token_request([10**9], max_tokens=1))


def kill(pods: list[Pod]) -> None:
    for pod in pods:
        pod.kill()


async def unanswered(prometheus: Prometheus) -> set[str]:
    """The panels that have a query without any sample."""
    queries = [
        (panel["title"], target["expr"])
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel.get("targets", [])
    ]
    return {title for title, query in queries if not await prometheus.query(filled_in(query))}


def filled_in(query: str) -> str:
    """A dashboard's query, with its variables as Grafana fills them in."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


async def firing(prometheus: Prometheus, *alerts: str) -> None:
    """Wait until these alerts fire and no other."""
    await poll_until(prometheus.firing, lambda names: names == set(alerts))


@pytest.mark.slow
@pytest.mark.process
async def test_alerts_fire_for_what_was_killed_and_every_query_has_an_answer(tmp_path: Path) -> None:
    async with monitored_demo(tmp_path) as (cluster, prometheus):

        async def unanswered_under_load() -> set[str]:
            await load(cluster)
            return await unanswered(prometheus)

        # Again and again: what was counted before a counter's first scrape is no increase.
        await poll_until(unanswered_under_load, lambda titles: titles <= UNANSWERED)
        rules = await poll_until(prometheus.rules, lambda rules: all(rule["health"] != "unknown" for rule in rules))
        assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
        await firing(prometheus)

        kill(cluster.of("worker"))
        await firing(prometheus, "LockstepNoWorkerAttached", "LockstepTargetDown")
        kill(cluster.of("scheduler"))
        await firing(prometheus, "LockstepNoScheduler", "LockstepTokenizerUnlinked", "LockstepTargetDown")
