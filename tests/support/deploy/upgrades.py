"""What an API server refuses when a chart's objects are replaced by those of its next release, and what is lost.

Source: the update validations of Kubernetes (`pkg/apis/*/validation`; of several releases the strictest), and of
LeaderWorkerSet's webhook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tests.support.deploy.chart import Tree

Key = tuple[str, str]

_UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def refused_changes(old: Sequence[Tree], new: Sequence[Tree]) -> list[str]:
    """The fields, as `KIND/NAME FIELD`, that both sets of objects have and that may not change as they do.

    Raises:
        ValueError: the rules of a kind are not known.
    """
    before, after = _by_key(old), _by_key(new)
    return [
        f"{key[0]}/{key[1]} {field}"
        for key in before.keys() & after.keys()
        for field in _refused_fields(before[key], after[key])
    ]


def lost_state(old: Sequence[Tree], new: Sequence[Tree]) -> list[str]:
    """The objects, as `KIND/NAME`, that Helm would delete and whose data would be deleted with them."""
    gone = _by_key(old).keys() - _by_key(new).keys()
    return [f"{key[0]}/{key[1]}" for key, each in _by_key(old).items() if key in gone and _has_state(each, old)]


def _by_key(objects: Sequence[Tree]) -> Mapping[Key, Tree]:
    """By kind and name. Hooks are left out: they are deleted and made anew."""
    kept = [each for each in objects if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    return {(each["kind"], each["metadata"]["name"]): each for each in kept}


def _refused_fields(old: Tree, new: Tree) -> Iterator[str]:
    if old["kind"] not in _KIND_TO_RULE:
        raise ValueError(f"which fields of a {old['kind']} may change?")
    yield from _KIND_TO_RULE[old["kind"]](old, new)


def _has_state(each: Tree, objects: Sequence[Tree]) -> bool:
    if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep":
        return False
    match each["kind"]:
        case "PersistentVolumeClaim":
            return each["spec"].get("volumeName", "") not in _retained(objects)
        case "StatefulSet":
            return bool(each["spec"].get("volumeClaimTemplates"))
        case "PersistentVolume":
            return each["metadata"]["name"] not in _retained(objects)
    return False


def _retained(objects: Sequence[Tree]) -> set[str]:
    volumes = [each for each in objects if each["kind"] == "PersistentVolume"]
    return {
        each["metadata"]["name"] for each in volumes if each["spec"].get("persistentVolumeReclaimPolicy") == "Retain"
    }


def _all_but(*free: str) -> Callable[[Tree, Tree], Iterator[str]]:
    """A rule: nothing in the spec may change except these."""

    def refused(old: Tree, new: Tree) -> Iterator[str]:
        names = old["spec"].keys() | new["spec"].keys()
        yield from (f"spec.{name}" for name in sorted(names - set(free)) if _differ(old["spec"], new["spec"], name))

    return refused


def _only(*fixed: str) -> Callable[[Tree, Tree], Iterator[str]]:
    """A rule: these may not change."""

    def refused(old: Tree, new: Tree) -> Iterator[str]:
        yield from (path for path in fixed if _at(old, path) != _at(new, path))

    return refused


def _claim(old: Tree, new: Tree) -> Iterator[str]:
    """A claim may ask for more, and for nothing else."""
    yield from _all_but("resources", "volumeAttributesClassName")(old, new)
    if _storage(new) < _storage(old):
        yield "spec.resources.requests.storage"


def _storage(claim: Tree) -> int:
    size: str = claim["spec"]["resources"]["requests"]["storage"]
    return int(size[:-2]) * _UNITS[size[-2:]]


def _differ(old: Tree, new: Tree, name: str) -> bool:
    return bool(old.get(name) != new.get(name))


def _at(tree: Any, path: str) -> Any:
    """What is at a path; None if nothing is there."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


_FREE = _only()
_KIND_TO_RULE: Mapping[str, Callable[[Tree, Tree], Iterator[str]]] = MappingProxyType(
    {
        "Certificate": _FREE,
        "ConfigMap": _only("immutable"),
        "Deployment": _only("spec.selector"),
        "GRPCRoute": _FREE,
        "HTTPRoute": _FREE,
        "HorizontalPodAutoscaler": _FREE,
        "Ingress": _FREE,
        "InferencePool": _FREE,
        "Job": _all_but("parallelism", "suspend", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"),
        "LeaderWorkerSet": _only("spec.leaderWorkerTemplate.subGroupPolicy"),
        "NetworkPolicy": _FREE,
        "PersistentVolume": _all_but(
            "accessModes", "capacity", "claimRef", "mountOptions", "persistentVolumeReclaimPolicy", "storageClassName"
        ),
        "PersistentVolumeClaim": _claim,
        "PodDisruptionBudget": _FREE,
        "PodMonitor": _FREE,
        "PrometheusRule": _FREE,
        "ResourceClaimTemplate": _only("spec"),
        "Role": _FREE,
        "RoleBinding": _only("roleRef"),
        "Service": _only("spec.clusterIP", "spec.clusterIPs"),
        "ServiceAccount": _FREE,
        "StatefulSet": _all_but(
            "minReadySeconds",
            "ordinals",
            "persistentVolumeClaimRetentionPolicy",
            "replicas",
            "template",
            "updateStrategy",
        ),
    }
)
