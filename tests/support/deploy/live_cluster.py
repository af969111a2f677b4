"""A cluster's API as far as Helm looks things up in it: which kinds there are, and the objects that run.

It says what it is given, and takes no change. A real API server would also check, default and store.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.deploy.chart import KUBERNETES, Tree

# The kinds that the chart makes without a monitoring stack or a gateway.
_KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "cert-manager.io/v1": ("Certificate",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}

_OF_THE_RELEASE = {"meta.helm.sh/release-name": "rel", "meta.helm.sh/release-namespace": "ns"}


@contextlib.contextmanager
def live_cluster(objects: Sequence[Tree], folder: Path, *, has_sets: bool = False) -> Iterator[Path]:
    """Serve `objects`; yields a kubeconfig.

    Args:
        objects: What runs, in the namespace `ns`.
        folder: For the kubeconfig.
        has_sets: Whether there are LeaderWorkerSets.
    """
    kinds = {version: set(names) for version, names in _KINDS.items() if has_sets or "leader" not in version}
    answers = {path: json.dumps(answer).encode() for path, answer in _answers(objects, kinds)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path.partition("?")[0])
            absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            data = json.dumps(absent).encode() if body is None else body
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield _write_kubeconfig(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answers(objects: Sequence[Tree], kinds: Mapping[str, Set[str]]) -> Iterator[tuple[str, Tree]]:
    yield "/version", {"major": "1", "minor": "36", "gitVersion": f"v{KUBERNETES}"}
    yield "/api", {"kind": "APIVersions", "versions": ["v1"]}
    groups: dict[str, list[Tree]] = {}
    for version, names in kinds.items():
        group, _, number = version.rpartition("/")
        resources = [{"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": ["get"]} for kind in names]
        yield _path(version), {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if group:
            groups.setdefault(group, []).append({"groupVersion": version, "version": number})
    listed = [{"name": group, "versions": versions} for group, versions in groups.items()]
    yield "/apis", {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    for each in objects:
        if each["kind"] in kinds.get(each["apiVersion"], ()):
            name = each["metadata"]["name"]
            owned = {**each, "metadata": {**each["metadata"], "annotations": _OF_THE_RELEASE}}
            yield f"{_path(each['apiVersion'])}/namespaces/ns/{_plural(each['kind'])}/{name}", owned


def _path(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


def _write_kubeconfig(folder: Path, url: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
