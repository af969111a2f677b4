"""What NetworkPolicies allow between pods, evaluated as the Kubernetes documentation says.

Only what the chart uses: TCP ports, numbered, with ranges; peers by labels of pods and namespaces, and by addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.deploy.chart import Tree, find

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod; or something outside the cluster, which has an address and nothing else."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "ns"
    address: str = "10.0.0.1"
    is_pod: bool = True


class Network:
    """The policies of one namespace. Endpoints are told apart by their names."""

    def __init__(self, objects: Sequence[Tree], namespace: str = "ns") -> None:
        self._specs = [policy["spec"] for policy in find(objects, "NetworkPolicy")]
        self._namespace = namespace
        self._rules: dict[tuple[str, str], list[Tree] | None] = {}

    def allows(self, source: Endpoint, target: Endpoint, port: int) -> bool:
        """Whether a connection is allowed: the source may open it, and the target may take it."""
        return self._permits("Egress", source, target, port) and self._permits("Ingress", target, source, port)

    def _permits(self, direction: str, pod: Endpoint, other: Endpoint, port: int) -> bool:
        rules = self._rules_of(direction, pod)
        return rules is None or any(
            _has_port(rule, port) and _has_peer(rule, direction, other, self._namespace) for rule in rules
        )

    def _rules_of(self, direction: str, pod: Endpoint) -> list[Tree] | None:
        """The rules of all policies that select the pod; None if none does, which leaves it free."""
        key = direction, pod.name
        if key not in self._rules:
            chosen = [spec for spec in self._specs if direction in spec["policyTypes"] and self._selects(spec, pod)]
            rules = [rule for spec in chosen for rule in spec.get(direction.lower(), [])]
            self._rules[key] = rules if chosen else None
        return self._rules[key]

    def _selects(self, spec: Tree, pod: Endpoint) -> bool:
        return pod.is_pod and pod.namespace == self._namespace and _matches(spec["podSelector"], pod.labels)


def _has_port(rule: Tree, port: int) -> bool:
    tcp = [each for each in rule.get("ports", []) if each["protocol"] == "TCP"]
    return "ports" not in rule or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in tcp)


def _has_peer(rule: Tree, direction: str, other: Endpoint, namespace: str) -> bool:
    peers = rule.get("to" if direction == "Egress" else "from")
    return peers is None or any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: Tree, other: Endpoint, namespace: str) -> bool:
    if "ipBlock" in peer:
        return ipaddress.ip_address(other.address) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if not other.is_pod:
        return False
    if "namespaceSelector" in peer:
        is_in_namespace = _matches(peer["namespaceSelector"], {NAMESPACE_LABEL: other.namespace})
    else:
        is_in_namespace = other.namespace == namespace
    return is_in_namespace and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Tree, labels: Mapping[str, str]) -> bool:
    assert "matchExpressions" not in selector, "the chart has none"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
