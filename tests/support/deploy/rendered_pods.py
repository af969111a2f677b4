"""Rendered pods that run as processes on loopback, and what a cluster does for them.

Each pod has a loopback address of its own, so that ports stay as they are rendered. An argument, or a variable, is
changed in three ways only: the kubelet's `$(VARIABLE)`; a name that DNS would resolve, or 0.0.0.0, becomes an address;
a folder that the container mounts becomes the folder that the test has for the volume. Nothing here limits or confines
a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tests.support.cells.certificates import Authority
from tests.support.deploy.chart import Tree, find
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port
from tests.support.system.processes import ROOT, module_environment, python_command
from tests.support.system.scraping import get

NAMESPACE = "ns"
_SUFFIXES = ("", f".{NAMESPACE}", f".{NAMESPACE}.svc", f".{NAMESPACE}.svc.cluster.local")
_LWS = "leaderworkerset.sigs.k8s.io"
_POLL_S = 0.05
_VARIABLE = re.compile(r"\$\((\w+)\)")
_NAME = re.compile(r"[\w.-]+")
_FOLDER = re.compile(r"(?:(?<==)|^)/\w+(?=/|$)")


@dataclass(slots=True)
class Pod:
    """A pod and its one container.

    Attributes:
        name: As a cluster would call it.
        labels: The template's, and those of its controller.
        spec: As rendered.
        address: Its loopback address.
        subdomain: The Service below whose name DNS has the pod's name; empty if none.
        variables: What its controller adds to the container's environment.
        names: What DNS resolves.
        mounts: The folder for each `mountPath` of the container.
        folder: Its own.
    """

    name: str
    labels: Mapping[str, str]
    spec: Tree
    address: str
    subdomain: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    folder: Path = Path()
    _process: subprocess.Popen[str] | None = None

    @property
    def component(self) -> str:
        """The component that it belongs to."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def log_path(self) -> Path:
        """Where its container writes its errors."""
        return self.folder / "log"

    def start(self, stderr: IO[str], *, stdout: int | None = None) -> subprocess.Popen[str]:
        """Start its container's process, which ends when this one ends, in whatever way."""
        self._process = subprocess.Popen(
            self._command(), cwd=ROOT, env=self._environment(), stderr=stderr, text=True, stdout=stdout
        )
        return self._process

    def first_container(self) -> Pod:
        """The pod with the container that runs before its own, and a log of that one."""
        folder = self.folder / "first"
        folder.mkdir()
        return replace(self, spec={**self.spec, "containers": self.spec["initContainers"]}, folder=folder)

    def has_port(self, name: str) -> bool:
        """Whether it has a port of this name."""
        return any(each["name"] == name for each in self._container.get("ports", []))

    def port(self, name: str) -> int:
        """The number of a named port."""
        return next(int(each["containerPort"]) for each in self._container["ports"] if each["name"] == name)

    def kill(self) -> None:
        """Kill its container's process, and wait until it is gone."""
        assert self._process is not None, f"{self.name} was never started"
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """End its container's process as the kubelet does at a roll; returns its exit code."""
        assert self._process is not None, f"{self.name} was never started"
        self._process.terminate()
        return self._process.wait(PATIENCE_S)

    async def wait_until_probed(self, kind: str) -> None:
        """Wait until a probe, such as `startupProbe`, succeeds as the kubelet would send it; the process must live."""
        probe = self._container[kind]["httpGet"]
        address = f"{self.address}:{self.port(probe['port'])}"
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert self._process is not None, f"{self.name} was never started"
                assert self._process.poll() is None, f"{self.name} has ended"
                with contextlib.suppress(OSError):
                    if 200 <= (await get(address, probe["path"])).status < 400:
                        return
                await asyncio.sleep(_POLL_S)

    @property
    def _container(self) -> Tree:
        container: Tree
        [container] = self.spec["containers"]
        return container

    def _command(self) -> list[str]:
        container = self._container
        program: str = container["command"][0]
        words = [self._place(word) for word in (*container["command"][1:], *container["args"])]
        if program == "python3":
            return python_command(*words)
        # The image's PATH has the programs of the environment that Python runs in.
        path = shutil.which(program, path=str(Path(sys.executable).parent))
        assert path is not None, f"no image has the program {program!r}"
        return python_command(path, *words)

    def _place(self, word: str) -> str:
        variables = self._variables()
        word = _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word)
        table = {**self.names, "0.0.0.0": self.address}
        word = _NAME.sub(lambda match: table.get(match[0], match[0]), word)
        return _FOLDER.sub(lambda match: str(self.mounts.get(match[0], match[0])), word)

    def _variables(self) -> dict[str, str]:
        rendered = {}
        for each in self._container.get("env", []):
            reference = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            label = reference.removeprefix("metadata.labels['").removesuffix("']")
            rendered[each["name"]] = self.labels[label] if label else each["value"]
        return {**self.variables, **rendered}

    def _environment(self) -> dict[str, str]:
        own = {"TMPDIR": str(self.mounts["/tmp"])} if "/tmp" in self.mounts else {}
        return module_environment() | own | {name: self._place(value) for name, value in self._variables().items()}


