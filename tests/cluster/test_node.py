"""The chart on a real kubelet: pods of three roles, with TLS and clients' keys, under the standard `restricted`.

Tests share a cell and leave it ready. Streams go on while a test does what operators do.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy.chart import find, render
from tests.support.kubernetes.images import REGISTRY, TAG, build_images, why_no_images
from tests.support.kubernetes.node import Node, enforces_policies, run_node, why_no_node
from tests.support.kubernetes.release import NAMESPACE, Release, cell_values
from tests.support.system.polling import poll_until

MISSING = "; ".join(filter(None, [why_no_node(), why_no_images()]))
# The first test also waits for the images.
pytestmark = pytest.mark.timeout(7200)
needs_node = pytest.mark.skipif(bool(MISSING), reason=MISSING)
needs_policies = pytest.mark.skipif(not enforces_policies(), reason="KUBERNETES_CNI names no plugin for NetworkPolicy")

NUM_PODS = 6
OTHER_TAG = "two"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Iterator[Release]:
    """A cell that is ready."""
    archives, folder = build_images(), tmp_path_factory.mktemp("node")
    with run_node(folder, archives) as node:
        for image in ("tokenizer", "scheduler", "worker-cpu"):
            name = f"{REGISTRY}/lockstep-{image}"
            node.ctr("images", "tag", f"{name}:{TAG}", f"{name}:{OTHER_TAG}")
        node.kubectl("create", "namespace", NAMESPACE)
        node.kubectl("label", "namespace", NAMESPACE, RESTRICTED)
        release = Release(node, folder)
        give_model(release, real_model.resolve())
        release.accept_keys(release.key)
        release.renew_certificates()
        release.upgrade()
        yield release


def give_model(release: Release, folder: Path) -> None:
    both = {"accessModes": ["ReadOnlyMany"], "storageClassName": "none"}
    own = {"capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}}
    claim = {"volumeName": "models", "resources": {"requests": {"storage": "1Gi"}}}
    name = {"apiVersion": "v1", "metadata": {"name": "models"}}
    release.apply(
        {**name, "kind": "PersistentVolume", "spec": {**both, **own}},
        {**name, "kind": "PersistentVolumeClaim", "spec": {**both, **claim}},
    )


def test_values_of_the_cell_are_valid() -> None:
    objects = render(values=cell_values())
    assert [each["spec"]["replicas"] for each in find(objects, "StatefulSet", "cell-worker")] == [2]
    assert len(find(objects, "Pod")) == 2


@pytest.mark.slow
@needs_node
def test_an_install_is_ready_and_passes_its_test(release: Release) -> None:
    pods = release.pods().values()
    assert len(pods) == NUM_PODS
    assert {status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"]} == {0}
    release.helm("test", "rel")


@pytest.mark.slow
@needs_node
async def test_an_upgrade_of_every_role_loses_no_answer(release: Release) -> None:
    before = release.pods()
    async with release.streaming():
        await asyncio.to_thread(release.upgrade, tag=OTHER_TAG)
        await release.wait_for_pods(NUM_PODS)
    assert not before.keys() & release.pods().keys()


@pytest.mark.slow
@needs_node
async def test_a_drain_keeps_the_budgets_and_loses_no_answer(release: Release) -> None:
    before = release.pods()
    async with release.streaming():
        draining = asyncio.create_task(asyncio.to_thread(drain, release.node))
        while not draining.done():
            budgets = await asyncio.to_thread(release.node.server.get, BUDGETS)
            states = [budget["status"] for budget in budgets["items"]]
            assert all(state["currentHealthy"] >= state["desiredHealthy"] == 1 for state in states), states
        await draining
        await release.wait_for_pods(NUM_PODS)
    assert not before.keys() & release.pods().keys()


def drain(node: Node) -> None:
    """Drain the only node, which takes pods again once that has begun: otherwise the budgets would end it."""
    command = node.command("drain", "node", "--delete-emptydir-data", "--force", "--timeout=20m")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        output = ""
        while "evicting pod" not in output:
            line = process.stdout.readline()
            output += line
            assert line, output
        node.kubectl("uncordon", "node")
        output += process.stdout.read()
    assert process.returncode == 0, output


@pytest.mark.slow
@needs_node
async def test_fewer_workers_and_more_again_lose_no_answer(release: Release) -> None:
    schedulers = {uid for uid, pod in release.pods().items() if "scheduler" in pod["metadata"]["name"]}
    async with release.streaming():
        for dp in (1, 2):
            await asyncio.to_thread(release.upgrade, tag=OTHER_TAG, dp=dp)
            await release.wait_for_pods(NUM_PODS - 2 + dp)
    assert schedulers <= release.pods().keys()


@pytest.mark.slow
@needs_node
async def test_keys_and_certificates_are_rotated_under_streams(release: Release) -> None:
    before = release.pods()
    async with release.streaming():
        await asyncio.to_thread(release.accept_keys, release.key, "key-2")
        await poll_until(lambda: release.accepts("key-2"), lambda told: told == {True})
        new = await asyncio.to_thread(release.renew_certificates)
        expected = {new["tokenizer"].certificate.decode()}
        await poll_until(lambda: asyncio.to_thread(release.certificates), lambda found: found == expected)
    old, release.key = release.key, "key-2"
    async with release.streaming():
        await asyncio.to_thread(release.accept_keys, release.key)
        await poll_until(lambda: release.accepts(old), lambda told: told == {False})
        await asyncio.to_thread(release.helm, "test", "rel")
    assert before.keys() == release.pods().keys()


@pytest.mark.slow
@needs_policies
@needs_node
def test_only_clients_reach_a_tokenizer(release: Release) -> None:
    code = "import socket, sys; socket.create_connection((sys.argv[1], 8000), 10)"
    address, image = release.addresses()[0], f"{REGISTRY}/lockstep-tokenizer:{TAG}"
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "ask", "image": image, "command": ["python", "-c", code, address], "securityContext": rights}
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"restartPolicy": "Never", "securityContext": profile, "containers": [container]}
    for name, phase in (("true", "Succeeded"), ("false", "Failed")):
        metadata = {"name": name, "labels": {"lockstep-client": name}}
        release.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod})
        wait = ("wait", f"pod/{name}", f"--for=jsonpath={{.status.phase}}={phase}", "--timeout=5m")
        release.node.kubectl(*wait, f"--namespace={NAMESPACE}")
        release.node.kubectl("delete", "pod", name, f"--namespace={NAMESPACE}")
