"""The NetworkPolicies allow the call graph, and nothing else: the whole matrix of who may reach which port."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.deploy.chart import (
    CHART,
    EXAMPLES,
    LEADER_WORKER_SETS,
    Tree,
    containers,
    find,
    pod_templates,
    render,
)
from tests.support.deploy.chart_network import NAMESPACE_LABEL, Endpoint, Network
from tests.support.deploy.chart_values import REGISTRY, downloaded_values, pools, values

OPEN = {
    "networkPolicy": {
        "directClients": [{"podSelector": {"matchLabels": {"app": "direct"}}}],
        "operators": [{"podSelector": {"matchLabels": {"app": "operator"}}}],
        "endpointPickers": [{"podSelector": {"matchLabels": {"app": "picker"}}}],
    }
}
CLIENT = Endpoint("client", {"lockstep-client": "true"}, "elsewhere")
DIRECT = Endpoint("direct client", {"app": "direct"})
OPERATOR = Endpoint("operator", {"app": "operator"})
PROMETHEUS = Endpoint("prometheus", {}, "monitoring")
PICKER = Endpoint("endpoint picker", {"app": "picker"})
STRANGER = Endpoint("stranger", {"app": "else"})
STRANGER_ELSEWHERE = Endpoint("stranger elsewhere", {"app": "direct"}, "elsewhere")
INTERNET = Endpoint("internet", {}, "", "93.184.216.34", is_pod=False)
INTERNET_BY_IPV6 = Endpoint("internet by IPv6", {}, "", "2606:4700::1", is_pod=False)
OUTSIDE = (CLIENT, DIRECT, OPERATOR, PROMETHEUS, PICKER, STRANGER, STRANGER_ELSEWHERE, INTERNET, INTERNET_BY_IPV6)
# One that only collectives use, and the API server's.
COLLECTIVE_PORT, API_PORT = 40000, 6443
TWO_CELLS = {
    "images": REGISTRY,
    "cells": [
        {"name": name, "model": {"pvc": "m"}, "workers": {"tp": 4, "dp": 2, "nodes": 2}} for name in ("one", "two")
    ],
    "cellDefaults": {
        "tls": {"insecure": True},
        **{part: {"image": {"digest": f"sha256:{'1' * 64}"}} for part in ("tokenizer", "scheduler", "workers")},
    },
}


def endpoints(objects: list[Tree]) -> Iterator[Endpoint]:
    """Two pods of each template; of a LeaderWorkerSet two of each group, with the label that its controller adds."""
    num_groups = {each["metadata"]["name"]: each["spec"]["replicas"] for each in find(objects, "LeaderWorkerSet")}
    for name, template in pod_templates(objects):
        labels = template["metadata"]["labels"]
        groups = [str(group) for group in range(num_groups.get(name.partition("/")[2], 0))] or [""]
        for group, node in itertools.product(groups, (0, 1)):
            added = {"leaderworkerset.sigs.k8s.io/group-index": group} if group else {}
            yield Endpoint(f"{name} {group}/{node}", labels | added)


def component(endpoint: Endpoint) -> str:
    return endpoint.labels.get("app.kubernetes.io/component", endpoint.name)


def domain(endpoint: Endpoint) -> str:
    labels = endpoint.labels
    return labels.get("leaderworkerset.sigs.k8s.io/group-index", labels.get("lockstep-domain", ""))


def is_in_call_graph(source: Endpoint, target: Endpoint, port: int, workers: dict[str, tuple[int, int]]) -> bool:
    """What deploy/README.md says: who calls which port. `workers` has each cell's ranks and nodes in a domain."""
    if not target.is_pod or "lockstep-cell" not in target.labels:
        # By default these may be at any address, also at a pod's.
        downloads = source.labels.get("downloads") == str(port)
        asks_api = "watches" in source.labels and port in (443, API_PORT)
        return downloads or asks_api or ("lockstep-cell" not in source.labels)
    cell = target.labels["lockstep-cell"]
    if source.labels.get("lockstep-cell", cell) != cell:
        return False
    if (component(source), component(target)) == ("worker", "worker"):
        return workers[cell][1] > 1 and domain(source) == domain(target)
    if source.name == PICKER.name and not {"lockstep-pool", "lockstep-http-pool"} & target.labels.keys():
        return False
    num_ranks = workers[cell][0]
    return port in ports_called(component(source), component(target), range(50053, 50053 + num_ranks))


def ports_called(source: str, target: str, worker_ports: range) -> Container[int]:
    """The ports of a component that another calls."""
    return {
        ("client", "tokenizer"): {50051, 8000},
        ("test", "tokenizer"): {50051, 8000},
        ("tokenizer", "scheduler"): {50054},
        ("scheduler", "worker"): worker_ports,
        ("direct client", "scheduler"): {50052},
        ("operator", "scheduler"): {50054},
        ("operator", "worker"): worker_ports,
        ("endpoint picker", "tokenizer"): {9100},
        ("prometheus", "tokenizer"): {9100},
        ("prometheus", "scheduler"): {9100},
        ("prometheus", "worker"): range(9100, 9101 + len(worker_ports)),
    }.get((source, target), ())


def matrix(objects: list[Tree]) -> Iterator[tuple[Endpoint, Endpoint, int, bool]]:
    """Every pair with every port that means something, and whether it is allowed."""
    pods = list(endpoints(objects))
    network = Network(objects)
    ports = (
        443,
        3128,
        API_PORT,
        8000,
        50051,
        50052,
        50053,
        50054,
        50060,
        50061,
        9100,
        9101,
        9108,
        9109,
        COLLECTIVE_PORT,
    )
    for source, target in itertools.product([*OUTSIDE, *pods], [*OUTSIDE, *pods]):
        for port in ports:
            yield source, target, port, network.allows(source, target, port)