class Cluster:
    """The pods of rendered objects.

    Attributes:
        authority: Signs the certificates that cert-manager would make.
        pods: All pods, those of tests included.
    """

    def __init__(self, objects: Sequence[Tree], folder: Path, claims: Mapping[str, Path]) -> None:
        """Make the pods; none is started.

        Args:
            folder: For volumes and logs.
            claims: The folder for each PersistentVolumeClaim.
        """
        self._objects = objects
        self._folder = folder
        self._claims = claims
        self.authority = Authority()
        # No other test run has this network as long as the port is reserved.
        self._network = "127.{}.{}".format(*divmod(free_port(), 256))
        self.pods = [pod for each in objects for pod in self._pods_of(each)]
        for number, pod in enumerate(self.pods, start=1):
            pod.address = f"{self._network}.{number}"
        names = self._names()
        for pod in self.pods:
            pod.names = names
            pod.folder = folder / pod.name
            pod.mounts = self._mounts(pod)

    def of(self, component: str) -> list[Pod]:
        """The pods of a component."""
        return [pod for pod in self.pods if pod.component == component]

    def secret(self, name: str) -> Path:
        """A folder with the files of a secret that cert-manager would make of a rendered Certificate."""
        folder = self._folder / "secrets" / name
        if not folder.exists():
            [spec] = [each["spec"] for each in find(self._objects, "Certificate") if each["spec"]["secretName"] == name]
            issued = self.authority.issue(dns=spec["dnsNames"], uris=spec["uris"])
            files = {"tls.crt": issued.certificate, "tls.key": issued.key, "ca.crt": self.authority.pem}
            folder.mkdir(parents=True)
            for file, data in files.items():
                (folder / file).write_bytes(data)
        return folder

    def _pods_of(self, owner: Tree) -> Iterator[Pod]:
        """What the owner's controller would make."""
        name, spec = owner["metadata"]["name"], owner.get("spec", {})
        match owner["kind"]:
            case "Pod":
                yield Pod(name, owner["metadata"]["labels"], spec, "")
            case "Deployment":
                for number in range(spec["replicas"]):
                    yield _make_pod(f"{name}-{number}", spec["template"])
            case "Job":
                yield _make_pod(name, spec["template"])
            case "StatefulSet":
                for number in range(spec["replicas"]):
                    label = {"apps.kubernetes.io/pod-index": str(number)}
                    yield _make_pod(f"{name}-{number}", spec["template"], label, spec["serviceName"])
            case "LeaderWorkerSet":
                yield from _group_pods(name, spec)

    def _names(self) -> dict[str, str]:
        """What DNS has for the Services, all of which are headless; of several pods' addresses the first."""
        selectors = {each["metadata"]["name"]: each["spec"]["selector"] for each in find(self._objects, "Service")}
        for each in find(self._objects, "LeaderWorkerSet"):
            # Its controller makes this Service.
            selectors[each["metadata"]["name"]] = {f"{_LWS}/name": each["metadata"]["name"]}
        names: dict[str, str] = {}
        for (service, selector), suffix in itertools.product(selectors.items(), _SUFFIXES):
            for pod in self.pods:
                if selector.items() <= pod.labels.items():
                    names.setdefault(f"{service}{suffix}", pod.address)
                    if pod.subdomain == service:
                        names[f"{pod.name}.{service}{suffix}"] = pod.address
        return names

    def _mounts(self, pod: Pod) -> dict[str, Path]:
        volumes = {each["name"]: each for each in pod.spec.get("volumes", [])}
        [container] = pod.spec["containers"]
        mounts = container.get("volumeMounts", [])
        pod.folder.mkdir(parents=True)
        return {each["mountPath"]: self._volume(pod, volumes[each["name"]]) for each in mounts}

    def _volume(self, pod: Pod, volume: Tree) -> Path:
        if "persistentVolumeClaim" in volume:
            claim: str = volume["persistentVolumeClaim"]["claimName"]
            return self._claims[claim]
        folder = pod.folder / str(volume["name"])
        folder.mkdir()
        if "secret" in volume:
            source = self.secret(volume["secret"]["secretName"])
            for file in volume["secret"].get("items") or [
                {"key": each.name, "path": each.name} for each in source.iterdir()
            ]:
                shutil.copy(source / file["key"], folder / file["path"])
        else:
            assert "emptyDir" in volume, f"the test has no folder for {volume}"
        return folder


def _make_pod(
    name: str,
    template: Tree,
    labels: Mapping[str, str] | None = None,
    subdomain: str = "",
    variables: Mapping[str, str] | None = None,
) -> Pod:
    return Pod(
        name, {**template["metadata"]["labels"], **(labels or {})}, template["spec"], "", subdomain, variables or {}
    )


def _group_pods(name: str, spec: Tree) -> Iterator[Pod]:
    """The pods of a LeaderWorkerSet whose groups share a Service: a leader has its group's name."""
    size = spec["leaderWorkerTemplate"]["size"]
    for group, index in itertools.product(range(spec["replicas"]), range(size)):
        leader = f"{name}-{group}"
        labels = {f"{_LWS}/name": name, f"{_LWS}/group-index": str(group), f"{_LWS}/worker-index": str(index)}
        variables = {
            "LWS_LEADER_ADDRESS": f"{leader}.{name}.{NAMESPACE}",
            "LWS_GROUP_SIZE": str(size),
            "LWS_WORKER_INDEX": str(index),
        }
        pod_name = f"{leader}-{index}" if index else leader
        yield _make_pod(pod_name, spec["leaderWorkerTemplate"]["workerTemplate"], labels, name, variables)


@contextlib.contextmanager
def running(pods: Sequence[Pod]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start pods without waiting for them; they are killed at the end. Gives their containers' processes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_failures(pods))
        processes = []
        for pod in pods:
            with pod.log_path.open("a") as log:
                processes.append(stack.enter_context(pod.start(log)))
                stack.callback(processes[-1].kill)
        yield processes


@contextlib.contextmanager
def logging_failures(pods: Sequence[Pod]) -> Iterator[None]:
    """After a failure, write what pods have logged to stderr, which pytest shows."""
    try:
        yield
    except BaseException:
        for pod in pods:
            sys.stderr.write(f"{pod.name}:\n{pod.log_path.read_text(encoding='utf-8')}\n")
        raise
