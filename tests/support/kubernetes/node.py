"""A node of real processes in a machine of its own: containerd, a kubelet, and what a cluster has besides.

There is one node, and no kube-proxy, which the chart does not need since its Services are headless. The plugins are
Debian's, which enforce no NetworkPolicy, or those of the folder `KUBERNETES_CNI`, which then has a `*.conflist` too.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.kubernetes.cluster_dns import run_dns
from tests.support.kubernetes.control_plane import (
    ApiServer,
    find_binary,
    missing_binaries,
    run_api_server,
    running,
)
from tests.support.kubernetes.machine import (
    ADDRESS,
    DNS_ADDRESS,
    own_machine,
    wait_until,
    why_no_machine,
)

PAUSE = "localhost/pause:one"
_KUBERNETES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
_DEBIAN = ("containerd", "ctr", "containerd-shim-runc-v2", "runc", "dnsmasq")

_ADDRESSES = {
    "type": "host-local",
    "ranges": [[{"subnet": "10.244.0.0/24"}]],
    "routes": [{"dst": "0.0.0.0/0"}],
}
_BRIDGE: Mapping[str, Any] = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": _ADDRESSES}],
}

_KUBELET: Mapping[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failCgroupV1": False,
    "failSwapOn": False,
    # A lower one is refused where there is no CAP_SYS_RESOURCE.
    "oomScoreAdj": 0,
    "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
    "clusterDNS": [DNS_ADDRESS],
    "clusterDomain": "cluster.local",
    "resolvConf": "",
    # Rotated secrets arrive at once.
    "syncFrequency": "10s",
    "configMapAndSecretChangeDetectionStrategy": "Watch",
    "volumePluginDir": "/var/lib/kubelet-plugins",
}

_CONTAINERD = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{networks}"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter}"
"""


def why_no_node() -> str:
    """Why no node can run here; empty if one can."""
    folder = _plugins()
    reasons = [missing_binaries(*_KUBERNETES, *_DEBIAN), why_no_machine()]
    names = ("loopback",) if enforces_policies() else ("bridge", "host-local", "loopback")
    reasons += [f"no {name} in {folder}" for name in names if not (folder / name).exists()]
    if enforces_policies() and not any(folder.glob("*.conflist")):
        reasons.append(f"no *.conflist in {folder}")
    if not Path("/dev/kmsg").exists():
        reasons.append("no /dev/kmsg, which the kubelet reads")
    return "; ".join(filter(None, reasons))


def enforces_policies() -> bool:
    """Whether a plugin is given that enforces NetworkPolicies."""
    return bool(os.environ.get("KUBERNETES_CNI"))


def snapshotter(folder: Path) -> str:
    """How layers of images are put together in a folder: no overlay can be made in another one."""
    kind = subprocess.check_output(["stat", "--file-system", "--format=%T", folder], text=True).strip()
    return "native" if kind == "overlayfs" else "overlayfs"


class Node:
    """A running node; `run_node` makes one and ends it."""

    def __init__(self, server: ApiServer, machine: Sequence[str]) -> None:
        self.server = server
        self._machine = machine

    def kubectl(self, *args: str, objects: Sequence[Mapping[str, Any]] = ()) -> str:
        """Run kubectl, which is given objects on its standard input; returns its output."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        done = subprocess.run(self.command(*args), input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def command(self, *args: str) -> list[str]:
        """The command that runs kubectl."""
        return [str(find_binary("kubectl")), f"--kubeconfig={self.server.kubeconfig}", *args]

    def ctr(self, *args: str) -> None:
        """Run containerd's client, on the kubelet's images."""
        subprocess.run([*self._machine, "ctr", "--namespace=k8s.io", *args], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def run_node(folder: Path, archives: Sequence[Path]) -> Iterator[Node]:
    """Run a cluster of one node that has images, among them `PAUSE`; this thread is then in its network."""
    with ExitStack() as stack:
        machine = stack.enter_context(own_machine(folder))
        flags = {"bind_address": ADDRESS, "advertise_address": ADDRESS, "secure_port": 443}
        more = {"disable_admission_plugins": "", "kubelet_preferred_address_types": "InternalIP"}
        server = stack.enter_context(run_api_server(folder, **flags, **more))
        node, kubeconfig = Node(server, machine), {"kubeconfig": server.kubeconfig}
        authority = {"root-ca-file": folder / "certificates" / "apiserver.crt"}
        key = {"service-account-private-key-file": folder / "account.key"}
        alone = {**kubeconfig, "leader-elect": "false"}
        stack.enter_context(running("kube-controller-manager", {**alone, **authority, **key}, folder))
        stack.enter_context(running("kube-scheduler", alone, folder))
        stack.enter_context(run_dns(server, folder))
        stack.enter_context(running("containerd", {"config": _write_containerd(folder)}, folder, machine))
        probe = [*machine, "ctr", "version"]
        wait_until(lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0, "containerd")
        for archive in archives:
            node.ctr("images", "import", str(archive))
        config = folder / "kubelet.json"
        config.write_text(json.dumps(_KUBELET), encoding="utf-8")
        own = {**kubeconfig, "config": config, "hostname-override": "node", "node-ip": ADDRESS}
        stack.enter_context(running("kubelet", own, folder, machine))
        wait_until(lambda: _is_ready(server), "node that is ready")
        yield node


def _is_ready(server: ApiServer) -> bool:
    conditions = [each for node in server.get("/api/v1/nodes")["items"] for each in node["status"]["conditions"]]
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _plugins() -> Path:
    return Path(os.environ.get("KUBERNETES_CNI") or "/usr/lib/cni")


def _write_containerd(folder: Path) -> Path:
    networks, config = _plugins(), folder / "containerd.toml"
    if not enforces_policies():
        networks = folder / "networks"
        networks.mkdir()
        (networks / "bridge.conflist").write_text(json.dumps(_BRIDGE), encoding="utf-8")
    places = {"pause": PAUSE, "plugins": _plugins(), "networks": networks, "snapshotter": snapshotter(folder)}
    config.write_text(_CONTAINERD.format_map(places), encoding="utf-8")
    return config
