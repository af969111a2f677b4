"""The ways into a cell from outside: a Service with an address, an Ingress, and routes of the Gateway API."""

from __future__ import annotations

import pytest

from tests.support.deploy.chart import Tree, find, render
from tests.support.deploy.chart_values import values
from tests.support.deploy.deploy_tools import NEWEST_KUBERNETES, OLDEST_KUBERNETES
from tests.support.deploy.kubernetes_schemas import find_errors

GATEWAY = [{"name": "gateway", "namespace": "gateways"}]
EVERYTHING: Tree = {
    "service": {"type": "LoadBalancer", "annotations": {"example.org/internal": "true"}},
    "ingress": {
        "hosts": ["chat.example.org"],
        "className": "nginx",
        "tlsSecret": "chat-tls",
        "annotations": {"example.org/backend": "HTTPS"},
    },
    "grpcRoute": {"parentRefs": GATEWAY, "hostnames": ["grpc.example.org"]},
    "httpRoute": {"parentRefs": GATEWAY, "hostnames": ["api.example.org"]},
}


def entries(tokenizer: Tree) -> list[Tree]:
    return render(values=values({"tokenizer": tokenizer}))


def test_without_values_there_is_no_way_in_but_the_headless_service() -> None:
    objects = entries({})
    (service,) = [each for each in find(objects, "Service") if "tokenizer" in each["metadata"]["name"]]
    assert service["spec"]["clusterIP"] == "None"
    assert not {"Ingress", "GRPCRoute", "HTTPRoute"} & {each["kind"] for each in objects}
    assert not find(objects, "Service", "-entry")


@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_a_service_with_an_address_is_beside_the_headless_one(kind: str) -> None:
    objects = entries({"service": {"type": kind, "annotations": {"a": "b"}}})
    (headless,), (entry,) = find(objects, "Service", "-tokenizer"), find(objects, "Service", "-entry")
    assert headless["spec"]["clusterIP"] == "None"
    assert (entry["spec"]["type"], entry["metadata"]["annotations"]) == (kind, {"a": "b"})
    assert entry["spec"]["selector"] == headless["spec"]["selector"]
    assert entry["spec"]["ports"] == headless["spec"]["ports"]
    assert "clusterIP" not in entry["spec"]
    (certificate,) = find(objects, "Certificate", "-tokenizer")
    assert f"{entry['metadata']['name']}.ns.svc" in certificate["spec"]["dnsNames"]


def test_an_ingress_leads_to_the_api_and_to_nothing_else_of_the_port() -> None:
    (ingress,) = find(entries(EVERYTHING), "Ingress")
    assert ingress["metadata"]["annotations"] == EVERYTHING["ingress"]["annotations"]
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == [{"secretName": "chat-tls", "hosts": ["chat.example.org"]}]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("chat.example.org", "/v1", "Prefix")


def test_routes_are_of_their_gateways_and_hosts() -> None:
    objects = entries(EVERYTHING)
    (grpc_route,), (http_route,) = find(objects, "GRPCRoute"), find(objects, "HTTPRoute")
    assert grpc_route["spec"]["parentRefs"] == http_route["spec"]["parentRefs"] == GATEWAY
    assert grpc_route["spec"]["hostnames"] == ["grpc.example.org"]
    assert http_route["spec"]["hostnames"] == ["api.example.org"]
    (rule,) = grpc_route["spec"]["rules"]
    assert {"method": {"service": "lockstep.v1.TokenizerService"}} in rule["matches"]
    (rule,) = http_route["spec"]["rules"]
    # Otherwise many gateways end an answer after some seconds.
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}


@pytest.mark.parametrize(("service", "name"), [({}, "rel-main-tokenizer"), ({"type": "ClusterIP"}, "rel-main-entry")])
def test_every_way_leads_to_a_service_and_port_that_there_are(service: Tree, name: str) -> None:
    objects = entries(EVERYTHING | {"service": service})
    (target,) = find(objects, "Service", name)
    ports = {each["name"]: each["port"] for each in target["spec"]["ports"]}
    (backend,) = [
        each["backend"]["service"] for each in find(objects, "Ingress")[0]["spec"]["rules"][0]["http"]["paths"]
    ]
    assert (backend["name"], backend["port"]) == (name, {"name": "http"})
    for kind, port in (("GRPCRoute", ports["grpc"]), ("HTTPRoute", ports["http"])):
        (route,) = find(objects, kind)
        assert route["spec"]["rules"][0]["backendRefs"] == [{"name": name, "port": port}]


@pytest.mark.slow
@pytest.mark.parametrize("minor", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
def test_every_way_fits_its_api(minor: int) -> None:
    given = values({"tokenizer": EVERYTHING})
    assert find_errors(render(values=given, kubernetes=f"1.{minor}.0"), minor) == []
