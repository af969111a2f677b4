"""The rendered Role is what a scheduler needs: with all of it workers are found, and without any verb it says so.

The API server is a fake one that enforces the Role. The scheduler is the rendered pod, a process with the process that
watches; in place of the kubelet and of DNS, two flags say where the account's files and the API server are.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.internal.v1 import worker_pb2
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.network.rpc import make_channel, make_server
from tests.support.clients.token_client import PROMPT, generate_tokens, seeded
from tests.support.deploy.chart import Tree, find, pod_templates, render, rendered_examples
from tests.support.deploy.chart_values import values
from tests.support.deploy.rendered_pods import NAMESPACE, Cluster, Pod, running
from tests.support.kubernetes.endpoint_slices import endpoint, make_slice, write_service_account
from tests.support.kubernetes.kube_api import KubeApi, run_kube_api
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S
from tests.support.system.polling import poll_until
from tests.support.system.ports import free_port
from tests.support.system.scraping import get, scrape
from tests.support.system.scraping import values as samples_of

SLICES = ("endpointslices", NAMESPACE)
STALENESS = "lockstep_discovery_staleness_seconds"
CELL: Tree = {
    "tls": {"trustDomain": "", "issuer": {"name": ""}, "insecure": True},
    "scheduler": {"discovery": "kubernetes", "settings": {"discovery-period-s": 1}},
    "workers": {"kind": "StatefulSet", "dp": 2},
}


def role_of(objects: list[Tree], account: str) -> Tree:
    """The one Role that a service account of the release has."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    [binding] = [each for each in find(objects, "RoleBinding") if subject in each["subjects"]]
    [role] = [each for each in find(objects, "Role") if each["metadata"]["name"] == binding["roleRef"]["name"]]
    return role


def without(role: Tree, verb: str) -> Tree:
    rules = [rule | {"verbs": [each for each in rule["verbs"] if each != verb]} for rule in role["rules"]]
    return role | {"rules": rules}


@dataclass
class WatchedCell:
    """The scheduler's pod, the API server, and the pods that it may name, each with a worker in this process."""

    api: KubeApi
    objects: list[Tree]
    scheduler: Pod
    workers: list[Pod]
    stack: AsyncExitStack
    stubs: list[Any]

    async def add_worker(self, number: int) -> None:
        """Start a worker, and add its pod to the slices as the controller of endpoints does."""
        peer = WorkerPeer()
        peer.response.layout.CopyFrom(worker_pb2.RankLayout(dp_size=1, tp_size=1))
        [service] = find(self.objects, "Service", "-groups")
        [port] = service["spec"]["ports"]
        pod = self.workers[number]
        assert service["spec"]["selector"].items() <= pod.labels.items()
        server = make_server(f"{pod.address}:{pod.port(port['targetPort'])}", [peer], internal=True)
        await server.start()
        self.stack.push_async_callback(server.stop, 0)
        ports = [{"name": port["name"], "port": pod.port(port["targetPort"]), "protocol": "TCP"}]
        name = service["metadata"]["name"]
        found = make_slice(pod.name, [endpoint(pod.address, ready=True)], service=name, ports=ports)
        self.api.store.create(SLICES, found)

    async def wait_for_workers(self, count: int) -> None:
        """Wait until this many are attached, and check that a request gets an answer."""
        client, operator = self.stubs
        await poll_until(
            lambda: operator.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True),
            lambda state: [rank.is_attached for rank in state.rank_steps] == [True] * count,
        )
        await generate_tokens(client, seeded(PROMPT, max_tokens=2), deadline_s=PATIENCE_S)

    def set_role(self, role: Tree) -> None:
        """Change the Role; what is open ends, since a server checks requests only as they begin."""
        self.api.role = role
        self.api.cut_connections()

    async def events(self) -> list[Tree]:
        """What the scheduler has logged about its watch."""
        lines = self.scheduler.log_path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if "endpoints are" in line]

    async def wait_for_event(self, number: int) -> Tree:
        """The NUMBER-th of `events`, counted from 1."""
        return (await poll_until(self.events, lambda events: len(events) >= number))[number - 1]

    async def staleness(self) -> float:
        """Seconds since the last good word, as the scheduler exports them."""
        return samples_of(await scrape(self.manage_address))[STALENESS]

    async def lists_after(self, num_requests: int) -> list[float]:
        """When lists came in after that many requests."""
        return [each.at for each in self.api.requests[num_requests:] if each.verb == "list"]

    @property
    def manage_address(self) -> str:
        """The scheduler's management port."""
        return f"{self.scheduler.address}:{self.scheduler.port('manage')}"


