"""Where a cell's model is: a claim, nodes, an image, or a hub that it is downloaded from."""

from __future__ import annotations

import pytest

from tests.support.deploy.chart import Tree, containers, find, pod_templates, render
from tests.support.deploy.chart_values import DIGEST, DOWNLOAD, downloaded_values, pools, values
from tests.support.deploy.workloads import args_of, flag, spec_of, template_of


def model_of(objects: list[Tree]) -> Tree:
    volumes: list[Tree] = spec_of(objects, "StatefulSet", "-worker")["volumes"]
    return next(each for each in volumes if each["name"] == "model")


def test_a_model_can_be_in_a_claim() -> None:
    objects = render(values=values({"model": {"path": "a/b"}}))
    assert model_of(objects)["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert args_of(objects, "StatefulSet", "-worker")[0] == "/models/a/b"
    assert flag(args_of(objects, "Deployment", "-tokenizer"), "model-dir") == "/models/a/b"


def test_a_model_can_be_an_image() -> None:
    image = f"models/m@{DIGEST}"
    volume = model_of(render(values=values({"model": {"pvc": "", "image": image}})))
    assert volume["image"] == {"reference": image, "pullPolicy": "IfNotPresent"}


def test_a_model_on_the_nodes_is_a_volume_of_the_cluster() -> None:
    objects = render(values=values({"model": {"pvc": "", "hostPath": "/mnt/models"}}))
    (volume,) = find(objects, "PersistentVolume")
    (claim,) = find(objects, "PersistentVolumeClaim")
    assert volume["spec"]["hostPath"]["path"] == "/mnt/models"
    assert volume["spec"]["claimRef"] == {"namespace": "ns", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert model_of(objects)["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


COMMAND = ["lockstep", "pull"]
DIRECTORY = f"/models/models--acme--tiny-llama/snapshots/{DOWNLOAD['commit']}"


def downloads(**more: str) -> list[Tree]:
    """The objects of a cell whose model is downloaded."""
    return render(values=downloaded_values({"model": {"download": more}}))


def pull_of(pod: Tree) -> tuple[Tree, dict[str, object]]:
    """The container of a pod that pulls or waits, and its environment."""
    (found,) = [each for each in containers(pod) if each["command"] == COMMAND]
    return found, {each["name"]: each.get("value", each.get("valueFrom")) for each in found["env"]}


def test_a_job_downloads_a_commit_and_pods_wait_for_it() -> None:
    objects = downloads()
    (job,) = find(objects, "Job")
    (claim,) = find(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    name = f"acme/tiny-llama@{DOWNLOAD['commit']}"
    container, environment = pull_of(job["spec"]["template"]["spec"])
    assert container["args"] == [name]
    # The images say that there is no hub.
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert not {"HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "SSL_CERT_FILE"} & environment.keys()
    for pod in (spec_of(objects, "StatefulSet", "-worker"), spec_of(objects, "Deployment", "-tokenizer")):
        waiting, its_environment = pull_of(pod)
        assert waiting["args"] == [name, "--wait"]
        assert its_environment["HF_HUB_CACHE"] == environment["HF_HUB_CACHE"] == "/models"
        assert next(each for each in pod["volumes"] if each["name"] == "model")["persistentVolumeClaim"]["readOnly"]
    assert args_of(objects, "StatefulSet", "-worker")[0] == DIRECTORY
    assert flag(args_of(objects, "Deployment", "-tokenizer"), "model-dir") == DIRECTORY


def test_a_download_has_the_token_the_hub_the_proxy_and_the_authorities_of_its_values() -> None:
    given = {"endpoint": "https://hub.example.org", "tokenSecret": "hub", "proxy": "http://p:3128", "caConfigMap": "ca"}
    (job,) = find(downloads(**given), "Job")
    pod = job["spec"]["template"]["spec"]
    container, environment = pull_of(pod)
    assert environment["HF_ENDPOINT"] == given["endpoint"]
    assert environment["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment["HTTPS_PROXY"] == given["proxy"]
    assert environment["SSL_CERT_FILE"] == "/ca/ca.crt"
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert {"name": "ca", "mountPath": "/ca", "readOnly": True} in container["volumeMounts"]


def test_with_a_cache_of_the_nodes_each_pod_fills_its_own() -> None:
    objects = downloads(nodePath="/var/lib/models", caConfigMap="ca", tokenSecret="hub")
    assert not find(objects, "Job")
    (volume,), (claim,) = find(objects, "PersistentVolume"), find(objects, "PersistentVolumeClaim")
    assert volume["spec"]["hostPath"]["path"] == "/var/lib/models"
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for kind, name, flags in (("StatefulSet", "-worker", []), ("Deployment", "-tokenizer", ["--without-weights"])):
        pod = spec_of(objects, kind, name)
        pulling, environment = pull_of(pod)
        assert pulling["args"][1:] == flags
        assert "HF_TOKEN" in environment
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {mount["name"] for mount in pulling["volumeMounts"]} <= volumes.keys()
        assert volumes["model"]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        # Only what pulls writes.
        (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "model"]
        assert mount["readOnly"]


def test_with_a_volume_of_one_node_all_pods_that_need_it_are_there() -> None:
    objects = downloads(accessMode="ReadWriteOnce")
    (claim,) = find(objects, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    terms = []
    for name, template in pod_templates(objects):
        mounts = any(each["name"] == "model" for each in template["spec"].get("volumes", []))
        assert ("affinity" in template["spec"]) is mounts, name
        if mounts:
            (term,) = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            terms.append(term)
            # Kubernetes places the first pod anywhere only if the term selects the pod itself.
            selector, labels = term["labelSelector"], template["metadata"]["labels"]
            assert selector["matchLabels"].items() <= labels.items()
            (expression,) = selector["matchExpressions"]
            assert (expression["operator"], labels[expression["key"]] in expression["values"]) == ("In", True)
    assert len(terms) == 3
    assert all(term == terms[0] for term in terms)


def test_another_commit_is_another_job_in_the_same_claim() -> None:
    before, after = downloads(), downloads(commit="5" * 40)
    assert find(before, "Job")[0]["metadata"]["name"] != find(after, "Job")[0]["metadata"]["name"]
    assert find(before, "PersistentVolumeClaim") == find(after, "PersistentVolumeClaim")
    assert template_of(before, "StatefulSet", "-scheduler") != template_of(after, "StatefulSet", "-scheduler")


def test_a_downloaded_model_is_called_by_its_name_on_the_hub() -> None:
    cells = [{"name": "b", "model": {"pvc": "models", "name": DOWNLOAD["repository"]}}]
    given = pools({"cells": ["main", "b"]}, cells=cells)
    given["cells"][0]["model"] = {"download": DOWNLOAD}
    assert len(find(render(values=given), "InferencePool")) == 1


def test_what_waits_for_a_download_may_take_as_much_longer() -> None:
    cell = {"model": {"download": {"deadlineSeconds": 9000}}, "tokenizer": {"startupSeconds": 100}}
    with_download, without = (
        find(render(values=each), "Deployment", "-tokenizer")[0]["spec"]["progressDeadlineSeconds"]
        for each in (downloaded_values(cell), values({"tokenizer": {"startupSeconds": 100}}))
    )
    assert (without, with_download) == (700, 9700)
    (job,) = find(render(values=downloaded_values(cell)), "Job")
    assert job["spec"]["activeDeadlineSeconds"] == 9000


@pytest.mark.parametrize(
    "model",
    [
        {"path": "other"},
        {"pvc": "other"},
        {"pvc": "", "hostPath": "/mnt/models"},
        {"pvc": "", "image": f"models/m@{DIGEST}"},
    ],
    ids=lambda model: next(name for name, value in model.items() if value),
)
def test_another_model_is_another_scheduler(model: Tree) -> None:
    before, after = (
        template_of(render(values=tree), "StatefulSet", "-scheduler") for tree in (values(), values({"model": model}))
    )
    assert before != after


def test_another_name_of_the_model_restarts_no_scheduler() -> None:
    before, after = (
        template_of(render(values=tree), "StatefulSet", "-scheduler")
        for tree in (values(), values({"model": {"name": "chat"}}))
    )
    assert before == after
