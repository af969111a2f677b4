"""`helm install` and `helm upgrade` on a real API server: what it stores before and afterwards. No pod runs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.chart import CHART, RenderError, Tree, helm
from tests.support.deploy.chart_values import values
from tests.support.kubernetes.control_plane import ApiServer, missing_binaries, run_api_server

MISSING = missing_binaries("etcd", "kube-apiserver")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

# Without an issuer, whose objects no API server knows by itself.
PLAIN: Mapping[str, Any] = {"tls": {"insecure": True, "trustDomain": "", "issuer": {"name": ""}}}


class Release:
    """A release in a namespace of its own."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        """Nothing is installed yet."""
        self._server = server
        self._values = folder / "values.json"
        self._namespace = f"ns-{uuid.uuid4().hex[:8]}"

    def apply(self, cell: Mapping[str, Any]) -> None:
        """Install or upgrade it with a cell of these values.

        Raises:
            RenderError: Helm or the server refused them.
        """
        self._values.write_text(json.dumps(values({**PLAIN, **cell})), encoding="utf-8")
        where = ["-n", self._namespace, "--create-namespace", f"--kubeconfig={self._server.kubeconfig}"]
        # A path of its own for each time, since the output of equal commands is kept.
        path = self._values.rename(self._values.with_name(f"{uuid.uuid4().hex}.json"))
        helm("upgrade", "--install", "rel", str(CHART), *where, f"--values={path}")

    def stored(self, kind: str, name: str) -> Tree:
        """An object of `apps/v1` as the server has it."""
        found: Tree = self._server.get(f"/apis/apps/v1/namespaces/{self._namespace}/{kind}/rel-main-{name}")
        return found

    def templates(self) -> list[Tree]:
        """The pod templates of the cell's roles, with the server's defaults."""
        places = (("deployments", "tokenizer"), ("statefulsets", "scheduler"), ("statefulsets", "worker"))
        return [self.stored(*place)["spec"]["template"] for place in places]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that tests share, each in a namespace of its own."""
    with run_api_server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def release(server: ApiServer, tmp_path: Path) -> Release:
    return Release(server, tmp_path)


def test_one_replica_more_changes_no_template(release: Release) -> None:
    release.apply({"workers": {"dp": 2}})
    before = release.templates()
    release.apply({"workers": {"dp": 3}})
    assert release.templates() == before
    assert release.stored("statefulsets", "worker")["spec"]["replicas"] == 3


def test_an_autoscaler_of_tokenizers_keeps_their_number(release: Release) -> None:
    release.apply({"tokenizer": {"replicas": 3}})
    release.apply({"tokenizer": {"autoscaling": {"enabled": True}}})
    assert release.stored("deployments", "tokenizer")["spec"]["replicas"] == 3


def test_workers_of_another_kind_are_refused_unless_asked_for(release: Release) -> None:
    release.apply({"workers": {"dp": 4}})
    scaled: Tree = {"dp": 4, "autoscaling": {"enabled": True}}
    with pytest.raises(RenderError, match="would take the place of the StatefulSet"):
        release.apply({"workers": scaled})
    release.apply({"workers": {**scaled, "replaceKind": True}})
    assert release.stored("deployments", "worker")["spec"]["replicas"] == 4


def test_a_list_of_workers_is_kept(release: Release) -> None:
    release.apply({"scheduler": {"discovery": "static"}, "workers": {"dp": 2}})
    before = release.templates()
    release.apply({"workers": {"dp": 2}})
    assert release.templates() == before


def test_a_limit_that_is_taken_away_is_gone(release: Release) -> None:
    release.apply({})
    release.apply({"scheduler": {"resources": {"cpu": "100m", "cpuLimit": "none"}}})
    (container,) = release.stored("statefulsets", "scheduler")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "100m"
    assert "cpu" not in container["resources"]["limits"]
