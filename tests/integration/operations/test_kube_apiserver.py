"""List, watch and RBAC of a real API server, which `TEST_KUBE_APISERVER` may name by its URL.

`TEST_KUBE_ACCOUNT` is then a directory with `token`, `ca.crt` and `namespace` of a service account that has the Role in
deploy/README.md and no other. Nothing is written to the server.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.scheduler.discovery.watch_messages import WatchTask
from tests.support.kubernetes.watched_slices import watch_slices, watch_task

_API_SERVER = os.environ.get("TEST_KUBE_APISERVER", "")

pytestmark = pytest.mark.skipif(not _API_SERVER, reason="TEST_KUBE_APISERVER names no real API server")


def make_task(*, namespace: str | None = None) -> WatchTask:
    account = Path(os.environ["TEST_KUBE_ACCOUNT"])
    own = (account / "namespace").read_text(encoding="utf-8").strip()
    return watch_task(_API_SERVER, account, period_s=2.0, namespace=namespace or own)


def test_slices_are_listed_and_watched_again_and_again() -> None:
    with watch_slices(make_task()) as watched:
        # A list, a watch that the server ends, and another list.
        for _ in range(3):
            assert watched.next_message().problem == ""


def test_slices_of_another_namespace_are_forbidden() -> None:
    with watch_slices(make_task(namespace="kube-system")) as watched:
        watched.wait_for_problem("403")
