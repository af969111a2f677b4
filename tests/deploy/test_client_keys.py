"""Clients' keys in the chart: who mounts which Secret, and what `helm test` then asks."""

from __future__ import annotations

from typing import Any

from tests.support.deploy.chart import Tree, containers, find, pod_templates, render
from tests.support.deploy.chart_values import values

FLAG = "--client-keys=/client-keys/keys.jsonl"


def component_to_pod(**keys: str) -> dict[str, Tree]:
    """A pod's spec of each component."""
    objects = render(values=values({"clientKeys": keys}))
    return {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: template["spec"]
        for _, template in pod_templates(objects)
    }


def secret_at(spec: Tree, path: str) -> Any:
    """The Secret that the first container mounts at a path; None if it has no such mount."""
    names = [mount["name"] for mount in containers(spec)[0]["volumeMounts"] if mount["mountPath"] == path]
    secrets = [volume["secret"] for volume in spec["volumes"] if volume["name"] in names]
    assert len(secrets) == len(names) <= 1
    return secrets[0]["secretName"] if secrets else None


def test_services_with_a_client_port_read_the_keys_and_no_other_pod_has_them() -> None:
    pods = component_to_pod(secret="keys")
    found = {
        name: (secret_at(spec, "/client-keys"), FLAG in containers(spec)[0]["args"]) for name, spec in pods.items()
    }
    assert found == {"tokenizer": ("keys", True), "scheduler": ("keys", True), "worker": (None, False)}


def test_the_tests_send_a_key_of_their_own() -> None:
    tree = values({"clientKeys": {"secret": "keys", "testSecret": "1e3"}})
    pods = find(render(values=tree), "Pod")
    assert len(pods) == 2
    for pod in pods:
        assert secret_at(pod["spec"], "/key") == "1e3"
        assert secret_at(pod["spec"], "/client-keys") is None
        assert "--key-file=/key/key" in containers(pod["spec"])[0]["args"]


def test_without_keys_nothing_mentions_them() -> None:
    assert "--key-file=" not in str(pods := component_to_pod())
    assert "client-keys" not in str(pods)
    assert "test" in pods
