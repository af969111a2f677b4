"""The chart's pods run as rendered: processes on loopback serve, pass their probes, and survive the loss of a node."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
import yaml

from shared.network.rpc import Peer, make_channel
from shared.network.tls import Certificates, Role, TlsFiles
from tests.support.cells.rank_nodes import (
    RankNode,
    closing_nodes,
    damage_under_load,
    refusal_of,
    restart_all,
    restart_launcher,
)
from tests.support.cells.rolling_cell import RollingClient
from tests.support.deploy.chart import CHART, LEADER_WORKER_SETS, find, render
from tests.support.deploy.chart_values import REGISTRY
from tests.support.deploy.rendered_pods import Cluster, Pod, logging_failures, running
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.model_hub import Repository, run_model_hub
from tests.support.system.patience import PATIENCE_S
from tests.support.system.scraping import get

EXAMPLES = CHART / "examples"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
SERVICES = ("worker", "scheduler", "tokenizer")
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"
TRUST_DOMAIN = "deepseek.example.org"
# As much as a test needs.
SMALL = {"num-threads": 1, "kv-cache-num-blocks": 256}


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Cluster]:
    """The pods of the CPU demo, with a claim that is empty, and a small model on a hub on loopback."""
    objects = render(EXAMPLES / "cpu-demo.yaml", values={"cellDefaults": {"workers": {"settings": SMALL}}})
    [claim], [job] = find(objects, "PersistentVolumeClaim"), find(objects, "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    name, _, commit = container["args"][0].partition("@")
    model = write_tiny_llama(tmp_path / "model", changes={"num_hidden_layers": 2})
    (tmp_path / "claim").mkdir()
    with run_model_hub() as hub:
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.repositories[name] = Repository(files, commit=commit)
        container["env"] += [{"name": "HF_ENDPOINT", "value": hub.url}, {"name": "NO_PROXY", "value": "127.0.0.1"}]
        yield Cluster(objects, tmp_path / "cluster", {claim["metadata"]["name"]: tmp_path / "claim"})


async def test_the_cpu_demo_runs_as_rendered(demo: Cluster) -> None:
    cluster = demo
    pods = [pod for component in SERVICES for pod in cluster.of(component)]
    assert len(pods) == 4
    fill_claim(cluster)
    with running(pods):
        for probe in PROBES:
            for pod in pods:
                await pod.wait_until_probed(probe)
        tests = cluster.of("test")
        assert len(tests) == 2
        for test in tests:
            check_answer(test)


async def ask_until(end: asyncio.Event, tokenizer: Pod) -> int:
    """Ask over HTTP again and again; returns how often. Each answer must be whole."""
    url, headers = f"http://{tokenizer.address}:{tokenizer.port('http')}/v1/completions", {"Host": "localhost"}
    body, count = {"prompt": "The", "max_tokens": 8, "ignore_eos": True}, 0
    async with aiohttp.ClientSession() as session:
        while not end.is_set():
            async with session.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["usage"]["completion_tokens"] == 8
            count += 1
    return count


async def probe_until(end: asyncio.Event, tokenizer: Pod) -> int:
    """Probe its readiness again and again, as the kubelet does; returns how often. It must never fail."""
    count, address = 0, f"{tokenizer.address}:{tokenizer.port('manage')}"
    while not end.is_set():
        found = await get(address, "/readyz")
        assert found.status == 200, found
        count += 1
    return count


@pytest.mark.slow
async def test_a_roll_of_both_schedulers_holds_requests_and_keeps_tokenizers_ready(demo: Cluster) -> None:
    fill_claim(demo)
    [tokenizer], schedulers = demo.of("tokenizer"), demo.of("scheduler")
    pods = [*demo.of("worker"), *schedulers, tokenizer]
    end = asyncio.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(pods))
        for pod in pods:
            await pod.wait_until_probed("readinessProbe")
        async with asyncio.TaskGroup() as group:
            watched = [group.create_task(run(end, tokenizer)) for run in (ask_until, probe_until)]
            # As a StatefulSet does: the last one first, and the next one once it is ready.
            for pod in reversed(schedulers):
                assert await asyncio.to_thread(pod.end) == 0
                stack.enter_context(running([pod]))
                await pod.wait_until_probed("readinessProbe")
            end.set()
    assert all(task.result() > 0 for task in watched)


def fill_claim(cluster: Cluster) -> None:
    """Run the job that downloads the model; the first containers of pods that came before it end after it."""
    [job] = cluster.of("model")
    waiting = [pod.first_container() for pod in (*cluster.of("worker"), *cluster.of("tokenizer"))]
    assert len(waiting) == 2
    with running(waiting) as processes:
        with job.log_path.open("w") as log:
            assert job.start(log).wait(timeout=PATIENCE_S) == 0, job.log_path.read_text(encoding="utf-8")
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0]


def check_answer(test: Pod) -> None:
    """Run a test pod to its end: it prints an answer."""
    with test.log_path.open("w") as log:
        process = test.start(log, stdout=subprocess.PIPE)
    answer, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, test.log_path.read_text(encoding="utf-8")
    assert answer.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The pods of the example of a coupled cell on two nodes, made small and for CPUs, with cert-manager's secrets."""
    folder = tmp_path_factory.mktemp("two-nodes")
    config = next(iter(SMALL_CONFIGS[MOE_ARCHITECTURE].values()))
    write_small_model(build_model(MOE_ARCHITECTURE, config), folder / "models" / "deepseek-v3")
    [cell] = yaml.safe_load((EXAMPLES / "deepseek-2-nodes.yaml").read_text(encoding="utf-8"))["cells"]
    cell["tls"] = {"trustDomain": cell["tls"]["trustDomain"], "issuer": {"name": "cell-ca"}}
    cell["tokenizer"]["replicas"] = 1
    cell["workers"] |= {
        "dp": 2,
        "gpu": {"resource": ""},
        "env": {"GLOO_SOCKET_IFNAME": "lo"},
        "settings": {**SMALL, "ops-backend": "reference"},
    }
    objects = render(values={"images": REGISTRY, "cells": [cell]}, apis=[LEADER_WORKER_SETS])
    return Cluster(objects, folder / "cluster", {"deepseek": folder / "models"})


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[list[RankNode]]:
    """The launchers of the cell's worker pods."""
    nodes = [make_node(pod) for pod in cluster.of("worker")]
    with closing_nodes(nodes), logging_failures(cluster.of("worker")):
        for node in nodes:
            node.start()
        yield nodes