@asynccontextmanager
async def watched_cell(folder: Path) -> AsyncIterator[WatchedCell]:
    """Run the scheduler's pod with the token of its account, and no workers yet."""
    objects = render(values=values(CELL))
    cluster = Cluster(objects, folder / "cluster", {"models": folder})
    scheduler = cluster.of("scheduler")[0]
    assert scheduler.spec["automountServiceAccountToken"]
    # Its flags name a Service, and no host.
    scheduler.names = {}
    scheduler.mounts = {**scheduler.mounts, "/account": write_service_account(folder / "account", NAMESPACE)}
    with run_kube_api(free_port(), NAMESPACE) as api:
        api.role = role_of(objects, scheduler.spec["serviceAccountName"])
        [container] = scheduler.spec["containers"]
        container["args"] += [f"--discovery-api-server={api.url}", "--discovery-service-account=/account"]
        async with AsyncExitStack() as stack:
            stack.enter_context(running([scheduler]))
            await scheduler.wait_until_probed("readinessProbe")
            channels = [
                await stack.enter_async_context(
                    make_channel(f"{scheduler.address}:{scheduler.port(name)}", internal=True)
                )
                for name in ("direct", "cell")
            ]
            stubs = [scheduler_pb2_grpc.SchedulerServiceStub(channel) for channel in channels]
            yield WatchedCell(api, objects, scheduler, cluster.of("worker"), stack, stubs)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_without_any_verb_of_its_role_a_scheduler_says_which_and_serves_on(tmp_path: Path, verb: str) -> None:
    async with watched_cell(tmp_path) as cell:
        role = cell.api.role
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
        await cell.add_worker(0)
        await cell.wait_for_workers(1)
        assert await cell.events() == []

        cell.set_role(without(role, verb))
        forbidden = f'403 Forbidden: endpointslices.discovery.k8s.io is forbidden: User "scheduler" cannot {verb} '
        # The connection that was cut is a problem of its own.
        assert forbidden in (await cell.wait_for_event(2))["problem"]
        lists_after = partial(cell.lists_after, len(cell.api.requests))
        times = await poll_until(lists_after, lambda times: len(times) >= 2)
        # At least half of the second delay, which is 1 s.
        assert times[1] - times[0] > 0.5
        if verb == "list":
            await poll_until(cell.staleness, lambda seconds: seconds > 1)
        await cell.wait_for_workers(1)
        assert (await get(cell.manage_address, "/readyz")).status == 200
        assert len(await cell.events()) == 2, "a problem that stays is logged once"

        await cell.add_worker(1)
        cell.set_role(role)
        await cell.wait_for_workers(2)
        assert (await cell.wait_for_event(3))["message"] == "endpoints are watched again"
        await poll_until(cell.staleness, lambda seconds: seconds < 1)


def test_no_account_but_a_discovering_scheduler_s_has_a_role_or_a_token() -> None:
    for name, objects in {"two replicas": render(values=values(CELL)), **rendered_examples()}.items():
        bound = {subject["name"] for each in find(objects, "RoleBinding") for subject in each["subjects"]}
        holders = {
            template["spec"]["serviceAccountName"]
            for _, template in pod_templates(objects)
            if template["spec"]["automountServiceAccountToken"]
        }
        others = {
            template["spec"]["serviceAccountName"]
            for _, template in pod_templates(objects)
            if template["metadata"]["labels"]["app.kubernetes.io/component"] != "scheduler"
        }
        assert holders == bound, name
        assert not bound & others, name
        assert bound <= {each["metadata"]["name"] for each in find(objects, "ServiceAccount")}, name
        for account in bound:
            role_of(objects, account)
