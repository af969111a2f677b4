"""Every rendered pod keeps the rules: Pod Security `restricted`, limits, probes, digests, grace periods, no token."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.deploy.chart import (
    EXAMPLES,
    LEADER_WORKER_SETS,
    Tree,
    containers,
    find,
    pod_templates,
    render,
    rendered_examples,
)
from tests.support.deploy.chart_values import values

# What Pod Security `restricted` admits, of the kinds that the chart uses.
# Source: Pod Security Standards, "Restricted", Volume Types.
RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
SERVICES = ("tokenizer", "scheduler", "worker")
TEARDOWN_S = 15
"""The default, which no example changes."""
FACTORS = {"Mi": 1, "Gi": 1024, "Ti": 1024**2}
CASES = [f"{path.stem} {kind}" for path in EXAMPLES for kind in ("StatefulSet", "LeaderWorkerSet")]


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Tree]:
    return rendered_examples()[request.param]


def pods(objects: list[Tree]) -> Iterator[tuple[str, Tree]]:
    for name, template in pod_templates(objects):
        yield name, template["spec"]


def services(objects: list[Tree]) -> Iterator[tuple[str, Tree, Tree]]:
    """The pods of the three services, each with its one container."""
    for name, template in pod_templates(objects):
        if template["metadata"]["labels"]["app.kubernetes.io/component"] in SERVICES:
            (container,) = template["spec"]["containers"]
            yield name, template["spec"], container


def mebibytes(size: str) -> int:
    return int(size[:-2]) * FACTORS[size[-2:]]


def test_pods_are_not_root_and_share_nothing_with_their_node(objects: list[Tree]) -> None:
    for name, pod in pods(objects):
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] >= 1000, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert all(set(volume) - {"name"} <= RESTRICTED_VOLUMES for volume in pod.get("volumes", [])), name


def test_containers_have_no_privilege_and_a_read_only_root(objects: list[Tree]) -> None:
    for name, pod in pods(objects):
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


def test_images_are_named_by_their_registry_and_digest(objects: list[Tree]) -> None:
    for name, pod in pods(objects):
        for container in containers(pod):
            # The demo is a trial, and has tags.
            version = "" if "-demo" in name else "@sha256:[0-9a-f]{64}"
            assert re.fullmatch(f"registry.example.org/lockstep/[^@:]+{version or ':0.1.0'}", container["image"]), name


def test_requests_equal_limits_but_for_cpus_that_may_be_more(objects: list[Tree]) -> None:
    for name, pod in pods(objects):
        for container in containers(pod):
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert {**requests, "cpu": ""} == {**limits, "cpu": ""}, name
            assert {"cpu", "memory"} <= requests.keys(), name
            assert "memory" in limits, name


def test_volumes_in_memory_fit_the_memory_limit_and_all_others_are_bounded(objects: list[Tree]) -> None:
    for name, pod, container in services(objects):
        empty = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
        in_memory = sum(mebibytes(each["sizeLimit"]) for each in empty if each.get("medium") == "Memory")
        assert in_memory < mebibytes(container["resources"]["limits"]["memory"]), name
        assert bool(in_memory) is ("-worker" in name), name


def test_probes_are_the_management_port_s(objects: list[Tree]) -> None:
    for name, _, container in services(objects):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe, path in {
            "startupProbe": "/startupz",
            "livenessProbe": "/livez",
            "readinessProbe": "/readyz",
        }.items():
            assert container[probe]["httpGet"] == {"path": path, "port": "manage"}, name
        assert f"--manage-listen=0.0.0.0:{ports['manage']}" in container["args"], name


def test_the_grace_period_covers_the_hook_the_drain_and_the_end(objects: list[Tree]) -> None:
    for name, pod, container in services(objects):
        hook = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = next(int(arg.partition("=")[2]) for arg in container["args"] if arg.startswith("--drain-s="))
        assert pod["terminationGracePeriodSeconds"] == hook + drain + TEARDOWN_S, name


@pytest.mark.parametrize("version", ["1.29.0", "1.36.0"])
def test_the_grace_period_follows_the_values(version: str) -> None:
    shutdown = {"preStopSeconds": 7, "drainSeconds": 100, "answerSeconds": 900, "teardownSeconds": 20}
    rendered = render(values=values({"shutdown": shutdown}), kubernetes=version)
    for name, pod, container in services(rendered):
        drain_s = 900 if "tokenizer" in name else 100
        assert pod["terminationGracePeriodSeconds"] == 27 + drain_s, name
        assert f"--drain-s={drain_s}" in container["args"], name
        assert "7" in str(container["lifecycle"]["preStop"]), name


def test_only_schedulers_that_watch_endpoints_have_a_token(objects: list[Tree]) -> None:
    watchers = {f"StatefulSet/{each['metadata']['name']}" for each in find(objects, "Role")}
    with_token = {name for name, pod in pods(objects) if pod["automountServiceAccountToken"]}
    assert with_token == watchers
    assert all(each["automountServiceAccountToken"] is False for each in find(objects, "ServiceAccount"))
    rules = [rule for each in find(objects, "Role") for rule in each["rules"]]
    assert all(
        rule == {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        for rule in rules
    )
    assert not [each for each in objects if each["kind"].startswith("ClusterRole")]


def test_no_pod_learns_of_other_services_from_its_environment(objects: list[Tree]) -> None:
    assert all(pod["enableServiceLinks"] is False for _, pod in pods(objects))


def test_settings_are_flags_not_variables(objects: list[Tree]) -> None:
    for _, pod in pods(objects):
        names = [variable["name"] for container in containers(pod) for variable in container.get("env", [])]
        assert not [name for name in names if name.startswith("LOCKSTEP_")]


def test_everything_that_selects_pods_selects_some(objects: list[Tree]) -> None:
    # What controllers add to their pods.
    added = {"leaderworkerset.sigs.k8s.io/group-index": "0", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    labels = [template["metadata"]["labels"] | added for _, template in pod_templates(objects)]
    for each in objects:
        spec = each.get("spec", {})
        selector = spec.get("selector", {})
        chosen = selector if each["kind"] == "Service" else selector.get("matchLabels") if selector else None
        if chosen and chosen.get("leaderworkerset.sigs.k8s.io/group-index", "0") != "0":
            continue
        assert chosen is None or any(chosen.items() <= pod.items() for pod in labels), each["metadata"]["name"]


def test_each_object_has_a_name_of_its_own_that_fits(objects: list[Tree]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    # A StatefulSet's pods have a label with its name and 11 characters more, of at most 63.
    assert all(len(name) <= 52 for kind, name in names if kind in {"StatefulSet", "LeaderWorkerSet"})


def test_every_service_survives_an_eviction(objects: list[Tree]) -> None:
    budgets = find(objects, "PodDisruptionBudget")
    assert len(budgets) % 3 == 0
    assert all(each["spec"]["maxUnavailable"] == 1 for each in budgets)
    assert all(each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for each in budgets)


def test_the_examples_with_the_crd_have_no_stateful_set_of_workers() -> None:
    for name, objects in rendered_examples().items():
        workers = [each for each in objects if "-worker" in each["metadata"]["name"] and each["kind"] == "StatefulSet"]
        assert not (workers and name.endswith("LeaderWorkerSet"))
    assert {
        each["apiVersion"] for _, objects in rendered_examples().items() for each in find(objects, "LeaderWorkerSet")
    } == {LEADER_WORKER_SETS}


def test_every_stateful_set_has_the_service_that_names_its_pods(objects: list[Tree]) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in find(objects, "Service")}
    for each in find(objects, "StatefulSet"):
        assert services[each["spec"]["serviceName"]]["clusterIP"] == "None", each["metadata"]["name"]