@pytest.fixture(scope="module")
def services(cluster: Cluster, nodes: list[RankNode]) -> Iterator[None]:
    """The cell's other pods; tests leave them running."""
    with running([*cluster.of("scheduler"), *cluster.of("tokenizer")]):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("services")
async def test_the_tests_of_a_cell_with_tls_pass(cluster: Cluster) -> None:
    for pod in cluster.of("tokenizer"):
        await pod.wait_until_probed("readinessProbe")
    tests = cluster.of("test")
    assert len(tests) == 2
    for test in tests:
        check_answer(test)


def make_node(pod: Pod) -> RankNode:
    """A worker pod, whose container starts again as it was."""
    address, manage_address = (f"{pod.address}:{pod.port(name)}" for name in ("worker", "manage"))
    return RankNode(address, manage_address, pod.log_path, pod.start)


def peer(cluster: Cluster, own: Role, other: Role) -> Peer:
    """A service of the cell, dialled with the certificate of a role."""
    folder = cluster.secret(f"rel-deepseek-{own.value}-tls")
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt", TRUST_DOMAIN)
    return Peer(Certificates(files, own), other)


@asynccontextmanager
async def connect(cluster: Cluster) -> AsyncIterator[RollingClient]:
    """Connect to the cell's tokenizer and to both schedulers, on both of their ports."""
    async with AsyncExitStack() as stack:

        async def open_to(role: Role, port: str) -> list[grpc.aio.Channel]:
            links = [
                make_channel(f"{pod.address}:{pod.port(port)}", peer=peer(cluster, Role.OPERATOR, role))
                for pod in cluster.of(role.value)
            ]
            return [await stack.enter_async_context(link) for link in links]

        tokenizers = await open_to(Role.TOKENIZER, "grpc")
        schedulers = await open_to(Role.SCHEDULER, "direct")
        yield RollingClient(tokenizers, schedulers, await open_to(Role.SCHEDULER, "cell"))


@pytest.mark.parametrize("number", [0, 1], ids=["first node", "second node"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(RankNode.kill_rank, marks=pytest.mark.slow),
        pytest.param(restart_launcher, marks=pytest.mark.proof),
        pytest.param(restart_all, marks=pytest.mark.proof),
    ],
)
@pytest.mark.usefixtures("services")
async def test_a_coupled_cell_on_two_nodes_loses_no_request(
    cluster: Cluster, nodes: list[RankNode], damage: Callable[[RankNode], None], number: int
) -> None:
    for pod in cluster.of("tokenizer"):
        await pod.wait_until_probed("readinessProbe")
    async with connect(cluster) as client:
        old = await damage_under_load(client, nodes, lambda: damage(nodes[number]))
    for probe in PROBES:
        for pod in cluster.of("worker"):
            await pod.wait_until_probed(probe)
    worker = peer(cluster, Role.WORKER, Role.WORKER)
    assert await refusal_of(nodes[0].address, old, peer=worker) == "GROUP_MISMATCH"
