"""`helm upgrade`: a change of the values or of the chart's version changes no immutable field, and loses no data."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploy.chart import CHART, LEADER_WORKER_SETS, Tree, find, render
from tests.support.deploy.chart_values import DOWNLOAD, IMAGES, REGISTRY, values
from tests.support.deploy.upgrades import lost_state, refused_changes

OTHER_DIGEST = f"sha256:{'7' * 64}"
DOWNLOADED = {"pvc": "", "download": DOWNLOAD}
CLAIMED_GPU = {"resource": "", "deviceClass": "gpu.amd.com"}

# The cells of the release that is upgraded.
CELLS: dict[str, Tree] = {
    "sets": {
        "workers": {"kind": "StatefulSet", "tp": 4, "dp": 2, "nodes": 2, "gpu": CLAIMED_GPU},
        "model": DOWNLOADED,
    },
    "groups": {"workers": {"tp": 4, "dp": 2, "nodes": 2}, "model": DOWNLOADED},
    "coupled": {"workers": {"dp": 8, "ep": True, "nodes": 2}, "model": {"pvc": "", "hostPath": "/mnt/models"}},
    "scaled": {
        "scheduler": {"discovery": "kubernetes"},
        "workers": {"autoscaling": {"enabled": True}},
        "tokenizer": {"autoscaling": {"enabled": True}},
    },
}

# What an upgrade may change in all of them. Changes that may hide each other are not made at once.
CHANGES: dict[str, Tree] = {
    "images, variables and settings": {
        "tokenizer": {"image": {"name": "mirrored-tokenizer", "digest": OTHER_DIGEST}, "settings": {"max-unread-s": 9}},
        "scheduler": {"image": {"digest": OTHER_DIGEST}, "settings": {"max-num-seqs": 64}},
        "workers": {
            "image": {"digest": OTHER_DIGEST},
            "settings": {"num-threads": 3},
            "env": {"NCCL_DEBUG": "WARN"},
        },
    },
    "replicas, resources and volumes": {
        **{part: {"resources": {"cpu": "3", "memory": "48Gi"}} for part in IMAGES},
        "tokenizer": {"resources": {"cpu": "3", "memory": "48Gi"}, "replicas": 5},
        "workers": {"resources": {"cpu": "3", "memory": "48Gi"}, "sharedMemory": "1Gi", "cacheSize": "1Gi"},
    },
    "how long pods take to start and end, and restarts": {
        "tokenizer": {"startupSeconds": 1000, "maxConnectionAgeSeconds": 30},
        "scheduler": {"startupSeconds": 1000},
        "workers": {"startupSeconds": 1000, "restartPolicy": "RecreateGroupOnPodRestart", "maxFailedStarts": 9},
        "shutdown": {"preStopSeconds": 0, "drainSeconds": 200, "teardownSeconds": 20},
    },
    "another issuer": {"tls": {"issuer": {"name": "other", "kind": "ClusterIssuer"}, "clientNames": ["a.example.org"]}},
    "own certificates": {
        "tls": {"issuer": {"name": ""}, "secrets": {"tokenizer": "a", "scheduler": "b", "worker": "c"}}
    },
    "another trust domain": {"tls": {"trustDomain": "example.com"}},
    "pod templates, and the model's name": {
        **{part: {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}} for part in IMAGES},
        "model": {"name": "another-name"},
    },
    "more tensor parallelism": {"workers": {"tp": 8, "gpu": {"perNode": 32}}},
    "a way in": {
        "tokenizer": {
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "ingress": {"hosts": ["chat.example.org"]},
            "grpcRoute": {"parentRefs": [{"name": "gateway"}]},
            "httpRoute": {"parentRefs": [{"name": "gateway"}]},
        },
        "serviceAccount": {"annotations": {"a": "b"}},
    },
    "images by their tags": {part: {"image": {"digest": "", "tag": "0.2.0"}} for part in IMAGES},
    "GPUs of another kind": {"workers": {"gpu": {"resource": "nvidia.com/gpu", "deviceClass": ""}}},
    "devices of another class": {"workers": {"gpu": {"resource": "", "deviceClass": "gpu.nvidia.com"}}},
}

# What it may change in one of them.
CHANGES_OF_ONE: dict[str, tuple[str, Tree]] = {
    "more replicas": ("sets", {"workers": {"dp": 5}}),
    "fewer replicas": ("groups", {"workers": {"dp": 1}}),
    "domains of one pod": ("sets", {"workers": {"nodes": 1}}),
    "more nodes": ("coupled", {"workers": {"nodes": 4}}),
    "more places": ("scaled", {"workers": {"autoscaling": {"maxReplicas": 20}}}),
    "no autoscaler": ("scaled", {"workers": {"autoscaling": {"enabled": False}, "dp": 2}}),
    "another discovery": ("scaled", {"scheduler": {"discovery": "dns"}}),
    "more tokenizers": ("scaled", {"tokenizer": {"autoscaling": {"maxReplicas": 20}}}),
    "workers that are discovered": ("sets", {"scheduler": {"discovery": "kubernetes"}}),
    "another download": ("sets", {"model": {"download": {"repository": "acme/other"}}}),
    "another hub": ("sets", {"model": {"download": {"endpoint": "https://hub.example.org", "tokenSecret": "hub"}}}),
    "a proxy": ("sets", {"model": {"download": {"proxy": "http://proxy:3128", "caConfigMap": "ca"}}}),
    "a cache of each node": ("sets", {"model": {"download": {"nodePath": "/var/lib/models"}}}),
    "another folder of the model": ("scaled", {"model": {"path": "other"}}),
    "another pod of the download": (
        "sets",
        {"model": {"podTemplate": {"spec": {"priorityClassName": "low"}}, "download": {"deadlineSeconds": 60}}},
    ),
    "another commit": ("sets", {"model": {"download": {"commit": "5" * 40}}}),
    "a larger volume": ("sets", {"model": {"download": {"size": "200Gi"}}}),
    "another class of storage": ("sets", {"model": {"download": {"storageClass": "fast"}}}),
    "another folder of the nodes": ("coupled", {"model": {"hostPath": "/mnt/other"}}),
    "a model in a claim": ("coupled", {"model": {"hostPath": "", "pvc": "models"}}),
    "a download instead of the nodes": ("coupled", {"model": {**DOWNLOADED, "hostPath": ""}}),
    "the nodes instead of a download": (
        "sets",
        {"model": {"hostPath": "/mnt/models", "download": {"repository": ""}}},
    ),
}

# What it may change for the whole release.
CHANGES_OF_RELEASE: dict[str, Tree] = {
    "the registry": {"images": {"registry": "registry.example.org", "pullPolicy": "Always", "pullSecrets": ["s"]}},
    "network policies": {"networkPolicy": {"enabled": False}},
    "monitoring": {"monitoring": {"podMonitor": True, "rules": True, "dashboards": True, "labels": {"team": "a"}}},
    "the test": {"testPrompt": "Once upon a time"},
    "both families": {"ipFamilies": ["IPv4", "IPv6"]},
    "labels of all objects": {"labels": {"team": "a"}},
    "one more object": {
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}, "data": {"a": "b"}}]
    },
}


def merged(base: Any, patch: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(patch, dict)):
        return patch
    return base | {name: merged(base.get(name), value) for name, value in patch.items()}


def render_cells(changes: Mapping[str, Tree], top: Tree | None = None, **options: Any) -> list[Tree]:
    """A release of these cells, each with its change, and with values of the release."""
    cells = [values({"name": name, **merged(CELLS[name], change)})["cells"][0] for name, change in changes.items()]
    return render(values={"cells": cells, "images": REGISTRY, **(top or {})}, apis=[LEADER_WORKER_SETS], **options)


def render_release(change: Tree | None = None, top: Tree | None = None, **options: Any) -> list[Tree]:
    """All cells, each with the same change."""
    return render_cells(dict.fromkeys(CELLS, change or {}), top, **options)


def assert_upgrades(old: list[Tree], new: list[Tree]) -> None:
    assert refused_changes(old, new) == []
    assert lost_state(old, new) == []


@pytest.fixture(scope="module")
def old() -> list[Tree]:
    """The release before the upgrade; not to be changed."""
    return render_release()


@pytest.mark.parametrize("change", CHANGES)
def test_values_of_all_cells_that_change_are_upgrades(old: list[Tree], change: str) -> None:
    new = render_release(CHANGES[change])
    assert old != new
    assert_upgrades(old, new)
    # What takes the change back is an upgrade too.
    assert_upgrades(new, old)


@pytest.mark.parametrize("change", CHANGES_OF_ONE)
def test_values_of_a_cell_that_change_are_upgrades(change: str) -> None:
    name, values_of_one = CHANGES_OF_ONE[change]
    old, new = render_cells({name: {}}), render_cells({name: values_of_one})
    assert old != new
    assert_upgrades(old, new)


@pytest.mark.parametrize("change", CHANGES_OF_RELEASE)
def test_values_of_the_release_that_change_are_upgrades(old: list[Tree], change: str) -> None:
    assert_upgrades(old, render_release(top=CHANGES_OF_RELEASE[change]))


def test_another_cell_changes_nothing_of_the_others() -> None:
    own = values()
    one = render(values=own)
    two = render(values={**own, "cells": [*own["cells"], {**own["cells"][0], "name": "second"}]})
    assert_upgrades(one, two)
    assert [each for each in one if each not in two] == []


def test_a_cluster_that_is_upgraded_changes_nothing_that_may_not_change() -> None:
    changes: dict[str, Tree] = {name: {} for name in CELLS}
    changes["sets"] = {"workers": {"gpu": {"resource": "amd.com/gpu", "deviceClass": ""}}}
    assert_upgrades(render_cells(changes, kubernetes="1.29.0"), render_cells(changes, kubernetes="1.36.0"))


@pytest.fixture
def next_chart(tmp_path: Path) -> Path:
    """The chart with the versions of a later release."""
    folder = tmp_path / "lockstep"
    shutil.copytree(CHART, folder)
    head = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
    head |= {"version": "99.0.0", "appVersion": "98.0.0"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(head), encoding="utf-8")
    return folder


def test_a_release_that_changes_nothing_but_versions_changes_labels_and_no_pod(
    old: list[Tree], next_chart: Path
) -> None:
    new = render_release(chart=next_chart)
    assert_upgrades(old, new)
    for before, after in zip(old, new, strict=True):
        assert before["metadata"]["labels"] != after["metadata"]["labels"]
        assert without_labels(before) == without_labels(after)


def without_labels(each: Tree) -> Tree:
    return {**each, "metadata": {name: value for name, value in each["metadata"].items() if name != "labels"}}


def planted(old: list[Tree], kind: str, change: Callable[[Tree], object]) -> list[Tree]:
    """The release's objects with one object of a kind changed."""
    new = copy.deepcopy(old)
    change(find(new, kind)[-1])
    return new


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("Deployment", lambda it: it["spec"]["selector"]["matchLabels"].update(version="2"), "spec.selector"),
        ("StatefulSet", lambda it: it["spec"]["selector"]["matchLabels"].update(version="2"), "spec.selector"),
        ("StatefulSet", lambda it: it["spec"].update(serviceName="other"), "spec.serviceName"),
        ("StatefulSet", lambda it: it["spec"].update(podManagementPolicy="OrderedReady"), "spec.podManagementPolicy"),
        ("StatefulSet", lambda it: it["spec"].update(volumeClaimTemplates=[{}]), "spec.volumeClaimTemplates"),
        ("Job", lambda it: it["spec"]["template"]["spec"].update(priority=1), "spec.template"),
        ("Service", lambda it: it["spec"].pop("clusterIP"), "spec.clusterIP"),
        ("PersistentVolumeClaim", lambda it: it["spec"].update(storageClassName="x"), "spec.storageClassName"),
        (
            "PersistentVolumeClaim",
            lambda it: it["spec"]["resources"]["requests"].update(storage="1Gi"),
            "spec.resources.requests.storage",
        ),
        ("ResourceClaimTemplate", lambda it: it["spec"]["spec"].update(devices={}), "spec"),
        ("RoleBinding", lambda it: it["roleRef"].update(name="other"), "roleRef"),
        (
            "LeaderWorkerSet",
            lambda it: it["spec"]["leaderWorkerTemplate"].update(subGroupPolicy={}),
            "spec.leaderWorkerTemplate.subGroupPolicy",
        ),
    ],
)
def test_a_change_that_is_refused_is_noticed(
    old: list[Tree], kind: str, change: Callable[[Tree], object], field: str
) -> None:
    name = find(old, kind)[-1]["metadata"]["name"]
    assert refused_changes(old, planted(old, kind, change)) == [f"{kind}/{name} {field}"]


