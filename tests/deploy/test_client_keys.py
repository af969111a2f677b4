"""What clients need, keys and certificates, in the chart: who mounts which Secret, and what `helm test` then asks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deploy.chart import Tree, containers, find, pod_templates, render
from tests.support.deploy.chart_values import values

# By the chart's value: the folder of the file that says what clients need, and its flag; the folder of what the tests
# show, and their flags.
NEEDS = {
    "clientKeys": ("/client-keys", "--client-keys=/client-keys/keys.jsonl", "/key", {"--key-file=/key/key"}),
    "clientCa": (
        *("/client-ca", "--client-ca=/client-ca/ca.crt"),
        *("/client", {"--tls-cert=/client/tls.crt", "--tls-key=/client/tls.key"}),
    ),
}


def secret_at(spec: Tree, path: str) -> Any:
    """The Secret that the first container mounts at a path; None if it has no such mount."""
    names = [mount["name"] for mount in containers(spec)[0]["volumeMounts"] if mount["mountPath"] == path]
    secrets = [volume["secret"] for volume in spec["volumes"] if volume["name"] in names]
    assert len(secrets) == len(names) <= 1
    return secrets[0]["secretName"] if secrets else None


@pytest.mark.parametrize("value", NEEDS)
def test_services_with_a_client_port_know_what_clients_need_and_no_other_pod_does(value: str) -> None:
    folder, flag, _, _ = NEEDS[value]
    objects = render(values=values({value: {"secret": "needed"}}))
    found = {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: (
            secret_at(template["spec"], folder),
            flag in containers(template["spec"])[0]["args"],
        )
        for _, template in pod_templates(objects)
    }
    assert found == {"tokenizer": ("needed", True), "scheduler": ("needed", True), "worker": (None, False)}
    assert not find(objects, "Pod"), "the tests have nothing to show"


@pytest.mark.parametrize("value", NEEDS)
def test_the_tests_show_what_is_their_own(value: str) -> None:
    folder, _, own_folder, flags = NEEDS[value]
    pods = find(render(values=values({value: {"secret": "needed", "testSecret": "1e3"}})), "Pod")
    assert len(pods) == 2
    for pod in pods:
        assert secret_at(pod["spec"], own_folder) == "1e3"
        assert secret_at(pod["spec"], folder) is None
        assert flags <= set(containers(pod["spec"])[0]["args"])


def test_a_cell_whose_clients_need_nothing_mentions_none_of_it() -> None:
    objects = render(values=values())
    assert len(find(objects, "Pod")) == 2
    for folder, flag, own_folder, flags in NEEDS.values():
        for _, template in pod_templates(objects):
            assert secret_at(template["spec"], folder) is secret_at(template["spec"], own_folder) is None
        assert not any(each in str(objects) for each in {flag, *flags})
