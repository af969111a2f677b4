"""Values: what is refused, and in which words; how a cell's values and `podTemplate` are merged; how many there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.deploy.chart import CHART, LEADER_WORKER_SETS, RenderError, Tree, find, render
from tests.support.deploy.chart_tables import leaves
from tests.support.deploy.chart_values import DIGEST, DOWNLOAD, IMAGES, downloaded_values, pools, values, workers

# What is refused, what the error names, and for a check that depends on it the release of Kubernetes.
REFUSED: dict[str, tuple[Tree, str]] = {
    "a misspelt value": (values(networkPolicies={}), "networkPolicies"),
    "a misspelt value of a cell": (values({"workerz": {}}), "workerz"),
    "a misspelt setting": (workers(settings={"kv-cash-dtype": "int8"}), "kv-cash-dtype"),
    "a setting that the chart gives": (workers(settings={"listen": "0.0.0.0:1"}), "listen"),
    "another HTTP port than the chart's": (
        values({"tokenizer": {"settings": {"http-listen": "0.0.0.0:1"}}}),
        "http-listen",
    ),
    "a misspelt value of HTTP": (values({"tokenizer": {"http": {"enable": True}}}), "enable"),
    "a setting that is a list": (workers(settings={"num-threads": [1]}), "num-threads"),
    "a tag instead of a digest": (workers(image={"digest": "latest"}), "digest"),
    "a digest and a tag": (
        workers(image={"digest": DIGEST, "tag": "0.1.0"}),
        "cells[main].workers.image.tag: cannot be used with image.digest",
    ),
    "an image of Docker Hub by accident": (values(images={}), "images.registry: is required"),
    "an image of a user of Docker Hub by accident": (
        values({"workers": {"image": {"name": "team/worker", "digest": DIGEST}}}, images={}),
        "images.registry: is required",
    ),
    "a label that the chart gives": (values(labels={"lockstep-cell": "x"}), "labels: lockstep-cell is given by the"),
    "a label of Helm's": (values(labels={"app.kubernetes.io/name": "x"}), "labels: app.kubernetes.io/name is given"),
    "an object without a kind": (values(extraObjects=[{"apiVersion": "v1"}]), "extraObjects"),
    "more ranks in a TP group than GPUs of a node": (
        workers(tp=16),
        "cells[main].workers.tp: the 16 ranks of a pod are more than the 8 GPUs of a node",
    ),
    "more replicas in a pod than GPUs of a node": (
        workers(dp=8, ep=True, gpu={"perNode": 4}),
        "cells[main].workers.nodes: the 8 ranks of a pod are more than the 4 GPUs of a node",
    ),
    "an Ingress without HTTP": (
        values({"tokenizer": {"http": {"enabled": False}, "ingress": {"hosts": ["a.example.org"]}}}),
        "cells[main].tokenizer.ingress.hosts: needs http.enabled",
    ),
    "a route of HTTP without HTTP": (
        values({"tokenizer": {"http": {"enabled": False}, "httpRoute": {"parentRefs": [{"name": "gateway"}]}}}),
        "cells[main].tokenizer.httpRoute.parentRefs: needs http.enabled",
    ),
    "two routes of one host": (
        values({"tokenizer": {kind: {"hostnames": ["a.example.org"]} for kind in ("grpcRoute", "httpRoute")}}),
        "cells[main].tokenizer.httpRoute.hostnames: a.example.org is in grpcRoute.hostnames too",
    ),
    "a key for tests of a cell without keys": (
        values({"clientKeys": {"testSecret": "key"}}),
        "cells[main].clientKeys.testSecret: needs clientKeys.secret",
    ),
    "a certificate for tests of a cell whose clients need none": (
        values({"clientCa": {"testSecret": "client"}}),
        "cells[main].clientCa.testSecret: needs clientCa.secret",
    ),
    "clients' certificates without TLS": (
        values({"tls": {"insecure": True, "trustDomain": "", "issuer": {}}, "clientCa": {"secret": "clients"}}),
        "cells[main].clientCa.secret: cannot be used with tls.insecure",
    ),
    "a family that there is not": (values(ipFamilies=["IPv5"]), "ipFamilies"),
    "a Service of another type": (values({"tokenizer": {"service": {"type": "ExternalName"}}}), "type"),
    "an image with a tag": (workers(image={"name": "worker:latest", "digest": DIGEST}), "name"),
    "no cells": ({"cells": []}, "cells: name at least one"),
    "a cell without a name": ({"cells": [{}]}, "name"),
    "two cells of one name": (
        {**values(), "cells": [*values()["cells"], *values()["cells"]]},
        'the name "main" is used twice',
    ),
    "a name in capitals": (values({"name": "Main"}), "name"),
    "a name that is too long": (values({"name": "m" * 21}), "name"),
    "a release that is too long": (
        values({"name": "m" * 20}, fullnameOverride="r" * 30),
        f"cells[{'m' * 20}].name: with the release's name",
    ),
    "no model": (values({"model": {"pvc": ""}}), "cells[main].model: exactly one of"),
    "two models": (values({"model": {"hostPath": "/m"}}), "cells[main].model: exactly one of"),
    "a model outside its volume": (values({"model": {"path": "../secrets"}}), "path"),
    "a download without a commit": (
        downloaded_values({"model": {"download": {"commit": ""}}}),
        "cells[main].model.download.commit: is required",
    ),
    "a download of a branch": (downloaded_values({"model": {"download": {"commit": "main"}}}), "commit"),
    "a download with a folder": (
        downloaded_values({"model": {"path": "m"}}),
        "cells[main].model.path: cannot be used with download.repository",
    ),
    "a download and a claim": (values({"model": {"download": DOWNLOAD}}), "cells[main].model: exactly one of"),
    "a download over plain HTTP": (
        downloaded_values({"model": {"download": {"endpoint": "http://hub.example.org.svc.example.org"}}}),
        "endpoint",
    ),
    "a name that is no model's": (downloaded_values({"model": {"download": {"repository": "../m"}}}), "repository"),
    "a cache of the nodes for nothing": (
        values({"model": {"download": {"nodePath": "/m"}}}),
        "cells[main].model.download.nodePath: needs download.repository",
    ),
    "several nodes with a volume of one": (
        downloaded_values({"model": {"download": {"accessMode": "ReadWriteOnce"}}, "workers": {"tp": 4, "nodes": 2}}),
        "cells[main].workers.nodes: needs model.download.accessMode ReadWriteMany",
    ),
    "no TLS by accident": (values({"tls": {"trustDomain": ""}}), "cells[main].tls.trustDomain: is required"),
    "no certificates": (values({"tls": {"issuer": {}}}), "cells[main].tls: needs issuer.name, or secrets"),
    "one secret of three": (
        values({"tls": {"issuer": {}, "secrets": {"worker": "s"}}}),
        "cells[main].tls: needs issuer.name, or secrets",
    ),
    "secrets and an issuer": (values({"tls": {"secrets": {"worker": "s"}}}), "cells[main].tls.secrets: cannot be used"),
    "TLS and none": (values({"tls": {"insecure": True}}), "cells[main].tls.insecure: cannot be used"),
    "a trust domain in capitals": (values({"tls": {"trustDomain": "Example.org"}}), "trustDomain"),
    "ranks that nodes cannot share": (workers(tp=8, nodes=3), "cells[main].workers.nodes: 3 nodes cannot share"),
    "coupled groups that are split": (
        workers(tp=8, dp=2, ep=True, nodes=4),
        "cells[main].workers.nodes: the 4 ranks of a node are no multiple of tp",
    ),
    "no ranks": (workers(tp=0), "tp"),
    "an autoscaler with static discovery": (
        values({"scheduler": {"discovery": "static"}, "workers": {"autoscaling": {"enabled": True}}}),
        "cells[main].workers.autoscaling.enabled: needs scheduler.discovery",
    ),
    "an autoscaled domain of two pods": (
        values({"scheduler": {"discovery": "dns"}, "workers": {"autoscaling": {"enabled": True}, "tp": 2, "nodes": 2}}),
        "cells[main].workers.autoscaling.enabled: needs a failure domain that is one pod",
    ),
    "an autoscaled coupled cell": (
        values({"scheduler": {"discovery": "dns"}, "workers": {"autoscaling": {"enabled": True}, "dp": 2, "ep": True}}),
        "cells[main].workers.autoscaling.enabled: needs a failure domain that is one pod",
    ),
    "a coupled cell that is discovered": (
        values({"scheduler": {"discovery": "kubernetes"}, "workers": {"dp": 2, "ep": True}}),
        "cells[main].workers.ep: with dp above 1 needs scheduler.discovery static",
    ),
    "a discovery that does not exist": (values({"scheduler": {"discovery": "consul"}}), "discovery"),
    "GPUs by two ways": (workers(gpu={"deviceClass": "gpu.amd.com"}), "cells[main].workers.gpu.deviceClass: cannot"),
    "a size without a unit": (workers(sharedMemory="8"), "sharedMemory"),
    "a grace period below the drain": (
        workers(podTemplate={"spec": {"terminationGracePeriodSeconds": 49}}),
        "cells[main].workers.podTemplate.spec.terminationGracePeriodSeconds: 49 is below",
    ),
    "the same of a tokenizer": (
        values({"tokenizer": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 10}}}}),
        "cells[main].tokenizer.podTemplate.spec.terminationGracePeriodSeconds: 10 is below",
    ),
    "a pod template with something else": (workers(podTemplate={"status": {}}), "status"),
    "an autoscaler whose least is its most": (
        values({"tokenizer": {"autoscaling": {"enabled": True, "minReplicas": 9}}}),
        "cells[main].tokenizer.autoscaling.minReplicas: is above maxReplicas",
    ),
    "a peer that is an address and a pod": (
        values(networkPolicy={"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]}),
        "clients",
    ),
    "a peer that is nothing": (values(networkPolicy={"clients": [{}]}), "clients"),
    "a pool of a cell that is not there": (
        pools({"cells": ["other"]}),
        'inferencePools[main].cells: there is no cell "other"',
    ),
    "a pool of nothing": (pools({"cells": []}), "cells"),
    "two pools of one name": (pools({}, {}), 'inferencePools: the name "main" is used twice'),
    "a cell in two pools": (pools({}, {"name": "b"}), 'inferencePools[b].cells: "main" is in another pool too'),
    "a cell in two pools of HTTP": (
        pools({"protocol": "http"}, {"name": "b", "protocol": "http"}),
        'inferencePools[b].cells: "main" is in another pool too',
    ),
    "a pool of HTTP of a cell without it": (
        pools({"protocol": "http"}, cellDefaults={"tokenizer": {"http": {"enabled": False}}}),
        'inferencePools[main].protocol: the cell "main" has tokenizer.http.enabled: false',
    ),
    "a pool of HTTP whose cells have other names": (
        pools(
            {"cells": ["main", "b"], "protocol": "http"},
            cells=[{"name": "b", "tokenizer": {**IMAGES["tokenizer"], "settings": {"served-model-name": "chat"}}}],
        ),
        "inferencePools[main].cells: they serve different models: models, chat",
    ),
    "a pool of another protocol": (pools({"protocol": "h2c"}), "protocol"),
    "a pool of two models": (
        pools({"cells": ["main", "b"]}, cells=[{"name": "b", "model": {"pvc": "models", "name": "other"}}]),
        "inferencePools[main].cells: they serve different models: models, other",
    ),
    "a pool with TLS and without": (
        pools({"cells": ["main", "b"]}, cells=[{"name": "b", "tls": {"insecure": True}}]),
        "inferencePools[main].cells: some have TLS and some have not",
    ),
    "a pool without a picker": (pools({"endpointPicker": {"port": 9002}}), "endpointPicker"),
    "a pool whose picker has no port": (pools({"endpointPicker": {"name": "picker"}}), "port"),
    "a picker that cannot read metrics": (
        pools({}, networkPolicy={}),
        "networkPolicy.endpointPickers: is required with inferencePools",
    ),
    "null instead of a value": (workers(dp=None), "dp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_the_value_s_name(case: str) -> None:
    wrong, named = REFUSED[case]
    with pytest.raises(RenderError) as refused:
        render(values=wrong)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            values({"model": {"pvc": "", "image": f"models/m@{DIGEST}"}}),
            "cells[main].model.image: needs Kubernetes 1.33",
        ),
        (
            workers(gpu={"resource": "", "deviceClass": "gpu.amd.com"}),
            "cells[main].workers.gpu.deviceClass: needs Kubern",
        ),
    ],
)
def test_what_the_cluster_is_too_old_for_is_refused(wrong: Tree, named: str) -> None:
    with pytest.raises(RenderError) as refused:
        render(values=wrong, kubernetes="1.30.0")
    assert named in str(refused.value)


def test_a_cell_s_value_wins_over_the_default_also_where_it_is_false_or_zero_or_empty() -> None:
    defaults = {
        "workers": {"dp": 2, "ep": True, "gpu": {"resource": "nvidia.com/gpu"}, "settings": {"num-threads": 4}},
        "shutdown": {"preStopSeconds": 7},
    }
    own = {"workers": {"ep": False, "gpu": {"resource": ""}}, "shutdown": {"preStopSeconds": 0}}
    (group,) = find(render(values=values(own, cellDefaults=defaults), apis=[LEADER_WORKER_SETS]), "LeaderWorkerSet")
    (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    assert group["spec"]["replicas"] == 2
    assert "--ep" not in container["args"]
    assert "--worker.num-threads=4" in container["args"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "lifecycle" not in container


def test_a_pod_template_is_merged_by_names_and_mount_paths() -> None:
    patch = {
        "metadata": {"annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "containers": [
                {"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "WARN"}]},
                {"name": "sidecar", "image": "s"},
            ],
            "tolerations": [{"key": "mine", "operator": "Exists"}],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "2Gi"}}],
        },
    }
    before = find(render(values=workers()), "StatefulSet", "-worker")[0]["spec"]["template"]
    after = find(render(values=workers(podTemplate=patch)), "StatefulSet", "-worker")[0]["spec"]["template"]
    assert after["metadata"]["annotations"] == {"note": "x"}
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert after["spec"]["nodeSelector"] == {"disk": "fast"}
    assert [each["name"] for each in after["spec"]["containers"]] == ["worker", "sidecar"]
    first, old = after["spec"]["containers"][0], before["spec"]["containers"][0]
    assert first["args"] == old["args"]
    assert {each["name"] for each in first["env"]} == {"GROUP_INDEX", "NCCL_DEBUG"}
    assert after["spec"]["tolerations"] == [{"key": "mine", "operator": "Exists"}]
    sizes = {each["name"]: each.get("emptyDir", {}).get("sizeLimit") for each in after["spec"]["volumes"]}
    assert sizes == {each["name"]: each.get("emptyDir", {}).get("sizeLimit") for each in before["spec"]["volumes"]} | {
        "tmp": "2Gi"
    }


@pytest.mark.parametrize(
    ("part", "patch", "path"),
    [
        ("workers", {"volumes": [{"name": "cache", "hostPath": {"path": "/cache"}}]}, ("volumes", "cache")),
        ("workers", {"volumes": [{"name": "model", "emptyDir": {}}]}, ("volumes", "model")),
        (
            "workers",
            {"containers": [{"name": "worker", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}]},
            ("containers", "worker", "env", "A"),
        ),
    ],
    ids=["another volume", "another model", "another variable"],
)
def test_a_source_of_another_kind_takes_the_place_of_the_chart_s(part: str, patch: Tree, path: tuple[str, ...]) -> None:
    given = workers(env={"A": "a"}, podTemplate={"spec": patch})
    node: Any = find(render(values=given), "StatefulSet", "-worker")[0]["spec"]["template"]["spec"]
    expected: Any = patch
    for step in path:
        node, expected = (
            tree[step] if isinstance(tree, dict) else next(each for each in tree if each["name"] == step)
            for tree in (node, expected)
        )
    assert node == expected


def test_a_port_keeps_its_number_when_more_is_said_of_it() -> None:
    patch = {"containers": [{"name": "worker", "ports": [{"name": "worker", "hostPort": 50053}]}]}
    (found,) = find(render(values=workers(podTemplate={"spec": patch})), "StatefulSet", "-worker")
    ports = found["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": "worker", "containerPort": 50053, "hostPort": 50053} in ports


def test_a_user_id_in_a_pod_template_stays_a_whole_number() -> None:
    patch = {"spec": {"securityContext": {"runAsUser": 1000650000}}}
    (found,) = find(render(values=workers(podTemplate=patch)), "StatefulSet", "-worker")
    user = found["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert (type(user), user) == (int, 1000650000)


@pytest.mark.parametrize("part", ["tokenizer", "scheduler", "workers"])
def test_null_takes_a_field_of_any_map_away(part: str) -> None:
    name = {"workers": "worker"}.get(part, part)
    kind = {"tokenizer": "Deployment"}.get(part, "StatefulSet")
    patch = {
        "metadata": {"labels": {"team": None}, "annotations": {"absent": None, "note": "x"}},
        "spec": {
            "containers": [
                {"name": name, "resources": {"limits": {"cpu": None}}, "securityContext": {"capabilities": None}},
                {"name": "sidecar", "resources": {"limits": {"cpu": None, "memory": "1Gi"}}},
            ],
            "securityContext": {"runAsUser": None},
            "affinity": {"nodeAffinity": {"preferred": None, "required": {"a": None}}},
        },
    }
    given = values({part: {"podTemplate": patch}}, labels={"team": "search"})

    template = find(render(values=given), kind, f"-{name}")[0]["spec"]["template"]

    own, sidecar = template["spec"]["containers"]
    assert "cpu" not in own["resources"]["limits"]
    assert {"cpu", "memory"} <= own["resources"]["requests"].keys()
    assert "memory" in own["resources"]["limits"]
    assert "capabilities" not in own["securityContext"]
    assert sidecar["resources"] == {"limits": {"memory": "1Gi"}}
    assert "runAsUser" not in template["spec"]["securityContext"]
    assert template["spec"]["affinity"] == {"nodeAffinity": {"required": {}}}
    assert "team" not in template["metadata"]["labels"]
    assert template["metadata"]["annotations"].items() >= {"note": "x"}.items()
    assert "absent" not in template["metadata"]["annotations"]


@pytest.mark.parametrize("part", ["tokenizer", "scheduler", "workers"])
@pytest.mark.parametrize(("limit", "expected"), [("none", None), ("", "250m"), ("3", "3")])
def test_cpus_have_a_limit_of_their_own(part: str, limit: str, expected: str | None) -> None:
    name = {"workers": "worker"}.get(part, part)
    kind = {"tokenizer": "Deployment"}.get(part, "StatefulSet")
    given = values({part: {"resources": {"cpu": "250m", "cpuLimit": limit}}})

    (container,) = find(render(values=given), kind, f"-{name}")[0]["spec"]["template"]["spec"]["containers"]

    resources = container["resources"]
    assert resources["requests"]["cpu"] == "250m"
    assert resources["limits"].get("cpu") == expected
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_an_image_without_digest_and_tag_is_that_of_the_chart_s_release() -> None:
    release = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    objects = render(values=workers(image={"digest": "", "tag": ""}))
    (stateful_set,) = find(objects, "StatefulSet", "-worker")
    image = stateful_set["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"registry.example.org/lockstep/lockstep-worker-rocm:{release}"


@pytest.mark.parametrize(
    "endpoint", ["https://hub.example.org", "http://hub.models.svc", "http://hub.models.svc:8080/a"]
)
def test_a_hub_in_the_cluster_may_speak_plain_http(endpoint: str) -> None:
    objects = render(values=downloaded_values({"model": {"download": {"endpoint": endpoint}}}))
    assert endpoint in json.dumps(find(objects, "Job"))


def test_alerts_lead_to_the_runbook_where_it_has_a_url() -> None:
    url = "https://docs.example.org/runbook"
    given = values(monitoring={"rules": True, "runbookUrl": url})
    groups = find(render(values=given), "PrometheusRule")[0]["spec"]["groups"]
    notes = [rule["annotations"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert {each["runbook_url"] for each in notes} == {
        each["runbook"].replace("deploy/RUNBOOK.md", url) for each in notes
    }


def test_a_longer_grace_period_is_taken() -> None:
    patch = {"spec": {"terminationGracePeriodSeconds": 3600}}
    (stateful_set,) = find(render(values=workers(podTemplate=patch)), "StatefulSet", "-worker")
    assert stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 3600


def test_the_chart_has_at_most_126_values() -> None:
    assert 60 < len(list(leaves())) <= 126


def test_the_schema_is_closed_everywhere() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    is_open = {path for path, node in objects_of(schema, "") if node.get("additionalProperties") in (None, True)}
    # A parent chart's values, and what podTemplate merges.
    assert is_open == {
        "/properties/global",
        "/properties/extraObjects/items",
        *(f"/properties/testPodTemplate/properties/{key}" for key in ("metadata", "spec")),
        *(
            f"/definitions/{part}/properties/podTemplate/properties/{key}"
            for part in ("tokenizer", "scheduler", "workers", "model")
            for key in ("metadata", "spec")
        ),
    }


def objects_of(node: Any, path: str) -> Iterator[tuple[str, Tree]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for name, child in node.items():
            yield from objects_of(child, f"{path}/{name}")


def test_each_value_is_used_by_a_template() -> None:
    templates = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    unused = [name for name, _, _ in leaves() if f".{name.rpartition('.')[2]}" not in templates]
    assert unused == []


# What `lockstep.derive` adds to a cell.
DERIVED = {
    "prefix",
    "trustDomain",
    "modelDir",
    "pools",
    "anyHost",
    *(
        f"workers.{name}"
        for name in (*("coupled", "domains", "ranks", "ranksPerNode", "setPerDomain", "onGpu", "places", "liveKind"),)
    ),
}
# What templates call the parts of a cell.
PARTS = {"$cell": "", "$workers": "workers.", "$tls": "tls.", "$model": "model.", "$monitoring": "monitoring."}


def test_templates_use_no_value_that_there_is_not() -> None:
    known = {name for path, _, _ in leaves() for name in prefixes(path.removeprefix("cellDefaults."))}
    known |= DERIVED | {"name", "cells", "cellDefaults"}
    templates = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    top = re.findall(r"\.Values\.([\w.]+)", templates)
    of_parts = re.findall(r"(\$[a-z]+)\.([A-Za-z][\w.]*)", templates)
    used = {*top, *(PARTS[part] + name for part, name in of_parts if part in PARTS)}
    assert len(used) > 50
    assert used - known == set()


def prefixes(path: str) -> Iterator[str]:
    """A value's path, and those of the maps that it is in."""
    names = path.split(".")
    yield from (".".join(names[:end]) for end in range(1, len(names) + 1))
