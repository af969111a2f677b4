"""IPv4, IPv6 and both: what pods listen on, which Services there are, and what of it reaches the services."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deploy.chart import LEADER_WORKER_SETS, Tree, find, pod_templates, render
from tests.support.deploy.chart_values import values
from tests.support.deploy.deploy_tools import NEWEST_KUBERNETES, OLDEST_KUBERNETES
from tests.support.deploy.kubernetes_schemas import find_errors

# A cell with every Service that there can be.
CELL: Tree = {
    "scheduler": {"discovery": "dns"},
    "tokenizer": {"service": {"type": "ClusterIP"}},
    "workers": {"tp": 8, "nodes": 2},
}
NUM_SERVICES = 5
FLAGS = ("listen", "insecure-bind", "http-listen", "insecure-http-bind", "cell-listen", "insecure-cell-bind", "manage")


def listeners(objects: list[Tree]) -> list[str]:
    """The addresses of all flags that say where to listen."""
    args = [arg for _, pod in pod_templates(objects) for arg in pod["spec"]["containers"][0].get("args", [])]
    flags = [str(arg).partition("=") for arg in args if str(arg).startswith("--")]
    return [value for name, _, value in flags if name.removeprefix("--").startswith(FLAGS)]


def cell(families: list[str], **options: Any) -> list[Tree]:
    return render(values=values(CELL, ipFamilies=families), **options)


@pytest.mark.parametrize("tls", [{}, {"insecure": True, "trustDomain": "", "issuer": {}}], ids=["TLS", "no TLS"])
@pytest.mark.parametrize(
    ("families", "host"),
    [
        ([], "0.0.0.0"),
        (["IPv4"], "0.0.0.0"),
        (["IPv6"], "[::]"),
        (["IPv4", "IPv6"], "[::]"),
        (["IPv6", "IPv4"], "[::]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_all_pods_listen_on_every_interface_of_the_families(families: list[str], host: str, tls: Tree) -> None:
    found = listeners(render(values=values({**CELL, "tls": tls}, ipFamilies=families)))
    # Two of a tokenizer's three ports and those of the others: client, HTTP or cell, and management.
    assert len(found) == 3 + 3 + 2
    assert {address.rpartition(":")[0] for address in found} == {host}


@pytest.mark.parametrize(
    ("families", "policy"),
    [(["IPv6"], "SingleStack"), (["IPv4", "IPv6"], "RequireDualStack"), (["IPv6", "IPv4"], "RequireDualStack")],
    ids="-".join,
)
def test_services_are_of_the_families(families: list[str], policy: str) -> None:
    services = find(cell(families), "Service")
    assert len(services) == NUM_SERVICES
    for each in services:
        assert (each["spec"]["ipFamilyPolicy"], each["spec"]["ipFamilies"]) == (policy, families)


def test_without_families_services_are_as_the_cluster_makes_them() -> None:
    services = find(cell([]), "Service")
    assert len(services) == NUM_SERVICES
    assert not [each for each in services if {"ipFamilyPolicy", "ipFamilies"} & each["spec"].keys()]


@pytest.mark.slow
@pytest.mark.parametrize("minor", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
def test_both_families_fit_every_kubernetes(minor: int) -> None:
    objects = cell(["IPv6", "IPv4"], kubernetes=f"1.{minor}.0", apis=[LEADER_WORKER_SETS])
    assert find_errors(objects, minor) == []