def workers_of(objects: list[Tree]) -> dict[str, tuple[int, int]]:
    """Each cell's ranks in a pod and pods in a domain, from the workers' flags."""
    cells = {}
    for _, template in pod_templates(objects):
        labels = template["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == "worker":
            flags = dict(
                arg.removeprefix("--").split("=", 1) for arg in template["spec"]["containers"][0]["args"] if "=" in arg
            )
            cells[labels["lockstep-cell"]] = int(flags["ranks-per-node"]), int(flags.get("nodes", "1"))
    return cells


def check(objects: list[Tree]) -> None:
    """Compare the matrix with the call graph; what differs is printed, with the whole matrix."""
    for _, template in pod_templates(objects):
        if template["spec"]["automountServiceAccountToken"]:
            template["metadata"]["labels"]["watches"] = "true"
        for container in containers(template["spec"]):
            if container["command"] == ["lockstep", "pull"] and "--wait" not in container["args"]:
                proxies = [each["value"] for each in container["env"] if each["name"] == "HTTPS_PROXY"]
                template["metadata"]["labels"]["downloads"] = str(urlsplit(proxies[0]).port) if proxies else "443"
    workers = workers_of(objects)
    wrong = []
    for source, target, port, allowed in matrix(objects):
        expected = is_in_call_graph(source, target, port, workers)
        sys.stdout.write(f"{source.name:45} {target.name:45} {port:6} {'allow' if allowed else 'deny'}\n")
        if allowed is not expected:
            wrong.append((source.name, target.name, port, allowed))
    assert not wrong


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_matrix_of_an_example_is_its_call_graph(path: Path) -> None:
    check(render(path, values=OPEN))


def test_the_matrix_of_a_domain_of_several_pods_is_its_call_graph() -> None:
    check(render(CHART / "examples" / "deepseek-2-nodes.yaml", values=OPEN, apis=[LEADER_WORKER_SETS]))


@pytest.mark.parametrize("api", [(), (LEADER_WORKER_SETS,)], ids=["StatefulSet", "LeaderWorkerSet"])
def test_collectives_stay_in_their_domain_and_calls_in_their_cell(api: tuple[str, ...]) -> None:
    check(render(values=TWO_CELLS | OPEN, apis=api))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_endpoint_picker_reads_the_metrics_of_its_pool_alone(protocol: str) -> None:
    check(render(values=pools({"protocol": protocol}, cells=[{"name": "outside"}], **OPEN)))


def test_without_http_no_pod_may_reach_its_port() -> None:
    network = Network(objects := render(values=values({"tokenizer": {"http": {"enabled": False}}})))
    for target in endpoints(objects):
        assert network.allows(CLIENT, target, 50051) is (component(target) == "tokenizer")
        assert not any(network.allows(source, target, 8000) for source in (*OUTSIDE, *endpoints(objects)))


@pytest.mark.parametrize(
    ("download", "downloaders", "port"),
    [
        ({}, {"model"}, 443),
        ({"endpoint": "https://hub.example.org:8443/models"}, {"model"}, 8443),
        ({"endpoint": "https://hub.example.org", "proxy": "http://proxy.example.org:3128"}, {"model"}, 3128),
        ({"proxy": "http://proxy.example.org"}, {"model"}, 80),
        ({"nodePath": "/var/lib/models"}, {"tokenizer", "worker"}, 443),
    ],
)
def test_only_what_downloads_reaches_the_hub_and_only_on_its_port(
    download: Tree, downloaders: set[str], port: int
) -> None:
    network = Network(objects := render(values=downloaded_values({"model": {"download": download}})))
    for source in endpoints(objects):
        for each in (80, 443, 3128, 8443):
            expected = component(source) in downloaders and each == port
            for target in (INTERNET, INTERNET_BY_IPV6):
                assert network.allows(source, target, each) is expected, (source.name, target.name, each)


@pytest.mark.parametrize("endpoint", ["", "http://collector.monitoring:4317", "https://[2001:db8::1]:4318"])
def test_only_tokenizers_reach_the_collector_and_only_on_its_port(endpoint: str) -> None:
    objects = render(values=values({"tokenizer": {"otlpEndpoint": endpoint}}))
    network, port = Network(objects), urlsplit(endpoint).port
    for source in endpoints(objects):
        for each in (4317, 4318):
            expected = component(source) == "tokenizer" and each == port
            assert network.allows(source, PROMETHEUS, each) is expected, (source.name, each)
            assert not network.allows(source, STRANGER, each)
    flags = {
        arg
        for _, template in pod_templates(objects)
        for container in containers(template["spec"])
        for arg in container.get("args", [])
        if "otlp" in arg
    }
    assert flags == ({f"--otlp-endpoint={endpoint}"} if endpoint else set())


def test_every_pod_may_resolve_names() -> None:
    for each in render(EXAMPLES[0]):
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "rel-dns":
            (rule,) = each["spec"]["egress"]
            assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {("UDP", 53), ("TCP", 53)}
            assert rule["to"][0]["namespaceSelector"]["matchLabels"] == {NAMESPACE_LABEL: "kube-system"}
            return
    pytest.fail("no policy for DNS")


def test_pods_that_resolve_names_may_listen_on_another_port() -> None:
    (policy,) = find(render(values=values(networkPolicy={"dnsPort": 5353})), "NetworkPolicy", "-dns")
    (rule,) = policy["spec"]["egress"]
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {("UDP", 5353), ("TCP", 5353)}


def test_policies_can_be_left_out() -> None:
    objects = render(EXAMPLES[0], values={"networkPolicy": {"enabled": False}})
    assert not [each for each in objects if each["kind"] == "NetworkPolicy"]