def test_a_change_that_is_taken_is_none(old: list[Tree]) -> None:
    new = planted(old, "StatefulSet", lambda it: it["spec"]["template"]["spec"].update(priority=1))
    new = planted(new, "Deployment", lambda it: it["spec"].update(replicas=9))
    assert refused_changes(old, new) == []


def test_a_kind_without_rules_is_not_let_through() -> None:
    new: list[Tree] = [{"kind": "Lease", "metadata": {"name": "a"}}]
    with pytest.raises(ValueError, match="which fields of a Lease"):
        refused_changes(new, new)


def without(objects: list[Tree], *gone: Tree) -> list[Tree]:
    return [each for each in objects if each not in gone]


def test_a_claim_that_would_be_deleted_is_noticed() -> None:
    objects = render_release()
    claim = next(each for each in find(objects, "PersistentVolumeClaim") if "volumeName" not in each["spec"])
    assert lost_state(objects, without(objects, claim)) == []
    del claim["metadata"]["annotations"]
    name = claim["metadata"]["name"]
    assert lost_state(objects, without(objects, claim)) == [f"PersistentVolumeClaim/{name}"]


def test_a_volume_of_a_node_that_would_be_deleted_is_noticed() -> None:
    objects = render_release()
    [volume] = find(objects, "PersistentVolume")
    claim = next(each for each in find(objects, "PersistentVolumeClaim") if "volumeName" in each["spec"])
    assert lost_state(objects, without(objects, volume, claim)) == []
    volume["spec"]["persistentVolumeReclaimPolicy"] = "Delete"
    assert sorted(lost_state(objects, without(objects, volume, claim))) == [
        f"PersistentVolume/{volume['metadata']['name']}",
        f"PersistentVolumeClaim/{claim['metadata']['name']}",
    ]


def test_a_set_whose_claims_would_be_orphaned_is_noticed() -> None:
    objects = render_release()
    scheduler = find(objects, "StatefulSet", "-scheduler")[0]
    assert lost_state(objects, without(objects, scheduler)) == []
    scheduler["spec"]["volumeClaimTemplates"] = [{}]
    assert lost_state(objects, without(objects, scheduler)) == [f"StatefulSet/{scheduler['metadata']['name']}"]
